"""`explain` says what happens, and changes nothing."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import tritonemb as te
from tritonemb.compiler import explain

pytestmark = pytest.mark.usefixtures("dynamo")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 4, mode="sum") for _ in range(3))
        self.most = nn.EmbeddingBag(50, 4, mode="max")
        self.limited = nn.Embedding(50, 4, max_norm=0.1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids):
        pooled = torch.stack([bag(ids) for bag in self.bags]).sum(0) + self.most(ids)
        torch._dynamo.graph_break()
        return nn.functional.dropout(self.norm(pooled) + self.limited(ids[:, 0]), 0.5)


def test_it_says_what_was_fused_what_not_and_where_the_graph_breaks():
    result = explain(Model(), torch.randint(0, 50, (5, 3)))
    assert [item.members for item in result.fused] == [("bags.0", "bags.1", "bags.2")]
    assert {item.name for item in result.left_alone} == {"most", "limited"}
    assert result.num_graphs == 2
    (graph_break,) = result.graph_breaks
    assert graph_break.startswith(__file__)
    text = str(result)
    for part in ("3 lookups of 3 tables", "bags.0, bags.1, bags.2", 'mode="max"', "max_norm", "test_explain.py"):
        assert part in " ".join(text.split())
    assert max(len(line) for line in text.splitlines() if "/" not in line) <= 88


def test_it_changes_nothing():
    model = Model()
    initial = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    explain(model, torch.randint(0, 50, (5, 3), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, initial[name]), name


def test_a_model_with_nothing_to_do():
    text = str(explain(nn.Linear(3, 2), torch.randn(4, 3)))
    assert "Fused: nothing" in text
    assert "Left alone: nothing" in text
    assert "Graph breaks: none" in text


class Sized(nn.Module):
    """Tables whose sizes NumPy has found, as in facebookresearch/dlrm."""

    def __init__(self, kind=nn.EmbeddingBag, **options):
        super().__init__()
        sizes = np.array([50, 60, 70])
        self.tables = nn.ModuleList(kind(size, np.int32(4), **options) for size in sizes)

    def forward(self, ids):
        return torch.cat([table(ids).flatten(1) for table in self.tables], 1)


@pytest.mark.parametrize("optimizer", [None, te.optim.SGD(lr=0.1)], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", [nn.EmbeddingBag, nn.Embedding])
@pytest.mark.few(1)
def test_sizes_of_numpy_break_no_graph(kind, optimizer):
    model, created = Sized(kind, padding_idx=np.int64(0)), []
    te.fuse(model, optimizer)
    created.append(model)
    fused = {nn.EmbeddingBag: te.nn.EmbeddingBag, nn.Embedding: te.nn.Embedding}[kind]
    created.append(Sized(fused, padding_idx=np.int64(0), optimizer=optimizer))
    for module in created if optimizer is None else created[:1]:  # those of another optimizer each are not merged
        result = explain(module, torch.randint(0, 50, (5, 3)))
        assert result.num_graphs == 1
        assert [item.members for item in result.fused] == [("tables.0", "tables.1", "tables.2")]


def test_a_padding_of_numpys_is_named():
    for kind in (nn.EmbeddingBag, nn.Embedding):
        result = explain(Sized(kind, padding_idx=np.int64(0)), torch.randint(0, 50, (5, 3)))
        assert not result.fused
        assert [item.name for item in result.left_alone] == ["tables.0", "tables.1", "tables.2"]
        assert {item.reason for item in result.left_alone} == {"its padding_idx is a NumPy integer; use int(..)"}


def test_a_padding_that_is_another_modules_is_none():
    model = Sized(nn.EmbeddingBag)
    model.padding_idx = [1, 2]
    result = explain(model, torch.randint(0, 50, (5, 3)))
    assert result.fused
    assert not result.left_alone
