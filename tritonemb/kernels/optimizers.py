"""The nine optimizers on rows, one step: slow, obvious PyTorch. Formulas and sources: `tritonemb/optim.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor

from tritonemb.optim import Hyperparameters, WeightDecayMode

DECAY_MODES = get_args(WeightDecayMode)


def step_reference(
    optimizer: str, w: Tensor, states: list[Tensor], g: Tensor, lr: Tensor, t: int, h: Hyperparameters
) -> tuple[Tensor, list[Tensor]]:
    """One step for rows `w` `[R, dim]` with states `[R, dim]` or `[R, 1]` and summed gradients `g`.

    Returns the new rows and states.
    """
    decay, mode = h.weight_decay, DECAY_MODES[int(h.weight_decay_mode)]
    if optimizer == "ftrl" and float(lr) == 0.0:
        return w, states
    if mode == "l2" and optimizer != "lars_sgd":
        g = g + decay * w
    if mode == "decoupled" and "lamb" not in optimizer:
        w = w * (1 - lr * decay)
    w, states = _STEPS[optimizer](w, states, g, lr, t, h)
    if h.max_norm < torch.inf:
        norm = w.norm(dim=1, keepdim=True)
        w = torch.where(norm > h.max_norm, w * (h.max_norm / norm), w)
    return w, states


_Step = Callable[[Tensor, list[Tensor], Tensor, Tensor, int, Hyperparameters], tuple[Tensor, list[Tensor]]]


def _sgd(w, states, g, lr, t, h):
    return w - lr * g, states


def _row_wise_adagrad(w, states, g, lr, t, h):
    total = states[0] + g.square().mean(1, keepdim=True)
    return w - lr / (total.sqrt() + h.eps) * g, [total]


def _adagrad(w, states, g, lr, t, h):
    total = states[0] + g.square()
    return w - lr * g / (total.sqrt() + h.eps), [total]


def _adam_direction(states, g, t, h, row_wise):
    square = g.square().mean(1, keepdim=True) if row_wise else g.square()
    m = h.beta1 * states[0] + (1 - h.beta1) * g
    v = h.beta2 * states[1] + (1 - h.beta2) * square
    return m / (1 - h.beta1**t) / ((v / (1 - h.beta2**t)).sqrt() + h.eps), [m, v]


def _adam(w, states, g, lr, t, h, row_wise=False):
    direction, states = _adam_direction(states, g, t, h, row_wise)
    return w - lr * direction, states


def _partial_row_wise_adam(w, states, g, lr, t, h):
    return _adam(w, states, g, lr, t, h, row_wise=True)


def _lamb(w, states, g, lr, t, h, row_wise=False):
    direction, states = _adam_direction(states, g, t, h, row_wise)
    if DECAY_MODES[int(h.weight_decay_mode)] == "decoupled":
        direction = direction + h.weight_decay * w
    weight_norm, norm = w.norm(dim=1, keepdim=True), direction.norm(dim=1, keepdim=True)
    ratio = torch.where((weight_norm > 0) & (norm > 0), weight_norm / norm, 1.0)
    return w - lr * ratio * direction, states


def _partial_row_wise_lamb(w, states, g, lr, t, h):
    return _lamb(w, states, g, lr, t, h, row_wise=True)


def _lars_sgd(w, states, g, lr, t, h):
    decay = h.weight_decay if DECAY_MODES[int(h.weight_decay_mode)] == "l2" else 0.0
    weight_norm, norm = w.norm(dim=1, keepdim=True), g.norm(dim=1, keepdim=True)
    divisor = norm + decay * weight_norm
    adjusted = torch.where(divisor > 0, lr * h.eta * weight_norm / divisor, 0.0)
    buffer = h.momentum * states[0] + adjusted * (g + decay * w)
    return w - buffer, [buffer]


def _ftrl(w, states, g, lr, t, h):
    z, n = states
    grown = n + g.square()
    z = z + (g - (grown.sqrt() - n.sqrt()) / lr * w)
    shrunk = z - torch.copysign(torch.full_like(z, h.l1), z)
    w = torch.where(z.abs() <= h.l1, 0.0, -shrunk / ((h.beta + grown.sqrt()) / lr + h.l2))
    return w, [z, grown]


_STEPS: dict[str, _Step] = {
    "sgd": _sgd,
    "row_wise_adagrad": _row_wise_adagrad,
    "adagrad": _adagrad,
    "adam": _adam,
    "partial_row_wise_adam": _partial_row_wise_adam,
    "lamb": _lamb,
    "partial_row_wise_lamb": _partial_row_wise_lamb,
    "lars_sgd": _lars_sgd,
    "ftrl": _ftrl,
}
