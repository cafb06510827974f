"""Pooled lookups of tables that are spread over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tritonemb.comm.codec import ColumnRange
from tritonemb.comm.id_exchange import IdExchange
from tritonemb.comm.output_exchange import PooledExchange
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.sharding.placement import Held, Way
from tritonemb.sharding.sharded_features import SentIds
from tritonemb.tables.lookup import Features
from tritonemb.tables.prefetched import SentFeatures
from tritonemb.tables.table_set import TableSet

WAYS: tuple[Way, ...] = ("direct", "by node", "everywhere")


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` whose tables are cut as a plan says: same batches, same results.

    The ids of every rank's batch go to the ranks that own their rows; those look them up for all ranks' samples, and
    send back pooled vectors: from rank to rank, or, for tables cut by rows inside a node, summed inside the node first.

    Shapes: as of `EmbeddingBagCollection`, for this rank's samples. Ranks may bring different numbers of samples, none
    too, but all call forward, and backward, together and in the same order.

    The tables' gradients are averaged over ranks, as `DistributedDataParallel` averages those of other parameters: with
    a loss that is the mean over a rank's samples, and as many samples on each, tables are updated as by the mean over
    all of them. Tables that are whole or cut by columns have the bits of one process then, if each names its features
    in the order of the batch's keys; of others some sums are added in another order.
    """

    pooled = True

    def _make_locals(self) -> tuple[tuple[TableSet, ...], tuple[tuple[Held, ...], ...]]:
        self._make_whole_row_updates()
        groups, place = self.groups, self.placement
        size, rank = groups.shards.size, groups.shards.rank
        means = self._means_of_rows()
        self._ids = IdExchange(groups.ids, place.lanes, self.bounds_check == "raise", means=self._lanes_of(means))
        self._ways = tuple(way for way in WAYS if place.tables_of(way))
        self._locals_of: dict[Way, list[TableSet]] = {}
        made: list[TableSet] = []
        held: list[tuple[Held, ...]] = []
        for way in self._ways:
            local = self._local(place.on(rank, way), bounds_check=way == "everywhere")
            self._locals_of[way] = [tables for tables, _ in local]
            made += [tables for tables, _ in local]
            held += [of_tables for _, of_tables in local]
        self._exchanges: list[PooledExchange] = []
        # The columns of a rank's matrix are those of its collections, one after the other.
        runs: dict[Way, list[list[ColumnRange]]] = {
            way: [[run for part in self._parts_on(r, way) for run in place.runs(part)] for r in range(size)]
            for way in self._ways
        }
        if "direct" in self._ways:
            width = place.width_of("direct")
            self._direct = PooledExchange(groups.shards, runs["direct"], width, self.precision, size)
            self._exchanges.append(self._direct)
        if "by node" in self._ways:
            self._make_by_node(runs["by node"])
        columns = place.columns(self._ways)
        self._columns = None if columns == sorted(columns) else torch.tensor(columns)
        self._mean_of = self._columns_by_mean()
        return tuple(made), tuple(held)

    def _parts_on(self, rank: int, way: Way) -> tuple[list[Held], list[Held]]:
        """The shards of a rank, collection by collection; the same split as that of `_local`."""
        return self._split(self.placement.on(rank, way))

    def _make_by_node(self, runs: list[list[ColumnRange]]) -> None:
        """Two exchanges: inside the node, which adds, and across nodes, between ranks of the same place."""
        groups, size = self.groups, self.groups.node.size
        nodes = [
            sorted({run for rank in runs[first : first + size] for run in rank}) for first in range(0, len(runs), size)
        ]
        own = nodes[groups.shards.rank // size]
        start = {run: sum(width for _, width in own[:place]) for place, run in enumerate(own)}
        first = groups.shards.rank // size * size
        inside = [[(start[run], run[1]) for run in rank] for rank in runs[first : first + size]]
        width = sum(width for _, width in own)
        self._inside = PooledExchange(groups.node, inside, width, self.precision, kind="pooled inside a node")
        self._across = PooledExchange(
            groups.across, nodes, self.placement.width_of("by node"), self.precision, groups.shards.size,
            "pooled across nodes",
        )  # fmt: skip
        self._exchanges += [self._inside, self._across]

    def send(self, features: Features | SentFeatures) -> SentIds:
        if isinstance(features, SentFeatures):
            return self._sent(features)
        batch = self._own_batch(features)
        arrived = (self._ids(batch, self._refusal(batch)),) if self.placement.lanes else ()
        shares = None if self._mean_of is None else self._shares(batch)
        sent = self._to_device(SentIds(batch, arrived, (), shares))
        groups = [
            tables.group(sent.batch if way == "everywhere" else sent.arrived[0].features)
            for way in self._ways
            for tables in self._locals_of[way]
        ]
        return replace(sent, groups=tuple(groups))

    def forward(self, features: Features | SentFeatures) -> Tensor:
        """`[B, sum of dims]`, columns by table, then by that table's features."""
        sent = self._sent(features)
        groups, parts = iter(sent.groups), []
        for way in self._ways:
            if way == "everywhere":
                parts += [tables(sent.batch, next(groups)) for tables in self._locals_of[way]]
                continue
            (arrived,) = sent.arrived
            found = [tables(arrived.features, next(groups)) for tables in self._locals_of[way]]
            matrix = self._side_by_side(found, sum(arrived.batch_sizes))
            if way == "direct":
                parts.append(self._direct(matrix, arrived.batch_sizes))
            else:
                parts.append(self._by_node(matrix, arrived.batch_sizes))
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self._columns is not None:
            self._columns = self._columns.to(pooled.device)
            pooled = pooled.index_select(1, self._columns)
        return self._mean(pooled, sent.shares).to(self.output_dtype)

    def saturated(self) -> int:
        return sum(exchange.saturated() for exchange in self._exchanges)

    def _side_by_side(self, found: list[Tensor], num_rows: int) -> Tensor:
        if len(found) == 1:
            return found[0]
        if found:
            return torch.cat(found, dim=1)
        # A rank without such shards has its part in the backward's exchange too.
        return torch.zeros(num_rows, 0, dtype=torch.float32, device=self.device, requires_grad=True)

    def _by_node(self, matrix: Tensor, batch_sizes: list[int]) -> Tensor:
        size, rank = self.groups.node.size, self.groups.shards.rank
        pieces = matrix.split(batch_sizes)
        by_place = [pieces[r] for place in range(size) for r in range(place, len(pieces), size)]
        to_place = [sum(batch_sizes[place::size]) for place in range(size)]
        summed = self._inside(torch.cat(by_place), to_place)
        return self._across(summed, batch_sizes[rank % size :: size])

    def _means_of_rows(self) -> set[int]:
        """Tables with means as results that are cut by rows: no owner knows a bag's whole length."""
        return {h.table for h in self.placement.held if h.summed and self.configs[h.table].pooling == "mean"}

    def _lanes_of(self, means: set[int]) -> list[int]:
        """The lanes of such tables whose sums become means by weights of the ids.

        Where gradients are clamped, which is before they are divided; otherwise it takes fewer bytes to divide results.
        """
        if self.optimizer.max_gradient is None:
            return []
        return sorted({lane for held in self.placement.held if held.table in means for lane in held.lanes})

    def _columns_by_mean(self) -> Tensor | None:
        """For each column of the result: which of the `_shares` it is multiplied with; None if all with ones."""
        tables = self._means_of_rows()
        if not tables or self._lanes_of(tables):
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
        """Sums of tables that are cut by rows become means."""
        if self._mean_of is None:
            return pooled
        assert shares is not None
        self._mean_of = self._mean_of.to(pooled.device)
        return pooled * shares.index_select(0, self._mean_of).T
