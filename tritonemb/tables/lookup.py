"""A batch as kernels see it, and what it must offer to be looked up."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

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


class RowsUpdate:
    """A lookup whose gradient is handed to its tables; an `ops.Update`."""

    def __init__(self, tables: Any, lookup: Lookup) -> None:
        self._tables, self._lookup = tables, lookup

    def read(self) -> Tensor:
        found: Tensor = self._tables.read(self._lookup)
        return found

    def take_gradient(self, grad: Tensor, needs_sample_weight_grad: bool) -> None:
        """Update the rows, or keep the gradient while gradients are accumulated."""
        self._tables.take_gradient(grad, self._lookup)


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
