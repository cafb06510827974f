"""What every rank is about to do, known to all of them before any does it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch

from tritonemb.comm.group import Group

State = Literal["ready", "over", "failed"]
_STATES: tuple[State, ...] = get_args(State)
_LOST = re.compile(r"gloo|nccl|connection|timed? ?out|broken pipe", re.IGNORECASE)


class RankFailed(RuntimeError):
    """Other ranks of the job have failed or answer no more, so this one cannot go on.

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
    """What the ranks have told each other.

    Args:
        rows: samples that each rank brings, in the order of ranks.
        batches: the most batches that a rank brings.
        over: none of them has any more.
        signal: the largest that one of them was sent, 0 for none.
        clock: rank 0's.
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


class Agreement:
    """Rounds in which each rank says what it brings and hears what the others bring.

    A round is one small message on the CPU, over channels of the agreement's own, so that it may be held in a thread.

    Args:
        group: who takes part; all of them make the agreement together.
        timeout: how long to wait for a rank; torch's default if not given.
    """

    def __init__(self, group: Group, timeout: timedelta | None = None) -> None:
        self._group = group.twin("gloo", timeout)

    def next(
        self, rows: int, state: State = "ready", note: str = "", *, batches: int = 1, signal: int = 0, clock: int = 0
    ) -> Round:
        """Hold a round.

        Args:
            rows: samples that this rank brings.
            state: "over" if it has run out of data, "failed" if it cannot go on.
            note: why it has failed.
            batches: in how many batches the samples come.
            signal: number of a signal that asks it to stop.
            clock: any number; all ranks get that of rank 0.

        Raises:
            RankFailed: some rank has failed, on all of them, with their notes.
            RuntimeError: a rank has not answered in time, or is gone.
        """
        words = torch.tensor([rows, batches, _STATES.index(state), signal, clock], dtype=torch.int64)
        heard = self._group.all_gather(words, "agreement").tolist()
        states = [_STATES[entry[2]] for entry in heard]
        if "failed" in states:
            notes = self._group.all_gather_object(note)  # all ranks are here, and for the last time
            failed = tuple(rank for rank, told in enumerate(states) if told == "failed")
            raise RankFailed("; ".join(f"rank {rank} has failed: {notes[rank]}" for rank in failed), failed)
        return Round(
            rows=tuple(entry[0] for entry in heard),
            batches=max(entry[1] for entry in heard),
            over=all(told == "over" for told in states),
            signal=max(entry[3] for entry in heard),
            clock=heard[0][4],
        )


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def lost_contact(error: BaseException) -> bool:
    """Whether an exception is what a collective raises when a rank is gone or does not answer in time."""
    return isinstance(error, RuntimeError) and not isinstance(error, RankFailed) and bool(_LOST.search(str(error)))
