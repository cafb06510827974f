"""Which blocks of a table have been written since its last snapshot."""

from __future__ import annotations

import mmap

import numpy as np

from tritonemb.storage.file import reserve

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
