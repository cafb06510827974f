"""`te.optim.fused` as training frameworks use it: with a `GradScaler`, and by their own rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tritonemb as te

pytestmark = pytest.mark.public


def test_a_refused_gradient_scaler_leaves_the_optimizer_usable():
    """GradScaler puts its scale on the optimizer, and does not take it away again when `step` raises."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    optimizer = te.optim.fused(model, te.optim.SGD(lr=0.1))
    ids = torch.tensor([1, 2])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(ids).sum()).backward()
    with pytest.raises(ValueError, match="GradScaler"):
        scaler.step(optimizer)
    before = model[1].weight.detach().clone()
    optimizer.zero_grad()
    model(ids).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
