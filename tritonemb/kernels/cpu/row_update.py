"""CPU twin of `kernels/row_update.py`: one thread owns a row, sums its gradients in order and applies the optimizer."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.jagged import batch_size_of
from tritonemb.kernels.cpu.jit import FEW_ELEMENTS, FLOAT32, called, compiled, inlined, run_tasks
from tritonemb.kernels.cpu.optimizers import MAX_GRADIENT, NONFINITE, PLACE, STOCHASTIC_ROUNDING, apply
from tritonemb.kernels.cpu.random import fill_philox, narrow_row, narrow_row_stochastic, widen_row
from tritonemb.kernels.cpu.row_groups import (
    DTYPE_CODES,
    NUM_GROUPS,
    NUM_VALUES,
    arrays_of,
    as_float32,
    as_int64,
    groups_of_share,
    sort_pairs,
    uses_by_table,
)
from tritonemb.kernels.cpu.simd import (
    element_size,
    float32_row,
    int32_row,
    int64_row,
    prefetch,
    sum_float32_rows,
    uint16_row,
)
from tritonemb.layout import (
    COLUMN,
    COLUMN_ORIGIN,
    ELEMENTS_PER_COUNTER,
    FIRST_ROW,
    MEAN,
    NUM_ROWS,
    PIECE,
    POOLING,
    ROW_DIM,
    ROW_IDS,
    ROW_IDS_STRIDE,
    ROW_ORIGIN,
    SEED,
    SPAN,
    TABLE,
    Layout,
    unpack_names,
)
from tritonemb.optimizers import KINDS, OPTIMIZERS, SGD, Optimizer

AHEAD = 4  # groups between asking for a row and updating it
GRADIENTS_AHEAD = 12  # positions between asking for a gradient and adding it
READS_PER_GRADIENT = 4  # from here on, a gradient that is read is likely in cache already
POSITIONS_PER_ROW = 2  # a row's own cost, in positions, when work is shared out
TASK_COST = 8_192  # about, of a task that takes its groups from sorted pairs
IGNORE, RAISE, SKIP = range(3)
SUMS, COMPACT_SUMS = -1, -2  # in place of an optimizer: gradients alone, in their rows or side by side
WEIGHT, DTYPE, STEP, SKIPPED, STATES = range(5)  # rows of `places` [6, T]: addresses, but for DTYPE
NO_ROW = np.iinfo(np.int64).max
_NO_IDS, _NO_PAIRS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32)
_NO_UNITS = np.empty((0, NUM_GROUPS + 1), dtype=np.int64)
_NO_GROUPS: Any = np.zeros(1, dtype=np.int32), np.empty(0, dtype=np.int32), 0  # starts, order, their number
_SGD_CONSTANTS = np.array(SGD(on_nonfinite="ignore").hyperparameters, dtype=np.float64)


@inlined
def _one_value_a_bag(offsets):
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
def _use_of(source, uses, key_of, batch_size, sources):
    """Which of a table's lookups a source belongs to, its key, and the sources of that key."""
    use = 0
    while sources[(key_of[uses[use]] + 1) * batch_size] <= source:
        use += 1
    key = key_of[uses[use]]
    return uses[use], key, sources[key * batch_size], sources[(key + 1) * batch_size]


@inlined
def _find_gradients(order, uses, lookups, key_of, batch_size, sources, bags, pooled, grads, apart, gradients):
    """Address of the gradient of each of these sources, whose table has the lookups `uses`."""
    begin = end = base = pitch = np.int64(0)
    for i in range(order.size):
        source = np.int64(order[i])
        if not begin <= source < end:
            lookup, key, begin, end = _use_of(source, uses, key_of, batch_size, sources)
            base, pitch = grads[lookup if apart else 0]
            first = key * batch_size if pooled else begin if apart else 0
            base += (0 if apart else lookups[lookup, COLUMN] * 4) - first * pitch
        gradients[i] = base + (np.int64(bags[source]) if bags.size else source) * pitch


@inlined
def _find_scales(order, uses, lookups, key_of, batch_size, offsets, sources, bags, pooled, sample_weights, scales):
    begin = end = np.int64(0)
    mean = False
    for i in range(order.size):
        source = np.int64(order[i])
        if not begin <= source < end:
            lookup, _, begin, end = _use_of(source, uses, key_of, batch_size, sources)
            mean = pooled and lookups[lookup, POOLING] == MEAN
        scale = np.float32(1)
        if mean:
            bag = np.int64(bags[source]) if bags.size else source
            scale /= np.float32(offsets[bag + 1] - offsets[bag])
        scales[i] = scale * sample_weights[source] if sample_weights.size else scale


@inlined
def _add(to, row):
    for j in range(to.size):
        to[j] += row[j]


@inlined
def _sum_gradients(to, gradients, scales, count, dim, room):
    """The sum of `count` gradients, in the order that `kernels/gradient_sums.py` describes; arguments are addresses."""
    for span in range(0, count, SPAN):
        num_pieces = (min(SPAN, count - span) + PIECE - 1) // PIECE
        for piece in range(num_pieces):
            first = span + piece * PIECE
            sums = to if count <= PIECE else room + piece * dim * 4
            factors = scales + first * 4 if scales else 0
            sum_float32_rows(sums, gradients + first * 8, factors, min(PIECE, count - first), dim)
        apart = 1
        while apart < num_pieces:
            for piece in range(0, num_pieces - apart, 2 * apart):
                _add(float32_row(room + piece * dim * 4, dim), float32_row(room + (piece + apart) * dim * 4, dim))
            apart *= 2
        if count > PIECE:
            if span == 0:
                float32_row(to, dim)[:] = 0
            _add(float32_row(to, dim), float32_row(room, dim))


@inlined
def _is_finite(bits):
    """Whether float32 values are finite, by their bits, int32 `[n]`: integers are compared many at once."""
    largest = np.int32(0)
    for j in range(bits.size):
        largest = max(largest, np.int32(bits[j] & np.int32(0x7FFFFFFF)))
    return largest < np.int32(0x7F800000)  # the exponent of infinities and NaN


@inlined
def _state_row(address, row, dim, per_element):
    """One row of a state: `dim` values or one; none if there is no such state."""
    if address == 0:
        return float32_row(address, np.int64(0))
    size = dim if per_element else 1
    return float32_row(address + row * size * 4, size)


@inlined
def _ask_for_row(row, table, weight, row_bytes, states, state_bytes):
    prefetch(weight + row * row_bytes, row_bytes)
    for s in range(2):
        if states[s, table] != 0:
            prefetch(states[s, table] + row * state_bytes[s], state_bytes[s])


@called
def _update_rows(
    task, check_only, bounds, parts, table_groups, found, skipped, kind, addresses, dtypes, states, per_element, tables,
    lookups, uses_of_table, uses, key_of, batch_size, offsets, sources, bags, pooled, scaled, ask_for_gradients,
    values, units, pairs, rows, starts, order, grads, apart, sample_weights, learning_rate, steps,
    hyperparameters,
):  # fmt: skip
    """Update [bounds[task], bounds[task + 1]) of all parts, the groups of a table or the pairs of a unit each, by cost.

    The first row whose gradient must be refused goes into `found`.
    """
    widest = np.int64(0)
    for table in range(tables.shape[0]):
        widest = max(widest, tables[table, ROW_DIM])
    sums_room, row_room = np.empty(widest, dtype=np.float32), np.empty(widest, dtype=np.float32)
    pieces_room = np.empty(SPAN // PIECE * widest, dtype=np.float32)
    words_room = np.empty((widest + ELEMENTS_PER_COUNTER - 1) // ELEMENTS_PER_COUNTER * 4, dtype=np.uint32)
    on_nonfinite, stochastic = int(hyperparameters[NONFINITE]), hyperparameters[STOCHASTIC_ROUNDING] != 0.0

    for part in range(parts.size - 1):
        begin, end = max(bounds[task], parts[part]) - parts[part], min(bounds[task + 1], parts[part + 1]) - parts[part]
        if begin >= end:
            continue
        table, whole = units[part, TABLE] if units.size else part, parts[part + 1] - parts[part]
        first, last = table_groups[table], table_groups[table + 1]
        if units.size:
            rows, starts, order, last = groups_of_share(
                units[part], begin, end, whole, values, tables[table, FIRST_ROW], pairs
            )
        else:
            of_table, size = starts[first:last], starts[last] - starts[first]
            last = first + np.searchsorted(of_table, starts[first] + end * size // whole)
            first += np.searchsorted(of_table, starts[first] + begin * size // whole)
        if first >= last:
            continue
        # In the loop: Numba frees an array behind the last statement that names it, whoever has its address.
        sums_address, row_address = np.int64(sums_room.ctypes.data), np.int64(row_room.ctypes.data)
        pieces_address = np.int64(pieces_room.ctypes.data)
        step = steps[table]
        row_ids, stride = tables[table, ROW_IDS], tables[table, ROW_IDS_STRIDE]
        row_ids = int64_row(row_ids, tables[table, NUM_ROWS] * stride if row_ids else 0)
        first_row, dim, dtype, base = tables[table, FIRST_ROW], tables[table, ROW_DIM], dtypes[table], addresses[table]
        row_bytes = dim * element_size(dtype)
        state_bytes = (4 * dim if per_element[0] else 4, 4 * dim if per_element[1] else 4)
        for group in range(first, min(first + AHEAD, last) if kind >= 0 else first):
            _ask_for_row(rows[group] - first_row, table, base, row_bytes, states, state_bytes)
        first_entry, num_entries = np.int64(starts[first]), np.int64(starts[last] - starts[first])
        gradients = np.empty(num_entries, dtype=np.int64)
        scales = np.empty(num_entries if scaled else 0, dtype=np.float32)
        entries = order[first_entry : first_entry + num_entries]
        uses_here = uses[uses_of_table[table] : uses_of_table[table + 1]]
        _find_gradients(entries, uses_here, lookups, key_of, batch_size, sources, bags, pooled, grads, apart, gradients)
        if scaled:
            _find_scales(
                entries, uses_here, lookups, key_of, batch_size, offsets, sources, bags, pooled, sample_weights, scales
            )
        for group in range(first, last):
            row = group - table_groups[table] if kind == COMPACT_SUMS else rows[group] - first_row
            row = group if kind == PLACE else row
            address = base + row * row_bytes
            if kind >= 0 and group + AHEAD < last:
                _ask_for_row(rows[group + AHEAD] - first_row, table, base, row_bytes, states, state_bytes)
            begin, end = np.int64(starts[group] - first_entry), np.int64(starts[group + 1] - first_entry)
            if ask_for_gradients:
                for entry in range(begin + GRADIENTS_AHEAD, min(end + GRADIENTS_AHEAD, num_entries)):
                    prefetch(gradients[entry], 4 * dim)

            factors = scales.ctypes.data + begin * 4 if scaled else 0
            to = address if (kind < 0 and dtype == FLOAT32) or kind == PLACE else sums_address
            _sum_gradients(to, gradients.ctypes.data + begin * 8, factors, end - begin, dim, pieces_address)
            sums = float32_row(to, dim)
            if kind < 0:
                if dtype != FLOAT32:
                    narrow_row(sums, dtype, uint16_row(address, dim))
                continue
            if on_nonfinite != IGNORE and not _is_finite(int32_row(to, dim)):
                if on_nonfinite == RAISE:
                    found[task] = rows[group]
                    return
                skipped[task, table] += 1
                continue
            if check_only or kind == PLACE:
                continue
            state1 = _state_row(states[0, table], row, dim, per_element[0])
            state2 = _state_row(states[1, table], row, dim, per_element[1])
            weight = float32_row(address if dtype == FLOAT32 else row_address, dim)
            if dtype != FLOAT32:
                widen_row(uint16_row(address, dim), dtype, weight)
            apply(kind, weight, state1, state2, sums, learning_rate, step, hyperparameters)
            if dtype != FLOAT32 and stochastic:
                words = words_room[: (dim + ELEMENTS_PER_COUNTER - 1) // ELEMENTS_PER_COUNTER * 4]
                whole_row = tables[table, ROW_ORIGIN] + (row_ids[row * stride] if row_ids.size else row)
                counter = tables[table, COLUMN_ORIGIN] // ELEMENTS_PER_COUNTER
                fill_philox(words, tables[table, SEED], counter, whole_row, step)
                narrow_row_stochastic(weight, dtype, uint16_row(address, dim), words)
            elif dtype != FLOAT32:
                narrow_row(weight, dtype, uint16_row(address, dim))


@inlined
def _groups_by_table(tables, rows, num_groups):
    """int64 `[T + 1]`: where each table's groups begin; they stand in order of tables."""
    found = np.empty(tables.shape[0] + 1, dtype=np.int64)
    for table in range(tables.shape[0]):
        found[table] = np.searchsorted(rows[:num_groups], tables[table, FIRST_ROW])
    found[-1] = num_groups
    return found


@compiled
def _update(
    num_threads, kind, places, per_element, tables, lookups, key_starts, batch_size, offsets, pooled, values, sources,
    units, pairs, rows, starts, order, num_groups, grads, apart, width, sample_weights, learning_rate,
    hyperparameters,
):  # fmt: skip
    """Update all rows and count; or none, and return the first row whose gradient must be refused.

    Otherwise -1, or -2 - t if rows of table t were skipped.
    """
    table_groups, num_values = _groups_by_table(tables, rows, num_groups), np.int64(0)
    parts = np.zeros((units if units.size else tables).shape[0] + 1, dtype=np.int64)
    for part in range(parts.size - 1):
        if units.size:
            size, count = units[part, NUM_VALUES], units[part, NUM_GROUPS]
        else:
            first, last = table_groups[part], table_groups[part + 1]
            size, count = np.int64(starts[last] - starts[first]), last - first
        num_values += size
        parts[part + 1] = parts[part] + size + POSITIONS_PER_ROW * count
    few = num_values * width < FEW_ELEMENTS * lookups.shape[0]
    num_tasks = 1 if few else max(2 * num_threads, parts[-1] // TASK_COST if units.size else 0)
    scaled, skips = sample_weights.size > 0, hyperparameters[NONFINITE] == SKIP
    skipped = np.zeros((num_tasks if skips else 0, tables.shape[0]), dtype=np.int64)
    steps = np.zeros(tables.shape[0], dtype=np.int64)
    for table in range(tables.shape[0] if kind >= 0 else 0):
        steps[table] = int64_row(places[STEP, table], 1)[0] + 1
    for lookup in range(lookups.shape[0]):
        scaled = scaled or lookups[lookup, POOLING] == MEAN
    uses_of_table, uses, _, key_of = uses_by_table(lookups, key_starts, tables.shape[0])
    have_bags = pooled and not _one_value_a_bag(sources)
    bags = np.empty(sources[-1] if have_bags else 0, dtype=np.int32)  # the bag that each position of values lies in
    if have_bags:
        run_tasks(num_threads, num_tasks, _fill_bags, (num_tasks, sources, bags))
    bounds, found = parts[-1] * np.arange(num_tasks + 1) // num_tasks, np.full(num_tasks, NO_ROW)
    ask_for_gradients = num_values < READS_PER_GRADIENT * offsets.size
    for check_only in (True, False):
        if check_only and hyperparameters[NONFINITE] != RAISE:
            continue
        run_tasks(
            num_threads, num_tasks, _update_rows,
            (
                check_only, bounds, parts, table_groups, found, skipped, kind, places[WEIGHT], places[DTYPE],
                places[STATES:], per_element, tables, lookups, uses_of_table, uses, key_of, batch_size, offsets,
                sources, bags, pooled, scaled, ask_for_gradients, values, units, pairs, rows, starts, order, grads,
                apart, sample_weights, learning_rate, steps, hyperparameters,
            ),
        )  # fmt: skip
        if found.min() != NO_ROW:
            return found.min()
    result = np.int64(-1)
    for table in range(tables.shape[0] if kind >= 0 else 0):
        int64_row(places[STEP, table], 1)[0] = steps[table]
        for task in range(skipped.shape[0]):
            int64_row(places[SKIPPED, table], 1)[0] += skipped[task, table]
            if skipped[task, table]:
                result = np.int64(-2 - table)
    return result


def row_update_(
    weights: Sequence[Tensor], states: Sequence[Tensor], step: Tensor | Sequence[Tensor],
    skipped: Tensor | Sequence[Tensor], learning_rate: Tensor, grad: Tensor | Sequence[Tensor], offsets: Tensor,
    sample_weights: Tensor | None, optimizer: str, hyperparameters: Sequence[float],
    groups: tuple[Tensor, Tensor, Tensor, Tensor] | Tensor, layout: Layout,
) -> None:  # fmt: skip
    """See `kernels/row_update.py`; `groups` may be the ids, `grad` gradients by lookup, counters a tensor by table."""
    assert all(map(Tensor.is_contiguous, states))
    places = [place for counters in (step, skipped) for place in _places(counters, len(weights))]
    places += [*map(Tensor.data_ptr, states), *[0] * (2 * len(weights) - len(states))]
    result = _run(
        KINDS[optimizer], weights, places, _per_element(optimizer), learning_rate.item(),
        np.array(hyperparameters, dtype=np.float64), grad, offsets, sample_weights, groups, layout,
    )  # fmt: skip
    if result >= 0:
        raise errors.nonfinite_gradient_error(result, layout)
    if result <= -2:
        errors.warn_of_skipped_rows(unpack_names(layout.table_names)[-2 - result])


def _places(counters: Tensor | Sequence[Tensor], num_tables: int) -> list[int]:
    if isinstance(counters, Tensor):
        return [counters.data_ptr() + 8 * table * sum(counters.stride()) for table in range(num_tables)]
    return [*map(Tensor.data_ptr, counters)]


def row_gradients_(
    sums: Sequence[Tensor], grad: Tensor, offsets: Tensor, sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor], layout: Layout, compact: bool = False, max_gradient: float = np.inf,
) -> None:  # fmt: skip
    """See `kernels/row_update.py`."""
    constants = _SGD_CONSTANTS.copy()
    constants[MAX_GRADIENT] = max_gradient
    _run(
        COMPACT_SUMS if compact else SUMS, sums, [0] * (4 * len(sums)), np.zeros(2, dtype=np.bool_), 0.0, constants,
        grad, offsets, sample_weights, groups, layout,
    )  # fmt: skip


@functools.cache
def _per_element(optimizer: str) -> np.ndarray:
    """bool `[2]`: of each state."""
    states = OPTIMIZERS.get(optimizer, Optimizer).states
    return np.array([*(spec.per_element for spec in states), False, False], dtype=np.bool_)[:2]


def _run(
    kind: int, weights: Sequence[Tensor], places: list[int], per_element: np.ndarray, learning_rate: float,
    constants: np.ndarray, grad: Tensor | Sequence[Tensor], offsets: Tensor, sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor] | Tensor, layout: Layout,
) -> int:  # fmt: skip
    """What `_update` returns; `places` are those from STEP on."""
    assert all(map(Tensor.is_contiguous, weights))
    most, apart, bounds = constants[MAX_GRADIENT], not isinstance(grad, Tensor), as_int64(offsets)
    parts: list[Tensor] = [*grad] if apart else [grad]  # type: ignore[list-item]
    parts = [part.clamp(-most, most) for part in parts] if most < np.inf else parts
    parts = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    parts = [part if part.dtype == torch.float32 else part.to(torch.float32) for part in parts]
    grads = np.array([(part.data_ptr(), 4 * part.stride(0)) for part in parts], dtype=np.int64)
    if isinstance(groups, Tensor):
        by_bag = layout.pooled and sample_weights is None and groups.numel() > 2 * offsets.numel()  # else no smaller
        ids = as_int64(groups)
        given = ids, *sort_pairs(ids, bounds, layout, by_bag), _NO_IDS, *_NO_GROUPS
    else:
        given = _NO_IDS, bounds, _NO_UNITS, _NO_PAIRS, *map(Tensor.numpy, groups[:3]), int(groups[3])
    places = [*map(Tensor.data_ptr, weights), *(DTYPE_CODES[weight.dtype] for weight in weights), *places]
    return _update(
        torch.get_num_threads(), kind, np.array(places, dtype=np.int64).reshape(-1, len(weights)), per_element,
        *arrays_of(layout), batch_size_of(offsets, layout.key_starts), bounds, layout.pooled, *given,
        grads, apart, layout.width, as_float32(sample_weights), np.float32(learning_rate), constants,
    )  # fmt: skip
