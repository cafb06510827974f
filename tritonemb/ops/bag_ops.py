"""`tritonemb::bag` with its derivatives, and `tritonemb::drop_padding`: what is traced of `ops/bag.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonemb.ops.bag_kernels import derive_sample_weights, derive_weight, drop_padding, look_up
from tritonemb.ops.registry import BATCH


@torch.library.custom_op(
    "tritonemb::bag",
    mutates_args=(),
    schema=f"(Tensor weight, {BATCH}, Tensor? trained, bool pooled, bool mean, bool checked, ScalarType dtype) "
    "-> Tensor",
)
def _bag(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, trained: Tensor | None,
    pooled: bool, mean: bool, checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return look_up(weight, values, offsets, sample_weights, pooled, mean, checked, dtype)


@_bag.register_fake
def _(
    weight: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, trained: Tensor | None,
    pooled: bool, mean: bool, checked: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return empty_output(weight, values, offsets, pooled, dtype)


def empty_output(weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, dtype: torch.dtype) -> Tensor:
    """The shape of a lookup's result."""
    num_rows = offsets.shape[0] - 1 if pooled else values.shape[0]
    return weight.new_empty(num_rows, weight.shape[1], dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, values, offsets, sample_weights, trained, ctx.pooled, ctx.mean, _, _ = inputs
    ctx.num_rows, ctx.dtype = weight.shape[0], weight.dtype
    needed = weight if sample_weights is not None and ctx.needs_input_grad[3] else None
    ctx.save_for_backward(needed, values if trained is None else trained, offsets, sample_weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """As in `ops/bag.py`, but differentiable once."""
    weight, values, offsets, sample_weights = ctx.saved_tensors
    ops, by_weight, by_sample_weight = torch.ops.tritonemb, None, None
    if ctx.needs_input_grad[0]:
        by_weight = ops.bag_gradient(
            grad, values, offsets, sample_weights, ctx.num_rows, ctx.pooled, ctx.mean, ctx.dtype
        )
    if weight is not None:
        by_sample_weight = ops.bag_sample_weight_gradient(
            grad, weight, values, offsets, ctx.pooled, ctx.mean, sample_weights.dtype
        )
    return by_weight, None, None, by_sample_weight, *[None] * 5


_bag.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("tritonemb::drop_padding", mutates_args=())
def _drop_padding(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    return drop_padding(values, offsets, padding_idx, num_rows)


@_drop_padding.register_fake
def _(values: Tensor, offsets: Tensor, padding_idx: int, num_rows: int) -> Tensor:
    return torch.empty_like(values)


@torch.library.custom_op(
    "tritonemb::bag_gradient",
    mutates_args=(),
    schema=f"(Tensor grad, {BATCH}, SymInt num_rows, bool pooled, bool mean, ScalarType dtype) -> Tensor",
)
def _bag_gradient(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return derive_weight(grad, values, offsets, sample_weights, num_rows, pooled, mean, dtype)


@_bag_gradient.register_fake
def _(
    grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, num_rows: int, pooled: bool,
    mean: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return grad.new_empty(num_rows, grad.shape[1], dtype=dtype)


@torch.library.custom_op(
    "tritonemb::bag_sample_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor weight, Tensor values, Tensor offsets, bool pooled, bool mean, ScalarType dtype) "
    "-> Tensor",
)
def _bag_sample_weight_gradient(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    return derive_sample_weights(grad, weight, values, offsets, pooled, mean, dtype)


@_bag_sample_weight_gradient.register_fake
def _(
    grad: Tensor, weight: Tensor, values: Tensor, offsets: Tensor, pooled: bool, mean: bool, dtype: torch.dtype
) -> Tensor:
    return values.new_empty(values.shape[0], dtype=dtype)
