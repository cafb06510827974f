"""`tritonemb::row_update_`: one optimizer step on the rows of a batch, in place; see `kernels/row_update.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from tritonemb.layout import Layout
from tritonemb.ops import registry
from tritonemb.ops.registry import kernel, plain_eager
from tritonemb.ops.row_groups import RowGroups
from tritonemb.optimizers import Hyperparameters, NonFinite

SKIP = get_args(NonFinite).index("skip")


def row_update_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor],
    skipped: Sequence[Tensor],
    learning_rate: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    optimizer: str,
    hyperparameters: Sequence[float],
    groups: RowGroups,
    layout: Layout,
) -> None:
    """Sum each row's gradients in order and apply `optimizer` once a row. Arguments as in the kernel's reference, but:

    Args:
        steps: one int64 `[]` for all tables together, or one for each.
        skipped: one int64 `[T]`, or a `[1]` for each table.
    """
    if plain_eager(grad, *weights):
        _update(
            weights, states, steps, skipped, learning_rate, grad, offsets, sample_weights, optimizer, hyperparameters,
            groups, layout,
        )  # fmt: skip
        torch.autograd.graph.increment_version([*weights, *states, *steps, *skipped])
        return
    torch.ops.tritonemb.row_update_(
        list(weights), list(states), list(steps), list(skipped), learning_rate, grad, offsets, sample_weights,
        optimizer, list(hyperparameters), *groups, *layout,
    )  # fmt: skip


def _update(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    steps: Sequence[Tensor],
    skipped: Sequence[Tensor],
    learning_rate: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    optimizer: str,
    hyperparameters: Sequence[float],
    groups: RowGroups,
    layout: Layout,
) -> None:
    """Counters that are kept table by table are one tensor to the kernels."""
    step = steps[0] if len(steps) == 1 else torch.stack(list(steps))
    count = skipped[0] if len(skipped) == 1 else torch.zeros(len(skipped), dtype=torch.int64, device=grad.device)
    kernel("row_update_", grad.device, weights)(
        weights, states, step, count, learning_rate, grad, offsets, sample_weights, optimizer, hyperparameters, groups,
        layout,
    )  # fmt: skip
    if len(steps) > 1:
        torch._foreach_copy_(list(steps), list(step.unbind()))
    if len(skipped) > 1 and Hyperparameters(*hyperparameters).nonfinite == SKIP:
        torch._foreach_add_(list(skipped), list(count.split(1)))


@torch.library.custom_op(
    "tritonemb::row_update_",
    mutates_args=("weights", "states", "steps", "skipped"),
    schema="(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!)[] steps, Tensor(d!)[] skipped, "
    "Tensor learning_rate, Tensor grad, Tensor offsets, Tensor? sample_weights, str optimizer, "
    f"float[] hyperparameters, {registry.GROUPS}, "
    f"{registry.LAYOUT}) -> ()",
)
def _row_update_(
    weights: list[Tensor],
    states: list[Tensor],
    steps: list[Tensor],
    skipped: list[Tensor],
    learning_rate: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    optimizer: str,
    hyperparameters: list[float],
    *groups_and_layout: Any,
) -> None:
    groups, layout = RowGroups(*groups_and_layout[:4]), Layout(*groups_and_layout[4:])
    _update(
        weights, states, steps, skipped, learning_rate, grad, offsets, sample_weights, optimizer, hyperparameters,
        groups, layout,
    )  # fmt: skip


@_row_update_.register_fake
def _(*args: Any) -> None:
    return None
