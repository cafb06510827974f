"""The core kernels under `compute-sanitizer`: `python -m tests.gpu.sanitize [parts of names]`, or `make gpu-sanitize`.

Each tool runs each kind of case in a process of its own. The verdict is "clean" (exit status 0), "found errors", "not
permitted here" where the machine does not let the tool watch the device, or "not finished". Torch's caching allocator
is off, so that each tensor is an allocation of its own and a stray access is noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
from collections import deque
from pathlib import Path

import torch

import tritonemb as te
from tests.gpu import processes
from tests.gpu.problems import hash_kernels
from tests.gpu.processes import PASSED, Job, Outcome
from tests.kernels.ahead_of_time_cases import CASES, on

VERDICTS = CLEAN, UNFINISHED, FORBIDDEN, FOUND = "clean", "not finished", "not permitted here", "found errors"
FOUND_STATUS, ALL_RAN = 9, "all of which ran"
USUAL = "/usr/local/cuda/bin/compute-sanitizer"
# What it prints where a container, a virtual machine or the driver keeps the device's debug interface from it.
REFUSALS = re.compile(
    r"not permitted|ERR_NVGPUCTRPERM|insufficient permissions|Unable to find injection|Device not supported|"
    r"not supported on this|debugger interface|Failed to initialize",
    re.IGNORECASE,
)


def names_like(parts: list[str]) -> list[str]:
    found = [case.name for case in CASES if case.core and any(part in case.name for part in parts or [""])]
    if not found:
        sys.exit(f"no case has {' or '.join(map(repr, parts))} in its name")
    return found


def launch(names: list[str]) -> None:
    """Run these cases, once each."""
    if not torch.cuda.is_available():
        sys.exit("sanitize needs a CUDA device, and a torch that sees it")
    hash_kernels()
    with on("cuda"):
        for case in [case for case in CASES if case.name in names]:
            case.call()
            torch.cuda.synchronize()
            print(f"ran {case.name}", flush=True)
    te.check_errors()
    print(f"{len(names)} cases, {ALL_RAN}")


def verdict(outcome: Outcome) -> tuple[str, str]:
    """What the tool says of one process, and the line that says why."""
    lines = [line.lstrip("= ") for line in outcome.log.splitlines() if line.startswith("=====")]
    for line in lines:
        if REFUSALS.search(line) and not line.startswith("Program hit"):  # an error of the program
            return FORBIDDEN, line
    for line in lines:
        if re.search(r"SUMMARY: [1-9]", line):
            return FOUND, line
    if outcome.status == PASSED and ALL_RAN in outcome.log:  # it may end well without having run the program
        return CLEAN, ""
    return UNFINISHED, f"{outcome.status}: {(outcome.log.splitlines() or [''])[-1]}"


def kind_of(name: str) -> str:
    return name.split("-")[0]


def sanitized(tool: str, kind: str, names: list[str], options: argparse.Namespace) -> Job:
    command = [options.sanitizer, "--tool", tool, "--target-processes", "application-only"]
    command += ["--error-exitcode", str(FOUND_STATUS)]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # torch asks for what may fail; what matters it raises
    command += [sys.executable, "-m", "tests.gpu.sanitize", "--here", *names]
    return Job(f"{tool}-{kind}", command, variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of cases' names; all core cases by default")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-sanitize"))
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or USUAL, help="where it is")
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540, help="for all of it")
    parser.add_argument("--here", action="store_true", help="run the cases in this process, without compute-sanitizer")
    options = parser.parse_args()
    names = names_like(options.names)
    if options.here:
        launch(names)
        return
    if not shutil.which(options.sanitizer):
        sys.exit(
            f"compute-sanitizer is not {options.sanitizer}, nor on the PATH: name it with --sanitizer, or SANITIZER="
        )
    kinds = {kind: [name for name in names if kind_of(name) == kind] for kind in map(kind_of, names)}
    jobs = deque(sanitized(tool, kind, cases, options) for tool in options.tools for kind, cases in kinds.items())
    found: dict[str, dict[str, str]] = {}
    with contextlib.closing(processes.run(jobs, options.out, options.jobs, options.seconds)) as ended:
        for outcome in ended:
            what, why = verdict(outcome)
            found[outcome.job.name] = {"verdict": what, "why": why, "log": outcome.log[-2000:] if why else ""}
            processes.write(options.out / "results.json", found)
            print(f"{outcome.seconds:6.1f} s  {outcome.job.name:32} {what}{why and f': {why}'}", flush=True)
            if what == FORBIDDEN:
                jobs.clear()
    worst = max((result["verdict"] for result in found.values()), key=VERDICTS.index)
    print(f"compute-sanitizer: {worst} ({options.out}/results.json)")
    sys.exit(VERDICTS.index(worst))


if __name__ == "__main__":
    main()
