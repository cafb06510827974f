"""The most bytes that a training step of embedding tables needs beside what stands before it: ours and its peers.

Before it stand the tables, the states of their optimizer, the batch and the gradient of the result; the step makes all
else, the result among it. Each of `IMPLEMENTATIONS` is a process of its own. There glibc maps every allocation of a
page and more by itself and returns it when it is freed, so that the peak of resident memory counts what torch, NumPy,
compiled kernels and FBGEMM allocate; beside it stands what torch's profiler counts, which is torch's alone. On a GPU it
is the peak of torch's caching allocator. `make bench ARGS="-k memory"` runs this alone and rewrites its table.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonemb as te
from benchmarks.measuring.cases import OURS
from benchmarks.measuring.peers import FbgemmTables, OurTables, Tables
from benchmarks.measuring.peers import step as step_of
from benchmarks.measuring.result_files import ROOT, target_row
from benchmarks.measuring.workload import EPS, LR, Batch, Workload, draw_batches, draw_gradient
from tritonemb import memory

ALL_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
STEPS = 5  # measured; their median counts
LIMITS = {"torch": 0.7, "fbgemm": 1.0}  # the most that ours may need of theirs
SHAPES = {
    str(shape): shape
    for shape in (
        *(
            Workload("criteo", batch_size, (100_000,) * 26, (1,) * 26, dim, ids="reuse")
            for batch_size in (2048, 8192)
            for dim in (64, 128)
        ),
        *(Workload("fbgemm", 512, (100_000,) * 32, (20,) * 32, ids=ids) for ids in ("uniform", "zipf")),
        Workload("wide bags", 512, (100_000,) * 8, (100,) * 8),
    )
}

Step = Callable[[Batch, Tensor], None]


def together(make: Callable[..., Tables], workload: Workload, device: torch.device) -> Step:
    return partial(step_of, make(workload, device))


def module_each(optimize: Callable[[nn.Module], Any], workload: Workload, device: torch.device) -> Step:
    """One `torch.nn.EmbeddingBag(sparse=True)` a table; gradients are views, as `torch.cat` makes them."""
    bags = nn.ModuleList(
        nn.EmbeddingBag(
            rows, workload.dim, mode="sum", sparse=True, _weight=torch.ones(rows, workload.dim, device=device)
        )
        for rows in workload.num_rows
    )
    optimizer = optimize(bags)

    def run(batch: Batch, gradient: Tensor) -> None:
        results = [bag(*ids) for bag, ids in zip(bags, batch.bags, strict=True)]
        torch.autograd.backward(results, gradient.split(workload.dim, 1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


ADAGRAD = te.optim.Adagrad(LR, eps=EPS)
IMPLEMENTATIONS: dict[str, Callable[[Workload, torch.device], Step]] = {
    f"{OURS}, row-wise Adagrad": partial(together, OurTables),
    f"{OURS}, Adagrad": partial(together, partial(OurTables, optimizer=ADAGRAD)),
    f"{OURS}, modules, Adagrad": partial(module_each, lambda bags: te.optim.fused(bags, ADAGRAD)),
    "torch, Adagrad": partial(module_each, lambda bags: torch.optim.Adagrad(bags.parameters(), LR, eps=EPS)),
    "torch, SparseAdam": partial(module_each, lambda bags: torch.optim.SparseAdam(list(bags.parameters()), LR)),
    "fbgemm, row-wise Adagrad": partial(together, FbgemmTables),
}


def peak(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that a run adds at its peak; what ours keeps of the results before counts as added."""
    gc.collect()
    memory._idle.clear()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        initial = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - initial
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    initial = _status("VmRSS")
    run()
    return _status("VmHWM") - initial


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def profiled_peak(run: Callable[[], object]) -> int:
    """The same of torch's CPU allocator alone, by its profiler."""
    memory._idle.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profiler: Any = profile.profiler
    now = most = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measured(implementation: str, shape: str, device: torch.device) -> dict[str, Any]:
    """In this process. Kernels are compiled, and states made, by the first two steps."""
    workload = SHAPES[shape]
    run = IMPLEMENTATIONS[implementation](workload, device)
    (batch,) = draw_batches(workload, 1, device)
    inputs = batch, draw_gradient(workload, device)
    assert batch.keyed.keys()  # made before the step, as these
    assert len(batch.bags) == workload.num_tables
    for _ in range(2):
        run(*inputs)
    step = partial(run, *inputs)
    return {
        "shape": shape,
        "implementation": implementation,
        "ids": workload.num_ids,
        "result_bytes": inputs[1].nbytes,
        "peak_bytes": int(median(peak(step, device) for _ in range(STEPS))),
        "torch_bytes": profiled_peak(step) if device.type == "cpu" else None,
    }


def in_own_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_memory", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ALL_MAPPED, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone says what a process had at most")
@pytest.mark.parametrize("shape", SHAPES)
def bench_memory(shape: str, race: Any, threads: int) -> None:
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM, which `make bench` installs, is the peer")
    rows = [in_own_process(name, shape, str(race.clock.device), str(threads)) for name in IMPLEMENTATIONS]
    race.benchmark.extra_info["memory"] = rows
    race.targets += [at_most(row, rows) for row in rows if row["implementation"].startswith(OURS)]


def at_most(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """That one of ours needs at most so much of each peer: modules of torch's, a collection of FBGEMM's, too."""
    peers = LIMITS if "modules" not in row["implementation"] else {"torch": LIMITS["torch"]}
    shares = {
        item["implementation"]: row["peak_bytes"] / item["peak_bytes"] / limit
        for item in rows
        for name, limit in peers.items()
        if item["implementation"].startswith(name)
    }
    peer = max(shares, key=lambda name: shares[name])
    measured = f"{row['implementation']} / {LIMITS[peer.split(',')[0]]:g} of {peer}"
    return target_row("peak bytes of a step", row["shape"], measured, shares[peer], most=1)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[4]))
    print(json.dumps(measured(sys.argv[1], sys.argv[2], torch.device(sys.argv[3]))))
