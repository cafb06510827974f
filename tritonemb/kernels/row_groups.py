"""Grouping: the distinct rows of a batch, and for each row its positions (a CSR of the inverse of the lookup).

    rows        int64 [N]      distinct linear rows (first row of the table + id), ascending
    starts      int32 [N + 1]  start of each row's segment of `order`
    order       int32 [N]      positions (indices into values) sorted by row; stable, so that sums have one order
    num_groups  int64 []       number of distinct rows

`N` is the number of values times the most lookups of a key, a size known without looking at data. Entries beyond
`num_groups` are padding: the total number of rows, empty segments and -1. Ids out of range are left out.
Three steps without a host synchronization: linear rows, a stable sort, segments.
Bytes: `8 · N` of ids read; `20 · N` written; the sort moves 8 to 12 bytes per pass and id.
"""

from collections import defaultdict
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.kernels.triton_utils import FIRST_ROW, NUM_ROWS, cdiv, field_at, jit, last_at_most, launch, tl
from tritonemb.layout import TABLE, Layout, TableRow

BLOCK = 1024  # entries per program
SCANNED_BLOCKS = 2048  # from here on scan the counts: with as many, programs that add all of them read 32 MB


@jit(varying=["batch_size", "num_entries"])
def _linear_rows_kernel(layout, values, offsets, keys, total_rows, batch_size, num_keys, num_entries, BLOCK):
    """Write the linear row of each entry `position · multiplicity + lookup_slot`, or the number of rows without one."""
    tables, lookups, key_starts, multiplicity, _ = layout
    # Key and lookup of each entry.
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = entry < num_entries
    position, lookup_slot = entry // multiplicity, entry % multiplicity
    key = last_at_most(offsets, num_keys, position, batch_size)  # fewer steps than a search among bags
    lookup = tl.load(key_starts + key) + lookup_slot
    # Positions before the first or beyond the last offset belong to no bag.
    valid = valid & (position >= tl.load(offsets)) & (position < tl.load(offsets + num_keys * batch_size))
    valid = valid & (lookup < tl.load(key_starts + key + 1))
    # Linear row of the id, if it is in range.
    table = tl.load(lookups + lookup * 4, mask=valid, other=0)
    row = tl.load(values + position, mask=valid, other=-1).to(tl.int64)
    in_range = valid & (row >= 0) & (row < tl.load(field_at(tables, table, NUM_ROWS)))
    linear = tl.where(in_range, tl.load(field_at(tables, table, FIRST_ROW), mask=in_range, other=0) + row, total_rows)
    tl.store(keys + entry, linear.to(keys.dtype.element_ty), mask=entry < num_entries)


@jit(varying=["num_entries"])
def _count_kernel(keys, counts, total_rows, num_entries, BLOCK):
    """Count for each block the rows that begin in it, times 2^32, plus its entries with a row."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + entry, mask=entry < num_entries, other=total_rows)
    previous = tl.load(keys + entry - 1, mask=(entry > 0) & (entry < num_entries), other=-1)
    in_range = key < total_rows
    heads = tl.sum((in_range & (key != previous)).to(tl.int32))
    tl.store(counts + tl.program_id(0), (heads.to(tl.int64) << 32) + tl.sum(in_range.to(tl.int32)))


@jit(varying=["num_entries", "num_blocks"])
def _segment_kernel(
    keys, sorted_entries, counts, groups, total_rows, num_entries, num_blocks, multiplicity, SCANNED, BLOCK
):
    """Write each distinct row, its start, and the positions of its segment; pad all three.

    Unless `counts` are cumulative (SCANNED), each program sums those of all blocks, so that no program waits.
    """
    rows, starts, order, num_groups = groups
    # A lane has every 128th entry: with contiguous ones, lanes exchange what they store by group, at 25 more registers.
    program, offset = tl.program_id(0), tl.max_contiguous(tl.arange(0, BLOCK), 1)
    begin = program.to(tl.int64) * BLOCK
    # Groups and entries in earlier blocks, and in all.
    if SCANNED:
        prefix = tl.load(counts + program - 1, mask=program > 0, other=0)
        totals = tl.load(counts + num_blocks - 1)
    else:
        prefix, totals = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        for start in range(0, num_blocks, BLOCK):
            block = start + offset
            count = tl.load(counts + block, mask=block < num_blocks, other=0)
            prefix += tl.sum(tl.where(block < program, count, 0))
            totals += tl.sum(count)
    groups_before, groups, total = (prefix >> 32).to(tl.int32), (totals >> 32).to(tl.int32), totals.to(tl.int32)
    # Heads of segments and their group numbers.
    valid = offset < num_entries - begin
    key = tl.load(keys + begin + offset, mask=valid, other=total_rows)
    previous = tl.load(keys + begin + offset - 1, mask=(program + offset > 0) & valid, other=-1)
    in_range = key < total_rows
    head = in_range & (key != previous)
    group = groups_before + tl.cumsum(head.to(tl.int32), 0) - 1
    tl.store(rows + group, key.to(tl.int64), mask=head)
    tl.store(starts + group, program * BLOCK + offset, mask=head)
    # Order, and padding.
    position = tl.load(sorted_entries + begin + offset, mask=in_range, other=0) // multiplicity
    tl.store(order + begin + offset, tl.where(in_range, position, -1).to(tl.int32), mask=valid)
    tl.store(rows + begin + offset, tl.zeros((BLOCK,), tl.int64) + total_rows, mask=valid & (offset >= groups - begin))
    tl.store(starts + begin + offset, tl.zeros((BLOCK,), tl.int32) + total, mask=valid & (offset >= groups - begin))
    if program == 0:
        tl.store(starts + num_entries, total)
        tl.store(num_groups, groups)


def row_groups(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Group by three launches, torch's sort and, for many blocks, a scan, without a host synchronization."""
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
    # Linear rows, in 32 bits if they fit; sort; segments.
    keys = torch.empty(num_entries, dtype=torch.int32 if total_rows < 2**31 else torch.int64, device=device)
    grid = (cdiv(num_entries, BLOCK),)
    args = layout.kernel_args, values, offsets, keys, total_rows, batch_size, num_keys, num_entries
    launch(_linear_rows_kernel, grid, *args, BLOCK=BLOCK)
    keys, entries = torch.sort(keys, stable=True)
    counts = torch.empty(grid, dtype=torch.int64, device=device)
    launch(_count_kernel, grid, keys, counts, total_rows, num_entries, BLOCK=BLOCK)
    is_scanned = grid[0] >= SCANNED_BLOCKS
    counts = counts.cumsum(0) if is_scanned else counts
    groups = rows, starts, order, num_groups
    sizes = total_rows, num_entries, *grid, layout.multiplicity
    launch(_segment_kernel, grid, keys, entries, counts, groups, *sizes, SCANNED=is_scanned, BLOCK=BLOCK)
    return groups


def row_groups_reference(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Group by a dict from each row to its positions."""
    tables, positions = [TableRow(*fields) for fields in layout.tables.tolist()], defaultdict(list)
    ids, ends, batch_size = values.tolist(), offsets.tolist(), batch_size_of(offsets, layout.key_starts)
    for key, lookups in enumerate(pairwise(layout.key_starts.tolist())):
        bags = pairwise(ends[key * batch_size : (key + 1) * batch_size + 1])
        key_positions = [position for begin, end in bags for position in range(begin, end)]
        for table in (tables[index] for index in layout.lookups[slice(*lookups), TABLE].tolist()):
            for position in key_positions:
                if 0 <= ids[position] < table.num_rows:
                    positions[table.first_row + ids[position]].append(position)
    distinct, capacity = sorted(positions), values.numel() * layout.multiplicity
    order = [position for row in distinct for position in sorted(positions[row])]
    starts = [0, *accumulate(len(positions[row]) for row in distinct)]

    def pad(numbers: list[int], size: int, fill_value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers + [fill_value] * (size - len(numbers)), dtype=dtype, device=values.device)

    rows = pad(distinct, capacity, layout.num_rows, torch.int64)
    num_groups = torch.tensor(len(distinct), device=values.device)
    return rows, pad(starts, capacity + 1, len(order)), pad(order, capacity, -1), num_groups
