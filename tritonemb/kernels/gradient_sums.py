"""The gradient of each distinct row: `g = Σ_p scale_p · clamp(grad_p, ±max_gradient)`, summed in one fixed order.

The sum goes over the positions `p` of the row in the order of `RowGroups.order`. `grad_p` is the slice of the output's
gradient that position `p` contributed to, `scale_p` its per-sample weight, divided by the bag's length for means.

A row with more than PIECE positions is summed in spans of SPAN positions, counted from its first one. A span is summed
in pieces of PIECE positions, in parallel; pieces are added pairwise; spans are added in order. Programs of their own
sum the spans of such hot rows in parallel; shorter rows are summed by the kernel that updates them.

Bytes: `4 · dim` of gradient read per position; 28 bytes per position of offsets and scales, written and read.
"""

from typing import Any

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.kernels.triton_utils import (
    CODES,
    ROW_DIM,
    bits_of,
    cdiv,
    field_at,
    jit,
    lanes,
    last_at_most,
    launch,
    num_programs,
    table_of,
    tl,
    widen,
)
from tritonemb.layout import PIECE, SPAN, BatchGradient

ENTRIES = 256  # per program of the kernels that locate gradients
SPAN_COLUMNS = 128  # per program that sums a span
NO_BAD_ROW_VALUE = 2**62  # above every row, for atomic_min
PIECE_SIZE, SPAN_SIZE, NO_BAD_ROW = (tl.constexpr(value) for value in (PIECE, SPAN, NO_BAD_ROW_VALUE))


@jit
def _power(base, exponent):
    """Raise `base` to the powers `exponent`, in float64, by squaring."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    square = result * base
    while tl.max(exponent) > 0:
        result = tl.where(exponent % 2 == 1, result * square, result)
        square = square * square
        exponent = exponent // 2
    return result


@jit(varying=["num_bags", "num_values"])
def _find_bags_kernel(
    offsets, bags, status, steps, betas, corrections, num_bags, num_values, num_steps, ADVANCE, BLOCK
):
    """Find the bag of each position by binary search, in the order of positions, so that neighbours share loads.

    The first program also resets `status` (number of spans, lowest bad row) and computes the bias corrections of the
    next step (`1 - beta^t` of Adam's two moments); with ADVANCE it increments `steps`.
    """
    # Bags.
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bags + position, last_at_most(offsets, num_bags, position), mask=position < num_values)
    # Status, corrections and steps.
    if tl.program_id(0) == 0:
        tl.store(status, 0)
        tl.store(status + 1, NO_BAD_ROW)
        for start in range(0, num_steps, BLOCK):
            index = start + tl.arange(0, BLOCK)
            step = tl.load(steps + index, mask=index < num_steps, other=0) + 1
            if corrections is not None:
                for moment in tl.static_range(2):
                    correction = 1.0 - _power(tl.load(betas + moment), step)
                    tl.store(corrections + 2 * index + moment, correction.to(tl.float32), mask=index < num_steps)
            if ADVANCE:
                tl.store(steps + index, step, mask=index < num_steps)


@jit(varying=["batch_size", "num_entries"])
def _locate_kernel(
    layout, offsets, bags, sample_weights, groups, sources, scales, status, group_of_span, span_of_group, batch_size,
    num_tables, num_entries, POOLED, BLOCK,
):  # fmt: skip
    """Compute for each entry of `order` the offset of its gradient in the output's gradient, and its scale.

    Append the spans of long rows to the list of spans, a row's spans contiguously. The order of rows in the list varies
    between runs; no sum depends on it.
    """
    tables, lookups, key_starts, multiplicity, width = layout
    rows, starts, order, num_groups = groups
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(order + entry, mask=entry < num_entries, other=-1).to(tl.int64)
    valid = position >= 0
    bag = tl.load(bags + position, mask=valid, other=0)
    lookup = tl.load(key_starts + bag // batch_size)
    # If a key has several lookups, choose the one whose table has the entry's row.
    if multiplicity > 1:
        group = last_at_most(starts, tl.load(num_groups).to(tl.int32), entry)
        table = table_of(tables, num_tables, tl.load(rows + group))
        first_lookup = lookup
        for lookup_number in range(1, multiplicity):
            candidate = first_lookup + lookup_number
            is_match = candidate < tl.load(key_starts + bag // batch_size + 1)
            is_match = is_match & (tl.load(lookups + candidate * 4, mask=is_match & valid, other=-1) == table)
            lookup = tl.where(is_match, candidate, lookup)
    # Offset and scale of the entry's gradient.
    column = tl.load(lookups + lookup * 4 + 1, mask=valid, other=0)
    mean = tl.load(lookups + lookup * 4 + 3, mask=valid, other=0) == 1
    length = (tl.load(offsets + bag + 1) - tl.load(offsets + bag)).to(tl.float32)
    scale = tl.where(mean, tl.div_rn(1.0, tl.maximum(length, 1.0)), 1.0)
    if sample_weights is not None:
        scale *= tl.load(sample_weights + position, mask=valid, other=0.0)
    source = (bag % batch_size).to(tl.int64) * width + column if POOLED else position * width
    tl.store(sources + entry, source, mask=valid)
    tl.store(scales + entry, scale, mask=valid)

    # Here `entry` numbers a group: reserve slots in the list for its spans.
    valid_group = entry < tl.load(num_groups)
    size = tl.load(starts + entry + 1, mask=valid_group, other=0) - tl.load(starts + entry, mask=valid_group, other=0)
    num_spans = tl.where(size > PIECE_SIZE, tl.cdiv(size, SPAN_SIZE), 0)
    first_span = tl.atomic_add(status + entry * 0, num_spans.to(tl.int64), mask=num_spans > 0)
    tl.store(span_of_group + entry, first_span.to(tl.int32), mask=num_spans > 0)
    for span in range(tl.max(num_spans)):
        tl.store(group_of_span + first_span + span, entry.to(tl.int32), mask=span < num_spans)


@jit
def add_gradients(total, first, stop, gradients, dim, columns, CODE, STEP, UNROLL):
    """Add to `total` `[ROWS, BLOCK]` the scaled gradients of entries [first, stop) `[ROWS]`, entry by entry."""
    sources, scales, grad, max_gradient = gradients
    dim = tl.multiple_of(dim, STEP)
    for start in range(0, tl.max(stop - first), UNROLL):
        entry = first + start
        offsets, entry_scales = (), ()
        # Issue UNROLL loads of offsets and scales before the first is used, then as many of gradients.
        for i in tl.static_range(UNROLL):
            offsets += (tl.load(sources + entry + i, mask=entry + i < stop, other=0),)  # type: ignore[assignment]
            entry_scales += (tl.load(scales + entry + i, mask=entry + i < stop, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            valid = (entry + i < stop)[:, None]
            pointers = grad + tl.multiple_of(offsets[i], STEP)[:, None] + columns[None, :]
            g = widen(tl.load(pointers, mask=valid & (columns[None, :] < dim[:, None]), other=0), CODE)
            if max_gradient is not None:  # in this order NaN stays NaN
                g = tl.where(g > max_gradient, max_gradient, tl.where(g < -max_gradient, -max_gradient, g))
            # Masked entries add exactly 0; a product with the masked scale would not: 0 · inf is NaN.
            total += tl.where(valid, g * entry_scales[i][:, None], 0.0)
    return total


@jit
def _add_in_pairs(x):
    """Sum rows `[ROWS, SIZE]` to `[SIZE]`, pairwise: neighbours, then neighbouring sums."""
    if x.shape[0] == 1:
        return tl.reshape(x, (x.shape[1],))
    else:
        return _add_in_pairs(tl.sum(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), 1))


@jit
def _sum_spans_kernel(
    tables, rows, starts, gradients, status, group_of_span, span_of_group, sums, num_tables, width, CODE, STEP, PIECES,
    BLOCK,
):  # fmt: skip
    """Sum the listed spans of long rows, all pieces of a span in parallel."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for span in range(tl.program_id(0), tl.load(status).to(tl.int32), tl.num_programs(0)):
        # Entries of each piece of the span.
        group = tl.load(group_of_span + span)
        begin = tl.load(starts + group) + (span - tl.load(span_of_group + group)) * SPAN_SIZE
        first = begin + tl.arange(0, PIECES) * PIECE_SIZE
        stop = tl.minimum(first + PIECE_SIZE, tl.load(starts + group + 1))
        table = table_of(tables, num_tables, tl.load(rows + group))
        dim = tl.zeros((PIECES,), tl.int32) + tl.load(field_at(tables, table, ROW_DIM)).to(tl.int32)
        total = tl.zeros((PIECES, BLOCK), tl.float32)
        total = add_gradients(total, first, stop, gradients, dim, columns, CODE, STEP, 1)
        span_sum = sums + (tl.zeros((), tl.int64) + span) * width
        tl.store(span_sum + columns, _add_in_pairs(total))


@jit
def add_spans(total, spans, group, size, columns, BLOCK, UNROLL):
    """Add to `total` `[ROWS, BLOCK]` the sums of spans of the groups `[ROWS]` with more than PIECE entries."""
    span_of_group, sums = spans
    is_long = size > PIECE_SIZE
    num_spans = tl.where(is_long, tl.cdiv(size, SPAN_SIZE), 0)
    span = tl.load(span_of_group + group, mask=is_long, other=0).to(tl.int64)
    for start in range(0, tl.max(num_spans), UNROLL):
        for i in tl.static_range(UNROLL):
            valid = (start + i < num_spans)[:, None] & (columns[None, :] >= 0)
            total += tl.load(sums + (span + start + i)[:, None] * BLOCK + columns[None, :], mask=valid, other=0.0)
    return total


def locate_gradients(
    batch: BatchGradient, max_gradient: float, block: int, gradient_step: int, steps: Tensor, betas: Tensor | None,
    advance: bool,
) -> tuple[tuple[Any, ...], tuple[Tensor, Tensor], Tensor, Tensor | None]:  # fmt: skip
    """Locate each entry's gradient, and sum long rows; `block` columns per row, dims divisible by `gradient_step`.

    Returns `gradients` of `add_gradients`: for each entry of `order` the offset (int64) and scale of its gradient, the
    output's gradient in `bits_of` form, and the clamp or None; two arguments of `add_spans`: the first span of each
    long row's group, and float32 sums of spans; int64 `[2]`, the number of spans and NO_BAD_ROW_VALUE; with Adam's
    `betas`, float64 `[2]`, the next step's bias corrections, float32 `[2]` for each of `steps`. With `advance` `steps`
    are incremented.
    """
    grad, offsets, sample_weights, groups, layout = batch
    device, num_entries, num_tables = grad.device, groups[0].numel(), layout.tables.shape[0]
    batch_size, num_keys = batch_size_of(offsets, layout.key_starts), layout.key_starts.numel() - 1
    weights = None if sample_weights is None else sample_weights.to(torch.float32).contiguous()

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    # Size the buffers without looking at data.
    num_values, max_spans = num_entries // layout.multiplicity, num_entries // (PIECE + 1)
    sources, scales = empty(num_entries, torch.int64), empty(num_entries, torch.float32)
    spans = empty(max_spans, torch.int32), empty(num_entries, torch.int32)
    bags, status = empty(num_values, torch.int32), empty(2, torch.int64)
    corrections = None if betas is None else empty(2 * steps.numel(), torch.float32)
    # Bags and corrections, then offsets, scales and the list of spans.
    outputs, sizes = (bags, status, steps, betas, corrections), (num_keys * batch_size, num_values, steps.numel())
    launch(_find_bags_kernel, (cdiv(num_values, ENTRIES),), offsets, *outputs, *sizes, ADVANCE=advance, BLOCK=ENTRIES)
    args = layout.kernel_args, offsets, bags, weights, tuple(groups), sources, scales, status, *spans
    options = {"POOLED": layout.pooled, "BLOCK": ENTRIES}
    launch(_locate_kernel, (cdiv(num_entries, ENTRIES),), *args, batch_size, num_tables, num_entries, **options)
    # Sums of spans, by persistent programs.
    gradients = sources, scales, bits_of(grad), max_gradient if max_gradient < torch.inf else None
    sums, columns = empty(max_spans * block, torch.float32), min(block, SPAN_COLUMNS)
    num_warps = max(1, 2 * columns // lanes())  # 16 sums per lane, and as many gradients in flight
    grid = min(max_spans, num_programs(device, num_warps)), cdiv(block, columns)
    inputs = layout.tables, *groups[:2], gradients, status, *spans
    options = {"CODE": CODES[grad.dtype], "STEP": gradient_step, "PIECES": SPAN // PIECE, "BLOCK": columns}
    launch(_sum_spans_kernel, grid, *inputs, sums, num_tables, block, num_warps=num_warps, **options)
    return gradients, (spans[1], sums), status, corrections


def warps_for(block: int) -> int:
    """Return the warps per program: a lane holds at most four elements of a row, with at most 16 warps."""
    return max(1, min(16, block // (4 * lanes())))
