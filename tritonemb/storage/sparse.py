"""Files with holes: reflink copies, else copies of their written parts, and digests that do not read holes."""

import errno
import fcntl
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import numpy as np

from tritonemb.storage.aio import HUGE_PAGE, PAGE_BYTES, IoBuffer, PageFile
from tritonemb.storage.io import create_file
from tritonemb.storage.page_table import runs
from tritonemb.storage.store import cpu_kernels, storage_errors
from tritonemb.storage.threads import shared_threads, shielded

COPY_BYTES = 1 << 20  # that each thread copies at once
BATCH = 512  # pieces in a job
T = TypeVar("T")
_FICLONE = 0x40049409  # Linux: make a file a reflink copy of another one
# No reflinks on this file system, across two of them, or of such files.
_NO_REFLINK = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)


def reflink_or_copy(source: PageFile, target: PageFile) -> None:
    """Copy a file, whose size is a multiple of a page's, into an empty one; holes stay holes. OSError and EOFError say
    what could not be read or written; the target is useless then."""
    try:
        fcntl.ioctl(target.handle, _FICLONE, source.handle)
        return
    except OSError as error:
        if error.errno not in _NO_REFLINK:
            raise
    size = source.size()
    target.resize(size)
    _for_each(_parts_to_copy(written_parts(source, size)), lambda piece: _copy(source, target, piece))


def _for_each(pieces: Iterator[T], work: Callable[[T], object]) -> None:
    while batch := list(itertools.islice(pieces, BATCH)):
        shared_threads.run(lambda number, batch=batch: work(batch[number]), len(batch))  # type: ignore[misc]


def copy_rows(source: Path, target: Path) -> None:
    """Copy a file of rows, or of changes, as `reflink_or_copy` does, and flush the copy to the disk."""

    def copy() -> None:
        with closing(PageFile(source, writable=False)) as old, closing(create_file(target)) as new:
            reflink_or_copy(old, new)
            new.sync()

    shielded(copy)


def written_parts(file: PageFile, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of what is not a hole, in whole pages, ascending; the whole file where the system does not tell."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(file.handle, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            if error.errno != errno.EINVAL:
                raise
            yield end, size
            return
        begin = begin // PAGE_BYTES * PAGE_BYTES  # blocks of a file system may be smaller
        end = -(-os.lseek(file.handle, begin, os.SEEK_HOLE) // PAGE_BYTES) * PAGE_BYTES
        yield begin, end


def _parts_to_copy(parts: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Pieces of at most `COPY_BYTES`: long parts are cut, near ones joined, as reading a hole costs little."""
    first = last = -1
    for begin, end in parts:
        if first >= 0 and end - first <= COPY_BYTES:
            last = end
            continue
        if first >= 0:
            yield first, last
        first, last = begin, end
        while last - first > COPY_BYTES:
            yield first, first + COPY_BYTES
            first += COPY_BYTES
    if first >= 0:
        yield first, last


_own = threading.local()


def thread_buffer(num_bytes: int) -> IoBuffer:
    """This thread's buffer, of at least this size; each call returns the same memory."""
    found: IoBuffer | None = getattr(_own, "buffer", None)
    if found is None or found.array.size < num_bytes:
        found = _own.buffer = IoBuffer(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE)
    return found


def _copy(source: PageFile, target: PageFile, piece: tuple[int, int]) -> None:
    begin, end = piece
    buffer = thread_buffer(end - begin)
    source.read(buffer.view[: end - begin], begin)
    written = np.flatnonzero(buffer.array[: end - begin].reshape(-1, PAGE_BYTES).view(np.int64).any(axis=1))
    firsts, lasts = runs(written)
    starts, stops = (written[firsts] * PAGE_BYTES).tolist(), ((written[lasts - 1] + 1) * PAGE_BYTES).tolist()
    for start, stop in zip(starts, stops, strict=True):
        target.write(buffer.view[start:stop], begin + start)


DIGEST_BYTES = 1 << 18  # that are checked at once; a part of the digest's definition


def digest(path: Path) -> int:
    """64 bits of a file's content, from the CRC-32 of each piece that is not all zeros, and its number.

    Holes are not read, and how a file system stores zeros does not matter. The file's size, a multiple of a page's, is
    not a part of it. StorageError if the file cannot be read.
    """
    with storage_errors(f"file {path} cannot be read", "check the disk, or use another copy"):
        return shielded(lambda: _digest(path))


def _digest(path: Path) -> int:
    found: list[int] = []
    mix = cpu_kernels("pages").splitmix64  # so that pieces that were swapped do not cancel
    with closing(PageFile(path, writable=False)) as file:
        size = file.size()

        def add(number: int) -> None:
            begin, buffer = number * DIGEST_BYTES, thread_buffer(DIGEST_BYTES)
            count = min(DIGEST_BYTES, size - begin)
            file.read(buffer.view[:count], begin)
            if buffer.array[:count].any():
                found.append(mix((number << 32) ^ zlib.crc32(buffer.view[:count])))

        _for_each(_digest_pieces(written_parts(file, size)), add)
    return sum(found) % (1 << 64)


def _digest_pieces(parts: Iterator[tuple[int, int]]) -> Iterator[int]:
    following = 0
    for begin, end in parts:
        first = max(following, begin // DIGEST_BYTES)
        following = max(following, -(-end // DIGEST_BYTES))
        yield from range(first, following)
