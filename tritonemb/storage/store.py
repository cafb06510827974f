"""The interface of a store of rows: it reads and writes whole records, a batch at a time, and returns futures.

A row is one record of bytes: its weights and its optimizer state, which travel together. A store that waits for a disk
has one thread that runs its operations in order.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tritonemb.optimizers import StateSpec

Initializer = Callable[[Tensor, Tensor], object]
"""`initializer(rows, records)` fills uint8 `[n, num_bytes]` with the initial values of rows int64 `[n]`, ascending.

What it writes may depend on a row's number alone, never on the other rows of the call. Any thread may call it, but one
store never calls it twice at once.
"""


class StorageError(OSError):
    """Rows could not be read or written; says of which table, where, why, and what to do."""

    raised = False  # to a caller


@contextmanager
def storage_errors(what: str, otherwise: str) -> Iterator[None]:
    """Raise errors of the system as a StorageError: `what`, the error, and what to do, see `advice`."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, EOFError, OverflowError) as error:
        raise StorageError(f"{what}: {error}; {advice(error, otherwise)}") from error


def advice(error: BaseException, otherwise: str) -> str:
    """What to do about an error: have more of what has run out, or `otherwise`."""
    code = getattr(error, "errno", None)
    if code in (errno.EMFILE, errno.ENFILE):
        return "each table on disk has a file open: raise the limit of open files (`ulimit -n`)"
    return "make room there" if code in (errno.ENOSPC, errno.EDQUOT) else otherwise


class IoFuture:
    """An operation that was submitted."""

    def __init__(self) -> None:
        self._done, self._process = threading.Event(), os.getpid()
        self._failure: BaseException | None = None

    def done(self) -> bool:
        """Whether the operation is done or has failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the operation is done.

        Raises:
            StorageError: it has failed, or it was submitted in another process, from which this one was forked.
            Exception: whatever a table's initializer raised.
        """
        if os.getpid() != self._process and not self._done.is_set():
            raise StorageError("this operation runs in the process that this one was forked from; wait for it there")
        self._done.wait()
        if self._failure is not None:
            if isinstance(self._failure, StorageError):
                self._failure.raised = True
            raise self._failure

    def run(self, work: Callable[[], object]) -> None:
        """For stores: run the operation in this thread."""
        try:
            work()
        except BaseException as failure:
            self._failure = failure
        self._done.set()


_Operation = tuple[Callable[[], None], IoFuture]


class OperationQueue:
    """Runs operations in a thread of its own, which has this name, first in, first out."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> IoFuture:
        future = IoFuture()
        with self._lock:
            if self._thread is None:  # the thread knows the queue alone: a store that is dropped must be collected
                thread = threading.Thread(target=_run_operations, args=(self._queue,), name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._queue.put((work, future))
        return future

    def close(self, last: Callable[[], None]) -> IoFuture:
        """Submit the last operation; if there is no thread yet, it runs in this one."""
        future = IoFuture()
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put((last, future))
                self._queue.put(None)
        if thread is None:
            future.run(last)
        return future


@torch.inference_mode()  # tensors that were made in that mode can be changed in it alone, others everywhere
def _run_operations(operations: queue.SimpleQueue[_Operation | None]) -> None:
    while (operation := operations.get()) is not None:
        work, future = operation
        future.run(work)
        del operation, work, future


class Counts(NamedTuple):
    """Rows that were read and were cached in host memory; bytes read from the file, and written to it."""

    found: int = 0
    read: int = 0
    written: int = 0

    def plus(self, found: int = 0, read: int = 0, written: int = 0) -> Counts:
        """The sums of these and others."""
        return Counts(self.found + found, self.read + read, self.written + written)


class RowStore(Protocol):
    """Records of rows 0 to `num_rows` - 1.

    Operations take effect in the order in which they are submitted, by any thread: a read after a write of the same row
    returns what was written. Rows are int64 `[n]` on the CPU, ascending and distinct, records uint8 `[n, num_bytes]`,
    contiguous, on the CPU. Neither may be changed until the operation is done. A row that was never written has its
    initial values.

    Methods raise a ValueError or TypeError at once for rows or records that are not so, and a StorageError if the store
    is closed, has failed, or is another process's.
    """

    num_rows: int
    record: Record

    def read(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Fill `records` with the records of the rows."""

    def write(self, rows: Tensor, records: Tensor) -> IoFuture:
        """Write the records of the rows. After a failed write a store refuses all further operations."""

    def close(self) -> None:
        """Wait for what was submitted, then refuse further use. A second call does nothing."""


def fill_unwritten(written: np.ndarray, rows: Tensor, records: Tensor, initializer: Initializer) -> None:
    """Give the records of rows that were never written, says `written`, uint8 `[n]`, their initial values."""
    never = torch.from_numpy(np.flatnonzero(written == 0))
    if never.numel() == 0:
        return
    some = records
    if never.numel() < rows.numel():
        some, rows = torch.empty(never.numel(), records.shape[1], dtype=torch.uint8, device="cpu"), rows[never]
    initializer(rows, some)
    if some is not records:
        records[never] = some


@functools.cache
def cpu_kernels(name: str) -> ModuleType:
    """A file of `kernels/cpu`, whose compiler is loaded when it is first used."""
    return importlib.import_module(f"tritonemb.kernels.cpu.{name}")


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
    numbers = rows.numpy()
    wrong_order = numbers[1:] <= numbers[:-1]
    if wrong_order.any():
        at = int(wrong_order.argmax())
        raise ValueError(
            f"table {table!r}: rows must be ascending and distinct, but rows[{at}] is {numbers[at]} and rows[{at + 1}] "
            f"is {numbers[at + 1]}; sort them and drop repetitions"
        )
    for row in numbers[:1].tolist() + numbers[-1:].tolist():
        if not 0 <= row < num_rows:
            raise ValueError(f"table {table!r} has rows 0 to {num_rows - 1}; there is no row {row}")


@dataclass(frozen=True)
class Field:
    """A part of a record: the weight, or a piece of optimizer state."""

    name: str
    dtype: torch.dtype
    size: int  # how many values a row has
    offset: int  # of the first, in bytes from the record's start
    one_a_row: bool = False  # of a size of 1: it is a value of the row, whose view is `[n]`, and no row of one element

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """The layout of a row's bytes: fields that do not overlap, each aligned to its values' size.

    Raises:
        ValueError: for fields that overlap, stand beyond the record's end, are not aligned, or share a name.
    """

    fields: tuple[Field, ...]
    num_bytes: int

    def __post_init__(self) -> None:
        end, names = 0, [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"a record has two fields of one name: {names}")
        for field in self.fields:
            if field.size < 1 or (field.one_a_row and field.size != 1):
                raise ValueError(f"field {field.name!r} of a record has a wrong size: {field}")
            if field.offset < end or field.offset % field.dtype.itemsize:
                raise ValueError(
                    f"field {field.name!r} of a record must start at or behind byte {end}, aligned: {field}"
                )
            end = field.offset + field.num_bytes
        if self.num_bytes < max(end, 1):
            raise ValueError(f"a record of {self.num_bytes} bytes has no room for fields that end at byte {end}")

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Each field of records uint8 `[n, num_bytes]`, contiguous, by name, without a copy.

        A view has the field's dtype, and is `[n, size]`, or `[n]` if a row has one value. Where `num_bytes` is no
        multiple of a field's value size, and n is greater than 1, that field has no view. ValueError for records of
        another shape or dtype.
        """
        if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] != self.num_bytes:
            raise ValueError(f"records must be uint8 [n, {self.num_bytes}], got {records.dtype} {list(records.shape)}")
        found = {}
        for field in self.fields:
            part = records[:, field.offset : field.offset + field.num_bytes].view(field.dtype)
            found[field.name] = part.squeeze(1) if field.one_a_row else part
        return found


def record_of(embedding_dim: int, dtype: torch.dtype, states: Sequence[StateSpec]) -> Record:
    """The record of a table's rows: the weight first, then the optimizer's states, always float32.

    Its size is a multiple of 4 bytes, so every field of many records has a view.
    """
    fields = [Field("weight", dtype, embedding_dim, 0)]
    end = -(-fields[0].num_bytes // 4) * 4
    for state in states:
        size = embedding_dim if state.per_element else 1
        fields.append(Field(state.name, torch.float32, size, end, not state.per_element))
        end += 4 * size
    return Record(tuple(fields), end)
