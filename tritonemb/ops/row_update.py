"""`tritonemb::row_update_`: one optimizer step on the rows of a batch, in place; see `kernels/row_update.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonemb.kernels.layout import Layout
from tritonemb.ops import schema
from tritonemb.ops.registry import kernel, plain_eager
from tritonemb.ops.row_groups import RowGroups


def row_update_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    step: Tensor,
    skipped: Tensor,
    learning_rate: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    optimizer: str,
    hyperparameters: Sequence[float],
    groups: RowGroups,
    layout: Layout,
) -> None:
    """Sum each row's gradients in order and apply `optimizer` once a row. Arguments as in the kernel's reference."""
    if plain_eager(grad, *weights):
        kernel("row_update_", grad.device, weights)(
            weights, states, step, skipped, learning_rate, grad, offsets, sample_weights, optimizer, hyperparameters,
            groups, layout,
        )  # fmt: skip
        torch.autograd.graph.increment_version([*weights, *states, step, skipped])
        return
    torch.ops.tritonemb.row_update_(
        list(weights), list(states), step, skipped, learning_rate, grad, offsets, sample_weights, optimizer,
        list(hyperparameters), *groups, *layout,
    )  # fmt: skip


@torch.library.custom_op(
    "tritonemb::row_update_",
    mutates_args=("weights", "states", "step", "skipped"),
    schema="(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!) step, Tensor(d!) skipped, Tensor learning_rate, "
    f"Tensor grad, Tensor offsets, Tensor? sample_weights, str optimizer, float[] hyperparameters, {schema.GROUPS}, "
    f"{schema.LAYOUT}) -> ()",
)
def _row_update_(
    weights: list[Tensor],
    states: list[Tensor],
    step: Tensor,
    skipped: Tensor,
    learning_rate: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    optimizer: str,
    hyperparameters: list[float],
    *groups_and_layout: Any,
) -> None:
    groups, layout = RowGroups(*groups_and_layout[:4]), Layout(*groups_and_layout[4:])
    kernel("row_update_", grad.device, weights)(
        weights, states, step, skipped, learning_rate, grad, offsets, sample_weights, optimizer, hyperparameters,
        groups, layout,
    )  # fmt: skip


@_row_update_.register_fake
def _(*args: Any) -> None:
    return None
