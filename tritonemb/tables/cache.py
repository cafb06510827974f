"""The cache on the device of rows in host memory or on disk.

Before a batch is looked up its distinct rows are pinned in slots: those that are in none are read from their store, and
evict rows that no batch has pinned; dirty ones are written back. A pinned row is never evicted, and a row is in one
slot only. So prefetched batches see every update of those before them: staleness 0, whatever the cache's size.

A prefetch waits for the device that has the ids, so it is done in another thread and on another stream than training.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import FIRST_ROW, Layout
from tritonemb.ops.row_cache import NO_ROW
from tritonemb.tables.cache_storage import CacheDirectory, CacheStorage, RowTransfer, chunks, synchronize
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.lookup import Lookup, PinnedSlots, PrefetchedBatch, release_limit, sequence_number
from tritonemb.tables.table import Table

FindReplicaRows = Callable[[Tensor, ValueError | None], Tensor]
LOOKUPS, HITS, OVERFLOWS, EVICTIONS, READ, WRITTEN = range(6)  # columns of what is counted


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


class RowCache:
    """The cache of a collection's tables, of which at least one is in host memory or on disk.

    Args:
        tables: of the collection.
        policy: which row is evicted.

    Any thread may prefetch batches; one does at a time.

    Attributes:
        tables: by number, those that are cached; None for one on the device.
        stall: seconds of lookups that waited for rows, as their batch had not been prefetched.
    """

    def __init__(self, tables: Sequence[Table], policy: str) -> None:
        self._policy = policy
        self.tables = [table if isinstance(table, CachedTable) else None for table in tables]
        self.device = tables[0].weight.device
        self._directory = CacheDirectory([0 if table is None else table.num_sets for table in self.tables], self.device)
        self._now = torch.zeros((), dtype=torch.int64, device=self.device)
        self._is_cached = torch.tensor([table is not None for table in self.tables], device=self.device)
        self._all_cached = None not in self.tables
        self._counts = [[0] * (WRITTEN + 1) for _ in tables]
        self.stall = 0.0
        self.storage, self._lock = CacheStorage(tables, self._directory), threading.RLock()
        self._releases: deque[PinnedSlots] = deque()
        self._last: torch.cuda.Event | None = None  # behind all transfers so far
        self._transfer = RowTransfer(self.device)
        self._failure: BaseException | None = None
        for table in self.tables:
            if table is not None:
                table.cache = self

    def statistics(self) -> dict[str, CacheStatistics]:
        """By cached table. Waits for the host caches of tables on disk."""
        pairs = zip(self.tables, self._counts, strict=True)
        return {
            table.config.name: CacheStatistics(*[*counts, *table.counts()])
            for table, counts in pairs
            if table is not None
        }

    def add_layout(self, keys: tuple[str, ...], whole: Layout) -> tuple[Layout, Layout]:
        """See `CacheStorage.add_layout`."""
        with self._lock:  # or it would miss slots that grow meanwhile
            return self.storage.add_layout(keys, whole)

    @torch.no_grad()
    def prefetch(
        self, batch: Any, whole: Layout, own: Layout, training: bool, find_problem: Callable[[], ValueError | None],
        find_replica_rows: FindReplicaRows | None = None,
    ) -> PrefetchedBatch:  # fmt: skip
        """Pin a batch's rows in slots; see `released_before` for the rows that may be evicted.

        Args:
            batch: a `KeyedJaggedTensor` with one key for each lookup.
            whole, own: the layouts of its keys over whole tables, and over their slots.
            training: whether the rows are going to be updated.
            find_problem: called if some id belongs to no row, before any row is read; what to raise, or None: such ids
                read as zero then.
            find_replica_rows: given the batch's distinct linear rows, ascending, and what is wrong with its ids,
                returns linear rows of cached tables to be pinned, too.

        Raises:
            StorageError: rows cannot be read or written. The cache is in an undefined state.
        """
        before = release_limit()
        with torch.inference_mode(False):  # what changes here is used in training too
            values, offsets = batch.values(), batch.offsets()
            groups = ops.row_groups(values, offsets, whole)
            count = int(groups.num_groups)
            problem = find_problem() if int(groups.starts[count]) != values.numel() else None
            if problem is not None and find_replica_rows is None:
                raise problem
            pinned, replica_rows = groups, None
            if find_replica_rows is not None:
                replica_rows = find_replica_rows(groups.rows[:count], problem)
                pinned = _with_rows(groups, replica_rows)
            first_rows = whole.tables[:, FIRST_ROW].contiguous()
            linear = pinned.rows[: count if replica_rows is None else pinned.rows.numel()]
            tables = torch.searchsorted(first_rows, linear, right=True) - 1
            with self._exclusive(before):
                slots = self._pin(pinned, tables, first_rows, whole)
                of_cached = self._of_cached_tables(tables, linear - first_rows[tables], slots[: linear.numel()])
                batch_slots = PinnedSlots(self.release, *of_cached)
            if replica_rows is not None:
                index = torch.searchsorted(linear, groups.rows[:count])
                tables, found = tables[index], slots[index]
                slots = torch.full_like(groups.rows, -1)
                slots[:count] = found
            rows = groups.rows.clone()
            rows[:count] = own.tables[:, FIRST_ROW][tables] + slots[:count]
            inside = ops.row_cache_translate(slots, groups.starts, groups.order, groups.num_groups)
            lookup = Lookup(inside, offsets, batch.weights_or_none(), groups._replace(rows=rows), own)
            return PrefetchedBatch(lookup, batch_slots, training, replica_rows, self._event())

    def acquire(self, batch: PrefetchedBatch) -> Lookup:
        """The lookup, for this thread's stream."""
        lookup, pinned = batch.lookup, batch.pinned
        if batch.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(batch.ready)
            pinned.stream = stream
            for tensor in (*lookup[:3], *lookup.groups, pinned.tables, pinned.rows, pinned.slots):
                if tensor is not None:
                    tensor.record_stream(stream)
        return lookup

    def row_ids(self, table: int) -> Tensor:
        """int64, the row in each slot of a table; for who holds `storage.lock`."""
        return self._directory.parts[0][table]

    def release(self, pinned: PinnedSlots) -> None:
        """Unpin slots of a batch before the next prefetch."""
        if self.device.type == "cuda":
            here = torch.cuda.current_stream(self.device)
            pinned.events = [used.record_event() for used in (here, pinned.stream) if used is not None]
        pinned.number = sequence_number()
        self._releases.append(pinned)

    def write_back(self) -> None:
        """Write dirty rows to their stores; they stay in their slots."""
        with self._exclusive():
            directory = self._directory
            for index, table in enumerate(self.tables):
                if table is None:
                    continue
                mine = directory.slice_of(index)
                for slots in chunks(table, directory.dirty[mine].nonzero()[:, 0]):
                    self._write(index, directory.tags[mine][slots], slots)
                    self._transfer.finish_writes()
            directory.dirty.zero_()
            synchronize(self.device)  # the host reads next

    @contextmanager
    def reloading(self, table: CachedTable) -> Iterator[None]:
        """While the store of a table changes; then its rows in slots are read again, even if the change fails.

        Batches keep their slots.
        """
        with self._lock, torch.inference_mode(False):
            with self._exclusive():
                self._transfer.finish_writes()
                synchronize(self.device)
            try:
                yield
            finally:
                with self._exclusive():
                    self._reload(table)

    def _reload(self, table: CachedTable) -> None:
        """Read those rows of a table that are in slots."""
        index, directory = self.tables.index(table), self._directory
        mine = directory.slice_of(index)
        rows, order = directory.tags[mine].sort()
        for slots in chunks(table, order[rows != NO_ROW]):
            self._start_read(index, directory.tags[mine][slots], slots)()
        directory.dirty[mine] = False
        synchronize(self.device)

    @contextmanager
    def invalidating(self, table: CachedTable) -> Iterator[None]:
        """While a table gets another store; none of its rows is in a slot any more.

        Raises:
            RuntimeError: a batch has pinned some.
        """
        index, directory = self.tables.index(table), self._directory
        with self._lock, torch.inference_mode(False):
            self._check_usable()
            self._unpin_released()
            if bool((directory.pins[directory.slice_of(index)] > 0).any()):
                raise RuntimeError(
                    f"a batch has pinned rows of table {table.config.name!r}; finish its backward pass, or drop it, "
                    "first"
                )
            with self._exclusive():
                self._transfer.finish_writes()
                synchronize(self.device)
                directory.empty(index)
            yield

    @contextmanager
    def _exclusive(self, before: int | None = None) -> Iterator[None]:
        """One thread at a time transfers rows, on its own stream, behind all transfers so far.

        After a failure here the cache is in an undefined state.
        """
        with self._lock, torch.no_grad(), torch.inference_mode(False):
            self._check_usable()
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
        """Unpin released slots, up to a sequence number if given."""
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
        """Give every row of a batch a slot, and pin it there."""
        directory, count = self._directory, tables.numel()
        self._now += 1
        slots = ops.row_cache_look_up_(
            *directory.parts, groups.rows, groups.num_groups, whole.tables, directory.num_sets, self._now, self._policy
        )
        missing = (slots[:count] < 0).nonzero()[:, 0]  # rows of tables on the device have slots
        for counts, lookups, misses in zip(
            self._counts, self._by_table(tables), self._by_table(tables[missing]), strict=True
        ):
            counts[LOOKUPS] += lookups
            counts[HITS] += lookups - misses
        if missing.numel():
            self._load(missing, groups, tables, first_rows, slots, whole)
        return slots

    def _load(
        self, missing: Tensor, groups: ops.RowGroups, tables: Tensor, first_rows: Tensor, slots: Tensor, whole: Layout
    ) -> None:
        """Give slots to those rows of a batch that are in none, and read them.

        Args:
            missing: int64, which of the batch's rows.
        """
        directory = self._directory
        rows = groups.rows[missing] - first_rows[tables[missing]]
        if directory.has_overflow_rows():
            found = self._pin_overflow(rows, self._by_table(tables[missing]))
            slots[missing] = found
            missing, rows = missing[found < 0], rows[found < 0]
            self._evict_overflow()
        evicted = ops.row_cache_allocate_(
            *directory.parts, groups.rows, slots, groups.num_groups, whole.tables, directory.num_sets, self._now,
            self._policy,
        )[missing]  # fmt: skip
        tables, taken, sizes = tables[missing], slots[missing], self._by_table(tables[missing])
        victims = evicted != NO_ROW
        self._evict(tables[victims], evicted[victims], taken[victims])
        overflowing = taken < 0
        if bool(overflowing.any()):
            taken[overflowing] = self._allocate_overflow(tables[overflowing], rows[overflowing])
            slots[missing] = taken
        reads = [
            self._start_read(table, some, slots_of)
            for table, (some, slots_of) in enumerate(zip(rows.split(sizes), taken.split(sizes), strict=True))
            if some.numel()
        ]
        for finish in reads:
            finish()

    def _pin_overflow(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Pin rows that are in an overflow already: their slots, -1 for others.

        Args:
            sizes: how many of the rows are of each table.
        """
        parts = []
        for table, mine in enumerate(rows.split(list(sizes))):
            if not mine.numel() or self._directory.num_slots[table] == self._directory.in_sets[table]:
                parts.append(torch.full_like(mine, -1))
                continue
            found = self._directory.find_overflow(table, mine)
            there = found[found >= 0]
            self._directory.parts[2][table][there] += 1
            self._counts[table][HITS] += there.numel()
            parts.append(found)
        return torch.cat(parts)

    def _evict_overflow(self) -> None:
        """Evict overflow rows that no batch has pinned."""
        directory = self._directory
        for table, first in enumerate(directory.in_sets):
            if directory.num_slots[table] == first:
                continue
            tags, pins = directory.overflow_tags(table), directory.parts[2][table][first:]
            idle = ((tags != NO_ROW) & (pins == 0)).nonzero()[:, 0]
            self._evict(torch.full_like(idle, table), tags[idle], idle + first)
            tags[idle] = NO_ROW

    def _allocate_overflow(self, tables: Tensor, rows: Tensor) -> Tensor:
        """Slots of overflows for rows, by table, whose sets are full."""
        directory, sizes = self._directory, self._by_table(tables)
        self.storage.grow_overflows(sizes)
        parts = []
        for table, number in enumerate(sizes):
            if number:
                parts.append(directory.free_overflow(table)[:number])
            self._counts[table][OVERFLOWS] += number
        slots = torch.cat(parts)
        index = directory.first_slots[tables] + slots
        directory.tags[index], directory.used[index] = rows, self._now
        directory.pins.index_fill_(0, index, 1)
        return slots

    def _evict(self, tables: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Evict rows, by table, from their slots; dirty ones are written back."""
        if not rows.numel():
            return
        for counts, evictions in zip(self._counts, self._by_table(tables), strict=True):
            counts[EVICTIONS] += evictions
        index = self._directory.first_slots[tables] + slots
        dirty = self._directory.dirty[index]
        self._directory.dirty[index] = False
        rows, slots, sizes = rows[dirty], slots[dirty], self._by_table(tables[dirty])
        for table, (some, taken) in enumerate(zip(rows.split(sizes), slots.split(sizes), strict=True)):
            self._write(table, some, taken)

    def _write(self, index: int, rows: Tensor, slots: Tensor) -> None:
        """Start to write rows of a table from their slots."""
        table = self.tables[index]
        if table is not None and rows.numel():
            self._counts[index][WRITTEN] += rows.numel() * table.record.num_bytes
            self._transfer.write(table, rows, slots)

    def _start_read(self, index: int, rows: Tensor, slots: Tensor) -> Callable[[], None]:
        """Start to read rows of a table, ascending, into slots; the result waits for them."""
        table = self.tables[index]
        assert table is not None
        self._counts[index][READ] += rows.numel() * table.record.num_bytes
        return self._transfer.start_read(table, rows, slots)

    def _by_table(self, tables: Tensor) -> list[int]:
        """How often each table is there."""
        return torch.bincount(tables, minlength=len(self.tables)).tolist()

    def _of_cached_tables(self, tables: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """Of a batch's rows, those of cached tables."""
        if self._all_cached:
            return tables, *[value.clone() for value in values]
        which = self._is_cached[tables]
        return tables[which], *[value[which] for value in values]

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier cache transfer failed ({str(self._failure) or repr(self._failure)}); the cache is in an "
                "undefined state: load a checkpoint into a new module"
            ) from self._failure


def _with_rows(groups: ops.RowGroups, others: Tensor) -> ops.RowGroups:
    """The distinct rows of a batch and others, of which no position of the batch is any."""
    rows = torch.cat([groups.rows[: int(groups.num_groups)], others]).unique()
    return groups._replace(rows=rows, num_groups=torch.full_like(groups.num_groups, rows.numel()))
