"""Rows and summed gradients exchanged between ranks that hold the same rows, or other columns of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec

_REFUSED = -1


class RowSums(NamedTuple):
    """For each table: int64 `[U]` rows, and float32 `[U, dim]` the sum of the gradients of each."""

    rows: list[Tensor]
    sums: list[Tensor]


class SumsExchange:
    """Gathers every rank's sums; every rank of the group makes it with the same arguments.

    Every rank has the same bits: what it sends itself has crossed the codec, too. Bytes to every other rank: for each
    distinct row of the rank that has most, a code a column and 4, or 8 if some table has 2³¹ rows. `shapes`: rows and
    columns of each table.
    """

    def __init__(self, group: RankGroup, precision: ExchangePrecision, shapes: Sequence[tuple[int, int]]) -> None:
        self.group, self._precision, dims = group, precision, [dim for _, dim in shapes]
        self._number = torch.int32 if max(rows for rows, _ in shapes) < 2**31 else torch.int64
        self._tables = {dim: [table for table, other in enumerate(dims) if other == dim] for dim in dims}
        self._codecs = {dim: MessageCodec([[(0, dim)]], dim, precision.backward) for dim in dims}
        self.codecs = tuple(self._codecs.values())

    def __call__(self, own: RowSums) -> RowSums:
        """Table by table in the order of ranks: a row comes once for each rank that has it."""
        if self.group.size == 1:
            return own
        device = own.rows[0].device
        counts = torch.tensor([rows.shape[0] for rows in own.rows], dtype=torch.int64, device=device)
        exponent = _exponent(own.sums) if self._precision.scales_by_size else counts.new_zeros(1)
        told = self.group.all_gather(torch.cat([counts, exponent]), "sizes").tolist()
        by_rank = [(counts, self._precision.scale_below(exponent)) for *counts, exponent in told]
        if not any(any(counts) for counts, _ in by_rank):
            return own
        parts = [torch.cat(own.rows).to(self._number).view(torch.uint8)]
        for dim, tables in self._tables.items():
            some = [own.sums[table] for table in tables]
            sums = some[0] if len(some) == 1 else torch.cat(some)
            parts.append(self._codecs[dim].pack(sums, by_rank[self.group.rank][1]))
        longest = max(sum(self._sizes(counts, device)) for counts, _ in by_rank)
        longest = -(-longest // 8) * 8  # each rank's part begins with numbers of rows
        gathered = _all_gather_padded(self.group, parts, longest, "row gradients")
        found = [self._parse(part, *each) for part, each in zip(gathered, by_rank, strict=True)]
        by_table = ([torch.cat(each) for each in zip(*tables, strict=True)] for tables in zip(*found, strict=True))
        return RowSums(*by_table)

    def _sizes(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Bytes of a message's rows, and of the codes of each dim."""
        codes = [sum(counts[table] for table in tables) for tables in self._tables.values()]
        widths = [codec.part_bytes(device)[0] for codec in self.codecs]
        return [sum(counts) * self._number.itemsize, *(n * width for n, width in zip(codes, widths, strict=True))]

    def _parse(self, message: Tensor, counts: Sequence[int], scale: float) -> RowSums:
        sizes = self._sizes(counts, message.device)
        rows, *codes = message[: sum(sizes)].split(sizes)
        sums = [torch.empty(0)] * len(counts)
        for part, (dim, tables) in zip(codes, self._tables.items(), strict=True):
            numbers = [counts[table] for table in tables]
            matrix = self._codecs[dim].unpack(part, sum(numbers), torch.float32, scale)
            for table, of_table in zip(tables, matrix.split(numbers), strict=True):
                sums[table] = of_table
        return RowSums([*rows.view(self._number).long().split(list(counts))], sums)


def _exponent(sums: Sequence[Tensor]) -> Tensor:
    """int64 `[1]`: the least e so that all that is finite is below 2^e."""
    flat = torch.cat([of_table.flatten() for of_table in sums]).nan_to_num(0.0, 0.0, 0.0).abs()
    largest = torch.cat([flat, flat.new_zeros(1)]).amax(0, keepdim=True)
    return torch.frexp(largest).exponent.long()


def all_gather_rows(group: RankGroup, rows: Tensor, problem: ValueError | None = None) -> Tensor:
    """The distinct rows of all ranks, int64 `[V]`, ascending, from each rank's, int64 `[U]`, distinct, on the CPU.

    Bytes: 8 for each rank, and for each distinct row of the rank that has most of them, to every other rank. Raises
    `problem`, what is wrong with this rank's batch; the other ranks get a RuntimeError that names this one.
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
    gathered = _all_gather_padded(group, [rows], max(counts), "rows")
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).unique()


def _all_gather_padded(group: RankGroup, parts: Sequence[Tensor], longest: int, kind: str) -> Tensor:
    message = torch.cat([*parts, parts[0].new_zeros(longest - sum(part.numel() for part in parts))])
    return group.all_gather(message, kind)


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

    `blocks`: of all tables and ranks, the same on every rank. Those who hold a table's blocks have the same rows.
    `mine`: those of this rank, in any order; `own`: float32 `[U, num_columns]` for each of them.
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
