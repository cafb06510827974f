"""Updates that need other ranks, where a backward pass has failed."""

from __future__ import annotations

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
