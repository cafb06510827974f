"""Grouping + row-wise Adagrad update, against FBGEMM's backward, which does both; forwards are off the clock.

Ours groups when the batch arrives, so the forward has already done it; the clock of ours therefore covers that grouping
op, called once more, and the backward. Target: at least four times as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.paired import Contender, measure
from benchmarks.peers import FBGEMM_MISSING, FbgemmBags, OurBags, copy_weights, has_fbgemm
from benchmarks.record import at_least, check_step, timing_rows
from benchmarks.workload import SHAPES, Batch, Shape, draw_batches, draw_gradient, update_bytes

WARMUP_ROUNDS = 3
OP = "group + update"


@pytest.mark.skipif(not has_fbgemm(), reason=FBGEMM_MISSING)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_update(shape: Shape, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    batches = draw_batches(shape, rounds + WARMUP_ROUNDS)
    fresh = draw_gradient(shape)
    gradient = torch.empty_like(fresh)
    ours, fbgemm = OurBags(shape), FbgemmBags(shape)
    copy_weights(ours, fbgemm)
    check_step(ours, fbgemm, batches[0], fresh)

    def prepare(implementation: OurBags | FbgemmBags, number: int) -> tuple[Batch, Tensor]:
        batch = batches[number % len(batches)]
        pooled = implementation.forward(batch)
        gradient.copy_(fresh)  # as warm in the caches as a dense network would have left it
        return batch, pooled

    def group_and_update(prepared: tuple[Batch, Tensor]) -> None:
        batch, pooled = prepared
        ours.group(batch)
        ours.backward(pooled, gradient)

    def update(prepared: tuple[Batch, Tensor]) -> None:
        fbgemm.backward(prepared[1], gradient)

    contenders = [
        Contender(ours.name, lambda number: prepare(ours, number), group_and_update),
        Contender(fbgemm.name, lambda number: prepare(fbgemm, number), update),
    ]
    timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    moved = {timing.name: update_bytes(batches[-1]) for timing in timings}
    record(timing_rows(OP, shape, timings, moved), [at_least(OP, shape, timings[0], timings[1:], 4.0)])
