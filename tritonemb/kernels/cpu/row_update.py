"""CPU twin of `kernels/row_update.py`: one thread owns a row, sums its gradients in order and applies the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.arrays import addresses_of, as_float32, as_int64, dtypes_of, share
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
from tritonemb.kernels.cpu.simd import sum_float32_rows
from tritonemb.kernels.layout import (
    COLUMN,
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
GRADIENTS_AHEAD = 12  # positions between asking for a gradient and adding it
READS_PER_GRADIENT = 4  # from here on, a gradient that is read is likely in cache already
POSITIONS_PER_ROW = 2  # a row's own cost, in positions, when work is shared out
PROPAGATE, RAISE, SKIP = range(3)


@compiled
def _place_positions(
    first, last, batch_size, lookups, key_starts, offsets, pooled, width, sample_weights, sources, scales
):
    """For keys with one lookup, samples [first, last): where each position's gradient starts, and its scale if any."""
    for key in range(key_starts.size - 1):
        if key_starts[key] == key_starts[key + 1]:
            continue
        column, mean = lookups[key_starts[key], COLUMN], lookups[key_starts[key], POOLING] == MEAN
        for sample in range(first, last):
            begin, end = offsets[key * batch_size + sample], offsets[key * batch_size + sample + 1]
            for position in range(begin, end):
                sources[position] = sample * width + column if pooled else position * width
            if scales.size:
                scale = np.float32(1) / np.float32(end - begin) if mean else np.float32(1)
                for position in range(begin, end):
                    scales[position] = scale * sample_weights[position] if sample_weights.size else scale


@compiled
def _place_entries(
    batch_size, lookups, key_starts, offsets, pooled, width, sample_weights, sources, scales, tables, rows, starts,
    order, num_groups, bags,
):  # fmt: skip
    """For keys that feed several tables: the same for each entry of `order`, whose row says which lookup it is."""
    table, table_end = -1, np.int64(-1)
    for group in range(num_groups):
        while rows[group] >= table_end:
            table += 1
            table_end = tables[table, FIRST_ROW] + tables[table, NUM_ROWS]
        for entry in range(starts[group], starts[group + 1]):
            position = order[entry]
            key, sample = divmod(np.int64(bags[position]), batch_size)
            lookup = key_starts[key]
            while lookups[lookup, TABLE] != table:
                lookup += 1
            sources[entry] = sample * width + lookups[lookup, COLUMN] if pooled else position * width
            if scales.size:
                size = offsets[bags[position] + 1] - offsets[bags[position]]
                scale = np.float32(1) / np.float32(size) if lookups[lookup, POOLING] == MEAN else np.float32(1)
                scales[entry] = scale * sample_weights[position] if sample_weights.size else scale


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
    first, last, check_only, skipped, kind, addresses, dtypes, states, per_element, tables, rows, starts, order,
    by_position, ask_for_gradients, sources, scales, grad, learning_rate, step, hyperparameters,
):  # fmt: skip
    """Update groups [first, last); returns the first whose gradient is not finite if that must be raised, else -1."""
    if first == last:
        return -1
    first_entry, num_entries = starts[first], np.int64(starts[last] - starts[first])
    gradient_rows = np.empty(num_entries, dtype=np.int64)
    gradient_scales = np.empty(num_entries if scales.size else 0, dtype=np.float32)
    for i in range(num_entries):
        index = order[first_entry + i] if by_position else first_entry + i
        gradient_rows[i] = grad + sources[index] * 4
        if scales.size:
            gradient_scales[i] = scales[index]
    widest = tables[:, ROW_DIM].max()
    sums_room, row_room = np.empty(widest, dtype=np.float32), np.empty(widest, dtype=np.float32)
    words_room = np.empty((widest + ELEMENTS_PER_COUNTER - 1) // ELEMENTS_PER_COUNTER * 4, dtype=np.uint32)
    sums_address, row_address = sums_room.ctypes.data, row_room.ctypes.data
    nonfinite, stochastic = int(hyperparameters[NONFINITE]), hyperparameters[STOCHASTIC_ROUNDING] != 0.0

    table, table_end = -1, np.int64(-1)
    origin = base = dim = dtype = row_bytes = np.int64(0)
    for group in range(first, last):
        while rows[group] >= table_end:
            table += 1
            origin, dim, dtype = tables[table, FIRST_ROW], tables[table, ROW_DIM], dtypes[table]
            table_end, base = origin + tables[table, NUM_ROWS], addresses[table]
            row_bytes = dim * element_size(dtype)
        row = rows[group] - origin
        if group + AHEAD < last and rows[group + AHEAD] < table_end:
            ahead = rows[group + AHEAD] - origin
            prefetch(base + ahead * row_bytes, row_bytes)
            for s in range(2):
                if states[s, table] != 0:
                    size = 4 * dim if per_element[s] else 4
                    prefetch(states[s, table] + ahead * size, size)
        begin, end = np.int64(starts[group] - first_entry), np.int64(starts[group + 1] - first_entry)
        if ask_for_gradients:
            for entry in range(begin + GRADIENTS_AHEAD, min(end + GRADIENTS_AHEAD, num_entries)):
                prefetch(gradient_rows[entry], 4 * dim)

        factors = gradient_scales.ctypes.data + begin * 4 if scales.size else 0
        sum_float32_rows(sums_address, gradient_rows.ctypes.data + begin * 8, factors, end - begin, dim)
        sums = float32_row(sums_address, dim)
        if nonfinite != PROPAGATE and not _is_finite(sums):
            if nonfinite == RAISE:
                return group
            skipped[table] += 1
            continue
        if check_only:
            continue
        state1 = _state_row(states[0, table], row, dim, per_element[0])
        state2 = _state_row(states[1, table], row, dim, per_element[1])
        address = base + row * row_bytes
        weight = float32_row(address if dtype == FLOAT32 else row_address, dim)
        if dtype != FLOAT32:
            widen_row(uint16_row(address, dim), dtype, weight)
        apply(kind, weight, state1, state2, sums, learning_rate, step, hyperparameters)
        if dtype != FLOAT32 and stochastic:
            words = words_room[: (dim + ELEMENTS_PER_COUNTER - 1) // ELEMENTS_PER_COUNTER * 4]
            fill_random(words, tables[table, SEED], row, step)
            narrow_row_stochastic(weight, dtype, uint16_row(address, dim), words)
        elif dtype != FLOAT32:
            narrow_row(weight, dtype, uint16_row(address, dim))
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
    constants = np.array(hyperparameters, dtype=np.float64)
    gradient = as_float32(_clamped(grad, constants[MAX_GRADIENT]))
    num_positions = int(starts[num_groups])
    by_position, sources, scales = _place(
        offsets, sample_weights, layout, rows, starts, order, int(num_groups), num_positions
    )
    num_tasks = 1 if num_positions * layout.width < 16_384 * len(layout.lookups) else 2 * pool.num_threads()
    bounds = _share_groups(starts, int(num_groups), num_tasks).tolist()
    ask_for_gradients = num_positions < READS_PER_GRADIENT * offsets.numel()
    skips = np.zeros((num_tasks, len(weights)), dtype=np.int64)
    found = [-1] * num_tasks
    args = (
        KINDS[optimizer], addresses_of(weights), dtypes_of(weights), *_states_of(states, optimizer, len(weights)),
        layout.tables.numpy(), rows, starts, order, by_position, ask_for_gradients, sources, scales,
        gradient.ctypes.data, np.float32(learning_rate.item()), int(step) + 1, constants,
    )  # fmt: skip

    def sweep(check_only: bool) -> None:
        def work(task: int) -> None:
            found[task] = _update_rows(bounds[task], bounds[task + 1], check_only, skips[task], *args)

        pool.run(work, num_tasks)

    if constants[NONFINITE] == RAISE:
        sweep(check_only=True)
        if max(found) >= 0:
            raise errors.bad_gradient(int(rows[min(group for group in found if group >= 0)]), layout)
    sweep(check_only=False)
    step += 1
    if constants[NONFINITE] == SKIP:
        skipped += torch.from_numpy(skips.sum(0))


def _clamped(grad: Tensor, max_gradient: float) -> Tensor:
    return grad.clamp(-max_gradient, max_gradient) if max_gradient < np.inf else grad


def _place(
    offsets: Tensor,
    sample_weights: Tensor | None,
    layout: Layout,
    rows: np.ndarray,
    starts: np.ndarray,
    order: np.ndarray,
    num_groups: int,
    num_positions: int,
) -> tuple[bool, np.ndarray, np.ndarray]:
    """Where each gradient lies and its scale (none if all are 1): by position, or by entry of `order`."""
    batch_size, bag_offsets = batch_size_of(offsets, layout.key_starts), as_int64(offsets)
    num_values = int(bag_offsets[-1])
    lookups, key_starts = layout.lookups.numpy(), layout.key_starts.numpy()
    by_position = layout.multiplicity <= 1
    sources = np.empty(num_values if by_position else num_positions, dtype=np.int64)
    scaled = sample_weights is not None or bool((lookups[:, POOLING] == MEAN).any())
    scales = np.empty(sources.size if scaled else 0, dtype=np.float32)
    args = (
        batch_size, lookups, key_starts, bag_offsets, layout.pooled, layout.width, as_float32(sample_weights), sources,
        scales,
    )  # fmt: skip
    if by_position:
        bounds = share(batch_size, num_values)
        pool.run(lambda task: _place_positions(bounds[task], bounds[task + 1], *args), len(bounds) - 1)
    else:
        bags = bags_of(bag_offsets, num_values)
        _place_entries(*args, layout.tables.numpy(), rows, starts, order, num_groups, bags)
    return by_position, sources, scales


def _states_of(states: Sequence[Tensor], optimizer: str, num_tables: int) -> tuple[np.ndarray, np.ndarray]:
    """Addresses `[2, T]` of the states, 0 where there is none, and whether each has a value per element."""
    specs = OPTIMIZERS[optimizer].states
    addresses = np.zeros((2, num_tables), dtype=np.int64)
    for index in range(len(specs)):
        addresses[index] = addresses_of(states[index * num_tables : (index + 1) * num_tables])
    return addresses, np.array([spec.per_element for spec in specs] + [False, False], dtype=np.bool_)[:2]
