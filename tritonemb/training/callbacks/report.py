"""HTML pages with charts: the report of a run, from its log, and the comparison of runs.

The values of templates are computed here. A page is self-contained: no scripts, fonts or network requests.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from tritonemb.training.callbacks import Callback, FitEnd
from tritonemb.training.callbacks.console import escape_unprintable, format_bytes, format_seconds
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.checkpoint import RunFolder
from tritonemb.training.metrics import MEANS, Metrics
from tritonemb.training.toml import flat
from tritonemb.utils import Options, align_columns, atomic_write, join_names

WIDTH, HEIGHT = 400, 212  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 58, 384, 12, 172  # plot area within the chart
GEOMETRY = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
MAX_POINTS = 1000  # of a curve; thinned beyond it
MAX_DOTS = 30  # points of a curve that is drawn with dots
LARGEST = 1e300  # differences of larger values overflow
SECTIONS = ("sent", "cache", "dynamic", "servers")  # optional fields of a log event; the latest value is shown
PATH_OPTIONS = ("output.out",)  # not compared: it differs between all runs
MAX_VALUE_WIDTH = 60  # characters of a value on the terminal
METRICS = {
    "auc": "AUC", "log_loss": "log loss", "normalized_entropy": "normalized entropy",
    "best_threshold": "best threshold", "best_f1": "F1 at the best threshold", "num_samples": "rows",
    "gauc": "GAUC", "gauc_unweighted": "GAUC, unweighted",
}  # fmt: skip

Event = Mapping[str, Any]
Events = Sequence[Event]
Charts = Iterator[dict[str, Any]]
Curve = Sequence[tuple[float, float]]
Unit = tuple[Callable[[float], str], Callable[[float], str]]  # formatters of a value and of a tick


class HtmlReport(Callback):
    """Callback that writes the report when training ends or fails. Add it after the callback that writes the log."""

    essential = False

    def __init__(self, path: Path | str, log_path: Path | str) -> None:
        self._path, self._log_path = Path(path), Path(log_path)

    def on_end(self, end: FitEnd | None) -> None:
        write_report(self._path, self._log_path)


def write_report(path: Path | str, log_path: Path | str) -> None:
    """Write the report of a finished or running run to `path`. Raise the errors of `read_run_log`."""
    atomic_write(Path(path), render(read_run_log(log_path)))


def render(events: Events) -> str:
    kinds = defaultdict[str, list[Event]](list)
    for event in events:
        kinds[event["event"]].append(event)
    end: Event = events[-1] if events and events[-1]["event"] == "end" else {}
    start, tested, logs = last_event(events, "start"), test_event(events), kinds["log"]
    config, validations = start.get("config") or {}, [e for e in kinds["evaluation"] if e.get("split") == "validation"]
    last_step = max((event["step"] for event in events if "step" in event), default=0)
    resumed = sorted({event["first_step"] for event in kinds["start"] if event["first_step"]})
    names = [config[key] for key in ("model", "data") if isinstance(config.get(key), str)]
    return render_template(
        "report.html.jinja", title=" on ".join(names) or "Training run", kinds=kinds, start=start, end=end,
        config=config, resumed=resumed, validations=validations, best=max(validations, key=_auc, default=None),
        last_step=last_step, tested=tested, latest={**last_event(events, "log"), **end},
        charts=list(_charts(logs, validations, tested["metrics"], end, resumed, last_step)),
        **{key: next((log[key] for log in reversed(logs) if log.get(key)), None) for key in SECTIONS},
    )  # fmt: skip


def last_event(events: Events, kind: str) -> Event:
    """Return the last event of a kind; {} if there is none."""
    return next((event for event in reversed(events) if event["event"] == kind), {})


def test_event(events: Events) -> Event:
    """Return `step` and `metrics` of the last evaluation on the test rows; that of the best checkpoint is last."""
    end = last_event(events, "end")
    tests = (event for event in reversed(events) if event["event"] == "evaluation" and event["split"] == "test")
    return next(tests, {"step": end.get("step"), "metrics": end.get("test") or {}})


def render_template(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        finalize=_replace_unprintable,
    )  # fmt: skip
    environment.filters |= {"count": "{:,.0f}".format, "metric": "{:.4f}".format, "percent": "{:.1f} %".format}
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    return environment.get_template(template).render(GEOMETRY, **values)


def _replace_unprintable(value: Any) -> Any:
    """Replace characters of a string that HTML cannot show: control characters, undecodable file names."""
    if not isinstance(value, str):
        return value
    return type(value)("".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value))


def _auc(validation: Event) -> float:
    auc = float(validation["metrics"]["auc"])
    return -math.inf if math.isnan(auc) else auc


def _charts(
    logs: Events, validations: Events, test: Event, end: Event, resumed: Sequence[int], last_step: int
) -> Charts:
    metrics = [{"step": event["step"], **event["metrics"]} for event in validations]
    sent = [{"step": log["step"], "sent": sum(log["sent"].values())} for log in logs if log.get("sent")]
    for title, colour, events, key, unit in (
        ("Training loss", "quality", logs, "loss", PLAIN),
        ("Validation AUC", "quality", metrics, "auc", PLAIN),
        ("Validation log loss", "quality", metrics, "log_loss", PLAIN),
        ("Samples per second", "speed", logs, "samples_per_second", COUNT),
        ("Waiting for data", "speed", logs, "data_wait", SHARE),
        ("Memory", "speed", logs, "memory_bytes", BYTES),
        ("Sent between ranks per step", "speed", sent, "sent", BYTES),
        ("Learning rate, dense", "rates", logs, "dense_lr", RATE),
        ("Learning rate, tables", "rates", logs, "table_lr", RATE),
    ):
        if points := [(event["step"], float(event[key])) for event in events if event[key] is not None]:
            level = end.get("best_auc") if key == "auc" else None
            plot = chart([points], unit, last_step, from_zero=colour != "quality", level=level, resumed=resumed)
            yield {"title": title, "colour": colour, **plot}
    if bins := test.get("calibration"):  # beside the diagonal, the curve of a calibrated model
        curve = [(score, rate) for _, score, rate in bins]
        plot = chart([curve, [(0.0, 0.0), (1.0, 1.0)]], PLAIN, 1, from_zero=True, x="mean score")
        yield {"title": "Share of clicks", "colour": "quality", **plot, "last": "calibration"}


def chart(
    curves: Sequence[Curve], unit: Unit, last_step: int, *, from_zero: bool = False, level: float | None = None,
    resumed: Sequence[int] = (), x: str = "step",
) -> dict[str, Any]:  # fmt: skip
    """Compute the SVG coordinates of curves for the template. `x` ranges to `last_step`; non-finite values are gaps."""
    show, show_tick = unit
    last, curves = curves[-1][-1][1], [thin(points) for points in curves]
    values = [y for points in curves for _, y in points if is_finite(y)]
    if not values:
        return {"last": str(last)}
    level = level if level is not None and is_finite(level) else None
    values += ([] if level is None else [level]) + ([0.0] if from_zero else [])
    y_ticks, last_step = ticks(min(values), max(values), outside=True), max(1, last_step)

    def x_of(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * min(max(step / last_step, 0.0), 1.0)

    def y_of(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    def plot_curve(points: Curve) -> dict[str, Any]:
        segments = groupby(points, lambda point: is_finite(point[1]))
        lines = [[(x_of(x), y_of(y)) for x, y in segment] for finite, segment in segments if finite]
        dots = [dot for line in lines if len(points) <= MAX_DOTS or len(line) == 1 for dot in line]
        return {"lines": [line for line in lines if len(line) > 1], "dots": dots}

    return {
        "x": x,
        "last": show(last) if is_finite(last) else str(last),
        "y_ticks": [(y_of(value), show_tick(value)) for value in y_ticks],
        "x_ticks": [(x_of(t), format_compact(t)) for t in ticks(0, last_step) if x != "step" or t == int(t)],
        "resumed": [(x_of(step), step) for step in resumed],
        "level": None if level is None else (y_of(level), show(level)),
        "curves": [plot_curve(points) for points in curves],
    }


def thin(points: Curve) -> Curve:
    """Thin a curve to `MAX_POINTS` points: the minimum, the maximum and the first gap of each bucket."""
    if len(points) <= MAX_POINTS:
        return points
    width = math.ceil(len(points) / (MAX_POINTS // 3))
    thinned = list[tuple[float, float]]()
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        finite_points, gaps = ([p for p in bucket if is_finite(p[1]) is finite] for finite in (True, False))
        extremes = [extreme(finite_points, key=itemgetter(1)) for extreme in (min, max) if finite_points]
        thinned += sorted({*extremes, *gaps[:1]})
    return thinned


def ticks(low: float, high: float, outside: bool = False) -> list[float]:
    """Choose about four round numbers within [low, high]; with `outside` at least two, which enclose it."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # equal up to rounding
        margin = abs(high) / 10 or 1.0
        low, high = low - margin, high + margin
    min_step = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(min_step))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= min_step * (1 - 1e-9))
    slack = (1e-9 if outside else -1e-9) * (high - low) / step
    round_first, round_last = (math.floor, math.ceil) if outside else (math.ceil, math.floor)
    first, last = round_first(low / step + slack), round_last(high / step - slack)
    return [number * step for number in range(first, last + 1)]


def is_finite(value: float) -> bool:
    """Return whether a chart can show a value: finite, and not above `LARGEST`."""
    return abs(value) < LARGEST  # False for NaN


def format_compact(value: float) -> str:
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.4g}"


PLAIN: Unit = ("{:.4f}".format, "{:g}".format)
COUNT: Unit = ("{:,.0f}".format, format_compact)
SHARE: Unit = (lambda value: f"{100 * value:.1f} %", lambda value: f"{100 * value:g} %")
BYTES: Unit = (format_bytes, lambda value: format_bytes(value) if value else "0")
RATE: Unit = ("{:.3g}".format, "{:.3g}".format)


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
    """Write the page, return its tables as text. Raise ValueError or FileNotFoundError for a missing or damaged log."""
    if len(options.runs) < 2:
        raise ValueError(f"compare needs two or more runs, got {len(options.runs)}")
    if missing := [str(path) for path in options.runs if not RunFolder(path).log.exists()]:
        raise FileNotFoundError(f"not the folder of a run with a log: {join_names(missing)}")
    logs = [read_run_log(RunFolder(path).log) for path in options.runs]
    names, tables = list(map(str, options.runs)), tables_of(logs)
    page = render_template("compare.html.jinja", names=names, charts=list(_comparison_charts(logs)), tables=tables)
    atomic_write(options.out, page)
    differing_options, metrics = tables.values()
    cells = {key: [text[:MAX_VALUE_WIDTH] for text in texts] for key, texts in (differing_options | metrics).items()}
    rows = [["", *names], *([key, *texts] for key, texts in cells.items())]
    lines = [escape_unprintable(line, "utf-8") for line in align_columns(rows)]
    if len({*metrics.get("test rows", ())} - {"-"}) > 1:
        lines.append("note: the runs have different test rows, so their test metrics are not comparable")
    return "\n".join([*lines, "" if differing_options else "all options are the same", f"curves: {options.out}"])


def tables_of(logs: Sequence[Events]) -> dict[str, dict[str, list[str]]]:
    """Options that differ between runs, and metrics; one text per run, "-" for a missing value."""
    configs = [dict(flat(last_event(log, "start").get("config") or {})) for log in logs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in PATH_OPTIONS)
    options = {key: [_text(config.get(key)) for config in configs] for key in keys}
    differing_options = {key: texts for key, texts in options.items() if len(set(texts)) > 1}
    metrics = [dict(_metric_texts(log)) for log in logs]
    rows = {name: [texts.get(name, "-") for texts in metrics] for name in dict.fromkeys(chain(*metrics))}
    rows = {name: texts for name, texts in rows.items() if {*texts} != {"-"}}
    return {"Options": differing_options, "Metrics": rows}


def _metric_texts(log: Events) -> Iterator[tuple[str, str]]:
    end, test = last_event(log, "end"), test_event(log)
    latest = {**last_event(log, "log"), **end}
    for key, name in METRICS.items():
        of_one_label = key in ("best_threshold", "best_f1") and test["metrics"].get("labels")
        yield f"test {name}", "-" if of_one_label else _text(test["metrics"].get(key))
    for label, metrics in (test["metrics"].get("labels") or {}).items():
        yield f"test AUC [{label}]", _text(metrics["auc"])
    yield "tested at step", _text(test["step"], "{:,}" + ", the best" * bool(test.get("best")))
    validations = [event for event in log if event.get("split") == "validation"]
    aucs = [(float(event["metrics"]["auc"]), event["step"]) for event in validations]
    yield "best validation AUC", "{:.6g} at step {:,}".format(*max(aucs)) if aucs else "-"
    yield "last training loss", _text(latest.get("loss"))
    yield "samples/s", _text(latest.get("samples_per_second"), "{:,.0f}")
    yield "training time", format_seconds(latest["seconds"]) if "seconds" in latest else "-"
    yield "steps", _text(latest.get("step"), "{:,}")
    yield "ended by", end.get("reason", "not ended")


def _comparison_charts(logs: Sequence[Events]) -> Charts:
    for title, kind, key in (
        ("Validation AUC", "evaluation", "auc"),
        ("Validation log loss", "evaluation", "log_loss"),
        ("Training loss", "log", "loss"),
    ):
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


def describe_metrics(metrics: Metrics) -> str:
    """Format metrics as lines of text: one per number, then the calibration curve."""
    if metrics.labels:
        means = [(key, value) for key in MEANS if (value := getattr(metrics, key)) is not None]
        means = [(f"mean {METRICS[key]}", f"{value:.4f}") for key, value in means]
        texts = (f"\n{name}\n{describe_metrics(values)}" for name, values in metrics.labels.items())
        return "\n".join([*align_columns(means), *texts])
    values = ((key, name, getattr(metrics, key)) for key, name in METRICS.items())
    numbers = [(name, f"{n:.{0 if key == 'num_samples' else 4}f}") for key, name, n in values if n is not None]
    curve = [(f"{size:,}", f"{score:.4f}", f"{rate:.4f}") for size, score, rate in metrics.calibration]
    return "\n".join([*align_columns(numbers), *align_columns([("rows", "mean score", "share of clicks"), *curve])])
