"""Embedding tables of any size for recommendation models: trained fast, exactly and deterministically."""

import importlib
from typing import TYPE_CHECKING, Any

from tritonemb import nn, optim
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.fuse import fuse, unfuse
from tritonemb.ops.registry import check_errors
from tritonemb.types import CacheConfig, TableConfig

if TYPE_CHECKING:
    from tritonemb import compiler, data, sharding
    from tritonemb.sharding import HybridParallel
    from tritonemb.training import Trainer

__version__ = "0.1.0"
__all__ = [
    "CacheConfig",
    "HybridParallel",
    "KeyedJaggedTensor",
    "TableConfig",
    "Trainer",
    "check_errors",
    "compiler",
    "data",
    "fuse",
    "nn",
    "optim",
    "sharding",
    "unfuse",
]


def __getattr__(name: str) -> Any:
    """The trainer, sharding, the compiler and what they need are loaded when first used."""
    if name == "Trainer":
        from tritonemb.training import Trainer

        return Trainer
    if name == "HybridParallel":
        from tritonemb.sharding import HybridParallel

        return HybridParallel
    if name in ("compiler", "data", "sharding"):
        return importlib.import_module(f"tritonemb.{name}")
    raise AttributeError(f"module 'tritonemb' has no attribute {name!r}")
