"""Sub-groups of parameters, which the optimizer steps one by one, and the host buffers of sub-groups on disk.

A pass over sub-groups prefetches the next ones and writes back previous ones. The last sub-groups of a pass stay in
memory, and the next pass, in reverse order, begins with them.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb.offloading.parameters import OffloadedParam
from tritonemb.offloading.shards import Piece, flat_view, to_local
from tritonemb.offloading.tiers import Span, Tier, empty_host, round_to_pages
from tritonemb.storage.store import IoFuture

ALIGNMENT = 64  # bytes: states in a sub-group begin at cache lines
MASTER = "master"  # name of the state with fp32 master weights of a 16-bit parameter
MIN_BUFFERS = 3  # one is read, one is stepped, one is written
PREFETCH_DEPTH = 4  # sub-groups ahead of the pass for which buffers are freed


class StateLayout(NamedTuple):
    """Optimizer states of a parameter.

    Attributes:
        scalars: states with one value, such as "step"; before the first step examples of them.
        dtypes: dtypes of the states with one value per element, by name.
    """

    scalars: dict[str, Any]
    dtypes: dict[str, torch.dtype]


class StateChunk(Piece):
    """Piece of a parameter, with its optimizer states.

    Attributes:
        param_group: index of the optimizer's parameter group.
        source, stored: offloaded parameter, and its piece with the same elements; None if it is not offloaded.
        layout: states of the parameter.
        scalars: states with one value.
        offsets: offset in the sub-group, and dtype, of states with one value per element.
        is_ready: whether it has states.
        value_offset: offset of the parameter's values in the sub-group's buffer, if they are on disk.
        value_write: write of the values in the buffer.
    """

    def __init__(
        self, parameter: Any, param_group: int, piece: Piece, layout: StateLayout, source: OffloadedParam | None
    ) -> None:
        super().__init__(piece.begin, piece.end)
        self.parameter, self.param_group, self.source = parameter, param_group, source
        self.stored: Any = piece if source is not None else None
        self.layout, self.is_ready = layout, False
        self.scalars: dict[str, Any] = {}
        self.offsets: dict[str, tuple[int, torch.dtype]] = {}
        self.value_offset: int | None = None
        self.value_write: IoFuture | None = None
        self.group: SubGroup
        tensors = {name: value for name, value in layout.scalars.items() if isinstance(value, Tensor)}
        self._scalar_memory = {name: torch.empty_like(value) for name, value in tensors.items()}

    @property
    def has_master(self) -> bool:
        """True if it has master weights, which are stepped in place of the parameter."""
        return MASTER in self.layout.dtypes

    # States.

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

    # Values of the parameter.

    def buffer_values(self) -> Tensor:
        """Values of an offloaded parameter, uint8, whole pages: in host memory, or in the sub-group's buffer."""
        if self.value_offset is None:
            return self.stored.span.memory
        assert self.group.buffer is not None
        return self.group.buffer[self.value_offset : self.value_offset + round_to_pages(self.stored.span.num_bytes)]

    def values(self) -> Tensor:
        """Values of the parameter, in its dtype: a view of its memory, or a copy if master weights replace them."""
        if self.source is None:
            return flat_view(to_local(self.parameter))[self.begin : self.end]
        if self.value_offset is not None and self.has_master:
            return self.source.read_piece(self.stored)
        return self._typed_values(self.source)

    def store_values(self, values: Tensor) -> None:
        """Store stepped values in the parameter, unless they were updated in place."""
        if self.source is None:
            if self.has_master:
                self.values().copy_(values)
            return
        self.source.update_piece(self.stored, values)
        if self.has_master:
            self._typed_values(self.source).copy_(values)
        if self.value_offset is not None:
            self.value_write = self.stored.span.write(self.buffer_values())
            self.group.transfers.append(self.value_write)

    def update_master(self) -> None:
        """Set master weights to the parameter's values, except where they round to these already."""
        if self.has_master:
            master, values = self.arrays()[MASTER], self.values()
            if self.is_ready:
                values = torch.where(master.to(values.dtype) == values, master, values)
            master.copy_(values)

    def _typed_values(self, source: OffloadedParam) -> Tensor:
        return self.buffer_values()[: self.stored.span.num_bytes].view(source.dtype)


class SubGroup:
    """Chunks that are stepped together (a sub-group of ZeRO-Infinity).

    Their states are in `states`; or on disk in `span`, and while in use at the begin of a `buffer`, followed by the
    values of parameters on disk.
    """

    def __init__(self, index: int, chunks: list[StateChunk]) -> None:
        self.index, self.chunks, self.state_bytes, self.buffer_bytes = index, chunks, 0, 0
        self.states: Tensor | None = None
        self.span: Span | None = None
        self.buffer: Tensor | None = None
        self.transfers: list[IoFuture] = []  # between the disk and the buffer
        self.is_stored = False  # the span has been written
        self.is_dirty = False  # the buffer has newer states than the span
        for chunk in chunks:
            chunk.group = self

    @property
    def memory(self) -> Tensor:
        """Memory of the states, uint8."""
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
            if chunk.stored is not None and chunk.stored.span.memory is None:
                chunk.value_offset = self.buffer_bytes
                self.buffer_bytes += round_to_pages(chunk.stored.span.num_bytes)

    def begin_read(self, buffer: Tensor) -> None:
        """Start to read states and values into a buffer."""
        self.buffer, self.is_dirty = buffer, False
        if self.span is not None and self.is_stored:
            self.transfers.append(self.span.read(buffer[: round_to_pages(self.state_bytes)]))
        for chunk in self.chunks:
            chunk.value_write = None
        self.begin_read_values()

    def begin_read_values(self) -> None:
        """Start to read values that were written since the last read; master weights replace values."""
        for chunk in self.chunks:
            is_stepped = chunk.value_offset is not None and not chunk.has_master
            if is_stepped and chunk.value_write is not chunk.stored.span.last_write:
                chunk.value_write = chunk.stored.span.last_write
                self.transfers.append(chunk.stored.span.read(chunk.buffer_values()))

    def wait(self) -> None:
        """Wait for all transfers of the buffer."""
        while self.transfers:
            self.transfers[0].wait()  # a failed one stays, so that later waits fail, too
            self.transfers.pop(0)

    def begin_write(self) -> tuple[list[IoFuture], Tensor]:
        """Start to write back dirty states; release the buffer, and return it with its pending transfers."""
        assert self.buffer is not None
        if self.span is not None and self.is_dirty:
            self.transfers.append(self.span.write(self.buffer[: round_to_pages(self.state_bytes)]))
            self.is_stored = True
        result = self.transfers, self.buffer
        self.transfers, self.buffer = [], None
        return result


class Buffers:
    """Host buffers of sub-groups on disk; a cache of those visited last."""

    def __init__(self, groups: list[SubGroup], num_bytes: int, device: torch.device) -> None:
        self._groups, self._device, self._num_allocated = groups, device, 0
        self.buffer_bytes = max(group.buffer_bytes for group in groups)
        self.num_buffers = max(MIN_BUFFERS, min(num_bytes // max(self.buffer_bytes, 1), len(groups)))
        self._free: list[Tensor] = []
        self._writing: deque[tuple[list[IoFuture], Tensor]] = deque()
        self._resident: dict[SubGroup, None] = {}  # sub-groups with a buffer; least recently visited first
        self._pass_order: dict[SubGroup, int] = {}  # positions in the current pass
        self._finished: deque[SubGroup] = deque()  # resident sub-groups that the pass has visited, or skips

    def visit(self, order: list[SubGroup], modify: bool) -> Iterator[SubGroup]:
        """Yield each sub-group of `order`, in memory, while later ones are read. `modify`: mark them dirty."""
        self._pass_order = {group: position for position, group in enumerate(order)}
        self._finished = deque(cached for cached in self._resident if cached not in self._pass_order)
        n = 0
        for position, group in enumerate(order):
            if group.needs_buffer:
                self._begin_read(group, self._acquire(wait=True))
            # Prefetch sub-groups from the n-th on, as far as buffers are free.
            n = max(n, position + 1)
            while n < len(order) and (not order[n].needs_buffer or self._begin_read(order[n], self._acquire())):
                n += 1
            group.begin_read_values()
            group.wait()
            group.is_dirty |= modify
            yield group
            if group.buffer is not None:
                del self._resident[group]
                self._resident[group] = None
                self._finished.append(group)
            # Write back a visited sub-group if the next ones lack buffers.
            num_free = len(self._free) + len(self._writing) + self.num_buffers - self._num_allocated
            num_missing = sum(later.needs_buffer for later in order[n : n + PREFETCH_DEPTH])
            if self._finished and num_free < min(num_missing, self.num_buffers - 1):
                self._evict()

    def drain(self) -> None:
        """Wait for all transfers."""
        for group in self._resident:
            group.wait()
        for futures, _ in self._writing:
            for future in futures:
                future.wait()

    def reset(self) -> None:
        """Discard all states, also in memory."""
        self._free, self._num_allocated = [], 0
        self._writing.clear()
        self._resident.clear()
        for group in self._groups:
            group.buffer, group.transfers, group.is_stored = None, [], False
            for chunk in group.chunks:
                chunk.is_ready, chunk.scalars = False, {}

    def _begin_read(self, group: SubGroup, buffer: Tensor | None) -> bool:
        """Start to read a sub-group; return False without a buffer."""
        if buffer is None:
            return False
        self._resident[group] = None
        group.begin_read(buffer)
        return True

    def _acquire(self, wait: bool = False) -> Tensor | None:
        """Acquire a free buffer; `wait` for one, and evict if need be, else return None."""
        if not self._free and self._num_allocated < self.num_buffers:
            self._num_allocated += 1
            return empty_host(self.buffer_bytes, self._device)
        if wait and not self._free and not self._writing:
            self._evict()
        while self._writing and not self._free:
            futures, buffer = self._writing[0]
            if not (wait or all(future.done() for future in futures)):
                break
            for future in futures:
                future.wait()
            self._writing.popleft()
            self._free.append(buffer)
        return self._free.pop() if self._free else None

    def _evict(self) -> None:
        """Write back a sub-group that the pass has visited, else the one that it needs last, and free its buffer."""
        group = self._finished.popleft() if self._finished else max(self._resident, key=self._pass_order.__getitem__)
        del self._resident[group]
        self._writing.append(group.begin_write())
