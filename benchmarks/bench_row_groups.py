"""Sorting and grouping a batch's ids.

Grouping alone: ours against what a plain PyTorch user would write, over the ids of all tables at once. Sorting alone:
the linear rows of a batch by `torch.sort`, as grouping sorts them, and int64 keys for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.measuring.cases import OURS, Case, copy_contender, equal
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.peers import make_bench
from benchmarks.measuring.workload import Batch, Workload, group_bytes, linear_rows, sort_bytes, workloads
from tritonemb.ops import RowGroups


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for workload in workloads(device, tiny):
        if device.type == "cuda" or tiny:  # on the CPU we sort nothing: `row_groups` counts
            yield Case("sort", str(workload), partial(make_sort, workload), str(workload))
        yield Case("group", str(workload), partial(make_group, workload), str(workload))


def make_sort(workload: Workload, clock: Clock) -> list[Contender]:
    bench = make_bench(workload, clock)
    num_bytes, wide = sort_bytes(bench.batches[-1]), [linear_rows(batch) for batch in bench.batches]
    narrow = [keys.int() if sum(workload.num_rows) < 2**31 else keys for keys in wide]
    right = torch.sort(wide[0], stable=True)

    def contender(name: str, keys: list[Tensor]) -> Contender:
        def run(local: Tensor) -> object:
            return torch.sort(local, stable=True)

        check = equal(right.values, right.indices)
        return Contender(name, lambda number: keys[number % len(keys)], run, num_bytes, check)

    results = [contender("torch", narrow), contender("torch, int64", wide)]
    return [*results, copy_contender(num_bytes, clock.device)]


def make_group(workload: Workload, clock: Clock) -> list[Contender]:
    bench = make_bench(workload, clock)
    num_bytes, right = group_bytes(bench.batches[-1]), group_with_torch(bench.batches[0])

    def check(groups: RowGroups) -> None:
        rows, starts, order, num_groups = groups
        valid = int(num_groups)
        equal(*right)((rows[:valid], starts[:valid], order))

    results = [
        Contender(OURS, bench.batch, bench.ours.group, num_bytes, check),
        Contender("torch.sort", bench.batch, group_with_torch, num_bytes, equal(*right)),
    ]
    return [*results, copy_contender(num_bytes, clock.device)]


def group_with_torch(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct linear rows, the first place of each in `order`, and `order`: what a plain torch user would write."""
    sorted_rows, order = torch.sort(linear_rows(batch), stable=True)
    rows, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    return rows, torch.cumsum(counts, 0) - counts, order


def bench_grouping(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
