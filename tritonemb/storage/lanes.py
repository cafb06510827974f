"""Parts of files moved to and from memory, many at once: by Linux's asynchronous I/O, or by threads elsewhere."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np

from tritonemb.storage.aio import Pieces, Queue, make_queue
from tritonemb.storage.apart import stop_if_given_up
from tritonemb.storage.file import HUGE_PAGE, Buffer, PageFile
from tritonemb.storage.threads import IoThreads, shared_threads

T = TypeVar("T")

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


def _forget() -> None:
    """A process forked off has neither the buffers' memory nor the kernel's queues."""
    global _lanes
    _lanes = _Lanes()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


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
