"""What stands where in a file of blocks: found out, and checked, when it is opened."""

from __future__ import annotations

import numpy as np

from tritonemb.storage.aio import Pieces
from tritonemb.storage.file import PageFile
from tritonemb.storage.lanes import HALF_BYTES, Lane, Moving, PieceError, borrow
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
    places = Places(layout.num_blocks)
    total = (file.size() - layout.file_bytes(0)) // layout.block_bytes
    half = max(HALF_BYTES, layout.block_bytes)
    size = half // layout.block_bytes
    with borrow() as lane:
        lane.make_room(half)
        before: tuple[Moving, int, int, int] | None = None
        for number, first in enumerate(range(0, total, size)):
            stop, begin = min(first + size, total), number % 2 * half
            moving = _begin(lane, file, layout, first, stop, begin)
            if before is not None:
                _finish(lane, table, file, layout, places, *before)
            before = moving, first, stop, begin
        if before is not None:
            _finish(lane, table, file, layout, places, *before)
    return places


def _begin(lane: Lane, file: PageFile, layout: Layout, first: int, stop: int, begin: int) -> Moving:
    step = layout.block_bytes
    starts = np.arange(first, stop, max(1, PIECE_BYTES // step))
    sizes = np.diff(starts, append=stop) * step
    return lane.begin(file, Pieces(begin + (starts - first) * step, sizes, layout.offsets(starts)), False, None)


def _finish(
    lane: Lane, table: str, file: PageFile, layout: Layout, places: Places, moving: Moving, first: int, stop: int,
    begin: int,
) -> None:  # fmt: skip
    from tritonemb.kernels.cpu.pages import NEVER_WRITTEN, identify  # its compiler is loaded when first used

    where = f"table {table!r}, file {file.path}: "
    try:
        lane.end(moving)
    except PieceError as error:
        raise StorageError(
            f"{where}the part behind byte {layout.file_bytes(first):,} could not be read: {error.reason}; check the "
            "disk and the system's log, then restore the table from a snapshot"
        ) from error.reason
    numbers = np.empty(stop - first, dtype=np.int64)
    damaged = identify(lane.buffer.address + begin, numbers, layout.pages_per_block, layout.num_blocks)
    numbers = numbers[:damaged]
    there = np.flatnonzero(numbers != NEVER_WRITTEN)
    taken, counts = np.unique(numbers[there], return_counts=True)
    advice = "check the disk, then restore the table from a snapshot"
    if damaged < stop - first:
        at = f"the part at byte {layout.file_bytes(first + damaged):,} is damaged"
        raise StorageError(f"{where}{at}: its checksum is not that of its content; {advice}")
    twice = taken[(counts > 1) | (places.find(taken) >= 0)]
    if twice.size:
        rows = layout.rows_of(int(twice[0]), int(twice[0]))
        raise StorageError(f"{where}it is damaged: the part with {rows} is there twice; {advice}")
    places.put(numbers[there], first + there)
