"""Text logs to Parquet, which reads faster and knows its number of rows; and the commands `vocab` and `convert`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tritonemb.data.arrow import Chunk, Values
from tritonemb.data.click_log import ClickLog
from tritonemb.data.counting import build_vocabulary
from tritonemb.data.files import LogFile, find
from tritonemb.data.pipeline import collected
from tritonemb.data.protocol import ReadReport, Split
from tritonemb.data.schema import Problems, Schema
from tritonemb.data.splits import LogOptions, SplitRule
from tritonemb.utils import require, written_aside

Compression = Literal["zstd", "snappy", "gzip", "lz4", "none"]

ROW_GROUP_ROWS = 1 << 17
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class ConvertReport:
    """Rows written to the Parquet files, and bad rows left out."""

    rows: int
    skipped: int
    files: tuple[Path, ...]


def convert(
    source: str | Path,
    target: str | Path,
    options: LogOptions | None = None,
    *,
    row_group_rows: int = ROW_GROUP_ROWS,
    compression: Compression = "zstd",
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Write a text file as a Parquet file, or a folder of them as a folder of Parquet files.

    Each file is written aside and gets its name when it is whole. It has the columns of the schema: the label as int8,
    numbers as float64 and categories as string or int64; of Criteo's format int_1 to int_13 as int64 and cat_1 to
    cat_26 as uint32. An empty field is null. A `ClickLog` gives the same batches for both.

    Args:
        target: must not be there yet; in a folder, none of the files.
        options: how the text is read; which rows it holds out does not matter here.
        row_group_rows: rows of a row group, all but the last.
        progress: is called with the number of rows written so far, now and then.

    Raises:
        FileNotFoundError, ValueError: as `ClickLog`; the target is there; the source is Parquet already.
    """
    if row_group_rows < 1:
        raise ValueError(f"row_group_rows must be at least 1, got {row_group_rows}")
    target, files = Path(target), find(source)
    if files[0].format == "parquet":
        raise ValueError(f"{files[0].path} is Parquet already; text files are converted")
    is_folder = len(files) > 1 or str(files[0].path).rstrip("/") != str(source).rstrip("/")
    targets = [target]
    if is_folder:
        targets = [target / f"{file.stem}.parquet" for file in files]
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target.parent}: no such folder to make {target.name} in")
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file; a folder is converted to a folder")
    for path in targets:
        if path.exists():
            raise ValueError(f"{path} is there already; remove it, or name another target")
    log = ClickLog(source, replace(options or LogOptions(), split=SplitRule(split_by="end", test_share=0.0)))
    if is_folder:
        target.mkdir(exist_ok=True)
    rows = skipped = 0
    for number, path in enumerate(targets):
        one = _Writer(log.of_file(number), "train", row_group_rows, compression)
        for written in one.write(path):
            if progress is not None:
                progress(rows + written)
        if not one.report.rows:
            path.unlink()
            raise ValueError(f"{files[number].path} has no good rows to convert")
        rows, skipped = rows + one.report.rows, skipped + one.report.skipped
    return ConvertReport(rows, skipped, tuple(targets))


def cached_as_parquet(
    log: ClickLog, folder: str | Path, progress: Callable[[int, int | None], None] | None = None
) -> ClickLog:
    """The same log read from Parquet files in a folder, written there unless they are; only text is converted.

    Splits, rows, their order and so batches are the same; each split has a file of its own. Rows that are skipped as
    bad are reported in each epoch as before. Processes that ask for the same files wait for the one that writes them.

    Args:
        folder: made if need be. Another log, or another way to read it, has other files there.
        progress: is called with the rows written so far and their estimated number, None where nobody can say.

    Raises:
        ValueError: a bad row, unless the log skips them.
    """
    if log.text_schema() is None:
        return log
    kept = Path(folder) / log.rows_digest()[:16]
    kept.mkdir(parents=True, exist_ok=True)
    summary = kept / "log.json"
    with require("filelock").FileLock(str(kept / "lock")):
        if not summary.exists():
            estimates = [log.estimated_rows(split) for split in log.splits()]
            total = None if None in estimates else sum(estimate or 0 for estimate in estimates)
            reports, rows = {}, 0
            for split in log.splits():
                writer = _Writer(log, split, ROW_GROUP_ROWS, "zstd")
                for written in writer.write(kept / f"{split}.parquet"):
                    if progress is not None:
                        progress(rows + written, total)
                rows += writer.report.rows
                reports[split] = asdict(writer.report)
            with written_aside(summary) as part:
                Path(part).write_text(json.dumps(reports))
    found: dict[Split, dict[str, Any]] = json.loads(summary.read_text())
    files: dict[Split, LogFile | None] = {}
    left_out = {}
    for split, values in found.items():
        files[split] = find(kept / f"{split}.parquet")[0] if values["rows"] else None
        reasons = tuple((reason, count) for reason, count in values["reasons"])
        left_out[split] = ReadReport(0, values["skipped"], tuple(values["problems"]), reasons)
    return log.in_files(files, left_out)


class _Writer:
    """Writes the good rows of a split to a Parquet file."""

    def __init__(self, log: ClickLog, split: Split, row_group_rows: int, compression: Compression) -> None:
        self._log, self._split = log, split
        self._row_group_rows, self._compression = row_group_rows, compression
        self.report = ReadReport()

    def write(self, path: Path) -> Iterator[int]:
        """The number of rows written, again and again."""
        pa, parquet = require("pyarrow"), require("pyarrow.parquet")
        schema = self._log.text_schema()
        tables = self._log.scan(self._split, lambda chunk: self._table(chunk, schema))
        with (
            written_aside(path) as part,
            parquet.ParquetWriter(part, schema, compression=self._compression) as writer,
            closing(tables),
        ):
            waiting = schema.empty_table()
            for table, problems in tables:
                self.report = collected(self.report, table.num_rows, problems)
                waiting = pa.concat_tables([waiting, table])
                whole = waiting.num_rows // self._row_group_rows * self._row_group_rows
                if whole:
                    writer.write_table(waiting.slice(0, whole), self._row_group_rows)
                    waiting = waiting.slice(whole)
                yield self.report.rows
            if waiting.num_rows:
                writer.write_table(waiting, self._row_group_rows)

    def _table(self, chunk: Chunk, schema: Any) -> tuple[Any, Problems]:
        pa = require("pyarrow")
        columns: dict[str, Any] = {}

        def put(name: str, values: Values) -> None:
            if name in schema.names:
                columns[name] = _column(values, schema.field(name).type)

        keep, problems = self._log.parse(self._split, chunk, put)
        table = pa.table([columns[name] for name in schema.names], schema=schema)
        return table if keep is None else table.take(pa.array(np.flatnonzero(keep))), problems


def _column(values: Values, kind: Any) -> Any:
    pa = require("pyarrow")
    if values.strings is not None:
        return values.strings.take(pa.array(values.numbers, mask=values.missing)).cast(kind)
    with np.errstate(invalid="ignore"):  # in bad rows
        return pa.array(values.numbers.astype(kind.to_pandas_dtype()), kind, mask=values.missing)


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
        on_bad_row: stop at a row that is not as it should be, or leave it out and count it.
        schema: which columns of CSV files are what; those are kept.
        delimiter: what stands between the fields of text files that begin with a header; see --data of `train`.
        quoted_newlines: whether fields in quotes may contain line ends.
    """

    data: str
    out: Path
    row_group_rows: int = ROW_GROUP_ROWS
    compression: Compression = "zstd"
    on_bad_row: Literal["raise", "skip"] = "raise"
    schema: Schema = field(default_factory=Schema)
    delimiter: str = ""
    quoted_newlines: bool = False


def make_vocabulary(options: VocabOptions) -> str:
    """Raises ValueError, FileNotFoundError: as `ClickLog` and `build_vocabulary`."""
    log = ClickLog(options.data, options.read, say=_say)
    report = build_vocabulary(log, options.out, options.min_count, options.max_size, progress=_progress("read"))
    sizes = ", ".join(f"{name} {size:,}" for name, size in report.num_embeddings.items())
    lines = [f"{options.out}: {report.rows:,} train rows{_skipped(report.skipped)}", f"ids: {sizes}"]
    for name, most in report.forgotten.items():
        lines.append(f"note: {name} has more distinct values than were counted at a time; counts may miss {most:,}")
    return "\n".join(lines)


def convert_log(options: ConvertOptions) -> str:
    """Raises ValueError, FileNotFoundError: as `convert`."""
    report = convert(
        options.data,
        options.out,
        LogOptions(
            schema=options.schema,
            on_bad_row=options.on_bad_row,
            delimiter=options.delimiter,
            quoted_newlines=options.quoted_newlines,
        ),
        row_group_rows=options.row_group_rows,
        compression=options.compression,
        progress=_progress("written"),
    )
    files = f" in {len(report.files):,} files" if options.out.is_dir() else ""
    return f"{options.out}: {report.rows:,} rows{files}{_skipped(report.skipped)}"


def _skipped(rows: int) -> str:
    return f"; {rows:,} bad rows were left out" if rows else ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(verb: str) -> Callable[[int], None]:
    """Says how far it is, on stderr, every few seconds."""
    last = time.monotonic()

    def report(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            _say(f"{rows:,} rows {verb}")

    return report
