"""Models in plain `torch.nn`, and what tritonemb makes of them: a DLRM, and separate embedding modules.

"step of a plain DLRM": forward, loss, backward and the optimizers' step; eager with sparse gradients, which is the
fastest that plain PyTorch offers; by Inductor, which cannot compile those, with dense ones; and by our backend with
`te.optim.fused`. Targets: at least twice as fast as eager, and faster than Inductor alone.

Modules: ours is never the slower one. `te.fuse` is met with the forward of the modules that it replaces, and
`te.optim.fused` with a whole step by torch's Adagrad on sparse gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.clock import Contender
from benchmarks.measuring.result_files import Goal
from benchmarks.measuring.workload import EPS, Batch, Workload, draw_batches, forward_bytes, same, update_bytes
from tests.compiler.models import DLRM

LR, NUM_BATCHES = 0.02, 4
ROWS = same(256, 11, 1, 32, 20_000), same(2048, 26, 1, 64), same(8192, 8, 1, 128), same(65_536, 4, 1, 8, 10_000)
BAGS = same(128, 26, 1, 16), same(512, 26, 20, 128, 10_000), same(8192, 8, 50, 32), same(2048, 1, 26, 64, 1_000_000)


def adagrad(model: nn.Module) -> Any:
    return torch.optim.Adagrad(model.parameters(), LR, eps=EPS)


def fused(model: nn.Module) -> Any:
    return te.optim.fused(model, te.optim.Adagrad(LR, eps=EPS))


@pytest.mark.parametrize("part", ["forward", "step"])
@pytest.mark.parametrize("shape", [*ROWS, *BAGS], ids=lambda shape: f"{'bag' if shape in BAGS else 'row'} {shape}")
def bench_modules(shape: Workload, part: str, race: Any) -> None:
    """A module for each table, whose results stand side by side."""
    pooled = shape in BAGS
    make: Any = partial(nn.EmbeddingBag, mode="sum") if pooled else nn.Embedding
    batches = draw_batches(shape, NUM_BATCHES)
    ids_of = [[ids.view(-1, shape.bag_sizes[0]) for ids, _ in batch.bags] for batch in batches]
    gradient = torch.randn(shape.batch_size, shape.width, generator=torch.Generator().manual_seed(0))
    num_bytes = forward_bytes(batches[-1]) + (part == "step") * update_bytes(batches[-1], shape.dim)

    def contender(name: str, optimize: Callable[[nn.Module], Any]) -> Contender:
        tables = nn.ModuleList(make(rows, shape.dim, sparse=True) for rows in shape.num_rows)
        optimizer = optimize(tables)

        def forward(ids: list[Tensor]) -> Tensor:
            return torch.cat([table(item).flatten(1) for table, item in zip(tables, ids, strict=True)], 1)

        def step(ids: list[Tensor]) -> None:
            optimizer.zero_grad()
            forward(ids).backward(gradient)
            optimizer.step()

        return Contender(
            name, lambda number: ids_of[number % NUM_BATCHES], step if part == "step" else forward, num_bytes
        )

    optimizers = {"tritonemb": fused, "torch": adagrad}
    if part == "forward":
        optimizers = {"tritonemb": te.fuse, "torch": lambda model: None}
    contenders = [contender(name, optimize) for name, optimize in optimizers.items()]
    op = f"{'bags' if pooled else 'rows'} of modules, {part}"
    race(op, shape, contenders, Goal(1, 0, least=0.97))


SHAPES = (same(2048, 26, 1, 64), same(2048, 26, 20, 64))
NUM_DENSE = 13


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_existing_dlrm(shape: Workload, race: Any) -> None:
    """All start from the same weights and compute the same step: Adagrad."""
    torch._dynamo.reset()
    batches, generator = draw_batches(shape, race.rounds + 4), torch.Generator().manual_seed(0)
    dense = torch.randn(shape.batch_size, NUM_DENSE, generator=generator)
    target = (torch.rand(shape.batch_size, generator=generator) < 0.3).float()
    num_bytes = forward_bytes(batches[-1]) + update_bytes(batches[-1], shape.dim)

    weights, contenders, losses = dict[str, Tensor](), list[Contender](), list[list[float]]()
    for name, compile, optimize in (
        ("tritonemb", partial(torch.compile, backend=te.compiler.tritonemb), fused),
        ("torch eager", lambda model: model, adagrad),
        ("torch Inductor", torch.compile, adagrad),
    ):
        model: nn.Module = DLRM(list(shape.num_rows), shape.dim, NUM_DENSE, sparse=name == "torch eager", width=128)
        weights = weights or {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(weights)
        optimizer, forward = optimize(model), compile(model)

        def step(batch: Batch, optimizer: Any = optimizer, forward: Any = forward) -> float:
            optimizer.zero_grad()
            ids, offsets = zip(*batch.bags, strict=True)
            loss = F.binary_cross_entropy_with_logits(forward(dense, list(ids), list(offsets)), target)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        losses.append([step(batch) for batch in batches[:2]])
        torch.testing.assert_close(losses[-1], losses[0], rtol=1e-4, atol=1e-5)  # the same step: only its time differs
        contenders.append(Contender(name, lambda number: batches[number % len(batches)], step, num_bytes))
    goals = Goal(1, 0, least=2.0), Goal(2, 0, least=1.0)
    race("step of a plain DLRM, Adagrad", shape, contenders, *goals, warmup_rounds=4)
