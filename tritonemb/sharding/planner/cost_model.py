"""Cost model: the memory of a shard, and the time that a training step spends on it, by stage.

Each stage is `latency + ids / rate + bytes / bandwidth` with the rates of a `Topology`. Symbols: a shard has a share σ
of its table's ids, `w` columns of `e` bytes, and `s` bytes of optimizer states per row. A step looks up `n` ids of the
table, `d` of them distinct, in `b` bags (or `d` rows, if unpooled), over the samples of a copy of the tables.

    id exchange      σ·n·4 + b·4 bytes over the network `ids_over`; its host receives σ·n ids, and sends a rank's ids
    grouping         σ·n ids
    lookup           σ·n ids; σ·n·w·e + b·w·4 bytes
    output exchange  b·w elements in the codec's bytes, forward and backward, to ranks of other nodes or of this one
    update           σ·n·w·4 + d·2·(w·e + s) bytes
    misses           2·(w·e + s) bytes per distinct row that is not cached
    replicated       rows and summed gradients that replicas gather; sums over whole rows of column-wise tables

A rank's load is the sum of its stages, and of the latencies that each step waits for: of each message and launch that
any table needs, once for all tables. A step takes as long as the slowest rank. It takes longer if different ranks are
slow in different stages, because each exchange synchronizes the ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np

from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.layout import INDEX_BYTES, rows_to_shard
from tritonemb.optimizers import Optimizer, RowWiseAdagrad
from tritonemb.sharding.plan import ShardingPlan
from tritonemb.sharding.planner.statistics import Array, TableStats
from tritonemb.sharding.planner.topology import Topology
from tritonemb.types import CODECS, Placement, TableConfig
from tritonemb.utils import format_bytes

STAGES = ("id exchange", "grouping", "lookup", "output exchange", "update", "misses", "replicated")
IDS, GROUPING, LOOKUP, OUTPUTS, UPDATE, MISSES, REPLICATED = range(len(STAGES))
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
DEVICE, HOST, DISK, SERVER = range(len(PLACEMENTS))
DIRECT, HIERARCHICAL, REPLICAS, SERVERS = range(4)  # exchange schemes of pooled vectors; the last two need none
CACHED = (0.0, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0)  # cached shares of a table's rows; misses are interpolated between them
CACHE_BYTES = 40.0  # per cached row: tag, clock, flags, and its part of the transfer buffers
SECTOR_BYTES, SECTOR_PAYLOAD = 512, 496  # of the file of a table on disk: in all, and of records
PREFETCHED = 2  # batches in flight per rank
PINNED = 3  # batches whose distinct rows a cache has slots for, at least
RUNTIME_BYTES = 120e6  # per rank: code loaded by the first step, allocators, connections
# Cost of a distinct row, in ids, as measured on CPUs: its sums are exchanged, matched and applied where ranks have
# other columns of it, or copies.
WHOLE_ROW_IDS, GATHERED_IDS = 6, 3
DENSE_BYTES = 16  # per parameter of the other layers: weight, gradient, and two states of Adam
# Per element; the scale and offset of a row are 8 bytes over an assumed 80 columns.
_CODEC_BYTES = {name: codec.dtype.itemsize + codec.row_wise * 0.1 for name, codec in CODECS.items()}


class Shards(NamedTuple):
    """Shards as arrays `[n]`."""

    table: Array  # int64: its number
    id_share: Array  # of the table's ids
    rows: Array
    width: Array  # columns
    blocks: Array  # column blocks of the table
    scheme: Array
    placement: Array
    cached_rows: Array  # on the device, of a table on another tier
    host_rows: Array  # in host memory, of a table on disk


class Prediction(NamedTuple):
    """Predicted seconds and bytes of a plan. `load` is the slowest rank's sum of stages and latencies."""

    seconds: Array  # [ranks, stages]
    by_table: Array  # [tables]: seconds on all ranks
    hbm: Array  # [ranks], bytes
    host: Array  # [nodes], bytes
    disk: Array  # [nodes], bytes
    server: float  # bytes of all servers
    latency: float  # seconds per step
    dense: float  # seconds per step of the other layers

    @property
    def load(self) -> float:
        return float(self.seconds.sum(1).max()) + self.latency

    @property
    def step(self) -> float:
        return self.load + self.dense

    @property
    def imbalance(self) -> float:
        """Ratio of the slowest rank's load to the mean."""
        load = self.seconds.sum(1)
        return float(load.max() / load.mean()) if load.any() else 1.0


@dataclass(eq=False, repr=False)
class CostModel:
    """Cost model of tables on a topology. A copy of the tables has `ranks` ranks on `nodes` nodes, `local` per node.

    Args:
        batch_size: samples per rank.
        optimizer: of the tables, for its states.
        stats: by table; other tables have one id per sample and feature, uniform.
        exchange: codecs of the output exchange.
        copies: of the tables.
        dense_parameters: of the other layers, on each rank.
        activation_bytes: of the other layers, at their peak, on each rank.
        epoch_samples: samples of all ranks per epoch, for its duration and price.

    Raises:
        ValueError: statistics of an unknown table.
    """

    tables: Sequence[TableConfig]
    topology: Topology
    batch_size: int
    optimizer: Optimizer = field(default_factory=RowWiseAdagrad)
    stats: Mapping[str, TableStats] = field(default_factory=dict)
    exchange: ExchangePrecision = field(default_factory=ExchangePrecision)
    copies: int = 1
    dense_parameters: int = 0
    activation_bytes: float = 0.0
    epoch_samples: int = 0

    def __post_init__(self) -> None:
        tables, names, job = self.tables, [table.name for table in self.tables], self.topology.world_size
        if unknown := [name for name in self.stats if name not in names]:
            raise ValueError(f"statistics of an unknown table {unknown[0]!r}; the tables are {names[:20]}")
        self.stats = {t.name: TableStats(len(t.feature_names)) for t in tables} | dict(self.stats)
        # Ranks of a copy of the tables.
        self.ranks = job // self.copies
        self.local = min(self.topology.local_world_size, self.ranks)
        # A rank is as slow, and has as little memory, as those with its shards in any copy.
        shape, alike, top = (self.copies, self.ranks), np.ones(job), self.topology
        self.rank_speed = np.reshape(top.rank_speed or alike, shape).min(0)
        self.rank_hbm = top.hbm * np.reshape(top.rank_memory or alike, shape).min(0)
        self.nodes = self.ranks // self.local
        # Arrays [tables].
        self.rows = np.array([float(table.max_rows) for table in tables])
        self.dims = np.array([table.embedding_dim for table in tables], dtype=np.int64)
        self.itemsize = np.array([table.row_dtype.itemsize for table in tables], dtype=np.float64)  # on the device
        self.reduction = self.itemsize - [table.dtype.itemsize for table in tables]  # of stored elements, in bytes
        self.dynamic = np.array([table.is_dynamic for table in tables], dtype=bool)
        self.unpooled = np.array([table.pooling == "none" for table in tables], dtype=bool)
        self.features = np.array([len(table.feature_names) for table in tables], dtype=np.float64)
        pooling_factors = np.array([self.stats[name].pooling_factor for name in names])
        self.ids = self.batch_size * pooling_factors  # per rank
        self.sizes = self.rows * self.record_bytes(np.arange(len(tables)), self.dims)  # bytes, with optimizer states
        # Distinct ids in the samples of a rank, of a copy and of the job; and misses by the cached share of the rows.
        counts, self._misses = np.zeros((3, len(tables))), np.zeros((len(tables), len(CACHED)))
        for n, (name, rows, ids) in enumerate(zip(names, self.rows.tolist(), self.ids.tolist(), strict=True)):
            stats = self.stats[name]
            counts[:, n] = [stats.distinct(rows, ids * ranks) for ranks in (1, self.ranks, job)]
            if stats.hotness:
                self._misses[n] = [stats.misses(rows, ids * self.ranks, share * rows) for share in CACHED]
            else:
                self._misses[n] = counts[1, n] * (1 - np.array(CACHED))
        self.distinct_of_rank, self.distinct, self.distinct_of_job = counts

    def record_bytes(self, table: Array, width: Array) -> Array:
        """Return the stored bytes of a row of `width` columns with its optimizer states."""
        per_element = [state.per_element for state in self.optimizer.states]
        num_states = sum(per_element) * width + len(per_element) - sum(per_element)
        return width * (self.itemsize - self.reduction)[table] + 4.0 * (num_states + (self.reduction > 0)[table])

    def min_cached_rows(self, table: Array, id_share: Array, rows: Array) -> Array:
        """Return the rows that a shard's cache needs slots for: those of trained and prefetched batches."""
        return np.minimum(rows, PINNED * self._distinct(table, id_share, rows))

    def _distinct(self, table: Array, id_share: Array, rows: Array) -> Array:
        """Return the distinct ids of a step in shards."""
        part = (id_share + rows / np.maximum(self.rows[table], 1)) / 2  # hot rows are few, and used often
        return np.minimum(self.distinct[table] * part, rows)

    def costs(self, shards: Shards) -> tuple[Array, Array]:
        """Return costs of shards: seconds `[n, stages]`; bytes `[n, placements]`, for servers a rank's part."""
        top, table, ranks, world = self.topology, shards.table, self.ranks, self.topology.world_size
        replicated, off_device = shards.scheme == REPLICAS, shards.placement != DEVICE
        on_disk = shards.placement == DISK
        w, e, unpooled = shards.width.astype(np.float64), self.itemsize[table], self.unpooled[table]
        # Ids, bags and distinct rows of a step.
        record = self.record_bytes(table, w)
        slot = record + w * self.reduction[table]
        ids = np.where(replicated, self.ids[table], self.ids[table] * ranks * shards.id_share)
        batch = np.where(replicated, self.batch_size, self.batch_size * ranks)
        bags = np.where(unpooled, ids, batch * self.features[table])
        distinct = self._distinct(table, shards.id_share, shards.rows)
        distinct = np.where(replicated, self.distinct_of_rank[table], distinct)
        distinct_of_replicas = np.where(replicated, self.distinct_of_job[table], distinct)
        copies = np.where(replicated, world, self.copies)
        gathered = copies * distinct  # summed rows that a rank updates with
        # ID exchange and output exchange.
        seconds, id_bytes = np.zeros((len(table), len(STAGES))), np.where(shards.rows < 2**31, 4, 8)
        if ranks > 1:
            received = ids * id_bytes + 4 * np.where(unpooled, 0, bags)
            control = top.control_bandwidth / (self.local if self.nodes > 1 else 1)
            over_device = ~off_device & (top.ids_over == "device")
            wire = np.where(over_device, self._sent(received, False), received / control)
            seconds[:, IDS] = np.where(replicated, 0, wire + ids / top.routing_rate)
            part = (shards.id_share + shards.rows / np.maximum(self.rows[table], 1)) / 2
            vectors = np.where(unpooled, np.minimum(ids, ranks * self.distinct_of_rank[table] * part), bags)
            elements = vectors * w * (_CODEC_BYTES[self.exchange.forward] + _CODEC_BYTES[self.exchange.backward])
            seconds[:, OUTPUTS] = np.where(replicated, 0, self._sent(elements, shards.scheme == HIERARCHICAL))
        # Grouping, lookup and update.
        seconds[:, GROUPING] = ids / top.id_rate
        seconds[:, LOOKUP] = ids / top.lookup_rate + (ids * w * e + bags * w * 4) / top.lookup_bandwidth
        seconds[:, UPDATE] = (ids * w * 4 + distinct_of_replicas * 2 * slot) / top.update_bandwidth
        # Replicated updates, and sums over whole rows.
        across_nodes = (top.nodes > 1) & (replicated | (self.copies > 1))
        wire = (gathered - distinct) * (id_bytes + w * _CODEC_BYTES[self.exchange.backward])
        wire /= np.where(across_nodes, top.inter_bandwidth, top.intra_bandwidth)
        added = GATHERED_IDS * gathered / top.id_rate
        seconds[:, REPLICATED] = np.where(copies > 1, wire + added + gathered * w * 4 / top.update_bandwidth, 0)
        if self.optimizer.reads_whole_rows:
            sums = self._sent(distinct * 4 * (shards.blocks - 1), False) + WHOLE_ROW_IDS * distinct / top.id_rate
            seconds[:, REPLICATED] += np.where(shards.blocks > 1, sums, 0)
        # Cache misses, and the disk reads among them.
        share = np.divide(shards.cached_rows, np.maximum(shards.rows, 1))
        host_or_device = np.minimum(1, share + np.divide(shards.host_rows, np.maximum(shards.rows, 1)))
        part = distinct / np.maximum(self.distinct[table], 1e-9)
        missed, from_disk = self._missed(table, share) * part, self._missed(table, host_or_device) * part
        moved = np.where(off_device, 2 * missed * record / top.host_bandwidth, 0)
        moved += np.where(on_disk, 2 * from_disk * record / (top.disk_bandwidth / self.local), 0)
        replica_factor = np.minimum(ranks, distinct_of_replicas / np.maximum(distinct, 1e-9))
        seconds[:, MISSES] = np.where(replicated & off_device, moved * replica_factor, moved)
        # Memory.
        buffers = PREFETCHED * ids * 12 + 2 * bags * w * 4 + np.where(copies > 1, gathered * w * 4, 0)
        index = np.where(self.dynamic[table], INDEX_BYTES * shards.rows, 0)
        hbm = np.where(off_device, shards.cached_rows * (slot + CACHE_BYTES), shards.rows * record) + index + buffers
        host = np.select([shards.placement == HOST, on_disk], [shards.rows * record, shards.host_rows * record], 0)
        sectors = np.ceil((record + 1) / SECTOR_PAYLOAD) / np.maximum(1, SECTOR_PAYLOAD // (record + 1))  # per row
        disk = np.where(on_disk, shards.rows * sectors * SECTOR_BYTES, 0)
        on_server = shards.placement == SERVER
        if on_server.any():  # every rank pulls and pushes the distinct rows of its own samples
            rows, servers = self.distinct_of_rank[table], max(1, top.servers)
            outputs = self.batch_size * self.features[table] * shards.width * 4
            wire = rows * (8 + 8 * shards.width) / (top.control_bandwidth / top.local_world_size)
            sent = rows * world * 8 * shards.width / (servers * top.server_bandwidth)
            pulled = np.maximum(2 * rows * world / (servers * top.server_rows), sent)
            lookup = (self.ids[table] * shards.width * e + outputs) / top.lookup_bandwidth
            seconds[on_server] = 0
            seconds[on_server, LOOKUP] = lookup[on_server]
            seconds[on_server, MISSES] = (wire + pulled)[on_server]
            hbm = np.where(on_server, rows * shards.width * 4 * PREFETCHED + 2 * outputs, hbm)
        server = self.rows[table] * (self.record_bytes(table, shards.width) + INDEX_BYTES) / ranks
        return seconds, np.stack([hbm, host, disk, np.where(on_server, server, 0)], 1)

    def _sent(self, sent: Array, hierarchical: Any) -> Array:
        """Return seconds to send bytes to all ranks in equal parts; hierarchical: reduced in the node first."""
        top, ranks, local = self.topology, self.ranks, self.local
        in_node, across_nodes = sent * (local - 1) / ranks, sent * (ranks - local) / ranks
        direct = np.maximum(in_node / top.intra_bandwidth, across_nodes / top.inter_bandwidth)
        reduced = sent * (local - 1) / local / top.intra_bandwidth
        reduced = reduced + sent / local * (self.nodes - 1) / self.nodes / top.inter_bandwidth
        return np.where(hierarchical, reduced, direct)

    def _missed(self, table: Array, share: Array) -> Array:
        """Return the distinct rows of a batch that miss a cache of a share of the table's rows, interpolated."""
        upper = np.clip(np.searchsorted(CACHED, share, side="left"), 1, len(CACHED) - 1)
        low, high = np.take(CACHED, upper - 1), np.take(CACHED, upper)
        part = np.clip((share - low) / (high - low), 0, 1)
        return self._misses[table, upper - 1] * (1 - part) + self._misses[table, upper] * part

    def common_seconds(self, table: Array, blocks: Any, scheme: Any) -> Array:
        """Return seconds that a table costs every rank, for any shards: its host sends ids once per column block."""
        sends = (self.ranks > 1) & (scheme < REPLICAS)
        return np.where(sends, self.ids[table] * blocks / self.topology.routing_rate, 0)

    @property
    def reserved(self) -> dict[str, float]:
        """Device memory of every rank that is not for tables, by purpose."""
        vectors = np.where(self.unpooled, self.ids, self.batch_size * self.features) * self.dims
        batches = f"batches of {self.batch_size:,} samples in flight"
        return {
            "the runtime": RUNTIME_BYTES,
            batches: float(PREFETCHED * 12 * self.ids.sum() + 2 * 4 * vectors.sum()),
            "other layers": float(DENSE_BYTES * self.dense_parameters),
            "activations": self.activation_bytes,
        }

    @property
    def reserved_bytes(self) -> float:
        """Sum of `reserved`."""
        return sum(self.reserved.values())

    @property
    def budgets(self) -> Array:
        """Bytes for tables: device memory of the largest rank, host memory and disk of a node, memory of servers."""
        top = self.topology
        hbm = self.rank_hbm.max() - self.reserved_bytes
        return np.array([hbm, top.host, top.disk, top.servers * top.server_memory])

    def describe_memory(self) -> str:
        """Describe the device memory per rank for tables, and what uses the remainder."""
        hbm, by_size = float(self.rank_hbm.max()), sorted(self.reserved.items(), key=lambda item: -item[1])
        used = ", ".join(f"{format_bytes(size)} for {name}" for name, size in by_size if size)
        return f"{format_bytes(max(0.0, hbm - self.reserved_bytes))} per rank: {format_bytes(hbm)} less {used}"

    def shards(self, plan: ShardingPlan) -> tuple[Shards, Array]:
        """Return all shards of a plan, and the rank of each."""
        rows_of_shards: list[tuple[Any, ...]] = []
        for number, table in enumerate(self.tables):
            shards, cache, table_rows = plan.shards(table), plan.apply(table).cache, self.rows[number]
            tier, num_units = PLACEMENTS.index(plan.placement(table.name).placement), rows_to_shard(table)
            if tier == SERVER:
                values = (number, 1.0, table_rows, table.embedding_dim, 1, SERVERS, SERVER, 0, 0)
                rows_of_shards += [(rank, *values) for rank in range(self.ranks)]
                continue
            blocks, sharding = len({shard.first_column for shard in shards}), plan.tables[table.name]
            in_node = sharding.reduces_in_node and table.pooling != "none" and self.nodes > 1
            scheme = REPLICAS if sharding.is_replicated else HIERARCHICAL if in_node else DIRECT
            is_uniform = table.is_dynamic or not self.stats[table.name].row_share
            for shard in shards:
                first, rows = table_rows * shard.first_row / num_units, table_rows * shard.num_rows / num_units
                share = rows / table_rows if is_uniform else self.stats[table.name].share(first, rows, table_rows)
                cached = 0 if tier == DEVICE else min(rows, cache.num_device_rows(math.ceil(rows)))
                on_host = 0 if tier != DISK else min(rows - cached, cache.num_host_rows(math.ceil(rows)) or 0)
                values = (number, share, rows, shard.num_columns, blocks, scheme, tier, cached, on_host)
                rows_of_shards.append((shard.rank, *values))
        rank, *columns = (np.array(column) for column in zip(*rows_of_shards, strict=True))
        return Shards(*columns), rank

    def predict(self, plan: ShardingPlan) -> Prediction:
        """Predict the time and memory of a plan. ValueError if the plan is for other ranks or tables."""
        if (plan.world_size, plan.copies) != (self.ranks, self.copies):
            raise ValueError(
                f"the plan is for {plan.world_size} ranks and {plan.copies} copies of the tables, the topology has "
                f"{self.ranks} and {self.copies}"
            )
        plan.require_tables([table.name for table in self.tables])
        # Sum the costs of shards by rank and node.
        shards, rank = self.shards(plan)
        shard_seconds, memory = self.costs(shards)
        seconds, hbm = np.zeros((self.ranks, len(STAGES))), np.full(self.ranks, self.reserved_bytes)
        np.add.at(seconds, rank, shard_seconds)
        np.add.at(hbm, rank, memory[:, DEVICE])
        first = np.unique(shards.table, return_index=True)[1]
        common = self.common_seconds(*(values[first] for values in (shards.table, shards.blocks, shards.scheme)))
        seconds[:, IDS] += sum(common.tolist())
        seconds /= self.rank_speed[:, None]
        host, disk = (np.bincount(rank // self.local, memory[:, tier], self.nodes) for tier in (HOST, DISK))
        latency = float(self.latencies @ self.waits(shards.scheme, shards.placement).any(0))
        # Other layers: compute, and a ring all-reduce of their gradients; between nodes it uses all network cards.
        top, parameters = self.topology, self.dense_parameters
        ring = min(top.intra_bandwidth, top.inter_bandwidth * top.local_world_size if top.nodes > 1 else math.inf)
        part = 2 * (top.world_size - 1) / top.world_size
        dense = 6.0 * parameters * self.batch_size / top.flops + 4 * parameters * part / ring
        by_table = np.bincount(shards.table, shard_seconds.sum(1), len(self.tables))
        return Prediction(seconds, by_table, hbm, host, disk, float(memory[:, SERVER].sum()), latency, dense)

    def waits(self, scheme: Any, placement: Array) -> Array:
        """Return which of the `latencies` tables with these shards wait for: bool `[n, latencies]`."""
        schemes, on_disk = [scheme == value for value in range(4)], placement == DISK
        return np.stack([scheme < REPLICAS, *schemes, on_disk | (placement == HOST), on_disk], -1)

    @property
    def latencies(self) -> Array:
        """Seconds of the ID exchange; of lookup, update and messages of each scheme; of servers; of host and disk."""
        top, launches = self.topology, self.topology.lookup_latency + self.topology.update_latency
        across = 2 * (top.inter_latency if self.nodes > 1 else top.intra_latency)
        exchange = top.control_latency, across, 2 * top.intra_latency + across
        ids, direct, hierarchical = (seconds * (self.ranks > 1) for seconds in exchange)
        replicas = across if top.world_size > 1 else 0.0
        schemes = (launches + seconds for seconds in (direct, hierarchical, replicas, 0.0))
        return np.array([ids, *schemes, top.host_latency, top.disk_latency])
