"""A dynamic table: any int64 is an id, and gets a row when it is first trained."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tritonemb.layout import (
    DISTINCT,
    EVICTED,
    INDEX_BYTES,
    MAX_ROWS_PER_SET,
    MAX_USES,
    MISSING,
    NEEDED,
    NO_KEY,
    POSITION,
    SET_BYTES,
    DynamicIndex,
    PendingInsert,
    Rule,
    dynamic_rows,
    make_index,
    nonzero,
    partitions_of,
    renumber,
    segment_offsets,
)
from tritonemb.memory import advise_huge_pages
from tritonemb.ops.registry import kernel
from tritonemb.ops.row_cache import move_rows_
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import StateSpec
from tritonemb.tables.admission import Sketch, admits
from tritonemb.tables.cached_table import CHUNK_BYTES, CachedTable, only_parameters
from tritonemb.tables.table import Table, draw_seed, load_named_tensors
from tritonemb.types import AdmissionConfig, Device, TableConfig
from tritonemb.utils import require

R = TypeVar("R")


@dataclass(frozen=True)
class DynamicStatistics:
    """What a dynamic table has done so far.

    Args:
        lookups: ids of batches that were trained, each as often as it occurs.
        hits: of those, ids that had rows before.
        inserts: rows that were given to new ids.
        refused: occurrences of ids that were not admitted.
        evictions: rows that were taken from ids, to make room or after `EvictionConfig.ttl` steps.
        rows, capacity: rows now, and at most.
        num_bytes: of memory or disk that weights, states and the index take, as far as rows have reached.
    """

    lookups: int = 0
    hits: int = 0
    inserts: int = 0
    refused: int = 0
    evictions: int = 0
    rows: int = 0
    capacity: int = 0
    num_bytes: int = 0

    @property
    def load(self) -> float:
        """Rows of the capacity."""
        return self.rows / self.capacity if self.capacity else 0.0

    @property
    def hit_rate(self) -> float:
        """Hits a lookup; 1 if there were none."""
        return self.hits / self.lookups if self.lookups else 1.0

    @property
    def bytes_per_row(self) -> float:
        """0 without rows."""
        return self.num_bytes / self.rows if self.rows else 0.0


def find_all(tables: Sequence["DynamicTable"], ids: Sequence[Tensor]) -> list[Tensor]:
    """`DynamicTable.find` of each table."""
    return list(find_batch(tables, *batch_of(ids)).split([*map(len, ids)])) if tables else []


def find_batch(tables: Sequence["DynamicTable"], values: Tensor, bounds: Tensor, table_of_key: Sequence[int]) -> Tensor:
    """int64 `[N]`: rows of a batch's ids, as `insert_batch` has them, -1 of ids that have none."""
    find = kernel("dynamic_find_", values.device)
    rows: Tensor = find([table.index for table in tables], values, bounds.contiguous(), table_of_key)[0]
    return rows


def batch_of(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Ids of tables side by side, int64, where each one's begin and end, as of keys, and the tables' numbers."""
    bounds = segment_offsets(torch.tensor([*map(len, ids)])).to(ids[0].device)
    return ids[0] if len(ids) == 1 else torch.cat(list(ids)), bounds, range(len(ids))


@torch.no_grad()
def insert_batch(
    tables: Sequence["DynamicTable"], values: Tensor, bounds: Tensor, table_of_key: Sequence[int],
    occurrences: Tensor | None = None, rules: Sequence[Rule] | None = None,
) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
    """Take a batch's ids into tables: known ones are used once more, and new ones get rows, with initial values and
    states of zero. Waits for the device once, more often where admission or `ttl` is configured.

    ValueError if new ids find no room in some table; all are as before then.

    Args:
        tables: on one device.
        values: int64 `[N]`, the batch.
        bounds: `[K + 1]`, where its keys begin and end.
        table_of_key: which of the tables each key looks up, or -1.
        occurrences: int `[N]`, if each stands for several, at least one.
        rules: if the batch is not the tables' next step: all ids are admitted, and nothing is written to new rows.

    Returns:
        int64 `[N]`: rows, -1 of ids that are refused, values of other tables as they are; int32 `[N]`: `NO_KEY`, but of
        new ids; and whether some are refused.
    """
    device, indexes, is_step = values.device, [table.index for table in tables], rules is None
    rules = [table.rule(table.clock + 1) for table in tables] if rules is None else rules
    if occurrences is not None:
        ends = segment_offsets(occurrences)
        values, bounds = values.repeat_interleave(occurrences), ends[bounds]
    # Find ids, and what new ones need.
    for_host = values.new_zeros(5 * len(tables) + bounds.numel())  # all that the host reads
    counts, bounds = for_host[: 5 * len(tables)].view(-1, 5), for_host[5 * len(tables) :].copy_(bounds)
    steps = [step for step, _, _ in rules]
    rows, before, keys = kernel("dynamic_find_", device)(indexes, values, bounds, table_of_key, steps)
    new: PendingInsert = kernel("dynamic_begin_insert", device)(indexes, values, keys)
    if new.keys.numel():
        if is_step:
            _admit(tables, new)
        starts = kernel("dynamic_room", device)(indexes, new, rules, counts)
    numbers = for_host.tolist()
    of_keys = [(table, *key) for table, key in zip(table_of_key, pairwise(numbers[5 * len(tables) :]), strict=True)]
    by_table = [numbers[first : first + 5] for first in range(0, 5 * len(tables), 5)]
    for table, of_table in zip(tables, by_table, strict=True):
        if of_table[MISSING]:
            for number, begin, end in of_keys:
                if number >= 0:
                    undo_use(indexes[number], rows[begin:end], before[begin:end])
            raise table.capacity_error(of_table[NEEDED], of_table[MISSING], is_step)
    # Insert new ones.
    ends_of_tables = [*accumulate((of_table[DISTINCT] for of_table in by_table), initial=0)]
    if size := ends_of_tables[-1]:
        new = new._replace(ids=new.ids[:size], begins=new.begins[: size + 1], tables=new.tables[:size])
        new_rows, evicted = kernel("dynamic_commit_insert_", device)(indexes, new, starts, rules, rows)
        for table, of_table, (begin, end) in zip(tables, by_table, pairwise(ends_of_tables), strict=True):
            table.count(inserts=of_table[NEEDED], evictions=of_table[EVICTED])
            if table.removed_ids is not None and of_table[EVICTED]:
                table.removed_ids.append(evicted[begin:end][evicted[begin:end, 1] >= 0, 0].sort().values)
            if is_step:
                table.record_inserted(new.ids[begin:end], new_rows[begin:end], new.begins[begin : end + 1])
        if is_step and not all(isinstance(table, CachedHashTable) for table in tables):
            initialize(tables, tables[0].state_names, new.ids, new_rows, new.tables)
    if is_step:
        for number, (table, of_table) in enumerate(zip(tables, by_table, strict=True)):
            lookups = sum(end - begin for key, begin, end in of_keys if key == number)
            table.clock += 1
            table.count(lookups=lookups, hits=lookups - of_table[POSITION])
            table.expire()
    if occurrences is not None:
        rows, keys = rows[ends[1:] - 1], keys[ends[1:] - 1]
    return rows, keys, any(of_table[NEEDED] < of_table[DISTINCT] for of_table in by_table)


def undo_use(index: DynamicIndex, rows: Tensor, before: Tensor) -> None:
    """Undo `dynamic_find_`, of a batch that is refused. A count that had reached `MAX_USES` is less."""
    rows, before = rows[rows >= 0], before[rows >= 0]
    earlier = before < index.used[rows]
    index.used[rows[earlier]] = before[earlier]
    index.counts.index_add_(0, rows, torch.full_like(before, -1))


def expired_ids(index: DynamicIndex, partition: int, last: int) -> Tensor:
    """int64 `[n]`, ascending: ids of a partition whose rows were not used after the step `last`."""
    partitions = index.num_sets.numel()
    rows = slice(partition, int(index.num_allocated[partition]) * partitions, partitions)
    return index.ids[rows][index.used[rows] <= last].sort().values  # a freed row counts as used


def _admit(tables: Sequence["DynamicTable"], new: PendingInsert) -> None:
    """Say which new ids are admitted, where not all are."""
    if all(table.config.admission == AdmissionConfig() for table in tables):
        return
    size, numbers = int(new.numbers[-1]), torch.arange(len(tables) + 1, dtype=torch.int32, device=new.ids.device)
    occurrences = new.begins[: size + 1].diff()
    bounds = torch.searchsorted(new.tables[:size], numbers).tolist()
    for table, (begin, end) in zip(tables, pairwise(bounds), strict=True):
        if (admission := table.config.admission) != AdmissionConfig():
            of_table = new.ids[begin:end], occurrences[begin:end]
            new.admitted[begin:end] = admits(admission, *of_table, table.seed, table.sketch)


def initialize(tables: Sequence[Any], states: Sequence[str], ids: Tensor, rows: Tensor, numbers: Tensor) -> None:
    """Write initial values of ids to rows of tables with these numbers, and states of zero; nothing where a row is
    negative."""
    kernel("initialize_rows_", rows.device)(
        [table.weight.detach() for table in tables],
        [table.get_buffer(name) for name in states for table in tables],
        [(table.seed, table.config.bound) for table in tables], ids, rows, numbers,
    )  # fmt: skip


class Lock:
    """A reentrant lock, instead of which a copy of its owner has another one.

    On a GPU its holders' streams run one after another, and behind the updates that are recorded: a row that one
    holder frees may get initial values from the next one, on another stream.

    Args:
        device: of the tables.
    """

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.RLock()
        self.device = device
        self._events: dict[str, torch.cuda.Event] = {}

    def __enter__(self) -> None:
        self._lock.acquire()
        self.wait()

    def __exit__(self, *raised: object) -> None:
        try:
            self.record("holder")
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Have this thread's stream wait for the holders and the updates so far."""
        if (stream := self._stream()) is not None:
            for event in tuple(self._events.values()):
                stream.wait_event(event)

    def record(self, kind: str = "update") -> None:
        """Let later holders wait for what this thread's stream has been given."""
        if (stream := self._stream()) is not None:
            self._events[kind] = stream.record_event()

    def _stream(self) -> torch.cuda.Stream | None:
        """This thread's stream; None without one, or where it is being captured: nothing runs then."""
        on_gpu = self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return torch.cuda.current_stream(self.device) if on_gpu else None

    def __reduce__(self) -> Any:
        return Lock, (self.device,)


def _locked(method: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(method)
    def call(table: "DynamicTable", *args: Any, **kwargs: Any) -> R:
        with table.lock, torch.no_grad():
            return method(table, *args, **kwargs)

    return call


class DynamicTable(Table):
    """Weight `[capacity, embedding_dim]` and states, of which the index says which row an id has.

    `state_dict` has, sorted by id: `ids` int64 `[rows]`, `weight` and states of these, `step` int64, when each was last
    used, in steps of the table, and `count` int64, how often; and `clock`, the table's steps so far, and `seed`, which
    initial values follow from; with `AdmissionConfig.appearances`, `sketch` and `added` too.

    A step is a batch that was trained, or prefetched to be trained. Memory is taken as rows are, not for the capacity.
    Any thread may call any method; the tables of a collection have one `lock`, held from `begin` to `finish`.
    """

    index: DynamicIndex

    def __init__(self, config: TableConfig, states: tuple[StateSpec, ...], device: Device = None) -> None:
        there = torch.empty(0, device=device).device
        there = torch.device("cpu") if there.type == "meta" else there
        self._row_bytes = config.embedding_dim * config.dtype.itemsize + (0 if config.placement == "device" else 8)
        self._row_bytes += sum(4 * (config.embedding_dim if spec.per_element else 1) for spec in states)
        num_rows = config.capacity or max(1, (config.capacity_bytes or 0) // (self._row_bytes + INDEX_BYTES))
        self.index = make_index(num_rows, there, part=config.partitions)
        self._whole: tuple[int, int] = tuple(self.index.shard.tolist())
        num_rows = len(self.index.ids)
        first = 0 if config.partitions is None else config.partitions[0] * (num_rows // config.partitions[1])
        self._row_config = config.storage_config(num_rows, first)
        self._counted = dict.fromkeys(("lookups", "hits", "inserts", "refused", "evictions"), 0)
        self.state_names = tuple(spec.name for spec in states)
        self.clock, self.seed = 0, 0
        self.removed_ids: list[Tensor] | None = None  # ids that have lost rows since somebody asked; None: nobody knows
        self._numbers: Tensor | None = None  # of rows by those that ids have, see `load_row_state`
        self.lock = Lock(there)
        self.sketch = Sketch(self.index, config.admission.appearances) if config.admission.appearances > 1 else None
        super().__init__(config, states, device)

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: Device) -> None:
        config = self.config
        # A batch that reaches a new huge page waits 0.25 ms for the system to clear it; all others are a sixth faster.
        weight = torch.empty(num_rows, config.embedding_dim, dtype=config.dtype, device=device)
        self.weight = nn.Parameter(advise_huge_pages(weight))
        for spec in states:
            shape = self.weight.shape if spec.per_element else self.weight.shape[:1]
            state = torch.empty(shape, dtype=torch.float32, device=self.weight.device)
            self.register_buffer(spec.name, advise_huge_pages(state) if spec.per_element else state)

    @property
    def row_config(self) -> TableConfig:
        return self._row_config

    def row_ids(self) -> Tensor | None:
        return self.index.ids

    @property
    def num_rows(self) -> int:
        """Ids that have a row."""
        return int(self.index.num_rows.sum())

    def tensors(self) -> dict[str, Tensor]:
        """Weight and states by name, of all rows by id; copies."""
        return {name: value for name, value in self.get_state().items() if name in ("weight", *self.state_names)}

    def statistics(self) -> DynamicStatistics:
        """What the table has done so far."""
        made, sets = int(self.index.num_allocated.sum()), int(self.index.num_sets.sum())
        num_bytes = made * (self._row_bytes + 16) + sets * SET_BYTES
        return DynamicStatistics(**self._counted, rows=self.num_rows, capacity=len(self.index.ids), num_bytes=num_bytes)

    def extra_repr(self) -> str:
        c = self.config
        return f"{self.num_rows} of {len(self.index.ids)}, {c.embedding_dim}, pooling={c.pooling!r}, dtype={c.dtype}"

    # For lookups.

    def find(self, ids: Tensor) -> Tensor:
        """Rows int64 `[N]` of ids, -1 of those that have none."""
        return find_all([self], [ids])[0]

    def capacity_error(self, needed: int, missing: int, in_batch: bool) -> ValueError:
        """Of so many new ids, for some of which there is no row."""
        title, eviction = f"table {self.config.name!r}", self.config.eviction
        if not in_batch:
            return ValueError(f"{title} has no room for {missing:,} of {needed:,} new ids; give it more capacity")
        return ValueError(
            f"{title}: a batch has {needed:,} new ids, and {missing:,} of them find no "
            f"room among {len(self.index.ids):,} rows, of which {self.num_rows:,} are taken, as rows of the last "
            f"{eviction.protect} batches stay; give it more capacity, make batches smaller, or protect those of "
            "fewer batches: EvictionConfig(protect=...), at least 1"
        )

    def rule(self, step: int) -> Rule:
        """For a batch of this step."""
        eviction = self.config.eviction
        return step, step - 1 - eviction.protect, eviction.half_life if eviction.policy == "lfu" else 0

    def record_inserted(self, ids: Tensor, rows: Tensor, begins: Tensor) -> None:
        """Note new ids of a step, and the rows they got, -1 if refused; `begins` as of `PendingInsert`."""
        if self.config.admission != AdmissionConfig():
            if self.sketch is not None:
                self.sketch.add(ids, begins.diff())
            self.count(refused=int(begins.diff()[rows < 0].sum()))

    def expire(self) -> None:
        """Remove rows of one partition that were not used for `EvictionConfig.ttl` steps. Waits for the device."""
        (whole, first), ttl = self._whole, self.config.eviction.ttl
        if ttl is not None and 0 <= (partition := self.clock % whole - first) < self.index.num_sets.numel():
            old = expired_ids(self.index, partition, self.clock - ttl - 1)
            self.count(evictions=old.numel())
            self._call("dynamic_remove_", old)
            self.record_removed(old)

    def initial_values(self, ids: Tensor) -> Tensor:
        """`[N, embedding_dim]`, of ids that have no row."""
        values = torch.empty(ids.numel(), self.config.embedding_dim, dtype=self.config.dtype, device=ids.device)
        fill_initial_(values, self.seed, self.config.bound, rows=ids)
        return values

    def add(self, ids: Tensor) -> Tensor:
        """Rows for distinct new ids, ascending, of a table that never evicts any; nothing is written to these."""
        return self._insert(ids, self.rule(self.clock))[0]

    def _insert(self, ids: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """Rows of distinct ids, and bool, which of them are new; nothing is written to these."""
        rows, keys, _ = insert_batch([self], *batch_of([ids]), rules=[rule])
        return rows, keys != NO_KEY

    def read_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Copies of weight and states of distinct rows, where these are."""
        return {name: self._memory(name).detach()[rows] for name in ("weight", *self.state_names)}

    def _write(
        self, rows: Tensor, values: Mapping[str, Tensor], order: Tensor | None = None, ids: Tensor | None = None
    ) -> None:
        """Write weight and all states of distinct rows, of the index's `ids` if not given; `order`: where these are in
        the values."""
        into = [self._memory(name) for name in values]
        source = [value.to(memory).contiguous() for value, memory in zip(values.values(), into, strict=True)]
        move_rows_(into, source, rows, torch.arange(rows.numel(), device=rows.device) if order is None else order)

    def _as_ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        found = torch.as_tensor(ids, dtype=torch.int64, device=self.index.ids.device)
        if found.dim() != 1:
            raise ValueError(f"ids must have one dimension, got shape {tuple(found.shape)}")
        return found.contiguous()

    def record_removed(self, ids: Tensor) -> None:
        """Let who asks for `removed_ids` know that ids have lost their rows."""
        if self.removed_ids is not None and ids.numel():
            self.removed_ids.append(ids)

    def count(self, **numbers: int) -> None:
        """Add to `statistics`."""
        for name, number in numbers.items():
            self._counted[name] += number

    def _call(self, op: str, *args: Any) -> Any:
        return kernel(op, self.index.ids.device)(self.index, *args)

    # For users.

    @_locked
    def ids(self) -> Tensor:
        """All ids that have a row, int64, ascending."""
        return dynamic_rows(self.index)[0]

    @_locked
    def lookup(self, ids: Tensor | Sequence[int]) -> Tensor:
        """`[N, embedding_dim]`: the rows of ids, initial values of those that have none."""
        distinct, inverse = self._as_ids(ids).unique(return_inverse=True)
        rows, found = self.find(distinct), self.initial_values(distinct)
        known = rows >= 0
        found[known] = self.read_rows(rows[known])["weight"].to(found)
        return found[inverse]

    @_locked
    def insert(self, ids: Tensor | Sequence[int], rows: Tensor, **states: Tensor) -> None:
        """Write rows `[N, embedding_dim]` of distinct ids, known or new, and their states, of new ones zero by default.

        They count as used in the step of the last batch, and in a full table others are evicted for them.

        Raises:
            ValueError: for ids given twice, other shapes, and if new ids find no room; nothing has changed.
        """
        ids = self._as_ids(ids)
        ids, order = ids.sort()
        self._check_rows(ids, {"weight": rows, **states})
        found, new = self._insert(ids, self.rule(self.clock))
        known = ~new
        values = {name: value[order.to(value.device)] for name, value in {"weight": rows, **states}.items()}
        if left := [name for name in self.state_names if name not in states]:
            as_they_were = self.read_rows(found[known])
            for name in left:
                before = as_they_were[name]
                values[name] = before.new_zeros(ids.numel(), *before.shape[1:])
                values[name][known.to(before.device)] = before
        self._write(found, values)

    @_locked
    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """Forget ids, their rows and their states; how many of them had a row.

        Rows of batches that are prefetched or whose backward has not run must not be removed.
        """
        distinct = self._as_ids(ids).unique()
        self.record_removed(distinct)
        return int((self._call("dynamic_remove_", distinct) >= 0).sum())

    def export(self, path: str | Path | None = None) -> dict[str, Tensor]:
        """`ids`, `weight`, states, `step` and `count`, sorted by id; written to a .parquet or .npz file, too, if given.

        ValueError for another kind of file.
        """
        saved = self.get_state()
        found = {name: saved[name] for name in ("ids", "weight", *self.state_names, "step", "count")}
        if path is None:
            return found
        suffix = Path(path).suffix
        if suffix not in (".parquet", ".npz"):
            raise ValueError(f"an export is a .parquet or .npz file, got {str(path)!r}")
        arrays = {name: value.cpu().numpy() for name, value in found.items() if name != "weight"}
        arrays["weight"] = found["weight"].float().cpu().numpy()  # NumPy has no bfloat16
        if suffix == ".npz":
            np.savez(path, **arrays)  # type: ignore[arg-type]
        else:
            pyarrow, parquet = require("pyarrow"), require("pyarrow.parquet")
            columns = {
                name: pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(array.reshape(-1)), array.shape[1])
                if array.ndim == 2
                else pyarrow.array(array)
                for name, array in arrays.items()
            }
            parquet.write_table(pyarrow.table(columns), path)
        return found

    def _memory(self, name: str) -> Tensor:
        memory = self.weight.data if name == "weight" else self._buffers[name]
        assert memory is not None
        return memory

    def _check_rows(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        title = f"table {self.config.name!r}"
        if (twice := ids[1:][ids[1:] == ids[:-1]]).numel():
            raise ValueError(f"{title}: id {int(twice[0])} is given twice")
        for name, value in values.items():
            if name not in ("weight", *self.state_names):
                raise ValueError(f"{title} has no state {name!r}, only {list(self.state_names)}")
            shape = (ids.numel(), *self._memory(name).shape[1:])
            if tuple(value.shape) != shape:
                raise ValueError(f"{title}: {name} must have shape {shape}, got {tuple(value.shape)}")

    # For modules.

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Forget all ids; draw another seed, from torch's generator if none is given."""
        self.clear()
        if not self.weight.is_meta:  # nor is torch's generator used then
            self.clock, self.seed = 0, draw_seed() if seed is None else seed

    def clear(self) -> None:
        """Forget all ids."""
        self.removed_ids = None
        if self.sketch is not None:
            self.sketch.clear()
        if not self.index.num_allocated.any():
            return  # zeros would take memory
        index = self.index
        for part in (index.digests, index.overflowed, index.num_rows, index.num_allocated, index.num_overflow):
            part.zero_()
        index.num_sets.fill_(1)

    @_locked
    def get_state(self) -> dict[str, Tensor]:
        """What `state_dict` has; copies."""
        return self.get_row_state(*dynamic_rows(self.index)) | self.get_table_state()

    def get_row_state(self, ids: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """What `state_dict` has of some ids, whose rows these are."""
        uses = {"step": self.index.used[rows].long(), "count": self.index.counts[rows].long()}
        return {"ids": ids, **self._get_stored_rows(rows), **uses}

    def get_table_state(self) -> dict[str, Tensor]:
        """What it has but for rows."""
        found = {"clock": torch.tensor(self.clock), "seed": torch.tensor(self.seed)}
        return found | ({} if self.sketch is None else self.sketch.tensors())

    def _get_stored_rows(self, rows: Tensor) -> dict[str, Tensor]:
        return self.read_rows(rows)

    def templates(self, num_rows: int) -> dict[str, Tensor]:
        """Room for what `state_dict` has, of so many rows."""
        of_rows = {"ids": self.index.ids, **{name: self._memory(name) for name in ("weight", *self.state_names)}}
        of_rows |= dict.fromkeys(("step", "count"), self.index.ids)
        found = {name: torch.empty(num_rows, *each.shape[1:], dtype=each.dtype) for name, each in of_rows.items()}
        found |= {name: torch.empty((), dtype=torch.int64) for name in ("clock", "seed")}
        return found | ({} if self.sketch is None else self.sketch.templates())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if only_parameters():
            return
        destination.update({prefix + name: tensor for name, tensor in self.get_state().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        load_named_tensors(self.templates(0), self.load_state, state_dict, prefix, *args)

    def owns(self, ids: Tensor) -> Tensor:
        """bool `[N]`: whether ids belong to this part of the table."""
        whole, first = self.index.shard.tolist()
        places = partitions_of(ids, whole) - first
        return (places >= 0) & (places < self.index.num_sets.numel())

    @_locked
    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Become what `state_dict` had saved; of a part of a table, its own part of that.

        With `row`, int64 `[rows]`, these are the rows' numbers; weight and states may be left out then, if the store of
        a table on disk has them already. ValueError, before anything changes, if it does not fit.
        """
        title = f"table {self.config.name!r}"
        values = {name: saved[name] for name in ("weight", *self.state_names) if name in saved}
        ids, order = saved["ids"].to(self.index.ids).sort()
        self._check_rows(ids, values)
        if self.sketch is not None:
            self.sketch.check(saved, title)
        mine = self.owns(ids)
        ids, order, room = ids[mine], order[mine], len(self.index.ids) // self.index.num_sets.numel()
        if (most := int(partitions_of(ids, int(self.index.shard[0])).bincount(minlength=1).max())) > room:
            raise ValueError(
                f"{title} has {ids.numel():,} rows in the state_dict, {most:,} of them in a partition that has room "
                f"for {room:,}; give it more capacity"
            )
        self.clear()
        self.reserve(ids.numel() // self.index.num_sets.numel())
        self.load_row_state(saved, order)
        self.apply_row_numbers()
        self.load_table_state(saved)

    def load_table_state(self, saved: Mapping[str, Tensor]) -> None:
        """Take what `state_dict` had saved but for rows."""
        self.clock, self.seed = int(saved["clock"]), int(saved["seed"])
        if self.sketch is not None:
            self.sketch.load(saved)

    def reserve(self, rows: int) -> None:
        """Make ready for so many rows per partition, about, if there are none."""
        index, partitions = self.index, self.index.num_sets.numel()
        if self.num_rows == 0:
            sets = max(1, min(rows // MAX_ROWS_PER_SET, index.overflowed.numel() // partitions))
            index.num_sets.fill_(sets)

    def load_row_state(self, saved: Mapping[str, Tensor], order: Tensor | slice = slice(None)) -> None:
        """Take what `state_dict` had of some ids, all those that are at `order` in it.

        With `row`, they get rows with these numbers when `apply_row_numbers` is called, and not before.
        """
        ids, step, count = (saved[name].to(self.index.ids)[order] for name in ("ids", "step", "count"))
        rows = self._place(ids, step, count)
        if "row" in saved:
            before, rows = rows, saved["row"].to(ids)[order] - self.row_config.row_origin
            if self._numbers is None and not torch.equal(before, rows):
                self._numbers = torch.arange(len(self.index.ids), device=ids.device)
            if self._numbers is not None:
                self._numbers[before] = rows
        if values := {name: saved[name] for name in ("weight", *self.state_names) if name in saved}:
            self._write(rows, values, None if isinstance(order, slice) else order, ids)

    def apply_row_numbers(self) -> None:
        """Let all ids have the rows that `load_row_state` was told."""
        if self._numbers is not None:
            _, rows = dynamic_rows(self.index)
            renumber(self.index, rows, self._numbers[rows])
            self._numbers = None

    def _place(self, ids: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
        """Rows of distinct ids, which there is room for, used so often, last in these steps."""
        rows, new = self._insert(ids, (MAX_USES, -1, 0))  # no step of these is later, so that it can be undone
        self.count(inserts=-int(new.sum()))  # these are of another table's past
        uses = torch.stack([steps.int(), counts.clamp(max=MAX_USES).int()], 1)
        self.index.uses[rows] = uses
        return rows

    def discard(self, ids: Tensor) -> None:
        """Remove distinct ids, if they are here."""
        self._call("dynamic_remove_", ids)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        moved = super()._apply(fn, recurse)
        if (device := self.weight.device) != self.index.ids.device and device.type != "meta":
            self.index = DynamicIndex(*(part.to(device) for part in self.index))
            self.lock.device = device
            if self.sketch is not None:
                self.sketch.move(device)
        return moved


class CachedHashTable(CachedTable):
    """A table whose rows belong to ids that get them in the course of time; a cache on the device has some.

    A record has its row's id, too: which random numbers round a row of 16 bits depends on that. The first values of a
    row are written to its slot; there is nothing to be read.
    """

    _new: tuple[Tensor, Tensor] | None = None  # rows and their new ids, of a batch that is not pinned yet

    seed: int

    initial_values: Any = DynamicTable.initial_values

    def _allocate(self, num_rows: int, states: tuple[StateSpec, ...], device: Device) -> None:
        CachedTable._allocate(self, num_rows, states, device)
        self.register_buffer("id", torch.zeros(num_rows, dtype=torch.int64, device=self.weight.device))

    def row_ids(self) -> Tensor | None:
        return self._buffers["id"]

    def set_new_rows(self, rows: Tensor, ids: Tensor) -> None:
        """Ids of the next batch that is pinned have just got these rows."""
        self._new = rows, ids

    def is_new(self, rows: Tensor) -> Tensor:
        """bool `[N]`, of a batch's distinct rows: which of them ids have just got, so that they need not be read."""
        new = rows[:0] if self._new is None else self._new[0]
        return torch.isin(rows, new, assume_unique=True)

    def initialize_slots(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Give new rows of a batch, whose `rows`, ascending, have been pinned, their first values; their slots."""
        (new, ids), self._new = self._new or (rows[:0], rows[:0]), None
        into = slots[torch.searchsorted(rows, new)]
        states = [field.name for field in self.record.fields if field.name not in ("weight", "id")]
        initialize([self], states, ids, into, torch.zeros_like(into, dtype=torch.int32))
        self.get_buffer("id").index_copy_(0, into, ids)
        return into


class CachedDynamicTable(DynamicTable, CachedHashTable):
    """A dynamic table in host memory or on disk, of whose rows a cache on the device has some."""

    _allocate = CachedHashTable._allocate
    row_ids = CachedHashTable.row_ids

    def _get_stored_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Of a table on disk, where its store is saved as it is: `row`, and `rows.<field>` of all memory."""
        if (found := self.disk_tensors()) is None:
            return self.read_rows(rows)
        return {"row": rows + self.row_config.row_origin, **{f"rows.{name}": value for name, value in found.items()}}

    @_locked
    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """As of `DynamicTable`; nothing of these rows is left in the store, either."""
        rows = self.find(self._as_ids(ids).unique())
        rows = rows[rows >= 0]
        if rows.numel():
            empty = self.templates(rows.numel())
            self._write(rows, {name: empty[name].zero_() for name in ("weight", *self.state_names)})
        return super().remove(ids)

    def _initial_values(self, seed: int) -> Any:
        return lambda rows, records: None  # a row is written when it is given to an id

    def reset_parameters(self, seed: int | None = None) -> None:
        CachedTable.reset_parameters(self, 0)
        DynamicTable.reset_parameters(self, seed)

    def record_inserted(self, ids: Tensor, rows: Tensor, begins: Tensor) -> None:
        super().record_inserted(ids, rows, begins)
        given = nonzero(rows >= 0)
        self.set_new_rows(rows[given], ids[given])
        rows.fill_(-1)  # their slots are initialized, not they

    def read_rows(self, rows: Tensor) -> dict[str, Tensor]:
        if self.cache is not None:
            self.cache.write_back()
        found, (rows, order) = self.templates(rows.numel()), rows.cpu().sort()
        step = max(1, CHUNK_BYTES // self.record.num_bytes)
        for some, places in zip(rows.split(step), order.split(step), strict=True) if rows.numel() else ():
            fields = self.read_records(some)
            for name in ("weight", *self.state_names):
                found[name][places] = fields[name]
        return {name: found[name] for name in ("weight", *self.state_names)}

    def _write(
        self, rows: Tensor, values: Mapping[str, Tensor], order: Tensor | None = None, ids: Tensor | None = None
    ) -> None:
        if order is not None:
            values = {name: value[order.to(value.device)] for name, value in values.items()}
        ids, (rows, order) = self.index.ids[rows] if ids is None else ids, rows.sort()
        step = max(1, CHUNK_BYTES // self.record.num_bytes)
        with self._reloading():
            for some, places in zip(rows.split(step), order.split(step), strict=True):
                fields = {name: value[places.to(value.device)].cpu() for name, value in {**values, "id": ids}.items()}
                self.write_records(some.cpu(), fields)
