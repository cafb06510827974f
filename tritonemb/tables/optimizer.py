"""Fused optimizers: `torch.optim.Optimizer` interface, and updates of several modules at the end of a backward pass.

Each module of a model has its own lookup. Once a backward pass has computed all gradients, all ids are grouped and all
tables updated in one launch. A table that was looked up several times is updated once, by the sum of its gradients, as
by PyTorch's optimizers.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import accumulate
from typing import Any, Self, cast, get_args
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tritonemb import ops
from tritonemb.errors import gradient_not_finite, unused_gradient
from tritonemb.layout import unpack_names
from tritonemb.ops.bag import Bags, BagTable, layout_of, single_bag_offsets
from tritonemb.ops.row_update import Accumulator, OpenPasses, PassItems, items_of_pass, join_tables, passes
from tritonemb.optimizers import Hyperparameters, NonFinite, Optimizer
from tritonemb.tables.batch import RowBatch, row_sums

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
        for number, weight in enumerate(self.param_groups[0]["params"]):
            if weight.grad is not None:
                raise unused_gradient(self._states()[number][0])
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

        ValueError for another number of tables, other states or shapes, and invalid settings; nothing is copied then.
        """
        pairs, sizes = [], [len(saved_group["params"]) for saved_group in state_dict["param_groups"]]
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
        if sizes != [num_tables := len(self._states())]:
            raise ValueError(f"expected one parameter group of {num_tables} tables, got groups of {sizes}")
        self.param_groups[0].update(group)  # raises for an invalid learning rate
        for tensor, value in pairs:
            tensor.copy_(value)


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

    def scale_accumulated(self, factor: float) -> bool:
        """See `EmbeddingBagCollection.scale_accumulated`."""
        grads = [gradient.grad.mul_(factor) for gradient in self.accumulator.gradients]
        return all(bool(grad.isfinite().all()) for grad in grads)

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


class FusedGroup(OptimizedTables):
    """Optimizer of the tables of several modules, with gradients that are not applied yet."""

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, by_step: bool = False) -> None:
        super().__init__(optimizer, by_step)
        self._rates: dict[torch.device, Tensor] = {}
        self._reset_passes()

    def _reset_passes(self) -> None:
        self._open_passes: OpenPasses = WeakValueDictionary()
        self._lock = threading.Lock()

    def rates(self) -> Iterable[Tensor]:
        return self._rates.values()

    def rate_on(self, device: torch.device) -> Tensor:
        """Return the learning rate on a device, float32 `[]`: one tensor, created before a lookup is traced."""
        if (rate := self._rates.get(device)) is None:
            assert not torch.compiler.is_compiling(), "a traced graph would keep the learning rate of its first call"
            with torch.inference_mode(False):
                rate = torch.tensor(self.current_learning_rate, dtype=torch.float32, device=device)
            self._rates[device] = rate
        return rate

    def add(self, gradient: ops.BagGradient) -> None:
        """Queue a gradient; the table is updated when this backward pass ends."""
        self._current_pass().append(gradient)

    @property
    def receiver(self) -> Callable[[ops.BagGradient], None]:
        """Callback that takes the gradient of a lookup made now.

        A lookup within a backward pass, as of a reentrant checkpoint, has a nested backward. Its gradient belongs to
        the outer pass, so that tables are updated once, at the end of that.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
            return self.add
        return self._current_pass().append

    def _current_pass(self) -> PassItems:
        with self._lock:
            return items_of_pass(self._open_passes, self._finish)

    def _finish(self, gradients: PassItems) -> None:
        if self.accumulator.is_open:
            self.accumulator.gradients += [_clone(gradient) for gradient in gradients]
        else:
            update(gradients)

    def apply(self) -> None:
        """Update the tables by all accumulated gradients in one step."""
        update(self.accumulator.pop_all())

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate gradients in the block. A compiled module or a nested block in it raises RuntimeError."""
        if self.by_step:
            raise RuntimeError('with update="step" gradients are accumulated until step(); leave out accumulate()')
        return self.accumulator.open(update, self._rates.values())

    def __getstate__(self) -> dict[str, Any]:
        """Exclude gradients that are not applied yet."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("_open_passes", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rates = {rate.device: rate for rate in self._rates.values()}  # it may be loaded onto another device
        self._reset_passes()


def _clone(gradient: ops.BagGradient) -> ops.BagGradient:
    """Copy a gradient: the batch's buffers may be reused, and it may be the `grad` of a parameter."""
    weights, bags = gradient.sample_weights, gradient.bags
    return gradient._replace(
        values=gradient.values.clone(),
        sample_weights=None if weights is None else weights.detach().clone(),
        bags=bags._replace(offsets=bags.offsets.clone()),
        grad=gradient.grad.clone(),
    )


@torch.no_grad()
def update(gradients: list[ops.BagGradient]) -> None:
    """Update each table once; tables with the same number of bags, or of columns if not pooled, share a call."""
    # Sum the gradients of several lookups of a table.
    by_table: dict[int, list[ops.BagGradient]] = {}
    for gradient in gradients:
        by_table.setdefault(id(gradient.table.weights[0]), []).append(gradient)
    batches: dict[tuple[Any, ...], list[ops.BagGradient]] = {}
    for table_gradients in by_table.values():
        gradient = _merge(table_gradients)
        size = gradient.grad.shape[0] if gradient.bags.pooled else gradient.grad.shape[1]
        key = gradient.grad.device, gradient.bags.pooled, size, gradient.table.learning_rate.data_ptr()
        batches.setdefault(key, []).append(gradient)
    # Check all batches before the first update changes a table.
    updates = [*map(_join, batches.values())]
    for tables, batch in updates if len(updates) > 1 else ():
        _check_finite(Hyperparameters(*tables.hyperparameters), batch)
    for tables, batch in updates:
        ops.row_update_(tables, batch)


def _check_finite(h: Hyperparameters, batch: ops.BatchGradient) -> None:
    """Raise for `on_nonfinite="raise"` and a non-finite gradient on the CPU; on a GPU each update checks its own."""
    grad, offsets, sample_weights, ids, layout = batch
    if get_args(NonFinite)[int(h.on_nonfinite)] != "raise" or ids.device.type != "cpu":
        return
    groups = ops.row_groups(ids, offsets, layout)
    sums = row_sums(grad, RowBatch(ids, offsets, sample_weights, groups, layout), h.max_gradient)
    for name, rows, gradients in zip(unpack_names(layout.table_names), *sums, strict=True):
        if not (is_finite := gradients.isfinite().all(1)).all():
            raise gradient_not_finite(name, int(rows[~is_finite][0]))


def _join(gradients: list[ops.BagGradient]) -> tuple[ops.FusedTables, ops.BatchGradient]:
    """Join the gradients of several tables, one each, for one call of `ops.row_update_`."""
    first, grads = gradients[0], [gradient.grad for gradient in gradients]
    bag_tables = tuple(BagTable(g.name, g.bags.mean, *g.table.weights[0].shape) for g in gradients)
    layout = layout_of(bag_tables, first.bags.pooled, first.grad.device)
    values, offsets = _concat_ids(gradients)
    tables = first.table if len(gradients) == 1 else join_tables([gradient.table for gradient in gradients])
    grad = grads[0] if len(grads) == 1 else grads
    return tables, ops.BatchGradient(grad, offsets, _concat_sample_weights(gradients), values, layout)


def _concat_ids(gradients: list[ops.BagGradient]) -> tuple[Tensor, Tensor]:
    """Concatenate the ids of K lookups; return them with offsets `[K * B + 1]`."""
    if len(gradients) == 1:
        return gradients[0].values, gradients[0].bags.offsets
    values, offsets = [g.values for g in gradients], [g.bags.offsets for g in gradients]
    if len({ids.dtype for ids in values}) > 1:
        values = [ids.to(torch.int64) for ids in values]
    ends = [*accumulate(ids.shape[0] for ids in values)]
    if not gradients[0].bags.pooled:
        return torch.cat(values), torch.tensor([0, *ends], device=values[0].device)
    # Shift the offsets of each lookup by the ids before it.
    if len({tensor.shape[0] for tensor in offsets}) > 1:
        shifted = [tensor[1:] + begin for tensor, begin in zip(offsets, [0, *ends], strict=False)]
        return torch.cat(values), torch.cat([offsets[0][:1], *shifted])
    joined = offsets[0].new_zeros(len(values) * (offsets[0].shape[0] - 1) + 1)
    begins = torch.tensor([0, *ends[:-1]], device=joined.device).unsqueeze(1)
    torch.add(torch.stack(offsets)[:, 1:], begins, out=joined[1:].view(len(values), -1))
    return torch.cat(values), joined


def _concat_sample_weights(gradients: list[ops.BagGradient]) -> Tensor | None:
    """Concatenate the lookups' sample weights, 1 where a lookup has none; None if no lookup has any."""
    sample_weights = [gradient.sample_weights for gradient in gradients]
    if all(weights is None for weights in sample_weights):
        return None
    filled = [
        (torch.ones_like(g.values) if w is None else w.detach()).to(torch.float32)
        for g, w in zip(gradients, sample_weights, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _merge(gradients: list[ops.BagGradient]) -> ops.BagGradient:
    """Merge the gradients of several lookups of one table into those of one lookup."""
    if len(gradients) == 1:
        return gradients[0]
    if any(gradient.table.steps[0] is not gradients[0].table.steps[0] for gradient in gradients):
        raise RuntimeError(
            f"the weight of {gradients[0].name!r} is shared with another module, which was fused separately; te.unfuse "
            "the model, and fuse it again"
        )
    if len({(gradient.bags.pooled, gradient.bags.mean) for gradient in gradients}) > 1:
        gradients = [_to_sum_pooling(gradient) for gradient in gradients]
    values, offsets = _concat_ids(gradients)
    if not (bags := gradients[0].bags).pooled:
        offsets = single_bag_offsets(values.shape[0], values.device)
    sample_weights, grad = _concat_sample_weights(gradients), torch.cat([gradient.grad for gradient in gradients])
    return ops.BagGradient(*gradients[0][:2], values, sample_weights, bags._replace(offsets=offsets), grad)


def _to_sum_pooling(gradient: ops.BagGradient) -> ops.BagGradient:
    """Convert a gradient of mean pooling (in float32: exact counts), or of unpooled rows, to one of sum pooling."""
    offsets, count, grad = gradient.bags.offsets, gradient.values.shape[0], gradient.grad
    if not gradient.bags.pooled:
        unit_offsets = torch.arange(count + 1, dtype=offsets.dtype, device=offsets.device)  # bags of one id
        return gradient._replace(bags=Bags(unit_offsets, True))
    if gradient.bags.mean:  # clamped before it is divided, as by kernels
        h = Hyperparameters(*gradient.table.hyperparameters)
        grad = grad.float().clamp(-h.max_gradient, h.max_gradient) / offsets.diff().unsqueeze(1)
    return gradient._replace(bags=Bags(offsets, True), grad=grad)
