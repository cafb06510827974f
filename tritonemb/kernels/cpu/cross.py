"""CPU twin and reference of `kernels/cross.py`, by PyTorch's elementwise loops, which are bound by memory."""

import torch
from torch import Tensor


def cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """See `kernels/cross.py`."""
    out = inputs * (product + bias)
    return out.add_(crossed) if torch.promote_types(out.dtype, crossed.dtype) == out.dtype else out + crossed


def cross_gradient(grad: Tensor, inputs: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/cross.py`."""
    product_grad = grad * inputs
    grad_inputs = (grad * (product + bias)).to(inputs.dtype)
    return grad_inputs, product_grad.to(product.dtype), product_grad.sum(0).to(bias.dtype)
