"""Device memory of the slots of cached tables, its layouts, its transfers, and the caches' statistics."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import FIRST_ROW, NUM_ROWS, SLOT_ALIGNMENT, WAYS, Layout, set_row_ids
from tritonemb.storage.memory import HostRows
from tritonemb.storage.store import SCALE, CacheDirectory, IoFuture, decode_rows, encode_rows, wait_all
from tritonemb.tables.cached_rows import CachedRows
from tritonemb.tables.table import Table

MIN_GROWTH = 256  # slots by which an overflow grows at least, as each growth synchronizes and copies the table's slots
RowsByTable = dict[int, CachedRows]  # by number


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
        self.tables, self._directory = list(tables), directory
        self.int8_tables = [number for number, table in enumerate(tables) if table.config.dtype == torch.int8]
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
            max_size = self.tables[index].rows.config.num_embeddings - WAYS  # the rows of a full set are not there
            new_size = min(size + max(number, size, MIN_GROWTH), max_size)
            num_new.append(-(-new_size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT - size if number > 0 else 0)
        with self.lock:
            synchronize(directory.device)  # other streams may be reading the old tensors
            directory.grow([*num_new, 0])
            for index, number in enumerate(num_new):
                if number:
                    self._resize(index)
            self._update_layouts(*self.layouts.values())
            synchronize(directory.device)  # other streams may read the new ones at once

    def _resize(self, index: int) -> None:
        table, num_slots = self.tables[index], self._directory.num_slots[index]
        for name, tensor in table.device_tensors().items():
            spare = tensor.new_zeros((num_slots - tensor.shape[0], *tensor.shape[1:]))
            getattr(table, name).data = torch.cat([tensor, spare])

    def _update_layouts(self, *layouts: Layout) -> None:
        tags = self._directory.tags
        for layout in layouts:
            for index, table in enumerate(self.tables):
                if table.rows.is_cached:
                    layout.tables[index, NUM_ROWS] = self._directory.num_slots[index]
                    set_row_ids(layout, index, tags[self._directory.slice_of(index)], table.rows.config.row_origin)
                if (ids := table._buffers.get("id") if table.rows.is_cached else table.index.ids) is not None:
                    set_row_ids(layout, index, ids)


def synchronize(device: torch.device) -> None:
    """Wait for all streams of a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RowMoves(NamedTuple):
    """Distinct rows of all tables and their slots, table by table; those that are read from a disk ascend per table."""

    sizes: list[int]  # number of rows per table
    starts: Tensor  # int64 `[T + 1]`: the rows of table `t` are `starts[t]` to `starts[t + 1] - 1`
    # int64 `[n]`: number of the table, row in the table, and slot.
    tables: Tensor
    rows: Tensor
    slots: Tensor


class RowTransfer:
    """Copies rows and states between slots and stores, for one thread at a time; disk writes are asynchronous."""

    def __init__(self, tables: Sequence[Table], first_rows: Tensor) -> None:
        self._tables, self._first_rows, self._device = tables, first_rows, first_rows.device
        self._writes: Sequence[IoFuture] = ()  # pending

    def write(self, moves: RowMoves) -> None:
        """Start to write rows; their slots may be reused at once. StorageError if an earlier write failed."""
        if on_disk := self._copy_in_host(moves, False):
            order = (moves.rows + self._first_rows[moves.tables]).argsort()  # rows of a request ascend
            moves = moves._replace(rows=moves.rows[order], slots=moves.slots[order])
            records, copy = self._stage(on_disk, moves)
            copy(False)
            rows = moves.rows.cpu().split(moves.sizes)  # on a GPU this also waits for the records
            requests = [(cached.store, rows[n], records[n]) for n, cached in on_disk.items()]
            self.finish_writes(requests[0][0].transfer(requests, write=True))

    def finish_writes(self, later: Sequence[IoFuture] = ()) -> None:
        """Wait for all writes but `later` ones. StorageError if one failed."""
        earlier, self._writes = self._writes, later
        wait_all(earlier)

    def read(self, moves: RowMoves) -> None:
        """Read rows into slots. StorageError if a read failed."""
        if on_disk := self._copy_in_host(moves, True):
            (records, copy), rows = self._stage(on_disk, moves), moves.rows.cpu().split(moves.sizes)
            requests = [(cached.store, rows[n], records[n]) for n, cached in on_disk.items()]
            wait_all(requests[0][0].transfer(requests, write=False))
            copy(True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # before the records are freed

    def _copy_in_host(self, moves: RowMoves, to_slots: bool) -> RowsByTable:
        """Copy rows between slots and stores in host memory; return the other tables that have rows, by number."""
        tables: RowsByTable = {n: table.rows for n, table in enumerate(self._tables) if moves.sizes[n]}
        in_host = {n: cached.store.fields for n, cached in tables.items() if isinstance(cached.store, HostRows)}
        self._copy(in_host, moves.rows, moves, to_slots)
        return {n: cached for n, cached in tables.items() if n not in in_host}

    def _stage(self, tables: RowsByTable, moves: RowMoves) -> tuple[dict[int, Tensor], Callable[[bool], None]]:
        """Return empty records in host memory, by table, and a function that copies them to, or from, slots."""
        options: Any = {"dtype": torch.uint8, "device": "cpu", "pin_memory": self._device.type == "cuda"}
        records = {n: torch.zeros(moves.sizes[n], table.record.num_bytes, **options) for n, table in tables.items()}
        fields = {n: table.record.views(records[n]) for n, table in tables.items()}
        positions = torch.arange(moves.rows.numel(), device=self._device) - moves.starts[moves.tables]
        return records, partial(self._copy, fields, positions, moves)

    def _copy(self, stored: dict[int, dict[str, Tensor]], rows: Tensor, moves: RowMoves, to_slots: bool) -> None:
        """Copy rows between slots and fields of stores or records, by table, which have them at `rows`."""
        slots, fields, tables = list[Tensor](), list[Tensor](), list[int]()
        for number, views in stored.items():
            if self._tables[number].config.dtype == torch.int8:
                codes = {name: views[name] for name in ("weight", SCALE)}
                self._copy_codes(number, codes, rows, moves, to_slots)
                views = {name: field for name, field in views.items() if name not in codes}
            slots += [getattr(self._tables[number], name) for name in views]
            fields += views.values()
            tables += [number] * len(views)
        if tables and to_slots:
            ops.move_rows_(slots, fields, moves.slots, rows, moves.starts, tables)
        elif tables:
            ops.move_rows_(fields, slots, rows, moves.slots, moves.starts, tables)

    def _copy_codes(
        self, number: int, fields: dict[str, Tensor], rows: Tensor, moves: RowMoves, to_slots: bool
    ) -> None:
        """Decode codes of a table into slots, or encode its rows, through copies on the device."""
        weight, sizes = self._tables[number].weight.detach(), moves.sizes
        slots, field_rows = (values.split(sizes)[number] for values in (moves.slots, rows))
        positions = torch.arange(sizes[number], device=self._device)
        if to_slots:
            copies = [
                field.new_empty(sizes[number], *field.shape[1:], device=self._device) for field in fields.values()
            ]
            ops.move_rows_(copies, [*fields.values()], positions, field_rows)
            weight.index_copy_(0, slots, decode_rows(*copies))
        else:
            ops.move_rows_([*fields.values()], encode_rows(weight.index_select(0, slots)), field_rows, positions)
