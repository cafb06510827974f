"""Exchange of rows and summed gradients between ranks that have replicas, or different columns, of the same rows; and
data parallelism of dense layers inside a compiled graph.

Autograd gets the gradients of a graph all at once, so `DistributedDataParallel` would start to reduce them after all
computation. Here a bucket of gradients is all-reduced as soon as it is computed, after the exchanges of the backward.
FSDP2's hooks of modules do not trace: a graph gathers the shards of a bucket itself, and reduce-scatters its gradients.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from tritonemb.comm.group import RankGroup, all_gather_single, reduce_scatter_single, wait_for
from tritonemb.comm.output_exchange import ExchangePrecision, MessageCodec, Receive, graph_order
from tritonemb.ops.registry import define, objects, register

_FAILED = -1
BUCKET_BYTES = 1 << 20  # a bucket of this size is full


class RowSums(NamedTuple):
    """Distinct rows of each table, int64 `[U]`, and the sums of their gradients, float32 `[U, dim]`."""

    rows: list[Tensor]
    sums: list[Tensor]


class SumsExchange:
    """All-gather of row sums. All ranks of the group create it with the same arguments.

    The result is bitwise identical on all ranks: a rank encodes its own sums, too. Bytes to every other rank, per
    row of the rank with the most distinct rows: a code per column, and 4 (8 if a table has 2³¹ rows) for the row.
    `shapes` are rows and columns of each table.
    """

    def __init__(self, group: RankGroup, precision: ExchangePrecision, shapes: Sequence[tuple[int, int]]) -> None:
        self.group, self._precision, dims = group, precision, [dim for _, dim in shapes]
        self._row_dtype = torch.int32 if max(rows for rows, _ in shapes) < 2**31 else torch.int64
        self._tables = {dim: [table for table, table_dim in enumerate(dims) if table_dim == dim] for dim in dims}
        self._codecs = {dim: MessageCodec([[(0, dim)]], dim, precision.backward) for dim in dims}
        self.codecs = tuple(self._codecs.values())

    def __call__(self, local_sums: RowSums) -> RowSums:
        """Return the sums of all ranks by table, in the order of ranks: a row repeats for each rank that has it."""
        if self.group.size == 1:
            return local_sums
        # Sizes and scales of all ranks.
        device = local_sums.rows[0].device
        counts = torch.tensor([rows.shape[0] for rows in local_sums.rows], dtype=torch.int64, device=device)
        exponent = exponent_of(local_sums.sums) if self._precision.scales_by_size else counts.new_zeros(1)
        sizes_of_ranks = self.group.all_gather(torch.cat([counts, exponent]), "sizes").tolist()
        by_rank = [(counts, self._precision.scale_below(exponent)) for *counts, exponent in sizes_of_ranks]
        if not any(any(counts) for counts, _ in by_rank):
            return local_sums
        # A message per rank: rows, then codes of each dim; padded to the longest.
        parts = [torch.cat(local_sums.rows).to(self._row_dtype).view(torch.uint8)]
        for dim, tables in self._tables.items():
            matrices = [local_sums.sums[table] for table in tables]
            sums = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
            parts.append(self._codecs[dim].pack(sums, by_rank[self.group.rank][1]))
        message_bytes = max(sum(self._sizes(counts, device)) for counts, _ in by_rank)
        message_bytes = -(-message_bytes // 8) * 8  # align the rows of each rank
        messages = _all_gather_padded(self.group, parts, message_bytes, "row gradients")
        rank_sums = [self._unpack(part, *sizes) for part, sizes in zip(messages, by_rank, strict=True)]
        fields = ([torch.cat(table) for table in zip(*lists, strict=True)] for lists in zip(*rank_sums, strict=True))
        return RowSums(*fields)

    def _sizes(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return the bytes of a message's rows, and of the codes of each dim."""
        codes = [sum(counts[table] for table in tables) for tables in self._tables.values()]
        sizes = [codec.sizes([count], device)[0] for count, codec in zip(codes, self.codecs, strict=True)]
        return [sum(counts) * self._row_dtype.itemsize, *sizes]

    def _unpack(self, message: Tensor, counts: Sequence[int], scale: float) -> RowSums:
        sizes = self._sizes(counts, message.device)
        rows, *codes = message[: sum(sizes)].split(sizes)
        sums = [torch.empty(0)] * len(counts)
        for part, (dim, tables) in zip(codes, self._tables.items(), strict=True):
            table_counts = [counts[table] for table in tables]
            matrix = self._codecs[dim].unpack(part, sum(table_counts), torch.float32, scale)
            for table, table_sums in zip(tables, matrix.split(table_counts), strict=True):
                sums[table] = table_sums
        return RowSums([*rows.view(self._row_dtype).long().split(list(counts))], sums)


def exponent_of(sums: Sequence[Tensor]) -> Tensor:
    """Return the least e, int64 `[1]`, such that all finite sums are below 2^e."""
    magnitudes = torch.cat([table_sums.flatten() for table_sums in sums]).nan_to_num(0.0, 0.0, 0.0).abs()
    largest = torch.cat([magnitudes, magnitudes.new_zeros(1)]).amax(0, keepdim=True)
    return torch.frexp(largest).exponent.long()


def all_gather_rows(group: RankGroup, rows: Tensor, error: ValueError | None = None) -> Tensor:
    """Return the union of all ranks' distinct rows, int64 `[U]` on the CPU, sorted.

    Bytes to every other rank: 8 per rank, and 8 per row of the rank with the most rows. Raise `error`, the error of
    this rank's batch; the other ranks raise RuntimeError, which names this rank.
    """
    local_count = rows.numel() if error is None else _FAILED
    counts = group.all_gather(torch.tensor([local_count], device=rows.device), "sizes").flatten().tolist()
    if error is not None:
        raise error
    if _FAILED in counts:
        rank = group.ranks[counts.index(_FAILED)]
        raise RuntimeError(f"rank {rank} rejected its batch; see the error on that rank")
    if not any(counts):
        return rows
    messages = _all_gather_padded(group, [rows], max(counts), "rows")
    return torch.cat([part[:count] for part, count in zip(messages, counts, strict=True)]).unique()


def _all_gather_padded(group: RankGroup, parts: Sequence[Tensor], num_elements: int, kind: str) -> Tensor:
    message = torch.cat([*parts, parts[0].new_zeros(num_elements - sum(part.numel() for part in parts))])
    return group.all_gather(message, kind)


class ColumnBlock(NamedTuple):
    """A block of a table's columns, and its rank."""

    table: int
    rank: int
    first_column: int
    num_columns: int


def exchange_columns(
    group: RankGroup, blocks: Sequence[ColumnBlock], local_blocks: Sequence[ColumnBlock], columns: Sequence[Tensor],
    kind: str = "row columns",
) -> dict[int, Tensor]:  # fmt: skip
    """Return whole rows, `[U, dim]` by table, assembled from their column blocks on every rank with a block.

    `blocks` are those of all tables and ranks, the same on every rank; the ranks of a table have the same rows. This
    rank passes its `local_blocks`, in any order, and for each the `columns`, float32 `[U, num_columns]`.
    """
    ordered_blocks = sorted(zip(local_blocks, columns, strict=True), key=lambda pair: blocks.index(pair[0]))
    num_rows = {block.table: values.shape[0] for block, values in ordered_blocks}
    ranks_of_table = {block.table: {b.rank for b in blocks if b.table == block.table} for block in blocks}
    peers = range(group.size)
    by_peer = [[v.flatten() for block, v in ordered_blocks if peer in ranks_of_table[block.table]] for peer in peers]
    received_by_rank = [[b for b in blocks if b.rank == peer and b.table in num_rows] for peer in peers]
    sent_pieces = [piece for pieces in by_peer for piece in pieces]
    values = torch.cat(sent_pieces) if sent_pieces else torch.empty(0)
    message = group.all_to_all(
        values, [sum(piece.numel() for piece in pieces) for pieces in by_peer],
        [sum(num_rows[b.table] * b.num_columns for b in part) for part in received_by_rank], kind,
    )()  # fmt: skip
    dims = {table: sum(b.num_columns for b in blocks if b.table == table) for table in num_rows}
    whole_rows = {table: message.new_empty(count, dims[table]) for table, count in num_rows.items()}
    received_blocks = [block for part in received_by_rank for block in part]
    pieces = message.split([num_rows[b.table] * b.num_columns for b in received_blocks])
    for (table, _, first, width), piece in zip(received_blocks, pieces, strict=True):
        whole_rows[table][:, first : first + width] = piece.view(-1, width)
    return whole_rows


class GraphDataParallel:
    """Averages gradients of `module` over the ranks of `group`; all ranks create it with the same module."""

    syncs = True  # whether `GraphShards` reduces gradients in a backward, or adds them to those of the next one

    def __init__(self, group: RankGroup, module: nn.Module) -> None:
        self.group, self.handle, self.buckets = group, register(self), list[dict[str, Tensor]]()
        size, dtype = BUCKET_BYTES, None
        used = [(name, p) for name, p in module.named_parameters() if p.requires_grad or isinstance(p, DTensor)]
        for name, parameter in reversed(used):  # about the order of their gradients
            if size >= BUCKET_BYTES or parameter.dtype != dtype:
                self.buckets.append({})
                size, dtype = 0, parameter.dtype
            self.buckets[-1][name] = parameter
            size += parameter.nbytes

    def parameters(self, buffers: list[Tensor]) -> dict[str, Tensor]:
        """Return in a trace the parameters by name, as tensors whose gradients are averaged. Broadcast `buffers`."""
        averaged: dict[str, Tensor] = {}
        if buffers:
            torch.ops.tritonemb.broadcast_buffers(buffers, self.handle)
        for number, bucket in reversed([*enumerate(self.buckets)]):
            graph_order[1], *tensors = _Averaged.apply(graph_order[1], self.handle, number, *bucket.values())
            averaged.update(zip(bucket, tensors, strict=True))
        return averaged

    def unflatten(self, bucket: Sequence[int], _: Sequence[Tensor]) -> Sequence[int]:
        return bucket

    def shape(self, bucket: Sequence[int], back: bool) -> tuple[int]:
        return (sum(parameter.numel() for parameter in self.buckets[bucket[0]].values()),)

    def start(self, grads: Sequence[Tensor], bucket: Sequence[int], back: bool) -> Receive:
        """Start to average the gradients, with those that `no_sync` has accumulated in `.grad`, which is cleared."""
        parts = []
        for parameter, grad in zip(self.buckets[bucket[0]].values(), grads, strict=True):
            parts.append((grad if parameter.grad is None else parameter.grad + grad).reshape(-1))
            parameter.grad = None
        sums = torch.cat(parts).mul_(1 / self.group.size)
        work = dist.all_reduce(sums, group=self.group.process_group, async_op=True)
        return partial(wait_for, work, sums)


class GraphShards(GraphDataParallel):
    """Gathers in a graph the parameters of `module` that `fully_shard` has sharded over the ranks of `group`."""

    def __init__(self, group: RankGroup, module: nn.Module) -> None:
        super().__init__(group, module)
        self._pending: dict[int, Tensor] = {}  # by bucket: gradients that are not reduced yet
        self._shapes = [{name: parameter.shape for name, parameter in bucket.items()} for bucket in self.buckets]
        # Inputs by which autograd reaches the backward.
        examples: list[Any] = [next(iter(bucket.values())) for bucket in self.buckets]
        self._anchors = [example.to_local().new_zeros(1).requires_grad_() for example in examples]

    def parameters(self, buffers: list[Tensor]) -> dict[str, Tensor]:
        """Return in a trace the whole parameters by name. FSDP2 does not broadcast `buffers`."""
        gathered: dict[str, Tensor] = {}
        for number, shapes in reversed([*enumerate(self._shapes)]):
            batch: Any = self.handle, False, [number], []
            anchor = self._anchors[number]
            started, graph_order[0] = torch.ops.tritonemb.start_exchange([anchor], graph_order[0], *batch)
            values, graph_order[1] = torch.ops.tritonemb.finish_exchange(started, graph_order[1], *batch)
            parts = values.split([shape.numel() for shape in shapes.values()])
            gathered |= {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        return gathered

    def shape(self, bucket: Sequence[int], back: bool) -> tuple[int]:
        return (1,) if back else super().shape(bucket, back)

    def start(self, grads: Sequence[Tensor], bucket: Sequence[int], back: bool) -> Receive:
        """Start to gather the parameters, or (`back`) to average their gradients, which are added to `.grad`."""
        parameters: list[Any] = [*self.buckets[bucket[0]].values()]
        # Elements of each padded shard.
        sizes = [-(-parameter.shape[0] // self.group.size) * parameter.shape[1:].numel() for parameter in parameters]
        return self._reduce(grads[0], bucket[0], parameters, sizes) if back else self._gather(parameters, sizes)

    def _gather(self, parameters: Sequence[Any], sizes: Sequence[int]) -> Receive:
        shards = [parameter.detach().to_local().reshape(-1) for parameter in parameters]
        local = torch.cat([pad(shard, (0, size - len(shard))) for shard, size in zip(shards, sizes, strict=True)])
        result = local.new_empty(self.group.size * len(local))
        work = all_gather_single(result, local, self.group.process_group, async_op=True)

        def receive() -> Tensor:
            pieces = wait_for(work, result).view(self.group.size, -1).split(list(sizes), dim=1)
            pairs = zip(pieces, parameters, strict=True)
            return torch.cat([piece.reshape(-1)[: parameter.numel()] for piece, parameter in pairs])

        return receive

    def _reduce(self, grad: Tensor, bucket: int, parameters: Sequence[Any], sizes: Sequence[int]) -> Receive:
        grad = grad + self._pending.pop(bucket) if bucket in self._pending else grad.clone()
        if not self.syncs:
            self._pending[bucket] = grad
            return partial(grad.new_zeros, 1)
        # A row per rank: its shards, padded.
        parts = grad.split([parameter.numel() for parameter in parameters])
        size, padded = self.group.size, zip(parts, sizes, strict=True)
        message = torch.cat([pad(part, (0, n * size - len(part))).view(size, n) for part, n in padded], dim=1)
        result = grad.new_empty(sum(sizes))
        average, group = dist.ReduceOp.AVG, self.group.process_group
        work = reduce_scatter_single(result, message.view(-1), average, group, async_op=True)

        def receive() -> Tensor:
            for parameter, shard in zip(parameters, wait_for(work, result).split(list(sizes)), strict=True):
                if parameter.requires_grad:
                    local = parameter.to_local()
                    new = shard[: local.numel()].view(local.shape)
                    options = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
                    new = DTensor.from_local(new, parameter.device_mesh, parameter.placements, **options)
                    parameter.grad = new if parameter.grad is None else parameter.grad + new
            return grad.new_zeros(1)

        return receive


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, handle: int, bucket: int, *parameters: Tensor) -> Any:
        ctx.batch, ctx.shapes = (handle, True, [bucket], []), [parameter.shape for parameter in parameters]
        return order.clone(), *(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, order_grad: Tensor, *grads: Tensor) -> Any:
        started, sent = torch.ops.tritonemb.start_exchange(grads, order_grad, *ctx.batch)
        averages, _ = torch.ops.tritonemb.finish_exchange(started, None, *ctx.batch)
        parts = averages.split([shape.numel() for shape in ctx.shapes])
        return sent, None, None, *(part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True))


def _broadcast(buffers: list[Tensor], handle: int) -> None:
    group = objects[handle].group
    for buffer in buffers:
        dist.broadcast(buffer, group.ranks[0], group.process_group)


define("broadcast_buffers", "(Tensor(a!)[] buffers, int handle) -> ()", lambda *_: None, _broadcast)
