"""Segments of a flat tensor, by their lengths or where they start. Needs no compiler."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_offsets(lengths: Tensor) -> Tensor:
    """Where each segment starts, and where the last one ends: int64 `[S + 1]` from integer lengths `[S]`."""
    return torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int64), (1, 0))
