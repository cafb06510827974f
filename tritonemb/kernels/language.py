"""The one door to Triton: its compiler where there is one, and the launch of every kernel.

Where Triton has no wheel, kernels still import, as plain functions that nobody can launch, and references serve.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class _Names:
    """What kernels name outside their bodies."""

    constexpr = int


triton: Any = _import("triton")
tl: Any = _import("triton.language") or _Names


def jit(function: Any = None, *, varying: Sequence[str] = ()) -> Any:
    """Mark a kernel, or a function of kernels.

    Integers named in `varying` change from batch to batch: they are not specialised on, so that a batch of another size
    compiles nothing.
    """
    if triton is None:
        return function or (lambda kernel: kernel)
    return triton.jit(function, do_not_specialize=list(varying) or None)


class Launch(NamedTuple):
    """One launch, as ahead-of-time compilation needs it: the kernel and what it is specialised on."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


_recorded: list[Launch] | None = None
_lanes = 64 if torch.version.hip else 32


def interpreting() -> bool:
    """Whether Triton kernels run through its interpreter, on CPU tensors (`TRITON_INTERPRET=1`, read at import)."""
    return triton is not None and os.environ.get("TRITON_INTERPRET", "0") == "1"


def launch(kernel: Any, grid: Sequence[int], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `kernel` over `grid` on its tensors' device.

    Products and sums stay apart (no fused multiply-add), so that bits do not depend on the compiler's taste.
    """
    if _recorded is not None:
        _recorded.append(Launch(kernel, args, constants, num_warps))
        return
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[tuple(grid)](*args, num_warps=num_warps, enable_fp_fusion=False, **constants)


def lanes() -> int:
    """Threads of a warp: 32, or 64 on AMD's processors."""
    return _lanes


@contextmanager
def recording(lanes: int = 32) -> Iterator[list[Launch]]:
    """Note launches for a GPU with warps of `lanes` instead of running them: outputs stay unwritten.

    For compilation ahead of time.
    """
    global _recorded, _lanes
    before, _recorded, _lanes = (_recorded, _lanes), [], lanes
    try:
        yield _recorded
    finally:
        _recorded, _lanes = before


def num_programs(device: torch.device, per_processor: int) -> int:
    """How many programs fill a device when each takes its share of the work in a loop."""
    if device.type != "cuda":
        return 3  # interpreted: few, but more than one
    return torch.cuda.get_device_properties(device).multi_processor_count * per_processor


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value`, for value ≥ 1."""
    return 1 << (value - 1).bit_length()
