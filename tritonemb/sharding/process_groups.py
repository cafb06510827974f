"""The groups of ranks that a sharded model needs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from tritonemb.comm.group import RankGroup


class ShardGroups(NamedTuple):
    """Made by all ranks together.

    Attributes:
        world: all ranks of the job, with an order of their own: `DistributedDataParallel` uses the job's.
        shards: ranks that hold one copy of the tables between them.
        ids: the same ranks, for ids, on the CPU and with an order of their own, so that these may travel ahead.
        node: those of `shards` on this node.
        across: those of `shards` with this rank's place on their nodes.
        replicas: ranks that hold the same shards in other copies of the tables; one if there is one copy.
    """

    world: RankGroup
    shards: RankGroup
    ids: RankGroup
    node: RankGroup
    across: RankGroup
    replicas: RankGroup

    @classmethod
    def make(
        cls, mesh: DeviceMesh | None = None, local_world_size: int | None = None, timeout: timedelta | None = None
    ) -> ShardGroups:
        """The groups of a job, or of a mesh of its ranks: one dimension of shards, or ("replicate", "shard").

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
                raise ValueError("the mesh must hold the ranks in their order, replica by replica")
            replicas, shards = (1, *mesh.shape)[-2:]
        node = min(world.local_world_size, shards)
        if shards % node:
            raise ValueError(f"{shards} ranks of a copy of the tables cannot be nodes of {node} ranks each")
        copies = _copies(replicas, shards)
        nodes = [copy[first : first + node] for copy in copies for first in range(0, shards, node)]
        places = [copy[place::node] for copy in copies for place in range(node)]
        of_shards = world.subgroup(copies)
        return cls(
            world.duplicate(), of_shards, world.subgroup(copies, backend="gloo"),
            of_shards if node == shards else world.subgroup(nodes), world.subgroup(places),
            world.subgroup(_same(copies)),
        )  # fmt: skip

    def world_ahead(self) -> RankGroup:
        """As `world`, for what goes ahead with the ids; made by all ranks together."""
        return self.ids if self.replicas.size == 1 else self.world.duplicate(backend="gloo")

    def replicas_ahead(self) -> RankGroup:
        """As `replicas`, for what goes ahead with the ids; made by all ranks together."""
        return self.world.subgroup(_same(_copies(self.replicas.size, self.shards.size)), backend="gloo")

    def among(self, ranks: Sequence[int]) -> RankGroup:
        """Some ranks of each copy of the tables, or, for a rank that is not one of them, the others."""
        copies, size = self.world.size // self.shards.size, self.shards.size
        others = [rank for rank in range(size) if rank not in ranks]
        sets = [[copy * size + rank for rank in each] for copy in range(copies) for each in (ranks, others) if each]
        return self.world.subgroup(sets)


def _copies(replicas: int, shards: int) -> list[list[int]]:
    """The ranks of each copy of the tables."""
    return [[copy * shards + rank for rank in range(shards)] for copy in range(replicas)]


def _same(copies: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks with the same place in each copy."""
    return [list(ranks) for ranks in zip(*copies, strict=True)]
