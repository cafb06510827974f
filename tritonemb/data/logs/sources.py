"""The parts of a log, whatever their format: cut into chunks, parsed, and told about."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from tritonemb.data.logs import parquet, shares, splits, text, tsv
from tritonemb.data.logs.files import LogFile
from tritonemb.data.logs.problems import listed
from tritonemb.data.logs.schema import Schema
from tritonemb.data.logs.splits import Part, SplitRule
from tritonemb.data.logs.text import Chunk
from tritonemb.data.logs.values import Checked, Sink
from tritonemb.data.protocol import Shard, Split
from tritonemb.utils import require

_COUNTING = threading.Lock()  # several threads may ask for the same lines


class Source(Protocol):
    """Files of one format.

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
        """Told without reading the part."""
        ...

    def chunks(self, parts: tuple[Part, ...], chunk_bytes: int, first: int, offset: int, line: int) -> Iterator[Chunk]:
        """The chunks of all parts, from the one at `offset` of part `first` on, after `line` lines of that part."""
        ...

    def parse(self, chunk: Chunk, sink: Sink) -> Checked: ...

    def share(self, parts: tuple[Part, ...], share: Shard) -> tuple[Part, ...]:
        """Of all rows of some parts, those of one share."""
        ...

    def rows_before(self, part: Part) -> int:
        """Lines or rows of the file before those of the part. May have to read them, once."""
        ...

    def where(self, part: Part, chunk: Chunk, row: int) -> str:
        """`train.txt, line 3`: the place of a chunk's row in its file."""
        ...


class TextSource:
    """Criteo's TSV, plain or compressed.

    Raises:
        ValueError: a schema of other columns; a file whose first line is bad, unless `lenient`.
    """

    def __init__(self, files: tuple[LogFile, ...], schema: Schema, lenient: bool, labelled: bool = True) -> None:
        for part, names in (("dense", schema.dense), ("sparse", schema.sparse)):
            if wrong := [name for name in names if name in tsv.FIELDS and not _fits(part, name)]:
                raise ValueError(f"schema: {wrong[0]!r} of Criteo's TSV can not be {part}: it is {_kind(wrong[0])}")
        if schema.label not in ("", tsv.LABEL):
            raise ValueError(
                f"{files[0].path}: text files are read in Criteo's format alone, whose label is {tsv.LABEL!r} and not "
                f"{schema.label!r}; its columns: {listed(tsv.FIELDS)}. Other logs can be read from Parquet files"
            )
        self.schema = schema.of(tsv.FIELDS, str(files[0].path))
        self.multi_hot: tuple[str, ...] = ()
        self._files, self._labelled = files, labelled
        self._lines_before: list[dict[int, int]] = [{0: 0} for _ in files]  # by byte
        for file in files:
            _check_beginning(file, lenient, labelled)

    def sizes(self) -> list[int]:
        return [text.unpacked_size(file) for file in self._files]

    def num_rows(self, part: Part) -> int | None:
        return None

    def estimated_rows(self, part: Part) -> float:
        """By the first lines of the file, which are taken to be as long, and as well compressed, as the others."""
        file = self._files[part.file]
        line = text.mean_line_bytes(file)
        stop = text.estimated_lines(file) if part.stop is None else part.stop / line
        return max(stop - part.start / line, 0.0)

    def chunks(self, parts: tuple[Part, ...], chunk_bytes: int, first: int, offset: int, line: int) -> Iterator[Chunk]:
        for number, part in enumerate(parts[first:], start=first):
            begin, lines = (offset, line) if number == first else (part.start, 0)
            file, (index, count) = self._files[part.file], part.stripes
            chunks = text.text_chunks(file, number, part.start, part.stop, chunk_bytes, begin, lines)
            if count > 1:
                chunks = text.striped(chunks, index, count, text.stripe_bytes(file, count))
            yield from chunks

    def parse(self, chunk: Chunk, sink: Sink) -> Checked:
        return tsv.parse(chunk.content, sink, self._labelled)

    def share(self, parts: tuple[Part, ...], share: Shard) -> tuple[Part, ...]:
        """Plain text is cut by bytes. Compressed text can not be entered in the middle: whole files are dealt out if
        there is one for each share; else every share unpacks all of them and keeps every count-th stripe."""
        plain = [part for part in parts if self._files[part.file].codec is None]
        packed = [part for part in parts if self._files[part.file].codec is not None]
        sizes = [(self._files[part.file].size if part.stop is None else part.stop) - part.start for part in plain]
        pieces = shares.even(plain, sizes, share)
        if len(packed) >= share[1]:
            pieces += shares.whole(packed, [self._files[part.file].size for part in packed], share)
        else:
            pieces += [replace(part, stripes=share) for part in packed]
        return tuple(sorted(pieces, key=lambda part: (part.file, part.start)))

    def rows_before(self, part: Part) -> int:
        with _COUNTING:
            known = self._lines_before[part.file]
            if part.start not in known:
                near = max(byte for byte in known if byte < part.start)
                known[part.start] = known[near] + text.lines_before(self._files[part.file], part.start, near)
            return known[part.start]

    def where(self, part: Part, chunk: Chunk, row: int) -> str:
        return f"{self._files[part.file].path}, line {self.rows_before(part) + chunk.line + row + 1}"


class ParquetSource:
    """Parquet files with the same columns.

    Args:
        extra: the time column, if rows are split by it.
        labelled: whether there is a label column.

    Raises:
        ValueError: a file is damaged, has no rows, lacks a column or has it twice, or has it of another kind than it
            needs or than other files have.
    """

    def __init__(
        self, files: tuple[LogFile, ...], schema: Schema, extra: tuple[str, ...] = (), labelled: bool = True
    ) -> None:
        self._files, self._labelled = files, labelled
        self._heads = [parquet.head_of(file, extra[0] if extra else None) for file in files]
        for file, head in zip(files, self._heads, strict=True):
            if head.num_rows == 0:
                raise ValueError(f"{file.path} is empty: it has no rows")
        self.schema = schema.of(self._heads[0].columns, str(files[0].path), labelled)
        self.multi_hot = parquet.check_columns(self._heads[0], self.schema, str(files[0].path), labelled)
        texts: dict[str, tuple[bool, LogFile]] = {}
        for file, head in zip(files, self._heads, strict=True):
            self.schema.of(head.columns, str(file.path), labelled)
            if parquet.check_columns(head, self.schema, str(file.path), labelled) != self.multi_hot:
                raise ValueError(f"{file.path}: other columns are lists than in {files[0].path}: {self.multi_hot}")
            for name in extra:
                if name not in head.columns:
                    raise ValueError(f"{file.path}: there is no column {name!r}; columns: {listed(head.columns)}")
                parquet.check_single(head, name, str(file.path))
            for name in self.schema.sparse:
                text = parquet.is_text(head, name)
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
            yield from parquet.parquet_chunks(file, number, part.start, stop, chunk_bytes, begin, self._columns)

    def parse(self, chunk: Chunk, sink: Sink) -> Checked:
        return parquet.parse(chunk.content, self.schema, sink, self._labelled)

    def share(self, parts: tuple[Part, ...], share: Shard) -> tuple[Part, ...]:
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
        return tuple(shares.even(parts, sizes, share, ends))

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


def is_labelled(file: LogFile, schema: Schema) -> bool:
    """Whether a log that is to be scored has labels, as far as a file's columns or its first line tell."""
    if file.format == "parquet":
        return (schema.label or tsv.LABEL) in parquet.head_of(file).columns
    lines = text.first_lines(file).split(b"\n")
    first = next((line for line in lines if line.removesuffix(b"\r")), b"")
    return first.count(b"\t") != len(tsv.FIELDS) - 2


def _check_beginning(file: LogFile, lenient: bool, labelled: bool) -> None:
    beginning = text.first_lines(file)
    if not beginning:
        raise ValueError(f"{file.path} is empty")
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(
            f"{file.path} does not look like text in ASCII or UTF-8: it begins with a mark of UTF-16. Convert it: "
            f"iconv -f UTF-16 -t UTF-8"
        )
    if lenient:
        return
    lines = beginning.split(b"\n")
    number, line = next(((n, line) for n, line in enumerate(lines) if line.removesuffix(b"\r")), (0, b""))
    if not line:
        return
    checked = tsv.parse(line, lambda name, values: None, labelled)
    if len(checked.bad_rows):
        raise ValueError(f"{file.path}, line {number + 1}: {checked.describe(0)[1]}")


def _fits(part: str, name: str) -> bool:
    return name in tsv.INTEGERS or (part == "sparse" and name in tsv.CATEGORIES)


def _kind(name: str) -> str:
    return "the label" if name == tsv.LABEL else "a category"
