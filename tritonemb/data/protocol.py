"""Protocol of data: a `Data` is opened as a `Stream` of batches, prefetched in a thread, which can be resumed."""

import atexit
import hashlib
import os
import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, Self, TypeVar

from tritonemb.data.batch import Batch
from tritonemb.types import Pooling, TableConfig
from tritonemb.utils import Closeable

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

Shard = tuple[int, int]
"""Index and count: one of `count` disjoint shards of a split's rows."""
WHOLE: Shard = (0, 1)

Position = dict[str, Any]
"""Resume point of a stream, JSON-serializable: pass it to `Data.open` with the arguments that opened the stream."""

T = TypeVar("T")
GRACE = 2.0  # seconds for the thread to end after a failure
POLL = 0.1  # seconds between checks that the thread is alive
PREFETCH_DEPTH = 5  # batches
MAX_PROBLEMS = 10  # shown in full by a report
READ_THREAD, BATCH_THREAD = "tritonemb-read", "tritonemb-batches"
reading_processes = 1  # known reading processes of this host, which divide the processors among their threads


@dataclass(frozen=True)
class Feature:
    """Categorical feature with ids in `[0, num_embeddings)`, exactly one per row unless `multi_hot`.

    If `dynamic`, any int64 is an id and `num_embeddings` a capacity. `kind`: "integers", "strings", or empty: unknown.
    `table`: the feature whose ids and table this one has; empty: its own.
    """

    name: str
    num_embeddings: int
    multi_hot: bool = False
    dynamic: bool = field(default=False, repr=False)  # not in repr: digests of older checkpoints lack it
    kind: str = field(default="", compare=False, repr=False)
    table: str = field(default="", repr=False)


@dataclass(frozen=True)
class ReadReport:
    """Counts of the rows read and of the bad rows skipped.

    Args:
        rows: returned in batches since the epoch began, those before the stream's first position included.
        skipped: bad rows left out since the epoch began.
        problems: messages about the first bad rows of this stream, with file, line and field.
        reasons: number of bad rows by file and reason.
    """

    rows: int = 0
    skipped: int = 0
    problems: tuple[str, ...] = ()
    reasons: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Decode the JSON of `asdict(report)`."""
        problems, reasons = tuple(values["problems"]), tuple(map(tuple, values["reasons"]))
        return cls(values["rows"], values["skipped"], problems, reasons)

    def __add__(self, other: "ReadReport") -> "ReadReport":
        if not other.skipped:
            return replace(self, rows=self.rows + other.rows)
        reasons = sorted((Counter(dict(self.reasons)) + Counter(dict(other.reasons))).items())
        problems = (*self.problems, *other.problems)[:MAX_PROBLEMS]
        return ReadReport(self.rows + other.rows, self.skipped + other.skipped, problems, tuple(reasons))

    def __str__(self) -> str:
        text = f"{self.rows:,} rows were read, {self.skipped:,} bad rows skipped"
        shown = [*(f"{location} ({count:,})" for location, count in self.reasons), *self.problems]
        return "\n  ".join([text, *shown])


_reader_seconds: dict[int, float] = defaultdict(float)  # by thread, each of which adds to its own count


@contextmanager
def count_reading() -> Iterator[None]:
    """Add the CPU time of this thread in the block to `reader_seconds`."""
    begin = time.thread_time()
    try:
        yield
    finally:
        _reader_seconds[threading.get_ident()] += time.thread_time() - begin


def reader_seconds() -> float:
    """CPU seconds that threads of this process have spent reading, parsing and batching."""
    return sum(list(_reader_seconds.values()))


class Prefetcher(Closeable, Iterator[T]):
    """Iterator over the items of `source`, in order; `next` raises an exception of the source in its place.

    Item `k + depth` is started when item `k` is taken, so ranks in step start the same number of collectives.

    Args:
        source: iterated in the thread, and closed there if it is a generator.
        depth: items produced beyond those taken; at least 1.
        name: name of the thread.
        on_stop: called in any thread when no more items are needed; must not block; a source cancels its waits.
        collective: whether producing an item runs collectives; without a failure, permitted items are completed.
        permit: called by the thread that takes an item; the next item is produced inside the context that it returns.

    After a failure the thread has `GRACE` seconds to end, as it may wait forever. A forked process does not have the
    thread: there `next` raises a RuntimeError, and `close` does nothing.
    """

    def __init__(
        self, source: Iterator[T], depth: int, name: str, on_stop: Callable[[], None] | None = None, *,
        collective: bool = False, permit: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:  # fmt: skip
        self._permit = permit or nullcontext
        self._complete = collective or permit is not None
        # The thread references the queues only, so that this object can be collected, which stops the thread. The
        # finalizer must not join the thread, which may be waiting for the thread that runs the finalizer.
        self._queues = _Queues(on_stop)
        self._stop = weakref.finalize(self, self._queues.stop)
        self._stop.atexit = False
        for _ in range(depth):
            self.widen()
        self._ready: tuple[Any, BaseException | None] | None = None  # item that `wait` has taken
        self._thread = threading.Thread(target=self._queues.fill, args=(source,), name=name, daemon=True)
        if not collective:  # a thread in a collective is not joined at exit: it may wait for a dead rank
            _RUNNING[self._thread] = self._stop
        self._thread.start()

    def __next__(self) -> T:
        if self._queues.inherited:
            raise RuntimeError(
                "this stream was opened before the process was forked, so its threads do not exist in this process; "
                "open it after the fork"
            )
        if self._queues.stopped:
            raise StopIteration
        (item, end), self._ready = self._ready or self._queues.items.get(), None
        if end is not None:
            if not self._queues.stopped:
                self._stop()
                self._thread.join()
            raise end
        self.widen()
        return item

    def wait(self, seconds: float) -> bool:
        """Wait for the next item, or the end; return whether `next` does not block."""
        if self._queues.inherited or self._queues.stopped:
            return True
        if self._ready is None:
            with suppress(Empty):
                self._ready = self._queues.items.get(timeout=seconds)
        return self._ready is not None

    def widen(self) -> None:
        """Increase the depth by one item."""
        self._queues.permits.put(self._permit())

    def settle(self) -> None:
        """Wait until all permitted items are produced; no collective of the source runs then."""
        settled = threading.Event()
        self._queues.permits.put(settled)
        while self._thread.is_alive() and not settled.wait(POLL):
            pass

    def close(self, failed: bool = False) -> None:
        """Stop the thread after its item and join it; `failed`: whether this rank, or another one, has failed."""
        if self._queues.inherited:
            return
        if self._complete and not failed:
            self.settle()
        self._stop()
        self._ready = None
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE if failed else None)

    def __exit__(self, *raised: object) -> None:
        self.close(failed=raised[0] is not None)


class _Queues:
    """Queues between the thread that produces items and the consumer; the collector may call `stop` at any time."""

    def __init__(self, on_stop: Callable[[], None] | None) -> None:
        # Items, or the exception that ends them; permits for items, or an Event to set after the permits before it.
        self.items: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.permits: SimpleQueue[Any] = SimpleQueue()
        self.stopped = False
        self._on_stop, self._pid = on_stop, os.getpid()

    @property
    def inherited(self) -> bool:
        return self._pid != os.getpid()

    def stop(self) -> None:
        if self.inherited:
            return
        self.stopped = True
        with suppress(Empty):
            while True:
                self.items.get_nowait()
        self.items.put((None, StopIteration()))
        self.permits.put(None)
        if self._on_stop is not None:
            self._on_stop()

    def fill(self, source: Iterator[Any]) -> None:
        """Produce an item per permit, in the thread; after the last item, only set events."""
        item: Any = None
        end: BaseException | None = None
        meter = count_reading if threading.current_thread().name in (READ_THREAD, BATCH_THREAD) else nullcontext
        while not self.stopped and (permit := self.permits.get()) is not None:
            if isinstance(permit, threading.Event):
                permit.set()
            elif end is None:
                try:
                    with permit, meter():
                        item = next(source)
                except BaseException as error:
                    end = error
                if not self.stopped:
                    self.items.put((item, end))
                item = None  # free it while the next one is produced
        if isinstance(source, Generator):
            with suppress(Exception):
                source.close()


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


@atexit.register
def end_all() -> None:
    """Stop all threads at exit, before the libraries that they run are finalized."""
    running = list(_RUNNING.items())
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join()


@dataclass(frozen=True)
class PositionedBatch:
    """Batch with the position and the report after it; `batch` is None at the end of a stream."""

    batch: Batch | None
    position: Position
    report: ReadReport


class Batches(Closeable, Iterator[Batch]):
    """Iterator over batches from a position on: one `Stream` or several, whose position is nested."""

    position: Mapping[str, Any]
    report: ReadReport
    """Rows read so far."""

    def wait(self, seconds: float) -> bool:
        """Wait for the next batch, or the end; return False if there is neither after these seconds."""
        return True


class Stream(Batches):
    """Batches in order, `depth` of them prefetched in a thread; `next` raises the errors of the source.

    With `depth=0` they are read when they are needed, without a thread, from a source that raises no errors. The source
    `batches` is closed with the stream; an item without a batch, with the report of all rows, may come last. `at_end`
    is called with the report when the batches are exhausted.

    Attributes:
        position: position of the next batch.
        report: report of the rows returned and skipped so far; once the batches are exhausted, of the whole epoch.
    """

    def __init__(
        self, batches: Iterator[PositionedBatch], position: Position, report: ReadReport | None = None,
        at_end: Callable[[ReadReport], None] | None = None, on_stop: Callable[[], None] | None = None,
        depth: int = PREFETCH_DEPTH,
    ) -> None:  # fmt: skip
        self.position: Position = position
        self.report, self._at_end = report or ReadReport(), at_end
        self._prefetcher = Prefetcher(batches, depth, BATCH_THREAD, on_stop) if depth else None
        # Without a thread several are read in a row: each takes half the time, as steps evict the code from caches.
        self._batches: Iterator[PositionedBatch] = self._prefetcher or chain.from_iterable(
            iter(lambda: [*islice(batches, PREFETCH_DEPTH)], [])
        )

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

    def wait(self, seconds: float) -> bool:
        return self._prefetcher is None or self._prefetcher.wait(seconds)

    def close(self) -> None:
        """Stop the threads of the stream; it returns no further batches."""
        # A source without a thread is dropped, not closed: another thread may be running it.
        self._at_end, self._batches = None, iter(())
        if self._prefetcher is not None:
            self._prefetcher.close()


@dataclass(frozen=True)
class OpenOptions:
    """The arguments of `Data.open`.

    Args:
        seed, epoch: determine the order if `shuffle`.
        position: position to resume from, of a stream opened with the same arguments.
        pin_memory: allocate batches in page-locked memory.
        shard: (index, count): one of `count` disjoint shards that cover all rows of the split; some may be empty.
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
        is_valid = isinstance(shard, tuple) and len(shard) == 2 and all(type(number) is int for number in shard)
        if not is_valid or not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard must be (index, count) with 0 <= index < count, got {shard!r}")


class Data(Protocol):
    """Data set for binary click prediction, in memory (`Dataset`) or streamed (`ClickLog`).

    It may have `contents`, strings by name: a run whose data has other contents is resumed on request only; `labels`,
    the names of several labels, of batches with labels `[B, L]`; `has_weights`, whether batches have weights; and
    methods `shard_rows(split, count)`, which returns the rows of each shard unless they are as many in each, and
    `check_rows(split)`, which raises ValueError if a split has none."""

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[Feature, ...]: ...

    @property
    def num_dense(self) -> int: ...

    @property
    def encoding(self) -> str:
        """Hex digest of how rows are encoded as numbers: a model fits only data of the same encoding."""

    @property
    def best_auc(self) -> float | None:
        """Bayes-optimal AUC on the test rows; None if unknown."""

    def splits(self) -> tuple[Split, ...]:
        """Return the splits of the data set."""

    def num_rows(self, split: Split) -> int | None:
        """Return the number of rows of a split; None if unknown before the split has been read."""

    def estimated_rows(self, split: Split) -> int | None:
        """Estimate the number of rows of a split without reading it; None if that is impossible."""

    def open(self, split: Split, batch_size: int, **kwargs: Any) -> Stream:
        """Open the batches of a split, or of a shard of it; the last batch may be smaller. `kwargs`: see `OpenOptions`.
        Raise ValueError for an unknown split or shard, a batch size below 1, or a position of another stream."""


def tables_of(features: tuple[Feature, ...], embedding_dim: int) -> list[TableConfig]:
    """Return one table config per feature but those that have the table of another one, in order."""

    def config(feature: Feature) -> TableConfig:
        users = [feature, *(f for f in features if f.table == feature.name)]
        pooling: Pooling = "mean" if any(user.multi_hot for user in users) else "sum"
        size, capacity = (None, feature.num_embeddings) if feature.dynamic else (feature.num_embeddings, None)
        names = [user.name for user in users]
        return TableConfig(feature.name, size, embedding_dim, names, pooling, capacity=capacity)

    return [config(feature) for feature in features if not feature.table]


class TablesMixin:
    """Mixin of data sets: table configs of their features."""

    features: tuple[Feature, ...]

    def tables(self, embedding_dim: int) -> list[TableConfig]:
        """Return one table config per feature with a table of its own; multi-hot features are mean-pooled."""
        return tables_of(self.features, embedding_dim)


def digest(*parts: object) -> str:
    """Hash parts by their `repr` (SHA-256, hex), for `Data.encoding`; the same in every process."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def fingerprint(*parts: object) -> int:
    """Hash the settings of a stream (CRC-32 of their `repr`), by which a position is checked."""
    return zlib.crc32(repr(parts).encode())


def check_position(position: Position, fields: tuple[str, ...], stream_id: int, name: str) -> None:
    """Raise ValueError unless a position has these fields, none negative, and its stream had the same settings."""
    if not isinstance(position, dict) or set(position) != {"of", *fields}:
        raise ValueError(
            f"data set {name!r}: {position!r} is not a position of this data set, whose fields are {('of', *fields)}; "
            "pass a value of `Stream.position`"
        )
    for entry, value in position.items():
        numbers = value.values() if entry == "offset" and isinstance(value, dict) else [value]  # of a stream
        if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
            raise ValueError(f"data set {name!r}: the position's {entry!r} is {value!r}, expected an int of 0 or more")
    if position["of"] != stream_id:
        raise ValueError(
            f"data set {name!r}: this position is of a stream of other data or with other settings; a stream resumes "
            "only with the files, split, batch size, seed, epoch, order and shard that it was opened with"
        )
