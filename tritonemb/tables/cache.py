"""Device cache of tables whose rows are in host memory or on disk.

Before a batch is looked up, its distinct rows are pinned in slots. Missing rows are read from their store and evict
unpinned rows; dirty victims are written back first. A pinned row is never evicted, and a row is in at most one slot, so
a prefetched batch sees every update of the batches before it: staleness 0 at any cache size.

A prefetch copies the counts of all tables to the host in one synchronization. It synchronizes more often while overflow
slots are used or grown, and for transfers from disk. It therefore runs in another thread and on another stream than
training. Up to that copy its tensors are padded to the batch's number of ids with rows of a table without slots.

Releases of pins have sequence numbers. Which pins are released by the time that a thread prefetches a batch is
nondeterministic, and so is which rows are evicted; which pins were released when the batch was submitted is not.
"""

import enum
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tritonemb import jagged, ops
from tritonemb.layout import FIRST_ROW, NO_ROW, TableRow, build_layout, mix64
from tritonemb.ops.registry import kernel
from tritonemb.storage.memory import CHUNK_BYTES, HostRows
from tritonemb.storage.store import CacheDirectory, round_rows
from tritonemb.tables.batch import RowBatch
from tritonemb.tables.cache_storage import CacheStatistics, CacheStorage, RowMoves, RowTransfer, synchronize
from tritonemb.tables.cached_rows import CachedRows
from tritonemb.tables.table import Table

Compacted = tuple[Sequence[Tensor], list[list[int]]]  # by flag: positions where it is set, and their number per table
LOOKUPS, HITS, OVERFLOWS, EVICTIONS, READ, WRITTEN = range(6)  # rows of the counters

_sequence_numbers = itertools.count(1)
_released_before: ContextVar[int | None] = ContextVar("released_before", default=None)


def sequence_number() -> int:
    """Return the next sequence number, larger than those of earlier releases of pins, smaller than of later ones."""
    return next(_sequence_numbers)


@contextmanager
def released_before(number: int) -> Iterator[None]:
    """Let prefetches of this thread in the block unpin only batches released before the sequence number `number`."""
    token = _released_before.set(number)
    try:
        yield
    finally:
        _released_before.reset(token)


class PinState(enum.Enum):
    """State of a batch's rows: prefetched; used by a lookup; free to be evicted, once streams have read them."""

    PINNED = enum.auto()
    ACQUIRED = enum.auto()
    RELEASED = enum.auto()


def rounding_noise(seed: int, step: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Return noise `[n, dim]` for `round_rows` of rows of a table with a seed in a step: multiples of 2^-16 in [0, 1).

    It is drawn like initial values, `kernels/random.py`, with key = seed and row = row xor mix64(step): it depends only
    on seed, step, row and column. A draw is uniform in ±32768, so adding 32768 gives 16 random bits as an integer.
    """
    noise = torch.empty(rows.numel(), dim, dtype=torch.float32, device=rows.device)
    numbers = torch.arange(rows.numel(), device=rows.device)
    initial, ids = [(seed, 32768.0)], rows ^ mix64(step.reshape(1))
    draw = kernel("initialize_rows_", rows.device)
    draw([noise], [], initial, ids, numbers, torch.zeros_like(numbers, dtype=torch.int32))
    return noise.floor_().add_(32768.0).mul_(2.0**-16)


@dataclass(eq=False)
class Pins:
    """Pinned slots of a batch, until they are released or deleted."""

    # int64 `[n]`: table number, ascending, row in the table, and slot.
    tables: Tensor
    rows: Tensor
    slots: Tensor
    sizes: list[int]  # number of rows per table
    cache: "RowCache"  # of the slots, until release
    ready: torch.cuda.Event | None = None  # recorded after the transfers, on a GPU
    state: PinState = PinState.PINNED
    is_dirty: bool = False  # whether the rows were updated; they are written back after release
    stream: torch.cuda.Stream | None = None  # stream of the lookup that reads the slots
    # Sequence number of the release, and events recorded then; the slots are reused after them.
    number: int = 0
    events: Sequence[torch.cuda.Event] = ()

    def rows_of(self, table: int) -> tuple[Tensor, Tensor]:
        """Return the pinned rows of a table, ascending, and their slots."""
        return self.rows.split(self.sizes)[table], self.slots.split(self.sizes)[table]

    @torch.no_grad()
    def _round_rows(self, step: Tensor) -> None:
        """Round rows of int8 tables stochastically after a step; those that it has not changed stay as they are."""
        storage = self.cache.storage
        for number in storage.int8_tables:
            (rows, slots), table = self.rows_of(number), storage.tables[number]
            with storage.lock:
                weight, config = table.weight.detach(), table.config
                noise = rounding_noise(config.seed, step, rows + config.row_origin, config.embedding_dim)
                weight.index_copy_(0, slots, round_rows(weight.index_select(0, slots), noise))

    def release(self, step: Tensor | None = None) -> None:
        """Queue the slots to be unpinned by a later prefetch. All updates have been submitted to this thread's stream.

        After a `step`, int64 `[]`, rows of int8 tables are rounded: now, as evictions depend on the cache and its use.
        Called by any thread, possibly by garbage collection.
        """
        if self.state is not PinState.RELEASED:
            if step is not None:
                self._round_rows(step)
            self.state, cache = PinState.RELEASED, self.cache
            del self.cache  # has a queue of released pins; a cycle would keep its memory until it is collected
            if cache.device.type == "cuda":
                streams = torch.cuda.current_stream(cache.device), self.stream
                self.events = [stream.record_event() for stream in streams if stream is not None]
            self.number = sequence_number()
            cache.releases.append(self)

    def __del__(self) -> None:
        self.release()


class RowCache:
    """Device cache of a collection's tables, at least one of which is in host memory or on disk.

    Any thread may prefetch batches; a lock serializes them. `policy` is "lru" or "lfu".
    """

    def __init__(self, tables: Sequence[Table], policy: str) -> None:
        # By table number; None for a table on the device.
        self.rows: list[CachedRows | None] = [table.rows if table.rows.is_cached else None for table in tables]
        self.device = tables[0].weight.device
        # Directory. A last table of one row and no slots takes the padding of a batch.
        num_sets = [0 if cached is None else cached.num_sets for cached in (*self.rows, None)]
        self._directory = CacheDirectory(num_sets, policy, self.device)
        table_rows = [*(TableRow(0, table.rows.config.num_embeddings, 0) for table in tables), TableRow(0, 1, 0)]
        self._table_layout = build_layout(table_rows, [], [], [], False, self.device).tables
        self._first_rows = self._table_layout[:, FIRST_ROW].contiguous()
        self._first_slots = self._first_rows + self._directory.first_slots  # in layouts of the slots
        self._clock = self._directory.clock
        self.storage, self._lock = CacheStorage(tables, self._directory), threading.RLock()
        # Statistics.
        self._counts = np.zeros((WRITTEN + 1, len(tables)), dtype=np.int64)
        self.stall = 0.0  # seconds that lookups waited for rows of batches that were not prefetched
        # Transfers and releases.
        self._transfer = RowTransfer(tables, self._first_rows)
        self._table_numbers = torch.arange(len(tables) + 1, device=self.device)
        self._record_bytes = [0 if cached is None else cached.record.num_bytes for cached in self.rows]
        self._last_transfer: torch.cuda.Event | None = None  # recorded after the latest transfer
        self.releases: deque[Pins] = deque()  # released, but still pinned in the directory
        self._failure: BaseException | None = None  # of a transfer; the cache is unusable after it
        for cached in filter(None, self.rows):
            cached.cache_ref = weakref.ref(self)

    def statistics(self) -> dict[str, CacheStatistics]:
        """Return statistics by name of cached table. Waits for the host caches of tables on disk."""
        by_table = {}
        for index, cached in enumerate(self.rows):
            if cached is not None:
                store, counts = cached.store, cached.closed_counts
                counts = counts if isinstance(store, HostRows) else counts.plus(*store.counts())
                by_table[cached.config.name] = CacheStatistics(*[*self._counts[:, index].tolist(), *counts])
        return by_table

    def pin(self, batch: RowBatch, replica_rows: Tensor | None, invalid: Tensor | None) -> tuple[RowBatch, Pins] | None:
        """Pin the rows of a batch and replica rows; return the batch with slots instead of rows, None if no row is.

        `batch` has table rows, one key per lookup, and already the layout of the slots. If `invalid`, bool `[]` on the
        device, is true, or if no row is cached, only earlier releases take effect. See `released_before` for evictions.
        A StorageError leaves the cache in an undefined state.
        """
        # Find the table of each distinct row, padding included.
        groups, first_rows = batch.groups, self._first_rows
        local_rows = groups.rows[: int(groups.num_groups) if jagged.is_host_readable(groups.num_groups) else None]
        local_rows = linear = local_rows if invalid is None else torch.where(invalid, first_rows[-1], local_rows)
        if replica_rows is not None:
            linear = torch.cat([local_rows, replica_rows]).unique()
        tables = torch.searchsorted(first_rows, linear, right=True) - 1
        # Pin the rows. A batch without cached rows does not count as a lookup.
        with self._exclusive(_released_before.get()):
            slots, pinned, sizes = self._pin(linear, tables)
            if invalid is not None and not pinned.numel():
                self._clock -= 1
                return None
            pinned_tables, pinned_slots = tables.index_select(0, pinned), slots.index_select(0, pinned)
            pinned_rows = linear.index_select(0, pinned) - first_rows.index_select(0, pinned_tables)
            pins = Pins(pinned_tables, pinned_rows, pinned_slots, sizes, self)
        # Replace rows by slots in the values and groups of the local batch.
        if replica_rows is not None:
            index = torch.searchsorted(linear, local_rows)
            tables, slots = tables[index], slots[index]
        rows, by_group, size = groups.rows.clone(), torch.full_like(groups.rows, -1), local_rows.numel()
        rows[:size], by_group[:size] = self._first_slots.index_select(0, tables) + slots, slots
        values = ops.row_cache_translate(by_group, groups.starts, groups.order, groups.num_groups)
        pins.ready = self._event()
        return batch._replace(values=values, groups=groups._replace(rows=rows)), pins

    def row_ids(self, table: int) -> Tensor:
        """Return the row in each slot of a table, int64 `[slots]`. The caller holds `storage.lock`."""
        return self._directory.tags[self._directory.slice_of(table)]

    def write_back(self) -> None:
        """Write dirty rows to their stores; they stay in their slots."""
        with self._exclusive():
            for moves in self._moves_of_slots(WRITTEN, self._directory.dirty.nonzero()[:, 0]):
                self._transfer.write(moves)
                self._transfer.finish_writes()
            self._directory.dirty.zero_()
            synchronize(self.device)  # the host reads next

    @contextmanager
    def reloading(self, cached: CachedRows, unpinned: bool = False) -> Iterator[None]:
        """Change a table's store inside the block; afterwards reload its cached rows, even if the change fails.

        Batches keep their slots. With `unpinned` all rows are evicted first; RuntimeError if a batch has pinned some.
        """
        index, directory = self.rows.index(cached), self._directory
        with self._lock, torch.inference_mode(False), torch.no_grad():
            with self._exclusive():
                self._transfer.finish_writes()
                synchronize(self.device)
            if unpinned:
                if bool((directory.pins[directory.slice_of(index)] > 0).any()):
                    problem = f"a batch has pinned rows of table {cached.config.name!r}"
                    raise RuntimeError(f"{problem}; finish its backward pass, or drop it, first")
                directory.clear(index)
            try:
                yield
            finally:
                with self._exclusive():
                    table_slots = directory.slice_of(index)
                    rows, order = directory.tags[table_slots].sort()
                    for moves in self._moves_of_slots(READ, directory.starts[index] + order[rows != NO_ROW]):
                        self._transfer.read(moves)
                    directory.dirty[table_slots] = False
                    synchronize(self.device)

    @contextmanager
    def _exclusive(self, released_before: int | None = None) -> Iterator[None]:
        """Serialize transfers: one thread at a time, on its stream after earlier ones. A failure disables the cache."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._failure is not None:
                raise RuntimeError(
                    f"an earlier cache transfer failed ({str(self._failure) or repr(self._failure)}); the cache is in "
                    "an undefined state: load a checkpoint into a new module"
                ) from self._failure
            try:
                if self._last_transfer is not None:
                    torch.cuda.current_stream(self.device).wait_event(self._last_transfer)
                self._unpin_released(released_before)
                yield
                self._last_transfer = self._event()
            except BaseException as error:
                self._failure = error
                raise

    def _unpin_released(self, released_before: int | None = None) -> None:
        while self.releases and (released_before is None or self.releases[0].number < released_before):
            released = self.releases.popleft()
            for event in released.events:
                torch.cuda.current_stream(self.device).wait_event(event)
            slots = self._directory.first_slots[released.tables] + released.slots
            self._directory.pins.index_add_(0, slots, torch.full_like(slots, -1, dtype=torch.int32))
            if released.is_dirty:
                self._directory.dirty.index_fill_(0, slots, True)

    def _pin(self, rows: Tensor, tables: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Pin a batch's distinct rows, and read missing rows.

        Return their slots, the positions of cached rows, and the number of these per table.
        """
        directory = self._directory
        # Find hits. Rows of tables on the device and padding count as hits.
        hit_slots = directory.look_up(rows, self._table_layout)
        if directory.overflow.numel():
            hit_slots = self._pin_overflow(rows, hit_slots, tables)
        # Allocate slots for misses: in their sets, else in the overflow.
        slots = hit_slots.clone()
        evicted = directory.allocate(rows, slots, self._table_layout)
        flags = [hit_slots < 0, slots < 0, directory.num_sets.index_select(0, tables) > 0]
        # New ids of dynamic tables get initial values instead of being read.
        by_table = enumerate(self.rows)
        dynamic = [(n, c, c.new_rows[0]) for n, c in by_table if c is not None and c.new_rows is not None]
        if dynamic:
            new_rows = torch.cat([self._first_rows[number] + rows_of_table for number, _, rows_of_table in dynamic])
            flags.append(flags[0] & torch.isin(rows, new_rows, assume_unique=True, invert=True))
        positions, sizes = self._evict(tables, evicted, slots, *flags)
        (_, overflowing, cached, *_), (num_misses, overflows, lookups, *_) = positions, sizes
        self._counts[[LOOKUPS, HITS]] += np.array([lookups, np.subtract(lookups, num_misses)])
        rows = rows - self._first_rows.index_select(0, tables)
        if overflowing.numel():
            slots[overflowing] = self._allocate_overflow(tables[overflowing], rows[overflowing], overflows)
        # Read missing rows.
        index = -1 if dynamic else 0
        if positions[index].numel():
            misses = (values.index_select(0, positions[index]) for values in (tables, rows, slots))
            self._transfer.read(self._moves(READ, sizes[index], *misses))
        for number, cached_rows, _ in dynamic:
            table_mask = tables == number
            table = self.storage.tables[number]
            new_slots = cached_rows.initialize_slots(table, rows[table_mask], slots[table_mask])
            directory.dirty.index_fill_(0, new_slots + directory.starts[number], True)
        return slots, cached, lookups

    def _pin_overflow(self, rows: Tensor, slots: Tensor, tables: Tensor) -> Tensor:
        """Pin rows in overflow slots, and evict unpinned ones if others miss; return all slots, -1 for misses."""
        directory, overflow_slots = self._directory, self._directory.overflow
        tags = directory.tags[overflow_slots]
        overflow_tables = torch.searchsorted(directory.first_slots, overflow_slots, right=True) - 1
        # Find and pin rows in overflow slots, by binary search.
        linear, order = torch.where(tags == NO_ROW, NO_ROW, tags + self._first_rows[overflow_tables]).sort()
        index = torch.searchsorted(linear, rows).clamp_(max=linear.numel() - 1)
        hit_mask, hit_slots = linear[index] == rows, overflow_slots[order[index]]
        directory.pins.index_add_(0, hit_slots, hit_mask.to(torch.int32))
        # Evict unpinned ones.
        evictable = (tags != NO_ROW) & (directory.pins[overflow_slots] <= 0) & (slots < 0).any()
        victims = torch.where(evictable, tags, NO_ROW)
        self._evict(overflow_tables, victims, overflow_slots - directory.first_slots[overflow_tables])
        directory.tags[overflow_slots] = torch.where(evictable, NO_ROW, tags)
        return torch.where(hit_mask, hit_slots - directory.first_slots[tables], slots)

    def _allocate_overflow(self, tables: Tensor, rows: Tensor, num_rows: list[int]) -> Tensor:
        """Return overflow slots for rows whose sets are full, `num_rows` per table."""
        directory = self._directory
        shortages = [number - directory.free_overflow(t).numel() if number else 0 for t, number in enumerate(num_rows)]
        if max(shortages) > 0:
            self.storage.grow_overflows(shortages)
        self._counts[OVERFLOWS] += num_rows
        slots = torch.cat([directory.free_overflow(table)[:number] for table, number in enumerate(num_rows) if number])
        index = directory.first_slots[tables] + slots
        directory.tags[index], directory.used[index] = rows, self._clock
        directory.pins.index_fill_(0, index, 1)
        return slots

    def _evict(self, tables: Tensor, rows: Tensor, slots: Tensor, *flags: Tensor) -> Compacted:
        """Write back dirty rows among the victims, `NO_ROW` for none, and `_compact` flags in one synchronization."""
        directory, evicted_mask = self._directory, rows != NO_ROW
        index = torch.where(evicted_mask, directory.first_slots.index_select(0, tables) + slots, 0)
        masks = [evicted_mask & directory.dirty[index], evicted_mask, *flags]
        positions, sizes = _compact(masks, tables, len(self.rows))
        self._counts[EVICTIONS] += sizes[1]
        dirty = positions[0]
        if dirty.numel():
            directory.dirty.index_fill_(0, index[dirty], False)
            victims = (values.index_select(0, dirty) for values in (tables, rows, slots))
            self._transfer.write(self._moves(WRITTEN, sizes[0], *victims))
        return positions[2:], sizes[2:]

    def _moves(self, kind: int, sizes: list[int], tables: Tensor, *rows_and_slots: Tensor) -> RowMoves:
        """Moves of rows, `sizes` per table; counts their bytes."""
        self._counts[kind] += np.multiply(sizes, self._record_bytes)
        return RowMoves(sizes, torch.searchsorted(tables, self._table_numbers), tables, *rows_and_slots)

    def _moves_of_slots(self, kind: int, index: Tensor) -> Iterator[RowMoves]:
        """Yield moves of the rows in slots of all tables, in chunks whose records take at most `CHUNK_BYTES`."""
        directory = self._directory
        for chunk in index.split(max(1, CHUNK_BYTES // max(self._record_bytes))):
            tables = torch.searchsorted(directory.first_slots, chunk, right=True) - 1
            sizes = tables.bincount(minlength=len(self.rows)).tolist()
            yield self._moves(kind, sizes, tables, directory.tags[chunk], chunk - directory.first_slots[tables])

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


def create_cache(tables: Sequence[Table]) -> RowCache | None:
    """Create the cache of a collection's tables, None if all are on the device; ValueError for different policies."""
    if not (cached := [table.config for table in tables if table.rows.store is not None]):
        return None
    policies = {config.cache.policy: config.name for config in cached}
    if len(policies) > 1:
        raise ValueError(
            f"tables {sorted(policies.values())} have caches with different policies, {sorted(policies)}; put them "
            "into separate collections"
        )
    return RowCache(tables, cached[0].cache.policy)


def _compact(flags: Sequence[Tensor], tables: Tensor, num_tables: int) -> Compacted:
    """Return the positions where each flag, bool `[n]`, is set, and their number per table; `tables` ascend."""
    masks = torch.stack(tuple(flags))
    size, num_rows = masks.numel(), masks.shape[1]
    ends = torch.searchsorted(tables, torch.arange(num_tables, device=tables.device), right=True)
    flagged = masks.flatten().nonzero_static(size=size, fill_value=size)[:, 0]  # `nonzero` would synchronize
    bounds = torch.arange(len(flags), device=tables.device)[:, None] * num_rows + ends
    counts = torch.searchsorted(flagged, bounds.flatten())
    sizes: list[list[int]] = counts.diff(prepend=counts.new_zeros(1)).view(-1, num_tables).tolist()
    totals = [sum(table_counts) for table_counts in sizes]
    by_flag = flagged[: sum(totals)].split(totals)
    return [positions - number * num_rows for number, positions in enumerate(by_flag)], sizes
