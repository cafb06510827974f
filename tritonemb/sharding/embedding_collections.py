"""`ShardedEmbeddingBagCollection` and `ShardedEmbeddingCollection`: pooled and unpooled lookups of sharded tables."""

import functools
import operator
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.async_tensor import send_gradients_first
from tritonemb.comm.id_exchange import IdExchange, Received
from tritonemb.comm.output_exchange import (
    ColumnRange,
    OutputExchange,
    OutputExchangeFunction,
    PooledExchange,
    SequenceExchange,
)
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.sharding.collection import Exchanged, ShardedCollection, ShardedLookup
from tritonemb.sharding.placement import Scheme
from tritonemb.tables.lookup_tables import Groups
from tritonemb.tables.table_set import PrefetchedFeatures, TableSet
from tritonemb.utils import split_evenly

EXCHANGED: tuple[Scheme, ...] = ("direct", "hierarchical")
Exchange = Callable[[Tensor, Sequence[int]], Tensor]  # matrix of pooled vectors, samples per rank


class ShardedEmbeddingBagCollection(ShardedCollection):
    """`EmbeddingBagCollection` whose tables are sharded by a plan: same inputs, same outputs.

    The ID exchange sends the ids of every rank's batch to the ranks that own their rows. These look them up for all
    samples, and the output exchange returns pooled vectors; table-row-wise and grid sharding first reduce in the node.

    Shapes: as of `EmbeddingBagCollection`, for this rank's samples. Ranks may have different numbers of samples, also
    zero, but all call forward, and backward, in the same order.

    Gradients of tables are averaged over ranks, as `DistributedDataParallel` averages gradients: if the loss is a mean
    over samples and all ranks have equally many, the update is that of the mean over the global batch. Table-wise and
    column-wise sharded tables are then bitwise identical to those of one process, if each table lists its features in
    the order of the batch's keys; other shardings add some sums in another order.
    """

    pooled = True

    def _make_lookups(self) -> list[ShardedLookup]:
        groups, shard_map = self.groups, self.shard_map
        rank, ranks = groups.shards.rank, range(groups.shards.size)
        columns = shard_map.columns((*EXCHANGED, "replicated"))
        self._columns = None if columns == sorted(columns) else torch.tensor(columns)
        # Mean pooling of row-wise sharded tables: no owner of rows knows the full length of a bag. Dividing the outputs
        # takes fewer bytes, but gradients are clamped before they are divided: with a clamp, ids get weights instead.
        row_sharded = {placed.table for placed in shard_map.shards if placed.row_sharded}
        means = {table for table in row_sharded if self.configs[table].pooling == "mean"}
        weighted = set() if self.optimizer.max_gradient is None else means
        self._mean_columns = self._map_mean_columns(means - weighted)
        self._scheme_lookups: list[tuple[list[TableSet], Exchange]] = []  # with the exchange of the sets' columns
        for scheme in EXCHANGED:
            if not shard_map.tables_of(scheme):
                continue
            # A rank's matrix has the columns of its table sets, in their order.
            column_ranges = [shard_map.column_ranges(shard_map.shards_on(other, scheme)) for other in ranks]
            exchange: Exchange = self._hierarchical
            if scheme == "direct":
                width = shard_map.width_of(scheme)
                exchange = PooledExchange(groups.shards, column_ranges, width, self.precision, len(ranks))
                self._exchanges.append(exchange)
            else:
                self._make_hierarchical(column_ranges)
            self._scheme_lookups.append((self._make_table_sets(shard_map.shards_on(rank, scheme)), exchange))
        if not shard_map.routes:
            return []
        routes = sorted({route for placed in shard_map.shards if placed.table in weighted for route in placed.routes})
        ids = self._id_exchange(shard_map.routes, means=routes)
        return [(ids, [tables for table_sets, _ in self._scheme_lookups for tables in table_sets])]

    def _make_hierarchical(self, column_ranges: list[list[ColumnRange]]) -> None:
        """Make two exchanges: a reduction inside the node, then one across nodes, of ranks with the same local rank."""
        groups, size, node = self.groups, self.groups.node.size, self.groups.shards.rank // self.groups.node.size
        by_node = [column_ranges[first : first + size] for first in range(0, len(column_ranges), size)]
        nodes = [sorted(set(chain.from_iterable(ranks))) for ranks in by_node]
        # Columns of this node's matrix: its distinct ranges, in ascending order.
        starts, width = dict[ColumnRange, int](), 0
        for columns in nodes[node]:
            starts[columns] = width
            width += columns[1]
        in_node = [[(starts[columns], columns[1]) for columns in rank_ranges] for rank_ranges in by_node[node]]
        self._reduce = PooledExchange(groups.node, in_node, width, self.precision, kind="pooled inside a node")
        self._across = PooledExchange(
            groups.across, nodes, self.shard_map.width_of("hierarchical"), self.precision, groups.shards.size,
            "pooled across nodes",
        )  # fmt: skip
        self._exchanges += [self._reduce, self._across]

    def forward(self, features: Features | PrefetchedFeatures) -> Tensor:
        """Return `[B, sum of dims]`, columns by table, then by feature; an `AsyncTensor` if there are several ranks."""
        exchanged = self.prefetch(features)
        return exchanged if isinstance(exchanged, Tensor) else self.look_up(exchanged)[0]

    def look_up(self, exchanged: Exchanged, num_sub_batches: int = 1) -> list[Tensor]:
        """Look up exchanged ids; return the outputs by sub-batch, each with its own output exchange."""
        batch, replicated_groups, received = exchanged
        sub_batches: list[list[Tensor]] = [[] for _ in range(num_sub_batches)]
        # Sharded tables: look up the samples of all ranks, and exchange the outputs by sub-batch.
        for (ids, batch_sizes, _), set_groups in received:
            groups, sub_batch_sizes = iter(set_groups), [split_evenly(size, num_sub_batches) for size in batch_sizes]
            for sets, exchange in self._scheme_lookups:
                outputs = [tables.look_up(ids, next(groups)) for tables in sets]
                if not outputs:  # a rank without shards of the scheme still joins the backward's exchange
                    outputs = [self._no_columns.expand(sum(batch_sizes), 0)]
                matrices = [_concat_columns(outputs)]
                if num_sub_batches > 1:
                    pieces = matrices[0].split([size for rank_sizes in sub_batch_sizes for size in rank_sizes])
                    matrices = [torch.cat(pieces[index::num_sub_batches]) for index in range(num_sub_batches)]
                for index, matrix in enumerate(matrices):
                    sub_batches[index].append(exchange(matrix, [rank_sizes[index] for rank_sizes in sub_batch_sizes]))
        # Replicated tables: look up this rank's samples.
        bag_weights, num_rows = self._bag_weights(batch), split_evenly(batch.stride(), num_sub_batches)
        for tables, table_groups in zip(self._replicated_tables, replicated_groups, strict=True):
            for outputs, output in zip(sub_batches, _split(tables.look_up(batch, table_groups), num_rows), strict=True):
                outputs.append(output)
        weights = [None] * num_sub_batches if bag_weights is None else _split(bag_weights, num_rows)
        return [self._combine(*sub_batch) for sub_batch in zip(sub_batches, weights, strict=True)]

    def _combine(self, outputs: list[Tensor], bag_weights: Tensor | None) -> Tensor:
        """Concatenate the outputs of all schemes, in the order of tables, and apply mean pooling."""
        pooled = _concat_columns(outputs)
        if self._columns is not None:
            self._columns = self._columns.to(pooled.device)
            pooled = pooled.index_select(1, self._columns)
        pooled = (pooled if bag_weights is None else pooled * bag_weights).to(self.output_dtype)
        if not torch.compiler.is_compiling():
            send_gradients_first(pooled, OutputExchangeFunction)
        return pooled

    def _hierarchical(self, matrix: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """Reduce inside the node, to the rank with the local rank of a sample's rank, then exchange across nodes."""
        size, rank = self.groups.node.size, self.groups.shards.rank
        pieces = matrix.split(batch_sizes)
        by_local_rank = [pieces[r] for local in range(size) for r in range(local, len(pieces), size)]
        sizes = [sum(batch_sizes[local::size]) for local in range(size)]
        summed = self._reduce(torch.cat(by_local_rank), sizes)
        return self._across(summed, batch_sizes[rank % size :: size])

    def _map_mean_columns(self, tables: set[int]) -> Tensor | None:
        """Map output columns to the feature whose bag lengths divide them; to the number of features for none."""
        if not tables:
            return None
        names, column = list(self.feature_names), list[int]()
        for table, config in enumerate(self.configs):
            for feature in config.feature_names:
                column += [names.index(feature) if table in tables else len(names)] * config.embedding_dim
        return torch.tensor(column)

    def _bag_weights(self, batch: KeyedJaggedTensor) -> Tensor | None:
        """Factors `[B, sum of dims]` of mean pooling: 1 / bag length for row-wise sharded tables, 1 for others."""
        if self._mean_columns is None:
            return None
        keys = batch.keys()
        self._mean_columns = self._mean_columns.to(batch.device())
        lengths = batch.lengths().reshape(len(keys), -1)
        ordered = torch.stack([lengths[keys.index(name)] for name in self.feature_names]).to(torch.float32)
        weights = torch.cat([1.0 / ordered.clamp(min=1.0), ordered.new_ones(1, ordered.shape[1])])
        return weights.index_select(0, self._mean_columns).T


class ShardedEmbeddingCollection(ShardedCollection):
    """`EmbeddingCollection` whose tables are sharded by a plan: same inputs, same outputs.

    It works like `ShardedEmbeddingBagCollection`, but the output exchange returns a row for each id. For row-wise
    sharded tables, ids are deduplicated before the exchange, and the backward sends the sum of an id's gradients.
    """

    pooled = False

    def _make_lookups(self) -> list[ShardedLookup]:
        groups, shard_map = self.groups, self.shard_map
        # Gradients are clamped per occurrence, before weights scale them, or occurrences are counted: owners need all
        # gradients and weights.
        self._exact_occurrences = (self.optimizer.max_gradient, self.optimizer.cow_clip) != (None, None)
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
        if not torch.compiler.is_compiling():
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
        if not outputs:  # a rank without shards of the block, which gets no ids, still joins the backward's exchange
            outputs = [self._no_columns.new_zeros(routes.source.shape[0], width) + self._no_columns.sum()]
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


def _split(matrix: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return [matrix] if len(sizes) == 1 else matrix.split(sizes)


def _concat_columns(matrices: list[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=1)
