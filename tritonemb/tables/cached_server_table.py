"""Tables on embedding servers whose rows, with their states, are leased to the trainer while it uses them: staleness 0.

Servers are a tier behind the device cache, like host memory and disk; those of dynamic tables also have the index. So
prefetching hides the network, and results are bitwise identical to tables on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from tritonemb.optimizers import StateSpec
from tritonemb.storage.store import Counts, IoFuture
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.dynamic_table import CachedHashTable, DynamicStatistics
from tritonemb.tables.lookup import Tables
from tritonemb.tables.optimizer import OptimizedTables
from tritonemb.tables.server_table import ServerTable, TableService
from tritonemb.types import Device, TableConfig

MAX_CACHED_ROWS = 1 << 18  # cached per table by default, without `CacheConfig(rows=...)`


class RowStore(TableService, Protocol):
    """Servers that store rows with their states, and the index of dynamic tables; a trainer leases the rows it uses."""

    @property
    def updates(self) -> int:
        """Number of updates of the trainers whose results the servers have."""

    def num_rows(self, table: str) -> int:
        """Return the number of rows of a table; row numbers start at 0."""

    def seed_and_clock(self, table: str) -> tuple[int, int]:
        """Return the seed of initial values, and the number of batches that were trained."""

    def statistics(self, table: str) -> dict[str, int]:
        """Return the statistics of a dynamic table, summed over servers."""

    def register_lessee(self, holder: Tables) -> None:
        """Register the tables that lease rows, so that they are written back when servers need all rows."""

    def begin_training(self) -> None:
        """Prepare for a batch prefetched for training. ValueError if an earlier run has not returned its rows."""

    def allocate_rows(
        self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Find the rows of distinct ids, ascending, per dynamic table, and in training allocate rows for new ids.

        Return per table the row numbers, -1 without a row, and which ids are new. ValueError if a table is full; if
        other ids have got rows on another server by then, no further batch can be trained.
        """

    def read_records(self, table: str, rows: Tensor, records: Tensor) -> IoFuture:
        """See `DiskRows.read`; in a static table ids are row numbers. `wait` raises errors of the servers."""

    def write_records(self, table: str, rows: Tensor, records: Tensor) -> IoFuture:
        """See `DiskRows.write`."""


class ShardedServerTables(OptimizedTables):
    """Tables on servers, sharded over trainers, each of which leases the rows of its shards."""

    configs: tuple[TableConfig, ...]
    server_seeds: list[int]  # of the tables whose placement is "server"
    service: TableService | None = None

    def server_rows(self) -> list[dict[int, tuple[int, int]]]:
        """Return the first row and the number of rows of this trainer's shards by table, one dict per `RowStore`.

        ValueError if a table is sharded other than row-wise.
        """
        raise NotImplementedError

    def attach(self, service: TableService, stores: Sequence[RowStore]) -> None:
        """Attach servers to the tables whose placement is "server", one store per dict of `server_rows`."""
        raise NotImplementedError


class ParallelModel(nn.Module):
    """A model, `module`, that is trained on several ranks and can shard its server tables over them."""

    module: nn.Module

    def shard_server_tables(self) -> None:
        """Replace collections on servers by `ShardedServerTables`; a collective, before servers are attached."""
        raise NotImplementedError


class ServerRows:
    """Rows of a table on servers, with the interface of `DiskRows`."""

    def __init__(self, service: RowStore, table: str) -> None:
        self._service, self._table = service, table

    def read(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Start to fill `records`, uint8 `[n, num_bytes]`, with the records of the rows, int64 `[n]`, ascending."""
        return self._service.read_records(self._table, rows, records)

    def write(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Start to write the records of the rows."""
        return self._service.write_records(self._table, rows, records)

    def counts(self) -> Counts:
        """Return zeros: there is no host cache or disk."""
        return Counts()


class CachedServerTable(ServerTable, CachedTable):
    """Table with a device cache, weight `[num_slots, embedding_dim]` and states, of rows on servers."""

    service: RowStore

    def __init__(self, config: TableConfig, states: tuple[StateSpec, ...], device: Device, service: RowStore) -> None:
        self.service, self.state_specs = service, states
        CachedTable.__init__(self, config, states, device)
        self.store = ServerRows(service, config.name)  # type: ignore[assignment]

    def _num_cached_rows(self) -> int:
        rows = CachedTable._num_cached_rows(self)
        return rows if self.config.cache.rows is not None else min(rows, MAX_CACHED_ROWS)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw the seed at construction; RuntimeError once servers have rows."""
        if self.has_store:
            ServerTable.reset_parameters(self)

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        name = self.config.name
        self.service.load(name, {**self.service.tensors(name), **tensors})

    _allocate = CachedTable._allocate
    _apply = CachedTable._apply


class CachedServerHashTable(CachedServerTable, CachedHashTable):
    """Dynamic table with a device cache, of rows and an index on servers."""

    clock = 0  # number of batches that were trained, or prefetched for training
    _allocate = CachedHashTable._allocate

    @property
    def row_config(self) -> TableConfig:
        return self.config.storage_config(self.service.num_rows(self.config.name))

    def statistics(self) -> DynamicStatistics:
        """Request the table's statistics from the servers."""
        return DynamicStatistics(**self.service.statistics(self.config.name))
