"""The shards of a collection under a plan: their ranks, routes of ids, columns, process groups, and initial values."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tritonemb.comm.group import RankGroup
from tritonemb.comm.id_exchange import IdRoute, route_key
from tritonemb.comm.output_exchange import ColumnRange
from tritonemb.layout import rows_to_shard
from tritonemb.ops.row_update import fill_initial_
from tritonemb.sharding.plan import DataParallel, Grid, Shard, ShardingPlan, TableRowWise
from tritonemb.sharding.sharded_tensor import cut
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.table import Table
from tritonemb.types import TRAINABLE_DTYPES, TableConfig

# How pooled vectors are exchanged: from rank to rank; summed inside a node first; not at all.
Scheme = Literal["direct", "hierarchical", "replicated"]


class PlacedShard(NamedTuple):
    """A shard of a table."""

    table: int  # its number in the collection
    shard: Shard  # rows, columns, rank
    routes: tuple[int, ...]  # of its ids, one for each feature of the table; none for a replicated table
    summed: bool  # whether other ranks have other rows of the same columns
    cut: bool  # whether other ranks have other columns of the same rows, which its update needs
    scheme: Scheme  # of its output exchange

    @property
    def columns(self) -> ColumnRange:
        return self.shard.first_column, self.shard.num_columns


class Placement:
    """The shards of a collection's tables under a plan; `whole_rows`: whether the optimizer needs them.

    `routes` are those of the ID exchange, in its order; `shards` those of all ranks, by table. ValueError for tables
    that the plan lacks, or shardings that do not fit them.
    """

    def __init__(self, configs: Sequence[TableConfig], plan: ShardingPlan, pooled: bool, whole_rows: bool) -> None:
        plan.require_tables([config.name for config in configs])
        routes: list[IdRoute] = []
        placed: list[PlacedShard] = []
        for table, config in enumerate(configs):
            sharding, shards = plan.tables[config.name], plan.shards(config)
            if isinstance(sharding, DataParallel):
                placed += [PlacedShard(table, shard, (), False, False, "replicated") for shard in shards]
                continue
            sums_inside_nodes = pooled and isinstance(sharding, TableRowWise | Grid)
            hierarchical = sums_inside_nodes and plan.local_world_size < plan.world_size
            blocks: dict[ColumnRange, list[Shard]] = {}
            for shard in shards:
                blocks.setdefault((shard.first_column, shard.num_columns), []).append(shard)
            for rows in blocks.values():
                own = tuple(range(len(routes), len(routes) + len(config.feature_names)))
                firsts, owners = zip(*((shard.first_row, shard.rank) for shard in rows), strict=True)
                to = config.name, rows_to_shard(config), firsts, owners, config.is_dynamic
                routes += [IdRoute(feature, *to) for feature in config.feature_names]
                scheme: Scheme = "hierarchical" if hierarchical else "direct"
                placed += [
                    PlacedShard(table, shard, own, len(rows) > 1, whole_rows and len(blocks) > 1, scheme)
                    for shard in rows
                ]
        self._configs, self.routes, self.shards = configs, tuple(routes), tuple(placed)
        self._widths = [config.embedding_dim * len(config.feature_names) for config in configs]

    def on(self, rank: int, scheme: Scheme) -> list[PlacedShard]:
        """The shards of a rank with this scheme, in the order of its columns: those that are `cut` come last."""
        shards = [each for each in self.shards if each.shard.rank == rank and each.scheme == scheme]
        return sorted(shards, key=lambda each: each.cut)

    def tables_of(self, scheme: Scheme) -> list[int]:
        """The tables with this scheme."""
        return sorted({each.table for each in self.shards if each.scheme == scheme})

    def width_of(self, scheme: Scheme) -> int:
        """Columns of all vectors with this scheme."""
        return sum(self._widths[table] for table in self.tables_of(scheme))

    def runs(self, shards: Sequence[PlacedShard]) -> list[ColumnRange]:
        """The columns of these shards among all with their scheme: by table, then feature."""
        runs: list[ColumnRange] = []
        for each in shards:
            first = self._starts([each.scheme])[each.table]
            starts = range(first, first + self._widths[each.table], self._configs[each.table].embedding_dim)
            runs += [(start + each.shard.first_column, each.shard.num_columns) for start in starts]
        return runs

    def columns(self, schemes: Sequence[Scheme]) -> list[int]:
        """For each column of the result, by table, its column in the results of these schemes side by side."""
        starts = self._starts(schemes)
        return [starts[table] + column for table, width in enumerate(self._widths) for column in range(width)]

    def _starts(self, schemes: Sequence[Scheme]) -> dict[int, int]:
        """The first column of each table in the results of these schemes side by side."""
        tables = [table for scheme in schemes for table in self.tables_of(scheme)]
        return dict(zip(tables, accumulate((self._widths[table] for table in tables), initial=0), strict=False))

    def parts(self, shards: Sequence[PlacedShard]) -> list[TableConfig]:
        """Shards as tables of their own, looked up by the keys of their routes.

        A table with several shards gets a number behind its name.
        """
        parts, times = [], Counter[int]()
        for each in shards:
            config, shard, number = self._configs[each.table], each.shard, times[each.table]
            whole = replace(config, pooling="sum") if each.summed and config.pooling == "mean" else config
            features = [route_key(route) for route in each.routes] or config.feature_names
            name = f"{config.name}@{number}" if number else config.name
            parts.append(whole.shard(name, (shard.first_row, shard.num_rows), each.columns, features))
            times[each.table] += 1
        return parts


class ShardGroups(NamedTuple):
    """Process groups; all ranks make them together."""

    world: RankGroup  # all ranks of the job; not the group that `DistributedDataParallel` uses
    shards: RankGroup  # ranks with the shards of one copy of the tables
    # the same ranks, for ID exchanges, on the CPU and in a group of their own, so that ids may be prefetched
    ids: RankGroup
    ids_network: RankGroup  # the ranks again, for the ids themselves; over the device's network if that was asked for
    node: RankGroup  # those of `shards` on this node
    across: RankGroup  # those of `shards` with this rank's local rank
    replicas: RankGroup  # ranks with the same shards in other copies of the tables; one if there is one copy

    @classmethod
    def make(
        cls, mesh: DeviceMesh | None = None, local_world_size: int | None = None, timeout: timedelta | None = None,
        ids_over_device: bool = False,
    ) -> Self:  # fmt: skip
        """The groups of a job, or of a mesh of its ranks: one dimension of shards, or ("replicate", "shard").

        ValueError for a mesh of more dimensions, or nodes that do not divide the ranks.
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
                raise ValueError("the mesh must have the ranks in their order, replica by replica")
            replicas, shards = (1, *mesh.shape)[-2:]
        node = min(world.local_world_size, shards)
        if shards % node:
            raise ValueError(f"{shards} ranks of a copy of the tables cannot be nodes of {node} ranks each")
        copies = [[copy * shards + rank for rank in range(shards)] for copy in range(replicas)]
        nodes = [copy[first : first + node] for copy in copies for first in range(0, shards, node)]
        local_ranks = [copy[local::node] for copy in copies for local in range(node)]
        of_shards, ids = world.subgroup(copies), world.subgroup(copies, backend="gloo")
        return cls(
            world.duplicate(), of_shards, ids, world.subgroup(copies) if ids_over_device else ids,
            of_shards if node == shards else world.subgroup(nodes), world.subgroup(local_ranks),
            world.subgroup(list(zip(*copies, strict=True))),
        )  # fmt: skip

    def for_prefetch(self, replicated: bool) -> RankGroup:
        """As `world`, or else `replicas`, on the CPU and with connections of its own; all ranks make it together."""
        if replicated:
            return self.ids if self.replicas.size == 1 else self.world.duplicate(backend="gloo")
        size = self.shards.size
        return self.world.subgroup([range(rank, self.world.size, size) for rank in range(size)], backend="gloo")

    def among(self, ranks: Sequence[int]) -> RankGroup:
        """Some ranks of each copy of the tables, or, for a rank that is not one of them, the others."""
        copies, size = self.world.size // self.shards.size, self.shards.size
        others = [rank for rank in range(size) if rank not in ranks]
        sets = [[copy * size + rank for rank in each] for copy in range(copies) for each in (ranks, others) if each]
        return self.world.subgroup(sets)


def change_tensors(table: Table, device: torch.device, change: Callable[[Tensor], None]) -> None:
    """Change a table's weight and states in place, on a device of this kind."""

    def change_fields(fields: Mapping[str, Tensor]) -> None:
        for values in fields.values():
            moved = values.to(device).contiguous()
            change(moved)
            values.copy_(moved)

    table.update_records(change_fields)


def copy_shard(own: Table, whole: Mapping[str, Tensor], shard: Shard) -> None:
    """Fill a shard from a whole table and its states, by name."""
    tensors = own.tensors()
    for name, given in whole.items():
        tensors[name].copy_(cut(given, shard))
    if isinstance(own, CachedTable):
        own.assign(tensors)


def init_shard(own: Table, table: TableConfig, shard: Shard) -> None:
    """Draw a shard's initial values: those that the whole table has there, however it is sharded.

    A value depends on the table's name, on torch's seed (`torch.initial_seed`, which `torch.manual_seed` sets), and on
    its row and column, so nobody draws the whole; a table with an `init` of its own is made whole on the CPU.
    """
    seed = seed_of_shards(table)
    if table.init is None:
        fill_initial_(own.weight, seed, table.bound, shard.first_row, shard.first_column)
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dtype = table.dtype if table.dtype in TRAINABLE_DTYPES else torch.float32
        whole = torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype)
        table.init(whole)
    copy_shard(own, {"weight": whole}, shard)


def seed_of_shards(table: TableConfig) -> int:
    """What a table's initial values are drawn by."""
    return (table.seed ^ torch.initial_seed()) & (2**63 - 1)
