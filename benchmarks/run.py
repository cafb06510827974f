"""Run all benchmarks, keep the figures, rewrite picture and tables of README and docs: `python benchmarks/run.py`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # called as a file, Python puts only this folder on the path

from benchmarks.measuring import report, result_files  # noqa: E402
from benchmarks.measuring.environment import environment  # noqa: E402
from benchmarks.measuring.result_files import lines, target_lines  # noqa: E402

QUIET_PERCENT = 5.0
KEPT = "dynamic", "servers", "offload", "modules"  # selections with a file of results of their own
# glibc keeps freed memory, for every contender alike: otherwise an output that the system takes back and must map and
# clear again costs, now and then, ten times the operation itself.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


def run_pytest(rounds: int, select: str) -> list[dict[str, Any]]:
    """What pytest-benchmark reports; exits with pytest's code where a benchmark fails.

    Each file is a process of its own, so that none finds the memory that another one has kept.
    """
    found: list[dict[str, Any]] = []
    for file in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "benchmark.json"
            command = [sys.executable, "-m", "pytest", "-c", "benchmarks/pytest.ini", str(file), f"--rounds={rounds}"]
            done = subprocess.run(
                [*command, f"--benchmark-json={raw}", "-k", select], cwd=ROOT, env=os.environ | KEEP_MEMORY
            )
            if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
                continue
            if done.returncode:
                sys.exit(done.returncode)
            found += result_files.read(raw)["benchmarks"]
    if not found:
        sys.exit(f"no benchmark matches {select!r}")
    return found


def condense(benchmarks: list[dict[str, Any]], shared: dict[str, Any]) -> dict[str, Any]:
    """One table of long-format rows, each complete by itself, and one of targets, beside where they were measured."""
    extras = [benchmark["extra_info"] for benchmark in benchmarks]
    rows = [row | shared for extra in extras for row in extra.get("rows", [])]
    targets = [target for extra in extras for target in extra.get("targets", [])]
    return {"date": shared["date"], "environment": shared, "rows": rows, "targets": targets}


def memory_rows(benchmarks: list[dict[str, Any]], shared: dict[str, Any]) -> dict[str, Any]:
    """Of `bench_memory.py`, for a file of their own."""
    rows = [row | shared for benchmark in benchmarks for row in benchmark["extra_info"].get("memory", [])]
    return {"date": shared["date"], "rows": rows}


def print_targets(results: dict[str, Any]) -> None:
    print(*target_lines(results["targets"]), sep="\n")
    loads = [row["other_load_percent"] for row in results["rows"] if row["other_load_percent"] is not None]
    if loads and max(loads) > QUIET_PERCENT:
        print(
            f"Other processes took up to {max(loads):.0f} % of the processor meanwhile: repeat this on an idle machine "
            "before trusting it."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of every benchmark")
    parser.add_argument(
        "-k", dest="select", default="", help=f"run only what matches; kept are memory, {', '.join(KEPT)}"
    )
    arguments = parser.parse_args()
    shared = environment()  # before the run: afterwards the results themselves are a change to the checkout
    benchmarks = run_pytest(arguments.rounds, arguments.select)
    results, memory = condense(benchmarks, shared), memory_rows(benchmarks, shared)
    print(*lines(results["rows"]), sep="\n")
    print_targets(results)
    if arguments.select in ("", *KEPT):
        print(f"wrote {result_files.write(arguments.select or 'cpu', results).relative_to(ROOT)}")
    if memory["rows"] and arguments.select in ("", "memory"):
        print(f"wrote {result_files.write('memory', memory).relative_to(ROOT)}")
        report.report("memory")
    if not arguments.select:
        report.main()


if __name__ == "__main__":
    main()
