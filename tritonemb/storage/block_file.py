"""The blocks of a table's file, many on their way at once, each checked when read and sealed when written."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tritonemb.storage.aio import Pieces
from tritonemb.storage.format import Layout, Request, runs
from tritonemb.storage.io import HALF_BYTES, Lane, Moving, PageFile, PieceError, borrow, overlap
from tritonemb.storage.page_table import MOST_PLACES, Places
from tritonemb.storage.store import StorageError
from tritonemb.storage.threads import IoThreads

BUFFER_BYTES = HALF_BYTES  # that a part of a request must fit
MOST_GROWTH = 1 << 30  # bytes by which a file grows at once


class Placed(NamedTuple):
    """Where blocks stand.

    Args:
        places: int64 `[b]`.
        new: bool `[b]`: whether nothing was written there yet.
    """

    places: np.ndarray
    new: np.ndarray


class Blocks:
    """A file's blocks.

    Args:
        table: its name, for messages.
        file: opened.
        layout: of the file.
        places: where the blocks stand, see `scan`.
        threads: see `Lane.begin`.
    """

    def __init__(
        self, table: str, file: PageFile, layout: Layout, places: Places, threads: IoThreads | None = None
    ) -> None:  # fmt: skip
        self.table, self.file, self.layout, self.places, self._threads = table, file, layout, places, threads
        self._size = file.size()

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
        request = layout.request(rows)
        places = self.places.find(request.blocks)

        def begin(part: _Part) -> None:
            part.sort(request.blocks, places)
            self._begin(lane, part, np.flatnonzero(part.places >= 0), False)

        def finish(part: _Part) -> None:
            self._end(lane, part, "read")
            some = slice(int(request.starts[part.which.start]), int(request.starts[part.which.stop]))
            damaged = copy_out(
                lane.buffer.address + part.begin, part.blocks, part.slots, rows[some], layout.rows_per_block,
                layout.pages_per_block, layout.record_bytes, records + some.start * layout.record_bytes, written[some],
            )  # fmt: skip
            if damaged < part.blocks.size:
                raise self._damage(part.blocks[damaged : damaged + 1])

        with borrow() as lane:
            overlap(self._parts(lane, request.blocks.size), begin, finish)
        return written

    def place(self, blocks: np.ndarray) -> Placed:
        """Have a place for each of some blocks, int64 `[b]`, ascending.

        Raises:
            StorageError: the file cannot become so large.
        """
        new = self.places.find(blocks) < 0
        if self.places.count + np.count_nonzero(new) > MOST_PLACES:
            raise StorageError(
                f"table {self.table!r}, file {self.file.path}: a file has at most {MOST_PLACES:,} blocks of "
                f"{self.layout.block_bytes:,} bytes; cut the table into smaller parts"
            )
        places = self.places.add(blocks)
        needed, step = self.layout.file_bytes(self.places.count), self.layout.block_bytes
        if needed > self._size:  # ahead of what is written, which would wait for the file to grow each time
            ahead = min(needed // 4, MOST_GROWTH) // step * step
            self.file.resize(needed + ahead)
            self._size = needed + ahead
        return Placed(places, new)

    def write(self, rows: np.ndarray, request: Request, placed: Placed, records: int) -> None:
        """Write records into their blocks. A block whose rows are not all written is read and checked first.

        Args:
            request: that of the rows.
            placed: its blocks' places.
            rows, records: as of `read`.

        Raises:
            StorageError: as `read`; some of the blocks may have been written then.
        """
        from tritonemb.kernels.cpu.pages import copy_in

        layout = self.layout
        clear = placed.new | layout.whole(request)
        writing: deque[_Part] = deque()

        def begin(part: _Part) -> None:
            if writing:
                self._end(lane, writing.popleft(), "written")  # its half of the buffer is this one's
            part.sort(request.blocks, placed.places)
            self._begin(lane, part, np.flatnonzero(~clear[part.which]), False)

        def finish(part: _Part) -> None:
            self._end(lane, part, "read")
            some = slice(int(request.starts[part.which.start]), int(request.starts[part.which.stop]))
            damaged = copy_in(
                lane.buffer.address + part.begin, part.blocks, part.slots, clear[part.which], rows[some],
                layout.rows_per_block, layout.pages_per_block, layout.record_bytes,
                records + some.start * layout.record_bytes,
            )  # fmt: skip
            if damaged < part.blocks.size:
                raise self._damage(part.blocks[damaged : damaged + 1])
            self._begin(lane, part, np.arange(part.blocks.size), True)
            writing.append(part)

        with borrow() as lane:
            overlap(self._parts(lane, request.blocks.size), begin, finish)
            for part in writing:
                self._end(lane, part, "written")

    def load(self, lane: Lane, blocks: np.ndarray, begin: int = 0) -> None:
        """Read blocks, which have places, to one behind the other from byte `begin` of the lane's buffer on, and check
        them.

        Raises:
            StorageError: as `read`.
        """
        from tritonemb.kernels.cpu.pages import check

        part = _Part(slice(0, blocks.size), begin, blocks, self.places.find(blocks), np.arange(blocks.size))
        self._begin(lane, part, part.slots, False)
        self._end(lane, part, "read")
        damaged = check(lane.buffer.address + begin, blocks, self.layout.pages_per_block)
        if damaged < blocks.size:
            raise self._damage(blocks[damaged : damaged + 1])

    def put(self, lane: Lane, blocks: np.ndarray, begin: int = 0) -> None:
        """Write blocks, ascending, that are sealed and stand one behind the other from byte `begin` of the lane's
        buffer on.

        Raises:
            StorageError: as `write`.
        """
        part = _Part(slice(0, blocks.size), begin, blocks, self.place(blocks).places, np.arange(blocks.size))
        self._begin(lane, part, part.slots, True)
        self._end(lane, part, "written")

    def _parts(self, lane: Lane, num_blocks: int) -> Iterator[_Part]:
        """Blocks cut into parts, which in turns have a half of the lane's buffer."""
        half = max(BUFFER_BYTES, self.layout.block_bytes)
        lane.make_room(half)
        size = half // self.layout.block_bytes
        for number, first in enumerate(range(0, num_blocks, size)):
            yield _Part(slice(first, min(first + size, num_blocks)), number % 2 * half)

    def _begin(self, lane: Lane, part: _Part, which: np.ndarray, write: bool) -> None:
        """Move some of a part's blocks, int64, to or from their slots; neighbours are moved in one piece."""
        step, order = self.layout.block_bytes, which[np.argsort(part.places[which])]
        places, slots = part.places[order], part.slots[order]
        firsts, lasts = runs(places, slots)
        part.order, part.firsts, part.lasts = order, firsts, lasts
        pieces = Pieces(part.begin + slots[firsts] * step, (lasts - firsts) * step, self.layout.offsets(places[firsts]))
        part.moving = lane.begin(self.file, pieces, write, self._threads)

    def _end(self, lane: Lane, part: _Part, what: str) -> None:
        assert part.moving is not None
        try:
            lane.end(part.moving)
        except PieceError as error:
            code = getattr(error.reason, "errno", None)
            if isinstance(error.reason, EOFError):
                advice = "somebody has cut the file short; restore it from a snapshot"
            elif code in (errno.ENOSPC, errno.EDQUOT):
                advice = "make room there, then restore the table from a snapshot"
            else:
                advice = "check the disk and the system's log, then restore the table from a snapshot"
            moved = part.order[part.firsts[error.piece] : part.lasts[error.piece]]
            where = self._where(part.blocks[moved])
            raise StorageError(f"{where} could not be {what}: {error.reason}; {advice}") from error.reason

    def _damage(self, block: np.ndarray) -> StorageError:
        return StorageError(
            f"{self._where(block)} is damaged: its checksum is not that of its content; check the disk, then "
            "restore the table from a snapshot"
        )

    def _where(self, blocks: np.ndarray) -> str:
        """In words: blocks that stand side by side."""
        begin = int(self.layout.offsets(self.places.find(blocks[:1]))[0])
        first, last = int(blocks.min()), int(blocks.max())
        if last - first >= blocks.size:
            rows = f"{blocks.size} blocks of {self.layout.rows_per_block} rows among {self.layout.rows_of(first, last)}"
        else:
            rows = self.layout.rows_of(first, last)
        return f"table {self.table!r}, file {self.file.path}: the part with {rows}, at byte {begin:,},"


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass
class _Part:
    """A part of a request.

    Args:
        which: of the request's blocks.
        begin: in bytes, where it is in the buffer.
        blocks, places: int64 `[b]`: its blocks, and where they are in the file, -1 for nowhere.
        slots: int64 `[b]`: where they are in the buffer, in blocks from `begin` on, -1 for nowhere.
        moving: what is being moved: in pieces of those of its blocks that `order` has from `firsts` to `lasts`.
    """

    which: slice
    begin: int
    blocks: np.ndarray = field(default_factory=_none)
    places: np.ndarray = field(default_factory=_none)
    slots: np.ndarray = field(default_factory=_none)
    order: np.ndarray = field(default_factory=_none)
    firsts: np.ndarray = field(default_factory=_none)
    lasts: np.ndarray = field(default_factory=_none)
    moving: Moving | None = None

    def sort(self, blocks: np.ndarray, places: np.ndarray) -> None:
        """Give its blocks, of a request's, slots in the order of their places."""
        self.blocks, self.places = blocks[self.which], places[self.which]
        order = np.argsort(self.places)
        order = order[np.searchsorted(self.places[order], 0) :]
        self.slots = np.full(self.blocks.size, -1)
        self.slots[order] = np.arange(order.size)
