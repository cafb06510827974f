"""Logs in Parquet files: which kinds of columns can be read, and how a slice of one becomes `Values`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritonemb.data.logs.files import LogFile
from tritonemb.data.logs.problems import wrong_value
from tritonemb.data.logs.schema import Schema
from tritonemb.data.logs.text import Chunk
from tritonemb.data.logs.values import Checked, Sink, Values
from tritonemb.utils import require

Array = np.ndarray[Any, Any]

SLICE_ROWS = 65_536  # at most: large row groups are read in slices
_INFINITE = 2.0**128 - 2.0**103  # from here on, numbers are rounded to infinity in float32
ROW_BYTES = 256  # that a row is taken to have, to make slices as large as chunks of text


@contextmanager
def opened(file: LogFile) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`.

    Raises:
        ValueError: it is damaged, or has other bytes than when it was found.
    """
    pa, parquet = require("pyarrow"), require("pyarrow.parquet")
    try:
        with pa.OSFile(str(file.path)) as raw:
            file.check_size(raw.size())
            # Pages are read as they are needed, in place of whole row groups.
            with parquet.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False) as opened_file:
                yield opened_file
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file.path} is not a whole Parquet file ({reason}); write or fetch it again") from error


@dataclass(frozen=True)
class Head:
    """What a file says of itself: its columns, its number of rows and that of each row group.

    Args:
        group_times: earliest and latest time of each row group, a `pyarrow` array of two; None if it has rows without
            a time, or does not say.
    """

    num_rows: int
    schema: Any
    group_rows: tuple[int, ...]
    group_times: tuple[Any, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)


def head_of(file: LogFile, time_column: str | None = None) -> Head:
    with opened(file) as source:
        groups = [source.metadata.row_group(group) for group in range(source.num_row_groups)]
        rows = tuple(group.num_rows for group in groups)
        times: tuple[Any, ...] = (None,) * len(groups)
        if time_column is not None and source.schema_arrow.names.count(time_column) == 1:
            kind = source.schema_arrow.field(time_column).type
            times = tuple(_times(group, time_column, kind) for group in groups)
        return Head(source.metadata.num_rows, source.schema_arrow, rows, times)


def _times(group: Any, column: str, kind: Any) -> Any:
    pa = require("pyarrow")
    known = pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_string(kind)
    if not known and not (pa.types.is_timestamp(kind) and kind.unit in ("ms", "us")):
        return None  # others are rounded, or may hold what is neither early nor late
    for place in range(group.num_columns):
        chunk = group.column(place)
        if chunk.path_in_schema == column and chunk.statistics is not None:
            found = chunk.statistics
            if found.has_min_max and found.null_count == 0:
                return pa.array([found.min, found.max], type=kind)
    return None


def check_columns(head: Head, schema: Schema, where: str, labelled: bool = True) -> tuple[str, ...]:
    """The sparse columns that are lists.

    Raises:
        ValueError: a column is there twice, or has values of another kind than it needs.
    """
    pa = require("pyarrow")
    types = pa.types
    for name in (*(schema.label,) * labelled, *schema.dense, *schema.sparse):
        check_single(head, name, where)
    for name in (*(schema.label,) * labelled, *schema.dense):
        kind = _decoded(head.schema.field(name).type)
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)):
            what = "the label" if name == schema.label else "a dense column"
            raise ValueError(f"{where}: column {name!r} is {kind}, but {what} has numbers")
    lists = []
    for name in schema.sparse:
        kind = head.schema.field(name).type
        inner = kind.value_type if _is_list(kind) else kind
        if _is_list(kind):
            lists.append(name)
        inner = _decoded(inner)
        if not (types.is_integer(inner) or types.is_boolean(inner) or types.is_null(inner) or _is_text(inner)):
            raise ValueError(
                f"{where}: column {name!r} is {kind}, but a sparse column has integers, strings or lists of them"
            )
    return tuple(lists)


def check_single(head: Head, name: str, where: str) -> None:
    """ValueError if a column that is there is there twice."""
    count = head.columns.count(name)
    if count > 1:
        raise ValueError(f"{where}: there are {count} columns {name!r}; give them names of their own")


def is_text(head: Head, name: str) -> bool | None:
    """Whether a sparse column has strings, and not integers; None where all is missing."""
    pa = require("pyarrow")
    kind = head.schema.field(name).type
    inner = _decoded(kind.value_type if _is_list(kind) else kind)
    return None if pa.types.is_null(inner) else _is_text(inner)


def parquet_chunks(
    file: LogFile, part: int, start: int, stop: int, chunk_bytes: int, offset: int, columns: tuple[str, ...]
) -> Iterator[Chunk]:
    """The rows from `start` on and before `stop`, in slices of at most `SLICE_ROWS`, beginning at row `offset`."""
    slice_rows = min(max(chunk_bytes // ROW_BYTES, 1), SLICE_ROWS)
    with opened(file) as source:
        row = 0
        for group in range(source.num_row_groups):
            group_rows = source.metadata.row_group(group).num_rows
            if row + group_rows <= offset:
                row += group_rows
                continue
            for batch in source.iter_batches(slice_rows, row_groups=[group], columns=list(columns), use_threads=False):
                first, last = max(offset - row, 0), min(stop - row, batch.num_rows)
                if first < last:
                    content = batch.slice(first, last - first)
                    yield Chunk(part, row + first, row + first - start, content)
                row += batch.num_rows
                if row >= stop:
                    return
    if row < stop:
        raise ValueError(
            f"{file.path} has changed since it was opened first: it had at least {stop} rows and now has {row}; "
            "start again"
        )


def parse(batch: Any, schema: Schema, sink: Sink, labelled: bool = True) -> Checked:
    """Check the rows of a slice and hand its columns to the sink, bad rows too."""
    wrong: list[tuple[str, str, Array]] = []
    places = {name: place for place, name in enumerate(batch.schema.names, start=1)}
    if labelled:
        labels = _numbers(batch.column(batch.schema.get_field_index(schema.label)))
        bad = ~np.isin(labels.numbers, (0, 1))
        if labels.missing is not None:
            bad |= labels.missing
        wrong.append((schema.label, "0 or 1", bad))
        sink(schema.label, labels)
    for name in schema.dense:
        values = _numbers(batch.column(batch.schema.get_field_index(name)))
        if values.numbers.dtype.kind == "f":
            bad = np.isinf(values.numbers)
            if bad.any():
                wrong.append((name, "a finite number or nothing", bad))
            if not schema.is_logarithmic(name):
                bad = (np.abs(values.numbers) >= _INFINITE) & ~bad
                if bad.any():
                    wrong.append((name, "a number that fits float32", bad))
        sink(name, values)
    for name in schema.sparse:
        sink(name, _categories(batch.column(batch.schema.get_field_index(name))))
    any_bad = np.logical_or.reduce([rows for _, _, rows in wrong] or [np.zeros(batch.num_rows, dtype=bool)])
    bad_rows = np.flatnonzero(any_bad)

    def describe(number: int) -> tuple[str, str]:
        row = int(bad_rows[number])
        name, expected, _ = next(entry for entry in wrong if entry[2][row])
        value = batch.column(batch.schema.get_field_index(name))[row].as_py()
        shown = "missing" if value is None else value
        return f"column {name} is not {expected}", wrong_value(places[name], name, shown, expected)

    good = ~any_bad if len(bad_rows) else None
    return Checked(good, np.arange(batch.num_rows), bad_rows, describe, batch.num_rows)


def _numbers(array: Any) -> Values:
    """Integers as int64; uint64, which may not fit, and floating point as float64 with NaN missing."""
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    array = _decode(array)
    kind = array.type
    missing = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if pa.types.is_null(kind):
        return Values(np.zeros(len(array), dtype=np.int64), np.ones(len(array), dtype=bool))
    if pa.types.is_floating(kind):
        found = compute.fill_null(array.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        undefined = np.isnan(found)
        if undefined.any():
            found = np.where(undefined, 0.0, found)
            missing = undefined if missing is None else missing | undefined
        return Values(found, missing)
    if pa.types.is_uint64(kind):
        return Values(compute.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.float64), missing)
    return Values(_integers(array), missing)


def _integers(array: Any) -> Array:
    """int64, uint64 in two's complement, 0 for nulls."""
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    if pa.types.is_uint64(array.type):
        numbers: Array = compute.fill_null(array, 0).to_numpy(zero_copy_only=False).view(np.int64)
    else:
        numbers = compute.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return numbers


def _categories(array: Any) -> Values:
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    if not _is_list(array.type):
        return _single(array)
    lengths = compute.fill_null(compute.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    inner = _single(compute.list_flatten(array))
    if isinstance(inner.missing, np.ndarray) and pa.types.is_null(array.type.value_type):
        return Values(inner.numbers, inner.missing, None, offsets)
    return Values(inner.numbers, inner.missing, inner.strings, offsets)


def _single(array: Any) -> Values:
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    if pa.types.is_null(array.type):
        return Values(np.zeros(len(array), dtype=np.int64), np.ones(len(array), dtype=bool))
    text = _is_text(_decoded(array.type))
    if not text:
        array = _decode(array)
        missing = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        return Values(_integers(array), missing)
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    missing = encoded.is_null().to_numpy(zero_copy_only=False) if encoded.null_count else None
    codes = compute.fill_null(encoded.indices.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    strings = encoded.dictionary
    if strings.null_count:  # a null among the distinct strings
        nulls = strings.is_null().to_numpy(zero_copy_only=False)[codes]
        missing = nulls if missing is None else missing | nulls
        strings = compute.fill_null(strings, "")
    return Values(codes, missing, strings)


def _decode(array: Any) -> Any:
    pa = require("pyarrow")
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _decoded(kind: Any) -> Any:
    pa = require("pyarrow")
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_list(kind: Any) -> bool:
    types = require("pyarrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(kind: Any) -> bool:
    types = require("pyarrow").types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
