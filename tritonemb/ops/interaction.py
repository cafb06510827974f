"""`tritonemb::interaction`, DLRM's pairwise dot products; `tritonemb::cross`, the elementwise part of a DCNv2 layer.

Both are differentiable once: a second derivative raises RuntimeError. They raise TypeError or ValueError for
unsupported dtypes or shapes, and several devices. See `kernels/interaction.py` and `kernels/cross.py`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb.ops.registry import CPU, TRITON, check_tensor, choose, choose_cached, define

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """Concatenate the dense vectors and the dot products of all pairs of a sample's vectors, the lower triangle.

    One kernel forward and one backward if `is_fused`. Shapes: `dense [B, D]`, `sparse [B, F * D]`, of one dtype,
    float32, float16, bfloat16 or float64; returns `[B, D + F * (F + 1) / 2]` of that dtype, products in row-major
    order. Sums are float32 (float64).
    """
    check_vectors(dense, sparse)
    return _interaction(dense, sparse)


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

    One kernel forward and one backward if `is_cross_fused`. Shapes: `[B, W]`, except `bias [W]`, each float32, float16,
    bfloat16 or float64; returns `[B, W]` of the widest dtype.
    """
    check_layer(inputs, product, bias, crossed)
    return _cross(inputs, product, bias, crossed)


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
        check_tensor(name, tensor, FLOATS, inputs.shape[1:] if name == "bias" else inputs.shape, inputs.device)


def _interaction_fake(dense: Tensor, sparse: Tensor) -> Tensor:
    num_features, dim = sparse.shape[1] // dense.shape[1], dense.shape[1]
    return dense.new_empty(dense.shape[0], dim + num_features * (num_features + 1) // 2)


def _cross_fake(*operands: Tensor) -> Tensor:
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in operands))
    return operands[0].new_empty(operands[0].shape, dtype=dtype)


def _save_cross(ctx: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.dtype = inputs[3].dtype


def _empty_gradients(_: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)


_interaction_gradient = define(
    "interaction_gradient", "(Tensor grad, Tensor dense, Tensor sparse) -> (Tensor, Tensor)", _empty_gradients
)
_interaction = define(
    "interaction",
    "(Tensor dense, Tensor sparse) -> Tensor",
    _interaction_fake,
    backward=lambda ctx, grad: _interaction_gradient(grad, *ctx.saved_tensors),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
_cross_gradient = define(
    "cross_gradient",
    "(Tensor grad, Tensor inputs, Tensor product, Tensor bias) -> (Tensor, Tensor, Tensor)",
    _empty_gradients,
)
_cross = define(
    "cross",
    "(Tensor inputs, Tensor product, Tensor bias, Tensor crossed) -> Tensor",
    _cross_fake,
    backward=lambda ctx, grad: (*_cross_gradient(grad, *ctx.saved_tensors), grad.to(ctx.dtype)),
    save=_save_cross,
)
