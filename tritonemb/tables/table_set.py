"""`TableSet`: tables in any memory that are looked up and updated together; `prefetch` of a model's batches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, Self, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.ops.embedding_bag import check_versions, versions_of
from tritonemb.tables.batch import RowBatch, checked_batch
from tritonemb.tables.cache import released_before
from tritonemb.tables.lookup import apply_gradient, current_rows, record_trained
from tritonemb.tables.lookup_tables import AccumulatedLookups, DeviceLookup, LookupTables
from tritonemb.tables.optimizer import check_optimizer
from tritonemb.tables.server_table import RowService, RowStore, leased_table
from tritonemb.tables.table import Table
from tritonemb.tables.tier_lookup import (
    AssignedBatch,
    CachedLookup,
    DynamicLookup,
    PrefetchedBatch,
    PulledLookup,
    prefetched,
)
from tritonemb.types import TRAINABLE_DTYPES, TableConfig

_MAX_LOOKUPS = 16  # of tables on the device by graphs, whose backward has not run; more than a model has


class TableSet(LookupTables):
    """Tables that are looked up together, and with an `optimizer` updated together; see `EmbeddingBagCollection`.

    It is not a module: its owner registers `tables`, and `counters` as buffers. Tables may be unsharded, or shards.
    """

    # Batches between their compiled forward and backward, by ticket: whether they train, and accumulate, and the
    # versions of their tensors.
    _graph_batches: dict[int, tuple[PrefetchedBatch, bool, bool, list[int]]]

    def _set_tables(self, tables: Sequence[Table]) -> None:
        super()._set_tables(tables)
        self._graph_batches = {}
        on_device = DynamicLookup if self.dynamic else DeviceLookup
        self.kind = PulledLookup() if self.on_servers else on_device() if self.cache is None else CachedLookup()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `EmbeddingBagCollection.accumulate`."""
        block = self.accumulator.open(partial(self.kind.apply_accumulated, self))
        self.accumulated = AccumulatedLookups()
        try:
            with block:
                yield
        finally:
            for batch in self.accumulated.batches:
                batch.release()
            self.accumulated = AccumulatedLookups()
            self.counters["pending"].zero_()

    def update_shared(self, grad: Tensor, *batch: Any) -> None:
        """See `ops.shared_update`."""
        self.update.step(self, grad, RowBatch(*batch))

    def read_pinned(self, number: int, training: bool, trains_weights: bool) -> Tensor:
        """Read the prefetched batch with a ticket number, see `ops.pinned_lookup`."""
        batch = prefetched.get(number)
        if self.dynamic and batch is not None and current_rows(self, batch.assigned) is None:
            raise RuntimeError(
                f"table {next(iter(self.dynamic.values())).config.name!r}: since this batch was prefetched its ids may "
                "have lost their rows: the table, or another of its collection, was loaded or reset, or has evicted or "
                "removed rows; prefetch the batch again for the compiled model"
            )
        if batch is None or not batch.acquire(self):
            raise RuntimeError(
                f"table {self.configs[0].name!r}: the rows of this batch are no longer pinned; prefetch a batch again "
                "for each call of a compiled model"
            )
        result = batch.read(self)
        if training or trains_weights:
            # A call whose backward never runs must not pin rows, nor hold memory without end.
            while len(self._graph_batches) >= (_MAX_LOOKUPS if isinstance(batch, AssignedBatch) else 1):
                del self._graph_batches[next(iter(self._graph_batches))]
            accumulating = training and record_trained(self, batch)
            self._graph_batches[number] = batch, training, accumulating, versions_of(*batch.rows[:3])
        else:
            batch.release()
        return result

    def update_pinned(self, number: int, grad: Tensor, sample_weights: Tensor | None) -> Tensor | None:
        """Update the rows of the batch with a ticket number, see `ops.pinned_lookup`.

        Return the gradient of its per-sample weights, if these are passed.
        """
        batch, training, accumulating, versions = self._graph_batches.pop(number, (None, False, False, []))
        if batch is None:
            raise RuntimeError(
                f"a compiled model that looks up table {self.configs[0].name!r} was called again before its backward "
                "pass, or looks it up twice; run the backward pass first, or call the uncompiled model"
            )
        check_versions(versions, lambda: self._names, *batch.rows[:3])
        sample_weight_grad = None
        if sample_weights is not None:
            rows, weights = batch.rows, [weight.detach() for weight in self.weights()]
            derive, arguments = torch.ops.tritonemb.sample_weight_gradient, (rows.values, rows.offsets, sample_weights)
            sample_weight_grad = derive(grad, weights, *arguments, *rows.layout)
        if training:  # other lookups of this pass may read rows on the device for gradients of their weights
            deferred = self.update.is_shared or (self.cache is None and not self.on_servers)
            apply_gradient(self, batch, grad, accumulating, deferred)
        return sample_weight_grad

    def attach(self, service: RowService | RowStore) -> None:
        """Attach the servers of the tables; a cache on the device leases rows of a `RowStore`."""
        self.service, server_tables = service, self.tables
        device = self.counters["step"].device
        if service.applies_updates:
            for table in server_tables:
                table.rows.service = service
                if table.weight.is_meta:
                    table._apply(partial(torch.empty_like, device=device))
            return
        assert self.optimizer is not None
        service = cast(RowStore, service)
        new_tables = [leased_table(config, self.optimizer.states, service, device) for config in self.configs]
        for table, old_table in zip(new_tables, server_tables, strict=True):
            table.weight.requires_grad_(old_table.weight.requires_grad)
        self.replace_tables(new_tables)
        self.read_server_clocks()
        self.counters["step"].fill_(service.updates)
        service.register_lessee(self)
        for view in self._views:
            view.refresh()

    def replace_tables(self, tables: Sequence[Table]) -> None:
        """Replace all tables by others of the same names, with rows in other memory."""
        self._set_tables(tables)
        self.forget_layouts()

    @contextmanager
    def replacing_rows(self) -> Iterator[None]:
        """Empty the cache while servers load other rows in the block. RuntimeError if a batch has pinned rows."""
        with ExitStack() as stack:
            for table in self.tables:
                stack.enter_context(table.rows.reloading(write_back=False, unpinned=True))
            yield
            self.read_server_clocks()

    def read_server_clocks(self) -> None:
        """Read seeds and clocks of the tables from the servers."""
        for table in self.tables:
            table.seed, table.index.clock = self.service.seed_and_clock(table.config.name)
            table.index.epoch += 1

    def __getstate__(self) -> dict[str, Any]:
        """Exclude layouts, which a copy rebuilds, and the batch of a compiled graph."""
        return {**super().__getstate__(), "_layouts": {}, "_graph_batches": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.accumulator.tables = ref(self)


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
        if optimizer is not None and table.row_dtype not in TRAINABLE_DTYPES:
            raise ValueError(
                f"table {table.name!r}: {table.dtype} rows are too coarse to be trained; choose one of "
                f"{TRAINABLE_DTYPES}, or leave out the optimizer for lookups only"
            )
        names.add(table.name)


class PrefetchedFeatures:
    """Handle of a prefetched batch, which a model takes in place of its features. A pytree node.

    Its ids have been consumed; only `keys()` and `stride()` remain. So it does not suit a model that changes features
    before it looks them up. `by_collection` has, by `id` of each collection, its prefetched data: a pytree of tensors,
    and of prepared batches, which stay on the device of their slots.
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
    batch = checked_batch(features)
    with nullcontext() if before is None else released_before(before):
        return PrefetchedFeatures(batch, {id(tables): tables.prefetch(batch) for tables in table_sets(model)})


def table_sets(model: nn.Module) -> list[TableSet]:
    """Return the `TableSet`s that modules of a model own, those of shards excluded."""
    candidates = (module.__dict__.get("table_set") for module in model.modules())
    return [tables for tables in candidates if isinstance(tables, TableSet)]


def needs_prefetch(model: nn.Module) -> bool:
    """Return whether a table of the model is not on the device, so that `prefetch` transfers rows."""
    return any(tables.cache is not None or tables.on_servers for tables in table_sets(model))
