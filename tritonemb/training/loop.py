"""The loop that a trainer runs: steps, and what is due after each of them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritonemb.data.batch import Batch
from tritonemb.data.source import Position, Split, Stream
from tritonemb.nn.errors import check_errors
from tritonemb.training.callbacks import Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.checkpoint import CheckpointError
from tritonemb.training.clock import Clock, memory_bytes
from tritonemb.training.metrics import Metrics, UndefinedMetricsError
from tritonemb.training.signals import Interrupted, StopRequest
from tritonemb.training.versions import versions
from tritonemb.training.watchers import Watchers

if TYPE_CHECKING:
    from tritonemb.training.trainer import Trainer


@dataclass(frozen=True)
class FitResult:
    """What a fit did.

    Args:
        losses: mean training loss of each epoch of the run that is done.
        num_samples: samples trained on by this call.
        seconds: wall time of training since the run began, evaluation and checkpoints left out.
        samples_per_second: of this call, without its first step, which compiles and warms up.
        reason: "finished" or "early stop".
        steps: steps done since the run began.
        test: metrics on the test rows, if they were asked for.
    """

    losses: tuple[float, ...]
    num_samples: int
    seconds: float
    samples_per_second: float
    reason: str = "finished"
    steps: int = 0
    test: Metrics | None = None


class Loop:
    """One fit of a trainer.

    After a step come, in this order: log, evaluation, checkpoint. So whatever a log says of a step and of those before
    it is decided when the step's checkpoint is written, and a run resumed from there says the rest, and says it once.
    """

    def __init__(self, trainer: Trainer, watchers: Watchers, request: StopRequest) -> None:
        self.trainer = trainer
        self.watchers = watchers
        self.request = request
        self.progress = trainer.progress
        self.clock = Clock(self.progress.seconds)
        self._saved_at, self._saved_step = time.monotonic(), self.progress.step
        self._said_skipped: dict[str, int] = {}
        self._watched = bool(watchers) or trainer.patience is not None

    def run(self, test: bool) -> FitResult:
        """Train to the end, tell those who watch, and return what was done."""
        trainer, before, end = self.trainer, self.progress.samples, None
        try:
            self._start()
            reason = self._train()
            metrics = self._metrics("test") if test and reason in ("finished", "early stop") else None
            speed, seconds = self.clock.samples_per_second, self.clock.seconds
            progress = self.progress
            end = FitEnd(reason, progress.step, progress.samples, seconds, speed, metrics, trainer.data.best_auc)
        finally:
            self.watchers.on_end(end)
        if self.request.signum is not None:
            raise Interrupted(self.request.signum)
        samples = progress.samples - before
        return FitResult(tuple(progress.losses), samples, seconds, speed, reason, progress.step, metrics)

    def _start(self) -> None:
        trainer = self.trainer
        exact = trainer.data.num_rows("train")
        rows = trainer.data.estimated_rows("train") if exact is None else exact
        start = FitStart(
            first_step=self.progress.step,
            total_steps=trainer.total_steps,
            samples_done=self.progress.samples,
            total_samples=_total_samples(trainer, rows),
            epoch_samples=rows,
            estimated=exact is None,
            num_epochs=trainer.last_epoch,
            folder=None if trainer.folder is None else trainer.folder.path,
            config=trainer.config,
            versions=versions(trainer.device),
        )
        self.watchers.on_start(start)

    def _train(self) -> str:
        """Why it ended: "finished", "early stop", or the name of a signal."""
        while not self.progress.ended and not self._over():
            self._epoch()
            if self.request.signum is not None and not self.progress.ended:
                if self.trainer.folder is not None and self._saved_step != self.progress.step:
                    self._checkpoint()  # the signal came too late for that of the step
                return self.request.name
        return self.progress.ended or "finished"

    def _over(self) -> bool:
        last = self.trainer.last_step
        return self.progress.epoch >= self.trainer.last_epoch or (last is not None and self.progress.step >= last)

    def _epoch(self) -> None:
        """Train to the end of the epoch, or of the run, or until a signal arrives."""
        trainer, progress = self.trainer, self.progress
        trainer.model.train()
        with trainer.data.open(
            "train",
            trainer.batch_size,
            seed=trainer.seed,
            epoch=progress.epoch,
            shuffle=True,
            position=progress.position,
            pin_memory=trainer.device.type == "cuda",
        ) as stream:
            batches, position = self._pull(stream)
            if not batches:
                self._end_epoch()
            while batches:
                samples = trainer.step(batches)
                progress.step += 1
                progress.samples += samples
                progress.epoch_samples += samples
                progress.logged_samples += samples
                progress.position, epoch = position, progress.epoch
                self.watchers.on_step(StepEnd(progress.step, epoch, progress.samples))
                batches, position = self._pull(stream)
                self.clock.step(samples)
                if not batches:
                    self._end_epoch()
                if not batches or self._over() or self.request.signum is not None:
                    self._say_skipped(stream.report.skipped, f"train {epoch}", str(stream.report))
                self._due_after_step(epoch, last=not batches)
                if progress.ended or self._over() or self.request.signum is not None:
                    return

    def _pull(self, stream: Stream) -> tuple[list[Batch], Position]:
        """The next step's batches, and where the data goes on after them."""
        with self.clock.waiting():
            batches = []
            for batch in stream:
                batches.append(batch)
                if len(batches) == self.trainer.accumulate:
                    break
        return batches, stream.position

    def _end_epoch(self) -> None:
        progress = self.progress
        check_errors(self.trainer.device)
        if progress.epoch_samples:
            loss = self.trainer.take_loss(1) / progress.epoch_samples
            self._refuse_nonfinite(loss, progress.epoch)
            progress.losses.append(loss)
        progress.epoch += 1
        progress.position, progress.epoch_samples = None, 0

    def _due_after_step(self, epoch: int, last: bool) -> None:
        trainer, progress, over = self.trainer, self.progress, self._over()
        if progress.step % trainer.log_every == 0 or over:
            self._log(epoch)
        every = trainer.evaluate_every
        if self._watched and (progress.step % every == 0 if every else last or over):
            self._evaluate(epoch)
        if over and not progress.ended:
            progress.ended = "finished"
        if trainer.folder is not None and self._checkpoint_due():
            self._checkpoint()

    def _log(self, epoch: int) -> None:
        trainer, progress = self.trainer, self.progress
        loss = trainer.take_loss(0) / progress.logged_samples
        progress.logged_samples = 0
        self._refuse_nonfinite(loss, epoch)
        if not self.watchers:
            return
        dense_lr, table_lr = trainer.current_rates()
        speed, wait = self.clock.lap()
        log = Log(
            progress.step, epoch, progress.samples, loss, dense_lr, table_lr, speed, wait,
            memory_bytes(trainer.device), self.clock.seconds,
        )  # fmt: skip
        self.watchers.on_log(log)

    def _evaluate(self, epoch: int) -> None:
        trainer, progress = self.trainer, self.progress
        if "validation" not in trainer.data.splits():
            return
        metrics = self._metrics("validation")
        if metrics is None:
            return
        best = progress.best is None or _better(metrics, trainer.monitor, progress.best)
        if best:
            progress.best, progress.best_step = getattr(metrics, trainer.monitor), progress.step
            progress.evaluations_since_best = 0
        else:
            progress.evaluations_since_best += 1
        self.watchers.on_evaluation(Evaluation(progress.step, epoch, "validation", metrics, best))
        if trainer.patience is not None and progress.evaluations_since_best >= trainer.patience:
            progress.ended = "early stop"

    def _metrics(self, split: Split) -> Metrics | None:
        """Those of a split; None, and a message, where its labels define none."""
        try:
            with self.clock.pause():
                metrics = self.trainer.evaluate(split)
        except UndefinedMetricsError as error:
            self.watchers.on_message(f"the {split} rows are not evaluated: {error}")
            return None
        skipped = f"{split}: {metrics.num_samples:,} rows were read, {metrics.num_skipped:,} bad ones left out"
        self._say_skipped(metrics.num_skipped, split, skipped)
        return metrics

    def _checkpoint_due(self) -> bool:
        options, progress = self.trainer.checkpoints, self.progress
        if progress.ended or self.request.signum is not None or self._is_best():
            return True
        if options.checkpoint_steps is not None and progress.step % options.checkpoint_steps == 0:
            return True
        minutes = options.checkpoint_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def _is_best(self) -> bool:
        return self.progress.best is not None and self.progress.best_step == self.progress.step

    def _checkpoint(self) -> None:
        trainer = self.trainer
        assert trainer.folder is not None
        self._saved_at = time.monotonic()
        self.progress.seconds = self.clock.seconds
        try:
            with self.clock.pause():
                saved = trainer.save()
                if self._is_best():
                    trainer.folder.checkpoints.mark_best(self.progress.step)
        except CheckpointError as error:
            if trainer.checkpoints.on_checkpoint_error == "stop":
                raise
            self.watchers.on_message(f"{error}. Training goes on")
            return
        self._saved_step = self.progress.step
        self.watchers.on_checkpoint(saved)

    def _say_skipped(self, skipped: int, what: str, text: str) -> None:
        """Say how many rows were left out, once for each number."""
        if skipped and self._said_skipped.get(what) != skipped:
            self._said_skipped[what] = skipped
            self.watchers.on_message(text)

    def _refuse_nonfinite(self, loss: float, epoch: int) -> None:
        if not math.isfinite(loss):
            raise ValueError(f"the training loss is {loss} in epoch {epoch + 1}; lower the learning rates")


def _total_samples(trainer: Trainer, rows: int | None) -> int | None:
    """Samples of the whole run, if an epoch has `rows`."""
    size = trainer.batch_size * trainer.accumulate
    by_steps = None if trainer.last_step is None else trainer.last_step * size
    if rows is None:
        return by_steps
    if by_steps is None:
        return rows * trainer.last_epoch
    epochs, rest = divmod(trainer.last_step or 0, -(-rows // size))
    return min(rows * trainer.last_epoch, rows * epochs + rest * size)


def _better(metrics: Metrics, monitor: str, best: float) -> bool:
    value = getattr(metrics, monitor)
    return bool(value > best if monitor == "auc" else value < best)
