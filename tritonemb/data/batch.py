"""What a model is fed with at each step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritonemb.jagged import KeyedJaggedTensor


@dataclass(frozen=True)
class Batch:
    """B samples: `dense` `[B, num_dense]` float32, `sparse` ids per feature, `labels` `[B]` float32 in {0, 1}."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())
