"""How many rows may wait to be written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tritonemb.storage.store import record_of
from tritonemb.tables import cache_storage
from tritonemb.tables.cache_storage import RowTransfer

RECORD = record_of(4, torch.float32, ())


class Slow:
    """Writes that have ended when somebody waits for them, in a store that takes them all."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.waited: list[int] = []

    def write(self, rows, records):
        number = len(self.asked)
        self.asked.append(number)
        return SimpleNamespace(done=lambda: number in self.waited, wait=lambda: self.waited.append(number))


@pytest.mark.parametrize("size", [1, 3, 20])
def test_writes_that_nobody_waits_for_take_little_memory(monkeypatch, size):
    """As of a table whose rows only leave, while only others' are read."""
    store = Slow()
    table = SimpleNamespace(store=store, record=RECORD, weight=torch.zeros(20, 4), _buffers={})
    most = 10 * RECORD.num_bytes
    monkeypatch.setattr(cache_storage, "MAX_PENDING_BYTES", most)
    mover = RowTransfer(torch.device("cpu"))
    for _ in range(50):
        mover.write([(table, torch.arange(size), torch.arange(size))])
        assert (len(store.asked) - len(store.waited)) * size * RECORD.num_bytes <= most
    assert len(store.asked) - len(store.waited) == 10 // size  # no sooner than needed
    mover.finish_writes()
    assert store.waited == store.asked == list(range(50))
