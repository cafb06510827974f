"""`LookupTables`: tables that are looked up and updated together, with their layouts over batches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Literal, get_args
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tritonemb import ops
from tritonemb.errors import unused_gradient
from tritonemb.jagged import Features, KeyedJaggedTensor, key_major_order, unpack_features
from tritonemb.layout import Layout, TensorList, make_layout, set_row_ids
from tritonemb.ops.registry import plain_eager
from tritonemb.ops.row_update import NOT_ACCUMULATING, MicroBatch, fill_weights
from tritonemb.optimizers import Optimizer
from tritonemb.tables.batch import AssignedRows, RowBatch, UnknownIds, configs_for_keys
from tritonemb.tables.cache import Pins, PinState, create_cache
from tritonemb.tables.optimizer import OptimizedTables, States
from tritonemb.tables.server_table import make_table
from tritonemb.tables.table import DeviceRows, Lock, Table
from tritonemb.types import TRAINABLE_DTYPES, Device, TableConfig

BoundsCheck = Literal["raise", "ignore"]
# `find_replica_rows(rows, problem)` returns linear rows of cached tables that other ranks' batches use, to be pinned as
# well. `rows` are the batch's distinct linear rows, ascending; `problem` is the error of an invalid id, or None.
FindReplicaRows = Callable[[Tensor, ValueError | None], Tensor]
COUNTERS = {"learning_rate": torch.float32, "step": torch.int64, "skipped": torch.int64, "pending": torch.int64}
_OUTPUT_DTYPES = {*TRAINABLE_DTYPES, torch.float64}


class LocalUpdate:
    """Optimizer step on rows of this process alone."""

    is_shared = False  # whether other ranks take part in the update

    def check(self, tables: "LookupTables") -> None:
        """Raise in the forward if the tables must not be updated."""
        check_not_data_parallel(tables.configs[0].name)

    def replica_rows(self, tables: "LookupTables") -> FindReplicaRows | None:
        """Return a function that finds rows of other ranks' batches that are updated with a batch, or None."""
        return None

    @torch.no_grad()
    def step(
        self, tables: "LookupTables", grad: Tensor | list[Tensor], batch: RowBatch, pins: Sequence[Pins] = ()
    ) -> None:
        """Update the rows of a batch by `ops.row_update_`, mark them dirty and unpin their slots."""
        for pinned in pins:
            pinned.is_dirty = True
        try:
            with tables.memory():
                fused = tables.fused_tables()
                gradient = ops.BatchGradient(grad, batch.offsets, batch.sample_weights, batch.groups, batch.layout)
                ops.row_update_(fused, gradient)
        finally:
            for pinned in pins:
                pinned.release(tables.counters["step"])


def check_not_data_parallel(name: str) -> None:
    """Raise RuntimeError in the forward of a `DistributedDataParallel`, under which the ranks' tables would diverge."""
    parallel = DistributedDataParallel._get_active_ddp_module()
    if parallel is not None and parallel.process_group.size() > 1:
        raise RuntimeError(
            f"table {name!r} has a fused optimizer, so DistributedDataParallel has no gradient to average and the "
            "processes' tables would diverge; fuse without an optimizer, te.fuse(model), or keep the tables out of "
            "DistributedDataParallel"
        )


@dataclass(eq=False)
class PreparedBatch:
    """Batch whose rows are ready to be read, then to be updated or released. It is used once."""

    keys: Sequence[str]  # one per lookup
    rows: RowBatch
    training: bool  # whether gradients were recorded when the batch was prepared
    assigned: AssignedRows | None = None  # the batch with rows instead of ids, if tables are dynamic
    pins: Pins | None = None  # if tables are cached

    def unknown_ids(self, tables: "LookupTables") -> UnknownIds | None:
        """Return the temporary tables by which the batch is read, None if all ids have rows."""
        return None if self.assigned is None else self.assigned.unknown_ids

    def read(self, tables: "LookupTables") -> Tensor:
        """Read the batch: `[B, width]` if pooled, else `[N, width]`. Not differentiable."""
        rows = self.rows
        return tables.read(rows.values, rows.offsets, rows.sample_weights, rows.layout, self.unknown_ids(tables))

    def apply(self, tables: "LookupTables", grad: Tensor) -> None:
        """Update the rows by the gradient of the result, and release them."""
        tables.update.step(tables, grad, self.rows, () if self.pins is None else (self.pins,))

    @property
    def is_released(self) -> bool:
        """Return whether the slots of the batch's rows may have been reused for other rows."""
        return self.pins is not None and self.pins.state is PinState.RELEASED

    def release(self) -> None:
        """Release the rows; do nothing if they are released."""
        if self.pins is not None:
            self.pins.release()


Groups = ops.RowGroups | PreparedBatch  # result of `group`, by the kind of lookup


@dataclass
class AccumulatedLookups:
    """Lookups in an `accumulate` block."""

    keys: tuple[str, ...] | None = None  # of the first micro-batch
    step: int | None = None  # of the first micro-batch, if tables are dynamic
    batches: list[PreparedBatch] = field(default_factory=list)  # to be released when the block ends
    trained: list[PreparedBatch] = field(default_factory=list)  # in the order of the accumulated gradients

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raise ValueError for other keys than those of the first micro-batch."""
        self.keys = self.keys or tuple(keys)
        if self.keys != tuple(keys):
            raise ValueError(
                f"accumulate() needs the same keys in every micro-batch: first {list(self.keys)}, now {list(keys)}"
            )

    def remember_step(self, assigned: AssignedRows | None) -> None:
        """Remember the step of the first micro-batch."""
        if self.step is None and assigned is not None and assigned.training:
            self.step = assigned.version[0]

    def add(self, batch: PreparedBatch) -> None:
        """Add a batch that is looked up."""
        self.check_keys(batch.keys)
        self.remember_step(batch.assigned)
        self.batches.append(batch)


class DeviceLookup:
    """Lookup in tables on the device; other kinds of lookups derive from it. It has no state."""

    moves_rows = False  # whether `prepare` moves rows or assigns them to ids: then a prefetch must call it

    def prepare(self, tables: "LookupTables", features: Features, occurrences: Tensor | None) -> Groups:
        keys, values, offsets, _ = unpack_features(features)
        return ops.row_groups(values, offsets, tables.layout(keys, values.device))

    def look_up(
        self, tables: "LookupTables", features: Features, groups: Groups | None, occurrences: Tensor | None
    ) -> Tensor:
        assert groups is None or isinstance(groups, ops.RowGroups)
        return tables.look_up_rows(features, groups, tables.bounds_check == "raise")

    @torch.no_grad()
    def apply_accumulated(self, tables: "LookupTables", gradients: list[MicroBatch]) -> None:
        """Update the tables once by accumulated gradients, and release the rows of their batches."""
        fill_weights(gradients)
        # Stack the micro-batches key by key, and their gradients in the same order.
        assert tables.accumulated.keys is not None
        keys = tables.accumulated.keys
        batches = [KeyedJaggedTensor(keys, b.values, b.sample_weights, offsets=b.offsets) for b in gradients]
        stacked, grad = KeyedJaggedTensor.stack(batches), torch.cat([batch.grad for batch in gradients])
        gradients.clear()  # frees their memory before the update
        if not tables.pooled:
            lengths = [batch.lengths().reshape(len(keys), -1) for batch in batches]
            grad = grad[key_major_order(lengths, grad.shape[0])]
        # Update once, by the sums of the gradients of each row.
        values, offsets, prepared = stacked.values(), stacked.offsets(), tables.accumulated.batches
        layout = prepared[0].rows.layout if prepared else tables.layout(keys, grad.device)
        groups = ops.row_groups(values, offsets, layout)
        batch = RowBatch(values, offsets, stacked.weights_or_none(), groups, layout)
        tables.accumulated.batches = []  # the update releases their rows, possibly after the end of the block
        tables.update.step(tables, grad, batch, [pins for lookup in prepared if (pins := lookup.pins) is not None])


def _weights(tables: list[Table]) -> list[Any]:
    """Return the weights. Reads `_parameters`, as attribute access of modules is slow for many tables."""
    try:
        return [*map(itemgetter("weight"), map(attrgetter("_parameters"), tables))]
    except KeyError:  # parametrized
        return [table.weight for table in tables]


class LookupTables(OptimizedTables):
    """Base of `TableSet`; `update` applies the gradients of rows in a backward pass."""

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
            counter_device = torch.empty(0, device=device).device  # by default that of a `with torch.device(...)`
            counter_device = torch.device("cpu") if counter_device.type == "meta" else counter_device
            sizes = {"skipped": len(self.configs)}
            for name, dtype in COUNTERS.items():
                self.counters[name] = torch.zeros(sizes.get(name, ()), dtype=dtype, device=counter_device)
            self.counters["learning_rate"].fill_(optimizer.lr)
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
        self.kind = DeviceLookup()
        self._set_tables([make_table(config, states, device) for config in self.configs])
        self.accumulated = AccumulatedLookups()
        self.layout(self.feature_names, self.tables[0].weight.device)

    def _set_tables(self, tables: Sequence[Table]) -> None:
        """Set the tables, one per config, and what follows from their indices and rows."""
        self.by_name.update(zip(self._names, tables, strict=True))
        for table in tables:
            table.is_fused = self.optimizer is not None
        self.cache = create_cache(tables)
        self.dynamic: dict[int, Any] = {n: table for n, table in enumerate(tables) if table.index.assigns_rows}
        self.on_servers = tables[0].rows.is_pulled
        lock = Lock(tables[0].weight.device)
        self.lock: Any = lock if self.dynamic else nullcontext()
        for table in self.dynamic.values():
            table.index.lock = lock
        self.row_configs = [table.rows.config for table in tables]
        self.table_keys.clear()

    @property
    def tables(self) -> list[Table]:
        return [*map(self.by_name.__getitem__, self._names)]

    def rates(self) -> list[Tensor]:
        return [self.counters["learning_rate"]]

    def optimizer_states(self) -> States:
        """Return name, weight, and by name `step` and states per table; cached and dynamic tables have no states."""
        states = [{} if t.rows.is_cached or t.index.assigns_rows else dict(t.named_buffers()) for t in self.tables]
        step, pairs = {"step": self.counters["step"]}, zip(self.tables, states, strict=True)
        return [(table.config.name, table.weight, step | table_states) for table, table_states in pairs]

    def layout(self, keys: Sequence[str], device: torch.device) -> Layout:
        """Return the layout of these keys over the tables, cached per order of keys."""
        if (layout := self._layouts.get(key := (tuple(keys), device))) is None:
            configs = configs_for_keys(self.row_configs, key[0])
            if torch.compiler.is_compiling():
                return make_layout(configs, key[0], self.pooled, device)
            with torch.inference_mode(False):  # cached for training as well
                layout = make_layout(configs, key[0], self.pooled, device)
            for table, dynamic in self.dynamic.items():
                if (ids := dynamic.index.ids) is not None:
                    set_row_ids(layout, table, ids)
            features = {n: configs[n].feature_names for n in (range(len(configs)) if self.on_servers else self.dynamic)}
            self.table_keys[key[0]] = {
                n: [i for i, name in enumerate(keys) if name in names] for n, names in features.items()
            }
            self._layouts[key] = layout
        return layout

    def group(self, features: Features, occurrences: Tensor | None = None) -> Groups:
        """Prepare a batch ahead of its lookup, see `EmbeddingBagCollection.group`.

        `occurrences`, int `[N]`, counts ids before the batch was deduplicated.
        """
        return self.kind.prepare(self, features, occurrences)

    def prefetch(self, features: Features) -> tuple[Features, Groups | None]:
        """Return the data of a `PrefetchedFeatures`: the batch, and the result of `group` where that pays."""
        trained_on_gpu = unpack_features(features)[1].is_cuda and not self.accumulator.is_open and self.trains()
        return features, self.group(features) if self.kind.moves_rows or trained_on_gpu else None

    def look_up(self, features: Features, groups: Groups | None = None, occurrences: Tensor | None = None) -> Tensor:
        """Look up a batch: `[B, width]` if pooled, else `[N, width]`. The backward updates the tables if `trains()`."""
        return self.kind.look_up(self, features, groups, occurrences)

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
        accumulating = self.accumulator.is_open
        if accumulating:
            self.accumulated.check_keys(keys)
        shared = self.update.is_shared and not accumulating
        accumulator = self.accumulator.handle if shared or accumulating else NOT_ACCUMULATING
        # Group ids for the update on a side stream, while the forward runs.
        if groups is None and (shared or (values.is_cuda and not accumulating)):
            groups = ops.row_groups_async(values, offsets, layout)
        elif groups is not None and values.is_cuda and not torch.compiler.is_compiling():
            for tensor in (*groups, values, offsets):  # may have been grouped ahead on another stream
                tensor.record_stream(torch.cuda.current_stream(values.device))
        options = self.counters["pending"], shared, accumulator, check_bounds, self.dtype_of(fused.weights)
        return ops.FusedBatch(fused, values, offsets, sample_weights, *options, groups, layout).look_up()

    def dtype_of(self, weights: list[Tensor]) -> torch.dtype:
        """Return the dtype of a lookup's result; ValueError for replaced weights that kernels cannot read."""
        facts = weights.storage_and_facts[1] if isinstance(weights, TensorList) else {}  # which do not refer to `self`
        return facts.get("output_dtype") or facts.setdefault("output_dtype", _output_dtype(weights, self))

    def weights(self, tables: list[Table] | None = None) -> list[Tensor]:
        """Return the weights by table, with cached facts."""
        weights = _weights(self.tables if tables is None else tables)
        # Traced or transformed tensors may have no address.
        return TensorList(weights, self._cached_facts, "weights") if plain_eager(*weights) else weights

    def fused_tables(self) -> ops.FusedTables:
        """Return the tables' current tensors, for `ops`."""
        spec, counters, tables = self.optimizer, self.counters, self.tables
        assert spec is not None
        buffers = [*map(attrgetter("_buffers"), tables)]
        states: list[Any] = [state for state_spec in spec.states for state in map(itemgetter(state_spec.name), buffers)]
        steps, skipped, rate = [counters["step"]], [counters["skipped"]], counters["learning_rate"]
        weights = self.weights(tables)
        if isinstance(weights, TensorList):
            states = TensorList(states, self._cached_facts, "states")
        return ops.FusedTables(weights, states, steps, skipped, rate, spec.name, self.hyperparameters)

    def trains(self, weights: Sequence[Tensor] | None = None) -> bool:
        """Return whether a lookup made now will train the tables; ValueError if it would train only some of them."""
        if self.optimizer is None or not torch.is_grad_enabled():
            return False
        return require_gradients(self.configs, _weights(self.tables) if weights is None else weights)

    def read(
        self, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
        unknown_ids: UnknownIds | None = None,
    ) -> Tensor:  # fmt: skip
        """Read `[B, width]` if pooled, else `[N, width]`; unknown ids read as initial values. Not differentiable."""
        weights: list[Tensor] = [table.weight for table in self.tables]
        dtype = self.dtype_of(weights)
        check_bounds = self.bounds_check == "raise" and self.cache is None and unknown_ids is None
        with self.memory():
            result = ops.embedding_bag(weights, values, offsets, sample_weights, layout, check_bounds, dtype)
            if unknown_ids is None:
                return result
            # Replace the outputs of samples with unknown ids, which read as zeros above.
            weights = [weight.detach() for weight in weights]
            for number, rows in unknown_ids.rows.items():
                weights[number] = torch.cat([weights[number].index_select(0, rows), unknown_ids.initial[number]])
            batch = *unpack_features(unknown_ids.features)[1:], unknown_ids.layout
            return result.index_copy_(0, unknown_ids.outputs, ops.embedding_bag(weights, *batch, check_bounds, dtype))

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move or cast all tensors like `torch.nn.Module._apply`; counters and the learning rate keep their dtypes.

        RuntimeError if a cached table cannot be moved, before any table is.
        """
        for table in sorted(self.tables, key=lambda table: not table.rows.is_cached):
            table._apply(fn)
        self.set_counters(self.counters)
        self.forget_layouts()

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Set the counters to values that may be on another device than the tables; those of a meta module stay."""
        device = self.tables[0].weight.device
        for name, dtype in COUNTERS.items() if self.optimizer is not None else ():
            self.counters[name] = counters[name] if device.type == "meta" else counters[name].to(device, dtype)

    def forget_layouts(self) -> None:
        """Drop cached layouts, which may have addresses of tensors that have moved."""
        self._layouts.clear()

    def memory(self) -> AbstractContextManager[Any]:
        """Return a lock to hold while the tables' tensors are used; their cache may replace them by larger ones."""
        return nullcontext() if self.cache is None else self.cache.storage.lock


def _output_dtype(weights: Sequence[Tensor], tables: LookupTables) -> torch.dtype:
    """Return the dtype of a lookup's result; ValueError for weights that were replaced and that kernels cannot read."""
    for table, config, weight in zip(tables.tables, tables.row_configs, weights, strict=True):
        shape, is_whole = (config.num_embeddings, config.embedding_dim), type(table.rows) is DeviceRows
        if is_whole and (tuple(weight.shape) != shape or not weight.is_contiguous()):
            raise ValueError(
                f"table {table.config.name!r}: the weight must be a contiguous matrix {list(shape)}, got "
                f"{list(weight.shape)} with strides {list(weight.stride())}; copy values into it, or construct the "
                "collection with other sizes"
            )
    dtypes = {*map(attrgetter("dtype"), weights)}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= _OUTPUT_DTYPES else torch.float32
    return dtype if tables.output_dtype is None else tables.output_dtype


def split_lookups(tables: LookupTables, batch: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Layout]:
    """Return the batch with one key per lookup, so that each value is a row of one table, and its layout.

    Keys keep their order, so that a row's gradients are summed in the order of a device table.
    """
    layout = tables.layout(keys := batch.keys(), device := batch.values().device)
    if layout.multiplicity <= 1:
        return batch, layout
    batches = []
    for feature in keys:
        values, offsets, weights = batch[feature].values(), batch[feature].offsets(), batch[feature].weights_or_none()
        names = [config.name for config in tables.configs if feature in config.feature_names]
        # A table's name has no dot, so no other pair has the key.
        batches += [KeyedJaggedTensor([f"{name}.{feature}"], values, weights, offsets=offsets) for name in names]
    batch = KeyedJaggedTensor.concat(batches)
    return batch, tables.layout(batch.keys(), device)


def require_gradients(configs: Sequence[TableConfig], weights: Sequence[Tensor]) -> bool:
    """Return whether the tables are trained, that is, all weights require gradients.

    Raises:
        ValueError: if only some do.
        RuntimeError: for a trained weight that is computed, whose update would be lost, or that has a gradient.
    """
    flags = set(map(attrgetter("requires_grad"), weights))
    if len(flags) > 1:
        frozen = [config.name for config, weight in zip(configs, weights, strict=True) if not weight.requires_grad]
        raise ValueError(
            f"tables {frozen} do not require gradients but others of their collection do; put frozen tables into a "
            "separate collection"
        )
    has_plain = True in flags and Tensor in map(type, weights)  # parameters are leaves, and `is_leaf` is slow to read
    if has_plain and (names := [c.name for c, weight in zip(configs, weights, strict=True) if not weight.is_leaf]):
        raise RuntimeError(
            f"the weight of table {names[0]!r} is computed (parametrize, prune, FullyShardedDataParallel), so the "
            "fused optimizer would update a temporary tensor; construct the collection without an optimizer"
        )
    if True in flags and not torch.compiler.is_compiling() and {*map(attrgetter("grad"), weights)} != {None}:
        named = zip(configs, weights, strict=True)
        raise unused_gradient(next(config.name for config, weight in named if weight.grad is not None))
    return True in flags
