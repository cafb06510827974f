"""What an H200 will take for the workloads of `make gpu-bench`, from machine code and bytes alone. Needs no GPU.

    python benchmarks/gpu/predict.py [-k criteo,fbgemm] [--target sm_90]

A line for the forward, the grouping and the update of each workload, in Markdown: bytes that have to move; bytes that
the code moves; 16-byte loads that a warp has in flight, and warps that a processor holds; from these the share of a
copy's bandwidth, by Little's law (bytes in flight over latency); and so the time, with LAUNCH seconds a launch. Ids and
places that are read again are taken to be in the L2 cache, output gradients to be read once an id.

The last three columns say the same of FBGEMM's kernels, from their source alone (`fbgemm_gpu/codegen/training`): a warp
pools a bag, 4 floats a lane; a row is added before the next is asked for, but compilers unroll such a loop by four. A
warp updates a row: it asks for up to eight gradients at once, and for weight and state when these are summed. Rows of
many uses are left out. Blocks have 512 threads, of which two are resident (FBGEMM_WARPS) with 33 to 64 registers; the
source does not say how many there are. It sorts int64 keys by the bits that rows need, with an int32 of table and
sample beside each, and searches no bags.

A second table has the other families, for each of their cases: bytes that have to move, which is what their code moves;
by kernel, bytes that a lane has in flight, by loads of any width, and warps; the share of its kernel with the least;
and the time, at which host memory is read through PCIE. What a kernel reads to find what it has to move, as searches
do, is in no figure.
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

from benchmarks import (  # noqa: E402
    bench_codecs,
    bench_cross,
    bench_interaction,
    bench_jagged,
    bench_row_cache,
    bench_row_moves,
)
from benchmarks.cases import Case  # noqa: E402
from benchmarks.clock import Clock  # noqa: E402
from benchmarks.workload import (  # noqa: E402
    WORKLOADS,
    Batch,
    Workload,
    draw_batches,
    forward_bytes,
    group_bytes,
    update_bytes,
)

PROCESSORS, COPY, LATENCY, LAUNCH = 132, 4.3e12, 0.7e-6, 2e-6  # H200: processors, bytes a second, seconds
PCIE = 55e9  # bytes a second, of a copy from host memory
OTHERS = (bench_codecs, bench_cross, bench_interaction, bench_jagged, bench_row_cache, bench_row_moves)
REGISTERS, WARPS, PROGRAMS, SHARED = 65_536, 64, 32, 227 << 10  # of a processor
SECTOR = 32  # bytes that memory is read by
SORT_PASSES, SORT_LAUNCHES = 4, 7  # of torch.sort for 32-bit keys
FBGEMM_WARPS, FBGEMM_LAUNCHES = 32, (1, 8, 2)  # without those of the sort, one a pass


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


def by_fbgemm(batch: Batch) -> Iterator[tuple[int, float, int]]:
    """Bytes that forward, grouping and update move in FBGEMM, loads that a warp has in flight, and launches."""
    w, n, rows = batch.workload, batch.workload.num_ids, batch.num_distinct
    (forward, *_) = moved_bytes(batch)
    vectors, uses, passes = max(1, w.dim // 128), n / rows, -(-sum(w.num_rows).bit_length() // 8)
    launches, row = FBGEMM_LAUNCHES, -(-w.dim * w.dtype.itemsize // SECTOR) * SECTOR
    yield forward, vectors * min(4, n / (w.batch_size * w.num_tables)), launches[0]
    offsets = 8 * w.batch_size * w.num_tables
    sort = passes * 2 * (8 + 4) * n + 8 * n
    yield (8 + 8 + 4) * n + offsets + sort + 8 * n + (8 + 4 + 4) * rows, 0, launches[1] + passes
    yield (4 + 4 * w.dim) * n + rows * (8 + 4 + 2 * row + 2 * 4), vectors * (min(8, uses) + 1) / 2, launches[2]


def share_of_copy(bytes_in_flight: float) -> float:
    """Of a processor, by Little's law."""
    return min(1.0, PROCESSORS * bytes_in_flight / LATENCY / COPY)


def lines(workload: Workload, target: str) -> Iterator[str]:
    """The workload's lines of the table."""
    (batch,), codes = draw_batches(workload, 1, torch.device("cpu")), kernels_of(workload, target)
    needed = forward_bytes(batch), group_bytes(batch), update_bytes(batch)
    parts = ("forward", "_pool_kernel", 1), ("grouping", "", 3 + SORT_LAUNCHES), ("update", "_update_kernel", 4)
    columns = zip(parts, needed, moved_bytes(batch), by_fbgemm(batch), strict=True)
    for (op, kernel, launches), must, moves, (its_moves, its_loads, its_launches) in columns:
        share, in_flight, its_share, its_in_flight = 1.0, "-", 1.0, "-"
        if kernel:
            code, warps = codes[kernel], resident_warps(codes[kernel])
            share, in_flight = share_of_copy(warps * 32 * 16 * code.in_flight), f"{code.in_flight} x {warps}"
            load = min(32 * 4, workload.dim) * (4 if op == "update" else workload.dtype.itemsize)
            its_share = share_of_copy(FBGEMM_WARPS * load * its_loads)
            its_in_flight = f"{its_loads:.2g} x {FBGEMM_WARPS}"
        seconds, its_seconds = (
            moved / (part * COPY) + number * LAUNCH
            for moved, part, number in ((moves, share, launches), (its_moves, its_share, its_launches))
        )
        yield (
            f"| {workload} | {op} | {must / 1e6:,.1f} | {moves / 1e6:,.1f} | {in_flight} | {share:.0%} | "
            f"{seconds * 1e3:.3f} | {its_moves / 1e6:,.1f} | {its_in_flight}, {its_share:.0%} | "
            f"{its_seconds * 1e3:.3f} |"
        )


def line_of_case(case: Case, target: str) -> str:
    """The line of a case of another family; it is made on the CPU, and its launches are compiled, not run."""
    from tests.kernels import ahead_of_time
    from tritonemb.ops.registry import forced

    ours = case.make(Clock(torch.device("cpu")))[0]
    prepared = ours.prepare(0)
    ours.run(prepared)  # what is done once is not of the case
    with forced("triton"):
        launches = ahead_of_time.record(lambda: ours.run(prepared), target)
    codes = ahead_of_time.compile_all(str(case), launches, target)
    in_flight = [code.bytes_in_flight * resident_warps(code) for code in codes]
    share = share_of_copy(32 * min(in_flight))
    bandwidth = PCIE if "host memory" in case.op else share * COPY
    kernels = ", ".join(f"{code.kernel.strip('_')} {code.bytes_in_flight} x {resident_warps(code)}" for code in codes)
    seconds = ours.num_bytes / bandwidth + len(launches) * LAUNCH
    return f"| {case} | {ours.num_bytes / 1e6:,.1f} | {kernels} | {share:.0%} | {seconds * 1e3:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="select", default="", help="comma-separated parts of names")
    parser.add_argument("--target", default="sm_90", choices=("sm_80", "sm_90", "sm_100"))
    options = parser.parse_args()
    print(
        "| workload | op | must move, MB | moves, MB | loads x warps in flight | share of a copy | predicted ms "
        "| FBGEMM moves, MB | its loads x warps, share | its ms |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    wanted = options.select.split(",")
    for workload in WORKLOADS:
        if any(part in str(workload) for part in wanted):
            print("\n".join(lines(workload, options.target)), flush=True)
    print("\n| op, shape | must move, MB | kernel, bytes x warps in flight | share of a copy | predicted ms |")
    print("| --- | --- | --- | --- | --- |")
    for case in (case for family in OTHERS for case in family.cases(torch.device("cuda"), False)):
        if any(part in str(case) for part in wanted):
            print(line_of_case(case, options.target), flush=True)


if __name__ == "__main__":
    main()
