"""Distinct rows that each of several ranks is about to train, made known to all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.comm.group import Group

_REFUSED = -1


def gather_rows(group: Group, rows: Tensor, problem: ValueError | None = None) -> Tensor:
    """The distinct rows of all ranks; a collective.

    Bytes: 8 for each rank, and for each distinct row of the rank that has most of them, to every other rank.

    Args:
        rows: int64 `[U]`, distinct, on the CPU.
        problem: what the caller has found wrong with this rank's batch.

    Returns:
        int64 `[V]`, ascending.

    Raises:
        ValueError: the problem; the other ranks get a RuntimeError that names this one.
    """
    own = rows.numel() if problem is None else _REFUSED
    counts = group.all_gather(torch.tensor([own], device=rows.device), "sizes").flatten().tolist()
    if problem is not None:
        raise problem
    if _REFUSED in counts:
        rank = group.ranks[counts.index(_REFUSED)]
        raise RuntimeError(f"rank {rank} has refused its batch; its own error says why")
    if not any(counts):
        return rows
    message = rows.new_zeros(max(counts))
    message[: rows.numel()] = rows
    gathered = group.all_gather(message, "rows")
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).unique()
