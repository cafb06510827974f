"""Passes over a log, and their commands: conversion of text to Parquet, and counting of values for a vocabulary."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tritonemb.data.click_log import ClickLog
from tritonemb.data.encode import COLUMNS, METADATA, count_values, is_text, most_frequent
from tritonemb.data.files import compute, display_path, find_files, pa, write_parquet
from tritonemb.data.protocol import ReadReport, Split
from tritonemb.data.schema import ALL_ROWS, LogOptions
from tritonemb.utils import atomic_write, read_sealed, require, seal

_Task = tuple[ClickLog, Split, Path]
RowsDone = Callable[[int], None]
ShareDone = Callable[[int, int], None]
Compression = Literal["zstd", "snappy", "gzip", "lz4", "none"]

ROW_GROUP_ROWS = 1 << 17
SECONDS_BETWEEN_LINES = 5.0
CAPACITY = 1 << 22  # distinct values of one feature that are counted at a time
MAX_PIECES = 256  # chunks per table of counts: appending one takes a time that grows with their number


def convert(
    source: str | Path, target: str | Path, options: LogOptions | None = None, *, row_group_rows: int = ROW_GROUP_ROWS,
    compression: Compression = "zstd", progress: RowsDone | None = None,
) -> ReadReport:  # fmt: skip
    """Convert a text file to a Parquet file, or a folder of them to a folder of Parquet files; report the rows written.

    A file gets its name when it is complete. It has the columns of the schema, and the time column of the split: the
    label as int8, numbers as float64, categories as string or int64, times as string or int64; in Criteo's format int_1
    to int_13 as int64 and cat_1 to cat_26 as uint32. An empty field is null. A `ClickLog` of either has the same rows,
    and the same splits except by "end".
    Raise the errors of `ClickLog`, and ValueError if the target exists, or the source is Parquet already.

    Args:
        target: must not exist; in an existing folder, none of the files may.
        options: how the text is read; its split rule does not matter.
        row_group_rows: rows per row group, except the last.
        progress: called from time to time with the number of rows written.
    """
    if row_group_rows < 1:
        raise ValueError(f"row_group_rows must be at least 1, got {row_group_rows}")
    # Check that source and targets fit.
    target, files = Path(target), find_files(source)
    if files[0].format == "parquet":
        raise ValueError(f"{files[0].path} is Parquet already; only text files can be converted")
    is_folder = files[0].path != display_path(source)
    targets = [target / f"{file.stem}.parquet" for file in files] if is_folder else [target]
    if existing := [path for path in targets if path.exists()]:
        raise ValueError(f"{existing[0]} exists already; remove it, or name another target")
    # Convert file by file; the time column is read only if the split needs it.
    options = replace(options or LogOptions(), transforms=())
    log = ClickLog(source, options if options.split.time_column else replace(options, split=ALL_ROWS))
    if is_folder:
        target.mkdir(exist_ok=True)
    tasks: list[_Task] = [(log.all_rows_as("train", [number]), "train", path) for number, path in enumerate(targets)]
    reports = _write(tasks, row_group_rows, compression, progress)
    if not any(report.rows for report in reports):
        for path in targets:
            path.unlink()
        raise ValueError(f"{display_path(source)} has no valid rows to convert")
    return sum(reports, ReadReport())


def cached_as_parquet(log: ClickLog, folder: str | Path, progress: ShareDone | None = None) -> ClickLog:
    """Return a text log as read from a cache of Parquet files, which is written on first use; other logs as they are.

    Splits, rows and their order are the same; the cache has one file per split. Skipped bad rows are reported in each
    epoch as before; a bad row that is not skipped is a ValueError. Processes wait for the one that writes.

    Args:
        folder: folder of the cache, created if missing. Logs, and options that change their rows, have separate files.
        progress: called with the number of rows written and the estimated total.
    """
    if log.text_schema() is None:
        return log
    cache = Path(folder) / log.rows_digest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    summary = cache / "log.json"
    with require("filelock").FileLock(str(cache / "lock")):
        if not summary.exists():
            total = sum(log.estimated_rows(split) or 0 for split in log.splits())
            tasks: list[_Task] = [(log, split, cache / f"{split}.parquet") for split in log.splits()]
            on_progress = None if progress is None else lambda rows: progress(rows, total)
            new_reports = map(asdict, _write(tasks, ROW_GROUP_ROWS, "zstd", on_progress))
            atomic_write(summary, seal(json.dumps(dict(zip(log.splits(), new_reports, strict=True)))))
    try:
        reports = json.loads(read_sealed(summary))
    except ValueError as error:
        raise ValueError(f"{summary} is damaged ({error}); remove {cache} to build it again") from error
    files = {s: find_files(cache / f"{s}.parquet")[0] if reports[s]["rows"] else None for s in log.splits()}
    skipped = {split: ReadReport.from_json(reports[split] | {"rows": 0}) for split in log.splits()}
    return log.with_parquet_files(files, skipped)


def _write(tasks: Sequence[_Task], group_rows: int, codec: Compression, progress: RowsDone | None) -> list[ReadReport]:
    schema = tasks[0][0].text_schema()
    reports = list[ReadReport]()
    for log, split, path in tasks:
        report, pending, rows_before = ReadReport(), schema.empty_table(), sum(report.rows for report in reports)
        with (
            write_parquet(path, schema, codec) as writer,
            closing(log.scan(split, partial(_cast, schema=schema, labels=log.schema.labels))) as blocks,
        ):
            for block in blocks:
                report += block.report
                pending = pa.concat_tables([pending, block.rows])
                if num_whole := pending.num_rows // group_rows * group_rows:
                    writer.write_table(pending.slice(0, num_whole), group_rows)
                    pending = pending.slice(num_whole)
                if progress is not None:
                    progress(rows_before + report.rows)
            if pending.num_rows:
                writer.write_table(pending, group_rows)
        reports.append(report)
    return reports


def _cast(batch: Any, schema: Any, labels: Sequence[str]) -> Any:
    """Select and cast columns; NaN in one of several labels is a missing one, null."""
    for name in labels:
        values = batch.column(name)
        if pa.types.is_floating(values.type):
            nulls = compute.if_else(compute.is_nan(values), None, values)
            batch = batch.set_column(batch.schema.get_field_index(name), name, nulls)
    return pa.table(batch).select(schema.names).cast(schema)


@dataclass(frozen=True)
class VocabularyReport:
    """Train rows counted, bad rows skipped, number of ids per feature (0 included), and by how much a count of a
    feature may be too low if it has more distinct values than `capacity`."""

    rows: int
    skipped: int
    num_embeddings: dict[str, int]
    forgotten: dict[str, int]


def build_vocabulary(
    log: ClickLog, path: str | Path, min_count: int = 1, max_size: int | None = None, *, capacity: int = CAPACITY,
    progress: RowsDone | None = None,
) -> VocabularyReport:  # fmt: skip
    """Count the values of the train rows in one pass, and write a vocabulary file atomically.

    Memory is bounded: at most `2 * capacity` distinct values per feature are counted at a time. Raise ValueError for a
    number below 1, or a bad row unless the log skips bad rows; raise FileNotFoundError if the folder is missing.

    Args:
        log: read with its own threads; a vocabulary in its schema is ignored.
        min_count: values with fewer train rows share id 0 with missing values.
        max_size: number of most frequent values per feature that get an id; all by default.
        progress: called from time to time with the number of rows read.
    """
    for name, number in (("min_count", min_count), ("max_size", max_size), ("capacity", capacity)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if log.is_endless:
        raise ValueError(f"{log.name} has no end, so its values cannot be counted; write them to files")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} to")
    # Count chunk by chunk; merge the counts of a feature when they have grown too long.
    columns, shared, report = log.schema.sparse, log.schema.shared_tables(), ReadReport()
    counts: dict[str, Any] = {}
    names = [name for name in columns if name not in shared]
    undercount = dict.fromkeys(names, 0)
    with closing(log.scan("train", lambda batch: [count_values(batch.column(name)) for name in columns])) as blocks:
        for block in blocks:
            report += block.report
            for column, chunk_counts in zip(columns, block.rows, strict=True):
                name = shared.get(column, column)
                if chunk_counts.num_rows:
                    counts[name] = pa.concat_tables([counts[name], chunk_counts]) if name in counts else chunk_counts
                unmerged = counts.get(name, chunk_counts)
                if unmerged.num_rows > 2 * capacity or unmerged["value"].num_chunks > MAX_PIECES:
                    counts[name], dropped = _merge_counts(unmerged, capacity)
                    undercount[name] += dropped
            if progress is not None:
                progress(report.rows)
    if report.rows == 0:
        raise ValueError(f"data set {log.name!r}: no train rows to build a vocabulary from")
    # Number the most frequent values of each feature.
    sizes = dict.fromkeys(names, 1)
    for name, unmerged in counts.items():
        merged, dropped = _merge_counts(unmerged, capacity)
        undercount[name] += dropped
        counts[name] = most_frequent(merged, min_count, max_size)
        sizes[name] += counts[name].num_rows
    _write_vocabulary(path, {name: counts.get(name) for name in names})
    return VocabularyReport(report.rows, report.skipped, sizes, {name: n for name, n in undercount.items() if n})


def _merge_counts(table: Any, capacity: int) -> tuple[Any, int]:
    sums = table.group_by("value", use_threads=False).aggregate([("count", "sum")])
    table = sums.rename_columns({"count_sum": "count"})
    if table.num_rows <= capacity:
        return table, 0
    counts = table["count"].to_numpy()
    order = np.argsort(-counts, kind="stable")
    return table.take(pa.array(np.sort(order[:capacity]))), int(counts[order[capacity]])


def _write_vocabulary(path: Path, tables: Mapping[str, Any]) -> None:
    types = (pa.string(), pa.large_string(), pa.int64(), pa.int64())
    texts = {name for name, counts in tables.items() if counts is not None and is_text(counts["value"].type)}
    kinds = {name: "string" if name in texts else "integer" for name in tables}
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)), {METADATA: json.dumps(kinds).encode()})
    with write_parquet(path, schema, "zstd") as writer:
        for name, counts in tables.items():
            if counts is not None:
                names, ids = pa.array([name] * counts.num_rows, pa.string()), np.arange(1, counts.num_rows + 1)
                columns = {"feature": names, "value": counts["value"], "id": ids, "count": counts["count"]}
                writer.write_table(pa.table(columns).cast(schema))


@dataclass(frozen=True)
class VocabOptions:
    """Build a vocabulary for --vocabulary: number the categories of a log's train rows by frequency.

    Example: tritonemb vocab --data train.txt --out vocabulary.parquet --min-count 10

    Args:
        data: the log, a file or a folder.
        out: the file to write.
        min_count: rarer values share id 0 with missing values.
        max_size: number of most frequent values per feature that get an id; all by default.
        read: options for reading the log.
    """

    data: str
    out: Path = Path("vocabulary.parquet")
    min_count: int = 10
    max_size: int | None = None
    read: LogOptions = field(default_factory=LogOptions)


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a log in text files to Parquet files, which are faster to read.

    Example: tritonemb convert --data day_0.gz --out day_0.parquet

    Args:
        data: the log: a file, or a folder of them.
        out: the file to write, or the folder for a folder.
        row_group_rows: rows per row group.
        compression: codec of the columns.
        read: options for reading the log; the split is ignored.
    """

    data: str
    out: Path
    row_group_rows: int = ROW_GROUP_ROWS
    compression: Compression = "zstd"
    read: LogOptions = field(default_factory=LogOptions)


def make_vocabulary(options: VocabOptions) -> str:
    log = ClickLog(options.data, options.read)
    report = build_vocabulary(log, options.out, options.min_count, options.max_size, progress=_progress_printer("read"))
    sizes = ", ".join(f"{name} {size:,}" for name, size in report.num_embeddings.items())
    note = "note: {} has more distinct values than can be counted at a time; counts may be {:,} too low"
    notes = [note.format(*entry) for entry in report.forgotten.items()]
    return "\n".join([f"{_summary(options.out, report, ' train')}", f"ids: {sizes}", *notes])


def convert_log(options: ConvertOptions) -> str:
    writing: dict[str, Any] = {"row_group_rows": options.row_group_rows, "compression": options.compression}
    report = convert(options.data, options.out, options.read, **writing, progress=_progress_printer("written"))
    files = f" in {len(find_files(options.data)):,} files" if options.out.is_dir() else ""
    return _summary(options.out, report, "", files)


def _summary(path: Path, report: ReadReport | VocabularyReport, kind: str, files: str = "") -> str:
    skipped = f"; {report.skipped:,} bad rows were left out" if report.skipped else ""
    return f"{path}: {report.rows:,}{kind} rows{files}{skipped}"


def _progress_printer(verb: str) -> Callable[[int], None]:
    last = time.monotonic()

    def report(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{rows:,} rows {verb}", file=sys.stderr, flush=True)

    return report
