"""Logits of a model over batches, without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tritonemb.data.batch import Batch
from tritonemb.nn.errors import check_errors
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
    batches: Iterable[Batch],
    device: torch.device,
    precision: Precision = "fp32",
    forward: Forward | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits and labels `[N]` of all samples, on the CPU, by the model in evaluation mode.

    Args:
        forward: what to call in place of the model, for example a compiled form of it.
    """
    was_training = model.training
    model.eval()
    logits, labels = [torch.empty(0)], [torch.empty(0)]
    try:
        for batch in batches:
            there = batch.to(device, non_blocking=True)
            logits.append(logits_of(forward or model, there, precision, device).float())
            labels.append(batch.labels.clone())
        check_errors(device)
    finally:
        model.train(was_training)
    return torch.cat([part.cpu() for part in logits]), torch.cat(labels)
