"""DeepFM: a factorization machine and an MLP over the same embeddings (Guo et al., IJCAI 2017, arXiv:1703.04247)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features
from tritonemb.models.pooled import PooledModel
from tritonemb.nn.layers import MLP
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


def factorization_machine(weights: Tensor, factors: Tensor) -> Tensor:
    """Sum weights `[B, F]` and dot products of all pairs of factors `[B, F, K]`, in linear time; result `[B]`.

    Source: Rendle, ICDM 2010, lemma 3.1: `sum_{i<j} <v_i, v_j> = (|sum_i v_i|^2 - sum_i |v_i|^2) / 2`.
    """
    pairs = factors.sum(dim=1).square() - (factors * factors).sum(dim=1)
    return weights.sum(dim=1) + pairs.sum(dim=1) / 2


class DeepFM(PooledModel):
    """DeepFM: `logit = sum_i w_i x_i + sum_{i<j} <v_i, v_j> x_i x_j + MLP(v_1 x_1, ..., v_F x_F)`.

    The first column of a row is its weight `w_i`, the others are its factors `v_i`: one lookup reads both, and a row of
    a dynamic table is found once. Dense features have such rows too, which they multiply. The bias is that of the MLP.

    Args:
        tables: tables of one embedding dim, at least 2.
        num_dense: dense features per sample, at least 0.
        top_mlp: widths of the hidden layers of the MLP.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; result: logits `[B]`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int,
        top_mlp: Sequence[int] = (512, 256),
        optimizer: Optimizer | None = None,
        device: Device = None,
    ) -> None:
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1 or min(dims.values(), default=2) < 2:
            raise ValueError(f"DeepFM's tables need one embedding_dim of at least 2, got {dims}")
        super().__init__(tables, num_dense, optimizer, device)
        self.dim, num_fields = tables[0].embedding_dim, num_dense + len(self.embeddings.embedding_dims)
        self.dense_rows = nn.Parameter(torch.empty(num_dense, self.dim, device=device))
        self.deep = MLP(num_fields * (self.dim - 1), [*top_mlp, 1], last_activation=False, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the rows of dense features with initial values."""
        nn.init.normal_(self.dense_rows, std=0.01)

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return logits `[B]`."""
        rows = dense[:, :, None] * self.dense_rows, self.embeddings(sparse).to(dense.dtype).unflatten(1, (-1, self.dim))
        # Split before they are joined, so that factors are contiguous: others take longer, forward and backward.
        weights, factors = (
            torch.cat(parts, dim=1) for parts in zip(*(r.split((1, self.dim - 1), dim=2) for r in rows), strict=True)
        )
        return factorization_machine(weights.squeeze(2), factors) + self.deep(factors.flatten(1)).squeeze(1)
