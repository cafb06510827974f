"""Two trees' benchmarks take turns, round by round, whatever imports the clock first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
# As benchmarks/conftest.py, which is imported before any plugin is configured.
CONFTEST = """
import os, pytest
from benchmarks.measuring.clock import measure

@pytest.fixture
def measure_case(benchmark):
    def measured(name):
        def setup():
            open(os.environ["LOG"], "a").write(name)
            return (), {}
        measure(benchmark, setup)
        row = {"op": "any" if name.isupper() else name, "shape": "x", "implementation": "i"}
        benchmark.extra_info["rows"] = [row | {"p20_ms": 1.0 + (name == "B")}]
    return measured

def pytest_addoption(parser):
    parser.addoption("--rounds", type=int)
"""
CLOCK = "def measure(benchmark, setup):\n    benchmark.pedantic(lambda: None, setup=setup, rounds=4)\n"
BENCH = """
def bench_alone(benchmark, measure_case):
    measure_case("a") if {name!r} == "A" else benchmark.pedantic(lambda: None)

def bench_some(measure_case):
    measure_case({name!r})

def bench_last(benchmark, measure_case):
    measure_case("b") if {name!r} == "B" else benchmark.pedantic(lambda: None)
"""


def test_trees_take_turns_and_are_compared_by_the_names_of_benchmarks(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    for tree, name, file in (("before", "A", "bench_old.py"), ("now", "B", "bench_new.py")):
        folder = tmp_path / tree / "benchmarks"
        (folder / "measuring").mkdir(parents=True)
        for copied in ("pytest.ini", "before_after.py"):
            shutil.copy(ROOT / "benchmarks" / copied, folder)
        (folder / "conftest.py").write_text(CONFTEST)
        for package in (folder, folder / "measuring"):
            (package / "__init__.py").touch()
        (folder / "measuring" / "clock.py").write_text(CLOCK)
        (folder / file).write_text(BENCH.format(name=name))
    command = [sys.executable, str(tmp_path / "now/benchmarks/before_after.py"), str(tmp_path / "before")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    variables = inherited | {"LOG": str(tmp_path / "log")}  # pytest-benchmark times no rounds in a worker of xdist
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    log = (tmp_path / "log").read_text()
    assert log.replace("a", "").replace("b", "") in ("ABABABAB", "BABABABA"), done.stdout
    assert (log.count("a"), log.count("b")) == (4, 4)  # what one of them alone times in rounds
    assert " 2.00 slower  any, x, i: 1.000 2.000 ms" in done.stdout
    assert done.returncode == 1
