"""The shards of the data that one rank reads, one batch of each in turn, in this process or in data loader workers.

An epoch that began with S shards keeps them until it ends, on however many ranks it resumes: rank r of W reads the
shards r, r + W, r + 2W, ... The positions of all shards say where it resumes; nothing else does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tritonemb.data.batch import Batch
from tritonemb.data.protocol import WHOLE, Batches, Closing, Data, Position, ReadReport, Split

PROBLEMS_KEPT = 10

ShardsPosition = dict[str, Any]
"""JSON-able. Of an epoch in one shard: that of its stream. Else {"shares": S, "at": {shard: its position}}."""


@dataclass
class ShardState:
    """Where one shard of `count` stands; `report` and `position` are those at its beginning while it has no stream."""

    index: int
    count: int
    batches: int = 0
    ended: bool = False
    report: ReadReport = field(default_factory=ReadReport)
    position: Position | None = None
    stream: Batches | None = None

    def resume(self, entry: Mapping[str, Any]) -> None:
        self.batches, self.ended, self.position = entry["batches"], entry["ended"], entry["position"]
        self.report = ReadReport(entry["rows"], entry["skipped"])

    def entry(self) -> dict[str, Any]:
        report = self.current_report()
        position = self.position if self.stream is None else dict(self.stream.position)
        return {
            "batches": self.batches,
            "ended": self.ended,
            "rows": report.rows,
            "skipped": report.skipped,
            "position": position,
        }

    def current_report(self) -> ReadReport:
        return self.report if self.stream is None else self.stream.report

    def close(self, ended: bool = False) -> None:
        """Close the stream, which may wait in another thread; the position stays unless the shard has ended."""
        stream, self.stream = self.stream, None
        if stream is not None:
            self.report, self.position = stream.report, None if ended else dict(stream.position)
            self.ended = ended
            stream.close()


class ShardOpener(Protocol):
    """Reads shards elsewhere; see `tritonemb.data.workers.DataLoaderWorkers`."""

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
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = False,
    pin_memory: bool = False,
    workers: ShardOpener | None = None,
) -> Batches:
    """The batches of the shards rank, rank + world, ... of a split.

    Each of several shards of a rank has as many threads and as much memory as a stream has otherwise.

    Args:
        shards: of the epoch: `world` if not given, or what `positions` says.
        positions: of a stream of this rank, or of all ranks by `merge_positions`: resume there.
        seed, epoch, shuffle, pin_memory: see `tritonemb.data.protocol.Data.open`.
        workers: `DataLoaderWorkers` that read in place of this process. They change no batch.

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
        shard.resume(at[str(shard.index)])
    how = {"split": split, "batch_size": batch_size, "seed": seed, "epoch": epoch, "shuffle": shuffle}
    open_all = partial(open_here, data) if workers is None else workers.open
    open_all([shard for shard in mine if not shard.ended], how, pin_memory)
    if shards == 1 and rank == 0 and mine[0].stream is not None:
        return mine[0].stream
    return ShardedStream(shards, mine)


def open_here(data: Data, shards: Sequence[ShardState], how: Mapping[str, Any], pin_memory: bool) -> None:
    """Give each of the shards its stream, read by this process."""
    with ExitStack() as failed:
        for shard in shards:
            own: dict[str, Any] = {"position": shard.position, "pin_memory": pin_memory}
            if (shard.index, shard.count) != WHOLE:
                own["shard"] = (shard.index, shard.count)
            shard.stream = failed.enter_context(data.open(**how, **own))
        failed.pop_all()


def in_turn(shards: Sequence[ShardState]) -> Iterator[tuple[ShardState, Batch | None]]:
    """The batches of the shards, each from the shard that has returned fewest, the first of those; None where one ends.

    So the next batch depends on nothing but the shards' positions, and part of the shards keep their order.
    """
    while live := [shard for shard in shards if shard.stream is not None]:
        shard = min(live, key=lambda shard: (shard.batches, shard.index))
        batch = None if shard.stream is None else next(shard.stream, None)
        if batch is None:
            shard.close(ended=True)
        else:
            shard.batches += 1
        yield shard, batch
        del batch  # or it would stay until the next one is there


class ShardedStream(Closing):
    """The batches of a rank's shards `in_turn`.

    Args:
        count: shards of the epoch.
        shards: those of this rank; there may be none.
    """

    def __init__(self, count: int, shards: list[ShardState]) -> None:
        self._count, self._shards, self._turns = count, shards, in_turn(shards)

    @property
    def position(self) -> ShardsPosition:
        """Of all shards of this rank: where the batches after the last one returned begin."""
        return {"shares": self._count, "at": {str(shard.index): shard.entry() for shard in self._shards}}

    @property
    def report(self) -> ReadReport:
        """Of all shards of this rank."""
        reports = [shard.current_report() for shard in self._shards]
        reasons: Counter[str] = Counter()
        for report in reports:
            reasons.update(dict(report.reasons))
        return ReadReport(
            sum(report.rows for report in reports),
            sum(report.skipped for report in reports),
            tuple(problem for report in reports for problem in report.problems)[:PROBLEMS_KEPT],
            tuple(sorted(reasons.items())),
        )

    def __iter__(self) -> ShardedStream:
        return self

    def __next__(self) -> Batch:
        try:
            for _, batch in self._turns:
                if batch is not None:
                    return batch
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """End the threads of all streams; there are no further batches. The position stays."""
        for shard in self._shards:
            shard.close()


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


_ENTRY = {"batches", "ended", "rows", "skipped", "position"}


def _parsed(position: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Number of shards, and the entries of those that the position has."""
    if not isinstance(position, Mapping):
        raise ValueError(f"{position!r} is not a position")
    if "shares" not in position:  # of a stream of all rows
        return 1, {"0": {"batches": 0, "ended": False, "rows": 0, "skipped": 0, "position": dict(position)}}
    count, at = position["shares"], position.get("at")
    good = isinstance(count, int) and count >= 1 and isinstance(at, Mapping) and set(position) == {"shares", "at"}
    entries = dict(at) if good and isinstance(at, Mapping) else {}
    known = {str(index) for index in range(count)} if good else set()
    if not good or not set(entries) <= known or any(set(entry) != _ENTRY for entry in entries.values()):
        raise ValueError(f"{position!r} is not a position of shards; use what `position` or `merge_positions` returned")
    return count, entries
