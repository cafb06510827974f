"""`torch.compile(backend="tritonemb")`, by Inductor."""

import copy
import sys
from importlib.metadata import entry_points

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_cacheable

import tritonemb as te
import tritonemb.compiler
from tests.compiler.graphs import CLOSE, gradients_of
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.usefixtures("dynamo")


class Model(nn.Module):
    """Plain PyTorch: bags of two forms, a sequence, an MLP with dropout and batch normalization."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 4, mode="sum") for _ in range(3))
        self.items, self.genres = nn.Embedding(50, 4, padding_idx=0), nn.Embedding(9, 4)
        self.top = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, flat, offsets, matrix):
        pooled = [self.bags[0](flat, offsets), self.bags[1](matrix), self.bags[2](matrix)]
        pooled += [self.items(matrix).mean(1), self.genres(matrix % 9).amax(1)]
        return self.top(torch.cat(pooled, 1))


def batch(batch_size, length):
    flat = torch.randint(0, 50, (3 * batch_size,))
    return flat, torch.arange(batch_size) * 3, torch.randint(0, 50, (batch_size, length))


@pytest.mark.more
def test_training_with_several_batch_sizes():
    model = Model()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="tritonemb", dynamic=True, fullgraph=True)
    counters.clear()
    for batch_size, length in ((5, 3), (8, 2), (6, 7)):
        args = batch(batch_size, length)
        actual, expected = compiled(*args), twin(*args)
        # Batch normalization of some samples divides by small numbers.
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        for value, reference in zip(gradients_of(model, [actual]), gradients_of(twin, [expected]), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-3, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_autograds_cache_takes_what_was_merged(monkeypatch):
    class Check(torch._TorchCompileInductorWrapper):
        def __call__(self, gm, _inputs):
            assert any(name.startswith("_tritonemb_") for name, _ in gm.named_buffers())
            assert not gm._non_persistent_buffers_set  # pickled in an order of strings that differs between processes
            return check_cacheable(gm) or gm

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Check)
    model, args = Model(), batch(5, 3)
    torch.testing.assert_close(torch.compile(copy.deepcopy(model), backend="tritonemb")(*args), model(*args), **CLOSE)


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"options": {"max-fusion-size": 8}}])
@pytest.mark.more
def test_inference_with_a_mode_and_with_options(options):
    model = Model().eval()
    compiled = torch.compile(model, backend="tritonemb", **options)
    args = batch(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*args), model(*args), **CLOSE)


class FusedModel(nn.Module):
    """A collection, and bags that the backend merges, with fused optimizers."""

    def __init__(self):
        super().__init__()
        tables = [te.TableConfig("a", 30, 4), te.TableConfig("b", 11, 4, pooling="mean")]
        self.collection = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.Adagrad(lr=0.1))
        self.bags = nn.ModuleList(te.nn.EmbeddingBag(50, 4, optimizer=te.optim.SGD(lr=0.1)) for _ in range(2))

    def forward(self, features, matrix):
        return torch.cat([self.collection(features), *(bag(matrix) for bag in self.bags)], 1)


@pytest.mark.more
@pytest.mark.parametrize("has_option", [True, False])
def test_one_graph_serves_all_batch_sizes(has_option, monkeypatch):
    """Without the option of PyTorch, sizes of 1 and 2 have graphs of their own; those of others are shared."""

    def backend(gm, inputs):
        tritonemb.compiler.fuse_graph(gm)
        return aot_eager(gm, inputs)

    if not has_option:
        monkeypatch.setattr(tritonemb.compiler, "shape_config", object())
    model = FusedModel()
    twin, compiled = copy.deepcopy(model), torch.compile(model, backend=backend, fullgraph=True)
    counters.clear()
    numbers_of_graphs = []
    for batch_size in (64, 64, 37, 1, 2):
        features = te.KeyedJaggedTensor.from_lengths(
            ["a", "b"], torch.randint(0, 11, (batch_size * 4,)), torch.full((batch_size * 2,), 2)
        )
        inputs = features, torch.randint(0, 50, (batch_size, 3))
        with tritonemb.compiler.dynamic_batch(*inputs):
            result = compiled(*inputs)
        expected, grad = twin(*inputs), torch.randn(batch_size, 16)
        assert torch.equal(result, expected)
        for output in (result, expected):
            output.backward(grad)
        numbers_of_graphs.append(counters["stats"]["unique_graphs"])
    assert numbers_of_graphs[:3] == [1, 1, 1]
    assert (numbers_of_graphs[-1] == 1) == has_option, numbers_of_graphs
    assert_same_bits(dict(model.state_dict()), dict(twin.state_dict()))


def test_an_unknown_option_is_named():
    compiled = torch.compile(Model(), backend="tritonemb", options={"no_such": 1})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no_such"):
        compiled(*batch(5, 3))


def test_it_is_registered_once():
    assert "tritonemb" in torch._dynamo.list_backends()
    tritonemb.compiler.register()
    assert torch._dynamo.lookup_backend("tritonemb") is tritonemb.compiler.tritonemb


@pytest.mark.skipif(
    not any(point.name == "tritonemb" for point in entry_points(group="torch_dynamo_backends")),
    reason="needs the package to be installed: pip install -e .",
)
def test_by_name_without_importing_it(monkeypatch):
    """Dynamo loads the entry point on the first use of its name."""
    (entry_point,) = [point for point in entry_points(group="torch_dynamo_backends") if point.name == "tritonemb"]
    monkeypatch.setattr(registry, "_BACKENDS", {"tritonemb": entry_point})
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    monkeypatch.delitem(sys.modules, "tritonemb.compiler")
    monkeypatch.setattr(tritonemb, "compiler", None)
    backend = torch._dynamo.lookup_backend("tritonemb")
    assert backend is sys.modules["tritonemb.compiler"].tritonemb
