"""Pooled lookups of many tables in one call.

Unpooled lookups: every id keeps its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.optimizers import Optimizer
from tritonemb.tables.lookup import Features
from tritonemb.tables.prefetched import Groups, SentFeatures
from tritonemb.tables.table_set import BoundsCheck, TableSet
from tritonemb.types import TableConfig


class EmbeddingBagCollection(TableSet):
    """Embedding bags of many tables, looked up, and with an `optimizer` updated, in one pass.

    Args:
        tables: pooled tables ("sum" or "mean"); several features may share a table, a feature may feed several tables.
        optimizer: with one of `tritonemb.optim`, the backward updates the tables exactly, deterministically and in
            place, and their `.grad` stays None. Without, they are ordinary parameters with ordinary (dense) gradients.
        device: where tables live.
        bounds_check: an id out of range raises ("raise"); "ignore" skips the report: such an id reads as zero and is
            not updated, whatever is chosen.
        output_dtype: of the result; by default the tables' own, float32 if they differ.

    Shapes:
        features: a `KeyedJaggedTensor` (or TorchRec's) with all `feature_names`, in any order; int32 or int64 ids,
            optional weights. Result: `[B, sum of dims]`, columns by table, then by that table's features.

    A compiled module must not be called again before the backward of its last call, unless both calls are in one
    compiled region: the update is in place. Uncompiled, each backward updates with its own gradient.

    Raises:
        ValueError: for missing features, ids out of range, offsets that do not fit, naming where.
        TypeError: for ids that are not int32 or int64.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
        bounds_check: BoundsCheck = "raise",
        output_dtype: torch.dtype | None = None,
    ) -> None:
        for table in tables:
            if isinstance(table, TableConfig) and table.pooling == "none":
                raise ValueError(f"table {table.name!r} has pooling 'none'; use EmbeddingCollection for it")
        super().__init__(tables, optimizer, device, bounds_check, output_dtype, pooled=True)

    @property
    def embedding_dims(self) -> list[int]:
        """Width of each part of the result, in order: `pooled.split(collection.embedding_dims, dim=1)`."""
        return [config.embedding_dim for config in self.configs for _ in config.feature_names]

    def forward(self, features: Features | SentFeatures, groups: Groups | None = None) -> Tensor:
        """`[B, sum of dims]`. `groups`, from `self.group(features)`, saves grouping the ids again."""
        if isinstance(features, SentFeatures):
            features, groups = self._told(features, groups)
        return self.look_up(features, groups)


class EmbeddingCollection(TableSet):
    """A row for each id, for sequence models; arguments as for `EmbeddingBagCollection`.

    All tables have one embedding dim, and a feature feeds one table. Returns a `KeyedJaggedTensor` with the batch's
    keys, offsets and the rows as values, `[N, dim]`; per-sample weights multiply rows. Values of keys that no table
    knows are zero.

    Raises:
        ValueError: for tables with pooling "mean" or of different dims; for a feature that feeds two tables.
    """

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
        super().__init__(tables, optimizer, device, bounds_check, output_dtype, pooled=False)

    def forward(self, features: Features | SentFeatures, groups: Groups | None = None) -> KeyedJaggedTensor:
        """Rows `[N, dim]` under the batch's keys and offsets."""
        if isinstance(features, SentFeatures):
            features, groups = self._told(features, groups)
        rows = self.look_up(features, groups)
        return KeyedJaggedTensor(list(features.keys()), rows, offsets=features.offsets())
