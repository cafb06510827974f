"""Threads of this process that belong to data."""

from __future__ import annotations

import threading

from tests.helpers import DEADLINE

OTHERS = ("tritonemb-kernels", "tritonemb-disk", "tritonemb-rows")  # of kernels and of tables on disk


def threads() -> list[threading.Thread]:
    names = [(thread.name, thread) for thread in threading.enumerate()]
    return [thread for name, thread in names if name.startswith("tritonemb") and not name.startswith(OTHERS)]


def running() -> list[str]:
    """Names of the threads."""
    return [thread.name for thread in threads()]


def threads_end() -> bool:
    """Wait for the end of the threads; whether it comes in time."""
    for thread in threads():
        thread.join(DEADLINE)
    return not running()
