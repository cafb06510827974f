"""The shards of tables that a rank holds, looked up and updated together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.kernels.layout import Layout
from tritonemb.nn.collection import BoundsCheck, Collection, Features, parts_of
from tritonemb.ops.accumulate import accumulate_
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

    def look_up(self, features: Features, groups: ops.RowGroups | None) -> Tensor:
        """The op behind `forward`: `[B, width]` if pooled, else `[N, width]`."""
        if self.gathering is None or not torch.is_grad_enabled():
            return super().look_up(features, groups)
        keys, values, offsets, sample_weights = parts_of(features)
        layout = self.layout(keys, values.device)
        if self._accumulating:
            self._remember_keys(keys)
        groups = ops.row_groups(values, offsets, layout) if groups is None else groups
        found: Tensor = _Lookup.apply(self.tables[0].weight, self, values, offsets, sample_weights, groups, layout)
        return found

    def forward(self, features: Features, groups: ops.RowGroups | None = None) -> Tensor:
        """As `look_up`."""
        return self.look_up(features, groups)

    def _step(
        self,
        grad: Tensor,
        values: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        layout: Layout,
        groups: ops.RowGroups,
    ) -> None:
        if self.gathering is None:
            super()._step(grad, values, offsets, sample_weights, layout, groups)
        else:
            fused = self._fused([table.weight for table in self.tables])
            assert self.optimizer is not None
            gathered_update_(
                self.gathering, self.configs, self.optimizer, fused, grad, offsets, sample_weights, layout, groups
            )


class _Lookup(torch.autograd.Function):
    """A lookup whose backward hands its gradient to the tables. The first table stands for all."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        tables: LocalTables,
        values: Tensor,
        offsets: Tensor,
        sample_weights: Tensor | None,
        groups: ops.RowGroups,
        layout: Layout,
    ) -> Tensor:
        weights: list[Tensor] = [table.weight for table in tables.tables]
        ctx.inputs = tables, values, offsets, sample_weights, groups, layout
        return ops.embedding_bag(
            weights, values, offsets, sample_weights, layout, tables.bounds_check == "raise", tables.dtype_of(weights)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        tables, values, offsets, sample_weights, groups, layout = ctx.inputs
        if tables._accumulating:
            accumulate_(tables.pending, tables._accumulator.handle, grad, values, offsets, sample_weights)
        else:
            tables._step(grad, values, offsets, sample_weights, layout, groups)
        return (None,) * 7
