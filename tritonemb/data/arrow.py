"""Arrow columns of any source as `Values`: which types a column may have, and which rows are bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritonemb.data.schema import Schema, wrong_value
from tritonemb.utils import require

Array = np.ndarray[Any, Any]

_INFINITE = 2.0**128 - 2.0**103  # from here on, numbers are rounded to infinity in float32


@dataclass(frozen=True)
class Chunk:
    """A run of rows of a part of a log.

    Args:
        part: index of the part.
        offset: where the run begins: a byte of the unpacked text, or a row.
        line: lines of the part before it.
        content: whole lines, a `bytearray`, or a `pyarrow.RecordBatch`.
    """

    part: int
    offset: int
    line: int
    content: Any


@dataclass(frozen=True)
class Values:
    """The values of a column.

    Args:
        numbers: integers or float64 `[N]`; anything where missing. With `strings`, indices into them.
        missing: bool `[N]`; None if nothing is.
        strings: the distinct strings, a `pyarrow` string array.
        offsets: `[num_rows + 1]` int64 where each row's values start, for a column of lists; None with one value a row.
    """

    numbers: Array
    missing: Array | None = None
    strings: Any = None
    offsets: Array | None = None


Sink = Callable[[str, Values], None]
"""Receives the columns of a chunk by name, one after the other."""

Wrong = tuple[str, str, Array]
"""A column, what was expected in it, and the rows (bool `[N]`) that have something else."""


@dataclass(frozen=True)
class Checked:
    """Which rows of a chunk are good.

    Args:
        good: bool `[N]` of the rows that the sink received; None if all are.
        rows: int64 `[N]`, the line or row of each in the chunk.
        bad_rows: int64, the lines or rows that are bad, ascending: of the sink's rows and of others.
        describe: what is wrong with the n-th of them, as (reason, message).
    """

    good: Array | None
    rows: Array
    bad_rows: Array
    describe: Callable[[int], tuple[str, str]]


def check_columns(columns: Any, schema: Schema, where: str, labelled: bool = True) -> tuple[str, ...]:
    """The sparse columns that are lists.

    Args:
        columns: a `pyarrow.Schema`.

    Raises:
        ValueError: a column is there twice, or has values of another type than it needs.
    """
    types = require("pyarrow").types
    label = (schema.label,) * labelled
    for name in (*label, *schema.dense, *schema.sparse):
        check_single(columns.names, name, where)
    for name in (*label, *schema.dense):
        kind = _decoded(columns.field(name).type)
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)):
            what = "the label" if name == schema.label else "a dense column"
            raise ValueError(f"{where}: column {name!r} is {kind}, but {what} has numbers")
    lists = []
    for name in schema.sparse:
        kind = columns.field(name).type
        if _is_list(kind):
            lists.append(name)
        inner = _decoded(kind.value_type if _is_list(kind) else kind)
        if not (types.is_integer(inner) or types.is_boolean(inner) or types.is_null(inner) or _is_text(inner)):
            raise ValueError(
                f"{where}: column {name!r} is {kind}, but a sparse column has integers, strings or lists of them"
            )
    return tuple(lists)


def check_single(names: list[str], name: str, where: str) -> None:
    """ValueError if a column is there twice."""
    if names.count(name) > 1:
        raise ValueError(f"{where}: there are {names.count(name)} columns {name!r}; give them names of their own")


def is_text(kind: Any) -> bool | None:
    """Whether a sparse column of this `pyarrow` type has strings, and not integers; None where all is missing."""
    inner = _decoded(kind.value_type if _is_list(kind) else kind)
    return None if require("pyarrow").types.is_null(inner) else _is_text(inner)


def parse(batch: Any, schema: Schema, sink: Sink, labelled: bool = True) -> Checked:
    """Check the rows of a `pyarrow.RecordBatch` and hand its columns to the sink, bad rows too."""
    wrong = read_columns(batch, schema, sink, labelled)
    good = all_good(wrong, batch.num_rows)
    bad_rows = np.flatnonzero(~good)

    def describe(number: int) -> tuple[str, str]:
        row = int(bad_rows[number])
        name, expected, _ = next(entry for entry in wrong if entry[2][row])
        value = batch.column(name)[row].as_py()
        place = batch.schema.get_field_index(name) + 1
        message = wrong_value(place, name, "missing" if value is None else value, expected)
        return f"column {name} is not {expected}", message

    return Checked(good if len(bad_rows) else None, np.arange(batch.num_rows), bad_rows, describe)


def read_columns(columns: Any, schema: Schema, sink: Sink, labelled: bool = True) -> list[Wrong]:
    """Hand the columns of a `pyarrow.RecordBatch` or table of one chunk to the sink: what is wrong in some rows."""
    wrong: list[Wrong] = []
    if labelled:
        labels = _numbers(_one_chunk(columns.column(schema.label)))
        bad = ~np.isin(labels.numbers, (0, 1))
        wrong.append((schema.label, "0 or 1", bad if labels.missing is None else bad | labels.missing))
        sink(schema.label, labels)
    for name in schema.dense:
        values = _numbers(_one_chunk(columns.column(name)))
        if values.numbers.dtype.kind == "f":
            infinite = np.isinf(values.numbers)
            wrong.append((name, "a finite number or nothing", infinite))
            if not schema.is_logarithmic(name):
                large = (np.abs(values.numbers) >= _INFINITE) & ~infinite
                wrong.append((name, "a number that fits float32", large))
        sink(name, values)
    for name in schema.sparse:
        sink(name, categories(_one_chunk(columns.column(name))))
    return [entry for entry in wrong if entry[2].any()]


def all_good(wrong: list[Wrong], num_rows: int) -> Array:
    """bool `[num_rows]`: the rows with nothing wrong."""
    good: Array = ~np.logical_or.reduce([rows for _, _, rows in wrong] or [np.zeros(num_rows, dtype=bool)])
    return good


def string_buffers(strings: Any) -> tuple[Array, Array]:
    """Bytes (uint8) and offsets `[N + 1]` of a `pyarrow` array of strings or binary, 32- or 64-bit."""
    types = require("pyarrow").types
    wide = types.is_large_string(strings.type) or types.is_large_binary(strings.type)
    dtype = np.dtype(np.int64 if wide else np.int32)
    if len(strings) == 0:
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offsets, data = strings.buffers()
    ends = np.frombuffer(offsets, dtype, len(strings) + 1, strings.offset * dtype.itemsize)
    return np.zeros(0, dtype=np.uint8) if data is None else np.frombuffer(data, np.uint8), ends


def missing_of(array: Any) -> Array | None:
    """bool `[N]`, where a `pyarrow` array has nulls; None if it has none."""
    return array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None


def _one_chunk(column: Any) -> Any:
    return column.combine_chunks() if hasattr(column, "combine_chunks") else column


def _numbers(array: Any) -> Values:
    """Integers as int64; uint64, which may not fit, and floating point as float64 with NaN missing."""
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    array = _decode(array)
    kind, missing = array.type, missing_of(array)
    if pa.types.is_null(kind):
        return Values(np.zeros(len(array), dtype=np.int64), missing)
    if pa.types.is_floating(kind):
        found = compute.fill_null(array.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        undefined = np.isnan(found)
        if undefined.any():
            found = np.where(undefined, 0.0, found)
            missing = undefined if missing is None else missing | undefined
        return Values(found, missing)
    if pa.types.is_uint64(kind):
        return Values(compute.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.float64), missing)
    return Values(integers(array), missing)


def integers(array: Any) -> Array:
    """A `pyarrow` array of integers as int64: uint64 in two's complement, 0 for nulls."""
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    if pa.types.is_uint64(array.type):
        numbers: Array = compute.fill_null(array, 0).to_numpy(zero_copy_only=False).view(np.int64)
    else:
        numbers = compute.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return numbers


def categories(array: Any) -> Values:
    """A sparse column."""
    compute = require("pyarrow.compute")
    if not _is_list(array.type):
        return _single(array)
    lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    inner = _single(compute.list_flatten(array))
    return Values(inner.numbers, inner.missing, inner.strings, offsets)


def _single(array: Any) -> Values:
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    if pa.types.is_null(array.type):
        return Values(np.zeros(len(array), dtype=np.int64), np.ones(len(array), dtype=bool))
    if not _is_text(_decoded(array.type)):
        array = _decode(array)
        return Values(integers(array), missing_of(array))
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    missing = missing_of(encoded)
    codes = compute.fill_null(encoded.indices.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    strings = encoded.dictionary
    if strings.null_count:  # a null among the distinct strings
        nulls = strings.is_null().to_numpy(zero_copy_only=False)[codes]
        missing = nulls if missing is None else missing | nulls
        strings = compute.fill_null(strings, "")
    return Values(codes, missing, strings)


def _decode(array: Any) -> Any:
    return array.dictionary_decode() if require("pyarrow").types.is_dictionary(array.type) else array


def _decoded(kind: Any) -> Any:
    return kind.value_type if require("pyarrow").types.is_dictionary(kind) else kind


def _is_list(kind: Any) -> bool:
    types = require("pyarrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    types = require("pyarrow").types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
