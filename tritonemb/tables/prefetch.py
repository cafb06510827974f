"""`prefetch` of a model's batches, which moves rows to the device before they are looked up."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tritonemb.jagged import Features, KeyedJaggedTensor, unpack_features
from tritonemb.tables.cache import released_before
from tritonemb.tables.table_set import TableSet


class PrefetchedFeatures:
    """Handle of a prefetched batch, which a model takes in place of its features. A pytree node.

    Its ids have been consumed; only `keys()` and `stride()` remain. So it does not suit a model that changes features
    before it looks them up. `by_collection` has, by `id` of each collection, its prefetched data: a pytree of tensors,
    and of `Lookup`s, which stay on the device of their slots.
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
        """Return the prefetched data of a collection; ValueError for one of another model."""
        if id(collection) not in self._by_collection:
            raise ValueError("another model has prefetched these features; use prefetch() of the one that is called")
        return self._by_collection[id(collection)]

    def sub_batch(self, size: int, by_collection: Mapping[int, Any]) -> Self:
        """Return a handle of `size` samples of the batch, with their prefetched data."""
        lengths = torch.zeros(len(self.keys()) * size, dtype=torch.int64)
        return type(self)(KeyedJaggedTensor(self.keys(), lengths[:0], lengths=lengths), by_collection)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Move tensors to a device."""
        return pytree.tree_map_only(Tensor, partial(Tensor.to, device=device, non_blocking=non_blocking), self)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this batch was prefetched and has no {name!r}: its ids have been consumed, only keys() and stride() "
            "remain; if the model changes its features before it looks them up, pass it the features themselves "
            "(pipeline=False), or change them in the data set"
        )


pytree.register_pytree_node(
    PrefetchedFeatures,
    lambda features: ([features._batch, features._by_collection], None),
    lambda parts, _: PrefetchedFeatures(*parts),
)


def prefetch(
    model: nn.Module, features: Features | PrefetchedFeatures, before: int | None = None
) -> PrefetchedFeatures:
    """Prefetch a batch: move its rows to the device, for tables of a model in host memory, on disk or on servers.

    Another thread may prefetch the next batches while one is computed, in the order in which the model is called with
    them. Pass the result to the model instead of the features. Call this under `torch.no_grad` if the lookup will be.
    Rows stay on the device until the batch's backward has run, or the result is dropped. ValueError for ids out of
    range, and other errors of a lookup; StorageError if rows cannot be read or written.

    Args:
        before: a sequence number, `te.nn.sequence_number()`: rows whose pins are released later are not evicted for
            this batch; by default any row may be whose pins are released by then. Take the number in the training
            thread when it submits the batch, so that the caches' counters (hits, evictions, bytes) are deterministic.
    """
    if isinstance(features, PrefetchedFeatures):
        return features
    keys, values, offsets, weights = unpack_features(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    with nullcontext() if before is None else released_before(before):
        return PrefetchedFeatures(batch, {id(tables): tables.prefetch(batch) for tables in table_sets(model)})


def table_sets(model: nn.Module) -> list[TableSet]:
    """Return the `TableSet`s that modules of a model own, those of shards excluded."""
    candidates = (module.__dict__.get("table_set") for module in model.modules())
    return [tables for tables in candidates if isinstance(tables, TableSet)]


def needs_prefetch(model: nn.Module) -> bool:
    """Return whether a table of the model is not on the device, so that `prefetch` transfers rows."""
    return any(tables.cache is not None or tables.on_servers for tables in table_sets(model))
