"""The threads that CPU kernels run on: as many as `torch.get_num_threads()`, the caller one of them.

Where torch's own threads are GNU OpenMP's (its Linux wheels), kernels run on those: they are awake already. Threads of
another pool would share the cores with them, because OpenMP's threads keep spinning for a while after each of torch's
parallel regions. Elsewhere, and in a forked child, whose copy of OpenMP has lost its threads, a pool of our own serves.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_forked = False
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def num_threads() -> int:
    """Threads that a kernel may use now."""
    return max(1, torch.get_num_threads())


def run(work: Callable[[int], object], num_tasks: int) -> None:
    """Call `work(0) … work(num_tasks - 1)`, each once, on several threads, the calling one among them.

    `work` must release the GIL to gain from it. Safe from several threads at once and after a fork. Returns when all
    tasks have ended; an exception stops its thread from drawing more tasks and is raised again here.
    """
    tasks = iter(range(num_tasks))
    draw = threading.Lock()
    failures: list[BaseException] = []

    def drain() -> None:
        try:
            while True:
                with draw:
                    task = next(tasks, None)
                if task is None:
                    return
                work(task)
        except BaseException as failure:
            failures.append(failure)

    team = None if _forked else _openmp_team()
    if num_tasks <= 1 or num_threads() == 1:
        drain()
    elif team is not None:
        team(_Body(lambda _: drain()), None, num_threads(), 0)
    else:
        futures = [_submit(drain) for _ in range(min(num_tasks, num_threads()) - 1)]
        drain()
        for future in futures:
            if not future.cancel():
                future.result()
    if failures:
        raise failures[0]


@functools.cache
def _openmp_team() -> Callable[..., None] | None:
    """`GOMP_parallel(body, data, num_threads, flags)` of the OpenMP that torch has loaded, if it is GNU's."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    if len(loaded) != 1:
        return None
    team = ctypes.CDLL(loaded.pop()).GOMP_parallel
    team.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team


def _submit(work: Callable[[], None]) -> Future[None]:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < num_threads() - 1:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool_size = num_threads() - 1
            _pool = ThreadPoolExecutor(_pool_size, thread_name_prefix="tritonemb")
        return _pool.submit(work)


def _forget() -> None:
    """A forked child has the parent's pools without their threads."""
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
