"""Sub-groups of parameters, which are stepped at once, and the host memory in which those on disk are stepped.

A pass over sub-groups reads those that follow and writes those before, `DEPTH` at once. What a pass has visited last
stays in memory, so the next pass, which goes the other way, begins with it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tritonemb.offloading.parameters import Slot
from tritonemb.offloading.tiers import Span, Tier, aligned, pages
from tritonemb.storage.store import IoFuture

ALIGNMENT = 64  # bytes, of a state within its sub-group
MASTER = "master"  # the fp32 weights of a 16-bit parameter, kept among its states
LEAST_BUFFERS = 3  # one is read, one is stepped, one is written
DEPTH = 4  # sub-groups that are read or written at once, at most


class StatePart:
    """Elements of a parameter that are stepped at once, with their states.

    `small` are states of one value, as "step". `piece` is where the values are if the parameter is offloaded;
    `value_at` where they are in the buffer of the sub-group, if that is on disk.
    """

    def __init__(self, parameter: Any, settings: int, begin: int, end: int, slot: Slot | None, piece: Any) -> None:
        self.parameter, self.settings, self.slot = parameter, settings, slot
        self.begin, self.end, self.piece = begin, end, piece
        self.numel, self.small, self.ready = end - begin, dict[str, Any](), False
        self.offsets: dict[str, tuple[int, torch.dtype]] = {}
        self.room: dict[str, Tensor] = {}
        self.value_at: int | None = None
        self.written: IoFuture | None = None  # of the values that are in the buffer
        self.group: SubGroup

    def keep(self, name: str, value: Any) -> None:
        """Keep a state of one value, in the memory made for it, not amid the large temporary tensors of a step."""
        room = self.room.get(name)
        if isinstance(value, Tensor) and room is not None and (room.shape, room.dtype) == (value.shape, value.dtype):
            value = room.copy_(value)
        self.small[name] = value

    def arrays(self) -> dict[str, Tensor]:
        """The states, in the memory of the sub-group."""
        memory = self.group.memory
        return {
            name: memory[offset : offset + self.numel * dtype.itemsize].view(dtype)
            for name, (offset, dtype) in self.offsets.items()
        }

    def values(self) -> Tensor:
        """uint8, whole pages: an offloaded parameter's values in host memory, or room for them in a buffer."""
        if self.value_at is None:
            return self.piece.span.memory
        assert self.group.buffer is not None
        return self.group.buffer[self.value_at : self.value_at + pages(self.piece.span.num_bytes)]


class SubGroup:
    """Parts that are stepped at once.

    Their states are in `states`, or on disk in `span` and at the beginning of a `buffer`, in which values of parameters
    on disk follow.
    """

    def __init__(self, number: int, parts: list[StatePart]) -> None:
        self.number, self.parts, self.state_bytes, self.buffer_bytes = number, parts, 0, 0
        self.states: Tensor | None = None
        self.span: Span | None = None
        self.buffer: Tensor | None = None
        self.moving: list[IoFuture] = []  # between the disk and the buffer
        self.filled = self.dirty = False  # whether the span has something, and whether the buffer has something else
        for part in parts:
            part.group = self

    @property
    def memory(self) -> Tensor:
        found = self.buffer if self.states is None else self.states
        assert found is not None
        return found

    @property
    def is_missing(self) -> bool:
        """Whether it needs a buffer and has none."""
        return self.buffer_bytes > 0 and self.buffer is None

    def lay_out(self, states: Callable[[StatePart], Mapping[str, torch.dtype]]) -> None:
        for part in self.parts:
            for name, dtype in states(part).items():
                part.offsets[name] = self.state_bytes, dtype
                self.state_bytes += -(-part.numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def place(self, tier: Tier | None, device: torch.device) -> None:
        """Let the states be in memory, or on the tier."""
        if tier is None or not self.state_bytes:
            self.states = torch.zeros(pages(self.state_bytes), dtype=torch.uint8, device=device)
        else:
            span = tier.reserve(self.state_bytes)
            self.span, self.states = (span, None) if span.memory is None else (None, span.memory)
        self.buffer_bytes = pages(self.state_bytes) if self.span is not None else 0
        for part in self.parts:
            if part.piece is not None and part.piece.span.memory is None:
                part.value_at = self.buffer_bytes
                self.buffer_bytes += pages(part.piece.span.num_bytes)

    def read(self, buffer: Tensor) -> None:
        """Start to read it into a buffer."""
        self.buffer, self.dirty = buffer, False
        if self.span is not None and self.filled:
            self.moving.append(self.span.read(buffer[: pages(self.state_bytes)]))
        for part in self.parts:
            part.written = None
        self.read_values()

    def read_values(self) -> None:
        """Start to read values that are not among the states and that somebody has written meanwhile."""
        for part in self.parts:
            if part.value_at is not None and MASTER not in part.offsets and part.written is not part.piece.span.written:
                part.written = part.piece.span.written
                self.moving.append(part.piece.span.read(part.values()))

    def wait(self) -> None:
        while self.moving:
            self.moving[0].wait()  # a failure stays: what it has left in the buffer is not to be used
            self.moving.pop(0)

    def write(self) -> tuple[list[IoFuture], Tensor]:
        """Start to write the states, unless the disk has them; give the buffer back with what moves in it."""
        assert self.buffer is not None
        if self.span is not None and self.dirty:
            self.moving.append(self.span.write(self.buffer[: pages(self.state_bytes)]))
            self.filled = True
        found = self.moving, self.buffer
        self.moving, self.buffer = [], None
        return found


class Buffers:
    """Host memory for sub-groups that are on disk. Those that were visited last stay in it."""

    def __init__(self, groups: list[SubGroup], num_bytes: int, device: torch.device) -> None:
        self._groups, self._device, self._made = groups, device, 0
        self.size = max(each.buffer_bytes for each in groups)
        self.number = max(LEAST_BUFFERS, min(num_bytes // max(self.size, 1), len(groups)))
        self._free: list[Tensor] = []
        self._writing: deque[tuple[list[IoFuture], Tensor]] = deque()
        self._resident: dict[SubGroup, None] = {}  # those that have a buffer; the least recently visited first
        self._turn: dict[SubGroup, int] = {}  # of the pass
        self._idle: deque[SubGroup] = deque()  # resident ones that the pass needs no longer

    def over(self, order: list[SubGroup], changes: bool) -> Iterator[SubGroup]:
        """Each sub-group in turn, in memory; those that follow are read meanwhile. `changes`: it is to be written."""
        self._turn = {group: number for number, group in enumerate(order)}
        self._idle = deque(each for each in self._resident if each not in self._turn)
        ahead = 0
        for number, group in enumerate(order):
            if group.is_missing:
                self._read(group, self._take(wait=True))
            ahead = max(ahead, number + 1)
            while ahead < len(order) and (not order[ahead].is_missing or self._read(order[ahead], self._take())):
                ahead += 1
            group.read_values()
            group.wait()
            group.dirty |= changes
            yield group
            if group.buffer is not None:
                del self._resident[group]
                self._resident[group] = None
                self._idle.append(group)
            ready = len(self._free) + len(self._writing) + self.number - self._made
            missing = sum(each.is_missing for each in order[ahead : ahead + DEPTH])
            if self._idle and ready < min(missing, self.number - 1):
                self._evict()

    def drain(self) -> None:
        """Wait until what was written is on the disk."""
        for each in self._resident:
            each.wait()
        for futures, _ in self._writing:
            for future in futures:
                future.wait()

    def reset(self) -> None:
        """Forget what is in memory, and all states."""
        self._free, self._made = [], 0
        self._writing.clear()
        self._resident.clear()
        for each in self._groups:
            each.buffer, each.moving, each.filled = None, [], False
            for part in each.parts:
                part.ready, part.small = False, {}

    def _read(self, group: SubGroup, buffer: Tensor | None) -> bool:
        if buffer is None:
            return False
        self._resident[group] = None
        group.read(buffer)
        return True

    def _take(self, wait: bool = False) -> Tensor | None:
        if not self._free and self._made < self.number:
            self._made += 1
            return aligned(self.size, self._device)
        if wait and not self._free and not self._writing:
            self._evict()
        while self._writing and not self._free:
            futures, buffer = self._writing[0]
            if not (wait or all(each.done() for each in futures)):
                break
            for each in futures:
                each.wait()
            self._writing.popleft()
            self._free.append(buffer)
        return self._free.pop() if self._free else None

    def _evict(self) -> None:
        """Write a sub-group that this pass needs no longer, else the one that it needs last, and free its buffer."""
        group = self._idle.popleft() if self._idle else max(self._resident, key=self._turn.__getitem__)
        del self._resident[group]
        self._writing.append(group.write())
