"""Threads that wait for the disk, so that many reads are on their way at once; and one that keeps them in order.

Work that no signal's handler breaks off. Those run in the main thread alone, and may raise anywhere in it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tritonemb.storage.store import Pending, StorageError

DEFAULT_THREADS = 16
"""Tasks on their way at once. Random pages of a virtual solid-state disk on 2 cores came at 12, 41, 54, 61 and 63
thousand a second by 1, 4, 8, 16 and 32 threads that do nothing else."""


class Job:
    """Numbered tasks, drawn by several threads; after a failure no more are drawn."""

    def __init__(self, work: Callable[[int], object], num_tasks: int) -> None:
        self._work, self._lock = work, threading.Lock()
        self._next, self.num_tasks, self._running = 0, num_tasks, 0
        self._ended = threading.Event()
        if num_tasks == 0:
            self._ended.set()
        self._failures: list[tuple[int, BaseException]] = []

    def step(self) -> bool:
        """Run a task, if one is left; whether there may be more."""
        with self._lock:
            task = self._next
            if task >= self.num_tasks:
                return False
            self._next += 1
            self._running += 1
        failure = None
        try:
            self._work(task)
        except BaseException as error:
            failure = error
        with self._lock:
            if failure is not None:
                self._failures.append((task, failure))
                self._next = self.num_tasks
            self._running -= 1
            over = self._next >= self.num_tasks
            if over and self._running == 0:
                self._ended.set()
        return not over

    def wait(self) -> None:
        """Wait for all tasks, and raise the failure of the first that failed."""
        self._ended.wait()
        if self._failures:
            raise min(self._failures, key=lambda entry: entry[0])[1]

    def give_up(self) -> None:
        """Have no more tasks drawn, and wait for those that were."""
        with self._lock:
            self._next = self.num_tasks
            if self._running == 0:
                self._ended.set()
        self._ended.wait()


class IoThreads:
    """A pool of threads for tasks that wait for a disk. Jobs that run at once have their tasks in turn.

    Args:
        num_threads: tasks at work at once.
    """

    def __init__(self, num_threads: int = DEFAULT_THREADS) -> None:
        if num_threads < 1:
            raise ValueError(f"the number of threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock, self._started = threading.Lock(), 0

    def run(self, work: Callable[[int], object], num_tasks: int) -> None:
        """Call `work(0) … work(num_tasks - 1)`, each once; returns when all have ended. May be called by many threads.

        Raises:
            BaseException: what the first of them that failed has raised, or a signal's handler, when those begun by
                then have ended; the others are left out.
        """
        stop_if_given_up()
        job = Job(work, num_tasks)
        try:
            self._share(job)
            job.wait()
        except BaseException:
            job.give_up()
            raise

    def begin(self, work: Callable[[int], object], num_tasks: int) -> Job:
        """As `run`, which is not waited for."""
        job = Job(work, num_tasks)
        self._share(job)
        return job

    def close(self) -> None:
        """End the threads. Nothing may be running."""
        with self._lock:
            for _ in range(self._started):
                self._jobs.put(None)
            self._started = 0

    def _share(self, job: Job) -> None:
        helpers = self._start(min(job.num_tasks, self.num_threads))
        for _ in range(helpers):
            self._jobs.put(job)
        if helpers == 0:
            while job.step():
                pass

    def _start(self, wanted: int) -> int:
        """Have so many threads, or as many as there can be: no more are started when the interpreter ends."""
        with self._lock:
            while self._started < wanted:
                name = f"tritonemb-disk-{self._started}"
                try:
                    threading.Thread(target=_help, args=(self._jobs,), name=name, daemon=True).start()
                except RuntimeError:
                    break
                self._started += 1
            return min(wanted, self._started)


def _help(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        if job.step():
            jobs.put(job)
        del job  # while it waits for the next one, it must not keep this one's memory


class Operations:
    """Runs what it is asked for in a thread of its own, first in, first out.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Pending] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, work: Callable[[], None]) -> Pending:
        pending = Pending()
        with self._lock:
            if self._thread is None:  # the thread knows the queue alone: a store that is dropped must be collected
                thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._queue.put((work, pending))
        return pending

    def end(self, last: Callable[[], None]) -> Pending:
        """As `ask`, for the last time; if there is no thread yet, it runs here and now."""
        pending = Pending()
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put((last, pending))
                self._queue.put(None)
        if thread is None:
            _do(last, pending)
        return pending


@torch.inference_mode()  # tensors that were made in that mode can be changed in it alone, others everywhere
def _work(asked: queue.SimpleQueue[tuple[Callable[[], None], Pending] | None]) -> None:
    while (entry := asked.get()) is not None:
        _do(*entry)
        del entry


def _do(work: Callable[[], None], pending: Pending) -> None:
    try:
        work()
    except BaseException as failure:
        pending.end(failure)
    else:
        pending.end()


_shared: IoThreads | None = None
_shared_lock = threading.Lock()


def shared_threads() -> IoThreads:
    """The process's pool, which all stores use that are not given one."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = IoThreads()
        return _shared


def refuse_fork(process: int, table: str) -> None:
    """Raise a StorageError unless this is the process of that number."""
    if os.getpid() != process:
        raise StorageError(
            f"table {table!r} was opened before this process was forked off, and its threads are not in this process; "
            "use it in the process that opened it"
        )


def _forget() -> None:
    """In a process forked off: the threads are not in it, and the lock may be held for ever."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


T = TypeVar("T")


class GivenUp(Exception):
    """Whoever wanted the work has been interrupted."""


def apart(work: Callable[[], T]) -> T:
    """What `work` returns, or raises. The main thread has it done by another one, and waits for it.

    If a signal's handler raises meanwhile, as Ctrl-C's does, that is raised here when the work has ended, at the next
    `stop_if_given_up` at the latest. If one raises once more it is not waited for any longer: what the work uses must
    be its own, or stay whole as long as the work has it.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    errand = _Errand(work)
    try:
        if not errand.set_out():
            return work()
        errand.over.wait()
    except BaseException:
        errand.give_up()
        raise
    return errand.outcome()


def stop_if_given_up() -> None:
    """Raise GivenUp in a thread whose work nobody wants any more."""
    thread = threading.current_thread()
    if isinstance(thread, _Errand) and thread.given_up:
        raise GivenUp


class _Errand(threading.Thread):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="tritonemb-errand", daemon=True)
        self._work, self._claim = work, threading.Lock()  # whoever has that says whether the work is done
        self._result: Any = None
        self._failure: BaseException | None = None
        self.over, self.given_up = threading.Event(), False

    def set_out(self) -> bool:
        """Start; whether the system lets us: it does not when the interpreter ends."""
        try:
            self.start()
        except RuntimeError:
            return False
        return True

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            result = self._work()
            if not self.given_up:  # else nobody comes for it, and a file, say, is closed when nobody has it any more
                self._result = result
        except BaseException as failure:
            self._failure = failure
        finally:
            self.over.set()

    def give_up(self) -> None:
        """Have it end early, and wait for that; or never begin."""
        self.given_up = True
        if not self._claim.acquire(blocking=False):
            self.over.wait()
        self._result = self._failure = None

    def outcome(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return self._result
