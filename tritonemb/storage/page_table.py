"""Maps of a table's blocks: at which position of the file each stands, and which were written since a snapshot."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from tritonemb.storage.io import reserve

LEAF = 32  # neighbouring blocks whose entries stand side by side
CHUNK_BITS = mmap.PAGESIZE * 8  # blocks whose bits share a page of memory
MAX_POSITIONS = (1 << 32) - 2
_BITS = LEAF.bit_length() - 1
_MIN_LEAVES = 256
_CHUNK = 1 << 16  # leaves looked through at once


class PageTable:
    """The position of each block in the file, in two levels; they stand in the order in which they were first written.

    So a file grows at its end alone, whatever rows are written: it has no holes, however large the table is, and blocks
    that were first written together stand together. A block takes 4 bytes of memory, as does every group of `LEAF`
    blocks of the table; where single blocks are far apart, each takes 4 `LEAF` bytes.

    Attributes:
        count: positions that are allocated: 0 to `count` - 1.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.count = num_blocks, 0
        self._leaf_of = _zeros(-(-num_blocks // LEAF))  # by block // LEAF; 0: none of them is allocated
        self._leaves = _zeros(_MIN_LEAVES * LEAF).reshape(-1, LEAF)  # position + 1, 0: none; the first leaf stays empty
        self._num_leaves = 1

    def find(self, blocks: np.ndarray) -> np.ndarray:
        """int64 `[b]`: the positions of blocks int64 `[b]`, -1 where none is allocated."""
        return self._leaves[self._leaf_of[blocks >> _BITS], blocks & (LEAF - 1)].astype(np.int64) - 1

    def allocate(self, blocks: np.ndarray) -> np.ndarray:
        """Allocate positions to those of blocks int64 `[b]`, ascending, that have none; the positions of all."""
        positions = self.find(blocks)
        new = positions < 0
        positions[new] = self.count + np.arange(np.count_nonzero(new))
        self.insert(blocks[new], positions[new])
        return positions

    def insert(self, blocks: np.ndarray, positions: np.ndarray) -> None:
        """Note the positions of blocks, ascending or not, that have none."""
        if blocks.size == 0:
            return
        above = blocks >> _BITS
        new = np.unique(above[self._leaf_of[above] == 0])
        self._grow(self._num_leaves + new.size)
        self._leaf_of[new] = self._num_leaves + np.arange(new.size)
        self._num_leaves += new.size
        self._leaves[self._leaf_of[above], blocks & (LEAF - 1)] = positions + 1
        self.count = max(self.count, int(positions.max()) + 1)

    def blocks(self) -> Iterator[np.ndarray]:
        """int64, ascending, in pieces: the blocks that have positions."""
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


class ChangedBlocks:
    """A bitmap of the blocks that were written since the last snapshot.

    The whole map is reserved as addresses only; the system allocates its memory page by page, as bits are set.
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
        if blocks.size == 0:
            return
        self._touched[blocks // CHUNK_BITS] = True
        octets = blocks >> 3
        starts = np.flatnonzero(np.diff(octets, prepend=-1))
        bits = np.left_shift(np.uint8(1), (blocks & 7).astype(np.uint8))
        self._bits[octets[starts]] |= np.bitwise_or.reduceat(bits, starts)

    def blocks(self) -> np.ndarray:
        """int64, ascending: those that have changed."""
        found = [np.empty(0, dtype=np.int64)]
        for chunk in np.flatnonzero(self._touched).tolist():
            begin = chunk * CHUNK_BITS // 8
            bits = np.unpackbits(self._bits[begin : begin + CHUNK_BITS // 8], bitorder="little")
            found.append(np.flatnonzero(bits) + chunk * CHUNK_BITS)
        return np.concatenate(found)
