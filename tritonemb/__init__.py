"""Embedding tables of any size for recommendation models: trained fast, exactly and deterministically."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tritonemb import nn, optim
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.errors import check_errors
from tritonemb.types import TableConfig

if TYPE_CHECKING:
    from tritonemb.training import Trainer

__version__ = "0.1.0"
__all__ = ["KeyedJaggedTensor", "TableConfig", "Trainer", "check_errors", "nn", "optim"]


def __getattr__(name: str) -> Any:
    """The trainer and what it needs are loaded when first used."""
    if name == "Trainer":
        from tritonemb.training import Trainer

        return Trainer
    raise AttributeError(f"module 'tritonemb' has no attribute {name!r}")
