"""DLRM's interaction, as models write it, becomes one op where a kernel serves it."""

import pytest
import torch
from torch import nn

from tests.compiler.graphs import assert_same, compile_pair
from tritonemb.ops.registry import REFERENCE, choose

pytestmark = [pytest.mark.public, pytest.mark.usefixtures("dynamo")]
ROWS, DIM, FEATURES = 11, 4, 3
# Products of DIM float32 numbers, added up in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def of_facebookresearch(x, ly):
    both = torch.cat([x, *ly], dim=1).view((x.shape[0], -1, DIM))
    products = torch.bmm(both, torch.transpose(both, 1, 2))
    _, ni, nj = products.shape
    li = torch.tensor([i for i in range(ni) for _ in range(i)])
    lj = torch.tensor([j for i in range(nj) for j in range(i)])
    return torch.cat([x, products[:, li, lj]], dim=1)


def of_torchrec(x, ly):
    sparse = torch.cat(ly, 1).view(x.shape[0], FEATURES, DIM)
    both = torch.cat((x.unsqueeze(1), sparse), dim=1)
    pairs = torch.triu_indices(FEATURES + 1, FEATURES + 1, offset=1)
    return torch.cat((x, torch.bmm(both, torch.transpose(both, 1, 2))[:, pairs[0], pairs[1]]), dim=1)


def of_another_order(x, ly):
    both = torch.stack([x, *ly], 1)
    lower = torch.tril_indices(FEATURES + 1, FEATURES + 1, -1)
    return torch.cat([(both @ both.mT)[:, lower[0], lower[1]], x], 1)


def by_flattening(x, ly):
    both = torch.stack([x, *ly], 1)
    lower = torch.tril_indices(FEATURES + 1, FEATURES + 1, -1)
    products = torch.bmm(both, both.transpose(-1, 1)).view(x.shape[0], -1)
    return torch.cat([x, products[:, lower[0] * (FEATURES + 1) + lower[1]]], 1)


def some_pairs(x, ly):
    both = torch.stack([x, *ly], 1)
    return torch.matmul(both, both.permute(0, 2, 1)).reshape(x.shape[0], -1)[:, [4, 2, 4, 11]]


class Model(nn.Module):
    def __init__(self, interact):
        super().__init__()
        self.bottom = nn.Linear(5, DIM)
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(FEATURES))
        self.interact = interact

    def forward(self, dense, ids):
        x = self.bottom(dense)
        return self.interact(x, [bag(ids[index]) for index, bag in enumerate(self.bags)])


@pytest.fixture
def served():
    """Some kernel serves the op; else nothing is replaced."""
    if choose("interaction", torch.device("cpu")) == REFERENCE:
        pytest.skip("the reference serves it")


def ops_of(compiled):
    return [node.target for gm in compiled.graphs for node in gm.graph.nodes]


@pytest.mark.parametrize("interact", [of_facebookresearch, of_torchrec, of_another_order, by_flattening, some_pairs])
@pytest.mark.few(2)
def test_as_models_write_it(interact):
    result, *pair = compile_pair(Model(interact), dynamic=True)
    for batch_size in (6, 7):  # no other size: dynamo takes equal sizes for one
        args = [torch.randn(batch_size, 5), torch.randint(0, ROWS, (FEATURES, batch_size, 2))]
        assert_same(result, *pair, args, CLOSE)
    assert len(result.reports) == 1
    assert ("bags.0", "bags.1", "bags.2") in result.fused
    served = torch.ops.tritonemb.interaction.default in ops_of(result)
    assert served == (choose("interaction", torch.device("cpu")) != REFERENCE)
    if served:
        assert torch.bmm not in ops_of(result)
        assert torch.ops.tritonemb.embedding_bag.default in ops_of(result)
    else:
        assert any("no kernel" in reason for reason in result.reasons.values())


def compiled(interact, tolerance=CLOSE, again=lambda: None):
    """A model that interacts so, compiled and compared with itself, once more after `again`."""
    result, *pair = compile_pair(Model(interact))
    args = [torch.randn(5, 5), torch.randint(0, ROWS, (FEATURES, 5, 2))]
    assert_same(result, *pair, args, tolerance)
    again()
    assert_same(result, *pair, args, tolerance)
    return result


@pytest.mark.usefixtures("served")
def test_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compiled(of_facebookresearch, {"rtol": 3e-2, "atol": 3e-2})  # bfloat16: three digits
    assert torch.ops.tritonemb.interaction.default in ops_of(result)


def vectors_of(x, ly):
    return torch.stack([x, *ly], 1)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("interact", "reason"),
    [
        (lambda x, ly: (lambda t: torch.bmm(t, t.mT)[:, [1, 2], [0, 2]])(vectors_of(x, ly)), "with themselves"),
        (lambda x, ly: (lambda t: torch.bmm(t, t.mT))(vectors_of(x, ly)).sum((1, 2)), "not picked"),
        (lambda x, ly: (lambda z: z[:, [1], [0]] + z.sum())((lambda t: t @ t.mT)(vectors_of(x, ly))), "whole matrix"),
    ],
)
def test_what_is_something_else_is_left_alone(interact, reason):
    result = compiled(interact)
    assert torch.ops.tritonemb.interaction.default not in ops_of(result)
    assert any(reason in text for text in result.reasons.values())


@pytest.mark.usefixtures("served")
def test_indices_that_may_change_are_left_alone():
    rows, columns = torch.tensor([1, 2]), torch.tensor([0, 1])

    def interact(x, ly):
        both = vectors_of(x, ly)
        return torch.bmm(both, both.transpose(-1, -2))[:, rows, columns]

    result = compiled(interact, again=lambda: columns[1].zero_())
    assert any("may change" in text for text in result.reasons.values())
