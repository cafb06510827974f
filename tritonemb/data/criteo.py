"""Criteo's display-advertising log in its original format (Kaggle's `train.txt`, the Terabyte `day_*` files).

A line has 40 tab-separated fields: the label, 13 integers and 26 categories of up to 8 hexadecimal digits; an empty
field is a missing value. Integers become `log(1 + max(x, 0))`, missing ones 0.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
import torch

from tritonemb.data.dataset import Column, Dataset, Feature, Rows
from tritonemb.data.vocabulary import encode
from tritonemb.extras import require

INTEGERS = tuple(f"int_{i}" for i in range(1, 14))
CATEGORIES = tuple(f"cat_{i}" for i in range(1, 27))
FIELDS = ("label", *INTEGERS, *CATEGORIES)

_NIBBLES = np.full(256, 255, dtype=np.uint8)
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _NIBBLES[np.frombuffer(_digits, np.uint8)] = np.arange(16)


@dataclass(frozen=True)
class CriteoOptions:
    """How a Criteo file is split and numbered.

    Args:
        test_fraction: the last rows of the file are held out, since its lines are in order of time.
        min_count: a category with fewer training rows than this shares id 0 with missing values.
    """

    test_fraction: float = 1 / 6
    min_count: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction must lie between 0 and 1, got {self.test_fraction}")
        if self.min_count < 1:
            raise ValueError(f"min_count must be at least 1, got {self.min_count}")


def load_criteo(path: str | Path, options: CriteoOptions | None = None) -> Dataset:
    """Read a file in Criteo's format, plain or gzip (by its `.gz` suffix), into memory.

    Raises:
        FileNotFoundError, ValueError: a bad line is reported by file, line, field and value.
    """
    options = options or CriteoOptions()
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected one in Criteo's format (its train.txt or day_0)")
    pa = require("pyarrow")
    try:
        parts = list(_read(path))
    except pa.ArrowInvalid as error:
        _explain(path, error)
    except OSError as error:
        if path.suffix != ".gz":
            raise
        raise _broken_gzip(path, error) from error
    labels = np.concatenate([part[0] for part in parts])
    num_train = len(labels) - round(len(labels) * options.test_fraction)
    if not 0 < num_train < len(labels):
        raise ValueError(f"{path}: {len(labels)} rows are too few to hold out {options.test_fraction:.3f} of them")
    dense = np.concatenate([part[1] for part in parts])
    features, columns = [], []
    for name in CATEGORIES:
        # Chunks are popped as they are used: raw and encoded columns never stand in memory side by side.
        raw = pa.chunked_array([part[2].pop(name) for part in parts])
        ids, num_embeddings = encode(raw, num_train, options.min_count)
        features.append(Feature(name, num_embeddings))
        columns.append(Column(ids))
    rows = Rows(torch.from_numpy(dense), tuple(columns), torch.from_numpy(labels))
    return Dataset(path.name, tuple(features), rows.slice(0, num_train), rows.slice(num_train, len(rows)))


def _read(path: Path) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], dict[str, Any]]]:
    """Labels, dense values and uint32 categories, block by block."""
    pa, csv = require("pyarrow"), require("pyarrow.csv")
    types = {"label": pa.int8()} | dict.fromkeys(INTEGERS, pa.int64()) | dict.fromkeys(CATEGORIES, pa.string())
    reader = csv.open_csv(
        path,
        read_options=csv.ReadOptions(column_names=FIELDS, block_size=1 << 24),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )
    for block in reader:
        labels = block["label"]
        if labels.null_count or not np.isin(labels.to_numpy(), (0, 1)).all():
            raise pa.ArrowInvalid("a label is not 0 or 1")
        dense = np.empty((block.num_rows, len(INTEGERS)), dtype=np.float32)
        for index, name in enumerate(INTEGERS):
            values = block[name].fill_null(0).to_numpy(zero_copy_only=False)
            dense[:, index] = np.log1p(np.maximum(values, 0))
        yield labels.to_numpy().astype(np.float32), dense, {name: _parse_hex(block[name]) for name in CATEGORIES}


def _parse_hex(column: Any) -> Any:
    """A string array of hexadecimal numbers of up to 8 digits as uint32, nulls kept."""
    pa, pc = require("pyarrow"), require("pyarrow.compute")
    valid = column.drop_null()
    if len(valid) == 0:
        return pa.nulls(len(column), pa.uint32())
    lengths = pc.binary_length(valid).to_numpy(zero_copy_only=False)
    if lengths.max() > 8:
        raise pa.ArrowInvalid("a category has more than 8 digits")
    if lengths.min() < 8:
        valid = pc.utf8_lpad(valid, 8, "0")
    digits = np.frombuffer(_data_of(valid), np.uint8).reshape(-1, 8)
    numbers = np.zeros(len(digits), dtype=np.uint32)
    for place in range(8):
        nibbles = _NIBBLES[digits[:, place]]
        if nibbles.max() > 15:
            raise pa.ArrowInvalid("a category has a digit that is not hexadecimal")
        numbers = (numbers << np.uint32(4)) | nibbles
    missing = column.is_null().to_numpy(zero_copy_only=False)
    out = np.zeros(len(column), dtype=np.uint32)
    out[~missing] = numbers
    return pa.array(out, mask=missing)


def _data_of(strings: Any) -> Any:
    """The characters of a string array without nulls whose strings have 8 bytes each."""
    _, offsets, data = strings.buffers()
    start = np.frombuffer(offsets, np.int32)[strings.offset]
    return memoryview(data)[start : start + 8 * len(strings)]


def _explain(path: Path, cause: Exception) -> NoReturn:
    """Raise a ValueError for the first bad line. Slow, and only used once a file is known to be bad."""
    open_file = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with cast(BinaryIO, open_file(path, "rb")) as file:
            for number, line in enumerate(file, start=1):
                fields = line.rstrip(b"\r\n").split(b"\t")
                if fields != [b""] and (problem := _problem(fields)):
                    raise ValueError(f"{path}, line {number}: {problem}") from cause
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _broken_gzip(path, error) from error
    if number == 0:
        raise ValueError(f"{path} is empty; expected lines in Criteo's format") from cause
    raise ValueError(f"{path}: {cause}") from cause


def _broken_gzip(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is not a whole gzip file ({error}); fetch it again")


def _problem(fields: list[bytes]) -> str | None:
    if len(fields) != len(FIELDS):
        hint = " (Criteo's test.txt has no labels; use train.txt)" if len(fields) == len(FIELDS) - 1 else ""
        return f"expected {len(FIELDS)} tab-separated fields, found {len(fields)}{hint}"
    rules = [(rb"[01]", "0 or 1")] + [(rb"-?\d{1,18}|", "an integer or nothing")] * len(INTEGERS)
    rules += [(rb"[0-9a-fA-F]{1,8}|", "up to 8 hexadecimal digits or nothing")] * len(CATEGORIES)
    for place, (name, value, (pattern, expected)) in enumerate(zip(FIELDS, fields, rules, strict=True), start=1):
        if not re.fullmatch(pattern, value):
            return f"field {place} ({name}) is {value.decode(errors='backslashreplace')!r}, expected {expected}"
    return None
