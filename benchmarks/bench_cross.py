"""The elementwise part of a DCNv2 cross layer, forward and backward, against PyTorch's formula, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import COMPILED, OURS, Case, close, contenders
from benchmarks.clock import Clock, Contender
from tritonemb import ops


def plain_cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    return inputs * (product + bias) + crossed


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    batch_size = 8 if tiny else 8192 if device.type == "cuda" else 2048
    for dim in (64, 128, 256) if device.type == "cuda" else (128,):
        for dtype in (torch.float32, torch.bfloat16) if dim == 128 else (torch.bfloat16,):
            shape = f"B{batch_size} W{27 * dim} {str(dtype).removeprefix('torch.')}"  # DLRM's 26 tables and dense part
            yield Case("cross", shape, partial(make, batch_size, 27 * dim, dtype))


def make(batch_size: int, width: int, dtype: torch.dtype, clock: Clock) -> list[Contender]:
    device = clock.device
    torch.manual_seed(0)
    shapes = ((batch_size, width), (batch_size, width), (width,), (batch_size, width))
    operands = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    gradient = torch.randn(batch_size, width, device=device, dtype=dtype)
    # Forward: read three matrices and write one; backward: read three and write two, as one gradient is the output's.
    num_bytes = 9 * batch_size * width * dtype.itemsize

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(*operands)
        return out, *torch.autograd.grad(out, operands, gradient)

    runs = {OURS: partial(run, ops.cross), "torch": partial(run, plain_cross)}
    if device.type == "cuda":
        runs[COMPILED] = partial(run, torch.compile(plain_cross, dynamic=False))
    # The bias's gradient is a sum over the batch, in another order; PyTorch rounds between its bfloat16 operations.
    bfloat16 = dtype == torch.bfloat16
    tolerance = {"rtol": 2e-2, "atol": 1e-1 * batch_size**0.5} if bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    return contenders(runs, num_bytes, device, close(*run(plain_cross), **tolerance))


def bench_cross(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
