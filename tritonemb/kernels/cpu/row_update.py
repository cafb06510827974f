"""CPU twin of `kernels/row_update.py`: one thread owns a row, sums its gradients in order and applies the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.arrays import addresses_of, as_float32, as_int64, dtypes_of
from tritonemb.kernels.cpu.jagged import bags_of
from tritonemb.kernels.cpu.jit import compiled, inlined
from tritonemb.kernels.cpu.memory import FLOAT32, element_size, float32_row, prefetch, uint16_row
from tritonemb.kernels.cpu.optimizers import KINDS, MAX_GRADIENT, NONFINITE, STOCHASTIC_ROUNDING, apply
from tritonemb.kernels.cpu.rounding import (
    ELEMENTS_PER_COUNTER,
    fill_random,
    narrow_row,
    narrow_row_stochastic,
    widen_row,
)
from tritonemb.kernels.layout import (
    COLUMN,
    DIM,
    FIRST_ROW,
    MEAN,
    NUM_ROWS,
    POOLING,
    ROW_DIM,
    SEED,
    TABLE,
    Layout,
    batch_size_of,
)
from tritonemb.optim import OPTIMIZERS

AHEAD = 4  # groups between asking for a row and updating it
GRADIENTS_AHEAD = 8  # positions between asking for a gradient and adding it
POSITIONS_PER_ROW = 2  # a row's own cost, in positions, when work is shared out
PROPAGATE, RAISE, SKIP = range(3)


@inlined
def _add_gradient(sums, gradient, scale, bound, first):
    """sums = or += scale * gradient, clamped to ±bound before it is scaled."""
    if bound < np.inf:
        for j in range(sums.size):
            clamped = gradient[j]
            if clamped > bound:
                clamped = bound
            elif clamped < -bound:
                clamped = -bound
            sums[j] = scale * clamped if first else sums[j] + scale * clamped
    elif first:
        for j in range(sums.size):
            sums[j] = scale * gradient[j]
    else:
        for j in range(sums.size):
            sums[j] += scale * gradient[j]


@inlined
def _lookup_of(table, key, lookups, key_starts):
    """The lookup of `table` by `key`: the first one, but for keys that feed several tables."""
    lookup = key_starts[key]
    while lookups[lookup, TABLE] != table:
        lookup += 1
    return lookup


@inlined
def _gradient_of(position, lookup, bag, key, batch_size, pooled, lookups, grad, width):
    """Address of the part of the output's gradient that one position's row gets."""
    if pooled:
        return grad + (np.int64(bag - key * batch_size) * width + lookups[lookup, COLUMN]) * 4
    return grad + np.int64(position) * width * 4


@inlined
def _prefetch_gradient(position, dim, batch_size, pooled, bags, lookups, key_starts, grad, width):
    bag = np.uint32(bags[position])
    key = bag // batch_size
    prefetch(_gradient_of(position, key_starts[key], bag, key, batch_size, pooled, lookups, grad, width), 4 * dim)


@inlined
def _sum_gradient(
    sums, begin, end, limit, table, batch_size, pooled, order, bags, offsets, sample_weights, lookups, key_starts, grad,
    width, bound,
):  # fmt: skip
    """A row's gradient: the sum over its positions, in the order of `order`, asking ahead up to `limit`."""
    for i in range(begin, end):
        if i + GRADIENTS_AHEAD < limit:
            _prefetch_gradient(
                order[i + GRADIENTS_AHEAD], sums.size, batch_size, pooled, bags, lookups, key_starts, grad, width
            )
        position = order[i]
        bag = np.uint32(bags[position])
        key = bag // batch_size
        lookup = _lookup_of(table, np.int64(key), lookups, key_starts)
        scale = np.float32(1)
        if lookups[lookup, POOLING] == MEAN:
            scale /= np.float32(offsets[bag + 1] - offsets[bag])
        if sample_weights.size:
            scale *= sample_weights[position]
        address = _gradient_of(position, lookup, bag, key, batch_size, pooled, lookups, grad, width)
        _add_gradient(sums, float32_row(address, sums.size), scale, bound, i == begin)


@inlined
def _is_finite(row):
    worst = np.float32(0)
    for j in range(row.size):
        worst += row[j] * np.float32(0)  # stays 0 unless a NaN or an infinity comes by
    return worst == np.float32(0)


@inlined
def _state_row(address, row, dim, per_element):
    """One row of a state: `dim` values or one; none if there is no such state."""
    if address == 0:
        return float32_row(address, 0)
    size = dim if per_element else 1
    return float32_row(address + row * size * 4, size)


@compiled
def _update_rows(
    first, last, check_only, kind, addresses, dtypes, states, per_element, tables, rows, starts, order, bags, offsets,
    sample_weights, lookups, key_starts, batch_size, pooled, grad, width, learning_rate, step, hyperparameters, skipped,
):  # fmt: skip
    """Update groups [first, last); returns the first whose gradient is not finite if that must be raised, else -1."""
    if first == last:
        return -1
    widest = tables[:, ROW_DIM].max()
    sums_room, row_room = np.empty(widest, dtype=np.float32), np.empty(widest, dtype=np.float32)
    words_room = np.empty((widest + ELEMENTS_PER_COUNTER - 1) // ELEMENTS_PER_COUNTER * 4, dtype=np.uint32)
    nonfinite, bound = int(hyperparameters[NONFINITE]), np.float32(hyperparameters[MAX_GRADIENT])
    stochastic = hyperparameters[STOCHASTIC_ROUNDING] != 0.0
    samples = np.uint32(batch_size)
    table, table_end = -1, np.int64(-1)
    for group in range(first, last):
        while rows[group] >= table_end:
            table += 1
            table_end = tables[table, FIRST_ROW] + tables[table, NUM_ROWS]
            dim, dtype = tables[table, ROW_DIM], dtypes[table]
            row_bytes = dim * element_size(dtype)
            origin = tables[table, FIRST_ROW]
            sums = sums_room[:dim]
        row = rows[group] - origin
        address = addresses[table] + row * row_bytes
        if group + AHEAD < last and rows[group + AHEAD] < table_end:
            ahead = rows[group + AHEAD] - origin
            prefetch(addresses[table] + ahead * row_bytes, row_bytes)
            for s in range(states.shape[0]):
                size = 4 * dim if per_element[s] else 4
                prefetch(states[s, table] + ahead * size, size)

        _sum_gradient(
            sums, starts[group], starts[group + 1], starts[last], table, samples, pooled, order, bags, offsets, sample_weights, lookups,
            key_starts, grad, width, bound,
        )  # fmt: skip
        if nonfinite != PROPAGATE and not _is_finite(sums):
            if nonfinite == RAISE:
                return group
            skipped[table] += 1
            continue
        if check_only:
            continue
        state1 = _state_row(states[0, table], row, dim, per_element[0])
        state2 = _state_row(states[1, table], row, dim, per_element[1])
        if dtype == FLOAT32:
            apply(kind, float32_row(address, dim), state1, state2, sums, learning_rate, step, hyperparameters)
            continue
        weight, bits = row_room[:dim], uint16_row(address, dim)
        widen_row(bits, dtype, weight)
        apply(kind, weight, state1, state2, sums, learning_rate, step, hyperparameters)
        if stochastic:
            words = words_room[: (dim + ELEMENTS_PER_COUNTER - 1) // ELEMENTS_PER_COUNTER * 4]
            fill_random(words, tables[table, SEED], row, step)
            narrow_row_stochastic(weight, dtype, bits, words)
        else:
            narrow_row(weight, dtype, bits)
    return -1


@compiled
def _share_groups(starts, num_groups, num_tasks):
    """Bounds of tasks of about equal cost: positions plus POSITIONS_PER_ROW a row."""
    bounds = np.empty(num_tasks + 1, dtype=np.int64)
    cost = starts[num_groups] + POSITIONS_PER_ROW * num_groups
    for task in range(num_tasks + 1):
        low, high, wanted = 0, num_groups, cost * task // num_tasks
        while low < high:
            middle = (low + high) // 2
            if starts[middle] + POSITIONS_PER_ROW * middle < wanted:
                low = middle + 1
            else:
                high = middle
        bounds[task] = low
    return bounds


def row_update_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    step: Tensor,
    skipped: Tensor,
    learning_rate: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    optimizer: str,
    hyperparameters: Sequence[float],
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
) -> None:
    """See `kernels/row_update.py`."""
    rows, starts, order, num_groups = (group.numpy() for group in groups)
    bag_offsets = as_int64(offsets)
    specs = OPTIMIZERS[optimizer].states
    state_addresses = np.zeros((2, len(weights)), dtype=np.int64)
    for index in range(len(specs)):
        state_addresses[index] = addresses_of(states[index * len(weights) : (index + 1) * len(weights)])
    per_element = np.array([spec.per_element for spec in specs] + [False, False], dtype=np.bool_)[:2]
    constants = np.array(hyperparameters, dtype=np.float64)
    gradient = as_float32(grad)
    cost = int(starts[num_groups]) * int(layout.lookups[:, DIM].max())
    num_tasks = 1 if cost < 16_384 else 4 * pool.num_threads()
    bounds = _share_groups(starts, int(num_groups), num_tasks).tolist()
    counts = np.zeros((num_tasks, len(weights)), dtype=np.int64)
    found = [-1] * num_tasks

    def sweep(check_only: bool) -> None:
        def work(task: int) -> None:
            found[task] = _update_rows(
                bounds[task], bounds[task + 1], check_only, KINDS[optimizer], addresses_of(weights), dtypes_of(weights),
                state_addresses, per_element, layout.tables.numpy(), rows, starts, order,
                bags, bag_offsets, as_float32(sample_weights), layout.lookups.numpy(), layout.key_starts.numpy(),
                batch_size_of(offsets, layout.key_starts), layout.pooled, gradient.ctypes.data, layout.width,
                np.float32(learning_rate.item()), int(step) + 1, constants, counts[task],
            )  # fmt: skip

        pool.run(work, num_tasks)

    bags = bags_of(bag_offsets, int(bag_offsets[-1]))
    if constants[NONFINITE] == RAISE:
        sweep(check_only=True)
        if max(found) >= 0:
            raise errors.bad_gradient(int(rows[min(group for group in found if group >= 0)]), layout)
    sweep(check_only=False)
    step += 1
    skipped += torch.from_numpy(counts.sum(0))
