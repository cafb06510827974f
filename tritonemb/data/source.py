"""What a trainer reads from: a `Data`, opened as a `Stream` of batches that can be left and taken up again."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

from tritonemb.data.batch import Batch
from tritonemb.data.prefetch import Prefetcher
from tritonemb.types import TableConfig

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

Share = tuple[int, int]
"""Index and count: one of `count` disjoint parts of a split's rows."""
WHOLE: Share = (0, 1)

Position = dict[str, int]
"""Where a stream stands: JSON-able, of no meaning but to `Data.open`, and only with the arguments of its stream."""

PREFETCHED = 5  # batches


@dataclass(frozen=True)
class Feature:
    """A categorical feature: ids in `[0, num_embeddings)`, exactly one a row unless `multi_hot`."""

    name: str
    num_embeddings: int
    multi_hot: bool = False


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

    def __str__(self) -> str:
        """What a person wants to know of the rows that were left out."""
        text = f"{self.rows:,} rows were read, {self.skipped:,} bad ones left out"
        shown = [*(f"{where} ({count:,})" for where, count in self.reasons), *self.problems]
        return "\n  ".join([text, *shown])


@dataclass(frozen=True)
class Step:
    """A batch, and how things stand once it has been returned."""

    batch: Batch
    position: Position
    report: ReadReport


class Stream:
    """Batches in their order, made ahead in a thread of its own; errors of the reader come out of `next`.

    Args:
        steps: makes the batches; closed with the stream. The report of all that was read may come after the last one.
        position: where it starts.
        report: what was read before.
        at_end: is told the report when the last batch has been returned and the next one is asked for.
        on_stop: lets `steps` give up what it waits for; see `Prefetcher`.

    Attributes:
        position: where the batch after the last one returned begins.
        report: the rows returned and left out so far; those of the whole epoch once there are no more batches.
    """

    def __init__(
        self,
        steps: Iterator[Step | ReadReport],
        position: Position,
        report: ReadReport | None = None,
        at_end: Callable[[ReadReport], None] | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        self.position = position
        self.report = report or ReadReport()
        self._at_end = at_end
        self._steps = Prefetcher(steps, PREFETCHED, "tritonemb-batches", on_stop)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        try:
            step = next(self._steps)
            while isinstance(step, ReadReport):
                self.report = step
                step = next(self._steps)
        except StopIteration:
            if self._at_end is not None:
                self._at_end(self.report)
            raise
        self.position, self.report = step.position, step.report
        return step.batch

    def close(self) -> None:
        """End the threads of the stream; further batches there are none."""
        self._at_end = None
        self._steps.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Batches(Protocol):
    """What `Stream` is: batches that can be left and taken up again. Their position may be a nested one."""

    @property
    def position(self) -> Mapping[str, Any]: ...

    @property
    def report(self) -> ReadReport: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def close(self) -> None: ...

    def __enter__(self) -> Batches: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Data(Protocol):
    """A data set for binary click prediction, in memory (`Dataset`) or read as it is needed (`ClickLog`)."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[Feature, ...]: ...

    @property
    def num_dense(self) -> int: ...

    @property
    def encoding(self) -> str:
        """A digest, in hex, of what decides how a row becomes numbers: a model fits data of the same encoding alone.

        It depends on the columns, their ids and their treatment, but neither on the rows nor on where they lie.
        """
        ...

    @property
    def best_auc(self) -> float | None:
        """The AUC on the test rows that no model can be expected to beat, where it is known."""
        ...

    def tables(self, embedding_dim: int) -> list[TableConfig]:
        """One table a feature, all of one dim."""
        ...

    def splits(self) -> tuple[Split, ...]:
        """The splits that it has."""
        ...

    def num_rows(self, split: Split) -> int | None:
        """Rows of a split; None where that is not known before it has been read."""
        ...

    def estimated_rows(self, split: Split) -> int | None:
        """About how many rows a split has, told without reading it; None where nobody can say."""
        ...

    def open(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = False,
        position: Position | None = None,
        pin_memory: bool = False,
        share: Share = WHOLE,
    ) -> Stream:
        """The batches of a split, or of a share of it; the last one may be smaller.

        Args:
            seed, epoch: decide the order if `shuffle`.
            position: of a stream opened with the same arguments: go on exactly there.
            pin_memory: cut the batches into page-locked memory.
            share: (index, count): the index-th of `count` disjoint shares that together are all rows of the split. A
                share that has no rows ends at once, as there may be more shares than rows.

        Raises:
            ValueError: no such split or share; a batch size below 1; a position that cannot be one of this stream.
        """
        ...


def tables_of(features: tuple[Feature, ...], embedding_dim: int) -> list[TableConfig]:
    """One table a feature, all of one dim; the bags of multi-hot features are averaged."""
    return [
        TableConfig(f.name, f.num_embeddings, embedding_dim, pooling="mean" if f.multi_hot else "sum") for f in features
    ]


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
    for field, value in position.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"data set {name!r}: the position's {field!r} is {value!r}, expected an int of 0 or more")
    if position["of"] != belongs_to:
        raise ValueError(
            f"data set {name!r}: this position was taken in a stream of other data or other settings; a stream goes on "
            "only with the files, split, batch size, seed, epoch, order and share that it was opened with"
        )


def check_share(share: Share) -> None:
    """ValueError unless it is (index, count) with 0 <= index < count."""
    good = isinstance(share, tuple) and len(share) == 2
    if (
        not good
        or not all(isinstance(n, int) and not isinstance(n, bool) for n in share)
        or not 0 <= share[0] < share[1]
    ):
        raise ValueError(f"share must be (index, count) with 0 <= index < count, got {share!r}")


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
