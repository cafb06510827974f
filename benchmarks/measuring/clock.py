"""Time contenders in turn on one device, in one process, so that whatever disturbs the device disturbs them all.

On the CPU a sample is wall clock time. On a GPU the L2 cache is flushed before each sample and the device is given a
little idle work, during which the host queues the run: what CUDA events measure is the device's time, without the
host's launches (a contender whose host needs longer than that pays for it). Where the host matters (whole training
steps), a run is `repeats` steps back to back, without flush or idle work: their tables are far larger than the cache,
and the host has to keep up. As a CUDA graph (`captured`) a contender needs the host for one launch alone.

`Clock.measure` drops a contender that fails and keeps its error. `measure` is for pytest-benchmark, which by itself
runs one benchmark after the other: on a machine whose speed drifts, that compares two moments, not two programs.
Every round runs every contender once (A B, B A, A B, ...: what the one before leaves in caches and in the allocator is
worth some percent), on a batch that no earlier round has used. Work before the measured part (a forward before a
backward, the gradient that the dense network would just have written) is the contender's `prepare`, off the clock and
right before its run, so that it finds the caches as a training step would leave them. Ours is its target.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

FLUSH_BYTES = 256 << 20  # several times any L2 cache
IDLE_CYCLES = 2_000_000  # about a millisecond: more than the host needs to queue a run
FEWEST_ROUNDS = 3  # that still say something, where time is over


@dataclass(frozen=True)
class Contender:
    """`run(prepare(number))` is one sample; only `run` is timed.

    `num_bytes` is what it has to move. `check` raises if what a run returned is wrong: one is checked before any is
    timed.
    """

    name: str
    prepare: Callable[[int], Any]
    run: Callable[[Any], object]
    num_bytes: int = 0
    check: Callable[[Any], None] | None = None

    def verify(self) -> None:
        """Run once, if there is a check, and check the result."""
        if self.check is not None:
            self.check(self.run(self.prepare(0)))


@dataclass(frozen=True)
class Timing:
    """Milliseconds over all rounds of one contender."""

    name: str
    samples: tuple[float, ...]
    other_load_percent: float | None = None

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples, percent))


@dataclass
class Outcome:
    """Milliseconds of those that ran, what each had to move, and the errors of those that did not run."""

    timings: list[Timing] = field(default_factory=list)
    num_bytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class DeviceLost(RuntimeError):
    """The device answers this process no more, as after an illegal access."""


class Clock:
    """Measures on `device`.

    Args:
        deadline: of `time.time()`; no round begins after it.
        begin: called with the name of each contender that is about to run.
        without: contenders to leave out.
    """

    def __init__(
        self,
        device: torch.device,
        deadline: float = math.inf,
        begin: Callable[[str], None] = lambda name: None,
        without: Collection[str] = (),
    ) -> None:
        self.device, self.deadline, self.begin, self.without = device, deadline, begin, without
        self.on_gpu = device.type == "cuda"
        self._flushed = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.int8, device=device)

    def measure(
        self,
        contenders: Sequence[Contender],
        rounds: int,
        warmup_rounds: int = 3,
        repeats: int | None = None,
        graph: bool = False,
    ) -> Outcome:
        """`rounds` samples of each contender; with `repeats`, of so many runs back to back, divided by their number.

        Fewer where the deadline passes: TimeoutError below `FEWEST_ROUNDS`. With `graph`, of contenders `captured`.
        """
        outcome = Outcome(num_bytes={contender.name: contender.num_bytes for contender in contenders})
        samples: dict[str, list[float]] = {}
        running: list[Contender] = []
        for contender in contenders:
            if contender.name not in self.without:
                with self._attempt(contender.name, outcome):
                    contender.verify()
                    running.append(self.captured(contender) if graph else contender)
        gc.collect()
        gc.disable()
        count = repeats or 1
        try:
            for number in range(warmup_rounds + rounds):
                if time.time() > self.deadline:
                    if number < warmup_rounds + min(rounds, FEWEST_ROUNDS):
                        raise TimeoutError(f"time was over after {max(0, number - warmup_rounds)} rounds")
                    break
                for contender in [item for item in running if item.name not in outcome.errors]:
                    with self._attempt(contender.name, outcome):
                        prepared = [contender.prepare(number * count + index) for index in range(count)]
                        elapsed = self.time(contender, prepared, flush=repeats is None) / count
                        samples.setdefault(contender.name, []).append(elapsed)
        finally:
            gc.enable()
        outcome.timings = [
            Timing(name, tuple(times[warmup_rounds:])) for name, times in samples.items() if name not in outcome.errors
        ]
        return outcome

    @contextmanager
    def _attempt(self, name: str, outcome: Outcome) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        except Exception as error:
            recover(error)
            outcome.errors[name] = describe(error)

    def captured(self, contender: Contender) -> Contender:
        """The contender with its run as a CUDA graph, of its first batch. On the CPU: with the first batch alone."""
        if not self.on_gpu:
            return replace(contender, prepare=lambda number: contender.prepare(0))
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                contender.run(contender.prepare(0))
                prepared = contender.prepare(0)
                torch.cuda.synchronize(self.device)
            with torch.cuda.graph(graph, stream=stream):
                retained = contender.run(prepared)
        except Exception as error:
            recover(error)
            raise RuntimeError(f"cannot be captured: {describe(error)}") from error

        def replay(_: Any) -> object:
            graph.replay()
            return retained

        # `prepare` writes into the same tensors each time; `prepared` stays, as the graph reads it.
        again = replace(contender, prepare=lambda number: (contender.prepare(0), prepared), run=replay)
        again.verify()
        return again

    def time(self, contender: Contender, prepared: Sequence[Any], flush: bool = True) -> float:
        """Milliseconds of a run of each of `prepared`, back to back."""
        if not self.on_gpu:
            begin = time.perf_counter_ns()
            for item in prepared:
                contender.run(item)
            return (time.perf_counter_ns() - begin) / 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if flush:
            self._flushed.zero_()
            torch.cuda._sleep(IDLE_CYCLES)
        else:
            torch.cuda.synchronize()
        start.record()
        for item in prepared:
            contender.run(item)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))


def describe(error: Exception) -> str:
    """The error on one line, without what names a machine."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}"


def recover(error: Exception | None = None) -> None:
    """Give back what a failed contender held; raises DeviceLost if the device does not answer any more."""
    gc.collect()
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(describe(error or lost)) from lost


def measure(
    benchmark: Any, contenders: Sequence[Contender], rounds: int, warmup_rounds: int = 2, clock: Clock | None = None
) -> list[Timing]:
    """Time the contenders in turn, the first of them through pytest-benchmark's `benchmark` fixture."""
    clock = clock or Clock(torch.device("cpu"))
    first, *peers = contenders
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    numbers = itertools.count()

    def timed(contender: Contender, prepared: Any) -> None:
        samples[contender.name].append(clock.time(contender, [prepared]))

    def run_others(number: int) -> None:
        for contender in peers[:: -1 if number % 2 else 1]:
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


class OtherLoad:
    """How much of the machine's processor time went to other processes while this block ran.

    The spinning threads of an OpenMP runtime lose far more than their share when a core is taken from them, so figures
    taken beside other work flatter whoever does not spin.
    """

    percent: float | None = None

    def __enter__(self) -> OtherLoad:
        self._start = _processor_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        end = _processor_seconds()
        if self._start is None or end is None:
            return
        busy, process, wall = (final - initial for initial, final in zip(self._start, end, strict=True))
        self.percent = max(0.0, 100 * (busy - process) / (wall * (os.cpu_count() or 1)))


def wait_until_quiet(limit_percent: float = 5.0, patience_seconds: float = 15.0) -> None:
    """Return when other processes leave the machine alone, or when patience ends: the load is recorded either way."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        with OtherLoad() as load:
            time.sleep(0.5)
        if load.percent is None or load.percent <= limit_percent:
            return


def _processor_seconds() -> tuple[float, float, float] | None:
    """Busy seconds of all cores, this process's processor seconds, wall seconds; None where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, *remainder = (
        int(part) for part in stat.read_text().splitlines()[0].split()[1:]
    )
    # Of the rest, guest time is already part of user time; stolen time is another machine's and counts as other load.
    busy = (user + nice + system + sum(remainder[:3])) / os.sysconf("SC_CLK_TCK")
    return busy, time.process_time(), time.perf_counter()
