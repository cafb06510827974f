"""CPU twin of `kernels/jagged.py`: keys are copied as a whole, and ids sorted by owner in two passes over the bags.

Each task has a range of bags. The first pass writes the owner of each id where its destination will be, and counts ids
by task and owner; the second pass moves them. Offsets are checked before they are used.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.kernels.cpu.jit import parallel
from tritonemb.kernels.cpu.row_cache import tasks_for
from tritonemb.kernels.cpu.row_groups import GOOD_OFFSETS, first_bad_bag
from tritonemb.kernels.cpu.simd import copy_bytes
from tritonemb.kernels.jagged import drop_padding_reference as drop_padding

__all__ = ["block_bucketize", "drop_padding", "jagged_permute"]

COUNTS_PER_LINE = 16  # columns of `counts` are a multiple of these, so that no two tasks write one pair of cache lines


@parallel
def _permute(task, num_tasks, keys, offsets, out_offsets, memory):
    """Copy the task's keys. `memory`: address of source and result, and bytes per item, for values, then weights."""
    order, starts, num_out = keys
    batch_size = (out_offsets.size - 1) // max(1, order.size)
    for index in range(order.size * task // num_tasks, order.size * (task + 1) // num_tasks):
        first_bag, start = order[index] * batch_size, starts[index]
        begin, size = np.int64(offsets[first_bag]), min(starts[index + 1], num_out) - start
        for source, target, item_size in memory:
            if size > 0 and item_size > 0:
                copy_bytes(target + start * item_size, source + begin * item_size, size * item_size)
        for sample in range(batch_size):
            out_offsets[index * batch_size + sample] = np.int64(offsets[first_bag + sample]) - begin + start


def jagged_permute(
    values: Tensor, offsets: Tensor, order: Tensor, weights: Tensor | None, num_keys: int, num_values: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/jagged.py`."""
    # Where keys begin in the result.
    batch_size = (len(offsets) - 1) // max(1, num_keys)
    keys, bags = order.contiguous().numpy(), offsets.contiguous().numpy()
    _check_offsets(bags, values.numel(), batch_size)
    if keys.size and not 0 <= keys.min() <= keys.max() < num_keys:
        raise ValueError(f"order must have keys from 0 to {num_keys - 1}, got {keys.min()} to {keys.max()}")
    lengths = bags[(keys + 1) * batch_size].astype(np.int64) - bags[keys * batch_size]
    starts = np.append(0, lengths.cumsum())
    # Copy values and weights, and clear the remainder.
    out_offsets = np.empty(keys.size * batch_size + 1, bags.dtype)
    out_offsets[-1] = starts[-1]
    sources = values.contiguous(), values[:0] if weights is None else weights.contiguous()
    out = values.new_empty(num_values), sources[1].new_empty(0 if weights is None else num_values)
    for tensor in out:
        tensor[starts[-1] :] = 0
    memory = tuple(
        (s.data_ptr(), o.data_ptr(), o.itemsize * min(1, o.numel())) for s, o in zip(sources, out, strict=True)
    )
    num_tasks = min(tasks_for(num_values), max(1, keys.size))
    _permute(num_tasks, num_tasks, num_tasks, (keys, starts, num_values), bags, out_offsets, memory)
    return out[0], torch.from_numpy(out_offsets), out[1]


@parallel
def _count(task, num_tasks, values, offsets, block_sizes, batch_size, out):
    """Write the owners of the task's ids, and count ids by owner, and by owner and bag."""
    (owners, counts, lengths, num_owners), num_bags = out, offsets.size - 1
    first, end = num_bags * task // num_tasks, num_bags * (task + 1) // num_tasks
    for key in range(block_sizes.size):
        block = np.uint64(max(np.int64(1), block_sizes[key]))
        for bag in range(max(first, key * batch_size), min(end, (key + 1) * batch_size)):
            for position in range(offsets[bag], offsets[bag + 1]):
                # Ids out of range go to the first or last owner, which reports them.
                id = np.uint64(max(np.int64(0), np.int64(values[position])))
                owner = min(np.int64(id // block), num_owners - 1)
                owners[position] = owner
                counts[task, owner] += 1
                lengths[owner * num_bags + bag] += 1


@parallel
def _move(task, num_tasks, values, offsets, block_sizes, batch_size, out):
    """Move the task's ids, made local. `starts[task, owner]` is where the next one goes."""
    (destinations, starts, out_values), num_bags = out, offsets.size - 1
    first, end = num_bags * task // num_tasks, num_bags * (task + 1) // num_tasks
    for key in range(block_sizes.size):
        block = max(1, block_sizes[key])
        for position in range(
            offsets[max(first, key * batch_size)], offsets[max(first, min(end, (key + 1) * batch_size))]
        ):
            owner, id = destinations[position], np.int64(values[position])
            local, destination = id - owner * block, starts[task, owner]
            out_values[destination] = local if id >= 0 and local < block else id
            destinations[position], starts[task, owner] = destination, destination + 1


def block_bucketize(
    values: Tensor, offsets: Tensor, block_sizes: Tensor, weights: Tensor | None, num_owners: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels/jagged.py`."""
    ids, bags, blocks = values.contiguous().numpy(), offsets.contiguous().numpy(), block_sizes.contiguous().numpy()
    num_bags, end = bags.size - 1, int(bags[-1])
    batch_size = num_bags // max(1, blocks.size)
    _check_offsets(bags, ids.size, batch_size)
    # Positions beyond the last offset stay where they are.
    out_positions, out_ids = values.new_empty(ids.size, dtype=torch.int32), values.new_empty(ids.size)
    out_lengths, num_tasks = offsets.new_zeros(num_owners * num_bags), tasks_for(ids.size)
    destinations, out_values, lengths = map(Tensor.numpy, (out_positions, out_ids, out_lengths))
    destinations[end:], out_values[end:] = np.arange(end, ids.size), ids[end:]
    # Count ids by owner.
    counts = np.zeros((num_tasks, -(-num_owners // COUNTS_PER_LINE) * COUNTS_PER_LINE), np.int64)
    args = ids, bags, blocks, batch_size
    _count(num_tasks, num_tasks, num_tasks, *args, (destinations, counts, lengths, num_owners))
    # Move them to where the cumulative counts, by owner, then task, begin.
    starts = counts.T.ravel().cumsum().reshape(counts.T.shape).T - counts
    _move(num_tasks, num_tasks, num_tasks, *args, (destinations, np.ascontiguousarray(starts), out_values))
    assert end == counts.sum()
    out_weights = values.new_empty(0) if weights is None else torch.empty_like(weights)
    if weights is not None:
        out_weights[out_positions.long()] = weights
    return out_ids, out_lengths, out_positions, out_weights


def _check_offsets(offsets: Any, num_values: int, batch_size: int) -> None:
    """Raise ValueError unless offsets ascend from 0 to at most the number of values."""
    bag = first_bad_bag(offsets, min(int(offsets[-1]), num_values))
    if bag == GOOD_OFFSETS:
        return
    if bag < 0:
        raise errors.offsets_do_not_start_at_zero(int(offsets[0]))
    if bag == offsets.size - 1:
        raise errors.offsets_do_not_end_with_values(int(offsets[-1]), num_values)
    key, sample = divmod(bag, batch_size)
    raise errors.offsets_do_not_ascend(str(key), sample, int(offsets[bag]), int(offsets[bag + 1]), num_values)
