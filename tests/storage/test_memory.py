"""Rows in host memory."""

from __future__ import annotations

import pytest
import torch

from tests.storage.stores import initial, plain_record
from tritonemb.optimizers import Adam
from tritonemb.storage import HostRows, StorageError, memory, record_of


def test_initial_values_come_in_parts_and_fields_are_the_table(monkeypatch):
    monkeypatch.setattr(memory, "FILL_BYTES", 1000)
    record, asked = record_of(8, torch.float32, Adam.states), []

    def fill(rows, records):
        asked.append(rows.tolist())
        views = record.views(records)
        views["weight"].copy_(rows[:, None].expand(-1, 8))
        views["exp_avg"].zero_()
        views["exp_avg_sq"].zero_()

    store = HostRows(25, record, fill)
    assert asked == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    fields = store.fields()
    assert fields["weight"][:, 3].tolist() == list(range(25))
    fields["exp_avg"][7] = 2.5
    assert store.fields()["exp_avg"][[3, 7]].mean(1).tolist() == [0, 2.5]


def test_it_refuses_what_it_cannot_do():
    with pytest.raises(StorageError, match=r"table 'user': cannot allocate 4,000,000,000,000,000,000 bytes"):
        HostRows(10**18, plain_record(4), initial, table_name="user")
