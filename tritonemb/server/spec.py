"""Specs of tables and collections on servers, part of each snapshot, and the memory quota of a server for them."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tritonemb.layout import INDEX_BYTES, MAX_PARTITIONS, MIN_PARTITION_ROWS, partition_sizes
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import OPTIMIZERS, Custom, Optimizer
from tritonemb.server.transport import Values
from tritonemb.storage.store import Record, cpu_kernels, record_of
from tritonemb.types import AdmissionConfig, CacheConfig, EvictionConfig, TableConfig
from tritonemb.utils import Options

OverMemory = Literal["refuse", "spill"]
MIN_CACHED_SHARE = 0.001  # of a collection's rows; with fewer in memory it would only wait for the disk
# Per server: positions of ids of all tables, table by table, ascending, or None: all; and their numbers per table.
Routes = tuple[Sequence[Any], list[list[int]]]

# Names in files of earlier versions: operations of messages, and keys of records of clients, snapshots and collections.
_OLD_OPERATIONS = {"facts": "describe", "hold": "lease", "assign": "allocate", "move": "transfer"}
_OLD_KEYS = {"expected": "next_sequence", "answered": "replied", "undone": "in_progress", "held": "is_leased"}
_OLD_KEYS |= {"owners": "partition_starts", "parts": "shards", "rows_in": "row_codec", "gradients_in": "gradient_codec"}


def with_current_names(values: Values) -> Values:
    """Replace names of earlier versions in the values of a record."""
    values = {_OLD_KEYS.get(key, key): value for key, value in values.items()}
    return values | {"op": _OLD_OPERATIONS.get(values["op"], values["op"])} if "op" in values else values


@dataclass(frozen=True)
class TableSpec:
    """Table on servers, serializable as JSON. A static table is a dynamic one there, whose ids are row numbers."""

    name: str
    num_embeddings: int | None  # rows of a static table; None: a dynamic table
    embedding_dim: int
    dtype: str
    capacity: int  # maximum number of rows; rows of a static table are never evicted
    bound: float  # of initial values
    seed: int  # of initial values; a table that was loaded has another one
    row_bytes: int  # of a row with its optimizer states and its index entry
    eviction: Values
    admission: Values
    fallback_rows: int = 0

    @classmethod
    def from_config(cls, config: TableConfig, seed: int, optimizer: Optimizer) -> "TableSpec":
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
            config.fallback_rows,
        )  # fmt: skip

    @property
    def num_partitions(self) -> int:
        """Number of hash partitions of the table; each server has a range of them."""
        return partition_sizes(self.capacity)[0]

    @property
    def rows_per_partition(self) -> int:
        """Rows of a full partition, with its fallback rows."""
        num_partitions, _, num_rows = partition_sizes(self.capacity)
        return num_rows + -(-self.fallback_rows // num_partitions)

    def config(self, first: int, count: int, cache: CacheConfig | None) -> TableConfig:
        """Config of a server's partitions, in memory, or on disk with a cache."""
        table = TableConfig(
            self.name, None, self.embedding_dim, dtype=getattr(torch, self.dtype), capacity=self.capacity,
            init_bound=self.bound, eviction=EvictionConfig(**self.eviction),
            admission=AdmissionConfig(**self.admission), placement="device" if cache is None else "disk",
            cache=cache or CacheConfig(), fallback_rows=self.fallback_rows,
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
    """Collection on servers, serializable as JSON; identical on all trainers and servers."""

    tables: tuple[TableSpec, ...]  # all tables of the collection
    optimizer: Values  # see `describe_optimizer`
    trainers: int  # number of trainers
    staleness: int | None  # maximum number of steps whose updates a pull misses; None: unbounded
    exact: bool  # whether a pull misses exactly that number of steps
    batches: int  # micro-batches per step
    partition_starts: tuple[tuple[int, ...], ...]  # per table, the first partition of each server
    # Per table, (first, count) of a trainer's shard: partitions of a dynamic table, rows of a static one; None: all.
    shards: tuple[tuple[int, int] | None, ...]
    row_codec: str  # of pulled rows, see `ExchangePrecision`
    gradient_codec: str  # of pushed gradients

    @classmethod
    def from_json(cls, values: Values) -> "CollectionSpec":
        """Parse `asdict` of a spec. ValueError if its counts are invalid."""
        values = with_current_names(values)
        tables, starts = tuple(TableSpec(**table) for table in values["tables"]), values["partition_starts"]
        shards = tuple(shard and tuple(shard) for shard in values["shards"])
        optimizer = dict(values["optimizer"])
        if (mode := optimizer.pop("nonfinite", None)) is not None:  # a file from before "skip" was the default
            optimizer["on_nonfinite"] = "skip" if mode == "propagate" else mode
        optimizer = describe_optimizer(OPTIMIZERS[optimizer.pop("name")](**optimizer))  # options that a file may lack
        changes = {"tables": tables, "partition_starts": tuple(map(tuple, starts)), "shards": shards}
        spec = cls(**{**values, **changes, "optimizer": optimizer})
        if min(spec.trainers, spec.batches, 1 + (spec.staleness or 0)) < 1:
            raise ValueError(f"invalid collection of {spec.trainers} trainers with staleness {spec.staleness}")
        return spec

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Numbers of the tables in the collection, by name."""
        return {spec.name: number for number, spec in enumerate(self.tables)}

    @functools.cached_property
    def blocks(self) -> list[slice]:
        """Consecutive tables with rows of one width and dtype, which messages have in one tensor."""
        by_width = groupby(range(len(self.tables)), lambda n: (self.tables[n].embedding_dim, self.tables[n].dtype))
        blocks = [list(numbers) for _, numbers in by_width]
        return [slice(numbers[0], numbers[-1] + 1) for numbers in blocks]

    @functools.cached_property
    def records(self) -> list[Record]:
        """Records of rows with their optimizer states, of dynamic tables also with the id, by number of the table."""
        args = dict(self.optimizer)
        states = OPTIMIZERS[args.pop("name")](**args).states
        shapes = [(t.embedding_dim, getattr(torch, t.dtype), states, t.num_embeddings is None) for t in self.tables]
        distinct = {shape: record_of(*shape) for shape in shapes}
        return [distinct[shape] for shape in shapes]

    def record_blocks(self, numbers: Sequence[int]) -> list[slice]:
        """Consecutive tables among `numbers` with the same records, which messages have in one tensor."""
        changes = [n for n in range(1, len(numbers)) if self.records[numbers[n]] is not self.records[numbers[n - 1]]]
        bounds = [0, *changes, len(numbers)] if numbers else []
        return [slice(*pair) for pair in pairwise(bounds)]

    def record_shapes(
        self, numbers: Sequence[int], sizes: Sequence[int], blocks: Sequence[slice]
    ) -> list[tuple[str, list[int]]]:
        """Return dtypes and shapes of the records of blocks of tables `numbers`."""
        return [("uint8", [sum(sizes[b]), self.records[numbers[b.start]].num_bytes]) for b in blocks]

    @functools.cached_property
    def _routing(self) -> tuple[Tensor, Tensor]:
        """Arguments of `route_ids` for all tables: ids outside a trainer's shard are routed to no server."""
        tables, starts = list[tuple[int, ...]](), list[list[int]]()
        for number, table in enumerate(self.tables):
            first, count = self.shards[number] or (0, table.num_embeddings or 0)
            valid_ids = (-(2**63), 2**63 - 1) if table.num_embeddings is None else (first, first + count - 1)
            tables.append((table.num_partitions, *valid_ids))
            ranges = [self.partitions(number, server) for server in range(len(self.partition_starts[number]))]
            starts.append([*(first for first, _ in ranges), sum(ranges[-1])])
        return torch.tensor(tables), torch.tensor(starts)

    def route(self, ids: Tensor, sizes: Sequence[int], numbers: Sequence[int] | None = None) -> Routes:
        """Route ids to servers; `sizes` are their numbers in each of the tables `numbers`, all by default."""
        order, counts = cpu_kernels("row_cache").route_ids(ids, sizes, *self._routing_of(numbers))
        return order.split(counts.sum(1).tolist()), counts.tolist()

    def owns(self, server: int, ids: Tensor, sizes: Sequence[int], numbers: Sequence[int] | None = None) -> bool:
        """Return whether all ids are routed to a server; for other arguments see `route`."""
        return bool(cpu_kernels("row_cache").owns_ids(ids, sizes, *self._routing_of(numbers), server))

    def _routing_of(self, numbers: Sequence[int] | None) -> Iterable[Tensor]:
        is_whole = numbers is None or [*numbers] == [*range(len(self.tables))]
        return self._routing if is_whole else [tensor[list(numbers or ())] for tensor in self._routing]

    @property
    def leases_rows(self) -> bool:
        """Return whether the trainer leases rows with their optimizer states, and applies the optimizer itself."""
        return self.exact and self.staleness == 0 and self.trainers == 1

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
            rows, shard = self.partitions(number, server)[1] * table.rows_per_partition, self.shards[number]
            if shard is not None and table.num_embeddings is not None:
                rows = rows * shard[1] // table.num_embeddings
            total += rows * table.row_bytes
        return total


@dataclass(frozen=True)
class MemoryQuota(Options):
    """Bytes of full tables, reserved by collection; see `EmbeddingServer`."""

    memory: float | None
    over_memory: OverMemory
    folder: Path | None  # of the rows on disk
    reserved_bytes: dict[str, float] = field(default_factory=dict)

    def reserve(self, server_name: str, collection: str, spec: CollectionSpec, server: int) -> CacheConfig | None:
        """Reserve memory for a collection; return None if it fits, else the cache of its tables on disk.

        ValueError if it is refused.
        """
        needed_bytes = spec.num_bytes(server)
        free_bytes = needed_bytes if self.memory is None else self.memory - sum(self.reserved_bytes.values())
        if needed_bytes > free_bytes and (self.over_memory == "refuse" or free_bytes < needed_bytes * MIN_CACHED_SHARE):
            raise ValueError(
                f"embedding server {server_name} has {free_bytes:,.0f} bytes left for tables, and those of "
                f'{collection!r} need {needed_bytes:,} when full: set more memory or over_memory="spill", start more '
                "servers, or reduce the tables"
            )
        self.reserved_bytes[collection] = min(needed_bytes, free_bytes)
        if needed_bytes <= free_bytes:
            return None
        return CacheConfig(share=free_bytes / needed_bytes, folder=self.folder)
