"""Tables on embedding servers whose rows, with their states, are with the trainer while it uses them: staleness 0.

They are a tier more for the cache that tables in host memory and on disk have: servers take the place of the disk, and
of the index of dynamic tables. So prefetching hides the network, and bits are those of tables on the device.
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

MOST_ROWS = 1 << 18  # that are cached of a table where its `CacheConfig` has no `rows`


class RowStore(TableService, Protocol):
    """Servers that keep rows with their states, and the index of dynamic tables; one trainer has what it uses.

    Attributes:
        updates: of trainers, that servers have the results of.
    """

    @property
    def updates(self) -> int: ...

    def num_rows(self, table: str) -> int:
        """Row numbers of a table: 0 and up."""

    def seed_and_clock(self, table: str) -> tuple[int, int]:
        """The seed of initial values, and how many batches were trained."""

    def statistics(self, table: str) -> dict[str, int]:
        """Those of a dynamic table, of all servers together."""

    def register_lessee(self, holder: Tables) -> None:
        """Who has rows, and is asked to write them back where servers must have them all."""

    def begin_training(self) -> None:
        """A batch is prefetched to be trained. ValueError if rows are missing that an earlier run has not returned."""

    def allocate_rows(
        self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Of each dynamic table the row numbers of distinct ids, ascending, -1 without a row; and which ids are new.

        In training new ids get rows. ValueError if they find no room; where others have got some on another server by
        then, no batch can be trained after that.
        """

    def read_records(self, table: str, rows: Tensor, records: Tensor) -> IoFuture:
        """See `DiskRows.read`; row numbers of a static table are its rows. `wait` raises what servers have raised."""

    def write_records(self, table: str, rows: Tensor, records: Tensor) -> IoFuture:
        """See `DiskRows.write`."""


class ShardedServerTables(OptimizedTables):
    """Tables on servers, sharded over trainers, each of which has the rows of its shards while it uses them.

    `server_seeds` are those of tables whose placement is "server".
    """

    configs: tuple[TableConfig, ...]
    server_seeds: list[int]
    service: TableService | None = None

    def server_rows(self) -> list[dict[int, tuple[int, int]]]:
        """The first row and the number of rows of this trainer's shards, by table, a dict for each `RowStore`.

        ValueError where a table is not sharded by rows alone.
        """
        raise NotImplementedError

    def attach(self, service: TableService, stores: Sequence[RowStore]) -> None:
        """Let these servers have the rows of tables whose placement is "server": a store for each dict."""
        raise NotImplementedError


class ParallelModel(nn.Module):
    """A model, `module`, that is trained on several ranks, and can shard its tables on servers over them."""

    module: nn.Module

    def shard_server_tables(self) -> None:
        """Make `ShardedServerTables` of collections on servers; a collective, before servers are attached."""
        raise NotImplementedError


class ServerRows:
    """The rows of a table on servers, as of `DiskRows`: rows int64 `[n]`, ascending and distinct, on the CPU."""

    def __init__(self, service: RowStore, table: str) -> None:
        self._service, self._table = service, table

    def read(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Fill uint8 `[n, num_bytes]` with the records of the rows, when that is waited for."""
        return self._service.read_records(self._table, rows, records)

    def write(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Write the records of the rows."""
        return self._service.write_records(self._table, rows, records)

    def counts(self) -> Counts:
        """Nothing is cached in host memory, and no disk is here."""
        return Counts()


class CachedServerTable(ServerTable, CachedTable):
    """Weight `[num_slots, embedding_dim]` with states, and servers that have all rows with theirs."""

    service: RowStore

    def __init__(self, config: TableConfig, states: tuple[StateSpec, ...], device: Device, service: RowStore) -> None:
        self.service, self.state_specs = service, states
        CachedTable.__init__(self, config, states, device)
        self.store = ServerRows(service, config.name)  # type: ignore[assignment]

    def _rows_to_cache(self) -> int:
        rows = CachedTable._rows_to_cache(self)
        return rows if self.config.cache.rows is not None else min(rows, MOST_ROWS)

    def reset_parameters(self, seed: int | None = None) -> None:
        """RuntimeError once there are rows, which servers have."""
        if self.has_store:
            ServerTable.reset_parameters(self)

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        name = self.config.name
        self.service.load(name, {**self.service.tensors(name), **tensors})

    _allocate = CachedTable._allocate
    _apply = CachedTable._apply


class CachedServerHashTable(CachedServerTable, CachedHashTable):
    """A dynamic one, whose index is on servers.

    Attributes:
        clock: batches that were trained, or prefetched to be trained.
    """

    clock = 0
    _allocate = CachedHashTable._allocate

    @property
    def row_config(self) -> TableConfig:
        return self.config.storage_config(self.service.num_rows(self.config.name))

    def statistics(self) -> DynamicStatistics:
        """What the table has done so far; servers are asked."""
        return DynamicStatistics(**self.service.statistics(self.config.name))
