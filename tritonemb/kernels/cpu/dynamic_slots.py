"""CPU twin of `kernels/dynamic_slots.py`: sets and slots of a dynamic table's index, eviction and insertion.

A row that is evicted has the least key of its set and the next one. Notes beside the index (`DynamicIndex.old_ways`)
list the rows of a set that were the least when it was last searched whole, so that few rows are read per eviction.
"""

from collections import namedtuple
from typing import Any

import numpy as np

from tritonemb.kernels.cpu.jit import called, inlined, inlined_uncounted, uncounted
from tritonemb.kernels.cpu.simd import (
    count_bits,
    equal_ways,
    highest_bit,
    int32_row,
    int64_row,
    lowest_bit,
    masked_ways,
    mix,
    prefetch,
    uint8_row,
)
from tritonemb.layout import DIGEST_SHIFT, MAX_ROWS_PER_SET, MAX_USES, WAYS, DynamicIndex

_ALL_WAYS, _MAX_KEY = np.int64(2**WAYS - 1), np.int64(2**63 - 1)  # mask of a bucket; above all keys of rows
_NO_VICTIM = np.int64(-1), _MAX_KEY, _MAX_KEY  # slot, key and id of no victim
_OLD_SHARE = 4  # LFU: part of the range of last steps whose rows are old: a set is searched whole every few evictions
_MAX_LISTED = 12  # LRU: ways that fit into 60 bits, 5 each
_NOTED = -(2**31)  # sign of a hash in `DynamicIndex.overflow_hashes`
_IndexArrays: Any = namedtuple("_Parts", ("ids", "uses", *DynamicIndex._fields[1:], "old_ways", "overflow_hashes"))  # type: ignore[misc]


@inlined
def view_index(fields):
    """View an index by its `_index_addresses`, without reference counts."""
    return _IndexArrays(  # type: ignore[call-arg]
        int64_row(fields[0, 0], fields[0, 1]).reshape((-1, 2)),
        int32_row(fields[0, 0] + 8, 2 * fields[0, 1]).reshape((-1, 4)), uint8_row(fields[1, 0], fields[1, 1]),
        int32_row(fields[2, 0], fields[2, 1]), int32_row(fields[3, 0], fields[3, 1]),
        int32_row(fields[4, 0], fields[4, 1]), int32_row(fields[5, 0], fields[5, 1]),
        int32_row(fields[6, 0], fields[6, 1]), int32_row(fields[7, 0], fields[7, 1]),
        int32_row(fields[8, 0], fields[8, 1]), int64_row(fields[9, 0], fields[9, 1]),
        int64_row(fields[10, 0], fields[10, 1]), int32_row(fields[11, 0], fields[11, 1]),
    )  # fmt: skip


@inlined_uncounted
def index_partition(index, bits):
    return np.int64(((np.uint64(bits) >> np.uint64(32)) * np.uint64(index.shard[0])) >> np.uint64(32)) - index.shard[1]


@inlined_uncounted
def set_mask(sets):
    """Return `2^(L + 1) - 1` for `2^L ≤ sets < 2^(L + 1)`."""
    return (np.int64(2) << highest_bit(sets)) - 1


@inlined_uncounted
def home_bucket(index, hash64):
    partition = index_partition(index, hash64)
    sets = np.int64(index.num_sets[partition])
    mask = set_mask(sets)
    number = hash64 & mask
    return (number if number < sets else number & (mask >> 1)) * index.num_sets.size + partition


@inlined_uncounted
def digest_of(hash64):
    return max(np.int64(1), (hash64 >> DIGEST_SHIFT) & 255)


@inlined_uncounted
def ways_with(index, bucket, digest):
    """Return the ways of a bucket with a digest, a bit each; digest 0 is an empty way."""
    return equal_ways(np.int64(index.digests.ctypes.data) + bucket * WAYS, digest)


@inlined_uncounted
def id_of(index, slot):
    return index.ids[index.rows[slot], 0]


@inlined_uncounted
def _slot_in_bucket(index, bucket, digest, id):
    """Return the slot of an id in a bucket, -1 if it is not in it."""
    ways = ways_with(index, bucket, digest)
    while ways != 0:
        slot = bucket * WAYS + lowest_bit(ways)
        if id_of(index, slot) == id:
            return slot
        ways &= ways - 1
    return np.int64(-1)


@called
def _overflow_slot(index, partition, digest, id):
    """Return the slot of an id in the partition's overflow buckets, else -1."""
    num_seen, bucket = np.int64(0), index.overflowed.size + partition
    while num_seen < index.num_overflow[partition]:
        slot = _slot_in_bucket(index, bucket, digest, id)
        if slot >= 0:
            return slot
        num_seen += WAYS - count_bits(ways_with(index, bucket, 0))
        bucket += index.num_sets.size
    return np.int64(-1)


@inlined_uncounted
def _note_overflow(index, slot, hash64):
    """Note the hash of the id in an overflow slot; the sign says that it is noted."""
    index.overflow_hashes[slot - index.overflowed.size * WAYS] = np.int32((hash64 & MAX_USES) + _NOTED)


@uncounted
def _next_overflow_slot(index, home, slot):
    """Return the first overflow slot after `slot`, -1 at first, with a row of a set that has one there.

    Compare the noted hashes, and note all of the partition first if none of them is right.
    """
    partitions, first_slot = index.num_sets.size, index.overflowed.size * WAYS
    partition, number = home % partitions, home // partitions
    sets, notes = np.int64(index.num_sets[partition]), np.int64(index.overflow_hashes.ctypes.data) - first_slot * 4
    # A set that is not split yet has one bit less.
    mask = set_mask(sets)
    mask = mask >> 1 if number <= mask >> 1 and number + (mask >> 1) + 1 >= sets else mask
    while True:
        bucket = max(slot, first_slot + partition * WAYS) // WAYS
        next_ways = ~((np.int64(2) << slot % WAYS) - 1) if slot >= 0 else np.int64(-1)
        while bucket * WAYS < index.digests.size:
            ways = masked_ways(notes + bucket * WAYS * 4, mask + _NOTED, number + _NOTED) & next_ways
            ways &= ~ways_with(index, bucket, 0)
            while ways != 0:
                result = bucket * WAYS + lowest_bit(ways)
                if home_bucket(index, mix(id_of(index, result))) == home:
                    return result
                ways &= ways - 1
            bucket, next_ways = bucket + partitions, np.int64(-1)
        for bucket in range(index.overflowed.size + partition, index.digests.size // WAYS, partitions):
            for way in range(WAYS):
                if index.digests[bucket * WAYS + way] != 0:
                    _note_overflow(index, bucket * WAYS + way, mix(id_of(index, bucket * WAYS + way)))


@called
def slot_of(index, home, id):
    """Return the slot of an id, -1 if it is unknown."""
    hash64 = mix(id)
    slot = _slot_in_bucket(index, home, digest_of(hash64), id)
    if slot < 0 and index.overflowed[home] > 0:
        return _overflow_slot(index, home % index.num_sets.size, digest_of(hash64), id)
    return slot


@inlined_uncounted
def next_home(index, home, partition):
    """Return the home bucket of the next set."""
    bucket = home + index.num_sets.size
    return bucket if bucket < index.num_sets[partition] * index.num_sets.size else partition


@inlined_uncounted
def key_of(index, row, step, half_life):
    """Return the key of a row, the last step and above it the aged count, and the number of halvings of the count."""
    last_step, halvings = np.int64(index.uses[row, 0]), np.int64(0)
    if half_life == 0:
        return last_step, halvings
    halvings = np.int64(np.float64(max(0, step - last_step)) / np.float64(half_life))  # exact, faster than of integers
    return np.int64(index.uses[row, 1]) >> (halvings if halvings < 31 else 31) << 32 | last_step, halvings


@inlined_uncounted
def least_used(index, home, ways, rule, best):
    """Return the best victim, its slot, key and id: `best`, or a row in these ways of a home bucket."""
    (step, max_step, half_life), (victim, min_key, min_id) = rule, best
    while ways != 0:
        slot = home * WAYS + lowest_bit(ways)
        ways &= ways - 1
        row = np.int64(index.rows[slot])
        id, (key, _) = index.ids[row, 0], key_of(index, row, step, half_life)
        # No branches, which would be unpredictable: `&`, and conditional moves.
        is_less = (index.uses[row, 0] <= max_step) & ((key < min_key) | ((key == min_key) & (id < min_id)))
        victim, min_key, min_id = slot if is_less else victim, key if is_less else min_key, id if is_less else min_id
    return victim, min_key, min_id


@inlined_uncounted
def _old_ways(index, home, step):
    """LFU: return the ways of a set whose rows may have the least keys, see `DynamicIndex.old_ways`; 0 if unknown."""
    old_ways = index.old_ways[2 * home + 1]
    return old_ways & _ALL_WAYS if step < old_ways >> 32 else np.int64(0)


@inlined_uncounted
def prefetch_digests(index, home):
    """Prefetch the digests of a set, and the notes about its rows."""
    prefetch(np.int64(index.digests.ctypes.data) + home * WAYS, 1)
    prefetch(np.int64(index.old_ways.ctypes.data) + home * 16, 1)
    prefetch(np.int64(index.overflowed.ctypes.data) + home * 4, 1)


@inlined_uncounted
def _ways_to_read(index, home, rule):
    """Return the ways of a set whose rows `_find_victim` reads first."""
    (step, _, half_life), listed_ways = rule, index.old_ways[2 * home + 1]
    if half_life == 0 and listed_ways & 15 > 0:
        return np.int64(1) << (listed_ways >> (5 * (listed_ways & 15) - 1) & (WAYS - 1))
    used_ways = ~ways_with(index, home, 0) & _ALL_WAYS
    ways = used_ways & _old_ways(index, home, step) if half_life > 0 else np.int64(0)
    return ways if ways != 0 else used_ways


@inlined_uncounted
def prefetch_row_numbers(index, home, rule):
    """Prefetch the numbers of the rows of a set that `_find_victim` reads first."""
    ways, numbers = _ways_to_read(index, home, rule), np.int64(index.rows.ctypes.data) + home * WAYS * 4
    if ways & 0xFFFF != 0:
        prefetch(numbers, 1)
    if ways >> 16 != 0:
        prefetch(numbers + 64, 1)


@inlined_uncounted
def prefetch_rows(index, home, rule):
    """Prefetch the rows of a set that `_find_victim` reads first."""
    ways, entries = _ways_to_read(index, home, rule), np.int64(index.ids.ctypes.data)
    while ways != 0:
        prefetch(entries + np.int64(index.rows[home * WAYS + lowest_bit(ways)]) * 16, 1)
        ways &= ways - 1


@inlined_uncounted
def _search_overflow(index, home, rule, end_step):
    """Return the best victim in a set's overflow slots, the least key there, and the step until which all stay."""
    (step, max_step, half_life), (victim, min_key, min_id) = rule, _NO_VICTIM
    least_key, slot = _MAX_KEY, np.int64(-1)
    for _ in range(index.overflowed[home]):
        slot = _next_overflow_slot(index, home, slot)
        row, id = np.int64(index.rows[slot]), id_of(index, slot)
        key, halvings = key_of(index, row, step, half_life)
        least_key = min(least_key, key)
        end_step = min(end_step, (key & MAX_USES) + half_life * (halvings + 1)) if key >> 32 > 0 else end_step
        if index.uses[row, 0] <= max_step and (key < min_key or (key == min_key and id < min_id)):
            victim, min_key, min_id = slot, key, id
    return (victim, min_key, min_id), least_key, end_step


@inlined_uncounted
def _list_old_ways(index, home, ways, rule, best, end_key, buffers):
    """Sort the rows in these ways, all used ones, by last step and id, and list the first; return the best victim."""
    (slots, keys, ids), size = buffers, 0
    while ways != 0:
        slot, i = home * WAYS + lowest_bit(ways), size
        ways &= ways - 1
        row = np.int64(index.rows[slot])
        key, id = np.int64(index.uses[row, 0]), index.ids[row, 0]
        while i > 0 and (keys[i - 1] > key or (keys[i - 1] == key and ids[i - 1] > id)):
            slots[i], keys[i], ids[i] = slots[i - 1], keys[i - 1], ids[i - 1]
            i -= 1
        slots[i], keys[i], ids[i] = slot, key, id
        size += 1
    end_key = min(end_key, keys[_MAX_LISTED]) if size > _MAX_LISTED else end_key
    num_listed = listed_ways = np.int64(0)
    for i in range(min(size, _MAX_LISTED)):
        if keys[i] < end_key:
            listed_ways = listed_ways << 5 | slots[i] % WAYS
            num_listed += 1
    index.old_ways[2 * home], index.old_ways[2 * home + 1] = ~end_key, listed_ways << 4 | num_listed
    is_less = size > 0 and keys[0] <= rule[1] and (keys[0] < best[1] or (keys[0] == best[1] and ids[0] < best[2]))
    return (slots[0], keys[0], ids[0]) if is_less else best


@inlined_uncounted
def _note_old_ways(index, home, ways, rule, end_key, end_step):
    """Note the old ways of a set with these used ways, for LFU; key and step are at most the given ones."""
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
def _find_victim(index, home, rule, buffers):
    """Return the slot of the row of a set to evict, -1 if none may be, its key (aged count, last step), and its id."""
    (step, max_step, half_life), ways, best = rule, ~ways_with(index, home, 0) & _ALL_WAYS, _NO_VICTIM
    end_key, listed_ways = index.old_ways[2 * home], index.old_ways[2 * home + 1]
    # LRU: the first listed way whose row was not used meanwhile; all others have rows of larger keys.
    if half_life == 0:
        for num_listed in range(listed_ways & 15, 0, -1):
            way = listed_ways >> (5 * num_listed - 1) & (WAYS - 1)
            if ways >> way & 1 == 0:
                continue
            row = np.int64(index.rows[home * WAYS + way])
            key = np.int64(index.uses[row, 0])
            if key < ~end_key:
                index.old_ways[2 * home + 1] = (listed_ways & ~15) | num_listed
                return (home * WAYS + way, key, index.ids[row, 0]) if key <= max_step else best
    # LFU: the old ways, if the row of one has a key below all others.
    else:
        old_ways = ways & _old_ways(index, home, step)
        best = least_used(index, home, old_ways, rule, (np.int64(-1), end_key, ~_MAX_KEY))
        if best[0] >= 0:
            return best
    # Else the whole set. Until a half-life has passed, the counts of rows that are used meanwhile do not halve.
    best, least_key, end_step = _search_overflow(index, home, rule, min(step + half_life, np.int64(MAX_USES)))
    if half_life == 0:
        return _list_old_ways(index, home, ways, rule, best, min(step, least_key), buffers)
    best = least_used(index, home, ways, rule, best)
    if best[0] >= 0:
        end_key = best[1] + 1 + (max_step - (best[1] & MAX_USES)) // _OLD_SHARE
        _note_old_ways(index, home, ways, rule, min(end_key, least_key), end_step)
    return best


@inlined_uncounted
def _note_inserted(index, home, slot, key, half_life):
    """Note in `DynamicIndex.old_ways` the row that was inserted into a slot."""
    end_key, way = index.old_ways[2 * home], np.int64(1) << slot % WAYS
    if half_life == 0:
        index.old_ways[2 * home] = 0 if key < ~end_key else end_key  # 0: unknown
    elif slot < index.overflowed.size * WAYS:
        index.old_ways[2 * home + 1] = index.old_ways[2 * home + 1] & ~way | (way if key < end_key else 0)
    elif key < end_key:
        index.old_ways[2 * home + 1] = 0  # unknown


@inlined_uncounted
def _clear_slot(index, partition, home, slot):
    """Empty a slot of a set; if it is in the home bucket, move a row there from an overflow bucket."""
    index.digests[slot] = 0
    if slot < index.overflowed.size * WAYS and index.overflowed[home] > 0:
        target, slot = slot, _next_overflow_slot(index, home, np.int64(-1))
        index.digests[target], index.rows[target] = index.digests[slot], index.rows[slot]
        index.digests[slot] = 0
    if slot >= index.overflowed.size * WAYS:
        index.overflowed[home] -= 1
        index.num_overflow[partition] -= 1


@inlined_uncounted
def remove_slot(index, partition, slot):
    """Remove the row of a slot from the index, and push it to the partition's free rows."""
    row = index.rows[slot]
    index.free[(index.num_allocated[partition] - index.num_rows[partition]) * index.num_sets.size + partition] = row
    index.uses[row, 0] = MAX_USES  # above every step: free rows are never counted as evictable
    index.num_rows[partition] -= 1
    _clear_slot(index, partition, home_bucket(index, mix(index.ids[row, 0])), slot)


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
            _clear_slot(index, partition, home, home * WAYS + lowest_bit(empty_ways))
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
def insert(index, number, ids, occurrences, rule, evicted, buffers):
    """Insert new id `number` and return its row; write a victim and its row to `evicted`."""
    id, partitions, (step, _, half_life) = ids[number], index.num_sets.size, rule
    hash64, count = mix(id), min(MAX_USES, occurrences[number])
    home, partition = home_bucket(index, hash64), index_partition(index, hash64)
    evicts = index.num_rows[partition] * partitions == index.free.size  # a division takes as long as a cache miss
    # If the partition is full, evict from the id's set or the next one, else from the next set with an evictable row.
    if evicts:
        victim, min_key, min_id = _NO_VICTIM
        victim_home = probed_home = home
        for offset in range(index.num_sets[partition]):
            if victim >= 0 and offset > 1:
                break
            slot, key, victim_id = _find_victim(index, probed_home, rule, buffers)
            if key < min_key or (key == min_key and victim_id < min_id):
                victim, min_key, min_id, victim_home = slot, key, victim_id, probed_home
            probed_home = next_home(index, probed_home, partition)
        row = np.int64(index.rows[victim])
        evicted[number, 0], evicted[number, 1] = min_id, row
        listed_ways = index.old_ways[2 * victim_home + 1]
        if half_life == 0 and victim < index.overflowed.size * WAYS and listed_ways & 15 > 0:
            index.old_ways[2 * victim_home + 1] = listed_ways - 1
        _clear_slot(index, partition, victim_home, victim)
    # Else take the row freed last, or a new one.
    else:
        num_free = np.int64(index.num_allocated[partition] - index.num_rows[partition])
        if num_free > 0:
            row = np.int64(index.free[(num_free - 1) * partitions + partition])
        else:
            row = np.int64(index.num_allocated[partition]) * partitions + partition
            index.num_allocated[partition] += 1
        index.num_rows[partition] += 1
    index.ids[row, 0], index.uses[row, 0], index.uses[row, 1] = id, step, count
    # Insert it, and split sets that are due.
    slot = _empty_slot(index, partition, home)
    index.digests[slot], index.rows[slot] = digest_of(hash64), row
    if slot >= index.overflowed.size * WAYS:
        _note_overflow(index, slot, hash64)
    if evicts or half_life > 0:
        _note_inserted(index, home, slot, (count if half_life > 0 else np.int64(0)) << 32 | step, half_life)
    while (
        index.num_rows[partition] > MAX_ROWS_PER_SET * index.num_sets[partition]
        and index.num_sets[partition] * partitions < index.overflowed.size
    ):
        _split(index, partition)
    return row
