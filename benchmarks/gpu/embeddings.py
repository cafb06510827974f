"""The embedding path, op by op: forward, sorting, grouping, update, and a whole step.

Each function returns the contenders of one op over one set of tables; a copy of as many bytes is always among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import OURS, copy_contender
from benchmarks.clock import Clock, Contender, Outcome, describe, recover
from benchmarks.gpu.radix_sort import radix_sort
from benchmarks.gpu.tables import PEERS, OurTables, Tables, make_peer
from benchmarks.gpu.workload import (
    Batch,
    Workload,
    draw_batches,
    draw_gradient,
    forward_bytes,
    group_bytes,
    sort_bytes,
    step_bytes,
    update_bytes,
)
from tritonemb.kernels.row_groups import Sorter, row_groups

NUM_BATCHES = 3
STEP_REPEATS = 5
SORTERS: dict[str, Sorter] = {"torch": lambda keys, bits: torch.sort(keys, stable=True), "radix": radix_sort}
AHEAD = "tritonemb, grouped ahead"
NEVER_CAPTURED = ("update",)  # its forward is off the clock, and a graph has to have it


class Bench:
    """Ours, the peers that can be made, batches and a gradient, on one device."""

    def __init__(self, workload: Workload, clock: Clock) -> None:
        device = clock.device
        self.workload, self.device = workload, device
        clock.begin(OURS)
        self.batches = draw_batches(workload, NUM_BATCHES, device)
        self.gradient = draw_gradient(workload, device)
        self.ours = OurTables(workload, device)
        self.peers: dict[str, Tables] = {}
        self.errors: dict[str, str] = {}
        for name in PEERS:
            if name in clock.without:
                continue
            clock.begin(name)
            try:
                self.peers[name] = make_peer(name, self.ours, self.batches[0], device)
            except Exception as error:
                recover(error)
                self.errors[name] = describe(error)

    def batch(self, number: int) -> Batch:
        return self.batches[number % len(self.batches)]


def forward(bench: Bench) -> list[Contender]:
    def look_up(tables: Tables) -> Callable[[Batch], Tensor]:
        return torch.no_grad()(tables.forward)

    num_bytes = forward_bytes(bench.batches[-1])
    everyone = {OURS: bench.ours, **bench.peers}
    contenders = [Contender(name, bench.batch, look_up(tables), num_bytes) for name, tables in everyone.items()]
    return [*contenders, copy_contender(num_bytes, bench.device)]


def sort(bench: Bench) -> list[Contender]:
    """Each way to sort the linear rows of a batch, as grouping does; int64 keys with torch for comparison."""
    num_bytes = sort_bytes(bench.batches[-1])
    rows = torch.tensor(bench.workload.num_rows, device=bench.device)
    first_rows, total = torch.cumsum(rows, 0) - rows, sum(bench.workload.num_rows)
    per_table = torch.tensor(bench.workload.bag_sizes, device=bench.device) * bench.workload.batch_size
    wide = [batch.values + first_rows.repeat_interleave(per_table) for batch in bench.batches]
    narrow = [keys.int() if total < 2**31 else keys for keys in wide]

    def contender(name: str, keys: list[Tensor], sorter: Sorter) -> Contender:
        return Contender(
            name, lambda number: keys[number % len(keys)], lambda k: sorter(k, total.bit_length()), num_bytes
        )

    contenders = [contender(name, narrow, SORTERS[name]) for name in _sorters(bench.device)]
    contenders.append(contender("torch, int64", wide, lambda keys, bits: torch.sort(keys, stable=True)))
    return [*contenders, copy_contender(num_bytes, bench.device)]


def _sorters(device: torch.device) -> list[str]:
    """Those that run on `device`: on the CPU only torch's."""
    return [name for name in SORTERS if device.type == "cuda" or name == "torch"]


def group(bench: Bench) -> list[Contender]:
    """Grouping with each way to sort; `tritonemb` is the one that the module chooses."""
    num_bytes = group_bytes(bench.batches[-1])
    module = bench.ours.module
    layout = module.table_set.layout(bench.workload.table_names, bench.device)

    def with_sorter(name: str) -> Callable[[Batch], Any]:
        return lambda batch: row_groups(batch.values, batch.offsets, layout, SORTERS[name])

    contenders = [Contender(OURS, bench.batch, bench.ours.group, num_bytes)]
    if bench.device.type == "cuda":
        contenders += [
            Contender(f"tritonemb, {name} sort", bench.batch, with_sorter(name), num_bytes)
            for name in _sorters(bench.device)
        ]
    return [*contenders, copy_contender(num_bytes, bench.device)]


def update(bench: Bench) -> list[Contender]:
    """Backward and row-wise Adagrad after a forward off the clock; FBGEMM's backward includes its grouping."""
    num_bytes = update_bytes(bench.batches[-1])
    with_groups = num_bytes + group_bytes(bench.batches[-1])

    def prepare(tables: Tables) -> Callable[[int], tuple[Batch, Tensor]]:
        return lambda number: (bench.batch(number), tables.forward(bench.batch(number)))

    def backward(tables: Tables) -> Callable[[tuple[Batch, Tensor]], None]:
        return lambda prepared: tables.backward(prepared[1], bench.gradient)

    def group_and_update(prepared: tuple[Batch, Tensor]) -> None:
        bench.ours.group(prepared[0])
        bench.ours.backward(prepared[1], bench.gradient)

    contenders = [
        Contender(OURS, prepare(bench.ours), group_and_update, with_groups),
        Contender(AHEAD, prepare(bench.ours), backward(bench.ours), num_bytes),
    ]
    if "fbgemm" in bench.peers:
        fbgemm = bench.peers["fbgemm"]
        contenders.append(Contender("fbgemm", prepare(fbgemm), backward(fbgemm), with_groups))
    return [*contenders, copy_contender(with_groups, bench.device)]


def step(bench: Bench) -> list[Contender]:
    """Forward, grouping, backward and update, step after step; the host has to keep up."""
    num_bytes = step_bytes(bench.batches[-1])

    def run(tables: Tables) -> Callable[[Batch], None]:
        return lambda batch: tables.backward(tables.forward(batch), bench.gradient)

    everyone = {OURS: bench.ours, **bench.peers}
    contenders = [Contender(name, bench.batch, run(tables), num_bytes) for name, tables in everyone.items()]
    return [*contenders, copy_contender(num_bytes, bench.device)]


OPS: dict[str, Callable[[Bench], list[Contender]]] = {
    "forward": forward,
    "sort": sort,
    "group": group,
    "update": update,
    "step": step,
}


def measure(op: str, bench: Bench, clock: Clock, rounds: int, graph: bool) -> Outcome:
    """One op; peers that could not be made are among the errors of a forward."""
    contenders = OPS[op](bench)
    if op == "step":
        outcome = clock.measure(contenders, max(2, rounds // 6), 1, STEP_REPEATS, graph)
    else:
        outcome = clock.measure(contenders, rounds, graph=graph)
    if op == "forward" and not graph:
        outcome.errors = bench.errors | outcome.errors
    return outcome
