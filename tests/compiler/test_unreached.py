"""What a backward pass does not reach is not trained, merged or not; what happens in place is seen."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonemb as te
from tests.compiler.graphs import Compiled, Recorded, compile_pair
from tests.helpers import breadth

pytestmark = [pytest.mark.public, pytest.mark.usefixtures("dynamo")]
IDS = torch.tensor([[1, 2], [3, 3]])
BY = pytest.mark.parametrize("make", breadth([Compiled, Recorded], [Recorded]))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.EmbeddingBag(5, 3, mode="sum") for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.a(ids) * self.b(ids).detach() + self.c(ids)


@BY
def test_a_table_behind_detach_has_no_gradient(make):
    compiled, model, twin = compile_pair(Two(), make)
    for run in (compiled, twin):
        run(IDS).sum().backward()
    assert model.b.weight.grad is None is twin.b.weight.grad
    assert torch.equal(model.a.weight.grad, twin.a.weight.grad)
    assert compiled.fused == [("a", "c")]


@BY
def test_a_fused_table_behind_detach_is_not_updated(make):
    model = Two()
    te.fuse(model, te.optim.Adam(lr=0.1))
    initial = model.b.weight.detach().clone()
    compiled = make(model, fullgraph=True)
    for _ in range(2):
        compiled(IDS).sum().backward()
    assert torch.equal(model.b.weight, initial)
    assert [int(bag.step) for bag in (model.a, model.b, model.c)] == [2, 0, 2]


@BY
def test_a_fused_table_that_is_frozen_later_is_not_updated(make):
    model = Two()
    te.fuse(model, te.optim.SGD(lr=1.0))
    model.a.weight.requires_grad_(False)
    initial = model.a.weight.clone()
    make(model, fullgraph=True)(IDS).sum().backward()
    assert torch.equal(model.a.weight, initial)
    assert int(model.c.step) == 1


@BY
@pytest.mark.parametrize("optimizer", [None, te.optim.Adam(lr=0.1, weight_decay=0.1)])
def test_a_table_whose_result_is_only_changed_in_place_is_not_trained(make, optimizer):
    class Model(Two):
        def forward(self, ids: Tensor) -> Tensor:
            first = self.a(ids)
            first[0].mul_(2)  # no result depends on it
            second = self.b(ids)
            second.view(-1).mul_(2)
            return second + self.c(ids)

    model = Model()
    if optimizer is not None:
        te.fuse(model, optimizer)
    initial, twin = model.a.weight.detach().clone(), copy.deepcopy(model)
    compiled = make(model, fullgraph=True)
    for run in (compiled, twin):
        run(IDS).sum().backward()
    assert model.a.weight.grad is None is twin.a.weight.grad
    assert torch.equal(model.a.weight, initial)
    for actual, expected in ((model.b.weight, twin.b.weight), (model.c.weight, twin.c.weight)):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        if optimizer is None:
            assert torch.equal(actual.grad, expected.grad)
    assert compiled.fused == [("b", "c")]


@pytest.mark.parametrize("name", ["__iadd__", "__imul__"])
def test_methods_of_operators_in_place_are_side_effects(name):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.EmbeddingBag(50, 3, mode="sum"), nn.EmbeddingBag(50, 3, mode="sum")

        def forward(self, ids: Tensor) -> Tensor:
            first = self.a(ids)
            getattr(ids, name)(2)
            return first + self.b(ids)

    model = Model()
    compiled = Compiled(model, fullgraph=True)
    torch.testing.assert_close(compiled(IDS.clone()), model(IDS.clone()), rtol=1e-6, atol=1e-6)
    assert compiled.fused == []


def test_a_fused_table_in_two_checkpointed_regions_is_refused():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.EmbeddingBag(5, 3, mode="sum")

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(lambda x: torch.tanh(x + self.a(ids)), x, use_reentrant=False)
            return x

    model = Model()
    te.fuse(model, te.optim.SGD(lr=1.0))
    with pytest.raises(Exception, match="2 places of one graph"):  # Dynamo wraps it
        Compiled(model, fullgraph=True)(IDS, torch.ones(2, 3, requires_grad=True))
