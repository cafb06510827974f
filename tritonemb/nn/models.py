"""Recommendation models: DLRM and DCNv2 (deep and cross network), and their layers."""

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


class MLP(nn.Sequential):
    """Linear layers with ReLU between them: `[B, in_features]` to `[B, widths[-1]]`.

    Args:
        in_features: width of the input.
        widths: width of each layer.
        last_activation: whether a ReLU follows the last layer.
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
    """Collections of local tables and of tables on embedding servers, with results in the order of the tables.

    Attributes:
        here, on_servers: `EmbeddingBagCollection`s of the local tables and of those on servers; names of `state_dict`.
    """

    def __init__(self, tables: Sequence[TableConfig], optimizer: Optimizer | None, device: Device) -> None:
        super().__init__()
        local, remote = ([t for t in tables if (t.placement == "server") == kind] for kind in (False, True))
        self.here = EmbeddingBagCollection(local, optimizer, device)
        self.on_servers = EmbeddingBagCollection(remote, optimizer, device)
        self.configs = tuple(tables)
        self.embedding_dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        order = [config.name for config in (*local, *remote)]
        self._order = [order.index(table.name) for table in tables]
        self._widths = [config.embedding_dim * len(config.feature_names) for config in (*local, *remote)]

    def forward(self, features: Features) -> Tensor:
        """Return pooled rows `[B, sum of dims]`."""
        columns = torch.cat([self.here(features), self.on_servers(features)], dim=1).split(self._widths, dim=1)
        return torch.cat([columns[index] for index in self._order], dim=1)


def pooled_embeddings(
    tables: Sequence[TableConfig], optimizer: Optimizer | None, device: Device
) -> EmbeddingBagCollection | SplitEmbeddingBagCollection:
    """Create a collection of these tables, for any placements."""
    split = len({table.placement == "server" for table in tables}) > 1
    return (SplitEmbeddingBagCollection if split else EmbeddingBagCollection)(tables, optimizer, device)


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


class CrossNetwork(nn.Module):
    """Low-rank cross layers: `x_{l+1} = x_0 ⊙ (U_l (V_l x_l) + b_l) + x_l` (Wang et al., WWW 2021, equation 2).

    Args:
        width: width of the input and output, `[B, width]`.
        num_layers: number of layers, at least 1.
        low_rank: rank of `U V`; None for a full matrix per layer (equation 1).
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
            # Not for subclasses or replacements of a linear layer, which may compute something else.
            if type(up) is torch.nn.modules.linear.Linear and is_cross_fused(inputs, up.weight):
                crossed = cross(inputs, nn.functional.linear(down(crossed), up.weight), up.bias, crossed)
            else:
                crossed = inputs * up(down(crossed)) + crossed
        return crossed


class DCNv2(nn.Module):
    """DCNv2 in its stacked form (Wang et al., WWW 2021): cross layers over dense features and pooled rows, then an MLP.

    Args:
        tables: tables of any dims.
        num_dense: dense features per sample, at least 0.
        num_cross_layers, low_rank: arguments of the `CrossNetwork`.
        top_mlp: widths of the hidden layers after the cross network.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

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
        """Return logits `[B]`."""
        return self.top(self.cross(torch.cat([dense, self.embeddings(sparse).to(dense.dtype)], dim=1))).squeeze(1)
