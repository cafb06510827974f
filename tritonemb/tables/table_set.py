"""`TableSet`: tables that are looked up and updated together, with their layouts over batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Literal, cast, get_args
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tritonemb import ops
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.layout import Layout, TensorList, cached_fact, dtypes_of, make_layout, set_row_ids
from tritonemb.ops.registry import plain_eager
from tritonemb.ops.row_update import NOT_ACCUMULATING, MicroBatch, accumulate_
from tritonemb.optimizers import Optimizer
from tritonemb.tables.cache import RowCache
from tritonemb.tables.cached_server_table import CachedServerHashTable, CachedServerTable, RowStore
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.dynamic_table import CachedDynamicTable, DynamicTable, Lock
from tritonemb.tables.lookup import (
    AssignedRows,
    FindReplicaRows,
    Lookup,
    assign_rows,
    check_prefetched,
    check_protected,
    configs_for_keys,
    look_up_cached,
    look_up_pinned,
    look_up_with_unknown_ids,
    prefetch_batch,
    prefetched,
    slot_layouts,
)
from tritonemb.tables.optimizer import OptimizedTables, States, check_optimizer
from tritonemb.tables.server_table import (
    PulledBatch,
    RowService,
    ServerTable,
    look_up_pulled,
    pull_batch,
    push_gradients,
)
from tritonemb.tables.table import Table
from tritonemb.types import TRAINABLE_DTYPES, Device, TableConfig

BoundsCheck = Literal["raise", "ignore"]
Groups = ops.RowGroups | Lookup | AssignedRows
_OUTPUT_DTYPES = {*TRAINABLE_DTYPES, torch.float64}


class LocalUpdate:
    """Optimizer step on rows of this process alone."""

    is_shared = False  # whether other ranks take part in the update
    is_of_shards = False  # whether tables are shards, which cannot diverge under data parallelism

    def check(self, tables: "TableSet") -> None:
        """Raise in the forward if the tables must not be updated."""
        if not self.is_of_shards:
            check_not_data_parallel(tables.configs[0].name)

    def replica_rows(self, tables: "TableSet") -> FindReplicaRows | None:
        """Return a function that finds rows of other ranks' batches that are updated with a batch, or None."""
        return None

    @torch.no_grad()
    def step(
        self, tables: "TableSet", grad: Tensor | list[Tensor], lookup: Lookup, pins: Sequence[Lookup] = ()
    ) -> None:
        """Update the rows of a batch by `ops.row_update_`, mark them dirty and unpin their slots."""
        for pinned in pins:
            pinned.dirty = True
        try:
            with tables.memory():
                fused = tables.fused_tables()
                ops.row_update_(fused, grad, lookup.offsets, lookup.sample_weights, lookup.groups, lookup.layout)
        finally:
            for pinned in pins:
                pinned.release()


def check_not_data_parallel(name: str) -> None:
    """Raise RuntimeError in the forward of a `DistributedDataParallel`, under which the ranks' tables would diverge."""
    parallel = DistributedDataParallel._get_active_ddp_module()
    if parallel is not None and parallel.process_group.size() > 1:
        raise RuntimeError(
            f"table {name!r} has a fused optimizer, so DistributedDataParallel has no gradient to average and the "
            "processes' tables would diverge; fuse without an optimizer, te.fuse(model), or keep the tables out of "
            "DistributedDataParallel"
        )


class TableSet(OptimizedTables):
    """Tables that are looked up together, and with an `optimizer` updated together; see `EmbeddingBagCollection`.

    It is not a module: its owner registers `tables`, and `counters` as buffers. Tables may be unsharded, or shards.
    `update` applies the gradients of rows in a backward pass.
    """

    def __init__(
        self, tables: Sequence[TableConfig], optimizer: Optimizer | None = None, device: Device = None,
        bounds_check: BoundsCheck = "raise", output_dtype: torch.dtype | None = None, *, pooled: bool,
        update: LocalUpdate | None = None,
    ) -> None:  # fmt: skip
        if bounds_check not in get_args(BoundsCheck):
            raise ValueError(f"bounds_check must be one of {get_args(BoundsCheck)}, got {bounds_check!r}")
        super().__init__(optimizer)
        self.configs, self.pooled = tuple(tables), pooled
        self.bounds_check, self.output_dtype = bounds_check, output_dtype
        self.update = LocalUpdate() if update is None else update
        self.accumulator.tables = ref(self)
        # Learning rate, numbers of updates and of accumulated micro-batches, and of skipped rows per table. They have
        # values at once; those of a meta module are on the CPU until it is moved.
        self.counters: dict[str, Any] = {}
        if optimizer is not None:
            counter_device = "cpu" if device is not None and torch.device(device).type == "meta" else device
            self.counters = {
                "learning_rate": torch.tensor(optimizer.lr, dtype=torch.float32, device=counter_device),
                "step": torch.zeros((), dtype=torch.int64, device=counter_device),
                "skipped": torch.zeros(len(self.configs), dtype=torch.int64, device=counter_device),
                "pending": torch.zeros((), dtype=torch.int64, device=counter_device),
            }
        states = () if optimizer is None else optimizer.states
        # Tables and their layouts.
        self._names = [config.name for config in tables]
        self.by_name: dict[str, Any] = {}  # an owning module substitutes its own dictionary
        self.feature_names = tuple(dict.fromkeys(feature for config in tables for feature in config.feature_names))
        self.service: Any = None  # `RowService` or `RowStore`, once attached
        self._layouts: dict[tuple[tuple[str, ...], torch.device], Layout] = {}
        # By keys of a batch, then by number of a dynamic or server table: indices of its keys.
        self.table_keys: dict[tuple[str, ...], dict[int, list[int]]] = {}
        self._cached_facts: dict[str, Any] = {}  # of each `TensorList`
        self._set_tables([table_type(config)(config, states, device) for config in self.configs])
        # Gradient accumulation, and compiled graphs.
        self._accumulated_keys: tuple[str, ...] | None = None
        self._first_step: int | None = None  # step of the first accumulated micro-batch of dynamic tables
        self.pins: list[Lookup] = []  # accumulated batches, whose rows are pinned
        self._graph_lookup: Lookup | None = None  # batch between its compiled forward and backward
        self.layout(self.feature_names, self.tables[0].weight.device)

    def _set_tables(self, tables: Sequence[Table]) -> None:
        """Set the tables, one per config, and what follows from their types."""
        self.by_name.update(zip(self._names, tables, strict=True))
        self.cache = _create_cache(tables)
        dynamic_types = DynamicTable | CachedServerHashTable
        self.dynamic = {number: table for number, table in enumerate(tables) if isinstance(table, dynamic_types)}
        self.on_servers = isinstance(tables[0], ServerTable) and self.cache is None
        lock = Lock(tables[0].weight.device)
        self.lock: Any = lock if self.dynamic else nullcontext()
        for table in self.dynamic.values():
            table.lock = lock
        self.row_configs = [table.row_config for table in tables]
        self.table_keys.clear()

    @property
    def tables(self) -> list[Table]:
        return [*map(self.by_name.__getitem__, self._names)]

    def rates(self) -> list[Tensor]:
        return [self.counters["learning_rate"]]

    def optimizer_states(self) -> States:
        """Return name, weight, and by name `step` and states per table; cached tables have no states."""
        states_by_table: States = []
        for table in self.tables:
            states = {} if isinstance(table, CachedTable) else dict(table.named_buffers())
            states_by_table.append((table.config.name, table.weight, {"step": self.counters["step"], **states}))
        return states_by_table

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `EmbeddingBagCollection.accumulate`."""
        block, self._accumulated_keys = self.accumulator.open(self._apply_accumulated), None
        self._first_step = None
        try:
            with block:
                yield
        finally:
            pins, self.pins = self.pins, []
            for pinned in pins:
                pinned.release()
            self.counters["pending"].zero_()

    def scale_accumulated(self, factor: float) -> bool:
        """See `EmbeddingBagCollection.scale_accumulated`."""
        grads = [batch.grad.mul_(factor) for batch in self.accumulator.gradients]
        return all(bool(grad.isfinite().all()) for grad in grads)

    def group(self, features: Features, occurrences: Tensor | None = None) -> Groups:
        """See `EmbeddingBagCollection.group`, `assign_rows` and `pull_batch`."""
        if self.on_servers:
            return pull_batch(self, features)
        if self.cache is not None:
            with self.lock:
                return prefetch_batch(self, features, None, occurrences)
        if self.dynamic:
            return assign_rows(self, features, True, occurrences)
        keys, values, offsets, _ = unpack_features(features)
        return ops.row_groups(values, offsets, self.layout(keys, values.device))

    def prefetch(self, features: Features) -> tuple[Features, Groups | None]:
        """Return the data of a `PrefetchedFeatures`: the batch, and the result of `group` where grouping ahead pays."""
        trained_on_gpu = unpack_features(features)[1].is_cuda and not self.accumulator.is_open and self.trains()
        groups_ahead = self.cache is not None or self.dynamic or self.on_servers or trained_on_gpu
        return features, self.group(features) if groups_ahead else None

    def layout(self, keys: Sequence[str], device: torch.device) -> Layout:
        """Return the layout of these keys over the tables, cached per order of keys."""
        key = (tuple(keys), device)
        if (layout := self._layouts.get(key)) is None:
            configs = configs_for_keys(self.row_configs, key[0])
            if torch.compiler.is_compiling():
                return make_layout(configs, key[0], self.pooled, device)
            with torch.inference_mode(False):  # cached for training as well
                layout = make_layout(configs, key[0], self.pooled, device)
            for table, dynamic in self.dynamic.items():
                if isinstance(dynamic, DynamicTable):
                    set_row_ids(layout, table, dynamic.index.ids)
            for table in range(len(configs)) if self.on_servers else self.dynamic:
                table_features = configs[table].feature_names
                self.table_keys.setdefault(key[0], {})[table] = [
                    n for n, name in enumerate(keys) if name in table_features
                ]
            self._layouts[key] = layout
        return layout

    def look_up(self, features: Features, groups: Groups | None = None, occurrences: Tensor | None = None) -> Tensor:
        """Look up a batch, `[B, width]` if pooled, else `[N, width]`; the backward may update the tables."""
        if self.on_servers:
            assert groups is None or isinstance(groups, PulledBatch)
            return look_up_pulled(self, features, groups)
        if self.cache is not None:
            one_graph = not (self.update.is_shared or self.dynamic)
            if one_graph and torch.compiler.is_compiling() and isinstance(groups, Lookup):
                return look_up_pinned(self, groups)
            assert not isinstance(groups, AssignedRows)
            return look_up_cached(self, features, groups, occurrences)
        assert not isinstance(groups, Lookup)
        if self.dynamic:
            batch = self._assign_rows(features, groups, occurrences)
            if batch.unknown_ids is not None:
                return look_up_with_unknown_ids(self, batch)
            features, groups = batch.features, batch.groups
        assert not isinstance(groups, AssignedRows)
        return self.look_up_rows(features, groups, self.bounds_check == "raise")

    def look_up_rows(self, features: Features, groups: ops.RowGroups | None, check_bounds: bool) -> Tensor:
        """Look up a batch of rows in the tables' memory; see `look_up`."""
        keys, values, offsets, sample_weights = unpack_features(features)
        layout = self.layout(keys, values.device)
        # Evaluation, or a backward with ordinary gradients.
        fused = None if self.optimizer is None or not torch.is_grad_enabled() else self.fused_tables()
        if fused is None or not self.trains(fused.weights):
            weights = self.weights() if fused is None else fused.weights
            return ops.embedding_bag(
                weights, values, offsets, sample_weights, layout, check_bounds, self.dtype_of(weights)
            )
        # Training: the backward accumulates, or updates on this rank, or together with other ranks.
        self.update.check(self)
        self.remember_keys(keys)
        accumulator, shared = self.accumulator.current_handle, False
        if self.update.is_shared and accumulator == NOT_ACCUMULATING:
            accumulator, shared = self.accumulator.handle, True
        # Group ids for the update on a side stream, while the forward runs.
        if groups is None and (shared or (values.is_cuda and accumulator == NOT_ACCUMULATING)):
            groups = ops.row_groups_async(values, offsets, layout)
        elif groups is not None and values.is_cuda and not torch.compiler.is_compiling():
            for tensor in (*groups, values, offsets):  # may have been grouped ahead on another stream
                tensor.record_stream(torch.cuda.current_stream(values.device))
        options = self.counters["pending"], shared, accumulator, check_bounds, self.dtype_of(fused.weights)
        return ops.embedding_bag_fused(
            ops.FusedLookup(fused, values, offsets, sample_weights, *options, groups, layout)
        )

    def _assign_rows(self, features: Features, groups: Groups | None, occurrences: Tensor | None) -> AssignedRows:
        assert not isinstance(groups, Lookup | ops.RowGroups)
        self.check_protected(groups)
        if groups is not None and not torch.compiler.is_compiling():
            self.lock.wait()  # for initial values written by a prefetch on another stream
            check_prefetched(self, groups.training)
        batch = assign_rows(self, features, False, occurrences) if groups is None else groups
        self.remember_step(batch)
        return batch

    def check_protected(self, batch: AssignedRows | None) -> None:
        """Raise ValueError if rows of this batch, or of accumulated ones, may be evicted; None: not prefetched yet."""
        if self._first_step is not None and self.accumulator.is_open:
            is_new_batch = batch is None
            check_protected(self, self._first_step - is_new_batch, "the first of the accumulated micro-batches came")
        if batch is not None and batch.training and not torch.compiler.is_compiling():
            check_protected(self, int(batch.step), "a batch was prefetched")

    def remember_step(self, batch: AssignedRows | None) -> None:
        """Remember the step of the first accumulated micro-batch."""
        if self._first_step is None and self.accumulator.is_open and batch is not None and batch.training:
            self._first_step = int(batch.step)

    def update_shared(
        self, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, groups: ops.RowGroups,
        layout: Layout,
    ) -> None:  # fmt: skip
        """See `ops.shared_update`."""
        self.update.step(self, grad, Lookup(values, offsets, sample_weights, groups, layout))

    def read_pinned(self, number: int, trained: bool) -> Tensor:
        """See `ops.pinned_lookup`."""
        lookup = prefetched.get(number)
        if self.accumulator.is_open:
            raise RuntimeError(
                "accumulate() does not support a compiled model with cached tables; call the uncompiled model"
            )
        if lookup is None or not cast(RowCache, self.cache).acquire(lookup):
            raise RuntimeError(
                "the rows of this batch are no longer pinned; prefetch a batch again for each call of a compiled model"
            )
        pooled = self.read(lookup)
        if trained:
            self._graph_lookup = lookup
        else:
            lookup.release()
        return pooled

    def update_pinned(self, number: int, grad: Tensor) -> None:
        """See `ops.pinned_lookup`."""
        lookup, self._graph_lookup = self._graph_lookup, None
        if lookup is None or lookup is not prefetched.get(number):
            raise RuntimeError(
                "a compiled model with cached tables was called again before its backward pass; run the backward pass "
                "first"
            )
        self.update.step(self, grad, lookup, [lookup])

    def look_up_trained(self, lookup: Lookup, read: Callable[[], Tensor]) -> Tensor:
        """Read rows by `read`; the backward updates and unpins them, or accumulates their gradient."""
        handle = self.accumulator.current_handle

        def take_gradient(grad: Tensor, needs_sample_weight_grad: bool) -> None:
            if lookup.released:
                raise RuntimeError(
                    "the rows of this batch are no longer pinned: each lookup of cached tables has one backward, "
                    "inside the accumulate() block of the lookup if there is one; look the batch up again"
                )
            if handle == NOT_ACCUMULATING:
                self.update.step(self, grad, lookup, [lookup])
            else:
                batch = lookup.values, lookup.offsets, lookup.sample_weights
                accumulate_(self.counters["pending"], handle, grad, *batch)

        return ops.fused_lookup(self.tables[0].weight, None, read, take_gradient)

    def dtype_of(self, weights: list[Tensor]) -> torch.dtype:
        """Return the dtype of a lookup's result."""
        if self.output_dtype is not None:
            return self.output_dtype
        dtypes = cached_fact(weights, dtypes_of)
        return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= _OUTPUT_DTYPES else torch.float32

    def weights(self, tables: list[Table] | None = None) -> list[Tensor]:
        """Return the weights by table. Reads `_parameters`, as attribute access of modules is slow for many tables."""
        tables = self.tables if tables is None else tables
        try:
            weights: list[Any] = [*map(itemgetter("weight"), map(attrgetter("_parameters"), tables))]
        except KeyError:  # parametrized
            weights = [table.weight for table in tables]
        # Traced or transformed tensors may have no address.
        return TensorList(weights, self._cached_facts, "weights") if plain_eager(*weights) else weights

    def fused_tables(self) -> ops.FusedTables:
        """Return the tables' current tensors, for `ops`."""
        spec, counters = self.optimizer, self.counters
        assert spec is not None
        tables = self.tables
        buffers = [*map(attrgetter("_buffers"), tables)]
        states: list[Any] = [state for state_spec in spec.states for state in map(itemgetter(state_spec.name), buffers)]
        steps, skipped, rate = [counters["step"]], [counters["skipped"]], counters["learning_rate"]
        weights = self.weights(tables)
        if isinstance(weights, TensorList):
            states = TensorList(states, self._cached_facts, "states")
        return ops.FusedTables(weights, states, steps, skipped, rate, spec.name, self.hyperparameters)

    def trains(self, weights: Sequence[Tensor] | None = None) -> bool:
        """Return whether the backward of a lookup made now updates the tables; ValueError if only some would be."""
        if self.optimizer is None or not torch.is_grad_enabled():
            return False
        return require_gradients(self.configs, self.weights() if weights is None else weights)

    def remember_keys(self, keys: list[str]) -> None:
        """Remember the keys of the first accumulated micro-batch; raise ValueError if later ones have other keys."""
        if not self.accumulator.is_open:
            return
        if self._accumulated_keys is None:
            self._accumulated_keys = tuple(keys)
        elif self._accumulated_keys != tuple(keys):
            raise ValueError(
                "accumulate() needs the same keys in every micro-batch: "
                f"first {list(self._accumulated_keys)}, now {keys}"
            )

    @torch.no_grad()
    def _apply_accumulated(self, batches: list[MicroBatch]) -> None:
        if not batches:
            return
        # Servers apply the micro-batches one by one.
        if self.on_servers:
            for batch, pulled in zip(batches, self.pins, strict=True):
                push_gradients(self, batch.grad, cast(PulledBatch, pulled))
            self.counters["step"] += 1
            return
        # Stack the micro-batches key by key, and their gradients in the same order.
        assert self._accumulated_keys is not None
        keys = self._accumulated_keys
        stacked = KeyedJaggedTensor.stack(
            [KeyedJaggedTensor(keys, b.values, b.sample_weights, offsets=b.offsets) for b in batches]
        )
        grad = torch.cat([batch.grad for batch in batches])
        layout = self.layout(keys, grad.device) if self.cache is None else slot_layouts(self, keys, grad.device)[1]
        if not self.pooled:
            positions = torch.arange(grad.shape[0], device=grad.device).split([b.values.numel() for b in batches])
            order = KeyedJaggedTensor.stack(
                [KeyedJaggedTensor(keys, p, offsets=b.offsets) for b, p in zip(batches, positions, strict=True)]
            )
            batches.clear()  # frees their gradients
            grad = grad[order.values()]
        batches.clear()
        # Update once, by the sums of the gradients of each row.
        values, offsets = stacked.values(), stacked.offsets()
        groups = ops.row_groups(values, offsets, layout)
        pins, self.pins = self.pins, []
        self.update.step(self, grad, Lookup(values, offsets, stacked.weights_or_none(), groups, layout), pins)

    def read(self, lookup: Lookup) -> Tensor:
        """Read a batch of rows: `[B, width]` if pooled, else `[N, width]`. Not differentiable."""
        weights: list[Tensor] = [table.weight for table in self.tables]
        check_bounds = self.bounds_check == "raise" and self.cache is None  # a prefetch has checked bounds
        with self.memory():
            batch = lookup.values, lookup.offsets, lookup.sample_weights, lookup.layout
            return ops.embedding_bag(weights, *batch, check_bounds, self.dtype_of(weights))

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move or cast all tensors like `torch.nn.Module._apply`; casting to 16 bits leaves the learning rate float32.

        RuntimeError if a cached table cannot be moved, before any table is.
        """
        for table in sorted(self.tables, key=lambda table: not isinstance(table, CachedTable)):
            table._apply(fn)
        for name, counter in self.counters.items():
            moved = fn(counter)
            self.counters[name] = counter.to(moved.device) if name == "learning_rate" else moved
        self.forget_layouts()

    def forget_layouts(self) -> None:
        """Drop cached layouts, which may have addresses of tensors that have moved."""
        self._layouts.clear()

    def memory(self) -> AbstractContextManager[Any]:
        """Return a lock to hold while the tables' tensors are used; their cache may replace them by larger ones."""
        return nullcontext() if self.cache is None else self.cache.storage.lock

    def attach(self, service: RowService | RowStore) -> None:
        """Attach the servers of the tables; a cache on the device leases rows of a `RowStore`."""
        self.service, server_tables = service, cast(list[ServerTable], self.tables)
        device = self.counters["step"].device
        if service.applies_updates:
            for table in server_tables:
                table.service = cast(RowService, service)
                if table.weight.is_meta:
                    table._apply(partial(torch.empty_like, device=device))
            return
        assert self.optimizer is not None
        service, table_types = cast(RowStore, service), (CachedServerTable, CachedServerHashTable)
        new_tables = [table_types[c.is_dynamic](c, self.optimizer.states, device, service) for c in self.configs]
        for table, old_table in zip(new_tables, server_tables, strict=True):
            table.weight.requires_grad_(old_table.weight.requires_grad)
        self._set_tables(new_tables)
        self.forget_layouts()
        self.read_server_clocks()
        self.counters["step"].fill_(service.updates)
        service.register_lessee(self)
        for view in self._views:
            view.refresh()

    def write_back(self) -> None:
        """Write dirty rows of the cache back to the servers."""
        cast(RowCache, self.cache).write_back()

    @contextmanager
    def replacing_rows(self) -> Iterator[None]:
        """Empty the cache while servers load other rows in the block. RuntimeError if a batch has pinned rows."""
        with ExitStack() as stack:
            for table in cast(list[CachedServerTable], self.tables):
                stack.enter_context(cast(RowCache, self.cache).reloading(table, unpinned=True))
            yield
            self.read_server_clocks()

    def read_server_clocks(self) -> None:
        """Read seeds and clocks of the tables from the servers."""
        for table in cast(list[Any], self.tables):
            table.seed, table.clock = self.service.seed_and_clock(table.config.name)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude layouts, which a copy rebuilds, and the batch of a compiled graph."""
        return {**super().__getstate__(), "_layouts": {}, "_graph_lookup": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.accumulator.tables = ref(self)


def require_gradients(configs: Sequence[TableConfig], weights: Sequence[Tensor]) -> bool:
    """Return whether the tables are trained, that is, all weights require gradients; ValueError if only some do."""
    flags = set(map(attrgetter("requires_grad"), weights))
    if len(flags) > 1:
        frozen = [config.name for config, weight in zip(configs, weights, strict=True) if not weight.requires_grad]
        raise ValueError(
            f"tables {frozen} do not require gradients but others of their collection do; put frozen tables into a "
            "separate collection"
        )
    return True in flags


def table_type(config: TableConfig) -> type[Table]:
    """Return the class of a table."""
    if config.placement == "server":
        return ServerTable
    types = (DynamicTable, CachedDynamicTable) if config.is_dynamic else (Table, CachedTable)
    return types[config.placement != "device"]


def _create_cache(tables: Sequence[Table]) -> RowCache | None:
    if not (cached := [table.config for table in tables if isinstance(table, CachedTable) and table.has_store]):
        return None
    policies = {config.cache.policy: config.name for config in cached}
    if len(policies) > 1:
        raise ValueError(
            f"tables {sorted(policies.values())} have caches with different policies, {sorted(policies)}; put them "
            "into separate collections"
        )
    return RowCache(tables, cached[0].cache.policy)


def check_tables(tables: Sequence[TableConfig], optimizer: object) -> None:
    """Raise TypeError or ValueError unless `tables` is a list of tables that can form a collection."""
    # Types.
    if not isinstance(tables, Sequence):
        raise TypeError(f"tables must be a list of TableConfig, got {tables!r}")
    if optimizer is not None:
        check_optimizer(optimizer)
    if not tables:
        raise ValueError("a collection needs at least one table")
    names: set[str] = set()
    for table in tables:
        if not isinstance(table, TableConfig):
            raise TypeError(f"tables must be TableConfig, got {table!r}")
    # Placement, names and dtypes.
    local_names = [table.name for table in tables if table.placement != "server"]
    if 0 < len(local_names) < len(tables):
        raise ValueError(
            f"tables {local_names} are not on embedding servers, but others of their collection are; put them into "
            "separate collections"
        )
    for table in tables:
        if table.name in names:
            raise ValueError(f"duplicate table {table.name!r}; names must be unique in a collection")
        if optimizer is not None and table.dtype not in TRAINABLE_DTYPES:
            raise ValueError(
                f"table {table.name!r}: {table.dtype} rows are too coarse to be trained; choose one of "
                f"{TRAINABLE_DTYPES}, or leave out the optimizer for lookups only"
            )
        names.add(table.name)
