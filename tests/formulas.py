"""The optimizers' formulas once more, for one row in float64 NumPy, written from `tritonemb/optimizers.py` alone."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

import tritonemb as te

State = dict[str, Any]
Row = np.ndarray


def step(spec: Any, w: Row, state: State, g: Row, lr: float, t: int) -> Row:
    """One step for row `w` with summed gradient `g`; changes `state`, returns the new row."""
    if isinstance(spec, te.optim.Custom):
        by_hand = {adagrad: te.optim.Adagrad, row_wise_adagrad: te.optim.RowWiseAdagrad, adam: te.optim.Adam}
        shared = {part.name: getattr(spec, part.name) for part in fields(te.optim.Optimizer)}
        return step(by_hand.get(spec.step, te.optim.SGD)(**shared), w, state, g, lr, t)
    decay = spec.weight_decay
    l2 = decay if spec.weight_decay_mode == "l2" else 0.0
    decoupled = decay if spec.weight_decay_mode == "decoupled" else 0.0
    if spec.name == "lars_sgd":
        w = w - lr * decoupled * w
        w = _lars(spec, w, state, g, lr, l2)
    elif "lamb" in spec.name:
        direction = _adam(spec, state, g + l2 * w, t) + decoupled * w
        lengths = np.linalg.norm(w), np.linalg.norm(direction)
        w = w - lr * (lengths[0] / lengths[1] if all(lengths) else 1.0) * direction
    else:
        g = g + l2 * w
        w = w - lr * decoupled * w
        if spec.name == "sgd":
            w = w - lr * g
        elif spec.name == "row_wise_adagrad":
            state["sum"] = state["sum"] + np.mean(g**2)
            w = w - lr * g / (np.sqrt(state["sum"]) + spec.eps)
        elif spec.name == "adagrad":
            state["sum"] = state["sum"] + g**2
            w = w - lr * g / (np.sqrt(state["sum"]) + spec.eps)
        elif spec.name == "ftrl":
            w = _ftrl(spec, w, state, g, lr)
        else:
            w = w - lr * _adam(spec, state, g, t)
    if spec.max_norm is not None and np.linalg.norm(w) > spec.max_norm:
        w = w / np.linalg.norm(w) * spec.max_norm
    return w


def _adam(spec: Any, state: State, g: Row, t: int) -> Row:
    square = np.mean(g**2) if spec.name.startswith("partial") else g**2
    state["exp_avg"] = spec.beta1 * state["exp_avg"] + (1 - spec.beta1) * g
    state["exp_avg_sq"] = spec.beta2 * state["exp_avg_sq"] + (1 - spec.beta2) * square
    m, v = state["exp_avg"] / (1 - spec.beta1**t), state["exp_avg_sq"] / (1 - spec.beta2**t)
    return m / (np.sqrt(v) + spec.eps)


def _lars(spec: Any, w: Row, state: State, g: Row, lr: float, decay: float) -> Row:
    divisor = np.linalg.norm(g) + decay * np.linalg.norm(w)
    adjusted = lr * spec.eta * np.linalg.norm(w) / divisor if divisor else 0.0
    state["momentum_buffer"] = spec.momentum * state["momentum_buffer"] + adjusted * (g + decay * w)
    return w - state["momentum_buffer"]


def _ftrl(spec: Any, w: Row, state: State, g: Row, lr: float) -> Row:
    n, z = state["sum"], state["linear"]
    sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / lr
    z = z + g - sigma * w
    n = n + g**2
    state["sum"], state["linear"] = n, z
    active = -(z - np.sign(z) * spec.l1) / ((spec.beta + np.sqrt(n)) / lr + spec.l2)
    return np.where(np.abs(z) <= spec.l1, 0.0, active)


# The same by functions for `te.optim.Custom`, in the order of the built-in ones, whose roots are rounded once.
Stepped = tuple[Tensor, dict[str, Tensor]]


def sgd(rows: Tensor, states: dict[str, Tensor], g: Tensor, lr: Tensor, t: Tensor) -> Stepped:
    return rows - lr * g, {}


def adagrad(rows: Tensor, states: dict[str, Tensor], g: Tensor, lr: Tensor, t: Tensor) -> Stepped:
    total = states["sum"] + g.square()
    return rows - lr * g / (_root(total) + 1e-8), {"sum": total}


def row_wise_adagrad(rows: Tensor, states: dict[str, Tensor], g: Tensor, lr: Tensor, t: Tensor) -> Stepped:
    total = states["sum"] + g.square().mean(1)
    return rows - (lr / (_root(total) + 1e-8)).unsqueeze(1) * g, {"sum": total}


def adam(rows: Tensor, states: dict[str, Tensor], g: Tensor, lr: Tensor, t: Tensor) -> Stepped:
    m = 0.9 * states["exp_avg"] + (1 - 0.9) * g
    v = 0.999 * states["exp_avg_sq"] + (1 - 0.999) * g.square()
    m_part, v_part = ((1 - beta ** t.double()).to(rows.dtype) for beta in (0.9, 0.999))
    return rows - lr * (m / m_part / (_root(v / v_part) + 1e-8)), {"exp_avg_sq": v, "exp_avg": m}


def _root(x: Tensor) -> Tensor:
    return x.double().sqrt().to(x.dtype)


ELEMENT = {"states": {"sum": "element"}, "whole_row": False}
CUSTOM: dict[str, Any] = {
    "sgd": {"step": sgd, "whole_row": False},
    "adagrad": {"step": adagrad, **ELEMENT},
    "row_wise_adagrad": {"step": row_wise_adagrad, "states": {"sum": "row"}},
    "adam": {"step": adam, "states": {"exp_avg": "element", "exp_avg_sq": "element"}, "weight_decay_mode": "decoupled"},
}


def custom(name: str, **options: Any) -> te.optim.Custom:
    """The built-in optimizer of that name, written by hand."""
    return te.optim.Custom(**{**CUSTOM[name], **options})
