"""`EmbeddingBagCollection` and `EmbeddingCollection`: lookups of many tables in one call, pooled or a row per id."""

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
from tritonemb.tables.lookup_tables import BoundsCheck, Groups
from tritonemb.tables.optimizer import FusedGroup, FusedOptimizer, States
from tritonemb.tables.table import Table, convert_assigned
from tritonemb.tables.table_set import PrefetchedFeatures, TableSet, check_tables
from tritonemb.types import Device, TableConfig


class FusedModule(nn.Module):
    """Base of modules of tables with an optional fused optimizer."""

    _optimized: TableSet | FusedGroup | None = None  # the tables that the backward updates
    _fused_optimizer: FusedOptimizer | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        """Fused optimizer, or None."""
        return None if self._optimized is None else self._optimized.optimizer

    @property
    def fused_optimizer(self) -> FusedOptimizer | None:
        """Fused optimizer as a `torch.optim.Optimizer`, or None for ordinary parameters."""
        if self._optimized is not None and self._fused_optimizer is None:
            self._fused_optimizer = self._optimized.view(self._states)
        return self._fused_optimizer

    def _states(self) -> States:
        """Name and weight of each table, with the step and states of its fused optimizer by name."""
        raise NotImplementedError

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the fused optimizer, without recompilation.

        ValueError without a fused optimizer, or for a negative or non-finite rate.
        """
        if self._optimized is None:
            raise ValueError("this module has no fused optimizer; set the learning rate of its torch.optim optimizer")
        self._optimized.set_learning_rate(lr)

    @property
    def current_learning_rate(self) -> float:
        """Learning rate of the fused optimizer as a number; the update reads the tensor `learning_rate`."""
        return 0.0 if self._optimized is None else self._optimized.current_learning_rate

    def accumulate(self) -> AbstractContextManager[None]:
        """Accumulate the gradients of several micro-batches, and apply them once at the end of the block.

        The tables are then bitwise identical to those after one step on all samples as one batch. An exception in the
        block discards the gradients. Backward passes must run inside the block. All micro-batches of a collection must
        have the same keys in the same order; a compiled module of a single table and `load_state_dict` raise
        RuntimeError. ValueError without a fused optimizer.
        """
        if self._optimized is None:
            raise ValueError("accumulate() needs a fused optimizer; ordinary gradients accumulate in .grad")
        return self._optimized.accumulate()

    def scale_accumulated(self, factor: float) -> bool:
        """Multiply the accumulated gradients by `factor`; return whether all of them are finite.

        For loss scaling, at the end of a block of `accumulate`. Synchronizes with the device.
        """
        return self._optimized is None or self._optimized.scale_accumulated(factor)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the view of the optimizer: a copy creates its own."""
        return {**self.__dict__, "_fused_optimizer": None}


class TableCollection(FusedModule):
    """Module that owns a `TableSet`: it registers tables and counters, which move and are saved with it.

    Attributes:
        configs: configurations of the tables, in order.
        feature_names: distinct keys that a batch must have, in the order of tables.
    """

    step: Tensor
    skipped: Tensor
    pending: Tensor

    pooled: ClassVar[bool]

    def __init__(
        self, tables: Sequence[TableConfig], optimizer: Optimizer | None = None, device: Device = None,
        bounds_check: BoundsCheck = "raise", output_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_tables(tables, optimizer)
        self._check(tables)
        if not isinstance(output_dtype, torch.dtype | None):
            raise TypeError(f"output_dtype must be a torch.dtype, got {output_dtype!r}")
        table_set = TableSet(tables, optimizer, device, bounds_check, output_dtype, pooled=self.pooled)
        self.configs = table_set.configs
        self.feature_names = table_set.feature_names
        self._optimized = table_set if table_set.optimizer is not None else None
        for name, counter in table_set.counters.items():
            self.register_buffer(name, counter, persistent=name == "step")
        # Not by add_module, which rejects a table with the name of a method.
        self._modules.update(table_set.by_name)
        self._share_with(table_set)
        self.register_load_state_dict_post_hook(_set_counters)  # loads may assign tensors of another device

    def _check(self, tables: Sequence[TableConfig]) -> None:
        """Raise for tables that this kind of collection does not support."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.table_set.accumulator.check_closed("load_state_dict()")
        for table in self.tables:  # raises for any of them before one is loaded
            if not (table.rows.is_cached or table.rows.is_pulled or table.index.assigns_rows):
                convert_assigned(table, state_dict, f"{prefix}{table.config.name}.", *args)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def tables(self) -> list[Table]:
        """Tables in the order of their configurations."""
        return self.table_set.tables

    @property
    def cache(self) -> RowCache | None:
        """Cache of the tables in host memory, on disk or on servers; None if there is none."""
        return self.table_set.cache

    def __getitem__(self, table: str) -> Table:
        """Return a table by name, for example for its `weight`; raise KeyError if it is unknown."""
        if table not in self._modules:
            raise KeyError(f"unknown table {table!r}; expected one of {', '.join(self._modules)}")
        return self.table_set.by_name[table]

    def _share_with(self, table_set: TableSet) -> None:
        """Share the module's dictionaries with the table set, so that both always have the same tensors and tables."""
        self.table_set = table_set
        table_set.counters, table_set.by_name = self._buffers, self._modules

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()
        replica._share_with(copy.copy(self.table_set))
        return replica

    def _states(self) -> States:
        return self.table_set.optimizer_states()

    def skipped_rows(self) -> dict[str, int]:
        """Number of skipped row updates by table, with `on_nonfinite="skip"`."""
        names = [config.name for config in self.configs]
        return {} if self.optimizer is None else dict(zip(names, self.skipped.tolist(), strict=True))

    def cache_statistics(self) -> dict[str, CacheStatistics]:
        """Cache statistics by table in host memory or on disk."""
        return {} if self.cache is None else self.cache.statistics()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze the tables, including those on embedding servers, which `requires_grad_` of a model does not.

        A lookup trains its table if the weight requires a gradient at that time.
        """
        for table in self.tables:
            table.requires_grad_(requires_grad)
        return self

    def reset_parameters(self) -> None:
        """Initialize all tables, e.g. after `to_empty`."""
        for table in self.tables:
            table.reset_parameters()
        if self.optimizer is not None:
            self.set_learning_rate(self.optimizer.lr)
            for counter in (self.step, self.skipped, self.pending):
                counter.zero_()

    def group(self, features: Features) -> Groups:
        """Group the ids of a batch by row; pass the result to `forward`, as `groups`. Another thread may call this.

        Rows of tables in host memory or on disk are pinned on the device until the backward of the batch or, without
        gradients, until its lookup; a second lookup prefetches them again. StorageError if rows cannot be read.
        """
        return self.table_set.group(features)

    def _look_up(self, features: Features | PrefetchedFeatures, groups: Groups | None) -> tuple[Features, Tensor]:
        if isinstance(features, PrefetchedFeatures):
            features, groups = features.of(self.table_set)
        return features, self.table_set.look_up(features, groups)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes that have the name of a table, such as "training", without replacing the table."""
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module; counters and the learning rate keep their values and dtypes."""
        for table in self.tables:
            if table.rows.is_cached:
                table._apply(fn)  # raises before other tables have been moved
        counters = dict(self._buffers)
        super()._apply(fn, recurse)
        self.table_set.forget_layouts()
        self.table_set.set_counters(counters)
        return self


def _set_counters(collection: TableCollection, _: Any) -> None:
    collection.table_set.set_counters(collection._buffers)


class EmbeddingBagCollection(TableCollection):
    """Embedding bags of many tables, looked up in one pass and, with an `optimizer`, updated in one pass.

    Args:
        tables: pooled tables ("sum" or "mean"); several features may share a table, a feature may use several tables.
        optimizer: with one of `tritonemb.optim`, the backward updates each row of the batch once, deterministically and
            in place; `.grad` stays None. Without, tables are ordinary parameters with dense gradients.
        device: device of the tables; torch's default device if None.
        bounds_check: "raise" an error for an id out of range, or "ignore" it; it reads as zero and is not updated.
        output_dtype: dtype of the result; by default that of the tables, float32 if they differ.

    Shapes:
        features: a `KeyedJaggedTensor` (or TorchRec's) with all `feature_names`, in any order; int32 or int64 ids,
            optional weights, one per id. Result: `[B, sum of dims]`, columns by table, then by that table's features.

    A compiled module must not be called again before the backward of its last call, unless both calls are in one
    compiled region: the update is in place. In eager mode, each backward applies its own gradient.

    Raises:
        ValueError: for missing features; for ids out of range and offsets, on a GPU at the next lookup or update.
        TypeError: for ids other than int32 or int64.
    """

    pooled = True

    def _check(self, tables: Sequence[TableConfig]) -> None:
        for table in tables:
            if table.pooling == "none":
                raise ValueError(f"table {table.name!r} has pooling 'none'; use EmbeddingCollection for it")

    @property
    def embedding_dims(self) -> list[int]:
        """Width of each feature's columns, in order: `pooled.split(collection.embedding_dims, dim=1)`."""
        return [config.embedding_dim for config in self.configs for _ in config.feature_names]

    def forward(self, features: Features | PrefetchedFeatures, groups: Groups | None = None) -> Tensor:
        """Return pooled rows `[B, sum of dims]`. `groups` from `self.group(features)` avoids grouping the ids again."""
        return self._look_up(features, groups)[1]


class EmbeddingCollection(TableCollection):
    """Unpooled embeddings, a row per id, for sequence models; arguments as for `EmbeddingBagCollection`.

    All tables have one embedding dim, and a feature uses one table. Returns a `KeyedJaggedTensor` with the batch's
    keys and offsets, and the rows as values, `[N, dim]`, multiplied by sample weights; zeros for keys without a table.

    Raises:
        ValueError: for tables with pooling "mean" or of different dims; for a feature of two tables.
    """

    pooled = False

    def _check(self, tables: Sequence[TableConfig]) -> None:
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(f"an EmbeddingCollection's tables need one embedding_dim, got {dims}")
        table_of: dict[str, str] = {}
        for table in tables:
            if table.pooling == "mean":
                raise ValueError(f"table {table.name!r} has pooling 'mean'; use EmbeddingBagCollection for it")
            for feature in table.feature_names:
                if feature in table_of:
                    raise ValueError(
                        f"feature {feature!r} is in tables {table_of[feature]!r} and {table.name!r}; expected one table"
                    )
                table_of[feature] = table.name

    def forward(self, features: Features | PrefetchedFeatures, groups: Groups | None = None) -> KeyedJaggedTensor:
        """Return rows `[N, dim]` with the batch's keys and offsets."""
        features, rows = self._look_up(features, groups)
        return KeyedJaggedTensor(list(features.keys()), rows, offsets=features.offsets())
