"""Loss of a step; learning rate schedules (warm-up, decay), and dynamic loss scaling for fp16."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonemb.data.batch import Batch
from tritonemb.utils import Options, number

Decay = Literal["constant", "polynomial", "cosine"]


def label_totals(batches: Sequence[Batch], num_labels: int) -> tuple[float, ...]:
    """Sums of the weights of each label of some batches; none for one label without weights, `num_labels=0`."""
    weights = [weight for batch in batches if (weight := batch.label_weights()) is not None]
    if weights and not num_labels:
        raise ValueError("batches have several labels or weights: the data set needs `labels`, or `has_weights`")
    weights = [torch.zeros(0, num_labels), *(weight.view(-1, num_labels).cpu() for weight in weights)]
    return tuple(torch.cat(weights).sum(0, dtype=torch.float64).tolist()) if num_labels else ()


def label_scales(totals: Sequence[float], rows: float, device: torch.device) -> Tensor | None:
    """Scales `[L]` of `loss_of` for these totals of all batches of a step and ranks, which have `rows` rows."""
    scales = [rows / total if total else 0.0 for total in totals]
    return torch.tensor(scales).to(device, non_blocking=True) if scales else None


def loss_of(logits: Tensor, batch: Batch, scales: Tensor | None = None) -> Tensor:
    """Mean binary cross-entropy of a batch; of no samples 0, with the gradients that other ranks wait for.

    With several labels or row weights, `1 / B * sum_il scale_l w_i v_il BCE(logit_il, label_il)`: w are the weights of
    the rows, v is 0 for missing labels and else 1, and `scale_l = N / sum_i w_i v_il` over the N rows of a step. So the
    mean over these is the sum over labels of the weighted mean over the rows that have the label, however rows are
    divided among batches and ranks. A label that no row of a step has adds 0."""
    if (weights := batch.label_weights()) is None:
        reduction = "mean" if len(batch) else "sum"
        return F.binary_cross_entropy_with_logits(logits, batch.labels, reduction=reduction)
    assert scales is not None
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels.nan_to_num(), weights * scales, reduction="sum")
    return loss / max(len(batch), 1)


@dataclass(frozen=True)
class Schedule(Options):
    """Learning rate schedule: a factor of the base learning rate for each step.

    Step `n` (from 0) of the warm-up has the factor `(n + 1) / warmup_steps`. The decay follows and takes `decay_steps`
    steps; at the fraction `x` of them the factor is `final + (1 - final) * f(x)`, where `f(x)` is `(1 - x) ** power`
    (polynomial) or `(1 + cos(pi * x)) / 2` (cosine; Loshchilov & Hutter, ICLR 2017). Later it remains `final`.

    Args:
        warmup_steps: steps of the warm-up, 0 for none.
        decay: kind of the decay.
        decay_steps: steps of the decay; None for all steps of the run after the warm-up.
        power: exponent of the polynomial; MLPerf's DLRM has 2.
        final: factor at the end, 0 to 1.
    """

    warmup_steps: int = number(0, least=0)
    decay: Decay = "constant"
    decay_steps: int | None = number(None, least=1)
    power: float = number(2.0, positive=True)
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final <= 1:
            raise ValueError(f"final must lie in [0, 1], got {self.final}")

    @property
    def is_constant(self) -> bool:
        return self.warmup_steps == 0 and self.decay == "constant"

    def within(self, total_steps: int | None) -> Self:
        """Set `decay_steps` for a run of `total_steps`; raise ValueError if it needs them and they are unknown."""
        if self.decay == "constant" or self.decay_steps is not None:
            return self
        if total_steps is None:
            text = "decay needs decay_steps (or max_steps): the size of the data set is not known in advance"
            raise ValueError(f"{self.decay} {text}")
        return replace(self, decay_steps=max(total_steps - self.warmup_steps, 1))

    def factor(self, step: int) -> float:
        """Return the factor of a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        assert self.decay_steps is not None, "call `within` first"
        x = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        decay = (1 - x) ** self.power if self.decay == "polynomial" else (1 + math.cos(math.pi * x)) / 2
        return self.final + (1 - self.final) * decay


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Learning rate schedules, separate for the dense part and the tables.

    Args:
        dense_warmup_steps: steps of linear warm-up of the dense learning rate.
        dense_decay: decay of the dense learning rate after the warm-up.
        dense_decay_steps: steps of the decay; to the end of the run if not given.
        dense_final_factor: factor of the dense learning rate after the decay.
        table_warmup_steps: steps of linear warm-up of the tables' learning rate.
        table_decay: decay of the tables' learning rate after the warm-up.
        table_decay_steps: steps of the tables' decay; to the end of the run if not given.
        table_final_factor: factor of the tables' learning rate after the decay.
        decay_power: exponent of polynomial decays.
    """

    dense_warmup_steps: int = 0
    dense_decay: Decay = "constant"
    dense_decay_steps: int | None = None
    dense_final_factor: float = 0.0
    table_warmup_steps: int = 0
    table_decay: Decay = "constant"
    table_decay_steps: int | None = None
    table_final_factor: float = 0.0
    decay_power: float = 2.0

    def __post_init__(self) -> None:
        _ = self.dense_schedule, self.table_schedule  # checks the options

    def _schedule(self, part: str) -> Schedule:
        values = {name: getattr(self, f"{part}_{name}") for name in ("warmup_steps", "decay", "decay_steps")}
        return Schedule(**values, power=self.decay_power, final=getattr(self, f"{part}_final_factor"))

    dense_schedule = property(lambda self: self._schedule("dense"))
    table_schedule = property(lambda self: self._schedule("table"))


@dataclass
class LossScale:
    """Dynamic loss scale, which keeps fp16 gradients from underflow and overflow.

    It doubles after `GROWTH_INTERVAL` steps without overflow; at an overflow it halves, and the step is skipped
    (Micikevicius et al., ICLR 2018). `torch.amp.GradScaler` has the same rule, but unscales gradients of a
    `torch.optim.Optimizer` only; gradients of fused tables have to be checked together with these.
    """

    GROWTH_INTERVAL: ClassVar[int] = 2000
    SMALLEST: ClassVar[float] = 1.0
    LARGEST: ClassVar[float] = 2.0**24

    factor: float = 2.0**16
    good_steps: int = 0
    overflows: int = 0

    def update(self, overflowed: bool) -> None:
        self.overflows += overflowed
        self.good_steps += 1
        if overflowed:
            self.factor, self.good_steps = max(self.factor / 2, self.SMALLEST), 0
        elif self.good_steps == self.GROWTH_INTERVAL:
            self.factor, self.good_steps = min(self.factor * 2, self.LARGEST), 0
