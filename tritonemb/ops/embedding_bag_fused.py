"""`tritonemb::embedding_bag_fused`: as `embedding_bag`, but its backward is the optimizer's step.

The backward calls `row_update_` on weights and states in place and gives the weights no gradient. Its tensors are kept
on the autograd context as they are, without a version check: a collection that is looked up twice in one graph is
updated twice, each time with the gradients of its own lookup. Where nothing is traced, an autograd function calls the
same kernels without the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.layout import Layout
from tritonemb.ops import registry
from tritonemb.ops.accumulate import NOT_ACCUMULATING, accumulate_, check_not_gathering
from tritonemb.ops.embedding_bag import check_devices, empty_output
from tritonemb.ops.registry import kernel, plain_eager
from tritonemb.ops.row_groups import RowGroups, check_ids
from tritonemb.ops.row_update import row_update_


class Fused(NamedTuple):
    """What an update in the backward needs beside the batch.

    Attributes:
        weights: `[T]` tables.
        states: the first optimizer state of every table, then the second.
        steps, skipped, learning_rate: as in `row_update_`.
        pending: int64 `[]`, micro-batches kept in the accumulator.
        optimizer: name of the optimizer.
        hyperparameters: values of `optim.Hyperparameters`.
        accumulator: where to put gradients instead of applying them, or NOT_ACCUMULATING.
    """

    weights: list[Tensor]
    states: list[Tensor]
    steps: list[Tensor]
    skipped: list[Tensor]
    learning_rate: Tensor
    pending: Tensor
    optimizer: str
    hyperparameters: list[float]
    accumulator: int = NOT_ACCUMULATING


def embedding_bag_fused(
    fused: Fused,
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    groups: RowGroups,
    layout: Layout,
    check_bounds: bool = True,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """As `embedding_bag`; the backward updates weights, states, steps and skipped in place, or accumulates."""
    check_ids(values)
    check_devices(fused.weights, values, layout)
    if plain_eager(values, offsets, sample_weights, *fused.weights):
        inputs = _Inputs(fused, values, offsets, sample_weights, check_bounds, output_dtype, groups, layout)
        return _Eager.apply(fused.weights[0], sample_weights, inputs)
    return torch.ops.tritonemb.embedding_bag_fused(
        *fused, values, offsets, sample_weights, check_bounds, output_dtype, *groups, *layout
    )


class _Inputs(NamedTuple):
    """The op's arguments before groups and layout."""

    fused: Fused
    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    check_bounds: bool
    output_dtype: torch.dtype
    groups: RowGroups
    layout: Layout


def _named(args: Sequence[Any]) -> _Inputs:
    own = len(Fused._fields)
    values, offsets, sample_weights, check_bounds, output_dtype, *rest = args[own:]
    groups, layout = RowGroups(*rest[:4]), Layout(*rest[4:])
    return _Inputs(Fused(*args[:own]), values, offsets, sample_weights, check_bounds, output_dtype, groups, layout)


def _look_up(x: _Inputs) -> Tensor:
    look_up = kernel("embedding_bag", x.values.device, x.fused.weights)
    return look_up(
        x.fused.weights, x.values, x.offsets, x.sample_weights, x.layout, x.check_bounds, x.output_dtype
    )  # fmt: skip


def _finish(x: _Inputs, grad: Tensor, needs_sample_weight_grad: bool) -> Tensor | None:
    """Update, or accumulate for later; the gradient of the per-sample weights is of the rows before that."""
    fused, sample_weight_grad = x.fused, None
    if needs_sample_weight_grad:
        assert x.sample_weights is not None
        sample_weight_grad = torch.ops.tritonemb.sample_weight_gradient(
            grad, fused.weights, x.values, x.offsets, x.sample_weights, *x.layout
        )
    if fused.accumulator == NOT_ACCUMULATING:
        row_update_(
            fused.weights, fused.states, fused.steps, fused.skipped, fused.learning_rate, grad, x.offsets,
            x.sample_weights, fused.optimizer, fused.hyperparameters, x.groups, x.layout,
        )  # fmt: skip
    else:
        accumulate_(fused.pending, fused.accumulator, grad, x.values, x.offsets, x.sample_weights)
    return sample_weight_grad


class _Eager(torch.autograd.Function):
    """The same lookup and update without the dispatcher. The first table stands for all in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sample_weights: Tensor | None, x: _Inputs) -> Tensor:
        ctx.inputs = x
        return _look_up(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, _finish(ctx.inputs, grad, ctx.needs_input_grad[1]), None


@torch.library.custom_op(
    "tritonemb::embedding_bag_fused",
    mutates_args=(),
    schema="(Tensor[] weights, Tensor[] states, Tensor[] steps, Tensor[] skipped, Tensor learning_rate, "
    f"Tensor pending, str optimizer, float[] hyperparameters, int accumulator, {registry.BATCH}, bool check_bounds, "
    f"ScalarType output_dtype, {registry.GROUPS}, {registry.LAYOUT}) -> Tensor",
)
def _embedding_bag_fused(*args: Any) -> Tensor:
    x = _named(args)
    check_not_gathering(x.fused.learning_rate)
    return _look_up(x)


@_embedding_bag_fused.register_fake
def _(*args: Any) -> Tensor:
    x = _named(args)
    return empty_output(x.values, x.offsets, x.layout, x.output_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.inputs = _named(inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x: _Inputs = ctx.inputs
    place = len(Fused._fields) + 2
    sample_weight_grad = _finish(x, grad, ctx.needs_input_grad[place])
    lists = [[None] * len(tensors) for tensors in x.fused[:4]]
    after = [None] * (2 + len(RowGroups._fields) + len(Layout._fields))
    return *lists, *([None] * (place - 4)), sample_weight_grad, *after


_embedding_bag_fused.register_autograd(_backward, setup_context=_save)
