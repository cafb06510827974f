"""`torch.compile(fullgraph=True)`: the same bits as uncompiled, one graph, and no copy of a table in it.

Most graphs run as AOTAutograd made them: Inductor calls the same ops.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_fw_bw_and_get_code

import tritonemb as te
from tests.helpers import assert_close, assert_same_bits, contents, fewer, make_collection, random_steps, train
from tests.strategies import random_batch
from tritonemb.ops.registry import use_kernels
from tritonemb.optim import OPTIMIZERS

pytestmark = [pytest.mark.public, pytest.mark.usefixtures("dynamo")]
KINDS = [OPTIMIZERS[name] for name in fewer(list(OPTIMIZERS), ["row_wise_adagrad", "adam"])]
NUM_STEPS = fewer(5, 3)  # learning rates repeat after four


class Several(nn.Module):
    """Collections side by side, so that one compilation serves them all."""

    def __init__(self, collections):
        super().__init__()
        self.collections = nn.ModuleList(collections)

    def forward(self, batch):
        return torch.cat([collection(batch) for collection in self.collections], dim=1)


CONFIGS = [te.TableConfig("a", 30, 7), te.TableConfig("b", 11, 16, features=["a", "b"], pooling="mean")]


@pytest.mark.parametrize("mode", ["none", "l2", "decoupled"])
@pytest.mark.more
def test_compiled_steps_equal_the_references(mode):
    """Every optimizer, with each decay; clipping, limits of norms and CowClip with a third of them each."""
    decay = {"weight_decay": 0.0 if mode == "none" else 0.1, "weight_decay_mode": mode}
    limits = ({"max_gradient": 0.3}, {"max_norm": 0.7}, {"cow_clip": 0.1})
    models = []
    for _ in range(2):
        specs = [kind(lr=0.05, **decay, **limits[i % 3]) for i, kind in enumerate(KINDS)]
        models.append(Several([make_collection(CONFIGS, spec) for spec in specs]))
    model, twin = models
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for step, (batch, grad) in enumerate(random_steps(model.collections[0], NUM_STEPS, weighted=True)):
        for module in (*model.collections, *twin.collections):
            module.set_learning_rate(0.05 / (1 + step % 4))
        compiled(batch).backward(grad.repeat(1, len(KINDS)))
        with use_kernels("reference"):
            for module in twin.collections:
                train(module, [(batch, grad)])
    for module, expected in zip(model.collections, twin.collections, strict=True):
        actual, required = contents(module), contents(expected)
        if module.optimizer.name == "ftrl":  # sums σ · w, σ of size 1 / lr: so is its unit
            for name in ("a.linear", "b.linear"):
                torch.testing.assert_close(actual.pop(name), required.pop(name), rtol=1e-6, atol=1e-4)
        # Float32 on both sides; squares and norms of a row are summed in another order.
        assert_close(actual, required, rtol=1e-6, atol=1e-6, title=repr(module.optimizer))


def test_gradients_without_an_optimizer():
    collection, twin = (make_collection(CONFIGS, None) for _ in range(2))
    compiled = torch.compile(collection, fullgraph=True, backend="aot_eager")
    for batch, grad in random_steps(collection, 3, weighted=True):
        collection.zero_grad()
        twin.zero_grad()
        weights = [batch.weights().clone().requires_grad_() for _ in range(2)]
        for module, weight in zip((compiled, twin), weights, strict=True):
            module(te.KeyedJaggedTensor(batch.keys(), batch.values(), weight, batch.lengths())).backward(grad)
        assert torch.equal(weights[0].grad, weights[1].grad)
        for actual, expected in zip(collection.tables, twin.tables, strict=True):
            assert torch.equal(actual.weight.grad, expected.weight.grad)


@pytest.fixture
def counter():
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.few(1)
def test_one_graph_serves_all_learning_rates_and_numbers_of_ids(pooled, counter):
    """The first batch is used twice: that it keeps its offsets must not look like another kind of batch."""
    configs = CONFIGS if pooled else [te.TableConfig(name, 30, 7, pooling="none") for name in "ab"]
    collection, twin = (make_collection(configs, te.optim.Adam(lr=0.1), pooled) for _ in range(2))
    compiled = torch.compile(collection, fullgraph=True, backend=counter)
    counts = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(collection.fused_optimizer, 0.9)
    for index, length in enumerate((4, 4, 9, 3, 5, 2, 1, 6, 7, 8, 4)):
        if index != 1:
            ((batch, grad),) = random_steps(collection, 1, max_length=length, weighted=True, seed=index)
        twin.set_learning_rate(collection.fused_optimizer.param_groups[0]["lr"])
        outputs = [module(batch) for module in (compiled, twin)]
        if not pooled:
            assert outputs[0].to_lists() == outputs[1].to_lists()
            outputs = [output.values() for output in outputs]
        assert torch.equal(*outputs)
        for output in outputs:
            output.backward(grad)
        collection.fused_optimizer.step()
        scheduler.step()
        counts.append(counter.frame_count)
    assert_same_bits(contents(collection), contents(twin))
    assert float(collection.learning_rate) == pytest.approx(0.1 * 0.9**11)
    assert counts[:2] == [1, 1]
    assert counts[-1] <= 2  # numbers become dynamic when they change for the first time
    assert counts[2] == counts[-1]


def test_one_graph_serves_all_batch_sizes(counter):
    collection, twin = (make_collection(CONFIGS, te.optim.Adagrad(lr=0.1)) for _ in range(2))
    compiled = torch.compile(collection, fullgraph=True, backend=counter)
    for index, size in enumerate((16, 9, 5, 33, 2)):
        step = random_steps(collection, 1, batch_size=size, seed=index)
        train(compiled, step)
        train(twin, step)
    assert counter.frame_count <= 2
    for nothing in ({"a": [[], []], "b": [[], []]}, {"a": [], "b": []}):  # PyTorch gives sizes of 0 their own graphs
        batch = te.KeyedJaggedTensor.from_lists(nothing)
        train(compiled, [(batch, torch.ones(batch.stride(), 39))])
    assert counter.frame_count <= 4
    train(compiled, random_steps(collection, 1, batch_size=7))
    assert counter.frame_count <= 4
    train(twin, random_steps(collection, 1, batch_size=7))
    assert int(collection.step) == 8
    weights = [{k: value for k, value in contents(module).items() if k != "step"} for module in (collection, twin)]
    assert_same_bits(*weights)


@pytest.mark.more
def test_keys_in_another_order_and_unused_ones():
    collection, twin = (make_collection(CONFIGS, te.optim.Adam(lr=0.1)) for _ in range(2))
    rows = {"a": 11, "b": 11}
    for keys in (["b", "unused\nkey", "a"], ["a", "b"]):
        batch = random_batch(rows, keys, 6, 3, weighted=True)
        grad = torch.randn(6, 39)
        train(torch.compile(collection, fullgraph=True, backend="aot_eager"), [(batch, grad)])
        train(twin, [(batch, grad)])
        assert_same_bits(contents(collection), contents(twin))


NUM_ROWS, DIM = 10_007, 13  # numbers that nothing else in a graph has


def table_copies(code: str) -> list[str]:
    """Lines of Inductor's code that allocate or fill something of a table's shape."""
    allocations = re.compile(rf"= *(empty_strided\w*|aten\.\w+|torch\.\w+|extern_kernels\.\w+)\(.*{NUM_ROWS}")
    shape = re.compile(rf"clone|copy_|{NUM_ROWS * DIM}L?\b")
    lines = [line.strip() for line in code.splitlines()]
    return [line for line in lines if allocations.search(line) or (shape.search(line) and not line.startswith("#"))]


def generated_code(module, batch) -> str:
    _, codes = run_fw_bw_and_get_code(lambda: torch.compile(module, fullgraph=True)(batch))
    return "\n".join(codes)


@pytest.mark.parametrize("optimizer", [te.optim.SGD(), te.optim.Adam()], ids=["sgd", "adam"])
@pytest.mark.more
def test_no_table_is_copied_in_the_graph(optimizer):
    collection = make_collection([te.TableConfig("a", NUM_ROWS, DIM)], optimizer)
    pointers = [tensor.data_ptr() for tensor in collection.state_dict().values()]
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1, 2], [], [2]]})
    initial = contents(collection)
    code = generated_code(collection, batch)
    assert "embedding_bag_fused" in code
    assert "row_update_" in code
    assert table_copies(code) == []
    assert not torch.equal(contents(collection)["a.weight"], initial["a.weight"])
    assert [tensor.data_ptr() for tensor in collection.state_dict().values()] == pointers


@pytest.mark.more
def test_a_copied_table_would_be_noticed():
    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(NUM_ROWS, DIM))

        def forward(self, batch):
            table = self.table.detach().clone()
            table[batch.values()] += 1
            return (table[batch.values() + 1] * self.table[batch.values()]).sum()

    code = generated_code(Copying(), te.KeyedJaggedTensor.from_lists({"a": [[1, 2], [], [2]]}))
    assert table_copies(code)


def test_two_lookups_in_one_compiled_region():
    """Both lookups see the tables as they were; both updates happen."""

    class Twice(nn.Module):
        def __init__(self, collection):
            super().__init__()
            self.collection = collection

        def forward(self, first, second):
            return self.collection(first), self.collection(second)

    collection, twin = (make_collection(CONFIGS, te.optim.SGD(lr=0.1)) for _ in range(2))
    (batch1, grad1), (batch2, grad2) = random_steps(collection, 2)
    out = torch.compile(Twice(collection), fullgraph=True, backend="aot_eager")(batch1, batch2)
    expected = (twin(batch1), twin(batch2))
    for result, required in zip(out, expected, strict=True):
        assert torch.equal(result, required)
    torch.autograd.backward(out, [grad1, grad2])
    torch.autograd.backward(expected, [grad1, grad2])
    assert int(collection.step) == int(twin.step) == 2
    # The two updates may be applied in either order.
    assert_close(contents(collection), contents(twin), rtol=1e-6, atol=1e-6)
