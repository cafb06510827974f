"""The elementwise part of a DCNv2 cross layer (Wang et al., WWW 2021, equations 1 and 2).

    out = x_0 ⊙ (u + b) + x_l        u = U (V x_l), the product of the layer's matrices, by cuBLAS

    grad u = grad ⊙ x_0      grad x_0 = grad ⊙ (u + b)      grad x_l = grad      grad b = Σ_rows grad ⊙ x_0

The gradient of the bias is summed in two stages of fixed order: within runs of rows, whose length depends only on the
number of rows, then over the runs. All arithmetic is float32; a result is rounded once.
Bytes, for elements of `e` bytes: forward `4 e B W`, backward `5 e B W`, with two operations per element each.
"""

import functools

import torch
from torch import Tensor

from tritonemb.kernels.triton_utils import cdiv, computed, jit, launch, next_power_of_2, readable, row_sum, tl

_ROWS, _SIZE, _MAX_RUNS = 8, 256, 256  # a tile of 16 elements per thread; sums of the runs fit in one tile


@jit(varying=["num_rows"])
def _forward(inputs, product, bias, crossed, out, num_rows, width, ROWS, SIZE):
    """Compute ROWS rows and SIZE columns of the layer."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    valid = (row < num_rows) & (column < width)
    index = row * width + column
    x_0 = tl.load(inputs + index, mask=valid).to(tl.float32)
    u = tl.load(product + index, mask=valid).to(tl.float32)
    b = tl.load(bias + column, mask=column < width).to(tl.float32)
    x_l = tl.load(crossed + index, mask=valid).to(tl.float32)
    tl.store(out + index, (x_0 * (u + b) + x_l).to(out.dtype.element_ty), mask=valid)


@jit(varying=["num_rows"])
def _backward(grad, inputs, product, bias, grad_inputs, grad_product, sums, num_rows, width, run_rows, ROWS, SIZE):
    """Compute the gradients of a run of rows, SIZE columns; the partial gradient of the bias goes to `sums`."""
    first_row = tl.program_id(0).to(tl.int64) * run_rows
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    b = tl.load(bias + column, mask=column < width).to(tl.float32)
    # Store the gradients of inputs and product, and accumulate that of the bias.
    total = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, run_rows, ROWS):
        row = first_row + start + tl.arange(0, ROWS)[:, None]
        valid = (row < num_rows) & (column < width)
        index = row * width + column
        g = tl.load(grad + index, mask=valid, other=0.0).to(tl.float32)
        x_0 = tl.load(inputs + index, mask=valid, other=0.0).to(tl.float32)
        u = tl.load(product + index, mask=valid, other=0.0).to(tl.float32)
        product_grad = g * x_0
        total += product_grad
        tl.store(grad_inputs + index, (g * (u + b)).to(grad_inputs.dtype.element_ty), mask=valid)
        tl.store(grad_product + index, product_grad.to(grad_product.dtype.element_ty), mask=valid)
    # Sum the run's rows pairwise.
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    sums += tl.program_id(0).to(tl.int64) * width
    tl.store(sums + column, row_sum(tl.trans(total)), mask=column < width)


@jit
def _sum_runs(sums, grad_bias, num_runs, width, RUNS, SIZE):
    """Sum SIZE columns of the bias's gradient over the runs, pairwise."""
    run = tl.arange(0, RUNS)[None, :]
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    index = run.to(tl.int64) * width + column[:, None]
    run_sums = tl.load(sums + index, mask=(run < num_runs) & (column < width)[:, None], other=0.0)
    tl.store(grad_bias + column, row_sum(run_sums).to(grad_bias.dtype.element_ty), mask=column < width)


def cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """Launch the forward: `inputs` (x_0), `product` (u) and `crossed` (x_l) are `[B, W]`, `bias` is `[W]`.

    Dtypes may differ; the result has the widest of them.
    """
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (inputs, product, bias, crossed)))
    num_rows, width = inputs.shape
    out, size = torch.empty(num_rows, width, dtype=computed(dtype), device=inputs.device), _columns(width)
    args = *map(readable, (inputs, product, bias, crossed)), out, num_rows, width
    launch(_forward, (cdiv(num_rows, _ROWS), cdiv(width, size)), *args, ROWS=_ROWS, SIZE=size)
    return out.to(dtype)


def cross_gradient(grad: Tensor, inputs: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the backward: the gradients of `inputs`, `product` and `bias`, each in its own dtype."""
    num_rows, width = inputs.shape
    run = max(32, next_power_of_2(max(1, cdiv(num_rows, _MAX_RUNS))))
    num_runs, size = cdiv(num_rows, run), _columns(width)
    grads = [torch.empty(x.shape, dtype=computed(x.dtype), device=x.device) for x in (inputs, product, bias)]
    sums = torch.empty(num_runs, width, dtype=torch.float32, device=inputs.device)
    args = *map(readable, (grad, inputs, product, bias)), *grads[:2], sums, num_rows, width, run
    launch(_backward, (num_runs, cdiv(width, size)), *args, ROWS=_ROWS, SIZE=size)
    runs = next_power_of_2(max(1, num_runs))
    launch(_sum_runs, (cdiv(width, 16),), sums, grads[2], num_runs, width, RUNS=runs, SIZE=16)
    return grads[0].to(inputs.dtype), grads[1].to(product.dtype), grads[2].to(bias.dtype)


def _columns(width: int) -> int:
    return min(_SIZE, next_power_of_2(width))


def cross_reference(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """Compute the forward by PyTorch's elementwise loops, which are bound by memory; also the CPU kernel."""
    out = inputs * (product + bias)
    return out.add_(crossed) if torch.promote_types(out.dtype, crossed.dtype) == out.dtype else out + crossed


def cross_gradient_reference(
    grad: Tensor, inputs: Tensor, product: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    product_grad = grad * inputs
    grad_inputs = (grad * (product + bias)).to(inputs.dtype)
    return grad_inputs, product_grad.to(product.dtype), product_grad.sum(0).to(bias.dtype)
