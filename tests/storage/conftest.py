"""What tests of storage share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.storage.stores import Stop


@pytest.fixture
def disk_size() -> str:
    return "1m"


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Has a signal's handler raise Stop in the main thread, and waits until it has."""
    if not hasattr(signal, "pthread_kill"):
        pytest.skip("this system sends no signals to threads")
    handled = threading.Event()

    def handle(*_: object) -> None:
        if not handled.is_set():
            handled.set()
            raise Stop

    def send() -> None:
        handled.clear()
        for _ in range(100):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            if handled.wait(0.1):  # not so if it came right before the main thread began to wait in the kernel
                return
        raise AssertionError("the signal was never handled")

    before = signal.signal(signal.SIGUSR1, handle)
    yield send
    signal.signal(signal.SIGUSR1, before)
