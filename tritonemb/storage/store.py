"""Code that all stores of rows share: errors, futures, operation queues, records, and the directory of a cache.

A row is one record of bytes, which has its weights and its optimizer state. A store on disk runs its operations in
order, in one thread.
"""

import errno
import functools
import importlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tritonemb import layout
from tritonemb.ops.row_cache import row_cache_allocate_, row_cache_look_up_
from tritonemb.ops.row_update import fill_initial_
from tritonemb.optimizers import StateSpec

SCALE = "weight_scale"  # the field of a record that has the scale of its int8 codes
_LEAST_EXPONENT, _NONFINITE = 27, 255  # biased exponents: 2^-100, below which rows become zero; infinities and NaN
Initializer = Callable[[Tensor, Tensor], object]
"""`initializer(rows, records)` fills uint8 `[n, num_bytes]` with the initial values of rows int64 `[n]`, ascending.

Values may depend on a row's number alone, never on the other rows of the call. Any thread may call it, but a store
never calls it concurrently.
"""


class StorageError(OSError):
    """Rows could not be read or written. The text names the table, the file, the reason and a remedy."""

    raised = False  # whether a waiting caller has received it


@contextmanager
def storage_errors(problem: str, remedy: str) -> Iterator[None]:
    """Raise OSErrors as a StorageError with the text "{problem}: {error}; {advice}"."""
    try:
        yield
    except StorageError:
        raise
    except (OSError, EOFError, OverflowError) as error:
        raise StorageError(f"{problem}: {error}; {advice(error, remedy)}") from error


def advice(error: BaseException, remedy: str) -> str:
    """Return the remedy of a full disk or of too many open files, or `remedy` for any other error."""
    code = getattr(error, "errno", None)
    if code in (errno.EMFILE, errno.ENFILE):
        return "each table on disk has a file open: raise the limit of open files (`ulimit -n`)"
    return "free disk space there" if code in (errno.ENOSPC, errno.EDQUOT) else remedy


class Cancelled(Exception):
    """The main thread was interrupted while it waited for this work."""


def is_cancelled() -> bool:
    """Return whether this is a thread of `shielded` whose caller was interrupted."""
    return getattr(threading.current_thread(), "cancelled", False)


def raise_if_cancelled() -> None:
    """Raise Cancelled in a thread of `shielded` whose caller was interrupted."""
    if is_cancelled():
        raise Cancelled


class Completion:
    """An event that is set once, for the main thread too.

    A signal handler may raise within `threading.Event.wait`, as within any method of a condition variable, and leave
    its lock locked, so that `set` never returns. Here each waiter has its own lock.
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
            if not self._is_set:  # otherwise `set` may have missed the waiter
                waiter.acquire()


class IoFuture:
    """Future of a submitted operation."""

    def __init__(self) -> None:
        self._done, self._process = Completion(), os.getpid()
        self._failure: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the operation is done; raise its error, or StorageError if it was submitted before a fork."""
        if os.getpid() != self._process and not self._done.is_set():
            raise StorageError("this operation was submitted before the fork; wait for it in the parent process")
        self.join()
        if self._failure is not None:
            if isinstance(self._failure, StorageError):
                self._failure.raised = True
            raise self._failure

    def join(self) -> None:
        self._done.wait()

    def run(self, work: Callable[[], object]) -> None:
        """Run the operation in this thread, for stores; waiters return after `finish`."""
        try:
            work()
        except BaseException as failure:
            self._failure = failure

    def finish(self) -> None:
        self._done.set()

    @classmethod
    def finished(cls, work: Callable[[], object]) -> Self:
        """Run an operation in this thread, and return its future."""
        future = cls()
        future.run(work)
        future.finish()
        return future


def wait_all(futures: Sequence[IoFuture]) -> None:
    """Wait for operations; raise the first error."""
    for future in futures:
        future.wait()


class OperationQueue:
    """Queue of operations that run in one thread, called `name`, in the order of submission."""

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], IoFuture] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> IoFuture:
        future = IoFuture()
        with self._lock:
            if self._thread is None:  # the thread references only the queue, so that a dropped store is collected
                thread = threading.Thread(target=_run_operations, args=(self._queue,), name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._queue.put((work, future))
        return future

    def close(self, operation: Callable[[], None]) -> IoFuture:
        """Submit the last operation, and end the thread after it. Without a thread it runs in the caller's."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                future = IoFuture()
                self._queue.put((operation, future))
                self._queue.put(None)
                return future
        return IoFuture.finished(operation)


@torch.inference_mode()  # inference tensors can be changed in this mode only, others in any
def _run_operations(operations: queue.SimpleQueue[tuple[Callable[[], None], IoFuture] | None]) -> None:
    while (operation := operations.get()) is not None:
        work, future = operation
        future.run(work)
        del operation, work  # frees their memory before waiters return
        future.finish()
        del future


class Counts(NamedTuple):
    """Rows that were read from the host cache; bytes read from the file, and written to it."""

    cache_hits: int = 0
    read: int = 0
    written: int = 0

    def plus(self, cache_hits: int = 0, read: int = 0, written: int = 0) -> Self:
        return type(self)(self.cache_hits + cache_hits, self.read + read, self.written + written)


def fill_unwritten(written: np.ndarray, rows: Tensor, records: Tensor, initializer: Initializer) -> None:
    """Write initial values to the records of rows that were never written: `written`, uint8 `[n]`, is 0."""
    unwritten = torch.from_numpy(np.flatnonzero(written == 0))
    if 0 < unwritten.numel() < rows.numel():
        initial = records[unwritten]
        initializer(rows[unwritten], initial)
        records[unwritten] = initial
    elif unwritten.numel():
        initializer(rows, records)


@functools.cache
def cpu_kernels(name: str) -> ModuleType:
    """Return a module of `kernels/cpu`; its compiler is loaded on first use."""
    return importlib.import_module(f"tritonemb.kernels.cpu.{name}")


@dataclass(frozen=True)
class Field:
    """A field of a record: the weight, or an optimizer state."""

    name: str
    dtype: torch.dtype
    size: int  # values per row
    offset: int  # in bytes from the record's start
    is_scalar: bool = False  # a scalar per row: its view is `[n]`, not `[n, 1]`

    @property
    def num_bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """The layout of a row's bytes: fields that do not overlap, each aligned to its values' size."""

    fields: tuple[Field, ...]
    num_bytes: int

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Return views of each field of records, uint8 `[n, num_bytes]`, contiguous, by name.

        A view has the field's dtype and is `[n, size]`, or `[n]` for one value per row. Raise ValueError for other
        records.
        """
        if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] != self.num_bytes:
            raise ValueError(f"records must be uint8 [n, {self.num_bytes}], got {records.dtype} {list(records.shape)}")
        views = {}
        for field in self.fields:
            values = records[:, field.offset : field.offset + field.num_bytes].view(field.dtype)
            views[field.name] = values.squeeze(1) if field.is_scalar else values
        return views


def check_requests(requests: Iterable[tuple[str, int, Record, Tensor, Tensor]]) -> None:
    """Raise TypeError or ValueError unless rows and records, the last two of each, are arguments of `DiskRows.read`."""
    for table, num_rows, record, rows, records in requests:
        for name, tensor, dtype in (("rows", rows, torch.int64), ("records", records, torch.uint8)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"table {table!r}: {name} must be a tensor, got {type(tensor).__name__}")
            if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
                kind = f"{tensor.dtype} on {tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}"
                raise ValueError(f"table {table!r}: {name} must be {dtype}, contiguous, on the CPU, got {kind}")
        if rows.dim() != 1 or records.shape != (rows.numel(), record.num_bytes):
            shapes = f"{list(rows.shape)} and {list(records.shape)}"
            raise ValueError(f"table {table!r}: rows must be [n] and records [n, {record.num_bytes}], got {shapes}")
        row_numbers = rows.numpy()
        if (unordered := row_numbers[1:] <= row_numbers[:-1]).any():
            first, second = row_numbers[(position := int(unordered.argmax())) :][:2]
            raise ValueError(
                f"table {table!r}: rows must be ascending and distinct, but rows[{position}] is {first} and "
                f"rows[{position + 1}] is {second}; sort them and drop duplicates"
            )
        for row in row_numbers[:1].tolist() + row_numbers[-1:].tolist():
            if not 0 <= row < num_rows:
                raise ValueError(f"table {table!r} has rows 0 to {num_rows - 1}, got row {row}")


def row_states(dtype: torch.dtype, states: Sequence[StateSpec]) -> Sequence[StateSpec]:
    """Return the states of a row, with the scale of int8 codes."""
    return (*states, StateSpec(SCALE, per_element=False)) if dtype == torch.int8 else states


def record_of(embedding_dim: int, dtype: torch.dtype, states: Sequence[StateSpec], has_ids: bool = False) -> Record:
    """Return the record of a table's rows: the weight, the optimizer's states, always float32, the scale of int8 rows
    and the id, if any.

    Its size is a multiple of 4 bytes, so that each field of an array of records has a view.
    """
    fields = [Field("weight", dtype, embedding_dim, 0)]
    end = -(-fields[0].num_bytes // 4) * 4
    for state in row_states(dtype, states):
        size = embedding_dim if state.per_element else 1
        fields.append(Field(state.name, torch.float32, size, end, not state.per_element))
        end += 4 * size
    if has_ids:
        fields.append(Field("id", torch.int64, 1, -(-end // 8) * 8, True))
        end = fields[-1].offset + 8
    return Record(tuple(fields), end)


def _scales(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of float32 rows `[n, dim]`, and their reciprocals, 0 without one: float32 `[n, 1]`.

    The scale is 2^e, the least with max |w| ≤ 127 · 2^e; 0 below 2^-100, and NaN if the row is not finite.
    """
    largest = values.abs().amax(1, keepdim=True).view(torch.int32)
    exponent = largest >> 23
    # The sum carries into the exponent above 127 / 64, whose mantissa is 0x7E0000.
    scale = ((((largest + 0x1FFFF) >> 23) - 6) << 23).view(torch.float32)
    is_encoded = (exponent >= _LEAST_EXPONENT) & (exponent < _NONFINITE)
    unencoded = torch.where(exponent == _NONFINITE, torch.nan, 0.0)
    return torch.where(is_encoded, scale, unencoded), torch.where(is_encoded, 1 / scale, 0.0)


def round_rows(values: Tensor, noise: Tensor | float = 0.5) -> Tensor:
    """Round float32 rows `[n, dim]` to ⌊w / scale + noise⌋ · scale; noise in [0, 1), or 1/2 to round to nearest.

    A rounded row is the same when it is rounded again, whatever the noise, as codes are integers and scales are nested.
    So a row that a step does not change does not drift, and it is encoded and decoded exactly.
    """
    scale, inverse = _scales(values)
    return (values * inverse).nan_to_num_().add_(noise).floor_().mul_(scale)


def encode_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, int8 `[n, dim]`, and scales `[n]` of float32 rows, rounded to nearest."""
    scale, inverse = _scales(values)
    return (values * inverse).nan_to_num_().add_(0.5).floor_().to(torch.int8), scale.squeeze(1)


def decode_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Return rows, float32 `[n, dim]`."""
    return codes.to(torch.float32).mul_(scale[:, None])


def write_rows(fields: dict[str, Tensor], values: Tensor) -> None:
    """Write float32 rows to the weight of records, rounded to nearest where these have codes."""
    if fields["weight"].dtype == torch.int8:
        codes, scale = encode_rows(values)
        fields["weight"].copy_(codes)
        fields[SCALE].copy_(scale)
    else:
        fields["weight"].copy_(values)


@dataclass(frozen=True)
class InitialValues:
    """Initializer of records: the weight depends on its row and column in the unsharded table, states are zero."""

    record: Record
    seed: int
    bound: float  # the weight is uniform in ± `bound`
    row_origin: int = 0  # first row and column of this shard in the unsharded table
    column_origin: int = 0

    def __call__(self, rows: Tensor, records: Tensor) -> None:
        records.zero_()
        fields = self.record.views(records)
        weight, global_rows = fields["weight"], rows + self.row_origin if self.row_origin else rows
        values = torch.empty(weight.shape, device="cpu") if weight.dtype == torch.int8 else weight
        fill_initial_(values, self.seed, self.bound, first_column=self.column_origin, rows=global_rows)
        if values is not weight:
            write_rows(fields, values)


class CacheDirectory:
    """Tags, last uses, pins and dirty flags of the `S` slots of all tables' caches, table by table.

    The caches are set-associative, see `kernels/row_cache.py`. A table has the slots of its sets, then its overflow:
    slots of rows whose set is full of pinned rows. The overflow grows on demand.
    """

    def __init__(self, num_sets: Sequence[int], policy: str, device: torch.device) -> None:
        self.policy, self.device = policy, device  # evict the least recently ("lru") or frequently used row ("lfu")
        # Sets per table; 0 for a table that is not cached.
        self.num_sets = torch.tensor(num_sets, dtype=torch.int64, device=device)
        self.clock = torch.zeros((), dtype=torch.int64, device=device)  # number of batches that were looked up
        # Slots per table: of its sets, and with its overflow.
        self.in_sets = [sets * layout.WAYS for sets in num_sets]
        self.num_slots = list(self.in_sets)
        size = sum(self.num_slots)
        # The row in each slot, or `NO_ROW`.
        self.tags = torch.full((size,), layout.NO_ROW, dtype=torch.int64, device=device)
        # The batch that used it last, or the number of its uses.
        self.used = torch.zeros(size, dtype=torch.int64, device=device)
        # Number of batches that have pinned it.
        self.pins = torch.zeros(size, dtype=torch.int32, device=device)
        # Whether it differs from the store, updates of released batches included.
        self.dirty = torch.zeros(size, dtype=torch.bool, device=device)
        self._update_views()

    def look_up(self, rows: Tensor, tables: Tensor) -> Tensor:
        """Pin the cached rows of a batch's distinct rows; return slots, -1 for misses. See `ops.row_cache_look_up_`."""
        self.clock += 1
        return row_cache_look_up_(self._by_table(tables), rows, self.clock, self.policy)

    def allocate(self, rows: Tensor, slots: Tensor, tables: Tensor) -> Tensor:
        """Allocate and pin slots for misses; return the evicted rows. See `ops.row_cache_allocate_`."""
        return row_cache_allocate_(self._by_table(tables), rows, slots, self.clock, self.policy)

    def _by_table(self, tables: Tensor) -> layout.DirectoryTensors:
        return layout.DirectoryTensors(self.tags, self.used, self.pins, self.first_slots, tables, self.num_sets)

    def clear(self, table: int) -> None:
        for name, empty_value in _EMPTY:
            getattr(self, name)[self.slice_of(table)] = empty_value

    def slice_of(self, table: int) -> slice:
        """Return the range of a table's slots in the arrays of all tables."""
        return slice(self.starts[table], self.starts[table] + self.num_slots[table])

    def grow(self, num_new: Sequence[int]) -> None:
        """Add `num_new` slots, multiples of `SLOT_ALIGNMENT`, to the tables' overflows; `starts` change."""
        for name, empty_value in _EMPTY:
            by_table = zip(getattr(self, name).split(self.num_slots), num_new, strict=True)
            grown = [tensor for old, size in by_table for tensor in (old, old.new_full((size,), empty_value))]
            setattr(self, name, torch.cat(grown))
        self.num_slots = [num_slots + size for num_slots, size in zip(self.num_slots, num_new, strict=True)]
        self._update_views()

    def free_overflow(self, table: int) -> Tensor:
        """Return the free slots of a table's overflow, ascending."""
        first = self.in_sets[table]
        return (self.tags[self.slice_of(table)][first:] == layout.NO_ROW).nonzero()[:, 0] + first

    def _update_views(self) -> None:
        # First slot of each table.
        ends = list(accumulate(self.num_slots))
        self.starts = [0, *ends[:-1]]
        self.first_slots = torch.tensor(self.starts, dtype=torch.int64, device=self.device)
        # Overflow slots of all tables, ascending; usually none.
        slots = torch.arange(sum(self.num_slots), device=self.device)
        bounds = zip(self.starts, self.in_sets, ends, strict=True)
        self.overflow = torch.cat([slots[begin + sets : end] for begin, sets, end in bounds])


_EMPTY = ("tags", layout.NO_ROW), ("used", 0), ("pins", 0), ("dirty", False)  # values of an empty slot
