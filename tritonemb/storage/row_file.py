"""The file of a table on disk: many blocks are read or written at once, checked when read and sealed when written."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tritonemb.storage.aio import HALF_BYTES, ExtentError, Extents, IoContext, io_context, overlap
from tritonemb.storage.io import PageFile, write_page
from tritonemb.storage.page_table import (
    MAX_POSITIONS,
    ROWS,
    ChangedBlocks,
    FileLayout,
    PageTable,
    TableIdentity,
    check_identity,
    open_file,
    runs,
)
from tritonemb.storage.store import Initializer, StorageError, advice, cpu_kernels, fill_unwritten

BUFFER_BYTES = HALF_BYTES  # that a part of a request must fit
MAX_GROWTH = 1 << 30  # bytes by which a file grows at once
SCAN_BYTES = 1 << 18  # that a recovery scan reads at once
_RESTORE = "check the disk, then restore the table from a snapshot"
_LOG = "check the disk and the system's log"


class _RequestPart:
    """A part of a request that fits a half of the I/O buffer."""

    blocks: np.ndarray  # int64 `[b]`
    positions: np.ndarray  # int64 `[b]`: where they are in the file, -1 for nowhere
    slots: np.ndarray  # int64 `[b]`: where they are in the buffer, in blocks from `begin` on, -1 for nowhere
    wait: Callable[[], None]  # for what was submitted of it; raises a StorageError

    def __init__(self, which: slice, begin: int) -> None:
        self.which, self.begin = which, begin  # of the request's blocks; in bytes, where it is in the buffer

    def sort(self, blocks: np.ndarray, positions: np.ndarray) -> None:
        """Give its blocks, of a request's, slots in the order of their positions."""
        self.blocks, self.positions = blocks[self.which], positions[self.which]
        order = np.argsort(self.positions)
        order = order[np.searchsorted(self.positions[order], 0) :]
        self.slots = np.full(self.blocks.size, -1)
        self.slots[order] = np.arange(order.size)


class BlockFile:
    """A file's blocks. Opening it scans the whole file, to recover where each block stands and to check them all."""

    def __init__(self, table: str, file: PageFile, layout: FileLayout) -> None:
        self.table, self.file, self.layout = table, file, layout
        self.page_table, self._changed = PageTable(layout.num_blocks), ChangedBlocks(layout.num_blocks)
        self._size, self._lock = file.size(), threading.Lock()
        with io_context() as context:
            self._scan(context)

    def read(self, rows: np.ndarray, records: int) -> np.ndarray:
        """Copy the records of rows, int64 `[n]`, ascending, out of the file to the address of `n` records.

        Those that were never written are left alone. Returns uint8 `[n]`: whether a row was ever written.
        """
        layout, written = self.layout, np.empty(rows.size, dtype=np.uint8)
        blocks, starts = layout.request(rows)
        positions = self.page_table.find(blocks)

        def begin(part: _RequestPart) -> None:
            part.sort(blocks, positions)
            self._submit(context, part, np.flatnonzero(part.positions >= 0), False)

        def finish(part: _RequestPart) -> None:
            part.wait()
            some = slice(int(starts[part.which.start]), int(starts[part.which.stop]))
            num_good = cpu_kernels("pages").copy_out(
                context.buffer.address + part.begin, part.blocks, part.slots, rows[some], layout.rows_per_block,
                layout.pages_per_block, layout.record_bytes, records + some.start * layout.record_bytes, written[some],
            )  # fmt: skip
            self._raise_damaged(part.blocks, num_good)

        with io_context() as context:
            overlap(self._parts(context, blocks.size), begin, finish)
        return written

    def write(self, rows: np.ndarray, records: int) -> None:
        """Write records into their blocks. A block whose rows are not all written is read and checked first.

        After a StorageError some blocks may have been written.
        """
        layout, (blocks, starts) = self.layout, self.layout.request(rows)
        positions, new = self._allocate(blocks)
        clear = new | layout.is_whole(blocks, starts)
        writing: deque[_RequestPart] = deque()

        def begin(part: _RequestPart) -> None:
            if writing:
                writing.popleft().wait()  # its half of the buffer is reused
            part.sort(blocks, positions)
            self._submit(context, part, np.flatnonzero(~clear[part.which]), False)

        def finish(part: _RequestPart) -> None:
            part.wait()
            some = slice(int(starts[part.which.start]), int(starts[part.which.stop]))
            num_good = cpu_kernels("pages").copy_in(
                context.buffer.address + part.begin, part.blocks, part.slots, clear[part.which], rows[some],
                layout.rows_per_block, layout.pages_per_block, layout.record_bytes,
                records + some.start * layout.record_bytes,
            )  # fmt: skip
            self._raise_damaged(part.blocks, num_good)
            self._submit(context, part, np.arange(part.blocks.size), True)
            writing.append(part)

        with io_context() as context:
            overlap(self._parts(context, blocks.size), begin, finish)
            for part in writing:
                part.wait()

    def load(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Read blocks that have positions, one behind the other, from byte `begin` of the buffer on; check them."""
        self._move(context, blocks, self.page_table.find(blocks), begin, False)
        num_good = cpu_kernels("pages").check(context.buffer.address + begin, blocks, self.layout.pages_per_block)
        self._raise_damaged(blocks, num_good)

    def store(self, context: IoContext, blocks: np.ndarray, begin: int) -> None:
        """Write sealed blocks, ascending, that stand one behind the other from byte `begin` of the buffer on."""
        self._move(context, blocks, self._allocate(blocks)[0], begin, True)

    def changed(self) -> tuple[np.ndarray, np.ndarray]:
        """Blocks that were written since `forget_changes`, ascending, and their positions, int64; for any thread."""
        with self._lock:
            blocks = self._changed.blocks()
            return blocks, self.page_table.find(blocks)

    def forget_changes(self) -> None:
        """A snapshot has them."""
        with self._lock:
            self._changed.clear()

    def _allocate(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of blocks int64 `[b]`, ascending, that are about to change: their positions, and which were never written."""
        with self._lock:
            new = self.page_table.find(blocks) < 0
            if self.page_table.count + np.count_nonzero(new) > MAX_POSITIONS:
                raise StorageError(
                    f"table {self.table!r}, file {self.file.path}: a file has at most {MAX_POSITIONS:,} blocks of "
                    f"{self.layout.block_bytes:,} bytes; cut the table into smaller shards"
                )
            positions = self.page_table.allocate(blocks)
            needed, step = self.layout.offset(self.page_table.count), self.layout.block_bytes
            if needed > self._size:  # ahead of what is written, which would wait for the file to grow each time
                size = needed + min(needed // 4, MAX_GROWTH) // step * step
                self.file.resize(size)
                self._size = size
            self._changed.add(blocks)
        return positions, new

    def _scan(self, context: IoContext) -> None:
        layout, step = self.layout, self.layout.block_bytes
        where = f"table {self.table!r}, file {self.file.path}: "

        def begin(part: _RequestPart) -> None:
            starts = np.arange(part.which.start, part.which.stop, max(1, SCAN_BYTES // step))
            sizes = np.diff(starts, append=part.which.stop) * step
            extents = Extents(part.begin + (starts - part.which.start) * step, sizes, layout.offset(starts))
            transfer = context.submit(self.file, extents, False)
            part.wait = lambda: context.wait(transfer)

        def finish(part: _RequestPart) -> None:
            first = part.which.start
            try:
                part.wait()
            except ExtentError as error:
                raise StorageError(
                    f"{where}the part behind byte {layout.offset(first):,} could not be read: {error.reason}; "
                    f"{_LOG}, then restore the table from a snapshot"
                ) from error.reason
            kernels, blocks = cpu_kernels("pages"), np.empty(part.which.stop - first, dtype=np.int64)
            address = context.buffer.address + part.begin
            num_good = kernels.identify(address, blocks, layout.pages_per_block, layout.num_blocks)
            if num_good < blocks.size:
                raise StorageError(
                    f"{where}the part at byte {layout.offset(first + num_good):,} is damaged: its checksum is not "
                    f"that of its content; {_RESTORE}"
                )
            written = np.flatnonzero(blocks != kernels.NEVER_WRITTEN)
            found, counts = np.unique(blocks[written], return_counts=True)
            twice = found[(counts > 1) | (self.page_table.find(found) >= 0)]
            if twice.size:
                rows = layout.describe_rows(int(twice[0]), int(twice[0]))
                raise StorageError(f"{where}it is damaged: the part with {rows} is there twice; {_RESTORE}")
            self.page_table.insert(blocks[written], first + written)

        overlap(self._parts(context, (self._size - layout.offset(0)) // step), begin, finish)

    def _parts(self, context: IoContext, num_blocks: int) -> Iterator[_RequestPart]:
        """Blocks cut into parts, which in turns have a half of the buffer."""
        half = max(BUFFER_BYTES, self.layout.block_bytes)
        context.reserve(half)
        size = half // self.layout.block_bytes
        for number, first in enumerate(range(0, num_blocks, size)):
            yield _RequestPart(slice(first, min(first + size, num_blocks)), number % 2 * half)

    def _move(self, context: IoContext, blocks: np.ndarray, positions: np.ndarray, begin: int, write: bool) -> None:
        """Read or write blocks that stand one behind the other in the buffer, and wait for it."""
        part = _RequestPart(slice(0, blocks.size), begin)
        part.blocks, part.positions, part.slots = blocks, positions, np.arange(blocks.size)
        self._submit(context, part, part.slots, write)
        part.wait()

    def _submit(self, context: IoContext, part: _RequestPart, which: np.ndarray, write: bool) -> None:
        """Move some of a part's blocks, int64, to or from their slots; neighbours are one extent."""
        step, order = self.layout.block_bytes, which[np.argsort(part.positions[which])]
        positions, slots = part.positions[order], part.slots[order]
        firsts, lasts = runs(positions, slots)
        addresses, sizes = part.begin + slots[firsts] * step, (lasts - firsts) * step
        extents = Extents(addresses, sizes, self.layout.offset(positions[firsts]))
        transfer = context.submit(self.file, extents, write)

        def wait() -> None:
            try:
                context.wait(transfer)
            except ExtentError as error:
                moved = part.blocks[order[firsts[error.extent] : lasts[error.extent]]]
                raise self._io_error(moved, error.reason, write) from error.reason

        part.wait = wait

    def _io_error(self, blocks: np.ndarray, reason: OSError | EOFError, write: bool) -> StorageError:
        what, then = "written" if write else "read", f"{advice(reason, _LOG)}, then restore the table from a snapshot"
        if isinstance(reason, EOFError):
            then = "somebody has cut the file short; restore it from a snapshot"
        return StorageError(f"{self._describe(blocks)} could not be {what}: {reason}; {then}")

    def _raise_damaged(self, blocks: np.ndarray, num_good: int) -> None:
        """Raise for the first damaged one of some blocks, before which `num_good` are good."""
        if num_good < blocks.size:
            where = self._describe(blocks[num_good : num_good + 1])
            raise StorageError(f"{where} is damaged: its checksum is not that of its content; {_RESTORE}")

    def _describe(self, blocks: np.ndarray) -> str:
        """In words: blocks that stand side by side."""
        begin = int(self.layout.offset(self.page_table.find(blocks[:1])[0]))
        first, last = int(blocks.min()), int(blocks.max())
        rows = self.layout.describe_rows(first, last)
        if last - first >= blocks.size:
            rows = f"{blocks.size} blocks of {self.layout.rows_per_block} rows among {rows}"
        return f"table {self.table!r}, file {self.file.path}: the part with {rows}, at byte {begin:,},"


class RowFile:
    """The operations of a `DiskRows` on its file, which is opened, checked and locked, for one thread at a time.

    After a `failure` the file cannot be used. Changes are relative to the `last_snapshot`, if there is one.
    """

    def __init__(self, path: Path, identity: TableIdentity, initializer: Initializer) -> None:
        what = f"table {identity.table!r}: file {path}"
        self.file, header = open_file(what, path, ROWS, writable=True)
        try:
            check_identity(header, identity, path)
            if not self.file.lock():
                raise StorageError(f"{what} is open for another table or process; close it there first")
            self.blocks = BlockFile(identity.table, self.file, FileLayout.of(header))
        except BaseException as error:
            self.file.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(f"{what} cannot be opened: {error}") from error
            raise
        self.identity, self._initializer = identity, initializer
        self.last_snapshot, self._is_final = header["snapshot"], header["places"] is not None
        self.failure: StorageError | None = None

    def read(self, rows: Tensor, records: Tensor) -> None:
        """Fill `records` with the records of the rows."""
        written = self.blocks.read(rows.numpy(), records.data_ptr())
        fill_unwritten(written, rows, records, self._initializer)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write the records of the rows; an error is the table's failure."""
        if rows.numel() == 0:
            return
        with self.fail_on_error("a write has failed"):
            if self._is_final:
                self._write_header(None)
                self._is_final = False
            self.blocks.write(rows.numpy(), records.data_ptr())

    def sync(self) -> None:
        """Flush what was written to the disk."""
        # The system reports a failure once, and may have dropped what it could not write.
        with self.fail_on_error("what was written could not be brought to the disk"):
            self.file.sync()

    def finalize(self) -> None:
        """Flush the file, and then its header, which says how many blocks it has."""
        self.sync()
        if not self._is_final:
            count = self.blocks.page_table.count
            with self.fail_on_error("the end of the file could not be written"):
                self.file.resize(self.blocks.layout.offset(count))
                self._write_header(count)

    def changed_pages(self) -> Tensor:
        """int64, ascending: pages of the file written since the last snapshot; for any thread."""
        size = self.blocks.layout.pages_per_block
        pages = 1 + np.sort(self.blocks.changed()[1])[:, None] * size + np.arange(size)
        return torch.from_numpy(pages.reshape(-1))

    @contextmanager
    def fail_on_error(self, what: str) -> Iterator[None]:
        """An error in the block is the table's failure."""
        try:
            yield
        except StorageError as failure:
            self.failure = failure
            raise
        except BaseException as error:
            self.failure = StorageError(
                f"table {self.identity.table!r}, file {self.file.path}: {what}: {error}; {_RESTORE}"
            )
            raise self.failure from error

    def _write_header(self, num_blocks: int | None) -> None:
        with self.fail_on_error("the header could not be written"):
            write_page(self.file, self.identity.header(num_blocks=num_blocks))
            self.file.sync()
