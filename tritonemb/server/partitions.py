"""Rows of a server's partitions of a collection's tables, in memory or on disk, their changes, and their leases."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.layout import NO_KEY, NO_ROW, nonzero, segment_offsets
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.server.spec import CollectionSpec
from tritonemb.storage.store import cpu_kernels, record_of
from tritonemb.tables.batch import AssignedRows, RowBatch
from tritonemb.tables.dynamic_rows import concat_ids, find_batch, insert_batch
from tritonemb.tables.dynamic_table import DynamicTable
from tritonemb.tables.lookup import assign_rows
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import TableSet
from tritonemb.tables.tier_lookup import PinnedBatch, prefetch_batch
from tritonemb.types import CacheConfig
from tritonemb.utils import join_names

NO_ROWS = torch.empty(0, dtype=torch.int64)


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
        self._version = 0

    def mark(self, rows: Mapping[int, Tensor], new_masks: Mapping[int, Tensor] | None = None) -> None:
        """Note that rows, -1: no row, were written, or, with `new_masks`, read or inserted; by number of the table."""
        for number, table_rows in rows.items():
            for chain in self.chains.values():
                chain.changed[number][table_rows[table_rows >= 0]] = True
            if self.versions is not None:
                self._version += 2
                new_rows = table_rows if new_masks is None else table_rows[new_masks[number]]
                new_rows = new_rows[new_rows >= 0]
                # An id may change between a row and its fallback row: both must not have one version.
                self.versions[number][new_rows] = self._version + (new_rows >= self._tables[number].capacity)

    def track_versions(self) -> None:
        if self.versions is None:
            self._version = time.time_ns()  # above all versions of an earlier process
            self.versions = {n: torch.full_like(table.index.ids, self._version) for n, table in self._tables.items()}

    def versions_of(self, number: int, rows: Tensor) -> Tensor:
        """Return the versions of a table's rows; `NO_ROW` for row -1."""
        assert self.versions is not None
        return torch.where(rows < 0, NO_ROW, self.versions[number][rows.clamp(min=0)])

    def begin_chain(self, name: str, snapshot: str) -> None:
        """Track changes since a snapshot, which is now the last one of a chain."""
        changed = {n: torch.zeros(len(table.index.ids), dtype=torch.bool) for n, table in self._tables.items()}
        self.chains[name] = SnapshotChain(snapshot, changed, {number: [] for number in changed})
        for table in self._tables.values():
            table.removed_ids = []

    def note_removed(self) -> None:
        """Add removed ids to all chains; drop chains for which a full snapshot is smaller."""
        for number, table in self._tables.items():
            for name, chain in list(self.chains.items()):
                chain.removed[number] += table.removed_ids or []
                if table.removed_ids is None or sum(map(len, chain.removed[number])) > len(table.index.ids):
                    del self.chains[name]
            table.removed_ids = [] if self.chains else None


class Partitions:
    """Partitions of a collection's tables, in memory, or on disk with a `cache`.

    Ids and rows are those of this server's tables, table by table; `sizes` are their numbers.
    """

    def __init__(self, spec: CollectionSpec, server: int, cache: CacheConfig | None = None) -> None:
        self.spec, self._server, self.numbers = spec, server, spec.tables_on(server)
        optimizer_args = dict(spec.optimizer)
        self.optimizer = OPTIMIZERS[optimizer_args.pop("name")](**optimizer_args)
        configs = [spec.tables[n].config(*spec.partitions(n, server), cache) for n in self.numbers]
        self.tables = TableSet(configs, self.optimizer, "cpu", pooled=False) if configs else None
        self.dynamic = cast(list[DynamicTable], [] if self.tables is None else list(self.tables.dynamic.values()))
        self.by_number = dict(zip(self.numbers, self.dynamic, strict=True))
        for number, table in self.by_number.items():
            table.reset_parameters(spec.tables[number].seed)
        self.changes = RowChanges(self.by_number)
        self.blocks = [slice(*(bisect_left(self.numbers, n) for n in (s.start, s.stop))) for s in spec.blocks]

    def owned(self, ids: Tensor, sizes: Sequence[int], numbers: Sequence[int]) -> Tensor:
        """Return the positions of ids of this server's partitions and shards; `numbers`: tables of the ids."""
        return cast(Tensor, self.spec.route(ids, sizes, numbers)[0][self._server])

    def checked(self, sizes: list[int], tensors: Sequence[Tensor], numbers: Sequence[int] | None = None) -> Any:
        """Return integer tensors `[n]` of a message, ids first. ValueError for other ones, or ids of other servers."""
        ids, numbers = tensors[0], self.numbers if numbers is None else numbers
        shapes_match = all(t.shape == (sum(sizes),) and not t.is_floating_point() for t in tensors)
        shapes_match &= len(sizes) == len(numbers) and min(sizes, default=0) >= 0
        if ids.dtype != torch.int64 or not shapes_match or len(self.owned(ids, sizes, numbers)) < len(ids):
            raise ValueError("ids must be int64 [n], and belong to this server")
        return tensors

    def insert(self, ids: Tensor, sizes: Sequence[int], occurrences: Tensor) -> Tensor:
        """Return row numbers of a training batch's ids, which are inserted where they have none; -1: not admitted."""
        if self.tables is None:
            return NO_ROWS
        known_rows = () if self.changes.versions is None else self.find(ids, sizes).split(sizes)
        with torch.enable_grad():  # marks the batch as one for training
            assigned = assign_rows(self.tables, self._batch(ids, sizes), occurrences=occurrences)
        rows = assigned.features.values()
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
        rows, blocks, outputs = self.find(ids, sizes) if rows is None else rows, list[Tensor](), list[Tensor]()
        for block, numbers in zip(self.blocks, self.spec.blocks, strict=True):
            table = self.spec.tables[numbers.start]
            blocks.append(torch.empty(sum(sizes[block]), table.embedding_dim, dtype=getattr(torch, table.dtype)))
            outputs += blocks[-1].split(sizes[block])
        by_number = (dict(zip(self.numbers, column.split(sizes), strict=True)) for column in (ids, rows))
        self.read_fields([{"weight": output} for output in outputs], *by_number)
        return blocks

    def read_fields(self, fields: Sequence[Any], ids: Mapping[int, Tensor], rows: Mapping[int, Tensor]) -> None:
        """Read rows by number of the table into fields by name; the initial value of the id for row -1."""
        with self.memory(rows) as memories:
            _move(fields, [*memories.values()])
        if (cat([*rows.values()]) < 0).any():
            for table_fields, (number, table_rows) in zip(fields, rows.items(), strict=True):
                missing = nonzero(table_rows < 0)
                table_fields["weight"][missing] = self.by_number[number].initial_values(ids[number][missing])

    @torch.no_grad()
    def update(self, ids: Tensor, sizes: Sequence[int], grads: list[Tensor], lr: float | None) -> None:
        """Apply one optimizer step to gradients of ids, which may repeat, with a learning rate, or the last one."""
        assert self.tables is not None
        rows = self.find(ids, sizes)  # -1: refused, or evicted since the pull, without fallback rows; takes no gradient
        self.changes.mark(dict(zip(self.numbers, rows.split(sizes), strict=True)))
        if lr not in (None, self.tables.current_learning_rate):
            self.tables.set_learning_rate(lr)
        # Rows of tables on disk are pinned, others are grouped directly.
        if (pinned := self.pin(rows.split(sizes))) is not None and pinned.pins is not None:
            self.tables.update.step(self.tables, grads, pinned.rows, [pinned.pins])
            return
        batch, layout = self._batch(rows, sizes), self.tables.layout(self.tables.feature_names, torch.device("cpu"))
        groups = ops.row_groups(batch.values(), batch.offsets(), layout)
        row_batch = RowBatch(batch.values(), batch.offsets(), None, groups, layout)
        self.tables.update.step(self.tables, grads, row_batch)

    def pin(self, rows: Sequence[Tensor]) -> PinnedBatch | None:
        """Prefetch rows of tables on disk, -1: none, and pin their slots until release. None for tables in memory."""
        if self.tables is None or self.tables.cache is None:
            return None
        batch, clock = self._batch(cat(rows), [*map(len, rows)]), torch.tensor(self.dynamic[0].clock)
        return prefetch_batch(self.tables, batch, AssignedRows(batch, None, None, True, clock))

    @contextmanager
    def memory(
        self, rows: Mapping[int, Tensor], dirty: bool = False
    ) -> Iterator[dict[int, tuple[dict[str, Tensor], Tensor]]]:
        """Yield weight and states in memory, and the slots of rows there, by number of the table; row -1 has slot -1.

        Rows of tables on disk are pinned meanwhile, and then marked dirty if `dirty`.
        """
        batch = self.pin([rows.get(number, NO_ROWS) for number in self.numbers])
        pinned, result = None if batch is None else batch.pins, {}
        for number, slots in rows.items():
            if pinned is not None:
                (pinned_rows, pinned_slots), known = pinned.rows_of(self.numbers.index(number)), nonzero(slots >= 0)
                known_slots = pinned_slots[torch.searchsorted(pinned_rows, slots[known])]
                slots = slots.index_copy(0, known, known_slots)
            result[number] = Table.tensors(self.by_number[number]), slots
        try:
            yield result
        finally:
            if pinned is not None:
                pinned.is_dirty = dirty
                pinned.release()

    def _batch(self, values: Tensor, sizes: Sequence[int]) -> KeyedJaggedTensor:
        assert self.tables is not None
        offsets = segment_offsets(torch.tensor(sizes))
        return KeyedJaggedTensor.unchecked(self.tables.feature_names, values, None, offsets)


class Lease:
    """Records of rows, weight and optimizer states, for a trainer that applies the optimizer itself.

    `keys` are ids of a static table, and row numbers of a dynamic one.
    """

    def __init__(self, partitions: Partitions) -> None:
        self._partitions, self.is_active = partitions, False  # whether a trainer has rows that it has not written back
        tables, states, by_number = partitions.spec.tables, partitions.optimizer.states, partitions.by_number
        self.dynamic_numbers = [number for number in by_number if tables[number].num_embeddings is None]
        self._records = {
            number: record_of(table.config.embedding_dim, table.config.dtype, states, number in self.dynamic_numbers)
            for number, table in by_number.items()
        }

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
        bounds = segment_offsets(torch.tensor(sizes))
        rows, keys, _ = insert_batch(tables, ids, bounds, range(len(sizes)), occurrences)
        by_number = dict(zip(self.dynamic_numbers, rows.split(sizes), strict=True))
        partitions.changes.mark(by_number)
        partitions.changes.note_removed()
        if (pinned := partitions.pin([by_number.get(number, NO_ROWS) for number in partitions.numbers])) is not None:
            pinned.release()
        return [rows, keys != NO_KEY]

    def check(self, keys: Sequence[tuple[int, Tensor]], records: Sequence[Tensor]) -> None:
        """Check keys by table number, and the records of the first of them; ValueError."""
        by_number, dynamic = self._partitions.by_number, self.dynamic_numbers
        static = [pair for pair in keys if pair[0] not in dynamic]
        ids, numbers = cat([ids for _, ids in static]), [number for number, _ in static]
        exist: Any = len(self._partitions.owned(ids, [len(ids) for _, ids in static], numbers)) == len(ids)
        for number, rows in keys:
            exist &= number not in dynamic or not ((rows < 0) | (rows >= len(by_number[number].index.ids))).any()
            exist &= not (rows[1:] <= rows[:-1]).any()
        if not exist:
            names = join_names(by_number[number].config.name for number, _ in keys)
            raise ValueError(f"tables {names} do not have these rows on this server")
        shapes = [(torch.uint8, len(table_keys), self._records[number].num_bytes) for number, table_keys in keys]
        if [(tensor.dtype, *tensor.shape) for tensor in records] != shapes[: len(records)]:
            raise ValueError(f"records must be {shapes}")

    @torch.no_grad()
    def read(self, keys: Mapping[int, Tensor]) -> list[Tensor]:
        rows = self._rows(keys)
        records = [torch.zeros(len(ids), self._records[n].num_bytes, dtype=torch.uint8) for n, ids in rows.items()]
        fields = [self._records[n].views(table_records) for n, table_records in zip(rows, records, strict=True)]
        self._partitions.read_fields(fields, keys, rows)
        for number, table_fields in zip(rows, fields, strict=True):
            if "id" in table_fields:
                table_fields["id"].copy_(self._partitions.by_number[number].index.ids[rows[number]])
        return records

    @torch.no_grad()
    def write(self, keys: Mapping[int, Tensor], records: Sequence[Tensor]) -> None:
        """Write records by table number; the first write of a static row inserts it."""
        rows, by_number = self._rows(keys), self._partitions.by_number
        missing = {n: positions for n, table_rows in rows.items() if (positions := nonzero(table_rows < 0)).numel()}
        if missing:
            tables, ids = [by_number[n] for n in missing], concat_ids([keys[n][i] for n, i in missing.items()])
            new_rows = insert_batch(tables, *ids, rules=[table.rule(table.clock) for table in tables])[0]
            for number, table_rows in zip(missing, new_rows.split([*map(len, missing.values())]), strict=True):
                rows[number][missing[number]] = table_rows
        self._partitions.changes.mark(rows)
        fields = [self._records[n].views(table_records) for n, table_records in zip(rows, records, strict=True)]
        with self._partitions.memory(rows, dirty=True) as memories:
            for table_fields, (number, (memory, _)) in zip(fields, memories.items(), strict=True):
                if "id" in memory:
                    table_fields["id"] = by_number[number].index.ids[rows[number]]
            _move(fields, [*memories.values()], write=True)

    def _rows(self, keys: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return row numbers by table number, in the order of keys; -1 for static rows never written."""
        static = {number: ids for number, ids in keys.items() if number not in self.dynamic_numbers}
        sizes = [*map(len, static.values())]
        rows = self._partitions.find(cat([*static.values()]), sizes, [*static])
        return {**keys, **dict(zip(static, rows.split(sizes), strict=True))}


def _move(fields: Sequence[dict[str, Tensor]], memories: Sequence[Any], write: bool = False) -> None:
    """Copy rows of all tables from slots, -1: none, of memory to fields by name, or with `write` in reverse."""
    slots = [table_slots for _, table_slots in memories]
    starts, order = segment_offsets(torch.tensor([*map(len, slots)])), cat([*map(torch.arange, map(len, slots))])
    by_table = enumerate(zip(fields, memories, strict=True))
    pairs = [(f[name], memory[name], table) for table, (f, (memory, _)) in by_table for name in memory if name in f]
    if pairs:
        (*sides, tables), rows = zip(*pairs, strict=True), [order, cat(slots)]
        direction = -1 if write else 1
        cpu_kernels("row_cache").move_rows_(*sides[::direction], *rows[::direction], starts, tables)


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, also an empty list; a single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors)) if tensors else NO_ROWS
