"""Grouping: from a batch's ids to the distinct rows it touches, and for each row the positions that use it.

    rows        int64 [N]      distinct linear rows (first row of the table + id), ascending; num_groups are valid
    starts      int32 [N + 1]  segment of `order` that belongs to each row
    order       int32 [N]      positions (into values) sorted by row; stable, so every sum has one order
    num_groups  int64 []

`N` is the number of values times the most lookups of one key, a size known without looking at data. Behind the valid
part stand the total number of rows, empty segments and -1. Ids out of range are left out.
Three steps, none of which waits: linear rows, a stable sort, segments.
Bytes: `8 · N` of ids read; `20 · N` written; the sort moves 8 to 12 bytes a pass and id.
"""

from collections import defaultdict
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.kernels.triton_utils import FIRST_ROW, NUM_ROWS, cdiv, field_at, jit, last_at_most, launch, tl
from tritonemb.layout import TABLE, Layout, TableRow

BLOCK = 1024  # entries of a program
SCANNED_BLOCKS = 2048  # from which on counts are cumulative: adding all in every program would read 32 MB, and soon GB


@jit(varying=["batch_size", "num_entries"])
def _linear_rows_kernel(
    tables, lookups, key_starts, values, offsets, keys, total_rows, batch_size, num_keys, num_entries, multiplicity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Entry `position · multiplicity + use`: the linear row that its id asks for, or the total if there is none."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = entry < num_entries
    position, use = entry // multiplicity, entry % multiplicity
    key = last_at_most(offsets, num_keys, position, batch_size)  # fewer steps than for its bag
    lookup = tl.load(key_starts + key) + use
    # What lies before the first or behind the last offset belongs to no bag.
    live = live & (position >= tl.load(offsets)) & (position < tl.load(offsets + num_keys * batch_size))
    live = live & (lookup < tl.load(key_starts + key + 1))
    table = tl.load(lookups + lookup * 4, mask=live, other=0)
    row = tl.load(values + position, mask=live, other=-1).to(tl.int64)
    inside = live & (row >= 0) & (row < tl.load(field_at(tables, table, NUM_ROWS)))
    linear = tl.where(inside, tl.load(field_at(tables, table, FIRST_ROW), mask=inside, other=0) + row, total_rows)
    tl.store(keys + entry, linear.to(keys.dtype.element_ty), mask=entry < num_entries)


@jit(varying=["num_entries"])
def _count_kernel(keys, counts, total_rows, num_entries, BLOCK: tl.constexpr):
    """Of each block the number of rows that begin in it, times 2^32, plus that of its valid entries."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + entry, mask=entry < num_entries, other=total_rows)
    previous = tl.load(keys + entry - 1, mask=(entry > 0) & (entry < num_entries), other=-1)
    inside = key < total_rows
    heads = tl.sum((inside & (key != previous)).to(tl.int32))
    tl.store(counts + tl.program_id(0), (heads.to(tl.int64) << 32) + tl.sum(inside.to(tl.int32)))


@jit(varying=["num_entries", "num_blocks"])
def _segment_kernel(
    keys, sorted_entries, counts, rows, starts, order, num_groups, total_rows, num_entries, num_blocks, multiplicity,
    SCANNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each distinct row and its start to its place; what lies behind the valid part is filled.

    Unless `counts` are cumulative, every program adds those of all blocks: no program waits for another's sum.
    """
    # A lane has no neighbours but every 128th entry: else lanes exchange what is stored by group, by 25 more registers.
    program, place = tl.program_id(0), tl.max_contiguous(tl.arange(0, BLOCK), 1)
    begin = program.to(tl.int64) * BLOCK
    if SCANNED:
        prefix = tl.load(counts + program - 1, mask=program > 0, other=0)
        totals = tl.load(counts + num_blocks - 1)
    else:
        prefix, totals = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        for start in range(0, num_blocks, BLOCK):
            block = start + place
            count = tl.load(counts + block, mask=block < num_blocks, other=0)
            prefix += tl.sum(tl.where(block < program, count, 0))
            totals += tl.sum(count)
    groups_before, groups, total = (prefix >> 32).to(tl.int32), (totals >> 32).to(tl.int32), totals.to(tl.int32)
    live = place < num_entries - begin
    key = tl.load(keys + begin + place, mask=live, other=total_rows)
    previous = tl.load(keys + begin + place - 1, mask=(program + place > 0) & live, other=-1)
    inside = key < total_rows
    head = inside & (key != previous)
    group = groups_before + tl.cumsum(head.to(tl.int32), 0) - 1
    tl.store(rows + group, key.to(tl.int64), mask=head)
    tl.store(starts + group, program * BLOCK + place, mask=head)
    position = tl.load(sorted_entries + begin + place, mask=inside, other=0) // multiplicity
    tl.store(order + begin + place, tl.where(inside, position, -1).to(tl.int32), mask=live)
    tl.store(rows + begin + place, tl.zeros((BLOCK,), tl.int64) + total_rows, mask=live & (place >= groups - begin))
    tl.store(starts + begin + place, tl.zeros((BLOCK,), tl.int32) + total, mask=live & (place >= groups - begin))
    if program == 0:
        tl.store(starts + num_entries, total)
        tl.store(num_groups, groups)


def row_groups(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three launches, torch's sort and, of many blocks, a scan; nothing read back. Otherwise as the reference."""
    device = values.device
    values, offsets = values.contiguous(), offsets.contiguous()
    batch_size, num_keys = batch_size_of(offsets, layout.key_starts), layout.key_starts.numel() - 1
    num_entries = values.numel() * layout.multiplicity
    rows = torch.empty(num_entries, dtype=torch.int64, device=device)
    starts = torch.empty(num_entries + 1, dtype=torch.int32, device=device)
    order = torch.empty(num_entries, dtype=torch.int32, device=device)
    num_groups = torch.empty((), dtype=torch.int64, device=device)
    total_rows = layout.num_rows
    if num_entries == 0 or batch_size == 0:
        return rows.fill_(total_rows), starts.zero_(), order.fill_(-1), num_groups.zero_()
    keys = torch.empty(num_entries, dtype=torch.int32 if total_rows < 2**31 else torch.int64, device=device)
    grid = (cdiv(num_entries, BLOCK),)
    launch(
        _linear_rows_kernel, grid, layout.tables, layout.lookups, layout.key_starts, values, offsets, keys, total_rows,
        batch_size, num_keys, num_entries, layout.multiplicity, BLOCK=BLOCK,
    )  # fmt: skip
    keys, entries = torch.sort(keys, stable=True)
    counts = torch.empty(grid, dtype=torch.int64, device=device)
    launch(_count_kernel, grid, keys, counts, total_rows, num_entries, BLOCK=BLOCK)
    is_scanned = grid[0] >= SCANNED_BLOCKS
    counts = counts.cumsum(0) if is_scanned else counts
    launch(
        _segment_kernel, grid, keys, entries, counts, rows, starts, order, num_groups, total_rows, num_entries, *grid,
        layout.multiplicity, SCANNED=is_scanned, BLOCK=BLOCK,
    )  # fmt: skip
    return rows, starts, order, num_groups


def row_groups_reference(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Grouping by a dict from each row to its positions."""
    tables, positions = [TableRow(*fields) for fields in layout.tables.tolist()], defaultdict(list)
    ids, ends, batch_size = values.tolist(), offsets.tolist(), batch_size_of(offsets, layout.key_starts)
    for key, lookups in enumerate(pairwise(layout.key_starts.tolist())):
        bags = pairwise(ends[key * batch_size : (key + 1) * batch_size + 1])
        covered = [position for begin, end in bags for position in range(begin, end)]
        for table in (tables[index] for index in layout.lookups[slice(*lookups), TABLE].tolist()):
            for position in covered:
                if 0 <= ids[position] < table.num_rows:
                    positions[table.first_row + ids[position]].append(position)
    distinct, capacity = sorted(positions), values.numel() * layout.multiplicity
    order = [position for row in distinct for position in sorted(positions[row])]
    starts = [0, *accumulate(len(positions[row]) for row in distinct)]

    def filled(numbers: list[int], size: int, rest: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers + [rest] * (size - len(numbers)), dtype=dtype, device=values.device)

    rows = filled(distinct, capacity, layout.num_rows, torch.int64)
    num_groups = torch.tensor(len(distinct), device=values.device)
    return rows, filled(starts, capacity + 1, len(order)), filled(order, capacity, -1), num_groups
