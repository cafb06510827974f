"""The memory of cached tables' slots on the device, the layouts of it, and what caches have counted."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonemb.layout import FIRST_ROW, NUM_ROWS, Layout, set_row_ids
from tritonemb.storage.store import CacheDirectory
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.table import Table

MIN_GROWTH = 256  # slots by which an overflow grows


@dataclass(frozen=True)
class CacheStatistics:
    """What a table's cache has done so far.

    Args:
        lookups: distinct rows of batches, counted in each batch.
        hits: of those, rows that were in slots already.
        overflows: of the others, rows for which their set had no way left.
        evictions: rows that were evicted.
        read: bytes read from the store, be it by way of host memory.
        written: bytes written back to the store.
        host_hits: of a table on disk with rows in host memory (`CacheConfig.host_rows`), rows that were read and found
            there; 0 of others, as the next two.
        disk_read: bytes of rows that its disk has read.
        disk_written: bytes of rows that its disk has written; some may be in memory alone yet.
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
        """Hits a lookup; 1 if there were none."""
        return self.hits / self.lookups if self.lookups else 1.0


class CacheStorage:
    """Weight and states of the slots of a collection's tables, and the layouts that describe them to lookups.

    One thread at a time may grow overflows. `lock` is held while the tables' tensors are used or replaced by larger
    ones. `layouts` has, by keys, that of whole tables and that of their slots.
    """

    def __init__(self, tables: Sequence[Table], directory: CacheDirectory) -> None:
        self._tables, self._directory = list(tables), directory
        self.lock = threading.RLock()
        self.layouts: dict[tuple[str, ...], tuple[Layout, Layout]] = {}

    def add_layout(self, keys: tuple[str, ...], whole: Layout) -> tuple[Layout, Layout]:
        """Keep a layout of whole tables, and make one of their slots.

        A table has slot numbers for as many slots as there could ever be: an overflow has distinct rows.
        """
        with self.lock:  # or it would miss slots that grow meanwhile
            if keys not in self.layouts:
                rows, in_sets = whole.tables.clone(), self._directory.in_sets
                rows[1:, FIRST_ROW] += rows.new_tensor(in_sets).cumsum(0)[: len(rows) - 1]
                own = whole._replace(tables=rows, num_rows=whole.num_rows + sum(in_sets))
                self._update_layouts(own)
                self.layouts[keys] = whole, own
            return self.layouts[keys]

    def grow_overflows(self, lacking: Sequence[int]) -> None:
        """Grow the overflows, all at once, of tables that lack so many slots."""
        directory, more = self._directory, []
        for index, number in enumerate(lacking):
            size = directory.num_slots[index] - directory.in_sets[index]
            room = self._tables[index].row_config.num_embeddings - size
            more.append(min(max(number, size, MIN_GROWTH), room) if number > 0 else 0)
        with self.lock:
            synchronize(directory.device)  # nobody may be reading what is about to move
            directory.grow([*more, 0])
            for index, number in enumerate(more):
                if number:
                    self._resize(index)
            self._update_layouts(*[own for _, own in self.layouts.values()])
            synchronize(directory.device)  # nor what has not arrived

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
                    set_row_ids(layout, index, self._directory.parts[0][index], table.row_config.row_origin)
                if (row_ids := table.row_ids()) is not None:
                    set_row_ids(layout, index, row_ids)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
