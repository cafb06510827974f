"""Who runs when, what is on the clock, and what is recorded about a machine: nothing that names it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measuring import clock
from benchmarks.measuring.clock import Contender, OtherLoad, Timing, measure
from benchmarks.measuring.result_files import ROOT, environment

pytestmark = pytest.mark.more


def test_versions_and_no_names() -> None:
    result = environment()
    assert result["torch"] == torch.__version__
    assert result["cpu"].endswith("cores")
    assert platform.node() not in result.values()
    assert str(ROOT) not in json.dumps(result)


def test_load_of_other_processes_is_their_share_of_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as busy seconds of all processors, seconds of this process, seconds that have passed."""
    readings = iter([(10.0, 1.0, 100.0), (14.0, 2.0, 102.0), None, None])
    monkeypatch.setattr(clock, "_processor_seconds", lambda: next(readings))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    for percent in (50.0, None):
        with OtherLoad() as load:
            pass
        assert load.percent == percent


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell how busy its processors are")
def test_busy_seconds_of_all_processors_are_read() -> None:
    initial = clock._processor_seconds()
    while time.process_time() < initial[1] + 0.05:
        pass
    busy, local, wall = (now - then for now, then in zip(clock._processor_seconds(), initial, strict=True))
    assert busy > 0
    assert local >= 0.05
    assert wall > 0


class Pedantic:
    """What the runner uses of pytest-benchmark's fixture."""

    def pedantic(self, target: Callable[..., None], setup: Callable[[], Any], rounds: int, warmup_rounds: int) -> None:
        for _ in range(warmup_rounds + rounds):
            arguments, keywords = setup()
            target(*arguments, **keywords)


def test_every_round_runs_every_contender_on_the_same_fresh_batch() -> None:
    calls: list[tuple[str, int]] = []

    def contender(name: str) -> Contender:
        return Contender(name, lambda number: number, lambda number: calls.append((name, number)))

    timings = measure(Pedantic(), [contender("ours"), contender("peer")], rounds=3, warmup_rounds=1)
    order = [("peer", "ours"), ("ours", "peer"), ("peer", "ours"), ("ours", "peer")]
    assert calls == [(name, number) for number, names in enumerate(order) for name in names]
    assert [timing.name for timing in timings] == ["ours", "peer"]
    assert [len(timing.samples) for timing in timings] == [3, 3]  # without the warm-up round


def test_only_run_is_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def takes(milliseconds: int) -> None:
        nonlocal now
        now += milliseconds * 1_000_000

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    monkeypatch.setattr(time, "process_time_ns", lambda: 2 * now)  # two threads
    slow_to_prepare = Contender("prepares", lambda number: takes(30), lambda prepared: takes(1))
    slow_to_run = Contender("runs", lambda number: takes(1), lambda prepared: takes(30))
    prepares, runs = measure(Pedantic(), [slow_to_prepare, slow_to_run], rounds=3, warmup_rounds=0)
    assert prepares.samples == (1, 1, 1)
    assert runs.samples == (30, 30, 30)
    assert (prepares.cpu_ms, runs.cpu_ms) == (2, 60)


def test_percentiles() -> None:
    timing = Timing("any", tuple(float(value) for value in range(101)))
    assert [timing.percentile(percent) for percent in (20, 50, 80)] == [20.0, 50.0, 80.0]
