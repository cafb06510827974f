"""Measure ours and its peers in the same rounds, so that whatever disturbs the machine disturbs them all.

pytest-benchmark runs one benchmark after the other; on a machine whose speed drifts that compares two moments rather
than two programs. Here every round runs every contender once, one after the other (A B, B A, A B, ...: what the one
before leaves in caches and in the allocator is worth some percent), on a batch that no earlier round has used. What
must come before the measured part (a forward before a backward, the gradient that the dense network would just have
written) is the contender's `prepare`, outside the clock and done right before its own run, so each finds the caches as
a training step would leave them. Ours runs as pytest-benchmark's own target; the same clock is read around every
contender, and its percentiles are what is reported.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.environment import OtherLoad


@dataclass(frozen=True)
class Contender:
    """`run(prepare(round))` is one sample; only `run` is on the clock."""

    name: str
    prepare: Callable[[int], Any]
    run: Callable[[Any], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds over all rounds of one contender."""

    name: str
    samples: tuple[float, ...]
    other_load_percent: float | None = None

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples, percent))


def measure(benchmark: Any, contenders: Sequence[Contender], rounds: int, warmup_rounds: int = 2) -> list[Timing]:
    """Time the contenders in turn, the first of them through pytest-benchmark's `benchmark` fixture."""
    first, *others = contenders
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    numbers = itertools.count()

    def timed(contender: Contender, prepared: Any) -> None:
        start = time.perf_counter_ns()
        contender.run(prepared)
        samples[contender.name].append((time.perf_counter_ns() - start) / 1e6)

    def run_others(number: int) -> None:
        for contender in others[:: -1 if number % 2 else 1]:
            timed(contender, contender.prepare(number))

    def setup() -> tuple[tuple[Contender, Any], dict[str, Any]]:
        number = next(numbers)
        if number % 2 == 0:
            if number:
                run_others(number - 1)  # behind the first, in the round before
            run_others(number)
        return (first, first.prepare(number)), {}

    gc.collect()
    gc.disable()
    try:
        with OtherLoad() as others_load:
            benchmark.pedantic(timed, setup=setup, rounds=rounds, warmup_rounds=warmup_rounds)
            if (last := next(numbers) - 1) % 2:
                run_others(last)
    finally:
        gc.enable()
    return [Timing(name, tuple(times[-rounds:]), others_load.percent) for name, times in samples.items()]
