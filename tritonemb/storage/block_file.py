"""The blocks of a table's file: many are read or written at once, checked when read and sealed when written."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tritonemb.storage.aio import HALF_BYTES, ExtentError, Extents, IoContext, Transfer, io_context, overlap
from tritonemb.storage.format import BlockRequest, FileLayout, runs
from tritonemb.storage.io import PageFile
from tritonemb.storage.page_table import MAX_POSITIONS, PageTable
from tritonemb.storage.store import StorageError, cpu_kernels
from tritonemb.storage.threads import IoThreads

BUFFER_BYTES = HALF_BYTES  # that a part of a request must fit
MAX_GROWTH = 1 << 30  # bytes by which a file grows at once
SCAN_BYTES = 1 << 18  # that a recovery scan reads at once


class Allocation(NamedTuple):
    """Where blocks stand in the file.

    Args:
        positions: int64 `[b]`.
        new: bool `[b]`: whether a block was never written.
    """

    positions: np.ndarray
    new: np.ndarray


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass
class _RequestPart:
    """A part of a request that fits a half of the I/O buffer.

    Args:
        which: of the request's blocks.
        begin: in bytes, where it is in the buffer.
        blocks, positions: int64 `[b]`: its blocks, and where they are in the file, -1 for nowhere.
        slots: int64 `[b]`: where they are in the buffer, in blocks from `begin` on, -1 for nowhere.
        transfer: of extents: each holds those blocks that `order` has from `firsts` to `lasts`.
    """

    which: slice
    begin: int
    blocks: np.ndarray = field(default_factory=_none)
    positions: np.ndarray = field(default_factory=_none)
    slots: np.ndarray = field(default_factory=_none)
    order: np.ndarray = field(default_factory=_none)
    firsts: np.ndarray = field(default_factory=_none)
    lasts: np.ndarray = field(default_factory=_none)
    transfer: Transfer = lambda: None

    @classmethod
    def contiguous(cls, blocks: np.ndarray, positions: np.ndarray, begin: int) -> _RequestPart:
        """Blocks that stand one behind the other in the buffer."""
        return cls(slice(0, blocks.size), begin, blocks, positions, np.arange(blocks.size))

    def sort(self, blocks: np.ndarray, positions: np.ndarray) -> None:
        """Give its blocks, of a request's, slots in the order of their positions."""
        self.blocks, self.positions = blocks[self.which], positions[self.which]
        order = np.argsort(self.positions)
        order = order[np.searchsorted(self.positions[order], 0) :]
        self.slots = np.full(self.blocks.size, -1)
        self.slots[order] = np.arange(order.size)


class BlockFile:
    """A file's blocks. Opening it scans the whole file, to recover where each block stands and to check them all.

    Args:
        table: its name, for messages.
        file: opened.
        layout: of the file.
        threads: see `IoContext.submit`.

    Raises:
        StorageError: a part of the file cannot be read, is damaged, or is there twice.
    """

    def __init__(self, table: str, file: PageFile, layout: FileLayout, threads: IoThreads | None = None) -> None:
        self.table, self.file, self.layout, self._threads = table, file, layout, threads
        self.page_table = PageTable(layout.num_blocks)
        self._size = file.size()
        with io_context() as context:
            self._scan(context)

    def read(self, rows: np.ndarray, records: int) -> np.ndarray:
        """Copy the records of rows out of the file; those that were never written are left alone.

        Args:
            rows: int64 `[n]`, ascending.
            records: the address of `n` records.

        Returns:
            uint8 `[n]`: whether a row was ever written.

        Raises:
            StorageError: naming table, file, rows and offset.
        """
        layout, written = self.layout, np.empty(rows.size, dtype=np.uint8)
        request = layout.request(rows)
        positions = self.page_table.find(request.blocks)

        def begin(part: _RequestPart) -> None:
            part.sort(request.blocks, positions)
            self._submit(context, part, np.flatnonzero(part.positions >= 0), False)

        def finish(part: _RequestPart) -> None:
            self._wait(context, part, "read")
            some = slice(int(request.starts[part.which.start]), int(request.starts[part.which.stop]))
            num_good = cpu_kernels("pages").copy_out(
                context.buffer.address + part.begin, part.blocks, part.slots, rows[some], layout.rows_per_block,
                layout.pages_per_block, layout.record_bytes, records + some.start * layout.record_bytes, written[some],
            )  # fmt: skip
            self._raise_damaged(part.blocks, num_good)

        with io_context() as context:
            overlap(self._parts(context, request.blocks.size), begin, finish)
        return written

    def allocate(self, blocks: np.ndarray) -> Allocation:
        """Allocate a position to each block of int64 `[b]`, ascending, that has none.

        Raises:
            StorageError: the file cannot become so large.
        """
        new = self.page_table.find(blocks) < 0
        if self.page_table.count + np.count_nonzero(new) > MAX_POSITIONS:
            raise StorageError(
                f"table {self.table!r}, file {self.file.path}: a file has at most {MAX_POSITIONS:,} blocks of "
                f"{self.layout.block_bytes:,} bytes; cut the table into smaller shards"
            )
        positions = self.page_table.allocate(blocks)
        needed, step = self.layout.file_bytes(self.page_table.count), self.layout.block_bytes
        if needed > self._size:  # ahead of what is written, which would wait for the file to grow each time
            ahead = min(needed // 4, MAX_GROWTH) // step * step
            self.file.resize(needed + ahead)
            self._size = needed + ahead
        return Allocation(positions, new)

    def write(self, rows: np.ndarray, request: BlockRequest, allocation: Allocation, records: int) -> None:
        """Write records into their blocks. A block whose rows are not all written is read and checked first.

        Args:
            request: of the rows.
            allocation: of its blocks.
            rows, records: as of `read`.

        Raises:
            StorageError: as `read`; some of the blocks may have been written then.
        """
        layout = self.layout
        clear = allocation.new | layout.is_whole(request)
        writing: deque[_RequestPart] = deque()

        def begin(part: _RequestPart) -> None:
            if writing:
                self._wait(context, writing.popleft(), "written")  # its half of the buffer is reused
            part.sort(request.blocks, allocation.positions)
            self._submit(context, part, np.flatnonzero(~clear[part.which]), False)

        def finish(part: _RequestPart) -> None:
            self._wait(context, part, "read")
            some = slice(int(request.starts[part.which.start]), int(request.starts[part.which.stop]))
            num_good = cpu_kernels("pages").copy_in(
                context.buffer.address + part.begin, part.blocks, part.slots, clear[part.which], rows[some],
                layout.rows_per_block, layout.pages_per_block, layout.record_bytes,
                records + some.start * layout.record_bytes,
            )  # fmt: skip
            self._raise_damaged(part.blocks, num_good)
            self._submit(context, part, np.arange(part.blocks.size), True)
            writing.append(part)

        with io_context() as context:
            overlap(self._parts(context, request.blocks.size), begin, finish)
            for part in writing:
                self._wait(context, part, "written")

    def load(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Read blocks that have positions, one behind the other, from byte `begin` of the buffer on; check them.

        Raises:
            StorageError: as `read`.
        """
        part = _RequestPart.contiguous(blocks, self.page_table.find(blocks), begin)
        self._submit(context, part, part.slots, False)
        self._wait(context, part, "read")
        num_good = cpu_kernels("pages").check(context.buffer.address + begin, blocks, self.layout.pages_per_block)
        self._raise_damaged(blocks, num_good)

    def store(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Write sealed blocks, ascending, that stand one behind the other from byte `begin` of the buffer on.

        Raises:
            StorageError: as `write`.
        """
        part = _RequestPart.contiguous(blocks, self.allocate(blocks).positions, begin)
        self._submit(context, part, part.slots, True)
        self._wait(context, part, "written")

    def _scan(self, context: IoContext) -> None:
        layout, step = self.layout, self.layout.block_bytes
        where = f"table {self.table!r}, file {self.file.path}: "
        advice = "check the disk, then restore the table from a snapshot"

        def begin(part: _RequestPart) -> None:
            starts = np.arange(part.which.start, part.which.stop, max(1, SCAN_BYTES // step))
            sizes = np.diff(starts, append=part.which.stop) * step
            extents = Extents(part.begin + (starts - part.which.start) * step, sizes, layout.offsets(starts))
            part.transfer = context.submit(self.file, extents, False)

        def finish(part: _RequestPart) -> None:
            first = part.which.start
            try:
                context.wait(part.transfer)
            except ExtentError as error:
                raise StorageError(
                    f"{where}the part behind byte {layout.file_bytes(first):,} could not be read: {error.reason}; "
                    "check the disk and the system's log, then restore the table from a snapshot"
                ) from error.reason
            kernels, blocks = cpu_kernels("pages"), np.empty(part.which.stop - first, dtype=np.int64)
            address = context.buffer.address + part.begin
            num_good = kernels.identify(address, blocks, layout.pages_per_block, layout.num_blocks)
            if num_good < blocks.size:
                raise StorageError(
                    f"{where}the part at byte {layout.file_bytes(first + num_good):,} is damaged: its checksum is not "
                    f"that of its content; {advice}"
                )
            written = np.flatnonzero(blocks != kernels.NEVER_WRITTEN)
            found, counts = np.unique(blocks[written], return_counts=True)
            twice = found[(counts > 1) | (self.page_table.find(found) >= 0)]
            if twice.size:
                rows = layout.describe_rows(int(twice[0]), int(twice[0]))
                raise StorageError(f"{where}it is damaged: the part with {rows} is there twice; {advice}")
            self.page_table.insert(blocks[written], first + written)

        overlap(self._parts(context, (self._size - layout.file_bytes(0)) // step), begin, finish)

    def _parts(self, context: IoContext, num_blocks: int) -> Iterator[_RequestPart]:
        """Blocks cut into parts, which in turns have a half of the buffer."""
        half = max(BUFFER_BYTES, self.layout.block_bytes)
        context.reserve(half)
        size = half // self.layout.block_bytes
        for number, first in enumerate(range(0, num_blocks, size)):
            yield _RequestPart(slice(first, min(first + size, num_blocks)), number % 2 * half)

    def _submit(self, context: IoContext, part: _RequestPart, which: np.ndarray, write: bool) -> None:
        """Move some of a part's blocks, int64, to or from their slots; neighbours are one extent."""
        step, order = self.layout.block_bytes, which[np.argsort(part.positions[which])]
        positions, slots = part.positions[order], part.slots[order]
        firsts, lasts = runs(positions, slots)
        part.order, part.firsts, part.lasts = order, firsts, lasts
        addresses, sizes = part.begin + slots[firsts] * step, (lasts - firsts) * step
        extents = Extents(addresses, sizes, self.layout.offsets(positions[firsts]))
        part.transfer = context.submit(self.file, extents, write, self._threads)

    def _wait(self, context: IoContext, part: _RequestPart, what: str) -> None:
        try:
            context.wait(part.transfer)
        except ExtentError as error:
            code = getattr(error.reason, "errno", None)
            if isinstance(error.reason, EOFError):
                advice = "somebody has cut the file short; restore it from a snapshot"
            elif code in (errno.ENOSPC, errno.EDQUOT):
                advice = "make room there, then restore the table from a snapshot"
            else:
                advice = "check the disk and the system's log, then restore the table from a snapshot"
            moved = part.order[part.firsts[error.extent] : part.lasts[error.extent]]
            where = self._describe(part.blocks[moved])
            raise StorageError(f"{where} could not be {what}: {error.reason}; {advice}") from error.reason

    def _raise_damaged(self, blocks: np.ndarray, num_good: int) -> None:
        """Raise for the first damaged one of some blocks, before which `num_good` are good."""
        if num_good < blocks.size:
            raise StorageError(
                f"{self._describe(blocks[num_good : num_good + 1])} is damaged: its checksum is not that of its "
                "content; check the disk, then restore the table from a snapshot"
            )

    def _describe(self, blocks: np.ndarray) -> str:
        """In words: blocks that stand side by side."""
        begin = int(self.layout.offsets(self.page_table.find(blocks[:1]))[0])
        first, last = int(blocks.min()), int(blocks.max())
        rows = self.layout.describe_rows(first, last)
        if last - first >= blocks.size:
            rows = f"{blocks.size} blocks of {self.layout.rows_per_block} rows among {rows}"
        return f"table {self.table!r}, file {self.file.path}: the part with {rows}, at byte {begin:,},"
