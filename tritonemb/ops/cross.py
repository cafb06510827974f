"""`tritonemb::cross`: the elementwise part of a DCNv2 cross layer, differentiable; see `kernels/cross.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tritonemb.ops.interaction import FLOATS
from tritonemb.ops.registry import TRITON, choose, kernel, plain_eager


def cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """`inputs ⊙ (product + bias) + crossed`: x_0, U V x_l, b_l and x_l.

    One pass forward and one backward where `is_fused`, else the reference. Not twice differentiable: that raises
    RuntimeError.

    Shapes: `[B, W]`, but for `bias [W]`; float32, float16, bfloat16 or float64, not necessarily the same; `[B, W]` of
    the widest dtype.

    Raises:
        TypeError: for other dtypes.
        ValueError: for other shapes, or several devices.
    """
    check_layer(inputs, product, bias, crossed)
    if not torch.is_grad_enabled() and plain_eager(inputs, product, bias, crossed):
        return kernel("cross", inputs.device, (inputs, product, bias, crossed))(inputs, product, bias, crossed)
    return torch.ops.tritonemb.cross(inputs, product, bias, crossed)


def is_fused(*tensors: Tensor) -> bool:
    """Whether a Triton kernel serves `cross` of these tensors."""
    return choose("cross", tensors[0].device, tensors) == TRITON


def check_layer(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> None:
    """Raise unless these can be the operands of a cross layer."""
    named = {"inputs": inputs, "product": product, "crossed": crossed, "bias": bias}
    if inputs.dim() != 2 or inputs.shape[1] < 1:
        raise ValueError(f"inputs must be [B, W] with W of at least 1, got {list(inputs.shape)}")
    for name, tensor in named.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} must be one of {', '.join(str(dtype) for dtype in FLOATS)}, got {tensor.dtype}")
        if tensor.device != inputs.device:
            raise ValueError(f"{name} must be on inputs' device {inputs.device}, got {tensor.device}")
        shape = inputs.shape[1:] if name == "bias" else inputs.shape
        if tensor.shape != shape:
            raise ValueError(
                f"{name} must be {list(shape)} to go with inputs {list(inputs.shape)}, got {list(tensor.shape)}"
            )


@torch.library.custom_op("tritonemb::cross", mutates_args=())
def _cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    check_layer(inputs, product, bias, crossed)
    return kernel("cross", inputs.device, (inputs, product, bias, crossed))(inputs, product, bias, crossed)


@_cross.register_fake
def _(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    check_layer(inputs, product, bias, crossed)
    dtypes = (tensor.dtype for tensor in (inputs, product, bias, crossed))
    return inputs.new_empty(inputs.shape, dtype=functools.reduce(torch.promote_types, dtypes))


@torch.library.custom_op("tritonemb::cross_gradient", mutates_args=())
def _gradient(grad: Tensor, inputs: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kernel("cross_gradient", grad.device, (grad, inputs, product, bias))(grad, inputs, product, bias)


@_gradient.register_fake
def _(grad: Tensor, inputs: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.new_empty(inputs.shape), product.new_empty(product.shape), bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x_0, product, bias, crossed = inputs
    ctx.save_for_backward(x_0, product, bias)
    ctx.dtype = crossed.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return (*torch.ops.tritonemb.cross_gradient(grad, *ctx.saved_tensors), grad.to(ctx.dtype))


_cross.register_autograd(_backward, setup_context=_save)
