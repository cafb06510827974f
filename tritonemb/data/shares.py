"""What one rank of a job reads: some of the shares of a data set, batch by batch in turn.

An epoch that began with S shares keeps them until it ends, on however many ranks it goes on: rank r of W has the shares
r, r + W, r + 2W, ... Where it goes on after an interruption is told by the positions of all shares, by nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tritonemb.data.batch import Batch
from tritonemb.data.readers.stream import RemoteStream
from tritonemb.data.source import WHOLE, Batches, Data, ReadReport, Share, Split

PROBLEMS_KEPT = 10

SharesPosition = dict[str, Any]
"""JSON-able. Of an epoch in one share: that of its stream. Else {"shares": S, "at": {share: where it stands}}."""


def open_shares(
    data: Data,
    split: Split,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    shares: int | None = None,
    positions: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = False,
    pin_memory: bool = False,
    readers: str | None = None,
) -> Batches:
    """The batches of the shares rank, rank + world, ... of a split.

    One of several shares that are opened by a rank has as many threads and as much memory as a stream has otherwise.

    Args:
        shares: into how many the rows are cut: `world` if not given, or what `positions` says.
        positions: of a stream of this rank, or of all ranks by `merge_positions`: go on there.
        seed, epoch, shuffle, pin_memory: see `tritonemb.data.source.Data.open`.
        readers: the address of `ReaderProcesses` that read in place of this process.

    Raises:
        ValueError: no such rank or split; a position that is not one of these shares.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}), got {rank}")
    at: dict[str, Any] = {}
    if positions is not None:
        found, at = _parsed(positions)
        if shares not in (None, found):
            raise ValueError(f"the position is of an epoch in {found} shares, which can not go on in {shares}")
        shares = found
    shares = world if shares is None else shares
    if shares < 1:
        raise ValueError(f"shares must be at least 1, got {shares}")

    def opened(share: Share, position: dict[str, int] | None) -> Batches:
        how = {"seed": seed, "epoch": epoch, "shuffle": shuffle, "position": position, "pin_memory": pin_memory}
        if readers is not None:
            return RemoteStream(readers, split, batch_size, share=share, **how)  # type: ignore[arg-type]
        return data.open(split, batch_size, **how, **({} if share == WHOLE else {"share": share}))  # type: ignore[arg-type]

    mine = [_Share(index) for index in range(rank, shares, world)]
    for share in mine if positions is not None else ():
        if str(share.index) not in at:
            raise ValueError(f"the position lacks share {share.index} of {shares}; merge the positions of all ranks")
        share.go_on(at[str(share.index)])
    if shares == 1 and rank == 0:
        return opened(WHOLE, mine[0].position)
    return RankStream(shares, mine, opened)


@dataclass
class _Share:
    """Where one share stands; `report` and `position` are those at its beginning until its stream has been opened."""

    index: int
    batches: int = 0
    ended: bool = False
    report: ReadReport = field(default_factory=ReadReport)
    position: dict[str, int] | None = None
    stream: Batches | None = None

    def go_on(self, entry: Mapping[str, Any]) -> None:
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

    def end(self) -> None:
        assert self.stream is not None
        self.report, self.position, self.ended = self.stream.report, None, True
        self.stream.close()
        self.stream = None


class RankStream:
    """The batches of a rank's shares, each from the share that has given fewest, the first of those: so what comes next
    depends on nothing but where the shares stand.

    Args:
        count: shares of the epoch.
        shares: those of this rank; none of them may be left.
        opened: the stream of a share, from its beginning or from a position.
    """

    def __init__(
        self, count: int, shares: list[_Share], opened: Callable[[Share, dict[str, int] | None], Batches]
    ) -> None:
        self._count, self._shares = count, shares
        with ExitStack() as failed:
            for share in shares:
                if not share.ended:
                    share.stream = failed.enter_context(opened((share.index, count), share.position))
            failed.pop_all()

    @property
    def position(self) -> SharesPosition:
        """Of all shares of this rank: where the batches after the last one returned begin."""
        return {"shares": self._count, "at": {str(share.index): share.entry() for share in self._shares}}

    @property
    def report(self) -> ReadReport:
        """Of all shares of this rank."""
        reports = [share.current_report() for share in self._shares]
        reasons: Counter[str] = Counter()
        for report in reports:
            reasons.update(dict(report.reasons))
        return ReadReport(
            sum(report.rows for report in reports),
            sum(report.skipped for report in reports),
            tuple(problem for report in reports for problem in report.problems)[:PROBLEMS_KEPT],
            tuple(sorted(reasons.items())),
        )

    def __iter__(self) -> RankStream:
        return self

    def __next__(self) -> Batch:
        while True:
            left = [share for share in self._shares if share.stream is not None]
            if not left:
                raise StopIteration
            share = min(left, key=lambda share: (share.batches, share.index))
            assert share.stream is not None
            try:
                batch = next(share.stream, None)
            except BaseException:
                self.close()
                raise
            if batch is not None:
                share.batches += 1
                return batch
            share.end()

    def close(self) -> None:
        """End the threads of all streams; further batches there are none. The position stays."""
        for share in self._shares:
            if share.stream is not None:
                share.report, share.position = share.stream.report, dict(share.stream.position)
                share.stream.close()
                share.stream = None

    def __enter__(self) -> RankStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def merge_positions(positions: Sequence[Mapping[str, Any]]) -> SharesPosition:
    """One position of the epoch from those of all ranks' streams, in any order.

    Raises:
        ValueError: they are not of one epoch, or not of all its shares, once each.
    """
    merged: dict[str, Any] = {}
    counts = set()
    for position in positions:
        count, at = _parsed(position)
        counts.add(count)
        if twice := sorted(merged.keys() & at.keys()):
            raise ValueError(f"share {twice[0]} is in the positions of two ranks")
        merged |= at
    if len(counts) != 1:
        raise ValueError(f"the positions are of epochs in {sorted(counts)} shares; merge those of one epoch")
    count = counts.pop()
    if missing := [index for index in range(count) if str(index) not in merged]:
        raise ValueError(f"no rank's position has share {missing[0]} of {count}; merge the positions of all ranks")
    if count == 1:
        return dict(merged["0"]["position"])
    return {"shares": count, "at": {str(index): merged[str(index)] for index in range(count)}}


def rank_position(position: Mapping[str, Any], rank: int, world: int) -> SharesPosition:
    """Of an epoch's position, the part of one rank of `world`, which need not be as many as have made it.

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
    """Number of shares, and where those stand that the position has."""
    if not isinstance(position, Mapping):
        raise ValueError(f"{position!r} is not a position")
    if "shares" not in position:  # of a stream of all rows
        return 1, {"0": {"batches": 0, "ended": False, "rows": 0, "skipped": 0, "position": dict(position)}}
    count, at = position["shares"], position.get("at")
    good = isinstance(count, int) and count >= 1 and isinstance(at, Mapping) and set(position) == {"shares", "at"}
    entries = dict(at) if good and isinstance(at, Mapping) else {}
    known = {str(index) for index in range(count)} if good else set()
    if not good or not set(entries) <= known or any(set(entry) != _ENTRY for entry in entries.values()):
        raise ValueError(f"{position!r} is not a position of shares; use what `position` or `merge_positions` gave")
    return count, entries
