"""Tensors as the plain arrays that CPU kernels read, and work cut into tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.memory import BFLOAT16, FLOAT16, FLOAT32

DTYPE_CODES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


def share(num_items: int, num_elements: int) -> np.ndarray:
    """int64: bounds of the tasks that split `num_items` items, which move `num_elements` elements in all."""
    wanted = 1 if num_elements < 16_384 else pool.num_threads()
    num_tasks = max(1, min(wanted, num_items))
    return np.arange(num_tasks + 1) * num_items // num_tasks


def addresses_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64 `[T]`: where each tensor's contiguous memory begins."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def dtypes_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64 `[T]`: how each tensor's bits are to be read."""
    return np.array([DTYPE_CODES[tensor.dtype] for tensor in tensors], dtype=np.int64)


def as_int64(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.int64).contiguous().numpy()


def as_float32(tensor: Tensor | None) -> np.ndarray:
    """Absent weights are an empty array."""
    if tensor is None:
        return np.empty(0, dtype=np.float32)
    return tensor.detach().to(torch.float32).contiguous().numpy()
