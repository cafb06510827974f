"""Pipeline from chunks to batches: threads parse chunks, rows fill shuffle buffers, which are cut into batches."""

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

CHUNKS_READ = 2  # chunks that wait to be parsed
MAX_THREADS = 8
FIELDS = ("part", "offset", "line", "skip", "skipped", "window", "batch", "rows")  # keys of a position


def ordered_map(
    job: Callable[[Chunk], R], chunks: Iterator[Chunk], num_threads: int | None
) -> Generator[R, None, None]:
    """Map `job` over chunks in threads; yield results in order, and raise an exception at its position.

    At most `CHUNKS_READ + 1` chunks wait for a thread and `2 * num_threads + 1` are in progress or wait as results, so
    memory does not depend on the size of the log. Closing the generator stops all threads.
    """
    num_threads = num_threads or min(max((os.cpu_count() or 1) // protocol.reading_processes, 1), MAX_THREADS)
    prefetched = Prefetcher(chunks, CHUNKS_READ + 1, "tritonemb-read")
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tritonemb-parse")
    results: deque[Future[R]] = deque()
    try:
        for chunk in prefetched:
            results.append(pool.submit(job, chunk))
            del chunk  # free it while the next one is read
            if len(results) > 2 * num_threads:
                yield results.popleft().result()
        while results:
            yield results.popleft().result()
    finally:
        for result in results:
            result.cancel()
        prefetched.close()
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class LogPosition:
    """First row of a shuffle buffer: after `skip` valid rows of a chunk, and `skipped` bad rows in all."""

    part: int = 0
    offset: int = 0
    line: int = 0
    skip: int = 0
    skipped: int = 0


def shuffle_buffers(
    blocks: Iterable[Chunk], num_rows: int, order: Callable[[int, int], Array | None], start: LogPosition, index: int
) -> Iterator[tuple[int, Rows, LogPosition, LogPosition]]:
    """Collect the rows of blocks, from `start` on, in buffers of `num_rows` (the last may be smaller); yield each
    buffer's index, counted from `index`, its rows, its start and its end.

    `order(num_rows, index)` returns the permutation of a buffer, or None to keep the order. Raise ValueError if the
    blocks have fewer than `start.skip` rows."""
    slices: list[Rows] = []
    num_gathered, num_to_skip, skipped, stop = 0, start.skip, start.skipped, start
    for block in blocks:
        # Skip rows before `start`, then take rows until the buffer is full.
        row = min(num_to_skip, len(block.rows))
        num_to_skip -= row
        while row < len(block.rows):
            end = min(row + num_rows - num_gathered, len(block.rows))
            slices.append(block.rows.slice(row, end))
            num_gathered, row = num_gathered + end - row, end
            stop = LogPosition(block.part, block.offset, block.line, row, skipped)
            if num_gathered == num_rows:
                buffer = concat_rows(slices, order(num_gathered, index))
                slices, num_gathered = [], 0
                yield index, buffer, start, stop
                del buffer
                start, index = stop, index + 1
        skipped += block.report.skipped
    if num_to_skip:
        raise ValueError(f"the data has changed: it has {num_to_skip} fewer rows than the position requires")
    if slices:
        yield index, concat_rows(slices, order(num_gathered, index)), start, stop


def permutation(num_rows: int, *seeds: int) -> Array:
    """Return the permutation of rows for these seeds, the same on every machine."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(int(state))).numpy()


def iterate_batches(
    name: str, options: OpenOptions, blocks: Callable[[LogPosition], Generator[Chunk, None, None]],
    keys: tuple[str, ...], buffer_rows: int, order: Callable[[int, int], Array | None], position: Position,
    report: ReadReport,
) -> Iterator[PositionedBatch]:  # fmt: skip
    """Yield the batches of one stream from a position on; after the last one, the report of all rows.

    `blocks(start)` yields the blocks of the split from `start` on; `order` is that of `shuffle_buffers`; `report`
    counts the rows before the position, with the bad rows that the blocks do not have.
    """

    def add_reports(blocks: Iterator[Chunk]) -> Iterator[Chunk]:
        nonlocal report
        for block in blocks:
            report += block.report
            yield block

    # Resume at batch `first_batch` of the shuffle buffer that begins at `start`.
    start = LogPosition(*(position[field] for field in FIELDS[:5]))
    first_batch, rows, batch_size = position["batch"], position["rows"], options.batch_size
    with closing(blocks(start)) as split_blocks:
        buffers = shuffle_buffers(add_reports(split_blocks), buffer_rows, order, start, position["window"])
        for buffer_index, buffer, begin, end in buffers:
            if first_batch * batch_size >= (num_rows := len(buffer)):
                raise ValueError(f"data set {name!r}: it has fewer rows than the position requires")
            for batch_index in range(first_batch, -(-num_rows // batch_size)):
                indices = slice(batch_index * batch_size, min((batch_index + 1) * batch_size, num_rows))
                batch = gather_batch(buffer, keys, indices, options.pin_memory)
                rows += len(batch)
                # The position of the next batch: in this buffer, or the first one of the next buffer.
                next_start, window, next_batch = begin, buffer_index, batch_index + 1
                if next_batch * batch_size >= num_rows:
                    next_start, window, next_batch = end, buffer_index + 1, 0
                next_position = vars(next_start) | {"window": window, "batch": next_batch, "rows": rows}
                yield PositionedBatch(batch, {"of": position["of"], **next_position}, replace(report, rows=rows))
            first_batch = 0
    if rows == 0 and options.shard == WHOLE:
        skipped = f" ({report.skipped} bad rows were skipped)" if report.skipped else ""
        raise ValueError(f"data set {name!r}: there are no {options.split} rows{skipped}")
    yield PositionedBatch(None, {}, replace(report, rows=rows))  # counts bad rows after the last batch
