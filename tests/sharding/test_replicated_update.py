"""Updates that need other ranks, where a backward pass fails or reaches a table several times."""

from __future__ import annotations

import copy

import pytest
import torch

import tritonemb as te
from tritonemb.sharding import ColumnWise, ExchangePrecision, ShardingPlan


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("as wanted")


def change_after_a_failure(rank):
    """How much a table changes in the pass behind one that failed after its gradients had arrived."""
    tables = te.nn.EmbeddingBagCollection([te.TableConfig("a", 20, 16)], te.optim.RowWiseAdagrad(lr=0.1))
    plan = ShardingPlan({"a": ColumnWise()}, 2)
    parallel = te.HybridParallel(tables, plan, exchange=ExchangePrecision("fp32", "fp32"))
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1, 2], [3]]})
    failed = False
    try:
        early = Fails.apply(torch.ones((), requires_grad=True))  # made first, so differentiated last
        (parallel(batch).sum() + early).backward()
    except ValueError:
        failed = True
    changes = []
    before = parallel.state_dict()["a.weight"].gather(parallel.group)
    for _ in range(2):
        parallel(batch).sum().backward()
        after = parallel.state_dict()["a.weight"].gather(parallel.group)
        changes.append((before - after).abs().amax(1))
        before = after
    return failed, changes


def test_a_backward_that_failed_leaves_nothing_behind(ranks):
    """Gradients that waited for its end are void, and later passes update as ever."""
    for failed, (first, second) in ranks(2).run(change_after_a_failure):
        assert failed
        # Adagrad's first step on gradients of ones is the learning rate; an earlier one would have made it smaller.
        torch.testing.assert_close(first[1:4], torch.full((3,), 0.1))
        torch.testing.assert_close(second[1:4], torch.full((3,), 0.1 / 2**0.5))
        assert not first[4:].any()


def two_lookups(rank, pooled):
    """Tables after passes in which they were looked up twice: cut by columns, and whole on one rank."""
    kind = te.nn.EmbeddingBagCollection if pooled else te.nn.EmbeddingCollection
    configs = [te.TableConfig(name, 20, 16, pooling="sum" if pooled else "none") for name in "ab"]
    torch.manual_seed(0)
    tables = kind(configs, te.optim.RowWiseAdagrad(lr=0.1))
    whole = copy.deepcopy(tables)
    plan = ShardingPlan({"a": ColumnWise(), "b": ColumnWise(columns=[5, 11])}, 2)
    parallel = te.HybridParallel(tables, plan, exchange=ExchangePrecision("fp32", "fp32"))
    for step in range(3):
        results = {"cut": [], "whole": []}
        for use in range(2):
            lists = {name: [[step, use, (7 * r + use) % 20] for r in range(2)] for name in "ab"}
            mine = te.KeyedJaggedTensor.from_lists({name: [bags[rank]] for name, bags in lists.items()})
            results["cut"].append(parallel(mine))
            results["whole"].append(whole(te.KeyedJaggedTensor.from_lists(lists)))
        for name, found in results.items():
            rows = [result if pooled else result.values() for result in found]
            # The ranks' gradients are averaged.
            (
                sum((use + 1) * (row * row).sum() for use, row in enumerate(rows)) * (2 if name == "cut" else 1)
            ).backward()
    expected = whole.state_dict()
    return {
        name: torch.equal(value.gather(parallel.group), expected[name]) for name, value in parallel.state_dict().items()
    }


@pytest.mark.parametrize("pooled", [True, False])
def test_tables_that_are_looked_up_twice_are_updated_twice(ranks, pooled):
    """As a collection on one rank does it, bit for bit."""
    for equal in ranks(2).run(two_lookups, pooled):
        assert set(equal) == {"step", "a.weight", "a.sum", "b.weight", "b.sum"}
        assert all(equal.values()), equal
