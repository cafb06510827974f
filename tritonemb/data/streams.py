"""Streams: logs that grow while they are read, whose rows have a fixed order, and offsets, which checkpoints store."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tritonemb.data.files import SUFFIXES, Chunk, LogFile, Part, display_path, fs, natural_sort_key, pa, resolve_path
from tritonemb.data.parquet import SLICE_ROWS, ArrowSource, plain_schema, read_rows, read_schema
from tritonemb.data.protocol import WHOLE, Shard
from tritonemb.data.schema import LogOptions, Names

Offsets = dict[str, int]  # in a stream, JSON-serializable; empty for its first row
IDLE_SECONDS = 0.2  # between two looks for new rows; a stream that is closed may take as long
MAX_IDLE = 300  # looks for the first rows, which show the columns
END = "_SUCCESS"  # file that ends a folder, as Hadoop's committers write it


class RowStream(Protocol):
    """Rows whose order depends on their offsets only."""

    path: Path | str  # for messages; its last part is the name of the data set

    def read(self, offsets: Offsets, shard: Shard, columns: Sequence[str]) -> Iterator[tuple[Offsets, Any]]:
        """Poll the rows of a shard from some offsets on, until the stream ends: yield offsets and a record batch of the
        rows from there on, or None if none arrive in `IDLE_SECONDS`; of these columns, or of all if none are named."""


class StreamSource(ArrowSource):
    """Rows of a stream, the first of the files; the others are Parquet files with held-out rows."""

    counts_rows = False

    def __init__(self, files: tuple[LogFile, ...], options: LogOptions, labelled: bool, extra_columns: Names) -> None:
        self._stream: RowStream = files[0].table
        polls = (batch for _, batch in islice(self._stream.read({}, WHOLE, ()), MAX_IDLE))
        if (first := next((batch for batch in polls if batch is not None and batch.num_rows), None)) is None:
            raise ValueError(f"{files[0].path}: no rows have arrived in {MAX_IDLE * IDLE_SECONDS:.0f} s; start again")
        table = pa.table(first.cast(plain_schema(first.schema)))
        sample = LogFile(files[0].path, "stream", None, table.num_rows, table=table)
        super().__init__((sample, *files[1:]), options, labelled, extra_columns)

    def chunks(self, part: Part, number: int, chunk_bytes: int, offset: Any, line: int) -> Iterator[Chunk]:
        """Yield chunks, without rows if none have arrived. Offsets are those of the stream; 0 for its first row."""
        if part.file:
            yield from super().chunks(part, number, chunk_bytes, offset, line)
            return
        columns, sample = list(self._columns), self.files[0].table.schema
        for offsets, batch in self._stream.read(offset or {}, part.stripes, columns):
            rows = pa.RecordBatch.from_pylist([], sample) if batch is None else batch
            # Columns whose values are all missing have the types of the first rows.
            is_null = [pa.types.is_null(field.type) and field.name in sample.names for field in rows.schema]
            fields = zip(plain_schema(rows.schema), is_null, strict=True)
            types = pa.schema([sample.field(field.name) if null else field for field, null in fields])
            self._types.check(types, f"{self.files[0].path} at {offsets}")
            yield Chunk(number, offsets, 0, 0, rows.cast(types).select(columns))

    def shard(self, parts: tuple[Part, ...], shard: Shard) -> tuple[Part, ...]:
        return super().shard(parts, shard) if parts[0].file else (Part(0, stripes=shard),)

    def location(self, part: Part, chunk: Chunk, line: int) -> str:
        location = f"{self.files[0].path} at {chunk.offset}, row {line + 1}"
        return super().location(part, chunk, line) if part.file else location


class FolderStream:
    """Parquet files that are moved into a folder, in the natural order of their names; `END` ends it. `read` raises
    FileNotFoundError if the folder or a file is missing, ValueError if files come in another order."""

    def __init__(self, path: str | Path) -> None:
        self.path = display_path(path)
        self._system, self._folder = resolve_path(path)

    def read(self, offsets: Offsets, shard: Shard, columns: Sequence[str]) -> Iterator[tuple[Offsets, Any]]:
        """See `RowStream.read`. Offsets: a file, and a row in it."""
        name, row = next(iter(offsets.items()), ("", 0))
        has_end, files = self._list()
        if name and name not in files:
            raise FileNotFoundError(f"{self.path}: the position is in {name}, which is missing; restore it")
        ended = False  # whether the listing before had the end
        past = {earlier for earlier in files if natural_sort_key(earlier) < natural_sort_key(name)}
        while True:
            pending = [name for name in files if name not in past]
            for next_name in pending:
                if natural_sort_key(next_name) < natural_sort_key(name):
                    raise ValueError(f"{self.path}: {next_name} has come after {name}; files must come in name order")
                name, row = next_name, row if next_name == name else 0
                past.add(name)
                total = sum(read_schema(files[name])[1])
                start, stop = (total * position // shard[1] for position in (shard[0], shard[0] + 1))
                for first, batch in read_rows(files[name], tuple(columns), SLICE_ROWS, max(row, start), stop):
                    yield {name: first}, batch
            if not pending and ended:
                return
            if not pending and not has_end:
                time.sleep(IDLE_SECONDS)
                yield {name: 0}, None
            ended, (has_end, files) = has_end, self._list()

    def _list(self) -> tuple[bool, dict[str, LogFile]]:
        entries = {entry.base_name: entry for entry in self._system.get_file_info(fs.FileSelector(self._folder))}
        names = [name for name in entries if not name.startswith((".", "_")) and Path(name).suffix.lower() in SUFFIXES]
        files = dict[str, LogFile]()
        for name in sorted(names, key=natural_sort_key):
            stored = self._system, entries[name].path
            files[name] = LogFile(f"{self.path}/{name}", "parquet", None, entries[name].size, stored=stored)
        return END in entries, files
