"""Embedding servers of a model: start them or connect to them, attach them to its tables, and options of a run."""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from tritonemb.comm.group import RankGroup
from tritonemb.comm.output_exchange import EXACT, ExchangePrecision
from tritonemb.flight import ROOTS, TOKEN, complete_address
from tritonemb.server.client import CollectionClient, ReadOnlyClient, TableClient
from tritonemb.server.connection import Connection
from tritonemb.server.durable import LogMode
from tritonemb.server.launch import ServerProcess
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.row_leases import LeaseClient, ShardedLeases
from tritonemb.server.spec import CollectionSpec, TableSpec, describe_optimizer
from tritonemb.server.tablets import TabletDirectory
from tritonemb.server.transport import FlightTransport, LocalTransport, Transport
from tritonemb.tables.server_table import ParallelModel, ShardedServerTables
from tritonemb.tables.table_set import TableSet
from tritonemb.types import CacheConfig, CodecName, TableConfig
from tritonemb.utils import Closeable, Options, did_you_mean, join_names, number, on_error


@dataclass(frozen=True)
class AtMost:
    """Staleness bound: a batch misses the updates of at most `steps` steps, fewer if servers have applied more.

    Raises:
        ValueError: for a negative number.
    """

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"staleness must be at least 0, got {self.steps}")


def staleness_bound(staleness: int | AtMost | None) -> int | None:
    """Return the maximum number of missed steps; None if it is unbounded. ValueError for a negative one."""
    if isinstance(staleness, int):
        staleness = AtMost(staleness)
    return None if staleness is None else staleness.steps


class Servers(Closeable):
    """Connections of this process to embedding servers.

    Args:
        local_servers: servers that this process has started, which are closed with the connections.
        patience: seconds without any message from a server after which its requests fail.
        token: authentication token, for other processes that connect to these servers.
        tablets: see `connect`.
    """

    def __init__(
        self, transports: Sequence[Transport], local_servers: Sequence[Closeable] = (), patience: float = 20.0,
        token: str = "", tablets: int | None = None,
    ) -> None:  # fmt: skip
        self._local_servers, self.token, self._options = list(local_servers), token, (tablets, patience)
        self.clients: list[TableClient] = []
        self.connections = list[Connection]()
        with on_error(self.close):
            for transport in transports:
                self.connections.append(Connection(transport, patience))

    @cached_property
    def directory(self) -> TabletDirectory:
        return TabletDirectory(self.connections, *self._options)

    @property
    def addresses(self) -> list[str]:
        """Addresses of all servers, for other processes that connect to them."""
        return [connection.transport.address for connection in self.connections]

    def __len__(self) -> int:
        return len(self.connections)

    def statistics(self) -> list[dict[str, Any]]:
        """Statistics of each server; see `EmbeddingServer.statistics`."""
        return [connection.statistics() for connection in self.connections]

    def close(self) -> None:
        for client in self.clients:
            with suppress(Exception):  # the servers may be gone
                client.push_dropped()
        for resource in (*self.connections, *self._local_servers):
            resource.close()


def start(
    number: int, *, processes: bool = False, folder: str | Path | None = None, log: LogMode | None = None,
    patience: float = 20.0,
) -> Servers:  # fmt: skip
    """Start embedding servers on this machine. They end on `close`, or with this process, also if it is killed.

    Args:
        processes: run each server in a child process, which is restarted if it ends and there is a log; otherwise in a
            thread of this process, and rows are passed by reference.
        folder: folder of their snapshots, which are restored if they exist.
        log: log of the requests since the last snapshot; see `EmbeddingServer`.
        patience: seconds without any message from a server after which training fails; suspended while a child process
            is restarted.

    Raises:
        ValueError: `number` is less than 1, or `log` is given without a folder.
        OSError: a process did not start, or the folder cannot be used.
    """
    if number < 1:
        raise ValueError(f"the number of servers must be at least 1, got {number}")
    servers, transports, token = list[Any](), list[Transport](), secrets.token_hex(32)
    with on_error(lambda: [server.close() for server in servers]):
        for name in (f"server-{index}" for index in range(number)):
            path = None if folder is None else Path(folder) / name
            if processes:
                servers.append(process := ServerProcess(token, path, log))
                transports.append(FlightTransport(process.address, token))
            else:
                servers.append(server := EmbeddingServer(name, path, log))
                transports.append(LocalTransport(server, name))
    result = Servers(transports, servers, patience, token if processes else "")
    for connection, server in zip(result.connections, servers if processes else (), strict=False):
        connection.is_starting = partial(getattr, server, "is_starting")
    return result


def connect(
    addresses: Sequence[str], *, token: str | None = None, roots: str | Path | None = None, patience: float = 20.0,
    folder: str | Path | None = None, tablets: int | None = None,
) -> Servers:  # fmt: skip
    """Connect to running embedding servers, which were started by `tritonemb embedding-server`.

    Args:
        addresses: grpc://HOST:PORT or grpc+tls://HOST:PORT of all servers, in the same order on every trainer.
            HOST:PORT means grpc:// on this machine, and grpc+tls:// on others.
        token: authentication token of the servers; default: TRITONEMB_TOKEN of the environment.
        roots: PEM file of trusted root certificates for TLS; default: TRITONEMB_TLS_ROOTS, else those of the system.
        patience: seconds without any message from a server after which training fails; increase it if servers are
            restarted externally and take long to load their rows.
        folder: folder of `start_on_ray`, where servers that have moved to another machine write their addresses.
        tablets: number of parts of each new collection that can move to other servers; None: as those on the servers.

    Raises:
        ConnectionError: a server does not answer.
        PermissionError: a server rejects the token.
        ValueError: an address is malformed.
    """
    if not addresses:
        raise ValueError("pass the address of at least one embedding server")
    transports = transports_to(addresses, token or os.environ.get(TOKEN, ""), roots, folder)
    return Servers(transports, (), patience, "", tablets)


def transports_to(
    addresses: Sequence[str], token: str, roots: str | Path | None, folder: str | Path | None
) -> list[FlightTransport]:
    """Create transports to servers; see `connect`."""
    roots = roots or os.environ.get(ROOTS)
    paths = [None if folder is None else address_file(Path(folder) / f"server-{n}") for n in range(len(addresses))]
    return [FlightTransport(complete_address(address), token, roots, paths[n]) for n, address in enumerate(addresses)]


def address_file(folder: str | Path) -> Path:
    """Path of the file with the present address of a server that may move."""
    return Path(folder) / "address"


def attach(
    model: nn.Module, servers: Servers, staleness: "int | AtMost | None" = 0, *, accumulate: int = 1,
    group: RankGroup | None = None, exchange: ExchangePrecision = EXACT,
) -> None:  # fmt: skip
    """Attach embedding servers to a model's tables with `placement="server"`.

    Args:
        staleness: number of steps whose updates a batch misses: exactly n, `AtMost(n)`, or None, which is unbounded.
        accumulate: micro-batches per step.
        group: all trainers; each attaches its model to the same servers. By default this process alone.
        exchange: codecs of pulled rows and pushed gradients, without `gradient_scale`; fp32 by default.

    Raises:
        ValueError: the model has no such tables, or the servers have other tables under the same name.
    """
    if exchange.gradient_scale is not None:
        raise ValueError("pushed gradients have a scale per message, which the codec chooses; omit gradient_scale")
    group = RankGroup() if group is None else group
    is_synchronous = isinstance(staleness, int) and staleness == 0  # trainers lease rows, and apply the optimizer
    if group.size > 1 and isinstance(model, ParallelModel) and is_synchronous:
        model.shard_server_tables()
    if not (collections := collections_on_servers(model)):
        raise ValueError('the model has no tables on embedding servers; use TableConfig(placement="server") for them')
    for name, tables in collections.items():
        if exchange != EXACT and (isinstance(tables, ShardedServerTables) or (is_synchronous and group.size == 1)):
            raise ValueError(f"without staleness rows are transferred in their dtype, not as {exchange}; omit exchange")
        if isinstance(tables, ShardedServerTables):
            servers.clients.append(_attach_shards(tables, servers, accumulate, group, name))
        else:
            servers.clients.append(client := _client(tables, servers, staleness, accumulate, group, name, exchange))
            tables.attach(client)
    # No trainer pulls before all are attached, to the same owners of tablets.
    if len({*map(tuple, group.all_gather_object(servers.directory.addresses))}) > 1:
        raise ValueError("the trainers have other servers, or in another order; pass all trainers the same addresses")


def attach_for_reading(model: nn.Module, servers: Servers) -> None:
    """Let a model read the present rows of its tables from the servers of a run; it cannot be trained.

    Leased rows, as without staleness, are on the servers after a checkpoint or a `flush`.

    Raises:
        ValueError: the model has no tables on servers, or these servers lack them, or are in another order.
    """
    if not (collections := collections_on_servers(model)):
        raise ValueError("the model has no tables on embedding servers; omit servers=")
    shape = attrgetter("name", "num_embeddings", "embedding_dim")
    for name, tables in collections.items():
        parts = servers.directory.parts(name)
        replies = [connection.query_tensors("spec", {"collection": name}, [])[0] for connection in parts]
        numbers, shapes = [reply.get("server") for reply in replies], [*map(shape, tables.configs)]
        spec = CollectionSpec.from_json(replies[0]["spec"]) if "spec" in replies[0] else None
        if spec is None or numbers != [*range(len(parts))] or [*map(shape, spec.tables)] != shapes:
            raise ValueError(
                f"these {len(servers)} embedding servers do not have tables {join_names(s[0] for s in shapes)} of "
                f"{name!r}, or are in another order; pass the addresses in the original order, or omit servers= to "
                "read a checkpoint"
            )
        assert isinstance(tables, TableSet)  # the model is not sharded
        tables.attach(ReadOnlyClient(parts, name, spec))


def collections_on_servers(model: nn.Module) -> dict[str, TableSet | ShardedServerTables]:
    """Find the collections with tables on servers, by their paths in the model; "tables" if it is one itself."""
    collections = dict[str, TableSet | ShardedServerTables]()
    for path, module in (model.module if isinstance(model, ParallelModel) else model).named_modules():
        tables = module if isinstance(module, ShardedServerTables) else module.__dict__.get("table_set")
        if isinstance(tables, TableSet | ShardedServerTables) and tables.configs[0].placement == "server":
            collections[path or "tables"] = tables
    return collections


def _batches_in_flight(staleness: int, exact: bool, num_trainers: int, accumulate: int, is_cached: bool) -> int:
    """Return the number of batches from that of a lookup to the last one before its gradient, both included.

    With `AtMost`, other trainers may be `staleness` steps behind or ahead, and cached rows as many steps old.
    """
    others = 0 if exact else (num_trainers - 1) * (2 * staleness + 1)
    return (staleness + 1 + (is_cached and not exact) * staleness + others) * accumulate


def _client(
    tables: TableSet, servers: Servers, staleness: Any, accumulate: int, group: RankGroup, name: str,
    exchange: ExchangePrecision,
) -> CollectionClient:  # fmt: skip
    """Create the client of a collection; ValueError if a table may evict rows before their gradients arrive."""
    steps, exact = staleness_bound(staleness), isinstance(staleness, int)
    if steps is not None:
        is_cached = any(config.cache.rows is not None for config in tables.configs)
        max_batches = _batches_in_flight(steps, exact, group.size, accumulate, is_cached) - 1
        for config in tables.configs:
            if config.is_dynamic and config.eviction.protect <= max_batches:
                raise ValueError(
                    f"table {config.name!r}: gradients arrive up to {max_batches} batches after their rows were read, "
                    f"and rows of the last {config.eviction.protect} batches are protected; use "
                    f"EvictionConfig(protect={max_batches + 1})"
                )
    seeds = [table.seed for table in tables.tables]
    options = {"trainers": group.size, "staleness": steps, "exact": exact, "batches": accumulate}
    spec = _spec(tables, seeds, servers, group, exchange, **options)
    if spec.leases_rows:  # into the cache on the device
        return LeaseClient(servers.directory.parts(name), name, spec)
    if spec.optimizer["cow_clip"] is not None:
        raise ValueError(
            "cow_clip counts the occurrences of a row, which are not pushed to embedding servers; use staleness=0 "
            "(with several trainers: and sharded tables), or omit cow_clip"
        )
    caches = [config.cache if config.cache.rows is not None else None for config in tables.configs]
    return CollectionClient(servers.directory.parts(name), name, spec, group.rank, caches)


def _attach_shards(
    tables: ShardedServerTables, servers: Servers, accumulate: int, group: RankGroup, name: str
) -> ShardedLeases:
    """Attach sharded tables: each rank's shards are a collection on the servers."""
    ranges = tables.server_rows()
    options = {"trainers": 1, "staleness": 0, "exact": True, "batches": accumulate}
    spec = _spec(tables, tables.server_seeds, servers, group, EXACT, **options)
    shards = [(f"{name}@{group.rank}.{n}", _shard_spec(spec, rows)) for n, rows in enumerate(ranges)]
    local_clients = [LeaseClient(servers.directory.parts(shard[0]), *shard) for shard in shards]
    all_shards = [shard for rank_shards in group.all_gather_object(shards) for shard in rank_shards]
    client = ShardedLeases(servers.directory.parts(*dict(all_shards)), all_shards, local_clients, group)
    tables.attach(client, local_clients)
    return client


def _shard_spec(spec: CollectionSpec, rows: Mapping[int, tuple[int, int]]) -> CollectionSpec:
    """Restrict a spec to a shard: first row and number of rows by table."""
    shards: list[tuple[int, int] | None] = [(0, 0)] * len(spec.tables)
    partition_starts, num_parts = list(spec.partition_starts), len(spec.partition_starts[0])
    for table, (first_row, num_rows) in rows.items():
        shards[table] = first_row, num_rows
        if spec.tables[table].num_embeddings is None:
            partition_starts[table] = tuple(first_row + n for n in split_partitions(num_rows, num_parts, table))
    return replace(spec, partition_starts=tuple(partition_starts), shards=tuple(shards))


def _spec(
    tables: TableSet | ShardedServerTables, seeds: Sequence[int], servers: Servers, group: RankGroup,
    exchange: ExchangePrecision, **options: Any,
) -> CollectionSpec:  # fmt: skip
    """Describe a collection for servers; all trainers get the same spec."""
    if tables.optimizer is None:
        raise ValueError("embedding servers apply a fused optimizer; construct the collection with one")
    if -1 in seeds:  # created on the meta device
        seeds = [(config.seed ^ torch.initial_seed()) & (2**63 - 1) for config in tables.configs]
    pairs = zip(tables.configs, group.all_gather_object(seeds)[0], strict=True)
    specs = tuple(TableSpec.from_config(config, seed, tables.optimizer) for config, seed in pairs)
    num_parts = servers.directory.num_parts
    starts = tuple(split_partitions(spec.num_partitions, num_parts, index) for index, spec in enumerate(specs))
    options |= {"row_codec": exchange.forward, "gradient_codec": exchange.backward}
    options |= {"partition_starts": starts, "shards": (None,) * len(specs)}
    return CollectionSpec(specs, describe_optimizer(tables.optimizer), **options)


def split_partitions(partitions: int, servers: int, table: int) -> tuple[int, ...]:
    """Return the first partition of each server; tables with fewer partitions than servers are spread over them."""
    if partitions >= servers:
        return tuple(server * partitions // servers for server in range(servers))
    first = table % (servers - partitions + 1)
    return tuple(min(max(0, server - first), partitions) for server in range(servers))


def flush(model: nn.Module) -> None:
    """Apply all pushed gradients, and write back leased rows. All trainers call this, after the same step."""
    for tables in collections_on_servers(model).values():
        assert tables.service is not None
        tables.service.flush()


@dataclass(frozen=True, kw_only=True)
class ServersOptions(Options):
    """Tables on embedding servers.

    Args:
        servers: number of servers to start on this machine for this run; ray:4 to start 4 on a Ray cluster; or
            addresses of running servers, HOST:PORT, grpc://HOST:PORT or grpc+tls://HOST:PORT, separated by commas.
        server_tables: names of the tables on servers; all if not given.
        tablets: parts of each table, at least one per server, which can move to servers that join; none by default.
        staleness: steps whose updates a batch may miss.
        staleness_mode: whether a batch misses exactly these steps (reproducible), at most these, or any number
            (unbounded).
        server_log: write-ahead log of the servers that the run starts, for recovery: in the memory of trainers
            (memory), or a file in the run's folder that survives the process (disk) or a power loss (fsync).
        server_restart_timeout: seconds without an answer after which training fails, without the time to restart a
            process on this machine; 20 if not given, 60 on Ray.
        server_exchange: codec of rows pulled from servers, with a staleness of 1 or more.
        server_exchange_gradients: codec of gradients pushed to servers, with a staleness of 1 or more.
        server_certificate: TLS certificate of servers on Ray: a PEM file on their machines.
        server_key: TLS private key of servers on Ray: a PEM file on their machines.
    """

    servers: str | None = None
    server_tables: tuple[str, ...] = ()
    tablets: int | None = number(None, least=1)
    staleness: int = number(0, least=0)
    staleness_mode: Literal["exact", "at-most", "unbounded"] = "exact"
    server_log: Literal["memory", "disk", "fsync"] | None = None
    server_restart_timeout: float | None = number(None, least=1)
    server_exchange: CodecName = "fp32"
    server_exchange_gradients: CodecName = "fp32"
    server_certificate: Path | None = None
    server_key: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers is None and (unused := [f.name for f in fields(self) if getattr(self, f.name) != f.default]):
            raise ValueError(f"{join_names(unused)}: no effect without servers; set servers, too")
        if self.on_ray and self.num_started is None:
            raise ValueError(f"servers={self.servers}: expected the number of servers to start, for example ray:4")
        if self.servers is not None and self.num_started is None and self.server_log is not None:
            raise ValueError("server_log is for servers that the run starts; for addresses, set it on those servers")
        if self.num_started is not None and self.tablets is not None:
            raise ValueError("tablets are for running servers; set servers to their addresses, or omit tablets")
        if not self.on_ray and (self.server_certificate or self.server_key) is not None:
            raise ValueError("server_certificate and server_key are for servers on Ray: set servers, too, as ray:4")

    @property
    def on_ray(self) -> bool:
        """Return whether Ray starts the servers."""
        return (self.servers or "").partition(":")[0] == "ray"

    @property
    def num_started(self) -> int | None:
        """Number of servers that the run starts; None for running servers."""
        text = (self.servers or "").removeprefix("ray:")
        return int(text) if text.isdecimal() else None

    def trainer_options(self) -> dict[str, Any]:
        """Keyword arguments of `Trainer`."""
        staleness = {"exact": self.staleness, "at-most": AtMost(self.staleness), "unbounded": None}[self.staleness_mode]
        exchange = ExchangePrecision(self.server_exchange, self.server_exchange_gradients)
        return {"staleness": staleness, "server_exchange": exchange}

    def place(self, tables: Sequence[TableConfig], accumulate: int = 1) -> list[TableConfig]:
        """Set the placement of tables to "server" if there are servers: of `server_tables`, by default of all."""
        if self.servers is None:
            return list(tables)
        names = [table.name for table in tables]
        for name in self.server_tables:
            if name not in names:
                known = did_you_mean(name, names, f", only {join_names(names)}")
                raise ValueError(f"server_tables: unknown table {name!r}{known}")
        # Batches whose rows stay on the servers, at least 8 per step.
        num_trainers = dist.get_world_size() if dist.is_initialized() else 1
        most = _batches_in_flight(self.staleness, self.staleness_mode != "at-most", num_trainers, accumulate, True)
        protect = max((self.staleness + 1) * 8, most)
        placed = list(tables)
        for index, table in enumerate(tables):
            if table.name in (self.server_tables or names):
                eviction = replace(table.eviction, protect=protect) if table.is_dynamic else table.eviction
                cache = CacheConfig(table.cache.rows, policy=table.cache.policy)
                placed[index] = replace(table, placement="server", cache=cache, eviction=eviction)
        return placed
