"""Some rows of a table on disk in host memory: those in use are found there, and are written back when they must go.

Slots stand in sets, as those of rows on a device do (`kernels/cache_sets.py`), and the same kernels find and give them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tritonemb.kernels.cache_sets import NO_ROW, POLICIES, WAYS
from tritonemb.layout import NUM_ROWS, TABLE_SIZE
from tritonemb.storage.row_file import FileRows
from tritonemb.storage.store import StorageError
from tritonemb.utils import advise_huge_pages

Policy = Literal["lru", "lfu"]
CHUNK_BYTES = 1 << 26  # of records that are written back at once


class Counts(NamedTuple):
    """What rows in host memory have been good for.

    Args:
        found: rows that were read and were there.
        read: bytes of records that came from the file.
        written: bytes of records that went there.
    """

    found: int = 0
    read: int = 0
    written: int = 0

    def plus(self, found: int = 0, read: int = 0, written: int = 0) -> Counts:
        """These, and more."""
        return Counts(self.found + found, self.read + read, self.written + written)


class CachedRows:
    """The rows of a file as `FileRows` has them, some of which are in memory.

    Every row that is read or written is kept, and takes the place of the one of its set that was used longest ago, or
    least often, which goes to the file if it was written. Those of a call for which their set has no way left, because
    others of the same call fill it, come from the file and go there.

    Args:
        file: the rows; nobody else may write to them.
        rows: how many to keep, rounded up to sets of 32; all of them, if the table has no more.
        policy: the row to make room: the one used longest ago ("lru") or least often ("lfu").

    Attributes:
        counts: what has been done so far.

    Raises:
        ValueError: see `check_cache`.
        StorageError: there is not so much memory.
    """

    def __init__(self, file: FileRows, rows: int, policy: Policy = "lru") -> None:
        identity = file.identity
        check_cache(identity.table, rows, policy)
        self._file, self._policy, self._num_bytes = file, policy, identity.record.num_bytes
        num_sets = -(-min(rows, identity.num_rows) // WAYS)
        num_slots = num_sets * WAYS
        with torch.device("cpu"):  # not on a device that a `with` of the user's chooses
            try:
                self._records = torch.empty(num_slots, self._num_bytes, dtype=torch.uint8)
                self._tags = torch.full((num_slots,), NO_ROW)
                self._used = torch.zeros(num_slots, dtype=torch.int64)
                self._pins = torch.zeros(num_slots, dtype=torch.int32)
                self._changed = torch.zeros(num_slots, dtype=torch.bool)  # whether a slot's row differs from the file's
            except (RuntimeError, MemoryError) as error:
                raise StorageError(
                    f"table {identity.table!r} needs {num_slots * self._num_bytes:,} bytes of host memory for "
                    f"{num_slots:,} rows, which there are not ({error}); let it keep fewer there"
                ) from error
            self._num_sets, self._table = torch.tensor([num_sets]), torch.zeros(1, TABLE_SIZE, dtype=torch.int64)
            self._table[0, NUM_ROWS] = identity.num_rows
        advise_huge_pages(self._records)
        self._now = 0
        self.counts = Counts()

    def read(self, rows: Tensor, records: Tensor) -> None:
        """Fill `records` with those of the rows, as in `RowStore`. If it fails, nothing else has changed."""
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
            with self._file.vital("rows could not be written back"):
                self._allocate(rows, slots)
                _move(self._records, some, slots[missing], torch.arange(wanted.numel()))

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Make `records` those of the rows; what goes wrong is the table's failure."""
        with self._look_up(rows) as slots, self._file.vital("rows could not be written back"):
            self._allocate(rows, slots)
            _move(self._records, records, slots, torch.arange(rows.numel()))
            self._changed[slots[slots >= 0]] = True
            homeless = slots < 0
            self._write_down(rows[homeless], records[homeless])

    def write_back(self) -> None:
        """Bring what was written to the file; rows stay where they are."""
        slots = self._changed.nonzero()[:, 0]
        slots = slots[self._tags[slots].argsort()]
        for chunk in slots.split(max(1, CHUNK_BYTES // self._num_bytes)):
            self._write_from(self._tags[chunk], chunk)

    def has_changes(self) -> bool:
        """Whether some row was written, and is not in the file."""
        return bool(self._changed.any())

    @contextmanager
    def _look_up(self, rows: Tensor) -> Iterator[Tensor]:
        """The slots of rows, -1 of those that have none; no slot is given away meanwhile."""
        from tritonemb.kernels.cpu.row_cache import row_cache_look_up_  # its compiler is loaded when first used

        self._now += 1
        slots = row_cache_look_up_(
            [self._tags], [self._used], [self._pins], rows, torch.tensor(rows.numel()), self._table, self._num_sets,
            torch.tensor(self._now), self._policy,
        )  # fmt: skip
        try:
            yield slots
        finally:
            self._pins[slots[slots >= 0]] = 0

    def _allocate(self, rows: Tensor, slots: Tensor) -> None:
        """Give slots to those of the rows that have none, as far as there are; whose they were go to the file."""
        from tritonemb.kernels.cpu.row_cache import row_cache_allocate_

        evicted = row_cache_allocate_(
            [self._tags], [self._used], [self._pins], rows, slots, torch.tensor(rows.numel()), self._table,
            self._num_sets, torch.tensor(self._now), self._policy,
        )  # fmt: skip
        gone = evicted != NO_ROW
        gone[gone.clone()] = self._changed[slots[gone]]
        victims, order = evicted[gone].sort()
        self._write_from(victims, slots[gone][order])

    def _write_from(self, rows: Tensor, slots: Tensor) -> None:
        """Write rows, ascending, whose records are in these slots, which differ from the file no more then."""
        if rows.numel() == 0:
            return
        records = self._make(rows.numel())
        _move(records, self._records, torch.arange(rows.numel()), slots)
        self._write_down(rows, records)
        self._changed[slots] = False

    def _write_down(self, rows: Tensor, records: Tensor) -> None:
        self._file.write(rows, records)
        self.counts = self.counts.plus(written=rows.numel() * self._num_bytes)

    def _make(self, number: int) -> Tensor:
        return torch.empty(number, self._num_bytes, dtype=torch.uint8)


def check_cache(table: str, rows: int | None, policy: str) -> None:
    """Raise a ValueError for rows or a policy that cannot be."""
    if rows is not None and rows < 1:
        raise ValueError(f"table {table!r}: rows in host memory must be at least 1, got {rows}")
    if policy not in POLICIES:
        raise ValueError(f"table {table!r}: no policy is called {policy!r}; there are {list(POLICIES)}")


def _move(to: Tensor, source: Tensor, to_rows: Tensor, from_rows: Tensor) -> None:
    """Copy records; those that go to, or come from, a negative row are left out."""
    from tritonemb.kernels.cpu.move_rows import move_rows_

    move_rows_([to], [source], to_rows, from_rows)
