"""Click logs larger than memory: read chunk by chunk, parsed by threads, shuffled buffer by buffer."""

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
from tritonemb.data.batch import Array
from tritonemb.data.encode import encode, make_numberings, mix
from tritonemb.data.files import Chunk, LogFile, Part, end_parts, find_files, is_remote, pa, parts_of_files, split_files
from tritonemb.data.parquet import ArrowSource, time_mask
from tritonemb.data.pipeline import FIELDS, LogPosition, iterate_batches, ordered_map, permutation
from tritonemb.data.protocol import SPLITS, WHOLE, Feature, OpenOptions, Position, ReadReport, Shard, Split, Stream
from tritonemb.data.schema import ALL_ROWS, Kind, LogOptions, Schema, SplitRule
from tritonemb.data.text import TextSource

_log = logging.getLogger(__name__)

UNSHUFFLED_ROWS = 16_384  # rows per buffer where the order is kept


class ClickLog(protocol.TablesMixin):
    """Click log in one file, several, or a folder: Criteo's TSV or CSV (plain, .gz or .zst), or Parquet.

    Memory holds `2 * parser_threads + 5` chunks of `chunk_bytes` or their parsed rows, about
    `8 * parser_threads * chunk_bytes` while they are parsed, and twice `shuffle_rows` rows. Raise FileNotFoundError or
    ValueError, before training starts, if a file is missing, empty, unreadable or of the wrong kind, its first line is
    bad, a column is missing, or the split leaves no train rows.

    Args:
        source: a file, several in their order, or a folder with data files, in natural order of their names; remote
            ones by a URI such as `s3://bucket/logs`. Or data frames as files, by split; see `from_dataframe`.
        options: options for reading the log.
        name: name in messages; by default that of the file or folder.
        labelled: whether rows have a label. If not, labels are 0, and the label column is not read.
        extra_columns: columns that `scan` reads in addition to those of the schema.

    Attributes:
        encode: function that encodes a `pyarrow.RecordBatch` of the log as `Rows`.
    """

    def __init__(
        self, source: str | Path | Sequence[str | Path] | Mapping[Split, LogFile], options: LogOptions | None = None, *,
        name: str | None = None, labelled: bool = True, extra_columns: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        if not isinstance(options, LogOptions | None):
            raise TypeError(f"options must be LogOptions(schema=...), got a {type(options).__name__}")
        self.options = options or LogOptions()
        # Files and their splits.
        rule = self.options.split
        self.best_auc: float | None = None
        self._known_rows: dict[Split, int] = {}
        self._skipped_reports: dict[Split, ReadReport] = {}
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
            log_files = find_files(source)
            self.name, self._kind = name or _log_name(source, log_files), rule.kind([file.stem for file in log_files])
            by_split = split_files(rule, log_files) if self._kind == "files" else {"train": log_files}
        splits, files = zip(*((split, file) for split in SPLITS for file in by_split.get(split, ())), strict=True)
        self._files, self.files = files, tuple(file.path for file in files)
        self._identity: tuple[Any, ...] = tuple((file.name, file.size) for file in files)
        # Source of the columns, and the identity of the contents.
        is_text = files[0].format == "text"
        source_type: type[TextSource | ArrowSource] = TextSource if is_text else ArrowSource
        self._source = source_type(files, self.options, labelled, (*extra_columns, *filter(None, [rule.time_column])))
        bounds = self._held_out_bounds().values() if self._kind != "files" else ()
        split_description = " ".join([self._kind, *map(str, bounds)])
        self._origin = split_description, splits, [0] * len(files) if is_text else self._source.sizes()
        # Features, and the encoding of their values as ids.
        self.schema = self._source.schema
        ids = make_numberings(self.schema)
        self._vocabulary = vocabulary_digest(self.schema)
        lists, kinds = self._source.multi_hot, self._source.kinds
        self.features = tuple(
            Feature(name, ids[name].num_embeddings, name in lists, self.schema.dynamic, kinds.get(name, ""))
            for name in self.schema.sparse
        )
        self.encode = partial(encode, schema=self.schema, features=self.features, numberings=ids, labelled=labelled)
        # Parts of the files that each split reads.
        self._parts = parts_of_files(by_split) if self._kind == "files" else self._split_rows()
        self._parts = {split: parts for split, parts in self._parts.items() if parts}
        for split, parts in {} if is_text else self._parts.items():
            if not any(map(self._source.estimated_rows, parts)):
                raise ValueError(f"{self.name}: the files of the {split} split have no rows")

    def _held_out_bounds(self) -> dict[Split, Any]:
        rule = self.options.split
        if self._kind == "time":
            return {"validation": rule.validation_from, "test": rule.test_from}
        return {"validation": rule.validation_share, "test": rule.test_share}

    def _split_rows(self) -> dict[Split, tuple[Part, ...]]:
        rule, held_out = self.options.split, self._held_out_bounds()
        whole_files = tuple(Part(file) for file in range(len(self._files)))
        if self._kind != "end" or not any(held_out.values()):
            return {split: whole_files for split in SPLITS if split == "train" or held_out[split]}
        if any(file.codec for file in self._files):
            _log.warning("%s: decompressing it once to find its size, because its last rows are held out", self.name)
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
        """Digest of the schema and of the vocabulary file if any; see `tritonemb.data.protocol.Data.encoding`."""
        return encoding_digest(self.schema, self.features, self._vocabulary)

    @cached_property
    def contents(self) -> dict[str, str]:
        """Contents by name, checked on resume: the split rule, and per file its number of rows if known, and
        `LogFile.digest`."""
        rule, splits, rows = self._origin
        contents = {"split": rule}
        for split, file, num_rows in zip(splits, self._files, rows, strict=True):
            name = file.name if split == "train" else f"{file.name} ({split})"
            contents[name] = contents.get(name, "") + (f"{num_rows:,} rows, " if num_rows else "") + file.digest()
        return contents

    def number_by_line(self) -> None:
        """Number rows by line, headers and blank lines included, as older versions did for a random split."""
        if self._source.row_unit is not None:
            self._source.row_unit, self.contents = 0, {}  # no contents: the next resume counts by line, too

    def splits(self) -> tuple[Split, ...]:
        """Return the splits of the log."""
        return tuple(split for split in SPLITS if split in self._parts)

    def num_rows(self, split: Split) -> int | None:
        """Return the number of rows of a split. It is known for Parquet if the split is by "end" or "files" and bad
        rows raise; otherwise it is None until the split has been read to its end."""
        parts = self._split_parts(split)
        exact = isinstance(self._source, ArrowSource) and self._kind in ("end", "files")
        if exact and self.options.on_bad_row == "raise":
            return round(sum(self._source.estimated_rows(part) for part in parts))
        return self._known_rows.get(split)

    def estimated_rows(self, split: Split) -> int | None:
        """Return the number of rows, or estimate it from the sizes of the files and their first lines."""
        known = self.num_rows(split)
        if known is not None or self._kind == "time":
            return known
        rows = sum(self._source.estimated_rows(part) for part in self._split_parts(split))
        if self._kind == "random":
            held_out = self._held_out_bounds()
            rows *= held_out[split] if split != "train" else 1 - sum(held_out.values())
        return round(rows)

    def open(self, split: Split, batch_size: int, **kwargs: Any) -> Stream:
        """Open a split; see `tritonemb.data.protocol.Data.open`. Rows are shuffled within buffers of `shuffle_rows`,
        rounded up to whole batches.

        A shard is a range of bytes of plain text, or of row groups of Parquet. Compressed files are assigned to shards
        as a whole if there are enough; else every shard decompresses all of them and parses every count-th stripe.
        """
        open_options = OpenOptions(split, batch_size, **kwargs)
        position, shard = open_options.position, open_options.shard
        shuffle = open_options.shuffle and self.options.shuffle_rows > 0
        buffer_rows = -(-(self.options.shuffle_rows if shuffle else UNSHUFFLED_ROWS) // batch_size) * batch_size
        shard_seeds = shard if shard != WHOLE else ()
        seeds = (open_options.seed, open_options.epoch, *shard_seeds)
        # Check that the position is of a stream with the same settings, or begin at the first row.
        settings = (batch_size, buffer_rows, *(seeds if shuffle else shard_seeds))
        stream_id = protocol.fingerprint(self._identity, self.options.split, split, *settings)
        log = self._shard(split, shard)
        parts = log._parts[split]
        if position is None:
            position = dict.fromkeys(FIELDS, 0) | {"of": stream_id, "offset": parts[0].start if parts else 0}
        else:
            protocol.check_position(position, FIELDS, stream_id, self.name)
            self._check_position(position, parts, split, buffer_rows // batch_size)
        skipped = self._skipped_reports.get(split, ReadReport()) if shard[0] == 0 else ReadReport()
        report_before = replace(skipped, rows=position["rows"], skipped=skipped.skipped + position["skipped"])
        # Cut shuffle buffers into batches.
        batches = iterate_batches(
            self.name, open_options, partial(log.scan, split, log.encode), tuple(f.name for f in self.features),
            buffer_rows, lambda num_rows, buffer: permutation(num_rows, *seeds, buffer) if shuffle else None, position,
            report_before,
        )  # fmt: skip

        def at_end(report: ReadReport) -> None:
            if shard == WHOLE:
                self._known_rows[split] = report.rows

        return Stream(batches, dict(position), report_before, at_end)

    def _check_position(self, position: Position, parts: tuple[Part, ...], split: Split, num_batches: int) -> None:
        part = position["part"]
        if part >= max(len(parts), 1) or position["offset"] < (parts[part].start if parts else 0):
            raise ValueError(f"data set {self.name!r}: the position is in a file that is not in the {split} split")
        if position["batch"] >= num_batches:
            raise ValueError(f"data set {self.name!r}: the position is in batch {position['batch']} of a buffer")
        if self.options.on_bad_row == "raise" and position["skipped"]:
            raise ValueError(
                f"data set {self.name!r}: {position['skipped']} bad rows were skipped before this position, so it "
                'cannot resume with on_bad_row="raise"; use on_bad_row="skip", or start the epoch again'
            )

    def scan(
        self, split: Split, job: Callable[[Any], Any], start: LogPosition | None = None
    ) -> Generator[Chunk, None, None]:
        """Map `job` over a split's valid rows, a `pyarrow.RecordBatch` per chunk, in the parser threads; yield chunks
        in order. Close it to stop the threads. Raise ValueError for a bad row unless bad rows are skipped."""
        parts = self._split_parts(split)
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
        """Return the log with a single split of all rows, or of the rows of the files with these indices, in order."""
        parts = tuple(map(Part, range(len(self.files)) if files is None else files))
        return self._with("end", {split: parts}, options=replace(self.options, split=ALL_ROWS))

    def with_parquet_files(self, files: Mapping[Split, LogFile | None], skipped: dict[Split, ReadReport]) -> Self:
        """Return the log read from Parquet files of its splits' valid rows; `skipped` reports the bad rows."""
        file_by_split = {split: (file,) for split, file in files.items() if file is not None}
        parts = parts_of_files(file_by_split)
        parquet_files = tuple(file for split in SPLITS for file in file_by_split.get(split, ()))
        source = ArrowSource(parquet_files, replace(self.options, schema=self.schema, split=ALL_ROWS), True, ())
        return self._with(
            "files", {split: parts[split] for split in files}, _source=source, _skipped_reports=skipped,
            files=tuple(file.path for file in parquet_files), options=replace(self.options, on_bad_row="raise"),
            _identity=(*self._identity, "parquet"),
        )  # fmt: skip

    def read_as(self, kinds: Mapping[str, str], encoding: str = "") -> Self:
        """Return the log as read in training: ids of these kinds by feature, with strings parsed as integers if
        necessary; and with logarithms of numbers, an older default, if `encoding` is the digest of such a log."""
        log = copy.copy(self)
        if self.schema.log_transform is None and encoding not in ("", self.encoding):
            log.schema = replace(self.schema, log_transform=True, clamp_negative=True)
            log.schema = log.schema if log.encoding == encoding else self.schema
        log.features = tuple(replace(f, kind=kinds.get(f.name) or f.kind) for f in self.features)
        log.encode = partial(self.encode, features=log.features, schema=log.schema)
        return log

    def text_schema(self) -> Any:
        """Return the `pyarrow.Schema` of a text log's columns; None for other formats."""
        return self._source.parser.arrow_schema() if isinstance(self._source, TextSource) else None

    def rows_digest(self) -> str:
        """Hash what determines the rows of a text log: its files, parsing options and splits."""
        options = (self.options.split, self.options.on_bad_row, self.options.delimiter, self.options.quoted_newlines)
        columns = [(field.name, str(field.type)) for field in self.text_schema()]
        columns += [("", self.options.list_separator)] * bool(self.options.list_separator)
        paths = [file.path if isinstance(file.path, str) else str(file.path.resolve()) for file in self._files]
        files = [(path, file.size, file.modified) for path, file in zip(paths, self._files, strict=True)]
        return protocol.digest(files, options, columns, *["by row"] * bool(self._source.row_unit))

    def _with(self, kind: Kind, parts: dict[Split, tuple[Part, ...]], **attributes: Any) -> Self:
        log = copy.copy(self)
        vars(log).update(attributes, _kind=kind, _parts=parts, _known_rows={})
        return log

    def _shard(self, split: Split, shard: Shard) -> Self:
        parts = self._split_parts(split)
        if shard == WHOLE:
            return self
        if self._kind == "time" and isinstance(self._source, ArrowSource):
            parts = self._source.within(split)
        return self._with(self._kind, {split: self._source.shard(parts, shard)})

    def _read(self, split: Split, chunk: Chunk) -> tuple[Any, ReadReport]:
        parsed, part = self._source.parse(chunk), self._parts[split][chunk.part]
        row_numbers = parsed.lines if self._source.row_unit == 0 else np.arange(len(parsed.lines))
        # Count and describe the bad rows of the split, or raise at the first.
        counts: Counter[str] = Counter()
        problems: list[str] = []
        for bad_index in np.flatnonzero(self._split_mask(split, chunk, row_numbers[parsed.bad_rows])).tolist():
            reason, message = parsed.describe(bad_index)
            counts[f"{self.files[part.file]}: {reason}"] += 1
            if len(problems) < protocol.MAX_PROBLEMS:
                line = int(parsed.lines[parsed.bad_rows[bad_index]])
                problems.append(f"{self._source.location(part, chunk, line)}: {message}")
            if self.options.on_bad_row == "raise":
                raise ValueError(problems[0])
        # Keep the valid rows of the split.
        split_mask = self._split_mask(split, chunk, row_numbers[parsed.rows], parsed.batch)
        batch = parsed.batch if split_mask.all() else parsed.batch.filter(pa.array(split_mask))
        return batch, ReadReport(batch.num_rows, counts.total(), tuple(problems), tuple(sorted(counts.items())))

    def _split_mask(self, split: Split, chunk: Chunk, row_numbers: Array, batch: Any = None) -> Array:
        """Return a mask of the rows of a chunk that belong to a split; `batch` has these rows unless they are bad."""
        rule, part = self.options.split, self._parts[split][chunk.part]
        if self._kind == "random":
            return _random_mask(rule, split, part.file, chunk.first_row + row_numbers)
        if self._kind == "time":
            if batch is None and isinstance(self._source, TextSource):  # bad lines have no time
                return np.full(len(row_numbers), split == "train")
            batch = chunk.rows.take(pa.array(row_numbers)) if batch is None else batch
            times = batch.column(rule.time_column)
            return time_mask(rule, split, times, times.type).to_numpy(zero_copy_only=False)
        return np.ones(len(row_numbers), dtype=bool)

    def _split_parts(self, split: Split) -> tuple[Part, ...]:
        if split not in self._parts:
            raise ValueError(f"data set {self.name!r} has no {split!r} rows, only {', '.join(self.splits())}")
        return self._parts[split]


def vocabulary_digest(schema: Schema) -> str | None:
    """Hash the vocabulary file of a schema (SHA-256, hex); None if there is none."""
    return None if schema.vocabulary is None else hashlib.sha256(Path(schema.vocabulary).read_bytes()).hexdigest()


def encoding_digest(schema: Schema, features: tuple[Feature, ...], vocabulary: str | None) -> str:
    """Hash the encoding of a log, see `tritonemb.data.protocol.Data.encoding`; `vocabulary`: digest of its file."""
    dense = tuple((name, schema.is_logarithmic(name)) for name in schema.dense)
    return protocol.digest("dynamic log" if schema.dynamic else "log", schema.label, dense, features, vocabulary)


def _random_mask(rule: SplitRule, split: Split, file: int, rows: Array) -> Array:
    """Return a mask of the rows (numbers in the file, from 0) that belong to a random split: row numbers are hashed to
    `[0, 1)`; the largest hashes are test rows, the next largest validation rows."""
    row_number = rows.astype(np.uint64) + (np.uint64(file) << np.uint64(44))
    fraction = (mix(row_number ^ np.uint64(0x53504C4954)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    is_test = fraction >= 1 - rule.test_share
    is_held_out = fraction >= 1 - rule.test_share - rule.validation_share
    return {"train": ~is_held_out, "validation": is_held_out & ~is_test, "test": is_test}[split]


def _log_name(source: str | Path | Sequence[str | Path], files: Sequence[LogFile]) -> str:
    if not isinstance(source, str | Path):
        return str(files[0].path).split("/")[-2] if isinstance(files[0].path, str) else files[0].path.parent.name
    return Path(str(source).partition("?")[0]).name if is_remote(source) else Path(source).resolve().name
