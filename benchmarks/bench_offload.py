"""Offloading of dense layers: the disk's rate, the step of the CPU, and steps with states on the host and on disk.

The floor of a step with states on disk is the larger of what computes without and of the bytes that must move over the
rate that a plain reader and writer has on the same disk, with direct I/O and the same block size. A step after
the backward moves states once all gradients are there, so it takes the sum of both rather; a step inside the backward
moves them before. Three batch sizes are measured.
Everything of a case is timed in turns. PyTorch's `CPUOffloadPolicy`, torchao's `CPUOffloadOptimizer` and DeepSpeed
offload from a GPU alone: they have nothing to compare with on a machine without one. FSDP2 in memory is compared by
`python -m benchmarks.studies.fully_shard`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import tritonemb as te
from benchmarks.measuring.clock import Contender, Timing
from benchmarks.measuring.result_files import Goal
from tritonemb.offloading.tiers import REQUEST_BYTES, DiskTier, empty_host

FOLDER = Path(os.environ.get("TRITONEMB_OFFLOAD_FOLDER", "build/swap"))  # on the disk that is measured
SPANS, SPAN_BYTES = 6, 64 << 20
DIM, LAYERS = 2048, 8
SAMPLES = {"more to move": 16, "balanced": 256, "more to compute": 1024}


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@contextmanager
def plain_file(buffers: list[Any]) -> Iterator[Callable[[Any], None]]:
    """Read or write these buffers in a file plainly, with direct I/O: what takes `os.preadv` or `os.pwritev`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "plain"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)

    def move(operation: Any) -> None:
        for number, buffer in enumerate(buffers):
            view = memoryview(buffer.numpy())
            for begin in range(0, SPAN_BYTES, REQUEST_BYTES):
                operation(handle, [view[begin : begin + REQUEST_BYTES]], number * SPAN_BYTES + begin)

    try:
        os.posix_fallocate(handle, 0, len(buffers) * SPAN_BYTES)
        move(os.pwritev)
        yield move
    finally:
        os.close(handle)
        path.unlink()


@pytest.mark.parametrize("write", [False, True])
def bench_disk(write: bool, race: Any) -> None:
    buffers = [empty_host(SPAN_BYTES, torch.device("cpu")).random_(0, 255) for _ in range(SPANS)]
    with plain_file(buffers) as move:
        tier = DiskTier(FOLDER)
        spans = [tier.reserve(SPAN_BYTES) for _ in buffers]

        def ours(write: bool) -> None:
            pairs = zip(spans, buffers, strict=True)
            for future in [span.write(buffer) if write else span.read(buffer) for span, buffer in pairs]:
                future.wait()

        ours(True)
        num_bytes = SPANS * SPAN_BYTES
        contenders = [
            Contender("ours", lambda _: write, ours, num_bytes),
            Contender("plain direct I/O", lambda _: os.pwritev if write else os.preadv, move, num_bytes),
        ]
        op, shape = f"offload {'write' if write else 'read'}", f"{SPANS} spans of {SPAN_BYTES >> 20} MiB"
        race(op, shape, contenders, Goal(0, 1, most=1 / 0.9))
        tier.close()


class Trained:
    """A model that is stepped; seconds of its backward passes and of its steps."""

    def __init__(self, name: str, in_backward: bool = False, **offload: Any) -> None:
        torch.manual_seed(0)
        self.name, self.in_backward = name, in_backward
        self.model: nn.Module = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(LAYERS)])
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        if offload:
            self.model, self.optimizer = te.offload(self.model, self.optimizer, path=FOLDER / name, **offload)
        self.offloaded = bool(offload)
        self.computed, self.stepped, self.whole = list[float](), list[float](), list[float]()
        self.moved = [0, 0]

    def step(self, x: torch.Tensor) -> None:
        initial = self._moved()

        def compute() -> None:
            self.computed.append(seconds(lambda: self.model(x).pow(2).mean().backward()))

        if self.in_backward:
            self.whole.append(seconds(lambda: self.optimizer.step(compute, in_backward=True)))
        else:
            self.whole.append(seconds(lambda: (compute(), self.optimizer.step())))
        self.stepped.append(self.whole[-1] - self.computed[-1])
        self.optimizer.zero_grad()
        self.moved = [now - then for now, then in zip(self._moved(), initial, strict=True)]

    def _moved(self) -> tuple[int, int]:
        return te.offloading.report(self.model).moved.get("disk", (0, 0)) if self.offloaded else (0, 0)

    def close(self) -> None:
        if self.offloaded:
            te.offloading.close(self.model)


@pytest.mark.parametrize("kind", SAMPLES)
def bench_step(kind: str, race: Any) -> None:
    kinds = [
        Trained("torch"),
        Trained("host", states="host"),
        Trained("disk", states="disk", budget="150MB"),
        Trained("params", params="disk", states="disk", budget="250MB"),
        Trained("disk, in the backward", in_backward=True, states="disk", budget="150MB"),
        Trained("gradients on host", states="host", grads="host"),
        Trained("gradients on disk", states="host", grads="disk", budget="1GB"),
    ]
    x = torch.randn(SAMPLES[kind], DIM)
    try:
        for _ in range(race.rounds + 2):
            for entry in kinds:
                entry.step(x)
    finally:
        for entry in kinds:
            entry.close()
        shutil.rmtree(FOLDER, ignore_errors=True)
    shape = f"{LAYERS} layers of {DIM}, {SAMPLES[kind]} samples ({kind}), Adam, fp32"
    steps, whole = (
        [Timing(item.name, tuple(1000 * time for time in times[2:])) for item, times in of_kind]
        for of_kind in ([(kind, kind.stepped) for kind in kinds], [(kind, kind.whole) for kind in kinds])
    )
    race.keep("offload optimizer step", shape, steps, Goal(1, 0, most=1.0))
    race.keep("offload step", shape, whole, Goal(1, 0, most=1.1))
    with plain_file([empty_host(SPAN_BYTES, torch.device("cpu"))]) as move:
        write, read = (
            SPAN_BYTES / median(seconds(lambda m=m: move(m)) for _ in range(9)) for m in (os.pwritev, os.preadv)
        )
    for entry, timing in zip(kinds, whole, strict=True):
        if not any(entry.moved):
            continue
        floor = 1000 * max(median(kinds[0].whole[2:]), entry.moved[0] / read + entry.moved[1] / write)
        case = f"{shape}, {entry.name}: {entry.moved[0] >> 20} MiB read, {entry.moved[1] >> 20} MiB written a step"
        race.target("offload step", case, f"{entry.name} / floor", timing.percentile(50) / floor, most=1.15)
