"""`EmbeddingBag` and `Embedding`: PyTorch's modules of one table, or one dynamic table, with tritonemb's kernels."""

from collections.abc import Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.sparse import Embedding as TorchEmbedding  # not from `torch.nn`, which may be patched
from torch.nn.modules.sparse import EmbeddingBag as TorchEmbeddingBag

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.collections import EmbeddingBagCollection, EmbeddingCollection
from tritonemb.nn.single_table import SingleTable
from tritonemb.ops.bag import (
    Bags,
    are_ascending,
    check_ascending,
    count_unpadded,
    divide_sums,
    drop_padding,
    single_bag_offsets,
)
from tritonemb.ops.registry import graph_break, plain_eager
from tritonemb.ops.row_groups import ID_DTYPES
from tritonemb.optimizers import Optimizer
from tritonemb.tables.optimizer import States
from tritonemb.tables.table import new_weight
from tritonemb.types import TRAINABLE_DTYPES, Device, Pooling, TableConfig


class EmbeddingBag(SingleTable, TorchEmbeddingBag):
    """Sums, means or maxima of bags of embeddings, with the arguments and semantics of `torch.nn.EmbeddingBag`.

    A drop-in replacement and subclass of `torch.nn.EmbeddingBag`, with the same `state_dict`. Sums and means, and their
    gradients, are deterministic; sums of 16-bit rows are float32. For float32 rows on the CPU, PyTorch's op computes
    the results and, without an optimizer and below 2**18 elements, the gradients. All else is computed by tritonemb's
    kernels, whose gradients are differentiable again. `mode="max"`, `scale_grad_by_freq`, `sparse=True` without an
    optimizer, and other unsupported arguments fall back to PyTorch, with its checks and errors.

    With `num_embeddings=None` any int64 is an id; the attribute `table` is a `DynamicTable`, which an optimizer trains.

    Args:
        max_norm: rows of a call are first scaled down to this norm (`norm_type`), in place; None for no limit.
        mode: "sum", "mean" or "max".
        sparse: whether the gradient of the weight is a sparse COO tensor.
        include_last_offset: whether offsets end with the number of ids. Ids beyond a smaller last offset are in no bag;
            with `padding_idx` they are in the last one, as in PyTorch.
        padding_idx: id that is excluded from bags and gradients; counted from the end if negative, except with
            `num_embeddings=None`.
        optimizer: with one of `tritonemb.optim`, the backward updates the weight exactly, deterministically and in
            place, and `weight.grad` stays None; `sparse` is ignored then.
        dynamic: with `num_embeddings=None`, as in `TableConfig`: `capacity` or `capacity_bytes`, `init_bound`,
            `eviction`, `admission`.

    Shapes:
        input: int32 or int64 ids, `[B, L]`, or `[N]` with `offsets` `[B]` (`[B + 1]` with `include_last_offset`), or a
            jagged nested tensor.
        per_sample_weights: weights of the input's shape and the weight's dtype, for `mode="sum"`.
        Result: `[B, embedding_dim]`, of the weight's dtype.

    Raises:
        RuntimeError: for an id out of range (IndexError with `max_norm`), invalid offsets, wrong dtypes. On a GPU the
            first two are a ValueError at the next lookup, or in `te.check_errors`; compiled with an optimizer, they are
            a ValueError, too.
        ValueError: for descending offsets, wrong shapes, an unknown mode, or incompatible options.
        NotImplementedError: for per-sample weights in another mode than "sum".

    With `num_embeddings=None` all of these are a ValueError or TypeError, and so are `max_norm`, `scale_grad_by_freq`,
    `sparse`, `mode="max"`, gradients without an optimizer, and new ids beyond the capacity.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, _weight: Tensor | None = None,
        include_last_offset: bool = False, padding_idx: int | None = None, device: Device = None,
        dtype: torch.dtype | None = None, optimizer: Optimizer | None = None, **dynamic: Any,
    ) -> None:  # fmt: skip
        if num_embeddings is None or dynamic:
            unsupported = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
            unsupported |= {"_weight": _weight is not None, f"mode={mode!r}": mode not in ("sum", "mean")}
            attributes = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx}
            sizes, dtype = (num_embeddings, embedding_dim), dtype or torch.get_default_dtype()
            pooling: Pooling = "mean" if mode == "mean" else "sum"
            config = TableConfig(type(self).__name__, *sizes, pooling=pooling, dtype=dtype, **dynamic)
            become_dynamic(self, config, optimizer, device, dynamic, unsupported, attributes)
            return
        weight = new_weight(num_embeddings, embedding_dim, device, dtype) if _weight is None else _weight
        TorchEmbeddingBag.__init__(
            self, num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse, weight,
            include_last_offset, padding_idx,
        )  # fmt: skip
        self._finish_init(optimizer, draw=_weight is None)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, include_last_offset: bool = False,
        padding_idx: int | None = None, optimizer: Optimizer | None = None,
    ) -> Self:  # fmt: skip
        """Wrap `embeddings` `[num_embeddings, embedding_dim]` in a module; with `freeze` it is not trained."""
        return super().from_pretrained(  # type: ignore[operator]
            embeddings, freeze, max_norm, norm_type, scale_grad_by_freq, mode, sparse, include_last_offset, padding_idx
        )._finish_init(optimizer)  # fmt: skip

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return pooled rows `[B, embedding_dim]`."""
        return self._call_with_context(self._pool, input, offsets, per_sample_weights)

    def _pool(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor:
        pooled_by_torch = self._pool_by_torch(input, offsets, per_sample_weights)
        if pooled_by_torch is not None:
            return pooled_by_torch
        tensors = [input, offsets, per_sample_weights]
        if input is None or not all(t is None or (isinstance(t, Tensor) and not t.is_sparse) for t in tensors):
            raise TypeError(f"expected dense tensors, got {[*map(type, tensors)]}; see torch.tensor, to_dense")
        # Check the inputs, and choose between tritonemb's kernels and PyTorch's.
        is_nested, has_padding = input.is_nested and input.layout == torch.jagged, self.padding_idx is not None
        is_valid, trained_ids = self._are_valid(input, offsets, per_sample_weights, self.weight.dtype), None
        has_last_offset = is_valid and self.include_last_offset and offsets is not None
        if is_valid and offsets is not None:
            check_ascending(offsets[:-1] if has_padding and has_last_offset else offsets, input.shape[0])
        is_unreadable = torch.compiler.is_compiling() or input.device.type != "cpu"
        if has_last_offset and is_unreadable and not has_padding and input.dtype in ID_DTYPES and offsets.shape[0] > 1:  # type: ignore[union-attr]
            input, trained_ids, offsets = torch.ops.tritonemb.close_bags(input, offsets)
        is_served = is_valid and self.mode in ("sum", "mean") and input.device == self.weight.device
        is_served = is_served and self._is_served(*([] if is_nested else [input, offsets, per_sample_weights]))
        values = input
        if is_served or (has_last_offset and plain_eager(*tensors)):
            values, offsets, per_sample_weights = self._flatten_batch(input, offsets, per_sample_weights)
        # Fall back to PyTorch's module.
        if not is_served:
            pooled: Tensor = TorchEmbeddingBag.forward(self, values, offsets, per_sample_weights)
            if self._optimized is not None and pooled.requires_grad:
                raise RuntimeError("the fused optimizer has no update for these arguments; te.unfuse the module first")
            return pooled if trained_ids is None else pooled[:-1]
        # Look up with tritonemb's kernels; with padding, means are sums that are divided afterwards.
        assert offsets is not None
        self._renormalize(values)
        mean = self.mode == "mean"
        if self.padding_idx is None:
            bags, ids = Bags(offsets, True, mean), values if trained_ids is None else trained_ids
            pooled = self._look_up(values, ids, per_sample_weights, bags, self.weight.dtype)
            return pooled if trained_ids is None else pooled[:-1]
        ids = drop_padding(values, offsets, self.padding_idx, self.weight.shape[0])
        dtype = torch.float32 if mean and self.weight.dtype in TRAINABLE_DTYPES else self.weight.dtype
        out = self._look_up(ids, ids, per_sample_weights, Bags(offsets, True, False, False), dtype)
        if not mean:
            return out
        counts, limit = count_unpadded(ids, offsets), None if self.optimizer is None else self.optimizer.max_gradient
        return (out / counts if limit is None else divide_sums(out, counts, limit)).to(self.weight.dtype)

    def _pool_by_torch(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor | None:
        """Pool with PyTorch's op if that is faster, else return None."""
        bags, has_padding = input if offsets is None else offsets, self.padding_idx is not None
        is_small = self._prefers_torch(input, bags.shape[0] if isinstance(bags, Tensor) and bags.dim() else None)
        has_last_offset, is_traced = offsets is not None and self.include_last_offset, torch.compiler.is_compiling()
        unsupported = is_traced or (has_padding and has_last_offset)
        if is_small is None or (offsets is not None and (unsupported or not are_ascending(offsets))):
            return None
        if has_last_offset and int(offsets[-1]) != input.numel():  # type: ignore[index]
            return None  # ids beyond the last offset are in no bag
        is_simple = per_sample_weights is None and self.max_norm is None and self.mode in ("sum", "mean")
        if is_simple and input.dim() == 1 + (offsets is None) and input.numel():
            # For means, tritonemb's kernel scales every row, PyTorch's scales the sum.
            is_faster = is_small or (not has_padding and (self.mode == "sum" or self._optimized is None))
            return self._by_torch(is_small, True, input, offsets) if is_faster else None
        if not is_small or not (per_sample_weights is None or isinstance(per_sample_weights, Tensor)):
            return None
        return self._by_torch(is_small, False, input, offsets, per_sample_weights)

    def _torch_op(self, weight: Tensor, input: Tensor, offsets: Tensor | None) -> Tensor:
        last, mean = self.include_last_offset, int(self.mode == "mean")
        if offsets is None:
            offsets, last = torch.arange(0, input.numel(), input.shape[1], dtype=input.dtype), False
            input = input.reshape(-1)
        options = self.scale_grad_by_freq, mean, self.sparse, None, last, self.padding_idx
        return torch.embedding_bag(weight, input, offsets, *options)[0]

    def _trained_ids(self, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Bags]:
        values, offsets, _ = self._flatten_batch(input, offsets, None)
        return values, Bags(offsets, True, self.mode == "mean")

    def _flatten_batch(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ids `[N]`, offsets `[B + 1]` from 0 to N, and weights `[N]`."""
        if input.is_nested:
            nested, nested_weights = cast(Any, input), cast(Any, per_sample_weights)
            weights = None if nested_weights is None else nested_weights.values().reshape(-1)
            return nested.values().reshape(-1), nested.offsets(), weights
        if input.dim() == 2:
            values = input.reshape(-1)
            offsets = torch.arange(0, values.shape[0] + 1, input.shape[1], device=input.device)
            return values, offsets, None if per_sample_weights is None else per_sample_weights.reshape(-1)
        assert offsets is not None
        if input.dtype not in ID_DTYPES:
            input = input.to(offsets.dtype)
        if self.include_last_offset:
            end, is_readable = input.shape[0], offsets.device.type == "cpu" and not torch.compiler.is_compiling()
            is_short = not is_readable or int(offsets[-1]) < end
            if is_short and self.padding_idx is not None and offsets.shape[0] > 1:
                # As in PyTorch, the last bag extends to the last id.
                offsets = torch.cat([offsets[:-1], offsets[-1:].clamp(min=end)])
            elif is_short and is_readable:
                end = max(0, int(offsets[-1]))
        else:
            end = input.shape[0] if offsets.shape[0] else 0
            offsets = torch.cat([offsets, offsets.new_full((1,), end)])
        if end != input.shape[0]:  # ids beyond the last offset are in no bag
            input = input[:end]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights[:end]
        return input, offsets, per_sample_weights

    def _are_valid(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None, dtype: torch.dtype) -> bool:
        """Return whether the kernels support these arguments; PyTorch's module raises for invalid ones."""
        if input.dim() == 2:
            is_valid = offsets is None and (input.is_nested or input.shape[1] > 0)
        else:
            is_valid = input.dim() == 1 and offsets is not None and offsets.dim() == 1
            is_valid = is_valid and not (self.include_last_offset and offsets.shape[0] == 0)  # type: ignore[union-attr]
        if weights is not None and is_valid:
            matches = weights.dtype == dtype and input.size() == weights.size()
            is_valid = matches and self.mode == "sum"
        dtype = input.dtype if offsets is None else torch.promote_types(input.dtype, offsets.dtype)
        return is_valid and dtype in ID_DTYPES


class Embedding(SingleTable, TorchEmbedding):
    """Rows of a table by id, with the arguments and semantics of `torch.nn.Embedding`.

    A drop-in replacement and subclass of `torch.nn.Embedding`, with the same `state_dict`. Gradients are computed by
    tritonemb's kernels, except for small calls on the CPU, as in `EmbeddingBag`: deterministic, summed in float32 for
    16-bit rows. Unsupported arguments fall back to PyTorch.

    Args:
        padding_idx: id whose row gets no gradient, counted from the end if negative; with `num_embeddings=None`, an id
            without a row, whose lookup returns zeros.
        _freeze: whether the weight gets no gradient.

    Other arguments are those of `EmbeddingBag`.

    Shapes:
        input: int32 or int64 ids of any shape `[*]`. Result: `[*, embedding_dim]`, of the weight's dtype.

    Raises:
        IndexError: for an id out of range. On a GPU a ValueError at the next lookup, or in `te.check_errors`; compiled
            with an optimizer, a ValueError.
        RuntimeError: for ids of another dtype.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
        _weight: Tensor | None = None, _freeze: bool = False, device: Device = None, dtype: torch.dtype | None = None,
        optimizer: Optimizer | None = None, **dynamic: Any,
    ) -> None:  # fmt: skip
        if num_embeddings is None or dynamic:
            unsupported = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
            unsupported |= {"_weight": _weight is not None, "_freeze": _freeze}
            sizes, dtype = (num_embeddings, embedding_dim), dtype or torch.get_default_dtype()
            config = TableConfig(type(self).__name__, *sizes, pooling="none", dtype=dtype, **dynamic)
            become_dynamic(self, config, optimizer, device, dynamic, unsupported, {"padding_idx": padding_idx})
            return
        weight = new_weight(num_embeddings, embedding_dim, device, dtype) if _weight is None else _weight
        TorchEmbedding.__init__(
            self, num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, weight,
            _freeze,
        )  # fmt: skip
        self._finish_init(optimizer, draw=_weight is None)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
        optimizer: Optimizer | None = None,
    ) -> Self:  # fmt: skip
        """Wrap `embeddings` `[num_embeddings, embedding_dim]` in a module; with `freeze` it is not trained."""
        return super().from_pretrained(
            embeddings, freeze, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )._finish_init(optimizer)  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """Return rows `[*, embedding_dim]`."""
        return self._call_with_context(self._rows, input)

    def _rows(self, input: Tensor) -> Tensor:
        is_small = self._prefers_torch(input)
        if is_small is not None and input.dtype in ID_DTYPES:
            return self._by_torch(is_small, self.max_norm is None, input)
        is_dense = isinstance(input, Tensor) and not input.is_sparse and input.dtype in ID_DTYPES
        if not is_dense or not self._is_served(input):
            return TorchEmbedding.forward(self, input)
        values = input.reshape(-1)
        self._renormalize(values)
        trained_ids, bags = self._trained_ids(values)
        rows = self._look_up(values, trained_ids, None, bags, self.weight.dtype)
        return rows.view(*input.shape, self.weight.shape[1])

    def _torch_op(self, weight: Tensor, input: Tensor) -> Tensor:
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        return torch.embedding(weight, input, padding_idx, self.scale_grad_by_freq, self.sparse)

    def _trained_ids(self, input: Tensor) -> tuple[Tensor, Bags]:
        values = input if input.dim() == 1 else input.reshape(-1)
        trained_ids = values if self.padding_idx is None else values.masked_fill(values == self.padding_idx, -1)
        return trained_ids, Bags(single_bag_offsets(values.shape[0], values.device), False)


class DynamicModule(SingleTable):
    """Module with the parameters, buffers and `state_dict` of `table`.

    With an optimizer, the `state_dict` also has `updates`, the number of steps, which Adam needs.
    """

    _collection: Any  # of one table; not a submodule, so that keys of `state_dict` have no prefix

    @graph_break(
        "a module with num_embeddings=None assigns rows to new ids on the host; for one graph put its table into an "
        "EmbeddingBagCollection or EmbeddingCollection, and pass the compiled model te.nn.prefetch(model, features)"
    )
    def _look_up_batch(self, batch: KeyedJaggedTensor) -> Any:
        return self._collection(batch)

    def reset_parameters(self) -> None:
        """Remove all ids, draw a new seed, and zero the optimizer's states."""
        self._collection.reset_parameters()

    def _states(self) -> States:
        return self._collection._states()

    @property
    def learning_rate(self) -> Tensor:
        return self._collection._buffers["learning_rate"] if self.optimizer else super().learning_rate

    def skipped_rows(self) -> int:
        return sum(self._collection.skipped_rows().values())

    def optimizer_states(self) -> dict[str, Tensor]:
        """`step`, and the optimizer's states by name; empty without a fused optimizer."""
        states = {"step": self._collection.step, **self.table.tensors()} if self.optimizer else {}
        return {name: value for name, value in states.items() if name != "weight"}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.table._save_to_state_dict(destination, prefix, keep_vars)
        if self.optimizer is not None:
            destination[f"{prefix}updates"] = self._collection.step.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self._optimized is not None:
            self._optimized.accumulator.check_closed("load_state_dict()")
        missing_keys, error_msgs, table_state = args[-3], args[-1], dict(state_dict)
        updates = table_state.pop(f"{prefix}updates", None) if self.optimizer is not None else None
        self.table._load_from_state_dict(table_state, prefix, *args)
        if updates is not None and not error_msgs:
            self._collection.step.fill_(int(updates))
        elif self.optimizer is not None and updates is None:
            missing_keys.append(f"{prefix}updates")

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._collection._apply(fn)
        return self


class DynamicEmbeddingBag(DynamicModule, EmbeddingBag):
    """Class of an `EmbeddingBag` with `num_embeddings=None`."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Return pooled rows `[B, embedding_dim]`."""
        tensors, device = [input, offsets, per_sample_weights], self.table.weight.device
        arguments = [t for t in tensors if t is not None]
        are_dense = all(isinstance(t, Tensor) and not t.is_sparse and t.device == device for t in arguments)
        dtype = getattr(self._collection, "output_dtype", self.weight.dtype)  # of quantized rows
        if input is None or not are_dense or not self._are_valid(input, offsets, per_sample_weights, dtype):
            descriptions = [f"{t.dtype} {[*t.shape]} on {t.device}" if isinstance(t, Tensor) else t for t in tensors]
            raise ValueError(
                f"expected int32 or int64 ids [B, L] with L > 0, or [N] with offsets, dense and on {device}, and "
                f"with mode='sum' optionally per_sample_weights of this shape and {dtype}; got {descriptions}"
            )
        values, offsets, weights = self._flatten_batch(input, offsets, per_sample_weights)
        batch = KeyedJaggedTensor([self.table.config.name], values, weights, offsets=offsets)
        if self.padding_idx is not None:
            is_id = values != self.padding_idx
            ends = torch.cat([offsets.new_zeros(1), is_id.cumsum(0, dtype=offsets.dtype)])[offsets.long()]
            weights = None if weights is None else weights[is_id]
            batch = KeyedJaggedTensor.unchecked(batch.keys(), values[is_id], weights, ends)
        return self._look_up_batch(batch)


class DynamicEmbedding(DynamicModule, Embedding):
    """Class of an `Embedding` with `num_embeddings=None`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return rows `[*, embedding_dim]`."""
        device = self.table.weight.device
        if not isinstance(input, Tensor) or input.device != device or input.layout != torch.strided:
            raise TypeError(f"expected a dense tensor of ids on {device}, got {getattr(input, 'layout', type(input))}")
        if input.dtype not in ID_DTYPES:
            raise TypeError(f"ids must be int32 or int64, got {input.dtype}")
        ids, key = input.reshape(-1), self.table.config.name
        is_id = torch.ones_like(ids) if self.padding_idx is None else ids != self.padding_idx
        positions = is_id.nonzero()[:, 0]
        offsets = single_bag_offsets(positions.shape[0], ids.device)
        batch = KeyedJaggedTensor.unchecked([key], ids[positions], None, offsets)
        rows = self._look_up_batch(batch).values()
        if self.padding_idx is not None:
            rows = rows.new_zeros(len(ids), self.embedding_dim).index_copy(0, positions, rows)
        return rows.view(*input.shape, self.embedding_dim)


def become_dynamic(
    module: SingleTable, config: TableConfig, optimizer: Optimizer | None, device: Device, dynamic: Mapping[str, Any],
    unsupported: Mapping[str, Any], attributes: Mapping[str, Any],
) -> None:  # fmt: skip
    """Construct `module` with a dynamic table; raise TypeError or ValueError for unsupported arguments."""
    name, kinds = config.name, {EmbeddingBag: DynamicEmbeddingBag, Embedding: DynamicEmbedding}
    conflicting = [option for option, is_set in unsupported.items() if is_set] if config.is_dynamic else [*dynamic]
    if conflicting or not config.is_dynamic:
        raise ValueError(
            f"{name}: {', '.join(conflicting)} conflicts with num_embeddings={config.num_embeddings}; omit one"
        )
    if type(module) not in kinds:
        raise TypeError(f"{name} is a subclass, which needs num_embeddings; use an embedding with None as a submodule")
    collection_type = EmbeddingCollection if config.pooling == "none" else EmbeddingBagCollection
    collection = collection_type([config], optimizer, device)
    nn.Module.__init__(module)
    module.__class__ = kinds[type(module)]
    table, plain = collection.tables[0], {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False}
    vars(module).update(plain, sparse=False, num_embeddings=None, embedding_dim=config.embedding_dim, **attributes)
    vars(module).update(_collection=collection, _optimized=collection._optimized, table=table)
    vars(module).update(_parameters=table._parameters, _buffers=table._buffers)
