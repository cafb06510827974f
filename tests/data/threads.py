"""Threads of this process that belong to data."""

from __future__ import annotations

import threading

from tests.helpers import DEADLINE

# Of kernels and of tables on disk. A shielded one may stay: Python's `Thread.start` cannot be interrupted safely.
OTHERS = ("tritonemb-kernels", "tritonemb-disk", "tritonemb-rows", "tritonemb-shielded")


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
