"""Which kernel serves an op: one table, one rule.

An op runs its device's kernel if there is one for all of its tables' dtypes, else the reference: Triton's on GPUs, and
on the CPU under `TRITON_INTERPRET=1`, where Triton interprets them. Kernels are imported when they are first used, so
that importing tritonemb does not load a compiler.

The pieces that schemas of several ops share. Ops take a layout as their last arguments, so `*layout` catches it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import Layout
from tritonemb.types import TABLE_DTYPES, TRAINABLE_DTYPES

REFERENCE, TRITON = "reference", "triton"
_DTYPES = {"cpu": TRAINABLE_DTYPES, TRITON: TABLE_DTYPES}
_KERNELS: dict[str, dict[str, str]] = {
    "row_groups": {
        REFERENCE: "tritonemb.kernels.row_groups:row_groups_reference",
        "cpu": "tritonemb.kernels.cpu.row_groups:row_groups",
        TRITON: "tritonemb.kernels.row_groups:row_groups",
    },
    "embedding_bag": {
        REFERENCE: "tritonemb.kernels.embedding_bag:embedding_bag_reference",
        "cpu": "tritonemb.kernels.cpu.embedding_bag:embedding_bag",
        TRITON: "tritonemb.kernels.embedding_bag:embedding_bag",
    },
    "sample_weight_gradient": {
        REFERENCE: "tritonemb.kernels.embedding_bag:sample_weight_gradient_reference",
        "cpu": "tritonemb.kernels.cpu.embedding_bag:sample_weight_gradient",
        TRITON: "tritonemb.kernels.embedding_bag:sample_weight_gradient",
    },
    "bag_gradient_": {
        REFERENCE: "tritonemb.kernels.row_update:bag_gradient_reference_",
        "cpu": "tritonemb.kernels.cpu.row_update:bag_gradient_",
        TRITON: "tritonemb.kernels.row_update:bag_gradient_",
    },
    "drop_padding": {
        REFERENCE: "tritonemb.kernels.jagged:drop_padding_reference",
        TRITON: "tritonemb.kernels.jagged:drop_padding",
    },
    "initial_rows": {
        REFERENCE: "tritonemb.kernels.random:initial_rows_reference",
        "cpu": "tritonemb.kernels.cpu.random:initial_rows",
        TRITON: "tritonemb.kernels.random:initial_rows",
    },
    "row_update_": {
        REFERENCE: "tritonemb.kernels.row_update:row_update_reference_",
        "cpu": "tritonemb.kernels.cpu.row_update:row_update_",
        TRITON: "tritonemb.kernels.row_update:row_update_",
    },
    "row_cache_look_up_": {
        REFERENCE: "tritonemb.kernels.row_cache:row_cache_look_up_reference_",
        "cpu": "tritonemb.kernels.cpu.row_cache:row_cache_look_up_",
        TRITON: "tritonemb.kernels.row_cache:row_cache_look_up_",
    },
    "row_cache_allocate_": {
        REFERENCE: "tritonemb.kernels.row_cache:row_cache_allocate_reference_",
        "cpu": "tritonemb.kernels.cpu.row_cache:row_cache_allocate_",
        TRITON: "tritonemb.kernels.row_cache:row_cache_allocate_",
    },
    "row_cache_translate": {
        REFERENCE: "tritonemb.kernels.row_cache:row_cache_translate_reference",
        "cpu": "tritonemb.kernels.cpu.row_cache:row_cache_translate",
        TRITON: "tritonemb.kernels.row_cache:row_cache_translate",
    },
    "move_rows_": {
        REFERENCE: "tritonemb.kernels.move_rows:move_rows_reference_",
        "cpu": "tritonemb.kernels.cpu.move_rows:move_rows_",
        TRITON: "tritonemb.kernels.move_rows:move_rows_",
    },
    "quantize_pack": {
        REFERENCE: "tritonemb.kernels.quantize:quantize_pack_reference",
        TRITON: "tritonemb.kernels.quantize:quantize_pack",
    },
    "quantize_unpack": {
        REFERENCE: "tritonemb.kernels.quantize:quantize_unpack_reference",
        TRITON: "tritonemb.kernels.quantize:quantize_unpack",
    },
    "jagged_permute": {
        REFERENCE: "tritonemb.kernels.jagged:jagged_permute_reference",
        TRITON: "tritonemb.kernels.jagged:jagged_permute",
    },
    "block_bucketize": {
        REFERENCE: "tritonemb.kernels.jagged:block_bucketize_reference",
        TRITON: "tritonemb.kernels.jagged:block_bucketize",
    },
    "interaction": {
        REFERENCE: "tritonemb.kernels.interaction:interaction_reference",
        "cpu": "tritonemb.kernels.cpu.interaction:interaction",
        TRITON: "tritonemb.kernels.interaction:interaction",
    },
    "interaction_gradient": {
        REFERENCE: "tritonemb.kernels.interaction:interaction_gradient_reference",
        "cpu": "tritonemb.kernels.cpu.interaction:interaction_gradient",
        TRITON: "tritonemb.kernels.interaction:interaction_gradient",
    },
    "cross": {
        REFERENCE: "tritonemb.kernels.cross:cross_reference",
        TRITON: "tritonemb.kernels.cross:cross",
    },
    "cross_gradient": {
        REFERENCE: "tritonemb.kernels.cross:cross_gradient_reference",
        TRITON: "tritonemb.kernels.cross:cross_gradient",
    },
}
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
_forced: str | None = None


def choose(op: str, device: torch.device, tables: Sequence[Tensor] = ()) -> str:
    """The name of the kernel that serves `op` on `device` for these tables: "triton", "cpu" or "reference"."""
    kernels = _KERNELS[op]
    if _forced is not None:
        return _forced if _forced in kernels else REFERENCE
    by_triton = _HAS_TRITON and (device.type == "cuda" or (device.type == "cpu" and _INTERPRETING))
    name = TRITON if by_triton else device.type
    fast = name in kernels and all(table.dtype in _DTYPES[name] for table in tables)
    return name if fast else REFERENCE


def why(op: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """The name of the kernel that serves `op` on `device` for tables of `dtype`, and the reason in words."""
    name = choose(op, device, [torch.empty(0, dtype=dtype)])
    kernels = _KERNELS[op]
    if name == TRITON:
        return name, "a GPU" if device.type == "cuda" else "TRITON_INTERPRET=1: interpreted, slow"
    if name != REFERENCE:
        return name, "compiled for the CPU by Numba"
    if device.type == "cuda" and not _HAS_TRITON:
        return name, "Triton is not installed"
    if device.type in kernels or (device.type == "cuda" and TRITON in kernels):
        return name, f"no fast kernel for {str(dtype).removeprefix('torch.')} tables"
    return name, f"plain PyTorch: there is no kernel of our own for {device.type}"


def ops() -> tuple[str, ...]:
    """The ops that have kernels."""
    return tuple(_KERNELS)


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
    """Serve every op by its kernel called `name`, or its reference if it has none: for tests, to find a wrong one."""
    global _forced
    names = {name for kernels in _KERNELS.values() for name in kernels}
    if name not in names:
        raise ValueError(f"no kernels are called {name!r}; there are {sorted(names)}")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@functools.cache
def _load(target: str) -> Callable[..., Any]:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


LAYOUT = (
    "Tensor tables, Tensor lookups, Tensor key_starts, str table_names, str feature_names, SymInt multiplicity, "
    "SymInt num_rows, SymInt width, bool pooled"
)
GROUPS = "Tensor rows, Tensor starts, Tensor order, Tensor num_groups"
BATCH = "Tensor values, Tensor offsets, Tensor? sample_weights"

assert [part.split()[-1] for part in LAYOUT.split(", ")] == list(Layout._fields)
