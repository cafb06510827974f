"""Logs of Arrow columns: Parquet files, and tables in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tritonemb.data import arrow, splits
from tritonemb.data.arrow import Checked, Chunk, Sink
from tritonemb.data.files import LogFile
from tritonemb.data.protocol import SPLITS, Shard, Split
from tritonemb.data.schema import Schema, listed
from tritonemb.data.splits import Kind, Part, SplitRule
from tritonemb.utils import require

SLICE_ROWS = 65_536  # at most: large row groups are read in slices
ROW_BYTES = 256  # that a row is taken to have, to make slices as large as chunks of text


class Source(Protocol):
    """Files of one format, or tables.

    Attributes:
        schema: with all columns filled in.
        multi_hot: the sparse columns that are lists.
    """

    schema: Schema
    multi_hot: tuple[str, ...]

    def sizes(self) -> list[int]:
        """Of the files, in the unit of `Part`: unpacked bytes or rows."""
        ...

    def num_rows(self, part: Part) -> int | None:
        """Bad ones too; None where only reading tells."""
        ...

    def estimated_rows(self, part: Part) -> float:
        """Known without reading the part."""
        ...

    def chunks(self, parts: tuple[Part, ...], chunk_bytes: int, first: int, offset: int, line: int) -> Iterator[Chunk]:
        """The chunks of all parts, from the one at `offset` of part `first` on, after `line` lines of that part."""
        ...

    def parse(self, chunk: Chunk, sink: Sink) -> Checked: ...

    def shard(self, parts: tuple[Part, ...], shard: Shard) -> tuple[Part, ...]:
        """Of all rows of some parts, those of one shard."""
        ...

    def rows_before(self, part: Part) -> int:
        """Lines or rows of the file before those of the part. May have to read them, once."""
        ...

    def where(self, part: Part, chunk: Chunk, row: int) -> str:
        """`train.txt, line 3`: where a chunk's row is in its file."""
        ...


@contextmanager
def opened(file: LogFile) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`.

    Raises:
        ValueError: it is damaged, or has other bytes than when it was found.
    """
    pa, parquet = require("pyarrow"), require("pyarrow.parquet")
    try:
        # Pages are read as they are needed, in place of whole row groups.
        with file.open() as raw, parquet.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False) as opened_file:
            yield opened_file
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{file.path} is not a whole Parquet file ({reason}); write or fetch it again") from error


@dataclass(frozen=True)
class Head:
    """What a file says of itself: its number of rows, its `pyarrow.Schema`, and the rows of each row group.

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
    if file.table is not None:
        return Head(file.size, file.table.schema, (file.size,), (None,))
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


def parquet_chunks(
    file: LogFile, part: int, start: int, stop: int, chunk_bytes: int, offset: int, columns: tuple[str, ...]
) -> Iterator[Chunk]:
    """The rows from `start` on and before `stop`, in slices of at most `SLICE_ROWS`, beginning at row `offset`."""
    slice_rows = min(max(chunk_bytes // ROW_BYTES, 1), SLICE_ROWS)
    if file.table is not None:
        for row in range(offset, stop, slice_rows):
            content = file.table.select(columns).slice(row, min(slice_rows, stop - row)).combine_chunks()
            yield Chunk(part, row, row - start, content.to_batches()[0])
        return
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


def table_of(frame: Any, name: str) -> LogFile:
    """The `pyarrow.Table` of anything with Arrow's C stream interface, as a file of a log; no column is copied.

    Raises:
        ValueError: it has no such interface, or columns that Arrow does not know.
    """
    pa = require("pyarrow")
    if not hasattr(frame, "__arrow_c_stream__"):
        raise ValueError(
            f"{name}: {type(frame).__name__} is not a data frame with the method __arrow_c_stream__, as pandas has "
            "from 2.2 on, Polars from 1.3 on and pyarrow from 14 on"
        )
    try:
        table = pa.table(frame)
        table = table.cast(pa.schema([field.with_type(_without_views(field.type)) for field in table.schema]))
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(f"{name}: Arrow can not represent its columns ({error})") from error
    return LogFile(name, "table", None, table.num_rows, table=table)


def tables_by_split(
    frames: Mapping[Split, Any], rule: SplitRule, name: str
) -> tuple[tuple[LogFile, ...], Kind, dict[Split, tuple[int, ...]]]:
    """Data frames as the files of a log, how rows are held out, and which of the files belong to each split.

    Raises:
        ValueError: held-out frames are given and another split rule, or neither.
    """
    if len(frames) == 1 and rule.split_by != "files":
        return (table_of(frames["train"], name),), rule.kind(()), {}
    if len(frames) == 1 or rule.kind(()) not in ("end", "files") or rule.split_by == "end":
        raise ValueError(f"{name}: give held-out data frames, or another split rule than {rule.split_by!r}, not both")
    present = [split for split in SPLITS if split in frames]
    files = tuple(table_of(frames[split], f"{name} ({split})") for split in present)
    return files, "files", {split: (file,) for file, split in enumerate(present)}


def _without_views(kind: Any) -> Any:
    """A type with strings in one buffer."""
    pa = require("pyarrow")
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind


class ArrowSource:
    """Parquet files or tables with the same columns; see `Source`.

    Args:
        extra: the time column, if rows are split by it.
        labelled: whether there is a label column.

    Raises:
        ValueError: a file is damaged, has no rows, lacks a column or has it twice, or has it of another type than it
            needs or than other files have.
    """

    def __init__(
        self, files: tuple[LogFile, ...], schema: Schema, extra: tuple[str, ...] = (), labelled: bool = True
    ) -> None:
        self._files, self._labelled = files, labelled
        self._heads = [head_of(file, extra[0] if extra else None) for file in files]
        for file, head in zip(files, self._heads, strict=True):
            if head.num_rows == 0:
                raise ValueError(f"{file.path} is empty: it has no rows")
        self.schema = schema.of(self._heads[0].columns, str(files[0].path), labelled)
        self.multi_hot = arrow.check_columns(self._heads[0].schema, self.schema, str(files[0].path), labelled)
        texts: dict[str, tuple[bool, LogFile]] = {}
        for file, head in zip(files, self._heads, strict=True):
            self.schema.of(head.columns, str(file.path), labelled)
            if arrow.check_columns(head.schema, self.schema, str(file.path), labelled) != self.multi_hot:
                raise ValueError(f"{file.path}: other columns are lists than in {files[0].path}: {self.multi_hot}")
            for name in extra:
                if name not in head.columns:
                    raise ValueError(f"{file.path}: there is no column {name!r}; columns: {listed(head.columns)}")
                arrow.check_single(head.schema.names, name, str(file.path))
            for name in self.schema.sparse:
                text = arrow.is_text(head.schema.field(name).type)
                if text is None:
                    continue
                before, other = texts.setdefault(name, (text, file))
                if text != before:
                    kinds = ("strings", "integers") if text else ("integers", "strings")
                    raise ValueError(
                        f"{file.path}: column {name!r} has {kinds[0]}, but {kinds[1]} in {other.path}; the same value "
                        "would have different ids"
                    )
        used = (*(self.schema.label,) * labelled, *self.schema.dense, *self.schema.sparse, *extra)
        self._columns = tuple(dict.fromkeys(used))

    def type_of(self, column: str) -> Any:
        """The `pyarrow` type."""
        return self._heads[0].schema.field(column).type

    def sizes(self) -> list[int]:
        return [head.num_rows for head in self._heads]

    def num_rows(self, part: Part) -> int | None:
        return self._stop(part) - part.start

    def estimated_rows(self, part: Part) -> float:
        return self._stop(part) - part.start

    def chunks(self, parts: tuple[Part, ...], chunk_bytes: int, first: int, offset: int, line: int) -> Iterator[Chunk]:
        for number, part in enumerate(parts[first:], start=first):
            begin = offset if number == first else part.start
            stop = self._stop(part)
            file = self._files[part.file]
            yield from parquet_chunks(file, number, part.start, stop, chunk_bytes, begin, self._columns)

    def parse(self, chunk: Chunk, sink: Sink) -> Checked:
        return arrow.parse(chunk.content, self.schema, sink, self._labelled)

    def shard(self, parts: tuple[Part, ...], shard: Shard) -> tuple[Part, ...]:
        """Runs of whole row groups where there are enough of them; else one may be cut in two, and be read twice."""
        sizes = [self._stop(part) - part.start for part in parts]
        ends: list[int] = []
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            row = first - part.start
            for rows in self._heads[part.file].group_rows:
                row += rows
                if first < row < first + size:
                    ends.append(row)
            first += size
            ends.append(first)
        return tuple(splits.even(parts, sizes, shard, ends))

    def within(self, rule: SplitRule, split: Split) -> tuple[Part, ...]:
        """The row groups that may have rows of a split by time: its shares would else have very different numbers."""
        pa, compute = require("pyarrow"), require("pyarrow.compute")
        parts: list[Part] = []
        for file, head in enumerate(self._heads):
            row = 0
            for rows, times in zip(head.group_rows, head.group_times, strict=True):
                if times is None or splits.may_have(rule, split, times, pa, compute):
                    start = parts.pop().start if parts and (parts[-1].file, parts[-1].stop) == (file, row) else row
                    parts.append(Part(file, start, row + rows))
                row += rows
        return tuple(parts)

    def rows_before(self, part: Part) -> int:
        return part.start

    def where(self, part: Part, chunk: Chunk, row: int) -> str:
        return f"{self._files[part.file].path}, row {chunk.offset + row + 1}"

    def _stop(self, part: Part) -> int:
        return self._heads[part.file].num_rows if part.stop is None else part.stop
