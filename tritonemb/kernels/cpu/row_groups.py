"""CPU twin of `kernels/row_groups.py`: a radix sort per table, large tables cut into ranges of ids.

Offsets are checked before anything is read through them.

A *unit* is a table and a range of its ids. Units are sorted independently, each by the bits that its ids need; when all
are, each is written where it is known to begin. The result is the one sorted order there is, however units are cut.

What is sorted are *pairs*, an id and its *source*: its position or, for an update that does not ask for more, its bag.
A unit's pairs have 4 bytes each if their bits fit, else 8; all stand in one array of uint32.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.kernels.cpu.jit import BFLOAT16, FLOAT16, FLOAT32, called, compiled, inlined, run_tasks
from tritonemb.kernels.cpu.simd import int64_row
from tritonemb.layout import FIRST_ROW, NUM_ROWS, TABLE, Layout

NARROW_BITS, PAIR_BITS = 32, 63  # of a pair of 4 and 8 bytes: an id and, below it, a source
FEW_PAIRS = 48  # up to here, insertion is faster
MANY_PAIRS = 8_192  # from here on, fewer passes with larger digits are faster
HISTOGRAM_BITS = 8
UNIT_VALUES = 16_384  # tables with fewer values are not cut
# Columns of `units`, behind TABLE. ROOM: values at most; BEGIN: of its pairs.
FIRST_ID, END_ID, ROOM, FIRST_SOURCE, SOURCE_BITS, ID_BITS, BEGIN, NUM_VALUES, NUM_GROUPS = range(1, 10)
GOOD_OFFSETS = -2
_ABSENT = np.empty(0, dtype=np.float32)
DTYPE_CODES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


def addresses_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64 `[T]`: where each tensor's contiguous memory begins."""
    assert all(map(Tensor.is_contiguous, tensors))
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def dtypes_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64 `[T]`: how each tensor's bits are to be read."""
    return np.array([DTYPE_CODES[tensor.dtype] for tensor in tensors], dtype=np.int64)


@functools.lru_cache(maxsize=256)
def arrays_of(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`tables`, `lookups` and `key_starts`."""
    return layout.tables.numpy(), layout.lookups.numpy(), layout.key_starts.numpy()


def as_int64(tensor: Tensor) -> np.ndarray:
    plain = tensor.dtype == torch.int64 and tensor.is_contiguous()
    return (tensor if plain else tensor.to(torch.int64).contiguous()).numpy()


def as_float32(tensor: Tensor | None) -> np.ndarray:
    """Absent weights are an empty array."""
    if tensor is None:
        return _ABSENT
    return tensor.detach().to(torch.float32).contiguous().numpy()


@inlined
def _find_bad_bag(offsets, num_values):
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


@compiled
def first_bad_bag(offsets, num_values):
    """See `_find_bad_bag`, which other kernels call."""
    return _find_bad_bag(offsets, num_values)


@inlined
def uses_by_table(lookups, key_starts, num_tables):
    """The lookups of table t, by key: `uses[starts[t]:starts[t + 1]]`, their keys, and the key of every lookup."""
    starts = np.zeros(num_tables + 1, dtype=np.int64)
    for lookup in range(lookups.shape[0]):
        starts[lookups[lookup, TABLE] + 1] += 1
    for table in range(num_tables):
        starts[table + 1] += starts[table]
    filled = starts[:-1].copy()
    uses, key_of = np.empty(lookups.shape[0], dtype=np.int64), np.empty(lookups.shape[0], dtype=np.int64)
    keys = np.empty(lookups.shape[0], dtype=np.int64)
    for key in range(key_starts.size - 1):
        for lookup in range(key_starts[key], key_starts[key + 1]):
            table = lookups[lookup, TABLE]
            uses[filled[table]], keys[filled[table]], key_of[lookup] = lookup, key, key
            filled[table] += 1
    return starts, uses, keys, key_of


@inlined
def _bit_length(value):
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@inlined
def _add_unit(units, num_units, table, first_id, end_id, room):
    unit = units[num_units]
    unit[TABLE], unit[FIRST_ID], unit[END_ID], unit[ROOM] = table, first_id, end_id, room
    return num_units + 1


@inlined
def _cut_table(table, num_rows, num_pieces, count, keys, batch_size, values, offsets, units, num_units):
    """Append units of `table` with about equal numbers of values, by a histogram of its ids' upper bits."""
    shift = max(0, _bit_length(num_rows - 1) - HISTOGRAM_BITS)
    histogram = np.zeros(1 << HISTOGRAM_BITS, dtype=np.int64)
    for key in keys:
        for position in range(offsets[key * batch_size], offsets[(key + 1) * batch_size]):
            row = values[position]
            if 0 <= row < num_rows:
                histogram[row >> shift] += 1
    begin, held, wanted = np.int64(0), 0, count // num_pieces + 1  # a literal would be a type of its own
    for bucket in range(histogram.size):
        held += histogram[bucket]
        end = (bucket + 1) << shift
        if held >= wanted or bucket == histogram.size - 1:
            num_units = _add_unit(units, num_units, table, begin, min(end, num_rows), held)
            begin, held = end, 0
            if begin >= num_rows:
                break
    return num_units


@inlined
def _make_units(num_threads, batch_size, tables, key_starts_of_table, keys_of_table, values, offsets):
    counts, total = np.zeros(tables.shape[0], dtype=np.int64), np.int64(0)
    for table in range(tables.shape[0]):
        for key in keys_of_table[key_starts_of_table[table] : key_starts_of_table[table + 1]]:
            counts[table] += offsets[(key + 1) * batch_size] - offsets[key * batch_size]
        total += counts[table]
    share = max(UNIT_VALUES, total // num_threads + 1)
    capacity = tables.shape[0] + total // UNIT_VALUES * 2 + 4 * num_threads
    units = np.zeros((capacity, NUM_GROUPS + 1), dtype=np.int64)
    num_units, first = np.int64(0), np.int64(0)
    for table in range(tables.shape[0]):
        num_rows, count = tables[table, NUM_ROWS], counts[table]
        pieces = 1 if num_threads == 1 else min(2 * num_threads, (count + share - 1) // share)
        if pieces > 1:
            keys = keys_of_table[key_starts_of_table[table] : key_starts_of_table[table + 1]]
            num_units = _cut_table(table, num_rows, pieces, count, keys, batch_size, values, offsets, units, num_units)
        elif count > 0:
            num_units = _add_unit(units, num_units, table, first, num_rows, count)
    return units[:num_units]


@inlined
def _place_pairs(unit, begin, keys, batch_size, sources):
    """How a unit's pairs are made up and where they begin; returns where the next unit's may."""
    unit[FIRST_SOURCE], end_source = sources[keys[0] * batch_size], sources[(keys[-1] + 1) * batch_size]
    unit[SOURCE_BITS] = _bit_length(end_source - unit[FIRST_SOURCE] - 1)
    unit[ID_BITS] = _bit_length(unit[END_ID] - unit[FIRST_ID] - 1)
    unit[BEGIN], size = begin, unit[ROOM] + 2 & -2  # one more, see _fill_pairs, and even, for pairs of 8 bytes
    return begin + (2 * size if _split(unit)[-1] else size)


@inlined
def _split(unit):
    """First id and source of a unit's pairs; bits of a source; whether an id fits above them; whether in 8 bytes."""
    bits = unit[SOURCE_BITS] + unit[ID_BITS]
    return unit[FIRST_ID], unit[FIRST_SOURCE], unit[SOURCE_BITS], bits <= PAIR_BITS, bits > NARROW_BITS


@inlined
def _read_pair(pairs, i, first_id, first_source, source_bits, fits, wide, values):
    """Row and source."""
    pair = np.int64(pairs[2 * i]) | np.int64(pairs[2 * i + 1]) << 32 if wide else np.int64(pairs[i])
    source = first_source + (pair & ((1 << source_bits) - 1))
    return first_id + (pair >> source_bits) if fits else values[source], source


@inlined
def _fill_pairs(unit, keys, batch_size, values, offsets, sources, pairs):
    """The pairs of a unit, unsorted: id and source, or the source alone; returns how many there are.

    Each is written first and counted then, because a branch on a random id would be mispredicted.
    """
    first_id, first_source, source_bits, fits, _ = _split(unit)
    end_id, count, by_bag = unit[END_ID], 0, sources.ctypes.data != offsets.ctypes.data
    for key in keys:
        bag = key * batch_size
        for position in range(offsets[bag], offsets[bag + batch_size]):
            while by_bag and offsets[bag + 1] <= position:
                bag += 1
            row, source = values[position], bag if by_bag else position
            pairs[count] = (row - first_id if fits else 0) << source_bits | (source - first_source)
            count += 1 if first_id <= row < end_id else 0
    return count


@inlined
def _fill_part(bit, part_bits, first_id, first_position, position_bits, values, pairs):
    """Put `part_bits` bits of each id, from `bit` on, above its position; the order stays."""
    mask, part_mask = (1 << position_bits) - 1, (1 << part_bits) - 1
    for i in range(pairs.size):
        position = pairs[i] & mask
        part = ((values[first_position + position] - first_id) >> bit) & part_mask
        pairs[i] = part << position_bits | position


@inlined
def _insertion_sort(pairs):
    for i in range(1, pairs.size):
        pair, j = pairs[i], i
        while j > 0 and pairs[j - 1] > pair:
            pairs[j] = pairs[j - 1]
            j -= 1
        pairs[j] = pair


@inlined
def _radix_sort(pairs, spare, first_bit, num_bits):
    """Sort `pairs` in place by `num_bits` bits from `first_bit` on, stably."""
    max_digit_bits = 12 if pairs.size >= MANY_PAIRS else 10
    passes = max(1, (num_bits + max_digit_bits - 1) // max_digit_bits)
    digit_bits = (num_bits + passes - 1) // passes
    mask = (1 << digit_bits) - 1
    all_ends = np.zeros((passes, 1 << digit_bits), dtype=np.int32)
    for i in range(pairs.size):  # all digits now: once partly sorted, equal ones are neighbours and wait for each other
        digits = np.int64(pairs[i]) >> first_bit
        for sort_pass in range(passes):
            all_ends[sort_pass, digits & mask] += 1
            digits >>= digit_bits
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
        for i in range(pairs.size):  # a slice that is assigned to a slice takes seconds to compile
            pairs[i] = source[i]


@inlined
def _sort_pairs(unit, keys, batch_size, values, offsets, sources, pairs):
    """Fill and sort the pairs of a unit, uint32 or int64; returns how many there are, and how many distinct ids."""
    first_id, first_source, source_bits, fits, _ = _split(unit)
    count, part_bits = _fill_pairs(unit, keys, batch_size, values, offsets, sources, pairs), PAIR_BITS - source_bits
    pairs, previous, groups = pairs[:count], np.int64(-1), 0
    if fits and count <= FEW_PAIRS:
        _insertion_sort(pairs)
    else:
        spare = np.empty_like(pairs)
        for bit in range(0, unit[ID_BITS], part_bits):
            if not fits:
                _fill_part(bit, part_bits, first_id, first_source, source_bits, values, pairs)
            _radix_sort(pairs, spare, source_bits, min(unit[ID_BITS] - bit, part_bits))
    for i in range(count):
        row, _ = _read_pair(pairs, i, first_id, first_source, source_bits, fits, False, values)
        groups += 1 if row != previous else 0
        previous = row
    return count, groups


@called
def _sort_unit(number, units, batch_size, key_starts_of_table, keys_of_table, values, offsets, sources, all_pairs):
    """Sort the ids of a unit with their sources; count its values and distinct ids."""
    unit, pairs = units[number], all_pairs[units[number, BEGIN] :]
    keys = keys_of_table[key_starts_of_table[unit[TABLE]] : key_starts_of_table[unit[TABLE] + 1]]
    if _split(unit)[-1]:
        wide_pairs = int64_row(pairs.ctypes.data, unit[ROOM] + 1)
        found = _sort_pairs(unit, keys, batch_size, values, offsets, sources, wide_pairs)
    else:
        found = _sort_pairs(unit, keys, batch_size, values, offsets, sources, pairs)
    unit[NUM_VALUES], unit[NUM_GROUPS] = found


@inlined
def _write_groups(unit, begin, end, values, first_row, pairs, first_value, rows, starts, order):
    """Write a unit's sorted values [begin, end): rows, where each one's values end, and sources; returns how many rows.

    Each value writes its row's group and the group's end so far: no branches.
    """
    split, group, previous = _split(unit), -1, -1
    for i in range(begin, end):
        row, order[i - begin] = _read_pair(pairs, i, *split, values)
        group += 1 if row != previous else 0
        previous = row
        rows[group], starts[group + 1] = first_row + row, first_value + i - begin + 1
    return group + 1


@inlined
def groups_of_share(unit, begin, end, whole, values, first_row, all_pairs):
    """Rows, starts and order of what begins in [begin, end) of a sorted unit's `whole`; and how many rows."""
    split, pairs = _split(unit), all_pairs[unit[BEGIN] :]
    bounds = np.array([begin * unit[NUM_VALUES] // whole, end * unit[NUM_VALUES] // whole])
    for i in range(2):
        while 0 < bounds[i] < unit[NUM_VALUES] and (
            _read_pair(pairs, bounds[i], *split, values)[0] == _read_pair(pairs, bounds[i] - 1, *split, values)[0]
        ):
            bounds[i] += 1
    count = bounds[1] - bounds[0]
    rows, starts = np.empty(count, dtype=np.int64), np.zeros(count + 1, dtype=np.int32)
    order = np.empty(count, dtype=np.int32)
    num_groups = _write_groups(unit, bounds[0], bounds[1], values, first_row, pairs, 0, rows, starts, order)
    return rows, starts, order, num_groups


@called
def _write(task, num_tails, firsts, units, tables, values, all_pairs, rows, starts, order):
    """Write sorted unit `task`, or one of `num_tails` parts of what stands behind the last group."""
    num_units = units.shape[0]
    if task < num_units:
        unit, first_value, group = units[task], firsts[task, 0], firsts[task, 1]
        _write_groups(
            unit, 0, unit[NUM_VALUES], values, tables[unit[TABLE], FIRST_ROW], all_pairs[unit[BEGIN] :], first_value,
            rows[group:], starts[group:], order[first_value:],
        )  # fmt: skip
        return
    num_values, num_groups = firsts[num_units]
    part, size = task - num_units, rows.size - num_groups
    begin, end = num_groups + size * part // num_tails, num_groups + size * (part + 1) // num_tails
    rows, starts = rows[begin:end], starts[begin : end + 1]
    begin, end = 0, rows.size  # a loop from 0 on is vectorized
    past_last = tables[-1, FIRST_ROW] + tables[-1, NUM_ROWS]
    for group in range(begin, end):
        rows[group], starts[group + 1] = past_last, num_values
    if part == 0:
        for i in range(num_values, order.size):
            order[i] = -1


@compiled
def _sort(num_threads, batch_size, tables, lookups, key_starts, values, offsets, by_bag):
    """The first bad bag, if any; what pairs hold, `offsets` or numbers of bags; units; and their pairs, sorted."""
    num_threads, bad = 1 if values.size < UNIT_VALUES else num_threads, _find_bad_bag(offsets, values.size)
    key_starts_of_table, _, keys_of_table, _ = uses_by_table(lookups, key_starts, tables.shape[0])
    for table in range(tables.shape[0]):
        by_bag = by_bag and _bit_length(tables[table, NUM_ROWS]) + _bit_length(offsets.size) <= PAIR_BITS
    sources = np.arange(offsets.size) if by_bag else offsets
    units, size = np.empty((0, NUM_GROUPS + 1), dtype=np.int64), np.int64(0)
    if bad == GOOD_OFFSETS:
        units = _make_units(num_threads, batch_size, tables, key_starts_of_table, keys_of_table, values, offsets)
    for number in range(units.shape[0]):
        table = units[number, TABLE]
        keys = keys_of_table[key_starts_of_table[table] : key_starts_of_table[table + 1]]
        size = _place_pairs(units[number], size, keys, batch_size, sources)
    all_pairs = np.empty(size, dtype=np.uint32)
    run_tasks(
        num_threads, units.shape[0], _sort_unit,
        (units, batch_size, key_starts_of_table, keys_of_table, values, offsets, sources, all_pairs),
    )  # fmt: skip
    return bad, sources, units, all_pairs


@compiled
def _group(num_threads, tables, values, units, all_pairs, rows, starts, order):
    """Fill rows, starts and order; returns the number of groups."""
    num_threads, num_units = 1 if values.size < UNIT_VALUES else num_threads, units.shape[0]
    firsts = np.zeros((num_units + 1, 2), dtype=np.int64)
    for unit in range(num_units):
        firsts[unit + 1, 0] = firsts[unit, 0] + units[unit, NUM_VALUES]
        firsts[unit + 1, 1] = firsts[unit, 1] + units[unit, NUM_GROUPS]
    starts[0] = 0
    run_tasks(
        num_threads, num_units + num_threads, _write,
        (num_threads, firsts, units, tables, values, all_pairs, rows, starts, order),
    )  # fmt: skip
    return firsts[num_units, 1]


def row_groups(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels/row_groups.py`."""
    capacity = values.numel() * layout.multiplicity
    ids = as_int64(values)
    _, units, pairs = sort_pairs(ids, as_int64(offsets), layout, by_bag=False)
    rows, starts = np.empty(capacity, dtype=np.int64), np.empty(capacity + 1, dtype=np.int32)
    order = np.empty(capacity, dtype=np.int32)
    num_groups = _group(torch.get_num_threads(), arrays_of(layout)[0], ids, units, pairs, rows, starts, order)
    return torch.from_numpy(rows), torch.from_numpy(starts), torch.from_numpy(order), torch.tensor(num_groups)


def sort_pairs(
    ids: np.ndarray, offsets: np.ndarray, layout: Layout, by_bag: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What pairs hold, offsets or, if that fits and is wanted, numbers of bags; units; and pairs, see above."""
    tables, lookups, key_starts = arrays_of(layout)
    batch_size, num_threads = (offsets.size - 1) // max(1, key_starts.size - 1), torch.get_num_threads()
    bad, *found = _sort(num_threads, batch_size, tables, lookups, key_starts, ids, offsets, by_bag)
    if bad != GOOD_OFFSETS:
        raise errors.offsets_error(bad, torch.from_numpy(offsets), ids.size, layout)
    return found
