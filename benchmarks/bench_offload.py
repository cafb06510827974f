"""Offloading of dense layers: the disk's rate, the step of the CPU, and steps with states on the host and on disk.

The floor of a step with states on disk is the larger of what computes without and of the bytes that must move over the
rate that a plain reader and writer has on the same disk, with direct I/O and the same block size. Since states cannot
be moved before the gradients are there, a step takes the sum of both rather, so three batch sizes are measured.
Everything of a case is timed in turns. PyTorch's `CPUOffloadPolicy`, torchao's `CPUOffloadOptimizer` and DeepSpeed
offload from a GPU alone: they have nothing to compare with on a machine without one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import tritonemb as te
from benchmarks.measuring.clock import Timing
from benchmarks.measuring.result_files import at_most, timing_rows
from tritonemb.offloading.tiers import CHUNK_BYTES, DiskTier, empty_host

FOLDER = Path(os.environ.get("TRITONEMB_OFFLOAD_FOLDER", "build/swap"))  # on the disk that is measured
SPANS, SPAN_BYTES = 6, 64 << 20
DIM, LAYERS = 2048, 8
SAMPLES = {"more to move": 16, "balanced": 256, "more to compute": 1024}


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def timing(name: str, found: list[float]) -> Timing:
    return Timing(name, tuple(1000 * each for each in found))


def plainly(handle: int, buffers: list[Any], move: Any) -> None:
    for number, buffer in enumerate(buffers):
        view = memoryview(buffer.numpy())
        for begin in range(0, SPAN_BYTES, CHUNK_BYTES):
            move(handle, [view[begin : begin + CHUNK_BYTES]], number * SPAN_BYTES + begin)


@pytest.mark.parametrize("write", [False, True])
def bench_disk(write: bool, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    buffers = [empty_host(SPAN_BYTES, torch.device("cpu")).random_(0, 255) for _ in range(SPANS)]
    tier, plain = DiskTier(FOLDER), FOLDER / "plain"
    handle = os.open(plain, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        os.posix_fallocate(handle, 0, SPANS * SPAN_BYTES)
        spans = [tier.reserve(SPAN_BYTES) for _ in buffers]

        def ours(write: bool) -> None:
            every = zip(spans, buffers, strict=True)
            for future in [span.write(buffer) if write else span.read(buffer) for span, buffer in every]:
                future.wait()

        ours(True)
        plainly(handle, buffers, os.pwritev)
        found: tuple[list[float], list[float]] = [], []
        for _ in range(max(rounds, 9)):
            found[0].append(seconds(lambda: ours(write)))
            found[1].append(seconds(lambda: plainly(handle, buffers, os.pwritev if write else os.preadv)))
    finally:
        os.close(handle)
        plain.unlink()
        tier.close()
    benchmark.pedantic(lambda: None, rounds=1)
    timings = [timing(name, each) for name, each in zip(("ours", "plain direct I/O"), found, strict=True)]
    op, shape = f"offload {'write' if write else 'read'}", f"{SPANS} spans of {SPAN_BYTES >> 20} MiB"
    num_bytes = SPANS * SPAN_BYTES
    record(
        timing_rows(op, shape, timings, {each.name: num_bytes for each in timings}),
        [at_most(op, shape, *timings, 1 / 0.9)],
    )


class Trained:
    """A model that is stepped; seconds of its backward passes and of its steps."""

    def __init__(self, name: str, **offload: Any) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model: nn.Module = nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(LAYERS)])
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        if offload:
            self.model, self.optimizer = te.offload(self.model, self.optimizer, path=FOLDER / name, **offload)
        self.offloaded = bool(offload)
        self.computed, self.stepped, self.whole = list[float](), list[float](), list[float]()
        self.moved = [0, 0]

    def step(self, x: torch.Tensor) -> None:
        before = self._moved()
        self.computed.append(seconds(lambda: self.model(x).pow(2).mean().backward()))
        self.stepped.append(seconds(self.optimizer.step))
        self.whole.append(self.computed[-1] + self.stepped[-1])
        self.optimizer.zero_grad()
        self.moved = [now - then for now, then in zip(self._moved(), before, strict=True)]

    def _moved(self) -> tuple[int, int]:
        return te.offloading.report(self.model).moved.get("disk", (0, 0)) if self.offloaded else (0, 0)

    def close(self) -> None:
        if self.offloaded:
            te.offloading.close(self.model)


@pytest.mark.parametrize("kind", SAMPLES)
def bench_step(kind: str, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    kinds = [
        Trained("torch"),
        Trained("host", states="host"),
        Trained("disk", states="disk", budget="150MB"),
        Trained("params", params="disk", states="disk", budget="250MB"),
    ]
    x = torch.randn(SAMPLES[kind], DIM)
    try:
        for _ in range(rounds + 2):
            for each in kinds:
                each.step(x)
    finally:
        for each in kinds:
            each.close()
        shutil.rmtree(FOLDER, ignore_errors=True)
    plain, _, disk, params = kinds
    benchmark.pedantic(lambda: None, rounds=1)
    shape = f"{LAYERS} layers of {DIM}, {SAMPLES[kind]} samples ({kind}), Adam, fp32"
    steps = [timing(each.name, each.stepped[2:]) for each in kinds]
    whole = [timing(each.name, each.whole[2:]) for each in kinds]
    none = dict.fromkeys([each.name for each in kinds], 0)
    rows = timing_rows("offload optimizer step", shape, steps, none) + timing_rows("offload step", shape, whole, none)
    targets = [
        at_most("offload optimizer step", f"{shape}, states on the host", steps[1], steps[0], 1.0),
        at_most("offload step", f"{shape}, states on the host", whole[1], whole[0], 1.1),
    ]
    read, written = _rates()
    for each in (disk, params):
        floor = max(median(plain.whole[2:]), each.moved[0] / read + each.moved[1] / written)
        case = f"{shape}, {each.name}: {each.moved[0] >> 20} MiB read, {each.moved[1] >> 20} MiB written a step"
        targets.append(at_most("offload step", case, timing(each.name, each.whole[2:]), timing("floor", [floor]), 1.15))
    record(rows, targets)


def _rates() -> tuple[float, float]:
    """Bytes a second of plain direct reads and writes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    buffers, plain = [empty_host(SPAN_BYTES, torch.device("cpu"))], FOLDER / "plain"
    handle = os.open(plain, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        os.posix_fallocate(handle, 0, SPAN_BYTES)
        write, read = (
            [seconds(lambda m=m: plainly(handle, buffers, m)) for _ in range(9)] for m in (os.pwritev, os.preadv)
        )
    finally:
        os.close(handle)
        plain.unlink()
    return SPAN_BYTES / median(read), SPAN_BYTES / median(write)
