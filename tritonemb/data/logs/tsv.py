"""Criteo's display-advertising log in its original format (Kaggle's `train.txt`, the Terabyte `day_*` files).

A line has 40 tab-separated fields: the label, 0 or 1; 13 integers, `-?[0-9]{1,18}`; 26 categories of up to 8
hexadecimal digits in either case. An integer or category may be empty: a missing value. A line ends with a line feed,
with or without a carriage return before it, or with the file; a line of no characters is none. Nothing else is
accepted: no blanks around a value, no plus sign, no header.
"""

from __future__ import annotations

import re

import numpy as np

from tritonemb.data.logs.digits import LINE_FEED, PADDING, Array, count_bytes, decimal, hexadecimal, padded, words_of
from tritonemb.data.logs.problems import wrong_value
from tritonemb.data.logs.values import Checked, Sink, Values

LABEL = "label"
INTEGERS = tuple(f"int_{i}" for i in range(1, 14))
CATEGORIES = tuple(f"cat_{i}" for i in range(1, 27))
FIELDS = (LABEL, *INTEGERS, *CATEGORIES)

_EXPECTED = (
    (re.compile(rb"[01]"), "0 or 1"),
    *((re.compile(rb"-?[0-9]{1,18}|"), "an integer or nothing"),) * len(INTEGERS),
    *((re.compile(rb"[0-9a-fA-F]{1,8}|"), "up to 8 hexadecimal digits or nothing"),) * len(CATEGORIES),
)
BLOCK_BYTES = 1 << 19
LONG_LINE = 1 << 12
CARRIAGE_RETURN = 13
_GOOD = len(FIELDS)  # stands for "no field is wrong"


def parse(data: bytes | Array, sink: Sink, labelled: bool = True) -> Checked:
    """Check the lines of a chunk and hand the columns of all lines with 40 fields to the sink, bad ones too.

    Labels and integers come as int64, categories as uint32. Every line is judged by itself, wherever it stands.

    Args:
        data: whole lines; the last may lack its end. Or such a text that ends with a line feed, as `padded` gives it.
        labelled: whether lines begin with the label; else they have 39 fields, as those of Criteo's test.txt.
    """
    if isinstance(data, bytes):
        data = padded(data if data.endswith(b"\n") else data + b"\n")
    if count_bytes(data, CARRIAGE_RETURN):
        data = padded(data[PADDING:-8].tobytes().replace(b"\r\n", b"\n"))
    columns = _Columns(data, FIELDS if labelled else FIELDS[1:])
    begin, end = PADDING, len(data) - 8
    while begin < end:
        stop = _line_end(data, min(begin + BLOCK_BYTES, end), end)
        columns.add(begin - PADDING, stop - PADDING)
        begin = stop
    return columns.hand_over(sink)


def _line_end(text: Array, wanted: int, end: int) -> int:
    """Where the last line before `wanted` ends, or else the first one after it: near there, lines being short."""
    if wanted == end:
        return end
    before = text[max(wanted - LONG_LINE, PADDING) : wanted].tobytes().rfind(b"\n")
    if before >= 0:
        return max(wanted - LONG_LINE, PADDING) + before + 1
    return wanted + text[wanted:end].tobytes().index(b"\n") + 1


class _Columns:
    """The columns of a text, filled block by block: what a block needs stays in the processor's cache.

    Positions count from the beginning of the text without its padding.
    """

    def __init__(self, text: Array, fields: tuple[str, ...]) -> None:
        self._fields, self._labelled = fields, fields[0] == LABEL
        self._plain, self._words = text[PADDING:-8], words_of(text)
        most = count_bytes(self._plain, LINE_FEED)
        self._labels = np.empty(most, dtype=np.int64)
        self._integers = np.empty((len(INTEGERS), most), dtype=np.int64)
        self._categories = np.empty((len(CATEGORIES), most), dtype=np.uint32)
        self._missing = np.empty((len(INTEGERS) + len(CATEGORIES), most), dtype=bool)
        self._wrong = np.empty(most, dtype=np.uint8)
        self._num_rows = self._num_lines = 0
        self._rows: list[Array] = []  # the lines with as many fields as they should have
        self._odd: list[Array] = []  # lines, not blank, with more or fewer
        self._line_ends: list[Array] = []

    def add(self, begin: int, stop: int) -> None:
        """Take the lines between two positions."""
        text = self._plain[begin:stop]
        marks: Array = np.flatnonzero((text - np.uint8(9)) < 2)  # tabs and line feeds
        num_lines, width = int(np.count_nonzero(text == LINE_FEED)), len(self._fields)
        marks += begin
        lengths: Array = np.empty_like(marks)  # of the fields that end there
        np.subtract(marks[1:], marks[:-1], out=lengths[1:])
        lengths[:1] = marks[:1] - begin + 1
        lengths -= 1
        if len(marks) == num_lines * width and (self._plain[marks[width - 1 :: width]] == LINE_FEED).all():
            ends, lengths = marks.reshape(num_lines, width), lengths.reshape(num_lines, width)
            line_ends, rows = ends[:, -1], np.arange(num_lines)
        else:
            last = np.flatnonzero(self._plain[marks] == LINE_FEED)  # of the marks of each line
            first = np.concatenate([[0], last[:-1] + 1])
            line_ends = marks[last]
            num_fields = last - first + 1
            rows = np.flatnonzero(num_fields == width)
            blank = (num_fields == 1) & (lengths[last] == 0)
            self._odd.append(np.flatnonzero((num_fields != width) & ~blank) + self._num_lines)
            places = first[rows][:, None] + np.arange(width)
            ends, lengths = marks[places], lengths[places]
        self._line_ends.append(line_ends)
        self._rows.append(rows + self._num_lines)
        self._num_lines += num_lines
        self._fill(ends, lengths)

    def _fill(self, ends: Array, lengths: Array) -> None:
        """The values of lines whose fields end at `ends` `[N, fields]` and have `lengths`."""
        begin, stop = self._num_rows, self._num_rows + len(ends)
        self._num_rows = stop
        first = int(self._labelled)
        self._missing[:, begin:stop] = (lengths[:, first:] == 0).T
        wrong = np.full(len(ends), _GOOD, dtype=np.uint8)
        if self._labelled:
            label = self._plain[ends[:, 0] - lengths[:, 0]] - np.uint8(ord("0"))
            self._labels[begin:stop] = label
            wrong[(label > 1) | (lengths[:, 0] != 1)] = 0
        for names, read, target in (
            (INTEGERS, decimal, self._integers),
            (CATEGORIES, hexadecimal, self._categories),
        ):
            last = first + len(names)
            fields = (ends[:, first:last].ravel(), lengths[:, first:last].ravel())
            numbers, valid = read(self._words, *fields)
            target[:, begin:stop] = numbers.reshape(len(ends), len(names)).T
            if not valid.all():
                invalid = ~valid.reshape(len(ends), len(names))
                rows = np.flatnonzero(invalid.any(axis=1))
                wrong[rows] = np.minimum(wrong[rows], first + invalid[rows].argmax(axis=1))
            first = last
        self._wrong[begin:stop] = wrong

    def hand_over(self, sink: Sink) -> Checked:
        size = self._num_rows
        if self._labelled:
            sink(LABEL, Values(self._labels[:size]))
        for place, name in enumerate(FIELDS[1:]):
            integers = place < len(INTEGERS)
            numbers = self._integers[place] if integers else self._categories[place - len(INTEGERS)]
            missing = self._missing[place, :size]
            sink(name, Values(numbers[:size], missing if missing.any() else None))
        good = self._wrong[:size] == _GOOD
        all_good = bool(good.all())
        rows, line_ends = _joined(self._rows), _joined(self._line_ends)
        bad = _joined(self._odd)
        if not all_good:
            bad = np.union1d(bad, rows[~good])

        def describe(number: int) -> tuple[str, str]:
            line = int(bad[number])
            start = int(line_ends[line - 1]) + 1 if line else 0
            return problem(self._plain[start : int(line_ends[line])].tobytes(), self._labelled)

        return Checked(None if all_good else good, rows, bad, describe, self._num_lines)


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def problem(line: bytes, labelled: bool = True) -> tuple[str, str]:
    """Reason and message for a bad line, without its end."""
    fields, names = line.split(b"\t"), FIELDS if labelled else FIELDS[1:]
    if len(fields) != len(names):
        unlabelled = labelled and len(fields) == len(FIELDS) - 1
        hint = " (Criteo's test.txt has no labels; use train.txt)" if unlabelled else ""
        message = f"expected {len(names)} tab-separated fields, found {len(fields)}{hint}"
        return f"not {len(names)} fields", message + _encoding_hint(line)
    rules = _EXPECTED[-len(names) :]
    for place, (name, value, (pattern, expected)) in enumerate(zip(names, fields, rules, strict=True), start=1):
        if not pattern.fullmatch(value):
            reason = f"field {place} ({name}) is not {expected}"
            return reason, wrong_value(place, name, value, expected, _encoding_hint(line))
    raise AssertionError(f"{line!r} is a good line")


def _encoding_hint(line: bytes) -> str:
    if line.startswith(b"\xef\xbb\xbf"):
        return "; the file begins with a UTF-8 byte order mark: remove it"
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:1000]:
        return "; this does not look like text in ASCII or UTF-8, more like UTF-16 or a binary file"
    return ""
