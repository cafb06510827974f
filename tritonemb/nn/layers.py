"""Layers of recommendation models: DLRM's feature interaction, the multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.ops.interaction import interaction, is_fused


class DotInteraction(nn.Module):
    """Dot products of all pairs of feature vectors, behind the dense vector, in one kernel; differentiable once.

    Source: Naumov et al., arXiv:1906.00091, section 2.

    Shapes: `dense [B, D]`, `sparse [B, F * D]` or `[B, F, D]`; result `[B, D + F * (F + 1) / 2]`: the dense vector,
    then the products below the diagonal of the `F + 1` vectors, row by row.

    Args:
        num_features: `F`, sparse vectors a sample.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features must be at least 1, got {num_features}")
        self.num_features = num_features

    @property
    def num_pairs(self) -> int:
        """Products in the result."""
        return self.num_features * (self.num_features + 1) // 2

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Raises ValueError where `sparse` does not hold `num_features` vectors of the dense vector's width."""
        batch_size, dim = dense.shape
        if sparse.numel() != batch_size * self.num_features * dim:
            raise ValueError(
                f"sparse must be [{batch_size}, {self.num_features} * {dim}] to go with dense {tuple(dense.shape)}, "
                f"got {tuple(sparse.shape)}"
            )
        if is_fused(dense, sparse):
            return interaction(dense, sparse.reshape(batch_size, self.num_features * dim))
        vectors = torch.cat([dense.unsqueeze(1), sparse.reshape(batch_size, self.num_features, dim)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        num_vectors = self.num_features + 1
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
        return torch.cat([dense, products.index_select(1, row * num_vectors + column)], dim=1)


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
