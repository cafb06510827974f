"""The tables of a collection on one embedding server: what pulls and pushes do to their rows, and in which order.

Batches for training are numbered, on each trainer alike; `batches` of them make a step. The order of events is fixed:

    exact, staleness s   pull of step k, of all trainers at once, when the pushes of steps < k - s have been applied;
                         pushes of step j, of all trainers at once, when all pulls of steps <= j + s have been read
    at most s            a trainer's pull of step k, when those pushes have; pushes of step j, when all have come
    unbounded            a pull at once; pushes of step j, when all have come

So in exact mode what is read and written follows from the batches alone: not from time, nor from the number of servers.
Pulls of a step see the updates of steps < k - s, exactly these, or at least these. The gradients of a row are summed in
the order of trainers, and the optimizer is applied to it once a step.
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
from tritonemb.server.transport import Values
from tritonemb.storage.store import cpu_kernels, record_of
from tritonemb.tables.dynamic_table import DynamicTable, concat_ids, find_all, insert_batch
from tritonemb.tables.lookup import AssignedRows, Lookup, assign_rows, prefetch_batch
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import TableSet
from tritonemb.types import AdmissionConfig, CacheConfig, EvictionConfig, TableConfig

NO_ROWS = torch.empty(0, dtype=torch.int64)
Answer = Callable[[Sequence[Tensor] | Exception], None]
Action = Callable[[Exception | None], None]
"""Is called when it is due, or with an error if it cannot be done any more."""


@dataclass(frozen=True)
class TableSpec:
    """A table as servers know it, for JSON: a static one, too, is a dynamic table there, whose ids are row numbers.

    Args:
        num_embeddings: of a static table.
        capacity: rows that there is room for; those of a static table are never evicted.
        bound, seed: of initial values; a table that is loaded has another seed.
        row_bytes: of a row with its states and its index.
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
    def of(cls, config: TableConfig, seed: int, optimizer: Optimizer) -> "TableSpec":
        """Of a table that a collection was given."""
        row_bytes = config.embedding_dim * config.dtype.itemsize + INDEX_BYTES
        row_bytes += sum(4 * (config.embedding_dim if spec.per_element else 1) for spec in optimizer.states)
        if config.is_dynamic:
            capacity = config.capacity or max(1, (config.capacity_bytes or 0) // row_bytes)
        else:
            # Partitions get rows at random: eight standard deviations more than their mean.
            capacity = config.num_embeddings
            if (partitions := min(MAX_PARTITIONS, capacity // MIN_PARTITION_ROWS)) > 1:
                capacity += math.ceil(8 * math.sqrt(capacity * partitions))
        return cls(
            config.name, config.num_embeddings, config.embedding_dim, str(config.dtype).removeprefix("torch."),
            capacity, config.bound, seed, row_bytes, asdict(config.eviction), asdict(config.admission),
        )  # fmt: skip

    @property
    def num_partitions(self) -> int:
        """Of the whole table; servers have ranges of them."""
        return partition_sizes(self.capacity)[0]

    def config(self, first: int, count: int, cache: CacheConfig | None) -> TableConfig:
        """Of a server's partitions, in memory, or on disk with a cache."""
        whole = TableConfig(
            self.name, None, self.embedding_dim, dtype=getattr(torch, self.dtype), capacity=self.capacity,
            init_bound=self.bound, eviction=EvictionConfig(**self.eviction),
            admission=AdmissionConfig(**self.admission), placement="device" if cache is None else "disk",
            cache=cache or CacheConfig(),
        )  # fmt: skip
        return whole.shard(self.name, (first, count), (0, self.embedding_dim), [self.name])

    def initial_values(self, ids: Tensor, seed: int | None = None) -> Tensor:
        """`[n, embedding_dim]`, of rows that were never trained, if `seed` is that of the table now."""
        values = torch.empty(ids.numel(), self.embedding_dim, dtype=getattr(torch, self.dtype))
        fill_initial_(values, self.seed if seed is None else seed, self.bound, rows=ids)
        return values


def describe_optimizer(optimizer: Optimizer) -> Values:
    """An optimizer for JSON; ValueError for one with a function of the user's."""
    if isinstance(optimizer, Custom):
        raise ValueError("embedding servers apply the optimizer, and a Custom one has a function of yours; use another")
    return {"name": optimizer.name, **{f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)}}


@dataclass(frozen=True)
class CollectionSpec:
    """A collection as servers know it, for JSON; all trainers and all servers have the same.

    Args:
        tables: all of them.
        optimizer: see `describe_optimizer`.
        trainers: how many.
        staleness: None if unbounded.
        exact: whether a pull sees no newer updates than it must.
        batches: of a step.
        owners: for each table, of each server the first partition that it has; they are ranges, perhaps empty.
        parts: of each table what a trainer has, first and count: of a dynamic one partitions, else rows; None: all.
        rows_in, gradients_in: codecs of what is pulled and pushed, see `ExchangePrecision`.
    """

    tables: tuple[TableSpec, ...]
    optimizer: Values
    trainers: int
    staleness: int | None
    exact: bool
    batches: int
    owners: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, int] | None, ...]
    rows_in: str
    gradients_in: str

    @classmethod
    def from_json(cls, values: Values) -> "CollectionSpec":
        tables, owners = tuple(TableSpec(**table) for table in values["tables"]), tuple(map(tuple, values["owners"]))
        parts = tuple(part and tuple(part) for part in values["parts"])
        optimizer = dict(values["optimizer"])
        if (mode := optimizer.pop("nonfinite", None)) is not None:  # of a file from before "skip" was the default
            optimizer["on_nonfinite"] = "skip" if mode == "propagate" else mode
        return cls(**{**values, "tables": tables, "owners": owners, "parts": parts, "optimizer": optimizer})

    def number(self, table: str) -> int:
        """That of a table, by name."""
        return self._numbers[table]

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {spec.name: number for number, spec in enumerate(self.tables)}

    @property
    def leases_rows(self) -> bool:
        """Whether a trainer has rows with their states while it uses them, and applies the optimizer."""
        return self.exact and self.staleness == 0 and self.trainers == 1

    @functools.cached_property
    def refuses(self) -> bool:
        """Whether some table may refuse an id."""
        return any(AdmissionConfig(**table.admission) != AdmissionConfig() for table in self.tables)

    def partitions(self, table: int, server: int) -> tuple[int, int]:
        """The first of a server's partitions of a table, and how many."""
        end, part = self.tables[table].num_partitions, self.parts[table]
        if part is not None:
            end = sum(part) if self.tables[table].num_embeddings is None else end * (part[1] > 0)
        ends = [*(min(first, end) for first in self.owners[table]), end]
        return ends[server], ends[server + 1] - ends[server]

    def numbers_on(self, server: int) -> list[int]:
        """Numbers of the tables of which a server has partitions, ascending."""
        return [number for number in range(len(self.tables)) if self.partitions(number, server)[1]]

    def in_part(self, table: int, ids: Tensor) -> Tensor:
        """bool `[n]`, of ids that are in this server's partitions of a table: whether the trainer has them."""
        if (size := self.tables[table].num_embeddings) is None:
            return torch.ones_like(ids, dtype=torch.bool)
        first, count = self.parts[table] or (0, size)
        return (ids >= first) & (ids < first + count)

    def num_bytes(self, server: int) -> int:
        """Bytes of a server's rows when its tables are full."""
        found = 0
        for number, table in enumerate(self.tables):
            rows, part = self.partitions(number, server)[1] * partition_sizes(table.capacity)[2], self.parts[number]
            if part is not None and table.num_embeddings is not None:
                rows = rows * part[1] // table.num_embeddings
            found += rows * table.row_bytes
        return found


@dataclass
class PendingBatch:
    """What trainers have sent of one batch: by rank, ids with occurrences, or with gradients."""

    ids: dict[int, list[Tensor]] = field(default_factory=dict)
    others: dict[int, list[Tensor]] = field(default_factory=dict)
    lr: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)
    versions: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass
class Chain:
    """What has changed since a snapshot: of each table bool, by row, and the ids that have lost their rows."""

    snapshot: str
    changed: list[Tensor]
    removed: list[list[Tensor]]


class ServedTables:
    """Some partitions of a collection's tables; one thread calls it. See the module's docstring.

    Args:
        cache: of tables on disk; if not given, they are in memory.

    Attributes:
        dynamic: the tables here, in the order of their `numbers` in the collection.
        next_pull, next_push: the batch whose pulls, and the step whose pushes come next.
        chains: of snapshots, by name: what has changed since the last one of each.
        staleness: how many pulls have missed so many steps' updates.
        held: whether a trainer has rows that it has not written back.
        is_broken: whether something was begun that has not come to its end.
        versions: of each table int64, by row: a number that what is in the row has had since it was last changed, and
            no other content of a row has. None before a trainer with a cache asks; `NO_ROW` of ids without a row.
    """

    def __init__(self, spec: CollectionSpec, server: int, cache: CacheConfig | None = None) -> None:
        self.spec, self.server = spec, server
        kinds = dict(spec.optimizer)
        self.optimizer = OPTIMIZERS[kinds.pop("name")](**kinds)
        self.numbers = spec.numbers_on(server)
        configs = [spec.tables[n].config(*spec.partitions(n, server), cache) for n in self.numbers]
        self.tables = TableSet(configs, self.optimizer, "cpu", pooled=False) if configs else None
        self.dynamic = cast(list[DynamicTable], [] if self.tables is None else list(self.tables.dynamic.values()))
        for number, table in zip(self.numbers, self.dynamic, strict=True):
            table.reset_parameters(spec.tables[number].seed)
        self.next_pull = self.next_push = 0
        self.pulls: dict[int, PendingBatch] = {}
        self.pushes: dict[int, PendingBatch] = {}  # by batch
        self.waiting: list[tuple[Callable[[], bool], Action]] = []
        self.flushes: dict[int, int] = {}
        self.staleness: Counter[int] = Counter()
        self.chains: dict[str, Chain] = {}
        self.versions: list[Tensor] | None = None
        self._version = 0
        self.held, self.is_broken = False, False
        self._of_ids = [place for place, n in enumerate(self.numbers) if spec.tables[n].num_embeddings is None]
        states = self.optimizer.states
        self._records = [
            record_of(c.embedding_dim, c.dtype, states, place in self._of_ids) for place, c in enumerate(configs)
        ]

    def columns(self, sizes: Sequence[int], tensors: Sequence[Tensor], of_ids: bool = False) -> list[list[Tensor]]:
        """Parts of a message's tensors, int `[n]`, ids first, for each table, or dynamic one. Raises if malformed."""
        columns = [list(each.split(sizes)) for each in tensors]
        places = self._of_ids if of_ids else range(len(self.numbers))
        owned = all(self._owns_all(place, ids) for place, ids in zip(places, columns[0], strict=True))
        if not owned or tensors[0].dtype != torch.int64 or any(e.dim() != 1 or e.is_floating_point() for e in tensors):
            raise ValueError("ids must be int64 [n], and of this server")
        return columns

    def _owns_all(self, place: int, ids: Tensor) -> bool:
        """Others would be looked for in memory of something else."""
        return bool((self.dynamic[place].owns(ids) & self.spec.in_part(self.numbers[place], ids)).all())

    def check_records(self, keys: Sequence[tuple[int, Tensor]], records: Sequence[Tensor]) -> None:
        """Keys of tables by number, as `read_records` takes them, ascending; records of the first of these."""
        shapes = []
        for number, of_table in keys:
            place = self.numbers.index(number)
            shapes.append((torch.uint8, of_table.numel(), self._records[place].num_bytes))
            if place in self._of_ids:
                exist = bool(((of_table >= 0) & (of_table < len(self.dynamic[place].index.ids))).all())
            else:
                exist = self._owns_all(place, of_table)
            if not exist or (of_table[1:] <= of_table[:-1]).any():
                raise ValueError(f"table {self.spec.tables[number].name!r} does not have these rows here")
        if [(each.dtype, *each.shape) for each in records] != shapes[: len(records)]:
            raise ValueError(f"records must be {shapes}")

    def pull(
        self, rank: int, batch: int, ids: list[Tensor], occurrences: list[Tensor], answer: Answer,
        versions: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """A trainer's batch for training; `answer` gets each table's rows.

        Where tables may refuse ids, which then take no gradient of this batch, int64 follow: of each table how many are
        refused, and all their positions among the table's ids. With `versions`, those of rows that the trainer has, it
        gets int64 of each id's version first, and of each table only the rows whose versions are others.
        """
        there = self.pulls.setdefault(batch, PendingBatch())
        if versions is not None:
            there.versions[rank] = versions
            if self.versions is None:
                self._version = time.time_ns()  # larger than any before this process was started
                self.versions = [torch.full_like(table.index.ids, self._version) for table in self.dynamic]
        there.ids[rank], there.others[rank], there.answers[rank] = ids, occurrences, answer
        self.advance()

    def push(self, rank: int, batch: int, ids: list[Tensor], sums: list[Tensor], lr: float) -> None:
        """The gradients of a trainer's batch; none of one that was not trained."""
        if batch < self.next_push * self.spec.batches:
            return  # of a run that was taken back
        there = self.pushes.setdefault(batch, PendingBatch())
        there.ids[rank], there.others[rank], there.lr = ids, sums, max(lr, there.lr)
        self.advance()

    def look_up(self, after: int, ids: list[Tensor], answer: Answer) -> None:
        """Rows for evaluation, when the pushes of so many steps have been applied, less the staleness."""
        due = 0 if self.spec.staleness is None else after - self.spec.staleness

        def read(error: Exception | None) -> None:
            answer(self.read(ids) if error is None else error)

        self.when(lambda: self.next_push >= due, read)

    def read(self, ids: list[Tensor]) -> list[Tensor]:
        """Rows of each table's ids, as they are now; initial values of ids without a row."""
        return self._read(ids, find_all(self.dynamic, ids))

    def flush(self, rank: int, steps: int, answer: Action) -> None:
        """A trainer wants the pushes of so many steps to be applied before it pulls again; so must the others."""
        self.flushes[rank] = steps
        self.when(lambda: self.next_push >= steps, answer)

    def is_complete(self) -> bool:
        """Whether all that was pulled has been pushed, or written back, and nothing waits."""
        if self.held:
            return False
        steps = range(self.next_push, self.next_pull // self.spec.batches)
        return not self.pulls and self.next_pull % self.spec.batches == 0 and all(map(self._pushed, steps))

    def when_trained(self, steps: int, action: Action) -> None:
        """Act when so many steps have been pulled and pushed by all trainers, and applied as far as they can be."""
        pulled = steps * self.spec.batches
        self.when(lambda: self.next_pull >= pulled and all(map(self._pushed, range(self.next_push, steps))), action)

    def begin_chain(self, name: str, snapshot: str) -> None:
        """Note from now on what changes after a snapshot, the last one of a chain."""
        changed = [torch.zeros(len(table.index.ids), dtype=torch.bool) for table in self.dynamic]
        for table in self.dynamic:
            table.removed_ids = []
        self.chains[name] = Chain(snapshot, changed, [[] for _ in self.dynamic])

    def note_removed(self) -> None:
        """Let chains know the ids that have lost their rows; those are forgotten whose next snapshot must be whole."""
        for place, table in enumerate(self.dynamic):
            for name, chain in list(self.chains.items()):
                chain.removed[place] += table.removed_ids or []
                if table.removed_ids is None or sum(map(len, chain.removed[place])) > len(table.index.ids):
                    del self.chains[name]
            table.removed_ids = []

    def when(self, condition: Callable[[], bool], action: Action) -> None:
        """Act when this holds, and nothing else can be done."""
        self.waiting.append((condition, action))
        self.advance()

    def advance(self) -> None:
        """Do what is next, as long as it can be done."""
        self.is_broken = True
        while self._advance_push() or self._advance_pull():
            pass
        due = [each for each in self.waiting if each[0]()]
        self.waiting = [each for each in self.waiting if each not in due]
        for _, action in due:
            action(None)
        self.is_broken = False

    def cancel_pending(self) -> None:
        """Forget what was pulled and pushed and has not been done: another state is restored."""
        error = RuntimeError("this was taken back: the tables were restored from a checkpoint meanwhile")
        pulls, self.pulls, waiting, self.waiting = self.pulls, {}, self.waiting, []
        self.pushes, self.flushes, self.versions = {}, {}, None
        answers = [answer for batch in pulls.values() for answer in batch.answers.values()]
        for tell in (*answers, *(action for _, action in waiting)):
            tell(error)

    def _batches(self, step: int) -> range:
        return range(step * self.spec.batches, (step + 1) * self.spec.batches)

    def _pushed(self, step: int) -> bool:
        """Whether all pushes of a step have come."""
        return all(b in self.pushes and len(self.pushes[b].ids) == self.spec.trainers for b in self._batches(step))

    def _advance_push(self) -> bool:
        spec, step = self.spec, self.next_push
        if not self._pushed(step):
            return False
        read = self.next_pull if spec.exact else math.inf
        flushed = len(self.flushes) == spec.trainers and step < min(self.flushes.values())
        if not flushed and spec.staleness is not None and read < (step + spec.staleness + 1) * spec.batches:
            return False
        self._apply([self.pushes.pop(batch) for batch in self._batches(step)])
        self.next_push += 1
        return True

    def _advance_pull(self) -> bool:
        """Read the next batch: of all trainers at once in exact mode, else what has come of it."""
        exact, most, staleness = self.spec.exact, self.spec.trainers, self.spec.staleness
        for batch in sorted(self.pulls):
            complete = batch == self.next_pull and len(self.pulls[batch].ids) == most
            sees_enough = staleness is None or batch // self.spec.batches - staleness <= self.next_push
            if sees_enough and (complete or not exact):
                self.next_pull = max(self.next_pull, batch + 1)
                self._pull(batch, self.pulls.pop(batch))
                return True
        return False

    def _pull(self, batch: int, there: PendingBatch) -> None:
        ranks = sorted(there.ids)
        self.staleness[batch // self.spec.batches - self.next_push] += len(ranks)
        ids, sizes = _by_table([there.ids[rank] for rank in ranks])
        occurrences, _ = _by_table([there.others[rank] for rank in ranks])
        try:
            places = self._assign(ids, occurrences)
            rows = self._read(ids, places)
        except Exception as error:  # there is no room, and nothing has changed
            for rank in ranks:
                there.answers[rank](error)
            return
        found = [of_table.split(of) for of_table, of in zip(rows, sizes, strict=True)]
        for number, rank in enumerate(ranks):
            own = [of_table[number] for of_table in found]
            if rank in there.versions or self.spec.refuses:
                mine = [of.split(of_table)[number] for of, of_table in zip(places, sizes, strict=True)]
            if (known := there.versions.get(rank)) is not None:
                own = self._changed(known, mine, own)
            if self.spec.refuses:
                refused = [(of_table < 0).nonzero()[:, 0] for of_table in mine]
                counts = torch.tensor([each.numel() for each in refused], dtype=torch.int64)
                own += [counts, torch.cat([counts[:0], *refused])]
            there.answers[rank](own)

    def _changed(self, known: Sequence[Tensor], places: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """Of a trainer's ids their versions, and the rows whose versions it does not know."""
        assert self.versions is not None
        versions = [
            torch.where(of_table < 0, ops.NO_ROW, now[of_table.clamp(min=0)])
            for now, of_table in zip(self.versions, places, strict=True)
        ]
        parts = zip(rows, versions, known, strict=True)
        return [torch.cat([NO_ROWS, *versions]), *(of_table[now != before] for of_table, now, before in parts)]

    def _assign(self, ids: list[Tensor], occurrences: list[Tensor]) -> list[Tensor]:
        if self.tables is None:
            return []
        known = find_all(self.dynamic, ids) if self.versions is not None else None
        with torch.enable_grad():  # it is for training
            assigned = assign_rows(self.tables, self._batch(ids), occurrences=torch.cat(occurrences))
        sizes = [of_table.numel() for of_table in ids]
        rows = list(assigned.features.values().split(sizes))
        for place, of_table in enumerate(rows):
            self._note_assigned(place, of_table)
            if known is not None:
                self._renew(place, of_table[known[place] < 0])
        return rows

    def _note_assigned(self, place: int, rows: Tensor) -> None:
        self._mark(place, rows)
        table = self.dynamic[place]
        if table.removed_ids is not None and sum(each.numel() for each in table.removed_ids) > len(table.index.ids):
            table.removed_ids = None  # a whole snapshot is smaller

    def _renew(self, place: int, rows: Tensor) -> None:
        """Give changed rows another version."""
        assert self.versions is not None
        self._version += 1
        self.versions[place][rows[rows >= 0]] = self._version

    def _mark(self, place: int, rows: Tensor) -> None:
        for chain in self.chains.values():
            chain.changed[place][rows[rows >= 0]] = True

    def _read(self, ids: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        found, all_known = list[Tensor](), not rows or bool((cat(rows) >= 0).all())
        with self._memory(dict(enumerate(rows))) as memories:
            for place, table in enumerate(self.dynamic):
                memory, there = memories[place]
                values = memory["weight"].index_select(0, there if all_known else there.clamp(min=0))
                if not all_known and (unknown := there < 0).any():
                    values[unknown] = table.initial_values(ids[place][unknown])
                found.append(values)
        return found

    def _pin(self, rows: Sequence[Tensor]) -> Lookup | None:
        """Of tables on disk, a batch of these rows, -1 of none, whose slots are pinned until it is released."""
        if self.tables is None or self.tables.cache is None:
            return None
        assigned = AssignedRows(self._batch(rows), None, None, True, torch.tensor(self.dynamic[0].clock))
        empty = assigned.features.values()[:0]
        layout = self.tables.layout(self.tables.feature_names, empty.device)
        before = Lookup(empty, empty, None, ops.RowGroups(*[empty] * 4), layout, assigned=assigned)
        return prefetch_batch(self.tables, assigned.features, before)

    # Of rows that a trainer holds.

    @torch.no_grad()
    def assign(self, ids: Sequence[Tensor], occurrences: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Rows of a batch's distinct ids in dynamic tables, -1 of refused ones; and which ids have just got theirs.

        ValueError if they find no room; nothing has changed then.
        """
        if not (places := self._of_ids):
            return [], []
        tables, sizes = [self.dynamic[place] for place in places], [*map(len, ids)]
        rows, keys, _ = insert_batch(tables, *concat_ids(ids), torch.cat(list(occurrences)))
        by_table = dict(zip(places, rows.split(sizes), strict=True))
        for place, of_table in by_table.items():
            self._note_assigned(place, of_table)
        if (pinned := self._pin([by_table.get(place, NO_ROWS) for place in range(len(self.numbers))])) is not None:
            pinned.release()
        return [*by_table.values()], [*((keys != NO_KEY) & (rows >= 0)).split(sizes)]

    def find(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """As `assign`, of a batch that is not trained: -1 of ids without a row."""
        return find_all([self.dynamic[place] for place in self._of_ids], ids)

    @torch.no_grad()
    def read_records(self, keys: Mapping[int, Tensor]) -> list[Tensor]:
        """Records of tables, by number: of a static one's rows, and of the places that ids have got in others."""
        rows, move = self._rows(keys), cpu_kernels("row_cache").move_rows_
        known, found = {place: nonzero(of_table >= 0) for place, of_table in rows.items()}, list[Tensor]()
        with self._memory({place: of_table[known[place]] for place, of_table in rows.items()}) as memories:
            for place, of_table in rows.items():
                table, record, mine = self.dynamic[place], self._records[place], known[place]
                records = torch.zeros(of_table.numel(), record.num_bytes, dtype=torch.uint8)
                fields, (memory, there) = record.views(records), memories[place]
                names = [name for name in fields if name in memory]
                move([fields[name] for name in names], [memory[name] for name in names], mine, there)
                if mine.numel() < of_table.numel():
                    unknown = of_table < 0
                    fields["weight"][unknown] = table.initial_values(keys[self.numbers[place]][unknown])
                if "id" in fields:
                    fields["id"].copy_(table.index.ids[of_table])
                found.append(records)
        return found

    @torch.no_grad()
    def write_records(self, keys: Mapping[int, Tensor], records: Sequence[Tensor]) -> None:
        """Write them; a static row that is written first gets a place."""
        rows, move = self._rows(keys), cpu_kernels("row_cache").move_rows_
        for (place, of_table), of_keys in zip(rows.items(), keys.values(), strict=True):
            if (unknown := nonzero(of_table < 0)).numel():
                of_table[unknown] = self.dynamic[place].add(of_keys[unknown])
            self._mark(place, of_table)
        with self._memory(rows, dirty=True) as memories:
            for place, given in zip(rows, records, strict=True):
                fields, (memory, there) = self._records[place].views(given), memories[place]
                if "id" in memory:
                    fields["id"] = self.dynamic[place].index.ids[rows[place]]
                source = [fields[name] for name in memory]
                move([*memory.values()], source, there, torch.arange(there.numel()))

    def returned(self, steps: int, lr: float) -> None:
        """The trainer has written all rows back, after so many steps."""
        self.held, self.next_pull, self.next_push = False, steps * self.spec.batches, steps
        if self.tables is not None:
            self.tables.counters["step"].fill_(steps)
            self.tables.set_learning_rate(lr)

    def _rows(self, keys: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """By place of the table; -1 of static rows that have none yet."""
        rows = {self.numbers.index(number): of_table for number, of_table in keys.items()}
        static = [place for place in rows if place not in self._of_ids]
        found = find_all([self.dynamic[place] for place in static], [rows[place] for place in static])
        return rows | dict(zip(static, found, strict=True))

    @contextmanager
    def _memory(
        self, rows: Mapping[int, Tensor], dirty: bool = False
    ) -> Iterator[dict[int, tuple[dict[str, Tensor], Tensor]]]:
        """Of tables, by place, weight and states in memory, and where rows are in these; rows of -1 stay so."""
        pinned = self._pin([rows.get(place, NO_ROWS) for place in range(len(self.numbers))])
        found = {}
        for place, there in rows.items():
            if pinned is not None:
                (own, slots), known, of_table = pinned.rows_of(place), nonzero(there >= 0), there
                there = of_table.index_copy(0, known, slots[torch.searchsorted(own, of_table[known])])
            found[place] = Table.tensors(self.dynamic[place]), there
        try:
            yield found
        finally:
            if pinned is not None:
                pinned.dirty = dirty
                pinned.release()

    def _batch(self, values: Sequence[Tensor]) -> KeyedJaggedTensor:
        """A value a position of each table, as one sample."""
        assert self.tables is not None
        offsets = ops.segment_offsets(torch.tensor([of_table.numel() for of_table in values]))
        return KeyedJaggedTensor.unchecked(self.tables.feature_names, torch.cat(list(values)), None, offsets)

    @torch.no_grad()
    def _apply(self, batches: Sequence[PendingBatch]) -> None:
        """One step of the optimizer on the sums of the gradients of each row, in the order of batches and trainers."""
        if self.tables is None:
            return
        order = [(batch, rank) for batch in batches for rank in sorted(batch.ids) if batch.ids[rank]]
        lr = max(batch.lr for batch in batches)
        places = range(len(self.dynamic))
        ids = [torch.cat([NO_ROWS, *(batch.ids[rank][place] for batch, rank in order)]) for place in places]
        values = find_all(self.dynamic, ids)  # -1 of ids that were refused, or evicted since, which take no gradient
        grads = list[Tensor]()
        for place, table in enumerate(self.dynamic):
            self._mark(place, values[place])
            if self.versions is not None:
                self._renew(place, values[place])
            sums = (batch.others[rank][place] for batch, rank in order)
            grads.append(torch.cat([torch.empty(0, table.config.embedding_dim), *sums]))
            if self.spec.trainers > 1:
                grads[-1].mul_(1.0 / self.spec.trainers)
        if lr != self.tables.current_learning_rate and order:
            self.tables.set_learning_rate(lr)
        if (lookup := self._pin(values)) is None:
            batch, layout = self._batch(values), self.tables.layout(self.tables.feature_names, torch.device("cpu"))
            groups = ops.row_groups(batch.values(), batch.offsets(), layout)
            lookup = Lookup(batch.values(), batch.offsets(), None, groups, layout)
        self.tables.update.step(self.tables, grads, lookup, [] if self.tables.cache is None else [lookup])


@functools.cache
@torch.no_grad()
def warm_up() -> None:
    """Load half of torch and the kernels, as a first batch does."""
    table, optimizer, one = TableConfig("table", 1, 1), SGD(lr=0.1), torch.ones(1, dtype=torch.int64)
    specs, described = (TableSpec.of(table, 0, optimizer),), describe_optimizer(optimizer)
    served = ServedTables(CollectionSpec(specs, described, 1, None, True, 1, ((0,),), (None,), "fp32", "fp32"), 0)
    served.pull(0, 0, [one - 1], [one], lambda rows: None)
    served.push(0, 0, [one - 1], [torch.ones(1, 1)], 0.1)


def _by_table(ranks: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[int]]]:
    """Of tensors by rank and table: those of each table, in the order of ranks, and their sizes."""
    tables = list(zip(*ranks, strict=True))
    return [cat(of_table) for of_table in tables], [[each.shape[0] for each in of_table] for of_table in tables]


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat`, also of none; one alone is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors)) if tensors else NO_ROWS
