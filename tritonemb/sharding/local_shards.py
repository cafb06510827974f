"""How a rank updates the shards that it holds, alone or with the ranks that have the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.comm.gradient_exchange import all_gather_rows
from tritonemb.sharding.pinned_rows import HeldRows
from tritonemb.sharding.replicated_update import Gathering, gathered_update_
from tritonemb.tables.cache import Lease, RowsOfOthers
from tritonemb.tables.lookup import Lookup
from tritonemb.tables.table_set import TableSet
from tritonemb.tables.update import LocalUpdate


class ShardUpdate(LocalUpdate):
    """Of rows that are nobody else's: nothing drifts apart, whatever averages the dense network."""

    def check(self, table: str) -> None:
        pass


class ReplicatedUpdate(ShardUpdate):
    """Of rows that other ranks have too.

    Args:
        gathering: with whom gradients are gathered before an update.
    """

    is_traceable = False

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering

    def replica_rows(self, tables: TableSet) -> RowsOfOthers | None:
        if self._gathering.ahead is None:
            return None
        group, cache = self._gathering.ahead, tables.cache
        assert cache is not None
        ends = torch.tensor([config.num_embeddings for config in tables.configs], device=cache.device).cumsum(0)
        cached = torch.tensor([table is not None for table in cache.tiered], device=cache.device)

        def find(rows: Tensor, problem: ValueError | None) -> Tensor:
            """Rows of cached tables which the batches of the replicas have between them; a collective."""
            own = rows[cached[torch.searchsorted(ends, rows, right=True)]]
            return all_gather_rows(group, own.cpu(), problem).to(rows.device)

        return find

    def step(self, tables: TableSet, grad: Tensor, lookup: Lookup, leases: Sequence[Lease] = ()) -> None:
        assert tables.optimizer is not None
        held = HeldRows(tables, leases)
        gathered_update_(self._gathering, tables.configs, tables.optimizer, held, grad, lookup)
