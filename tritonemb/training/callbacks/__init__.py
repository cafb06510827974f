"""Events of a training run and the `Callback` interface. Its modules: display, run log, report, trackers, profiler."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any

from tritonemb.training.metrics import Metrics


@dataclass(frozen=True)
class FitStart:
    """Event before the first step of a new or resumed run.

    Args:
        first_step, samples_done: steps and samples of earlier processes; 0 for a new run.
        total_steps, total_samples, num_epochs: size of the whole run; None where it cannot be estimated.
        epoch_samples: samples per epoch; None where it cannot be estimated.
        estimated: whether the numbers of samples are estimates.
        folder: the run's folder, None if there is none.
        config: options as nested plain values; those of `Trainer(config=)`, by default none.
        versions: versions of Python, torch, tritonemb and other packages, and the device.
    """

    first_step: int = 0
    total_steps: int | None = None
    samples_done: int = 0
    total_samples: int | None = None
    epoch_samples: int | None = None
    estimated: bool = False
    num_epochs: int = 1
    num_ranks: int = 1
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepEnd:
    """Event after a step: steps and samples since the run began, and the epoch, from 0, of this step."""

    step: int
    epoch: int
    samples: int


@dataclass(frozen=True)
class Log(StepEnd):
    """Training loss, speed and memory, every `log_every` steps.

    Args:
        loss: mean training loss since the last log.
        dense_lr, table_lr: learning rates of the step; None if there are no such parameters.
        samples_per_second: since the last log, without evaluation and checkpoints.
        data_wait: fraction of that time that the trainer waited for a step to be prepared, 0 to 1.
        memory_bytes: resident memory of the process, or memory allocated on the GPU.
        seconds: training time since the run began, without evaluation and checkpoints.
        sent: bytes per step that all ranks sent to each other, by kind; mean since the last log.
        cache: statistics per step of this rank's cached tables, means since the last log: distinct `rows`, their
            `hit_rate` in device memory, bytes `read` from and `written` back to the tables, seconds of `stall` in which
            training waited for rows; with a host cache also `host_hits` (rows), `disk_read` and `disk_written` (bytes).
        dynamic: `DynamicStatistics` of this rank's tables by name, means; `rows`, `capacity`, `num_bytes` are current.
        servers: statistics by collection on embedding servers, see `tritonemb.server.metrics.totals`.
        ids_per_second: ids of this rank's batches, like `samples_per_second`.
        waits: `data_wait` by stage: `data`, reading; `ranks`, their agreement on the step; `rows`, exchange of ids and
            transfers to the device.
        cpu: shares of this process's CPU time since the last log: `reader`, threads that read data; `step`, the others.
    """

    loss: float
    dense_lr: float | None
    table_lr: float | None
    samples_per_second: float
    data_wait: float
    memory_bytes: int
    seconds: float
    sent: Mapping[str, int] = field(default_factory=dict)
    cache: Mapping[str, float] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ids_per_second: float = 0.0
    waits: Mapping[str, float] = field(default_factory=dict)
    cpu: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a split after `step` steps; `best` if no earlier evaluation of this run was better."""

    step: int
    epoch: int
    split: str
    metrics: Metrics
    best: bool


@dataclass(frozen=True)
class CheckpointSaved:
    """Event after a checkpoint is published: step, path, size, and seconds to write it."""

    step: int
    path: Path
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class FitEnd:
    """Event at the end of training.

    Args:
        reason: "finished", "early stop", "SIGINT" or "SIGTERM".
        step, samples, seconds: as in `Log`.
        samples_per_second: mean over this process, without its first step.
        test: metrics on the test rows; None if they were not evaluated.
        best_auc: the Bayes-optimal AUC; None if the data set does not have it.
    """

    reason: str
    step: int
    samples: int
    seconds: float
    samples_per_second: float
    test: Metrics | None = None
    best_auc: float | None = None


class Callback:
    """Base class of callbacks. Override the methods you need and pass an instance to `Trainer(callbacks=)`.

    Methods are called in the training thread, between steps, in the order of the callbacks; an exception ends training.
    `on_end` is called once for every `on_start`, also when training fails. On several ranks, every rank calls its own
    callbacks at the same steps, with equal numbers except speed, waiting time and memory.

    Attributes:
        essential: whether an `OSError` of a method ends training. If False, the first one is reported on stderr, and
            so is a different one of `on_end`.
        can_retry: whether the callback is called again after an `OSError` of `on_start`.
        model, data: the trainer's model and data set, from `on_start` on.
    """

    essential, can_retry = True, False
    model: Any = None
    data: Any = None

    def on_start(self, start: FitStart) -> None:
        """Called before the first step."""

    def on_step(self, step: StepEnd) -> None:
        """Called after every step. Keep it cheap, and do not synchronize with the device."""

    def on_log(self, log: Log) -> None:
        """Called every `log_every` steps, and after the last step."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Called after every evaluation during training."""

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        """Called after every checkpoint."""

    def on_message(self, text: str) -> None:
        """Called with a text for the user: a warning, a failed checkpoint, skipped rows."""

    def on_end(self, end: FitEnd | None) -> None:
        """Called after the last step; with None if training failed with an exception."""


class CallbackList:
    """Caller of a fit's callbacks. An `OSError` of one that is not `essential` is reported once on stderr."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._started: list[Callback] = []
        self._reported = dict[int, str]()  # text of the reported error by id of the callback

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def on_start(self, start: FitStart) -> None:
        for callback in self._callbacks:
            if self._call(callback, "on_start", start) or callback.can_retry:
                self._started.append(callback)

    def on_end(self, end: FitEnd | None) -> None:
        """Call `on_end` of all started callbacks, then raise the first failure, or note it if training has failed."""
        failure = training_error = sys.exception()
        for callback in self._started:
            try:
                self._call(callback, "on_end", end)
            except BaseException as error:
                if training_error is not None:
                    training_error.add_note(f"{type(callback).__name__}.on_end failed too: {error!r}")
                failure = failure or error
        self._started = []
        if failure is not None and training_error is None:
            raise failure

    def _call_all(self, method: str, event: object) -> None:
        for callback in self._started:
            self._call(callback, method, event)

    on_step = partialmethod(_call_all, "on_step")
    on_log = partialmethod(_call_all, "on_log")
    on_evaluation = partialmethod(_call_all, "on_evaluation")
    on_checkpoint = partialmethod(_call_all, "on_checkpoint")
    on_message = partialmethod(_call_all, "on_message")

    def _call(self, callback: Callback, method: str, event: object) -> bool:
        """Call a method; return False if it failed and training continues."""
        try:
            getattr(callback, method)(event)
            return True
        except OSError as error:
            if callback.essential:
                raise
            reported, at_end = self._reported.get(id(callback)), method == "on_end"
            if reported is None or (at_end and reported != str(error)):
                self._reported[id(callback)] = str(error)
                text = f"note: {type(callback).__name__} cannot write: {error}"
                with contextlib.suppress(OSError):
                    print(text if at_end else f"{text}. Training continues", file=sys.stderr, flush=True)
            return False
