"""CPU twin of `kernels/row_groups.py`: a radix sort per table; large tables are split into ranges of ids.

Offsets are checked before they are used.

A *unit* is a table and a range of its ids. Units are sorted independently, each by the bits that its ids need; then the
start of each unit in the result is known, and all are written. The result does not depend on how tables are split.

Sorted are *pairs* of an id and its *source*: its position, or its bag for updates that need no positions. The pairs of
a unit have 4 bytes each if their bits fit, else 8; all are in one array of uint32.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numba import types
from torch import Tensor

from tritonemb import errors
from tritonemb.kernels.cpu.jit import (
    DTYPE_CODES,
    address_of,
    call,
    called,
    compiled,
    inlined,
    inlined_uncounted,
    run_tasks,
    uncounted,
)
from tritonemb.kernels.cpu.simd import empty, int64_row, zeros
from tritonemb.layout import FIRST_ROW, MEAN, NUM_ROWS, POOLING, TABLE, Layout

NARROW_BITS, PAIR_BITS = 32, 63  # of pairs of 4 and 8 bytes: an id and, below it, a source
FEW_PAIRS = 48  # up to here insertion sort is faster
MANY_PAIRS = 8_192  # from here on fewer passes with larger digits are faster
HISTOGRAM_BITS = 8
MIN_SPLIT_VALUES = 16_384  # tables with fewer values are not split
# Columns of `units`, after TABLE. MAX_VALUES: bound of NUM_VALUES; BEGIN: start of its pairs.
FIRST_ID, END_ID, MAX_VALUES, FIRST_SOURCE, SOURCE_BITS, ID_BITS, BEGIN, NUM_VALUES, NUM_GROUPS = range(1, 10)
STARTS, LOOKUPS, KEYS = range(3)  # rows of `lookups_by_table`
GOOD_OFFSETS = -2
_ABSENT = np.empty(0, dtype=np.float32)


def addresses_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return int64 `[T]`: the address of each contiguous tensor."""
    assert all(map(Tensor.is_contiguous, tensors))
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def memory_of(tensors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return two int64 `[T]`: the address of each contiguous tensor, and the code of its dtype."""
    return addresses_of(tensors), np.array([DTYPE_CODES[tensor.dtype] for tensor in tensors], dtype=np.int64)


@functools.lru_cache(maxsize=256)
def arrays_of(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `tables`, `lookups` and `key_starts` as arrays."""
    return layout.tables.numpy(), layout.lookups.numpy(), layout.key_starts.numpy()


def batch_arrays(weights: Tensor | None, *indices: Tensor) -> list[np.ndarray]:
    """Return contiguous arrays, views if possible: float32 weights, empty for None, and int64 indices."""
    tensors = [(t if t.dtype == torch.int64 else t.to(torch.int64)).contiguous() for t in indices]
    weight_array = _ABSENT if weights is None else weights.detach().to(torch.float32).contiguous().numpy()
    return [weight_array, *map(Tensor.numpy, tensors)]


@functools.lru_cache(maxsize=256)
def scalings_of(layout: Layout, weighted: bool) -> tuple[bool, ...]:
    """Return whether bags of lookups have scales: no lookup, some or all."""
    means = (layout.pooled and pooling == MEAN for pooling in layout.lookups[:, POOLING].tolist())
    return tuple(sorted({weighted or is_mean for is_mean in means}))


@inlined_uncounted
def _find_bad_bag(offsets, num_values):
    """Check offsets: GOOD_OFFSETS; -1 if the first is not 0; the first bag whose offsets descend; or the last index."""
    if offsets[0] != 0:
        return -1
    descents = 0
    for bag in range(offsets.size - 1):  # without an early exit, which prevents vectorization
        descents += 1 if offsets[bag + 1] < offsets[bag] else 0
    if descents:
        for bag in range(offsets.size - 1):
            if offsets[bag + 1] < offsets[bag]:
                return bag
    return GOOD_OFFSETS if offsets[-1] == num_values else offsets.size - 1


@compiled
def first_bad_bag(offsets, num_values):
    return _find_bad_bag(offsets, num_values)


@functools.lru_cache(maxsize=256)
def lookups_by_table(layout: Layout) -> np.ndarray:
    """Return int64 `[3, max(T + 1, L)]`: starts; lookups of table t, by key, from `starts[t]` on; and their keys."""
    tables, lookups, key_starts = arrays_of(layout)
    order, keys = lookups[:, TABLE].argsort(kind="stable"), np.arange(key_starts.size - 1).repeat(np.diff(key_starts))
    starts = lookups[order, TABLE].searchsorted(np.arange(tables.shape[0] + 1))
    by_table = np.zeros((3, max(starts.size, order.size)), dtype=np.int64)
    for row, values in zip(by_table, (starts, order, keys[order]), strict=True):
        row[: values.size] = values
    return by_table


@inlined
def _keys_of(by_table, table):
    """Return the keys that look up a table; `by_table` is the result of `lookups_by_table`."""
    return by_table[KEYS, by_table[STARTS, table] : by_table[STARTS, table + 1]]


@inlined
def _bit_length(value):
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@inlined_uncounted
def _add_unit(units, num_units, table, first_id, end_id, max_values):
    unit = units[num_units]
    unit[TABLE], unit[FIRST_ID], unit[END_ID], unit[MAX_VALUES] = table, first_id, end_id, max_values
    return num_units + 1


@inlined
def _split_table(table, num_rows, split_size, keys, batch, units, num_units):
    """Append units of `table` with about `split_size` values each, by a histogram of the upper bits of its ids."""
    batch_size, values, offsets = batch
    shift = max(0, _bit_length(num_rows - 1) - HISTOGRAM_BITS)
    histogram = zeros(1 << HISTOGRAM_BITS, np.int64)
    for key in keys:
        for position in range(offsets[key * batch_size], offsets[(key + 1) * batch_size]):
            row = values[position]
            if 0 <= row < num_rows:
                histogram[row >> shift] += 1
    begin, num_values = np.int64(0), 0  # Numba types a literal separately
    for bucket in range(histogram.size):
        num_values += histogram[bucket]
        end = (bucket + 1) << shift
        if num_values >= split_size or bucket == histogram.size - 1:
            num_units = _add_unit(units, num_units, table, begin, min(end, num_rows), num_values)
            begin, num_values = end, 0
            if begin >= num_rows:
                break
    return num_units


@inlined
def _make_units(num_threads, tables, by_table, batch):
    """Split tables into units: one per table, or more of tables with more values than a thread's share."""
    (batch_size, _, offsets), counts, total = batch, zeros(tables.shape[0], np.int64), np.int64(0)
    for table in range(tables.shape[0]):
        for key in _keys_of(by_table, table):
            counts[table] += offsets[(key + 1) * batch_size] - offsets[key * batch_size]
        total += counts[table]
    target = max(MIN_SPLIT_VALUES, total // num_threads + 1)
    capacity = tables.shape[0] + total // MIN_SPLIT_VALUES * 2 + 4 * num_threads
    units = zeros((capacity, NUM_GROUPS + 1), np.int64)
    num_units, first = np.int64(0), np.int64(0)
    for table in range(tables.shape[0]):
        num_rows, count = tables[table, NUM_ROWS], counts[table]
        cuts = 1 if num_threads == 1 else min(2 * num_threads, (count + target - 1) // target)
        if cuts > 1:
            keys, split_size = _keys_of(by_table, table), count // cuts + 1
            num_units = _split_table(table, num_rows, split_size, keys, batch, units, num_units)
        elif count > 0:
            num_units = _add_unit(units, num_units, table, first, num_rows, count)
    return units[:num_units]


@inlined_uncounted
def _set_pair_format(unit, begin, keys, batch_size, sources):
    """Set a unit's pair format and the start of its pairs; return the start of the next unit's."""
    unit[FIRST_SOURCE], end_source = sources[keys[0] * batch_size], sources[(keys[-1] + 1) * batch_size]
    unit[SOURCE_BITS] = _bit_length(end_source - unit[FIRST_SOURCE] - 1)
    unit[ID_BITS] = _bit_length(unit[END_ID] - unit[FIRST_ID] - 1)
    unit[BEGIN], size = begin, unit[MAX_VALUES] + 2 & -2  # one more, see _fill_pairs, and even, to align 8 bytes
    return begin + (2 * size if _pair_format(unit)[-1] else size)


@inlined_uncounted
def _pair_format(unit):
    """Return the pair format of a unit: first id, first source, source bits, whether an id fits, whether 8 bytes."""
    bits = unit[SOURCE_BITS] + unit[ID_BITS]
    return unit[FIRST_ID], unit[FIRST_SOURCE], unit[SOURCE_BITS], bits <= PAIR_BITS, bits > NARROW_BITS


@inlined_uncounted
def _read_pair(pairs, i, pair_format, values):
    first_id, first_source, source_bits, fits, wide = pair_format
    pair = np.int64(pairs[2 * i]) | np.int64(pairs[2 * i + 1]) << 32 if wide else np.int64(pairs[i])
    source = first_source + (pair & ((1 << source_bits) - 1))
    return first_id + (pair >> source_bits) if fits else values[source], source


@inlined_uncounted
def _fill_pairs(unit, keys, batch, sources, pairs):
    """Fill in the pairs of a unit, unsorted: id and source, or only the source. Returns their number.

    Branchless: each value is written, and counted if its id is in the unit; a branch would be mispredicted.
    """
    (first_id, first_source, source_bits, fits, _), (batch_size, values, offsets) = _pair_format(unit), batch
    end_id, count, is_by_bag = unit[END_ID], 0, sources.ctypes.data != offsets.ctypes.data
    for key in keys:
        bag = key * batch_size
        for position in range(offsets[bag], offsets[bag + batch_size]):
            while is_by_bag and offsets[bag + 1] <= position:
                bag += 1
            row, source = values[position], bag if is_by_bag else position
            pairs[count] = (row - first_id if fits else 0) << source_bits | (source - first_source)
            count += 1 if first_id <= row < end_id else 0
    return count


@inlined_uncounted
def _fill_digits(bit, digit_bits, first_id, first_position, position_bits, values, pairs):
    """Write `digit_bits` bits of each id, from `bit` on, above its position; keep the order."""
    mask, digit_mask = (1 << position_bits) - 1, (1 << digit_bits) - 1
    for i in range(pairs.size):
        position = pairs[i] & mask
        digit = ((values[first_position + position] - first_id) >> bit) & digit_mask
        pairs[i] = digit << position_bits | position


@inlined_uncounted
def _insertion_sort(pairs):
    for i in range(1, pairs.size):
        pair, j = pairs[i], i
        while j > 0 and pairs[j - 1] > pair:
            pairs[j] = pairs[j - 1]
            j -= 1
        pairs[j] = pair


@inlined
def radix_sort(pairs, spare, first_bit, num_bits):
    """Sort `pairs` in place by `num_bits` bits from `first_bit` on, stably (LSD radix sort)."""
    max_digit_bits = 12 if pairs.size >= MANY_PAIRS else 10
    passes = max(1, (num_bits + max_digit_bits - 1) // max_digit_bits)
    digit_bits = (num_bits + passes - 1) // passes
    mask = (1 << digit_bits) - 1
    all_ends = zeros((passes, 1 << digit_bits), np.int32)
    # Count the digits of all passes at once: after a pass equal digits are adjacent, and their increments would stall.
    for i in range(pairs.size):
        digits = np.int64(pairs[i]) >> first_bit
        for sort_pass in range(passes):
            all_ends[sort_pass, digits & mask] += 1
            digits >>= digit_bits
    # Passes: exclusive sums of counts, then scatter.
    source, target = pairs, spare
    for sort_pass in range(passes):
        shift, ends = first_bit + sort_pass * digit_bits, all_ends[sort_pass]
        total = 0
        for digit in range(ends.size):
            total, ends[digit] = total + ends[digit], total
        for i in range(source.size):
            digit = (np.int64(source[i]) >> shift) & mask
            target[ends[digit]] = source[i]
            ends[digit] += 1
        source, target = target, source
    if passes % 2:
        for i in range(pairs.size):  # a loop, as slice assignment takes seconds to compile
            pairs[i] = source[i]


@inlined
def _sort_pairs(unit, keys, batch, sources, pairs):
    """Fill in and sort the pairs of a unit, uint32 or int64. Returns the number of pairs, and of distinct ids."""
    (first_id, first_source, source_bits, fits, _), values = _pair_format(unit), batch[1]
    count, digit_bits = _fill_pairs(unit, keys, batch, sources, pairs), PAIR_BITS - source_bits
    pairs, previous, groups = pairs[:count], np.int64(-1), 0
    if fits and count <= FEW_PAIRS:
        _insertion_sort(pairs)
    else:
        spare = np.empty_like(pairs)
        for bit in range(0, unit[ID_BITS], digit_bits):
            if not fits:
                _fill_digits(bit, digit_bits, first_id, first_source, source_bits, values, pairs)
            radix_sort(pairs, spare, source_bits, min(unit[ID_BITS] - bit, digit_bits))
    # Count distinct ids.
    for i in range(count):
        row, _ = _read_pair(pairs, i, (first_id, first_source, source_bits, fits, False), values)
        groups += 1 if row != previous else 0
        previous = row
    return count, groups


@functools.partial(called, passes=1)
def _sort_unit(number, units, by_table, batch, sources, all_pairs, sort_wide):
    """Sort the pairs of a unit; set its numbers of values and of distinct ids. `sort_wide`: address of `_sort_wide`."""
    unit, pairs, (batch_size, values, offsets) = units[number], all_pairs[units[number, BEGIN] :], batch
    keys = _keys_of(by_table, unit[TABLE])
    if _pair_format(unit)[-1]:
        addresses = np.int64(unit.ctypes.data), np.int64(keys.ctypes.data), np.int64(values.ctypes.data)
        sizes = np.int64(keys.size), np.int64(values.size), np.int64(offsets.size), np.int64(batch_size)
        ranges = np.int64(offsets.ctypes.data), np.int64(sources.ctypes.data), np.int64(pairs.ctypes.data)
        call(sort_wide, (*addresses, *ranges, *sizes))
    else:
        unit[NUM_VALUES], unit[NUM_GROUPS] = _sort_pairs(unit, keys, batch, sources, pairs)


@compiled
def _sort_wide(args):
    """Sort pairs of 8 bytes as `_sort_unit` does; arrays are addresses."""
    unit_at, keys_at, values_at, offsets_at, sources_at, pairs_at, num_keys, num_values, num_offsets, batch_size = args
    unit, offsets = int64_row(unit_at, NUM_GROUPS + 1), int64_row(offsets_at, num_offsets)
    batch, sources = (batch_size, int64_row(values_at, num_values), offsets), int64_row(sources_at, num_offsets)
    pairs, keys = int64_row(pairs_at, unit[MAX_VALUES] + 1), int64_row(keys_at, num_keys)
    unit[NUM_VALUES], unit[NUM_GROUPS] = _sort_pairs(unit, keys, batch, sources, pairs)


@inlined_uncounted
def _write_groups(unit, bounds, values, first_row, pairs, first_value, groups):
    """Write rows, ends of segments and sources of a unit's sorted values in `bounds`. Returns the number of rows.

    Branchless: each value writes its group's row, and the group's end so far.
    """
    split, group, previous, (begin, end), (rows, starts, order) = _pair_format(unit), -1, -1, bounds, groups
    for i in range(begin, end):
        row, order[i - begin] = _read_pair(pairs, i, split, values)
        group += 1 if row != previous else 0
        previous = row
        rows[group], starts[group + 1] = first_row + row, first_value + i - begin + 1
    return group + 1


@inlined
def groups_of_slice(unit, begin, end, total, values, first_row, all_pairs):
    """Return rows, starts, order and number of the groups in slice [begin, end) of [0, total) of a sorted unit."""
    # Scale the slice to the unit's values, and move its bounds to starts of groups.
    split, pairs = _pair_format(unit), all_pairs[unit[BEGIN] :]
    bounds = empty(2, np.int64)
    bounds[0], bounds[1] = begin * unit[NUM_VALUES] // total, end * unit[NUM_VALUES] // total
    for i in range(2):
        while 0 < bounds[i] < unit[NUM_VALUES] and (
            _read_pair(pairs, bounds[i], split, values)[0] == _read_pair(pairs, bounds[i] - 1, split, values)[0]
        ):
            bounds[i] += 1
    count = bounds[1] - bounds[0]
    rows, starts = empty(count, np.int64), zeros(count + 1, np.int32)
    order = empty(count, np.int32)
    num_groups = _write_groups(unit, (bounds[0], bounds[1]), values, first_row, pairs, 0, (rows, starts, order))
    return rows, starts, order, num_groups


@uncounted
def _write(task, num_tails, unit_starts, tables, values, sorted_units, groups):
    """Write sorted unit `task`, or one of `num_tails` slices of the padding after the last group."""
    (units, all_pairs), (rows, starts, order) = sorted_units, groups
    num_units = units.shape[0]
    if task < num_units:
        unit, first_value, group = units[task], unit_starts[task, 0], unit_starts[task, 1]
        pairs, unit_groups = all_pairs[unit[BEGIN] :], (rows[group:], starts[group:], order[first_value:])
        bounds, first_row = (np.int64(0), unit[NUM_VALUES]), tables[unit[TABLE], FIRST_ROW]
        _write_groups(unit, bounds, values, first_row, pairs, first_value, unit_groups)
        return
    num_values, num_groups = unit_starts[num_units]
    tail, size = task - num_units, rows.size - num_groups
    begin, end = num_groups + size * tail // num_tails, num_groups + size * (tail + 1) // num_tails
    rows, starts = rows[begin:end], starts[begin : end + 1]
    begin, end = 0, rows.size  # only a loop from 0 on is vectorized
    past_last = tables[-1, FIRST_ROW] + tables[-1, NUM_ROWS]
    for group in range(begin, end):
        rows[group], starts[group + 1] = past_last, num_values
    if tail == 0:
        for i in range(num_values, order.size):
            order[i] = -1


@compiled
def _sort(num_threads, tables, by_table, batch, by_bag, sort_wide):
    """Sort: return the first bad bag, if any; sources by bag (`offsets` or bag numbers); units; and sorted pairs."""
    batch_size, values, offsets = batch
    # Check offsets; use bags as sources if all pairs with them fit.
    num_threads, bad_bag = 1 if values.size < MIN_SPLIT_VALUES else num_threads, _find_bad_bag(offsets, values.size)
    for table in range(tables.shape[0]):
        by_bag = by_bag and _bit_length(tables[table, NUM_ROWS]) + _bit_length(offsets.size) <= PAIR_BITS
    sources = empty(offsets.size, np.int64) if by_bag else offsets
    for bag in range(offsets.size if by_bag else 0):
        sources[bag] = bag
    # Split tables, and allocate pairs.
    units, size = empty((0, NUM_GROUPS + 1), np.int64), np.int64(0)
    if bad_bag == GOOD_OFFSETS:
        units = _make_units(num_threads, tables, by_table, batch)
    for number in range(units.shape[0]):
        keys = _keys_of(by_table, units[number, TABLE])
        size = _set_pair_format(units[number], size, keys, batch_size, sources)
    all_pairs = empty(size, np.uint32)
    run_tasks(num_threads, units.shape[0], _sort_unit, (units, by_table, batch, sources, all_pairs, sort_wide))
    return bad_bag, sources, units, all_pairs


@compiled
def _group(num_threads, tables, values, sorted_units, groups):
    """Write rows, starts and order. Returns the number of groups."""
    units, starts = sorted_units[0], groups[1]
    num_threads, num_units = 1 if values.size < MIN_SPLIT_VALUES else num_threads, units.shape[0]
    unit_starts = zeros((num_units + 1, 2), np.int64)
    for unit in range(num_units):
        unit_starts[unit + 1, 0] = unit_starts[unit, 0] + units[unit, NUM_VALUES]
        unit_starts[unit + 1, 1] = unit_starts[unit, 1] + units[unit, NUM_GROUPS]
    starts[0] = 0
    args = num_threads, unit_starts, tables, values, sorted_units, groups
    run_tasks(num_threads, num_units + num_threads, _write, args)
    return unit_starts[num_units, 1]


def row_groups(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    capacity = values.numel() * layout.multiplicity
    _, ids, bag_offsets = batch_arrays(None, values, offsets)
    _, units, pairs = sort_pairs(ids, bag_offsets, layout, by_bag=False)
    groups = np.empty(capacity, np.int64), np.empty(capacity + 1, np.int32), np.empty(capacity, np.int32)
    num_groups = _group(torch.get_num_threads(), arrays_of(layout)[0], ids, (units, pairs), groups)
    rows, starts, order = map(torch.from_numpy, groups)
    return rows, starts, order, torch.tensor(num_groups, device="cpu")


def sort_pairs(
    ids: np.ndarray, offsets: np.ndarray, layout: Layout, by_bag: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sources by bag (offsets or, with `by_bag` if they fit, bag numbers), units, and sorted pairs."""
    tables, _, key_starts = arrays_of(layout)
    batch = (offsets.size - 1) // max(1, key_starts.size - 1), ids, offsets
    # Bits of the largest id and source, at least: where they fit, all pairs are narrow.
    bits = max(tables[:, NUM_ROWS].tolist()).bit_length() + max(ids.size, offsets.size).bit_length()
    sort_wide = address_of(_sort_wide, (types.int64,) * 10) if bits > NARROW_BITS else 0
    bad_bag, *sorted_pairs = _sort(torch.get_num_threads(), tables, lookups_by_table(layout), batch, by_bag, sort_wide)
    if bad_bag != GOOD_OFFSETS:
        raise errors.offsets_error(bad_bag, torch.from_numpy(offsets), ids.size, layout)
    return sorted_pairs
