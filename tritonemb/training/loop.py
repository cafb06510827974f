"""The loop that a trainer runs: steps, and what is due after each of them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritonemb.comm.control import RankFailed, lost_contact
from tritonemb.data.source import Split
from tritonemb.ops.errors import check_errors
from tritonemb.training.ahead import Ahead
from tritonemb.training.cache_meter import CacheMeter
from tritonemb.training.callbacks import CheckpointSaved, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.checkpoint import CheckpointError
from tritonemb.training.clock import Clock, memory_bytes
from tritonemb.training.metrics import Metrics, UndefinedMetricsError
from tritonemb.training.pipeline import Prepared, Say
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

    Several ranks do all this alike: what decides it (rows, metrics, signals, rank 0's clock) they have agreed upon.
    """

    def __init__(self, trainer: Trainer, watchers: Watchers, request: StopRequest) -> None:
        self.trainer = trainer
        self.watchers = watchers
        self.request = request
        self.progress = trainer.progress
        self.clock = Clock(self.progress.seconds)
        self.caches = CacheMeter(trainer.model)
        self._began = time.monotonic()
        self._now, self._saved_at, self._saved_step = 0, 0, self.progress.step  # milliseconds by rank 0's clock
        self._logged_step = self.progress.step
        self._signal: int | None = None  # that the ranks have agreed upon
        self._said_skipped: dict[str, int] = {}
        self._watched = trainer.parallel.any(bool(watchers) or trainer.patience is not None)

    def run(self, test: bool) -> FitResult:
        """Train to the end, tell those who watch, and return what was done."""
        trainer, before, end = self.trainer, self.progress.samples, None
        try:
            self._start()
            reason = self._train()
            self._finish_saving()
            metrics = self._metrics("test") if test and reason in ("finished", "early stop") else None
            speed, seconds = self.clock.samples_per_second, self.clock.seconds
            progress = self.progress
            end = FitEnd(reason, progress.step, progress.samples, seconds, speed, metrics, trainer.data.best_auc)
        except Exception as error:
            if not isinstance(error, RankFailed) and not lost_contact(error):
                with suppress(CheckpointError):  # what is being written is worth having
                    trainer.saving.finish()
            raise
        finally:
            self.watchers.on_end(end)
        signum = trainer.parallel.most(self._stopped or self.request.signum or 0)  # some rank's may have come late
        if signum:
            raise Interrupted(signum)
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
            num_ranks=trainer.parallel.size,
            folder=None if trainer.folder is None else trainer.folder.path,
            config=trainer.config,
            versions=versions(trainer.device),
        )
        self.watchers.on_start(start)

    def _train(self) -> str:
        """Why it ended: "finished", "early stop", or the name of a signal."""
        while not self.progress.ended and not self._over():
            self._epoch()
            if self._stopped is not None and not self.progress.ended:
                if self.trainer.folder is not None and self._saved_step != self.progress.step:
                    self._checkpoint()  # the signal came too late for that of the step
                return signal.Signals(self._stopped).name
        return self.progress.ended or "finished"

    def _over(self) -> bool:
        last = self.trainer.last_step
        return self.progress.epoch >= self.trainer.last_epoch or (last is not None and self.progress.step >= last)

    @property
    def _stopped(self) -> int | None:
        """The signal that ends training: one rank's own at once, else the one that all ranks have agreed upon."""
        return self.request.signum if self.trainer.parallel.size == 1 else self._signal

    def _epoch(self) -> None:
        """Train to the end of the epoch, or of the run, or until a signal arrives."""
        trainer, progress = self.trainer, self.progress
        trainer.model.train()
        say = Say(lambda: self.request.signum or 0, lambda: int(1000 * (time.monotonic() - self._began)))
        with trainer.open_epoch(say) as steps:
            step, over = self._pull(steps)
            if over:
                self._end_epoch()
            while step.batches:
                trainer.parallel.note("computing", progress.step + 1)
                trainer.train_on(step)
                self.caches.trained(step.counted)
                progress.step += 1
                progress.samples += step.rows
                progress.epoch_samples += step.rows
                progress.logged_samples += step.rows
                progress.position, epoch, samples = step.position, progress.epoch, step.rows
                self.watchers.on_step(StepEnd(progress.step, epoch, progress.samples))
                step, over = self._pull(steps)
                self.clock.step(samples)
                if over:
                    self._end_epoch()
                if over or self._over() or self._stopped is not None:
                    self._say_left_out(step, f"train {epoch}")
                self._due_after_step(epoch, last=over)
                if progress.ended or self._over() or self._stopped is not None:
                    return

    def _pull(self, steps: Ahead[Prepared]) -> tuple[Prepared, bool]:
        """The next step, and whether the epoch has none more."""
        self.trainer.parallel.note("waiting", self.progress.step + 1)
        begin = time.perf_counter()
        with self.clock.waiting():
            step = next(steps)
        self.caches.stalled(begin, time.perf_counter(), step.moved)
        if self.trainer.look_ahead is None and self.caches.wants_more_ahead() and self.trainer.parallel.size == 1:
            steps.widen()
        self._now, self._signal = step.clock, step.signal or None
        return step, not step.batches and not step.signal

    def _end_epoch(self) -> None:
        progress = self.progress
        check_errors(self.trainer.device)
        if progress.epoch_samples:
            loss = self.trainer.stepper.take_loss(1) / progress.epoch_samples
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
        loss = trainer.stepper.take_loss(0) / progress.logged_samples
        progress.logged_samples = 0
        self._refuse_nonfinite(loss, epoch)
        sent, across = trainer.parallel.sent()
        steps, self._logged_step = progress.step - self._logged_step, progress.step
        cache = self.caches.lap(steps)
        if not self.watchers:
            return
        dense_lr, table_lr = trainer.stepper.current_rates()
        speed, wait = self.clock.lap()
        log = Log(
            progress.step, epoch, progress.samples, loss, dense_lr, table_lr, speed, wait,
            memory_bytes(trainer.device), self.clock.seconds,
            {kind: num_bytes // steps for kind, num_bytes in sent.items()}, across // steps, cache,
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
            self.trainer.parallel.note("evaluating", self.progress.step)
            with self.clock.pause(), self.trainer.parallel.unmetered():
                metrics = self.trainer.evaluate(split)
        except UndefinedMetricsError as error:
            self.watchers.on_message(f"the {split} rows are not evaluated: {error}")
            return None
        skipped = f"{split}: {metrics.num_samples:,} rows were read, {metrics.num_skipped:,} bad ones left out"
        self._say_skipped(metrics.num_skipped, split, skipped)
        return metrics

    def _checkpoint_due(self) -> bool:
        options, progress = self.trainer.checkpoints, self.progress
        if progress.ended or self._stopped is not None or self._is_best():
            return True
        if options.checkpoint_steps is not None and progress.step % options.checkpoint_steps == 0:
            return True
        minutes = options.checkpoint_minutes
        return minutes > 0 and self._now - self._saved_at >= 60_000 * minutes

    def _is_best(self) -> bool:
        return self.progress.best is not None and self.progress.best_step == self.progress.step

    def _checkpoint(self) -> None:
        trainer = self.trainer
        self._saved_at = self._now
        trainer.parallel.note("saving", self.progress.step)
        self.progress.seconds = self.clock.seconds
        self._finish_saving()  # of the one before, if that is still being written
        check_errors(trainer.device)
        if self._save(lambda: trainer.saving.start(self._is_best())):
            self._saved_step = self.progress.step

    def _finish_saving(self) -> None:
        self._save(self.trainer.saving.finish)

    def _save(self, call: Callable[[], CheckpointSaved | None]) -> bool:
        """Tell what has been saved; False if it could not be, and training goes on."""
        try:
            with self.clock.pause(), self.trainer.parallel.unmetered():
                saved = call()
        except CheckpointError as error:
            if self.trainer.checkpoints.on_checkpoint_error == "stop":
                raise
            self.watchers.on_message(f"{error}. Training goes on")
            return False
        if saved is not None:
            self.watchers.on_checkpoint(saved)
        return True

    def _say_left_out(self, step: Prepared, what: str) -> None:
        """Say how many rows the ranks have left out of this epoch, and which."""
        reports = self.trainer.parallel.gather(step.report)
        told = [(rank, report) for rank, report in enumerate(reports) if report.skipped]
        texts = [str(report) if len(reports) == 1 else f"rank {rank}: {report}" for rank, report in told]
        self._say_skipped(sum(report.skipped for report in reports), what, "\n".join(texts))

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
    size = trainer.batch_size * trainer.accumulate * trainer.parallel.size
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
