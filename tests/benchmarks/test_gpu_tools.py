"""The tools that look at kernels without a GPU: machine code, and what launches cost the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import launch_cost
from benchmarks.gpu.predict import resident_warps

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
STEP = "8.0 launches and torch.sort's; values that the host reads: 0, sends: 0"


def run(tool: str, *args: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = ROOT / "benchmarks" / "gpu" / f"{tool}.py"
    done = subprocess.run([sys.executable, str(path), *args], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_workloads_time_is_predicted() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    tables, others = run("predict", "-k", "L20 D128 float32 zipf,moves from host").split("\n\n")
    head, rule, *lines = tables.splitlines()
    assert head.count("|") == rule.count("|")
    assert [line.split(" | ")[1] for line in lines] == ["forward", "grouping", "update"]
    for line in lines:
        must, moves = (float(part.replace(",", "")) for part in line.split(" | ")[2:4])
        assert 0 < must <= moves
    *_, line = others.splitlines()
    assert line.startswith("| row moves from host memory, rows 16,384 D256 | 33.9 | move_kernel ")
    assert line.count("|") == others.splitlines()[1].count("|")
    assert resident_warps(SimpleNamespace(num_warps=1, registers=122, shared=0)) == 16
    assert resident_warps(SimpleNamespace(num_warps=4, registers=32, shared=0)) == 64
    assert resident_warps(SimpleNamespace(num_warps=8, registers=32, shared=114 << 10)) == 8


def test_launches_of_a_step_are_counted() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    lines = run("launch_cost", "--tables", "2", "--rounds", "3").splitlines()
    assert (lines[0] == launch_cost.NO_GPU) == (not torch.cuda.is_available())
    (forward,) = (line.split() for line in lines if "_pool_kernel" in line)
    assert forward[1] == "1.0"
    assert re.fullmatch(r"2 tables: \d+ us per step on the host, least \d+; " + re.escape(STEP), lines[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted by a driver without a GPU")
def test_a_graph_launches_less_than_the_model_itself() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    lines = run("launch_cost", "--ranks", "2").splitlines()
    eager, compiled = (line.split(": ", 1) for line in lines if "compiled: " in line)
    assert (eager[0], compiled[0]) == ("not compiled", "compiled")
    assert int(compiled[1].split()[0]) < 0.8 * int(eager[1].split()[0])  # 49 and 68
    for kernel in ("_pool_kernel': 1,", "_pack_kernel': 2,", "_unpack_kernel': 2,", "_update_kernel': 1,"):
        assert kernel in eager[1]
        assert kernel in compiled[1]
