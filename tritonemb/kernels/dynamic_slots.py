"""Where the rows of a dynamic table's index are: Triton functions of its slots, and the rows by id, for references.

A `DynamicIndex` has `P` partitions of `C = ceil(capacity / P)` rows; row `k` of partition `p` is row `k · P + p` of the
table, so memory fills from its beginning. An id's row never moves. Bits of `mix64(id)` decide: the high word times `P`,
divided by 2^32, is the partition; from `DIGEST_SHIFT` on stands the digest; the lowest are the set's. Of a partition's
`n` sets, `2^L ≤ n < 2^(L + 1)`, that is set `h = mix64(id) mod 2^(L + 1)`, or `h mod 2^L` if there is no set `h`
(linear hashing; Litwin, VLDB 1980). A partition begins with one set, and has `M`, a power of two, in the end, so that
all sets are the same size then; `P` is what gives capacity between. `P` and `M` are the fewest sets for which a full
table has at most 4/5 of `WAYS` rows a set, `P` is at most `MAX_PARTITIONS`, and partitions have
`MIN_PARTITION_ROWS` rows.

Set `s` of partition `p` is at place `s · P + p`; slot = place · WAYS + way. A row whose set has no empty way is in an
overflow slot of its partition, at places from `M · P` on, until one is empty. Where a row's slot is has no effect on
anything but time.
"""

import functools
from collections import namedtuple
from typing import Any

import torch

from tritonemb.kernels.triton_utils import jit, mix, tl
from tritonemb.layout import DIGEST_SHIFT, MAX_ROWS_PER_SET, MAX_USES, WAYS, DynamicIndex, dynamic_rows, mix64

_WAYS, _DIGEST_SHIFT, _MAX_ROWS_PER_SET, _MAX_USES = map(tl.constexpr, (WAYS, DIGEST_SHIFT, MAX_ROWS_PER_SET, MAX_USES))
_SIZES = "partitions", "most_rows", "num_places", "first"
Parts: Any = namedtuple("Parts", ("ids", "uses", *DynamicIndex._fields[1:], *_SIZES))  # type: ignore[misc]
FIELDS = tl.constexpr(len(Parts._fields) - 1)  # of an index whose addresses and sizes are in memory, int64


@jit
def _int32_at(address):
    return tl.load(address).to(tl.pointer_type(tl.int32))


@jit
def index_at(indexes, table):
    """The index of a table, or those of a tile of tables; see `_addresses`. Numbers of places fit in 32 bits."""
    at = indexes + table * FIELDS
    return Parts(  # type: ignore[call-arg]
        tl.load(at).to(tl.pointer_type(tl.int64)), _int32_at(at) + 2,
        tl.multiple_of(tl.load(at + 1).to(tl.pointer_type(tl.uint8)), 16),
        _int32_at(at + 2), _int32_at(at + 3), _int32_at(at + 4), _int32_at(at + 5), _int32_at(at + 6),
        _int32_at(at + 7), _int32_at(at + 8), tl.load(at + 9).to(tl.pointer_type(tl.int64)),
        tl.load(at + 10).to(tl.int32), tl.load(at + 11).to(tl.int32), tl.load(at + 12).to(tl.int32),
        tl.load(at + 13).to(tl.int32),
    )  # fmt: skip


@jit
def _number_of(mixed, sets):
    """Of an id's set among those of its partition."""
    mask = sets
    for level in tl.static_range(5):
        mask |= mask >> (1 << level)
    number = mixed.to(tl.int32) & mask
    return tl.where(number < sets, number, number & (mask >> 1))


@jit
def _digest_of(mixed):
    return tl.maximum((mixed >> _DIGEST_SHIFT).to(tl.int32) & 255, 1)


@jit
def _equal_bytes(words, bytes):
    """1 in each byte of int32 `words` that equals that of `bytes`, 0 in the others."""
    different = words ^ bytes
    return ~(((different & 0x7F7F7F7F) + 0x7F7F7F7F) | different) >> 7 & 0x01010101


@jit
def _lowest_bit(bits):
    """The number of the lowest of int32 `bits`: the exponent of its float."""
    return ((bits & -bits).to(tl.uint32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@jit
def look_up(index, ids, valid):
    """Slots and rows of a tile of ids in tables of their own, -1 of those that are unknown; and their partitions."""
    mixed, zero, word = mix(ids), ids * 0, tl.arange(0, _WAYS // 4)[None, :]
    partition = ((mixed >> 32) & 0xFFFFFFFF) * tl.load(index.shard + zero, mask=valid, other=1) >> 32
    partition = (partition - tl.load(index.shard + 1 + zero, mask=valid, other=0)).to(tl.int32)
    sets = tl.load(index.num_sets + partition, mask=valid, other=1)
    place, digest = _number_of(mixed, sets) * index.partitions + partition, _digest_of(mixed) * 0x01010101
    at, left = place, valid.to(tl.int32)  # the set, then overflow slots until all of the partition's are seen
    slot, row = zero - 1, place * 0 - 1
    while tl.max(left, 0) > 0:
        begin = at.to(tl.int64) * _WAYS
        words = (index.digests + begin).to(tl.pointer_type(tl.int32))[:, None] + word  # of four digests each
        words = tl.load(words, mask=left[:, None] > 0, other=0)
        ways = tl.sum((_equal_bytes(words, digest[:, None]) * 0x10204080 >> 28 & 15) << 4 * word, 1)
        while tl.max((ways != 0).to(tl.int32), 0) > 0:  # of these, a bit each, two in a turn: few ids have more
            next_ways = ways & (ways - 1)
            way, next_way = _lowest_bit(ways), _lowest_bit(next_ways)
            way_row = tl.load(index.rows + begin + way, mask=ways != 0, other=0)
            next_row = tl.load(index.rows + begin + next_way, mask=next_ways != 0, other=0)
            is_way = tl.load(index.ids + 2 * way_row.to(tl.int64), mask=ways != 0, other=~ids) == ids
            is_next = tl.load(index.ids + 2 * next_row.to(tl.int64), mask=next_ways != 0, other=~ids) == ids
            row = tl.where(is_way, way_row, tl.where(is_next, next_row, row))
            slot = tl.where(is_way | is_next, begin + tl.where(is_way, way, next_way), slot)
            ways = tl.where(row < 0, next_ways & (next_ways - 1), 0)
        first, unknown = at == place, (left > 0) & (row < 0)
        behind = tl.load(index.overflowed + place, mask=first & unknown, other=0) > 0
        overflow = tl.load(index.num_overflow + partition, mask=behind, other=0)
        held = _WAYS - tl.sum(_equal_bytes(words, 0) * 0x01010101 >> 24, 1)
        left = tl.where(first, overflow, tl.where(unknown, left - held, 0))
        at = tl.maximum(at + index.partitions, index.num_places + partition)
    return slot, row, partition


# Below, a program of one warp has a partition to itself. Its lanes wait before they read what others have written.


@jit
def _tags(index, at, sets):
    """Digests and rows of the slots at a place, the rows' ids, and the number of each id's set."""
    ways, begin = tl.arange(0, _WAYS), at.to(tl.int64) * _WAYS
    digests = tl.load(index.digests + begin + ways)
    rows = tl.load(index.rows + begin + ways, mask=digests != 0, other=0)
    ids = tl.load(index.ids + 2 * rows.to(tl.int64), mask=digests != 0, other=0)
    return digests, rows, ids, tl.where(digests != 0, _number_of(mix(ids), sets), -1)


@jit
def _empty_way(index, at):
    """The first at a place, `WAYS` if there is none."""
    ways = tl.arange(0, _WAYS)
    return tl.min(tl.where(tl.load(index.digests + at.to(tl.int64) * _WAYS + ways) == 0, ways, _WAYS), 0)


@jit
def _return_from_overflow(index, partition, number, sets):
    """Move rows of a set from overflow slots to its empty ways."""
    place, at, ways = number * index.partitions + partition, index.num_places + partition, tl.arange(0, _WAYS)
    left, others = tl.load(index.overflowed + place), tl.load(index.num_overflow + partition)
    others -= left
    empty = _empty_way(index, place)
    while (left > 0) & (empty < _WAYS):
        digests, rows, _, numbers = _tags(index, at, sets)
        way = tl.max(tl.where(numbers == number, ways, -1), 0)
        if way >= 0:
            to = place.to(tl.int64) * _WAYS + empty + 0 * ways
            tl.store(index.digests + to, digests, mask=ways == way)
            tl.store(index.rows + to, rows, mask=ways == way)
            tl.store(index.digests + at.to(tl.int64) * _WAYS + way, 0)
            left -= 1
            tl.debug_barrier()
            empty = _empty_way(index, place)
        else:
            at += index.partitions
    tl.store(index.overflowed + place, left)
    tl.store(index.num_overflow + partition, others + left)
    tl.debug_barrier()


@jit
def free(index, partition, slot):
    """Take the row of a slot out of the index."""
    row, sets = tl.load(index.rows + slot).to(tl.int64), tl.load(index.num_sets + partition)
    number, made = _number_of(mix(tl.load(index.ids + 2 * row)), sets), tl.load(index.num_allocated + partition)
    place, held = number * index.partitions + partition, tl.load(index.num_rows + partition)
    tl.store(index.free + (made - held) * index.partitions + partition, row)
    tl.store(index.uses + 4 * row, _MAX_USES)  # so that it is never counted as one that may be evicted
    tl.store(index.num_rows + partition, held - 1)
    tl.store(index.digests + slot, 0)
    if (slot // _WAYS).to(tl.int32) != place:
        tl.store(index.overflowed + place, tl.load(index.overflowed + place) - 1)
        tl.store(index.num_overflow + partition, tl.load(index.num_overflow + partition) - 1)
    tl.debug_barrier()
    _return_from_overflow(index, partition, number, sets)


@jit
def victim_of(index, partition, mixed, sets, step, last, half_life):
    """The slot of the row that is evicted for an id of a set; -1 if none may be."""
    number = _number_of(mixed, sets)
    victim, most, sets_left = tl.full((), -1, tl.int64), tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64), sets
    while (victim < 0) & (sets_left > 0):
        sets_left -= 1
        place = number * index.partitions + partition
        at, left, least, least_id = place, tl.load(index.overflowed + place) + 1, most, most
        while left > 0:
            _, rows, ids, numbers = _tags(index, at, sets)
            in_set, ways = numbers == number, tl.arange(0, _WAYS)
            uses = index.uses + 4 * rows.to(tl.int64)
            used, count = tl.load(uses, mask=in_set, other=_MAX_USES), tl.load(uses + 1, mask=in_set, other=0)
            halvings = tl.minimum((step - used) // tl.maximum(half_life, 1), 31)
            key = tl.where(half_life > 0, count >> halvings, 0).to(tl.int64) << 32 | used
            key = tl.where(used <= last, key, most)
            low = tl.min(key, 0)
            low_id = tl.min(tl.where(key == low, ids, most), 0)
            if (low < least) | ((low == least) & (low < most) & (low_id < least_id)):
                victim = at.to(tl.int64) * _WAYS + tl.max(tl.where((key == low) & (ids == low_id), ways, -1), 0)
                least, least_id = low, low_id
            left -= tl.where(at == place, 1, tl.sum(in_set.to(tl.int32), 0))
            at = tl.maximum(at + index.partitions, index.num_places + partition)
        number = tl.where(number + 1 < sets, number + 1, 0)
    return victim


@jit
def _split(index, partition, sets):
    """Give a partition another set, which gets its rows of an older one."""
    old = _number_of(sets, sets)
    place, new = old * index.partitions + partition, sets * index.partitions + partition
    digests, rows, _, numbers = _tags(index, place, sets + 1)
    moves, ways = numbers == sets, tl.arange(0, _WAYS)
    to = new.to(tl.int64) * _WAYS + tl.cumsum(moves.to(tl.int32), 0) - 1
    tl.store(index.digests + to, digests, mask=moves)
    tl.store(index.rows + to, rows, mask=moves)
    tl.store(index.digests + place.to(tl.int64) * _WAYS + ways, tl.zeros((_WAYS,), tl.uint8), mask=moves)
    tl.store(index.num_sets + partition, sets + 1)
    overflowed, of_new, at = tl.load(index.overflowed + place), 0, index.num_places + partition
    left = overflowed
    while left > 0:
        numbers = _tags(index, at, sets + 1)[3]
        moved = tl.sum((numbers == sets).to(tl.int32), 0)
        of_new += moved
        left -= moved + tl.sum((numbers == old).to(tl.int32), 0)
        at += index.partitions
    tl.store(index.overflowed + place, overflowed - of_new)
    tl.store(index.overflowed + new, of_new)
    tl.debug_barrier()
    _return_from_overflow(index, partition, old, sets + 1)
    _return_from_overflow(index, partition, sets, sets + 1)


@jit
def add(index, partition, mixed, sets, row, num_rows):
    """Give a row a slot, in its id's set or behind all sets; then its partition of `num_rows` another set, if due."""
    place = _number_of(mixed, sets) * index.partitions + partition
    at, way = place, _empty_way(index, place)
    if way == _WAYS:
        tl.store(index.overflowed + place, tl.load(index.overflowed + place) + 1)
        tl.store(index.num_overflow + partition, tl.load(index.num_overflow + partition) + 1)
    while way == _WAYS:
        at = tl.maximum(at + index.partitions, index.num_places + partition)
        way = _empty_way(index, at)
    slot = at.to(tl.int64) * _WAYS + way
    tl.store(index.digests + slot, _digest_of(mixed))
    tl.store(index.rows + slot, row)
    tl.debug_barrier()
    if (num_rows > sets * _MAX_ROWS_PER_SET) & (sets * index.partitions < index.num_places):
        _split(index, partition, sets)


class IndexRows:
    """The rows of an index: by id; and each partition's sets, free rows, and rows so far."""

    def __init__(self, index: DynamicIndex) -> None:
        self.index, self.num_sets, self.num_allocated = index, index.num_sets.tolist(), index.num_allocated.tolist()
        self.partitions = len(self.num_sets)
        self.most_rows = index.entries.shape[0] // self.partitions
        self.most_sets = index.overflowed.numel() // self.partitions
        self.by_id = dict(zip(*(each.tolist() for each in dynamic_rows(index)), strict=True))
        held = index.num_rows.tolist()
        num_free = [made - rows for made, rows in zip(self.num_allocated, held, strict=True)]
        self.free = [index.free[p :: self.partitions][:number].tolist() for p, number in enumerate(num_free)]

    def store(self, index: DynamicIndex) -> None:
        for part in (index.digests, index.overflowed, index.num_rows, index.num_overflow):
            part.zero_()
        index.num_sets.copy_(torch.tensor(self.num_sets))
        index.num_allocated.copy_(torch.tensor(self.num_allocated))
        for partition, free in enumerate(self.free):
            index.free[partition :: self.partitions][: len(free)] = torch.tensor(free, dtype=torch.int32)
        for id, row in sorted(self.by_id.items()):
            partition, place = self.partition(id), self.place(id)
            overflow = range(index.overflowed.numel() + partition, index.digests.numel() // WAYS, self.partitions)
            ways = (slot for at in (place, *overflow) for slot in range(at * WAYS, at * WAYS + WAYS))
            slot = next(slot for slot in ways if index.digests[slot] == 0)
            index.digests[slot], index.rows[slot] = max(1, _mixed(id) >> DIGEST_SHIFT & 255), row
            index.num_rows[partition] += 1
            if slot // WAYS != place:
                index.overflowed[place] += 1
                index.num_overflow[partition] += 1

    def partition(self, id: int) -> int:
        whole, first = self.index.shard.tolist()
        number: int = ((_mixed(id) >> 32) * whole >> 32) - first
        return number

    def place(self, id: int) -> int:
        """Of an id's set."""
        sets = self.num_sets[self.partition(id)]
        power = 1 << (sets.bit_length() - 1)
        number = _mixed(id) % (2 * power)
        return (number if number < sets else number % power) * self.partitions + self.partition(id)

    def of(self, partition: int) -> list[int]:
        return [id for id in self.by_id if self.partition(id) == partition]

    def missing(self, batch: list[int], last: int) -> int:
        """For how many of some ids there is no row that is free or may be evicted."""
        wanted, missing = [self.partition(id) for id in batch], 0
        for partition in set(wanted):
            held = self.of(partition)
            victims = sum(int(self.index.used[self.by_id[id]]) <= last for id in held)
            missing += max(0, wanted.count(partition) - (self.most_rows - len(held) + victims))
        return missing

    def insert(self, id: int, count: int, step: int, last: int, half_life: int) -> list[tuple[int, int]]:
        """The victim and its row, if there is one."""
        partition, evicted = self.partition(id), []
        if len(self.of(partition)) == self.most_rows:
            victim = self.victim(id, step, last, half_life)
            evicted.append((victim, self.remove(victim)))
        if not self.free[partition]:
            self.free[partition].append(self.num_allocated[partition] * self.partitions + partition)
            self.num_allocated[partition] += 1
        row = self.by_id[id] = self.free[partition].pop()
        self.index.ids[row], self.index.used[row], self.index.counts[row] = id, step, min(MAX_USES, count)
        while self.num_sets[partition] < min(self.most_sets, -(-len(self.of(partition)) // MAX_ROWS_PER_SET)):
            self.num_sets[partition] += 1
        return evicted

    def victim(self, id: int, step: int, last: int, half_life: int) -> int:
        partition, sets = self.partition(id), self.num_sets[self.partition(id)]

        def key(id: int) -> tuple[int, int, int, int]:
            row = self.by_id[id]
            used, count = int(self.index.used[row]), int(self.index.counts[row])
            distance = (self.place(id) - first) // self.partitions % sets
            return distance, count >> min(31, (step - used) // half_life) if half_life else 0, used, id

        first = self.place(id)
        return min((id for id in self.of(partition) if self.index.used[self.by_id[id]] <= last), key=key)

    def remove(self, id: int) -> int:
        row = self.by_id.pop(id)
        self.free[self.partition(id)].append(row)
        self.index.used[row] = MAX_USES  # so that it is never counted as one that may be evicted
        return row


@functools.cache
def _mixed(id: int) -> int:
    return int(mix64(torch.tensor([id]))) % 2**64
