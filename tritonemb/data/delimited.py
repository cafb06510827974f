"""Lines of text as columns, parsed by `pyarrow.csv`; and CSV, whose first line names the columns.

A field of CSV may stand in quotes, in which a quote is written twice. An empty field is a missing value.

A line ends with a line feed, with or without a carriage return before it, or with the file; a line of no characters is
none. Whether a line is good depends on nothing but the line.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tritonemb.data.arrow import Checked, Sink, Values, Wrong, all_good, read_columns
from tritonemb.data.schema import Schema, wrong_value
from tritonemb.utils import require

Array = np.ndarray[Any, Any]
Text = bytes | bytearray

LONGEST_LINE = 1 << 16  # bytes; a longer line is bad, and only its beginning is kept
BLOCK_BYTES = 1 << 20  # that pyarrow parses at a time: they stay in the processor's cache


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

    def read(self, lines: Text, accepted: bool = False) -> Columns | None:
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


def parse(form: Format, data: Text, sink: Sink) -> Checked:
    """Check some lines and hand the columns of all that can be read to the sink.

    All lines are parsed at once. If one of them is not acceptable, each is looked at.
    """
    if not data.endswith(b"\n"):
        data = data + b"\n"
    plain = form.quoted or not _has_long_line(data)
    if not form.quoted and b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
        plain &= b"\r" not in data
    found = form.read(data) if plain else None
    if found is not None and not form.quoted and found.num_rows == data.count(b"\n"):
        rows = numbers = np.arange(found.num_rows)
        good = all_good(found.wrong, found.num_rows)
        lines = [] if good.all() else lines_of(data, form.quoted)[0]
    else:
        lines, numbers = lines_of(data, form.quoted)
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


def lines_of(data: Text, quoted: bool) -> tuple[list[bytes], Array]:
    """The lines that are not blank, without their ends, and the number of each."""
    if not quoted:
        lines = bytes(data[:-1]).split(b"\n")
        numbers = np.arange(len(lines))
    else:
        ends = quoted_ends(data)
        starts = np.concatenate([[0], ends])
        starts = starts[starts < len(data)]
        stops = np.append(starts[1:], len(data))
        lines = [
            bytes(data[start:stop]).removesuffix(b"\n").removesuffix(b"\r")
            for start, stop in zip(starts, stops, strict=True)
        ]
        numbers = np.searchsorted(np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")), starts)
    kept = np.array([bool(line) for line in lines], dtype=bool)
    return [line for line in lines if line], numbers[kept]


def _has_long_line(data: Text) -> bool:
    begin = 0
    while len(data) - begin > LONGEST_LINE:
        end = data.rfind(b"\n", begin, begin + LONGEST_LINE) + 1
        if not end:
            return True
        begin = end
    return False


def read_csv(
    lines: Text, columns: tuple[str, ...], types: dict[str, Any], delimiter: str, quote: bool, quoted: bool
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

    def read(self, lines: Text, accepted: bool = False) -> Columns | None:
        """A quote that is not closed would reach as far as the row of missing values that is put behind the lines."""
        guard = (self._delimiter * (len(self.columns) - 1) + "\n").encode() if b'"' in lines or not lines else b""
        table = read_csv(
            lines + guard if guard else lines, self.columns, self._types, self._delimiter, True, self.quoted
        )
        if table is None:
            return None
        values: dict[str, Values] = {}
        table = table.slice(0, table.num_rows - bool(guard))
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
        if len(line) > LONGEST_LINE:
            return "too long", f"the line has more than {LONGEST_LINE:,} characters"
        if b"\r" in line and not self.quoted:
            return "carriage return", "a carriage return stands inside the line"
        fields = next(
            csv.reader(io.StringIO(line.decode(errors="backslashreplace"), newline=""), delimiter=self._delimiter)
        )
        hint = "; a quote is not closed in this line" if line.count(b'"') % 2 else encoding_hint(line)
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
        if any(len(line) > LONGEST_LINE or (b"\r" in line and not self.quoted) for line in lines):
            return False
        found = self.read(b"".join(line + b"\n" for line in lines))
        return found is not None and found.num_rows == len(lines)

    def _unreadable(self, line: bytes, name: str) -> str | None:
        """What a column should be that can not be read."""
        if name not in self._types:
            return None
        types = {name: self._types[name]}
        table = read_csv(line + b"\n", self.columns, types, self._delimiter, True, self.quoted)
        return self._expected[name] if table is None else None


def encoding_hint(line: bytes) -> str:
    if line.startswith(b"\xef\xbb\xbf"):
        return "; the file begins with a UTF-8 byte order mark: remove it"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:1000]:
        return "; this does not look like text in ASCII or UTF-8, more like UTF-16 or a binary file"
    return ""


class LineEnds:
    """Where the lines of a text end, which begins with a line: the places behind their line feeds."""

    def __init__(self, text: Text, quoted: bool) -> None:
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


def quoted_ends(text: Text) -> Array:
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
