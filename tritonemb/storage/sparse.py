"""Sparse files: reflink copies or copies of their written ranges, and digests that do not read holes."""

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

COPY_BYTES = 1 << 20  # bytes per task of a copy
BATCH_TASKS = 512  # tasks per job
T = TypeVar("T")
_FICLONE = 0x40049409  # Linux ioctl: make a file a reflink copy of another
# Reflinks are not supported by this file system, across file systems, or for such files.
_NO_REFLINK = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)


def reflink_or_copy(source: PageFile, target: PageFile) -> None:
    """Copy a file of whole pages into an empty one; holes stay holes. Discard the target after an OSError or
    EOFError."""
    try:
        fcntl.ioctl(target.handle, _FICLONE, source.handle)
        return
    except OSError as error:
        if error.errno not in _NO_REFLINK:
            raise
    size = source.size()
    target.resize(size)
    _for_each(_copy_ranges(written_ranges(source, size)), lambda piece: _copy(source, target, piece))


def _for_each(pieces: Iterator[T], work: Callable[[T], object]) -> None:
    while batch := list(itertools.islice(pieces, BATCH_TASKS)):
        shared_threads.run(lambda number, batch=batch: work(batch[number]), len(batch))  # type: ignore[misc]


def copy_rows(source: Path, target: Path) -> None:
    """Copy a file of rows, or of changes, as `reflink_or_copy` does, and flush the copy to the disk."""

    def copy() -> None:
        with closing(PageFile(source, writable=False)) as source_file, closing(create_file(target)) as target_file:
            reflink_or_copy(source_file, target_file)
            target_file.sync()

    shielded(copy)


def written_ranges(file: PageFile, size: int) -> Iterator[tuple[int, int]]:
    """Yield bounds of the ranges that are not holes, in whole pages, ascending; the whole file if unsupported."""
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


def _copy_ranges(ranges: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Split long ranges into pieces of at most `COPY_BYTES`; join near ones, because reading a hole is cheap."""
    first = last = -1
    for begin, end in ranges:
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


_thread_local = threading.local()


def thread_buffer(num_bytes: int) -> IoBuffer:
    """Return this thread's buffer, of at least this size; successive calls share its memory."""
    buffer: IoBuffer | None = getattr(_thread_local, "buffer", None)
    if buffer is None or buffer.array.size < num_bytes:
        buffer = _thread_local.buffer = IoBuffer(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE)
    return buffer


def _copy(source: PageFile, target: PageFile, piece: tuple[int, int]) -> None:
    begin, end = piece
    buffer = thread_buffer(end - begin)
    source.read(buffer.view[: end - begin], begin)
    written_pages = np.flatnonzero(buffer.array[: end - begin].reshape(-1, PAGE_BYTES).view(np.int64).any(axis=1))
    firsts, lasts = runs(written_pages)
    starts, stops = (
        (written_pages[firsts] * PAGE_BYTES).tolist(),
        ((written_pages[lasts - 1] + 1) * PAGE_BYTES).tolist(),
    )
    for start, stop in zip(starts, stops, strict=True):
        target.write(buffer.view[start:stop], begin + start)


DIGEST_BYTES = 1 << 18  # piece size; part of the digest's definition, so it must not change


def digest(path: Path) -> int:
    """Return a 64-bit digest of a file of whole pages, from the CRC-32 and the number of each nonzero piece.

    Holes are not read, and count as zeros, so it does not depend on how a file system stores zeros, nor on the file's
    size. Raise StorageError if the file cannot be read.
    """
    with storage_errors(f"file {path} cannot be read", "check the disk, or use another copy"):
        return shielded(lambda: _digest(path))


def _digest(path: Path) -> int:
    piece_digests: list[int] = []
    mix = cpu_kernels("pages").splitmix64  # so that swapped pieces change the sum
    with closing(PageFile(path, writable=False)) as file:
        size = file.size()

        def add_piece(number: int) -> None:
            begin, buffer = number * DIGEST_BYTES, thread_buffer(DIGEST_BYTES)
            count = min(DIGEST_BYTES, size - begin)
            file.read(buffer.view[:count], begin)
            if buffer.array[:count].any():
                piece_digests.append(mix((number << 32) ^ zlib.crc32(buffer.view[:count])))

        _for_each(_digest_pieces(written_ranges(file, size)), add_piece)
    return sum(piece_digests) % (1 << 64)


def _digest_pieces(ranges: Iterator[tuple[int, int]]) -> Iterator[int]:
    next_piece = 0
    for begin, end in ranges:
        first_piece = max(next_piece, begin // DIGEST_BYTES)
        next_piece = max(next_piece, -(-end // DIGEST_BYTES))
        yield from range(first_piece, next_piece)
