"""How many rows wait to be written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tritonemb as te
from tritonemb.tables.cache_storage import RowMoves, RowTransfer
from tritonemb.tables.server_table import make_table


class Slow:
    """Writes that have ended when somebody waits for them, in a store that takes them all."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.waited: list[int] = []

    def transfer(self, requests, write):
        ((_, rows, _),), number = requests, len(self.asked)
        self.asked.append(rows.tolist())
        return [SimpleNamespace(wait=lambda: self.waited.append(number))]


@pytest.mark.parametrize("size", [1, 3, 20])
def test_writes_that_nobody_waits_for_take_little_memory(size):
    """As of a table whose rows only leave, while only others' are read."""
    store, tables = Slow(), [make_table(te.TableConfig(name, 20, 4, placement="host"), ()) for name in "ab"]
    tables[1].rows.store = store
    transfer = RowTransfer(tables, torch.tensor([0, 20]))
    rows = torch.randperm(20)[:size]
    moves = RowMoves([0, size], torch.tensor([0, 0, size]), torch.ones_like(rows), rows, rows)
    for number in range(50):
        transfer.write(moves)
        assert store.waited == list(range(number))  # the writes of one batch are pending
    transfer.finish_writes()
    assert store.waited == list(range(50))
    assert store.asked == [rows.sort()[0].tolist()] * 50
