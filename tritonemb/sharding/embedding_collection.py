"""Unpooled lookups of tables that are spread over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.codec import ColumnRange
from tritonemb.comm.id_exchange import IdExchange, ReceivedIds
from tritonemb.comm.output_exchange import SequenceExchange
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.ops.bag import Bags, bag
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.placement import Held
from tritonemb.sharding.sharded_features import SentIds
from tritonemb.tables.lookup import Features
from tritonemb.tables.prefetched import Groups, SentFeatures
from tritonemb.tables.table_set import TableSet


class _Part(NamedTuple):
    """Lanes whose rows come back in one exchange: they have the same columns.

    Attributes:
        columns: of the result.
        ids, rows: there and back.
        locals: this rank's shards.
    """

    columns: ColumnRange
    ids: IdExchange
    rows: SequenceExchange
    locals: tuple[TableSet, ...]


class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` whose tables are cut as a plan says: same batches, same results.

    The ids of every rank's batch go to the ranks that own their rows, which send back a row for each. Of tables cut by
    rows, each distinct id of a rank's batch crosses once, and the sum of its gradients goes back.

    All else as for `ShardedEmbeddingBagCollection`.
    """

    pooled = False

    def _make_locals(self) -> tuple[tuple[TableSet, ...], tuple[tuple[Held, ...], ...]]:
        self._make_whole_row_updates()
        groups, place = self.groups, self.placement
        made: list[TableSet] = []
        held: list[tuple[Held, ...]] = []
        # Gradients are clamped one by one, and before weights multiply them: owners need all of both.
        self._apart = self.optimizer.max_gradient is not None
        self._parts: list[_Part] = []
        ways = sorted({((h.shard.first_column, h.shard.num_columns), h.summed) for h in place.held if h.lanes})
        for columns, distinct in ways:
            chosen = [h for h in place.held if self._is_of(h, columns, distinct)]
            lanes = tuple(sorted({lane for h in chosen for lane in h.lanes}))
            here = [h for h in chosen if h.shard.rank == groups.shards.rank]
            renamed = [h._replace(lanes=tuple(lanes.index(lane) for lane in h.lanes)) for h in here]
            local = self._local(renamed)
            chosen_lanes, check = [place.lanes[lane] for lane in lanes], self.bounds_check == "raise"
            ids = IdExchange(groups.ids, chosen_lanes, check, deduplicate=distinct and not self._apart)
            rows = SequenceExchange(groups.shards, columns[1], self.precision, groups.shards.size)
            self._parts.append(_Part(columns, ids, rows, tuple(t for t, _ in local)))
            made += [tables for tables, _ in local]
            held += [of_tables for _, of_tables in local]
        everywhere = self._local(place.on(groups.shards.rank, "everywhere"), bounds_check=True)
        self._everywhere = tuple(tables for tables, _ in everywhere)
        made += self._everywhere
        held += [of_tables for _, of_tables in everywhere]
        return tuple(made), tuple(held)

    @staticmethod
    def _is_of(held: Held, columns: ColumnRange, distinct: bool) -> bool:
        same = (held.shard.first_column, held.shard.num_columns) == columns and held.summed == distinct
        return bool(held.lanes) and same

    def send(self, features: Features | SentFeatures) -> SentIds:
        if isinstance(features, SentFeatures):
            return self._sent(features)
        batch = self._own_batch(features)
        # Weights stay here, as a rule: they multiply rows when these have come back.
        plain = batch if self._apart else KeyedJaggedTensor(batch.keys(), batch.values(), offsets=batch.offsets())
        problem = self._refusal(batch) if self._parts else None
        sent = self._to_device(SentIds(batch, tuple(part.ids(plain, problem) for part in self._parts), ()))
        pairs = zip(self._parts, sent.arrived, strict=True)
        groups = [tables.group(ids.features) for part, ids in pairs for tables in part.locals]
        groups += [tables.group(sent.batch) for tables in self._everywhere]
        return replace(sent, groups=tuple(groups))

    def forward(self, features: Features | SentFeatures) -> KeyedJaggedTensor:
        """Rows `[N, dim]` under the batch's keys and offsets; values of keys that no table knows are zero."""
        sent = self._sent(features)
        batch, groups = sent.batch, iter(sent.groups)
        dim = self.configs[0].embedding_dim
        num_values = batch.values().shape[0]
        total: Tensor | None = None
        for part, ids in zip(self._parts, sent.arrived, strict=True):
            rows = self._rows(part, ids, [next(groups) for _ in part.locals])
            own = self._in_place(part, rows, batch)
            if batch.weights_or_none() is not None and not self._apart:
                own = own * batch.weights().to(own.dtype).unsqueeze(1)
            first, width = part.columns
            own = own if width == dim else torch.nn.functional.pad(own, (first, dim - first - width))
            total = own if total is None else total + own
        for tables in self._everywhere:
            found = tables(batch, next(groups))
            total = found if total is None else total + found
        assert total is not None
        assert total.shape == (num_values, dim)
        return KeyedJaggedTensor(batch.keys(), total.to(self.output_dtype), offsets=batch.offsets())

    def saturated(self) -> int:
        return sum(part.rows.saturated() for part in self._parts)

    def _rows(self, part: _Part, ids: ReceivedIds, groups: list[Groups]) -> Tensor:
        """A row for each id of the batch, lane by lane."""
        found = [tables(ids.features, group) for tables, group in zip(part.locals, groups, strict=True)]
        if found:
            rows = found[0]
            for more in found[1:]:
                rows = rows + more
        else:
            rows = torch.zeros(0, part.columns[1], dtype=torch.float32, device=self.device, requires_grad=True)
        rows = part.rows(rows, ids)
        if ids.inverse is None or not rows.shape[0]:
            return rows
        every = ids.inverse.new_tensor([0, ids.inverse.shape[0]])
        return bag(rows, ids.inverse, None, Bags(every, pooled=False, checked=False))

    def _in_place(self, part: _Part, rows: Tensor, batch: KeyedJaggedTensor) -> Tensor:
        """Each row where its id is in the batch; zero for ids of other lanes."""
        keys = batch.keys()
        order = [keys.index(lane.feature) for lane in part.ids.routes]
        if order == list(range(len(keys))):
            return rows
        num_values = batch.values().shape[0]
        where = ops.jagged_permute(
            torch.arange(num_values, device=rows.device), batch.offsets(),
            torch.tensor(order, dtype=torch.int64, device=rows.device), len(keys), None, rows.shape[0],
        ).values  # fmt: skip
        return _put(rows, where, num_values)


class _Put(torch.autograd.Function):
    """Rows at distinct places of a larger matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, where: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(where)
        return rows.new_zeros(num_rows, rows.shape[1]).index_copy_(0, where, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (where,) = ctx.saved_tensors
        return grad.index_select(0, where), None, None


def _put(rows: Tensor, where: Tensor, num_rows: int) -> Tensor:
    found: Tensor = _Put.apply(rows, where, num_rows)
    return found
