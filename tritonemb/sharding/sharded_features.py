"""A batch whose ids have been sent to the ranks that own their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from tritonemb.comm.id_exchange import ReceivedIds
from tritonemb.jagged import KeyedJaggedTensor
from tritonemb.tables.prefetched import Groups, map_groups


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
    arrived: tuple[ReceivedIds, ...]
    groups: tuple[Groups, ...]
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
                    positions=function(a.positions),
                    inverse=None if a.inverse is None else function(a.inverse),
                )
                for a in self.arrived
            ),
            groups=tuple(map_groups(groups, function) for groups in self.groups),
            shares=None if self.shares is None else function(self.shares),
        )
