"""Train a model that `fully_shard` (FSDP2) shards over 2 ranks, in memory and offloaded; compare time and memory.

The model, Adam and the batches are the same for all, and so are the losses, bit by bit. Times: every round steps all
models once, in turn, in one process group of gloo; a step takes as long as its slowest rank. The fastest round counts,
as other work on the machine slows down some of them; the median stands beside it. Memory: one model after the other;
the resident set at its peak during steps is compared with that before the model was created. Usage:

    python -m benchmarks.studies.fully_shard
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tritonemb as te
from benchmarks.measuring import report
from benchmarks.studies.exchange import on_ranks

WORLD, DIM, LAYERS, SAMPLES = 2, 2048, 8, 16
PLAIN = "fully_shard"
OFFLOADS: dict[str, dict[str, Any] | None] = {
    PLAIN: None,
    "states in host memory": {"states": "host"},
    "states on disk": {"states": "disk", "budget": "75MB"},
    "parameters and states on disk": {"params": "disk", "states": "disk", "budget": "125MB"},
    "parameters, gradients and states on disk": {
        "params": "disk", "states": "disk", "grads": "disk", "budget": "125MB",
    },
}  # fmt: skip
# Freed memory returns to the system, so that the resident set is what is in use.
ALL_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


class Trained:
    """Sharded model with its optimizer, offloaded as `OFFLOADS` says."""

    def __init__(self, name: str, folder: str, dim: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*[nn.Linear(dim, dim) for _ in range(layers)])
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        if (offload := OFFLOADS[name]) is not None:
            path = Path(folder) / name.replace(" ", "-")
            self.model, self.optimizer = te.offload(self.model, self.optimizer, path=path, **offload)
        self.seconds, self.losses = list[float](), list[float]()

    def step(self, x: torch.Tensor) -> None:
        dist.barrier()
        begin = time.perf_counter()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.seconds.append(seconds.item())
        self.losses.append(loss.item())


def batch(rank: int, dim: int, samples: int) -> torch.Tensor:
    return torch.randn(samples, dim, generator=torch.Generator().manual_seed(rank))


def times(rank: int, world: int, folder: str, rounds: int, dim: int, layers: int, samples: int) -> dict[str, Any]:
    """Return seconds per step and losses by model, all of which are stepped in turn."""
    models = {name: Trained(name, folder, dim, layers) for name in OFFLOADS}
    x = batch(rank, dim, samples)
    for _ in range(rounds + 2):
        for trained in models.values():
            trained.step(x)
    return {name: (trained.seconds[2:], trained.losses) for name, trained in models.items()}


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def peaks(rank: int, world: int, folder: str, dim: int, layers: int, samples: int) -> dict[str, int]:
    """Return by model the bytes that the resident set grows by at its peak in steps, without other models in memory."""
    result = {}
    for name in OFFLOADS:
        # A small model first, for what is imported and allocated at the first use.
        for size, depth, batch_size in ((16, 2, 8), (dim, layers, samples)):
            gc.collect()
            initial = resident("VmRSS")
            trained, x = Trained(name, folder, size, depth), batch(rank, size, batch_size)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            for _ in range(3):
                trained.step(x)
            result[name] = resident("VmHWM") - initial
            if OFFLOADS[name] is not None:
                te.offloading.close(trained.model)
            del trained
    return result


def measure(rounds: int, dim: int, layers: int, samples: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row per model, and what is wrong."""
    folder = tempfile.mkdtemp(dir=os.environ.get("TRITONEMB_OFFLOAD_FOLDER", "."), prefix="swap-")
    shape = dim, layers, samples
    try:
        timed = on_ranks(WORLD, times, folder, rounds, *shape)[0]
        os.environ.update(ALL_MAPPED)  # of the processes that begin from here on
        peaks_of_ranks = on_ranks(WORLD, peaks, folder, *shape)
    finally:
        shutil.rmtree(folder)
    shared = {"rounds": rounds, "dim": dim, "layers": layers, "samples": samples, "world_size": WORLD}
    rows = [
        {"model": name, "best_ms": 1000 * min(seconds), "median_ms": 1000 * median(seconds)}
        for name, (seconds, _) in timed.items()
    ]
    rows = [row | shared | {"peak_bytes": max(rank[row["model"]] for rank in peaks_of_ranks)} for row in rows]
    different = [name for name, (_, losses) in timed.items() if losses != timed[PLAIN][1]]
    return rows, [f"{name}: other losses than {PLAIN}" for name in different]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rows, problems = measure(parser.parse_args().rounds, DIM, LAYERS, SAMPLES)
    report.publish("fully-shard", rows, problems)
    print(report.fully_shard_section({"rows": rows}))


if __name__ == "__main__":
    main()
