"""A step: its batches, prefetched to the device; then forward, backward, and the optimizers of dense part and tables.

While a step computes, the next one is ready, and the one after it is being made. A rank that has run out of data has
batches without samples until all have.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tritonemb.comm.control import describe, lost_contact
from tritonemb.comm.group import Round
from tritonemb.data.batch import Batch, pad_batch
from tritonemb.data.protocol import Batches, ReadReport
from tritonemb.nn.collections import TableCollection
from tritonemb.offloading import OffloadedOptimizer, offload
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.tables.cache import RowCache
from tritonemb.tables.lookup import PrefetchedFeatures, needs_prefetch, prefetch
from tritonemb.training.config import OffloadOptions, Precision
from tritonemb.training.ranks import Ranks
from tritonemb.training.schedule import LossScale, Schedule

PLAIN = (int, float, str, bool, type(None))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Forward = Callable[..., Any]
Prefetch = Callable[[Any], Any]


@dataclass(frozen=True)
class StepInfo:
    """What belongs to the batches of a step.

    Args:
        weights: of the batches' mean losses. The ranks' gradients are averaged, so they are such that the step's loss
            is the mean over the samples of all batches of all ranks.
        rows: samples of all ranks.
        position, report: of this rank's data after them.
        signal: that some rank received, 0 for none.
        clock: rank 0's.
        copied: when the batches are on the device.
        moved: from when to when they, and the rows that they need, were moved to the device.
        counted: what the caches of these rows had counted then.
    """

    weights: tuple[float, ...]
    rows: int
    position: Any
    report: ReadReport
    signal: int = 0
    clock: int = 0
    copied: torch.cuda.Event | None = field(default=None, repr=False)
    moved: tuple[float, float] | None = None
    counted: Counter[str] | None = None


PreparedStep = tuple[tuple[Batch, ...], StepInfo]


def prepare(
    stream: Batches, ranks: Ranks, device: torch.device, empty: Callable[[], Batch], *,
    accumulate: int = 1, prefetch: Prefetch | None = None, counted: Callable[[], Counter[str]] | None = None,
    signal: Callable[[], int] = lambda: 0, clock: Callable[[], int] = lambda: 0, pad: bool = False,
) -> Generator[PreparedStep, None, None]:  # fmt: skip
    """The steps of an epoch, or of an evaluation: batches on the device; collective where there are several ranks.

    The last one has no batches: the data is over, or a signal arrived.

    Args:
        prefetch: a batch's features for the model, whose ids are exchanged and whose rows are on the device.
        counted: what the caches of rows that `prefetch` moves have counted.
        signal: that asks this rank to stop, 0 for none.
        pad: batches, so that a sample's logit does not depend on the samples beside it; see `pad_batch`.

    Raises:
        RankFailed: the data of another rank has failed.
        Exception: whatever the stream raised, on this rank.
    """
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    while True:
        start_position, error = stream.position, None
        try:
            batches = list(islice(stream, accumulate))
        except Exception as raised:
            batches, error = [], raised
        step_round = _agree(ranks, batches, error, signal(), clock())
        if not step_round.batches or step_round.signal:
            position, number = (start_position, step_round.signal) if step_round.batches else (stream.position, 0)
            yield (), StepInfo((), 0, position, stream.report, number, step_round.clock)
            return
        batches += [empty() for _ in range(step_round.batches - len(batches))]
        rows = sum(step_round.rows)
        weights = tuple(len(batch) * ranks.size / max(rows, 1) for batch in batches)
        begin = time.perf_counter()
        batches = [pad_batch(batch) for batch in batches] if pad else batches
        with nullcontext() if copies is None else torch.cuda.stream(copies):
            device_batches = tuple(batch.to(device, non_blocking=True) for batch in batches)
            if prefetch is not None:
                device_batches = tuple(replace(b, sparse=prefetch(b.sparse), buffer=None) for b in device_batches)
            copied = None if copies is None else copies.record_event()
        moved = begin, time.perf_counter()
        yield device_batches, StepInfo(
            weights, rows, stream.position, stream.report, 0, step_round.clock, copied, moved,
            None if counted is None else counted(),
        )  # fmt: skip
        del batches, device_batches  # or they would stay until the next ones are there


def _agree(ranks: Ranks, batches: list[Batch], error: Exception | None, signal: int, clock: int) -> Round:
    """What all ranks have for a step; raises `error`, of this rank's data, or that another rank's have failed."""
    if error is not None and ranks.size == 1:
        raise error
    rows = sum(len(batch) for batch in batches)
    if ranks.size == 1:
        return Round((rows,), len(batches), signal, clock)
    failure = None if error is None else describe(error)
    try:
        return ranks.agreement.next(rows, len(batches), failure=failure, signal=signal, clock=clock)
    except RuntimeError as lost:
        if ranks.reports is not None and lost_contact(lost):
            ranks.reports.report()  # at once: this rank is alive
        if error is not None:
            raise error from None
        raise


def take(step: PreparedStep) -> tuple[Batch, ...]:
    """The batches of a step, for the CUDA stream of this thread."""
    batches, info = step
    if info.copied is not None:
        stream = torch.cuda.current_stream(batches[0].labels.device)
        stream.wait_event(info.copied)
        for tensor in tree_leaves([(batch.dense, batch.labels, batch.sparse) for batch in batches]):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)  # the allocator must know that the stream uses the memory
    return batches


def prefetch_for(model: nn.Module, training: bool) -> Prefetch | None:
    """Prefetches a batch's features for a model, with gradients to come or without; None if there is no need."""
    if not isinstance(model, HybridParallel) and not needs_prefetch(model):
        return None

    def prefetch_features(features: Any) -> PrefetchedFeatures:
        with torch.set_grad_enabled(training):
            if isinstance(model, HybridParallel):
                return model.prefetch(features, assign=False)  # a checkpoint has no rows of steps to come
            return prefetch(model, features)

    return prefetch_features


class RowsAhead:
    """Prefetches batches in the order in which they are trained, where tables keep account of that: those of cached
    dynamic tables, whose new ids get rows then, and those of tables on embedding servers.

    Where tables are saved or evaluated there must be no rows of batches that come later. So a step beyond `limit`, or
    one that comes to be prefetched while the pipeline is held, is left as it is, and gets its rows when it is trained;
    the next ones wait until then.

    Args:
        step: steps trained so far.
        accumulate: batches of a step.
        depth: steps that may be prefetched at once.
        limit: the last step that may be, now.
    """

    def __init__(self, prefetch: Prefetch, step: int, accumulate: int, depth: int, limit: Callable[[], int]) -> None:
        self._prefetch, self._accumulate, self._depth, self._limit = prefetch, accumulate, depth, limit
        self._changed, self._calls, self._left = threading.Condition(), 0, False
        self._step = self._assigned = self._trained = step
        self.on_hold = False

    def __call__(self, features: Any) -> Any:
        """For the pipeline's thread: a batch's features, prefetched or not."""
        if self._calls % self._accumulate == 0:
            self._step += 1
            with self._changed:
                self._changed.wait_for(lambda: self.on_hold or self._may_follow())
                self._left = not self._may_follow() or self.on_hold or self._step > self._limit()
                self._assigned += not self._left
        self._calls += 1
        return features if self._left else self._prefetch(features)

    def _may_follow(self) -> bool:
        return self._assigned == self._step - 1 and self._step <= self._trained + self._depth

    def trained(self, step: int) -> None:
        """A step has been trained, prefetched or not."""
        with self._changed:
            self._trained, self._assigned = step, max(self._assigned, step)
            self._changed.notify()

    def hold(self, on_hold: bool) -> int:
        """Prefetch nothing more, or again; the last step that is prefetched."""
        with self._changed:
            self.on_hold = on_hold
            self._changed.notify()
            return self._assigned


def count(caches: Iterable[RowCache]) -> Counter[str]:
    """What the caches have counted, of all tables: the fields of `CacheStatistics`."""
    counts: Counter[str] = Counter()
    for cache in caches:
        for statistics in cache.statistics().values():
            counts.update(vars(statistics))
    return counts


class TrainStep:
    """Trains a model step by step; the options are those of `Trainer`.

    Attributes:
        forward: the model, compiled if that is asked for.
        dense_optimizer: None where every parameter is in a fused table.
        optimizer_name: its class, before it is offloaded.
        loss_sums: over this rank's samples: since the last log, and in this epoch.
        input_sum: of its dense numbers: not finite once one of them was not.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, ranks: Ranks,
        dense_optimizer: Callable[..., torch.optim.Optimizer], dense_lr: float, precision: Precision, compile: bool,
        offloading: OffloadOptions,
    ) -> None:  # fmt: skip
        self.model, self.device, self.ranks, self.precision = model, device, ranks, precision
        self.forward: Forward = torch.compile(model) if compile else model
        dense = dense_parameters(model)
        self.dense_optimizer = dense_optimizer(dense, lr=dense_lr) if dense else None
        self.optimizer_name = None if self.dense_optimizer is None else type(self.dense_optimizer).__name__
        self.collections = fused_collections(model)
        self.loss_scale = LossScale()
        self.loss_sums = torch.zeros(2, dtype=torch.float64, device=device)
        self.input_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._schedules: tuple[Schedule | None, Schedule | None] = (None, None)
        self._base_rates = [float(group["lr"]) for group, _ in self._rates()]
        self._base_options = self._options()
        if offloading.moved:
            arguments = {name.removeprefix("offload_"): value for name, value in vars(offloading).items()}
            self._offload(offloading.moved[0], arguments)

    def _offload(self, option: str, arguments: dict[str, Any]) -> None:
        if self.dense_optimizer is None:
            raise ValueError(f"{option}: every parameter of the model is in a fused table; leave it out")
        for group in self._dense_groups():
            if self.device.type == "cpu" and group.get("fused", True) is None:
                group["fused"] = False  # as torch chooses there, or results would have other bits
        _, self.dense_optimizer = offload(self.model, self.dense_optimizer, device=self.device, **arguments)

    def schedule(self, dense: Schedule, tables: Schedule) -> None:
        """Let the learning rates follow these."""
        self._schedules = (None if dense.is_constant else dense, None if tables.is_constant else tables)

    def __call__(self, number: int, batches: Sequence[Batch], weights: Sequence[float]) -> None:
        """Step `number`, from 0, on as many batches on each rank; `weights` are those of their mean losses."""
        for base, (group, schedule) in zip(self._base_rates, self._rates(), strict=True):
            if schedule is not None:
                group["lr"] = base * schedule.factor(number)
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        if self.precision == "fp16":
            self._scaled_step(batches, weights)
        else:
            with self._accumulating() if len(batches) > 1 else nullcontext():
                self._backward(batches, weights, 1.0)
            if self.dense_optimizer is not None:
                self.dense_optimizer.step()
        if isinstance(self.model, HybridParallel):
            self.model.end_step()

    def take_loss(self, index: int) -> float:
        """The sum of all ranks' losses since it was last taken: 0 for that of the logs, 1 for that of epochs."""
        value = self.ranks.sum(self.loss_sums[index])
        self.loss_sums[index] = 0.0
        return value

    def current_rates(self) -> tuple[float | None, float | None]:
        """Learning rates of the dense part and of the fused tables; None where there are none."""
        dense = None if self.dense_optimizer is None else float(self.dense_optimizer.param_groups[0]["lr"])
        return dense, self.collections[0].current_learning_rate if self.collections else None

    def to_json(self) -> dict[str, Any]:
        """Rates, options and loss scale as they are, and as they were at first."""
        return {
            "base_rates": self._base_rates,
            "rates": [float(group["lr"]) for group, _ in self._rates()],
            "base_options": self._base_options,
            "options": self._options(),
            "loss_scale": asdict(self.loss_scale),
        }

    def load_json(self, values: dict[str, Any]) -> None:
        """Restore what training has changed; keep what the user has changed since."""
        self.loss_scale = LossScale(**values["loss_scale"])
        if values["base_options"] == self._base_options:
            for group, saved in zip(self._dense_groups(), values["options"], strict=True):
                group.update({name: value for name, value in saved.items() if name != "fused"})  # offloading sets it
        if values["base_rates"] == self._base_rates:
            for (group, _), rate in zip(self._rates(), values["rates"], strict=True):
                group["lr"] = rate

    def all_loss_sums(self) -> Tensor:
        """`loss_sums` `[2]`; of several ranks `[size, 2]`. Collective."""
        if self.ranks.size == 1:
            return self.loss_sums
        return torch.tensor(self.ranks.control.all_gather_object(self.loss_sums.tolist()), dtype=torch.float64)

    def load_loss_sums(self, sums: Tensor) -> None:
        """Those of this rank; of another number of ranks, rank 0 takes the sums of all."""
        sums = sums.reshape(-1, 2)
        if len(sums) == self.ranks.size:
            self.loss_sums.copy_(sums[self.ranks.rank])
        else:
            self.loss_sums.copy_(sums.sum(0) if self.ranks.is_first else torch.zeros(2))

    def _backward(self, batches: Sequence[Batch], weights: Sequence[float], scale: float) -> None:
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            batch, factor = batch.to(self.device, non_blocking=True), weight * scale
            # Where more batches follow, dense gradients are averaged over the ranks with those of the last one.
            followed = number < len(batches) - 1
            with self.model.no_sync() if followed and isinstance(self.model, HybridParallel) else nullcontext():
                logits = logits_of(self.forward, batch, self.precision, self.device)
                # The mean of no samples is no number; their sum is 0, and has gradients, which other ranks wait for.
                reduction = "mean" if len(batch) else "sum"
                loss = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction=reduction)
                (loss if factor == 1.0 else loss * factor).backward()
            self.loss_sums.add_(loss.detach(), alpha=len(batch))
            self.input_sum += batch.dense.sum()

    def _scaled_step(self, batches: Sequence[Batch], weights: Sequence[float]) -> None:
        """A step whose gradients are scaled, checked and only then applied, to all parameters or to none."""
        scale = self.loss_scale.factor
        with suppress(_GradientOverflow), self._accumulating():
            self._backward(batches, weights, scale)
            finite = [collection.scale_accumulated(1 / scale) for collection in self.collections]
            gradients = [p.grad for group in self._dense_groups() for p in group["params"] if p.grad is not None]
            if isinstance(self.dense_optimizer, OffloadedOptimizer):
                gradients = self.dense_optimizer.gradients()
            local_gradients = [
                gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients
            ]
            finite += [bool(gradient.mul_(1 / scale).isfinite().all()) for gradient in local_gradients]
            overflowed = self.ranks.max(not all(finite)) > 0
            if overflowed:
                raise _GradientOverflow
        if self.dense_optimizer is not None and not overflowed:
            self.dense_optimizer.step()
        self.loss_scale.update(overflowed)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for collection in self.collections:
                stack.enter_context(collection.accumulate())
            yield

    def _options(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params" and isinstance(value, PLAIN)}
            for group in self._dense_groups()
        ]

    def _dense_groups(self) -> list[dict[str, Any]]:
        return [] if self.dense_optimizer is None else self.dense_optimizer.param_groups

    def _rates(self) -> list[tuple[dict[str, Any], Schedule | None]]:
        """Every parameter group and its schedule, if it has one; loading an optimizer's state makes new groups."""
        dense, tables = self._schedules
        optimizers = [
            collection.fused_optimizer for collection in self.collections if collection.fused_optimizer is not None
        ]
        fused = [(group, tables) for optimizer in optimizers for group in optimizer.param_groups]
        return [*((group, dense) for group in self._dense_groups()), *fused]


class _GradientOverflow(Exception):
    """A gradient was not finite under the present loss scale."""


def logits_of(forward: Forward, batch: Batch, precision: Precision, device: torch.device) -> Tensor:
    """Logits `[B]` of `forward(dense, sparse)`, float32 if computed in 16 bits; ValueError if the shape is another."""
    # Products of matrices have 16 bits; tables and weights stay as they are.
    with nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision]):
        logits: Tensor = forward(batch.dense, batch.sparse)
    if logits.shape != batch.labels.shape:
        raise ValueError(f"the model must return logits [{len(batch)}], got shape {list(logits.shape)}")
    return logits.float() if logits.dtype in DTYPES.values() else logits


def fused_collections(model: nn.Module) -> list[TableCollection | ShardedCollection]:
    """The collections of a model that update their tables by themselves."""
    collections = (module for module in model.modules() if isinstance(module, TableCollection | ShardedCollection))
    return [module for module in collections if module.fused_optimizer is not None]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no fused embedding collection updates by itself."""
    owned = {id(parameter) for module in fused_collections(model) for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in owned and parameter.requires_grad]
