"""Modules of tritonemb's, and fused optimizers: one lookup, one update, the bits of the uncompiled model."""

from collections import Counter

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.compiler.graphs import Compiled, Recorded, assert_same, compile_pair, count_ops
from tests.helpers import assert_same_bits, contents, make_collection, output_of, random_steps

pytestmark = [pytest.mark.public, pytest.mark.usefixtures("dynamo")]
ROWS = 11


class Model(nn.Module):
    """Bags with and without padding, single rows and sequences."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.bags = nn.ModuleList(te.nn.EmbeddingBag(ROWS, dim, mode="sum", dtype=dtype) for dim in (3, 4))
        self.mean = te.nn.EmbeddingBag(ROWS, 4, mode="mean", padding_idx=2, dtype=dtype)
        self.sum = te.nn.EmbeddingBag(ROWS, 4, mode="sum", padding_idx=2, dtype=dtype)
        self.user = te.nn.Embedding(ROWS, 4, dtype=dtype)
        self.items = te.nn.Embedding(ROWS, 4, padding_idx=1, dtype=dtype)
        self.genres = te.nn.Embedding(ROWS, 4, dtype=dtype)

    def forward(self, flat, offsets, matrix, users):
        pooled = [bag(flat, offsets) for bag in self.bags]
        pooled += [self.mean(matrix), self.sum(matrix), self.user(users)]
        return torch.cat(pooled, 1), self.items(matrix).sum(1), self.genres(matrix)


MEMBERS = [("bags.0", "bags.1", "user"), ("mean", "sum"), ("items", "genres")]


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, ROWS, shape, generator=generator) for shape in ((12,), (5, 3), (5,))]
    return draw[0], torch.tensor([0, 2, 2, 7, 12]), draw[1], draw[2]


def test_modules_without_an_optimizer():
    result, *pair = compile_pair(Model())
    assert_same(result, *pair, batch())
    assert result.fused == MEMBERS


@pytest.mark.parametrize("kind", [te.nn.Embedding, te.nn.EmbeddingBag])
@pytest.mark.few(1)
def test_a_lone_module_without_an_optimizer_is_left_to_the_compiler(kind):
    """As PyTorch's, which Inductor knows; a large call has our kernels."""
    model = nn.Sequential(kind(ROWS, 4), nn.Linear(4, 1))
    result, matrix = Recorded(model, fullgraph=True), torch.randint(0, ROWS, (5, 3))
    torch.testing.assert_close(result(matrix), model(matrix))
    result(matrix).sum().backward()
    ops = sum(map(count_ops, [*result.forwards, *result.backwards]), Counter())
    assert not [name for name in ops if "tritonemb" in name]
    assert result.fused == []
    torch._dynamo.reset()
    large = Recorded(kind(ROWS, 2048), fullgraph=True)
    large(torch.randint(0, ROWS, (64, 3))).sum().backward()
    assert count_ops(large.forwards[0])["tritonemb.bag"] == 1


LONE = {
    "rows": (te.nn.Embedding, {}, lambda size: (torch.arange(size) % 7,)),
    "matrix of rows": (te.nn.Embedding, {}, lambda size: (torch.arange(2 * size).view(size, 2) % 7,)),
    "bags": (te.nn.EmbeddingBag, {"mode": "sum"}, lambda size: (torch.arange(2 * size) % 7, torch.arange(size) * 2)),
    "matrix": (te.nn.EmbeddingBag, {"mode": "mean"}, lambda size: (torch.arange(3 * size).view(size, 3) % 7,)),
    "weights": (
        te.nn.EmbeddingBag, {"mode": "sum"},
        lambda size: (torch.arange(size) % 7, torch.arange(size), torch.linspace(0, 1, size).requires_grad_()),
    ),
}  # fmt: skip


class Lone(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        kind, options, self.batch = LONE[form]
        self.table = kind(7, 4, optimizer=te.optim.Adagrad(lr=0.1), **options)

    def forward(self, *args):
        return torch.cat([self.table(*args).flatten(1)], 1)


@pytest.fixture
def _no_inductor(monkeypatch):
    def compile_nothing(*_):
        raise AssertionError("Inductor was called")

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compile_nothing)


@pytest.mark.usefixtures("_no_inductor")
@pytest.mark.parametrize("form", LONE)
@pytest.mark.few(2)
def test_fused_lookups_with_nothing_to_compile_are_called_as_they_are(form):
    model, twin = Lone(form), Lone(form)
    compiled = torch.compile(model, backend=te.compiler.tritonemb, fullgraph=True, dynamic=True)
    for size in (4, 5, 9):
        args, peers = model.batch(size), model.batch(size)
        compiled(*args).square().sum().backward()
        twin(*peers).square().sum().backward()
        assert_same_bits(model.state_dict(), twin.state_dict())
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(args[2:], peers[2:], strict=True))
    output = compiled(*args)
    args[0].zero_()
    with pytest.raises(RuntimeError, match="ids were changed in place between a lookup"):
        output.sum().backward()
    if form == "weights":  # whose gradient is that of the rows as they were
        output, args = compiled(*model.batch(4)), model.batch(4)
        with torch.no_grad():
            model.table.weight.zero_()
        with pytest.raises(RuntimeError, match="rows of 'weight' were changed in place between a lookup"):
            output.sum().backward()
    with pytest.raises(ValueError, match="table 'weight': id 7"):
        compiled(torch.full_like(args[0], 7), *args[1:])
    with model.table.accumulate(), pytest.raises(RuntimeError, match="accumulate"):
        compiled(*args)


@pytest.mark.usefixtures("_no_inductor")
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.few(1)
def test_a_collection_with_nothing_to_compile_is_called_as_it_is(pooled):
    configs = [te.TableConfig(name, 30, 7, pooling="sum" if pooled else "none") for name in "ab"]
    collection, twin = (make_collection(configs, te.optim.Adam(lr=0.1), pooled) for _ in range(2))
    compiled = torch.compile(collection, backend=te.compiler.tritonemb, fullgraph=True, dynamic=True)
    for batch, grad in random_steps(collection, 3, weighted=pooled):
        outputs = [output_of(module, batch) for module in (compiled, twin)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.backward(grad)
        assert_same_bits(contents(collection), contents(twin))
    output = output_of(compiled, batch)
    batch.values().zero_()
    with pytest.raises(RuntimeError, match="ids were changed in place between a lookup"):
        output.backward(grad)


@pytest.mark.parametrize("optimizer", [te.optim.SGD(lr=0.1), te.optim.RowWiseAdagrad(lr=0.1), te.optim.Adam(lr=0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.few(1)
def test_fused_optimizers_have_the_bits_of_the_uncompiled_model(optimizer, dtype):
    """Stochastic rounding too: a table has its own random numbers, whatever it was merged with."""
    actual, model, twin = compile_pair(Model(dtype))
    reports = [te.fuse(one, optimizer) for one in (model, twin)]
    for step in range(3):
        for report in reports:
            report.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        results = [run(*batch(step)) for run in (actual, twin)]
        for value, expected in zip(*results, strict=True):
            assert torch.equal(value, expected)
        grads = [torch.randn_like(result) for result in results[0]]
        for result in results:
            torch.autograd.backward(result, grads)
        for (name, value), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(value, expected), f"{name} after step {step}"
    # A mean without its padding is a float32 sum first, so it goes with other sums of float32 tables only.
    assert set(actual.fused) == {members for members in MEMBERS if dtype == torch.float32 or "mean" not in members}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_table_that_is_looked_up_twice_is_updated_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.EmbeddingBag(ROWS, 4, mode="sum") for _ in range(2))

        def forward(self, one, two):
            return self.a(one) * self.a(two) + self.b(one)

    result, model, twin = compile_pair(Twice())
    for one in (model, twin):
        te.fuse(one, te.optim.RowWiseAdagrad(lr=0.1))
    args = [torch.randint(0, ROWS, (5, 3)) for _ in range(2)]
    for run in (result, twin):
        run(*args).sum().backward()
    assert result.fused == [("a", "b", "a")] or result.fused == [("a", "a", "b")]
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        # The gradient of each use is summed in another order: float32, some ten terms of size 1.
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)


class Scaled(nn.Module):
    """Two lookups of one table; what one returns is changed in place between them, as SASRec does."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ROWS, 4, padding_idx=0)

    def forward(self, history, candidates):
        rows = self.items(history)
        rows *= 4**0.5
        rows += rows.detach().mean()
        rows = (rows @ rows.transpose(1, 2)).softmax(-1) @ rows
        rows.mul_(0.5)
        return (rows * self.items(candidates)).sum(-1)


def test_a_result_may_be_changed_in_place_between_two_lookups():
    result, model, twin = compile_pair(Scaled())
    for one in (model, twin):
        te.fuse(one, te.optim.RowWiseAdagrad(lr=0.1))
    args = [torch.randint(0, ROWS, (5, 3)) for _ in range(2)]
    outputs = [run(*args) for run in (result, twin)]
    torch.testing.assert_close(*outputs, rtol=2e-6, atol=2e-6)
    for output in outputs:
        output.sum().backward()
    assert result.fused == [("items", "items")]
    torch.testing.assert_close(model.items.weight, twin.items.weight, rtol=2e-6, atol=2e-6)  # sums in another order
    assert not te.compiler.explain(model, *args).refused


class Apart(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.EmbeddingBag(ROWS, 4, mode="sum") for _ in range(2))

    def forward(self, one, two):
        return self.a(one).sum() + self.b(one).sum() + self.a(two).sum()


def test_a_fused_table_that_would_be_updated_twice_raises():
    model = Apart()
    te.fuse(model, te.optim.SGD(lr=0.1))
    result = Compiled(model)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"table 'a\.weight' has a fused optimizer"):
        result(torch.zeros(5, 3).long(), torch.zeros(4, 3).long())


def test_explain_says_why_a_model_is_refused():
    model = Apart()
    te.fuse(model, te.optim.SGD(lr=0.1))
    report = te.compiler.explain(model, torch.zeros(5, 3).long(), torch.zeros(4, 3).long())
    (refused,) = report.refused
    assert "table 'a.weight' has a fused optimizer and is looked up in 2 places" in refused
    assert "Refused:\n  - table 'a.weight' has a fused optimizer" in str(report)


def test_optimizers_of_their_own_are_not_merged():
    model = nn.ModuleList(te.nn.EmbeddingBag(ROWS, 4, optimizer=te.optim.SGD(lr=0.1)) for _ in range(2))
    result = Compiled(lambda i: model[0](i) + model[1](i))
    result(torch.zeros(5, 3).long()).sum().backward()
    assert result.fused == []
    assert len(result.reasons) == 2
    assert all("optimizer" in reason for reason in result.reasons.values())
