"""Where a row's record stands in a file of pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

PAGE_BYTES = 4096
PAYLOAD_BYTES = PAGE_BYTES - 8  # a checksum ends each page


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

    A record has a byte before it that says whether the row was ever written.
    """

    num_rows: int
    record_bytes: int

    @cached_property
    def rows_per_block(self) -> int:
        return max(1, PAYLOAD_BYTES // (self.record_bytes + 1))

    @cached_property
    def pages_per_block(self) -> int:
        return 1 if self.record_bytes < PAYLOAD_BYTES else -(-(self.record_bytes + 1) // PAYLOAD_BYTES)

    @cached_property
    def block_bytes(self) -> int:
        return self.pages_per_block * PAGE_BYTES

    @property
    def num_blocks(self) -> int:
        return -(-self.num_rows // self.rows_per_block)

    @property
    def file_bytes(self) -> int:
        return PAGE_BYTES + self.num_blocks * self.block_bytes

    def offsets(self, blocks: np.ndarray) -> np.ndarray:
        """Of each block, in bytes from the file's start."""
        return PAGE_BYTES + blocks * self.block_bytes

    def first_pages(self, blocks: np.ndarray) -> np.ndarray:
        """The number of each block's first page; the header is page 0."""
        return 1 + blocks * self.pages_per_block

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


def runs(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stretches in which ascending numbers follow each other without a gap: where each begins, and where it ends."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    edge = min(numbers.size, 1)
    return np.concatenate([np.zeros(edge, dtype=np.int64), cuts]), np.concatenate([cuts, [numbers.size] * edge])
