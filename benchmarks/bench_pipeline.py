"""What reading costs a step that is prepared while another one computes.

A source takes as long for a batch as a step computes with it; both sleep, so that nothing else is measured than how
well one hides behind the other. The floor is the step on batches that are there. Target: at most 1.15 times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.paired import Contender, measure
from benchmarks.record import at_most, timing_rows
from tritonemb.comm.group import RankGroup
from tritonemb.data import Batch, make_synthetic
from tritonemb.data.prefetch import Prefetcher
from tritonemb.data.protocol import PositionedBatch, ReadReport, Stream
from tritonemb.training.ranks import Ranks
from tritonemb.training.step import prepare, take
from tritonemb.training.train_state import DEPTH, empty_batch

STEPS, BATCH_SIZE, WARMUP_ROUNDS = 50, 1024, 1
OVERHEAD = 1.15


@pytest.mark.parametrize("milliseconds", [2, 10])
def bench_hidden_source(milliseconds: int, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    data, seconds = make_synthetic(STEPS * BATCH_SIZE, 1000), milliseconds / 1000
    batches = list(data.open("train", BATCH_SIZE))

    def slowly() -> Iterator[PositionedBatch]:
        for batch in batches:
            time.sleep(seconds)
            yield PositionedBatch(batch, {}, ReadReport())

    def compute(_: Batch) -> None:
        time.sleep(seconds)

    def pipelined(_: int) -> None:
        with Stream(slowly(), {}) as stream:
            steps = prepare(stream, Ranks(RankGroup(), 60.0), torch.device("cpu"), lambda: empty_batch(data))
            with Prefetcher(steps, DEPTH, "pipeline") as ahead:
                for step in ahead:
                    for batch in take(step):
                        compute(batch)

    def ready(_: int) -> None:
        for batch in batches:
            compute(batch)

    contenders = [
        Contender("pipelined", lambda number: number, pipelined),
        Contender("compute alone", lambda number: number, ready),
    ]
    timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    shape = f"{STEPS} steps of {milliseconds} ms, batches of {BATCH_SIZE}"
    num_bytes = sum(batch.buffer.nbytes for batch in batches if batch.buffer is not None)
    rows = timing_rows("pipeline", shape, timings, dict.fromkeys(("pipelined", "compute alone"), num_bytes))
    record(rows, [at_most("pipeline", shape, timings[0], timings[1], OVERHEAD)])
