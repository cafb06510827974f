"""Ops by PyTorch's operators, on any device: float64 tables and vectors, for gradient checks and comparisons, and
lookups of float8 tables on the CPU.

They are also the references of their ops. Sums are float64 if a table is, else float32, in the order of positions. On a
GPU they synchronize with the host.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.jagged import batch_size_of
from tritonemb.kernels.cross import cross_gradient_reference as cross_gradient  # noqa: F401
from tritonemb.kernels.cross import cross_reference as cross  # noqa: F401
from tritonemb.kernels.optimizers import NONFINITE_MODES, cow_clip_by_torch, step_by_torch
from tritonemb.kernels.random import narrow_by_torch, narrow_stochastic_by_torch, random16_by_torch
from tritonemb.layout import MEAN, PIECE, SPAN, BatchGradient, FusedTables, Layout, TableRow, unpack_names, view_int64
from tritonemb.optimizers import Hyperparameters


def embedding_bag(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
    check_bounds: bool = True, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """See `kernels/embedding_bag.py`.

    Shapes: `weights` `[T]` of `[rows, dim]`; `values` `[N]`; `offsets` `[K * B + 1]`; `sample_weights` `[N]` or None.
    Returns `[B, width]`, or `[N, width]` if not pooled.
    """
    errors.check_offsets(values, offsets, layout)
    num_rows = batch_size_of(offsets, layout.key_starts) if layout.pooled else values.numel()
    out = torch.zeros(num_rows, layout.width, dtype=_sum_dtype(weights), device=values.device)
    for table, positions, out_rows, scales, columns in lookups_of(offsets, sample_weights, layout, out.dtype):
        rows, valid_mask = _gather_rows(weights[table], values[positions], out.dtype)
        if check_bounds and not bool(valid_mask.all()):
            raise errors.invalid_id_error(int(positions[~valid_mask][0]), values, offsets, layout)
        if layout.pooled:
            out[:, columns].index_add_(0, out_rows, rows * scales)
        else:
            out[out_rows, columns] = rows * scales
    return out.to(output_dtype or out.dtype)


def sample_weight_gradient(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, grad: Tensor, layout: Layout
) -> Tensor:
    """Return `[N]`: the dot product of each position's row with its bag's gradient, scaled."""
    out = torch.zeros(values.numel(), dtype=_sum_dtype([*weights, grad]), device=values.device)
    for table, positions, out_rows, scales, columns in lookups_of(offsets, None, layout, out.dtype):
        rows, _ = _gather_rows(weights[table], values[positions], out.dtype)
        out[positions] += (rows * grad[out_rows, columns].to(out.dtype)).sum(1) * scales[:, 0]
    return out


def _sum_dtype(tables: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(table.dtype == torch.float64 for table in tables) else torch.float32


def _gather_rows(weight: Tensor, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows of ids, zeros for ids out of range, and the mask of ids in range."""
    valid_mask = (ids >= 0) & (ids < weight.shape[0])
    return weight[ids.to(torch.int64).where(valid_mask, 0)].to(dtype).where(valid_mask.unsqueeze(1), 0.0), valid_mask


def lookups_of(
    offsets: Tensor, sample_weights: Tensor | None, layout: Layout, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, slice]]:
    """Yield each lookup's table, positions, their rows in the output, their scales, and its columns in the output."""
    batch_size, lengths = batch_size_of(offsets, layout.key_starts), torch.diff(offsets)
    bag_of, device = torch.repeat_interleave(lengths), offsets.device
    factors = torch.ones(bag_of.numel(), dtype=dtype, device=device) if sample_weights is None else sample_weights
    mean_scales = torch.ones_like(lengths, dtype=dtype) / lengths.clamp(min=1).to(dtype)
    for key, lookups in enumerate(pairwise(layout.key_starts.tolist())):
        positions = torch.arange(*offsets[[key * batch_size, (key + 1) * batch_size]].tolist(), device=device)
        out_rows = bag_of[positions] - key * batch_size if layout.pooled else positions
        for table, column, dim, pooling in layout.lookups[slice(*lookups)].tolist():
            scales = factors[positions].to(dtype)
            scales = mean_scales[bag_of[positions]] * scales if pooling == MEAN else scales
            yield table, positions, out_rows, scales.unsqueeze(1), slice(column, column + dim)


def row_update_(fused: FusedTables, batch: BatchGradient) -> None:
    """See `kernels/row_update.py`. In float64 if a table is, else float32.

    `fused.steps` is `[]` or `[T]`, `fused.skipped` `[T]`; both, weights and states change in place. With
    `on_nonfinite="raise"` a gradient that is not finite is a ValueError before any change.
    """
    h, layout = Hyperparameters(*fused.hyperparameters), batch.layout
    rows, sums = sum_gradients(fused.weights, batch, h.max_gradient)
    # Check all gradients.
    finite_masks = [gradient.isfinite().all(1) for gradient in sums]
    on_nonfinite, num_tables = NONFINITE_MODES[int(h.on_nonfinite)], len(fused.weights)
    tables = [TableRow(*fields) for fields in layout.tables.tolist()]
    for table, table_rows, is_finite in zip(tables, rows, finite_masks, strict=True):
        if on_nonfinite == "raise" and not bool(is_finite.all()):
            raise errors.nonfinite_gradient_error(table.first_row + int(table_rows[~is_finite][0]), layout)
    # Compute all updates.
    steps = (fused.steps + 1).expand(num_tables).tolist()
    names, updates = unpack_names(layout.table_names), []
    num_rows = [table_rows.numel() for table_rows in rows]
    counts = [*batch.groups[1][: sum(num_rows) + 1].diff().split(num_rows)]
    for index, (weight, table_rows, gradient) in enumerate(zip(fused.weights, rows, sums, strict=True)):
        if on_nonfinite == "skip":
            table_rows, gradient = table_rows[finite_masks[index]], gradient[finite_masks[index]]
            counts[index] = counts[index][finite_masks[index]]
        states = [state.view(state.shape[0], -1) for state in fused.states_of(index)]
        old_rows = [tensor[table_rows].to(gradient.dtype) for tensor in (weight, *states)]
        if h.cow_clip < torch.inf:
            gradient = cow_clip_by_torch(gradient, old_rows[0], counts[index], h)
        rate = fused.learning_rate.to(gradient.dtype)
        row, new_states = step_by_torch(
            fused.optimizer, old_rows[0], old_rows[1:], gradient, rate, steps[index], h, table=names[index]
        )
        updates.append((weight, table_rows, row, [*zip(states, new_states, strict=True)]))
    # Count, warn and write.
    fused.steps.add_(1)
    if on_nonfinite == "skip":
        fused.skipped.add_(torch.stack([(~is_finite).sum() for is_finite in finite_masks]))
        for name, is_finite in zip(names, finite_masks, strict=True):
            if not bool(is_finite.all()):
                errors.warn_of_skipped_rows(name)
    for table, step, (weight, table_rows, row, state_pairs) in zip(tables, steps, updates, strict=True):
        weight[table_rows] = _narrow(row, weight.dtype, table, table_rows, step if h.stochastic_rounding else None)
        for state, new_state in state_pairs:
            state[table_rows] = new_state.to(state.dtype)


def _narrow(row: Tensor, dtype: torch.dtype, table: TableRow, rows: Tensor, step: int | None) -> Tensor:
    """Convert rows to a table's dtype; those of 16 bits stochastically at a step, to nearest for None."""
    if dtype.itemsize != 2:
        return row.to(dtype)
    if step is None:
        return narrow_by_torch(row, dtype)
    row = row.to(torch.float32)
    if table.row_ids:
        stride = table.row_ids_stride
        rows = view_int64(table.row_ids, table.num_rows * stride, rows.device)[rows * stride]
    noise = random16_by_torch(table.seed, rows + table.row_origin, step, row.shape[1], table.column_origin)
    return narrow_stochastic_by_torch(row, dtype, noise)


def row_gradients_(
    sums: Sequence[Tensor], batch: BatchGradient, compact: bool = False, max_gradient: float = torch.inf
) -> None:
    """See `kernels/row_update.py`. In float64 if a table is, else float32.

    `sums` are zeros `[T]` of `[rows, dim]`, or if `compact` of `[distinct rows of the table, dim]` (a single table may
    have more). Elements of `grad` are clamped to ±`max_gradient` first.
    """
    table_rows, gradients = sum_gradients(sums, batch, max_gradient)
    for out, rows, row_gradients in zip(sums, table_rows, gradients, strict=True):
        values = narrow_by_torch(row_gradients, out.dtype) if out.dtype.itemsize == 2 else row_gradients.to(out.dtype)
        out[torch.arange(rows.numel(), device=out.device) if compact else rows] = values


def sum_gradients(
    tables: Sequence[Tensor], batch: BatchGradient, max_gradient: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each table its distinct rows `[R]` and their summed gradients `[R, dim]`."""
    grad, offsets, sample_weights, (linear, starts, order, num_groups), layout = batch
    linear, starts = linear[: int(num_groups)], starts[: int(num_groups) + 1].to(torch.int64)
    # Cut each row's group into pieces of PIECE gradients; number the pieces, and those of each entry of `order`.
    sizes = torch.diff(starts)
    num_pieces = (sizes + PIECE - 1) // PIECE
    first_piece = torch.cumsum(num_pieces, 0) - num_pieces
    group_of, row_of_piece = torch.repeat_interleave(sizes), torch.repeat_interleave(num_pieces)
    piece_of = first_piece[group_of] + (torch.arange(group_of.numel(), device=grad.device) - starts[group_of]) // PIECE
    clamped = grad.to(_sum_dtype(tables)).clamp(-max_gradient, max_gradient)
    # Split groups and pieces by table; `pieces` maps positions to the table's pieces, -1 for positions without a group.
    rows, row_of, sums, pieces = [], [], [], []
    for first_row, num_rows, dim, *_ in layout.tables.tolist():
        low, high = torch.searchsorted(linear, linear.new_tensor([first_row, first_row + num_rows])).tolist()
        begin, end = torch.searchsorted(row_of_piece, row_of_piece.new_tensor([low, high])).tolist()
        entries = slice(int(starts[low]), int(starts[high]))
        piece_of_position = torch.full((int(offsets[-1]),), -1, device=grad.device)
        piece_of_position[order[entries].to(torch.int64)] = piece_of[entries] - begin
        rows.append(linear[low:high] - first_row)
        row_of.append(row_of_piece[begin:end] - low)
        sums.append(clamped.new_zeros(end - begin, dim))
        pieces.append(piece_of_position)
    # Sum each piece in the order of positions, then each row's pieces.
    for table, positions, out_rows, scales, columns in lookups_of(offsets, sample_weights, layout, clamped.dtype):
        grouped = pieces[table][positions] >= 0
        sums[table].index_add_(0, pieces[table][positions[grouped]], (clamped[out_rows, columns] * scales)[grouped])
    by_table = zip(rows, row_of, sums, strict=True)
    return rows, [_add_pieces(table_rows.numel(), *table_pieces) for table_rows, *table_pieces in by_table]


def _add_pieces(num_rows: int, row_of: Tensor, sums: Tensor) -> Tensor:
    """Sum each row's pieces: pairwise up to spans, then spans in order."""
    piece_size, group_size = PIECE, 2
    while row_of.numel() > num_rows:
        first = torch.searchsorted(row_of, row_of)
        starts = (torch.arange(row_of.numel(), device=row_of.device) - first) % group_size == 0
        sums = sums.new_zeros(int(starts.sum()), sums.shape[1]).index_add_(0, torch.cumsum(starts, 0) - 1, sums)
        row_of, piece_size = row_of[starts], 2 * piece_size
        group_size = 2 if piece_size < SPAN else row_of.numel()
    return sums


def interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """See `kernels/interaction.py`: a matrix product of each sample's stacked vectors; differentiable."""
    vectors, row, column = _stack_vectors(dense, sparse)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    return torch.cat([dense, products.index_select(1, row * vectors.shape[1] + column)], dim=1)


def interaction_gradient(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels/interaction.py`: products with the symmetric matrix of the products' gradients."""
    (vectors, row, column), D = _stack_vectors(dense, sparse), dense.shape[1]
    pairs = grad.new_zeros(grad.shape[0], vectors.shape[1], vectors.shape[1])
    pairs[:, row, column] = pairs[:, column, row] = grad[:, D:]
    return grad[:, :D] + torch.bmm(pairs[:, :1], vectors)[:, 0], torch.bmm(pairs[:, 1:], vectors).flatten(1)


def _stack_vectors(dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return all vectors `[B, F + 1, D]`, and the rows and columns of their pairs."""
    F = sparse.shape[1] // dense.shape[1]
    vectors = torch.cat([dense.unsqueeze(1), sparse.reshape(-1, F, dense.shape[1])], dim=1)
    row, column = torch.tril_indices(F + 1, F + 1, offset=-1, device=dense.device)
    return vectors, row, column
