"""Optimizer states in host memory or on disk, stepped in sub-groups.

A step goes through sub-groups of the parameters: while one is stepped, the states of the next are read and those of the
one before are written. Every other step goes backward, so the sub-groups that were stepped last are still in memory
(Maurya et al., "MLP-Offload", 2025). The arithmetic is that of the user's own `torch.optim` optimizer on slices of the
parameters that begin at multiples of 4,096 elements: element by element what it would do to the whole, bit by bit, as
its vectors and their remainders are the same.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.offloading.parameters import Slot, after_gradients, like, local, local_shape
from tritonemb.offloading.tiers import CPU, DiskTier, Span, Tier, aligned, pages
from tritonemb.storage.store import IoFuture

ALIGNMENT = 64  # bytes, of a state within its sub-group
MASTER = "master"  # the fp32 weights of a 16-bit parameter, kept among its states
WRITES = 4  # of pieces of parameters in flight
LEAST_BUFFERS = 3  # one is read, one is stepped, one is written
DEPTH = 4  # sub-groups that are read or written at once, at most


def flat(tensor: Tensor) -> Tensor:
    """`[numel]`, its elements in the order of memory; a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flat_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The elements of a tensor in the order of another's memory; a view if that is its own."""
    if tensor.stride() != other.stride():
        tensor = torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype).copy_(tensor)
    return flat(tensor)


class StatePart:
    """Elements of a parameter that are stepped at once, with their states.

    `small` are states of one value, as "step". `piece` is where the values are if the parameter is offloaded.
    """

    def __init__(self, parameter: Any, group: int, begin: int, end: int, slot: Slot | None, piece: Any) -> None:
        self.parameter, self.group, self.slot = parameter, group, slot
        self.begin, self.end, self.piece = begin, end, piece
        self.numel, self.small, self.ready = end - begin, dict[str, Any](), False
        self.offsets: dict[str, tuple[int, torch.dtype]] = {}
        self.room: dict[str, Tensor] = {}

    def keep(self, name: str, value: Any) -> None:
        """Keep a state of one value, in the memory made for it, not amid the large temporary tensors of a step."""
        room = self.room.get(name)
        if isinstance(value, Tensor) and room is not None and (room.shape, room.dtype) == (value.shape, value.dtype):
            value = room.copy_(value)
        self.small[name] = value

    def arrays(self, memory: Tensor) -> dict[str, Tensor]:
        """The states, of the memory of the sub-group."""
        return {
            name: memory[offset : offset + self.numel * dtype.itemsize].view(dtype)
            for name, (offset, dtype) in self.offsets.items()
        }


class SubGroup:
    """Parts that are stepped at once. `memory` has their states, if they are in memory; else they are in `span`."""

    def __init__(self, parts: list[StatePart]) -> None:
        self.parts, self.num_bytes = parts, 0
        self.memory: Tensor | None = None
        self.span: Span | None = None
        self.reading: IoFuture | None = None
        self.filled = False  # the span has something

    def lay_out(self, states: Callable[[StatePart], Mapping[str, torch.dtype]]) -> None:
        for part in self.parts:
            for name, dtype in states(part).items():
                part.offsets[name] = self.num_bytes, dtype
                self.num_bytes += -(-part.numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Buffers:
    """Sub-groups on disk that are in memory, as many as there are buffers; what was stepped is written to be reused."""

    def __init__(self, groups: list[SubGroup], num_bytes: int, gpu: torch.device) -> None:
        self.size = max(each.num_bytes for each in groups)
        self.number = max(LEAST_BUFFERS, min(num_bytes // max(pages(self.size), 1), len(groups)))
        self._gpu, self._made = gpu, 0
        self._free: list[Tensor] = []
        self._writing: deque[tuple[IoFuture, Tensor]] = deque()
        self._stepped: OrderedDict[int, SubGroup] = OrderedDict()  # in memory, differ from the disk; the oldest first

    def begin(self, order: list[SubGroup], at: int) -> None:
        """Have the sub-group at this place of the order in memory, and start to read those that follow."""
        for group in order[at:]:
            if group.memory is not None or group.span is None:
                continue
            buffer = self._take(wait=group is order[at])
            if buffer is None:
                break
            group.memory = buffer
            if group.filled:
                group.reading = group.span.read(buffer[: pages(group.num_bytes)])
        group = order[at]
        if group.reading is not None:
            group.reading.wait()
            group.reading = None

    def end(self, group: SubGroup, rest: list[SubGroup]) -> None:
        """The sub-group was stepped, and those of the rest were not."""
        if group.span is None:
            return
        group.filled = True
        self._stepped[id(group)] = group
        needed = sum(each.memory is None and each.span is not None for each in rest)
        if len(self._free) + len(self._writing) + self.number - self._made < min(needed, DEPTH, self.number - 1):
            self._write_oldest()

    def reset(self, groups: list[SubGroup]) -> None:
        """Forget what is in memory, after a failure."""
        self._free, self._made = [], 0
        self._writing.clear()
        self._stepped.clear()
        for each in groups:
            if each.span is not None:
                each.memory = each.reading = None
                each.filled = False
            for part in each.parts:
                part.ready = False

    def _take(self, wait: bool) -> Tensor | None:
        if not self._free and self._made < self.number:
            self._made += 1
            return aligned(self.size, self._gpu)
        while self._writing and not self._free and (wait or self._writing[0][0].done()):
            future, buffer = self._writing.popleft()
            future.wait()
            self._free.append(buffer)
        if wait and not self._free:
            self._write_oldest()
            return self._take(wait)
        return self._free.pop() if self._free else None

    def _write_oldest(self) -> None:
        if self._stepped:
            _, group = self._stepped.popitem(last=False)
            assert group.memory is not None
            assert group.span is not None
            buffer, group.memory = group.memory, None
            self._writing.append((group.span.write(buffer[: pages(group.num_bytes)]), buffer))


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
        self._inner = copy.copy(optimizer)
        self._inner.__dict__ = dict(optimizer.__dict__)
        parts = {p: now.get(p, [(p, ...)]) for group in optimizer.param_groups for p in group["params"]}
        params = [[new for p in group["params"] for new, _ in parts[p]] for group in optimizer.param_groups]
        super().__init__(
            [{**group, "params": mine} for group, mine in zip(optimizer.param_groups, params, strict=True)],
            dict(optimizer.defaults),
        )
        self._ready, self._steps = True, 0
        self._failure: BaseException | None = None
        self._step_on = device if tier is None else torch.device("cpu")
        self._on_disk = isinstance(tier, DiskTier)
        self._scratch: Tensor | None = None
        self._read_ahead: dict[StatePart, tuple[Tensor, IoFuture]] = {}
        self._writes: deque[tuple[Tensor, IoFuture]] = deque()
        self._host_gradients: dict[Any, Tensor] = {}
        for group in self.param_groups:
            self._choose_fused(group)
        self._states = [self._elementwise_states(group) for group in self.param_groups]
        self.groups = list(self._sub_groups(sub_group))
        self._parts: dict[Any, list[StatePart]] = {}
        for each in self.groups:
            for part in each.parts:
                self._parts.setdefault(part.parameter, []).append(part)
                states = self._states[part.group].items()
                part.room = {n: torch.empty_like(v) for n, v in states if isinstance(v, Tensor) and not v.ndim}
        kept = round(len(self.groups) * ratio)
        for number, each in enumerate(self.groups):
            each.lay_out(self._names)
            if tier is None or number < kept or each.num_bytes == 0:
                each.memory = torch.zeros(pages(each.num_bytes), dtype=torch.uint8, device=self._step_on)
                continue
            span = tier.reserve(each.num_bytes)
            each.span, each.memory = (span, None) if span.memory is None else (None, span.memory)
        self.buffers = Buffers(self.groups, buffer_bytes, device)
        for slot in slots.values():
            slot.changed.append(lambda slot=slot: self._renew_masters(slot))  # type: ignore[misc]
        if device.type == "cuda" and tier is not None:
            for p in self._parameters():
                if p not in slots:
                    after_gradients(p, self._move_gradient)

    def take_states(self, old: Mapping[Any, Mapping[str, Any]], now: Mapping[Any, list[tuple[Any, Any]]]) -> None:
        """Go on with states of the optimizer that this one was made from."""
        if any(old.values()):
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
        if self._failure is not None:
            raise RuntimeError(
                "an earlier step has failed, so some parameters were stepped and some were not; resume from a "
                "checkpoint"
            ) from self._failure
        try:
            self._over_groups(self._step_group, lambda part: self._gradient_of(part.parameter) is not None)
        except BaseException as error:
            self._failure = error
            raise
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._host_gradients.clear()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_` of all parameters, wherever their gradients are; returns the norm."""
        gradients = self.gradients()
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        stand_ins = [nn.Parameter(torch.empty_like(each), requires_grad=False) for each in gradients]
        for each, gradient in zip(stand_ins, gradients, strict=True):
            each.grad = gradient
        torch.nn.utils.clip_grads_with_norm_(stand_ins, max_norm, norm)
        return norm

    def gradients(self) -> list[Any]:
        """Of all parameters that have one, wherever it is."""
        return [g for p in self._parameters() if (g := self._gradient_of(p)) is not None]

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer itself, the states in host memory; of a 16-bit parameter with its "master" weights."""
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
            ValueError: for other parameter groups or shapes; nothing was changed then.
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
            for name, value in each.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                    raise ValueError(
                        f"optimizer state {name!r} has shape {tuple(value.shape)}, its parameter {tuple(p.shape)}"
                    )
        self.apply_settings(saved)
        self.begin_load()
        self._fill(states)

    def states_of(self, parameter: Any) -> dict[str, Any]:
        """The states of a parameter in memory of their own, DTensors where it is one; {} before its first step."""
        if not self.is_ready(parameter):
            return {}
        small, arrays = self.layout_of(parameter)
        shape, stride = local_shape(parameter), local(parameter).stride()
        flats = {name: self.read_state(parameter, name, 0, shape.numel()) for name in arrays}
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in small.items()} | {
            name: like(flat.as_strided(shape, stride), parameter) for name, flat in flats.items()
        }

    # What a checkpoint asks.

    def layout_of(self, parameter: Any) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """A parameter's states of one value, before its first step as they are after some; the dtypes of the others."""
        parts = self._parts.get(parameter)
        if not parts:
            return {}, {}
        offsets, states = parts[0].offsets, self._states[parts[0].group]
        ready = next((part.small for part in parts if part.ready), None)
        small = {name: v for name, v in states.items() if name not in offsets} if ready is None else ready
        return small, {name: dtype for name, (_, dtype) in offsets.items()}

    def is_ready(self, parameter: Any) -> bool:
        """Whether it has been stepped."""
        return any(part.ready for part in self._parts.get(parameter, ()))

    def read_state(self, parameter: Any, name: str, begin: int, end: int) -> Tensor:
        """Elements `begin` to `end` of a state, in the order of the parameter's memory."""
        found = torch.empty(end - begin, dtype=self._parts[parameter][0].offsets[name][1])
        self._visit_state(parameter, name, begin, end, lambda mine, at: found[at].copy_(mine))
        return found

    @torch.no_grad()
    def write_state(self, parameter: Any, name: str, begin: int, values: Tensor) -> None:
        """Replace elements of a state from `begin` on; `end_load` makes the parameter have its states."""
        self._visit_state(parameter, name, begin, begin + values.numel(), lambda mine, at: mine.copy_(values[at]))

    def _visit_state(
        self, parameter: Any, name: str, begin: int, end: int, visit: Callable[[Tensor, slice], object]
    ) -> None:
        def visit_parts(group: SubGroup, parts: list[StatePart]) -> None:
            for part in parts:
                first, last = max(begin, part.begin), min(end, part.end)
                mine = part.arrays(_of(group))[name][first - part.begin : last - part.begin]
                visit(mine, slice(first - begin, last - begin))

        self._over_groups(
            visit_parts, lambda part: part.parameter is parameter and part.begin < end and begin < part.end, False
        )

    def apply_settings(self, settings: list[dict[str, Any]]) -> None:
        if len(settings) != len(self.param_groups):
            raise ValueError(f"the checkpoint has {len(settings)} parameter groups, not {len(self.param_groups)}")
        for group, values in zip(self.param_groups, settings, strict=True):
            group.update({key: copy.copy(value) for key, value in values.items() if key != "params"})

    def begin_load(self) -> None:
        if self._failure is not None:
            self.buffers.reset(self.groups)
            self._failure = None

    @torch.no_grad()
    def end_load(self, parameter: Any, small: dict[str, Any], has_master: bool) -> None:
        """All states of a parameter were written."""

        def end(group: SubGroup, parts: list[StatePart]) -> None:
            for part in parts:
                part.ready = True
                part.small = {n: v.clone() if isinstance(v, Tensor) else v for n, v in small.items()}
                self.state[parameter] = part.small
                if MASTER in part.offsets and not has_master:
                    part.arrays(_of(group))[MASTER].copy_(self._own_values(part))

        self._over_groups(end, lambda part: part.parameter is parameter, writes=False)

    # How it works.

    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _choose_fused(self, group: dict[str, Any]) -> None:
        parameters = inspect.signature(type(self._inner).__init__).parameters
        asked = group.get("fused") is not None or group.get("foreach") or group.get("differentiable")
        if "fused" in parameters and not asked:
            group["fused"] = True

    def _compute_dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype

    def _has_master(self, parameter: Any) -> bool:
        """Whether its values are kept among its states, too: then a step writes the parameter, but need not read it."""
        slot, span = self._slots.get(parameter), None
        if slot is not None and slot.pieces:
            span = slot.pieces[0].span
        both_on_disk = self._on_disk and span is not None and span.memory is None
        other = self._compute_dtype(parameter) != parameter.dtype or local(parameter).device != self._step_on
        return other or both_on_disk

    def _names(self, part: StatePart) -> dict[str, torch.dtype]:
        dtype = self._compute_dtype(part.parameter)
        master = {MASTER: dtype} if self._has_master(part.parameter) else {}
        shaped = [name for name, v in self._states[part.group].items() if isinstance(v, Tensor) and v.ndim]
        return master | dict.fromkeys(shaped, dtype)

    @torch.no_grad()
    def _elementwise_states(self, group: dict[str, Any]) -> dict[str, Any]:
        """The states of a parameter, as they would be; ValueError unless it steps each element by itself."""
        values = torch.linspace(-1, 1, 35)
        whole, parts = nn.Parameter(values.view(5, 7)), [nn.Parameter(each) for each in values.clone().split(16)]
        try:
            states: dict[Any, Any] = {}
            for gradient in (values.flip(0), values.cos()):
                whole.grad = gradient.view(5, 7)
                for part, of_part in zip(parts, gradient.split(16), strict=True):
                    part.grad = of_part.clone()
                self._run([{**group, "params": [whole, *parts]}], states)
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
        parts: list[StatePart] = []
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                pieces: list[tuple[int, int, Any]]
                slot, numel = self._slots.get(p), local_shape(p).numel()
                if slot is not None:
                    pieces = [(each.begin, each.end, each) for each in slot.pieces]
                else:
                    pieces = [(at, min(at + elements, numel), None) for at in range(0, numel, elements)]
                for begin, end, piece in pieces:
                    if parts and sum(each.numel for each in parts) + end - begin > elements:
                        yield SubGroup(parts)
                        parts = []
                    parts.append(StatePart(p, number, begin, end, slot, piece))
        yield SubGroup(parts)

    def _over_groups(
        self,
        work: Callable[[SubGroup, list[StatePart]], object],
        which: Callable[[StatePart], bool],
        writes: bool = True,
    ) -> None:
        """Call `work` for each sub-group that has such parts, with its states in memory."""
        order = [(each, parts) for each in self.groups if (parts := [part for part in each.parts if which(part)])]
        if self._steps % 2:
            order.reverse()
        groups = [each for each, _ in order]
        for at, (group, parts) in enumerate(order):
            self.buffers.begin(groups, at)
            for part in (
                part for _, some in order[at : at + 2] for part in some if writes and not part.offsets.get(MASTER)
            ):
                self._start_values(part)
            work(group, parts)
            self.buffers.end(group, groups[at + 1 :])
        while self._writes:
            self._writes.popleft()[1].wait()
        self._steps += writes

    @torch.no_grad()
    def _step_group(self, group: SubGroup, parts: list[StatePart]) -> None:
        memory = _of(group)
        values = [self._values(part, part.arrays(memory)) for part in parts]
        for ready, some in groupby(zip(parts, values, strict=True), key=lambda each: each[0].ready):
            self._step_parts(list(some), memory, ready)
        for part, value in zip(parts, values, strict=True):
            self._put(part, value, part.arrays(memory))

    def _step_parts(self, some: list[tuple[StatePart, Tensor]], memory: Tensor, ready: bool) -> None:
        states: dict[Any, dict[str, Any]] = {}
        leaves: list[tuple[StatePart, nn.Parameter]] = []
        used = 0
        for part, value in some:
            leaf = nn.Parameter(value)
            gradient = local(self._gradient_of(part.parameter))
            gradient = flat_like(gradient, local(part.parameter))[part.begin : part.end]
            if (gradient.device, gradient.dtype) != (leaf.device, leaf.dtype):
                begin = -(-used // ALIGNMENT) * ALIGNMENT
                used = begin + leaf.nbytes
                gradient = self._scratch_of(leaf.device)[begin:used].view(leaf.dtype).copy_(gradient)
            leaf.grad = gradient
            arrays = {name: each for name, each in part.arrays(memory).items() if name != MASTER}
            if ready:
                states[leaf] = {**part.small, **arrays}
            leaves.append((part, leaf))
        groups: dict[int, dict[str, Any]] = {}
        for part, leaf in leaves:
            settings = {key: value for key, value in self.param_groups[part.group].items() if key != "params"}
            groups.setdefault(part.group, {**settings, "params": []})["params"].append(leaf)
        self._run(list(groups.values()), states)
        for part, leaf in leaves:
            arrays = part.arrays(memory)
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
            self._scratch = (
                aligned(most, CPU) if device.type == "cpu" else torch.empty(most, dtype=torch.uint8, device=device)
            )
        return self._scratch

    def _values(self, part: StatePart, arrays: dict[str, Tensor]) -> Tensor:
        """The values to step: the master weights, or the parameter's own."""
        if MASTER in arrays:
            if not part.ready:
                arrays[MASTER].copy_(self._own_values(part))
            return arrays[MASTER]
        return self._own_values(part)

    def _own_values(self, part: StatePart) -> Tensor:
        if part.slot is None:
            return flat(local(part.parameter))[part.begin : part.end]
        self._start_values(part)
        buffer, reading = self._read_ahead.pop(part)
        reading.wait()
        return buffer[: part.piece.span.num_bytes].view(part.slot.dtype)

    def _start_values(self, part: StatePart) -> None:
        """Start to read values that are not among the states."""
        if part.slot is not None and part not in self._read_ahead:
            span = part.piece.span
            if span.memory is not None:
                future = IoFuture()
                future.run(lambda: None)
                self._read_ahead[part] = span.memory, future
            else:
                buffer = self._buffer(span.num_bytes)
                self._read_ahead[part] = buffer, span.read(buffer)

    def _buffer(self, num_bytes: int) -> Tensor:
        """Host memory for a piece: of a write that is done, or new; at most `WRITES` are in flight."""
        if len(self._writes) >= WRITES or (self._writes and self._writes[0][1].done()):
            buffer, future = self._writes.popleft()
            future.wait()
            if pages(num_bytes) <= buffer.numel():
                return buffer[: pages(num_bytes)]
        return aligned(num_bytes, self._device)

    def _put(self, part: StatePart, value: Tensor, arrays: dict[str, Tensor]) -> None:
        """Let the parameter have the stepped values, if they are not its own memory."""
        slot = part.slot
        if slot is None:
            if MASTER in arrays:
                flat(local(part.parameter))[part.begin : part.end].copy_(value)
            return
        slot.changed_piece(part.piece, value)
        span = part.piece.span
        own = span.memory
        if own is None:
            buffer = self._buffer(span.num_bytes)
            buffer[: span.num_bytes].view(slot.dtype).copy_(value)
            self._writes.append((buffer, span.write(buffer)))
        elif MASTER in arrays:
            own[: span.num_bytes].view(slot.dtype).copy_(value)

    def _fill(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Replace the states of parameters; those of others are as before their first step."""
        for p, parts in self._parts.items():
            for part in parts:
                part.small, part.ready = {}, False
            arrays, small = self.layout_of(p)[1], dict[str, Any]()
            for name, value in states.get(p, {}).items():
                if name in arrays:
                    self.write_state(p, name, 0, flat_like(local(value), local(p)))
                elif name != MASTER:
                    small[name] = value
            if states.get(p):
                self.end_load(p, small, MASTER in states[p])

    @torch.no_grad()
    def _renew_masters(self, slot: Slot) -> None:
        """A parameter was written to from outside."""

        def renew(group: SubGroup, parts: list[StatePart]) -> None:
            for part in parts:
                if part.ready and MASTER in part.offsets:
                    part.arrays(_of(group))[MASTER].copy_(self._own_values(part))

        self._over_groups(renew, lambda part: part.slot is slot)

    def _gradient_of(self, parameter: Any) -> Any:
        return self._host_gradients.get(parameter, parameter.grad)

    def _move_gradient(self, parameter: Any) -> None:
        gradient, parameter.grad = local(parameter.grad).to("cpu"), None
        before = self._host_gradients.get(parameter)
        self._host_gradients[parameter] = gradient if before is None else before.add_(gradient)


def _of(group: SubGroup) -> Tensor:
    assert group.memory is not None
    return group.memory


def _cut(states: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """The states of a part of a parameter; those on "meta" have no values to keep."""
    if any(isinstance(value, Tensor) and value.is_meta for value in states.values()):
        return {}
    return {
        name: value[part] if isinstance(value, Tensor) and value.ndim and part is not ... else value
        for name, value in states.items()
    }
