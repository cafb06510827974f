"""Console display of training: a live progress bar on a terminal, plain lines in a file or a pipe.

Fields of a line are separated by two or more spaces and aligned in columns, so that scripts can split them.
"""

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tritonemb.training.callbacks import Callback, CheckpointSaved, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.metrics import Metrics
from tritonemb.utils import require

REFRESH_SECONDS = 0.5


def make_display(stream: TextIO | None = None) -> Callback:
    """Return a display for `stream`, by default standard output; raise MissingExtraError on a terminal without rich."""
    stream = sys.stdout if stream is None else stream
    return Lines(stream) if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown") else LiveView(stream)


class _Notes(logging.Handler):
    """Log handler that prints the library's log records, such as progress of kernel compilation, on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr, flush=True)


_NOTES = _Notes(logging.INFO)


class Lines(Callback):
    """Callback that prints a line for the start and every event but steps, and a summary at the end."""

    essential, eta = False, True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = FitStart()

    def on_start(self, start: FitStart) -> None:
        self._start = start
        self._print(start_line(start))
        logger = logging.getLogger("tritonemb")
        logger.addHandler(_NOTES)
        logger.setLevel(logging.INFO)

    def on_log(self, log: Log) -> None:
        self._print(log_line(log, self._start, self.eta))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        start = f"{evaluation.split}  {_step_field(evaluation.step, self._start)}"
        self._print(f"{start}{_metric_fields(evaluation.metrics)}{'  (best)' * evaluation.best}")
        for name, metrics in evaluation.metrics.labels.items():
            self._print(f"{start}{_metric_fields(metrics, f'[{name}]')}")

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self._print(f"checkpoint  {saved.path}  {format_bytes(saved.num_bytes)} in {saved.seconds:.1f} s")

    def on_message(self, text: str) -> None:
        self._print(f"note: {text}")

    def on_end(self, end: FitEnd | None) -> None:
        logging.getLogger("tritonemb").removeHandler(_NOTES)
        if end is not None:
            self._print(summary(end))

    def _print(self, text: str) -> None:
        print(escape_unprintable(text, self._stream.encoding), file=self._stream, flush=True)


class LiveView(Lines):
    """Callback that prints the lines of `Lines` above a progress bar, redrawn by the training thread."""

    eta = False  # the bar has it

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(stream)
        console = require("rich.console").Console
        self._console = console(file=stream, highlight=False, force_terminal=True, force_jupyter=False)
        self._clock = clock

    def on_start(self, start: FitStart) -> None:
        # Output of other code to the same terminal is redirected through rich, so that it appears above the bar.
        rich, is_std = require("rich.progress"), self._stream in (sys.stdout, sys.stderr)
        self._progress = rich.Progress(
            rich.TextColumn("{task.description}"), rich.BarColumn(None), rich.TaskProgressColumn(),
            rich.TimeRemainingColumn(), console=self._console, get_time=self._clock, expand=True, auto_refresh=False,
            redirect_stdout=is_std and sys.stdout.isatty(), redirect_stderr=is_std and sys.stderr.isatty(),
        )  # fmt: skip
        description = _step_field(start.first_step, start)
        self._task = self._progress.add_task(description, total=start.total_samples, completed=start.samples_done)
        self._last_refresh = -math.inf
        super().on_start(start)
        self._progress.start()

    def on_step(self, step: StepEnd) -> None:
        self._progress.update(self._task, completed=step.samples, description=_step_field(step.step, self._start))
        if (now := self._clock()) - self._last_refresh >= REFRESH_SECONDS:
            self._last_refresh = now
            self._progress.refresh()

    def on_end(self, end: FitEnd | None) -> None:
        self._progress.live.transient = end is not None  # after a failure the bar stays visible
        self._progress.stop()
        super().on_end(end)

    def _print(self, text: str) -> None:
        text = escape_unprintable(text, self._console.encoding)
        lines = [wrap_line(line, self._console.width) for line in text.split("\n")]
        self._console.print(require("rich.text").Text("\n".join(lines)), soft_wrap=True)


def start_line(start: FitStart) -> str:
    data, batch, samples = start.config.get("data"), start.config.get("batch_size"), start.total_samples
    work = "1 epoch" if start.num_epochs == 1 else f"{start.num_epochs:,} epochs"
    if samples is not None:
        all_epochs = start.epoch_samples is None or samples >= start.epoch_samples * start.num_epochs
        work = f"{'about ' * start.estimated}{samples:,} samples" + f" in {work}" * all_epochs
    ranks = f" on each of {start.num_ranks:,} ranks" * (start.num_ranks > 1)
    fields = ["training", data if isinstance(data, str) else None, work, f"batch {batch:,}{ranks}" if batch else None]
    fields.append(f"{start.total_steps:,} steps" if start.total_steps else None)
    fields.append(f"resumed at step {start.first_step:,}" if start.first_step else None)
    return "  ".join(filter(None, fields))


def log_line(log: Log, start: FitStart, eta: bool = False) -> str:
    """Line of a log event: step, loss, speed and memory, and with `eta` the remaining time where it is known."""
    rate, memory = log.samples_per_second, format_bytes(log.memory_bytes)
    line = f"{_step_field(log.step, start)}  epoch {_epoch_done(log, start)}  {f'loss {log.loss:.4f}':11}"
    line += f"  {f'{rate:,.0f} samples/s':16}  {f'wait {100 * log.data_wait:.0f} %':9}"
    if log.cpu:
        reader, step = (round(100 * log.cpu[part]) for part in ("reader", "step"))
        line += f"  {f'CPU {reader} % reader, {step} % step':27}"
    line += f"  {memory:7}"
    if eta and start.total_samples is not None and math.isfinite(rate) and rate > 0:
        line += f"  ETA {format_duration(max(0, start.total_samples - log.samples) / rate)}"
    return line.rstrip()


def summary(end: FitEnd) -> str:
    rows = list[tuple[str, str]]()
    if end.test is not None:
        best = "" if end.best_auc is None else f"  (Bayes-optimal {end.best_auc:.4f})"
        hint = "  (above 1: worse than always predicting the base rate; try lower learning rates, fewer epochs, or "
        hint += "--log-transform True where dense columns have large numbers)"
        entropy = f"{end.test.normalized_entropy:.4f}{hint * (end.test.normalized_entropy > 1)}"
        rows += [("test AUC", f"{end.test.auc:.4f}{best}"), ("log loss", f"{end.test.log_loss:.4f}")]
        rows.append(("normalized entropy", entropy))
        rows += [(f"test [{name}]", _metric_fields(metrics).strip()) for name, metrics in end.test.labels.items()]
    rows.append(("samples/s", f"{end.samples_per_second:,.0f}  (training took {format_seconds(end.seconds)})"))
    if end.reason != "finished":
        rows.append(("ended by", f"{end.reason} after step {end.step:,}"))
    return "\n".join(f"{name:18}  {text}" for name, text in rows)


def _metric_fields(metrics: Metrics, label: str = "") -> str:
    names = {"AUC": metrics.auc, "log loss": metrics.log_loss, "normalized entropy": metrics.normalized_entropy}
    values = {**names, "GAUC": metrics.gauc}.items()
    return "".join(f"  {name}{label} {value:.4f}" for name, value in values if value is not None)


def _step_field(step: int, start: FitStart) -> str:
    if start.total_steps is None:
        return f"step {step:,}"
    total = f"{start.total_steps:,}"
    return f"step {f'{step:,}/{total}':{2 * len(total) + 1}}"


def _epoch_done(log: Log, start: FitStart) -> str:
    """Epochs done, such as 0.32; if the samples per epoch are unknown, epoch/epochs, such as 1/3."""
    if not start.epoch_samples:
        return f"{log.epoch + 1:,}/{start.num_epochs:,}"
    epochs = log.samples / start.epoch_samples
    if start.estimated:  # only the integer part is certain
        epochs = min(max(epochs, log.epoch), log.epoch + 0.99)
    return f"{epochs:.2f}"


def wrap_line(line: str, width: int) -> str:
    """Break a line between its fields so that it fits `width`; a single field is not broken."""
    wrapped, size = "", 0
    for field in re.split(r"(?<=\S)(?=  +\S)", line):
        breaks = size > 0 and size + len(field) > width
        wrapped, size = wrapped + "\n" * breaks + field, len(field) + size * (not breaks)
    return wrapped


def format_seconds(seconds: float) -> str:
    """Format seconds: "12.3 s" below a minute, then as `format_duration`."""
    return f"{seconds:.1f} s" if seconds < 59.95 else format_duration(seconds)


def format_duration(seconds: float) -> str:
    """Format seconds as m:ss, from an hour on as h:mm:ss; "?" if not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, remainder = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def format_bytes(num_bytes: float) -> str:
    """Format bytes with three digits, in MB (10^6 bytes) or GB (10^9)."""
    value, unit = (num_bytes / 1e6, "MB") if num_bytes < 999.5e6 else (num_bytes / 1e9, "GB")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"


def escape_unprintable(text: str, encoding: str | None) -> str:
    """Escape control characters, which paths may contain, and characters that the encoding does not have."""
    escaped = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return escaped.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")
