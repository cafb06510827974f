"""What the microbenchmarks share: a case is one op over one shape, with all its contenders.

Each family of ops has a file, `bench_<family>.py`, whose `cases` are measured by pytest-benchmark (`make bench`; on a
GPU with `--device cuda`) and by `benchmarks/run.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from benchmarks.measuring.clock import Clock, Contender

OURS, COPY, GATHER, COMPILED = "tritonemb", "copy", "gather", "torch, compiled"
CEILINGS = (COPY, GATHER)  # no peers: what the machine can do
GATHERED_ROWS = 1 << 22  # at most; far more than a GPU's L2 cache holds
GRAPH = ", CUDA graph"  # behind an op that is replayed
NUM_THREADS = 2  # of benchmarks on a CPU


class Case(NamedTuple):
    """`make` allocates what the contenders need on the clock's device; ours is the first of them, a copy the last.

    `group`: cases that share tables, and on a GPU a process; by default those of a file. `target`: on a CPU, ours is to
    be at least so many times as fast as the fastest peer. `repeats`: a sample on a GPU is so many runs back to back,
    without a flush; the host has to keep up. `capturable`: the run can be a CUDA graph. `rank`: 0 for what matters
    most, which a GPU measures for all shapes first. `threads`: of PyTorch and the kernels on a CPU. `slow`: left out of
    a quick run, as its tables take long to make.
    """

    op: str
    shape: str
    make: Callable[[Clock], list[Contender]]
    group: str = ""
    target: float | None = None
    repeats: int | None = None
    capturable: bool = True
    rank: int = 1
    threads: int = NUM_THREADS
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.op}, {self.shape}"


def contenders(
    runs: Mapping[str, Callable[[], object]],
    num_bytes: int,
    device: torch.device,
    check: Callable[[Any], None],
    prepare: Callable[[int], Any] = lambda number: None,
    source_device: torch.device | None = None,
) -> list[Contender]:
    """One for each of `runs`, by name; each does the same on the same tensors and is checked; and a copy.

    The copy is from `source_device`, by default the same.
    """
    results = [Contender(name, prepare, lambda _, run=run: run(), num_bytes, check) for name, run in runs.items()]
    return [*results, copy_contender(num_bytes, device, source_device)]


def copy_contender(num_bytes: int, device: torch.device, source_device: torch.device | None = None) -> Contender:
    """A copy that reads and writes `num_bytes` in all, from the same device or from pinned host memory."""
    size = max(1, num_bytes // 2)
    if source_device is None or source_device == device:
        source = torch.ones(size, dtype=torch.int8, device=device)  # zeros may be pages that are not there
    else:
        source = torch.ones(size, dtype=torch.int8, device=source_device, pin_memory=True)
    target = torch.empty(size, dtype=torch.int8, device=device)
    return Contender(COPY, lambda number: None, lambda _: target.copy_(source, non_blocking=True), num_bytes)


def gather_contender(rows: torch.Tensor, dim: int, dtype: torch.dtype, num_bytes: int) -> Contender:
    """`torch.index_select` of as many rows `[dim]` as make `num_bytes`, read and written, by the ids `rows` in turn.

    Ids wrap around in a table of at most GATHERED_ROWS rows, so that the tables of a case need not stand side by side.
    """
    num_rows = min(GATHERED_ROWS, int(rows.max()) + 1)
    count = max(1, num_bytes // (2 * dim * dtype.itemsize + rows.element_size()))
    ids = (rows % num_rows).repeat(-(-count // rows.numel()))[:count]
    source = torch.ones(num_rows, dim, dtype=dtype, device=rows.device)
    target = torch.empty(count, dim, dtype=dtype, device=rows.device)
    return Contender(
        GATHER, lambda number: None, lambda _: torch.index_select(source, 0, ids, out=target), num_bytes,
        equal(torch.ones_like(target)),
    )  # fmt: skip


def equal(*expected: Any) -> Callable[[Any], None]:
    """A check that all tensors of a run are `expected`, bit for bit; where None is expected, anything is right."""
    return close(*expected, rtol=0.0, atol=0.0)


def close(*expected: Any, rtol: float, atol: float) -> Callable[[Any], None]:
    """The same within a tolerance."""

    def check(actual: Any) -> None:
        several = actual if isinstance(actual, tuple | list) else (actual,)
        for value, right in zip(several, expected, strict=True):
            if right is not None and value is not None:
                torch.testing.assert_close(value, right, rtol=rtol, atol=atol, check_dtype=False)

    return check


def fbgemm_op(name: str) -> Any:
    """`torch.ops.fbgemm.<name>`; raises where FBGEMM cannot be imported or was built without it."""
    importlib.import_module("fbgemm_gpu")
    return getattr(torch.ops.fbgemm, name)
