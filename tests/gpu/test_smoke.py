"""The smoke's checks and the cache of kernels, rehearsed without a GPU, and the verdicts of compute-sanitizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import sanitize, smoke
from tests.gpu.processes import CRASHED, PASSED, Job, Outcome
from tests.kernels.ahead_of_time_cases import CASES

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]


def run_cache(*arguments: str, cwd: Path, **variables: str) -> str:
    """What `cache` prints in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.cache", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.triton
@pytest.mark.parametrize(
    "name",
    [pytest.param(c.name, marks=() if c.name in smoke.CORE else pytest.mark.slow) for c in CASES if c.core],
)
def test_core_cases_are_the_references(name, device):
    assert "tensors" in smoke.compare(smoke.case_check(name), device)


@pytest.mark.triton
@pytest.mark.parametrize("name", ["steps-row_wise_adagrad", pytest.param("steps-adam", marks=pytest.mark.slow)])
def test_training_steps_have_the_references_bits(name, device):
    assert "equal" in smoke.compare(smoke.CHECKS[name], device)


def test_results_that_differ_are_noticed():
    def check(change: float, exact: bool) -> smoke.Check:
        return smoke.Check(
            lambda _: [torch.tensor([1000.0, 1.0]) + change], lambda _: [torch.tensor([1000.0, 1.0])], exact
        )

    cpu = torch.device("cpu")
    assert smoke.compare(check(0.0, exact=True), cpu) == "1 tensors equal"
    assert smoke.compare(check(1e-4, exact=False), cpu) == "1 tensors close"
    for wrong in (check(1e-4, exact=True), check(1e-2, exact=False), check(float("nan"), exact=False)):
        with pytest.raises(AssertionError):
            smoke.compare(wrong, cpu)


@pytest.mark.timeout(900)
def test_a_smoke_prints_and_keeps_every_check(tmp_path, monkeypatch, capsys):
    def end_of(*names: str) -> str | int:
        arguments = ["--device", "cpu", "--jobs", "2", "--out", str(tmp_path), *names]
        monkeypatch.setattr(sys, "argv", ["smoke", *arguments])
        with pytest.raises(SystemExit) as ended:
            smoke.main()
        return ended.value.code

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(smoke, "interpreting", lambda: True)
    monkeypatch.setattr(smoke, "SECONDS", 3600.0)
    names = ["device", "group-int64", "timing"]
    assert end_of(*names) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [PASSED] * 3 + ["3"]
    assert "4 tensors equal" in lines[1]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(result["job"]["name"], result["status"]) for result in results] == [(name, PASSED) for name in names]
    assert "no checks are called ['nothing']" in end_of("nothing")


@pytest.mark.timeout(900)
def test_a_cache_serves_processes_elsewhere_in_any_order(tmp_path):
    """Triton's keys would depend on the order, were it not for `hash_kernels`."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    names = ["group-int64", "forward-dim128"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": "build/cache"}
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    first, *parts = run_cache("--out", "build/cache", *names, cwd=here, **variables).splitlines()
    here.rename(there)
    assert first.startswith("For sm_90, triton ")
    assert sum(int(part.split("compiled: ")[1].split(",")[0]) for part in parts) == 4
    for order in (names, names[::-1]):
        assert run_cache("--here", *order, cwd=there, **variables) == "kernels compiled: 0, from the cache: 4\n"


BANNER = "========= COMPUTE-SANITIZER\n"
RAN = f"ran group-int64\n1 cases, {sanitize.ALL_RAN}\n"


@pytest.mark.parametrize(
    ("verdict", "status", "log"),
    [
        ("clean", PASSED, f"{BANNER}{RAN}========= ERROR SUMMARY: 0 errors"),
        ("clean", PASSED, f"{BANNER}{RAN}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
        ("not finished", PASSED, f"{BANNER}========= ERROR SUMMARY: 0 errors"),
        ("not finished", CRASHED, f"{BANNER}========= ERROR SUMMARY: 0 errors"),
        ("found errors", PASSED, f"{BANNER}{RAN}========= ERROR SUMMARY: 2 errors"),
        ("found errors", CRASHED, f"{BANNER}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"),
        (
            "found errors",
            CRASHED,
            f"{BANNER}========= Program hit x due to not permitted\n========= ERROR SUMMARY: 1 error",
        ),
        ("not permitted here", CRASHED, f"{BANNER}========= Error: Device not supported. Please refer to the manual"),
    ],
)
def test_a_verdict_is_read_from_the_log(verdict, status, log):
    found, why = sanitize.verdict(Outcome(Job("memcheck-group", []), status, 1.0, log))
    assert found == verdict
    assert (why == "") == (verdict == "clean")
