"""Threads for disk I/O: a pool, and a helper thread that shields I/O of the main thread from signal handlers.

Signal handlers run in the main thread and may raise anywhere in it, for example between a system call and the
assignment of its result. So the main thread delegates I/O to other threads, see `shielded`, and waits for them on plain
locks only, see `Completion`.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from tritonemb.storage.store import Completion, is_cancelled, raise_if_cancelled
from tritonemb.utils import on_error

T = TypeVar("T")
# Random page reads of a virtual disk on 2 cores: 12, 41, 54, 61, 63 thousand per second by 1, 4, 8, 16, 32 threads.
DEFAULT_THREADS = 16


def shielded(work: Callable[[], T]) -> T:
    """Call `work` and return its result; on behalf of the main thread, in another thread.

    An exception of a signal handler, such as KeyboardInterrupt, is raised here when the work is done or reaches its
    next `raise_if_cancelled`. A second one is raised at once: the work must own the resources that it uses.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    call, handled = _ShieldedCall(work), sys.exception()
    thread = threading.Thread(target=call.run, name="tritonemb-shielded", daemon=True)
    try:
        try:
            thread.start()
        except RuntimeError as error:
            if error.__context__ is not handled:  # a signal handler has raised while `start` waited for the thread
                raise error.__context__ from None  # type: ignore[misc]
            return work()  # the interpreter exits
        return call.result()
    except BaseException:  # cancel the work and wait for its end, unless it has not begun
        thread.cancelled = True  # type: ignore[attr-defined]  # see `is_cancelled`
        if not call.cancel():
            call.ended.wait()
        del call
        raise


class _ShieldedCall(Generic[T]):
    """Work that another thread runs unless it is cancelled first."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._claim = threading.Lock()  # never released: its owner runs or cancels the work
        self._result: T | None = None
        self._failure: BaseException | None = None
        self.ended = Completion()

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            assert self._work is not None
            result = self._work()
        except BaseException as failure:
            self._failure = failure
        else:  # drop an unused result, so that a file, for example, is closed
            self._result = None if is_cancelled() else result
            del result
        self._work = None
        self.ended.set()

    def cancel(self) -> bool:
        """Cancel the work unless it has begun; return whether it was cancelled."""
        if self._claim.acquire(blocking=False):
            self._work = None
            return True
        return False

    def result(self) -> T:
        self.ended.wait()
        try:
            if self._failure is not None:
                raise self._failure
            return self._result  # type: ignore[return-value]
        finally:
            del self  # the failure's traceback refers to this frame


class Job:
    """Numbered tasks run by several threads; none is started after a failure."""

    def __init__(self, work: Callable[[int], object], num_tasks: int) -> None:
        self._work: Callable[[int], object] | None = work
        self.num_tasks = num_tasks
        self._next = self._running = 0
        self._lock, self._ended = threading.Lock(), Completion()
        self._failures: dict[int, BaseException] = {}
        self._check_end()

    def run_next(self) -> bool:
        """Run the next task, if any; return whether more may remain."""
        with self._lock:
            if (task := self._next) >= self.num_tasks:
                return False
            self._next, self._running = task + 1, self._running + 1
        assert self._work is not None
        try:
            self._work(task)
        except BaseException as error:
            self._failures[task] = error
        with self._lock:
            self._running -= 1
            if self._failures:
                self._next = self.num_tasks
            self._check_end()
            return self._next < self.num_tasks

    def wait(self) -> None:
        """Wait for all tasks, and raise the failure of the first that failed."""
        self._ended.wait()
        if self._failures:
            raise self._failures[min(self._failures)]

    def cancel(self) -> None:
        """Start no more tasks, and wait for those that run."""
        with self._lock:
            self._next = self.num_tasks
            self._check_end()
        self._ended.wait()

    def _check_end(self) -> None:
        if self._next >= self.num_tasks and self._running == 0:
            self._work = None  # frees its memory before waiters return
            self._ended.set()


class IoThreads:
    """Thread pool for disk I/O. Tasks of concurrent jobs are interleaved."""

    def __init__(self, num_threads: int = DEFAULT_THREADS) -> None:
        self.num_threads = num_threads
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock, self._started = threading.Lock(), 0

    def run(self, work: Callable[[int], object], num_tasks: int) -> None:
        """Call `work(0) … work(num_tasks - 1)` and wait for all. Thread-safe.

        After a failure or an exception of a signal handler no further task starts; it is raised when the running ones
        are done.
        """
        raise_if_cancelled()
        job = self.submit(work, num_tasks)
        with on_error(job.cancel):
            job.wait()

    def submit(self, work: Callable[[int], object], num_tasks: int) -> Job:
        """Start the tasks of `run` without waiting."""
        job, max_threads = Job(work, num_tasks), min(num_tasks, self.num_threads)
        with self._lock:
            with suppress(RuntimeError):  # at interpreter exit no thread can be started
                while self._started < max_threads:
                    name = f"tritonemb-disk-{self._started}"
                    threading.Thread(target=_run_tasks, args=(self._jobs,), name=name, daemon=True).start()
                    self._started += 1
            num_threads = min(max_threads, self._started)
        for _ in range(num_threads):
            self._jobs.put(job)
        while num_threads == 0 and job.run_next():
            pass
        return job


def _run_tasks(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        job = jobs.get()
        if job.run_next():
            jobs.put(job)
        del job  # frees its memory while this thread waits for the next


shared_threads = IoThreads()  # of the process
