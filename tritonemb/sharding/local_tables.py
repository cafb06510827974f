"""The shards of tables that a rank holds, looked up and updated together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.nn.collection import BoundsCheck, Collection
from tritonemb.nn.features import Features, parts_of
from tritonemb.nn.lookup import Lookup, look_up
from tritonemb.nn.row_cache import Brought
from tritonemb.nn.sent import Groups
from tritonemb.optimizers import Optimizer
from tritonemb.sharding.gathered_update import Gathering, gathered_update_
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
        if self.gathering is None or not torch.is_grad_enabled():
            return super().look_up(features, groups)
        assert not isinstance(groups, Brought)  # refused where the tables are sharded
        keys, values, offsets, sample_weights = parts_of(features)
        layout = self.layout(keys, values.device)
        if self._accumulating:
            self._remember_keys(keys)
        groups = ops.row_groups(values, offsets, layout) if groups is None else groups
        return look_up(self, self.tables[0].weight, Lookup(values, offsets, sample_weights, groups, layout))

    def forward(self, features: Features, groups: Groups | None = None) -> Tensor:
        """As `look_up`."""
        return self.look_up(features, groups)

    def _step(self, grad: Tensor, lookup: Lookup) -> None:
        if self.gathering is None:
            super()._step(grad, lookup)
        else:
            fused = self._fused([table.weight for table in self.tables])
            assert self.optimizer is not None
            gathered_update_(self.gathering, self.configs, self.optimizer, fused, grad, lookup)
