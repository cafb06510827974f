"""The gradient of each distinct row: `g = Σ_p scale_p · clamp(grad_p, ±max_gradient)`, with one order.

The sum goes over the positions `p` of the row in the order of `RowGroups.order`; `grad_p` is the part of the output's
gradient that position `p`'s row went into, `scale_p` its per-sample weight, over the bag's length for means.

A row that is used more than PIECE times is summed in spans of SPAN positions, counted from its first. A span is summed
in pieces of PIECE positions, side by side; pieces are added in pairs of neighbours, then pairs of sums; spans are added
in order. A hot row's spans are summed at once, by programs of their own; shorter rows where they are used.

Bytes: `4 · dim` of gradient read for each position; ids' places and scales, 28 bytes, written and read.
"""

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
from tritonemb.layout import PIECE, SPAN, Layout

ENTRIES = 256  # entries of a program that places them
SPAN_COLUMNS = 128  # of a program that sums a span
NO_ROW_FOUND = 2**62
PIECE_SIZE, SPAN_SIZE, NO_ROW = (tl.constexpr(value) for value in (PIECE, SPAN, NO_ROW_FOUND))


@jit
def _power(base, exponent):
    """`base` to the powers `exponent`, in float64, by squaring."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    square = result * base
    while tl.max(exponent) > 0:
        result = tl.where(exponent % 2 == 1, result * square, result)
        square = square * square
        exponent = exponent // 2
    return result


@jit(varying=["num_bags", "num_values"])
def _find_bags_kernel(
    offsets, bags, found, steps, betas, corrections, num_bags, num_values, num_steps, ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The bag of each position, found in the order of positions, where neighbours search alike.

    The first program also clears what later kernels find, sets the corrections of the coming step (`1 - beta^t` of
    Adam's two moments) and, to ADVANCE, counts it.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bags + position, last_at_most(offsets, num_bags, position), mask=position < num_values)
    if tl.program_id(0) == 0:
        tl.store(found, 0)
        tl.store(found + 1, NO_ROW)
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
def _place_kernel(
    tables, lookups, key_starts, offsets, bags, sample_weights, rows, starts, order, num_groups, sources, scales, found,
    group_of_span, span_of_group, batch_size, num_tables, num_entries, multiplicity, width, POOLED: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each entry of `order`: the element of the output's gradient that its own begins at, and its scale.

    For each group with the number of an entry: if its row is long, its spans join the list of all, side by side. How
    rows follow each other there changes from run to run, and no sum.
    """
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(order + entry, mask=entry < num_entries, other=-1).to(tl.int64)
    live = position >= 0
    bag = tl.load(bags + position, mask=live, other=0)
    lookup = tl.load(key_starts + bag // batch_size)
    if multiplicity > 1:  # which of its key's lookups an entry is, its row tells
        group = last_at_most(starts, tl.load(num_groups).to(tl.int32), entry)
        table = table_of(tables, num_tables, tl.load(rows + group))
        first = lookup
        for use in range(1, multiplicity):
            candidate = first + use
            ours = candidate < tl.load(key_starts + bag // batch_size + 1)
            ours = ours & (tl.load(lookups + candidate * 4, mask=ours & live, other=-1) == table)
            lookup = tl.where(ours, candidate, lookup)
    column = tl.load(lookups + lookup * 4 + 1, mask=live, other=0)
    mean = tl.load(lookups + lookup * 4 + 3, mask=live, other=0) == 1
    length = (tl.load(offsets + bag + 1) - tl.load(offsets + bag)).to(tl.float32)
    scale = tl.where(mean, tl.div_rn(1.0, tl.maximum(length, 1.0)), 1.0)
    if WEIGHTED:
        scale *= tl.load(sample_weights + position, mask=live, other=0.0)
    source = (bag % batch_size).to(tl.int64) * width + column if POOLED else position * width
    tl.store(sources + entry, source, mask=live)
    tl.store(scales + entry, scale, mask=live)

    there = entry < tl.load(num_groups)
    size = tl.load(starts + entry + 1, mask=there, other=0) - tl.load(starts + entry, mask=there, other=0)
    num_spans = tl.where(size > PIECE_SIZE, tl.cdiv(size, SPAN_SIZE), 0)
    first = tl.atomic_add(found + entry * 0, num_spans.to(tl.int64), mask=num_spans > 0)
    tl.store(span_of_group + entry, first.to(tl.int32), mask=num_spans > 0)
    for span in range(tl.max(num_spans)):
        tl.store(group_of_span + first + span, entry.to(tl.int32), mask=span < num_spans)


@jit
def add_gradients(
    total, first, stop, sources, scales, grad, dim, columns, max_gradient, CODE: tl.constexpr, STEP: tl.constexpr,
    CLAMPED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`total` `[ROWS, BLOCK]` plus the scaled gradients of entries [first, stop) `[ROWS]`, entry by entry."""
    dim = tl.multiple_of(dim, STEP)
    for start in range(0, tl.max(stop - first), UNROLL):
        entry = first + start
        begins, factors = (), ()
        for i in tl.static_range(UNROLL):  # all are asked for before one is waited for
            begins += (tl.load(sources + entry + i, mask=entry + i < stop, other=0),)  # type: ignore[assignment]
            factors += (tl.load(scales + entry + i, mask=entry + i < stop, other=0.0),)  # type: ignore[assignment]
        for i in tl.static_range(UNROLL):
            live = (entry + i < stop)[:, None]
            place = grad + tl.multiple_of(begins[i], STEP)[:, None] + columns[None, :]
            part = widen(tl.load(place, mask=live & (columns[None, :] < dim[:, None]), other=0), CODE)
            if CLAMPED:  # in this order NaN stays NaN
                part = tl.where(part > max_gradient, max_gradient, tl.where(part < -max_gradient, -max_gradient, part))
            # Behind a row's last entry nothing is added, not even the zero that would be: 0 · inf is not 0.
            total += tl.where(live, part * factors[i][:, None], 0.0)
    return total


@jit
def _add_in_pairs(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The sum `[SIZE]` of rows `[ROWS, SIZE]`: neighbours in pairs, then pairs of sums."""
    if ROWS == 1:
        return tl.reshape(x, (SIZE,))
    else:
        return _add_in_pairs(tl.sum(tl.reshape(x, (ROWS // 2, 2, SIZE)), 1), ROWS // 2, SIZE)


@jit
def _sum_spans_kernel(
    tables, rows, starts, sources, scales, grad, found, group_of_span, span_of_group, sums, num_tables, max_gradient,
    width, CODE: tl.constexpr, STEP: tl.constexpr, CLAMPED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The listed spans of long rows: all pieces of a span at once."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for span in range(tl.program_id(0), tl.load(found).to(tl.int32), tl.num_programs(0)):
        group = tl.load(group_of_span + span)
        begin = tl.load(starts + group) + (span - tl.load(span_of_group + group)) * SPAN_SIZE
        first = begin + tl.arange(0, PIECES) * PIECE_SIZE
        stop = tl.minimum(first + PIECE_SIZE, tl.load(starts + group + 1))
        table = table_of(tables, num_tables, tl.load(rows + group))
        dim = tl.zeros((PIECES,), tl.int32) + tl.load(field_at(tables, table, ROW_DIM)).to(tl.int32)
        total = add_gradients(
            tl.zeros((PIECES, BLOCK), tl.float32), first, stop, sources, scales, grad, dim, columns, max_gradient, CODE,
            STEP, CLAMPED, 1,
        )  # fmt: skip
        place = sums + (tl.zeros((), tl.int64) + span) * width
        tl.store(place + columns, _add_in_pairs(total, PIECES, BLOCK))


@jit
def add_spans(total, group, size, span_of_group, sums, columns, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """`total` `[ROWS, BLOCK]` plus the spans of those of the groups `[ROWS]` that have more than PIECE entries."""
    long = size > PIECE_SIZE
    num_spans = tl.where(long, tl.cdiv(size, SPAN_SIZE), 0)
    span = tl.load(span_of_group + group, mask=long, other=0).to(tl.int64)
    for start in range(0, tl.max(num_spans), UNROLL):
        for i in tl.static_range(UNROLL):
            live = (start + i < num_spans)[:, None] & (columns[None, :] >= 0)
            total += tl.load(sums + (span + start + i)[:, None] * BLOCK + columns[None, :], mask=live, other=0.0)
    return total


def place_gradients(
    grad: Tensor, offsets: Tensor, sample_weights: Tensor | None, groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout, max_gradient: float, block: int, gradient_step: int, steps: Tensor, betas: Tensor | None,
    advance: bool,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:  # fmt: skip
    """Find each entry's gradient, and sum long rows; `block` columns a row, dims multiples of `gradient_step` elements.

    Returns what `add_gradients` and `add_spans` read: for each entry of `order` the first element of its gradient
    (int64) and its scale; the output's gradient as integers where kernels want them; for each long row's group its
    first span; float32 sums of spans. Then int64 `[2]`, the number of spans and NO_ROW_FOUND; and of Adam's `betas`,
    float64 `[2]`, the coming step's corrections, float32 `[2]` for each of `steps`. These are counted to `advance`.
    """
    rows, starts, order, num_groups = groups
    device, num_entries, num_tables = grad.device, rows.numel(), layout.tables.shape[0]
    batch_size, num_keys = batch_size_of(offsets, layout.key_starts), layout.key_starts.numel() - 1
    factors = None if sample_weights is None else sample_weights.to(torch.float32).contiguous()

    def empty(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    num_values, most_spans = num_entries // layout.multiplicity, num_entries // (PIECE + 1)
    sources, scales = empty(num_entries, torch.int64), empty(num_entries, torch.float32)
    group_of_span, span_of_group = empty(most_spans, torch.int32), empty(num_entries, torch.int32)
    bags, found = empty(num_values, torch.int32), empty(2, torch.int64)
    corrections = None if betas is None else empty(2 * steps.numel(), torch.float32)
    launch(
        _find_bags_kernel, (cdiv(num_values, ENTRIES),), offsets, bags, found, steps, betas, corrections,
        num_keys * batch_size, num_values, steps.numel(), ADVANCE=advance, BLOCK=ENTRIES,
    )  # fmt: skip
    launch(
        _place_kernel, (cdiv(num_entries, ENTRIES),), layout.tables, layout.lookups, layout.key_starts, offsets, bags,
        factors, rows, starts, order, num_groups, sources, scales, found, group_of_span, span_of_group, batch_size,
        num_tables, num_entries, layout.multiplicity, layout.width, POOLED=layout.pooled, WEIGHTED=factors is not None,
        BLOCK=ENTRIES,
    )  # fmt: skip
    gradients, sums = (sources, scales, bits_of(grad)), empty(most_spans * block, torch.float32)
    columns = min(block, SPAN_COLUMNS)
    num_warps = max(1, 2 * columns // lanes())  # 16 sums a lane, and as many gradients on their way to it
    grid = (min(most_spans, num_programs(device, num_warps)), cdiv(block, columns))
    launch(
        _sum_spans_kernel, grid, layout.tables, rows, starts, *gradients, found, group_of_span, span_of_group, sums,
        num_tables, max_gradient, block, CODE=CODES[grad.dtype], STEP=gradient_step, CLAMPED=max_gradient < torch.inf,
        PIECES=SPAN // PIECE, BLOCK=columns, num_warps=num_warps,
    )  # fmt: skip
    return (*gradients, span_of_group, sums), found, corrections


def warps_for(block: int) -> int:
    """Enough that a lane holds at most four elements of a row, if it can be."""
    return max(1, min(16, block // (4 * lanes())))
