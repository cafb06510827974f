"""Fused updates and data parallelism by PyTorch: what the one does, the other cannot see."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel


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
