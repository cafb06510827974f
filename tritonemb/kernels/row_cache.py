"""The directory of a set-associative row cache: which rows of a table are cached, in which slots, and which to evict.

A table with `S` sets has `S · WAYS` slots; further ones are not used. Three tensors have an entry for each slot:

    tags  int64  row of the table in the slot, -1 if it is empty
    used  int64  time of the last use (policy "lru"), or number of uses (policy "lfu")
    pins  int32  number of batches in flight that use the slot; pinned slots are not evicted

Slot = set · WAYS + way; a row may be in any way of its set, `mix64(row) mod S`, both unsigned. `mix64` is the
finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64 bits: the set depends on every bit of
the row. A table with 0 sets is not cached: its rows are on the device, slot = row, and its directory is not accessed.
Rows come from row groups, distinct and ascending, so each is looked up once per batch, and no two share a slot.

**look up**: each row of a tile reads all tags of its set in one load.
Bytes per row: 16 for row and slot, `8 · WAYS` of tags; on a hit 8 of pin, and 8 (lru) or 16 (lfu) of use.

**allocate**: misses are sorted by set, stably, so that those of a set are adjacent and ascending. The first miss of a
set serves all of them: it reads the set once, assigns ways one by one, as many as are free, and writes the changes.
Bytes: per row 16 read and 12 written to find misses, and 12 per pass of the sort; `20 · WAYS` per set with misses; 36
written per row that gets a slot.

**translate**: each position finds its group by a binary search and takes its slot.
Bytes: `8 · N` filled, `4 · N` of order read, 8 written per position of a group.

**move rows**: `destination[to_rows[i]] = source[from_rows[i]]`, as bytes, for any number of *pairs* of one row width.
Moves are in the order of their tables. A program copies a tile of them, of one or several tables, for one pair of each:
16 bytes per lane if the pair is aligned, else the largest unit that divides all other pairs.
Bytes per pair and row: 16 of indices, and twice the row, once over the bus for pinned host memory (unified addressing).
"""

import math
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

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
from tritonemb.layout import NO_ROW, DirectoryTensors, mix64

WAYS, EMPTY = tl.constexpr(layout.WAYS), tl.constexpr(NO_ROW)
ALIGNMENT = tl.constexpr(layout.SLOT_ALIGNMENT)
LOOK_UP_ROWS = 16  # per program of two warps: four loads of 16 bytes per lane
ALLOCATE_SETS = 8  # per program of one warp: few, since all wait for the set with the most misses
BLOCK = 1024  # entries per program
TO, TO_PITCH, TO_ROWS, FROM, FROM_PITCH, FROM_ROWS, ROW_BYTES, UNIT_OF, PAIR_SIZE = (tl.constexpr(n) for n in range(9))
Tensors = Sequence[Tensor]
WIDE_BYTES = 16
WIDE_UNITS = 2048  # units of 8 bytes per program of four warps: eight loads of 16 bytes per lane
NARROW_UNITS = 1024  # smaller units per program: eight loads per lane, each with its own address registers
MAX_COLUMNS = 64  # units per row and iteration; longer rows take several iterations


@jit
def _set_of(row, num_sets):
    """Return the set of a row, as `set_of`; 0 for tables with 0 sets."""
    return (mix(row).to(tl.uint64) % tl.maximum(num_sets, 1).to(tl.uint64)).to(tl.int64)


@jit(varying=["num_rows"])
def _look_up_kernel(tags, used, pins, starts, tables, num_sets, rows, now, slots, num_tables, num_rows, LFU, ROWS):
    """Look up ROWS rows: write their slots, -1 for misses; pin the slots of hits, and update their use."""
    # Table and set of each row.
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = group < num_rows
    linear = tl.load(rows + group, mask=valid, other=0)
    table = table_of(tables, num_tables, linear)
    row = linear - tl.load(field_at(tables, table, FIRST_ROW))
    sets = tl.load(num_sets + table)
    cached = valid & (sets > 0)
    # Compare the tags of the set.
    first = _set_of(row, sets) * WAYS
    ways = tl.arange(0, WAYS)
    table_slot = tl.multiple_of(tl.load(starts + table), ALIGNMENT)
    slots_of_set = (table_slot + first)[:, None] + ways[None, :]
    tag = tl.load(tags + slots_of_set, mask=cached[:, None] & (ways[None, :] >= 0), other=EMPTY)
    way = tl.max(tl.where(tag == row[:, None], ways[None, :], -1), 1)
    is_hit = cached & (way >= 0)
    # Pin, and update the use; rows are distinct, so no two programs write one slot.
    slot = first + way
    pin_pointers = pins + table_slot + slot
    tl.store(pin_pointers, tl.load(pin_pointers, mask=is_hit, other=0) + 1, mask=is_hit)
    use_pointers = used + table_slot + slot
    new_use = tl.zeros((ROWS,), tl.int64) + tl.load(now)
    if LFU:
        new_use = tl.load(use_pointers, mask=is_hit, other=0) + 1
    tl.store(use_pointers, new_use, mask=is_hit)
    slot = tl.where(is_hit, slot, tl.where(sets == 0, row, -1))
    tl.store(slots + group, slot, mask=valid)


@jit(varying=["num_rows"])
def _miss_kernel(tables, num_sets, set_ends, rows, slots, keys, evicted, num_tables, no_set, num_rows, BLOCK):
    """Write sort keys: a miss's set, numbered over all tables; `no_set` for rows that need no slot."""
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
    tags, used, pins, base, tables, sets, rows, keys, order, now, slots, victims, num_tables, none, num_rows, LFU, SETS
):
    """Assign slots to misses sorted by set: `keys` are their sets, `order` their indices into `rows`."""
    start = tl.program_id(0).to(tl.int64) * SETS
    if tl.load(keys + start) < none:  # misses are sorted before all other rows
        # A lane group serves the set whose first miss is at its index.
        index = start + tl.arange(0, SETS)
        key = tl.load(keys + index, mask=index < num_rows, other=none)
        previous_key = tl.load(keys + index - 1, mask=(index > 0) & (index < num_rows), other=-1)
        active = (key < none) & (key != previous_key)
        group = tl.load(order + index, mask=active, other=0)
        linear = tl.load(rows + group, mask=active, other=0)
        table = table_of(tables, num_tables, linear)
        first_row = tl.load(field_at(tables, table, FIRST_ROW))
        first = _set_of(linear - first_row, tl.load(sets + table)) * WAYS
        # Read the set.
        ways = tl.arange(0, WAYS)
        table_slot = tl.multiple_of(tl.load(base + table), ALIGNMENT)
        slot = (table_slot + first)[:, None] + ways[None, :]
        mask = active[:, None] & (ways[None, :] >= 0)
        tag = tl.load(tags + slot, mask=mask, other=0)
        last_use = tl.load(used + slot, mask=mask, other=0)
        unpinned = tl.load(pins + slot, mask=mask, other=1) == 0
        stamp = tl.load(now)
        if LFU:
            stamp = stamp * 0 + 1
        # One miss per set and iteration: the first empty way, else the unpinned way with the least use.
        while tl.max(active.to(tl.int32), 0) > 0:
            empty = tag == EMPTY
            any_empty = tl.max(empty.to(tl.int32), 1) > 0
            is_candidate = tl.where(any_empty[:, None], empty, unpinned)
            rank = tl.where(any_empty[:, None], 0, last_use)
            least = tl.min(tl.where(is_candidate, rank, 0x7FFFFFFFFFFFFFFF), 1)
            way = tl.min(tl.where(is_candidate & (rank == least[:, None]), ways[None, :], WAYS), 1)
            active = active & (way < WAYS)
            chosen = active[:, None] & (ways[None, :] == way[:, None])
            # Write the slot, and keep the copy of the set in registers current.
            row = linear - first_row
            tl.store(victims + group, tl.sum(tl.where(chosen, tag, 0), 1), mask=active)
            tl.store(slots + group, first + way, mask=active)
            tl.store(tags + table_slot + first + way, row, mask=active)
            tl.store(used + table_slot + first + way, tl.zeros((SETS,), tl.int64) + stamp, mask=active)
            tl.store(pins + table_slot + first + way, tl.full((SETS,), 1, tl.int32), mask=active)
            tag = tl.where(chosen, row[:, None], tag)
            unpinned = unpinned & (chosen == 0)
            # Next miss of the same set.
            index += 1
            has_next = active & (index < num_rows)
            active = active & (tl.load(keys + index, mask=has_next, other=none) == key)
            group = tl.load(order + index, mask=active, other=0)
            linear = tl.load(rows + group, mask=active, other=0)


@jit(varying=["num_entries"])
def _translate_kernel(slots, starts, order, num_groups, values, num_entries, BLOCK):
    """Write the slot of each entry's group to the entry's position."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    groups = tl.load(num_groups).to(tl.int32)
    valid = (entry < num_entries) & (entry < tl.load(starts + groups))
    position = tl.load(order + entry, mask=valid, other=0)
    group = last_at_most(starts, groups, entry)
    tl.store(values + position, tl.load(slots + group, mask=valid, other=-1), mask=valid)


@jit
def _rows(address, pitch, row, UNIT, ALIGN):
    """Return pointers to the first unit of rows `[ROWS]`."""
    pointers = address + row * pitch
    narrow: tl.constexpr = tl.int16 if UNIT == 2 else tl.int8
    unit: tl.constexpr = tl.int64 if UNIT == 8 else tl.int32 if UNIT == 4 else narrow
    return tl.multiple_of(pointers.to(tl.pointer_type(unit)), ALIGN)


@jit
def _copy(pair, to_row, from_row, is_moved, UNIT, ALIGN, BLOCK):
    """Copy the rows that are moved; `pair` points to the fields of each row's pair."""
    target = _rows(tl.load(pair + TO), tl.load(pair + TO_PITCH), to_row, UNIT, ALIGN)
    source = _rows(tl.load(pair + FROM), tl.load(pair + FROM_PITCH), from_row, UNIT, ALIGN)
    # The units per row are a multiple of those that a lane loads at once.
    units = tl.where(is_moved, tl.load(pair + ROW_BYTES).to(tl.int32) // UNIT, 0)
    units = tl.multiple_of(units, ALIGN // UNIT)
    for first in range(0, tl.max(units, 0), BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column[None, :] < units[:, None]
        tl.store(target[:, None] + column[None, :], tl.load(source[:, None] + column[None, :], mask=mask), mask=mask)


@jit(varying=["num_moves", "num_tiles"])
def _move_kernel(
    pairs, starts, to_rows, from_rows, num_tables, num_moves, num_tiles, UNIT, BLOCK, WIDE_BLOCK, ALIGN, ROWS
):
    """Copy tile `program_id % num_tiles` of the moves for pair `program_id // num_tiles` of each table."""
    # Pair of each move; one without rows where the table has no such pair.
    program = tl.program_id(0)
    move = (program % num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = pairs + (program // num_tiles * num_tables + last_at_most(starts, num_tables, move)) * PAIR_SIZE
    to_row = tl.load(to_rows + move, mask=move < num_moves, other=-1)
    from_row = tl.load(from_rows + move, mask=move < num_moves, other=-1)
    valid = (to_row >= 0) & (to_row < tl.load(pair + TO_ROWS))
    valid = valid & (from_row >= 0) & (from_row < tl.load(pair + FROM_ROWS))
    # Copy by the pair's unit; branches without a pair, whose UNIT or WIDE_BLOCK is 0, are not compiled.
    is_wide = tl.load(pair + UNIT_OF) > 8
    if WIDE_BLOCK > 0:
        _copy(pair, to_row, from_row, valid & is_wide, 8, ALIGN, WIDE_BLOCK)
    if UNIT > 0:
        _copy(pair, to_row, from_row, valid & (is_wide == 0), UNIT, UNIT, BLOCK)


def row_cache_look_up_(directory: DirectoryTensors, rows: Tensor, now: Tensor, policy: str) -> Tensor:
    """Look up in one launch. Arguments and result as in the reference."""
    slots, num_rows = torch.empty_like(rows), rows.numel()
    args, options = (*directory, rows, now, slots, len(directory.num_sets), num_rows), {"LFU": policy == "lfu"}
    launch(_look_up_kernel, (cdiv(num_rows, LOOK_UP_ROWS),), *args, num_warps=2, ROWS=LOOK_UP_ROWS, **options)
    return slots


def row_cache_allocate_(directory: DirectoryTensors, rows: Tensor, slots: Tensor, now: Tensor, policy: str) -> Tensor:
    """Allocate by two launches and a sort; no host synchronization. Arguments and result as in the reference."""
    evicted, num_rows, device = torch.empty_like(rows), rows.numel(), rows.device
    tables, num_sets = directory.tables, directory.num_sets
    no_set = directory.tags.numel() // layout.WAYS  # at least as many as there are sets
    keys = torch.empty(num_rows, dtype=torch.int32 if no_set < 2**31 else torch.int64, device=device)
    sizes = len(num_sets), no_set, num_rows
    args = tables, num_sets, torch.cumsum(num_sets, 0), rows, slots, keys, evicted
    launch(_miss_kernel, (cdiv(num_rows, BLOCK),), *args, *sizes, BLOCK=BLOCK)
    keys, misses = torch.sort(keys, stable=True)
    sorted_misses = *directory, rows, keys, misses, now
    options = {"LFU": policy == "lfu", "SETS": ALLOCATE_SETS, "num_warps": 1}
    launch(_allocate_kernel, (cdiv(num_rows, ALLOCATE_SETS),), *sorted_misses, slots, evicted, *sizes, **options)
    return evicted


def row_cache_translate(slots: Tensor, starts: Tensor, order: Tensor, num_groups: Tensor) -> Tensor:
    """Translate by a fill and one launch. Arguments and result as in the reference."""
    num_entries = order.numel()
    values = torch.full((num_entries,), -1, dtype=torch.int64, device=order.device)
    grid = (cdiv(num_entries, BLOCK),)
    launch(_translate_kernel, grid, slots, starts, order, num_groups, values, num_entries, BLOCK=BLOCK)
    return values


def pair_fields(destinations: Tensors, sources: Tensors, tables: Sequence[int]) -> list[list[int]]:
    """Return the fields TO to ROW_BYTES of each pair, and its table: address, pitch and rows of tensors, row bytes."""
    pairs = []
    for to, source, table in zip(destinations, sources, tables or [0] * len(sources), strict=True):
        size, to_rows, (from_rows, *row) = source.element_size(), to.size(0), source.shape
        fields = to.data_ptr(), to.stride(0) * size, to_rows, source.data_ptr(), source.stride(0) * size, from_rows
        pairs.append([*fields, math.prod(row, start=size), table])
    return pairs


def move_rows_(
    destinations: Tensors, sources: Tensors, to_rows: Tensor, from_rows: Tensor, starts: Any = None, tables: Any = ()
) -> None:
    """Copy all pairs in one launch. Arguments as in the reference.

    It is asynchronous: synchronize before freeing pinned host memory that it uses. Rows out of range are skipped.
    """
    num_tables = 1 if starts is None else starts.numel() - 1
    by_table: list[list[list[int]]] = [[] for _ in range(num_tables)]
    for *pair, table in pair_fields(destinations, sources, tables):
        if pair[2] and pair[-1]:  # rows, bytes
            # The largest unit of up to 16 bytes by which the pair can be copied.
            by_table[table].append([*pair, math.gcd(WIDE_BYTES, *pair[:2], *pair[3:5], pair[-1])])
    # The number of units per row, and a block of them, for pairs of smaller units and for others.
    pairs = list(chain(*by_table))
    unit = math.gcd(*(pair[-1] for pair in pairs if pair[-1] < WIDE_BYTES))
    narrow_units = max((pair[-2] // unit for pair in pairs if pair[-1] < WIDE_BYTES), default=0)
    wide_units = max((pair[-2] // 8 for pair in pairs if pair[-1] == WIDE_BYTES), default=0)
    blocks = [min(MAX_COLUMNS, next_power_of_2(count)) if count else 0 for count in (narrow_units, wide_units)]
    rows = min(NARROW_UNITS // max(1, blocks[0]), WIDE_UNITS // max(1, blocks[1]))
    # Pairs of all tables, first those that are the first of their table; without rows where a table has fewer.
    fields = chain(*chain(*zip_longest(*by_table, fillvalue=[0] * 8)))
    num_tiles, max_pairs = cdiv(to_rows.numel(), rows), max(map(len, by_table))
    args = on_device([*fields], to_rows.device), to_rows if starts is None else starts, to_rows, from_rows
    options = {"UNIT": unit, "BLOCK": blocks[0], "WIDE_BLOCK": blocks[1], "ALIGN": WIDE_BYTES if wide_units else 8}
    launch(_move_kernel, (num_tiles * max_pairs,), *args, num_tables, to_rows.numel(), num_tiles, ROWS=rows, **options)


def set_of(rows: Tensor, num_sets: int) -> Tensor:
    """Return int64 `[N]`: the set of each of a table's rows int64 `[N]`; `num_sets` in [1, 2^62)."""
    hashes = mix64(rows)
    return (2 * ((hashes >> 1 & 2**63 - 1) % num_sets) + (hashes & 1)) % num_sets  # the hash is unsigned


def _groups_of_table(rows: Tensor, tables: Tensor, table: int) -> tuple[Tensor, Tensor]:
    """Return the indices of a table's rows in `rows`, and the rows relative to its first; both int64 `[n]`."""
    first, num_rows = tables[table, :2].tolist()
    groups = ((rows >= first) & (rows < first + num_rows)).nonzero()[:, 0]
    return groups, rows[groups] - first


def row_cache_look_up_reference_(directory: DirectoryTensors, rows: Tensor, now: Tensor, policy: str) -> Tensor:
    """Look up table by table. Arguments and result as of `ops.row_cache.row_cache_look_up_`."""
    slots, (*parts, first_slots, tables, num_sets) = torch.full_like(rows, -1), directory
    tags, used, pins = (part.tensor_split(first_slots[1:].tolist()) for part in parts)
    for table, sets in enumerate(num_sets.tolist()):
        groups, table_rows = _groups_of_table(rows, tables, table)
        if sets == 0:
            slots[groups] = table_rows
            continue
        first_slots = set_of(table_rows, sets) * layout.WAYS
        ways = torch.arange(layout.WAYS, device=rows.device)
        hits, way = (tags[table][first_slots[:, None] + ways] == table_rows[:, None]).nonzero(as_tuple=True)
        hit_slots = first_slots[hits] + way
        slots[groups[hits]] = hit_slots
        pins[table][hit_slots] += 1
        used[table][hit_slots] = used[table][hit_slots] + 1 if policy == "lfu" else now
    return slots


def row_cache_allocate_reference_(
    directory: DirectoryTensors, rows: Tensor, slots: Tensor, now: Tensor, policy: str
) -> Tensor:
    """Allocate row by row, in ascending order. Arguments and result as of `ops.row_cache.row_cache_allocate_`.

    The use of a newly cached row is `now` ("lru") or 1 ("lfu").
    """
    evicted, (*parts, first_slots, tables, num_sets) = torch.full_like(rows, -1), directory
    tags, used, pins = (part.tensor_split(first_slots[1:].tolist()) for part in parts)
    for table, sets in enumerate(num_sets.tolist()):
        if sets == 0:
            continue
        groups, table_rows = _groups_of_table(rows, tables, table)
        is_miss = slots[groups] == -1
        first_slots = set_of(table_rows[is_miss], sets) * layout.WAYS
        misses = zip(groups[is_miss].tolist(), table_rows[is_miss].tolist(), first_slots.tolist(), strict=True)
        # The first empty way, else the unpinned way with the least use, else none.
        for group, row, first_slot in misses:
            ways = slice(first_slot, first_slot + layout.WAYS)
            empty = (tags[table][ways] == NO_ROW).nonzero()
            unpinned = (pins[table][ways] == 0).nonzero()
            if empty.numel():
                way = int(empty[0])
            elif unpinned.numel():
                way = min(unpinned[:, 0].tolist(), key=lambda way: (int(used[table][first_slot + way]), way))
            else:
                continue
            slots[group], evicted[group] = first_slot + way, tags[table][first_slot + way]
            tags[table][first_slot + way] = row
            used[table][first_slot + way] = 1 if policy == "lfu" else now
            pins[table][first_slot + way] = 1
    return evicted


def row_cache_translate_reference(slots: Tensor, starts: Tensor, order: Tensor, num_groups: Tensor) -> Tensor:
    """Translate by `repeat_interleave`. Arguments and result as of `ops.row_cache.row_cache_translate`."""
    groups = int(num_groups)
    values = torch.full((order.numel(),), -1, dtype=torch.int64, device=order.device)
    positions = order[: int(starts[groups])].to(torch.int64)
    values[positions] = slots[:groups].repeat_interleave(torch.diff(starts[: groups + 1]))
    return values


def move_rows_reference_(
    destinations: Tensors, sources: Tensors, to_rows: Tensor, from_rows: Tensor, starts: Any = None, tables: Any = ()
) -> None:
    """Copy pair by pair. Arguments as of `ops.row_cache.move_rows_`."""
    bounds, tables = [0, to_rows.numel()] if starts is None else starts.tolist(), tables or [0] * len(sources)
    for destination, source, table in zip(destinations, sources, tables, strict=True):
        to, origin = (rows[bounds[table] : bounds[table + 1]] for rows in (to_rows, from_rows))
        valid, integers = (to >= 0) & (origin >= 0), INTEGERS[source.element_size()]
        moved = source.detach().view(integers)[origin[valid].to(source.device)]
        destination.detach().view(integers)[to[valid].to(destination.device)] = moved.to(destination.device)
