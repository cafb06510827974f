"""Tell a model's collections of a batch before the model is called with it."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.tables.lookup import Features, parts_of
from tritonemb.tables.pins import released_before
from tritonemb.tables.prefetched import SentFeatures
from tritonemb.tables.table_set import TableSet


def send(model: nn.Module, features: Features | SentFeatures, before: int | None = None) -> SentFeatures:
    """Bring the rows of a batch to the device, for those tables of a model that live elsewhere.

    Another thread may do so for the next batches while one is computed, in the order in which the model is called with
    them. Give the result to the model in the features' place; where gradients are not going to be recorded, call this
    under `torch.no_grad` too. Rows stay on the device until the batch's backward has been, or until the result is
    dropped.

    Args:
        before: a sequence number, `te.nn.sequence_number()`: rows of batches that end later are not evicted for this
            one. By default all that have ended when this comes to it may be, which in another thread is a matter of
            time. Take the number in the thread that trains, when it submits a batch; then what caches count (hits,
            evictions, overflows, bytes) depends on that alone.

    Raises:
        ValueError: for ids out of range, and what else a lookup raises.
        StorageError: rows cannot be read or written.
    """
    if isinstance(features, SentFeatures):
        return features
    keys, values, offsets, weights = parts_of(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    collections = [module for module in model.modules() if isinstance(module, TableSet)]
    with nullcontext() if before is None else released_before(before):
        return SentFeatures(batch, {id(collection): collection.send(features) for collection in collections})


def looks_ahead(model: nn.Module) -> bool:
    """Whether some table of a model lives elsewhere than on the device, so that `send` has something to do."""
    return any(isinstance(module, TableSet) and module.cache is not None for module in model.modules())
