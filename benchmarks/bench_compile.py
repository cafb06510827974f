"""An existing DLRM in plain `torch.nn`: eager, compiled by Inductor alone, and by tritonemb's backend.

A step is forward, loss, backward and the optimizers' step. Eager has sparse gradients, which is the fastest that plain
PyTorch offers; Inductor cannot compile those, so alone it has dense ones. Ours has `te.optim.fused`. Targets: at least
twice as fast as eager, and faster than Inductor alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.clock import Contender, measure
from benchmarks.measuring.result_files import at_least, timing_rows
from benchmarks.measuring.workload import EPS, LR, Batch, Workload, draw_batches, forward_bytes, same, update_bytes
from tests.compiler.models import DLRM

SHAPES = (same(2048, 26, 1, 64), same(2048, 26, 20, 64))
NUM_DENSE = 13
WIDTH = 128
WARMUP_ROUNDS = 4


class Trained:
    """A model with its optimizers."""

    def __init__(self, name: str, model: nn.Module, forward: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        self.name, self.model, self.forward, self.optimizers = name, model, forward, optimizers

    def step(self, batch: Batch, dense: Tensor, target: Tensor) -> float:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        ids, offsets = zip(*batch.bags, strict=True)
        loss = F.binary_cross_entropy_with_logits(self.forward(dense, list(ids), list(offsets)), target)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())


def make(shape: Workload) -> list[Trained]:
    """Ours first. All start from the same weights and compute the same step: Adagrad."""
    torch._dynamo.reset()
    models = [
        DLRM(list(shape.num_rows), shape.dim, NUM_DENSE, sparse=name == "eager, sparse", width=WIDTH)
        for name in ("tritonemb", "eager, sparse", "Inductor")
    ]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    ours, eager, inductor = models
    fused = te.optim.fused(ours, te.optim.Adagrad(LR, eps=EPS))
    plain = [torch.optim.Adagrad(model.parameters(), LR, eps=EPS) for model in (eager, inductor)]
    return [
        Trained("tritonemb", ours, torch.compile(ours, backend=te.compiler.tritonemb), [fused]),
        Trained("torch eager", eager, eager, plain[:1]),
        Trained("torch Inductor", inductor, torch.compile(inductor), plain[1:]),
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_existing_dlrm(shape: Workload, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    trained = make(shape)
    batches = draw_batches(shape, rounds + WARMUP_ROUNDS)
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(shape.batch_size, NUM_DENSE, generator=generator)
    target = (torch.rand(shape.batch_size, generator=generator) < 0.3).float()
    losses = [[one.step(batch, dense, target) for batch in batches[:2]] for one in trained]
    for found in losses[1:]:  # the same step, so that only its time differs
        torch.testing.assert_close(found, losses[0], rtol=1e-4, atol=1e-5)

    def contender(one: Trained) -> Contender:
        return Contender(
            one.name, lambda number: batches[number % len(batches)], lambda batch: one.step(batch, dense, target)
        )

    timings = measure(benchmark, [contender(one) for one in trained], rounds, WARMUP_ROUNDS)
    moved = {timing.name: forward_bytes(batches[-1]) + update_bytes(batches[-1], shape.dim) for timing in timings}
    op = "step of a plain DLRM, Adagrad"
    ours, eager, inductor = timings
    targets = [at_least(op, shape, ours, [eager], 2.0), at_least(op, shape, ours, [inductor], 1.0)]
    record(timing_rows(op, shape, timings, moved), targets)
