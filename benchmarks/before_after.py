"""Comparison of benchmarks with another checkout: `python benchmarks/before_after.py ../before [-k step --rounds 60]`

Both trees run the same benchmarks at the same time, with their packages, and take turns: a round of one tree, with all
contenders, while the other tree waits. So a slow phase of the machine meets both. A ratio above 1.05 is slower than
before. Unchanged code, such as a peer, is compared as well: its ratio shows the noise. The tables of both trees are in
memory at the same time.
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
PIPES = "TRITONEMB_TURNS"  # environment variable of both pytests: whether it begins; the pipes to read and to write

Case = tuple[str, str, str]  # op, shape, implementation


_places: dict[str, int] = {}  # of benchmarks of both trees, by name


def pytest_collection_finish(session: Any) -> None:
    _places.update((item.name, place) for place, item in enumerate(session.items))


def pytest_configure() -> None:
    """Make rounds wait for their turn: this file is also a plugin of both trees' pytest."""
    from pytest_benchmark.fixture import BenchmarkFixture

    begins, read, write = map(int, os.environ[PIPES].split())
    pedantic, reader, coming = BenchmarkFixture.pedantic, os.fdopen(read), list[str]()

    def give(text: str = "") -> None:
        os.write(write, f"{text}\n".encode())

    def wait() -> None:
        if not reader.readline():
            raise RuntimeError("the other tree's benchmarks have ended")

    def meets(name: str) -> bool:
        """Return whether the other tree times the rounds of this benchmark in turns as well."""
        give(name)
        while line := coming.pop() if coming else reader.readline():
            other = line.rstrip("\n")
            if _places.get(other, -1) >= _places[name]:
                coming.extend([line] * (other != name))
                return other == name
        return False

    def in_turns(self: Any, target: Callable[..., object], *args: Any, setup: Any = None, **options: Any) -> Any:
        if setup is None or not meets(self.name):
            return pedantic(self, target, *args, setup=setup, **options)

        def prepare() -> Any:
            if not begins:
                wait()
            return setup()

        def run(*args: Any) -> None:
            target(*args)
            give()
            if begins:
                wait()

        return pedantic(self, run, *args, setup=prepare, **options)

    BenchmarkFixture.pedantic = in_turns


def start(tree: Path, options: list[str], variables: dict[str, str], **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-c", "benchmarks/pytest.ini", *options]
    environment = os.environ | {"PYTHONPATH": f"{tree}:{HERE}", "OMP_WAIT_POLICY": "passive"} | variables
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=tree, env=environment, **streams, **how)


def selected(tree: Path, select: str) -> dict[str, str]:
    """Return the benchmarks of a tree by name, in any file."""
    printed, _ = start(tree, ["--collect-only", "-k", select, "benchmarks"], {}).communicate()
    names = [f"benchmarks/{line.removeprefix('benchmarks/')}" for line in printed.splitlines() if "::" in line]
    return {name.partition("::")[2]: name for name in names}


def timed(trees: tuple[Path, Path], select: str, rounds: int) -> list[dict[Case, float]]:
    """Return the 20th percentile of the milliseconds of each case, per tree."""
    old, now = (selected(tree, select) for tree in trees)
    both = [name for name in now if name in old]
    if not both:
        sys.exit(f"no benchmark of both trees matches {select!r}")
    (read, their_write), (their_read, write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        running, reports = [], [Path(folder) / name for name in ("before.json", "now.json")]
        for number, pipes in enumerate(((read, write), (their_read, their_write))):
            options = ["-x", "-p", "before_after", f"--rounds={rounds}", f"--benchmark-json={reports[number]}"]
            options += [(old, now)[number][name] for name in both]
            turns = {PIPES: f"{number} {pipes[0]} {pipes[1]}"}
            running.append(start(trees[number], options, turns, pass_fds=pipes))
        for pipe in (read, their_write, their_read, write):
            os.close(pipe)
        printed = [process.communicate()[0] for process in running]
        if not all(report.exists() for report in reports):
            sys.exit("\n".join(printed))
        reports_of_trees = [json.loads(report.read_text())["benchmarks"] for report in reports]
    rows = [
        [row for benchmark in of_tree for row in benchmark["extra_info"].get("rows", [])]
        for of_tree in reports_of_trees
    ]
    return [{(row["op"], row["shape"], row["implementation"]): row["p20_ms"] for row in of_tree} for of_tree in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("-k", dest="select", default="", help="run only what matches")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of a benchmark")
    arguments = parser.parse_args()
    old, now = timed((arguments.before.resolve(), HERE.parent), arguments.select, arguments.rounds)
    slower = 0
    for case in sorted(old.keys() & now.keys()):
        ratio = now[case] / old[case]
        slower += ratio > SLOWER
        verdict = " slower" if ratio > SLOWER else ""
        print(f"{ratio:5.2f}{verdict:7}  {', '.join(case)}: {old[case]:.3f} {now[case]:.3f} ms")
    for case in sorted(old.keys() ^ now.keys()):
        print(f"only {'before' if case in old else 'now'}: {', '.join(case)}")
    print(f"{slower} of {len(old.keys() & now.keys())} slower than {SLOWER} times before")
    sys.exit(slower > 0)


if __name__ == "__main__":
    main()
