"""What a model is fed with at each step: batches, and the rows in memory, column by column, that they are cut from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonemb.jagged import KeyedJaggedTensor, _unflatten

Array = np.ndarray[Any, Any]
ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for
# Matrix products of at least LARGE_BATCH rows, and of a multiple of BATCH_MULTIPLE, round each row alike; others may
# not (MKL and oneDNN, layers up to 1,200 wide: measured).
LARGE_BATCH, BATCH_MULTIPLE = 512, 16


@dataclass(frozen=True)
class Batch:
    """B samples: `dense` `[B, num_dense]` float32, `sparse` ids per feature, `labels` `[B]` float32 in {0, 1}.

    A pytree node of its tensors. The batches of a data set lie in one buffer (see `BatchLayout`), so that they are
    pinned and moved at once; a batch made from separate tensors is moved tensor by tensor.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    buffer: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def layout(self) -> "BatchLayout":
        """Of a buffer with these tensors."""
        values = self.sparse.values()
        wide, num_dense = values.dtype == torch.int64, self.dense.shape[1]
        return BatchLayout(tuple(self.sparse.keys()), len(self), num_dense, len(values), wide)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        if self.buffer is None:
            return Batch, (self.dense, self.sparse, self.labels)
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
        """The same batch in one buffer; this one if it has one. ValueError if ids have weights, or types are others."""
        if self.buffer is not None:
            return self
        if self.sparse.weights_or_none() is not None:
            raise ValueError("a batch whose ids have weights does not fit into one buffer")
        if self.dense.dim() != 2 or any(part.dtype != torch.float32 for part in (self.dense, self.labels)):
            raise ValueError(
                "dense numbers must be float32 [B, num_dense] and labels float32 [B], got "
                f"{self.dense.dtype} {tuple(self.dense.shape)} and {self.labels.dtype}"
            )
        layout = self.layout
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
        parts = (self.dense, self.labels, self.sparse.values(), self.sparse.lengths(), self.sparse.offsets())
        for view, part in zip(layout.views(buffer), parts, strict=True):
            view.copy_(part)
        return layout.batch(buffer)


@dataclass(frozen=True)
class BatchLayout:
    """Positions of a batch's tensors in its buffer of bytes, each at a multiple of 64:
    dense float32 `[batch_size, num_dense]`, labels float32 `[batch_size]`, values int32, or int64 if `wide`,
    `[num_values]`, lengths int32 `[len(keys) * batch_size]`, offsets int32 `[len(keys) * batch_size + 1]`."""

    keys: tuple[str, ...]
    batch_size: int
    num_dense: int
    num_values: int
    wide: bool = False

    def _parts(self) -> tuple[tuple[torch.dtype, int], ...]:
        bags = len(self.keys) * self.batch_size
        return (
            (torch.float32, self.batch_size * self.num_dense),
            (torch.float32, self.batch_size),
            (torch.int64 if self.wide else torch.int32, self.num_values),
            (torch.int32, bags),
            (torch.int32, bags + 1),
        )

    def _starts(self) -> list[int]:
        sizes = (-(-dtype.itemsize * count // ALIGNMENT) * ALIGNMENT for dtype, count in self._parts())
        return list(accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        return self._starts()[-1]

    @property
    def bytes_before_offsets(self) -> int:
        """Of everything before the offsets, which come last and can be computed from it."""
        return self._starts()[-2]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Dense, labels, values, lengths and offsets: views of a uint8 tensor of `num_bytes`, on any device."""
        parts = zip(self._starts(), self._parts(), strict=False)
        views = [buffer[start : start + dtype.itemsize * count].view(dtype) for start, (dtype, count) in parts]
        views[0] = views[0].view(self.batch_size, self.num_dense)
        return views

    def batch(self, buffer: Tensor) -> Batch:
        """The batch in a filled buffer, whose contents are not checked."""
        dense, labels, values, lengths, offsets = self.views(buffer)
        return Batch(dense, _unflatten([values, None, lengths, offsets], self.keys), labels, buffer)


pytree.register_pytree_node(
    Batch,
    lambda batch: ([batch.dense, batch.sparse, batch.labels], None),
    lambda children, _: Batch(*children),
    serialized_type_name="tritonemb.Batch",
)


@dataclass(frozen=True)
class Column:
    """One feature's ids for all rows.

    Args:
        values: int32 or int64; `[num_rows]` with one id a row, else all rows' ids one after the other.
        offsets: `[num_rows + 1]` int64, where each row's ids start; None with one id a row.
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
    """Rows of a data set: `dense` `[N, num_dense]` float32, one column a feature, `labels` `[N]` float32 in {0, 1}.
    ValueError where the numbers of rows differ."""

    dense: Tensor
    columns: tuple[Column, ...]
    labels: Tensor

    def __post_init__(self) -> None:
        sizes = {"dense": self.dense.shape[0], "labels": self.labels.shape[0]}
        sizes |= {f"column {index}": len(column) for index, column in enumerate(self.columns)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"dense, labels and all columns need the same number of rows, got {sizes}")

    def __len__(self) -> int:
        return self.labels.shape[0]

    def slice(self, start: int, stop: int) -> "Rows":
        columns = tuple(column.slice(start, stop) for column in self.columns)
        return Rows(self.dense[start:stop], columns, self.labels[start:stop])

    def take(self, rows: Tensor) -> "Rows":
        """The given rows, in their order."""
        return concat_rows([self], rows.numpy())


def concat_rows(parts: Sequence[Rows], order: Array | None = None) -> Rows:
    """The rows of all parts, one part after the other; with `order` (int64 `[N]`), those rows in that order. Column by
    column, so that there is never more than one of them twice."""
    if len(parts) == 1 and order is None:
        return parts[0]
    columns = []
    for pieces in zip(*(part.columns for part in parts), strict=True):
        places, offsets = order, None
        if pieces[0].offsets is not None:
            lengths = np.concatenate([np.diff(piece.offsets.numpy()) for piece in pieces if piece.offsets is not None])
            offsets = lengths_to_offsets(lengths)
            if order is not None:
                places, lengths = _segment_positions(offsets, order)
                offsets = lengths_to_offsets(lengths)
        values = _concat_arrays([piece.values for piece in pieces], places)
        columns.append(Column(torch.from_numpy(values), None if offsets is None else torch.from_numpy(offsets)))
    dense, labels = (_concat_arrays([getattr(part, name) for part in parts], order) for name in ("dense", "labels"))
    return Rows(torch.from_numpy(dense), tuple(columns), torch.from_numpy(labels))


def gather_batch(rows: Rows, keys: tuple[str, ...], chosen: Array | slice, pin_memory: bool = False) -> Batch:
    """The batch of the chosen rows (int64 `[B]`, in their order, or a run of them), in one buffer. NumPy copies: for a
    thread of its own, torch would start a team of workers."""
    size = chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)
    picks = [None if column.offsets is None else _segments(column.offsets.numpy(), chosen) for column in rows.columns]
    counts = [size if pick is None else int(pick[1].sum()) for pick in picks]
    wide = any(column.values.dtype == torch.int64 for column in rows.columns)
    layout = BatchLayout(keys, size, rows.dense.shape[1], sum(counts), wide)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    dense, labels, values, lengths, offsets = (view.numpy() for view in layout.views(buffer))
    _gather_into(rows.dense.numpy(), chosen, dense)
    _gather_into(rows.labels.numpy(), chosen, labels)
    lengths.fill(1)
    start = 0
    for index, (column, pick, count) in enumerate(zip(rows.columns, picks, counts, strict=True)):
        _gather_into(column.values.numpy(), chosen if pick is None else pick[0], values[start : start + count])
        if pick is not None:
            lengths[index * size : (index + 1) * size] = pick[1]
        start += count
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return layout.batch(buffer)


def pad_batch(batch: Batch, least: int = LARGE_BATCH) -> Batch:
    """A batch on the CPU with copies of its first sample behind it, whose labels are NaN, up to a multiple of
    `BATCH_MULTIPLE` samples and at least `least`."""
    size, keys = len(batch), batch.sparse.keys()
    if size == 0 or (missing := max(least, -(-size // BATCH_MULTIPLE) * BATCH_MULTIPLE) - size) == 0:
        return batch
    order = np.zeros(size + missing, dtype=np.int64)
    order[:size] = np.arange(size)
    bags = (np.arange(len(keys))[:, None] * size + order).ravel()
    places, lengths = _segment_positions(batch.sparse.offsets().numpy(), bags)
    values = torch.from_numpy(batch.sparse.values().numpy()[places])
    sparse = KeyedJaggedTensor.unchecked(keys, values, None, torch.from_numpy(lengths_to_offsets(lengths)))
    labels = np.append(batch.labels.numpy(), np.full(missing, np.nan, dtype=np.float32))
    return Batch(torch.from_numpy(batch.dense.numpy()[order]), sparse, torch.from_numpy(labels))


def _gather_into(source: Array, chosen: Array | slice, target: Array) -> None:
    if isinstance(chosen, slice) or source.dtype != target.dtype:
        target[...] = source[chosen]
    elif len(chosen):
        np.take(source, chosen, axis=0, out=target, mode="clip")  # all are in range; "clip" spares a copy of the output


def _segments(offsets: Array, chosen: Array | slice) -> tuple[Array | slice, Array]:
    if not isinstance(chosen, slice):
        return _segment_positions(offsets, chosen)
    ends = offsets[chosen.start : chosen.stop + 1]
    return slice(int(ends[0]), int(ends[-1])), np.diff(ends)


def _segment_positions(offsets: Array, rows: Array) -> tuple[Array, Array]:
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    shift = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return np.arange(len(shift)) + shift, lengths


def lengths_to_offsets(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _concat_arrays(tensors: Sequence[Tensor], order: Array | None) -> Array:
    arrays = [tensor.numpy() for tensor in tensors]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return whole if order is None else np.take(whole, order, axis=0)
