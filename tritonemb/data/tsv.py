"""Criteo's display-advertising log in its original format (Kaggle's `train.txt`, the Terabyte `day_*` files).

A line has 40 tab-separated fields: the label, 0 or 1; 13 integers, `-?[0-9]{1,18}`; 26 categories of up to 8
hexadecimal digits in either case. An integer or category may be empty: a missing value. A line ends with a line feed,
with or without a carriage return before it, or with the file; a line of no characters is none. Nothing else is
accepted: no blanks around a value, no plus sign, no header.
"""

from __future__ import annotations

import re

import numpy as np

from tritonemb.data.digits import PADDING, Array, decimal, hexadecimal, words_of
from tritonemb.data.problems import wrong_value
from tritonemb.data.values import Checked, Sink, Values

LABEL = "label"
INTEGERS = tuple(f"int_{i}" for i in range(1, 14))
CATEGORIES = tuple(f"cat_{i}" for i in range(1, 27))
FIELDS = (LABEL, *INTEGERS, *CATEGORIES)

_EXPECTED = (
    (re.compile(rb"[01]"), "0 or 1"),
    *((re.compile(rb"-?[0-9]{1,18}|"), "an integer or nothing"),) * len(INTEGERS),
    *((re.compile(rb"[0-9a-fA-F]{1,8}|"), "up to 8 hexadecimal digits or nothing"),) * len(CATEGORIES),
)
_GOOD = len(FIELDS)  # stands for "no field is wrong"


def parse(data: bytes, sink: Sink) -> Checked:
    """Check the lines of a chunk and hand the columns of all lines with 40 fields to the sink, bad ones too.

    The labels come as int64. Every line is judged by itself, wherever it stands.

    Args:
        data: whole lines; the last may lack its end.
    """
    if not data.endswith(b"\n"):
        data += b"\n"
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    text = np.empty(PADDING + len(data) + 8, dtype=np.uint8)
    text[:PADDING] = 0
    text[PADDING:-8] = np.frombuffer(data, np.uint8)
    text[-8:] = 0
    lines = _Lines(text)
    words, ends = words_of(text), lines.ends
    wrong = np.full(len(lines.starts), _GOOD, dtype=np.uint8)
    starts = lines.starts
    for place, name in enumerate(FIELDS):
        stops = ends[place]
        if place == 0:
            numbers, valid = _labels(text, starts, stops)
            missing = None
        elif place <= len(INTEGERS):
            numbers, valid = decimal(words, text, starts, stops)
            missing = stops == starts
        else:
            numbers, valid = hexadecimal(words, stops, stops - starts)
            missing = stops == starts
        if not valid.all():
            wrong[~valid & (wrong == _GOOD)] = place
        sink(name, Values(numbers, missing if missing is not None and missing.any() else None))
        starts = stops + 1
    return _checked(lines, wrong)


def _labels(text: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    digits = text[starts] - np.uint8(ord("0"))
    return digits.astype(np.int64), (digits <= 1) & (ends - starts == 1)


class _Lines:
    """Where the lines of a text begin and their fields end; int32, since a chunk is small.

    Attributes:
        ends: `[40, N]` of the lines with 40 fields.
        starts: `[N]` of these lines.
        rows: `[N]`, their places among all lines.
        odd: places of the lines, not blank, with more fields or fewer.
        num_lines: all of them.
    """

    def __init__(self, text: Array) -> None:
        self.text, self.num_lines = text, int(np.count_nonzero(text == 10))
        marks, num_lines = np.flatnonzero((text - np.uint8(9)) < 2), self.num_lines  # tabs and line feeds
        if len(marks) == num_lines * len(FIELDS) and (text[marks[len(FIELDS) - 1 :: len(FIELDS)]] == 10).all():
            self.ends = marks.reshape(-1, len(FIELDS)).T.astype(np.int32)
            self.starts = _after(self.ends[-1])
            self.rows = np.arange(num_lines)
            self.odd = self.rows[:0]
            self._stops = self.ends[-1]
            return
        last = np.flatnonzero(text[marks] == 10)  # of the marks of each line
        first = np.concatenate([[0], last[:-1] + 1])
        self._stops = marks[last].astype(np.int32)
        starts = _after(self._stops)
        whole = last - first + 1 == len(FIELDS)
        self.rows = np.flatnonzero(whole)
        self.odd = np.flatnonzero(~whole & (self._stops > starts))
        self.ends = marks[first[whole] + np.arange(len(FIELDS))[:, None]].astype(np.int32)
        self.starts = starts[whole]

    def line(self, row: int) -> bytes:
        start = int(self._stops[row - 1]) + 1 if row else PADDING
        return self.text[start : int(self._stops[row])].tobytes()


def _after(stops: Array) -> Array:
    """Where lines begin that end there."""
    starts = np.empty_like(stops)
    starts[:1], starts[1:] = PADDING, stops[:-1] + 1
    return starts


def _checked(lines: _Lines, wrong: Array) -> Checked:
    good = wrong == _GOOD
    all_good = bool(good.all())
    bad = lines.odd if all_good else np.union1d(lines.odd, lines.rows[~good])
    return Checked(
        None if all_good else good,
        lines.rows,
        bad,
        lambda number: problem(lines.line(int(bad[number]))),
        lines.num_lines,
    )


def problem(line: bytes) -> tuple[str, str]:
    """Reason and message for a bad line, without its end."""
    fields = line.split(b"\t")
    if len(fields) != len(FIELDS):
        hint = " (Criteo's test.txt has no labels; use train.txt)" if len(fields) == len(FIELDS) - 1 else ""
        message = f"expected {len(FIELDS)} tab-separated fields, found {len(fields)}{hint}"
        return f"not {len(FIELDS)} fields", message + _encoding_hint(line)
    for place, (name, value, (pattern, expected)) in enumerate(zip(FIELDS, fields, _EXPECTED, strict=True), start=1):
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
