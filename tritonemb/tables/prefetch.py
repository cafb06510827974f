"""`prefetch`: move the rows of a batch to the device before the model is called with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_map_only

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.layout import Layout
from tritonemb.tables.lookup import Features, parts_of, released_before
from tritonemb.tables.table_set import Groups, TableSet


class PrefetchedFeatures:
    """The place of a batch's features for a model that has prefetched them.

    It has keys and batch size, and nothing else: the ids are where their rows are, so a model that changes them before
    it looks them up cannot be given this.

    Args:
        batch: the features.
        by_collection: for each collection, by `id`, what it has made of them: a pytree of tensors.
    """

    def __init__(self, batch: KeyedJaggedTensor, by_collection: Mapping[int, Any]) -> None:
        self._batch, self._by_collection = batch, dict(by_collection)

    def keys(self) -> list[str]:
        """Keys of the batch."""
        return self._batch.keys()

    def stride(self) -> int:
        """Batch size."""
        return self._batch.stride()

    def of(self, collection: Any) -> Any:
        """What a collection has prefetched.

        Raises:
            ValueError: nothing, as it belongs to another model.
        """
        if id(collection) not in self._by_collection:
            raise ValueError("another model has prefetched these features; use prefetch() of the one that is called")
        return self._by_collection[id(collection)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PrefetchedFeatures:
        """On another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, function: Callable[[Tensor], Tensor]) -> PrefetchedFeatures:
        """The same with other tensors of the same values."""
        parts = self._batch, self._by_collection
        return PrefetchedFeatures(*tree_map_only(Tensor, function, parts, is_leaf=_is_layout))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this batch has been prefetched: its ids are where their rows are, so it has no {name!r}; a model that "
            "changes its features before it looks them up cannot prefetch them: give it the features themselves "
            "(pipeline=False), or change them in the data set"
        )


def _is_layout(part: Any) -> bool:
    """A layout's tensors follow the slots that it describes; a copy would not."""
    return isinstance(part, Layout)


@_disable_dynamo  # a graph break, which loads no compiler before one is used
def features_and_groups(
    tables: TableSet, features: Features | PrefetchedFeatures, groups: Groups | None
) -> tuple[Features, Groups | None]:
    """The features of a batch, and their groups if they are known."""
    if not isinstance(features, PrefetchedFeatures):
        return features, groups
    found: tuple[Features, Groups | None] = features.of(tables)
    return found


def prefetch(
    model: nn.Module, features: Features | PrefetchedFeatures, before: int | None = None
) -> PrefetchedFeatures:
    """Move the rows of a batch to the device, for those tables of a model that are in host memory or on disk.

    Another thread may do so for the next batches while one is computed, in the order in which the model is called with
    them. Give the result to the model in the features' place; where gradients are not going to be recorded, call this
    under `torch.no_grad` too. Rows stay on the device until the batch's backward has run, or until the result is
    dropped.

    Args:
        before: a sequence number, `te.nn.sequence_number()`: rows whose pins are released later are not evicted for
            this batch. By default all that have been released when this comes to it may be, which in another thread is
            a matter of time. Take the number in the thread that trains, when it submits a batch; then what caches count
            (hits, evictions, overflows, bytes) depends on that alone.

    Raises:
        ValueError: for ids out of range, and what else a lookup raises.
        StorageError: rows cannot be read or written.
    """
    if isinstance(features, PrefetchedFeatures):
        return features
    keys, values, offsets, weights = parts_of(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    collections = [module for module in model.modules() if isinstance(module, TableSet)]
    with nullcontext() if before is None else released_before(before):
        return PrefetchedFeatures(batch, {id(tables): tables.prefetch(batch) for tables in collections})


def needs_prefetch(model: nn.Module) -> bool:
    """Whether some table of a model is in host memory or on disk, so that `prefetch` has something to do."""
    return any(isinstance(module, TableSet) and module.cache is not None for module in model.modules())
