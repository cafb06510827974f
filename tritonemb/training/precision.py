"""Autocast of the dense part, and the loss scale that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Matrix products in 16 bits within the block; tables and weights stay as they are.

    Raises:
        ValueError: for another name.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {get_args(Precision)}, got {precision!r}")
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision])


class LossScale:
    """A factor that keeps fp16 gradients above the smallest number and below the largest.

    It doubles after `GROWTH_INTERVAL` steps without overflow and halves at every overflow, whose step is left out
    (Micikevicius et al., ICLR 2018). `torch.amp.GradScaler` has the same rule but unscales gradients of a
    `torch.optim.Optimizer` only; those of fused tables have to be judged together with them.
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
        return {"factor": self.factor, "good_steps": self.good_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.factor = float(state["factor"])
        self.good_steps, self.overflows = int(state["good_steps"]), int(state["overflows"])
