"""What to carry to a GPU machine, made without a GPU: `python -m tests.gpu.archives`, or `make gpu-archives`.

`gpu-cache.tar.xz` is Triton's cache of the core kernels and their launchers: every core launch goes through Triton's
own path into a stub of the driver. Its keys have hashes of Triton's files, so it serves only the same wheel: that
version of Triton, and of Python; checks print what came from it. With `--fbgemm VERSION`, `fbgemm.tar.xz` is a part of
FBGEMM's wheel for benchmarks. `make gpu-first` unpacks both. Exits with 1 if they and the tree exceed `--max-mib`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.launch_cost import measure
from benchmarks.measuring.peers import OurTables, step
from benchmarks.measuring.result_files import commit
from benchmarks.measuring.workload import WORKLOADS, Workload, draw_batches, draw_gradient
from tests.gpu import processes
from tests.gpu.checks import CPU, LAUNCHES
from tests.gpu.driver import activate
from tests.gpu.first import ARCHIVES, CACHE, COMMIT, SHAPES, pack
from tests.gpu.problems import counted_compilations
from tests.gpu.processes import PASSED, Job
from tests.kernels.ahead_of_time_cases import CASES
from tritonemb.kernels.triton_utils import interpreting
from tritonemb.ops.registry import TRITON, use_kernels

MIB = 2**20
BESIDE = (".source", ".log")  # what Triton, and this tool, leave in the cache beside binaries


def run_workload(workload: Workload) -> None:
    """A training step of a benchmark's tables."""
    (batch,), tables = draw_batches(workload, 1, CPU), OurTables(workload)
    with use_kernels(TRITON):
        step(tables, batch, draw_gradient(workload, CPU))


def launches() -> dict[str, Callable[[], object]]:
    """What launches the core kernels, by name."""
    cases = {case.name: case.call for case in CASES if case.core}
    checks = {name: partial(check.results, CPU) for name, check in LAUNCHES.items()}
    shapes = {str(w): partial(run_workload, w) for w in WORKLOADS if any(shape in str(w) for shape in SHAPES)}
    return cases | checks | shapes | {"host": partial(measure, 2, 1)}


def compile_here(names: list[str]) -> None:
    activate()
    with counted_compilations() as counts:
        for name in names:
            launches()[name]()
    print(f"kernels compiled: {counts[False]}, from the cache: {counts[True]}")


def tree_bytes() -> int:
    """Of the files of the repository, those that it ignores left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return sum(Path(name).stat().st_size for name in names if Path(name).is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of cases, smoke's checks and shapes; all of them by default")
    parser.add_argument("--out", type=Path, default=ARCHIVES)
    parser.add_argument("--cache", type=Path, default=CACHE, help="Triton's cache, at the place that it is unpacked to")
    parser.add_argument("--fbgemm", metavar="VERSION", help="make fbgemm.tar.xz, too; 1.6.0 goes with torch 2.11")
    parser.add_argument("--max-mib", type=float, default=63, help="most that tree and archives may have")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="compile in this process, and pack nothing")
    options = parser.parse_args()
    if interpreting() or torch.cuda.is_available():
        sys.exit("gpu-archives compiles for a GPU that is not there: unset TRITON_INTERPRET, set CUDA_VISIBLE_DEVICES=")
    names = options.names or list(launches())
    if unknown := set(names) - launches().keys():
        sys.exit(f"nothing is called {sorted(unknown)}; there are {list(launches())}")
    if options.here:
        compile_here(names)
        return
    import triton

    # Compile in a few processes, then pack what they left.
    print(f"For sm_90, triton {triton.__version__}, Python {platform.python_version()}; others cannot use this cache")
    os.environ |= {"TRITON_CACHE_DIR": str(options.cache), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [sys.executable, "-m", "tests.gpu.archives", "--here"]
    parts = [names[part :: options.jobs] for part in range(min(options.jobs, len(names)))]
    jobs = [Job(f"part-{number}", [*command, *part], seconds=3600) for number, part in enumerate(parts)]
    outcomes = list(processes.run(jobs, options.cache, options.jobs))
    for outcome in outcomes:
        print(f"{outcome.status:9} {outcome.seconds:6.1f} s  {outcome.job.name}: {outcome.tail}")
    if {outcome.status for outcome in outcomes} != {PASSED}:
        sys.exit(1)
    pack(options.cache, options.out / "gpu-cache.tar.xz", "w:xz", BESIDE)
    if options.fbgemm:
        slim = [sys.executable, "tests/gpu/slim_fbgemm.py", options.fbgemm, str(options.out / "fbgemm.tar.xz")]
        subprocess.run(slim, check=True)

    # What is to be carried, and the commit, which a copied tree does not know.
    (options.out / COMMIT).write_text(commit())
    sizes = {path.name: path.stat().st_size for path in sorted(options.out.glob("*.tar.xz"))} | {"tree": tree_bytes()}
    total = sum(sizes.values())
    print(", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in sizes.items()), f"= {total / MIB:.1f} MiB")
    if total > options.max_mib * MIB:
        sys.exit(f"more than --max-mib {options.max_mib:g}: leave an archive out of {options.out}, or carry less")


if __name__ == "__main__":
    main()
