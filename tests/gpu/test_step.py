"""A training step never waits for the GPU, can be captured in a CUDA graph, and reports bad ids at the next step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

import tritonemb as te
from tests.gpu.problems import TABLES, hot_steps, make_gpu_collection, on_gpu, run_step, warm_up
from tests.helpers import assert_same_bits, configurations, contents
from tritonemb.optim import OPTIMIZERS

pytestmark = [pytest.mark.gpu, pytest.mark.more]

DLRM_TABLES = [te.TableConfig("a", 1000, 32), te.TableConfig("b", 300, 32, pooling="mean")]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("spec", configurations(), ids=lambda spec: spec.name)
def test_a_step_does_not_wait_for_the_device(spec):
    collection = make_gpu_collection(spec)
    steps = on_gpu(hot_steps(collection, 3))
    run_step(collection, *steps[0])
    torch.cuda.synchronize()
    with no_waiting():
        for step in steps[1:]:
            run_step(collection, *step)
    assert int(collection.step) == len(steps), "a step did not run"


def test_waiting_would_be_noticed():
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        count.item()


def test_lookups_and_gradients_of_weights_do_not_wait_either():
    collection = make_gpu_collection(te.optim.SGD(lr=0.1))
    ((batch, grad),) = on_gpu(hot_steps(collection, 1))
    weights = batch.weights().clone().requires_grad_()
    batch = te.KeyedJaggedTensor(batch.keys(), batch.values(), weights, offsets=batch.offsets())
    for waiting in (True, False):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if waiting else "error")
        try:
            with torch.no_grad():
                collection(batch)
            collection(batch).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert weights.grad.isfinite().all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_step_has_the_bits_of_eager_ones(name):
    spec = OPTIMIZERS[name](lr=0.05)
    collection, twin = make_gpu_collection(spec), make_gpu_collection(spec)
    first, *peers = on_gpu(hot_steps(collection, 4))
    # A graph replays on the same memory: batches of one size take turns in it.
    length = min(batch.values().numel() for batch, _ in (first, *peers))
    batch = te.KeyedJaggedTensor(
        first[0].keys(),
        first[0].values()[:length].clone(),
        first[0].weights()[:length].clone(),
        offsets=first[0].offsets().clamp(max=length),
    )
    grad = first[1].clone()
    steps = [(values[:length], gradient) for (other, gradient) in peers for values in (_shared_ids(other),)]
    warm_up(lambda: run_step(twin, batch, grad))
    run_step(collection, batch, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_step(twin, batch, grad)
    for values, gradient in steps:
        batch.values().copy_(values)
        grad.copy_(gradient)
        expected = run_step(collection, batch, grad)
        graph.replay()
        assert torch.equal(out, expected)
    te.check_errors()
    assert_same_bits(contents(twin), contents(collection))


def _shared_ids(batch: te.KeyedJaggedTensor) -> torch.Tensor:
    """Ids that are valid in every table, whatever the offsets."""
    return batch.values() % min(config.num_embeddings for config in TABLES)


def test_a_whole_model_can_be_captured():
    torch.manual_seed(0)
    model = te.nn.DLRM(DLRM_TABLES, 13, (64,), (64,), te.optim.RowWiseAdagrad(lr=0.1), device="cuda")
    optimizer = torch.optim.SGD(
        [p for name, p in model.named_parameters() if not name.startswith("embeddings")], lr=0.05
    )
    dense, labels = torch.randn(128, 13, device="cuda"), (torch.rand(128, device="cuda") < 0.5).float()
    batch = one_id_each()

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = functional.binary_cross_entropy_with_logits(model(dense, batch), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(50):
        graph.replay()
        losses.append(loss.clone())
    assert int(model.embeddings.step) == 53
    assert losses[-1] < 0.7 * losses[0]  # 128 samples, learnt by heart


def one_id_each(batch_size: int = 128) -> te.KeyedJaggedTensor:
    """A batch for DLRM_TABLES."""
    ids, lengths = torch.randint(0, 300, (2 * batch_size,)), torch.ones(2 * batch_size, dtype=torch.int64)
    return te.KeyedJaggedTensor.from_lengths(["a", "b"], ids, lengths).to("cuda")


@pytest.mark.usefixtures("dynamo")
def test_twenty_replays_of_reduced_overhead_leave_the_bits_of_twenty_eager_steps():
    twins = [make_gpu_collection(te.optim.RowWiseAdagrad(lr=0.05), DLRM_TABLES) for _ in range(2)]
    calls = torch.compile(twins[0], mode="reduce-overhead", fullgraph=True), twins[1]
    batch, grad = one_id_each(), torch.randn(128, 64, device="cuda")
    ids = batch.values().clone()
    counters.clear()
    for step in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        batch.values().copy_((ids + step) % 300)
        outputs = [run_step(call, batch, grad).clone() for call in calls]
        assert torch.equal(*outputs), f"step {step}"
    te.check_errors()
    assert counters["inductor"]["cudagraph_skips"] == 0, "a graph was called, not replayed"
    assert_same_bits(contents(twins[0]), contents(twins[1]))
    assert int(twins[0].step) == 20


def test_a_captured_step_groups_beside_lookup_and_dense_network(tmp_path):
    model = te.nn.DLRM(DLRM_TABLES, 13, (64,), (64,), te.optim.RowWiseAdagrad(lr=0.1), device="cuda")
    dense, batch = torch.randn(128, 13, device="cuda"), one_id_each()

    def step() -> None:
        model(dense, batch).sum().backward()

    warm_up(step)
    graph, dump = torch.cuda.CUDAGraph(), tmp_path / "graph.dot"
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        step()
    graph.debug_dump(str(dump))
    ends = Counter(re.findall(r'->\s*"(\w+)"', dump.read_text()))
    assert ends, "no edge is in the dump"
    assert max(ends.values()) > 1, "every node follows one: nothing runs beside another"
    graph.replay()
    te.check_errors()
    assert int(model.embeddings.step) == 2


def test_forward_and_backward_may_be_captured_in_two_graphs():
    """No stream stays forked where the first capture ends."""
    collection, twin = (make_gpu_collection(te.optim.RowWiseAdagrad(lr=0.1), DLRM_TABLES) for _ in range(2))
    batch, grad = one_id_each(), torch.randn(128, 64, device="cuda")
    for entry in (collection, twin):
        warm_up(lambda item=entry: run_step(item, batch, grad))
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        out = twin(batch)
    with torch.cuda.graph(backward, pool=forward.pool()):
        out.backward(grad)
    for _ in range(3):
        expected = run_step(collection, batch, grad)
        forward.replay()
        backward.replay()
        assert torch.equal(out.detach(), expected)
    te.check_errors()
    assert_same_bits(contents(twin), contents(collection))


@pytest.fixture
def one_bad_id() -> te.KeyedJaggedTensor:
    lists = {"a": [[1, 2], [3], []], "b": [[5], [300, 6], [7]]}
    return te.KeyedJaggedTensor.from_lists(lists, device="cuda")


MESSAGE = r"table 'b': id 300 of feature 'b', sample 1 \(position 4 of values\) is out of range; valid ids are 0 to 299"


def test_a_bad_id_is_raised_when_asked(one_bad_id):
    collection = make_gpu_collection(te.optim.SGD(lr=0.1), DLRM_TABLES)
    collection(one_bad_id)
    with pytest.raises(ValueError, match=MESSAGE):
        te.check_errors()
    te.check_errors()  # told once


def test_a_bad_id_is_raised_at_the_next_step(one_bad_id):
    collection = make_gpu_collection(te.optim.SGD(lr=0.1), DLRM_TABLES)
    good = te.KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[2]]}, device="cuda")
    with torch.no_grad():
        collection(one_bad_id)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=MESSAGE):
        collection(good)
    collection(good)
    te.check_errors()


def test_a_bad_id_reads_as_zero(one_bad_id):
    collection = make_gpu_collection(te.optim.SGD(lr=1.0), DLRM_TABLES)
    with torch.no_grad():
        out = collection(one_bad_id)
    assert torch.equal(out[1, 32:], contents(collection)["b.weight"][6] / 2)
    with pytest.raises(ValueError, match=MESSAGE):
        te.check_errors()


def test_a_bad_id_that_is_ignored_reads_as_zero_and_updates_nothing(one_bad_id):
    collection = make_gpu_collection(te.optim.SGD(lr=1.0), DLRM_TABLES, bounds_check="ignore")
    initial = contents(collection)
    out = collection(one_bad_id)
    assert torch.equal(out[1, 32:], initial["b.weight"][6] / 2)
    out.backward(torch.ones_like(out))
    te.check_errors()
    final = contents(collection)
    changed = (final["b.weight"] != initial["b.weight"]).any(1).nonzero().flatten()
    assert changed.tolist() == [5, 6, 7]
