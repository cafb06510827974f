"""Optimizers of tables, and `fused`, one optimizer for all parameters and tables of a model."""

from tritonemb.nn.fuse import ModelOptimizer, fused
from tritonemb.optimizers import (
    FTRL,
    LAMB,
    LARSSGD,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    Custom,
    Optimizer,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)

__all__ = [
    "FTRL", "LAMB", "LARSSGD", "OPTIMIZERS", "SGD", "Adagrad", "Adam", "Custom", "ModelOptimizer", "Optimizer",
    "PartialRowWiseAdam", "PartialRowWiseLAMB", "RowWiseAdagrad", "fused",
]  # fmt: skip
