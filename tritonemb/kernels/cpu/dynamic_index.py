"""CPU twin of `kernels/dynamic_index.py`: finds in parallel over ids, insertions over partitions."""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.jit import called, compiled, inlined, parallel
from tritonemb.kernels.cpu.row_cache import CHUNK, tasks_for
from tritonemb.kernels.cpu.simd import (
    atomic_increment,
    count_bits,
    equal_ways,
    highest_bit,
    int32_row,
    int64_row,
    lowest_bit,
    mix,
    prefetch,
    uint8_row,
)
from tritonemb.kernels.dynamic_index import begin_insert_by_torch
from tritonemb.layout import DIGEST_SHIFT, MAX_ROWS_PER_SET, MAX_USES, NO_KEY, WAYS, DynamicIndex, PendingInsert, Rule

_Parts: Any = namedtuple("_Parts", ("ids", "uses", *DynamicIndex._fields[1:]))  # type: ignore[misc]


@inlined
def _bare_row(array):
    """int64 `[N]` without its owner: threads that count references to one wait for each other."""
    return int64_row(array.ctypes.data, array.size)


@inlined
def _index_at(places):
    """The index whose addresses and sizes these are, see `_all_places`; nor has it an owner."""
    return _Parts(  # type: ignore[call-arg]
        int64_row(places[0, 0], places[0, 1]).reshape((-1, 2)),
        int32_row(places[0, 0] + 8, 2 * places[0, 1]).reshape((-1, 4)), uint8_row(places[1, 0], places[1, 1]),
        int32_row(places[2, 0], places[2, 1]), int32_row(places[3, 0], places[3, 1]),
        int32_row(places[4, 0], places[4, 1]), int32_row(places[5, 0], places[5, 1]),
        int32_row(places[6, 0], places[6, 1]), int32_row(places[7, 0], places[7, 1]),
        int32_row(places[8, 0], places[8, 1]), int64_row(places[9, 0], places[9, 1]),
    )  # fmt: skip


@inlined
def _partition_of(index, mixed):
    return np.int64(((np.uint64(mixed) >> np.uint64(32)) * np.uint64(index.shard[0])) >> np.uint64(32)) - index.shard[1]


@inlined
def _mask(sets):
    """`2^(L + 1) - 1` for `2^L ≤ sets < 2^(L + 1)`."""
    return (np.int64(2) << highest_bit(sets)) - 1


@inlined
def _place_of(index, mixed):
    """Of an id's set."""
    partition = _partition_of(index, mixed)
    sets = np.int64(index.num_sets[partition])
    mask = _mask(sets)
    number = mixed & mask
    return (number if number < sets else number & (mask >> 1)) * index.num_sets.size + partition


@inlined
def _digest_of(mixed):
    return max(np.int64(1), (mixed >> DIGEST_SHIFT) & 255)


@inlined
def _ways_with(index, place, digest):
    return equal_ways(np.int64(index.digests.ctypes.data) + place * WAYS, digest)


@inlined
def _id_at(index, slot):
    return index.ids[index.rows[slot], 0]


@inlined
def _slot_at(index, place, digest, id):
    """The slot of an id at a place, -1 if it is not there."""
    ways = _ways_with(index, place, digest)
    while ways != 0:
        slot = place * WAYS + lowest_bit(ways)
        if _id_at(index, slot) == id:
            return slot
        ways &= ways - 1
    return np.int64(-1)


@called
def _overflow_slot(index, partition, digest, id):
    seen, place = np.int64(0), index.overflowed.size + partition
    while seen < index.num_overflow[partition]:
        slot = _slot_at(index, place, digest, id)
        if slot >= 0:
            return slot
        seen += WAYS - count_bits(_ways_with(index, place, 0))
        place += index.num_sets.size
    return np.int64(-1)


@called
def _slot_of(index, place, id):
    mixed = mix(id)
    slot = _slot_at(index, place, _digest_of(mixed), id)
    if slot < 0 and index.overflowed[place] > 0:
        return _overflow_slot(index, place % index.num_sets.size, _digest_of(mixed), id)
    return slot


@inlined
def _find_some(index, begin, end, ids, table, step, rows, before, keys, mixed, slots):
    """For a chunk of ids, each loop asks for what the next reads."""
    digests, row_of = np.int64(index.digests.ctypes.data), np.int64(index.rows.ctypes.data)
    id_of = np.int64(index.ids.ctypes.data)
    for start in range(begin, end, CHUNK):
        size = min(CHUNK, end - start)
        for i in range(size):
            mixed[i] = mix(ids[start + i])
            slots[i] = _place_of(index, mixed[i]) * WAYS
            prefetch(digests + slots[i], 1)
        for i in range(size):
            ways = equal_ways(digests + slots[i], _digest_of(mixed[i]))
            slots[i] = slots[i] + lowest_bit(ways) if ways != 0 else -1
            if ways != 0:
                prefetch(row_of + slots[i] * 4, 1)
        for i in range(size):
            row = np.int64(index.rows[slots[i]]) if slots[i] >= 0 else np.int64(-1)
            rows[start + i] = row
            if row >= 0:
                prefetch(id_of + row * 16, 1)
        for i in range(size):
            at, row = start + i, rows[start + i]
            if row < 0 or index.ids[row, 0] != ids[at]:  # not there, or behind another of its digest
                slot = _slot_of(index, _place_of(index, mixed[i]), ids[at])
                row = rows[at] = np.int64(index.rows[slot]) if slot >= 0 else np.int64(-1)
            if before.size > 0 and row >= 0:
                before[at], index.uses[row, 0] = index.uses[row, 0], step
                count = atomic_increment(id_of + row * 16 + 12)
                if count == MAX_USES or count < 0:  # it has come round
                    index.uses[row, 1] = MAX_USES
            elif before.size > 0:
                keys[at] = table


@parallel
def _find(task, num_tasks, indexes, bounds, tables, ids, steps, rows, before, keys):
    """Of each key's values; with room in `before` they are used in the table's step, and `keys` written."""
    ids, rows = _bare_row(ids), _bare_row(rows)
    mixed, slots = np.empty(CHUNK, dtype=np.int64), np.empty(CHUNK, dtype=np.int64)
    at, end = ids.size * task // num_tasks, ids.size * (task + 1) // num_tasks
    rows[at:end], before[at:end], keys[at:end] = ids[at:end], 0, NO_KEY
    for key in range(tables.size):
        table, first, stop = tables[key], max(at, bounds[key]), min(end, bounds[key + 1])
        if table >= 0 and first < stop:
            index = _index_at(indexes[table])
            _find_some(index, first, stop, ids, table, steps[table], rows, before, keys, mixed, slots)


@called
def _victim(index, place, step, last, half_life):
    """The slot of the row of a set that is evicted first, -1 if none may be."""
    victim, least = -1, (np.int64(0), np.int64(0), np.int64(0))
    partitions = index.num_sets.size
    at, left = place, WAYS + np.int64(index.overflowed[place])  # in ways, then in overflow slots
    while left > 0:
        for slot in range(at * WAYS, at * WAYS + WAYS):
            if at == place:
                left -= 1
            if index.digests[slot] == 0 or (at != place and _place_of(index, mix(_id_at(index, slot))) != place):
                continue
            if at != place:
                left -= 1
            row = index.rows[slot]
            id, used, count = index.ids[row, 0], np.int64(index.uses[row, 0]), np.int64(index.uses[row, 1])
            key = count >> min(31, (step - used) // half_life) if half_life > 0 else np.int64(0), used, id
            if used <= last and (victim < 0 or key < least):
                victim, least = slot, key
        at = at + partitions if at != place else index.overflowed.size + place % partitions
    return victim


@inlined
def _return_from_overflow(index, partition, place, to):
    """Move a row of a set from its overflow slot to a way."""
    at = index.overflowed.size + partition
    while True:
        for slot in range(at * WAYS, at * WAYS + WAYS):
            if index.digests[slot] != 0 and _place_of(index, mix(_id_at(index, slot))) == place:
                index.digests[to], index.rows[to] = index.digests[slot], index.rows[slot]
                index.digests[slot] = 0
                index.overflowed[place] -= 1
                index.num_overflow[partition] -= 1
                return
        at += index.num_sets.size


@called
def _free(index, slot):
    """Take the row of a slot out of the index."""
    row = index.rows[slot]
    place = _place_of(index, mix(index.ids[row, 0]))
    partition = place % index.num_sets.size
    index.free[(index.num_allocated[partition] - index.num_rows[partition]) * index.num_sets.size + partition] = row
    index.uses[row, 0] = MAX_USES  # so that it is never counted as one that may be evicted
    index.num_rows[partition] -= 1
    index.digests[slot] = 0
    if slot >= index.overflowed.size * WAYS:
        index.overflowed[place] -= 1
        index.num_overflow[partition] -= 1
    elif index.overflowed[place] > 0:
        _return_from_overflow(index, partition, place, slot)


@called
def _split(index, partition):
    """Give a partition another set."""
    partitions, sets = index.num_sets.size, np.int64(index.num_sets[partition])
    mask = _mask(sets)
    old, new = (sets & (mask >> 1)) * partitions + partition, sets * partitions + partition
    to = new * WAYS
    for slot in range(old * WAYS, old * WAYS + WAYS):
        if index.digests[slot] != 0 and mix(_id_at(index, slot)) & mask == sets:
            index.digests[to], index.rows[to] = index.digests[slot], index.rows[slot]
            index.digests[slot] = 0
            to += 1
    index.num_sets[partition] += 1
    left, at = np.int64(index.overflowed[old]), index.overflowed.size + partition
    while left > 0:
        for slot in range(at * WAYS, at * WAYS + WAYS):
            if index.digests[slot] != 0:
                place = _place_of(index, mix(_id_at(index, slot)))
                if place == new:
                    index.overflowed[old] -= 1
                    index.overflowed[new] += 1
                left -= 1 if place == old or place == new else 0
        at += partitions
    for place in (old, new):
        empty = _ways_with(index, place, 0)
        while empty != 0 and index.overflowed[place] > 0:
            _return_from_overflow(index, partition, place, place * WAYS + lowest_bit(empty))
            empty &= empty - 1


@inlined
def _empty_slot(index, partition, place):
    empty, at = _ways_with(index, place, 0), place
    if empty == 0:
        index.overflowed[place] += 1
        index.num_overflow[partition] += 1
        at = index.overflowed.size + partition
        empty = _ways_with(index, at, 0)
        while empty == 0:
            at += index.num_sets.size
            empty = _ways_with(index, at, 0)
    return at * WAYS + lowest_bit(empty)


@inlined
def _insert(index, at, ids, begins, rules, table, evicted):
    """The row of new id number `at`; `evicted` gets the victim and its row, if there is one."""
    id, partitions, step = ids[at], index.num_sets.size, rules[table, 0]
    place, partition = _place_of(index, mix(id)), _partition_of(index, mix(id))
    if index.num_rows[partition] == len(index.ids) // partitions:
        victim, sets = -1, np.int64(index.num_sets[partition])
        for further in range(sets):
            home = (place // partitions + further) % sets * partitions + partition
            victim = _victim(index, home, step, rules[table, 1], rules[table, 2])
            if victim >= 0:
                break
        evicted[at, 0], evicted[at, 1] = _id_at(index, victim), index.rows[victim]
        _free(index, victim)
    num_free = np.int64(index.num_allocated[partition] - index.num_rows[partition])
    if num_free > 0:
        row = np.int64(index.free[(num_free - 1) * partitions + partition])
    else:
        row = np.int64(index.num_allocated[partition]) * partitions + partition
        index.num_allocated[partition] += 1
    index.num_rows[partition] += 1
    index.ids[row, 0], index.uses[row, 0], index.uses[row, 1] = id, step, min(MAX_USES, begins[at + 1] - begins[at])
    slot = _empty_slot(index, partition, place)
    index.digests[slot], index.rows[slot] = _digest_of(mix(id)), row
    while (
        index.num_rows[partition] > MAX_ROWS_PER_SET * index.num_sets[partition]
        and index.num_sets[partition] < index.overflowed.size // partitions
    ):
        _split(index, partition)
    return row


@parallel
def _insert_all(task, num_tasks, indexes, tables, ids, begins, admitted, rules, rows, evicted):
    """Of a range of partitions, in the order of ids: what they read and write then lies closer than by partition."""
    ids, begins, rows = _bare_row(ids), _bare_row(begins), _bare_row(rows)
    chunk, at = np.empty(CHUNK, dtype=np.int64), 0
    while at < ids.size:
        table, index = tables[at], _index_at(indexes[tables[at]])
        partitions, row_of = index.num_sets.size, np.int64(index.rows.ctypes.data)
        digests, size = np.int64(index.digests.ctypes.data), 0
        first, end = partitions * task // num_tasks, partitions * (task + 1) // num_tasks
        while at < ids.size and tables[at] == table:
            mixed = mix(ids[at])
            if first <= _partition_of(index, mixed) < end and admitted[at]:
                chunk[size] = at
                size += 1
                prefetch(digests + _place_of(index, mixed) * WAYS, 1)
            at += 1
            if size == CHUNK or at == ids.size or tables[at] != table:
                for i in range(size):
                    place = _place_of(index, mix(ids[chunk[i]]))
                    prefetch(row_of + (place * WAYS + lowest_bit(_ways_with(index, place, 0))) * 4, 1)
                for i in range(size):
                    rows[chunk[i]] = _insert(index, chunk[i], ids, begins, rules, table, evicted)
                size = 0


@compiled
def _room_for(indexes, tables, ids, begins, admitted, rules, counts):
    at = 0
    while at < ids.size:
        first, table, index = at, tables[at], _index_at(indexes[tables[at]])
        partitions = index.num_sets.size
        needed, most_rows = np.zeros(partitions, dtype=np.int64), len(index.ids) // partitions
        while at < ids.size and tables[at] == table:
            if admitted[at]:
                needed[_partition_of(index, mix(ids[at]))] += 1
                counts[table, 2] += 1
            at += 1
        counts[table, 0], counts[table, 1] = begins[at] - begins[first], at - first
        for partition in range(partitions):
            missing = needed[partition] - most_rows + index.num_rows[partition]
            counts[table, 4] += max(0, missing)
            for row in range(partition, np.int64(index.num_allocated[partition]) * partitions, partitions):
                if missing <= 0:
                    break
                missing -= 1 if index.uses[row, 0] <= rules[table, 1] else 0
            counts[table, 3] += max(0, missing)


@compiled
def _remove(places, ids, rows):
    index = _index_at(places)
    for i in range(ids.size):
        slot = _slot_of(index, _place_of(index, mix(ids[i])), ids[i])
        rows[i] = -1
        if slot >= 0:
            rows[i] = index.rows[slot]
            _free(index, slot)


def _all_places(indexes: Sequence[DynamicIndex]) -> np.ndarray:
    """int64 `[T, 10, 2]`: address and size of each part."""
    places = [(part.data_ptr(), part.numel()) for index in indexes for part in index]
    return np.array(places, dtype=np.int64).reshape(len(indexes), -1, 2)


def dynamic_find_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One pass. See `kernels/dynamic_index.py`."""
    num_tasks, size = tasks_for(values.numel()), values.numel() if steps else 0
    rows, before, keys = np.empty(values.numel(), np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
    _find(
        num_tasks, num_tasks, num_tasks, _all_places(indexes), np.ascontiguousarray(bounds.numpy()).astype(np.int64),
        np.array(tables), values.contiguous().numpy(), np.array(steps or [0] * len(indexes)), rows, before, keys,
    )  # fmt: skip
    return torch.from_numpy(rows), torch.from_numpy(before), torch.from_numpy(keys)


def dynamic_begin_insert(indexes: Sequence[DynamicIndex], values: Tensor, keys: Tensor) -> PendingInsert:
    """By PyTorch's operators, of the few positions that have no row. See `kernels/dynamic_index.py`."""
    if keys.numpy().min(initial=NO_KEY) == NO_KEY:  # by NumPy: PyTorch wakes threads for it
        return _NO_NEW
    unknown = torch.from_numpy(np.flatnonzero(keys.numpy() != NO_KEY))
    new = begin_insert_by_torch(values[unknown], keys[unknown])
    return new._replace(order=unknown[new.order])


_NO_NEW = begin_insert_by_torch(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))


def dynamic_room(indexes: Sequence[DynamicIndex], new: PendingInsert, rules: Sequence[Rule], counts: Tensor) -> Tensor:
    """See `kernels/dynamic_index.py`."""
    _room_for(_all_places(indexes), *_of_ids(new), np.array(rules), counts.numpy())
    return new.begins


def dynamic_commit_insert_(
    indexes: Sequence[DynamicIndex], new: PendingInsert, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """See `kernels/dynamic_index.py`."""
    num_tasks, rows = tasks_for(new.ids.numel()), torch.full_like(new.ids, -1)
    evicted = new.ids.new_full((new.ids.numel(), 2), -1)
    _insert_all(
        num_tasks, num_tasks, num_tasks, _all_places(indexes), *_of_ids(new), np.array(rules), rows.numpy(),
        evicted.numpy(),
    )  # fmt: skip
    batch_rows.index_copy_(0, new.order, rows.index_select(0, new.numbers - 1))
    return rows, evicted


def _of_ids(new: PendingInsert) -> list[np.ndarray]:
    return [part.numpy() for part in (new.tables, new.ids, new.begins, new.admitted)]


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """See `kernels/dynamic_index.py`."""
    rows = torch.empty_like(ids)
    _remove(_all_places([index])[0], ids.numpy(), rows.numpy())
    return rows
