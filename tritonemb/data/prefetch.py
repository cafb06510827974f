"""An iterator that makes items ahead in a thread of its own: batches of a stream, and the steps of a trainer."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tritonemb.utils import Closeable

T = TypeVar("T")
Permit = Callable[[], AbstractContextManager[object]]
GRACE = 2.0  # seconds that a thread gets to end after a failure
POLL = 0.1  # seconds after which a waiting thread looks whether the other one lives


class Prefetcher(Closeable, Iterator[T]):
    """The items of `source`, in their order; its exception, if it raises one, comes out of `next` in its place.

    Item `k + depth` is begun once item `k` has been taken: ranks that take as many items begin as many collectives.

    Args:
        source: run, and closed if it is a generator, in the thread.
        depth: items that are made beyond those taken; at least 1.
        name: of the thread.
        on_stop: called when nobody wants more, in any thread, without waiting: a source cancels what it waits for.
        collective: whether items hold collectives. Then all those that may be made are made before the thread ends,
            unless there was a failure; so, too, with a `permit`.
        permit: called by the thread that takes an item; the next item is made inside the context that it returns.

    After a failure the thread gets `GRACE` to end, as it may wait for what never comes. A process forked off has no
    such thread: there `next` raises a RuntimeError, and `close` does nothing.
    """

    def __init__(
        self, source: Iterator[T], depth: int, name: str, on_stop: Callable[[], None] | None = None, *,
        collective: bool = False, permit: Permit | None = None,
    ) -> None:  # fmt: skip
        self._permit = permit or nullcontext
        self._complete = collective or permit is not None
        # The thread knows the queues but not this object, so that an iterator dropped half-way ends its thread too.
        # Whoever collects this object must not wait for the thread, as it may be one that the thread waits for.
        self._queues = _Queues(on_stop)
        self._stop = weakref.finalize(self, self._queues.stop)
        self._stop.atexit = False
        for _ in range(depth):
            self.widen()
        self._thread = threading.Thread(target=self._queues.fill, args=(source,), name=name, daemon=True)
        if not collective:  # one that waits for a rank that is gone must not keep the program from ending
            _RUNNING[self._thread] = self._stop
        self._thread.start()

    def __next__(self) -> T:
        if self._queues.inherited:
            raise RuntimeError(
                "this stream was opened before the process was forked, and its threads are not in this process; "
                "open it here"
            )
        if self._queues.stopped:
            raise StopIteration
        item, end = self._queues.items.get()
        if end is not None:
            if not self._queues.stopped:
                self._stop()
                self._thread.join()
            raise end
        self.widen()
        return item

    def widen(self) -> None:
        """One item more may be made beyond those taken, from now on."""
        self._queues.permits.put(self._permit())

    def settle(self) -> None:
        """Wait until everything is made that may be made for now: no collective of the source is running then."""
        settled = threading.Event()
        self._queues.permits.put(settled)
        while self._thread.is_alive() and not settled.wait(POLL):
            pass

    def close(self, failed: bool = False) -> None:
        """Stop the thread and wait for it; it ends with the item that it is making. There are no further items.
        `failed`: this rank, or another one, has failed."""
        if self._queues.inherited:
            return
        if self._complete and not failed:
            self.settle()
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE if failed else None)

    def __exit__(self, *raised: object) -> None:
        self.close(failed=raised[0] is not None)


class _Queues:
    """Between the thread that makes items and the one that takes them; the collector may stop them at any time."""

    def __init__(self, on_stop: Callable[[], None] | None) -> None:
        self.items: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()  # an item, or what ends them
        self.permits: SimpleQueue[Any] = SimpleQueue()  # for an item; an Event to set behind the permits before it
        self.stopped = False
        self._on_stop, self._pid = on_stop, os.getpid()

    @property
    def inherited(self) -> bool:
        return self._pid != os.getpid()

    def stop(self) -> None:
        if self.inherited:
            return
        self.stopped = True
        with suppress(Empty):
            while True:
                self.items.get_nowait()
        self.items.put((None, StopIteration()))
        self.permits.put(None)
        if self._on_stop is not None:
            self._on_stop()

    def fill(self, source: Iterator[Any]) -> None:
        """In the thread: make an item for each permit. Behind the last item, answer those who wait for the permits."""
        item: Any = None
        end: BaseException | None = None
        while not self.stopped and (permit := self.permits.get()) is not None:
            if isinstance(permit, threading.Event):
                permit.set()
            elif end is None:
                try:
                    with permit:
                        item = next(source)
                except BaseException as error:
                    end = error
                if not self.stopped:
                    self.items.put((item, end))
                item = None  # or it would stay until the next one is there
        if isinstance(source, Generator):
            with suppress(Exception):
                source.close()


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


@atexit.register
def end_all() -> None:
    """Stop all threads: the end of the program must not find them running in libraries that are gone by then."""
    running = list(_RUNNING.items())
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join()
