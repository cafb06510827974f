"""The stream on which a GPU groups ids beside lookup and dense network, without a GPU: who waits for whom, and when."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tritonemb as te
from tritonemb.ops.row_groups import capture_id


class FakeStream(AbstractContextManager):
    """A CUDA stream that writes down what it records, waits for and runs, in `log`."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append((self.name, "records"))
        return len(self.log)

    def wait_event(self, event):
        self.log.append((self.name, "waits for entry", event))

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def __exit__(self, *_):
        self.log.append("back")


@pytest.fixture
def fake_streams(monkeypatch):
    """A GPU's streams without a GPU: what they do, in order, and which capture, if any, takes place."""
    log, capture = [], SimpleNamespace(number=None)
    current, row_groups = FakeStream("current", log), importlib.import_module("tritonemb.ops.row_groups")
    monkeypatch.setattr(row_groups, "_streams", {})
    monkeypatch.setattr(row_groups, "capture_id", lambda stream: capture.number)
    grouped = row_groups.row_groups
    monkeypatch.setattr(row_groups, "row_groups", lambda *batch: log.append("groups") or grouped(*batch))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append((tensor.dtype, stream.name)))
    for name, function in {
        "Stream": lambda _: FakeStream("side", log),
        "stream": lambda stream: stream,
        "current_stream": lambda _: current,
        "is_current_stream_capturing": lambda: capture.number is not None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return log, capture


def one_row_twice():
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("t", 10, 4)], optimizer=te.optim.SGD(lr=1.0))
    initial = collection.tables[0].weight.clone()
    batch = te.KeyedJaggedTensor.from_lengths(["t"], torch.tensor([1, 1]), torch.tensor([2]))
    return collection, batch, lambda steps: torch.equal(collection.tables[0].weight[1], initial[1] - 2.0 * steps)


OUTPUTS = [(dtype, "current") for dtype in (torch.int64, torch.int32, torch.int32, torch.int64)]


def test_a_gpu_groups_on_a_stream_of_its_own_and_the_update_waits_for_it(fake_streams):
    log, _ = fake_streams
    collection, batch, updated = one_row_twice()
    output = collection(batch)
    ids = [(torch.int64, "side")] * 2
    assert log == [("current", "records"), ("side", "waits for entry", 1), "groups", "back", *OUTPUTS, *ids]
    log.clear()
    output.sum().backward()
    assert log == [("current", "waits for", "side")]
    assert updated(1)


def test_a_captured_update_groups_beside_all_that_was_captured_since_the_lookup(fake_streams):
    """It forks from the lookup and joins at once: no stream stays forked where a capture has no backward."""
    log, capture = fake_streams
    collection, batch, updated = one_row_twice()
    capture.number = 7
    output = collection(batch)
    assert log == [("current", "records")]
    log.append("dense network")
    output.sum().backward()
    assert log[2:] == [("side", "waits for entry", 1), "groups", "back", *OUTPUTS, ("current", "waits for", "side")]
    assert updated(1)


@pytest.mark.parametrize("later", [8, None], ids=["another", "none"])
def test_a_backward_in_another_capture_groups_on_its_own_stream(fake_streams, later):
    """Forward and backward may be two graphs, as `torch.cuda.make_graphed_callables` has them."""
    log, capture = fake_streams
    collection, batch, updated = one_row_twice()
    capture.number = 7
    output = collection(batch)
    capture.number = later
    output.sum().backward()
    assert [entry for entry in log if entry != "groups"] == [("current", "records")]
    assert updated(1)


def test_gradients_that_are_kept_need_no_groups(fake_streams):
    log, _ = fake_streams
    collection, batch, updated = one_row_twice()
    with collection.accumulate():
        for _ in range(2):
            collection(batch).sum().backward()
        assert log == []
    assert updated(2)


def test_the_driver_tells_captures_apart(monkeypatch):
    statuses = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_ACTIVE=1)
    answers = {5: (0, 1, 42, None, [], 0), 6: (0, 0, 42, None, [], 0), 7: (401, None, None, None, None, None)}
    driver = SimpleNamespace(cuStreamGetCaptureInfo=answers.get, CUstreamCaptureStatus=statuses)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    assert [capture_id(SimpleNamespace(cuda_stream=stream)) for stream in answers] == [42, None, None]
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert capture_id(SimpleNamespace(cuda_stream=5)) is None


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_step_takes_groups_that_were_prefetched(monkeypatch):
    """In a graph nothing is forked; `prefetch` on a stream beside it groups a batch that the GPU is going to train."""
    collection, batch, updated = one_row_twice()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with torch.no_grad():
        assert te.nn.prefetch(collection, batch).of(collection.table_set)[1] is None
    with collection.accumulate():
        assert te.nn.prefetch(collection, batch).of(collection.table_set)[1] is None
    features = te.nn.prefetch(collection, batch)
    monkeypatch.undo()
    _, groups = features.of(collection.table_set)
    assert groups.rows[: groups.num_groups].tolist() == [1]
    torch.compile(collection, fullgraph=True, backend="aot_eager")(features).sum().backward()
    assert updated(1)
