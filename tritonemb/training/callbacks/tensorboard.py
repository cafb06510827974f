"""TensorBoard event files, and traces of `torch.profiler` for Perfetto."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tritonemb.training.callbacks import Callback, FitEnd, FitStart, StepEnd
from tritonemb.training.callbacks.trackers import Scalars
from tritonemb.training.config import ProfileOptions
from tritonemb.utils import require

FLUSH_SECONDS = 10


class TensorBoard(Scalars):
    """Callback that writes the values of `Scalars` to TensorBoard event files. Raise MissingExtraError without
    tensorboard.

    On resume, TensorBoard hides values of later steps that an earlier process wrote.

    Args:
        folder: folder of the event files; every run needs a separate one.
    """

    def __init__(self, folder: Path | str) -> None:
        require("tensorboard", "tensorboard")
        self._folder = str(folder)
        self._writer: Any = None  # None if `on_start` failed

    def on_start(self, start: FitStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides earlier values from purge_step on; values of first_step remain.
        self._writer = SummaryWriter(self._folder, purge_step=start.first_step + 1, flush_secs=FLUSH_SECONDS)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items() if self._writer is not None else ():
            self._writer.add_scalar(name, value, step)

    def on_end(self, end: FitEnd | None) -> None:
        super().on_end(end)
        if self._writer is not None:
            self._writer.close()


class Profiler(Callback):
    """Profiles a window of at least one step with `torch.profiler`; writes the trace when it or training ends."""

    def __init__(self, path: Path, options: ProfileOptions) -> None:
        self.path, self.options = path, options

    def on_start(self, start: FitStart) -> None:
        warmup = min(1, self.options.profile_start)
        wait, active = self.options.profile_start - warmup, self.options.profile_steps
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self.path)),
            record_shapes=True,
        )
        self._profiler.start()

    def on_step(self, step: StepEnd) -> None:
        self._profiler.step()

    def on_end(self, end: FitEnd | None) -> None:
        self._profiler.stop()
