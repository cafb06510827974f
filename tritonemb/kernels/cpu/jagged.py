"""Offsets on the CPU: checked before anything is read through them, and turned into the bag of each position."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.cpu.jit import compiled
from tritonemb.kernels.layout import Layout

GOOD_OFFSETS = -2


@compiled
def _first_bad_bag(offsets, num_values):
    """GOOD_OFFSETS; -1 if the first offset is not 0; a bag whose end lies before its start; or the last index."""
    if offsets[0] != 0:
        return -1
    for bag in range(offsets.size - 1):
        if offsets[bag + 1] < offsets[bag]:
            return bag
    return GOOD_OFFSETS if offsets[-1] == num_values else offsets.size - 1


@compiled
def _fill_bags(offsets, bags):
    for bag in range(offsets.size - 1):
        for position in range(offsets[bag], offsets[bag + 1]):
            bags[position] = bag


def check_offsets(values: Tensor, offsets: Tensor, layout: Layout) -> None:
    """Raise ValueError unless offsets ascend from 0 to the number of values."""
    found = _first_bad_bag(offsets.numpy(), values.numel())
    if found != GOOD_OFFSETS:
        raise errors.bad_offsets(found, offsets, values.numel(), layout)


def bags_of(offsets: np.ndarray, num_values: int) -> np.ndarray:
    """int32 `[N]`: the bag that each position of values lies in."""
    bags = np.empty(num_values, dtype=np.int32)
    _fill_bags(offsets, bags)
    return bags
