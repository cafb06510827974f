"""What an H200 will take for the workloads of `make gpu-bench`, from machine code and bytes alone. Needs no GPU.

    python benchmarks/gpu/predict.py [-k criteo,fbgemm] [--target sm_90]

A line for the forward, the grouping and the update of each workload, in Markdown: bytes that have to move; bytes that
the code moves; 16-byte loads that a warp has in flight, and warps that a processor holds; from these the share of a
copy's bandwidth, by Little's law (bytes in flight over latency); and so the time, with LAUNCH seconds a launch. Ids and
places that are read again are taken to be in the L2 cache, output gradients to be read once an id.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # called as a file, Python puts only this folder on the path

from benchmarks.gpu.workload import (  # noqa: E402
    WORKLOADS,
    Batch,
    Workload,
    draw_batches,
    forward_bytes,
    group_bytes,
    update_bytes,
)

PROCESSORS, COPY, LATENCY, LAUNCH = 132, 4.3e12, 0.7e-6, 2e-6  # H200: processors, bytes a second, seconds
REGISTERS, WARPS, PROGRAMS, SHARED = 65_536, 64, 32, 227 << 10  # of a processor
SECTOR = 32  # bytes that memory is read by
SORT_PASSES, SORT_LAUNCHES = 4, 7  # of torch.sort for 32-bit keys


def kernels_of(workload: Workload, target: str) -> dict[str, Any]:
    """What is compiled for a step of the workload's tables, by kernel."""
    import tritonemb as te
    from tests.kernels import ahead_of_time
    from tritonemb.ops.registry import forced

    w = replace(workload, batch_size=8, num_rows=(1000,) * workload.num_tables)
    configs = [te.TableConfig(name, 1000, w.dim, dtype=w.dtype) for name in w.table_names]
    (batch,) = draw_batches(replace(w, ids="uniform"), 1, torch.device("cpu"))
    collection = te.nn.EmbeddingBagCollection(configs, optimizer=te.optim.RowWiseAdagrad(lr=0.1))

    def step() -> None:
        collection(batch.keyed).backward(torch.zeros(w.batch_size, w.width))

    with forced("triton"):
        launches = ahead_of_time.record(step, target)
    return {code.kernel: code for code in ahead_of_time.compile_all(str(w), launches, target)}


def resident_warps(code: Any) -> int:
    """Warps of a kernel that a processor holds at once: registers are given by 8 a thread."""
    programs = min(PROGRAMS, WARPS // code.num_warps, SHARED // max(1, code.shared))
    return min(programs, REGISTERS // (-(-code.registers // 8) * 8 * 32 * code.num_warps)) * code.num_warps


def moved_bytes(batch: Batch) -> tuple[int, int, int]:
    """What the code of forward, grouping and update moves."""
    w, n, rows = batch.workload, batch.workload.num_ids, batch.num_distinct
    row = -(-w.dim * w.dtype.itemsize // SECTOR) * SECTOR
    offsets = 8 * w.batch_size * w.num_tables
    forward = forward_bytes(batch) + (row - w.dim * w.dtype.itemsize) * n + offsets
    sort = SORT_PASSES * 2 * (4 + 8) * n + 4 * n  # int32 keys, int64 places; one histogram
    group = (8 + 4) * n + offsets + sort + 4 * n + (4 + 8 + 4 + 12) * n
    find_and_place = 4 * n + offsets + (4 + 4) * n + (8 + 4) * n
    update = find_and_place + (8 + 4 + 4 * w.dim) * n + rows * (8 + 8 + 2 * row + 2 * 4)
    return forward, group, update


def lines(workload: Workload, target: str) -> Iterator[str]:
    """The workload's lines of the table."""
    (batch,), codes = draw_batches(workload, 1, torch.device("cpu")), kernels_of(workload, target)
    needed = forward_bytes(batch), group_bytes(batch), update_bytes(batch)
    parts = ("forward", "_pool_kernel", 1), ("grouping", "", 3 + SORT_LAUNCHES), ("update", "_update_kernel", 4)
    for (op, kernel, launches), must, moves in zip(parts, needed, moved_bytes(batch), strict=True):
        share, in_flight = 1.0, "-"
        if kernel:
            code, warps = codes[kernel], resident_warps(codes[kernel])
            share = min(1.0, PROCESSORS * warps * 32 * 16 * code.in_flight / LATENCY / COPY)
            in_flight = f"{code.in_flight} x {warps}"
        seconds = moves / (share * COPY) + launches * LAUNCH
        yield (
            f"| {workload} | {op} | {must / 1e6:,.1f} | {moves / 1e6:,.1f} | {in_flight} | {share:.0%} | "
            f"{seconds * 1e3:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="select", default="", help="comma-separated parts of workloads' names")
    parser.add_argument("--target", default="sm_90", choices=("sm_80", "sm_90", "sm_100"))
    options = parser.parse_args()
    print("| workload | op | must move, MB | moves, MB | loads x warps in flight | share of a copy | predicted ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    wanted = options.select.split(",")
    for workload in WORKLOADS:
        if any(part in str(workload) for part in wanted):
            print("\n".join(lines(workload, options.target)), flush=True)


if __name__ == "__main__":
    main()
