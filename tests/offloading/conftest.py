from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tritonemb.offloading.tiers import DiskTier, HostTier


@pytest.fixture(autouse=True)
def _no_threads_are_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test has left open: what it raised, for one, may keep a model alive."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    for kind in (DiskTier, HostTier):

        def init(self: Any, *args: Any, before: Any = kind.__init__, **options: Any) -> None:
            before(self, *args, **options)
            made.add(self)

        monkeypatch.setattr(kind, "__init__", init)
    yield
    gc.collect()
    for each in [*made]:
        each.close()
    deadline = time.monotonic() + 60
    while left := [each.name for each in threading.enumerate() if each.name.startswith("tritonemb-offload")]:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)
