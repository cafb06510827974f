"""Rows in host memory: all rows of a table (`HostRows`), or a cache of a table on disk (`HostCache`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from tritonemb.layout import NO_ROW, NUM_ROWS, TABLE_SIZE, WAYS
from tritonemb.memory import advise_huge_pages, empty_pinned
from tritonemb.storage.store import CacheDirectory, Counts, Initializer, IoFuture, Record, StorageError, cpu_kernels

Policy = Literal["lru", "lfu"]
RowFile = Any  # `disk.RowFile`; disk.py imports this module
FILL_BYTES = 64 << 20  # bytes of records per call of the initializer; bounds its temporary memory
CHUNK_BYTES = 1 << 26  # bytes of records per transfer; bounds temporary memory


class HostRows:
    """All rows of a table in host memory: one tensor uint8 `[num_rows, num_bytes]`, filled with initial values.

    With a `gpu`, whose kernels read and write it, the memory is pinned. Raise StorageError if it cannot be allocated.
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
        # Views of the fields of all rows, `[num_rows, size]` or `[num_rows]`; writes go to the store.
        self.fields = record.views(self._bytes)
        step = max(1, FILL_BYTES // record.num_bytes)
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            initializer(torch.arange(begin, end), self._bytes[begin:end])

    @staticmethod
    def transfer(requests: Sequence[tuple["HostRows", Tensor, Tensor]], write: bool) -> list[IoFuture]:
        """Copy rows at once, see `DiskRows.transfer`."""
        for store, rows, records in requests:
            if write:
                store._bytes.index_copy_(0, rows, records)
            else:
                records.copy_(store._bytes[rows])
        return []


class HostCache:
    """Write-back cache in host memory of the rows of a `RowFile`.

    It uses the same directory as a device cache. Each row that is read or written is cached and may evict a row of its
    set; a dirty victim is written back. Overflow rows, whose set is full of rows of the same call, are read from and
    written to the file directly. The cache must be the file's only writer. It caches `rows` rows, rounded up to sets of
    32; at most the table's.
    """

    def __init__(self, file: RowFile, rows: int, policy: Policy = "lru") -> None:
        identity = file.identity
        self._file, self._num_bytes = file, identity.record.num_bytes
        num_sets = -(-min(rows, identity.num_rows) // WAYS)
        num_slots, cpu = num_sets * WAYS, torch.device("cpu")  # overrides the user's default device
        try:
            self._records = advise_huge_pages(torch.empty(num_slots, self._num_bytes, dtype=torch.uint8, device=cpu))
            self._directory = CacheDirectory([num_sets], policy, cpu)
        except (RuntimeError, MemoryError) as error:
            raise StorageError(
                f"table {identity.table!r}: cannot allocate {num_slots * self._num_bytes:,} bytes of host memory "
                f"for {num_slots:,} cached rows ({error}); reduce CacheConfig(host_rows=...)"
            ) from error
        self._tags, self._dirty = self._directory.tags, self._directory.dirty
        self._dirty_flags = self._dirty.numpy()  # readable by finalizers even while operators are traced
        self._table = torch.zeros(1, TABLE_SIZE, dtype=torch.int64, device=cpu)
        self._table[0, NUM_ROWS] = identity.num_rows
        self.counts = Counts()

    def read(self, rows: Tensor, records: Tensor) -> None:
        """Fill `records` with the records of the rows. After a failure only `records` may differ."""
        with self._look_up(rows) as slots:
            # Read misses from the file, and copy hits from the cache.
            missing = (slots < 0).nonzero()[:, 0]
            num_rows, num_missing = rows.numel(), missing.numel()
            missing_records = records if num_missing == num_rows else self._empty_records(num_missing)
            self._file.move([(self._file, rows[missing], missing_records)], write=False)
            self.counts = self.counts.plus(cache_hits=num_rows - num_missing, read=missing_records.numel())
            _move(records, self._records, torch.arange(num_rows), slots)
            if num_missing == 0:
                return
            if missing_records is not records:
                _move(records, missing_records, missing, torch.arange(num_missing))
            # Cache the missing rows whose sets have free ways.
            with self._file.fail_on_error("rows could not be written back"):
                self._allocate(rows, slots)
                _move(self._records, missing_records, slots[missing], torch.arange(num_missing))

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write the records of the rows; an error makes the table fail."""
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
        """Return whether there are dirty rows, and the file is usable and can be opened again."""
        return bool(self._dirty_flags.any()) and self._file.failure is None and self._file.file.is_linked()

    @contextmanager
    def _look_up(self, rows: Tensor) -> Iterator[Tensor]:
        """Look up rows and pin their slots inside the block; yields slots, -1 for misses."""
        slots = self._directory.look_up(rows, self._table)
        try:
            yield slots
        finally:
            self._directory.pins[slots[slots >= 0]] = 0

    def _allocate(self, rows: Tensor, slots: Tensor) -> None:
        """Allocate slots for misses whose sets have free ways; write back dirty victims."""
        evicted = self._directory.allocate(rows, slots, self._table)
        dirty_victims = evicted != NO_ROW
        dirty_victims[dirty_victims.clone()] = self._dirty[slots[dirty_victims]]
        dirty_rows, order = evicted[dirty_victims].sort()
        self._write_slots(dirty_rows, slots[dirty_victims][order])

    def _write_slots(self, rows: Tensor, slots: Tensor) -> None:
        if rows.numel() == 0:
            return
        records = self._empty_records(rows.numel())
        _move(records, self._records, torch.arange(rows.numel()), slots)
        self._write_to_file(rows, records)
        self._dirty[slots] = False

    def _write_to_file(self, rows: Tensor, records: Tensor) -> None:
        self._file.move([(self._file, rows, records)], write=True)
        self.counts = self.counts.plus(written=rows.numel() * self._num_bytes)

    def _empty_records(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self._num_bytes, dtype=torch.uint8)


def _move(target: Tensor, source: Tensor, target_rows: Tensor, source_rows: Tensor) -> None:
    cpu_kernels("row_cache").move_rows_([target], [source], target_rows, source_rows)


class StreamCopy(IoFuture):
    """Copy between pinned memory and a GPU on a side stream; `wait` makes the current stream wait for it."""

    def __init__(self, stream: Any, source: Tensor, target: Tensor) -> None:
        super().__init__()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            if source.device.type == "cuda":  # its memory may be freed before the copy has ended
                source.record_stream(stream)
            self._event = stream.record_event()
        self._to_host = target.device.type == "cpu"
        self._done.set()

    def wait(self) -> None:
        if self._to_host:
            self._event.synchronize()
        torch.cuda.current_stream().wait_event(self._event)
