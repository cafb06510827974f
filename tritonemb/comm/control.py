"""The control plane: rendezvous of the ranks, and which rank has failed or is silent."""

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
GRACE = 3.0  # seconds that ranks have to report
STORE_TIMEOUT = 5.0  # seconds in which the store has to answer
_RENDEZVOUS_POLL, _REPORT_POLL = 0.01, 0.1  # seconds between two looks at the store
_ALIVE = "alive"
_numbers = itertools.count(1)  # of the objects that this process has made
_LOST = re.compile(r"gloo|nccl|connection|timed? ?out|broken pipe", re.IGNORECASE)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def lost_contact(error: BaseException) -> bool:
    """Whether an exception is what a collective raises when a rank is gone or does not answer in time."""
    return isinstance(error, RuntimeError) and not isinstance(error, RankFailed) and bool(_LOST.search(str(error)))


def init_from_env(backend: str, timeout: timedelta) -> None:
    """`torch.distributed.init_process_group` from the environment, also when torchrun has restarted the job.

    torchrun restarts a job's processes (`--max-restarts`) beside the store that it keeps for them, which holds the
    addresses of the earlier ones: to connect to these fails (pytorch/pytorch#135712). So the ranks first agree on a new
    name, under which the store holds nothing. `timeout`: of the job's collectives. ValueError if the environment does
    not say where the store is, RuntimeError if a rank did not come in time.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not (text := os.environ.get(name, "0")).isdecimal() or int(text) >= 1 << 16:
            raise ValueError(f"the environment has {name}={text}, and not such a number; torchrun sets it")
    store, rank, size = next(iter(rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT)))
    store.set_timeout(RENDEZVOUS_TIMEOUT)
    name = rendezvous_name(store, rank, size, RENDEZVOUS_TIMEOUT)
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=size, timeout=timeout)


def rendezvous_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that rank 0 has just made up, on all ranks, whatever the store holds of an earlier rendezvous.

    Each rank calls with a word of its own; rank 0 answers all calls, with word and name, until each has confirmed it.
    """
    last = time.monotonic() + timeout.total_seconds()
    word = uuid.uuid4().hex
    if rank:
        store.set(f"tritonemb/call/{rank}", word)
        while True:
            called, _, name = _read(store, [f"tritonemb/answer/{rank}"])[0].partition(":")
            if called == word:
                store.set(f"tritonemb/heard/{rank}", name)
                return name
            _pause(last, "rank 0 did not answer")
    missing = list(range(1, size))
    while True:
        names = _read(store, [f"tritonemb/heard/{r}" for r in missing])
        missing = [r for r, name in zip(missing, names, strict=True) if name != word]
        if not missing:
            return word
        for r, call in zip(missing, _read(store, [f"tritonemb/call/{r}" for r in missing]), strict=True):
            if call:
                store.set(f"tritonemb/answer/{r}", f"{call}:{word}")
        _pause(last, f"ranks {missing} did not come")


def _read(store: Store, keys: list[str]) -> list[str]:
    there = [key for key in keys if store.check([key])]
    found = dict(zip(there, store.multi_get(there), strict=True)) if there else {}
    return [found.get(key, b"").decode() for key in keys]


def _pause(last: float, problem: str) -> None:
    if time.monotonic() > last:
        raise RuntimeError(f"the ranks did not meet in time: {problem}")
    time.sleep(_RENDEZVOUS_POLL)


class FailureReports:
    """What ranks report of themselves when a job ends early.

    Nothing is sent while all is well. A rank that ends with an error, or has lost contact to another one, says so in
    the job's store; a rank that has said nothing some seconds later is the one that is gone, or hangs. `group`: of all
    ranks of the job; they make it together, in the same order.
    """

    def __init__(self, group: RankGroup) -> None:
        self._rank, self._size, self._prefix = group.rank, group.size, f"tritonemb/failures/{next(_numbers)}"
        self._report = _ALIVE
        self._store: Any = None
        if group.size > 1:
            # A connection of its own: that of the job may be busy with a thread that waits.
            self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT))

    def report(self, error: BaseException | None = None, step: int = 0) -> None:
        """Tell the other ranks that this one ends: for an error of its own, or because another one has failed."""
        if error is not None and not isinstance(error, RankFailed):
            self._report = f"rank {self._rank} failed at step {step}: {describe(error)}"
        self._in_time(lambda: self._store.set(f"{self._prefix}/{self._rank}", self._report))

    def explain(self, error: BaseException, step: int) -> RankFailed:
        """An error that names the ranks that are to blame for the error of a collective."""
        self.report()
        deadline = time.monotonic() + GRACE
        keys = [f"{self._prefix}/{rank}" for rank in range(self._size)]
        while True:
            found = self._in_time(lambda: _read(self._store, keys)) or []
            failed = {rank: text for rank, text in enumerate(found) if text not in ("", _ALIVE)}
            if not found or failed or "" not in found or time.monotonic() > deadline:
                break
            time.sleep(_REPORT_POLL)
        first = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        if not found:
            return RankFailed(f"a rank of the job is gone or does not answer ({first}), nor does the job's store")
        silent = [rank for rank, text in enumerate(found) if not text]
        blamed = failed or {rank: f"rank {rank} is gone, or has not answered at step {step}" for rank in silent}
        if not blamed:
            return RankFailed(f"the ranks have lost contact at step {step}, and each is alive ({first})")
        return RankFailed(f"{join_names(blamed.values(), 8, '; ', '; ')} ({first})", tuple(blamed))

    def _in_time(self, function: Callable[[], T]) -> T | None:
        """What a call of the store returns; None if it does not answer: its host may be the one that is gone."""
        found: list[T] = []

        def call() -> None:
            with suppress(RuntimeError):  # the collectives say more
                found.append(function())

        if self._store is not None:
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(2 * STORE_TIMEOUT)
        return found[0] if found else None
