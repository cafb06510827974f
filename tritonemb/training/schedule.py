"""Factors that change from step to step, of learning rates (warm-up, decay) and fp16 losses."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from tritonemb.utils import Options, number

Decay = Literal["constant", "polynomial", "cosine"]


@dataclass(frozen=True)
class Schedule(Options):
    """What the base learning rate is multiplied by at each step.

    Step `n` (from 0) of the warm-up has the factor `(n + 1) / warmup_steps`. The decay begins after the warm-up and
    takes `decay_steps` steps, at a share `x` of which the factor is `final + (1 - final) * f(x)`, `f` being
    `(1 - x) ** power` (polynomial) or `(1 + cos(pi * x)) / 2` (cosine; Loshchilov & Hutter, ICLR 2017); it stays at
    `final` from then on. Numbers out of range are a ValueError.

    Args:
        warmup_steps: 0 for none.
        decay: how it falls.
        decay_steps: None for all steps of the run that are left after the warm-up.
        power: of the polynomial; MLPerf's DLRM has 2.
        final: the factor at the end, 0 to 1.
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
        """Whether it leaves the base rate as it is."""
        return self.warmup_steps == 0 and self.decay == "constant"

    def within(self, total_steps: int | None) -> Self:
        """The same schedule with `decay_steps` set; ValueError if it takes all steps and their number is not known."""
        if self.decay == "constant" or self.decay_steps is not None:
            return self
        if total_steps is None:
            raise ValueError(
                f"{self.decay} decay needs decay_steps (or max_steps): the data set does not know its size in advance"
            )
        return replace(self, decay_steps=max(total_steps - self.warmup_steps, 1))

    def factor(self, step: int) -> float:
        """The factor of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        assert self.decay_steps is not None, "ask the schedule that `within` returns"
        share = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        fall = (1 - share) ** self.power if self.decay == "polynomial" else (1 + math.cos(math.pi * share)) / 2
        return self.final + (1 - self.final) * fall


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Learning rates over the steps, of the dense part and of the tables separately.

    Args:
        dense_warmup_steps: steps in which the dense rate rises to its full value.
        dense_decay: how it falls afterwards.
        dense_decay_steps: over how many steps; to the end of the run if not given.
        dense_final_factor: what it is multiplied by in the end.
        table_warmup_steps: as for the dense part.
        table_decay: as for the dense part.
        table_decay_steps: as for the dense part.
        table_final_factor: as for the dense part.
        decay_power: of polynomial decays.
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
        _ = self.dense_schedule, self.table_schedule  # making them checks their numbers

    @property
    def dense_schedule(self) -> Schedule:
        return Schedule(
            self.dense_warmup_steps, self.dense_decay, self.dense_decay_steps, self.decay_power, self.dense_final_factor
        )

    @property
    def table_schedule(self) -> Schedule:
        return Schedule(
            self.table_warmup_steps, self.table_decay, self.table_decay_steps, self.decay_power, self.table_final_factor
        )


@dataclass
class LossScale:
    """A factor that keeps fp16 gradients above the smallest number and below the largest.

    It doubles after `GROWTH_INTERVAL` steps without overflow and halves at every overflow, whose step is left out
    (Micikevicius et al., ICLR 2018). `torch.amp.GradScaler` has the same rule but unscales gradients of a
    `torch.optim.Optimizer` only; those of fused tables have to be checked together with them.
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
