"""What a checkpoint holds: tensors, of which a rank may have a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tritonemb.comm.group import RankGroup
from tritonemb.sharding.sharded_tensor import Rectangle, TableShards, refuse_gaps
from tritonemb.training.checkpoints.together import together


def describe(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def bytes_to_write(tensors: Mapping[str, Tensor], group: RankGroup | None) -> int:
    """By all ranks together; what is the same on all is written once."""
    parts = sum(local_bytes(tensor) for tensor in tensors.values() if is_part(tensor))
    whole = sum(local_bytes(tensor) for tensor in tensors.values() if not is_part(tensor))
    every = together(group, lambda: (parts, whole))
    return sum(part for part, _ in every) + max(whole for _, whole in every)


def local_bytes(tensor: Tensor) -> int:
    """What this rank holds of a tensor and may have to write."""
    if isinstance(tensor, TableShards):
        return tensor.bytes_to_save()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def is_part(tensor: Tensor) -> bool:
    """Whether each rank has a part of it."""
    return isinstance(tensor, TableShards | DTensor)


def refuse_missing_parts(tensors: Mapping[str, Tensor], group: RankGroup | None) -> None:
    """Raise ValueError, on every rank, unless the ranks' shards make up each sharded table."""
    held = {
        name: (describe(value.shape, value.dtype), tuple(value.shape), value.rectangles())
        for name, value in tensors.items()
        if isinstance(value, TableShards)
    }
    every = together(group, lambda: held)
    names = dict.fromkeys(name for of_rank in every for name in of_rank)
    for name in names:
        found = [of_rank[name] for of_rank in every if name in of_rank]
        kinds = {kind for kind, _, _ in found}
        if len(kinds) > 1:
            raise ValueError(f"{name} is not the same on all ranks: {', '.join(sorted(kinds))}")
        rectangles: list[Rectangle] = [rectangle for _, _, some in found for rectangle in some]
        try:
            refuse_gaps(torch.Size(found[0][1]), rectangles)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
