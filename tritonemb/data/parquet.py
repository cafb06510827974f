"""Logs of Arrow columns: Parquet files and tables in memory."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tritonemb.data import files as cuts
from tritonemb.data.encode import arrow_array, find_invalid_values, is_list, is_text, valid_row_mask, value_type
from tritonemb.data.files import Chunk, LogFile, Part, compute, dataset, open_parquet, pa
from tritonemb.data.pipeline import LogSource, ParsedChunk, num_processors, time_mask
from tritonemb.data.protocol import READ_THREAD, Prefetcher, Shard, Split
from tritonemb.data.schema import LogOptions, Names, Schema, invalid_value_message

SLICE_ROWS = 65_536  # most rows per chunk: large row groups are read in slices
ROW_BYTES = 256  # assumed bytes per row, so that slices are about as large as chunks of text
# Bytes per row up to which a stored dictionary is read as such. Its entries are inserted once per row group and hashed
# once per slice, for about as much time as it takes to read and hash three strings each.
DICTIONARY_BYTES = 4
MAX_READERS = 4  # threads that decode the columns of a file; more would wait for the rows to be encoded


def read_schema(file: LogFile) -> tuple[Any, list[int]]:
    """Return the columns, a `pyarrow.Schema`, and the number of rows of each row group."""
    if file.table is not None:
        return file.table.schema, [file.size]
    with open_parquet(file) as (source, _):
        return plain_schema(source.schema_arrow), _row_group_sizes(source)


def _row_group_sizes(source: Any) -> list[int]:
    return [source.metadata.row_group(group).num_rows for group in range(source.num_row_groups)]


def read_rows(
    file: LogFile, names: Names, slice_rows: int, start: int, stop: int, encoded: Names = (), num_readers: int = 1
) -> Iterator[tuple[int, Any]]:
    """Yield slices of the rows `[start, stop)` after their first rows' numbers; of all columns if none are named.
    Columns of strings in `encoded` are dictionary arrays where that saves time. Up to `num_readers` threads decode."""
    columns = list(names) or None
    # Slices of a table in memory.
    if file.table is not None:
        table = file.table if columns is None else file.table.select(columns)
        for row in range(start, stop, slice_rows):
            yield row, table.slice(row, min(slice_rows, stop - row)).combine_chunks().to_batches()[0]
        return
    # Slices of the row groups of a file, verified before use, cut to the rows.
    with open_parquet(file, columns, partial(_small_dictionaries, encoded, slice_rows)) as (source, verify):
        ends = list(itertools.accumulate(_row_group_sizes(source), initial=0))
        groups = range(bisect.bisect_right(ends, start) - 1, min(bisect.bisect_left(ends, stop), len(ends) - 1))
        row = ends[groups.start]
        # Arrow does not join the dictionaries that row groups have of lists: read these one by one.
        has_dictionaries = any(
            is_list(f.type) and pa.types.is_dictionary(f.type.value_type) for f in source.schema_arrow
        )
        runs = [[group] for group in groups] if has_dictionaries else [groups]
        read = partial(source.iter_batches, slice_rows, use_threads=False)
        file_columns = [name for name in source.schema_arrow.names if name in names]
        num_readers = min(num_readers, len(file_columns))
        divisions: list[Any] = [file_columns[index::num_readers] for index in range(num_readers)] or [columns]
        sources = [itertools.chain.from_iterable(map(partial(read, columns=part), runs)) for part in divisions]
        for batch in sources[0] if len(sources) == 1 else _read_divisions(sources, file_columns):
            for group in range(bisect.bisect_right(ends, row) - 1, bisect.bisect_left(ends, row + batch.num_rows)):
                verify(group)
            batch = batch.cast(plain_schema(batch.schema))
            first, last = max(start - row, 0), min(stop - row, batch.num_rows)
            if first < last:
                yield row + first, batch.slice(first, last - first)
            row += batch.num_rows
    if row < stop:
        raise file.changed_error(f"it had at least {stop} rows and now has {row}")


def _read_divisions(sources: Sequence[Iterator[Any]], names: Sequence[str]) -> Iterator[Any]:
    """Read each source, with some columns of the same rows, in a thread; yield record batches of the columns `names`.
    One ends wherever that of any source does."""
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(Prefetcher(source, 1, READ_THREAD))) for source in sources]
        batches: list[Any] = [next(reader, None) for reader in readers]
        while all(batch is not None for batch in batches):
            num_rows = min(batch.num_rows for batch in batches)
            columns = {name: batch.column(name).slice(0, num_rows) for batch in batches for name in batch.schema.names}
            yield pa.RecordBatch.from_arrays([columns[name] for name in names], names)
            pairs = zip(batches, readers, strict=True)
            batches = [batch.slice(num_rows) if batch.num_rows > num_rows else next(r, None) for batch, r in pairs]


def _small_dictionaries(names: Names, slice_rows: int, metadata: Any) -> list[str]:
    """Return the columns of strings whose dictionaries, those of the first row group, are small."""
    if not names or not metadata.num_row_groups:
        return []
    group = metadata.row_group(0)
    limit = DICTIONARY_BYTES * min(slice_rows, group.num_rows)
    chunks = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema in names]
    chunks = [c for c in chunks if c.physical_type == "BYTE_ARRAY" and c.dictionary_page_offset]
    return [c.path_in_schema for c in chunks if c.data_page_offset - c.dictionary_page_offset <= limit]


def file_of_frame(frame: Any, name: str) -> LogFile:
    """Wrap a data frame, any object with Arrow's C stream interface, as the file of a log, without a copy.
    Raise ValueError if it lacks the interface, or Arrow cannot represent its columns."""
    if not hasattr(frame, "__arrow_c_stream__"):
        raise ValueError(
            f"{name}: {type(frame).__name__} is not a data frame with the method __arrow_c_stream__, as pandas has "
            "from 2.2 on, Polars from 1.3 on and pyarrow from 14 on"
        )
    try:
        table = pa.table(frame)
        table = table.cast(plain_schema(table.schema))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: Arrow cannot represent its columns ({error})") from error
    return LogFile(name, "table", None, table.num_rows, table=table)


def plain_schema(schema: Any) -> Any:
    """Replace views and decimals in a `pyarrow.Schema`: whole decimals that fit become int64, others float64."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema])


def _plain(kind: Any) -> Any:
    if pa.types.is_decimal(kind):
        return pa.int64() if kind.scale == 0 and kind.precision <= 18 else pa.float64()
    if str(kind) in ("string_view", "binary_view"):
        return pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain(kind.value_type), kind.ordered)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


class ColumnTypes:
    """Check that all files have the columns, with values of the same kinds; attributes are those of `LogSource`."""

    def __init__(self, schema: Schema, labelled: bool, extra_columns: Names = ()) -> None:
        self.schema, self._labelled, self._extra_columns = schema, labelled, extra_columns
        self.multi_hot: Names = ()
        self.kinds: dict[str, str] = {}
        self._locations: dict[str, str] = {}  # of the first values of a column
        self._lists: dict[str, tuple[bool, str]] = {}  # whether a column has lists, and where it first has values
        self._untyped_lists: Names | None = None  # of the columns that had no type at the opening, those with lists

    def check(self, columns: Any, location: str) -> None:
        """Check the columns, a `pyarrow.Schema`, of a file or a batch."""
        schema = self.schema = self.schema.of(columns.names, location, self._labelled, self._extra_columns)
        kinds = {n: _value_kind(columns.field(n).type, n, schema, location) for n in schema.columns(self._labelled)}
        for name in (name for name in schema.sparse if not pa.types.is_null(columns.field(name).type)):
            is_multi_hot = is_list(columns.field(name).type)
            first_values = is_multi_hot, location
            if self._untyped_lists is not None:
                first_values = name in self._untyped_lists, "the features: the first rows have no type"
            was_multi_hot, first_location = self._lists.setdefault(name, first_values)
            if is_multi_hot != was_multi_hot:
                texts = ["one value", "a list"]
                text = f"has {texts[is_multi_hot]} per row, but {texts[was_multi_hot]} in {first_location}"
                raise ValueError(f"{location}: column {name!r} {text}")
        self.multi_hot = tuple(name for name in schema.sparse if self._lists.get(name, (False, ""))[0])
        for name in filter(kinds.get, schema.sparse):
            expected, other = self.kinds.setdefault(name, kinds[name]), self._locations.setdefault(name, location)
            if kinds[name] != expected:
                raise ValueError(
                    f"{location}: column {name!r} has {kinds[name]}, but {expected} in {other}; "
                    "the same value would have different ids"
                )

    def freeze(self, lists: Names) -> None:
        """Fix which columns have lists, those named; a column without a type so far raises later if it has others."""
        self._untyped_lists = lists


class ArrowSource(LogSource):
    """Parquet files or tables; the unit of their parts is a row."""

    counts_rows = True

    def __init__(self, files: tuple[LogFile, ...], options: LogOptions, labelled: bool, extra_columns: Names) -> None:
        self.files, self._rule, self._labelled = files, options.split, labelled
        self._groups: list[list[int]] = []  # by file: rows of its row groups
        types = self._types = ColumnTypes(options.schema, labelled, extra_columns)
        time = self._rule.time_column
        for file in files:
            columns, groups = read_schema(file)
            self._groups.append(groups)
            if sum(groups) == 0:
                continue
            types.check(columns, str(file.path))
            if time is not None:
                kind = columns.field(time).type
                time_mask(self._rule, "train", pa.nulls(0, kind), kind)  # check the rule's times
        if not any(map(sum, self._groups)):
            raise ValueError(f"{files[0].path} is empty: it has no rows")
        self.schema, self.multi_hot, self.kinds = types.schema, types.multi_hot, types.kinds
        self._columns = tuple(dict.fromkeys((*self.schema.columns(labelled), *extra_columns)))
        # Transforms, and readers of additional columns, expect strings.
        self._encoded = () if options.transforms else tuple({*self.schema.sparse}.difference(extra_columns))
        self._parser_threads = options.parser_threads

    def freeze(self, lists: Names) -> None:
        self._types.freeze(lists)

    def sizes(self) -> list[int]:
        return [sum(groups) for groups in self._groups]

    def estimated_rows(self, part: Part) -> int:
        return self._stop(part) - part.start

    def chunks(self, part: Part, number: int, chunk_bytes: int, offset: Any, line: int) -> Iterator[Chunk]:
        slice_rows = min(max(chunk_bytes // ROW_BYTES, 1), SLICE_ROWS)
        file, stop = self.files[part.file], self._stop(part)
        num_readers = min(self._parser_threads or num_processors(), MAX_READERS)
        for row, rows in read_rows(file, self._columns, slice_rows, offset, stop, self._encoded, num_readers):
            yield Chunk(number, row, row - part.start, row, rows)

    def parse(self, chunk: Chunk) -> ParsedChunk:
        rows = np.arange(chunk.rows.num_rows)
        parsed = ParsedChunk(chunk.rows, rows, rows[:0], rows, lambda _: ("", ""))
        return drop_bad_rows(parsed, self.schema, self._labelled)

    def shard(self, parts: tuple[Part, ...], shard: Shard) -> tuple[Part, ...]:
        """Return one shard of some parts: whole row groups if there are enough; else shards may divide a row group."""
        sizes = list(map(self.estimated_rows, parts))
        ends: list[int] = []
        first = 0
        for part, size in zip(parts, sizes, strict=True):
            rows = first - part.start + np.cumsum(self._groups[part.file])
            first += size
            ends += [*(int(row) for row in rows if first - size < row < first), first]
        return tuple(cuts.even_shard(parts, sizes, shard, ends))

    def within(self, split: Split, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        groups_within: list[Part] = []
        time = self._rule.time_column
        for number, (file, groups) in enumerate(zip(self.files, self._groups, strict=True)):
            group_ids, ends = list(range(len(groups))), np.cumsum(groups).tolist()
            if file.stored is not None and any(groups):
                system, path = file.check_size()
                fragment = dataset.ParquetFileFormat().make_fragment(path, system)
                kind = fragment.physical_schema.field(time).type  # of this file; others may have another one
                # Row group statistics omit NaN, strings are in lexical order, and decimals have other bounds.
                if not (pa.types.is_floating(kind) or is_text(kind) or pa.types.is_decimal(kind)):
                    mask = time_mask(self._rule, split, compute.field(time), kind)
                    group_ids = [group.id for group in fragment.subset(mask).row_groups]
            for group in group_ids:
                start = ends[group] - groups[group]
                if groups_within and (groups_within[-1].file, groups_within[-1].stop) == (number, start):
                    start = groups_within.pop().start
                groups_within.append(Part(number, start, ends[group]))
        return tuple(groups_within)

    def tail(self, part: Part) -> Part:
        return replace(part, start=max(part.start, self._stop(part) - SLICE_ROWS))

    def location(self, part: Part, chunk: Chunk, line: int) -> str:
        return f"{self.files[part.file].path}, row {chunk.offset + line + 1}"

    def _stop(self, part: Part) -> int:
        return sum(self._groups[part.file]) if part.stop is None else part.stop


def drop_bad_rows(parsed: ParsedChunk, schema: Schema, labelled: bool, suffix: str = "") -> ParsedChunk:
    """Move rows with invalid values from the valid rows of a chunk to the bad ones; `suffix` ends their messages."""
    batch, rows = parsed.batch, parsed.rows
    if not (invalid_values := find_invalid_values(batch, schema, labelled)):
        return parsed
    valid = valid_row_mask(batch, invalid_values)
    index_by_row = {int(rows[index]): int(index) for index in np.flatnonzero(~valid)}
    bad_rows = np.sort(np.concatenate([parsed.bad_rows, rows[~valid]]))

    def describe(number: int) -> tuple[str, str]:
        if (index := index_by_row.get(int(bad_rows[number]))) is None:
            return parsed.describe(int(np.searchsorted(parsed.bad_rows, bad_rows[number])))
        name, expected, _ = next(entry for entry in invalid_values if entry[2][index])
        value, field_number = batch.column(name)[index].as_py(), batch.schema.get_field_index(name) + 1
        message = invalid_value_message(field_number, name, "missing" if value is None else value, expected, suffix)
        return f"column {name} is not {expected}{suffix}", message

    return ParsedChunk(batch.filter(arrow_array(valid)), rows[valid], bad_rows, parsed.lines, describe)


def _value_kind(kind: Any, name: str, schema: Schema, location: str) -> str:
    """Return the kind of a column's values, empty if all are missing; raise ValueError if it has the wrong type."""
    types, sparse = pa.types, name in schema.sparse
    inner = value_type(kind.value_type if sparse and is_list(kind) else kind)
    if types.is_null(inner):
        return ""
    if types.is_integer(inner) or types.is_boolean(inner):
        return "integers"
    if sparse and not is_text(inner):
        hint = f'; if these are integers: df["{name}"].astype("Int64") in pandas' if types.is_floating(inner) else ""
        text = f"{location}: column {name!r} is {kind}, but a sparse column has integers, strings or lists{hint}"
        raise ValueError(text)
    if not sparse and not types.is_floating(inner):
        role = "a dense column" if name in schema.dense else "the weight" if name == schema.weight else "the label"
        raise ValueError(f"{location}: column {name!r} is {inner}, but {role} has numbers")
    return "strings" if sparse else "numbers"
