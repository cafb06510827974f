"""Recommendation models, DLRM and the deep and cross network, version 2, and their layers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features
from tritonemb.nn.collections import EmbeddingBagCollection
from tritonemb.ops.interaction import cross, interaction, is_cross_fused, is_fused
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


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
        self.num_pairs = num_features * (num_features + 1) // 2  # products in the result

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
        self, in_features: int, widths: Sequence[int], last_activation: bool = True, device: Device = None
    ) -> None:
        if not widths or any(width < 1 for width in widths) or in_features < 1:
            raise ValueError(f"an MLP needs positive widths, got {in_features} -> {list(widths)}")
        layers: list[nn.Module] = []
        for pair in pairwise([in_features, *widths]):
            layers += [nn.Linear(*pair, device=device), nn.ReLU()]
        super().__init__(*(layers if last_activation else layers[:-1]))


class SplitEmbeddingBagCollection(nn.Module):
    """Tables of which some are on embedding servers: two collections, whose results stand in the order of the tables.

    Attributes:
        here, on_servers: the two, each an `EmbeddingBagCollection`.
    """

    def __init__(self, tables: Sequence[TableConfig], optimizer: Optimizer | None, device: Device) -> None:
        super().__init__()
        here, there = ([t for t in tables if (t.placement == "server") == kind] for kind in (False, True))
        self.here = EmbeddingBagCollection(here, optimizer, device)
        self.on_servers = EmbeddingBagCollection(there, optimizer, device)
        self.configs = tuple(tables)
        self.embedding_dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        order = [config.name for config in (*here, *there)]
        self._places = [order.index(table.name) for table in tables]
        self._widths = [config.embedding_dim * len(config.feature_names) for config in (*here, *there)]

    def forward(self, features: Features) -> Tensor:
        """`[B, sum of dims]`."""
        found = torch.cat([self.here(features), self.on_servers(features)], dim=1).split(self._widths, dim=1)
        return torch.cat([found[place] for place in self._places], dim=1)


def pooled_embeddings(
    tables: Sequence[TableConfig], optimizer: Optimizer | None, device: Device
) -> EmbeddingBagCollection | SplitEmbeddingBagCollection:
    """A collection of these tables, wherever they are."""
    split = len({table.placement == "server" for table in tables}) > 1
    return (SplitEmbeddingBagCollection if split else EmbeddingBagCollection)(tables, optimizer, device)


class DLRM(nn.Module):
    """DLRM (Naumov et al., arXiv:1906.00091): dense features through an MLP, sparse ones through tables, pairwise dots.

    Without dense features there is no bottom MLP (`bottom` is None): the top MLP gets the pooled vectors themselves in
    place of the dense vector, and the dots of all their pairs.

    Args:
        tables: all of one embedding dim.
        num_dense: dense features a sample; if 0, the tables have two features at least.
        bottom_mlp, top_mlp: widths of the layers before the last: the dense vector, of the embedding dim; the logit.
        optimizer: of the tables, fused into the backward; None for ordinary gradients.

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
            raise ValueError("DLRM without dense features needs two sparse features at least, got 1; use DCNv2")
        self.bottom = MLP(num_dense, [*bottom_mlp, dim], device=device) if num_dense else None
        self.interaction = DotInteraction(num_features if num_dense else num_features - 1)
        self.top = MLP(
            dim * (1 if num_dense else num_features) + self.interaction.num_pairs, [*top_mlp, 1], False, device=device
        )

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Logits `[B]`."""
        pooled = self.embeddings(sparse)
        if self.bottom is not None:
            vector = self.bottom(dense)
            return self.top(self.interaction(vector, pooled.to(vector.dtype))).squeeze(1)
        first, others = pooled.to(dense.dtype).tensor_split([self.embeddings.configs[0].embedding_dim], dim=1)
        return self.top(torch.cat([self.interaction(first, others), others], dim=1)).squeeze(1)


class CrossNetwork(nn.Module):
    """Low-rank cross layers: `x_{l+1} = x_0 ⊙ (U_l (V_l x_l) + b_l) + x_l` (Wang et al., WWW 2021, equation 2).

    Args:
        width: of the input and output, `[B, width]`.
        num_layers: at least 1.
        low_rank: rank of `U V`; None for one full matrix a layer (equation 1).
    """

    def __init__(self, width: int, num_layers: int, low_rank: int | None = None, device: Device = None) -> None:
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
            # No subclass of a linear layer, nor what was put in its place: it may compute something else.
            if type(up) is torch.nn.modules.linear.Linear and is_cross_fused(inputs, up.weight):
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
        self, tables: Sequence[TableConfig], num_dense: int, num_cross_layers: int = 3, low_rank: int | None = None,
        top_mlp: Sequence[int] = (512, 256), optimizer: Optimizer | None = None, device: Device = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_dense < 0:
            raise ValueError(f"num_dense must be at least 0, got {num_dense}")
        self.embeddings = pooled_embeddings(tables, optimizer, device)
        width = num_dense + sum(self.embeddings.embedding_dims)
        self.cross = CrossNetwork(width, num_cross_layers, low_rank, device)
        self.top = MLP(width, [*top_mlp, 1], last_activation=False, device=device)

    def forward(self, dense: Tensor, sparse: Features) -> Tensor:
        """Logits `[B]`."""
        return self.top(self.cross(torch.cat([dense, self.embeddings(sparse).to(dense.dtype)], dim=1))).squeeze(1)
