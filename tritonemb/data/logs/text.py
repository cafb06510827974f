"""Text files, plain or compressed, cut into chunks of whole lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tritonemb.data.logs.digits import LINE_FEED, PADDING, count_bytes, padded
from tritonemb.data.logs.files import LogFile
from tritonemb.utils import require

Array = np.ndarray[Any, Any]

_SAMPLE_BYTES = 1 << 20
LONGEST_LINE = 1 << 16  # bytes; a longer line is none of a log's, and only its beginning is kept


@dataclass(frozen=True)
class Chunk:
    """A run of rows of a part of a log.

    Args:
        part: which one, from 0.
        offset: where the run begins: a byte of the unpacked text, or a row.
        line: lines of the part before it.
        content: whole lines, as `tritonemb.data.logs.digits.padded` gives them, or a `pyarrow.RecordBatch`.
    """

    part: int
    offset: int
    line: int
    content: Any


class _Bytes(Protocol):
    def fileno(self) -> int: ...

    def read(self, size: int, /) -> bytes: ...

    def readinto(self, buffer: memoryview, /) -> int: ...


@contextmanager
def opened(file: LogFile) -> Iterator[_Bytes]:
    """The unpacked bytes of a file.

    Raises:
        ValueError: the file is cut off or damaged, or has other bytes than when it was found.
    """
    pa = require("pyarrow")
    if file.codec is None:
        with file.path.open("rb", buffering=0) as plain:
            file.check_size(os.fstat(plain.fileno()).st_size)
            yield plain
        return
    with pa.OSFile(str(file.path)) as raw:
        fileno = raw.fileno()
        file.check_size(os.fstat(fileno).st_size)
        with pa.CompressedInputStream(raw, file.codec) as unpacked:
            yield _Unpacked(unpacked, file, fileno)


class _Unpacked:
    def __init__(self, stream: Any, file: LogFile, fileno: int) -> None:
        self._stream, self._file, self._fileno = stream, file, fileno

    def fileno(self) -> int:
        return self._fileno

    def read(self, size: int, /) -> bytes:
        with self._explained():
            data: bytes = self._stream.read(size)
        return data

    def readinto(self, buffer: memoryview, /) -> int:
        with self._explained():
            return int(self._stream.readinto(buffer))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"{self._file.path} is not a whole {self._file.codec} file ({error}); fetch it again"
            raise ValueError(reason) from error


def text_chunks(
    file: LogFile, part: int, start: int, stop: int | None, chunk_bytes: int, offset: int, line: int = 0
) -> Iterator[Chunk]:
    """The lines that begin at byte `start` or later and before byte `stop`, in chunks of about `chunk_bytes`.

    Args:
        offset: where to begin, `start` or where a chunk began; `line` lines of the part come before.

    Raises:
        ValueError: the file is damaged, or is not what it was.
    """
    with opened(file) as source:
        if offset == start and start > 0:  # in the middle of a line, perhaps: go on after the first line feed from here
            _advance(source, file, start - 1)
            left_out, pending = _after_line_feed(source, chunk_bytes)
            offset = start - 1 + left_out
        else:
            _advance(source, file, offset)
            pending = _text(b"")
        while stop is None or offset < stop:
            # The chunk's own array, with room for the padding and for the end that the last line may lack.
            text = np.empty(PADDING + len(pending) + chunk_bytes + 9, dtype=np.uint8)
            text[:PADDING] = 0
            text[PADDING : PADDING + len(pending)] = pending
            num_read = source.readinto(memoryview(text)[PADDING + len(pending) : -9])
            data = text[PADDING : PADDING + len(pending) + num_read]
            if not num_read:
                _check_end(source, file, offset + len(data), stop)
            if not len(data):
                return
            end = _last_line_end(data) if num_read else len(data)
            if stop is not None and offset + len(data) >= stop:
                last = data[stop - 1 - offset :].tobytes().find(b"\n")
                end = stop - offset + last if last >= 0 else end
            if end == 0 and len(data) > LONGEST_LINE:
                yield Chunk(part, offset, line, padded(data[:LONGEST_LINE].tobytes() + b"\n"))
                left_out, pending = _after_line_feed(source, chunk_bytes)
                offset, line = offset + len(data) + left_out, line + 1
                continue
            pending = data[end:].copy()
            if end:
                stop_at = PADDING + end
                if text[stop_at - 1] != LINE_FEED:
                    text[stop_at] = LINE_FEED
                    stop_at += 1
                yield Chunk(part, offset, line, text[: stop_at + 8])
                line += count_bytes(text[PADDING:stop_at], LINE_FEED)
            offset += end


def stripe_bytes(file: LogFile, count: int) -> int:
    """Unpacked bytes of a stripe of a compressed file that `count` readers share.

    By the file's size alone, since all of them must come to the same, whatever their chunks; enough of them for each
    reader to get much the same.
    """
    return min(max(file.size // (8 * count), 1 << 12), 1 << 22)


def striped(chunks: Iterator[Chunk], index: int, count: int, width: int) -> Iterator[Chunk]:
    """Of the lines of some chunks, those that begin in every count-th stripe of `width` bytes, from the index-th on."""
    for chunk in chunks:
        data, line, begin = chunk.content[PADDING:-8].tobytes(), chunk.line, 0
        while begin < len(data):
            stripe = (chunk.offset + begin) // width
            stop = (stripe + 1) * width - chunk.offset  # a line that begins at `stop` or later is of another stripe
            end = len(data)
            if stop < end:
                end = data.index(b"\n", stop - 1) + 1
            lines = data[begin:end]
            if stripe % count == index:
                yield Chunk(chunk.part, chunk.offset + begin, line, padded(lines))
            line += lines.count(b"\n")
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
        _advance(source, file, begin)
        while left > 0 and (block := source.read(min(left, 1 << 22))):
            lines, left = lines + count_bytes(_text(block), LINE_FEED), left - len(block)
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
    beginning = first_lines(file, _SAMPLE_BYTES)
    return len(beginning) / max(beginning.count(b"\n"), 1)


def estimated_lines(file: LogFile) -> float:
    """Lines of a whole file, by the first ones."""
    if file.codec is None:
        return file.size / mean_line_bytes(file)
    pa = require("pyarrow")
    beginning = first_lines(file, _SAMPLE_BYTES)
    if len(beginning) < _SAMPLE_BYTES:
        return max(beginning.count(b"\n"), 1)
    packed = len(pa.compress(beginning, codec=file.codec, asbytes=True))
    return file.size / packed * max(beginning.count(b"\n"), 1)


def first_lines(file: LogFile, num_bytes: int = LONGEST_LINE) -> bytes:
    """The beginning of the text."""
    data = b""
    with opened(file) as source:
        while len(data) < num_bytes and (block := source.read(num_bytes - len(data))):
            data += block
    return data


def _check_end(source: _Bytes, file: LogFile, end: int, stop: int | None) -> None:
    """The text has ended at byte `end`: ValueError if it has not always done so."""
    file.check_size(os.fstat(source.fileno()).st_size)
    least = max(stop or 0, file.size if file.codec is None else 0)
    if end < least:
        raise ValueError(
            f"{file.path} has changed since it was opened first: its text ends at byte {end} and had at least {least}; "
            "start again"
        )


def _advance(source: _Bytes, file: LogFile, offset: int) -> None:
    if file.codec is None:
        source.seek(offset)  # type: ignore[attr-defined]
        return
    while offset > 0 and (block := source.read(min(offset, 1 << 22))):
        offset -= len(block)


def _after_line_feed(source: _Bytes, chunk_bytes: int) -> tuple[int, Array]:
    """Read past the next line feed: how many bytes that were, and what else was read."""
    left_out = 0
    while block := source.read(chunk_bytes):
        end = block.find(b"\n") + 1
        if end:
            return left_out + end, _text(block[end:])
        left_out += len(block)
    return left_out, _text(b"")


def _last_line_end(data: Array) -> int:
    """Where the last whole line ends; 0 if there is none."""
    tail = max(len(data) - LONGEST_LINE, 0)
    end = data[tail:].tobytes().rfind(b"\n") + 1
    if end or tail == 0:
        return tail + end if end else 0
    return data.tobytes().rfind(b"\n") + 1


def _text(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)
