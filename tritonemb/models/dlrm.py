"""DLRM: deep learning recommendation model (Naumov et al., arXiv:1906.00091)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features
from tritonemb.models.pooled import pooled_embeddings
from tritonemb.nn.layers import MLP
from tritonemb.ops.interaction import interaction, is_fused
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


class DotInteraction(nn.Module):
    """Dot products of all pairs of feature vectors, after the dense vector, in one kernel; differentiable once.

    Source: Naumov et al., arXiv:1906.00091, section 2.

    Shapes: `dense [B, D]`, `sparse [B, F * D]` or `[B, F, D]`; result `[B, D + F * (F + 1) / 2]`: the dense vector,
    then the lower triangle of the products of the `F + 1` vectors, row-major.

    Args:
        num_features: number of sparse vectors per sample, `F`.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        if num_features < 1:
            raise ValueError(f"num_features must be at least 1, got {num_features}")
        self.num_features = num_features
        self.num_pairs = num_features * (num_features + 1) // 2  # products in the result

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return dense vector and products; raise ValueError unless `sparse` has `num_features` vectors of its
        width."""
        batch_size, dim = dense.shape
        if sparse.numel() != batch_size * self.num_features * dim:
            raise ValueError(
                f"sparse must be [{batch_size}, {self.num_features} * {dim}] for dense {tuple(dense.shape)}, "
                f"got {tuple(sparse.shape)}"
            )
        if is_fused(dense, sparse):
            return interaction(dense, sparse.reshape(batch_size, self.num_features * dim))
        vectors = torch.cat([dense.unsqueeze(1), sparse.reshape(batch_size, self.num_features, dim)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        num_vectors = self.num_features + 1
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1, device=dense.device)
        return torch.cat([dense, products.index_select(1, row * num_vectors + column)], dim=1)


class DLRM(nn.Module):
    """DLRM (Naumov et al., arXiv:1906.00091): dense features through an MLP, sparse ones through tables, pairwise dots.

    Without dense features there is no bottom MLP (`bottom` is None): the top MLP gets the pooled vectors in place of
    the dense vector, and the dot products of all their pairs.

    Args:
        tables: tables of one embedding dim.
        num_dense: dense features per sample; if 0, the tables must have at least two features.
        bottom_mlp, top_mlp: widths of the hidden layers; the outputs are the dense vector and the logit.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; result: logits `[B]`.
    """

    def __init__(
        self, tables: Sequence[TableConfig], num_dense: int, bottom_mlp: Sequence[int] = (512, 256),
        top_mlp: Sequence[int] = (512, 256), optimizer: Optimizer | None = None, device: Device = None,
    ) -> None:  # fmt: skip
        super().__init__()
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(f"DLRM's tables need one embedding_dim, got {dims}")
        self.embeddings = pooled_embeddings(tables, optimizer, device)
        dim, num_features = tables[0].embedding_dim, len(self.embeddings.embedding_dims)
        if not num_dense and num_features == 1:
            raise ValueError("DLRM without dense features needs at least two sparse features, got 1; use DCNv2")
        self.bottom = MLP(num_dense, [*bottom_mlp, dim], device=device) if num_dense else None
        self.interaction = DotInteraction(num_features if num_dense else num_features - 1)
        self.top = MLP(
            dim * (1 if num_dense else num_features) + self.interaction.num_pairs, [*top_mlp, 1], False, device=device
        )

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return logits `[B]`."""
        pooled = self.embeddings(sparse)
        if self.bottom is not None:
            vector = self.bottom(dense)
            return self.top(self.interaction(vector, pooled.to(vector.dtype))).squeeze(1)
        first, remaining = pooled.to(dense.dtype).tensor_split([self.embeddings.configs[0].embedding_dim], dim=1)
        return self.top(torch.cat([self.interaction(first, remaining), remaining], dim=1)).squeeze(1)
