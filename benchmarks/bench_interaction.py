"""Interactions, forward and backward, against PyTorch's formulas, eager and, on a GPU, compiled.

DLRM's dot interaction, and the elementwise part of a DCNv2 cross layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.measuring.cases import COMPILED, OURS, Case, close, contenders
from benchmarks.measuring.clock import Clock, Contender
from tritonemb import ops

NUM_FEATURES = 26


def plain_interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """DLRM's formulation in PyTorch: dense vector, then products below the diagonal."""
    batch_size, dim = dense.shape
    vectors = torch.cat([dense.unsqueeze(1), sparse.view(batch_size, -1, dim)], dim=1)
    num_vectors = vectors.shape[1]
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
    return torch.cat([dense, products[:, row, column]], dim=1)


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    batch_size = 8 if tiny else 8192 if device.type == "cuda" else 2048
    for dim in (64, 128, 256) if device.type == "cuda" else (128,):
        for dtype in (torch.float32, torch.bfloat16) if dim == 128 else (torch.bfloat16,):
            shape = f"B{batch_size} F{NUM_FEATURES} D{dim} {str(dtype).removeprefix('torch.')}"
            yield Case("interaction", shape, partial(make, batch_size, dim, dtype))
    yield from cross_cases(device, tiny)


def make(batch_size: int, dim: int, dtype: torch.dtype, clock: Clock) -> list[Contender]:
    device = clock.device
    torch.manual_seed(0)
    inputs = [
        torch.randn(batch_size, width, device=device, dtype=dtype, requires_grad=True)
        for width in (dim, NUM_FEATURES * dim)
    ]
    out_width = dim + NUM_FEATURES * (NUM_FEATURES + 1) // 2
    gradient = torch.randn(batch_size, out_width, device=device, dtype=dtype)
    # Forward: read the vectors, write the output; backward: read vectors and gradient, write the vectors' gradients.
    num_bytes = batch_size * (3 * (NUM_FEATURES + 1) * dim + 2 * out_width) * dtype.itemsize

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, gradient)

    runs = {OURS: partial(run, te.nn.DotInteraction(NUM_FEATURES)), "torch": partial(run, plain_interaction)}
    if device.type == "cuda":
        runs[COMPILED] = partial(run, torch.compile(plain_interaction, dynamic=False))
    # Sums of up to 256 products of normal numbers in another order, rounded to 8 bits where they are bfloat16. A GPU
    # takes float32 products as exact unless it is told otherwise.
    tolerance = {"rtol": 2e-2, "atol": 0.3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    return contenders(runs, num_bytes, device, close(*run(plain_interaction), **tolerance))


def bench_interaction(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)


def plain_cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    return inputs * (product + bias) + crossed


def cross_cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    batch_size = 8 if tiny else 8192 if device.type == "cuda" else 2048
    for dim in (64, 128, 256) if device.type == "cuda" else (128,):
        for dtype in (torch.float32, torch.bfloat16) if dim == 128 else (torch.bfloat16,):
            shape = f"B{batch_size} W{27 * dim} {str(dtype).removeprefix('torch.')}"  # DLRM's 26 tables and dense part
            yield Case("cross", shape, partial(make_cross, batch_size, 27 * dim, dtype))


def make_cross(batch_size: int, width: int, dtype: torch.dtype, clock: Clock) -> list[Contender]:
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
