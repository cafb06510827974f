"""Unpooled lookups: every id keeps its row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.collection import BoundsCheck, Collection
from tritonemb.nn.features import Features
from tritonemb.nn.sent import Groups, SentFeatures
from tritonemb.optimizers import Optimizer
from tritonemb.types import TableConfig


class EmbeddingCollection(Collection):
    """A row for each id, for sequence models; arguments as for `EmbeddingBagCollection`.

    All tables have one embedding dim, and a feature feeds one table. Returns a `KeyedJaggedTensor` with the batch's
    keys, offsets and the rows as values, `[N, dim]`; per-sample weights multiply rows. Values of keys that no table
    knows are zero.

    Raises:
        ValueError: for tables with pooling "mean" or of different dims; for a feature that feeds two tables.
    """

    pooled = False

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
        bounds_check: BoundsCheck = "raise",
        output_dtype: torch.dtype | None = None,
    ) -> None:
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(f"an EmbeddingCollection's tables need one embedding_dim, got {dims}")
        fed: dict[str, str] = {}
        for table in tables:
            if table.pooling == "mean":
                raise ValueError(f"table {table.name!r} has pooling 'mean'; use EmbeddingBagCollection for it")
            for feature in table.feature_names:
                if feature in fed:
                    raise ValueError(
                        f"feature {feature!r} feeds tables {fed[feature]!r} and {table.name!r}; only one can"
                    )
                fed[feature] = table.name
        super().__init__(tables, optimizer, device, bounds_check, output_dtype)

    def forward(self, features: Features | SentFeatures, groups: Groups | None = None) -> KeyedJaggedTensor:
        """Rows `[N, dim]` under the batch's keys and offsets."""
        if isinstance(features, SentFeatures):
            features, groups = self._told(features, groups)
        rows = self.look_up(features, groups)
        return KeyedJaggedTensor(list(features.keys()), rows, offsets=features.offsets())
