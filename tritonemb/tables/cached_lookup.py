"""Lookups of a collection of which some tables are in host memory or on disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import errors, ops
from tritonemb.jagged import Features, KeyedJaggedTensor, parts_of
from tritonemb.layout import NUM_ROWS, TABLE, Layout, make_layout
from tritonemb.tables.cache import RowCache
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.lookup import PrefetchedBatch
from tritonemb.tables.table import Table
from tritonemb.types import TableConfig

Tables = Any  # a `TableSet`, whose module imports this one


def make_cache(tables: Sequence[Table]) -> RowCache | None:
    """The cache of a collection's tables, or None if all are on the device, or on the meta device.

    Raises:
        ValueError: for tables with several policies.
    """
    cached = [table.config for table in tables if isinstance(table, CachedTable) and table.has_store]
    if not cached:
        return None
    policies = {config.cache.policy: config.name for config in cached}
    if len(policies) > 1:
        raise ValueError(
            f"tables {sorted(policies.values())} have caches of several policies, {sorted(policies)}; put them into "
            "collections of their own"
        )
    return RowCache(tables, cached[0].cache.policy)


def prefetch_batch(
    tables: Tables, cache: RowCache, features: Features, before: PrefetchedBatch | None = None
) -> PrefetchedBatch:
    """Pin a batch's rows in slots; the batch with slots in place of ids.

    Args:
        before: what came of an earlier prefetch of the batch: replicas are not asked for their rows again.
    """
    keys, values, offsets, weights = parts_of(features)
    layout = tables.layout(keys, values.device)
    batch = _one_key_a_lookup(tables, KeyedJaggedTensor(keys, values, weights, offsets=offsets), layout)
    whole, own = slot_layouts(tables, cache, tuple(batch.keys()), batch.values().device)

    def find_problem() -> ValueError | None:
        return _bad_id(values, offsets, layout) if tables.bounds_check == "raise" else None

    training = torch.is_grad_enabled() and _trains(tables)
    find_replica_rows = tables.update.replica_rows(tables) if training else None
    if find_replica_rows is not None and before is not None and before.replica_rows is not None:
        found = before.replica_rows
        find_replica_rows = lambda _rows, _problem: found  # noqa: E731
    return cache.prefetch(batch, whole, own, training, find_problem, find_replica_rows)


@_disable_dynamo  # a graph break, which loads no compiler before one is used
def look_up_cached(
    tables: Tables, cache: RowCache, features: Features, groups: ops.RowGroups | PrefetchedBatch | None
) -> Tensor:
    """As `TableSet.look_up`. A compiled model's graphs end before it and begin behind it.

    Without an optimizer the result wants gradients as ordinary weights do, and its backward raises.

    Raises:
        ValueError: for per-sample weights that want gradients, or a batch that another collection has prefetched, or
            that was prefetched without gradients and now is to be trained.
    """
    # A batch that is looked up twice, by a checkpointed forward say, is prefetched again: its rows are still in slots.
    batch = groups if isinstance(groups, PrefetchedBatch) else None
    if batch is None or not batch.pinned.acquire(cache.release):
        begin = time.perf_counter()
        batch = prefetch_batch(tables, cache, features, batch)
        batch.pinned.acquire(cache.release)
        cache.stall += time.perf_counter() - begin
    lookup, pinned = cache.acquire(batch), batch.pinned
    if not torch.is_grad_enabled():
        found = tables.read(lookup)
        pinned.release()
        return found
    _check_gradients(tables, batch)
    if not _trains(tables):
        weights = [table.weight for table in tables.tables]
        stand_for_all = next((weight for weight in weights if weight.requires_grad), weights[0])
        found = ops.fused_lookup(stand_for_all, None, partial(tables.read, lookup), partial(_refuse_gradient, tables))
        pinned.release()
        return found
    tables.check_trainable()
    if tables.accumulating:
        keys, values, _, _ = parts_of(features)
        tables.remember_keys(list(_lookup_keys(tables, keys, tables.layout(keys, values.device)) or keys))
        tables.pins.append(pinned)
    return tables.look_up_trained(lookup, [pinned])


def _refuse_gradient(tables: Tables, grad: Tensor, needs_sample_weight_grad: bool) -> None:
    config = _first_cached(tables)
    raise ValueError(
        f"table {config.name!r} is placed on {config.placement!r}, where only a fused optimizer can train it; give "
        "its collection one, or freeze it with requires_grad_(False)"
    )


def _trains(tables: Tables) -> bool:
    """Whether a backward updates the tables."""
    return tables.optimizer is not None and any(table.weight.requires_grad for table in tables.tables)


def _first_cached(tables: Tables) -> TableConfig:
    return next(config for config in tables.configs if config.placement != "device")


def _check_gradients(tables: Tables, batch: PrefetchedBatch) -> None:
    config, weights = _first_cached(tables), batch.lookup.sample_weights
    if weights is not None and weights.requires_grad:
        raise ValueError(
            f"per-sample weights get no gradient where table {config.name!r} is placed on {config.placement!r}; detach "
            "them, or place the tables on the device"
        )
    if _trains(tables) and not batch.training:
        raise ValueError(
            f"the rows of table {config.name!r} were prefetched under no_grad, and now gradients are recorded; call "
            "group() or prefetch() where gradients are recorded"
        )


def _bad_id(values: Tensor, offsets: Tensor, layout: Layout) -> ValueError | None:
    """Names the first id that lies outside a table which its key looks up."""
    num_keys = layout.key_starts.numel() - 1
    bags = torch.diff(offsets)
    for_key = []
    for key in range(num_keys):
        uses = layout.lookups[int(layout.key_starts[key]) : int(layout.key_starts[key + 1])]
        for_key.append(min((int(layout.tables[table, NUM_ROWS]) for table in uses[:, TABLE].tolist()), default=-1))
    rows = torch.tensor(for_key, device=values.device).repeat_interleave(bags.numel() // num_keys)
    rows = torch.repeat_interleave(rows, bags)
    bad = ((rows >= 0) & ((values < 0) | (values >= rows))).nonzero()
    return errors.bad_id(int(bad[0]), values, offsets, layout) if bad.numel() else None


def _lookup_keys(tables: Tables, keys: Sequence[str], layout: Layout) -> dict[str, str] | None:
    """A key of its own for each lookup, and its feature; None if no key of `layout` has two lookups.

    Keys keep their order, so a row's gradients are summed in the order in which they would be on the device.
    """
    if layout.multiplicity <= 1:
        return None
    return {
        _lookup_key(config.name, feature): feature
        for feature in keys
        for config in tables.configs
        if feature in config.feature_names
    }


def _lookup_key(table: str, feature: str) -> str:
    """A table's name has no dot, so no other pair has this key."""
    return f"{table}.{feature}"


def _one_key_a_lookup(tables: Tables, batch: KeyedJaggedTensor, layout: Layout) -> KeyedJaggedTensor:
    """The batch with a key for each lookup: a value is one row of one table then."""
    by_key, parts = _lookup_keys(tables, batch.keys(), layout), []
    if by_key is None:
        return batch
    for key, feature in by_key.items():
        part = batch[feature]
        parts.append(KeyedJaggedTensor([key], part.values(), part.weights_or_none(), offsets=part.offsets()))
    return KeyedJaggedTensor.concat(parts)


def slot_layouts(tables: Tables, cache: RowCache, keys: tuple[str, ...], device: torch.device) -> tuple[Layout, Layout]:
    """The layouts of a batch with a key for each lookup, over whole tables and over their slots; made once.

    Any thread may call this.
    """
    if keys in cache.storage.layouts:
        return cache.storage.layouts[keys]
    configs: Sequence[TableConfig] = tables.configs
    if any(feature not in keys for feature in tables.feature_names):
        configs = [
            config.part(
                config.name,
                (0, config.num_embeddings),
                (0, config.embedding_dim),
                [_lookup_key(config.name, feature) for feature in config.feature_names],
            )
            for config in configs
        ]
    with torch.inference_mode(False):  # they are kept, for training too
        return cache.add_layout(keys, make_layout(configs, keys, tables.pooled, device))
