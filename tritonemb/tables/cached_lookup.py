"""Lookups of a collection of which some tables live elsewhere than on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import errors, ops
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.layout import NUM_ROWS, TABLE, Layout, make_layout
from tritonemb.ops.accumulate import NOT_ACCUMULATING, Accumulator, accumulate_
from tritonemb.optimizers import Optimizer
from tritonemb.tables.cache import Brought, Lease, RowCache, RowsOfOthers
from tritonemb.tables.cached_table import TieredTable
from tritonemb.tables.lookup import Features, Lookup, parts_of
from tritonemb.tables.table import Table
from tritonemb.tables.update import LocalUpdate
from tritonemb.types import TableConfig


class CachedTables(Protocol):
    """What lookups of cached tables need to know of a `TableSet`."""

    configs: tuple[TableConfig, ...]
    optimizer: Optimizer | None
    pooled: bool
    update: LocalUpdate
    pending: Tensor
    accumulator: Accumulator
    accumulating: bool
    leases: list[Lease]

    @property
    def bounds_check(self) -> str: ...
    @property
    def tables(self) -> list[Table]: ...
    @property
    def feature_names(self) -> tuple[str, ...]: ...
    def layout(self, keys: Sequence[str], device: torch.device) -> Layout: ...
    def read(self, lookup: Lookup) -> Tensor: ...
    def remember_keys(self, keys: list[str]) -> None: ...
    def check_trainable(self, weights: list[Tensor]) -> None: ...


def make_cache(tables: Sequence[Table]) -> RowCache | None:
    """The cache of a collection's tables, or None if all live on the device, or on none.

    Raises:
        ValueError: for tables with several policies.
    """
    tiered = [table.config for table in tables if isinstance(table, TieredTable) and table.has_store]
    if not tiered:
        return None
    policies = {config.cache.policy: config.name for config in tiered}
    if len(policies) > 1:
        raise ValueError(
            f"tables {sorted(policies.values())} have caches of several policies, {sorted(policies)}; put them into "
            "collections of their own"
        )
    return RowCache(tables, tiered[0].cache.policy)


def bring(collection: CachedTables, cache: RowCache, features: Features, before: Brought | None = None) -> Brought:
    """Bring a batch's rows to the device; the batch with their slots in place of ids.

    Args:
        before: where the batch was brought before, what came of that: rows of others are not asked for again.
    """
    keys, values, offsets, weights = parts_of(features)
    given = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    layout = collection.layout(keys, values.device)
    lanes = _lanes(collection, keys, layout)
    batch = given if lanes is None else _split(given, lanes)
    whole, own = slot_layouts(collection, cache, tuple(batch.keys()), batch.values().device)

    def refuse_bad_ids() -> None:
        if collection.bounds_check == "raise":
            _refuse_bad_ids(values, offsets, layout)

    training = torch.is_grad_enabled() and _trains(collection)
    also = collection.update.replica_rows(collection) if training else None
    if also is not None and before is not None and before.also is not None:
        also = _as_before(before.also)
    return cache.bring(batch, whole, own, training, refuse_bad_ids, also)


def _as_before(rows: Tensor) -> RowsOfOthers:
    return lambda _own, _problem: rows


@_disable_dynamo  # a graph break, which loads no compiler before one is used
def look_up_cached(
    collection: CachedTables, cache: RowCache, features: Features, groups: ops.RowGroups | Brought | None
) -> Tensor:
    """As `CachedTables.look_up`. A compiled model's graphs end before it and begin behind it.

    Without an optimizer the result wants gradients as ordinary weights do, and its backward raises.

    Raises:
        ValueError: for weights of samples that want gradients, or a batch that was brought for another collection, or
            to be looked up only and now is to be trained.
    """
    # A batch that is looked up twice, by a checkpointed forward say, is brought again: its rows are still there.
    if isinstance(groups, Brought) and groups.lease.take(cache):
        brought = groups
    else:
        begin = time.perf_counter()
        brought = bring(collection, cache, features, groups if isinstance(groups, Brought) else None)
        brought.lease.take(cache)
        cache.stall += time.perf_counter() - begin
    lookup, lease = cache.take(brought), brought.lease
    if not torch.is_grad_enabled():
        found = collection.read(lookup)
        lease.end()
        return found
    _check_gradients(collection, brought)
    weights: list[Tensor] = [table.weight for table in collection.tables]
    if not _trains(collection):
        stand_for_all = next((w for w in weights if w.requires_grad), weights[0])
        found = ops.fused_lookup(stand_for_all, None, UntrainedUpdate(collection, lookup))
        lease.end()
        return found
    collection.update.check(collection.configs[0].name)
    collection.check_trainable(weights)
    if collection.accumulating:
        keys, values, _, _ = parts_of(features)
        lanes = _lanes(collection, keys, collection.layout(keys, values.device))
        collection.remember_keys(keys if lanes is None else list(lanes))
        collection.leases.append(lease)
    return ops.fused_lookup(weights[0], None, PinnedUpdate(collection, lookup, lease))


class PinnedUpdate:
    """The slots of a batch, read and updated as long as they are pinned; an `ops.Update`."""

    def __init__(self, collection: CachedTables, lookup: Lookup, lease: Lease) -> None:
        self._collection, self._lookup, self._lease = collection, lookup, lease
        self._handle = collection.accumulator.handle if collection.accumulating else NOT_ACCUMULATING

    def read(self) -> Tensor:
        return self._collection.read(self._lookup)

    def take_gradient(self, grad: Tensor, needs_sample_weight_grad: bool) -> None:
        """Update the rows and unpin them; or keep the gradient, if the lookup was made in `accumulate`.

        Raises:
            RuntimeError: the slots have been unpinned.
        """
        if self._lease.ended:
            raise RuntimeError(
                "the rows of this batch have left the device: each lookup of tables placed elsewhere has one backward, "
                "inside the accumulate() block if it was made in one; look the batch up again"
            )
        if self._handle == NOT_ACCUMULATING:
            self._collection.update.step(self._collection, grad, self._lookup, [self._lease])
        else:
            batch = self._lookup.values, self._lookup.offsets, self._lookup.sample_weights
            accumulate_(self._collection.pending, self._handle, grad, *batch)


class UntrainedUpdate:
    """Slots of tables without an optimizer; an `ops.Update`."""

    def __init__(self, collection: CachedTables, lookup: Lookup) -> None:
        self._collection, self._lookup = collection, lookup

    def read(self) -> Tensor:
        return self._collection.read(self._lookup)

    def take_gradient(self, grad: Tensor, needs_sample_weight_grad: bool) -> None:
        config = _elsewhere(self._collection)
        raise ValueError(
            f"table {config.name!r} is placed on {config.placement!r}, where only a fused optimizer can train it; give "
            "its collection one, or freeze it with requires_grad_(False)"
        )


def _trains(collection: CachedTables) -> bool:
    """Whether a backward updates the tables."""
    return collection.optimizer is not None and any(table.weight.requires_grad for table in collection.tables)


def _elsewhere(collection: CachedTables) -> TableConfig:
    return next(config for config in collection.configs if config.placement != "device")


def _check_gradients(collection: CachedTables, brought: Brought) -> None:
    config, weights = _elsewhere(collection), brought.lookup.sample_weights
    if weights is not None and weights.requires_grad:
        raise ValueError(
            f"per-sample weights get no gradient where table {config.name!r} is placed on {config.placement!r}; detach "
            "them, or place the tables on the device"
        )
    if _trains(collection) and not brought.training:
        raise ValueError(
            f"the rows of table {config.name!r} were brought to be looked up only (under no_grad), and now gradients "
            "are recorded; call group() where gradients are recorded"
        )


def _refuse_bad_ids(values: Tensor, offsets: Tensor, layout: Layout) -> None:
    """Raise the ValueError of the first id that lies outside a table which its key looks up."""
    num_keys = layout.key_starts.numel() - 1
    bags = torch.diff(offsets)
    for_key = []
    for key in range(num_keys):
        uses = layout.lookups[int(layout.key_starts[key]) : int(layout.key_starts[key + 1])]
        for_key.append(min((int(layout.tables[table, NUM_ROWS]) for table in uses[:, TABLE].tolist()), default=-1))
    rows = torch.tensor(for_key, device=values.device).repeat_interleave(bags.numel() // num_keys)
    rows = torch.repeat_interleave(rows, bags)
    bad = (rows >= 0) & ((values < 0) | (values >= rows))
    if bool(bad.any()):
        raise errors.bad_id(int(bad.nonzero()[0]), values, offsets, layout)


def _lanes(collection: CachedTables, keys: Sequence[str], layout: Layout) -> dict[str, str] | None:
    """For each lookup a key of its own, and the feature that it is of; None if no key of `layout` has two lookups.

    Keys keep their order, so a row's gradients are summed in the order in which they would be on the device.
    """
    if layout.multiplicity <= 1:
        return None
    return {
        _lane(config.name, feature): feature
        for feature in keys
        for config in collection.configs
        if feature in config.feature_names
    }


def _lane(table: str, feature: str) -> str:
    """A feature as one table sees it. A table's name has no dot, so there is one such pair for a lane."""
    return f"{table}.{feature}"


def _split(batch: KeyedJaggedTensor, lanes: Mapping[str, str]) -> KeyedJaggedTensor:
    """The batch with a key for each lane: a value is one row of one table then."""
    parts = []
    for lane, feature in lanes.items():
        part = batch[feature]
        parts.append(KeyedJaggedTensor([lane], part.values(), part.weights_or_none(), offsets=part.offsets()))
    return KeyedJaggedTensor.concat(parts)


def slot_layouts(
    collection: CachedTables, cache: RowCache, keys: tuple[str, ...], device: torch.device
) -> tuple[Layout, Layout]:
    """What the keys of a batch with a key for each lookup mean to the tables and to their slots; made once.

    Any thread may call this.
    """
    if keys in cache.memory.layouts:
        return cache.memory.layouts[keys]
    configs: Sequence[TableConfig] = collection.configs
    if any(feature not in keys for feature in collection.feature_names):
        configs = [
            config.part(
                config.name,
                (0, config.num_embeddings),
                (0, config.embedding_dim),
                [_lane(config.name, feature) for feature in config.feature_names],
            )
            for config in configs
        ]
    with torch.inference_mode(False):  # they are kept, for training too
        return cache.add_layout(keys, make_layout(configs, keys, collection.pooled, device))
