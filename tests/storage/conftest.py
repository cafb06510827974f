"""What tests of storage share."""

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.storage.stores import Stop, disk_rows, write
from tritonemb.storage import aio
from tritonemb.storage.page_table import FileLayout


@pytest.fixture(autouse=True)
def page_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of the pages of new files, whatever the disk's sectors are."""
    value: int = getattr(request, "param", aio.PAGE_BYTES)
    layout = classmethod(lambda cls, num_rows, record_bytes, _: cls(num_rows, record_bytes, value))
    monkeypatch.setattr(FileLayout, "smallest", layout)
    return value


@pytest.fixture
def disk_size() -> str:
    return "1m"


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """100 rows of 516 bytes, 7 in a page, in a file."""
    path = tmp_path / "rows"
    with disk_rows(path, 100, 516) as store:
        write(store, range(100), 1).wait()
    return path


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Has a signal's handler raise Stop in the main thread, and waits until it has."""
    if not hasattr(signal, "pthread_kill"):
        pytest.skip("this system sends no signals to threads")
    main, armed, handled = threading.main_thread().ident, list[bool](), threading.Semaphore(0)

    def handle(*_: object) -> None:
        if armed:  # a signal that is sent again may come when the first one has been handled
            armed.pop()
            handled.release()
            raise Stop

    def is_handling() -> bool:
        frame = sys._current_frames()[main]
        while frame is not None and frame.f_code is not handle.__code__:
            frame = frame.f_back
        return frame is not None

    def send() -> None:
        armed.append(True)
        for _ in range(1000):
            signal.pthread_kill(main, signal.SIGUSR1)
            if handled.acquire(timeout=0.1):  # not so if it came right before the main thread began to wait
                while is_handling():  # else the next one would be raised in the handler of this one
                    time.sleep(0.001)
                return
        raise AssertionError("the signal was never handled")

    initial = signal.signal(signal.SIGUSR1, handle)
    gc.collect()
    gc.disable()  # Python drops what a handler raises while the collector runs a finalizer
    yield send
    gc.enable()
    signal.signal(signal.SIGUSR1, initial)
