"""The suite's runner, without a GPU: what a file does to its own process costs the others nothing."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from tests.gpu import processes
from tests.gpu.processes import CRASHED, FAILED, NOT_RUN, PASSED, TIMED_OUT, Job
from tests.gpu.suite import LOST, SKIPPED, Suite, find_files
from tests.helpers import process_ends

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
HEADER = "import os, sys, time, pytest\nimport tests.gpu.suite\npytestmark = pytest.mark.triton\n"
BODIES = {
    "passes": "pass",
    "fails": "assert 1 == 2",
    "aborts": "os.abort()",
    "skips": "pytest.skip('no')",
    "hangs": "time.sleep(100)",
    "loses": "tests.gpu.suite.context_is_lost = lambda: True; assert False",
    "prefix": "pass",
}


def write_tests(path: Path, names: list[str]) -> str:
    path.write_text(HEADER + "".join(f"def test_{name}(): {BODIES[name.split('_')[0]]}\n" for name in names))
    return str(path)


def run_suite(out: Path, files: list[str], **options: object) -> Suite:
    limits = {"jobs": 2, "seconds": 120, "test_seconds": 60}
    defaults = {"out": out, "left": False, "examples": "fewest", "under": [], **limits}
    suite = Suite([Path(file) for file in files], argparse.Namespace(**defaults | options), [])
    suite.run()
    return suite


def outcomes(out: Path) -> dict[str, str]:
    """What became of each test, by the part of its name behind `test_`."""
    lines = (json.loads(line) for path in sorted(out.glob("*.jsonl")) for line in path.read_text().splitlines())
    return {test.split("::test_")[1]: outcome for test, outcome in lines}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.chdir(ROOT)


def test_when_time_is_over_none_runs_any_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "ENDINGS", ((signal.SIGINT, 0.1), (signal.SIGKILL, 10.0)))
    passed, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: passed + monotonic())
    commands = {"endless": "trap '' INT; sleep 5000", "first": "true", "late": "true"}
    jobs = deque(Job(name, ["sh", "-c", command]) for name, command in commands.items())
    statuses = {}
    for outcome in processes.run(jobs, tmp_path, at_once=2, seconds=3600.0):
        statuses[outcome.job.name] = outcome.status
        passed = 3600.0
    assert statuses == {"endless": TIMED_OUT, "first": PASSED, "late": NOT_RUN}


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_runner(tmp_path, ending):
    lines = [
        "import sys; from collections import deque; from pathlib import Path; from tests.gpu.processes import Job, run",
        "jobs = [Job(str(n), ['sh', '-c', 'echo $$; exec sleep 50']) for n in range(2)]",
        "for outcome in run(deque(jobs), Path(sys.argv[1]), 2): pass",
    ]
    with subprocess.Popen([sys.executable, "-c", "\n".join(lines), str(tmp_path)]) as runner:
        children = []
        while len(children) < 2:
            time.sleep(0.02)
            children = [int(path.read_text()) for path in tmp_path.glob("*.log") if path.read_text().strip()]
        runner.send_signal(ending)
    assert all(map(process_ends, children)), "children outlive the runner"


def test_tests_behind_a_crash_run_in_another_process(tmp_path, capsys):
    file = write_tests(tmp_path / "test_crash.py", ["aborts", "prefix", "prefix_too"])
    with Path(file).open("a") as more:
        more.write("@pytest.mark.slow\ndef test_is_not_asked_for(): pass\n")
    suite = run_suite(tmp_path / "out", [file])
    assert outcomes(tmp_path / "out") == {"aborts": CRASHED, "prefix": PASSED, "prefix_too": PASSED}
    assert suite.results[file]["status"] == FAILED
    assert "Fatal Python error: Aborted" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == suite.results


def test_every_test_is_run_once_and_what_is_left_runs_again(tmp_path, capsys):
    names = ["passes", "fails", "hangs", "loses", "skips", "passes_at_last"]
    files = [write_tests(tmp_path / "test_mixed.py", names), write_tests(tmp_path / "test_good.py", ["passes_alone"])]
    suite = run_suite(tmp_path / "out", files, test_seconds=3)
    expected = {"passes": PASSED, "fails": FAILED, "hangs": TIMED_OUT, "loses": LOST, "skips": SKIPPED}
    expected |= {"passes_at_last": PASSED, "passes_alone": PASSED}
    assert outcomes(tmp_path / "out") == expected
    assert [suite.results[file]["status"] for file in files] == [FAILED, PASSED]
    assert "tests: 3 passed, 1 failed, 1 timed out, 1 lost the GPU's context, 1 skipped" in suite.summary()
    for name in ("fails", "hangs", "loses"):
        mended = Path(files[0]).read_text().replace(BODIES[name], "pass")
        Path(files[0]).write_text(mended)
    capsys.readouterr()
    again = run_suite(tmp_path / "out", files, left=True)
    assert {result["status"] for result in again.results.values()} == {PASSED}
    assert "test_good" not in capsys.readouterr().out
    assert "3 passed" in next((tmp_path / "out").glob("*test_mixed.log")).read_text()


def test_a_run_whose_time_is_over_says_which_files_are_left(tmp_path):
    files = [write_tests(tmp_path / f"test_{name}.py", [name]) for name in ("hangs", "passes")]
    suite = run_suite(tmp_path / "out", files, jobs=1, seconds=6)
    assert [suite.results[file]["status"] for file in files] == [TIMED_OUT, NOT_RUN]
    assert f"go on with --left: {' '.join(files)}" in suite.summary()


def test_the_suite_has_the_tests_of_kernels_and_of_gpus():
    files = [str(path) for path in find_files()]
    assert len(files) == len(set(files))
    assert {"tests/gpu/test_step.py", "tests/kernels/test_row_update.py", "tests/nn/test_embedding_bag.py"} <= set(
        files
    )
    marked = [path for path in Path("tests").rglob("test_*.py") if "pytest.mark.triton" in path.read_text()]
    assert {str(path) for path in marked} <= set(files)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    done = subprocess.run([sys.executable, "-m", "tests.gpu.suite"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs a CUDA device, and a torch that sees it" in done.stderr
