"""`OffloadedOptimizer`: a `torch.optim.Optimizer` that steps the user's optimizer on stored states.

Parameters are stepped in chunks, which begin at multiples of 4,096 elements, so the result is bitwise identical to a
step of the full parameters: vectorized loops and their remainders are the same.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonemb.layout import ALIGNMENT
from tritonemb.offloading.gradients import BackwardStep, Gradients
from tritonemb.offloading.parameters import WatchedParameter
from tritonemb.offloading.shards import as_dtensor, shard_like, to_local
from tritonemb.offloading.states import (
    MASTER,
    Offloaded,
    StateArray,
    StateChunk,
    StatePlacement,
    StateStore,
    SubGroup,
    array_names,
)
from tritonemb.utils import join_names

STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"  # of torch.optim; called once per step
Groups = Sequence[dict[str, Any]]  # parameter groups
Replacements = Mapping[Any, list[tuple[Any, Any]]]
"""By old parameter, the new parameters, each with its index in the old one."""


class ElementwiseOptimizer:
    """User's optimizer without hooks, parameters and states: parameter groups and states are arguments of a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.name = type(optimizer).__name__
        if "step" in optimizer.__dict__:
            raise ValueError(
                f"the step of this {self.name} was replaced, by a learning rate scheduler perhaps; make schedulers of "
                "the optimizer that te.offload returns"
            )
        self._has_fused = "fused" in inspect.signature(type(optimizer).__init__).parameters
        self._step: Any = inspect.unwrap(type(optimizer).step, stop=lambda call: not hasattr(call, "hooked"))
        self._inner: Any = copy.copy(optimizer)
        self._inner.__dict__ = dict(optimizer.__dict__) | {name: OrderedDict() for name in STEP_HOOKS}

    def step(self, groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]]) -> None:
        """Step the parameters of `groups`, new dicts; `states`, by parameter, are changed."""
        for group in groups:
            choices = group.get("fused"), group.get("foreach"), group.get("differentiable") or None
            if self._has_fused and choices == (None,) * 3 and not any(p.is_complex() for p in group["params"]):
                group["fused"] = True
            # States that the optimizer's constructor creates; only Adagrad's does.
            is_adagrad = isinstance(self._inner, torch.optim.Adagrad)
            options = {name: value for name, value in group.items() if name in self._inner.defaults}
            for p in group["params"]:
                if not states.get(p):
                    states[p] = type(self._inner)([p], **options).state[p] if is_adagrad else {}
        self._inner.param_groups, self._inner.state = groups, defaultdict(dict, states)
        self._step(self._inner)
        states.update(self._inner.state)
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)

    @torch.no_grad()
    def step_chunks(
        self, param_groups: Groups, gradient_of: Callable[[StateChunk], Tensor], store: StateStore,
        chunks: Sequence[StateChunk],
    ) -> None:  # fmt: skip
        """Step chunks of a sub-group of `store`, and store the values in their parameters."""
        for chunk in (chunk for chunk in chunks if not chunk.is_ready):
            chunk.update_master()
        values = [chunk.arrays()[MASTER] if chunk.has_master else chunk.values() for chunk in chunks]
        for is_ready, run in groupby(zip(chunks, values, strict=True), key=lambda pair: pair[0].is_ready):
            # Leaves with values, gradients and states, by parameter group.
            states: dict[Any, dict[str, Any]] = {}
            groups: dict[int, dict[str, Any]] = {}
            leaves: list[tuple[StateChunk, nn.Parameter, dict[str, Tensor]]] = []
            scratch_bytes = 0  # in use
            for chunk, value in run:
                leaf, arrays = nn.Parameter(value), chunk.arrays()
                gradient = gradient_of(chunk)
                if (gradient.device, gradient.dtype) != (leaf.device, leaf.dtype):
                    begin = -(-scratch_bytes // ALIGNMENT) * ALIGNMENT
                    scratch_bytes = begin + leaf.nbytes
                    gradient = store.scratch[begin:scratch_bytes].view(leaf.dtype).copy_(gradient)
                leaf.grad = gradient
                if is_ready:
                    states[leaf] = chunk.scalars | {name: array for name, array in arrays.items() if name != MASTER}
                group = groups.setdefault(chunk.param_group, {**param_groups[chunk.param_group], "params": []})
                group["params"].append(leaf)
                leaves.append((chunk, leaf, arrays))
            self.step(list(groups.values()), states)
            # Store the states that are not updated in place.
            for chunk, leaf, arrays in leaves:
                for name, value in states[leaf].items():
                    if name not in arrays:
                        chunk.store_scalar(name, value)
                    elif value is not arrays[name] and value.data_ptr() != arrays[name].data_ptr():
                        arrays[name].copy_(value.reshape(-1))
                chunk.is_ready = True
        for chunk, value in zip(chunks, values, strict=True):
            chunk.store_values(value)

    @torch.no_grad()
    def example_states(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return example states of a parameter; ValueError unless the optimizer is element-wise.

        Step a parameter of 35 elements, and the same in chunks of at most 16, twice, and compare.
        """
        lr = {"lr": 0.01} if "lr" in group else {}  # a rate of 0 would hide differences
        values = torch.linspace(-1, 1, 35)
        full = nn.Parameter(values.view(5, 7))
        pieces = [nn.Parameter(piece) for piece in values.clone().split(16)]
        try:
            states: dict[Any, Any] = {}
            for gradient in (values.flip(0), values.cos()):
                full.grad = gradient.view(5, 7)
                for piece, gradient_part in zip(pieces, gradient.split(16), strict=True):
                    piece.grad = gradient_part.clone()
                self.step([{**group, **lr, "params": [full, *pieces]}], states)
            examples = states[full]
            is_elementwise = all(v.shape == full.shape for v in examples.values() if isinstance(v, Tensor) and v.ndim)
            is_elementwise = is_elementwise and torch.allclose(full.flatten(), torch.cat([*pieces]))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{self.name} cannot be offloaded: {error}") from error
        if not is_elementwise:
            raise ValueError(
                f"{self.name} does not step each element of a parameter by itself, so its states cannot be offloaded "
                "in parts; use an element-wise optimizer, such as Adam, or states='device' without te.offload"
            )
        return examples


class StoredOptimizer(Optimizer):
    """`torch.optim` optimizer whose states are in a `StateStore`, with state dicts and loading."""

    def __init__(
        self, optimizer: Optimizer, offloaded: Offloaded, replacements: Replacements, placement: StatePlacement
    ) -> None:
        self._is_initialized = False
        # The user's optimizer, without its hooks, and the parameter groups with new parameters.
        self._inner = ElementwiseOptimizer(optimizer)
        groups = [
            {**group, "params": [new for p in group["params"] for new, _ in replacements.get(p, [(p, ...)])]}
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))
        self.__dict__.update({name: optimizer.__dict__[name] for name in STEP_HOOKS})
        self._is_initialized = True
        # Stored states, and their step.
        examples = [self._inner.example_states(group) for group in self.param_groups]
        params = [(p, number) for number, group in enumerate(self.param_groups) for p in group["params"]]
        self.store = StateStore(params, examples, offloaded, placement)
        self._enabled_options = [_enabled_options(group, self.defaults) for group in self.param_groups]
        self.example_states = examples
        self._failure: BaseException | None = None
        # Versions at the last update of parameters that are not offloaded: master weights follow other writes.
        self._versions: dict[Any, Any] = {p: () for p, _ in params if p not in offloaded}
        for p in self._versions:
            if type(p) is nn.Parameter and any(chunk.has_master for chunk in self.store.chunks(p)):
                p.__class__ = WatchedParameter
        for param in offloaded.values():
            param.on_write = lambda param=param: self.store.update_masters(param.parameter)  # type: ignore[misc]

    def load_plain_states(self, plain_states: Mapping[Any, Mapping[str, Any]], replacements: Replacements) -> None:
        """Load the states of the original optimizer."""
        pairs = ((p, replacements.get(p, [(p, ...)])) for p in plain_states)
        self._load_states({new: _slice_states(plain_states[p], index) for p, pieces in pairs for new, index in pieces})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_initialized:
            raise ValueError("parameter groups must be added to the optimizer before te.offload")
        super().add_param_group(param_group)

    def _check_options(self) -> None:
        """Raise ValueError if a parameter group was changed so that it needs states which have no memory."""
        for number, group in enumerate(self.param_groups):
            if (enabled := _enabled_options(group, self.defaults)) == self._enabled_options[number]:
                continue
            if missing := array_names(self._inner.example_states(group)) - self.example_states[number].keys():
                raise ValueError(
                    f"{join_names(sorted(enabled - self._enabled_options[number]))} of parameter group {number} was "
                    f"set after te.offload, without memory for {join_names(map(repr, sorted(missing)))}: set it "
                    f"before, for {self._inner.name}() (OneCycleLR and CyclicLR: pass cycle_momentum=False)"
                )
            self._enabled_options[number] = enabled

    def update_masters(self, parameters: Sequence[Any]) -> None:
        """Update the master weights of parameters on the device that were written without the optimizer."""
        for p in parameters:
            if p in self._versions and self._versions[p] != (writes := _writes_of(p)):
                self.store.update_masters(p)
                self._versions[p] = writes

    def _record_update(self, parameter: Any, writes: tuple[int, ...]) -> None:
        """Publish the states of an updated parameter with one value, and record its version after the update."""
        if chunks := self.store.chunks(parameter):
            self.state[parameter] = chunks[-1].scalars
        if parameter in self._versions:
            self._versions[parameter] = writes

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer, with states in host memory, and "master" of 16-bit parameters."""
        states = {p: param_states for p in self._parameters() if (param_states := self.states_of(p))}
        previous, self.state = self.state, defaultdict[Any, Any](dict, states)
        try:
            return super().state_dict()
        finally:
            self.state = previous

    def states_of(self, parameter: Any) -> dict[str, Any]:
        """Return a copy of a parameter's states, DTensors if it is one; {} before its first step."""
        self.raise_if_failed()
        if not self.store.is_ready(parameter):
            return {}
        self.update_masters([parameter])
        layout = self.store.layout(parameter)
        arrays = {name: StateArray(self.store, parameter, name).read() for name in layout.dtypes}
        return layout.scalars | {name: as_dtensor(array, parameter) for name, array in arrays.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this or of the original optimizer.

        Raises:
            ValueError: for other parameter groups, shapes or states; nothing is changed.
        """
        groups = state_dict["param_groups"]
        sizes, expected_sizes = ([len(group["params"]) for group in g] for g in (groups, self.param_groups))
        if sizes != expected_sizes:
            raise ValueError(f"the state dict has {sizes} parameters in its groups, the optimizer has {expected_sizes}")
        by_number = dict(zip((n for group in groups for n in group["params"]), self._parameters(), strict=True))
        states = {by_number[number]: param_states for number, param_states in state_dict["state"].items()}
        for p, param_states in states.items():
            names = self.store.layout(p).dtypes if self.store.chunks(p) else param_states  # no rows are on this rank
            _check_states(p, param_states, names.keys(), self._inner.name)
        with self.loading():
            self.load_hyperparameters(groups)
            self._load_states(states)

    def _load_states(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        for p, param_states in states.items():
            arrays, scalars = self.store.layout(p).dtypes, dict[str, Any]()
            for name, value in param_states.items():
                if name in arrays:
                    StateArray(self.store, p, name).write_range(0, shard_like(value, p).reshape(-1))
                elif name != MASTER and not array_names({name: value}):  # else the options do not use it
                    scalars[name] = value
            if param_states:
                self.finish_load(p, scalars, MASTER in param_states)

    def load_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """Copy everything but the parameters from other parameter groups."""
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the checkpoint has {len(groups)} parameter groups, not {len(self.param_groups)}")
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update({key: copy.deepcopy(value) for key, value in values.items() if key != "params"})

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load all states within; others are reset to those before the first step. If it raises, so do later steps."""
        self.store.check_idle()
        with self._record_failure():
            self.store.buffers.reset()
            self.state.clear()
            self._failure = None
            yield

    def finish_load(self, parameter: Any, scalars: dict[str, Any], has_master: bool) -> None:
        """Finish loading a parameter, all of whose arrays are written to the store."""
        self.store.finish_load(parameter, scalars, has_master)
        self._record_update(parameter, _writes_of(parameter))

    def raise_if_failed(self) -> None:
        """Raise RuntimeError after a step or load that failed, or inside a step."""
        self.store.check_idle()
        if self._failure is not None:
            raise RuntimeError(
                "an earlier step or load has failed, so some parameters and states are updated and some are not; "
                "resume from a checkpoint"
            ) from self._failure

    @contextmanager
    def _record_failure(self, updated: Collection[Any] = (...,)) -> Iterator[None]:
        """Record an exception, unless nothing is `updated`; the optimizer is then unusable until states are loaded."""
        try:
            yield
        except BaseException as error:
            self._failure = error if updated else None
            raise

    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]


class OffloadedOptimizer(StoredOptimizer):
    """`torch.optim` optimizer with offloaded states; created by `te.offload`.

    `param_groups`, `zero_grad`, `step`, schedulers and `state_dict` work as with the original optimizer. Its `fused`
    implementation is used, if it has one. Gradients are read from `.grad` of the parameters, or from their tier.
    """

    def __init__(
        self, optimizer: Optimizer, offloaded: Offloaded, replacements: Replacements, placement: StatePlacement
    ) -> None:
        super().__init__(optimizer, offloaded, replacements, placement)
        self._gradients = Gradients(self.store, offloaded, placement)
        self._written: set[Any] = set()  # parameters that others wrote before this step

    def step(self, closure: Callable[[], Any] | None = None, *, in_backward: bool = False) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: computes the loss and calls its `backward`.
            in_backward: step a sub-group inside that backward, as soon as its gradients are complete, while states of
                others are read and written; with the bits of a step after the backward. The closure cannot change
                gradients or read states; stored gradients are discarded. The first such step learns the order.

        Raises:
            ValueError: `in_backward` without a closure.
            RuntimeError: the closure changed gradients after their step, or computed one again after its step. As after
                any exception of a backward that has stepped sub-groups, resume from a checkpoint.
            StorageError: a gradient could not be stored, and nothing is stepped: call `zero_grad`, and repeat the
                backward. Or states could not be read or written. Some parameters are then stepped and some are not, so
                every later step raises, too: resume from a checkpoint.
        """
        # Step in the closure's backward, or call the closure.
        loss, updated = None, dict[Any, tuple[int, ...]]()
        step_chunks = partial(self._step_chunks, updated)
        if in_backward and closure is None:
            raise ValueError("step(in_backward=True) needs a closure that computes the loss and calls backward")
        stepped = self._backward_step.stepped if in_backward else set[SubGroup]()
        context = self._backward_step.run(step_chunks) if in_backward else nullcontext()
        self.raise_if_failed()
        self._check_options()
        if closure is not None:
            with torch.enable_grad(), self._record_failure(updated), context:
                loss = closure()
        with self._record_failure(updated):
            self._check_options()
            self._gradients.wait()
        # Step the other parameters.
        with self._record_failure():
            chunks = self.store.chunks(*filter(self._gradients.has, self._parameters()))
            self.store.visit(step_chunks, [chunk for chunk in chunks if chunk.group not in stepped], gradients=True)
            self.store.buffers.drain()
            if not in_backward:
                self.store.reverse = not self.store.reverse
            elif self.stores_gradients:
                self._gradients.clear(set_to_none=True)
            for p, writes in updated.items():
                self._record_update(p, writes)
        return loss

    @cached_property
    def _backward_step(self) -> BackwardStep:
        return BackwardStep(self.store, self._gradients)

    def _step_chunks(self, updated: dict[Any, tuple[int, ...]], chunks: list[StateChunk]) -> None:
        """Step chunks of a sub-group that is in memory, and add their parameters to `updated`, with their versions."""
        if not updated:  # the first ones of a step
            self._written = {p for p, writes in self._versions.items() if _writes_of(p) != writes}
        for chunk in chunks:
            updated[chunk.parameter] = ()
            if chunk.parameter in self._written and chunk.is_ready:
                chunk.update_master()
        self._inner.step_chunks(self.param_groups, self._gradients.of_chunk, self.store, chunks)
        updated |= {p: _writes_of(p) for p in {chunk.parameter for chunk in chunks} & self._versions.keys()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.store.is_stepping and self._backward_step.stepped:
            self.store.check_idle()
        self._gradients.clear(set_to_none)
        super().zero_grad(set_to_none)

    @property
    def stores_gradients(self) -> bool:
        """True if gradients are in a tier, not in `.grad`."""
        return self._gradients.is_stored

    def read_gradient(self, parameter: Any) -> Tensor | None:
        """Return the gradient of a parameter: `.grad`, or a copy in host memory if it is stored; None without one."""
        self.store.check_idle()
        return self._gradients.read(parameter)

    @torch.no_grad()
    def scale_gradients(self, factor: float | Tensor) -> bool:
        """Multiply all gradients by a number; return whether those of this rank are finite afterwards."""
        self.store.check_idle()
        self._gradients.scale(self._parameters(), factor)
        gradients = (to_local(self.read_gradient(p)) for p in self._parameters() if self._gradients.has(p))
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients like `torch.nn.utils.clip_grad_norm_`, also stored ones; return the total norm."""
        self.store.check_idle()
        parameters = self._parameters()
        if not self.stores_gradients:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        norm = self._gradients.total_norm(parameters, norm_type)
        self._gradients.scale(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


def _writes_of(parameter: Any) -> tuple[int, int, int]:
    """Return numbers that change with each write to a parameter on the device."""
    alias, num_sets = getattr(parameter, "alias", None), getattr(parameter, "num_sets", 0)
    return to_local(parameter)._version, num_sets, 0 if alias is None else alias._version


def _enabled_options(group: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the options of a parameter group that are not zero, False or None, on which its states depend."""
    return {name for name in names if not isinstance(value := group.get(name), Tensor) and value}


def _check_states(parameter: Any, states: Mapping[str, Any], names: Set[str], optimizer: str) -> None:
    """Raise ValueError if a parameter's states are not those of the optimizer, or have another shape."""
    for problem, difference in (("no", names - states.keys()), ("a", array_names(states) - names)):
        if states and (difference := difference - {MASTER}):
            raise ValueError(
                f"the state dict has {problem} {join_names(map(repr, sorted(difference)))} of a parameter of shape "
                f"{tuple(parameter.shape)}, which this {optimizer} {'needs' if problem == 'no' else 'lacks'}; "
                "construct it with the options of the saved optimizer, before te.offload"
            )
    for name, value in states.items():
        if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
            raise ValueError(
                f"optimizer state {name!r} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}"
            )


def _slice_states(states: Mapping[str, Any], index: Any) -> dict[str, Any]:
    """Slice the states of a parameter; {} for states on "meta", which have no values."""
    if any(isinstance(value, Tensor) and value.is_meta for value in states.values()):
        return {}
    return {
        name: value[index] if isinstance(value, Tensor) and value.ndim and index is not ... else value
        for name, value in states.items()
    }
