"""A hybrid-parallel step as one graph: from exchanged ids to the loss and back, tables updated bit for bit."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tritonemb as te
from tests.helpers import assert_close, assert_same_bits
from tests.sharding.models import KEYS, batch, dcn, dlrm, loss_of, part, plan, tables, whole_state
from tritonemb.layout import make_layout
from tritonemb.ops.row_update import Accumulator
from tritonemb.sharding import ExchangePrecision

MODELS = {"dlrm": dlrm, "dcn": dcn}


def steps(parallel, function, rank, world, number=3):
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    losses = []
    for step in range(number):
        dense, sparse, labels = part(batch(step, world), rank)
        loss = loss_of(function, dense, parallel.prefetch(sparse), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), whole_state(parallel)


def compiled_and_not(backend, make, fullgraph=True, dynamic=None):
    """Two models, and what is called: the first one compiled, as one graph at best, the second one itself."""
    for compiled in (True, False):
        torch._dynamo.reset()
        parallel = make()
        called = torch.compile(parallel, fullgraph=fullgraph, backend=backend, dynamic=dynamic)
        yield parallel, called if compiled else parallel
    torch._dynamo.reset()


def both(rank, world, model, codec, backend, local):
    """Losses and state of a model that is compiled as one graph, and of one that is not."""
    options = {"exchange": ExchangePrecision(codec, codec), "local_world_size": local or None}
    return [
        (*steps(parallel, function, rank, world), parallel.group.traffic.by_kind())
        for parallel, function in compiled_and_not(
            backend, lambda: te.HybridParallel(MODELS[model](), plan(world, local), **options)
        )
    ]


# In `make test` a model on two ranks is a row of the table in tests/compiler/test_one_graph.py.
CASES = [
    pytest.param("dlrm", "fp16", "aot_eager", 2, 0, marks=pytest.mark.more),
    pytest.param("dlrm", "fp32", "tritonemb", 2, 0, marks=pytest.mark.more),
    pytest.param("dcn", "int8", "inductor", 2, 0, marks=pytest.mark.slow),
    pytest.param("dlrm", "bf16", "inductor", 4, 2, marks=pytest.mark.slow),
    pytest.param("dcn", "fp8_e5m2", "tritonemb", 4, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "codec", "backend", "world", "local"), CASES)
def test_one_graph_updates_tables_as_no_graph_does(ranks, model, codec, backend, world, local):
    for compiled, eager in ranks(world).run(both, world, model, codec, backend, local):
        # Dense layers have Inductor's own order of sums, and so differ in the last bits after a step.
        torch.testing.assert_close(compiled[0], eager[0], rtol=1e-5, atol=1e-6)
        assert compiled[0][0] == eager[0][0]
        assert_close(compiled[1], eager[1], rtol=1e-5, atol=1e-6)
        assert compiled[2] == eager[2]  # bytes that were sent


def sized(size: int, seed: int) -> tuple[torch.Tensor, te.KeyedJaggedTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * size,), generator=generator)
    ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    dense, labels = torch.randn(size, 4, generator=generator), torch.rand(size, generator=generator).round()
    return dense, te.KeyedJaggedTensor(KEYS, ids, lengths=lengths), labels


def varying(rank, world, dynamic):
    """Graphs compiled for batches of many sizes; a model that is not compiled has the same losses."""
    counter, losses = CompileCounterWithBackend("aot_eager"), []
    make = lambda: te.HybridParallel(dlrm(), plan(world))  # noqa: E731
    for parallel, function in compiled_and_not(counter, make, dynamic=dynamic):
        for step, size in enumerate((6, 8, 3, 11, 7, 20, 5)):
            dense, sparse, labels = sized(size + rank, 10 * step + rank)
            loss = loss_of(function, dense, parallel.prefetch(sparse), labels)
            loss.backward()
            losses.append(float(loss.detach()))
    return counter.frame_count, losses[:7], losses[7:]


@pytest.mark.more
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_batches_of_other_sizes_compile_few_graphs(ranks, dynamic):
    for graphs, losses, expected in ranks(2).run(varying, 2, dynamic):
        assert graphs <= (3 if dynamic is None else 2)  # of seven sizes
        assert losses == pytest.approx(expected, rel=1e-6)


def with_ids(rank, world):
    """A compiled model that exchanges ids itself has a graph break there."""
    results = []
    for parallel, function in compiled_and_not("aot_eager", lambda: te.HybridParallel(dlrm(), plan(world)), False):
        loss = loss_of(function, *part(batch(0, world), rank))
        loss.backward()
        results.append({"loss": loss.detach(), **whole_state(parallel)})
    return results


@pytest.mark.more
def test_a_model_that_exchanges_ids_itself_is_compiled_too(ranks):
    for compiled, eager in ranks(2).run(with_ids, 2):
        assert_same_bits(compiled, eager)


class Normalized(nn.Module):
    """A DLRM with a layer that has buffers, and one in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.model = dlrm()
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, dense, sparse):
        return self.model(self.norm(dense) * self.scale.float(), sparse)


def accumulated(rank, world, backend):
    """Gradients of two steps, each of a micro-batch without reductions and two with, and the buffers after them."""
    results = []
    for parallel, function in compiled_and_not(backend, lambda: te.HybridParallel(Normalized(), plan(world))):
        for number in range(6):
            if number % 3 == 0:
                parallel.zero_grad()
            dense, sparse, labels = part(batch(number, world), rank)
            with parallel.no_sync() if number % 3 == 0 else nullcontext():
                loss_of(function, dense, parallel.prefetch(sparse), labels).backward()
        gradients = {name: parameter.grad.clone() for name, parameter in parallel.named_parameters()}
        results.append((gradients, whole_state(parallel)))
    return results


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("tritonemb", marks=pytest.mark.slow)])
@pytest.mark.more
def test_a_graph_averages_gradients_and_buffers_as_ddp_does(ranks, backend):
    (compiled, eager), (other, _) = ranks(2).run(accumulated, 2, backend)
    assert_same_bits(compiled[0], other[0])
    for actual, expected in zip(compiled, eager, strict=True):
        assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def accumulated_shards(rank, world):
    """Gradients of FSDP2's shards, one of which is frozen, after micro-batches without reductions; and the tables."""

    def make():
        model = dlrm()
        next(p for name, p in model.named_parameters() if "embeddings" not in name).requires_grad_(False)
        return te.HybridParallel(model, plan(world), dense="fsdp")

    results = []
    for parallel, function in compiled_and_not("aot_eager", make):
        for number in range(6):
            if number == 3:
                parallel.zero_grad()
            dense, sparse, labels = part(batch(number, world), rank)
            with parallel.no_sync() if number % 3 == 1 else nullcontext():
                loss_of(function, dense, parallel.prefetch(sparse), labels).backward()
        gradients = {name: p.grad.full_tensor() for name, p in parallel.named_parameters() if p.requires_grad}
        assert [name for name, p in parallel.named_parameters() if p.grad is None] == [
            next(parallel.named_parameters())[0]
        ]
        results.append(gradients | whole_state(parallel))
    return results


@pytest.mark.more
def test_a_graph_accumulates_gradients_as_fsdp2_does(ranks):
    for compiled, eager in ranks(2).run(accumulated_shards, 2):
        assert_same_bits(compiled, eager)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("tritonemb", marks=pytest.mark.more)])
def test_one_rank_has_cached_tables_in_the_graph(backend):
    def make():
        placed = [replace(config, placement=where) for config, where in zip(tables(), cycle(("host", "device")))]
        torch.manual_seed(1)
        return te.HybridParallel(te.nn.DLRM(placed, 4, (16,), (16,), te.optim.RowWiseAdagrad(lr=0.1)))

    results = []
    for parallel, function in compiled_and_not(backend, make):
        for step in range(3):
            dense, sparse, labels = batch(step, 1)
            loss_of(function, dense, parallel.prefetch(sparse), labels).backward()
        results.append({name: tensor for name, tensor in whole_state(parallel).items() if "embeddings" in name})
    assert_same_bits(*results)


class SharedUpdate(torch.autograd.Function):
    """A lookup in a graph: its backward hands its gradient over, and may fail then."""

    @staticmethod
    def forward(ctx, values, accumulators, fails):
        ctx.accumulators, ctx.fails = accumulators, fails
        return values * 1.0

    @staticmethod
    def backward(ctx, grad):
        batch = torch.tensor([0]), torch.tensor([0, 1]), None
        layout = make_layout([te.TableConfig("t", 2, 1)], ["t"], True)
        groups = te.ops.row_groups(batch[0], batch[1], layout)
        for accumulator in ctx.accumulators:
            torch.ops.tritonemb.shared_update(accumulator.handle, grad, *batch, *groups, *layout)
        if ctx.fails:
            raise RuntimeError("a layer has failed")
        return grad, None, None


def test_updates_with_others_follow_the_pass_in_one_order():
    done, accumulators = [], [Accumulator(), Accumulator()]
    for number, accumulator in enumerate(accumulators):
        of_graph = SimpleNamespace(update_shared=lambda grad, *_, n=number: done.append((n, float(grad))))
        accumulator.tables = lambda result=of_graph: result
    values = torch.ones(1, 1, requires_grad=True)
    with pytest.raises(RuntimeError, match="a layer has failed"):
        SharedUpdate.apply(values, accumulators, True).sum().backward()
    assert done == []
    (3.0 * SharedUpdate.apply(values, accumulators[::-1], False)).sum().backward()
    assert done == [(0, 3.0), (1, 3.0)]  # and nothing of the pass that failed
