"""The control plane: rendezvous of the ranks, consensus before each step, and which rank has failed or is silent."""

from __future__ import annotations

import json
import math
import re
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tritonemb.comm.group import RankGroup

RankState = Literal["ready", "over", "failed"]
_STATES: tuple[RankState, ...] = get_args(RankState)
_LOST = re.compile(r"gloo|nccl|connection|timed? ?out|broken pipe", re.IGNORECASE)


class RankFailed(RuntimeError):
    """Other ranks of the job have failed or do not answer, so this one cannot continue.

    Attributes:
        ranks: which.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[RankFailed], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


@dataclass(frozen=True)
class Round:
    """What the ranks have agreed on.

    Args:
        rows: samples of each rank's batch, in the order of ranks.
        batches: the most batches that a rank has.
        over: no rank has more data.
        signal: the largest number of a signal that a rank got, 0 for none.
        clock: that of rank 0.
    """

    rows: tuple[int, ...]
    batches: int = 1
    over: bool = False
    signal: int = 0
    clock: int = 0

    @property
    def total(self) -> int:
        """Samples of all ranks together."""
        return sum(self.rows)


class Consensus:
    """Rounds in which the ranks tell each other what they are about to do, before any does it.

    A round is one small message on the CPU, over connections of its own, so that a thread may run it.

    Args:
        group: the ranks; all of them make this object together.
        timeout: how long to wait for a rank; torch's default if not given.
    """

    def __init__(self, group: RankGroup, timeout: timedelta | None = None) -> None:
        self._group = group.duplicate("gloo", timeout)

    def next(
        self,
        rows: int,
        state: RankState = "ready",
        note: str = "",
        *,
        batches: int = 1,
        signal: int = 0,
        clock: int = 0,
    ) -> Round:
        """Run a round.

        Args:
            rows: samples of this rank's batch.
            state: "over" if it has run out of data, "failed" if it cannot continue.
            note: why it has failed.
            batches: the number of batches that hold the samples.
            signal: number of a signal that asks it to stop.
            clock: any number; all ranks get that of rank 0.

        Raises:
            RankFailed: some rank has failed; on all ranks, with their notes.
            RuntimeError: a rank has not answered in time, or is gone.
        """
        words = torch.tensor([rows, batches, _STATES.index(state), signal, clock], dtype=torch.int64)
        entries = self._group.all_gather(words, "consensus").tolist()
        states = [_STATES[entry[2]] for entry in entries]
        if "failed" in states:
            notes = self._group.all_gather_object(note)  # all ranks get here, for the last time
            failed = tuple(rank for rank, each in enumerate(states) if each == "failed")
            raise RankFailed("; ".join(f"rank {rank} has failed: {notes[rank]}" for rank in failed), failed)
        return Round(
            rows=tuple(entry[0] for entry in entries),
            batches=max(entry[1] for entry in entries),
            over=all(each == "over" for each in states),
            signal=max(entry[3] for entry in entries),
            clock=entries[0][4],
        )


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def lost_contact(error: BaseException) -> bool:
    """Whether an exception is what a collective raises when a rank is gone or does not answer in time."""
    return isinstance(error, RuntimeError) and not isinstance(error, RankFailed) and bool(_LOST.search(str(error)))


RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # processes start at different speeds
_POLL = 0.01  # seconds


def init_from_env(backend: str, timeout: timedelta) -> None:
    """`torch.distributed.init_process_group` from the environment, also when torchrun has restarted the job.

    torchrun restarts a job's processes (`--max-restarts`) beside the store that it keeps for them, which holds the
    addresses of the earlier ones: to connect to these fails (pytorch/pytorch#135712). So the ranks first agree on a new
    name, under which the store holds nothing.

    Args:
        timeout: of the job's collectives.

    Raises:
        ValueError: the environment does not say where the store is.
        RuntimeError: a rank did not come in time.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT)))
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    name = rendezvous_name(store, rank, size, RENDEZVOUS_TIMEOUT)
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=size, timeout=timeout)


def rendezvous_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that rank 0 has just made up, on all ranks, whatever the store holds of an earlier rendezvous.

    Each rank calls with a word of its own; rank 0 answers all calls, with the word and the name, until each rank has
    confirmed the name.
    """
    last = time.monotonic() + timeout.total_seconds()
    others = range(1, size)
    calls, confirmed = [f"tritonemb/call/{r}" for r in others], [f"tritonemb/heard/{r}" for r in others]
    word = uuid.uuid4().hex
    if rank:
        store.set(calls[rank - 1], word)
        while True:
            answer = _read(store, [f"tritonemb/answer/{rank}"])[0].partition(":")
            if answer[0] == word:
                store.set(confirmed[rank - 1], answer[2])
                return answer[2]
            _pause(last, "rank 0 did not answer")
    while True:
        names = _read(store, confirmed)
        missing = [r for r, name in zip(others, names, strict=True) if name != word]
        if not missing:
            return word
        for r, call in zip(missing, _read(store, [calls[r - 1] for r in missing]), strict=True):
            if call:
                store.set(f"tritonemb/answer/{r}", f"{call}:{word}")
        _pause(last, f"ranks {missing} did not come")


def _read(store: Store, keys: list[str]) -> list[str]:
    """The values of keys, "" where there is none."""
    there = [key for key in keys if store.check([key])]
    found = dict(zip(there, store.multi_get(there), strict=True)) if there else {}
    return [found.get(key, b"").decode() for key in keys]


def _pause(last: float, problem: str) -> None:
    if time.monotonic() > last:
        raise RuntimeError(f"the ranks did not meet in time: {problem}")
    time.sleep(_POLL)


Phase = Literal["reading", "exchanging", "waiting", "computing", "evaluating", "saving"]
_ORDER = {"reading": 0, "exchanging": 1}  # within a step that is being prepared
_GONE = re.compile(r"clos|reset|broken|refused", re.IGNORECASE)  # what is said of connections
INTERVAL = 1.0  # seconds between two signs
SILENCE = 3.0  # seconds without one
PATIENCE = 5.0  # seconds in which the store has to answer
MOST_NAMED = 8
_made = 0


@dataclass(frozen=True)
class Sign:
    """What a rank last said of itself.

    Args:
        step: that it trains.
        phase: what it does for that step.
        ahead: the step that it prepares meanwhile.
        ahead_phase: what it does for that one.
        seconds: since it began with `phase`, and with `ahead_phase`.
        silent: seconds since it said so, by the clocks of both ranks.
        failure: its exception, if it has failed.
        blames: ranks for whose sake it has ended.
    """

    rank: int
    step: int = 0
    phase: str = ""
    ahead: int = 0
    ahead_phase: str = ""
    seconds: tuple[float, float] = (0.0, 0.0)
    silent: float = 0.0
    failure: str = ""
    blames: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.failure:
            return f"rank {self.rank} failed at step {self.step}: {self.failure}"
        if self.silent == math.inf:
            return f"rank {self.rank} was never heard of"
        doing = f"{self.phase} step {self.step} for {self.seconds[0]:.1f} s" if self.phase else "about to begin"
        if self.ahead_phase:
            doing += f", {self.ahead_phase} for step {self.ahead} for {self.seconds[1]:.1f} s"
        heard = f"not heard of for {self.silent:.1f} s, last" if self.is_silent else "alive"
        return f"rank {self.rank}: {heard} {doing}"

    @property
    def is_silent(self) -> bool:
        return self.silent > SILENCE


class Heartbeat:
    """Tells the job's store about once a second what this rank is doing, in a thread of its own; one rank tells nobody.

    Args:
        group: of all ranks of the job; they make it together, in the same order.
    """

    def __init__(self, group: RankGroup) -> None:
        global _made
        _made += 1
        self._rank, self._size, self._prefix = group.rank, group.size, f"tritonemb/alive/{_made}"
        self._lock, self._wake, self._stop = threading.Lock(), threading.Event(), False
        self._doing: dict[str, tuple[int, str, float]] = {}
        self._failure = ""
        self._blames: tuple[int, ...] = ()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        if self._size > 1:
            # A connection of its own: that of the job may be busy with somebody who waits.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._store.set_timeout(timedelta(seconds=PATIENCE))
            self._thread = threading.Thread(target=self._beat, name="tritonemb-alive", daemon=True)
            self._thread.start()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def note(self, phase: Phase, step: int, *, ahead: bool = False) -> None:
        """This rank begins with a phase of a step; `ahead`: beside the one that it trains."""
        with self._lock:
            first = not self._doing
            self._doing["ahead" if ahead else "main"] = (step, phase, time.monotonic())
        if first:
            self._wake.set()

    def fail(self, error: BaseException) -> None:
        """Say at once that this rank ends with an error, for those that will miss it."""
        if isinstance(error, RankFailed):
            self._blames = error.ranks
        else:
            self._failure = describe(error)
        if self._thread is not None:
            self.close()
            self._try(self._tell)

    def close(self) -> None:
        """End the thread. What was said last stays to be read."""
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def explain(self, error: BaseException) -> RankFailed:
        """An error that says which ranks are to blame for a collective's error, as far as can be told."""
        first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        guilty: list[Sign] = []
        last = time.monotonic() + SILENCE + INTERVAL
        while True:
            signs = self._read()
            if not signs:
                return RankFailed(f"a rank of the job is gone or does not answer ({first}), nor does the job's store")
            guilty, sure = lagging([sign for sign in signs if sign.rank != self._rank], self._own())
            # Who was killed a moment ago is silent only after a while.
            if sure or not _GONE.search(str(error)) or time.monotonic() > last:
                break
            time.sleep(INTERVAL / 2)
        what = "; ".join(map(str, guilty[:MOST_NAMED]))
        more = f"; and {len(guilty) - MOST_NAMED} more" if len(guilty) > MOST_NAMED else ""
        return RankFailed(f"{what}{more} ({first})", tuple(sign.rank for sign in guilty))

    def signs(self) -> list[Sign]:
        """The last sign of every rank.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = [f"{self._prefix}/{rank}" for rank in range(self._size)]
        there = [key for key in keys if self._store.check([key])]
        texts = dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}
        return [_sign(rank, texts.get(key), time.time()) for rank, key in enumerate(keys)]

    def _read(self) -> list[Sign]:
        """`signs`, or none if the store does not answer: its host may be the one that is gone."""
        signs: list[Sign] = []
        reader = threading.Thread(target=lambda: signs.extend(self._try(self.signs) or ()), daemon=True)
        reader.start()
        reader.join(2 * PATIENCE)
        return list(signs)

    def _own(self) -> Sign:
        return _sign(self._rank, self._text().encode(), time.time())

    def _beat(self) -> None:
        while not self._stop:
            self._try(self._tell)
            self._wake.wait(INTERVAL)
            self._wake.clear()

    def _tell(self) -> None:
        self._store.set(f"{self._prefix}/{self._rank}", self._text())

    def _text(self) -> str:
        now = time.monotonic()
        with self._lock:
            doing = {name: [step, phase, now - since] for name, (step, phase, since) in self._doing.items()}
        return json.dumps({"time": time.time(), "failure": self._failure, "blames": self._blames, **doing})

    @staticmethod
    def _try(call: Any) -> Any:
        """A store that does not answer is for the collectives to fail on, which say more."""
        try:
            return call()
        except RuntimeError:
            return None


def lagging(others: list[Sign], own: Sign) -> tuple[list[Sign], bool]:
    """Those to blame, and whether that is sure: who failed, else who is silent, else who is behind the others."""
    blamed = {rank for sign in others for rank in sign.blames}
    for guilty in (
        [sign for sign in others if sign.failure],
        [sign for sign in others if sign.rank in blamed],
        [sign for sign in others if sign.is_silent],
    ):
        if guilty:
            return guilty, True
    places = {sign.rank: _place(sign) for sign in [*others, own]}
    furthest = max(places.values())
    return [sign for sign in others if places[sign.rank] < furthest] or others, False


def _place(sign: Sign) -> tuple[int, int]:
    return sign.ahead, _ORDER.get(sign.ahead_phase, 2)


def _sign(rank: int, text: bytes | None, now: float) -> Sign:
    if text is None:
        return Sign(rank, silent=math.inf)
    told = json.loads(text)
    step, phase, seconds = told.get("main", [0, "", 0.0])
    ahead, ahead_phase, ahead_seconds = told.get("ahead", [0, "", 0.0])
    silent = max(now - told["time"], 0.0)
    # A rank that is alive has gone on with what it was doing since it said so.
    times = (seconds + silent, ahead_seconds + silent)
    return Sign(rank, step, phase, ahead, ahead_phase, times, silent, told["failure"], tuple(told["blames"]))
