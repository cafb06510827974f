"""`tritonemb::embedding_bag`, differentiable in weights (dense gradients) and per-sample weights.

What it computes stands in `kernels/embedding_bag.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb.layout import Layout, batch_size_of, names_in
from tritonemb.ops import registry
from tritonemb.ops.registry import kernel, plain_eager
from tritonemb.ops.row_groups import RowGroups, check_ids
from tritonemb.optimizers import SGD

_PLAIN_SGD = SGD(stochastic_rounding=False)


def embedding_bag(
    weights: Sequence[Tensor],
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    layout: Layout,
    check_bounds: bool = True,
    output_dtype: torch.dtype = torch.float32,
    trained: Tensor | None = None,
) -> Tensor:
    """Look `values` `[N]` up in `weights` `[T]`; `[B, width]`, or `[N, width]` if the layout is not pooled.

    `trained` `[N]` are the ids that gradients go to, if others than `values`; -1 for none.

    Raises:
        TypeError: for ids that are not int32 or int64.
        ValueError: for an id out of range or offsets that do not ascend, on the CPU at once; for tables that are
            elsewhere than the batch.
    """
    check_ids(values)
    check_devices(weights, values, layout)
    if not torch.is_grad_enabled() and plain_eager(values, offsets, sample_weights, *weights):
        look_up = kernel("embedding_bag", values.device, weights)
        return look_up(weights, values, offsets, sample_weights, layout, check_bounds, output_dtype)
    return torch.ops.tritonemb.embedding_bag(
        list(weights), values, offsets, sample_weights, trained, check_bounds, output_dtype, *layout
    )


def check_devices(weights: Sequence[Tensor], values: Tensor, layout: Layout) -> None:
    """Raise unless every table is where the batch is, or, for a batch on a GPU, in pinned host memory."""
    for index, weight in enumerate(weights):
        if weight.device == values.device or (values.is_cuda and weight.device.type == "cpu" and weight.is_pinned()):
            continue
        raise ValueError(
            f"table {names_in(layout.table_names)[index]!r} is on {weight.device} but the batch is on "
            f"{values.device}; move one of them with .to()"
        )


@torch.library.custom_op(
    "tritonemb::embedding_bag",
    mutates_args=(),
    schema=f"(Tensor[] weights, {registry.BATCH}, Tensor? trained, bool check_bounds, ScalarType output_dtype, "
    f"{registry.LAYOUT}) -> Tensor",
)
def _embedding_bag(
    weights: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    trained: Tensor | None,
    check_bounds: bool,
    output_dtype: torch.dtype,
    *layout: Any,
) -> Tensor:
    look_up = kernel("embedding_bag", values.device, weights)
    return look_up(weights, values, offsets, sample_weights, Layout(*layout), check_bounds, output_dtype)


@_embedding_bag.register_fake
def _(
    weights: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    trained: Tensor | None,
    check_bounds: bool,
    output_dtype: torch.dtype,
    *layout: Any,
) -> Tensor:
    return empty_output(values, offsets, Layout(*layout), output_dtype)


def empty_output(values: Tensor, offsets: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The shape of a lookup's result."""
    num_rows = batch_size_of(offsets, layout.key_starts) if layout.pooled else values.shape[0]
    return values.new_empty(num_rows, layout.width, dtype=dtype)


@torch.library.custom_op(
    "tritonemb::embedding_bag_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] weights, Tensor offsets, Tensor? sample_weights, "
    f"{registry.GROUPS}, {registry.LAYOUT}) -> Tensor[]",
)
def _weight_gradient(
    grad: Tensor, weights: list[Tensor], offsets: Tensor, sample_weights: Tensor | None, *groups_and_layout: Any
) -> list[Tensor]:
    """Dense gradients: one step of SGD with learning rate -1 from zero leaves each row's summed gradient."""
    groups, layout = RowGroups(*groups_and_layout[:4]), Layout(*groups_and_layout[4:])
    for weight in weights:
        if weight.dtype.itemsize < 2:
            raise TypeError(
                f"tables of {weight.dtype} take no gradients; use float32, float16 or bfloat16 to train them"
            )
        if weight.device != grad.device:
            raise ValueError(f"a table on {weight.device} takes no dense gradient on {grad.device}; fuse its optimizer")
    gradients = [torch.zeros_like(weight, memory_format=torch.contiguous_format) for weight in weights]
    step, skipped = grad.new_zeros((), dtype=torch.int64), grad.new_zeros(len(weights), dtype=torch.int64)
    kernel("row_update_", grad.device, weights)(
        gradients, [], step, skipped, grad.new_full((), -1.0, dtype=torch.float32), grad, offsets, sample_weights,
        _PLAIN_SGD.name, _PLAIN_SGD.hyperparameters, groups, layout,
    )  # fmt: skip
    return gradients


@_weight_gradient.register_fake
def _(
    grad: Tensor, weights: list[Tensor], offsets: Tensor, sample_weights: Tensor | None, *groups_and_layout: Any
) -> list[Tensor]:
    return [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights]


@torch.library.custom_op(
    "tritonemb::sample_weight_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] weights, Tensor values, Tensor offsets, Tensor sample_weights, "
    f"{registry.LAYOUT}) -> Tensor",
)
def _sample_weight_gradient(
    grad: Tensor, weights: list[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor, *layout: Any
) -> Tensor:
    dot = kernel("sample_weight_gradient", grad.device, weights)
    return dot(weights, values, offsets, grad, Layout(*layout)).to(sample_weights.dtype)


@_sample_weight_gradient.register_fake
def _(
    grad: Tensor, weights: list[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor, *layout: Any
) -> Tensor:
    return torch.empty_like(sample_weights)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, values, offsets, sample_weights, trained, _, _, *layout = inputs
    ctx.layout = Layout(*layout)
    ctx.save_for_backward(*weights, values, offsets, sample_weights, trained, *ctx.layout[:3])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    *weights, values, offsets, sample_weights, trained, tables, lookups, key_starts = ctx.saved_tensors
    layout = ctx.layout._replace(tables=tables, lookups=lookups, key_starts=key_starts)
    weight_grads: list[Tensor | None] = [None] * len(weights)
    sample_weight_grad = None
    trained = values if trained is None else trained
    ops = torch.ops.tritonemb
    if any(ctx.needs_input_grad[0]):
        groups = ops.row_groups(trained, offsets, *layout)
        computed = ops.embedding_bag_weight_gradient(grad, weights, offsets, sample_weights, *groups, *layout)
        weight_grads = [g if needed else None for g, needed in zip(computed, ctx.needs_input_grad[0], strict=True)]
    if sample_weights is not None and ctx.needs_input_grad[3]:
        sample_weight_grad = ops.sample_weight_gradient(grad, weights, trained, offsets, sample_weights, *layout)
    return weight_grads, None, None, sample_weight_grad, None, None, None, *([None] * len(layout))


_embedding_bag.register_autograd(_backward, setup_context=_save)
