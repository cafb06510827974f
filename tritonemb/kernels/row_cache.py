"""The directory of a row cache: which rows of a table lie on the device, in which slots, and which to evict.

A table with `S` sets has three tensors with an entry for each of its `S · WAYS` slots; more entries are left alone:

    tags  int64  row of the table that the slot holds, -1: none
    used  int64  when it was last used (policy "lru"), or how often (policy "lfu")
    pins  int32  batches in flight that use it: such a slot keeps its row

Slot = set · WAYS + way; a row may lie in any way of one set: `mix64(row) mod S`, both unsigned. `mix64` is the
finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64 bits: every bit of a row has a say in
its set. A table with no sets is not cached: its rows are on the device, row r in "slot" r, and nothing touches it.
Rows come as row groups give them, distinct and ascending, so each is looked up once a batch, and no two share a slot.

**look up**: one row of a tile reads the tags of its set at once.
Bytes a row: 16 for row and slot, `8 · WAYS` of tags; if it is there, 8 of pin, and 8 (lru) or 16 (lfu) of use.

**allocate**: misses are sorted by set, stably, so those of a set stand together in ascending order. The first of them
acts for all: it reads the set once, then gives ways away in turn, as many as there are, and writes what changed.
Bytes: 16 read and 12 written a row to find misses, and the sort, 12 a pass; `20 · WAYS` for each set with misses; 36
written for each row that gets a slot.

**translate**: each position finds its group by a binary search and takes its slot.
Bytes: `8 · N` filled, `4 · N` of order read, 8 written for each position of a group.

**move rows**: `destination[to_rows[i]] = source[from_rows[i]]`, as bytes, for any number of *pairs* of one row width. A
program copies a tile of one pair's rows: 16 bytes a lane if all are aligned, else the largest unit that divides them.
Bytes: 16 of indices a pair and row, and twice its row, once over the bus for pinned host memory (unified addressing).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb import layout
from tritonemb.kernels.triton_utils import (
    FIRST_ROW,
    INTEGERS,
    cdiv,
    field_at,
    jit,
    last_at_most,
    launch,
    mix,
    next_power_of_2,
    on_device,
    table_of,
    tl,
)
from tritonemb.layout import NO_ROW, mix64

WAYS, EMPTY = tl.constexpr(layout.WAYS), tl.constexpr(NO_ROW)
TAGS, USED, PINS = (tl.constexpr(part) for part in range(3))  # rows of `directory`, addresses
LOOK_UP_ROWS = 16  # of a program of two warps: four loads of 16 bytes a lane
ALLOCATE_SETS = 8  # of a program of one warp: so few that none waits long for the one with the most misses
BLOCK = 1024  # entries of a program
TO, TO_PITCH, TO_ROWS, FROM, FROM_PITCH, FROM_ROWS, ROW_BYTES, IS_WIDE, PAIR_SIZE = (tl.constexpr(n) for n in range(9))
WIDE_BYTES = 16
WIDE_UNITS = 2048  # of 8 bytes, of a program of four warps: eight loads of 16 bytes a lane
NARROW_UNITS = 1024  # likewise of smaller ones: eight loads, each of which needs addresses of its own
MOST_COLUMNS = 64  # units of a row copied at once; longer rows take turns


@jit
def _set_of(row, num_sets):
    """`set_of`; 0 where there are no sets."""
    return (mix(row).to(tl.uint64) % tl.maximum(num_sets, 1).to(tl.uint64)).to(tl.int64)


@jit
def _part(directory, num_tables, table, mask, PART: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the first of each table's tags, uses or pins."""
    address = tl.load(directory + PART * num_tables + table, mask=mask, other=0)
    pointer = address.to(tl.pointer_type(tl.int32 if PART == PINS else tl.int64))
    return tl.multiple_of(pointer, ALIGN)


@jit(varying=["num_rows"])
def _look_up_kernel(
    directory, tables, num_sets, rows, now, slots, num_tables, num_rows, LFU: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = group < num_rows
    linear = tl.load(rows + group, mask=valid, other=0)
    table = table_of(tables, num_tables, linear)
    row = linear - tl.load(field_at(tables, table, FIRST_ROW))
    sets = tl.load(num_sets + table)
    cached = valid & (sets > 0)
    first = _set_of(row, sets) * WAYS
    ways = tl.arange(0, WAYS)
    place = first[:, None] + ways[None, :]
    tags = _part(directory, num_tables, table, cached, TAGS, ALIGN)
    tag = tl.load(tags[:, None] + place, mask=cached[:, None] & (ways[None, :] >= 0), other=EMPTY)
    way = tl.max(tl.where(tag == row[:, None], ways[None, :], -1), 1)
    present = cached & (way >= 0)
    slot = first + way
    pin = _part(directory, num_tables, table, present, PINS, 4) + slot
    tl.store(pin, tl.load(pin, mask=present, other=0) + 1, mask=present)
    used = _part(directory, num_tables, table, present, USED, 8) + slot
    use = tl.zeros((ROWS,), tl.int64) + tl.load(now)
    if LFU:
        use = tl.load(used, mask=present, other=0) + 1
    tl.store(used, use, mask=present)
    slot = tl.where(present, slot, tl.where(sets == 0, row, -1))
    tl.store(slots + group, slot, mask=valid)


@jit(varying=["num_rows"])
def _miss_kernel(
    tables, num_sets, set_ends, rows, slots, keys, evicted, num_tables, no_set, num_rows, BLOCK: tl.constexpr,
):  # fmt: skip
    """`keys`: each miss's set among those of all tables, `no_set` for rows that need no slot."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = group < num_rows
    linear = tl.load(rows + group, mask=valid, other=0)
    table = table_of(tables, num_tables, linear)
    sets = tl.load(num_sets + table)
    miss = valid & (sets > 0) & (tl.load(slots + group, mask=valid, other=0) == -1)
    first_set = tl.load(set_ends + table) - sets
    key = tl.where(miss, first_set + _set_of(linear - tl.load(field_at(tables, table, FIRST_ROW)), sets), no_set)
    tl.store(keys + group, key.to(keys.dtype.element_ty), mask=valid)
    tl.store(evicted + group, tl.zeros((BLOCK,), tl.int64) - 1, mask=valid)


@jit(varying=["num_rows"])
def _allocate_kernel(
    directory, tables, num_sets, rows, keys, misses, now, slots, evicted, num_tables, no_set, num_rows,
    LFU: tl.constexpr, ALIGN: tl.constexpr, SETS: tl.constexpr,
):  # fmt: skip
    """Give slots to misses sorted by set, `keys`; `misses` says which rows they are."""
    start = tl.program_id(0).to(tl.int64) * SETS
    if tl.load(keys + start) < no_set:  # misses stand before all other rows
        place = start + tl.arange(0, SETS)
        key = tl.load(keys + place, mask=place < num_rows, other=no_set)
        before = tl.load(keys + place - 1, mask=(place > 0) & (place < num_rows), other=-1)
        live = (key < no_set) & (key != before)
        group = tl.load(misses + place, mask=live, other=0)
        linear = tl.load(rows + group, mask=live, other=0)
        table = table_of(tables, num_tables, linear)
        first_row = tl.load(field_at(tables, table, FIRST_ROW))
        first = _set_of(linear - first_row, tl.load(num_sets + table)) * WAYS
        ways = tl.arange(0, WAYS)
        slot = first[:, None] + ways[None, :]
        mask = live[:, None] & (ways[None, :] >= 0)
        tags = _part(directory, num_tables, table, live, TAGS, ALIGN)
        used = _part(directory, num_tables, table, live, USED, ALIGN)
        pins = _part(directory, num_tables, table, live, PINS, ALIGN)
        tag = tl.load(tags[:, None] + slot, mask=mask, other=0)
        use = tl.load(used[:, None] + slot, mask=mask, other=0)
        free = tl.load(pins[:, None] + slot, mask=mask, other=1) == 0
        stamp = tl.load(now)
        if LFU:
            stamp = stamp * 0 + 1
        while tl.max(live.to(tl.int32), 0) > 0:
            empty = tag == EMPTY
            any_empty = tl.max(empty.to(tl.int32), 1) > 0
            may = tl.where(any_empty[:, None], empty, free)
            rank = tl.where(any_empty[:, None], 0, use)
            least = tl.min(tl.where(may, rank, 0x7FFFFFFFFFFFFFFF), 1)
            way = tl.min(tl.where(may & (rank == least[:, None]), ways[None, :], WAYS), 1)
            live = live & (way < WAYS)
            chosen = live[:, None] & (ways[None, :] == way[:, None])
            row = linear - first_row
            tl.store(evicted + group, tl.sum(tl.where(chosen, tag, 0), 1), mask=live)
            tl.store(slots + group, first + way, mask=live)
            tl.store(tags + first + way, row, mask=live)
            tl.store(used + first + way, tl.zeros((SETS,), tl.int64) + stamp, mask=live)
            tl.store(pins + first + way, tl.full((SETS,), 1, tl.int32), mask=live)
            tag = tl.where(chosen, row[:, None], tag)
            free = free & (chosen == 0)
            place += 1
            inside = live & (place < num_rows)
            live = live & (tl.load(keys + place, mask=inside, other=no_set) == key)
            group = tl.load(misses + place, mask=live, other=0)
            linear = tl.load(rows + group, mask=live, other=0)


@jit(varying=["num_entries"])
def _translate_kernel(slots, starts, order, num_groups, values, num_entries, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    groups = tl.load(num_groups).to(tl.int32)
    inside = (entry < num_entries) & (entry < tl.load(starts + groups))
    position = tl.load(order + entry, mask=inside, other=0)
    group = last_at_most(starts, groups, entry)
    tl.store(values + position, tl.load(slots + group, mask=inside, other=-1), mask=inside)


@jit
def _rows(address, pitch, row, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the first unit of rows `[ROWS]`."""
    place = address + row * pitch
    narrow: tl.constexpr = tl.int16 if UNIT == 2 else tl.int8
    unit: tl.constexpr = tl.int64 if UNIT == 8 else tl.int32 if UNIT == 4 else narrow
    return tl.multiple_of(place.to(tl.pointer_type(unit)), ALIGN)


@jit
def _copy(pair, to_row, from_row, inside, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    to = _rows(tl.load(pair + TO), tl.load(pair + TO_PITCH), to_row, UNIT, ALIGN)
    source = _rows(tl.load(pair + FROM), tl.load(pair + FROM_PITCH), from_row, UNIT, ALIGN)
    # The number of units that rows have is a multiple of those that a lane moves at once.
    units = tl.multiple_of((tl.load(pair + ROW_BYTES) // UNIT).to(tl.int32), ALIGN // UNIT)
    for first in range(0, units, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (column[None, :] < units)
        tl.store(to[:, None] + column[None, :], tl.load(source[:, None] + column[None, :], mask=mask), mask=mask)


@jit(varying=["num_moves", "num_tiles"])
def _move_kernel(
    pairs, to_rows, from_rows, num_moves, num_tiles, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    WIDE_BLOCK: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tile `program_id % num_tiles` of pair `program_id // num_tiles`. UNIT, WIDE_BLOCK 0: no such pair."""
    program = tl.program_id(0)
    pair = pairs + program // num_tiles * PAIR_SIZE
    move = (program % num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    to_row = tl.load(to_rows + move, mask=move < num_moves, other=-1)
    from_row = tl.load(from_rows + move, mask=move < num_moves, other=-1)
    inside = (to_row >= 0) & (to_row < tl.load(pair + TO_ROWS))
    inside = inside & (from_row >= 0) & (from_row < tl.load(pair + FROM_ROWS))
    if WIDE_BLOCK == 0:
        _copy(pair, to_row, from_row, inside, UNIT, UNIT, BLOCK)
    elif UNIT == 0:
        _copy(pair, to_row, from_row, inside, 8, ALIGN, WIDE_BLOCK)
    else:
        if tl.load(pair + IS_WIDE) != 0:
            _copy(pair, to_row, from_row, inside, 8, ALIGN, WIDE_BLOCK)
        else:
            _copy(pair, to_row, from_row, inside, UNIT, UNIT, BLOCK)


def _directory(
    tags: Sequence[Tensor], used: Sequence[Tensor], pins: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, int]:
    """Addresses int64 `[3 · T]` of all parts, and the largest power of two up to 16 that divides them."""
    pointers = [part.data_ptr() for part in (*tags, *used, *pins)]
    return on_device(pointers, device), math.gcd(16, *pointers)


def row_cache_look_up_(
    tags: Sequence[Tensor], used: Sequence[Tensor], pins: Sequence[Tensor], rows: Tensor, tables: Tensor,
    num_sets: Tensor, now: Tensor, policy: str,
) -> Tensor:  # fmt: skip
    """One launch. Arguments and result as in the reference."""
    slots, num_rows = torch.empty_like(rows), rows.numel()
    directory, align = _directory(tags, used, pins, rows.device)
    launch(
        _look_up_kernel, (cdiv(num_rows, LOOK_UP_ROWS),), directory, tables, num_sets, rows, now, slots, len(tags),
        num_rows, LFU=policy == "lfu", ALIGN=align, ROWS=LOOK_UP_ROWS, num_warps=2,
    )  # fmt: skip
    return slots


def row_cache_allocate_(
    tags: Sequence[Tensor], used: Sequence[Tensor], pins: Sequence[Tensor], rows: Tensor, slots: Tensor,
    tables: Tensor, num_sets: Tensor, now: Tensor, policy: str,
) -> Tensor:  # fmt: skip
    """Two launches and a sort, nothing read back. Arguments and result as in the reference."""
    evicted, num_rows, device = torch.empty_like(rows), rows.numel(), rows.device
    no_set = sum(part.numel() // layout.WAYS for part in tags)  # at least as many as there are sets
    keys = torch.empty(num_rows, dtype=torch.int32 if no_set < 2**31 else torch.int64, device=device)
    launch(
        _miss_kernel, (cdiv(num_rows, BLOCK),), tables, num_sets, torch.cumsum(num_sets, 0), rows, slots, keys,
        evicted, len(tags), no_set, num_rows, BLOCK=BLOCK,
    )  # fmt: skip
    keys, misses = torch.sort(keys, stable=True)
    directory, align = _directory(tags, used, pins, device)
    launch(
        _allocate_kernel, (cdiv(num_rows, ALLOCATE_SETS),), directory, tables, num_sets, rows, keys, misses, now, slots,
        evicted, len(tags), no_set, num_rows, LFU=policy == "lfu", ALIGN=align, SETS=ALLOCATE_SETS, num_warps=1,
    )  # fmt: skip
    return evicted


def row_cache_translate(slots: Tensor, starts: Tensor, order: Tensor, num_groups: Tensor) -> Tensor:
    """One launch behind a fill. Arguments and result as in the reference."""
    num_entries = order.numel()
    values = torch.full((num_entries,), -1, dtype=torch.int64, device=order.device)
    grid = (cdiv(num_entries, BLOCK),)
    launch(_translate_kernel, grid, slots, starts, order, num_groups, values, num_entries, BLOCK=BLOCK)
    return values


def describe(to: Tensor, source: Tensor) -> list[int]:
    """What kernels read of a pair, from TO to ROW_BYTES."""
    places = [n for each in (to, source) for n in (each.data_ptr(), each.stride(0) * each.element_size(), len(each))]
    return [*places, to.element_size() * math.prod(to.shape[1:])]


def move_rows_(destinations: Sequence[Tensor], sources: Sequence[Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
    """One launch for all pairs. Arguments as in the reference.

    Nobody waits for it, so whoever frees pinned host memory that it uses must. Rows that are not there are left out.
    """
    pairs = [describe(*pair) for pair in zip(destinations, sources, strict=True) if pair[0].numel()]
    num_moves = to_rows.numel()
    if not pairs or num_moves == 0:
        return
    # Each with the largest unit up to 16 bytes that it can be moved by.
    described = [(pair, math.gcd(WIDE_BYTES, *pair[:2], *pair[3:5], pair[-1])) for pair in pairs]
    wide = max((pair[-1] for pair, unit in described if unit == WIDE_BYTES), default=0)
    unit = math.gcd(*(unit for _, unit in described if unit < WIDE_BYTES))
    narrow = max((pair[-1] // unit for pair, other in described if other < WIDE_BYTES), default=0)
    blocks = [min(MOST_COLUMNS, next_power_of_2(count)) if count else 0 for count in (narrow, wide // 8)]
    rows = min(NARROW_UNITS // max(1, blocks[0]), WIDE_UNITS // max(1, blocks[1]))
    num_tiles = cdiv(num_moves, rows)
    numbers = [number for pair, unit in described for number in (*pair, int(unit == WIDE_BYTES))]
    launch(
        _move_kernel, (num_tiles * len(pairs),), on_device(numbers, to_rows.device), to_rows, from_rows, num_moves,
        num_tiles,
        UNIT=unit, BLOCK=blocks[0], WIDE_BLOCK=blocks[1], ALIGN=WIDE_BYTES if wide else 8, ROWS=rows,
    )  # fmt: skip


def set_of(rows: Tensor, num_sets: int) -> Tensor:
    """int64 `[N]`: the set of each of a table's rows int64 `[N]`; `num_sets` in [1, 2^62)."""
    mixed = mix64(rows)
    return (2 * ((mixed >> 1 & 2**63 - 1) % num_sets) + (mixed & 1)) % num_sets  # of a number without sign


def _table_rows(rows: Tensor, tables: Tensor, table: int) -> tuple[Tensor, Tensor]:
    """Where rows of a table are, and the rows counted from its first; both int64 `[n]`."""
    first, num_rows = tables[table, :2].tolist()
    groups = ((rows >= first) & (rows < first + num_rows)).nonzero()[:, 0]
    return groups, rows[groups] - first


def row_cache_look_up_reference_(
    tags: Sequence[Tensor], used: Sequence[Tensor], pins: Sequence[Tensor], rows: Tensor, tables: Tensor,
    num_sets: Tensor, now: Tensor, policy: str,
) -> Tensor:  # fmt: skip
    """Table by table. Arguments and result as of `ops.row_cache.row_cache_look_up_`."""
    slots = torch.full_like(rows, -1)
    for table, sets in enumerate(num_sets.tolist()):
        groups, mine = _table_rows(rows, tables, table)
        if sets == 0:
            slots[groups] = mine
            continue
        first = set_of(mine, sets) * layout.WAYS
        ways = torch.arange(layout.WAYS, device=rows.device)
        present, way = (tags[table][first[:, None] + ways] == mine[:, None]).nonzero(as_tuple=True)
        found = first[present] + way
        slots[groups[present]] = found
        pins[table][found] += 1
        used[table][found] = used[table][found] + 1 if policy == "lfu" else now
    return slots


def row_cache_allocate_reference_(
    tags: Sequence[Tensor], used: Sequence[Tensor], pins: Sequence[Tensor], rows: Tensor, slots: Tensor,
    tables: Tensor, num_sets: Tensor, now: Tensor, policy: str,
) -> Tensor:  # fmt: skip
    """Row by row, in ascending order. Arguments and result as of `ops.row_cache.row_cache_allocate_`.

    The use of a row that gets a slot is `now` ("lru") or 1 ("lfu").
    """
    evicted = torch.full_like(rows, -1)
    for table, sets in enumerate(num_sets.tolist()):
        if sets == 0:
            continue
        groups, mine = _table_rows(rows, tables, table)
        missing = slots[groups] == -1
        firsts = set_of(mine[missing], sets) * layout.WAYS
        misses = zip(groups[missing].tolist(), mine[missing].tolist(), firsts.tolist(), strict=True)
        for group, row, first in misses:
            ways = slice(first, first + layout.WAYS)
            empty = (tags[table][ways] == NO_ROW).nonzero()
            unpinned = (pins[table][ways] == 0).nonzero()
            if empty.numel():
                way = int(empty[0])
            elif unpinned.numel():
                way = min(unpinned[:, 0].tolist(), key=lambda way: (int(used[table][first + way]), way))
            else:
                continue
            slots[group], evicted[group] = first + way, tags[table][first + way]
            tags[table][first + way] = row
            used[table][first + way] = 1 if policy == "lfu" else now
            pins[table][first + way] = 1
    return evicted


def row_cache_translate_reference(slots: Tensor, starts: Tensor, order: Tensor, num_groups: Tensor) -> Tensor:
    """By `repeat_interleave`. Arguments and result as of `ops.row_cache.row_cache_translate`."""
    groups = int(num_groups)
    values = torch.full((order.numel(),), -1, dtype=torch.int64, device=order.device)
    positions = order[: int(starts[groups])].to(torch.int64)
    values[positions] = slots[:groups].repeat_interleave(torch.diff(starts[: groups + 1]))
    return values


def move_rows_reference_(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], to_rows: Tensor, from_rows: Tensor
) -> None:
    """Pair by pair. Arguments as of `ops.row_cache.move_rows_`."""
    moving = (to_rows >= 0) & (from_rows >= 0)
    to_rows, from_rows = to_rows[moving], from_rows[moving]
    for destination, source in zip(destinations, sources, strict=True):
        integers = INTEGERS[source.element_size()]
        taken = source.detach().view(integers)[from_rows.to(source.device)]
        destination.detach().view(integers)[to_rows.to(destination.device)] = taken.to(destination.device)
