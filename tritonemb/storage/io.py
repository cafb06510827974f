"""Parts of files moved to and from memory, many at once: by Linux's asynchronous I/O, or by threads elsewhere.

Files read and written page by page, past the system's page cache where it lets us.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from tritonemb.storage.aio import Pieces, Queue, make_queue
from tritonemb.storage.threads import IoThreads, shared_threads, stop_if_given_up

T = TypeVar("T")

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

PAGE_BYTES = 4096
HUGE_PAGE = 2 << 20  # bytes
SWEEP_BYTES = 64 << 20  # written through the page cache before it is asked to drop what has reached the disk


class Buffer:
    """Page-aligned memory, as direct I/O needs it; in huge pages if it fills them, which a disk finds in one piece."""

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
    """Zeros of this process alone, which take memory page by page as they are written to."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, num_bytes)


_buffers = threading.local()


def _forget_buffers() -> None:
    """A process forked off does not have the memory of the buffers."""
    global _buffers
    _buffers = threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_buffers)


def buffer_of(num_bytes: int) -> Buffer:
    """This thread's buffer, of at least so many bytes; each call gives the same memory."""
    found: Buffer | None = getattr(_buffers, "buffer", None)
    if found is None or found.array.size < num_bytes:
        found = _buffers.buffer = Buffer(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE)
    return found


class PageFile:
    """An open file.

    It is opened for direct I/O. A file system that has none is read and written through the page cache, which is asked
    to keep nothing of it. Whole pages, from and to page-aligned memory, may be read and written by many threads at
    once. It is closed when nobody has it any more, if not before.

    Args:
        path: of a file that is there.
        writable: open it for writing, too.

    Attributes:
        direct: whether it is open for direct I/O.

    Raises:
        OSError: as `os.open`.
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
        """Fill `view` from `offset` on.

        Raises:
            OSError: as `os.preadv`; EOFError: the file ends before.
        """
        done, size = self._read_some(view, offset), len(view)
        while done < size:
            count = self._read_some(view[done:], offset + done)
            if count == 0:
                raise EOFError(f"the file ends at byte {offset + done:,}")
            done += count
            if done % PAGE_BYTES and done < size and self.size() <= offset + done:  # from here direct I/O cannot go on
                raise EOFError(f"the file ends at byte {offset + done:,}")
        if not self.direct:
            self._drop(offset, size)

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`.

        Raises:
            OSError: as `os.pwritev`.
        """
        done, size = self._write_some(view, offset), len(view)
        while done < size:
            count = self._write_some(view[done:], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "nothing more could be written")
            done += count
        if not self.direct:
            self._drop(offset, size)  # begins to write it to the disk, so that a sweep can drop it
            self._written += size  # may miss what another thread adds: a sweep comes later then
            if self._written >= SWEEP_BYTES:
                self._written = 0
                self._drop(0, 0)

    def size(self) -> int:
        return os.fstat(self.handle).st_size

    def allocated(self) -> int:
        """Bytes that take room on the disk; its size where the system does not tell."""
        found = os.fstat(self.handle)
        return 512 * found.st_blocks if hasattr(found, "st_blocks") else found.st_size

    def has_name(self) -> bool:
        """Whether a folder lists it still, so that it can be opened again."""
        return os.fstat(self.handle).st_nlink > 0

    def resize(self, num_bytes: int) -> None:
        os.ftruncate(self.handle, num_bytes)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        os.fsync(self.handle)

    def lock(self) -> bool:
        """Keep others from opening it for themselves; whether nobody has before. True where files have no locks."""
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
        """A lock ends here, even if a process forked off still has the file open. A second call does nothing."""
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
    """Close a file that this process has opened, or one that it was forked off from, whose lock it leaves alone."""
    if fcntl is not None and os.getpid() == process:
        with contextlib.suppress(OSError):  # where there are no locks, none is held
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """A handle, and whether it is for direct I/O: a file system may refuse that when opened, or when read."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            handle = os.open(path, flags | direct)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            try:
                os.preadv(handle, [Buffer(PAGE_BYTES).view], 0)
                return handle, True
            except OSError as error:
                os.close(handle)
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
    return os.open(path, flags), False


def create(path: Path, num_bytes: int) -> PageFile:
    """A file of zeros that takes no room yet; what stands at `path` is replaced."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags, 0o666)
    try:
        os.ftruncate(handle, num_bytes)
    finally:
        os.close(handle)
    return PageFile(path)


def aside(path: Path) -> Path:
    """Where a file is written before it has its name."""
    return path.with_name(f".writing-{path.name}")


def give_name(path: Path, replace: bool) -> None:
    """Give the file at `aside(path)`, whose content is on the disk, its name, durably.

    Raises:
        FileExistsError: there is one of that name, and it is not to be replaced.
    """
    if not replace and path.exists():
        raise FileExistsError(errno.EEXIST, "there is a file of that name", str(path))
    os.replace(aside(path), path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_page(file: PageFile, number: int = 0) -> bytes:
    """A page's bytes.

    Raises:
        OSError, EOFError: as `PageFile.read`.
    """
    buffer = Buffer(PAGE_BYTES)
    file.read(buffer.view, number * PAGE_BYTES)
    return bytes(buffer.view)


def write_page(file: PageFile, page: bytes, number: int = 0) -> None:
    """Write a page's bytes.

    Raises:
        OSError: as `PageFile.write`.
    """
    buffer = Buffer(PAGE_BYTES)
    buffer.view[:] = page
    file.write(buffer.view, number * PAGE_BYTES)


HALF_BYTES = HUGE_PAGE
NUM_LANES = 4


class PieceError(Exception):
    """A piece could not be moved.

    Args:
        piece: its number.
        reason: why.
    """

    def __init__(self, piece: int, reason: OSError | EOFError) -> None:
        super().__init__(piece, reason)
        self.piece, self.reason = piece, reason


class Moving(Protocol):
    """Pieces that are on their way."""

    def wait(self) -> None:
        """See `Lane.end`; once."""


class Lane:
    """A buffer, and what moves pieces of files between it and the disk. It serves one operation at a time.

    The buffer has two halves, so that what is in one of them can be worked on while the disk has the other.
    """

    def __init__(self) -> None:
        self.buffer = Buffer(2 * HALF_BYTES)
        self._queue = make_queue()
        self._on_their_way: list[Moving] = []

    def make_room(self, num_bytes: int) -> Buffer:
        """The buffer, each of whose halves has room for so many bytes. What was in it may be gone."""
        if self.buffer.array.size < 2 * num_bytes:
            self.buffer = Buffer(2 * num_bytes)
        return self.buffer

    def begin(self, file: PageFile, pieces: Pieces, write: bool, threads: IoThreads | None) -> Moving:
        """Have pieces moved, in any order. Their part of the buffer must be left alone meanwhile.

        Args:
            pieces: whose addresses are bytes from the buffer's start.
            threads: to move them with; if not given asynchronous I/O does it, for a file that is open for direct I/O
                where the system has such, and threads that all share otherwise.
        """
        stop_if_given_up()
        moving: Moving
        if threads is None and self._queue is not None and file.direct:
            moving = _Asynchronous(self._queue, file, self.buffer, pieces, write)
        else:
            moving = _Threaded(threads or shared_threads(), file, self.buffer, pieces, write)
        self._on_their_way.append(moving)
        return moving

    def end(self, moving: Moving) -> None:
        """Wait until its pieces are where they belong.

        Raises:
            PieceError: of the first that failed.
        """
        self._on_their_way.remove(moving)
        moving.wait()

    def drain(self) -> None:
        """Wait for all that is on its way, whether or not it fails."""
        while self._on_their_way:
            try:
                self._on_their_way.pop().wait()
            except PieceError:  # whoever has begun it has been told of another failure, and gives up
                continue


class _Asynchronous:
    def __init__(self, queue_: Queue, file: PageFile, buffer: Buffer, pieces: Pieces, write: bool) -> None:
        self._file, self._buffer, self._pieces, self._write = file, buffer, pieces, write
        absolute = pieces._replace(addresses=pieces.addresses + buffer.address)
        self._transfer = queue_.begin(file.handle, absolute, write)

    def wait(self) -> None:
        results = self._transfer.wait()
        for piece in np.flatnonzero(results != self._pieces.sizes).tolist():
            _move_rest(self._file, self._buffer, self._pieces, self._write, piece, int(results[piece]))


class _Threaded:
    def __init__(self, threads: IoThreads, file: PageFile, buffer: Buffer, pieces: Pieces, write: bool) -> None:
        count = pieces.sizes.size
        size = max(1, -(-count // threads.num_threads))

        def work(task: int) -> None:
            for piece in range(task * size, min((task + 1) * size, count)):
                _move_rest(file, buffer, pieces, write, piece, 0)

        self._job = threads.begin(work, -(-count // size))

    def wait(self) -> None:
        self._job.wait()


def _move_rest(file: PageFile, buffer: Buffer, pieces: Pieces, write: bool, piece: int, done: int) -> None:
    """Move a piece of which so many bytes have been moved; below 0, that is the number of its error."""
    begin, size, offset = (int(part[piece]) for part in pieces)
    try:
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        (file.write if write else file.read)(buffer.view[begin + done : begin + size], offset + done)
    except (OSError, EOFError) as error:
        raise PieceError(piece, error) from error


def overlap(parts: Iterable[T], begin: Callable[[T], object], finish: Callable[[T], object]) -> None:
    """Begin each part before the one before it is finished: the disk has one while another is worked on."""
    before: T | None = None
    for part in parts:
        begin(part)
        if before is not None:
            finish(before)
        before = part
    if before is not None:
        finish(before)


class _Lanes:
    """As many as `NUM_LANES`, made when they are needed."""

    def __init__(self) -> None:
        self.free: queue.SimpleQueue[Lane | None] = queue.SimpleQueue()
        for _ in range(NUM_LANES):
            self.free.put(None)


_lanes = _Lanes()


def _forget_lanes() -> None:
    """A process forked off has neither the buffers' memory nor the kernel's queues."""
    global _lanes
    _lanes = _Lanes()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lanes)


@contextmanager
def borrow() -> Iterator[Lane]:
    """A lane, for as long as the block runs; waits until one is free. Not for the main thread, see `apart`: what a
    signal's handler raises there could break off the accounts of what is on its way."""
    lanes = _lanes
    lane = lanes.free.get()
    try:
        lane = lane or Lane()
        yield lane
    finally:
        if lane is not None:
            lane.drain()
        lanes.free.put(lane)
