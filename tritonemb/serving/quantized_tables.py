"""`te.quantize`: a model for evaluation, whose embedding tables have rows of 8, 4 or 2 bits per element."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import mul
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.sparse import EmbeddingBag as TorchEmbeddingBag

from tritonemb import errors, ops
from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.kernels.quantized_bag import dequantize_rows, quantize_rows, row_bytes_of
from tritonemb.layout import ADDRESS_BITS, INDEXED, NUM_ROWS, TABLE, Layout, make_layout, nonzero, partitions_of
from tritonemb.nn.collections import TableCollection
from tritonemb.nn.embeddings import DynamicEmbedding, DynamicEmbeddingBag, DynamicModule
from tritonemb.nn.single_table import SingleTable
from tritonemb.ops.registry import graph_break
from tritonemb.ops.row_update import fill_initial_
from tritonemb.sharding.collection import ShardedCollection
from tritonemb.tables.batch import checked_batch, configs_for_keys, find_invalid
from tritonemb.tables.dynamic_table import find_sorted
from tritonemb.tables.lookup_tables import split_lookups
from tritonemb.tables.table import BLOCK_ELEMENTS, DenseIndex, DeviceRows
from tritonemb.types import Pooling, TableConfig

QuantizedDtype = Literal["int8", "int4", "int2"]
BITS = {"int8": 8, "int4": 4, "int2": 2}


@dataclass(frozen=True)
class ByFrequency:
    """Shares of a table's rows by dtype, most used rows first; they add up to 1. Dropped ids read as unknown ones."""

    int8: float = 0.0
    int4: float = 0.0
    int2: float = 0.0
    drop: float = 0.0

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0 or abs(sum(astuple(self)) - 1) > 1e-6:
            raise ValueError(f"the shares of ByFrequency must be at least 0 and add up to 1, got {self}")


Precision = QuantizedDtype | ByFrequency


def _shares(dtype: Precision) -> list[float]:
    return [float(getattr(dtype, name, dtype == name)) for name in BITS]


class QuantizedTable(nn.Module):
    """Quantized rows of a table, and its index; `state_dict` has the buffers:

    weight: uint8 `[rows, 4 + ⌈embedding_dim · bits / 8⌉]`; with `ByFrequency` the bytes of rows of 8, 4, then 2 bits.
    sizes: int64 `[4]`: numbers of fallback rows, which are first, and of rows of 8, 4 and 2 bits, these included.
    ids, seed: of a dynamic table, its ids, int64 `[rows]`, ascending, and the seed of initial values, int64 `[]`.
    row_numbers: with `ByFrequency`, int32: the row of each id, or of each of `ids`; -1 for none.
    """

    weight: Tensor

    def __init__(self, config: TableConfig, rows: Tensor, dtype: Precision, index: Any = None) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.row_bytes = [row_bytes_of(config.embedding_dim, bits) for bits in BITS.values()]
        # `INDEXED`: ids are not row numbers, or rows differ in their bits.
        self.bits = INDEXED if config.is_dynamic or isinstance(dtype, ByFrequency) else BITS[dtype]
        sizes = torch.tensor([0, *(len(rows) * (name == dtype) for name in BITS)])
        for name, tensor in {"weight": rows, "sizes": sizes, **(index or {})}.items():
            self.register_buffer(name, tensor.to(rows.device))
        self._read_sizes()

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the addresses of the rows of ids, with their bits; and memory that some of these refer to."""
        rows, row_numbers, num_fallback_rows = ids, self._buffers.get("row_numbers"), self._sizes[0]
        if (size := self.config.num_embeddings) is None:
            rows, size = find_sorted(self.get_buffer("ids"), ids), 2**63 - 1
        unknown_mask = (rows < 0) | (rows >= size)
        rows = rows.masked_fill(unknown_mask, 0)
        rows = rows + num_fallback_rows if row_numbers is None or not len(row_numbers) else row_numbers[rows].long()
        rows.masked_fill_(unknown_mask, -1)
        if num_fallback_rows:
            rows = rows.where(rows >= 0, partitions_of(ids, num_fallback_rows))
        addresses = rows
        for bits, first, part in self._parts():
            base = part.data_ptr() | bits << ADDRESS_BITS
            addresses = addresses.where(rows < first, (rows - first) * part.shape[1] + base)
        # Other ids read initial values, or zeros in a static table.
        if not len(absent := nonzero(rows < 0)):
            return addresses, self.weight
        values = torch.zeros(len(absent), self.config.embedding_dim, device=ids.device)
        if self.config.is_dynamic:
            fill_initial_(values, self._seed, self.config.bound, rows=ids[absent])
        initial_rows = quantize_rows(values, 8, search=False)
        initial = torch.arange(len(absent), device=ids.device) * initial_rows.shape[1] + initial_rows.data_ptr()
        return addresses.index_copy_(0, absent, initial | 8 << ADDRESS_BITS), initial_rows

    def dequantize(self) -> Tensor:
        """Return the decoded rows, float32 `[num_embeddings, embedding_dim]`, zeros for dropped ones; or of `ids`."""
        decoded = torch.cat([dequantize_rows(rows, bits, self.config.embedding_dim) for bits, _, rows in self._parts()])
        if (row_numbers := self._buffers.get("row_numbers")) is None:
            return decoded[self._sizes[0] :]
        return torch.nn.functional.pad(decoded, (0, 0, 0, 1))[row_numbers.long()]

    def _read_sizes(self) -> None:
        self._sizes: list[int] = self.get_buffer("sizes").tolist()
        self._seed = int(self.get_buffer("seed")) if self.config.is_dynamic else -1

    def _parts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield bits, the number of the first row, and rows uint8 `[n, bytes]`."""
        start = first = 0
        for bits, size, row_bytes in zip(BITS.values(), self._sizes[1:], self.row_bytes, strict=True):
            end = start + size * row_bytes
            yield bits, first, self.weight.view(-1)[start:end].view(size, row_bytes)
            start, first = end, first + size

    def write(self, row_numbers: Tensor, weights: Tensor) -> None:
        """Quantize rows with these numbers, -1 for none."""
        step = max(1, BLOCK_ELEMENTS // self.config.embedding_dim)
        for numbers, values in zip(row_numbers.split(step), weights.split(step), strict=True):
            for bits, first, rows in self._parts():
                chosen = nonzero((numbers >= first) & (numbers < first + len(rows)))
                if chosen.numel():
                    quantized = quantize_rows(values[chosen.to(values.device)], bits, search=bits < 8)
                    rows[(numbers[chosen] - first).to(rows.device)] = quantized.to(rows.device)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load rows of the same dtypes; their number may be another one if there is an index."""
        sizes = state_dict.get(f"{prefix}sizes", self.sizes).tolist()[1:]
        saved, dtypes = ([n for n, k in zip(BITS, t, strict=True) if k] for t in (sizes, _shares(self.dtype)))
        num_bytes = sum(map(mul, sizes, self.row_bytes))
        if not {*saved} <= {*dtypes} or state_dict.get(f"{prefix}weight", self.weight).numel() != num_bytes:
            text = f"the state_dict has {num_bytes:,} bytes of rows of {' and '.join(saved)}, the model has rows of"
            args[-1].append(f"table {self.config.name!r}: {text} {' and '.join(dtypes)}; quantize it with these dtypes")
            return
        for name, buffer in self._buffers.items() if self.bits == INDEXED else ():
            self._buffers[name] = torch.empty_like(state_dict.get(prefix + name, buffer), device=self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._read_sizes()


class QuantizedCollection(nn.Module):
    """Collection of quantized tables, which takes and returns what its original does; its tables are not trained.

    Attributes:
        configs: configurations of the tables, in order.
        feature_names: distinct keys that a batch must have.
        embedding_dims: width of each feature's columns, in order, if pooled.
    """

    def __init__(self, collection: Any, tables: Sequence[QuantizedTable]) -> None:
        super().__init__()
        table_set = collection.table_set
        self.configs, self.feature_names = collection.configs, collection.feature_names
        self.embedding_dims = [config.embedding_dim for config in self.configs for _ in config.feature_names]
        self.pooled, self.checks_bounds = table_set.pooled, table_set.bounds_check == "raise"
        self.output_dtype = table_set.dtype_of([table.weight for table in collection.tables])
        self._layouts: dict[tuple[tuple[str, ...], torch.device], Layout] = {}
        self.replace_tables(tables)

    def replace_tables(self, tables: Sequence[QuantizedTable]) -> None:
        """Set all tables, in the order of their configurations."""
        self.bits = [table.bits for table in tables]
        self._modules.update((table.config.name, table) for table in tables)

    def __getitem__(self, table: str) -> Any:
        """Return a `QuantizedTable` by name, for its `weight` or `dequantize()`; raise KeyError if it is unknown."""
        return self._modules[table]

    def layout(self, keys: Sequence[str], device: torch.device) -> Layout:
        """Return the layout of these keys over the tables, cached per order of keys."""
        if (layout := self._layouts.get((tuple(keys), device))) is None:
            configs = [config.storage_config(1) if config.is_dynamic else config for config in self.configs]
            layout = make_layout(configs_for_keys(configs, keys), keys, self.pooled, device)
            if INDEXED in self.bits:  # addresses have no bound
                layout.tables[:, NUM_ROWS].masked_fill_(torch.tensor(self.bits, device=device) == INDEXED, 2**63 - 1)
            if not torch.compiler.is_compiling():
                self._layouts[tuple(keys), device] = layout
        return layout

    def forward(self, features: Features) -> Any:
        """Return pooled rows `[B, sum of dims]`; or, not pooled, a `KeyedJaggedTensor` of rows `[N, dim]`."""
        keys, *batch = cast(Any, unpack_features(features))
        args: Any = self._find_rows(features) if INDEXED in self.bits else (batch, self.layout(keys, batch[0].device))
        weights = [self[config.name].weight for config in self.configs]
        rows = ops.quantized_bag(weights, self.bits, args[0], args[1], self.checks_bounds, self.output_dtype)
        return rows if self.pooled else KeyedJaggedTensor(list(keys), rows, offsets=batch[1])

    @graph_break("the host finds rows of dynamic tables and of ByFrequency; for one graph quantize other tables")
    def _find_rows(self, features: Features) -> tuple[list[Any], Layout, list[Tensor]]:
        """Replace ids of tables with an index by addresses; return the batch, and memory that these refer to."""
        batch = checked_batch(features)
        if self.checks_bounds and (problem := find_invalid(self.configs, batch)):
            raise problem
        batch, layout = split_lookups(cast(Any, self), batch)  # an address is of one table
        values, offsets, memory = batch.values().long().clone(), batch.offsets(), list[Tensor]()
        errors.check_offsets(values, offsets, layout)  # else ids would be taken for addresses
        ends, starts = offsets[:: batch.stride() or 1].tolist(), layout.key_starts.tolist()
        for first, end, begin, stop in zip(starts, starts[1:], ends, ends[1:], strict=False):
            table = self[self.configs[int(layout.lookups[first, TABLE])].name] if first < end else None
            if table is not None and table.bits == INDEXED:
                values[begin:stop], rows = table.find(values[begin:stop])
                memory.append(rows)
        return [values, offsets, batch.weights_or_none()], layout, memory

    def __getstate__(self) -> dict[str, Any]:
        """Exclude layouts, which a copy rebuilds."""
        return {**self.__dict__, "_layouts": {}}


def plain_table(module: Any, config: Any) -> Any:
    """Return a module with a weight whose row numbers are ids as a table without states."""
    tensors = {"weight": module.weight.detach()}
    values = {"index": DenseIndex(config), "rows": DeviceRows(config, ()), "device_tensors": lambda: tensors}
    return SimpleNamespace(config=config, weight=tensors["weight"], **values)


class QuantizedModule(DynamicModule):
    """Base of a quantized `EmbeddingBag` or `Embedding`; its `state_dict` has the buffers of its `QuantizedTable`."""

    def __init__(self, module: Any, name: str, dtype: Precision, counts: Tensor | None) -> None:
        if getattr(module, "mode", "sum") == "max" or module.max_norm is not None:
            raise ValueError(f"module {name!r} has mode='max' or max_norm, which quantized tables do not support")
        is_bag, table = isinstance(module, TorchEmbeddingBag), vars(module).get("table")
        if table is None:
            pooling: Pooling = "none" if not is_bag else "mean" if module.mode == "mean" else "sum"
            sizes, name = (module.num_embeddings, module.embedding_dim), name.replace(".", "/") or "embedding"
            config = TableConfig(name, *sizes, pooling=pooling, dtype=module.weight.dtype)
            table = plain_table(module, config)
        options = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        nn.Module.__init__(self)
        quantized: Any = _quantize(table, dtype, counts)
        table_set = SimpleNamespace(pooled=is_bag, bounds_check="raise", dtype_of=lambda _: table.config.dtype)
        names = {"configs": (table.config,), "feature_names": table.config.feature_names, "tables": ()}
        collection = QuantizedCollection(SimpleNamespace(**names, table_set=table_set), [quantized])
        if not (is_bag or quantized.config.is_dynamic):
            options["padding_idx"] = None  # as in PyTorch, the row that has no gradient is read
        options |= {"table": quantized, "_buffers": quantized._buffers, "_collection": collection}
        vars(self).update(options, _look_up_batch=collection)  # without a graph break


class QuantizedEmbeddingBag(QuantizedModule, DynamicEmbeddingBag):
    """Class of a quantized `EmbeddingBag`."""


class QuantizedEmbedding(QuantizedModule, DynamicEmbedding):
    """Class of a quantized `Embedding`."""


def quantize(
    model: nn.Module, dtype: Precision = "int8", tables: Mapping[str, Precision] | None = None, counts: Any = None
) -> nn.Module:
    """Return a copy of a model, in evaluation mode, with quantized tables; the model is unchanged.

    Rows of int8 cover their range; ranges of int4 and int2 are searched for the least squared error (see
    `kernels/quantized_bag.py`), block by block; tables on embedding servers are fetched first.
    ValueError for unknown dtypes or tables, sharded ones, missing counts, and values beyond float16.

    Args:
        model: with `EmbeddingBagCollection`, `EmbeddingCollection`, `te.nn.EmbeddingBag` or `te.nn.Embedding` modules.
        dtype: "int8", "int4", "int2", or `ByFrequency`, for tables that are not in `tables`.
        tables: dtype by name of a table, or path of an `EmbeddingBag` or `Embedding`.
        counts: uses of each row of tables with `ByFrequency`, int `[rows]`; dynamic tables have their own.
    """
    names, counts, modules = dict(tables or {}), dict(counts or {}), dict(model.named_modules())
    collections = [module for module in modules.values() if isinstance(module, TableCollection)]
    singles = {path: module for path, module in modules.items() if isinstance(module, SingleTable)}
    known = [*(config.name for collection in collections for config in collection.configs), *singles]
    # Check everything before any table is quantized.
    for option in (dtype, *names.values()):
        if option not in BITS and not isinstance(option, ByFrequency):
            raise ValueError(f"unknown dtype {option!r}; expected one of {[*BITS]}, or te.serving.ByFrequency(...)")
    if sharded := [path for path, module in modules.items() if isinstance(module, ShardedCollection)]:
        raise ValueError(f"{sharded} are sharded over ranks; load a checkpoint into an unsharded model, quantize that")
    if not known:
        raise ValueError("the model has no collection, te.nn.EmbeddingBag or te.nn.Embedding to quantize; see te.fuse")
    if unknown := (names.keys() | counts.keys()) - {*known}:
        raise ValueError(f"unknown tables {sorted(unknown)}; expected some of {known}")
    # Copy the model, with quantized modules in place of copies of the others.
    memo: dict[int, nn.Module] = {}
    for collection in collections:
        options = [(t, names.get(t.config.name, dtype), counts.get(t.config.name)) for t in collection.tables]
        memo[id(collection)] = QuantizedCollection(collection, [_quantize(*option) for option in options])
    for path, module in singles.items():
        kind = QuantizedEmbeddingBag if isinstance(module, TorchEmbeddingBag) else QuantizedEmbedding
        memo[id(module)] = kind(module, path, names.get(path, dtype), counts.get(path))
    return copy.deepcopy(model, memo).eval()


def _quantize(table: Any, dtype: Precision, counts: Tensor | None) -> QuantizedTable:
    config, device, table = table.config, table.weight.device, table.rows.fetch(table)
    ids, numbers = table.index.sorted_rows() or (None, None)
    num_rows, shares = config.num_embeddings if ids is None else len(ids), _shares(dtype)
    first = 0 if numbers is None else len(numbers) - num_rows  # fallback rows are first
    # Number the rows; if dtypes depend on it, from the most used one on.
    ends = [round(num_rows * sum(shares[:n])) for n in range(4)]
    row_numbers, sizes = torch.arange(first, first + num_rows, dtype=torch.int32), torch.tensor(ends).diff()
    if isinstance(dtype, ByFrequency):
        if counts is None and numbers is not None and table.index.counts is not None:
            counts = table.index.counts[numbers[:num_rows]]
        if counts is None or counts.shape != (num_rows,):
            expected = f"counts={{{config.name!r}: ...}} of shape {(num_rows,)}, as from torch.bincount"
            raise ValueError(f"table {config.name!r}: ByFrequency needs the uses of its rows, {expected}")
        stored = counts.cpu().argsort(descending=True, stable=True)[: ends[-1]]
        row_numbers = torch.full_like(row_numbers, -1).index_copy_(0, stored, row_numbers[: ends[-1]])
    sizes[torch.tensor(shares).ne(0).int().argmax()] += first
    index, is_stored = {"sizes": torch.cat([torch.tensor([first]), sizes])}, row_numbers >= 0
    if ids is not None:
        index |= {"ids": ids.cpu()[is_stored], "seed": torch.tensor(table.seed)}
    if isinstance(dtype, ByFrequency):
        index["row_numbers"] = row_numbers[is_stored] if config.is_dynamic else row_numbers
    # Quantize block by block, in the order of rows in memory.
    targets = torch.cat([row_numbers, torch.arange(first, dtype=torch.int32)])
    if numbers is not None:
        numbers, order = numbers.sort()
        targets = targets[order.cpu()]
    row_bytes = [row_bytes_of(config.embedding_dim, bits) for bits in BITS.values()]
    weight = torch.empty(sum(map(mul, sizes.tolist(), row_bytes)), dtype=torch.uint8, device=device)
    weight = weight if isinstance(dtype, ByFrequency) else weight.view(-1, row_bytes[[*BITS].index(dtype)])
    quantized = QuantizedTable(config, weight, dtype, index)
    try:
        for at, weights in table.rows.blocks(table, numbers):
            quantized.write(targets[at], weights)
    except ValueError as error:
        raise ValueError(f"table {config.name!r}: {error}") from None
    return quantized
