"""The index of a dynamic table: which row an id has, for any int64 id, and which row a new one gets.

A `DynamicIndex` has `P` partitions of `C = ceil(capacity / P)` rows; row `k` of partition `p` is row `k · P + p` of the
table, so memory fills from its beginning. An id's row never moves. Bits of `mix64(id)` decide: the high word times `P`,
divided by 2^32, is the partition; from `DIGEST_SHIFT` on stands the digest; the lowest are the set's. Of a partition's
`n` sets, `2^L ≤ n < 2^(L + 1)`, that is set `h = mix64(id) mod 2^(L + 1)`, or `h mod 2^L` if there is no set `h`
(linear hashing; Litwin, VLDB 1980). A partition begins with one set, and has `M`, a power of two, in the end, so that
all sets are the same size then; `P` is what gives capacity between. `P` and `M` are the fewest sets for which a full
table has at most 4/5 of `WAYS` rows a set, `P` is at most `MOST_PARTITIONS`, and partitions have `LEAST_ROWS` rows.

Set `s` of partition `p` is at place `s · P + p`; slot = place · WAYS + way. A row whose set has no empty way is in an
overflow slot of its partition, at places from `M · P` on, until one is empty. Where a row's slot is has no effect on
anything but time.

**insert** of distinct new ids, ascending, in each partition: if it has `C` rows, the victim is freed: of the id's set,
the row with the least (used, id) ("lru") or (aged count, used, id) ("lfu") among those with `used ≤ last`; if there is
none, of the next set that has one. The id gets the row that was freed last, or one that was never used. Then, while the
partition has more than `GROWN_ROWS` rows a set and less than `M` sets, set `n - 2^L` is split. A partition belongs to
one task, so the result depends on the sequence of calls alone.

**Aged count**: `counts >> (step - used) / half_life`, at most by 31: a row that is not used loses half.

Batches of several tables are served together: each kernel reads the addresses of all tables' indexes.

**find**: 16 bytes an id; if it is known, 32 of digests, 4 of the row's number, and 8 of the id; **use**: 16 more,
beside the id. **insert**: 69 an id, 32 of digests, and the sort by partition; for a victim 700 more, for a split 450.
**remove**: as find, and 60 for a row. **missing**: the sort, and 8 for each row that is counted. GPUs move 32 at least.
A row takes 16 bytes beside its values, and at most 6.25 of slots where all sets are.
"""

import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb.kernels.triton_utils import cdiv, jit, last_at_most, launch, mix, on_device, pointers_to, tl
from tritonemb.layout import (
    DIGEST_SHIFT,
    GROWN_ROWS,
    MOST_USES,
    NO_KEY,
    WAYS,
    DynamicIndex,
    NewIds,
    Rule,
    dynamic_rows,
    mix64,
    nonzero,
    partitions_of,
)

FIND_IDS = tl.constexpr(32)  # of a program of a warp: a lane waits for two loads of 16 bytes of digests at once
BLOCK = tl.constexpr(256)  # rows that are counted at once
POSITIONS = 1024  # of a program that only moves numbers
_NO_KEY = tl.constexpr(NO_KEY)
_WAYS, _DIGEST_SHIFT, _GROWN_ROWS, _MOST_USES = map(tl.constexpr, (WAYS, DIGEST_SHIFT, GROWN_ROWS, MOST_USES))
_SIZES = "partitions", "most_rows", "num_places", "first"
_Parts: Any = namedtuple("_Parts", ("ids", "uses", *DynamicIndex._fields[1:], *_SIZES))  # type: ignore[misc]
_FIELDS, _FIRST = tl.constexpr(len(_Parts._fields) - 1), tl.constexpr(len(_Parts._fields) - 2)
_STEP, _LAST, _HALF_LIFE, _RULES = (tl.constexpr(n) for n in range(4))


@jit
def _int32_at(address):
    return tl.load(address).to(tl.pointer_type(tl.int32))


@jit
def _index_at(indexes, table):
    """The index of a table, or those of a tile of tables; see `_addresses`. Numbers of places fit in 32 bits."""
    at = indexes + table * _FIELDS
    return _Parts(  # type: ignore[call-arg]
        tl.load(at).to(tl.pointer_type(tl.int64)), _int32_at(at) + 2,
        tl.multiple_of(tl.load(at + 1).to(tl.pointer_type(tl.uint8)), 16),
        _int32_at(at + 2), _int32_at(at + 3), _int32_at(at + 4), _int32_at(at + 5), _int32_at(at + 6),
        _int32_at(at + 7), _int32_at(at + 8), tl.load(at + 9).to(tl.pointer_type(tl.int64)),
        tl.load(at + 10).to(tl.int32), tl.load(at + 11).to(tl.int32), tl.load(at + 12).to(tl.int32),
        tl.load(at + 13).to(tl.int32),
    )  # fmt: skip


@jit
def _rule(rules, table, step, RULE: tl.constexpr):
    return (tl.load(rules + table * _RULES + RULE) + (0 if RULE == _HALF_LIFE else step)).to(tl.int32)


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
def _look_up(index, ids, valid):
    """Slots and rows of a tile of ids in tables of their own, -1 of those that are unknown; and their partitions."""
    mixed, zero, word = mix(ids), ids * 0, tl.arange(0, _WAYS // 4)[None, :]
    partition = ((mixed >> 32) & 0xFFFFFFFF) * tl.load(index.whole + zero, mask=valid, other=1) >> 32
    partition = (partition - tl.load(index.whole + 1 + zero, mask=valid, other=0)).to(tl.int32)
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


@jit(varying=["num_keys", "step", "num_ids"])
def _find_kernel(indexes, bounds, tables, num_keys, ids, rules, step, rows, before, keys, num_ids, USE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * FIND_IDS + tl.arange(0, FIND_IDS)
    valid, key = at < num_ids, last_at_most(bounds, num_keys, at)
    inside = valid & (at >= tl.load(bounds + key)) & (at < tl.load(bounds + key + 1))
    table, id = tl.load(tables + key, mask=inside, other=-1), tl.load(ids + at, mask=valid, other=0)
    inside &= table >= 0
    table = tl.maximum(table, 0).to(tl.int32)
    index = _index_at(indexes, table)
    _, row, partition = _look_up(index, id, inside)
    tl.store(rows + at, tl.where(inside, row, id), mask=valid)
    if USE:
        known, used = inside & (row >= 0), index.uses + 4 * row.to(tl.int64)
        tl.store(keys + at, tl.where(inside & (row < 0), index.first + partition, _NO_KEY), mask=valid)
        tl.store(before + at, tl.load(used, mask=known, other=0), mask=valid)
        tl.store(used, _rule(rules, table, step, _STEP), mask=known)
        counts, most = (used + 1).to(tl.pointer_type(tl.uint32)), tl.full((FIND_IDS,), _MOST_USES, tl.uint32)
        count = tl.atomic_add(counts, tl.full((FIND_IDS,), 1, tl.uint32), mask=known, sem="relaxed")
        tl.atomic_min(counts, most, mask=known & (count >= most), sem="relaxed")  # as often as it is too large


@jit
def _in_order(keys, by_id, by_key, values, at, valid):
    position = tl.load(by_id + tl.load(by_key + at, mask=valid, other=0), mask=valid, other=0)
    return tl.load(keys + at, mask=valid, other=_NO_KEY), position, tl.load(values + position, mask=valid, other=0)


@jit(varying=["num_ids"])
def _head_kernel(keys, by_id, by_key, values, order, ids, heads, num_ids, POSITIONS: tl.constexpr):
    """Positions and ids in the order of two sorts, and 1 for the first position of each id."""
    at = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    valid, behind = at < num_ids, (at < num_ids) & (at > 0)
    key, position, id = _in_order(keys, by_id, by_key, values, at, valid)
    key_before, _, id_before = _in_order(keys, by_id, by_key, values, at - 1, behind)
    tl.store(order + at, position, mask=valid)
    tl.store(ids + at, id, mask=valid)
    head = (key != _NO_KEY) & ((key != key_before) | (id != id_before))
    tl.store(heads + at, head.to(tl.int32), mask=valid)


@jit(varying=["num_ids"])
def _distinct_kernel(
    indexes, num_tables, keys, numbers, sorted_ids, ids, begins, tables, admitted, num_ids, POSITIONS: tl.constexpr
):
    at = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    valid, behind = at < num_ids, (at <= num_ids) & (at > 0)
    key, number = tl.load(keys + at, mask=valid, other=_NO_KEY), tl.load(numbers + at, mask=valid, other=0)
    number_before = tl.load(numbers + at - 1, mask=behind, other=0)
    head = valid & (number != number_before)
    tl.store(admitted + at, valid, mask=valid)
    tl.store(ids + number - 1, tl.load(sorted_ids + at, mask=head, other=0), mask=head)
    tl.store(begins + number - 1, at.to(tl.int64), mask=head)
    tl.store(tables + number - 1, last_at_most(indexes + _FIRST, num_tables, key.to(tl.int64), _FIELDS), mask=head)
    end = (at <= num_ids) & (key == _NO_KEY)
    end &= (at == 0) | (tl.load(keys + at - 1, mask=behind, other=_NO_KEY) != _NO_KEY)
    tl.store(begins + number_before, at.to(tl.int64), mask=end)


@jit(varying=["step", "num_ids"])
def _room_kernel(indexes, num_tables, keys, numbers, admitted, rules, step, counts, starts, num_ids):
    """Where a partition's new ids are, and how many find no row; rows are looked at until there is one for each."""
    program = tl.program_id(0)
    table = last_at_most(indexes + _FIRST, num_tables, program, _FIELDS)
    index, counts, last = _index_at(indexes, table), counts + table * 5, _rule(rules, table, step, _LAST)
    partition = program - index.first
    key, two = program - 1 + tl.arange(0, 2), tl.arange(0, 2)
    last_key = last_at_most(keys, num_ids, key)
    ends = tl.where(tl.load(keys + last_key) <= key, last_key + 1, 0)  # of this partition's keys and those before
    end_ids = tl.load(numbers + ends - 1, mask=ends > 0, other=0)
    tl.store(starts + 2 * program + two, end_ids)
    first, end, first_id, end_id = tl.min(ends, 0), tl.max(ends, 0), tl.min(end_ids, 0), tl.max(end_ids, 0)
    if end > first:
        needed = first_id * 0
        for at in range(first_id, end_id, BLOCK):
            id = at + tl.arange(0, BLOCK)
            needed += tl.sum(tl.load(admitted + id, mask=id < end_id, other=0).to(tl.int32), 0)
        tl.atomic_add(counts, (end - first).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 1, (end_id - first_id).to(tl.int64), sem="relaxed")
        tl.atomic_add(counts + 2, needed.to(tl.int64), sem="relaxed")
        left = needed - (index.most_rows - tl.load(index.num_rows + partition))
        tl.atomic_add(counts + 4, tl.maximum(left, 0).to(tl.int64), sem="relaxed")
        made, first_row = tl.load(index.num_made + partition), 0
        while (left > 0) & (first_row < made):
            number = first_row + tl.arange(0, BLOCK)
            row = number * index.partitions + partition
            used = tl.load(index.uses + 4 * row.to(tl.int64), mask=number < made, other=_MOST_USES)
            left -= tl.sum((used <= last).to(tl.int32), 0)
            first_row += BLOCK
        tl.atomic_add(counts + 3, tl.maximum(left, 0).to(tl.int64), sem="relaxed")


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
def _come_home(index, partition, number, sets):
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
def _free(index, partition, slot):
    """Take the row of a slot out of the index."""
    row, sets = tl.load(index.rows + slot).to(tl.int64), tl.load(index.num_sets + partition)
    number, made = _number_of(mix(tl.load(index.ids + 2 * row)), sets), tl.load(index.num_made + partition)
    place, held = number * index.partitions + partition, tl.load(index.num_rows + partition)
    tl.store(index.free + (made - held) * index.partitions + partition, row)
    tl.store(index.uses + 4 * row, _MOST_USES)  # so that it is never counted as one that may be evicted
    tl.store(index.num_rows + partition, held - 1)
    tl.store(index.digests + slot, 0)
    if (slot // _WAYS).to(tl.int32) != place:
        tl.store(index.overflowed + place, tl.load(index.overflowed + place) - 1)
        tl.store(index.num_overflow + partition, tl.load(index.num_overflow + partition) - 1)
    tl.debug_barrier()
    _come_home(index, partition, number, sets)


@jit
def _victim(index, partition, number, sets, step, last, half_life):
    """The slot of the row that is evicted for an id of a set; -1 if none may be."""
    victim, most, sets_left = tl.full((), -1, tl.int64), tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64), sets
    while (victim < 0) & (sets_left > 0):
        sets_left -= 1
        place = number * index.partitions + partition
        at, left, least, least_id = place, tl.load(index.overflowed + place) + 1, most, most
        while left > 0:
            _, rows, ids, numbers = _tags(index, at, sets)
            mine, ways = numbers == number, tl.arange(0, _WAYS)
            uses = index.uses + 4 * rows.to(tl.int64)
            used, count = tl.load(uses, mask=mine, other=_MOST_USES), tl.load(uses + 1, mask=mine, other=0)
            halvings = tl.minimum((step - used) // tl.maximum(half_life, 1), 31)
            key = tl.where(half_life > 0, count >> halvings, 0).to(tl.int64) << 32 | used
            key = tl.where(used <= last, key, most)
            low = tl.min(key, 0)
            low_id = tl.min(tl.where(key == low, ids, most), 0)
            if (low < least) | ((low == least) & (low < most) & (low_id < least_id)):
                victim = at.to(tl.int64) * _WAYS + tl.max(tl.where((key == low) & (ids == low_id), ways, -1), 0)
                least, least_id = low, low_id
            left -= tl.where(at == place, 1, tl.sum(mine.to(tl.int32), 0))
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
    _come_home(index, partition, old, sets + 1)
    _come_home(index, partition, sets, sets + 1)


@jit
def _empty_slot(index, partition, number):
    place = number * index.partitions + partition
    at, way = place, _empty_way(index, place)
    if way == _WAYS:
        tl.store(index.overflowed + place, tl.load(index.overflowed + place) + 1)
        tl.store(index.num_overflow + partition, tl.load(index.num_overflow + partition) + 1)
    while way == _WAYS:
        at = tl.maximum(at + index.partitions, index.num_places + partition)
        way = _empty_way(index, at)
    return at.to(tl.int64) * _WAYS + way


@jit(varying=["step"])
def _insert_kernel(indexes, num_tables, starts, ids, begins, admitted, rules, step, rows, evicted, order, batch_rows):
    program = tl.program_id(0)
    table = last_at_most(indexes + _FIRST, num_tables, program, _FIELDS)
    index, half_life = _index_at(indexes, table), _rule(rules, table, step, _HALF_LIFE)
    last, step, partition = _rule(rules, table, step, _LAST), _rule(rules, table, step, _STEP), program - index.first
    for at in range(tl.load(starts + 2 * program), tl.load(starts + 2 * program + 1)):
        row, evicted_row = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
        if tl.load(admitted + at):
            id = tl.load(ids + at)
            mixed, sets = mix(id), tl.load(index.num_sets + partition)
            number = _number_of(mixed, sets)
            if tl.load(index.num_rows + partition) == index.most_rows:
                victim = _victim(index, partition, number, sets, step, last, half_life)
                evicted_row = tl.load(index.rows + victim)
                tl.store(evicted + 2 * at, tl.load(index.ids + 2 * evicted_row.to(tl.int64)))
                _free(index, partition, victim)
            held, made = tl.load(index.num_rows + partition), tl.load(index.num_made + partition)
            row = made * index.partitions + partition
            if held < made:
                row = tl.load(index.free + (made - held - 1) * index.partitions + partition)
            else:
                tl.store(index.num_made + partition, made + 1)
            tl.store(index.num_rows + partition, held + 1)
            entry = 2 * row.to(tl.int64)
            tl.store(index.ids + entry, id)
            tl.store(index.uses + 2 * entry, step)
            first_use, last_use = tl.load(begins + at), tl.load(begins + at + 1)
            tl.store(index.uses + 2 * entry + 1, tl.minimum(last_use - first_use, _MOST_USES).to(tl.int32))
            for use in range(first_use, last_use, BLOCK):
                uses = use + tl.arange(0, BLOCK)
                positions = tl.load(order + uses, mask=uses < last_use, other=0)
                tl.store(batch_rows + positions, row + 0 * uses, mask=uses < last_use)
            slot = _empty_slot(index, partition, number)
            tl.store(index.digests + slot, _digest_of(mixed))
            tl.store(index.rows + slot, row)
            tl.debug_barrier()
            if (held + 1 > sets * _GROWN_ROWS) & (sets * index.partitions < index.num_places):
                _split(index, partition, sets)
        tl.store(rows + at, row)
        tl.store(evicted + 2 * at + 1, evicted_row)


@jit
def _remove_kernel(index, starts, order, ids, rows):
    partition, one = tl.program_id(0), tl.arange(0, 1)
    for i in range(tl.load(starts + partition), tl.load(starts + partition + 1)):
        at = tl.load(order + i) + one
        slot, row, _ = _look_up(index, tl.load(ids + at), one == 0)
        tl.store(rows + at, row)
        if tl.max(slot, 0) >= 0:
            _free(index, partition, tl.max(slot, 0))


def _addresses(indexes: Sequence[DynamicIndex]) -> Tensor:
    """int64 `[T, 14]`, a `_Parts` each: addresses, sizes, and its first partition among those of all."""
    numbers, first = list[int](), 0
    for index in indexes:
        partitions = index.num_sets.numel()
        numbers += (*pointers_to(index), partitions, len(index.ids) // partitions, index.overflowed.numel(), first)
        first += partitions
    return on_device(numbers, indexes[0].ids.device)


def _rules_on(device: torch.device, rules: Sequence[Rule]) -> tuple[Tensor, int]:
    """int64 `[T, 3]`, steps as differences from the first one, so that they recur; and that one."""
    first = rules[0][0]
    return on_device([n for step, last, life in rules for n in (step - first, last - first, life)], device), first


def dynamic_find_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One launch. As the reference."""
    num_ids, device = values.numel(), values.device
    rows, (before, keys) = torch.empty_like(values), values.new_empty(2, num_ids if steps else 0, dtype=torch.int32)
    rules, step = _rules_on(device, [(step, step, 0) for step in steps or [0]])
    launch(
        _find_kernel, (cdiv(num_ids, FIND_IDS.value),), _addresses(indexes), bounds, on_device(tables, device),
        len(tables), values.contiguous(), rules, step, rows, before, keys, num_ids, USE=bool(steps), num_warps=1,
    )  # fmt: skip
    return rows, before, keys


def dynamic_new_ids(indexes: Sequence[DynamicIndex], values: Tensor, keys: Tensor) -> NewIds:
    """Two launches behind two sorts and a cumulated sum, over all positions. As the reference."""
    values, num_ids, grid = values.contiguous(), values.numel(), (cdiv(values.numel() + 1, POSITIONS),)
    by_id = values.sort(stable=True)[1]
    keys, by_key = keys[by_id].sort(stable=True)
    order, sorted_ids, ids = (torch.empty_like(values) for _ in range(3))
    begins, heads, tables = values.new_empty(num_ids + 1), torch.empty_like(keys), torch.empty_like(keys)
    admitted = torch.empty_like(keys, dtype=torch.bool)
    launch(_head_kernel, grid, keys, by_id, by_key, values, order, sorted_ids, heads, num_ids, POSITIONS=POSITIONS)
    numbers = heads.cumsum(0, dtype=torch.int32)
    launch(
        _distinct_kernel, grid, _addresses(indexes), len(indexes), keys, numbers, sorted_ids, ids, begins, tables,
        admitted, num_ids, POSITIONS=POSITIONS,
    )  # fmt: skip
    return NewIds(order, keys, numbers, ids, begins, tables, admitted)


def dynamic_room(indexes: Sequence[DynamicIndex], new: NewIds, rules: Sequence[Rule], counts: Tensor) -> Tensor:
    """One launch. As the reference."""
    num_programs, (by_table, step) = sum(index.num_sets.numel() for index in indexes), _rules_on(counts.device, rules)
    starts = torch.empty(num_programs, 2, dtype=torch.int32, device=counts.device)
    launch(
        _room_kernel, (num_programs,), _addresses(indexes), len(indexes), new.keys, new.numbers, new.admitted, by_table,
        step, counts, starts, new.keys.numel(), num_warps=1,
    )  # fmt: skip
    return starts


def dynamic_insert_(
    indexes: Sequence[DynamicIndex], new: NewIds, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """One launch. As the reference."""
    rows, evicted = torch.empty_like(new.ids), new.ids.new_empty(new.ids.numel(), 2)
    by_table, step = _rules_on(rows.device, rules)
    launch(
        _insert_kernel, starts.shape[:1], _addresses(indexes), len(indexes), starts, new.ids, new.begins, new.admitted,
        by_table, step, rows, evicted, new.order, batch_rows, num_warps=1,
    )  # fmt: skip
    return rows, evicted


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """A launch behind a sort. As the reference."""
    keys, order = torch.sort((partitions_of(ids, index.whole[0]) - index.whole[1]).int(), stable=True)
    edges = torch.arange(index.num_sets.numel() + 1, dtype=torch.int32, device=ids.device)
    starts, rows = torch.searchsorted(keys, edges), torch.empty_like(ids)
    sizes = index.num_sets.numel(), 0, index.overflowed.numel(), 0
    parts = _Parts._make((index.ids, index.uses, *index[1:], *sizes))
    launch(_remove_kernel, index.num_sets.shape, parts, starts, order, ids.contiguous(), rows, num_warps=1)
    return rows


def dynamic_find_reference_(
    indexes: Sequence[DynamicIndex], values: Tensor, bounds: Tensor, tables: Sequence[int],
    steps: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Find a batch's ids; with `steps`, note that they are used in these, of each table, once an occurrence.

    Args:
        values: int64 `[N]`.
        bounds: `[K + 1]`: the values of key `k` are `bounds[k] … bounds[k + 1] - 1`.
        tables: for each key, which of the indexes it looks up, or -1.

    Returns:
        int64 `[N]`: rows, -1 of unknown ids, and values of no dynamic table as they are. With `steps`, int32 `[N]` for
        `undo_use`: of one occurrence of each id the step in which it was used before, of the others that one or
        its table's; and int32 `[N]`: keys, see `NewIds`.
    """
    rows, ends = values.clone(), bounds.tolist()
    before, keys = torch.zeros_like(values, dtype=torch.int32), torch.full_like(values, NO_KEY, dtype=torch.int32)
    known = [_Rows(index).by_id for index in indexes]
    for begin, end, table in zip(ends, ends[1:], tables, strict=False):
        for position in range(begin, end) if table >= 0 else ():
            index, row = indexes[table], known[table].get(int(values[position]), -1)
            rows[position] = row
            if row < 0:
                keys[position] = table
            elif steps:
                before[position], index.used[row] = index.used[row], steps[table]
                index.counts[row] = min(MOST_USES, int(index.counts[row]) + 1)
    return rows, before, keys


def dynamic_new_ids_reference(indexes: Sequence[DynamicIndex], values: Tensor, keys: Tensor) -> NewIds:
    """The distinct ones of ids int64 `[N]` whose keys int32 `[N]` are not `NO_KEY`; there is nothing behind them."""
    return new_ids_by_torch(values, keys)


def new_ids_by_torch(values: Tensor, keys: Tensor) -> NewIds:
    """`dynamic_new_ids` by PyTorch, whose sizes the host waits for."""
    order = nonzero(keys != NO_KEY)
    ids, keys = values[order], keys[order]
    ascend = (keys[1:] > keys[:-1]) | ((keys[1:] == keys[:-1]) & (ids[1:] >= ids[:-1]))
    if not ascend.all():  # those of a checkpoint do
        by_id = ids.sort(stable=True).indices
        keys, by_key = keys[by_id].sort(stable=True)
        order, ids = order[by_id[by_key]], ids[by_id[by_key]]
    heads = torch.ones_like(keys, dtype=torch.bool)
    heads[1:] = (ids[1:] != ids[:-1]) | (keys[1:] != keys[:-1])
    firsts, numbers = nonzero(heads), heads.cumsum(0, dtype=torch.int32)
    begins = torch.cat([firsts, firsts.new_tensor([ids.numel()])])
    return NewIds(order, keys, numbers, ids[firsts], begins, keys[firsts], torch.ones_like(heads[firsts]))


def dynamic_room_reference(
    indexes: Sequence[DynamicIndex], new: NewIds, rules: Sequence[Rule], counts: Tensor
) -> Tensor:
    """Count what the new ids of a batch that are admitted need; `dynamic_insert_` takes the result.

    `counts`, int64 `[T, 5]` of zeros: for each table the positions of new ids, the distinct ones, those of these that
    need a row, those for which there is none, and the rows that are evicted for the others.
    """
    for table, (index, (_, last, _)) in enumerate(zip(indexes, rules, strict=True)):
        mine, content = new.tables == table, _Rows(index)
        wanted = new.ids[mine & new.admitted].tolist()
        missing, evicted = content.missing(wanted, last), content.missing(wanted, -(2**63))
        positions, distinct = int(new.begins.diff()[mine].sum()), int(mine.sum())
        counts[table] = torch.tensor([positions, distinct, len(wanted), missing, evicted])
    return new.begins


def dynamic_insert_reference_(
    indexes: Sequence[DynamicIndex], new: NewIds, starts: Tensor, rules: Sequence[Rule], batch_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Give rows to new ids that are admitted, for which there is room.

    Args:
        starts: of `dynamic_room`.
        batch_rows: int64 `[N]`, where the new rows are written, too, at all positions of these ids.

    Returns:
        int64 `[U]`: rows, -1 of ids that are not admitted; and `[U, 2]`: the id and the row that was evicted for each,
        the latter -1 without one.
    """
    rows, evicted = torch.full_like(new.ids, -1), new.ids.new_full((new.ids.numel(), 2), -1)
    pairs = zip(new.ids.tolist(), new.begins.diff().tolist(), new.tables.tolist(), strict=True)
    contents = [*map(_Rows, indexes)]
    for number, (id, count, table) in enumerate(pairs):
        if new.admitted[number]:
            for pair in contents[table].insert(id, count, *rules[table]):
                evicted[number] = torch.tensor(pair)
            rows[number] = contents[table].by_id[id]
    for index, content in zip(indexes, contents, strict=True):
        content.store(index)
    batch_rows.index_copy_(0, new.order, rows[new.numbers - 1])
    return rows, evicted


def dynamic_remove_reference_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Remove distinct ids int64 `[N]`. Rows int64 `[N]` that they had, -1 of those that are unknown."""
    rows = _Rows(index)
    found = [rows.remove(id) if id in rows.by_id else -1 for id in ids.tolist()]
    rows.store(index)
    return torch.tensor(found, dtype=torch.int64, device=ids.device)


class _Rows:
    """The rows of an index: by id; and each partition's sets, free rows, and rows so far."""

    def __init__(self, index: DynamicIndex) -> None:
        self.index, self.num_sets, self.num_made = index, index.num_sets.tolist(), index.num_made.tolist()
        self.partitions = len(self.num_sets)
        self.most_rows = index.entries.shape[0] // self.partitions
        self.most_sets = index.overflowed.numel() // self.partitions
        self.by_id = dict(zip(*(each.tolist() for each in dynamic_rows(index)), strict=True))
        held = index.num_rows.tolist()
        num_free = [made - rows for made, rows in zip(self.num_made, held, strict=True)]
        self.free = [index.free[p :: self.partitions][:number].tolist() for p, number in enumerate(num_free)]

    def store(self, index: DynamicIndex) -> None:
        for part in (index.digests, index.overflowed, index.num_rows, index.num_overflow):
            part.zero_()
        index.num_sets.copy_(torch.tensor(self.num_sets))
        index.num_made.copy_(torch.tensor(self.num_made))
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
        whole, first = self.index.whole.tolist()
        found: int = ((_mixed(id) >> 32) * whole >> 32) - first
        return found

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
        wanted, found = [self.partition(id) for id in batch], 0
        for partition in set(wanted):
            held = self.of(partition)
            victims = sum(int(self.index.used[self.by_id[id]]) <= last for id in held)
            found += max(0, wanted.count(partition) - (self.most_rows - len(held) + victims))
        return found

    def insert(self, id: int, count: int, step: int, last: int, half_life: int) -> list[tuple[int, int]]:
        """The victim and its row, if there is one."""
        partition, evicted = self.partition(id), []
        if len(self.of(partition)) == self.most_rows:
            victim = self.victim(id, step, last, half_life)
            evicted.append((victim, self.remove(victim)))
        if not self.free[partition]:
            self.free[partition].append(self.num_made[partition] * self.partitions + partition)
            self.num_made[partition] += 1
        row = self.by_id[id] = self.free[partition].pop()
        self.index.ids[row], self.index.used[row], self.index.counts[row] = id, step, min(MOST_USES, count)
        while self.num_sets[partition] < min(self.most_sets, -(-len(self.of(partition)) // GROWN_ROWS)):
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
        self.index.used[row] = MOST_USES  # so that it is never counted as one that may be evicted
        return row


@functools.cache
def _mixed(id: int) -> int:
    return int(mix64(torch.tensor([id]))) % 2**64
