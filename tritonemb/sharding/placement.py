"""Shards of a collection under a plan: ranks, ID routes, columns, and process groups."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Literal, NamedTuple, Self

from torch.distributed.device_mesh import DeviceMesh

from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdRoute, route_key
from tritonemb.comm.output_exchange import ColumnRange
from tritonemb.layout import rows_to_shard
from tritonemb.sharding.plan import Shard, ShardingPlan
from tritonemb.types import TableConfig

# Output exchange of pooled vectors: rank to rank; reduced inside each node first; none, as every rank has the table.
Scheme = Literal["direct", "hierarchical", "replicated"]


class PlacedShard(NamedTuple):
    """Shard of a table, with its ID routes and output exchange."""

    table: int  # index of the table in the collection
    shard: Shard  # rows, columns, rank
    routes: tuple[int, ...]  # ID routes, one per feature of the table; none for a replicated table
    row_sharded: bool  # other shards have other rows of the same columns
    needs_whole_rows: bool  # its update needs the other columns of its rows, which other shards have
    scheme: Scheme  # of its output exchange

    @property
    def columns(self) -> ColumnRange:
        return self.shard.first_column, self.shard.num_columns


class ShardMap:
    """Shards of a collection's tables on all ranks, and the routes of their ids.

    Args:
        configs, plan: tables, and their shardings.
        pooled: whether lookups return one vector per bag.
        whole_rows: whether the optimizer reads whole rows.

    Attributes:
        routes: of the ID exchange, in its order.
        shards: of all ranks, by table.

    Raises:
        ValueError: for tables that the plan lacks, or shardings that do not fit.
    """

    def __init__(self, configs: Sequence[TableConfig], plan: ShardingPlan, pooled: bool, whole_rows: bool) -> None:
        plan.require_tables([config.name for config in configs])
        routes: list[IdRoute] = []
        placed: list[PlacedShard] = []
        for table, config in enumerate(configs):
            sharding, shards = plan.tables[config.name], plan.shards(config)
            if sharding.is_replicated:
                placed += [PlacedShard(table, shard, (), False, False, "replicated") for shard in shards]
                continue
            hierarchical = pooled and sharding.reduces_in_node and plan.local_world_size < plan.world_size
            # One ID route per column block and feature; shards of a block have different rows.
            blocks: dict[ColumnRange, list[Shard]] = {}
            for shard in shards:
                blocks.setdefault((shard.first_column, shard.num_columns), []).append(shard)
            for block_shards in blocks.values():
                feature_routes = tuple(range(len(routes), len(routes) + len(config.feature_names)))
                first_rows, owners = zip(*((shard.first_row, shard.rank) for shard in block_shards), strict=True)
                table_fields = config.name, rows_to_shard(config), first_rows, owners, config.is_dynamic
                routes += [IdRoute(feature, *table_fields) for feature in config.feature_names]
                scheme: Scheme = "hierarchical" if hierarchical else "direct"
                options = feature_routes, len(block_shards) > 1, whole_rows and len(blocks) > 1, scheme
                placed += [PlacedShard(table, shard, *options) for shard in block_shards]
        self._configs, self.routes, self.shards = configs, tuple(routes), tuple(placed)
        self._widths = [config.embedding_dim * len(config.feature_names) for config in configs]

    def shards_on(self, rank: int, scheme: Scheme) -> list[PlacedShard]:
        """Shards of a rank with this scheme, in the order of its columns; those that need whole rows come last."""
        shards = [placed for placed in self.shards if placed.shard.rank == rank and placed.scheme == scheme]
        return sorted(shards, key=lambda placed: placed.needs_whole_rows)

    def tables_of(self, scheme: Scheme) -> list[int]:
        """Tables with this scheme, ascending."""
        return sorted({shard.table for shard in self.shards if shard.scheme == scheme})

    def width_of(self, scheme: Scheme) -> int:
        """Columns of the pooled vectors of all tables with this scheme."""
        return sum(self._widths[table] for table in self.tables_of(scheme))

    def column_ranges(self, shards: Sequence[PlacedShard]) -> list[ColumnRange]:
        """Columns of these shards in the matrix of their scheme: by table, then feature."""
        ranges: list[ColumnRange] = []
        for placed in shards:
            first = self._starts([placed.scheme])[placed.table]
            starts = range(first, first + self._widths[placed.table], self._configs[placed.table].embedding_dim)
            ranges += [(start + placed.shard.first_column, placed.shard.num_columns) for start in starts]
        return ranges

    def columns(self, schemes: Sequence[Scheme]) -> list[int]:
        """Map each column of the result, by table, to its column in the concatenated matrices of these schemes."""
        starts = self._starts(schemes)
        return [starts[table] + column for table, width in enumerate(self._widths) for column in range(width)]

    def _starts(self, schemes: Sequence[Scheme]) -> dict[int, int]:
        """First column of each table in the concatenated matrices of these schemes."""
        tables = [table for scheme in schemes for table in self.tables_of(scheme)]
        return dict(zip(tables, accumulate((self._widths[table] for table in tables), initial=0), strict=False))

    def shard_configs(self, shards: Sequence[PlacedShard]) -> list[TableConfig]:
        """Configs of shards, which are looked up by the keys of their routes.

        Further shards of the same table get a number after its name.
        """
        result, counts = [], Counter[int]()
        for placed in shards:
            config, shard, number = self._configs[placed.table], placed.shard, counts[placed.table]
            shard_config = replace(config, pooling="sum") if placed.row_sharded and config.pooling == "mean" else config
            features = [route_key(route) for route in placed.routes] or config.feature_names
            name = f"{config.name}@{number}" if number else config.name
            result.append(shard_config.shard(name, (shard.first_row, shard.num_rows), placed.columns, features))
            counts[placed.table] += 1
        return result


class ShardGroups(NamedTuple):
    """Process groups of a sharded model; all ranks create them in the same order."""

    world: RankGroup  # all ranks of the job; not the process group of `DistributedDataParallel`
    shards: RankGroup  # ranks with the shards of one replica of the tables
    # same ranks as `shards`, for the sizes of ID exchanges: a separate CPU group, so that a prefetch thread may use it
    ids: RankGroup
    ids_network: RankGroup  # same ranks, for the ids; over the device's network if `ids_over_device`
    node: RankGroup  # ranks of `shards` on this node
    across: RankGroup  # ranks of `shards` with the same local rank on other nodes
    replicas: RankGroup  # ranks with the same shards in other replicas of the tables
    prefetch: RankGroup  # all ranks of the job, in a CPU group that a prefetch thread may use

    @classmethod
    def create(
        cls, mesh: DeviceMesh | None = None, local_world_size: int | None = None, timeout: timedelta | None = None,
        ids_over_device: bool = False,
    ) -> Self:  # fmt: skip
        """Create the groups of a job, or of a mesh of its ranks: one dimension of shards, or ("replicate", "shard").

        Raises:
            ValueError: for a mesh of more dimensions, or nodes that do not divide the ranks.
        """
        world = RankGroup.world(local_world_size, timeout)
        replicas, shards = 1, world.size
        if mesh is not None:
            if mesh.ndim > 2 or mesh.size() != world.size:
                raise ValueError(
                    f"the mesh must have all {world.size} ranks in 1 dimension (shards) or 2 (replicas, shards), got "
                    f"shape {tuple(mesh.shape)}"
                )
            if mesh.mesh.flatten().tolist() != list(range(world.size)):
                raise ValueError("the mesh must have the ranks in ascending order, replica by replica")
            replicas, shards = (1, *mesh.shape)[-2:]
        node = min(world.local_world_size, shards)
        if shards % node:
            raise ValueError(f"{shards} ranks of a replica of the tables cannot be split into nodes of {node} ranks")
        copies = [[copy * shards + rank for rank in range(shards)] for copy in range(replicas)]
        nodes = [copy[first : first + node] for copy in copies for first in range(0, shards, node)]
        local_ranks = [copy[local::node] for copy in copies for local in range(node)]
        shard_group, ids = world.subgroup(copies), world.subgroup(copies, backend="gloo")
        return cls(
            world.duplicate(), shard_group, ids, world.subgroup(copies) if ids_over_device else ids,
            shard_group if node == shards else world.subgroup(nodes), world.subgroup(local_ranks),
            world.subgroup(list(zip(*copies, strict=True))), ids if replicas == 1 else world.duplicate(backend="gloo"),
        )  # fmt: skip

    def for_prefetch(self, replicated: bool) -> RankGroup:
        """Return a separate CPU group of all ranks, or create one of `replicas`, for prefetches; a collective."""
        if replicated:
            return self.prefetch
        size = self.shards.size
        return self.world.subgroup([range(rank, self.world.size, size) for rank in range(size)], backend="gloo")

    def subset(self, ranks: Sequence[int]) -> RankGroup:
        """Create a group of these ranks in each replica of the tables; the remaining ranks get a group as well."""
        size = self.shards.size
        parts = [part for part in (ranks, [rank for rank in range(size) if rank not in ranks]) if part]
        copies = range(0, self.world.size, size)
        return self.world.subgroup([[first + rank for rank in part] for first in copies for part in parts])
