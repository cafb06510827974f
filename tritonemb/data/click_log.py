"""Click logs that need not fit in memory: read chunk by chunk, parsed by a few threads, shuffled buffer by buffer."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from tritonemb.data import splits
from tritonemb.data.arrow import Checked, Chunk
from tritonemb.data.columns import concat
from tritonemb.data.encode import Encoder, numberings
from tritonemb.data.files import LogFile, find, is_remote
from tritonemb.data.in_memory import Dataset
from tritonemb.data.parquet import ArrowSource, Source, head_of, tables_by_split
from tritonemb.data.pipeline import FIELDS, Batcher, Block, Place, default_workers, in_order
from tritonemb.data.protocol import (
    SPLITS,
    WHOLE,
    Feature,
    OpenOptions,
    ReadReport,
    Shard,
    Split,
    Stream,
    check_position,
    digest,
    fingerprint,
    tables_of,
)
from tritonemb.data.schema import FIELDS as CRITEO_FIELDS
from tritonemb.data.schema import LABEL, MAX_PROBLEMS, Problem, Problems
from tritonemb.data.splits import Kind, LogOptions, Part, SplitRule
from tritonemb.data.text import TextSource, delimiter_of, first_bytes, header_of
from tritonemb.types import TableConfig
from tritonemb.utils import require

Array = np.ndarray[Any, Any]
R = TypeVar("R")

UNSHUFFLED_ROWS = 16_384  # of a buffer whose rows keep their order


class ClickLog:
    """A log of clicks in one file, several, or a folder: Criteo's TSV or CSV (plain, .gz or .zst), or Parquet.

    Memory holds, whatever the size of the log: `2 * workers + 5` chunks of `chunk_bytes` or what they were parsed to,
    about `8 * workers` times `chunk_bytes` while they are parsed, and twice `shuffle_rows` rows.

    Args:
        source: a file, several in their order, or a folder with data files, in natural order of their names; remote
            ones by a URI such as `s3://bucket/logs`. Or data frames by split; see `from_dataframe`.
        options: how it is read.
        name: for messages; the file's or folder's if not given.
        say: is called, before it is done, with a line about work that takes a pass over the data.
        labelled: whether rows have a label; those of a log that is only scored may have none, and get 0.

    Raises:
        FileNotFoundError, ValueError: a file is missing, empty, unreadable or of the wrong kind; its first line is
            bad; a column is not there; the split leaves no train rows. All of it before anything is trained.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path] | Mapping[Split, Any],
        options: LogOptions | None = None,
        *,
        name: str | None = None,
        say: Callable[[str], None] | None = None,
        labelled: bool = True,
    ) -> None:
        self.options = options or LogOptions()
        rule = self.options.split
        by_file: dict[Split, tuple[int, ...]] = {}
        if isinstance(source, Mapping):
            self.name = name or "data frame"
            files, self._kind, by_file = tables_by_split(source, rule, self.name)
        else:
            files = find(source)
            self.name = name or _name_of(source, files)
            self._kind = rule.kind(files)
            if self._kind == "files":
                files, by_file = splits.split_files(rule, files)
        self._files, self.files = files, tuple(file.path for file in files)
        time = (rule.time_column,) if self._kind == "time" and rule.time_column else ()
        if files[0].format != "text":
            self._source: Source = ArrowSource(files, self.options.schema, time, labelled)
        elif time:
            raise ValueError(f"{files[0].path}: text files are not split by a time column; split by another rule")
        else:
            self._source = TextSource(files, self.options, labelled)
        self.schema = self._source.schema
        self._numberings = numberings(self.schema)
        self._vocabulary = _digest_of(self.schema.vocabulary)
        self.features = tuple(
            Feature(column, self._numberings[column].num_embeddings, column in self._source.multi_hot)
            for column in self.schema.sparse
        )
        self.best_auc: float | None = None
        packed = any(file.codec for file in files)
        if self._kind == "end" and packed and (rule.test_share or rule.validation_share) and say:
            say(f"{self.name}: unpacking it once to learn its size, so that its last rows can be held out")
        self._parts = self._all_parts(by_file, len(files))
        self._identity: tuple[Any, ...] = tuple((file.name, file.size) for file in files)
        self._known_rows: dict[Split, int] = {}
        self._left_out: dict[Split, ReadReport] = {}

    @property
    def num_dense(self) -> int:
        return len(self.schema.dense)

    @property
    def encoding(self) -> str:
        """See `tritonemb.data.protocol.Data.encoding`: by the schema, and the bytes of the vocabulary file if any."""
        schema = self.schema
        dense = tuple((name, schema.is_logarithmic(name)) for name in schema.dense)
        return digest("log", schema.label, dense, self.features, self._vocabulary)

    def tables(self, embedding_dim: int) -> list[TableConfig]:
        """One table a feature, all of one dim; the bags of multi-hot features are averaged."""
        return tables_of(self.features, embedding_dim)

    def splits(self) -> tuple[Split, ...]:
        """The splits that it has."""
        return tuple(split for split in SPLITS if split in self._parts)

    def num_rows(self, split: Split) -> int | None:
        """Rows of a split: of Parquet at once, where whole runs of rows are held out and bad rows are errors; else None
        until the split has been read to its end."""
        parts = self._parts_of(split)
        if self._kind in ("end", "files") and self.options.on_bad_row == "raise":
            counts = [self._source.num_rows(part) for part in parts]
            if all(count is not None for count in counts):
                return sum(count for count in counts if count is not None)
        return self._known_rows.get(split)

    def estimated_rows(self, split: Split) -> int | None:
        """The number of rows, or what the sizes of the files and their first lines make of it."""
        known = self.num_rows(split)
        if known is not None:
            return known
        rows = sum(self._source.estimated_rows(part) for part in self._parts_of(split))
        share = {"validation": self.options.split.validation_share, "test": self.options.split.test_share}
        if self._kind == "random":
            rows *= share[split] if split != "train" else 1 - sum(share.values())
        return round(rows) if self._kind != "time" else None

    def open(self, split: Split, batch_size: int, **how: Any) -> Stream:
        """See `tritonemb.data.protocol.Data.open`. Rows are shuffled inside buffers of `shuffle_rows`, whole batches.

        A shard is a run of bytes of plain text, or of row groups of Parquet, that nobody else parses. Compressed files
        are dealt out whole if there is one for each shard; else every shard unpacks all of them and parses every
        count-th stripe. Where rows are drawn at random, a shard of plain text counts the lines before it first. Where
        they are split by time, row groups are left out whose statistics say that they have none of the split.
        """
        opened = OpenOptions(split, batch_size, **how)
        position, shard = opened.position, opened.shard
        shuffle = opened.shuffle and self.options.shuffle_rows > 0
        wanted = self.options.shuffle_rows if shuffle else UNSHUFFLED_ROWS
        buffer_rows = -(-wanted // batch_size) * batch_size
        of = (self._identity, self.options.split, split, batch_size, buffer_rows)
        extra = shard if shard != WHOLE else ()
        order = (opened.seed, opened.epoch, *extra)
        belongs_to = fingerprint(*of, *(order if shuffle else extra))
        log = self._shard(split, shard)
        parts = log._parts[split]
        first = parts[0].start if parts else 0
        if position is None:
            position = dict.fromkeys(FIELDS, 0) | {"of": belongs_to, "offset": first}
        else:
            check_position(position, FIELDS, belongs_to, self.name)
            part = position["part"]
            if part >= max(len(parts), 1) or position["offset"] < (parts[part].start if parts else 0):
                raise ValueError(f"data set {self.name!r}: the position is in a file that the {split} rows do not have")
            if position["batch"] * batch_size >= buffer_rows:
                raise ValueError(
                    f"data set {self.name!r}: the position is in batch {position['batch']} of a shuffle buffer"
                )
            if self.options.on_bad_row == "raise" and position["skipped"]:
                raise ValueError(
                    f"data set {self.name!r}: {position['skipped']} bad rows had been left out at this position, so it "
                    'can not go on with on_bad_row="raise"; use on_bad_row="skip", or start the epoch again'
                )
        batcher = Batcher(
            self.name,
            split,
            lambda place: log.encoded(split, place),
            tuple(feature.name for feature in self.features),
            batch_size,
            buffer_rows,
            order if shuffle else None,
            opened.pin_memory,
            needs_rows=shard == WHOLE,
            left_out=self._left_out.get(split, ReadReport()) if shard[0] == 0 else ReadReport(),
        )

        def at_end(report: ReadReport) -> None:
            if shard == WHOLE:
                self._known_rows[split] = report.rows

        return Stream(batcher.steps(position), dict(position), batcher.report(position), at_end)

    def scan(self, split: Split, job: Callable[[Chunk], R], start: Place | None = None) -> Generator[R, None, None]:
        """`job` of the chunks of a split, in order, by the log's threads; close the iterator to end them."""
        parts = self._parts_of(split)
        start = start or Place(offset=parts[0].start if parts else 0)
        if self._kind == "random":  # here, and not in the threads
            for part in parts:
                self._source.rows_before(part)
        chunks = self._source.chunks(parts, self.options.chunk_bytes, start.part, start.offset, start.line)
        return in_order(job, chunks, self.options.workers or default_workers())

    def encoded(self, split: Split, start: Place | None = None) -> Generator[Block, None, None]:
        """The rows of a split as ids and numbers, chunk by chunk; close the iterator to end its threads."""
        return self.scan(split, lambda chunk: self._encode(split, chunk), start)

    def parse(self, split: Split, chunk: Chunk, sink: Callable[[str, Any], None]) -> tuple[Array | None, Problems]:
        """Hand the columns of a chunk to the sink: which of its rows are good and of the split (None: all), which bad.

        Raises:
            ValueError: there is a bad row, and they are not to be skipped.
        """
        checked = self._source.parse(chunk, sink)
        chosen = self._chosen(split, chunk)
        bad_rows = np.arange(len(checked.bad_rows))
        keep = checked.good
        if chosen is not None:
            bad_rows = bad_rows[chosen(checked.bad_rows)]
            mine = chosen(checked.rows)
            keep = mine if keep is None else keep & mine
        return keep, self._problems(split, chunk, checked, bad_rows)

    def load(self) -> Dataset:
        """All of it in memory."""
        rows = {}
        for split in self.splits():
            with closing(self.encoded(split)) as blocks:
                rows[split] = concat([block.rows for block in blocks])
        if "test" not in rows:
            raise ValueError(f"data set {self.name!r} has no test rows; a data set in memory needs some")
        return Dataset(self.name, self.features, rows["train"], rows["test"], rows.get("validation"))

    def for_scoring(self) -> ClickLog:
        """The same log with all of its rows, in their order, as test rows."""
        scored = self._with("end", {"test": tuple(Part(file, 0, None) for file in range(len(self.files)))})
        scored.options = replace(self.options, split=SplitRule(split_by="end", test_share=0.0))
        return scored

    def of_file(self, file: int) -> ClickLog:
        """The same log with all rows of one of its files as train rows."""
        return self._with("end", {"train": (Part(file, 0, None),)})

    def in_files(self, files: Mapping[Split, LogFile | None], left_out: dict[Split, ReadReport]) -> ClickLog:
        """The same log, read from Parquet files with the good rows of its splits, None for one without rows.

        Args:
            left_out: the bad rows of each split.
        """
        found = [file for file in files.values() if file is not None]
        parts: dict[Split, tuple[Part, ...]] = {
            split: () if file is None else (Part(found.index(file), 0, None),) for split, file in files.items()
        }
        log = self._with("files", parts)
        log._source, log.files = ArrowSource(tuple(found), self.schema), tuple(file.path for file in found)
        log.options = replace(self.options, on_bad_row="raise")
        log._identity, log._left_out = (*self._identity, "parquet"), left_out
        return log

    def text_schema(self) -> Any:
        """The `pyarrow.Schema` of its columns if it is read from text; else None."""
        return self._source.arrow_schema() if isinstance(self._source, TextSource) else None

    def rows_digest(self) -> str:
        """A digest of what decides the values of a text log's rows: its files, how they are parsed, and the splits."""
        options = (self.options.split, self.options.on_bad_row, self.options.delimiter, self.options.quoted_newlines)
        columns = [(field.name, str(field.type)) for field in self.text_schema()]
        return digest([(file.location, file.size, file.modified) for file in self._files], options, columns)

    def _with(self, kind: Kind, parts: dict[Split, tuple[Part, ...]]) -> ClickLog:
        """A copy with other splits."""
        log = copy.copy(self)
        log._kind, log._parts, log._known_rows = kind, parts, {}
        return log

    def _shard(self, split: Split, shard: Shard) -> ClickLog:
        """The same log with one shard of a split as all of it."""
        parts = self._parts_of(split)
        if shard == WHOLE:
            return self
        if self._kind == "time" and isinstance(self._source, ArrowSource):
            parts = self._source.within(self.options.split, split)
        return self._with(self._kind, {split: self._source.shard(parts, shard)})

    def _encode(self, split: Split, chunk: Chunk) -> Block:
        encoder = Encoder(self.schema, self.features, self._numberings)
        keep, problems = self.parse(split, chunk, encoder.put)
        rows = encoder.rows()
        if keep is not None and not keep.all():
            rows = rows.take(torch.from_numpy(np.flatnonzero(keep)))
        return Block(chunk.part, chunk.offset, chunk.line, rows, problems)

    def _chosen(self, split: Split, chunk: Chunk) -> Callable[[Array], Array] | None:
        """Which of some rows of a chunk belong to the split; None: all do."""
        rule = self.options.split
        if self._kind == "random":
            part = self._parts[split][chunk.part]
            before = self._source.rows_before(part) + chunk.line
            return lambda rows: splits.drawn(rule, split, part.file, before + rows)
        if self._kind == "time":
            assert rule.time_column is not None
            times = chunk.content.column(chunk.content.schema.get_field_index(rule.time_column))
            mask = splits.time_mask(rule, split, times, require("pyarrow"), require("pyarrow.compute"))
            return lambda rows: mask[rows]
        return None

    def _problems(self, split: Split, chunk: Chunk, checked: Checked, bad_rows: Array) -> Problems:
        problems, part = Problems(), self._parts[split][chunk.part]
        for number in bad_rows.tolist():
            row = int(checked.bad_rows[number])
            reason, message = checked.describe(number)
            if self.options.on_bad_row == "raise":
                raise ValueError(f"{self._source.where(part, chunk, row)}: {message}")
            problems.counts[f"{self.files[part.file]}: {reason}"] += 1
            if len(problems.first) < MAX_PROBLEMS:
                where = self._source.where(part, chunk, row)
                problems.first.append(Problem(row, reason, f"{where}: {message}"))
        return problems

    def _all_parts(self, by_file: dict[Split, tuple[int, ...]], num_files: int) -> dict[Split, tuple[Part, ...]]:
        rule = self.options.split
        whole = tuple(Part(file, 0, None) for file in range(num_files))
        if self._kind == "files":
            parts = {split: tuple(whole[file] for file in indices) for split, indices in by_file.items()}
        elif self._kind == "end" and not (rule.test_share or rule.validation_share):
            parts = {"train": whole}
        elif self._kind == "end":
            parts = splits.end_parts(rule, self._source.sizes())
        else:
            bounds = {"validation": rule.validation_from, "test": rule.test_from}
            shares = {"validation": rule.validation_share, "test": rule.test_share}
            self._check_times([bound for bound in bounds.values() if bound is not None])
            has = bounds if self._kind == "time" else shares
            parts = {split: whole for split in SPLITS if split == "train" or has[split]}
        wanted: dict[Split, float] = {"train": 1.0, "validation": rule.validation_share, "test": rule.test_share}
        for split, share in wanted.items():
            if self._kind == "end" and share and not parts.get(split):
                raise ValueError(f"{self.name}: too few rows for a share of {share:.3f} as {split} rows")
        return {split: kept for split, kept in parts.items() if kept}

    def _check_times(self, bounds: list[str]) -> None:
        if isinstance(self._source, ArrowSource) and self.options.split.time_column:
            for bound in bounds:
                splits.time_bound(bound, self._source.type_of(self.options.split.time_column), require("pyarrow"))

    def _parts_of(self, split: Split) -> tuple[Part, ...]:
        if split not in self._parts:
            raise ValueError(f"data set {self.name!r} has no {split!r} rows, only {', '.join(self.splits())}")
        return self._parts[split]


def _digest_of(path: Path | None) -> str | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_labelled(file: LogFile, options: LogOptions) -> bool:
    """Whether a log that is to be scored has labels, as far as a file's columns or its first line tell."""
    label = options.schema.label or LABEL
    if file.format != "text":
        return label in head_of(file).columns
    if delimiter := delimiter_of(file, options):
        return label in header_of(file, delimiter)[0]
    lines = first_bytes(file).split(b"\n")
    first = next((line for line in lines if line.removesuffix(b"\r")), b"")
    return first.count(b"\t") != len(CRITEO_FIELDS) - 2


def _name_of(source: str | Path | Sequence[str | Path], files: Sequence[LogFile]) -> str:
    if isinstance(source, str | Path):
        return (
            str(source).partition("?")[0].rstrip("/").rpartition("/")[2]
            if is_remote(source)
            else Path(source).resolve().name
        )
    path = files[0].path
    return path.split("/")[-2] if isinstance(path, str) else path.parent.name
