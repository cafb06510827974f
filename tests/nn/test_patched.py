"""Our classes and functions in the place of PyTorch's, as people patch them: `torch.nn.Embedding = te.nn.Embedding`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.compiler.graphs import Compiled
from tritonemb.compiler import explain

pytestmark = pytest.mark.public
TORCH_BAG, TORCH_ROW = nn.EmbeddingBag, nn.Embedding


@pytest.fixture
def _patched(monkeypatch):
    monkeypatch.setattr(torch.nn, "EmbeddingBag", te.nn.EmbeddingBag)
    monkeypatch.setattr(torch.nn, "Embedding", te.nn.Embedding)


@pytest.mark.usefixtures("_patched")
def test_our_modules_work_in_the_place_of_pytorchs():
    ids = torch.tensor([[1, 2], [0, 2]])
    pairs = [(nn.Embedding, TORCH_ROW, {}), (nn.EmbeddingBag, TORCH_BAG, {"mode": "max"})]
    for fused, reference, options in [*pairs, (nn.EmbeddingBag, TORCH_BAG, {"mode": "sum"})]:
        for module in (fused(5, 4, **options), fused.from_pretrained(torch.randn(5, 4), freeze=False, **options)):
            twin = reference(5, 4, _weight=module.weight.detach().clone(), **options)
            actual, expected = module(ids), twin(ids)
            actual.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(module.weight.grad, twin.weight.grad)
    with pytest.raises(TypeError, match="must be Tensor, not list"):  # what is left to PyTorch's forward
        nn.Embedding(5, 4)([1])


@pytest.mark.usefixtures("_patched")
def test_models_from_before_and_after_are_fused():
    model = nn.ModuleList([TORCH_BAG(5, 4, mode="sum"), TORCH_ROW(5, 4), nn.Embedding(5, 4)])
    assert te.fuse(model, te.optim.SGD(lr=0.1)).fused == ("0", "1", "2")
    te.unfuse(model)
    assert [type(module) for module in model] == [TORCH_BAG, TORCH_ROW, nn.Embedding]


@pytest.mark.usefixtures("dynamo")
def test_a_function_in_the_place_of_pytorchs_changes_no_lookup(monkeypatch):
    """Rows would be taken for bags."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(TORCH_ROW(5, 4) for _ in range(2))

        def forward(self, ids):
            return torch.cat([table(ids) for table in self.tables], -1)

    model, ids = Rows(), torch.tensor([[1, 2], [0, 2]])
    reference, expected = nn.functional.embedding, model(ids)
    monkeypatch.setattr(nn.functional, "embedding", lambda *args, **kwargs: reference(*args, **kwargs))
    assert "a row for each id" in str(explain(model, ids))
    torch._dynamo.reset()
    torch.testing.assert_close(Compiled(model)(ids), expected)


def test_another_linear_layer_computes_what_it_computes(monkeypatch):
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    monkeypatch.setattr(torch.nn, "Linear", Doubled)
    monkeypatch.setattr(te.nn.layers, "is_cross_fused", lambda *_: True)
    network, inputs = te.nn.CrossNetwork(4, 1), torch.randn(3, 4)
    assert type(network.up[0]) is Doubled
    torch.testing.assert_close(network(inputs), inputs * network.up[0](inputs) + inputs)
