"""Threads for I/O: a pool of them, one that runs a table's operations in order, one that no signal handler interrupts.

Signal handlers run in the main thread alone, and may raise anywhere in it: between a system call and the line that
notes its result, say. So the main thread leaves I/O to other threads.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from tritonemb.storage.store import IoFuture

DEFAULT_THREADS = 16
"""Tasks that run at once. Random pages of a virtual solid-state disk on 2 cores came at 12, 41, 54, 61 and 63 thousand
a second by 1, 4, 8, 16 and 32 threads that do nothing else."""

T = TypeVar("T")


class PerProcess(Generic[T]):
    """An object that each process makes when it first needs it.

    A forked process has neither the threads, the I/O buffers nor the kernel's queues of its parent.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._value: T | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def get(self) -> T:
        with self._lock:
            if self._value is None:
                self._value = self._make()
            return self._value

    def _reset(self) -> None:
        self._value = None
        self._lock = threading.Lock()  # another thread may have held the one before when the process was forked


class Job:
    """Numbered tasks that several threads take in turn; after a failure no more are taken."""

    def __init__(self, work: Callable[[int], object], num_tasks: int) -> None:
        self._work, self._lock = work, threading.Lock()
        self._next, self.num_tasks, self._running = 0, num_tasks, 0
        self._done = threading.Event()
        if num_tasks == 0:
            self._done.set()
        self._failures: list[tuple[int, BaseException]] = []

    def run_next(self) -> bool:
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
            last = self._next >= self.num_tasks
            if last and self._running == 0:
                self._done.set()
        return not last

    def wait(self) -> None:
        """Wait for all tasks, and raise the failure of the first that failed."""
        self._done.wait()
        if self._failures:
            raise min(self._failures, key=lambda entry: entry[0])[1]

    def cancel(self) -> None:
        """Start no more tasks, and wait for those that run."""
        with self._lock:
            self._next = self.num_tasks
            if self._running == 0:
                self._done.set()
        self._done.wait()


class IoThreads:
    """A pool of threads for tasks that wait for a disk. Jobs that are submitted at once have their tasks in turn.

    Args:
        num_threads: tasks that run at once.
    """

    def __init__(self, num_threads: int = DEFAULT_THREADS) -> None:
        if num_threads < 1:
            raise ValueError(f"the number of threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock, self._started = threading.Lock(), 0

    def run(self, work: Callable[[int], object], num_tasks: int) -> None:
        """Call `work(0) … work(num_tasks - 1)`, each once; returns when all are done. Many threads may call it.

        Raises:
            BaseException: what the first task that failed has raised, or a signal handler, when the running tasks are
                done; the others are left out.
        """
        raise_if_cancelled()
        job = Job(work, num_tasks)
        try:
            self._start(job)
            job.wait()
        except BaseException:
            job.cancel()
            raise

    def submit(self, work: Callable[[int], object], num_tasks: int) -> Job:
        """As `run`, without waiting."""
        job = Job(work, num_tasks)
        self._start(job)
        return job

    def close(self) -> None:
        """End the threads. No job may be running."""
        with self._lock:
            for _ in range(self._started):
                self._jobs.put(None)
            self._started = 0

    def _start(self, job: Job) -> None:
        num_threads = self._start_threads(min(job.num_tasks, self.num_threads))
        for _ in range(num_threads):
            self._jobs.put(job)
        if num_threads == 0:
            while job.run_next():
                pass

    def _start_threads(self, wanted: int) -> int:
        """Start threads up to this number; returns how many there are, as none can be started at interpreter exit."""
        with self._lock:
            while self._started < wanted:
                name = f"tritonemb-disk-{self._started}"
                try:
                    threading.Thread(target=_run_tasks, args=(self._jobs,), name=name, daemon=True).start()
                except RuntimeError:
                    break
                self._started += 1
            return min(wanted, self._started)


def _run_tasks(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        if job.run_next():
            jobs.put(job)
        del job  # while it waits for the next one, it must not keep this one's memory


shared_threads = PerProcess(IoThreads)
"""The process's pool, of all stores that have none of their own."""

_Operation = tuple[Callable[[], None], IoFuture]


class OperationQueue:
    """Runs operations in a thread of its own, first in, first out.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock = name, threading.Lock()
        self._queue: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> IoFuture:
        future = IoFuture()
        with self._lock:
            if self._thread is None:  # the thread knows the queue alone: a store that is dropped must be collected
                thread = threading.Thread(target=_run_operations, args=(self._queue,), name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._queue.put((work, future))
        return future

    def close(self, last: Callable[[], None]) -> IoFuture:
        """Submit the last operation; if there is no thread yet, it runs in this one."""
        future = IoFuture()
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put((last, future))
                self._queue.put(None)
        if thread is None:
            future.run(last)
        return future


@torch.inference_mode()  # tensors that were made in that mode can be changed in it alone, others everywhere
def _run_operations(operations: queue.SimpleQueue[_Operation | None]) -> None:
    while (operation := operations.get()) is not None:
        work, future = operation
        future.run(work)
        del operation, work, future


class Cancelled(Exception):
    """The main thread was interrupted while it waited for this work."""


def shielded(work: Callable[[], T]) -> T:
    """What `work` returns or raises. The main thread has another thread run it, and waits.

    If a signal handler raises meanwhile, as Ctrl-C's does, that is raised here when the work is done, at the next
    `raise_if_cancelled` at the latest. If one raises once more, this returns at once: what the work uses must be its
    own, or stay whole until it is done.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    thread = _ShieldedThread(work)
    try:
        if not thread.try_start():
            return work()
        thread.done.wait()
    except BaseException:
        thread.cancel()
        raise
    return thread.result()


def raise_if_cancelled() -> None:
    """Raise Cancelled in a thread of `shielded` whose caller was interrupted."""
    thread = threading.current_thread()
    if isinstance(thread, _ShieldedThread) and thread.cancelled:
        raise Cancelled


class _ShieldedThread(threading.Thread):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="tritonemb-shielded", daemon=True)
        self._work, self._claim = work, threading.Lock()  # who acquires it first decides whether the work is run
        self._result: Any = None
        self._failure: BaseException | None = None
        self.done, self.cancelled = threading.Event(), False

    def try_start(self) -> bool:
        """Start, unless the interpreter exits, when no thread can be started."""
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
            if not self.cancelled:  # else nobody takes it: a file, say, is closed when nobody refers to it
                self._result = result
        except BaseException as failure:
            self._failure = failure
        finally:
            self.done.set()

    def cancel(self) -> None:
        """Have it end early and wait for that, or never start."""
        self.cancelled = True
        if not self._claim.acquire(blocking=False):
            self.done.wait()
        self._result = self._failure = None

    def result(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return self._result
