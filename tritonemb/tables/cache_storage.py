"""Slots of cached tables on the device: which rows are in them, their memory, and transfers from and to the stores."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import FIRST_ROW, NUM_ROWS, ROW_IDS, Layout
from tritonemb.ops.row_cache import NO_ROW, WAYS
from tritonemb.storage import HostRows, IoFuture
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.table import Table

CHUNK_BYTES = 1 << 26  # of rows that are transferred at once where all of a table's are
MIN_GROWTH = 256  # slots by which an overflow grows
MAX_PENDING_BYTES = 1 << 28  # of rows that wait to be written; then their first write is waited for


class CacheDirectory:
    """Tags, uses, pins and dirty flags of all tables' slots, side by side.

    The slots of a table are those of its sets, then its overflow: rows of a batch whose set has no way left, as pinned
    rows fill it. The overflow grows as batches need it.

    Attributes:
        tags: int64 `[S]`, the row in each slot, or `NO_ROW`.
        used: int64 `[S]`, when it was used last, or how often.
        pins: int32 `[S]`, how many batches have pinned the slot.
        dirty: bool `[S]`, whether the row differs from the store's, by batches that have been released.
        num_slots: of each table; 0 of one that is on the device.
        starts: of each table, where its slots begin; `first_slots` is the same, int64 `[T]`.
        parts: tags, uses and pins of each table: views.
    """

    def __init__(self, num_sets: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.num_sets = torch.tensor(num_sets, dtype=torch.int64, device=device)
        self.in_sets = [sets * WAYS for sets in num_sets]
        self.num_slots = list(self.in_sets)
        size = sum(self.num_slots)
        self.tags = torch.full((size,), NO_ROW, dtype=torch.int64, device=device)
        self.used = torch.zeros(size, dtype=torch.int64, device=device)
        self.pins = torch.zeros(size, dtype=torch.int32, device=device)
        self.dirty = torch.zeros(size, dtype=torch.bool, device=device)
        self._split()

    def empty(self, table: int) -> None:
        """Forget which rows of a table are in slots. None may be pinned."""
        mine = self.slice_of(table)
        for values, nothing in ((self.tags, NO_ROW), (self.used, 0), (self.pins, 0), (self.dirty, False)):
            values[mine] = nothing

    def slice_of(self, table: int) -> slice:
        """Where a table's slots are among all."""
        return slice(self.starts[table], self.starts[table] + self.num_slots[table])

    def grow(self, more: Sequence[int]) -> None:
        """Give each table's overflow so many more slots; `starts` change."""
        for name, empty in (("tags", NO_ROW), ("used", 0), ("pins", 0), ("dirty", False)):
            parts = []
            for part, number in zip(getattr(self, name).split(self.num_slots), more, strict=True):
                parts += [part, part.new_full((number,), empty)]
            setattr(self, name, torch.cat(parts))
        self.num_slots = [slots + number for slots, number in zip(self.num_slots, more, strict=True)]
        self._split()

    def overflow_tags(self, table: int) -> Tensor:
        """The rows in the slots of a table's overflow, or `NO_ROW`; nothing as a rule, unless a cache is too small."""
        return self.parts[0][table][self.in_sets[table] :]

    def find_overflow(self, table: int, rows: Tensor) -> Tensor:
        """The slots of those rows that are in a table's overflow, -1 of others."""
        tags, order = self.overflow_tags(table).sort()
        if not tags.numel():
            return torch.full_like(rows, -1)
        index = torch.searchsorted(tags, rows).clamp_(max=tags.numel() - 1)
        return torch.where(tags[index] == rows, order[index] + self.in_sets[table], -1)

    def has_overflow_rows(self) -> bool:
        """Whether some overflow has rows; waits for the device only where one has ever grown."""
        grown = [self.overflow_tags(t) for t, slots in enumerate(self.in_sets) if self.num_slots[t] != slots]
        return bool(grown) and bool((torch.cat(grown) != NO_ROW).any())

    def free_overflow(self, table: int) -> Tensor:
        """The slots of a table's overflow that have no row, ascending."""
        return (self.overflow_tags(table) == NO_ROW).nonzero()[:, 0] + self.in_sets[table]

    def _split(self) -> None:
        self.starts = [0, *accumulate(self.num_slots)][:-1]
        self.first_slots = torch.tensor(self.starts, dtype=torch.int64, device=self.device)
        self.parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = (
            list(self.tags.split(self.num_slots)),
            list(self.used.split(self.num_slots)),
            list(self.pins.split(self.num_slots)),
        )


class CacheStorage:
    """Weight and states of the slots of a collection's tables, and the layouts that describe them to lookups.

    One thread at a time may add layouts and grow overflows.

    Args:
        tables: of the collection.
        directory: of their slots, which grows with them.

    Attributes:
        lock: held while the tables' tensors are used or replaced by larger ones.
        layouts: by keys: of whole tables, of their slots.
    """

    def __init__(self, tables: Sequence[Table], directory: CacheDirectory) -> None:
        self._tables, self._directory = list(tables), directory
        self.lock = threading.RLock()
        self.layouts: dict[tuple[str, ...], tuple[Layout, Layout]] = {}

    def add_layout(self, keys: tuple[str, ...], whole: Layout) -> tuple[Layout, Layout]:
        """Keep a layout of whole tables, and make one of their slots.

        A table has slot numbers for as many slots as there could ever be: an overflow has distinct rows.
        """
        if keys not in self.layouts:
            rows, first = whole.tables.clone(), 0
            for index in range(len(self._tables)):
                rows[index, FIRST_ROW] = first
                first += int(rows[index, NUM_ROWS]) + self._directory.in_sets[index]
            own = whole._replace(tables=rows, num_rows=first)
            self._update_layouts(own)
            self.layouts[keys] = whole, own
        return self.layouts[keys]

    def grow_overflows(self, wanted: Sequence[int]) -> None:
        """Grow those overflows, all at once, that have fewer free slots than wanted."""
        directory, more = self._directory, [0] * len(wanted)
        for index, number in enumerate(wanted):
            if not number:
                continue
            lacking = number - directory.free_overflow(index).numel()
            if lacking > 0:
                size = directory.num_slots[index] - directory.in_sets[index]
                room = self._tables[index].config.num_embeddings
                more[index] = min(max(lacking, size, MIN_GROWTH), room - size)
        if not any(more):
            return
        with self.lock:
            synchronize(directory.device)  # nobody may be reading what is about to move
            directory.grow(more)
            for index, number in enumerate(more):
                if number:
                    self._resize(index)
            self._update_layouts(*[own for _, own in self.layouts.values()])
            synchronize(directory.device)  # nor what has not arrived

    def _resize(self, index: int) -> None:
        """Give a table memory for all its slots; rows keep their slots."""
        table, num_slots = self._tables[index], self._directory.num_slots[index]
        for name, tensor in (("weight", table.weight.data), *table.named_buffers(recurse=False)):
            grown = tensor.new_zeros((num_slots, *tensor.shape[1:]))
            grown[: tensor.shape[0]] = tensor
            if name == "weight":
                table.weight.data = grown
            else:
                table._buffers[name] = grown

    def _update_layouts(self, *layouts: Layout) -> None:
        """Write into layouts how many slots there are, and where the numbers of their rows are."""
        for layout in layouts:
            for index, table in enumerate(self._tables):
                if isinstance(table, CachedTable):
                    layout.tables[index, NUM_ROWS] = self._directory.num_slots[index]
                    layout.tables[index, ROW_IDS] = self._directory.parts[0][index].data_ptr()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RowTransfer:
    """Copies rows with their states between slots and stores, for one thread at a time; host memory is copied at once.

    Args:
        device: of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writes: deque[tuple[IoFuture, int]] = deque()
        self._writing = 0  # bytes of these

    def write(self, table: CachedTable, rows: Tensor, slots: Tensor) -> None:
        """Start to write distinct rows from their slots, which may be reused at once.

        Raises:
            StorageError: an earlier write failed.
        """
        here = table.tensors_on_device()
        if isinstance(table.store, HostRows):
            fields = table.store.fields()
            ops.move_rows_([fields[name] for name in here], list(here.values()), rows, slots)
            return
        rows, order = rows.sort()
        records = self._records(table, rows.numel())
        views = table.record.views(records)
        target = torch.arange(rows.numel(), device=self._device)
        self._move([views[name] for name in here], list(here.values()), target, slots[order])
        self._writes.append((table.store.write(rows.cpu(), records), records.numel()))
        self._writing += records.numel()
        while self._writes and (self._writing > MAX_PENDING_BYTES or self._writes[0][0].done()):
            self._finish_first_write()

    def finish_writes(self) -> None:
        """Wait until all writes are done.

        Raises:
            StorageError: a write failed.
        """
        while self._writes:
            self._finish_first_write()

    def _finish_first_write(self) -> None:
        future, size = self._writes.popleft()
        self._writing -= size
        future.wait()

    def start_read(self, table: CachedTable, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """Start to read rows, ascending, into slots; the result waits until they are there.

        Raises:
            StorageError: a read failed; the result does, too.
        """
        here = table.tensors_on_device()
        if isinstance(table.store, HostRows):
            fields = table.store.fields()
            ops.move_rows_(list(here.values()), [fields[name] for name in here], slots, rows)
            return lambda: None
        records = self._records(table, rows.numel())
        future = table.store.read(rows.cpu(), records)

        def finish() -> None:
            future.wait()
            here, views = table.tensors_on_device(), table.record.views(records)
            source = torch.arange(slots.numel(), device=self._device)
            self._move(list(here.values()), [views[name] for name in here], slots, source)

        return finish

    def _move(self, to: list[Tensor], source: list[Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
        """Between slots and records, which are in host memory."""
        ops.move_rows_(to, source, to_rows, from_rows)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the host uses the records next

    def _records(self, table: CachedTable, number: int) -> Tensor:
        pin = self._device.type == "cuda"
        return torch.zeros(number, table.record.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)


def chunks(table: CachedTable, slots: Tensor) -> Sequence[Tensor]:
    """Slots, so few at once that their records take little memory."""
    return slots.split(max(1, CHUNK_BYTES // table.record.num_bytes)) if slots.numel() else ()
