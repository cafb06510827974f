"""Which rank has failed or does not answer: the time-outs and connection errors of a process group do not say so.

Nothing is sent while all is well. A rank that ends with an error, or has lost contact to another one, says so in the
job's store; a rank that has said nothing some seconds later is the one that is gone, or hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tritonemb.comm.agreement import RankFailed, describe
from tritonemb.comm.group import Group

T = TypeVar("T")
GRACE = 3.0  # seconds that ranks have to report
POLL = 0.1  # seconds between two looks at the store
STORE_TIMEOUT = 5.0  # seconds in which the store has to answer
MOST_NAMED = 8
_made = 0


class FailureReports:
    """What ranks report of themselves when a job ends early.

    Args:
        group: of all ranks of the job; they make it together, in the same order.
    """

    def __init__(self, group: Group) -> None:
        global _made
        _made += 1
        self._rank, self._size, self._prefix = group.rank, group.size, f"tritonemb/failures/{_made}"
        self._failure = ""
        self._store: Any = None
        if group.size > 1:
            # A connection of its own: that of the job may be busy with a thread that waits.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT))

    def report(self, error: BaseException | None = None, step: int = 0) -> None:
        """Tell the other ranks that this one ends: for an error of its own, or because another one has failed."""
        if error is not None and not isinstance(error, RankFailed):
            self._failure = f"rank {self._rank} failed at step {step}: {describe(error)}"
        self._in_time(self._write)

    def explain(self, error: BaseException, step: int) -> RankFailed:
        """An error that names the ranks that are to blame for the error of a collective."""
        self.report()
        deadline = time.monotonic() + GRACE
        while True:
            found: list[str | None] = self._in_time(self._read) or []
            if not found or any(found) or None not in found or time.monotonic() > deadline:
                break
            time.sleep(POLL)
        first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        if not found:
            return RankFailed(f"a rank of the job is gone or does not answer ({first}), nor does the job's store")
        blamed = {rank: text for rank, text in enumerate(found) if text} or {
            rank: f"rank {rank} is gone, or has not answered at step {step}"
            for rank, text in enumerate(found)
            if text is None
        }
        if not blamed:
            return RankFailed(f"the ranks have lost contact at step {step}, and each is alive ({first})")
        named = "; ".join(list(blamed.values())[:MOST_NAMED])
        more = f"; and {len(blamed) - MOST_NAMED} more" if len(blamed) > MOST_NAMED else ""
        return RankFailed(f"{named}{more} ({first})", tuple(blamed))

    def _write(self) -> None:
        self._store.set(f"{self._prefix}/{self._rank}", self._failure)

    def _read(self) -> list[str | None]:
        """Every rank's report: the failure, "" where it ends because of another rank, None where there is none."""
        keys = [f"{self._prefix}/{rank}" for rank in range(self._size)]
        there = [key for key in keys if self._store.check([key])]
        texts = dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}
        return [texts[key].decode() if key in texts else None for key in keys]

    def _in_time(self, function: Callable[[], T]) -> T | None:
        """What a call of the store returns; None if it does not answer: its host may be the one that is gone."""
        found: list[T] = []

        def call() -> None:
            try:
                found.append(function())
            except RuntimeError:  # the collectives say more
                return

        if self._store is not None:
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(2 * STORE_TIMEOUT)
        return found[0] if found else None
