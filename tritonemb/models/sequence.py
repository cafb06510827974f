"""Base of models of item sequences: lookup, windows that end with the last item, training on the next item."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonemb.jagged import Features, KeyedJaggedTensor, is_host_readable
from tritonemb.models.losses import sampled_softmax
from tritonemb.nn.collections import EmbeddingCollection
from tritonemb.optimizers import Optimizer
from tritonemb.types import Device, TableConfig

SHORTEST_WINDOW = 8  # shorter windows save less than another call of each kernel costs


class Window(NamedTuple):
    """Windows `[B, L]` of some sequences of a batch: the last item of each is in the last column."""

    items: Tensor  # int64 [N]: numbers of the sequences' items in the batch
    slots: Tensor  # int64 [N]: row * L + column of each
    mask: Tensor  # bool [B, L]: whether a slot has an item

    @classmethod
    def create(cls, length: int, lengths: Tensor, items: Tensor, rows: Tensor, distances: Tensor) -> "Window":
        """Create windows of this length of sequences `[B]`, whose items have these rows and distances to the end."""
        mask = torch.arange(length, device=items.device) >= length - lengths[:, None]
        return cls(items, (rows + 1) * length - 1 - distances, mask)

    def pad(self, packed: Tensor) -> Tensor:
        """Place packed items `[N, ...]` in zeros `[B, L, ...]`."""
        padded = packed.new_zeros(self.mask.numel(), *packed.shape[1:])
        return padded.index_copy(0, self.slots, packed).unflatten(0, self.mask.shape)

    def pack(self, padded: Tensor) -> Tensor:
        """Select the items `[N, ...]` of `[B, L, ...]`."""
        return padded.flatten(0, 1).index_select(0, self.slots)

    def causal_mask(self) -> Tensor:
        """Return a mask `[B, L, L]` of the keys that a query may read: itself, and items before it."""
        length = self.mask.shape[1]
        causal = self.mask.new_ones(length, length).tril()
        return causal & (self.mask[:, None, :] | torch.eye(length, dtype=torch.bool, device=self.mask.device))


class Windows:
    """Sequences of a batch. Their items are packed, `[N, ...]`, for all layers but attention, so padding costs little.

    Where lengths can be read on the host, attention pads a sequence to one of a few lengths, not to the longest.

    Args:
        lengths: items of each sequence, int64 `[B]`. One that is longer than `max_length` is a ValueError, or fails
            an assertion on the device if lengths cannot be read on the host.
        num_items: their sum, N.

    Attributes:
        window: windows of all sequences, of `max_length`.
        rows, distances: sequence of each item, and number of items after it there, `[N]`.
    """

    def __init__(self, lengths: Tensor, num_items: int, max_length: int) -> None:
        items = torch.arange(num_items, device=lengths.device)
        sequences = torch.arange(len(lengths), device=lengths.device)
        self.rows = torch.repeat_interleave(sequences, lengths, output_size=num_items)
        self.distances = lengths.cumsum(0)[self.rows] - 1 - items
        self.window = Window.create(max_length, lengths, items, self.rows, self.distances)
        self._parts = [self.window]
        if not num_items:
            return
        if not can_read(lengths):  # a longer one would write into the window of another
            torch._assert_async((lengths <= max_length).all(), f"a sequence has more than {max_length} items")
            return
        if (longest := int(lengths.max())) > max_length:
            raise ValueError(
                f"a sequence has {longest} items, expected at most {max_length}: keep its last {max_length}"
            )
        sizes, self._parts = [max_length], []
        while sizes[0] > SHORTEST_WINDOW:
            sizes.insert(0, -(-sizes[0] // 2))
        for shortest, size in pairwise([0, *sizes]):
            chosen = (lengths > shortest) & (lengths <= size)
            part, numbers = items[chosen[self.rows]], chosen.cumsum(0) - 1
            if len(part):
                rows, distances = numbers[self.rows[part]], self.distances[part]
                self._parts.append(Window.create(size, lengths[chosen], part, rows, distances))

    def attend(self, attention: Callable[..., Tensor], *packed: Tensor) -> Tensor:
        """Return packed `attention(window, *padded)`, which maps `[B, L, ...]` to `[B, L, ...]`."""
        if len(self._parts) == 1:
            return self._parts[0].pack(attention(self._parts[0], *map(self._parts[0].pad, packed)))
        outputs = [w.pack(attention(w, *(w.pad(x.index_select(0, w.items)) for x in packed))) for w in self._parts]
        output, order = torch.cat(outputs), torch.cat([window.items for window in self._parts])
        return output.new_empty(output.shape).index_copy(0, order, output)


def can_read(lengths: Tensor) -> bool:
    """Return whether lengths can be read at no cost: on the CPU, and not compiled."""
    return not torch.compiler.is_compiling() and is_host_readable(lengths)


class SequenceModel(nn.Module):
    """Base of models of item sequences.

    Args:
        table: table of the items, on any tier, static or dynamic; its only feature is the key of jagged sequences.
        max_length: length of the windows, the longest sequence.
        optimizer: optimizer of the table, fused into the backward; None for ordinary gradients.
    """

    def __init__(self, table: TableConfig, max_length: int, optimizer: Optimizer | None, device: Device) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        self.embeddings = EmbeddingCollection([replace(table, pooling="none")], optimizer, device)
        if len(self.embeddings.feature_names) != 1:
            raise ValueError(f"table {table.name!r} has features {table.feature_names}, expected one: its sequences")
        (self.key,), self.max_length = self.embeddings.feature_names, max_length

    def encode(self, rows: Tensor, windows: Windows, times: Tensor | None = None) -> Tensor:
        """Map rows of items `[N, D]` to hidden states `[N, D]`, each of an item and those before it."""
        raise NotImplementedError

    def look_up(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the rows `[N, D]` of ids `[N]`, which have these lengths."""
        rows = self.embeddings(KeyedJaggedTensor([self.key], ids, lengths=lengths)).values()
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def forward(self, sequences: Tensor | Features, times: Tensor | None = None) -> Tensor:
        """Return hidden states, zero in padding.

        Args:
            sequences: jagged, `max_length` or less ids of each sample, the last n of its history; result
                `[B, max_length, D]`, each sequence at the end of its window. Or ids `[B, L]` of equally long
                sequences; result `[B, L, D]`.
            times: times of the ids in seconds, int64 `[N]` or `[B, L]`, for a model that uses them.
        """
        ids, lengths, length, times = _unpack(sequences, self.key, self.max_length, times)
        windows = Windows(lengths, len(ids), length)
        hidden = self.encode(self.look_up(ids, lengths), windows, times)
        return windows.window.pad(hidden)


def _unpack(
    sequences: Tensor | Features, key: str, max_length: int, times: Tensor | None
) -> tuple[Tensor, Tensor, int, Tensor | None]:
    """Return ids `[N]`, lengths `[B]`, the length of the windows, and the times of the ids `[N]`."""
    num_ids = sequences.numel() if isinstance(sequences, Tensor) else len(sequences.values())
    if times is not None and times.numel() != num_ids:
        raise ValueError(f"times must be those of the {num_ids} ids, without padding, got shape {list(times.shape)}")
    times = None if times is None else times.flatten()
    if isinstance(sequences, Tensor):
        size, length = sequences.shape
        if length > max_length:
            raise ValueError(
                f"sequences have {length} items, expected at most {max_length}: keep the last {max_length}"
            )
        return sequences.flatten(), torch.full((size,), length, device=sequences.device), length, times
    if list(sequences.keys()) != [key]:
        raise ValueError(f"expected sequences with the key {key!r}, got {list(sequences.keys())}")
    if sequences.weights_or_none() is not None:
        raise ValueError(f"sequences of {key!r} have weights, which the model does not use; pass times as times=")
    return sequences.values(), sequences.offsets().diff(), max_length, times


class NextItem(nn.Module):
    """Loss of the next item at each position of a batch of sequences, with sampled negatives.

    Sequences have up to `max_length + 1` items: all but the last are inputs, all but the first are targets. One lookup
    reads inputs, targets and negatives, so the fused optimizer updates each row once.

    Args:
        model: for the hidden states.
        loss: called as `loss(queries, positives, negatives, positive_ids=..., negative_ids=...)`, such as those of
            `te.models.losses`.
    """

    def __init__(self, model: SequenceModel, loss: Callable[..., Tensor] = sampled_softmax) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, sequences: Tensor | Features, negatives: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the mean loss of all positions, 0 if there are none: all sequences have one item.

        Args:
            sequences: as of `SequenceModel.forward`, with up to one item more, and no empty sequence.
            negatives: ids `[K]`, which all positions share, or `[P, K]` of the P targets in order.
            times: as of `SequenceModel.forward`, with the last item of each sequence.
        """
        model = self.model
        ids, lengths, length, times = _unpack(sequences, model.key, model.max_length + 1, times)
        if can_read(lengths) and bool((lengths < 1).any()):
            raise ValueError("a sequence is empty; leave it out of the batch")
        num_negatives = torch.full((1,), negatives.numel(), dtype=lengths.dtype, device=lengths.device)
        rows = model.look_up(torch.cat([ids, negatives.flatten()]), torch.cat([lengths, num_negatives]))
        items, negative_rows = rows[: len(ids)], rows[len(ids) :].unflatten(0, negatives.shape)
        # Inputs are all items but the last of each sequence; the target of an input is the item behind it.
        num_targets = len(ids) - len(lengths)
        if num_targets and negatives.dim() == 2 and len(negatives) != num_targets:
            raise ValueError(f"negatives are of {len(negatives)} targets, but the sequences have {num_targets}")
        windows = Windows(lengths - 1, num_targets, length - 1)
        inputs = torch.arange(num_targets, device=ids.device) + windows.rows
        hidden = model.encode(items[inputs], windows, None if times is None else times[inputs])
        if not num_targets:  # with the gradients that other ranks wait for
            return (hidden.sum() + rows.sum()) * 0
        return self.loss(hidden, items[inputs + 1], negative_rows, positive_ids=ids[inputs + 1], negative_ids=negatives)
