"""A whole step of the embeddings (forward, grouping, backward, update), against FBGEMM and against plain torch.

Each peer is met with its own optimizer's formula: FBGEMM with row-wise Adagrad, `torch.nn.EmbeddingBag(sparse=True)` +
`torch.optim.Adagrad` with Adagrad; the latter on the CPU, where there is room for its states.

"DLRM step", on a GPU: the tables, the dense part around them, and its optimizer. "scaling": the cost grows with the ids
of a batch, and not with the rows that the batch leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tritonemb as te
from benchmarks.bench_interaction import plain_interaction
from benchmarks.measuring.cases import OURS, Case, copy_contender
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.peers import OurTables, Tables, make_bench, step
from benchmarks.measuring.result_files import Goal
from benchmarks.measuring.workload import (
    BY_IDS,
    DTYPES,
    HUGE,
    SMALL_ROWS,
    Batch,
    Workload,
    draw_batches,
    draw_gradient,
    draw_ids,
    make_batch,
    same,
    step_bytes,
    workloads,
)
from tritonemb.nn import MLP

REPEATS = 5
NUM_DENSE, BOTTOM_MLP, TOP_MLP = 13, (512, 256), (1024, 1024, 512, 256)


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    on_cpu = device.type == "cpu" and not tiny
    for optimizer in ("row-wise Adagrad", "Adagrad") if on_cpu else ("row-wise Adagrad",):
        for workload in workloads(device, tiny):
            run = partial(make, workload, optimizer)
            yield Case(f"step, {optimizer}", str(workload), run, str(workload), target=3.0, repeats=REPEATS, rank=0)
    for workload in SMALL_ROWS if on_cpu else ():
        yield Case("small rows, step", str(workload), partial(make, workload, "row-wise Adagrad"), target=1.5)
    for workload in (*BY_IDS, HUGE) if on_cpu else ():
        for threads, target in ((1, 1.2), (2, 1.5)):
            op = f"step, {workload.ids} ids, {threads} thread{'s' * (threads > 1)}"
            run, slow = partial(make, workload, "row-wise Adagrad"), workload is HUGE
            yield Case(op, str(workload), run, target=target, threads=threads, slow=slow)
    for workload in workloads(device, tiny):
        if workload.name == "mlperf":
            yield Case("DLRM step", str(workload), partial(make_dlrm, workload), str(workload), repeats=REPEATS)


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


class DLRMStep:
    """A training step of `te.nn.DLRM`'s network over any tables: loss, backward with the tables' update, SGD.

    Dense features, labels and first weights are the same for all. `ours`: with our interaction, else a compiled one, as
    one builds on FBGEMM today.
    """

    def __init__(self, lookup: Callable[[Any], Tensor], w: Workload, device: torch.device, ours: bool) -> None:
        torch.manual_seed(0)
        self._lookup = lookup
        self._bottom = MLP(NUM_DENSE, [*BOTTOM_MLP, w.dim], device=device)
        top_width = w.dim + w.num_tables * (w.num_tables + 1) // 2
        self._top = MLP(top_width, [*TOP_MLP, 1], last_activation=False, device=device)
        plain: Any = torch.compile(plain_interaction, dynamic=False)
        self._interaction = te.nn.DotInteraction(w.num_tables) if ours else plain
        parameters = nn.ModuleList([self._bottom, self._top]).parameters()
        self._optimizer = torch.optim.SGD(parameters, lr=0.01, foreach=True)
        self._dense = torch.randn(w.batch_size, NUM_DENSE, device=device)
        self._labels = (torch.rand(w.batch_size, device=device) < 0.5).float()

    def __call__(self, batch: Any, after_forward: Callable[[], None] = lambda: None) -> Tensor:
        """The loss."""
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._top(self._interaction(self._bottom(self._dense), self._lookup(batch))).squeeze(1)
        loss = functional.binary_cross_entropy_with_logits(logits, self._labels)
        after_forward()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def make_dlrm(workload: Workload, clock: Clock) -> list[Contender]:
    """Ours is the same network over our tables with our interaction; MLPs, loss and optimizer are the same code."""
    bench = make_bench(workload, clock)

    def contender(tables: Tables) -> Contender:
        step = DLRMStep(tables.forward, workload, clock.device, tables.name == OURS)
        return Contender(tables.name, bench.batch, step)

    return bench.contenders(contender, ["fbgemm"])


WARMUP_ROUNDS = 3
FEW_IDS = same(384, 26, 1, 64)  # ten times as many give 26 MB, which the allocator still keeps: no fresh pages
TABLE_SIZES = (10_000_000, 1_000_000, 10_000)
ONE_TABLE = same(2048, 1, 26, 64, TABLE_SIZES[-1])


def steps_of(name: str, ours: OurTables, batches: list[Batch]) -> Contender:
    fresh = draw_gradient(batches[0].workload)
    gradient = torch.empty_like(fresh)

    def prepare(number: int) -> Batch:
        gradient.copy_(fresh)
        return batches[number % len(batches)]

    return Contender(name, prepare, lambda batch: step(ours, batch, gradient), step_bytes(batches[-1]))


def bench_ten_times_the_ids(race: Any) -> None:
    """Ten times the batch on the same tables; a tenth is left for what caches and page tables do."""
    fused, rounds = OurTables(FEW_IDS), max(5, race.rounds // 4)
    contenders = [
        steps_of(f"{times}x ids", fused, draw_batches(replace(FEW_IDS, batch_size=384 * times), rounds + WARMUP_ROUNDS))
        for times in (10, 1)
    ]
    goal = Goal(0, 1, most=11.0)
    race("step, scaling with ids", FEW_IDS, contenders, goal, most_rounds=rounds, warmup_rounds=WARMUP_ROUNDS)


@pytest.mark.parametrize("workload", [same(2048, 26, 1, 64), same(512, 26, 20, 128)], ids=str)
def bench_16_bit_rows(workload: Workload, race: Any) -> None:
    """Rows of half the bytes, rounded stochastically, beside float32 rows: each batch is that of all dtypes."""
    batches = draw_batches(replace(workload, ids="uniform"), race.rounds + WARMUP_ROUNDS)
    contenders = [
        steps_of(str(dtype).removeprefix("torch."), OurTables(replace(workload, dtype=dtype)), batches)
        for dtype in DTYPES
    ]
    goals = [Goal(at, 0, most=0.9) for at in range(1, len(DTYPES))]
    race("step, dtypes of rows", workload, contenders, *goals, warmup_rounds=WARMUP_ROUNDS)


@pytest.mark.parametrize("place", ["packed", "spread"])
def bench_untouched_rows(place: str, race: Any) -> None:
    """The same ids, packed into the size of the smallest table, so that memory is touched alike and only tables' sizes
    differ; or spread over the whole table, which adds what it costs to touch ever more memory pages."""
    rng, contenders = np.random.default_rng(0), []
    count = race.rounds + WARMUP_ROUNDS
    ids = [torch.from_numpy(draw_ids(TABLE_SIZES[-1], ONE_TABLE.num_ids, rng)) for _ in range(count)]
    for num_rows in TABLE_SIZES:
        shape, stride = (
            replace(ONE_TABLE, num_rows=(num_rows,)),
            1 if place == "packed" else num_rows // TABLE_SIZES[-1],
        )
        batches = [make_batch(shape, [values * stride]) for values in ids]
        contenders.append(steps_of(f"{num_rows:,} rows", OurTables(shape), batches))
    goals = [Goal(0, -1, most=1.15)] if place == "packed" else []
    race(f"step, rows touched {place}", ONE_TABLE, contenders, *goals, warmup_rounds=WARMUP_ROUNDS)
