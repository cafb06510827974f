"""The shards of tables that a rank holds, looked up and updated together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.gradient_exchange import all_gather_rows
from tritonemb.optimizers import Optimizer
from tritonemb.sharding.pinned_rows import HeldRows
from tritonemb.sharding.replicated_update import Gathering, gathered_update_
from tritonemb.tables.cache import Brought, Lease, RowsOfOthers
from tritonemb.tables.collection import BoundsCheck, Collection
from tritonemb.tables.lookup import Features, Lookup, look_up, parts_of
from tritonemb.tables.prefetched import Groups
from tritonemb.types import TableConfig


class LocalTables(Collection):
    """A collection of shards, or of whole tables that other ranks have too.

    Args:
        tables: parts of tables (`TableConfig.part`), or whole ones; their values are left as memory has them.
        pooled: whether bags are pooled, or every id keeps its row.
        gathering: with whom gradients are gathered before an update; None if these rows are nobody else's.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        pooled: bool,
        optimizer: Optimizer | None,
        device: torch.device | str | None,
        bounds_check: BoundsCheck,
        output_dtype: torch.dtype | None,
        gathering: Gathering | None = None,
    ) -> None:
        self.pooled = pooled
        super().__init__(tables, optimizer, device, bounds_check, output_dtype)
        self.gathering = gathering

    def _refuse_replicas(self) -> None:
        """These are sharded, or their gradients are gathered: nothing drifts apart."""

    def look_up(self, features: Features, groups: Groups | None) -> Tensor:
        """The op behind `forward`: `[B, width]` if pooled, else `[N, width]`."""
        if self.gathering is None or self.cache is not None or not torch.is_grad_enabled():
            return super().look_up(features, groups)
        assert not isinstance(groups, Brought)
        keys, values, offsets, sample_weights = parts_of(features)
        layout = self.layout(keys, values.device)
        if self._accumulating:
            self._remember_keys(keys)
        groups = ops.row_groups(values, offsets, layout) if groups is None else groups
        return look_up(self, self.tables[0].weight, Lookup(values, offsets, sample_weights, groups, layout))

    def forward(self, features: Features, groups: Groups | None = None) -> Tensor:
        """As `look_up`."""
        return self.look_up(features, groups)

    def rows_of_others(self) -> RowsOfOthers | None:
        return None if self.gathering is None or self.gathering.ahead is None else self._rows_of_others

    def _rows_of_others(self, rows: Tensor, problem: ValueError | None) -> Tensor:
        """Those of tables that live elsewhere which the batches of the replicas have between them; a collective."""
        assert self.cache is not None
        assert self.gathering is not None
        assert self.gathering.ahead is not None
        ends = torch.tensor([config.num_embeddings for config in self.configs], device=rows.device).cumsum(0)
        elsewhere = torch.tensor([table is not None for table in self.cache.tiered], device=rows.device)
        own = rows[elsewhere[torch.searchsorted(ends, rows, right=True)]]
        return all_gather_rows(self.gathering.ahead, own.cpu(), problem).to(rows.device)

    def _step(self, grad: Tensor, lookup: Lookup, leases: Sequence[Lease] = ()) -> None:
        if self.gathering is None:
            super()._step(grad, lookup, leases)
        else:
            assert self.optimizer is not None
            held = HeldRows(self, leases)
            gathered_update_(self.gathering, self.configs, self.optimizer, held, grad, lookup)
