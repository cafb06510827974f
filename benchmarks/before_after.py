"""Is any benchmark slower than in another checkout? `python benchmarks/before_after.py ../before [-k step --rounds 60]`

Both trees run the same benchmarks at the same time, each with its own package, and take turns: a round of one, with all
its contenders, while the other waits, then the other way round. So a slow spell of the machine meets both. A ratio
above 1.05 is slower than before. What stays the same, such as a peer beside ours, is compared too: its ratio says how
much chance there is in the others. Both trees' tables are in memory at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SLOWER = 1.05
PIPES = "TRITONEMB_TURNS"  # in the environment of either pytest: who begins, where to read and to write turns

Case = tuple[str, str, str]  # op, shape, implementation


def pytest_configure() -> None:
    """This file is also a plugin of either tree's pytest."""
    from benchmarks.measuring import clock

    measure = clock.measure
    clock.measure = lambda benchmark, *args, **options: measure(_InTurns(benchmark), *args, **options)


class _InTurns:
    """pytest-benchmark's fixture, whose rounds wait for their turn."""

    def __init__(self, benchmark: Any) -> None:
        self._benchmark = benchmark
        self._begins, self._read, self._write = map(int, os.environ[PIPES].split())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._benchmark, name)

    def pedantic(self, target: Callable[..., object], setup: Callable[[], Any], **options: Any) -> Any:
        def prepare() -> Any:
            if not self._begins:
                self._wait()
            return setup()

        def run(*args: Any) -> None:
            target(*args)
            self._give()
            if self._begins:
                self._wait()

        self._give()
        self._wait()  # until both are here
        return self._benchmark.pedantic(run, setup=prepare, **options)

    def _give(self) -> None:
        os.write(self._write, b".")

    def _wait(self) -> None:
        if not os.read(self._read, 1):
            raise RuntimeError("the other tree's benchmarks have ended")


def start(tree: Path, options: list[str], **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-c", "benchmarks/pytest.ini", *options]
    return subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how)


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{tree}:{HERE}", "OMP_WAIT_POLICY": "passive"}


def selected(tree: Path, select: str) -> list[str]:
    """The names of a tree's benchmarks."""
    printed, _ = start(tree, ["--collect-only", "-k", select, "benchmarks"], env=environment(tree)).communicate()
    return [f"benchmarks/{line.removeprefix('benchmarks/')}" for line in printed.splitlines() if "::" in line]


def timed(trees: tuple[Path, Path], select: str, rounds: int) -> list[dict[Case, float]]:
    """Of each tree, milliseconds of each case, a fifth of whose rounds were quicker."""
    names = [selected(tree, select) for tree in trees]
    both = [name for name in names[1] if name in names[0]]
    if not both:
        sys.exit(f"no benchmark of both trees matches {select!r}")
    (read, their_write), (their_read, write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        running, reports = [], [Path(folder) / name for name in ("before.json", "now.json")]
        for tree, report, *pipes in zip(trees, reports, (read, their_read), (write, their_write), strict=True):
            options = ["-x", "-p", "before_after", f"--rounds={rounds}", f"--benchmark-json={report}", *both]
            turns = {PIPES: f"{len(running)} {pipes[0]} {pipes[1]}"}
            running.append(start(tree, options, pass_fds=pipes, env=environment(tree) | turns))
        for pipe in (read, their_write, their_read, write):
            os.close(pipe)
        printed = [process.communicate()[0] for process in running]
        if not all(report.exists() for report in reports):
            sys.exit("\n".join(printed))
        found = [json.loads(report.read_text())["benchmarks"] for report in reports]
    return [
        {
            (row["op"], row["shape"], row["implementation"]): row["p20_ms"]
            for benchmark in benchmarks
            for row in benchmark["extra_info"].get("rows", [])
        }
        for benchmarks in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("-k", dest="select", default="", help="run only what matches")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of a benchmark")
    arguments = parser.parse_args()
    before, now = timed((arguments.before.resolve(), HERE.parent), arguments.select, arguments.rounds)
    slower = 0
    for case in sorted(before.keys() & now.keys()):
        ratio = now[case] / before[case]
        slower += ratio > SLOWER
        verdict = " slower" if ratio > SLOWER else ""
        print(f"{ratio:5.2f}{verdict:7}  {', '.join(case)}: {before[case]:.3f} {now[case]:.3f} ms")
    for case in sorted(before.keys() ^ now.keys()):
        print(f"only {'before' if case in before else 'now'}: {', '.join(case)}")
    print(f"{slower} of {len(before.keys() & now.keys())} slower than {SLOWER} times before")
    sys.exit(slower > 0)


if __name__ == "__main__":
    main()
