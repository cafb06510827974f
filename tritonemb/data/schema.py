"""Which columns of a log are the label, the numbers and the categories; and what is wrong with a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

MAX_EMBEDDINGS = 1 << 31
SHOWN_CHARACTERS = 40
MAX_PROBLEMS = 10  # that a report shows in full

LABEL = "label"
INTEGERS = tuple(f"int_{i}" for i in range(1, 14))
CATEGORIES = tuple(f"cat_{i}" for i in range(1, 27))
FIELDS = (LABEL, *INTEGERS, *CATEGORIES)


@dataclass(frozen=True)
class Schema:
    """Which columns of a log are what. Left out altogether, they are Criteo's.

    Args:
        label: name of the column with 0 and 1.
        dense: names of the columns with numbers.
        sparse: names of the columns with categories: integers, strings, or lists of them (multi-hot, not in text).
        log_transform: whether numbers x become log(1 + max(x, 0)), or the names of those that do.
        num_embeddings: ids of each category, 0 for missing among them; values are hashed to the others.
        sizes: other numbers of ids for some of the categories, as "name=number".
        vocabulary: a file of `tritonemb vocab`, which numbers the categories in place of hashing.
        integers: those categories of CSV files that are integers and not strings, whose hashes are others. Other
            formats say so themselves.
    """

    label: str = ""
    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    log_transform: bool | tuple[str, ...] = True
    num_embeddings: int = 100_000
    sizes: tuple[str, ...] = ()
    vocabulary: Path | None = None
    integers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = [name for name in (self.label, *self.dense, *self.sparse) if name]
        if len(set(named)) != len(named):
            twice = sorted({name for name in named if named.count(name) > 1})
            raise ValueError(f"schema: {listed(twice)} named more than once among label, dense and sparse")
        if (self.dense or self.sparse) and not self.label:
            raise ValueError("schema: dense or sparse columns are named, but no label column")
        if self.label and not self.sparse:
            raise ValueError("schema: no sparse columns are named; a click model needs at least one")
        if not isinstance(self.log_transform, bool):
            unknown = [name for name in self.log_transform if self.dense and name not in self.dense]
            if unknown:
                raise ValueError(
                    f"schema: log_transform names {listed(unknown)}, not among dense: {listed(self.dense)}"
                )
        if unknown := [name for name in self.integers if self.sparse and name not in self.sparse]:
            raise ValueError(f"schema: integers names {listed(unknown)}, not among sparse: {listed(self.sparse)}")
        _check_size("num_embeddings", self.num_embeddings)
        self.sizes_by_name()

    def sizes_by_name(self) -> dict[str, int]:
        """The numbers of `sizes`, by column."""
        sizes = {}
        for entry in self.sizes:
            name, separator, number = entry.rpartition("=")
            if not separator or not number.isascii() or not number.isdigit():
                raise ValueError(f'schema: sizes has {entry!r}, expected "name=number"')
            if self.sparse and name not in self.sparse:
                raise ValueError(f"schema: sizes has {entry!r}, but sparse has no {name!r}: {listed(self.sparse)}")
            if name in sizes:
                raise ValueError(f"schema: sizes names {name!r} twice")
            _check_size(f"the size of {name!r}", int(number))
            sizes[name] = int(number)
        return sizes

    def is_logarithmic(self, name: str) -> bool:
        return self.log_transform if isinstance(self.log_transform, bool) else name in self.log_transform

    def of(self, columns: tuple[str, ...], where: str, labelled: bool = True) -> Schema:
        """With the columns filled in, all of them among those that the data at `where` has.

        Args:
            labelled: whether the label is among them.

        Raises:
            ValueError: listing the columns found.
        """
        if not self.label:
            if not set(FIELDS if labelled else FIELDS[1:]) <= set(columns):
                raise ValueError(
                    f"{where}: its columns are {listed(columns)}; they are not Criteo's ({LABEL}, {INTEGERS[0]} to "
                    f"{INTEGERS[-1]}, {CATEGORIES[0]} to {CATEGORIES[-1]}), so a schema must say which is the label, "
                    "which are dense and which are sparse: --label click --dense price --sparse user item, or "
                    'Schema(label="click", dense=("price",), sparse=("user", "item"))'
                )
            return replace(self, label=LABEL, dense=INTEGERS, sparse=CATEGORIES)
        for part, names in (("label", (self.label,) * labelled), ("dense", self.dense), ("sparse", self.sparse)):
            unknown = [name for name in names if name not in columns]
            if unknown:
                raise ValueError(
                    f"{where}: the schema's {part} column {unknown[0]!r} is not there; columns: {listed(columns)}"
                )
        return self


def _check_size(what: str, number: int) -> None:
    if not 2 <= number <= MAX_EMBEDDINGS:
        raise ValueError(f"schema: {what} is {number}, expected 2 to {MAX_EMBEDDINGS}: id 0 is for missing values")


CRITEO = Schema(LABEL, INTEGERS, CATEGORIES)
"""Criteo's display-advertising log; `tritonemb.data.criteo` says what its columns hold."""


@dataclass(frozen=True)
class Problem:
    """A bad row.

    Args:
        row: its line or row in the chunk, from 0.
        reason: what is wrong, for counting: the same words for the same mistake in other rows.
        message: what is wrong with this one.
    """

    row: int
    reason: str
    message: str


@dataclass
class Problems:
    """The bad rows of a chunk: the first few in full, all of them counted by reason."""

    first: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.counts.total()


def wrong_value(place: int, name: str, value: object, expected: str, hint: str = "") -> str:
    """`field 3 (int_2) is 'x', expected an integer or nothing`; `place` counts from 1."""
    return f"field {place} ({name}) is {shown(value)}, expected {expected}{hint}"


def shown(value: object) -> str:
    """A value in quotes, escaped, shortened."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "...")


def listed(names: Iterable[str], most: int = 60) -> str:
    """Names with commas between them, the rest counted."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
