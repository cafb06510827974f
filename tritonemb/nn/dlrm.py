"""The deep learning recommendation model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.nn.embedding_bag_collection import EmbeddingBagCollection
from tritonemb.nn.features import Features
from tritonemb.nn.interaction import DotInteraction
from tritonemb.nn.mlp import MLP
from tritonemb.optimizers import Optimizer
from tritonemb.types import TableConfig


class DLRM(nn.Module):
    """DLRM (Naumov et al., arXiv:1906.00091): dense features through an MLP, sparse ones through tables, pairwise dots.

    Args:
        tables: all of one embedding dim.
        num_dense: dense features a sample, at least 1.
        bottom_mlp: widths of the dense part before its last layer, which has the embedding dim.
        top_mlp: widths of the layers before the logit.
        optimizer: of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; result: logits `[B]`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int,
        bottom_mlp: Sequence[int] = (512, 256),
        top_mlp: Sequence[int] = (512, 256),
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(f"DLRM's tables need one embedding_dim, got {dims}")
        self.embeddings = EmbeddingBagCollection(tables, optimizer, device)
        dim = tables[0].embedding_dim
        self.bottom = MLP(num_dense, [*bottom_mlp, dim], device=device)
        self.interaction = DotInteraction(len(self.embeddings.embedding_dims))
        self.top = MLP(dim + self.interaction.num_pairs, [*top_mlp, 1], last_activation=False, device=device)

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Logits `[B]`."""
        pooled = self.embeddings(sparse)
        vector = self.bottom(dense)
        return self.top(self.interaction(vector, pooled.to(vector.dtype))).squeeze(1)
