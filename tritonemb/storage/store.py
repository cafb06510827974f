"""What every place where rows live can do: read and write whole records, a batch at a time, not waited for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage.record import Record

Initial = Callable[[Tensor, Tensor], object]
"""`initial(rows, records)` fills uint8 `[n, num_bytes]` with the first values of rows int64 `[n]`, ascending.

What it writes may depend on a row's number alone, never on the other rows of the call. It may be called in any thread,
but by one store never twice at once.
"""


class StorageError(OSError):
    """Rows could not be read or written; says of which table, where, why, and what to do.

    Attributes:
        told: whether it has been raised to whom it concerns.
    """

    told = False


def advice(error: BaseException, otherwise: str) -> str:
    """What to do about an error: have more of what has run out, or `otherwise`."""
    code = getattr(error, "errno", None)
    if code in (errno.EMFILE, errno.ENFILE):
        return "each table on disk has a file open: raise the limit of open files (`ulimit -n`)"
    return "make room there" if code in (errno.ENOSPC, errno.EDQUOT) else otherwise


class Pending:
    """An operation that has been asked for."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._process = os.getpid()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            StorageError: it has failed, or it was asked for in another process, which has forked this one off.
            Exception: whatever a table's `initial` raised.
        """
        if os.getpid() != self._process and not self._ended.is_set():
            raise StorageError("this operation runs in the process that this one was forked from; wait for it there")
        self._ended.wait()
        if self._failure is not None:
            if isinstance(self._failure, StorageError):
                self._failure.told = True
            raise self._failure

    def end(self, failure: BaseException | None = None) -> None:
        """For stores: it has ended, or failed."""
        self._failure = failure
        self._ended.set()


class RowStore(Protocol):
    """Records of rows 0 to `num_rows` - 1.

    Operations take effect in the order they were asked for, whatever thread asks: a read behind a write of the same row
    sees it. Rows are int64 `[n]` on the CPU, ascending and distinct, records uint8 `[n, num_bytes]`, contiguous, on the
    CPU. Both must be left alone until the operation has ended. A row that was never written has its initial values.

    Methods raise a ValueError or TypeError at once for rows or records that are not so, and a StorageError if the store
    is closed, has failed, or is another process's.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def record(self) -> Record: ...

    def read(self, rows: Tensor, records: Tensor) -> Pending:
        """Fill `records` with those of the rows."""

    def write(self, rows: Tensor, records: Tensor) -> Pending:
        """Make `records` those of the rows. A store whose write has failed refuses all that comes behind it."""

    def close(self) -> None:
        """Wait for what has been asked for, then refuse further use. A second call does nothing."""


def fill_never_written(written: np.ndarray, rows: Tensor, records: Tensor, initial: Initial) -> None:
    """Give their first values to records of rows of which `written`, uint8 `[n]`, says that none was ever written."""
    never = torch.from_numpy(np.flatnonzero(written == 0))
    if never.numel() == rows.numel() and never.numel():
        initial(rows, records)
    elif never.numel():
        some = torch.empty(never.numel(), records.shape[1], dtype=torch.uint8, device="cpu")
        initial(rows[never], some)
        records[never] = some


def check_request(table: str, num_rows: int, record: Record, rows: Tensor, records: Tensor) -> None:
    """Raise unless rows and records are what `RowStore` says."""
    for name, tensor, dtype in (("rows", rows, torch.int64), ("records", records, torch.uint8)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"table {table!r}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
            kind = f"{tensor.dtype} on {tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}"
            raise ValueError(f"table {table!r}: {name} must be {dtype}, contiguous, on the CPU, got {kind}")
    if rows.dim() != 1 or records.shape != (rows.numel(), record.num_bytes):
        raise ValueError(
            f"table {table!r}: rows must be [n] and records [n, {record.num_bytes}], "
            f"got {list(rows.shape)} and {list(records.shape)}"
        )
    if rows.numel() == 0:
        return
    numbers = rows.numpy()
    first, last = int(numbers[0]), int(numbers[-1])
    if not bool((numbers[1:] > numbers[:-1]).all()):
        at = int((numbers[1:] <= numbers[:-1]).argmax())
        raise ValueError(
            f"table {table!r}: rows must be ascending and distinct, but rows[{at}] is {numbers[at]} and rows[{at + 1}] "
            f"is {numbers[at + 1]}; sort them and drop repetitions"
        )
    if first < 0 or last >= num_rows:
        wrong = first if first < 0 else last
        raise ValueError(f"table {table!r} has rows 0 to {num_rows - 1}; there is no row {wrong}")
