"""Curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tritonemb.training.callbacks.base import Callback, Evaluation, FitEnd, FitStart, Log
from tritonemb.training.metrics import Metrics
from tritonemb.utils import require

FLUSH_SECONDS = 10


class TensorBoard(Callback):
    """Writes scalars over steps: train/loss, train/samples_per_second, train/data_wait, train/memory_bytes, lr/dense,
    lr/tables, and auc, log_loss and normalized_entropy under the name of each split. For cached tables also cache/rows,
    cache/hit_rate, cache/read, cache/written and cache/stall; for a table on disk with a host cache cache/host_hits,
    cache/disk_read and cache/disk_written.

    Where a run is resumed from a checkpoint, what was written after that step is hidden.

    Args:
        folder: of the event files, one of its own for every run.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    essential = False

    def __init__(self, folder: Path | str) -> None:
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer = SummaryWriter
        self._folder = str(folder)
        self._writer: SummaryWriter | None = None

    def on_start(self, start: FitStart) -> None:
        # What an earlier process wrote from purge_step on is hidden: what belongs to first_step itself stays.
        self._writer = self._make_writer(self._folder, purge_step=start.first_step + 1, flush_secs=FLUSH_SECONDS)

    def on_log(self, log: Log) -> None:
        for name in ("loss", "samples_per_second", "data_wait", "memory_bytes"):
            self._add(f"train/{name}", getattr(log, name), log.step)
        for name, value in log.cache.items():
            self._add(f"cache/{name}", value, log.step)
        self._add("lr/dense", log.dense_lr, log.step)
        self._add("lr/tables", log.table_lr, log.step)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self._add_metrics(evaluation.split, evaluation.metrics, evaluation.step)

    def on_end(self, end: FitEnd | None) -> None:
        if end is not None and end.test is not None:
            self._add_metrics("test", end.test, end.step)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_metrics(self, split: str, metrics: Metrics, step: int) -> None:
        for name in ("auc", "log_loss", "normalized_entropy"):
            self._add(f"{split}/{name}", getattr(metrics, name), step)

    def _add(self, name: str, value: float | None, step: int) -> None:
        if self._writer is not None and value is not None:
            self._writer.add_scalar(name, value, step)
