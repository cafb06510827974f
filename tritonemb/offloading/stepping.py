"""Step of parameters by chunks, with the user's `torch.optim` optimizer.

Chunks begin at multiples of 4,096 elements, so the result is bitwise identical to a step of the full parameters:
vectorized loops and their remainders are the same.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.offloading.shards import flat_like, to_local
from tritonemb.offloading.states import StateStore
from tritonemb.offloading.sub_groups import ALIGNMENT, MASTER, StateChunk, StateLayout
from tritonemb.offloading.tiers import empty_on

STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"  # of torch.optim; called once per step


class ElementwiseOptimizer:
    """User's optimizer without its hooks, for any parameters: parameter groups and states are arguments of a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.name = type(optimizer).__name__
        if "step" in optimizer.__dict__:
            raise ValueError(
                f"the step of this {self.name} was replaced, by a learning rate scheduler perhaps; make schedulers of "
                "the optimizer that te.offload returns"
            )
        self._has_fused = "fused" in inspect.signature(type(optimizer).__init__).parameters
        self._inner: Any = copy.copy(optimizer)
        self._inner.__dict__ = dict(optimizer.__dict__) | {name: OrderedDict() for name in STEP_HOOKS}

    def step(self, groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]]) -> None:
        """Step the parameters of `groups`; `states`, by parameter, are changed."""
        groups = [self._with_fused(group) for group in groups]
        for group in groups:
            for p in group["params"]:
                if not states.get(p):
                    states[p] = dict(self._constructor_states(p, group))
        self._inner.param_groups, self._inner.state = groups, defaultdict(dict, states)
        self._inner.step()
        states.update(self._inner.state)
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)

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
            stepped = torch.cat([piece.detach() for piece in pieces])
            is_elementwise = is_elementwise and torch.allclose(full.flatten(), stepped)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{self.name} cannot be offloaded: {error}") from error
        if not is_elementwise:
            raise ValueError(
                f"{self.name} does not step each element of a parameter by itself, so its states cannot be offloaded "
                "in parts; use an element-wise optimizer, such as Adam, or states='device' without te.offload"
            )
        return examples

    def _with_fused(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a group with `fused`, unless the user chose an implementation."""
        is_explicit = group.get("fused") is not None or group.get("foreach") or group.get("differentiable")
        return {**group, "fused": True} if self._has_fused and not is_explicit else group

    def _constructor_states(self, p: Tensor, group: dict[str, Any]) -> Mapping[str, Any]:
        """Return the states that the optimizer's constructor creates; only Adagrad's does."""
        if not isinstance(self._inner, torch.optim.Adagrad):
            return {}
        return type(self._inner)([p], **{k: v for k, v in group.items() if k in self._inner.defaults}).state[p]


def state_layout(parameter: Any, examples: Mapping[str, Any], step_device: torch.device) -> StateLayout:
    """Return a parameter's states, with master weights unless it is stepped in place."""
    dtype = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
    in_place = dtype == parameter.dtype and to_local(parameter).device == step_device
    arrays = [name for name, value in examples.items() if isinstance(value, Tensor) and value.ndim]
    scalars = {name: value for name, value in examples.items() if name not in arrays}
    return StateLayout(scalars, ({} if in_place else {MASTER: dtype}) | dict.fromkeys(arrays, dtype))


class SubGroupStepper:
    """Steps parameters sub-group by sub-group, in memory of a device; `gradient(p)` is that of a parameter."""

    def __init__(
        self, optimizer: ElementwiseOptimizer, gradient: Callable[[Any], Any], store: StateStore, device: torch.device
    ) -> None:
        self._optimizer, self._gradient, self._store, self._device = optimizer, gradient, store, device

    def step(self, parameters: Sequence[Any], param_groups: Sequence[dict[str, Any]]) -> None:
        """Step parameters with the hyperparameters of their groups."""
        chunks = [chunk for p in parameters for chunk in self._store.chunks(p)]
        self._store.visit(lambda visited: self._step_group(visited, param_groups), chunks)
        self._store.buffers.drain()
        self._store.reverse = not self._store.reverse

    @torch.no_grad()
    def _step_group(self, chunks: Sequence[StateChunk], param_groups: Sequence[dict[str, Any]]) -> None:
        """Step chunks of a sub-group, and store the values in their parameters."""
        for chunk in chunks:
            if not chunk.is_ready:
                chunk.update_master()
        values = [chunk.arrays()[MASTER] if chunk.has_master else chunk.values() for chunk in chunks]
        for _, run in groupby(zip(chunks, values, strict=True), key=lambda pair: pair[0].is_ready):
            self._step_alike(list(run), param_groups)
        for chunk, value in zip(chunks, values, strict=True):
            chunk.store_values(value)

    def _step_alike(self, pairs: list[tuple[StateChunk, Tensor]], param_groups: Sequence[dict[str, Any]]) -> None:
        """Step chunks, all of which have states, or none."""
        # Leaves with values, gradients and states, by parameter group.
        states: dict[Any, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        stepped: list[tuple[StateChunk, nn.Parameter, dict[str, Tensor]]] = []
        used = 0
        for chunk, value in pairs:
            leaf, arrays = nn.Parameter(value), chunk.arrays()
            gradient = to_local(self._gradient(chunk.parameter))
            gradient = flat_like(gradient, to_local(chunk.parameter))[chunk.begin : chunk.end]
            if (gradient.device, gradient.dtype) != (leaf.device, leaf.dtype):
                begin = -(-used // ALIGNMENT) * ALIGNMENT
                used = begin + leaf.nbytes
                gradient = self._scratch[begin:used].view(leaf.dtype).copy_(gradient)
            leaf.grad = gradient
            if chunk.is_ready:
                states[leaf] = chunk.scalars | {name: array for name, array in arrays.items() if name != MASTER}
            if chunk.param_group not in groups:
                groups[chunk.param_group] = {**param_groups[chunk.param_group], "params": []}
            groups[chunk.param_group]["params"].append(leaf)
            stepped.append((chunk, leaf, arrays))
        self._optimizer.step(list(groups.values()), states)
        # Store the states that are not updated in place.
        for chunk, leaf, arrays in stepped:
            for name, value in states[leaf].items():
                if name not in arrays:
                    chunk.store_scalar(name, value)
                elif value is not arrays[name] and value.data_ptr() != arrays[name].data_ptr():
                    arrays[name].copy_(value.reshape(-1))
            chunk.is_ready = True

    @cached_property
    def _scratch(self) -> Tensor:
        """Scratch memory for the gradients of a sub-group, converted to the dtype and device of the step."""
        # 8: the largest dtype, float64.
        num_bytes = max(sum(chunk.numel * 8 + ALIGNMENT for chunk in group.chunks) for group in self._store.groups)
        return empty_on(self._device, num_bytes)
