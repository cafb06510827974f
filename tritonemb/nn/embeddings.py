"""`EmbeddingBag` and `Embedding`: PyTorch's modules of one table by tritonemb's kernels."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.modules.sparse import Embedding as TorchEmbedding  # whatever is in its place in `torch.nn`
from torch.nn.modules.sparse import EmbeddingBag as TorchEmbeddingBag

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.dynamic_modules import DynamicModule, become_dynamic
from tritonemb.nn.single_table import SingleTable
from tritonemb.ops.bag import Bags, are_ascending, check_ascending, count_unpadded, drop_padding, single_bag_offsets
from tritonemb.ops.row_groups import ID_DTYPES, plain_eager
from tritonemb.optimizers import Optimizer
from tritonemb.tables.table import new_weight
from tritonemb.types import TRAINABLE_DTYPES, Device


class EmbeddingBag(SingleTable, TorchEmbeddingBag):
    """Sums, means or maxima of bags of embeddings, with the arguments and the meaning of `torch.nn.EmbeddingBag`.

    It is a `torch.nn.EmbeddingBag`: one can stand in the other's place, and loads its `state_dict`. Sums and means, and
    their gradients, are deterministic, sums of 16-bit rows are float32. Of float32 rows on the CPU, PyTorch's op makes
    the results, and without an optimizer, for less than 2**18 elements, the gradients; all else is tritonemb's kernels,
    whose gradients are differentiable again. `mode="max"`, `scale_grad_by_freq`, `sparse=True` without an optimizer,
    and what else those do not serve is left to PyTorch, checks and errors too.

    With `num_embeddings=None` any int64 is an id; the attribute `table` is a `DynamicTable`, which an optimizer trains.

    Args:
        max_norm: rows that a call uses are scaled down to this norm (`norm_type`) first, in place; None for no limit.
        mode: "sum", "mean" or "max".
        sparse: the weight's gradient is a sparse COO tensor.
        include_last_offset: offsets end with the number of ids. Ids behind a smaller end belong to no bag; with
            `padding_idx` they belong to the last one, as in PyTorch.
        padding_idx: an id that has no part in a bag nor in the gradient; from the end if negative,
            but of any int64 ids an id like others.
        optimizer: with one of `tritonemb.optim`, the backward updates the weight exactly, deterministically and in
            place, and `weight.grad` stays None; `sparse` means nothing then.
        dynamic: with `num_embeddings=None`, as in `TableConfig`: `capacity` or `capacity_bytes`, `init_bound`,
            `eviction`, `admission`.

    Shapes:
        input: int32 or int64 ids, `[B, L]`, or `[N]` with `offsets` `[B]` (`[B + 1]` with `include_last_offset`), or a
            jagged nested tensor.
        per_sample_weights: of the input's shape and the weight's dtype, for `mode="sum"`.
        Result: `[B, embedding_dim]`, of the weight's dtype.

    Raises:
        RuntimeError: for an id out of range (IndexError with `max_norm`), offsets that do not fit, wrong dtypes. On a
            GPU the first two are a ValueError at the next lookup, or from `te.check_errors`; compiled, with an
            optimizer, a ValueError.
        ValueError: for offsets that descend, wrong shapes, an unknown mode, or options that exclude each other.
        NotImplementedError: for per-sample weights in another mode than "sum".

    With `num_embeddings=None` all of these are a ValueError or TypeError, and so are `max_norm`, `scale_grad_by_freq`,
    `sparse`, `mode="max"`, gradients without an optimizer, and new ids that find no room.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, _weight: Tensor | None = None,
        include_last_offset: bool = False, padding_idx: int | None = None, device: Device = None,
        dtype: torch.dtype | None = None, optimizer: Optimizer | None = None, **dynamic: Any,
    ) -> None:  # fmt: skip
        if num_embeddings is None or dynamic:
            refused = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
            refused |= {"_weight": _weight is not None, f"mode={mode!r}": mode not in ("sum", "mean")}
            own = {"mode": mode, "include_last_offset": include_last_offset, "padding_idx": padding_idx}
            sizes = num_embeddings, embedding_dim, "mean" if mode == "mean" else "sum", device, dtype
            become_dynamic(self, DynamicEmbeddingBag, *sizes, optimizer, dynamic, refused, own)
            return
        weight = new_weight(num_embeddings, embedding_dim, device, dtype) if _weight is None else _weight
        TorchEmbeddingBag.__init__(
            self, num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse, weight,
            include_last_offset, padding_idx,
        )  # fmt: skip
        self._begin(optimizer, draw=_weight is None)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, include_last_offset: bool = False,
        padding_idx: int | None = None, optimizer: Optimizer | None = None,
    ) -> Self:  # fmt: skip
        """A module around `embeddings` `[num_embeddings, embedding_dim]`; frozen, it is not trained."""
        return super().from_pretrained(  # type: ignore[operator]
            embeddings, freeze, max_norm, norm_type, scale_grad_by_freq, mode, sparse, include_last_offset, padding_idx
        )._begin(optimizer)  # fmt: skip

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """`[B, embedding_dim]`."""
        return self._called(self._pool, input, offsets, per_sample_weights)

    def _pool(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor:
        found = self._pool_by_torch(input, offsets, per_sample_weights)
        if found is not None:
            return found
        given = [input, offsets, per_sample_weights]
        if input is None or not all(t is None or (isinstance(t, Tensor) and not t.is_sparse) for t in given):
            raise TypeError(f"expected dense tensors, got {[*map(type, given)]}; see torch.tensor, to_dense")
        nested, padded = input.is_nested and input.layout == torch.jagged, self.padding_idx is not None
        fits, trained = self._fits(input, offsets, per_sample_weights), None
        ended = fits and self.include_last_offset and offsets is not None
        if fits and offsets is not None:
            check_ascending(offsets[:-1] if padded and ended else offsets, input.shape[0])
        unread = torch.compiler.is_compiling() or input.device.type != "cpu"
        if ended and unread and not padded and input.dtype in ID_DTYPES and offsets.shape[0] > 1:  # type: ignore[union-attr]
            input, trained, offsets = torch.ops.tritonemb.close_bags(input, offsets)
        ours = fits and self.mode in ("sum", "mean") and input.device == self.weight.device
        ours = ours and self._is_served(*([] if nested else [input, offsets, per_sample_weights]))
        values = input
        if ours or (ended and plain_eager(*given)):
            values, offsets, per_sample_weights = self._parts(input, offsets, per_sample_weights)
        if not ours:
            pooled: Tensor = TorchEmbeddingBag.forward(self, values, offsets, per_sample_weights)
            if self._optimized is not None and pooled.requires_grad:
                raise RuntimeError("the fused optimizer has no update for these arguments; te.unfuse the module first")
            return pooled if trained is None else pooled[:-1]
        assert offsets is not None
        self._renormalise(values)
        mean = self.mode == "mean"
        if self.padding_idx is None:
            bags, ids = Bags(offsets, True, mean), values if trained is None else trained
            pooled = self._look_up(values, ids, per_sample_weights, bags, self.weight.dtype)
            return pooled if trained is None else pooled[:-1]
        kept = drop_padding(values, offsets, self.padding_idx, self.weight.shape[0])
        dtype = torch.float32 if mean and self.weight.dtype in TRAINABLE_DTYPES else self.weight.dtype
        out = self._look_up(kept, kept, per_sample_weights, Bags(offsets, True, False, False), dtype)
        return (out / count_unpadded(kept, offsets)).to(self.weight.dtype) if mean else out

    def _pool_by_torch(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> Tensor | None:
        """The call by PyTorch's op where that is the faster one, else None."""
        bags, padded = input if offsets is None else offsets, self.padding_idx is not None
        few = self._few_elements(input, bags.shape[0] if isinstance(bags, Tensor) and bags.dim() else None)
        ended, traced = offsets is not None and self.include_last_offset, torch.compiler.is_compiling()
        if few is None or (offsets is not None and (traced or (padded and ended) or not are_ascending(offsets))):
            return None
        if ended and int(offsets[-1]) != input.numel():  # type: ignore[index]
            return None  # ids behind the last offset are in no bag
        simple = per_sample_weights is None and self.max_norm is None and self.mode in ("sum", "mean")
        if simple and input.dim() == 1 + (offsets is None) and input.numel():
            # Of means our kernel scales every row, and PyTorch's the sum.
            served = few or (not padded and (self.mode == "sum" or self._optimized is None))
            return self._by_torch(few, True, input, offsets) if served else None
        if not few or not (per_sample_weights is None or isinstance(per_sample_weights, Tensor)):
            return None
        return self._by_torch(few, False, input, offsets, per_sample_weights)

    def _torchs_op(self, weight: Tensor, input: Tensor, offsets: Tensor | None) -> Tensor:
        last, mean = self.include_last_offset, int(self.mode == "mean")
        if offsets is None:
            offsets, last = torch.arange(0, input.numel(), input.shape[1], dtype=input.dtype), False
            input = input.reshape(-1)
        options = self.scale_grad_by_freq, mean, self.sparse, None, last, self.padding_idx
        return torch.embedding_bag(weight, input, offsets, *options)[0]

    def _trained(self, input: Tensor, offsets: Tensor | None) -> tuple[Tensor, Bags]:
        values, offsets, _ = self._parts(input, offsets, None)
        return values, Bags(offsets, True, self.mode == "mean")

    def _parts(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids `[N]`, offsets `[B + 1]` from 0 to N, weights `[N]`."""
        if input.is_nested:
            jagged: Any = input
            flat: Any = per_sample_weights
            return jagged.values().reshape(-1), jagged.offsets(), None if flat is None else flat.values().reshape(-1)
        if input.dim() == 2:
            values = input.reshape(-1)
            offsets = torch.arange(0, values.shape[0] + 1, input.shape[1], device=input.device)
            return values, offsets, None if per_sample_weights is None else per_sample_weights.reshape(-1)
        assert offsets is not None
        if input.dtype not in ID_DTYPES:
            input = input.to(offsets.dtype)
        if self.include_last_offset:
            end, readable = input.shape[0], offsets.device.type == "cpu" and not torch.compiler.is_compiling()
            short = not readable or int(offsets[-1]) < end
            if short and self.padding_idx is not None and offsets.shape[0] > 1:
                # As in PyTorch, whose last bag has all that is left then.
                offsets = torch.cat([offsets[:-1], offsets[-1:].clamp(min=end)])
            elif short and readable:
                end = max(0, int(offsets[-1]))
        else:
            end = input.shape[0] if offsets.shape[0] else 0
            offsets = torch.cat([offsets, offsets.new_full((1,), end)])
        if end != input.shape[0]:  # what lies behind the last bag belongs to none
            input = input[:end]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights[:end]
        return input, offsets, per_sample_weights

    def _fits(self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> bool:
        """Whether arguments go together as the kernels want it; PyTorch's module raises where they do not."""
        if input.dim() == 2:
            fits = offsets is None and (input.is_nested or input.shape[1] > 0)
        else:
            fits = input.dim() == 1 and offsets is not None and offsets.dim() == 1
            fits = fits and not (self.include_last_offset and offsets.shape[0] == 0)  # type: ignore[union-attr]
        if per_sample_weights is not None and fits:
            alike = per_sample_weights.dtype == self.weight.dtype and input.size() == per_sample_weights.size()
            fits = alike and self.mode == "sum"
        dtype = input.dtype if offsets is None else torch.promote_types(input.dtype, offsets.dtype)
        return fits and dtype in ID_DTYPES


class Embedding(SingleTable, TorchEmbedding):
    """A table's rows by id, with the arguments and the meaning of `torch.nn.Embedding`.

    It is a `torch.nn.Embedding`: one can stand in the other's place, and loads its `state_dict`. Its gradients are
    tritonemb's kernels', but for small calls on the CPU, as in `EmbeddingBag`: deterministic, summed in float32 for
    16-bit rows. What those do not serve is left to PyTorch as there.

    Args:
        padding_idx: an id whose row gets no gradient; from the end if negative, but of any int64 ids one that has
            no row and reads zero.
        _freeze: the weight takes no gradient.

    All else as for `EmbeddingBag`.

    Shapes:
        input: int32 or int64 ids of any shape `[*]`. Result: `[*, embedding_dim]`, of the weight's dtype.

    Raises:
        IndexError: for an id out of range. On a GPU a ValueError at the next lookup, or from `te.check_errors`;
            compiled, with an optimizer, a ValueError.
        RuntimeError: for ids of another dtype.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
        _weight: Tensor | None = None, _freeze: bool = False, device: Device = None, dtype: torch.dtype | None = None,
        optimizer: Optimizer | None = None, **dynamic: Any,
    ) -> None:  # fmt: skip
        if num_embeddings is None or dynamic:
            refused = {"max_norm": max_norm is not None, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
            refused |= {"_weight": _weight is not None, "_freeze": _freeze}
            sizes, own = (num_embeddings, embedding_dim, "none", device, dtype), {"padding_idx": padding_idx}
            become_dynamic(self, DynamicEmbedding, *sizes, optimizer, dynamic, refused, own)
            return
        weight = new_weight(num_embeddings, embedding_dim, device, dtype) if _weight is None else _weight
        TorchEmbedding.__init__(
            self, num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, weight,
            _freeze,
        )  # fmt: skip
        self._begin(optimizer, draw=_weight is None)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
        optimizer: Optimizer | None = None,
    ) -> Self:  # fmt: skip
        """A module around `embeddings` `[num_embeddings, embedding_dim]`; frozen, it is not trained."""
        return super().from_pretrained(
            embeddings, freeze, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )._begin(optimizer)  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """`[*, embedding_dim]`."""
        return self._called(self._rows, input)

    def _rows(self, input: Tensor) -> Tensor:
        few = self._few_elements(input)
        if few is not None and input.dtype in ID_DTYPES:
            return self._by_torch(few, self.max_norm is None, input)
        dense_ids = isinstance(input, Tensor) and not input.is_sparse and input.dtype in ID_DTYPES
        if not dense_ids or not self._is_served(input):
            return TorchEmbedding.forward(self, input)
        values = input.reshape(-1)
        self._renormalise(values)
        trained, bags = self._trained(values)
        rows = self._look_up(values, trained, None, bags, self.weight.dtype)
        return rows.view(*input.shape, self.weight.shape[1])

    def _torchs_op(self, weight: Tensor, input: Tensor) -> Tensor:
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        return torch.embedding(weight, input, padding_idx, self.scale_grad_by_freq, self.sparse)

    def _trained(self, input: Tensor) -> tuple[Tensor, Bags]:
        values = input if input.dim() == 1 else input.reshape(-1)
        trained = values if self.padding_idx is None else values.masked_fill(values == self.padding_idx, -1)
        return trained, Bags(single_bag_offsets(values.shape[0], values.device), False)


class DynamicEmbeddingBag(DynamicModule, EmbeddingBag):
    """What `EmbeddingBag` becomes with `num_embeddings=None`."""

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """`[B, embedding_dim]`."""
        given, table = [input, offsets, per_sample_weights], self.table
        dense = all(t is None or (isinstance(t, Tensor) and not t.is_sparse and t.is_cpu) for t in given)
        if input is None or not dense or not self._fits(input, offsets, per_sample_weights):
            found = [f"{t.dtype} {[*t.shape]} on {t.device}" if isinstance(t, Tensor) else t for t in given]
            raise ValueError(
                "expected int32 or int64 ids [B, L] with L > 0, or [N] with offsets, dense and on the CPU, and for "
                f"mode='sum' perhaps per_sample_weights of their shape and of {table.weight.dtype}; got {found}"
            )
        values, offsets, weights = self._parts(input, offsets, per_sample_weights)
        batch = KeyedJaggedTensor([table.config.name], values, weights, offsets=offsets)
        if self.padding_idx is not None:
            kept = values != self.padding_idx
            ends = torch.cat([offsets.new_zeros(1), kept.cumsum(0, dtype=offsets.dtype)])[offsets.long()]
            weights = None if weights is None else weights[kept]
            batch = KeyedJaggedTensor.unchecked(batch.keys(), values[kept], weights, ends)
        return self._collection(batch)


class DynamicEmbedding(DynamicModule, Embedding):
    """What `Embedding` becomes with `num_embeddings=None`."""

    def forward(self, input: Tensor) -> Tensor:
        """`[*, embedding_dim]`."""
        if not isinstance(input, Tensor) or not input.is_cpu or input.layout != torch.strided:
            raise TypeError(f"expected a dense tensor of ids on the CPU, got {getattr(input, 'layout', type(input))}")
        if input.dtype not in ID_DTYPES:
            raise TypeError(f"ids must be int32 or int64, got {input.dtype}")
        ids, key = input.reshape(-1), self.table.config.name
        kept = torch.arange(len(ids)) if self.padding_idx is None else (ids != self.padding_idx).nonzero()[:, 0]
        batch = KeyedJaggedTensor.unchecked([key], ids[kept], None, single_bag_offsets(kept.shape[0], ids.device))
        rows = self._collection(batch).values()
        if self.padding_idx is not None:
            rows = rows.new_zeros(len(ids), self.embedding_dim).index_copy(0, kept, rows)
        return rows.view(*input.shape, self.embedding_dim)
