"""A window of steps under `torch.profiler`, as a trace that Perfetto opens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritonemb.training.callbacks import Callback, FitEnd, FitStart, StepEnd


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


class Profile(Callback):
    """Profiles a window of steps and writes `path` when the window or training ends."""

    def __init__(self, path: Path, options: ProfileOptions) -> None:
        self.path = path
        self.options = options
        self._profiler: Any = None
        self._done = 0

    def on_start(self, start: FitStart) -> None:
        self._done = 0
        self._begin_if_due()

    def on_step(self, step: StepEnd) -> None:
        self._done += 1
        if self._profiler is not None and self._done == self.options.profile_start + self.options.profile_steps:
            self._finish()
        self._begin_if_due()

    def on_end(self, end: FitEnd | None) -> None:
        self._finish()

    def _begin_if_due(self) -> None:
        if self._done == self.options.profile_start and self.options.profile_steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()

    def _finish(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.path))
            self._profiler = None
