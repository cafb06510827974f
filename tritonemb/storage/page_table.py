"""Where in its file each block of a table stands: in the order in which they were first written.

What stands where in a file of blocks: found out, and checked, when it is opened.

Which blocks of a table have been written since its last snapshot.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tritonemb.storage.aio import Pieces
from tritonemb.storage.format import Layout
from tritonemb.storage.io import HALF_BYTES, Lane, Moving, PageFile, PieceError, borrow, overlap, reserve
from tritonemb.storage.store import StorageError

LEAF = 32  # neighbouring blocks, whose places stand side by side
_BITS = LEAF.bit_length() - 1
_FEWEST_LEAVES = 256
_CHUNK = 1 << 16  # leaves looked through at once
MOST_PLACES = (1 << 32) - 2


class Places:
    """A map of blocks to places, in two levels.

    A file in this order grows at its end alone, whatever rows come: it has no holes, however large the table is, and
    what was first written together stands together. Memory is 4 bytes for a block and as many for each `LEAF` blocks of
    the table's of which one was ever written; where single blocks are far apart it is 4 `LEAF` bytes for each.

    Attributes:
        count: places that are taken: 0 to `count` - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.count = num_blocks, 0
        self._leaf_of = _zeros(-(-num_blocks // LEAF))  # by block // LEAF; 0: none of them has a place
        self._leaves = _zeros(_FEWEST_LEAVES * LEAF).reshape(-1, LEAF)  # place + 1, 0: none; the first one stays empty
        self._num_leaves = 1

    def find(self, blocks: np.ndarray) -> np.ndarray:
        """int64 `[b]`: the places of blocks int64 `[b]`, -1 of those that have none."""
        return self._leaves[self._leaf_of[blocks >> _BITS], blocks & (LEAF - 1)].astype(np.int64) - 1

    def add(self, blocks: np.ndarray) -> np.ndarray:
        """Give the next places to those of blocks int64 `[b]`, ascending, that have none; the places of all."""
        places = self.find(blocks)
        new = places < 0
        places[new] = self.count + np.arange(np.count_nonzero(new))
        self.put(blocks[new], places[new])
        return places

    def put(self, blocks: np.ndarray, places: np.ndarray) -> None:
        """Note the places of blocks, ascending or not, that have none."""
        if blocks.size == 0:
            return
        above = blocks >> _BITS
        new = np.unique(above[self._leaf_of[above] == 0])
        self._grow(self._num_leaves + new.size)
        self._leaf_of[new] = self._num_leaves + np.arange(new.size)
        self._num_leaves += new.size
        self._leaves[self._leaf_of[above], blocks & (LEAF - 1)] = places + 1
        self.count = max(self.count, int(places.max()) + 1)

    def blocks(self) -> Iterator[np.ndarray]:
        """int64, ascending, in pieces: the blocks that have places."""
        for first in range(0, self._leaf_of.size, _CHUNK):
            above = np.flatnonzero(self._leaf_of[first : first + _CHUNK]) + first
            within, blocks = np.nonzero(self._leaves[self._leaf_of[above]])
            if within.size:
                yield above[within] * LEAF + blocks

    def _grow(self, num_leaves: int) -> None:
        if num_leaves > self._leaves.shape[0]:
            larger = _zeros(max(num_leaves, 2 * self._leaves.shape[0]) * LEAF).reshape(-1, LEAF)
            larger[: self._num_leaves] = self._leaves[: self._num_leaves]
            self._leaves = larger


def _zeros(count: int) -> np.ndarray:
    return np.frombuffer(reserve(4 * max(count, 1)), dtype=np.uint32)


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


CHUNK_BITS = mmap.PAGESIZE * 8  # blocks whose bits share a page of memory


class ChangedBlocks:
    """A bitmap of blocks whose memory is taken chunk by chunk, when a bit of the chunk is first set.

    The whole map is reserved as addresses only; the system gives it memory a page at a time.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        num_chunks = -(-self._num_blocks // CHUNK_BITS)
        self._bits = np.frombuffer(reserve(num_chunks * CHUNK_BITS // 8), dtype=np.uint8)
        self._touched = np.zeros(num_chunks, dtype=bool)

    def add(self, blocks: np.ndarray) -> None:
        """Set the bits of blocks int64 `[b]`, ascending."""
        self._touched[blocks // CHUNK_BITS] = True
        places = blocks >> 3
        starts = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]])) if blocks.size else places
        bits = np.left_shift(np.uint8(1), (blocks & 7).astype(np.uint8))
        if blocks.size:
            self._bits[places[starts]] |= np.bitwise_or.reduceat(bits, starts)

    def blocks(self) -> np.ndarray:
        """int64, ascending: those that have changed."""
        found = [np.empty(0, dtype=np.int64)]
        for chunk in np.flatnonzero(self._touched).tolist():
            begin = chunk * CHUNK_BITS // 8
            bits = np.unpackbits(self._bits[begin : begin + CHUNK_BITS // 8], bitorder="little")
            found.append(np.flatnonzero(bits) + chunk * CHUNK_BITS)
        return np.concatenate(found)
