"""Batches (the inputs of a step), and columnar rows in memory, from which batches are gathered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonemb.jagged import KeyedJaggedTensor, _unflatten
from tritonemb.utils import LARGE_BATCH, rows_to_pad

Array = np.ndarray[Any, Any]
ALIGNMENT = 64  # bytes: a cache line, and more than any vector load requires


@dataclass(frozen=True)
class Batch:
    """B samples: `dense` `[B, num_dense]` float32, `sparse` ids per feature, `labels` `[B]` float32 in {0, 1}, or of L
    labels `[B, L]`, NaN where missing, and `weights` of the rows `[B]` float32, None if all are 1.

    A pytree node of its tensors. The tensors of a data set's batch are views of one buffer (see `BatchLayout`), which
    is pinned and copied at once; a batch of separate tensors is copied tensor by tensor.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor | None = None
    buffer: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def layout(self) -> "BatchLayout":
        values = self.sparse.values()
        wide, num_dense = values.dtype == torch.int64, self.dense.shape[1]
        num_labels = self.labels.shape[1] if self.labels.dim() > 1 else 0
        kinds = wide, num_labels, self.weights is not None
        return BatchLayout(tuple(self.sparse.keys()), len(self), num_dense, len(values), *kinds)

    def label_weights(self) -> Tensor | None:
        """Return the weights of the labels: the row's, or 0 if missing; None for one label without weights."""
        if self.weights is None and self.labels.dim() == 1:
            return None
        valid = (~self.labels.isnan()).float()
        return valid if self.weights is None else valid * self.weights.view(-1, *[1] * (valid.dim() - 1))

    def __len__(self) -> int:
        return self.labels.shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.buffer is None:
            return Batch, (self.dense, self.sparse, self.labels, self.weights)
        return self.layout.batch, (self.buffer,)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        if self.labels.device == torch.device(device):
            return self
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        if self.buffer is not None:
            return self.layout.batch(function(self.buffer))
        return pytree.tree_map_only(Tensor, function, self)

    def packed(self) -> "Batch":
        """Return a copy in one buffer, or itself if in one. Raise ValueError for weights of ids or other dtypes."""
        if self.buffer is not None:
            return self
        if self.sparse.weights_or_none() is not None:
            raise ValueError("a batch whose ids have weights does not fit into one buffer")
        if self.dense.dim() != 2 or {self.dense.dtype, self.labels.dtype} != {torch.float32}:
            raise ValueError(
                "dense numbers must be float32 [B, num_dense] and labels float32 [B], got "
                f"{self.dense.dtype} {tuple(self.dense.shape)} and {self.labels.dtype}"
            )
        result = self.layout.batch(torch.empty(self.layout.num_bytes, dtype=torch.uint8))
        for name in ("dense", "labels", "weights"):
            if (tensor := getattr(self, name)) is not None:
                getattr(result, name).copy_(tensor)
        for name in ("values", "lengths", "offsets"):
            getattr(result.sparse, name)().copy_(getattr(self.sparse, name)())
        return result


@dataclass(frozen=True)
class BatchLayout:
    """Offsets of a batch's tensors in its buffer of bytes, each a multiple of 64:
    dense float32 `[batch_size, num_dense]`, labels float32 `[batch_size]`, or `[batch_size, num_labels]` unless 0,
    weights float32 `[batch_size]` if `has_weights`, values int32, or int64 if `wide`, `[num_values]`, lengths int32
    `[len(keys) * batch_size]`, offsets int32 `[len(keys) * batch_size + 1]`."""

    keys: tuple[str, ...]
    batch_size: int
    num_dense: int
    num_values: int
    wide: bool = False
    num_labels: int = 0
    has_weights: bool = False

    def _fields(self) -> list[tuple[torch.dtype, int]]:
        size, bags = self.batch_size, len(self.keys) * self.batch_size
        values = (torch.int64 if self.wide else torch.int32, self.num_values)
        floats = size * self.num_dense, size * max(self.num_labels, 1), size * self.has_weights
        integers = bags, bags + 1
        return [*((torch.float32, n) for n in floats), values, *((torch.int32, n) for n in integers)]

    def _field_offsets(self) -> list[int]:
        sizes = (-(-dtype.itemsize * count // ALIGNMENT) * ALIGNMENT for dtype, count in self._fields())
        return list(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        return self._field_offsets()[-1]

    @property
    def bytes_before_offsets(self) -> int:
        return self._field_offsets()[-2]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return views of a uint8 tensor `[num_bytes]`: dense, labels, weights, values, lengths and offsets."""
        fields = zip(self._field_offsets(), self._fields(), strict=False)
        views = [buffer[start : start + dtype.itemsize * count].view(dtype) for start, (dtype, count) in fields]
        views[0] = views[0].view(self.batch_size, self.num_dense)
        views[1] = views[1].view(self.batch_size, self.num_labels) if self.num_labels else views[1]
        return views

    def batch(self, buffer: Tensor) -> Batch:
        """Wrap a filled buffer as a batch; its contents are not checked."""
        dense, labels, weights, values, lengths, offsets = self.views(buffer)
        sparse = _unflatten([values, None, lengths, offsets], self.keys)
        return Batch(dense, sparse, labels, weights if self.has_weights else None, buffer)


pytree.register_pytree_node(
    Batch,
    lambda b: ([b.dense, b.sparse, b.labels, *([] if b.weights is None else [b.weights])], None),
    lambda children, _: Batch(*children),
    serialized_type_name="tritonemb.Batch",
)


@dataclass(frozen=True)
class Column:
    """Ids of one feature for all rows.

    Args:
        values: int32 or int64; `[num_rows]` with one id per row, else the concatenated ids of all rows.
        offsets: int64 `[num_rows + 1]`, the start of each row's ids; None with one id per row.
    """

    values: Tensor
    offsets: Tensor | None = None

    def __len__(self) -> int:
        return self.values.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def slice(self, start: int, stop: int) -> "Column":
        if self.offsets is None:
            return Column(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return Column(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


@dataclass(frozen=True)
class Rows:
    """Rows of a data set: `dense` `[N, num_dense]` float32, one column per feature; `labels` and `weights` as those of
    `Batch`. Raise ValueError if the numbers of rows differ."""

    dense: Tensor
    columns: tuple[Column, ...]
    labels: Tensor
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {"dense": self.dense.shape[0], "labels": self.labels.shape[0]}
        sizes |= {} if self.weights is None else {"weights": self.weights.shape[0]}
        sizes |= {f"column {index}": len(column) for index, column in enumerate(self.columns)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"dense, labels and all columns need the same number of rows, got {sizes}")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def slice(self, start: int, stop: int) -> "Rows":
        weights = None if self.weights is None else self.weights[start:stop]
        columns = tuple(column.slice(start, stop) for column in self.columns)
        return Rows(self.dense[start:stop], columns, self.labels[start:stop], weights)

    def take(self, rows: Tensor) -> "Rows":
        """Gather rows by index, in the order of the indices."""
        return concat_rows([self], rows.numpy())


def concat_rows(blocks: Sequence[Rows], order: Array | None = None) -> Rows:
    """Concatenate blocks of rows; with `order` (int64 `[N]`), return these rows of the result, in this order.

    Works column by column, so at most one column is in memory twice."""
    if len(blocks) == 1 and order is None:
        return blocks[0]
    columns = []
    for feature_columns in zip(*(block.columns for block in blocks), strict=True):
        positions, offsets = order, None
        if feature_columns[0].offsets is not None:
            lengths = np.concatenate([np.diff(c.offsets.numpy()) for c in feature_columns if c.offsets is not None])
            if order is not None:
                positions, lengths = segment_positions(lengths_to_offsets(lengths), order)
            offsets = torch.from_numpy(lengths_to_offsets(lengths))
        columns.append(Column(_concat([column.values for column in feature_columns], positions), offsets))
    dense, labels = (_concat([getattr(block, name) for block in blocks], order) for name in ("dense", "labels"))
    weights = [block.weights for block in blocks if block.weights is not None]
    return Rows(dense, tuple(columns), labels, _concat(weights, order) if weights else None)


def gather_batch(rows: Rows, keys: tuple[str, ...], indices: Array | slice, pin_memory: bool = False) -> Batch:
    """Gather a batch by `indices` (int64 `[B]`, or a slice) into one buffer, by NumPy: torch would start threads."""
    # Size the buffer: multi-hot columns have (positions or slice of the values, lengths) per bag.
    size = indices.stop - indices.start if isinstance(indices, slice) else len(indices)
    offsets_of = (None if column.offsets is None else column.offsets.numpy() for column in rows.columns)
    bags = [None if offsets is None else segment_positions(offsets, indices) for offsets in offsets_of]
    counts = [size if bag is None else int(bag[1].sum()) for bag in bags]
    wide = any(column.values.dtype == torch.int64 for column in rows.columns)
    kinds = wide, rows.labels.shape[1] if rows.labels.dim() > 1 else 0, rows.weights is not None
    layout = BatchLayout(keys, size, rows.dense.shape[1], sum(counts), *kinds)
    batch = layout.batch(torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pin_memory))
    # Fill it; the offsets follow from the lengths.
    for source, target in (rows.dense, batch.dense), (rows.labels, batch.labels), (rows.weights, batch.weights):
        if source is not None and target is not None:
            _gather_into(source.numpy(), indices, target.numpy())
    sparse = batch.sparse
    values, lengths, offsets = sparse.values().numpy(), sparse.lengths().numpy(), sparse.offsets().numpy()
    lengths.fill(1)
    for index, (column, bag, end) in enumerate(zip(rows.columns, bags, accumulate(counts), strict=True)):
        _gather_into(column.values.numpy(), indices if bag is None else bag[0], values[end - counts[index] : end])
        if bag is not None:
            lengths[index * size : (index + 1) * size] = bag[1]
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return batch


def pad_batch(batch: Batch, min_size: int = LARGE_BATCH) -> Batch:
    """Pad a CPU batch to at least `min_size` samples and a multiple of `BATCH_MULTIPLE`, with labels NaN, the numbers
    of the first sample, and of each of its bags the first id, if it has one, with its weight."""
    size, keys = len(batch), batch.sparse.keys()
    if size == 0 or (num_padding := rows_to_pad(size, min_size)) == 0:
        return batch
    order = np.append(np.arange(size), np.zeros(num_padding, np.int64))
    bags = (np.arange(len(keys))[:, None] * size + order).ravel()
    limits, ids = np.ones((len(keys), len(order)), np.int64), batch.sparse.values()
    limits[:, :size] = len(ids)
    positions, lengths = segment_positions(batch.sparse.offsets().numpy(), bags, limits.ravel())
    indices, offsets = torch.from_numpy(positions), torch.from_numpy(lengths_to_offsets(lengths))
    weights = None if (weights := batch.sparse.weights_or_none()) is None else weights[indices]
    sparse = KeyedJaggedTensor.unchecked(keys, ids[indices], weights, offsets)
    labels = batch.labels.numpy()[order]
    labels[size:] = np.nan
    weights = None if batch.weights is None else torch.from_numpy(batch.weights.numpy()[order])
    return Batch(torch.from_numpy(batch.dense.numpy()[order]), sparse, torch.from_numpy(labels), weights)


def _gather_into(source: Array, indices: Array | slice, target: Array) -> None:
    if isinstance(indices, slice) or source.dtype != target.dtype:
        target[...] = source[indices]
    elif len(indices):
        # Indices are in range; mode="clip" avoids a copy of the output.
        source.take(indices, axis=0, out=target, mode="clip")


def segment_positions(offsets: Array, indices: Array | slice, limits: Array | None = None) -> tuple[Any, Array]:
    """Return the positions of the values of some segments, concatenated, and the segments' lengths. With `limits`, one
    for each of the indices, these are of a segment's first values."""
    if isinstance(indices, slice):
        bounds = offsets[indices.start : indices.stop + 1]
        return slice(int(bounds[0]), int(bounds[-1])), np.diff(bounds)
    starts = offsets[indices]
    lengths = offsets[indices + 1] - starts
    lengths = lengths if limits is None else np.minimum(lengths, limits)
    shifts = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return np.arange(len(shifts)) + shifts, lengths


def lengths_to_offsets(lengths: Array) -> Array:
    return np.cumsum(np.append(0, lengths), dtype=np.int64)


def _concat(tensors: Sequence[Tensor], order: Array | None) -> Tensor:
    arrays = [tensor.numpy() for tensor in tensors]
    array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return torch.from_numpy(array if order is None else np.take(array, order, axis=0))
