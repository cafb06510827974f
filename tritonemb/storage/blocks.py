"""The blocks of a table's file, read and written by many threads, each checked when read and sealed when written."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np

from tritonemb.storage.file import HUGE_PAGE, Buffer, PageFile, buffer_of
from tritonemb.storage.layout import PAGE_BYTES, Layout, Request, runs
from tritonemb.storage.store import StorageError
from tritonemb.storage.threads import IoThreads

BUFFER_BYTES = HUGE_PAGE  # of one thread, which the blocks of a task must fit


class Blocks:
    """A file's blocks.

    Args:
        table: its name, for messages.
        file: opened.
        layout: of the file.
    """

    def __init__(self, table: str, file: PageFile, layout: Layout) -> None:
        self.table, self.file, self.layout = table, file, layout

    def read(self, threads: IoThreads, rows: np.ndarray, records: int) -> np.ndarray:
        """Copy the records of rows that were ever written to where they belong.

        Args:
            threads: to read in.
            rows: int64 `[n]`, ascending.
            records: the address of `n` records.

        Returns:
            uint8 `[n]`: whether a row was ever written.

        Raises:
            StorageError: naming table, file, rows and place.
        """
        from tritonemb.kernels.cpu.pages import copy_out  # its compiler is loaded when first used

        request, layout = self.layout.request(rows), self.layout
        written = np.empty(rows.size, dtype=np.uint8)

        def work(task: int) -> None:
            blocks, begin, end = _part(request, size, task)
            buffer = buffer_of(blocks.size * layout.block_bytes)
            self._fetch(blocks, np.arange(blocks.size), buffer, 0)
            damaged = copy_out(
                buffer.address, blocks, rows[begin:end], layout.rows_per_block, layout.pages_per_block,
                layout.record_bytes, records + begin * layout.record_bytes, written[begin:end],
            )  # fmt: skip
            if damaged < blocks.size:
                raise self._damage(int(blocks[damaged]))

        size = self._task_size(request.blocks.size, threads)
        threads.run(work, -(-request.blocks.size // size))
        return written

    def write(self, threads: IoThreads, rows: np.ndarray, request: Request, records: int) -> None:
        """Write records into their blocks. A block whose rows are not all written is read and checked first.

        Args:
            request: that of the rows.
            rows, records: as of `read`.

        Raises:
            StorageError: as `read`; some of the blocks may have been written then.
        """
        from tritonemb.kernels.cpu.pages import copy_in

        layout, whole = self.layout, self.layout.whole(request)

        def work(task: int) -> None:
            blocks, begin, end = _part(request, size, task)
            buffer = buffer_of(blocks.size * layout.block_bytes)
            is_whole = whole[task * size : (task + 1) * size]
            self._fetch(blocks, np.flatnonzero(~is_whole), buffer, 0)
            damaged = copy_in(
                buffer.address, blocks, is_whole, rows[begin:end], layout.rows_per_block, layout.pages_per_block,
                layout.record_bytes, records + begin * layout.record_bytes,
            )  # fmt: skip
            if damaged < blocks.size:
                raise self._damage(int(blocks[damaged]))
            self.put(blocks, buffer, 0)

        size = self._task_size(request.blocks.size, threads)
        threads.run(work, -(-request.blocks.size // size))

    def load(self, blocks: np.ndarray, buffer: Buffer, begin: int = 0) -> None:
        """Read blocks, ascending, to one behind the other from byte `begin` of the buffer on, and check them.

        Raises:
            StorageError: as `read`.
        """
        from tritonemb.kernels.cpu.pages import check

        self._fetch(blocks, np.arange(blocks.size), buffer, begin)
        damaged = check(buffer.address + begin, self.layout.first_pages(blocks), self.layout.pages_per_block)
        if damaged < blocks.size:
            raise self._damage(int(blocks[damaged]))

    def put(self, blocks: np.ndarray, buffer: Buffer, begin: int) -> None:
        """Write blocks that are sealed and stand one behind the other from byte `begin` of the buffer on.

        Raises:
            StorageError: as `write`.
        """
        step = self.layout.block_bytes
        firsts, lasts = runs(blocks)
        starts, stops = (begin + firsts * step).tolist(), (begin + lasts * step).tolist()
        for start, stop, offset in zip(starts, stops, self.layout.offsets(blocks[firsts]), strict=True):
            try:
                self.file.write(buffer.view[start:stop], offset)
            except OSError as error:
                raise self._failure("written", offset, stop - start, error) from error

    def _fetch(self, blocks: np.ndarray, places: np.ndarray, buffer: Buffer, begin: int) -> None:
        """Read the blocks of some places, int64, ascending, to where these stand if all stand one behind the other."""
        step, wanted = self.layout.block_bytes, blocks[places]
        firsts, lasts = runs(wanted)  # such blocks are neighbours in the buffer, too
        starts = begin + places[firsts] * step
        stops, offsets = (starts + (lasts - firsts) * step).tolist(), self.layout.offsets(wanted[firsts])
        for start, stop, offset in zip(starts.tolist(), stops, offsets, strict=True):
            try:
                self.file.read(buffer.view[start:stop], offset)
            except (OSError, EOFError) as error:
                raise self._failure("read", offset, stop - start, error) from error

    def _task_size(self, num_blocks: int, threads: IoThreads) -> int:
        """Blocks of a task: as many as fit the buffer, as to hand one out takes time, but as many for each thread."""
        room = max(1, BUFFER_BYTES // self.layout.block_bytes)
        rounds = max(1, -(-num_blocks // (threads.num_threads * room)))
        return max(1, -(-num_blocks // (threads.num_threads * rounds)))

    def _failure(self, what: str, offset: int, size: int, error: Exception) -> StorageError:
        code = getattr(error, "errno", None)
        if isinstance(error, EOFError):
            advice = "somebody has cut the file short; restore it from a snapshot"
        elif code in (errno.ENOSPC, errno.EDQUOT):
            advice = "make room there, then restore the table from a snapshot"
        else:
            advice = "check the disk and the system's log, then restore the table from a snapshot"
        first, count = (offset - PAGE_BYTES) // self.layout.block_bytes, size // self.layout.block_bytes
        return StorageError(f"{self._place(first, first + count - 1)} could not be {what}: {error}; {advice}")

    def _damage(self, block: int) -> StorageError:
        return StorageError(
            f"{self._place(block, block)} is damaged: its checksum is not that of its content; check the disk, then "
            "restore the table from a snapshot"
        )

    def _place(self, first: int, last: int) -> str:
        begin = PAGE_BYTES + first * self.layout.block_bytes
        rows = self.layout.rows_of(first, last)
        return f"table {self.table!r}, file {self.file.path}: the part with {rows}, at byte {begin:,},"


def _part(request: Request, size: int, task: int) -> tuple[np.ndarray, Any, Any]:
    """The blocks of a task, and bounds of their rows."""
    begin, end = task * size, min((task + 1) * size, request.blocks.size)
    return request.blocks[begin:end], request.starts[begin], request.starts[end]
