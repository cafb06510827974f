"""`EmbeddingBagCollection` and `EmbeddingCollection`: lookups of many tables in one call, pooled or a row an id."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features, KeyedJaggedTensor
from tritonemb.optimizers import Optimizer
from tritonemb.tables.cache import RowCache
from tritonemb.tables.cache_storage import CacheStatistics
from tritonemb.tables.cached_table import CachedTable
from tritonemb.tables.fused_update import FusedGroup
from tritonemb.tables.lookup import PrefetchedFeatures
from tritonemb.tables.optimizer import FusedOptimizer, States
from tritonemb.tables.table import Table
from tritonemb.tables.table_set import BoundsCheck, Groups, TableSet, check_tables
from tritonemb.types import Device, TableConfig


class FusedModule(nn.Module):
    """What modules of tables share that may have a fused optimizer."""

    _optimized: TableSet | FusedGroup | None = None  # what their backward updates
    _fused_optimizer: FusedOptimizer | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """The fused optimizer, or None."""
        return None if self._optimized is None else self._optimized.optimizer

    @property
    def fused_optimizer(self) -> FusedOptimizer | None:
        """The fused optimizer as a `torch.optim.Optimizer`, or None for ordinary parameters."""
        if self._optimized is not None and self._fused_optimizer is None:
            self._fused_optimizer = self._optimized.view(self._states)
        return self._fused_optimizer

    def _states(self) -> States:
        """Each table's name, weight, and the step and states of its fused optimizer by name."""
        raise NotImplementedError

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the fused optimizer; nothing is recompiled.

        ValueError without a fused optimizer, or for a negative or non-finite rate.
        """
        if self._optimized is None:
            raise ValueError("this module has no fused optimizer; set the learning rate of the one you made")
        self._optimized.set_learning_rate(lr)

    @property
    def current_learning_rate(self) -> float:
        """What the fused optimizer's learning rate was last set to; the update reads the tensor `learning_rate`."""
        return 0.0 if self._optimized is None else self._optimized.current_learning_rate

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of several micro-batches and apply them once, when the block ends.

        The tables are then bitwise identical to those after one step on all samples as one batch. Leaving the block
        with an exception discards what was accumulated. A backward must run inside the block. In a collection every
        micro-batch must have the same keys in the same order; a single table is not for compiled modules, whose call
        raises RuntimeError. ValueError without a fused optimizer.
        """
        if self._optimized is None:
            raise ValueError("accumulate() is for a fused optimizer; ordinary gradients add up by themselves")
        return self._optimized.accumulate()

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own optimizer view when it needs it."""
        return {**self.__dict__, "_fused_optimizer": None}


class TableCollection(FusedModule):
    """A module that owns a `TableSet`: it registers tables and counters, which move and are saved with it.

    Attributes:
        configs: in the order they were given.
        feature_names: the keys that a batch must have, each once, in the order of tables.
    """

    step: Tensor
    skipped: Tensor
    pending: Tensor

    _pooled: ClassVar[bool]

    def __init__(
        self, tables: Sequence[TableConfig], optimizer: Optimizer | None = None, device: Device = None,
        bounds_check: BoundsCheck = "raise", output_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_tables(tables, optimizer)
        self._check(tables)
        table_set = TableSet(tables, optimizer, device, bounds_check, output_dtype, pooled=self._pooled)
        self.configs = table_set.configs
        self.feature_names = table_set.feature_names
        self._optimized = table_set if table_set.optimizer is not None else None
        for name, counter in table_set.counters.items():
            self.register_buffer(name, counter, persistent=name == "step")
        # Not add_module, which would refuse a table that is called like a method.
        self._modules.update(table_set.by_name)
        self._share_with(table_set)

    def _check(self, tables: Sequence[TableConfig]) -> None:
        """Raise for tables that this kind of collection cannot have."""

    @property
    def tables(self) -> list[Table]:
        """In the order they were given."""
        return self.table_set.tables

    @property
    def cache(self) -> RowCache | None:
        """Of those tables whose rows are not all on the device; None if there are none."""
        return self.table_set.cache

    def __getitem__(self, table: str) -> Table:
        """The table of that name, for example for its `weight`; KeyError where there is none."""
        if table not in self._modules:
            raise KeyError(f"there is no table {table!r}, only {', '.join(self._modules)}")
        return self.table_set.by_name[table]

    def _share_with(self, table_set: TableSet) -> None:
        """Give it the module's own dictionaries, so that both always have the same tensors and tables."""
        self.table_set = table_set
        table_set.counters, table_set.by_name = self._buffers, self._modules

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()
        replica._share_with(copy.copy(self.table_set))
        return replica

    def _states(self) -> States:
        return self.table_set.optimizer_states()

    def scale_accumulated(self, factor: float) -> bool:
        """Multiply the gradients accumulated so far by `factor`; returns whether all of them are finite then.

        For loss scaling: called in the block of `accumulate`, before it ends. Waits for the device.
        """
        return self.table_set.scale_accumulated(factor)

    def skipped_rows(self) -> dict[str, int]:
        """For `on_nonfinite="skip"`: how many row updates each table has skipped so far."""
        names = [config.name for config in self.configs]
        return {} if self.optimizer is None else dict(zip(names, self.skipped.tolist(), strict=True))

    def cache_statistics(self) -> dict[str, CacheStatistics]:
        """What the caches have done so far, by table in host memory or on disk."""
        return {} if self.cache is None else self.cache.statistics()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train the tables, or freeze them, on embedding servers too, where `requires_grad_` of a model has no effect.

        A lookup trains its table if the weight requires a gradient then.
        """
        for table in self.tables:
            table.requires_grad_(requires_grad)
        return self

    def reset_parameters(self) -> None:
        """Initialise all tables, e.g. after `to_empty`."""
        for table in self.tables:
            table.reset_parameters()
        if self.optimizer is not None:
            self.set_learning_rate(self.optimizer.lr)
            for counter in (self.step, self.skipped, self.pending):
                counter.zero_()

    def group(self, features: Features) -> Groups:
        """The distinct rows of a batch, from its ids alone; may be computed ahead, by another thread, for `forward`.

        Rows of tables in host memory or on disk are pinned on the device until the batch's backward has run, or, where
        gradients are not recorded, until it has been looked up; a second lookup prefetches them again.
        """
        return self.table_set.group(features)

    def _look_up(self, features: Features | PrefetchedFeatures, groups: Groups | None) -> tuple[Features, Tensor]:
        if isinstance(features, PrefetchedFeatures):
            features, groups = features.of(self.table_set)
        return features, self.table_set.look_up(features, groups)

    def __setattr__(self, name: str, value: Any) -> None:
        """A table may be called like an attribute, say "training", which is set beside it."""
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Casting a module to 16 bits leaves the learning rate float32."""
        for table in self.tables:
            if isinstance(table, CachedTable):
                table._apply(fn)  # raises before others have been moved
        rate = self._buffers.get("learning_rate")
        super()._apply(fn, recurse)
        self.table_set.forget_layouts()
        if rate is not None:
            self._buffers["learning_rate"] = rate.to(self.step.device)
        return self


class EmbeddingBagCollection(TableCollection):
    """Embedding bags of many tables, looked up, and with an `optimizer` updated, in one pass.

    Args:
        tables: pooled tables ("sum" or "mean"); several features may share a table, a feature may feed several tables.
        optimizer: with one of `tritonemb.optim`, the backward updates the tables exactly, deterministically and in
            place, and their `.grad` stays None. Without, they are ordinary parameters with ordinary (dense) gradients.
        device: of the tables.
        bounds_check: an id out of range raises ("raise") or not ("ignore"); either way it reads as zero, not updated.
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

    _pooled = True

    def _check(self, tables: Sequence[TableConfig]) -> None:
        for table in tables:
            if table.pooling == "none":
                raise ValueError(f"table {table.name!r} has pooling 'none'; use EmbeddingCollection for it")

    @property
    def embedding_dims(self) -> list[int]:
        """Width of each part of the result, in order: `pooled.split(collection.embedding_dims, dim=1)`."""
        return [config.embedding_dim for config in self.configs for _ in config.feature_names]

    def forward(self, features: Features | PrefetchedFeatures, groups: Groups | None = None) -> Tensor:
        """`[B, sum of dims]`. `groups`, from `self.group(features)`, saves grouping the ids again."""
        return self._look_up(features, groups)[1]


class EmbeddingCollection(TableCollection):
    """A row for each id, for sequence models; arguments as for `EmbeddingBagCollection`.

    All tables have one embedding dim, and a feature feeds one table. Returns a `KeyedJaggedTensor` with the batch's
    keys, offsets and the rows as values, `[N, dim]`: zeros for keys that no table knows, multiplied by sample weights.

    Raises:
        ValueError: for tables with pooling "mean" or of different dims; for a feature that feeds two tables.
    """

    _pooled = False

    def _check(self, tables: Sequence[TableConfig]) -> None:
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

    def forward(self, features: Features | PrefetchedFeatures, groups: Groups | None = None) -> KeyedJaggedTensor:
        """Rows `[N, dim]` under the batch's keys and offsets."""
        features, rows = self._look_up(features, groups)
        return KeyedJaggedTensor(list(features.keys()), rows, offsets=features.offsets())
