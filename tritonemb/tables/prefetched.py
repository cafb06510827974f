"""A batch that the collections of a model have been told of before the model is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.tables.cache import Brought

Groups = ops.RowGroups | Brought


class Told(Protocol):
    """What a collection has made of a batch."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Any:
        """The same with other tensors of the same values."""
        ...


@dataclass(frozen=True)
class Grouped:
    """A batch and its distinct rows, which have been brought to the device; or None, for its lookup to find out."""

    batch: KeyedJaggedTensor
    groups: Groups | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Grouped:
        """The same with other tensors of the same values."""
        groups = None if self.groups is None else map_groups(self.groups, function)
        return Grouped(self.batch._map(function), groups)


def map_groups(groups: Groups, function: Callable[[Tensor], Tensor]) -> Groups:
    """What `group` has made, with other tensors of the same values."""
    if isinstance(groups, Brought):
        return groups.map(function)
    return ops.RowGroups(*[function(tensor) for tensor in groups])


class SentFeatures:
    """Takes the place of a batch's features for a model that was told them ahead, by `send` or `HybridParallel.send`.

    It tells keys and batch size, and nothing else: the ids have gone, so a model that changes them before they are
    looked up cannot be given this.
    """

    def __init__(self, batch: KeyedJaggedTensor, by_collection: Mapping[int, Told]) -> None:
        self._batch, self._by_collection = batch, dict(by_collection)

    def keys(self) -> list[str]:
        return self._batch.keys()

    def stride(self) -> int:
        """Batch size."""
        return self._batch.stride()

    def of(self, collection: Any) -> Any:
        """What was sent for a collection.

        Raises:
            ValueError: nothing was, as it is none of the model's that sent these.
        """
        if id(collection) not in self._by_collection:
            raise ValueError("these features were sent by another model; use send() of the one that is called")
        return self._by_collection[id(collection)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> SentFeatures:
        """On another device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, function: Callable[[Tensor], Tensor]) -> SentFeatures:
        """The same with other tensors."""
        by_collection = {number: sent.map(function) for number, sent in self._by_collection.items()}
        return SentFeatures(self._batch._map(function), by_collection)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"this batch's ids have been sent to where their rows are, so it has no {name!r}; a model that changes its "
            "features before it looks them up cannot be fed ahead: give it the features themselves (pipeline=False), "
            "or change them in the data set"
        )
