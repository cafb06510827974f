"""Processes that measure: one that dies, hangs or runs out of time costs what it was running, and the rest is kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.gpu import processes
from benchmarks.gpu.processes import Task

pytestmark = pytest.mark.more


def measure(task: Task, begin: Callable[[str, str], None], done: Callable[[str, Any], None]) -> None:
    """Cases say what happens to their contender "peer"; a case is done with those that came through it."""
    for case in list(task.cases):
        if time.time() > task.deadline:
            return
        through = []
        for contender in ("ours", "peer"):
            if (case, contender) in task.without:
                continue
            begin(case, contender)
            if contender == "peer":
                act(case)
            through.append(contender)
        done(case, (through, os.getpid()))


def act(case: str) -> None:
    if "crash" in case:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "raise" in case:
        raise RuntimeError("an illegal memory access")
    if "hang" in case or "slow" in case:
        time.sleep(3600 if "hang" in case else 0.2)


def run(groups: list[list[str]], seconds: float = 60, **options: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Contenders that came through each case, why others did not, and the processes of the cases."""
    results: dict[str, Any] = {}
    why: dict[str, Any] = {}
    processes.run(
        measure,
        groups,
        lambda case, result: results.update({case: result}),
        lambda case, contender, text: why.update({f"{case}, {contender}": text}),
        seconds,
        **options,
    )
    return {case: found[0] for case, found in results.items()}, why, {case: f[1] for case, f in results.items()}


def test_a_process_that_dies_leaves_the_results_of_others_and_its_own() -> None:
    found, why, pids = run([["a", "crash", "b"], ["c"]])
    assert found == {"a": ["ours", "peer"], "crash": ["ours"], "b": ["ours", "peer"], "c": ["ours", "peer"]}
    assert why == {"crash, peer": f"its process died (exit code {-signal.SIGSEGV})"}
    assert pids["a"] != pids["crash"] == pids["b"] != pids["c"]


def test_an_error_that_ends_a_process_is_told() -> None:
    found, why, _ = run([["raise"]])
    assert found == {"raise": ["ours"]}
    assert why == {"raise, peer": "its process died (exit code 1): RuntimeError: an illegal memory access"}


def test_a_process_that_hangs_is_ended() -> None:
    found, why, _ = run([["hang", "a"]], silent_seconds=10.0)
    assert found == {"hang": ["ours"], "a": ["ours", "peer"]}
    assert why == {"hang, peer": "not measured: said nothing for 10 s"}


def test_a_group_whose_processes_die_again_and_again_is_given_up() -> None:
    cases = [f"crash {number}" for number in range(processes.MOST_DEATHS + 1)]
    found, why, _ = run([cases, ["a"]])
    assert found == {case: ["ours"] for case in cases[:-2]} | {"a": ["ours", "peer"]}
    assert why[f"{cases[-1]}, all"] == f"not measured: {processes.MOST_DEATHS} processes of its group died"


def test_a_run_over_its_time_ends_and_says_what_is_missing() -> None:
    found, why, _ = run([["hang", "a"], ["b"]], seconds=2)
    assert found == {}
    assert why == dict.fromkeys(["hang, all", "a, all", "b, all"], "not measured: 2 s were over")
