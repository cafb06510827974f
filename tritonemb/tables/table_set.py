"""What embedding collections share: tables, their layout over a batch, and the fused update.

Fused updates and data parallelism by PyTorch: what the one does, the other cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from tritonemb import ops
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.layout import Layout, make_layout
from tritonemb.ops.accumulate import NOT_ACCUMULATING, Accumulator, accumulate_
from tritonemb.optimizers import Constants, Hyperparameters, Optimizer
from tritonemb.tables.cache import Brought, CacheStatistics, Lease
from tritonemb.tables.cached_lookup import bring, look_up_cached, make_cache, slot_layouts
from tritonemb.tables.cached_table import TieredTable
from tritonemb.tables.lookup import Features, Lookup, RowsUpdate, parts_of
from tritonemb.tables.optimizer import FusedOptimizer
from tritonemb.tables.prefetched import Grouped, Groups, SentFeatures
from tritonemb.tables.table import Table
from tritonemb.tables.update import LocalUpdate
from tritonemb.types import TRAINABLE_DTYPES, TableConfig

BoundsCheck = Literal["raise", "ignore"]


class TableSet(nn.Module):
    """Tables looked up, and with an `optimizer` updated, together; see `EmbeddingBagCollection`.

    Args:
        tables: whole tables, or parts of tables (`TableConfig.part`).
        pooled: whether bags are pooled, or every id keeps its row.
        update: what a backward pass does with the gradients of rows.
    """

    learning_rate: Tensor
    step: Tensor
    skipped: Tensor
    pending: Tensor

    def __init__(
        self,
        tables: Sequence[TableConfig],
        optimizer: Optimizer | None = None,
        device: torch.device | str | None = None,
        bounds_check: BoundsCheck = "raise",
        output_dtype: torch.dtype | None = None,
        *,
        pooled: bool,
        update: LocalUpdate | None = None,
    ) -> None:
        super().__init__()
        self.pooled = pooled
        _check_tables(tables)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be one of tritonemb.optim, e.g. te.optim.RowWiseAdagrad(lr=0.02), got {optimizer!r}"
            )
        if optimizer is not None:
            _check_trainable_dtypes(tables)
        if bounds_check not in get_args(BoundsCheck):
            raise ValueError(f"bounds_check must be one of {get_args(BoundsCheck)}, got {bounds_check!r}")
        self.configs = tuple(tables)
        self.optimizer = optimizer
        self.bounds_check = bounds_check
        self.output_dtype = output_dtype
        self.update = LocalUpdate() if update is None else update
        if optimizer is not None:
            self.register_buffer(
                "learning_rate", torch.tensor(optimizer.lr, dtype=torch.float32, device=_real(device)), persistent=False
            )
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=_real(device)))
            skipped = torch.zeros(len(self.configs), dtype=torch.int64, device=_real(device))
            self.register_buffer("skipped", skipped, persistent=False)
            self.register_buffer("pending", torch.zeros((), dtype=torch.int64, device=_real(device)), persistent=False)
        for config in self.configs:  # not add_module, which would refuse a table that is called like a method
            kind = Table if config.placement == "device" else TieredTable
            self._modules[config.name] = kind(config, optimizer.states if optimizer else (), device)
        self.cache = make_cache(self.tables)
        self._learning_rate = 0.0 if optimizer is None else optimizer.lr
        self._constants = Constants(Hyperparameters() if optimizer is None else optimizer.hyperparameters)
        self._layouts: dict[tuple[tuple[str, ...], torch.device], Layout] = {}
        self.accumulator = Accumulator()
        self._accumulated_keys: tuple[str, ...] | None = None
        self.accumulating = False
        self.leases: list[Lease] = []
        self._fused_optimizer: FusedOptimizer | None = None
        self.layout(self.feature_names, self.tables[0].weight.device)

    @property
    def tables(self) -> list[Table]:
        """The tables, in the order they were given."""
        return [self._modules[config.name] for config in self.configs]  # type: ignore[misc]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The keys that a batch must bring, each once, in the order of tables."""
        return tuple(dict.fromkeys(feature for config in self.configs for feature in config.feature_names))

    @property
    def fused_optimizer(self) -> FusedOptimizer | None:
        """The fused optimizer as a `torch.optim.Optimizer`, or None for ordinary parameters."""
        if self._fused_optimizer is None and self.optimizer is not None:
            self._fused_optimizer = FusedOptimizer(self)
        return self._fused_optimizer

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the fused optimizer; nothing is recompiled.

        Raises:
            ValueError: without a fused optimizer, or for a negative or non-finite rate.
        """
        if self.optimizer is None:
            raise ValueError("this collection has no fused optimizer; set the learning rate of the one you made")
        if not 0.0 <= lr < float("inf"):
            raise ValueError(f"the learning rate must lie in [0, inf), got {lr}")
        self._learning_rate = float(lr)
        self.learning_rate.fill_(lr)
        if self._fused_optimizer is not None:
            self._fused_optimizer.show_learning_rate()

    @property
    def current_learning_rate(self) -> float:
        """What the fused optimizer's learning rate was last set to; the update reads the tensor `learning_rate`."""
        return self._learning_rate

    def optimizer_states(self) -> list[tuple[str, Tensor, dict[str, Tensor]]]:
        """Each table's name, weight, and the step and states of its fused optimizer by name.

        Without the states of tables that live elsewhere than on the device, which `state_dict` alone has.
        """
        return [
            (
                t.config.name,
                t.weight,
                {"step": self.step, **({} if isinstance(t, TieredTable) else dict(t.named_buffers()))},
            )
            for t in self.tables
        ]

    def skipped_rows(self) -> dict[str, int]:
        """For `nonfinite="skip"`: how many row updates each table has skipped so far."""
        if self.optimizer is None:
            return {}
        return dict(zip((config.name for config in self.configs), self.skipped.tolist(), strict=True))

    def reset_parameters(self) -> None:
        """Initialise all tables, e.g. after `to_empty`."""
        for table in self.tables:
            table.reset_parameters()
        if self.optimizer is not None:
            self.set_learning_rate(self.optimizer.lr)
            for counter in (self.step, self.skipped, self.pending):
                counter.zero_()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Gather the gradients of several micro-batches and apply them once, when the block ends.

        The tables then have the bits of one step on all samples as one batch. Leaving the block with an exception
        discards what was gathered. Every micro-batch must bring the same keys in the same order, and its backward must
        run inside the block.
        """
        if self.optimizer is None:
            raise ValueError("accumulate() is for a fused optimizer; ordinary gradients add up by themselves")
        if self.accumulating:
            raise RuntimeError("accumulate() is already active")
        self.accumulating, self._accumulated_keys = True, None
        self.accumulator.open()
        try:
            yield
            self._apply_accumulated()
        finally:
            self.accumulator.close()
            leases, self.leases = self.leases, []
            for lease in leases:
                lease.end()
            self.pending.zero_()
            self.accumulating = False

    def scale_accumulated(self, factor: float) -> bool:
        """Multiply the gradients gathered so far by `factor`; returns whether all of them are finite then.

        For loss scaling: called in the block of `accumulate`, before it ends. Waits for the device.
        """
        grads = [batch.grad.mul_(factor) for batch in self.accumulator.kept()]
        return all(bool(grad.isfinite().all()) for grad in grads)

    def group(self, features: Features) -> Groups:
        """The distinct rows of a batch, from its ids alone; may be computed ahead and given to `forward`.

        Rows of tables that live elsewhere than on the device are brought there, and held until the batch's backward has
        been, or, where gradients are not recorded, until it has been looked up; a second lookup brings them anew. This
        may be done in another thread.
        """
        if self.cache is not None:
            return bring(self, self.cache, features)
        keys, values, offsets, _ = parts_of(features)
        return ops.row_groups(values, offsets, self.layout(keys, values.device))

    def send(self, features: Features) -> Grouped:
        """What `SentFeatures` hold for this collection: the batch, and what `group` says where that takes time."""
        keys, values, offsets, weights = parts_of(features)
        batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
        return Grouped(batch, None if self.cache is None else self.group(features))

    @_disable_dynamo  # a graph break, which loads no compiler before one is used
    def _told(self, features: Features | SentFeatures, groups: Groups | None) -> tuple[Features, Groups | None]:
        """Features, and their groups if they are known."""
        if isinstance(features, SentFeatures):
            told: Grouped = features.of(self)
            return told.batch, told.groups
        return features, groups

    def cache_statistics(self) -> dict[str, CacheStatistics]:
        """What the caches of tables that live elsewhere than on the device have done so far, by table."""
        return {} if self.cache is None else self.cache.statistics()

    def layout(self, keys: Sequence[str], device: torch.device) -> Layout:
        """What these keys mean to the tables; made once for each order of keys."""
        key = (tuple(keys), device)
        found = self._layouts.get(key)
        if found is None:
            missing = [feature for feature in self.feature_names if feature not in key[0]]
            if missing:
                raise ValueError(f"the batch lacks the features {missing}; it has the keys {list(keys)}")
            if torch.compiler.is_compiling():
                return make_layout(self.configs, key[0], self.pooled, device)
            with torch.inference_mode(False):  # it is kept, for training too
                found = make_layout(self.configs, key[0], self.pooled, device)
            self._layouts[key] = found
        return found

    def forward(self, features: Features, groups: Groups | None = None) -> Any:
        """As `look_up`."""
        return self.look_up(features, groups)

    def look_up(self, features: Features, groups: Groups | None) -> Tensor:
        """The op behind `forward`: `[B, width]` if pooled, else `[N, width]`."""
        if self.cache is not None:
            return look_up_cached(self, self.cache, features, groups)
        assert not isinstance(groups, Brought)
        keys, values, offsets, sample_weights = parts_of(features)
        layout = self.layout(keys, values.device)
        weights: list[Tensor] = [table.weight for table in self.tables]
        check_bounds, dtype = self.bounds_check == "raise", self.dtype_of(weights)
        if self.optimizer is None or not torch.is_grad_enabled():
            return ops.embedding_bag(weights, values, offsets, sample_weights, layout, check_bounds, dtype)
        self.update.check(self.configs[0].name)
        self.check_trainable(weights)
        if self.accumulating:
            self.remember_keys(keys)
        if not self.update.is_traceable:
            groups = ops.row_groups(values, offsets, layout) if groups is None else groups
            update = RowsUpdate(self, Lookup(values, offsets, sample_weights, groups, layout))
            return ops.fused_lookup(weights[0], None, update)
        if groups is None:
            groups = ops.row_groups(values, offsets, layout)
        elif values.is_cuda and not torch.compiler.is_compiling():
            for tensor in (*groups, values, offsets):  # made ahead, perhaps on another stream
                tensor.record_stream(torch.cuda.current_stream(values.device))
        accumulator = self.accumulator.handle if self.accumulating else NOT_ACCUMULATING
        return ops.embedding_bag_fused(
            self.fused_tables(), values, offsets, sample_weights, groups, layout, check_bounds, dtype, self.pending,
            accumulator,
        )  # fmt: skip

    def dtype_of(self, weights: list[Tensor]) -> torch.dtype:
        if self.output_dtype is not None:
            return self.output_dtype
        dtypes = {weight.dtype for weight in weights}
        return dtypes.pop() if len(dtypes) == 1 and dtypes <= {*TRAINABLE_DTYPES, torch.float64} else torch.float32

    def fused_tables(self) -> ops.FusedTables:
        """The tables' tensors of this moment."""
        spec = self.optimizer
        weights: list[Tensor] = [table.weight for table in self.tables]
        assert spec is not None
        states = [table.state(state.name) for state in spec.states for table in self.tables]
        return ops.FusedTables(
            weights, states, [self.step], [self.skipped], self.learning_rate, spec.name, self._constants.as_list()
        )

    def check_trainable(self, weights: list[Tensor]) -> None:
        trainable = [weight.requires_grad for weight in weights]
        if any(trainable) and not all(trainable):
            frozen = [config.name for config, on in zip(self.configs, trainable, strict=True) if not on]
            raise ValueError(
                f"tables {frozen} do not require gradients but others of their collection do; "
                "put frozen tables into a collection of their own"
            )

    def remember_keys(self, keys: list[str]) -> None:
        if self._accumulated_keys is None:
            self._accumulated_keys = tuple(keys)
        elif self._accumulated_keys != tuple(keys):
            raise ValueError(
                "accumulate() needs the same keys in every micro-batch: "
                f"first {list(self._accumulated_keys)}, now {keys}"
            )

    @torch.no_grad()
    def _apply_accumulated(self) -> None:
        batches = self.accumulator.close()
        if not batches:
            return
        assert self._accumulated_keys is not None
        keys = self._accumulated_keys
        stacked = KeyedJaggedTensor.stack(
            [KeyedJaggedTensor(keys, b.values, b.sample_weights, offsets=b.offsets) for b in batches]
        )
        grad = torch.cat([batch.grad for batch in batches])
        layout = self._own_layout(keys, grad.device)
        if not self.pooled:
            order = KeyedJaggedTensor.stack(
                [
                    KeyedJaggedTensor(keys, rows, offsets=b.offsets)
                    for b, rows in zip(batches, _counted(batches), strict=True)
                ]
            )
            grad = grad[order.values()]
        values, offsets = stacked.values(), stacked.offsets()
        groups = ops.row_groups(values, offsets, layout)
        leases, self.leases = self.leases, []
        self.update.step(self, grad, Lookup(values, offsets, stacked.weights_or_none(), groups, layout), leases)

    def _own_layout(self, keys: tuple[str, ...], device: torch.device) -> Layout:
        """What keys mean to the rows that are on the device."""
        return self.layout(keys, device) if self.cache is None else slot_layouts(self, self.cache, keys, device)[1]

    def read(self, lookup: Lookup) -> Tensor:
        """`[B, width]` if pooled, else `[N, width]`; no gradient."""
        weights: list[Tensor] = [table.weight for table in self.tables]
        check_bounds = self.bounds_check == "raise" and self.cache is None  # who brings rows in has looked
        with self.memory():
            return ops.embedding_bag(
                weights, lookup.values, lookup.offsets, lookup.sample_weights, lookup.layout, check_bounds,
                self.dtype_of(weights),
            )  # fmt: skip

    def take_gradient(self, grad: Tensor, lookup: Lookup) -> None:
        """Update the rows of a batch, or keep its gradient while gradients are accumulated."""
        if self.accumulating:
            handle = self.accumulator.handle
            accumulate_(self.pending, handle, grad, lookup.values, lookup.offsets, lookup.sample_weights)
        else:
            self.update.step(self, grad, lookup)

    def memory(self) -> AbstractContextManager[Any]:
        """While tables' tensors are used, nobody replaces them by larger ones."""
        return nullcontext() if self.cache is None else self.cache.memory.lock

    def __setattr__(self, name: str, value: Any) -> None:
        """A table may be called like an attribute, say "training", which is set beside it."""
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Any, recurse: bool = True) -> TableSet:
        """Casting a module to 16 bits leaves the learning rate float32."""
        for table in self.tables:
            if isinstance(table, TieredTable):
                table._apply(fn)  # refuses before others have been moved
        rate = self._buffers.get("learning_rate")
        super()._apply(fn, recurse)
        if rate is not None:
            self._buffers["learning_rate"] = rate.to(self.step.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own optimizer view and layouts when it needs them."""
        return {**self.__dict__, "_fused_optimizer": None, "_layouts": {}}


def _counted(batches: Sequence[Any]) -> list[Tensor]:
    """A running number for every value of every micro-batch."""
    sizes = [batch.values.numel() for batch in batches]
    return list(torch.arange(sum(sizes), device=batches[0].values.device).split(sizes))


def _real(device: torch.device | str | None) -> torch.device | str | None:
    """Counters have values from the start; they wait on the CPU for a meta module to be moved."""
    return "cpu" if device is not None and torch.device(device).type == "meta" else device


def _check_tables(tables: Sequence[TableConfig]) -> None:
    if not tables:
        raise ValueError("a collection needs at least one table")
    names: set[str] = set()
    for table in tables:
        if not isinstance(table, TableConfig):
            raise TypeError(f"tables must be TableConfig, got {table!r}")
        if table.name in names:
            raise ValueError(f"table {table.name!r} is given twice; names must be unique in a collection")
        if table.placement == "server":
            raise ValueError(
                f"table {table.name!r}: placement {table.placement!r} is not available in this collection; use "
                "'device', 'host' or 'disk'"
            )
        names.add(table.name)


def _check_trainable_dtypes(tables: Sequence[TableConfig]) -> None:
    for table in tables:
        if table.dtype not in TRAINABLE_DTYPES:
            raise ValueError(
                f"table {table.name!r}: {table.dtype} rows are too coarse to be trained; choose one of "
                f"{TRAINABLE_DTYPES}, or leave out the optimizer to look it up only"
            )
