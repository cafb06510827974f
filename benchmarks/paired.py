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
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.clock import Clock, Contender, Timing
from benchmarks.environment import OtherLoad


def measure(
    benchmark: Any, contenders: Sequence[Contender], rounds: int, warmup_rounds: int = 2, clock: Clock | None = None
) -> list[Timing]:
    """Time the contenders in turn, the first of them through pytest-benchmark's `benchmark` fixture."""
    clock = clock or Clock(torch.device("cpu"))
    first, *others = contenders
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    numbers = itertools.count()

    def timed(contender: Contender, prepared: Any) -> None:
        samples[contender.name].append(clock.time(contender, [prepared]))

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

    for contender in contenders:
        contender.verify()
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
