"""`ShardedEmbeddingCollection`: unpooled lookups of sharded tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.codec import ColumnRange
from tritonemb.comm.id_exchange import IdExchange, ReceivedIds
from tritonemb.comm.output_exchange import SequenceExchange
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.ops.bag import Bags, bag
from tritonemb.sharding.collection import ExchangedIds, ShardedCollection
from tritonemb.sharding.placement import PlacedShard
from tritonemb.tables.lookup import PrefetchedFeatures
from tritonemb.tables.table_set import Groups, TableSet


class _SequenceExchanges(NamedTuple):
    """ID routes whose rows return in one exchange: they have the same columns.

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
    """An `EmbeddingCollection` whose tables are sharded as a plan says: same batches, same results.

    The ID exchange gives the ids of every rank's batch to the ranks with their rows, and an output exchange returns a
    row for each. For row-wise sharded tables the ids of a rank's batch are deduplicated before, and the sum of an id's
    gradients is sent back.

    All else as for `ShardedEmbeddingBagCollection`.
    """

    pooled = False

    def _make_locals(self) -> tuple[tuple[TableSet, ...], tuple[tuple[PlacedShard, ...], ...]]:
        self._make_whole_row_updates()
        groups, place = self.groups, self.placement
        made: list[TableSet] = []
        shards: list[tuple[PlacedShard, ...]] = []
        # Gradients are clamped one by one, before weights multiply them: the ranks with the rows need all of both.
        self._exact_occurrences = self.optimizer.max_gradient is not None
        self._parts: list[_SequenceExchanges] = []
        schemes = sorted({((h.shard.first_column, h.shard.num_columns), h.summed) for h in place.shards if h.routes})
        for columns, distinct in schemes:
            chosen = [h for h in place.shards if self._is_of(h, columns, distinct)]
            routes = tuple(sorted({route for h in chosen for route in h.routes}))
            here = [h for h in chosen if h.shard.rank == groups.shards.rank]
            renamed = [h._replace(routes=tuple(routes.index(route) for route in h.routes)) for h in here]
            local = self._local(renamed)
            chosen_routes, check = [place.routes[route] for route in routes], self.bounds_check == "raise"
            ids = IdExchange(groups.ids, chosen_routes, check, deduplicate=distinct and not self._exact_occurrences)
            rows = SequenceExchange(groups.shards, columns[1], self.precision, groups.shards.size)
            self._parts.append(_SequenceExchanges(columns, ids, rows, tuple(t for t, _ in local)))
            made += [tables for tables, _ in local]
            shards += [of_tables for _, of_tables in local]
        replicated = self._local(place.on(groups.shards.rank, "replicated"), bounds_check=True)
        self._replicated = tuple(tables for tables, _ in replicated)
        made += self._replicated
        shards += [of_tables for _, of_tables in replicated]
        return tuple(made), tuple(shards)

    @staticmethod
    def _is_of(each: PlacedShard, columns: ColumnRange, distinct: bool) -> bool:
        same = (each.shard.first_column, each.shard.num_columns) == columns and each.summed == distinct
        return bool(each.routes) and same

    def prefetch(self, features: Features | PrefetchedFeatures) -> ExchangedIds:
        """See `ShardedCollection.prefetch`."""
        if isinstance(features, PrefetchedFeatures):
            return self._exchanged(features)
        batch = self.own_batch(features)
        # Weights stay here, as a rule: they multiply the returned rows.
        unweighted = KeyedJaggedTensor(batch.keys(), batch.values(), offsets=batch.offsets())
        ids = batch if self._exact_occurrences else unweighted
        problem = self._bad_ids(batch) if self._parts else None
        exchanged = self._to_device(ExchangedIds(batch, tuple(part.ids(ids, problem) for part in self._parts), ()))
        pairs = zip(self._parts, exchanged.received, strict=True)
        groups = [tables.group(received.features) for part, received in pairs for tables in part.locals]
        groups += [tables.group(exchanged.batch) for tables in self._replicated]
        return exchanged._replace(groups=tuple(groups))

    def forward(self, features: Features | PrefetchedFeatures) -> KeyedJaggedTensor:
        """Rows `[N, dim]` under the batch's keys and offsets; values of keys that no table knows are zero."""
        exchanged = self._exchanged(features)
        batch, groups = exchanged.batch, iter(exchanged.groups)
        dim = self.configs[0].embedding_dim
        num_values = batch.values().shape[0]
        total: Tensor | None = None
        for part, ids in zip(self._parts, exchanged.received, strict=True):
            rows = self._rows(part, ids, [next(groups) for _ in part.locals])
            own = self._in_batch_order(part, rows, batch)
            if batch.weights_or_none() is not None and not self._exact_occurrences:
                own = own * batch.weights().to(own.dtype).unsqueeze(1)
            first, width = part.columns
            own = own if width == dim else torch.nn.functional.pad(own, (first, dim - first - width))
            total = own if total is None else total + own
        for tables in self._replicated:
            found = tables.look_up(batch, next(groups))
            total = found if total is None else total + found
        assert total is not None
        assert total.shape == (num_values, dim)
        return KeyedJaggedTensor(batch.keys(), total.to(self.output_dtype), offsets=batch.offsets())

    def saturated(self) -> int:
        """See `ShardedCollection.saturated`."""
        return sum(part.rows.saturated() for part in self._parts)

    def _rows(self, part: _SequenceExchanges, ids: ReceivedIds, groups: list[Groups]) -> Tensor:
        """A row for each id of the batch, route by route."""
        found = [tables.look_up(ids.features, group) for tables, group in zip(part.locals, groups, strict=True)]
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

    def _in_batch_order(self, part: _SequenceExchanges, rows: Tensor, batch: KeyedJaggedTensor) -> Tensor:
        """Each row at the position of its id in the batch; zero at those of other routes."""
        keys = batch.keys()
        order = [keys.index(route.feature) for route in part.ids.routes]
        if order == list(range(len(keys))):
            return rows
        num_values = batch.values().shape[0]
        where = ops.jagged_permute(
            torch.arange(num_values, device=rows.device), batch.offsets(),
            torch.tensor(order, dtype=torch.int64, device=rows.device), len(keys), None, rows.shape[0],
        ).values  # fmt: skip
        return _put(rows, where, num_values)


class _Scatter(torch.autograd.Function):
    """Rows at distinct positions of a larger matrix."""

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
    found: Tensor = _Scatter.apply(rows, where, num_rows)
    return found
