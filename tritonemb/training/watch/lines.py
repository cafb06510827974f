"""A training run as plain lines: what goes to files, pipes and build logs.

The fields of a line are two or more blanks apart and keep their columns, so that lines can be read, searched and split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TextIO

from tritonemb.training.callbacks import Callback, CheckpointSaved, Evaluation, FitEnd, FitStart, Log
from tritonemb.training.watch.text import duration, of, percent, printable, size


class Lines(Callback):
    """Writes a line for the start, for every log, evaluation, checkpoint and message, and a summary at the end.

    Args:
        stream: flushed after every line.
    """

    essential = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = FitStart()

    def on_start(self, start: FitStart) -> None:
        self._start = start
        self._say(start_line(start))

    def on_log(self, log: Log) -> None:
        self._say(log_line(log, self._start))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._say(evaluation_line(evaluation, self._start))

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self._say(checkpoint_line(saved))

    def on_message(self, text: str) -> None:
        self._say(message_line(text))

    def on_end(self, end: FitEnd | None) -> None:
        if end is not None:
            self._say(summary(end))

    def _say(self, text: str) -> None:
        print(printable(text, self._stream.encoding), file=self._stream, flush=True)


def start_line(start: FitStart) -> str:
    """What is to be trained on."""
    fields = ["training"]
    data, batch_size = start.config.get("data"), find(start.config, "batch_size")
    if isinstance(data, str):
        fields.append(data)
    fields.append(amount(start))
    if batch_size is not None:
        fields.append(
            f"batch {batch_size:,}" + (f" on each of {start.num_ranks:,} ranks" if start.num_ranks > 1 else "")
        )
    if start.total_steps is not None:
        fields.append(f"{start.total_steps:,} steps")
    if start.first_step:
        fields.append(f"resumed at step {start.first_step:,}")
    return "  ".join(fields)


def amount(start: FitStart) -> str:
    """Samples and epochs of the whole run, as far as they are known."""
    epochs = "1 epoch" if start.num_epochs == 1 else f"{start.num_epochs:,} epochs"
    if start.total_samples is None:
        return epochs
    samples = f"{'about ' * start.estimated}{start.total_samples:,} samples"
    whole = start.epoch_samples is None or start.total_samples >= start.epoch_samples * start.num_epochs
    return f"{samples} in {epochs}" if whole else samples


def log_line(log: Log, start: FitStart) -> str:
    """Where training stands."""
    fields = [
        (step_field(log.step, start), 0),
        (f"epoch {epoch_done(log.epoch, log.samples, start)}", 0),
        (f"loss {log.loss:.4f}", 11),
        (f"{log.samples_per_second:,.0f} samples/s", 16),
        (f"wait {percent(log.data_wait)}", 9),
        (size(log.memory_bytes), 7),
    ]
    remaining = eta(log.samples, log.samples_per_second, start)
    if remaining is not None:
        fields.append((f"ETA {duration(remaining)}", 0))
    return "  ".join(text.ljust(width) for text, width in fields).rstrip()


def evaluation_line(evaluation: Evaluation, start: FitStart, width: int | None = None) -> str:
    """The metrics of a split, in shorter forms where it would take more than `width` columns."""
    metrics = evaluation.metrics
    for name, of_start in (("normalized entropy", start), ("NE", start), ("NE", FitStart())):
        fields = [
            evaluation.split,
            step_field(evaluation.step, of_start),
            f"AUC {metrics.auc:.4f}",
            f"log loss {metrics.log_loss:.4f}",
            f"{name} {metrics.normalized_entropy:.4f}",
        ]
        line = "  ".join(fields + ["(best)"] * evaluation.best)
        if width is None or len(line) <= width:
            break
    return line


def checkpoint_line(saved: CheckpointSaved) -> str:
    """Where a checkpoint is."""
    return f"checkpoint  {saved.path}  {size(saved.num_bytes)} in {saved.seconds:.1f} s"


def message_line(text: str) -> str:
    """Something that a person should read."""
    return f"note: {text}"


def summary(end: FitEnd) -> str:
    """What the run reached: the lines that it ends with."""
    lines = []
    if end.test is not None:
        best = "" if end.best_auc is None else f"  (best possible {end.best_auc:.4f})"
        lines = [
            f"test AUC            {end.test.auc:.4f}{best}",
            f"log loss            {end.test.log_loss:.4f}",
            f"normalized entropy  {end.test.normalized_entropy:.4f}",
        ]
    lines.append(f"samples/s           {end.samples_per_second:,.0f}  (training took {took(end.seconds)})")
    if end.reason != "finished":
        lines.append(f"ended by            {end.reason} after step {end.step:,}")
    return "\n".join(lines)


def took(seconds: float) -> str:
    """Seconds up to a minute, then as a duration."""
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


def step_field(step: int, start: FitStart) -> str:
    """`step done/total`, as wide as that of the last step."""
    return f"step {of(step, start.total_steps)}".ljust(len(f"step {of(start.total_steps or step, start.total_steps)}"))


def epoch_done(epoch: int, samples: int, start: FitStart) -> str:
    """Epochs done as 0.32, where the number of samples is known; else which epoch of how many it is."""
    if not start.epoch_samples:
        return of(epoch + 1, start.num_epochs)
    done = samples / start.epoch_samples
    if start.estimated:  # what is known for sure: which epoch it is
        done = min(max(done, epoch), epoch + 0.99)
    return f"{done:.2f}"


def eta(samples: int, samples_per_second: float, start: FitStart) -> float | None:
    """Seconds left after `samples` of the run; None where it cannot be said."""
    if start.total_samples is None or not math.isfinite(samples_per_second) or samples_per_second <= 0:
        return None
    return max(0, start.total_samples - samples) / samples_per_second


def fold(line: str, width: int) -> str:
    """`line` with breaks between its fields where it is wider than `width`; what has no fields stays as it is."""
    rows = [""]
    for field in re.split(r"(?<=\S)(?=  +\S)", line):
        if rows[-1] and len(rows[-1] + field) > width:
            rows.append("")
        rows[-1] += field
    return "\n".join(rows)


def find(config: Mapping[str, Any], name: str) -> Any:
    """The first value of that name, at any depth; None if there is none."""
    if name in config:
        return config[name]
    nested = (find(value, name) for value in config.values() if isinstance(value, Mapping))
    return next((value for value in nested if value is not None), None)
