"""Where a row's record stands in a file of pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

PAGE_BYTES = 4096
PAYLOAD_BYTES = PAGE_BYTES - 16  # the number of its block, and a checksum, end each page


class Request(NamedTuple):
    """Rows by the blocks they stand in.

    Args:
        blocks: int64 `[b]`, ascending and distinct.
        starts: int64 `[b + 1]`: the rows of block i are those from `starts[i]` on.
    """

    blocks: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Layout:
    """A header page, then blocks: pages of as many records as fit, or for each record as many pages as it needs.

    Blocks stand in the file in the order in which they were first written, see `Places`. A record has a byte before it
    that says whether the row was ever written.
    """

    num_rows: int
    record_bytes: int

    @cached_property
    def rows_per_block(self) -> int:
        return max(1, PAYLOAD_BYTES // (self.record_bytes + 1))

    @cached_property
    def pages_per_block(self) -> int:
        return -(-(self.record_bytes + 1) // PAYLOAD_BYTES)

    @cached_property
    def block_bytes(self) -> int:
        return self.pages_per_block * PAGE_BYTES

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.rows_per_block)

    def file_bytes(self, num_places: int) -> int:
        """The size of a file of so many blocks."""
        return PAGE_BYTES + num_places * self.block_bytes

    def offsets(self, places: np.ndarray) -> np.ndarray:
        """Of each place, in bytes from the file's start."""
        return PAGE_BYTES + places * self.block_bytes

    def rows_of(self, first: int, last: int) -> str:
        """In words: the rows of the blocks from `first` to `last`."""
        begin, end = first * self.rows_per_block, min((last + 1) * self.rows_per_block, self.num_rows)
        return f"row {begin}" if end - begin == 1 else f"rows {begin} to {end - 1}"

    def request(self, rows: np.ndarray) -> Request:
        """The blocks of rows int64 `[n]`, ascending."""
        of_rows = rows // self.rows_per_block
        starts = np.flatnonzero(of_rows[1:] != of_rows[:-1]) + 1
        starts = np.concatenate([[0], starts, [rows.size]]) if rows.size else np.zeros(1, dtype=np.int64)
        return Request(of_rows[starts[:-1]], starts)

    def whole(self, request: Request) -> np.ndarray:
        """bool `[b]`: whether all rows of a block are asked for."""
        counts = np.minimum(self.num_rows - request.blocks * self.rows_per_block, self.rows_per_block)
        return np.diff(request.starts) == counts


def runs(*numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches in which each of some numbers is greater by 1 than that before: where each begins, and where it ends.

    Args:
        numbers: int64 `[n]`, one or several.
    """
    size = numbers[0].size
    cuts = np.flatnonzero(np.any([np.diff(each) != 1 for each in numbers], axis=0)) + 1
    edge = min(size, 1)
    return np.concatenate([np.zeros(edge, dtype=np.int64), cuts]), np.concatenate([cuts, np.full(edge, size)])
