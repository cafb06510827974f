"""Trains, evaluates, saves and resumes a model, in one process or on several ranks together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tritonemb.data.batch import Batch
from tritonemb.data.source import Batches, Data, Split
from tritonemb.ops.errors import check_errors
from tritonemb.tables.pins import released_before, sequence_number
from tritonemb.training import state
from tritonemb.training.ahead import Ahead
from tritonemb.training.cache_meter import caches_of, count
from tritonemb.training.callbacks import Callback, CheckpointSaved
from tritonemb.training.checkpoint import CheckpointOptions
from tritonemb.training.inference import predict
from tritonemb.training.loop import FitResult, Loop
from tritonemb.training.metrics import Metrics, UndefinedMetricsError, binary_metrics
from tritonemb.training.parallel import Parallel
from tritonemb.training.pipeline import DEPTH, Prepared, Say, brings_rows, empty_batch, prepare, sender
from tritonemb.training.precision import Precision
from tritonemb.training.reading import Reading
from tritonemb.training.run_folder import RunFolder
from tritonemb.training.saving import Saving
from tritonemb.training.schedule import Schedule
from tritonemb.training.signals import StopRequest, stop_requests
from tritonemb.training.stepper import Stepper
from tritonemb.training.watch.display import make_display
from tritonemb.training.watch.report import Report
from tritonemb.training.watch.run_log import RunLog
from tritonemb.training.watchers import Watchers

Monitor = Literal["auc", "log_loss", "normalized_entropy"]


class Trainer:
    """Trains `model(dense, sparse) -> logits [B]` on binary labels with the cross-entropy loss.

    Embedding collections with a fused optimizer update their tables themselves; every other parameter belongs to
    `dense_optimizer`. Batches are shuffled by (seed, epoch): the same seed gives the same batches. The initial weights
    are the caller's; seed them with `torch.manual_seed` before the model is made.

    With a `folder` a run outlives its process: checkpoints, a log and a report are kept there, SIGINT and SIGTERM end
    it after the step that is running, and `resume` goes on from a checkpoint with the bits of a run that never stopped.

    On several ranks the model is a `tritonemb.HybridParallel`, and every rank makes a trainer with the same arguments.
    A step trains the ranks' batches as one, in the order of ranks; each rank reads its own share of the data, and while
    a step computes, the batches of the next two are read, their ids are sent, and they are copied to the device. Rank 0
    shows progress, and writes log, report and what else one rank has to. A signal to any rank ends all after the same
    step; a checkpoint is written by all, to a folder that all share, and read by any number of them.

    Args:
        model: on the device where it is to be trained, unless `device` is given.
        data: a `tritonemb.data.Dataset` or `ClickLog`, or anything with the methods of `tritonemb.data.source.Data`.
        batch_size: samples a batch of each rank; the last ones of an epoch may have fewer.
        epochs: passes over the training rows.
        max_steps: end after so many steps, if the epochs have not ended before.
        accumulate: batches a step: their gradients are applied together, as one batch's.
        dense_optimizer: called with the parameters and `lr=dense_lr`; a class of `torch.optim`, for example.
        dense_schedule, table_schedule: of the learning rates of the dense part and of the fused tables.
        precision: of the dense part: "fp32", or autocast to "bf16" or "fp16" (with a loss scale).
        seed: of the order of the rows.
        device: where to train; the model is moved there.
        compile: run the model through `torch.compile`.
        log_every: steps between two logs.
        evaluate_every: steps between two evaluations of the validation rows; None for the end of each epoch. They are
            evaluated where the data set has them and someone looks: a folder, callbacks, `verbose` or `patience`.
        monitor: the metric that decides which evaluation is the best.
        patience: stop after so many evaluations in a row that were not better than the best.
        folder: where checkpoints, `log.jsonl` and `report.html` go.
        checkpoints: when they are written.
        callbacks: told of all that happens, see `Callback`.
        config: shown in the report, kept in the log.
        verbose: show progress.
        readers: processes a host that read the data, apart from those that train.
        pipeline: prepare the next steps while one computes; False for a model that changes the features that it is
            given before it looks them up.
        look_ahead: where tables live elsewhere than on the device: steps for which rows are brought there before they
            compute. Chosen while training if not given: more, up to 8, while training has to wait for rows. Only how
            fast training is depends on it, and what caches count.
        timeout: seconds to wait for a rank that does not answer. The model's own exchanges wait as long as they were
            told to: `HybridParallel(..., timeout=...)`, `torch.distributed.init_process_group(..., timeout=...)`.

    Raises:
        ValueError: for options out of range, or for `patience` without validation rows; the job has several ranks and
            the model is no `tritonemb.HybridParallel`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        *,
        batch_size: int = 1024,
        epochs: int = 1,
        max_steps: int | None = None,
        accumulate: int = 1,
        dense_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        dense_lr: float = 1e-3,
        dense_schedule: Schedule | None = None,
        table_schedule: Schedule | None = None,
        precision: Precision = "fp32",
        seed: int = 0,
        device: torch.device | str | None = None,
        compile: bool = False,
        log_every: int = 100,
        evaluate_every: int | None = None,
        monitor: Monitor = "auc",
        patience: int | None = None,
        folder: str | Path | None = None,
        checkpoints: CheckpointOptions | None = None,
        callbacks: Sequence[Callback] = (),
        config: Mapping[str, Any] | None = None,
        verbose: bool = True,
        readers: int = 0,
        pipeline: bool = True,
        timeout: float = 600.0,
        look_ahead: int | None = None,
    ) -> None:
        counts = {"batch_size": batch_size, "epochs": epochs, "accumulate": accumulate, "log_every": log_every}
        optional = {"max_steps": max_steps, "evaluate_every": evaluate_every, "patience": patience}
        for name, value in (counts | optional).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if readers < 0:
            raise ValueError(f"readers must not be negative, got {readers}")
        if look_ahead is not None and look_ahead < 0:
            raise ValueError(f"look_ahead must not be negative, got {look_ahead}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        if monitor not in get_args(Monitor):
            raise ValueError(f"monitor must be one of {get_args(Monitor)}, got {monitor!r}")
        for name, given in (("evaluate_every", evaluate_every), ("patience", patience)):
            if given is not None and "validation" not in data.splits():
                raise ValueError(f"{name} needs validation rows, and data set {data.name!r} has none")
        self.parallel = Parallel(model, timeout)
        self.model = model if device is None else model.to(device)
        self.data = data
        self.batch_size = batch_size
        self.epochs = epochs
        self.max_steps = max_steps
        self.accumulate = accumulate
        self.seed = seed
        self.device = _device_of(model) if device is None else _with_index(torch.device(device))
        self.log_every = log_every
        self.evaluate_every = evaluate_every
        self.monitor: Monitor = monitor
        self.patience = patience
        self.checkpoints = checkpoints or CheckpointOptions()
        options = self.checkpoints
        self.folder = None if folder is None else RunFolder(folder, options.keep, options.checkpoint_incremental)
        self.callbacks = list(callbacks)
        self.config = dict(config or {})
        self.verbose = verbose
        self.pipeline, self.look_ahead = pipeline, look_ahead
        self.progress = state.Progress()
        self.stepper = Stepper(self.model, self.device, self.parallel, dense_optimizer, dense_lr, precision, compile)
        self.reading = Reading(data, self.parallel, batch_size, seed, self.device.type == "cuda", readers)
        self.saving = Saving(self, self.folder, self.checkpoints.checkpoint_async)
        self.last_epoch, self.last_step = epochs, max_steps
        # What is learned of the data's size later on does not change them, or a resumed run would have other rates.
        schedules = [(schedule or Schedule()).within(self.total_steps) for schedule in (dense_schedule, table_schedule)]
        self.stepper.schedule(*schedules)
        self._fitted = self._begun = False
        self._steps: Ahead[Prepared] | None = None  # of the epoch that is being trained

    @property
    def dense_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of what is in no fused table; None where there is nothing else."""
        return self.stepper.dense_optimizer

    @property
    def steps_per_epoch(self) -> int | None:
        """None where the data set does not know its number of rows."""
        rows = self.data.num_rows("train") if "train" in self.data.splits() else None
        if rows is None:
            return None
        batches = -(-rows // (self.batch_size * self.parallel.size))
        return -(-batches // self.accumulate)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, as far as they are known."""
        each = self.steps_per_epoch
        by_epochs = None if each is None else each * self.last_epoch
        return min((steps for steps in (by_epochs, self.last_step) if steps is not None), default=None)

    def fit(self, test: bool = False) -> FitResult:
        """Train to the end of the run; a second call trains for as many epochs, or steps, again.

        Args:
            test: evaluate the test rows at the end.

        Raises:
            ValueError: the loss is not finite; the data says so; or the folder holds another run.
            Interrupted: a signal asked to stop; what was done is saved. With a folder only.
            CheckpointError: one could not be written, and `on_checkpoint_error` is "stop".
            RankFailed: another rank has failed, is gone, or has not answered in time; says which, and what it did.
        """
        if self._fitted:
            self.last_epoch = self.progress.epoch + self.epochs
            self.last_step = None if self.max_steps is None else self.progress.step + self.max_steps
            self.progress.ended = ""
        with ExitStack() as stack:
            stack.enter_context(self.parallel.watched())
            self._begin()
            request = StopRequest()
            if self.folder is not None:
                folder = self.folder
                self.parallel.on_first(lambda: self._take(folder, stack))
                json.dumps(self.saving.manifest())  # what cannot be saved is refused before training
                self.saving.tensors()
                request = stack.enter_context(stop_requests())
            result = Loop(self, Watchers(self._watchers()), request).run(test)
        self._fitted = True
        return result

    def step(self, batches: Sequence[Batch]) -> int:
        """One step on the samples of the batches of all ranks together, as many on each; returns their number."""
        total = int(self.parallel.sum(torch.tensor(sum(len(batch) for batch in batches))))
        world = self.parallel.size
        self.stepper(self.progress.step, batches, [len(batch) * world / total for batch in batches])
        return total

    def train_on(self, step: Prepared) -> None:
        """One step of those that `open_epoch` prepares."""
        self.stepper(self.progress.step, step.take(), step.weights)

    @contextmanager
    def open_epoch(self, say: Say) -> Iterator[Ahead[Prepared]]:
        """The steps that are left of the present epoch."""
        progress = self.progress
        with (
            self.reading.open("train", True, progress.epoch, progress.position) as stream,
            self._prepared(stream, self.accumulate, progress.step, say) as self._steps,
        ):
            try:
                yield self._steps
            finally:
                self._steps = None

    def evaluate(self, split: Split = "test") -> Metrics:
        """Metrics on the test rows, or on another split.

        Raises:
            ValueError: the data set has no such split, or a logit is NaN.
        """
        start = time.perf_counter()
        with self.parallel.watched():
            self.settle()  # its collectives and those of the evaluation must not mix
            with self.reading.open(split) as stream, self._prepared(stream, training=False) as steps:
                logits, labels = predict(
                    self.model, _batches(steps), self.device, self.stepper.precision, self.stepper.forward
                )
                skipped = sum(self.parallel.gather(stream.report.skipped))
            logits, labels = self.parallel.to_first(logits), self.parallel.to_first(labels)
            seconds = time.perf_counter() - start
            metrics, undefined = self.parallel.on_first(lambda: _metrics(logits, labels, seconds))
        if metrics is None:
            raise UndefinedMetricsError(undefined)
        return replace(metrics, num_skipped=skipped)

    def settle(self) -> None:
        """Wait until nothing is being made ahead: no collective is under way, and no row."""
        if self._steps is not None:
            self._steps.settle()

    def save(self) -> CheckpointSaved:
        """Write a checkpoint of this moment into the folder.

        Raises:
            ValueError: there is no folder.
            CheckpointError: it could not be written; the earlier ones are as they were.
        """
        if self.folder is None:
            raise ValueError("there is nowhere to save to: give the trainer a folder")
        check_errors(self.device)
        with self.parallel.watched():
            return self.saving.save()

    def resume(self, checkpoint: str | Path = "auto") -> Path | None:
        """Go on from a checkpoint: model, optimizers, schedules, position in the data and generators.

        Args:
            checkpoint: a checkpoint's folder, or "auto" for the newest one in the trainer's folder. Later checkpoints
                than the one that is named go away when the next one is written.

        Returns:
            the checkpoint, or None if "auto" found none.

        Raises:
            ValueError, FileNotFoundError: it is damaged, or of another model, optimizer, data set or batch size; all
                differences are listed, and nothing has been changed then.
        """
        with self.parallel.watched():
            path = self.saving.restore(checkpoint)
        if path is not None:
            self._begun = True
            if not self._has_lost_patience():  # a run that was finished may have more to do now
                self.progress.ended = ""
        return path

    def _watchers(self) -> list[Callback]:
        watchers: list[Callback] = [make_display()] if self.verbose and self.parallel.is_first else []
        if self.folder is not None and self.parallel.is_first:
            watchers.append(RunLog(self.folder.log, resume_at_step=self.progress.step))
            watchers.append(Report(self.folder.report, self.folder.log))
        return watchers + self.callbacks

    def _prepared(
        self, stream: Batches, accumulate: int = 1, first_step: int = 0, say: Say | None = None, training: bool = True
    ) -> Ahead[Prepared]:
        """Steps on a stream's batches, made ahead where that takes exchanges or copies, or reads rows."""
        parallel, model = self.parallel, self.model
        send = sender(model, training) if self.pipeline else None
        caches, mine = brings_rows(model), caches_of(model)
        ahead = self.pipeline and (parallel.size > 1 or self.device.type == "cuda" or caches)
        depth = self.look_ahead if caches and self.look_ahead is not None else DEPTH
        steps = prepare(
            stream, self.device, parallel.agreement, lambda: empty_batch(self.data), world=parallel.size,
            accumulate=accumulate, send=send, heartbeat=parallel.heartbeat, first_step=first_step, say=say,
            count=(lambda: count(mine)) if mine and send and training else None,
        )  # fmt: skip
        # Which rows make room is settled when a step may be made, not when the thread comes to it.
        allow = (lambda: released_before(sequence_number())) if mine else None
        return Ahead(steps, depth if ahead else 0, "tritonemb-pipeline", parallel.size > 1, allow)

    def _begin(self) -> None:
        """Ranks that start alike draw random numbers of their own."""
        if not self._begun and self.parallel.rank > 0:
            state.seed_rank(self.seed, self.parallel.rank)
        self._begun = True

    def _take(self, folder: RunFolder, stack: ExitStack) -> None:
        """Keep other jobs out of the folder, and see that it is this run's."""
        stack.enter_context(folder.lock())
        self._refuse_another_run(folder)
        self.saving.mark_best_again()

    def _has_lost_patience(self) -> bool:
        return self.patience is not None and self.progress.evaluations_since_best >= self.patience

    def _refuse_another_run(self, folder: RunFolder) -> None:
        newest = folder.checkpoints.latest()
        if self.progress.step == 0 and newest is not None:
            raise ValueError(
                f"{folder.path} holds a run with {newest.name}; resume it (--resume auto) or choose another folder"
            )


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _with_index(device: torch.device) -> torch.device:
    """The device as its tensors name it."""
    return torch.empty(0, device=device).device


def _batches(steps: Iterable[Prepared]) -> Iterator[tuple[Batch, Tensor]]:
    """Batches on the device, and their labels on the CPU."""
    for step in steps:
        yield from zip(step.take(), step.labels, strict=True)


def _metrics(logits: Tensor, labels: Tensor, seconds: float) -> tuple[Metrics | None, str]:
    """Metrics, or why they are not defined."""
    try:
        return binary_metrics(logits, labels, seconds), ""
    except UndefinedMetricsError as error:
        return None, str(error)
