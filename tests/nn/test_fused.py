"""The update in the backward, against `torch.nn.EmbeddingBag` with `torch.optim`, and its side conditions."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.helpers import contents, fewer, make_collection, random_steps, train

# Float32 on both sides, sums and formulas in another order, ten steps.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def train_with_torch(collection, steps, make_optimizer):
    """The same tables as `nn.EmbeddingBag`s, trained with a dense optimizer."""
    bags = nn.ModuleList(
        nn.EmbeddingBag(c.num_embeddings, c.embedding_dim, mode=c.pooling, include_last_offset=True)
        for c in collection.configs
    )
    for bag, table in zip(bags, collection.tables, strict=True):
        bag.weight.data.copy_(table.weight.data)
    optimizer = make_optimizer(bags.parameters())
    for batch, grad in steps:
        optimizer.zero_grad()
        parts = []
        for bag, config in zip(bags, collection.configs, strict=True):
            part = batch[config.name]
            parts.append(bag(part.values(), part.offsets()))
        torch.cat(parts, dim=1).backward(grad)
        optimizer.step()
    return bags


PAIRS = {
    "sgd": (te.optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (te.optim.Adagrad(lr=0.1, eps=1e-6), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6)),
    "adam": (te.optim.Adam(lr=0.1, eps=1e-6), lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-6)),
    "adamw": (
        te.optim.Adam(lr=0.1, eps=1e-6, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-6, weight_decay=0.3),
    ),
    "adam with L2": (
        te.optim.Adam(lr=0.1, eps=1e-6, weight_decay=0.3, weight_decay_mode="l2"),
        lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-6, weight_decay=0.3),
    ),
    "sgd with L2": (te.optim.SGD(lr=0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
}
DENSE = ("adam", "adamw", "adam with L2", "sgd with L2")  # in torch.optim rows outside the batch move too


@pytest.mark.public
@pytest.mark.parametrize("name", PAIRS)
def test_a_fused_step_is_torchs(name):
    fused, reference = PAIRS[name]
    num_rows = 4 if name in DENSE else 30
    configs = [te.TableConfig("a", num_rows, 8), te.TableConfig("b", num_rows, 5, pooling="mean")]
    collection = make_collection(configs, fused)
    steps = random_steps(collection, fewer(10, 3), batch_size=fewer(60, 20))
    if name in DENSE:
        assert all(batch[key].values().unique().numel() == num_rows for batch, _ in steps for key in ("a", "b"))
    bags = train_with_torch(collection, steps, reference)
    train(collection, steps)
    for bag, table in zip(bags, collection.tables, strict=True):
        assert table.weight.grad is None
        torch.testing.assert_close(table.weight, bag.weight, **TOLERANCE)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives memory when it is first touched")
def test_a_table_of_more_than_two_billion_elements():
    num_rows, rows = 2**24 + 3, [0, 5, 2**24, 2**24 + 2]
    config = te.TableConfig("large", num_rows, 128, dtype=torch.bfloat16, init=lambda _: None)  # untouched
    assert num_rows * 128 > 2**31
    large = te.nn.EmbeddingBagCollection([config], te.optim.RowWiseAdagrad(lr=0.5, stochastic_rounding=False))
    small = make_collection(
        [te.TableConfig("large", 4, 128, dtype=torch.bfloat16)],
        te.optim.RowWiseAdagrad(lr=0.5, stochastic_rounding=False),
    )
    large.tables[0].weight.data[rows] = small.tables[0].weight.data
    for seed in range(3):
        grad = torch.randn(3, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()
        outputs = []
        for collection, names in ((large, rows), (small, [0, 1, 2, 3])):
            ids = [[names[0], names[3]], [names[2]], [names[1], names[3], names[3]]]
            outputs.append(collection(te.KeyedJaggedTensor.from_lists({"large": ids})))
            outputs[-1].backward(grad)
        assert torch.equal(*outputs)
    assert torch.equal(large.tables[0].weight[rows], small.tables[0].weight)
    assert torch.equal(large.tables[0].get_buffer("sum")[rows], small.tables[0].get_buffer("sum"))
    assert int((large.tables[0].get_buffer("sum") != 0).sum()) == 4


def test_a_thousand_tables():
    configs = [te.TableConfig(f"t{index}", 3 + index % 5, 1 + index % 7) for index in range(1_000)]
    collection, untrained = (make_collection(configs, te.optim.RowWiseAdagrad(lr=0.1)) for _ in range(2))
    ((batch, grad),) = random_steps(collection, 1, batch_size=3, max_length=2)
    train(collection, [(batch, grad)])
    actual, parts = contents(collection), grad.split([config.embedding_dim for config in configs], dim=1)
    for index in range(0, 1_000, 97):
        single = make_collection(configs[index : index + 1], te.optim.RowWiseAdagrad(lr=0.1))
        single.tables[0].weight.data.copy_(untrained.tables[index].weight.detach())
        train(single, [(batch, parts[index])])
        for name, expected in contents(single).items():
            assert torch.equal(actual[name], expected), name
