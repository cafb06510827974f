"""CPU twin of `kernels/row_groups.py`: a radix sort per table, large tables cut into ranges of ids.

A *unit* is a table and a range of its ids. Units are sorted independently, each by the bits that its ids need, then
closed up. The result is the one sorted order there is, so it does not depend on how units are cut.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.arrays import as_int64
from tritonemb.kernels.cpu.jagged import check_offsets
from tritonemb.kernels.cpu.jit import compiled, inlined
from tritonemb.kernels.layout import FIRST_ROW, NUM_ROWS, TABLE, Layout, batch_size_of

POSITION_BITS = 31  # a position and an id share 63 bits of one sort key
MANY_PAIRS = 8_192  # from here on, fewer passes with larger digits are faster
HISTOGRAM_BITS = 8
UNIT_VALUES = 16_384  # tables with fewer values are not cut


@compiled
def _count_values(batch_size, lookups, key_starts, offsets, num_tables):
    """Values that look up each table."""
    counts = np.zeros(num_tables, dtype=np.int64)
    for key in range(key_starts.size - 1):
        num_values = offsets[(key + 1) * batch_size] - offsets[key * batch_size]
        for lookup in range(key_starts[key], key_starts[key + 1]):
            counts[lookups[lookup, TABLE]] += num_values
    return counts


@compiled
def _keys_by_table(lookups, key_starts, num_tables):
    """The keys that look up table t, ascending: `keys[starts[t]:starts[t + 1]]`."""
    starts = np.zeros(num_tables + 1, dtype=np.int64)
    for lookup in range(lookups.shape[0]):
        starts[lookups[lookup, TABLE] + 1] += 1
    for table in range(num_tables):
        starts[table + 1] += starts[table]
    filled = starts[:-1].copy()
    keys = np.empty(lookups.shape[0], dtype=np.int64)
    for key in range(key_starts.size - 1):
        for lookup in range(key_starts[key], key_starts[key + 1]):
            table = lookups[lookup, TABLE]
            keys[filled[table]] = key
            filled[table] += 1
    return starts, keys


@inlined
def _bit_length(value):
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@inlined
def _cut_table(table, num_rows, num_pieces, batch_size, keys, values, offsets, counts, units, num_units):
    """Append units of `table` with about equal numbers of values, by a histogram of its ids' upper bits."""
    shift = max(0, _bit_length(num_rows - 1) - HISTOGRAM_BITS)
    histogram = np.zeros(1 << HISTOGRAM_BITS, dtype=np.int64)
    for key in keys:
        for position in range(offsets[key * batch_size], offsets[(key + 1) * batch_size]):
            row = values[position]
            if 0 <= row < num_rows:
                histogram[row >> shift] += 1
    begin, held, wanted = 0, 0, counts // num_pieces + 1
    for bucket in range(histogram.size):
        held += histogram[bucket]
        end = (bucket + 1) << shift
        if held >= wanted or bucket == histogram.size - 1:
            units[num_units] = table, begin, min(end, num_rows), held
            num_units += 1
            begin, held = end, 0
            if begin >= num_rows:
                break
    return num_units


@compiled
def _make_units(num_threads, batch_size, tables, key_starts_of_table, keys_of_table, values, offsets, counts):
    """int64 [U, 4]: table, first id, end of ids, values at most."""
    units = np.empty((tables.shape[0] + counts.sum() // UNIT_VALUES * 2 + 4 * num_threads, 4), dtype=np.int64)
    num_units = 0
    share = max(UNIT_VALUES, counts.sum() // num_threads + 1)
    for table in range(tables.shape[0]):
        if counts[table] == 0:
            continue
        pieces = 1 if num_threads == 1 else min(2 * num_threads, (counts[table] + share - 1) // share)
        if pieces == 1:
            units[num_units] = table, 0, tables[table, NUM_ROWS], counts[table]
            num_units += 1
        else:
            keys = keys_of_table[key_starts_of_table[table] : key_starts_of_table[table + 1]]
            num_units = _cut_table(
                table,
                tables[table, NUM_ROWS],
                pieces,
                batch_size,
                keys,
                values,
                offsets,
                counts[table],
                units,
                num_units,
            )
    return units[:num_units]


@inlined
def _radix_sort(pairs, spare, key_bits):
    """Sort by the `key_bits` bits above POSITION_BITS, stably; returns the array that holds the result."""
    max_digit_bits = 12 if pairs.size >= MANY_PAIRS else 10
    passes = max(1, (key_bits + max_digit_bits - 1) // max_digit_bits)
    digit_bits = (key_bits + passes - 1) // passes
    mask = (1 << digit_bits) - 1
    ends = np.empty(1 << digit_bits, dtype=np.int32)
    for sort_pass in range(passes):
        shift = POSITION_BITS + sort_pass * digit_bits
        ends[:] = 0
        for i in range(pairs.size):
            ends[(pairs[i] >> shift) & mask] += 1
        total = 0
        for digit in range(ends.size):
            total, ends[digit] = total + ends[digit], total
        for i in range(pairs.size):
            digit = (pairs[i] >> shift) & mask
            spare[ends[digit]] = pairs[i]
            ends[digit] += 1
        pairs, spare = spare, pairs
    return pairs


@inlined
def _insertion_sort(pairs):
    for i in range(1, pairs.size):
        pair, j = pairs[i], i
        while j > 0 and pairs[j - 1] > pair:
            pairs[j] = pairs[j - 1]
            j -= 1
        pairs[j] = pair


@inlined
def _sort_unit(first_id, end_id, first_row, keys, batch_size, values, offsets, room, rows, starts, order):
    """Fill rows, starts (relative) and order of one unit; returns how many values and groups it has."""
    num_keys = 0
    # Written first and counted then: a branch on a random id would be mispredicted. Hence the room for one more.
    pairs = np.empty(room + 1, dtype=np.int64)
    wide = end_id - first_id > 1 << (63 - POSITION_BITS)
    wide_ids = np.empty(room + 1 if wide else 0, dtype=np.int64)
    for key in keys:
        for position in range(offsets[key * batch_size], offsets[(key + 1) * batch_size]):
            row = values[position]
            if wide:
                wide_ids[num_keys], pairs[num_keys] = row - first_id, position
            else:
                pairs[num_keys] = (row - first_id) << POSITION_BITS | position
            num_keys += 1 if first_id <= row < end_id else 0
    pairs = pairs[:num_keys]
    if wide:
        by_id = np.argsort(wide_ids[:num_keys], kind="mergesort")
        groups, previous = 0, -1
        for i in range(num_keys):
            row = wide_ids[by_id[i]]
            order[i] = pairs[by_id[i]]
            if row != previous:
                rows[groups], starts[groups] = first_row + first_id + row, i
                groups, previous = groups + 1, row
        return num_keys, groups
    if num_keys <= 48:
        _insertion_sort(pairs)
    else:
        pairs = _radix_sort(pairs, np.empty_like(pairs), _bit_length(end_id - first_id - 1))
    groups, previous = 0, -1
    for i in range(num_keys):
        row = pairs[i] >> POSITION_BITS
        order[i] = pairs[i] & ((1 << POSITION_BITS) - 1)
        if row != previous:
            rows[groups], starts[groups] = first_row + first_id + row, i
            groups, previous = groups + 1, row
    return num_keys, groups


@compiled
def _sort_units(
    first, last, units, unit_starts, batch_size, tables, key_starts_of_table, keys_of_table, values, offsets, sizes,
    rows, starts, order,
):  # fmt: skip
    for unit in range(first, last):
        table, begin = units[unit, 0], unit_starts[unit]
        keys = keys_of_table[key_starts_of_table[table] : key_starts_of_table[table + 1]]
        sizes[unit, 0], sizes[unit, 1] = _sort_unit(
            units[unit, 1], units[unit, 2], tables[table, FIRST_ROW], keys, batch_size, values, offsets, units[unit, 3],
            rows[begin:], starts[begin:], order[begin:],
        )  # fmt: skip


@compiled
def _close_up(unit_starts, sizes, total_rows, rows, starts, order):
    """Move the units' results together, in place, front to back; returns the number of groups."""
    num_values, num_groups = 0, 0
    for unit in range(sizes.shape[0]):
        begin = unit_starts[unit]
        for group in range(sizes[unit, 1]):
            rows[num_groups + group] = rows[begin + group]
            starts[num_groups + group] = starts[begin + group] + num_values
        if num_values != begin:
            for i in range(sizes[unit, 0]):
                order[num_values + i] = order[begin + i]
        num_values += sizes[unit, 0]
        num_groups += sizes[unit, 1]
    rows[num_groups:] = total_rows
    starts[num_groups:] = num_values
    order[num_values:] = -1
    return num_groups


def row_groups(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels/row_groups.py`."""
    check_offsets(values, offsets, layout)
    batch_size = batch_size_of(offsets, layout.key_starts)
    capacity = values.numel() * layout.multiplicity
    rows = torch.empty(capacity, dtype=torch.int64)
    starts = torch.empty(capacity + 1, dtype=torch.int32)
    order = torch.empty(capacity, dtype=torch.int32)
    ids, bag_offsets = as_int64(values), as_int64(offsets)
    tables, lookups, key_starts = layout.tables.numpy(), layout.lookups.numpy(), layout.key_starts.numpy()

    counts = _count_values(batch_size, lookups, key_starts, bag_offsets, tables.shape[0])
    by_table = _keys_by_table(lookups, key_starts, tables.shape[0])
    units = _make_units(pool.num_threads(), batch_size, tables, *by_table, ids, bag_offsets, counts)
    unit_starts = np.zeros(len(units) + 1, dtype=np.int64)
    np.cumsum(units[:, 3], out=unit_starts[1:])
    sizes = np.empty((len(units), 2), dtype=np.int64)
    num_tasks = max(1, min(len(units), 2 * pool.num_threads())) if values.numel() > UNIT_VALUES else 1
    bounds = np.searchsorted(unit_starts, np.arange(num_tasks + 1) * unit_starts[-1] / num_tasks).tolist()
    bounds[-1] = len(units)  # units at the end may be empty
    args = (units, unit_starts, batch_size, tables, *by_table, ids, bag_offsets, sizes)
    results = (rows.numpy(), starts.numpy(), order.numpy())
    pool.run(lambda task: _sort_units(bounds[task], bounds[task + 1], *args, *results), num_tasks)
    total_rows = int(tables[-1, FIRST_ROW] + tables[-1, NUM_ROWS])
    num_groups = _close_up(unit_starts, sizes, total_rows, *results)
    return rows, starts, order, torch.tensor(num_groups, dtype=torch.int64)
