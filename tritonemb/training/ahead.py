"""A generator that runs ahead in a thread by a fixed number of items, and can be waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
GRACE = 2.0  # seconds that a thread gets to end after a failure


class Ahead(Generic[T]):
    """The items of `source`, in their order; its exception, if it raises one, comes out of `next` in its place.

    Which items have been begun depends on nothing but how many were taken: item `k + depth` is begun once item `k` has
    been taken, not earlier. So ranks that take items alike, and whose items hold collectives, hold as many of them.

    Args:
        source: run and closed in the thread; in the caller's where `depth` is 0.
        depth: items that are made beyond those taken.
        name: of the thread.
        collective: whether items hold collectives. Then all those that may be made are made before the thread ends,
            unless there was a failure.
        allow: called in the thread that takes items each time it lets one more be made, which is then made inside the
            context that this has returned. All those that may be made are made before the thread ends then, too.

    After a failure the thread gets `GRACE` to end, for it may wait for a rank that is no more, or for data that do not
    come before whoever closes what `source` reads from has told it so. It ends then, with the item that it is making.
    """

    def __init__(
        self,
        source: Generator[T, None, None],
        depth: int,
        name: str,
        collective: bool = False,
        allow: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._source, self._collective, self._complete = source, collective, collective or allow is not None
        self._allow = nullcontext if allow is None else allow
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._allowed = deque(self._allow() for _ in range(depth))
        self._resting = self._stopped = self._finished = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if depth:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            return next(self._source)
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._stopped)
            if self._items:
                self._allowed.append(self._allow())
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def widen(self) -> None:
        """One item more may be made beyond those taken, from now on. Not for items that hold collectives."""
        assert not self._collective
        with self._changed:
            self._allowed.append(self._allow())
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until everything is made that may be made for now: no collective of the source is under way then."""
        if self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._finished or (self._resting and not self._allowed))

    def close(self, failed: bool = False) -> None:
        """End the thread; further items there are none.

        Args:
            failed: this rank, or another one, has failed.
        """
        if self._thread is None:
            self._source.close()
            return
        if self._complete and not failed:
            self.settle()
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(GRACE if failed else None)

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while (allowed := self._wait_for_leave()) is not None:
                try:
                    with allowed:
                        item = next(self._source)
                except StopIteration:
                    break
                with self._changed:
                    if not self._stopped:
                        self._items.append(item)
                    self._changed.notify_all()
                del item  # or it would stay until the next one is there
        except BaseException as caught:
            error = caught
        try:
            self._source.close()
        except BaseException as caught:
            error = error or caught
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def _wait_for_leave(self) -> AbstractContextManager[object] | None:
        """Wait for leave to make one item more, in this context; None if nobody wants any."""
        with self._changed:
            self._resting = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._allowed)
            self._resting = False
            return None if self._stopped else self._allowed.popleft()
