"""What stores of rows share: errors, operations that are waited for, records, and the directory of a cache.

A row is one record of bytes: its weights and its optimizer state, which travel together. A store that waits for a disk
has one thread that runs its operations in order.
"""

import errno
import functools
import importlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tritonemb.layout import NO_ROW, WAYS
from tritonemb.ops.row_cache import row_cache_allocate_, row_cache_look_up_
from tritonemb.ops.row_update import fill_initial_
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


class Cancelled(Exception):
    """The main thread was interrupted while it waited for this work."""


def is_cancelled() -> bool:
    """Whether this is a thread of `shielded` whose caller was interrupted."""
    return getattr(threading.current_thread(), "cancelled", False)


def raise_if_cancelled() -> None:
    """Raise Cancelled in such a thread."""
    if is_cancelled():
        raise Cancelled


class Completion:
    """An event that is set once, for the main thread too.

    A signal handler may raise in the midst of `threading.Event.wait`, as of any method of a condition variable, and
    leave its lock locked: `set` would then never return. Here each waiter has a lock of its own.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiters:
            self._waiters.pop().release()

    def wait(self) -> None:
        if not self._is_set:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not self._is_set:  # else `set` may not have seen the waiter
                waiter.acquire()


class IoFuture:
    """An operation that was submitted."""

    def __init__(self) -> None:
        self._done, self._process = Completion(), os.getpid()
        self._failure: BaseException | None = None

    def done(self) -> bool:
        """Whether the operation is done or has failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the operation is done.

        StorageError if it has failed, or was submitted before this process was forked; or what an initializer raised.
        """
        if os.getpid() != self._process and not self._done.is_set():
            raise StorageError("this operation runs in the process that this one was forked from; wait for it there")
        self._done.wait()
        if self._failure is not None:
            if isinstance(self._failure, StorageError):
                self._failure.raised = True
            raise self._failure

    def run(self, work: Callable[[], object]) -> None:
        """For stores: run the operation in this thread; who waits for it goes on after `finish`."""
        try:
            work()
        except BaseException as failure:
            self._failure = failure

    def finish(self) -> None:
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
            future.finish()
        return future


@torch.inference_mode()  # tensors that were made in that mode can be changed in it alone, others everywhere
def _run_operations(operations: queue.SimpleQueue[_Operation | None]) -> None:
    while (operation := operations.get()) is not None:
        work, future = operation
        future.run(work)
        del operation, work  # who waits may want the memory that it held
        future.finish()
        del future


class Counts(NamedTuple):
    """Rows that were read and were cached in host memory; bytes read from the file, and written to it."""

    found: int = 0
    read: int = 0
    written: int = 0

    def plus(self, found: int = 0, read: int = 0, written: int = 0) -> Self:
        """The sums of these and others."""
        return self._replace(found=self.found + found, read=self.read + read, written=self.written + written)


def fill_unwritten(written: np.ndarray, rows: Tensor, records: Tensor, initializer: Initializer) -> None:
    """Give the records of rows that were never written, says `written`, uint8 `[n]`, their initial values."""
    never = torch.from_numpy(np.flatnonzero(written == 0))
    if 0 < never.numel() < rows.numel():
        some = records[never]
        initializer(rows[never], some)
        records[never] = some
    elif never.numel():
        initializer(rows, records)


@functools.cache
def cpu_kernels(name: str) -> ModuleType:
    """A file of `kernels/cpu`, whose compiler is loaded when it is first used."""
    return importlib.import_module(f"tritonemb.kernels.cpu.{name}")


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
    """The layout of a row's bytes: fields that do not overlap, each aligned to its values' size."""

    fields: tuple[Field, ...]
    num_bytes: int

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Each field of records uint8 `[n, num_bytes]`, contiguous, by name, without a copy.

        A view has the field's dtype, and is `[n, size]`, or `[n]` if a row has one value. ValueError for other records.
        """
        if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] != self.num_bytes:
            raise ValueError(f"records must be uint8 [n, {self.num_bytes}], got {records.dtype} {list(records.shape)}")
        found = {}
        for field in self.fields:
            part = records[:, field.offset : field.offset + field.num_bytes].view(field.dtype)
            found[field.name] = part.squeeze(1) if field.one_a_row else part
        return found


def check_request(table: str, num_rows: int, record: Record, rows: Tensor, records: Tensor) -> None:
    """Raise unless rows and records are what `DiskRows` says."""
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
    if (wrong_order := numbers[1:] <= numbers[:-1]).any():
        at = int(wrong_order.argmax())
        raise ValueError(
            f"table {table!r}: rows must be ascending and distinct, but rows[{at}] is {numbers[at]} and rows[{at + 1}] "
            f"is {numbers[at + 1]}; sort them and drop repetitions"
        )
    for row in numbers[:1].tolist() + numbers[-1:].tolist():
        if not 0 <= row < num_rows:
            raise ValueError(f"table {table!r} has rows 0 to {num_rows - 1}; there is no row {row}")


def record_of(embedding_dim: int, dtype: torch.dtype, states: Sequence[StateSpec], has_ids: bool = False) -> Record:
    """The record of a table's rows: the weight first, then the optimizer's states, always float32, and perhaps its id.

    Its size is a multiple of 4 bytes, so every field of many records has a view.
    """
    fields = [Field("weight", dtype, embedding_dim, 0)]
    end = -(-fields[0].num_bytes // 4) * 4
    for state in states:
        size = embedding_dim if state.per_element else 1
        fields.append(Field(state.name, torch.float32, size, end, not state.per_element))
        end += 4 * size
    if has_ids:
        fields.append(Field("id", torch.int64, 1, -(-end // 8) * 8, True))
        end = fields[-1].offset + 8
    return Record(tuple(fields), end)


@dataclass(frozen=True)
class InitialValues:
    """Initial values of records: the weight depends on its row and column in the whole table, states are zero."""

    record: Record
    seed: int  # of the weight, which is uniform in ± `bound`
    bound: float
    row_origin: int = 0  # the first row and column in the whole table
    column_origin: int = 0

    def __call__(self, rows: Tensor, records: Tensor) -> None:
        records.zero_()
        weight = self.record.views(records)["weight"]
        own = rows + self.row_origin if self.row_origin else rows
        fill_initial_(weight, self.seed, self.bound, first_column=self.column_origin, rows=own)


class CacheDirectory:
    """Tags, uses, pins and dirty flags of the slots of tables' caches, side by side.

    The caches are set-associative, see `kernels/row_cache.py`. The slots of a table are those of its sets, then its
    overflow: rows of a batch whose set has no way left, as pinned rows fill it. The overflow grows as batches need it.

    Args:
        num_sets: of each table; 0 of one that is not cached.
        policy: which row is evicted, the one used longest ago ("lru") or least often ("lfu").

    Attributes:
        tags, used, pins, dirty: of `S` slots, int64 the row, or `NO_ROW`; int64 when it was used last, or how often;
            int32 how many batches have pinned it; bool whether it differs from the store's, as of released batches.
        parts: tags, uses and pins of each table: views.
        now: int64 `[]`, how many batches were looked up.
        num_slots: of each table, and `in_sets` without its overflow; 0 of one that is not cached.
        starts: of each table, where its slots begin; `first_slots` is the same, int64 `[T]`.
        overflow: int64, the slots of all overflows among all slots, ascending; as a rule there are none.
    """

    def __init__(self, num_sets: Sequence[int], policy: str, device: torch.device) -> None:
        self.policy, self.device = policy, device
        self.num_sets = torch.tensor(num_sets, dtype=torch.int64, device=device)
        self.now = torch.zeros((), dtype=torch.int64, device=device)
        self.in_sets = [sets * WAYS for sets in num_sets]
        self.num_slots = list(self.in_sets)
        size = sum(self.num_slots)
        self.tags = torch.full((size,), NO_ROW, dtype=torch.int64, device=device)
        self.used = torch.zeros(size, dtype=torch.int64, device=device)
        self.pins = torch.zeros(size, dtype=torch.int32, device=device)
        self.dirty = torch.zeros(size, dtype=torch.bool, device=device)
        self._split()

    def look_up(self, rows: Tensor, tables: Tensor) -> Tensor:
        """The slots of a batch's distinct rows; those that are in slots are pinned. See `ops.row_cache_look_up_`."""
        self.now += 1
        return row_cache_look_up_(*self.parts, rows, tables, self.num_sets, self.now, self.policy)

    def allocate(self, rows: Tensor, slots: Tensor, tables: Tensor) -> Tensor:
        """Give slots to rows that have none, and pin them; returns what they evict. See `ops.row_cache_allocate_`."""
        return row_cache_allocate_(*self.parts, rows, slots, tables, self.num_sets, self.now, self.policy)

    def empty(self, table: int) -> None:
        """Forget which rows of a table are in slots."""
        for name, nothing in _EMPTY:
            getattr(self, name)[self.slice_of(table)] = nothing

    def slice_of(self, table: int) -> slice:
        """Where a table's slots are among all."""
        return slice(self.starts[table], self.starts[table] + self.num_slots[table])

    def grow(self, more: Sequence[int]) -> None:
        """Give each table's overflow so many more slots; `starts` change."""
        for name, nothing in _EMPTY:
            parts = zip(getattr(self, name).split(self.num_slots), more, strict=True)
            grown = [each for part, number in parts for each in (part, part.new_full((number,), nothing))]
            setattr(self, name, torch.cat(grown))
        self.num_slots = [slots + number for slots, number in zip(self.num_slots, more, strict=True)]
        self._split()

    def free_overflow(self, table: int) -> Tensor:
        """The slots of a table's overflow that have no row, ascending."""
        first = self.in_sets[table]
        return (self.parts[0][table][first:] == NO_ROW).nonzero()[:, 0] + first

    def _split(self) -> None:
        ends = list(accumulate(self.num_slots))
        self.starts = [0, *ends[:-1]]
        self.first_slots = torch.tensor(self.starts, dtype=torch.int64, device=self.device)
        tags, used, pins = (list(each.split(self.num_slots)) for each in (self.tags, self.used, self.pins))
        self.parts = tags, used, pins
        slots = torch.arange(sum(self.num_slots), device=self.device)
        bounds = zip(self.starts, self.in_sets, ends, strict=True)
        self.overflow = torch.cat([slots[begin + sets : end] for begin, sets, end in bounds])


_EMPTY = ("tags", NO_ROW), ("used", 0), ("pins", 0), ("dirty", False)  # what a slot without a row has
