"""`tritonemb::interaction`, DLRM's pairwise dots, and `tritonemb::cross`, the elementwise part of a DCNv2 cross layer.

Both are differentiable; see `kernels/interaction.py` and `kernels/cross.py`.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import dtypes_of
from tritonemb.ops.registry import CPU, TRITON, choose, chosen, define, kernel
from tritonemb.ops.row_groups import plain_eager

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """The dense vectors, then the products of all pairs of each sample's vectors, below the diagonal, row by row.

    One kernel forward and one backward where `is_fused`. Not twice differentiable: that raises RuntimeError.

    Shapes: `dense [B, D]`, `sparse [B, F * D]`, of one dtype, float32, float16, bfloat16 or float64; sums are float32
    (float64); `[B, D + F * (F + 1) / 2]` of that dtype. TypeError, ValueError for other dtypes, shapes, or two devices.
    """
    eager = not torch.is_grad_enabled() and plain_eager(dense, sparse) and not dense.is_meta
    return _interact(dense, sparse) if eager else torch.ops.tritonemb.interaction(dense, sparse)


def is_fused(dense: Tensor, sparse: Tensor) -> bool:
    """Whether a kernel of our own serves `interaction` of these tensors."""
    find = choose if torch.compiler.is_compiling() else chosen
    return dense.dtype == sparse.dtype and find("interaction", dense.device, (dense.dtype,)) in (CPU, TRITON)


def check_vectors(dense: Tensor, sparse: Tensor) -> None:
    """Raise unless these can be a batch's dense vectors and pooled rows."""
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
            f"sparse must be [B, F * D] with F of at least 1 to go with dense {tuple(dense.shape)}, "
            f"got {tuple(sparse.shape)}"
        )


def cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """`inputs ⊙ (product + bias) + crossed`: x_0, U V x_l, b_l and x_l.

    One pass forward and one backward where `is_cross_fused`. Not twice differentiable: that raises RuntimeError.

    Shapes: `[B, W]`, but for `bias [W]`; each float32, float16, bfloat16 or float64; `[B, W]` of the widest dtype.
    TypeError, ValueError for other dtypes, shapes, or several devices.
    """
    operands = inputs, product, bias, crossed
    eager = not torch.is_grad_enabled() and plain_eager(*operands) and not inputs.is_meta
    return _cross(*operands) if eager else torch.ops.tritonemb.cross(*operands)


def is_cross_fused(*tensors: Tensor) -> bool:
    """Whether a Triton kernel serves `cross` of these tensors."""
    find = choose if torch.compiler.is_compiling() else chosen
    return find("cross", tensors[0].device, tuple(tensor.dtype for tensor in tensors)) == TRITON


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


def _interact(dense: Tensor, sparse: Tensor) -> Tensor:
    check_vectors(dense, sparse)
    return kernel("interaction", dense.device, (dense.dtype,))(dense, sparse)


def _interacted(dense: Tensor, sparse: Tensor) -> Tensor:
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
    "interaction", "(Tensor dense, Tensor sparse) -> Tensor", _interact, _interacted,
    lambda ctx, grad: torch.ops.tritonemb.interaction_gradient(grad, *ctx.saved_tensors),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)  # fmt: skip


def _cross(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    check_layer(inputs, product, bias, crossed)
    return _cross_kernel("cross", inputs, product, bias, crossed)


def _cross_kernel(op: str, *tensors: Tensor) -> Any:
    return kernel(op, tensors[0].device, dtypes_of(tensors))(*tensors)


def _crossed(inputs: Tensor, *rest: Tensor) -> Tensor:
    check_layer(inputs, *rest)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in (inputs, *rest)))
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
    "cross", "(Tensor inputs, Tensor product, Tensor bias, Tensor crossed) -> Tensor", _cross, _crossed,
    lambda ctx, grad: (*torch.ops.tritonemb.cross_gradient(grad, *ctx.saved_tensors), grad.to(ctx.dtype)),
    _save_cross,
)  # fmt: skip
