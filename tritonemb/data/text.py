"""Text files, plain or compressed, cut into chunks of whole lines.

With `quoted`, a line ends at a line feed outside quotes only. Nobody can tell that in the middle of a file, so such
files are read from their beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tritonemb.data.arrow import Chunk
from tritonemb.data.files import LogFile
from tritonemb.extras import require

Array = np.ndarray[Any, Any]

_SAMPLE_BYTES = 1 << 20
LONGEST_LINE = 1 << 16  # bytes; a longer line is bad, and only its beginning is kept


@contextmanager
def opened(file: LogFile) -> Iterator[Any]:
    """The unpacked bytes of a file, a `pyarrow.NativeFile`.

    Raises:
        ValueError: the file is cut off or damaged, or has other bytes than when it was found.
    """
    with file.open() as raw:
        if file.codec is None:
            yield raw
            return
        try:
            with require("pyarrow").CompressedInputStream(raw, file.codec) as unpacked:
                yield unpacked
        except OSError as error:
            raise ValueError(f"{file.path} is not a whole {file.codec} file ({error}); fetch it again") from error


def text_chunks(
    file: LogFile,
    part: int,
    start: int,
    stop: int | None,
    chunk_bytes: int,
    offset: int,
    line: int = 0,
    quoted: bool = False,
) -> Iterator[Chunk]:
    """The lines that begin at byte `start` or later and before byte `stop`, in chunks of about `chunk_bytes`.

    Args:
        offset: where to begin, `start` or where a chunk began; `line` lines of the part come before. With `quoted`,
            these are lines of the file.

    Raises:
        ValueError: the file is damaged, or is not what it was.
    """
    if quoted and offset == start > 0:
        for chunk in text_chunks(file, part, 0, stop, chunk_bytes, 0, 0, quoted):
            if chunk.offset >= start:
                yield chunk
            elif begin := LineEnds(chunk.content, quoted).after(start - 1 - chunk.offset):
                yield from _cut(chunk, begin, len(chunk.content))
        return
    with opened(file) as source:
        pending = b""
        if offset == start and start > 0:  # in the middle of a line, perhaps: go on after the first line feed from here
            _skip(source, file, start - 1)
            num_skipped, pending = _after_line_feed(source, chunk_bytes)
            offset = start - 1 + num_skipped
        else:
            _skip(source, file, offset)
        while stop is None or offset < stop:
            block = source.read(chunk_bytes)
            data = pending + block
            if not block:
                _check_end(file, offset + len(data), stop)
                if not data:
                    return
                data += b"" if data.endswith(b"\n") else b"\n"
            ends = LineEnds(data, quoted)
            end = ends.last() if block else len(data)
            if stop is not None and offset + len(data) >= stop:
                end = ends.after(stop - 1 - offset) or end
            if end == 0 and len(data) > LONGEST_LINE and not quoted:
                yield Chunk(part, offset, line, data[: LONGEST_LINE + 1] + b"\n")
                num_skipped, pending = _after_line_feed(source, chunk_bytes)
                offset, line = offset + len(data) + num_skipped, line + 1
                continue
            if end:
                yield Chunk(part, offset, line, data[:end])
                line += data.count(b"\n", 0, end)
            offset, pending = offset + end, data[end:]


class LineEnds:
    """Where the lines of a text end, which begins with a line: the places behind their line feeds."""

    def __init__(self, text: bytes, quoted: bool) -> None:
        self._text, self._ends = text, quoted_ends(text) if quoted else None

    def last(self) -> int:
        """The end of the last whole line; 0 if there is none."""
        if self._ends is not None:
            return int(self._ends[-1]) if len(self._ends) else 0
        return self._text.rfind(b"\n") + 1

    def after(self, place: int) -> int:
        """The first end behind a place; 0 if there is none."""
        if self._ends is not None:
            found = self._ends[np.searchsorted(self._ends, place, side="right") :]
            return int(found[0]) if len(found) else 0
        return self._text.find(b"\n", place) + 1


def quoted_ends(text: bytes) -> Array:
    """Where lines end, line feeds inside quotes aside: int64 places behind the line feeds.

    A quote that is not closed within `LONGEST_LINE` bytes of its line is none: that line ends with the next line feed.
    """
    data = np.frombuffer(text, np.uint8)
    found: list[Array] = []
    begin = 0
    while True:
        outside = ~np.logical_xor.accumulate(data[begin:] == ord('"'))
        ends = begin + 1 + np.flatnonzero((data[begin:] == ord("\n")) & outside)
        lengths = np.diff(ends, prepend=begin, append=len(text))
        too_long = np.flatnonzero(lengths > LONGEST_LINE)
        if not len(too_long):
            return np.concatenate([*found, ends])
        ends = ends[: too_long[0]]
        last = int(ends[-1]) if len(ends) else begin
        begin = text.find(b"\n", last + LONGEST_LINE) + 1
        found.append(ends)
        if not begin:
            return np.concatenate(found)
        found.append(np.array([begin]))


def stripe_bytes(file: LogFile, count: int) -> int:
    """Unpacked bytes of a stripe of a file that `count` readers share and nobody can enter in the middle.

    By the file's size alone, since all of them must come to the same, whatever their chunks; enough of them for each
    reader to get much the same.
    """
    return min(max(file.size // (8 * count), 1 << 12), 1 << 22)


def striped(chunks: Iterator[Chunk], index: int, count: int, width: int, quoted: bool = False) -> Iterator[Chunk]:
    """Of the lines of some chunks, those that begin in every count-th stripe of `width` bytes, from the index-th on."""
    for chunk in chunks:
        ends, begin = LineEnds(chunk.content, quoted), 0
        while begin < len(chunk.content):
            stripe = (chunk.offset + begin) // width
            stop = (stripe + 1) * width - chunk.offset  # a line that begins at `stop` or later is of another stripe
            end = ends.after(stop - 1) if stop < len(chunk.content) else len(chunk.content)
            if stripe % count == index:
                yield from _cut(chunk, begin, end)
            begin = end


def lines_before(file: LogFile, start: int, first: int = 0) -> int:
    """Lines that begin at byte `first` or later and before the first one that begins at byte `start` or later.

    Reads all that is before `start`, or what is between, where that can be done.
    """
    if start <= first:
        return 0
    lines = 0 if first else 1
    begin = max(first - 1, 0)
    left = start - 1 - begin
    with opened(file) as source:
        _skip(source, file, begin)
        while left > 0 and (block := source.read(min(left, 1 << 22))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def unpacked_size(file: LogFile) -> int:
    """Bytes of the text; of a compressed file all of them are unpacked for it."""
    if file.codec is None:
        return file.size
    size = 0
    with opened(file) as source:
        while block := source.read(1 << 22):
            size += len(block)
    return size


def mean_line_bytes(file: LogFile) -> float:
    """Unpacked bytes of a line, by the first ones."""
    beginning = first_bytes(file, _SAMPLE_BYTES)
    return len(beginning) / max(beginning.count(b"\n"), 1)


def estimated_lines(file: LogFile) -> float:
    """Lines of a whole file, by the first ones."""
    if file.codec is None:
        return file.size / mean_line_bytes(file)
    beginning = first_bytes(file, _SAMPLE_BYTES)
    if len(beginning) < _SAMPLE_BYTES:
        return max(beginning.count(b"\n"), 1)
    packed = len(require("pyarrow").compress(beginning, codec=file.codec, asbytes=True))
    return file.size / packed * max(beginning.count(b"\n"), 1)


def first_bytes(file: LogFile, num_bytes: int = LONGEST_LINE) -> bytes:
    """The beginning of the text."""
    data = b""
    with opened(file) as source:
        while len(data) < num_bytes and (block := source.read(num_bytes - len(data))):
            data += block
    return data


def _cut(chunk: Chunk, begin: int, end: int) -> Iterator[Chunk]:
    """The lines of a chunk between two places, if there are any."""
    if begin < end:
        line = chunk.line + chunk.content.count(b"\n", 0, begin)
        yield Chunk(chunk.part, chunk.offset + begin, line, chunk.content[begin:end])


def _check_end(file: LogFile, end: int, stop: int | None) -> None:
    """The text has ended at byte `end`: ValueError if it has not always done so."""
    file.check_size()
    least = max(stop or 0, file.size if file.codec is None else 0)
    if end < least:
        raise ValueError(
            f"{file.path} has changed since it was opened first: its text ends at byte {end} and had at least {least}; "
            "start again"
        )


def _skip(source: Any, file: LogFile, offset: int) -> None:
    if file.codec is None:
        source.seek(offset)
        return
    while offset > 0 and (block := source.read(min(offset, 1 << 22))):
        offset -= len(block)


def _after_line_feed(source: Any, chunk_bytes: int) -> tuple[int, bytes]:
    """Read past the next line feed: how many bytes that were, and what else was read."""
    num_skipped = 0
    while block := source.read(chunk_bytes):
        end = block.find(b"\n") + 1
        if end:
            return num_skipped + end, block[end:]
        num_skipped += len(block)
    return num_skipped, b""
