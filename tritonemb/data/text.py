"""Text files, plain or compressed, divided into chunks of complete lines. With `quoted`, lines end outside quotes only,
which are known when reading from the beginning: such files are read serially."""

import csv
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from tritonemb.data import delimited
from tritonemb.data import files as cuts
from tritonemb.data.delimited import MAX_LINE_BYTES, CriteoFormat, CsvFormat, count_lines, encoding_hint, read_line
from tritonemb.data.files import Chunk, LogFile, Part, pa
from tritonemb.data.pipeline import LogSource, ParsedChunk
from tritonemb.data.protocol import WHOLE, Shard
from tritonemb.data.schema import FIELDS, LogOptions, Names
from tritonemb.utils import join_names

_SAMPLE_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 22
_BUFFER_BYTES = 1 << 17
_END = 1 << 62  # of any file
_COUNTING = threading.Lock()  # threads that count the same lines wait for one another


class TextSource(LogSource):
    """Text files in Criteo's format, or CSV files with the same header; the unit of their parts is a byte of the
    decompressed text. Raise ValueError if a file's first line is bad, unless bad rows are skipped, too."""

    def __init__(self, files: tuple[LogFile, ...], options: LogOptions, labelled: bool, extra_columns: Names) -> None:
        # Format and columns.
        name, location = files[0].name.lower(), str(files[0].path)
        delimiter = options.delimiter or ("," if re.search(r"\.csv(\.gz|\.zst)?$", name) else "")
        if not delimiter:  # Criteo's format
            delimited.check_criteo(options.schema, location)
        criteo = FIELDS
        if not (delimiter or labelled):  # the label may be present all the same
            line = first_bytes(files[0]).lstrip(b"\r\n").partition(b"\n")[0]
            criteo = FIELDS[line.count(b"\t") == len(FIELDS) - 2 :]
        headers = [read_header(file, delimiter) if delimiter else (criteo, 0) for file in files]
        columns = headers[0][0]
        for file, (header, _) in zip(files, headers, strict=True):
            if header != columns:
                raise ValueError(f"{file.path}: its header differs from that of {location}: {join_names(header)}")
        self.files, self._header_bytes = files, [num_bytes for _, num_bytes in headers]
        self.row_unit = 1 if options.split.kind() == "random" else None
        # Schema and parser.
        self.schema = options.schema.of(columns, location, labelled, extra_columns)
        options = replace(options, schema=self.schema, delimiter=delimiter)
        self.parser = (CsvFormat if delimiter else CriteoFormat)(columns, options, labelled, extra_columns)
        self.multi_hot, self.kinds = self.parser.multi_hot, self.parser.kinds
        for file, num_bytes in zip(files, self._header_bytes, strict=True):
            self._check_beginning(file, num_bytes, options.on_bad_row == "skip")

    def sizes(self) -> list[int]:
        """Return the bytes of the decompressed files; decompresses all of them."""
        sizes = []
        for file in self.files:
            with open_text(file) as source:
                sizes.append(source.seek(file.size if file.codec is None else _END))
        return sizes

    def estimated_rows(self, part: Part) -> float:
        """Estimate the rows of a part from the length and the compression ratio of the first lines of the file."""
        file, first_lines = self.files[part.file], first_bytes(self.files[part.file], _SAMPLE_BYTES)
        size: float = file.size
        if file.codec is not None:
            compressed_bytes = len(pa.compress(first_lines, codec=file.codec, asbytes=True))
            size = size / compressed_bytes * len(first_lines) if len(first_lines) == _SAMPLE_BYTES else len(first_lines)
        size = (size if part.stop is None else part.stop) - max(part.start, self._header_bytes[part.file])
        return max(size, 0) * max(first_lines.count(b"\n"), 1) / len(first_lines)

    def chunks(self, part: Part, number: int, chunk_bytes: int, offset: int, line: int) -> Iterator[Chunk]:
        """Yield chunks of lines that begin in one stripe of the file."""
        header_bytes, file, quoted = self._header_bytes[part.file], self.files[part.file], self.parser.quoted
        if offset == part.start == 0 and header_bytes:
            offset, line = header_bytes, count_before(file, header_bytes, quoted)[0]
        stop = _END if part.stop is None else part.stop
        shard_index, num_shards = part.stripes
        # The stripe width depends on the file size only, so that all shards agree; each shard has several stripes.
        width = min(max(file.size // (8 * num_shards), 1 << 12), 1 << 22)
        width = chunk_bytes if part.stripes == WHOLE else width
        with open_text(file) as source:
            if offset == part.start:
                offset = _seek_line_start(source, offset, quoted)
            else:
                source.seek(offset)
            row = 0 if self.row_unit is None else self._lines_and_rows_before(part.file, offset)[self.row_unit]
            while offset < stop:
                # Read the lines that begin in one stripe; skip them if it is of another shard.
                stripe = offset // width
                if not (data := _read_lines(source, min((stripe + 1) * width, stop) - offset, quoted)):
                    file.check_size()
                    if offset < (min_end := max(part.stop or 0, file.size if file.codec is None else 0)):
                        raise file.changed_error(f"its text ends at byte {offset} and had at least {min_end}")
                    return
                if stripe % num_shards == shard_index:
                    yield Chunk(number, offset, line, row, data)
                num_lines = count_lines(data)
                line += num_lines
                row += delimited.count_rows(data, quoted) if self.row_unit else num_lines
                offset = source.tell()

    def text_schema(self) -> Any:
        return self.parser.arrow_schema()

    def parse(self, chunk: Chunk) -> ParsedChunk:
        return delimited.parse(self.parser, chunk.rows)

    def shard(self, parts: tuple[Part, ...], shard: Shard) -> tuple[Part, ...]:
        """Return one shard of some parts. Plain text is divided by bytes. Compressed text is not seekable: whole files
        are assigned if there are enough; else every shard decompresses all of them and parses every count-th stripe."""
        unseekable = [part for part in parts if self.parser.quoted or self.files[part.file].codec is not None]
        seekable = [part for part in parts if part not in unseekable]
        sizes = [(self.files[part.file].size if part.stop is None else part.stop) - part.start for part in seekable]
        shard_parts = cuts.even_shard(seekable, sizes, shard)
        if len(unseekable) >= shard[1]:
            sizes = [self.files[part.file].size for part in unseekable]
            shard_parts += cuts.whole_file_shard(unseekable, sizes, shard)
        else:
            shard_parts += [replace(part, stripes=shard) for part in unseekable]
        return tuple(sorted(shard_parts, key=lambda part: (part.file, part.start)))

    def tail(self, part: Part) -> Part:
        if self.parser.quoted or (file := self.files[part.file]).codec is not None:
            return part
        return replace(part, start=max(part.start, file.size - _SAMPLE_BYTES))

    def location(self, part: Part, chunk: Chunk, line: int) -> str:
        lines_before = self._lines_and_rows_before(part.file, part.start)[0]
        return f"{self.files[part.file].path}, line {lines_before + chunk.line + line + 1}"

    def _lines_and_rows_before(self, number: int, start: int) -> tuple[int, int]:
        """Count lines and rows of a file before the first line that begins at byte `start` or later; cached."""
        with _COUNTING:
            return count_before(self.files[number], start, self.parser.quoted, self._header_bytes[number] > 0)

    def _check_beginning(self, file: LogFile, header_bytes: int, allow_bad: bool) -> None:
        # Read the first line after the header that is not blank.
        with open_text(file) as source:
            if not (beginning := source.peek(2)):
                raise ValueError(f"{file.path} is empty")
            if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ValueError(
                    f"{file.path} does not look like text in ASCII or UTF-8: it begins with a UTF-16 byte order mark. "
                    "Convert it: iconv -f UTF-16 -t UTF-8"
                )
            source.read(header_bytes)
            number = 1 + count_before(file, header_bytes, self.parser.quoted)[0]
            lines = enumerate(iter(partial(read_line, source, self.parser.quoted), None), number)
            line_number, line = next(entry for entry in lines if entry[1] not in (b"\n", b"\r\n"))
        parsed = delimited.parse(self.parser, line)
        if allow_bad or not len(parsed.bad_rows):
            return
        criteo = isinstance(self.parser, CriteoFormat)
        hint = "; for a file with a header, set a delimiter, or rename it to end with .csv"
        hint = hint if criteo and re.match(rb'["A-Za-z_]', line) else ""
        if criteo and b"\t" not in line:
            raise ValueError(
                f"{file.path} is not a log in a known format: Parquet (.parquet), CSV (.csv) or Criteo's text: "
                f"its line {line_number} has no tab{encoding_hint(line)}{hint}"
            )
        raise ValueError(f"{file.path}, line {line_number}: {parsed.describe(0)[1]}{hint}")


def read_header(file: LogFile, delimiter: str) -> tuple[tuple[str, ...], int]:
    """Read the header of a CSV file: the columns, and its number of bytes; raise ValueError if it is not a header.

    Blank lines before it are part of it.
    """
    beginning = first_bytes(file)
    line, _, rows = beginning.lstrip(b"\r\n").partition(b"\n")
    if b"\r" in line.removesuffix(b"\r"):
        raise ValueError(f"{file.path}: its lines end with carriage returns only; convert it to line feeds: mac2unix")
    try:
        decoded = line.removesuffix(b"\r").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.path}, line 1: the header must be text in UTF-8{encoding_hint(line)}") from error
    names = next(csv.reader([decoded], delimiter=delimiter), [])
    if not names or (len(names) == 1 and not {*",;|\t"}.isdisjoint(decoded)):  # one name may be all, for scoring
        raise ValueError(f"{file.path}, line 1: expected names separated by {delimiter!r}, found {decoded[:60]!r}")
    return tuple(names), len(beginning) - len(rows)


@contextmanager
def open_text(file: LogFile) -> Iterator[Any]:
    """Open a file's decompressed bytes, an `io.BufferedReader`; raise ValueError if it is damaged or has changed."""
    with file.open() as raw:
        if file.codec is None:
            yield io.BufferedReader(raw, _BUFFER_BYTES)
            return
        try:
            with pa.CompressedInputStream(raw, file.codec) as unpacked:
                yield io.BufferedReader(_ForwardStream(unpacked), _BUFFER_BYTES)
        except ConnectionError:  # a reader host does not answer; the file may be complete
            raise
        except OSError as error:
            raise ValueError(f"{file.path} is not a complete {file.codec} file ({error}); fetch it again") from error


class _ForwardStream(io.RawIOBase):
    """Decompressed stream with `tell`; `seek` moves forward by reading, and returns the offset reached."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._offset = stream, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_read: int = self._stream.readinto(buffer)
        self._offset += num_read
        return num_read

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        scratch = memoryview(bytearray(min(_BLOCK_BYTES, max(offset - self._offset, 0))))
        while self._offset < offset and self.readinto(scratch[: offset - self._offset]):
            pass
        return self._offset


@lru_cache(maxsize=1024)
def count_before(file: LogFile, start: int, quoted: bool = False, header: bool = False) -> tuple[int, int]:
    """Count the lines of a file before the first line that begins at byte `start` or later, and the rows among them."""
    lines, rows = 0, -1 if header and start else 0
    with open_text(file) as source:
        while (size := start - source.tell()) > 0 and (data := _read_lines(source, min(size, _BLOCK_BYTES), quoted)):
            lines, rows = lines + count_lines(data), rows + delimited.count_rows(data, quoted)
    return lines, rows


def first_bytes(file: LogFile, num_bytes: int = MAX_LINE_BYTES) -> bytes:
    with open_text(file) as source:
        return bytes(source.read(num_bytes))


def _read_lines(source: Any, num_bytes: int, quoted: bool) -> bytearray:
    """Read the complete lines that begin in the next `num_bytes`."""
    if quoted:
        data, stop = bytearray(), source.tell() + num_bytes
        while (remaining := stop - source.tell()) > 0:
            num_complete = delimited.complete_line_bytes(source.peek()[:remaining])
            if not (lines := source.read(num_complete) if num_complete else read_line(source, quoted)):
                break
            data += lines
        return data
    data = bytearray(num_bytes)  # the chunk's memory, written once: page faults of fresh memory cost most of the time
    del data[source.readinto(data) :]
    if data and not data.endswith(b"\n"):
        data += read_line(source)
    return data


def _seek_line_start(source: Any, start: int, quoted: bool) -> int:
    """Seek the first line that begins at byte `start` or later; return its offset."""
    if quoted:
        while (remaining := start - source.tell()) > 0 and _read_lines(source, min(remaining, _BLOCK_BYTES), quoted):
            pass
    elif start > 0:
        source.seek(start - 1)
        read_line(source)
    return int(source.tell())
