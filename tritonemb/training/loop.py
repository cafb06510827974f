"""The loop of a fit: steps, what is due after each of them, and what is measured of their speed."""

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tritonemb.comm.control import lost_contact
from tritonemb.comm.group import RankFailed
from tritonemb.data.protocol import Split
from tritonemb.offloading import OffloadedOptimizer, report
from tritonemb.ops.registry import check_errors
from tritonemb.server.attach import flush
from tritonemb.server.metrics import totals
from tritonemb.training.callbacks import CallbackList, CheckpointSaved, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.callbacks.console import size
from tritonemb.training.checkpoint import CheckpointError
from tritonemb.training.checkpoint.manager import CheckpointManager
from tritonemb.training.doctor import versions
from tritonemb.training.metrics import Metrics, evaluate, warn_of_repeated_rows
from tritonemb.training.ranks import Interrupted, StopRequest, UndefinedMetricsError
from tritonemb.training.step import PreparedStep, StepInfo, count, take
from tritonemb.training.train_state import TrainState, caches_of, table_sets_of
from tritonemb.utils import require

MIN_STALL = 1e-3  # seconds that count
RECENT_STEPS, MANY_STALLS = 10, 3  # so many stalls in so many steps ask for a deeper prefetch
MAX_WIDENED = 6
LEVELS = ("rows", "capacity", "num_bytes")  # of a dynamic table; the rest of its statistics are counts
HOST = ("host_hits", "disk_read", "disk_written")  # of tables on disk with a host cache


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
        test: metrics of the last model on the test rows, if they were asked for.
        best: those of the best checkpoint, where `tritonemb train` has another one than that of the last step.
    """

    losses: tuple[float, ...]
    num_samples: int
    seconds: float
    samples_per_second: float
    reason: str = "finished"
    steps: int = 0
    test: Metrics | None = None
    best: Metrics | None = None


class Loop:
    """One fit.

    After a step come, in this order: log, evaluation, checkpoint. So whatever a log says of a step and of those before
    it is decided when the step's checkpoint is written, and a run resumed from there says the rest, and says it once.

    Several ranks do all this alike: what decides it (rows, metrics, signals, rank 0's clock) they have agreed upon.
    """

    def __init__(
        self, state: TrainState, saving: CheckpointManager, folder: Path | None, callbacks: CallbackList,
        request: StopRequest,
    ) -> None:  # fmt: skip
        self.state, self.saving, self.folder = state, saving, folder
        self.callbacks, self.request = callbacks, request
        self.options, self.ranks, self.progress = state.options, state.ranks, state.progress
        self.clock = Clock(self.progress.seconds)
        self.caches = CacheMeter(state.model) if caches_of(state.model) else None
        self.dynamic = DynamicMeter(state.model)
        self._began = time.monotonic()
        self._now, self._saved_at, self._saved_step = 0, 0, self.progress.step  # milliseconds by rank 0's clock
        self._logged_step = self.progress.step
        self._signal: int | None = None  # that the ranks have agreed upon
        self._failed: CheckpointError | None = None  # of the newest checkpoint
        self._reported_skipped: dict[str, int] = {}
        self._evaluated = bool(self.ranks.max(bool(callbacks) or self.options.patience is not None))

    def run(self, test: bool) -> FitResult:
        """Train to the end, call the callbacks, and return what was done."""
        progress, initial_samples, end = self.progress, self.progress.samples, None
        try:
            exact = self.state.data.num_rows("train")
            rows = self.state.data.estimated_rows("train") if exact is None else exact
            self.callbacks.on_start(FitStart(
                progress.step, self.state.total_steps, initial_samples, self.state.total_samples(rows), rows,
                exact is None, num_epochs=self.state.last_epoch, num_ranks=self.ranks.size, folder=self.folder,
                config=self.state.config, versions=versions(self.state.device),
            ))  # fmt: skip
            reason = self._train()
            if reason in ("finished", "early stop"):
                flush(self.state.model)
            self._save(self.saving.finish)
            metrics = self._metrics("test") if test and reason in ("finished", "early stop") else None
            if metrics is not None and self.callbacks and (warning := warn_of_repeated_rows(self.state)):
                self.callbacks.on_message(warning)
            if isinstance(self.state.step.dense_optimizer, OffloadedOptimizer):
                tiers = report(self.state.model).moved.items()
                transfers = [f"{tier} {size(read)} read, {size(written)} written" for tier, (read, written) in tiers]
                self.callbacks.on_message(f"offload: {'; '.join(transfers)}")
            speed, seconds = self.clock.samples_per_second, self.clock.seconds
            end = FitEnd(reason, progress.step, progress.samples, seconds, speed, metrics, self.state.data.best_auc)
        except Exception as error:
            if not isinstance(error, RankFailed) and not lost_contact(error):
                with suppress(CheckpointError):  # what is being written is worth having
                    self.saving.finish()
            raise
        finally:
            self.callbacks.on_end(end)
        if self._failed is not None:  # on all ranks
            raise self._failed
        if signum := self.ranks.max(self._stopped or self.request.signum or 0):  # some rank's may have come late
            raise Interrupted(signum)
        trained = progress.samples - initial_samples
        return FitResult(tuple(progress.losses), trained, seconds, speed, reason, progress.step, metrics)

    def _train(self) -> str:
        """Why it ended: "finished", "early stop", or the name of a signal."""
        while not self.progress.ended and not self._over:
            self._epoch()
            if self._stopped is not None and not self.progress.ended:
                if self.folder is not None and self._saved_step != self.progress.step:
                    self._checkpoint()  # the signal came too late for that of the step
                return signal.Signals(self._stopped).name
        return self.progress.ended or "finished"

    @property
    def _over(self) -> bool:
        last = self.state.last_step
        return self.progress.epoch >= self.state.last_epoch or (last is not None and self.progress.step >= last)

    @property
    def _stopped(self) -> int | None:
        """The signal that ends training: one rank's own at once, else the one that all ranks have agreed upon."""
        return self.request.signum if self.ranks.size == 1 else self._signal

    def _epoch(self) -> None:
        state, progress, request = self.state, self.progress, self.request
        signals = {"signal": lambda: request.signum or 0, "clock": lambda: int(1000 * (time.monotonic() - self._began))}
        state.model.train()
        with state.open("train", True) as stream, state.steps(stream, True, **signals) as steps:
            step, over = self._next(steps)
            while step[0]:
                epoch = progress.epoch
                self._train_step(step)
                step, over = self._next(steps)
                if over or self._over or self._stopped is not None:
                    self._report_left_out(step[1], f"train {epoch}")
                draining = (self._stopped is not None or self._checkpoint_due()) and self._rows_ahead()
                self._due_after_step(epoch, last=over, save=not draining)
                if draining:
                    continue
                if progress.ended or self._over or self._stopped is not None:
                    return

    def _train_step(self, step: PreparedStep) -> None:
        progress, info = self.progress, step[1]
        self.ranks.step = progress.step + 1
        self.state.step(progress.step, take(step), info.weights)
        if self.caches is not None:
            self.caches.trained = info.counted
        progress.step += 1
        progress.samples += info.rows
        progress.epoch_samples += info.rows
        progress.logged_samples += info.rows
        progress.position = info.position
        if self.state.rows_ahead is not None:
            self.state.rows_ahead.trained(progress.step)
        self.clock.step(info.rows)
        if self.callbacks:
            self.callbacks.on_step(StepEnd(progress.step, progress.epoch, progress.samples))

    def _next(self, steps: Iterator[PreparedStep]) -> tuple[PreparedStep, bool]:
        """The next step, and whether the epoch has none more: then it is ended."""
        begin = time.perf_counter()
        step = batches, info = next(steps)
        end = time.perf_counter()
        self.clock.waited += end - begin
        if self.caches is not None:
            self.caches.stalled(begin, end, info.moved)
            deeper = self.options.prefetch_depth is None and self.caches.wants_deeper_prefetch()
            if deeper and self.ranks.size == 1 and self.state.prefetched is not None:
                self.state.prefetched.widen()
        self._now, self._signal = info.clock, info.signal or None
        over = not batches and not info.signal
        if over:
            progress = self.progress
            check_errors(self.state.device)
            if progress.epoch_samples:
                loss = self.state.step.take_loss(1) / progress.epoch_samples
                self.state.refuse_nonfinite(loss)
                progress.losses.append(loss)
            progress.epoch += 1
            progress.position, progress.epoch_samples = None, 0
        return step, over

    def _rows_ahead(self) -> bool:
        """Prefetch no more; whether there are rows of prefetched steps, which are to be trained before all is saved.

        Where another rank has prefetched a step, this one trains it, too.
        """
        if self.state.rows_ahead is not None:
            self.state.hold()
            self.state.settle()
        return self.ranks.max(self.state.hold()) > self.progress.step

    def _due_after_step(self, epoch: int, last: bool, save: bool) -> None:
        progress, over = self.progress, self._over
        if progress.step % self.options.log_every == 0 or over:
            self._log(epoch)
        every = self.options.evaluate_every
        if self._evaluated and (progress.step % every == 0 if every else last or over):
            self._evaluate(epoch)
        if over and not progress.ended:
            progress.ended = "finished"
        if save and self.folder is not None and self._checkpoint_due():
            self._checkpoint()
        if save and self.state.rows_ahead is not None:
            self.state.seen = progress.step
            self.state.rows_ahead.hold(False)

    def _log(self, epoch: int) -> None:
        progress = self.progress
        loss = self.state.step.take_loss(0) / progress.logged_samples
        progress.logged_samples = 0
        self.state.refuse_nonfinite(loss)
        sent = self.ranks.sent()
        steps, self._logged_step = progress.step - self._logged_step, progress.step
        if self.callbacks:
            device, on_gpu, servers = self.state.device, self.state.device.type == "cuda", self.state.servers
            memory = torch.cuda.memory_allocated(device) if on_gpu else require("psutil").Process().memory_info().rss
            self.callbacks.on_log(Log(
                progress.step, epoch, progress.samples, loss, *self.state.step.current_rates(), *self.clock.lap(),
                memory, self.clock.seconds,
                {kind: num_bytes // steps for kind, num_bytes in sent.items()},
                {} if self.caches is None else self.caches.lap(steps), self.dynamic.lap(steps),
                {} if servers is None else totals(servers.statistics()),
            ))  # fmt: skip

    def _evaluate(self, epoch: int) -> None:
        progress, monitor, patience = self.progress, self.options.monitor, self.options.patience
        self.state.refuse_nonfinite()
        metrics = self._metrics("validation") if "validation" in self.state.data.splits() else None
        if metrics is None:
            return
        value, previous_best = getattr(metrics, monitor), progress.best
        best = previous_best is None or bool(value > previous_best if monitor == "auc" else value < previous_best)
        if best:
            progress.best, progress.best_step, progress.evaluations_since_best = value, progress.step, 0
        else:
            progress.evaluations_since_best += 1
        self.callbacks.on_evaluation(Evaluation(progress.step, epoch, "validation", metrics, best))
        if patience is not None and progress.evaluations_since_best >= patience:
            progress.ended = "early stop"

    def _metrics(self, split: Split) -> Metrics | None:
        """Those of a split; None, and a message, where its labels define none."""
        try:
            with self.clock.pause(), self.ranks.unmetered():
                metrics = evaluate(self.state, split)
        except UndefinedMetricsError as error:
            self.callbacks.on_message(f"the {split} rows are not evaluated: {str(error).removeprefix('rank 0: ')}")
            return None
        text = f"{split}: {metrics.num_samples:,} rows were read, {metrics.num_skipped:,} bad ones left out"
        self._report_skipped(metrics.num_skipped, split, text)
        return metrics

    def _checkpoint_due(self) -> bool:
        if self.progress.ended or self._stopped is not None or self._is_best():
            return True
        every, minutes = self.options.checkpoints.checkpoint_steps, self.options.checkpoints.checkpoint_minutes
        return 0 < 60_000 * minutes <= self._now - self._saved_at or bool(every and self.progress.step % every == 0)

    def _is_best(self) -> bool:
        return self.progress.best is not None and self.progress.best_step == self.progress.step

    def _checkpoint(self) -> None:
        self._saved_at = self._now
        self.progress.seconds = self.clock.seconds
        self._save(self.saving.finish)  # of the one before, if that is still being written
        check_errors(self.state.device)
        if self._save(lambda: self.saving.start(self._is_best())):
            self._saved_step, self._failed = self.progress.step, None

    def _save(self, call: Callable[[], CheckpointSaved | None]) -> bool:
        """Report what has been saved; False if it could not be, and training goes on."""
        try:
            with self.clock.pause(), self.ranks.unmetered():
                saved = call()
        except CheckpointError as error:
            if self.options.checkpoints.on_checkpoint_error == "stop":
                raise
            self._failed = error
            self.callbacks.on_message(f"{error}. Training goes on")
            return False
        if saved is not None:
            self.callbacks.on_checkpoint(saved)
        return True

    def _report_left_out(self, info: StepInfo, what: str) -> None:
        reports = self.ranks.control.all_gather_object(info.report)
        texts = [
            f"rank {r}: " * (len(reports) > 1) + str(rank_report)
            for r, rank_report in enumerate(reports)
            if rank_report.skipped
        ]
        self._report_skipped(sum(report.skipped for report in reports), what, "\n".join(texts))

    def _report_skipped(self, skipped: int, what: str, text: str) -> None:
        if skipped and self._reported_skipped.get(what) != skipped:
            self._reported_skipped[what] = skipped
            self.callbacks.on_message(text)


class Clock:
    """Seconds of training since the run began, `seconds` of them in earlier processes, without what `pause` covers."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._earlier, self._began = seconds, time.perf_counter()  # which moves by what has been paused
        self._samples, self.waited = 0, 0.0
        self._warm = self._lap = self._now()  # after the first step; at the last lap

    def _now(self) -> tuple[float, int, float]:
        """Seconds trained by this process, its samples, and seconds of waiting."""
        return time.perf_counter() - self._began, self._samples, self.waited

    @property
    def seconds(self) -> float:
        return self._earlier + self._now()[0]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens in the block is not training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._began += time.perf_counter() - start

    def step(self, num_samples: int) -> None:
        """A step is done; the first one of a process, which compiles and warms up, does not count for speeds."""
        first = not self._samples
        self._samples += num_samples
        if first:
            self._warm = self._lap = self._now()

    def lap(self) -> tuple[float, float]:
        """Samples a second and the share of waiting since the last lap."""
        (last_seconds, samples, waited), self._lap = self._lap, self._now()
        if self._samples == samples:  # the first step alone
            return self.samples_per_second, 0.0
        seconds = self._lap[0] - last_seconds
        return (self._samples - samples) / seconds, min((self.waited - waited) / seconds, 1.0)

    @property
    def samples_per_second(self) -> float:
        """Mean of this process; that of the first step where there is no other."""
        seconds, samples, _ = self._warm
        if self._samples == samples:
            return samples / seconds if seconds else 0.0
        return (self._samples - samples) / (self._now()[0] - seconds)


class CacheMeter:
    """Means per step of what the caches of a model's tables on this rank, of which there are some, count."""

    def __init__(self, model: nn.Module) -> None:
        self._caches = caches_of(model)
        tables = [table for cache in self._caches for table in cache.tables if table is not None]
        in_host_memory = any(table.config.cache.num_host_rows(table.row_config.num_embeddings) for table in tables)
        self._names = ("read", "written", "stall", *(HOST if in_host_memory else ()))
        self._stall = self._stall_before = 0.0
        self.trained: Counter[str] | None = None  # what was counted when the rows of the last trained step were there
        self._recent: deque[bool] = deque(maxlen=RECENT_STEPS)
        self._widened = 0
        self._last_counts = self._now()

    def stalled(self, begin: float, end: float, moved: tuple[float, float] | None) -> None:
        """Training has waited from `begin` to `end` for a step whose rows were transferred in the time `moved`."""
        if moved is not None:
            self._stall += max(0.0, min(end, moved[1]) - max(begin, moved[0]))

    def wants_deeper_prefetch(self) -> bool:
        """Whether training has waited for rows in several of the last steps; asked after each step."""
        self._recent.append(self._stall - self._stall_before > MIN_STALL)
        self._stall_before = self._stall
        if sum(self._recent) < MANY_STALLS or self._widened == MAX_WIDENED:
            return False
        self._recent.clear()
        self._widened += 1
        return True

    def lap(self, steps: int) -> dict[str, float]:
        """Means per step since the last call, see `Log.cache`."""
        last_counts, self._last_counts = self._last_counts, self._now()
        since = {name: number - last_counts.get(name, 0) for name, number in self._last_counts.items()}
        rows, means = since["lookups"], {name: since[name] / steps for name in self._names}
        return {"rows": rows / steps, "hit_rate": since["hits"] / rows if rows else 1.0, **means}

    def _now(self) -> dict[str, float]:
        stall = self._stall + sum(cache.stall for cache in self._caches)
        return {**(count(self._caches) if self.trained is None else self.trained), "stall": stall}


class DynamicMeter:
    """What the dynamic tables of a model on this rank, if there are some, count; those of one name together."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [table for tables in table_sets_of(model) for table in tables.dynamic.values()]
        self._last_counts = self._now()

    def lap(self, steps: int) -> dict[str, dict[str, float]]:
        """By table, means per step since the last call, see `Log.dynamic`."""
        last_counts, self._last_counts = self._last_counts, self._now()
        return {
            table: {name: n if name in LEVELS else (n - last_counts[table][name]) / steps for name, n in now.items()}
            for table, now in self._last_counts.items()
        }

    def _now(self) -> dict[str, Counter[str]]:
        counts: dict[str, Counter[str]] = {}
        for table in self._tables:
            counts.setdefault(table.config.name, Counter()).update(vars(table.statistics()))
        return counts
