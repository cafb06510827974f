"""The memory of a cache's slots, which grows, and what lookups are told of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from tritonemb.kernels.layout import FIRST_ROW, NUM_ROWS, ROW_IDS, Layout
from tritonemb.nn.cache_directory import Directory
from tritonemb.nn.table import Table
from tritonemb.nn.tiered_table import TieredTable

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
