"""The perceptron that recommendation models are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class MLP(nn.Sequential):
    """Linear layers with ReLU between them: `[B, in_features]` to `[B, widths[-1]]`.

    Args:
        in_features: width of the input.
        widths: width of each layer.
        last_activation: whether a ReLU follows the last layer too.
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        last_activation: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        if not widths or any(width < 1 for width in widths) or in_features < 1:
            raise ValueError(f"an MLP needs positive widths, got {in_features} -> {list(widths)}")
        layers: list[nn.Module] = []
        for index, width in enumerate(widths):
            layers.append(nn.Linear(in_features, width, device=device))
            if last_activation or index < len(widths) - 1:
                layers.append(nn.ReLU())
            in_features = width
        super().__init__(*layers)
