"""The gradient of each distinct row: `g = Σ_p scale_p · clamp(grad_p, ±max_gradient)`, with one order.

The sum goes over the positions `p` of the row in the order of `RowGroups.order`; `grad_p` is the part of the output's
gradient that position `p`'s row went into, `scale_p` its per-sample weight, over the bag's length for means.

A row that is used more than PIECE times is summed in pieces of that many positions, counted from its first, and the
pieces are added in order: on a GPU a hot row's pieces are summed at once, by programs of their own. Shorter rows are
summed where they are used, by `add_gradients`.

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
    table_of,
    tl,
    widen,
)
from tritonemb.layout import Layout

PIECE = 256  # positions of a row that are summed before they are added to the rest
ENTRIES = 256  # entries of a program that places them
PIECE_SIZE = tl.constexpr(PIECE)


@jit(varying=["num_bags", "num_values"])
def _find_bags_kernel(offsets, bags, num_bags, num_values, BLOCK: tl.constexpr):
    """The bag of each position, found in the order of positions, where neighbours search alike."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bags + position, last_at_most(offsets, num_bags, position), mask=position < num_values)


@jit(varying=["batch_size", "num_entries"])
def _place_kernel(
    tables, lookups, key_starts, offsets, bags, sample_weights, rows, starts, order, num_groups, sources, scales,
    batch_size, num_tables, num_entries, multiplicity, width, POOLED: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For each entry of `order`: the element of the output's gradient that its own begins at, and its scale."""
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


@jit
def add_gradients(
    total, first, stop, sources, scales, grad, dim, columns, max_gradient, CODE: tl.constexpr, STEP: tl.constexpr,
    CLAMPED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`total` `[ROWS, BLOCK]` plus the scaled gradients of entries [first, stop) `[ROWS]`, entry by entry."""
    dim = tl.multiple_of(dim, STEP)
    for start in range(0, tl.max(stop - first), UNROLL):
        for i in tl.static_range(UNROLL):
            entry = first + start + i
            live = entry < stop
            source = tl.multiple_of(tl.load(sources + entry, mask=live, other=0), STEP)
            scale = tl.load(scales + entry, mask=live, other=0.0)
            bits = tl.load(
                grad + source[:, None] + columns[None, :],
                mask=live[:, None] & (columns[None, :] < dim[:, None]),
                other=0,
            )
            part = widen(bits, CODE)
            if CLAMPED:  # in this order NaN stays NaN
                part = tl.where(part > max_gradient, max_gradient, tl.where(part < -max_gradient, -max_gradient, part))
            # Behind a row's last entry nothing is added, not even the zero that would be: 0 · inf is not 0.
            total += tl.where(live[:, None], part * scale[:, None], 0.0)
    return total


@jit
def _find_piece(window, slot, starts, num_groups):
    """The piece in slot 0 or 1 of a window: its group, its row's begin and end, its first entry, whether there is one.

    At most two pieces of long rows begin in a window of PIECE entries: one of the row of the window's first entry, and
    one of a row that begins further on and does not end in the window.
    """
    count = tl.load(num_groups).to(tl.int32)
    window_begin = window * PIECE_SIZE
    window_end = tl.minimum(window_begin + PIECE_SIZE, tl.load(starts + count))
    group = last_at_most(starts, count, tl.where(slot == 0, window_begin, window_end - 1))
    begin, end = tl.load(starts + group), tl.load(starts + group + 1)
    first = begin + tl.where(slot == 0, tl.cdiv(window_begin - begin, PIECE_SIZE) * PIECE_SIZE, 0)
    there = (end - begin > PIECE_SIZE) & (first < tl.minimum(end, window_end)) & ((slot == 0) | (begin > window_begin))
    return group, begin, end, first, there & (window_begin < window_end)


@jit
def slot_of(first, begin):
    """Where the sum of the piece from entry `first` on is kept, of a row that begins at entry `begin`."""
    return 2 * (first // PIECE_SIZE) + ((first == begin) & (first % PIECE_SIZE != 0)).to(tl.int32)


@jit
def _sum_pieces_kernel(
    tables, rows, starts, num_groups, sources, scales, grad, pieces, num_tables, max_gradient, CODE: tl.constexpr,
    STEP: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The pieces that begin in a window of the entries."""
    window = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    for slot in range(2):
        group, begin, end, first, there = _find_piece(window, slot, starts, num_groups)
        if there:
            table = table_of(tables, num_tables, tl.load(rows + group))
            dim = tl.zeros((1,), tl.int32) + tl.multiple_of(
                tl.load(field_at(tables, table, ROW_DIM)).to(tl.int32), STEP
            )
            stop = tl.minimum(first + PIECE_SIZE, end)
            total = add_gradients(
                tl.zeros((1, BLOCK), tl.float32), tl.zeros((1,), tl.int32) + first, tl.zeros((1,), tl.int32) + stop,
                sources, scales, grad, dim, columns, max_gradient, CODE, STEP, CLAMPED, UNROLL,
            )  # fmt: skip
            tl.store(pieces + slot_of(first, begin).to(tl.int64) * BLOCK + columns[None, :], total)


@jit
def _add_pieces_kernel(starts, num_groups, pieces, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Long rows whose first piece begins in a window: all pieces, in order, added into the first."""
    window = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    for slot in range(2):
        _, begin, end, first, there = _find_piece(window, slot, starts, num_groups)
        if there & (first == begin):
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(begin, end, UNROLL * PIECE_SIZE):
                for i in tl.static_range(UNROLL):
                    piece = start + i * PIECE_SIZE
                    place = pieces + slot_of(piece, begin).to(tl.int64) * BLOCK + columns
                    total += tl.load(place, mask=columns < tl.where(piece < end, BLOCK, 0), other=0.0)
            tl.store(pieces + slot_of(begin, begin).to(tl.int64) * BLOCK + columns, total)


def place_gradients(
    grad: Tensor, offsets: Tensor, sample_weights: Tensor | None, groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout, max_gradient: float, block: int, step: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Find each entry's gradient, and sum long rows; `block` columns a row, dims multiples of `step` elements.

    Returns what `add_gradients` reads: for each entry of `order` the first element of its gradient (int64) and its
    scale; the output's gradient as integers where kernels want them; float32 sums of long rows.
    """
    rows, starts, order, num_groups = groups
    device, num_entries, num_tables = grad.device, rows.numel(), layout.tables.shape[0]
    batch_size, num_keys = batch_size_of(offsets, layout.key_starts), layout.key_starts.numel() - 1
    factors = None if sample_weights is None else sample_weights.to(torch.float32).contiguous()
    sources = torch.empty(num_entries, dtype=torch.int64, device=device)
    scales = torch.empty(num_entries, dtype=torch.float32, device=device)
    num_values = num_entries // layout.multiplicity
    bags = torch.empty(num_values, dtype=torch.int32, device=device)
    launch(
        _find_bags_kernel, (cdiv(num_values, ENTRIES),), offsets, bags, num_keys * batch_size, num_values, BLOCK=ENTRIES
    )
    launch(
        _place_kernel, (cdiv(num_entries, ENTRIES),), layout.tables, layout.lookups, layout.key_starts, offsets, bags,
        factors, rows, starts, order, num_groups, sources, scales, batch_size, num_tables, num_entries,
        layout.multiplicity, layout.width, POOLED=layout.pooled, WEIGHTED=factors is not None, BLOCK=ENTRIES,
    )  # fmt: skip
    windows = cdiv(num_entries, PIECE) if num_entries > PIECE else 0
    pieces = torch.empty(2 * windows * block, dtype=torch.float32, device=device)
    placed = sources, scales, bits_of(grad), pieces
    options = {"BLOCK": block, "UNROLL": 8, "num_warps": warps_for(block)}
    launch(
        _sum_pieces_kernel, (windows,), layout.tables, rows, starts, num_groups, *placed, num_tables, max_gradient,
        CODE=CODES[grad.dtype], STEP=step, CLAMPED=max_gradient < torch.inf, **options,
    )  # fmt: skip
    launch(_add_pieces_kernel, (windows,), starts, num_groups, pieces, **options)
    return placed


def warps_for(block: int) -> int:
    """Enough that a lane holds at most four elements of a row, if it can be."""
    return max(1, min(16, block // (4 * lanes())))
