"""Comparison of training runs from their logs: options that differ, metrics, curves."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tritonemb.training.callbacks.console import escape_unprintable, format_seconds
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.callbacks.report import PLAIN, Event, chart, last_event, render_template, test_event
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.toml import flat
from tritonemb.utils import Options, align_columns, atomic_write, join_names

PATH_OPTIONS = ("path", "output.out")  # not compared: they differ between all runs
MAX_VALUE_WIDTH = 60  # characters of a value on the terminal
METRICS = {
    "auc": "AUC", "log_loss": "log loss", "normalized_entropy": "normalized entropy",
    "best_threshold": "best threshold", "best_f1": "F1 at the best threshold", "num_samples": "rows",
}  # fmt: skip


@dataclass(frozen=True)
class CompareOptions(Options):
    """Compare runs: options that differ, metrics, and one page with their curves.

    Example: tritonemb compare runs/first runs/second

    Args:
        runs: folders of two or more runs; may be given first, without the flag.
        out: the HTML page to write.
    """

    POSITIONAL: ClassVar[str] = "runs"
    runs: tuple[Path, ...]
    out: Path = Path("compare.html")


def compare(options: CompareOptions) -> str:
    """Write the HTML page and return its tables as text. Raise ValueError or FileNotFoundError
    if a log is missing or damaged."""
    if len(options.runs) < 2:
        raise ValueError(f"compare needs two or more runs, got {len(options.runs)}")
    if missing := [str(path) for path in options.runs if not RunFolder(path).log.exists()]:
        raise FileNotFoundError(f"not the folder of a run with a log: {join_names(missing)}")
    logs = [read_run_log(RunFolder(path).log) for path in options.runs]
    names, tables = list(map(str, options.runs)), tables_of(logs)
    page = render_template("compare.html.jinja", names=names, charts=list(_charts(logs)), tables=tables)
    atomic_write(options.out, page)
    differing_options, metrics = tables.values()
    cells = {key: [text[:MAX_VALUE_WIDTH] for text in texts] for key, texts in (differing_options | metrics).items()}
    rows = [["", *names], *([key, *texts] for key, texts in cells.items())]
    lines = [escape_unprintable(line, "utf-8") for line in align_columns(rows)]
    if len({*metrics["test rows"]} - {"-"}) > 1:
        lines.append("note: the runs have different test rows, so their test metrics are not comparable")
    return "\n".join([*lines, "" if differing_options else "all options are the same", f"curves: {options.out}"])


def tables_of(logs: Sequence[Sequence[Event]]) -> dict[str, dict[str, list[str]]]:
    """Options that differ between runs, and metrics; one text per run, "-" for a missing value."""
    configs = [dict(flat(last_event(log, "start").get("config") or {})) for log in logs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in PATH_OPTIONS)
    options = {key: [_text(config.get(key)) for config in configs] for key in keys}
    differing_options = {key: texts for key, texts in options.items() if len(set(texts)) > 1}
    metrics = [dict(_metrics(log)) for log in logs]
    return {
        "Options": differing_options,
        "Metrics": {name: [values[name] for values in metrics] for name in metrics[0]},
    }


def _metrics(log: Sequence[Event]) -> Iterator[tuple[str, str]]:
    """Names and texts of a run's metrics; the same names for every run."""
    end, test = last_event(log, "end"), test_event(log)
    latest = {**last_event(log, "log"), **end}
    for key, name in METRICS.items():
        yield f"test {name}", _text(test["metrics"].get(key))
    yield "tested at step", _text(test["step"], "{:,}" + ", the best" * bool(test.get("best")))
    validations = [event for event in log if event.get("split") == "validation"]
    aucs = [(float(event["metrics"]["auc"]), event["step"]) for event in validations]
    yield "best validation AUC", "{:.6g} at step {:,}".format(*max(aucs)) if aucs else "-"
    yield "last training loss", _text(latest.get("loss"))
    yield "samples/s", _text(latest.get("samples_per_second"), "{:,.0f}")
    yield "training time", format_seconds(latest["seconds"]) if "seconds" in latest else "-"
    yield "steps", _text(latest.get("step"), "{:,}")
    yield "ended by", end.get("reason", "not ended")


def _charts(logs: Sequence[Sequence[Event]]) -> Iterator[dict[str, Any]]:
    for title, kind, key in (
        ("Validation AUC", "evaluation", "auc"), ("Validation log loss", "evaluation", "log_loss"),
        ("Training loss", "log", "loss"),
    ):  # fmt: skip
        # The value of an evaluation is among its metrics, that of a log event among its fields.
        selected = [[e for e in log if e["event"] == kind and e.get("split") in (None, "validation")] for log in logs]
        curves = [[(e["step"], float({**e, **e.get("metrics", {})}[key])) for e in events] for events in selected]
        if any(curves):
            last_step = max(step for curve in curves for step, _ in curve)
            plot = chart([curve or [(0, math.nan)] for curve in curves], PLAIN, last_step)
            yield {"title": title, "colour": "quality", **plot, "last": ""}


def _text(value: Any, form: str | None = None) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return form.format(value) if form else f"{value:.6g}" if isinstance(value, float) else str(value)
