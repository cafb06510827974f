"""Threads of this process that belong to data."""

from __future__ import annotations

import threading


def running() -> list[str]:
    """Their names; threads of kernels and of tables on disk are none of a stream."""
    others = ("tritonemb-kernels", "tritonemb-disk", "tritonemb-rows")
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("tritonemb") and not name.startswith(others)]
