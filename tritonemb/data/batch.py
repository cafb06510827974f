"""What a model is fed with at each step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonemb.jagged import KeyedJaggedTensor, _unflatten

ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for


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
    dense float32 `[batch_size, num_dense]`, labels float32 `[batch_size]`, values `[num_values]`, lengths int32
    `[len(keys) * batch_size]`, offsets int32 `[len(keys) * batch_size + 1]`.

    Args:
        keys: names of the features.
        wide: whether the values are int64; else they are int32.
    """

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
