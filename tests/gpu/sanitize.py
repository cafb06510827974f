"""The launches of `test_smoke.py` under `compute-sanitizer`: `python -m tests.gpu.sanitize`, or `make gpu-sanitize`.

Each tool's verdict is "clean" (exit status 0), "found errors", "not permitted here" where the machine does not let the
tool watch the device, or "not finished". Torch's caching allocator is off, so that each tensor is an allocation and a
stray access is noticed. Other arguments are pytest's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

from benchmarks.measuring import result_files
from tests.gpu.processes import PASSED, Outcome
from tests.gpu.suite import Suite

VERDICTS = CLEAN, UNFINISHED, FORBIDDEN, FOUND = "clean", "not finished", "not permitted here", "found errors"
FILE = Path("tests/gpu/test_smoke.py")
USUAL = "/usr/local/cuda/bin/compute-sanitizer"
# What it prints where a container, a virtual machine or the driver keeps the device's debug interface from it.
REFUSALS = re.compile(
    r"not permitted|ERR_NVGPUCTRPERM|insufficient permissions|Unable to find injection|Device not supported|"
    r"not supported on this|debugger interface|Failed to initialize",
    re.IGNORECASE,
)


def verdict(outcome: Outcome) -> tuple[str, str]:
    """What the tool says of one process, and the line that says why."""
    lines = [line.lstrip("= ") for line in outcome.log.splitlines() if line.startswith("=====")]
    for line in lines:
        if REFUSALS.search(line) and not line.startswith("Program hit"):  # an error of the program
            return FORBIDDEN, line
    for line in lines:
        if re.search(r"SUMMARY: [1-9]", line):
            return FOUND, line
    if outcome.status == PASSED and re.search(r"\d+ passed", outcome.log):  # it may end well without a test
        return CLEAN, ""
    return UNFINISHED, f"{outcome.status}: {(outcome.log.splitlines() or [''])[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-sanitize"))
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer") or USUAL, help="where it is")
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--seconds", type=float, default=540, help="for all of it")
    options, arguments = parser.parse_known_args()
    if not shutil.which(options.sanitizer):
        sys.exit(f"there is no {options.sanitizer}: name compute-sanitizer with --sanitizer, or SANITIZER=")
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    verdicts: dict[str, tuple[str, str]] = {}
    for tool in options.tools:
        under = [options.sanitizer, "--tool", tool, "--target-processes", "application-only", "--error-exitcode", "9"]
        # Torch calls what may fail; what matters it raises.
        under += ["--report-api-errors", "no"] if tool == "memcheck" else []
        limits = {"jobs": 1, "seconds": options.seconds / len(options.tools), "test_seconds": 180, "left": False}
        chosen = argparse.Namespace(out=options.out / tool, examples="fewest", under=under, **limits)
        suite = Suite([FILE], chosen, ["-m", "triton", "-k", "launches or core", *arguments])
        suite.run()
        verdicts[tool] = max(map(verdict, suite.outcomes), key=lambda pair: VERDICTS.index(pair[0]))
        result_files.write_json(options.out / "results.json", verdicts)
        print(f"{tool}: {': '.join(filter(None, verdicts[tool]))}", flush=True)
        if verdicts[tool][0] == FORBIDDEN:
            break
    worst = max(VERDICTS.index(word) for word, _ in verdicts.values())
    print(f"compute-sanitizer: {VERDICTS[worst]} ({options.out}/results.json)")
    sys.exit(worst)


if __name__ == "__main__":
    main()
