"""Rows in host memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.stores import Model, initial, plain_record, read, write
from tritonemb.optimizers import Adam
from tritonemb.storage import HostRows, StorageError, memory, record_of

rows_of_40 = st.lists(st.integers(0, 39), unique=True).map(sorted)


@given(st.lists(st.tuples(st.booleans(), rows_of_40), max_size=8), st.sampled_from([5, 516]))
def test_it_is_as_a_dict(operations, num_bytes):
    store, model = HostRows(40, plain_record(num_bytes), initial), Model(num_bytes)
    for seed, (writes, rows) in enumerate(operations):
        if writes:
            future = write(store, rows, seed)
            assert future.done()
            model.write(rows, seed)
        else:
            assert read(store, rows).equal(model.read(rows))
    assert store.fields()["weight"].equal(model.read(range(40)))


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
    assert record.views(read(store, [3, 7]))["exp_avg"].mean(1).tolist() == [0, 2.5]


def test_it_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="num_rows must be at least 1, got 0"):
        HostRows(0, plain_record(4), initial)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="pinned only where there is CUDA"):
            HostRows(4, plain_record(4), initial, pin=True)
    with pytest.raises(StorageError, match=r"table 'user': cannot allocate 4,000,000,000,000,000,000 bytes"):
        HostRows(10**18, plain_record(4), initial, table_name="user")
    store = HostRows(4, plain_record(4), initial)
    store.close()
    store.close()
    with pytest.raises(StorageError, match="is closed"):
        read(store, [1])


@pytest.mark.parametrize(
    ("rows", "records", "error", "message"),
    [
        ([1], torch.zeros(1, 4, dtype=torch.uint8), TypeError, "rows must be a tensor, got list"),
        (torch.tensor([1.0]), torch.zeros(1, 4, dtype=torch.uint8), ValueError, "rows must be torch.int64"),
        (torch.tensor([1]), torch.zeros(1, 4), ValueError, "records must be torch.uint8"),
        (torch.tensor([1]), torch.zeros(4, 1, dtype=torch.uint8).t()[:, ::2], ValueError, "not contiguous"),
        (torch.tensor([1]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, r"got \[1\] and \[2, 4\]"),
        (torch.tensor([[1]]), torch.zeros(1, 4, dtype=torch.uint8), ValueError, r"rows must be \[n\]"),
        (torch.tensor([2, 1]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, r"rows\[0\] is 2 and rows\[1\] is 1"),
        (torch.tensor([1, 1]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, "drop repetitions"),
        (torch.tensor([-1]), torch.zeros(1, 4, dtype=torch.uint8), ValueError, "rows 0 to 3; there is no row -1"),
        (torch.tensor([0, 4]), torch.zeros(2, 4, dtype=torch.uint8), ValueError, "there is no row 4"),
    ],
)
def test_bad_requests_have_a_name(rows, records, error, message):
    store = HostRows(4, plain_record(4), initial)
    for ask in (store.read, store.write):
        with pytest.raises(error, match=message):
            ask(rows, records)
