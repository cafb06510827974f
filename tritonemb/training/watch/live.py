"""A training run on a terminal: a bar and a table that stay at the bottom, and lines that scroll above them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tritonemb.training.callbacks import Callback, CheckpointSaved, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.watch.lines import (
    checkpoint_line,
    epoch_done,
    eta,
    evaluation_line,
    fold,
    message_line,
    start_line,
    summary,
)
from tritonemb.training.watch.text import duration, learning_rate, of, percent, printable, size

REFRESH_SECONDS = 0.5
MAX_WIDTH = 100
GAP = 3  # columns between the pairs of a row


@dataclass
class State:
    """What is to be seen.

    Args:
        auc, best_auc: on the validation rows, of the last evaluation and of the best since the start.
        first: when the first step ended, and the samples done by then.
        drawn: when the view was last drawn.
    """

    start: FitStart
    step: StepEnd
    log: Log | None = None
    auc: float | None = None
    best_auc: float | None = None
    first: tuple[float, int] | None = None
    drawn: float = -math.inf


class LiveView(Callback):
    """Shows training on a terminal; drawn from `on_step`, so no thread of it competes with training.

    Args:
        stream: a terminal.
        clock: seconds, for tests.
    """

    essential = False

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream, self._clock = stream, clock
        self._console = Console(file=stream, highlight=False, force_terminal=True, force_jupyter=False)
        self._live: Live | None = None
        self._state = State(FitStart(), StepEnd(0, 0, 0))

    def on_start(self, start: FitStart) -> None:
        self._state = State(start, StepEnd(start.first_step, 0, start.samples_done))
        self._say(fold(start_line(start), self._console.width))
        # What others print on the same terminal must go through the view, to be above the bar.
        shared = self._stream in (sys.stdout, sys.stderr)
        self._live = Live(
            console=self._console,
            get_renderable=self._view,
            auto_refresh=False,
            redirect_stdout=shared and sys.stdout.isatty(),
            redirect_stderr=shared and sys.stderr.isatty(),
        )
        self._live.start(refresh=True)

    def on_step(self, step: StepEnd) -> None:
        now = self._clock()
        if self._state.first is None:
            self._state.first = now, step.samples
        self._state.step = step
        self._draw(now)

    def on_log(self, log: Log) -> None:
        self._state.log = log
        self._draw(self._clock())

    def on_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.split == "validation":
            self._state.auc = evaluation.metrics.auc
            if evaluation.best:  # after a resume the first one may not be
                self._state.best_auc = self._state.auc
        width = self._console.width
        self._say(fold(evaluation_line(evaluation, self._state.start, width), width), bold=evaluation.best)

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self._say(fold(checkpoint_line(saved), self._console.width))

    def on_message(self, text: str) -> None:
        self._say(message_line(text), bold=True)

    def on_end(self, end: FitEnd | None) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.transient = end is not None  # after a failure the last state stays to be seen
            live.stop()
        if end is not None:
            self._say(summary(end))

    def _say(self, text: str, bold: bool = False) -> None:
        shown = Text(printable(text, self._console.encoding), style="bold" if bold else "")
        self._console.print(shown, soft_wrap=True)

    def _draw(self, now: float) -> None:
        if self._live is not None and now - self._state.drawn >= REFRESH_SECONDS:
            self._state.drawn = now
            self._live.refresh()

    def _view(self) -> RenderableType:
        width = min(self._console.width, MAX_WIDTH)
        return Group(self._bar(width), Text(), side_by_side(self._pairs(), width))

    def _bar(self, width: int) -> RenderableType:
        done, total = self._state.step.samples, self._state.start.total_samples
        if not total:
            return Text(f"{done:,} samples", no_wrap=True, overflow="ellipsis")
        remaining = eta(done, self._speed(), self._state.start)
        left = "" if remaining is None else f"  ETA {duration(remaining)}"
        text = f"{percent(min(done / total, 1.0)):>5}{left:<11}"
        if width >= 70:
            text = f"{of(done, total)} samples  {text}"
        row = Table.grid(padding=(0, 2))
        row.add_row(ProgressBar(total, min(done, total), width=max(8, width - len(text) - 2)), Text(text, no_wrap=True))
        return row

    def _speed(self) -> float:
        """Samples a second of the last log, before it those since the first step."""
        if self._state.log is not None:
            return self._state.log.samples_per_second
        if self._state.first is None or self._clock() <= self._state.first[0]:
            return 0.0
        return (self._state.step.samples - self._state.first[1]) / (self._clock() - self._state.first[0])

    def _pairs(self) -> list[tuple[str, str]]:
        step, log, start = self._state.step, self._state.log, self._state.start
        rates = "-" if log is None else f"{learning_rate(log.dense_lr)}, {learning_rate(log.table_lr)}"
        # As wide as they will get, where that is known: the view should not move about.
        return [
            ("step", of(step.step, start.total_steps).ljust(len(of(start.total_steps or 0, start.total_steps)))),
            ("epoch", epoch_done(step.epoch, step.samples, start)),
            ("loss", "-" if log is None else f"{log.loss:.4f}"),
            ("samples/s", ("-" if log is None else f"{log.samples_per_second:,.0f}").ljust(7)),
            ("data wait", "-" if log is None else percent(log.data_wait)),
            ("memory", "-" if log is None else size(log.memory_bytes)),
            ("validation AUC", "-" if self._state.auc is None else f"{self._state.auc:.4f}"),
            ("best AUC", "-" if self._state.best_auc is None else f"{self._state.best_auc:.4f}"),
            ("lr dense, tables", rates),
        ]


def side_by_side(pairs: list[tuple[str, str]], width: int) -> Table:
    """Names and values, read downwards, in as many pairs a row (3, 2 or 1) as fit into `width`."""
    for across in (3, 2, 1):
        rows = -(-len(pairs) // across)
        columns = [pairs[i : i + rows] for i in range(0, len(pairs), rows)]
        widths = [tuple(max(len(pair[i]) for pair in column) for i in (0, 1)) for column in columns]
        if sum(name + 2 + value for name, value in widths) + GAP * (len(columns) - 1) <= width:
            break
    table = Table.grid()
    for number, (name, value) in enumerate(widths):
        table.add_column(style="dim", width=name + 2, no_wrap=True)
        table.add_column(style="bold", width=value + (GAP if number < len(columns) - 1 else 0), no_wrap=True)
    for row in range(rows):
        table.add_row(*(text for column in columns if row < len(column) for text in column[row]))
    return table
