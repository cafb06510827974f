"""The cache on the device of rows in host memory or on disk.

Before a batch is looked up its distinct rows are pinned in slots: those that are in none are read from their store, and
evict rows that no batch has pinned; dirty ones are written back. A pinned row is never evicted, and a row is in one
slot only. So prefetched batches see every update of those before them: staleness 0, whatever the cache's size.

A prefetch waits for the device once, however many tables there are, for all counts; more often while overflows have
slots or get some, and for transfers of tables on disk. So it is done in another thread and on another stream than
training. Until then it has as many rows as the batch has ids; what stands behind the last is of a table without slots.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tritonemb import jagged, ops
from tritonemb.layout import FIRST_ROW, NO_ROW, TableRow, build_layout
from tritonemb.storage.memory import HostRows
from tritonemb.storage.store import CacheDirectory, IoFuture
from tritonemb.tables.cache_storage import CacheStatistics, CacheStorage, synchronize
from tritonemb.tables.cached_table import CHUNK_BYTES, CachedTable
from tritonemb.tables.dynamic_table import CachedHashTable
from tritonemb.tables.lookup import Lookup, sequence_number
from tritonemb.tables.table import Table

MAX_PENDING_BYTES = 1 << 28  # of rows that wait to be written; then their first write is waited for
TableRows = tuple[CachedTable, Tensor, Tensor]  # distinct rows of a table, and their slots
Compacted = tuple[Sequence[Tensor], list[list[int]]]  # positions, and how many there are of each table, by flag
LOOKUPS, HITS, OVERFLOWS, EVICTIONS, READ, WRITTEN = range(6)  # what is counted


class RowCache:
    """The cache of a collection's tables, of which at least one is in host memory or on disk.

    Any thread may prefetch batches; one does at a time. `policy` says which row is evicted. `tables` has, by number,
    those that are cached, None for one on the device; `stall` the seconds in which lookups waited for rows, as their
    batch had not been prefetched.
    """

    def __init__(self, tables: Sequence[Table], policy: str) -> None:
        self.tables = [table if isinstance(table, CachedTable) else None for table in tables]
        self.device = tables[0].weight.device
        num_sets = [0 if table is None else table.num_sets for table in (*self.tables, None)]
        self._directory = CacheDirectory(num_sets, policy, self.device)
        whole = [*(TableRow(0, table.row_config.num_embeddings, 0) for table in tables), TableRow(0, 1, 0)]
        self._whole = build_layout(whole, [], [], [], False, self.device).tables
        self._first_rows = self._whole[:, FIRST_ROW].contiguous()
        self._first_slots = self._first_rows + self._directory.first_slots  # in layouts of the slots
        self._now = self._directory.now
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

    def pin(self, lookup: Lookup, bad: Tensor | None, before: int | None) -> bool:
        """Pin the rows of a batch and its replica rows in slots, which take the place of the rows in `lookup`.

        StorageError if rows cannot be read or written; the cache is in an undefined state then.

        Args:
            lookup: a batch of whole tables, with one key for each lookup; its layout is that of the slots already.
            bad: bool `[]`, on the device. If true, or no row is cached, only releases take effect; returns False.
            before: rows whose pins are released from this sequence number on are not evicted; None: all may be.
        """
        groups, first_rows = lookup.groups, self._first_rows
        own = groups.rows[: int(groups.num_groups) if jagged.is_host_readable(groups.num_groups) else None]
        own = linear = own if bad is None else torch.where(bad, first_rows[-1], own)
        if lookup.replica_rows is not None:
            linear = torch.cat([own, lookup.replica_rows]).unique()
        tables = torch.searchsorted(first_rows, linear, right=True) - 1
        with self._exclusive(before):
            slots, pinned = self._pin(linear, tables)
            if bad is not None and not pinned.numel():
                self._now -= 1
                return False
            lookup.tables, lookup.slots = tables.index_select(0, pinned), slots.index_select(0, pinned)
            lookup.rows = linear.index_select(0, pinned) - first_rows.index_select(0, lookup.tables)
            lookup.on_release = self.release
        if lookup.replica_rows is not None:
            index = torch.searchsorted(linear, own)
            tables, slots = tables[index], slots[index]
        rows, by_group = groups.rows.clone(), torch.full_like(groups.rows, -1)
        rows[: own.numel()], by_group[: own.numel()] = self._first_slots.index_select(0, tables) + slots, slots
        lookup.values = ops.row_cache_translate(by_group, groups.starts, groups.order, groups.num_groups)
        lookup.groups, lookup.ready = groups._replace(rows=rows), self._event()
        return True

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
                    self._transfer.write([self._part(WRITTEN, index, directory.tags[mine][slots], slots)])
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
            self._transfer.read([self._part(READ, index, directory.tags[mine][slots], slots)])
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

    def _pin(self, rows: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Pin a batch's distinct rows in slots, and read those that were in none: the slots, and which are cached."""
        directory = self._directory
        found = directory.look_up(rows, self._whole)  # rows of tables on the device, and of no table, have slots
        if directory.overflow.numel():
            found = self._pin_overflow(rows, found, tables)
        slots = found.clone()
        evicted = directory.allocate(rows, slots, self._whole)
        flags = found < 0, slots < 0, directory.num_sets.index_select(0, tables) > 0
        (missing, overflowing, cached), (misses, overflows, lookups) = self._evict(tables, evicted, slots, *flags)
        self._counts[LOOKUPS] += lookups
        self._counts[HITS] += np.subtract(lookups, misses)
        rows = rows - self._first_rows.index_select(0, tables)
        if sum(overflows):
            slots[overflowing] = self._allocate_overflow(tables[overflowing], rows[overflowing], overflows)
        parts, to_read = zip(rows[missing].split(misses), slots[missing].split(misses), strict=True), list[TableRows]()
        for index, (some, into) in enumerate(parts):
            if isinstance(table := self.tables[index], CachedHashTable):
                known = ~table.is_new(some)
                some, into = some[known], into[known]
            if some.numel():
                to_read.append(self._part(READ, index, some, into))
        self._transfer.read(to_read)
        for index, table in enumerate(self.tables):
            if isinstance(table, CachedHashTable):
                mine = tables == index
                new = table.initialize_slots(rows[mine], slots[mine])
                directory.dirty.index_fill_(0, new + directory.starts[index], True)
        return slots, cached

    def _pin_overflow(self, rows: Tensor, found: Tensor, tables: Tensor) -> Tensor:
        """Pin linear rows that are in an overflow already; if some are in no set, evict what no batch has pinned there.

        Returns the slots of all that were found.
        """
        directory, places = self._directory, self._directory.overflow
        held, owners = directory.tags[places], torch.searchsorted(directory.first_slots, places, right=True) - 1
        linear, order = torch.where(held == NO_ROW, NO_ROW, held + self._first_rows[owners]).sort()
        index = torch.searchsorted(linear, rows).clamp_(max=linear.numel() - 1)
        there, place = linear[index] == rows, places[order[index]]
        directory.pins.index_add_(0, place, there.to(torch.int32))
        idle = (held != NO_ROW) & (directory.pins[places] <= 0) & (found < 0).any()
        self._evict(owners, torch.where(idle, held, NO_ROW), places - directory.first_slots[owners])
        directory.tags[places] = torch.where(idle, NO_ROW, held)
        return torch.where(there, place - directory.first_slots[tables], found)

    def _allocate_overflow(self, tables: Tensor, rows: Tensor, sizes: list[int]) -> Tensor:
        """Slots of overflows for rows whose sets are full; `sizes` of each table."""
        directory = self._directory
        lacking = [number - directory.free_overflow(t).numel() if number else 0 for t, number in enumerate(sizes)]
        if max(lacking) > 0:
            self.storage.grow_overflows(lacking)
        self._counts[OVERFLOWS] += sizes
        slots = torch.cat([directory.free_overflow(table)[:number] for table, number in enumerate(sizes) if number])
        index = directory.first_slots[tables] + slots
        directory.tags[index], directory.used[index] = rows, self._now
        directory.pins.index_fill_(0, index, 1)
        return slots

    def _evict(self, tables: Tensor, rows: Tensor, slots: Tensor, *flags: Tensor) -> Compacted:
        """Write back the dirty ones of rows that leave their slots, `NO_ROW` where none does; and `_compact` flags."""
        directory, leaving = self._directory, rows != NO_ROW
        index = torch.where(leaving, directory.first_slots.index_select(0, tables) + slots, 0)
        chosen, sizes = _compact([leaving & directory.dirty[index], leaving, *flags], tables, len(self.tables))
        self._counts[EVICTIONS] += sizes[1]
        dirty = chosen[0]
        directory.dirty.index_fill_(0, index[dirty], False)
        parts = enumerate(zip(rows[dirty].split(sizes[0]), slots[dirty].split(sizes[0]), strict=True))
        self._transfer.write([self._part(WRITTEN, table, *part) for table, part in parts if part[0].numel()])
        return chosen[2:], sizes[2:]

    def _part(self, kind: int, index: int, rows: Tensor, slots: Tensor) -> TableRows:
        """Rows of a table for a transfer, whose bytes are counted."""
        table = self.tables[index]
        assert table is not None
        self._counts[kind, index] += rows.numel() * table.record.num_bytes
        return table, rows, slots

    def _chunks(self, index: int, slots: Tensor) -> Sequence[Tensor]:
        """Slots of a table, so few at once that their records take little memory."""
        table = self.tables[index]
        return slots.split(max(1, CHUNK_BYTES // table.record.num_bytes)) if table is not None and slots.numel() else ()

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


def _compact(flags: Sequence[Tensor], tables: Tensor, num_tables: int) -> Compacted:
    """Where each of some flags bool `[n]` is set, as ascending positions; `tables`, int64 `[n]`, ascend. Waits once."""
    masks = torch.stack(tuple(flags))
    size, num_rows = masks.numel(), masks.shape[1]
    ends = torch.searchsorted(tables, torch.arange(num_tables, device=tables.device), right=True)
    found = masks.flatten().nonzero_static(size=size, fill_value=size)[:, 0]  # whose length would be waited for
    bounds = torch.arange(len(flags), device=tables.device)[:, None] * num_rows + ends
    counts = torch.searchsorted(found, bounds.flatten())
    sizes: list[list[int]] = counts.diff(prepend=counts.new_zeros(1)).view(-1, num_tables).tolist()
    totals = [sum(each) for each in sizes]
    parts = found[: sum(totals)].split(totals)
    return [part - flag * num_rows for flag, part in enumerate(parts)], sizes


class RowTransfer:
    """Copies rows with their states between slots and stores, for one thread at a time; host memory at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writes: deque[tuple[IoFuture, int]] = deque()
        self._writing = 0  # bytes of these

    def write(self, parts: Sequence[TableRows]) -> None:
        """Start to write distinct rows from their slots, which may be reused; StorageError if an earlier one failed."""
        on_disk = []
        for table, rows, slots in parts:
            if isinstance(table.store, HostRows):
                _move(table.store.fields(), Table.tensors(table), rows, slots)
                continue
            rows, order = rows.sort()
            records, target = self._records(table, rows)
            _move(table.record.views(records), Table.tensors(table), target, slots[order])
            on_disk.append((table.store, rows, records))
        numbers = _on_host([rows for _, rows, _ in on_disk])  # on a GPU, behind the records
        for (store, _, records), rows in zip(on_disk, numbers, strict=True):
            self._writes.append((store.write(rows, records), records.numel()))
            self._writing += records.numel()
            self.finish_writes(MAX_PENDING_BYTES)

    def finish_writes(self, most: int = -1) -> None:
        """Wait until at most so many bytes wait to be written, -1: until nothing does; StorageError if one failed."""
        while self._writes and (self._writing > most or self._writes[0][0].done()):
            future, size = self._writes.popleft()
            self._writing -= size
            future.wait()

    def read(self, parts: Sequence[TableRows]) -> None:
        """Read rows, ascending, into slots. StorageError if a read failed."""
        on_disk = []
        for table, rows, slots in parts:
            if isinstance(table.store, HostRows):
                _move(Table.tensors(table), table.store.fields(), slots, rows)
            else:
                on_disk.append((table, table.store, rows, slots))
        numbers, pending = _on_host([rows for _, _, rows, _ in on_disk]), []
        for (table, store, _, slots), rows in zip(on_disk, numbers, strict=True):
            records, source = self._records(table, slots)
            pending.append((table, slots, store.read(rows, records), records, source))
        for table, slots, future, records, source in pending:
            future.wait()
            _move(Table.tensors(table), table.record.views(records), slots, source)
        if pending and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # before the records are freed

    def _records(self, table: CachedTable, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Records in host memory for rows of a table, and their numbers."""
        size, pin = (rows.numel(), table.record.num_bytes), self._device.type == "cuda"
        records = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
        return records, torch.arange(rows.numel(), device=self._device)


def _move(to: dict[str, Tensor], source: dict[str, Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
    ops.move_rows_(list(to.values()), [source[name] for name in to], to_rows, from_rows)


def _on_host(parts: list[Tensor]) -> Sequence[Tensor]:
    """Waits for the device once, if there are some."""
    return torch.cat(parts).cpu().split([part.numel() for part in parts]) if parts else ()
