"""Options of a log: roles of its columns, rows held out, parsing."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from tritonemb.utils import Options, did_you_mean, join_names, number, pairs_by_name

Names = tuple[str, ...]
Kind = Literal["end", "random", "files", "time"]

MAX_EMBEDDINGS = 1 << 31
MAX_CHARACTERS = 40
MAX_CHUNK_BYTES = 1 << 28

LABEL = "label"
INTEGERS = tuple(f"int_{i}" for i in range(1, 14))
CATEGORIES = tuple(f"cat_{i}" for i in range(1, 27))
FIELDS = (LABEL, *INTEGERS, *CATEGORIES)

_DAY = re.compile(r"day_[0-9]+")


@dataclass(frozen=True)
class Schema:
    """Roles of a log's columns; by default those of Criteo's log.

    Args:
        label: name of the column of labels, 0 or 1.
        labels: names of several columns of labels, instead of `label`: 0, 1, or missing, in which case the row is left
            out of this label's loss and metrics; a row needs at least one.
        weight: name of the column of row weights, of 0 or more, in loss and metrics; 1 if not given.
        share: categories with the ids and the table of another one, as "history=item".
        max_lengths: values of a list to keep, the last ones, as "history=50"; lists are in time order.
        dense: names of the columns of numbers.
        sparse: names of the columns of categories: integers, strings, or lists of them (multi-hot).
        log_transform: whether numbers x become log(1 + x), or the names of the columns where they do; negative numbers
            are errors there. By default only Criteo's integers, whose negative numbers become 0.
        num_embeddings: ids per category, 0 for missing values included; values are hashed to the others.
        sizes: ids of single categories, as "name=number".
        vocabulary: file of `tritonemb vocab`, which numbers the categories instead of hashing.
        dynamic: use 64-bit ids, for dynamic tables with `num_embeddings` and `sizes` as capacities: integers are their
            own ids, strings have their hashes, and missing values -2^63.
        integers: categories of CSV files that are integers, which are hashed differently; other formats have types.
        lists: categories of CSV files that are lists if there is a list separator; by default all.
        clamp_negative: whether negative numbers become 0 under log_transform instead of being errors.
    """

    label: str = ""
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    log_transform: bool | tuple[str, ...] | None = None
    num_embeddings: int = 100_000
    sizes: tuple[str, ...] = ()
    vocabulary: Path | None = None
    dynamic: bool = False
    integers: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    clamp_negative: bool = False
    labels: tuple[str, ...] = ()
    weight: str = ""
    share: tuple[str, ...] = ()
    max_lengths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.label and self.labels:
            raise ValueError("set only one of label and labels")
        if len(self.labels) == 1 and self.sparse:  # a log; Adult keeps its labels
            vars(self).update(label=self.labels[0], labels=())
        if isinstance(self.log_transform, tuple) and not {*self.log_transform} & {*self.dense}:
            words = " ".join(self.log_transform).lower()  # as a shell passes it
            vars(self)["log_transform"] = {"true": True, "false": False}.get(words, self.log_transform)
        named = self.columns()
        if duplicates := sorted({name for name in named if named.count(name) > 1}):
            raise ValueError(f"{join_names(duplicates)} named more than once among label, weight, dense and sparse")
        if (self.dense or self.sparse) and not self.label_columns:
            raise ValueError("dense or sparse columns are named, but no label column")
        if self.label and not self.sparse:
            raise ValueError("no sparse columns are named; a click model needs at least one")
        for option, role in {"log_transform": "dense", "integers": "sparse", "lists": "sparse"}.items():
            names = value if isinstance(value := getattr(self, option), tuple) else ()
            columns = getattr(self, role)
            if unknown := [name for name in names if columns and name not in columns]:
                raise ValueError(f"{option} names {join_names(unknown)}, not among {role}: {join_names(columns)}")
        if self.dynamic and self.vocabulary is not None:
            raise ValueError("dynamic tables use no vocabulary; set only one of dynamic and vocabulary")
        _check_size("num_embeddings", self.num_embeddings)
        self.sizes_by_name()
        self.shared_tables()
        self.lengths_by_name()

    def sizes_by_name(self) -> dict[str, int]:
        """Parse `sizes`: number of ids by column."""
        sizes = {name: int(size) for name, size in self._pairs("sizes").items()}
        for name, size in sizes.items():
            _check_size(f"the size of {name!r}", size)
        return sizes

    def shared_tables(self) -> dict[str, str]:
        """Parse `share`: the column whose ids and table a column has, for all that have those of another one."""
        tables = self._pairs("share", "column", ".+")
        for name, table in tables.items():
            if self.sparse and table not in self.sparse:
                near = did_you_mean(table, self.sparse)
                raise ValueError(f"share has {table!r}, not among sparse: {join_names(self.sparse)}{near}")
            if table in tables:
                raise ValueError(f"share has {name}={table}, but {table!r} has a table of another column itself")
            if name in self.sizes_by_name():
                raise ValueError(f"share has {name}={table}, but sizes has {name!r}, too")
        return tables

    def lengths_by_name(self) -> dict[str, int]:
        """Parse `max_lengths`: values to keep by column."""
        return {name: int(length) for name, length in self._pairs("max_lengths", pattern="[1-9][0-9]*").items()}

    def _pairs(self, option: str, expected: str = "number", pattern: str = "[0-9]+") -> dict[str, str]:
        pairs = pairs_by_name(option, getattr(self, option), expected, pattern)
        if unknown := [name for name in pairs if self.sparse and name not in self.sparse]:
            entry = f"{unknown[0]}={pairs[unknown[0]]}"
            raise ValueError(f"{option} has {entry!r}, but sparse has no {unknown[0]!r}: {join_names(self.sparse)}")
        return pairs

    def is_logarithmic(self, name: str) -> bool:
        """Return whether numbers x of a column become log(1 + x)."""
        if isinstance(self.log_transform, tuple):
            return name in self.log_transform
        return self._is_criteo(name) if self.log_transform is None else self.log_transform

    def clamps(self, name: str) -> bool:
        """Return whether negative numbers of a column become 0 before their logarithm is taken."""
        return self.clamp_negative or self._is_criteo(name)

    def _is_criteo(self, name: str) -> bool:
        return self.label_columns in ((), (LABEL,)) and name in INTEGERS

    @property
    def label_columns(self) -> Names:
        return self.labels or ((self.label,) if self.label else ())

    def columns(self, labelled: bool = True) -> Names:
        """Return the columns of labels and weight if `labelled`, the dense and the sparse columns."""
        return (*(*self.label_columns, *filter(None, [self.weight])) * labelled, *self.dense, *self.sparse)

    def of(self, columns: Sequence[str], location: str, labelled: bool = True, extra_columns: Names = ()) -> Self:
        """Return the schema with Criteo's columns filled in if it names none. Raise ValueError unless the data at
        `where` has every column of it (labels and weight only if `labelled`) and of `extra_columns` exactly once."""
        schema = self
        if not self.label_columns:
            if not set(FIELDS if labelled else FIELDS[1:]) <= set(columns):
                raise ValueError(
                    f"{location}: its columns are {join_names(columns)}; they are not Criteo's ({LABEL}, "
                    f"{INTEGERS[0]} to {INTEGERS[-1]}, {CATEGORIES[0]} to {CATEGORIES[-1]}), so a schema must name the "
                    "label, the dense and the sparse columns: --label click --dense price --sparse user item, or "
                    'Schema(label="click", dense=("price",), sparse=("user", "item"))'
                )
            schema = replace(self, label=LABEL, dense=INTEGERS, sparse=CATEGORIES)
        roles = {"label": schema.label_columns, "weight": tuple(filter(None, [schema.weight]))} if labelled else {}
        for role, names in {**roles, "dense": schema.dense, "sparse": schema.sparse}.items():
            check_columns(columns, names, location, f"the schema's {role} column")
        check_columns(columns, extra_columns, location)
        return schema


def _check_size(name: str, number: int) -> None:
    if not 2 <= number <= MAX_EMBEDDINGS:
        raise ValueError(f"{name} is {number}, expected 2 to {MAX_EMBEDDINGS}: id 0 is for missing values")


CRITEO = Schema(LABEL, INTEGERS, CATEGORIES)
"""Columns of Criteo's display-advertising log; see `tritonemb.data.delimited.CriteoFormat` for their values."""


@dataclass(frozen=True)
class SplitRule:
    """Rule that holds out validation and test rows; all other rows are train rows.

    Args:
        split_by: "end": the last rows, as logs are in order of time; "random": rows drawn by their number in the file;
            "files": whole files; "time": rows by a time column; "auto": "files" with the last file as test if the files
            are Criteo's days (day_0, day_1, ...) or test or validation files are named, "time" if a time column is,
            else "end".
        test_share: fraction of the rows, for "end" and "random"; the test rows come last.
        validation_share: fraction of the rows before the test rows.
        test_files: paths for "files", of files in the log or others.
        validation_files: paths for "files", of files in the log or others.
        time_column: for "time"; read as integers from CSV files if the times below are integers.
        test_from: first time of the test rows: a number, or a date and time as 2014-05-31 or 2014-05-31T12:00:00.
        validation_from: first time of the validation rows, which end where the test rows begin.
    """

    split_by: Literal["auto", "end", "random", "files", "time"] = "auto"
    test_share: float = 1 / 6
    validation_share: float = 0.0
    test_files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    time_column: str | None = None
    test_from: str | None = None
    validation_from: str | None = None

    def __post_init__(self) -> None:
        for name in ("test_share", "validation_share"):
            if not 0 <= (share := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be a share of the rows, from 0 to less than 1, got {share}")
        if self.test_share + self.validation_share >= 1:
            raise ValueError(f"shares of {self.test_share} and {self.validation_share} leave no train rows")
        by, times = self.kind(), self.test_from or self.validation_from
        if by != "files" and (self.test_files or self.validation_files):
            raise ValueError(f'test and validation files are for split_by="files", not for split_by={by!r}')
        if by != "time" and (self.time_column or times):
            raise ValueError(f'a time column and times are for split_by="time", not for split_by={by!r}')
        if by == "time" and not (self.time_column and times):
            raise ValueError('split_by="time" needs time_column and test_from, validation_from or both')

    def held_out(self, kind: Kind) -> dict[Any, Any]:
        """Return the share, or first time, of the validation and test rows of a split of a resolved kind."""
        if kind == "files":
            return {}
        suffix = "from" if kind == "time" else "share"
        return {split: getattr(self, f"{split}_{suffix}") for split in ("validation", "test")}

    def kind(self, stems: Sequence[str] = ()) -> Kind:
        """Resolve "auto" for files with these names."""
        if self.split_by != "auto":
            return self.split_by
        if self.test_files or self.validation_files:
            return "files"
        if self.time_column:
            return "time"
        return "files" if len(stems) > 1 and all(_DAY.fullmatch(stem) for stem in stems) else "end"


ALL_ROWS = SplitRule(split_by="end", test_share=0.0)


@dataclass(frozen=True)
class LogOptions(Options):
    """Options for reading a log: schema, split, shuffling and parsing.

    Args:
        schema: roles of the columns, and how categories become ids.
        split: rows held out.
        shuffle_rows: rows per in-memory shuffle buffer; 0 keeps the order of the files.
        on_bad_row: raise an error at a malformed row, or skip and count it.
        parser_threads: threads that parse chunks; one per processor, at most 8, if not given.
        chunk_bytes: bytes per chunk, which one thread parses at a time.
        delimiter: field delimiter of text files with a header; by default a comma for names that end with `.csv` (or
            `.csv.gz`, `.csv.zst`); other text files have Criteo's format.
        quoted_newlines: whether quoted fields may contain line ends; slower, as such files are split serially.
        list_separator: separator of the values of a list in a field of a CSV file; without it there are no lists.
        follow: read Parquet files of a folder as a stream, in name order, and wait for more; a file _SUCCESS ends it.
        transforms: functions on Arrow batches, MODULE:FUNCTION, called in this order before rows are encoded.
    """

    schema: Schema = field(default_factory=Schema)
    split: SplitRule = field(default_factory=SplitRule)
    shuffle_rows: int = number(262_144, least=0)
    on_bad_row: Literal["raise", "skip"] = "raise"
    parser_threads: int | None = number(None, least=1)
    chunk_bytes: int = 8 << 20
    delimiter: str = ""
    quoted_newlines: bool = False
    list_separator: str = ""
    follow: bool = False
    transforms: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update({n: "\t" for n in ("delimiter", "list_separator") if vars(self)[n] == r"\t"})  # from a shell
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be from 1 to {MAX_CHUNK_BYTES}, got {self.chunk_bytes}")
        if len(self.delimiter) > 1 or not self.delimiter.isascii() or self.delimiter in ("\n", "\r", '"'):
            raise ValueError(f"delimiter must be one ASCII character, got {self.delimiter!r}")
        if self.list_separator in {*'\n\r"', self.delimiter or ","} or (self.schema.lists and not self.list_separator):
            raise ValueError(f"lists need a list_separator other than the delimiter, got {self.list_separator!r}")


def check_columns(columns: Sequence[str], names: Iterable[str], location: str, role: str = "column") -> None:
    """Raise ValueError unless every name is that of exactly one column; `role` describes them."""
    for name in names:
        if (count := list(columns).count(name)) == 0:
            near = did_you_mean(name, columns)
            raise ValueError(f"{location}: {role} {name!r} is missing; columns: {join_names(columns)}{near}")
        if count > 1:
            raise ValueError(f"{location}: there are {count} columns {name!r}; rename all but one")


def invalid_value_message(field_number: int, name: str, value: object, expected: str, hint: str = "") -> str:
    """Format an error: `field 3 (int_2) is 'x', expected an integer or nothing`; `field_number` counts from 1."""
    return f"field {field_number} ({name}) is {quote_value(value)}, expected {expected}{hint}"


def quote_value(value: object) -> str:
    """Quote a value for a message: escaped, and truncated if long."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return repr(text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "...")
