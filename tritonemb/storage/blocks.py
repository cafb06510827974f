"""The blocks of a table's file, many on their way at once, each checked when read and sealed when written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tritonemb.storage.aio import Pieces
from tritonemb.storage.file import PageFile
from tritonemb.storage.lanes import HALF_BYTES, Lane, Moving, PieceError, borrow
from tritonemb.storage.layout import PAGE_BYTES, Layout, Request, runs
from tritonemb.storage.store import StorageError
from tritonemb.storage.threads import IoThreads

BUFFER_BYTES = HALF_BYTES  # that a part of a request must fit


@dataclass
class Part:
    """A part of a request.

    Args:
        blocks: its blocks.
        places: where these are in the request.
        rows: where their rows are.
        begin: in bytes, where the blocks are in the buffer.
        moving: what is being done to them.
    """

    blocks: np.ndarray
    places: slice
    rows: slice
    begin: int
    moving: Moving | None = None


class Blocks:
    """A file's blocks.

    Args:
        table: its name, for messages.
        file: opened.
        layout: of the file.
        threads: see `Lane.begin`.
    """

    def __init__(self, table: str, file: PageFile, layout: Layout, threads: IoThreads | None = None) -> None:
        self.table, self.file, self.layout, self._threads = table, file, layout, threads

    def read(self, rows: np.ndarray, records: int) -> np.ndarray:
        """Copy the records of rows that were ever written to where they belong.

        Args:
            rows: int64 `[n]`, ascending.
            records: the address of `n` records.

        Returns:
            uint8 `[n]`: whether a row was ever written.

        Raises:
            StorageError: naming table, file, rows and place.
        """
        from tritonemb.kernels.cpu.pages import copy_out  # its compiler is loaded when first used

        layout, written = self.layout, np.empty(rows.size, dtype=np.uint8)

        def finish(part: Part) -> None:
            self._end(lane, part.moving, part.blocks, "read")
            damaged = copy_out(
                lane.buffer.address + part.begin, part.blocks, rows[part.rows], layout.rows_per_block,
                layout.pages_per_block, layout.record_bytes, records + part.rows.start * layout.record_bytes,
                written[part.rows],
            )  # fmt: skip
            if damaged < part.blocks.size:
                raise self._damage(int(part.blocks[damaged]))

        with borrow() as lane:
            before: Part | None = None
            for part in self._parts(lane, layout.request(rows)):  # the disk reads one while another is copied from
                part.moving = self._begin(lane, part.blocks, np.arange(part.blocks.size), part.begin, False)
                if before is not None:
                    finish(before)
                before = part
            if before is not None:
                finish(before)
        return written

    def write(self, rows: np.ndarray, request: Request, records: int) -> None:
        """Write records into their blocks. A block whose rows are not all written is read and checked first.

        Args:
            request: that of the rows.
            rows, records: as of `read`.

        Raises:
            StorageError: as `read`; some of the blocks may have been written then.
        """
        from tritonemb.kernels.cpu.pages import copy_in

        layout, whole = self.layout, self.layout.whole(request)

        def finish(part: Part) -> None:
            self._end(lane, part.moving, part.blocks[~whole[part.places]], "read")
            damaged = copy_in(
                lane.buffer.address + part.begin, part.blocks, whole[part.places], rows[part.rows],
                layout.rows_per_block, layout.pages_per_block, layout.record_bytes,
                records + part.rows.start * layout.record_bytes,
            )  # fmt: skip
            if damaged < part.blocks.size:
                raise self._damage(int(part.blocks[damaged]))
            part.moving = self._begin(lane, part.blocks, np.arange(part.blocks.size), part.begin, True)

        with borrow() as lane:
            earlier: Part | None = None  # which is being written
            before: Part | None = None  # which is being read
            for part in self._parts(lane, request):
                if earlier is not None:
                    self._end(lane, earlier.moving, earlier.blocks, "written")  # its half of the buffer is this one's
                part.moving = self._begin(
                    lane, part.blocks, np.flatnonzero(~whole[part.places]), part.begin, False
                )  # fmt: skip
                if before is not None:
                    finish(before)
                earlier, before = before, part
            if before is not None:
                finish(before)
            for last in (earlier, before):
                if last is not None:
                    self._end(lane, last.moving, last.blocks, "written")

    def load(self, lane: Lane, blocks: np.ndarray, begin: int = 0) -> None:
        """Read blocks, ascending, to one behind the other from byte `begin` of the lane's buffer on, and check them.

        Raises:
            StorageError: as `read`.
        """
        from tritonemb.kernels.cpu.pages import check

        self._end(lane, self._begin(lane, blocks, np.arange(blocks.size), begin, False), blocks, "read")
        damaged = check(lane.buffer.address + begin, self.layout.first_pages(blocks), self.layout.pages_per_block)
        if damaged < blocks.size:
            raise self._damage(int(blocks[damaged]))

    def put(self, lane: Lane, blocks: np.ndarray, begin: int = 0) -> None:
        """Write blocks that are sealed and stand one behind the other from byte `begin` of the lane's buffer on.

        Raises:
            StorageError: as `write`.
        """
        self._end(lane, self._begin(lane, blocks, np.arange(blocks.size), begin, True), blocks, "written")

    def _parts(self, lane: Lane, request: Request) -> Iterator[Part]:
        """A request cut into parts, which in turns have a half of the lane's buffer."""
        half = max(BUFFER_BYTES, self.layout.block_bytes)
        lane.make_room(half)
        size = half // self.layout.block_bytes
        for number, first in enumerate(range(0, request.blocks.size, size)):
            places = slice(first, min(first + size, request.blocks.size))
            rows = slice(int(request.starts[places.start]), int(request.starts[places.stop]))
            yield Part(request.blocks[places], places, rows, number % 2 * half)

    def _begin(self, lane: Lane, blocks: np.ndarray, places: np.ndarray, begin: int, write: bool) -> Moving:
        """Move the blocks of some places, int64, ascending, to or from where these stand if all stand one behind the
        other from byte `begin` of the buffer on.
        """
        step, wanted = self.layout.block_bytes, blocks[places]
        firsts, lasts = runs(wanted)  # such blocks are neighbours in the buffer, too
        offsets = self.layout.offsets(wanted[firsts])
        pieces = Pieces(begin + places[firsts] * step, (lasts - firsts) * step, offsets)
        return lane.begin(self.file, pieces, write, self._threads)

    def _end(self, lane: Lane, moving: Moving | None, blocks: np.ndarray, what: str) -> None:
        assert moving is not None
        try:
            lane.end(moving)
        except PieceError as error:
            firsts, lasts = runs(blocks)
            first, last = int(blocks[firsts[error.piece]]), int(blocks[lasts[error.piece] - 1])
            raise self._failure(what, first, last, error.reason) from error.reason

    def _failure(self, what: str, first: int, last: int, error: Exception) -> StorageError:
        code = getattr(error, "errno", None)
        if isinstance(error, EOFError):
            advice = "somebody has cut the file short; restore it from a snapshot"
        elif code in (errno.ENOSPC, errno.EDQUOT):
            advice = "make room there, then restore the table from a snapshot"
        else:
            advice = "check the disk and the system's log, then restore the table from a snapshot"
        return StorageError(f"{self._place(first, last)} could not be {what}: {error}; {advice}")

    def _damage(self, block: int) -> StorageError:
        return StorageError(
            f"{self._place(block, block)} is damaged: its checksum is not that of its content; check the disk, then "
            "restore the table from a snapshot"
        )

    def _place(self, first: int, last: int) -> str:
        begin = PAGE_BYTES + first * self.layout.block_bytes
        rows = self.layout.rows_of(first, last)
        return f"table {self.table!r}, file {self.file.path}: the part with {rows}, at byte {begin:,},"
