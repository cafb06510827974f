"""Options of tables on embedding servers in a training run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.server.attach import AtMost
from tritonemb.types import CacheConfig, CodecName, TableConfig
from tritonemb.utils import Options, did_you_mean, join_names, number


@dataclass(frozen=True, kw_only=True)
class ServersOptions(Options):
    """Tables on embedding servers.

    Args:
        servers: number of servers to start on this machine for this run; ray:4 to start 4 on a Ray cluster; or
            addresses of running servers, HOST:PORT, grpc://HOST:PORT or grpc+tls://HOST:PORT, separated by commas.
        server_tables: names of the tables on servers; all if not given.
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

    def place(self, tables: Sequence[TableConfig]) -> list[TableConfig]:
        """Set the placement of tables to "server" if there are servers: of `server_tables`, by default of all."""
        if self.servers is None:
            return list(tables)
        names = [table.name for table in tables]
        for name in self.server_tables:
            if name not in names:
                known = did_you_mean(name, names, f", only {join_names(names)}")
                raise ValueError(f"server_tables: unknown table {name!r}{known}")
        # Batches whose rows stay on the servers; 8 per step is enough for accumulated batches and several trainers.
        protect = (self.staleness + 1) * 8
        placed = list(tables)
        for index, table in enumerate(tables):
            if table.name in (self.server_tables or names):
                eviction = replace(table.eviction, protect=protect) if table.is_dynamic else table.eviction
                cache = CacheConfig(table.cache.rows, policy=table.cache.policy)
                placed[index] = replace(table, placement="server", cache=cache, eviction=eviction)
        return placed
