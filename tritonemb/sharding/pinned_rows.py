"""Where an update finds the rows of a rank's shards: of tables that live elsewhere, in slots that batches hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.gradient_exchange import RowSums
from tritonemb.tables.pins import Lease
from tritonemb.tables.table_set import TableSet


class HeldRows:
    """The rows of a collection of shards, for one update.

    Rows have the numbers that every rank knows them by; where they are may differ from rank to rank. Nothing of this
    waits for another rank.

    Args:
        leases: of the batches whose rows are updated; they are this object's to end.
    """

    def __init__(self, collection: TableSet, leases: Sequence[Lease] = ()) -> None:
        self._collection, self._leases = collection, list(leases)
        for lease in self._leases:
            lease.change()
        self._places: dict[int, tuple[Tensor, Tensor]] = {}  # by table that lives elsewhere: rows, ascending, and slots
        cache = collection.cache
        for table, tiered in enumerate([] if cache is None else cache.tiered):
            if tiered is not None:
                parts = [lease.rows_of(table) for lease in self._leases]
                rows, which = torch.cat([rows for rows, _ in parts]).unique(return_inverse=True)
                slots = torch.empty_like(rows)
                slots[which] = torch.cat([slots for _, slots in parts])  # a row that several hold is in one slot
                self._places[table] = rows, slots

    @contextmanager
    def memory(self) -> Iterator[ops.FusedTables]:
        """The tables' tensors, which nobody replaces meanwhile. No collective may be called within."""
        with self._collection.memory():
            yield self.fused()

    def fused(self) -> ops.FusedTables:
        """The tables' tensors of this moment, and the counters, which stay the same."""
        return self._collection.fused_tables()

    def slots(self, table: int, rows: Tensor) -> Tensor:
        """Where rows of a table are.

        Raises:
            RuntimeError: one of them has not been brought to the device.
        """
        if table not in self._places:
            return rows
        own, slots = self._places[table]
        place = torch.searchsorted(own, rows).clamp_(max=max(0, own.numel() - 1))
        if rows.numel() and not (own.numel() and torch.equal(own[place], rows)):
            name = self._collection.configs[table].name
            raise RuntimeError(
                f"other ranks train rows of table {name!r} that are not on this one's device; all ranks must send, "
                "look up and train their batches in the same order"
            )
        return slots[place] if rows.numel() else rows

    def in_rows(self, sums: RowSums) -> RowSums:
        """Sums of what is in slots, by the rows in these, ascending."""
        found = RowSums(list(sums.rows), list(sums.sums))
        for table, (rows, slots) in self._places.items():
            ascending, order = slots.sort()
            place = torch.searchsorted(ascending, sums.rows[table])
            found.rows[table], back = rows[order[place]].sort()
            found.sums[table] = sums.sums[table][back]
        return found

    def row_ids(self, table: int) -> Tensor | None:
        """int64, the row in each slot; None where rows are in their own places. For who has `memory`."""
        cache = self._collection.cache
        return None if cache is None or table not in self._places else cache.row_ids(table)

    def give_up(self) -> None:
        """The update has been asked for, on this thread's stream."""
        for lease in self._leases:
            lease.end()
