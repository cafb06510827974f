"""Lines of text as Arrow columns, parsed by `pyarrow.csv`: CSV, and Criteo's format.

A line ends with a line feed, with or without a carriage return before it, or with the file; a line of no characters is
none. Whether a line is good depends on nothing but the line. An empty field is a missing value. A field of CSV may be
quoted; then a quote is written twice. Criteo's display-advertising log has 40 tab-separated fields a line: the label, 0
or 1; 13 integers, `-?[0-9]{1,18}`; 26 categories of up to 8 hexadecimal digits in either case. Nothing else is accepted
there: no blanks around a value, no plus sign, no header.
"""

import binascii
import csv
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tritonemb.data.arrow import arrow_csv, compute, pa
from tritonemb.data.batch import Array
from tritonemb.data.encode import find_wrong_values, integer_values, string_buffers, to_integers, valid_row_mask
from tritonemb.data.schema import CATEGORIES, FIELDS, INTEGERS, LABEL, LogOptions, Schema, wrong_value_message
from tritonemb.utils import join_names

Text = bytes | bytearray

LONGEST_LINE = 1 << 16  # bytes; a longer line is bad, and only its beginning is kept
BLOCK_BYTES = 1 << 20  # that pyarrow parses at a time: they stay in the processor's cache

_RULES = (
    (rb"[01]", "0 or 1"),
    *((rb"(?:-?[0-9]{1,18})?", "an integer or nothing"),) * len(INTEGERS),
    *((rb"[0-9a-fA-F]{0,8}", "up to 8 hexadecimal digits or nothing"),) * len(CATEGORIES),
)
_EXPECTED = {"double": "a number or nothing", "int64": "an integer or nothing", "string": "text in UTF-8"}


@dataclass(frozen=True)
class Parsed:
    """The rows of a chunk."""

    batch: Any  # a `pyarrow.RecordBatch` of the good rows
    rows: Array  # int64 [N], the number of each in the chunk
    bad_rows: Array  # int64, the others, ascending
    lines: Array  # int64, the line, or row, of the chunk that each of both is
    describe: Callable[[int], tuple[str, str]]  # reason and message for the n-th bad one


class CsvFormat:
    """CSV with these columns: label and dense ones float64, sparse ones int64 or strings, or lists of them, others that
    are `kept` strings. With `quoted`, fields in quotes may contain line ends."""

    quote = True

    def __init__(
        self, columns: tuple[str, ...], options: LogOptions, labelled: bool, extra_columns: tuple[str, ...]
    ) -> None:
        schema, rule, self.columns, self.labelled = options.schema, options.split, columns, labelled
        self.schema, self.quoted, self._delimiter = schema, options.quoted_newlines, options.delimiter
        self.time, self._separator = rule.time_column, options.list_separator
        self.multi_hot = (schema.lists or schema.sparse) if self._separator else ()
        self.kinds = {name: "integers" if name in schema.integers else "strings" for name in schema.sparse}
        numbers = schema.columns(labelled or schema.label in extra_columns)
        self._types = dict.fromkeys(extra_columns, pa.string()) | dict.fromkeys(numbers, pa.float64())
        types = {name: pa.int64() if kind == "integers" else pa.string() for name, kind in self.kinds.items()}
        self._types |= {name: pa.list_(kind) if name in self.multi_hot else kind for name, kind in types.items()}
        bound = rule.test_from or rule.validation_from or ""
        if self._types.get(self.time) == pa.string() and re.fullmatch("-?[0-9]+", bound):
            self._types[self.time] = pa.int64()

    def arrow_schema(self) -> Any:
        """The columns of the schema, and of times, in the smallest types that hold them, a `pyarrow.Schema`."""
        names = dict.fromkeys((*self.schema.columns(self.labelled), *filter(None, [self.time])))
        fields = [self.read(b"").schema.field(name) for name in names]
        return pa.schema([field.with_type(pa.int8()) if field.name == self.schema.label else field for field in fields])

    def read(self, lines: Text, accepted: bool = False) -> Any:
        """A `pyarrow.RecordBatch` of lines, none blank; None if one may be bad, unless all were `accepted`."""
        # A quote that is not closed would reach as far as this row of missing values.
        guard = (self._delimiter * (len(self.columns) - 1) + "\n").encode() if b'"' in lines else b""
        batch = self._parse(lines + guard if guard else lines, self._types)
        return batch if batch is None else batch.slice(0, batch.num_rows - bool(guard))

    def accepts(self, lines: list[bytes]) -> list[bool]:
        """Which lines can be read: by halves, so that the many lines around a bad one are parsed together."""
        text = b"".join(line + b"\n" for line in lines)
        unquoted = not any(len(line) > LONGEST_LINE or b"\r" in line or b"\n" in line for line in lines)
        if (unquoted and len(lines) == 1) or (self.is_regular(text) if self.quoted else unquoted):
            batch = self.read(text)
            if batch is not None and batch.num_rows == len(lines):
                return [True] * len(lines)
        if len(lines) == 1:
            return [False]
        half = len(lines) // 2
        return self.accepts(lines[:half]) + self.accepts(lines[half:])

    def is_regular(self, text: Text) -> bool:
        """Whether each line is one row wherever it stands: none is too long, quotes are at the ends of fields or twice
        inside one, and carriage returns in quotes or before line feeds."""
        if complete_line_bytes(text) < len(text):
            return False
        data = np.frombuffer(b"\n" + text, np.uint8)
        inside, quotes = np.logical_xor.accumulate(data == ord('"')), np.flatnonzero(data == ord('"'))
        outwards = data[np.where(inside[quotes], quotes - 1, quotes + 1)]
        after_returns = data[np.flatnonzero((data == ord("\r")) & ~inside) + 1]
        ends = np.frombuffer(f'{self._delimiter}\r\n"'.encode(), np.uint8)
        return bool(np.isin(outwards, ends).all() and (after_returns == ord("\n")).all())

    def problem(self, line: bytes) -> tuple[str, str]:
        """Reason and message for a bad line, without its end."""
        hint = "; a quote is not closed in this line" if self.quote and line.count(b'"') % 2 else encoding_hint(line)
        if self.quote and len(line) > LONGEST_LINE:
            return "too long", f"the line has more than {LONGEST_LINE:,} characters"
        if self.quote and b"\r" in (re.sub(rb'"[^"]*"', b"", line) if self.quoted else line):
            return "carriage return", "a carriage return stands inside the line"
        fields, count = self._fields(line), len(self.columns)
        if len(fields) != count:
            if not self.quote and self.labelled and len(fields) == count - 1:
                hint = f" (Criteo's test.txt has no labels; use train.txt){hint}"
            delimiter = {"\t": "tab", ",": "comma"}.get(self._delimiter, repr(self._delimiter))
            return f"not {count} fields", f"expected {count} {delimiter}-separated fields, found {len(fields)}{hint}"
        for field_number, (name, value) in enumerate(zip(self.columns, fields, strict=True), 1):
            if expected_value := self._expected(line, field_number, value):
                return f"field {field_number} ({name}) is not {expected_value}", wrong_value_message(
                    field_number, name, value, expected_value, hint
                )
        return "quote", "a quote is not closed in this line"

    def _fields(self, line: bytes) -> list[Any]:
        text = io.StringIO(line.decode(errors="backslashreplace"), newline="")
        return next(csv.reader(text, delimiter=self._delimiter))

    def _expected(self, line: bytes, field_number: int, value: Any) -> str | None:
        if (name := self.columns[field_number - 1]) not in self._types:
            return None
        if (parsed := self._parse(line + b"\n", {name: self._types[name]})) is None:
            kind = self._types[name].value_type if name in self.multi_hot else self._types[name]
            is_label = self.labelled and name == self.schema.label
            return "0 or 1" if is_label else _EXPECTED[str(kind)]
        wrong = find_wrong_values(parsed, self.schema, self.labelled)
        return wrong[0][1] if wrong else None

    def _parse(self, lines: Text, types: dict[str, Any]) -> Any:
        if not lines:
            return pa.RecordBatch.from_pylist([], pa.schema(list(types.items())))
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
        """An array of lists, with a null where nothing stands between separators; None if a value is not an integer."""
        lists = compute.split_pattern(strings, self._separator)
        values = compute.if_else(compute.equal(lists.values, ""), pa.scalar(None, pa.string()), lists.values)
        converted = values if kind.value_type == pa.string() else to_integers(values)
        if converted.null_count > values.null_count:
            return None
        return pa.ListArray.from_arrays(lists.offsets, converted, mask=lists.is_null())


class CriteoFormat(CsvFormat):
    """Criteo's. The label and integers are int64, categories uint32. Without the label, as in test.txt, 39 fields. If
    rows are not `labelled`, it is any integer, or empty."""

    quote = False

    def __init__(
        self, columns: tuple[str, ...], options: LogOptions, labelled: bool, extra_columns: tuple[str, ...]
    ) -> None:
        super().__init__(columns, replace(options, delimiter="\t"), labelled, extra_columns)
        self.multi_hot, self.kinds = (), dict.fromkeys(self.schema.sparse, "integers")
        self._rules = (_RULES[not labelled], *_RULES[1:])[-len(columns) :]
        self._line = re.compile(rb"\t".join(pattern for pattern, _ in self._rules))
        self._types = {name: pa.binary() if name in CATEGORIES else pa.int64() for name in self.columns}

    def read(self, lines: Text, accepted: bool = False) -> Any:
        """pyarrow also takes blank lines, blanks, hexadecimal integers, and more than 18 digits if the first ones are
        zeros. All of these make the text longer than its values have to be, but for hexadecimal integers from 10^10."""
        if (batch := self._parse(lines, self._types)) is None:
            return None
        arrays, num_bytes, largest = [], len(self.columns) * batch.num_rows, 0
        for name, array in zip(self.columns, batch.columns, strict=True):
            if name in CATEGORIES:
                array, size = parse_hexadecimal(array)
                if array is None:
                    return None
            else:
                size, magnitude = _decimal_length(array)
                largest = max(largest, magnitude)
            arrays.append(array)
            num_bytes += size
        is_hexadecimal = largest >= 10**10 and (b"x" in lines or b"X" in lines)
        if largest >= 10**18 or (not accepted and (is_hexadecimal or num_bytes != len(lines))):
            return None
        return pa.RecordBatch.from_arrays(arrays, self.columns)

    def accepts(self, lines: list[bytes]) -> list[bool]:
        return [self._line.fullmatch(line) is not None for line in lines]

    def _fields(self, line: bytes) -> list[Any]:
        return line.split(b"\t")

    def _expected(self, line: bytes, field_number: int, value: Any) -> str | None:
        pattern, expected = self._rules[field_number - 1]
        return None if re.fullmatch(pattern, value) else expected


def _decimal_length(array: Any) -> tuple[int, int]:
    """The number of characters that write int64 values if none is superfluous, and the largest magnitude."""
    numbers = integer_values(array, fill=False)  # pyarrow.csv writes 0 for nulls
    largest = max(int(numbers.max(initial=0)), -int(numbers.min(initial=0)))
    size, bound = len(array) - array.null_count + int(np.count_nonzero(numbers < 0)), 10
    magnitudes = np.abs(numbers)
    while bound <= min(largest, 10**18):
        size += int(np.count_nonzero(magnitudes >= bound))
        bound *= 10
    return size, largest


def parse_hexadecimal(array: Any) -> tuple[Any, int]:
    """uint32 of a `pyarrow` array of up to 8 hexadecimal digits each, and their number; None if there are others."""
    data, ends = string_buffers(array)
    present, num_digits = ends[1:] != ends[:-1], int(ends[-1] - ends[0])
    count = int(np.count_nonzero(present))
    try:
        if int(np.diff(ends).max(initial=0)) > 8:
            return None, 0
        digits = data[ends[0] : ends[-1]]
        if num_digits != 8 * count:  # not as Criteo writes them
            digits = string_buffers(compute.ascii_lpad(array.filter(pa.array(present)).cast(pa.string()), 8, "0"))[0]
        numbers = np.frombuffer(binascii.unhexlify(digits[: 8 * count]), ">u4").astype(np.uint32)
    except ValueError:
        return None, 0
    if count == len(array):
        return pa.array(numbers), num_digits
    padded_numbers = np.zeros(len(array), np.uint32)
    padded_numbers[present] = numbers
    valid = np.packbits(present, bitorder="little")
    return pa.Array.from_buffers(
        pa.uint32(), len(array), [pa.py_buffer(valid), pa.py_buffer(padded_numbers)]
    ), num_digits


def check_criteo(schema: Schema, where: str) -> None:
    """ValueError if a schema has another label than Criteo's, or categories as numbers."""
    if wrong := [name for name in schema.dense if name in CATEGORIES]:
        raise ValueError(f"schema: {wrong[0]!r} of Criteo's TSV can not be dense: it is a category")
    if schema.label not in ("", LABEL):
        raise ValueError(
            f"{where}: without a header, text files have Criteo's format, whose label is {LABEL!r} and not "
            f"{schema.label!r}; its columns: {join_names(FIELDS)}. Files with a header are read with a delimiter, or "
            "as they are if their names end with .csv"
        )


def encoding_hint(line: bytes) -> str:
    if line.startswith(b"\xef\xbb\xbf"):
        return "; the file begins with a UTF-8 byte order mark: remove it"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:1000]:
        return "; this does not look like text in ASCII or UTF-8, more like UTF-16 or a binary file"
    return ""


def parse(form: CsvFormat, data: Text) -> Parsed:
    """The rows of some lines. All lines are parsed at once; if one of them is bad, each is looked at."""
    if not data.endswith(b"\n"):
        data = data + b"\n"
    plain = form.is_regular(data) if form.quoted else not _has_long_line(data)
    if not form.quoted and b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        plain &= b"\r" not in data
    batch: Any = form.read(data) if plain else None
    is_whole = batch is not None and (not form.quote or batch.num_rows == count_lines(data))
    if is_whole and not find_wrong_values(batch, form.schema, form.labelled):
        rows = np.arange(batch.num_rows)
        return Parsed(batch, rows, rows[:0], rows, lambda number: ("", ""))
    lines, numbers = _split_lines(data, form.quoted)
    rows = np.arange(len(lines))
    if batch is None or batch.num_rows != len(lines):
        accepted = form.accepts(lines)
        rows = np.flatnonzero(accepted)
        batch = form.read(b"".join(line + b"\n" for line in itertools.compress(lines, accepted)), accepted=True)
    good = valid_row_mask(batch, find_wrong_values(batch, form.schema, form.labelled))
    batch, rows = batch.filter(pa.array(good)), rows[good]
    bad_rows = np.setdiff1d(np.arange(len(lines)), rows, assume_unique=True)
    return Parsed(batch, rows, bad_rows, numbers, lambda number: form.problem(lines[bad_rows[number]]))


def count_lines(data: Text) -> int:
    """Line feeds; several times as fast as `data.count`. By pieces that stay in the processor's cache."""
    text = np.frombuffer(data, np.uint8)
    return sum(int(np.count_nonzero(text[at : at + (1 << 16)] == ord("\n"))) for at in range(0, len(text), 1 << 16))


def count_rows(data: Text, quoted: bool) -> int:
    """Lines, perhaps quoted, that are not blank."""
    if quoted:
        return len(_split_lines(data, quoted)[0])
    text = np.frombuffer(b"\n" + data.replace(b"\r\n", b"\n").replace(b"\r\n", b"\n"), np.uint8)
    return int(np.count_nonzero((text[1:] == ord("\n")) & (text[:-1] != ord("\n"))))


def read_line(source: Any, quoted: bool = False) -> bytes:
    """The next line with its end, nothing at the end of the file; with `quoted`, line ends in quotes are part of it. Of
    a line that is too long, the beginning alone; a quote not closed before that is none."""
    line: bytes = source.readline(LONGEST_LINE + 1)
    while quoted and line.count(b'"') % 2 and len(line) <= LONGEST_LINE:
        if not (continuation := source.readline(LONGEST_LINE + 1)):
            break
        line += continuation
    if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
        line += b"\n"
        while (remainder := source.readline(LONGEST_LINE)) and not remainder.endswith(b"\n"):
            pass
    return line


def complete_line_bytes(text: Text) -> int:
    """Bytes of the lines, perhaps quoted, that a text begins with, whole and not too long."""
    data = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero((data == ord("\n")) & ~np.logical_xor.accumulate(data == ord('"'))) + 1
    too_long = np.flatnonzero(np.diff(ends, prepend=0) > LONGEST_LINE + 1)
    ends = ends[: too_long[0]] if len(too_long) else ends
    return int(ends[-1]) if len(ends) else 0


def _split_lines(data: Text, quoted: bool) -> tuple[list[bytes], Array]:
    lines = list(iter(partial(read_line, io.BytesIO(data), quoted), b""))
    numbers = np.cumsum([0, *(line.count(b"\n") for line in lines)])
    lines = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
    return [line for line in lines if line], numbers[np.flatnonzero([bool(line) for line in lines])]


def _has_long_line(data: Text) -> bool:
    begin = 0
    while len(data) - begin > LONGEST_LINE:
        begin = data.rfind(b"\n", begin, begin + LONGEST_LINE) + 1
        if not begin:
            return True
    return False
