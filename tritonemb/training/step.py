"""A training step: forward, loss, backward, and the optimizers of the dense part and of the tables; or logits alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tritonemb.data.batch import Batch
from tritonemb.nn.collections import TableCollection
from tritonemb.ops.registry import check_errors
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.training.config import Precision
from tritonemb.training.ranks import Ranks
from tritonemb.training.schedule import Schedule

PLAIN = (int, float, str, bool, type(None))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Forward = Callable[..., Any]


class TrainStep:
    """Trains a model step by step.

    Args:
        model: its fused collections update their tables themselves; every other parameter belongs to `dense_optimizer`.
        device: where it is.
        ranks: that train it.
        dense_optimizer: called with the parameters and `lr`.
        dense_lr: of that.
        precision: of the dense part.
        compile: run the model through `torch.compile`.

    Attributes:
        forward: the model, compiled if that is asked for.
        dense_optimizer: None where every parameter is in a fused table.
        loss_sums: over this rank's samples: since the last log, and in this epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        ranks: Ranks,
        dense_optimizer: Callable[..., torch.optim.Optimizer],
        dense_lr: float,
        precision: Precision,
        compile: bool,
    ) -> None:
        autocast(precision, device)  # raises for an unknown name before training
        self.model, self.device, self.ranks, self.precision = model, device, ranks, precision
        self.forward: Forward = torch.compile(model) if compile else model
        dense = dense_parameters(model)
        self.dense_optimizer = dense_optimizer(dense, lr=dense_lr) if dense else None
        self.collections = fused_collections(model)
        self.loss_scale = LossScale()
        self.loss_sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._schedules: tuple[Schedule | None, Schedule | None] = (None, None)
        self._base_rates = [float(group["lr"]) for group, _ in self._rates()]
        self._base_options = self._options()

    def schedule(self, dense: Schedule, tables: Schedule) -> None:
        """Let the learning rates follow these."""
        self._schedules = (None if dense.is_constant else dense, None if tables.is_constant else tables)

    def __call__(self, number: int, batches: Sequence[Batch], weights: Sequence[float]) -> None:
        """Step `number`, from 0.

        Args:
            batches: of this rank; every rank has as many.
            weights: of the batches' mean losses, in the loss of the step.
        """
        for base, (group, schedule) in zip(self._base_rates, self._rates(), strict=True):
            if schedule is not None:
                group["lr"] = base * schedule.factor(number)
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad()
        if self.precision == "fp16":
            self._scaled_step(batches, weights)
        else:
            with self._accumulating(len(batches) > 1):
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
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_json(self, values: dict[str, Any]) -> None:
        """Restore what training has changed; keep what the user has changed since."""
        self.loss_scale.load_state_dict(values["loss_scale"])
        if values["base_options"] == self._base_options:
            for group, saved in zip(self._dense_groups(), values["options"], strict=True):
                group.update(saved)
        if values["base_rates"] == self._base_rates:
            for (group, _), rate in zip(self._rates(), values["rates"], strict=True):
                group["lr"] = rate

    def all_loss_sums(self) -> Tensor:
        """`loss_sums` `[2]`; of several ranks `[size, 2]`. Collective."""
        if self.ranks.size == 1:
            return self.loss_sums
        return torch.tensor(self.ranks.gather(self.loss_sums.tolist()), dtype=torch.float64)

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
            with self._no_sync(number < len(batches) - 1):
                logits = logits_of(self.forward, batch, self.precision, self.device)
                # The mean of no samples is no number; their sum is 0, and has gradients, which other ranks wait for.
                reduction = "mean" if len(batch) else "sum"
                loss = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction=reduction)
                (loss if factor == 1.0 else loss * factor).backward()
            self.loss_sums.add_(loss.detach(), alpha=len(batch))

    def _scaled_step(self, batches: Sequence[Batch], weights: Sequence[float]) -> None:
        """A step whose gradients are scaled, checked and only then applied, to all parameters or to none."""
        scale = self.loss_scale.factor
        try:
            with self._accumulating(True):
                self._backward(batches, weights, scale)
                finite = [collection.scale_accumulated(1 / scale) for collection in self.collections]
                for gradient in self._dense_gradients():
                    finite.append(bool(gradient.mul_(1 / scale).isfinite().all()))  # noqa: PERF401 (for its effect)
                if self.ranks.max(not all(finite)):
                    raise _GradientOverflow
        except _GradientOverflow:
            self.loss_scale.update(overflowed=True)
            return
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        self.loss_scale.update(overflowed=False)

    def _dense_gradients(self) -> list[Tensor]:
        """This rank's parts of them."""
        gradients = [p.grad for group in self._dense_groups() for p in group["params"] if p.grad is not None]
        return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]

    @contextmanager
    def _accumulating(self, several: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for collection in self.collections if several else ():
                stack.enter_context(collection.accumulate())
            yield

    def _no_sync(self, more: bool) -> AbstractContextManager[None]:
        """Where more batches follow, dense gradients are averaged over the ranks with those of the last one."""
        return self.model.no_sync() if more and isinstance(self.model, HybridParallel) else nullcontext()

    def _options(self) -> list[dict[str, Any]]:
        """The plain options of the dense optimizer's groups, learning rates among them."""
        return [
            {name: value for name, value in group.items() if name != "params" and isinstance(value, PLAIN)}
            for group in self._dense_groups()
        ]

    def _dense_groups(self) -> list[dict[str, Any]]:
        return [] if self.dense_optimizer is None else self.dense_optimizer.param_groups

    def _rates(self) -> list[tuple[dict[str, Any], Schedule | None]]:
        """Every parameter group and its schedule, if it has one; loading an optimizer's state makes new groups."""
        dense, tables = self._schedules
        fused = [c.fused_optimizer for c in self.collections if c.fused_optimizer is not None]
        rates: list[tuple[dict[str, Any], Schedule | None]] = [(group, dense) for group in self._dense_groups()]
        return rates + [(group, tables) for optimizer in fused for group in optimizer.param_groups]


class _GradientOverflow(Exception):
    """A gradient was not finite under the present loss scale."""


class LossScale:
    """A factor that keeps fp16 gradients above the smallest number and below the largest.

    It doubles after `GROWTH_INTERVAL` steps without overflow and halves at every overflow, whose step is left out
    (Micikevicius et al., ICLR 2018). `torch.amp.GradScaler` has the same rule but unscales gradients of a
    `torch.optim.Optimizer` only; those of fused tables have to be checked together with them.
    """

    GROWTH_INTERVAL = 2000
    SMALLEST, LARGEST = 1.0, 2.0**24

    def __init__(self, factor: float = 2.0**16) -> None:
        self.factor = factor
        self.good_steps = 0
        self.overflows = 0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.factor, self.good_steps = max(self.factor / 2, self.SMALLEST), 0
            self.overflows += 1
            return
        self.good_steps += 1
        if self.good_steps == self.GROWTH_INTERVAL:
            self.factor, self.good_steps = min(self.factor * 2, self.LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor = float(state["factor"])
        self.good_steps, self.overflows = int(state["good_steps"]), int(state["overflows"])


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in 16 bits within the block; tables and weights stay as they are.

    Raises:
        ValueError: for another name.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {get_args(Precision)}, got {precision!r}")
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision])


def logits_of(forward: Forward, batch: Batch, precision: Precision, device: torch.device) -> Tensor:
    """`forward(dense, sparse)` of a batch: logits `[B]`, float32 if they were computed in 16 bits.

    Raises:
        ValueError: they have another shape.
    """
    with autocast(precision, device):
        logits: Tensor = forward(batch.dense, batch.sparse)
    if logits.shape != batch.labels.shape:
        raise ValueError(f"the model must return logits [{len(batch)}], got shape {list(logits.shape)}")
    return logits.float() if logits.dtype in DTYPES.values() else logits


@torch.no_grad()
def predict_logits(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Tensor]],
    device: torch.device,
    precision: Precision = "fp32",
    forward: Forward | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and labels `[N]` of all samples, on the CPU, by the model in evaluation mode.

    Args:
        batches: with their labels on the CPU, which a batch that is on the device has there.
        forward: what to call in place of the model, for example a compiled form of it.
    """
    was_training = model.training
    model.eval()
    logits, labels = _GrowingTensor(device), _GrowingTensor(torch.device("cpu"))
    try:
        for batch, its_labels in batches:
            there = batch.to(device, non_blocking=True)
            logits.append(logits_of(model if forward is None else forward, there, precision, device))
            labels.append(its_labels)
        check_errors(device)
    finally:
        model.train(was_training)
    return logits.values.cpu(), labels.values.cpu()


class _GrowingTensor:
    """Numbers of many batches, one after the other.

    A small tensor kept from every batch would be between the large ones that come and go, and keep the allocator from
    using their room again: 160 bytes a sample, measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(1 << 16, device=device)
        self._used = 0

    @property
    def values(self) -> Tensor:
        return self._room[: self._used]

    def append(self, numbers: Tensor) -> None:
        end = self._used + numbers.shape[0]
        if end > self._room.shape[0]:
            larger = torch.empty(max(end, 2 * self._room.shape[0]), device=self._room.device)
            larger[: self._used] = self.values
            self._room = larger
        self._room[self._used : end] = numbers
        self._used = end


def fused_collections(model: nn.Module) -> list[TableCollection | ShardedCollection]:
    """The collections of a model that update their tables by themselves."""
    return [
        module
        for module in model.modules()
        if isinstance(module, TableCollection | ShardedCollection) and module.fused_optimizer is not None
    ]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no fused embedding collection updates by itself."""
    owned = {id(parameter) for module in fused_collections(model) for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in owned and parameter.requires_grad]
