"""Offsets on the CPU: checked before anything is read through them, and turned into the bag of each position."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tritonemb import errors
from tritonemb.kernels.cpu.jit import called, compiled, inlined
from tritonemb.kernels.cpu.threads import run_tasks
from tritonemb.layout import TABLE, Layout

GOOD_OFFSETS = -2


@compiled
def _first_bad_bag(offsets, num_values):
    """GOOD_OFFSETS; -1 if the first offset is not 0; a bag whose end lies before its start; or the last index."""
    if offsets[0] != 0:
        return -1
    descents = 0
    for bag in range(offsets.size - 1):  # to the end, because a loop that may stop early is not vectorised
        descents += 1 if offsets[bag + 1] < offsets[bag] else 0
    if descents:
        for bag in range(offsets.size - 1):
            if offsets[bag + 1] < offsets[bag]:
                return bag
    return GOOD_OFFSETS if offsets[-1] == num_values else offsets.size - 1


def check_offsets(values: Tensor, offsets: Tensor, layout: Layout) -> None:
    """Raise ValueError unless offsets ascend from 0 to the number of values."""
    found = _first_bad_bag(offsets.numpy(), values.numel())
    if found != GOOD_OFFSETS:
        raise errors.bad_offsets(found, offsets, values.numel(), layout)


@inlined
def one_value_a_bag(offsets):
    """Whether each bag's number is also the position of its only value."""
    others = 0
    for bag in range(offsets.size):
        others += 1 if offsets[bag] != bag else 0
    return others == 0


@called
def _fill_bags(task, num_tasks, offsets, bags):
    num_bags = offsets.size - 1
    for bag in range(num_bags * task // num_tasks, num_bags * (task + 1) // num_tasks):
        for position in range(offsets[bag], offsets[bag + 1]):
            bags[position] = bag


@inlined
def bags_of(team, num_threads, num_tasks, offsets):
    """int32 `[N]`: the bag that each position of values lies in."""
    bags = np.empty(offsets[-1], dtype=np.int32)
    run_tasks(team, num_threads, num_tasks, _fill_bags, (num_tasks, offsets, bags))
    return bags


@inlined
def uses_by_table(lookups, key_starts, num_tables):
    """The lookups of table t, by key: `uses[starts[t]:starts[t + 1]]`; and the key of every lookup."""
    starts = np.zeros(num_tables + 1, dtype=np.int64)
    for lookup in range(lookups.shape[0]):
        starts[lookups[lookup, TABLE] + 1] += 1
    for table in range(num_tables):
        starts[table + 1] += starts[table]
    filled = starts[:-1].copy()
    uses, key_of = np.empty(lookups.shape[0], dtype=np.int64), np.empty(lookups.shape[0], dtype=np.int64)
    for key in range(key_starts.size - 1):
        for lookup in range(key_starts[key], key_starts[key + 1]):
            table = lookups[lookup, TABLE]
            uses[filled[table]], key_of[lookup] = lookup, key
            filled[table] += 1
    return starts, uses, key_of
