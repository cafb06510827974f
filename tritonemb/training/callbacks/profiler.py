"""A window of steps under `torch.profiler`, as a trace that Perfetto opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tritonemb.training.callbacks.base import Callback, FitEnd, FitStart, StepEnd


@dataclass(frozen=True)
class ProfileOptions:
    """Which steps to profile.

    Args:
        profile_steps: how many, 0 for none; the trace is `trace.json` in the run's folder (ui.perfetto.dev opens it).
        profile_start: how many steps of this process go before.

    Raises:
        ValueError: for negative numbers.
    """

    profile_steps: int = 0
    profile_start: int = 10

    def __post_init__(self) -> None:
        if self.profile_steps < 0 or self.profile_start < 0:
            raise ValueError(
                f"profile_steps and profile_start must not be negative, got {self.profile_steps}, {self.profile_start}"
            )


class Profiler(Callback):
    """Profiles a window of at least one step, and writes `path` when the window or training ends."""

    def __init__(self, path: Path, options: ProfileOptions) -> None:
        self.path = path
        self.options = options

    def on_start(self, start: FitStart) -> None:
        warmup = min(1, self.options.profile_start)
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(
                wait=self.options.profile_start - warmup, warmup=warmup, active=self.options.profile_steps, repeat=1
            ),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self.path)),
            record_shapes=True,
        )
        self._profiler.start()

    def on_step(self, step: StepEnd) -> None:
        self._profiler.step()

    def on_end(self, end: FitEnd | None) -> None:
        self._profiler.stop()
