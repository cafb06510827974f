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

**find**: 16 bytes an id; if it is known, 32 of digests, 4 of the row's number, and 8 of the id; **use**: 16 more.
**insert**: 69 an id, 32 of digests, and the sort by partition; for a victim 700 more, for a split 450. **remove**: as
find, and 60 for a row. **missing**: the sort, and 8 for each row that is counted. GPUs move 32 at least at a time.
A row takes 16 bytes beside its values, and at most 6.25 of slots where all sets are.
"""

import functools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.kernels.triton_utils import cdiv, jit, launch, mix, tl
from tritonemb.layout import DIGEST_SHIFT, GROWN_ROWS, MOST_USES, WAYS, DynamicIndex, dynamic_rows, mix64, partitions_of

FIND_IDS = 16  # of a program of a warp: 16 bytes of digests a lane
BLOCK = tl.constexpr(256)  # rows that are counted at once
_WAYS, _DIGEST_SHIFT, _GROWN_ROWS, _MOST_USES = map(tl.constexpr, (WAYS, DIGEST_SHIFT, GROWN_ROWS, MOST_USES))
_Parts: Any = namedtuple("_Parts", (*DynamicIndex._fields, "partitions", "most_rows", "num_places"))  # type: ignore[misc]


class DynamicInsertion(NamedTuple):
    """What an insertion did.

    Attributes:
        rows: int64 `[N]`, of the ids.
        evicted_ids, evicted_rows: int64 `[E]`, by ascending id.
    """

    rows: Tensor
    evicted_ids: Tensor
    evicted_rows: Tensor


@jit
def _number_of(mixed, sets):
    """Of an id's set among those of its partition."""
    mask = sets
    for level in tl.static_range(5):
        mask |= mask >> (1 << level)
    number = mixed & mask
    return tl.where(number < sets, number, number & (mask >> 1))


@jit
def _digest_of(mixed):
    return tl.maximum((mixed >> _DIGEST_SHIFT) & 255, 1).to(tl.uint8)


@jit
def _look_up(index, ids, valid):
    """Slots and rows of a tile of ids; -1 of those that are unknown."""
    ways, mixed = tl.arange(0, _WAYS)[None, :], mix(ids)
    partition = ((((mixed >> 32) & 0xFFFFFFFF) * tl.load(index.whole)) >> 32) - tl.load(index.whole + 1)
    sets = tl.load(index.num_sets + partition, mask=valid, other=1).to(tl.int64)
    place = _number_of(mixed, sets) * index.partitions + partition
    at, left = place, valid.to(tl.int32)  # the set, then overflow slots until all of the partition's are seen
    slot, row = ids * 0 - 1, ids * 0 - 1
    while tl.max(left, 0) > 0:
        slots = at[:, None] * _WAYS + ways
        digests = tl.load(index.digests + slots, mask=left[:, None] > 0, other=0)
        same = digests == _digest_of(mixed)[:, None]
        rows = tl.load(index.rows + slots, mask=same, other=0)
        same = same & (tl.load(index.ids + rows, mask=same, other=0) == ids[:, None])
        slot = tl.maximum(slot, tl.max(tl.where(same, slots, -1), 1))
        row = tl.maximum(row, tl.max(tl.where(same, rows, -1), 1))
        first, unknown = at == place, (left > 0) & (slot < 0)
        behind = tl.load(index.overflowed + place, mask=first & unknown, other=0) > 0
        overflow = tl.load(index.num_overflow + partition, mask=behind, other=0)
        left = tl.where(first, overflow, tl.where(unknown, left - tl.sum((digests != 0).to(tl.int32), 1), 0))
        at = tl.maximum(at + index.partitions, index.num_places + partition)
    return slot, row


@jit(varying=["step", "num_ids"])
def _find_kernel(index, ids, step, rows, before, num_ids, USE: tl.constexpr, IDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    valid = at < num_ids
    row = _look_up(index, tl.load(ids + at, mask=valid, other=0), valid)[1]
    tl.store(rows + at, row, mask=valid)
    if USE:
        known, used = row >= 0, index.uses + 2 * row
        tl.store(before + at, tl.load(used, mask=known, other=0), mask=valid)
        tl.store(used, tl.zeros((IDS,), tl.int32) + step, mask=known)
        counts, most = (used + 1).to(tl.pointer_type(tl.uint32)), tl.full((IDS,), _MOST_USES, tl.uint32)
        count = tl.atomic_add(counts, tl.full((IDS,), 1, tl.uint32), mask=known, sem="relaxed")
        tl.atomic_min(counts, most, mask=known & (count >= most), sem="relaxed")  # as often as it is too large


@jit(varying=["last"])
def _missing_kernel(index, starts, order, ids, last, missing):
    """For how many of a partition's new ids there is no row; it is looked for as many as there are."""
    partition = tl.program_id(0)
    made, first = tl.load(index.num_made + partition), 0
    left = tl.load(starts + partition + 1) - tl.load(starts + partition)
    left -= index.most_rows - tl.load(index.num_rows + partition)
    while (left > 0) & (first < made):
        number = first + tl.arange(0, BLOCK)
        row = number.to(tl.int64) * index.partitions + partition
        used = tl.load(index.uses + 2 * row, mask=number < made, other=_MOST_USES)
        left -= tl.sum((used <= last).to(tl.int32), 0)
        first += BLOCK
    tl.store(missing + partition, tl.maximum(left, 0))


# Below, a program of one warp has a partition to itself. Its lanes wait before they read what others have written.


@jit
def _tags(index, at, sets):
    """Slots at a place, their digests and rows, the rows' ids, and the number of each id's set."""
    slots = at * _WAYS + tl.arange(0, _WAYS)
    digests = tl.load(index.digests + slots)
    rows = tl.load(index.rows + slots, mask=digests != 0, other=0)
    ids = tl.load(index.ids + rows, mask=digests != 0, other=0)
    return slots, digests, rows, ids, tl.where(digests != 0, _number_of(mix(ids), sets), -1)


@jit
def _empty_way(index, at):
    """The first at a place, `WAYS` if there is none."""
    ways = tl.arange(0, _WAYS)
    return tl.min(tl.where(tl.load(index.digests + at * _WAYS + ways) == 0, ways, _WAYS), 0)


@jit
def _come_home(index, partition, number, sets):
    """Move rows of a set from overflow slots to its empty ways."""
    place, at, ways = number * index.partitions + partition, index.num_places + partition, tl.arange(0, _WAYS)
    left, others = tl.load(index.overflowed + place), tl.load(index.num_overflow + partition)
    others -= left
    way = _empty_way(index, place)
    while (left > 0) & (way < _WAYS):
        slots, digests, rows, _, numbers = _tags(index, at, sets)
        slot = tl.max(tl.where(numbers == number, slots, -1), 0)
        if slot >= 0:
            to = place * _WAYS + way + 0 * ways
            tl.store(index.digests + to, digests, mask=slots == slot)
            tl.store(index.rows + to, rows, mask=slots == slot)
            tl.store(index.digests + slot, 0)
            left -= 1
            tl.debug_barrier()
            way = _empty_way(index, place)
        else:
            at += index.partitions
    tl.store(index.overflowed + place, left)
    tl.store(index.num_overflow + partition, others + left)
    tl.debug_barrier()


@jit
def _free(index, partition, slot):
    """Take the row of a slot out of the index."""
    row, sets = tl.load(index.rows + slot).to(tl.int64), tl.load(index.num_sets + partition).to(tl.int64)
    number, made = _number_of(mix(tl.load(index.ids + row)), sets), tl.load(index.num_made + partition)
    place, held = number * index.partitions + partition, tl.load(index.num_rows + partition)
    tl.store(index.free + (made - held).to(tl.int64) * index.partitions + partition, row)
    tl.store(index.uses + 2 * row, _MOST_USES)  # so that it is never counted as one that may be evicted
    tl.store(index.num_rows + partition, held - 1)
    tl.store(index.digests + slot, 0)
    if slot // _WAYS != place:
        tl.store(index.overflowed + place, tl.load(index.overflowed + place) - 1)
        tl.store(index.num_overflow + partition, tl.load(index.num_overflow + partition) - 1)
    tl.debug_barrier()
    _come_home(index, partition, number, sets)


@jit
def _victim(index, partition, number, sets, step, last, half_life):
    """The slot of the row that is evicted for an id of a set."""
    victim, most = number * 0 - 1, number * 0 + 0x7FFFFFFFFFFFFFFF
    while victim < 0:
        place = number * index.partitions + partition
        at, left, least, least_id = place, tl.load(index.overflowed + place) + 1, most, most
        while left > 0:
            slots, _, rows, ids, numbers = _tags(index, at, sets)
            mine = numbers == number
            uses = index.uses + 2 * rows.to(tl.int64)
            used, count = tl.load(uses, mask=mine, other=_MOST_USES), tl.load(uses + 1, mask=mine, other=0)
            halvings = tl.minimum((step - used) // tl.maximum(half_life, 1), 31)
            key = tl.where(half_life > 0, count >> halvings, 0).to(tl.int64) << 32 | used
            key = tl.where(used <= last, key, most)
            low = tl.min(key, 0)
            low_id = tl.min(tl.where(key == low, ids, most), 0)
            if (low < least) | ((low == least) & (low < most) & (low_id < least_id)):
                victim = tl.max(tl.where((key == low) & (ids == low_id), slots, -1), 0)
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
    slots, digests, rows, _, numbers = _tags(index, place, sets + 1)
    moves = numbers == sets
    to = new * _WAYS + tl.cumsum(moves.to(tl.int32), 0) - 1
    tl.store(index.digests + to, digests, mask=moves)
    tl.store(index.rows + to, rows, mask=moves)
    tl.store(index.digests + slots, tl.zeros((_WAYS,), tl.uint8), mask=moves)
    tl.store(index.num_sets + partition, sets + 1)
    overflowed, of_new, at = tl.load(index.overflowed + place), 0, index.num_places + partition
    left = overflowed
    while left > 0:
        numbers = _tags(index, at, sets + 1)[4]
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
    return at * _WAYS + way


@jit(varying=["step", "last", "half_life"])
def _insert_kernel(index, starts, order, ids, occurrences, step, last, half_life, rows, evicted):
    partition = tl.program_id(0).to(tl.int64)
    for i in range(tl.load(starts + partition), tl.load(starts + partition + 1)):
        at = tl.load(order + i)
        id = tl.load(ids + at)
        mixed, sets = mix(id), tl.load(index.num_sets + partition).to(tl.int64)
        number = _number_of(mixed, sets)
        if tl.load(index.num_rows + partition) == index.most_rows:
            victim = _victim(index, partition, number, sets, step, last, half_life)
            evicted_row = tl.load(index.rows + victim)
            tl.store(evicted + 2 * at, tl.load(index.ids + evicted_row))
            tl.store(evicted + 2 * at + 1, evicted_row)
            _free(index, partition, victim)
        held, made = tl.load(index.num_rows + partition), tl.load(index.num_made + partition)
        row = made.to(tl.int64) * index.partitions + partition
        if held < made:
            row = tl.load(index.free + (made - held - 1).to(tl.int64) * index.partitions + partition).to(tl.int64)
        else:
            tl.store(index.num_made + partition, made + 1)
        tl.store(index.num_rows + partition, held + 1)
        tl.store(rows + at, row)
        tl.store(index.ids + row, id)
        tl.store(index.uses + 2 * row, step)
        tl.store(index.uses + 2 * row + 1, tl.minimum(tl.load(occurrences + at), _MOST_USES))
        slot = _empty_slot(index, partition, number)
        tl.store(index.digests + slot, _digest_of(mixed))
        tl.store(index.rows + slot, row)
        tl.debug_barrier()
        if (held + 1 > sets * _GROWN_ROWS) & (sets * index.partitions < index.num_places):
            _split(index, partition, sets)


@jit
def _remove_kernel(index, starts, order, ids, rows):
    partition, one = tl.program_id(0).to(tl.int64), tl.arange(0, 1)
    for i in range(tl.load(starts + partition), tl.load(starts + partition + 1)):
        at = tl.load(order + i) + one
        slot, row = _look_up(index, tl.load(ids + at), one == 0)
        tl.store(rows + at, row)
        if tl.max(slot, 0) >= 0:
            _free(index, partition, tl.max(slot, 0))


def _parts(index: DynamicIndex) -> Any:
    partitions = index.num_sets.numel()
    return _Parts._make((*index, partitions, index.ids.numel() // partitions, index.overflowed.numel()))


def _by_partition(index: DynamicIndex, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`starts`, `order` and ids: those of partition p are at positions `order[starts[p] … starts[p + 1] - 1]`."""
    partitions = partitions_of(ids, index.whole[0]) - index.whole[1]
    partitions, order = torch.sort(partitions.short(), stable=True)
    edges = torch.arange(index.num_sets.numel() + 1, dtype=torch.int16, device=ids.device)
    return torch.searchsorted(partitions, edges), order, ids.contiguous()


def _launch(kernel: Any, index: DynamicIndex, *args: Any) -> None:
    """A program for each partition."""
    launch(kernel, index.num_sets.shape, _parts(index), *args, num_warps=1)


def dynamic_find(index: DynamicIndex, ids: Tensor) -> Tensor:
    """One launch. As the reference."""
    return _find(index, ids, 0, False)[0]


def dynamic_use_(index: DynamicIndex, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """One launch. As the reference."""
    return _find(index, ids, step, True)


def dynamic_find_all(indexes: Sequence[DynamicIndex], ids: Sequence[Tensor]) -> list[Tensor]:
    """A launch for each. As the reference."""
    return [*map(dynamic_find, indexes, ids)]


def dynamic_use_all_(
    indexes: Sequence[DynamicIndex], ids: Sequence[Tensor], steps: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """A launch for each. As the reference."""
    return [*map(dynamic_use_, indexes, ids, steps)]


def _find(index: DynamicIndex, ids: Tensor, step: int, use: bool) -> tuple[Tensor, Tensor]:
    num_ids = ids.numel()
    rows, before = torch.empty_like(ids), torch.empty(num_ids if use else 0, dtype=torch.int32, device=ids.device)
    grid, args = (cdiv(num_ids, FIND_IDS),), (ids.contiguous(), step, rows, before, num_ids)
    launch(_find_kernel, grid, _parts(index), *args, USE=use, IDS=FIND_IDS, num_warps=1)
    return rows, before


def dynamic_unuse_(index: DynamicIndex, rows: Tensor, before: Tensor) -> None:
    """As the reference, by PyTorch, on any device."""
    rows, before = rows[rows >= 0], before[rows >= 0]
    earlier = before < index.used[rows]
    index.used[rows[earlier]] = before[earlier]
    index.counts.index_add_(0, rows, torch.full_like(before, -1))


def dynamic_missing(index: DynamicIndex, ids: Tensor, last: int) -> int:
    """A launch behind a sort, and the host waits. As the reference."""
    missing = torch.empty_like(index.num_sets)
    _launch(_missing_kernel, index, *_by_partition(index, ids), last, missing)
    return int(missing.sum())


def dynamic_insert_(
    index: DynamicIndex, ids: Tensor, occurrences: Tensor, step: int, last: int, half_life: int
) -> DynamicInsertion:
    """Two launches behind a sort; the host waits for how many are missing, and for the victims. As the reference."""
    programs, missing = _by_partition(index, ids), torch.zeros_like(index.num_sets)
    _launch(_missing_kernel, index, *programs, last, missing)
    if number := int(missing.sum()):
        raise ValueError(f"{number:,} of {ids.numel():,} new ids find no room, and nothing was inserted")
    rows, evicted = torch.empty_like(ids), ids.new_full((ids.numel(), 2), -1)
    _launch(_insert_kernel, index, *programs, occurrences.contiguous(), step, last, half_life, rows, evicted)
    return insertion(rows, evicted)


def insertion(rows: Tensor, evicted: Tensor) -> DynamicInsertion:
    """Of ids' rows, and the victim's id and row for each, or -1; int64 `[N]` and `[N, 2]`."""
    evicted_ids, evicted_rows = evicted[evicted[:, 1] >= 0].T
    evicted_ids, order = evicted_ids.sort()
    return DynamicInsertion(rows, evicted_ids, evicted_rows[order])


def dynamic_remove_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """A launch behind a sort. As the reference."""
    rows = torch.empty_like(ids)
    _launch(_remove_kernel, index, *_by_partition(index, ids), rows)
    return rows


def dynamic_expired(index: DynamicIndex, partition: int, last: int) -> Tensor:
    """As the reference, by PyTorch, on any device. A freed row counts as used."""
    partitions = index.num_sets.numel()
    rows = slice(partition, int(index.num_made[partition]) * partitions, partitions)
    return index.ids[rows][index.used[rows] <= last].sort().values


def dynamic_find_reference(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Rows int64 `[N]` of ids int64 `[N]` in any order, -1 of those that are unknown."""
    known = _Rows(index).by_id
    return torch.tensor([known.get(id, -1) for id in ids.tolist()], dtype=torch.int64, device=ids.device)


def dynamic_use_reference_(index: DynamicIndex, ids: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Find a batch's ids, which may occur several times, and note that they are used in a step, once an occurrence.

    Returns:
        rows int64 `[N]`, as `dynamic_find`; and int32 `[N]` for `dynamic_unuse_`: of one occurrence of each id the
        step in which it was used before, of the others that one or `step`.
    """
    rows, before = dynamic_find_reference(index, ids), torch.zeros(ids.numel(), dtype=torch.int32, device=ids.device)
    for position, row in enumerate(rows.tolist()):
        if row >= 0:
            before[position], index.used[row] = index.used[row], step
            index.counts[row] = min(MOST_USES, int(index.counts[row]) + 1)
    return rows, before


def dynamic_find_all_reference(indexes: Sequence[DynamicIndex], ids: Sequence[Tensor]) -> list[Tensor]:
    """`dynamic_find` of several tables, one at least."""
    return [*map(dynamic_find_reference, indexes, ids)]


def dynamic_use_all_reference_(
    indexes: Sequence[DynamicIndex], ids: Sequence[Tensor], steps: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """`dynamic_use_` of several tables, one at least."""
    return [*map(dynamic_use_reference_, indexes, ids, steps)]


def dynamic_unuse_reference_(index: DynamicIndex, rows: Tensor, before: Tensor) -> None:
    """Undo `dynamic_use_`, of a batch that is refused. A count that had reached `MOST_USES` is less."""
    for row, step in zip(rows.tolist(), before.tolist(), strict=True):
        if row >= 0:
            index.used[row] = min(step, int(index.used[row]))
            index.counts[row] -= 1


def dynamic_missing_reference(index: DynamicIndex, ids: Tensor, last: int) -> int:
    """For how many of new ids there is no row, where those used after the step `last` are not evicted."""
    return sum(max(0, needed - room) for needed, room in _Rows(index).room_for(ids.tolist(), last))


def dynamic_insert_reference_(
    index: DynamicIndex, ids: Tensor, occurrences: Tensor, step: int, last: int, half_life: int
) -> DynamicInsertion:
    """Give rows to new ids; ValueError, before anything changes, if some are `dynamic_missing`.

    Args:
        ids: int64 `[N]`, distinct, ascending, and unknown.
        occurrences: int64 `[N]`, of each.
        step: of the batch.
        last: rows that were used after this step are not evicted.
        half_life: in steps, of counts for "lfu", at least 1; 0 for "lru".
    """
    if missing := dynamic_missing_reference(index, ids, last):
        raise ValueError(f"{missing:,} of {ids.numel():,} new ids find no room, and nothing was inserted")
    rows, batch = _Rows(index), ids.tolist()
    pairs = zip(batch, occurrences.tolist(), strict=True)
    evicted = [victim for id, count in pairs for victim in rows.insert(id, count, step, last, half_life)]
    rows.store(index)
    numbers = [rows.by_id[id] for id in batch], sorted(id for id, _ in evicted), [row for _, row in sorted(evicted)]
    return DynamicInsertion(*(torch.tensor(each, dtype=torch.int64, device=ids.device) for each in numbers))


def dynamic_remove_reference_(index: DynamicIndex, ids: Tensor) -> Tensor:
    """Remove distinct ids int64 `[N]`. Rows int64 `[N]` that they had, -1 of those that are unknown."""
    rows = _Rows(index)
    found = [rows.remove(id) if id in rows.by_id else -1 for id in ids.tolist()]
    rows.store(index)
    return torch.tensor(found, dtype=torch.int64, device=ids.device)


def dynamic_expired_reference(index: DynamicIndex, partition: int, last: int) -> Tensor:
    """int64 `[n]`, ascending: ids of a partition whose rows were not used after the step `last`."""
    rows = _Rows(index)
    old = [id for id, row in rows.by_id.items() if rows.partition(id) == partition and index.used[row] <= last]
    return torch.tensor(sorted(old), dtype=torch.int64, device=index.ids.device)


class _Rows:
    """The rows of an index: by id; and each partition's sets, free rows, and rows so far."""

    def __init__(self, index: DynamicIndex) -> None:
        self.index, self.num_sets, self.num_made = index, index.num_sets.tolist(), index.num_made.tolist()
        self.partitions = len(self.num_sets)
        self.most_rows = index.ids.numel() // self.partitions
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

    def room_for(self, batch: list[int], last: int) -> list[tuple[int, int]]:
        """For each partition of some ids, how many these are, and how many rows are free or may be evicted."""
        wanted, found = [self.partition(id) for id in batch], []
        for partition in set(wanted):
            held = self.of(partition)
            victims = sum(int(self.index.used[self.by_id[id]]) <= last for id in held)
            found.append((wanted.count(partition), self.most_rows - len(held) + victims))
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
        return row


@functools.cache
def _mixed(id: int) -> int:
    return int(mix64(torch.tensor([id]))) % 2**64
