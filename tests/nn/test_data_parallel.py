"""Fused updates under `DistributedDataParallel` or `fully_shard`: refused, as they would diverge or be lost."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import tritonemb as te
from tests.helpers import breadth


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.top = nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, ids):
        return self.top(self.bag(ids))


class Collected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = te.nn.EmbeddingBagCollection([te.TableConfig("item", 7, 4)], te.optim.SGD())
        self.top = nn.Linear(4, 1)

    def forward(self, ids):
        batch = te.KeyedJaggedTensor.from_lengths(["item"], ids.flatten(), torch.full((len(ids),), ids.shape[1]))
        return self.top(self.bags(batch))


def refuse_fused_updates(rank: int, size: int) -> None:
    ids, fused = torch.arange(6).view(3, 2), Model()
    te.fuse(fused, te.optim.SGD())
    for model, name in ((fused, "bag"), (Collected(), "item")):
        initial = copy.deepcopy(model.state_dict())
        parallel = DistributedDataParallel(model)
        if size == 1:
            parallel(ids).sum().backward()
            continue
        with pytest.raises(RuntimeError, match=f"'{name}' has a fused optimizer, so Dist"):
            parallel(ids)
        torch.testing.assert_close(model.state_dict(), initial, rtol=0, atol=0)
    plain = Model()
    te.fuse(plain)
    parallel = DistributedDataParallel(plain)
    parallel(ids + rank).sum().backward()
    whole = Model()
    (sum(whole(ids + number).sum() for number in range(size)) / size).backward()
    # Means of two gradients, taken in another order.
    torch.testing.assert_close(plain.bag.weight.grad, whole.bag.weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", breadth([1, 2], [2]))
def test_fused_updates_are_refused_where_they_would_drift(ranks, size):
    ranks(size).run(refuse_fused_updates, size)


def refuse_full_sharding(rank: int) -> None:
    fused = Model()
    te.fuse(fused, te.optim.SGD())
    beside = nn.Sequential(Collected(), te.nn.EmbeddingBag(7, 4, mode="sum", optimizer=te.optim.SGD()))
    plan = te.sharding.ShardingPlan({"item": te.sharding.RowWise()}, 2)
    for name, shard in (
        ("bag", lambda: fully_shard(fused)),
        ("item", lambda: fully_shard(Collected())),
        ("weight", lambda: te.HybridParallel(beside, plan, dense="fsdp")),
    ):
        with pytest.raises(RuntimeError, match=f"'{name}' has a fused optimizer, so its weight cannot be sharded by f"):
            shard()
    # Without an optimizer, gradients are ordinary.
    plain = te.nn.EmbeddingBagCollection([te.TableConfig("item", 7, 4)])
    fully_shard(plain)
    plain(te.KeyedJaggedTensor.from_lists({"item": [[1]]})).sum().backward()
    assert plain["item"].weight.grad.full_tensor()[1].tolist() == [1.0] * 4


def test_fused_tables_are_refused_by_fully_shard(ranks):
    ranks(2).run(refuse_full_sharding)


def test_a_computed_weight_of_a_collection_is_refused():
    model = Collected()
    parametrize.register_parametrization(model.bags["item"], "weight", nn.Tanh())
    with torch.no_grad():
        model(ids := torch.arange(6).view(3, 2))
    with pytest.raises(RuntimeError, match="weight of table 'item' is computed"):
        model(ids)
