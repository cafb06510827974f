"""A moment of training: which batches had ended by then.

A batch may be brought in by a thread that comes to it sooner or later. Which batches have ended by now is then a matter
of luck, and so is which rows make room; which had ended when the batch was allowed to be brought in is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tritonemb.nn.row_cache import RowCache


class Mark:
    """A place among a cache's batches in the order in which they end; `passed` once all before it are unpinned."""

    def __init__(self) -> None:
        self.passed = False


@dataclass(frozen=True)
class Moment:
    """What had ended at some moment. See `tritonemb.nn.moment`."""

    marks: Mapping[RowCache, Mark] = field(repr=False)

    @classmethod
    def now(cls, caches: Iterable[RowCache]) -> Moment:
        """The present one."""
        return cls({cache: cache.mark() for cache in caches})


_moment: ContextVar[Moment | None] = ContextVar("moment", default=None)


@contextmanager
def as_of(moment: Moment) -> Iterator[None]:
    """Batches that this thread brings in meanwhile find those held that were so at that moment, and no others' rows."""
    before = _moment.set(moment)
    try:
        yield
    finally:
        _moment.reset(before)


def mark_of(cache: RowCache) -> Mark | None:
    """Up to where batches count as ended; None for all that have.

    Raises:
        ValueError: the moment is another model's.
    """
    moment = _moment.get()
    if moment is None:
        return None
    if cache not in moment.marks:
        raise ValueError("this moment is of another model; use moment() of the one whose batches are sent")
    return moment.marks[cache]
