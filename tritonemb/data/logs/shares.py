"""How the parts of a log are shared out."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from tritonemb.data.logs.splits import Part, between
from tritonemb.data.protocol import Shard

NEAR = 1 / 16  # of a share: how far a cut may move to fall between two row groups


def even(parts: Sequence[Part], sizes: Sequence[int], share: Shard, ends: Sequence[int] = ()) -> list[Part]:
    """The index-th of `count` runs of equal length, counted through all parts.

    Args:
        sizes: of the parts.
        ends: places, ascending, that a cut moves to if one is near.
    """
    index, count = share
    total = sum(sizes)
    return between(parts, sizes, *(_moved(total * place // count, total / count, ends) for place in (index, index + 1)))


def _moved(cut: int, length: float, ends: Sequence[int]) -> int:
    place = bisect.bisect_left(ends, cut)
    nearest = min((end for end in ends[max(place - 1, 0) : place + 1]), key=lambda end: abs(end - cut), default=cut)
    return nearest if cut and abs(nearest - cut) <= NEAR * length else cut


def whole(parts: Sequence[Part], sizes: Sequence[int], share: Shard) -> list[Part]:
    """Whole parts, the largest ones dealt out first, each to the share that has least; in their order."""
    index, count = share
    loads, mine = [0] * count, []
    for number in sorted(range(len(parts)), key=lambda number: (-sizes[number], number)):
        poorest = loads.index(min(loads))
        loads[poorest] += sizes[number]
        if poorest == index:
            mine.append(number)
    return [parts[number] for number in sorted(mine)]
