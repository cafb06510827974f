"""Lookup of batches that the host prepares, in compiled graphs too: their rows are pinned in slots of a cache, pulled
from embedding servers, or assigned to ids of dynamic tables on the device.

A batch of pulled rows is deduplicated first: each distinct id of a table crosses the network once, and so does the sum
of its gradients.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonemb import ops
from tritonemb.errors import gradient_not_finite, warn_of_skipped_rows
from tritonemb.jagged import Features, KeyedJaggedTensor, batch_size_of, unpack_features
from tritonemb.layout import FIRST_ROW, NUM_ROWS, Layout
from tritonemb.memory import concat
from tritonemb.ops.registry import graph_break
from tritonemb.ops.row_update import MicroBatch
from tritonemb.tables.batch import (
    AssignedRows,
    RowBatch,
    UnknownIds,
    checked_batch,
    find_invalid,
    find_positions,
    row_sums,
)
from tritonemb.tables.cache import PinState
from tritonemb.tables.lookup import (
    PREFETCH_FIRST,
    assign_rows,
    check_backward,
    check_gradients,
    check_trainable,
    current_rows,
    is_recomputing,
    look_up_prepared,
    raise_no_optimizer,
)
from tritonemb.tables.lookup_tables import DeviceLookup, Groups, LookupTables, PreparedBatch, split_lookups
from tritonemb.tables.server_table import Pull, RowService

Deduplicated = tuple[RowBatch, Sequence[Tensor]]  # values index the ids: per table, int64 `[n]`, distinct and ascending
_tickets = itertools.count(1)
prefetched: WeakValueDictionary[int, "PrefetchedBatch"] = WeakValueDictionary()  # by ticket


@dataclass(eq=False)
class PrefetchedBatch(PreparedBatch):
    """A batch whose rows are prefetched. In compiled graphs its ticket, int64 `[]` on the CPU, represents it."""

    def __post_init__(self) -> None:
        number = next(_tickets)
        self.ticket, prefetched[number] = torch.tensor(number, device="cpu"), self

    def acquire(self, tables: LookupTables) -> bool:
        """Use the batch; return False if it was used before."""
        raise NotImplementedError

    def trained_weights(self) -> Tensor | None:
        """Return the per-sample weights if they get a gradient."""
        return None


@dataclass(eq=False)
class PinnedBatch(PrefetchedBatch):
    """A batch whose rows are pinned in slots of a cache until it is released or deleted."""

    replica_rows: Tensor | None = None  # of other ranks' batches, updated as well; None without replicas

    def acquire(self, tables: LookupTables) -> bool:
        """Wait on this stream for the slots; return False if they were used before, ValueError for another cache."""
        pins, rows, cache = self.pins, self.rows, tables.cache
        assert pins is not None
        assert cache is not None
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
        unknown_ids, slots_by_table = self.assigned.unknown_ids, dict[int, Tensor]()
        assert self.pins is not None
        assert tables.cache is not None
        batch, layout = unknown_ids.features, self.rows.layout
        values, slot_layout = self.rows.values[unknown_ids.positions], layout._replace(tables=layout.tables.clone())
        positions = find_positions(batch, tables.table_keys[tuple(batch.keys())])
        for number, table_rows in unknown_ids.rows.items():
            if tables.cache.rows[number] is None:
                slots_by_table[number] = table_rows
            else:
                rows, slots = self.pins.rows_of(number)
                slots_by_table[number] = slots[torch.searchsorted(rows, table_rows)]
            values[positions[number]] = batch.values()[positions[number]]
            slot_layout.tables[number, NUM_ROWS] = unknown_ids.layout.tables[number, NUM_ROWS]
        batch = KeyedJaggedTensor.unchecked(batch.keys(), values, batch.weights_or_none(), batch.offsets())
        return unknown_ids._replace(rows=slots_by_table, features=batch, layout=slot_layout)


class PrefetchedLookup(DeviceLookup):
    """Lookup of batches that the host prepares first, `prepare`; graphs may contain that of prefetched batches."""

    moves_rows = True

    def look_up(
        self, tables: LookupTables, features: Features, groups: Groups | None, occurrences: Tensor | None
    ) -> Tensor:
        assert groups is None or isinstance(groups, PrefetchedBatch)
        if groups is not None and torch.compiler.is_compiling():
            return look_up_in_graph(tables, groups)
        return self.look_up_prefetched(tables, features, groups, occurrences)

    def look_up_prefetched(
        self, tables: LookupTables, features: Features, batch: Any, occurrences: Tensor | None
    ) -> Tensor:
        """Look up a batch, which is prefetched unless that is done, or if it was looked up before."""
        raise NotImplementedError


class CachedLookup(PrefetchedLookup):
    """Lookup in tables some of which are cached on the device."""

    def prepare(self, tables: LookupTables, features: Features, occurrences: Tensor | None) -> PinnedBatch:
        with tables.lock:
            return prefetch_batch(tables, features, occurrences=occurrences)

    @graph_break(PREFETCH_FIRST)
    def look_up_prefetched(
        self, tables: LookupTables, features: Features, batch: PinnedBatch | None, occurrences: Tensor | None
    ) -> Tensor:
        # A second lookup, as of a checkpointed forward, prefetches again, with cache hits.
        cache, assigned = tables.cache, None if batch is None else batch.assigned
        assert cache is not None
        if tables.dynamic and current_rows(tables, assigned) is None and batch is not None:
            batch.release()
            assigned = None
        if batch is None or not batch.acquire(tables):
            begin = time.perf_counter()
            with tables.lock:
                replica_rows = None if batch is None else batch.replica_rows
                batch = prefetch_batch(tables, features, assigned, replica_rows, occurrences)
            batch.acquire(tables)
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
    keys, values, offsets, sample_weights = unpack_features(batch)
    slot_layout = cache.storage.slot_layout(tuple(keys), table_layout)
    find_replica_rows = tables.update.replica_rows(tables) if training else None
    if find_replica_rows is None:
        replica_rows = None
    with torch.inference_mode(False), torch.no_grad():  # the slots are used in training as well
        groups, invalid, pinned = ops.row_groups(values, offsets, table_layout), None, None
        rows = RowBatch(values, offsets, sample_weights, groups, slot_layout)
        # Grouping drops ids out of range, so compare the numbers of ids.
        if tables.bounds_check == "raise" and values.numel() and not tables.dynamic:
            num_ids = offsets[:: batch.stride()].diff() * table_layout.key_starts.diff()
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


def look_up_in_graph(tables: LookupTables, batch: PrefetchedBatch) -> Tensor:
    """Look up a prefetched batch in a compiled graph; see `look_up_prepared`."""
    weights, rows, sample_weights = tables.weights(), batch.rows, batch.trained_weights()
    training = torch.is_grad_enabled() and check_trainable(tables, batch, sample_weights)
    if torch.is_grad_enabled() and not training and any(weight.requires_grad for weight in weights):
        raise_no_optimizer(tables)
    size = batch_size_of(rows.offsets, rows.layout.key_starts) if tables.pooled else rows.values.shape[0]
    shape = size, rows.layout.width, tables.dtype_of(weights)
    return ops.pinned_lookup(weights[0], sample_weights, batch.ticket, tables.accumulator.handle, training, *shape)


@dataclass(eq=False)
class AssignedBatch(PrefetchedBatch):
    """A batch of tables on the device; ids of dynamic ones have been replaced by rows."""

    def acquire(self, tables: LookupTables) -> bool:
        """Wait on this stream for initial values, which a prefetch may have written on another; return True."""
        tables.lock.wait()
        if (values := self.rows.values).is_cuda:
            for tensor in pytree.tree_leaves((self.assigned, self.rows)):
                if isinstance(tensor, Tensor) and tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(values.device))
        return True

    def trained_weights(self) -> Tensor | None:
        """See `PrefetchedBatch`; ids without rows get no gradient, nor do their weights."""
        weights, assigned = self.rows.sample_weights, self.assigned
        is_trained = weights is not None and weights.requires_grad
        return weights if is_trained and assigned is not None and assigned.unknown_ids is None else None


class DynamicLookup(PrefetchedLookup):
    """Lookup in tables on the device some of which are dynamic."""

    def prepare(self, tables: LookupTables, features: Features, occurrences: Tensor | None) -> AssignedBatch:
        assigned = assign_rows(tables, features, True, occurrences)
        return AssignedBatch(*_row_batch(tables, assigned), assigned.training, assigned)

    @graph_break(PREFETCH_FIRST)
    def look_up_prefetched(
        self, tables: LookupTables, features: Features, batch: AssignedBatch | None, occurrences: Tensor | None
    ) -> Tensor:
        if batch is not None:
            batch.acquire(tables)
            check_gradients(tables, None, batch.training or not tables.trains())
        assigned = current_rows(tables, None if batch is None else batch.assigned)
        assigned = assign_rows(tables, features, False, occurrences) if assigned is None else assigned
        if tables.accumulator.is_open:
            tables.accumulated.remember_step(assigned)
        if assigned.unknown_ids is not None:
            return _look_up_with_unknown_ids(tables, assigned, assigned.unknown_ids)
        result = tables.look_up_rows(assigned.features, assigned.groups, tables.bounds_check == "raise")
        if result.requires_grad:
            result.register_hook(lambda _: check_backward(tables, assigned.version))
        return result


def _row_batch(tables: LookupTables, assigned: AssignedRows) -> tuple[list[str], RowBatch]:
    """Return keys and rows of a batch; in evaluation, which needs no groups, they may be None."""
    keys, rows, offsets, sample_weights = unpack_features(assigned.features)
    layout, groups = tables.layout(keys, rows.device), assigned.groups
    if groups is None and assigned.training:
        groups = ops.row_groups(rows, offsets, layout)
    return keys, RowBatch(rows, offsets, sample_weights, groups, layout)


def _look_up_with_unknown_ids(tables: LookupTables, assigned: AssignedRows, unknown_ids: UnknownIds) -> Tensor:
    """Look up a batch with unknown ids; these get no gradient."""
    keys, rows = _row_batch(tables, assigned)
    if assigned.training and tables.trains():
        return look_up_prepared(tables, PreparedBatch(keys, rows, assigned.training, assigned))
    return tables.read(rows.values, rows.offsets, rows.sample_weights, rows.layout, unknown_ids)


@dataclass(eq=False)
class PulledBatch(PrefetchedBatch):
    """A batch whose values index the rows that it has pulled, per table. For `ids` see `Deduplicated`.

    `features` are those that were looked up in `tables`.
    """

    tables: LookupTables = field(kw_only=True)
    features: Features = field(kw_only=True)
    ids: Sequence[Tensor] = field(kw_only=True)
    pull: Pull = field(kw_only=True)
    state: PinState = PinState.PINNED

    @property
    def is_released(self) -> bool:
        return self.state is PinState.RELEASED

    def acquire(self, tables: LookupTables) -> bool:
        if self.state is not PinState.PINNED:
            return False
        self.state = PinState.ACQUIRED
        return True

    def is_lookup_of(self, tables: LookupTables, features: Features) -> bool:
        """Return whether this is a lookup of equal features, whose backward has not ended."""
        if self.tables is not tables or self.state is not PinState.ACQUIRED:
            return False
        pairs = zip(unpack_features(self.features), unpack_features(features), strict=True)
        return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)

    def read(self, tables: LookupTables) -> Tensor:
        rows, device = self.rows, self.rows.values.device
        pulled = self.pull.rows(self.training and tables.accumulator.is_open)
        weights = [table_rows.to(device, non_blocking=True) for table_rows in pulled]
        batch = rows.values, rows.offsets, rows.sample_weights, rows.layout
        return ops.embedding_bag(weights, *batch, False, tables.dtype_of(weights))

    def apply(self, tables: LookupTables, grad: Tensor) -> None:
        self.push(tables, self.sum_gradients(tables, grad))
        tables.counters["step"] += 1

    @torch.no_grad()
    def sum_gradients(self, tables: LookupTables, grad: Tensor) -> list[Tensor]:
        """Return the sums of the gradients of each table's rows; `max_gradient` bounds their mean over trainers.

        With `on_nonfinite="raise"` a sum that is not finite raises ValueError; with "skip" such rows are counted, and
        the servers do not update them.
        """
        optimizer = tables.optimizer
        assert optimizer is not None
        _, sums = row_sums(grad, self.rows, (optimizer.max_gradient or torch.inf) * tables.service.num_trainers)
        # A cheap test; rows are checked one by one if their sum is not finite, or overflows.
        is_checked = optimizer.on_nonfinite == "ignore" or bool(concat([*map(torch.flatten, sums)]).sum().isfinite())
        for number, table_sums in enumerate(() if is_checked else sums):
            config, invalid = tables.configs[number], ~table_sums.isfinite().all(1).cpu()
            if optimizer.on_nonfinite == "raise" and invalid.any():
                raise gradient_not_finite(config.name, int(self.ids[number][invalid][0]))
            if num_skipped := int(invalid.sum()):
                tables.counters["skipped"][number] += num_skipped
                warn_of_skipped_rows(config.name)
        return sums

    def push(self, tables: LookupTables, sums: list[Tensor]) -> None:
        """Push the sums of a batch's gradients."""
        self.state = PinState.RELEASED
        self.pull.push([table_sums.cpu() for table_sums in sums], tables.current_learning_rate)

    def release(self) -> None:
        """Push no gradients for a batch that was pulled for training but not trained: the servers wait for its push."""
        was_released, self.state = self.is_released, PinState.RELEASED
        if self.training and not was_released:
            self.pull.push(None, 0.0)

    def __del__(self) -> None:
        self.release()


class PulledLookup(PrefetchedLookup):
    """Lookup in tables on servers that apply the optimizer."""

    @graph_break(PREFETCH_FIRST)
    def prepare(self, tables: LookupTables, features: Features, occurrences: Tensor | None) -> PulledBatch:
        """Request the rows of a batch from the servers. ValueError for ids out of range, before a request is sent."""
        batch, service = checked_batch(features), tables.tables[0].rows.require_service()
        inputs, training = batch, tables.trains()
        batch, layout = split_lookups(tables, batch)
        with torch.inference_mode(False), torch.no_grad():
            any_dynamic = any(config.is_dynamic for config in tables.configs)
            rows, all_ids = (_deduplicate if any_dynamic else _deduplicate_rows)(tables, batch, layout)
            # Grouping drops ids out of range.
            any_invalid = tables.bounds_check == "raise" and int(rows.groups.starts[-1]) < rows.values.numel()
            if any_invalid and (problem := find_invalid(tables.configs, inputs)) is not None:
                raise problem
            occurrences = rows.groups.starts[: rows.layout.num_rows + 1].diff().cpu()
            counts = occurrences.split([ids.numel() for ids in all_ids])
            pull = cast(RowService, service).pull(all_ids, counts, training)
            return PulledBatch(batch.keys(), rows, training, ids=all_ids, pull=pull, tables=tables, features=features)

    @graph_break(PREFETCH_FIRST)
    def look_up_prefetched(
        self, tables: LookupTables, features: Features, batch: PulledBatch | None, occurrences: Tensor | None
    ) -> Tensor:
        # Wait for the pull, or start one now. In an activation checkpoint the backward repeats a forward: read its rows
        # again, as servers would count the batch twice, and may have updated rows in the meantime.
        if is_recomputing():
            batches = (reference() for reference in prefetched.valuerefs())
            batch = next((b for b in batches if isinstance(b, PulledBatch) and b.is_lookup_of(tables, features)), None)
        elif batch is not None and not batch.acquire(tables):
            batch = None
        if batch is None:
            batch = self.prepare(tables, features, occurrences)
            batch.acquire(tables)
        if tables.trains():
            return look_up_prepared(tables, batch)
        result = batch.read(tables)  # differentiable by per-sample weights
        batch.release()
        return result

    @torch.no_grad()
    def apply_accumulated(self, tables: LookupTables, gradients: list[MicroBatch]) -> None:
        """Push the gradients of the micro-batches, which servers apply one by one, once all of them are checked."""
        pairs = zip(cast(list[PulledBatch], tables.accumulated.trained), gradients, strict=True)
        pushes = [(batch, batch.sum_gradients(tables, micro_batch.grad)) for batch, micro_batch in pairs]
        for batch, sums in pushes:
            batch.push(tables, sums)
        tables.counters["step"] += 1


def _deduplicate_rows(_: LookupTables, batch: KeyedJaggedTensor, layout: Layout) -> Deduplicated:
    """Replace ids by indices of the batch's distinct rows, for static tables. Waits for the device."""
    groups = ops.row_groups(batch.values(), batch.offsets(), layout)
    first_rows, num_rows = layout.tables[:, FIRST_ROW].contiguous(), int(groups.num_groups)
    rows, positions = groups.rows[:num_rows], torch.arange(groups.rows.numel(), device=first_rows.device)
    starts = torch.searchsorted(rows, first_rows)
    sizes = starts.diff(append=starts.new_tensor([num_rows]))
    by_group = torch.full_like(positions, -1)
    by_group[:num_rows] = positions[:num_rows] - starts.repeat_interleave(sizes, output_size=num_rows)
    ids = (rows - first_rows.repeat_interleave(sizes, output_size=num_rows)).cpu().split(sizes.tolist())
    values = ops.row_cache_translate(by_group, groups.starts, groups.order, groups.num_groups)
    pulled_layout = _pulled_layout(layout, sizes, num_rows)
    groups = groups._replace(rows=positions)
    return RowBatch(values, batch.offsets(), batch.weights_or_none(), groups, pulled_layout), ids


def _deduplicate(tables: LookupTables, batch: KeyedJaggedTensor, layout: Layout) -> Deduplicated:
    """Replace ids by indices of the batch's distinct ids, for tables some of which are dynamic."""
    positions = find_positions(batch, tables.table_keys[tuple(batch.keys())])
    values, all_ids = torch.full_like(batch.values(), -1, dtype=torch.int64), list[Tensor]()
    for number, config in enumerate(tables.configs):
        ids = batch.values()[positions[number]].long()
        indices = torch.full_like(ids, -1)
        valid: Any = slice(None) if config.is_dynamic else (ids >= 0) & (ids < config.num_embeddings)
        distinct, indices[valid] = ids[valid].unique(return_inverse=True)
        values[positions[number]] = indices
        all_ids.append(distinct.cpu())
    sizes = layout.tables.new_tensor([ids.numel() for ids in all_ids])
    layout = _pulled_layout(layout, sizes, int(sizes.sum()))
    groups = ops.row_groups(values, batch.offsets(), layout)
    return RowBatch(values, batch.offsets(), batch.weights_or_none(), groups, layout), all_ids


def _pulled_layout(layout: Layout, sizes: Tensor, num_rows: int) -> Layout:
    """Return a layout whose tables have the rows that a batch pulls."""
    table_rows = layout.tables.clone()
    table_rows[:, NUM_ROWS], table_rows[:, FIRST_ROW] = sizes, sizes.cumsum(0) - sizes
    return layout._replace(tables=table_rows, num_rows=num_rows)
