"""`torch.compile(backend="tritonemb")`, by Inductor."""

from __future__ import annotations

import copy
import sys
from importlib.metadata import entry_points

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import check_cacheable

import tritonemb.compiler
from tests.compiler.graphs import CLOSE, gradients_of

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
