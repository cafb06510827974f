"""Which kernel serves an op: one table, one rule.

An op runs its device's kernel if there is one for all of its tables' dtypes, else the reference. Kernels are imported
when they are first used, so that importing tritonemb does not load a compiler.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tritonemb.types import TABLE_DTYPES

REFERENCE = "reference"
_KERNELS: dict[str, dict[str, str]] = {
    "row_groups": {
        REFERENCE: "tritonemb.kernels.row_groups:row_groups_reference",
        "cpu": "tritonemb.kernels.cpu.row_groups:row_groups",
    },
    "embedding_bag": {
        REFERENCE: "tritonemb.kernels.embedding_bag:embedding_bag_reference",
        "cpu": "tritonemb.kernels.cpu.embedding_bag:embedding_bag",
    },
    "sample_weight_gradient": {
        REFERENCE: "tritonemb.kernels.embedding_bag:sample_weight_gradient_reference",
        "cpu": "tritonemb.kernels.cpu.embedding_bag:sample_weight_gradient",
    },
    "row_update_": {
        REFERENCE: "tritonemb.kernels.row_update:row_update_reference_",
        "cpu": "tritonemb.kernels.cpu.row_update:row_update_",
    },
}
_forced: str | None = None


def choose(op: str, device: torch.device, tables: Sequence[Tensor] = ()) -> str:
    """The name of the kernel that serves `op` on `device` for these tables: a device type, or "reference"."""
    if _forced is not None:
        return _forced
    fast = device.type in _KERNELS[op] and all(table.dtype in TABLE_DTYPES for table in tables)
    return device.type if fast else REFERENCE


def kernel(op: str, device: torch.device, tables: Sequence[Tensor] = ()) -> Callable[..., Any]:
    """The function that serves `op` on `device` for these tables."""
    return _load(_KERNELS[op][choose(op, device, tables)])


def plain_eager(*tensors: Tensor | None) -> bool:
    """Whether a kernel may be called at once: nothing is being traced and these are ordinary tensors.

    The dispatcher, which tracing needs, costs a custom op with lists of tables up to half a millisecond a call.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level()
    ):
        return False
    return all(tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Serve every op by the kernels called `name`, for tests and for finding a wrong kernel."""
    global _forced
    if any(name not in kernels for kernels in _KERNELS.values()):
        raise ValueError(
            f"no kernels are called {name!r}; there are {sorted({n for k in _KERNELS.values() for n in k})}"
        )
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@functools.cache
def _load(target: str) -> Callable[..., Any]:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)
