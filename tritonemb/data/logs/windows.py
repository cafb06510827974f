"""Blocks of rows put together to windows, inside which the rows are shuffled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tritonemb.data.columns import Array, Rows, concat
from tritonemb.data.logs.problems import Problems


@dataclass(frozen=True)
class Block:
    """The good rows of a chunk, and where the chunk begins; see `tritonemb.data.logs.text.Chunk`."""

    part: int
    offset: int
    line: int
    rows: Rows
    problems: Problems


@dataclass(frozen=True)
class Place:
    """Where a window begins: `skip` good rows after the beginning of a chunk, before which were `skipped` bad ones."""

    part: int = 0
    offset: int = 0
    line: int = 0
    skip: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Window:
    """The rows between two places."""

    number: int
    rows: Rows
    start: Place
    stop: Place


Order = Callable[[int, int], Array | None]
"""The order of a window's rows, from their number and the window's; None keeps it."""


def windows(blocks: Iterable[Block], num_rows: int, order: Order, start: Place, number: int) -> Iterator[Window]:
    """The blocks' rows from `start` on in windows of `num_rows`, the last one smaller; `number` is that of the first.

    All rows of a window are put in order at once: batch by batch, every one of them would be looked for in memory.

    Args:
        blocks: from the chunk that `start` names.

    Raises:
        ValueError: there are fewer rows than `start.skip`.
    """
    pieces: list[Rows] = []
    gathered, left_out, skipped, stop = 0, start.skip, start.skipped, start
    for block in blocks:
        row = min(left_out, len(block.rows))
        left_out -= row
        while row < len(block.rows):
            end = min(row + num_rows - gathered, len(block.rows))
            pieces.append(block.rows.slice(row, end))
            gathered, row = gathered + end - row, end
            stop = Place(block.part, block.offset, block.line, row, skipped)
            if gathered == num_rows:
                joined, pieces, gathered = concat(pieces, order(gathered, number)), [], 0
                yield Window(number, joined, start, stop)
                del joined
                start, number = stop, number + 1
        skipped += block.problems.total
    if left_out:
        raise ValueError(f"there are {left_out} rows fewer than the position says; the data are not what they were")
    if pieces:
        yield Window(number, concat(pieces, order(gathered, number)), start, stop)
