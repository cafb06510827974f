"""Trainer, metrics, checkpoints, and training runs from a configuration."""

from tritonemb.comm.group import RankFailed
from tritonemb.training.callbacks import Callback
from tritonemb.training.checkpoint import CheckpointError
from tritonemb.training.config import CheckpointOptions
from tritonemb.training.loop import FitResult
from tritonemb.training.metrics import Metrics, binary_metrics
from tritonemb.training.ranking import RankingMetrics, top_items
from tritonemb.training.ranks import Interrupted
from tritonemb.training.schedule import Schedule
from tritonemb.training.trainer import Trainer

__all__ = [
    "Callback", "CheckpointError", "CheckpointOptions", "FitResult", "Interrupted", "Metrics", "RankFailed",
    "RankingMetrics", "Schedule", "Trainer", "binary_metrics", "top_items",
]  # fmt: skip
