"""Passes over a log, and their commands: text to Parquet, which reads faster, and counts of values to a vocabulary."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tritonemb.data.arrow import pa
from tritonemb.data.click_log import ClickLog
from tritonemb.data.encode import COLUMNS, METADATA, count_values, is_text, most_frequent
from tritonemb.data.files import display_path, find_files, write_parquet
from tritonemb.data.protocol import ReadReport, Split
from tritonemb.data.schema import ALL_ROWS, LogOptions
from tritonemb.utils import atomic_write, read_sealed, require, seal

_Task = tuple[ClickLog, Split, Path]
Compression = Literal["zstd", "snappy", "gzip", "lz4", "none"]

ROW_GROUP_ROWS = 1 << 17
SECONDS_BETWEEN_LINES = 5.0
CAPACITY = 1 << 22  # distinct values that are counted at a time, of one feature
MOST_PIECES = 256  # of a table of them: adding one takes a time that grows with their number


def convert(
    source: str | Path, target: str | Path, options: LogOptions | None = None, *, row_group_rows: int = ROW_GROUP_ROWS,
    compression: Compression = "zstd", progress: Callable[[int], None] | None = None,
) -> ReadReport:  # fmt: skip
    """Write a text file as a Parquet file, or a folder of them as a folder of Parquet files; report what was written.

    Each file gets its name when it is whole. It has the columns of the schema, and the time column of the split: the
    label as int8, numbers as float64, categories as string or int64, times as string or int64; of Criteo's format int_1
    to int_13 as int64 and cat_1 to cat_26 as uint32. An empty field is null. A `ClickLog` has the same rows for both,
    and the same splits but by "end".
    Raises as `ClickLog`, and ValueError if the target is there, or the source is Parquet already.

    Args:
        target: must not be there yet; in a folder, none of the files.
        options: how the text is read, whichever rows it holds out.
        row_group_rows: rows of a row group, all but the last.
        progress: is called with the number of rows written so far, now and then.
    """
    if row_group_rows < 1:
        raise ValueError(f"row_group_rows must be at least 1, got {row_group_rows}")
    target, files = Path(target), find_files(source)
    if files[0].format == "parquet":
        raise ValueError(f"{files[0].path} is Parquet already; text files are converted")
    is_folder = files[0].path != display_path(source)
    targets = [target / f"{file.stem}.parquet" for file in files] if is_folder else [target]
    if there := [path for path in targets if path.exists()]:
        raise ValueError(f"{there[0]} is there already; remove it, or name another target")
    by_time = options is not None and options.split.time_column
    log = ClickLog(source, options if by_time else replace(options or LogOptions(), split=ALL_ROWS))
    if is_folder:
        target.mkdir(exist_ok=True)
    tasks: list[_Task] = [(log.all_rows_as("train", [number]), "train", path) for number, path in enumerate(targets)]
    reports = _write(tasks, row_group_rows, compression, progress)
    empty = [(file, path) for file, path, report in zip(files, targets, reports, strict=True) if not report.rows]
    for _, path in empty:
        path.unlink()
    if empty:
        raise ValueError(f"{empty[0][0].path} has no good rows to convert")
    return sum(reports, ReadReport())


def cached_as_parquet(
    log: ClickLog, folder: str | Path, progress: Callable[[int, int], None] | None = None
) -> ClickLog:
    """The same log read from Parquet files in a folder, written there unless they are; only text is converted.

    Splits, rows and their order are the same; each split has a file of its own. Bad rows that were skipped are reported
    in each epoch as before; others are a ValueError. Processes that ask for the same files wait for the one that writes
    them.

    Args:
        folder: made if need be. Another log, or another way to read it, has other files there.
        progress: is called with the rows written so far and their estimated number.
    """
    if log.text_schema() is None:
        return log
    kept = Path(folder) / log.rows_digest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    summary = kept / "log.json"
    with require("filelock").FileLock(str(kept / "lock")):
        if not summary.exists():
            total = sum(log.estimated_rows(split) or 0 for split in log.splits())
            tasks: list[_Task] = [(log, split, kept / f"{split}.parquet") for split in log.splits()]
            written = None if progress is None else lambda rows: progress(rows, total)
            reports = map(asdict, _write(tasks, ROW_GROUP_ROWS, "zstd", written))
            atomic_write(summary, seal(json.dumps(dict(zip(log.splits(), reports, strict=True)))))
    try:
        found = json.loads(read_sealed(summary))
    except ValueError as error:
        raise ValueError(f"{summary} is damaged ({error}); remove {kept}, and it is made anew") from error
    files = {
        split: find_files(kept / f"{split}.parquet")[0] if found[split]["rows"] else None for split in log.splits()
    }
    return log.in_files(files, {split: ReadReport.from_json(found[split] | {"rows": 0}) for split in log.splits()})


def _write(
    tasks: Sequence[_Task], row_group_rows: int, compression: Compression, progress: Callable[[int], None] | None
) -> list[ReadReport]:
    schema = tasks[0][0].text_schema()
    reports: list[ReadReport] = []
    for log, split, path in tasks:
        report, waiting, before = ReadReport(), schema.empty_table(), sum(report.rows for report in reports)
        with (
            write_parquet(path, schema, compression) as writer,
            closing(log.scan(split, lambda batch: pa.table(batch).select(schema.names).cast(schema))) as blocks,
        ):
            for block in blocks:
                report += block.report
                waiting = pa.concat_tables([waiting, block.rows])
                if whole := waiting.num_rows // row_group_rows * row_group_rows:
                    writer.write_table(waiting.slice(0, whole), row_group_rows)
                    waiting = waiting.slice(whole)
                if progress is not None:
                    progress(before + report.rows)
            if waiting.num_rows:
                writer.write_table(waiting, row_group_rows)
        reports.append(report)
    return reports


@dataclass(frozen=True)
class VocabularyReport:
    """Train rows counted, and bad ones left out; the ids of each feature, 0 among them; and by how much a count of a
    feature may be too low, if too many distinct values had to be counted."""

    rows: int
    skipped: int
    num_embeddings: dict[str, int]
    forgotten: dict[str, int]


def build_vocabulary(
    log: ClickLog, path: str | Path, min_count: int = 1, max_size: int | None = None, *, capacity: int = CAPACITY,
    progress: Callable[[int], None] | None = None,
) -> VocabularyReport:  # fmt: skip
    """Count the values of the train rows, read once, and write them to one file, at once and whole.

    Memory is bounded: at most `capacity` distinct values a feature are counted at a time, plus as many that came since.
    ValueError for a number below 1, or a bad row, unless the log skips them; FileNotFoundError without the folder.

    Args:
        log: read with its own threads; a vocabulary in its schema is not looked at.
        min_count: values with fewer train rows share id 0 with the missing ones.
        max_size: the most frequent values that a feature keeps; all if not given.
        progress: is called with the number of rows read so far, now and then.
    """
    for name, number in (("min_count", min_count), ("max_size", max_size), ("capacity", capacity)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder to write {path.name} to")
    names, report = log.schema.sparse, ReadReport()
    tables: dict[str, Any] = {}
    forgotten = dict.fromkeys(names, 0)
    with closing(log.scan("train", lambda batch: [count_values(batch.column(name)) for name in names])) as blocks:
        for block in blocks:
            report += block.report
            for name, table in zip(names, block.rows, strict=True):
                if table.num_rows:
                    tables[name] = pa.concat_tables([tables[name], table]) if name in tables else table
                known = tables.get(name, table)
                if known.num_rows > 2 * capacity or known["value"].num_chunks > MOST_PIECES:
                    tables[name], lost = _merge_counts(known, capacity)
                    forgotten[name] += lost
            if progress is not None:
                progress(report.rows)
    if report.rows == 0:
        raise ValueError(f"data set {log.name!r}: there are no train rows to make a vocabulary of")
    sizes = dict.fromkeys(names, 1)
    for name, table in tables.items():
        summed, lost = _merge_counts(table, capacity)
        forgotten[name] += lost
        tables[name] = most_frequent(summed, min_count, max_size)
        sizes[name] += tables[name].num_rows
    _write_vocabulary(path, {name: tables.get(name) for name in names})
    return VocabularyReport(report.rows, report.skipped, sizes, {name: n for name, n in forgotten.items() if n})


def _merge_counts(table: Any, capacity: int) -> tuple[Any, int]:
    summed = table.group_by("value", use_threads=False).aggregate([("count", "sum")])
    table = summed.rename_columns({"count_sum": "count"})
    if table.num_rows <= capacity:
        return table, 0
    counts = table["count"].to_numpy()
    order = np.argsort(-counts, kind="stable")
    return table.take(pa.array(np.sort(order[:capacity]))), int(counts[order[capacity]])


def _write_vocabulary(path: Path, tables: Mapping[str, Any]) -> None:
    types = (pa.string(), pa.large_string(), pa.int64(), pa.int64())
    texts = {name for name, kept in tables.items() if kept is not None and is_text(kept["value"].type)}
    kinds = {name: "string" if name in texts else "integer" for name in tables}
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)), {METADATA: json.dumps(kinds).encode()})
    with write_parquet(path, schema, "zstd") as writer:
        for name, kept in tables.items():
            if kept is not None:
                names, ids = pa.array([name] * kept.num_rows, pa.string()), np.arange(1, kept.num_rows + 1)
                columns = {"feature": names, "value": kept["value"], "id": ids, "count": kept["count"]}
                writer.write_table(pa.table(columns).cast(schema))


@dataclass(frozen=True)
class VocabOptions:
    """Number the categories of a log's train rows by how often they occur, for --vocabulary.

    Example: tritonemb vocab --data train.txt --out vocabulary.parquet --min-count 10

    Args:
        data: the log, a file or a folder.
        out: the file to write.
        min_count: rarer values share id 0 with missing ones.
        max_size: the most frequent values that each feature keeps; all if not given.
        read: how the log is read.
    """

    data: str
    out: Path = Path("vocabulary.parquet")
    min_count: int = 10
    max_size: int | None = None
    read: LogOptions = field(default_factory=LogOptions)


@dataclass(frozen=True)
class ConvertOptions:
    """Make Parquet files, which read faster, of a log in text files.

    Example: tritonemb convert --data day_0.gz --out day_0.parquet

    Args:
        data: the log: a file, or a folder of them.
        out: the file to write, or the folder for a folder.
        row_group_rows: rows of a row group.
        compression: of the columns.
        read: how the log is read; which rows it holds out does not matter.
    """

    data: str
    out: Path
    row_group_rows: int = ROW_GROUP_ROWS
    compression: Compression = "zstd"
    read: LogOptions = field(default_factory=LogOptions)


def make_vocabulary(options: VocabOptions) -> str:
    """Raises ValueError, FileNotFoundError: as `ClickLog` and `build_vocabulary`."""
    log = ClickLog(options.data, options.read)
    report = build_vocabulary(log, options.out, options.min_count, options.max_size, progress=_progress_printer("read"))
    sizes = ", ".join(f"{name} {size:,}" for name, size in report.num_embeddings.items())
    lines = [f"{options.out}: {report.rows:,} train rows{_skipped_note(report.skipped)}", f"ids: {sizes}"]
    lines += [
        f"note: {name} has more distinct values than were counted at a time; counts may miss {most:,}"
        for name, most in report.forgotten.items()
    ]
    return "\n".join(lines)


def convert_log(options: ConvertOptions) -> str:
    """Raises ValueError, FileNotFoundError: as `convert`."""
    report = convert(
        options.data, options.out, options.read, row_group_rows=options.row_group_rows,
        compression=options.compression, progress=_progress_printer("written"),
    )  # fmt: skip
    files = f" in {len(find_files(options.data)):,} files" if options.out.is_dir() else ""
    return f"{options.out}: {report.rows:,} rows{files}{_skipped_note(report.skipped)}"


def _skipped_note(rows: int) -> str:
    return f"; {rows:,} bad rows were left out" if rows else ""


def _progress_printer(verb: str) -> Callable[[int], None]:
    last = time.monotonic()

    def report(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            print(f"{rows:,} rows {verb}", file=sys.stderr, flush=True)

    return report
