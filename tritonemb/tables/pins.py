"""What `RowCache` gives: a batch whose rows have been brought in, its hold on them, and what has been counted.

Releases of pins have sequence numbers. A thread that prefetches comes to a batch sooner or later, so which pins have
been released by then, and which rows may be evicted, is a matter of luck; which had been released when the batch was
submitted is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tritonemb import ops
from tritonemb.tables.lookup import Lookup


@dataclass(frozen=True)
class CacheStatistics:
    """What a table's cache has done so far.

    Args:
        lookups: distinct rows of batches, counted in each batch.
        hits: of those, rows that were in slots already.
        overflows: of the others, rows for which their set had no way left.
        evictions: rows that made room for others.
        read: bytes that came from where the table lives, be it by way of host memory.
        written: bytes that went there.
        host_hits: of a table on disk with rows in host memory (`CacheConfig.host_rows`), rows that were read and found
            there; 0 of others, as the next two.
        disk_read: bytes of rows that its disk has read.
        disk_written: bytes of rows that its disk has written; some may be in memory alone yet.
    """

    lookups: int = 0
    hits: int = 0
    overflows: int = 0
    evictions: int = 0
    read: int = 0
    written: int = 0
    host_hits: int = 0
    disk_read: int = 0
    disk_written: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits a lookup; 1 if there were none."""
        return self.hits / self.lookups if self.lookups else 1.0


class PinnedCache(Protocol):
    """What a lease asks of the cache that its slots are in."""

    def give_up(self, tables: Tensor, slots: Tensor, changed: bool, stream: torch.cuda.Stream | None) -> None:
        """Unpin slots."""
        ...


class Lease:
    """The slots of a batch's rows, which stay where they are until it ends. One that is forgotten ends by itself.

    Args:
        tables, rows, slots: int64 `[n]`: for each row its table, its number there, and where it is.
    """

    def __init__(self, cache: PinnedCache, tables: Tensor, rows: Tensor, slots: Tensor) -> None:
        self._cache: PinnedCache | None = cache
        self._tables, self._rows, self._slots = tables, rows, slots
        self._taken = self._changed = False
        self._stream: torch.cuda.Stream | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._tables, self._rows, self._slots

    def rows_of(self, table: int) -> tuple[Tensor, Tensor]:
        """The rows of a table, ascending, and their slots."""
        mine = self._tables == table
        return self._rows[mine], self._slots[mine]

    @property
    def ended(self) -> bool:
        """Whether the slots may be other rows' by now."""
        return self._cache is None

    def take(self, cache: PinnedCache) -> bool:
        """Have the slots for a lookup; False if another lookup has had them.

        Raises:
            ValueError: they are another collection's.
        """
        if self._taken or self._cache is None:
            return False
        if self._cache is not cache:
            raise ValueError("these groups were made by another collection; use group() of the one that is called")
        self._taken = True
        return True

    def read_on(self, stream: torch.cuda.Stream) -> None:
        """The slots are about to be read on a stream: who has them next waits for it, whichever thread ends this."""
        self._stream = stream

    def change(self) -> None:
        """The rows are about to be changed: from its end on, however it comes, they differ from where they live."""
        self._changed = True

    def end(self) -> None:
        """The batch needs its rows no more; what it has changed has been asked for on this thread's stream."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.give_up(self._tables, self._slots, self._changed, self._stream)

    def __del__(self) -> None:
        self.end()


@dataclass(frozen=True)
class Brought:
    """A batch whose rows have been brought in: `lookup` reads slots.

    Args:
        also: rows that others' batches hold and this rank updates with them, as `RowCache.bring` has them; or None.
        ready: when they are there, on a GPU.
    """

    lookup: Lookup
    lease: Lease = field(repr=False)
    training: bool
    also: Tensor | None = field(default=None, repr=False)
    ready: torch.cuda.Event | None = field(default=None, repr=False)

    def map(self, function: Callable[[Tensor], Tensor]) -> Brought:
        """The same with other tensors of the same values."""
        lookup = self.lookup
        weights = None if lookup.sample_weights is None else function(lookup.sample_weights)
        groups = ops.RowGroups(*[function(tensor) for tensor in lookup.groups])
        moved = lookup._replace(
            values=function(lookup.values), offsets=function(lookup.offsets), sample_weights=weights, groups=groups
        )
        return replace(self, lookup=moved)


_clock = itertools.count(1)
_released_before: ContextVar[int | None] = ContextVar("released_before", default=None)


def sequence_number() -> int:
    """The next one. Pins that were released before have smaller numbers, those that are released later larger ones."""
    return next(_clock)


@contextmanager
def released_before(number: int) -> Iterator[None]:
    """Batches that this thread prefetches meanwhile find all pins held that were not released before `number`."""
    token = _released_before.set(number)
    try:
        yield
    finally:
        _released_before.reset(token)


def release_limit() -> int | None:
    """The number of `released_before`, or None: all releases count."""
    return _released_before.get()
