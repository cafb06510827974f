"""Pipeline of a log: a source divides files into chunks, threads parse them, shuffle buffers are cut into batches."""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch

from tritonemb.data import protocol
from tritonemb.data.batch import Array, Rows, concat_rows, gather_batch
from tritonemb.data.encode import arrow_array, is_text, mask_of, mix
from tritonemb.data.files import Chunk, LogFile, Part, compute, pa
from tritonemb.data.protocol import WHOLE, OpenOptions, Position, PositionedBatch, Prefetcher, ReadReport, Shard, Split
from tritonemb.data.schema import Kind, LogOptions, Names, Schema, SplitRule, quote_value

R = TypeVar("R")

CHUNKS_READ = 2  # chunks that wait to be parsed
MAX_THREADS = 8
FIELDS = ("part", "offset", "line", "skip", "skipped", "window", "batch", "rows")  # keys of a position


@dataclass(frozen=True)
class ParsedChunk:
    """Rows of a chunk after parsing."""

    batch: Any  # a `pyarrow.RecordBatch` of the valid rows
    rows: Array  # int64 [N], their numbers in the chunk
    bad_rows: Array  # int64, numbers of the bad rows, ascending
    lines: Array  # int64, line of the chunk (or row) by row number
    describe: Callable[[int], tuple[str, str]]  # reason and message for the n-th bad row


class LogSource(Protocol):
    """Files of a log in one format, with the same columns. A source is created from the files, the options, whether
    rows have a label, and additional columns to read; it raises ValueError if none of the files has rows, one is
    damaged, or a column is missing, duplicate or of the wrong type."""

    files: tuple[LogFile, ...]
    schema: Schema  # with all columns filled in
    multi_hot: Names  # sparse columns that are lists
    kinds: Mapping[str, str]  # of the sparse columns, see `Feature`
    counts_rows: bool = False  # whether `sizes` and `estimated_rows` are exact, and known without a pass over the data
    row_unit: int | None = None  # of `Chunk.first_row` of text, for a random split: 1 for rows; 0 (older) for lines

    def freeze(self, lists: Names) -> None:
        """Fix which columns have lists: rows that are read later must fit these features."""

    def sizes(self) -> list[int]:
        """Return the sizes of the files in the unit of `Part`."""

    def estimated_rows(self, part: Part) -> float:
        """Estimate the number of rows of a part, bad rows included."""

    def chunks(self, part: Part, number: int, chunk_bytes: int, offset: Any, line: int) -> Iterator[Chunk]:
        """Yield chunks of a part (index `number`) from `offset`, in its line `line`, on. ValueError: it has changed."""

    def parse(self, chunk: Chunk) -> ParsedChunk:
        """Parse a chunk, and check its rows."""

    def shard(self, parts: tuple[Part, ...], shard: Shard) -> tuple[Part, ...]:
        """Return one shard of some parts."""

    def within(self, split: Split, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Return parts that may have rows of a split by time, so that shards of them are of similar size."""
        return parts

    def tail(self, part: Part) -> Part:
        """Return the last rows of a part, about a chunk, or all of them if they are found in order only."""
        return part

    def location(self, part: Part, chunk: Chunk, line: int) -> str:
        """Return the location of a chunk's row for messages: `train.txt, line 3`."""

    def text_schema(self) -> Any:
        """Return the `pyarrow.Schema` of the columns of text; None for other formats."""
        return None


def num_processors() -> int:
    """Return the number of processors that this process may use to read."""
    return max((os.cpu_count() or 1) // protocol.reading_processes, 1)


def ordered_map(job: Callable[[Chunk], R], chunks: Iterator[Chunk], num_threads: int | None) -> Generator[R]:
    """Map `job` over chunks in threads; yield results in order, and raise an exception at its position.

    At most `CHUNKS_READ + 1` chunks wait for a thread and `2 * num_threads + 1` are in progress or wait as results, so
    memory does not depend on the size of the log. Closing the generator stops all threads.
    """
    num_threads = num_threads or min(num_processors(), MAX_THREADS)
    prefetched = Prefetcher(chunks, CHUNKS_READ + 1, protocol.READ_THREAD)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tritonemb-parse")
    results: deque[Future[R]] = deque()
    try:
        for chunk in prefetched:
            results.append(pool.submit(job, chunk))
            limit = 2 * num_threads if len(chunk.rows) else 0  # a stream without rows hands over those it had
            del chunk  # free it while the next one is read
            while len(results) > limit:
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
    offset: Any = 0
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


@dataclass(frozen=True)
class LogReader:
    """Reader of the splits of a log: `parts` of the source's files by split, by a rule of the resolved `kind`."""

    name: str
    source: LogSource
    options: LogOptions
    kind: Kind
    parts: Mapping[Split, tuple[Part, ...]]
    transform: Callable[[ParsedChunk, Callable[[int], str]], ParsedChunk]  # see `Transforms`

    def split_parts(self, split: Split) -> tuple[Part, ...]:
        if split not in self.parts:
            raise ValueError(f"data set {self.name!r} has no {split!r} rows, only {', '.join(self.parts)}")
        return self.parts[split]

    def num_rows(self, split: Split) -> int | None:
        parts = self.split_parts(split)
        is_exact = self.source.counts_rows and self.kind in ("end", "files") and self.options.on_bad_row == "raise"
        return round(sum(map(self.source.estimated_rows, parts))) if is_exact else None

    def has_rows(self, split: Split) -> bool:
        """Return whether a split has a valid row; late ones are looked for at the ends of files first."""
        if (num_rows := self.num_rows(split)) is not None:
            return num_rows > 0
        parts = self.split_parts(split)
        if self.kind == "time":
            parts = self.source.within(split, parts)[:: 1 if split == "train" else -1]
            tails = map(self.source.tail, parts) if split != "train" else ()
            parts = (*(part for part in tails if part not in parts), *parts)
        reader = replace(self, parts={split: parts}, options=replace(self.options, on_bad_row="skip"))
        chunks = (self.source.chunks(part, n, self.options.chunk_bytes, part.start, 0) for n, part in enumerate(parts))
        return any(reader._read(split, chunk)[1].rows for chunk in chain.from_iterable(chunks))

    def estimated_rows(self, split: Split) -> int | None:
        if self.kind == "time":
            return None
        rows = sum(map(self.source.estimated_rows, self.split_parts(split)))
        if self.kind == "random":
            held_out = self.options.split.held_out(self.kind)
            rows *= held_out[split] if split != "train" else 1 - sum(held_out.values())
        return round(rows)

    def shard(self, split: Split, shard: Shard) -> Self:
        parts = self.split_parts(split)
        if shard == WHOLE:
            return self
        parts = self.source.within(split, parts) if self.kind == "time" else parts
        return replace(self, parts={split: self.source.shard(parts, shard)})

    def check_position(self, position: Position, split: Split, num_batches: int) -> None:
        """Raise ValueError for a position outside the split, or outside a shuffle buffer of `num_batches`."""
        part, offset, parts = position["part"], position["offset"], self.parts[split]
        if isinstance(offset, dict) and parts and self.source.files[parts[0].file].format == "stream":
            offset = 0
        if part >= max(len(parts), 1) or isinstance(offset, dict) or offset < (parts[part].start if parts else 0):
            raise ValueError(f"data set {self.name!r}: the position is in a file that is not in the {split} split")
        if position["batch"] >= num_batches:
            raise ValueError(f"data set {self.name!r}: the position is in batch {position['batch']} of a buffer")
        if self.options.on_bad_row == "raise" and position["skipped"]:
            raise ValueError(
                f"data set {self.name!r}: {position['skipped']} bad rows were skipped before this position, so it "
                'cannot resume with on_bad_row="raise"; use on_bad_row="skip", or start the epoch again'
            )

    def scan(self, split: Split, job: Callable[[Any], Any], start: LogPosition | None = None) -> Generator[Chunk]:
        parts = self.split_parts(split)
        first = start or LogPosition(offset=parts[0].start if parts else 0)

        def chunks() -> Iterator[Chunk]:
            for number, part in enumerate(parts[first.part :], start=first.part):
                offset, line = (first.offset, first.line) if number == first.part else (part.start, 0)
                yield from self.source.chunks(part, number, self.options.chunk_bytes, offset, line)

        def work(chunk: Chunk) -> Chunk:
            with protocol.count_reading():
                batch, report = self._read(split, chunk)
                try:
                    return replace(chunk, rows=job(batch), report=report)
                except ValueError as error:
                    first_row = self.source.location(parts[chunk.part], chunk, 0)
                    raise ValueError(f"{first_row}, or a later row: {error}") from error

        return ordered_map(work, chunks(), self.options.parser_threads)

    def batches(
        self, options: OpenOptions, encode: Callable[[Any], Rows], keys: tuple[str, ...], buffer_rows: int,
        seeds: tuple[int, ...] | None, report: ReadReport, stopped: threading.Event,
    ) -> Iterator[PositionedBatch]:  # fmt: skip
        """Yield the batches from a position on, then the report of all rows; `stopped` ends a wait for rows. `seeds`
        permute the shuffle buffers, unless None; `report` has the rows before the position, and bad rows left out."""
        position = options.position or {}

        def add_reports(blocks: Iterator[Chunk]) -> Iterator[Chunk]:
            nonlocal report
            for block in blocks:
                if stopped.is_set():
                    return
                report += block.report
                yield block

        def order(num_rows: int, buffer: int) -> Array | None:
            return None if seeds is None else permutation(num_rows, *seeds, buffer)

        # Resume at batch `first_batch` of the shuffle buffer that begins at `start`.
        start = LogPosition(*(position[field] for field in FIELDS[:5]))
        first_batch, rows, batch_size = position["batch"], position["rows"], options.batch_size
        with closing(self.scan(options.split, encode, start)) as blocks:
            buffers = shuffle_buffers(add_reports(blocks), buffer_rows, order, start, position["window"])
            for buffer_index, buffer, begin, end in buffers:
                if first_batch * batch_size >= (num_rows := len(buffer)):
                    raise ValueError(f"data set {self.name!r}: it has fewer rows than the position requires")
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
        if rows == 0 and options.shard == WHOLE and not stopped.is_set():
            skipped = f" ({report.skipped} bad rows were skipped)" if report.skipped else ""
            raise ValueError(f"data set {self.name!r}: there are no {options.split} rows{skipped}")
        yield PositionedBatch(None, {}, replace(report, rows=rows))  # counts bad rows after the last batch

    def _read(self, split: Split, chunk: Chunk) -> tuple[Any, ReadReport]:
        part = self.parts[split][chunk.part]
        parsed = self.transform(self.source.parse(chunk), partial(self.source.location, part, chunk))
        row_numbers = parsed.lines if self.source.row_unit == 0 else np.arange(len(parsed.lines))
        # Count and describe the bad rows of the split, or raise at the first.
        counts: Counter[str] = Counter()
        problems: list[str] = []
        for bad_index in np.flatnonzero(self._split_mask(split, chunk, row_numbers[parsed.bad_rows])).tolist():
            reason, message = parsed.describe(bad_index)
            counts[f"{self.source.files[part.file].path}: {reason}"] += 1
            if len(problems) < protocol.MAX_PROBLEMS:
                line = int(parsed.lines[parsed.bad_rows[bad_index]])
                problems.append(f"{self.source.location(part, chunk, line)}: {message}")
            if self.options.on_bad_row == "raise":
                raise ValueError(problems[0])
        # Keep the valid rows of the split.
        split_mask = self._split_mask(split, chunk, row_numbers[parsed.rows], parsed.batch)
        batch = parsed.batch if split_mask.all() else parsed.batch.filter(arrow_array(split_mask))
        return batch, ReadReport(batch.num_rows, counts.total(), tuple(problems), tuple(sorted(counts.items())))

    def _split_mask(self, split: Split, chunk: Chunk, row_numbers: Array, batch: Any = None) -> Array:
        """Return a mask of the rows of a chunk that belong to a split; `batch` has these rows unless they are bad."""
        rule, part = self.options.split, self.parts[split][chunk.part]
        if self.kind == "random":
            return random_mask(rule, split, part.file, chunk.first_row + row_numbers)
        if self.kind == "time":
            if batch is None and isinstance(chunk.rows, bytearray):  # bad lines have no time
                return np.full(len(row_numbers), split == "train")
            batch = chunk.rows.take(arrow_array(row_numbers)) if batch is None else batch
            times = batch.column(rule.time_column)
            return mask_of(time_mask(rule, split, times, times.type))
        return np.ones(len(row_numbers), dtype=bool)


def random_mask(rule: SplitRule, split: Split, file: int, rows: Array) -> Array:
    """Return a mask of the rows (numbers in the file, from 0) that belong to a random split: row numbers are hashed to
    `[0, 1)`; the largest hashes are test rows, the next largest validation rows."""
    row_number = rows.astype(np.uint64) + (np.uint64(file) << np.uint64(44))
    fraction = (mix(row_number ^ np.uint64(0x53504C4954)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    is_test = fraction >= 1 - rule.test_share
    is_held_out = fraction >= 1 - rule.test_share - rule.validation_share
    return {"train": ~is_held_out, "validation": is_held_out & ~is_test, "test": is_test}[split]


def time_mask(rule: SplitRule, split: Split, times: Any, kind: Any) -> Any:
    """Return a mask of the rows that belong to a split by time: booleans for a `pyarrow` array of times of this type,
    an expression for an expression. A row without a time is a train row."""
    late, test = (_at_or_after(times, bound, kind) for bound in (rule.validation_from, rule.test_from))
    if split == "test":
        return test
    return compute.and_kleene(late if split == "validation" else compute.invert(late), compute.invert(test))


def _at_or_after(times: Any, bound: str | None, kind: Any) -> Any:
    if bound is None:  # all false; as an expression if the times are one
        return compute.and_kleene(compute.is_valid(times), pa.scalar(False))
    kinds, reason = [kind], ""
    if text := is_text(kind):  # times in ISO 8601 or numbers, in any spelling
        times = times.cast(pa.string())
        times = compute.if_else(compute.equal(times, ""), pa.scalar(None, pa.string()), times)
        kinds = [pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in (None, "UTC")]
        kinds += [pa.int64(), pa.float64()]
    for instant in kinds:
        try:
            late = compute.greater_equal(times.cast(instant) if text else times, pa.scalar(bound).cast(instant))
            return compute.coalesce(late, pa.scalar(False))
        except pa.ArrowException as error:
            reason = reason or str(error).splitlines()[0]
    raise ValueError(
        f"split: {quote_value(bound)} is not a time of the time column, which is {kind}, or its times have different "
        f"formats ({reason}); write both as 2014-05-31T12:00:00 or, with a zone, as 2014-05-31T12:00:00Z"
    )
