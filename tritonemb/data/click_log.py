"""Click logs that need not fit in memory: read chunk by chunk, parsed by a few threads, shuffled buffer by buffer."""

import copy
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from tritonemb.data import protocol
from tritonemb.data.arrow import pa
from tritonemb.data.batch import Array
from tritonemb.data.encode import encode, make_numberings, mix
from tritonemb.data.files import Chunk, LogFile, Part, end_parts, find_files, is_remote, parts_of_files, split_files
from tritonemb.data.parquet import ArrowSource, time_mask
from tritonemb.data.pipeline import FIELDS, LogPosition, iterate_batches, ordered_map, permutation
from tritonemb.data.protocol import SPLITS, WHOLE, Feature, OpenOptions, Position, ReadReport, Shard, Split, Stream
from tritonemb.data.schema import ALL_ROWS, Kind, LogOptions, Schema, SplitRule
from tritonemb.data.text import TextSource

_log = logging.getLogger(__name__)

UNSHUFFLED_ROWS = 16_384  # of a buffer whose rows keep their order


class ClickLog(protocol.FeatureTables):
    """A log of clicks in one file, several, or a folder: Criteo's TSV or CSV (plain, .gz or .zst), or Parquet.

    Memory holds `2 * parser_threads + 5` chunks of `chunk_bytes` or their parsed rows, about
    `8 * parser_threads * chunk_bytes` while they are parsed, and twice `shuffle_rows` rows. FileNotFoundError or
    ValueError, before training starts, if a file is missing, empty, unreadable or of the wrong kind, its first line is
    bad, a column is missing, or the split leaves no train rows.

    Args:
        source: a file, several in their order, or a folder with data files, in natural order of their names; remote
            ones by a URI such as `s3://bucket/logs`. Or what `from_dataframe` makes of data frames, by split.
        options: how it is read.
        name: for messages; the file's or folder's if not given.
        labelled: whether rows have a label. If not, they get 0, and a column of that name may have anything in it.
        kept: columns that `scan` has besides those of the schema.

    Attributes:
        encode: makes `Rows`, ids and numbers, of a `pyarrow.RecordBatch` of the log.
    """

    def __init__(
        self, source: str | Path | Sequence[str | Path] | Mapping[Split, LogFile], options: LogOptions | None = None, *,
        name: str | None = None, labelled: bool = True, kept: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        if not isinstance(options, LogOptions | None):
            raise TypeError(f"options must be LogOptions(schema=...), got a {type(options).__name__}")
        self.options = options or LogOptions()
        rule = self.options.split
        self.best_auc: float | None = None
        self._known_rows: dict[Split, int] = {}
        self._left_out: dict[Split, ReadReport] = {}
        by_split: dict[Split, tuple[LogFile, ...]]
        if isinstance(source, Mapping):
            by_split, self.name = {split: (file,) for split, file in source.items()}, name or "data frame"
            kind = rule.kind()
            self._kind: Kind = "files" if len(source) > 1 and rule.split_by == "auto" and kind == "end" else kind
            if (len(source) > 1) != (self._kind == "files"):
                raise ValueError(
                    f"{self.name}: give held-out data frames, or another split rule than {rule.split_by!r}, not both"
                )
        else:
            found = find_files(source)
            self.name, self._kind = name or _log_name(source, found), rule.kind([file.stem for file in found])
            by_split = split_files(rule, found) if self._kind == "files" else {"train": found}
        splits, files = zip(*((split, file) for split in SPLITS for file in by_split.get(split, ())), strict=True)
        self._files, self.files = files, tuple(file.path for file in files)
        self._identity: tuple[Any, ...] = tuple((file.name, file.size) for file in files)
        is_text = files[0].format == "text"
        source_type: type[TextSource | ArrowSource] = TextSource if is_text else ArrowSource
        self._source = source_type(files, self.options, labelled, (*kept, *filter(None, [rule.time_column])))
        rule_words = " ".join([self._kind, *map(str, self._held_out().values() if self._kind != "files" else ())])
        self._origin = rule_words, splits, [0] * len(files) if is_text else self._source.sizes()
        self.schema = self._source.schema
        known = make_numberings(self.schema)
        self._vocabulary = vocabulary_digest(self.schema)
        lists, kinds = self._source.multi_hot, self._source.kinds
        self.features = tuple(
            Feature(name, known[name].num_embeddings, name in lists, self.schema.dynamic, kinds.get(name, ""))
            for name in self.schema.sparse
        )
        self.encode = partial(encode, schema=self.schema, features=self.features, numberings=known, labelled=labelled)
        self._parts = parts_of_files(by_split) if self._kind == "files" else self._split_rows()
        self._parts = {split: parts for split, parts in self._parts.items() if parts}
        for split, parts in {} if is_text else self._parts.items():
            if not any(map(self._source.estimated_rows, parts)):
                raise ValueError(f"{self.name}: the files of the {split} rows have none")

    def _held_out(self) -> dict[Split, Any]:
        rule = self.options.split
        if self._kind == "time":
            return {"validation": rule.validation_from, "test": rule.test_from}
        return {"validation": rule.validation_share, "test": rule.test_share}

    def _split_rows(self) -> dict[Split, tuple[Part, ...]]:
        rule, held_out = self.options.split, self._held_out()
        whole = tuple(Part(file) for file in range(len(self._files)))
        if self._kind != "end" or not any(held_out.values()):
            return {split: whole for split in SPLITS if split == "train" or held_out[split]}
        if any(file.codec for file in self._files):
            _log.warning("%s: unpacking it once to learn its size, so that its last rows can be held out", self.name)
        parts = end_parts(rule, self._source.sizes())
        for split, share in {"train": 1.0, **held_out}.items():
            if share and not parts[split]:
                raise ValueError(f"{self.name}: too few rows for a share of {share:.3f} as {split} rows")
        return parts

    @property
    def num_dense(self) -> int:
        return len(self.schema.dense)

    @property
    def encoding(self) -> str:
        """See `tritonemb.data.protocol.Data.encoding`: by the schema, and the bytes of the vocabulary file if any."""
        return encoding_digest(self.schema, self.features, self._vocabulary)

    @cached_property
    def contents(self) -> dict[str, str]:
        """What it was read from, for a run that is resumed: the split, and each file with its rows, as far as they are
        known, and `LogFile.digest`."""
        rule, splits, rows = self._origin
        contents = {"split": rule}
        for split, file, num_rows in zip(splits, self._files, rows, strict=True):
            name = file.name if split == "train" else f"{file.name} ({split})"
            contents[name] = contents.get(name, "") + (f"{num_rows:,} rows, " if num_rows else "") + file.digest()
        return contents

    def number_by_line(self) -> None:
        """Split at random as earlier versions did, whose row numbers counted headers and blank lines of text."""
        if self._source.numbering is not None:
            self._source.numbering, self.contents = 0, {}  # so that it is resumed as such again

    def splits(self) -> tuple[Split, ...]:
        """The splits that it has."""
        return tuple(split for split in SPLITS if split in self._parts)

    def num_rows(self, split: Split) -> int | None:
        """Rows of a split: of Parquet at once, where whole runs of rows are held out and bad rows are errors; else None
        until the split has been read to its end."""
        parts = self._parts_of(split)
        exact = isinstance(self._source, ArrowSource) and self._kind in ("end", "files")
        if exact and self.options.on_bad_row == "raise":
            return round(sum(self._source.estimated_rows(part) for part in parts))
        return self._known_rows.get(split)

    def estimated_rows(self, split: Split) -> int | None:
        """The number of rows, or what the sizes of the files and their first lines make of it."""
        known = self.num_rows(split)
        if known is not None or self._kind == "time":
            return known
        rows = sum(self._source.estimated_rows(part) for part in self._parts_of(split))
        if self._kind == "random":
            held_out = self._held_out()
            rows *= held_out[split] if split != "train" else 1 - sum(held_out.values())
        return round(rows)

    def open(self, split: Split, batch_size: int, **how: Any) -> Stream:
        """See `tritonemb.data.protocol.Data.open`. Rows are shuffled inside buffers of `shuffle_rows`, whole batches.

        A shard is a run of bytes of plain text, or of row groups of Parquet. Compressed files are dealt out whole if
        there is one for each shard; else every shard unpacks all of them and parses every count-th stripe.
        """
        opened = OpenOptions(split, batch_size, **how)
        position, shard = opened.position, opened.shard
        shuffle = opened.shuffle and self.options.shuffle_rows > 0
        buffer_rows = -(-(self.options.shuffle_rows if shuffle else UNSHUFFLED_ROWS) // batch_size) * batch_size
        extra = shard if shard != WHOLE else ()
        order = (opened.seed, opened.epoch, *extra)
        rows = (batch_size, buffer_rows, *(order if shuffle else extra))
        belongs_to = protocol.fingerprint(self._identity, self.options.split, split, *rows)
        log = self._shard(split, shard)
        parts = log._parts[split]
        if position is None:
            position = dict.fromkeys(FIELDS, 0) | {"of": belongs_to, "offset": parts[0].start if parts else 0}
        else:
            protocol.check_position(position, FIELDS, belongs_to, self.name)
            self._check_position(position, parts, split, buffer_rows // batch_size)
        left_out = self._left_out.get(split, ReadReport()) if shard[0] == 0 else ReadReport()
        before = replace(left_out, rows=position["rows"], skipped=left_out.skipped + position["skipped"])
        batches = iterate_batches(
            self.name, opened, partial(log.scan, split, log.encode), tuple(feature.name for feature in self.features),
            buffer_rows, lambda num_rows, buffer: permutation(num_rows, *order, buffer) if shuffle else None, position,
            before,
        )  # fmt: skip

        def at_end(report: ReadReport) -> None:
            if shard == WHOLE:
                self._known_rows[split] = report.rows

        return Stream(batches, dict(position), before, at_end)

    def _check_position(self, position: Position, parts: tuple[Part, ...], split: Split, num_batches: int) -> None:
        part = position["part"]
        if part >= max(len(parts), 1) or position["offset"] < (parts[part].start if parts else 0):
            raise ValueError(f"data set {self.name!r}: the position is in a file that the {split} rows do not have")
        if position["batch"] >= num_batches:
            raise ValueError(f"data set {self.name!r}: the position is in batch {position['batch']} of a buffer")
        if self.options.on_bad_row == "raise" and position["skipped"]:
            raise ValueError(
                f"data set {self.name!r}: {position['skipped']} bad rows had been left out at this position, so it "
                'cannot resume with on_bad_row="raise"; use on_bad_row="skip", or start the epoch again'
            )

    def scan(
        self, split: Split, job: Callable[[Any], Any], start: LogPosition | None = None
    ) -> Generator[Chunk, None, None]:
        """What `job` makes of the good rows of a split, a `pyarrow.RecordBatch` a chunk, in order, by the log's
        threads; close the iterator to end them. ValueError if there is a bad row that is not to be skipped."""
        parts = self._parts_of(split)
        first = start or LogPosition(offset=parts[0].start if parts else 0)

        def chunks() -> Iterator[Chunk]:
            for number, part in enumerate(parts[first.part :], start=first.part):
                offset, line = (first.offset, first.line) if number == first.part else (part.start, 0)
                yield from self._source.chunks(part, number, self.options.chunk_bytes, offset, line)

        def work(chunk: Chunk) -> Chunk:
            batch, report = self._read(split, chunk)
            return replace(chunk, rows=job(batch), report=report)

        return ordered_map(work, chunks(), self.options.parser_threads)

    def all_rows_as(self, split: Split, files: Iterable[int] | None = None) -> Self:
        """The same log with one split: all rows, or those of the files with these numbers, in their order."""
        parts = tuple(map(Part, range(len(self.files)) if files is None else files))
        return self._with("end", {split: parts}, options=replace(self.options, split=ALL_ROWS))

    def in_files(self, files: Mapping[Split, LogFile | None], left_out: dict[Split, ReadReport]) -> Self:
        """The same log, read from Parquet files with its splits' good rows; `left_out` reports the bad ones."""
        found = {split: (file,) for split, file in files.items() if file is not None}
        parts, stored = parts_of_files(found), tuple(file for split in SPLITS for file in found.get(split, ()))
        source = ArrowSource(stored, replace(self.options, schema=self.schema, split=ALL_ROWS), True, ())
        return self._with(
            "files", {split: parts[split] for split in files}, _source=source, _left_out=left_out,
            files=tuple(file.path for file in stored), options=replace(self.options, on_bad_row="raise"),
            _identity=(*self._identity, "parquet"),
        )  # fmt: skip

    def read_as(self, kinds: Mapping[str, str], encoding: str = "") -> Self:
        """The same log as a model was trained with it: ids of these kinds, by feature, for which strings may become
        integers; and logarithms of numbers if that, once the default, is what this `encoding` came from."""
        log = copy.copy(self)
        if self.schema.log_transform is None and encoding not in ("", self.encoding):
            log.schema = replace(self.schema, log_transform=True, clamp_negative=True)
            log.schema = log.schema if log.encoding == encoding else self.schema
        log.features = tuple(replace(each, kind=kinds.get(each.name) or each.kind) for each in self.features)
        log.encode = partial(self.encode, features=log.features, schema=log.schema)
        return log

    def text_schema(self) -> Any:
        """The `pyarrow.Schema` of its columns if it is read from text; else None."""
        return self._source.form.arrow_schema() if isinstance(self._source, TextSource) else None

    def rows_digest(self) -> str:
        """A digest of what decides the values of a text log's rows: its files, how they are parsed, and the splits."""
        options = (self.options.split, self.options.on_bad_row, self.options.delimiter, self.options.quoted_newlines)
        columns = [(field.name, str(field.type)) for field in self.text_schema()]
        columns += [("", self.options.list_separator)] * bool(self.options.list_separator)
        paths = [file.path if isinstance(file.path, str) else str(file.path.resolve()) for file in self._files]
        files = [(path, file.size, file.modified) for path, file in zip(paths, self._files, strict=True)]
        return protocol.digest(files, options, columns, *["by row"] * bool(self._source.numbering))

    def _with(self, kind: Kind, parts: dict[Split, tuple[Part, ...]], **more: Any) -> Self:
        log = copy.copy(self)
        vars(log).update(more, _kind=kind, _parts=parts, _known_rows={})
        return log

    def _shard(self, split: Split, shard: Shard) -> Self:
        parts = self._parts_of(split)
        if shard == WHOLE:
            return self
        if self._kind == "time" and isinstance(self._source, ArrowSource):
            parts = self._source.within(split)
        return self._with(self._kind, {split: self._source.shard(parts, shard)})

    def _read(self, split: Split, chunk: Chunk) -> tuple[Any, ReadReport]:
        parsed, part = self._source.parse(chunk), self._parts[split][chunk.part]
        numbers = parsed.lines if self._source.numbering == 0 else np.arange(len(parsed.lines))
        counts: Counter[str] = Counter()
        problems: list[str] = []
        for number in np.flatnonzero(self._chosen(split, chunk, numbers[parsed.bad_rows])).tolist():
            reason, message = parsed.describe(number)
            counts[f"{self.files[part.file]}: {reason}"] += 1
            if len(problems) < protocol.MAX_PROBLEMS:
                line = int(parsed.lines[parsed.bad_rows[number]])
                problems.append(f"{self._source.where(part, chunk, line)}: {message}")
            if self.options.on_bad_row == "raise":
                raise ValueError(problems[0])
        keep = self._chosen(split, chunk, numbers[parsed.rows], parsed.batch)
        batch = parsed.batch if keep.all() else parsed.batch.filter(pa.array(keep))
        return batch, ReadReport(batch.num_rows, counts.total(), tuple(problems), tuple(sorted(counts.items())))

    def _chosen(self, split: Split, chunk: Chunk, rows: Array, batch: Any = None) -> Array:
        """Which of these rows of a chunk belong to a split; `batch` has them, unless they are bad ones."""
        rule, part = self.options.split, self._parts[split][chunk.part]
        if self._kind == "random":
            return _random_mask(rule, split, part.file, chunk.first_row + rows)
        if self._kind == "time":
            if batch is None and isinstance(self._source, TextSource):  # its bad lines have no time
                return np.full(len(rows), split == "train")
            batch = chunk.rows.take(pa.array(rows)) if batch is None else batch
            times = batch.column(rule.time_column)
            return time_mask(rule, split, times, times.type).to_numpy(zero_copy_only=False)
        return np.ones(len(rows), dtype=bool)

    def _parts_of(self, split: Split) -> tuple[Part, ...]:
        if split not in self._parts:
            raise ValueError(f"data set {self.name!r} has no {split!r} rows, only {', '.join(self.splits())}")
        return self._parts[split]


def vocabulary_digest(schema: Schema) -> str | None:
    """Of the bytes of a schema's vocabulary file, if it has one."""
    return None if schema.vocabulary is None else hashlib.sha256(Path(schema.vocabulary).read_bytes()).hexdigest()


def encoding_digest(schema: Schema, features: tuple[Feature, ...], vocabulary: str | None) -> str:
    """See `tritonemb.data.protocol.Data.encoding`; `vocabulary`: the digest of its file."""
    dense = tuple((name, schema.is_logarithmic(name)) for name in schema.dense)
    return protocol.digest("dynamic log" if schema.dynamic else "log", schema.label, dense, features, vocabulary)


def _random_mask(rule: SplitRule, split: Split, file: int, rows: Array) -> Array:
    """Which rows of a file (their numbers, from 0) belong to a split, for "random": their numbers are hashed to
    `[0, 1)`, the top of it is test, below that is validation."""
    number = rows.astype(np.uint64) + (np.uint64(file) << np.uint64(44))
    place = (mix(number ^ np.uint64(0x53504C4954)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    test = place >= 1 - rule.test_share
    held_out = place >= 1 - rule.test_share - rule.validation_share
    return {"train": ~held_out, "validation": held_out & ~test, "test": test}[split]


def _log_name(source: str | Path | Sequence[str | Path], files: Sequence[LogFile]) -> str:
    if not isinstance(source, str | Path):
        return str(files[0].path).split("/")[-2] if isinstance(files[0].path, str) else files[0].path.parent.name
    return Path(str(source).partition("?")[0]).name if is_remote(source) else Path(source).resolve().name
