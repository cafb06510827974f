"""Files that are read and written page by page, past the system's page cache where it allows that; asynchronous I/O.

Linux's `io_submit(2)` takes hundreds of reads or writes in one call, without a thread for each; else a pool of
threads does it. Random pages of a virtual solid-state disk, 2 cores: 72 thousand a second at 3 microseconds of CPU
each, where 16 threads reach 49 thousand at 11, and `io_uring` 67 thousand at 4. Containers' usual filters of system
calls let it through, unlike `io_uring`. It is asynchronous for direct I/O alone.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import queue
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tritonemb.storage.store import raise_if_cancelled
from tritonemb.storage.threads import shared_threads
from tritonemb.utils import on_error

PAGE_BYTES = 4096
HUGE_PAGE = 2 << 20  # bytes
SWEEP_BYTES = 64 << 20  # written through the page cache before it is advised to drop what has reached the disk
DEPTH = 512  # extents in flight
HALF_BYTES = HUGE_PAGE  # of a context's buffer
NUM_CONTEXTS = 8
_CALLS = {  # the numbers of io_setup, io_destroy, io_getevents, io_submit
    "x86_64": (206, 207, 208, 209),
    "aarch64": (0, 1, 4, 2),
}
_SETUP, _DESTROY, _GET_EVENTS, _SUBMIT = range(4)
_READ, _WRITE = 0, 1
_WIPE_ON_FORK = 18  # Linux: a forked process has zeros there, and may unmap them
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


class IoBuffer:
    """Page-aligned memory for direct I/O, in huge pages if it fills them: these are contiguous for a disk."""

    def __init__(self, num_bytes: int) -> None:
        spare = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
        memory = reserve(num_bytes + spare)
        whole = np.frombuffer(memory, dtype=np.uint8)
        begin = -int(whole.ctypes.data) % HUGE_PAGE if spare else 0
        if spare:
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        with suppress(OSError):  # gVisor, where it makes no difference
            memory.madvise(_WIPE_ON_FORK)  # a fork while the disk writes into it must not copy pages
        self.array = whole[begin : begin + num_bytes]
        self.view = memoryview(memory)[begin : begin + num_bytes]
        self.address = int(self.array.ctypes.data)


def reserve(num_bytes: int) -> mmap.mmap:
    """Private zeros, whose memory the system allocates page by page when they are written to."""
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Memory(NamedTuple):
    """Page-aligned memory that is not the context's own: its address, and its bytes."""

    address: int
    view: memoryview


class PageFile:
    """An open file, for direct I/O if the file system has it.

    Otherwise it is read and written through the page cache, which is advised to drop its pages. Many threads may read
    and write whole pages, from and to page-aligned memory. The file is closed when it is garbage collected at last.

    Raises:
        OSError: as `os.open`; EOFError: from `read`, the file ends before.
    """

    def __init__(self, path: Path, writable: bool = True) -> None:
        self.path = path
        self._written = 0
        self.handle, self.direct = _open(path, os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY))
        self._release = weakref.finalize(self, _release, self.handle, os.getpid())
        self._release.atexit = False

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on."""
        done, size = 0, len(view)
        while done < size:
            count = os.preadv(self.handle, [view[done:]], offset + done)
            done += count
            # A read that ends within a page has met the end of a file that is open for direct I/O.
            if count == 0 or (done % PAGE_BYTES and done < size and self.size() <= offset + done):
                raise EOFError(f"the file ends at byte {offset + done:,}")
        if not self.direct:
            self._drop(offset, size)

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`."""
        done, size = 0, len(view)
        while done < size:
            if (count := os.pwritev(self.handle, [view[done:]], offset + done)) == 0:
                raise OSError(errno.EIO, "nothing more could be written")
            done += count
        if not self.direct:
            self._drop(offset, size)  # starts the write-back to disk, so that a sweep can drop the pages
            self._written += size  # may miss what another thread adds: then the sweep comes later
            if self._written >= SWEEP_BYTES:
                self._written = 0
                self._drop(0, 0)

    def size(self) -> int:
        return os.fstat(self.handle).st_size

    def is_linked(self) -> bool:
        """Whether a folder lists the file, so that it can be opened again."""
        return os.fstat(self.handle).st_nlink > 0

    def resize(self, num_bytes: int) -> None:
        os.ftruncate(self.handle, num_bytes)

    def sync(self) -> None:
        """Flush what was written to the disk."""
        os.fsync(self.handle)

    def lock(self) -> bool:
        """Lock the file; whether nobody else had. True where files have no locks."""
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        return True

    def close(self) -> None:
        """Close and unlock the file, even if a forked process has it open. A second call does nothing."""
        self.handle = -1
        self._release()

    def _drop(self, offset: int, size: int) -> None:
        os.posix_fadvise(self.handle, offset, size, os.POSIX_FADV_DONTNEED)


def _release(handle: int, process: int) -> None:
    """Close a file; a forked process leaves the lock of its parent alone."""
    if os.getpid() == process:
        with suppress(OSError):  # where there are no locks, none is held
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A handle, and whether it is for direct I/O, which a file system may refuse at `open` or at the first read."""
    try:
        handle = os.open(path, flags | os.O_DIRECT)
        with on_error(lambda: os.close(handle)):
            os.preadv(handle, [IoBuffer(PAGE_BYTES).view], 0)
        return handle, True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    return os.open(path, flags), False


class Extents(NamedTuple):
    """Parts of a file, and where they are in memory: int64 `[n]`, in bytes; for direct I/O multiples of a page's."""

    addresses: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray


class AioTransfer:
    """Extents that were submitted; results int64 `[n]`: bytes moved of each, or the negative number of its error."""

    def __init__(self, reap: Callable[[int], None], num_extents: int) -> None:
        self.results, self.left = np.zeros(num_extents, dtype=np.int64), num_extents
        self._reap = reap

    def wait(self) -> np.ndarray:
        """Wait until all are done or have failed; the results."""
        while self.left:
            self._reap(self.left)
        return self.results

    def finish(self, extents: np.ndarray, results: np.ndarray) -> None:
        self.results[extents] = results
        self.left -= extents.size


class AioQueue:
    """A queue of the kernel's, for one thread at a time; OSError if there are no such calls, or no queues left.

    The system has room for some 100 of them, so each is given back when it is garbage collected.
    """

    def __init__(self) -> None:
        context = ctypes.c_ulong(0)
        _call(_SETUP, DEPTH, ctypes.addressof(context))
        self._context = context.value
        weakref.finalize(self, _destroy, self._context, os.getpid()).atexit = False
        self._events = np.zeros(DEPTH, dtype=_EVENT)
        self._running: dict[int, AioTransfer] = {}
        self._next = self._in_flight = 0

    def submit(self, handle: int, extents: Extents, write: bool) -> AioTransfer:
        """Read or write extents, in any order. Their memory must be left alone until all are done."""
        number, count = self._next, extents.sizes.size
        self._next = (number + 1) & 0x7FFFFFFF
        transfer = self._running[number] = AioTransfer(self.reap, count)
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


def _destroy(context: int, process: int) -> None:
    """Give a queue back, once what is in flight is done; a forked process does not have it."""
    if os.getpid() == process:
        _call(_DESTROY, context)


def make_queue() -> AioQueue | None:
    """A queue, where the system has them."""
    try:
        return AioQueue() if platform.machine() in _CALLS else None
    except OSError as error:
        if error.errno not in _NO_CALLS:
            raise
        return None


_system_call: Any = ctypes.CDLL(None, use_errno=True).syscall
_system_call.restype = ctypes.c_long
_system_call.argtypes = (ctypes.c_long, ctypes.c_ulong, *(ctypes.c_long,) * 4)


def _call(which: int, *arguments: int) -> int:
    number, more = _CALLS[platform.machine()][which], (0,) * (5 - len(arguments))
    while True:
        if (found := int(_system_call(number, *arguments, *more))) >= 0:
            return found
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))


class ExtentError(Exception):
    """The extent of this number could not be read or written, and why."""

    def __init__(self, extent: int, reason: OSError | EOFError) -> None:
        super().__init__(extent, reason)
        self.extent, self.reason = extent, reason


Transfer = Callable[[], None]  # waits for extents that were submitted; raises the ExtentError of the first that failed


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

    def submit(self, file: PageFile, extents: Extents, write: bool, memory: Memory | None = None) -> Transfer:
        """Read or write extents, in any order; their addresses count from the start of the buffer, or of `memory`.

        Asynchronous I/O does it for a file that is open for direct I/O, if the system has it, else the shared threads.
        Their part of the memory must be left alone meanwhile.
        """
        raise_if_cancelled()
        buffer, count = memory or self.buffer, extents.sizes.size
        move = functools.partial(_move_rest, file, buffer, extents, write)
        if self._queue is not None and file.direct:
            absolute = extents._replace(addresses=extents.addresses + buffer.address)
            submitted = self._queue.submit(file.handle, absolute, write)

            def transfer() -> None:
                results = submitted.wait()
                for extent in np.flatnonzero(results != extents.sizes).tolist():
                    move(extent, int(results[extent]))
        else:
            size = max(1, -(-count // shared_threads.num_threads))

            def work(task: int) -> None:
                for extent in range(task * size, min((task + 1) * size, count)):
                    move(extent, 0)

            transfer = shared_threads.submit(work, -(-count // size)).wait
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


def _move_rest(
    file: PageFile, buffer: IoBuffer | Memory, extents: Extents, write: bool, extent: int, done: int
) -> None:
    """Move what is left of an extent, of which `done` bytes are moved; below 0 that is the number of its error."""
    begin, size, offset = (int(part[extent]) for part in extents)
    try:
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        (file.write if write else file.read)(buffer.view[begin + done : begin + size], offset + done)
    except (OSError, EOFError) as error:
        raise ExtentError(extent, error) from error


def _make_contexts() -> queue.SimpleQueue[IoContext | None]:
    free: queue.SimpleQueue[IoContext | None] = queue.SimpleQueue()
    for _ in range(NUM_CONTEXTS):
        free.put(None)
    return free


_free_contexts = _make_contexts()
os.register_at_fork(after_in_child=lambda: globals().update(_free_contexts=_make_contexts()))


@contextmanager
def io_context() -> Iterator[IoContext]:
    """An I/O context for as long as the block runs; waits until one is free.

    Not for the main thread, see `shielded`: a signal handler that raises there could lose what the kernel has returned.
    """
    free = _free_contexts
    context = free.get()
    try:
        context = context or IoContext()
        yield context
    finally:
        if context is not None:
            context.drain()
        free.put(context)
