"""Device memory of the slots of cached tables, its layouts, its transfers, and the caches' statistics."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import FIRST_ROW, NUM_ROWS, Layout, set_row_ids
from tritonemb.storage.memory import HostRows
from tritonemb.storage.store import CacheDirectory, IoFuture
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.table import Table

MAX_PENDING_BYTES = 1 << 28  # bounds the host memory of pending writes to disk; beyond it, wait for the oldest write
MIN_GROWTH = 256  # slots by which an overflow grows at least, as each growth synchronizes and copies the table's slots
TableRows = tuple[CachedTable, Tensor, Tensor]  # a table, distinct rows of it, and their slots


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
        self.layouts: dict[tuple[str, ...], Layout] = {}  # of slots, by keys

    def slot_layout(self, keys: tuple[str, ...], table_layout: Layout) -> Layout:
        """Return the layout of slots, from that of whole tables with these keys. Thread-safe.

        An overflow has distinct rows, so a table's slot numbers are reserved up to its sets' slots plus its rows.
        """
        if keys not in self.layouts:
            with self.lock, torch.inference_mode(False):  # against a concurrent growth; used in training as well
                rows, in_sets = table_layout.tables.clone(), self._directory.in_sets
                rows[1:, FIRST_ROW] += rows.new_tensor(in_sets).cumsum(0)[: len(rows) - 1]
                layout = table_layout._replace(tables=rows, num_rows=table_layout.num_rows + sum(in_sets))
                self._update_layouts(layout)
                self.layouts.setdefault(keys, layout)
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
            self._update_layouts(*self.layouts.values())
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


class RowTransfer:
    """Copies rows and states between slots and stores, for one thread at a time; disk writes are asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writes: deque[tuple[IoFuture, int]] = deque()  # pending writes with their sizes in bytes
        self._pending_bytes = 0

    def write(self, transfers: Sequence[TableRows]) -> None:
        """Start to write distinct rows; their slots may be reused at once. StorageError if an earlier write failed."""
        on_disk = []
        for table, rows, slots in transfers:
            if isinstance(table.store, HostRows):
                _move(table.store.fields(), Table.tensors(table), rows, slots)
                continue
            rows, order = rows.sort()
            records, target = self._records(table, rows)
            _move(table.record.views(records), Table.tensors(table), target, slots[order])
            on_disk.append((table.store, rows, records))
        host_rows = _on_host([rows for _, rows, _ in on_disk])  # on a GPU this also waits for the records
        for (store, _, records), rows in zip(on_disk, host_rows, strict=True):
            self._writes.append((store.write(rows, records), records.numel()))
            self._pending_bytes += records.numel()
            self.finish_writes(MAX_PENDING_BYTES)

    def finish_writes(self, max_pending: int = -1) -> None:
        """Wait until at most `max_pending` bytes of writes are pending, -1: none. StorageError if a write failed."""
        while self._writes and (self._pending_bytes > max_pending or self._writes[0][0].done()):
            future, size = self._writes.popleft()
            self._pending_bytes -= size
            future.wait()

    def read(self, transfers: Sequence[TableRows]) -> None:
        """Read rows, ascending, into slots. StorageError if a read failed."""
        on_disk = []
        for table, rows, slots in transfers:
            if isinstance(table.store, HostRows):
                _move(Table.tensors(table), table.store.fields(), slots, rows)
            else:
                on_disk.append((table, table.store, rows, slots))
        host_rows, pending = _on_host([rows for _, _, rows, _ in on_disk]), []
        for (table, store, _, slots), rows in zip(on_disk, host_rows, strict=True):
            records, source = self._records(table, slots)
            pending.append((table, slots, store.read(rows, records), records, source))
        for table, slots, future, records, source in pending:
            future.wait()
            _move(Table.tensors(table), table.record.views(records), slots, source)
        if pending and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # before the records are freed

    def _records(self, table: CachedTable, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return empty records in host memory, one per row, and their row numbers on the device."""
        size, pin = (rows.numel(), table.record.num_bytes), self._device.type == "cuda"
        records = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
        return records, torch.arange(rows.numel(), device=self._device)


def _move(to: dict[str, Tensor], source: dict[str, Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
    ops.move_rows_(list(to.values()), [source[name] for name in to], to_rows, from_rows)


def _on_host(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Copy int64 tensors to the host, in one synchronization."""
    return torch.cat(tensors).cpu().split([tensor.numel() for tensor in tensors]) if tensors else ()
