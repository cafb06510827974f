"""Embedding servers for a model: start them, and let them have the rows of its tables."""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import EXACT, ExchangePrecision
from tritonemb.flight import ROOTS, TOKEN, complete_address
from tritonemb.server.client import CollectionClient, Connection, ReadOnlyClient, TableClient
from tritonemb.server.launch import ServerProcess
from tritonemb.server.node import EmbeddingServer, LogMode
from tritonemb.server.row_leases import LeaseClient, ShardedLeases
from tritonemb.server.tables import CollectionSpec, TableSpec, describe_optimizer
from tritonemb.server.transport import FlightTransport, LocalTransport, Transport
from tritonemb.tables.cached_server_table import ParallelModel, ShardedServerTables
from tritonemb.tables.server_table import ServerTable
from tritonemb.tables.table_set import TableSet
from tritonemb.utils import Closeable, join_names, on_error


@dataclass(frozen=True)
class AtMost:
    """Staleness: a batch may miss the updates of so many steps, and of fewer where servers are faster.

    Raises:
        ValueError: for a negative number.
    """

    steps: int

    def __post_init__(self) -> None:
        staleness_bound(self)


def staleness_bound(staleness: "int | AtMost | None") -> int | None:
    """The most steps; None for any number. ValueError for a negative one."""
    steps = staleness.steps if isinstance(staleness, AtMost) else staleness
    if steps is not None and steps < 0:
        raise ValueError(f"staleness must be at least 0, got {steps}")
    return steps


class Servers(Closeable):
    """Connections of this process to embedding servers; and these themselves, where it has started them.

    `addresses` and `token` are what other processes need to connect to servers that are processes.
    """

    def __init__(
        self, transports: Sequence[Transport], own: Sequence[Closeable] = (), patience: float = 20.0, token: str = ""
    ) -> None:
        self._own, self.token = list(own), token
        self.clients: list[TableClient] = []
        self.connections = [Connection(transport, patience) for transport in transports]

    @property
    def addresses(self) -> list[str]:
        """Of all servers."""
        return [connection.address for connection in self.connections]

    def __len__(self) -> int:
        return len(self.connections)

    def statistics(self) -> list[dict[str, Any]]:
        """Of each server."""
        return [connection.statistics() for connection in self.connections]

    def close(self) -> None:
        for client in self.clients:
            with suppress(Exception):  # the servers are gone
                client.end()
        for each in (*self.connections, *self._own):
            each.close()


def start(
    number: int, *, processes: bool = False, folder: str | Path | None = None, log: LogMode | None = None,
    patience: float = 20.0,
) -> Servers:  # fmt: skip
    """Start embedding servers on this machine; `close` ends them, and so does the end of this process, however it ends.

    Args:
        processes: each in a process of its own, which is started again if it ends and there is a log; else each in a
            thread of this process, to which rows are passed by reference.
        folder: where their state is saved; what is there is restored.
        log: who keeps what they were told since then; see `EmbeddingServer`.
        patience: seconds without a sign of life after which a server counts as gone, and training ends; not counted
            while a process is started again.

    Raises:
        ValueError: there is no server to start, or a log without a folder.
        OSError: a process did not start, or the folder cannot be used.
    """
    if number < 1:
        raise ValueError(f"the number of servers must be at least 1, got {number}")
    own, token = list[Any](), secrets.token_hex(32)
    with on_error(lambda: [each.close() for each in own]):
        for index in range(number):
            path = None if folder is None else Path(folder) / f"server-{index}"
            own.append(ServerProcess(token, path, log) if processes else EmbeddingServer(f"server-{index}", path, log))
    if processes:
        servers = Servers([FlightTransport(each.address, token) for each in own], own, patience, token)
        for connection, each in zip(servers.connections, own, strict=True):
            connection.is_starting = partial(getattr, each, "is_starting")
        return servers
    return Servers([LocalTransport(each, each.name) for each in own], own, patience)


def connect(
    addresses: Sequence[str], *, token: str | None = None, roots: str | Path | None = None, patience: float = 20.0,
    folder: str | Path | None = None,
) -> Servers:  # fmt: skip
    """Connect to embedding servers that run already: `tritonemb embedding-server`.

    Args:
        addresses: grpc://HOST:PORT or grpc+tls://HOST:PORT of all of them, in the same order on every trainer;
            HOST:PORT is the former on this machine, else the latter.
        token: that they expect; that of the environment (TRITONEMB_TOKEN) if not given.
        roots: a PEM file of certificates to trust with TLS; that of TRITONEMB_TLS_ROOTS, or the system's, if not given.
        patience: seconds without a sign of life after which a server counts as gone, and training ends; more where
            servers are started again by somebody, and take long to load their rows.
        folder: that of `start_on_ray`, where servers that have moved say where they are.

    Raises:
        ConnectionError, PermissionError: one does not answer, or expects another token.
        ValueError: an address cannot be one.
    """
    if not addresses:
        raise ValueError("no address of an embedding server is given")
    return Servers(transports_to(addresses, token or os.environ.get(TOKEN, ""), roots, folder), (), patience)


def transports_to(
    addresses: Sequence[str], token: str, roots: str | Path | None, folder: str | Path | None
) -> list[FlightTransport]:
    """As `connect` takes them."""
    roots = roots or os.environ.get(ROOTS)
    moved = (None if folder is None else address_file(Path(folder) / f"server-{n}") for n in range(len(addresses)))
    pairs = zip(map(complete_address, addresses), moved, strict=True)
    return [FlightTransport(address, token, roots, path) for address, path in pairs]


def address_file(folder: str | Path) -> Path:
    """Where a server that may move says where it is."""
    return Path(folder) / "address"


def attach(
    model: nn.Module, servers: Servers, staleness: "int | AtMost | None" = 0, *, accumulate: int = 1,
    group: RankGroup | None = None, exchange: ExchangePrecision = EXACT,
) -> None:  # fmt: skip
    """Let servers have the rows of a model's tables whose placement is "server".

    Args:
        staleness: how many steps' updates a batch misses, exactly; or `AtMost` so many; None for any number.
        accumulate: micro-batches of a step.
        group: all trainers; each attaches its own model to the same servers.
        exchange: in how many bits rows are pulled and gradients pushed; all of them by default.

    Raises:
        ValueError: the model has no such tables, or the servers have others of that name.
    """
    group = RankGroup() if group is None else group
    is_current = isinstance(staleness, int) and staleness == 0  # rows have all updates: trainers hold what they use
    if group.size > 1 and isinstance(model, ParallelModel) and is_current:
        model.shard_server_tables()
    if not (found := collections_on_servers(model)):
        raise ValueError('the model has no tables on embedding servers; give them TableConfig(placement="server")')
    for name, tables in found.items():
        if exchange != EXACT and (isinstance(tables, ShardedServerTables) or (is_current and group.size == 1)):
            raise ValueError(f"without staleness rows are moved as they are, not as {exchange}; leave exchange out")
        if isinstance(tables, ShardedServerTables):
            servers.clients.append(_attach_shards(tables, servers, accumulate, group, name))
        else:
            servers.clients.append(client := _client(tables, servers, staleness, accumulate, group, name, exchange))
            tables.attach(client)
    if group.size > 1:
        group.all_gather_object(None)  # nobody pulls before all are there


def attach_for_reading(model: nn.Module, servers: Servers) -> None:
    """Let a model read rows of its tables from the servers of a run, as they are now; it cannot be trained.

    Rows that trainers hold, as without staleness, are on servers after a checkpoint or a `flush`.

    Raises:
        ValueError: the model has no tables on servers, or these servers do not have them, or in another order.
    """
    if not (collections := collections_on_servers(model)):
        raise ValueError("the model has no tables on embedding servers, so leave servers out")
    shape = attrgetter("name", "num_embeddings", "embedding_dim")
    for name, tables in collections.items():
        answers = [connection.ask("spec", collection=name) for connection in servers.connections]
        numbers, shapes = [answer.get("server") for answer in answers], [*map(shape, tables.configs)]
        spec = CollectionSpec.from_json(answers[0]["spec"]) if "spec" in answers[0] else None
        if spec is None or numbers != [*range(len(spec.owners[0]))] or [*map(shape, spec.tables)] != shapes:
            raise ValueError(
                f"these {len(servers)} embedding servers are not those that have tables "
                f"{join_names(s[0] for s in shapes)} of {name!r}, in the "
                "order in which the trainer was given them; without servers= a checkpoint is read"
            )
        assert isinstance(tables, TableSet)  # of a model that was not sharded
        tables.attach(ReadOnlyClient(servers.connections, name, spec, 0, [None] * len(spec.tables)))


def collections_on_servers(model: nn.Module) -> dict[str, TableSet | ShardedServerTables]:
    """By their paths in the model; "tables" if that is one itself."""
    found = dict[str, TableSet | ShardedServerTables]()
    for path, module in (model.module if isinstance(model, ParallelModel) else model).named_modules():
        tables = module if isinstance(module, ShardedServerTables) else module.__dict__.get("table_set")
        if isinstance(tables, TableSet | ShardedServerTables) and tables.configs[0].placement == "server":
            found[path or "tables"] = tables
    return found


def _client(
    tables: TableSet, servers: Servers, staleness: Any, accumulate: int, group: RankGroup, name: str,
    exchange: ExchangePrecision,
) -> CollectionClient:  # fmt: skip
    steps, exact = staleness_bound(staleness), isinstance(staleness, int)
    if steps is not None:
        most = (steps + 1) * accumulate * (1 if exact else group.size) - 1
        for config in tables.configs:
            if config.is_dynamic and config.eviction.protect <= most:
                raise ValueError(
                    f"table {config.name!r}: gradients come up to {most} batches after their rows were read, and only "
                    f"rows of the last {config.eviction.protect} stay; use EvictionConfig(protect={most + 1})"
                )
    seeds = [cast(ServerTable, table).seed for table in tables.tables]
    spec = _spec(tables, seeds, servers, group, trainers=group.size, staleness=steps, exact=exact, batches=accumulate)
    spec = replace(spec, rows_in=exchange.forward, gradients_in=exchange.backward)
    caches = [config.cache if config.cache.rows is not None else None for config in tables.configs]
    kind = LeaseClient if spec.leases_rows else CollectionClient
    return kind(servers.connections, name, spec, group.rank, caches)


def _attach_shards(
    tables: ShardedServerTables, servers: Servers, accumulate: int, group: RankGroup, name: str
) -> ShardedLeases:
    """Of each rank's shards, a collection on the servers."""
    ranges = tables.server_rows()
    spec = _spec(tables, tables.server_seeds, servers, group, trainers=1, staleness=0, exact=True, batches=accumulate)
    parts = [(f"{name}@{group.rank}.{n}", _of_shards(spec, rows, len(servers))) for n, rows in enumerate(ranges)]
    own = [LeaseClient(servers.connections, *part, 0, [None] * len(spec.tables)) for part in parts]
    every = [part for of_rank in group.all_gather_object(parts) for part in of_rank]
    made = ShardedLeases(servers.connections, every, own, group)
    tables.attach(made, own)
    return made


def _of_shards(spec: CollectionSpec, rows: Mapping[int, tuple[int, int]], servers: int) -> CollectionSpec:
    parts: list[tuple[int, int] | None] = [(0, 0)] * len(spec.tables)
    owners = list(spec.owners)
    for number, (first_row, num_rows) in rows.items():
        parts[number] = first_row, num_rows
        if spec.tables[number].num_embeddings is None:
            owners[number] = tuple(first_row + first for first in owners_of(num_rows, servers, number))
    return replace(spec, owners=tuple(owners), parts=tuple(parts))


def _spec(
    tables: TableSet | ShardedServerTables, seeds: Sequence[int], servers: Servers, group: RankGroup, **how: Any
) -> CollectionSpec:
    """The same for all trainers."""
    if tables.optimizer is None:
        raise ValueError("embedding servers apply a fused optimizer; give the collection one")
    if -1 in seeds:  # made on the meta device
        seeds = [(config.seed ^ torch.initial_seed()) & (2**63 - 1) for config in tables.configs]
    seeds = group.all_gather_object(seeds)[0] if group.size > 1 else seeds
    pairs = zip(tables.configs, seeds, strict=True)
    specs = tuple(TableSpec.of(config, seed, tables.optimizer) for config, seed in pairs)
    owners = tuple(owners_of(spec.num_partitions, len(servers), index) for index, spec in enumerate(specs))
    described = describe_optimizer(tables.optimizer)
    how |= {"rows_in": EXACT.forward, "gradients_in": EXACT.backward}
    return CollectionSpec(specs, described, owners=owners, parts=(None,) * len(specs), **how)


def owners_of(partitions: int, servers: int, table: int) -> tuple[int, ...]:
    """The first partition of each server; a table with few partitions is where others are not."""
    if partitions >= servers:
        return tuple(server * partitions // servers for server in range(servers))
    first = table % (servers - partitions + 1)
    return tuple(min(max(0, server - first), partitions) for server in range(servers))


def flush(model: nn.Module) -> None:
    """Apply all that was pushed; all trainers call this, after the same step."""
    for tables in collections_on_servers(model).values():
        assert tables.service is not None
        tables.service.flush()
