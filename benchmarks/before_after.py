"""Is any benchmark slower than in another checkout? `python benchmarks/before_after.py ../before [-k step --turns 3]`

Runs the benchmarks of both trees in turns, each with its own package, and compares the quickest turn of every case:
other work on the machine makes a turn slower, never faster. A ratio above 1.05 is slower than before. What stays the
same, such as a peer beside ours, is compared too: its ratio says how much the machine varied.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLOWER = 1.05

Case = tuple[str, str, str]  # op, shape, implementation


def timed(tree: Path, select: str, rounds: int) -> dict[Case, float]:
    """Milliseconds of each case, a fifth of whose rounds were quicker."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pytest", "-q", "-c", "benchmarks/pytest.ini", "benchmarks"]
        options = [f"--rounds={rounds}", f"--benchmark-json={report}", "-k", select]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run([*command, *options], cwd=tree, env=environment, capture_output=True, text=True)
        if not report.exists():
            sys.exit(f"{tree}: no benchmark ran\n{done.stdout}{done.stderr}")
        benchmarks = json.loads(report.read_text())["benchmarks"]
    rows = [row for benchmark in benchmarks for row in benchmark["extra_info"].get("rows", [])]
    return {(row["op"], row["shape"], row["implementation"]): row["p20_ms"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("-k", dest="select", default="", help="run only what matches")
    parser.add_argument("--turns", type=int, default=3, help="runs of each tree")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of a benchmark in one run")
    arguments = parser.parse_args()
    trees = (arguments.before.resolve(), ROOT)
    quickest: dict[Path, dict[Case, float]] = {tree: {} for tree in trees}
    for turn in range(arguments.turns):
        for tree in trees if turn % 2 == 0 else trees[::-1]:
            for case, milliseconds in timed(tree, arguments.select, arguments.rounds).items():
                quickest[tree][case] = min(milliseconds, quickest[tree].get(case, milliseconds))
    before, now = (quickest[tree] for tree in trees)
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
