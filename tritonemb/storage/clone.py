"""Copies of files with holes: copy-on-write clones where the file system makes such, else their written parts."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tritonemb.storage.apart import apart
from tritonemb.storage.file import PageFile, buffer_of, create
from tritonemb.storage.layout import PAGE_BYTES, runs
from tritonemb.storage.threads import shared_threads

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

PIECE_BYTES = 1 << 20  # that each thread copies at once
BATCH = 512  # pieces handed out at once
_FICLONE = 0x40049409  # of Linux: make a file a clone of another one
# No clones on this file system, across two of them, or of such files; or no such call, as the system is not Linux.
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM)


def clone_or_copy(source: PageFile, target: PageFile) -> None:
    """Make an empty file as another one is, whose size is a multiple of a page's; holes stay holes.

    Raises:
        OSError, EOFError: what could not be read or written; the target is of no use then.
    """
    if _clone(source, target):
        return
    size = source.size()
    target.resize(size)
    pieces = _pieces(written_parts(source, size))
    while batch := list(itertools.islice(pieces, BATCH)):
        _copy_all(source, target, batch)


def copy_rows(source: Path, target: Path) -> None:
    """Copy a file of rows, or of changes, as `clone_or_copy` does, and bring the copy to the disk.

    Raises:
        OSError, EOFError: what could not be read or written.
    """

    def copy() -> None:
        with closing(PageFile(source, writable=False)) as old, closing(create(target, 0)) as new:
            clone_or_copy(old, new)
            new.sync()

    apart(copy)


def _clone(source: PageFile, target: PageFile) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.ioctl(target.handle, _FICLONE, source.handle)
    except OSError as error:
        if error.errno not in _NO_CLONE:
            raise
        return False
    return True


def written_parts(file: PageFile, size: int) -> Iterator[tuple[int, int]]:
    """Bounds of what is no hole, in whole pages, ascending; all of the file where the system does not tell."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            begin = os.lseek(file.handle, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            if error.errno != errno.EINVAL:
                raise
            yield end, size
            return
        begin = begin // PAGE_BYTES * PAGE_BYTES  # blocks of a file system may be smaller
        end = -(-os.lseek(file.handle, begin, os.SEEK_HOLE) // PAGE_BYTES) * PAGE_BYTES
        yield begin, end


def _pieces(parts: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Pieces of at most `PIECE_BYTES`: long parts are cut, near ones read at one go, as to read a hole costs little."""
    first = last = -1
    for begin, end in parts:
        if first >= 0 and end - first <= PIECE_BYTES:
            last = end
            continue
        if first >= 0:
            yield first, last
        first, last = begin, end
        while last - first > PIECE_BYTES:
            yield first, first + PIECE_BYTES
            first += PIECE_BYTES
    if first >= 0:
        yield first, last


def _copy_all(source: PageFile, target: PageFile, pieces: list[tuple[int, int]]) -> None:
    shared_threads().run(lambda number: _copy(source, target, *pieces[number]), len(pieces))


def _copy(source: PageFile, target: PageFile, begin: int, end: int) -> None:
    """Copy those pages that are not zero."""
    buffer = buffer_of(end - begin)
    source.read(buffer.view[: end - begin], begin)
    pages = buffer.array[: end - begin].reshape(-1, PAGE_BYTES).view(np.int64)
    written = np.flatnonzero(pages.any(axis=1))
    firsts, lasts = runs(written)
    starts, stops = (written[firsts] * PAGE_BYTES).tolist(), ((written[lasts - 1] + 1) * PAGE_BYTES).tolist()
    for start, stop in zip(starts, stops, strict=True):
        target.write(buffer.view[start:stop], begin + start)
