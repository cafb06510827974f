"""Training steps: batches prefetched to the device; forward, backward and optimizer step.

While a step computes, the next ones are prepared. A rank without data trains on empty batches till all have finished.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tritonemb.comm.control import describe, lost_contact
from tritonemb.comm.group import Round
from tritonemb.data.batch import Batch, pad_batch
from tritonemb.data.protocol import Batches, ReadReport
from tritonemb.offloading import OffloadedOptimizer, offload
from tritonemb.offloading.options import OffloadOptions
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.tables.cache import RowCache
from tritonemb.tables.table_set import needs_prefetch, prefetch
from tritonemb.training.config import Precision, TrainerOptions
from tritonemb.training.model import dense_parameters, optimizers_of_tables
from tritonemb.training.ranks import Ranks
from tritonemb.training.schedule import LossScale, Schedule, label_scales, label_totals, loss_of

PLAIN = (int, float, str, bool, type(None))  # types of optimizer options and states that are saved as JSON
IMPLEMENTATION = "params", "fused"  # entries of a parameter group that a checkpoint does not save as options
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAIT_SECONDS = 0.2  # a wait for a batch looks for a signal so often: the delay of Ctrl-C if no rows arrive
Forward = Callable[..., Any]
Prefetch = Callable[[Any], Any]


@dataclass(frozen=True)
class StepInfo:
    """Metadata of a prepared step."""

    # Weights of the batches' mean losses. Gradients are averaged over the ranks; with these weights the loss of the
    # step is the mean over the samples of all batches and ranks.
    weights: tuple[float, ...]
    rows: int  # samples of all ranks
    position: Any  # of this rank's data after the step's batches
    report: ReadReport
    signal: int = 0  # number of a signal that a rank received, 0 for none
    clock: int = 0  # of rank 0
    copied: torch.cuda.Event | None = field(default=None, repr=False)  # after the copy of the batches to the device
    ids: int = 0  # of this rank's batches
    times: tuple[float, ...] = ()  # begin of the first of `STAGES`, and the end of each
    cache_counts: Counter[str] | None = None  # after the last stage
    scales: Tensor | None = field(default=None, repr=False)  # see `loss_of`


PreparedStep = tuple[tuple[Batch, ...], StepInfo]
# Stages of the preparation of a step: reading; agreement of the ranks; transfers of batches and rows to the device,
# with the exchange of ids.
STAGES = "data", "ranks", "rows"


@dataclass(frozen=True)
class StepPipeline:
    """Preparation of the steps of an epoch or an evaluation: batches on the device."""

    ranks: Ranks
    device: torch.device
    empty: Callable[[], Batch]  # makes a batch without samples
    accumulate: int = 1  # batches per step
    prefetch: Prefetch | None = None  # exchanges a batch's ids, transfers its rows to the device; returns its features
    count_caches: Callable[[], Counter[str]] | None = None  # counts uses of the caches that `prefetch` fills
    signal: Callable[[], int] = lambda: 0  # number of the signal that this rank has received, 0 for none
    clock: Callable[[], int] = lambda: 0  # time of this rank
    pad: bool = False  # so that the logit of a sample does not depend on the other samples; see `pad_batch`
    host_ids: bool = False  # ids stay on the CPU, for a prefetch by the training thread
    is_stream: bool = False  # rows may come at any time, so that a rank that waits for them has not failed
    num_labels: int = 0  # of batches with several labels or weights

    def steps(self, stream: Batches) -> Generator[PreparedStep]:
        """Yield the prepared steps of a stream; a collective. The last step has no batches: the data has ended, or a
        rank has received a signal. Raise this rank's exception of the stream; RankFailed for that of another rank."""
        device, prefetch = self.device, (lambda features: features) if self.host_ids else self.prefetch
        copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        while True:
            # Read this rank's batches, and agree with the other ranks on the step.
            start_position, batches, times = stream.position, list[Batch](), [time.perf_counter()]
            consensus = self._read(stream, batches, times)
            if consensus.signal or not consensus.batches:
                ended = not consensus.batches and not consensus.waiting
                position, signal = (stream.position, 0) if ended else (start_position, consensus.signal)
                yield (), StepInfo((), 0, position, stream.report, signal, consensus.clock)
                return
            batches += [self.empty() for _ in range(consensus.batches - len(batches))]
            rows = sum(consensus.rows)
            weights = tuple(len(batch) * self.ranks.size / max(rows, 1) for batch in batches)

            # Copy the batches to the device and prefetch their rows, on a stream of their own.
            ids = sum(len(batch.sparse.values()) for batch in batches)
            batches = [pad_batch(batch) for batch in batches] if self.pad else batches
            with nullcontext() if copy_stream is None else torch.cuda.stream(copy_stream):
                device_batches = tuple(batch.to(device, non_blocking=True) for batch in batches)
                if prefetch is not None:
                    features = (prefetch(batch.sparse) for batch in (batches if self.host_ids else device_batches))
                    pairs = zip(device_batches, features, strict=True)
                    device_batches = tuple(replace(batch, sparse=sparse, buffer=None) for batch, sparse in pairs)
                scales = label_scales(consensus.totals, rows, device)
                copied = None if copy_stream is None else copy_stream.record_event()
            times.append(time.perf_counter())
            state = stream.position, stream.report, 0, consensus.clock, copied, ids, tuple(times)
            yield device_batches, StepInfo(weights, rows, *state, self.count_caches and self.count_caches(), scales)
            del batches, device_batches  # free them before the next ones are read

    def prefetch_now(self, step: PreparedStep) -> PreparedStep:
        """Prefetch a step with `host_ids`, in the training thread."""
        batches, info = step
        assert self.prefetch is not None
        batches = tuple(replace(batch, sparse=self.prefetch(batch.sparse), buffer=None) for batch in batches)
        return batches, replace(info, times=(*info.times[:-1], time.perf_counter()) if batches else ())

    def _read(self, stream: Batches, batches: list[Batch], times: list[float]) -> Round:
        """Append the batches of a step, unless there is a signal, and agree on it; append the times after both."""
        while True:
            try:
                waiting, error = not self._append(stream, batches), None
            except Exception as raised:
                waiting, error = False, raised
                batches.clear()
            read_at = time.perf_counter()
            consensus = self._agree(batches, error, waiting)
            if consensus.signal or not consensus.waiting:
                times += read_at, time.perf_counter()
                return consensus

    def _append(self, stream: Batches, batches: list[Batch]) -> bool:
        """Append the missing batches of a step, to the end of the data; return False if they have not come yet."""
        while len(batches) < self.accumulate:
            while not stream.wait(WAIT_SECONDS):
                if self.is_stream or self.signal():
                    return False
            if (batch := next(stream, None)) is None:
                break
            batches.append(batch)
        return True

    def _agree(self, batches: list[Batch], error: Exception | None, waiting: bool) -> Round:
        """Exchange numbers of rows and batches with all ranks. Raise `error`, of this rank's data, or of another's."""
        ranks, rows = self.ranks, sum(len(batch) for batch in batches)
        totals = label_totals(batches, self.num_labels)
        if ranks.size == 1 and error is not None:
            raise error
        if ranks.size == 1:
            return Round((rows,), len(batches), self.signal(), self.clock(), waiting, totals)
        values: dict[str, Any] = {"signal": self.signal(), "clock": self.clock(), "waiting": waiting, "totals": totals}
        failure = None if error is None else describe(error)
        try:
            return ranks.consensus.next(rows, len(batches), failure=failure, **values)
        except RuntimeError as connection_error:
            if ranks.reports is not None and lost_contact(connection_error):
                ranks.reports.report()  # tell the others at once that this rank is alive
            if error is not None:
                raise error from None
            raise


def take(step: PreparedStep) -> tuple[Batch, ...]:
    """Return the batches of a step, synchronized with this thread's CUDA stream."""
    batches, info = step
    if info.copied is not None:
        stream = torch.cuda.current_stream(batches[0].labels.device)
        stream.wait_event(info.copied)
        for tensor in tree_leaves([info.scales, *((b.dense, b.labels, b.weights, b.sparse) for b in batches)]):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)  # the allocator must not reuse the memory before this stream is done
    return batches


def prefetch_for(model: nn.Module, training: bool) -> Callable[..., Any] | None:
    """Return a function that prefetches a batch's features for a model; None if the model needs no prefetch."""

    def prefetch_features(features: Any, effects: bool = True, assign: bool = True) -> Any:
        with torch.set_grad_enabled(training):
            if isinstance(model, HybridParallel):  # ranks exchange ids in any case, in the same thread
                return model.prefetch(features, effects and assign)
            return prefetch(model, features) if effects else features

    return prefetch_features if isinstance(model, HybridParallel) or needs_prefetch(model) else None


class OrderedPrefetch:
    """Prefetcher in training order, for tables whose prefetch changes them: cached dynamic tables, tables on servers.

    When tables are saved or evaluated, no later batch may have been prefetched. So a step beyond `limit`, or one that
    arrives on hold, goes to `skip`, which changes nothing: its rows are fetched in training, and later steps wait.
    `accumulate` batches are a step; at most `depth` steps are prefetched at once, up to step `limit()`."""

    def __init__(
        self, prefetch: Prefetch, skip: Prefetch, step: int, accumulate: int, depth: int, limit: Callable[[], int]
    ) -> None:
        self._prefetch, self._skip, self._limit = prefetch, skip, limit
        self._accumulate, self._depth = accumulate, depth
        self._changed, self._calls = threading.Condition(), 0
        self._skipped = False  # whether the current step is not prefetched
        self._step = self._prefetched = self._trained = step  # last step that arrived, was prefetched, was trained
        self.on_hold = False

    def __call__(self, features: Any) -> Any:
        """Prefetch a batch's features, or skip that; called by the pipeline's thread."""
        if self._calls % self._accumulate == 0:
            self._step += 1
            with self._changed:
                self._changed.wait_for(lambda: self.on_hold or self._may_follow())
                self._skipped = not self._may_follow() or self.on_hold or self._step > self._limit()
                self._prefetched += not self._skipped
        self._calls += 1
        return self._skip(features) if self._skipped else self._prefetch(features)

    def _may_follow(self) -> bool:
        """Return whether the current step is the next one to prefetch, and within the depth."""
        return self._prefetched == self._step - 1 and self._step <= self._trained + self._depth

    def mark_trained(self, step: int) -> None:
        with self._changed:
            self._trained, self._prefetched = step, max(self._prefetched, step)
            self._changed.notify()

    def hold(self, on_hold: bool) -> int:
        """Hold or resume the prefetch; return the last step that has been prefetched or trained."""
        with self._changed:
            self.on_hold = on_hold
            self._changed.notify()
            return self._prefetched


def count(caches: Iterable[RowCache]) -> Counter[str]:
    """Sum the `CacheStatistics` of all tables of caches, by field."""
    counts: Counter[str] = Counter()
    for cache in caches:
        for statistics in cache.statistics().values():
            counts.update(vars(statistics))
    return counts


class TrainStep:
    """Train step of a model: forward, backward, and the optimizers of the dense part and the tables."""

    def __init__(
        self, model: nn.Module, device: torch.device, ranks: Ranks, options: TrainerOptions,
        dense_optimizer: Callable[..., torch.optim.Optimizer], offloading: OffloadOptions,
    ) -> None:  # fmt: skip
        self.model, self.device, self.ranks, self.precision = model, device, ranks, options.precision
        self.forward: Forward = _compile(model) if options.compile else model

        # Optimizers: of the parameters outside fused tables, if any, with its class name before offload.
        dense = dense_parameters(model)
        self.dense_optimizer = dense_optimizer(dense, lr=options.dense_lr) if dense else None
        self.optimizer_name = None if self.dense_optimizer is None else type(self.dense_optimizer).__name__
        self.fused_modules = optimizers_of_tables(model)
        self.loss_scale = LossScale()

        # Sums over this rank's samples, on the device: reading them every step would wait for it.
        self.loss_sums = torch.zeros(2, dtype=torch.float64, device=device)  # since the last log, and in this epoch
        self.input_sum = torch.zeros((), dtype=torch.float64, device=device)  # of dense features; may become non-finite

        # Schedules of dense part and tables; learning rates and options before training, to compare with a checkpoint.
        self._schedules: tuple[Schedule | None, Schedule | None] = (None, None)
        self._base_rates, self._base_options = self._rates(), self._options()
        if offloading.moved:
            self._offload(offloading)

    def _offload(self, offloading: OffloadOptions) -> None:
        arguments = {name.removeprefix("offload_"): value for name, value in vars(offloading).items()}
        if self.dense_optimizer is None:
            option = offloading.moved[0]
            raise ValueError(f"{option}: every parameter of the model is in a fused table; remove the option")
        for group in self._dense_groups():
            if self.device.type == "cpu" and group.get("fused", True) is None:
                group["fused"] = False  # torch's default on the CPU, for bitwise identical results
        _, self.dense_optimizer = offload(self.model, self.dense_optimizer, device=self.device, **arguments)

    def schedule(self, dense: Schedule, tables: Schedule) -> None:
        self._schedules = (None if dense.is_constant else dense, None if tables.is_constant else tables)

    def check_rates(self, number: int) -> None:
        """Raise ValueError if a schedule has decayed to 0 before step `number`."""
        for name, schedule in zip(("dense", "table"), self._schedules, strict=True):
            if schedule is not None and schedule.factor(number) == 0:
                text = "so later steps would train nothing; pass decay_steps of all calls of fit(), or final above 0"
                raise ValueError(f"{name}_schedule has decayed to a learning rate of 0 at step {number}, {text}")

    def __call__(
        self, number: int, batches: Sequence[Batch], weights: Sequence[float], scales: Tensor | None = None
    ) -> None:
        """Train step `number`, from 0, on batches, equally many on all ranks; `weights` multiply their losses, those of
        `loss_of` with these `scales`."""
        if any(self._schedules):
            for base, (group, schedule) in zip(self._base_rates, self._scheduled_groups(), strict=True):
                if schedule is not None:
                    group["lr"] = base * schedule.factor(number)
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        if self.precision == "fp16":
            self._scaled_step(batches, weights, scales)
        else:
            with self._accumulating() if len(batches) > 1 else nullcontext():
                self._backward(batches, weights, scales, 1.0)
            if self.dense_optimizer is not None:
                self.dense_optimizer.step()
        if isinstance(self.model, HybridParallel):
            self.model.end_step()

    def take_loss(self, index: int) -> float:
        """Return the sum of all ranks' losses since the last call, and reset it; index 0 for logs, 1 for epochs."""
        value = self.ranks.sum(self.loss_sums[index])
        self.loss_sums[index] = 0.0
        return value

    def current_rates(self) -> tuple[float | None, float | None]:
        dense = None if self.dense_optimizer is None else float(self.dense_optimizer.param_groups[0]["lr"])
        return dense, self.fused_modules[0].current_learning_rate if self.fused_modules else None

    def to_json(self) -> dict[str, Any]:
        """State for a checkpoint: learning rates and options, initial and current, and the loss scale."""
        rates = {"base_rates": self._base_rates, "rates": self._rates()}
        options = {"base_options": self._base_options, "options": self._options()}
        return rates | options | {"loss_scale": asdict(self.loss_scale)}

    def load_json(self, values: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, except options and rates whose initial values the user has changed."""
        self.loss_scale = LossScale(**values["loss_scale"])
        for options in (*values["base_options"], *values["options"]):
            options.pop("fused", None)  # of older checkpoints
        if values["base_options"] == self._base_options:
            for group, options in zip(self._dense_groups(), values["options"], strict=True):
                group.update(options)
        if values["base_rates"] == self._base_rates:
            for (group, _), rate in zip(self._scheduled_groups(), values["rates"], strict=True):
                # A tensor remains one: optimizers round steps by a tensor otherwise than by a number.
                group["lr"] = torch.full_like(lr, rate) if isinstance(lr := group["lr"], Tensor) else rate

    def all_loss_sums(self) -> Tensor:
        """Gather `loss_sums`: `[2]` of one process, otherwise `[num_ranks, 2]`. Collective."""
        if self.ranks.size == 1:
            return self.loss_sums
        return torch.tensor(self.ranks.control.all_gather_object(self.loss_sums.tolist()), dtype=torch.float64)

    def load_loss_sums(self, sums: Tensor) -> None:
        """Restore this rank's sums; after a change of the number of ranks, rank 0 gets the sums of all ranks."""
        sums = sums.reshape(-1, 2)
        total = sums.sum(0) if self.ranks.is_first else torch.zeros(2)
        self.loss_sums.copy_(sums[self.ranks.rank] if len(sums) == self.ranks.size else total)

    def _backward(
        self, batches: Sequence[Batch], weights: Sequence[float], scales: Tensor | None, scale: float
    ) -> None:
        """Backward of the batches' weighted mean losses, multiplied by `scale`; count losses and inputs."""
        for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            batch, factor = batch.to(self.device, non_blocking=True), weight * scale
            # Dense gradients are averaged over the ranks in the backward of the last batch only.
            is_last = index == len(batches) - 1
            with self.model.no_sync() if not is_last and isinstance(self.model, HybridParallel) else nullcontext():
                logits = logits_of(self.forward, batch, self.precision, self.device)
                loss = loss_of(logits, batch, scales)
                (loss if factor == 1.0 else loss * factor).backward()
            self.loss_sums.add_(loss.detach(), alpha=len(batch))
            self.input_sum += batch.dense.sum()

    def _scaled_step(self, batches: Sequence[Batch], weights: Sequence[float], scales: Tensor | None) -> None:
        """Step with loss scaling: gradients are checked before any update; an overflow on any rank skips the step.

        So does a gradient that saturates in an exchange, unless the scale is the least one."""
        scale, saturated = self.loss_scale.factor, self._saturated_gradients()
        with suppress(_GradientOverflow), self._accumulating():
            self._backward(batches, weights, scales, scale)
            finite = [module.scale_accumulated(1 / scale) for module in self.fused_modules]
            finite.append(scale == LossScale.SMALLEST or self._saturated_gradients() == saturated)
            if isinstance(self.dense_optimizer, OffloadedOptimizer):
                finite.append(self.dense_optimizer.scale_gradients(1 / scale))
            else:
                gradients = [p.grad for group in self._dense_groups() for p in group["params"] if p.grad is not None]
                shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
                finite += [bool(gradient.mul_(1 / scale).isfinite().all()) for gradient in shards]
            overflowed = self.ranks.max(not all(finite)) > 0
            if overflowed:
                raise _GradientOverflow
        if self.dense_optimizer is not None and not overflowed:
            self.dense_optimizer.step()
        self.loss_scale.update(overflowed)

    def _saturated_gradients(self) -> int:
        return self.model.saturated(only_gradients=True) if isinstance(self.model, HybridParallel) else 0

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of fused tables in the block, and apply them at its end unless it raises."""
        with ExitStack() as stack:
            for module in self.fused_modules:
                stack.enter_context(module.accumulate())
            yield

    def _options(self) -> list[dict[str, Any]]:
        """Options of the dense optimizer that JSON can encode, by parameter group, but its implementation."""
        return [
            {name: value for name, value in group.items() if name not in IMPLEMENTATION and isinstance(value, PLAIN)}
            for group in self._dense_groups()
        ]

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group, _ in self._scheduled_groups()]

    def _dense_groups(self) -> list[dict[str, Any]]:
        return [] if self.dense_optimizer is None else self.dense_optimizer.param_groups

    def _scheduled_groups(self) -> list[tuple[dict[str, Any], Schedule | None]]:
        """Parameter groups of all optimizers with their schedules. Not stored: loading a state creates new groups."""
        dense, tables = self._schedules
        optimizers = [m.fused_optimizer for m in self.fused_modules if m.fused_optimizer is not None]
        fused = [(group, tables) for optimizer in optimizers for group in optimizer.param_groups]
        return [*((group, dense) for group in self._dense_groups()), *fused]


class _GradientOverflow(Exception):
    """A gradient is not finite at the current loss scale."""


def _compile(model: nn.Module) -> Forward:
    """Compile a model, once for all batch sizes: the last batch of an epoch is smaller."""
    from tritonemb.compiler import dynamic_batch  # loads the compiler

    compiled = torch.compile(model)

    def forward(*inputs: Any) -> Any:
        with dynamic_batch(*inputs):
            return compiled(*inputs)

    return forward


def logits_of(forward: Forward, batch: Batch, precision: Precision, device: torch.device) -> Tensor:
    """Compute the logits of `forward(dense, sparse)`, at least fp32; ValueError unless they have the labels' shape."""
    # Autocast: matrix products in 16 bits; tables and weights are unchanged.
    with nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision]):
        logits: Tensor = forward(batch.dense, batch.sparse)
    if logits.shape != batch.labels.shape:
        shape = ", ".join(map(str, batch.labels.shape))
        raise ValueError(f"the model must return logits [{shape}], got shape {list(logits.shape)}")
    return logits.float() if logits.dtype in DTYPES.values() else logits
