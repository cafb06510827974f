"""Where tensors lie, as a tensor on the device: what lets one launch read any number of separate tables.

Tables are many and stay where they are, so their addresses are uploaded once and kept. The upload is asynchronous, from
pinned memory. Tables in pinned host memory are read through the same addresses (unified addressing).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT = 1024
_kept: OrderedDict[tuple[torch.device, torch.dtype, tuple[float, ...]], Tensor] = OrderedDict()


def on_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers that recur, such as addresses, as a tensor on `device`, without waiting for it."""
    key = (device, dtype, tuple(numbers))
    found = _kept.get(key)
    if found is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph must not copy from host memory that may be reused before a replay: the numbers go into its kernels.
        return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
    if found is None:
        host = torch.tensor(numbers, dtype=dtype)
        found = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
        _kept[key] = found
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    else:
        _kept.move_to_end(key)
    return found
