"""Ctrl-C and SIGTERM as requests to stop after the step that is running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """Training ended at a signal's request; `exit_status` is what a process reports for it: 130 or 143."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"training was interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_status(self) -> int:
        return 128 + self.signum


class StopRequest:
    """The signal that has arrived, if one has."""

    signum: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM while the block runs; a second one acts as usual, at once.

    Outside the main thread, where Python lets nobody handle signals, nothing is noted.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Whoever started this process may have it ignore a signal: then it goes on doing so.
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def note(signum: int, frame: FrameType | None) -> None:
        request.signum = signum
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
