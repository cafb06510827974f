"""The control plane: rendezvous of the ranks, and reports of failed ranks."""

import itertools
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tritonemb.comm.group import RankFailed, RankGroup
from tritonemb.utils import join_names

T = TypeVar("T")
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)  # processes start at different speeds
GRACE = 3.0  # seconds for ranks to report
STORE_TIMEOUT = 5.0  # seconds for the store to answer
_RENDEZVOUS_POLL, _REPORT_POLL = 0.01, 0.1  # seconds between reads of the store
_ALIVE = "alive"
_numbers = itertools.count(1)  # of this process's `FailureReports`; the same on all ranks
_LOST = re.compile(r"gloo|nccl|connection|timed? ?out|broken pipe", re.IGNORECASE)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def lost_contact(error: BaseException) -> bool:
    """Return whether a collective raised the exception because a rank has exited or did not answer in time."""
    return isinstance(error, RuntimeError) and not isinstance(error, RankFailed) and bool(_LOST.search(str(error)))


def init_from_env(backend: str, timeout: timedelta) -> None:
    """Call `torch.distributed.init_process_group` from the environment, also after torchrun has restarted the job.

    torchrun restarts a job's processes (`--max-restarts`) with the same store, which still has the addresses of the
    previous processes: connecting to them fails (pytorch/pytorch#135712). So the ranks first agree on a new prefix of
    the store's keys. `timeout`: of the job's collectives. Raise ValueError if the environment has no address of the
    store, RuntimeError if a rank did not arrive in time.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not (text := os.environ.get(name, "0")).isdecimal() or int(text) >= 1 << 16:
            raise ValueError(f"the environment has {name}={text}, expected an integer below 65536; torchrun sets it")
    store, rank, size = next(iter(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT)))
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    name = rendezvous_name(store, rank, size, RENDEZVOUS_TIMEOUT)
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=size, timeout=timeout)


def rendezvous_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a new random name from rank 0 on all ranks, whatever keys the store has of previous rendezvous.

    Each rank sends a random word. Rank 0 replies with that word and the name, until every rank has confirmed the name.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    word = uuid.uuid4().hex
    if rank:
        store.set(f"tritonemb/call/{rank}", word)
        while True:
            called, _, name = _read(store, [f"tritonemb/answer/{rank}"])[0].partition(":")
            if called == word:
                store.set(f"tritonemb/heard/{rank}", name)
                return name
            _pause(deadline, "rank 0 did not answer")
    missing = list(range(1, size))
    while True:
        names = _read(store, [f"tritonemb/heard/{r}" for r in missing])
        missing = [r for r, name in zip(missing, names, strict=True) if name != word]
        if not missing:
            return word
        for r, call in zip(missing, _read(store, [f"tritonemb/call/{r}" for r in missing]), strict=True):
            if call:
                store.set(f"tritonemb/answer/{r}", f"{call}:{word}")
        _pause(deadline, f"ranks {missing} did not come")


def _read(store: Store, keys: list[str]) -> list[str]:
    """Return the values of keys; empty for missing keys."""
    present_keys = [key for key in keys if store.check([key])]
    values = dict(zip(present_keys, store.multi_get(present_keys), strict=True)) if present_keys else {}
    return [values.get(key, b"").decode() for key in keys]


def _pause(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"the ranks did not rendezvous in time: {problem}")
    time.sleep(_RENDEZVOUS_POLL)


class FailureReports:
    """Reports of ranks on why a job ends early.

    Nothing is sent without a failure. A rank that fails, or loses contact to another rank, reports that in the job's
    store; a rank without a report some seconds later has exited, or hangs. Creating the object is a collective of
    `group`, all ranks of the job.
    """

    def __init__(self, group: RankGroup) -> None:
        self._rank, self._size, self._prefix = group.rank, group.size, f"tritonemb/failures/{next(_numbers)}"
        self._report = _ALIVE
        self._store: Any = None
        if group.size > 1:
            # A separate connection: a waiting thread may block the job's.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT))

    def report(self, error: BaseException | None = None, step: int = 0) -> None:
        """Report that this rank ends: because of its own `error`, or another rank's failure."""
        if error is not None and not isinstance(error, RankFailed):
            self._report = f"rank {self._rank} failed at step {step}: {describe(error)}"
        self._in_time(lambda: self._store.set(f"{self._prefix}/{self._rank}", self._report))

    def explain(self, error: BaseException, step: int) -> RankFailed:
        """Return an error that names the ranks that caused the error of a collective."""
        self.report()
        deadline = time.monotonic() + GRACE
        keys = [f"{self._prefix}/{rank}" for rank in range(self._size)]
        while True:
            reports = self._in_time(lambda: _read(self._store, keys)) or []
            failed = {rank: text for rank, text in enumerate(reports) if text not in ("", _ALIVE)}
            if not reports or failed or "" not in reports or time.monotonic() > deadline:
                break
            time.sleep(_REPORT_POLL)
        first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        if not reports:
            return RankFailed(
                f"a rank of the job has exited or does not answer ({first}), and the job's store does not answer"
            )
        silent = [rank for rank, text in enumerate(reports) if not text]
        blamed = failed or {rank: f"rank {rank} has exited, or has not answered at step {step}" for rank in silent}
        if not blamed:
            return RankFailed(f"the ranks have lost contact at step {step}, and each is alive ({first})")
        return RankFailed(f"{join_names(blamed.values(), 8, '; ', '; ')} ({first})", tuple(blamed))

    def _in_time(self, function: Callable[[], T]) -> T | None:
        """Return the result of a call of the store; None if it does not answer, because its host may be gone."""
        results: list[T] = []

        def call() -> None:
            with suppress(RuntimeError):  # the collectives say more
                results.append(function())

        if self._store is not None:
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(2 * STORE_TIMEOUT)
        return results[0] if results else None
