"""Rows in host memory."""

import gc
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.storage.stores import initial, plain_record
from tritonemb.optimizers import Adam
from tritonemb.storage import StorageError, memory
from tritonemb.storage.memory import HostRows
from tritonemb.storage.store import record_of


def test_initial_values_come_in_parts_and_fields_are_the_table(monkeypatch):
    monkeypatch.setattr(memory, "FILL_BYTES", 1000)
    record, requests = record_of(8, torch.float32, Adam.states), []

    def fill(rows, records):
        requests.append(rows.tolist())
        views = record.views(records)
        views["weight"].copy_(rows[:, None].expand(-1, 8))
        views["exp_avg"].zero_()
        views["exp_avg_sq"].zero_()

    store = HostRows(25, record, fill)
    assert requests == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    fields = store.fields
    assert fields["weight"][:, 3].tolist() == list(range(25))
    fields["exp_avg"][7] = 2.5
    assert store.fields["exp_avg"][[3, 7]].mean(1).tolist() == [0, 2.5]


def test_it_refuses_what_it_cannot_do():
    with pytest.raises(StorageError, match=r"table 'user': cannot allocate 4,000,000,000,000,000,000 bytes"):
        HostRows(10**18, plain_record(4), initial, table_name="user")


@pytest.fixture
def cudart(monkeypatch):
    """What is asked of the CUDA runtime, which answers with the code `failure`."""
    requests: list[tuple] = []
    runtime = SimpleNamespace(
        failure=0, calls=requests, cudaGetErrorString=lambda code: f"error {code}",
        cudaHostRegister=lambda *args: requests.append(("register", *args)) or runtime.failure,
        cudaHostUnregister=lambda *args: requests.append(("unregister", *args)) or runtime.failure,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext(requests.append(("device", gpu))))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: requests.append(("wait", gpu)))
    return runtime


GPU = torch.device("cuda", 1)


def test_pinned_rows_take_their_own_bytes_until_nothing_refers_to_them(cudart):
    """PyTorch's allocator would pin the next power of two."""
    store = HostRows(3000, plain_record(12), initial, GPU)
    weight = store.fields["weight"]
    address = weight.data_ptr()
    assert address % mmap.PAGESIZE == 0
    assert cudart.calls == [("device", GPU), ("wait", GPU), ("register", address, 36_000, 3)]
    cudart.calls.clear()
    del store
    gc.collect()
    expected = torch.empty(3000, 12, dtype=torch.uint8)
    initial(torch.arange(3000), expected)
    assert torch.equal(weight, expected)
    assert cudart.calls == []
    del weight
    gc.collect()
    assert cudart.calls == [("device", GPU), ("wait", GPU), ("unregister", address)]


def test_rows_that_cannot_be_pinned_are_an_error_and_are_not_unpinned(cudart):
    cudart.failure = 2
    with pytest.raises(
        StorageError, match=r"table 'user': cannot allocate 36,000 bytes of pinned host memory .*\(.*error 2\)"
    ):
        HostRows(3000, plain_record(12), initial, GPU, table_name="user")
    gc.collect()
    assert [name for name, *_ in cudart.calls] == ["device", "wait", "register"]
