"""Offloaded optimizer: states in host memory or on disk, stepped by sub-groups of parameters.

While a sub-group is stepped, states of the next are read and those of the previous one are written. Every other step
visits sub-groups in reverse order, so those stepped last are still in memory (Maurya et al., "MLP-Offload", 2025). The
user's `torch.optim` optimizer steps chunks of parameters, which begin at multiples of 4,096 elements. The result is
bitwise identical to a step of the full parameters, as vectorized loops and their remainders are the same.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tritonemb.offloading.parameters import (
    OffloadedParam,
    add_gradient_hook,
    as_dtensor,
    flat_like,
    flat_view,
    is_dense,
    local_shape,
    replace_range,
    to_local,
)
from tritonemb.offloading.sub_groups import ALIGNMENT, MASTER, Buffers, StateChunk, SubGroup
from tritonemb.offloading.tiers import Tier, empty_on, round_to_pages

STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"  # of torch.optim; called once per step


Replacements = Mapping[Any, list[tuple[Any, Any]]]


class OffloadedOptimizer(torch.optim.Optimizer):
    """`torch.optim` optimizer with offloaded states; created by `te.offload`.

    `param_groups`, `zero_grad`, `step`, schedulers and `state_dict` work as of the original optimizer. Its `fused`
    implementation is used, if it has one. Gradients are read from `.grad` of the parameters.

    Args:
        optimizer: provides the class and its hyperparameters.
        offloaded: offloaded parameters, by parameter.
        replacements: by parameter of `optimizer`, the new parameters, each with its index in the old one.
        tier: of the states; None for memory of `device`.
        sub_group: elements per sub-group.
        buffer_bytes: host memory for sub-groups on disk, of which at least three have a buffer.
        ratio: share of the states that stay in memory of the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, offloaded: Mapping[Any, OffloadedParam], replacements: Replacements,
        tier: Tier | None, device: torch.device, sub_group: int, buffer_bytes: int, ratio: float = 0.0,
    ) -> None:  # fmt: skip
        self._is_initialized = False
        self._offloaded, self._device = offloaded, device
        if "step" in optimizer.__dict__:
            raise ValueError(
                f"the step of this {type(optimizer).__name__} was replaced, by a learning rate scheduler perhaps; make "
                "schedulers of the optimizer that te.offload returns"
            )
        # The user's optimizer, without its hooks, and the parameter groups with new parameters.
        self._inner = copy.copy(optimizer)
        self._inner.__dict__ = dict(optimizer.__dict__) | {name: OrderedDict() for name in STEP_HOOKS}
        groups = [
            {**group, "params": [new for p in group["params"] for new, _ in replacements.get(p, [(p, ...)])]}
            for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))
        self.__dict__.update({name: optimizer.__dict__[name] for name in STEP_HOOKS})
        self._is_initialized, self._steps = True, 0
        self._failure: BaseException | None = None
        self._step_device = device if tier is None else torch.device("cpu")
        self._scratch: Tensor | None = None
        self._host_gradients: dict[Any, Tensor] = {}
        self._versions: dict[Any, int] = {}  # of parameters with master weights, at their last update
        self._state_templates = [self._elementwise_states(group) for group in self.param_groups]
        # Sub-groups, and their memory: the first `ratio` of them stays on the device.
        self.groups = list(self._make_sub_groups(sub_group))
        self._chunks: dict[Any, list[StateChunk]] = {}
        num_in_memory = round(len(self.groups) * ratio)
        for group in self.groups:
            for chunk in group.chunks:
                self._chunks.setdefault(chunk.parameter, []).append(chunk)
                states = self._state_templates[chunk.param_group].items()
                scalars = {name: v for name, v in states if isinstance(v, Tensor) and not v.ndim}
                chunk.scalar_memory = {name: torch.empty_like(value) for name, value in scalars.items()}
            group.assign_offsets(self._state_dtypes)
            group.allocate(tier if group.index >= num_in_memory else None, self._step_device)
        self.buffers = Buffers(self.groups, buffer_bytes, device)
        # Hooks: writes to parameters update master weights; gradients move to host memory.
        for param in offloaded.values():
            param.change_callbacks.append(lambda param=param: self._refresh_masters(param.parameter))  # type: ignore[misc]
        if device.type == "cuda" and tier is not None:
            for p in self._parameters():
                if p not in offloaded:
                    add_gradient_hook(p, self._move_gradient)

    def load_plain_states(self, plain_states: Mapping[Any, Mapping[str, Any]], replacements: Replacements) -> None:
        """Load the states of the original optimizer."""
        pairs = ((p, replacements.get(p, [(p, ...)])) for p in plain_states)
        self._load_states({new: _slice_states(plain_states[p], index) for p, pieces in pairs for new, index in pieces})

    # Interface of torch.optim.Optimizer.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_initialized:
            raise ValueError("parameter groups must be added to the optimizer before te.offload")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient.

        Raises:
            StorageError: states could not be read or written. Some parameters are then stepped and some are not, so
                every later step raises, too: resume from a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._raise_if_failed()
        with self._record_failure():
            with_gradient = [p for p in self._parameters() if self._gradient_of(p) is not None]
            for p in with_gradient:
                if p not in self._offloaded and self._versions.get(p, 0) != to_local(p)._version:
                    self._refresh_masters(p)
            chunks = [chunk for p in with_gradient for chunk in self._chunks.get(p, ())]
            self._visit_groups(self._step_group, chunks)
            self._versions.update({p: to_local(p)._version for p in with_gradient if p not in self._offloaded})
            self.buffers.drain()
            self._steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._host_gradients.clear()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients like `torch.nn.utils.clip_grad_norm_`, also those in host memory; return the total norm."""
        gradients, norm = self.gradients(), self._total_norm(norm_type)
        proxies = [nn.Parameter(torch.empty_like(gradient), requires_grad=False) for gradient in gradients]
        for proxy, gradient in zip(proxies, gradients, strict=True):
            proxy.grad = gradient
        torch.nn.utils.clip_grads_with_norm_(proxies, max_norm, norm)
        return norm

    def _total_norm(self, norm_type: float) -> Tensor:
        """Return the norm of all gradients; all-reduces those of shards in host memory, which are not DTensors."""
        shards: dict[Any, list[Any]] = {}
        for p in self._parameters():
            is_moved = isinstance(p, DTensor) and p in self._host_gradients
            if (gradient := self._gradient_of(p)) is not None:
                shards.setdefault((p.device_mesh, p.placements) if is_moved else None, []).append(gradient)
        norms = []
        for key, gradients in shards.items():
            norm = torch.nn.utils.get_total_norm(gradients, norm_type)
            if key is not None:
                mesh, placements = key
                for dim in [dim for dim, placement in enumerate(placements) if placement.is_shard()]:
                    is_max = norm_type == torch.inf
                    norm = (norm if is_max else norm**norm_type).to(self._device)
                    dist.all_reduce(norm, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, mesh.get_group(dim))
                    norm = (norm if is_max else norm ** (1 / norm_type)).cpu()
            norms.append(norm)
        return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)

    def gradients(self) -> list[Any]:
        """Return all gradients, on the device or in host memory."""
        return [g for p in self._parameters() if (g := self._gradient_of(p)) is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer, with states in host memory, and "master" of 16-bit parameters."""
        self._raise_if_failed()
        states: dict[Any, dict[str, Any]] = {p: self.states_of(p) for p in self._parameters()}
        non_empty = {p: param_states for p, param_states in states.items() if param_states}
        previous, self.state = self.state, defaultdict(dict, non_empty)
        try:
            return super().state_dict()
        finally:
            self.state = previous

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this or of the original optimizer.

        Raises:
            ValueError: for other parameter groups, shapes or states; nothing is changed.
        """
        groups = state_dict["param_groups"]
        params = [group["params"] for group in self.param_groups]
        if [len(group["params"]) for group in groups] != [len(group) for group in params]:
            raise ValueError(
                f"the state dict has {[len(group['params']) for group in groups]} parameters in its groups, the "
                f"optimizer has {[len(group) for group in params]}"
            )
        numbers = [number for group in groups for number in group["params"]]
        by_number = dict(zip(numbers, [p for group in params for p in group], strict=True))
        states = {by_number[number]: param_states for number, param_states in state_dict["state"].items()}
        for p, param_states in states.items():
            missing = self.layout_of(p)[1].keys() - param_states.keys() - {MASTER} if param_states else ()
            if missing:
                raise ValueError(
                    f"the state dict has no {', '.join(map(repr, sorted(missing)))} of a parameter of shape "
                    f"{tuple(p.shape)}, which this {type(self._inner).__name__} needs; it is of another optimizer"
                )
            for name, value in param_states.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                    raise ValueError(
                        f"optimizer state {name!r} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}"
                    )
        with self.loading():
            self.load_hyperparameters(groups)
            self._load_states(states)

    def states_of(self, parameter: Any) -> dict[str, Any]:
        """Return a copy of a parameter's states, DTensors if it is one; {} before its first step."""
        if not self.is_ready(parameter):
            return {}
        scalars, arrays = self.layout_of(parameter)
        return scalars | {name: as_dtensor(self._read_whole(parameter, name), parameter) for name in arrays}

    # Interface of checkpoints.

    def layout_of(self, parameter: Any) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """Return a parameter's scalar states (examples before its first step), and the dtypes of the other states."""
        chunks = self._chunks.get(parameter)
        if not chunks:
            return {}, {}
        offsets, states = chunks[0].offsets, self._state_templates[chunks[0].param_group]
        scalars = next((chunk.scalars for chunk in chunks if chunk.is_ready), None)
        result = {name: v for name, v in states.items() if name not in offsets} if scalars is None else scalars
        return copy.deepcopy(result), {name: dtype for name, (_, dtype) in offsets.items()}

    def is_ready(self, parameter: Any) -> bool:
        """Return whether a parameter has states."""
        return any(chunk.is_ready for chunk in self._chunks.get(parameter, ()))

    def read_state(self, parameter: Any, name: str, begin: int, end: int) -> Tensor:
        """Return elements `begin` to `end` of a state, in row-major order."""
        self._raise_if_failed()
        if not to_local(parameter).is_contiguous():
            return self._read_whole(parameter, name).reshape(-1)[begin:end]
        return self._read_in_memory_order(parameter, name, begin, end)

    @torch.no_grad()
    def write_state(self, parameter: Any, name: str, begin: int, values: Tensor) -> None:
        """Replace elements of a state from `begin` on, in row-major order; call `finish_load` after all states."""
        if not to_local(parameter).is_contiguous():
            begin, values = 0, flat_view(replace_range(self._read_whole(parameter, name), begin, values))
        end = begin + values.numel()
        self._visit_state(parameter, name, begin, end, lambda array, at: array.copy_(values[at]), modify=True)

    def _read_whole(self, parameter: Any, name: str) -> Tensor:
        """Return a state, with the strides of its parameter."""
        shape, shard = local_shape(parameter), to_local(parameter)
        values = self._read_in_memory_order(parameter, name, 0, shape.numel())
        return values.view(shape) if shard.is_contiguous() else values.as_strided(shape, shard.stride())

    def _read_in_memory_order(self, parameter: Any, name: str, begin: int, end: int) -> Tensor:
        result = torch.empty(end - begin, dtype=self._chunks[parameter][0].offsets[name][1])
        self._visit_state(parameter, name, begin, end, lambda array, at: result[at].copy_(array), modify=False)
        return result

    def _visit_state(
        self, parameter: Any, name: str, begin: int, end: int, visit: Callable[[Tensor, slice], object], modify: bool
    ) -> None:
        """Call `visit` with each array of the state, and its elements' slice of `begin` to `end`."""

        def visit_chunks(chunks: list[StateChunk]) -> None:
            for chunk in chunks:
                first, last = max(begin, chunk.begin), min(end, chunk.end)
                array = chunk.arrays()[name][first - chunk.begin : last - chunk.begin]
                visit(array, slice(first - begin, last - begin))

        chunks = [chunk for chunk in self._chunks[parameter] if chunk.begin < end and begin < chunk.end]
        self._visit_groups(visit_chunks, chunks, modify)

    def load_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """Copy everything but the parameters from other parameter groups."""
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the checkpoint has {len(groups)} parameter groups, not {len(self.param_groups)}")
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update({key: copy.copy(value) for key, value in values.items() if key != "params"})

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load all states within; others are reset to those before the first step. If it raises, so do later steps."""
        with self._record_failure():
            self.buffers.reset()
            self.state.clear()
            self._failure = None
            yield

    @torch.no_grad()
    def finish_load(self, parameter: Any, scalars: dict[str, Any], has_master: bool) -> None:
        """Finish loading a parameter, all of whose states are written."""
        chunks = self._chunks.get(parameter, [])
        for chunk in chunks:
            chunk.is_ready, chunk.scalars = has_master, copy.deepcopy(scalars)
            self.state[parameter] = chunk.scalars
        if not has_master:
            self._visit_groups(self._update_masters, [chunk for chunk in chunks if MASTER in chunk.offsets])
        for chunk in chunks:
            chunk.is_ready = True
        if parameter not in self._offloaded:
            self._versions[parameter] = to_local(parameter)._version

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "an earlier step or load has failed, so some parameters and states are updated and some are not; "
                "resume from a checkpoint"
            ) from self._failure

    @contextmanager
    def _record_failure(self) -> Iterator[None]:
        """Record an exception, after which the optimizer is unusable until states are loaded."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    # Implementation.

    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _with_fused(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a group with `fused`, unless the user chose an implementation."""
        is_explicit = group.get("fused") is not None or group.get("foreach") or group.get("differentiable")
        has_fused = "fused" in inspect.signature(type(self._inner).__init__).parameters and not is_explicit
        return {**group, "fused": True} if has_fused else group

    def _state_dtypes(self, chunk: StateChunk) -> dict[str, torch.dtype]:
        """Return the dtypes of a chunk's states, with master weights unless the parameter is stepped in place."""
        p = chunk.parameter
        dtype = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
        in_place = dtype == p.dtype and to_local(p).device == self._step_device
        master = {} if in_place else {MASTER: dtype}
        states = self._state_templates[chunk.param_group].items()
        return master | dict.fromkeys((name for name, v in states if isinstance(v, Tensor) and v.ndim), dtype)

    @torch.no_grad()
    def _elementwise_states(self, group: dict[str, Any]) -> dict[str, Any]:
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
                self._step_inner([{**group, **lr, "params": [full, *pieces]}], states)
            templates = states[full]
            is_elementwise = all(v.shape == full.shape for v in templates.values() if isinstance(v, Tensor) and v.ndim)
            stepped = torch.cat([piece.detach() for piece in pieces])
            is_elementwise = is_elementwise and torch.allclose(full.flatten(), stepped)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{type(self._inner).__name__} cannot be offloaded: {error}") from error
        if not is_elementwise:
            raise ValueError(
                f"{type(self._inner).__name__} does not step each element of a parameter by itself, so its states "
                "cannot be offloaded in parts; use an element-wise optimizer, such as Adam, or states='device' without "
                "te.offload"
            )
        return templates

    def _step_inner(self, groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]]) -> None:
        """Step parameters of `groups` by the user's optimizer; `states`, by parameter, are changed."""
        inner: Any = self._inner
        groups = [self._with_fused(group) for group in groups]
        for group in groups:
            for p in group["params"]:
                if not states.get(p):
                    states[p] = dict(self._constructor_states(p, group))
        inner.param_groups, inner.state = groups, defaultdict(dict, states)
        inner.step()
        states.update(inner.state)
        inner.param_groups, inner.state = [], defaultdict(dict)

    def _constructor_states(self, p: Tensor, group: dict[str, Any]) -> Mapping[str, Any]:
        """Return the states that the optimizer's constructor creates; only Adagrad's does."""
        if not isinstance(self._inner, torch.optim.Adagrad):
            return {}
        return type(self._inner)([p], **{k: v for k, v in group.items() if k in self._inner.defaults}).state[p]

    def _make_sub_groups(self, elements: int) -> Iterator[SubGroup]:
        """Split parameters into chunks, and group them in order, up to `elements` per sub-group."""
        chunks, numel, number = list[StateChunk](), 0, 0
        for param_group, group in enumerate(self.param_groups):
            for p in group["params"]:
                offloaded, size = self._offloaded.get(p), local_shape(p).numel()
                if offloaded is None and not is_dense(to_local(p)):
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} has the strides {to_local(p).stride()}, with gaps in "
                        "its memory; make it contiguous"
                    )
                pieces: list[tuple[int, int, Any]]
                pieces = [(at, min(at + elements, size), None) for at in range(0, size, elements)]
                if offloaded is not None:
                    pieces = [(piece.begin, piece.end, piece) for piece in offloaded.pieces]
                for begin, end, piece in pieces:
                    padded = end - begin if piece is None else round_to_pages(piece.span.num_bytes) // p.dtype.itemsize
                    if chunks and numel + padded > elements:
                        yield SubGroup(number, chunks)
                        chunks, numel, number = [], 0, number + 1
                    chunks.append(StateChunk(p, param_group, begin, end, offloaded, piece))
                    numel += padded
        yield SubGroup(number, chunks)

    def _visit_groups(
        self, work: Callable[[list[StateChunk]], object], chunks: list[StateChunk], modify: bool = True
    ) -> None:
        """Call `work` with the chunks of each sub-group, while it is in memory; `modify`: it changes them."""
        by_group: dict[SubGroup, list[StateChunk]] = {}
        for chunk in chunks:
            by_group.setdefault(chunk.group, []).append(chunk)
        backward = self._steps % 2 == 1
        order = sorted(by_group, key=lambda group: group.index, reverse=backward)
        for group in self.buffers.visit(order, modify):
            work(by_group[group])

    @torch.no_grad()
    def _step_group(self, chunks: list[StateChunk]) -> None:
        """Step chunks of a sub-group, and store the values in their parameters."""
        self._update_masters([chunk for chunk in chunks if not chunk.is_ready])
        values = [c.arrays()[MASTER] if MASTER in c.offsets else self._parameter_values(c) for c in chunks]
        for is_ready, run in groupby(zip(chunks, values, strict=True), key=lambda pair: pair[0].is_ready):
            self._step_chunks(list(run), is_ready)
        for chunk, value in zip(chunks, values, strict=True):
            self._store_values(chunk, value)

    def _step_chunks(self, pairs: list[tuple[StateChunk, Tensor]], has_states: bool) -> None:
        """Step chunks, all of which have states, or none."""
        # Leaves with values, gradients and states, by parameter group.
        states: dict[Any, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        stepped: list[tuple[StateChunk, nn.Parameter, dict[str, Tensor]]] = []
        used = 0
        for chunk, value in pairs:
            leaf, arrays = nn.Parameter(value), chunk.arrays()
            gradient = to_local(self._gradient_of(chunk.parameter))
            gradient = flat_like(gradient, to_local(chunk.parameter))[chunk.begin : chunk.end]
            if (gradient.device, gradient.dtype) != (leaf.device, leaf.dtype):
                begin = -(-used // ALIGNMENT) * ALIGNMENT
                used = begin + leaf.nbytes
                gradient = self._gradient_scratch(leaf.device)[begin:used].view(leaf.dtype).copy_(gradient)
            leaf.grad = gradient
            if has_states:
                states[leaf] = chunk.scalars | {name: array for name, array in arrays.items() if name != MASTER}
            if chunk.param_group not in groups:
                groups[chunk.param_group] = {**self.param_groups[chunk.param_group], "params": []}
            groups[chunk.param_group]["params"].append(leaf)
            stepped.append((chunk, leaf, arrays))
        self._step_inner(list(groups.values()), states)
        # Store the states that are not updated in place.
        for chunk, leaf, arrays in stepped:
            for name, value in states[leaf].items():
                if name not in arrays:
                    chunk.store_scalar(name, value)
                elif value is not arrays[name] and value.data_ptr() != arrays[name].data_ptr():
                    arrays[name].copy_(value.reshape(-1))
            chunk.is_ready = True
            self.state[chunk.parameter] = chunk.scalars

    def _gradient_scratch(self, device: torch.device) -> Tensor:
        """Scratch memory for the gradients of a sub-group, converted to the dtype and device of the step."""
        if self._scratch is None:
            # 8: the largest dtype, float64.
            num_bytes = max(sum(chunk.numel * 8 + ALIGNMENT for chunk in group.chunks) for group in self.groups)
            self._scratch = empty_on(device, num_bytes)
        return self._scratch

    @torch.no_grad()
    def _update_masters(self, chunks: list[StateChunk]) -> None:
        """Set master weights to the parameters' values, except where they round to these already."""
        for chunk in chunks:
            if MASTER in chunk.offsets:
                master, values = chunk.arrays()[MASTER], self._parameter_values(chunk)
                if chunk.is_ready:
                    values = torch.where(master.to(values.dtype) == values, master, values)
                master.copy_(values)

    def _parameter_values(self, chunk: StateChunk) -> Tensor:
        """Return the values of the chunk's parameter, in the parameter's dtype."""
        if chunk.offloaded is None:
            return flat_view(to_local(chunk.parameter))[chunk.begin : chunk.end]
        if chunk.value_offset is not None and MASTER in chunk.offsets:
            return chunk.offloaded.read_piece(chunk.piece)
        return chunk.values()[: chunk.piece.span.num_bytes].view(chunk.offloaded.dtype)

    def _store_values(self, chunk: StateChunk, value: Tensor) -> None:
        """Store stepped values in the parameter, unless they were updated in place."""
        if chunk.offloaded is None:
            if MASTER in chunk.offsets:
                flat_view(to_local(chunk.parameter))[chunk.begin : chunk.end].copy_(value)
            return
        chunk.offloaded.update_piece(chunk.piece, value)
        if MASTER in chunk.offsets:
            chunk.values()[: chunk.piece.span.num_bytes].view(chunk.offloaded.dtype).copy_(value)
        if chunk.value_offset is not None:
            chunk.value_write = chunk.piece.span.write(chunk.values())
            chunk.group.transfers.append(chunk.value_write)

    def _load_states(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Load states by parameter and name."""
        for p, param_states in states.items():
            arrays, scalars = self.layout_of(p)[1], dict[str, Any]()
            for name, value in param_states.items():
                if name in arrays:
                    self.write_state(p, name, 0, to_local(value).reshape(-1))
                elif name != MASTER:
                    scalars[name] = value
            if param_states:
                self.finish_load(p, scalars, MASTER in param_states)

    def _refresh_masters(self, parameter: Any) -> None:
        """Update master weights after a parameter was written without this optimizer."""
        chunks = self._chunks.get(parameter, [])
        chunks = [chunk for chunk in chunks if chunk.is_ready and MASTER in chunk.offsets]
        self._visit_groups(self._update_masters, chunks)

    def _gradient_of(self, parameter: Any) -> Any:
        return self._host_gradients.get(parameter, parameter.grad)

    def _move_gradient(self, parameter: Any) -> None:
        """Add a gradient to that in host memory, and free it on the device."""
        gradient, parameter.grad = to_local(parameter.grad).to("cpu"), None
        previous = self._host_gradients.get(parameter)
        self._host_gradients[parameter] = gradient if previous is None else previous.add_(gradient)


def _slice_states(states: Mapping[str, Any], index: Any) -> dict[str, Any]:
    """Slice the states of a parameter; {} for states on "meta", which have no values."""
    if any(isinstance(value, Tensor) and value.is_meta for value in states.values()):
        return {}
    return {
        name: value[index] if isinstance(value, Tensor) and value.ndim and index is not ... else value
        for name, value in states.items()
    }
