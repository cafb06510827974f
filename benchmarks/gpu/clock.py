"""Time contenders in turn on one device, in one process, so that whatever disturbs the device disturbs them all.

Every round runs every contender once (A B A B ...). Before each run the L2 cache is flushed and the device is given a
little idle work, during which the host queues the run: what CUDA events measure is the device's time, without the
host's launches (a contender whose host needs longer than that pays for it). Where the host matters (whole training
steps), a run is `repeats` steps back to back, without flush or idle work: their tables are far larger than the cache,
and the host has to keep up.

A contender that fails is dropped and its error kept; the others go on.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.paired import Timing

FLUSH_BYTES = 256 << 20  # several times any L2 cache
IDLE_CYCLES = 2_000_000  # about a millisecond: more than the host needs to queue a run


@dataclass(frozen=True)
class Contender:
    """`run(prepare(number))` is one sample; only `run` is timed. `num_bytes` is what it has to move."""

    name: str
    prepare: Callable[[int], Any]
    run: Callable[[Any], object]
    num_bytes: int


@dataclass
class Outcome:
    """Milliseconds of those that ran, what each had to move, and the errors of those that did not run."""

    timings: list[Timing] = field(default_factory=list)
    num_bytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Clock:
    """Measures on `device`; on the CPU (to try the benchmarks out) with the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._flushed = torch.empty(FLUSH_BYTES if self.on_gpu else 1, dtype=torch.int8, device=device)

    def measure(
        self, contenders: Sequence[Contender], rounds: int, warmup_rounds: int = 3, repeats: int | None = None
    ) -> Outcome:
        """`rounds` samples of each contender; with `repeats`, of so many runs back to back, divided by their number."""
        samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        outcome = Outcome(num_bytes={contender.name: contender.num_bytes for contender in contenders})
        gc.collect()
        gc.disable()
        try:
            for number in range(warmup_rounds + rounds):
                for contender in contenders:
                    if contender.name in outcome.errors:
                        continue
                    try:
                        elapsed = self._sample(contender, number, repeats)
                    except Exception as error:
                        outcome.errors[contender.name] = describe(error)
                        recover()
                        continue
                    samples[contender.name].append(elapsed)
        finally:
            gc.enable()
        outcome.timings = [
            Timing(name, tuple(times[warmup_rounds:])) for name, times in samples.items() if name not in outcome.errors
        ]
        return outcome

    def _sample(self, contender: Contender, number: int, repeats: int | None) -> float:
        count = repeats or 1
        prepared = [contender.prepare(number * count + index) for index in range(count)]
        if not self.on_gpu:
            begin = time.perf_counter()
            for item in prepared:
                contender.run(item)
            return (time.perf_counter() - begin) * 1e3 / count
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if repeats is None:
            self._flushed.zero_()
            torch.cuda._sleep(IDLE_CYCLES)
        else:
            torch.cuda.synchronize()
        start.record()
        for item in prepared:
            contender.run(item)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count


def describe(error: Exception) -> str:
    """The error on one line, without what names a machine."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}"


def recover() -> None:
    """Give back what a failed contender held, as far as the device still answers."""
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            pass
