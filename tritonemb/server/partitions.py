"""Rows of a server's partitions of a collection's tables: insert, read and update them, in memory or on disk."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.layout import nonzero
from tritonemb.optimizers import OPTIMIZERS
from tritonemb.server.changes import RowChanges
from tritonemb.server.spec import CollectionSpec
from tritonemb.tables.dynamic_table import DynamicTable, find_all
from tritonemb.tables.lookup import AssignedRows, Lookup, assign_rows, prefetch_batch
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import TableSet
from tritonemb.types import CacheConfig

NO_ROWS = torch.empty(0, dtype=torch.int64)


class Partitions:
    """Partitions of a collection's tables.

    Lists per table have an entry for each table on this server; `index` is a position in them, `number` the number of a
    table in the collection.

    Args:
        cache: config of the cache in memory of tables on disk; None: tables are in memory.

    Attributes:
        numbers: numbers in the collection of this server's tables.
        dynamic, by_number: this server's tables.
        changes: changes of their rows.
    """

    def __init__(self, spec: CollectionSpec, server: int, cache: CacheConfig | None = None) -> None:
        self.spec, self.numbers = spec, spec.tables_on(server)
        optimizer_args = dict(spec.optimizer)
        self.optimizer = OPTIMIZERS[optimizer_args.pop("name")](**optimizer_args)
        configs = [spec.tables[n].config(*spec.partitions(n, server), cache) for n in self.numbers]
        self.tables = TableSet(configs, self.optimizer, "cpu", pooled=False) if configs else None
        self.dynamic = cast(list[DynamicTable], [] if self.tables is None else list(self.tables.dynamic.values()))
        self.by_number = dict(zip(self.numbers, self.dynamic, strict=True))
        for number, table in self.by_number.items():
            table.reset_parameters(spec.tables[number].seed)
        self.changes = RowChanges(self.dynamic)

    def table(self, name: str) -> DynamicTable:
        """Table by name. KeyError if this server does not have it."""
        return self.by_number[self.spec.number(name)]

    def owned_mask(self, number: int, ids: Tensor) -> Tensor:
        """Return a bool mask `[n]` of ids that belong to this server and shard."""
        return self.by_number[number].owns(ids) & self.spec.in_shard(number, ids)

    def split(
        self, sizes: Sequence[int], tensors: Sequence[Tensor], numbers: Sequence[int] | None = None
    ) -> list[list[Tensor]]:
        """Split integer tensors `[n]` of a message, ids first, by table; `numbers`: the tables, all by default.

        ValueError if ids are malformed, or belong to another server: they would address memory out of bounds.
        """
        columns = [list(tensor.split(sizes)) for tensor in tensors]
        by_number = zip(self.numbers if numbers is None else numbers, columns[0], strict=True)
        owned = all(bool(self.owned_mask(number, ids).all()) for number, ids in by_number)
        if not owned or tensors[0].dtype != torch.int64 or any(t.dim() != 1 or t.is_floating_point() for t in tensors):
            raise ValueError("ids must be int64 [n], and belong to this server")
        return columns

    def insert(self, ids: list[Tensor], occurrences: list[Tensor]) -> list[Tensor]:
        """Return row numbers of a training batch's ids, which are inserted where they have none; -1: not admitted."""
        if self.tables is None:
            return []
        known = find_all(self.dynamic, ids) if self.changes.versions is not None else None
        with torch.enable_grad():  # marks the batch as one for training
            assigned = assign_rows(self.tables, self._batch(ids), occurrences=torch.cat(occurrences))
        rows = list(assigned.features.values().split([table_ids.numel() for table_ids in ids]))
        for index, table_rows in enumerate(rows):
            self.changes.mark_read(index, table_rows, None if known is None else known[index] < 0)
        return rows

    def read(self, ids: Sequence[Tensor], rows: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Read rows `[n, embedding_dim]` of each table's ids, or of their row numbers; initial values without a row."""
        rows = find_all(self.dynamic, ids) if rows is None else rows
        result, all_known = list[Tensor](), not rows or bool((cat(rows) >= 0).all())
        with self.memory(dict(enumerate(rows))) as memories:
            for index, table in enumerate(self.dynamic):
                memory, slots = memories[index]
                values = memory["weight"].index_select(0, slots if all_known else slots.clamp(min=0))
                if not all_known and (missing_mask := slots < 0).any():
                    values[missing_mask] = table.initial_values(ids[index][missing_mask])
                result.append(values)
        return result

    @torch.no_grad()
    def update(self, ids: Sequence[Tensor], grads: list[Tensor], lr: float | None) -> None:
        """Apply one optimizer step to gradients of ids, which may repeat, with a learning rate, or the last one."""
        assert self.tables is not None
        rows = find_all(self.dynamic, ids)  # -1: refused, or evicted since the pull; takes no gradient
        for index, table_rows in enumerate(rows):
            self.changes.mark_written(index, table_rows)
        if lr not in (None, self.tables.current_learning_rate):
            self.tables.set_learning_rate(lr)
        # Rows of tables on disk are pinned, others are grouped directly.
        if (lookup := self.pin(rows)) is None:
            batch, layout = self._batch(rows), self.tables.layout(self.tables.feature_names, torch.device("cpu"))
            groups = ops.row_groups(batch.values(), batch.offsets(), layout)
            lookup = Lookup(batch.values(), batch.offsets(), None, groups, layout)
        self.tables.update.step(self.tables, grads, lookup, [] if self.tables.cache is None else [lookup])

    def pin(self, rows: Sequence[Tensor]) -> Lookup | None:
        """Prefetch rows of tables on disk, -1: none, and pin their slots until release. None for tables in memory."""
        if self.tables is None or self.tables.cache is None:
            return None
        assigned = AssignedRows(self._batch(rows), None, None, True, torch.tensor(self.dynamic[0].clock))
        empty = assigned.features.values()[:0]
        layout = self.tables.layout(self.tables.feature_names, empty.device)
        unread = Lookup(empty, empty, None, ops.RowGroups(*[empty] * 4), layout, assigned=assigned)
        return prefetch_batch(self.tables, assigned.features, unread)

    @contextmanager
    def memory(
        self, rows: Mapping[int, Tensor], dirty: bool = False
    ) -> Iterator[dict[int, tuple[dict[str, Tensor], Tensor]]]:
        """Yield weight and states in memory, and the slots of rows there, by index of the table; row -1 has slot -1.

        Rows of tables on disk are pinned meanwhile, and then marked dirty if `dirty`.
        """
        pinned = self.pin([rows.get(index, NO_ROWS) for index in range(len(self.numbers))])
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


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, also an empty list; a single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors)) if tensors else NO_ROWS
