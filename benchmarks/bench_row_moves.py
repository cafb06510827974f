"""Rows with their optimizer's state from one tensor to another, as a cache's fetch and write back do it.

The peer is `index_select` and `index_copy_`, a tensor at a time. On a GPU rows also come from pinned host memory, where
the peer gathers on the host and sends what it has gathered; the copy is then from host memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import OURS, Case, contenders, equal
from benchmarks.clock import Clock, Contender
from tritonemb import ops

INT64 = 8


def cases(device: torch.device, tiny: bool) -> Iterator[Case]:
    num_moves = 8 if tiny else 16384
    for dim in (64, 128, 256):
        shape = f"rows {num_moves:,} D{dim}"
        yield Case("row moves", shape, partial(make, num_moves, dim, False))
        if device.type == "cuda" or tiny:
            yield Case("row moves from host memory", shape, partial(make, num_moves, dim, True))


def make(num_moves: int, dim: int, from_host: bool, clock: Clock) -> list[Contender]:
    """From random rows of a home of 12 times as many to random rows of a cache of twice as many."""
    device = clock.device
    generator = torch.Generator().manual_seed(0)
    from_rows = torch.randperm(12 * num_moves, generator=generator)[:num_moves]
    to_rows = torch.randperm(2 * num_moves, generator=generator)[:num_moves].to(device)
    home = [torch.randn(12 * num_moves, dim, generator=generator), torch.randn(12 * num_moves, generator=generator)]
    host = torch.device("cpu")
    home = [part.pin_memory() if from_host and device != host else part.to(device) for part in home]
    cache = [torch.zeros(2 * num_moves, *part.shape[1:], device=device) for part in home]
    where = from_rows.to(home[0].device)
    from_rows = from_rows.to(device)

    def by_torch() -> list[Tensor]:
        for to, part in zip(cache, home, strict=True):
            to.index_copy_(0, to_rows, part.index_select(0, where).to(device, non_blocking=True))
        return cache

    def ours() -> list[Tensor]:
        ops.move_rows_(cache, home, to_rows, from_rows)
        return cache

    def erase(_: int) -> None:
        for part in cache:
            part.zero_()

    num_bytes = num_moves * (2 * 4 * (dim + 1) + 2 * INT64)
    expected = [part.clone() for part in by_torch()]
    runs = {OURS: ours, "torch": by_torch}
    return contenders(runs, num_bytes, device, equal(*expected), erase, host if from_host else None)


def bench_row_moves(case: Case, measure_case: Callable[[Case], None]) -> None:
    measure_case(case)
