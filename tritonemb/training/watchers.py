"""All callbacks of a fit as one: who is told, in which order, and whose failure ends training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

from tritonemb.training.callbacks import Callback, CheckpointSaved, Evaluation, FitEnd, FitStart, Log, StepEnd


class Watchers:
    """Tells callbacks what happens.

    An exception of a callback ends training, but for an `OSError` of one that is not `essential` (the display, the log,
    the report): that is told once on stderr, and training goes on.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._started: list[Callback] = []
        self._complained: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def on_start(self, start: FitStart) -> None:
        for callback in self._callbacks:
            self._call(callback, lambda callback=callback: callback.on_start(start))  # type: ignore[misc]
            self._started.append(callback)

    def on_step(self, step: StepEnd) -> None:
        self._tell(lambda callback: callback.on_step(step))

    def on_log(self, log: Log) -> None:
        self._tell(lambda callback: callback.on_log(log))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._tell(lambda callback: callback.on_evaluation(evaluation))

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        self._tell(lambda callback: callback.on_checkpoint(saved))

    def on_message(self, text: str) -> None:
        self._tell(lambda callback: callback.on_message(text))

    def on_end(self, end: FitEnd | None) -> None:
        """Told to each that has been told of the start, whatever the others do.

        The first failure is raised at the end; beside that of training itself it becomes a note.
        """
        first: BaseException | None = None
        training = sys.exception()
        for callback in self._started:
            try:
                self._call(callback, lambda callback=callback: callback.on_end(end))  # type: ignore[misc]
            except BaseException as error:
                if training is not None:
                    training.add_note(f"besides, {type(callback).__name__}.on_end failed: {error!r}")
                first = first or error
        self._started = []
        if first is not None and training is None:
            raise first

    def _tell(self, what: Callable[[Callback], None]) -> None:
        for callback in self._started:
            self._call(callback, lambda callback=callback: what(callback))  # type: ignore[misc]

    def _call(self, callback: Callback, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            if callback.essential:
                raise
            if id(callback) not in self._complained:
                self._complained.add(id(callback))
                with contextlib.suppress(OSError):
                    name = type(callback).__name__
                    print(f"note: {name} cannot write: {error}. Training goes on", file=sys.stderr, flush=True)
