"""The shards of the data that one rank reads, one batch of each in turn, in this process or in others.

An epoch that began with S shards keeps them until it ends, on however many ranks it resumes: rank r of W reads the
shards r, r + W, r + 2W, ... The positions of all shards say where it resumes; nothing else does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonemb.data.batch import Batch, BatchLayout
from tritonemb.data.protocol import (
    PREFETCH_DEPTH,
    WHOLE,
    Batches,
    Data,
    Position,
    PositionedBatch,
    ReadReport,
    Split,
    Stream,
)

PROBLEMS_KEPT = 10

ShardsPosition = dict[str, Any]
"""JSON-able. Of an epoch in one shard: that of its stream. Else {"shares": S, "at": {shard: its position}}."""

Message = tuple[dict[str, Any], Tensor | None]
"""From a process that reads: the JSON-able progress of a shard, and the buffer of a batch."""

_ENTRY = {"batches", "ended", "rows", "skipped", "position"}
_VALUES = {4: torch.int32, 8: torch.int64}


@dataclass
class ShardState:
    """Where one shard of `count` stands."""

    index: int
    count: int
    batches: int = 0
    ended: bool = False
    report: ReadReport = field(default_factory=ReadReport)
    position: Position | None = None
    stream: Batches | None = None

    def attach(self, stream: Batches) -> None:
        """Read this stream from now on."""
        self.stream, self.report, self.position = stream, stream.report, dict(stream.position)

    def entry(self) -> dict[str, Any]:
        """Its part of a position."""
        return {
            "batches": self.batches,
            "ended": self.ended,
            "rows": self.report.rows,
            "skipped": self.report.skipped,
            "position": self.position,
        }

    def next_batch(self) -> Batch | None:
        """The next batch; None if the shard has ended, or is closed, which another thread may do meanwhile."""
        stream = self.stream
        if stream is None:
            return None
        batch = next(stream, None)
        if batch is not None:
            self.batches, self.report, self.position = self.batches + 1, stream.report, dict(stream.position)
        elif self.stream is not None:
            self.ended, self.report, self.position = True, stream.report, None
            self.close()
        return batch

    def close(self) -> None:
        """Close the stream, which may wait in another thread; the position stays."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()


class ShardOpener(Protocol):
    """Reads shards in other processes; see `tritonemb.data.workers.DataLoaderWorkers`."""

    def open(self, shards: Sequence[ShardState], how: Mapping[str, Any], pin_memory: bool) -> None:
        """Give each of the shards its stream, whose batches are taken `in_turn`; none of them has ended."""
        ...


def open_shards(
    data: Data,
    split: Split,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    shards: int | None = None,
    positions: Mapping[str, Any] | None = None,
    *,
    pin_memory: bool = False,
    workers: ShardOpener | None = None,
    **how: Any,
) -> Batches:
    """The batches of the shards rank, rank + world, ... of a split.

    Each of several shards of a rank has as many threads and as much memory as a stream has otherwise.

    Args:
        shards: of the epoch: `world` if not given, or what `positions` says.
        positions: of a stream of this rank, or of all ranks by `merge_positions`: resume there.
        pin_memory: make the batches in page-locked memory.
        workers: `DataLoaderWorkers` that read in place of this process. They change no batch.
        how: `seed`, `epoch` and `shuffle`; see `tritonemb.data.protocol.OpenOptions`.

    Raises:
        ValueError: no such rank or split; a position that is not one of these shards.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}), got {rank}")
    at: dict[str, Any] = {}
    if positions is not None:
        found, at = _parsed(positions)
        if shards not in (None, found):
            raise ValueError(f"the position is of an epoch in {found} shards, which cannot resume in {shards}")
        shards = found
    shards = world if shards is None else shards
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    mine = [ShardState(index, shards) for index in range(rank, shards, world)]
    for shard in mine if positions is not None else ():
        if str(shard.index) not in at:
            raise ValueError(f"the position lacks shard {shard.index} of {shards}; merge the positions of all ranks")
        entry = at[str(shard.index)]
        shard.batches, shard.ended, shard.position = entry["batches"], entry["ended"], entry["position"]
        shard.report = ReadReport(entry["rows"], entry["skipped"])
    open_all = partial(_open, data) if workers is None else workers.open
    open_all([shard for shard in mine if not shard.ended], {"split": split, "batch_size": batch_size} | how, pin_memory)
    if shards == 1 and rank == 0 and mine[0].stream is not None:
        return mine[0].stream
    return ShardedStream(shards, mine)


def _open(data: Data, shards: Sequence[ShardState], how: Mapping[str, Any], pin_memory: bool) -> None:
    with ExitStack() as failed:
        for shard in shards:
            own: dict[str, Any] = {"position": shard.position, "pin_memory": pin_memory}
            if (shard.index, shard.count) != WHOLE:
                own["shard"] = (shard.index, shard.count)
            shard.attach(failed.enter_context(data.open(**how, **own)))
        failed.pop_all()


def in_turn(shards: Sequence[ShardState]) -> Iterator[tuple[ShardState, Batch | None]]:
    """The batches of the shards, each from the shard that has returned fewest, the first of those; None where one ends.

    So the next batch depends on nothing but the shards' positions, and part of the shards keep their order.
    """
    while live := [shard for shard in shards if shard.stream is not None]:
        shard = min(live, key=lambda shard: (shard.batches, shard.index))
        yield shard, shard.next_batch()


class ShardedStream(Batches):
    """The batches of a rank's shards `in_turn`.

    Args:
        count: shards of the epoch.
        shards: those of this rank; there may be none.
    """

    def __init__(self, count: int, shards: list[ShardState]) -> None:
        self._count, self._shards, self._turns = count, shards, in_turn(shards)

    @property
    def position(self) -> ShardsPosition:  # type: ignore[override]
        """Of all shards of this rank: where the batches after the last one returned begin."""
        return {"shares": self._count, "at": {str(shard.index): shard.entry() for shard in self._shards}}

    @property
    def report(self) -> ReadReport:  # type: ignore[override]
        """Of all shards of this rank."""
        reports = [shard.report for shard in self._shards]
        reasons: Counter[str] = Counter()
        for report in reports:
            reasons.update(dict(report.reasons))
        return ReadReport(
            sum(report.rows for report in reports),
            sum(report.skipped for report in reports),
            tuple(problem for report in reports for problem in report.problems)[:PROBLEMS_KEPT],
            tuple(sorted(reasons.items())),
        )

    def __next__(self) -> Batch:
        try:
            return next(batch for _, batch in self._turns if batch is not None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the threads of all streams; there are no further batches. The position stays."""
        for shard in self._shards:
            shard.close()


def read_shards(data: Data, shards: Sequence[ShardState], how: Mapping[str, Any]) -> Iterator[Message]:
    """For another process: where each shard begins, and then their batches in turn; a shard that ends has none."""
    try:
        _open(data, shards, how, False)
        for shard in shards:
            yield _progress(shard), None
        for shard, batch in in_turn(shards):
            packed = None if batch is None else batch.packed()
            if packed is None or packed.layout is None:
                yield _progress(shard), None
            else:
                layout = packed.layout
                sizes = (layout.batch_size, layout.num_dense, layout.num_values, layout.values_dtype.itemsize)
                yield _progress(shard) | {"keys": layout.keys, "sizes": sizes}, packed.buffer
            del batch, packed  # or they would stay until the next ones are there
    finally:
        for shard in shards:
            shard.close()


def _progress(shard: ShardState) -> dict[str, Any]:
    return {"position": shard.position, "report": astuple(shard.report)}


class MessageStream(Stream):
    """The batches of a shard that another process reads: see `read_shards`.

    Args:
        on_stop, depth: see `Stream`.
    """

    def __init__(
        self, messages: Iterator[Message], on_stop: Callable[[], None] | None = None, depth: int = PREFETCH_DEPTH
    ) -> None:
        first, _ = next(messages)
        super().__init__(_received(messages), first["position"], _report(first), on_stop=on_stop, depth=depth)


def _received(messages: Iterator[Message]) -> Generator[PositionedBatch | ReadReport, None, None]:
    for values, buffer in messages:
        if buffer is None:
            yield _report(values)
            return
        yield PositionedBatch(layout_of(values).batch(buffer), values["position"], _report(values))
        del values, buffer  # or they would stay until the next ones are there


def layout_of(values: Mapping[str, Any]) -> BatchLayout:
    """Of the batch of a message."""
    batch_size, num_dense, num_values, itemsize = values["sizes"]
    return BatchLayout(tuple(values["keys"]), batch_size, num_dense, num_values, _VALUES[itemsize])


def _report(values: Mapping[str, Any]) -> ReadReport:
    rows, skipped, problems, reasons = values["report"]
    return ReadReport(rows, skipped, tuple(problems), tuple((reason, count) for reason, count in reasons))


def merge_positions(positions: Sequence[Mapping[str, Any]]) -> ShardsPosition:
    """One position of the epoch from those of all ranks' streams, in any order.

    Raises:
        ValueError: they are not of one epoch, or not of all its shards, once each.
    """
    merged: dict[str, Any] = {}
    counts = set()
    for position in positions:
        count, at = _parsed(position)
        counts.add(count)
        if twice := sorted(merged.keys() & at.keys()):
            raise ValueError(f"shard {twice[0]} is in the positions of two ranks")
        merged |= at
    if len(counts) != 1:
        raise ValueError(f"the positions are of epochs in {sorted(counts)} shards; merge those of one epoch")
    count = counts.pop()
    if missing := [index for index in range(count) if str(index) not in merged]:
        raise ValueError(f"no rank's position has shard {missing[0]} of {count}; merge the positions of all ranks")
    if count == 1:
        return dict(merged["0"]["position"])
    return {"shares": count, "at": {str(index): merged[str(index)] for index in range(count)}}


def rank_position(position: Mapping[str, Any], rank: int, world: int) -> ShardsPosition:
    """The part of one rank of `world` in an epoch's position, which another number of ranks may have made.

    Raises:
        ValueError: it is no such position.
    """
    count, at = _parsed(position)
    mine = {str(index): at[str(index)] for index in range(rank, count, world) if str(index) in at}
    if count == 1 and mine:
        return dict(mine["0"]["position"])
    return {"shares": count, "at": mine}


def _parsed(position: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Number of shards, and the entries of those that the position has."""
    if not isinstance(position, Mapping):
        raise ValueError(f"{position!r} is not a position")
    if "shares" not in position:  # of a stream of all rows
        return 1, {"0": ShardState(0, 1, position=dict(position)).entry()}
    count, at = position["shares"], position.get("at")
    if (
        set(position) != {"shares", "at"}
        or not isinstance(count, int)
        or not isinstance(at, Mapping)
        or count < 1
        or not set(at) <= {str(index) for index in range(count)}
        or any(set(entry) != _ENTRY for entry in at.values())
    ):
        raise ValueError(f"{position!r} is not a position of shards; use what `position` or `merge_positions` returned")
    return count, dict(at)
