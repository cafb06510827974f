"""Criteo's display-advertising log in its original format (Kaggle's `train.txt`, the Terabyte `day_*` files).

A line has 40 tab-separated fields: the label, 0 or 1; 13 integers, `-?[0-9]{1,18}`; 26 categories of up to 8
hexadecimal digits in either case. An integer or category may be empty: a missing value. Nothing else is accepted: no
blanks around a value, no plus sign, no header.
"""

from __future__ import annotations

import binascii
import re
from typing import Any

import numpy as np

from tritonemb.data.arrow import Values, missing_of
from tritonemb.data.delimited import Columns, Text, encoding_hint, read_csv
from tritonemb.data.files import LogFile
from tritonemb.data.schema import CATEGORIES, FIELDS, INTEGERS, LABEL, Schema, listed, wrong_value
from tritonemb.utils import require

Array = np.ndarray[Any, Any]

_EXPECTED = (
    (rb"[01]", "0 or 1"),
    *((rb"(?:-?[0-9]{1,18})?", "an integer or nothing"),) * len(INTEGERS),
    *((rb"[0-9a-fA-F]{0,8}", "up to 8 hexadecimal digits or nothing"),) * len(CATEGORIES),
)


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

    def read(self, lines: Text, accepted: bool = False) -> Columns | None:
        """pyarrow also takes blanks, hexadecimal integers, and more than 18 digits if the first ones are zeros. All of
        these make a line longer than its values have to be, but for hexadecimal integers of 10^10 and more."""
        table = read_csv(lines, self.columns, self._types, "\t", False, False)
        if table is None:
            return None
        values, num_bytes, is_large = {}, 0, False
        for name in self.columns:
            array = table.column(name).combine_chunks()
            read = _label if name == LABEL else _integers if name in INTEGERS else hexadecimal
            column = read(array)
            if column is None:
                return None
            values[name], size = column
            num_bytes += size
            numbers = values[name].numbers
            is_large |= name in INTEGERS and bool(
                numbers.max(initial=0) >= 10**10 or numbers.min(initial=0) <= -(10**10)
            )
        delimiters = (len(self.columns) - 1) * table.num_rows + lines.count(b"\n")
        is_hexadecimal = is_large and (b"x" in lines or b"X" in lines)
        if not accepted and (is_hexadecimal or num_bytes != len(lines) - delimiters):
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
            return f"not {len(names)} fields", message + encoding_hint(line)
        for place, (name, value, (pattern, expected)) in enumerate(zip(names, fields, self._rules, strict=True), 1):
            if not re.fullmatch(pattern, value):
                reason = f"field {place} ({name}) is not {expected}"
                return reason, wrong_value(place, name, value, expected, encoding_hint(line))
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
    if full.all():
        numbers = found.astype(np.uint32)
    else:
        numbers = np.zeros(len(lengths), dtype=np.uint32)
        numbers[full] = found
    return Values(numbers, missing if missing.any() else None), len(data)


def _bytes_of(array: Any) -> tuple[Array, Array]:
    """All characters of a `pyarrow` array of binary, uint8, and the length of each value, 0 for nulls."""
    if not len(array):
        return np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.int32)
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    found = np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return found[ends[0] : ends[-1]], np.diff(ends)


def check_schema(schema: Schema, file: LogFile) -> None:
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


def header_hint(line: bytes) -> str:
    if re.match(rb'["A-Za-z_]', line):
        return "; a file with a header is read with a delimiter, or as it is if its name ends with .csv"
    return ""
