"""Copies of a training state in host memory, which stay as they are while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tritonemb.sharding.sharded_tensor import TableShards


class HostCopies:
    """Host buffers that are made at the first copy and used again for the next ones.

    Their memory is pinned for what comes from a CUDA device.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._shells: dict[str, DTensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank is to save of `tensors`, as it is now; overwrites what the last call returned.

        A `TableShards` comes back as one that holds what this rank saves, a DTensor as one on the CPU.
        """
        before, self._buffers = self._buffers, {}  # buffers that are not wanted any more go
        copies = {name: self._copy(before, name, tensor) for name, tensor in tensors.items()}
        for device in {buffer.device for buffer in _sources(tensors) if buffer.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _copy(self, before: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, TableShards):
            numbers = iter(range(len(tensor.shards)))
            return tensor.map(lambda part: self._fill(before, f"{name} {next(numbers)}", part), only_mine=True)
        if isinstance(tensor, DTensor):
            shell = self._shells.get(name)
            if shell is None or _layout(shell) != _layout(tensor):
                shell = self._shells[name] = cast(DTensor, tensor.to("cpu", copy=True))
            shell._local_tensor = self._fill(before, name, tensor.to_local())
            return shell
        return self._fill(before, name, tensor)

    def _fill(self, before: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
        buffer = before.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def _layout(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements


def _sources(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    found = []
    for tensor in tensors.values():
        if isinstance(tensor, TableShards):
            found += [shard.tensor for shard in tensor.shards if shard.mine]
        else:
            found.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return found
