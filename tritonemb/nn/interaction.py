"""DLRM's feature interaction."""

from __future__ import annotations

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
