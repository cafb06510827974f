"""Lines of text as columns, parsed by `pyarrow.csv`: Criteo's format, and CSV with a header.

Criteo's display-advertising log (Kaggle's `train.txt`, the Terabyte `day_*` files): a line has 40 tab-separated fields:
the label, 0 or 1; 13 integers, `-?[0-9]{1,18}`; 26 categories of up to 8 hexadecimal digits in either case. An integer
or category may be empty: a missing value. Nothing else is accepted: no blanks around a value, no plus sign, no header.

CSV: the first line of each file names the columns. A field may stand in quotes, in which a quote is written twice. An
empty field is a missing value.

In both, a line ends with a line feed, with or without a carriage return before it, or with the file; a line of no
characters is none. Whether a line is good depends on nothing but the line.
"""

from __future__ import annotations

import binascii
import csv
import io
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from tritonemb.data import splits, text
from tritonemb.data.arrow import Checked, Chunk, Sink, Values, Wrong, all_good, check_single, missing_of, read_columns
from tritonemb.data.files import CODECS, LogFile
from tritonemb.data.schema import CATEGORIES, FIELDS, INTEGERS, LABEL, Schema, listed, wrong_value
from tritonemb.data.source import Share
from tritonemb.data.splits import LogOptions, Part
from tritonemb.extras import require

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 1 << 20  # that pyarrow parses at a time: they stay in the processor's cache
_COUNTING = threading.Lock()  # several threads may ask for the same lines
_EXPECTED = (
    (rb"[01]", "0 or 1"),
    *((rb"(?:-?[0-9]{1,18})?", "an integer or nothing"),) * len(INTEGERS),
    *((rb"[0-9a-fA-F]{0,8}", "up to 8 hexadecimal digits or nothing"),) * len(CATEGORIES),
)


@dataclass(frozen=True)
class Columns:
    """The columns of some lines, and what is wrong in them."""

    num_rows: int
    values: dict[str, Values]
    wrong: list[Wrong]


class Format(Protocol):
    """How a line becomes columns.

    Attributes:
        columns: the fields of a line.
        quoted: whether fields in quotes may contain line ends.
    """

    columns: tuple[str, ...]
    quoted: bool

    def arrow_types(self) -> dict[str, Any]:
        """The smallest `pyarrow` types that hold the columns."""
        ...

    def read(self, lines: bytes, accepted: bool = False) -> Columns | None:
        """The columns of some lines; None if one of them is not acceptable, or perhaps. Blank lines are left out.

        Args:
            accepted: all of the lines are acceptable.
        """
        ...

    def accepts(self, lines: list[bytes]) -> list[bool]:
        """Which lines can be read; what `wrong` of their columns says is another matter."""
        ...

    def problem(self, line: bytes) -> tuple[str, str]:
        """Reason and message for a bad line, without its end."""
        ...


def parse(form: Format, data: bytes, sink: Sink) -> Checked:
    """Check some lines and hand the columns of all that can be read to the sink.

    All lines are parsed at once. If one of them is not acceptable, each is looked at.
    """
    if not data.endswith(b"\n"):
        data += b"\n"
    if not form.quoted and b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    plain = form.quoted or (b"\r" not in data and not _has_long_line(data))
    found = form.read(data) if plain else None
    if found is not None and not form.quoted and found.num_rows == data.count(b"\n"):
        rows = numbers = np.arange(found.num_rows)
        good = all_good(found.wrong, found.num_rows)
        lines = [] if good.all() else _lines(data, form.quoted)[0]
    else:
        lines, numbers = _lines(data, form.quoted)
        rows = numbers
        if found is None or found.num_rows != len(lines):
            accepted = np.array(form.accepts(lines), dtype=bool)
            rows = numbers[accepted]
            readable = [line + b"\n" for line, fits in zip(lines, accepted, strict=True) if fits]
            found = form.read(b"".join(readable), accepted=True)
            assert found is not None
            assert found.num_rows == len(rows)
        good = all_good(found.wrong, found.num_rows)
    for name, values in found.values.items():
        sink(name, values)
    bad_rows = np.setdiff1d(numbers, rows[good], assume_unique=True) if len(lines) else numbers[:0]

    def describe(number: int) -> tuple[str, str]:
        return form.problem(lines[int(np.searchsorted(numbers, bad_rows[number]))])

    return Checked(None if good.all() else good, rows, bad_rows, describe)


def _lines(data: bytes, quoted: bool) -> tuple[list[bytes], Array]:
    """The lines that are not blank, without their ends, and the number of each."""
    if not quoted:
        lines = data[:-1].split(b"\n")
        numbers = np.arange(len(lines))
    else:
        ends = text.quoted_ends(data)
        starts = np.concatenate([[0], ends])
        starts = starts[starts < len(data)]
        stops = np.append(starts[1:], len(data))
        lines = [
            data[start:stop].removesuffix(b"\n").removesuffix(b"\r") for start, stop in zip(starts, stops, strict=True)
        ]
        numbers = np.searchsorted(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")), starts)
    kept = np.array([bool(line) for line in lines], dtype=bool)
    return [line for line in lines if line], numbers[kept]


def _has_long_line(data: bytes) -> bool:
    begin = 0
    while len(data) - begin > text.LONGEST_LINE:
        end = data.rfind(b"\n", begin, begin + text.LONGEST_LINE) + 1
        if not end:
            return True
        begin = end
    return False


def _read_csv(
    lines: bytes, columns: tuple[str, ...], types: dict[str, Any], delimiter: str, quote: bool, quoted: bool
) -> Any:
    """The columns of `types`, a `pyarrow.Table`; None if the lines have another number of fields, or other values."""
    pa, arrow_csv = require("pyarrow"), require("pyarrow.csv")
    if not lines:
        return pa.schema(list(types.items())).empty_table()
    try:
        return arrow_csv.read_csv(
            pa.BufferReader(lines),
            arrow_csv.ReadOptions(column_names=columns, block_size=BLOCK_BYTES, use_threads=False),
            arrow_csv.ParseOptions(
                delimiter=delimiter, quote_char='"' if quote else False, double_quote=quote, newlines_in_values=quoted
            ),
            arrow_csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=True
            ),
        )
    except pa.ArrowInvalid:
        return None


class CriteoFormat:
    """Criteo's. The label is int64, integers int64, categories uint32.

    Args:
        labelled: whether lines begin with the label; else they have 39 fields, as those of Criteo's test.txt.
    """

    quoted = False

    def __init__(self, labelled: bool = True) -> None:
        pa = require("pyarrow")
        self.columns = FIELDS if labelled else FIELDS[1:]
        self._rules = _EXPECTED[-len(self.columns) :]
        self._line = re.compile(rb"\t".join(pattern for pattern, _ in self._rules))
        self._types = {name: pa.int64() if name in INTEGERS else pa.binary() for name in self.columns}

    def arrow_types(self) -> dict[str, Any]:
        pa = require("pyarrow")
        kinds = {LABEL: pa.int8()} | dict.fromkeys(CATEGORIES, pa.uint32())
        return {name: kinds.get(name, pa.int64()) for name in self.columns}

    def read(self, lines: bytes, accepted: bool = False) -> Columns | None:
        """pyarrow also takes blanks, hexadecimal integers, and more than 18 digits if the first ones are zeros. All of
        these make a line longer than its values have to be, but for hexadecimal integers."""
        table = _read_csv(lines, self.columns, self._types, "\t", False, False)
        if table is None or b"x" in lines or b"X" in lines:
            return None
        values, num_bytes = {}, 0
        for name in self.columns:
            array = table.column(name).combine_chunks()
            read = _label if name == LABEL else _integers if name in INTEGERS else hexadecimal
            column = read(array)
            if column is None:
                return None
            values[name], size = column
            num_bytes += size
        delimiters = (len(self.columns) - 1) * table.num_rows + lines.count(b"\n")
        if not accepted and num_bytes != len(lines) - delimiters:
            return None
        return Columns(table.num_rows, values, [])

    def accepts(self, lines: list[bytes]) -> list[bool]:
        return [self._line.fullmatch(line) is not None for line in lines]

    def problem(self, line: bytes) -> tuple[str, str]:
        fields, names = line.split(b"\t"), self.columns
        if len(fields) != len(names):
            unlabelled = names is FIELDS and len(fields) == len(FIELDS) - 1
            hint = " (Criteo's test.txt has no labels; use train.txt)" if unlabelled else ""
            message = f"expected {len(names)} tab-separated fields, found {len(fields)}{hint}"
            return f"not {len(names)} fields", message + _encoding_hint(line)
        for place, (name, value, (pattern, expected)) in enumerate(zip(names, fields, self._rules, strict=True), 1):
            if not re.fullmatch(pattern, value):
                reason = f"field {place} ({name}) is not {expected}"
                return reason, wrong_value(place, name, value, expected, _encoding_hint(line))
        raise AssertionError(f"{line!r} is a good line")


def _label(array: Any) -> tuple[Values, int] | None:
    data, lengths = _bytes_of(array)
    if (lengths != 1).any() or ((data - np.uint8(ord("0"))) > 1).any():
        return None
    return Values((data - np.uint8(ord("0"))).astype(np.int64)), len(data)


def _integers(array: Any) -> tuple[Values, int] | None:
    """The values, and the number of characters that write them if none is superfluous."""
    missing = missing_of(array)
    numbers = require("pyarrow.compute").fill_null(array, 0).to_numpy(zero_copy_only=False)
    largest = max(int(numbers.max(initial=0)), -int(numbers.min(initial=0)))
    if largest >= 10**18:
        return None
    size, bound = len(array) - array.null_count, 10
    magnitudes = np.abs(numbers)
    while bound <= largest:
        size += int(np.count_nonzero(magnitudes >= bound))
        bound *= 10
    return Values(numbers, missing), size + int(np.count_nonzero(numbers < 0))


def hexadecimal(array: Any) -> tuple[Values, int] | None:
    """uint32 of a `pyarrow` array of up to 8 hexadecimal digits each, and their number; None if there are others."""
    data, lengths = _bytes_of(array)
    missing, full = lengths == 0, lengths == 8
    if (lengths > 8).any():
        return None
    if not (full | missing).all():  # zeros before the digits
        ends = np.cumsum(lengths)
        digits = np.full(8 * len(lengths), ord("0"), dtype=np.uint8)
        digits[np.repeat(8 * np.arange(1, len(lengths) + 1) - ends, lengths) + np.arange(len(data))] = data
        data_of_all, full = digits, np.ones(len(lengths), dtype=bool)
    else:
        data_of_all = data
    try:
        found = np.frombuffer(binascii.unhexlify(data_of_all), ">u4")
    except binascii.Error:
        return None
    numbers = np.zeros(len(lengths), dtype=np.uint32)
    numbers[full] = found
    return Values(numbers, missing if missing.any() else None), len(data)


def _bytes_of(array: Any) -> tuple[Array, Array]:
    """All characters of a `pyarrow` array of binary, uint8, and the length of each value, 0 for nulls."""
    if not len(array):
        return np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.int64)
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    found = np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return found[ends[0] : ends[-1]], np.diff(ends).astype(np.int64)


def _encoding_hint(line: bytes) -> str:
    if line.startswith(b"\xef\xbb\xbf"):
        return "; the file begins with a UTF-8 byte order mark: remove it"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:1000]:
        return "; this does not look like text in ASCII or UTF-8, more like UTF-16 or a binary file"
    return ""


class CsvFormat:
    """CSV with these columns. The label and dense columns are float64, sparse ones int64 or strings.

    Args:
        schema: with all columns filled in.
    """

    def __init__(
        self, columns: tuple[str, ...], schema: Schema, delimiter: str, quoted: bool, labelled: bool = True
    ) -> None:
        pa = require("pyarrow")
        self.columns, self.quoted = columns, quoted
        self._schema, self._delimiter, self._labelled = schema, delimiter, labelled
        self._types = dict.fromkeys(((schema.label,) * labelled) + schema.dense, pa.float64())
        self._types |= {name: pa.int64() if name in schema.integers else pa.string() for name in schema.sparse}
        self._expected = dict.fromkeys(schema.dense, "a number or nothing") | {schema.label: "0 or 1"}
        for name in schema.sparse:
            self._expected[name] = "an integer or nothing" if name in schema.integers else "text in UTF-8"

    def arrow_types(self) -> dict[str, Any]:
        return self._types | ({self._schema.label: require("pyarrow").int8()} if self._labelled else {})

    def read(self, lines: bytes, accepted: bool = False) -> Columns | None:
        """A quote that is not closed would reach as far as the row of missing values that is put behind the lines."""
        last = self._delimiter * (len(self.columns) - 1) + "\n"
        table = _read_csv(lines + last.encode(), self.columns, self._types, self._delimiter, True, self.quoted)
        if table is None:
            return None
        values: dict[str, Values] = {}
        table = table.slice(0, table.num_rows - 1)
        wrong = read_columns(table, self._schema, values.__setitem__, self._labelled)
        return Columns(table.num_rows, values, wrong)

    def accepts(self, lines: list[bytes]) -> list[bool]:
        """By halves, so that the many lines around a bad one are parsed together."""
        if self._accepts_all(lines):
            return [True] * len(lines)
        if len(lines) == 1:
            return [False]
        half = len(lines) // 2
        return self.accepts(lines[:half]) + self.accepts(lines[half:])

    def problem(self, line: bytes) -> tuple[str, str]:
        if len(line) > text.LONGEST_LINE:
            return "too long", f"the line has more than {text.LONGEST_LINE:,} characters"
        if b"\r" in line and not self.quoted:
            return "carriage return", "a carriage return stands inside the line"
        fields = next(
            csv.reader(io.StringIO(line.decode(errors="backslashreplace"), newline=""), delimiter=self._delimiter)
        )
        hint = "; a quote is not closed in this line" if line.count(b'"') % 2 else _encoding_hint(line)
        if len(fields) != len(self.columns):
            expected = f"expected {len(self.columns)} fields with {self._delimiter!r} between them"
            return f"not {len(self.columns)} fields", f"{expected}, found {len(fields)}{hint}"
        found = self.read(line + b"\n") if self._accepts_all([line]) else None
        wrong = {name: expected for name, expected, _ in found.wrong} if found is not None else {}
        for place, (name, value) in enumerate(zip(self.columns, fields, strict=True), 1):
            if needed := wrong.get(name) or self._unreadable(line, name):
                return f"field {place} ({name}) is not {needed}", wrong_value(place, name, value, needed, hint)
        return "quote", "a quote is not closed in this line"

    def _accepts_all(self, lines: list[bytes]) -> bool:
        if any(len(line) > text.LONGEST_LINE or (b"\r" in line and not self.quoted) for line in lines):
            return False
        found = self.read(b"".join(line + b"\n" for line in lines))
        return found is not None and found.num_rows == len(lines)

    def _unreadable(self, line: bytes, name: str) -> str | None:
        """What a column should be that can not be read."""
        if name not in self._types:
            return None
        types = {name: self._types[name]}
        table = _read_csv(line + b"\n", self.columns, types, self._delimiter, True, self.quoted)
        return self._expected[name] if table is None else None


class TextSource:
    """Text files, plain or compressed: of Criteo's format, or CSV with the same header; see `Source`.

    Raises:
        ValueError: a schema of other columns; a file whose first line is bad, unless bad rows are skipped.
    """

    def __init__(self, files: tuple[LogFile, ...], options: LogOptions, labelled: bool = True) -> None:
        schema, delimiter = options.schema, delimiter_of(files[0], options)
        self.multi_hot: tuple[str, ...] = ()
        self._files = files
        self._header_bytes = [0] * len(files)
        self._form: Format
        if delimiter:
            headers = [header_of(file, delimiter) for file in files]
            columns = headers[0][0]
            for file, (found, _) in zip(files, headers, strict=True):
                if found != columns:
                    raise ValueError(f"{file.path}: its header is not that of {files[0].path}: {listed(found)}")
            self._header_bytes = [num_bytes for _, num_bytes in headers]
            self.schema = schema.of(columns, str(files[0].path), labelled)
            for name in (*(self.schema.label,) * labelled, *self.schema.dense, *self.schema.sparse):
                check_single(list(columns), name, str(files[0].path))
            self._form = CsvFormat(columns, self.schema, delimiter, options.quoted_newlines, labelled)
        else:
            _check_criteo(schema, files[0])
            self.schema = schema.of(FIELDS, str(files[0].path))
            self._form = CriteoFormat(labelled)
        self._lines_before: list[dict[int, int]] = [{0: 0} for _ in files]  # by byte
        for file, num_bytes in zip(files, self._header_bytes, strict=True):
            self._check_beginning(file, num_bytes, options.on_bad_row == "skip")

    def arrow_schema(self) -> Any:
        """The used columns, a `pyarrow.Schema`."""
        kinds = self._form.arrow_types()
        names = (self.schema.label, *self.schema.dense, *self.schema.sparse)
        return require("pyarrow").schema([(name, kinds[name]) for name in names if name in kinds])

    def sizes(self) -> list[int]:
        return [text.unpacked_size(file) for file in self._files]

    def num_rows(self, part: Part) -> int | None:
        return None

    def estimated_rows(self, part: Part) -> float:
        """By the first lines of the file, which are taken to be as long, and as well compressed, as the others."""
        file = self._files[part.file]
        line = text.mean_line_bytes(file)
        stop = text.estimated_lines(file) if part.stop is None else part.stop / line
        return max(stop - max(part.start, self._header_bytes[part.file]) / line, 0.0)

    def chunks(self, parts: tuple[Part, ...], chunk_bytes: int, first: int, offset: int, line: int) -> Iterator[Chunk]:
        quoted = self._form.quoted
        for number, part in enumerate(parts[first:], start=first):
            begin, lines = (offset, line) if number == first else (part.start, 0)
            header = self._header_bytes[part.file]
            if begin == part.start == 0 and header:
                begin, lines = header, 1
            file, (index, count) = self._files[part.file], part.stripes
            chunks = text.text_chunks(file, number, part.start, part.stop, chunk_bytes, begin, lines, quoted)
            if count > 1:
                chunks = text.striped(chunks, index, count, text.stripe_bytes(file, count), quoted)
            yield from chunks

    def parse(self, chunk: Chunk, sink: Sink) -> Checked:
        return parse(self._form, chunk.content, sink)

    def share(self, parts: tuple[Part, ...], share: Share) -> tuple[Part, ...]:
        """Plain text is cut by bytes. Compressed text can not be entered in the middle: whole files are dealt out if
        there is one for each share; else every share unpacks all of them and keeps every count-th stripe."""
        serial = [self._form.quoted or self._files[part.file].codec is not None for part in parts]
        plain = [part for part, is_serial in zip(parts, serial, strict=True) if not is_serial]
        packed = [part for part, is_serial in zip(parts, serial, strict=True) if is_serial]
        sizes = [(self._files[part.file].size if part.stop is None else part.stop) - part.start for part in plain]
        pieces = splits.even(plain, sizes, share)
        if len(packed) >= share[1]:
            pieces += splits.whole(packed, [self._files[part.file].size for part in packed], share)
        else:
            pieces += [replace(part, stripes=share) for part in packed]
        return tuple(sorted(pieces, key=lambda part: (part.file, part.start)))

    def rows_before(self, part: Part) -> int:
        if self._form.quoted:  # the lines of a chunk are counted from the beginning of the file
            return 0
        with _COUNTING:
            known = self._lines_before[part.file]
            if part.start not in known:
                near = max(byte for byte in known if byte < part.start)
                known[part.start] = known[near] + text.lines_before(self._files[part.file], part.start, near)
            return known[part.start]

    def where(self, part: Part, chunk: Chunk, row: int) -> str:
        return f"{self._files[part.file].path}, line {self.rows_before(part) + chunk.line + row + 1}"

    def _check_beginning(self, file: LogFile, header_bytes: int, lenient: bool) -> None:
        beginning = text.first_bytes(file, text.LONGEST_LINE + header_bytes)
        if not beginning:
            raise ValueError(f"{file.path} is empty")
        if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(
                f"{file.path} does not look like text in ASCII or UTF-8: it begins with a mark of UTF-16. Convert it: "
                f"iconv -f UTF-16 -t UTF-8"
            )
        if lenient:
            return
        lines, numbers = _lines(beginning[header_bytes:] + b"\n", self._form.quoted)
        if (lines and (line := lines[0].removesuffix(b"\r"))) or ((lines := lines[1:]) and (line := lines[0])):
            checked = parse(self._form, line, lambda name, values: None)
            if len(checked.bad_rows):
                hint = _header_hint(line) if isinstance(self._form, CriteoFormat) else ""
                number = int(numbers[-len(lines)]) + 1 + (header_bytes > 0)
                raise ValueError(f"{file.path}, line {number}: {checked.describe(0)[1]}{hint}")


def delimiter_of(file: LogFile, options: LogOptions) -> str:
    """Of CSV; nothing for Criteo's format."""
    name = file.name.lower()
    for suffix in CODECS:
        name = name.removesuffix(suffix)
    return options.delimiter or ("," if name.endswith(".csv") else "")


def header_of(file: LogFile, delimiter: str) -> tuple[tuple[str, ...], int]:
    """The columns that a CSV file names, and the bytes of its first line.

    Raises:
        ValueError: its first line is no header.
    """
    line, end, _ = text.first_bytes(file).partition(b"\n")
    try:
        decoded = line.removesuffix(b"\r").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.path}, line 1: a header is text in UTF-8{_encoding_hint(line)}") from error
    names = next(csv.reader([decoded], delimiter=delimiter), [])
    if len(names) < 2:
        raise ValueError(
            f"{file.path}, line 1: expected a header, names with {delimiter!r} between them, found {decoded[:60]!r}"
        )
    return tuple(names), len(line + end)


def _check_criteo(schema: Schema, file: LogFile) -> None:
    """ValueError if a schema has other columns than Criteo's, or has them as what they are not."""
    for part, names in (("dense", schema.dense), ("sparse", schema.sparse)):
        fitting = INTEGERS if part == "dense" else INTEGERS + CATEGORIES
        if wrong := [name for name in names if name in FIELDS and name not in fitting]:
            kind = "the label" if wrong[0] == LABEL else "a category"
            raise ValueError(f"schema: {wrong[0]!r} of Criteo's TSV can not be {part}: it is {kind}")
    if schema.label not in ("", LABEL):
        raise ValueError(
            f"{file.path}: without a header, text files have Criteo's format, whose label is {LABEL!r} and not "
            f"{schema.label!r}; its columns: {listed(FIELDS)}. Files with a header are read with a delimiter, or as "
            "they are if their names end with .csv"
        )


def _header_hint(line: bytes) -> str:
    if re.match(rb'["A-Za-z_]', line):
        return "; a file with a header is read with a delimiter, or as it is if its name ends with .csv"
    return ""
