"""The shards of the data that one rank reads, one batch of each in turn, in this process or in others.

An epoch that began with S shards keeps them until it ends, on however many ranks it resumes: rank r of W reads the
shards r, r + W, r + 2W, ... The positions of all shards say where it resumes; nothing else does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tritonemb.data.batch import Batch
from tritonemb.data.protocol import Batches, Data, Position, PositionedBatch, ReadReport, Split
from tritonemb.utils import on_error

# JSON-able. Of an epoch in one shard: that of its stream. Else {"shares": S, "at": {shard: its position}}.
ShardsPosition = dict[str, Any]

_ENTRY = ("batches", "ended", "rows", "skipped", "position")


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
        read = self.report
        return dict(zip(_ENTRY, (self.batches, self.ended, read.rows, read.skipped, self.position), strict=True))

    def close(self) -> None:
        """Close the stream, which may wait in another thread; the position stays."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()


def open_shards(
    data: Data, split: Split, batch_size: int, rank: int = 0, world: int = 1, shards: int | None = None,
    positions: Mapping[str, Any] | None = None, *, pin_memory: bool = False, workers: Any = None, **how: Any,
) -> Batches:  # fmt: skip
    """The batches of the shards rank, rank + world, ... of a split.

    Each of several shards of a rank has as many threads and as much memory as a stream has otherwise. ValueError for no
    such rank or split, or a position that is not one of these shards.

    Args:
        shards: of the epoch: `world` if not given, or what `positions` says.
        positions: of a stream of this rank, or of all ranks by `merge_positions`: resume there.
        pin_memory: make the batches in page-locked memory.
        workers: `DataLoaderWorkers` that read in place of this process, or None. They change no batch.
        how: `seed`, `epoch` and `shuffle`; see `tritonemb.data.protocol.OpenOptions`.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}), got {rank}")
    count, at = _parse_position(positions) if positions is not None else (world if shards is None else shards, None)
    if shards not in (None, count):
        raise ValueError(f"the position is of an epoch in {count} shards, which cannot resume in {shards}")
    if count < 1:
        raise ValueError(f"shards must be at least 1, got {count}")
    mine = [ShardState(index, count) for index in range(rank, count, world)]
    for shard in mine if at is not None else ():
        if (entry := (at or {}).get(str(shard.index))) is None:
            raise ValueError(f"the position lacks shard {shard.index} of {count}; merge the positions of all ranks")
        shard.batches, shard.ended, shard.position = entry["batches"], entry["ended"], entry["position"]
        shard.report = ReadReport(entry["rows"], entry["skipped"])
    open_all = partial(_open_streams, data) if workers is None else workers.open
    open_all([shard for shard in mine if not shard.ended], {"split": split, "batch_size": batch_size} | how, pin_memory)
    if count == 1 and mine and mine[0].stream is not None:
        return mine[0].stream
    return ShardedStream(count, mine)


def _open_streams(data: Data, shards: Sequence[ShardState], how: Mapping[str, Any], pin_memory: bool) -> None:
    with ExitStack() as failed:
        for shard in shards:
            place: dict[str, Any] = {"position": shard.position, "shard": (shard.index, shard.count)}
            shard.attach(failed.enter_context(data.open(**how, **place, pin_memory=pin_memory)))
        failed.pop_all()


def round_robin(shards: Sequence[ShardState]) -> Iterator[tuple[ShardState, Batch | None]]:
    """The batches of the shards, each from the shard that has returned fewest, the first of those; None where one ends,
    or is closed, which another thread may do meanwhile.

    So the next batch depends on nothing but the shards' positions, and part of the shards keep their order.
    """
    while live := [shard for shard in shards if shard.stream is not None]:
        shard = min(live, key=lambda shard: (shard.batches, shard.index))
        stream = shard.stream
        batch = None if stream is None else next(stream, None)
        if stream is not None and batch is not None:
            shard.batches, shard.report, shard.position = shard.batches + 1, stream.report, dict(stream.position)
        elif stream is not None and shard.stream is not None:
            shard.ended, shard.report, shard.position, shard.stream = True, stream.report, None, None
        yield shard, batch


class ShardedStream(Batches):
    """Batches of a rank's shards (`count` in the epoch), taken by `round_robin`. Position and report cover all."""

    def __init__(self, count: int, shards: list[ShardState]) -> None:
        self._count, self._shards, self._turns = count, shards, round_robin(shards)
        self._look()

    def __next__(self) -> Batch:
        try:
            with on_error(self.close):
                return next(batch for _, batch in self._turns if batch is not None)
        finally:
            self._look()

    def _look(self) -> None:
        self.position = {"shares": self._count, "at": {str(shard.index): shard.entry() for shard in self._shards}}
        reports = [shard.report for shard in self._shards] or [ReadReport()]
        self.report = sum(reports[1:], reports[0])

    def close(self) -> None:
        """End the threads of all streams; there are no further batches. The position stays."""
        for shard in self._shards:
            shard.close()


def read_shards(data: Data, shards: Sequence[ShardState], how: Mapping[str, Any]) -> Iterator[PositionedBatch]:
    """For another process: without a batch, where each shard begins; then their batches in turn, each in one buffer,
    and where a shard ends, its report."""
    try:
        _open_streams(data, shards, how, False)
        for shard in shards:
            yield PositionedBatch(None, shard.position or {}, shard.report)
        for shard, batch in round_robin(shards):
            packed = None if batch is None else batch.packed()
            yield PositionedBatch(packed, shard.position or {}, shard.report)
            del batch, packed  # or they would stay until the next ones are there
    finally:
        for shard in shards:
            shard.close()


def merge_positions(positions: Sequence[Mapping[str, Any]]) -> ShardsPosition:
    """One position of the epoch from those of all ranks' streams; ValueError unless they have each shard of it once."""
    merged: dict[str, Any] = {}
    counts = set()
    for count, at in map(_parse_position, positions):
        counts.add(count)
        if twice := sorted(merged.keys() & at.keys()):
            raise ValueError(f"shard {twice[0]} is in the positions of two ranks")
        merged |= at
    if len(counts) != 1:
        raise ValueError(f"the positions are of epochs in {sorted(counts)} shards; merge those of one epoch")
    count = counts.pop()
    if missing := [index for index in range(count) if str(index) not in merged]:
        raise ValueError(f"no rank's position has shard {missing[0]} of {count}; merge the positions of all ranks")
    return rank_position({"shares": count, "at": merged}, 0, 1)


def rank_position(position: Mapping[str, Any], rank: int, world: int) -> ShardsPosition:
    """The part of one rank of `world` in an epoch's position, made by any number of ranks; ValueError if it is none."""
    count, at = _parse_position(position)
    mine = {str(index): at[str(index)] for index in range(rank, count, world) if str(index) in at}
    return dict(mine["0"]["position"]) if count == 1 and mine else {"shares": count, "at": mine}


def _parse_position(position: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    if not isinstance(position, Mapping):
        raise ValueError(f"{position!r} is not a position")
    if "shares" not in position:  # of a stream of all rows
        return 1, {"0": ShardState(0, 1, position=dict(position)).entry()}
    count: Any = position["shares"]
    at: Any = position.get("at")
    good = set(position) == {"shares", "at"} and isinstance(count, int) and count >= 1 and isinstance(at, Mapping)
    good = good and set(at) <= {str(index) for index in range(count)}
    if not good or any(set(entry) != set(_ENTRY) for entry in at.values()):
        raise ValueError(f"{position!r} is not a position of shards; use what `position` or `merge_positions` returned")
    return count, dict(at)
