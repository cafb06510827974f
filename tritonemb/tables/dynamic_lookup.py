"""Lookup in dynamic tables: ids are replaced by rows, which training assigns to new ids."""

from typing import cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.layout import NUM_ROWS, Layout
from tritonemb.ops.row_update import update_locks
from tritonemb.tables.batch import AssignedRows, RowBatch, UnknownIds, checked_batch, find_invalid, find_positions
from tritonemb.tables.dynamic_table import CachedHashTable, DynamicTable, find_batch, insert_batch
from tritonemb.tables.lookup import check_gradients, look_up_prepared, raise_no_optimizer
from tritonemb.tables.lookup_tables import DeviceLookup, Groups, LookupTables, PreparedBatch


class DynamicLookup(DeviceLookup):
    """Lookup in tables on the device some of which are dynamic; graphs may contain that of prefetched batches."""

    moves_rows = True

    def prepare(self, tables: LookupTables, features: Features, occurrences: Tensor | None) -> AssignedRows:
        return assign_rows(tables, features, True, occurrences)

    def look_up(
        self, tables: LookupTables, features: Features, groups: Groups | None, occurrences: Tensor | None
    ) -> Tensor:
        assert groups is None or isinstance(groups, AssignedRows)
        check_protected(tables, groups)
        if groups is not None and not torch.compiler.is_compiling():
            tables.lock.wait()  # for initial values written by a prefetch on another stream
            check_gradients(tables, None, groups.training or not tables.trains())
        assigned = assign_rows(tables, features, False, occurrences) if groups is None else groups
        if tables.accumulator.is_open:
            tables.accumulated.remember_step(assigned)
        if assigned.unknown_ids is not None:
            return _look_up_with_unknown_ids(tables, assigned, assigned.unknown_ids)
        return tables.look_up_rows(assigned.features, assigned.groups, tables.bounds_check == "raise")


def _look_up_with_unknown_ids(tables: LookupTables, assigned: AssignedRows, unknown_ids: UnknownIds) -> Tensor:
    """Look up a batch with unknown ids; these get no gradient."""
    keys, rows, offsets, sample_weights = unpack_features(assigned.features)
    layout = tables.layout(keys, rows.device)
    batch = rows, offsets, sample_weights, layout
    if not assigned.training or not tables.trains():
        return tables.read(*batch, unknown_ids)
    if torch.compiler.is_compiling():  # an op of a graph must read the rows that it trains: add the others' values
        check_gradients(tables, sample_weights, assigned.training)
        trained = tables.look_up_rows(assigned.features, assigned.groups, check_bounds=False)
        return tables.read(*batch, unknown_ids) + (trained - trained.detach())
    groups = ops.row_groups(rows, offsets, layout) if assigned.groups is None else assigned.groups
    row_batch = RowBatch(rows, offsets, sample_weights, groups, layout)
    return look_up_prepared(tables, PreparedBatch(keys, row_batch, assigned.training, assigned))


@_disable_dynamo
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
    batch, layout = tables.split_lookups(batch)
    # Register the tables' lock with the updates, so that rows are reassigned after updates on other streams.
    training = tables.trains()
    if torch.is_grad_enabled() and not training and any(table.weight.requires_grad for table in dynamic.values()):
        raise_no_optimizer(tables)
    if training and tables.cache is None:  # a cache orders updates itself, by pins
        update_locks[tables.counters["learning_rate"].data_ptr()] = tables.lock
    with tables.lock, torch.no_grad(), torch.inference_mode(False):
        # Find rows of ids, and in training insert new ids.
        values, all_known = batch.values().long(), False
        if tables.service is not None:
            rows = _find_server_rows(tables, batch, occurrences, training)
        else:
            keys_of_tables = tables.table_keys[tuple(batch.keys())].values()
            index_of_key = {key: table_index for table_index, keys in enumerate(keys_of_tables) for key in keys}
            table_of_key, size = [index_of_key.get(key, -1) for key in range(len(batch.keys()))], batch.stride()
            bounds = batch.offsets()[::size] if size else batch.offsets().new_zeros(len(table_of_key) + 1)
            dynamic_tables = cast(list[DynamicTable], list(dynamic.values()))
            if training:
                rows, _, any_refused = insert_batch(dynamic_tables, values, bounds, table_of_key, occurrences)
                all_known = not any_refused
            else:
                rows = find_batch(dynamic_tables, values, bounds, table_of_key)
        # Replace ids by rows; ids without one are read from temporary tables.
        row_features = KeyedJaggedTensor.unchecked(batch.keys(), rows, batch.weights_or_none(), batch.offsets())
        groups = ops.row_groups(rows, batch.offsets(), layout) if training and for_prefetch else None
        unknown_ids = None if all_known else _find_unknown_ids(tables, batch, rows, layout, for_prefetch)
        clock = next(iter(dynamic.values())).clock
        return AssignedRows(row_features, groups, unknown_ids, training, torch.tensor(clock))


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
            tables.dynamic[number].clock += 1
            cast(CachedHashTable, tables.dynamic[number]).set_new_rows(table_rows[new_mask], ids[new_mask])
        rows[at] = table_rows[inverse]
    return rows


def check_protected(tables: LookupTables, assigned: AssignedRows | None) -> None:
    """Raise ValueError if rows of this batch, or of accumulated ones, may be evicted; None: not prefetched yet."""
    first_step = tables.accumulated.step
    if first_step is not None and tables.accumulator.is_open:
        is_new_batch = assigned is None
        _check_step(tables, first_step - is_new_batch, "the first of the accumulated micro-batches came")
    if assigned is not None and assigned.training and not torch.compiler.is_compiling():
        _check_step(tables, int(assigned.step), "a batch was prefetched")


@_disable_dynamo
def _check_step(tables: LookupTables, step: int, event: str) -> None:
    """Raise ValueError if rows of a batch of an earlier step may have been evicted; `event` describes that batch."""
    table = min(tables.dynamic.values(), key=lambda table: table.config.eviction.protect)
    protect = table.config.eviction.protect
    if table.clock - step > protect:
        raise ValueError(
            f"table {table.config.name!r}: {event} {table.clock - step} batches ago, but only rows of the last "
            f"{protect} batches are protected from eviction; raise EvictionConfig(protect=...) above {protect}"
        )


def _find_unknown_ids(
    tables: LookupTables, batch: KeyedJaggedTensor, rows: Tensor, layout: Layout, for_prefetch: bool
) -> UnknownIds | None:
    """Return the temporary tables by which a batch is read, or None if all ids have rows."""
    positions, values = find_positions(batch, tables.table_keys[tuple(batch.keys())]), batch.values().long()
    affected = [number for number, at in positions.items() if (rows[at] < 0).any()]
    if not affected:
        return None
    result = UnknownIds({}, {}, rows.clone(), layout._replace(tables=layout.tables.clone()))
    # A compiled graph specializes on the tables and on sizes 0 and 1: so use all tables, with two more rows each.
    for number in positions if for_prefetch else affected:
        table_values, unknown_mask = rows[positions[number]].clone(), rows[positions[number]] < 0
        known_rows, row_indices = table_values[~unknown_mask].unique(return_inverse=True)
        new_ids, id_indices = values[positions[number]][unknown_mask].unique(return_inverse=True)
        known_rows, new_ids = (torch.nn.functional.pad(ids, (0, 2 * for_prefetch)) for ids in (known_rows, new_ids))
        table_values[~unknown_mask], table_values[unknown_mask] = row_indices, known_rows.numel() + id_indices
        result.values[positions[number]] = table_values
        result.rows[number], result.initial[number] = known_rows, tables.dynamic[number].initial_values(new_ids)
        result.layout.tables[number, NUM_ROWS] = known_rows.numel() + new_ids.numel()
    return result
