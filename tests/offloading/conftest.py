from __future__ import annotations

import gc
import threading
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
    for tier in [*made]:
        tier.close()
    for thread in threading.enumerate():
        if thread.name.startswith("tritonemb-offload"):
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} is left"
