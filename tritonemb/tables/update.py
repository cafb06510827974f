"""What a backward pass does with the gradients of rows; `sharding` has an update of rows that several ranks have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tritonemb import ops
from tritonemb.tables.lookup import Lookup, PinnedSlots


class LocalUpdate:
    """One step of the optimizer on rows that no other process has.

    Attributes:
        is_traceable: the update is an op, so that a lookup and its backward may be compiled.
    """

    is_traceable = True

    def check(self, table: str) -> None:
        """Raise in the forward where the tables must not be updated."""
        check_not_data_parallel(table)

    def replica_rows(self, tables: Any) -> Any:
        """Finds the rows of other ranks' batches that are updated with a batch, or None; see `RowCache.prefetch`."""
        return None

    @torch.no_grad()
    def step(self, tables: Any, grad: Tensor, lookup: Lookup, pins: Sequence[PinnedSlots] = ()) -> None:
        """One step of the optimizer on the rows of a batch, whose slots are unpinned then."""
        for pinned in pins:
            pinned.mark_dirty()
        try:
            with tables.memory():
                fused = tables.fused_tables()
                ops.row_update_(fused, grad, lookup.offsets, lookup.sample_weights, lookup.groups, lookup.layout)
        finally:
            for pinned in pins:
                pinned.release()


class RowsUpdate:
    """A lookup whose gradient goes to its tables; an `ops.Update`."""

    def __init__(self, tables: Any, lookup: Lookup) -> None:
        self._tables, self._lookup = tables, lookup

    def read(self) -> Tensor:
        """The rows."""
        found: Tensor = self._tables.read(self._lookup)
        return found

    def take_gradient(self, grad: Tensor, needs_sample_weight_grad: bool) -> None:
        """Update the rows, or keep the gradient while gradients are accumulated."""
        self._tables.take_gradient(grad, self._lookup)


def check_not_data_parallel(name: str) -> None:
    """Raise in the forward of `DistributedDataParallel` on several processes, for a table that the backward updates.

    Raises:
        RuntimeError: every process would update its own copy by its own part of the batch.
    """
    parallel = DistributedDataParallel._get_active_ddp_module()
    if parallel is not None and parallel.process_group.size() > 1:
        raise RuntimeError(
            f"table {name!r} has a fused optimizer, so DistributedDataParallel has no gradient to average and the "
            "processes' tables would drift apart; fuse without an optimizer, te.fuse(model), or keep the tables out of "
            "DistributedDataParallel"
        )
