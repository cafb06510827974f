"""Optimizers: what is computed for the rows of tables, and `fused`, one optimizer for a whole model."""

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
