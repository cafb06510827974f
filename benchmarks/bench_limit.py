"""Small rows, as click logs have them: ours beside FBGEMM's, and how far both are from what the machine can do.

A shape holds by its ratio to FBGEMM (forward at least 1.2, step at least 1.5), or where it is near the machine's limit
for the same rows and ids: the forward within 1.15 times `limit.c` and 40 µs a call; the step within 1.3 times the sum
of that, of 15 ns an id and thread for grouping, and of the bytes of gradients, rows and states at `limit.c`'s rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.limit import NO_COMPILER, LimitBags, has_compiler
from benchmarks.paired import Contender, Timing, measure
from benchmarks.peers import (
    FBGEMM_MISSING,
    FbgemmTables,
    OurTables,
    Tables,
    check_forward,
    check_step,
    copy_weights,
    has_fbgemm,
    step,
)
from benchmarks.record import timing_rows
from benchmarks.workload import Batch, Workload, draw_batches, draw_gradient, forward_bytes, same, update_bytes

SHAPES = (
    same(128, 26, 1, 16),
    same(2048, 26, 1, 8),
    same(1024, 26, 5, 32),
    same(512, 26, 20, 128),
    same(8192, 8, 50, 32),
    same(65_536, 26, 1, 16),
    same(65_536, 8, 1, 8),
    same(16_384, 26, 1, 32),
    same(2048, 4, 10, 256),
    same(8192, 26, 1, 64),
)
WARMUP_ROUNDS = 3
NUM_BATCHES = 8
FORWARD_RATIO, STEP_RATIO = 1.2, 1.5
FORWARD_FLOOR, CALL_MS, STEP_FLOOR, GROUPING_MS = 1.15, 0.04, 1.3, 15e-6


@pytest.fixture(autouse=True)
def peers() -> None:
    if not has_fbgemm():
        pytest.skip(FBGEMM_MISSING)
    if not has_compiler():
        pytest.skip(NO_COMPILER)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_limit_forward(shape: Workload, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    batches = draw_batches(shape, NUM_BATCHES)
    ours, fbgemm, limit = OurTables(shape), FbgemmTables(shape), LimitBags(shape)
    for peer in (fbgemm, limit):
        copy_weights(ours, peer)
        check_forward(ours, peer, batches[0])
    rows = [limit.rows(batch) for batch in batches]
    with torch.no_grad():
        contenders = [_forward(ours, batches), _forward(fbgemm, batches)]
        contenders.append(Contender("limit", lambda number: rows[number % NUM_BATCHES], limit.forward_rows))
        timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    floor = FORWARD_FLOOR * timings[2].percentile(50) + CALL_MS
    moved = {timing.name: forward_bytes(batches[-1]) for timing in timings}
    record(
        timing_rows("small rows, forward", shape, timings, moved),
        [verdict("small rows, forward", shape, timings, FORWARD_RATIO, floor)],
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_limit_step(shape: Workload, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    batches, gradient = draw_batches(shape, NUM_BATCHES), draw_gradient(shape)
    ours, fbgemm = OurTables(shape), FbgemmTables(shape)
    limit = LimitBags(shape)
    for peer in (fbgemm, limit):
        copy_weights(ours, peer)
    check_step(ours, fbgemm, batches[0], gradient)
    rows = [limit.rows(batch) for batch in batches]
    contenders = [_step(one, batches, gradient) for one in (ours, fbgemm)]
    contenders.append(Contender("limit", lambda number: rows[number % NUM_BATCHES], limit.forward_rows))
    timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    least, read, update = timings[2].percentile(50), forward_bytes(batches[-1]), update_bytes(batches[-1])
    grouping = GROUPING_MS * len(batches[-1].values) / torch.get_num_threads()
    floor = STEP_FLOOR * (least + grouping + least * update / read)
    moved = {timing.name: read + update for timing in timings[:2]}
    record(
        timing_rows("small rows, step", shape, timings[:2], moved),
        [verdict("small rows, step", shape, timings, STEP_RATIO, floor)],
    )


def _forward(implementation: Tables, batches: list[Batch]) -> Contender:
    return Contender(implementation.name, lambda number: batches[number % NUM_BATCHES], implementation.forward)


def _step(implementation: Tables, batches: list[Batch], gradient: torch.Tensor) -> Contender:
    fresh = gradient.clone()

    def prepare(number: int) -> Batch:
        fresh.copy_(gradient)  # as the dense network would just have written it
        return batches[number % NUM_BATCHES]

    return Contender(implementation.name, prepare, lambda batch: step(implementation, batch, fresh))


def verdict(op: str, shape: Workload, timings: list[Timing], wanted: float, floor: float) -> dict[str, Any]:
    """Which of the two holds, or neither."""
    ours, fbgemm, limit = (timing.percentile(50) for timing in timings)
    ratio = fbgemm / ours
    held = [name for name, holds in (("ratio", ratio >= wanted), ("floor", ours <= floor)) if holds]
    return {
        "op": op,
        "shape": str(shape),
        "measured": f"fbgemm {fbgemm:.3f} / tritonemb {ours:.3f} ms, limit.c {limit:.3f}",
        "ratio": ratio,
        "target": f"at least {wanted:g}, or {floor:.3f} ms: {' and '.join(held) or 'neither'}",
        "met": bool(held),
    }
