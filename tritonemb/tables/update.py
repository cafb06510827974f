"""How the rows of a batch are updated: here alone; `sharding` has an update for rows that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tritonemb import ops
from tritonemb.tables.lookup import Lookup
from tritonemb.tables.pins import Lease


class LocalUpdate:
    """One step of the optimizer on rows that no other process has.

    Attributes:
        is_traceable: the update is an op, so that a lookup and its backward may be compiled.
    """

    is_traceable = True

    def check(self, table: str) -> None:
        """Raise where the tables must not be updated, in the forward."""
        refuse_data_parallel(table)

    def replica_rows(self, tables: Any) -> Any:
        """Finds the rows that are updated with those of a batch, as other ranks have them too; None if there are none.

        See `RowCache.bring`.
        """
        return None

    @torch.no_grad()
    def step(self, tables: Any, grad: Tensor, lookup: Lookup, leases: Sequence[Lease] = ()) -> None:
        """One step of the optimizer on the rows of a batch, whose leases end when that is done."""
        for lease in leases:
            lease.change()
        try:
            with tables.memory():
                fused = tables.fused_tables()
                ops.row_update_(
                    fused, grad, lookup.offsets, lookup.sample_weights, lookup.groups, lookup.layout
                )  # fmt: skip
        finally:
            for lease in leases:
                lease.end()


def refuse_data_parallel(name: str) -> None:
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
