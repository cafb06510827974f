"""`tritonemb::interaction`: DLRM's pairwise dot interaction, differentiable; see `kernels/interaction.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonemb.ops.registry import REFERENCE, choose, kernel, plain_eager

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """The dense vectors, then the products of all pairs of each sample's vectors, below the diagonal, row by row.

    One kernel forward and one backward where `is_fused`, else the reference. Not twice differentiable: that raises
    RuntimeError.

    Shapes: `dense [B, D]`, `sparse [B, F * D]`, of one dtype, float32, float16, bfloat16 or float64; sums are float32
    (float64); `[B, D + F * (F + 1) / 2]` of that dtype.

    Raises:
        TypeError: for other dtypes, or two.
        ValueError: for other shapes, or two devices.
    """
    check_vectors(dense, sparse)
    if not torch.is_grad_enabled() and plain_eager(dense, sparse):
        return kernel("interaction", dense.device, (dense, sparse))(dense, sparse)
    return torch.ops.tritonemb.interaction(dense, sparse)


def is_fused(dense: Tensor, sparse: Tensor) -> bool:
    """Whether a kernel of our own serves `interaction` of these tensors."""
    return dense.dtype == sparse.dtype and choose("interaction", dense.device, (dense, sparse)) != REFERENCE


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


@torch.library.custom_op("tritonemb::interaction", mutates_args=())
def _interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    check_vectors(dense, sparse)
    return kernel("interaction", dense.device, (dense, sparse))(dense, sparse)


@_interaction.register_fake
def _(dense: Tensor, sparse: Tensor) -> Tensor:
    check_vectors(dense, sparse)
    dim = dense.shape[1]
    num_features = sparse.shape[1] // dim
    return dense.new_empty(dense.shape[0], dim + num_features * (num_features + 1) // 2)


@torch.library.custom_op("tritonemb::interaction_gradient", mutates_args=())
def _gradient(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    return kernel("interaction_gradient", dense.device, (dense, sparse))(grad, dense, sparse)


@_gradient.register_fake
def _(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    return dense.new_empty(dense.shape), sparse.new_empty(sparse.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.tritonemb.interaction_gradient(grad, *ctx.saved_tensors)


_interaction.register_autograd(_backward, setup_context=_save)
