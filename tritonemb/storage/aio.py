"""Asynchronous I/O: extents of files read into an I/O buffer or written from it, many at once.

Linux's `io_submit(2)` takes hundreds of reads or writes in one call, without a thread for each; else a pool of
threads does it. Random pages of a virtual solid-state disk, 2 cores: 72 thousand a second at 3 microseconds of CPU
each, where 16 threads reach 49 thousand at 11, and `io_uring` 67 thousand at 4. Containers' usual filters of system
calls let it through, unlike `io_uring`. It is asynchronous for direct I/O alone.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tritonemb.storage.io import HUGE_PAGE, IoBuffer, PageFile, PerProcess, raise_if_cancelled

T = TypeVar("T")
DEFAULT_THREADS = 16
"""Random pages of a virtual disk on 2 cores: 12, 41, 54, 61, 63 thousand a second by 1, 4, 8, 16, 32 threads."""
DEPTH = 512  # extents in flight
HALF_BYTES = HUGE_PAGE  # of a context's buffer
NUM_CONTEXTS = 4
_CALLS = {  # the numbers of io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
    "riscv64": (0, 1, 4, 2),
}
_SETUP, _DESTROY, _GET_EVENTS, _SUBMIT = range(4)
_READ, _WRITE = 0, 1
_REQUEST = np.dtype(  # struct iocb
    {
        "names": ["tag", "opcode", "handle", "address", "num_bytes", "offset"],
        "formats": ["<u8", "<u2", "<u4", "<u8", "<u8", "<i8"],
        "offsets": [0, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_EVENT = np.dtype([("tag", "<u8"), ("request", "<u8"), ("result", "<i8"), ("result_2", "<i8")])
_NO_CALLS = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EAGAIN, errno.ENOMEM)


class Extents(NamedTuple):
    """Parts of a file, and where they are in memory: int64 `[n]`, in bytes; for direct I/O multiples of a page's."""

    addresses: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray


class AioTransfer:
    """Extents that were submitted; results int64 `[n]`: bytes moved of each, or the negative number of its error."""

    def __init__(self, queue: AioQueue, num_extents: int) -> None:
        self.results, self.left = np.zeros(num_extents, dtype=np.int64), num_extents
        self._queue = queue

    def wait(self) -> np.ndarray:
        """Wait until all are done or have failed; the results."""
        while self.left:
            self._queue.reap(self.left)
        return self.results

    def finish(self, extents: np.ndarray, results: np.ndarray) -> None:
        self.results[extents] = results
        self.left -= extents.size


class AioQueue:
    """A queue of the kernel's, for one thread at a time.

    Raises:
        OSError: the system has no such calls, forbids them, or has no queues left.
    """

    def __init__(self) -> None:
        context = ctypes.c_ulong(0)
        _call(_SETUP, DEPTH, ctypes.addressof(context))
        self._context, self._process = context.value, os.getpid()
        self._events = np.zeros(DEPTH, dtype=_EVENT)
        self._running: dict[int, AioTransfer] = {}
        self._next = self._in_flight = 0

    def submit(self, handle: int, extents: Extents, write: bool) -> AioTransfer:
        """Read or write extents, in any order. Their memory must be left alone until all are done."""
        number, count = self._next, extents.sizes.size
        self._next = (number + 1) & 0x7FFFFFFF
        transfer = self._running[number] = AioTransfer(self, count)
        requests = np.zeros(count, dtype=_REQUEST)
        requests["tag"] = (number << 32) + np.arange(count)
        requests["opcode"], requests["handle"] = _WRITE if write else _READ, handle
        requests["address"], requests["num_bytes"], requests["offset"] = extents
        addresses = requests.ctypes.data + np.arange(count) * _REQUEST.itemsize
        done = 0
        while done < count:
            if self._in_flight == DEPTH:
                self.reap(DEPTH // 4)
            some = min(DEPTH - self._in_flight, count - done)
            done += self._submit(transfer, done, addresses[done : done + some])
        return transfer

    def close(self) -> None:
        """Wait for what is in flight, and destroy the queue."""
        while self._in_flight:
            self.reap(self._in_flight)
        if self._context and os.getpid() == self._process:
            _call(_DESTROY, self._context)
        self._context = 0

    def reap(self, least: int) -> None:
        """Wait until at least this many extents are done."""
        count = _call(_GET_EVENTS, self._context, least, DEPTH, self._events.ctypes.data, 0)
        self._in_flight -= count
        tags, results = self._events["tag"][:count].astype(np.int64), self._events["result"][:count]
        numbers, extents = tags >> 32, tags & 0xFFFFFFFF
        for number, transfer in self._running.items():
            mine = numbers == number
            transfer.finish(extents[mine], results[mine])
        self._running = {number: transfer for number, transfer in self._running.items() if transfer.left}

    def _submit(self, transfer: AioTransfer, first: int, addresses: np.ndarray) -> int:
        """Submit the requests of the extents from number `first` on; how many the kernel has taken, or refused."""
        try:
            taken = _call(_SUBMIT, self._context, addresses.size, addresses.ctypes.data)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # of the first extent
                transfer.finish(np.array([first]), np.array([-int(error.errno or errno.EIO)]))
                return 1
            if self._in_flight:
                self.reap(1)
            else:
                time.sleep(0.001)  # other processes use up what the system has
            return 0
        self._in_flight += taken
        return taken


def make_queue() -> AioQueue | None:
    """A queue, where the system has them."""
    if not sys.platform.startswith("linux") or platform.machine() not in _CALLS or sys.byteorder != "little":
        return None
    try:
        return AioQueue()
    except OSError as error:
        if error.errno not in _NO_CALLS:
            raise
        return None


@functools.cache
def _system_call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_ulong, *(ctypes.c_long,) * 4)
    return call


def _call(which: int, *arguments: int) -> int:
    """A system call, without the GIL."""
    number, more = _CALLS[platform.machine()][which], (0,) * (5 - len(arguments))
    while True:
        found = int(_system_call()(number, *arguments, *more))
        if found >= 0:
            return found
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class ExtentError(Exception):
    """The extent of this number could not be read or written, and why."""

    def __init__(self, extent: int, reason: OSError | EOFError) -> None:
        super().__init__(extent, reason)
        self.extent, self.reason = extent, reason


class Job:
    """Numbered tasks that several threads take in turn; after a failure no more are taken."""

    def __init__(self, work: Callable[[int], object], num_tasks: int) -> None:
        self._work, self.num_tasks = work, num_tasks
        self._next = self._running = 0
        self._changed = threading.Condition()
        self._failures: dict[int, BaseException] = {}

    def run_next(self) -> bool:
        """Run a task, if one is left; whether there may be more."""
        with self._changed:
            task = self._next
            if task >= self.num_tasks:
                return False
            self._next, self._running = task + 1, self._running + 1
        try:
            self._work(task)
        except BaseException as error:
            self._failures[task] = error
        with self._changed:
            self._running -= 1
            if self._failures:
                self._next = self.num_tasks
            self._changed.notify_all()
            return self._next < self.num_tasks

    def wait(self) -> None:
        """Wait for all tasks, and raise the failure of the first that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._next >= self.num_tasks and self._running == 0)
        if self._failures:
            raise self._failures[min(self._failures)]

    def cancel(self) -> None:
        """Start no more tasks, and wait for those that run."""
        with self._changed:
            self._next = self.num_tasks
            self._changed.wait_for(lambda: self._running == 0)


class IoThreads:
    """A pool of threads for tasks that wait for a disk. Jobs that are submitted at once have their tasks in turn."""

    def __init__(self, num_threads: int = DEFAULT_THREADS) -> None:
        self.num_threads = num_threads
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock, self._started = threading.Lock(), 0

    def run(self, work: Callable[[int], object], num_tasks: int) -> None:
        """Call `work(0) … work(num_tasks - 1)`, each once; returns when all are done. Many threads may call it.

        What the first task that failed has raised, or a signal handler, is raised when the running tasks are done; the
        others are left out.
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

    def _start(self, job: Job) -> None:
        wanted = min(job.num_tasks, self.num_threads)
        with self._lock:
            while self._started < wanted:
                name = f"tritonemb-disk-{self._started}"
                try:
                    threading.Thread(target=_run_tasks, args=(self._jobs,), name=name, daemon=True).start()
                except RuntimeError:  # at interpreter exit no thread can be started
                    break
                self._started += 1
            num_threads = min(wanted, self._started)
        for _ in range(num_threads):
            self._jobs.put(job)
        while num_threads == 0 and job.run_next():
            pass


def _run_tasks(jobs: queue.SimpleQueue[Job]) -> None:
    while True:
        job = jobs.get()
        if job.run_next():
            jobs.put(job)
        del job  # while it waits for the next one, it must not keep this one's memory


shared_threads = PerProcess(IoThreads)
"""The process's pool."""

Transfer = Callable[[], None]
"""Waits for extents that were submitted; raises the ExtentError of the first that failed."""


class IoContext:
    """An I/O buffer, and what moves extents of files between it and the disk. It serves one operation at a time.

    The buffer has two halves: the disk has one while the other is worked on.
    """

    def __init__(self) -> None:
        self.buffer = IoBuffer(2 * HALF_BYTES)
        self._queue = make_queue()
        self._in_flight: list[Transfer] = []

    def reserve(self, num_bytes: int) -> IoBuffer:
        """The buffer, each of whose halves has at least this size. Its content may be lost."""
        if self.buffer.array.size < 2 * num_bytes:
            self.buffer = IoBuffer(2 * num_bytes)
        return self.buffer

    def submit(self, file: PageFile, extents: Extents, write: bool) -> Transfer:
        """Read or write extents, whose addresses are counted from the buffer's start, in any order.

        Asynchronous I/O does it for a file that is open for direct I/O, if the system has it, else the shared threads.
        Their part of the buffer must be left alone meanwhile.
        """
        raise_if_cancelled()
        buffer, count = self.buffer, extents.sizes.size
        move = functools.partial(_move_rest, file, buffer, extents, write)
        if self._queue is not None and file.direct:
            absolute = extents._replace(addresses=extents.addresses + buffer.address)
            submitted = self._queue.submit(file.handle, absolute, write)

            def transfer() -> None:
                results = submitted.wait()
                for extent in np.flatnonzero(results != extents.sizes).tolist():
                    move(extent, int(results[extent]))
        else:
            threads = shared_threads.get()
            size = max(1, -(-count // threads.num_threads))

            def work(task: int) -> None:
                for extent in range(task * size, min((task + 1) * size, count)):
                    move(extent, 0)

            transfer = threads.submit(work, -(-count // size)).wait
        self._in_flight.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        """Wait until the extents are read or written; raises the ExtentError of the first that failed."""
        self._in_flight.remove(transfer)
        transfer()

    def drain(self) -> None:
        """Wait for all that is in flight, whether or not it fails."""
        while self._in_flight:
            with suppress(ExtentError):  # the operation has failed already
                self._in_flight.pop()()


def _move_rest(file: PageFile, buffer: IoBuffer, extents: Extents, write: bool, extent: int, done: int) -> None:
    """Move what is left of an extent, of which `done` bytes are moved; below 0 that is the number of its error."""
    begin, size, offset = (int(part[extent]) for part in extents)
    try:
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        (file.write if write else file.read)(buffer.view[begin + done : begin + size], offset + done)
    except (OSError, EOFError) as error:
        raise ExtentError(extent, error) from error


def overlap(parts: Iterable[T], begin: Callable[[T], object], finish: Callable[[T], object]) -> None:
    """Begin each part before the one before it is finished: the disk has one while another is worked on."""
    begun: list[T] = []
    for part in parts:
        begin(part)
        begun.append(part)
        if len(begun) == 2:
            finish(begun.pop(0))
    for part in begun:
        finish(part)


def _make_contexts() -> queue.SimpleQueue[IoContext | None]:
    """The free contexts; None for those that nobody needed yet."""
    free: queue.SimpleQueue[IoContext | None] = queue.SimpleQueue()
    for _ in range(NUM_CONTEXTS):
        free.put(None)
    return free


_free_contexts = PerProcess(_make_contexts)


@contextmanager
def io_context() -> Iterator[IoContext]:
    """An I/O context for as long as the block runs; waits until one is free.

    Not for the main thread, see `shielded`: a signal handler that raises there could lose what the kernel has returned.
    """
    free = _free_contexts.get()
    context = free.get()
    try:
        context = context or IoContext()
        yield context
    finally:
        if context is not None:
            context.drain()
        free.put(context)
