"""`ShardedEmbeddingCollection`: unpooled lookups of sharded tables."""

import functools
import operator

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.comm.async_tensor import ordinary, send_gradients_first
from tritonemb.comm.id_exchange import IdExchange, Received
from tritonemb.comm.output_exchange import ColumnRange, OutputExchange, OutputExchangeFunction, SequenceExchange
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.sharding.collection import ShardedCollection, ShardedLookup
from tritonemb.tables.lookup import PrefetchedFeatures
from tritonemb.tables.table_set import Groups, TableSet


class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` whose tables are sharded as a plan says: same batches, same results.

    All else is as for `ShardedEmbeddingBagCollection`, but that the output exchange returns a row for each id. For
    row-wise sharded tables a rank's ids are deduplicated before, and the sum of an id's gradients is sent back.
    """

    pooled = False

    def _make_lookups(self) -> list[ShardedLookup]:
        groups, place = self.groups, self.placement
        # Gradients are clamped one by one, before weights multiply them: the ranks with the rows need all of both.
        self._exact_occurrences = self.optimizer.max_gradient is not None
        self._columns: list[ColumnRange] = []  # of the result, that each exchange returns
        lookups = []
        routed = [each for each in place.shards if each.routes]
        for columns, summed in sorted({(each.columns, each.summed) for each in routed}):
            chosen = [each for each in routed if (each.columns, each.summed) == (columns, summed)]
            routes = sorted({route for each in chosen for route in each.routes})
            here = [
                each._replace(routes=tuple(routes.index(route) for route in each.routes))
                for each in chosen
                if each.shard.rank == groups.shards.rank
            ]
            deduplicate = summed and not self._exact_occurrences
            found = [place.routes[route] for route in routes]
            ids = self._id_exchange(found, deduplicate=deduplicate, returns_rows=True)
            self._columns.append(columns)
            self._exchanges.append(SequenceExchange(groups.shards, columns[1], self.precision, groups.shards.size))
            lookups.append((ids, self._make_tables(here)))
        return lookups

    def _batch_to_send(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Weights stay here, as a rule: they multiply the returned rows."""
        if self._exact_occurrences:
            return batch
        return KeyedJaggedTensor(batch.keys(), batch.values(), offsets=batch.offsets())

    def forward(self, features: Features | PrefetchedFeatures) -> KeyedJaggedTensor:
        """Rows `[N, dim]` under the batch's keys and offsets; values of keys that no table knows are zero.

        With several ranks the rows are an `AsyncTensor`.
        """
        if not torch.compiler.is_compiling():
            return self._look_up(features)
        return self._look_up_and_wait(features)

    @_disable_dynamo  # the graph ends here: the rows are as many as the batch has ids
    def _look_up_and_wait(self, features: Features | PrefetchedFeatures) -> KeyedJaggedTensor:
        rows = self._look_up(features)
        return KeyedJaggedTensor(rows.keys(), ordinary(rows.values()), offsets=rows.offsets())

    def _look_up(self, features: Features | PrefetchedFeatures) -> KeyedJaggedTensor:
        batch, own_groups, received = self.prefetch(features)
        dim, parts = self.configs[0].embedding_dim, []
        exchanges = zip(self._lookups, self._columns, self._exchanges, received, strict=True)
        for (ids, sets), (first, width), exchange, (of_ids, groups) in exchanges:
            own = self._in_batch_order(ids, self._rows(sets, exchange, width, of_ids, groups), batch)
            if batch.weights_or_none() is not None and not self._exact_occurrences:
                own = own * batch.weights().to(own.dtype).unsqueeze(1)
            parts.append(own if width == dim else torch.nn.functional.pad(own, (first, dim - first - width)))
        parts += [tables.look_up(batch, groups) for tables, groups in zip(self._replicated, own_groups, strict=True)]
        total = functools.reduce(operator.add, parts).to(self.output_dtype)
        send_gradients_first(total, OutputExchangeFunction)
        return KeyedJaggedTensor(batch.keys(), total, offsets=batch.offsets())

    def _rows(
        self, sets: list[TableSet], exchange: OutputExchange, width: int, received: Received,
        groups: list[Groups | None],
    ) -> Tensor:  # fmt: skip
        ids, _, routes = received
        assert routes is not None
        found = [tables.look_up(ids, of_ids, routes.occurrences) for tables, of_ids in zip(sets, groups, strict=True)]
        if not found:  # a rank without such shards takes part in the backward's exchange, too
            found = [self._no_columns.new_zeros(0, width, requires_grad=self._no_columns.requires_grad)]
        return exchange(functools.reduce(operator.add, found), routes)

    def _in_batch_order(self, ids: IdExchange, rows: Tensor, batch: KeyedJaggedTensor) -> Tensor:
        """Each row at the position of its id in the batch; zero at those of other routes."""
        keys = batch.keys()
        order = [keys.index(route.feature) for route in ids.routes]
        if order == list(range(len(keys))):
            return rows
        num_values = batch.values().shape[0]
        where, _, _ = ops.jagged_permute(
            torch.arange(num_values, device=rows.device), batch.offsets(),
            torch.tensor(order, dtype=torch.int64, device=rows.device), len(keys), None, rows.shape[0],
        )  # fmt: skip
        nothing = torch.zeros(num_values, rows.shape[1], dtype=rows.dtype, device=rows.device)
        return nothing.index_copy(0, where, rows)
