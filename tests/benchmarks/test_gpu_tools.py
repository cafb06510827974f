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
from benchmarks.gpu.targets import TARGETS, predictions, resident_warps, wanted
from benchmarks.measuring.workload import WORKLOADS

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
    head, rule, *lines = run("targets", "-k", "L20 D128 float32 zipf").splitlines()
    assert head.count("|") == rule.count("|") == lines[0].count("|")
    assert [line.split(" | ")[1] for line in lines] == ["forward", "group + update"]
    assert resident_warps(SimpleNamespace(num_warps=1, registers=122, shared=0)) == 16
    assert resident_warps(SimpleNamespace(num_warps=4, registers=32, shared=0)) == 64
    assert resident_warps(SimpleNamespace(num_warps=8, registers=32, shared=114 << 10)) == 8


# Short bags and long ones, the shortest rows and batches, the most tables.
@pytest.mark.parametrize(
    "name", ["B512 T32 L20 D128 float32 zipf", "B2048 T26 L1 D64", "B4096 T26 L1 D64", "T1000", "T1 L26"]
)
def test_no_target_is_beyond_what_is_possible_at_best(name: str) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    (workload,) = (w for w in WORKLOADS if name in str(w))
    for prediction in predictions(workload):
        assert 0 < prediction.num_bytes / prediction.at_best < 4.8e12, "faster than the memory"
        assert wanted(prediction.op, workload) <= prediction.fbgemm / prediction.at_best, prediction.op


def test_every_workload_has_one_target_of_each_op() -> None:
    assert all(wanted(op, workload) > 0 for workload in WORKLOADS for op in ("forward", "group + update"))
    assert {t.shape for t in TARGETS if t.shape and not any(str(w).startswith(t.shape) for w in WORKLOADS)} == set()


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
    for kernel in ("_pool_kernel': 1,", "_transfer_kernel': 4,", "_update_kernel': 1,"):
        assert kernel in eager[1]
        assert kernel in compiled[1]
