"""One step of the nine optimizers on rows: in Triton, and by PyTorch's operators. Formulas: `tritonemb/optimizers.py`.

Divisions and roots are IEEE's and sums over a row have one order, so both are bitwise identical.
"""

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tritonemb.kernels.cpu.optimizers import power
from tritonemb.kernels.triton_utils import jit, next_power_of_2, row_sum, tl
from tritonemb.layout import (
    DIM,
    FIRST_ROW,
    ROW_DIM,
    TABLE,
    BatchGradient,
    FusedTables,
    Layout,
    TensorList,
    unpack_names,
)
from tritonemb.memory import empty_result
from tritonemb.optimizers import DECAY_MODES, KINDS, OPTIMIZERS, Custom, Hyperparameters, NonFinite, customs

SGD, ROW_WISE_ADAGRAD, ADAGRAD, ADAM, PARTIAL_ROW_WISE_ADAM, LAMB, PARTIAL_ROW_WISE_LAMB, LARS_SGD, FTRL = (
    tl.constexpr(KINDS[name]) for name in OPTIMIZERS
)
ASSIGN, PLACE = tl.constexpr(KINDS["assign"]), tl.constexpr(KINDS["place"])
_CONSTANTS = (*Hyperparameters._fields, "one_minus_beta1", "one_minus_beta2")
_READ = "weight_decay max_norm eps beta1 beta2 momentum eta beta l1 l2 one_minus_beta1 one_minus_beta2"
WEIGHT_DECAY, MAX_NORM, EPS, BETA1, BETA2, MOMENTUM, ETA, BETA, L1, L2, ONE_MINUS_BETA1, ONE_MINUS_BETA2 = (
    tl.constexpr(_CONSTANTS.index(name)) for name in _READ.split()
)
COW_CLIP, COW_CLIP_FLOOR = (tl.constexpr(_CONSTANTS.index(name)) for name in ("cow_clip", "cow_clip_floor"))
NONFINITE_MODES = get_args(NonFinite)
NO_DECAY, L2_DECAY, DECOUPLED_DECAY, RATIO_DECAY = (tl.constexpr(mode) for mode in range(len(DECAY_MODES)))


@jit
def _norm(x):
    """L2 norms `[ROWS]` of rows whose columns beyond their dim are zero."""
    return tl.sqrt_rn(row_sum(x * x))


@jit
def cow_clip_rows(g, w, counts, h):
    """Scale gradients `g` `[ROWS, BLOCK]` of rows `w` down to `counts` `[ROWS]` times the bound per occurrence."""
    norm, per_count, floor = _norm(g), tl.load(h + COW_CLIP) * _norm(w), tl.load(h + COW_CLIP_FLOOR)
    bound = counts.to(tl.float32) * tl.where(per_count > floor, per_count, floor)
    scale = tl.div_rn(bound, tl.where(norm > bound, norm, 1.0))
    return tl.where((norm > bound)[:, None], g * scale[:, None], g)


@jit
def _along_rows(value):
    """Reshape a value per row, `[ROWS]`, or one for all rows, to broadcast with `[ROWS, BLOCK]`."""
    if value.type.is_block():
        return value[:, None]
    else:
        return value


@jit
def _adam_rows(m, v, g, dim, h, corrections, ROW_WISE):
    """Return Adam's next moments and its direction; with ROW_WISE `v` has one value per row."""
    m = tl.load(h + BETA1) * m + tl.load(h + ONE_MINUS_BETA1) * g
    if ROW_WISE:
        v = tl.load(h + BETA2) * v + tl.load(h + ONE_MINUS_BETA2) * tl.div_rn(row_sum(g * g), dim)
        root = (tl.sqrt_rn(tl.div_rn(v, tl.load(corrections + 1))) + tl.load(h + EPS))[:, None]
    else:
        v = tl.load(h + BETA2) * v + tl.load(h + ONE_MINUS_BETA2) * (g * g)
        root = tl.sqrt_rn(tl.div_rn(v, _along_rows(tl.load(corrections + 1)))) + tl.load(h + EPS)
    return m, v, tl.div_rn(tl.div_rn(m, _along_rows(tl.load(corrections))), root)


@jit
def step_rows(w, state1, state2, g, dim, lr, h, corrections, KIND, DECAY, LIMITED):
    """Return rows `w` `[ROWS, BLOCK]` and their states, of that shape or `[ROWS]`, after one step.

    Columns beyond `dim` are zero. `h` points to `constants_of`, `corrections` to 1 - beta1^t and 1 - beta2^t, float32
    all; `corrections` is one pointer, or one per row, `[ROWS]`.
    """
    # Weight decay that is not part of a trust ratio.
    if DECAY == L2_DECAY:
        g = g + tl.load(h + WEIGHT_DECAY) * w
    if DECAY == DECOUPLED_DECAY:
        w = w * (1.0 - lr * tl.load(h + WEIGHT_DECAY))
    # The optimizer's step.
    if KIND == SGD:
        w = w - lr * g
    elif KIND == ASSIGN or KIND == PLACE:
        w = g
    elif KIND == ROW_WISE_ADAGRAD:
        state1 = state1 + tl.div_rn(row_sum(g * g), dim)
        w = w - tl.div_rn(lr, tl.sqrt_rn(state1) + tl.load(h + EPS))[:, None] * g
    elif KIND == ADAGRAD:
        state1 = state1 + g * g
        w = w - tl.div_rn(lr * g, tl.sqrt_rn(state1) + tl.load(h + EPS))
    elif KIND == LARS_SGD:
        weight_norm, norm = _norm(w), _norm(g)
        divisor = norm
        if DECAY == RATIO_DECAY:
            divisor = norm + tl.load(h + WEIGHT_DECAY) * weight_norm
            g = g + tl.load(h + WEIGHT_DECAY) * w
        safe_divisor = tl.where(divisor > 0, divisor, 1.0)
        rate = tl.where(divisor > 0, tl.div_rn(lr * tl.load(h + ETA) * weight_norm, safe_divisor), 0.0)
        state1 = tl.load(h + MOMENTUM) * state1 + rate[:, None] * g
        w = w - state1
    elif KIND == FTRL:
        next_state2 = state2 + g * g
        root = tl.sqrt_rn(next_state2)
        next_state1 = state1 + (g - tl.div_rn(root - tl.sqrt_rn(state2), lr) * w)
        shrunk_z = next_state1 - tl.where(next_state1 < 0, -tl.load(h + L1), tl.load(h + L1))
        next_w = tl.where(
            tl.abs(next_state1) <= tl.load(h + L1),
            0.0,
            tl.div_rn(-shrunk_z, tl.div_rn(tl.load(h + BETA) + root, lr) + tl.load(h + L2)),
        )
        w, state1, state2 = (
            tl.where(lr == 0.0, w, next_w),
            tl.where(lr == 0.0, state1, next_state1),
            tl.where(lr == 0.0, state2, next_state2),
        )
    else:
        ROW_WISE: tl.constexpr = KIND == PARTIAL_ROW_WISE_ADAM or KIND == PARTIAL_ROW_WISE_LAMB
        state1, state2, direction = _adam_rows(state1, state2, g, dim, h, corrections, ROW_WISE)
        if KIND == LAMB or KIND == PARTIAL_ROW_WISE_LAMB:
            if DECAY == RATIO_DECAY:
                direction = direction + tl.load(h + WEIGHT_DECAY) * w
            weight_norm, norm = _norm(w), _norm(direction)
            is_positive = (weight_norm > 0) & (norm > 0)
            ratio = tl.where(is_positive, tl.div_rn(weight_norm, tl.where(is_positive, norm, 1.0)), 1.0)
            w = w - (lr * ratio)[:, None] * direction
        else:
            w = w - lr * direction
    # Scale rows down to max_norm.
    if LIMITED:
        w_norm = _norm(w)
        scale = tl.where(
            w_norm > tl.load(h + MAX_NORM), tl.div_rn(tl.load(h + MAX_NORM), tl.where(w_norm > 0, w_norm, 1.0)), 1.0
        )
        w = tl.where((w_norm > tl.load(h + MAX_NORM))[:, None], w * scale[:, None], w)
    return w, state1, state2


def constants_of(h: Hyperparameters) -> list[float]:
    """Return an optimizer's constants as kernels read them: its hyperparameters, 1 - beta1 and 1 - beta2."""
    return [*h, 1 - h.beta1, 1 - h.beta2]


def cow_clip_by_torch(g: Tensor, w: Tensor, counts: Tensor, h: Hyperparameters) -> Tensor:
    """Return the gradients `g` `[R, dim]` of rows `w`, which occur `counts` `[R]` times, after `cow_clip`."""
    norm, per_count = _norm_by_torch(g), h.cow_clip * _norm_by_torch(w)
    floor = torch.full_like(per_count, h.cow_clip_floor)
    bound = counts.to(g.dtype).unsqueeze(1) * torch.where(per_count > floor, per_count, floor)
    return torch.where(norm > bound, g * (bound / norm), g)


def step_by_torch(
    optimizer: str, w: Tensor, states: list[Tensor], g: Tensor, lr: Tensor, t: int | Tensor, h: Hyperparameters,
    mean_of_squares: Tensor | None = None, table: str = "",
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return rows `w` `[R, dim]` of `table` and their states, `[R, dim]` or `[R, 1]`, after step `t` by gradients `g`.

    `mean_of_squares` `[R, 1]`: mean over the full row's gradient, decay included, if `w` is a column-wise shard.
    """
    # Weight decay that is not part of a trust ratio.
    decay, mode = h.weight_decay, DECAY_MODES[int(h.weight_decay_mode)]
    if not w.shape[0]:
        return w, states
    if decay and mode == "l2":
        g = g + decay * w
    if decay and mode == "decoupled":
        w = w * (1 - lr * decay)
    # The optimizer's step.
    if optimizer in customs:
        w, states = _step_by_user(customs[optimizer], w, states, g, lr, torch.as_tensor(t, device=w.device), table)
    elif optimizer == "sgd":
        w = w - lr * g
    elif optimizer == "row_wise_adagrad":
        states = [states[0] + _mean_of_squares(g, mean_of_squares)]
        w = w - lr / (_sqrt(states[0]) + h.eps) * g
    elif optimizer == "adagrad":
        states = [states[0] + g.square()]
        w = w - lr * g / (_sqrt(states[0]) + h.eps)
    elif optimizer == "lars_sgd":
        decay = decay if mode == "trust_ratio" else 0.0
        weight_norm, norm = _norm_by_torch(w), _norm_by_torch(g)
        divisor = norm + decay * weight_norm
        adjusted = torch.where(divisor > 0, lr * h.eta * weight_norm / divisor, 0.0)
        states = [h.momentum * states[0] + adjusted * (g + decay * w)]
        w = w - states[0]
    elif optimizer == "ftrl":
        if float(lr) != 0.0:  # the formula divides by lr
            z, n = states
            next_n = n + g.square()
            z = z + (g - (_sqrt(next_n) - _sqrt(n)) / lr * w)
            shrunk_z = z - torch.copysign(torch.full_like(z, h.l1), z)
            w = torch.where(z.abs() <= h.l1, 0.0, -shrunk_z / ((h.beta + _sqrt(next_n)) / lr + h.l2))
            states = [z, next_n]
    else:
        spec = OPTIMIZERS[optimizer]
        assert spec.corrects_bias
        square = g.square() if spec.states[1].per_element else _mean_of_squares(g, mean_of_squares)
        m = h.beta1 * states[0] + (1 - h.beta1) * g
        v = h.beta2 * states[1] + (1 - h.beta2) * square
        states = [m, v]
        # Divisors are tensors: on a GPU PyTorch divides by a number as a product with its rounded reciprocal.
        correct1, correct2 = (w.new_tensor(1 - power.py_func(beta, t)) for beta in (h.beta1, h.beta2))
        direction = m / correct1 / (_sqrt(v / correct2) + h.eps)
        if spec.trust_ratio_decay:
            if mode == "trust_ratio":
                direction = direction + decay * w
            weight_norm, norm = _norm_by_torch(w), _norm_by_torch(direction)
            lr = lr * torch.where((weight_norm > 0) & (norm > 0), weight_norm / norm, 1.0)
        w = w - lr * direction
    if h.max_norm < torch.inf:
        norm = _norm_by_torch(w)
        # The dividend is a tensor: PyTorch divides a number as a product with the tensor's rounded reciprocal.
        w = torch.where(norm > h.max_norm, w * (torch.full_like(norm, h.max_norm) / norm), w)
    return w, states


def _step_by_user(
    spec: Custom, w: Tensor, states: list[Tensor], g: Tensor, lr: Tensor, t: Tensor, table: str
) -> tuple[Tensor, list[Tensor]]:
    """Call a user's step function. `t` is one step number, `[]`, or one per row, `[R]`."""
    step, rows, pairs = spec.step, w, zip(spec.states, states, strict=True)
    user_states = {spec_state.name: s if spec_state.per_element else s[:, 0] for spec_state, s in pairs}
    if t.dim():  # each row as a batch of one
        step, rows, g = torch.vmap(step, (0, 0, 0, None, 0)), w.unsqueeze(1), g.unsqueeze(1)
        user_states = {name: state.unsqueeze(1) for name, state in user_states.items()}
    describe = partial(tree_map, lambda x: (x.dtype, x.shape, x.device) if isinstance(x, Tensor) else type(x).__name__)
    expected, context = describe((rows, user_states)), f"table {table!r}, all tables are unchanged: Custom's step"
    try:
        result = step(rows, user_states, g, lr.clone(), t.clone())
    except Exception as error:
        raise RuntimeError(f"{context} raised {type(error).__name__}: {error}") from error
    if describe(result) != expected:
        raise ValueError(f"{context} must return rows and states {expected}, got {describe(result)}")
    new_states = (result[1][spec_state.name] for spec_state in spec.states)
    return result[0].reshape(w.shape), [state.reshape(w.shape[0], -1) for state in new_states]


def update_by_user_(
    row_update_: Callable[..., None], embedding_bag: Callable[..., Tensor], elements_per_call: int | None,
    fused: FusedTables, batch: BatchGradient,
) -> None:  # fmt: skip
    """Apply a `Custom` optimizer: sum gradients, look up rows, call its function, and write once all calls are done.

    `elements_per_call`: rows times dim of a call of the function on the CPU; None on a GPU, whose host does not know
    the number of rows: one call per dim, for all `N` entries of `rows`.
    """
    weights, states, step, skipped, learning_rate, optimizer, hyperparameters = fused
    (grad, _, _, (rows, group_starts, _, num_groups), layout), num_tables = batch, len(weights)
    h, rows = Hyperparameters(*hyperparameters), rows if elements_per_call is None else rows[: int(num_groups)]
    if not (size := rows.numel()):
        step += 1
        return
    # Tables and ids of the rows. Padding is sorted after all rows and belongs to the last table.
    indices = torch.arange(size + 1, device=grad.device, dtype=torch.int32)
    rows = rows.where(indices[:-1] < num_groups, layout.num_rows)
    first_rows, row_dims = layout.tables[:, FIRST_ROW].contiguous(), layout.tables[:, ROW_DIM]
    table_offsets = torch.cat([torch.searchsorted(rows, first_rows), indices[-1:]])
    tables = torch.searchsorted(first_rows, rows, right=True) - 1
    ids = rows - first_rows[tables]
    # All weights, all first states, all second states: as matrices, with a layout that looks their rows up.
    matrices = [tensor if tensor.dim() > 1 else tensor.unsqueeze(1) for tensor in (*weights, *states)]
    families = [TensorList(matrices[first : first + num_tables]) for first in range(0, len(matrices), num_tables)]
    layouts = [_layout_of_rows(layout, max(matrix.shape[1] for matrix in family)) for family in families]

    # Sum gradients. A GPU does not write sums of skipped rows and of padding: they stay infinite, and are masked below.
    dims, skip_nonfinite = [weight.shape[1] for weight in weights], NONFINITE_MODES[int(h.on_nonfinite)] == "skip"
    sums = {dim: empty_result((size, dim), torch.float32, grad.device) for dim in dict.fromkeys(dims)}
    for dim_sums in sums.values() if elements_per_call is None else ():
        dim_sums.fill_(torch.inf)
    next_step, next_skipped = step.clone(), skipped.clone()
    place = Hyperparameters(max_gradient=h.max_gradient, on_nonfinite=h.on_nonfinite)
    targets = [sums[dim] for dim in dims]
    row_update_(FusedTables(targets, [], next_step, next_skipped, learning_rate, "place", place), batch)

    def look_up(begin: int, end: int, dim: int) -> list[Tensor]:
        ids_and_offsets = ids[begin:end], table_offsets.clamp(begin, end) - begin, None
        row_layouts = [row_layout._replace(width=min(dim, row_layout.width)) for row_layout in layouts]
        return [
            embedding_bag(family, *ids_and_offsets, at, False) for family, at in zip(families, row_layouts, strict=True)
        ]

    # Calls (begin, end, first table): one per dim, or blocks of rows of tables with one dim and step.
    if elements_per_call is None:
        results = look_up(0, size, max(dims))
        t = [next_step[tables] if next_step.dim() else next_step] * num_tables
        calls = [(0, size, dims.index(dim)) for dim in sums]
    else:
        results = [empty_result((size, row_layout.width), torch.float32) for row_layout in layouts]
        results[:1] = [*sums.values()] if len(sums) == 1 else results[:1]  # a call may overwrite its gradients
        t = next_step.expand(num_tables).tolist()
        kinds, firsts = [*zip(dims, t, strict=True)], table_offsets[:-1].tolist()
        changes = [first for table, first in enumerate(firsts) if first < size and kinds[table] != kinds[table - 1]]
        starts = sorted({*range(0, size, max(1, elements_per_call // max(dims))), *changes})
        calls = [*zip(starts, [*starts[1:], size], tables[starts].tolist(), strict=True)]
    for begin, end, table in calls:
        dim, update_mask, name = dims[table], None, unpack_names(layout.table_names)[table]
        out, g = [values[begin:end, :dim] for values in results], sums[dim][begin:end]
        current = inputs = out if elements_per_call is None else look_up(begin, end, dim)
        if elements_per_call is None or (skip_nonfinite and not bool(g.isfinite().all())):
            is_updated = (row_dims[tables[begin:end]] == dim) & (g.isfinite().all(1) | (not skip_nonfinite))
            update_mask = is_updated.unsqueeze(1)
            inputs = [values.clone() for values in current]
        if h.cow_clip < torch.inf:
            g = cow_clip_by_torch(g, inputs[0], group_starts[begin : end + 1].diff(), h)
        w, new_states = step_by_torch(optimizer, inputs[0], inputs[1:], g, learning_rate, t[table], h, table=name)
        # Weights last: they may overwrite `g`, which the function may have returned as a state.
        for target, values, old_values in zip(out[::-1], [*new_states[::-1], w], current[::-1], strict=True):
            target.copy_(values if update_mask is None else values.where(update_mask, old_values))

    # Write all rows, or none if the sums were refused (the step did not advance).
    groups = rows, indices, indices[:-1], torch.where((next_step > step).any(), num_groups, 0)
    assign = Hyperparameters(stochastic_rounding=h.stochastic_rounding)
    for family, values, row_layout in zip(families, results, layouts, strict=True):
        counters = step.clone(), skipped.clone()
        row_update_(
            FusedTables(family, [], *counters, learning_rate, "assign", assign),
            BatchGradient(values, table_offsets, None, groups, row_layout),
        )
    step.copy_(next_step)
    skipped.copy_(next_skipped)


def _layout_of_rows(layout: Layout, width: int) -> Layout:
    """Return a layout that looks up rows of all tables, or of states of this width: one sample, not pooled."""
    tables, numbers = layout.tables.clone(), torch.arange(layout.tables.shape[0] + 1, device=layout.tables.device)
    tables[:, ROW_DIM].clamp_(max=width)
    lookups = torch.zeros_like(tables[:, :4])
    lookups[:, TABLE], lookups[:, DIM] = numbers[:-1], tables[:, ROW_DIM]
    return Layout(tables, lookups, numbers, layout.table_names, "", 1, layout.num_rows, width, False)


def _sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded root: torch's float32 root may be off by a unit in the last place."""
    return x.double().sqrt().to(x.dtype)


def row_sum_by_torch(x: Tensor) -> Tensor:
    """Sum over the last dimension in the order of `row_sum`: `[..., D]` to `[..., 1]`."""
    x = torch.nn.functional.pad(x, (0, next_power_of_2(x.shape[-1]) - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def _norm_by_torch(x: Tensor) -> Tensor:
    return _sqrt(row_sum_by_torch(x * x))


def _mean_of_squares(x: Tensor, mean_of_squares: Tensor | None) -> Tensor:
    return row_sum_by_torch(x * x) / x.shape[1] if mean_of_squares is None else mean_of_squares
