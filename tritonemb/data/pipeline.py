"""From chunks to batches: chunks are parsed by threads, their rows gathered in shuffle buffers and cut into batches."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from tritonemb.data import protocol
from tritonemb.data.batch import Array, Rows, concat_rows, gather_batch
from tritonemb.data.files import Chunk
from tritonemb.data.prefetch import Prefetcher
from tritonemb.data.protocol import WHOLE, OpenOptions, Position, PositionedBatch, ReadReport

R = TypeVar("R")

CHUNKS_READ = 2  # that wait to be parsed
MOST_WORKERS = 8
FIELDS = ("part", "offset", "line", "skip", "skipped", "window", "batch", "rows")  # of a position


def ordered_map(
    job: Callable[[Chunk], R], chunks: Iterator[Chunk], num_threads: int | None
) -> Generator[R, None, None]:
    """`job(chunk)` of every chunk, in their order; its exception comes in its place.

    At most `CHUNKS_READ + 1` chunks wait for a thread and `2 * num_threads + 1` are in progress or wait as results, so
    memory does not depend on the size of the log. Closing the generator ends all threads.
    """
    num_threads = num_threads or min(max((os.cpu_count() or 1) // protocol.reading_processes, 1), MOST_WORKERS)
    read = Prefetcher(chunks, CHUNKS_READ + 1, "tritonemb-read")
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tritonemb-parse")
    results: deque[Future[R]] = deque()
    try:
        for chunk in read:
            results.append(pool.submit(job, chunk))
            del chunk  # or it would stay until the next one is there
            if len(results) > 2 * num_threads:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    finally:
        for result in results:
            result.cancel()
        read.close()
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class LogPosition:
    """Where a shuffle buffer begins: behind `skip` good rows of a chunk, before which were `skipped` bad ones."""

    part: int = 0
    offset: int = 0
    line: int = 0
    skip: int = 0
    skipped: int = 0


def shuffle_buffers(
    blocks: Iterable[Chunk], num_rows: int, order: Callable[[int, int], Array | None], start: LogPosition, number: int
) -> Iterator[tuple[int, Rows, LogPosition, LogPosition]]:
    """The blocks' rows from `start` on in buffers of `num_rows`, the last one smaller: of each its number, from
    `number` on, its rows, and the places between which they are. `order` is called with the number of rows and that of
    the buffer; None keeps them as they are. ValueError if there are fewer rows than `start.skip`."""
    pieces: list[Rows] = []
    gathered, left_out, skipped, stop = 0, start.skip, start.skipped, start
    for block in blocks:
        row = min(left_out, len(block.rows))
        left_out -= row
        while row < len(block.rows):
            end = min(row + num_rows - gathered, len(block.rows))
            pieces.append(block.rows.slice(row, end))
            gathered, row = gathered + end - row, end
            stop = LogPosition(block.part, block.offset, block.line, row, skipped)
            if gathered == num_rows:
                joined, pieces, gathered = concat_rows(pieces, order(gathered, number)), [], 0
                yield number, joined, start, stop
                del joined
                start, number = stop, number + 1
        skipped += block.report.skipped
    if left_out:
        raise ValueError(f"there are {left_out} rows fewer than the position says; the data are not what they were")
    if pieces:
        yield number, concat_rows(pieces, order(gathered, number)), start, stop


def permutation(num_rows: int, *seeds: int) -> Array:
    """The order of some rows that these numbers decide, the same on every machine."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int(state))).numpy()


def iterate_batches(
    name: str, options: OpenOptions, blocks: Callable[[LogPosition], Generator[Chunk, None, None]],
    keys: tuple[str, ...], buffer_rows: int, order: Callable[[int, int], Array | None], position: Position,
    read: ReadReport,
) -> Iterator[PositionedBatch]:  # fmt: skip
    """The batches of one stream, from a position on; behind the last one, the report of all rows.

    `blocks` gives those of the split from a place on, `order` is as for `shuffle_buffers`, and `read` are the rows
    before the position, and the bad ones among them, or not in the blocks any more.
    """

    def counted(blocks: Iterator[Chunk]) -> Iterator[Chunk]:
        nonlocal read
        for block in blocks:
            read += block.report
            yield block

    start = LogPosition(*(position[field] for field in FIELDS[:5]))
    first, rows, size = position["batch"], position["rows"], options.batch_size
    with closing(blocks(start)) as found:
        buffers = shuffle_buffers(counted(found), buffer_rows, order, start, position["window"])
        for number, buffer, begin, end in buffers:
            if first * size >= (num_rows := len(buffer)):
                raise ValueError(f"data set {name!r}: there are fewer rows than the position says")
            for index in range(first, -(-num_rows // size)):
                batch = gather_batch(
                    buffer, keys, slice(index * size, min((index + 1) * size, num_rows)), options.pin_memory
                )
                rows += len(batch)
                place, window, following = begin, number, index + 1
                if following * size >= num_rows:
                    place, window, following = end, number + 1, 0
                at = {"window": window, "batch": following, "rows": rows}
                yield PositionedBatch(batch, {"of": position["of"], **vars(place), **at}, replace(read, rows=rows))
            first = 0
    if rows == 0 and options.shard == WHOLE:
        skipped = f" ({read.skipped} bad ones were skipped)" if read.skipped else ""
        raise ValueError(f"data set {name!r}: there are no {options.split} rows{skipped}")
    yield PositionedBatch(None, {}, replace(read, rows=rows))  # bad rows may have come since
