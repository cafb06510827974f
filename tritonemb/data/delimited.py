"""Lines of text as Arrow columns: CSV, parsed by `pyarrow.csv`, and Criteo's format, by a compiled loop.

A line ends with a line feed, with or without a carriage return before it, or at the end of the file; empty lines are
skipped. The validity of a line depends on this line only. An empty field is a missing value. A field of CSV may be
quoted; a quote in it is doubled. Criteo's display-advertising log has 40 tab-separated fields per line: the label, 0 or
1; 13 integers, `-?[0-9]{1,18}`; 26 categories of up to 8 hexadecimal digits in either case. It has no blanks around
values, no plus signs and no header.
"""

import csv
import io
import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tritonemb.data.batch import Array
from tritonemb.data.encode import arrow_array, find_invalid_values, parse_criteo, to_integers, valid_row_mask
from tritonemb.data.files import arrow_csv, compute, pa
from tritonemb.data.pipeline import ParsedChunk
from tritonemb.data.schema import CATEGORIES, FIELDS, INTEGERS, LABEL, LogOptions, Names, Schema, invalid_value_message
from tritonemb.utils import join_names

Text = bytes | bytearray

MAX_LINE_BYTES = 1 << 16  # bytes; a longer line is bad and is truncated
BLOCK_BYTES = 1 << 20  # bytes that pyarrow parses at a time; a block fits the processor's cache

_RULES = (
    (rb"[01]", "0 or 1"),
    *((rb"(?:-?[0-9]{1,18})?", "an integer or nothing"),) * len(INTEGERS),
    *((rb"[0-9a-fA-F]{0,8}", "up to 8 hexadecimal digits or nothing"),) * len(CATEGORIES),
)
_EXPECTED = {"double": "a number or nothing", "int64": "an integer or nothing", "string": "text in UTF-8"}


class CsvFormat:
    """CSV with these columns: label and dense columns as float64, sparse ones as int64, strings, or lists of them,
    `extra_columns` as strings. With `quoted`, quoted fields may contain line ends."""

    quote = True

    def __init__(self, columns: Names, options: LogOptions, labelled: bool, extra_columns: Names) -> None:
        # Columns, and how fields are delimited.
        schema, rule, self.columns, self.labelled = options.schema, options.split, columns, labelled
        self.schema, self.quoted, self._delimiter = schema, options.quoted_newlines, options.delimiter
        self.time, self._separator = rule.time_column, options.list_separator
        self.multi_hot = (schema.lists or schema.sparse) if self._separator else ()
        self.kinds = {name: "integers" if name in schema.integers else "strings" for name in schema.sparse}
        # Arrow types of the columns to read; times are integers if the bounds of the split are.
        numbers = *schema.columns(labelled), *{*schema.label_columns, schema.weight}.intersection(extra_columns)
        self._types = dict.fromkeys(extra_columns, pa.string()) | dict.fromkeys(numbers, pa.float64())
        types = {name: pa.int64() if kind == "integers" else pa.string() for name, kind in self.kinds.items()}
        self._types |= {name: pa.list_(kind) if name in self.multi_hot else kind for name, kind in types.items()}
        bound = rule.test_from or rule.validation_from or ""
        if self._types.get(self.time) == pa.string() and re.fullmatch("-?[0-9]+", bound):
            self._types[self.time] = pa.int64()

    def arrow_schema(self) -> Any:
        """Return the columns of the schema and the time column in their smallest types, a `pyarrow.Schema`."""
        names = dict.fromkeys((*self.schema.columns(self.labelled), *filter(None, [self.time])))
        fields = [self.read(b"").schema.field(name) for name in names]
        labels = self.schema.label_columns
        return pa.schema([field.with_type(pa.int8()) if field.name in labels else field for field in fields])

    def read(self, lines: Text) -> Any:
        """Parse lines, none blank, to a `pyarrow.RecordBatch`; None if one may be bad."""
        # An unclosed quote would swallow this row of missing values.
        guard = (self._delimiter * (len(self.columns) - 1) or '""').encode() + b"\n" if b'"' in lines else b""
        batch = self._parse(lines + guard if guard else lines, self._types)
        return batch if batch is None else batch.slice(0, batch.num_rows - bool(guard))

    def accepts(self, lines: list[bytes]) -> list[bool]:
        """Return which lines can be parsed; bisects, so that valid lines around a bad one are parsed at once."""
        text = b"".join(line + b"\n" for line in lines)
        unquoted = not any(len(line) > MAX_LINE_BYTES or b"\r" in line or b"\n" in line for line in lines)
        if (unquoted and len(lines) == 1) or (self.is_regular(text) if self.quoted else unquoted):
            batch = self.read(text)
            if batch is not None and batch.num_rows == len(lines):
                return [True] * len(lines)
        if len(lines) == 1:
            return [False]
        half = len(lines) // 2
        return self.accepts(lines[:half]) + self.accepts(lines[half:])

    def is_regular(self, text: Text) -> bool:
        """Return whether each line is one row in any context: none is too long, quotes enclose fields or are doubled
        inside one, and carriage returns are in quotes or before line feeds."""
        if complete_line_bytes(text) < len(text):
            return False
        # The byte outside each quote must end a field or double the quote.
        data = np.frombuffer(b"\n" + text, np.uint8)
        in_quotes, quote_positions = np.logical_xor.accumulate(data == ord('"')), np.flatnonzero(data == ord('"'))
        outer_bytes = data[np.where(in_quotes[quote_positions], quote_positions - 1, quote_positions + 1)]
        bytes_after_returns = data[np.flatnonzero((data == ord("\r")) & ~in_quotes) + 1]
        allowed_bytes = np.frombuffer(f'{self._delimiter}\r\n"'.encode(), np.uint8)
        return bool(np.isin(outer_bytes, allowed_bytes).all() and (bytes_after_returns == ord("\n")).all())

    def problem(self, line: bytes) -> tuple[str, str]:
        """Return reason and message for a bad line, passed without its end."""
        advice = "" if self.quoted else "; set quoted_newlines for line ends in fields"
        open_quote = f"a quote is not closed in this line{advice}"
        hint = f"; {open_quote}" if self.quote and line.count(b'"') % 2 else encoding_hint(line)
        if self.quote and len(line) > MAX_LINE_BYTES:
            return "too long", f"the line has more than {MAX_LINE_BYTES:,} characters"
        if self.quote and b"\r" in (re.sub(rb'"[^"]*"', b"", line) if self.quoted else line):
            return "carriage return", "the line contains a carriage return"
        fields, count = self._fields(line), len(self.columns)
        if len(fields) != count:
            if not self.quote and self.labelled and len(fields) == count - 1:
                hint = f" (Criteo's test.txt has no labels; use train.txt){hint}"
            delimiter = {"\t": "tab", ",": "comma"}.get(self._delimiter, repr(self._delimiter))
            return f"not {count} fields", f"expected {count} {delimiter}-separated fields, found {len(fields)}{hint}"
        for number, (name, value) in enumerate(zip(self.columns, fields, strict=True), 1):
            if expected := self._expected(line, number, value):
                message = invalid_value_message(number, name, value, expected, hint)
                return f"field {number} ({name}) is not {expected}", message
        if self.schema.labels and not hint:
            return "no label", f"expected 0 or 1 in at least one of {join_names(self.schema.labels)}"
        return "quote", open_quote

    def _fields(self, line: bytes) -> list[Any]:
        text = io.StringIO(line.decode(errors="backslashreplace"), newline="")
        return next(csv.reader(text, delimiter=self._delimiter))

    def _expected(self, line: bytes, field_number: int, value: Any) -> str | None:
        if (name := self.columns[field_number - 1]) not in self._types:
            return None
        if (parsed := self._parse(line + b"\n", {name: self._types[name]})) is None:
            kind = self._types[name].value_type if name in self.multi_hot else self._types[name]
            if str(kind) == "int64" and re.fullmatch("-?[0-9]{19,}", value):
                return "an integer of 64 bits, or nothing; for larger ones, train without this column in integers"
            return "0 or 1" if self.labelled and name in self.schema.label_columns else _EXPECTED[str(kind)]
        invalid_values = find_invalid_values(parsed, self.schema, self.labelled)
        return invalid_values[0][1] if invalid_values else None

    def _parse(self, lines: Text, types: dict[str, Any]) -> Any:
        if not lines:
            return pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in types.values()], list(types))
        quote = '"' if self.quote else False
        # pyarrow loses a line feed in quotes behind a carriage return that ends a block (apache/arrow#51368).
        size = len(lines) if self.quoted else BLOCK_BYTES
        read = arrow_csv.ReadOptions(column_names=self.columns, block_size=size, use_threads=False)
        parse = arrow_csv.ParseOptions(delimiter=self._delimiter, quote_char=quote, newlines_in_values=self.quoted)
        convert = arrow_csv.ConvertOptions(
            column_types={name: pa.string() if name in self.multi_hot else kind for name, kind in types.items()},
            include_columns=list(types), null_values=[""], strings_can_be_null=self.quote,
        )  # fmt: skip
        try:
            table = arrow_csv.read_csv(pa.BufferReader(lines), read, parse, convert)
        except pa.ArrowInvalid:
            return None
        arrays = [column.combine_chunks() for column in table.columns]
        arrays = [self._lists(a, types[n]) if n in self.multi_hot else a for n, a in zip(types, arrays, strict=True)]
        return None if any(array is None for array in arrays) else pa.RecordBatch.from_arrays(arrays, list(types))

    def _lists(self, strings: Any, kind: Any) -> Any:
        """Split strings into lists, with nulls for empty values; None if a value is not an integer but has to be."""
        lists = compute.split_pattern(strings, self._separator)
        values = compute.if_else(compute.equal(lists.values, ""), pa.scalar(None, pa.string()), lists.values)
        converted = values if kind.value_type == pa.string() else to_integers(values)
        if converted.null_count > values.null_count:
            return None
        return pa.ListArray.from_arrays(lists.offsets, converted, mask=lists.is_null())


class CriteoFormat(CsvFormat):
    """Criteo's format: label and integers are int64, categories uint32. Lines without the label, as in test.txt, have
    39 fields. If rows are not `labelled`, the label may be any integer, or empty."""

    quote = False

    def __init__(self, columns: Names, options: LogOptions, labelled: bool, extra_columns: Names) -> None:
        super().__init__(columns, replace(options, delimiter="\t"), labelled, extra_columns)
        self.multi_hot, self.kinds = (), dict.fromkeys(self.schema.sparse, "integers")
        self._rules = (_RULES[not labelled], *_RULES[1:])[-len(columns) :]
        self._line = re.compile(rb"\t".join(pattern for pattern, _ in self._rules))

    def read(self, lines: Text) -> Any:
        num_numbers, num_categories = len(self.columns) - len(CATEGORIES), len(CATEGORIES)
        text = np.frombuffer(lines, np.uint8)
        arrays = parse_criteo(text, count_lines(lines), num_numbers, num_categories, self.labelled)
        return None if arrays is None else pa.RecordBatch.from_arrays(arrays, self.columns)

    def accepts(self, lines: list[bytes]) -> list[bool]:
        return [self._line.fullmatch(line) is not None for line in lines]

    def _fields(self, line: bytes) -> list[Any]:
        return line.split(b"\t")

    def _expected(self, line: bytes, field_number: int, value: Any) -> str | None:
        pattern, expected = self._rules[field_number - 1]
        return None if re.fullmatch(pattern, value) else expected


def check_criteo(schema: Schema, location: str) -> None:
    """Raise ValueError if a schema does not fit Criteo's format: another label, or categories as numbers."""
    if invalid_values := [name for name in schema.dense if name in CATEGORIES]:
        raise ValueError(f"schema: {invalid_values[0]!r} of Criteo's TSV cannot be dense: it is a category")
    if schema.label_columns not in ((), (LABEL,)):
        raise ValueError(
            f"{location}: without a header, text files have Criteo's format, whose label is {LABEL!r} and not "
            f"{', '.join(map(repr, schema.label_columns))}; its columns: {join_names(FIELDS)}. For a file with a "
            "header, set a delimiter, or rename it to end with .csv"
        )


def encoding_hint(line: bytes) -> str:
    if line.startswith(b"\xef\xbb\xbf"):
        return "; the file begins with a UTF-8 byte order mark: remove it"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:1000]:
        return "; this does not look like text in ASCII or UTF-8, more like UTF-16 or a binary file"
    return ""


def parse(parser: CsvFormat, data: Text) -> ParsedChunk:
    """Parse lines to rows: all at once; if one is bad, line by line."""
    # Parse all lines at once.
    if not data.endswith(b"\n"):
        data = data + b"\n"
    is_plain = parser.is_regular(data) if parser.quoted else not _has_long_line(data)
    if not parser.quoted and b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        is_plain &= b"\r" not in data
    batch: Any = parser.read(data) if is_plain else None
    is_whole = batch is not None and (not parser.quote or batch.num_rows == count_lines(data))
    if is_whole and not find_invalid_values(batch, parser.schema, parser.labelled):
        rows = np.arange(batch.num_rows)
        return ParsedChunk(batch, rows, rows[:0], rows, lambda number: ("", ""))
    # Find the bad lines, and parse the others.
    lines, line_numbers = _split_lines(data, parser.quoted)
    rows = np.arange(len(lines))
    if batch is None or batch.num_rows != len(lines):
        accepted = parser.accepts(lines)
        rows = np.flatnonzero(accepted)
        batch = parser.read(b"".join(line + b"\n" for line in itertools.compress(lines, accepted)))
    valid = valid_row_mask(batch, find_invalid_values(batch, parser.schema, parser.labelled))
    batch, rows = batch.filter(arrow_array(valid)), rows[valid]
    bad_rows = np.setdiff1d(np.arange(len(lines)), rows, assume_unique=True)
    return ParsedChunk(batch, rows, bad_rows, line_numbers, lambda number: parser.problem(lines[bad_rows[number]]))


def count_lines(data: Text) -> int:
    """Count line feeds in blocks that fit the processor's cache; several times as fast as `data.count`."""
    text = np.frombuffer(data, np.uint8)
    return sum(int(np.count_nonzero(text[at : at + (1 << 16)] == ord("\n"))) for at in range(0, len(text), 1 << 16))


def count_rows(data: Text, quoted: bool) -> int:
    """Count lines that are not blank; with `quoted`, line ends in quotes do not count."""
    if quoted:
        return len(_split_lines(data, quoted)[0])
    text = np.frombuffer(b"\n" + data.replace(b"\r\n", b"\n").replace(b"\r\n", b"\n"), np.uint8)
    return int(np.count_nonzero((text[1:] == ord("\n")) & (text[:-1] != ord("\n"))))


def read_line(source: Any, quoted: bool = False) -> bytes:
    """Read a line with its end, empty at the end of the file; with `quoted`, it includes line ends in quotes.

    A line that is too long is truncated; a quote that is not closed before that does not count."""
    line: bytes = source.readline(MAX_LINE_BYTES + 1)
    while quoted and line.count(b'"') % 2 and len(line) <= MAX_LINE_BYTES:
        if not (continuation := source.readline(MAX_LINE_BYTES + 1)):
            break
        line += continuation
    if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
        line += b"\n"
        while (remainder := source.readline(MAX_LINE_BYTES)) and not remainder.endswith(b"\n"):
            pass
    return line


def complete_line_bytes(text: Text) -> int:
    """Return the bytes of the complete lines, quotes considered, that come before a line that is too long."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((data == ord("\n")) & ~np.logical_xor.accumulate(data == ord('"'))) + 1
    too_long = np.flatnonzero(np.diff(ends, prepend=0) > MAX_LINE_BYTES + 1)
    ends = ends[: too_long[0]] if len(too_long) else ends
    return int(ends[-1]) if len(ends) else 0


def _split_lines(data: Text, quoted: bool) -> tuple[list[bytes], Array]:
    lines = list(iter(partial(read_line, io.BytesIO(data), quoted), b""))
    numbers = np.cumsum([0, *(line.count(b"\n") for line in lines)])
    lines = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
    return [*filter(None, lines)], numbers[np.flatnonzero(list(map(len, lines)))]


def _has_long_line(data: Text) -> bool:
    begin = 0
    while len(data) - begin > MAX_LINE_BYTES:
        begin = data.rfind(b"\n", begin, begin + MAX_LINE_BYTES) + 1
        if not begin:
            return True
    return False
