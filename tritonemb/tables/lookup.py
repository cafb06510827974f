"""Lookup of a prepared batch, which is read, then updated in the backward; and rows of ids in dynamic tables.

In dynamic tables ids are replaced by rows, which training assigns to new ids.
"""

from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.layout import NUM_ROWS, Layout, negative
from tritonemb.ops import row_update
from tritonemb.ops.registry import graph_break
from tritonemb.ops.row_update import accumulate_, update_after_backward, update_locks
from tritonemb.tables.batch import AssignedRows, UnknownIds, checked_batch, find_invalid, find_positions
from tritonemb.tables.index import find_batch, insert_batch
from tritonemb.tables.lookup_tables import LookupTables, PreparedBatch, split_lookups
from tritonemb.types import TableConfig


def look_up_prepared(tables: LookupTables, batch: PreparedBatch) -> Tensor:
    """Look up a batch; the backward updates and releases its rows, or accumulates their gradients.

    ValueError for per-sample weights that require gradients, and for a batch that was prefetched without gradients and
    is now trained. The backward of a result without an optimizer raises.
    """
    # Evaluation: read and release.
    if not torch.is_grad_enabled():
        result = batch.read(tables)
        batch.release()
        return result
    if not check_trainable(tables, batch):
        weights = [table.weight for table in tables.tables]
        weight = next((weight for weight in weights if weight.requires_grad), weights[0])
        result = ops.fused_lookup(weight, None, partial(batch.read, tables), partial(raise_no_optimizer, tables))
        batch.release()
        return result
    # Training: the backward updates the rows, or accumulates.
    accumulating, rate = record_trained(tables, batch), tables.counters["learning_rate"]

    def take_gradient(grad: Tensor, needs_sample_weight_grad: bool, outer_pass: Any = None) -> None:
        apply_gradient(tables, batch, grad, accumulating, rate.data_ptr() in row_update.recomputed_rates, outer_pass)

    names, inputs = partial(map, attrgetter("name"), tables.configs), (batch.rows.offsets, batch.rows.sample_weights)
    weight, read = tables.tables[0].weight, partial(batch.read, tables)
    return ops.fused_lookup(weight, None, read, take_gradient, names, None, *inputs, learning_rate=rate)


PREFETCH_FIRST = (
    "the host assigns rows to new ids, and moves rows of tables in host memory, on disk or on servers, before a graph "
    "runs; for one graph call the compiled model with prefetched features, te.nn.prefetch(model, features)"
)


def record_trained(tables: LookupTables, batch: PreparedBatch) -> bool:
    """Record the lookup of a batch to be trained; return whether its gradient is accumulated."""
    if tables.accumulator.is_open:
        tables.accumulated.add(batch)
    return tables.accumulator.is_open


def apply_gradient(
    tables: LookupTables, batch: PreparedBatch, grad: Tensor, accumulating: bool, deferred: bool, outer_pass: Any = None
) -> None:
    """Update the rows of a batch by the gradient of its result, or accumulate it; `deferred`: after the backward pass.

    `outer_pass` is that of `update_after_backward`. RuntimeError or ValueError if other rows may be where those of the
    batch were.
    """
    if batch.is_released:
        raise RuntimeError(
            "the rows of this batch are no longer pinned: each lookup has one backward, inside the accumulate() block "
            "of the lookup if there is one; look the batch up again"
        )
    if batch.assigned is not None:
        check_backward(tables, batch.assigned.version)
    if accumulating:
        rows, pending = batch.rows, tables.counters["pending"]
        accumulate_(pending, tables.accumulator.handle, grad, rows.values, rows.offsets, rows.sample_weights)
        tables.accumulated.trained.append(batch)
    elif deferred:
        update_after_backward(tables.accumulator.handle, partial(batch.apply, tables, grad.clone()), outer_pass)
    else:
        batch.apply(tables, grad)


def check_trainable(tables: LookupTables, batch: PreparedBatch, trained_weights: Tensor | None = None) -> bool:
    """Return whether the backward of a lookup made now updates the tables; raise if it must not, or cannot."""
    training = tables.trains()
    sample_weights = batch.rows.sample_weights if trained_weights is None else None
    check_gradients(tables, sample_weights, batch.training or not training)
    if training and not tables.on_servers:  # servers sum the gradients of all ranks, so their tables cannot diverge
        tables.update.check(tables)
    return training


def check_gradients(tables: LookupTables, sample_weights: Tensor | None, trainable: bool) -> None:
    """Raise ValueError for per-sample weights that require gradients, and for a batch that cannot be trained."""
    if sample_weights is not None and sample_weights.requires_grad:
        config = _first_non_device(tables)
        is_dynamic = config.is_dynamic and config.placement == "device"  # ids without rows get no gradient
        raise ValueError(
            f"per-sample weights get no gradient where table {config.name!r} is "
            f"{'dynamic and admits some ids only' if is_dynamic else f'placed on {config.placement!r}'}; detach them, "
            f"or {'remove its AdmissionConfig' if is_dynamic else 'place the tables on the device'}"
        )
    if not trainable:
        raise ValueError(
            f"the rows of table {_first_non_device(tables).name!r} were prefetched under no_grad, but gradients are "
            "recorded now; call group() or prefetch() with gradients enabled"
        )


def raise_no_optimizer(tables: LookupTables, *_: object) -> NoReturn:
    """Raise ValueError for tables that only a fused optimizer can train."""
    config = _first_non_device(tables)
    kind = "dynamic" if config.is_dynamic else f"placed on {config.placement!r}"
    raise ValueError(
        f"table {config.name!r} is {kind}, where only a fused optimizer can train it; pass an optimizer to its "
        "collection, or freeze it with requires_grad_(False)"
    )


def _first_non_device(tables: LookupTables) -> TableConfig:
    return next(config for config in tables.configs if config.is_dynamic or config.placement != "device")


@graph_break(PREFETCH_FIRST)
def assign_rows(
    tables: LookupTables, features: Features, for_prefetch: bool = False, occurrences: Tensor | None = None
) -> AssignedRows:
    """Find the rows of a batch's ids in dynamic tables, and in training assign rows to new ids.

    ValueError, before anything changes, if a table has no room for its new ids, or has no optimizer to train it.
    With `for_prefetch` rows are also grouped. `occurrences`, int `[N]`, counts ids before the batch was deduplicated.
    """
    # Check the batch, and give each lookup its own key.
    batch, dynamic = checked_batch(features), tables.dynamic
    if tables.bounds_check == "raise" and (problem := find_invalid(tables.configs, batch)):
        raise problem
    batch, layout = split_lookups(tables, batch)
    # Register the tables' lock with the updates, so that rows are reassigned after updates on other streams.
    training = tables.trains()
    if torch.is_grad_enabled() and not training and any(table.weight.requires_grad for table in dynamic.values()):
        raise_no_optimizer(tables)
    if training and tables.cache is None:  # a cache orders updates itself, by pins
        update_locks[tables.counters["learning_rate"].data_ptr()] = tables.lock
    inserts = training and not is_recomputing()
    with tables.lock, torch.inference_mode(False), torch.no_grad():
        # Find rows of ids, and in training insert new ids.
        values, all_known = batch.values().long(), False
        if tables.service is not None:
            rows = _find_server_rows(tables, batch, occurrences, inserts)
        else:
            keys_of_tables = tables.table_keys[tuple(batch.keys())].values()
            index_of_key = {key: table_index for table_index, keys in enumerate(keys_of_tables) for key in keys}
            table_of_key, size = [index_of_key.get(key, -1) for key in range(len(batch.keys()))], batch.stride()
            bounds = batch.offsets()[::size] if size else batch.offsets().new_zeros(len(table_of_key) + 1)
            if inserts:
                rows, _, any_refused = insert_batch([*dynamic.values()], values, bounds, table_of_key, occurrences)
                all_known = not any_refused
            else:
                rows = find_batch([*dynamic.values()], values, bounds, table_of_key)
        # Replace ids by rows; ids without one are read from temporary tables.
        row_features = KeyedJaggedTensor.unchecked(batch.keys(), rows, batch.weights_or_none(), batch.offsets())
        groups = ops.row_groups(rows, batch.offsets(), layout) if training and for_prefetch else None
        with torch.enable_grad():  # of sample weights, also if the batch is prefetched without gradients
            unknown_ids = None if all_known else _find_unknown_ids(tables, batch, row_features, layout)
        return AssignedRows(row_features, groups, unknown_ids, training, _version(tables))


def is_recomputing() -> bool:
    """Return whether a non-reentrant activation checkpoint repeats a forward, whose batch was counted the first time.

    The first forward of a reentrant one runs under `no_grad`, so its repetition counts the batch.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[1], "__qualname__", "").startswith("_recomputation_hook.")


def _find_server_rows(
    tables: LookupTables, batch: KeyedJaggedTensor, occurrences: Tensor | None, training: bool
) -> Tensor:
    """Find rows of a batch's ids, and in training assign rows to new ids, in indexes on servers."""
    values, positions = batch.values().long(), find_positions(batch, tables.table_keys[tuple(batch.keys())])
    # Deduplicate the ids of each table, and count their occurrences.
    distinct_by_table = []
    for at in positions.values():
        table_ids, inverse, count = values[at].unique(return_inverse=True, return_counts=True)
        if occurrences is not None:
            count = torch.zeros_like(table_ids).index_add_(0, inverse, occurrences[at].long())
        distinct_by_table.append((table_ids, inverse, count))
    # Request their rows, and scatter these to the positions of the ids.
    distinct, counts = ([tensors[n].cpu() for tensors in distinct_by_table] for n in (0, 2))
    allocations, rows = tables.service.allocate_rows(distinct, counts, training), values.clone()
    by_table = zip(positions.items(), distinct_by_table, allocations, strict=True)
    for (number, at), (ids, inverse, _), allocation in by_table:
        table_rows, new_mask = (tensor.to(ids.device) for tensor in allocation)
        if training:
            tables.dynamic[number].index.clock += 1
            tables.dynamic[number].index.generation += 1  # servers may have evicted rows
            tables.dynamic[number].rows.new_rows = table_rows[new_mask], ids[new_mask]
        rows[at] = table_rows[inverse]
    return rows


def _version(tables: LookupTables) -> tuple[int, int, int]:
    """Return what `AssignedRows.version` is of rows that are found now."""
    indexes = [table.index for table in tables.dynamic.values()]
    return indexes[0].clock, sum(index.generation for index in indexes), sum(index.epoch for index in indexes)


def current_rows(tables: LookupTables, assigned: AssignedRows | None) -> AssignedRows | None:
    """Return the rows of a prefetched batch, None if they must be found again, since other ids may have them now.

    ValueError if rows of this batch, or of accumulated ones, may be evicted before their update.
    """
    first_step = tables.accumulated.step
    if first_step is not None and tables.accumulator.is_open:
        is_new_batch = assigned is None
        _check_step(tables, first_step - is_new_batch, "the first of the accumulated micro-batches came")
    if assigned is None:
        return None
    (step, *generation), (_, *current) = assigned.version, _version(tables)
    if generation != current and (not assigned.training or generation[1] != current[1]):
        return None
    if assigned.training:
        _check_step(tables, step, "a batch was prefetched")
    return assigned


def check_backward(tables: LookupTables, version: tuple[int, int, int]) -> None:
    """Raise ValueError in a backward if other ids may have got rows of its batch, which had this version."""
    (step, generation, epoch), (_, current_generation, current_epoch) = version, _version(tables)
    if epoch != current_epoch:
        name = next(iter(tables.dynamic.values())).config.name
        raise ValueError(
            f"table {name!r}, or another of its collection, was loaded or reset between a lookup and its backward; run "
            "the backward first, or look the batch up again"
        )
    if generation != current_generation:
        _check_step(tables, step, "a batch was looked up", must_have_evicted=True)


def _check_step(tables: LookupTables, step: int, event: str, must_have_evicted: bool = False) -> None:
    """Raise ValueError if rows of a batch of an earlier step may have been evicted; `event` describes that batch.

    Only if rows were evicted at all with `must_have_evicted`.
    """
    table = min(tables.dynamic.values(), key=lambda table: table.config.eviction.protect)
    protect, clock = table.config.eviction.protect, _version(tables)[0]
    if clock - step <= protect:
        return
    if not must_have_evicted or any(dynamic.statistics().evictions for dynamic in tables.dynamic.values()):
        raise ValueError(
            f"table {table.config.name!r}: {event} {clock - step} batches ago, but only rows of the last "
            f"{protect} batches are protected from eviction; raise EvictionConfig(protect=...) above {protect}"
        )


def _find_unknown_ids(
    tables: LookupTables, batch: KeyedJaggedTensor, rows: KeyedJaggedTensor, layout: Layout
) -> UnknownIds | None:
    """Return the samples with unknown ids, and temporary tables for them, or None if all ids have rows."""
    ids, table_keys = batch.values().long(), tables.table_keys[tuple(batch.keys())]
    unknown, dynamic_keys = negative(rows.values()), [*chain.from_iterable(table_keys.values())]
    if unknown.numel() and len(dynamic_keys) < len(batch.keys()):  # static tables read ids out of range as zeros
        keys = torch.searchsorted(batch.offsets()[:: batch.stride()].contiguous(), unknown, right=True) - 1
        unknown = unknown[torch.isin(keys, keys.new_tensor(dynamic_keys))]
    if not unknown.numel():
        return None
    # Select their samples, or these ids alone if rows are not pooled.
    outputs, bounds = unknown, batch.offsets().long()
    if tables.pooled:
        outputs = ((torch.searchsorted(bounds, unknown, right=True) - 1) % batch.stride()).unique()
    if tables.pooled:
        bags = (torch.arange(0, bounds.numel() - 1, batch.stride(), device=ids.device)[:, None] + outputs).flatten()
        offsets = ops.segment_offsets(lengths := bounds[bags + 1] - bounds[bags])
        positions = (bounds[bags] - offsets[:-1]).repeat_interleave(lengths)
        positions += torch.arange(positions.numel(), device=ids.device)
    else:
        positions, offsets = outputs, torch.searchsorted(outputs, bounds)
    # Copy their rows, and initial values, into temporary tables.
    ids, values, weights = ids[positions], rows.values()[positions], rows.weights_or_none()
    layout, weights = layout._replace(tables=layout.tables.clone()), None if weights is None else weights[positions]
    features = KeyedJaggedTensor.unchecked(rows.keys(), values, weights, offsets)
    result = UnknownIds({}, {}, features, layout, positions, outputs)
    for number, at in find_positions(features, table_keys).items():
        known_mask = values[at] >= 0
        if known_mask.all():
            continue
        # A row for each position: to copy one several times takes less time than to sort.
        known_rows, new_ids = values[at][known_mask], ids[at][~known_mask]
        values[at] = torch.where(known_mask, known_mask.cumsum(0), known_rows.numel() + (~known_mask).cumsum(0)) - 1
        layout.tables[number, NUM_ROWS] = known_rows.numel() + new_ids.numel()
        result.rows[number], result.initial[number] = known_rows, tables.dynamic[number].initial_values(new_ids)
    return result
