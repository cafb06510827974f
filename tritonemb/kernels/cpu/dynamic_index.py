"""CPU twin of `kernels/dynamic_index.py`: look-ups parallel over ids, insertions over partitions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.dynamic_slots import (
    digest_of,
    home_bucket,
    index_partition,
    insert,
    next_home,
    prefetch_digests,
    prefetch_row_numbers,
    prefetch_rows,
    remove_slot,
    slot_of,
    view_index,
)
from tritonemb.kernels.cpu.jit import compiled, inlined, inlined_uncounted, parallel
from tritonemb.kernels.cpu.row_cache import CHUNK, tasks_for
from tritonemb.kernels.cpu.row_groups import FEW_PAIRS, PAIR_BITS, radix_sort
from tritonemb.kernels.cpu.simd import (
    atomic_add,
    borrow_int64,
    empty,
    equal_ways,
    highest_bit,
    lowest_bit,
    mix,
    prefetch,
    zeros,
)
from tritonemb.kernels.dynamic_index import begin_insert_by_numpy
from tritonemb.layout import MAX_USES, NO_KEY, WAYS, DynamicIndex, PendingInsert, Rule

_UNKNOWN, _MAY_OVERFLOW = np.int64(-1), np.int64(-2)  # slots of ids that are not in their home bucket
SORTED_BITS, MAX_MOVES = 24, 16  # of ids, before they are sorted by insertion; moves per id until all bits are
AHEAD = 4  # ids between the prefetch of the rows of two sets and their search: more than fill buffers serve at once


@inlined_uncounted
def _find_chunked(index, begin, end, ids, use, results, buffers):
    """Look up ids [begin, end) of one table in chunks: each loop over a chunk prefetches what the next one reads."""
    (table, step, occurrences, atomic), (rows, previous_steps, keys), (hashes, slots) = use, results, buffers
    digests, row_of = np.int64(index.digests.ctypes.data), np.int64(index.rows.ctypes.data)
    ids_at = np.int64(index.ids.ctypes.data)
    for start in range(begin, end, CHUNK):
        size = min(CHUNK, end - start)
        # Hashes; prefetch digests.
        for i in range(size):
            hashes[i] = mix(ids[start + i])
            slots[i] = home_bucket(index, hashes[i]) * WAYS
            prefetch(digests + slots[i], 1)
        # First slot with an equal digest; prefetch its row number. Only a set without an empty way has overflow rows.
        for i in range(size):
            ways = equal_ways(digests + slots[i], digest_of(hashes[i]))
            if ways != 0:
                slots[i] += lowest_bit(ways)
                prefetch(row_of + slots[i] * 4, 1)
            else:
                slots[i] = _UNKNOWN if equal_ways(digests + slots[i], 0) != 0 else _MAY_OVERFLOW
        # Row; prefetch its id.
        for i in range(size):
            row = np.int64(index.rows[slots[i]]) if slots[i] >= 0 else slots[i]
            rows[start + i] = row
            if row >= 0:
                prefetch(ids_at + row * 16, 1)
        # Compare ids, with a full search on a mismatch; update uses, or write the keys of unknown ids.
        for i in range(size):
            position, row = start + i, rows[start + i]
            if row == _MAY_OVERFLOW or (row >= 0 and index.ids[row, 0] != ids[position]):
                slot = slot_of(index, home_bucket(index, hashes[i]), ids[position])
                row = rows[position] = np.int64(index.rows[slot]) if slot >= 0 else np.int64(-1)
            if previous_steps.size > 0 and row >= 0:
                previous_steps[position], index.uses[row, 0] = index.uses[row, 0], step
                number = min(MAX_USES, occurrences[position]) if occurrences.size > 0 else np.int64(1)
                count = np.int64(atomic_add(ids_at + row * 16 + 12, np.int32(number)) if atomic else index.uses[row, 1])
                if count > MAX_USES - number or count < 0:  # saturate after an overflow
                    index.uses[row, 1] = MAX_USES
                elif not atomic:
                    index.uses[row, 1] = count + number
            elif previous_steps.size > 0:
                keys[position] = table


@parallel
def _find(task, num_tasks, indexes, bounds, tables, ids, uses):
    """Look up the task's values, key by key; if `previous_steps` is not empty, update uses and write `keys`."""
    steps, occurrences, rows, previous_steps, keys = uses
    ids, rows = borrow_int64(ids), borrow_int64(rows)
    results, buffers = (rows, previous_steps, keys), (np.empty(CHUNK, dtype=np.int64), np.empty(CHUNK, dtype=np.int64))
    begin, end = ids.size * task // num_tasks, ids.size * (task + 1) // num_tasks
    rows[begin:end], previous_steps[begin:end], keys[begin:end] = ids[begin:end], 0, NO_KEY
    for key in range(tables.size):
        table, first, stop = tables[key], max(begin, bounds[key]), min(end, bounds[key + 1])
        if table >= 0 and first < stop:
            index = view_index(indexes[table])
            _find_chunked(index, first, stop, ids, (table, steps[table], occurrences, num_tasks > 1), results, buffers)


@parallel
def _insert_partitions(task, num_tasks, indexes, pending, rules, batch, results):
    """Insert new ids of the task's partitions, in the order of ids, which has better locality than by partition."""
    (tables, ids, occurrences, admitted), (order, begins, batch_rows), (rows, evicted) = pending, batch, results
    # By chunks of ids, whose sets, and the next ones if the partition is full, are prefetched.
    ids, occurrences, rows = borrow_int64(ids), borrow_int64(occurrences), borrow_int64(rows)
    order, begins, batch_rows = borrow_int64(order), borrow_int64(begins), borrow_int64(batch_rows)
    rules, evicted = borrow_int64(rules).reshape((-1, 3)), borrow_int64(evicted).reshape((-1, 2))
    numbers, homes, number = np.empty(CHUNK, dtype=np.int64), np.empty((CHUNK, 2), dtype=np.int64), 0
    buffers = np.empty(WAYS, dtype=np.int64), np.empty(WAYS, dtype=np.int64), np.empty(WAYS, dtype=np.int64)
    while number < ids.size:
        table, index, size = tables[number], view_index(indexes[tables[number]]), 0
        partitions, rule = index.num_sets.size, (rules[table, 0], rules[table, 1], rules[table, 2])
        first, end = partitions * task // num_tasks, partitions * (task + 1) // num_tasks
        while number < ids.size and tables[number] == table:
            hash64 = mix(ids[number])
            partition = index_partition(index, hash64)
            if first <= partition < end and admitted[number]:
                numbers[size], homes[size] = number, home_bucket(index, hash64)
                if index.num_rows[partition] * partitions == index.free.size:
                    homes[size, 1] = next_home(index, homes[size, 0], partition)
                size += 1
            number += 1
            if size == CHUNK or number == ids.size or tables[number] != table:
                for i in range(size):
                    prefetch_digests(index, homes[i, 0])
                    if homes[i, 0] != homes[i, 1]:
                        prefetch_digests(index, homes[i, 1])
                for i in range(size):
                    prefetch_row_numbers(index, homes[i, 0], rule)
                    if homes[i, 0] != homes[i, 1]:
                        prefetch_row_numbers(index, homes[i, 1], rule)
                for i in range(-AHEAD, size):
                    later = i + AHEAD
                    if later < size and homes[later, 0] != homes[later, 1]:
                        prefetch_rows(index, homes[later, 0], rule)
                        prefetch_rows(index, homes[later, 1], rule)
                    if i >= 0:
                        row = rows[numbers[i]] = insert(index, numbers[i], ids, occurrences, rule, evicted, buffers)
                        for entry in range(begins[numbers[i]], begins[numbers[i] + 1]):
                            batch_rows[order[entry]] = row
                size = 0


@inlined
def _sort_ids(ids, positions, pairs, spare):
    """Sort ids and their positions in the batch: by the first bits that differ, then by insertion, else by all bits."""
    low, high, size = ids[0], ids[0], ids.size
    for i in range(size):
        low, high = min(low, ids[i]), max(high, ids[i])
    index_bits, num_bits = highest_bit(size) + 1, highest_bit(high - low) + 1  # of an unsigned number
    mask, first_bit = (1 << index_bits) - 1, max(0, num_bits - SORTED_BITS) if size > FEW_PAIRS else num_bits
    max_moves = num_moves = np.int64(MAX_MOVES * size)
    while num_moves >= max_moves:
        # Pairs of bits of an id, as many as fit, and below these its number.
        for i in range(size):
            pairs[i] = i
        for bit in range(first_bit, num_bits, PAIR_BITS - index_bits):
            digit_bits = min(num_bits - bit, PAIR_BITS - index_bits)
            for i in range(size):
                number = pairs[i] & mask
                digits = np.int64(np.uint64(ids[number] - low) >> np.uint64(bit)) & ((1 << digit_bits) - 1)
                pairs[i] = digits << index_bits | number
            radix_sort(pairs, spare, index_bits, digit_bits)
        for i in range(size):
            pairs[i] &= mask
            spare[i] = ids[pairs[i]]
        # Insertion, unless many ids have equal first bits.
        first_bit, num_moves = np.int64(0), np.int64(0)
        for i in range(1, size):
            id, number, j = spare[i], pairs[i], i
            while j > 0 and spare[j - 1] > id and num_moves < max_moves:
                spare[j], pairs[j] = spare[j - 1], pairs[j - 1]
                num_moves += 1
                j -= 1
            spare[j], pairs[j] = id, number
    for i in range(size):
        ids[i], spare[i] = spare[i], positions[pairs[i]]
    for i in range(size):
        positions[i] = spare[i]


@compiled
def _sort_new_ids(num_tables, batch, distinct, fields):
    """Fill in the fields of `PendingInsert`; return the number of distinct new ids."""
    (values, keys, occurrences), (order, tables, numbers, ids, begins, id_tables, counts) = batch, fields
    # Positions by table, in order.
    ends = zeros(num_tables + 1, np.int64)
    for i in range(keys.size):
        ends[keys[i] + 1 if keys[i] != NO_KEY else 0] += 1
    ends[0] = 0
    for table in range(num_tables):
        ends[table + 1] += ends[table]
    size = ends[num_tables]
    for i in range(keys.size):
        if keys[i] != NO_KEY:
            order[ends[keys[i]]] = i
            ends[keys[i]] += 1
    # Ids of each table, which are sorted unless they are distinct, or sorted already.
    first, sorted_ids, pairs, spare = np.int64(0), empty(size, np.int64), empty(size, np.int64), empty(size, np.int64)
    for table in range(num_tables):
        end, descents = ends[table], 0
        for i in range(first, end):
            sorted_ids[i], tables[i] = values[order[i]], table
            descents += 1 if i > first and sorted_ids[i] < sorted_ids[i - 1] else 0
        if descents > 0 and not distinct:
            _sort_ids(sorted_ids[first:end], order[first:end], pairs[first:end], spare[first:end])
        first = end
    # Distinct ids.
    number = np.int64(-1)
    for i in range(size):
        if distinct or i == 0 or sorted_ids[i] != sorted_ids[i - 1] or tables[i] != tables[i - 1]:
            number += 1
            ids[number], begins[number], id_tables[number], counts[number] = sorted_ids[i], i, tables[i], 0
        numbers[i] = number + 1
        counts[number] += occurrences[order[i]] if occurrences.size > 0 else 1
    begins[number + 1] = size
    return number + 1


@compiled
def _count_room(indexes, pending, rules, counts):
    """Count the columns of `dynamic_room`, table by table: rows needed by partition, less free, less evictable rows."""
    (tables, ids, occurrences, admitted), number = pending, 0
    while number < ids.size:
        # Rows that the table's admitted ids need, by partition.
        first, table, index = number, tables[number], view_index(indexes[tables[number]])
        partitions = index.num_sets.size
        needed_rows, max_rows = np.zeros(partitions, dtype=np.int64), index.free.size // partitions
        while number < ids.size and tables[number] == table:
            if admitted[number]:
                needed_rows[index_partition(index, mix(ids[number]))] += 1
                counts[table, 2] += 1
            number += 1
        # Rows missing beyond free ones, by partition; partitions that lack some.
        counts[table, 0], counts[table, 1] = occurrences[first:number].sum(), number - first
        missing, lacking, size = needed_rows, np.empty(partitions, dtype=np.int64), 0
        for partition in range(partitions):
            missing[partition] = max(0, needed_rows[partition] - max_rows + index.num_rows[partition])
            counts[table, 4] += missing[partition]
            lacking[size] = partition
            size += 1 if missing[partition] > 0 else 0
        # Rows missing beyond evictable ones: read rows in the order of memory until no partition lacks any.
        for row in range(max_rows):
            if size == 0:
                break
            num_lacking, size = size, 0
            for i in range(num_lacking):
                partition = lacking[i]
                is_old = index.uses[row * partitions + partition, 0] <= rules[table, 1]
                missing[partition] -= 1 if row < index.num_allocated[partition] and is_old else 0
                lacking[size] = partition
                size += 1 if missing[partition] > 0 else 0
        counts[table, 3] += missing.sum()


@compiled
def _remove(fields, ids, rows):
    index = view_index(fields)
    for i in range(ids.size):
        slot = slot_of(index, home_bucket(index, mix(ids[i])), ids[i])
        rows[i] = np.int64(index.rows[slot]) if slot >= 0 else np.int64(-1)
        if slot >= 0:
            remove_slot(index, index_partition(index, mix(ids[i])), slot)


def _index_addresses(indexes: Sequence[DynamicIndex]) -> np.ndarray:
    """Return int64 `[T, 12, 2]`: address and size of each tensor."""
    for index in indexes:
        if index.addresses[0, 0] != index[0].data_ptr():  # all tensors move at once, when other processes share them
            del index.addresses
    return np.array([index.addresses for index in indexes])


def dynamic_find_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None, occurrences: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    num_tasks, size = tasks_for(values.numel()), values.numel() if steps else 0
    rows, previous_steps, keys = np.empty(values.numel(), np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
    counts = np.empty(0, np.int64) if occurrences is None else occurrences.numpy()
    args = _index_addresses(indexes), bounds.numpy().astype(np.int64), np.array(tables), values.contiguous().numpy()
    uses = np.array(steps or [0] * len(indexes)), counts, rows, previous_steps, keys
    _find(num_tasks, num_tasks, num_tasks, *args, uses)
    return torch.from_numpy(rows), torch.from_numpy(previous_steps), torch.from_numpy(keys)


def dynamic_begin_insert(
    indexes: Sequence[Any], values: Tensor, keys: Tensor, distinct: bool = False, occurrences: Tensor | None = None
) -> PendingInsert:
    size = int(np.count_nonzero(keys.numpy() != NO_KEY))
    if size == 0:
        return _NO_NEW_IDS
    order, ids, begins, counts = np.empty((4, size + 1), np.int64)
    tables, numbers, id_tables = np.empty((3, size), np.int32)
    added = np.empty(0, np.int64) if occurrences is None else occurrences.numpy()
    batch = values.contiguous().numpy(), keys.contiguous().numpy(), added
    number = _sort_new_ids(len(indexes), batch, distinct, (order, tables, numbers, ids, begins, id_tables, counts))
    parts = ids[:number], begins[: number + 1], id_tables[:number], np.ones(number, np.bool_), counts[:number]
    return PendingInsert(*map(torch.from_numpy, (order[:size], tables, numbers, *parts)))


_NO_NEW_IDS = begin_insert_by_numpy(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))


def dynamic_room(
    indexes: Sequence[DynamicIndex], pending: PendingInsert, rules: Sequence[Rule], counts: Tensor
) -> Tensor:
    _count_room(_index_addresses(indexes), _of_ids(pending), np.array(rules), counts.numpy())
    return pending.begins


def dynamic_commit_insert_(
    indexes: Sequence[DynamicIndex], pending: PendingInsert, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    num_tasks, rows = tasks_for(pending.ids.numel()), torch.full_like(pending.ids, -1)
    evicted = pending.ids.new_full((pending.ids.numel(), 2), -1)
    batch, results = (pending.order, pending.begins, batch_rows), (rows, evicted)
    args = _index_addresses(indexes), _of_ids(pending), np.array(rules)
    arrays = (tuple(tensor.numpy() for tensor in tensors) for tensors in (batch, results))
    _insert_partitions(num_tasks, num_tasks, num_tasks, *args, *arrays)
    return rows, evicted


def _of_ids(pending: PendingInsert) -> tuple[np.ndarray, ...]:
    assert pending.occurrences is not None  # `dynamic_begin_insert` counts them
    return tuple(t.numpy() for t in (pending.tables, pending.ids, pending.occurrences, pending.admitted))


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    _remove(_index_addresses([index])[0], ids.numpy(), (rows := torch.empty_like(ids)).numpy())
    return rows
