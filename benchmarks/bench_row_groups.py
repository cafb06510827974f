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
from tritonemb.layout import Layout
from tritonemb.ops import RowGroups


def sorters(workload: Workload, layout: Layout) -> dict[str, Callable[[Batch], Sorter]]:
    """Each way to sort the linear rows of a batch."""
    radix = partial(radix_sort, layout=layout, row_bits=(max(workload.num_rows) - 1).bit_length())
    return {"torch": lambda _: partial(torch.sort, stable=True), "radix": lambda b: partial(radix, offsets=b.offsets)}


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
    layout = bench.ours.module.table_set.layout(workload.table_names, clock.device)
    total, num_bytes, ways = sum(workload.num_rows), sort_bytes(bench.batches[-1]), sorters(workload, layout)
    wide = [linear_rows(batch) for batch in bench.batches]
    narrow = [keys.int() if total < 2**31 else keys for keys in wide]
    right = torch.sort(wide[0], stable=True)

    def contender(name: str, keys: list[Tensor], way: Callable[[Batch], Sorter]) -> Contender:
        calls = [partial(way(batch), own) for batch, own in zip(bench.batches, keys, strict=True)]
        check = equal(right.values, right.indices)
        return Contender(name, lambda number: calls[number % len(calls)], lambda call: call(), num_bytes, check)

    on_device = ways if clock.on_gpu else {"torch": ways["torch"]}
    found = [contender(name, narrow, way) for name, way in on_device.items()]
    found.append(contender("torch, int64", wide, ways["torch"]))
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

    def with_sorter(way: Callable[[Batch], Sorter]) -> Callable[[Batch], object]:
        return lambda batch: row_groups(batch.values, batch.offsets, layout, way(batch))

    found = [contender(OURS, bench.ours.group)]  # with the way to sort that it chooses
    if clock.on_gpu:
        ways = sorters(workload, layout)
        found += [contender(f"tritonemb, {name} sort", with_sorter(way)) for name, way in ways.items()]
    found.append(contender("torch.sort", group_with_torch, equal(*right)))
    return [*found, copy_contender(num_bytes, device)]


def group_with_torch(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct linear rows, the first place of each in `order`, and `order`: what a plain torch user would write."""
    sorted_rows, order = torch.sort(linear_rows(batch), stable=True)
    rows, counts = torch.unique_consecutive(sorted_rows, return_counts=True)
    return rows, torch.cumsum(counts, 0) - counts, order


def bench_grouping(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
