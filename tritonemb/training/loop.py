"""Training loop: steps; log, evaluation and checkpoint after a step; measurement of speed."""

import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tritonemb.comm.control import lost_contact
from tritonemb.comm.group import RankFailed
from tritonemb.data.protocol import Split, reader_seconds
from tritonemb.offloading import OffloadedOptimizer, report
from tritonemb.ops.registry import check_errors
from tritonemb.server.attach import flush
from tritonemb.server.metrics import totals
from tritonemb.training.callbacks import CallbackList, CheckpointSaved, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.callbacks.console import format_bytes
from tritonemb.training.checkpoint import CheckpointError, RunFolder
from tritonemb.training.checkpoint.manager import CheckpointManager
from tritonemb.training.doctor import versions
from tritonemb.training.metrics import Metrics, check_rows, evaluate, warn_of_repeated_rows
from tritonemb.training.ranks import Interrupted, StopRequest, UndefinedMetricsError, on_each_rank
from tritonemb.training.step import STAGES, PreparedStep, count, take
from tritonemb.training.train_state import TrainState, caches_of, table_sets_of
from tritonemb.utils import require

# Training asks for a deeper prefetch after MANY_STALLS stalls in RECENT_STEPS steps, not for a single slow read, and at
# most MAX_WIDENED times: from depth 2 to 8. Waits below MIN_STALL are jitter of threads, which a deeper prefetch does
# not cure.
MIN_STALL = 1e-3  # seconds
RECENT_STEPS, MANY_STALLS = 10, 3
MAX_WIDENED = 6
LEVELS = ("rows", "capacity", "num_bytes")  # statistics of a dynamic table that are levels; the others are counters
HOST_STATISTICS = ("host_hits", "disk_read", "disk_written")  # of tables on disk with a host cache


@dataclass(frozen=True)
class FitResult:
    """Result of a fit.

    Args:
        losses: mean training loss of each epoch since the run began.
        num_samples: samples trained on by this call.
        seconds: wall time of training since the run began, without evaluation and checkpoints.
        samples_per_second: mean of this call, without its first step, which compiles and warms up.
        reason: "finished" or "early stop".
        steps: steps since the run began.
        test: metrics of the last model on the test rows; None if `test` is false.
        best: test metrics of the best checkpoint, by `tritonemb train`; None if it is that of the last step.
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
    """Training loop of one fit.

    The order after a step is log, evaluation, checkpoint. All events up to a step precede its checkpoint, so a run that
    resumes from it logs every later event exactly once. All ranks take the same decisions, from agreed values.
    """

    def __init__(
        self, state: TrainState, checkpointer: CheckpointManager, folder: RunFolder | None, callbacks: CallbackList,
        request: StopRequest,
    ) -> None:  # fmt: skip
        self.state, self.checkpointer, self.folder, self.callbacks = state, checkpointer, folder, callbacks
        self.request, self.options, self.ranks, self.progress = request, state.options, state.ranks, state.progress
        # Measurement.
        self.clock = Clock(self.progress.seconds)
        self.caches = CacheMeter(state.model) if caches_of(state.model) else None
        self.dynamic = DynamicMeter(state.model)
        self.evaluations = Evaluations(state, callbacks, self.clock)
        # Time of the latest step, in milliseconds since rank 0's `_start_time`, and its signal; equal on all ranks.
        self._start_time, self._now = time.monotonic(), 0
        self._signal: int | None = None
        # Latest checkpoint and log.
        self._saved_at, self._saved_step, self._logged_step = 0, self.progress.step, self.progress.step
        self._checkpoint_error: CheckpointError | None = None  # of the latest checkpoint

    def run(self, test: bool) -> FitResult:
        """Train to the end, evaluate the test rows with `test`, and call the callbacks."""
        progress, initial_samples, end = self.progress, self.progress.samples, None
        on_each_rank(self.ranks.control, lambda: check_rows(self.state.data, self.evaluations.due, test))
        try:
            self.callbacks.on_start(start_of(self.state, self.folder))
            self.checkpointer.clean_folder()  # now that nothing refuses to start
            # Train, and wait for embedding servers and for the last checkpoint.
            reason = self._train()
            if reason in ("finished", "early stop"):
                flush(self.state.model)
            self._save(self.checkpointer.finish)
            # Test metrics, messages and the end event.
            metrics = self.evaluations.metrics("test") if test and reason in ("finished", "early stop") else None
            if metrics is not None and self.callbacks and (warning := warn_of_repeated_rows(self.state)):
                self.callbacks.on_message(warning)
            if isinstance(self.state.step.dense_optimizer, OffloadedOptimizer):
                transfers = report(self.state.model).moved.items()
                tiers = (f"{tier} {format_bytes(r)} read, {format_bytes(w)} written" for tier, (r, w) in transfers)
                self.callbacks.on_message(f"offload: {'; '.join(tiers)}")
            speed, seconds = self.clock.samples_per_second, self.clock.seconds
            end = FitEnd(reason, progress.step, progress.samples, seconds, speed, metrics, self.state.data.best_auc)
        except Exception as error:
            if not isinstance(error, RankFailed) and not lost_contact(error):
                with suppress(CheckpointError):  # complete a checkpoint that is being written
                    self.checkpointer.finish()
            raise
        finally:
            self.callbacks.on_end(end)
        if self._checkpoint_error is not None:  # on all ranks
            raise self._checkpoint_error
        if signum := self.ranks.max(self._stop_signal or self.request.signum or 0):  # a rank's may have come late
            raise Interrupted(signum)
        num_samples = progress.samples - initial_samples
        return FitResult(tuple(progress.losses), num_samples, seconds, speed, reason, progress.step, metrics)

    def _train(self) -> str:
        """Train all epochs; return the reason of the end: "finished", "early stop", or the name of a signal."""
        while not self.progress.ended and not self.state.finished:
            self._train_epoch()
            if self._stop_signal is not None and not self.progress.ended:
                if self.folder is not None and self._saved_step != self.progress.step:
                    self._checkpoint()  # the signal came after the step's checkpoint was due
                return signal.Signals(self._stop_signal).name
        return self.progress.ended or "finished"

    @property
    def _stop_signal(self) -> int | None:
        """Signal that ends training; on several ranks the one that they have agreed upon."""
        return self.request.signum if self.ranks.size == 1 else self._signal

    def _train_epoch(self) -> None:
        state, progress, request, start = self.state, self.progress, self.request, self._start_time

        def stop_signal() -> int:
            # After the last step end the pipeline of a stream, too, whose next rows may never come.
            return request.signum or int(state.is_stream and (state.finished or bool(progress.ended)))

        signals = {"signal": stop_signal, "clock": lambda: int(1000 * (time.monotonic() - start))}
        state.begin_epoch()
        with state.open("train", True) as stream, state.steps(stream, True, **signals) as steps:
            step, last = self._next_step(steps)
            while step[0]:
                epoch = progress.epoch
                self._train_step(step)
                # Before the events, which depend on whether the epoch has ended.
                if not (state.is_stream and state.finished):
                    step, last = self._next_step(steps)
                if last or self.state.finished or self._stop_signal is not None:
                    self.evaluations.report_skipped(f"train {epoch}", *self.ranks.skipped_rows(step[1].report))
                # Before a checkpoint, train all steps whose rows have been prefetched: it must not have later rows.
                due = self._stop_signal is not None or self._checkpoint_due()
                draining = due and self.state.has_prefetched_steps()
                self._finish_step(epoch, last, save=not draining)
                if draining:
                    continue
                if progress.ended or self.state.finished or self._stop_signal is not None:
                    return

    def _train_step(self, step: PreparedStep) -> None:
        progress, info = self.progress, step[1]
        self.ranks.step = progress.step + 1
        self.state.step(progress.step, take(step), info.weights, info.scales)
        if self.caches is not None:
            self.caches.trained = info.cache_counts
        progress.advance(info.rows, info.position)
        if self.state.ordered_prefetch is not None:
            self.state.ordered_prefetch.mark_trained(progress.step)
        self.clock.step(info.rows, info.ids)
        if self.callbacks:
            self.callbacks.on_step(StepEnd(progress.step, progress.epoch, progress.samples))

    def _next_step(self, steps: Iterator[PreparedStep]) -> tuple[PreparedStep, bool]:
        """Wait for the next step; return it, and whether there is none in this epoch, which is ended then."""
        progress, begin = self.progress, time.perf_counter()
        step = batches, info = next(steps)
        end, prefetcher = time.perf_counter(), self.state.prefetcher
        stall = self.clock.wait(begin, end, info.times)
        if self.caches is not None:
            self.caches.stall += stall
            deeper = self.options.prefetch_depth is None and self.caches.wants_deeper_prefetch()
            if deeper and self.ranks.size == 1 and prefetcher is not None:
                prefetcher.widen()
        self._now, self._signal = info.clock, info.signal or None
        # End the epoch.
        if last := not batches and not info.signal:
            check_errors(self.state.device)
            if progress.epoch_samples:
                loss = self.state.step.take_loss(1) / progress.epoch_samples
                self.state.check_finite(loss)
                progress.losses.append(loss)
            progress.epoch += 1
            progress.position, progress.epoch_samples = None, 0
        return step, last

    def _finish_step(self, epoch: int, last: bool, save: bool) -> None:
        progress, finished, every = self.progress, self.state.finished, self.options.evaluate_every
        if progress.step % self.options.log_every == 0 or finished:
            self._log(epoch)
        if self.evaluations.due and (progress.step % every == 0 if every else last or finished):
            self.evaluations.validate(epoch)
        progress.ended = progress.ended or ("finished" if finished else "")
        if save and self.folder is not None and self._checkpoint_due():
            self._checkpoint()
        if save and self.state.ordered_prefetch is not None:
            self.state.last_due_step = progress.step
            self.state.ordered_prefetch.hold(False)

    def _log(self, epoch: int) -> None:
        progress = self.progress
        loss, progress.logged_samples = self.state.step.take_loss(0) / progress.logged_samples, 0
        self.state.check_finite(loss)
        sent = self.ranks.take_bytes_sent()  # of all ranks, whether they have callbacks or not
        steps, self._logged_step = progress.step - self._logged_step, progress.step
        if self.callbacks:
            device, on_gpu, servers = self.state.device, self.state.device.type == "cuda", self.state.servers
            memory = torch.cuda.memory_allocated(device) if on_gpu else require("psutil").Process().memory_info().rss
            self.callbacks.on_log(Log(
                progress.step, epoch, progress.samples, loss, *self.state.step.current_rates(), **self.clock.lap(),
                memory_bytes=memory, seconds=self.clock.seconds,
                sent={kind: num_bytes // steps for kind, num_bytes in sent.items()},
                cache={} if self.caches is None else self.caches.lap(steps), dynamic=self.dynamic.lap(steps),
                servers={} if servers is None else totals(servers.statistics()),
            ))  # fmt: skip

    def _checkpoint_due(self) -> bool:
        if self.progress.ended or self._stop_signal is not None or self.progress.is_best:
            return True
        every, minutes = self.options.checkpoints.checkpoint_steps, self.options.checkpoints.checkpoint_minutes
        return 0 < 60_000 * minutes <= self._now - self._saved_at or bool(every and self.progress.step % every == 0)

    def _checkpoint(self) -> None:
        self._saved_at, self.progress.seconds = self._now, self.clock.seconds
        if not self._save(self.checkpointer.finish) and not self.progress.is_best:  # one that is still being written
            self.checkpointer.restore_best()
        check_errors(self.state.device)
        if self._save(lambda: self.checkpointer.start(self.progress.is_best)):
            self._saved_step, self._checkpoint_error = self.progress.step, None
        else:
            self.checkpointer.restore_best()

    def _save(self, call: Callable[[], CheckpointSaved | None]) -> bool:
        """Write a checkpoint by `call` and report it; return False if it failed and training continues."""
        try:
            with self.clock.pause(), self.ranks.without_metering():
                saved = call()
        except CheckpointError as error:
            if self.options.checkpoints.on_checkpoint_error == "stop":
                raise
            self._checkpoint_error = error
            self.callbacks.on_message(f"{error}. Training continues")
            return False
        if saved is not None:
            self.callbacks.on_checkpoint(saved)
        return True


def start_of(state: TrainState, folder: RunFolder | None) -> FitStart:
    progress, exact = state.progress, state.data.num_rows("train")
    rows = state.data.estimated_rows("train") if exact is None else exact
    return FitStart(
        progress.step, state.total_steps, progress.samples, state.total_samples(rows), rows, exact is None,
        num_epochs=state.last_epoch, num_ranks=state.ranks.size, folder=None if folder is None else folder.path,
        config=state.config, versions=versions(state.device),
    )  # fmt: skip


class Evaluations:
    """Evaluations of a fit, reported to its callbacks; they stop the clock and are not metered. Collective."""

    def __init__(self, state: TrainState, callbacks: CallbackList, clock: "Clock") -> None:
        self._state, self._callbacks, self._clock = state, callbacks, clock
        self._reported_skipped = dict[str, int]()
        consumers = bool(callbacks) or state.options.patience is not None
        self.due = bool(state.ranks.max(consumers)) and "validation" in state.data.splits()

    def validate(self, epoch: int) -> None:
        """Evaluate the validation rows, track the best checkpoint, and stop early if patience is exhausted."""
        progress, monitor, patience = self._state.progress, self._state.options.monitor, self._state.options.patience
        self._state.check_finite()
        if (metrics := self.metrics("validation")) is None:
            return
        value, previous_best = getattr(metrics, monitor), progress.best
        best = previous_best is None or (value > previous_best if monitor.endswith("auc") else value < previous_best)
        progress.evaluations_since_best = 0 if best else progress.evaluations_since_best + 1
        if best:
            progress.best, progress.best_step = value, progress.step
        self._callbacks.on_evaluation(Evaluation(progress.step, epoch, "validation", metrics, best))
        if patience is not None and progress.evaluations_since_best >= patience:
            progress.ended = "early stop"

    def metrics(self, split: Split) -> Metrics | None:
        """Evaluate a split; None, and a message, if its labels are all the same."""
        try:
            with self._clock.pause(), self._state.ranks.without_metering():
                metrics = evaluate(self._state, split)
        except UndefinedMetricsError as error:
            self._callbacks.on_message(f"the {split} rows are not evaluated: {str(error).removeprefix('rank 0: ')}")
            return None
        text = f"{split}: {metrics.num_samples:,} rows were read, {metrics.num_skipped:,} bad rows skipped"
        self.report_skipped(split, metrics.num_skipped, text)
        return metrics

    def report_skipped(self, split: str, skipped: int, text: str) -> None:
        """Report skipped rows of a split, unless this number of them has been reported."""
        if skipped and self._reported_skipped.get(split) != skipped:
            self._reported_skipped[split] = skipped
            self._callbacks.on_message(text)


def read_clocks() -> dict[str, float]:
    """Seconds of wall time, of CPU time of this process, and of that of its reader threads."""
    return {"seconds": time.perf_counter(), "cpu": time.process_time(), "reader": reader_seconds()}


class Clock:
    """Training time, speed and waits; blocks under `pause` do not count. `seconds`: time of earlier processes."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._earlier_seconds, self._start = seconds, read_clocks()  # pauses move the start forward
        # Samples and ids of this process, and seconds of waiting: in all ("wait"), and for each stage of preparation.
        self._counts = dict.fromkeys(("samples", "ids", "wait", *STAGES), 0.0)
        self._warm = self._lap = self._now()  # readings after the first step, and at the last lap

    def _now(self) -> dict[str, float]:
        return {name: now - self._start[name] for name, now in read_clocks().items()} | self._counts

    @property
    def seconds(self) -> float:
        return self._earlier_seconds + self._now()["seconds"]

    @contextmanager
    def pause(self) -> Iterator[None]:
        begin = read_clocks()
        try:
            yield
        finally:
            self._start = {name: self._start[name] + now - begin[name] for name, now in read_clocks().items()}

    def step(self, num_samples: int, num_ids: int) -> None:
        """Count a step. Speeds exclude the first step of a process, which compiles and warms up."""
        first = not self._counts["samples"]
        self._counts["samples"] += num_samples
        self._counts["ids"] += num_ids
        if first:
            self._warm = self._lap = self._now()

    def wait(self, begin: float, end: float, times: Sequence[float]) -> float:
        """Count a wait for a step with these `StepInfo.times`; return the seconds of its last stage, for rows."""
        stages = zip(STAGES, pairwise(times), strict=False)  # no times: the end of the data
        waits = {stage: max(0.0, min(end, last) - max(begin, first)) for stage, (first, last) in stages}
        for name, seconds in {"wait": end - begin, **waits}.items():
            self._counts[name] += seconds
        return waits.get(STAGES[-1], 0.0)

    def lap(self) -> dict[str, Any]:
        """Speeds and waits since the last lap, as fields of `Log`."""
        last, self._lap = self._lap, self._now()
        since = {name: value - last[name] for name, value in self._lap.items()}
        if not since["samples"]:  # the first step alone
            return {"samples_per_second": self.samples_per_second, "data_wait": 0.0}
        wait, *waits = (min(since[name] / since["seconds"], 1.0) for name in ("wait", *STAGES))
        speeds = {f"{name}_per_second": since[name] / since["seconds"] for name in ("samples", "ids")}
        reader = min(since["reader"] / since["cpu"], 1.0) if since["cpu"] else 0.0
        waits_by_stage = dict(zip(STAGES, waits, strict=True))
        return {**speeds, "data_wait": wait, "waits": waits_by_stage, "cpu": {"reader": reader, "step": 1.0 - reader}}

    @property
    def samples_per_second(self) -> float:
        """Mean of this process without its first step, or of the first step if it is the only one."""
        seconds, samples, now = self._warm["seconds"], self._warm["samples"], self._now()
        if now["samples"] == samples:
            return samples / seconds if seconds else 0.0
        return (now["samples"] - samples) / (now["seconds"] - seconds)


class CacheMeter:
    """Statistics per step of the caches of this rank's tables; the model must have cached tables."""

    def __init__(self, model: nn.Module) -> None:
        self._caches = caches_of(model)
        tables = [cached.config for cache in self._caches for cached in cache.rows if cached is not None]
        in_host_memory = any(table.cache.num_host_rows(table.num_embeddings) for table in tables)
        self._names = ("read", "written", "stall", *(HOST_STATISTICS if in_host_memory else ()))
        # Counters right after the prefetch of the step that was trained last; None before it.
        self.trained: Counter[str] | None = None
        # Stalls: seconds in all and up to the last step; which of the recent steps stalled; deepenings of the prefetch.
        self.stall = self._last_stall = 0.0
        self._recent_stalls: deque[bool] = deque(maxlen=RECENT_STEPS)
        self._num_widened = 0
        self._last_counts = self._now()

    def wants_deeper_prefetch(self) -> bool:
        """Return whether several recent steps have stalled. Call it once per step."""
        self._recent_stalls.append(self.stall - self._last_stall > MIN_STALL)
        self._last_stall = self.stall
        if sum(self._recent_stalls) < MANY_STALLS or self._num_widened == MAX_WIDENED:
            return False
        self._recent_stalls.clear()
        self._num_widened += 1
        return True

    def lap(self, steps: int) -> dict[str, float]:
        """Return means per step since the last call, see `Log.cache`."""
        last_counts, self._last_counts = self._last_counts, self._now()
        since = {name: number - last_counts.get(name, 0) for name, number in self._last_counts.items()}
        rows, means = since["lookups"], {name: since[name] / steps for name in self._names}
        return {"rows": rows / steps, "hit_rate": since["hits"] / rows if rows else 1.0, **means}

    def _now(self) -> dict[str, float]:
        stall = self.stall + sum(cache.stall for cache in self._caches)
        return {**(count(self._caches) if self.trained is None else self.trained), "stall": stall}


class DynamicMeter:
    """Statistics per step of this rank's dynamic tables; shards of one table are added."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [table for tables in table_sets_of(model) for table in tables.dynamic.values()]
        self._last_counts = self._now()

    def lap(self, steps: int) -> dict[str, dict[str, float]]:
        """Return means per step since the last call, by table, see `Log.dynamic`."""
        last_counts, self._last_counts = self._last_counts, self._now()
        return {
            table: {name: n if name in LEVELS else (n - last_counts[table][name]) / steps for name, n in now.items()}
            for table, now in self._last_counts.items()
        }

    def _now(self) -> dict[str, Counter[str]]:
        counts = defaultdict[str, Counter[str]](Counter)
        for table in self._tables:
            counts[table.config.name].update(vars(table.statistics()))
        return counts
