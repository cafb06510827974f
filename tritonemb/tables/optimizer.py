"""`torch.optim.Optimizer` interface of fused optimizers, for schedulers and training frameworks."""

import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Self, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tritonemb.ops.row_update import Accumulator, passes
from tritonemb.optimizers import Hyperparameters, Optimizer

_GLOBAL_HOOKS = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
States = list[tuple[str, Tensor, dict[str, Tensor]]]  # name, weight, and `step` and states by name, per table


class ParamGroup(dict[str, Any]):
    """Parameter group that shares the tables' learning rate in both directions. Other settings are fixed."""

    def __init__(self, items: dict[str, Any], spec: dict[str, Any], set_learning_rate: Callable[[float], None]) -> None:
        super().__init__(items)
        self._spec, self._set_learning_rate = spec, set_learning_rate

    def __setitem__(self, key: str, value: Any) -> None:
        """Raise ValueError when a setting other than the learning rate is changed."""
        if key == "lr":
            value = float(value)
            self._set_learning_rate(value)
        else:
            self.check(key, value)
        super().__setitem__(key, value)

    def check(self, key: str, value: Any) -> None:
        """Raise ValueError unless `value` is the setting that the tables are updated with."""
        if key != "lr" and key in self._spec and self._spec[key] != value:
            raise ValueError(
                f"a fused optimizer's {key} is {self._spec[key]!r} and cannot become {value!r}; unfuse the tables, and "
                "fuse them with another optimizer"
            )

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self


def hooked_where_needed(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `step` of an optimizer in PyTorch's hooks, which cost 25 µs, only while they or a profiler are used."""
    hooked = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        hooks = self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *_GLOBAL_HOOKS
        return (hooked if any(hooks) or profiler._is_profiler_enabled else step)(self, *args, **kwargs)

    call.hooked = True  # type: ignore[attr-defined]  # so that PyTorch does not wrap it again
    return call


class FusedOptimizer(torch.optim.Optimizer):
    """Optimizer with one parameter group of tables, which the backward updates: `step` does nothing unless `deferred`.

    `param_groups[0]["lr"]` may be set by hand or by `torch.optim.lr_scheduler`. `tables` are `OptimizedTables`, or a
    module with their `optimizer`, `accumulate` and learning rate; `states` returns the tables' current tensors;
    `deferred` are `OptimizedTables` whose accumulated gradients `step` applies.
    """

    def __init__(self, tables: Any, states: Callable[[], States], deferred: Any = None) -> None:
        spec = tables.optimizer
        assert spec is not None
        self._tables, self._states, self._deferred = tables, states, deferred
        self._passes = tables.passes_so_far()  # backward passes at the last step, or at construction
        # The settings go into a `state_dict`, so exclude the update function and its states.
        settings = {name: value for name, value in asdict(spec).items() if name not in ("step", "states")}
        super().__init__([weight for _, weight, _ in states()], settings)
        self.param_groups[0] = ParamGroup(self.param_groups[0], settings, tables.set_learning_rate)
        self.show_learning_rate()
        self.refresh()

    def show_learning_rate(self) -> None:
        """Copy the tables' learning rate into the parameter group."""
        dict.__setitem__(self.param_groups[0], "lr", self._tables.current_learning_rate)

    def refresh(self) -> None:
        """Refer to the tables' current tensors, which change when the tables are moved."""
        tables = self._states()
        self.param_groups[0]["params"][:] = [weight for _, weight, _ in tables]
        self.state.clear()
        self.state.update({weight: dict(states) for _, weight, states in tables})

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a fused optimizer cannot be copied or pickled; save its state_dict(), and fuse the copy again")

    @hooked_where_needed
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the tables unless the backward has done so; return the closure's result.

        Warns if several backward passes since the last step have each updated the tables, in eager mode or compiled.
        RuntimeError if a table also has an ordinary gradient, from a use other than a lookup.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                raise RuntimeError(
                    "a fused table has an ordinary gradient too, which is not applied: its weight is used outside of "
                    "its lookups, for example in a penalty; te.unfuse that module, or use its lookups only"
                )
        if self._deferred is not None:
            self._deferred.apply()
        previous_passes, self._passes = self._passes, self._tables.passes_so_far()
        if self._passes > previous_passes + 1:
            warnings.warn(
                'several backward passes since step() have each updated the tables; use accumulate() or update="step"',
                stacklevel=1,
            )
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that `step` would apply; weights have no gradients."""
        if self._deferred is not None:
            self._deferred.accumulator.pop_all()
        if any(weight.grad is not None for weight in self.param_groups[0]["params"]):
            super().zero_grad(set_to_none)

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of several micro-batches and apply them once, when the block ends."""
        return self._tables.accumulate()

    def state_dict(self) -> dict[str, Any]:
        self.refresh()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the learning rate and states into the tables' tensors.

        ValueError if a state is missing, has another shape, or belongs to another optimizer; nothing is copied then.
        """
        pairs = []
        group = {key: value for key, value in state_dict["param_groups"][0].items() if key != "params"}
        for key, value in group.items():
            cast(ParamGroup, self.param_groups[0]).check(key, value)
        for index, (table, _, states) in enumerate(self._states()):
            values = state_dict["state"].get(index, {})
            for name, tensor in states.items():
                if name not in values or values[name].shape != tensor.shape:
                    actual = tuple(values[name].shape) if name in values else "nothing"
                    raise ValueError(
                        f"table {table!r}: state {name!r} must have shape {tuple(tensor.shape)}, got {actual}"
                    )
                pairs.append((tensor, values[name]))
            if len(values) > len(states):
                raise ValueError(
                    f"table {table!r} has the states {list(states)}, got those of another optimizer, {list(values)}"
                )
        for tensor, value in pairs:
            tensor.copy_(value)
        self.param_groups[0].update(group)


class OptimizedTables:
    """Tables that backward passes update, with one learning rate; `optimizer` is None for ordinary gradients.

    With `by_step`, `apply` applies accumulated gradients instead of the end of each backward pass.
    """

    def __init__(self, optimizer: Optimizer | None, by_step: bool = False) -> None:
        self.optimizer, self.by_step = optimizer, by_step
        hyperparameters = Hyperparameters() if optimizer is None else optimizer.hyperparameters
        self._constants = ",".join(map(repr, hyperparameters))
        self._hyperparameters = [*hyperparameters]
        # Last one set; updates read the tensors of `rates`.
        self.current_learning_rate = 0.0 if optimizer is None else optimizer.lr
        self.accumulator = Accumulator(always_open=by_step)
        self._views: WeakSet[FusedOptimizer] = WeakSet()

    @property
    def hyperparameters(self) -> list[float]:
        """Hyperparameters of the optimizer. A trace parses them from text: floats may become dynamic inputs."""
        if torch.compiler.is_compiling():
            return [float(value) for value in self._constants.split(",")]
        return self._hyperparameters

    def rates(self) -> Iterable[Tensor]:
        """Return the learning-rate tensors that updates read, float32 `[]`."""
        raise NotImplementedError

    def passes_so_far(self) -> int:
        """Return the number of backward passes that have updated the tables, replays of CUDA graphs excluded."""
        return max((passes.get(rate.data_ptr(), (0, 0))[0] for rate in self.rates()), default=0)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of tables and views; ValueError for a negative or non-finite rate."""
        if not 0.0 <= lr < float("inf"):
            raise ValueError(f"the learning rate must lie in [0, inf), got {lr}")
        self.current_learning_rate = float(lr)
        for rate in self.rates():
            rate.fill_(lr)
        for view in self._views:
            view.show_learning_rate()

    def view(self, states: Callable[[], States], all_tables: bool = False) -> FusedOptimizer:
        """Return an optimizer that follows the learning rate. It is weakly referenced; one of `all_tables` may step."""
        view = FusedOptimizer(self, states, self if self.by_step and all_tables else None)
        self._views.add(view)
        return view

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the views, which refer to these tables."""
        return {name: value for name, value in self.__dict__.items() if name != "_views"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._views = WeakSet()


def check_optimizer(optimizer: object) -> Optimizer:
    """Raise TypeError for anything but an optimizer of `tritonemb.optim`."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be one of tritonemb.optim, e.g. te.optim.RowWiseAdagrad(lr=0.02), got {optimizer!r}"
        )
    return optimizer
