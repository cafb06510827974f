"""What a trainer reads from: a `Data`, opened as a `Stream` of batches that can be closed and resumed."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

from tritonemb.data.batch import Batch
from tritonemb.data.prefetch import Prefetcher
from tritonemb.types import Pooling, TableConfig
from tritonemb.utils import Closeable

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

Shard = tuple[int, int]
"""Index and count: one of `count` disjoint parts of a split's rows."""
WHOLE: Shard = (0, 1)

Position = dict[str, int]
"""Where a stream resumes: JSON-able, for `Data.open` with the same arguments as its stream."""

PREFETCH_DEPTH = 5  # batches
MAX_PROBLEMS = 10  # that a report shows in full
reading_processes = 1  # on this host, as far as this process knows: they divide the processors among their threads


@dataclass(frozen=True)
class Feature:
    """A categorical feature: ids in `[0, num_embeddings)`, exactly one a row unless `multi_hot`.

    If it is `dynamic` any int64 is an id, and `num_embeddings` the capacity of its table. Its `kind` says whether ids
    are made of "integers" or of "strings", which have different ones; nothing where that is not known.
    """

    name: str
    num_embeddings: int
    multi_hot: bool = False
    dynamic: bool = field(default=False, repr=False)  # not in the digests of older checkpoints
    kind: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class ReadReport:
    """What has become of the rows.

    Args:
        rows: returned in batches since the epoch began, also before a position that the stream was opened at.
        skipped: bad rows left out since then.
        problems: the first few of them that this stream has met, as file:line:column: what is wrong.
        reasons: how many of them there are, by file and reason.
    """

    rows: int = 0
    skipped: int = 0
    problems: tuple[str, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """From what `asdict` and JSON made of one."""
        reasons = tuple((reason, count) for reason, count in values["reasons"])
        return cls(values["rows"], values["skipped"], tuple(values["problems"]), reasons)

    def __add__(self, other: "ReadReport") -> "ReadReport":
        if not other.skipped:
            return replace(self, rows=self.rows + other.rows)
        reasons = sorted((Counter(dict(self.reasons)) + Counter(dict(other.reasons))).items())
        problems = (*self.problems, *other.problems)[:MAX_PROBLEMS]
        return ReadReport(self.rows + other.rows, self.skipped + other.skipped, problems, tuple(reasons))

    def __str__(self) -> str:
        text = f"{self.rows:,} rows were read, {self.skipped:,} bad ones left out"
        shown = [*(f"{where} ({count:,})" for where, count in self.reasons), *self.problems]
        return "\n  ".join([text, *shown])


@dataclass(frozen=True)
class PositionedBatch:
    """A batch with the position and the report once it has been returned; without a batch, where a stream ends."""

    batch: Batch | None
    position: Position
    report: ReadReport


class Batches(Closeable, Iterator[Batch]):
    """Batches in their order, from a position on: a `Stream`, or several. Their position may be a nested one."""

    position: Mapping[str, Any]
    report: ReadReport
    """What has been read so far."""


class Stream(Batches):
    """Batches in their order, prefetched in a thread; errors of the source come out of `next`.

    Args:
        batches: closed with the stream; after the last batch, the report of all rows may come.
        position: of the first batch.
        report: of the rows before it.
        at_end: called with the report when a batch behind the last one is asked for.
        on_stop: see `Prefetcher`.
        depth: batches that are prefetched.

    Attributes:
        position: of the batch after the last one returned.
        report: of the rows returned and skipped so far; of the whole epoch once there are no more batches.
    """

    def __init__(
        self, batches: Iterator[PositionedBatch], position: Position, report: ReadReport | None = None,
        at_end: Callable[[ReadReport], None] | None = None, on_stop: Callable[[], None] | None = None,
        depth: int = PREFETCH_DEPTH,
    ) -> None:  # fmt: skip
        self.position: Position = position
        self.report = report or ReadReport()
        self._at_end = at_end
        self._batches = Prefetcher(batches, depth, "tritonemb-batches", on_stop)

    def __next__(self) -> Batch:
        if (item := next(self._batches, None)) is not None:
            self.report = item.report
            if item.batch is not None:
                self.position = item.position
                return item.batch
        if self._at_end is not None:
            self._at_end(self.report)
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the threads of the stream; there are no further batches."""
        self._at_end = None
        self._batches.close()


@dataclass(frozen=True)
class OpenOptions:
    """The arguments of `Data.open`.

    Args:
        seed, epoch: decide the order if `shuffle`.
        position: of a stream opened with the same arguments: resume exactly there.
        pin_memory: make the batches in page-locked memory.
        shard: (index, count): one of `count` disjoint shards, together all rows of the split; some may be empty.
    """

    split: Split
    batch_size: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = False
    position: Position | None = None
    pin_memory: bool = False
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        shard = self.shard
        good = isinstance(shard, tuple) and len(shard) == 2 and all(type(number) is int for number in shard)
        if not good or not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard must be (index, count) with 0 <= index < count, got {shard!r}")


class Data(Protocol):
    """A data set for binary click prediction, in memory (`Dataset`) or read as it is needed (`ClickLog`). It may have
    `contents`, strings by name: where they have changed, a run is not resumed unasked."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[Feature, ...]: ...

    @property
    def num_dense(self) -> int: ...

    @property
    def encoding(self) -> str:
        """A hex digest of how a row becomes numbers, whichever rows: a model fits data of the same encoding alone."""

    @property
    def best_auc(self) -> float | None:
        """The Bayes-optimal AUC on the test rows, where it is known."""

    def splits(self) -> tuple[Split, ...]:
        """The splits that it has."""

    def num_rows(self, split: Split) -> int | None:
        """Rows of a split; None where that is not known before it has been read."""

    def estimated_rows(self, split: Split) -> int | None:
        """About how many rows a split has, without reading it; None where that is not known."""

    def open(self, split: Split, batch_size: int, **how: Any) -> Stream:
        """The batches of a split, or of a shard of it; the last one may be smaller. `how`: see `OpenOptions`.
        ValueError for no such split or shard, a batch size below 1, or a position that cannot be one of this stream."""


def tables_of(features: tuple[Feature, ...], embedding_dim: int) -> list[TableConfig]:
    """One table a feature, all of one dim; the bags of multi-hot features are averaged."""
    poolings: list[Pooling] = ["mean" if feature.multi_hot else "sum" for feature in features]
    return [
        TableConfig(f.name, None, embedding_dim, pooling=pooling, capacity=f.num_embeddings) if f.dynamic
        else TableConfig(f.name, f.num_embeddings, embedding_dim, pooling=pooling)
        for f, pooling in zip(features, poolings, strict=True)
    ]  # fmt: skip


class FeatureTables:
    """What data sets can do with their features."""

    features: tuple[Feature, ...]

    def tables(self, embedding_dim: int) -> list[TableConfig]:
        """One table a feature, all of one dim; the bags of multi-hot features are averaged."""
        return tables_of(self.features, embedding_dim)


def digest(*parts: object) -> str:
    """For `Data.encoding`: the same for parts with the same `repr`, in every process."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fingerprint(*parts: object) -> int:
    """A number that says whether a position belongs to these settings."""
    return zlib.crc32(repr(parts).encode())


def check_position(position: Position, fields: tuple[str, ...], belongs_to: int, name: str) -> None:
    """ValueError unless a position has these fields, none of them negative, and was taken with the same settings."""
    if not isinstance(position, dict) or set(position) != {"of", *fields}:
        raise ValueError(
            f"data set {name!r}: {position!r} is not a position of it, which has the fields {('of', *fields)}; "
            "use what `Stream.position` gave"
        )
    for entry, value in position.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"data set {name!r}: the position's {entry!r} is {value!r}, expected an int of 0 or more")
    if position["of"] != belongs_to:
        raise ValueError(
            f"data set {name!r}: this position was taken in a stream of other data or other settings; a stream resumes "
            "only with the files, split, batch size, seed, epoch, order and shard that it was opened with"
        )
