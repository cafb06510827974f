"""Rows of a server's partitions of a collection's tables, in memory or on disk, their changes, and their leases."""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.layout import NO_KEY, NO_ROW, nonzero, segment_offsets
from tritonemb.memory import concat, describe_tensors
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.server.spec import CollectionSpec
from tritonemb.server.transport import empty_tensors
from tritonemb.storage.store import cpu_kernels
from tritonemb.tables.batch import AssignedRows, RowBatch
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.index import find_batch, insert_batch
from tritonemb.tables.table import initial_values
from tritonemb.tables.table_set import TableSet
from tritonemb.tables.tier_lookup import PinnedBatch, prefetch_batch
from tritonemb.types import CacheConfig
from tritonemb.utils import join_names

NO_ROWS, MAX_KEY = torch.empty(0, dtype=torch.int64), 2**63 - 1


@dataclass
class SnapshotChain:
    """Changes since the last snapshot of a chain, by number of the table."""

    snapshot: str  # name of that snapshot
    changed: dict[int, Tensor]  # bool by row: read by a training batch or written since then
    removed: dict[int, list[Tensor]]  # ids that have lost their rows since then


class RowChanges:
    """Changes of the rows of `tables`, by number: since the last snapshots, and since trainers have cached them."""

    def __init__(self, tables: Mapping[int, DynamicTable]) -> None:
        self._tables = tables
        self.chains: dict[str, SnapshotChain] = {}  # by name
        # By number of the table, int64 by row: a number that is unique to the row's present content. None until a
        # trainer with a cache pulls.
        self.versions: dict[int, Tensor] | None = None
        self.version = 0  # last one, also of another server that had the tables before

    def mark(self, rows: Mapping[int, Tensor], new_masks: Mapping[int, Tensor] | None = None) -> None:
        """Note that rows, -1: no row, were written, or, with `new_masks`, read or inserted; by number of the table."""
        for number, table_rows in rows.items():
            for chain in self.chains.values():
                chain.changed[number][table_rows[table_rows >= 0]] = True
            if self.versions is not None:
                self.version += 2
                new_rows = table_rows if new_masks is None else table_rows[new_masks[number]]
                new_rows = new_rows[new_rows >= 0]
                # An id may change between a row and its fallback row: both must not have one version.
                self.versions[number][new_rows] = self.version + (new_rows >= self._tables[number].index.capacity)

    def track_versions(self) -> None:
        if self.versions is None:
            self.version = max(time.time_ns(), self.version + 2)  # above all versions of an earlier process
            self.versions = {n: torch.full_like(table.index.ids, self.version) for n, table in self._tables.items()}

    def versions_of(self, number: int, rows: Tensor) -> Tensor:
        """Return the versions of a table's rows; `NO_ROW` for row -1."""
        assert self.versions is not None
        return torch.where(rows < 0, NO_ROW, self.versions[number][rows.clamp(min=0)])

    def begin_chain(self, name: str, snapshot: str) -> None:
        """Track changes since a snapshot, which is now the last one of a chain."""
        changed = {n: torch.zeros(len(table.index.ids), dtype=torch.bool) for n, table in self._tables.items()}
        self.chains[name] = SnapshotChain(snapshot, changed, {number: [] for number in changed})
        for table in self._tables.values():
            table.index.removed_ids = []

    def note_removed(self) -> None:
        """Add removed ids to all chains; drop chains for which a full snapshot is smaller."""
        for number, table in self._tables.items():
            for name, chain in list(self.chains.items()):
                chain.removed[number] += table.index.removed_ids or []
                if table.index.removed_ids is None or sum(map(len, chain.removed[number])) > len(table.index.ids):
                    del self.chains[name]
            table.index.removed_ids = [] if self.chains else None


class Partitions:
    """Partitions of a collection's tables, in memory, or on disk with a `cache`.

    Ids and rows are those of this server's tables, table by table; `sizes` are their numbers.
    """

    def __init__(self, spec: CollectionSpec, server: int, cache: CacheConfig | None = None) -> None:
        self.spec, self.server, self.numbers = spec, server, spec.tables_on(server)
        # Trainers apply `max_gradient`, before they sum the gradients of a row.
        optimizer_args = spec.optimizer | {"max_gradient": None}
        optimizer = OPTIMIZERS[optimizer_args.pop("name")](**optimizer_args)
        configs = [spec.tables[n].config(*spec.partitions(n, server), cache) for n in self.numbers]
        self.tables = TableSet(configs, optimizer, "cpu", pooled=False) if configs else None
        self.dynamic = cast(list[DynamicTable], [] if self.tables is None else list(self.tables.dynamic.values()))
        self.by_number = dict(zip(self.numbers, self.dynamic, strict=True))
        for number, table in self.by_number.items():
            table.reset_parameters(spec.tables[number].seed)
        self.changes, self._memories = RowChanges(self.by_number), self._read_memories()
        self.blocks = [slice(*(bisect_left(self.numbers, n) for n in (s.start, s.stop))) for s in spec.blocks]

    def owned(self, ids: Tensor, sizes: Sequence[int], numbers: Sequence[int]) -> Tensor:
        """Return the positions of ids of this server's partitions and shards; `numbers`: tables of the ids."""
        return cast(Tensor, self.spec.route(ids, sizes, numbers)[0][self.server])

    def checked(self, sizes: list[int], tensors: Sequence[Tensor], numbers: Sequence[int] | None = None) -> Any:
        """Return integer tensors `[n]` of a message, ids first. ValueError for other ones, or ids of other servers."""
        ids, numbers = tensors[0], self.numbers if numbers is None else numbers
        shapes_match = all(t.shape == (sum(sizes),) and not t.is_floating_point() for t in tensors)
        shapes_match &= len(sizes) == len(numbers) and min(sizes, default=0) >= 0
        if ids.dtype != torch.int64 or not shapes_match or not self.spec.owns(self.server, ids, sizes, numbers):
            raise ValueError("ids must be int64 [n], and belong to this server")
        return tensors

    def insert(self, ids: Tensor, sizes: Sequence[int], occurrences: Tensor) -> Tensor:
        """Return row numbers of a training batch's ids, which are inserted where they have none; -1: not admitted."""
        if self.tables is None:
            return NO_ROWS
        known_rows = () if self.changes.versions is None else self.find(ids, sizes).split(sizes)
        rows, *_ = insert_batch(self.dynamic, ids, offsets_of(sizes), range(len(sizes)), occurrences)
        by_number = dict(zip(self.numbers, rows.split(sizes), strict=True))
        masks = (old_rows != new_rows for old_rows, new_rows in zip(known_rows, by_number.values(), strict=False))
        self.changes.mark(by_number, dict(zip(self.numbers, masks, strict=False)))
        self.changes.note_removed()
        return rows

    def find(self, ids: Tensor, sizes: Sequence[int], numbers: Sequence[int] | None = None) -> Tensor:
        """Find row numbers of ids of tables, all by default; -1 for ids without a row."""
        tables, bounds = self.dynamic if numbers is None else [self.by_number[n] for n in numbers], torch.tensor(sizes)
        return find_batch(tables, ids, segment_offsets(bounds), range(len(sizes))) if tables else NO_ROWS

    def read(self, ids: Tensor, sizes: Sequence[int], rows: Tensor | None = None) -> list[Tensor]:
        """Read rows of ids, or of their row numbers; initial values without a row. Return a matrix per block."""
        rows, tables = self.find(ids, sizes) if rows is None else rows, self.spec.tables
        blocks = zip(self.blocks, (tables[numbers.start] for numbers in self.spec.blocks), strict=True)
        matrices = empty_tensors([(table.dtype, [sum(sizes[block]), table.embedding_dim]) for block, table in blocks])
        self.copy([{"weight": matrix} for matrix in matrices], self.blocks, rows, sizes, self.numbers, ids)
        return matrices

    def copy(
        self, fields: Sequence[dict[str, Tensor]], blocks: Sequence[slice], rows: Tensor, sizes: Sequence[int],
        numbers: Sequence[int], ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Read rows of tables `numbers` into fields by name, per block of tables, or without `ids` write them.

        Row -1 reads as the initial value of its id.
        """
        # Rows of tables on disk are pinned in slots of memory meanwhile.
        batch, memories, slots = self.pin(rows, sizes, numbers), self._memories, rows
        if batch is not None and (pins := batch.pins) is not None:
            pins.is_dirty, slots, memories = ids is None, rows.clone(), self._read_memories()
            for number, table_slots in zip(numbers, slots.split(sizes), strict=True):
                pinned_rows, pinned_slots = pins.rows_of(self.numbers.index(number))
                known = nonzero(table_slots >= 0)
                table_slots[known] = pinned_slots[torch.searchsorted(pinned_rows, table_slots[known])]
        try:
            move_rows(fields, blocks, [memories[number] for number in numbers], slots, sizes, write=ids is None)
        finally:
            if batch is not None:
                batch.release()
        if ids is not None and (missing := nonzero(rows < 0)).numel():
            positions, offsets = positions_in(blocks, sizes), offsets_of(sizes)
            entries = torch.searchsorted(offsets, missing, right=True, out_int32=True) - 1
            for table_fields, block in zip(fields, blocks, strict=True):
                part = slice(*torch.searchsorted(missing, offsets[[block.start, block.stop]]).tolist())
                if part.start < part.stop:
                    tables, at = [self.by_number[number] for number in numbers[block]], missing[part]
                    table_fields["weight"][positions[at]] = initial_values(tables, ids[at], entries[part] - block.start)

    @torch.no_grad()
    def update(self, ids: Tensor, sizes: Sequence[int], grads: list[Tensor], lr: float | None) -> None:
        """Apply one optimizer step to gradients of ids, which may repeat, with a learning rate, or the last one."""
        assert self.tables is not None
        rows = self.find(ids, sizes)  # -1: refused, or evicted since the pull, without fallback rows; takes no gradient
        self.changes.mark(dict(zip(self.numbers, rows.split(sizes), strict=True)))
        if lr not in (None, self.tables.current_learning_rate):
            self.tables.set_learning_rate(lr)
        # Rows of tables on disk are pinned, others are grouped directly.
        if (pinned := self.pin(rows, sizes)) is not None and pinned.pins is not None:
            self.tables.update.step(self.tables, grads, pinned.rows, [pinned.pins])
            return
        batch, layout = self._batch(rows, sizes), self.tables.layout(self.tables.feature_names, torch.device("cpu"))
        groups = ops.row_groups(batch.values(), batch.offsets(), layout)
        row_batch = RowBatch(batch.values(), batch.offsets(), None, groups, layout)
        self.tables.update.step(self.tables, grads, row_batch)

    def pin(self, rows: Tensor, sizes: Sequence[int], numbers: Sequence[int] | None = None) -> PinnedBatch | None:
        """Prefetch rows of tables on disk, -1: none, and pin their slots until release. None for tables in memory."""
        if self.tables is None or self.tables.cache is None:
            return None
        if numbers is not None:
            by_number = dict(zip(numbers, sizes, strict=True))
            sizes = [by_number.get(number, 0) for number in self.numbers]
        batch = self._batch(rows, sizes)
        # The version is not compared: the batch is used at once.
        return prefetch_batch(self.tables, batch, AssignedRows(batch, None, None, True, (0, 0, 0)))

    def _read_memories(self) -> dict[int, dict[str, Tensor]]:
        """Return weight and states in memory by number of the table; those of a table on disk may be replaced."""
        return {number: table.device_tensors() for number, table in self.by_number.items()}

    def _batch(self, values: Tensor, sizes: Sequence[int]) -> KeyedJaggedTensor:
        assert self.tables is not None
        return KeyedJaggedTensor.unchecked(self.tables.feature_names, values, None, offsets_of(sizes))


class Entries(NamedTuple):
    """Rows of tables, table by table; a table may be there twice."""

    numbers: Sequence[int]  # of the tables
    sizes: list[int]  # number of rows per entry
    keys: Tensor  # int64 `[n]`, ids of a static table, row numbers of a dynamic one


class Lease:
    """Records of rows, weight and optimizer states, for a trainer that applies the optimizer itself."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions, self.is_active = partitions, False  # whether a trainer has rows that it has not written back
        tables = partitions.spec.tables
        self.dynamic_numbers = [number for number in partitions.numbers if tables[number].num_embeddings is None]

    @torch.no_grad()
    def allocate(self, ids: Tensor, sizes: Sequence[int], occurrences: Tensor, insert: bool) -> list[Tensor]:
        """Return rows of a batch's distinct ids in dynamic tables, -1 for refused ids, and the mask of new ids.

        ValueError if a table is full; then the tables are unchanged.
        """
        partitions = self._partitions
        tables = [partitions.by_number[number] for number in self.dynamic_numbers]
        if not insert or not tables:
            rows = partitions.find(ids, sizes, self.dynamic_numbers)
            return [rows, torch.zeros_like(rows, dtype=torch.bool)]
        bounds = offsets_of(sizes)
        rows, keys, _ = insert_batch(tables, ids, bounds, range(len(sizes)), occurrences)
        by_number = dict(zip(self.dynamic_numbers, rows.split(sizes), strict=True))
        partitions.changes.mark(by_number)
        partitions.changes.note_removed()
        if (pinned := partitions.pin(rows, sizes, self.dynamic_numbers)) is not None:
            pinned.release()
        return [rows, keys != NO_KEY]

    def check(self, entries: Entries, records: Sequence[Tensor], blocks: Sequence[slice]) -> None:
        """Check entries, whose keys ascend per table, and the records of the first of them, by block; ValueError."""
        # Static ids belong to this server, dynamic rows exist, all ascend, as do tables that are written, and read.
        (numbers, sizes, keys), partitions, dynamic = entries, self._partitions, self.dynamic_numbers
        static = [(size, number) for number, size in zip(numbers, sizes, strict=True) if number not in dynamic]
        limits = torch.tensor([len(partitions.by_number[n].index.ids) if n in dynamic else MAX_KEY for n in numbers])
        limits, bounds = limits.repeat_interleave(torch.tensor(sizes)), offsets_of(sizes)
        ids, columns = keys[limits == MAX_KEY], [[pair[column] for pair in static] for column in (0, 1)]
        descents = keys[1:] <= keys[:-1]
        descents[bounds[(bounds > 0) & (bounds < len(keys))] - 1] = False
        exist = bool(((keys >= 0) & (keys < limits)).all()) and partitions.spec.owns(partitions.server, ids, *columns)
        num_writes = blocks[-1].stop if blocks else 0
        in_order = all(a < b for part in (numbers[:num_writes], numbers[num_writes:]) for a, b in pairwise(part))
        if not (exist and in_order) or descents.any():
            names = join_names(partitions.by_number[number].config.name for number in numbers)
            raise ValueError(f"tables {names} do not have these rows on this server")
        if describe_tensors(records) != (shapes := partitions.spec.record_shapes(numbers, sizes, blocks)):
            raise ValueError(f"records must be {shapes}")

    @torch.no_grad()
    def read(self, entries: Entries) -> list[Tensor]:
        """Return records, a matrix per block of `CollectionSpec.record_blocks`."""
        partitions, (numbers, sizes, keys) = self._partitions, entries
        if not numbers:
            return []
        rows, blocks = self._rows(entries), partitions.spec.record_blocks(numbers)
        shapes = partitions.spec.record_shapes(numbers, sizes, blocks)
        records = [matrix.zero_() for matrix in empty_tensors(shapes)]
        fields = self._fields(numbers, records, blocks)
        partitions.copy(fields, blocks, rows, sizes, numbers, keys)
        if self.dynamic_numbers:
            for table_fields, ids in zip(fields, self._ids(rows, sizes, numbers, blocks), strict=True):
                if "id" in table_fields:
                    table_fields["id"].copy_(ids)
        return records

    @torch.no_grad()
    def write(self, entries: Entries, records: Sequence[Tensor], blocks: Sequence[slice]) -> None:
        """Write records, a matrix per block; the first write of a static row inserts it."""
        partitions, (numbers, sizes, keys), rows = self._partitions, entries, self._rows(entries)
        if (missing := nonzero(rows < 0)).numel():
            bounds = torch.searchsorted(missing, offsets_of(sizes))
            tables = [partitions.by_number[number] for number in numbers]
            rows[missing] = insert_batch(tables, keys[missing], bounds, range(len(tables)), is_step=False)[0]
        partitions.changes.mark(dict(zip(numbers, rows.split(sizes), strict=True)))
        fields = self._fields(numbers, records, blocks)
        if partitions.tables is not None and partitions.tables.cache is not None:  # rows on disk have their ids
            for table_fields, ids in zip(fields, self._ids(rows, sizes, numbers, blocks), strict=True):
                table_fields["id"] = ids
        partitions.copy(fields, blocks, rows, sizes, numbers)

    def _rows(self, entries: Entries) -> Tensor:
        """Return row numbers; -1 for static rows never written."""
        tables, bounds = self._partitions.dynamic, offsets_of(entries.sizes)
        index = self._partitions.numbers.index
        keys = [-1 if number in self.dynamic_numbers else index(number) for number in entries.numbers]
        return find_batch(tables, entries.keys, bounds, keys) if tables else NO_ROWS

    def _fields(self, numbers: Sequence[int], records: Sequence[Tensor], blocks: Sequence[slice]) -> list[Any]:
        layouts = (self._partitions.spec.records[numbers[block.start]] for block in blocks)
        return [layout.views(matrix) for layout, matrix in zip(layouts, records, strict=True)]

    def _ids(self, rows: Tensor, sizes: Sequence[int], numbers: Sequence[int], blocks: Sequence[slice]) -> list[Tensor]:
        """Return the ids of rows, per block."""
        by_table = zip(numbers, rows.split(sizes), strict=True)
        ids = [self._partitions.by_number[number].index.ids[table_rows] for number, table_rows in by_table]
        return [cat(ids[block]) for block in blocks]


def positions_in(blocks: Sequence[slice], sizes: Sequence[int]) -> Tensor:
    """Return the position of each row of all tables in its block of tables, int64 `[n]`."""
    starts, positions = [0, *accumulate(sizes)], torch.arange(sum(sizes))
    for block in blocks[1:]:
        positions[starts[block.start] : starts[block.stop]] -= starts[block.start]
    return positions


def move_rows(
    fields: Sequence[dict[str, Tensor]], blocks: Sequence[slice], tables: Sequence[dict[str, Tensor]], rows: Tensor,
    sizes: Sequence[int], write: bool,
) -> None:  # fmt: skip
    """Copy rows, -1: none, of tables to fields by name, one dict per block of tables, or with `write` in reverse."""
    pairs = [
        (table_fields[name], tables[n][name], n)
        for table_fields, block in zip(fields, blocks, strict=True)
        for n in range(block.start, block.stop)
        for name in tables[n]
        if name in table_fields
    ]
    if pairs:
        (*sides, numbers), moved = zip(*pairs, strict=True), [positions_in(blocks, sizes), rows]
        order = slice(None, None, -1 if write else 1)
        cpu_kernels("row_cache").move_rows_(*sides[order], *moved[order], offsets_of(sizes), numbers)


def offsets_of(sizes: Sequence[int]) -> Tensor:
    """Return int64 `[T + 1]`, where the rows of each table begin and end."""
    return torch.tensor([0, *accumulate(sizes)])


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, also an empty list; those that follow each other in memory are not copied."""
    return tensors[0] if len(tensors) == 1 else concat(tensors) if tensors else NO_ROWS
