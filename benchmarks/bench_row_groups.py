"""Sorting and grouping a batch's ids.

Grouping alone: ours (on a GPU also with each way to sort) against what a plain PyTorch user would write, over the ids
of all tables at once. Sorting alone: each way to sort the linear rows of a batch, and int64 keys for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import OURS, Case, copy_contender, equal
from benchmarks.clock import Clock, Contender
from benchmarks.gpu.radix_sort import radix_sort
from benchmarks.peers import make_bench
from benchmarks.workload import Batch, Workload, group_bytes, sort_bytes, workloads
from tritonemb.kernels.row_groups import Sorter, row_groups
from tritonemb.ops import RowGroups

SORTERS: dict[str, Sorter] = {"torch": lambda keys, bits: torch.sort(keys, stable=True), "radix": radix_sort}


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for workload in workloads(device, tiny):
        if device.type == "cuda" or tiny:  # on the CPU we sort nothing: `row_groups` counts
            yield Case("sort", str(workload), partial(make_sort, workload), str(workload))
        yield Case("group", str(workload), partial(make_group, workload), str(workload))


def linear_rows(batch: Batch) -> Tensor:
    """The row of each id among those of all tables, int64 [N]."""
    w = batch.workload
    rows = torch.tensor(w.num_rows, device=batch.values.device)
    per_table = torch.tensor(w.bag_sizes, device=batch.values.device) * w.batch_size
    return batch.values + (torch.cumsum(rows, 0) - rows).repeat_interleave(per_table)


def make_sort(workload: Workload, clock: Clock) -> list[Contender]:
    bench = make_bench(workload, clock)
    total, num_bytes = sum(workload.num_rows), sort_bytes(bench.batches[-1])
    wide = [linear_rows(batch) for batch in bench.batches]
    narrow = [keys.int() if total < 2**31 else keys for keys in wide]
    right = torch.sort(wide[0], stable=True)

    def contender(name: str, keys: list[Tensor], sorter: Sorter) -> Contender:
        check = equal(right.values, right.indices)
        return Contender(
            name, lambda number: keys[number % len(keys)], lambda k: sorter(k, total.bit_length()), num_bytes, check
        )

    on_device = SORTERS if clock.on_gpu else {"torch": SORTERS["torch"]}
    found = [contender(name, narrow, sorter) for name, sorter in on_device.items()]
    found.append(contender("torch, int64", wide, SORTERS["torch"]))
    return [*found, copy_contender(num_bytes, clock.device)]


def make_group(workload: Workload, clock: Clock) -> list[Contender]:
    bench, device = make_bench(workload, clock), clock.device
    num_bytes = group_bytes(bench.batches[-1])
    layout = bench.ours.module.table_set.layout(workload.table_names, device)
    right = group_with_torch(bench.batches[0])

    def check(groups: RowGroups) -> None:
        rows, starts, order, num_groups = groups
        valid = int(num_groups)
        equal(*right)((rows[:valid], starts[:valid], order))

    def contender(name: str, run: Callable[[Batch], object], check: Callable[..., None] = check) -> Contender:
        return Contender(name, bench.batch, run, num_bytes, check)

    def with_sorter(sorter: Sorter) -> Callable[[Batch], object]:
        return lambda batch: row_groups(batch.values, batch.offsets, layout, sorter)

    found = [contender(OURS, bench.ours.group)]  # with the way to sort that it chooses
    if clock.on_gpu:
        found += [contender(f"tritonemb, {name} sort", with_sorter(sorter)) for name, sorter in SORTERS.items()]
    found.append(contender("torch.sort", group_with_torch, equal(*right)))
    return [*found, copy_contender(num_bytes, device)]


def group_with_torch(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct linear rows, the first place of each in `order`, and `order`: what a plain torch user would write."""
    sorted_rows, order = torch.sort(linear_rows(batch), stable=True)
    rows, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    return rows, torch.cumsum(counts, 0) - counts, order


def bench_grouping(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
