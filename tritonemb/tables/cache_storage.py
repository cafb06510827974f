"""Device memory of the slots of cached tables, its layouts, and the caches' statistics."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonemb.layout import FIRST_ROW, NUM_ROWS, Layout, set_row_ids
from tritonemb.storage.store import CacheDirectory
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.table import Table

MIN_GROWTH = 256  # slots by which an overflow grows at least, as each growth synchronizes and copies the table's slots


@dataclass(frozen=True)
class CacheStatistics:
    """Cumulative counters of a table's cache.

    Args:
        lookups: distinct rows of each batch, summed over batches.
        hits: lookups of rows that were in slots.
        overflows: misses whose set was full of pinned rows.
        evictions: rows that were evicted.
        read: bytes read from the store, through the host cache or not.
        written: bytes written back to the store.
        host_hits: rows of a table on disk that were read from its host cache (`CacheConfig.host_rows`). This and the
            next two are 0 for a table in host memory.
        disk_read: bytes of rows read from the disk.
        disk_written: bytes of rows written to the disk. The host cache may have dirty rows besides.
    """

    lookups: int = 0
    hits: int = 0
    overflows: int = 0
    evictions: int = 0
    read: int = 0
    written: int = 0
    host_hits: int = 0
    disk_read: int = 0
    disk_written: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 1 without lookups."""
        return self.hits / self.lookups if self.lookups else 1.0


class CacheStorage:
    """Weight and states of the slots of a collection's tables, and the layouts by which lookups address them."""

    def __init__(self, tables: Sequence[Table], directory: CacheDirectory) -> None:
        self._tables, self._directory = list(tables), directory
        self.lock = threading.RLock()  # held while the tables' tensors are used, or replaced by larger ones
        # By keys: the layouts of whole tables and of their slots.
        self.layouts: dict[tuple[str, ...], tuple[Layout, Layout]] = {}

    def add_layout(self, keys: tuple[str, ...], table_layout: Layout) -> tuple[Layout, Layout]:
        """Add a layout of whole tables, and derive that of their slots.

        An overflow has distinct rows, so a table's slot numbers are reserved up to its sets' slots plus its rows.
        """
        with self.lock:  # against a concurrent growth
            if keys not in self.layouts:
                rows, in_sets = table_layout.tables.clone(), self._directory.in_sets
                rows[1:, FIRST_ROW] += rows.new_tensor(in_sets).cumsum(0)[: len(rows) - 1]
                slot_layout = table_layout._replace(tables=rows, num_rows=table_layout.num_rows + sum(in_sets))
                self._update_layouts(slot_layout)
                self.layouts[keys] = table_layout, slot_layout
            return self.layouts[keys]

    def grow_overflows(self, shortages: Sequence[int]) -> None:
        """Grow the overflows of all tables by at least `shortages` slots. One thread at a time may call this."""
        directory, num_new = self._directory, []
        for index, number in enumerate(shortages):
            size = directory.num_slots[index] - directory.in_sets[index]
            max_size = self._tables[index].row_config.num_embeddings - size
            num_new.append(min(max(number, size, MIN_GROWTH), max_size) if number > 0 else 0)
        with self.lock:
            synchronize(directory.device)  # other streams may be reading the old tensors
            directory.grow([*num_new, 0])
            for index, number in enumerate(num_new):
                if number:
                    self._resize(index)
            self._update_layouts(*[slot_layout for _, slot_layout in self.layouts.values()])
            synchronize(directory.device)  # other streams may read the new ones at once

    def _resize(self, index: int) -> None:
        table, num_slots = self._tables[index], self._directory.num_slots[index]
        for name, tensor in Table.tensors(table).items():
            grown = tensor.new_zeros((num_slots, *tensor.shape[1:]))
            grown[: tensor.shape[0]] = tensor
            if name == "weight":
                table.weight.data = grown
            else:
                table._buffers[name] = grown

    def _update_layouts(self, *layouts: Layout) -> None:
        for layout in layouts:
            for index, table in enumerate(self._tables):
                if isinstance(table, CachedTable):
                    layout.tables[index, NUM_ROWS] = self._directory.num_slots[index]
                    set_row_ids(layout, index, self._directory.table_views[0][index], table.row_config.row_origin)
                if (row_ids := table.row_ids()) is not None:
                    set_row_ids(layout, index, row_ids)


def synchronize(device: torch.device) -> None:
    """Wait for all streams of a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
