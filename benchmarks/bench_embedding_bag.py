"""The forward alone, as in inference: ours, FBGEMM's, and a `torch.nn.EmbeddingBag` per table, joined to one output.

On a GPU its ceiling is a gather of rows by the same ids; so is that of small rows, as click logs have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.measuring.cases import Case, copy_contender, gather_contender
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.peers import Tables, make_bench
from benchmarks.measuring.workload import SMALL_ROWS, Workload, forward_bytes, linear_rows, workloads


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for workload in workloads(device, tiny):
        yield Case("forward", str(workload), partial(make, workload), str(workload), target=1.0, rank=0)
    for workload in SMALL_ROWS if device.type == "cpu" and not tiny else ():
        yield Case("small rows, forward", str(workload), partial(make, workload), str(workload), target=1.2)


def make(workload: Workload, clock: Clock) -> list[Contender]:
    bench = make_bench(workload, clock)
    num_bytes = forward_bytes(bench.batches[-1])

    def contender(tables: Tables) -> Contender:
        return Contender(tables.name, bench.batch, torch.no_grad()(tables.forward), num_bytes)

    ceilings = [copy_contender(num_bytes, clock.device)]
    if clock.on_gpu or workload in SMALL_ROWS:
        rows = linear_rows(bench.batches[0])
        ceilings.insert(0, gather_contender(rows, workload.dim, workload.dtype, num_bytes))
    return [*bench.contenders(contender), *ceilings]


def bench_forward(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
