"""Work that no signal's handler breaks off. Those run in the main thread alone, and may raise anywhere in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class GivenUp(Exception):
    """Whoever wanted the work has been interrupted."""


def apart(work: Callable[[], T]) -> T:
    """What `work` returns, or raises. The main thread has it done by another one, and waits for it.

    If a signal's handler raises meanwhile, as Ctrl-C's does, that is raised here when the work has ended, at the next
    `stop_if_given_up` at the latest. If one raises once more it is not waited for any longer: what the work uses must
    be its own, or stay whole as long as the work has it.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    errand = _Errand(work)
    try:
        if not errand.set_out():
            return work()
        errand.over.wait()
    except BaseException:
        errand.give_up()
        raise
    return errand.outcome()


def stop_if_given_up() -> None:
    """Raise GivenUp in a thread whose work nobody wants any more."""
    thread = threading.current_thread()
    if isinstance(thread, _Errand) and thread.given_up:
        raise GivenUp


class _Errand(threading.Thread):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="tritonemb-errand", daemon=True)
        self._work, self._claim = work, threading.Lock()  # whoever has that says whether the work is done
        self._result: Any = None
        self._failure: BaseException | None = None
        self.over, self.given_up = threading.Event(), False

    def set_out(self) -> bool:
        """Start; whether the system lets us: it does not when the interpreter ends."""
        try:
            self.start()
        except RuntimeError:
            return False
        return True

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            result = self._work()
            if not self.given_up:  # else nobody comes for it, and a file, say, is closed when nobody has it any more
                self._result = result
        except BaseException as failure:
            self._failure = failure
        finally:
            self.over.set()

    def give_up(self) -> None:
        """Have it end early, and wait for that; or never begin."""
        self.given_up = True
        if not self._claim.acquire(blocking=False):
            self.over.wait()
        self._result = self._failure = None

    def outcome(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return self._result
