"""What has no kernel of our own, by PyTorch's operators on any device: float64 tables and vectors, for gradient checks
and comparisons, and lookups of float8 tables on the CPU.

Arguments and results are those of the references. Sums are float64 if a table is, else float32, in the order of
positions. On a GPU the host waits.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.jagged import batch_size_of
from tritonemb.kernels.cpu.cross import cross as cross
from tritonemb.kernels.cpu.cross import cross_gradient as cross_gradient
from tritonemb.kernels.gradient_sums import PIECE
from tritonemb.kernels.interaction import num_features
from tritonemb.kernels.optimizers import apply_sums_
from tritonemb.layout import COLUMN, MEAN, POOLING, TABLE, Layout
from tritonemb.optimizers import Hyperparameters


def embedding_bag(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
    check_bounds: bool = True, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """See `kernels/embedding_bag.py`."""
    errors.check_offsets(values, offsets, layout)
    num_rows = batch_size_of(offsets, layout.key_starts) if layout.pooled else values.numel()
    out = torch.zeros(num_rows, layout.width, dtype=_sum_dtype(weights), device=values.device)
    uses = _uses(weights, values, offsets, sample_weights, layout, out.dtype, check_bounds)
    for rows, position, sample, scale, columns in uses:
        if layout.pooled:
            out[:, columns].index_add_(0, sample, rows * scale.unsqueeze(1))
        else:
            out[position, columns] = rows * scale.unsqueeze(1)
    return out.to(output_dtype)


def sample_weight_gradient(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, grad: Tensor, layout: Layout
) -> Tensor:
    """See `kernels/embedding_bag.py`."""
    out = torch.zeros(values.numel(), dtype=_sum_dtype([*weights, grad]), device=values.device)
    for rows, position, sample, scale, columns in _uses(weights, values, offsets, None, layout, out.dtype, False):
        part = grad[sample if layout.pooled else position, columns].to(out.dtype)
        out.index_add_(0, position, (rows * part).sum(1) * scale)
    return out


def _sum_dtype(tables: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(table.dtype == torch.float64 for table in tables) else torch.float32


def _uses(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
    dtype: torch.dtype, check_bounds: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, slice]]:  # fmt: skip
    """For each lookup its positions' rows, zeros for ids out of range; positions, samples, scales; and its columns."""
    batch_size, bag_of = batch_size_of(offsets, layout.key_starts), torch.repeat_interleave(torch.diff(offsets))
    for key, lookups in enumerate(pairwise(layout.key_starts.tolist())):
        first, last = int(offsets[key * batch_size]), int(offsets[(key + 1) * batch_size])
        position, ids = torch.arange(first, last, device=values.device), values[first:last].to(torch.int64)
        for table, column, dim, pooling in layout.lookups[slice(*lookups)].tolist():
            inside = (ids >= 0) & (ids < weights[table].shape[0])
            if check_bounds and not bool(inside.all()):
                raise errors.bad_id(first + int((~inside).nonzero()[0]), values, offsets, layout)
            rows = weights[table][ids.where(inside, 0)].to(dtype) * inside.unsqueeze(1)
            scale = _scales(position, bag_of[first:last], offsets, sample_weights, pooling == MEAN, dtype)
            yield rows, position, bag_of[first:last] % max(1, batch_size), scale, slice(column, column + dim)


def _scales(
    position: Tensor, bag: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: Tensor | bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """What each position's row is multiplied with: its per-sample weight, over the bag's length for means."""
    ones = torch.ones(position.numel(), dtype=dtype, device=position.device)
    scale = torch.where(torch.as_tensor(mean, device=ones.device), ones / torch.diff(offsets)[bag].to(dtype), ones)
    return scale if sample_weights is None else scale * sample_weights[position].to(dtype)


def row_update_(
    weights: Sequence[Tensor], states: Sequence[Tensor], step: Tensor, skipped: Tensor, learning_rate: Tensor,
    grad: Tensor, offsets: Tensor, sample_weights: Tensor | None, optimizer: str, hyperparameters: Sequence[float],
    groups: tuple[Tensor, Tensor, Tensor, Tensor], layout: Layout,
) -> None:  # fmt: skip
    """See `kernels/row_update.py`. TypeError for 16-bit tables, which would not be rounded at random."""
    h = Hyperparameters(*hyperparameters)
    if any(weight.dtype.itemsize < 4 for weight in weights):
        raise TypeError("16-bit tables cannot be updated together with float64 ones; give all tables one dtype")
    rows, sums = _sum_gradients(weights, grad, offsets, sample_weights, groups, layout, h.max_gradient)
    apply_sums_(
        weights, states, step, skipped, learning_rate, optimizer, h, rows, sums, layout,
        lambda row, weight, *_: row.to(weight.dtype),
    )  # fmt: skip


def row_gradients_(
    sums: Sequence[Tensor], grad: Tensor, offsets: Tensor, sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor], layout: Layout, compact: bool = False,
    max_gradient: float = torch.inf,
) -> None:  # fmt: skip
    """See `kernels/row_update.py`."""
    rows, found = _sum_gradients(sums, grad, offsets, sample_weights, groups, layout, max_gradient)
    for out, own, of_table in zip(sums, rows, found, strict=True):
        out[torch.arange(own.numel(), device=out.device) if compact else own] = of_table.to(out.dtype)


def _sum_gradients(
    tables: Sequence[Tensor], grad: Tensor, offsets: Tensor, sample_weights: Tensor | None,
    groups: tuple[Tensor, Tensor, Tensor, Tensor], layout: Layout, max_gradient: float,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """For each table its distinct rows `[R]` and their summed gradients `[R, dim]`."""
    linear, starts, order, num_groups = groups
    linear, starts = linear[: int(num_groups)], starts[: int(num_groups) + 1].to(torch.int64)
    group = torch.repeat_interleave(torch.diff(starts))
    place = torch.arange(group.numel(), device=grad.device) - starts[group]
    position = order[: group.numel()].to(torch.int64)
    bag = torch.repeat_interleave(torch.diff(offsets))[position]
    batch_size = max(1, batch_size_of(offsets, layout.key_starts))
    key_of = torch.repeat_interleave(torch.diff(layout.key_starts))
    clamped = grad.to(_sum_dtype(tables)).clamp(-max_gradient, max_gradient)
    rows, sums = [], []
    for table, (first, num_rows, dim, *_) in enumerate(layout.tables.tolist()):
        low, high = torch.searchsorted(linear, linear.new_tensor([first, first + num_rows])).tolist()
        mine = slice(int(starts[low]), int(starts[high]))
        of_table = layout.lookups[:, TABLE] == table
        lookup_of = layout.key_starts.new_zeros(layout.key_starts.numel())
        lookup_of[key_of[of_table]] = of_table.nonzero().flatten()
        used = layout.lookups[lookup_of[bag[mine] // batch_size]]
        scale = _scales(position[mine], bag[mine], offsets, sample_weights, used[:, POOLING] == MEAN, clamped.dtype)
        columns = used[:, COLUMN, None] + torch.arange(dim, device=grad.device)
        source = bag[mine] % batch_size if layout.pooled else position[mine]
        parts = clamped[source.unsqueeze(1), columns] * scale.unsqueeze(1)
        rows.append(linear[low:high] - first)
        sums.append(_add_in_pieces(high - low, group[mine] - low, place[mine], parts))
    return rows, sums


def _add_in_pieces(num_rows: int, row: Tensor, place: Tensor, parts: Tensor) -> Tensor:
    """The sum of each row's `parts`, PIECE of them at a time, in order of `place`."""
    total = parts.new_zeros(num_rows, parts.shape[1])
    for piece in range(int(place.max()) // PIECE + 1 if place.numel() else 0):
        mine = place // PIECE == piece
        total += torch.zeros_like(total).index_add_(0, row[mine], parts[mine])
    return total


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """See `kernels/interaction.py`: a matrix product of each sample's vectors side by side."""
    vectors, row, column = _side_by_side(dense, sparse)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    return torch.cat([dense, products.index_select(1, row * vectors.shape[1] + column)], dim=1)


def interaction_gradient(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels/interaction.py`: the products' gradients as symmetric matrices."""
    (vectors, row, column), D = _side_by_side(dense, sparse), dense.shape[1]
    pairs = grad.new_zeros(grad.shape[0], vectors.shape[1], vectors.shape[1])
    pairs[:, row, column] = pairs[:, column, row] = grad[:, D:]
    return grad[:, :D] + torch.bmm(pairs[:, :1], vectors)[:, 0], torch.bmm(pairs[:, 1:], vectors).flatten(1)


def _side_by_side(dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All vectors `[B, F + 1, D]`, and the rows and columns of the pairs of them."""
    F = num_features(dense, sparse)
    vectors = torch.cat([dense.unsqueeze(1), sparse.reshape(-1, F, dense.shape[1])], dim=1)
    row, column = torch.tril_indices(F + 1, F + 1, offset=-1, device=dense.device)
    return vectors, row, column
