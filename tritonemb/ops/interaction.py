"""`tritonemb::interaction`, DLRM's pairwise dot products; `tritonemb::cross`, the elementwise part of a DCNv2 layer.

Both are differentiable; see `kernels/interaction.py` and `kernels/cross.py`.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import dtypes_of
from tritonemb.ops.registry import CPU, TRITON, choose, choose_cached, define, kernel
from tritonemb.ops.row_groups import plain_eager

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """Concatenate the dense vectors and the dot products of all pairs of a sample's vectors, the lower triangle.

    One kernel forward and one backward if `is_fused`. A second derivative raises RuntimeError.

    Shapes: `dense [B, D]`, `sparse [B, F * D]`, of one dtype, float32, float16, bfloat16 or float64; returns
    `[B, D + F * (F + 1) / 2]` of that dtype, products in row-major order. Sums are float32 (float64). Raise TypeError
    or ValueError for unsupported dtypes or shapes, or two devices.
    """
    eager = not torch.is_grad_enabled() and plain_eager(dense, sparse) and not dense.is_meta
    return _interact(dense, sparse) if eager else torch.ops.tritonemb.interaction(dense, sparse)


def is_fused(dense: Tensor, sparse: Tensor) -> bool:
    """Return whether `interaction` of these tensors is a single kernel, not PyTorch's operators."""
    find = choose if torch.compiler.is_compiling() else choose_cached
    return dense.dtype == sparse.dtype and find("interaction", dense.device, (dense.dtype,)) in (CPU, TRITON)


def check_vectors(dense: Tensor, sparse: Tensor) -> None:
    """Raise unless dtypes, devices and shapes are those of dense vectors and pooled rows of a batch."""
    if dense.dtype != sparse.dtype or dense.dtype not in FLOATS:
        raise TypeError(
            f"dense and sparse must have one dtype among {', '.join(str(dtype) for dtype in FLOATS)}, got "
            f"{dense.dtype} and {sparse.dtype}; convert one with .to(..)"
        )
    if dense.device != sparse.device:
        raise ValueError(f"dense and sparse must be on one device, got {dense.device} and {sparse.device}")
    if dense.dim() != 2 or dense.shape[1] < 1:
        raise ValueError(f"dense must be [B, D] with D of at least 1, got {tuple(dense.shape)}")
    dim = dense.shape[1]
    if sparse.dim() != 2 or sparse.shape[1] < dim or sparse.shape[1] % dim or sparse.shape[0] != dense.shape[0]:
        raise ValueError(
            f"sparse must be [B, F * D] with F of at least 1 for dense {tuple(dense.shape)}, got {tuple(sparse.shape)}"
        )


def cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """Compute `inputs ⊙ (product + bias) + crossed`, where these are x_0, U V x_l, b_l and x_l.

    One kernel forward and one backward if `is_cross_fused`. A second derivative raises RuntimeError.

    Shapes: `[B, W]`, except `bias [W]`, each float32, float16, bfloat16 or float64; returns `[B, W]` of the widest
    dtype. Raise TypeError or ValueError for unsupported dtypes or shapes, or several devices.
    """
    operands = inputs, product, bias, crossed
    eager = not torch.is_grad_enabled() and plain_eager(*operands) and not inputs.is_meta
    return _cross(*operands) if eager else torch.ops.tritonemb.cross(*operands)


def is_cross_fused(*tensors: Tensor) -> bool:
    """Return whether `cross` of these tensors is a Triton kernel."""
    find = choose if torch.compiler.is_compiling() else choose_cached
    return find("cross", tensors[0].device, tuple(tensor.dtype for tensor in tensors)) == TRITON


def check_layer(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> None:
    """Raise unless dtypes, devices and shapes are those of the operands of a cross layer."""
    named = {"inputs": inputs, "product": product, "crossed": crossed, "bias": bias}
    if inputs.dim() != 2 or inputs.shape[1] < 1:
        raise ValueError(f"inputs must be [B, W] with W of at least 1, got {list(inputs.shape)}")
    for name, tensor in named.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name} must be one of {', '.join(str(dtype) for dtype in FLOATS)}, got {tensor.dtype}")
        if tensor.device != inputs.device:
            raise ValueError(f"{name} must be on the device of inputs, {inputs.device}, got {tensor.device}")
        shape = inputs.shape[1:] if name == "bias" else inputs.shape
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} for inputs {list(inputs.shape)}, got {list(tensor.shape)}")


def _interact(dense: Tensor, sparse: Tensor) -> Tensor:
    check_vectors(dense, sparse)
    return kernel("interaction", dense.device, (dense.dtype,))(dense, sparse)


def _interaction_fake(dense: Tensor, sparse: Tensor) -> Tensor:
    check_vectors(dense, sparse)
    dim = dense.shape[1]
    num_features = sparse.shape[1] // dim
    return dense.new_empty(dense.shape[0], dim + num_features * (num_features + 1) // 2)


define(
    "interaction_gradient",
    "(Tensor grad, Tensor dense, Tensor sparse) -> (Tensor, Tensor)",
    lambda grad, *inputs: kernel("interaction_gradient", grad.device, (inputs[0].dtype,))(grad, *inputs),
    lambda _, *inputs: tuple(tensor.new_empty(tensor.shape) for tensor in inputs),
)
define(
    "interaction", "(Tensor dense, Tensor sparse) -> Tensor", _interact, _interaction_fake,
    lambda ctx, grad: torch.ops.tritonemb.interaction_gradient(grad, *ctx.saved_tensors),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)  # fmt: skip


def _cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    check_layer(inputs, product, bias, crossed)
    return _cross_kernel("cross", inputs, product, bias, crossed)


def _cross_kernel(op: str, *tensors: Tensor) -> Any:
    return kernel(op, tensors[0].device, dtypes_of(tensors))(*tensors)


def _cross_fake(*operands: Tensor) -> Tensor:
    check_layer(*operands)
    inputs, dtype = operands[0], functools.reduce(torch.promote_types, (tensor.dtype for tensor in operands))
    return inputs.new_empty(inputs.shape, dtype=dtype)


def _save_cross(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.dtype = inputs[3].dtype


define(
    "cross_gradient",
    "(Tensor grad, Tensor inputs, Tensor product, Tensor bias) -> (Tensor, Tensor, Tensor)",
    lambda grad, *inputs: _cross_kernel("cross_gradient", grad, *inputs),
    lambda _, *inputs: tuple(tensor.new_empty(tensor.shape) for tensor in inputs),
)
define(
    "cross", "(Tensor inputs, Tensor product, Tensor bias, Tensor crossed) -> Tensor", _cross, _cross_fake,
    lambda ctx, grad: (*torch.ops.tritonemb.cross_gradient(grad, *ctx.saved_tensors), grad.to(ctx.dtype)),
    _save_cross,
)  # fmt: skip
