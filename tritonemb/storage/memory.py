"""Rows in host memory: all of a table (`HostRows`), or those of a table on disk that are in use (`HostCache`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from tritonemb.layout import NO_ROW, NUM_ROWS, TABLE_SIZE, WAYS
from tritonemb.memory import advise_huge_pages, empty_pinned
from tritonemb.storage.store import CacheDirectory, Counts, Initializer, Record, StorageError, cpu_kernels

Policy = Literal["lru", "lfu"]
RowFile = Any  # that of `disk.py`, which imports this module
FILL_BYTES = 64 << 20  # of records that the initializer fills at once
CHUNK_BYTES = 1 << 26  # of records that are written back at once


class HostRows:
    """All rows of a table in host memory: one tensor uint8 `[num_rows, num_bytes]`, at first of initial values.

    A `gpu` reads and writes it by itself: then it is pinned. StorageError if it cannot be allocated.
    """

    def __init__(
        self, num_rows: int, record: Record, initializer: Initializer, gpu: torch.device | None = None, *,
        table_name: str = "table",
    ) -> None:  # fmt: skip
        self.record, num_bytes = record, num_rows * record.num_bytes
        try:
            rows = empty_pinned(num_bytes, gpu) if gpu else advise_huge_pages(torch.empty(num_bytes, dtype=torch.uint8))
        except (RuntimeError, MemoryError, OSError) as error:
            raise StorageError(
                f"table {table_name!r}: cannot allocate {num_bytes:,} bytes of {'' if gpu is None else 'pinned '}host "
                f"memory for {num_rows:,} rows ({error}); place it on disk, or shard it over several hosts"
            ) from error
        self._bytes = rows.view(num_rows, record.num_bytes)
        step = max(1, FILL_BYTES // record.num_bytes)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            initializer(torch.arange(begin, end), self._bytes[begin:end])

    def fields(self) -> dict[str, Tensor]:
        """Views of each field of all rows, `[num_rows, size]` or `[num_rows]`; writing to them writes to the store."""
        return self.record.views(self._bytes)


class HostCache:
    """The rows of a `RowFile`, some of which are cached in host memory.

    The cache has the same directory as one on a device. Every row that is read or written is cached, and evicts a row
    of its set; a dirty one is written back. Overflow rows, for which others of the same call leave no way of their set,
    are read from the file and written to it. Nobody else may write to the file.

    Args:
        rows: how many to cache, rounded up to sets of 32; all of them, if the table has no more.
    """

    def __init__(self, file: RowFile, rows: int, policy: Policy = "lru") -> None:
        identity = file.identity
        self._file, self._num_bytes = file, identity.record.num_bytes
        num_sets = -(-min(rows, identity.num_rows) // WAYS)
        num_slots, cpu = num_sets * WAYS, torch.device("cpu")  # whatever device the user has set
        try:
            self._records = advise_huge_pages(torch.empty(num_slots, self._num_bytes, dtype=torch.uint8, device=cpu))
            self._directory = CacheDirectory([num_sets], policy, cpu)
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"table {identity.table!r}: cannot allocate {num_slots * self._num_bytes:,} bytes of host memory "
                f"for {num_slots:,} cached rows ({error}); reduce CacheConfig(host_rows=...)"
            ) from error
        self._tags, self._dirty = self._directory.tags, self._directory.dirty
        self._dirty_flags = self._dirty.numpy()  # for garbage collection, even while operators are traced
        self._table = torch.zeros(1, TABLE_SIZE, dtype=torch.int64, device=cpu)
        self._table[0, NUM_ROWS] = identity.num_rows
        self.counts = Counts()

    def read(self, rows: Tensor, records: Tensor) -> None:
        """Fill `records` with the records of the rows. If it fails, nothing else has changed."""
        with self._look_up(rows) as slots:
            missing = (slots < 0).nonzero()[:, 0]
            wanted = rows[missing]
            some = records if wanted.numel() == rows.numel() else self._make(wanted.numel())
            self._file.read(wanted, some)
            self.counts = self.counts.plus(found=rows.numel() - wanted.numel(), read=some.numel())
            _move(records, self._records, torch.arange(rows.numel()), slots)
            if wanted.numel() == 0:
                return
            if some is not records:
                _move(records, some, missing, torch.arange(wanted.numel()))
            with self._file.fail_on_error("rows could not be written back"):
                self._allocate(rows, slots)
                _move(self._records, some, slots[missing], torch.arange(wanted.numel()))

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write the records of the rows; an error is the table's failure."""
        with self._look_up(rows) as slots, self._file.fail_on_error("rows could not be written back"):
            self._allocate(rows, slots)
            _move(self._records, records, slots, torch.arange(rows.numel()))
            self._dirty[slots[slots >= 0]] = True
            overflow = slots < 0
            self._write_to_file(rows[overflow], records[overflow])

    def write_back(self) -> None:
        """Write dirty rows to the file; they stay cached."""
        slots = self._dirty.nonzero()[:, 0]
        slots = slots[self._tags[slots].argsort()]
        for chunk in slots.split(max(1, CHUNK_BYTES // self._num_bytes)):
            self._write_slots(self._tags[chunk], chunk)

    def needs_write_back(self) -> bool:
        """Whether there are dirty rows, and a file that takes them and can be opened again."""
        return bool(self._dirty_flags.any()) and self._file.failure is None and self._file.file.is_linked()

    @contextmanager
    def _look_up(self, rows: Tensor) -> Iterator[Tensor]:
        """The slots of rows, -1 of those that have none; they are pinned meanwhile."""
        slots = self._directory.look_up(rows, self._table)
        try:
            yield slots
        finally:
            self._directory.pins[slots[slots >= 0]] = 0

    def _allocate(self, rows: Tensor, slots: Tensor) -> None:
        """Allocate slots to those of the rows that have none, as far as there are; write back what is evicted."""
        evicted = self._directory.allocate(rows, slots, self._table)
        victims = evicted != NO_ROW
        victims[victims.clone()] = self._dirty[slots[victims]]
        dirty_rows, order = evicted[victims].sort()
        self._write_slots(dirty_rows, slots[victims][order])

    def _write_slots(self, rows: Tensor, slots: Tensor) -> None:
        if rows.numel() == 0:
            return
        records = self._make(rows.numel())
        _move(records, self._records, torch.arange(rows.numel()), slots)
        self._write_to_file(rows, records)
        self._dirty[slots] = False

    def _write_to_file(self, rows: Tensor, records: Tensor) -> None:
        self._file.write(rows, records)
        self.counts = self.counts.plus(written=rows.numel() * self._num_bytes)

    def _make(self, number: int) -> Tensor:
        return torch.empty(number, self._num_bytes, dtype=torch.uint8)


def _move(to: Tensor, source: Tensor, to_rows: Tensor, from_rows: Tensor) -> None:
    cpu_kernels("row_cache").move_rows_([to], [source], to_rows, from_rows)
