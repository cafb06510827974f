"""Rows in memory, column by column, and how a batch is cut from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.data.batch import Batch, BatchLayout

Array = np.ndarray[Any, Any]


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
        return concat([self], rows.numpy())


def concat(parts: Sequence[Rows], order: Array | None = None) -> Rows:
    """The rows of all parts, one part after the other; with `order` (int64 `[N]`), those rows in that order. Column by
    column, so that there is never more than one of them twice."""
    if len(parts) == 1 and order is None:
        return parts[0]
    columns = []
    for pieces in zip(*(part.columns for part in parts), strict=True):
        places, offsets = order, None
        if pieces[0].offsets is not None:
            lengths = np.concatenate([np.diff(piece.offsets.numpy()) for piece in pieces if piece.offsets is not None])
            offsets = offsets_of(lengths)
            if order is not None:
                places, lengths = _places(offsets, order)
                offsets = offsets_of(lengths)
        values = _joined([piece.values for piece in pieces], places)
        columns.append(Column(torch.from_numpy(values), None if offsets is None else torch.from_numpy(offsets)))
    dense, labels = (_joined([getattr(part, name) for part in parts], order) for name in ("dense", "labels"))
    return Rows(torch.from_numpy(dense), tuple(columns), torch.from_numpy(labels))


def cut(rows: Rows, keys: tuple[str, ...], chosen: Array | slice, pin_memory: bool = False) -> Batch:
    """The batch of the chosen rows (int64 `[B]`, in their order, or a run of them), in one buffer. NumPy copies: for a
    thread of its own, torch would start a team of workers."""
    size = chosen.stop - chosen.start if isinstance(chosen, slice) else len(chosen)
    picks = [None if column.offsets is None else _pick(column.offsets.numpy(), chosen) for column in rows.columns]
    counts = [size if pick is None else int(pick[1].sum()) for pick in picks]
    wide = any(column.values.dtype == torch.int64 for column in rows.columns)
    layout = BatchLayout(keys, size, rows.dense.shape[1], sum(counts), wide)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    dense, labels, values, lengths, offsets = (view.numpy() for view in layout.views(buffer))
    _copy(rows.dense.numpy(), chosen, dense)
    _copy(rows.labels.numpy(), chosen, labels)
    lengths.fill(1)
    start = 0
    for index, (column, pick, count) in enumerate(zip(rows.columns, picks, counts, strict=True)):
        _copy(column.values.numpy(), chosen if pick is None else pick[0], values[start : start + count])
        if pick is not None:
            lengths[index * size : (index + 1) * size] = pick[1]
        start += count
    offsets[0] = 0
    np.cumsum(lengths, out=offsets[1:])
    return layout.batch(buffer)


def _copy(source: Array, chosen: Array | slice, target: Array) -> None:
    if isinstance(chosen, slice) or source.dtype != target.dtype:
        target[...] = source[chosen]
    elif len(chosen):
        np.take(source, chosen, axis=0, out=target, mode="clip")  # all are in range; "clip" spares a copy of the output


def _pick(offsets: Array, chosen: Array | slice) -> tuple[Array | slice, Array]:
    if not isinstance(chosen, slice):
        return _places(offsets, chosen)
    ends = offsets[chosen.start : chosen.stop + 1]
    return slice(int(ends[0]), int(ends[-1])), np.diff(ends)


def _places(offsets: Array, rows: Array) -> tuple[Array, Array]:
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    shift = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return np.arange(len(shift)) + shift, lengths


def offsets_of(lengths: Array) -> Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _joined(tensors: Sequence[Tensor], order: Array | None) -> Array:
    arrays = [tensor.numpy() for tensor in tensors]
    whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    return whole if order is None else np.take(whole, order, axis=0)
