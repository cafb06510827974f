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
_Team = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def num_threads() -> int:
    """Threads that a kernel may use now."""
    return max(1, torch.get_num_threads())


def team() -> int:
    """The address of `void f(void (*body)(void *), void *data, unsigned num_threads, unsigned flags)`; 0: stay alone.

    It calls `body(data)` on each of several threads, the calling one among them, and returns when all have.
    """
    if num_threads() == 1:
        return 0
    return _own_team_address if _forked else _openmp_team() or _own_team_address


def run(work: Callable[[int], object], num_tasks: int) -> None:
    """Call `work(0) … work(num_tasks - 1)`, each once, on threads of our own, the calling one among them.

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

    futures = [_submit(drain) for _ in range(min(num_tasks, num_threads()) - 1)]
    drain()
    for future in futures:
        if not future.cancel():
            future.result()
    if failures:
        raise failures[0]


@_Team
def _own_team(body: int, data: int, size: int, flags: int) -> None:
    work = _Body(body)
    try:
        run(lambda _: work(data), size)
    finally:
        work(data)  # there is nothing left to do, unless no thread could be started


_own_team_address: int = ctypes.cast(_own_team, ctypes.c_void_p).value or 0


@functools.cache
def _openmp_team() -> int:
    """The address of `GOMP_parallel` of the OpenMP that torch has loaded, if it is GNU's, else 0."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    if len(loaded) != 1:
        return 0
    return ctypes.cast(ctypes.CDLL(loaded.pop()).GOMP_parallel, ctypes.c_void_p).value or 0


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
