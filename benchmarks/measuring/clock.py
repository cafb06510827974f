"""Timing of contenders in turns on one device, in one process: a disturbance of the device meets all of them.

On the CPU a sample is wall-clock time, beside the CPU time of all threads of the process. On a GPU a sample is the
device's time between two CUDA events. The L2 cache is flushed before the sample, and a short idle kernel keeps the
device busy while the host queues the run, so launches do not count unless they take longer than that kernel. Where the
host matters (whole training steps), a sample is the mean of `repeats` steps back to back, without flush or idle kernel:
the tables are far larger than the cache. A contender that is captured as a CUDA graph needs the host for one launch.

`Clock.measure` drops a contender that fails, and keeps its error. `measure` is for pytest-benchmark, which runs one
benchmark after the other: on a machine whose speed drifts, that compares two moments, not two programs. A round runs
all contenders once, in alternating order (A B, B A, ...), since caches and allocator depend on the run before by some
percent, and on a batch that no earlier round has used. Work before the measured part (the forward before a backward,
the gradient that a dense network would have written) is the contender's `prepare`. It is not timed and is done right
before the run, so that caches are as in a training step.
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
IDLE_CYCLES = 2_000_000  # about a millisecond: the host needs less to queue a run
FEWEST_ROUNDS = 3  # for a median, if the deadline ends a measurement


@dataclass(frozen=True)
class Contender:
    """An implementation: `run(prepare(number))` is one sample, of which only `run` is timed.

    `num_bytes` must be moved by a run. `check` raises if the result of a run is wrong; it checks one run before timing.
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
    """Milliseconds of a contender, per round; `cpu_samples`: of CPU time, of all threads of the process."""

    name: str
    samples: tuple[float, ...]
    other_load_percent: float | None = None
    cpu_samples: tuple[float, ...] = ()

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples, percent))

    @property
    def cpu_ms(self) -> float | None:
        """Return the median of the CPU time."""
        return float(np.median(self.cpu_samples)) if self.cpu_samples else None


@dataclass
class Outcome:
    """Timings of contenders that ran, bytes that each contender must move, and errors of contenders that failed."""

    timings: list[Timing] = field(default_factory=list)
    num_bytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class DeviceLost(RuntimeError):
    """The device is lost to this process, for instance after an illegal access."""


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
        """Take `rounds` samples per contender; with `repeats`, a sample is the mean of that number of runs.

        The deadline ends the measurement earlier: TimeoutError below `FEWEST_ROUNDS`. `graph` captures contenders.
        """
        outcome = Outcome(num_bytes={contender.name: contender.num_bytes for contender in contenders})
        samples: dict[str, list[tuple[float, float]]] = {}
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
                        raise TimeoutError(f"deadline reached after {max(0, number - warmup_rounds)} rounds")
                    break
                for contender in [item for item in running if item.name not in outcome.errors]:
                    with self._attempt(contender.name, outcome):
                        prepared = [contender.prepare(number * count + index) for index in range(count)]
                        elapsed, cpu = self.time(contender, prepared, flush=repeats is None)
                        samples.setdefault(contender.name, []).append((elapsed / count, cpu / count))
        finally:
            gc.enable()
        outcome.timings = [
            timing_of(name, times[warmup_rounds:]) for name, times in samples.items() if name not in outcome.errors
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
        """Return the contender with its run as a CUDA graph, of its first batch; on the CPU, with the first batch."""
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

        # `prepare` writes into the same tensors; `prepared` stays alive, as the graph reads it.
        again = replace(contender, prepare=lambda number: (contender.prepare(0), prepared), run=replay)
        again.verify()
        return again

    def time(self, contender: Contender, prepared: Sequence[Any], flush: bool = True) -> tuple[float, float]:
        """Return the milliseconds of one run per item of `prepared`, back to back, and those of the host's CPU time."""
        cpu_begin = time.process_time_ns()
        if not self.on_gpu:
            begin = time.perf_counter_ns()
            for item in prepared:
                contender.run(item)
            elapsed = (time.perf_counter_ns() - begin) / 1e6
            return elapsed, (time.process_time_ns() - cpu_begin) / 1e6
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
        return float(start.elapsed_time(end)), (time.process_time_ns() - cpu_begin) / 1e6


def timing_of(name: str, samples: Sequence[tuple[float, float]], other_load_percent: float | None = None) -> Timing:
    """Return the timing of a contender from pairs of elapsed time and CPU time."""
    elapsed, cpu = zip(*samples, strict=True) if samples else ((), ())
    return Timing(name, tuple(elapsed), other_load_percent, tuple(cpu))


def describe(error: Exception) -> str:
    """Return type and text of an error on one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}"


def recover(error: Exception | None = None) -> None:
    """Free the memory of a failed contender; DeviceLost if the device does not respond."""
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
    """Time contenders in turns, the first one by pytest-benchmark's `benchmark` fixture."""
    clock = clock or Clock(torch.device("cpu"))
    first, *peers = contenders
    samples: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
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
                run_others(number - 1)  # after the first contender of the previous round
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
    return [timing_of(name, times[-rounds:], others_load.percent) for name, times in samples.items()]


class OtherLoad:
    """Share of the machine's CPU time that other processes took while a block ran.

    The spinning threads of an OpenMP runtime lose more than their share if another process takes a core, so timings
    beside other work favor implementations that do not spin.
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
    """Wait until other processes use less than a share of the CPU, or until the timeout; the load is recorded."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        with OtherLoad() as load:
            time.sleep(0.5)
        if load.percent is None or load.percent <= limit_percent:
            return


def _processor_seconds() -> tuple[float, float, float] | None:
    """Return busy seconds of all cores, CPU seconds of this process, and wall seconds; None without `/proc/stat`."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, *remainder = (
        int(part) for part in stat.read_text().splitlines()[0].split()[1:]
    )
    # Guest time is part of user time; stolen time, of another virtual machine, counts as other load.
    busy = (user + nice + system + sum(remainder[:3])) / os.sysconf("SC_CLK_TCK")
    return busy, time.process_time(), time.perf_counter()
