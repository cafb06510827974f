"""Small rows, as click logs have them: ours beside FBGEMM's, and how far both are from what the machine can do.

A shape holds by its ratio to FBGEMM (forward at least 1.2, step at least 1.5), or where it is near the machine's limit
for the same rows and ids: the forward within 1.15 times `limit.c` and 40 µs a call; the step within 1.3 times the sum
of that, of 15 ns per id and thread for grouping, and of the bytes of gradients, rows and states at `limit.c`'s rate.

The tables of `limit.c` stand one behind the other in huge pages, its results bag by bag in the order of a batch's
samples, so that it reads and writes what a lookup must and nothing else. It has no backward; what one costs at least
follows from the bytes that it moves and the rate that it reaches.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.measuring.clock import Contender, Timing, measure
from benchmarks.measuring.peers import (
    FBGEMM_MISSING,
    FbgemmTables,
    OurTables,
    Tables,
    check_forward,
    check_step,
    copy_weights,
    has_fbgemm,
    step,
)
from benchmarks.measuring.result_files import timing_rows
from benchmarks.measuring.workload import (
    Batch,
    Workload,
    draw_batches,
    draw_gradient,
    forward_bytes,
    same,
    update_bytes,
)

SHAPES = (
    same(128, 26, 1, 16),
    same(2048, 26, 1, 8),
    same(1024, 26, 5, 32),
    same(512, 26, 20, 128),
    same(8192, 8, 50, 32),
    same(65_536, 26, 1, 16),
    same(65_536, 8, 1, 8),
    same(16_384, 26, 1, 32),
    same(2048, 4, 10, 256),
    same(8192, 26, 1, 64),
)
WARMUP_ROUNDS = 3
NUM_BATCHES = 8
FORWARD_RATIO, STEP_RATIO = 1.2, 1.5
FORWARD_FLOOR, CALL_MS, STEP_FLOOR, GROUPING_MS = 1.15, 0.04, 1.3, 15e-6


@pytest.fixture(autouse=True)
def peers() -> None:
    if not has_fbgemm():
        pytest.skip(FBGEMM_MISSING)
    if not has_compiler():
        pytest.skip(NO_COMPILER)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_limit_forward(shape: Workload, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    batches = draw_batches(shape, NUM_BATCHES)
    ours, fbgemm, limit = OurTables(shape), FbgemmTables(shape), LimitBags(shape)
    for peer in (fbgemm, limit):
        copy_weights(ours, peer)
        check_forward(ours, peer, batches[0])
    rows = [limit.rows(batch) for batch in batches]
    with torch.no_grad():
        contenders = [_forward(ours, batches), _forward(fbgemm, batches)]
        contenders.append(Contender("limit", lambda number: rows[number % NUM_BATCHES], limit.forward_rows))
        timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    floor = FORWARD_FLOOR * timings[2].percentile(50) + CALL_MS
    moved = {timing.name: forward_bytes(batches[-1]) for timing in timings}
    record(
        timing_rows("small rows, forward", shape, timings, moved),
        [verdict("small rows, forward", shape, timings, FORWARD_RATIO, floor)],
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_limit_step(shape: Workload, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    batches, gradient = draw_batches(shape, NUM_BATCHES), draw_gradient(shape)
    ours, fbgemm = OurTables(shape), FbgemmTables(shape)
    limit = LimitBags(shape)
    for peer in (fbgemm, limit):
        copy_weights(ours, peer)
    check_step(ours, fbgemm, batches[0], gradient)
    rows = [limit.rows(batch) for batch in batches]
    contenders = [_step(one, batches, gradient) for one in (ours, fbgemm)]
    contenders.append(Contender("limit", lambda number: rows[number % NUM_BATCHES], limit.forward_rows))
    timings = measure(benchmark, contenders, rounds, WARMUP_ROUNDS)
    least, read, update = timings[2].percentile(50), forward_bytes(batches[-1]), update_bytes(batches[-1])
    grouping = GROUPING_MS * len(batches[-1].values) / torch.get_num_threads()
    floor = STEP_FLOOR * (least + grouping + least * update / read)
    moved = {timing.name: read + update for timing in timings[:2]}
    record(
        timing_rows("small rows, step", shape, timings[:2], moved),
        [verdict("small rows, step", shape, timings, STEP_RATIO, floor)],
    )


def _forward(implementation: Tables, batches: list[Batch]) -> Contender:
    return Contender(implementation.name, lambda number: batches[number % NUM_BATCHES], implementation.forward)


def _step(implementation: Tables, batches: list[Batch], gradient: torch.Tensor) -> Contender:
    fresh = gradient.clone()

    def prepare(number: int) -> Batch:
        fresh.copy_(gradient)  # as the dense network would just have written it
        return batches[number % NUM_BATCHES]

    return Contender(implementation.name, prepare, lambda batch: step(implementation, batch, fresh))


def verdict(op: str, shape: Workload, timings: list[Timing], wanted: float, floor: float) -> dict[str, Any]:
    """Which of the two holds, or neither."""
    ours, fbgemm, limit = (timing.percentile(50) for timing in timings)
    ratio = fbgemm / ours
    held = [name for name, holds in (("ratio", ratio >= wanted), ("floor", ours <= floor)) if holds]
    return {
        "op": op,
        "shape": str(shape),
        "measured": f"fbgemm {fbgemm:.3f} / tritonemb {ours:.3f} ms, limit.c {limit:.3f}",
        "ratio": ratio,
        "target": f"at least {wanted:g}, or {floor:.3f} ms: {' and '.join(held) or 'neither'}",
        "met": bool(held),
    }


SOURCE = Path(__file__).with_name("limit.c")
NO_COMPILER = "there is no C compiler for x86-64, so the machine's limit cannot be measured"
AHEAD = 16  # ids
STREAMED_BYTES = 8 << 20
ONE_THREAD_BYTES = 256 << 10  # that are moved before another thread has begun


def has_compiler() -> bool:
    return platform.machine() == "x86_64" and shutil.which("cc") is not None


@functools.cache
def _library() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limit.so"
        subprocess.run(
            ["cc", "-O3", "-mavx2", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(path)], check=True
        )
        library = ctypes.CDLL(str(path))
    library.new_floats.restype = ctypes.c_void_p
    return library


def _new(*size: int) -> Tensor:
    count = int(torch.Size(size).numel())
    address = _library().new_floats(ctypes.c_long(count))
    assert address, f"there is no memory for {count} floats"
    array = (ctypes.c_float * count).from_address(address)
    return torch.frombuffer(array, dtype=torch.float32).view(size)


class LimitBags:
    """Equal float32 tables that are looked up by `limit.c`; dims a multiple of 8, up to 256."""

    name = "limit"

    def __init__(self, shape: Workload) -> None:
        assert shape.dim % 8 == 0
        self.shape = shape
        (self.num_rows,), (self.bag_size,) = set(shape.num_rows), set(shape.bag_sizes)
        self.table = _new(shape.num_tables * self.num_rows, shape.dim)
        self.out = _new(shape.batch_size, shape.num_tables * shape.dim)

    def weights(self) -> list[Tensor]:
        return list(self.table.split(self.num_rows))

    def rows(self, batch: Batch) -> Tensor:
        """int64 `[B, T, L]`: the batch's ids as rows of the one table."""
        shape = self.shape
        ids = batch.values.view(shape.num_tables, shape.batch_size, self.bag_size).transpose(0, 1)
        return (ids + torch.arange(shape.num_tables).view(1, -1, 1) * self.num_rows).contiguous()

    def forward_rows(self, rows: Tensor) -> Tensor:
        """`[B, T * D]`, in the same memory each time."""
        moved = 4 * self.shape.dim * rows.numel() + self.out.nbytes
        threads = 1 if moved < ONE_THREAD_BYTES else torch.get_num_threads()
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.table, rows, self.out))
        sizes = self.shape.dim, self.shape.batch_size * self.shape.num_tables, self.bag_size, AHEAD
        streamed = self.out.nbytes >= STREAMED_BYTES
        assert (
            _library().gather(*pointers, *map(ctypes.c_long, sizes), ctypes.c_int(streamed), ctypes.c_int(threads)) == 0
        )
        return self.out

    def forward(self, batch: Batch) -> Tensor:
        return self.forward_rows(self.rows(batch))
