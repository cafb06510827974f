"""What is looked at first on a GPU, and without one the cache of kernels, and the verdicts of compute-sanitizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from tests.gpu import checks, sanitize
from tests.gpu.checks import compare
from tests.gpu.driver import num_launches, rehearsing
from tests.gpu.processes import CRASHED, PASSED, Job, Outcome
from tests.helpers import INTERPRETED
from tests.kernels.ahead_of_time_cases import CASES

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
MINUTES = [pytest.mark.slow] if INTERPRETED else []


def run_archives(*arguments: str, cwd: Path, **variables: str) -> str:
    """What `archives` prints in a process of its own."""
    command = [sys.executable, "-m", "tests.gpu.archives", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.triton
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MINUTES if name.startswith("steps-") else ()) for name in checks.LAUNCHES]
)
def test_launches_have_the_references_results(name, device):
    if not rehearsing():
        compare(checks.LAUNCHES[name], device)
        return
    initial = num_launches()
    checks.LAUNCHES[name].results(device)
    assert num_launches() > initial


@pytest.mark.triton
@pytest.mark.slow
@pytest.mark.parametrize("name", [c.name for c in CASES if c.core and c.name not in checks.CORE])
def test_other_core_cases_have_the_references_results(name, device):
    compare(checks.case_check(name), device)


@pytest.mark.triton
@pytest.mark.parametrize("name", [pytest.param(name, marks=MINUTES) for name in checks.AHEAD])
def test_rows_prefetched_ahead_have_the_bits_of_the_cpu(name, device):
    """Rehearsed, by the CPU's kernels alone: what the host does next depends on results."""
    check = checks.AHEAD[name]
    compare(check._replace(results=check.expected) if rehearsing() else check, device)


@pytest.mark.gpu
def test_a_captured_step_has_the_bits_of_an_eager_one(device):
    compare(checks.GRAPH, device)


@pytest.mark.gpu
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("mode", checks.COMPILED)
def test_a_compiled_dlrm_takes_the_steps_of_an_eager_one(mode, device):
    compare(checks.COMPILED[mode], device)


@pytest.mark.slow
@pytest.mark.usefixtures("dynamo")
@pytest.mark.timeout(900)
def test_the_steps_of_a_compiled_dlrm_are_compared_on_a_cpu_too():
    check, cpu = checks.COMPILED["default"], torch.device("cpu")
    compare(check, cpu)
    changed = check._replace(expected=lambda device: [1.01 * tensor for tensor in check.expected(device)])
    with pytest.raises(AssertionError):
        compare(changed, cpu)


def test_results_that_differ_are_noticed():
    def check(change: float, exact: bool) -> checks.Check:
        right = torch.tensor([1000.0, 1.0])
        return checks.Check(lambda _: [right + change], lambda _: [right], 0 if exact else 4)

    cpu = torch.device("cpu")
    compare(check(0.0, exact=True), cpu)
    compare(check(1e-4, exact=False), cpu)
    for wrong in (check(1e-4, exact=True), check(1e-2, exact=False), check(float("nan"), exact=False)):
        with pytest.raises(AssertionError):
            compare(wrong, cpu)


@pytest.mark.timeout(900)
def test_a_cache_serves_processes_elsewhere_in_any_order(tmp_path):
    """Triton's keys would depend on the order, were it not for `hash_kernels`."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    names = ["group-int64", "forward-dim128"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": "build/cache"}
    local, remote = tmp_path / "here", tmp_path / "there"
    local.mkdir()
    subprocess.run(["git", "init", "-q", local], check=True)
    first, *parts, sizes = run_archives(
        "--cache", "build/cache", "--out", "build/out", *names, cwd=local, **variables
    ).splitlines()
    assert first.startswith("For sm_90, triton ")
    assert sum(int(part.split("compiled: ")[1].split(",")[0]) for part in parts) == 4
    assert sizes.startswith("gpu-cache.tar.xz 0.")
    (remote / "build").mkdir(parents=True)
    with tarfile.open(local / "build" / "out" / "gpu-cache.tar.xz") as tar:
        tar.extractall(remote / "build", filter="data")
    for order in (names, names[::-1]):
        assert run_archives("--here", *order, cwd=remote, **variables) == "kernels compiled: 0, from the cache: 4\n"
    arguments = ("--cache", "build/cache", "--out", "build/out", "--max-mib", "0.001", names[0])
    with pytest.raises(AssertionError, match=r"more than --max-mib 0\.001"):
        run_archives(*arguments, cwd=local, **variables)


BANNER = "========= COMPUTE-SANITIZER\n"
RAN = "===== 1 passed in 2.0s =====\n"


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
    result, why = sanitize.verdict(Outcome(Job("memcheck-group", []), status, 1.0, log))
    assert result == verdict
    assert (why == "") == (verdict == "clean")


def test_a_sanitizer_runs_the_launches_and_its_verdict_is_kept(tmp_path, monkeypatch, capsys):
    """A program that stands in for it runs what it is told to, and says what memcheck does."""
    tool = tmp_path / "sanitizer"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != -m ]; do last=$1; shift; done\n"$last" "$@"; code=$?\n'
                    'echo "========= ERROR SUMMARY: $FOUND errors"; exit $code\n')  # fmt: skip
    tool.chmod(0o755)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for errors, word in ((0, "clean"), (2, "found errors")):
        monkeypatch.setenv("FOUND", str(errors))
        arguments = ["--out", str(tmp_path / "out"), "--sanitizer", str(tool), "--tools", "memcheck"]
        monkeypatch.setattr(sys, "argv", ["sanitize", *arguments, "-k", "group-int64 and references_results"])
        with pytest.raises(SystemExit) as ended:
            sanitize.main()
        assert sanitize.VERDICTS[ended.value.code] == word
        assert json.loads((tmp_path / "out" / "results.json").read_text())["memcheck"][0] == word
        assert "1 passed" in capsys.readouterr().out
