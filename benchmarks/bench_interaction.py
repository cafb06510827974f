"""Interactions, forward and backward, against PyTorch's formulas, eager and, on a GPU, compiled.

DLRM's dot interaction, and the elementwise part of a DCNv2 cross layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def plain_cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    return inputs * (product + bias) + crossed


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    batch_size = 8 if tiny else 8192 if device.type == "cuda" else 2048
    for op, name, make in (("interaction", f"F{NUM_FEATURES} D", make_interaction), ("cross", "W", make_cross)):
        for dim in (64, 128, 256) if device.type == "cuda" else (128,):
            for dtype in (torch.float32, torch.bfloat16) if dim == 128 else (torch.bfloat16,):
                width = 27 * dim if op == "cross" else dim  # DLRM's 26 tables and dense part
                shape = f"B{batch_size} {name}{width} {str(dtype).removeprefix('torch.')}"
                yield Case(op, shape, partial(make, batch_size, width, dtype))


def make_interaction(batch_size: int, dim: int, dtype: torch.dtype, clock: Clock) -> list[Contender]:
    out_width = dim + NUM_FEATURES * (NUM_FEATURES + 1) // 2
    # Forward: read the vectors, write the output; backward: read vectors and gradient, write the vectors' gradients.
    num_bytes = batch_size * (3 * (NUM_FEATURES + 1) * dim + 2 * out_width) * dtype.itemsize
    # Sums of up to 256 products of normal numbers in another order, rounded to 8 bits where they are bfloat16. A GPU
    # takes float32 products as exact unless it is told otherwise.
    atol = 0.3 if dtype == torch.bfloat16 else 1e-3
    shapes = (batch_size, dim), (batch_size, NUM_FEATURES * dim)
    operands, gradient = draw((*shapes, (batch_size, out_width)), dtype, clock)
    return differentiated(te.nn.DotInteraction(NUM_FEATURES), plain_interaction, operands, gradient, num_bytes, atol)


def make_cross(batch_size: int, width: int, dtype: torch.dtype, clock: Clock) -> list[Contender]:
    matrix = batch_size, width
    # Forward: read three matrices and write one; backward: read three and write two, as one gradient is the output's.
    num_bytes = 9 * batch_size * width * dtype.itemsize
    # The bias's gradient is a sum over the batch, in another order; PyTorch rounds between its bfloat16 operations.
    atol = 1e-1 * batch_size**0.5 if dtype == torch.bfloat16 else 1e-3
    operands, gradient = draw((matrix, matrix, (width,), matrix, matrix), dtype, clock)
    return differentiated(ops.cross, plain_cross, operands, gradient, num_bytes, atol)


def draw(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, clock: Clock) -> tuple[list[Tensor], Tensor]:
    """Operands, and the gradient of the output, whose shape is the last one."""
    torch.manual_seed(0)
    *operands, gradient = (torch.randn(shape, device=clock.device, dtype=dtype) for shape in shapes)
    return [operand.requires_grad_() for operand in operands], gradient


def differentiated(
    ours: Callable[..., Tensor], plain: Callable[..., Tensor], operands: list[Tensor], gradient: Tensor, num_bytes: int,
    atol: float,
) -> list[Contender]:  # fmt: skip
    """Forward and backward of each."""

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(*operands)
        return out, *torch.autograd.grad(out, operands, gradient)

    runs = {OURS: partial(run, ours), "torch": partial(run, plain)}
    if gradient.is_cuda:
        runs[COMPILED] = partial(run, torch.compile(plain, dynamic=False))
    rtol = 2e-2 if gradient.dtype == torch.bfloat16 else 1e-4
    return contenders(runs, num_bytes, gradient.device, close(*run(plain), rtol=rtol, atol=atol))


def bench_interaction(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
