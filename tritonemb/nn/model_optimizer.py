"""`tritonemb.optim.fused`: one optimizer for a whole model, whose embeddings are updated in the backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import nn

from tritonemb.nn.fuse import FuseReport, fuse, unfuse_all
from tritonemb.optimizers import SGD, Adagrad, Adam, Optimizer, PartialRowWiseAdam, RowWiseAdagrad

Update = Literal["backward", "step"]
Dense = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def fused(
    model: nn.Module, tables: Optimizer, dense: Dense | None = None, *, update: Update = "backward"
) -> ModelOptimizer:
    """Fuse `tables` into the embeddings of `model`, and make an optimizer of the other parameters.

    A loop of `zero_grad`, `backward` and `step` stays as it is: each backward pass updates the embeddings, `step` the
    rest. To update the embeddings once for several backward passes, see `ModelOptimizer.accumulate`.

    Args:
        model: its embeddings are fused in place, see `fuse`.
        tables: the optimizer of the embeddings.
        dense: makes the other parameters' optimizer, e.g. `lambda p: torch.optim.AdamW(p, lr=1e-3)`. If not given, the
            counterpart of `tables` in `torch.optim` with the same settings: SGD, Adagrad (for RowWiseAdagrad too), or
            Adam (AdamW with decay; for PartialRowWiseAdam too).
        update: "backward": each backward pass updates the embeddings, at the least cost. "step": `step` does, from all
            gradients since `zero_grad`, for loops and frameworks that call `backward` several times for a step, or
            leave steps out; under `torch.compile` lookups are graph breaks then.

    Raises:
        ValueError: for another `update`; if `model` has no embedding to fuse, with the reasons; if there is no
            counterpart and `dense` is not given. Whatever is raised, `dense`'s own errors too, the model is as it was
            then.
    """
    if update not in get_args(Update):
        raise ValueError(f"update must be one of {get_args(Update)}, got {update!r}")
    make = _counterpart(tables) if dense is None else dense
    report = fuse(model, tables, by_step=update == "step")
    if report.optimizer is None:
        raise ValueError(f"the model has no embedding that can be fused:\n{report}")
    try:
        return ModelOptimizer(model, report, make, update == "step")
    except Exception:
        unfuse_all([model.get_submodule(path) for path in report.fused])
        raise


class ModelOptimizer(torch.optim.Optimizer):
    """The parameter groups of a dense optimizer, and behind them one with the fused tables.

    `step` is the dense optimizer's. Learning rates of all groups may be set by hand or by schedulers. `state_dict` has
    the layout of PyTorch's optimizers. `torch.amp.GradScaler` is refused: it scales the loss, and the update in the
    backward would be scaled with it; train in bfloat16, or with `tritonemb.Trainer`, which scales float16 rightly.

    Attributes:
        report: what was fused, and what was not.
        dense: the optimizer of the other parameters; None if there are none.
    """

    # Tells GradScaler to hand its scale to `step`, which can then refuse it.
    _step_supports_amp_scaling = True

    def __init__(self, model: nn.Module, report: FuseReport, make: Dense, by_step: bool = False) -> None:
        assert report.optimizer is not None
        self.report, self._tables = report, report.optimizer
        weights = {weight for group in self._tables.param_groups for weight in group["params"]}
        rest = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in weights]
        self.dense = make(rest) if rest else None
        if isinstance(self.dense, torch.optim.LBFGS) and not by_step:
            raise ValueError(
                'LBFGS calls backward several times a step, and each updates the tables; use update="step"'
            )
        self._made = False
        super().__init__([*self._dense_groups(), *self._tables.param_groups], {})
        self._made = True
        self._link()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a fused optimizer cannot be copied or pickled; save its state_dict(), and fuse the copy anew")

    def _dense_groups(self) -> list[dict[str, Any]]:
        return [] if self.dense is None else self.dense.param_groups

    def _link(self) -> None:
        """The groups and states are those of the two optimizers."""
        self._tables.refresh()
        self.param_groups = [*self._dense_groups(), *self._tables.param_groups]
        self.state.clear()
        for part in (self.dense, self._tables):
            if part is not None:
                self.state.update(part.state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the dense parameters, and the tables if the backward has not. Returns the closure's result.

        Raises:
            ValueError: from a `GradScaler`.
        """
        scaled = [self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(value is not None for value in scaled):
            raise ValueError(
                "GradScaler scales the loss, so the backward updated the tables by scaled gradients; use bfloat16, "
                "which needs no scaling, or tritonemb.Trainer"
            )
        if self.dense is None or closure is None:
            result = self._tables.step(closure)  # first: it may refuse a gradient
            return result if self.dense is None else self.dense.step()
        result = self.dense.step(closure)
        self._tables.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the dense parameters' gradients, and those of tables that wait for `step`."""
        self._tables.zero_grad(set_to_none)
        if self.dense is not None:
            self.dense.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add dense parameters."""
        if not self._made:  # by the constructor, which adds the groups that there are
            super().add_param_group(param_group)
            return
        if self.dense is None:
            raise ValueError("the model had no dense parameters, so there is no optimizer to add some to")
        self.dense.add_param_group(param_group)
        self._link()

    def accumulate(self) -> AbstractContextManager[None]:
        """Gather the tables' gradients of several backward passes and apply them once, when the block ends.

        Dense gradients add up by themselves: call `step` once, behind the block. Not for a compiled model.
        """
        return self._tables.accumulate()

    def state_dict(self) -> dict[str, Any]:
        self._link()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: if groups, sizes or states differ; nothing has been changed then.
        """
        *dense_groups, tables_group = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        if ours != given:
            raise ValueError(f"the parameter groups must have {ours} parameters, got {given}")
        first = sum(given[:-1])
        states = state_dict["state"]
        self._tables.load_state_dict(
            {
                "state": {index - first: state for index, state in states.items() if index >= first},
                "param_groups": [tables_group],
            }
        )
        if self.dense is not None:
            dense_states = {index: state for index, state in states.items() if index < first}
            self.dense.load_state_dict({"state": dense_states, "param_groups": dense_groups})
        self._link()


def _counterpart(spec: Optimizer) -> Dense:
    """`torch.optim`'s optimizer of the same formula, element by element."""
    kind, decay, decoupled = type(spec), spec.weight_decay, spec.weight_decay_mode == "decoupled"
    common: dict[str, Any] = {"lr": spec.lr, "weight_decay": decay}
    plain = spec.max_gradient is None and spec.max_norm is None
    if plain and kind is SGD and not (decay and decoupled):
        return lambda rest: torch.optim.SGD(rest, **common)
    if plain and isinstance(spec, Adagrad | RowWiseAdagrad) and not (decay and decoupled):
        eps = spec.eps
        return lambda rest: torch.optim.Adagrad(rest, eps=eps, **common)
    if plain and isinstance(spec, Adam) and kind in (Adam, PartialRowWiseAdam):
        made = torch.optim.AdamW if decay and decoupled else torch.optim.Adam
        betas, eps = (spec.beta1, spec.beta2), spec.eps
        return lambda rest: made(rest, betas=betas, eps=eps, **common)
    raise ValueError(
        f"torch.optim has no counterpart of {spec}; say what trains the other parameters, e.g. "
        "dense=lambda p: torch.optim.Adam(p, lr=1e-3)"
    )
