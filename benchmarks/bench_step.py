"""A whole step of the embeddings (forward, grouping, backward, update), against FBGEMM and against plain torch.

Each peer is met with its own optimizer's formula: FBGEMM with row-wise Adagrad, `torch.nn.EmbeddingBag(sparse=True)` +
`torch.optim.Adagrad` with Adagrad; the latter on the CPU, where there is room for its states.

"DLRM step", on a GPU: the tables, the dense part around them, and its optimizer. "scaling": the cost grows with the ids
of a batch, and not with the rows that the batch leaves alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import tritonemb as te
from benchmarks.bench_interaction import plain_interaction
from benchmarks.measuring.cases import OURS, Case, copy_contender
from benchmarks.measuring.clock import Clock, Contender, Timing, measure
from benchmarks.measuring.peers import OurTables, Tables, make_bench, step
from benchmarks.measuring.result_files import at_most, timing_rows
from benchmarks.measuring.workload import (
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
from tritonemb.nn.models import MLP

REPEATS = 5


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    optimizers = ("row-wise Adagrad",) if device.type == "cuda" or tiny else ("row-wise Adagrad", "Adagrad")
    for optimizer in optimizers:
        for workload in workloads(device, tiny):
            run = partial(make, workload, optimizer)
            yield Case(f"step, {optimizer}", str(workload), run, str(workload), target=3.0, repeats=REPEATS, rank=0)
    yield from dlrm_cases(device, tiny)


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


NUM_DENSE = 13
BOTTOM_MLP, TOP_MLP = (512, 256), (1024, 1024, 512, 256)
REPEATS = 5


class DLRMOn(nn.Module):
    """The network of `te.nn.DLRM` over any tables: what one builds on FBGEMM today, with a compiled interaction."""

    def __init__(self, lookup: Callable[[Batch], Tensor], num_tables: int, dim: int, device: torch.device) -> None:
        super().__init__()
        self.lookup = lookup
        self.bottom = MLP(NUM_DENSE, [*BOTTOM_MLP, dim], device=device)
        self.top = MLP(dim + num_tables * (num_tables + 1) // 2, [*TOP_MLP, 1], last_activation=False, device=device)
        self.interaction = torch.compile(plain_interaction, dynamic=False)

    def forward(self, dense: Tensor, batch: Batch) -> Tensor:
        return self.top(self.interaction(self.bottom(dense), self.lookup(batch))).squeeze(1)


class DLRMStep:
    """A training step of such a network: loss, backward with the tables' update, and SGD on the dense part.

    Dense features, labels and first weights are the same for all. `ours`: with our interaction.
    """

    def __init__(self, lookup: Callable[[Any], Tensor], w: Workload, device: torch.device, ours: bool) -> None:
        torch.manual_seed(0)
        self._model = DLRMOn(lookup, w.num_tables, w.dim, device)
        if ours:
            self._model.interaction = te.nn.DotInteraction(w.num_tables)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, foreach=True)
        self._dense = torch.randn(w.batch_size, NUM_DENSE, device=device)
        self._labels = (torch.rand(w.batch_size, device=device) < 0.5).float()

    def __call__(self, batch: Any, after_forward: Callable[[], None] = lambda: None) -> Tensor:
        """The loss."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = functional.binary_cross_entropy_with_logits(self._model(self._dense, batch), self._labels)
        after_forward()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def dlrm_cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for workload in workloads(device, tiny):
        if workload.name == "mlperf":
            yield Case("DLRM step", str(workload), partial(make_dlrm, workload), str(workload), repeats=REPEATS)


def make_dlrm(workload: Workload, clock: Clock) -> list[Contender]:
    """Ours is the same network over our tables with our interaction; MLPs, loss and optimizer are the same code."""
    bench = make_bench(workload, clock)

    def contender(tables: Tables) -> Contender:
        step = DLRMStep(tables.forward, workload, clock.device, tables.name == OURS)
        return Contender(tables.name, bench.batch, step)

    return bench.contenders(contender, ["fbgemm"])


WARMUP_ROUNDS = 3
# The larger batch's output (26 MB) is one that the allocator still keeps, so that no fresh pages are measured.
FEW_IDS = same(384, 26, 1, 64)
MANY_IDS = dataclasses.replace(FEW_IDS, batch_size=10 * FEW_IDS.batch_size)

TABLE_SIZES = (10_000, 1_000_000, 10_000_000)
TOUCHED_ROWS = TABLE_SIZES[0]
ONE_TABLE = same(2048, 1, 26, 64, TOUCHED_ROWS)  # the smallest of them; the others say their size by name


def bench_ten_times_the_ids(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """Ten times the batch on the same tables; a tenth is left for what caches and page tables do."""
    ours = OurTables(FEW_IDS)
    rounds = max(5, rounds // 4)
    contenders, moved = [], {}
    for name, shape in (("10x ids", MANY_IDS), ("1x ids", FEW_IDS)):
        batches, gradient = draw_batches(shape, rounds + WARMUP_ROUNDS), draw_gradient(shape)
        contenders.append(_step_contender(name, ours, batches, gradient))
        moved[name] = step_bytes(batches[-1])
    timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    record(
        timing_rows("step, scaling with ids", FEW_IDS, timings, moved),
        [at_most("step, scaling with ids", FEW_IDS, timings[0], timings[1], 11.0)],
    )


def bench_untouched_rows_packed(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """The same ids, all below the smallest table's size, so memory is touched alike: only the tables' sizes differ."""
    timings, moved = _compare_table_sizes(1, benchmark, rounds)
    op = "step, rows touched packed"
    largest, smallest = timings[0], timings[-1]
    record(timing_rows(op, ONE_TABLE, timings, moved), [at_most(op, ONE_TABLE, largest, smallest, 1.15)])


def bench_untouched_rows_spread(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    """As many distinct ids, but spread over the whole table: adds what it costs to touch ever more memory pages."""
    timings, moved = _compare_table_sizes(None, benchmark, rounds)
    record(timing_rows("step, rows touched spread", ONE_TABLE, timings, moved))


def _compare_table_sizes(stride: int | None, benchmark: Any, rounds: int) -> tuple[list[Timing], dict[str, int]]:
    """Step on tables of growing size; ids are multiples of `stride`, or of what spreads them over the table."""
    num_batches = rounds + WARMUP_ROUNDS
    rng = np.random.default_rng(0)
    ids = [torch.from_numpy(draw_ids(TOUCHED_ROWS, ONE_TABLE.num_ids, rng)) for _ in range(num_batches)]
    gradient = draw_gradient(ONE_TABLE)
    contenders, moved = [], {}
    for num_rows in reversed(TABLE_SIZES):
        shape = dataclasses.replace(ONE_TABLE, num_rows=(num_rows,))
        batches = [make_batch(shape, [values * (stride or num_rows // TOUCHED_ROWS)]) for values in ids]
        name = f"{num_rows:,} rows"
        contenders.append(_step_contender(name, OurTables(shape), batches, gradient))
        moved[name] = step_bytes(batches[-1])
    return measure(benchmark, contenders, rounds, WARMUP_ROUNDS), moved


def _step_contender(name: str, ours: OurTables, batches: Sequence[Batch], fresh: Tensor) -> Contender:
    gradient = torch.empty_like(fresh)

    def prepare(number: int) -> Batch:
        gradient.copy_(fresh)
        return batches[number % len(batches)]

    return Contender(name, prepare, lambda batch: step(ours, batch, gradient))
