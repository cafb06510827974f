"""A batch as kernels see it, and `prefetch`, which pins the rows of cached tables in slots ahead.

Releases of pins have sequence numbers. Which pins have been released when a thread comes to prefetch a batch, and so
which rows may be evicted, is a matter of luck; which had been released when the batch was submitted is not.
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
"""Given a batch's distinct linear rows, ascending, and what is wrong with its ids: linear rows of cached tables that
other ranks' batches have, to be pinned, too."""


@dataclass(eq=False)
class Lookup:
    """A batch as kernels see it. Rows of cached tables are pinned in slots until it is released, or deleted.

    Attributes:
        values, offsets: int32 or int64 `[N]`, rows of the tables' memory (slots of cached ones), and `[K * B + 1]`.
        sample_weights: float32 `[N]`, or None.
        groups, layout: the distinct rows, and the layout of the batch's keys.
        tables, rows, slots: int64 `[n]`, of pinned rows: the table, the number there, and the slot.
        training: whether gradients were recorded when the batch was prefetched.
        replica_rows: rows of other ranks' batches that this rank updates, too; None without replicas.
        on_release: unpins the slots; called once, by any thread, perhaps by Python's garbage collection.
        ready: recorded behind the transfers, on a GPU.
        acquired: whether a lookup has used the slots.
        dirty: whether the rows have been updated; they are written back after release.
        stream: that reads the slots; whoever reuses them waits for it first.
        number, events: the release's sequence number; behind which nobody uses the slots for this batch.
        ticket: int64 `[]` on the CPU, its number in graphs.
        assigned: the batch with rows in place of ids, where tables are dynamic.
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
        """The pinned rows of a table, ascending, and their slots."""
        mine = self.tables == table
        return self.rows[mine], self.slots[mine]

    @property
    def released(self) -> bool:
        """Whether other rows may be in its slots by now."""
        return self.slots is not None and self.on_release is None

    def release(self) -> None:
        """Unpin the slots, if there are any. This thread's stream has been given all changes of the rows."""
        release, self.on_release = self.on_release, None
        if release is not None:
            release(self)

    def __del__(self) -> None:
        self.release()


class AssignedRows(NamedTuple):
    """A batch whose ids of dynamic tables have become rows.

    Attributes:
        features: with rows in place of ids, and a key of its own for each lookup where one feature feeds several
            tables; -1 for ids that have no row.
        groups: the distinct rows, where it pays to have them before they are needed.
        unknown: where there are such ids, how they are read.
        training: whether new ids were given rows.
        step: int64 `[]`, of the tables.
    """

    features: KeyedJaggedTensor
    groups: ops.RowGroups | None
    unknown: "UnknownIds | None"
    training: bool
    step: Tensor


class UnknownIds(NamedTuple):
    """How a batch is read of which some ids have no row: from tables of its rows alone, and of initial values.

    Attributes:
        rows: of each such table, by number, its distinct rows in the tables' memory.
        initial: initial values, which stand behind them.
        values, layout: the batch, as of these tables.
    """

    rows: dict[int, Tensor]
    initial: dict[int, Tensor]
    values: Tensor
    layout: Layout


_clock = itertools.count(1)
_tickets = itertools.count(1)
prefetched: WeakValueDictionary[int, Lookup] = WeakValueDictionary()  # by number in graphs
_released_before: ContextVar[int | None] = ContextVar("released_before", default=None)


def sequence_number() -> int:
    """The next one. Pins that were released before have smaller numbers, those that are released later larger ones."""
    return next(_clock)


@contextmanager
def released_before(number: int) -> Iterator[None]:
    """For batches that this thread prefetches meanwhile, count only pins as released that were so before `number`."""
    token = _released_before.set(number)
    try:
        yield
    finally:
        _released_before.reset(token)


class PrefetchedFeatures:
    """The place of a batch's features for a model that has prefetched them. A pytree node.

    It has keys and batch size, and nothing else: the ids are where their rows are, so a model that changes them before
    it looks them up cannot be given this. `by_collection` is, for each collection, by `id`, what it has made of the
    batch: a pytree of tensors, and of `Lookup`s, which stay where their slots are.
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
        """What a collection has prefetched; ValueError for one of another model."""
        if id(collection) not in self._by_collection:
            raise ValueError("another model has prefetched these features; use prefetch() of the one that is called")
        return self._by_collection[id(collection)]

    def sub_batch(self, size: int, by_collection: Mapping[int, Any]) -> Self:
        """The place of some of the samples, for which there is something else."""
        lengths = torch.zeros(len(self.keys()) * size, dtype=torch.int64)
        return type(self)(KeyedJaggedTensor(self.keys(), lengths[:0], lengths=lengths), by_collection)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """On another device."""
        return pytree.tree_map_only(Tensor, partial(Tensor.to, device=device, non_blocking=non_blocking), self)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this batch has been prefetched: its ids are where their rows are, so it has no {name!r}; a model that "
            "changes its features before it looks them up cannot prefetch them: give it the features themselves "
            "(pipeline=False), or change them in the data set"
        )


pytree.register_pytree_node(
    PrefetchedFeatures,
    lambda features: ([features._batch, features._by_collection], None),
    lambda parts, _: PrefetchedFeatures(*parts),
)


def prefetch_batch(
    tables: Tables, features: Features, before: Lookup | None = None, occurrences: Tensor | None = None
) -> Lookup:
    """Pin a batch's rows in slots; the batch with slots in place of ids. See `released_before` for what is evicted.

    Waits for the device as `RowCache` does, and more often for replicas' rows, unless `before`, an earlier prefetch of
    the batch, has them, and for an id out of range, a ValueError before anything changes; StorageError as of its `pin`.
    """
    keys, values, offsets, weights = unpack_features(features)
    training = tables.trains()
    if training and tables.service is not None:
        tables.service.begin_training()
    assigned = None if before is None else before.assigned
    if tables.dynamic and assigned is None:
        assigned = assign_rows(tables, features, occurrences=occurrences)
    given = KeyedJaggedTensor(keys, values, weights, offsets=offsets) if assigned is None else assigned.features
    layout = tables.layout(given.keys(), given.values().device)
    batch = one_key_per_lookup(tables, given, layout)
    whole, own = slot_layouts(tables, tuple(batch.keys()), batch.values().device)
    released = _released_before.get()
    find_replica_rows = tables.update.replica_rows(tables) if training else None
    with torch.no_grad(), torch.inference_mode(False):  # what changes here is used in training too
        groups = ops.row_groups(batch.values(), batch.offsets(), whole)
        lookup, bad = Lookup(batch.values(), batch.offsets(), batch.weights_or_none(), groups, own), None
        lookup.training, lookup.assigned = training, assigned
        lookup.replica_rows = None if before is None or find_replica_rows is None else before.replica_rows
        if tables.bounds_check == "raise" and batch.values().numel() and not tables.dynamic:
            asked = batch.lengths() * whole.key_starts.diff().repeat_interleave(batch.stride())
            bad = groups.starts[-1] != asked.sum()
        if find_replica_rows is not None or not tables.cache.pin(lookup, bad, released):
            problem = find_invalid_id(given, lookup_sizes(tables, keys)) if bad is not None and bad else None
            if find_replica_rows is not None and lookup.replica_rows is None:
                lookup.replica_rows = find_replica_rows(groups.rows, problem)
            elif problem is not None:
                raise problem
            tables.cache.pin(lookup, None, released)
        number = next(_tickets)
        lookup.ticket, prefetched[number] = torch.tensor(number), lookup
        return lookup


def look_up_pinned(tables: Tables, lookup: Lookup) -> Tensor:
    """As `look_up_cached`, for a graph: by a batch that has been prefetched."""
    weights, trained = [table.weight for table in tables.tables], tables.trains()
    if trained:
        tables.update.check(tables)
    if torch.is_grad_enabled():
        check_gradients(tables, lookup.sample_weights, lookup.training)
        if not trained and any(weight.requires_grad for weight in weights):
            _refuse_gradient(tables)
    assert lookup.ticket is not None
    layout, ids, offsets = lookup.layout, lookup.values, lookup.offsets
    size = batch_size_of(offsets, layout.key_starts) if tables.pooled else ids.shape[0]
    dtype, handle = tables.dtype_of(weights), tables.accumulator.handle
    return ops.pinned_lookup(weights[0], lookup.ticket, handle, trained, size, layout.width, dtype)


@_disable_dynamo  # a graph break, which loads no compiler before one is used
def look_up_cached(
    tables: Tables, features: Features, groups: ops.RowGroups | Lookup | None, occurrences: Tensor | None = None
) -> Tensor:
    """As `TableSet.look_up`. Without an optimizer the result wants gradients as weights do, and its backward raises.

    ValueError for per-sample weights that want gradients, or a batch that another collection has prefetched, or that
    was prefetched without gradients and now is to be trained.
    """
    # A batch that is looked up twice, by a checkpointed forward say, is prefetched again: its rows are still in slots.
    cache, lookup = tables.cache, groups if isinstance(groups, Lookup) else None
    tables.check_protected(None if lookup is None else lookup.assigned)
    if lookup is None or not cache.acquire(lookup):
        begin = time.perf_counter()
        with tables.lock:
            lookup = prefetch_batch(tables, features, lookup, occurrences)
        cache.acquire(lookup)
        cache.stall += time.perf_counter() - begin
    read = partial(tables.read, lookup)
    if lookup.assigned is not None and lookup.assigned.unknown is not None:
        read = partial(read_unknown, tables, _of_slots(tables, lookup), lookup.offsets, lookup.sample_weights)
    if not torch.is_grad_enabled():
        found: Tensor = read()
        lookup.release()
        return found
    check_gradients(tables, lookup.sample_weights, lookup.training)
    if not tables.trains():
        weights = [table.weight for table in tables.tables]
        stand_for_all = next((weight for weight in weights if weight.requires_grad), weights[0])
        found = ops.fused_lookup(stand_for_all, None, read, partial(_refuse_gradient, tables))
        lookup.release()
        return found
    tables.update.check(tables)
    if tables.accumulator.is_open:
        keys, values, _, _ = unpack_features(features)
        tables.remember_keys(list(_lookup_keys(tables, keys, tables.layout(keys, values.device)) or keys))
        tables.pins.append(lookup)
        tables.remember_step(lookup.assigned)
    return tables.look_up_trained(lookup, read)


@_disable_dynamo
def assign_rows(
    tables: Tables, features: Features, ahead: bool = False, occurrences: Tensor | None = None
) -> AssignedRows:
    """Find the rows of a batch's ids in dynamic tables. New ids of a batch that is to be trained are given rows.

    `ahead` of the lookup, they are grouped, too. `occurrences`: int `[N]`, how often each id was in the batch before it
    was deduplicated. ValueError, before anything changes, if ids find no room in some table, or the tables have no
    optimizer to train them.
    """
    keys, values, offsets, weights = unpack_features(features)
    layout, dynamic = tables.layout(keys, values.device), tables.dynamic
    is_checked = getattr(features, "is_checked", False)  # ours, and its offsets were read
    batch: Any = features if is_checked else KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    if tables.bounds_check == "raise" and (problem := find_invalid_id(batch, lookup_sizes(tables, keys))):
        raise problem
    if layout.multiplicity > 1:
        batch = one_key_per_lookup(tables, batch, layout)
        layout = tables.layout(batch.keys(), values.device)
    training = tables.trains()
    if torch.is_grad_enabled() and not training and any(table.weight.requires_grad for table in dynamic.values()):
        _refuse_gradient(tables)
    if training and tables.cache is None:  # slots of a cache wait for updates by themselves
        update_locks[tables.counters["learning_rate"].data_ptr()] = tables.lock
    with tables.lock, torch.no_grad(), torch.inference_mode(False):
        values, all_known = batch.values().long(), False
        if tables.service is not None:
            rows = _rows_on_servers(tables, batch, occurrences, training)
        else:
            keys_of_tables = tables.table_keys[tuple(batch.keys())].values()
            place_of = {key: place for place, keys in enumerate(keys_of_tables) for key in keys}
            table_of_key, size = [place_of.get(key, -1) for key in range(len(batch.keys()))], batch.stride()
            bounds = batch.offsets()[::size] if size else batch.offsets().new_zeros(len(table_of_key) + 1)
            served = list(dynamic.values())
            if training:
                rows, _, refuses = insert_batch(served, values, bounds, table_of_key, occurrences)
                all_known = not refuses
            else:
                rows = find_batch(served, values, bounds, table_of_key)
        assigned = KeyedJaggedTensor.unchecked(batch.keys(), rows, batch.weights_or_none(), batch.offsets())
        groups = ops.row_groups(rows, batch.offsets(), layout) if training and ahead else None
        unknown = None if all_known else _unknown_ids(tables, batch, rows, layout, ahead)
        clock = next(iter(dynamic.values())).clock
        return AssignedRows(assigned, groups, unknown, training, torch.tensor(clock))


def _rows_on_servers(tables: Tables, batch: KeyedJaggedTensor, occurrences: Tensor | None, training: bool) -> Tensor:
    """As `insert_batch`, or, of a batch that is not trained, `find_all`, where servers have the index."""
    values, positions = batch.values().long(), value_positions(batch, tables.table_keys[tuple(batch.keys())])
    parts = []
    for at in positions.values():
        found, inverse, count = values[at].unique(return_inverse=True, return_counts=True)
        if occurrences is not None:
            count = torch.zeros_like(found).index_add_(0, inverse, occurrences[at].long())
        parts.append((found, inverse, count))
    distinct, counts = ([part[n].cpu() for part in parts] for n in (0, 2))
    answers, rows = tables.service.allocate_rows(distinct, counts, training), values.clone()
    for (number, at), (ids, inverse, _), answer in zip(positions.items(), parts, answers, strict=True):
        places, new = (each.to(ids.device) for each in answer)
        if training:
            tables.dynamic[number].clock += 1
            tables.dynamic[number].set_new_rows(places[new], ids[new])
        rows[at] = places[inverse]
    return rows


def lookup_sizes(tables: Tables, keys: Sequence[str]) -> list[tuple[str, str, int]]:
    """Keys, tables and their rows, of tables with so many rows."""
    static = [config for config in tables.configs if not config.is_dynamic]
    return [(key, c.name, c.num_embeddings) for key in keys for c in static if key in c.feature_names]


@_disable_dynamo
def check_protected(tables: Tables, step: int, what: str) -> None:
    """ValueError if rows of a batch of an earlier step may have been evicted, or might be by the next one."""
    table = min(tables.dynamic.values(), key=lambda table: table.config.eviction.protect)
    protect = table.config.eviction.protect
    if table.clock - step > protect:
        raise ValueError(
            f"table {table.config.name!r}: {what} {table.clock - step} batches ago, and only rows of the last "
            f"{protect} stay; use EvictionConfig(protect=...) of more than {protect}"
        )


def value_positions(batch: KeyedJaggedTensor, keys: Mapping[int, list[int]]) -> dict[int, Any]:
    """Where the values of each dynamic table are: a slice, or of several keys int64 `[n]`."""
    size = batch.stride()
    ends = batch.offsets()[::size].tolist() if size else [0] * (len(batch.keys()) + 1)
    found = {number: [slice(ends[key], ends[key + 1]) for key in of] for number, of in keys.items()}
    return {
        number: of[0] if len(of) == 1 else torch.cat([torch.arange(each.start, each.stop) for each in of])
        for number, of in found.items()
    }


def _unknown_ids(
    tables: Tables, batch: KeyedJaggedTensor, rows: Tensor, layout: Layout, ahead: bool
) -> UnknownIds | None:
    positions, values = value_positions(batch, tables.table_keys[tuple(batch.keys())]), batch.values().long()
    unknown: Any = [number for number, at in positions.items() if (rows[at] < 0).any()]
    if not unknown:
        return None
    found = UnknownIds({}, {}, rows.clone(), layout._replace(tables=layout.tables.clone()))
    # A graph is of certain tables, and of sizes that are neither 0 nor 1: all tables, and two rows more.
    for number in positions if ahead else unknown:
        places, mine = rows[positions[number]].clone(), rows[positions[number]] < 0
        known, of_known = places[~mine].unique(return_inverse=True)
        new, of_new = values[positions[number]][mine].unique(return_inverse=True)
        known, new = (torch.nn.functional.pad(each, (0, 2 * ahead)) for each in (known, new))
        places[~mine], places[mine] = of_known, known.numel() + of_new
        found.values[positions[number]] = places
        found.rows[number], found.initial[number] = known, tables.dynamic[number].initial_values(new)
        found.layout.tables[number, NUM_ROWS] = known.numel() + new.numel()
    return found


def _of_slots(tables: Tables, lookup: Lookup) -> UnknownIds:
    """How a batch is read of which some ids have no row, where the others' rows are in slots."""
    assert lookup.assigned is not None
    assert lookup.assigned.unknown is not None
    batch, of_rows, found = lookup.assigned.features, lookup.assigned.unknown, dict[int, Tensor]()
    values, own = lookup.values.clone(), lookup.layout._replace(tables=lookup.layout.tables.clone())
    positions = value_positions(batch, tables.table_keys[tuple(batch.keys())])
    for number, distinct in of_rows.rows.items():
        if tables.cache.tables[number] is None:
            found[number] = distinct
        else:
            rows, slots = lookup.rows_of(number)
            found[number] = slots[torch.searchsorted(rows, distinct)]
        values[positions[number]] = of_rows.values[positions[number]]
        own.tables[number, NUM_ROWS] = of_rows.layout.tables[number, NUM_ROWS]
    return UnknownIds(found, of_rows.initial, values, own)


def read_unknown(tables: Tables, batch: UnknownIds, offsets: Tensor, sample_weights: Tensor | None) -> Tensor:
    """`[B, width]` if pooled, else `[N, width]`: ids without rows read as initial values; no gradient of rows."""
    with tables.memory():
        weights = [table.weight.detach() for table in tables.tables]
        dtype, check_bounds = tables.dtype_of(weights), tables.bounds_check == "raise"
        for number, rows in batch.rows.items():
            weights[number] = torch.cat([weights[number][rows], batch.initial[number]])
        return ops.embedding_bag(weights, batch.values, offsets, sample_weights, batch.layout, check_bounds, dtype)


def look_up_unknown(tables: Tables, batch: AssignedRows) -> Tensor:
    """As `TableSet.look_up`, where some ids have no row: they get no gradient."""
    assert batch.unknown is not None
    keys, rows, offsets, sample_weights = unpack_features(batch.features)
    read = partial(read_unknown, tables, batch.unknown, offsets, sample_weights)
    if not batch.training or not tables.trains():
        return read()
    check_gradients(tables, sample_weights, batch.training)
    if torch.compiler.is_compiling():  # no op of a graph reads other rows than it trains
        known_alone = tables.look_up_rows(batch.features, batch.groups, check_bounds=False)
        return read() + (known_alone - known_alone.detach())
    tables.update.check(tables)
    tables.remember_keys(keys)
    own = tables.layout(keys, rows.device)
    groups = ops.row_groups(rows, offsets, own) if batch.groups is None else batch.groups
    lookup = Lookup(rows, offsets, sample_weights, groups, own)
    return tables.look_up_trained(lookup, read)


def _refuse_gradient(tables: Tables, *_: object) -> NoReturn:
    config = _first_cached(tables)
    what = "dynamic" if config.is_dynamic else f"placed on {config.placement!r}"
    raise ValueError(
        f"table {config.name!r} is {what}, where only a fused optimizer can train it; give "
        "its collection one, or freeze it with requires_grad_(False)"
    )


def _first_cached(tables: Tables) -> TableConfig:
    return next(config for config in tables.configs if config.is_dynamic or config.placement != "device")


def check_gradients(tables: Tables, sample_weights: Tensor | None, training: bool) -> None:
    """ValueError for per-sample weights that want gradients, or as `check_prefetched`."""
    if sample_weights is not None and sample_weights.requires_grad:
        config = _first_cached(tables)
        refused = config.is_dynamic and config.placement == "device"  # ids without rows, which get no gradient
        raise ValueError(
            f"per-sample weights get no gradient where table {config.name!r} is "
            f"{'dynamic and admits some ids only' if refused else f'placed on {config.placement!r}'}; detach them, or "
            f"{'let it admit every id' if refused else 'place the tables on the device'}"
        )
    check_prefetched(tables, training)


def check_prefetched(tables: Tables, training: bool) -> None:
    """ValueError if a batch was not prefetched to be trained, and now is trained."""
    if tables.trains() and not training:
        raise ValueError(
            f"the rows of table {_first_cached(tables).name!r} were prefetched under no_grad, and now gradients are "
            "recorded; call group() or prefetch() where gradients are recorded"
        )


def _lookup_keys(tables: Tables, keys: Sequence[str], layout: Layout) -> dict[str, str] | None:
    """A key of its own for each lookup, and its feature; None if no key of `layout` has two lookups.

    Keys keep their order, so a row's gradients are summed in the order in which they would be on the device.
    """
    if layout.multiplicity <= 1:
        return None
    return {
        f"{config.name}.{feature}": feature  # a table's name has no dot, so no other pair has this key
        for feature in keys
        for config in tables.configs
        if feature in config.feature_names
    }


def one_key_per_lookup(tables: Tables, batch: KeyedJaggedTensor, layout: Layout) -> KeyedJaggedTensor:
    """The batch with a key for each lookup: a value is one row of one table then."""
    by_key, parts = _lookup_keys(tables, batch.keys(), layout), []
    if by_key is None:
        return batch
    for key, feature in by_key.items():
        part = batch[feature]
        parts.append(KeyedJaggedTensor([key], part.values(), part.weights_or_none(), offsets=part.offsets()))
    return KeyedJaggedTensor.concat(parts)


def configs_for_keys(configs: Sequence[TableConfig], keys: Sequence[str]) -> Sequence[TableConfig]:
    """Tables for a batch with these keys, or with one for each lookup; ValueError for keys that are missing."""
    missing = [feature for config in configs for feature in config.feature_names if feature not in keys]
    if not missing:
        return configs
    names = [[f"{config.name}.{feature}" for feature in config.feature_names] for config in configs]
    if any(name not in keys for of_table in names for name in of_table):
        raise ValueError(f"the batch lacks the features {[*dict.fromkeys(missing)]}; it has the keys {list(keys)}")
    sizes = [((0, config.num_embeddings), (0, config.embedding_dim)) for config in configs]
    return [c.shard(c.name, *size, own) for c, size, own in zip(configs, sizes, names, strict=True)]


def row_sums(
    grad: Tensor | Sequence[Tensor], lookup: Lookup, max_gradient: float | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The distinct rows of each table, ascending, and the sum of each one's gradients. Waits for the device."""
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
    own = (rows - first_rows.repeat_interleave(counts, output_size=rows.shape[0])).split(sizes)
    return list(own), sums


def slot_layouts(tables: Tables, keys: tuple[str, ...], device: torch.device) -> tuple[Layout, Layout]:
    """The layouts of a batch with a key for each lookup, over whole tables and over their slots; made once.

    Any thread may call this.
    """
    found: tuple[Layout, Layout] | None = tables.cache.storage.layouts.get(keys)
    if found is None:
        configs = configs_for_keys(tables.row_configs, keys)
        with torch.inference_mode(False):  # they are kept, for training too
            found = tables.cache.storage.add_layout(keys, make_layout(configs, keys, tables.pooled, device))
    return found


def prefetch(
    model: nn.Module, features: Features | PrefetchedFeatures, before: int | None = None
) -> PrefetchedFeatures:
    """Move the rows of a batch to the device, for those tables of a model that are in host memory or on disk.

    Another thread may do so for the next batches while one is computed, in the order in which the model is called with
    them. Give the result to the model in the features' place; where gradients are not going to be recorded, call this
    under `torch.no_grad` too. Rows stay on the device until the batch's backward has run, or the result is dropped.
    ValueError for ids out of range, and what else a lookup raises; StorageError if rows cannot be read or written.

    Args:
        before: a sequence number, `te.nn.sequence_number()`: rows whose pins are released later are not evicted for
            this batch; by default all that are released when this comes to it may be. Take the number in the thread
            that trains, when it submits a batch; then what caches count (hits, evictions, bytes) depends on that alone.
    """
    if isinstance(features, PrefetchedFeatures):
        return features
    keys, values, offsets, weights = unpack_features(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    with nullcontext() if before is None else released_before(before):
        return PrefetchedFeatures(batch, {id(tables): tables.prefetch(batch) for tables in table_sets(model)})


def table_sets(model: nn.Module) -> list[Any]:
    """The `TableSet`s that modules of a model own; not those of shards."""
    found = (module.__dict__.get("table_set") for module in model.modules())
    return [tables for tables in found if isinstance(tables, OptimizedTables)]


def needs_prefetch(model: nn.Module) -> bool:
    """Whether some table of a model is not on the device, so that `prefetch` has something to do."""
    return any(tables.cache is not None or tables.on_servers for tables in table_sets(model))
