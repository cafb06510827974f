"""Rows with their states, moved between slots on the device and where they live."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.storage import HostRows, IoFuture
from tritonemb.tables.cached_table import TieredTable

CHUNK_BYTES = 1 << 26  # of rows that are moved at once where all of a table's are
MOST_WRITING = 1 << 28  # bytes of rows that may wait to be written; then the first of them are waited for


class Reading(NamedTuple):
    """Rows on their way to slots."""

    table: TieredTable
    records: Tensor
    slots: Tensor
    future: IoFuture


class RowMover:
    """Moves rows for one thread at a time. What lives in host memory is moved at once.

    Args:
        device: of the slots.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writes: deque[tuple[IoFuture, int]] = deque()
        self._writing = 0  # bytes of these

    def write(self, table: TieredTable, rows: Tensor, slots: Tensor) -> None:
        """Begin to write rows, distinct, from their slots; what is in these may change at once.

        Raises:
            StorageError: some that were to be written before could not be.
        """
        here = table.tensors_on_device()
        if isinstance(table.store, HostRows):
            fields = table.store.fields()
            ops.move_rows_([fields[name] for name in here], list(here.values()), rows, slots)
            return
        rows, order = rows.sort()
        records = self._records(table, rows.numel())
        views = table.record.views(records)
        target = torch.arange(rows.numel(), device=self._device)
        self._move([views[name] for name in here], list(here.values()), target, slots[order])
        self._writes.append((table.store.write(rows.cpu(), records), records.numel()))
        self._writing += records.numel()
        while self._writes and (self._writing > MOST_WRITING or self._writes[0][0].done()):
            self._finish_first_write()

    def finish_writes(self) -> None:
        """Wait until what has been written is where it lives.

        Raises:
            StorageError: some could not be written.
        """
        while self._writes:
            self._finish_first_write()

    def _finish_first_write(self) -> None:
        future, size = self._writes.popleft()
        self._writing -= size
        future.wait()

    def begin_read(self, table: TieredTable, rows: Tensor, slots: Tensor) -> Reading | None:
        """Begin to read rows, ascending, into slots; None if they are there."""
        if isinstance(table.store, HostRows):
            here, fields = table.tensors_on_device(), table.store.fields()
            ops.move_rows_(list(here.values()), [fields[name] for name in here], slots, rows)
            return None
        records = self._records(table, rows.numel())
        return Reading(table, records, slots, table.store.read(rows.cpu(), records))

    def finish_reads(self, reads: Iterable[Reading | None]) -> None:
        """Wait until rows are in their slots.

        Raises:
            StorageError: some could not be read.
        """
        for table, records, slots, future in (read for read in reads if read is not None):
            future.wait()
            here, views = table.tensors_on_device(), table.record.views(records)
            source = torch.arange(slots.numel(), device=self._device)
            self._move(list(here.values()), [views[name] for name in here], slots, source)

    def _move(self, to: list[Tensor], source: list[Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
        """Between slots and records, which are in host memory."""
        ops.move_rows_(to, source, to_rows, from_rows)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the host uses the records next

    def _records(self, table: TieredTable, number: int) -> Tensor:
        pin = self._device.type == "cuda"
        return torch.zeros(number, table.record.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)


def chunks(table: TieredTable, slots: Tensor) -> Sequence[Tensor]:
    """So few slots at once that their records take little memory."""
    return slots.split(max(1, CHUNK_BYTES // table.record.num_bytes)) if slots.numel() else ()
