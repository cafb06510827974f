"""What stands where in a file of blocks: found out, and checked, when it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tritonemb.storage.aio import Pieces
from tritonemb.storage.file import PageFile
from tritonemb.storage.lanes import HALF_BYTES, Lane, Moving, PieceError, borrow, overlap
from tritonemb.storage.layout import Layout
from tritonemb.storage.places import Places
from tritonemb.storage.store import StorageError

PIECE_BYTES = 1 << 18  # read at once


def scan(table: str, file: PageFile, layout: Layout) -> Places:
    """The places of a file's blocks, which is read whole.

    Args:
        table: its name, for messages.

    Raises:
        StorageError: a part cannot be read, is damaged, or is there twice.
    """
    with borrow() as lane:
        scanning = _Scan(table, file, layout, lane)
        overlap(scanning.parts(), scanning.begin, scanning.finish)
    return scanning.places


@dataclass
class _Part:
    """Blocks from place `first` to `stop`, from byte `begin` of the buffer on."""

    first: int
    stop: int
    begin: int
    moving: Moving | None = None


class _Scan:
    def __init__(self, table: str, file: PageFile, layout: Layout, lane: Lane) -> None:
        self._where = f"table {table!r}, file {file.path}: "
        self._file, self._layout, self._lane = file, layout, lane
        self.places = Places(layout.num_blocks)

    def parts(self) -> Iterator[_Part]:
        half = max(HALF_BYTES, self._layout.block_bytes)
        self._lane.make_room(half)
        total = (self._file.size() - self._layout.file_bytes(0)) // self._layout.block_bytes
        size = half // self._layout.block_bytes
        for number, first in enumerate(range(0, total, size)):
            yield _Part(first, min(first + size, total), number % 2 * half)

    def begin(self, part: _Part) -> None:
        step = self._layout.block_bytes
        starts = np.arange(part.first, part.stop, max(1, PIECE_BYTES // step))
        sizes = np.diff(starts, append=part.stop) * step
        pieces = Pieces(part.begin + (starts - part.first) * step, sizes, self._layout.offsets(starts))
        part.moving = self._lane.begin(self._file, pieces, False, None)

    def finish(self, part: _Part) -> None:
        from tritonemb.kernels.cpu.pages import NEVER_WRITTEN, identify  # its compiler is loaded when first used

        layout = self._layout
        assert part.moving is not None
        try:
            self._lane.end(part.moving)
        except PieceError as error:
            raise StorageError(
                f"{self._where}the part behind byte {layout.file_bytes(part.first):,} could not be read: "
                f"{error.reason}; check the disk and the system's log, then restore the table from a snapshot"
            ) from error.reason
        numbers = np.empty(part.stop - part.first, dtype=np.int64)
        address = self._lane.buffer.address + part.begin
        damaged = identify(address, numbers, layout.pages_per_block, layout.num_blocks)
        advice = "check the disk, then restore the table from a snapshot"
        if damaged < numbers.size:
            at = f"the part at byte {layout.file_bytes(part.first + damaged):,} is damaged"
            raise StorageError(f"{self._where}{at}: its checksum is not that of its content; {advice}")
        there = np.flatnonzero(numbers != NEVER_WRITTEN)
        taken, counts = np.unique(numbers[there], return_counts=True)
        twice = taken[(counts > 1) | (self.places.find(taken) >= 0)]
        if twice.size:
            rows = layout.rows_of(int(twice[0]), int(twice[0]))
            raise StorageError(f"{self._where}it is damaged: the part with {rows} is there twice; {advice}")
        self.places.put(numbers[there], part.first + there)
