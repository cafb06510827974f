"""Lookups of tables that are not plain device tables, and `prefetch`, which pins rows of cached tables in slots.

Releases of pins have sequence numbers. Which pins are released by the time that a thread prefetches a batch is
nondeterministic, and so is which rows are evicted; which pins were released when the batch was submitted is not.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from tritonemb import ops
from tritonemb.errors import find_invalid_id
from tritonemb.jagged import Features, KeyedJaggedTensor, batch_size_of, unpack_features
from tritonemb.layout import FIRST_ROW, NUM_ROWS, ROW_DIM, Layout, make_layout
from tritonemb.ops.row_update import update_locks
from tritonemb.tables.dynamic_table import find_batch, insert_batch
from tritonemb.tables.optimizer import OptimizedTables
from tritonemb.types import TableConfig

Tables = Any  # a `TableSet`, whose module imports this one
FindReplicaRows = Callable[[Tensor, ValueError | None], Tensor]
"""`find_replica_rows(rows, problem)` returns linear rows of cached tables in other ranks' batches, to be pinned as
well. `rows` are the batch's distinct linear rows, ascending, and `problem` the error of an invalid id, or None."""


@dataclass(eq=False)
class Lookup:
    """A batch of rows as kernels read it. Rows of cached tables are pinned in slots until it is released or deleted.

    Attributes:
        values, offsets: int32 or int64 `[N]`, rows of the tables' memory (slots of cached tables), and `[K * B + 1]`.
        sample_weights: float32 `[N]`, or None.
        groups, layout: distinct rows with their positions, and the layout of the batch's keys over the tables.
        tables, rows, slots: int64 `[n]`, of pinned rows: table number, row in the table, and slot.
        training: whether gradients were recorded when the batch was prefetched.
        replica_rows: rows of other ranks' batches that this rank updates as well; None without replicas.
        on_release: unpins the slots; called once, by any thread, possibly by garbage collection.
        ready: event recorded after the transfers, on a GPU.
        acquired: whether a lookup has used the slots.
        dirty: whether the rows were updated; they are written back after release.
        stream: stream that reads the slots.
        number, events: sequence number of the release, and events recorded then; the slots are reused after them.
        ticket: int64 `[]` on the CPU, the batch's number in compiled graphs.
        assigned: the batch with rows instead of ids, if tables are dynamic.
    """

    values: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    groups: ops.RowGroups
    layout: Layout
    tables: Any = None
    rows: Any = None
    slots: Any = None
    training: bool = False
    replica_rows: Tensor | None = None
    on_release: Callable[["Lookup"], None] | None = None
    ready: torch.cuda.Event | None = None
    acquired: bool = False
    dirty: bool = False
    stream: torch.cuda.Stream | None = None
    number: int = 0
    events: Sequence[torch.cuda.Event] = ()
    ticket: Tensor | None = None
    assigned: "AssignedRows | None" = None

    def rows_of(self, table: int) -> tuple[Tensor, Tensor]:
        """Return the pinned rows of a table, ascending, and their slots."""
        table_mask = self.tables == table
        return self.rows[table_mask], self.slots[table_mask]

    @property
    def released(self) -> bool:
        """True once the slots may have been reused."""
        return self.slots is not None and self.on_release is None

    def release(self) -> None:
        """Unpin the slots, if any. All updates of the rows have been submitted to this thread's stream."""
        release, self.on_release = self.on_release, None
        if release is not None:
            release(self)

    def __del__(self) -> None:
        self.release()


class AssignedRows(NamedTuple):
    """A batch whose ids of dynamic tables were replaced by rows.

    Attributes:
        features: the batch with rows instead of ids, -1 for ids without a row, and one key per lookup if a feature
            feeds several tables.
        groups: distinct rows, if grouped ahead.
        unknown_ids: how ids without a row are read, if there are any.
        training: whether new ids were assigned rows.
        step: int64 `[]`, step of the tables.
    """

    features: KeyedJaggedTensor
    groups: ops.RowGroups | None
    unknown_ids: "UnknownIds | None"
    training: bool
    step: Tensor


class UnknownIds(NamedTuple):
    """Temporary tables by which a batch with unknown ids is read: its distinct rows, then initial values.

    Attributes:
        rows, initial: by table number, the distinct rows of the batch in the table's memory, and initial values.
        values, layout: the batch over these temporary tables.
    """

    rows: dict[int, Tensor]
    initial: dict[int, Tensor]
    values: Tensor
    layout: Layout


_sequence_numbers = itertools.count(1)
_tickets = itertools.count(1)
prefetched: WeakValueDictionary[int, Lookup] = WeakValueDictionary()  # by ticket
_released_before: ContextVar[int | None] = ContextVar("released_before", default=None)


def sequence_number() -> int:
    """Return the next sequence number, larger than those of earlier releases of pins, smaller than of later ones."""
    return next(_sequence_numbers)


@contextmanager
def released_before(number: int) -> Iterator[None]:
    """Unpin only batches released before the sequence number `number` for what this thread prefetches in the block."""
    token = _released_before.set(number)
    try:
        yield
    finally:
        _released_before.reset(token)


class PrefetchedFeatures:
    """Handle of a prefetched batch, which a model takes in place of its features. A pytree node.

    Its ids have been consumed; only `keys()` and `stride()` remain. So it does not suit a model that changes features
    before it looks them up. `by_collection` has, by `id` of each collection, its prefetched data: a pytree of tensors,
    and of `Lookup`s, which stay on the device of their slots.
    """

    def __init__(self, batch: KeyedJaggedTensor, by_collection: Mapping[int, Any]) -> None:
        self._batch, self._by_collection = batch, dict(by_collection)

    def keys(self) -> list[str]:
        """Keys of the batch."""
        return self._batch.keys()

    def stride(self) -> int:
        """Batch size."""
        return self._batch.stride()

    def of(self, collection: Any) -> Any:
        """Return the prefetched data of a collection; ValueError for one of another model."""
        if id(collection) not in self._by_collection:
            raise ValueError("another model has prefetched these features; use prefetch() of the one that is called")
        return self._by_collection[id(collection)]

    def sub_batch(self, size: int, by_collection: Mapping[int, Any]) -> Self:
        """Return a handle of `size` samples of the batch, with their prefetched data."""
        lengths = torch.zeros(len(self.keys()) * size, dtype=torch.int64)
        return type(self)(KeyedJaggedTensor(self.keys(), lengths[:0], lengths=lengths), by_collection)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Move tensors to a device."""
        return pytree.tree_map_only(Tensor, partial(Tensor.to, device=device, non_blocking=non_blocking), self)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this batch was prefetched and has no {name!r}: its ids have been consumed, only keys() and stride() "
            "remain; if the model changes its features before it looks them up, pass it the features themselves "
            "(pipeline=False), or change them in the data set"
        )


pytree.register_pytree_node(
    PrefetchedFeatures,
    lambda features: ([features._batch, features._by_collection], None),
    lambda parts, _: PrefetchedFeatures(*parts),
)


def prefetch_batch(
    tables: Tables, features: Features, previous: Lookup | None = None, occurrences: Tensor | None = None
) -> Lookup:
    """Pin a batch's rows in slots; return the batch with slots instead of ids. See `released_before` for evictions.

    Synchronizes like `RowCache`, and again to find replica rows, unless `previous`, an earlier prefetch of the batch,
    has them, or to report an id out of range: a ValueError before anything changes. For StorageError see
    `RowCache.pin`.
    """
    keys, values, offsets, weights = unpack_features(features)
    training = tables.trains()
    if training and tables.service is not None:
        tables.service.begin_training()
    assigned = None if previous is None else previous.assigned
    if tables.dynamic and assigned is None:
        assigned = assign_rows(tables, features, occurrences=occurrences)
    inputs = KeyedJaggedTensor(keys, values, weights, offsets=offsets) if assigned is None else assigned.features
    # Lay the batch out with one key per lookup, over whole tables and over their slots.
    layout = tables.layout(inputs.keys(), inputs.values().device)
    batch = split_lookups(tables, inputs, layout)
    table_layout, slot_layout = slot_layouts(tables, tuple(batch.keys()), batch.values().device)
    release_limit = _released_before.get()
    find_replica_rows = tables.update.replica_rows(tables) if training else None
    with torch.no_grad(), torch.inference_mode(False):  # the slots are used in training as well
        groups = ops.row_groups(batch.values(), batch.offsets(), table_layout)
        lookup, invalid = Lookup(batch.values(), batch.offsets(), batch.weights_or_none(), groups, slot_layout), None
        lookup.training, lookup.assigned = training, assigned
        lookup.replica_rows = None if previous is None or find_replica_rows is None else previous.replica_rows
        # Grouping drops ids out of range, so compare the numbers of ids.
        if tables.bounds_check == "raise" and batch.values().numel() and not tables.dynamic:
            num_ids = batch.lengths() * table_layout.key_starts.diff().repeat_interleave(batch.stride())
            invalid = groups.starts[-1] != num_ids.sum()
        if find_replica_rows is not None or not tables.cache.pin(lookup, invalid, release_limit):
            problem = find_invalid_id(inputs, id_ranges(tables, keys)) if invalid is not None and invalid else None
            if find_replica_rows is not None and lookup.replica_rows is None:
                lookup.replica_rows = find_replica_rows(groups.rows, problem)
            elif problem is not None:
                raise problem
            tables.cache.pin(lookup, None, release_limit)
        number = next(_tickets)
        lookup.ticket, prefetched[number] = torch.tensor(number), lookup
        return lookup


def look_up_pinned(tables: Tables, lookup: Lookup) -> Tensor:
    """Look up a prefetched batch in a compiled graph; see `look_up_cached`."""
    weights, training = [table.weight for table in tables.tables], tables.trains()
    if training:
        tables.update.check(tables)
    if torch.is_grad_enabled():
        check_gradients(tables, lookup.sample_weights, lookup.training)
        if not training and any(weight.requires_grad for weight in weights):
            _raise_no_optimizer(tables)
    assert lookup.ticket is not None
    layout, ids, offsets = lookup.layout, lookup.values, lookup.offsets
    size = batch_size_of(offsets, layout.key_starts) if tables.pooled else ids.shape[0]
    dtype, handle = tables.dtype_of(weights), tables.accumulator.handle
    return ops.pinned_lookup(weights[0], lookup.ticket, handle, training, size, layout.width, dtype)


@_disable_dynamo  # a graph break; does not import the compiler
def look_up_cached(
    tables: Tables, features: Features, groups: ops.RowGroups | Lookup | None, occurrences: Tensor | None = None
) -> Tensor:
    """Look up a batch in cached tables, see `TableSet.look_up`. The backward of a result without an optimizer raises.

    ValueError for per-sample weights that require gradients, for a batch that another collection has prefetched, and
    for one that was prefetched without gradients and is now trained.
    """
    # Prefetch unless that is done. A second lookup, as of a checkpointed forward, prefetches again, with cache hits.
    cache, lookup = tables.cache, groups if isinstance(groups, Lookup) else None
    tables.check_protected(None if lookup is None else lookup.assigned)
    if lookup is None or not cache.acquire(lookup):
        begin = time.perf_counter()
        with tables.lock:
            lookup = prefetch_batch(tables, features, lookup, occurrences)
        cache.acquire(lookup)
        cache.stall += time.perf_counter() - begin
    read = partial(tables.read, lookup)
    if lookup.assigned is not None and lookup.assigned.unknown_ids is not None:
        batch = _translate_to_slots(tables, lookup)
        read = partial(read_with_unknown_ids, tables, batch, lookup.offsets, lookup.sample_weights)
    # Evaluation: read and unpin.
    if not torch.is_grad_enabled():
        pooled: Tensor = read()
        lookup.release()
        return pooled
    check_gradients(tables, lookup.sample_weights, lookup.training)
    if not tables.trains():
        weights = [table.weight for table in tables.tables]
        weight_for_autograd = next((weight for weight in weights if weight.requires_grad), weights[0])
        pooled = ops.fused_lookup(weight_for_autograd, None, read, partial(_raise_no_optimizer, tables))
        lookup.release()
        return pooled
    # Training: the backward updates and unpins the rows.
    tables.update.check(tables)
    if tables.accumulator.is_open:
        keys, values, _, _ = unpack_features(features)
        tables.remember_keys(list(_lookup_keys(tables, keys, tables.layout(keys, values.device)) or keys))
        tables.pins.append(lookup)
        tables.remember_step(lookup.assigned)
    return tables.look_up_trained(lookup, read)


@_disable_dynamo
def assign_rows(
    tables: Tables, features: Features, for_prefetch: bool = False, occurrences: Tensor | None = None
) -> AssignedRows:
    """Find the rows of a batch's ids in dynamic tables, and in training assign rows to new ids.

    ValueError, before anything changes, if a table has no room for its new ids, or has no optimizer to train it.
    With `for_prefetch` rows are also grouped. `occurrences`, int `[N]`, counts ids before the batch was deduplicated.
    """
    # Check the batch, and give each lookup its own key.
    keys, values, offsets, weights = unpack_features(features)
    layout, dynamic = tables.layout(keys, values.device), tables.dynamic
    is_checked = getattr(features, "is_checked", False)  # a KeyedJaggedTensor whose offsets were validated
    batch: Any = features if is_checked else KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    if tables.bounds_check == "raise" and (problem := find_invalid_id(batch, id_ranges(tables, keys))):
        raise problem
    if layout.multiplicity > 1:
        batch = split_lookups(tables, batch, layout)
        layout = tables.layout(batch.keys(), values.device)
    # Register the tables' lock with the updates, so that rows are reassigned after updates on other streams.
    training = tables.trains()
    if torch.is_grad_enabled() and not training and any(table.weight.requires_grad for table in dynamic.values()):
        _raise_no_optimizer(tables)
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
            dynamic_tables = list(dynamic.values())
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


def _find_server_rows(tables: Tables, batch: KeyedJaggedTensor, occurrences: Tensor | None, training: bool) -> Tensor:
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
            tables.dynamic[number].set_new_rows(table_rows[new_mask], ids[new_mask])
        rows[at] = table_rows[inverse]
    return rows


def id_ranges(tables: Tables, keys: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return key, table name and number of rows per lookup of a static table."""
    static = [config for config in tables.configs if not config.is_dynamic]
    return [(key, c.name, c.num_embeddings) for key in keys for c in static if key in c.feature_names]


@_disable_dynamo
def check_protected(tables: Tables, step: int, event: str) -> None:
    """Raise ValueError if rows of a batch of an earlier step may have been evicted; `event` describes that batch."""
    table = min(tables.dynamic.values(), key=lambda table: table.config.eviction.protect)
    protect = table.config.eviction.protect
    if table.clock - step > protect:
        raise ValueError(
            f"table {table.config.name!r}: {event} {table.clock - step} batches ago, but only rows of the last "
            f"{protect} batches are protected from eviction; raise EvictionConfig(protect=...) above {protect}"
        )


def find_positions(batch: KeyedJaggedTensor, keys: Mapping[int, list[int]]) -> dict[int, Any]:
    """Return the positions of each table's values in a batch: a slice, or int64 `[n]` for several keys."""
    size = batch.stride()
    ends = batch.offsets()[::size].tolist() if size else [0] * (len(batch.keys()) + 1)
    slices = {number: [slice(ends[key], ends[key + 1]) for key in of] for number, of in keys.items()}
    return {
        number: of[0] if len(of) == 1 else torch.cat([torch.arange(s.start, s.stop) for s in of])
        for number, of in slices.items()
    }


def _find_unknown_ids(
    tables: Tables, batch: KeyedJaggedTensor, rows: Tensor, layout: Layout, for_prefetch: bool
) -> UnknownIds | None:
    """Return the temporary tables by which a batch is read, or None if all ids have rows."""
    positions, values = find_positions(batch, tables.table_keys[tuple(batch.keys())]), batch.values().long()
    affected: Any = [number for number, at in positions.items() if (rows[at] < 0).any()]
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


def _translate_to_slots(tables: Tables, lookup: Lookup) -> UnknownIds:
    """Return the temporary tables of a batch with unknown ids, with slots instead of rows for cached tables."""
    assert lookup.assigned is not None
    assert lookup.assigned.unknown_ids is not None
    batch, unknown_ids, slots_by_table = lookup.assigned.features, lookup.assigned.unknown_ids, dict[int, Tensor]()
    values, slot_layout = lookup.values.clone(), lookup.layout._replace(tables=lookup.layout.tables.clone())
    positions = find_positions(batch, tables.table_keys[tuple(batch.keys())])
    for number, distinct in unknown_ids.rows.items():
        if tables.cache.tables[number] is None:
            slots_by_table[number] = distinct
        else:
            rows, slots = lookup.rows_of(number)
            slots_by_table[number] = slots[torch.searchsorted(rows, distinct)]
        values[positions[number]] = unknown_ids.values[positions[number]]
        slot_layout.tables[number, NUM_ROWS] = unknown_ids.layout.tables[number, NUM_ROWS]
    return UnknownIds(slots_by_table, unknown_ids.initial, values, slot_layout)


def read_with_unknown_ids(tables: Tables, batch: UnknownIds, offsets: Tensor, sample_weights: Tensor | None) -> Tensor:
    """Read `[B, width]` if pooled, else `[N, width]`; ids without rows read as initial values. Not differentiable."""
    with tables.memory():
        weights = [table.weight.detach() for table in tables.tables]
        dtype, check_bounds = tables.dtype_of(weights), tables.bounds_check == "raise"
        for number, rows in batch.rows.items():
            weights[number] = torch.cat([weights[number][rows], batch.initial[number]])
        return ops.embedding_bag(weights, batch.values, offsets, sample_weights, batch.layout, check_bounds, dtype)


def look_up_with_unknown_ids(tables: Tables, batch: AssignedRows) -> Tensor:
    """Look up a batch with unknown ids, see `TableSet.look_up`; these get no gradient."""
    assert batch.unknown_ids is not None
    keys, rows, offsets, sample_weights = unpack_features(batch.features)
    read = partial(read_with_unknown_ids, tables, batch.unknown_ids, offsets, sample_weights)
    if not batch.training or not tables.trains():
        return read()
    check_gradients(tables, sample_weights, batch.training)
    if torch.compiler.is_compiling():  # an op of a graph must read the rows that it trains: add the others' values
        trained = tables.look_up_rows(batch.features, batch.groups, check_bounds=False)
        return read() + (trained - trained.detach())
    tables.update.check(tables)
    tables.remember_keys(keys)
    layout = tables.layout(keys, rows.device)
    groups = ops.row_groups(rows, offsets, layout) if batch.groups is None else batch.groups
    lookup = Lookup(rows, offsets, sample_weights, groups, layout)
    return tables.look_up_trained(lookup, read)


def _raise_no_optimizer(tables: Tables, *_: object) -> NoReturn:
    config = _first_non_device(tables)
    kind = "dynamic" if config.is_dynamic else f"placed on {config.placement!r}"
    raise ValueError(
        f"table {config.name!r} is {kind}, where only a fused optimizer can train it; pass an optimizer to its "
        "collection, or freeze it with requires_grad_(False)"
    )


def _first_non_device(tables: Tables) -> TableConfig:
    return next(config for config in tables.configs if config.is_dynamic or config.placement != "device")


def check_gradients(tables: Tables, sample_weights: Tensor | None, training: bool) -> None:
    """Raise ValueError for per-sample weights that require gradients, or like `check_prefetched`."""
    if sample_weights is not None and sample_weights.requires_grad:
        config = _first_non_device(tables)
        is_dynamic = config.is_dynamic and config.placement == "device"  # ids without rows get no gradient
        raise ValueError(
            f"per-sample weights get no gradient where table {config.name!r} is "
            f"{'dynamic and admits some ids only' if is_dynamic else f'placed on {config.placement!r}'}; detach them, "
            f"or {'remove its AdmissionConfig' if is_dynamic else 'place the tables on the device'}"
        )
    check_prefetched(tables, training)


def check_prefetched(tables: Tables, training: bool) -> None:
    """Raise ValueError if a batch is trained that was not prefetched for training."""
    if tables.trains() and not training:
        raise ValueError(
            f"the rows of table {_first_non_device(tables).name!r} were prefetched under no_grad, but gradients are "
            "recorded now; call group() or prefetch() with gradients enabled"
        )


def _lookup_keys(tables: Tables, keys: Sequence[str], layout: Layout) -> dict[str, str] | None:
    """Return one key per lookup, with its feature; None if no key of `layout` has two lookups.

    Keys keep their order, so that a row's gradients are summed in the order of a device table.
    """
    if layout.multiplicity <= 1:
        return None
    return {
        f"{config.name}.{feature}": feature  # a table's name has no dot, so no other pair has this key
        for feature in keys
        for config in tables.configs
        if feature in config.feature_names
    }


def split_lookups(tables: Tables, batch: KeyedJaggedTensor, layout: Layout) -> KeyedJaggedTensor:
    """Return the batch with one key per lookup, so that each value is a row of one table."""
    by_key, batches = _lookup_keys(tables, batch.keys(), layout), []
    if by_key is None:
        return batch
    for key, feature in by_key.items():
        feature_batch = batch[feature]
        batches.append(
            KeyedJaggedTensor(
                [key], feature_batch.values(), feature_batch.weights_or_none(), offsets=feature_batch.offsets()
            )
        )
    return KeyedJaggedTensor.concat(batches)


def configs_for_keys(configs: Sequence[TableConfig], keys: Sequence[str]) -> Sequence[TableConfig]:
    """Return table configs for a batch with these keys, or with one key per lookup; ValueError for missing keys."""
    missing = [feature for config in configs for feature in config.feature_names if feature not in keys]
    if not missing:
        return configs
    names = [[f"{config.name}.{feature}" for feature in config.feature_names] for config in configs]
    if any(name not in keys for table_names in names for name in table_names):
        raise ValueError(f"the batch lacks the features {[*dict.fromkeys(missing)]}; it has the keys {list(keys)}")
    sizes = [((0, config.num_embeddings), (0, config.embedding_dim)) for config in configs]
    return [c.shard(c.name, *size, features) for c, size, features in zip(configs, sizes, names, strict=True)]


def row_sums(
    grad: Tensor | Sequence[Tensor], lookup: Lookup, max_gradient: float | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the distinct rows of each table, ascending, and the sums of their gradients. Waits for the device."""
    layout, groups = lookup.layout, lookup.groups
    first_rows = layout.tables[:, FIRST_ROW].contiguous()
    rows = groups.rows[: int(groups.num_groups)]
    starts = torch.searchsorted(rows, first_rows)
    counts = torch.diff(starts, append=starts.new_tensor([rows.shape[0]]))
    sizes = counts.tolist()
    dims, bound = layout.tables[:, ROW_DIM].tolist(), torch.inf if max_gradient is None else max_gradient
    sums = [torch.zeros(n, dim, device=rows.device) for n, dim in zip(sizes, dims, strict=True)]
    ops.row_gradients_(
        sums, grad, lookup.offsets, lookup.sample_weights, groups, layout, compact=True, max_gradient=bound
    )
    local_rows = (rows - first_rows.repeat_interleave(counts, output_size=rows.shape[0])).split(sizes)
    return list(local_rows), sums


def slot_layouts(tables: Tables, keys: tuple[str, ...], device: torch.device) -> tuple[Layout, Layout]:
    """Return the cached layouts of a batch with one key per lookup, over whole tables and over slots. Thread-safe."""
    layouts: tuple[Layout, Layout] | None = tables.cache.storage.layouts.get(keys)
    if layouts is None:
        configs = configs_for_keys(tables.row_configs, keys)
        with torch.inference_mode(False):  # cached for training as well
            layouts = tables.cache.storage.add_layout(keys, make_layout(configs, keys, tables.pooled, device))
    return layouts


def prefetch(
    model: nn.Module, features: Features | PrefetchedFeatures, before: int | None = None
) -> PrefetchedFeatures:
    """Prefetch a batch: move its rows to the device, for tables of a model in host memory, on disk or on servers.

    Another thread may prefetch the next batches while one is computed, in the order in which the model is called with
    them. Pass the result to the model instead of the features. Call this under `torch.no_grad` if the lookup will be.
    Rows stay on the device until the batch's backward has run, or the result is dropped. ValueError for ids out of
    range, and other errors of a lookup; StorageError if rows cannot be read or written.

    Args:
        before: a sequence number, `te.nn.sequence_number()`: rows whose pins are released later are not evicted for
            this batch; by default any row may be whose pins are released by then. Take the number in the training
            thread when it submits the batch, so that the caches' counters (hits, evictions, bytes) are deterministic.
    """
    if isinstance(features, PrefetchedFeatures):
        return features
    keys, values, offsets, weights = unpack_features(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    with nullcontext() if before is None else released_before(before):
        return PrefetchedFeatures(batch, {id(tables): tables.prefetch(batch) for tables in table_sets(model)})


def table_sets(model: nn.Module) -> list[Any]:
    """Return the `TableSet`s that modules of a model own, those of shards excluded."""
    candidates = (module.__dict__.get("table_set") for module in model.modules())
    return [tables for tables in candidates if isinstance(tables, OptimizedTables)]


def needs_prefetch(model: nn.Module) -> bool:
    """Return whether a table of the model is not on the device, so that `prefetch` transfers rows."""
    return any(tables.cache is not None or tables.on_servers for tables in table_sets(model))
