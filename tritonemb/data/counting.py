"""Counting the values of a log's train rows, to number them in a vocabulary file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tritonemb.data.arrow import Chunk, Values
from tritonemb.data.click_log import ClickLog
from tritonemb.data.encode import COLUMNS, METADATA
from tritonemb.utils import require, written_aside

Array = np.ndarray[Any, Any]

CAPACITY = 1 << 22  # distinct values that are counted at a time, of one feature


@dataclass(frozen=True)
class VocabularyReport:
    """What became of a vocabulary.

    Args:
        rows: train rows counted.
        skipped: bad rows left out.
        num_embeddings: ids of each feature, 0 among them.
        forgotten: for features with more distinct values than could be counted at a time: by how much, at most, a
            count is too low.
    """

    rows: int
    skipped: int
    num_embeddings: dict[str, int]
    forgotten: dict[str, int]


def build_vocabulary(
    log: ClickLog,
    path: str | Path,
    min_count: int = 1,
    max_size: int | None = None,
    *,
    capacity: int = CAPACITY,
    progress: Callable[[int], None] | None = None,
) -> VocabularyReport:
    """Count the values of the train rows, read once, and write them to one file, at once and whole.

    Memory is bounded: at most `capacity` distinct values a feature are counted at a time, plus a half of that while
    they are put together.

    Args:
        log: read with its own threads; a vocabulary in its schema is not looked at.
        min_count: values with fewer train rows share id 0 with the missing ones.
        max_size: the most frequent values that a feature keeps; all if not given.
        progress: is called with the number of rows read so far, now and then.

    Raises:
        ValueError: a number below 1; a bad row, unless the log skips them.
        FileNotFoundError: there is no folder for the file.
    """
    for name, number in (("min_count", min_count), ("max_size", max_size), ("capacity", capacity)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} to")
    counters = {name: Counter(name, capacity) for name in log.schema.sparse}
    rows = skipped = 0

    def count(chunk: Chunk) -> tuple[int, int, dict[str, tuple[bool, Any]]]:
        columns: dict[str, Values] = {}
        labels: list[Values] = []

        def put(name: str, values: Values) -> None:
            if name in counters:
                columns[name] = values
            elif name == log.schema.label:
                labels.append(values)

        keep, problems = log.parse("train", chunk, put)
        num_rows = len(labels[0].numbers) if keep is None else int(keep.sum())
        return num_rows, problems.total, {name: counted(values, keep) for name, values in columns.items()}

    with closing(log.scan("train", count)) as results:
        for num_rows, num_skipped, tables in results:
            rows, skipped = rows + num_rows, skipped + num_skipped
            for name, (integers, table) in tables.items():
                counters[name].add(integers, table)
            if progress is not None:
                progress(rows)
    if rows == 0:
        raise ValueError(f"data set {log.name!r}: there are no train rows to make a vocabulary of")
    sizes = _save(path, counters, min_count, max_size)
    return VocabularyReport(rows, skipped, sizes, {n: c.forgotten for n, c in counters.items() if c.forgotten})


def counted(values: Values, good: Array | None) -> tuple[bool, Any]:
    """Whether the values are integers, and a table of value and count: of the good rows and without missing ones."""
    pa, compute = require("pyarrow"), require("pyarrow.compute")
    keep = _kept(values, good)
    codes = values.numbers if keep is None else values.numbers[keep]
    if values.strings is None:
        column = pa.array(codes.astype(np.int64))
    else:
        column = values.strings.cast(pa.large_string()).take(pa.array(codes))
    found = compute.value_counts(column)
    return values.strings is None, pa.table({"value": found.field("values"), "count": found.field("counts")})


class Counter:
    """How often each value of one feature occurs, in bounded memory.

    Exact while a feature has at most `capacity` distinct values. Beyond that the rarest so far are forgotten; counts
    are then too low by `forgotten` at most.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self._name, self._capacity = name, capacity
        self._merged: Any = None
        self._pending: list[Any] = []
        self._num_pending = 0
        self.integers: bool | None = None
        self.forgotten = 0

    def add(self, integers: bool, table: Any) -> None:
        """Take what `counted` gave of a chunk."""
        if not table.num_rows:
            return
        if self.integers is None:
            self.integers = integers
        if self.integers != integers:
            raise ValueError(f"feature {self._name!r} has integers in some files and strings in others")
        self._pending.append(table)
        self._num_pending += table.num_rows
        if self._num_pending > max(self._capacity // 2, 1):
            self._merge()

    def most_frequent(self, min_count: int, max_size: int | None) -> tuple[Any, Any]:
        """Values and counts, by descending count and then by value."""
        self._merge()
        if self._merged is None:
            return None, None
        compute = require("pyarrow.compute")
        table = self._merged.filter(compute.greater_equal(self._merged["count"], min_count))
        table = table.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, max_size)
        return table["value"].combine_chunks(), table["count"].combine_chunks()

    def _merge(self) -> None:
        pa = require("pyarrow")
        tables = [*self._pending] if self._merged is None else [self._merged, *self._pending]
        self._pending, self._num_pending = [], 0
        if not tables:
            return
        table = pa.concat_tables(tables).group_by("value", use_threads=False).aggregate([("count", "sum")])
        self._merged = table.rename_columns({"count_sum": "count"}) if table.num_rows else table
        if self._merged.num_rows > self._capacity:
            counts = self._merged["count"].to_numpy()
            order = np.argsort(-counts, kind="stable")
            self.forgotten += int(counts[order[self._capacity]])
            self._merged = self._merged.take(pa.array(np.sort(order[: self._capacity])))


def _kept(values: Values, good: Array | None) -> Array | None:
    """Which values are neither missing nor of a bad row."""
    if good is not None and values.offsets is not None:
        good = np.repeat(good, np.diff(values.offsets))
    if values.missing is None:
        return good
    return ~values.missing if good is None else good & ~values.missing


def _save(path: Path, counters: Mapping[str, Counter], min_count: int, max_size: int | None) -> dict[str, int]:
    """Write a vocabulary, at once and whole; returns each feature's number of ids, 0 for missing among them."""
    pa, parquet = require("pyarrow"), require("pyarrow.parquet")
    types = (pa.string(), pa.large_string(), pa.int64(), pa.int64())
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    kinds = {name: "string" if counter.integers is False else "integer" for name, counter in counters.items()}
    schema = schema.with_metadata({METADATA: json.dumps(kinds).encode()})
    sizes = {}
    with written_aside(path) as part, parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        for name, counter in counters.items():
            values, counts = counter.most_frequent(min_count, max_size)
            size = 0 if values is None else len(values)
            sizes[name] = size + 1
            if size:
                ids, names = pa.array(np.arange(1, size + 1)), pa.array([name] * size, pa.string())
                columns = [names, values.cast(pa.large_string()), ids, counts.cast(pa.int64())]
                writer.write_table(pa.table(columns, schema=schema))
    return sizes
