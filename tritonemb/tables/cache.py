"""A collection's cache on the device of rows that live elsewhere.

Before a batch is looked up its distinct rows are brought in: those that are there are pinned; others are read from
where they live, into slots whose rows no batch holds, and these are written back if training has changed them. A pinned
row is never evicted, and a row is in one slot only. So batches that are brought in ahead see every update of those
before them: staleness 0, whatever the cache's size.

What this does waits for the device that holds the ids, so it is done ahead, in another thread and on another stream
than training.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import FIRST_ROW, Layout
from tritonemb.ops.row_cache import NO_ROW
from tritonemb.tables.cache_slots import Directory, SlotMemory, wait_for
from tritonemb.tables.cached_table import TieredTable
from tritonemb.tables.lookup import Lookup
from tritonemb.tables.pins import Brought, CacheStatistics, Lease, release_limit, sequence_number
from tritonemb.tables.table import Table
from tritonemb.tables.transfer import Reading, RowMover, chunks

__all__ = ["Brought", "CacheStatistics", "Lease", "RowCache"]

RowsOfOthers = Callable[[Tensor, ValueError | None], Tensor]
LOOKUPS, HITS, OVERFLOWS, EVICTIONS, READ, WRITTEN = range(6)  # columns of what is counted


class _Ended(NamedTuple):
    """What a batch had of a cache, which it needs no more.

    Attributes:
        number: the release's sequence number.
        changed: whether its rows differ from where they live.
        events: behind which nobody uses the slots for it.
    """

    number: int
    tables: Tensor
    slots: Tensor
    changed: bool
    events: list[torch.cuda.Event]


class RowCache:
    """The cache of a collection's tables, of which at least one lives elsewhere than on the device.

    Args:
        tables: of the collection.
        policy: which row makes room.

    Any thread may bring batches in; one does at a time.
    """

    def __init__(self, tables: Sequence[Table], policy: str) -> None:
        self._policy = policy
        self.tiered = [table if isinstance(table, TieredTable) else None for table in tables]
        self.device = tables[0].weight.device
        self._directory = Directory([0 if table is None else table.num_sets for table in self.tiered], self.device)
        self._now = torch.zeros((), dtype=torch.int64, device=self.device)
        self._is_tiered = torch.tensor([table is not None for table in self.tiered], device=self.device)
        self._all_tiered = None not in self.tiered
        self._counts = [[0] * (WRITTEN + 1) for _ in tables]
        self.stall = 0.0  # seconds of lookups that had to wait for rows, as nobody had brought them ahead
        self.memory, self._bringing = SlotMemory(tables, self._directory), threading.RLock()
        self._ended: deque[_Ended] = deque()
        self._last: torch.cuda.Event | None = None  # of the turn before
        self._mover = RowMover(self.device)
        self._failure: BaseException | None = None
        for table in self.tiered:
            if table is not None:
                table.slots = self

    def statistics(self) -> dict[str, CacheStatistics]:
        """By table that lives elsewhere. Waits for what those with rows in host memory have been asked for."""
        pairs = zip(self.tiered, self._counts, strict=True)
        return {
            table.config.name: CacheStatistics(*[*counts, *table.counts()])
            for table, counts in pairs
            if table is not None
        }

    def add_layout(self, keys: tuple[str, ...], whole: Layout) -> tuple[Layout, Layout]:
        """Keep a layout of the tables, and make it one of their slots.

        See `SlotMemory.add_layout`.
        """
        with self._bringing:  # or slots that grow meanwhile would not be shown to it
            return self.memory.add_layout(keys, whole)

    @torch.no_grad()
    def bring(
        self,
        batch: Any,
        whole: Layout,
        own: Layout,
        training: bool,
        refuse_bad_ids: Callable[[], object],
        also: RowsOfOthers | None = None,
    ) -> Brought:
        """Bring a batch's rows in, and hold them; within `released_before`, beside those of batches that ended later.

        Args:
            batch: a `KeyedJaggedTensor` with one key for each lookup.
            whole, own: what its keys mean to the tables, and to their slots.
            training: whether the rows are going to be changed.
            refuse_bad_ids: called if some id belongs to no row, before anything is brought; it may raise. Such ids
                read as zero otherwise.
            also: given the batch's distinct linear rows, ascending, and what is wrong with its ids, returns linear rows
                of tables that live elsewhere which are to be brought and held with them.

        Raises:
            StorageError: rows cannot be read or written. The cache is of no use any more.
        """
        until = release_limit()
        with torch.inference_mode(False):  # what changes here is used in training too
            values, offsets = batch.values(), batch.offsets()
            groups = ops.row_groups(values, offsets, whole)
            count = int(groups.num_groups)
            problem = None
            if int(groups.starts[count]) != values.numel():
                problem = _problem(refuse_bad_ids)
            if problem is not None and also is None:
                raise problem
            held, others = groups, None
            if also is not None:
                others = also(groups.rows[:count], problem)
                held = _with_rows(groups, others)
            first_rows = whole.tables[:, FIRST_ROW].contiguous()
            linear = held.rows[: count if also is None else held.rows.numel()]
            tables = torch.searchsorted(first_rows, linear, right=True) - 1
            with self._turn(until):
                slots = self._hold(held, tables, first_rows, whole)
                lease = Lease(self, *self._elsewhere(tables, linear - first_rows[tables], slots[: linear.numel()]))
            if also is not None:
                place = torch.searchsorted(linear, groups.rows[:count])
                tables, found = tables[place], slots[place]
                slots = torch.full_like(groups.rows, -1)
                slots[:count] = found
            rows = groups.rows.clone()
            rows[:count] = own.tables[:, FIRST_ROW][tables] + slots[:count]
            inside = ops.row_cache_translate(slots, groups.starts, groups.order, groups.num_groups)
            lookup = Lookup(inside, offsets, batch.weights_or_none(), groups._replace(rows=rows), own)
            return Brought(lookup, lease, training, others, self._event())

    def take(self, brought: Brought) -> Lookup:
        """The lookup, for this thread's stream."""
        if brought.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(brought.ready)
            brought.lease.read_on(stream)
            lookup = brought.lookup
            own = (lookup.values, lookup.offsets, lookup.sample_weights, *lookup.groups, *brought.lease.tensors)
            for tensor in own:
                if tensor is not None:
                    tensor.record_stream(stream)
        return brought.lookup

    def row_ids(self, table: int) -> Tensor:
        """int64, the row in each slot of a table; for who has `memory.lock`."""
        return self._directory.parts[0][table]

    def give_up(self, tables: Tensor, slots: Tensor, changed: bool, stream: torch.cuda.Stream | None) -> None:
        """Slots of a batch that needs them no more; called by any thread, perhaps by Python's garbage collection.

        Args:
            changed: whether the rows in them were changed, on this thread's stream.
            stream: on which they were read; None if they were not, or on the CPU.
        """
        events = []
        if self.device.type == "cuda":
            here = torch.cuda.current_stream(self.device)
            events = [used.record_event() for used in (here, stream) if used is not None]
        self._ended.append(_Ended(sequence_number(), tables, slots, changed, events))

    def write_back(self) -> None:
        """Bring what was trained to where it lives; rows stay in their slots."""
        with self._turn():
            directory = self._directory
            for index, table in enumerate(self.tiered):
                if table is None:
                    continue
                mine = directory.slice_of(index)
                for slots in chunks(table, directory.dirty[mine].nonzero()[:, 0]):
                    self._write(index, directory.tags[mine][slots], slots)
                    self._mover.finish_writes()
            directory.dirty.zero_()
            wait_for(self.device)  # the host reads next

    @contextmanager
    def replacing(self, table: TieredTable) -> Iterator[None]:
        """While the rows of a table change where they live; then those in slots are read anew, even if it fails.

        Batches keep their slots.
        """
        with self._bringing, torch.inference_mode(False):
            with self._turn():
                self._mover.finish_writes()
                wait_for(self.device)
            try:
                yield
            finally:
                with self._turn():
                    self._read_anew(table)

    def _read_anew(self, table: TieredTable) -> None:
        """Read those rows of a table that are in slots."""
        index, directory = self.tiered.index(table), self._directory
        mine = directory.slice_of(index)
        rows, order = directory.tags[mine].sort()
        for slots in chunks(table, order[rows != NO_ROW]):
            self._mover.finish_reads([self._begin_read(index, directory.tags[mine][slots], slots)])
        directory.dirty[mine] = False
        wait_for(self.device)

    @contextmanager
    def emptying(self, table: TieredTable) -> Iterator[None]:
        """While a table gets another place where its rows live; none of them is in a slot any more.

        Raises:
            RuntimeError: a batch holds some.
        """
        index, directory = self.tiered.index(table), self._directory
        with self._bringing, torch.inference_mode(False):
            self._refuse_failed()
            self._settle()
            if bool((directory.pins[directory.slice_of(index)] > 0).any()):
                raise RuntimeError(
                    f"a batch holds rows of table {table.config.name!r}; finish its backward pass, or drop it, first"
                )
            with self._turn():
                self._mover.finish_writes()
                wait_for(self.device)
                directory.empty(index)
            yield

    @contextmanager
    def _turn(self, until: int | None = None) -> Iterator[None]:
        """One thread at a time moves rows, on its own stream, behind what was moved before.

        After a turn that has failed nobody knows what is in which slot.
        """
        with self._bringing, torch.no_grad(), torch.inference_mode(False):
            self._refuse_failed()
            try:
                if self._last is not None:
                    torch.cuda.current_stream(self.device).wait_event(self._last)
                self._settle(until)
                yield
                self._last = self._event()
            except BaseException as error:
                self._failure = error
                raise

    def _settle(self, until: int | None = None) -> None:
        """Unpin the slots of batches that have ended, up to a sequence number if given; changed rows are dirty now."""
        while self._ended and (until is None or self._ended[0].number < until):
            ended = self._ended.popleft()
            for event in ended.events:
                torch.cuda.current_stream(self.device).wait_event(event)
            with torch.inference_mode(False):
                places = self._directory.places_of[ended.tables] + ended.slots
                self._directory.pins.index_add_(0, places, torch.full_like(places, -1, dtype=torch.int32))
                if ended.changed:
                    self._directory.dirty.index_fill_(0, places, True)

    def _hold(self, groups: ops.RowGroups, tables: Tensor, first_rows: Tensor, whole: Layout) -> Tensor:
        """Give every row of a batch a slot, with the row in it."""
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
            self._place(missing, groups, tables, first_rows, slots, whole)
        return slots

    def _place(
        self, missing: Tensor, groups: ops.RowGroups, tables: Tensor, first_rows: Tensor, slots: Tensor, whole: Layout
    ) -> None:
        """Give slots to those rows of a batch that have none, with the rows in them.

        Args:
            missing: int64, which of the batch's rows.
        """
        directory = self._directory
        rows = groups.rows[missing] - first_rows[tables[missing]]
        if any(overflow.rows.numel() for overflow in directory.overflow):
            found = self._find_in_overflow(rows, self._by_table(tables[missing]))
            slots[missing] = found
            missing, rows = missing[found < 0], rows[found < 0]
            self._empty_overflows()
        evicted = ops.row_cache_allocate_(
            *directory.parts, groups.rows, slots, groups.num_groups, whole.tables, directory.num_sets, self._now,
            self._policy,
        )[missing]  # fmt: skip
        tables, taken, sizes = tables[missing], slots[missing], self._by_table(tables[missing])
        gone = evicted != NO_ROW
        self._evict(tables[gone], evicted[gone], taken[gone])
        homeless = taken < 0
        if bool(homeless.any()):
            taken[homeless] = self._take_overflow(tables[homeless], rows[homeless])
            slots[missing] = taken
        reads = [
            self._begin_read(table, some, places)
            for table, (some, places) in enumerate(zip(rows.split(sizes), taken.split(sizes), strict=True))
            if some.numel()
        ]
        self._mover.finish_reads(reads)

    def _find_in_overflow(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Hold rows that are in an overflow already: their slots, -1 for others.

        Args:
            sizes: how many of the rows are of each table.
        """
        parts = []
        for table, mine in enumerate(rows.split(list(sizes))):
            found = self._directory.overflow[table].find(mine.cpu()).to(rows.device)
            there = found[found >= 0]
            self._directory.parts[2][table][there] += 1
            self._counts[table][HITS] += there.numel()
            parts.append(found)
        return torch.cat(parts)

    def _empty_overflows(self) -> None:
        """Rows in an overflow that no batch holds go."""
        directory = self._directory
        for table, overflow in enumerate(directory.overflow):
            if overflow.rows.numel():
                idle = (directory.parts[2][table][overflow.slots.to(self.device)] == 0).cpu()
                slots = overflow.slots[idle].to(self.device)
                self._evict(torch.full_like(slots, table), overflow.rows[idle].to(self.device), slots)
                directory.parts[0][table][slots] = NO_ROW
                overflow.drop(idle)

    def _take_overflow(self, tables: Tensor, rows: Tensor) -> Tensor:
        """Slots of overflows for rows, by table, that have none."""
        directory, sizes = self._directory, self._by_table(tables)
        self.memory.make_room(sizes)
        parts = []
        for table, some in enumerate(rows.cpu().split(sizes)):
            if some.numel():
                parts.append(directory.overflow[table].put(some))
                self._counts[table][OVERFLOWS] += some.numel()
        slots = torch.cat(parts).to(self.device)
        places = directory.places_of[tables] + slots
        directory.tags[places], directory.used[places] = rows, self._now
        directory.pins.index_fill_(0, places, 1)
        return slots

    def _evict(self, tables: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Rows, by table, leave their slots; those that were changed are written back."""
        if not rows.numel():
            return
        for counts, evictions in zip(self._counts, self._by_table(tables), strict=True):
            counts[EVICTIONS] += evictions
        places = self._directory.places_of[tables] + slots
        changed = self._directory.dirty[places]
        self._directory.dirty[places] = False
        rows, slots, sizes = rows[changed], slots[changed], self._by_table(tables[changed])
        for table, (some, taken) in enumerate(zip(rows.split(sizes), slots.split(sizes), strict=True)):
            self._write(table, some, taken)

    def _write(self, index: int, rows: Tensor, slots: Tensor) -> None:
        """Begin to write rows of a table from their slots."""
        table = self.tiered[index]
        if table is not None and rows.numel():
            self._counts[index][WRITTEN] += rows.numel() * table.record.num_bytes
            self._mover.write(table, rows, slots)

    def _begin_read(self, index: int, rows: Tensor, slots: Tensor) -> Reading | None:
        """Begin to read rows of a table, ascending, into slots."""
        table = self.tiered[index]
        assert table is not None
        self._counts[index][READ] += rows.numel() * table.record.num_bytes
        return self._mover.begin_read(table, rows, slots)

    def _by_table(self, tables: Tensor) -> list[int]:
        """How often each table stands there."""
        return torch.bincount(tables, minlength=len(self.tiered)).tolist()

    def _elsewhere(self, tables: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """Of a batch's rows, those of tables that live elsewhere."""
        if self._all_tiered:
            return tables, *[value.clone() for value in values]
        which = self._is_tiered[tables]
        return tables[which], *[value[which] for value in values]

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"rows of these tables could not be moved before ({str(self._failure) or repr(self._failure)}), so "
                "nobody knows which are where; load a checkpoint into a new module"
            ) from self._failure


def _problem(refuse: Callable[[], object]) -> ValueError | None:
    """What is wrong, if something is raised."""
    try:
        refuse()
    except ValueError as error:
        return error
    return None


def _with_rows(groups: ops.RowGroups, others: Tensor) -> ops.RowGroups:
    """The distinct rows of a batch and others, of which no position of the batch is any."""
    rows = torch.cat([groups.rows[: int(groups.num_groups)], others]).unique()
    return groups._replace(rows=rows, num_groups=torch.full_like(groups.num_groups, rows.numel()))
