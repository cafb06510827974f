"""Slots of a dynamic table's index, a hash table by linear hashing: Triton functions, and a dict for the references.

A `DynamicIndex` has `P` partitions of `C = ceil(capacity / P)` rows; row `k` of partition `p` is row `k · P + p` of the
table, so that memory is first used at its beginning. An id's row never moves. The hash `mix64(id)` determines the
partition (the high word times `P`, divided by 2^32), the digest (8 bits from `DIGEST_SHIFT` on) and the set (the lowest
bits). In a partition of `n` sets, `2^L ≤ n < 2^(L + 1)`, it is set `h = mix64(id) mod 2^(L + 1)`, or `h mod 2^L` if
set `h` does not exist yet (linear hashing; Litwin, VLDB 1980). A partition grows from one set to `M`, a power of two,
where all sets have equal size; capacities between powers of two come from `P`. `P` and `M` are the least for which a
full table has at most 4/5 of `WAYS` rows per set; `P` is at most `MAX_PARTITIONS`, and partitions have at least
`MIN_PARTITION_ROWS` rows.

A bucket has `WAYS` slots: slot = bucket · WAYS + way. The home bucket of set `s` of partition `p` is `s · P + p`. If
all its ways are used, a row is in an overflow bucket of its partition, from `M · P` on, until a way is freed. A row's
slot affects only speed, not results.
"""

import functools
from collections import namedtuple
from typing import Any

import torch

from tritonemb.kernels.triton_utils import jit, mix, tl
from tritonemb.layout import DIGEST_SHIFT, MAX_ROWS_PER_SET, MAX_USES, WAYS, DynamicIndex, dynamic_rows, mix64

_WAYS, _DIGEST_SHIFT, _MAX_ROWS_PER_SET, _MAX_USES = map(tl.constexpr, (WAYS, DIGEST_SHIFT, MAX_ROWS_PER_SET, MAX_USES))
_SIZES = "partitions", "max_rows", "num_buckets", "first_partition"
Pointers: Any = namedtuple("Parts", ("ids", "uses", *DynamicIndex._fields[1:], *_SIZES))  # type: ignore[misc]
FIELDS = tl.constexpr(len(Pointers._fields) - 1)  # int64 per index in memory: addresses and sizes


@jit
def _int32_at(address):
    return tl.load(address).to(tl.pointer_type(tl.int32))


@jit
def index_at(indexes, table):
    """Load the index of a table, or of a tile of tables, from `_index_fields`. Numbers of buckets fit in 32 bits."""
    fields = indexes + table * FIELDS
    return Pointers(  # type: ignore[call-arg]
        tl.load(fields).to(tl.pointer_type(tl.int64)), _int32_at(fields) + 2,
        tl.multiple_of(tl.load(fields + 1).to(tl.pointer_type(tl.uint8)), 16),
        _int32_at(fields + 2), _int32_at(fields + 3), _int32_at(fields + 4), _int32_at(fields + 5),
        _int32_at(fields + 6), _int32_at(fields + 7), _int32_at(fields + 8),
        tl.load(fields + 9).to(tl.pointer_type(tl.int64)), tl.load(fields + 10).to(tl.int32),
        tl.load(fields + 11).to(tl.int32), tl.load(fields + 12).to(tl.int32), tl.load(fields + 13).to(tl.int32),
    )  # fmt: skip


@jit
def _set_number(hash64, sets):
    """Return the number of an id's set in its partition: its hash modulo a power of two."""
    mask = sets
    for level in tl.static_range(5):
        mask |= mask >> (1 << level)
    number = hash64.to(tl.int32) & mask
    return tl.where(number < sets, number, number & (mask >> 1))


@jit
def _digest_of(hash64):
    return tl.maximum((hash64 >> _DIGEST_SHIFT).to(tl.int32) & 255, 1)


@jit
def _equal_bytes(words, bytes):
    """Compare int32 `words` bytewise with `bytes`: 1 in each equal byte, 0 in the others."""
    difference = words ^ bytes
    return ~(((difference & 0x7F7F7F7F) + 0x7F7F7F7F) | difference) >> 7 & 0x01010101


@jit
def _lowest_bit(bits):
    """Return the position of the lowest set bit of int32 `bits`: the exponent of its float."""
    return ((bits & -bits).to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@jit
def look_up(index, ids, valid):
    """Look up a tile of ids, each in its own index: slots and rows, -1 for unknown ids; and their partitions."""
    # Partition, home bucket and digest.
    hash64, zero, word = mix(ids), ids * 0, tl.arange(0, _WAYS // 4)[None, :]
    partition = ((hash64 >> 32) & 0xFFFFFFFF) * tl.load(index.shard + zero, mask=valid, other=1) >> 32
    partition = (partition - tl.load(index.shard + 1 + zero, mask=valid, other=0)).to(tl.int32)
    sets = tl.load(index.num_sets + partition, mask=valid, other=1)
    home, digest = _set_number(hash64, sets) * index.partitions + partition, _digest_of(hash64) * 0x01010101
    bucket, remaining = home, valid.to(tl.int32)  # rows to compare: 1, then the overflow rows
    slot, row = zero - 1, home * 0 - 1
    while tl.max(remaining, 0) > 0:
        # Compare the bucket's digests, four per word; `ways` has a bit per equal one.
        begin = bucket.to(tl.int64) * _WAYS
        words = (index.digests + begin).to(tl.pointer_type(tl.int32))[:, None] + word
        words = tl.load(words, mask=remaining[:, None] > 0, other=0)
        ways = tl.sum((_equal_bytes(words, digest[:, None]) * 0x10204080 >> 28 & 15) << 4 * word, 1)
        # Compare the ids of the ways, two per iteration: few buckets have more equal digests.
        while tl.max((ways != 0).to(tl.int32), 0) > 0:
            second_ways = ways & (ways - 1)
            first_way, second_way = _lowest_bit(ways), _lowest_bit(second_ways)
            first_row = tl.load(index.rows + begin + first_way, mask=ways != 0, other=0)
            second_row = tl.load(index.rows + begin + second_way, mask=second_ways != 0, other=0)
            is_first = tl.load(index.ids + 2 * first_row.to(tl.int64), mask=ways != 0, other=~ids) == ids
            is_second = tl.load(index.ids + 2 * second_row.to(tl.int64), mask=second_ways != 0, other=~ids) == ids
            row = tl.where(is_first, first_row, tl.where(is_second, second_row, row))
            slot = tl.where(is_first | is_second, begin + tl.where(is_first, first_way, second_way), slot)
            ways = tl.where(row < 0, second_ways & (second_ways - 1), 0)
        # Continue with overflow buckets if the set has overflow rows, until all of the partition's are compared.
        is_home, unknown = bucket == home, (remaining > 0) & (row < 0)
        has_overflow = tl.load(index.overflowed + home, mask=is_home & unknown, other=0) > 0
        overflow = tl.load(index.num_overflow + partition, mask=has_overflow, other=0)
        num_used = _WAYS - tl.sum(_equal_bytes(words, 0) * 0x01010101 >> 24, 1)
        remaining = tl.where(is_home, overflow, tl.where(unknown, remaining - num_used, 0))
        bucket = tl.maximum(bucket + index.partitions, index.num_buckets + partition)
    return slot, row, partition


# The functions below run in a program of one warp that owns a partition: barriers order writes and reads of its lanes.


@jit
def _load_bucket(index, bucket, sets):
    """Load a bucket: digests and rows, the rows' ids, and the set numbers of the ids, -1 in empty ways."""
    ways, begin = tl.arange(0, _WAYS), bucket.to(tl.int64) * _WAYS
    digests = tl.load(index.digests + begin + ways)
    rows = tl.load(index.rows + begin + ways, mask=digests != 0, other=0)
    ids = tl.load(index.ids + 2 * rows.to(tl.int64), mask=digests != 0, other=0)
    return digests, rows, ids, tl.where(digests != 0, _set_number(mix(ids), sets), -1)


@jit
def _empty_way(index, bucket):
    """Return the first empty way of a bucket, `WAYS` if it is full."""
    ways = tl.arange(0, _WAYS)
    return tl.min(tl.where(tl.load(index.digests + bucket.to(tl.int64) * _WAYS + ways) == 0, ways, _WAYS), 0)


@jit
def _return_from_overflow(index, partition, number, sets):
    """Move rows of a set from overflow buckets to empty ways of its home bucket."""
    home, bucket, ways = number * index.partitions + partition, index.num_buckets + partition, tl.arange(0, _WAYS)
    remaining, other_overflow = tl.load(index.overflowed + home), tl.load(index.num_overflow + partition)
    other_overflow -= remaining
    # One row per iteration, the next overflow bucket if it has none.
    empty = _empty_way(index, home)
    while (remaining > 0) & (empty < _WAYS):
        digests, rows, _, numbers = _load_bucket(index, bucket, sets)
        way = tl.max(tl.where(numbers == number, ways, -1), 0)
        if way >= 0:
            target = home.to(tl.int64) * _WAYS + empty + 0 * ways
            tl.store(index.digests + target, digests, mask=ways == way)
            tl.store(index.rows + target, rows, mask=ways == way)
            tl.store(index.digests + bucket.to(tl.int64) * _WAYS + way, 0)
            remaining -= 1
            tl.debug_barrier()
            empty = _empty_way(index, home)
        else:
            bucket += index.partitions
    tl.store(index.overflowed + home, remaining)
    tl.store(index.num_overflow + partition, other_overflow + remaining)
    tl.debug_barrier()


@jit
def remove(index, partition, slot):
    """Remove the row of a slot from the index, and push it to the partition's free rows."""
    row, sets = tl.load(index.rows + slot).to(tl.int64), tl.load(index.num_sets + partition)
    number, allocated = _set_number(mix(tl.load(index.ids + 2 * row)), sets), tl.load(index.num_allocated + partition)
    home, num_rows = number * index.partitions + partition, tl.load(index.num_rows + partition)
    tl.store(index.free + (allocated - num_rows) * index.partitions + partition, row)
    tl.store(index.uses + 4 * row, _MAX_USES)  # above every step: free rows are never counted as evictable
    tl.store(index.num_rows + partition, num_rows - 1)
    tl.store(index.digests + slot, 0)
    if (slot // _WAYS).to(tl.int32) != home:
        tl.store(index.overflowed + home, tl.load(index.overflowed + home) - 1)
        tl.store(index.num_overflow + partition, tl.load(index.num_overflow + partition) - 1)
    tl.debug_barrier()
    _return_from_overflow(index, partition, number, sets)


@jit
def find_victim(index, partition, hash64, sets, step, max_step, half_life):
    """Return the slot of the row to evict for an id, of its set and the next one, else of the next that has one; or -1.

    Rows compare by (aged count, last step, id); the first two are packed in one int64 key.
    """
    number = _set_number(hash64, sets)
    victim, no_key, sets_left = tl.full((), -1, tl.int64), tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64), sets
    min_key, min_id = no_key, no_key
    while ((victim < 0) | (sets_left == sets - 1)) & (sets_left > 0):
        sets_left -= 1
        # Least key of the set's rows, in the home bucket and in overflow buckets.
        home = number * index.partitions + partition
        bucket, remaining = home, tl.load(index.overflowed + home) + 1
        while remaining > 0:
            # Keys of the bucket's rows of this set; `no_key` for others and for rows that may not be evicted.
            _, rows, ids, numbers = _load_bucket(index, bucket, sets)
            in_set, ways = numbers == number, tl.arange(0, _WAYS)
            uses = index.uses + 4 * rows.to(tl.int64)
            last_step, count = tl.load(uses, mask=in_set, other=_MAX_USES), tl.load(uses + 1, mask=in_set, other=0)
            halvings = tl.minimum((step - last_step) // tl.maximum(half_life, 1), 31)
            key = tl.where(half_life > 0, count >> halvings, 0).to(tl.int64) << 32 | last_step
            key = tl.where(last_step <= max_step, key, no_key)
            low = tl.min(key, 0)
            low_id = tl.min(tl.where(key == low, ids, no_key), 0)
            if (low < min_key) | ((low == min_key) & (low < no_key) & (low_id < min_id)):
                victim = bucket.to(tl.int64) * _WAYS + tl.max(tl.where((key == low) & (ids == low_id), ways, -1), 0)
                min_key, min_id = low, low_id
            remaining -= tl.where(bucket == home, 1, tl.sum(in_set.to(tl.int32), 0))
            bucket = tl.maximum(bucket + index.partitions, index.num_buckets + partition)
        number = tl.where(number + 1 < sets, number + 1, 0)
    return victim


@jit
def _split(index, partition, sets):
    """Split a set: add set number `sets` to a partition, and move the rows that now belong to it."""
    # Move rows between the home buckets.
    old_number = _set_number(sets, sets)
    old_bucket, new_bucket = old_number * index.partitions + partition, sets * index.partitions + partition
    digests, rows, _, numbers = _load_bucket(index, old_bucket, sets + 1)
    moves, ways = numbers == sets, tl.arange(0, _WAYS)
    target = new_bucket.to(tl.int64) * _WAYS + tl.cumsum(moves.to(tl.int32), 0) - 1
    tl.store(index.digests + target, digests, mask=moves)
    tl.store(index.rows + target, rows, mask=moves)
    tl.store(index.digests + old_bucket.to(tl.int64) * _WAYS + ways, tl.zeros((_WAYS,), tl.uint8), mask=moves)
    tl.store(index.num_sets + partition, sets + 1)
    # Count the overflow rows of both sets, then return those that fit.
    old_overflow, new_overflow, bucket = tl.load(index.overflowed + old_bucket), 0, index.num_buckets + partition
    remaining = old_overflow
    while remaining > 0:
        numbers = _load_bucket(index, bucket, sets + 1)[3]
        num_moved = tl.sum((numbers == sets).to(tl.int32), 0)
        new_overflow += num_moved
        remaining -= num_moved + tl.sum((numbers == old_number).to(tl.int32), 0)
        bucket += index.partitions
    tl.store(index.overflowed + old_bucket, old_overflow - new_overflow)
    tl.store(index.overflowed + new_bucket, new_overflow)
    tl.debug_barrier()
    _return_from_overflow(index, partition, old_number, sets + 1)
    _return_from_overflow(index, partition, sets, sets + 1)


@jit
def insert(index, partition, hash64, sets, row, num_rows):
    """Insert a row into its home bucket, or an overflow bucket; split a set if the partition is full."""
    home = _set_number(hash64, sets) * index.partitions + partition
    # The home bucket, else the first overflow bucket with an empty way.
    bucket, way = home, _empty_way(index, home)
    if way == _WAYS:
        tl.store(index.overflowed + home, tl.load(index.overflowed + home) + 1)
        tl.store(index.num_overflow + partition, tl.load(index.num_overflow + partition) + 1)
    while way == _WAYS:
        bucket = tl.maximum(bucket + index.partitions, index.num_buckets + partition)
        way = _empty_way(index, bucket)
    slot = bucket.to(tl.int64) * _WAYS + way
    tl.store(index.digests + slot, _digest_of(hash64))
    tl.store(index.rows + slot, row)
    tl.debug_barrier()
    if (num_rows > sets * _MAX_ROWS_PER_SET) & (sets * index.partitions < index.num_buckets):
        _split(index, partition, sets)


class IndexRows:
    """Contents of an index for the references: rows by id, and per partition sets, free rows and allocated rows."""

    def __init__(self, index: DynamicIndex) -> None:
        self.index, self.num_sets, self.num_allocated = index, index.num_sets.tolist(), index.num_allocated.tolist()
        self.partitions = len(self.num_sets)
        self.max_rows = index.free.numel() // self.partitions
        self.max_sets = index.overflowed.numel() // self.partitions
        self.by_id = dict(zip(*(tensor.tolist() for tensor in dynamic_rows(index)), strict=True))
        num_rows = index.num_rows.tolist()
        num_free = [allocated - rows for allocated, rows in zip(self.num_allocated, num_rows, strict=True)]
        self.free = [index.free[p :: self.partitions][:number].tolist() for p, number in enumerate(num_free)]

    def store(self, index: DynamicIndex) -> None:
        """Write the contents to `index`, rows in ascending order of ids."""
        for tensor in (index.digests, index.overflowed, index.num_rows, index.num_overflow):
            tensor.zero_()
        index.num_sets.copy_(torch.tensor(self.num_sets))
        index.num_allocated.copy_(torch.tensor(self.num_allocated))
        for partition, free_rows in enumerate(self.free):
            index.free[partition :: self.partitions][: len(free_rows)] = torch.tensor(free_rows, dtype=torch.int32)
        for id, row in sorted(self.by_id.items()):
            partition, home = self.partition_of(id), self.home_bucket(id)
            overflow = range(index.overflowed.numel() + partition, index.digests.numel() // WAYS, self.partitions)
            ways = (slot for bucket in (home, *overflow) for slot in range(bucket * WAYS, bucket * WAYS + WAYS))
            slot = next(slot for slot in ways if index.digests[slot] == 0)
            index.digests[slot], index.rows[slot] = max(1, _hash(id) >> DIGEST_SHIFT & 255), row
            index.num_rows[partition] += 1
            if slot // WAYS != home:
                index.overflowed[home] += 1
                index.num_overflow[partition] += 1

    def partition_of(self, id: int) -> int:
        num_partitions, first_partition = self.index.shard.tolist()
        partition: int = ((_hash(id) >> 32) * num_partitions >> 32) - first_partition
        return partition

    def home_bucket(self, id: int) -> int:
        sets = self.num_sets[self.partition_of(id)]
        power = 1 << (sets.bit_length() - 1)
        number = _hash(id) % (2 * power)
        return (number if number < sets else number % power) * self.partitions + self.partition_of(id)

    def ids_of(self, partition: int) -> list[int]:
        return [id for id in self.by_id if self.partition_of(id) == partition]

    def count_missing(self, batch_ids: list[int], max_step: int) -> int:
        """Count ids of a batch for which no row is free or evictable."""
        partitions, num_missing = [self.partition_of(id) for id in batch_ids], 0
        for partition in set(partitions):
            ids = self.ids_of(partition)
            victims = sum(int(self.index.last_used[self.by_id[id]]) <= max_step for id in ids)
            num_missing += max(0, partitions.count(partition) - (self.max_rows - len(ids) + victims))
        return num_missing

    def insert(self, id: int, count: int, step: int, max_step: int, half_life: int) -> list[tuple[int, int]]:
        """Insert an id. Returns [(victim, its row)], or [] without an eviction."""
        partition, evicted = self.partition_of(id), []
        if len(self.ids_of(partition)) == self.max_rows:
            victim = self.choose_victim(id, step, max_step, half_life)
            evicted.append((victim, self.remove(victim)))
        if not self.free[partition]:
            self.free[partition].append(self.num_allocated[partition] * self.partitions + partition)
            self.num_allocated[partition] += 1
        row = self.by_id[id] = self.free[partition].pop()
        self.index.ids[row], self.index.last_used[row], self.index.counts[row] = id, step, min(MAX_USES, count)
        while self.num_sets[partition] < min(self.max_sets, -(-len(self.ids_of(partition)) // MAX_ROWS_PER_SET)):
            self.num_sets[partition] += 1
        return evicted

    def choose_victim(self, id: int, step: int, max_step: int, half_life: int) -> int:
        partition, sets = self.partition_of(id), self.num_sets[self.partition_of(id)]

        def key(id: int) -> tuple[int, int, int, int]:
            row = self.by_id[id]
            last_step, count = int(self.index.last_used[row]), int(self.index.counts[row])
            distance = (self.home_bucket(id) - home) // self.partitions % sets
            aged_count = count >> min(31, (step - last_step) // half_life) if half_life else 0
            return max(1, distance), aged_count, last_step, id

        home = self.home_bucket(id)
        return min((id for id in self.ids_of(partition) if self.index.last_used[self.by_id[id]] <= max_step), key=key)

    def remove(self, id: int) -> int:
        row = self.by_id.pop(id)
        self.free[self.partition_of(id)].append(row)
        self.index.last_used[row] = MAX_USES  # above every step: free rows are never counted as evictable
        return row


@functools.cache
def _hash(id: int) -> int:
    return int(mix64(torch.tensor([id]))) % 2**64
