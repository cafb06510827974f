"""A lookup whose backward is Python code: what the tables do with its gradient may exchange rows or move them.

What a batch must offer to be looked up.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import Layout


class Lookup(NamedTuple):
    """A batch as kernels see it.

    Attributes:
        values: int32 or int64 `[N]`, rows of the tables' memory.
        offsets: `[K * B + 1]`.
        sample_weights: float32 `[N]`, or None.
        groups: the distinct rows.
        layout: of the batch's keys.
    """

    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    groups: ops.RowGroups
    layout: Layout


class Updated(Protocol):
    """Tables that a backward pass updates."""

    def read(self, lookup: Lookup) -> Tensor:
        """`[B, width]` if pooled, else `[N, width]`."""
        ...

    def take_gradient(self, grad: Tensor, lookup: Lookup) -> None:
        """Update the rows, or keep the gradient for later."""
        ...


def look_up(tables: Updated, weight: Tensor, lookup: Lookup) -> Tensor:
    """Read rows; the backward hands the gradient to the tables.

    Args:
        weight: stands for all tables in the graph; it gets no gradient.
    """
    found: Tensor = _LookUp.apply(weight, tables, lookup)
    return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tables: Updated, lookup: Lookup) -> Tensor:
        ctx.inputs = tables, lookup
        return tables.read(lookup)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        tables, lookup = ctx.inputs
        tables.take_gradient(grad, lookup)
        return (None,) * 3


class Features(Protocol):
    """What a batch must offer: tritonemb's or TorchRec's `KeyedJaggedTensor`."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


def parts_of(features: Features) -> tuple[list[str], Tensor, Tensor, Tensor | None]:
    for method in ("keys", "values", "offsets", "weights_or_none"):
        if not callable(getattr(features, method, None)):
            raise TypeError(f"expected a KeyedJaggedTensor, got {type(features).__name__}, which has no {method}()")
    if getattr(features, "variable_stride_per_key", bool)():  # TorchRec's
        raise ValueError(
            "the batch has another number of samples for each feature; give every feature a bag, perhaps an empty one, "
            "for every sample"
        )
    return list(features.keys()), features.values(), features.offsets(), features.weights_or_none()
