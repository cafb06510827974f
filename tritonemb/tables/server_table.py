"""Tables whose rows are on embedding servers.

`TableService` is what a collection asks of its servers; `tritonemb.server` has it. Servers apply the optimizer, or
with staleness 0 lease rows with their states to the trainer while it uses them. Then they are a tier behind the device
cache, like host memory and disk; those of dynamic tables also have the index. So prefetching hides the network, and
results are bitwise identical to tables on the device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tritonemb.optimizers import StateSpec
from tritonemb.storage.store import Counts, IoFuture
from tritonemb.tables.cached_rows import CachedRows, metadata_kind
from tritonemb.tables.dynamic_table import FALLBACK, DynamicTable, sorted_table
from tritonemb.tables.index import HashIndex
from tritonemb.tables.optimizer import OptimizedTables
from tritonemb.tables.table import DenseIndex, DeviceRows, Table, Tensors, draw_seed, load_named_tensors
from tritonemb.types import Device, TableConfig


class Pull(Protocol):
    """A pull in flight. A pull for training gets exactly one `push`."""

    def rows(self, accumulating: bool = False) -> list[Tensor]:
        """Wait for the rows: per table `[n, embedding_dim]` in its dtype, on the CPU. Raises errors of the servers.

        RuntimeError if they would wait for gradients that are only pushed after the present block of `accumulate`.
        """

    def push(self, sums: Sequence[Tensor] | None, lr: float) -> None:
        """Send per table the sums of the rows' gradients, float32 `[n, embedding_dim]`; None without gradients."""


class TableService(Protocol):
    """Embedding servers of a collection's tables."""

    # Whether servers apply the optimizer (`RowService`), or trainers, to leased rows (`RowStore`).
    applies_updates: bool

    def tensors(self, table: str) -> dict[str, Tensor]:
        """Return the tensors of a table in `state_dict`, after the pushes applied so far; copies."""

    def load(self, table: str, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of a table from `state_dict`. ValueError if they do not fit; nothing is changed then."""

    def flush(self) -> None:
        """Wait until servers have applied all training steps of all trainers. A collective, after the same step."""

    def return_leases(self) -> None:
        """Write leased rows back to the servers; a collective of the trainers, before one calls `snapshot`."""

    def discard_leases(self) -> None:
        """Drop leased rows without writing them back, after another trainer has loaded other rows."""

    def snapshot(self, path: Path, changes_only: bool = False) -> list[dict[str, Any]]:
        """Write each server's tables to a file, named `path`, a number and ".server"; one trainer calls this.

        Servers wait until all trainers have reached this step. Return per file the snapshot's name, and its parent's,
        or None if it is whole. StorageError if a file cannot be written.
        """

    def restore(self, chains: Sequence[Sequence[Path]], steps: int) -> None:
        """Restore the servers from snapshots taken after `steps` steps, one chain of files per saved server.

        The number of servers may differ. One trainer calls this; then the others do, without chains.
        """


class RowService(TableService, Protocol):
    """Servers that apply means over `num_trainers` gradients. Any thread may pull, for training in order of batches."""

    def pull(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool) -> Pull:
        """Request the rows of distinct ids, int64 `[n]` per table, with their occurrences in the batch."""


class RowStore(TableService, Protocol):
    """Servers that store rows with their states, and the index of dynamic tables; a trainer leases the rows it uses."""

    @property
    def updates(self) -> int:
        """Number of updates of the trainers whose results the servers have."""

    def num_rows(self, table: str) -> int:
        """Return the number of rows of a dynamic table; row numbers start at 0."""

    def seed_and_clock(self, table: str) -> tuple[int, int]:
        """Return the seed of initial values, and the number of batches that were trained."""

    def statistics(self, table: str) -> dict[str, int]:
        """Return the statistics of a dynamic table, summed over servers."""

    def register_lessee(self, lessee: Any) -> None:
        """Register the `TableSet` that leases rows, so that they are written back when servers need all rows."""

    def begin_training(self) -> None:
        """Prepare for a batch prefetched for training. ValueError if an earlier run has not returned its rows."""

    def allocate_rows(
        self, ids: Sequence[Tensor], occurrences: Sequence[Tensor], training: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Find the rows of distinct ids, ascending, per dynamic table, and in training allocate rows for new ids.

        Return per table the row numbers, -1 without a row, and which ids are new. ValueError if a table is full; if
        other ids have got rows on another server by then, no further batch can be trained.
        """

    def transfer(self, requests: Sequence[tuple[Any, Tensor, Tensor]], write: bool) -> Sequence[IoFuture]:
        """Read or write records of rows, see `DiskRows.transfer`; a store has a `table_name`. Static ids are rows."""


class ServerState:
    """State of a table whose rows, and index if it is dynamic, are on embedding servers: requests of whole tables."""

    config: TableConfig
    service: Any = None  # `TableService`, once attached

    def require_service(self) -> Any:
        """Return the servers; ValueError if none are attached."""
        if self.service is None:
            raise ValueError(
                f"table {self.config.name!r} is on embedding servers, and none are attached: call "
                "te.server.attach(model, te.server.start(2)), or pass Trainer(servers=...)"
            )
        return self.service

    def tensors(self, table: Table) -> dict[str, Tensor]:
        """Return copies of weight and states, sorted by id if dynamic. ValueError if no servers are attached."""
        tensors = self.require_service().tensors(self.config.name)
        return {name: tensors[name] for name in ("weight", *table.state_names)}

    def fetch(self, table: Table) -> Table:
        state = self.require_service().tensors(self.config.name)
        rows = torch.cat([state["weight"], state.get(f"{FALLBACK}weight", state["weight"][:0])])
        result = sorted_table(table.config, rows, state.get("ids"), int(state.get("seed", table.seed)))
        result.index.counts = state.get("count")
        return result

    def assign(self, table: Table, tensors: Tensors) -> None:
        service, name = self.require_service(), self.config.name
        service.load(name, {**service.tensors(name), **tensors})

    def reset(self, table: Table, seed: int | None = None) -> None:
        """Draw the seed of the initial values from torch's generator; servers get it when they are attached."""
        if self.service is not None:
            raise RuntimeError(
                f"table {self.config.name!r} is on embedding servers and cannot be reset; attach a new module"
            )
        if not table.weight.is_meta:
            table.seed = draw_seed()

    def save(self, table: Table, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not metadata_kind.get():
            tensors = self.require_service().tensors(self.config.name)
            destination.update({prefix + name: tensor for name, tensor in tensors.items()})

    def load(self, table: Table, *args: Any) -> None:
        service, name = self.require_service(), self.config.name
        load_named_tensors(service.tensors(name), partial(service.load, name), *args)


class PulledRows(ServerState, DeviceRows):
    """Rows on embedding servers, which apply the optimizer; the weight is `[0, embedding_dim]`.

    The weight is for dtype, device and tracing only, and not a parameter, so that no optimizer gets it.
    """

    is_pulled = True

    def allocate(self, table: Table, device: Device) -> None:
        config = self.config
        if config.init is not None:
            raise ValueError(
                f"table {config.name!r}: an init fills a whole table in memory, and this table is on embedding "
                "servers; leave init out, or load values with load_state_dict"
            )
        table.weight = torch.empty(0, config.embedding_dim, dtype=config.dtype, device=device, requires_grad=True)
        table.seed = -1

    def convert(self, table: Table, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        table.weight = fn(table.weight.detach()).requires_grad_(table.weight.requires_grad)


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
    averages_gradients = False  # of parameters that all ranks have, in the backward

    def shard_server_tables(self) -> None:
        """Replace collections on servers by `ShardedServerTables`; a collective, before servers are attached."""
        raise NotImplementedError


class LeasedRows(ServerState, CachedRows):
    """Rows on embedding servers, which lease them to a cache on the device."""

    def __init__(self, config: TableConfig, states: Sequence[StateSpec], is_dynamic: bool, service: RowStore) -> None:
        super().__init__(config, states, is_dynamic)
        self.service = service

    def reset(self, table: Table, seed: int | None = None) -> None:
        """Create the store at construction; RuntimeError once there is one."""
        if self.store is not None:
            super().reset(table)
        self.store = SimpleNamespace(counts=Counts, table_name=self.config.name, transfer=self.service.transfer)


class ServerIndex(DenseIndex):
    """Index of a table on embedding servers, which lease its rows."""

    def __init__(self, config: TableConfig, service: RowStore) -> None:
        super().__init__(config.storage_config(service.num_rows(config.name)) if config.is_dynamic else config)
        self._service, self.assigns_rows = service, config.is_dynamic

    def statistics(self) -> dict[str, int]:
        return self._service.statistics(self.row_config.name)


def leased_table(config: TableConfig, states: Sequence[StateSpec], service: RowStore, device: Device) -> Table:
    """Create a table whose rows are leased from embedding servers."""
    index = ServerIndex(config, service)
    return Table(config, index, LeasedRows(index.row_config, states, config.is_dynamic, service), device)


def make_table(config: TableConfig, states: Sequence[StateSpec], device: Device = None) -> Any:
    """Create a table with the index and the rows of its config."""
    is_local = config.is_dynamic and config.placement != "server"
    row_config = config.storage_config(1) if config.is_dynamic else config  # of a dynamic table on servers, unused
    index = HashIndex(config, states, device) if is_local else DenseIndex(row_config)
    kinds: dict[str, Callable[..., DeviceRows]] = {"device": DeviceRows, "server": PulledRows}
    rows = kinds.get(config.placement, CachedRows)(index.row_config, states, config.is_dynamic)
    return (DynamicTable if is_local else Table)(config, index, rows, device)
