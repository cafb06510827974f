"""The dot interaction of DLRM, forward and backward, against PyTorch's eager and, on a GPU, compiled formulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.cases import COMPILED, OURS, Case, close, contenders
from benchmarks.clock import Clock, Contender

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
