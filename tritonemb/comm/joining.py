"""Joining the job that torchrun has started, also after it has started it again."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

MEETING = timedelta(minutes=10)  # processes start at different speeds
_POLL = 0.01  # seconds


def join(backend: str, timeout: timedelta) -> None:
    """`torch.distributed.init_process_group` from the environment, apart from what earlier attempts have left.

    torchrun restarts a job's processes (`--max-restarts`) beside the store that it keeps for them, where the addresses
    of those before still are: to connect to these fails (pytorch/pytorch#135712). So the ranks agree upon a new name
    first, under which nothing is there yet.

    Args:
        timeout: of the job's collectives.

    Raises:
        ValueError: the environment does not say how to meet.
        RuntimeError: a rank did not come in time.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=MEETING)))
    store.set_timeout(MEETING)
    name = agreed_name(store, rank, size, MEETING)
    dist.init_process_group(backend, store=PrefixStore(name, store), rank=rank, world_size=size, timeout=timeout)


def agreed_name(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name that rank 0 has just made up, on all ranks, whatever the store holds of earlier meetings.

    Each rank calls with a word of its own; rank 0 answers all calls, with the word and the name, until each rank has
    said the name.
    """
    last = time.monotonic() + timeout.total_seconds()
    others = range(1, size)
    calls, heard = [f"tritonemb/call/{r}" for r in others], [f"tritonemb/heard/{r}" for r in others]
    word = uuid.uuid4().hex
    if rank:
        store.set(calls[rank - 1], word)
        while True:
            answer = _read(store, [f"tritonemb/answer/{rank}"])[0].partition(":")
            if answer[0] == word:
                store.set(heard[rank - 1], answer[2])
                return answer[2]
            _pause(last, "rank 0 did not answer")
    while True:
        said = _read(store, heard)
        missing = [r for r, name in zip(others, said, strict=True) if name != word]
        if not missing:
            return word
        for r, call in zip(missing, _read(store, [calls[r - 1] for r in missing]), strict=True):
            if call:
                store.set(f"tritonemb/answer/{r}", f"{call}:{word}")
        _pause(last, f"ranks {missing} did not come")


def _read(store: Store, keys: list[str]) -> list[str]:
    """What stands there, "" where nothing does."""
    there = [key for key in keys if store.check([key])]
    found = dict(zip(there, store.multi_get(there), strict=True)) if there else {}
    return [found.get(key, b"").decode() for key in keys]


def _pause(last: float, problem: str) -> None:
    if time.monotonic() > last:
        raise RuntimeError(f"the job did not come together in time: {problem}")
    time.sleep(_POLL)
