"""A batch whose ids have been sent to the ranks that own their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.comm.ids import Arrived
from tritonemb.jagged import KeyedJaggedTensor


@dataclass(frozen=True)
class SentIds:
    """What a sharded collection needs of a batch.

    Args:
        batch: this rank's own.
        arrived: the ids that this rank owns rows of, for each exchange.
        groups: the distinct rows, for each collection of shards on this rank.
        shares: `[features + 1, B]`, one over each bag's length, then ones: for means of which no owner knows the
            length; or None.
    """

    batch: KeyedJaggedTensor
    arrived: tuple[Arrived, ...]
    groups: tuple[ops.RowGroups, ...]
    shares: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> SentIds:
        """The same with other tensors."""
        return replace(
            self,
            batch=self.batch._map(function),
            arrived=tuple(
                a._replace(
                    features=a.features._map(function),
                    source=function(a.source),
                    places=function(a.places),
                    inverse=None if a.inverse is None else function(a.inverse),
                )
                for a in self.arrived
            ),
            groups=tuple(ops.RowGroups(*[function(tensor) for tensor in groups]) for groups in self.groups),
            shares=None if self.shares is None else function(self.shares),
        )


class SentFeatures:
    """Takes the place of a batch's features for a model whose collections are sharded: `HybridParallel.send` makes it.

    It tells keys and batch size, and nothing else: the ids have gone, so a model that changes them before they are
    looked up cannot be given this.
    """

    def __init__(self, batch: KeyedJaggedTensor, by_collection: Mapping[int, SentIds]) -> None:
        self._batch, self._by_collection = batch, dict(by_collection)

    def keys(self) -> list[str]:
        return self._batch.keys()

    def stride(self) -> int:
        """Batch size."""
        return self._batch.stride()

    def of(self, collection: Any) -> SentIds:
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
            f"this batch's ids have been sent to the ranks that own their rows, so it has no {name!r}; a model that "
            "changes its features before it looks them up cannot be fed ahead: give it the features themselves "
            "(pipeline=False), or change them in the data set"
        )
