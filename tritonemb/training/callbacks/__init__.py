"""The events of a training run and the callbacks for them; beside it: display, log, report, TensorBoard, profiler."""

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
    """Training begins, or continues after a resume.

    Args:
        first_step, samples_done: done before, 0 for a new run.
        total_steps, total_samples, num_epochs: of the whole run; None where not even an estimate is known.
        epoch_samples: of an epoch; None likewise.
        estimated: whether the numbers of samples are estimates.
        folder: where the run keeps its files, if it keeps any.
        config: as nested plain values, empty for a trainer made by hand.
        versions: of Python, torch, tritonemb and so on, and the device.
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
    """After `step` steps and `samples` samples since the run began, the last step in epoch `epoch`, from 0."""

    step: int
    epoch: int
    samples: int


@dataclass(frozen=True)
class Log(StepEnd):
    """The state of training, every `log_every` steps.

    Args:
        loss: mean training loss since the last log.
        dense_lr, table_lr: learning rates of the step; None without such parameters.
        samples_per_second: since the last log, without evaluation and checkpoints.
        data_wait: share of that time in which the trainer waited for data, 0 to 1.
        memory_bytes: resident memory of the process, or memory allocated on the GPU.
        seconds: training time since the run began, without evaluation and checkpoints.
        sent: bytes that all ranks together have sent each other in a step, mean since the last log, by kind.
        cache: of this rank's cached tables, mean of a step since the last log: distinct `rows`, their `hit_rate` in
            device memory, bytes `read` from and `written` back to the tables, seconds of `stall` in which training
            waited for rows; with a host cache also rows found there, `host_hits`, and bytes that the disk has read and
            written, `disk_read` and `disk_written`.
        dynamic: of each of this rank's dynamic tables, by name, the fields of `DynamicStatistics`, mean of a step since
            the last log; `rows`, `capacity` and `num_bytes` are those of now.
        servers: of each collection on embedding servers, what they say of it: see `tritonemb.server.metrics.totals`.
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


@dataclass(frozen=True)
class Evaluation:
    """Quality on a split after `step` steps; `best` if no evaluation of this run was better."""

    step: int
    epoch: int
    split: str
    metrics: Metrics
    best: bool


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is complete and has its name."""

    step: int
    path: Path
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class FitEnd:
    """Training is over.

    Args:
        reason: "finished", "early stop", "SIGINT" or "SIGTERM".
        step, samples, seconds: as in `Log`.
        samples_per_second: mean over this process, without its first step.
        test: metrics on the test rows, where they were evaluated.
        best_auc: the Bayes-optimal AUC, where the data set knows it.
    """

    reason: str
    step: int
    samples: int
    seconds: float
    samples_per_second: float
    test: Metrics | None = None
    best_auc: float | None = None


class Callback:
    """Derive from this, override what you need, and give it to the `Trainer`.

    Methods are called in the thread that trains, between steps, in the order of the callbacks; an exception ends
    training. `on_end` is called once for every `on_start`, last of all, also when training fails. Where several ranks
    train, each calls its own callbacks, at the same steps with the same numbers but for speed, waiting and memory.

    Attributes:
        essential: whether an `OSError` of its methods ends training too; if not, it is reported on stderr.
    """

    essential = True

    def on_start(self, start: FitStart) -> None:
        """Before the first step."""

    def on_step(self, step: StepEnd) -> None:
        """After every step. Do little here, and read nothing from the device."""

    def on_log(self, log: Log) -> None:
        """Every `log_every` steps, and after the last one."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """After every evaluation during training."""

    def on_checkpoint(self, saved: CheckpointSaved) -> None:
        """After every checkpoint."""

    def on_message(self, text: str) -> None:
        """Something that a person should read: a warning, a failed checkpoint, rows that were skipped."""

    def on_end(self, end: FitEnd | None) -> None:
        """After the last step; None if training failed with an exception."""


class CallbackList:
    """All callbacks of a fit as one. An `OSError` of one that is not `essential` is reported once on stderr."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self._started: list[Callback] = []
        self._reported: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def on_start(self, start: FitStart) -> None:
        for callback in self._callbacks:
            self._call(callback, "on_start", start)
            self._started.append(callback)

    def on_end(self, end: FitEnd | None) -> None:
        """Called for each callback whose `on_start` has returned; a failure becomes a note beside that of training."""
        failure = training = sys.exception()
        for callback in self._started:
            try:
                self._call(callback, "on_end", end)
            except BaseException as error:
                if training is not None:
                    training.add_note(f"besides, {type(callback).__name__}.on_end failed: {error!r}")
                failure = failure or error
        self._started = []
        if failure is not None and training is None:
            raise failure

    def _call_all(self, method: str, event: object) -> None:
        for callback in self._started:
            self._call(callback, method, event)

    on_step = partialmethod(_call_all, "on_step")
    on_log = partialmethod(_call_all, "on_log")
    on_evaluation = partialmethod(_call_all, "on_evaluation")
    on_checkpoint = partialmethod(_call_all, "on_checkpoint")
    on_message = partialmethod(_call_all, "on_message")

    def _call(self, callback: Callback, method: str, event: object) -> None:
        try:
            getattr(callback, method)(event)
        except OSError as error:
            if callback.essential:
                raise
            if id(callback) not in self._reported:
                self._reported.add(id(callback))
                text = f"note: {type(callback).__name__} cannot write: {error}. Training continues"
                with contextlib.suppress(OSError):
                    print(text, file=sys.stderr, flush=True)
