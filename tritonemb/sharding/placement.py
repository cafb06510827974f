"""What a plan means for a collection: who holds what, which way ids go, and where columns come back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tritonemb.comm.codec import ColumnRange
from tritonemb.comm.id_exchange import IdRoute, route_key
from tritonemb.sharding.plan import Shard, ShardingPlan
from tritonemb.types import TableConfig

Way = Literal["direct", "by node", "everywhere"]
"""How pooled vectors come back: from each rank to each; summed inside a node first; or they never leave."""


class Held(NamedTuple):
    """A shard of a table.

    Attributes:
        table: its number in the collection.
        shard: rows, columns, rank.
        lanes: that bring ids for it, one for each feature of the table; none if every rank has the table.
        summed: whether other ranks have other rows of the same columns.
        cut: whether other ranks have other columns of the same rows.
        way: how its vectors come back.
    """

    table: int
    shard: Shard
    lanes: tuple[int, ...]
    summed: bool
    cut: bool
    way: Way


@dataclass(frozen=True)
class Placement:
    """The shards of a collection's tables.

    Args:
        configs: of the tables.
        plan: has them all.
        lanes: of the ids exchange, in its order.
        held: of all ranks, by table.
    """

    configs: tuple[TableConfig, ...]
    plan: ShardingPlan
    lanes: tuple[IdRoute, ...]
    held: tuple[Held, ...]

    @classmethod
    def of(cls, configs: Sequence[TableConfig], plan: ShardingPlan, pooled: bool) -> Placement:
        """Raises ValueError for tables that the plan lacks, or shardings that do not fit them."""
        plan.check([config.name for config in configs])
        lanes: list[IdRoute] = []
        held: list[Held] = []
        for table, config in enumerate(configs):
            sharding, shards = plan.tables[config.name], plan.shards(config)
            if sharding.is_replicated:
                held += [Held(table, shard, (), False, False, "everywhere") for shard in shards]
                continue
            by_node = pooled and sharding.sums_inside_nodes and plan.local_world_size < plan.world_size
            blocks: dict[ColumnRange, list[Shard]] = {}
            for shard in shards:
                blocks.setdefault((shard.first_column, shard.num_columns), []).append(shard)
            for rows in blocks.values():
                own = []
                for feature in config.feature_names:
                    own.append(len(lanes))
                    owners = tuple(shard.rank for shard in rows)
                    lanes.append(IdRoute(feature, config.name, config.num_embeddings, rows[0].num_rows, owners))
                way: Way = "by node" if by_node else "direct"
                held += [Held(table, shard, tuple(own), len(rows) > 1, len(blocks) > 1, way) for shard in rows]
        return cls(tuple(configs), plan, tuple(lanes), tuple(held))

    def on(self, rank: int, way: Way) -> list[Held]:
        """What a rank holds whose vectors come back this way, in the order of its columns."""
        return [held for held in self.held if held.shard.rank == rank and held.way == way]

    def tables_of(self, way: Way) -> list[int]:
        """The tables whose vectors come back this way."""
        return sorted({held.table for held in self.held if held.way == way})

    def width_of(self, way: Way) -> int:
        """Columns of all vectors that come back this way."""
        return sum(self._width(table) for table in self.tables_of(way))

    def runs(self, held: Sequence[Held]) -> list[ColumnRange]:
        """Where the columns of these shards are among all that come back the same way: by table, then feature."""
        runs: list[ColumnRange] = []
        for each in held:
            before = sum(self._width(table) for table in self.tables_of(each.way) if table < each.table)
            dim = self.configs[each.table].embedding_dim
            firsts = [before + feature * dim for feature in range(len(self.configs[each.table].feature_names))]
            runs += [(first + each.shard.first_column, each.shard.num_columns) for first in firsts]
        return runs

    def columns(self, ways: Sequence[Way]) -> list[int]:
        """Where each column of the result, by table, is when the results of these ways lie side by side."""
        starts, place = {}, 0
        for way in ways:
            for table in self.tables_of(way):
                starts[table] = place
                place += self._width(table)
        return [starts[t] + column for t in range(len(self.configs)) for column in range(self._width(t))]

    def part(self, held: Held, name: str) -> TableConfig:
        """The shard as a table of its own, looked up by its lanes."""
        config, shard = self.configs[held.table], held.shard
        whole = replace(config, pooling="sum") if held.summed and config.pooling == "mean" else config
        features = [route_key(lane) for lane in held.lanes] or config.feature_names
        rows, columns = (shard.first_row, shard.num_rows), (shard.first_column, shard.num_columns)
        return whole.part(name, rows, columns, features)

    def _width(self, table: int) -> int:
        return self.configs[table].embedding_dim * len(self.configs[table].feature_names)


def named_parts(placement: Placement, held: Sequence[Held]) -> list[TableConfig]:
    """Parts for a collection of them: a table that is there several times gets a number behind its name."""
    parts, times = [], dict.fromkeys(range(len(placement.configs)), 0)
    for each in held:
        name, number = placement.configs[each.table].name, times[each.table]
        parts.append(placement.part(each, f"{name}@{number}" if number else name))
        times[each.table] += 1
    return parts


def split(held: Sequence[Held], chosen: Callable[[Held], bool]) -> tuple[list[Held], list[Held]]:
    """Those that are not chosen, and those that are."""
    return [each for each in held if not chosen(each)], [each for each in held if chosen(each)]
