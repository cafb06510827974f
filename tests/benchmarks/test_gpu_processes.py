"""Processes that measure: one that dies, hangs or runs out of time costs what it was running, and the rest is kept."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run as gpu_run
from benchmarks.run import Case, measure_groups
from tests.gpu import processes

pytestmark = pytest.mark.more

# As `serve`: cases say what happens to their contender "peer"; a case is done with those that came through it.
SERVE = """
import faulthandler, json, os, signal, sys, time
_, deadline, record = json.loads(sys.stdin.readline())
states = dict(json.loads(line) for line in open(record))

def note(item, state):
    with open(record, "a") as file:
        file.write(json.dumps([item, state]) + "\\n")

for case in [item for item, state in states.items() if state == "not run"]:
    if time.time() > deadline:
        break
    through = []
    for contender in ("ours", "peer"):
        if isinstance(states.get(f"{case} | {contender}"), dict):
            continue
        note(f"{case} | {contender}", "started")
        if contender == "peer":
            if "crash" in case:
                os.kill(os.getpid(), signal.SIGSEGV)
            if "raise" in case:
                raise RuntimeError("an illegal memory access")
            if "hang" in case:
                faulthandler.dump_traceback_later(0.2, exit=True)
                time.sleep(100)
            if "sleep" in case:
                time.sleep(100)
        through.append(contender)
    note(case, {"rows": [[case, through, os.getpid()]], "failures": []})
"""


@pytest.fixture(autouse=True)
def _fast_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ENDINGS", ((signal.SIGKILL, 10.0),))


def run(
    groups: list[list[str]], folder: Path, seconds: float = 60, left: bool = False
) -> tuple[dict[str, Any], dict[str, str], Any]:
    """Contenders that came through each case, why others did not, and the processes of the cases."""
    chosen = [
        Case(str(number), op, "x", lambda clock, rounds: None)  # type: ignore[arg-type,return-value]
        for number, ops in enumerate(groups)
        for op in ops
    ]
    parts: list[dict[str, Any]] = []
    measure_groups(chosen, {}, folder, seconds, parts.append, [sys.executable, "-c", SERVE], left)
    rows = [row for part in parts for row in part["rows"]]
    failures = [failure for part in parts for failure in part["failures"]]
    why = {f"{failure['op']}, {failure['implementation']}": failure["error"] for failure in failures}
    names = {name: name.removesuffix(", x") for name, *_ in rows}
    return {names[name]: through for name, through, _ in rows}, why, {names[name]: pid for name, _, pid in rows}


def test_a_process_that_dies_leaves_the_results_of_others_and_its_own(tmp_path: Path) -> None:
    through, why, pids = run([["a", "crash", "b"], ["c"]], tmp_path)
    assert through == {"a": ["ours", "peer"], "crash": ["ours"], "b": ["ours", "peer"], "c": ["ours", "peer"]}
    assert list(why) == ["crash, peer"]
    assert why["crash, peer"].startswith("its process crashed: ")
    assert pids["a"] != pids["crash"] == pids["b"] != pids["c"]


def test_an_error_that_ends_a_process_is_told(tmp_path: Path) -> None:
    through, why, _ = run([["raise"]], tmp_path)
    assert through == {"raise": ["ours"]}
    assert why == {"raise, peer": "its process failed: RuntimeError: an illegal memory access"}


def test_a_process_that_hangs_ends(tmp_path: Path) -> None:
    through, why, _ = run([["hang", "a"]], tmp_path)
    assert through == {"hang": ["ours"], "a": ["ours", "peer"]}
    assert list(why) == ["hang, peer"]


def test_a_group_whose_processes_die_again_and_again_is_given_up(tmp_path: Path) -> None:
    cases = [f"crash {number}" for number in range(gpu_run.MOST_DEATHS + 1)]
    through, why, _ = run([cases, ["a"]], tmp_path)
    assert through == {case: ["ours"] for case in cases[:-2]} | {"a": ["ours", "peer"]}
    assert why[f"{cases[-1]}, all"] == f"not measured: {gpu_run.MOST_DEATHS} processes of its group died"


def test_a_run_over_its_time_ends_and_says_what_is_missing(tmp_path: Path) -> None:
    through, why, _ = run([["sleep", "a"], ["b"]], tmp_path, seconds=2)
    assert through == {}
    assert why == dict.fromkeys(["sleep, all", "a, all", "b, all"], "not measured: 2 s were over")


def test_an_earlier_runs_record_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    _, _, initial = run([["a"]], tmp_path)
    _, _, final = run([["a"]], tmp_path)
    assert initial["a"] != final["a"]


def test_another_run_goes_on_with_what_is_left(tmp_path: Path) -> None:
    cases = [[f"crash {number}" for number in range(gpu_run.MOST_DEATHS + 1)], ["a"]]
    *_, last = cases[0]
    _, _, initial = run(cases, tmp_path)
    through, why, final = run(cases, tmp_path, left=True)
    assert through == {case: ["ours"] for case in cases[0]} | {"a": ["ours", "peer"]}
    assert list(why) == [f"{case}, peer" for case in cases[0]]
    assert {case for case in final if final[case] != initial.get(case)} == {last, cases[0][-2]}  # not measured before
