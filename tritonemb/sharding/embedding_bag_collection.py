"""`ShardedEmbeddingBagCollection`: pooled lookups of sharded tables."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritonemb.comm.async_tensor import send_gradients_first
from tritonemb.comm.output_exchange import ColumnRange, OutputExchangeFunction, PooledExchange
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.sharding.collection import Exchanged, ShardedCollection, ShardedLookup
from tritonemb.sharding.placement import Scheme
from tritonemb.tables.lookup import PrefetchedFeatures
from tritonemb.tables.table_set import TableSet
from tritonemb.utils import split_evenly

EXCHANGED: tuple[Scheme, ...] = ("direct", "hierarchical")
Exchange = Callable[[Tensor, Sequence[int]], Tensor]


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` whose tables are sharded as a plan says: same batches, same results.

    The ID exchange gives the ids of every rank's batch to the ranks with their rows; they look them up for all samples,
    and an output exchange returns pooled vectors, summed inside a node first for tables sharded by rows there.

    Shapes: as of `EmbeddingBagCollection`, for this rank's samples. Ranks may have different numbers of samples, none
    too, but all call forward, and backward, together and in the same order.

    The tables' gradients are averaged over ranks, as `DistributedDataParallel` averages those of other parameters: with
    a loss that is the mean over a rank's samples, and as many samples on each, tables are updated as by the mean over
    all of them. Table-wise and column-wise sharded tables are then bitwise identical to those of one process, if each
    names its features in the order of the batch's keys; for others some sums are added in another order.
    """

    pooled = True

    def _make_lookups(self) -> list[ShardedLookup]:
        groups, place = self.groups, self.placement
        rank, ranks = groups.shards.rank, range(groups.shards.size)
        columns = place.columns((*EXCHANGED, "replicated"))
        self._columns = None if columns == sorted(columns) else torch.tensor(columns)
        # Of row-wise sharded tables with pooling "mean", no rank with shards knows a bag's whole length. It takes fewer
        # bytes to divide results, but gradients are clamped before they are divided: then ids have weights.
        means = {each.table for each in place.shards if each.summed and self.configs[each.table].pooling == "mean"}
        weighted = set() if self.optimizer.max_gradient is None else means
        self._mean_of = self._columns_by_mean(means - weighted)
        self._schemes: list[tuple[list[TableSet], Exchange]] = []  # table sets, and what exchanges their columns
        for scheme in EXCHANGED:
            if not place.tables_of(scheme):
                continue
            # The columns of a rank's matrix are those of its table sets, one after the other.
            runs = [place.runs(place.on(r, scheme)) for r in ranks]
            exchange: Exchange = self._hierarchical
            if scheme == "direct":
                exchange = PooledExchange(groups.shards, runs, place.width_of(scheme), self.precision, len(ranks))
                self._exchanges.append(exchange)
            else:
                self._make_hierarchical(runs)
            self._schemes.append((self._make_tables(place.on(rank, scheme)), exchange))
        if not place.routes:
            return []
        routes = sorted({route for each in place.shards if each.table in weighted for route in each.routes})
        ids = self._id_exchange(place.routes, means=routes)
        return [(ids, [each for tables, _ in self._schemes for each in tables])]

    def _make_hierarchical(self, runs: list[list[ColumnRange]]) -> None:
        """Two exchanges: inside the node, which adds, and across nodes, between ranks with the same local rank."""
        groups, size = self.groups, self.groups.node.size
        nodes = [
            sorted({run for rank in runs[first : first + size] for run in rank}) for first in range(0, len(runs), size)
        ]
        own = nodes[groups.shards.rank // size]
        start = {run: sum(width for _, width in own[:index]) for index, run in enumerate(own)}
        first = groups.shards.rank // size * size
        inside = [[(start[run], run[1]) for run in rank] for rank in runs[first : first + size]]
        width = sum(width for _, width in own)
        self._inside = PooledExchange(groups.node, inside, width, self.precision, kind="pooled inside a node")
        self._across = PooledExchange(
            groups.across, nodes, self.placement.width_of("hierarchical"), self.precision, groups.shards.size,
            "pooled across nodes",
        )  # fmt: skip
        self._exchanges += [self._inside, self._across]

    def forward(self, features: Features | PrefetchedFeatures) -> Tensor:
        """`[B, sum of dims]`, columns by table, then by that table's features; of several ranks an `AsyncTensor`."""
        found = self.prefetch(features)
        return found if isinstance(found, Tensor) else self.look_up(found)[0]

    def look_up(self, exchanged: Exchanged, number: int = 1) -> list[Tensor]:
        """The results of `number` sub-batches, each with an exchange of its own."""
        batch, own_groups, received = exchanged
        parts: list[list[Tensor]] = [[] for _ in range(number)]
        for (ids, batch_sizes, _), of_ids in received:
            groups, sizes = iter(of_ids), [split_evenly(size, number) for size in batch_sizes]
            for sets, exchange in self._schemes:
                found = [tables.look_up(ids, next(groups)) for tables in sets]
                if not found:  # a rank without such shards takes part in the backward's exchange, too
                    found = [self._no_columns.expand(sum(batch_sizes), 0)]
                matrix = [_side_by_side(found)]
                if number > 1:
                    pieces = matrix[0].split([size for of_rank in sizes for size in of_rank])
                    matrix = [torch.cat(pieces[part::number]) for part in range(number)]
                for index, piece in enumerate(matrix):
                    parts[index].append(exchange(piece, [of_rank[index] for of_rank in sizes]))
        shares, rows = self._shares(batch), split_evenly(batch.stride(), number)
        for tables, groups_of in zip(self._replicated, own_groups, strict=True):
            for part, piece in zip(parts, _split(tables.look_up(batch, groups_of), rows), strict=True):
                part.append(piece)
        of_parts = [None] * number if shares is None else _split(shares, rows)
        return [self._result(part, share) for part, share in zip(parts, of_parts, strict=True)]

    def _result(self, parts: list[Tensor], shares: Tensor | None) -> Tensor:
        pooled = _side_by_side(parts)
        if self._columns is not None:
            self._columns = self._columns.to(pooled.device)
            pooled = pooled.index_select(1, self._columns)
        pooled = (pooled if shares is None else pooled * shares).to(self.output_dtype)
        if not torch.compiler.is_compiling():
            send_gradients_first(pooled, OutputExchangeFunction)
        return pooled

    def _hierarchical(self, matrix: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        size, rank = self.groups.node.size, self.groups.shards.rank
        pieces = matrix.split(batch_sizes)
        by_local_rank = [pieces[r] for local in range(size) for r in range(local, len(pieces), size)]
        sizes = [sum(batch_sizes[local::size]) for local in range(size)]
        summed = self._inside(torch.cat(by_local_rank), sizes)
        return self._across(summed, batch_sizes[rank % size :: size])

    def _columns_by_mean(self, tables: set[int]) -> Tensor | None:
        """For each column of the result, the feature whose lengths of bags divide it, or one more for none."""
        if not tables:
            return None
        names, column = list(self.feature_names), list[int]()
        for table, config in enumerate(self.configs):
            for feature in config.feature_names:
                column += [names.index(feature) if table in tables else len(names)] * config.embedding_dim
        return torch.tensor(column)

    def _shares(self, batch: KeyedJaggedTensor) -> Tensor | None:
        """What the sums of row-wise sharded tables are multiplied with: one over the lengths of bags."""
        if self._mean_of is None:
            return None
        keys = batch.keys()
        self._mean_of = self._mean_of.to(batch.device())
        lengths = batch.lengths().reshape(len(keys), -1)
        ordered = torch.stack([lengths[keys.index(name)] for name in self.feature_names]).to(torch.float32)
        shares = torch.cat([1.0 / ordered.clamp(min=1.0), ordered.new_ones(1, ordered.shape[1])])
        return shares.index_select(0, self._mean_of).T


def _split(matrix: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return [matrix] if len(sizes) == 1 else matrix.split(sizes)


def _side_by_side(found: list[Tensor]) -> Tensor:
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)
