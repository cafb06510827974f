"""Threads of this process that belong to data."""

from __future__ import annotations

import threading


def running() -> list[str]:
    """Their names; threads of tables on disk are none of a stream."""
    names = [thread.name for thread in threading.enumerate()]
    return [
        name
        for name in names
        if name.startswith("tritonemb") and not name.startswith(("tritonemb-disk", "tritonemb-rows"))
    ]
