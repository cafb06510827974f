"""The fused update: one program per row sums its gradients in a fixed order and applies the optimizer once, in place.

A row's gradients are summed as in `kernels/gradient_sums.py`. Then one step of the optimizer, whose formula and source
are in `tritonemb/optimizers.py`, in float32; 16-bit rows are rounded back as in `kernels/random.py`.
Bytes: `4 · dim` of gradient read per position; weight and state read and written per distinct row.

`row_gradients_` writes each row's sum to an ordinary tensor: `out[index(g)] = Σ_p scale_p · grad_p` over the positions
`p` of group `g`. `index(g)` is the row (a dense gradient), or the rank of `g` among its table's groups (compact: the
values of a sparse gradient). Rows without a group are not written: the caller passes zeros.
Bytes: `4 · dim` of gradient read per position, `4 · dim` read and written per distinct row.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.kernels.by_torch import row_gradients_ as row_gradients_reference_  # noqa: F401
from tritonemb.kernels.by_torch import row_update_ as row_update_reference_  # noqa: F401
from tritonemb.kernels.gradient_sums import (
    NO_BAD_ROW,
    NO_BAD_ROW_VALUE,
    PIECE_SIZE,
    add_gradients,
    add_spans,
    locate_gradients,
    warps_for,
)
from tritonemb.kernels.optimizers import NONFINITE_MODES, PLACE, constants_of, cow_clip_rows, step_rows
from tritonemb.kernels.random import narrow_stochastic, random16
from tritonemb.kernels.triton_utils import (
    BAD_GRADIENT,
    CODES,
    COLUMN_ORIGIN,
    FIRST_ROW,
    FLOAT32,
    ROW_DIM,
    ROW_ORIGIN,
    SEED,
    alignment_of,
    by_dtype,
    cdiv,
    dims_of,
    error_args,
    field_at,
    jit,
    lanes,
    launch,
    narrow,
    next_power_of_2,
    note_skipped,
    num_programs,
    on_device,
    pointer_to,
    poll,
    report,
    row_id,
    table_of,
    tl,
    widen,
)
from tritonemb.layout import TABLE_SIZE, BatchGradient, FusedTables, TableRow, cached_fact
from tritonemb.optimizers import KINDS, OPTIMIZERS, SGD, Hyperparameters, Optimizer

RAISE = NONFINITE_MODES.index("raise")
NO_STATE, ROW_STATE, ELEMENT_STATE = (tl.constexpr(kind) for kind in range(3))


@jit
def _load_state(address, position, KIND, ALIGN):
    """Load rows of a state, `[ROWS, BLOCK]`, or `[ROWS]` for one value per row; zeros without a state."""
    row, offset, mask, dim = position
    if KIND == ELEMENT_STATE:
        return tl.load(pointer_to(address, FLOAT32, ALIGN)[:, None] + offset, mask=mask, other=0.0)
    elif KIND == ROW_STATE:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + row, mask=dim > 0, other=0.0)
    else:
        return tl.zeros_like(dim).to(tl.float32)


@jit
def _store_state(address, position, state, KIND, ALIGN):
    row, offset, mask, dim = position
    if KIND == ELEMENT_STATE:
        tl.store(pointer_to(address, FLOAT32, ALIGN)[:, None] + offset, state, mask=mask, cache_modifier=".cs")
    elif KIND == ROW_STATE:
        tl.store(address.to(tl.pointer_type(tl.float32)) + row, state, mask=dim > 0)


@jit
def _update_kernel(
    addresses, tables, groups, gradients, spans, optimizer, skipped, status, errors, num_tables, CODE, GRAD_CODE, KIND,
    STATE1, STATE2, DECAY, LIMITED, STOCHASTIC, NONFINITE, CHECK_ONLY, TABLE_STEPS, ALIGN, STATE_ALIGN, STEP, GRAD_STEP,
    ROWS, BLOCK, UNROLL, COW_CLIP,
):  # fmt: skip
    """Update tiles of ROWS groups, one tile per program and round: sum gradients, step, store.

    NONFINITE 1 ("raise"): a first pass, CHECK_ONLY, writes the lowest row with a gradient that is not finite to
    `status[1]`; the second pass reports it and changes nothing. NONFINITE 2 ("skip"): such rows are counted in
    `skipped`, and noted. TABLE_STEPS: `step` and `corrections` have an entry per table.
    """
    rows, starts, num_groups = groups
    learning_rate, step, corrections, constants = optimizer
    addresses, addresses1, addresses2 = addresses
    # Report the bad row of the first pass, and stop.
    count = tl.load(num_groups).to(tl.int32)
    if NONFINITE == 1 and not CHECK_ONLY:
        bad_row = tl.load(status + 1)
        if bad_row != NO_BAD_ROW:
            count = 0
            if tl.program_id(0) == 0:
                table = table_of(tables, num_tables, bad_row)
                id = row_id(tables, table, bad_row - tl.load(field_at(tables, table, FIRST_ROW)), bad_row != NO_BAD_ROW)
                report(errors, BAD_GRADIENT, (id, id, table, id, id, id))
    lr = tl.load(learning_rate)
    step_now = tl.load(step)
    columns = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        # Rows, entries and dims of the tile's groups; groups of tables of other dtypes are masked.
        group = tile * ROWS + tl.arange(0, ROWS)
        linear = tl.load(rows + group, mask=group < count, other=0)
        table = table_of(tables, num_tables, linear)
        address = tl.load(addresses + table)
        valid = (group < count) & (address != 0)
        first = tl.load(starts + group, mask=valid, other=0)
        stop = tl.load(starts + group + 1, mask=valid, other=0)
        row = linear - tl.load(field_at(tables, table, FIRST_ROW))
        if KIND == PLACE:
            row = group.to(tl.int64)
        # A 64-bit dim would cost registers in every mask, and on AMD wide loads.
        dim = tl.multiple_of(tl.load(field_at(tables, table, ROW_DIM), mask=valid, other=0).to(tl.int32), STEP)
        mask = columns[None, :] < dim[:, None]
        # Load weights and states first: they are in flight while gradients are summed.
        if not CHECK_ONLY:
            offset = (row * dim)[:, None] + columns[None, :]
            address1 = tl.load(addresses1 + table, mask=valid, other=0)
            address2 = tl.load(addresses2 + table, mask=valid, other=0)
            weights = pointer_to(address, CODE, ALIGN)[:, None] + offset
            row_bits = tl.load(weights, mask=mask, other=0)
            state1 = _load_state(address1, (row, offset, mask, dim), STATE1, STATE_ALIGN)
            state2 = _load_state(address2, (row, offset, mask, dim), STATE2, STATE_ALIGN)
        # Sum the gradients of short rows; add the spans of long ones.
        g, short_stop = tl.zeros((ROWS, BLOCK), tl.float32), tl.where(stop - first > PIECE_SIZE, first, stop)
        g = add_gradients(g, first, short_stop, gradients, dim, columns, GRAD_CODE, GRAD_STEP, UNROLL)
        g = add_spans(g, spans, group, stop - first, columns, BLOCK, UNROLL)

        if NONFINITE != 0:
            # Find, count or skip rows that are not finite: times zero they are NaN, and only NaN differs from zero.
            is_nonfinite = tl.max((g * 0.0 != 0.0).to(tl.int32), 1) != 0
            if CHECK_ONLY:
                lowest_bad = tl.min(tl.where(valid & is_nonfinite, linear, NO_BAD_ROW))
                if lowest_bad != NO_BAD_ROW:
                    tl.atomic_min(status + 1, lowest_bad)
            elif NONFINITE == 2:
                tl.atomic_add(skipped + table, tl.full((ROWS,), 1, tl.int64), mask=valid & is_nonfinite)
                note_skipped(errors, table, valid & is_nonfinite)
                valid = valid & (is_nonfinite == 0)
                mask = mask & valid[:, None]
                dim = tl.where(valid, dim, 0)
        # Step, and round.
        if not CHECK_ONLY:
            table_corrections = corrections
            if TABLE_STEPS and corrections is not None:
                table_corrections = corrections + table * 2
            w, divisor = widen(row_bits, CODE), tl.maximum(dim, 1).to(tl.float32)
            if COW_CLIP:
                g = cow_clip_rows(g, w, stop - first, constants)
            w, state1, state2 = step_rows(
                w, state1, state2, g, divisor, lr, constants, table_corrections, KIND, DECAY, LIMITED
            )
            if STOCHASTIC:
                row_step = step_now
                if TABLE_STEPS:
                    row_step = tl.load(step + table)
                global_row = row_id(tables, table, row, valid) + tl.load(field_at(tables, table, ROW_ORIGIN))
                seed, column = tl.load(field_at(tables, table, SEED)), tl.load(field_at(tables, table, COLUMN_ORIGIN))
                noise = random16(seed, global_row, column, row_step, BLOCK)
                bits = narrow_stochastic(w, noise, CODE)
            else:
                bits = narrow(w, CODE)
            if STATE1 == ROW_STATE or STATE2 == ROW_STATE:
                tl.debug_barrier()  # one warp writes a row's value of state after all its warps have read it
            # Stores are streamed: no other program reads the row, while a bag's gradient is read once per id.
            tl.store(weights, bits, mask=mask, cache_modifier=".cs")
            _store_state(address1, (row, offset, mask, dim), state1, STATE1, STATE_ALIGN)
            _store_state(address2, (row, offset, mask, dim), state2, STATE2, STATE_ALIGN)


def row_update_(fused: FusedTables, batch: BatchGradient) -> None:
    """Locate the gradients, sum the spans of long rows, update. Arguments as in the reference.

    On a GPU the next lookup or update, or `check_errors`, raises for a gradient that is not finite; no table changes.
    """
    weights, states, caller_step, skipped, learning_rate, optimizer, hyperparameters = fused
    grad, offsets, layout = batch.grad.contiguous(), batch.offsets.contiguous(), batch.layout
    device, h, spec = grad.device, Hyperparameters(*hyperparameters), OPTIMIZERS.get(optimizer, Optimizer)
    assert caller_step.dim() == 0 or caller_step.shape == (len(weights),)
    poll(device)
    rows, starts, _, num_groups = batch.groups
    if rows.numel() == 0 or batch_size_of(offsets, layout.key_starts) == 0:
        caller_step += 1
        return
    # Locate gradients, sum long rows, increment steps.
    dims = cached_fact(weights, dims_of)
    block = max(8, next_power_of_2(max(dims)))  # eight elements share a random counter
    grad_step = alignment_of([grad], dims) // grad.element_size()
    on_nonfinite, step = int(h.on_nonfinite), caller_step.contiguous()
    betas = on_device([h.beta1, h.beta2], device, torch.float64) if spec.corrects_bias else None
    gradients, spans, status, corrections = locate_gradients(
        batch._replace(grad=grad, offsets=offsets), h.max_gradient, block, grad_step, step, betas, on_nonfinite != RAISE
    )
    # One launch per dtype, or two with on_nonfinite="raise", whose first only looks.
    constants = on_device(constants_of(h), device, torch.float32)
    step_args = learning_rate, step, corrections, constants
    args = (rows, starts, num_groups), gradients, spans, step_args, skipped, status, error_args(layout, device)
    *pointers, state_align = cached_fact(states, _pointers_to_states, len(weights))
    kinds = [int(state.per_element) + 1 for state in spec.states] + [0, 0]
    for check_only in (True, False) if on_nonfinite == RAISE else (False,):
        if on_nonfinite == RAISE and not check_only:
            step += status[1] == NO_BAD_ROW_VALUE
        for dtype, addresses, align, *_ in cached_fact(weights, by_dtype):
            row_step = align // dtype.itemsize
            tile_rows, num_warps = _tile_rows(optimizer, dtype, align, block), warps_for(block)
            grid = (min(cdiv(rows.numel(), tile_rows), num_programs(device, num_warps)),)
            launch(
                _update_kernel, grid, tuple(on_device(numbers, device) for numbers in (addresses, *pointers)),
                layout.tables, *args, len(weights), CODE=CODES[dtype], GRAD_CODE=CODES[grad.dtype],
                KIND=KINDS[optimizer], STATE1=kinds[0], STATE2=kinds[1], LIMITED=h.max_norm < torch.inf,
                DECAY=int(h.weight_decay_mode) if h.weight_decay else 0, NONFINITE=on_nonfinite, CHECK_ONLY=check_only,
                STOCHASTIC=bool(h.stochastic_rounding) and dtype != torch.float32, TABLE_STEPS=step.dim() == 1,
                ALIGN=align, STATE_ALIGN=math.gcd(state_align, 4 * row_step), STEP=row_step, GRAD_STEP=grad_step,
                ROWS=tile_rows, BLOCK=block, UNROLL=min(8, 32 * num_warps * lanes() // (tile_rows * block)),
                COW_CLIP=h.cow_clip < torch.inf, num_warps=num_warps,
            )  # fmt: skip
    if step is not caller_step:
        caller_step.copy_(step)
    if device.type != "cuda":
        poll(device)


def _pointers_to_states(states: Sequence[Tensor], num_tables: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the addresses of the tables' first and second states, 0 without one, and the alignment of all."""
    pointers = (*map(Tensor.data_ptr, states), *(0,) * (2 * num_tables - len(states)))
    return pointers[:num_tables], pointers[num_tables:], math.gcd(16, *pointers)


def _tile_rows(optimizer: str, dtype: torch.dtype, align: int, block: int) -> int:
    """Return the rows per tile: as many elements per lane as its registers hold beside states and noise."""
    # With more elements LAMB, Adam and FTRL spill registers on sm_80; see docs/kernels.md, row_update.
    has_element_state = any(spec.per_element for spec in OPTIMIZERS.get(optimizer, Optimizer).states)
    per_lane = 4 if has_element_state else 16 if dtype == torch.float32 and align == 16 else 8
    return max(1, min(32, per_lane * lanes() // block))


_PLAIN_SGD = SGD(stochastic_rounding=False, on_nonfinite="ignore")


def row_gradients_(
    sums: Sequence[Tensor], batch: BatchGradient, compact: bool = False, max_gradient: float = math.inf
) -> None:
    """Sum each row's gradients by SGD from zero with learning rate -1. Arguments as in the reference."""
    device = batch.grad.device
    if all(out.numel() == 0 for out in sums):
        return
    if compact:
        ends = [0, *accumulate(out.shape[0] for out in sums)]
        tables = [TableRow(first, *out.shape) for first, out in zip(ends, sums, strict=False)]
        recurs = len(tables) == 1  # always the same numbers, which are uploaded once
        fields = on_device(tables[0], device) if recurs else torch.tensor(tables, dtype=torch.int64, device=device)
        groups = torch.arange(batch.groups[0].numel(), device=device), *batch.groups[1:]
        layout = batch.layout._replace(tables=fields.view(-1, TABLE_SIZE), num_rows=ends[-1])
        batch = batch._replace(groups=groups, layout=layout)
    step, skipped = torch.zeros(1 + len(sums), dtype=torch.int64, device=device).split([1, len(sums)])
    constants = _PLAIN_SGD.hyperparameters._replace(max_gradient=max_gradient)
    rate = torch.full((), -1.0, dtype=torch.float32, device=device)
    row_update_(FusedTables([*sums], [], step[0], skipped, rate, _PLAIN_SGD.name, constants), batch)
