"""The ops of `kernels/cross.py` by PyTorch's elementwise loops, bound by memory: for CPUs, and the reference."""

import torch
from torch import Tensor


def cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """See `kernels/cross.py`."""
    out = inputs * (product + bias)
    return out.add_(crossed) if torch.promote_types(out.dtype, crossed.dtype) == out.dtype else out + crossed


def cross_gradient(grad: Tensor, inputs: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/cross.py`."""
    by_product = grad * inputs
    grad_inputs = (grad * (product + bias)).to(inputs.dtype)
    return grad_inputs, by_product.to(product.dtype), by_product.sum(0).to(bias.dtype)
