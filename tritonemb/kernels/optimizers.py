"""The nine optimizers on rows, one step: in Triton, and by PyTorch's operators. Formulas: `tritonemb/optimizers.py`.

Divisions and roots are IEEE's and sums over a row have one order, so both give the same bits.
"""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from tritonemb import errors
from tritonemb.kernels.cpu.optimizers import power
from tritonemb.kernels.triton_utils import jit, row_sum, row_sum_by_torch, tl
from tritonemb.layout import Layout, TableRow
from tritonemb.optimizers import KINDS, Hyperparameters, NonFinite, WeightDecayMode

SGD, ROW_WISE_ADAGRAD, ADAGRAD, ADAM, PARTIAL_ROW_WISE_ADAM, LAMB, PARTIAL_ROW_WISE_LAMB, LARS_SGD, FTRL = (
    tl.constexpr(kind) for kind in KINDS.values()
)
_CONSTANTS = (*Hyperparameters._fields, "rest1", "rest2")
_READ = ["weight_decay", "max_norm", "eps", "beta1", "beta2", "momentum", "eta", "beta", "l1", "l2", "rest1", "rest2"]
WEIGHT_DECAY, MAX_NORM, EPS, BETA1, BETA2, MOMENTUM, ETA, BETA, L1, L2, REST1, REST2 = (
    tl.constexpr(_CONSTANTS.index(name)) for name in _READ
)
DECAY_MODES, NONFINITE_MODES = get_args(WeightDecayMode), get_args(NonFinite)
NO_DECAY, L2_DECAY, DECOUPLED_DECAY = (tl.constexpr(mode) for mode in range(3))


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
    if DECAY == L2_DECAY and KIND != LARS_SGD:
        g = g + tl.load(h + WEIGHT_DECAY) * w
    if DECAY == DECOUPLED_DECAY and KIND != LAMB and KIND != PARTIAL_ROW_WISE_LAMB:
        w = w * (1.0 - lr * tl.load(h + WEIGHT_DECAY))
    if KIND == SGD:
        w = w - lr * g
    elif KIND == ROW_WISE_ADAGRAD:
        state1 = state1 + tl.div_rn(row_sum(g * g, ROWS, BLOCK), dim)
        w = w - tl.div_rn(lr, tl.sqrt_rn(state1) + tl.load(h + EPS))[:, None] * g
    elif KIND == ADAGRAD:
        state1 = state1 + g * g
        w = w - tl.div_rn(lr * g, tl.sqrt_rn(state1) + tl.load(h + EPS))
    elif KIND == LARS_SGD:
        weight_norm, norm = _norm(w, ROWS, BLOCK), _norm(g, ROWS, BLOCK)
        divisor = norm
        if DECAY == L2_DECAY:
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
            if DECAY == DECOUPLED_DECAY:
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
    mode = NONFINITE_MODES[int(h.nonfinite)]
    tables = [TableRow(*fields) for fields in layout.tables.tolist()]
    for table, own, good in zip(tables, rows, finite, strict=True):
        if mode == "raise" and not bool(good.all()):
            raise errors.bad_gradient(table.first_row + int(own[~good][0]), layout)
    step += 1
    steps = step.expand(len(weights)).tolist()
    for index, (weight, own, gradient) in enumerate(zip(weights, rows, gradients, strict=True)):
        if mode == "skip":
            skipped[index] += (~finite[index]).sum()
            own, gradient = own[finite[index]], gradient[finite[index]]
        table_states = states[index :: len(weights)]
        new_states = [state.view(state.shape[0], -1)[own].to(gradient.dtype) for state in table_states]
        row, rate = weight[own].to(gradient.dtype), learning_rate.to(gradient.dtype)
        row, new_states = step_by_torch(optimizer, row, new_states, gradient, rate, steps[index], h)
        weight[own] = narrow(row, weight, tables[index], own, steps[index])
        for state, new in zip(table_states, new_states, strict=True):
            state.view(state.shape[0], -1)[own] = new.to(state.dtype)


def step_by_torch(
    optimizer: str, w: Tensor, states: list[Tensor], g: Tensor, lr: Tensor, t: int, h: Hyperparameters,
    mean_of_squares: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """One step for rows `w` `[R, dim]` with states `[R, dim]` or `[R, 1]` and summed gradients `g`.

    `mean_of_squares` `[R, 1]`: of a row's gradients, decay included, where `w` has only some of its columns.
    Returns the new rows and states.
    """
    decay, mode = h.weight_decay, DECAY_MODES[int(h.weight_decay_mode)]
    if optimizer == "ftrl" and float(lr) == 0.0:
        return w, states
    if decay and mode == "l2" and optimizer != "lars_sgd":
        g = g + decay * w
    if mode == "decoupled" and "lamb" not in optimizer:
        w = w * (1 - lr * decay)
    if optimizer == "sgd":
        w = w - lr * g
    elif optimizer == "row_wise_adagrad":
        states = [states[0] + _mean_of_squares(g, mean_of_squares)]
        w = w - lr / (_sqrt(states[0]) + h.eps) * g
    elif optimizer == "adagrad":
        states = [states[0] + g.square()]
        w = w - lr * g / (_sqrt(states[0]) + h.eps)
    elif optimizer == "lars_sgd":
        decay = decay if mode == "l2" else 0.0
        weight_norm, norm = _norm_by_torch(w), _norm_by_torch(g)
        divisor = norm + decay * weight_norm
        adjusted = torch.where(divisor > 0, lr * h.eta * weight_norm / divisor, 0.0)
        states = [h.momentum * states[0] + adjusted * (g + decay * w)]
        w = w - states[0]
    elif optimizer == "ftrl":
        z, n = states
        grown = n + g.square()
        z = z + (g - (_sqrt(grown) - _sqrt(n)) / lr * w)
        shrunk = z - torch.copysign(torch.full_like(z, h.l1), z)
        w = torch.where(z.abs() <= h.l1, 0.0, -shrunk / ((h.beta + _sqrt(grown)) / lr + h.l2))
        states = [z, grown]
    else:
        assert optimizer in ("adam", "partial_row_wise_adam", "lamb", "partial_row_wise_lamb")
        row_wise = optimizer.startswith("partial_row_wise")
        square = _mean_of_squares(g, mean_of_squares) if row_wise else g.square()
        m = h.beta1 * states[0] + (1 - h.beta1) * g
        v = h.beta2 * states[1] + (1 - h.beta2) * square
        states = [m, v]
        # As tensors: on a GPU a tensor over a number would be the tensor times a rounded reciprocal.
        correct1, correct2 = (w.new_tensor(1 - power.py_func(beta, t)) for beta in (h.beta1, h.beta2))
        direction = m / correct1 / (_sqrt(v / correct2) + h.eps)
        if "lamb" in optimizer:
            if mode == "decoupled":
                direction = direction + decay * w
            weight_norm, norm = _norm_by_torch(w), _norm_by_torch(direction)
            lr = lr * torch.where((weight_norm > 0) & (norm > 0), weight_norm / norm, 1.0)
        w = w - lr * direction
    if h.max_norm < torch.inf:
        norm = _norm_by_torch(w)
        # A number over a tensor would be the number times a rounded reciprocal.
        w = torch.where(norm > h.max_norm, w * (torch.full_like(norm, h.max_norm) / norm), w)
    return w, states


def _sqrt(x: Tensor) -> Tensor:
    """Rounded once: torch's float32 root may be off by a unit in the last place."""
    return x.double().sqrt().to(x.dtype)


def _norm_by_torch(x: Tensor) -> Tensor:
    return _sqrt(row_sum_by_torch(x * x))


def _mean_of_squares(x: Tensor, given: Tensor | None) -> Tensor:
    return row_sum_by_torch(x * x) / x.shape[1] if given is None else given
