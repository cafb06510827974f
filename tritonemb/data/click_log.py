"""Click logs larger than memory: read chunk by chunk, parsed by threads, shuffled buffer by buffer."""

import copy
import hashlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from tritonemb.data import files as cuts
from tritonemb.data import protocol
from tritonemb.data.encode import encode, make_numberings
from tritonemb.data.files import Chunk, Format, LogFile, Part, find_files, is_remote
from tritonemb.data.kafka import SCHEME, KafkaStream
from tritonemb.data.parquet import ArrowSource
from tritonemb.data.pipeline import FIELDS, LogReader, LogSource
from tritonemb.data.protocol import SPLITS, WHOLE, Feature, OpenOptions, ReadReport, Shard, Split, Stream
from tritonemb.data.schema import ALL_ROWS, Kind, LogOptions, Names, Schema
from tritonemb.data.streams import FolderStream, RowStream, StreamSource
from tritonemb.data.text import TextSource
from tritonemb.data.transforms import Transforms
from tritonemb.flight import SCHEMES

_log = logging.getLogger(__name__)

UNSHUFFLED_ROWS = 16_384  # rows per buffer where the order is kept
SOURCES: dict[Format, Callable[..., LogSource]] = {"text": TextSource, "parquet": ArrowSource, "table": ArrowSource}
SOURCES["stream"] = StreamSource


class ClickLog(protocol.TablesMixin):
    """Click log in one file, several, or a folder: Criteo's TSV or CSV (plain, .gz or .zst), or Parquet.

    Memory holds `2 * parser_threads + 6` chunks of `chunk_bytes` or their parsed rows, about
    `8 * parser_threads * chunk_bytes` while they are parsed, and twice `shuffle_rows` rows. Raise FileNotFoundError or
    ValueError, before training starts, if a file is missing, empty, unreadable or of the wrong kind, its first line is
    bad, a column is missing, or the split leaves no train rows.

    Args:
        source: a file, several in their order, or a folder with data files, in natural order of their names; remote
            ones by URI, `s3://bucket/logs`. Or data frames as files, by split; see `from_dataframe`. Or a stream.
        options: options for reading the log.
        name: name in messages; by default that of the file or folder.
        labelled: whether rows have labels. If not, labels are 0, and their columns and the weight are not read.
        extra_columns: columns that `scan` reads in addition to those of the schema.
        features: of a trained model, which say whether columns without any value have lists.

    Attributes:
        encode: function that encodes a `pyarrow.RecordBatch` of the log as `Rows`.
        is_stream, is_endless: whether the train rows are those of a stream, and of one without an end.
        labels, has_weights: names of several labels, and whether rows have weights.
    """

    def __init__(
        self, source: str | Path | Sequence[str | Path | LogFile] | Mapping[Split, LogFile] | RowStream,
        options: LogOptions | None = None, *, name: str | None = None, labelled: bool = True,
        extra_columns: tuple[str, ...] = (), features: Sequence[Feature] = (),
    ) -> None:  # fmt: skip
        if not isinstance(options, LogOptions | None):
            raise TypeError(f"options must be LogOptions(schema=...), got a {type(options).__name__}")
        options = options or LogOptions()
        self.best_auc: float | None = None
        self._known_rows: dict[Split, int] = {}
        self._skipped_reports: dict[Split, ReadReport] = {}
        # Files of the splits, or of all of them.
        rule, by_split = options.split, dict[Split, tuple[LogFile, ...]]()
        if isinstance(source, Mapping):
            by_split, self.name = {split: (file,) for split, file in source.items()}, name or "data frame"
            kind = rule.kind()
            kind = "files" if len(source) > 1 and rule.split_by == "auto" and kind == "end" else kind
            if (len(source) > 1) != (kind == "files"):
                text = f"give held-out data frames, or another split rule than {rule.split_by!r}, not both"
                raise ValueError(f"{self.name}: {text}")
        else:
            paths: Any = source
            paths = KafkaStream(paths, options) if str(paths).startswith(SCHEME) else paths
            stream = paths if hasattr(paths, "read") else FolderStream(paths) if options.follow else None
            log_files = find_files(paths) if stream is None else (LogFile(stream.path, "stream", table=stream),)
            self.name = name or _log_name(paths if stream is None else stream.path, log_files)
            kind = rule.kind([file.stem for file in log_files])
            if stream is not None and rule.split_by != "auto" and any(rule.held_out(kind).values()):
                raise ValueError(f"{self.name}: a stream, which has no end, cannot be split by {kind}; set test_files")
            kind = kind if stream is None else "files"
            by_split = cuts.split_files(rule, log_files) if kind == "files" else {"train": log_files}
        suffixed = [(file, f" ({split})" * (split != "train")) for split in SPLITS for file in by_split.get(split, ())]
        self._files, names = tuple(file for file, _ in suffixed), [file.name + suffix for file, suffix in suffixed]
        self.is_stream = self._files[0].format == "stream"
        self.is_endless = isinstance(self._files[0].table, KafkaStream)
        # Source of the columns, and the identity of the contents.
        extra_columns = (*extra_columns, *filter(None, [rule.time_column]))
        source_class, transforms = SOURCES[self._files[0].format], Transforms(options.transforms)
        log_source = transforms.open(source_class, self._files, options, labelled, extra_columns)
        self._identity: tuple[Any, ...] = tuple((file.name, file.size) for file in self._files)
        sizes = log_source.sizes() if log_source.counts_rows else [0] * len(names)
        self._origin = " ".join([kind, *map(str, rule.held_out(kind).values())]), names, sizes
        # Features, and the encoding of their values as ids.
        if not transforms.schema.sparse:  # the labels of a data set of another kind
            raise ValueError(f"{self.name}: no sparse columns are named; a click model needs at least one")
        self.schema, ids = transforms.schema, make_numberings(transforms.schema)
        self._vocabulary = vocabulary_digest(self.schema)
        self.labels, self.has_weights = self.schema.labels, bool(self.schema.weight)
        kinds, tables = transforms.kinds, self.schema.shared_tables()
        lists = *transforms.multi_hot, *(f.name for f in features if f.multi_hot and not kinds.get(f.name))
        transforms.freeze(lists)
        if scalars := [name for name in self.schema.lengths_by_name() if name not in lists]:
            text = "is not a list of values: set list_separator for a CSV file, or store a list column"
            raise ValueError(f"{self.name}: max_lengths names {scalars[0]!r}, which {text}")
        for feature, table in tables.items():
            if kinds.get(feature) != kinds.get(table):
                text = f"{feature!r} has {kinds.get(feature)}, {table!r} has {kinds.get(table)}"
                raise ValueError(f"{self.name}: {text}; features that share ids need values of one kind")
        self.features = tuple(
            Feature(n, ids[n].num_embeddings, n in lists, self.schema.dynamic, kinds.get(n, ""), tables.get(n, ""))
            for n in ids
        )
        self.encode = partial(encode, schema=self.schema, features=self.features, numberings=ids, labelled=labelled)
        # Parts of the files that each split reads.
        parts = cuts.parts_of_files(by_split) if kind == "files" else _split_parts(self.name, options, kind, log_source)
        parts = {split: split_parts for split, split_parts in parts.items() if split_parts}
        self._reader = LogReader(self.name, log_source, options, kind, parts, transforms)
        for split in parts if log_source.counts_rows else ():
            if not any(map(log_source.estimated_rows, parts[split])):
                raise ValueError(f"{self.name}: the files of the {split} split have no rows")

    @property
    def options(self) -> LogOptions:
        return self._reader.options

    @property
    def files(self) -> tuple[Path | str, ...]:
        """Paths or URIs of the files that are read."""
        return tuple(file.path for file in self._reader.source.files)

    @property
    def num_dense(self) -> int:
        return len(self.schema.dense)

    @property
    def encoding(self) -> str:
        """Digest of schema, vocabulary file and names of transforms; see `tritonemb.data.protocol.Data.encoding`."""
        return encoding_digest(self.schema, self.features, self._vocabulary, self.options.transforms)

    @cached_property
    def contents(self) -> dict[str, str]:
        """Contents by name, checked on resume: the split rule, and per file its rows if known, and `LogFile.digest`."""
        rule, names, rows = self._origin
        contents = {"split": rule}
        for name, file, num_rows in zip(names, self._files, rows, strict=True):
            contents[name] = contents.get(name, "") + (f"{num_rows:,} rows, " if num_rows else "") + file.digest()
        return contents

    def number_by_line(self) -> None:
        """Number rows by line, headers and blank lines included, as older versions did for a random split."""
        if self._reader.source.row_unit is not None:
            self._reader.source.row_unit, self.contents = 0, {}  # no contents: the next resume counts by line, too

    def splits(self) -> tuple[Split, ...]:
        return tuple(split for split in SPLITS if split in self._reader.parts)

    def num_rows(self, split: Split) -> int | None:
        """Return the number of rows of a split. It is known for Parquet if the split is by "end" or "files" and bad
        rows raise; otherwise it is None until the split has been read to its end."""
        known = self._reader.num_rows(split)
        return self._known_rows.get(split) if known is None else known

    def shard_rows(self, split: Split, count: int) -> list[int] | None:
        """Return the number of rows of each shard of a split; None if it is unknown before they are read."""
        if self._reader.num_rows(split) is None:
            return None
        return [self._reader.shard(split, (index, count)).num_rows(split) or 0 for index in range(count)]

    def check_rows(self, split: Split) -> None:
        """Raise ValueError if a split has no valid rows; it is read up to the first one. A stream has some later."""
        if (self.is_stream and split == "train") or self._reader.has_rows(split):
            return
        rule, reason = self.options.split, ""
        if rule.time_column is not None:
            times = {"train": f"before {rule.validation_from or rule.test_from}", "test": f"{rule.test_from} or later"}
            end = f", before {rule.test_from}" * bool(rule.test_from)
            times["validation"] = f"{rule.validation_from} or later{end}"
            reason = f": no {rule.time_column!r} is {times[split]}"
        raise ValueError(f"data set {self.name!r}: there are no {split} rows{reason}")

    def estimated_rows(self, split: Split) -> int | None:
        """Return the number of rows, or estimate it from the sizes of the files and their first lines."""
        known = self.num_rows(split)
        is_known = known is not None or (self.is_stream and split == "train")
        return known if is_known else self._reader.estimated_rows(split)

    def sizes_on_peers(self, split: Split, shard: Shard) -> dict[str, float]:
        """Return the rows, or bytes of text, of a shard in files that only other reader hosts have, by name. No file is
        read, as these hosts may not answer."""
        sizes, source = dict[str, float](), self._reader.source
        for part in self._reader.shard(split, shard).parts[split]:
            if str((file := source.files[part.file]).path).startswith(SCHEMES):
                size = source.estimated_rows(part) if source.counts_rows else (part.stop or file.size) - part.start
                sizes[file.name] = sizes.get(file.name, 0) + max(size, 0)
        return sizes

    def open(self, split: Split, batch_size: int, **kwargs: Any) -> Stream:
        """Open a split; see `tritonemb.data.protocol.Data.open`. Shuffle buffers are `shuffle_rows`, in whole batches.

        A shard is a range of bytes of plain text, or of row groups of Parquet. Compressed files are assigned to shards
        as a whole if there are enough; else every shard decompresses all of them and parses every count-th stripe.
        """
        open_options = OpenOptions(split, batch_size, **kwargs)
        position, shard = open_options.position, open_options.shard
        grows = self.is_stream and split == "train"  # rows are returned in their order, batch by batch
        shuffle = open_options.shuffle and self.options.shuffle_rows > 0 and not grows
        buffer_rows = self.options.shuffle_rows if shuffle else 1 if grows else UNSHUFFLED_ROWS
        buffer_rows = -(-buffer_rows // batch_size) * batch_size
        shard_seeds = shard if shard != WHOLE else ()
        seeds = (open_options.seed, open_options.epoch, *shard_seeds)
        # Check that the position is of a stream with the same settings, or begin at the first row.
        settings = (batch_size, buffer_rows, *(seeds if shuffle else shard_seeds))
        stream_id = protocol.fingerprint(self._identity, self.options.split, split, *settings)
        reader = self._reader.shard(split, shard)
        parts = reader.parts[split]
        if position is None:
            position = dict.fromkeys(FIELDS, 0) | {"of": stream_id, "offset": parts[0].start if parts else 0}
        else:
            protocol.check_position(position, FIELDS, stream_id, self.name)
            reader.check_position(position, split, buffer_rows // batch_size)
        skipped = self._skipped_reports.get(split, ReadReport()) if shard[0] == 0 else ReadReport()
        report_before = replace(skipped, rows=position["rows"], skipped=skipped.skipped + position["skipped"])
        keys = tuple(feature.name for feature in self.features)
        order_seeds, stopped = seeds if shuffle else None, threading.Event()
        open_options = replace(open_options, position=position)
        batches = reader.batches(open_options, self.encode, keys, buffer_rows, order_seeds, report_before, stopped)

        def at_end(report: ReadReport) -> None:
            if shard == WHOLE:
                self._known_rows[split] = report.rows

        return Stream(batches, dict(position), report_before, at_end, stopped.set)

    def scan(self, split: Split, job: Callable[[Any], Any]) -> Generator[Chunk, None, None]:
        """Map `job` over a split's valid rows, a `pyarrow.RecordBatch` per chunk, in the parser threads; yield chunks
        in order. Close it to stop the threads. Raise ValueError for a bad row unless bad rows are skipped."""
        return self._reader.scan(split, job)

    def all_rows_as(self, split: Split, files: Iterable[int] | None = None) -> Self:
        """Return the log with a single split of all rows, or of the rows of the files with these indices, in order."""
        parts = tuple(map(Part, range(len(self.files)) if files is None else files))
        return self._with(kind="end", parts={split: parts}, options=replace(self.options, split=ALL_ROWS))

    def with_parquet_files(self, files: Mapping[Split, LogFile | None], skipped: dict[Split, ReadReport]) -> Self:
        """Return the log read from Parquet files of its splits' valid rows; `skipped` reports the bad rows."""
        file_by_split = {split: (file,) for split, file in files.items() if file is not None}
        parts = cuts.parts_of_files(file_by_split)
        parquet_files = tuple(file for split in SPLITS for file in file_by_split.get(split, ()))
        options = replace(self.options, on_bad_row="raise")
        source = ArrowSource(parquet_files, replace(options, schema=self.schema, split=ALL_ROWS), True, ())
        log = self._with(kind="files", parts={split: parts[split] for split in files}, source=source, options=options)
        log._identity, log._skipped_reports = (*self._identity, "parquet"), skipped
        return log

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
        """Return the `pyarrow.Schema` of a text log's columns; None for other formats, or with transforms."""
        return None if self.options.transforms else self._reader.source.text_schema()

    def rows_digest(self) -> str:
        """Hash what determines the rows of a text log: its files, parsing options, columns and splits."""
        options = (self.options.split, self.options.on_bad_row, self.options.delimiter, self.options.quoted_newlines)
        columns = [(field.name, str(field.type)) for field in self.text_schema()]
        columns += [("", self.options.list_separator)] * bool(self.options.list_separator)
        # Roles of the columns decide which rows are bad.
        schema = self.schema
        dense = [(name, schema.is_logarithmic(name), schema.clamps(name)) for name in schema.dense]
        paths = [file.path if isinstance(file.path, str) else str(file.path.resolve()) for file in self._files]
        files = [(path, file.size, file.modified) for path, file in zip(paths, self._files, strict=True)]
        roles = schema.label_columns, schema.weight, dense
        return protocol.digest(files, options, columns, roles, *["by row"] * bool(self._reader.source.row_unit))

    def _with(self, **changes: Any) -> Self:
        log = copy.copy(self)
        log._reader, log._known_rows = replace(self._reader, **changes), {}
        return log


def _split_parts(name: str, options: LogOptions, kind: Kind, source: LogSource) -> dict[Split, tuple[Part, ...]]:
    rule, held_out = options.split, options.split.held_out(kind)
    if kind != "end" or not any(held_out.values()):
        whole_files = tuple(map(Part, range(len(source.files))))
        return {split: whole_files for split in SPLITS if split == "train" or held_out[split]}
    if any(file.codec for file in source.files):
        _log.warning("%s: decompressing it once to find its size, because its last rows are held out", name)
    parts = cuts.end_parts(rule, source.sizes())
    for split, share in {"train": 1.0, **held_out}.items():
        if share and not parts[split]:
            raise ValueError(f"{name}: too few rows for a share of {share:.3f} as {split} rows")
    return parts


def vocabulary_digest(schema: Schema) -> str | None:
    """Hash the vocabulary file of a schema (SHA-256, hex); None if there is none."""
    return None if schema.vocabulary is None else hashlib.sha256(Path(schema.vocabulary).read_bytes()).hexdigest()


def encoding_digest(schema: Schema, features: tuple[Feature, ...], vocabulary: str | None, transforms: Names) -> str:
    """Hash the encoding of a log, see `tritonemb.data.protocol.Data.encoding`; `vocabulary`: digest of its file."""
    dense = tuple((name, schema.is_logarithmic(name)) for name in schema.dense)
    kind = "dynamic log" if schema.dynamic else "log"
    sequences = [pairs for pairs in (schema.shared_tables(), schema.lengths_by_name()) if pairs]
    return protocol.digest(kind, schema.labels or schema.label, dense, features, vocabulary, *transforms, *sequences)


def _log_name(source: str | Path | Sequence[str | Path], files: Sequence[LogFile]) -> str:
    if not isinstance(source, str | Path):
        return str(files[0].path).split("/")[-2] if isinstance(files[0].path, str) else files[0].path.parent.name
    return Path(str(source).partition("?")[0]).name if is_remote(source) else Path(source).resolve().name
