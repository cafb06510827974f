"""Collections of pooled tables for models, for any placements."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features
from tritonemb.nn.collections import EmbeddingBagCollection
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig


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


class PooledModel(nn.Module):
    """Base of models over one vector per sample: its dense features, then its pooled rows.

    Args:
        tables: tables of any dims.
        num_dense: dense features per sample, at least 0.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.
    """

    def __init__(
        self, tables: Sequence[TableConfig], num_dense: int, optimizer: Optimizer | None = None, device: Device = None
    ) -> None:
        super().__init__()
        if num_dense < 0:
            raise ValueError(f"num_dense must be at least 0, got {num_dense}")
        self.embeddings = pooled_embeddings(tables, optimizer, device)
        self.width = num_dense + sum(self.embeddings.embedding_dims)

    def concatenated(self, dense: Tensor, sparse: Features) -> Tensor:
        """Return dense features and pooled rows `[B, width]`."""
        return torch.cat([dense, self.embeddings(sparse).to(dense.dtype)], dim=1)
