"""What is wanted on one H200, shape by shape; what is predicted from machine code, bytes and published rates; and
whether a run has met it.

    python benchmarks/gpu/targets.py [-k criteo,fbgemm]      the predictions, in Markdown; needs no GPU

Three times for forward, grouping with update, and both of a workload:

- *at best*: no part of it may take less. Rows, gradients and states move at the best published rate of rows at random
  (GATHER_RATE), keys at that of a radix sort (SORT_RATE), all else at that of a copy. Where they take longer, chains of
  loads that wait for each other count instead: bag, ids, rows; the binary search for a position's bag; addresses of
  gradients, gradients. A processor follows as many chains at once as its registers hold warps (from the machine code).
- *as published*: the bytes that have to move, at the rates of TorchRec's Triton kernels (PR 4757), untuned for Hopper.
- *FBGEMM*: the same at FBGEMM's rates, which that PR measures on production's shapes.

Launches take LAUNCH each. Ids and places that are read again are taken to be in the L2 cache, output gradients to be
read once an id. Rows of one batch that are used often are summed by several programs, so no chain is longer than
SPAN gradients. No target is above what is possible at best (`tests/benchmarks/test_gpu_tools.py`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # called as a file, Python puts only this folder there

from benchmarks.measuring.cases import GATHER, GRAPH, OURS
from benchmarks.measuring.workload import (
    WORKLOADS,
    Batch,
    Workload,
    draw_batches,
    forward_bytes,
    group_bytes,
    update_bytes,
)

PROCESSORS, PEAK, COPY_RATE = 132, 4.8e12, 4.3e12  # H200; bytes per second, by its data sheet and measured
LATENCY, CACHE_LATENCY, LAUNCH = 0.7e-6, 0.3e-6, 2e-6  # seconds, of a load from memory and from the L2 cache
REGISTERS, WARPS, PROGRAMS, SHARED = 65_536, 64, 32, 227 << 10  # of a processor
SECTOR = 32  # bytes that memory is read by
# Shares of the peak. 29.4 G keys of 32 bits per second on an A100 ("Onesweep", 2022) are 36 bytes each of 1.555 TB/s.
FORWARD_FBGEMM, FORWARD_TRITON, UPDATE_FBGEMM, UPDATE_TRITON = 0.64, 0.56, 0.265, 0.28
GATHER_RATE, SORT_RATE = 0.65 * PEAK, 29.4e9 * 36 / 1.555e12 * PEAK
SORT_PASSES, SORT_LAUNCHES = 4, 7  # of torch.sort for 32-bit keys
FBGEMM_LAUNCHES, UPDATE_LAUNCHES = 14, 3 + SORT_LAUNCHES + 4
SPAN = 1024  # gradients of a row that a program sums


class Target(NamedTuple):
    """Ours is to be at least `factor` times as fast as `peer`, in ops and shapes whose names start so."""

    op: str
    peer: str
    factor: float
    shape: str = ""


TARGETS = (
    Target("forward", GATHER, 0.9),
    Target("forward", "fbgemm", 0.95),
    *(Target("group + update", "fbgemm", factor, shape) for shape, factor in {
        "fbgemm": 1.2, "criteo: B8192": 1.1, "criteo: B4096": 1.0, "criteo: B2048": 0.9, "many small": 1.2,
        "one large": 1.1, "reuse": 1.2, "mlperf": 1.2,
    }.items()),
    Target("codec", "copy", 0.9),
    Target("interaction", "torch, compiled", 1.3),
    Target("DLRM step", "fbgemm", 1.1),
    Target("training from host memory", "tritonemb, on the device", 0.8),
    Target("training from host memory", "fbgemm, cached", 1.5),
)  # fmt: skip


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every target and case in which both were measured; with another line for a case that lacks one."""
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cases.setdefault((row["op"], row["shape"]), {})[row["implementation"]] = row["p50_ms"]
    results = []
    for target in TARGETS:
        for (op, shape), medians in cases.items():
            if not op.startswith(target.op) or not shape.startswith(target.shape) or op.endswith(GRAPH):
                continue
            ratio = medians[target.peer] / medians[OURS] if {target.peer, OURS} <= medians.keys() else None
            results.append({
                "op": op, "shape": shape, "measured": f"{target.peer} / {OURS}", "ratio": ratio,
                "target": f"at least {target.factor:g}", "met": None if ratio is None else ratio >= target.factor,
            })  # fmt: skip
    return results


class Kernel(NamedTuple):
    """A compiled kernel of a workload's step, and the constants it was launched with."""

    code: Any
    constants: dict[str, Any]

    def chains(self, programs: float, seconds: float) -> float:
        """The time of so many programs, each of which waits so long."""
        at_once = PROCESSORS * resident_warps(self.code) // self.code.num_warps
        return seconds * max(1.0, programs / at_once)

    def searches(self, positions: int, seconds: float) -> float:
        """The same of programs that each search the bags of BLOCK positions."""
        return self.chains(math.ceil(positions / self.constants["BLOCK"]), seconds)


def kernels_of(workload: Workload) -> dict[str, Kernel]:
    """What is compiled for a step of the workload's tables, by kernel."""
    import tritonemb as te
    from tests.kernels import ahead_of_time
    from tritonemb.ops.registry import use_kernels

    w = replace(workload, batch_size=8, num_rows=(1000,) * workload.num_tables)
    configs = [te.TableConfig(name, 1000, w.dim, dtype=w.dtype) for name in w.table_names]
    (batch,) = draw_batches(replace(w, ids="uniform"), 1, torch.device("cpu"))
    collection = te.nn.EmbeddingBagCollection(configs, optimizer=te.optim.RowWiseAdagrad(lr=0.1))

    def step() -> None:
        collection(batch.keyed).backward(torch.zeros(w.batch_size, w.width))

    with use_kernels("triton"):
        launches = ahead_of_time.record(step, "sm_90")
    constants = {launch.kernel.__name__: launch.constants for launch in launches}
    codes = ahead_of_time.compile_all(str(w), launches, "sm_90")
    return {code.kernel: Kernel(code, constants[code.kernel]) for code in codes}


def resident_warps(code: Any) -> int:
    """Warps of a kernel that a processor holds at once: registers are given by 8 a thread."""
    programs = min(PROGRAMS, WARPS // code.num_warps, SHARED // max(1, code.shared))
    return min(programs, REGISTERS // (-(-code.registers // 8) * 8 * 32 * code.num_warps)) * code.num_warps


def forward_at_best(batch: Batch, kernels: dict[str, Kernel]) -> float:
    w, kernel = batch.workload, kernels["_pool_kernel"]
    bags, block, unroll = (kernel.constants[name] for name in ("ROWS", "BLOCK", "UNROLL"))
    row = -(-w.dim * w.dtype.itemsize // SECTOR) * SECTOR
    moved = forward_bytes(batch) + (row - w.dim * w.dtype.itemsize) * w.num_ids + 8 * w.batch_size * w.num_tables
    programs = math.ceil(w.batch_size / bags) * math.ceil(w.dim / block)
    turns = sum(math.ceil(size / unroll) for size in w.bag_sizes) / w.num_tables
    waits = 2 * CACHE_LATENCY + turns * (CACHE_LATENCY + LATENCY)
    return max(moved / GATHER_RATE, kernel.chains(programs * w.num_tables, waits)) + LAUNCH


def update_at_best(batch: Batch, kernels: dict[str, Kernel]) -> float:
    """Grouping, too."""
    w, n, rows, kernel = batch.workload, batch.workload.num_ids, batch.num_distinct, kernels["_update_kernel"]
    row = -(-w.dim * w.dtype.itemsize // SECTOR) * SECTOR
    searches = math.ceil(math.log2(w.batch_size * w.num_tables + 1)) * CACHE_LATENCY
    # Grouping: int32 keys and int64 places are sorted; one histogram. Ids, keys, segments and the search for tables.
    sort = (SORT_PASSES * 2 * (4 + 8) * n + 4 * n) / SORT_RATE
    beside = ((8 + 4 + 4 + 4 + 8 + 4 + 12) * n + 8 * w.batch_size * w.num_tables) / COPY_RATE
    group = sort + max(beside, kernels["_linear_rows_kernel"].searches(n, searches))
    # Update: bags are searched, gradients placed; then each row's gradients, its weights and its state.
    places = ((4 + 4 + 4 + 8 + 4) * n + 8 * w.batch_size * w.num_tables) / COPY_RATE
    place = max(places, kernels["_find_bags_kernel"].searches(n, searches))
    moved = (8 + 4 + 4 * w.dim) * n + rows * (8 + 8 + 2 * row + 2 * 4)
    turns = math.ceil(min(n / rows, SPAN) / kernel.constants["UNROLL"])
    waits = 3 * CACHE_LATENCY + turns * LATENCY
    update = max(moved / GATHER_RATE, kernel.chains(rows / kernel.constants["ROWS"], waits))
    return group + place + update + UPDATE_LAUNCHES * LAUNCH


class Prediction(NamedTuple):
    """Seconds of an op: ours at best, as published for Triton, and FBGEMM's; and the bytes that have to move."""

    op: str
    num_bytes: int
    at_best: float
    as_published: float
    fbgemm: float


def predictions(workload: Workload) -> list[Prediction]:
    """Of the forward, and of grouping and update."""
    (batch,), kernels = draw_batches(workload, 1, torch.device("cpu")), kernels_of(workload)
    forward, update = forward_bytes(batch), group_bytes(batch) + update_bytes(batch)
    return [
        Prediction(
            "forward", forward, forward_at_best(batch, kernels), forward / (FORWARD_TRITON * PEAK) + LAUNCH,
            forward / (FORWARD_FBGEMM * PEAK) + LAUNCH,
        ),
        Prediction(
            "group + update", update, update_at_best(batch, kernels),
            update / (UPDATE_TRITON * PEAK) + UPDATE_LAUNCHES * LAUNCH,
            update / (UPDATE_FBGEMM * PEAK) + FBGEMM_LAUNCHES * LAUNCH,
        ),
    ]  # fmt: skip


def wanted(op: str, workload: Workload) -> float:
    """Times as fast as FBGEMM."""
    (target,) = (t for t in TARGETS if t.op == op and t.peer == "fbgemm" and str(workload).startswith(t.shape))
    return target.factor


def lines(workload: Workload) -> Iterator[str]:
    """The workload's lines of the table."""
    for op, num_bytes, best, published, fbgemm in predictions(workload):
        yield (
            f"| {workload} | {op} | {num_bytes / 1e6:,.1f} | {best * 1e3:.3f} | {published * 1e3:.3f} | "
            f"{fbgemm * 1e3:.3f} | {fbgemm / published:.2f} to {fbgemm / best:.2f} | {wanted(op, workload):g} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="select", default="", help="comma-separated parts of names")
    options = parser.parse_args()
    print("| workload | op | must move, MB | at best, ms | as published, ms | FBGEMM, ms | times FBGEMM's | wanted |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for workload in WORKLOADS:
        if any(part in str(workload) for part in options.select.split(",")):
            print("\n".join(lines(workload)), flush=True)


if __name__ == "__main__":
    main()
