"""What a user sees while a model trains: a progress bar on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from tritonemb.extras import require

REFRESH_SECONDS = 0.5


class Progress(Protocol):
    def advance(self, num_samples: int, loss: Tensor) -> None:
        """A step is done; `loss` is a 0-d tensor that may still be computing."""

    def say(self, line: str) -> None: ...


class Silent:
    def advance(self, num_samples: int, loss: Tensor) -> None:
        pass

    def say(self, line: str) -> None:
        pass


class Lines(Silent):
    def say(self, line: str) -> None:
        print(line, flush=True)


class Bar:
    """A rich progress bar. The loss is read at most twice a second, since reading it waits for the device."""

    def __init__(self, bar: object, num_samples: int) -> None:
        self._bar = bar
        self._task = bar.add_task("training", total=num_samples, loss=float("nan"))  # type: ignore[attr-defined]
        self._pending = 0
        self._refreshed = time.perf_counter()

    def advance(self, num_samples: int, loss: Tensor) -> None:
        self._pending += num_samples
        now = time.perf_counter()
        if now - self._refreshed >= REFRESH_SECONDS:
            self._bar.update(self._task, advance=self._pending, loss=float(loss))  # type: ignore[attr-defined]
            self._pending, self._refreshed = 0, now

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False)  # type: ignore[attr-defined]


@contextmanager
def show_progress(num_samples: int, verbose: bool) -> Iterator[Progress]:
    """Progress over `num_samples` samples; nothing at all if not `verbose`."""
    if not verbose:
        yield Silent()
        return
    console = require("rich.console").Console()
    if not console.is_terminal:
        yield Lines()
        return
    rich = require("rich.progress")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TextColumn("loss {task.fields[loss]:.4f}"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as bar:
        yield Bar(bar, num_samples)
