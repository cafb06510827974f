"""Tables of a collection on one embedding server: the effects of pulls and pushes on rows, and their order.

Batches for training are numbered, on each trainer alike; `batches` of them make a step. The order of events is fixed:

    exact, staleness s   pull of step k, of all trainers at once, when the pushes of steps < k - s have been applied;
                         pushes of step j, of all trainers at once, when all pulls of steps <= j + s have been read
    at most s            a trainer's pull of step k, when the pushes of steps < k - s have been applied;
                         pushes of step j, when all trainers' pushes have arrived
    unbounded            a pull at once; pushes of step j, when all trainers' pushes have arrived

So in exact mode the batches alone determine what is read and written: neither time nor the number of servers does.
Pulls of step k see the updates of steps < k - s, exactly these, or at least these. The gradients of a row are summed in
the order of trainers, and the optimizer is applied to it once per step.
"""

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import cast

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.layout import INDEX_BYTES, MAX_PARTITIONS, MIN_PARTITION_ROWS, NO_KEY, nonzero, partition_sizes
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import OPTIMIZERS, SGD, Custom, Optimizer
from tritonemb.server.records import with_current_names
from tritonemb.server.transport import Values
from tritonemb.storage.store import cpu_kernels, record_of
from tritonemb.tables.dynamic_table import DynamicTable, concat_ids, find_all, insert_batch
from tritonemb.tables.lookup import AssignedRows, Lookup, assign_rows, prefetch_batch
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import TableSet
from tritonemb.types import AdmissionConfig, CacheConfig, EvictionConfig, TableConfig

NO_ROWS = torch.empty(0, dtype=torch.int64)
RowsCallback = Callable[[Sequence[Tensor] | Exception], None]
"""Called with rows, or with the error that a request failed with."""
Completion = Callable[[Exception | None], None]
"""Called with None when its condition holds, or with an error if it was cancelled."""


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
        values = with_current_names(values)
        tables, starts = tuple(TableSpec(**table) for table in values["tables"]), values["partition_starts"]
        shards = tuple(shard and tuple(shard) for shard in values["shards"])
        optimizer = dict(values["optimizer"])
        if (mode := optimizer.pop("nonfinite", None)) is not None:  # a file from before "skip" was the default
            optimizer["on_nonfinite"] = "skip" if mode == "propagate" else mode
        changes = {"tables": tables, "partition_starts": tuple(map(tuple, starts)), "shards": shards}
        return cls(**{**values, **changes, "optimizer": optimizer})

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

    def in_shard(self, table: int, ids: Tensor) -> Tensor:
        """Return a bool mask `[n]` of ids that belong to the trainer's shard; ids are in this server's partitions."""
        if (size := self.tables[table].num_embeddings) is None:
            return torch.ones_like(ids, dtype=torch.bool)
        first, count = self.shards[table] or (0, size)
        return (ids >= first) & (ids < first + count)

    def num_bytes(self, server: int) -> int:
        """Bytes of all rows on a server when its tables are full."""
        total = 0
        for number, table in enumerate(self.tables):
            rows, shard = self.partitions(number, server)[1] * partition_sizes(table.capacity)[2], self.shards[number]
            if shard is not None and table.num_embeddings is not None:
                rows = rows * shard[1] // table.num_embeddings
            total += rows * table.row_bytes
        return total


@dataclass
class PendingBatch:
    """Pulls or pushes of one batch that have arrived, by rank of the trainer.

    Attributes:
        ids: per table, int64 `[n]`.
        payloads: per table, occurrences of the ids (pull), or sums of gradients `[n, embedding_dim]` (push).
        lr: maximum learning rate of the pushes.
        callbacks: receivers of pulled rows.
        versions: per table, versions of rows in the trainer's cache.
    """

    ids: dict[int, list[Tensor]] = field(default_factory=dict)
    payloads: dict[int, list[Tensor]] = field(default_factory=dict)
    lr: float = 0.0
    callbacks: dict[int, RowsCallback] = field(default_factory=dict)
    versions: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass
class SnapshotChain:
    """Changes since the last snapshot of a chain.

    Attributes:
        snapshot: name of that snapshot.
        changed: per table, bool by row: written since then.
        removed: per table, ids that have lost their rows since then.
    """

    snapshot: str
    changed: list[Tensor]
    removed: list[list[Tensor]]


class ServedTables:
    """Partitions of a collection's tables on one server, used by one thread. See the module's docstring.

    Lists per table have an entry for each table on this server; `index` is a position in them, `number` the number of a
    table in the collection.

    Args:
        cache: config of the cache in memory of tables on disk; None: tables are in memory.

    Attributes:
        numbers: numbers in the collection of this server's tables.
        dynamic: this server's tables.
        next_pull: batch whose pulls are next.
        next_push: step whose pushes are next.
        pulls, pushes: pending batches, by number.
        staleness: number of pulls by the number of steps whose updates they have missed.
        chains: chains of snapshots, by name.
        is_leased: whether a trainer has rows that it has not written back.
        is_broken: whether an operation was interrupted, so that the tables may be inconsistent.
        versions: per table, int64 by row: a number that is unique to the row's present content; `NO_ROW` for ids
            without a row. None until a trainer with a cache pulls.
    """

    def __init__(self, spec: CollectionSpec, server: int, cache: CacheConfig | None = None) -> None:
        self.spec, self.server = spec, server
        optimizer_args = dict(spec.optimizer)
        self.optimizer = OPTIMIZERS[optimizer_args.pop("name")](**optimizer_args)

        # Tables with partitions on this server.
        self.numbers = spec.tables_on(server)
        configs = [spec.tables[n].config(*spec.partitions(n, server), cache) for n in self.numbers]
        self.tables = TableSet(configs, self.optimizer, "cpu", pooled=False) if configs else None
        self.dynamic = cast(list[DynamicTable], [] if self.tables is None else list(self.tables.dynamic.values()))
        for number, table in zip(self.numbers, self.dynamic, strict=True):
            table.reset_parameters(spec.tables[number].seed)

        # Pending work.
        self.next_pull = self.next_push = 0
        self.pulls: dict[int, PendingBatch] = {}
        self.pushes: dict[int, PendingBatch] = {}
        self.deferred: list[tuple[Callable[[], bool], Completion]] = []
        self.flush_steps: dict[int, int] = {}  # by rank
        self.staleness: Counter[int] = Counter()

        # Changes of rows, for incremental snapshots and for caches of trainers.
        self.chains: dict[str, SnapshotChain] = {}
        self.versions: list[Tensor] | None = None
        self._version = 0

        # Leases.
        self.is_leased, self.is_broken = False, False
        self._dynamic_indices = [i for i, n in enumerate(self.numbers) if spec.tables[n].num_embeddings is None]
        states = self.optimizer.states
        self._record_formats = [
            record_of(c.embedding_dim, c.dtype, states, i in self._dynamic_indices) for i, c in enumerate(configs)
        ]

    def columns(self, sizes: Sequence[int], tensors: Sequence[Tensor], of_ids: bool = False) -> list[list[Tensor]]:
        """Split a message's integer tensors `[n]`, ids first, by table; `of_ids`: by dynamic table.

        ValueError if ids are malformed, or belong to another server.
        """
        columns = [list(tensor.split(sizes)) for tensor in tensors]
        indices = self._dynamic_indices if of_ids else range(len(self.numbers))
        owned = all(self._owns_all(index, ids) for index, ids in zip(indices, columns[0], strict=True))
        if not owned or tensors[0].dtype != torch.int64 or any(t.dim() != 1 or t.is_floating_point() for t in tensors):
            raise ValueError("ids must be int64 [n], and belong to this server")
        return columns

    def _owns_all(self, index: int, ids: Tensor) -> bool:
        """Return whether all ids belong to this server and shard; other ids would address memory out of bounds."""
        return bool((self.dynamic[index].owns(ids) & self.spec.in_shard(self.numbers[index], ids)).all())

    def check_records(self, keys: Sequence[tuple[int, Tensor]], records: Sequence[Tensor]) -> None:
        """Check keys by table number, see `read_records`, and the records of the first of them; ValueError."""
        shapes = []
        for number, table_keys in keys:
            index = self.numbers.index(number)
            shapes.append((torch.uint8, table_keys.numel(), self._record_formats[index].num_bytes))
            if index in self._dynamic_indices:
                exist = bool(((table_keys >= 0) & (table_keys < len(self.dynamic[index].index.ids))).all())
            else:
                exist = self._owns_all(index, table_keys)
            if not exist or (table_keys[1:] <= table_keys[:-1]).any():
                raise ValueError(f"table {self.spec.tables[number].name!r} does not have these rows on this server")
        if [(tensor.dtype, *tensor.shape) for tensor in records] != shapes[: len(records)]:
            raise ValueError(f"records must be {shapes}")

    def pull(
        self, rank: int, batch: int, ids: list[Tensor], occurrences: list[Tensor], callback: RowsCallback,
        versions: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Pull a trainer's batch for training; `callback` receives each table's rows.

        With admission, two int64 tensors follow: per table the number of refused ids, which take no gradient of this
        batch, and their positions among the table's ids, concatenated. With `versions`, those of the trainer's cached
        rows, the first tensor has each id's version, and each table has only the rows whose versions differ.
        """
        pending = self.pulls.setdefault(batch, PendingBatch())
        if versions is not None:
            pending.versions[rank] = versions
            if self.versions is None:
                self._version = time.time_ns()  # above all versions of an earlier process
                self.versions = [torch.full_like(table.index.ids, self._version) for table in self.dynamic]
        pending.ids[rank], pending.payloads[rank], pending.callbacks[rank] = ids, occurrences, callback
        self.advance()

    def push(self, rank: int, batch: int, ids: list[Tensor], sums: list[Tensor], lr: float) -> None:
        """Push the gradients of a trainer's batch; empty lists for a batch that was not trained."""
        if batch < self.next_push * self.spec.batches:
            return  # pushed by a run that was rolled back to a checkpoint
        pending = self.pushes.setdefault(batch, PendingBatch())
        pending.ids[rank], pending.payloads[rank], pending.lr = ids, sums, max(lr, pending.lr)
        self.advance()

    def look_up(self, steps: int, ids: list[Tensor], callback: RowsCallback) -> None:
        """Read rows for evaluation, when the pushes of `steps` steps less the staleness have been applied."""
        min_steps = 0 if self.spec.staleness is None else steps - self.spec.staleness

        def read(error: Exception | None) -> None:
            callback(self.read(ids) if error is None else error)

        self.run_when(lambda: self.next_push >= min_steps, read)

    def read(self, ids: list[Tensor]) -> list[Tensor]:
        """Read rows of each table's ids in their present state; initial values for ids without a row."""
        return self._read(ids, find_all(self.dynamic, ids))

    def flush(self, rank: int, steps: int, completion: Completion) -> None:
        """Apply the pushes of `steps` steps before the trainer's next pull, once all trainers have requested it."""
        self.flush_steps[rank] = steps
        self.run_when(lambda: self.next_push >= steps, completion)

    def is_complete(self) -> bool:
        """Return whether all pulled batches have been pushed, all leases have ended, and no pull is pending."""
        if self.is_leased:
            return False
        steps = range(self.next_push, self.next_pull // self.spec.batches)
        return not self.pulls and self.next_pull % self.spec.batches == 0 and all(map(self._all_pushed, steps))

    def when_trained(self, steps: int, completion: Completion) -> None:
        """Run when all trainers have pulled and pushed `steps` steps, which are applied as far as staleness allows."""
        pulled, pushed = steps * self.spec.batches, self._all_pushed
        self.run_when(lambda: self.next_pull >= pulled and all(map(pushed, range(self.next_push, steps))), completion)

    def begin_chain(self, name: str, snapshot: str) -> None:
        """Track changes since a snapshot, which is now the last one of a chain."""
        changed = [torch.zeros(len(table.index.ids), dtype=torch.bool) for table in self.dynamic]
        for table in self.dynamic:
            table.removed_ids = []
        self.chains[name] = SnapshotChain(snapshot, changed, [[] for _ in self.dynamic])

    def note_removed(self) -> None:
        """Add removed ids to all chains; drop chains for which a full snapshot is smaller."""
        for index, table in enumerate(self.dynamic):
            for name, chain in list(self.chains.items()):
                chain.removed[index] += table.removed_ids or []
                if table.removed_ids is None or sum(map(len, chain.removed[index])) > len(table.index.ids):
                    del self.chains[name]
            table.removed_ids = []

    def run_when(self, condition: Callable[[], bool], completion: Completion) -> None:
        """Run `completion` once the condition holds, after all possible pulls and pushes."""
        self.deferred.append((condition, completion))
        self.advance()

    def advance(self) -> None:
        """Apply pushes, read pulls, and run deferred completions as far as the order of events allows."""
        self.is_broken = True
        while self._advance_push() or self._advance_pull():
            pass
        due = [item for item in self.deferred if item[0]()]
        self.deferred = [item for item in self.deferred if item not in due]
        for _, completion in due:
            completion(None)
        self.is_broken = False

    def cancel_pending(self) -> None:
        """Cancel pending pulls, pushes and completions, because a checkpoint is restored."""
        error = RuntimeError("cancelled: the tables were restored from a checkpoint")
        pulls, self.pulls, deferred, self.deferred = self.pulls, {}, self.deferred, []
        self.pushes, self.flush_steps, self.versions = {}, {}, None
        callbacks = [callback for batch in pulls.values() for callback in batch.callbacks.values()]
        for callback in (*callbacks, *(completion for _, completion in deferred)):
            callback(error)

    def _batches(self, step: int) -> range:
        return range(step * self.spec.batches, (step + 1) * self.spec.batches)

    def _all_pushed(self, step: int) -> bool:
        """Return whether all pushes of a step have arrived."""
        return all(b in self.pushes and len(self.pushes[b].ids) == self.spec.trainers for b in self._batches(step))

    def _advance_push(self) -> bool:
        spec, step = self.spec, self.next_push
        if not self._all_pushed(step):
            return False
        num_read = self.next_pull if spec.exact else math.inf
        flushed = len(self.flush_steps) == spec.trainers and step < min(self.flush_steps.values())
        if not flushed and spec.staleness is not None and num_read < (step + spec.staleness + 1) * spec.batches:
            return False
        self._apply([self.pushes.pop(batch) for batch in self._batches(step)])
        self.next_push += 1
        return True

    def _advance_pull(self) -> bool:
        """Read the next batch: of all trainers at once in exact mode, else the pulls that have arrived."""
        exact, trainers, staleness = self.spec.exact, self.spec.trainers, self.spec.staleness
        for batch in sorted(self.pulls):
            complete = batch == self.next_pull and len(self.pulls[batch].ids) == trainers
            sees_enough = staleness is None or batch // self.spec.batches - staleness <= self.next_push
            if sees_enough and (complete or not exact):
                self.next_pull = max(self.next_pull, batch + 1)
                self._pull(batch, self.pulls.pop(batch))
                return True
        return False

    def _pull(self, batch: int, pending: PendingBatch) -> None:
        # Read the rows of all trainers at once.
        ranks = sorted(pending.ids)
        self.staleness[batch // self.spec.batches - self.next_push] += len(ranks)
        ids, sizes = _by_table([pending.ids[rank] for rank in ranks])
        occurrences, _ = _by_table([pending.payloads[rank] for rank in ranks])
        try:
            row_numbers = self._assign(ids, occurrences)
            rows = self._read(ids, row_numbers)
        except Exception as error:  # the table is full; it is unchanged
            for rank in ranks:
                pending.callbacks[rank](error)
            return
        # Send each trainer its rows, with versions and refused ids where it needs them.
        split_rows = [table_rows.split(counts) for table_rows, counts in zip(rows, sizes, strict=True)]
        for position, rank in enumerate(ranks):
            result = [table_rows[position] for table_rows in split_rows]
            if rank in pending.versions or self.spec.has_admission:
                numbers = [of.split(counts)[position] for of, counts in zip(row_numbers, sizes, strict=True)]
            if (cached_versions := pending.versions.get(rank)) is not None:
                result = self._changed_rows(cached_versions, numbers, result)
            if self.spec.has_admission:
                refused = [(table_rows < 0).nonzero()[:, 0] for table_rows in numbers]
                counts = torch.tensor([positions.numel() for positions in refused], dtype=torch.int64)
                result += [counts, torch.cat([counts[:0], *refused])]
            pending.callbacks[rank](result)

    def _changed_rows(
        self, cached: Sequence[Tensor], numbers: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the versions of a trainer's ids, and the rows whose versions differ from the cached versions."""
        assert self.versions is not None
        versions = [
            torch.where(row_numbers < 0, ops.NO_ROW, by_row[row_numbers.clamp(min=0)])
            for by_row, row_numbers in zip(self.versions, numbers, strict=True)
        ]
        tables = zip(rows, versions, cached, strict=True)
        return [torch.cat([NO_ROWS, *versions]), *(values[new != old] for values, new, old in tables)]

    def _assign(self, ids: list[Tensor], occurrences: list[Tensor]) -> list[Tensor]:
        """Return row numbers of a training batch's ids, which are inserted where they have none."""
        if self.tables is None:
            return []
        known = find_all(self.dynamic, ids) if self.versions is not None else None
        with torch.enable_grad():  # marks the batch as one for training
            assigned = assign_rows(self.tables, self._batch(ids), occurrences=torch.cat(occurrences))
        sizes = [table_ids.numel() for table_ids in ids]
        rows = list(assigned.features.values().split(sizes))
        for index, table_rows in enumerate(rows):
            self._note_assigned(index, table_rows)
            if known is not None:
                self._bump_versions(index, table_rows[known[index] < 0])
        return rows

    def _note_assigned(self, index: int, rows: Tensor) -> None:
        self._mark_changed(index, rows)
        table = self.dynamic[index]
        if table.removed_ids is not None and sum(ids.numel() for ids in table.removed_ids) > len(table.index.ids):
            table.removed_ids = None  # a full snapshot is smaller

    def _bump_versions(self, index: int, rows: Tensor) -> None:
        """Set a new version for changed rows."""
        assert self.versions is not None
        self._version += 1
        self.versions[index][rows[rows >= 0]] = self._version

    def _mark_changed(self, index: int, rows: Tensor) -> None:
        for chain in self.chains.values():
            chain.changed[index][rows[rows >= 0]] = True

    def _read(self, ids: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        result, all_known = list[Tensor](), not rows or bool((cat(rows) >= 0).all())
        with self._memory(dict(enumerate(rows))) as memories:
            for index, table in enumerate(self.dynamic):
                memory, slots = memories[index]
                values = memory["weight"].index_select(0, slots if all_known else slots.clamp(min=0))
                if not all_known and (missing_mask := slots < 0).any():
                    values[missing_mask] = table.initial_values(ids[index][missing_mask])
                result.append(values)
        return result

    def _pin(self, rows: Sequence[Tensor]) -> Lookup | None:
        """Prefetch rows of tables on disk, -1: none, and pin their slots until release. None for tables in memory."""
        if self.tables is None or self.tables.cache is None:
            return None
        assigned = AssignedRows(self._batch(rows), None, None, True, torch.tensor(self.dynamic[0].clock))
        empty = assigned.features.values()[:0]
        layout = self.tables.layout(self.tables.feature_names, empty.device)
        unread = Lookup(empty, empty, None, ops.RowGroups(*[empty] * 4), layout, assigned=assigned)
        return prefetch_batch(self.tables, assigned.features, unread)

    # Leased rows.

    @torch.no_grad()
    def allocate(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return rows of a batch's distinct ids in dynamic tables, -1 for refused ids, and masks of newly inserted ids.

        ValueError if a table is full; then the tables are unchanged.
        """
        if not (indices := self._dynamic_indices):
            return [], []
        tables, sizes = [self.dynamic[index] for index in indices], [*map(len, ids)]
        rows, keys, _ = insert_batch(tables, *concat_ids(ids), torch.cat(list(occurrences)))
        by_table = dict(zip(indices, rows.split(sizes), strict=True))
        for index, table_rows in by_table.items():
            self._note_assigned(index, table_rows)
        if (pinned := self._pin([by_table.get(index, NO_ROWS) for index in range(len(self.numbers))])) is not None:
            pinned.release()
        return [*by_table.values()], [*((keys != NO_KEY) & (rows >= 0)).split(sizes)]

    def find(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Return rows of ids in dynamic tables, -1 for ids without a row, without inserting any."""
        return find_all([self.dynamic[index] for index in self._dynamic_indices], ids)

    @torch.no_grad()
    def read_records(self, keys: Mapping[int, Tensor]) -> list[Tensor]:
        """Read records by table number: keys are ids of a static table, row numbers of a dynamic one."""
        rows, move = self._rows(keys), cpu_kernels("row_cache").move_rows_
        known, result = {index: nonzero(table_rows >= 0) for index, table_rows in rows.items()}, list[Tensor]()
        with self._memory({index: table_rows[known[index]] for index, table_rows in rows.items()}) as memories:
            for index, table_rows in rows.items():
                table, record, positions = self.dynamic[index], self._record_formats[index], known[index]
                records = torch.zeros(table_rows.numel(), record.num_bytes, dtype=torch.uint8)
                fields, (memory, slots) = record.views(records), memories[index]
                names = [name for name in fields if name in memory]
                move([fields[name] for name in names], [memory[name] for name in names], positions, slots)
                if positions.numel() < table_rows.numel():
                    missing_mask = table_rows < 0
                    fields["weight"][missing_mask] = table.initial_values(keys[self.numbers[index]][missing_mask])
                if "id" in fields:
                    fields["id"].copy_(table.index.ids[table_rows])
                result.append(records)
        return result

    @torch.no_grad()
    def write_records(self, keys: Mapping[int, Tensor], records: Sequence[Tensor]) -> None:
        """Write records, keyed as in `read_records`; the first write of a static row inserts it."""
        rows, move = self._rows(keys), cpu_kernels("row_cache").move_rows_
        for (index, table_rows), table_keys in zip(rows.items(), keys.values(), strict=True):
            if (missing := nonzero(table_rows < 0)).numel():
                table_rows[missing] = self.dynamic[index].add(table_keys[missing])
            self._mark_changed(index, table_rows)
        with self._memory(rows, dirty=True) as memories:
            for index, table_records in zip(rows, records, strict=True):
                fields, (memory, slots) = self._record_formats[index].views(table_records), memories[index]
                if "id" in memory:
                    fields["id"] = self.dynamic[index].index.ids[rows[index]]
                source = [fields[name] for name in memory]
                move([*memory.values()], source, slots, torch.arange(slots.numel()))

    def end_lease(self, steps: int, lr: float) -> None:
        """End the trainer's lease: it has written back all rows, after `steps` steps."""
        self.is_leased, self.next_pull, self.next_push = False, steps * self.spec.batches, steps
        if self.tables is not None:
            self.tables.counters["step"].fill_(steps)
            self.tables.set_learning_rate(lr)

    def _rows(self, keys: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return row numbers by index of the table; -1 for static rows that were never written."""
        rows = {self.numbers.index(number): table_keys for number, table_keys in keys.items()}
        static = [index for index in rows if index not in self._dynamic_indices]
        static_rows = find_all([self.dynamic[index] for index in static], [rows[index] for index in static])
        return rows | dict(zip(static, static_rows, strict=True))

    @contextmanager
    def _memory(
        self, rows: Mapping[int, Tensor], dirty: bool = False
    ) -> Iterator[dict[int, tuple[dict[str, Tensor], Tensor]]]:
        """Yield weight and states in memory, and the slots of rows there, by index of the table; row -1 has slot -1.

        Rows of tables on disk are pinned meanwhile, and then marked dirty if `dirty`.
        """
        pinned = self._pin([rows.get(index, NO_ROWS) for index in range(len(self.numbers))])
        result = {}
        for index, table_rows in rows.items():
            slots = table_rows
            if pinned is not None:
                (pinned_rows, pinned_slots), known = pinned.rows_of(index), nonzero(table_rows >= 0)
                known_slots = pinned_slots[torch.searchsorted(pinned_rows, table_rows[known])]
                slots = table_rows.index_copy(0, known, known_slots)
            result[index] = Table.tensors(self.dynamic[index]), slots
        try:
            yield result
        finally:
            if pinned is not None:
                pinned.dirty = dirty
                pinned.release()

    def _batch(self, values: Sequence[Tensor]) -> KeyedJaggedTensor:
        """Build a batch of one sample from the values of each table."""
        assert self.tables is not None
        offsets = ops.segment_offsets(torch.tensor([table_values.numel() for table_values in values]))
        return KeyedJaggedTensor.unchecked(self.tables.feature_names, torch.cat(list(values)), None, offsets)

    @torch.no_grad()
    def _apply(self, batches: Sequence[PendingBatch]) -> None:
        """Apply one optimizer step to the sums of each row's gradients, in the order of batches and trainers."""
        if self.tables is None:
            return
        # Concatenate ids and gradients of all trainers, by table.
        order = [(batch, rank) for batch in batches for rank in sorted(batch.ids) if batch.ids[rank]]
        lr = max(batch.lr for batch in batches)
        indices = range(len(self.dynamic))
        ids = [torch.cat([NO_ROWS, *(batch.ids[rank][index] for batch, rank in order)]) for index in indices]
        rows = find_all(self.dynamic, ids)  # -1: refused, or evicted since the pull; takes no gradient
        grads = list[Tensor]()
        for index, table in enumerate(self.dynamic):
            self._mark_changed(index, rows[index])
            if self.versions is not None:
                self._bump_versions(index, rows[index])
            sums = (batch.payloads[rank][index] for batch, rank in order)
            grads.append(torch.cat([torch.empty(0, table.config.embedding_dim), *sums]))
            if self.spec.trainers > 1:
                grads[-1].mul_(1.0 / self.spec.trainers)
        if lr != self.tables.current_learning_rate and order:
            self.tables.set_learning_rate(lr)
        # Update the rows: those of tables on disk are pinned, others are grouped directly.
        if (lookup := self._pin(rows)) is None:
            batch, layout = self._batch(rows), self.tables.layout(self.tables.feature_names, torch.device("cpu"))
            groups = ops.row_groups(batch.values(), batch.offsets(), layout)
            lookup = Lookup(batch.values(), batch.offsets(), None, groups, layout)
        self.tables.update.step(self.tables, grads, lookup, [] if self.tables.cache is None else [lookup])


@functools.cache
@torch.no_grad()
def warm_up() -> None:
    """Load torch modules and compile kernels, so that the first batch does not wait for them."""
    table, optimizer, one = TableConfig("table", 1, 1), SGD(lr=0.1), torch.ones(1, dtype=torch.int64)
    specs, optimizer_spec = (TableSpec.from_config(table, 0, optimizer),), describe_optimizer(optimizer)
    served = ServedTables(CollectionSpec(specs, optimizer_spec, 1, None, True, 1, ((0,),), (None,), "fp32", "fp32"), 0)
    served.pull(0, 0, [one - 1], [one], lambda rows: None)
    served.push(0, 0, [one - 1], [torch.ones(1, 1)], 0.1)


def _by_table(ranks: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[int]]]:
    """Concatenate tensors by rank and table over ranks; returns one tensor per table, and the sizes of its parts."""
    tables = list(zip(*ranks, strict=True))
    return [cat(tensors) for tensors in tables], [[tensor.shape[0] for tensor in tensors] for tensors in tables]


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, also an empty list; a single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors)) if tensors else NO_ROWS
