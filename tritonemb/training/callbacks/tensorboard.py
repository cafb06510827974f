"""Curves for TensorBoard, and a window of steps under `torch.profiler` as a trace that Perfetto opens."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tritonemb.training.callbacks import Callback, Evaluation, FitEnd, FitStart, Log, StepEnd
from tritonemb.training.config import ProfileOptions
from tritonemb.utils import require

FLUSH_SECONDS = 10
METRICS = ("auc", "log_loss", "normalized_entropy")


class TensorBoard(Callback):
    """Writes scalars over steps: train/loss, train/samples_per_second, train/data_wait, train/memory_bytes, lr/dense,
    lr/tables; auc, log_loss and normalized_entropy under the name of each split; cache/ and each name of `Log.cache`;
    dynamic/, the table and each name of `Log.dynamic`.

    Of a run that is resumed, what was written after that step is hidden. MissingExtraError without tensorboard.

    Args:
        folder: of the event files, one of its own for every run.
    """

    essential = False

    def __init__(self, folder: Path | str) -> None:
        require("tensorboard", "tensorboard")
        self._folder = str(folder)
        self._writer: Any = None  # as long as it could not be made

    def on_start(self, start: FitStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier process wrote from purge_step on is hidden: what belongs to first_step itself stays.
        self._writer = SummaryWriter(self._folder, purge_step=start.first_step + 1, flush_secs=FLUSH_SECONDS)

    def on_log(self, log: Log) -> None:
        self._add("train", vars(log), log.step, ("loss", "samples_per_second", "data_wait", "memory_bytes"))
        self._add("cache", log.cache, log.step)
        for table, values in log.dynamic.items():
            self._add(f"dynamic/{table}", values, log.step)
        self._add("lr", {"dense": log.dense_lr, "tables": log.table_lr}, log.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._add(evaluation.split, vars(evaluation.metrics), evaluation.step, METRICS)

    def on_end(self, end: FitEnd | None) -> None:
        if end is not None and end.test is not None:
            self._add("test", vars(end.test), end.step, METRICS)
        if self._writer is not None:
            self._writer.close()

    def _add(self, group: str, values: Mapping[str, float | None], step: int, names: Iterable[str] = ()) -> None:
        for name in names or values:
            if values[name] is not None and self._writer is not None:
                self._writer.add_scalar(f"{group}/{name}", values[name], step)


class Profiler(Callback):
    """Profiles a window of at least one step, and writes `path` when the window or training ends."""

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
