"""Grouping, backward and row-wise Adagrad, against FBGEMM's backward, which does all three; forwards are off the clock.

Ours groups when the batch arrives, so the forward has already done it; the clock of ours therefore covers that grouping
op, called once more. "grouped ahead" is without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case, copy_contender
from benchmarks.clock import Clock, Contender
from benchmarks.peers import Tables, make_bench
from benchmarks.workload import Batch, Workload, group_bytes, update_bytes, workloads

OP = "group + update"
AHEAD = "tritonemb, grouped ahead"


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for workload in workloads(device, tiny):  # a graph has to have the forward, which is off the clock
        yield Case(OP, str(workload), partial(make, workload), str(workload), target=4.0, capturable=False)


def make(workload: Workload, clock: Clock) -> list[Contender]:
    bench = make_bench(workload, clock)
    num_bytes = update_bytes(bench.batches[-1])
    with_groups = num_bytes + group_bytes(bench.batches[-1])

    def contender(tables: Tables) -> Contender:
        def prepare(number: int) -> tuple[Batch, Tensor, Tensor]:
            batch = bench.batch(number)
            return batch, tables.forward(batch), bench.fresh_gradient()

        def backward(prepared: tuple[Batch, Tensor, Tensor]) -> None:
            tables.backward(*prepared[1:])

        return Contender(tables.name, prepare, backward, with_groups)

    ahead, *peers = bench.contenders(contender, ["fbgemm"])

    def group_and_update(prepared: tuple[Batch, Tensor, Tensor]) -> None:
        bench.ours.group(prepared[0])
        ahead.run(prepared)

    ours = replace(ahead, run=group_and_update)
    return [ours, replace(ahead, name=AHEAD, num_bytes=num_bytes), *peers, copy_contender(with_groups, clock.device)]


def bench_update(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
