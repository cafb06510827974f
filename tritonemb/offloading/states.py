"""Offloaded optimizer states and gradients, in sub-groups: in memory of the device, in host memory or on disk.

The optimizer steps sub-groups one by one. A pass visits them in order: while one is visited, the next ones are read and
previous ones are written. After a step the order is reversed, so those stepped last are still in memory (Maurya et al.,
"MLP-Offload", 2025).
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.layout import ALIGNMENT
from tritonemb.offloading.parameters import OffloadedParam
from tritonemb.offloading.shards import Piece, StoredElements, flat_view, is_dense, local_shape, overlaps, to_local
from tritonemb.offloading.tiers import BufferedPages, GradientPages, Span, Tier, empty_host, empty_on, round_to_pages
from tritonemb.storage.store import IoFuture, wait_all

MASTER = "master"  # name of the state with fp32 master weights of a 16-bit parameter
MIN_BUFFERS = 3  # one is read, one is stepped, one is written
PREFETCH_GROUPS = 4  # sub-groups ahead of the pass for which buffers are freed


class StateLayout(NamedTuple):
    """Optimizer states of a parameter."""

    scalars: dict[str, Any]  # states with one value, such as "step"; before the first step examples of them
    dtypes: dict[str, torch.dtype]  # of the states with one value per element, by name


class StateChunk(Piece):
    """Piece of a parameter, with its optimizer states, and its gradient if gradients are stored."""

    def __init__(
        self, parameter: Any, param_group: int, piece: Piece, layout: StateLayout, source: OffloadedParam | None
    ) -> None:
        super().__init__(piece.begin, piece.end)
        self.parameter, self.param_group = parameter, param_group  # the latter is an index
        # Offloaded parameter, and the span of its piece with the same elements.
        self.source, self.span = source, piece.span
        self.stored_values = None if source is None else BufferedPages(piece.span, source.dtype)
        self.gradient: GradientPages | None = None
        # States: those with one value, and in the sub-group's memory the offsets and dtypes of the others.
        self.group: SubGroup
        self.layout, self.is_ready = layout, False
        self.scalars: dict[str, Any] = {}
        self.offsets: dict[str, tuple[int, torch.dtype]] = {}
        tensors = {name: value for name, value in layout.scalars.items() if isinstance(value, Tensor)}
        self._scalar_memory = {name: torch.empty_like(value) for name, value in tensors.items()}

    @property
    def has_master(self) -> bool:
        """True if it has master weights, which are stepped in place of the parameter."""
        return MASTER in self.layout.dtypes

    def store_scalar(self, name: str, value: Any) -> None:
        """Store a state with one value in preallocated memory, which large temporaries of a step cannot fragment."""
        if isinstance(value, Tensor) and (memory := self._scalar_memory.get(name)) is not None:
            is_like = (memory.shape, memory.dtype) == (value.shape, value.dtype)
            value = memory.copy_(value) if is_like else value
        self.scalars[name] = value

    def arrays(self) -> dict[str, Tensor]:
        """Views of the states in the sub-group's memory, by name."""
        memory = self.group.memory
        return {
            name: memory[offset : offset + self.numel * dtype.itemsize].view(dtype)
            for name, (offset, dtype) in self.offsets.items()
        }

    def buffered_pages(self, gradients: bool) -> list[BufferedPages]:
        """Pages that a step reads from disk; master weights replace values."""
        values = None if self.has_master else self.stored_values
        gradient = self.gradient if gradients and self.gradient is not None and self.gradient.is_set else None
        return [pages for pages in (values, gradient) if pages is not None]

    def view_values(self) -> Tensor:
        """View the values of the parameter in its memory, or in the sub-group's buffer, in its dtype."""
        if self.stored_values is None:
            return flat_view(to_local(self.parameter))[self.begin : self.end]
        return self.stored_values.view(self.group.buffer)

    def values(self) -> Tensor:
        """Values of the parameter, in its dtype: a view, or a copy if master weights replace those in the buffer."""
        if self.source is not None and self.has_master and self.span.memory is None:
            return self.source.read_piece(self)
        return self.view_values()

    def store_values(self, values: Tensor) -> None:
        """Store stepped values in the parameter, unless they were updated in place."""
        if self.source is not None:
            self.source.update_piece(self, values)
        if self.has_master:
            self.view_values().copy_(values)
        elif self.source is None:  # the optimizer wrote by a view, which has a version of its own
            torch.autograd.graph.increment_version(to_local(self.parameter))
        if self.stored_values is not None:
            self.group.transfers += self.stored_values.write(self.group.buffer)

    def update_master(self) -> None:
        """Set master weights to the parameter's values, except where they round to these already."""
        if self.has_master:
            master, values = self.arrays()[MASTER], self.values()
            if self.is_ready:
                values = torch.where(master.to(values.dtype) == values, master, values)
            master.copy_(values)


class SubGroup:
    """Chunks that are stepped together (a sub-group of ZeRO-Infinity).

    Their states are in `states`; or on disk in `span`, and while in use at the begin of a `buffer`, followed by the
    values of parameters, and gradients, that are on disk.
    """

    def __init__(self, index: int, chunks: list[StateChunk]) -> None:
        self.index, self.chunks, self.state_bytes, self.buffer_bytes = index, chunks, 0, 0
        self.states: Tensor | None = None
        self.span: Span | None = None
        self.buffer: Tensor | None = None
        self.transfers: list[IoFuture] = []  # between the disk and the buffer
        self.previous: list[IoFuture] = []  # those of the buffer's previous sub-group, before them
        self.is_stored = False  # the span has been written
        self.is_dirty = False  # the buffer has newer states than the span
        for chunk in chunks:
            chunk.group = self

    @property
    def memory(self) -> Tensor:
        memory = self.buffer if self.states is None else self.states
        assert memory is not None
        return memory

    @property
    def needs_buffer(self) -> bool:
        """True if it is on disk and has no buffer."""
        return self.buffer_bytes > 0 and self.buffer is None

    def allocate(self, tier: Tier | None, device: torch.device) -> None:
        """Lay out the states of all chunks, and allocate them in memory, or on the tier."""
        for chunk in self.chunks:
            for name, dtype in chunk.layout.dtypes.items():
                chunk.offsets[name] = self.state_bytes, dtype
                self.state_bytes += -(-chunk.numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if tier is None or not self.state_bytes:
            self.states = torch.zeros(round_to_pages(self.state_bytes), dtype=torch.uint8, device=device)
        else:
            span = tier.reserve(self.state_bytes)
            self.span, self.states = (span, None) if span.memory is None else (None, span.memory)
        self.buffer_bytes = round_to_pages(self.state_bytes) if self.span is not None else 0
        for chunk in self.chunks:
            for pages in (chunk.stored_values, chunk.gradient):
                if pages is not None and pages.span.memory is None:
                    pages.offset = self.buffer_bytes
                    self.buffer_bytes += round_to_pages(pages.span.num_bytes)

    def begin_read(self, buffer: Tensor, previous: list[IoFuture]) -> None:
        self.buffer, self.previous, self.transfers, self.is_dirty = buffer, previous, [*previous], False
        if self.span is not None and self.is_stored:
            self.transfers.append(self.span.read(buffer[: round_to_pages(self.state_bytes)], previous))
        for chunk in self.chunks:
            for pages in chunk.buffered_pages(gradients=True):
                pages.buffered = None

    def begin_read_pages(self, gradients: bool) -> None:
        """Start to read values, and gradients, that were written since the last read."""
        if self.buffer is not None:
            for chunk in self.chunks:
                for pages in chunk.buffered_pages(gradients):
                    self.transfers += pages.begin_read(self.buffer, self.previous)

    def is_read(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)

    def wait(self, modify: bool = False) -> None:
        """Wait for all transfers of the buffer; then, with `modify`, mark it dirty."""
        while self.transfers:
            self.transfers[0].wait()  # a failed one stays, so that later waits fail, too
            self.transfers.pop(0)
        self.previous = []
        self.is_dirty |= modify

    def begin_write(self) -> tuple[list[IoFuture], Tensor]:
        """Start to write back dirty states; release the buffer, and return it with its pending transfers."""
        assert self.buffer is not None
        for chunk in self.chunks:
            self.transfers += [] if chunk.gradient is None else chunk.gradient.write_back()
        if self.span is not None and self.is_dirty:
            self.transfers.append(self.span.write(self.buffer[: round_to_pages(self.state_bytes)]))
            self.is_stored = True
        result = self.transfers, self.buffer
        self.transfers, self.buffer = [], None
        return result


class Buffers:
    """Host buffers of sub-groups on disk; a cache of those visited last."""

    def __init__(self, groups: list[SubGroup], num_bytes: int, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self.buffer_bytes = max(group.buffer_bytes for group in groups)
        self.num_buffers = max(MIN_BUFFERS, min(num_bytes // max(self.buffer_bytes, 1), len(groups)))
        self._free: list[Tensor | None] = [None] * self.num_buffers  # None: not allocated yet
        self._writing: deque[tuple[list[IoFuture], Tensor]] = deque()
        self._resident: dict[SubGroup, None] = {}  # sub-groups with a buffer; least recently visited first
        self._finished: deque[SubGroup] = deque()  # resident sub-groups that the pass has visited, or skips
        self._order, self._cyclic = list[SubGroup](), False  # of the pass; cyclic: so is the next, not reversed

    def visit(self, order: list[SubGroup], gradients: bool, cyclic: bool = False) -> Iterator[SubGroup]:
        """Yield each sub-group of `order`, for which the caller waits, while later ones are read.

        `gradients`: read stored gradients, too. `cyclic`: the next pass has this order, too, not the reverse.
        """
        members = {*order}
        self._finished = deque(group for group in self._resident if group not in members)
        self._order, self._cyclic, n = order, cyclic, 0
        for position, group in enumerate(order):
            n = position if group.needs_buffer else max(n, position)
            # If the next ones lack buffers, write back sub-groups that this pass has visited, or needs late.
            num_missing = min(sum(later.needs_buffer for later in order[n : n + PREFETCH_GROUPS]), self.num_buffers - 1)
            while (num_free := len(self._free) + len(self._writing)) < num_missing:
                if not self._evict(n + PREFETCH_GROUPS if n + num_free < position + PREFETCH_GROUPS else len(order)):
                    break
            # Read this sub-group, and those from the n-th on, as far as buffers are free.
            while n < len(order) and (not order[n].needs_buffer or self._begin_read(order[n], n == position)):
                order[n].begin_read_pages(gradients)
                n += 1
            yield group
            if group.buffer is not None:
                del self._resident[group]
                self._resident[group] = None
                self._finished.append(group)

    def drain(self) -> None:
        """Wait for all transfers."""
        for group in self._resident:
            group.wait()
        for futures, _ in self._writing:
            wait_all(futures)

    def reset(self) -> None:
        """Discard all states, also in memory."""
        self._free = [None] * self.num_buffers
        self._writing.clear()
        self._resident.clear()
        for group in self._groups:
            group.buffer, group.transfers, group.is_stored = None, [], False
            for chunk in group.chunks:
                chunk.is_ready, chunk.scalars = False, {}

    def _begin_read(self, group: SubGroup, evict: bool) -> bool:
        """Start to read a sub-group into a free or written buffer; if there is none, `evict`, or return False."""
        if not self._free and not self._writing and not (evict and self._evict(0)):
            return False
        transfers, buffer = ([], self._free.pop()) if self._free else self._writing.popleft()
        self._resident[group] = None
        group.begin_read(empty_host(self.buffer_bytes, self._device) if buffer is None else buffer, transfers)
        return True

    def _evict(self, begin: int) -> bool:
        """Free a buffer: of the visited sub-group that the next pass needs last, else of the last from `begin` on."""
        if not self._finished:
            self._finished.extend([group for group in self._order[begin:] if group in self._resident][-1:])
            if not self._finished:
                return False
        group = self._finished.pop() if self._cyclic else self._finished.popleft()
        del self._resident[group]
        self._writing.append(group.begin_write())
        return True


@dataclass(frozen=True)
class StatePlacement:
    """Placement of optimizer states and gradients."""

    tier: Tier | None  # None: memory of the device
    gradient_tier: Tier | None  # None: gradients are not stored, but in `.grad`
    device: torch.device  # that computes
    elements: int  # limit per sub-group
    buffer_bytes: int  # host memory for sub-groups on disk, of which at least three have a buffer
    ratio: float  # share of the sub-groups whose states stay in memory

    @property
    def step_device(self) -> torch.device:
        return self.device if self.tier is None else torch.device("cpu")


Params = Sequence[tuple[Any, int]]  # parameters, with indices of their parameter groups
Offloaded = Mapping[Any, OffloadedParam]  # by parameter


class StateStore:
    """Optimizer states, and stored gradients, by parameter."""

    def __init__(
        self, params: Params, examples: Sequence[Mapping[str, Any]], offloaded: Offloaded, placement: StatePlacement
    ) -> None:
        layouts = {p: make_layout(p, examples[number], placement.step_device) for p, number in params}
        self.groups = list(make_sub_groups(params, layouts, offloaded, placement.elements))
        self.reverse = False  # whether passes visit them in reverse order
        self.is_stepping = False  # a backward steps them
        self._step_device = placement.step_device
        self._chunks: dict[Any, list[StateChunk]] = {}
        num_in_memory = round(len(self.groups) * placement.ratio)
        for group in self.groups:
            for chunk in group.chunks:
                self._chunks.setdefault(chunk.parameter, []).append(chunk)
                if placement.gradient_tier is not None:
                    dtype: torch.dtype = chunk.parameter.dtype
                    span = placement.gradient_tier.reserve(chunk.numel * dtype.itemsize)
                    chunk.gradient = GradientPages(span, dtype)
            group.allocate(placement.tier if group.index >= num_in_memory else None, self._step_device)
        self.buffers = Buffers(self.groups, placement.buffer_bytes, placement.device)

    @property
    def parameters(self) -> list[Any]:
        """Parameters with chunks."""
        return [*self._chunks]

    def chunks(self, *parameters: Any) -> list[StateChunk]:
        """Return the chunks of parameters; none for one that the optimizer does not step, or whose shard is empty."""
        return [chunk for parameter in parameters for chunk in self._chunks.get(parameter, ())]

    @cached_property
    def scratch(self) -> Tensor:
        """Scratch memory for the gradients of a sub-group, in the dtype and on the device of the step."""
        # 8: the largest dtype, float64.
        num_bytes = max(sum(chunk.numel * 8 + ALIGNMENT for chunk in group.chunks) for group in self.groups)
        return empty_on(self._step_device, num_bytes)

    def is_ready(self, parameter: Any) -> bool:
        return any(chunk.is_ready for chunk in self.chunks(parameter))

    def layout(self, parameter: Any) -> StateLayout:
        """Return a parameter's scalar states (examples before its first step), and the dtypes of the other states."""
        chunks = self.chunks(parameter)
        layout = chunks[0].layout if chunks else StateLayout({}, {})
        scalars = next((chunk.scalars for chunk in chunks if chunk.is_ready), layout.scalars)
        return layout._replace(scalars=copy.deepcopy(scalars))

    def visit(
        self, work: Callable[[list[StateChunk]], object], chunks: Sequence[StateChunk], modify: bool = True,
        gradients: bool = False,
    ) -> None:  # fmt: skip
        """Call `work` with the chunks of each sub-group, while it is in memory, if `gradients` with stored gradients.

        `modify`: it changes them.
        """
        self.check_idle()
        by_group: dict[SubGroup, list[StateChunk]] = {}
        for chunk in chunks:
            by_group.setdefault(chunk.group, []).append(chunk)
        order = sorted(by_group, key=lambda group: group.index, reverse=self.reverse)
        for group in self.buffers.visit(order, gradients):
            group.wait(modify)
            work(by_group[group])

    def check_idle(self) -> None:
        """Raise RuntimeError while a backward steps sub-groups."""
        if self.is_stepping:
            text = "the closure of step(in_backward=True) cannot read or change gradients and states"
            raise RuntimeError(f"{text}, as some are stepped and some are not; call step() without in_backward")

    @torch.no_grad()
    def update_masters(self, parameter: Any, include_new: bool = False) -> None:
        """Update master weights after a parameter was written without the optimizer; `include_new`: the first ones."""

        chunks = [chunk for chunk in self.chunks(parameter) if chunk.has_master and (chunk.is_ready or include_new)]
        self.visit(lambda visited: [*map(StateChunk.update_master, visited)], chunks)

    def finish_load(self, parameter: Any, scalars: dict[str, Any], has_master: bool) -> None:
        """Finish loading a parameter, all of whose arrays are written, but perhaps the master weights."""
        chunks = self.chunks(parameter)
        for chunk in chunks:
            chunk.is_ready, chunk.scalars = has_master, copy.deepcopy(scalars)
        if not has_master:
            self.update_masters(parameter, include_new=True)
        for chunk in chunks:
            chunk.is_ready = True


class StateArray(StoredElements):
    """State with one value per element of a parameter, in the order of the parameter's memory."""

    def __init__(self, store: StateStore, parameter: Any, name: str) -> None:
        self._store, self._chunks, self._name = store, store.chunks(parameter), name
        shard = to_local(parameter)
        self.shard_shape, self.strides = local_shape(parameter), None if shard.is_contiguous() else shard.stride()

    def load_elements(self, begin: int, end: int) -> Tensor:
        result = torch.empty(end - begin, dtype=self._chunks[0].layout.dtypes[self._name])
        self._visit(begin, end, lambda array, at: result[at].copy_(array), modify=False)
        return result

    @torch.no_grad()
    def store_elements(self, begin: int, values: Tensor) -> None:
        self._visit(begin, begin + values.numel(), lambda array, at: array.copy_(values[at]), modify=True)

    def _visit(self, begin: int, end: int, visit: Callable[[Tensor, slice], object], modify: bool) -> None:
        """Call `visit` with each chunk's array, and its slice of the range."""

        def visit_chunks(chunks: list[StateChunk]) -> None:
            for chunk, in_chunk, in_range in overlaps(chunks, begin, end):
                visit(chunk.arrays()[self._name][in_chunk], in_range)

        self._store.visit(visit_chunks, [chunk for chunk, *_ in overlaps(self._chunks, begin, end)], modify)


def make_layout(parameter: Any, examples: Mapping[str, Any], step_device: torch.device) -> StateLayout:
    """Return a parameter's states, with master weights unless it is stepped in place."""
    dtype = torch.float32 if parameter.dtype in (torch.float16, torch.bfloat16) else parameter.dtype
    in_place = dtype == parameter.dtype and to_local(parameter).device == step_device
    arrays = array_names(examples)
    scalars = {name: value for name, value in examples.items() if name not in arrays}
    # Examples are those of float32 parameters: float32 arrays have the dtype of the parameter's step.
    dtypes = {name: value.dtype for name, value in examples.items() if name in arrays}
    array_dtypes = {name: dtype if example == torch.float32 else example for name, example in dtypes.items()}
    return StateLayout(scalars, ({} if in_place else {MASTER: dtype}) | array_dtypes)


def array_names(states: Mapping[str, Any]) -> set[str]:
    """Return the names of the states with one value per element."""
    return {name for name, value in states.items() if isinstance(value, Tensor) and value.ndim}


def make_sub_groups(
    params: Params, layouts: Mapping[Any, StateLayout], offloaded: Offloaded, elements: int
) -> Iterator[SubGroup]:
    """Split parameters into chunks, and group them in order, up to `elements` per sub-group."""
    chunks, numel, number = list[StateChunk](), 0, 0
    for p, param_group in params:
        if (source := offloaded.get(p)) is None and not is_dense(to_local(p)):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} has the strides {to_local(p).stride()}, with gaps in its "
                "memory; make it contiguous"
            )
        for piece in Piece.split(local_shape(p).numel(), elements) if source is None else source.pieces:
            item = p.dtype.itemsize
            padded = piece.numel if source is None else round_to_pages(piece.numel * item) // item
            if chunks and numel + padded > elements:
                yield SubGroup(number, chunks)
                chunks, numel, number = [], 0, number + 1
            chunks.append(StateChunk(p, param_group, piece, layouts[p], source))
            numel += padded
    yield SubGroup(number, chunks)
