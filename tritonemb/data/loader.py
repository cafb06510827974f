"""Shards of the data of one rank, read round-robin, in this process or in worker processes.

An epoch keeps its number of shards S until it ends, even if it resumes on another number of ranks: rank r of W reads
the shards r, r + W, r + 2W, ... The positions of all shards are all that is needed to resume.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tritonemb.data.batch import Batch
from tritonemb.data.protocol import Batches, Data, Position, PositionedBatch, ReadReport, Split
from tritonemb.utils import on_error

# JSON-serializable. With one shard: the position of its stream. Else {"shares": S, "at": {shard: its entry}}.
ShardsPosition = dict[str, Any]

_ENTRY = ("batches", "ended", "rows", "skipped", "position")


@dataclass
class ShardState:
    """Progress of one shard of `count`."""

    index: int
    count: int
    batches: int = 0
    ended: bool = False
    report: ReadReport = field(default_factory=ReadReport)
    position: Position | None = None
    stream: Batches | None = None

    def attach(self, stream: Batches) -> None:
        """Read from this stream."""
        self.stream, self.report, self.position = stream, stream.report, dict(stream.position)

    def entry(self) -> dict[str, Any]:
        """Return the shard's entry of a position."""
        report = self.report
        return dict(zip(_ENTRY, (self.batches, self.ended, report.rows, report.skipped, self.position), strict=True))

    def close(self) -> None:
        """Close the stream, even while another thread waits for it; the position stays."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()


def open_shards(
    data: Data, split: Split, batch_size: int, rank: int = 0, world: int = 1, shards: int | None = None,
    positions: Mapping[str, Any] | None = None, *, pin_memory: bool = False, workers: Any = None, **kwargs: Any,
) -> Batches:  # fmt: skip
    """Open the batches of the shards rank, rank + world, ... of a split.

    Every shard of a rank uses the threads and the memory of a stream. Raise ValueError for an unknown rank or split, or
    a position with other shards.

    Args:
        shards: number of shards in the epoch; by default that of `positions`, else `world`.
        positions: positions to resume from: of a stream of this rank, or of all ranks, merged by `merge_positions`.
        pin_memory: allocate batches in page-locked memory.
        workers: `DataLoaderWorkers` that read instead of this process, or None. The batches are the same.
        kwargs: `seed`, `epoch` and `shuffle`; see `tritonemb.data.protocol.OpenOptions`.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}), got {rank}")
    default = world if shards is None else shards, None
    count, entries = default if positions is None else _parse_position(positions)
    if shards not in (None, count):
        raise ValueError(f"the position is of an epoch in {count} shards, which cannot resume in {shards}")
    if count < 1:
        raise ValueError(f"shards must be at least 1, got {count}")
    local_shards = [ShardState(index, count) for index in range(rank, count, world)]
    for shard in local_shards if entries is not None else ():
        if (entry := (entries or {}).get(str(shard.index))) is None:
            raise ValueError(f"the position lacks shard {shard.index} of {count}; merge the positions of all ranks")
        shard.batches, shard.ended, shard.position = entry["batches"], entry["ended"], entry["position"]
        shard.report = ReadReport(entry["rows"], entry["skipped"])
    # Open the streams of the shards that have not ended.
    open_all = partial(_open_streams, data) if workers is None else workers.open
    options = {"split": split, "batch_size": batch_size} | kwargs
    open_all([shard for shard in local_shards if not shard.ended], options, pin_memory)
    if count == 1 and local_shards and local_shards[0].stream is not None:
        return local_shards[0].stream
    return ShardedStream(count, local_shards)


def _open_streams(data: Data, shards: Sequence[ShardState], options: Mapping[str, Any], pin_memory: bool) -> None:
    with ExitStack() as stack:
        for shard in shards:
            shard_options: dict[str, Any] = {"position": shard.position, "shard": (shard.index, shard.count)}
            shard.attach(stack.enter_context(data.open(**options, **shard_options, pin_memory=pin_memory)))
        stack.pop_all()


def round_robin(shards: Sequence[ShardState]) -> Iterator[tuple[ShardState, Batch | None]]:
    """Yield the next batch of the shard that has returned the fewest batches, the first of these; yield None when a
    shard ends, or another thread closes it.

    The order depends on the shards' positions only, and is the same for a subset of the shards.
    """
    while active_shards := [shard for shard in shards if shard.stream is not None]:
        shard = min(active_shards, key=lambda shard: (shard.batches, shard.index))
        stream = shard.stream
        batch = None if stream is None else next(stream, None)
        if stream is not None and batch is not None:
            shard.batches, shard.report, shard.position = shard.batches + 1, stream.report, dict(stream.position)
        elif stream is not None and shard.stream is not None:
            shard.ended, shard.report, shard.position, shard.stream = True, stream.report, None, None
        yield shard, batch


class ShardedStream(Batches):
    """Batches of a rank's shards (`count` in the epoch), in the order of `round_robin`. Position and report cover all
    shards."""

    def __init__(self, count: int, shards: list[ShardState]) -> None:
        self._count, self._shards, self._round_robin = count, shards, round_robin(shards)
        self._update_position()

    def __next__(self) -> Batch:
        try:
            with on_error(self.close):
                return next(batch for _, batch in self._round_robin if batch is not None)
        finally:
            self._update_position()

    def _update_position(self) -> None:
        self.position = {"shares": self._count, "at": {str(shard.index): shard.entry() for shard in self._shards}}
        reports = [shard.report for shard in self._shards] or [ReadReport()]
        self.report = sum(reports[1:], reports[0])

    def close(self) -> None:
        """Stop the threads of all streams; no further batches are returned. The position stays."""
        for shard in self._shards:
            shard.close()


def read_shards(data: Data, shards: Sequence[ShardState], options: Mapping[str, Any]) -> Iterator[PositionedBatch]:
    """Read shards for another process: yield the first position of each shard, without a batch; then their batches
    round-robin, each in one buffer, and the report of a shard when it ends."""
    try:
        _open_streams(data, shards, options, False)
        for shard in shards:
            yield PositionedBatch(None, shard.position or {}, shard.report)
        for shard, batch in round_robin(shards):
            packed = None if batch is None else batch.packed()
            yield PositionedBatch(packed, shard.position or {}, shard.report)
            del batch, packed  # free them while the next batch is read
    finally:
        for shard in shards:
            shard.close()


def merge_positions(positions: Sequence[Mapping[str, Any]]) -> ShardsPosition:
    """Merge the positions of all ranks' streams into a position of the epoch; raise ValueError unless each shard is in
    exactly one."""
    merged_entries: dict[str, Any] = {}
    counts = set()
    for count, entries in map(_parse_position, positions):
        counts.add(count)
        if duplicates := sorted(merged_entries.keys() & entries.keys()):
            raise ValueError(f"shard {duplicates[0]} is in the positions of two ranks")
        merged_entries |= entries
    if len(counts) != 1:
        raise ValueError(f"the positions are of epochs in {sorted(counts)} shards; merge those of one epoch")
    count = counts.pop()
    if missing := [index for index in range(count) if str(index) not in merged_entries]:
        raise ValueError(f"no rank's position has shard {missing[0]} of {count}; merge the positions of all ranks")
    return rank_position({"shares": count, "at": merged_entries}, 0, 1)


def rank_position(position: Mapping[str, Any], rank: int, world: int) -> ShardsPosition:
    """Return one rank's shards of an epoch's position, saved by any number of ranks; raise ValueError if invalid."""
    count, entries = _parse_position(position)
    local_entries = {str(index): entries[str(index)] for index in range(rank, count, world) if str(index) in entries}
    return (
        dict(local_entries["0"]["position"]) if count == 1 and local_entries else {"shares": count, "at": local_entries}
    )


def _parse_position(position: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    if not isinstance(position, Mapping):
        raise ValueError(f"{position!r} is not a position")
    if "shares" not in position:  # position of a stream of all rows
        return 1, {"0": ShardState(0, 1, position=dict(position)).entry()}
    count: Any = position["shares"]
    entries: Any = position.get("at")
    valid = set(position) == {"shares", "at"} and isinstance(count, int) and count >= 1 and isinstance(entries, Mapping)
    valid = valid and set(entries) <= {str(index) for index in range(count)}
    if not valid or any(set(entry) != set(_ENTRY) for entry in entries.values()):
        raise ValueError(f"{position!r} is not a position of shards; pass a value of `position` or `merge_positions`")
    return count, dict(entries)
