"""Criteo's text files to Parquet, which reads faster and knows its number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tritonemb.data.logs.files import LogFile, find
from tritonemb.data.logs.options import LogOptions
from tritonemb.data.logs.pipeline import default_workers, in_order
from tritonemb.data.logs.schema import Schema
from tritonemb.data.logs.sources import TextSource
from tritonemb.data.logs.splits import Part
from tritonemb.data.logs.text import Chunk
from tritonemb.data.logs.tsv import CATEGORIES, FIELDS, LABEL
from tritonemb.data.logs.values import Values
from tritonemb.utils import require, written_aside


@dataclass(frozen=True)
class ConvertReport:
    """Rows written to the Parquet files, and bad rows left out."""

    rows: int
    skipped: int
    files: tuple[Path, ...]


def convert(
    source: str | Path,
    target: str | Path,
    row_group_rows: int = 1 << 17,
    compression: Literal["zstd", "snappy", "gzip", "lz4", "none"] = "zstd",
    *,
    on_bad_row: Literal["raise", "skip"] = "raise",
    workers: int | None = None,
    chunk_bytes: int = LogOptions.chunk_bytes,
    progress: Callable[[int], None] | None = None,
) -> ConvertReport:
    """Write a file in Criteo's format as a Parquet file, or a folder of them as a folder of Parquet files.

    Each file is written aside and gets its name when it is whole. Columns: label int8, int_1 to int_13 int64, cat_1 to
    cat_26 uint32; an empty field is null. A `ClickLog` gives the same batches for both.

    Args:
        target: must not be there yet; in a folder, none of the files.
        row_group_rows: rows of a row group, all but the last.
        progress: is told the number of rows written so far, now and then.

    Raises:
        FileNotFoundError, ValueError: as `ClickLog`; the target is there; the source is Parquet already.
    """
    if row_group_rows < 1:
        raise ValueError(f"row_group_rows must be at least 1, got {row_group_rows}")
    options = LogOptions(on_bad_row=on_bad_row, workers=workers, chunk_bytes=chunk_bytes)
    source, target = Path(source), Path(target)
    files = find(source)
    if files[0].format == "parquet":
        raise ValueError(f"{files[0].path} is Parquet already; text files are converted")
    if source.is_dir():
        targets = [target / f"{file.stem}.parquet" for file in files]
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target.parent}: no such folder to make {target.name} in")
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is a file; a folder is converted to a folder")
    else:
        targets = [target]
    for path in targets:
        if path.exists():
            raise ValueError(f"{path} is there already; remove it, or name another target")
    text = TextSource(files, Schema(), lenient=on_bad_row == "skip")
    if source.is_dir():
        target.mkdir(exist_ok=True)
    rows = skipped = 0
    for number, path in enumerate(targets):
        done = _Conversion(files[number], number, text, options)
        for written in done.write(path, row_group_rows, compression):
            if progress is not None:
                progress(rows + written)
        rows, skipped = rows + done.rows, skipped + done.skipped
    return ConvertReport(rows, skipped, tuple(targets))


class _Conversion:
    def __init__(self, file: LogFile, number: int, source: TextSource, options: LogOptions) -> None:
        self._file, self._source, self._options = file, source, options
        self._part = Part(number, 0, None)
        self.rows = self.skipped = 0

    def write(self, path: Path, row_group_rows: int, compression: str) -> Iterator[int]:
        pa, parquet = require("pyarrow"), require("pyarrow.parquet")
        chunks = self._source.chunks((self._part,), self._options.chunk_bytes, 0, 0, 0)
        tables = in_order(self._table, chunks, self._options.workers or default_workers())
        with (
            written_aside(path) as part,
            parquet.ParquetWriter(part, _schema(pa), compression=compression) as writer,
            closing(tables),
        ):
            waiting: list[Any] = []
            for table, skipped in tables:
                waiting.append(table)
                self.skipped += skipped
                self.rows += table.num_rows
                if sum(entry.num_rows for entry in waiting) >= row_group_rows:
                    joined = pa.concat_tables(waiting)
                    whole = joined.num_rows // row_group_rows * row_group_rows
                    writer.write_table(joined.slice(0, whole), row_group_rows)
                    waiting = [joined.slice(whole)]
                yield self.rows
            if waiting:
                writer.write_table(pa.concat_tables(waiting), row_group_rows)
            if self.rows == 0:
                raise ValueError(f"{self._file.path} has no good rows to convert")

    def _table(self, chunk: Chunk) -> tuple[Any, int]:
        pa = require("pyarrow")
        schema = _schema(pa)
        columns: dict[str, Any] = {}

        def put(name: str, values: Values) -> None:
            kind = schema.field(name).type
            numbers = values.numbers.astype(kind.to_pandas_dtype())
            columns[name] = pa.array(numbers, kind, mask=values.missing)

        checked = self._source.parse(chunk, put)
        if len(checked.bad_rows) and self._options.on_bad_row == "raise":
            where = self._source.where(self._part, chunk, int(checked.bad_rows[0]))
            raise ValueError(f"{where}: {checked.describe(0)[1]}")
        table = pa.table([columns[name] for name in FIELDS], schema=schema)
        if checked.good is not None:
            table = table.take(pa.array(np.flatnonzero(checked.good)))
        return table, len(checked.bad_rows)


def _schema(pa: Any) -> Any:
    kinds = {LABEL: pa.int8()} | dict.fromkeys(CATEGORIES, pa.uint32())
    return pa.schema([(name, kinds.get(name, pa.int64())) for name in FIELDS])
