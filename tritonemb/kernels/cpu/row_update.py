"""CPU twin of `kernels/row_update.py`: one thread per row sums its gradients in order and applies the optimizer."""

import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.jagged import batch_size_of
from tritonemb.kernels.cpu.jit import (
    DTYPE_CODES,
    FEW_ELEMENTS,
    FLOAT32,
    call,
    called,
    compiled,
    inlined,
    inlined_uncounted,
    run_tasks,
    uncounted,
)
from tritonemb.kernels.cpu.optimizers import (
    ASSIGN,
    COW_CLIP,
    MAX_GRADIENT,
    MAX_NORM,
    NONFINITE,
    PLACE,
    STOCHASTIC_ROUNDING,
    WEIGHT_DECAY,
    step_address,
)
from tritonemb.kernels.cpu.random import BLOCK_WORDS
from tritonemb.kernels.cpu.row_groups import (
    KEYS,
    LOOKUPS,
    NUM_GROUPS,
    NUM_VALUES,
    STARTS,
    arrays_of,
    batch_arrays,
    groups_of_slice,
    lookups_by_table,
    scalings_of,
    sort_pairs,
)
from tritonemb.kernels.cpu.simd import (
    PREFETCH_DISTANCE,
    block_sum_address,
    empty,
    int32_row,
    int64_row,
    prefetch,
    row_size,
    zeros,
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
    BatchGradient,
    FusedTables,
    make_layout,
    unpack_names,
)
from tritonemb.optimizers import KINDS, OPTIMIZERS, SGD, Optimizer
from tritonemb.types import TableConfig

PREFETCHED_BYTES = 2_048  # of rows before they are updated: more would not be in flight at once
MIN_ROW_DISTANCE, MAX_ROW_DISTANCE = 4, 32  # groups between the prefetch of a row and its update
BLOCK_ELEMENTS = 2_048  # of sums before they are applied: they stay in the first-level cache
POSITIONS_PER_ROW = 2  # cost of a row's update, in positions, to balance tasks
TASK_COST = 8_192  # approximate cost of a task that takes its groups from sorted pairs
IGNORE, RAISE, SKIP = range(3)
SUMS, COMPACT_SUMS = -1, -2  # kinds without an optimizer: gradients only, at their rows or compact
WEIGHT, DTYPE, STEP, SKIPPED, STATES = range(5)  # rows of `pointers` [6, T]: addresses, but for DTYPE
NO_ROW = np.iinfo(np.int64).max
_NO_IDS, _NO_PAIRS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32)
_NO_UNITS = np.empty((0, NUM_GROUPS + 1), dtype=np.int64)
_NO_GROUPS: Any = np.zeros(1, dtype=np.int32), np.empty(0, dtype=np.int32), 0  # starts, order, their number
# Batch in kernels. `sources`: positions or bags that `order` refers to, the first of each bag; `bags`: that of each
# source, empty if they are equal; `grads` `[L or 1, 2]`: address and pitch of the gradient per lookup or of the output.
_Batch: Any = namedtuple("_Batch", "lookups by_table batch_size offsets sources bags pooled grads sample_weights")
_SGD_CONSTANTS = np.array(SGD(on_nonfinite="ignore").hyperparameters, dtype=np.float64)


@inlined_uncounted
def _is_one_value_per_bag(offsets):
    """Return whether each bag has one value, whose position is the bag's number."""
    num_mismatches = 0
    for bag in range(offsets.size):
        num_mismatches += 1 if offsets[bag] != bag else 0
    return num_mismatches == 0


@uncounted
def _fill_bags(task, num_tasks, offsets, bags):
    num_bags = offsets.size - 1
    for bag in range(num_bags * task // num_tasks, num_bags * (task + 1) // num_tasks):
        for position in range(offsets[bag], offsets[bag + 1]):
            bags[position] = bag


@inlined_uncounted
def _find_lookup(source, table, batch):
    """Return the lookup of a source among the table's, its key, and the range of the key's sources."""
    number = batch.by_table[STARTS, table]
    while batch.sources[(batch.by_table[KEYS, number] + 1) * batch.batch_size] <= source:
        number += 1
    lookup, first_bag = batch.by_table[LOOKUPS, number], batch.by_table[KEYS, number] * batch.batch_size
    return lookup, first_bag, batch.sources[first_bag], batch.sources[first_bag + batch.batch_size]


@inlined_uncounted
def _fill_addresses(order, table, batch, per_lookup, addresses):
    """Write the address of the gradient of each source in `order`, of a table."""
    begin = end = base = pitch = np.int64(0)
    for i in range(order.size):
        source = np.int64(order[i])
        if not begin <= source < end:
            lookup, first_bag, begin, end = _find_lookup(source, table, batch)
            base, pitch = batch.grads[lookup if per_lookup else 0]
            first_row = first_bag if batch.pooled else begin if per_lookup else 0
            base += (0 if per_lookup else batch.lookups[lookup, COLUMN] * 4) - first_row * pitch
        addresses[i] = base + (np.int64(batch.bags[source]) if batch.bags.size else source) * pitch


@inlined_uncounted
def _fill_scales(order, table, batch, scales):
    """Write the scale of each source in `order`: its sample weight, over the bag's length for means."""
    begin = end = np.int64(0)
    is_mean = False
    for i in range(order.size):
        source = np.int64(order[i])
        if not begin <= source < end:
            lookup, _, begin, end = _find_lookup(source, table, batch)
            is_mean = batch.pooled and batch.lookups[lookup, POOLING] == MEAN
        scale = np.float32(1)
        if is_mean:
            bag = np.int64(batch.bags[source]) if batch.bags.size else source
            scale /= np.float32(batch.offsets[bag + 1] - batch.offsets[bag])
        scales[i] = scale * batch.sample_weights[source] if batch.sample_weights.size else scale


@inlined_uncounted
def _is_finite(bits):
    """Return whether float32 values are finite, by their bits, int32 `[n]`: the loop is vectorized."""
    largest = np.int32(0)
    for j in range(bits.size):
        largest = max(largest, np.int32(bits[j] & np.int32(0x7FFFFFFF)))
    return largest < np.int32(0x7F800000)  # the exponent of infinities and NaN


@inlined_uncounted
def _prefetch_row(row, table, weight, row_bytes, states, state_bytes):
    prefetch(weight + row * row_bytes, row_bytes)
    for s in range(2):
        if states[s, table] != 0:
            prefetch(states[s, table] + row * state_bytes[s], state_bytes[s])


@inlined_uncounted
def _update_slice(task, check_only, groups, tasks, optimizer, arrays, reads):
    """Update groups [first, last) of a table, block by block of rows.

    With "raise" the first row with a gradient that is not finite goes into `bad_rows`, and the result is True.
    """
    (table, first, last, block_rows, sizes), (rows, starts, order, gradients, scales, buffer) = groups
    (_, _, table_groups, bad_rows, skipped), (pointers, per_element, tables) = tasks, arrays
    (kind, learning_rate, steps, hyperparameters, functions), (batch, per_lookup, scaled) = optimizer, reads
    step_float32, step_16bit, sum_block = functions
    addresses, dtypes, states = pointers[WEIGHT], pointers[DTYPE], pointers[STATES:]
    on_nonfinite, stochastic = int(hyperparameters[NONFINITE]), hyperparameters[STOCHASTIC_ROUNDING] != 0.0
    sums_address, constants = np.int64(buffer.ctypes.data), np.int64(hyperparameters.ctypes.data)
    pieces_address = sums_address + sizes[0] * 4
    scratch_address = pieces_address + sizes[1] * 4
    seed, counter = tables[table, SEED], tables[table, COLUMN_ORIGIN] // ELEMENTS_PER_COUNTER
    step = steps[table]
    row_ids, stride = tables[table, ROW_IDS], tables[table, ROW_IDS_STRIDE]
    row_ids = int64_row(row_ids, tables[table, NUM_ROWS] * stride if row_ids else 0)
    first_row, dim, dtype, base = tables[table, FIRST_ROW], tables[table, ROW_DIM], dtypes[table], addresses[table]
    row_bytes, row_step = row_size(dim, dtype), step_float32 if dtype == FLOAT32 else step_16bit
    state_bytes = (4 * dim if per_element[0] else 4, 4 * dim if per_element[1] else 4)
    # Prefetch the first rows; compute addresses and scales of all gradients.
    distance = max(MIN_ROW_DISTANCE, min(MAX_ROW_DISTANCE, PREFETCHED_BYTES // row_bytes))
    for group in range(first, min(first + distance, last) if kind >= 0 else first):
        _prefetch_row(rows[group] - first_row, table, base, row_bytes, states, state_bytes)
    first_entry, num_entries = np.int64(starts[first]), np.int64(starts[last] - starts[first])
    entries = order[first_entry : first_entry + num_entries]
    _fill_addresses(entries, table, batch, per_lookup, gradients)
    for entry in range(num_entries, gradients.size):
        gradients[entry] = base  # prefetched only
    if scaled:
        _fill_scales(entries, table, batch, scales)
    # Block by block of rows: sum their gradients, of which more than PIECE in pieces; then update row by row.
    in_place = kind == PLACE or (kind == COMPACT_SUMS and dtype == FLOAT32)
    gradients_at = np.int64(gradients.ctypes.data - first_entry * 8)
    scales_at = np.int64(scales.ctypes.data - first_entry * 4 if scaled else 0)
    for block in range(first, last, block_rows):
        count = min(block_rows, last - block)
        offset = block if kind == PLACE else block - table_groups[table]
        sums_at = base + offset * row_bytes if in_place else sums_address
        starts_at = np.int64(starts.ctypes.data + block * 4)
        call(sum_block, (sums_at, starts_at, count, gradients_at, scales_at, dim, pieces_address))
        has_bad = on_nonfinite != IGNORE and kind >= 0 and not _is_finite(int32_row(sums_at, count * dim))
        for group in range(block, block + count):
            row = group - table_groups[table] if kind == COMPACT_SUMS else rows[group] - first_row
            address, sums = base + row * row_bytes, sums_at + (group - block) * dim * 4
            if kind >= 0 and group + distance < last:
                _prefetch_row(rows[group + distance] - first_row, table, base, row_bytes, states, state_bytes)
            if has_bad and not _is_finite(int32_row(sums_at + (group - block) * dim * 4, dim)):
                if on_nonfinite == RAISE:
                    bad_rows[task] = rows[group]
                    return True
                skipped[task, table] += 1
                continue
            if check_only or row_step == 0:
                continue
            global_row = np.int64(row)
            if dtype != FLOAT32 and stochastic:
                global_row = tables[table, ROW_ORIGIN] + (row_ids[row * stride] if row_ids.size else row)
            state1, state2 = states[0, table] + row * state_bytes[0], states[1, table] + row * state_bytes[1]
            row_args = np.int64(address), np.int64(sums), state1, state2, dim, learning_rate, step, constants
            occurrences = np.int64(starts[group + 1] - starts[group])
            call(row_step, (*row_args, occurrences, scratch_address, dtype, seed, counter, global_row))
    return False


@functools.partial(called, passes=1)
def _update_rows(task, check_only, tasks, optimizer, arrays, reads, sorted_ids, groups):
    """Update the task's groups: those at costs [bounds[task], bounds[task + 1]) of all items.

    An item is the groups of a table, or the pairs of a unit, from `costs[item]` to `costs[item + 1]`.
    """
    (bounds, costs, table_groups, _, _), (values, _, units, pairs), tables = tasks, sorted_ids, arrays[2]
    # Buffers: the sums of a block of rows; of pieces; a row, and random words.
    max_dim = np.int64(1)
    for table in range(tables.shape[0]):
        max_dim = max(max_dim, tables[table, ROW_DIM])
    block_rows: Any = max(1, BLOCK_ELEMENTS // max_dim)
    sizes = block_rows * max_dim, SPAN // PIECE * max_dim, 2 * max_dim + BLOCK_WORDS
    buffer, (rows, starts, order, _) = empty(sizes[0] + sizes[1] + sizes[2], np.float32), groups

    for item in range(costs.size - 1):
        begin, end = max(bounds[task], costs[item]) - costs[item], min(bounds[task + 1], costs[item + 1]) - costs[item]
        if begin >= end:
            continue
        # The task's slice of the item, by cost.
        table, item_cost = units[item, TABLE] if units.size else item, costs[item + 1] - costs[item]
        first, last = table_groups[table], table_groups[table + 1]
        if units.size:
            rows, starts, order, last = groups_of_slice(
                units[item], begin, end, item_cost, values, tables[table, FIRST_ROW], pairs
            )
        else:
            table_starts, size = starts[first:last], starts[last] - starts[first]
            last = first + _lower_bound(table_starts, starts[first] + end * size // item_cost)
            first += _lower_bound(table_starts, starts[first] + begin * size // item_cost)
        if first >= last:
            continue
        num_entries, scaled = np.int64(starts[last] - starts[first]), reads[2]
        gradients = empty(num_entries + PREFETCH_DISTANCE, np.int64)
        scales = empty(num_entries if scaled else 0, np.float32)
        arguments = (table, first, last, block_rows, sizes), (rows, starts, order, gradients, scales, buffer)
        if _update_slice(task, check_only, arguments, tasks, optimizer, arrays, reads):
            break


@inlined_uncounted
def _lower_bound(ascending, value):
    """Return the number of elements below a value: np.searchsorted takes a second to compile."""
    begin, end = np.int64(0), np.int64(ascending.size)
    while begin < end:
        middle = (begin + end) >> 1
        if ascending[middle] < value:
            begin = middle + 1
        else:
            end = middle
    return begin


@inlined
def _groups_by_table(tables, rows, num_groups):
    """Return int64 `[T + 1]`: the start of each table's groups, which are ordered by table."""
    table_groups = empty(tables.shape[0] + 1, np.int64)
    for table in range(tables.shape[0]):
        table_groups[table] = _lower_bound(rows[:num_groups], tables[table, FIRST_ROW])
    table_groups[-1] = num_groups
    return table_groups


@compiled
def _update(num_threads, optimizer, table_arrays, layout, segmentation, sorted_ids, groups, gradients):
    """Update all rows and the counters. Returns -1, or -2 - t if rows of table t were skipped.

    With "raise" and a gradient that is not finite: change nothing, and return the first such row.
    """
    (tables, lookups, by_table), (_, sources, units, _), (rows, starts, _, num_groups) = layout, sorted_ids, groups
    (kind, learning_rate, hyperparameters, functions), (pointers, per_element) = optimizer, table_arrays
    (batch_size, offsets, pooled), (grads, per_lookup, width, sample_weights, scaled) = segmentation, gradients
    # Cumulative cost of the items, to balance tasks.
    table_groups, num_values = _groups_by_table(tables, rows, num_groups), np.int64(0)
    costs = zeros((units if units.size else tables).shape[0] + 1, np.int64)
    for item in range(costs.size - 1):
        if units.size:
            size, count = units[item, NUM_VALUES], units[item, NUM_GROUPS]
        else:
            first, last = table_groups[item], table_groups[item + 1]
            size, count = np.int64(starts[last] - starts[first]), last - first
        num_values += size
        costs[item + 1] = costs[item] + size + POSITIONS_PER_ROW * count
    # Counters per task, next steps, scales and bags.
    is_small = num_values * width < FEW_ELEMENTS * lookups.shape[0]
    num_tasks = 1 if is_small else max(2 * num_threads, costs[-1] // TASK_COST if units.size else 0)
    skipped = zeros((num_tasks if hyperparameters[NONFINITE] == SKIP else 0, tables.shape[0]), np.int64)
    steps = zeros(tables.shape[0], np.int64)
    for table in range(tables.shape[0] if kind >= 0 else 0):
        steps[table] = int64_row(pointers[STEP, table], 1)[0] + 1
    has_bags = pooled and not _is_one_value_per_bag(sources)
    bags = empty(sources[-1] if has_bags else 0, np.int32)  # of each position
    if has_bags:
        run_tasks(num_threads, num_tasks, _fill_bags, (num_tasks, sources, bags))
    batch = _Batch(lookups, by_table, batch_size, offsets, sources, bags, pooled, grads, sample_weights)
    # Check all gradients first for "raise"; update.
    bounds, bad_rows = zeros(num_tasks + 1, np.int64), empty(num_tasks, np.int64)
    for task in range(num_tasks):  # a loop, as array expressions take seconds to compile
        bounds[task + 1], bad_rows[task] = costs[-1] * (task + 1) // num_tasks, NO_ROW
    for check_only in (True, False):
        if check_only and hyperparameters[NONFINITE] != RAISE:
            continue
        tasks, reads = (bounds, costs, table_groups, bad_rows, skipped), (batch, per_lookup, scaled)
        step_args, arrays = (kind, learning_rate, steps, hyperparameters, functions), (pointers, per_element, tables)
        args = check_only, tasks, step_args, arrays, reads, sorted_ids, groups
        run_tasks(num_threads, num_tasks, _update_rows, args)
        for task in range(num_tasks):  # in the order of rows
            if bad_rows[task] != NO_ROW:
                return bad_rows[task]
    outcome = np.int64(-1)
    for table in range(tables.shape[0] if kind >= 0 else 0):
        int64_row(pointers[STEP, table], 1)[0] = steps[table]
        for task in range(skipped.shape[0]):
            int64_row(pointers[SKIPPED, table], 1)[0] += skipped[task, table]
            if skipped[task, table]:
                outcome = np.int64(-2 - table)
    return outcome


def row_update_(fused: FusedTables, batch: BatchGradient) -> None:
    """See `kernels/row_update.py`. `groups` may be the ids, `grad` a tensor per lookup, counters a tensor per table."""
    weights, states, step, skipped, learning_rate, optimizer, hyperparameters = fused
    pointers = [pointer for counters in (step, skipped) for pointer in _counter_addresses(counters, len(weights))]
    pointers += [*map(Tensor.data_ptr, states), *[0] * (2 * len(weights) - len(states))]
    step_args = KINDS[optimizer], np.float32(learning_rate.item()), np.array(hyperparameters, dtype=np.float64)
    outcome = _run(step_args, weights, pointers, _per_element(optimizer), batch)
    if outcome >= 0:
        raise errors.nonfinite_gradient_error(outcome, batch.layout)
    if outcome <= -2:
        errors.warn_of_skipped_rows(unpack_names(batch.layout.table_names)[-2 - outcome])


def _counter_addresses(counters: Tensor | Sequence[Tensor], num_tables: int) -> list[int]:
    if isinstance(counters, Tensor):
        address, pitch = counters.data_ptr(), 8 * sum(counters.stride())
        return [address + table * pitch for table in range(num_tables)]
    return [*map(Tensor.data_ptr, counters)]


def row_gradients_(
    sums: Sequence[Tensor], batch: BatchGradient, compact: bool = False, max_gradient: float = np.inf
) -> None:
    constants, kind = _SGD_CONSTANTS.copy(), COMPACT_SUMS if compact else SUMS
    constants[MAX_GRADIENT], constants[STOCHASTIC_ROUNDING] = max_gradient, 0.0  # rounded to nearest
    _run((kind, np.float32(0), constants), sums, [0] * (4 * len(sums)), np.zeros(2, dtype=np.bool_), batch)


def precompile() -> None:
    """Compile or load `_update`, by the sum of one gradient."""
    layout = make_layout([TableConfig("table", 1, 1)], ["table"], pooled=True)
    groups = torch.tensor([0]), torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), 1
    batch = BatchGradient(torch.ones(1, 1), torch.tensor([0, 1]), None, groups, layout)
    row_gradients_([torch.empty(1, 1)], batch, compact=True)


@functools.cache
def _per_element(optimizer: str) -> np.ndarray:
    """Return bool `[2]`: whether each state has a value per element."""
    states = OPTIMIZERS.get(optimizer, Optimizer).states
    return np.array([*(spec.per_element for spec in states), False, False], dtype=np.bool_)[:2]


def _run(
    optimizer: tuple[int, np.float32, np.ndarray], weights: Sequence[Tensor], pointers: list[int],
    per_element: np.ndarray, batch: BatchGradient,
) -> int:  # fmt: skip
    """Run `_update` and return its result; `pointers` are the rows from STEP on."""
    assert all(map(Tensor.is_contiguous, weights))
    grad, offsets, sample_weights, groups, layout = batch
    h, per_lookup = optimizer[2], not isinstance(grad, Tensor)
    ungrouped = [groups] if isinstance(groups, Tensor) else []
    weight_array, bag_offsets, *ids = batch_arrays(sample_weights, offsets, *ungrouped)
    # Copy gradients that are not float32, where limits are exact, or whose rows are not contiguous; clamp them.
    grad_tensors: list[Tensor] = [*grad] if per_lookup else [grad]
    grad_tensors = [g if g.dtype == torch.float32 else g.to(torch.float32) for g in grad_tensors]
    if (limit := h[MAX_GRADIENT]) < np.inf:
        grad_tensors = [g.clamp(-limit, limit) for g in grad_tensors]
    grad_tensors = [g if g.stride(1) == 1 else g.contiguous() for g in grad_tensors]
    grads = np.array([(g.data_ptr(), 4 * g.stride(0)) for g in grad_tensors], dtype=np.int64)
    # Groups, or ids, which are sorted first.
    sorted_ids, group_arrays = (_NO_IDS, bag_offsets, _NO_UNITS, _NO_PAIRS), (_NO_IDS, *_NO_GROUPS)
    if isinstance(groups, Tensor):
        by_bag = layout.pooled and sample_weights is None and groups.numel() > 2 * offsets.numel()  # smaller pairs
        sorted_ids = ids[0], *sort_pairs(ids[0], bag_offsets, layout, by_bag)
    else:
        group_arrays = *map(Tensor.numpy, groups[:3]), int(groups[3])
    # Only the steps that the tables' dtypes need are compiled; sums are written as assigned rows are.
    dtypes, kind = [DTYPE_CODES[weight.dtype] for weight in weights], optimizer[0]
    row_kind, in_place = ASSIGN if kind < 0 else kind, kind in (COMPACT_SUMS, PLACE)
    options = bool(h[COW_CLIP] < np.inf), bool(h[WEIGHT_DECAY]), bool(h[MAX_NORM] < np.inf)
    step_float32 = step_address(row_kind, True, *options) if FLOAT32 in dtypes and not in_place else 0
    step_16bit = step_address(row_kind, False, *options) if {*dtypes} - {FLOAT32} else 0
    pointers = [*map(Tensor.data_ptr, weights), *dtypes, *pointers]
    table_arrays = np.array(pointers, dtype=np.int64).reshape(-1, len(weights)), per_element
    bags = batch_size_of(offsets, layout.key_starts), bag_offsets, layout.pooled
    scaled = True in scalings_of(layout, sample_weights is not None)
    gradients = grads, per_lookup, layout.width, weight_array, scaled
    num_threads, arrays = torch.get_num_threads(), (*arrays_of(layout)[:2], lookups_by_table(layout))
    step_args = *optimizer, (step_float32, step_16bit, block_sum_address(scaled))
    return _update(num_threads, step_args, table_arrays, arrays, bags, sorted_ids, group_arrays, gradients)
