"""Rows in host memory."""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor

from tritonemb.storage.store import Initial, Pending, Record, StorageError, check_request
from tritonemb.utils import advise_huge_pages

FILL_BYTES = 64 << 20  # of records that `initial` fills at once


class HostRows:
    """A `RowStore` in host memory: one tensor uint8 `[num_rows, num_bytes]`. Operations have ended when asked for.

    Args:
        num_rows: at least 1.
        record: the layout of a row.
        initial: fills records of rows with their first values.
        pin: page-locked memory, which a GPU reads and writes by itself; needs CUDA.
        table_name: for messages.

    Raises:
        ValueError: `num_rows` is below 1, or memory is to be pinned where there is no CUDA.
        StorageError: there is not so much memory.
    """

    def __init__(
        self, num_rows: int, record: Record, initial: Initial, pin: bool = False, *, table_name: str = "table"
    ) -> None:
        if num_rows < 1:
            raise ValueError(f"table {table_name!r}: num_rows must be at least 1, got {num_rows}")
        if pin and not torch.cuda.is_available():
            raise ValueError(f"table {table_name!r}: memory can be pinned only where there is CUDA; leave `pin` out")
        self.num_rows, self.record, self.table_name = num_rows, record, table_name
        self._lock, self._closed, self._process = threading.Lock(), False, os.getpid()
        try:
            self._bytes = torch.empty(num_rows, record.num_bytes, dtype=torch.uint8, pin_memory=pin)
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"table {table_name!r} needs {num_rows * record.num_bytes:,} bytes of {'pinned ' * pin}host memory, "
                f"which there are not ({error}); place it on disk, or cut it into parts for several hosts"
            ) from error
        advise_huge_pages(self._bytes)
        step = max(1, FILL_BYTES // record.num_bytes)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            initial(torch.arange(begin, end), self._bytes[begin:end])

    def fields(self) -> dict[str, Tensor]:
        """Views of each field of all rows, `[num_rows, size]` or `[num_rows]`; what is written to them is stored."""
        return self.record.views(self._bytes)

    def read(self, rows: Tensor, records: Tensor) -> Pending:
        return self._move(rows, records, False)

    def write(self, rows: Tensor, records: Tensor) -> Pending:
        return self._move(rows, records, True)

    def close(self) -> None:
        self._closed = True

    def _move(self, rows: Tensor, records: Tensor, into_table: bool) -> Pending:
        from tritonemb.kernels.cpu.pages import move_records  # its compiler is loaded when first used

        check_request(self.table_name, self.num_rows, self.record, rows, records)
        if os.getpid() != self._process:  # memory is copied at a fork: what one process wrote the other would not see
            raise StorageError(f"table {self.table_name!r} belongs to the process that this one was forked from")
        pending = Pending()
        with self._lock:
            if self._closed:
                raise StorageError(f"table {self.table_name!r} is closed")
            move_records(
                rows.numpy(), self._bytes.data_ptr(), records.data_ptr(), self.record.num_bytes, into_table
            )  # fmt: skip
        pending.end()
        return pending
