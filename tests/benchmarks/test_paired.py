"""The paired runner: who runs when, and what is on the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.measuring.clock import Contender, Timing, measure

pytestmark = pytest.mark.more


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
    slow_to_prepare = Contender("prepares", lambda number: takes(30), lambda prepared: takes(1))
    slow_to_run = Contender("runs", lambda number: takes(1), lambda prepared: takes(30))
    prepares, runs = measure(Pedantic(), [slow_to_prepare, slow_to_run], rounds=3, warmup_rounds=0)
    assert prepares.samples == (1, 1, 1)
    assert runs.samples == (30, 30, 30)


def test_percentiles() -> None:
    timing = Timing("any", tuple(float(value) for value in range(101)))
    assert [timing.percentile(percent) for percent in (20, 50, 80)] == [20.0, 50.0, 80.0]
