"""An iterator that runs ahead in a thread of its own, as far as a bounded queue lets it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """The items of `source`, in their order; its exception, if it raises one, comes out of `next` in its place.

    Args:
        source: run, and closed if it is a generator, in the thread.
        size: items that may wait; one more may be in the making.
        name: of the thread.
        on_stop: is called when nobody wants more, in any thread: lets a source give up what it waits for. It does not
            wait itself.

    A process forked off has no such thread: there `next` raises a RuntimeError, and `close` does nothing.
    """

    def __init__(self, source: Iterator[T], size: int, name: str, on_stop: Callable[[], None] | None = None) -> None:
        self._channel: _Channel[T] = _Channel(size, on_stop)
        # The thread knows the channel but not this object, so that an iterator dropped half-way ends its thread too.
        # Whoever collects this object must not wait for the thread, as it may be one that the thread waits for.
        self._stop = weakref.finalize(self, self._channel.stop)
        self._stop.atexit = False
        self._thread = threading.Thread(target=_fill, args=(self._channel, source), name=name, daemon=True)
        _RUNNING[self._thread] = self._channel
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        return self._channel.get()

    def close(self) -> None:
        """Stop the thread and wait for it; it ends with the item that it is making."""
        self._stop()
        if not self._channel.inherited and self._thread is not threading.current_thread():
            self._thread.join()


class _Channel(Generic[T]):
    def __init__(self, size: int, on_stop: Callable[[], None] | None) -> None:
        self._size, self._on_stop, self._forks = size, on_stop, _forks
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._finished = False
        self._error: BaseException | None = None

    @property
    def inherited(self) -> bool:
        """Whether the thread is in the process that this one was forked from; the lock may be held for ever then."""
        return self._forks != _forks

    def put(self, item: T) -> bool:
        """Wait for a place; False if nobody wants more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._items) < self._size)
            if not self._stopped:
                self._items.append(item)
                self._changed.notify_all()
            return not self._stopped

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def get(self) -> T:
        if self.inherited:
            raise RuntimeError(
                "this stream was opened before the process was forked, and its threads are not in this process; "
                "open it here"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._finished or self._items)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def stop(self) -> None:
        if self.inherited:
            return
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()
        if self._on_stop is not None:
            self._on_stop()


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, _Channel[Any]] = weakref.WeakKeyDictionary()
_forks = 0  # between this process and the one that imported this module


def _forget_all() -> None:
    """In a process forked off: the threads are not in it."""
    global _RUNNING, _forks
    _RUNNING = weakref.WeakKeyDictionary()
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _end_all() -> None:
    """The end of the program must not find threads at work in libraries that are gone by then."""
    running = list(_RUNNING.items())
    for _, channel in running:
        channel.stop()
    for thread, _ in running:
        thread.join()


def _fill(channel: _Channel[T], source: Iterator[T]) -> None:
    error: BaseException | None = None
    try:
        for item in source:
            if not channel.put(item):
                break
            del item  # or it would stay until the next one is there
    except BaseException as caught:
        error = caught
    try:
        if isinstance(source, Generator):
            source.close()
    except BaseException as caught:
        error = error or caught
    channel.finish(error)
