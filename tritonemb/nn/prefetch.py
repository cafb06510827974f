"""Tell a model's collections of a batch before the model is called with it."""

from __future__ import annotations

from contextlib import nullcontext

from torch import nn

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.tables.collection import Collection
from tritonemb.tables.lookup import Features, parts_of
from tritonemb.tables.pins import Moment, as_of
from tritonemb.tables.prefetched import SentFeatures


def send(model: nn.Module, features: Features | SentFeatures, moment: Moment | None = None) -> SentFeatures:
    """Bring the rows of a batch to the device, for those tables of a model that live elsewhere.

    Another thread may do so for the next batches while one is computed, in the order in which the model is called with
    them. Give the result to the model in the features' place; where gradients are not going to be recorded, call this
    under `torch.no_grad` too. Rows stay on the device until the batch's backward has been, or until the result is
    dropped.

    Args:
        moment: rows of batches that ended later do not make room for this one's. By default those do of all that have
            ended when this comes to it, which in another thread is a matter of time.

    Raises:
        ValueError: for ids out of range, a moment of another model, and what else a lookup raises.
        StorageError: rows cannot be read or written.
    """
    if isinstance(features, SentFeatures):
        return features
    keys, values, offsets, weights = parts_of(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    collections = [module for module in model.modules() if isinstance(module, Collection)]
    with nullcontext() if moment is None else as_of(moment):
        return SentFeatures(batch, {id(collection): collection.send(features) for collection in collections})


def moment(model: nn.Module) -> Moment:
    """Which batches of a model have ended by now, for `send` in another thread.

    Ask for it in the thread that trains, when it lets a batch be sent. What caches then count (hits, evictions,
    overflows, bytes) depends on that alone, and not on when the other thread comes to it. Waits for nothing.
    """
    collections = [module for module in model.modules() if isinstance(module, Collection)]
    return Moment.now(collection.cache for collection in collections if collection.cache is not None)


def looks_ahead(model: nn.Module) -> bool:
    """Whether some table of a model lives elsewhere than on the device, so that `send` has something to do."""
    return any(isinstance(module, Collection) and module.cache is not None for module in model.modules())
