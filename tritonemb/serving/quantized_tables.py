"""`te.quantize`: a model for evaluation, whose embedding tables have rows of 8, 4 or 2 bits per element."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tritonemb import ops
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.kernels.quantized_bag import dequantize_rows, quantize_rows
from tritonemb.layout import Layout, make_layout
from tritonemb.nn.collections import TableCollection
from tritonemb.tables.batch import configs_for_keys
from tritonemb.tables.table import Table
from tritonemb.types import TableConfig

QuantizedDtype = Literal["int8", "int4", "int2"]
BITS = {"int8": 8, "int4": 4, "int2": 2}


class QuantizedTable(nn.Module):
    """Quantized rows: the buffer `weight`, uint8 `[num_embeddings, 4 + ⌈embedding_dim · bits / 8⌉]`."""

    weight: Tensor

    def __init__(self, config: TableConfig, rows: Tensor, dtype: QuantizedDtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.register_buffer("weight", rows)

    def dequantize(self) -> Tensor:
        """Return the decoded rows, float32 `[num_embeddings, embedding_dim]`."""
        return dequantize_rows(self.weight, BITS[self.dtype], self.config.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, dtype={self.dtype}"


class QuantizedCollection(nn.Module):
    """Collection of quantized tables, which takes and returns what its original does; its tables are not trained.

    Attributes:
        configs: configurations of the tables, in order.
        feature_names: distinct keys that a batch must have.
        embedding_dims: width of each feature's columns, in order, if pooled.
    """

    def __init__(self, collection: TableCollection, tables: Sequence[QuantizedTable]) -> None:
        super().__init__()
        table_set = collection.table_set
        self.configs, self.feature_names = collection.configs, collection.feature_names
        self.embedding_dims = [config.embedding_dim for config in self.configs for _ in config.feature_names]
        self.pooled, self.checks_bounds = collection._pooled, table_set.bounds_check == "raise"
        self.output_dtype = table_set.dtype_of([table.weight for table in collection.tables])
        self._layouts: dict[tuple[tuple[str, ...], torch.device], Layout] = {}
        self.replace_tables(tables)

    def replace_tables(self, tables: Sequence[QuantizedTable]) -> None:
        """Set all tables, in the order of their configurations."""
        self.bits = [BITS[table.dtype] for table in tables]
        self._modules.update((table.config.name, table) for table in tables)

    def __getitem__(self, table: str) -> Any:
        """Return a `QuantizedTable` by name, for its `weight` or `dequantize()`; raise KeyError if it is unknown."""
        return self._modules[table]

    def layout(self, keys: tuple[str, ...], device: torch.device) -> Layout:
        """Return the layout of these keys over the tables, cached per order of keys."""
        if (layout := self._layouts.get((keys, device))) is None:
            layout = make_layout(configs_for_keys(self.configs, keys), keys, self.pooled, device)
            if not torch.compiler.is_compiling():
                self._layouts[keys, device] = layout
        return layout

    def forward(self, features: Features) -> Any:
        """Return pooled rows `[B, sum of dims]`; or, not pooled, a `KeyedJaggedTensor` of rows `[N, dim]`."""
        keys, values, offsets, sample_weights = unpack_features(features)
        layout, tables = self.layout(tuple(keys), values.device), [self[config.name].weight for config in self.configs]
        batch = values, offsets, sample_weights
        rows = ops.quantized_bag(tables, self.bits, batch, layout, self.checks_bounds, self.output_dtype)
        return rows if self.pooled else KeyedJaggedTensor(list(keys), rows, offsets=offsets)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude layouts, which a copy rebuilds."""
        return {**self.__dict__, "_layouts": {}}


def quantize(
    model: nn.Module, dtype: QuantizedDtype = "int8", tables: Mapping[str, QuantizedDtype] | None = None
) -> nn.Module:
    """Return a copy of a model, in evaluation mode, whose collections have quantized tables; the model is unchanged.

    Rows of int8 cover their range; ranges of int4 and int2 are searched for the least squared error (see
    `kernels/quantized_bag.py`). Tables are not copied before they are quantized. Results have the dtype of the model's.

    Args:
        model: with `EmbeddingBagCollection`s or `EmbeddingCollection`s; tables on the device, with rows by number.
        dtype: "int8", "int4" or "int2", for tables that are not in `tables`.
        tables: dtype by name of a table.

    Raises:
        ValueError: for an unknown dtype or table, a model without collections, tables that are dynamic or not on the
            device, and values that are not finite or exceed float16.
    """
    names, collections = dict(tables or {}), [m for m in model.modules() if isinstance(m, TableCollection)]
    configs = [config for collection in collections for config in collection.configs]
    # Check everything before any table is quantized.
    for option in (dtype, *names.values()):
        if option not in BITS:
            raise ValueError(f"unknown dtype {option!r}; expected one of {get_args(QuantizedDtype)}")
    if not configs:
        raise ValueError("the model has no EmbeddingBagCollection or EmbeddingCollection to quantize; see te.fuse")
    if unknown := names.keys() - {config.name for config in configs}:
        raise ValueError(f"unknown tables {sorted(unknown)}; expected some of {[config.name for config in configs]}")
    for config in configs:
        if config.is_dynamic or config.placement != "device":
            kind = "is dynamic" if config.is_dynamic else f"has placement {config.placement!r}"
            raise ValueError(
                f"table {config.name!r} {kind}; only tables on the device with rows by number are quantized"
            )
    # Copy the model, with quantized collections in place of copies of the others.
    memo = {}
    for collection in collections:
        quantized = [_quantize(table, names.get(table.config.name, dtype)) for table in collection.tables]
        memo[id(collection)] = QuantizedCollection(collection, quantized)
    return copy.deepcopy(model, memo).eval()


def _quantize(table: Table, dtype: QuantizedDtype) -> QuantizedTable:
    try:
        rows = quantize_rows(table.weight, BITS[dtype], search=dtype != "int8")
    except ValueError as error:
        raise ValueError(f"table {table.config.name!r}: {error}") from None
    return QuantizedTable(table.config, rows, dtype)
