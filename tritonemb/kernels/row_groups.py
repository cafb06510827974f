"""Grouping: from a batch's ids to the distinct rows it touches, and for each row the positions that use it.

    rows        int64 [N]      distinct linear rows (first row of the table + id), ascending; num_groups are valid
    starts      int32 [N + 1]  segment of `order` that belongs to each row
    order       int32 [N]      positions (into values) sorted by row; stable, so every sum has one order
    num_groups  int64 []

`N` is the number of values times the most lookups of one key, a size known without looking at data. Behind the valid
part stand the total number of rows, empty segments and -1. Ids out of range are left out.

Bytes: ids read once, 8·N; 20·N written; a radix sort in between moves 16·N a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.kernels.layout import FIRST_ROW, NUM_ROWS, TABLE, Layout, batch_size_of


def entries_reference(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Every (lookup, position) pair of a batch, by lookup: int64 lookup, position and bag."""
    batch_size = batch_size_of(offsets, layout.key_starts)
    bag = torch.repeat_interleave(torch.diff(offsets))
    lookups, positions = [], []
    for key in range(layout.key_starts.numel() - 1):
        begin, end = int(offsets[key * batch_size]), int(offsets[(key + 1) * batch_size])
        for lookup in range(int(layout.key_starts[key]), int(layout.key_starts[key + 1])):
            positions.append(torch.arange(begin, end, device=values.device))
            lookups.append(torch.full_like(positions[-1], lookup))
    if not positions:
        empty = torch.empty(0, dtype=torch.int64, device=values.device)
        return empty, empty, empty
    position = torch.cat(positions)
    return torch.cat(lookups), position, bag[position]


def row_groups_reference(values: Tensor, offsets: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Grouping by `torch.sort`."""
    lookup, position, _ = entries_reference(values, offsets, layout)
    table = layout.lookups[lookup, TABLE]
    ids = values[position].to(torch.int64)
    inside = (ids >= 0) & (ids < layout.tables[table, NUM_ROWS])
    linear, position = (layout.tables[table, FIRST_ROW] + ids)[inside], position[inside]
    by_position = torch.argsort(position, stable=True)
    linear, position = linear[by_position], position[by_position]
    by_row = torch.argsort(linear, stable=True)
    distinct, counts = torch.unique_consecutive(linear[by_row], return_counts=True)
    num_valid, num_groups = linear.numel(), distinct.numel()

    capacity = values.numel() * layout.multiplicity
    rows = torch.full(
        (capacity,), int(layout.tables[-1, FIRST_ROW] + layout.tables[-1, NUM_ROWS]), device=values.device
    )
    rows[:num_groups] = distinct
    starts = torch.full((capacity + 1,), num_valid, dtype=torch.int32, device=values.device)
    starts[0] = 0
    starts[1 : num_groups + 1] = torch.cumsum(counts, 0)
    order = torch.full((capacity,), -1, dtype=torch.int32, device=values.device)
    order[:num_valid] = position[by_row]
    return rows, starts, order, torch.tensor(num_groups, device=values.device)
