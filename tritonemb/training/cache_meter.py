"""What caches of rows that live elsewhere than on the device have done between two logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from tritonemb.sharding.collection import ShardedCollection
from tritonemb.tables.cache import RowCache
from tritonemb.tables.table_set import TableSet

LEAST_STALL = 1e-3  # seconds that count
RECENT_STEPS, MANY_STALLS = 10, 3  # so many stalls in so many steps ask for more look-ahead
MOST_WIDENED = 6
HOST = ("host_hits", "disk_read", "disk_written")  # fields of `Counted`, of tables on disk with rows in host memory


class Counted(NamedTuple):
    """What caches had counted when a step's rows had been brought."""

    rows: int = 0
    hits: int = 0
    read: int = 0
    written: int = 0
    host_hits: int = 0
    disk_read: int = 0
    disk_written: int = 0


def caches_of(model: nn.Module) -> list[RowCache]:
    """The caches of a model's tables that live elsewhere than on the device, this rank's shards among them."""
    found = [module for module in model.modules() if isinstance(module, TableSet)]
    for module in model.modules():
        if isinstance(module, ShardedCollection):
            found += module.locals
    return [collection.cache for collection in found if collection.cache is not None]


def count(caches: Iterable[RowCache]) -> Counted:
    """Of all tables of the caches."""
    counts = [found for cache in caches for found in cache.statistics().values()]
    return Counted(
        sum(count.lookups for count in counts),
        *(sum(getattr(count, name) for count in counts) for name in Counted._fields[1:]),
    )


class CacheMeter:
    """Means a step of what a model's caches count.

    Args:
        model: with the tables of this rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self._caches = caches_of(model)
        tables = [table for cache in self._caches for table in cache.tiered if table is not None]
        self._in_host_memory = any(table.config.cache.host_rows is not None for table in tables)
        self._stall = self._stall_before = 0.0
        self._trained: Counted | None = None
        self._recent: deque[bool] = deque(maxlen=RECENT_STEPS)
        self._widened = 0
        self._before = (*count(self._caches), self._stalls())

    def stalled(self, begin: float, end: float, moved: tuple[float, float] | None) -> None:
        """Training has waited from `begin` to `end` for a step whose rows were brought in the time `moved`."""
        if self._caches and moved is not None:
            self._stall += max(0.0, min(end, moved[1]) - max(begin, moved[0]))

    def trained(self, counted: Counted | None) -> None:
        """A step has been trained; what had been counted when its rows had been brought, if that was done ahead.

        Later steps, whose rows have been brought too by now, are none of it.
        """
        self._trained = counted

    def wants_more_ahead(self) -> bool:
        """Whether training has waited for rows in several of the last steps; asked after each step."""
        self._recent.append(self._stall - self._stall_before > LEAST_STALL)
        self._stall_before = self._stall
        if sum(self._recent) < MANY_STALLS or self._widened == MOST_WIDENED:
            return False
        self._recent.clear()
        self._widened += 1
        return True

    def lap(self, steps: int) -> dict[str, float]:
        """Since the last call, a step: distinct `rows`, `hit_rate`, bytes `read` and `written`, seconds of `stall`;
        where a table on disk has rows in host memory, also `host_hits`, `disk_read` and `disk_written`.

        Empty where all tables live on the device.
        """
        if not self._caches:
            return {}
        now = (*(count(self._caches) if self._trained is None else self._trained), self._stalls())
        rows, hits, read, written, *host, stall = (
            after - before for after, before in zip(now, self._before, strict=True)
        )  # fmt: skip
        self._before = now
        found = {
            "rows": rows / steps,
            "hit_rate": hits / rows if rows else 1.0,
            "read": read / steps,
            "written": written / steps,
            "stall": stall / steps,
        }
        if self._in_host_memory:
            found |= {name: value / steps for name, value in zip(HOST, host, strict=True)}
        return found

    def _stalls(self) -> float:
        return self._stall + sum(cache.stall for cache in self._caches)
