"""A stable radix sort of a batch's rows, table by table: a contender of torch's sort, which grouping uses.

The table of each entry is known, so only the bits of row numbers in the largest one are sorted, least significant digit
first. A *block* has entries of one table: in the first pass of one of its keys, wherever that stands, then of all that
are in range. Destinations have the order of table, digit and block: programs add the counts of their table's blocks.
One launch counts the first digit. One a pass moves every key behind those with a smaller digit, and behind those with
its digit that stand before it, and counts the next digit in the block that each comes to, by atomics on integers, whose
order does not show. No program waits for another. A block is moved by tiles, whose keys are compared in pairs.

Bytes a pass and key: key and place read and written, 4 of counts in the L2 cache; keys once more. Beside that a program
reads `4 · 2^digit bits` for each block of its table, of all at most 128 and one a lookup.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.kernels.triton_utils import FIRST_ROW, cdiv, field_at, interpreting, jit, launch, next_power_of_2, tl
from tritonemb.layout import TABLE, Layout

MOST_DIGIT_BITS = 11
MOST_BLOCKS = 128
LEAST_BLOCK = 256 if interpreting() else 1024  # keys
TILE = tl.constexpr(64)
TILE_OF_COUNTS = 1 << 13  # elements
MANY = tl.constexpr(1024)  # blocks, or keys, at once
NUM_WARPS = 8
# Of a block: first and number of its table's blocks, first entry, size, its table's first row, its ids in range.
TABLE_BLOCKS, BEGIN, SIZE, FIRST, VALID, BLOCK_FIELDS = (tl.constexpr(field) for field in range(1, 7))


@jit(varying=["batch_size", "num_positions", "num_blocks", "block_size", "total_rows"])
def _count_kernel(
    runs, offsets, tables, keys, blocks, counts, num_runs, batch_size, num_positions, num_blocks, block_size,
    total_rows, multiplicity, BINS: tl.constexpr, PASSES: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A block's fields, and `counts[0, block, digit]`; those of later passes are cleared."""
    program, run, bins = tl.program_id(0), tl.arange(0, RUNS), tl.arange(0, BINS)
    table = tl.load(runs + 3 * run, mask=run < num_runs, other=-1).to(tl.int32)
    first_bag = tl.load(runs + 3 * run + 1, mask=run < num_runs, other=0) * batch_size
    begin = tl.minimum(tl.maximum(tl.load(offsets + first_bag), 0), num_positions).to(tl.int32)
    end = tl.minimum(tl.load(offsets + first_bag + batch_size), num_positions).to(tl.int32)
    size = tl.where(run < num_runs, tl.maximum(end - begin, 0), 0)
    num = (size + block_size - 1) // block_size
    before = tl.cumsum(num, 0) - num
    mine = (before <= program) & (program < before + num)
    own = tl.max(tl.where(mine, table, -2), 0)  # -2: no block is left for this program
    skipped = (program - before) * block_size
    use = tl.load(runs + 3 * run + 2, mask=mine, other=0).to(tl.int32)
    own_begin = tl.sum(tl.where(mine, (begin + skipped) * multiplicity + use, 0), 0)
    own_size = tl.minimum(tl.sum(tl.where(mine, size - skipped, 0), 0), block_size)
    first_row = tl.load(field_at(tables, tl.maximum(own, 0), FIRST_ROW))
    count = tl.zeros((BINS,), tl.int32)
    for start in range(0, own_size, TILE):
        index = start + tl.arange(0, TILE)
        key = tl.load(keys + own_begin + index * multiplicity, mask=index < own_size, other=total_rows).to(tl.int64)
        digit = ((key - first_row) & (BINS - 1)).to(tl.int32)
        count += tl.histogram(digit, BINS, mask=key < total_rows)
    tl.store(counts + program * BINS + bins, count)
    for later in tl.static_range(1, PASSES):
        tl.store(counts + (later * num_blocks + program) * BINS + bins, tl.zeros((BINS,), tl.int32))
    fields = blocks + program * BLOCK_FIELDS
    tl.store(fields, tl.sum(tl.where((table < own) & (table >= 0), num, 0), 0))
    tl.store(fields + TABLE_BLOCKS, tl.sum(tl.where(table == own, num, 0), 0))
    tl.store(fields + BEGIN, own_begin)
    tl.store(fields + SIZE, own_size)
    tl.store(fields + FIRST, first_row)
    tl.store(fields + VALID, tl.sum(count, 0).to(tl.int64))


@jit(varying=["num_keys", "num_blocks", "block_size", "shift", "next_shift", "total_rows"])
def _move_kernel(
    keys, places, blocks, counts, next_counts, new_keys, new_places, num_keys, num_blocks, block_size, total_rows,
    shift, next_shift, multiplicity, IS_FIRST: tl.constexpr, IS_LAST: tl.constexpr, BINS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Keys and the places they came from (their own, in the first pass) to where this pass puts them."""
    program, bins, index = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, TILE)
    fields = blocks + program * BLOCK_FIELDS
    table_block, table_blocks, first_row = tl.load(fields), tl.load(fields + TABLE_BLOCKS), tl.load(fields + FIRST)
    table_begin, table_end, all_valid = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, num_blocks, MANY):
        block = start + tl.arange(0, MANY)
        valid = tl.load(blocks + block * BLOCK_FIELDS + VALID, mask=block < num_blocks, other=0)
        table_begin += tl.sum(tl.where(block < table_block, valid, 0), 0)
        table_end += tl.sum(tl.where(block < table_block + table_blocks, valid, 0), 0)
        all_valid += tl.sum(valid, 0)
    total, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for start in range(0, table_blocks, BLOCKS):
        block = (table_block + start + tl.arange(0, BLOCKS))[:, None]
        inside = (block < table_block + table_blocks) & (block < num_blocks)
        count = tl.load(counts + block * BINS + bins[None, :], mask=inside, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(block < program, count, 0), 0)
    next_place = table_begin.to(tl.int32) + tl.cumsum(total, 0) - total + before  # by digit
    skipped = (program - table_block) * block_size
    begin = tl.load(fields + BEGIN) if IS_FIRST else table_begin + skipped
    size = tl.load(fields + SIZE) if IS_FIRST else tl.minimum(table_end - begin, block_size)
    for start in range(0, size, TILE):
        entry = begin + (start + index) * (multiplicity if IS_FIRST else 1)
        key = tl.load(keys + entry, mask=(start + index < size) & (entry < num_keys), other=total_rows)
        live = key < total_rows
        row = key.to(tl.int64) - first_row
        digit = ((row >> shift) & (BINS - 1)).to(tl.int32)
        earlier = (digit[:, None] == digit[None, :]) & (index[:, None] > index[None, :]) & live[None, :]
        target = tl.gather(next_place, digit, 0) + tl.sum(earlier.to(tl.int32), 1)
        live = live & (target < num_keys)  # offsets that are wrong name an entry twice
        came_from = entry.to(tl.int32) if IS_FIRST else tl.load(places + entry, mask=live, other=0)
        tl.store(new_keys + target, key, mask=live)
        tl.store(new_places + target, came_from, mask=live)
        if not IS_LAST:
            block = table_block + (target - table_begin) // block_size
            next_digit = (row >> next_shift) & (BINS - 1)
            tl.atomic_add(next_counts + block * BINS + next_digit, 1, mask=live & (block < num_blocks), sem="relaxed")
        next_place += tl.histogram(digit, BINS, mask=live)
    if IS_LAST:  # behind the rows of tables
        for start in range(0, block_size, MANY):
            place = program.to(tl.int64) * block_size + start + tl.arange(0, MANY)
            behind = (place >= all_valid) & (place < num_keys) & (start + tl.arange(0, MANY) < block_size)
            tl.store(new_keys + place, total_rows, mask=behind)
            tl.store(new_places + place, -1, mask=behind)


@functools.lru_cache(maxsize=64)
def runs_of(layout: Layout) -> Tensor:
    """int64 `[L, 3]`: of each lookup, by table, its table, its key, and which of the key's uses it is."""
    lookup, table = torch.arange(len(layout.lookups), device=layout.lookups.device), layout.lookups[:, TABLE]
    key = torch.searchsorted(layout.key_starts, lookup, right=True) - 1
    return torch.stack([table, key, lookup - layout.key_starts[key]], 1)[table.argsort(stable=True)]


def radix_sort(keys: Tensor, offsets: Tensor, layout: Layout, row_bits: int) -> tuple[Tensor, Tensor]:
    """Sort the linear rows `[N]` of a batch's entries, as `row_groups` has them, stably; `layout.num_rows` is none.

    `row_bits` are those of rows of the largest table. Returns the rows and int32 the places they came from, -1 of none.
    """
    num_keys, runs, device, places = keys.numel(), runs_of(layout), keys.device, keys
    block_size = max(LEAST_BLOCK, next_power_of_2(cdiv(num_keys, MOST_BLOCKS) or 1))
    num_blocks, passes = cdiv(num_keys, block_size) + len(runs), max(1, cdiv(row_bits, MOST_DIGIT_BITS))
    digit_bits = max(5, cdiv(row_bits, passes))
    bins, most = 1 << digit_bits, next_power_of_2(num_blocks)
    blocks = torch.empty(num_blocks, BLOCK_FIELDS.value, dtype=torch.int64, device=device)
    counts = torch.empty(passes, num_blocks, bins, dtype=torch.int32, device=device)
    launch(
        _count_kernel, (num_blocks,), runs, offsets, layout.tables, keys, blocks, counts, len(runs),
        batch_size_of(offsets, layout.key_starts), num_keys // layout.multiplicity, num_blocks, block_size,
        layout.num_rows, layout.multiplicity, BINS=bins, PASSES=passes, RUNS=max(32, next_power_of_2(len(runs))),
        TILE=LEAST_BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    for turn in range(passes):
        moved, new_places = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int32)
        launch(
            _move_kernel, (num_blocks,), keys, places, blocks, counts[turn], counts[(turn + 1) % passes], moved,
            new_places, num_keys, num_blocks, block_size, layout.num_rows, turn * digit_bits, (turn + 1) * digit_bits,
            layout.multiplicity, IS_FIRST=turn == 0, IS_LAST=turn == passes - 1, BINS=bins,
            BLOCKS=min(most, TILE_OF_COUNTS >> digit_bits), num_warps=NUM_WARPS,
        )  # fmt: skip
        keys, places = moved, new_places
    return keys, places
