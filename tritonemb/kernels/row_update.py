"""The update: one owner per row sums its gradients in a fixed order and applies the optimizer once, in place.

`g = Σ_p scale_p · clamp(grad_p, ±max_gradient)` over the positions `p` of the row in the order of `RowGroups.order`;
`grad_p` is the part of the output's gradient that position `p`'s row went into, `scale_p` its per-sample weight, over
the bag's length for means. Then one step of the optimizer, whose formula and source stand in `tritonemb/optim.py`, in
float32; 16-bit rows are rounded back as in `kernels/rounding.py`.

A row that is used more than PIECE times is summed in pieces of that many positions, counted from its first, and the
pieces are added in order: on a GPU a hot row's pieces are summed at once, by programs of their own.

Bytes: for each position `4 · dim` of gradient read; for each distinct row its weight and state read and written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.addresses import on_device
from tritonemb.kernels.embedding_bag import alignment_of, by_dtype, scales_reference
from tritonemb.kernels.error_word import BAD_GRADIENT, error_word, names_of, poll, report
from tritonemb.kernels.floats import CODES, FLOAT32, bits_of, last_at_most, narrow, pointer_to, widen
from tritonemb.kernels.language import cdiv, jit, lanes, launch, next_power_of_2, num_programs, tl
from tritonemb.kernels.layout import COLUMN, FIRST_ROW, MEAN, NUM_ROWS, POOLING, SEED, TABLE, Layout, batch_size_of
from tritonemb.kernels.optimizers import KINDS, constants_of, step_reference, step_rows
from tritonemb.kernels.rounding import (
    narrow_reference,
    narrow_stochastic,
    narrow_stochastic_reference,
    random16,
    random16_reference,
)
from tritonemb.optim import OPTIMIZERS, Adam, Hyperparameters, NonFinite

NONFINITE_MODES = get_args(NonFinite)
PIECE = 256  # positions of a row that are summed before they are added to the rest
ENTRIES = 256  # entries of a program that places them
NO_STATE, ROW_STATE, ELEMENT_STATE = (tl.constexpr(kind) for kind in range(3))
NO_ROW = tl.constexpr(2**62)
_PIECE = tl.constexpr(PIECE)


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
        table = last_at_most(tables, num_tables, tl.load(rows + group), 4)
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
def _add_gradients(
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
    """The piece that belongs in slot 0 or 1 of a window of PIECE entries: its group, its row's begin and end, its first
    entry, and whether there is one.

    At most two pieces of long rows begin in a window: one of the row that the window's first entry is part of, and one
    of a row that begins further on and does not end in the window.
    """
    count = tl.load(num_groups).to(tl.int32)
    window_begin = window * _PIECE
    window_end = tl.minimum(window_begin + _PIECE, tl.load(starts + count))
    group = last_at_most(starts, count, tl.where(slot == 0, window_begin, window_end - 1))
    begin, end = tl.load(starts + group), tl.load(starts + group + 1)
    first = begin + tl.where(slot == 0, tl.cdiv(window_begin - begin, _PIECE) * _PIECE, 0)
    there = (end - begin > _PIECE) & (first < tl.minimum(end, window_end)) & ((slot == 0) | (begin > window_begin))
    return group, begin, end, first, there & (window_begin < window_end)


@jit
def _slot_of(first, begin):
    """Where the sum of the piece from entry `first` on is kept, of a row that begins at entry `begin`."""
    return 2 * (first // _PIECE) + ((first == begin) & (first % _PIECE != 0)).to(tl.int32)


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
            table = last_at_most(tables, num_tables, tl.load(rows + group), 4)
            dim = tl.zeros((1,), tl.int64) + tl.multiple_of(tl.load(tables + table * 4 + 2), STEP)
            stop = tl.minimum(first + _PIECE, end)
            total = _add_gradients(
                tl.zeros((1, BLOCK), tl.float32), tl.zeros((1,), tl.int32) + first, tl.zeros((1,), tl.int32) + stop,
                sources, scales, grad, dim, columns, max_gradient, CODE, STEP, CLAMPED, UNROLL,
            )  # fmt: skip
            tl.store(pieces + _slot_of(first, begin).to(tl.int64) * BLOCK + columns[None, :], total)


@jit
def _add_pieces_kernel(starts, num_groups, pieces, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    """Long rows whose first piece begins in a window: all pieces, in order, added into the first."""
    window = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    for slot in range(2):
        _, begin, end, first, there = _find_piece(window, slot, starts, num_groups)
        if there & (first == begin):
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(begin, end, UNROLL * _PIECE):
                for i in tl.static_range(UNROLL):
                    piece = start + i * _PIECE
                    place = pieces + _slot_of(piece, begin).to(tl.int64) * BLOCK + columns
                    total += tl.load(place, mask=(columns >= 0) & (piece < end), other=0.0)
            tl.store(pieces + _slot_of(begin, begin).to(tl.int64) * BLOCK + columns, total)


@jit
def _load_state(address, row, offset, mask, dim, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Rows of a state, `[ROWS, BLOCK]`, or `[ROWS]` for one value a row; zeros if there is none."""
    if KIND == ELEMENT_STATE:
        return tl.load(pointer_to(address, FLOAT32, ALIGN)[:, None] + offset, mask=mask, other=0.0)
    elif KIND == ROW_STATE:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + row, mask=dim > 0, other=0.0)
    else:
        return tl.zeros_like(dim).to(tl.float32)


@jit
def _store_state(address, row, offset, mask, dim, state, KIND: tl.constexpr, ALIGN: tl.constexpr):
    if KIND == ELEMENT_STATE:
        tl.store(pointer_to(address, FLOAT32, ALIGN)[:, None] + offset, state, mask=mask)
    elif KIND == ROW_STATE:
        tl.store(address.to(tl.pointer_type(tl.float32)) + row, state, mask=dim > 0)


@jit
def _update_kernel(
    addresses, addresses1, addresses2, tables, rows, starts, num_groups, sources, scales, grad, pieces, learning_rate,
    step, corrections, constants, skipped, bad_row, lock, record, names, num_tables, max_gradient,
    CODE: tl.constexpr, GRAD_CODE: tl.constexpr, KIND: tl.constexpr, STATE1: tl.constexpr, STATE2: tl.constexpr,
    DECAY: tl.constexpr, CLAMPED: tl.constexpr, LIMITED: tl.constexpr, STOCHASTIC: tl.constexpr,
    NONFINITE: tl.constexpr, CHECK_ONLY: tl.constexpr, ALIGN: tl.constexpr, STATE_ALIGN: tl.constexpr,
    STEP: tl.constexpr, GRAD_STEP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """ROWS groups at a time, from `program_id` on in steps of `num_programs`: sum, step, store.

    NONFINITE 1: the first pass, CHECK_ONLY, leaves the lowest row whose gradient is not finite in `bad_row`; the second
    reports it and does nothing if there is one. NONFINITE 2: such rows are counted in `skipped`.
    """
    count = tl.load(num_groups).to(tl.int32)
    if NONFINITE == 1 and not CHECK_ONLY:
        found = tl.load(bad_row)
        if found != NO_ROW:
            count = 0
            if tl.program_id(0) == 0:
                table = last_at_most(tables, num_tables, found, 4)
                where = found - tl.load(tables + table * 4)
                report(lock, record, BAD_GRADIENT, names, where, where, table, where, where, where)
    lr = tl.load(learning_rate)
    now = tl.load(step) + 1
    columns = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        group = tile * ROWS + tl.arange(0, ROWS)
        linear = tl.load(rows + group, mask=group < count, other=0)
        table = last_at_most(tables, num_tables, linear, 4)
        address = tl.load(addresses + table)
        ours = (group < count) & (address != 0)
        first = tl.load(starts + group, mask=ours, other=0)
        stop = tl.load(starts + group + 1, mask=ours, other=0)
        row = linear - tl.load(tables + table * 4)
        dim = tl.multiple_of(tl.load(tables + table * 4 + 2, mask=ours, other=0), STEP)
        mask = columns[None, :] < dim[:, None]
        long = stop - first > _PIECE
        g = _add_gradients(
            tl.zeros((ROWS, BLOCK), tl.float32), first, tl.where(long, first, stop), sources, scales, grad, dim,
            columns, max_gradient, GRAD_CODE, GRAD_STEP, CLAMPED, UNROLL,
        )  # fmt: skip
        place = pieces + _slot_of(first, first).to(tl.int64)[:, None] * BLOCK + columns[None, :]
        g += tl.load(place, mask=long[:, None] & (columns[None, :] >= 0), other=0.0)

        if NONFINITE != 0:
            # A value that is not finite times zero is NaN, and NaN is the only value that differs from itself.
            spread = tl.max((g * 0.0 != 0.0).to(tl.int32), 1) != 0
            if CHECK_ONLY:
                worst = tl.min(tl.where(ours & spread, linear, NO_ROW))
                if worst != NO_ROW:
                    tl.atomic_min(bad_row, worst)
            elif NONFINITE == 2:
                tl.atomic_add(skipped + table, tl.full((ROWS,), 1, tl.int64), mask=ours & spread)
                ours = ours & (spread == 0)
                mask = mask & ours[:, None]
                dim = tl.where(ours, dim, 0)
        if not CHECK_ONLY:
            offset = (row * dim)[:, None] + columns[None, :]
            address1 = tl.load(addresses1 + table, mask=ours, other=0)
            address2 = tl.load(addresses2 + table, mask=ours, other=0)
            weights = pointer_to(address, CODE, ALIGN)[:, None] + offset
            w = widen(tl.load(weights, mask=mask, other=0), CODE)
            state1 = _load_state(address1, row, offset, mask, dim, STATE1, STATE_ALIGN)
            state2 = _load_state(address2, row, offset, mask, dim, STATE2, STATE_ALIGN)
            w, state1, state2 = step_rows(
                w, state1, state2, g, tl.maximum(dim, 1).to(tl.float32), lr, constants, corrections, KIND, DECAY,
                LIMITED, ROWS, BLOCK,
            )  # fmt: skip
            if STOCHASTIC:
                seed = tl.load(tables + table * 4 + 3)
                bits = narrow_stochastic(w, random16(seed, row, now, ROWS, BLOCK), CODE)
            else:
                bits = narrow(w, CODE)
            tl.store(weights, bits, mask=mask)
            _store_state(address1, row, offset, mask, dim, state1, STATE1, STATE_ALIGN)
            _store_state(address2, row, offset, mask, dim, state2, STATE2, STATE_ALIGN)


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
    groups: tuple[Tensor, Tensor, Tensor, Tensor],
    layout: Layout,
) -> None:
    """Find bags, place the gradients, sum the pieces of long rows, update. Arguments as in the reference.

    A gradient that is not finite, where that must be raised, leaves every table as it was; it is raised at once where
    kernels are interpreted, and on a GPU by the next lookup or update, or by `check_errors`.
    """
    device, h = grad.device, Hyperparameters(*hyperparameters)
    poll(device)
    rows, starts, order, num_groups = groups
    num_entries, num_tables = rows.numel(), len(weights)
    batch_size, num_keys = batch_size_of(offsets, layout.key_starts), layout.key_starts.numel() - 1
    if num_entries == 0 or batch_size == 0:
        step += 1
        return
    grad, offsets = grad.contiguous(), offsets.contiguous()
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
        layout.multiplicity, layout.width,
        POOLED=layout.pooled, WEIGHTED=factors is not None, BLOCK=ENTRIES,
    )  # fmt: skip

    max_dim = max(weight.shape[1] for weight in weights)
    block = max(8, next_power_of_2(max_dim))  # eight elements share a counter of the random generator
    grad_step = alignment_of([grad], (weight.shape[1] for weight in weights)) // grad.element_size()
    common = {"CODE": CODES[grad.dtype], "STEP": grad_step, "CLAMPED": h.max_gradient < torch.inf, "BLOCK": block}
    windows = cdiv(num_entries, PIECE) if num_entries > PIECE else 0
    pieces = torch.empty(2 * windows * block, dtype=torch.float32, device=device)
    launch(
        _sum_pieces_kernel, (windows,), layout.tables, rows, starts, num_groups, sources, scales, bits_of(grad), pieces,
        num_tables, h.max_gradient, UNROLL=8, num_warps=warps_for(block), **common,
    )  # fmt: skip

    launch(
        _add_pieces_kernel, (windows,), starts, num_groups, pieces, BLOCK=block, UNROLL=8, num_warps=warps_for(block)
    )

    nonfinite = int(h.nonfinite)
    bad_row = torch.full((1,), NO_ROW_FOUND, dtype=torch.int64, device=device) if nonfinite == 1 else None
    args = (
        layout.tables, rows, starts, num_groups, sources, scales, bits_of(grad), pieces, learning_rate, step,
        _corrections(optimizer, h, step), on_device(constants_of(h), device, torch.float32), skipped, bad_row,
        *error_word(device), names_of(layout, device), num_tables, h.max_gradient,
    )  # fmt: skip
    pointers = [state.data_ptr() for state in states] + [0] * (2 * num_tables - len(states))
    kinds = [int(spec.per_element) + 1 for spec in OPTIMIZERS[optimizer].states] + [0, 0]
    for check_only in (True, False) if nonfinite == 1 else (False,):
        for tables, addresses in by_dtype(weights, device):
            align, dtype = alignment_of(tables), tables[0].dtype
            row_step = align // dtype.itemsize
            tile_rows = _tile_rows(optimizer, dtype, align, block)
            grid = (min(cdiv(num_entries, tile_rows), num_programs(device, 32)),)
            launch(
                _update_kernel, grid, addresses, on_device(pointers[:num_tables], device),
                on_device(pointers[num_tables:], device), *args,
                CODE=CODES[dtype], GRAD_CODE=common["CODE"], KIND=KINDS[optimizer], STATE1=kinds[0], STATE2=kinds[1],
                DECAY=int(h.weight_decay_mode) if h.weight_decay else 0, CLAMPED=common["CLAMPED"],
                LIMITED=h.max_norm < torch.inf, STOCHASTIC=bool(h.stochastic_rounding) and dtype != torch.float32,
                NONFINITE=nonfinite, CHECK_ONLY=check_only, ALIGN=align,
                STATE_ALIGN=math.gcd(16, 4 * row_step, *pointers), STEP=row_step, GRAD_STEP=grad_step, ROWS=tile_rows,
                BLOCK=block, UNROLL=2, num_warps=warps_for(block),
            )  # fmt: skip
    if bad_row is None:
        step += 1
    else:
        step += (bad_row[0] == NO_ROW_FOUND).to(step.dtype)
    if device.type != "cuda":
        poll(device)


NO_ROW_FOUND = 2**62


def warps_for(block: int) -> int:
    """Enough that a lane holds at most four elements of a row, if it can be."""
    return max(1, min(16, block // (4 * lanes())))


def _tile_rows(optimizer: str, dtype: torch.dtype, align: int, block: int) -> int:
    """Rows that a warp updates at once: as many elements a lane as its registers hold beside states and noise."""
    has_element_state = any(spec.per_element for spec in OPTIMIZERS[optimizer].states)
    per_lane = 4 if has_element_state else 16 if dtype == torch.float32 and align == 16 else 8
    return max(1, min(32, per_lane * lanes() // block))


def _corrections(optimizer: str, h: Hyperparameters, step: Tensor) -> Tensor | None:
    """float32 `[2]`: 1 - beta^t of Adam's two moments, for the step that comes; no host ever learns t."""
    if not issubclass(OPTIMIZERS[optimizer], Adam):
        return None
    betas = on_device([h.beta1, h.beta2], step.device, torch.float64)
    return (1 - torch.pow(betas, (step + 1).to(torch.float64))).to(torch.float32)


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
        parts = clamped[source, columns] * scale.unsqueeze(1)
        _add_in_pieces(total, group_of[entry], entry - starts[group_of[entry]].to(torch.int64), parts)
        rows.append(linear[mine] - first)
        gradients.append(total[mine])
    return rows, gradients


def _add_in_pieces(total: Tensor, group: Tensor, place: Tensor, parts: Tensor) -> None:
    """Add `parts` to the rows of `total` that `group` names: PIECE of a row's parts at a time, in order of `place`."""
    for piece in range(int(place.max()) // PIECE + 1 if place.numel() else 0):
        mine = place // PIECE == piece
        sums = torch.zeros_like(total)
        sums.index_add_(0, group[mine], parts[mine])
        total += sums


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
