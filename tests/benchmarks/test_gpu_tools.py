"""The tools that look at kernels without a GPU: machine code, and what launches cost the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import launch_cost
from benchmarks.gpu.loads_in_flight import find_disassembler, loads_in_flight

ROOT = Path(__file__).parents[2]
ONE_BY_ONE = """
        /*0010*/                   LDG.E.128 R4, [R2.64] ;
        /*0020*/                   FADD R9, R4, R5 ;
        /*0030*/                   LDG.E.128.CONSTANT R4, [R2.64+0x10] ;
        /*0040*/                   FADD R9, R9, R7 ;
"""
TOGETHER = """
        /*0010*/                   LDG.E.128 R4, [R2.64] ;
        /*0020*/                   LDG.E.128 R8, [R2.64+0x10] ;
        /*0030*/                   LDG.E R20, [R2.64+0x20] ;
        /*0040*/                   LDG.E.128 R12, [R2.64+0x30] ;
        /*0050*/                   FADD R16, R7, R8 ;
        /*0060*/                   LDG.E.128 R24, [R12.64] ;
"""


def run(tool: str, *args: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = ROOT / "benchmarks" / "gpu" / f"{tool}.py"
    done = subprocess.run([sys.executable, str(path), *args], env=env, capture_output=True, text=True, check=True)
    return done.stdout


def test_loads_in_flight_of_code_read_by_hand() -> None:
    assert loads_in_flight("") == 0
    assert loads_in_flight(ONE_BY_ONE) == 1
    assert loads_in_flight(TOGETHER) == 3


@pytest.mark.more
def test_loads_in_flight_of_a_compiled_kernel(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    if find_disassembler() is None:
        pytest.skip("there is no nvdisasm")
    kernel, _, most = run("loads_in_flight", "forward-dim64").strip().rpartition(": ")
    assert kernel == "forward-dim64, sm_90, _pool_kernel"
    assert int(most) >= 1
    (tmp_path / "kernel.sass").write_text(TOGETHER)
    assert run("loads_in_flight", str(tmp_path / "kernel.sass")).endswith("kernel.sass: 3\n")


@pytest.mark.more
def test_launches_of_a_step_are_counted() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    lines = run("launch_cost", "--tables", "2", "--rounds", "3").splitlines()
    assert (lines[0] == launch_cost.NO_GPU) == (not torch.cuda.is_available())
    assert any(line.startswith("2 tables: ") for line in lines)
    (forward,) = (line.split() for line in lines if "_pool_kernel" in line)
    assert forward[1] == "1.0"
    assert lines[-1] == "  8.0 launches and torch.sort's; values that the host reads: 0"
