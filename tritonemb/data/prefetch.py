"""Iterator that prefetches items in a thread: batches of a stream, and steps of a trainer."""

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
GRACE = 2.0  # seconds for the thread to end after a failure
POLL = 0.1  # seconds between checks that the thread is alive


class Prefetcher(Closeable, Iterator[T]):
    """Iterator over the items of `source`, in order; `next` raises an exception of the source in its place.

    Item `k + depth` is started when item `k` is taken, so ranks that take the same number of items start the same
    number of collectives.

    Args:
        source: iterated in the thread, and closed there if it is a generator.
        depth: items produced beyond those taken; at least 1.
        name: name of the thread.
        on_stop: called in any thread when no more items are needed; must not block; a source cancels its waits.
        collective: whether producing an item runs collectives. Then all permitted items are produced before the thread
            ends, unless there was a failure; with a `permit`, too.
        permit: called by the thread that takes an item; the next item is produced inside the context that it returns.

    After a failure the thread has `GRACE` seconds to end, as it may wait forever. A forked process does not have the
    thread: there `next` raises a RuntimeError, and `close` does nothing.
    """

    def __init__(
        self, source: Iterator[T], depth: int, name: str, on_stop: Callable[[], None] | None = None, *,
        collective: bool = False, permit: Permit | None = None,
    ) -> None:  # fmt: skip
        self._permit = permit or nullcontext
        self._complete = collective or permit is not None
        # The thread references the queues only, so that this object can be collected, which stops the thread. The
        # finalizer must not join the thread, which may be waiting for the thread that runs the finalizer.
        self._queues = _Queues(on_stop)
        self._stop = weakref.finalize(self, self._queues.stop)
        self._stop.atexit = False
        for _ in range(depth):
            self.widen()
        self._thread = threading.Thread(target=self._queues.fill, args=(source,), name=name, daemon=True)
        if not collective:  # a thread in a collective is not joined at exit: it may wait for a dead rank
            _RUNNING[self._thread] = self._stop
        self._thread.start()

    def __next__(self) -> T:
        if self._queues.inherited:
            raise RuntimeError(
                "this stream was opened before the process was forked, so its threads do not exist in this process; "
                "open it after the fork"
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
        """Increase the depth by one item."""
        self._queues.permits.put(self._permit())

    def settle(self) -> None:
        """Wait until all permitted items are produced; no collective of the source runs then."""
        settled = threading.Event()
        self._queues.permits.put(settled)
        while self._thread.is_alive() and not settled.wait(POLL):
            pass

    def close(self, failed: bool = False) -> None:
        """Stop the thread after its current item and join it; no further items are returned. `failed`: whether this
        rank, or another one, has failed."""
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
    """Queues between the thread that produces items and the consumer; the collector may call `stop` at any time."""

    def __init__(self, on_stop: Callable[[], None] | None) -> None:
        # Items, or the exception that ends them; permits for items, or an Event to set after the permits before it.
        self.items: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.permits: SimpleQueue[Any] = SimpleQueue()
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
        """Produce an item per permit, in the thread; after the last item, only set events."""
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
                item = None  # free it while the next one is produced
        if isinstance(source, Generator):
            with suppress(Exception):
                source.close()


_RUNNING: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


@atexit.register
def end_all() -> None:
    """Stop all threads at exit, before the libraries that they run are finalized."""
    running = list(_RUNNING.items())
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join()
