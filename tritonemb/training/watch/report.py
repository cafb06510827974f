"""The report of a run: one page with its numbers, curves, configuration and checkpoints, made from the run log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from tritonemb.training.callbacks import Callback, FitEnd
from tritonemb.training.watch.chart import BYTES, COUNT, PLAIN, RATE, SHARE, Level, Point, Unit, chart, is_drawn
from tritonemb.training.watch.lines import took
from tritonemb.training.watch.markup import escape, page, table, tile
from tritonemb.training.watch.run_log import read_run_log
from tritonemb.training.watch.text import of, size
from tritonemb.utils import write_whole

Event = Mapping[str, Any]


class Report(Callback):
    """Writes the report when training ends, however it ends. The callback that writes the log comes before this one.

    Args:
        path: of the page.
        log_path: of the run log.
    """

    essential = False

    def __init__(self, path: Path | str, log_path: Path | str) -> None:
        self._path, self._log_path = Path(path), Path(log_path)

    def on_end(self, end: FitEnd | None) -> None:
        write_report(self._path, self._log_path)


def write_report(path: Path | str, log_path: Path | str) -> None:
    """Make the page at `path` from a run log, of a run that still goes on, too.

    Raises:
        FileNotFoundError, ValueError: as `read_run_log`.
    """
    write_whole(Path(path), render(read_run_log(log_path)))


def render(events: Sequence[Event]) -> str:
    """The page of the events of a run log."""
    run = _Run(events)
    title = " on ".join(str(run.config[key]) for key in ("model", "data") if isinstance(run.config.get(key), str))
    title = title or "Training run"
    body = [
        _header(title, run),
        f'<div class="tiles">{"".join(_tiles(run))}</div>',
        "<h2>Training</h2>",
        f'<div class="charts">{"".join(_charts(run))}</div>',
        '<h2>The run</h2><div class="columns">',
        *_tables(run),
        "</div>",
    ]
    return page(f"{title}: training report", body)


class _Run:
    """The events of a run by their kind."""

    def __init__(self, events: Sequence[Event]) -> None:
        def of_kind(kind: str) -> list[Event]:
            return [event for event in events if event["event"] == kind]

        self.starts, self.logs, self.messages = of_kind("start"), of_kind("log"), of_kind("message")
        self.checkpoints = of_kind("checkpoint")
        self.validations = [event for event in of_kind("evaluation") if event.get("split") == "validation"]
        self.start: Event = self.starts[-1] if self.starts else {}
        self.end: Event = events[-1] if events and events[-1]["event"] == "end" else {}
        self.config: Mapping[str, Any] = self.start.get("config") or {}
        self.last_step = max((event["step"] for event in events if "step" in event), default=0)

    @property
    def resumed(self) -> list[int]:
        return sorted({start["first_step"] for start in self.starts if start["first_step"]})


def _header(title: str, run: _Run) -> str:
    reason = run.end.get("reason")
    kind = {"finished": "good", "early stop": "good", "failed": "bad"}.get(str(reason), "")
    badge = f"stopped by {reason}" if reason in ("SIGINT", "SIGTERM") else reason or "not ended"
    facts = [str(run.starts[0].get("time", ""))[:16].replace("T", " ") + " UTC"] if run.starts else []
    facts += [f"resumed at step {step:,}" for step in run.resumed]
    facts += [str(run.start["folder"])] if run.start.get("folder") else []
    error = run.end.get("error")
    return (
        f'<header><h1>{escape(title)} <span class="badge {kind}">{escape(badge)}</span></h1>'
        f"<p>{escape(' · '.join(facts))}</p></header>" + (f'<p class="error">{escape(error)}</p>' if error else "")
    )


def _tiles(run: _Run) -> Iterable[str]:
    test, last = run.end.get("test"), run.logs[-1] if run.logs else {}
    if test:
        best = run.end.get("best_auc")
        yield tile("test AUC", f"{test['auc']:.4f}", "" if best is None else f"best possible {best:.4f}")
        yield tile("test log loss", f"{test['log_loss']:.4f}")
        yield tile("normalized entropy", f"{test['normalized_entropy']:.4f}")
    best_one = max(run.validations, key=_auc, default=None)
    if best_one is not None:
        yield tile("validation AUC", f"{_auc(best_one):.4f}", f"best, at step {best_one['step']:,}")
    elif last and not test:
        yield tile("training loss", f"{last['loss']:.4f}", "last")
    rate = run.end.get("samples_per_second", last.get("samples_per_second"))
    if rate is not None:
        yield tile("samples/s", f"{rate:,.0f}")
    seconds = run.end.get("seconds", last.get("seconds"))
    if seconds is not None:
        yield tile("training time", took(seconds))
    samples = run.end.get("samples", last.get("samples"))
    total = run.start.get("total_steps")
    if total is not None and total != run.last_step:
        yield tile("steps", f"{run.last_step:,}", f"of {total:,}")
    else:
        yield tile("steps", f"{run.last_step:,}", "" if samples is None else f"{samples:,} samples")


def _charts(run: _Run) -> Iterable[str]:
    best = run.end.get("best_auc")
    logs, validations = run.logs, run.validations
    if not logs and not validations:
        yield '<p class="none">Nothing was logged.</p>'
    losses, aucs = _points(validations, "metrics", "log_loss"), _points(validations, "metrics", "auc")
    level = None if best is None else Level("best possible", best)
    yield _card("Training loss", "quality", _points(logs, "loss"), PLAIN, run)
    yield _card("Validation AUC", "quality", aucs, PLAIN, run, level=level)
    yield _card("Validation log loss", "quality", losses, PLAIN, run)
    yield _card("Samples a second", "speed", _points(logs, "samples_per_second"), COUNT, run, from_zero=True)
    yield _card("Waiting for data", "speed", _points(logs, "data_wait"), SHARE, run, from_zero=True)
    yield _card("Memory", "speed", _points(logs, "memory_bytes"), BYTES, run, from_zero=True)
    sent = [(log["step"], float(sum(log["sent"].values()))) for log in logs if log.get("sent")]
    yield _card("Sent between ranks, a step", "speed", sent, BYTES, run, from_zero=True)
    yield _card("Learning rate, dense", "rates", _points(logs, "dense_lr"), RATE, run, from_zero=True)
    yield _card("Learning rate, tables", "rates", _points(logs, "table_lr"), RATE, run, from_zero=True)


def _card(
    title: str,
    kind: str,
    points: Sequence[Point],
    unit: Unit,
    run: _Run,
    from_zero: bool = False,
    level: Level | None = None,
) -> str:
    if not points:
        return ""
    name = title[0].lower() + title[1:]
    picture = chart(name, points, unit, run.last_step, from_zero=from_zero, level=level, marks=run.resumed)
    last = points[-1][1]
    shown = unit.value(last) if is_drawn(last) else str(last)
    head = f'<h3>{escape(title)}</h3><span class="last">{escape(shown)}</span>'
    return f'<section class="card {kind}"><div class="head">{head}</div>{picture}</section>\n'


def _tables(run: _Run) -> Iterable[str]:
    yield table("Configuration", list(_flat(run.config)))
    yield table("Versions", list((run.start.get("versions") or {}).items()))
    checkpoints = [
        (of(saved["step"], None), _within(saved["path"], run), size(saved["num_bytes"]), f"{saved['seconds']:.1f} s")
        for saved in run.checkpoints
    ]
    yield table("Checkpoints", checkpoints, ("step", "path", "size", "time"), numbers=(0, 2, 3))
    names = ("auc", "log_loss", "normalized_entropy")
    validations = [
        (of(event["step"], None), *(f"{event['metrics'][name]:.4f}" for name in names)) for event in run.validations
    ]
    head = ("step", "AUC", "log loss", "normalized entropy")
    yield table("Validation", validations, head, numbers=(0, 1, 2, 3))
    last = next((log for log in reversed(run.logs) if log.get("sent")), None)
    if last is not None:
        kinds = [*last["sent"].items(), ("of these to other nodes", last["sent_across_nodes"])]
        rows = [(kind, size(num_bytes)) for kind, num_bytes in kinds]
        yield table("Sent between ranks", rows, ("what", "a step"), numbers=(1,))
    last = next((log for log in reversed(run.logs) if log.get("cache")), None)
    if last is not None:
        cache = last["cache"]
        rows = [
            ("distinct rows", f"{cache['rows']:,.0f}"),
            ("of these on the device", f"{100 * cache['hit_rate']:.1f} %"),
            ("read from where they live", size(round(cache["read"]))),
            ("written there", size(round(cache["written"]))),
            *_host_memory(cache),
            ("training waited", f"{1000 * cache['stall']:.1f} ms"),
        ]
        yield table("Rows that live elsewhere", rows, ("what", "a step"), numbers=(1,))
    messages = [(of(message["step"], None), message["text"]) for message in run.messages]
    yield table("Messages", messages, ("step", "message"), numbers=(0,))


def _host_memory(cache: Mapping[str, float]) -> list[tuple[str, str]]:
    """Lines on tables on disk with rows in host memory."""
    if "host_hits" not in cache:
        return []
    return [
        ("rows found in host memory", f"{cache['host_hits']:,.0f}"),
        ("read by the disk", size(round(cache["disk_read"]))),
        ("written by the disk", size(round(cache["disk_written"]))),
    ]


def _points(events: Sequence[Event], *keys: str) -> list[Point]:
    """Step and the value under `keys`, for each event that has one."""
    points = []
    for event in events:
        value: Any = event
        for key in keys:
            value = value[key]
        if value is not None:
            points.append((event["step"], float(value)))
    return points


def _within(path: str, run: _Run) -> str:
    """`path` without the folder of the run, where it is in there."""
    folder = run.start.get("folder")
    return str(PurePath(path).relative_to(folder)) if folder and PurePath(path).is_relative_to(folder) else path


def _auc(validation: Event) -> float:
    auc = float(validation["metrics"]["auc"])
    return -math.inf if math.isnan(auc) else auc


def _flat(value: Any, name: str = "") -> Iterable[tuple[str, str]]:
    """Nested values as rows; those of a list under their number, or under their name where they have one."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            named = isinstance(item, Mapping) and "name" in item
            key = item["name"] if named else number
            rest = {key: item[key] for key in item if key != "name"} if named else item
            yield f"{name}.{key}", _shown(rest)
    else:
        yield name, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    return "-" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)
