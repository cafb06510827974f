"""Text files, plain or compressed, cut into chunks of whole lines.

With `quoted`, a line ends at a line feed outside quotes only. Nobody can tell that in the middle of a file, so such
files are read from their beginning.
"""

from __future__ import annotations

import csv
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tritonemb.data import files as cuts
from tritonemb.data.delimited import (
    LONGEST_LINE,
    CriteoFormat,
    CsvFormat,
    LineEnds,
    Parsed,
    check_criteo,
    count_lines,
    encoding_hint,
    lines_of,
    parse,
)
from tritonemb.data.files import CODECS, Chunk, LogFile, Part
from tritonemb.data.protocol import Shard
from tritonemb.data.schema import FIELDS, LogOptions, listed
from tritonemb.utils import LazyModule

pa: Any = LazyModule("pyarrow")

_SAMPLE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 22
_COUNTING = threading.Lock()  # several threads may ask for the same lines


class TextSource:
    """Text files of Criteo's format, or CSV with the same header; its methods are those of `ArrowSource`.

    Raises:
        ValueError: a schema of other columns; a file whose first line is bad, unless bad rows are skipped.
    """

    multi_hot: tuple[str, ...] = ()

    def __init__(self, files: tuple[LogFile, ...], options: LogOptions, labelled: bool = True) -> None:
        delimiter = delimiter_of(files[0], options)
        self._files, self._header_bytes = files, [0] * len(files)
        if delimiter:
            headers = [header_of(file, delimiter) for file in files]
            columns = headers[0][0]
            for file, (found, _) in zip(files, headers, strict=True):
                if found != columns:
                    raise ValueError(f"{file.path}: its header is not that of {files[0].path}: {listed(found)}")
            self._header_bytes = [num_bytes for _, num_bytes in headers]
            self.schema = options.schema.of(columns, str(files[0].path), labelled)
            self._form = CsvFormat(columns, self.schema, delimiter, options.quoted_newlines, labelled)
        else:
            check_criteo(options.schema, str(files[0].path))
            self.schema = options.schema.of(FIELDS, str(files[0].path))
            self._form = CriteoFormat(self.schema, labelled)
        self._lines_before: list[dict[int, int]] = [{0: 0} for _ in files]  # by byte
        for file, num_bytes in zip(files, self._header_bytes, strict=True):
            self._check_beginning(file, num_bytes, options.on_bad_row == "skip")

    def arrow_schema(self) -> Any:
        """The used columns, a `pyarrow.Schema`."""
        return self._form.arrow_schema()

    def sizes(self) -> list[int]:
        """Bytes of the texts; of a compressed file all of them are unpacked for it."""
        sizes = [file.size for file in self._files]
        for number, file in enumerate(self._files):
            if file.codec is not None:
                with opened(file) as source:
                    sizes[number] = sum(map(len, _blocks(source)))
        return sizes

    def estimated_rows(self, part: Part) -> float:
        """By the first lines of the file, which are taken to be as long, and as well compressed, as the others."""
        file, stop = self._files[part.file], part.stop
        beginning = first_bytes(file, _SAMPLE_BYTES)
        if stop is None:
            stop = file.size
            if file.codec is not None:
                packed = len(pa.compress(beginning, codec=file.codec, asbytes=True))
                stop = round(file.size / packed * len(beginning)) if len(beginning) == _SAMPLE_BYTES else len(beginning)
        size = max(stop - max(part.start, self._header_bytes[part.file]), 0)
        return size * max(beginning.count(b"\n"), 1) / len(beginning)

    def chunks(self, parts: tuple[Part, ...], chunk_bytes: int, first: int, offset: int, line: int) -> Iterator[Chunk]:
        quoted = self._form.quoted
        for number, part in enumerate(parts[first:], start=first):
            begin, lines = (offset, line) if number == first else (part.start, 0)
            header = self._header_bytes[part.file]
            if begin == part.start == 0 and header:
                begin, lines = header, 1
            file, (index, count) = self._files[part.file], part.stripes
            chunks = text_chunks(file, number, part.start, part.stop, chunk_bytes, begin, lines, quoted)
            if count > 1:
                # By the file's size alone, since all readers must come to the same; enough stripes for each of them.
                width = min(max(file.size // (8 * count), 1 << 12), 1 << 22)
                chunks = striped(chunks, index, count, width, quoted)
            yield from chunks

    def parse(self, chunk: Chunk) -> Parsed:
        return parse(self._form, chunk.content)

    def shard(self, parts: tuple[Part, ...], shard: Shard) -> tuple[Part, ...]:
        """Plain text is cut by bytes. Compressed text can not be entered in the middle: whole files are dealt out if
        there is one for each shard; else every shard unpacks all of them and keeps every count-th stripe."""
        packed = [part for part in parts if self._form.quoted or self._files[part.file].codec is not None]
        plain = [part for part in parts if part not in packed]
        sizes = [(self._files[part.file].size if part.stop is None else part.stop) - part.start for part in plain]
        pieces = cuts.even(plain, sizes, shard)
        if len(packed) >= shard[1]:
            pieces += cuts.whole(packed, [self._files[part.file].size for part in packed], shard)
        else:
            pieces += [replace(part, stripes=shard) for part in packed]
        return tuple(sorted(pieces, key=lambda part: (part.file, part.start)))

    def rows_before(self, part: Part) -> int:
        if self._form.quoted:  # the lines of a chunk are counted from the beginning of the file
            return 0
        with _COUNTING:
            known = self._lines_before[part.file]
            if part.start not in known:
                near = max(byte for byte in known if byte < part.start)
                known[part.start] = known[near] + lines_before(self._files[part.file], part.start, near)
            return known[part.start]

    def where(self, part: Part, chunk: Chunk, row: int) -> str:
        return f"{self._files[part.file].path}, line {self.rows_before(part) + chunk.line + row + 1}"

    def _check_beginning(self, file: LogFile, header_bytes: int, lenient: bool) -> None:
        beginning = first_bytes(file, LONGEST_LINE + header_bytes)
        if not beginning:
            raise ValueError(f"{file.path} is empty")
        if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(
                f"{file.path} does not look like text in ASCII or UTF-8: it begins with a mark of UTF-16. Convert it: "
                f"iconv -f UTF-16 -t UTF-8"
            )
        lines, numbers = lines_of(beginning[header_bytes:] + b"\n", self._form.quoted)
        found = next((place for place, line in enumerate(lines) if line.removesuffix(b"\r")), None)
        if lenient or found is None:
            return
        line = lines[found].removesuffix(b"\r")
        checked = parse(self._form, line)
        if len(checked.bad_rows):
            hint = "; a file with a header is read with a delimiter, or as it is if its name ends with .csv"
            is_header = isinstance(self._form, CriteoFormat) and re.match(rb'["A-Za-z_]', line)
            number = int(numbers[found]) + 1 + (header_bytes > 0)
            raise ValueError(f"{file.path}, line {number}: {checked.describe(0)[1]}{hint if is_header else ''}")


def delimiter_of(file: LogFile, options: LogOptions) -> str:
    """Of CSV; nothing for Criteo's format."""
    name = file.name.lower()
    for suffix in CODECS:
        name = name.removesuffix(suffix)
    return options.delimiter or ("," if name.endswith(".csv") else "")


def header_of(file: LogFile, delimiter: str) -> tuple[tuple[str, ...], int]:
    """The columns that a CSV file names, and the bytes of its first line; ValueError if that is no header."""
    line, end, _ = first_bytes(file).partition(b"\n")
    try:
        decoded = line.removesuffix(b"\r").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.path}, line 1: a header is text in UTF-8{encoding_hint(line)}") from error
    names = next(csv.reader([decoded], delimiter=delimiter), [])
    if len(names) < 2:
        raise ValueError(
            f"{file.path}, line 1: expected a header, names with {delimiter!r} between them, found {decoded[:60]!r}"
        )
    return tuple(names), len(line + end)


@contextmanager
def opened(file: LogFile) -> Iterator[Any]:
    """The unpacked bytes of a file, an `io.BufferedReader`; ValueError if it is damaged, or not what was found."""
    with file.open() as raw:
        if file.codec is None:
            yield io.BufferedReader(raw)
            return
        try:
            with pa.CompressedInputStream(raw, file.codec) as unpacked:
                yield io.BufferedReader(unpacked)
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

    It begins at `offset`, which is `start` or where a chunk began, after `line` lines of the part; with `quoted`, of
    the file. ValueError if the file is damaged, or is not what it was.
    """
    if quoted and offset == start > 0:
        for chunk in text_chunks(file, part, 0, stop, chunk_bytes, 0, 0, quoted):
            if chunk.offset >= start:
                yield chunk
            elif begin := LineEnds(chunk.content, quoted).after(start - 1 - chunk.offset):
                yield from _cut(chunk, begin, len(chunk.content))
        return
    with opened(file) as source:
        if offset == start and start > 0:  # in the middle of a line, perhaps: begin after the first line feed from here
            _skip(source, file, start - 1)
            offset = start - 1 + _skip_line(source)
        else:
            _skip(source, file, offset)
        pending = bytearray()
        while stop is None or offset < stop:
            # The chunk's own memory, written once: fresh pages are what reading costs most.
            data = bytearray(len(pending) + chunk_bytes)
            data[: len(pending)] = pending
            num_read = source.readinto(memoryview(data)[len(pending) :])
            del data[len(pending) + num_read :]
            if not num_read:
                _check_end(file, offset + len(data), stop)
                if not data:
                    return
                data += b"" if data.endswith(b"\n") else b"\n"
            ends = LineEnds(data, quoted)
            end = ends.last() if num_read else len(data)
            if stop is not None and offset + len(data) >= stop:
                end = ends.after(stop - 1 - offset) or end
            if end == 0 and len(data) > LONGEST_LINE and not quoted:
                yield Chunk(part, offset, line, data[: LONGEST_LINE + 1] + b"\n")
                offset, line, pending = offset + len(data) + _skip_line(source), line + 1, bytearray()
                continue
            pending = data[end:]
            if end:
                del data[end:]
                yield Chunk(part, offset, line, data)
                line += count_lines(data)
            offset += end


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
    """Lines that begin at byte `first` or later and before the first one that begins at byte `start` or later."""
    if start <= first:
        return 0
    lines = 0 if first else 1
    begin = max(first - 1, 0)
    with opened(file) as source:
        _skip(source, file, begin)
        return lines + sum(block.count(b"\n") for block in _blocks(source, start - 1 - begin))


def first_bytes(file: LogFile, num_bytes: int = LONGEST_LINE) -> bytes:
    """The beginning of the text."""
    with opened(file) as source:
        return b"".join(_blocks(source, num_bytes))


def _blocks(source: Any, left: int = 1 << 62) -> Iterator[bytes]:
    """What comes next, at most so many bytes."""
    while left > 0 and (block := source.read(min(left, _BLOCK_BYTES))):
        left -= len(block)
        yield block


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
    else:
        for _ in _blocks(source, offset):
            pass


def _skip_line(source: Any) -> int:
    """Read past the next line feed: how many bytes that were."""
    num_skipped = 0
    while piece := source.readline(_BLOCK_BYTES):
        num_skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return num_skipped
