"""Specs of tables and collections on servers, part of each snapshot, and the memory quota of a server for them."""

import dataclasses
import functools
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from tritonemb.layout import INDEX_BYTES, MAX_PARTITIONS, MIN_PARTITION_ROWS, partition_sizes
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import Custom, Optimizer
from tritonemb.server.records import with_current_names
from tritonemb.server.transport import Values
from tritonemb.types import AdmissionConfig, CacheConfig, EvictionConfig, TableConfig

OverMemory = Literal["refuse", "spill"]
MIN_CACHED_SHARE = 0.001  # of a collection's rows; with fewer in memory it would only wait for the disk


@dataclass(frozen=True)
class TableSpec:
    """Table on servers, serializable as JSON. A static table is a dynamic table there, whose ids are its row numbers.

    Args:
        num_embeddings: rows of a static table; None: a dynamic table.
        capacity: maximum number of rows; rows of a static table are never evicted.
        bound, seed: distribution of initial values; a table that was loaded has another seed.
        row_bytes: bytes of a row with its optimizer states and its index entry.
    """

    name: str
    num_embeddings: int | None
    embedding_dim: int
    dtype: str
    capacity: int
    bound: float
    seed: int
    row_bytes: int
    eviction: Values
    admission: Values

    @classmethod
    def from_config(cls, config: TableConfig, seed: int, optimizer: Optimizer) -> "TableSpec":
        """Describe a table of a collection for servers."""
        row_bytes = config.embedding_dim * config.dtype.itemsize + INDEX_BYTES
        row_bytes += sum(4 * (config.embedding_dim if spec.per_element else 1) for spec in optimizer.states)
        if config.is_dynamic:
            capacity = config.capacity or max(1, (config.capacity_bytes or 0) // row_bytes)
        else:
            # Rows are hashed to partitions: eight standard deviations above the mean, so that none overflows.
            capacity = config.num_embeddings
            if (partitions := min(MAX_PARTITIONS, capacity // MIN_PARTITION_ROWS)) > 1:
                capacity += math.ceil(8 * math.sqrt(capacity * partitions))
        return cls(
            config.name, config.num_embeddings, config.embedding_dim, str(config.dtype).removeprefix("torch."),
            capacity, config.bound, seed, row_bytes, asdict(config.eviction), asdict(config.admission),
        )  # fmt: skip

    @property
    def num_partitions(self) -> int:
        """Number of hash partitions of the table; each server has a range of them."""
        return partition_sizes(self.capacity)[0]

    def config(self, first: int, count: int, cache: CacheConfig | None) -> TableConfig:
        """Config of a server's partitions, in memory, or on disk with a cache."""
        table = TableConfig(
            self.name, None, self.embedding_dim, dtype=getattr(torch, self.dtype), capacity=self.capacity,
            init_bound=self.bound, eviction=EvictionConfig(**self.eviction),
            admission=AdmissionConfig(**self.admission), placement="device" if cache is None else "disk",
            cache=cache or CacheConfig(),
        )  # fmt: skip
        return table.shard(self.name, (first, count), (0, self.embedding_dim), [self.name])

    def initial_values(self, ids: Tensor, seed: int | None = None) -> Tensor:
        """Return initial values `[n, embedding_dim]` of ids, drawn with `seed`, or with the seed of this spec."""
        values = torch.empty(ids.numel(), self.embedding_dim, dtype=getattr(torch, self.dtype))
        fill_initial_(values, self.seed if seed is None else seed, self.bound, rows=ids)
        return values


def describe_optimizer(optimizer: Optimizer) -> Values:
    """Convert an optimizer to JSON values; ValueError for `Custom`, which has a Python function."""
    if isinstance(optimizer, Custom):
        raise ValueError(
            "embedding servers apply the optimizer, and cannot run the function of a Custom one; use another"
        )
    return {"name": optimizer.name, **{f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)}}


@dataclass(frozen=True)
class CollectionSpec:
    """Collection on servers, serializable as JSON; identical on all trainers and servers.

    Args:
        tables: all tables of the collection.
        optimizer: see `describe_optimizer`.
        trainers: number of trainers.
        staleness: maximum number of steps whose updates a pull misses; None: unbounded.
        exact: whether a pull misses exactly that number of steps.
        batches: micro-batches per step.
        partition_starts: per table, the first partition of each server; a server's range may be empty.
        shards: per table, (first, count) of a trainer's shard: partitions of a dynamic table, rows of a static one;
            None: the complete table.
        row_codec, gradient_codec: codecs of pulled rows and pushed gradients, see `ExchangePrecision`.
    """

    tables: tuple[TableSpec, ...]
    optimizer: Values
    trainers: int
    staleness: int | None
    exact: bool
    batches: int
    partition_starts: tuple[tuple[int, ...], ...]
    shards: tuple[tuple[int, int] | None, ...]
    row_codec: str
    gradient_codec: str

    @classmethod
    def from_json(cls, values: Values) -> "CollectionSpec":
        """Parse `asdict` of a spec. ValueError if its counts are invalid."""
        values = with_current_names(values)
        tables, starts = tuple(TableSpec(**table) for table in values["tables"]), values["partition_starts"]
        shards = tuple(shard and tuple(shard) for shard in values["shards"])
        optimizer = dict(values["optimizer"])
        if (mode := optimizer.pop("nonfinite", None)) is not None:  # a file from before "skip" was the default
            optimizer["on_nonfinite"] = "skip" if mode == "propagate" else mode
        changes = {"tables": tables, "partition_starts": tuple(map(tuple, starts)), "shards": shards}
        spec = cls(**{**values, **changes, "optimizer": optimizer})
        if min(spec.trainers, spec.batches, 1 + (spec.staleness or 0)) < 1:
            raise ValueError(f"invalid collection of {spec.trainers} trainers with staleness {spec.staleness}")
        return spec

    def number(self, table: str) -> int:
        """Number of a table in the collection, by name."""
        return self._numbers[table]

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {spec.name: number for number, spec in enumerate(self.tables)}

    @property
    def leases_rows(self) -> bool:
        """Return whether the trainer leases rows with their optimizer states, and applies the optimizer itself."""
        return self.exact and self.staleness == 0 and self.trainers == 1

    @functools.cached_property
    def has_admission(self) -> bool:
        """Return whether a table may refuse to admit an id."""
        return any(AdmissionConfig(**table.admission) != AdmissionConfig() for table in self.tables)

    def partitions(self, table: int, server: int) -> tuple[int, int]:
        """First partition and number of partitions of a table on a server."""
        end, shard = self.tables[table].num_partitions, self.shards[table]
        if shard is not None:
            end = sum(shard) if self.tables[table].num_embeddings is None else end * (shard[1] > 0)
        ends = [*(min(first, end) for first in self.partition_starts[table]), end]
        return ends[server], ends[server + 1] - ends[server]

    def tables_on(self, server: int) -> list[int]:
        """Numbers of the tables that have partitions on a server, ascending."""
        return [number for number in range(len(self.tables)) if self.partitions(number, server)[1]]

    def num_bytes(self, server: int) -> int:
        """Bytes of all rows on a server when its tables are full."""
        total = 0
        for number, table in enumerate(self.tables):
            rows, shard = self.partitions(number, server)[1] * partition_sizes(table.capacity)[2], self.shards[number]
            if shard is not None and table.num_embeddings is not None:
                rows = rows * shard[1] // table.num_embeddings
            total += rows * table.row_bytes
        return total


class MemoryQuota:
    """Bytes of full tables, reserved by collection; see `EmbeddingServer` for `memory` and `over_memory`.

    Args:
        folder: folder of the rows on disk; None: a temporary one.
    """

    def __init__(self, memory: float | None, over_memory: OverMemory, folder: Path | None) -> None:
        if over_memory not in get_args(OverMemory):
            raise ValueError(f"over_memory must be one of {get_args(OverMemory)}, got {over_memory!r}")
        self._memory, self._over_memory, self._folder = memory, over_memory, folder
        self._reserved_bytes: dict[str, float] = {}

    def reserve(self, server_name: str, collection: str, spec: CollectionSpec, server: int) -> CacheConfig | None:
        """Reserve memory for a collection; return None if it fits, else the cache of its tables on disk.

        ValueError if it is refused.
        """
        needed_bytes = spec.num_bytes(server)
        free_bytes = needed_bytes if self._memory is None else self._memory - sum(self._reserved_bytes.values())
        if needed_bytes > free_bytes and (
            self._over_memory == "refuse" or free_bytes < needed_bytes * MIN_CACHED_SHARE
        ):
            raise ValueError(
                f"embedding server {server_name} has {free_bytes:,.0f} bytes left for tables, and those of "
                f'{collection!r} need {needed_bytes:,} when full: set more memory or over_memory="spill", start more '
                "servers, or reduce the tables"
            )
        self._reserved_bytes[collection] = min(needed_bytes, free_bytes)
        if needed_bytes <= free_bytes:
            return None
        return CacheConfig(share=free_bytes / needed_bytes, folder=self._folder)
