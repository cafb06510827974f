"""Where tensors lie, as a tensor on the device: what lets one launch read any number of separate tables.

Tables are many and stay where they are, so their addresses are uploaded once and kept. The upload is asynchronous, from
pinned memory. Tables in pinned host memory are read through the same addresses (unified addressing).
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KEPT = 1024


class _Upload(NamedTuple):
    tensor: Tensor
    stream: torch.cuda.Stream | None
    done: torch.cuda.Event | None


_kept: OrderedDict[tuple[torch.device, torch.dtype, tuple[float, ...]], _Upload] = OrderedDict()
_in_graphs: list[Tensor] = []  # a captured graph reads them as long as it lives
_lock = threading.Lock()


class _OnGPU(NamedTuple):
    """int64 numbers at an address of a GPU, for `torch.as_tensor`."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "<i8", "data": (self.address, False), "version": 3}


def int64_at(address: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The int64 numbers `[count]` at an address, where they are: somebody else keeps them alive."""
    if torch.device(device).type == "cuda":
        return torch.as_tensor(_OnGPU(address, count), device=device)
    return torch.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=torch.int64)


def on_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers that recur, such as addresses, as a tensor on `device`, without waiting for it."""
    key = (device, dtype, tuple(numbers))
    with _lock, torch.inference_mode(False):  # they outlive whatever mode they are first asked for in
        found = _kept.get(key)
        if device.type != "cuda":
            if found is None:
                found = _keep(key, _Upload(torch.tensor(key[2], dtype=dtype), None, None))
            return found.tensor
        with torch.cuda.device(device):
            return _on_gpu(key, found)


def _on_gpu(key: tuple[torch.device, torch.dtype, tuple[float, ...]], found: _Upload | None) -> Tensor:
    device, dtype, numbers = key
    stream = torch.cuda.current_stream()
    if torch.cuda.is_current_stream_capturing():
        if found is not None:
            _in_graphs.append(found.tensor)
            return found.tensor
        # A graph must not copy from host memory that may be reused before a replay: the numbers go into its kernels.
        return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
    if found is None:
        tensor = torch.tensor(numbers, dtype=dtype).pin_memory().to(device, non_blocking=True)
        return _keep(key, _Upload(tensor, stream, stream.record_event())).tensor
    _kept.move_to_end(key)
    if found.stream != stream:
        assert found.done is not None
        stream.wait_event(found.done)
        found.tensor.record_stream(stream)
    return found.tensor


def _keep(key: tuple[torch.device, torch.dtype, tuple[float, ...]], upload: _Upload) -> _Upload:
    _kept[key] = upload
    if len(_kept) > KEPT:
        _kept.popitem(last=False)
    return upload
