"""How a log is read: which rows are held out for validation and test, and how the others are shared out."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tritonemb.data.encode import mix
from tritonemb.data.files import LogFile, described, find
from tritonemb.data.protocol import SPLITS, WHOLE, Shard, Split
from tritonemb.data.schema import Schema, shown

Array = np.ndarray[Any, Any]

Kind = Literal["end", "random", "files", "time"]

LARGEST_CHUNK = 1 << 28
NEAR = 1 / 16  # of a shard: how far a cut may move to fall between two row groups
_DAY = re.compile(r"day_[0-9]+")


@dataclass(frozen=True)
class SplitRule:
    """Which rows are held out for validation and test; all others are train rows.

    Args:
        split_by: "end": the last rows, as a log is in order of time; "random": rows drawn by their number in the file;
            "files": whole files; "time": rows by a time column of Parquet files; "auto": "files" with the last file as
            test if the files are Criteo's days (day_0, day_1, ...) or test or validation files are named, "time" if a
            time column is, else "end".
        test_share: share of the rows, for "end" and "random"; the test rows come last.
        validation_share: likewise; they come before the test rows.
        test_files: paths, for "files": some of the log's, or others.
        validation_files: likewise.
        time_column: for "time".
        test_from: rows with this time or a later one are test rows: a number, or a date and time as 2014-05-31 or
            2014-05-31T12:00:00.
        validation_from: rows with this time or a later one, but earlier than the test rows, are validation rows.
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
        for name, share in (("test_share", self.test_share), ("validation_share", self.validation_share)):
            if not 0 <= share < 1:
                raise ValueError(f"split: {name} must be a share of the rows, from 0 to less than 1, got {share}")
        if self.test_share + self.validation_share >= 1:
            raise ValueError(f"split: shares of {self.test_share} and {self.validation_share} leave no train rows")
        by = self.kind(())
        if by != "files" and (self.test_files or self.validation_files):
            raise ValueError(f'split: test and validation files are for split_by="files", not for split_by={by!r}')
        if by != "time" and (self.time_column or self.test_from or self.validation_from):
            raise ValueError(f'split: a time column and times are for split_by="time", not for split_by={by!r}')
        if by == "time" and not (self.time_column and (self.test_from or self.validation_from)):
            raise ValueError('split: split_by="time" needs time_column and test_from, validation_from or both')

    def kind(self, files: tuple[LogFile, ...]) -> Kind:
        """What "auto" comes to for these files."""
        if self.split_by != "auto":
            return self.split_by
        if self.test_files or self.validation_files:
            return "files"
        if self.time_column:
            return "time"
        return "files" if len(files) > 1 and all(_DAY.fullmatch(file.stem) for file in files) else "end"


@dataclass(frozen=True)
class LogOptions:
    """How a log is read, cut up and numbered.

    Args:
        schema: which columns are what, and how categories become ids.
        split: which rows are held out.
        shuffle_rows: rows that are shuffled among each other at a time, in memory; 0 keeps the order of the files.
        on_bad_row: stop at a row that is not as it should be, or leave it out and count it.
        workers: threads that parse; one for each processor, at most 8, if not given.
        chunk_bytes: bytes that one of them works on at a time.
        delimiter: what stands between the fields of text files that begin with a header. Without it, names that end
            with `.csv` (or `.csv.gz`, `.csv.zst`) say that it is a comma, and others that they have Criteo's format.
        quoted_newlines: whether fields in quotes may contain line ends: slower, as such files are cut serially.
    """

    schema: Schema = field(default_factory=Schema)
    split: SplitRule = field(default_factory=SplitRule)
    shuffle_rows: int = 262_144
    on_bad_row: Literal["raise", "skip"] = "raise"
    workers: int | None = None
    chunk_bytes: int = 8 << 20
    delimiter: str = ""
    quoted_newlines: bool = False

    def __post_init__(self) -> None:
        if self.shuffle_rows < 0:
            raise ValueError(f"shuffle_rows must not be negative, got {self.shuffle_rows}")
        if self.on_bad_row not in ("raise", "skip"):
            raise ValueError(f'on_bad_row must be "raise" or "skip", got {self.on_bad_row!r}')
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if not 1 <= self.chunk_bytes <= LARGEST_CHUNK:
            raise ValueError(f"chunk_bytes must be from 1 to {LARGEST_CHUNK}, got {self.chunk_bytes}")
        if len(self.delimiter) > 1 or not self.delimiter.isascii() or self.delimiter in ("\n", "\r", '"'):
            raise ValueError(f"delimiter must be one ASCII character, got {self.delimiter!r}")


@dataclass(frozen=True)
class Part:
    """A piece of one file: rows `[start, stop)` of Parquet, lines that begin in bytes `[start, stop)` of unpacked text.

    Args:
        file: index among the log's files.
        stop: None for the end of the file.
        stripes: (index, count): of text that nobody can enter in the middle, only every count-th stripe; see
            `tritonemb.data.text.striped`.
    """

    file: int
    start: int
    stop: int | None
    stripes: Shard = WHOLE


def split_files(
    rule: SplitRule, files: tuple[LogFile, ...]
) -> tuple[tuple[LogFile, ...], dict[Split, tuple[int, ...]]]:
    """All files, those that only the rule names too, and which of them belong to each split."""
    held_out: dict[Split, tuple[LogFile, ...]] = {
        "validation": find(rule.validation_files) if rule.validation_files else (),
        "test": find(rule.test_files) if rule.test_files else (),
    }
    if not held_out["validation"] and not held_out["test"]:
        held_out["test"] = files[-1:]
    both = {file.location for file in held_out["validation"]} & {file.location for file in held_out["test"]}
    if both:
        raise ValueError(f"split: {sorted(both)[0]} is named for validation and for test")
    out = {file.location for kept in held_out.values() for file in kept}
    train = tuple(file for file in files if file.location not in out)
    if not train:
        raise ValueError(f"split: all files are held out, no train rows are left: {described(files)}")
    everything = train + held_out["validation"] + held_out["test"]
    if len({file.format for file in everything}) > 1:
        raise ValueError("split: the held-out files are of another format than the others")
    held_out["train"] = train
    indices: dict[Split, tuple[int, ...]] = {}
    first = 0
    for split in SPLITS:
        part = held_out[split]
        indices[split] = tuple(range(first, first + len(part)))
        first += len(part)
    return everything, indices


def end_parts(rule: SplitRule, sizes: list[int]) -> dict[Split, tuple[Part, ...]]:
    """The log, file after file, cut in two or three by rows or by bytes (`sizes` of the files)."""
    total = sum(sizes)
    test = total - round(total * rule.test_share)
    validation = test - round(total * rule.validation_share)
    bounds: dict[Split, tuple[int, int]] = {
        "train": (0, validation),
        "validation": (validation, test),
        "test": (test, total),
    }
    files = [Part(file, 0, None) for file in range(len(sizes))]
    return {split: tuple(between(files, sizes, *ends)) for split, ends in bounds.items()}


def between(parts: Sequence[Part], sizes: Sequence[int], start: int, stop: int) -> list[Part]:
    """What lies between two places of the parts, counted through all of them in the unit of their `sizes`."""
    pieces, first = [], 0
    for part, size in zip(parts, sizes, strict=True):
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            pieces.append(Part(part.file, part.start + low, part.stop if high == size else part.start + high))
        first += size
    return pieces


def drawn(rule: SplitRule, split: Split, file: int, rows: Array) -> Array:
    """Which rows of a file (their lines or rows, from 0) belong to a split, for "random".

    A row's number is hashed to `[0, 1)`, on every machine alike: the top of it is test, below that is validation.
    """
    number = rows.astype(np.uint64) + (np.uint64(file) << np.uint64(44))
    place = (mix(number ^ np.uint64(0x53504C4954)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    test = place >= 1 - rule.test_share
    if split == "test":
        return test
    held_out = place >= 1 - rule.test_share - rule.validation_share
    return held_out & ~test if split == "validation" else ~held_out


def time_mask(rule: SplitRule, split: Split, times: Any, pa: Any, compute: Any) -> Array:
    """Which rows belong to a split, for "time"; `times` is a `pyarrow` array. A row without a time is a train row."""
    test = _at_or_after(times, rule.test_from, pa, compute)
    if split == "test":
        return test
    late = _at_or_after(times, rule.validation_from, pa, compute)
    return late & ~test if split == "validation" else ~late & ~test


def may_have(rule: SplitRule, split: Split, times: Any, pa: Any, compute: Any) -> bool:
    """Whether rows from one time to another, a `pyarrow` array of these two, may be of a split, for "time"."""
    validation, test = (time_mask(rule, name, times, pa, compute) for name in ("validation", "test"))
    first, last = validation + 2 * test  # as the splits follow each other in time
    return bool(first <= SPLITS.index(split) <= last)


def _at_or_after(times: Any, bound: str | None, pa: Any, compute: Any) -> Array:
    if bound is None:
        return np.zeros(len(times), dtype=bool)
    limit = time_bound(bound, times.type, pa)
    mask: Array = compute.fill_null(compute.greater_equal(times, limit), False).to_numpy(zero_copy_only=False)
    return mask


def time_bound(bound: str, kind: Any, pa: Any) -> Any:
    """A time, as a `pyarrow` scalar of the column's type.

    Raises:
        ValueError: it is none.
    """
    try:
        return pa.scalar(bound).cast(kind)
    except pa.ArrowException as error:
        raise ValueError(f"split: {shown(bound)} is not a time of the time column, which is {kind}") from error


def even(parts: Sequence[Part], sizes: Sequence[int], shard: Shard, ends: Sequence[int] = ()) -> list[Part]:
    """The index-th of `count` runs of equal length, counted through all parts.

    Args:
        sizes: of the parts.
        ends: places, ascending, that a cut moves to if one is near.
    """
    index, count = shard
    total = sum(sizes)
    return between(parts, sizes, *(_moved(total * place // count, total / count, ends) for place in (index, index + 1)))


def _moved(cut: int, length: float, ends: Sequence[int]) -> int:
    place = bisect.bisect_left(ends, cut)
    nearest = min((end for end in ends[max(place - 1, 0) : place + 1]), key=lambda end: abs(end - cut), default=cut)
    return nearest if cut and abs(nearest - cut) <= NEAR * length else cut


def whole(parts: Sequence[Part], sizes: Sequence[int], shard: Shard) -> list[Part]:
    """Whole parts, the largest ones dealt out first, each to the shard that has least; in their order."""
    index, count = shard
    loads, mine = [0] * count, []
    for number in sorted(range(len(parts)), key=lambda number: (-sizes[number], number)):
        poorest = loads.index(min(loads))
        loads[poorest] += sizes[number]
        if poorest == index:
            mine.append(number)
    return [parts[number] for number in sorted(mine)]
