"""A whole step of the embeddings (forward, grouping, backward, update), against FBGEMM and against plain torch.

Each peer is met with its own optimizer's formula: FBGEMM with row-wise Adagrad, `torch.nn.EmbeddingBag(sparse=True)` +
`torch.optim.Adagrad` with Adagrad; the latter on the CPU, where there is room for its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case, copy_contender
from benchmarks.clock import Clock, Contender
from benchmarks.peers import Tables, make_bench, step
from benchmarks.workload import Batch, Workload, step_bytes, workloads

REPEATS = 5


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    optimizers = ("row-wise Adagrad",) if device.type == "cuda" or tiny else ("row-wise Adagrad", "Adagrad")
    for optimizer in optimizers:
        for workload in workloads(device, tiny):
            run = partial(make, workload, optimizer)
            yield Case(f"step, {optimizer}", str(workload), run, str(workload), target=3.0, repeats=REPEATS, rank=0)


def make(workload: Workload, optimizer: str, clock: Clock) -> list[Contender]:
    bench = make_bench(workload, clock, optimizer)
    num_bytes = step_bytes(bench.batches[-1], bench.state_per_row)

    def contender(tables: Tables) -> Contender:
        def run(prepared: tuple[Batch, Tensor]) -> None:
            step(tables, *prepared)

        return Contender(tables.name, lambda number: (bench.batch(number), bench.fresh_gradient()), run, num_bytes)

    peer = "torch" if optimizer == "Adagrad" else "fbgemm"
    return [*bench.contenders(contender, [peer]), copy_contender(num_bytes, clock.device)]


def bench_steps(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
