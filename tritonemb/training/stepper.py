"""A training step: forward, loss, backward, and the optimizers of the dense part and of the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tritonemb.data.batch import Batch
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.hybrid import HybridParallel
from tritonemb.tables.table_set import TableSet
from tritonemb.training.inference import logits_of
from tritonemb.training.parallel import Parallel
from tritonemb.training.precision import LossScale, Precision, autocast
from tritonemb.training.schedule import Schedule
from tritonemb.training.state import PLAIN


class Stepper:
    """Trains a model step by step.

    Args:
        model: its fused collections update their tables themselves; every other parameter belongs to `dense_optimizer`.
        device: where it is.
        parallel: the ranks that train it.
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
        parallel: Parallel,
        dense_optimizer: Callable[..., torch.optim.Optimizer],
        dense_lr: float,
        precision: Precision,
        compile: bool,
    ) -> None:
        autocast(precision, device)  # refuse a name before training
        self.model, self.device, self.parallel, self.precision = model, device, parallel, precision
        self.forward: Callable[..., Any] = torch.compile(model) if compile else model
        dense = dense_parameters(model)
        self.dense_optimizer = dense_optimizer(dense, lr=dense_lr) if dense else None
        self.collections = fused_collections(model)
        self.loss_scale = LossScale()
        self.loss_sums = torch.zeros(2, dtype=torch.float64, device=device)
        self._schedules = (Schedule(), Schedule())
        self._base_rates = [float(group["lr"]) for group, _ in self._rates()]
        self._base_options = self.options()

    def schedule(self, dense: Schedule, tables: Schedule) -> None:
        """Let the learning rates follow these."""
        self._schedules = (dense, tables)

    def __call__(self, number: int, batches: Sequence[Batch], weights: Sequence[float]) -> None:
        """Step `number`, from 0.

        Args:
            batches: of this rank; every rank brings as many.
            weights: of the batches' mean losses, in what the step makes smaller.
        """
        for base, (group, schedule) in zip(self._base_rates, self._rates(), strict=True):
            if not schedule.is_constant:
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
        value = self.parallel.sum(self.loss_sums[index])
        self.loss_sums[index] = 0.0
        return value

    def current_rates(self) -> tuple[float | None, float | None]:
        """Learning rates of the dense part and of the fused tables; None where there are none."""
        dense = None if self.dense_optimizer is None else float(self.dense_optimizer.param_groups[0]["lr"])
        return dense, self.collections[0].current_learning_rate if self.collections else None

    def options(self) -> list[dict[str, Any]]:
        """The plain options of the dense optimizer's groups, learning rates among them."""
        return [
            {name: value for name, value in group.items() if name != "params" and isinstance(value, PLAIN)}
            for group in self._dense_groups()
        ]

    def to_json(self) -> dict[str, Any]:
        """Rates, options and loss scale as they are, and as they were at first."""
        return {
            "base_rates": self._base_rates,
            "rates": [float(group["lr"]) for group, _ in self._rates()],
            "base_options": self._base_options,
            "options": self.options(),
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_json(self, values: dict[str, Any]) -> None:
        """What was changed while training is taken over; what the user has changed since is not taken back."""
        self.loss_scale.load_state_dict(values["loss_scale"])
        if values["base_options"] == self._base_options:
            for group, saved in zip(self._dense_groups(), values["options"], strict=True):
                group.update(saved)
        if values["base_rates"] == self._base_rates:
            for (group, _), rate in zip(self._rates(), values["rates"], strict=True):
                group["lr"] = rate

    def all_loss_sums(self) -> Tensor:
        """`loss_sums` `[2]`; of several ranks `[size, 2]`. Collective."""
        if self.parallel.size == 1:
            return self.loss_sums
        return torch.tensor(self.parallel.gather(self.loss_sums.tolist()), dtype=torch.float64)

    def load_loss_sums(self, sums: Tensor) -> None:
        """Those of this rank; of another number of ranks, rank 0 takes the sums of all."""
        sums = sums.reshape(-1, 2)
        if len(sums) == self.parallel.size:
            self.loss_sums.copy_(sums[self.parallel.rank])
        else:
            self.loss_sums.copy_(sums.sum(0) if self.parallel.is_first else torch.zeros(2))

    def _backward(self, batches: Sequence[Batch], weights: Sequence[float], scale: float) -> None:
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            batch, factor = batch.to(self.device, non_blocking=True), weight * scale
            with self._alone(number < len(batches) - 1):
                logits = logits_of(self.forward, batch, self.precision, self.device)
                # The mean of no samples is no number; their sum is nought, and has gradients, which others wait for.
                reduction = "mean" if len(batch) else "sum"
                loss = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction=reduction)
                (loss if factor == 1.0 else loss * factor).backward()
            self.loss_sums.add_(loss.detach(), alpha=len(batch))

    def _scaled_step(self, batches: Sequence[Batch], weights: Sequence[float]) -> None:
        """A step whose gradients are scaled, judged and only then applied, to all parameters or to none."""
        scale = self.loss_scale.factor
        try:
            with self._accumulating(True):
                self._backward(batches, weights, scale)
                finite = [collection.scale_accumulated(1 / scale) for collection in self.collections]
                for gradient in self._dense_gradients():
                    finite.append(bool(gradient.mul_(1 / scale).isfinite().all()))  # noqa: PERF401 (for its effect)
                if not self.parallel.all(all(finite)):
                    raise _Overflow
        except _Overflow:
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

    def _alone(self, more: bool) -> AbstractContextManager[None]:
        """Where more batches follow, dense gradients are averaged over the ranks with those of the last one."""
        return self.model.no_sync() if more and isinstance(self.model, HybridParallel) else nullcontext()

    def _dense_groups(self) -> list[dict[str, Any]]:
        return [] if self.dense_optimizer is None else self.dense_optimizer.param_groups

    def _rates(self) -> list[tuple[dict[str, Any], Schedule]]:
        """Every parameter group and its schedule; not kept, since loading an optimizer's state makes new groups."""
        dense, tables = self._schedules
        fused = [c.fused_optimizer for c in self.collections if c.fused_optimizer is not None]
        rates = [(group, dense) for group in self._dense_groups()]
        return rates + [(group, tables) for optimizer in fused for group in optimizer.param_groups]


class _Overflow(Exception):
    """A gradient was not finite under the present loss scale."""


def fused_collections(model: nn.Module) -> list[TableSet | ShardedCollection]:
    """The collections of a model that update their tables by themselves."""
    return [
        module
        for module in model.modules()
        if isinstance(module, TableSet | ShardedCollection) and module.fused_optimizer is not None
    ]


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no fused embedding collection updates by itself."""
    owned = {id(parameter) for module in fused_collections(model) for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in owned and parameter.requires_grad]
