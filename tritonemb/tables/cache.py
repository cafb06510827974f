"""The cache on the device of rows in host memory or on disk.

Before a batch is looked up its distinct rows are pinned in slots: those that are in none are read from their store, and
evict rows that no batch has pinned; dirty ones are written back. A pinned row is never evicted, and a row is in one
slot only. So prefetched batches see every update of those before them: staleness 0, whatever the cache's size.

A prefetch waits for the device that has the ids, so it is done in another thread and on another stream than training.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import FIRST_ROW, NO_ROW, Layout
from tritonemb.storage import CacheDirectory, HostRows, IoFuture
from tritonemb.tables.cache_storage import CacheStatistics, CacheStorage, synchronize
from tritonemb.tables.cached_table import CHUNK_BYTES, CachedTable
from tritonemb.tables.lookup import Lookup, sequence_number
from tritonemb.tables.table import Table

MAX_PENDING_BYTES = 1 << 28  # of rows that wait to be written; then their first write is waited for
LOOKUPS, HITS, OVERFLOWS, EVICTIONS, READ, WRITTEN = range(6)  # what is counted


class RowCache:
    """The cache of a collection's tables, of which at least one is in host memory or on disk.

    Any thread may prefetch batches; one does at a time. `policy` says which row is evicted.

    Attributes:
        tables: by number, those that are cached; None for one on the device.
        stall: seconds of lookups that waited for rows, as their batch had not been prefetched.
    """

    def __init__(self, tables: Sequence[Table], policy: str) -> None:
        self.tables = [table if isinstance(table, CachedTable) else None for table in tables]
        self.device = tables[0].weight.device
        num_sets = [0 if table is None else table.num_sets for table in self.tables]
        self._directory = CacheDirectory(num_sets, policy, self.device)
        self._now = self._directory.now
        self._is_cached = torch.tensor([table is not None for table in self.tables], device=self.device)
        self._counts = np.zeros((WRITTEN + 1, len(tables)), dtype=np.int64)
        self.stall = 0.0
        self.storage, self._lock = CacheStorage(tables, self._directory), threading.RLock()
        self._releases: deque[Lookup] = deque()
        self._last: torch.cuda.Event | None = None  # behind all transfers so far
        self._transfer = RowTransfer(self.device)
        self._failure: BaseException | None = None
        for table in self.tables:
            if table is not None:
                table.cache = self

    def statistics(self) -> dict[str, CacheStatistics]:
        """By cached table. Waits for the host caches of tables on disk."""
        found = {}
        for index, table in enumerate(self.tables):
            if table is not None:
                store, host = table.store, table.counted
                host = host if isinstance(store, HostRows) else host.plus(*store.counts())
                found[table.config.name] = CacheStatistics(*[*self._counts[:, index].tolist(), *host])
        return found

    def pin(self, lookup: Lookup, count: int, whole: Layout, before: int | None) -> None:
        """Pin the rows of a batch and its replica rows in slots, which take the place of the rows in `lookup`.

        Args:
            lookup: a batch of whole tables, with one key for each lookup; its layout is that of the slots already.
            count: of its distinct rows.
            whole: the layout of its keys over whole tables.
            before: rows whose pins are released from this sequence number on are not evicted; None: all may be.

        Raises:
            StorageError: rows cannot be read or written. The cache is in an undefined state.
        """
        groups, first_rows = lookup.groups, whole.tables[:, FIRST_ROW].contiguous()
        own = linear = groups.rows[:count]
        wanted, replica_rows = groups, lookup.replica_rows
        if replica_rows is not None:
            linear = torch.cat([own, replica_rows]).unique()
            wanted = groups._replace(rows=linear, num_groups=torch.full_like(groups.num_groups, linear.numel()))
        tables = torch.searchsorted(first_rows, linear, right=True) - 1
        with self._exclusive(before):
            slots = self._pin(wanted, tables, first_rows, whole)
            pinned = [tables, linear - first_rows[tables], slots[: linear.numel()]]
            if None in self.tables:
                cached = self._is_cached[tables]
                pinned = [values[cached] for values in pinned]
            lookup.tables, lookup.rows, lookup.slots = pinned
            lookup.on_release = self.release
        if replica_rows is not None:
            index = torch.searchsorted(linear, own)
            tables, found = tables[index], slots[index]
            slots = torch.full_like(groups.rows, -1)
            slots[:count] = found
        rows = groups.rows.clone()
        rows[:count] = lookup.layout.tables[:, FIRST_ROW][tables] + slots[:count]
        lookup.values = ops.row_cache_translate(slots, groups.starts, groups.order, groups.num_groups)
        lookup.groups, lookup.ready = groups._replace(rows=rows), self._event()

    def acquire(self, lookup: Lookup) -> bool:
        """Let a lookup by this thread's stream use pinned slots; False if another one has had them.

        ValueError if another collection's cache pinned them.
        """
        if lookup.acquired or lookup.on_release is None:
            return False
        if lookup.on_release != self.release:
            raise ValueError("another collection made these groups; use group() of the one that is called")
        lookup.acquired = True
        if lookup.ready is not None:
            lookup.stream = torch.cuda.current_stream(self.device)
            lookup.stream.wait_event(lookup.ready)
            ids = lookup.values, lookup.offsets, lookup.sample_weights
            for tensor in (*ids, *lookup.groups, lookup.tables, lookup.rows, lookup.slots):
                if tensor is not None:
                    tensor.record_stream(lookup.stream)
        return True

    def row_ids(self, table: int) -> Tensor:
        """int64, the row in each slot of a table; for who holds `storage.lock`."""
        return self._directory.parts[0][table]

    def release(self, lookup: Lookup) -> None:
        """Unpin slots of a batch before the next prefetch."""
        if self.device.type == "cuda":
            here = torch.cuda.current_stream(self.device)
            lookup.events = [used.record_event() for used in (here, lookup.stream) if used is not None]
        lookup.number = sequence_number()
        self._releases.append(lookup)

    def write_back(self) -> None:
        """Write dirty rows to their stores; they stay in their slots."""
        with self._exclusive():
            directory = self._directory
            for index in range(len(self.tables)):
                mine = directory.slice_of(index)
                for slots in self._chunks(index, directory.dirty[mine].nonzero()[:, 0]):
                    self._write(index, directory.tags[mine][slots], slots)
                    self._transfer.finish_writes()
            directory.dirty.zero_()
            synchronize(self.device)  # the host reads next

    @contextmanager
    def reloading(self, table: CachedTable, unpinned: bool = False) -> Iterator[None]:
        """While the store of a table changes; then its rows in slots are read again, even if the change fails.

        Batches keep their slots. With `unpinned` no row is in a slot any more; RuntimeError if a batch has pinned some.
        """
        with self._lock, torch.inference_mode(False):
            with self._exclusive():
                self._transfer.finish_writes()
                synchronize(self.device)
            if unpinned:
                index = self.tables.index(table)
                if bool((self._directory.parts[2][index] > 0).any()):
                    raise RuntimeError(
                        f"a batch has pinned rows of table {table.config.name!r}; finish its backward pass, or drop "
                        "it, first"
                    )
                self._directory.empty(index)
            try:
                yield
            finally:
                with self._exclusive():
                    self._reload(table)

    def _reload(self, table: CachedTable) -> None:
        index, directory = self.tables.index(table), self._directory
        mine = directory.slice_of(index)
        rows, order = directory.tags[mine].sort()
        for slots in self._chunks(index, order[rows != NO_ROW]):
            self._start_read(index, directory.tags[mine][slots], slots)()
        directory.dirty[mine] = False
        synchronize(self.device)

    @contextmanager
    def _exclusive(self, before: int | None = None) -> Iterator[None]:
        """One thread at a time transfers rows, on its own stream, behind all others. A failure here is the cache's."""
        with self._lock, torch.no_grad(), torch.inference_mode(False):
            if self._failure is not None:
                raise RuntimeError(
                    f"an earlier cache transfer failed ({str(self._failure) or repr(self._failure)}); the cache is in "
                    "an undefined state: load a checkpoint into a new module"
                ) from self._failure
            try:
                if self._last is not None:
                    torch.cuda.current_stream(self.device).wait_event(self._last)
                self._unpin_released(before)
                yield
                self._last = self._event()
            except BaseException as error:
                self._failure = error
                raise

    def _unpin_released(self, before: int | None = None) -> None:
        while self._releases and (before is None or self._releases[0].number < before):
            released = self._releases.popleft()
            for event in released.events:
                torch.cuda.current_stream(self.device).wait_event(event)
            with torch.inference_mode(False):
                slots = self._directory.first_slots[released.tables] + released.slots
                self._directory.pins.index_add_(0, slots, torch.full_like(slots, -1, dtype=torch.int32))
                if released.dirty:
                    self._directory.dirty.index_fill_(0, slots, True)

    def _pin(self, groups: ops.RowGroups, tables: Tensor, first_rows: Tensor, whole: Layout) -> Tensor:
        slots = self._directory.look_up(groups.rows, groups.num_groups, whole.tables)
        missing = (slots[: tables.numel()] < 0).nonzero()[:, 0]  # rows of tables on the device have slots
        lookups = self._by_table(tables)
        self._counts[LOOKUPS] += lookups
        self._counts[HITS] += np.subtract(lookups, self._by_table(tables[missing]))
        if missing.numel():
            self._load(missing, groups, tables, first_rows, slots, whole)
        return slots

    def _load(
        self, missing: Tensor, groups: ops.RowGroups, tables: Tensor, first_rows: Tensor, slots: Tensor, whole: Layout
    ) -> None:
        """Give slots to those rows of a batch, by their index, that are in none, and read them."""
        directory = self._directory
        if directory.overflow.numel():
            found = self._pin_overflow(groups.rows[missing], tables[missing], first_rows)
            slots[missing] = found
            missing = missing[found < 0]
            self._evict_overflow()
        evicted = directory.allocate(groups.rows, slots, groups.num_groups, whole.tables)[missing]
        tables, taken = tables[missing], slots[missing]
        rows, sizes = groups.rows[missing] - first_rows[tables], self._by_table(tables)
        victims = evicted != NO_ROW
        self._evict(tables[victims], evicted[victims], taken[victims])
        overflowing = taken < 0
        if bool(overflowing.any()):
            taken[overflowing] = self._allocate_overflow(tables[overflowing], rows[overflowing])
            slots[missing] = taken
        parts = zip(rows.split(sizes), taken.split(sizes), strict=True)
        for finish in [self._start_read(table, *part) for table, part in enumerate(parts) if part[0].numel()]:
            finish()

    def _pin_overflow(self, wanted: Tensor, tables: Tensor, first_rows: Tensor) -> Tensor:
        """Pin linear rows that are in an overflow already: their slots, -1 for others."""
        directory = self._directory
        held, tables_of = self._overflow_slots(directory.tags[directory.overflow] != NO_ROW)
        if not held.numel():
            return torch.full_like(wanted, -1)
        linear, order = (directory.tags[held] + first_rows[tables_of]).sort()
        index = torch.searchsorted(linear, wanted).clamp_(max=linear.numel() - 1)
        there, found = linear[index] == wanted, held[order[index]]
        directory.pins[found[there]] += 1
        self._counts[HITS] += self._by_table(tables[there])
        return torch.where(there, found - directory.first_slots[tables], -1)

    def _evict_overflow(self) -> None:
        directory = self._directory
        free = (directory.tags[directory.overflow] == NO_ROW) | (directory.pins[directory.overflow] > 0)
        idle, tables = self._overflow_slots(~free)
        self._evict(tables, directory.tags[idle], idle - directory.first_slots[tables])
        directory.tags[idle] = NO_ROW

    def _overflow_slots(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Some of the overflows' slots, by their numbers among all slots, and their tables."""
        slots = self._directory.overflow[which]
        return slots, torch.searchsorted(self._directory.first_slots, slots, right=True) - 1

    def _allocate_overflow(self, tables: Tensor, rows: Tensor) -> Tensor:
        """Slots of overflows for rows, by table, whose sets are full."""
        directory, sizes = self._directory, self._by_table(tables)
        lacking = [number - directory.free_overflow(t).numel() if number else 0 for t, number in enumerate(sizes)]
        if max(lacking) > 0:
            self.storage.grow_overflows(lacking)
        self._counts[OVERFLOWS] += sizes
        slots = torch.cat([directory.free_overflow(table)[:number] for table, number in enumerate(sizes) if number])
        index = directory.first_slots[tables] + slots
        directory.tags[index], directory.used[index] = rows, self._now
        directory.pins.index_fill_(0, index, 1)
        return slots

    def _evict(self, tables: Tensor, rows: Tensor, slots: Tensor) -> None:
        if not rows.numel():
            return
        self._counts[EVICTIONS] += self._by_table(tables)
        index = self._directory.first_slots[tables] + slots
        dirty = self._directory.dirty[index]
        self._directory.dirty[index] = False
        sizes = self._by_table(tables[dirty])
        for table, part in enumerate(zip(rows[dirty].split(sizes), slots[dirty].split(sizes), strict=True)):
            self._write(table, *part)

    def _write(self, index: int, rows: Tensor, slots: Tensor) -> None:
        table = self.tables[index]
        if table is not None and rows.numel():
            self._counts[WRITTEN, index] += rows.numel() * table.record.num_bytes
            self._transfer.write(table, rows, slots)

    def _start_read(self, index: int, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        table = self.tables[index]
        assert table is not None
        self._counts[READ, index] += rows.numel() * table.record.num_bytes
        return self._transfer.start_read(table, rows, slots)

    def _chunks(self, index: int, slots: Tensor) -> Sequence[Tensor]:
        """Slots of a table, so few at once that their records take little memory."""
        table = self.tables[index]
        return slots.split(max(1, CHUNK_BYTES // table.record.num_bytes)) if table is not None and slots.numel() else ()

    def _by_table(self, tables: Tensor) -> list[int]:
        return torch.bincount(tables, minlength=len(self.tables)).tolist()

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


class RowTransfer:
    """Copies rows with their states between slots and stores, for one thread at a time; host memory at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writes: deque[tuple[IoFuture, int]] = deque()
        self._writing = 0  # bytes of these

    def write(self, table: CachedTable, rows: Tensor, slots: Tensor) -> None:
        """Start to write distinct rows from their slots, which may be reused; StorageError if an earlier one failed."""
        here = Table.tensors(table)
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
        """Wait until all writes are done; StorageError if one failed."""
        while self._writes:
            self._finish_first_write()

    def _finish_first_write(self) -> None:
        future, size = self._writes.popleft()
        self._writing -= size
        future.wait()

    def start_read(self, table: CachedTable, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """Start to read rows, ascending, into slots; the result waits for them. StorageError if a read failed."""
        here = Table.tensors(table)
        if isinstance(table.store, HostRows):
            fields = table.store.fields()
            ops.move_rows_(list(here.values()), [fields[name] for name in here], slots, rows)
            return lambda: None
        records = self._records(table, rows.numel())
        future = table.store.read(rows.cpu(), records)

        def finish() -> None:
            future.wait()
            here, views = Table.tensors(table), table.record.views(records)
            source = torch.arange(slots.numel(), device=self._device)
            self._move(list(here.values()), [views[name] for name in here], slots, source)

        return finish

    def _move(self, to: list[Tensor], source: list[Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
        ops.move_rows_(to, source, to_rows, from_rows)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the host uses the records next

    def _records(self, table: CachedTable, number: int) -> Tensor:
        return torch.zeros(
            number, table.record.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._device.type == "cuda"
        )
