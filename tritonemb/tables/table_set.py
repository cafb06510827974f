"""`TableSet`: tables in any memory that are looked up and updated together."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.layout import Layout
from tritonemb.ops.row_update import MicroBatch
from tritonemb.tables.batch import RowBatch
from tritonemb.tables.cache import RowCache
from tritonemb.tables.cached_lookup import CachedLookup, read_pinned, update_pinned
from tritonemb.tables.dynamic_lookup import DynamicLookup
from tritonemb.tables.lookup_tables import AccumulatedLookups, DeviceLookup, LookupTables
from tritonemb.tables.optimizer import check_optimizer
from tritonemb.tables.pulled_lookup import PulledLookup
from tritonemb.tables.server_table import CachedServerHashTable, CachedServerTable, RowService, RowStore, ServerTable
from tritonemb.tables.table import Table
from tritonemb.types import TRAINABLE_DTYPES, TableConfig


class TableSet(LookupTables):
    """Tables that are looked up together, and with an `optimizer` updated together; see `EmbeddingBagCollection`.

    It is not a module: its owner registers `tables`, and `counters` as buffers. Tables may be unsharded, or shards.
    """

    def _set_tables(self, tables: Sequence[Table]) -> None:
        super()._set_tables(tables)
        if self.on_servers:
            self.kind = PulledLookup()
        elif self.cache is not None:
            self.kind = CachedLookup()
        else:
            self.kind = DynamicLookup() if self.dynamic else DeviceLookup()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """See `EmbeddingBagCollection.accumulate`."""
        block, self.accumulated = self.accumulator.open(self._apply_accumulated), AccumulatedLookups()
        try:
            with block:
                yield
        finally:
            for batch in self.accumulated.batches:
                batch.release()
            self.accumulated = AccumulatedLookups()
            self.counters["pending"].zero_()

    def scale_accumulated(self, factor: float) -> bool:
        """See `EmbeddingBagCollection.scale_accumulated`."""
        grads = [batch.grad.mul_(factor) for batch in self.accumulator.gradients]
        return all(bool(grad.isfinite().all()) for grad in grads)

    @torch.no_grad()
    def _apply_accumulated(self, gradients: list[MicroBatch]) -> None:
        if gradients:
            self.kind.apply_accumulated(self, gradients)

    def update_shared(
        self, grad: Tensor, values: Tensor, offsets: Tensor, sample_weights: Tensor | None, groups: ops.RowGroups,
        layout: Layout,
    ) -> None:  # fmt: skip
        """See `ops.shared_update`."""
        self.update.step(self, grad, RowBatch(values, offsets, sample_weights, groups, layout))

    def read_pinned(self, number: int, training: bool) -> Tensor:
        """See `ops.pinned_lookup`."""
        return read_pinned(self, number, training)

    def update_pinned(self, number: int, grad: Tensor) -> None:
        """See `ops.pinned_lookup`."""
        update_pinned(self, number, grad)

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
        return {**super().__getstate__(), "_layouts": {}, "graph_batch": None}

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
        if optimizer is not None and table.dtype not in TRAINABLE_DTYPES:
            raise ValueError(
                f"table {table.name!r}: {table.dtype} rows are too coarse to be trained; choose one of "
                f"{TRAINABLE_DTYPES}, or leave out the optimizer for lookups only"
            )
        names.add(table.name)
