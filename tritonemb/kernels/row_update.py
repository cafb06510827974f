"""The update: one owner per row sums its gradients in a fixed order and applies the optimizer once, in place.

`g = Σ_p scale_p · clamp(grad_p, ±max_gradient)` over the positions `p` of the row in the order of `RowGroups.order`;
`grad_p` is the part of the output's gradient that position `p`'s row went into, `scale_p` its per-sample weight, over
the bag's length for means. Then one step of the optimizer, whose formula and source stand in `tritonemb/optim.py`, in
float32; 16-bit rows are rounded back as in `kernels/rounding.py`.

Bytes: for each position `4 · dim` of gradient read; for each distinct row its weight and state read and written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.embedding_bag import scales_reference
from tritonemb.kernels.layout import COLUMN, FIRST_ROW, MEAN, NUM_ROWS, POOLING, SEED, TABLE, Layout, batch_size_of
from tritonemb.kernels.optimizers import step_reference
from tritonemb.kernels.rounding import narrow_reference, narrow_stochastic_reference, random16_reference
from tritonemb.optim import OPTIMIZERS, Hyperparameters, NonFinite

NONFINITE_MODES = get_args(NonFinite)


def row_update_reference_(
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
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
) -> None:
    """Table by table, in float64 if the weights are, else float32.

    Args:
        weights: `[T]` of `[rows, dim]`, changed in place.
        states: the first state of every table, then the second; float32 `[rows]` or `[rows, dim]`, changed in place.
        step: int64 `[]`, updates so far, one more afterwards.
        skipped: int64 `[T]`, rows left untouched for a gradient that is not finite, counted up.
        learning_rate: float32 `[]`.
        grad: gradient of the output, `[B, width]` or `[N, width]`.
        hyperparameters: the values of `optim.Hyperparameters`.
        groups: rows, starts, order, num_groups; see `kernels/row_groups.py`.

    Raises:
        ValueError: for `nonfinite="raise"`, before anything is changed.
    """
    h = Hyperparameters(*hyperparameters)
    rows, gradients = sum_gradients_reference(weights, grad, offsets, sample_weights, groups, layout, h.max_gradient)
    finite = [gradient.isfinite().all(1) for gradient in gradients]
    mode = NONFINITE_MODES[int(h.nonfinite)]
    for table, good in enumerate(finite):
        if mode == "raise" and not bool(good.all()):
            raise errors.bad_gradient(int(rows[table][~good][0] + layout.tables[table, FIRST_ROW]), layout)
    step += 1
    for table, weight in enumerate(weights):
        mine, gradient = rows[table], gradients[table]
        if mode == "skip":
            skipped[table] += (~finite[table]).sum()
            mine, gradient = mine[finite[table]], gradient[finite[table]]
        table_states = [states[index * len(weights) + table] for index in range(len(OPTIMIZERS[optimizer].states))]
        row_states = [state.view(state.shape[0], -1)[mine].to(gradient.dtype) for state in table_states]
        row = weight[mine].to(gradient.dtype)
        lr = learning_rate.to(gradient.dtype)
        row, row_states = step_reference(optimizer, row, row_states, gradient, lr, int(step), h)
        weight[mine] = _narrow(row, weight.dtype, int(layout.tables[table, SEED]), mine, int(step), h)
        for state, new in zip(table_states, row_states, strict=True):
            state.view(state.shape[0], -1)[mine] = new.to(state.dtype)


def sum_gradients_reference(
    weights: Sequence[Tensor],
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
    max_gradient: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """For each table its distinct rows `[R]` and their summed gradients `[R, dim]`."""
    dtype = torch.float64 if weights and weights[0].dtype == torch.float64 else torch.float32
    linear, starts, order, num_groups = groups
    count = int(num_groups)
    linear, sizes = linear[:count], torch.diff(starts[: count + 1])
    batch_size = batch_size_of(offsets, layout.key_starts)
    bag_of = torch.repeat_interleave(torch.diff(offsets))
    group_of = torch.repeat_interleave(sizes)
    position = order[: group_of.numel()].to(torch.int64)
    clamped = grad.to(dtype).clamp(-max_gradient, max_gradient)
    rows, gradients = [], []
    for table, weight in enumerate(weights):
        first, num_rows = int(layout.tables[table, FIRST_ROW]), int(layout.tables[table, NUM_ROWS])
        mine = ((linear >= first) & (linear < first + num_rows)).nonzero().flatten()
        dim = weight.shape[1]
        total = torch.zeros(count, dim, dtype=dtype, device=weight.device)
        entry = torch.isin(group_of, mine).nonzero().flatten()
        where = position[entry]
        bag = bag_of[where]
        column, scale = _placed(where, bag, batch_size, table, offsets, sample_weights, layout, dtype)
        columns = column.unsqueeze(1) + torch.arange(dim, device=weight.device)
        source = (bag % batch_size if layout.pooled else where).unsqueeze(1)
        total.index_add_(0, group_of[entry], clamped[source, columns] * scale.unsqueeze(1))
        rows.append(linear[mine] - first)
        gradients.append(total[mine])
    return rows, gradients


def _placed(
    position: Tensor,
    bag: Tensor,
    batch_size: int,
    table: int,
    offsets: Tensor,
    sample_weights: Tensor | None,
    layout: Layout,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Column and scale of each position's use of `table`."""
    num_keys = layout.key_starts.numel() - 1
    lookup_of_key = torch.zeros(num_keys, dtype=torch.int64, device=bag.device)
    for key in range(num_keys):
        for lookup in range(int(layout.key_starts[key]), int(layout.key_starts[key + 1])):
            if int(layout.lookups[lookup, TABLE]) == table:
                lookup_of_key[key] = lookup
    used = layout.lookups[lookup_of_key[bag // max(1, batch_size)]]
    plain = scales_reference(position, bag, offsets, sample_weights, False, dtype)
    mean = scales_reference(position, bag, offsets, sample_weights, True, dtype)
    return used[:, COLUMN], torch.where(used[:, POOLING] == MEAN, mean, plain)


def _narrow(row: Tensor, dtype: torch.dtype, seed: int, rows: Tensor, step: int, h: Hyperparameters) -> Tensor:
    if dtype not in (torch.float16, torch.bfloat16):
        return row.to(dtype)
    if not h.stochastic_rounding:
        return narrow_reference(row, dtype)
    return narrow_stochastic_reference(row, dtype, random16_reference(seed, rows, step, row.shape[1]))
