"""The shards of a collection under a plan: their ranks, the routes of their ids, and columns of output exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tritonemb.comm.codec import ColumnRange
from tritonemb.comm.id_exchange import IdRoute, route_key
from tritonemb.sharding.plan import Shard, ShardingPlan
from tritonemb.types import TableConfig

Scheme = Literal["direct", "hierarchical", "replicated"]
"""How pooled vectors are exchanged: from rank to rank; summed inside a node first; not at all."""


class PlacedShard(NamedTuple):
    """A shard of a table.

    Attributes:
        table: its number in the collection.
        shard: rows, columns, rank.
        routes: of its ids, one for each feature of the table; none for a replicated table.
        summed: whether other ranks have other rows of the same columns.
        cut: whether other ranks have other columns of the same rows.
        scheme: of its output exchange.
    """

    table: int
    shard: Shard
    routes: tuple[int, ...]
    summed: bool
    cut: bool
    scheme: Scheme


@dataclass(frozen=True)
class Placement:
    """The shards of a collection's tables.

    Args:
        configs: of the tables.
        plan: has them all.
        routes: of the ID exchange, in its order.
        shards: of all ranks, by table.
    """

    configs: tuple[TableConfig, ...]
    plan: ShardingPlan
    routes: tuple[IdRoute, ...]
    shards: tuple[PlacedShard, ...]

    @classmethod
    def of(cls, configs: Sequence[TableConfig], plan: ShardingPlan, pooled: bool) -> Placement:
        """Raises ValueError for tables that the plan lacks, or shardings that do not fit them."""
        plan.check([config.name for config in configs])
        routes: list[IdRoute] = []
        placed: list[PlacedShard] = []
        for table, config in enumerate(configs):
            sharding, shards = plan.tables[config.name], plan.shards(config)
            if sharding.is_replicated:
                placed += [PlacedShard(table, shard, (), False, False, "replicated") for shard in shards]
                continue
            hierarchical = pooled and sharding.sums_inside_nodes and plan.local_world_size < plan.world_size
            blocks: dict[ColumnRange, list[Shard]] = {}
            for shard in shards:
                blocks.setdefault((shard.first_column, shard.num_columns), []).append(shard)
            for rows in blocks.values():
                own = []
                for feature in config.feature_names:
                    own.append(len(routes))
                    owners = tuple(shard.rank for shard in rows)
                    routes.append(IdRoute(feature, config.name, config.num_embeddings, rows[0].num_rows, owners))
                scheme: Scheme = "hierarchical" if hierarchical else "direct"
                placed += [
                    PlacedShard(table, shard, tuple(own), len(rows) > 1, len(blocks) > 1, scheme) for shard in rows
                ]
        return cls(tuple(configs), plan, tuple(routes), tuple(placed))

    def on(self, rank: int, scheme: Scheme) -> list[PlacedShard]:
        """The shards of a rank with this scheme, in the order of its columns."""
        return [each for each in self.shards if each.shard.rank == rank and each.scheme == scheme]

    def tables_of(self, scheme: Scheme) -> list[int]:
        """The tables with this scheme."""
        return sorted({each.table for each in self.shards if each.scheme == scheme})

    def width_of(self, scheme: Scheme) -> int:
        """Columns of all vectors with this scheme."""
        return sum(self._width(table) for table in self.tables_of(scheme))

    def runs(self, shards: Sequence[PlacedShard]) -> list[ColumnRange]:
        """The columns of these shards among all with their scheme: by table, then feature."""
        runs: list[ColumnRange] = []
        for each in shards:
            before = sum(self._width(table) for table in self.tables_of(each.scheme) if table < each.table)
            dim = self.configs[each.table].embedding_dim
            firsts = [before + feature * dim for feature in range(len(self.configs[each.table].feature_names))]
            runs += [(first + each.shard.first_column, each.shard.num_columns) for first in firsts]
        return runs

    def columns(self, schemes: Sequence[Scheme]) -> list[int]:
        """For each column of the result, by table, its column in the results of these schemes side by side."""
        starts, column = {}, 0
        for scheme in schemes:
            for table in self.tables_of(scheme):
                starts[table] = column
                column += self._width(table)
        return [starts[t] + c for t in range(len(self.configs)) for c in range(self._width(t))]

    def part(self, placed: PlacedShard, name: str) -> TableConfig:
        """The shard as a table of its own, looked up by the keys of its routes."""
        config, shard = self.configs[placed.table], placed.shard
        whole = replace(config, pooling="sum") if placed.summed and config.pooling == "mean" else config
        features = [route_key(route) for route in placed.routes] or config.feature_names
        rows, columns = (shard.first_row, shard.num_rows), (shard.first_column, shard.num_columns)
        return whole.part(name, rows, columns, features)

    def _width(self, table: int) -> int:
        return self.configs[table].embedding_dim * len(self.configs[table].feature_names)


def named_parts(placement: Placement, shards: Sequence[PlacedShard]) -> list[TableConfig]:
    """Parts for a table set: a table with several shards gets a number behind its name."""
    parts, times = [], dict.fromkeys(range(len(placement.configs)), 0)
    for each in shards:
        name, number = placement.configs[each.table].name, times[each.table]
        parts.append(placement.part(each, f"{name}@{number}" if number else name))
        times[each.table] += 1
    return parts


def split(
    shards: Sequence[PlacedShard], chosen: Callable[[PlacedShard], bool]
) -> tuple[list[PlacedShard], list[PlacedShard]]:
    """Those that are not chosen, and those that are."""
    return [each for each in shards if not chosen(each)], [each for each in shards if chosen(each)]
