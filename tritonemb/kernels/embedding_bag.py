"""Embedding bags of many tables in one call.

Pooled: `out[b, column(l) : column(l) + dim(l)] = scale · Σ_p s_p · W_l[values_p]` over the positions `p` of bag
`(key(l), b)`, for every lookup `l`; `s` are the per-sample weights (1 if absent), `scale` is 1 (sum) or 1 / bag length
(mean); an empty bag is zero. Not pooled: `out[p, : dim] = s_p · W[values_p]`, zeros to the right of narrower tables.

Sums are float32 in the order of positions. A row that an id out of range asks for is zero.

Bytes: `B · width · 4` written, `N · dim · element size` of rows and `8 · N` of ids read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.layout import MEAN, NUM_ROWS, Layout, batch_size_of
from tritonemb.kernels.row_groups import entries_reference


def embedding_bag_reference(
    weights: Sequence[Tensor],
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    layout: Layout,
    check_bounds: bool = True,
) -> Tensor:
    """Lookup by lookup, with `index_add_`; in the weights' dtype if that is float64, else float32.

    Shapes: `weights` `[T]` of `[rows, dim]`; `values` `[N]`; `offsets` `[K * B + 1]`; `sample_weights` `[N]` or None.
    Returns `[B, width]`, or `[N, width]` if not pooled.
    """
    dtype = torch.float64 if weights and weights[0].dtype == torch.float64 else torch.float32
    batch_size = batch_size_of(offsets, layout.key_starts)
    out = torch.zeros(batch_size if layout.pooled else values.numel(), layout.width, dtype=dtype, device=values.device)
    lookup_of, position_of, bag_of = entries_reference(values, offsets, layout)
    for lookup, (table, column, dim, pooling) in enumerate(layout.lookups.tolist()):
        mine = lookup_of == lookup
        position, bag = position_of[mine], bag_of[mine]
        ids = values[position].to(torch.int64)
        inside = (ids >= 0) & (ids < layout.tables[table, NUM_ROWS])
        if check_bounds and not bool(inside.all()):
            raise errors.bad_id(int(position[~inside][0]), values, offsets, layout)
        rows = weights[table].to(dtype)[torch.where(inside, ids, 0)] * inside.unsqueeze(1)
        rows = rows * scales_reference(position, bag, offsets, sample_weights, pooling == MEAN, dtype).unsqueeze(1)
        if layout.pooled:
            out[:, column : column + dim].index_add_(0, bag % batch_size, rows)
        else:
            out[position, :dim] = rows
    return out


def scales_reference(
    position: Tensor, bag: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool, dtype: torch.dtype
) -> Tensor:
    """What each position's row is multiplied with: its per-sample weight, over the bag's length for means."""
    scale = torch.ones(position.numel(), dtype=dtype, device=position.device)
    if mean:
        scale = scale / torch.diff(offsets)[bag].to(dtype)
    return scale if sample_weights is None else scale * sample_weights[position].to(dtype)


def sample_weight_gradient_reference(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, grad: Tensor, layout: Layout
) -> Tensor:
    """Gradient of per-sample weights, `[N]`: the dot product of each position's row with its bag's gradient, scaled."""
    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    batch_size = batch_size_of(offsets, layout.key_starts)
    out = torch.zeros(values.numel(), dtype=dtype, device=values.device)
    lookup_of, position_of, bag_of = entries_reference(values, offsets, layout)
    for lookup, (table, column, dim, pooling) in enumerate(layout.lookups.tolist()):
        mine = lookup_of == lookup
        position, bag = position_of[mine], bag_of[mine]
        ids = values[position].to(torch.int64)
        inside = (ids >= 0) & (ids < layout.tables[table, NUM_ROWS])
        rows = weights[table].to(dtype)[torch.where(inside, ids, 0)] * inside.unsqueeze(1)
        part = grad[bag % batch_size, column : column + dim] if layout.pooled else grad[position, :dim]
        scale = scales_reference(position, bag, offsets, None, pooling == MEAN, dtype)
        out.index_add_(0, position, (rows * part.to(dtype)).sum(1) * scale)
    return out
