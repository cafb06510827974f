"""`ShardedEmbeddingCollection`: unpooled lookups of sharded tables."""

import functools
import operator

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.comm.async_tensor import send_gradients_first, to_ordinary
from tritonemb.comm.id_exchange import IdExchange, Received
from tritonemb.comm.output_exchange import ColumnRange, OutputExchange, OutputExchangeFunction, SequenceExchange
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.sharding.collection import ShardedCollection, ShardedLookup
from tritonemb.tables.lookup_tables import Groups
from tritonemb.tables.table_set import PrefetchedFeatures, TableSet


class ShardedEmbeddingCollection(ShardedCollection):
    """`EmbeddingCollection` whose tables are sharded by a plan: same inputs, same outputs.

    It works like `ShardedEmbeddingBagCollection`, but the output exchange returns a row for each id. For row-wise
    sharded tables, ids are deduplicated before the exchange, and the backward sends the sum of an id's gradients.
    """

    pooled = False

    def _make_lookups(self) -> list[ShardedLookup]:
        groups, shard_map = self.groups, self.shard_map
        # Gradients are clamped per occurrence, before weights scale them: owners need all gradients and weights.
        self._exact_occurrences = self.optimizer.max_gradient is not None
        self._columns: list[ColumnRange] = []  # columns of the output, by exchange
        lookups = []
        routed = [placed for placed in shard_map.shards if placed.routes]
        # One ID exchange and one output exchange per column block, with and without deduplication.
        for columns, row_sharded in sorted({(placed.columns, placed.row_sharded) for placed in routed}):
            block = [placed for placed in routed if (placed.columns, placed.row_sharded) == (columns, row_sharded)]
            routes = sorted({route for placed in block for route in placed.routes})
            local_shards = [
                placed._replace(routes=tuple(routes.index(route) for route in placed.routes))
                for placed in block
                if placed.shard.rank == groups.shards.rank
            ]
            deduplicate = row_sharded and not self._exact_occurrences
            id_routes = [shard_map.routes[route] for route in routes]
            ids = self._id_exchange(id_routes, deduplicate=deduplicate, returns_rows=True)
            self._columns.append(columns)
            self._exchanges.append(SequenceExchange(groups.shards, columns[1], self.precision, groups.shards.size))
            lookups.append((ids, self._make_table_sets(local_shards)))
        return lookups

    def _batch_to_send(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Drop per-sample weights, which scale the returned rows on this rank, unless owners need them."""
        if self._exact_occurrences:
            return batch
        return KeyedJaggedTensor(batch.keys(), batch.values(), offsets=batch.offsets())

    def forward(self, features: Features | PrefetchedFeatures) -> KeyedJaggedTensor:
        """Return rows `[N, dim]` under the batch's keys and offsets; zeros for keys without a table.

        With several ranks the rows are an `AsyncTensor`.
        """
        if not torch.compiler.is_compiling():
            return self._look_up(features)
        return self._look_up_and_wait(features)

    @_disable_dynamo  # graph break: the number of rows is that of the batch's ids
    def _look_up_and_wait(self, features: Features | PrefetchedFeatures) -> KeyedJaggedTensor:
        rows = self._look_up(features)
        return KeyedJaggedTensor(rows.keys(), to_ordinary(rows.values()), offsets=rows.offsets())

    def _look_up(self, features: Features | PrefetchedFeatures) -> KeyedJaggedTensor:
        batch, replicated_groups, received = self.prefetch(features)
        dim, outputs = self.configs[0].embedding_dim, []
        exchanges = zip(self._lookups, self._columns, self._exchanges, received, strict=True)
        for (ids, sets), (first, width), exchange, (received_ids, groups) in exchanges:
            rows = self._in_batch_order(ids, self._look_up_ids(sets, exchange, width, received_ids, groups), batch)
            if batch.weights_or_none() is not None and not self._exact_occurrences:
                rows = rows * batch.weights().to(rows.dtype).unsqueeze(1)
            outputs.append(rows if width == dim else torch.nn.functional.pad(rows, (first, dim - first - width)))
        replicated = zip(self._replicated_tables, replicated_groups, strict=True)
        outputs += [tables.look_up(batch, groups) for tables, groups in replicated]
        total = functools.reduce(operator.add, outputs).to(self.output_dtype)
        send_gradients_first(total, OutputExchangeFunction)
        return KeyedJaggedTensor(batch.keys(), total, offsets=batch.offsets())

    def _look_up_ids(
        self, sets: list[TableSet], exchange: OutputExchange, width: int, received: Received,
        groups: list[Groups | None],
    ) -> Tensor:  # fmt: skip
        """Look up received ids, and send their rows back; rows `[ids sent, width]` by route."""
        ids, _, routes = received
        assert routes is not None
        lookups = zip(sets, groups, strict=True)
        outputs = [tables.look_up(ids, grouped, routes.occurrences) for tables, grouped in lookups]
        if not outputs:  # a rank without shards of the block still joins the backward's exchange
            outputs = [self._no_columns.new_zeros(0, width, requires_grad=self._no_columns.requires_grad)]
        return exchange(functools.reduce(operator.add, outputs), routes)

    def _in_batch_order(self, ids: IdExchange, rows: Tensor, batch: KeyedJaggedTensor) -> Tensor:
        """Scatter rows to the positions of their ids in the batch; other positions are zero."""
        keys = batch.keys()
        order = [keys.index(route.feature) for route in ids.routes]
        if order == list(range(len(keys))):
            return rows
        num_values = batch.values().shape[0]
        positions, _, _ = ops.jagged_permute(
            torch.arange(num_values, device=rows.device), batch.offsets(),
            torch.tensor(order, dtype=torch.int64, device=rows.device), len(keys), None, rows.shape[0],
        )  # fmt: skip
        result = torch.zeros(num_values, rows.shape[1], dtype=rows.dtype, device=rows.device)
        return result.index_copy(0, positions, rows)
