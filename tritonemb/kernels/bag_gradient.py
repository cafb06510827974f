"""The gradient of one table as an ordinary tensor: each distinct row's summed gradient, written to its place.

`out[place(g)] = Σ_p scale_p · grad_p` over the positions `p` of group `g`, summed as in `kernels/gradient_sums.py`;
`place(g)` is the row itself (a dense gradient), or `g` (the values of a sparse one). Rows without a group stay as they
are, so `out` comes filled with zeros.

On a GPU this is a step of plain gradient descent from zero with learning rate -1, which leaves the sums themselves.

Bytes: `4 · dim` of gradient read for each position, `4 · dim` read and written for each distinct row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.kernels.addresses import on_device
from tritonemb.kernels.gradient_sums import sum_gradients_reference
from tritonemb.kernels.layout import TABLE_SIZE, Layout, TableRow
from tritonemb.kernels.row_update import row_update_
from tritonemb.optimizers import SGD

_PLAIN_SGD = SGD(stochastic_rounding=False)


def bag_gradient_(
    out: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
    compact: bool,
) -> None:
    """The kernels of the update, on `out` as if it were the table. Arguments as in the reference."""
    device = out.device
    if out.numel() == 0:
        return
    if compact:
        num_rows, dim = out.shape
        groups = (torch.arange(groups[0].numel(), device=device), *groups[1:])
        tables = on_device(TableRow(0, num_rows, dim), device).view(1, TABLE_SIZE)
        layout = layout._replace(tables=tables, num_rows=num_rows)
    step, skipped = torch.zeros(2, 1, dtype=torch.int64, device=device)
    row_update_(
        [out], [], step[0], skipped, torch.full((), -1.0, device=device), grad, offsets, sample_weights,
        _PLAIN_SGD.name, _PLAIN_SGD.hyperparameters, groups, layout,
    )  # fmt: skip


def bag_gradient_reference_(
    out: Tensor,
    grad: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
    compact: bool,
) -> None:
    """In `out`'s dtype, row by row.

    Args:
        out: float32 or float64 zeros, contiguous: `[rows, dim]`; or, `compact`, at least as many rows as there are
            groups.
        grad: gradient of the output, `[B, dim]`, or `[N, dim]` if the layout is not pooled.
        offsets, sample_weights: of the batch, `[B + 1]`, and `[N]` or None.
        groups: rows, starts, order, num_groups; see `kernels/row_groups.py`.
        layout: of one table and one key.
    """
    rows, sums = sum_gradients_reference([out], grad, offsets, sample_weights, groups, layout, torch.inf)
    place = torch.arange(rows[0].numel(), device=out.device) if compact else rows[0]
    out[place] = sums[0]
