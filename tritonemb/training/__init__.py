"""The trainer, its metrics, and runs from a configuration."""

from tritonemb.training.metrics import Metrics, binary_metrics
from tritonemb.training.trainer import FitResult, Trainer

__all__ = ["FitResult", "Metrics", "Trainer", "binary_metrics"]
