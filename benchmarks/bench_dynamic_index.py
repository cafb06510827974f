"""The index of a dynamic table: its rows read through their ids, ids found, and new ids inserted while it grows.

The peer of a pull, find and gather, is a gather of as many rows of a static table, in ascending order as a batch has
them. That of a find is the same find in an index half full, and PyTorch's binary search in sorted ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import OURS, Case, contenders, equal
from benchmarks.clock import Clock, Contender
from tritonemb.kernels.cpu.dynamic_index import dynamic_find, dynamic_insert_, dynamic_rows
from tritonemb.kernels.dynamic_index import make_index
from tritonemb.layout import WAYS, DynamicIndex

DIM, BATCH = 64, 50_000
HALF_FULL = f"{OURS}, half full"


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    for capacity in (2_000,) if tiny else (1 << 20, 1 << 23):
        batch = min(BATCH, capacity // 4)
        shape = f"{batch:,} ids, capacity {capacity:,}"
        yield Case("dynamic index pull", f"{shape}, D{DIM}", partial(pull, capacity, batch))
        yield Case("dynamic index find", shape, partial(find, capacity, batch))
        for new in (0.0, 0.01, 1.0):
            insertion = partial(insert, capacity, batch, new)
            yield Case("dynamic index insert", f"{batch:,} ids, {new:.0%} new, growing to {capacity:,}", insertion)


def filled(capacity: int, rows: int) -> tuple[DynamicIndex, int]:
    """Random ids inserted, a share at a time, until there are so many rows; and the last step."""
    index, generator, step = make_index(capacity, capacity // 8), torch.Generator().manual_seed(rows), 0
    while (missing := rows - int(index.num_rows.sum())) > rows // 100:
        step += 1
        count = min(missing, capacity // 16)
        ids = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).unique()
        dynamic_insert_(index, ids, torch.ones_like(ids), step, 1, "lru")
        assert step < 200, "sets that are full evict rows before there are as many"
    return index, step


def draw(index: DynamicIndex, count: int, seed: int) -> Tensor:
    """Some of the ids, ascending, as row groups give them."""
    ids = dynamic_rows(index)[0]
    return ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(seed))[:count]].sort().values


def pull(capacity: int, batch: int, clock: Clock) -> list[Contender]:
    index, _ = filled(capacity, capacity * 5 // 8)
    weight = torch.randn(index.digests.numel(), DIM)
    ids = draw(index, batch, 1)
    slots = dynamic_find(index, ids)
    static_rows = torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(2))[:batch].sort().values
    static = torch.randn(weight.shape[0], DIM)
    static[static_rows] = weight[slots]

    def by_id() -> Tensor:
        return torch.nn.functional.embedding(dynamic_find(index, ids), weight)

    def by_row() -> Tensor:
        return torch.nn.functional.embedding(static_rows, static)

    num_bytes = batch * (8 + 2 * 4 * DIM)
    return contenders({OURS: by_id, "static table": by_row}, num_bytes, clock.device, equal(by_row()))


def find(capacity: int, batch: int, clock: Clock) -> list[Contender]:
    full, half = (filled(capacity, capacity * eighths // 8)[0] for eighths in (7, 4))
    ids, others = draw(full, batch, 1), draw(half, batch, 1)
    known, slots = dynamic_rows(full)

    def by_search() -> Tensor:
        return slots[torch.searchsorted(known, ids)]

    def check(found: Tensor) -> None:
        assert int(found.min()) >= 0

    runs = {
        OURS: lambda: dynamic_find(full, ids),
        HALF_FULL: lambda: dynamic_find(half, others),
        "torch, sorted ids": by_search,
    }
    assert torch.equal(by_search(), dynamic_find(full, ids))
    return contenders(runs, batch * (16 + WAYS + 8), clock.device, check)


def insert(capacity: int, batch: int, new: float, clock: Clock) -> list[Contender]:
    """Each sample meets new ids, and starts over with a fresh index where they have become too many."""
    state: dict[str, Any] = {}

    def prepare(number: int) -> Tensor:
        if number == 0 or int(state["index"].num_rows.sum()) > capacity * 5 // 8:
            state["index"], state["step"] = filled(capacity, capacity // 4)
        generator = torch.Generator().manual_seed(number)
        fresh = torch.randint(-(2**63), 2**63 - 1, (int(batch * new),), generator=generator)
        return torch.cat([draw(state["index"], batch - fresh.numel(), number), fresh]).unique()

    def run(ids: Tensor) -> Any:
        state["step"] += 1
        return dynamic_insert_(state["index"], ids, torch.ones_like(ids), state["step"], 8, "lru")

    def check(done: Any) -> None:
        assert int(done.slots.min()) >= 0

    num_bytes = int(batch * (16 + WAYS + 8 + 24 + 24 + new * 21))
    ours = Contender(OURS, prepare, run, num_bytes, check)
    return [ours, *contenders({}, num_bytes, clock.device, check)]


def bench_dynamic_index(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
