"""Hash index of dynamic tables: rows are assigned to ids on first use, if these are admitted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

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
    mix64,
    negative,
    nonzero,
    partitions_of,
    renumber,
    segment_offsets,
)
from tritonemb.ops.registry import kernel
from tritonemb.optimizers import StateSpec
from tritonemb.tables.table import DenseIndex, Lock, Table, initialize
from tritonemb.types import AdmissionConfig, Device, TableConfig

NUM_HASHES = 4  # cells per id
HALVED_AFTER = 8  # occurrences per cell after which a partition's counts are halved


class Sketch:
    """Count-min sketch (Cormode and Muthukrishnan, 2005) of occurrences of ids without rows, with conservative update.

    Each partition has its own cells, which are halved after `HALVED_AFTER` occurrences per cell.
    """

    def __init__(self, index: DynamicIndex, appearances: int) -> None:
        self._num_partitions = index.num_sets.numel()
        self._global_partitions, self._first_partition = index.shard.tolist()
        limit = torch.iinfo(torch.int16).max
        if appearances > limit:
            raise ValueError(f"AdmissionConfig(appearances=...) must be at most {limit}, got {appearances}")
        self._width = 1 << (len(index.free) // self._num_partitions).bit_length()
        device = index.ids.device
        self._cells = torch.zeros(NUM_HASHES, self._num_partitions * self._width, dtype=torch.int16, device=device)
        self._added = torch.zeros(self._num_partitions, dtype=torch.int64, device=device)

    def move(self, device: torch.device) -> None:
        self._cells, self._added = self._cells.to(device), self._added.to(device)

    def tensors(self) -> dict[str, Tensor]:
        return {"sketch": self._cells.int(), "added": self._added.clone()}

    def templates(self) -> dict[str, Tensor]:
        """Return empty tensors of the counts of the unsharded table."""
        cells = torch.empty(NUM_HASHES, self._global_partitions * self._width, dtype=torch.int32)  # gloo sends no int16
        return {"sketch": cells, "added": torch.empty(self._global_partitions, dtype=torch.int64)}

    def shard_spec(self, name: str) -> tuple[list[int], tuple[int, int]]:
        """Return the shape of the unsharded table's `sketch` or `added`, and this shard's offset in it."""
        num_partitions, first = self._global_partitions, self._first_partition
        if name == "added":
            return [num_partitions], (first, 0)
        return [NUM_HASHES, num_partitions * self._width], (0, first * self._width)

    def clear(self) -> None:
        self._cells.zero_()
        self._added.zero_()

    def check(self, saved: Mapping[str, Tensor], title: str) -> None:
        partitions, shape = self._global_partitions, tuple(saved["sketch"].shape)
        width = shape[-1] // partitions if shape else 0
        if shape != (NUM_HASHES, partitions << max(width.bit_length() - 1, 0)) or len(saved["added"]) != partitions:
            expected = f"({NUM_HASHES}, {partitions} times a power of two), and that of added ({partitions},)"
            raise ValueError(
                f"{title}: the shape of sketch must be {expected}, got {shape}: are there other partitions?"
            )

    def load(self, saved: Mapping[str, Tensor], first_partition: int = 0) -> None:
        """Copy this shard's counts from those of the table's partitions from `first_partition` on.

        Of a table of another capacity they stay upper bounds: its cells are repeated, or their largest ones are kept.
        """
        first, added = self._first_partition - first_partition, saved["added"]
        cells = saved["sketch"].unflatten(1, (len(added), -1))[:, first:][:, : self._num_partitions]
        width = min(cells.shape[2], self._width)
        cells = cells.unflatten(2, (-1, width)).amax(2).repeat(1, 1, self._width // width)
        self._cells.copy_(cells.flatten(1))
        self._added.copy_(added[first:][: self._num_partitions])

    def counts(self, ids: Tensor) -> Tensor:
        """Return upper bounds of the ids' occurrences since the last halving, int64 `[N]`."""
        return self._cells.gather(1, self._cells_of(ids)[1]).amin(0).long()

    def add(self, ids: Tensor, occurrences: Tensor) -> None:
        """Add the occurrences of distinct ids."""
        partitions, cells = self._cells_of(ids)
        counts = (self._cells.gather(1, cells).amin(0) + occurrences).clamp(max=torch.iinfo(torch.int16).max)
        self._cells.scatter_reduce_(1, cells, counts.short().expand_as(cells), "amax")
        self._added.index_add_(0, partitions, occurrences)
        full = self._added >= HALVED_AFTER * self._width
        if full.any():
            self._cells.view(NUM_HASHES, self._num_partitions, self._width)[:, full] >>= 1
            self._added[full] = 0

    def _cells_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        mixed, partitions = mix64(ids), partitions_of(ids, self._global_partitions) - self._first_partition
        cells = [mix64(mixed + n) & self._width - 1 for n in range(1, NUM_HASHES + 1)]  # the width is a power of two
        return partitions, partitions * self._width + torch.stack(cells)


class HashIndex(DenseIndex):
    """Index of a dynamic table: a hash table from ids to rows, which ids get when they are first used and admitted."""

    assigns_rows = True

    def __init__(self, config: TableConfig, states: Sequence[StateSpec], device: Device = None) -> None:
        weight_device = torch.empty(0, device=device).device
        index_device = torch.device("cpu") if weight_device.type == "meta" else weight_device
        self._bytes_per_row = config.embedding_dim * config.dtype.itemsize + (0 if config.placement == "device" else 8)
        self._bytes_per_row += sum(4 * (config.embedding_dim if spec.per_element else 1) for spec in states)
        num_rows = config.capacity or max(1, (config.capacity_bytes or 0) // (self._bytes_per_row + INDEX_BYTES))
        self.tensors = make_index(num_rows, index_device, None, config.partitions, config.fallback_rows)
        self.capacity = len(self.tensors.free)
        # Partitions of the unsharded table, the first one of this shard, and their number.
        self.shard: tuple[int, int] = tuple(self.tensors.shard.tolist())
        self.num_partitions = self.tensors.num_sets.numel()
        num_rows = len(self.ids)
        first = 0 if config.partitions is None else config.partitions[0] * (num_rows // config.partitions[1])
        super().__init__(config.storage_config(num_rows, first))
        self.config = config
        self.counters = Counter(lookups=0, hits=0, inserts=0, refused=0, evictions=0)
        self.removed_ids: list[Tensor] | None = None  # evicted or removed since the last snapshot; None: not tracked
        self._row_numbers: Tensor | None = None  # new row number by row, see `set_row_numbers`
        self.lock = Lock(index_device)
        self.sketch = Sketch(self.tensors, config.admission.appearances) if config.admission.appearances > 1 else None
        if weight_device.type == "cpu":
            self.find(self.ids[:0])  # loads Numba, as initial values of a static table do: a second in the first step

    @property
    def ids(self) -> Tensor:  # type: ignore[override]
        return self.tensors.ids

    @property
    def counts(self) -> Tensor:  # type: ignore[override]
        return self.tensors.counts

    @property
    def num_rows(self) -> int:
        """Number of ids that have a row."""
        return int(self.tensors.num_rows.sum())

    @property
    def fallback_rows(self) -> Tensor:
        """Rows of this shard that ids without a row share, int64."""
        return torch.arange(self.capacity, len(self.ids), device=self.ids.device)

    def find(self, ids: Tensor) -> Tensor:
        """Find rows of ids, int64 `[N]`, -1 for ids without one, or of other shards."""
        if self.num_partitions == self.shard[0]:  # all partitions of the table: no copies, and no wait for a GPU
            return self.find_all([self], *concat_ids([ids]))
        rows, owned = torch.full_like(ids, -1), nonzero(self.owns(ids))
        rows[owned] = self.find_all([self], *concat_ids([ids[owned]]))
        return rows

    @staticmethod
    def find_all(indexes: Sequence["HashIndex"], values: Tensor, bounds: Tensor, keys: Sequence[int]) -> Tensor:
        """Find rows of a batch in tables of this kind, int64 `[N]`; for the arguments see `insert_batch`."""
        tensors = [index.tensors for index in indexes]
        rows: Tensor = kernel("dynamic_find_", values.device)(tensors, values, bounds.contiguous(), keys)[0]
        return rows

    def sorted_rows(self) -> tuple[Tensor, Tensor]:
        with self.lock:
            ids, rows = dynamic_rows(self.tensors)
        return ids, torch.cat([rows, self.fallback_rows])

    def fall_back(self, ids: Tensor) -> Tensor:
        """Return the fallback rows of ids, int64 `[N]`: those of an id's partition are in its shard."""
        (num_partitions, first), num_rows = self.shard, len(self.ids) - self.capacity
        rows_per_partition = num_rows // self.num_partitions
        return self.capacity + partitions_of(ids, num_partitions * rows_per_partition) - first * rows_per_partition

    def capacity_error(self, needed: int, missing: int, in_batch: bool) -> ValueError:
        """Return the error for an insertion of `needed` new ids of which `missing` find no row."""
        title, eviction = f"table {self.config.name!r}", self.config.eviction
        if not in_batch:
            return ValueError(f"{title} has no room for {missing:,} of {needed:,} new ids; raise its capacity")
        return ValueError(
            f"{title}: cannot insert {missing:,} of {needed:,} new ids of a batch: {self.num_rows:,} of "
            f"{self.capacity:,} rows are in use, and rows of the last {eviction.protect} batches are protected; "
            "raise the capacity, make batches smaller, or lower EvictionConfig(protect=...), at least 1"
        )

    def rule(self, step: int) -> Rule:
        """Return the eviction rule for a batch of this step."""
        eviction = self.config.eviction
        return step, step - 1 - eviction.protect, eviction.half_life if eviction.policy == "lfu" else 0

    def record_inserted(self, pending: PendingInsert, new_ids: slice, rows: Tensor) -> None:
        """Record a range of the new ids of a step, and their rows, -1 if refused."""
        if self.sketch is not None:
            self.sketch.add(pending.ids[new_ids], pending.count_occurrences()[new_ids])
        if self.config.admission != AdmissionConfig() or self.config.fallback_rows:
            self.counters.update(refused=int(pending.count_occurrences()[new_ids][rows < 0].sum()))

    def expire(self) -> None:
        """Remove rows of one partition that were not used for `EvictionConfig.ttl` steps. Waits for the device."""
        (num_partitions, first), ttl = self.shard, self.config.eviction.ttl
        if ttl is not None and 0 <= (partition := self.clock % num_partitions - first) < self.num_partitions:
            expired = expired_ids(self.tensors, partition, self.clock - ttl - 1)
            self.counters.update(evictions=expired.numel())
            self.discard(expired)
            self.record_removed(expired)

    def record_removed(self, ids: Tensor) -> None:
        """Add ids that have lost their rows to `removed_ids`."""
        if self.removed_ids is not None and ids.numel():
            self.removed_ids.append(ids)

    def clear(self) -> None:
        """Remove all ids."""
        self.removed_ids = None
        self.epoch += 1
        if self.sketch is not None:
            self.sketch.clear()
        if not self.tensors.num_allocated.any():
            return  # writing zeros would allocate memory
        self.tensors = index = DynamicIndex(*self.tensors)
        for tensor in (index.digests, index.overflowed, index.num_rows, index.num_allocated, index.num_overflow):
            tensor.zero_()
        index.num_sets.fill_(1)

    def owns(self, ids: Tensor) -> Tensor:
        """Return which ids belong to this shard of the table, bool `[N]`."""
        num_partitions, first = self.shard
        partitions = partitions_of(ids, num_partitions) - first
        return (partitions >= 0) & (partitions < self.num_partitions)

    def reserve(self, rows: int) -> None:
        """Size an empty index for about `rows` rows per partition."""
        index, partitions = self.tensors, self.num_partitions
        if self.num_rows == 0:
            sets = max(1, min(rows // MAX_ROWS_PER_SET, index.overflowed.numel() // partitions))
            index.num_sets.fill_(sets)

    def set_row_numbers(self, rows: Tensor, numbers: Tensor) -> None:
        """Set the numbers that rows get when `apply_row_numbers` is called; others keep theirs."""
        if self._row_numbers is None and not torch.equal(rows, numbers):
            self._row_numbers = torch.arange(len(self.ids), device=rows.device)
        if self._row_numbers is not None:
            self._row_numbers[rows] = numbers

    def apply_row_numbers(self) -> None:
        """Renumber rows."""
        if self._row_numbers is not None:
            _, rows = dynamic_rows(self.tensors)
            renumber(self.tensors, rows, self._row_numbers[rows])
            self._row_numbers = None

    def discard(self, ids: Tensor) -> Tensor:
        """Remove distinct ids, without recording them; return their rows, -1 if absent, or of other shards."""
        self.generation += ids.numel()
        rows, owned = torch.full_like(ids, -1), nonzero(self.owns(ids))
        rows[owned] = kernel("dynamic_remove_", ids.device)(self.tensors, ids[owned])
        return rows

    def statistics(self) -> dict[str, int]:
        """Return the fields of `DynamicStatistics`."""
        num_allocated = int(self.tensors.num_allocated.sum()) + len(self.fallback_rows)
        num_bytes = num_allocated * (self._bytes_per_row + 16) + int(self.tensors.num_sets.sum()) * SET_BYTES
        return {**self.counters, "rows": self.num_rows, "capacity": self.capacity, "num_bytes": num_bytes}

    def to(self, device: torch.device) -> None:
        if device != self.ids.device and device.type != "meta":
            self.tensors = DynamicIndex(*(tensor.to(device) for tensor in self.tensors))
            self.lock.device = device
            if self.sketch is not None:
                self.sketch.move(device)


def find_batch(tables: Sequence[Table], values: Tensor, bounds: Tensor, table_of_key: Sequence[int]) -> Tensor:
    """Find rows or fallback rows of a batch's ids, int64 `[N]`, -1 for none; for arguments see `insert_batch`."""
    rows: Tensor = tables[0].index.find_all([table.index for table in tables], values, bounds, table_of_key)
    if any(table.config.fallback_rows for table in tables):
        keys = zip(table_of_key, pairwise(bounds.tolist()), strict=True)
        _fall_back(tables, values, rows, [(table, *key) for table, key in keys])
    return rows


def concat_ids(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Concatenate ids of tables, int64, into the arguments of `insert_batch`: values, bounds and tables, a key each."""
    bounds = torch.tensor([*accumulate(map(len, ids), initial=0)], device=ids[0].device)
    return ids[0] if len(ids) == 1 else torch.cat(list(ids)), bounds, range(len(ids))


@torch.no_grad()
def insert_batch(
    tables: Sequence[Table], values: Tensor, bounds: Tensor, table_of_key: Sequence[int],
    occurrences: Tensor | None = None, rules: Sequence[Rule] | None = None, is_step: bool = True,
) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
    """Find or insert the ids of a batch, and count their uses; new rows get initial values and zero states.

    Waits for the device once, more often with admission or `ttl`. A ValueError, if a table is full, changes nothing.

    Args:
        tables: on one device.
        values: int64 `[N]`, the batch.
        bounds: `[K + 1]`, where its keys begin and end.
        table_of_key: index of the table that each key looks up, or -1.
        occurrences: int `[N]`, at least 1: number of occurrences of each value; 1 by default.
        rules: eviction rules; those of the tables by default.
        is_step: False for an insertion of distinct ids outside of a step: it admits all, and initializes no rows.

    Returns:
        Rows, int64 `[N]`, fallback rows or -1 for ids that are refused, and the values themselves for other tables;
        keys, int32 `[N]`, `NO_KEY` except for ids that were inserted; and whether any row is -1.
    """
    device, indexes = values.device, [table.index.tensors for table in tables]
    rules = [table.index.rule(table.index.clock + is_step) for table in tables] if rules is None else rules
    occurrences = None if occurrences is None else occurrences.long().contiguous()
    # Find ids, and count the rows that new ids need. The host reads all counts in one copy, with the offsets of keys in
    # values, then in occurrences.
    offsets = [bounds] if occurrences is None else [bounds, segment_offsets(occurrences)[bounds]]
    for_host, num_counts = torch.cat([values.new_zeros(5 * len(tables)), *offsets]), 5 * len(tables)
    counts, bounds = for_host[:num_counts].view(-1, 5), for_host[num_counts : num_counts + bounds.numel()]
    steps, uses = [step for step, _, _ in rules], (occurrences,)
    rows, previous_steps, keys = kernel("dynamic_find_", device)(indexes, values, bounds, table_of_key, steps, *uses)
    pending: PendingInsert = kernel("dynamic_begin_insert", device)(indexes, values, keys, not is_step, *uses)
    if pending.keys.numel():
        if is_step:
            _admit(tables, pending)
        starts = kernel("dynamic_room", device)(indexes, pending, rules, counts)
    numbers = for_host.tolist()
    key_offsets, ends = numbers[num_counts : num_counts + bounds.numel()], numbers[-bounds.numel() :]
    key_bounds = [(table, *key) for table, key in zip(table_of_key, pairwise(key_offsets), strict=True)]
    table_counts = [numbers[first : first + 5] for first in range(0, num_counts, 5)]
    table_ends = [*accumulate((count[DISTINCT] for count in table_counts), initial=0)]
    lacking = [n for n, c in enumerate(table_counts) if is_step and c[MISSING] and tables[n].config.fallback_rows]
    for number in lacking:
        new_ids = slice(table_ends[number], table_ends[number + 1])
        _refuse_without_room(tables[number].index, pending.ids[new_ids], pending.admitted[new_ids], rules[number][1])
    if lacking:
        starts = kernel("dynamic_room", device)(indexes, pending, rules, counts.zero_())
        table_counts = counts.tolist()
    # Raise before anything changes but uses, which are undone.
    for table, count in zip(tables, table_counts, strict=True):
        if count[MISSING]:
            for number, begin, end in key_bounds:
                if number >= 0:
                    key_uses = None if occurrences is None else occurrences[begin:end]
                    undo_use(indexes[number], rows[begin:end], previous_steps[begin:end], key_uses)
            raise table.index.capacity_error(count[NEEDED], count[MISSING], is_step)
    # Insert new ids and initialize their rows.
    if size := table_ends[-1]:
        ids, table_numbers = pending.ids[:size], pending.tables[:size]
        pending = pending._replace(ids=ids, tables=table_numbers)
        new_rows, evicted = kernel("dynamic_commit_insert_", device)(indexes, pending, starts, rules, rows)
        for table, count, (begin, end) in zip(tables, table_counts, pairwise(table_ends), strict=True):
            table.index.counters.update(inserts=count[NEEDED], evictions=count[EVICTED])
            table.index.generation += count[EVICTED]
            if table.index.removed_ids is not None and count[EVICTED]:
                table.index.removed_ids.append(evicted[begin:end][evicted[begin:end, 1] >= 0, 0].sort().values)
            if is_step:
                table.index.record_inserted(pending, slice(begin, end), new_rows[begin:end])
                table.rows.record_inserted(ids[begin:end], new_rows[begin:end])
        if is_step and not all(table.rows.is_cached for table in tables):
            initialize(tables, ids, new_rows, table_numbers)
    # Replace refused ids by fallback rows.
    refusing = [table for table, c in zip(tables, table_counts, strict=True) if c[NEEDED] < c[DISTINCT]]
    if refusing:
        keys = keys.masked_fill(rows < 0, NO_KEY)
        _fall_back(tables, values, rows, key_bounds)
    # Advance the clocks and count.
    if is_step:
        lookups = [0] * (len(tables) + 1)  # the last one is of other tables, whose number is -1
        for number, (begin, end) in zip(table_of_key, pairwise(ends), strict=True):
            lookups[number] += end - begin
        for table, count, num_lookups in zip(tables, table_counts, lookups, strict=False):
            table.index.clock += 1
            table.index.counters.update(lookups=num_lookups, hits=num_lookups - count[POSITION])
            table.index.expire()
    return rows, keys, any(not table.config.fallback_rows for table in refusing)


def _fall_back(tables: Sequence[Table], values: Tensor, rows: Tensor, keys: Sequence[tuple[int, ...]]) -> None:
    """Replace rows -1 by fallback rows; `keys`: table, begin and end of each key."""
    for number, begin, end in keys:
        if number >= 0 and tables[number].config.fallback_rows:
            positions = begin + negative(rows[begin:end])
            rows[positions] = tables[number].index.fall_back(values[positions])


def _refuse_without_room(hash_index: HashIndex, ids: Tensor, admitted: Tensor, max_step: int) -> None:
    """Refuse new ids, the last ones of each partition that has no room for all."""
    index = hash_index.tensors
    steps = index.last_used[: hash_index.capacity].view(-1, index.num_sets.numel())
    is_allocated = torch.arange(len(steps), device=steps.device)[:, None] < index.num_allocated
    room = len(steps) - index.num_rows + (is_allocated & (steps <= max_step)).sum(0)
    partitions = partitions_of(ids, index.shard[0]) - index.shard[1]
    for partition in partitions.unique().tolist():
        admitted[nonzero(admitted & (partitions == partition))[int(room[partition]) :]] = False


def undo_use(index: DynamicIndex, rows: Tensor, previous_steps: Tensor, occurrences: Tensor | None = None) -> None:
    """Undo the uses that `dynamic_find_` counted for a batch. Counts that were saturated at `MAX_USES` become lower."""
    uses = torch.ones_like(previous_steps) if occurrences is None else occurrences.clamp(max=MAX_USES).int()
    rows, previous_steps, uses = rows[rows >= 0], previous_steps[rows >= 0], uses[rows >= 0]
    changed = previous_steps < index.last_used[rows]
    index.last_used[rows[changed]] = previous_steps[changed]
    index.counts.index_add_(0, rows, -uses)


def expired_ids(index: DynamicIndex, partition: int, last: int) -> Tensor:
    """Return ids of a partition whose rows were not used after the step `last`, int64 `[n]`, ascending."""
    num_partitions = index.num_sets.numel()
    rows = slice(partition, int(index.num_allocated[partition]) * num_partitions, num_partitions)
    return index.ids[rows][index.last_used[rows] <= last].sort().values  # a freed row counts as used


def _admit(tables: Sequence[Table], pending: PendingInsert) -> None:
    """Set `pending.admitted` for tables with an admission config."""
    if all(table.config.admission == AdmissionConfig() for table in tables):
        return
    size, device = int(pending.numbers[-1]), pending.ids.device
    occurrences = pending.count_occurrences()[:size]
    numbers = torch.arange(len(tables) + 1, dtype=torch.int32, device=device)
    bounds = torch.searchsorted(pending.tables[:size], numbers).tolist()
    for table, (begin, end) in zip(tables, pairwise(bounds), strict=True):
        admission, ids, admitted = table.config.admission, pending.ids[begin:end], pending.admitted[begin:end]
        if admission.probability < 1.0:
            drawn = mix64(mix64(ids) ^ table.seed) >> 11 & 2**53 - 1
            admitted &= drawn < int(admission.probability * 2.0**53)
        if table.index.sketch is not None:
            admitted &= table.index.sketch.counts(ids) + occurrences[begin:end] >= admission.appearances
