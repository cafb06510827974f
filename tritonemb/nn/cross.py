"""The deep and cross network, version 2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.nn.embedding_bag_collection import EmbeddingBagCollection
from tritonemb.nn.features import Features
from tritonemb.nn.mlp import MLP
from tritonemb.ops.cross import cross, is_fused
from tritonemb.optimizers import Optimizer
from tritonemb.types import TableConfig


class CrossNetwork(nn.Module):
    """Low-rank cross layers: `x_{l+1} = x_0 ⊙ (U_l (V_l x_l) + b_l) + x_l` (Wang et al., WWW 2021, equation 2).

    Args:
        width: of the input and output, `[B, width]`.
        num_layers: at least 1.
        low_rank: rank of `U V`; None for one full matrix a layer (equation 1).
    """

    def __init__(
        self,
        width: int,
        num_layers: int,
        low_rank: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1 or (low_rank is not None and low_rank < 1):
            raise ValueError(
                f"a CrossNetwork needs num_layers and low_rank of at least 1, got {num_layers}, {low_rank}"
            )
        rank = width if low_rank is None else low_rank
        self.down = nn.ModuleList(
            nn.Identity() if low_rank is None else nn.Linear(width, rank, bias=False, device=device)
            for _ in range(num_layers)
        )
        self.up = nn.ModuleList(nn.Linear(rank, width, device=device) for _ in range(num_layers))

    def forward(self, inputs: Tensor) -> Tensor:
        crossed = inputs
        for down, up in zip(self.down, self.up, strict=True):
            if type(up) is nn.Linear and is_fused(inputs, up.weight):  # no subclass: it may compute something else
                crossed = cross(inputs, nn.functional.linear(down(crossed), up.weight), up.bias, crossed)
            else:
                crossed = inputs * up(down(crossed)) + crossed
        return crossed


class DCNv2(nn.Module):
    """DCNv2 in its stacked form (Wang et al., WWW 2021): cross layers over dense features and pooled rows, then an MLP.

    Args:
        tables: of any dims.
        num_dense: dense features a sample, at least 0.
        num_cross_layers, low_rank: of the `CrossNetwork`.
        top_mlp: widths of the layers between cross network and logit.
        optimizer: of the tables, fused into the backward; None for ordinary gradients.

    Shapes: `dense [B, num_dense]` float, `sparse` a `KeyedJaggedTensor`; result: logits `[B]`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int,
        num_cross_layers: int = 3,
        low_rank: int | None = None,
        top_mlp: Sequence[int] = (512, 256),
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_dense < 0:
            raise ValueError(f"num_dense must be at least 0, got {num_dense}")
        self.embeddings = EmbeddingBagCollection(tables, optimizer, device)
        width = num_dense + sum(self.embeddings.embedding_dims)
        self.cross = CrossNetwork(width, num_cross_layers, low_rank, device)
        self.top = MLP(width, [*top_mlp, 1], last_activation=False, device=device)

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Logits `[B]`."""
        inputs = torch.cat([dense, self.embeddings(sparse).to(dense.dtype)], dim=1)
        return self.top(self.cross(inputs)).squeeze(1)
