"""Lookup in cached tables: rows of a batch are pinned in slots before it is read."""

import itertools
import time
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.jagged import Features, batch_size_of
from tritonemb.layout import NUM_ROWS
from tritonemb.tables.batch import AssignedRows, RowBatch, UnknownIds, checked_batch, find_invalid, find_positions
from tritonemb.tables.cache import PinState, RowCache
from tritonemb.tables.lookup import assign_rows, check_protected, check_trainable, look_up_prepared, raise_no_optimizer
from tritonemb.tables.lookup_tables import DeviceLookup, Groups, LookupTables, PreparedBatch, split_lookups

_tickets = itertools.count(1)
prefetched: WeakValueDictionary[int, "PinnedBatch"] = WeakValueDictionary()  # by ticket


@dataclass(eq=False)
class PinnedBatch(PreparedBatch):
    """A batch whose rows are pinned in slots of a cache until it is released or deleted."""

    replica_rows: Tensor | None = None  # of other ranks' batches, updated as well; None without replicas

    def __post_init__(self) -> None:
        # The ticket, int64 `[]` on the CPU, is the batch's number in compiled graphs.
        number = next(_tickets)
        self.ticket, prefetched[number] = torch.tensor(number), self

    def acquire(self, cache: RowCache) -> bool:
        """Wait on this stream for the slots; return False if they were used before, ValueError for another cache."""
        pins, rows = self.pins, self.rows
        assert pins is not None
        if pins.state is not PinState.PINNED:
            return False
        if pins.cache is not cache:
            raise ValueError("another collection made these groups; use group() of the one that is called")
        pins.state = PinState.ACQUIRED
        if pins.ready is not None:
            pins.stream = torch.cuda.current_stream(cache.device)
            pins.stream.wait_event(pins.ready)
            ids = rows.values, rows.offsets, rows.sample_weights
            for tensor in (*ids, *rows.groups, pins.tables, pins.rows, pins.slots):
                if tensor is not None:
                    tensor.record_stream(pins.stream)
        return True

    def unknown_ids(self, tables: LookupTables) -> UnknownIds | None:
        """Return the temporary tables, with slots instead of rows for cached tables."""
        if self.assigned is None or self.assigned.unknown_ids is None:
            return None
        batch, unknown_ids, slots_by_table = self.assigned.features, self.assigned.unknown_ids, dict[int, Tensor]()
        assert self.pins is not None
        assert tables.cache is not None
        layout = self.rows.layout
        values, slot_layout = self.rows.values.clone(), layout._replace(tables=layout.tables.clone())
        positions = find_positions(batch, tables.table_keys[tuple(batch.keys())])
        for number, distinct in unknown_ids.rows.items():
            if tables.cache.tables[number] is None:
                slots_by_table[number] = distinct
            else:
                rows, slots = self.pins.rows_of(number)
                slots_by_table[number] = slots[torch.searchsorted(rows, distinct)]
            values[positions[number]] = unknown_ids.values[positions[number]]
            slot_layout.tables[number, NUM_ROWS] = unknown_ids.layout.tables[number, NUM_ROWS]
        return UnknownIds(slots_by_table, unknown_ids.initial, values, slot_layout)


class CachedLookup(DeviceLookup):
    """Lookup in tables some of which are cached on the device."""

    moves_rows = True

    def prepare(self, tables: LookupTables, features: Features, occurrences: Tensor | None) -> PinnedBatch:
        with tables.lock:
            return prefetch_batch(tables, features, occurrences=occurrences)

    def look_up(
        self, tables: LookupTables, features: Features, groups: Groups | None, occurrences: Tensor | None
    ) -> Tensor:
        assert groups is None or isinstance(groups, PinnedBatch)
        one_graph = not (tables.update.is_shared or tables.dynamic)
        if one_graph and torch.compiler.is_compiling() and groups is not None:
            return _look_up_in_graph(tables, groups)
        return _look_up_pinned(tables, features, groups, occurrences)


@_disable_dynamo  # a graph break; does not import the compiler
def _look_up_pinned(
    tables: LookupTables, features: Features, batch: PinnedBatch | None, occurrences: Tensor | None
) -> Tensor:
    """Look up a batch, which is prefetched unless that is done, or if it was looked up before.

    A second lookup, as of a checkpointed forward, prefetches again, with cache hits.
    """
    cache, assigned = tables.cache, None if batch is None else batch.assigned
    assert cache is not None
    if tables.dynamic:
        check_protected(tables, assigned)
    if batch is None or not batch.acquire(cache):
        begin = time.perf_counter()
        with tables.lock:
            replica_rows = None if batch is None else batch.replica_rows
            batch = prefetch_batch(tables, features, assigned, replica_rows, occurrences)
        batch.acquire(cache)
        cache.stall += time.perf_counter() - begin
    return look_up_prepared(tables, batch)


def prefetch_batch(
    tables: LookupTables, features: Features, assigned: AssignedRows | None = None, replica_rows: Tensor | None = None,
    occurrences: Tensor | None = None,
) -> PinnedBatch:  # fmt: skip
    """Pin a batch's rows in slots; `assigned` and `replica_rows` are those of an earlier prefetch of the batch.

    Synchronizes like `RowCache`, and again to find replica rows, or to report an id out of range: a ValueError before
    anything changes. For StorageError see `RowCache.pin`.
    """
    training, cache = tables.trains(), tables.cache
    assert cache is not None
    if training and tables.service is not None:
        tables.service.begin_training()
    if tables.dynamic and assigned is None:
        assigned = assign_rows(tables, features, occurrences=occurrences)
    inputs = checked_batch(features) if assigned is None else assigned.features
    # Lay the batch out with one key per lookup, over whole tables and over their slots.
    batch, table_layout = split_lookups(tables, inputs)
    keys, values, offsets = batch.keys(), batch.values(), batch.offsets()
    slot_layout = cache.storage.slot_layout(tuple(keys), table_layout)
    find_replica_rows = tables.update.replica_rows(tables) if training else None
    if find_replica_rows is None:
        replica_rows = None
    with torch.no_grad(), torch.inference_mode(False):  # the slots are used in training as well
        groups, invalid, pinned = ops.row_groups(values, offsets, table_layout), None, None
        rows = RowBatch(values, offsets, batch.weights_or_none(), groups, slot_layout)
        # Grouping drops ids out of range, so compare the numbers of ids.
        if tables.bounds_check == "raise" and values.numel() and not tables.dynamic:
            num_ids = batch.lengths() * table_layout.key_starts.diff().repeat_interleave(batch.stride())
            invalid = groups.starts[-1] != num_ids.sum()
        if find_replica_rows is None:
            pinned = cache.pin(rows, None, invalid)
        if pinned is None:
            is_invalid = invalid is not None and bool(invalid)
            problem = find_invalid(tables.configs, inputs) if is_invalid else None
            if find_replica_rows is not None and replica_rows is None:
                replica_rows = find_replica_rows(groups.rows, problem)
            elif problem is not None:
                raise problem
            pinned = cache.pin(rows, replica_rows, None)
            assert pinned is not None
        rows, pins = pinned
        return PinnedBatch(keys, rows, training, assigned, pins, replica_rows)


def _look_up_in_graph(tables: LookupTables, batch: PinnedBatch) -> Tensor:
    """Look up a prefetched batch in a compiled graph; see `look_up_prepared`."""
    weights, rows = tables.weights(), batch.rows
    training = torch.is_grad_enabled() and check_trainable(tables, batch)
    if torch.is_grad_enabled() and not training and any(weight.requires_grad for weight in weights):
        raise_no_optimizer(tables)
    size = batch_size_of(rows.offsets, rows.layout.key_starts) if tables.pooled else rows.values.shape[0]
    dtype, handle = tables.dtype_of(weights), tables.accumulator.handle
    return ops.pinned_lookup(weights[0], batch.ticket, handle, training, size, rows.layout.width, dtype)
