"""What a plan means for a collection: who holds what, which scheme ids go, and where columns come back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tritonemb.comm.codec import ColumnRange
from tritonemb.comm.id_exchange import IdRoute, route_key
from tritonemb.sharding.plan import Shard, ShardingPlan
from tritonemb.types import TableConfig

Scheme = Literal["direct", "hierarchical", "replicated"]
"""How pooled vectors come back: from each rank to each; summed inside a node first; or they never leave."""


class PlacedShard(NamedTuple):
    """A shard of a table.

    Attributes:
        table: its number in the collection.
        shard: rows, columns, rank.
        routes: that bring ids for it, one for each feature of the table; none if every rank has the table.
        summed: whether other ranks have other rows of the same columns.
        cut: whether other ranks have other columns of the same rows.
        scheme: how its vectors come back.
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
        routes: of the ids exchange, in its order.
        held: of all ranks, by table.
    """

    configs: tuple[TableConfig, ...]
    plan: ShardingPlan
    routes: tuple[IdRoute, ...]
    held: tuple[PlacedShard, ...]

    @classmethod
    def of(cls, configs: Sequence[TableConfig], plan: ShardingPlan, pooled: bool) -> Placement:
        """Raises ValueError for tables that the plan lacks, or shardings that do not fit them."""
        plan.check([config.name for config in configs])
        routes: list[IdRoute] = []
        held: list[PlacedShard] = []
        for table, config in enumerate(configs):
            sharding, shards = plan.tables[config.name], plan.shards(config)
            if sharding.is_replicated:
                held += [PlacedShard(table, shard, (), False, False, "replicated") for shard in shards]
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
                held += [
                    PlacedShard(table, shard, tuple(own), len(rows) > 1, len(blocks) > 1, scheme) for shard in rows
                ]
        return cls(tuple(configs), plan, tuple(routes), tuple(held))

    def on(self, rank: int, scheme: Scheme) -> list[PlacedShard]:
        """What a rank holds whose vectors come back this scheme, in the order of its columns."""
        return [held for held in self.held if held.shard.rank == rank and held.scheme == scheme]

    def tables_of(self, scheme: Scheme) -> list[int]:
        """The tables whose vectors come back this scheme."""
        return sorted({held.table for held in self.held if held.scheme == scheme})

    def width_of(self, scheme: Scheme) -> int:
        """Columns of all vectors that come back this scheme."""
        return sum(self._width(table) for table in self.tables_of(scheme))

    def runs(self, held: Sequence[PlacedShard]) -> list[ColumnRange]:
        """Where the columns of these shards are among all that come back the same scheme: by table, then feature."""
        runs: list[ColumnRange] = []
        for each in held:
            before = sum(self._width(table) for table in self.tables_of(each.scheme) if table < each.table)
            dim = self.configs[each.table].embedding_dim
            firsts = [before + feature * dim for feature in range(len(self.configs[each.table].feature_names))]
            runs += [(first + each.shard.first_column, each.shard.num_columns) for first in firsts]
        return runs

    def columns(self, schemes: Sequence[Scheme]) -> list[int]:
        """Where each column of the result, by table, is when the results of these schemes lie side by side."""
        starts, place = {}, 0
        for scheme in schemes:
            for table in self.tables_of(scheme):
                starts[table] = place
                place += self._width(table)
        return [starts[t] + column for t in range(len(self.configs)) for column in range(self._width(t))]

    def part(self, held: PlacedShard, name: str) -> TableConfig:
        """The shard as a table of its own, looked up by its routes."""
        config, shard = self.configs[held.table], held.shard
        whole = replace(config, pooling="sum") if held.summed and config.pooling == "mean" else config
        features = [route_key(route) for route in held.routes] or config.feature_names
        rows, columns = (shard.first_row, shard.num_rows), (shard.first_column, shard.num_columns)
        return whole.part(name, rows, columns, features)

    def _width(self, table: int) -> int:
        return self.configs[table].embedding_dim * len(self.configs[table].feature_names)


def named_parts(placement: Placement, held: Sequence[PlacedShard]) -> list[TableConfig]:
    """Parts for a collection of them: a table that is there several times gets a number behind its name."""
    parts, times = [], dict.fromkeys(range(len(placement.configs)), 0)
    for each in held:
        name, number = placement.configs[each.table].name, times[each.table]
        parts.append(placement.part(each, f"{name}@{number}" if number else name))
        times[each.table] += 1
    return parts


def split(
    held: Sequence[PlacedShard], chosen: Callable[[PlacedShard], bool]
) -> tuple[list[PlacedShard], list[PlacedShard]]:
    """Those that are not chosen, and those that are."""
    return [each for each in held if not chosen(each)], [each for each in held if chosen(each)]
