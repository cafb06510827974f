"""Compile the core kernels for an H100 or H200 without a GPU: `python -m tests.gpu.cache`, or `make gpu-cache`.

Every core launch goes through Triton's own path into a driver that does nothing, so `--out` is Triton's cache of what
`gpu-smoke`, `gpu-sanitize` and the core cases of `gpu` launch. Carry the folder to the same place of the repository on
the GPU machine: Triton keeps its paths in it, which are relative to where it runs. Its keys have hashes of Triton's
files, so it serves only the same wheel: that version of Triton, and of Python. Checks print what came from it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.launch_cost import _NoDevice as NoDevice
from tests.gpu import processes
from tests.gpu.problems import counted_compilations
from tests.gpu.processes import Job
from tests.gpu.smoke import CHECKS, GRAPH, SHAPES, run_shape
from tests.kernels.ahead_of_time_cases import CASES
from tritonemb.kernels.triton_utils import interpreting
from tritonemb.ops.registry import TRITON, forced

SECONDS = 3600


def launches() -> dict[str, Callable[[], object]]:
    """What launches the core kernels, by name."""
    cpu = torch.device("cpu")

    def step(number: int) -> None:
        with forced(TRITON):
            for call in run_shape(SHAPES[number], cpu)[:2]:
                call()

    cases = {case.name: case.call for case in CASES if case.core}
    checks = {name: lambda check=check: check.found(cpu) for name, check in CHECKS.items() if name != GRAPH}
    return cases | checks | {f"timing-{number}": lambda number=number: step(number) for number in range(len(SHAPES))}


def compile_here(names: list[str]) -> None:
    from triton.runtime import driver

    driver.set_active(NoDevice())
    with counted_compilations() as counts:
        for name in names:
            launches()[name]()
    print(f"kernels compiled: {counts[False]}, from the cache: {counts[True]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of cases and of smoke's checks; all of them by default")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-cache"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="compile in this process")
    options = parser.parse_args()
    if interpreting() or torch.cuda.is_available():
        sys.exit("gpu-cache compiles for a GPU that is not there: unset TRITON_INTERPRET, set CUDA_VISIBLE_DEVICES=")
    names = options.names or list(launches())
    if unknown := set(names) - launches().keys():
        sys.exit(f"nothing is called {sorted(unknown)}; there are {list(launches())}")
    if options.here:
        compile_here(names)
        return
    import triton

    print(
        f"For sm_90, triton {triton.__version__} and Python {platform.python_version()}; others cannot use this cache"
    )
    os.environ |= {"TRITON_CACHE_DIR": str(options.out), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [sys.executable, "-m", "tests.gpu.cache", "--here"]
    parts = [names[part :: options.jobs] for part in range(min(options.jobs, len(names)))]
    jobs = deque(Job(f"part-{number}", [*command, *part], SECONDS) for number, part in enumerate(parts))
    with contextlib.closing(processes.run(jobs, options.out, options.jobs)) as ended:
        outcomes = list(ended)
    for outcome in outcomes:
        print(outcome.line if outcome.status == processes.PASSED else f"{outcome.line}\n{outcome.tail}")
    sys.exit({outcome.status for outcome in outcomes} != {processes.PASSED})


if __name__ == "__main__":
    main()
