"""Grouping, backward and row-wise Adagrad, against FBGEMM's backward, which does all three; forwards are off the clock.

Ours groups when the batch arrives, so the forward has already done it; the clock of ours therefore covers that grouping
op, called once more. "grouped ahead" is without.

"custom update": Adagrad as a function of the user's, eager and compiled, beside the built-in one; grouped ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.measuring.cases import OURS, Case, copy_contender
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.peers import OurTables, Tables, make_bench
from benchmarks.measuring.workload import (
    EPS,
    LR,
    Batch,
    Workload,
    draw_batches,
    draw_gradient,
    group_bytes,
    same,
    update_bytes,
    workloads,
)  # fmt: skip
from tritonemb.ops import BatchGradient, RowGroups, row_update_

OP, CUSTOM, BUILT_IN = "group + update", "custom update", te.optim.Adagrad(LR, eps=EPS)
CUSTOM_WORKLOADS = (
    *(same(batch_size, 26, 1, dim) for dim in (16, 64, 128) for batch_size in (2048, 8192)),
    same(2048, 26, 20, 64),
    same(2048, 26, 20, 128),
    same(256, 1000, 1, 64, 1000),
    same(1024, 1000, 2, 16, 1000),
)
AHEAD = "tritonemb, grouped ahead"


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for workload in workloads(device, tiny):  # a graph has to have the forward, which is off the clock
        run = partial(make, workload)
        yield Case(OP, str(workload), run, str(workload), target=4.0, capturable=False, rank=0)
    on_cpu = device.type == "cpu" and not tiny
    for workload in CUSTOM_WORKLOADS if on_cpu else workloads(device, tiny):
        yield Case(CUSTOM, str(workload), partial(make_custom, workload), str(workload), target=1 / 3, capturable=False)


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

    fused = replace(ahead, run=group_and_update)
    return [fused, replace(ahead, name=AHEAD, num_bytes=num_bytes), *peers, copy_contender(with_groups, clock.device)]


def adagrad(
    rows: Tensor, states: dict[str, Tensor], g: Tensor, lr: Tensor, t: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    total = states["sum"] + g.square()
    return rows - lr * g / (total.sqrt() + EPS), {"sum": total}


def make_custom(workload: Workload, clock: Clock) -> list[Contender]:
    """All on the same tables and states, in turn."""
    tables, batches = OurTables(workload, clock.device, optimizer=BUILT_IN), draw_batches(workload, 2, clock.device)
    table_set, gradient = tables.module.table_set, draw_gradient(workload, clock.device)
    layout = table_set.layout(workload.table_names, clock.device)
    num_bytes = update_bytes(batches[-1], workload.dim)

    def contender(name: str, spec: te.optim.Optimizer) -> Contender:
        def prepare(number: int) -> tuple[Tensor, RowGroups]:
            return gradient.clone(), tables.group(batches[number % 2])

        def run(prepared: tuple[Tensor, RowGroups]) -> None:
            fused = table_set.fused_tables()._replace(optimizer=spec.name, hyperparameters=[*spec.hyperparameters])
            row_update_(fused, BatchGradient(prepared[0], batches[0].offsets, None, prepared[1], layout))

        return Contender(name, prepare, torch.no_grad()(run), num_bytes)

    steps = {OURS: torch.compile(adagrad, dynamic=True), f"{OURS}, eager": adagrad}
    specs = {name: te.optim.Custom(LR, step=step, states={"sum": "element"}) for name, step in steps.items()}
    results = [contender(name, spec) for name, spec in {**specs, "built-in": BUILT_IN}.items()]
    return [*results, copy_contender(num_bytes, clock.device)]


def bench_update(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
