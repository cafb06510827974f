"""A whole step of the embeddings (forward, backward, update): against FBGEMM, and against plain torch.

Each peer is met with its own optimizer's formula: FBGEMM with row-wise Adagrad, `torch.nn.EmbeddingBag(sparse=True)` +
`torch.optim.Adagrad` with Adagrad. Target: at least three times as fast as either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritonemb as te
from benchmarks.paired import Contender, measure
from benchmarks.peers import (
    FBGEMM_MISSING,
    FbgemmBags,
    Implementation,
    OurBags,
    TorchBags,
    copy_weights,
    has_fbgemm,
    step,
)
from benchmarks.record import at_least, check_step, timing_rows
from benchmarks.workload import EPS, LR, SHAPES, Shape, draw_batches, draw_gradient, step_bytes

WARMUP_ROUNDS = 3
TARGET = 3.0


@pytest.mark.skipif(not has_fbgemm(), reason=FBGEMM_MISSING)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_row_wise_adagrad(shape: Shape, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    ours, peer = OurBags(shape, te.optim.RowWiseAdagrad(LR, eps=EPS)), FbgemmBags(shape)
    compare("step, row-wise Adagrad", shape, ours, peer, 1, benchmark, record, rounds)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_adagrad(shape: Shape, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    ours, peer = OurBags(shape, te.optim.Adagrad(LR, eps=EPS)), TorchBags(shape)
    compare("step, Adagrad", shape, ours, peer, shape.dim, benchmark, record, rounds)


def compare(
    op: str,
    shape: Shape,
    ours: OurBags,
    peer: Implementation,
    state_per_row: int,
    benchmark: Any,
    record: Callable[..., None],
    rounds: int,
) -> None:
    batches = draw_batches(shape, rounds + WARMUP_ROUNDS)
    fresh = draw_gradient(shape)
    gradient = torch.empty_like(fresh)
    copy_weights(ours, peer)
    check_step(ours, peer, batches[0], fresh)

    def contender(implementation: Implementation) -> Contender:
        def prepare(number: int) -> int:
            gradient.copy_(fresh)  # as warm in the caches as a dense network would have left it
            return number % len(batches)

        return Contender(implementation.name, prepare, lambda index: step(implementation, batches[index], gradient))

    timings = measure(benchmark, [contender(ours), contender(peer)], rounds, WARMUP_ROUNDS)
    moved = {timing.name: step_bytes(batches[-1], state_per_row) for timing in timings}
    record(timing_rows(op, shape, timings, moved), [at_least(op, shape, timings[0], timings[1:], TARGET)])
