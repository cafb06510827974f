"""CPU twin of `kernels/dynamic_index.py`: look-ups parallel over ids, insertions over partitions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.jit import called, compiled, inlined_uncounted, parallel
from tritonemb.kernels.cpu.row_cache import (
    CHUNK,
    digest_of,
    home_bucket,
    id_of,
    index_partition,
    key_of,
    least_used,
    next_home,
    set_mask,
    slot_of,
    tasks_for,
    view_index,
    ways_with,
)
from tritonemb.kernels.cpu.simd import atomic_add, borrow_int64, equal_ways, lowest_bit, mix, prefetch
from tritonemb.kernels.dynamic_index import begin_insert_by_numpy
from tritonemb.layout import MAX_ROWS_PER_SET, MAX_USES, NO_KEY, WAYS, DynamicIndex, PendingInsert, Rule

_ALL_WAYS, _MAX_KEY = np.int64(2**WAYS - 1), np.int64(2**63 - 1)  # mask of a bucket; above all keys of rows
_NO_VICTIM = np.int64(-1), _MAX_KEY, _MAX_KEY  # slot, key and id of no victim
OLD_SHARE = 4  # part of the range of last steps whose rows are old: a set is searched whole every few evictions
_UNKNOWN, _MAY_OVERFLOW = np.int64(-1), np.int64(-2)  # slots of ids that are not in their home bucket
AHEAD = 2  # ids between the prefetch of the rows of two sets and their search: more than fill buffers serve at once


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


@inlined_uncounted
def _old_ways(index, home, step):
    """Return the ways of a set whose rows may have the least keys, see `DynamicIndex.old_ways`; 0 if unknown."""
    old_ways = index.old_ways[2 * home + 1]
    return old_ways & _ALL_WAYS if step < old_ways >> 32 else np.int64(0)


@inlined_uncounted
def _prefetch_slots(index, home):
    """Prefetch the digests of a set, and the numbers of its rows."""
    prefetch(np.int64(index.digests.ctypes.data) + home * WAYS, 1)
    prefetch(np.int64(index.rows.ctypes.data) + home * WAYS * 4, WAYS * 4)


@inlined_uncounted
def _prefetch_rows(index, home, step):
    """Prefetch the rows of a set that `_find_victim` reads first."""
    used_ways, entries = ~ways_with(index, home, 0) & _ALL_WAYS, np.int64(index.ids.ctypes.data)
    ways = used_ways & _old_ways(index, home, step)
    ways = ways if ways != 0 else used_ways
    while ways != 0:
        prefetch(entries + np.int64(index.rows[home * WAYS + lowest_bit(ways)]) * 16, 1)
        ways &= ways - 1


@inlined_uncounted
def _search_overflow(index, home, rule, end_step):
    """Return the best victim in a set's overflow slots, the least key there, and the step until which all stay."""
    (step, max_step, half_life), (victim, min_key, min_id) = rule, _NO_VICTIM
    least_key, remaining = _MAX_KEY, np.int64(index.overflowed[home])
    bucket = index.overflowed.size + home % index.num_sets.size if remaining > 0 else home
    while remaining > 0:
        ways = ~ways_with(index, bucket, 0) & _ALL_WAYS
        while ways != 0:
            slot = bucket * WAYS + lowest_bit(ways)
            ways &= ways - 1
            row, id = np.int64(index.rows[slot]), id_of(index, slot)
            if home_bucket(index, mix(id)) == home:
                remaining -= 1
                key, halvings = key_of(index, row, step, half_life)
                least_key = min(least_key, key)
                end_step = min(end_step, (key & MAX_USES) + half_life * (halvings + 1)) if key >> 32 > 0 else end_step
                if index.uses[row, 0] <= max_step and (key < min_key or (key == min_key and id < min_id)):
                    victim, min_key, min_id = slot, key, id
        bucket += index.num_sets.size
    return (victim, min_key, min_id), least_key, end_step


@inlined_uncounted
def _note_old_ways(index, home, ways, rule, end_key, end_step):
    """Set `DynamicIndex.old_ways` of a set with these used ways; key and step are at most the given ones."""
    (step, _, half_life), old_ways = rule, np.int64(0)
    while ways != 0:
        way = lowest_bit(ways)
        ways &= ways - 1
        key, halvings = key_of(index, np.int64(index.rows[home * WAYS + way]), step, half_life)
        old_ways |= np.int64(key < end_key) << way
        # Another row's key may be less when its count has halved.
        if key >= end_key and key >> 33 << 32 | (key & MAX_USES) < end_key:
            end_step = min(end_step, (key & MAX_USES) + half_life * (halvings + 1))
    index.old_ways[2 * home], index.old_ways[2 * home + 1] = end_key, end_step << 32 | old_ways


@inlined_uncounted
def _find_victim(index, home, step, max_step, half_life):
    """Return the slot of the row of a set to evict, -1 if none may be, its key (aged count, last step), and its id."""
    rule, ways = (step, max_step, half_life), ~ways_with(index, home, 0) & _ALL_WAYS
    # The old ways, if the row of one has a key below all others.
    old_ways, best = ways & _old_ways(index, home, step), _NO_VICTIM
    if old_ways != 0:
        best = least_used(index, home, old_ways, rule, (np.int64(-1), index.old_ways[2 * home], ~_MAX_KEY))
    # Else the whole set.
    if best[0] < 0:
        # Until a half-life has passed, the counts of rows that are used meanwhile do not halve.
        end_step = min(step + half_life, np.int64(MAX_USES)) if half_life > 0 else np.int64(MAX_USES)
        best, least_key, end_step = _search_overflow(index, home, rule, end_step)
        best = least_used(index, home, ways, rule, best)
        if best[0] >= 0:
            end_key = best[1] + 1 + (max_step - (best[1] & MAX_USES)) // OLD_SHARE
            _note_old_ways(index, home, ways, rule, min(end_key, least_key), end_step)
    return best


@inlined_uncounted
def _note_inserted(index, home, slot, key):
    """Note in `DynamicIndex.old_ways` the row that was inserted into a slot."""
    if index.old_ways[2 * home + 1] != 0:
        is_old, way = key < index.old_ways[2 * home], np.int64(1) << slot % WAYS
        if slot < index.overflowed.size * WAYS:
            index.old_ways[2 * home + 1] = index.old_ways[2 * home + 1] & ~way | (way if is_old else 0)
        elif is_old:
            index.old_ways[2 * home + 1] = 0  # unknown


@inlined_uncounted
def _return_from_overflow(index, partition, home, target):
    """Move one row of a set from an overflow bucket to slot `target` of its home bucket."""
    bucket = index.overflowed.size + partition
    while True:
        for slot in range(bucket * WAYS, bucket * WAYS + WAYS):
            if index.digests[slot] != 0 and home_bucket(index, mix(id_of(index, slot))) == home:
                index.digests[target], index.rows[target] = index.digests[slot], index.rows[slot]
                index.digests[slot] = 0
                index.overflowed[home] -= 1
                index.num_overflow[partition] -= 1
                index.old_ways[2 * home + 1] |= np.int64(1) << target % WAYS
                return
        bucket += index.num_sets.size


@inlined_uncounted
def _remove_slot(index, partition, slot):
    """Remove the row of a slot from the index, and push it to the partition's free rows."""
    row = index.rows[slot]
    home = home_bucket(index, mix(index.ids[row, 0]))
    index.free[(index.num_allocated[partition] - index.num_rows[partition]) * index.num_sets.size + partition] = row
    index.uses[row, 0] = MAX_USES  # above every step: free rows are never counted as evictable
    index.num_rows[partition] -= 1
    index.digests[slot] = 0
    if slot >= index.overflowed.size * WAYS:
        index.overflowed[home] -= 1
        index.num_overflow[partition] -= 1
    elif index.overflowed[home] > 0:
        _return_from_overflow(index, partition, home, slot)


@called
def _split(index, partition):
    """Split a set of a partition: add set number `sets`, and move the rows that now belong to it."""
    # Move rows between the home buckets.
    partitions, sets = index.num_sets.size, np.int64(index.num_sets[partition])
    mask = set_mask(sets)
    old_home, new_home = (sets & (mask >> 1)) * partitions + partition, sets * partitions + partition
    target = new_home * WAYS
    for slot in range(old_home * WAYS, old_home * WAYS + WAYS):
        if index.digests[slot] != 0 and mix(id_of(index, slot)) & mask == sets:
            index.digests[target], index.rows[target] = index.digests[slot], index.rows[slot]
            index.digests[slot] = 0
            target += 1
    index.num_sets[partition] += 1
    # Count the overflow rows of both sets, then return those that fit.
    remaining, bucket = np.int64(index.overflowed[old_home]), index.overflowed.size + partition
    while remaining > 0:
        for slot in range(bucket * WAYS, bucket * WAYS + WAYS):
            if index.digests[slot] != 0:
                home = home_bucket(index, mix(id_of(index, slot)))
                if home == new_home:
                    index.overflowed[old_home] -= 1
                    index.overflowed[new_home] += 1
                remaining -= 1 if home == old_home or home == new_home else 0
        bucket += partitions
    for home in (old_home, new_home):
        empty_ways = ways_with(index, home, 0)
        while empty_ways != 0 and index.overflowed[home] > 0:
            _return_from_overflow(index, partition, home, home * WAYS + lowest_bit(empty_ways))
            empty_ways &= empty_ways - 1


@inlined_uncounted
def _empty_slot(index, partition, home):
    """Return an empty slot of the home bucket, else of an overflow bucket, and count the overflow row."""
    empty_ways, bucket = ways_with(index, home, 0), home
    if empty_ways == 0:
        index.overflowed[home] += 1
        index.num_overflow[partition] += 1
        bucket = index.overflowed.size + partition - index.num_sets.size
        while empty_ways == 0:
            bucket += index.num_sets.size
            empty_ways = ways_with(index, bucket, 0)
    return bucket * WAYS + lowest_bit(empty_ways)


@inlined_uncounted
def _insert(index, number, ids, occurrences, rules, table, evicted):
    """Insert new id `number` and return its row; write a victim and its row to `evicted`."""
    # Evict if the partition is full: from the id's set or the next one, else from the next set with an evictable row.
    id, partitions, step = ids[number], index.num_sets.size, rules[table, 0]
    home, partition = home_bucket(index, mix(id)), index_partition(index, mix(id))
    evicts = index.num_rows[partition] * partitions == index.free.size  # a division takes as long as a cache miss
    if evicts:
        victim, min_key, min_id = _NO_VICTIM
        num_sets = np.int64(index.num_sets[partition])
        probed_home = home
        for offset in range(num_sets):
            if victim >= 0 and offset > 1:
                break
            slot, key, victim_id = _find_victim(index, probed_home, step, rules[table, 1], rules[table, 2])
            if key < min_key or (key == min_key and victim_id < min_id):
                victim, min_key, min_id = slot, key, victim_id
            probed_home = next_home(index, probed_home, partition)
        evicted[number, 0], evicted[number, 1] = id_of(index, victim), index.rows[victim]
        _remove_slot(index, partition, victim)
    # Take the row freed last, or a new one.
    num_free = np.int64(index.num_allocated[partition] - index.num_rows[partition])
    if num_free > 0:
        row = np.int64(index.free[(num_free - 1) * partitions + partition])
    else:
        row = np.int64(index.num_allocated[partition]) * partitions + partition
        index.num_allocated[partition] += 1
    index.num_rows[partition] += 1
    index.ids[row, 0], index.uses[row, 0], index.uses[row, 1] = id, step, min(MAX_USES, occurrences[number])
    # Insert it, and split sets that are due.
    slot = _empty_slot(index, partition, home)
    index.digests[slot], index.rows[slot] = digest_of(mix(id)), row
    if evicts or rules[table, 2] > 0:
        count = min(MAX_USES, occurrences[number]) if rules[table, 2] > 0 else np.int64(0)
        _note_inserted(index, home, slot, count << 32 | step)
    while (
        index.num_rows[partition] > MAX_ROWS_PER_SET * index.num_sets[partition]
        and index.num_sets[partition] * partitions < index.overflowed.size
    ):
        _split(index, partition)
    return row


@parallel
def _insert_partitions(task, num_tasks, indexes, pending, rules, rows, evicted):
    """Insert new ids of the task's partitions, in the order of ids, which has better locality than by partition."""
    tables, ids, occurrences, admitted = pending
    # By chunks of ids, whose sets, and the next ones if the partition is full, are prefetched.
    ids, occurrences, rows = borrow_int64(ids), borrow_int64(occurrences), borrow_int64(rows)
    rules, evicted = borrow_int64(rules).reshape((-1, 3)), borrow_int64(evicted).reshape((-1, 2))
    numbers, homes, number = np.empty(CHUNK, dtype=np.int64), np.empty((CHUNK, 2), dtype=np.int64), 0
    while number < ids.size:
        table, index, size = tables[number], view_index(indexes[tables[number]]), 0
        partitions, old_ways = index.num_sets.size, np.int64(index.old_ways.ctypes.data)
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
                    _prefetch_slots(index, homes[i, 0])
                    if homes[i, 0] != homes[i, 1]:
                        _prefetch_slots(index, homes[i, 1])
                        prefetch(old_ways + homes[i, 0] * 16, 1)
                        prefetch(old_ways + homes[i, 1] * 16, 1)
                for i in range(-AHEAD, size):
                    later = i + AHEAD
                    if later < size and homes[later, 0] != homes[later, 1]:
                        _prefetch_rows(index, homes[later, 0], rules[table, 0])
                        _prefetch_rows(index, homes[later, 1], rules[table, 0])
                    if i >= 0:
                        rows[numbers[i]] = _insert(index, numbers[i], ids, occurrences, rules, table, evicted)
                size = 0


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
            _remove_slot(index, index_partition(index, mix(ids[i])), slot)


def _index_addresses(indexes: Sequence[DynamicIndex]) -> np.ndarray:
    """Return int64 `[T, 10, 2]`: address and size of each tensor."""
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


def dynamic_begin_insert(_: Sequence[DynamicIndex], values: Tensor, keys: Tensor, *options: Any) -> PendingInsert:
    return begin_insert_by_numpy(values, keys, *options) if (keys.numpy() != NO_KEY).any() else _NO_NEW_IDS


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
    args = _index_addresses(indexes), _of_ids(pending), np.array(rules), rows.numpy(), evicted.numpy()
    _insert_partitions(num_tasks, num_tasks, num_tasks, *args)
    batch_rows.numpy()[pending.order.numpy()] = rows.numpy()[pending.numbers.numpy() - 1]
    return rows, evicted


def _of_ids(pending: PendingInsert) -> tuple[np.ndarray, ...]:
    assert pending.occurrences is not None  # `begin_insert_by_numpy` counts them
    return tuple(t.numpy() for t in (pending.tables, pending.ids, pending.occurrences, pending.admitted))


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    _remove(_index_addresses([index])[0], ids.numpy(), (rows := torch.empty_like(ids)).numpy())
    return rows
