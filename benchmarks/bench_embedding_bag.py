"""The forward alone, as in inference: ours, FBGEMM's, and a `torch.nn.EmbeddingBag` per table, joined to one output.

Target: no slower than the fastest peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.paired import Contender, measure
from benchmarks.peers import FBGEMM_MISSING, FbgemmBags, Implementation, OurBags, TorchBags, copy_weights, has_fbgemm
from benchmarks.record import at_least, check_forward, timing_rows
from benchmarks.workload import SHAPES, Batch, Shape, draw_batches, forward_bytes

WARMUP_ROUNDS = 3
OP = "forward"


def contender(implementation: Implementation, batches: list[Batch]) -> Contender:
    return Contender(implementation.name, lambda number: batches[number % len(batches)], implementation.forward)


@pytest.mark.skipif(not has_fbgemm(), reason=FBGEMM_MISSING)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_forward(shape: Shape, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    batches = draw_batches(shape, rounds + WARMUP_ROUNDS)
    ours = OurBags(shape)
    peers: list[Implementation] = [FbgemmBags(shape), TorchBags(shape)]
    for peer in peers:
        copy_weights(ours, peer)
        check_forward(ours, peer, batches[0])

    with torch.no_grad():
        contenders = [contender(implementation, batches) for implementation in (ours, *peers)]
        timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)

    moved = {timing.name: forward_bytes(batches[-1]) for timing in timings}
    record(timing_rows(OP, shape, timings, moved), [at_least(OP, shape, timings[0], timings[1:], 1.0)])
