"""Optimizer states in host memory or on disk, stepped in sub-groups.

A step goes through sub-groups of the parameters: while one is stepped, the states of the next are read and those of the
one before are written. Every other step goes backward, so the sub-groups that were stepped last are still in memory
(Maurya et al., "MLP-Offload", 2025). The arithmetic is that of the user's own `torch.optim` optimizer on slices of the
parameters that begin at multiples of 4,096 elements: element by element what it would do to the whole, bit by bit, as
its vectors and their remainders are the same.
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
    Slot,
    after_gradients,
    flat,
    flat_like,
    is_dense,
    like,
    local,
    local_shape,
    replaced,
)
from tritonemb.offloading.sub_groups import ALIGNMENT, MASTER, Buffers, StatePart, SubGroup
from tritonemb.offloading.tiers import Tier, empty_on, pages

STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"  # they are called once a step


class OffloadedOptimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer whose states are offloaded. Made by `te.offload`.

    `param_groups`, `zero_grad`, `step`, schedulers and `state_dict` are those of the optimizer it was made from, whose
    `fused` implementation steps, if it has one. Gradients are read from `.grad` of the parameters.

    Args:
        optimizer: of which the class, its hyperparameters and its states are taken.
        slots: of parameters that are offloaded themselves.
        tier: of the states; None for memory of `device`.
        sub_group: elements that are stepped at once.
        buffer_bytes: host memory for sub-groups on disk; at least three.
        ratio: share of the states that stay in memory of the device.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, slots: Mapping[Any, Slot], now: Mapping[Any, list[tuple[Any, Any]]],
        tier: Tier | None, device: torch.device, sub_group: int, buffer_bytes: int, ratio: float = 0.0,
    ) -> None:  # fmt: skip
        self._ready = False
        self._slots, self._device = slots, device
        if "step" in optimizer.__dict__:
            raise ValueError(
                f"the step of this {type(optimizer).__name__} was replaced, by a learning rate scheduler perhaps; make "
                "schedulers of the optimizer that te.offload returns"
            )
        self._inner = copy.copy(optimizer)
        self._inner.__dict__ = dict(optimizer.__dict__) | {name: OrderedDict() for name in STEP_HOOKS}
        parts = {p: now.get(p, [(p, ...)]) for group in optimizer.param_groups for p in group["params"]}
        params = [[new for p in group["params"] for new, _ in parts[p]] for group in optimizer.param_groups]
        super().__init__(
            [{**group, "params": mine} for group, mine in zip(optimizer.param_groups, params, strict=True)],
            dict(optimizer.defaults),
        )
        self.__dict__.update({name: optimizer.__dict__[name] for name in STEP_HOOKS})
        self._ready, self._steps = True, 0
        self._failure: BaseException | None = None
        self._step_on = device if tier is None else torch.device("cpu")
        self._scratch: Tensor | None = None
        self._host_gradients: dict[Any, Tensor] = {}
        self._versions: dict[Any, int] = {}  # of parameters that have master weights, when these were made
        self._states = [self._elementwise_states(group) for group in self.param_groups]
        self.groups = list(self._sub_groups(sub_group))
        self._parts: dict[Any, list[StatePart]] = {}
        kept = round(len(self.groups) * ratio)
        for each in self.groups:
            for part in each.parts:
                self._parts.setdefault(part.parameter, []).append(part)
                states = self._states[part.settings].items()
                part.room = {n: torch.empty_like(v) for n, v in states if isinstance(v, Tensor) and not v.ndim}
            each.lay_out(self._names)
            each.place(tier if each.number >= kept else None, self._step_on)
        self.buffers = Buffers(self.groups, buffer_bytes, device)
        for slot in slots.values():
            slot.changed.append(lambda slot=slot: self._renew(slot.parameter))  # type: ignore[misc]
        if device.type == "cuda" and tier is not None:
            for p in self._parameters():
                if p not in slots:
                    after_gradients(p, self._move_gradient)

    def take_states(self, old: Mapping[Any, Mapping[str, Any]], now: Mapping[Any, list[tuple[Any, Any]]]) -> None:
        """Go on with states of the optimizer that this one was made from."""
        parts = ((p, now.get(p, [(p, ...)])) for p in old)
        self._fill({new: _cut(old[p], part) for p, each in parts for new, part in each})

    # What a user calls.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._ready:
            raise ValueError("parameter groups must be added to the optimizer before te.offload")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, once.

        Raises:
            StorageError: states could not be read or written. Some parameters are stepped then and some are not, so
                every later step raises, too: resume from a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._raise_if_failed()
        with self._failing():
            graded = [p for p in self._parameters() if self._gradient_of(p) is not None]
            for p in graded:
                if p not in self._slots and self._versions.get(p, 0) != local(p)._version:
                    self._renew(p)
            self._over_groups(self._step_group, [part for p in graded for part in self._parts.get(p, ())])
            self._versions.update({p: local(p)._version for p in graded if p not in self._slots})
            self.buffers.drain()
            self._steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._host_gradients.clear()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all parameters, wherever their gradients are; returns the norm."""
        gradients, norm = self.gradients(), self._total_norm(norm_type)
        holders = [nn.Parameter(torch.empty_like(each), requires_grad=False) for each in gradients]
        for each, gradient in zip(holders, gradients, strict=True):
            each.grad = gradient
        torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm)
        return norm

    def _total_norm(self, norm_type: float) -> Tensor:
        """Of all gradients. Those of shards that were moved to host memory are added up over ranks."""
        shards: dict[Any, list[Any]] = {}
        for p in self._parameters():
            moved = isinstance(p, DTensor) and p in self._host_gradients
            if (gradient := self._gradient_of(p)) is not None:
                shards.setdefault((p.device_mesh, p.placements) if moved else None, []).append(gradient)
        norms = []
        for where, gradients in shards.items():
            norm = torch.nn.utils.get_total_norm(gradients, norm_type)
            if where is not None:
                mesh, placements = where
                for dim in [dim for dim, placement in enumerate(placements) if placement.is_shard()]:
                    most = norm_type == torch.inf
                    norm = (norm if most else norm**norm_type).to(self._device)
                    dist.all_reduce(norm, dist.ReduceOp.MAX if most else dist.ReduceOp.SUM, mesh.get_group(dim))
                    norm = (norm if most else norm ** (1 / norm_type)).cpu()
            norms.append(norm)
        return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)

    def gradients(self) -> list[Any]:
        """Of all parameters that have one, wherever it is."""
        return [g for p in self._parameters() if (g := self._gradient_of(p)) is not None]

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer itself, the states in host memory; of a 16-bit parameter with its "master" weights."""
        self._raise_if_failed()
        states: dict[Any, dict[str, Any]] = {p: self.states_of(p) for p in self._parameters()}
        before, self.state = self.state, defaultdict(dict, {p: each for p, each in states.items() if each})
        try:
            return super().state_dict()
        finally:
            self.state = before

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What `state_dict` of this or of the plain optimizer returned.

        Raises:
            ValueError: for other parameter groups, shapes or states; nothing was changed then.
        """
        saved = state_dict["param_groups"]
        mine = [group["params"] for group in self.param_groups]
        if [len(group["params"]) for group in saved] != [len(group) for group in mine]:
            raise ValueError(
                f"the state dict has {[len(group['params']) for group in saved]} parameters in its groups, the "
                f"optimizer has {[len(group) for group in mine]}"
            )
        numbers = [number for group in saved for number in group["params"]]
        found = dict(zip(numbers, [p for group in mine for p in group], strict=True))
        states = {found[number]: each for number, each in state_dict["state"].items()}
        for p, each in states.items():
            missing = self.layout_of(p)[1].keys() - each.keys() - {MASTER} if each else ()
            if missing:
                raise ValueError(
                    f"the state dict has no {', '.join(map(repr, sorted(missing)))} of a parameter of shape "
                    f"{tuple(p.shape)}, which this {type(self._inner).__name__} needs; it is another optimizer's"
                )
            for name, value in each.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                    raise ValueError(
                        f"optimizer state {name!r} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}"
                    )
        with self.loading():
            self.apply_settings(saved)
            self._fill(states)

    def states_of(self, parameter: Any) -> dict[str, Any]:
        """The states of a parameter in memory of their own, DTensors where it is one; {} before its first step."""
        if not self.is_ready(parameter):
            return {}
        small, arrays = self.layout_of(parameter)
        return small | {name: like(self._read_whole(parameter, name), parameter) for name in arrays}

    # What a checkpoint asks.

    def layout_of(self, parameter: Any) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """A parameter's states of one value, before its first step as they are after some; the dtypes of the others."""
        parts = self._parts.get(parameter)
        if not parts:
            return {}, {}
        offsets, states = parts[0].offsets, self._states[parts[0].settings]
        ready = next((part.small for part in parts if part.ready), None)
        small = {name: v for name, v in states.items() if name not in offsets} if ready is None else ready
        return copy.deepcopy(small), {name: dtype for name, (_, dtype) in offsets.items()}

    def is_ready(self, parameter: Any) -> bool:
        """Whether it has been stepped."""
        return any(part.ready for part in self._parts.get(parameter, ()))

    def read_state(self, parameter: Any, name: str, begin: int, end: int) -> Tensor:
        """Elements `begin` to `end` of a state, row by row."""
        self._raise_if_failed()
        if not local(parameter).is_contiguous():
            return self._read_whole(parameter, name).reshape(-1)[begin:end]
        return self._read_in_memory_order(parameter, name, begin, end)

    @torch.no_grad()
    def write_state(self, parameter: Any, name: str, begin: int, values: Tensor) -> None:
        """Replace elements of a state, row by row, from `begin` on; `end_load` makes the parameter have its states."""
        if not local(parameter).is_contiguous():
            begin, values = 0, flat(replaced(self._read_whole(parameter, name), begin, values))
        self._visit_state(parameter, name, begin, begin + values.numel(), lambda mine, at: mine.copy_(values[at]), True)

    def _read_whole(self, parameter: Any, name: str) -> Tensor:
        """A state, with the strides of its parameter."""
        shape, shard = local_shape(parameter), local(parameter)
        values = self._read_in_memory_order(parameter, name, 0, shape.numel())
        return values.view(shape) if shard.is_contiguous() else values.as_strided(shape, shard.stride())

    def _read_in_memory_order(self, parameter: Any, name: str, begin: int, end: int) -> Tensor:
        found = torch.empty(end - begin, dtype=self._parts[parameter][0].offsets[name][1])
        self._visit_state(parameter, name, begin, end, lambda mine, at: found[at].copy_(mine), False)
        return found

    def _visit_state(
        self, parameter: Any, name: str, begin: int, end: int, visit: Callable[[Tensor, slice], object], changes: bool
    ) -> None:
        def visit_parts(parts: list[StatePart]) -> None:
            for part in parts:
                first, last = max(begin, part.begin), min(end, part.end)
                mine = part.arrays()[name][first - part.begin : last - part.begin]
                visit(mine, slice(first - begin, last - begin))

        parts = [part for part in self._parts[parameter] if part.begin < end and begin < part.end]
        self._over_groups(visit_parts, parts, changes)

    def apply_settings(self, settings: list[dict[str, Any]]) -> None:
        if len(settings) != len(self.param_groups):
            raise ValueError(f"the checkpoint has {len(settings)} parameter groups, not {len(self.param_groups)}")
        for group, values in zip(self.param_groups, settings, strict=True):
            group.update({key: copy.copy(value) for key, value in values.items() if key != "params"})

    @contextmanager
    def loading(self) -> Iterator[None]:
        """States are loaded within; those that are not are as before their first step. If it raises, so does a step."""
        with self._failing():
            self.buffers.reset()
            self.state.clear()
            self._failure = None
            yield

    @torch.no_grad()
    def end_load(self, parameter: Any, small: dict[str, Any], has_master: bool) -> None:
        """All states of a parameter were written."""
        parts = self._parts.get(parameter, [])
        for part in parts:
            part.ready, part.small = has_master, copy.deepcopy(small)
            self.state[parameter] = part.small
        if not has_master:
            self._over_groups(self._set_masters, [part for part in parts if MASTER in part.offsets])
        for part in parts:
            part.ready = True
        if parameter not in self._slots:
            self._versions[parameter] = local(parameter)._version

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                "an earlier step or load has failed, so some parameters and states are those before it and some are "
                "not; resume from a checkpoint"
            ) from self._failure

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What raises within leaves the optimizer unusable until states are loaded."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise

    # How it works.

    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _as_stepped(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group whose fused implementation steps, unless another was asked for; its own settings, which a state dict
        has, stay as they are."""
        asked = group.get("fused") is not None or group.get("foreach") or group.get("differentiable")
        fused = "fused" in inspect.signature(type(self._inner).__init__).parameters and not asked
        return {**group, "fused": True} if fused else group

    def _names(self, part: StatePart) -> dict[str, torch.dtype]:
        """The states that its sub-group has; the values that are stepped are among them if they are not its own."""
        p = part.parameter
        dtype = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
        is_own = dtype == p.dtype and local(p).device == self._step_on
        master = {} if is_own else {MASTER: dtype}
        shaped = [name for name, v in self._states[part.settings].items() if isinstance(v, Tensor) and v.ndim]
        return master | dict.fromkeys(shaped, dtype)

    @torch.no_grad()
    def _elementwise_states(self, group: dict[str, Any]) -> dict[str, Any]:
        """The states of a parameter, as they would be; ValueError unless it steps each element by itself."""
        lr = {"lr": 0.01} if "lr" in group else {}  # not 0
        values = torch.linspace(-1, 1, 35)
        whole, parts = nn.Parameter(values.view(5, 7)), [nn.Parameter(each) for each in values.clone().split(16)]
        try:
            states: dict[Any, Any] = {}
            for gradient in (values.flip(0), values.cos()):
                whole.grad = gradient.view(5, 7)
                for part, of_part in zip(parts, gradient.split(16), strict=True):
                    part.grad = of_part.clone()
                self._run([{**group, **lr, "params": [whole, *parts]}], states)
            found = states[whole]
            same = all(v.shape == whole.shape for v in found.values() if isinstance(v, Tensor) and v.ndim)
            same = same and torch.allclose(whole.flatten(), torch.cat([part.detach() for part in parts]))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{type(self._inner).__name__} cannot be offloaded: {error}") from error
        if not same:
            raise ValueError(
                f"{type(self._inner).__name__} does not step each element of a parameter by itself, so its states "
                "cannot be offloaded in parts; use an element-wise optimizer, such as Adam, or states='device' without "
                "te.offload"
            )
        return found

    def _run(self, groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]]) -> None:
        """Step parameters by the user's optimizer; `states` of each, which are changed."""
        inner: Any = self._inner
        groups = [self._as_stepped(group) for group in groups]
        for group in groups:
            for p in group["params"]:
                if not states.get(p):
                    states[p] = dict(self._first_states(p, group))
        inner.param_groups, inner.state = groups, defaultdict(dict, states)
        inner.step()
        states.update(inner.state)
        inner.param_groups, inner.state = [], defaultdict(dict)

    def _first_states(self, p: Tensor, group: dict[str, Any]) -> Mapping[str, Any]:
        """What the optimizer's constructor has made, as Adagrad's does."""
        if not isinstance(self._inner, torch.optim.Adagrad):
            return {}
        return type(self._inner)([p], **{k: v for k, v in group.items() if k in self._inner.defaults}).state[p]

    def _sub_groups(self, elements: int) -> Iterator[SubGroup]:
        parts, numel, number = list[StatePart](), 0, 0
        for settings, group in enumerate(self.param_groups):
            for p in group["params"]:
                slot, size = self._slots.get(p), local_shape(p).numel()
                if slot is None and not is_dense(local(p)):
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} has the strides {local(p).stride()}, so there are gaps "
                        "in its memory; make it contiguous"
                    )
                pieces: list[tuple[int, int, Any]]
                pieces = [(at, min(at + elements, size), None) for at in range(0, size, elements)]
                if slot is not None:
                    pieces = [(each.begin, each.end, each) for each in slot.pieces]
                for begin, end, piece in pieces:
                    most = end - begin if piece is None else pages(piece.span.num_bytes) // p.dtype.itemsize
                    if parts and numel + most > elements:
                        yield SubGroup(number, parts)
                        parts, numel, number = [], 0, number + 1
                    parts.append(StatePart(p, settings, begin, end, slot, piece))
                    numel += most
        yield SubGroup(number, parts)

    def _over_groups(
        self, work: Callable[[list[StatePart]], object], parts: list[StatePart], changes: bool = True
    ) -> None:
        """Call `work` with those of the parts that are of one sub-group, which is in memory; `work` may change it."""
        of_group: dict[SubGroup, list[StatePart]] = {}
        for part in parts:
            of_group.setdefault(part.group, []).append(part)
        backward = self._steps % 2 == 1
        for group in self.buffers.over(sorted(of_group, key=lambda each: each.number, reverse=backward), changes):
            work(of_group[group])

    @torch.no_grad()
    def _step_group(self, parts: list[StatePart]) -> None:
        self._set_masters([part for part in parts if not part.ready])
        values = [part.arrays()[MASTER] if MASTER in part.offsets else self._own_values(part) for part in parts]
        for ready, some in groupby(zip(parts, values, strict=True), key=lambda each: each[0].ready):
            self._step_parts(list(some), ready)
        for part, value in zip(parts, values, strict=True):
            self._put(part, value)

    def _step_parts(self, some: list[tuple[StatePart, Tensor]], ready: bool) -> None:
        states: dict[Any, dict[str, Any]] = {}
        groups: dict[int, dict[str, Any]] = {}
        stepped: list[tuple[StatePart, nn.Parameter, dict[str, Tensor]]] = []
        used = 0
        for part, value in some:
            leaf, arrays = nn.Parameter(value), part.arrays()
            gradient = local(self._gradient_of(part.parameter))
            gradient = flat_like(gradient, local(part.parameter))[part.begin : part.end]
            if (gradient.device, gradient.dtype) != (leaf.device, leaf.dtype):
                begin = -(-used // ALIGNMENT) * ALIGNMENT
                used = begin + leaf.nbytes
                gradient = self._scratch_of(leaf.device)[begin:used].view(leaf.dtype).copy_(gradient)
            leaf.grad = gradient
            if ready:
                states[leaf] = part.small | {name: each for name, each in arrays.items() if name != MASTER}
            if part.settings not in groups:
                groups[part.settings] = {**self.param_groups[part.settings], "params": []}
            groups[part.settings]["params"].append(leaf)
            stepped.append((part, leaf, arrays))
        self._run(list(groups.values()), states)
        for part, leaf, arrays in stepped:
            for name, value in states[leaf].items():
                if name not in arrays:
                    part.keep(name, value)
                elif value is not arrays[name] and value.data_ptr() != arrays[name].data_ptr():
                    arrays[name].copy_(value.reshape(-1))
            part.ready = True
            self.state[part.parameter] = part.small

    def _scratch_of(self, device: torch.device) -> Tensor:
        """Memory for the gradients of a sub-group in another dtype, or from another device."""
        if self._scratch is None:
            most = max(sum(part.numel * 8 + ALIGNMENT for part in group.parts) for group in self.groups)
            self._scratch = empty_on(device, most)
        return self._scratch

    @torch.no_grad()
    def _set_masters(self, parts: list[StatePart]) -> None:
        """Let master weights have the values of the parameters, where they are not rounded to them already."""
        for part in parts:
            if MASTER in part.offsets:
                master, values = part.arrays()[MASTER], self._own_values(part)
                if part.ready:
                    values = torch.where(master.to(values.dtype) == values, master, values)
                master.copy_(values)

    def _own_values(self, part: StatePart) -> Tensor:
        if part.slot is None:
            return flat(local(part.parameter))[part.begin : part.end]
        if part.value_at is not None and MASTER in part.offsets:
            return part.slot.read_piece(part.piece)
        return part.values()[: part.piece.span.num_bytes].view(part.slot.dtype)

    def _put(self, part: StatePart, value: Tensor) -> None:
        """Let the parameter have the stepped values, if they are not its own memory."""
        if part.slot is None:
            if MASTER in part.offsets:
                flat(local(part.parameter))[part.begin : part.end].copy_(value)
            return
        part.slot.changed_piece(part.piece, value)
        if MASTER in part.offsets:
            part.values()[: part.piece.span.num_bytes].view(part.slot.dtype).copy_(value)
        if part.value_at is not None:
            part.written = part.piece.span.write(part.values())
            part.group.moving.append(part.written)

    def _fill(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Let parameters have these states."""
        for p, each in states.items():
            arrays, small = self.layout_of(p)[1], dict[str, Any]()
            for name, value in each.items():
                if name in arrays:
                    self.write_state(p, name, 0, local(value).reshape(-1))
                elif name != MASTER:
                    small[name] = value
            if each:
                self.end_load(p, small, MASTER in each)

    def _renew(self, parameter: Any) -> None:
        """A parameter was written to from outside."""
        parts = self._parts.get(parameter, [])
        self._over_groups(self._set_masters, [part for part in parts if part.ready and MASTER in part.offsets])

    def _gradient_of(self, parameter: Any) -> Any:
        return self._host_gradients.get(parameter, parameter.grad)

    def _move_gradient(self, parameter: Any) -> None:
        gradient, parameter.grad = local(parameter.grad).to("cpu"), None
        before = self._host_gradients.get(parameter)
        self._host_gradients[parameter] = gradient if before is None else before.add_(gradient)


def _cut(states: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """The states of a part of a parameter; those on "meta" have no values to keep."""
    if any(isinstance(value, Tensor) and value.is_meta for value in states.values()):
        return {}
    return {
        name: value[part] if isinstance(value, Tensor) and value.ndim and part is not ... else value
        for name, value in states.items()
    }
