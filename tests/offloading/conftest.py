import errno
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tritonemb.offloading.tiers import DiskTier, HostTier
from tritonemb.storage import aio


@pytest.fixture(autouse=True)
def _no_threads_are_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test has left open: what it raised, for one, may keep a model alive."""
    tiers: weakref.WeakSet[Any] = weakref.WeakSet()
    for kind in (DiskTier, HostTier):

        def init(self: Any, *args: Any, base_init: Any = kind.__init__, **options: Any) -> None:
            base_init(self, *args, **options)
            tiers.add(self)

        monkeypatch.setattr(kind, "__init__", init)
    yield
    gc.collect()
    for tier in [*tiers]:
        tier.close()
    for thread in threading.enumerate():
        if thread.name.startswith("tritonemb-offload"):
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} is left"


@pytest.fixture
def failing_disk(monkeypatch):
    """`with failing_disk("preadv"):` all calls of this name fail; threads make them, not the kernel's queues."""
    monkeypatch.setattr(aio, "make_queue", lambda: None)
    monkeypatch.setattr(aio.IoContext, "free", aio._make_contexts())

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    @contextmanager
    def failing(call):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            yield

    return failing
