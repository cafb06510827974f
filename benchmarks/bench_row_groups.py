"""Grouping alone: ours against `torch.sort` + `torch.unique_consecutive` over the ids of all tables at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.paired import Contender, measure
from benchmarks.peers import OurBags
from benchmarks.record import timing_rows
from benchmarks.workload import SHAPES, Batch, Shape, draw_batches, grouping_bytes

WARMUP_ROUNDS = 3


def group_with_torch(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct linear rows, the first place of each in `order`, and `order`: what a plain torch user would write."""
    shape = batch.shape
    first_rows = torch.arange(shape.num_tables).repeat_interleave(shape.ids_per_table) * shape.num_rows
    sorted_rows, order = torch.sort(batch.values + first_rows, stable=True)
    rows, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    return rows, torch.cumsum(counts, 0) - counts, order


def check_groups(ours: OurBags, batch: Batch) -> None:
    rows, starts, order, num_groups = ours.group(batch)
    expected_rows, expected_starts, expected_order = group_with_torch(batch)
    valid = int(num_groups)
    torch.testing.assert_close(rows[:valid], expected_rows, rtol=0, atol=0)
    torch.testing.assert_close(starts[:valid].long(), expected_starts, rtol=0, atol=0)
    torch.testing.assert_close(order.long(), expected_order, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_grouping(shape: Shape, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    batches = draw_batches(shape, rounds + WARMUP_ROUNDS)
    ours = OurBags(shape)
    check_groups(ours, batches[0])

    contenders = [
        Contender(ours.name, lambda number: batches[number % len(batches)], ours.group),
        Contender("torch.sort", lambda number: batches[number % len(batches)], group_with_torch),
    ]
    timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    moved = {timing.name: grouping_bytes(batches[-1]) for timing in timings}
    record(timing_rows("group", shape, timings, moved))
