"""The threads that CPU kernels run on: as many as `torch.get_num_threads()`, the caller one of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def num_threads() -> int:
    """Threads that a kernel may use now."""
    return max(1, torch.get_num_threads())


def run(work: Callable[[int], object], num_tasks: int) -> None:
    """Call `work(0) … work(num_tasks - 1)`, each once, on the pool and the calling thread; return when all are done.

    `work` must release the GIL to gain from it. Safe from several threads at once and after a fork. The first exception
    is raised again here, after every task has ended.
    """
    helpers = min(num_tasks, num_threads()) - 1
    tasks = iter(range(num_tasks))
    draw = threading.Lock()

    def drain() -> None:
        while True:
            with draw:
                task = next(tasks, None)
            if task is None:
                return
            work(task)

    futures = [_submit(drain) for _ in range(helpers)]
    try:
        drain()
    finally:
        failures = [future.exception() for future in futures if not future.cancel()]
    for failure in failures:
        if failure is not None:
            raise failure


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
    """A forked child has the parent's pool without its threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
