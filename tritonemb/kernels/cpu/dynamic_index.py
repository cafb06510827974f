"""CPU twin of `kernels/dynamic_index.py`: finds in parallel over ids, insertions over partitions.

An insertion first finds all ids. If a partition then has more new ones than its overflow list has empty slots, it is
served once on a copy, to see whether they find room; only when all do is anything changed.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.jit import called, compiled, inlined, parallel, run_tasks
from tritonemb.kernels.cpu.row_cache import CHUNK, tasks_for
from tritonemb.kernels.cpu.row_groups import as_int64
from tritonemb.kernels.cpu.simd import count_bits, equal_ways, lowest_bit, mix, prefetch
from tritonemb.kernels.dynamic_index import DynamicInsertion
from tritonemb.kernels.dynamic_index import dynamic_rows as dynamic_rows
from tritonemb.layout import DIGEST_SHIFT, GROWN_ROWS, MOST_USES, WAYS, DynamicIndex

TASKS_A_THREAD = 4


@inlined
def _partition_of(mixed, num_partitions):
    return np.int64(((np.uint64(mixed) >> np.uint64(32)) * np.uint64(num_partitions)) >> np.uint64(32))


@inlined
def _mask(sets):
    """`2^(L + 1) - 1` for `2^L ≤ sets < 2^(L + 1)`."""
    for shift in (1, 2, 4, 8, 16):
        sets |= sets >> shift
    return sets


@inlined
def _place_of(index, mixed):
    """Of an id's set."""
    partition = _partition_of(mixed, index.num_sets.size)
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
def _slot_at(index, place, digest, id):
    """The slot of an id at a place, -1 if it is not there."""
    ways = _ways_with(index, place, digest)
    while ways != 0:
        slot = place * WAYS + lowest_bit(ways)
        if index.ids[slot] == id:
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
def _slot_of(index, id):
    mixed = mix(id)
    place, digest = _place_of(index, mixed), _digest_of(mixed)
    slot = _slot_at(index, place, digest, id)
    if slot < 0 and index.overflowed[place] > 0:
        return _overflow_slot(index, place % index.num_sets.size, digest, id)
    return slot


@parallel
def _find(task, num_tasks, index, ids, slots):
    """Each step of a chunk asks for what the next reads."""
    places, digests = np.empty(CHUNK, dtype=np.int64), np.empty(CHUNK, dtype=np.int64)
    digest_address, id_address = np.int64(index.digests.ctypes.data), np.int64(index.ids.ctypes.data)
    begin, end = ids.size * task // num_tasks, ids.size * (task + 1) // num_tasks
    for start in range(begin, end, CHUNK):
        size = min(CHUNK, end - start)
        for i in range(size):
            mixed = mix(ids[start + i])
            places[i], digests[i] = _place_of(index, mixed), _digest_of(mixed)
            prefetch(digest_address + places[i] * WAYS, 1)
        for i in range(size):
            way = lowest_bit(_ways_with(index, places[i], digests[i])) & (WAYS - 1)  # 0 if there is none
            prefetch(id_address + (places[i] * WAYS + way) * 8, 1)
        for i in range(size):
            slots[start + i] = _slot_at(index, places[i], digests[i], ids[start + i])
            if slots[start + i] < 0 and index.overflowed[places[i]] > 0:
                slots[start + i] = _overflow_slot(index, places[i] % index.num_sets.size, digests[i], ids[start + i])


@inlined
def _note(log, id, slot, to):
    """An event, behind those noted before: a row was moved, inserted (from -1) or evicted (to -1)."""
    log[0, 0] += 1
    event = log[log[0, 0]]
    event[0], event[1], event[2] = id, slot, to


@inlined
def _put(index, log, slot, to, id, used, count):
    _note(log, id, slot, to)
    index.ids[to], index.used[to], index.counts[to], index.digests[to] = id, used, count, _digest_of(mix(id))


@called
def _move(index, log, slot, to):
    index.digests[slot] = 0
    _put(index, log, slot, to, index.ids[slot], index.used[slot], index.counts[slot])


@inlined
def _is_grown(index, partition):
    return index.num_sets[partition] * index.num_sets.size == index.overflowed.size


@called
def _way_to_take(index, place, last, lfu):
    """The first empty way of a set, or its victim's; -1 if there is none."""
    first, empty = place * WAYS, _ways_with(index, place, 0)
    if empty != 0:
        return first + lowest_bit(empty)
    victim, least = -1, (np.int64(0), np.int64(0), np.int64(0))
    if _is_grown(index, place % index.num_sets.size):
        for slot in range(first, first + WAYS):
            key = np.int64(index.counts[slot] if lfu else 0), index.used[slot], index.ids[slot]
            if index.used[slot] <= last and (victim < 0 or key < least):
                victim, least = slot, key
    return victim


@inlined
def _evict(index, log, partition, slot):
    """The row of a slot, if it has one."""
    if index.digests[slot] != 0:
        _note(log, index.ids[slot], slot, -1)
        index.digests[slot] = 0
        index.num_rows[partition] -= 1


@called
def _overflow_rows(index, partition):
    """Slots of the overflow list that have rows."""
    slots, found, place = np.empty(index.num_overflow[partition], dtype=np.int64), 0, index.overflowed.size + partition
    while found < slots.size:
        for slot in range(place * WAYS, place * WAYS + WAYS):
            if index.digests[slot] != 0:
                slots[found] = slot
                found += 1
        place += index.num_sets.size
    return slots


@called
def _leave_overflow(index, log, partition, last, lfu):
    """Move rows of the overflow list into sets that give them a way; whether any moved."""
    slots, found = _overflow_rows(index, partition), 0
    for slot in slots:
        if _way_to_take(index, _place_of(index, mix(index.ids[slot])), last, lfu) >= 0:
            i = found  # among those before, by id
            while i > 0 and index.ids[slots[i - 1]] > index.ids[slot]:
                slots[i] = slots[i - 1]
                i -= 1
            slots[i] = slot
            found += 1
    moved = False
    for slot in slots[:found]:
        place = _place_of(index, mix(index.ids[slot]))
        to = _way_to_take(index, place, last, lfu)
        if to >= 0:
            _evict(index, log, partition, to)
            _move(index, log, slot, to)
            index.overflowed[place] -= 1
            index.num_overflow[partition] -= 1
            moved = True
    index.has_room[partition] = False
    return moved


@called
def _grow(index, log, partition):
    """Split sets until the partition has enough; whether any was split."""
    before, partitions = np.int64(index.num_sets[partition]), index.num_sets.size
    while index.num_rows[partition] > GROWN_ROWS * index.num_sets[partition] and not _is_grown(index, partition):
        sets = np.int64(index.num_sets[partition])
        mask = _mask(sets)
        old, new = (sets & (mask >> 1)) * partitions + partition, sets * partitions + partition
        to = new * WAYS
        for slot in range(old * WAYS, old * WAYS + WAYS):
            if index.digests[slot] != 0 and mix(index.ids[slot]) & mask == sets:
                _move(index, log, slot, to)
                to += 1
        if index.overflowed[old] > 0:
            for slot in _overflow_rows(index, partition):
                if mix(index.ids[slot]) & mask == sets:
                    index.overflowed[old] -= 1
                    index.overflowed[new] += 1
            index.has_room[partition] = True
        index.num_sets[partition] += 1
    return index.num_sets[partition] > before


@inlined
def _first_empty_overflow(index, partition):
    for place in range(index.overflowed.size + partition, index.digests.size // WAYS, index.num_sets.size):
        empty = _ways_with(index, place, 0)
        if empty != 0:
            return place * WAYS + lowest_bit(empty)
    return np.int64(-1)


@called
def _insert(index, log, partition, id, occurrences, step, last, lfu):
    """The slot of a new id, -1 if there is no room."""
    place = _place_of(index, mix(id))
    slot = _way_to_take(index, place, last, lfu)
    if slot < 0:
        slot = _first_empty_overflow(index, partition)
        if slot < 0:
            return slot
        index.overflowed[place] += 1
        index.num_overflow[partition] += 1
    _evict(index, log, partition, slot)
    _put(index, log, -1, slot, id, step, min(MOST_USES, occurrences))
    index.num_rows[partition] += 1
    return slot


@called
def _serve(index, log, partition, members, ids, occurrences, slots, step, last, lfu):
    """Steps 1 to 3 for the `members` of a batch, whose `slots` have been found; how many find no room."""
    log[0, 0] = 0
    used, counts = np.int64(index.used.ctypes.data), np.int64(index.counts.ctypes.data)
    for i in members:
        prefetch(used + slots[i] * 8, 1)
        prefetch(counts + slots[i] * 4, 1)
    for i in members:
        if slots[i] >= 0:
            index.used[slots[i]] = step
            index.counts[slots[i]] = min(MOST_USES, index.counts[slots[i]] + occurrences[i])
    moved, unplaced = False, 0
    if index.num_overflow[partition] > 0 and (index.has_room[partition] or _is_grown(index, partition)):
        moved = _leave_overflow(index, log, partition, last, lfu)
    for i in members:
        if slots[i] < 0:
            slots[i] = _insert(index, log, partition, ids[i], occurrences[i], step, last, lfu)
            unplaced += 1 if slots[i] < 0 else 0
            moved |= _grow(index, log, partition)
    if moved:
        for i in members:
            slots[i] = _slot_of(index, ids[i])
    return unplaced


@inlined
def _part(array, partition, partitions):
    """A copy of what an array by slot has of a partition."""
    return array.reshape(-1, partitions, WAYS)[:, partition].copy().reshape(-1)


@called
def _copy_of(index, partition):
    """An index of one partition alone."""
    size, one = index.num_sets.size, slice(partition, partition + 1)
    return DynamicIndex(
        _part(index.ids, partition, size), _part(index.used, partition, size), _part(index.counts, partition, size),
        _part(index.digests, partition, size), index.overflowed[partition::size].copy(), index.num_sets[one].copy(),
        index.num_rows[one].copy(), index.num_overflow[one].copy(), index.has_room[one].copy(),
    )  # fmt: skip


@called
def _serve_share(
    task, num_tasks, index, starts, order, firsts, ids, occurrences, slots, step, last, lfu, tight, unplaced, logs
):  # fmt: skip
    """A share of the partitions; where there are `tight` ones, only those, on copies."""
    partitions, found = index.num_sets.size, np.empty(ids.size if tight.size > 0 else 0, dtype=np.int64)
    for partition in range(partitions * task // num_tasks, partitions * (task + 1) // num_tasks):
        members, log = order[starts[partition] : starts[partition + 1]], logs[firsts[partition] :]
        if tight.size > 0 and tight[partition]:
            copy = _copy_of(index, partition)
            for i in members:
                found[i] = _slot_of(copy, ids[i])
            unplaced[partition] = _serve(copy, log, 0, members, ids, occurrences, found, step, last, lfu)
        elif tight.size == 0 and members.size > 0:
            _serve(index, log, partition, members, ids, occurrences, slots, step, last, lfu)


@compiled
def _insert_all(num_threads, num_tasks, index, ids, occurrences, step, last, lfu, slots):
    """Events, those of an id in their order; and how many ids there is no room for."""
    partitions, most_sets = index.num_sets.size, index.overflowed.size // index.num_sets.size
    partition_of, starts = np.empty(ids.size, dtype=np.int64), np.zeros(partitions + 1, dtype=np.int64)
    needed, unplaced = np.zeros(partitions, dtype=np.int64), np.zeros(partitions, dtype=np.int64)
    for i in range(ids.size):
        partition_of[i] = _partition_of(mix(ids[i]), partitions)
        starts[partition_of[i] + 1] += 1
        needed[partition_of[i]] += 1 if slots[i] < 0 else 0
    firsts, tight = np.zeros(partitions + 1, dtype=np.int64), np.zeros(partitions, dtype=np.bool_)
    for partition in range(partitions):
        waiting, splits = index.num_overflow[partition], -(-needed[partition] // GROWN_ROWS)
        tight[partition] = index.digests.size // partitions - most_sets * WAYS - waiting < needed[partition]
        most = 2 * (waiting + needed[partition]) + min(splits, most_sets - index.num_sets[partition]) * WAYS
        firsts[partition + 1] = firsts[partition] + 1 + (most if starts[partition + 1] > 0 else 0)
        starts[partition + 1] += starts[partition]
    order, ends = np.empty(ids.size, dtype=np.int64), starts[:-1].copy()
    for i in range(ids.size):
        order[ends[partition_of[i]]] = i
        ends[partition_of[i]] += 1
    logs = np.empty((firsts[partitions], 3), dtype=np.int64)
    for first in firsts[:-1]:
        logs[first, 0] = 0
    for rehearsed in range(2):
        if unplaced.sum() == 0 and (rehearsed or tight.any()):
            run_tasks(
                num_threads, num_tasks, _serve_share,
                (num_tasks, index, starts, order, firsts, ids, occurrences, slots, step, last, lfu,
                 tight[: 0 if rehearsed else partitions], unplaced, logs),
            )  # fmt: skip
    size = 0
    for partition in range(0 if unplaced.sum() > 0 else partitions):
        first = firsts[partition] + 1
        for event in range(first, first + logs[first - 1, 0]):
            logs[size] = logs[event]
            size += 1
    return logs[:size], unplaced.sum()


@compiled
def _remove(index, ids, slots):
    for i in range(ids.size):
        slots[i] = _slot_of(index, ids[i])
        if slots[i] >= 0:
            place = _place_of(index, mix(ids[i]))
            partition = place % index.num_sets.size
            index.digests[slots[i]] = 0
            index.num_rows[partition] -= 1
            if slots[i] >= index.overflowed.size * WAYS:
                index.overflowed[place] -= 1
                index.num_overflow[partition] -= 1
            elif index.overflowed[place] > 0:
                index.has_room[partition] = True


def _arrays(index: DynamicIndex) -> Any:
    return DynamicIndex(*(part.numpy() for part in index))  # type: ignore[arg-type]


def dynamic_find(index: DynamicIndex, ids: Tensor) -> Tensor:
    """See `kernels/dynamic_index.py`."""
    slots, num_tasks = torch.empty_like(ids), tasks_for(ids.numel())
    _find(num_tasks, num_tasks, num_tasks, _arrays(index), ids.numpy(), slots.numpy())
    return slots


def dynamic_insert_(
    index: DynamicIndex, ids: Tensor, occurrences: Tensor, step: int, protect: int, policy: str
) -> DynamicInsertion:
    """See `kernels/dynamic_index.py`."""
    slots, num_threads = dynamic_find(index, ids), tasks_for(ids.numel())
    is_new, num_tasks = slots < 0, num_threads if num_threads == 1 else TASKS_A_THREAD * num_threads
    needed = int(is_new.sum())
    events, unplaced = _insert_all(
        num_threads, num_tasks, _arrays(index), ids.numpy(), as_int64(occurrences), step, step - max(1, protect),
        policy == "lfu", slots.numpy(),
    )  # fmt: skip
    if unplaced:
        slots.fill_(-1)
        is_new.zero_()
    changed, before, after = torch.from_numpy(events).T
    changed, order = changed.sort(stable=True)
    changed, counts = changed.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    before, after = before[order[ends - counts]], after[order[ends - 1]]  # of an id's first event, and of its last
    gone, moved = after < 0, (before >= 0) & (after >= 0)
    totals = torch.tensor([needed, needed - unplaced, int(index.num_overflow.sum())])
    return DynamicInsertion(slots, is_new, changed[gone], before[gone], before[moved], after[moved], totals)


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """See `kernels/dynamic_index.py`."""
    slots = torch.empty_like(ids)
    _remove(_arrays(index), ids.numpy(), slots.numpy())
    return slots
