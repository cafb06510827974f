"""Tell a model's collections of a batch before the model is called with it."""

from __future__ import annotations

from torch import nn

from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.nn.collection import Collection
from tritonemb.nn.features import Features, parts_of
from tritonemb.nn.sent import SentFeatures


def send(model: nn.Module, features: Features | SentFeatures) -> SentFeatures:
    """Bring the rows of a batch to the device, for those tables of a model that live elsewhere.

    Another thread may do so for the next batches while one is computed, in the order in which the model is called with
    them. Give the result to the model in the features' place; where gradients are not going to be recorded, call this
    under `torch.no_grad` too. Rows stay on the device until the batch's backward has been, or until the result is
    dropped.

    Raises:
        ValueError: for ids out of range, and what else a lookup raises.
        StorageError: rows cannot be read or written.
    """
    if isinstance(features, SentFeatures):
        return features
    keys, values, offsets, weights = parts_of(features)
    batch = KeyedJaggedTensor(keys, values, weights, offsets=offsets)
    collections = [module for module in model.modules() if isinstance(module, Collection)]
    return SentFeatures(batch, {id(collection): collection.send(features) for collection in collections})


def looks_ahead(model: nn.Module) -> bool:
    """Whether some table of a model lives elsewhere than on the device, so that `send` has something to do."""
    return any(isinstance(module, Collection) and module.cache is not None for module in model.modules())
