"""Threads of this process that belong to data."""

from __future__ import annotations

import threading


def running() -> list[str]:
    """Their names; the threads that all tables on disk share stay as long as the process."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("tritonemb") and not name.startswith("tritonemb-disk")]
