"""`tritonemb::bag_fused`: as `bag`, but its backward is the optimizer's step on that one table.

Where nothing is traced, the gradient is handed to whoever gathers it, so that the tables of a model are updated
together when the backward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.ops.accumulate import check_not_gathering
from tritonemb.ops.bag import Bags
from tritonemb.ops.bag_kernels import BagTable, derive_sample_weights, layout_of, look_up
from tritonemb.ops.bag_ops import empty_output
from tritonemb.ops.registry import BATCH, kernel, plain_eager
from tritonemb.ops.row_groups import RowGroups, check_ids


class FusedTable(NamedTuple):
    """A table and what its update needs beside the batch.

    Attributes:
        weight: `[rows, dim]`.
        states: of the optimizer, float32 `[rows]` or `[rows, dim]`.
        step: int64 `[]`, updates so far.
        skipped: int64 `[1]`, rows left untouched for a gradient that is not finite.
        learning_rate: float32 `[]`.
        optimizer: its name.
        hyperparameters: values of `Hyperparameters`.
        name: as in `BagTable`.
    """

    weight: Tensor
    states: list[Tensor]
    step: Tensor
    skipped: Tensor
    learning_rate: Tensor
    optimizer: str
    hyperparameters: list[float]
    name: str = "weight"


class BagGradient(NamedTuple):
    """The gradient of one lookup's result: `[B, dim]`, or `[N, dim]` if not pooled, for the ids `values` `[N]`."""

    table: FusedTable
    values: Tensor
    sample_weights: Tensor | None
    bags: Bags
    grad: Tensor


def bag_fused(
    table: FusedTable,
    values: Tensor,
    sample_weights: Tensor | None,
    bags: Bags,
    trained: Tensor | None,
    dtype: torch.dtype,
    gather: Callable[[BagGradient], None],
) -> Tensor:
    """As `ops.bag.bag`, for a table without a gradient of its own.

    Its backward gives what there is to be added up to `gather`; traced, it updates the table in place.
    """
    check_ids(values)
    trained = None if trained is values else trained
    if plain_eager(table.weight, values, bags.offsets, sample_weights):
        return _EagerLookup.apply(table.weight, sample_weights, table, values, bags, trained, dtype, gather)
    return torch.ops.tritonemb.bag_fused(
        *table, values, bags.offsets, sample_weights, trained, bags.pooled, bags.mean, bags.checked, dtype
    )


class _EagerLookup(torch.autograd.Function):
    """Checks the batch's versions itself, as the table may be updated before this backward runs."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, sample_weights: Tensor | None, table: FusedTable, values: Tensor, bags: Bags,
        trained: Tensor | None, dtype: torch.dtype, gather: Callable[[BagGradient], None],
    ) -> Tensor:  # fmt: skip
        ids = values if trained is None else trained
        ctx.rest = table, ids, sample_weights, bags, gather
        ctx.versions = _versions(ids, bags.offsets, sample_weights, weight if ctx.needs_input_grad[1] else None)
        return look_up(weight, values, bags.offsets, sample_weights, bags.pooled, bags.mean, bags.checked, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        table, ids, sample_weights, bags, gather = ctx.rest
        needed = table.weight if ctx.needs_input_grad[1] else None
        if ctx.versions != _versions(ids, bags.offsets, sample_weights, needed):
            raise RuntimeError(
                f"ids, offsets, per_sample_weights or, where those have a gradient, rows of table {table.name!r} were "
                "changed in place between the lookup and its backward; change a copy"
            )
        by_sample_weight = None
        if ctx.needs_input_grad[1]:
            by_sample_weight = derive_sample_weights(
                grad, table.weight, ids, bags.offsets, bags.pooled, bags.mean, sample_weights.dtype
            )
        gather(BagGradient(table, ids, sample_weights, bags, grad))
        return None, by_sample_weight, *[None] * 6


def _versions(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


@torch.library.custom_op(
    "tritonemb::bag_fused",
    mutates_args=(),
    schema="(Tensor weight, Tensor[] states, Tensor step, Tensor skipped, Tensor learning_rate, str optimizer, "
    f"float[] hyperparameters, str name, {BATCH}, Tensor? trained, bool pooled, bool mean, bool checked, "
    "ScalarType dtype) -> Tensor",
)
def _bag_fused(weight: Tensor, *rest: Any) -> Tensor:
    check_not_gathering(rest[3])
    name, values, offsets, sample_weights, _, pooled, mean, checked, dtype = rest[6:]
    layout = layout_of((BagTable.of(weight, mean, name),), pooled, values.device)
    return kernel("embedding_bag", values.device, [weight])(
        [weight], values, offsets, sample_weights, layout, checked, dtype
    )


@_bag_fused.register_fake
def _(weight: Tensor, *rest: Any) -> Tensor:
    values, offsets, _, _, pooled, _, _, dtype = rest[7:]
    return empty_output(weight, values, offsets, pooled, dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The tensors as they are, without a version check, as in `embedding_bag_fused`."""
    ctx.inputs = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, states, step, skipped, learning_rate, optimizer, hyperparameters, name, *batch = ctx.inputs
    values, offsets, sample_weights, trained, pooled, mean, _, _ = batch
    ids, by_sample_weight = values if trained is None else trained, None
    if sample_weights is not None and ctx.needs_input_grad[10]:
        by_sample_weight = torch.ops.tritonemb.bag_sample_weight_gradient(
            grad, weight, ids, offsets, pooled, mean, sample_weights.dtype
        )
    torch.ops.tritonemb.bag_update_(
        weight, states, step, skipped, learning_rate, grad, ids, offsets, sample_weights, optimizer, hyperparameters,
        name, pooled, mean,
    )  # fmt: skip
    return None, [None] * len(states), *[None] * 8, by_sample_weight, *[None] * 5


_bag_fused.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(
    "tritonemb::bag_update_",
    mutates_args=("weight", "states", "step", "skipped"),
    schema="(Tensor(a!) weight, Tensor(b!)[] states, Tensor(c!) step, Tensor(d!) skipped, Tensor learning_rate, "
    f"Tensor grad, {BATCH}, str optimizer, float[] hyperparameters, str name, bool pooled, bool mean) "
    "-> ()",
)
def _bag_update_(
    weight: Tensor, states: list[Tensor], step: Tensor, skipped: Tensor, learning_rate: Tensor, grad: Tensor,
    values: Tensor, offsets: Tensor, sample_weights: Tensor | None, optimizer: str, hyperparameters: list[float],
    name: str, pooled: bool, mean: bool,
) -> None:  # fmt: skip
    layout = layout_of((BagTable.of(weight, mean, name),), pooled, values.device)
    groups = RowGroups(*kernel("row_groups", values.device)(values, offsets, layout))
    kernel("row_update_", grad.device, [weight])(
        [weight], states, step, skipped, learning_rate, grad, offsets, sample_weights, optimizer, hyperparameters,
        groups, layout,
    )  # fmt: skip


@_bag_update_.register_fake
def _(*args: Any) -> None:
    return None
