"""The rows of a rank's shards for an update: of cached tables, in slots that batches have pinned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.gradient_exchange import RowSums
from tritonemb.tables.lookup import Lookup
from tritonemb.tables.table_set import TableSet


class PinnedRows:
    """The rows of a table set of shards, for one update.

    Rows have the same numbers on every rank; their slots may differ from rank to rank. Nothing here waits for another
    rank.

    Args:
        pins: of the batches whose rows are updated; this object releases them.
    """

    def __init__(self, collection: TableSet, pins: Sequence[Lookup] = ()) -> None:
        self._collection, self._pins = collection, list(pins)
        for pinned in self._pins:
            pinned.dirty = True
        self._slots: dict[int, tuple[Tensor, Tensor]] = {}  # by cached table: rows, ascending, and slots
        cache = collection.cache
        for table, cached in enumerate([] if cache is None else cache.tables):
            if cached is not None:
                parts = [pinned.rows_of(table) for pinned in self._pins]
                rows, which = torch.cat([rows for rows, _ in parts]).unique(return_inverse=True)
                slots = torch.empty_like(rows)
                slots[which] = torch.cat([slots for _, slots in parts])  # a row that several have pinned is in one slot
                self._slots[table] = rows, slots

    @contextmanager
    def memory(self) -> Iterator[ops.FusedTables]:
        """The tables' tensors, which are not replaced meanwhile. No collective may be called within."""
        with self._collection.memory():
            yield self.fused()

    def fused(self) -> ops.FusedTables:
        """The tables' present tensors, and the counters, which stay the same."""
        return self._collection.fused_tables()

    def slots(self, table: int, rows: Tensor) -> Tensor:
        """The slots of a table's rows; the rows themselves if it is not cached.

        Raises:
            RuntimeError: one of them is not pinned.
        """
        if table not in self._slots:
            return rows
        own, slots = self._slots[table]
        index = torch.searchsorted(own, rows).clamp_(max=max(0, own.numel() - 1))
        if rows.numel() and not (own.numel() and torch.equal(own[index], rows)):
            name = self._collection.configs[table].name
            raise RuntimeError(
                f"other ranks train rows of table {name!r} that are not pinned on this one's device; all ranks must "
                "prefetch, look up and train their batches in the same order"
            )
        return slots[index] if rows.numel() else rows

    def in_rows(self, sums: RowSums) -> RowSums:
        """Sums by slot as sums by row, ascending."""
        found = RowSums(list(sums.rows), list(sums.sums))
        for table, (rows, slots) in self._slots.items():
            ascending, order = slots.sort()
            index = torch.searchsorted(ascending, sums.rows[table])
            found.rows[table], back = rows[order[index]].sort()
            found.sums[table] = sums.sums[table][back]
        return found

    def row_ids(self, table: int) -> Tensor | None:
        """int64, the row in each slot; None for a table that is not cached. For use within `memory`."""
        cache = self._collection.cache
        return None if cache is None or table not in self._slots else cache.row_ids(table)

    def release(self) -> None:
        """Unpin the rows: this thread's stream has been given the update."""
        for pinned in self._pins:
            pinned.release()
