"""Store of offloaded optimizer states, in sub-groups: in memory of the device, in host memory or on disk.

A pass visits sub-groups in order. While one is visited, the next ones are read and previous ones are written. After a
step the order is reversed, so those stepped last are still in memory (Maurya et al., "MLP-Offload", 2025).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonemb.offloading.parameters import OffloadedParam
from tritonemb.offloading.shards import Piece, StoredElements, is_dense, local_shape, overlaps, to_local
from tritonemb.offloading.sub_groups import Buffers, StateChunk, StateLayout, SubGroup
from tritonemb.offloading.tiers import Tier, round_to_pages


@dataclass(frozen=True)
class StatePlacement:
    """Placement of optimizer states."""

    tier: Tier | None  # None: memory of the device
    device: torch.device  # that computes
    elements: int  # limit per sub-group
    buffer_bytes: int  # host memory for sub-groups on disk, of which at least three have a buffer
    ratio: float  # share of the sub-groups that stay in memory

    @property
    def step_device(self) -> torch.device:
        """Device that steps."""
        return self.device if self.tier is None else torch.device("cpu")


class StateStore:
    """Optimizer states by parameter.

    Attributes:
        groups: sub-groups, in the order of the parameters.
        reverse: whether passes visit sub-groups in reverse order.
    """

    def __init__(self, groups: list[SubGroup], placement: StatePlacement) -> None:
        self.groups, self.reverse = groups, False
        self._chunks: dict[Any, list[StateChunk]] = {}
        num_in_memory = round(len(groups) * placement.ratio)
        for group in groups:
            for chunk in group.chunks:
                self._chunks.setdefault(chunk.parameter, []).append(chunk)
            group.allocate(placement.tier if group.index >= num_in_memory else None, placement.step_device)
        self.buffers = Buffers(groups, placement.buffer_bytes, placement.device)

    def chunks(self, parameter: Any) -> Sequence[StateChunk]:
        """Return the chunks of a parameter; none if the optimizer does not step it, or if its shard is empty."""
        return self._chunks.get(parameter, ())

    def is_ready(self, parameter: Any) -> bool:
        """Return whether a parameter has states."""
        return any(chunk.is_ready for chunk in self.chunks(parameter))

    def layout(self, parameter: Any) -> StateLayout:
        """Return a parameter's scalar states (examples before its first step), and the dtypes of the other states."""
        chunks = self.chunks(parameter)
        layout = chunks[0].layout if chunks else StateLayout({}, {})
        scalars = next((chunk.scalars for chunk in chunks if chunk.is_ready), layout.scalars)
        return layout._replace(scalars=copy.deepcopy(scalars))

    def array(self, parameter: Any, name: str) -> "StateArray":
        """Return the accessor of a state with one value per element."""
        return StateArray(self, parameter, name)

    def visit(
        self, work: Callable[[list[StateChunk]], object], chunks: Sequence[StateChunk], modify: bool = True
    ) -> None:
        """Call `work` with the chunks of each sub-group, while it is in memory; `modify`: it changes them."""
        by_group: dict[SubGroup, list[StateChunk]] = {}
        for chunk in chunks:
            by_group.setdefault(chunk.group, []).append(chunk)
        order = sorted(by_group, key=lambda group: group.index, reverse=self.reverse)
        for group in self.buffers.visit(order, modify):
            work(by_group[group])

    @torch.no_grad()
    def update_masters(self, parameter: Any) -> None:
        """Update master weights after a parameter was written without the optimizer."""
        self.visit(_update_masters, [c for c in self.chunks(parameter) if c.is_ready and c.has_master])

    @torch.no_grad()
    def finish_load(self, parameter: Any, scalars: dict[str, Any], has_master: bool) -> None:
        """Finish loading a parameter, all of whose arrays are written, but perhaps the master weights."""
        chunks = self.chunks(parameter)
        for chunk in chunks:
            chunk.is_ready, chunk.scalars = has_master, copy.deepcopy(scalars)
        if not has_master:
            self.visit(_update_masters, [chunk for chunk in chunks if chunk.has_master])
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


def _update_masters(chunks: list[StateChunk]) -> None:
    for chunk in chunks:
        chunk.update_master()


def make_sub_groups(
    params: Sequence[tuple[Any, int]], layouts: Mapping[Any, StateLayout], offloaded: Mapping[Any, OffloadedParam],
    elements: int,
) -> Iterator[SubGroup]:  # fmt: skip
    """Split parameters into chunks, and group them in order, up to `elements` per sub-group.

    Args:
        params: parameters, each with the index of its parameter group.
        layouts: states, by parameter.
        offloaded: offloaded parameters, by parameter.
    """
    chunks, numel, number = list[StateChunk](), 0, 0
    for p, param_group in params:
        source, size = offloaded.get(p), local_shape(p).numel()
        if source is None and not is_dense(to_local(p)):
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} has the strides {to_local(p).stride()}, with gaps in its "
                "memory; make it contiguous"
            )
        pieces: Sequence[Piece] = [Piece(at, min(at + elements, size)) for at in range(0, size, elements)]
        for piece in pieces if source is None else source.pieces:
            item = p.dtype.itemsize
            padded = piece.numel if source is None else round_to_pages(piece.numel * item) // item
            if chunks and numel + padded > elements:
                yield SubGroup(number, chunks)
                chunks, numel, number = [], 0, number + 1
            chunks.append(StateChunk(p, param_group, piece, layouts[p], source))
            numel += padded
    yield SubGroup(number, chunks)
