"""Which rows of a collection's tables are in slots on the device.

The memory of a cache's slots, which grows, and what lookups are told of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tritonemb.layout import FIRST_ROW, NUM_ROWS, ROW_IDS, Layout
from tritonemb.ops.row_cache import NO_ROW, WAYS
from tritonemb.tables.cached_table import TieredTable
from tritonemb.tables.table import Table


class Directory:
    """Tags, uses, pins and dirty marks of all tables' slots, side by side.

    The slots of a table are those of its sets, then its overflow: rows of a batch for which their set has no way left,
    because others that are in use fill it. The overflow grows as batches need it.

    Attributes:
        tags: int64 `[S]`, the row in each slot, or `NO_ROW`.
        used: int64 `[S]`, when it was used last, or how often.
        pins: int32 `[S]`, how many batches hold the slot.
        dirty: bool `[S]`, whether the row differs from where it lives, by batches that have ended.
        num_slots: of each table; 0 of one that lives on the device.
        starts: of each table, where its slots begin; `places_of` is the same, int64 `[T]`.
        parts: tags, uses and pins of each table: views.
    """

    def __init__(self, num_sets: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.num_sets = torch.tensor(num_sets, dtype=torch.int64, device=device)
        self.in_sets = [sets * WAYS for sets in num_sets]
        self.overflow = [_Overflow(size) for size in self.in_sets]
        self.num_slots = list(self.in_sets)
        size = sum(self.num_slots)
        self.tags = torch.full((size,), NO_ROW, dtype=torch.int64, device=device)
        self.used = torch.zeros(size, dtype=torch.int64, device=device)
        self.pins = torch.zeros(size, dtype=torch.int32, device=device)
        self.dirty = torch.zeros(size, dtype=torch.bool, device=device)
        self._cut()

    def empty(self, table: int) -> None:
        """None of a table's rows is in a slot any more. No batch may hold one."""
        mine = self.slice_of(table)
        for values, nothing in ((self.tags, NO_ROW), (self.used, 0), (self.pins, 0), (self.dirty, False)):
            values[mine] = nothing
        self.overflow[table].empty(self.num_slots[table])

    def slice_of(self, table: int) -> slice:
        """Where a table's slots stand among all."""
        return slice(self.starts[table], self.starts[table] + self.num_slots[table])

    def grow(self, more: Sequence[int]) -> None:
        """Give each table's overflow room for so many more rows; places of slots change."""
        for name, empty in (("tags", NO_ROW), ("used", 0), ("pins", 0), ("dirty", False)):
            parts = []
            for part, number in zip(getattr(self, name).split(self.num_slots), more, strict=True):
                parts += [part, part.new_full((number,), empty)]
            setattr(self, name, torch.cat(parts))
        for overflow, first, number in zip(self.overflow, self.num_slots, more, strict=True):
            overflow.grow(first, number)
        self.num_slots = [slots + number for slots, number in zip(self.num_slots, more, strict=True)]
        self._cut()

    def _cut(self) -> None:
        self.starts = [0, *accumulate(self.num_slots)][:-1]
        self.places_of = torch.tensor(self.starts, dtype=torch.int64, device=self.device)
        self.parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = (
            list(self.tags.split(self.num_slots)),
            list(self.used.split(self.num_slots)),
            list(self.pins.split(self.num_slots)),
        )


class _Overflow:
    """The rows of a table that found no way in their set, on the CPU: few, or none, unless a cache is too small."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.empty(first)

    def empty(self, end: int) -> None:
        """No rows; slots up to `end` are free."""
        self.rows = torch.empty(0, dtype=torch.int64, device="cpu")  # ascending
        self.slots = torch.empty(0, dtype=torch.int64, device="cpu")
        self.free = torch.arange(self._first, end, device="cpu")

    def grow(self, first: int, more: int) -> None:
        self.free = torch.cat([self.free, torch.arange(first, first + more, device="cpu")])

    def find(self, rows: Tensor) -> Tensor:
        """The slots of these rows, -1 where there is none."""
        if not self.rows.numel():
            return torch.full_like(rows, -1)
        place = torch.searchsorted(self.rows, rows).clamp_(max=self.rows.numel() - 1)
        return torch.where(self.rows[place] == rows, self.slots[place], -1)

    def put(self, rows: Tensor) -> Tensor:
        """Give slots to rows that have none, ascending; there must be enough."""
        slots, self.free = self.free[: rows.numel()], self.free[rows.numel() :]
        merged, order = torch.cat([self.rows, rows]).sort()
        self.rows, self.slots = merged, torch.cat([self.slots, slots])[order]
        return slots

    def drop(self, which: Tensor) -> None:
        """Free the slots of the rows in these places, bool."""
        self.free = torch.cat([self.slots[which], self.free]).sort().values
        self.rows, self.slots = self.rows[~which], self.slots[~which]


LEAST_GROWTH = 256  # slots by which an overflow grows


class SlotMemory:
    """Weight and states of the slots of a collection's tables.

    One thread at a time may add layouts and make room.

    Args:
        tables: of the collection.
        directory: of their slots, which grows with them.

    Attributes:
        lock: whose holder uses the tables' tensors, which nobody replaces by larger ones meanwhile.
        layouts: by keys: of the tables, of their slots.
    """

    def __init__(self, tables: Sequence[Table], directory: Directory) -> None:
        self._tables, self._directory = list(tables), directory
        self.lock = threading.RLock()
        self.layouts: dict[tuple[str, ...], tuple[Layout, Layout]] = {}

    def add_layout(self, keys: tuple[str, ...], whole: Layout) -> tuple[Layout, Layout]:
        """Keep a layout of the tables, and make it one of their slots.

        Slots have numbers for as many as there could ever be: an overflow holds distinct rows.
        """
        if keys not in self.layouts:
            rows, first = whole.tables.clone(), 0
            for index in range(len(self._tables)):
                rows[index, FIRST_ROW] = first
                first += int(rows[index, NUM_ROWS]) + self._directory.in_sets[index]
            own = whole._replace(tables=rows, num_rows=first)
            self._show(own)
            self.layouts[keys] = whole, own
        return self.layouts[keys]

    def make_room(self, wanted: Sequence[int]) -> None:
        """Let those overflows grow, all at once, that have fewer free slots than wanted."""
        directory, more = self._directory, [0] * len(wanted)
        for index, number in enumerate(wanted):
            lacking = number - directory.overflow[index].free.numel()
            if lacking > 0:
                size = directory.num_slots[index] - directory.in_sets[index]
                room = self._tables[index].config.num_embeddings
                more[index] = min(max(lacking, size, LEAST_GROWTH), room - size)
        if not any(more):
            return
        with self.lock:
            wait_for(directory.device)  # nobody may be reading what is about to move
            directory.grow(more)
            for index, number in enumerate(more):
                if number:
                    self._resize(index)
            self._show(*[own for _, own in self.layouts.values()])
            wait_for(directory.device)  # nor what has not arrived

    def _resize(self, index: int) -> None:
        """Give a table memory for all its slots; rows keep theirs."""
        table, num_slots = self._tables[index], self._directory.num_slots[index]
        for name, tensor in (("weight", table.weight.data), *table.named_buffers(recurse=False)):
            grown = tensor.new_zeros((num_slots, *tensor.shape[1:]))
            grown[: tensor.shape[0]] = tensor
            if name == "weight":
                table.weight.data = grown
            else:
                table._buffers[name] = grown

    def _show(self, *layouts: Layout) -> None:
        """Tell layouts how many slots there are, and where their rows are written."""
        for layout in layouts:
            for index, table in enumerate(self._tables):
                if isinstance(table, TieredTable):
                    layout.tables[index, NUM_ROWS] = self._directory.num_slots[index]
                    layout.tables[index, ROW_IDS] = self._directory.parts[0][index].data_ptr()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
