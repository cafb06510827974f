"""How long training takes, how much of it is waiting for data, and how much memory it holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tritonemb.utils import require


class Clock:
    """Seconds of training since the run began, with evaluation and checkpoints left out.

    Args:
        seconds: what earlier processes of the run have taken.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._earlier = seconds
        self._started = time.perf_counter()
        self._paused = 0.0
        self._warm: tuple[float, int] | None = None
        self._samples = 0
        self._mark = (0.0, 0, 0.0)
        self.waited = 0.0

    @property
    def here(self) -> float:
        """Seconds trained by this process."""
        return time.perf_counter() - self._started - self._paused

    @property
    def seconds(self) -> float:
        return self._earlier + self.here

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens in the block is not training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - start

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens in the block is waiting for data."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.waited += time.perf_counter() - start

    def step(self, num_samples: int) -> None:
        """A step is done; the first one of a process, which compiles and warms up, is left out of speeds."""
        self._samples += num_samples
        if self._warm is None:
            self._warm = (self.here, num_samples)
            self._mark = (*self._warm, self.waited)

    def lap(self) -> tuple[float, float]:
        """Samples a second and the share of waiting since the last lap."""
        now, samples, waited = self.here, self._samples, self.waited
        seconds, before = now - self._mark[0], self._mark
        self._mark = (now, samples, waited)
        if samples == before[1]:  # the first step alone
            return self.samples_per_second, 0.0
        return (samples - before[1]) / seconds, min((waited - before[2]) / seconds, 1.0)

    @property
    def samples_per_second(self) -> float:
        """Mean of this process; that of the first step where there is no other."""
        seconds, samples = self._warm or (0.0, 0)
        if self._samples == samples:
            return samples / seconds if seconds else 0.0
        return (self._samples - samples) / (self.here - seconds)


def memory_bytes(device: torch.device) -> int:
    """Memory allocated on a GPU, or the resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(require("psutil").Process().memory_info().rss)
