"""Two-tower model of retrieval: a vector per user and one per item (Yi et al., RecSys 2019, section 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tritonemb.jagged import Features
from tritonemb.models.pooled import PooledModel
from tritonemb.nn.layers import MLP
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig
from tritonemb.utils import join_names


class Tower(PooledModel):
    """Tower from features to vectors `[B, dim]`: dense features and pooled rows, then an MLP unless it has no layers.

    Args:
        mlp: widths of the layers, of which the last is `dim`; without layers the inputs are the vectors.
        unit: whether vectors have length 1.

    Other arguments are those of `PooledModel`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int = 0,
        mlp: Sequence[int] = (),
        unit: bool = False,
        optimizer: Optimizer | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(tables, num_dense, optimizer, device)
        self.mlp = MLP(self.width, mlp, last_activation=False, device=device) if mlp else nn.Identity()
        self.dim, self._unit, self._num_dense = mlp[-1] if mlp else self.width, unit, num_dense

    def forward(self, sparse: Features, dense: Tensor | None = None) -> Tensor:
        """Return vectors `[B, dim]`; `dense` is `[B, num_dense]`, and may be None if there are no dense features."""
        if dense is None and self._num_dense:
            raise ValueError(f"the tower has {self._num_dense} dense features; pass dense [B, {self._num_dense}]")
        vectors: Tensor = self.mlp(self.embeddings(sparse) if dense is None else self.concatenated(dense, sparse))
        return F.normalize(vectors, dim=1) if self._unit else vectors


class TwoTower(nn.Module):
    """Two-tower model: the score of a user and an item is the dot product of their vectors.

    Without layers and with a table of users and one of items this is matrix factorization.

    Args:
        tables: tables of any dims; all features of a table are of one tower.
        num_dense: dense features per sample, which are of the user tower.
        user_features: features of the user tower.
        top_mlp: widths of the layers of each tower; without layers the pooled rows of both must have one width.
        temperature: divisor of the scores of unit vectors; None for dot products of vectors of any length.
        optimizer: optimizer of the tables, fused into the backward; None for ordinary gradients.

    Attributes:
        users, items: the towers.

    Shapes: `dense [B, num_dense]`, `sparse` with all features: logits `[B]`, for labels of a log. With `items`, which
    has the features of N items: vectors `[B, dim]` and `[N, dim]`, for the losses of `tritonemb.models.losses`.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        num_dense: int = 0,
        user_features: Sequence[str] = (),
        top_mlp: Sequence[int] = (512, 256),
        temperature: float | None = None,
        optimizer: Optimizer | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        names = [name for table in tables for name in table.feature_names]
        if unknown := [name for name in user_features if name not in names]:
            raise ValueError(f"user_features has {unknown[0]!r}, which no table has: {join_names(names)}")
        user_tables = [table for table in tables if {*table.feature_names} & {*user_features}]
        item_tables = [table for table in tables if {*table.feature_names} - {*user_features}]
        if mixed := [table.name for table in user_tables if table in item_tables]:
            raise ValueError(f"table {mixed[0]!r} has features of both towers; use a separate table for each")
        if not user_tables or not item_tables:
            raise ValueError(
                f"user_features must be some but not all of {join_names(names)}, got {list(user_features)}"
            )
        if temperature is not None and not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        self.temperature = 1.0 if temperature is None else temperature
        self.users = Tower(user_tables, num_dense, top_mlp, temperature is not None, optimizer, device)
        self.items = Tower(item_tables, 0, top_mlp, temperature is not None, optimizer, device)
        if self.users.dim != self.items.dim:
            raise ValueError(f"without top_mlp both towers need one width, got {self.users.dim} and {self.items.dim}")

    def forward(
        self, dense: Tensor | None, sparse: Features, items: Features | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits `[B]`, or with `items` the vectors of users and items."""
        users, vectors = self.users(sparse, dense), self.items(sparse if items is None else items)
        return torch.linalg.vecdot(users, vectors) / self.temperature if items is None else (users, vectors)
