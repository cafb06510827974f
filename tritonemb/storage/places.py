"""Where in its file each block of a table stands: in the order in which they were first written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tritonemb.storage.file import reserve

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
