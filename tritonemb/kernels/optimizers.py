"""The nine optimizers on rows, one step: in Triton, and by PyTorch's operators. Formulas: `tritonemb/optimizers.py`.

Divisions and roots are IEEE's and sums over a row have one order, so both give the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tritonemb import errors
from tritonemb.kernels.cpu.optimizers import power
from tritonemb.kernels.triton_utils import jit, row_sum, row_sum_by_torch, tl
from tritonemb.layout import DIM, FIRST_ROW, ROW_DIM, TABLE, Layout, TableRow, TensorList, unpack_names
from tritonemb.memory import empty_result
from tritonemb.optimizers import DECAY_MODES, KINDS, OPTIMIZERS, Custom, Hyperparameters, NonFinite, customs

SGD, ROW_WISE_ADAGRAD, ADAGRAD, ADAM, PARTIAL_ROW_WISE_ADAM, LAMB, PARTIAL_ROW_WISE_LAMB, LARS_SGD, FTRL = (
    tl.constexpr(KINDS[name]) for name in OPTIMIZERS
)
ASSIGN, PLACE = tl.constexpr(KINDS["assign"]), tl.constexpr(KINDS["place"])
_CONSTANTS = (*Hyperparameters._fields, "rest1", "rest2")
_READ = ["weight_decay", "max_norm", "eps", "beta1", "beta2", "momentum", "eta", "beta", "l1", "l2", "rest1", "rest2"]
WEIGHT_DECAY, MAX_NORM, EPS, BETA1, BETA2, MOMENTUM, ETA, BETA, L1, L2, REST1, REST2 = (
    tl.constexpr(_CONSTANTS.index(name)) for name in _READ
)
NONFINITE_MODES = get_args(NonFinite)
NO_DECAY, L2_DECAY, DECOUPLED_DECAY, RATIO_DECAY = (tl.constexpr(mode) for mode in range(len(DECAY_MODES)))


@jit
def _norm(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """L2 norms `[ROWS]` of rows whose columns beyond their dim are zero."""
    return tl.sqrt_rn(row_sum(x * x, ROWS, BLOCK))


@jit
def _along_rows(value):
    """A value of each row, `[ROWS]`, or of all rows, as it meets `[ROWS, BLOCK]`."""
    if value.type.is_block():
        return value[:, None]
    else:
        return value


@jit
def _adam_rows(m, v, g, dim, h, corrections, ROW_WISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.load(h + BETA1) * m + tl.load(h + REST1) * g
    if ROW_WISE:
        v = tl.load(h + BETA2) * v + tl.load(h + REST2) * tl.div_rn(row_sum(g * g, ROWS, BLOCK), dim)
        root = (tl.sqrt_rn(tl.div_rn(v, tl.load(corrections + 1))) + tl.load(h + EPS))[:, None]
    else:
        v = tl.load(h + BETA2) * v + tl.load(h + REST2) * (g * g)
        root = tl.sqrt_rn(tl.div_rn(v, _along_rows(tl.load(corrections + 1)))) + tl.load(h + EPS)
    return m, v, tl.div_rn(tl.div_rn(m, _along_rows(tl.load(corrections))), root)


@jit
def step_rows(
    w, state1, state2, g, dim, lr, h, corrections, KIND: tl.constexpr, DECAY: tl.constexpr, LIMITED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step for rows `w` `[ROWS, BLOCK]` with states of that shape or `[ROWS]`; columns beyond `dim` are zero.

    `h` points to what `constants_of` lists, `corrections` to 1 - beta1^t and 1 - beta2^t, all float32; there may be a
    pointer for each row, `[ROWS]`, to corrections of its own.
    """
    if DECAY == L2_DECAY:
        g = g + tl.load(h + WEIGHT_DECAY) * w
    if DECAY == DECOUPLED_DECAY:
        w = w * (1.0 - lr * tl.load(h + WEIGHT_DECAY))
    if KIND == SGD:
        w = w - lr * g
    elif KIND == ASSIGN or KIND == PLACE:
        w = g
    elif KIND == ROW_WISE_ADAGRAD:
        state1 = state1 + tl.div_rn(row_sum(g * g, ROWS, BLOCK), dim)
        w = w - tl.div_rn(lr, tl.sqrt_rn(state1) + tl.load(h + EPS))[:, None] * g
    elif KIND == ADAGRAD:
        state1 = state1 + g * g
        w = w - tl.div_rn(lr * g, tl.sqrt_rn(state1) + tl.load(h + EPS))
    elif KIND == LARS_SGD:
        weight_norm, norm = _norm(w, ROWS, BLOCK), _norm(g, ROWS, BLOCK)
        divisor = norm
        if DECAY == RATIO_DECAY:
            divisor = norm + tl.load(h + WEIGHT_DECAY) * weight_norm
            g = g + tl.load(h + WEIGHT_DECAY) * w
        safe = tl.where(divisor > 0, divisor, 1.0)
        rate = tl.where(divisor > 0, tl.div_rn(lr * tl.load(h + ETA) * weight_norm, safe), 0.0)
        state1 = tl.load(h + MOMENTUM) * state1 + rate[:, None] * g
        w = w - state1
    elif KIND == FTRL:
        grown = state2 + g * g
        root = tl.sqrt_rn(grown)
        z = state1 + (g - tl.div_rn(root - tl.sqrt_rn(state2), lr) * w)
        shrunk = z - tl.where(z < 0, -tl.load(h + L1), tl.load(h + L1))
        moved = tl.where(
            tl.abs(z) <= tl.load(h + L1),
            0.0,
            tl.div_rn(-shrunk, tl.div_rn(tl.load(h + BETA) + root, lr) + tl.load(h + L2)),
        )
        w, state1, state2 = (
            tl.where(lr == 0.0, w, moved),
            tl.where(lr == 0.0, state1, z),
            tl.where(lr == 0.0, state2, grown),
        )
    else:
        ROW_WISE: tl.constexpr = KIND == PARTIAL_ROW_WISE_ADAM or KIND == PARTIAL_ROW_WISE_LAMB
        state1, state2, direction = _adam_rows(state1, state2, g, dim, h, corrections, ROW_WISE, ROWS, BLOCK)
        if KIND == LAMB or KIND == PARTIAL_ROW_WISE_LAMB:
            if DECAY == RATIO_DECAY:
                direction = direction + tl.load(h + WEIGHT_DECAY) * w
            weight_norm, norm = _norm(w, ROWS, BLOCK), _norm(direction, ROWS, BLOCK)
            good = (weight_norm > 0) & (norm > 0)
            ratio = tl.where(good, tl.div_rn(weight_norm, tl.where(good, norm, 1.0)), 1.0)
            w = w - (lr * ratio)[:, None] * direction
        else:
            w = w - lr * direction
    if LIMITED:
        length = _norm(w, ROWS, BLOCK)
        shrink = tl.where(
            length > tl.load(h + MAX_NORM), tl.div_rn(tl.load(h + MAX_NORM), tl.where(length > 0, length, 1.0)), 1.0
        )
        w = tl.where((length > tl.load(h + MAX_NORM))[:, None], w * shrink[:, None], w)
    return w, state1, state2


def constants_of(h: Hyperparameters) -> list[float]:
    """What kernels read of an optimizer: its hyperparameters, 1 - beta1 and 1 - beta2."""
    return [*h, 1 - h.beta1, 1 - h.beta2]


def apply_sums_(
    weights: Sequence[Tensor], states: Sequence[Tensor], step: Tensor, skipped: Tensor, learning_rate: Tensor,
    optimizer: str, h: Hyperparameters, rows: Sequence[Tensor], gradients: Sequence[Tensor], layout: Layout,
    narrow: Callable[[Tensor, Tensor, TableRow, Tensor, int], Tensor],
) -> None:  # fmt: skip
    """One step for each table's distinct `rows` `[R]` by their summed `gradients` `[R, dim]`, in the gradients' dtype.

    `narrow(new rows, weight, table, rows, step)` makes them the weight's dtype. Raises before anything is changed.
    """
    finite = [gradient.isfinite().all(1) for gradient in gradients]
    mode = NONFINITE_MODES[int(h.on_nonfinite)]
    tables = [TableRow(*fields) for fields in layout.tables.tolist()]
    for table, own, good in zip(tables, rows, finite, strict=True):
        if mode == "raise" and not bool(good.all()):
            raise errors.nonfinite_gradient_error(table.first_row + int(own[~good][0]), layout)
    steps = (step + 1).expand(len(weights)).tolist()
    names, changes = unpack_names(layout.table_names), []
    for index, (weight, own, gradient) in enumerate(zip(weights, rows, gradients, strict=True)):
        if mode == "skip":
            own, gradient = own[finite[index]], gradient[finite[index]]
        table_states = states[index :: len(weights)]
        new_states = [state.view(state.shape[0], -1)[own].to(gradient.dtype) for state in table_states]
        row, rate = weight[own].to(gradient.dtype), learning_rate.to(gradient.dtype)
        new = step_by_torch(optimizer, row, new_states, gradient, rate, steps[index], h, table=names[index])
        changes.append((weight, own, table_states, *new))
    step += 1
    if mode == "skip":
        skipped += torch.stack([(~good).sum() for good in finite])
        for name, good in zip(names, finite, strict=True):
            if not bool(good.all()):
                errors.warn_of_skipped_rows(name)
    for index, (weight, own, table_states, row, new_states) in enumerate(changes):
        weight[own] = narrow(row, weight, tables[index], own, steps[index])
        for state, new_state in zip(table_states, new_states, strict=True):
            state.view(state.shape[0], -1)[own] = new_state.to(state.dtype)


def step_by_torch(
    optimizer: str, w: Tensor, states: list[Tensor], g: Tensor, lr: Tensor, t: int | Tensor, h: Hyperparameters,
    mean_of_squares: Tensor | None = None, table: str = "",
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """One step for rows `w` `[R, dim]` of `table` with states `[R, dim]` or `[R, 1]` and summed gradients `g`.

    `mean_of_squares` `[R, 1]`: of a row's gradients, decay included, where `w` has only some of its columns.
    Returns the new rows and states.
    """
    decay, mode = h.weight_decay, DECAY_MODES[int(h.weight_decay_mode)]
    if not w.shape[0]:
        return w, states
    if decay and mode == "l2":
        g = g + decay * w
    if decay and mode == "decoupled":
        w = w * (1 - lr * decay)
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
        if float(lr) != 0.0:  # by which it divides
            z, n = states
            grown = n + g.square()
            z = z + (g - (_sqrt(grown) - _sqrt(n)) / lr * w)
            shrunk = z - torch.copysign(torch.full_like(z, h.l1), z)
            w = torch.where(z.abs() <= h.l1, 0.0, -shrunk / ((h.beta + _sqrt(grown)) / lr + h.l2))
            states = [z, grown]
    else:
        spec = OPTIMIZERS[optimizer]
        assert spec.corrects_bias
        square = g.square() if spec.states[1].per_element else _mean_of_squares(g, mean_of_squares)
        m = h.beta1 * states[0] + (1 - h.beta1) * g
        v = h.beta2 * states[1] + (1 - h.beta2) * square
        states = [m, v]
        # As tensors: on a GPU a tensor over a number would be the tensor times a rounded reciprocal.
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
        # A number over a tensor would be the number times a rounded reciprocal.
        w = torch.where(norm > h.max_norm, w * (torch.full_like(norm, h.max_norm) / norm), w)
    return w, states


def _step_by_user(
    spec: Custom, w: Tensor, states: list[Tensor], g: Tensor, lr: Tensor, t: Tensor, table: str
) -> tuple[Tensor, list[Tensor]]:
    """Steps `t` are one, `[]`, or each row's own, `[R]`."""
    step, rows = spec.step, w
    given = {one.name: s if one.per_element else s[:, 0] for one, s in zip(spec.states, states, strict=True)}
    if t.dim():  # rows one by one, as batches of one
        step, rows, g = torch.vmap(step, (0, 0, 0, None, 0)), w.unsqueeze(1), g.unsqueeze(1)
        given = {name: state.unsqueeze(1) for name, state in given.items()}
    described = partial(tree_map, lambda x: (x.dtype, x.shape, x.device) if isinstance(x, Tensor) else type(x).__name__)
    wanted, where = described((rows, given)), f"table {table!r}, all tables are unchanged: Custom's step"
    try:
        result = step(rows, given, g, lr.clone(), t.clone())
    except Exception as error:
        raise RuntimeError(f"{where} raised {type(error).__name__}: {error}") from error
    if described(result) != wanted:
        raise ValueError(f"{where} must return rows and states {wanted}, got {described(result)}")
    return result[0].reshape(w.shape), [result[1][one.name].reshape(w.shape[0], -1) for one in spec.states]


def update_by_user_(
    row_update_: Callable[..., None], embedding_bag: Callable[..., Tensor], at_once: int | None,
    weights: Sequence[Tensor], states: Sequence[Tensor], step: Tensor, skipped: Tensor, learning_rate: Tensor,
    grad: Tensor, offsets: Tensor, sample_weights: Tensor | None, optimizer: str, hyperparameters: Sequence[float],
    groups: tuple[Tensor, Tensor, Tensor, Tensor], layout: Layout,
) -> None:  # fmt: skip
    """`row_update_` for a `Custom`: sum gradients, read rows and call its function; when all calls are done, write.

    `at_once`: elements of a call; None on a GPU, whose host does not know the number of rows: all places, by dim.
    """
    h, (rows, _, _, num_groups), num_tables = Hyperparameters(*hyperparameters), groups, len(weights)
    rows = rows if at_once is None else rows[: int(num_groups)]
    if not (size := rows.numel()):
        step += 1
        return
    places = torch.arange(size + 1, device=grad.device, dtype=torch.int32)
    rows = rows.where(places[:-1] < num_groups, layout.num_rows)  # ascending to the end
    first_rows, row_dims = layout.tables[:, FIRST_ROW].contiguous(), layout.tables[:, ROW_DIM]
    begins = torch.cat([torch.searchsorted(rows, first_rows), places[-1:]])
    tables = torch.searchsorted(first_rows, rows, right=True) - 1
    ids = rows - first_rows[tables]
    every = [tensor if tensor.dim() > 1 else tensor.unsqueeze(1) for tensor in (*weights, *states)]
    owned = [TensorList(every[first : first + num_tables]) for first in range(0, len(every), num_tables)]
    layouts = [_layout_of_rows(layout, max(tensor.shape[1] for tensor in own)) for own in owned]

    dims, skips = [weight.shape[1] for weight in weights], NONFINITE_MODES[int(h.on_nonfinite)] == "skip"
    sums = {dim: empty_result((size, dim), torch.float32, grad.device) for dim in dict.fromkeys(dims)}
    for of_dim in sums.values() if at_once is None else ():
        of_dim.fill_(torch.inf)  # which sums of skipped rows stay
    done, now_skipped = step.clone(), skipped.clone()
    row_update_(
        [sums[dim] for dim in dims], [], done, now_skipped, learning_rate, grad, offsets, sample_weights, "place",
        Hyperparameters(max_gradient=h.max_gradient, on_nonfinite=h.on_nonfinite), groups, layout,
    )  # fmt: skip

    def read(begin: int, end: int, dim: int) -> list[Tensor]:
        batch, widths = (ids[begin:end], begins.clamp(begin, end) - begin, None), [min(dim, of.width) for of in layouts]
        of_rows = zip(owned, layouts, widths, strict=True)
        return [embedding_bag(own, *batch, of._replace(width=width), False) for own, of, width in of_rows]

    if at_once is None:
        new, t = read(0, size, max(dims)), [done[tables] if done.dim() else done] * num_tables
        blocks = [(0, size, dims.index(dim)) for dim in sums]
    else:
        new = [empty_result((size, of.width), torch.float32) for of in layouts]
        new[:1] = [*sums.values()] if len(sums) == 1 else new[:1]  # a block's own, which it no longer needs
        t = done.expand(num_tables).tolist()
        kinds, firsts = [*zip(dims, t, strict=True)], begins[:-1].tolist()
        changes = [begin for table, begin in enumerate(firsts) if begin < size and kinds[table] != kinds[table - 1]]
        starts = sorted({*range(0, size, max(1, at_once // max(dims))), *changes})
        blocks = [*zip(starts, [*starts[1:], size], tables[starts].tolist(), strict=True)]
    for begin, end, first in blocks:
        dim, mine, table = dims[first], None, unpack_names(layout.table_names)[first]
        out, g = [each[begin:end, :dim] for each in new], sums[dim][begin:end]
        old = given = out if at_once is None else read(begin, end, dim)
        if at_once is None or (skips and not bool(g.isfinite().all())):
            mine = ((row_dims[tables[begin:end]] == dim) & (g.isfinite().all(1) | (not skips))).unsqueeze(1)
            given = [each.clone() for each in old]
        w, found = step_by_torch(optimizer, given[0], given[1:], g, learning_rate, t[first], h, table=table)
        # Weights at last: their place may be that of `g`, which may be a state.
        for to, values, before in zip(out[::-1], [*found[::-1], w], old[::-1], strict=True):
            to.copy_(values if mine is None else values.where(mine, before))

    changed, rounding = torch.where((done > step).any(), num_groups, 0), h.stochastic_rounding  # 0: one was refused
    for own, values, of in zip(owned, new, layouts, strict=True):
        row_update_(
            own, [], step.clone(), skipped.clone(), learning_rate, values, begins, None, "assign",
            Hyperparameters(stochastic_rounding=rounding), (rows, places, places[:-1], changed), of,
        )  # fmt: skip
    step.copy_(done)
    skipped.copy_(now_skipped)


def _layout_of_rows(layout: Layout, width: int) -> Layout:
    """The tables, or a state of theirs of this width, looked up by a batch of one sample, not pooled."""
    tables, numbers = layout.tables.clone(), torch.arange(layout.tables.shape[0] + 1, device=layout.tables.device)
    tables[:, ROW_DIM].clamp_(max=width)
    lookups = torch.zeros_like(tables[:, :4])
    lookups[:, TABLE], lookups[:, DIM] = numbers[:-1], tables[:, ROW_DIM]
    return Layout(tables, lookups, numbers, layout.table_names, "", 1, layout.num_rows, width, False)


def _sqrt(x: Tensor) -> Tensor:
    """Rounded once: torch's float32 root may be off by a unit in the last place."""
    return x.double().sqrt().to(x.dtype)


def _norm_by_torch(x: Tensor) -> Tensor:
    return _sqrt(row_sum_by_torch(x * x))


def _mean_of_squares(x: Tensor, given: Tensor | None) -> Tensor:
    return row_sum_by_torch(x * x) / x.shape[1] if given is None else given
