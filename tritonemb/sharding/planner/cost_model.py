"""What a shard costs: its memory, and the time that a training step spends on it, stage by stage.

Every stage is `latency + ids / rate + bytes / bandwidth` with the rates of a `Topology`. Of a shard with a share σ of
its table's ids, `w` columns of `e` bytes and `s` bytes of state a row, in a step with `n` ids of the table, `d` of them
distinct, in `b` bags (or `d` rows, if they are not pooled), over all samples of a copy of the tables:

    id exchange      σ·n·4 + b·4 bytes over the control network; σ·n received, and a rank's share sent, by its host
    grouping         σ·n ids
    lookup           σ·n ids; σ·n·w·e + b·w·4 bytes
    output exchange  b·w elements in the codec's bytes, there and back, to ranks of other nodes or of this one
    update           σ·n·w·4 + d·2·(w·e + s) bytes
    misses           2·(w·e + s) bytes for each distinct row that is not among the cached ones
    replicated       rows and summed gradients that replicas gather; whole rows of tables that are sharded by columns

A rank's load is the sum of its stages, and a step takes as long as the slowest rank's. Where one rank is slow in one
stage and another rank in another, a step takes longer: ranks wait for each other in each exchange.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tritonemb.comm.output_exchange import ExchangePrecision
from tritonemb.layout import INDEX_BYTES, rows_to_shard
from tritonemb.optimizers import Optimizer, RowWiseAdagrad
from tritonemb.sharding.plan import DataParallel, Grid, ShardingPlan, TableRowWise
from tritonemb.sharding.planner.topology import Topology
from tritonemb.sharding.table_stats import Array, TableStats
from tritonemb.types import CODECS, TableConfig
from tritonemb.utils import format_bytes

STAGES = ("id exchange", "grouping", "lookup", "output exchange", "update", "misses", "replicated")
IDS, GROUPING, LOOKUP, OUTPUTS, UPDATE, MISSES, REPLICATED = range(len(STAGES))
PLACEMENTS = ("device", "host", "disk", "server")
DEVICE, HOST, DISK, SERVER = range(len(PLACEMENTS))
DIRECT, HIERARCHICAL, REPLICAS = range(3)  # how pooled vectors are exchanged
CACHED = (0.0, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0)  # shares of a table's rows, between which misses are interpolated
CACHE_BYTES = 40.0  # tag, clock and flags of a cached row, and its part of the transfer buffers
PAGE_OVERHEAD = 1.03  # of a table on disk: checksums and flags of its pages
PREFETCHED = 2  # batches whose ids a rank has at once
PINNED = 3  # batches whose distinct rows a cache has room for, at least
RUNTIME_BYTES = 120e6  # of a rank: code that its first step loads, and what allocators and connections keep
# Passes over distinct rows that cost as much as so many ids each, as measured on CPUs: a row's sums are exchanged,
# matched and applied where ranks have other columns of it, or copies.
WHOLE_ROW_IDS, GATHERED_IDS = 6, 3
DENSE_BYTES = 16  # a parameter of the other layers: weight, gradient, and two states of Adam
# Of an element; 8 more of a row with a scale and an offset, which is taken to have 80 columns.
_CODEC_BYTES = {name: codec.dtype.itemsize + codec.row_wise * 0.1 for name, codec in CODECS.items()}


class Pieces(NamedTuple):
    """Shards, an element of each array each."""

    table: Array  # int64: its number
    share: Array  # of the table's ids
    rows: Array
    width: Array
    blocks: Array  # column blocks of the table
    scheme: Array
    placement: Array
    cached: Array  # rows on the device of those that are elsewhere
    host_rows: Array  # rows in host memory of those on disk


class Costs(NamedTuple):
    """Of pieces: seconds `[n, stages]`, and bytes `[n, placements]`; on servers a rank's part of the table's."""

    seconds: Array
    memory: Array


class Prediction(NamedTuple):
    """Of a plan: seconds `[ranks, stages]`, and of each table on all ranks `[tables]`; bytes `[ranks]` or `[nodes]` by
    tier, of servers in all; and a step's time.

    `load` is the largest sum of a rank's stages, `fixed` are latencies, `dense` is the time of the other layers.
    """

    seconds: Array
    by_table: Array
    hbm: Array
    host: Array
    disk: Array
    server: float
    fixed: float
    dense: float

    @property
    def load(self) -> float:
        return float(self.seconds.sum(1).max())

    @property
    def step(self) -> float:
        return self.load + self.fixed + self.dense


@dataclass(eq=False, repr=False)
class CostModel:
    """Costs of tables' shards on a topology; a copy of the tables has `ranks` ranks.

    Args:
        batch_size: samples of a rank.
        optimizer: of the tables, for its states.
        stats: by table; one id a sample and feature, uniform, for those that are not there.
        exchange: codecs of the output exchange.
        copies: of the tables.
        dense_parameters: of the other layers, on each rank.
        activation_bytes: of the other layers, at their peak, on each rank.

    Raises:
        ValueError: there are statistics of another table.
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

    def __post_init__(self) -> None:
        tables, names, job = self.tables, [table.name for table in self.tables], self.topology.world_size
        if unknown := [name for name in self.stats if name not in names]:
            raise ValueError(f"there are statistics of the table {unknown[0]!r}, but the tables are {names[:20]}")
        self.stats = {t.name: TableStats(len(t.feature_names)) for t in tables} | dict(self.stats)
        self.ranks = job // self.copies
        self.local = min(self.topology.local_world_size, self.ranks)
        self.nodes = self.ranks // self.local
        self.rows = np.array([float(table.num_embeddings or table.capacity or 0) for table in tables])
        self.dims = np.array([table.embedding_dim for table in tables], dtype=np.int64)
        self.itemsize = np.array([table.dtype.itemsize for table in tables], dtype=np.float64)
        self.dynamic = np.array([table.is_dynamic for table in tables], dtype=bool)
        self.unpooled = np.array([table.pooling == "none" for table in tables], dtype=bool)
        self.features = np.array([len(table.feature_names) for table in tables], dtype=np.float64)
        pooling_factors = np.array([self.stats[name].pooling_factor for name in names])
        self.ids = self.batch_size * pooling_factors  # of a rank's samples
        self.sizes = self.rows * self.record_bytes(np.arange(len(tables)), self.dims)  # bytes of tables with states
        # Distinct ids of a rank's, of a copy's and of the job's samples; and rows missed, by the share that is cached.
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
        """A row of so many columns, with its states."""
        each = [state.per_element for state in self.optimizer.states]
        return width * self.itemsize[table] + 4.0 * (sum(each) * width + len(each) - sum(each))

    def least_cached(self, table: Array, share: Array, rows: Array) -> Array:
        """Rows that a shard's cache must have room for: those of the batches that are trained and prefetched."""
        return np.minimum(rows, PINNED * self._distinct(table, share, rows))

    def _distinct(self, table: Array, share: Array, rows: Array) -> Array:
        part = (share + rows / np.maximum(self.rows[table], 1)) / 2  # hot rows are few, and used often
        return np.minimum(self.distinct[table] * part, rows)

    def costs(self, at: Pieces) -> Costs:
        """Of shards on the ranks that have them."""
        top, table, ranks, world = self.topology, at.table, self.ranks, self.topology.world_size
        replicated, away, on_disk = at.scheme == REPLICAS, at.placement != DEVICE, at.placement == DISK
        w, e, unpooled = at.width.astype(np.float64), self.itemsize[table], self.unpooled[table]
        record = self.record_bytes(table, w)
        ids = np.where(replicated, self.ids[table], self.ids[table] * ranks * at.share)
        batch = np.where(replicated, self.batch_size, self.batch_size * ranks)
        bags = np.where(unpooled, ids, batch * self.features[table])
        distinct = np.where(replicated, self.distinct_of_rank[table], self._distinct(table, at.share, at.rows))
        everywhere = np.where(replicated, self.distinct_of_job[table], distinct)
        copies = np.where(replicated, world, self.copies)
        gathered = copies * distinct  # summed rows that a rank updates with
        seconds, id_bytes = np.zeros((len(table), len(STAGES))), np.where(at.rows < 2**31, 4, 8)
        if ranks > 1:
            received = ids * id_bytes + 4 * np.where(unpooled, 0, bags)
            control = top.control_bandwidth / (self.local if self.nodes > 1 else 1)
            seconds[:, IDS] = np.where(replicated, 0, received / control + ids / top.routing_rate)
            part = (at.share + at.rows / np.maximum(self.rows[table], 1)) / 2
            vectors = np.where(unpooled, np.minimum(ids, ranks * self.distinct_of_rank[table] * part), bags)
            elements = vectors * w * (_CODEC_BYTES[self.exchange.forward] + _CODEC_BYTES[self.exchange.backward])
            seconds[:, OUTPUTS] = np.where(replicated, 0, self._sent(elements, at.scheme == HIERARCHICAL))
        seconds[:, GROUPING] = ids / top.id_rate
        seconds[:, LOOKUP] = ids / top.lookup_rate + (ids * w * e + bags * w * 4) / top.lookup_bandwidth
        seconds[:, UPDATE] = (ids * w * 4 + everywhere * 2 * record) / top.update_bandwidth
        outside = (top.nodes > 1) & (replicated | (self.copies > 1))
        wire = (gathered - distinct) * (id_bytes + w * _CODEC_BYTES[self.exchange.backward])
        wire /= np.where(outside, top.inter_bandwidth, top.intra_bandwidth)
        added = GATHERED_IDS * gathered / top.id_rate
        seconds[:, REPLICATED] = np.where(copies > 1, wire + added + gathered * w * 4 / top.update_bandwidth, 0)
        if self.optimizer.reads_whole_rows:
            cut = self._sent(distinct * 4 * (at.blocks - 1), False) + WHOLE_ROW_IDS * distinct / top.id_rate
            seconds[:, REPLICATED] += np.where(at.blocks > 1, cut, 0)
        share = np.divide(at.cached, np.maximum(at.rows, 1))
        both = np.minimum(1, share + np.divide(at.host_rows, np.maximum(at.rows, 1)))
        part = distinct / np.maximum(self.distinct[table], 1e-9)
        missed, from_disk = self._missed(table, share) * part, self._missed(table, both) * part
        moved = np.where(away, 2 * missed * record / top.host_bandwidth, 0)
        moved += np.where(on_disk, 2 * from_disk * record / (top.disk_bandwidth / self.local), 0)
        away_everywhere = np.minimum(ranks, everywhere / np.maximum(distinct, 1e-9))
        seconds[:, MISSES] = np.where(replicated & away, moved * away_everywhere, moved)
        buffers = PREFETCHED * ids * 12 + 2 * bags * w * 4 + np.where(copies > 1, gathered * w * 4, 0)
        dynamic = np.where(self.dynamic[table], INDEX_BYTES * at.rows, 0)
        hbm = np.where(away, at.cached * (record + CACHE_BYTES), at.rows * record) + dynamic + buffers
        host = np.select([at.placement == HOST, on_disk], [at.rows * record, at.host_rows * record], 0)
        disk = np.where(on_disk, at.rows * (record + 1) * PAGE_OVERHEAD, 0)
        there = at.placement == SERVER
        if there.any():  # every rank pulls and pushes the distinct rows of its own samples
            rows, servers = self.distinct_of_rank[table], max(1, top.servers)
            own = self.batch_size * self.features[table] * at.width * 4
            wire = rows * (8 + 8 * at.width) / (top.control_bandwidth / top.local_world_size)
            sent = rows * world * 8 * at.width / (servers * top.server_bandwidth)
            pulled = np.maximum(2 * rows * world / (servers * top.server_rows), sent)
            seconds[there] = 0
            seconds[there, LOOKUP] = ((self.ids[table] * at.width * e + own) / top.lookup_bandwidth)[there]
            seconds[there, MISSES] = (wire + pulled)[there]
            hbm = np.where(there, rows * at.width * 4 * PREFETCHED + 2 * own, hbm)
        whole = self.rows[table] * (self.record_bytes(table, at.width) + INDEX_BYTES) / ranks
        return Costs(seconds, np.stack([hbm, host, disk, np.where(there, whole, 0)], 1))

    def _sent(self, sent: Array, hierarchical: Any) -> Array:
        """Seconds for bytes that go to all ranks in equal parts; hierarchical: summed inside the node before."""
        top, ranks, local = self.topology, self.ranks, self.local
        inside, outside = sent * (local - 1) / ranks, sent * (ranks - local) / ranks
        direct = np.maximum(inside / top.intra_bandwidth, outside / top.inter_bandwidth)
        summed = sent * (local - 1) / local / top.intra_bandwidth
        summed = summed + sent / local * (self.nodes - 1) / self.nodes / top.inter_bandwidth
        return np.where(hierarchical, summed, direct)

    def _missed(self, table: Array, share: Array) -> Array:
        """Distinct rows of a batch that are not cached, where this share of a table's rows is."""
        upper = np.clip(np.searchsorted(CACHED, share, side="left"), 1, len(CACHED) - 1)
        low, high = np.take(CACHED, upper - 1), np.take(CACHED, upper)
        part = np.clip((share - low) / (high - low), 0, 1)
        return self._misses[table, upper - 1] * (1 - part) + self._misses[table, upper] * part

    def shared(self, table: Array, blocks: Array, scheme: Array, placement: Array) -> Array:
        """Seconds that a table costs every rank, however its shards lie: its host sends ids, once a column block."""
        sends = (self.ranks > 1) & (scheme != REPLICAS) & (placement != SERVER)
        return np.where(sends, self.ids[table] * blocks / self.topology.routing_rate, 0)

    @property
    def reserved(self) -> dict[str, float]:
        """Device memory of every rank besides its shards, by what takes it."""
        vectors = np.where(self.unpooled, self.ids, self.batch_size * self.features) * self.dims
        batches = f"batches of {self.batch_size:,} samples in flight"
        return {
            "the runtime": RUNTIME_BYTES,
            batches: float(PREFETCHED * 12 * self.ids.sum() + 2 * 4 * vectors.sum()),
            "other layers": float(DENSE_BYTES * self.dense_parameters),
            "activations": self.activation_bytes,
        }

    @property
    def memory_of_rank(self) -> float:
        """All that is `reserved`."""
        return sum(self.reserved.values())

    def memory_in_words(self) -> str:
        """Device memory that a rank has for tables, and what takes the rest."""
        hbm, by_size = self.topology.hbm, sorted(self.reserved.items(), key=lambda item: -item[1])
        taken = ", ".join(f"{format_bytes(size)} for {name}" for name, size in by_size if size)
        return f"{format_bytes(max(0.0, hbm - self.memory_of_rank))} a rank: {format_bytes(hbm)} less {taken}"

    def pieces(self, plan: ShardingPlan) -> tuple[Pieces, Array]:
        """All shards of a plan, and the rank of each."""
        found: list[tuple[Any, ...]] = []
        for number, table in enumerate(self.tables):
            shards, cache, whole = plan.shards(table), plan.apply(table).cache, self.rows[number]
            tier, parts = PLACEMENTS.index(plan.placement(table.name).placement), rows_to_shard(table)
            if tier == SERVER:
                piece = (number, 1.0, whole, table.embedding_dim, 1, REPLICAS, SERVER, 0, 0)
                found += [(rank, *piece) for rank in range(self.ranks)]
                continue
            blocks, sharding = len({shard.first_column for shard in shards}), plan.tables[table.name]
            scheme = REPLICAS if isinstance(sharding, DataParallel) else DIRECT
            if isinstance(sharding, TableRowWise | Grid) and table.pooling != "none" and self.nodes > 1:
                scheme = HIERARCHICAL
            for shard in shards:
                first, rows = whole * shard.first_row / parts, whole * shard.num_rows / parts
                share = rows / whole if table.is_dynamic else self.stats[table.name].share(first, rows, whole)
                cached = 0 if tier == DEVICE else min(rows, cache.num_device_rows(math.ceil(rows)))
                on_host = 0 if tier != DISK else min(rows - cached, cache.num_host_rows(math.ceil(rows)) or 0)
                piece = (number, share, rows, shard.num_columns, blocks, scheme, tier, cached, on_host)
                found.append((shard.rank, *piece))
        rank, *pieces = (np.array(column) for column in zip(*found, strict=True))
        return Pieces(*pieces), rank

    def predict(self, plan: ShardingPlan) -> Prediction:
        """Time and memory of a plan's ranks, and a step's time. ValueError if the plan is for other ranks or tables."""
        if (plan.world_size, plan.copies) != (self.ranks, self.copies):
            raise ValueError(
                f"the plan is for {plan.world_size} ranks and {plan.copies} copies of the tables, the topology has "
                f"{self.ranks} and {self.copies}"
            )
        plan.require_tables([table.name for table in self.tables])
        at, rank = self.pieces(plan)
        costs = self.costs(at)
        seconds, hbm = np.zeros((self.ranks, len(STAGES))), np.full(self.ranks, self.memory_of_rank)
        np.add.at(seconds, rank, costs.seconds)
        np.add.at(hbm, rank, costs.memory[:, DEVICE])
        firsts = np.unique(at.table, return_index=True)[1]
        shared = self.shared(at.table[firsts], at.blocks[firsts], at.scheme[firsts], at.placement[firsts])
        seconds[:, IDS] += sum(shared.tolist())
        host, disk = (np.bincount(rank // self.local, costs.memory[:, tier], self.nodes) for tier in (HOST, DISK))
        fixed = self._latencies(set(at.scheme[at.placement != SERVER].tolist()), set(at.placement.tolist()))
        top, parameters = self.topology, self.dense_parameters
        ring = top.intra_bandwidth  # of the other layers' gradients: between nodes it has all cards of a node
        if top.nodes > 1:
            ring = min(ring, top.inter_bandwidth * top.local_world_size)
        part = 2 * (top.world_size - 1) / top.world_size
        dense = 6.0 * parameters * self.batch_size / top.flops + 4 * parameters * part / ring
        by_table = np.bincount(at.table, costs.seconds.sum(1), len(self.tables))
        return Prediction(seconds, by_table, hbm, host, disk, float(costs.memory[:, SERVER].sum()), fixed, dense)

    def _latencies(self, schemes: set[int], placements: set[int]) -> float:
        """Of a step with these exchanges and tiers."""
        top = self.topology
        seconds = top.lookup_latency + top.update_latency
        across = top.inter_latency if self.nodes > 1 else top.intra_latency
        if self.ranks > 1 and schemes & {DIRECT, HIERARCHICAL}:
            seconds += top.control_latency
            seconds += 2 * across if DIRECT in schemes else 0
            seconds += 2 * (top.intra_latency + across) if HIERARCHICAL in schemes else 0
        if REPLICAS in schemes and top.world_size > 1:
            seconds += 2 * across
        seconds += top.host_latency if placements & {HOST, DISK} else 0
        return seconds + (top.disk_latency if DISK in placements else 0)
