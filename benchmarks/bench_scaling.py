"""How a step's cost grows: with the ids of the batch, and not with the rows that the batch leaves alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.paired import Contender, Timing, measure
from benchmarks.peers import OurTables, step
from benchmarks.record import at_most, timing_rows
from benchmarks.reuse import draw_ids
from benchmarks.workload import Batch, draw_batches, draw_gradient, make_batch, same, step_bytes

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
