"""Logits of a model over batches, without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.data.batch import Batch
from tritonemb.ops.errors import check_errors
from tritonemb.training.precision import DTYPES, Precision, autocast

Forward = Callable[..., Any]


def logits_of(forward: Forward, batch: Batch, precision: Precision, device: torch.device) -> Tensor:
    """What `forward(dense, sparse)` says of a batch: logits `[B]`, float32 if they were computed in 16 bits.

    Raises:
        ValueError: they have another shape.
    """
    with autocast(precision, device):
        logits: Tensor = forward(batch.dense, batch.sparse)
    if logits.shape != batch.labels.shape:
        raise ValueError(f"the model must return logits [{len(batch)}], got shape {list(logits.shape)}")
    return logits.float() if logits.dtype in DTYPES.values() else logits


@torch.no_grad()
def predict(
    model: nn.Module,
    batches: Iterable[Batch | tuple[Batch, Tensor]],
    device: torch.device,
    precision: Precision = "fp32",
    forward: Forward | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and labels `[N]` of all samples, on the CPU, by the model in evaluation mode.

    Args:
        batches: those that are on the device already come with their labels on the CPU.
        forward: what to call in place of the model, for example a compiled form of it.
    """
    was_training = model.training
    model.eval()
    logits, labels = _Growing(device), _Growing(torch.device("cpu"))
    try:
        for item in batches:
            batch, its_labels = item if isinstance(item, tuple) else (item, item.labels)
            there = batch.to(device, non_blocking=True)
            logits.append(logits_of(model if forward is None else forward, there, precision, device))
            labels.append(its_labels)
        check_errors(device)
    finally:
        model.train(was_training)
    return logits.values.cpu(), labels.values.cpu()


class _Growing:
    """Numbers of many batches, one after the other.

    A small tensor kept from every batch would lie between the large ones that come and go, and keep the allocator from
    using their room again: 160 bytes a sample, measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(1 << 16, device=device)
        self._used = 0

    @property
    def values(self) -> Tensor:
        return self._room[: self._used]

    def append(self, numbers: Tensor) -> None:
        end = self._used + numbers.shape[0]
        if end > self._room.shape[0]:
            larger = torch.empty(max(end, 2 * self._room.shape[0]), device=self._room.device)
            larger[: self._used] = self.values
            self._room = larger
        self._room[self._used : end] = numbers
        self._used = end
