"""Dynamic tables: hash tables from int64 ids to rows, which are assigned to ids on first use in training."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

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
from tritonemb.ops.registry import kernel
from tritonemb.ops.row_cache import move_rows_
from tritonemb.optimizers import StateSpec
from tritonemb.tables.admission import Sketch, admits
from tritonemb.tables.cached_table import CachedTable, metadata_kind
from tritonemb.tables.table import Table, draw_seed, initialize, load_named_tensors
from tritonemb.types import AdmissionConfig, Device, TableConfig
from tritonemb.utils import require

R = TypeVar("R")


@dataclass(frozen=True)
class DynamicStatistics:
    """Cumulative counters of a dynamic table, and its size.

    Args:
        lookups: occurrences of ids in batches that were trained.
        hits: lookups of ids that had a row.
        inserts: rows assigned to new ids.
        refused: occurrences of ids that were not admitted.
        evictions: rows evicted for new ids, or expired after `EvictionConfig.ttl` steps.
        rows, capacity: rows in use, and their maximum.
        num_bytes: bytes of memory or disk that weights, states and the index of allocated rows take.
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
        """Load factor: rows in use per row of capacity."""
        return self.rows / self.capacity if self.capacity else 0.0

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 1 without lookups."""
        return self.hits / self.lookups if self.lookups else 1.0

    @property
    def bytes_per_row(self) -> float:
        """Bytes per row in use; 0 without rows."""
        return self.num_bytes / self.rows if self.rows else 0.0


def find_all(tables: Sequence["DynamicTable"], ids: Sequence[Tensor]) -> list[Tensor]:
    """Find rows of ids, one tensor per table; see `DynamicTable.find`."""
    return list(find_batch(tables, *concat_ids(ids)).split([*map(len, ids)])) if tables else []


def find_batch(tables: Sequence["DynamicTable"], values: Tensor, bounds: Tensor, table_of_key: Sequence[int]) -> Tensor:
    """Find rows of a batch's ids, int64 `[N]`, -1 for ids without one; for arguments see `insert_batch`."""
    find = kernel("dynamic_find_", values.device)
    rows: Tensor = find([table.index for table in tables], values, bounds.contiguous(), table_of_key)[0]
    return rows


def concat_ids(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Concatenate ids of tables, int64, into the arguments of `insert_batch`: values, bounds and tables, a key each."""
    bounds = segment_offsets(torch.tensor([*map(len, ids)])).to(ids[0].device)
    return ids[0] if len(ids) == 1 else torch.cat(list(ids)), bounds, range(len(ids))


@torch.no_grad()
def insert_batch(
    tables: Sequence["DynamicTable"], values: Tensor, bounds: Tensor, table_of_key: Sequence[int],
    occurrences: Tensor | None = None, rules: Sequence[Rule] | None = None,
) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
    """Find or insert the ids of a batch, and count their uses; new rows get initial values and zero states.

    Waits for the device once, more often with admission or `ttl`. A ValueError, if a table is full, changes nothing.

    Args:
        tables: on one device.
        values: int64 `[N]`, the batch.
        bounds: `[K + 1]`, where its keys begin and end.
        table_of_key: index of the table that each key looks up, or -1.
        occurrences: int `[N]`, at least 1: number of occurrences of each value; 1 by default.
        rules: eviction rules of an insertion that is not a step: it admits all ids and does not initialize rows.

    Returns:
        Rows, int64 `[N]`, -1 for ids that are refused, and the values themselves for other tables; keys, int32 `[N]`,
        `NO_KEY` except for new ids; and whether any id is refused.
    """
    device, indexes, is_step = values.device, [table.index for table in tables], rules is None
    rules = [table.rule(table.clock + 1) for table in tables] if rules is None else rules
    if occurrences is not None:
        ends = segment_offsets(occurrences)
        values, bounds = values.repeat_interleave(occurrences), ends[bounds]
    # Find ids, and count the rows that new ids need. The host reads all counts in one copy.
    for_host = values.new_zeros(5 * len(tables) + bounds.numel())
    counts, bounds = for_host[: 5 * len(tables)].view(-1, 5), for_host[5 * len(tables) :].copy_(bounds)
    steps = [step for step, _, _ in rules]
    rows, previous_steps, keys = kernel("dynamic_find_", device)(indexes, values, bounds, table_of_key, steps)
    pending: PendingInsert = kernel("dynamic_begin_insert", device)(indexes, values, keys)
    if pending.keys.numel():
        if is_step:
            _admit(tables, pending)
        starts = kernel("dynamic_room", device)(indexes, pending, rules, counts)
    numbers = for_host.tolist()
    key_bounds = [(table, *key) for table, key in zip(table_of_key, pairwise(numbers[5 * len(tables) :]), strict=True)]
    table_counts = [numbers[first : first + 5] for first in range(0, 5 * len(tables), 5)]
    # Raise before anything changes but uses, which are undone.
    for table, count in zip(tables, table_counts, strict=True):
        if count[MISSING]:
            for number, begin, end in key_bounds:
                if number >= 0:
                    undo_use(indexes[number], rows[begin:end], previous_steps[begin:end])
            raise table.capacity_error(count[NEEDED], count[MISSING], is_step)
    # Insert new ids and initialize their rows.
    table_ends = [*accumulate((count[DISTINCT] for count in table_counts), initial=0)]
    if size := table_ends[-1]:
        ids, begins, table_numbers = pending.ids[:size], pending.begins[: size + 1], pending.tables[:size]
        pending = pending._replace(ids=ids, begins=begins, tables=table_numbers)
        new_rows, evicted = kernel("dynamic_commit_insert_", device)(indexes, pending, starts, rules, rows)
        for table, count, (begin, end) in zip(tables, table_counts, pairwise(table_ends), strict=True):
            table.count(inserts=count[NEEDED], evictions=count[EVICTED])
            if table.removed_ids is not None and count[EVICTED]:
                table.removed_ids.append(evicted[begin:end][evicted[begin:end, 1] >= 0, 0].sort().values)
            if is_step:
                table.record_inserted(ids[begin:end], new_rows[begin:end], begins[begin : end + 1])
        if is_step and not all(isinstance(table, CachedTable) for table in tables):
            initialize(tables, tables[0].state_names, ids, new_rows, table_numbers)
    # Advance the clocks and count.
    if is_step:
        for number, (table, count) in enumerate(zip(tables, table_counts, strict=True)):
            lookups = sum(end - begin for key, begin, end in key_bounds if key == number)
            table.clock += 1
            table.count(lookups=lookups, hits=lookups - count[POSITION])
            table.expire()
    if occurrences is not None:
        rows, keys = rows[ends[1:] - 1], keys[ends[1:] - 1]
    return rows, keys, any(count[NEEDED] < count[DISTINCT] for count in table_counts)


def undo_use(index: DynamicIndex, rows: Tensor, previous_steps: Tensor) -> None:
    """Undo the uses that `dynamic_find_` counted for a batch. Counts that were saturated at `MAX_USES` become lower."""
    rows, previous_steps = rows[rows >= 0], previous_steps[rows >= 0]
    changed = previous_steps < index.last_used[rows]
    index.last_used[rows[changed]] = previous_steps[changed]
    index.counts.index_add_(0, rows, torch.full_like(previous_steps, -1))


def expired_ids(index: DynamicIndex, partition: int, last: int) -> Tensor:
    """Return ids of a partition whose rows were not used after the step `last`, int64 `[n]`, ascending."""
    num_partitions = index.num_sets.numel()
    rows = slice(partition, int(index.num_allocated[partition]) * num_partitions, num_partitions)
    return index.ids[rows][index.last_used[rows] <= last].sort().values  # a freed row counts as used


def _admit(tables: Sequence["DynamicTable"], pending: PendingInsert) -> None:
    """Set `pending.admitted` for tables with an admission config."""
    if all(table.config.admission == AdmissionConfig() for table in tables):
        return
    size, device = int(pending.numbers[-1]), pending.ids.device
    occurrences = pending.begins[: size + 1].diff()
    numbers = torch.arange(len(tables) + 1, dtype=torch.int32, device=device)
    bounds = torch.searchsorted(pending.tables[:size], numbers).tolist()
    for table, (begin, end) in zip(tables, pairwise(bounds), strict=True):
        if (admission := table.config.admission) != AdmissionConfig():
            table_ids = pending.ids[begin:end], occurrences[begin:end]
            pending.admitted[begin:end] = admits(admission, *table_ids, table.seed, table.sketch)


class Lock:
    """A reentrant lock, which also orders streams. A copy of its owner gets a new lock.

    On a GPU a holder's stream waits for the streams of earlier holders and for recorded updates: a row that one holder
    frees may get initial values from the next one, on another stream.
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
        """Make this thread's stream wait for earlier holders and updates."""
        if (stream := self._stream()) is not None:
            for event in tuple(self._events.values()):
                stream.wait_event(event)

    def record(self, kind: str = "update") -> None:
        """Make later holders wait for the work submitted to this thread's stream so far."""
        if (stream := self._stream()) is not None:
            self._events[kind] = stream.record_event()

    def _stream(self) -> torch.cuda.Stream | None:
        """Return this thread's stream; None on a CPU, or while the stream is being captured and runs nothing."""
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
    """Table with a weight `[capacity, embedding_dim]`, states, and an index from ids to rows.

    `state_dict` has, sorted by id: `ids` int64 `[rows]`, their `weight` and states, `step` int64, the last step that
    used each, and `count` int64, its uses; also `clock`, the number of steps, `seed` of the initial values, and with
    `AdmissionConfig.appearances` `sketch` and `added`.

    A step is a batch that was trained, or prefetched for training. Memory is allocated as rows are, not for the
    capacity. Methods are thread-safe; the tables of a collection share one `lock`.
    """

    index: DynamicIndex
    zeroes_states = False

    def __init__(self, config: TableConfig, states: tuple[StateSpec, ...], device: Device = None) -> None:
        index_device = torch.empty(0, device=device).device
        index_device = torch.device("cpu") if index_device.type == "meta" else index_device
        self._bytes_per_row = config.embedding_dim * config.dtype.itemsize + (0 if config.placement == "device" else 8)
        self._bytes_per_row += sum(4 * (config.embedding_dim if spec.per_element else 1) for spec in states)
        num_rows = config.capacity or max(1, (config.capacity_bytes or 0) // (self._bytes_per_row + INDEX_BYTES))
        self.index = make_index(num_rows, index_device, shard=config.partitions)
        self._shard: tuple[int, int] = tuple(self.index.shard.tolist())
        num_rows = len(self.index.ids)
        first = 0 if config.partitions is None else config.partitions[0] * (num_rows // config.partitions[1])
        self._row_config = config.storage_config(num_rows, first)
        self._counters = dict.fromkeys(("lookups", "hits", "inserts", "refused", "evictions"), 0)
        self.state_names = tuple(spec.name for spec in states)
        self.clock, self.seed = 0, 0
        self.removed_ids: list[Tensor] | None = None  # evicted or removed since the last snapshot; None: not tracked
        self._row_numbers: Tensor | None = None  # saved row number by allocated row, see `load_row_state`
        self.lock = Lock(index_device)
        self.sketch = Sketch(self.index, config.admission.appearances) if config.admission.appearances > 1 else None
        super().__init__(config, states, device)

    @property
    def row_config(self) -> TableConfig:
        return self._row_config

    def row_ids(self) -> Tensor | None:
        return self.index.ids

    @property
    def num_rows(self) -> int:
        """Number of ids that have a row."""
        return int(self.index.num_rows.sum())

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of weight and states of all rows, sorted by id."""
        return {name: value for name, value in self.get_state().items() if name in ("weight", *self.state_names)}

    def statistics(self) -> DynamicStatistics:
        """Return counters and size."""
        num_allocated, num_sets = int(self.index.num_allocated.sum()), int(self.index.num_sets.sum())
        num_bytes = num_allocated * (self._bytes_per_row + 16) + num_sets * SET_BYTES
        return DynamicStatistics(
            **self._counters, rows=self.num_rows, capacity=len(self.index.ids), num_bytes=num_bytes
        )

    def extra_repr(self) -> str:
        c = self.config
        return f"{self.num_rows} of {len(self.index.ids)}, {c.embedding_dim}, pooling={c.pooling!r}, dtype={c.dtype}"

    # For lookups.

    def find(self, ids: Tensor) -> Tensor:
        """Find rows of ids, int64 `[N]`, -1 for ids without one."""
        return find_all([self], [ids])[0]

    def capacity_error(self, needed: int, missing: int, in_batch: bool) -> ValueError:
        """Return the error for an insertion of `needed` new ids of which `missing` find no row."""
        title, eviction = f"table {self.config.name!r}", self.config.eviction
        if not in_batch:
            return ValueError(f"{title} has no room for {missing:,} of {needed:,} new ids; raise its capacity")
        return ValueError(
            f"{title}: cannot insert {missing:,} of {needed:,} new ids of a batch: {self.num_rows:,} of "
            f"{len(self.index.ids):,} rows are in use, and rows of the last {eviction.protect} batches are protected; "
            "raise the capacity, make batches smaller, or lower EvictionConfig(protect=...), at least 1"
        )

    def rule(self, step: int) -> Rule:
        """Return the eviction rule for a batch of this step."""
        eviction = self.config.eviction
        return step, step - 1 - eviction.protect, eviction.half_life if eviction.policy == "lfu" else 0

    def record_inserted(self, ids: Tensor, rows: Tensor, begins: Tensor) -> None:
        """Record new ids of a step and their rows, -1 if refused; for `begins` see `PendingInsert`."""
        if self.config.admission != AdmissionConfig():
            if self.sketch is not None:
                self.sketch.add(ids, begins.diff())
            self.count(refused=int(begins.diff()[rows < 0].sum()))

    def expire(self) -> None:
        """Remove rows of one partition that were not used for `EvictionConfig.ttl` steps. Waits for the device."""
        (num_partitions, first), ttl = self._shard, self.config.eviction.ttl
        if ttl is not None and 0 <= (partition := self.clock % num_partitions - first) < self.index.num_sets.numel():
            expired = expired_ids(self.index, partition, self.clock - ttl - 1)
            self.count(evictions=expired.numel())
            self._call("dynamic_remove_", expired)
            self.record_removed(expired)

    def _insert(self, ids: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        """Find or assign rows of distinct ids; return them and a mask of new ids. Rows are not initialized."""
        rows, keys, _ = insert_batch([self], *concat_ids([ids]), rules=[rule])
        return rows, keys != NO_KEY

    def read_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Read weight and states of distinct rows; return copies by name."""
        return {name: self._memory(name).detach()[rows] for name in ("weight", *self.state_names)}

    def _write(
        self, rows: Tensor, values: Mapping[str, Tensor], order: Tensor | None = None, ids: Tensor | None = None
    ) -> None:
        """Write weight and states of distinct rows from `values[order]`. `ids` are those of the index by default."""
        target = [self._memory(name) for name in values]
        source = [value.to(memory).contiguous() for value, memory in zip(values.values(), target, strict=True)]
        move_rows_(target, source, rows, torch.arange(rows.numel(), device=rows.device) if order is None else order)

    def _to_ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        tensor = torch.as_tensor(ids, dtype=torch.int64, device=self.index.ids.device)
        if tensor.dim() != 1:
            raise ValueError(f"ids must have one dimension, got shape {tuple(tensor.shape)}")
        return tensor.contiguous()

    def record_removed(self, ids: Tensor) -> None:
        """Add ids that have lost their rows to `removed_ids`."""
        if self.removed_ids is not None and ids.numel():
            self.removed_ids.append(ids)

    def count(self, **numbers: int) -> None:
        """Add to the counters of `statistics`."""
        for name, number in numbers.items():
            self._counters[name] += number

    def _call(self, op: str, *args: Any) -> Any:
        return kernel(op, self.index.ids.device)(self.index, *args)

    # For users.

    @_locked
    def ids(self) -> Tensor:
        """Return all ids that have a row, int64, ascending."""
        return dynamic_rows(self.index)[0]

    @_locked
    def lookup(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Look up rows of ids, `[N, embedding_dim]`; ids without a row read as initial values."""
        distinct, inverse = self._to_ids(ids).unique(return_inverse=True)
        rows, values = self.find(distinct), self.initial_values(distinct)
        known_mask = rows >= 0
        values[known_mask] = self.read_rows(rows[known_mask])["weight"].to(values)
        return values[inverse]

    @_locked
    def insert(self, ids: Tensor | Sequence[int], rows: Tensor, **states: Tensor) -> None:
        """Insert or overwrite rows `[N, embedding_dim]` of distinct ids, and states, which are zero by default if new.

        Rows count as used in the step of the last batch. A full table evicts rows for new ids. ValueError for duplicate
        ids, wrong shapes, or a table without room; nothing is changed then.
        """
        ids = self._to_ids(ids)
        ids, order = ids.sort()
        self._check_rows(ids, {"weight": rows, **states})
        assigned_rows, new_mask = self._insert(ids, self.rule(self.clock))
        known_mask = ~new_mask
        values = {name: value[order.to(value.device)] for name, value in {"weight": rows, **states}.items()}
        if missing := [name for name in self.state_names if name not in states]:
            stored = self.read_rows(assigned_rows[known_mask])
            for name in missing:
                state = stored[name]
                values[name] = state.new_zeros(ids.numel(), *state.shape[1:])
                values[name][known_mask.to(state.device)] = state
        self._write(assigned_rows, values)

    @_locked
    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """Remove ids with their rows and states; return how many had a row.

        Rows of prefetched batches, or of batches whose backward has not run, must not be removed.
        """
        distinct = self._to_ids(ids).unique()
        self.record_removed(distinct)
        return int((self._call("dynamic_remove_", distinct) >= 0).sum())

    def export(self, path: str | Path | None = None) -> dict[str, Tensor]:
        """Return `ids`, `weight`, states, `step` and `count`, sorted by id; with a path also write them to a file.

        ValueError unless the file is .parquet or .npz.
        """
        state = self.get_state()
        tensors = {name: state[name] for name in ("ids", "weight", *self.state_names, "step", "count")}
        if path is None:
            return tensors
        suffix = Path(path).suffix
        if suffix not in (".parquet", ".npz"):
            raise ValueError(f"an export must be a .parquet or .npz file, got {str(path)!r}")
        arrays = {name: value.cpu().numpy() for name, value in tensors.items() if name != "weight"}
        arrays["weight"] = tensors["weight"].float().cpu().numpy()  # NumPy has no bfloat16
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
        return tensors

    def _memory(self, name: str) -> Tensor:
        memory = self.weight.data if name == "weight" else self._buffers[name]
        assert memory is not None
        return memory

    def _check_rows(self, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        title = f"table {self.config.name!r}"
        if (duplicates := ids[1:][ids[1:] == ids[:-1]]).numel():
            raise ValueError(f"{title}: duplicate id {int(duplicates[0])}; ids must be distinct")
        for name, value in values.items():
            if name not in ("weight", *self.state_names):
                raise ValueError(f"{title} has no state {name!r}, only {list(self.state_names)}")
            shape = (ids.numel(), *self._memory(name).shape[1:])
            if tuple(value.shape) != shape:
                raise ValueError(f"{title}: {name} must have shape {shape}, got {tuple(value.shape)}")

    # For modules.

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Remove all ids, and draw a new seed, from torch's generator by default."""
        self.clear()
        if not self.weight.is_meta:  # a meta table leaves torch's generator unchanged
            self.clock, self.seed = 0, draw_seed() if seed is None else seed

    def clear(self) -> None:
        """Remove all ids."""
        self.removed_ids = None
        if self.sketch is not None:
            self.sketch.clear()
        if not self.index.num_allocated.any():
            return  # writing zeros would allocate memory
        index = self.index
        for tensor in (index.digests, index.overflowed, index.num_rows, index.num_allocated, index.num_overflow):
            tensor.zero_()
        index.num_sets.fill_(1)

    @_locked
    def get_state(self) -> dict[str, Tensor]:
        """Return copies of all tensors of `state_dict`."""
        return self.get_row_state(*dynamic_rows(self.index)) | self.get_table_state()

    def get_row_state(self, ids: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Return the tensors of `state_dict` of ids, with these rows."""
        uses = {"step": self.index.last_used[rows].long(), "count": self.index.counts[rows].long()}
        return {"ids": ids, **self._get_stored_rows(rows), **uses}

    def get_table_state(self) -> dict[str, Tensor]:
        """Return the tensors of `state_dict` that are not per row."""
        state = {"clock": torch.tensor(self.clock), "seed": torch.tensor(self.seed)}
        return state | ({} if self.sketch is None else self.sketch.tensors())

    def _get_stored_rows(self, rows: Tensor) -> dict[str, Tensor]:
        return self.read_rows(rows)

    def templates(self, num_rows: int) -> dict[str, Tensor]:
        """Return empty tensors of `state_dict` for `num_rows` rows."""
        row_tensors = {"ids": self.index.ids, **{name: self._memory(name) for name in ("weight", *self.state_names)}}
        row_tensors |= dict.fromkeys(("step", "count"), self.index.ids)
        empty = {name: torch.empty(num_rows, *t.shape[1:], dtype=t.dtype) for name, t in row_tensors.items()}
        empty |= {name: torch.empty((), dtype=torch.int64) for name in ("clock", "seed")}
        return empty | ({} if self.sketch is None else self.sketch.templates())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if metadata_kind() == "parameters":
            return
        destination.update({prefix + name: tensor for name, tensor in self.get_state().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        load_named_tensors(self.templates(0), self.load_state, state_dict, prefix, *args)

    def owns(self, ids: Tensor) -> Tensor:
        """Return which ids belong to this shard of the table, bool `[N]`."""
        num_partitions, first = self.index.shard.tolist()
        partitions = partitions_of(ids, num_partitions) - first
        return (partitions >= 0) & (partitions < self.index.num_sets.numel())

    @_locked
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict`; a shard loads its own ids.

        `row`, int64 `[rows]`, gives row numbers; then weight and states may be omitted if the store of a table on disk
        has them already. ValueError, before anything changes, if the state does not fit.
        """
        title = f"table {self.config.name!r}"
        values = {name: state[name] for name in ("weight", *self.state_names) if name in state}
        ids, order = state["ids"].to(self.index.ids).sort()
        self._check_rows(ids, values)
        if self.sketch is not None:
            self.sketch.check(state, title)
        owned_mask = self.owns(ids)
        ids, order, capacity = ids[owned_mask], order[owned_mask], len(self.index.ids) // self.index.num_sets.numel()
        if (max_rows := int(partitions_of(ids, int(self.index.shard[0])).bincount(minlength=1).max())) > capacity:
            raise ValueError(
                f"{title} has {ids.numel():,} rows in the state_dict, {max_rows:,} of them in a partition that has "
                f"room for {capacity:,}; raise its capacity"
            )
        self.clear()
        self.reserve(ids.numel() // self.index.num_sets.numel())
        self.load_row_state(state, order)
        self.apply_row_numbers()
        self.load_table_state(state)

    def load_table_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state_dict` that are not per row."""
        self.clock, self.seed = int(state["clock"]), int(state["seed"])
        if self.sketch is not None:
            self.sketch.load(state)

    def reserve(self, rows: int) -> None:
        """Size an empty index for about `rows` rows per partition."""
        index, partitions = self.index, self.index.num_sets.numel()
        if self.num_rows == 0:
            sets = max(1, min(rows // MAX_ROWS_PER_SET, index.overflowed.numel() // partitions))
            index.num_sets.fill_(sets)

    def load_row_state(self, state: Mapping[str, Tensor], order: Tensor | slice = slice(None)) -> None:
        """Load the tensors of `state_dict` of ids, those at `order`.

        Row numbers in `row` take effect when `apply_row_numbers` is called.
        """
        ids, step, count = (state[name].to(self.index.ids)[order] for name in ("ids", "step", "count"))
        rows = self._allocate_rows(ids, step, count)
        if "row" in state:
            allocated_rows, rows = rows, state["row"].to(ids)[order] - self.row_config.row_origin
            if self._row_numbers is None and not torch.equal(allocated_rows, rows):
                self._row_numbers = torch.arange(len(self.index.ids), device=ids.device)
            if self._row_numbers is not None:
                self._row_numbers[allocated_rows] = rows
        if values := {name: state[name] for name in ("weight", *self.state_names) if name in state}:
            self._write(rows, values, None if isinstance(order, slice) else order, ids)

    def apply_row_numbers(self) -> None:
        """Renumber rows to the row numbers that `load_row_state` has loaded."""
        if self._row_numbers is not None:
            _, rows = dynamic_rows(self.index)
            renumber(self.index, rows, self._row_numbers[rows])
            self._row_numbers = None

    def _allocate_rows(self, ids: Tensor, steps: Tensor, counts: Tensor) -> Tensor:
        """Assign rows to distinct ids, with these last steps and use counts; there must be room for them."""
        rows, new_mask = self._insert(ids, (MAX_USES, -1, 0))  # the latest step, so that uses can be undone
        self.count(inserts=-int(new_mask.sum()))  # do not count loaded rows as inserts
        uses = torch.stack([steps.int(), counts.clamp(max=MAX_USES).int()], 1)
        self.index.uses[rows] = uses
        return rows

    def discard(self, ids: Tensor) -> None:
        """Remove distinct ids if present, without recording them."""
        self._call("dynamic_remove_", ids)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        table = super()._apply(fn, recurse)
        if (device := self.weight.device) != self.index.ids.device and device.type != "meta":
            self.index = DynamicIndex(*(tensor.to(device) for tensor in self.index))
            self.lock.device = device
            if self.sketch is not None:
                self.sketch.move(device)
        return table


class CachedDynamicTable(DynamicTable, CachedTable):
    """Dynamic table in host memory or on disk, with a device cache and its index on the device."""

    zeroes_states, _allocate = True, CachedTable._allocate
    row_ids = CachedTable.row_ids

    def _get_stored_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Return weight and states of rows; or row numbers and references to the store, if that is saved as a file."""
        if (references := self.disk_tensors()) is None:
            return self.read_rows(rows)
        fields = {f"rows.{name}": reference for name, reference in references.items()}
        return {"row": rows + self.row_config.row_origin, **fields}

    @_locked
    def remove(self, ids: Tensor | Sequence[int]) -> int:
        """Remove ids like `DynamicTable.remove`, and overwrite their rows in the store with zeros."""
        rows = self.find(self._to_ids(ids).unique())
        rows = rows[rows >= 0]
        if rows.numel():
            empty = self.templates(rows.numel())
            self._write(rows, {name: empty[name].zero_() for name in ("weight", *self.state_names)})
        return super().remove(ids)

    def _initial_values(self, seed: int) -> Any:
        return lambda rows, records: None  # a row is initialized when it is assigned to an id

    def reset_parameters(self, seed: int | None = None) -> None:
        CachedTable.reset_parameters(self, 0)
        DynamicTable.reset_parameters(self, seed)

    def record_inserted(self, ids: Tensor, rows: Tensor, begins: Tensor) -> None:
        super().record_inserted(ids, rows, begins)
        inserted = nonzero(rows >= 0)
        self.new_rows = rows[inserted], ids[inserted]
        rows.fill_(-1)  # their slots are initialized instead

    def read_rows(self, rows: Tensor) -> dict[str, Tensor]:
        if self.cache is not None:
            self.cache.write_back()
        tensors, (rows, order) = self.templates(rows.numel()), rows.cpu().sort()
        for chunk, fields in self._chunks(rows):
            for name in ("weight", *self.state_names):
                tensors[name][order[chunk]] = fields[name]
        return {name: tensors[name] for name in ("weight", *self.state_names)}

    def _write(
        self, rows: Tensor, values: Mapping[str, Tensor], order: Tensor | None = None, ids: Tensor | None = None
    ) -> None:
        if order is not None:
            values = {name: value[order.to(value.device)] for name, value in values.items()}
        tensors = {**values, "id": self.index.ids[rows] if ids is None else ids}
        rows, order = rows.sort()
        with self._reloading():
            for chunk, fields in self._chunks(rows.cpu(), read=False, write=True):
                for name, field in fields.items():
                    field.copy_(tensors[name][order[chunk].to(tensors[name].device)])
