"""Rows and summed gradients exchanged between ranks that hold the same rows, or other columns of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.comm.group import RankGroup

_REFUSED = -1


class RowSums(NamedTuple):
    """For each table: int64 `[U]` rows, and float32 `[U, dim]` the sum of the gradients of each."""

    rows: list[Tensor]
    sums: list[Tensor]


def all_gather_sums(group: RankGroup, own: RowSums) -> RowSums:
    """Every rank's sums, table by table in the order of ranks: a row comes once for each rank that has it.

    Bytes: `8 + 4 · dim` for each distinct row of a rank, to every other rank.
    """
    if group.size == 1:
        return own
    device = own.rows[0].device
    counts = torch.tensor([rows.shape[0] for rows in own.rows], dtype=torch.int64, device=device)
    all_counts = group.all_gather(counts, "sizes").tolist()
    dims = [sums.shape[1] for sums in own.sums]
    words = [sum(n * (2 + dim) for n, dim in zip(mine, dims, strict=True)) for mine in all_counts]
    if not any(words):
        return own
    rows, sums = torch.cat(own.rows), torch.cat([sums.flatten() for sums in own.sums])
    message = torch.cat([rows.view(torch.int32), sums.view(torch.int32)])
    longest = max(words) + max(words) % 2  # rows are 8 bytes
    gathered = _all_gather_padded(group, message, longest, "row gradients")
    by_rank = [_parse(part, counts, dims) for part, counts in zip(gathered, all_counts, strict=True)]
    tables = range(len(dims))
    return RowSums(
        [torch.cat([rank.rows[table] for rank in by_rank]) for table in tables],
        [torch.cat([rank.sums[table] for rank in by_rank]) for table in tables],
    )


def _parse(message: Tensor, counts: Sequence[int], dims: Sequence[int]) -> RowSums:
    num_rows = sum(counts)
    rows = message[: 2 * num_rows].view(torch.int64).split(list(counts))
    sizes = [n * dim for n, dim in zip(counts, dims, strict=True)]
    sums = message[2 * num_rows : 2 * num_rows + sum(sizes)].view(torch.float32).split(sizes)
    return RowSums(list(rows), [flat.view(-1, dim) for flat, dim in zip(sums, dims, strict=True)])


def all_gather_rows(group: RankGroup, rows: Tensor, problem: ValueError | None = None) -> Tensor:
    """The distinct rows of all ranks, int64 `[V]`, ascending, from each rank's, int64 `[U]`, distinct, on the CPU.

    Bytes: 8 for each rank, and for each distinct row of the rank that has most of them, to every other rank.

    Raises:
        ValueError: `problem`, what is wrong with this rank's batch; the other ranks get a RuntimeError that names it.
    """
    own = rows.numel() if problem is None else _REFUSED
    counts = group.all_gather(torch.tensor([own], device=rows.device), "sizes").flatten().tolist()
    if problem is not None:
        raise problem
    if _REFUSED in counts:
        rank = group.ranks[counts.index(_REFUSED)]
        raise RuntimeError(f"rank {rank} has refused its batch; its own error says why")
    if not any(counts):
        return rows
    gathered = _all_gather_padded(group, rows, max(counts), "rows")
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).unique()


def _all_gather_padded(group: RankGroup, message: Tensor, longest: int, kind: str) -> Tensor:
    return group.all_gather(torch.nn.functional.pad(message, (0, longest - message.numel())), kind)


class ColumnBlock(NamedTuple):
    """A block of a table's columns: the number of the table, the rank that holds it, and the columns."""

    table: int
    rank: int
    first_column: int
    num_columns: int


def exchange_columns(
    group: RankGroup, blocks: Sequence[ColumnBlock], mine: Sequence[ColumnBlock], own: Sequence[Tensor],
    kind: str = "row columns",
) -> dict[int, Tensor]:  # fmt: skip
    """Whole rows, `[U, dim]` by table, from blocks of their columns, on every rank that holds one of its blocks.

    Args:
        blocks: of all tables and ranks, the same on every rank. Those who hold a table's blocks have the same rows.
        mine: those of this rank, in any order.
        own: float32 `[U, num_columns]` for each of them.
    """
    ordered = sorted(zip(mine, own, strict=True), key=lambda pair: blocks.index(pair[0]))
    num_rows = {block.table: values.shape[0] for block, values in ordered}
    holders = {block.table: {other.rank for other in blocks if other.table == block.table} for block in blocks}
    peers = range(group.size)
    sent = [[values.flatten() for block, values in ordered if peer in holders[block.table]] for peer in peers]
    received = [[b for b in blocks if b.rank == peer and b.table in num_rows] for peer in peers]
    flat = [piece for pieces in sent for piece in pieces]
    message = group.all_to_all(
        torch.cat(flat) if flat else torch.empty(0), [sum(piece.numel() for piece in pieces) for pieces in sent],
        [sum(num_rows[b.table] * b.num_columns for b in part) for part in received], kind,
    )  # fmt: skip
    found = {t: message.new_empty(n, sum(b.num_columns for b in blocks if b.table == t)) for t, n in num_rows.items()}
    in_order = [block for part in received for block in part]
    pieces = message.split([num_rows[b.table] * b.num_columns for b in in_order])
    for (table, _, first, width), piece in zip(in_order, pieces, strict=True):
        found[table][:, first : first + width] = piece.view(-1, width)
    return found
