"""An iterator that makes items ahead in a thread of its own: batches of a stream, and the steps of a trainer."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Permit = Callable[[], AbstractContextManager[object]]
GRACE = 2.0  # seconds that a thread gets to end after a failure


class Prefetcher(Generic[T]):
    """The items of `source`, in their order; its exception, if it raises one, comes out of `next` in its place.

    Which items have been begun depends on nothing but how many were taken: item `k + depth` is begun once item `k` has
    been taken, not earlier. So ranks that take items alike, and whose items hold collectives, hold as many of them.

    Args:
        source: run, and closed if it is a generator, in the thread; in the caller's where `depth` is 0.
        depth: items that are made beyond those taken.
        name: of the thread.
        on_stop: is called when nobody wants more, in any thread: lets a source cancel what it waits for. It does not
            wait itself.
        collective: whether items hold collectives. Then all those that may be made are made before the thread ends,
            unless there was a failure.
        permit: called in the thread that takes items each time it lets one more be made, which is then made inside the
            context that this has returned. All those that may be made are made before the thread ends then, too.

    After a failure the thread gets `GRACE` to end, for it may wait for a rank that is gone, or for data that do not
    come before whoever closes what `source` reads from has told it so. It ends then, with the item that it is making.

    A process forked off has no such thread: there `next` raises a RuntimeError, and `close` does nothing.
    """

    def __init__(
        self,
        source: Iterator[T],
        depth: int,
        name: str,
        on_stop: Callable[[], None] | None = None,
        *,
        collective: bool = False,
        permit: Permit | None = None,
    ) -> None:
        self._source, self._collective, self._complete = source, collective, collective or permit is not None
        self._permit: Permit = nullcontext if permit is None else permit
        self._thread: threading.Thread | None = None
        if depth == 0:
            return
        self._queue: _Queue[T] = _Queue([self._permit() for _ in range(depth)], on_stop)
        # The thread knows the queue but not this object, so that an iterator dropped half-way ends its thread too.
        # Whoever collects this object must not wait for the thread, as it may be one that the thread waits for.
        self._stop = weakref.finalize(self, self._queue.stop)
        self._stop.atexit = False
        self._thread = threading.Thread(target=_fill, args=(self._queue, source), name=name, daemon=True)
        if not collective:  # one that waits for a rank that is gone must not keep the program from ending
            _RUNNING[self._thread] = self._queue
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        return next(self._source) if self._thread is None else self._queue.get(self._permit)

    def widen(self) -> None:
        """One item more may be made beyond those taken, from now on. Not for items that hold collectives."""
        assert not self._collective
        if self._thread is not None:
            self._queue.allow(self._permit())

    def settle(self) -> None:
        """Wait until everything is made that may be made for now: no collective of the source is running then."""
        if self._thread is not None:
            self._queue.settle()

    def close(self, failed: bool = False) -> None:
        """Stop the thread and wait for it; it ends with the item that it is making. There are no further items.

        Args:
            failed: this rank, or another one, has failed.
        """
        if self._thread is None:
            _close(self._source)
            return
        if self._queue.inherited:
            return
        if self._complete and not failed:
            self.settle()
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE if failed else None)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


class _Queue(Generic[T]):
    """Items that are made, and permits for those that may be; `resting` while the thread waits for a permit."""

    def __init__(self, permits: list[AbstractContextManager[object]], on_stop: Callable[[], None] | None) -> None:
        self._items: deque[T] = deque()
        self._permits = deque(permits)
        self._on_stop, self._forks = on_stop, _forks
        self._changed = threading.Condition()
        self._resting = self._stopped = self._finished = False
        self._error: BaseException | None = None

    @property
    def inherited(self) -> bool:
        """Whether the thread is in the process that this one was forked from; the lock may be held for ever then."""
        return self._forks != _forks

    def next_permit(self) -> AbstractContextManager[object] | None:
        """Wait for the permit to make one item more; None if nobody wants any."""
        with self._changed:
            self._resting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._permits)
            self._resting = False
            return None if self._stopped else self._permits.popleft()

    def put(self, item: T) -> None:
        with self._changed:
            if not self._stopped:
                self._items.append(item)
            self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def get(self, permit: Permit) -> T:
        if self.inherited:
            raise RuntimeError(
                "this stream was opened before the process was forked, and its threads are not in this process; "
                "open it here"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._finished or self._items)
            if self._items:
                self._permits.append(permit())
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def allow(self, permit: AbstractContextManager[object]) -> None:
        with self._changed:
            self._permits.append(permit)
            self._changed.notify_all()

    def settle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._finished or (self._resting and not self._permits))

    def stop(self) -> None:
        if self.inherited:
            return
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()
        if self._on_stop is not None:
            self._on_stop()


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, _Queue[Any]] = weakref.WeakKeyDictionary()
_forks = 0  # between this process and the one that imported this module


def _forget_all() -> None:
    """In a process forked off: the threads are not in it."""
    global _RUNNING, _forks
    _RUNNING = weakref.WeakKeyDictionary()
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def end_all() -> None:
    """Stop all threads: the end of the program must not find them running in libraries that are gone by then."""
    running = list(_RUNNING.items())
    for _, queue in running:
        queue.stop()
    for thread, _ in running:
        thread.join()


def _fill(queue: _Queue[T], source: Iterator[T]) -> None:
    error: BaseException | None = None
    try:
        while (permit := queue.next_permit()) is not None:
            with permit:
                try:
                    item = next(source)
                except StopIteration:
                    break
            queue.put(item)
            del item  # or it would stay until the next one is there
    except BaseException as caught:
        error = caught
    try:
        _close(source)
    except BaseException as caught:
        error = error or caught
    queue.finish(error)


def _close(source: Iterator[Any]) -> None:
    if isinstance(source, Generator):
        source.close()
