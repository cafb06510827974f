"""`ShardedEmbeddingBagCollection`: pooled lookups of sharded tables."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.comm.codec import ColumnRange
from tritonemb.comm.id_exchange import IdExchange
from tritonemb.comm.output_exchange import PooledExchange
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.sharding.collection import ExchangedIds, ShardedCollection
from tritonemb.sharding.placement import PlacedShard, Scheme
from tritonemb.tables.lookup import PrefetchedFeatures
from tritonemb.tables.table_set import TableSet

SCHEMES: tuple[Scheme, ...] = ("direct", "hierarchical", "replicated")


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` whose tables are sharded as a plan says: same batches, same results.

    The ID exchange gives the ids of every rank's batch to the ranks with their rows; those look them up for all ranks'
    samples, and an output exchange returns pooled vectors: from rank to rank, or, for tables sharded by rows inside a
    node, summed inside the node first.

    Shapes: as of `EmbeddingBagCollection`, for this rank's samples. Ranks may have different numbers of samples, none
    too, but all call forward, and backward, together and in the same order.

    The tables' gradients are averaged over ranks, as `DistributedDataParallel` averages those of other parameters: with
    a loss that is the mean over a rank's samples, and as many samples on each, tables are updated as by the mean over
    all of them. Table-wise and column-wise sharded tables are then bitwise identical to those of one process, if each
    names its features in the order of the batch's keys; for others some sums are added in another order.
    """

    pooled = True

    def _make_locals(self) -> tuple[tuple[TableSet, ...], tuple[tuple[PlacedShard, ...], ...]]:
        self._make_whole_row_updates()
        groups, place = self.groups, self.placement
        size, rank = groups.shards.size, groups.shards.rank
        means = self._means_over_rows()
        self._ids = IdExchange(groups.ids, place.routes, self.bounds_check == "raise", means=self._routes_of(means))
        self._schemes = tuple(scheme for scheme in SCHEMES if place.tables_of(scheme))
        self._locals_of: dict[Scheme, list[TableSet]] = {}
        made: list[TableSet] = []
        shards: list[tuple[PlacedShard, ...]] = []
        for scheme in self._schemes:
            local = self._local(place.on(rank, scheme), bounds_check=scheme == "replicated")
            self._locals_of[scheme] = [tables for tables, _ in local]
            made += [tables for tables, _ in local]
            shards += [of_tables for _, of_tables in local]
        self._exchanges: list[PooledExchange] = []
        # The columns of a rank's matrix are those of its table sets, one after the other.
        runs: dict[Scheme, list[list[ColumnRange]]] = {
            scheme: [[run for part in self._parts_on(r, scheme) for run in place.runs(part)] for r in range(size)]
            for scheme in self._schemes
        }
        if "direct" in self._schemes:
            width = place.width_of("direct")
            self._direct = PooledExchange(groups.shards, runs["direct"], width, self.precision, size)
            self._exchanges.append(self._direct)
        if "hierarchical" in self._schemes:
            self._make_hierarchical(runs["hierarchical"])
        columns = place.columns(self._schemes)
        self._columns = None if columns == sorted(columns) else torch.tensor(columns)
        self._mean_of = self._columns_by_mean()
        return tuple(made), tuple(shards)

    def _parts_on(self, rank: int, scheme: Scheme) -> tuple[list[PlacedShard], list[PlacedShard]]:
        """The shards of a rank, table set by table set; split as in `_local`."""
        return self._split(self.placement.on(rank, scheme))

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

    def prefetch(self, features: Features | PrefetchedFeatures) -> ExchangedIds:
        """See `ShardedCollection.prefetch`."""
        if isinstance(features, PrefetchedFeatures):
            return self._exchanged(features)
        batch = self.own_batch(features)
        received = (self._ids(batch, self._bad_ids(batch)),) if self.placement.routes else ()
        shares = None if self._mean_of is None else self._shares(batch)
        exchanged = self._to_device(ExchangedIds(batch, received, (), shares))
        groups = [
            tables.group(exchanged.batch if scheme == "replicated" else exchanged.received[0].features)
            for scheme in self._schemes
            for tables in self._locals_of[scheme]
        ]
        return exchanged._replace(groups=tuple(groups))

    def forward(self, features: Features | PrefetchedFeatures) -> Tensor:
        """`[B, sum of dims]`, columns by table, then by that table's features."""
        exchanged = self._exchanged(features)
        groups, parts = iter(exchanged.groups), []
        for scheme in self._schemes:
            if scheme == "replicated":
                parts += [tables.look_up(exchanged.batch, next(groups)) for tables in self._locals_of[scheme]]
                continue
            (received,) = exchanged.received
            found = [tables.look_up(received.features, next(groups)) for tables in self._locals_of[scheme]]
            matrix = self._side_by_side(found, sum(received.batch_sizes))
            exchange = self._direct if scheme == "direct" else self._hierarchical
            parts.append(exchange(matrix, received.batch_sizes))
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self._columns is not None:
            self._columns = self._columns.to(pooled.device)
            pooled = pooled.index_select(1, self._columns)
        return self._mean(pooled, exchanged.shares).to(self.output_dtype)

    def saturated(self) -> int:
        """See `ShardedCollection.saturated`."""
        return sum(exchange.saturated() for exchange in self._exchanges)

    def _side_by_side(self, found: list[Tensor], num_rows: int) -> Tensor:
        if len(found) == 1:
            return found[0]
        if found:
            return torch.cat(found, dim=1)
        # A rank without such shards takes part in the backward's exchange, too.
        return torch.zeros(num_rows, 0, dtype=torch.float32, device=self.device, requires_grad=True)

    def _hierarchical(self, matrix: Tensor, batch_sizes: list[int]) -> Tensor:
        size, rank = self.groups.node.size, self.groups.shards.rank
        pieces = matrix.split(batch_sizes)
        by_local_rank = [pieces[r] for local in range(size) for r in range(local, len(pieces), size)]
        sizes = [sum(batch_sizes[local::size]) for local in range(size)]
        summed = self._inside(torch.cat(by_local_rank), sizes)
        return self._across(summed, batch_sizes[rank % size :: size])

    def _means_over_rows(self) -> set[int]:
        """Row-wise sharded tables with pooling "mean": no rank with shards knows a bag's whole length."""
        return {
            each.table for each in self.placement.shards if each.summed and self.configs[each.table].pooling == "mean"
        }

    def _routes_of(self, means: set[int]) -> list[int]:
        """The ID routes of such tables whose sums become means by weights of the ids.

        That is where gradients are clamped, before they are divided; otherwise it takes fewer bytes to divide results.
        """
        if self.optimizer.max_gradient is None:
            return []
        return sorted({route for each in self.placement.shards if each.table in means for route in each.routes})

    def _columns_by_mean(self) -> Tensor | None:
        """For each column of the result: which of the `_shares` it is multiplied with; None if all with ones."""
        tables = self._means_over_rows()
        if not tables or self._routes_of(tables):
            return None
        means = [table in tables for table in range(len(self.configs))]
        column: list[int] = []
        names = list(self.feature_names)
        for is_mean, config in zip(means, self.configs, strict=True):
            for feature in config.feature_names:
                column += [names.index(feature) if is_mean else len(names)] * config.embedding_dim
        return torch.tensor(column)

    def _shares(self, batch: KeyedJaggedTensor) -> Tensor:
        """One over the length of each feature's bags, and a row of ones."""
        keys = batch.keys()
        order = torch.tensor([keys.index(name) for name in self.feature_names], device=batch.device())
        lengths = batch.lengths().reshape(len(keys), -1).index_select(0, order).to(torch.float32)
        return torch.cat([1.0 / lengths.clamp(min=1.0), lengths.new_ones(1, lengths.shape[1])])

    def _mean(self, pooled: Tensor, shares: Tensor | None) -> Tensor:
        """Divide the sums of row-wise sharded tables by the lengths of bags."""
        if self._mean_of is None:
            return pooled
        assert shares is not None
        self._mean_of = self._mean_of.to(pooled.device)
        return pooled * shares.index_select(0, self._mean_of).T
