"""Files that are read and written page by page, past the system's page cache where it allows that; I/O buffers.

Signal handlers run in the main thread alone, and may raise anywhere in it: between a system call and the line that
notes its result, say. So the main thread leaves I/O to other threads, see `shielded`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

PAGE_BYTES = 4096
HUGE_PAGE = 2 << 20  # bytes
SWEEP_BYTES = 64 << 20  # written through the page cache before it is advised to drop what has reached the disk
T = TypeVar("T")


class PerProcess(Generic[T]):
    """An object that each process makes when it first needs it: threads, I/O buffers, the kernel's queues."""

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
        try:
            thread.start()
        except RuntimeError:  # the interpreter exits
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


class IoBuffer:
    """Page-aligned memory for direct I/O, in huge pages if it fills them: these are contiguous for a disk."""

    def __init__(self, num_bytes: int) -> None:
        spare = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
        memory = reserve(num_bytes + spare)
        whole = np.frombuffer(memory, dtype=np.uint8)
        begin = -int(whole.ctypes.data) % HUGE_PAGE if spare else 0
        if spare and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        if hasattr(mmap, "MADV_DONTFORK"):  # a fork while the disk writes into it must not copy pages
            memory.madvise(mmap.MADV_DONTFORK)
        self.array = whole[begin : begin + num_bytes]
        self.view = memoryview(memory)[begin : begin + num_bytes]
        self.address = int(self.array.ctypes.data)


def reserve(num_bytes: int) -> mmap.mmap:
    """Private zeros, whose memory the system allocates page by page when they are written to."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


_thread_buffers = PerProcess(threading.local)


def thread_buffer(num_bytes: int) -> IoBuffer:
    """This thread's buffer, of at least this size; each call returns the same memory."""
    own = _thread_buffers.get()
    found: IoBuffer | None = getattr(own, "buffer", None)
    if found is None or found.array.size < num_bytes:
        found = own.buffer = IoBuffer(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE)
    return found


class PageFile:
    """An open file, for direct I/O if the file system has it.

    Otherwise it is read and written through the page cache, which is advised to drop its pages. Many threads may read
    and write whole pages, from and to page-aligned memory. The file is closed when it is garbage collected at last.

    Raises:
        OSError: as `os.open`; EOFError: from `read`, the file ends before.
    """

    def __init__(self, path: Path, writable: bool = True) -> None:
        self.path = path
        flags = os.O_RDWR if writable else os.O_RDONLY
        flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self._lock = threading.Lock()  # of the file's position, where there is no preadv
        self._written = 0
        self.handle, self.direct = _open(path, flags)
        self._release = weakref.finalize(self, _release, self.handle, os.getpid())
        self._release.atexit = False

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on."""
        done, size = 0, len(view)
        while done < size:
            count = self._read_some(view[done:], offset + done)
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
            count = self._write_some(view[done:], offset + done)
            if count == 0:
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
        if fcntl is None:
            return True
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

    def _read_some(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.handle, [view], offset)
        with self._lock:
            os.lseek(self.handle, offset, os.SEEK_SET)
            found = os.read(self.handle, len(view))
        view[: len(found)] = found
        return len(found)

    def _write_some(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "pwritev"):
            return os.pwritev(self.handle, [view], offset)
        with self._lock:
            os.lseek(self.handle, offset, os.SEEK_SET)
            return os.write(self.handle, view)

    def _drop(self, offset: int, size: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, offset, size, os.POSIX_FADV_DONTNEED)


def _release(handle: int, process: int) -> None:
    """Close a file; a forked process leaves the lock of its parent alone."""
    if fcntl is not None and os.getpid() == process:
        with contextlib.suppress(OSError):  # where there are no locks, none is held
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A handle, and whether it is for direct I/O, which a file system may refuse at `open` or at the first read."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        handle = -1
        try:
            handle = os.open(path, flags | direct)
            os.preadv(handle, [IoBuffer(PAGE_BYTES).view], 0)
            return handle, True
        except OSError as error:
            if handle >= 0:
                os.close(handle)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    return os.open(path, flags), False


@contextmanager
def new_file(path: Path, replace: bool = True) -> Iterator[PageFile]:
    """A file to write; it gets its name durably when it is whole and on the disk, and is removed if there is an error.

    OSError if there is a file of that name that it must not `replace`.
    """
    temporary = path.with_name(f".writing-{path.name}")
    try:
        with closing(create_file(temporary)) as file:
            yield file
            file.sync()
        if not replace and path.exists():
            raise FileExistsError(errno.EEXIST, "there is a file of that name", str(path))
        os.replace(temporary, path)
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # or a power failure may take the name
            finally:
                os.close(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def allocated(file: Path | int) -> int:
    """Bytes that a file, by its path or handle, takes on the disk; its size where the system does not tell."""
    found = os.stat(file)
    return 512 * found.st_blocks if hasattr(found, "st_blocks") else found.st_size


def create_file(path: Path) -> PageFile:
    """An empty file, which replaces one at `path`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    os.close(os.open(path, flags, 0o666))
    return PageFile(path)


def read_page(file: PageFile) -> bytes:
    """The bytes of a file's first page."""
    buffer = IoBuffer(PAGE_BYTES)
    file.read(buffer.view, 0)
    return bytes(buffer.view)


def write_page(file: PageFile, page: bytes) -> None:
    """Write the bytes of a file's first page."""
    buffer = IoBuffer(PAGE_BYTES)
    buffer.view[:] = page
    file.write(buffer.view, 0)
