"""The directory of a row cache: slots of a batch's rows, slots for those that miss, and the ids as slots.

The peer is what one writes with PyTorch's operators over a map of all rows to slots; allocating has none. Batches have
production's reuse of ids, and the cache a tenth of the rows, those of earlier batches.

"row moves": rows with their optimizer's state from one tensor to another, as a cache's fetch and write back do it, of
one table or of 26 with very different numbers of rows, against `index_select` and `index_copy_`, a tensor at a time. On
a GPU rows also come from pinned host memory, where the peer gathers on the host and sends what it has gathered; the
copy is then from host memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.measuring.cases import OURS, Case, contenders, equal
from benchmarks.measuring.clock import Clock, Contender
from benchmarks.measuring.workload import Workload, draw_batches
from tritonemb import ops
from tritonemb.layout import FIRST_ROW, DirectoryTensors, make_layout

WAYS_BYTES = ops.WAYS * (8 + 8 + 4)  # of a set: tags, use, pins
NUM_BATCHES = 12  # of which the last one is measured


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    workload = Workload("reuse", 8192 if device.type == "cuda" else 2048, (100_000,) * 26, (1,) * 26, ids="reuse")
    workload = workload.tiny() if tiny else workload
    rows = f"B{workload.batch_size} T{workload.num_tables} L{workload.bag_sizes[0]} rows {workload.num_rows[0]:,}"
    for op, make in (("look up", look_up), ("allocate", allocate), ("translate", translate)):
        run = partial(make_on_directory, make, workload)
        yield Case(f"row cache {op}", f"{rows}, 10% in the cache", run)
    num_moves = 8 if tiny else 16384
    skewed = [max(1, num_moves >> table // 2) for table in range(2, 28)]
    for dim, sizes in ((64, [num_moves]), (128, [num_moves]), (256, [num_moves]), (64, skewed)):
        shape = f"{'' if len(sizes) == 1 else f'T{len(sizes)} '}rows {sum(sizes):,} D{dim}"
        yield Case("row moves", shape, partial(make_moves, sizes, dim, False))
        if device.type == "cuda" or tiny:
            yield Case("row moves from host memory", shape, partial(make_moves, sizes, dim, True))


class Directory:
    """Of a cache that has seen all batches but the last, whose `groups` it meets next."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        tables = [te.TableConfig(*table, 4) for table in zip(workload.table_names, workload.num_rows, strict=True)]
        layout = make_layout(tables, workload.table_names, True, device)
        sets = [-(-rows // (10 * ops.WAYS)) for rows in workload.num_rows]
        sizes, num_sets = [count * ops.WAYS for count in sets], torch.tensor(sets, device=device)
        tags = torch.full((sum(sizes),), ops.NO_ROW, dtype=torch.int64, device=device)
        used, pins = torch.zeros_like(tags), torch.zeros_like(tags, dtype=torch.int32)
        first_slots = (num_sets.cumsum(0) - num_sets) * ops.WAYS
        self._directory = DirectoryTensors(tags, used, pins, first_slots, layout.tables, num_sets)
        self.tags, self.used, self.pins = (list(part.split(sizes)) for part in (tags, used, pins))
        self.first_rows, self.num_rows = layout.tables[:, FIRST_ROW].contiguous(), layout.num_rows
        for now, batch in enumerate(draw_batches(workload, NUM_BATCHES, device)):
            self.groups = ops.row_groups(batch.values, batch.offsets, layout)
            self.num_groups = int(self.groups.num_groups)
            self.rows = self.groups.rows[: self.num_groups]
            self._use = torch.tensor(now, device=device), "lru"
            if now < NUM_BATCHES - 1:
                self.allocate(self.look_up())
                torch._foreach_zero_(self.pins)

    def look_up(self) -> Tensor:
        return ops.row_cache_look_up_(self._directory, self.rows, *self._use)

    def allocate(self, slots: Tensor) -> Tensor:
        return ops.row_cache_allocate_(self._directory, self.rows, slots, *self._use)

    def rows_of_slots(self) -> Tensor:
        """The linear row in each slot, -1 in an empty one; tables one behind the other."""
        pairs = zip(self.tags, self.first_rows, strict=True)
        return torch.cat([torch.where(tags == ops.NO_ROW, -1, tags + first) for tags, first in pairs])

    def slot_origins(self) -> Tensor:
        """For each row of the batch, where the slots of its table begin in `rows_of_slots`."""
        sizes = torch.tensor([0, *(tags.numel() for tags in self.tags[:-1])], device=self.first_rows.device)
        return torch.cumsum(sizes, 0)[torch.searchsorted(self.first_rows, self.rows, right=True) - 1]


def make_on_directory(
    make: Callable[[Directory, torch.device], list[Contender]], workload: Workload, clock: Clock
) -> list[Contender]:
    return make(Directory(workload, clock.device), clock.device)


def look_up(directory: Directory, device: torch.device) -> list[Contender]:
    occupied = directory.rows_of_slots()
    sizes = [tags.numel() for tags in directory.tags]
    slots = torch.cat([torch.arange(size, device=device) for size in sizes])
    slot_of_row = torch.full((directory.num_rows + 1,), -1, device=device)
    slot_of_row[occupied[occupied >= 0]] = slots[occupied >= 0]

    def by_torch() -> Tensor:
        return slot_of_row[directory.rows]

    num_bytes = directory.num_groups * (16 + 8 * ops.WAYS + 16)  # tags; use and pin
    return contenders({OURS: directory.look_up, "torch": by_torch}, num_bytes, device, equal(by_torch()))


def allocate(directory: Directory, device: torch.device) -> list[Contender]:
    slots = directory.look_up()
    state = [*directory.tags, *directory.used, *directory.pins, slots]
    initial = [part.clone() for part in state]
    misses = slots == -1

    def reset(_: int) -> None:
        torch._foreach_copy_(state, initial)

    def check(_: Any) -> None:
        """Each row that has a slot now is in it; all have one, unless batches were to fill a set."""
        valid = slots >= 0
        places = (slots + directory.slot_origins())[valid]
        assert torch.equal(directory.rows_of_slots()[places], directory.rows[valid])
        assert float(valid.float().mean()) > 0.99, "rows are left without a slot"

    directory.allocate(slots)
    sets = ((slots + directory.slot_origins())[misses] // ops.WAYS).unique().numel()
    num_bytes = 28 * slots.numel() + WAYS_BYTES * sets + 36 * int(misses.sum())
    return contenders({OURS: lambda: directory.allocate(slots)}, num_bytes, device, check, reset)


def translate(directory: Directory, device: torch.device) -> list[Contender]:
    _, starts, order, num_groups = directory.groups
    slots = torch.full_like(directory.groups.rows, -1)
    slots[: directory.num_groups] = directory.look_up()
    sizes = starts.diff().long()

    def by_torch() -> Tensor:
        result = torch.empty_like(slots)
        result[order.long()] = slots.repeat_interleave(sizes, output_size=order.numel())
        return result

    num_bytes = (8 + 4 + 8) * order.numel() + (8 + 4) * directory.num_groups
    runs = {OURS: lambda: ops.row_cache_translate(slots, starts, order, num_groups), "torch": by_torch}
    return contenders(runs, num_bytes, device, equal(by_torch()))


def bench_row_cache(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)


def make_moves(sizes: Sequence[int], dim: int, from_host: bool, clock: Clock) -> list[Contender]:
    """Rows per table: from random rows of a home of 12 times as many to random rows of a cache of twice as many."""
    device, host = clock.device, torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    from_rows, to_rows = (
        [torch.randperm(factor * size, generator=generator)[:size] for size in sizes] for factor in (12, 2)
    )
    # The weight and the state of each table.
    shapes = [shape for size in sizes for shape in ((12 * size, dim), (12 * size,))]
    home = [torch.randn(shape, generator=generator) for shape in shapes]
    home = [part.pin_memory() if from_host and device != host else part.to(device) for part in home]
    cache = [torch.zeros(part.shape[0] // 6, *part.shape[1:], device=device) for part in home]
    tables = [table for table in range(len(sizes)) for _ in range(2)]
    where, to = [rows.to(home[0].device) for rows in from_rows], [rows.to(device) for rows in to_rows]
    moves = [torch.cat(rows).to(device) for rows in (to_rows, from_rows)]
    starts = torch.tensor([0, *accumulate(sizes)], device=device)

    def by_torch() -> list[Tensor]:
        for target, part, table in zip(cache, home, tables, strict=True):
            target.index_copy_(0, to[table], part.index_select(0, where[table]).to(device, non_blocking=True))
        return cache

    def ours() -> list[Tensor]:
        ops.move_rows_(cache, home, *moves, starts, tables)
        return cache

    def erase(_: int) -> None:
        torch._foreach_zero_(cache)

    num_bytes = sum(sizes) * (2 * 4 * (dim + 1) + 2 * 8)
    expected = [part.clone() for part in by_torch()]
    runs = {OURS: ours, "torch": by_torch}
    return contenders(runs, num_bytes, device, equal(*expected), erase, host if from_host else None)
