"""`tritonemb::accumulate_`: gradients of micro-batches kept until they are applied together.

Nothing is summed yet: each micro-batch's ids and output gradient are kept, and the module applies them as one batch, so
that the result has the bits of a step on all samples at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

NOT_ACCUMULATING = -1
_handles = itertools.count()


class MicroBatch(NamedTuple):
    """The ids of a micro-batch and the gradient of its output, `[B, width]` or `[N, width]`."""

    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    grad: Tensor


_pending: dict[int, list[MicroBatch]] = {}


class Accumulator:
    """A place for pending gradients; a copy of it is another place."""

    def __init__(self) -> None:
        self.handle = next(_handles)

    def open(self) -> None:
        """Keep gradients from now on."""
        _pending[self.handle] = []

    def kept(self) -> list[MicroBatch]:
        """What has been kept so far, in order."""
        return _pending.get(self.handle, [])

    def close(self) -> list[MicroBatch]:
        """What has been kept, in order; nothing is kept from now on."""
        return _pending.pop(self.handle, [])

    def __deepcopy__(self, memo: dict[int, object]) -> Accumulator:
        return Accumulator()

    def __reduce__(self) -> tuple[type[Accumulator], tuple[()]]:
        return Accumulator, ()


def accumulate_(
    pending: Tensor, handle: int, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None
) -> None:
    """Keep one micro-batch's gradient under `handle` and count it in `pending` (int64 `[]`).

    Raises:
        RuntimeError: if that accumulator is closed.
    """
    torch.ops.tritonemb.accumulate_(pending, handle, grad, values, offsets, sample_weights)


@torch.library.custom_op("tritonemb::accumulate_", mutates_args=("pending",))
def _accumulate_(
    pending: Tensor, handle: int, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None
) -> None:
    if handle not in _pending:
        raise RuntimeError(
            "the backward of a lookup made inside accumulate() ran after the block had ended, so its gradient is lost; "
            "call backward inside the block"
        )
    weights = None if sample_weights is None else sample_weights.clone()
    _pending[handle].append(MicroBatch(values.clone(), offsets.clone(), weights, grad.clone()))
    pending += 1


@_accumulate_.register_fake
def _(
    pending: Tensor, handle: int, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None
) -> None:
    return None


_gathering: set[int] = set()


@contextmanager
def gathering(learning_rates: Sequence[Tensor]) -> Iterator[None]:
    """Tables with these learning rates wait for their gradients: a graph that would update them at once must not."""
    places = {rate.data_ptr() for rate in learning_rates}
    _gathering.update(places)
    try:
        yield
    finally:
        _gathering.difference_update(places)


def check_not_gathering(learning_rate: Tensor) -> None:
    """Raise RuntimeError if called by a compiled graph in a block that gathers gradients."""
    if _gathering and learning_rate.data_ptr() in _gathering:
        raise RuntimeError("accumulate() is not for a compiled model with a fused optimizer; call the model itself")
