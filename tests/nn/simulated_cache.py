"""What a cache counts, by a simulation in plain Python."""

from __future__ import annotations

from collections.abc import Collection

from tritonemb.nn.row_cache import CacheStatistics
from tritonemb.ops.row_cache import WAYS

MASK = 2**64 - 1


def mixed(row: int) -> int:
    """The finaliser of SplitMix64."""
    row = ((row ^ (row >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    row = ((row ^ (row >> 27)) * 0x94D049BB133111EB) & MASK
    return row ^ (row >> 31)


class Simulated:
    """A cache of one table.

    Args:
        row_bytes: of weight and states.
    """

    def __init__(self, rows: int, policy: str, row_bytes: int) -> None:
        self.sets: list[list[dict | None]] = [[None] * WAYS for _ in range(-(-rows // WAYS))]
        self.overflow: dict[int, dict] = {}
        self.policy, self.row_bytes, self.now = policy, row_bytes, 0
        self.counts = dict.fromkeys(("lookups", "hits", "overflows", "evictions", "read", "written"), 0)

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(**self.counts)

    def batch(self, ids: Collection[int], training: bool, held: Collection[int] = ()) -> None:
        """Bring the next batch in.

        Args:
            held: the numbers, from 1, of the batches before it that have not ended.
        """
        self.now += 1
        self.held = {*held, self.now}
        rows = sorted(set(ids))
        missing = []
        for row in rows:
            self.counts["lookups"] += 1
            entry = self.find(row)
            if entry is not None:
                entry["use"] = self.now if self.policy == "lru" else entry["use"] + 1
                self.hit(entry, training)
            else:
                missing.append(row)
        if not missing:
            return
        for row in missing:
            if row in self.overflow:
                self.hit(self.overflow[row], training)
        for row in [row for row, entry in self.overflow.items() if not self.is_held(entry)]:
            self.evict(self.overflow.pop(row))
        for row in missing:
            if row not in self.overflow:
                self.counts["read"] += self.row_bytes
                self.place(row, training)

    def find(self, row: int) -> dict | None:
        ways = self.sets[mixed(row) % len(self.sets)]
        return next((entry for entry in ways if entry is not None and entry["row"] == row), None)

    def hit(self, entry: dict, training: bool) -> None:
        entry["by"].add(self.now)
        entry["trained"] |= training
        self.counts["hits"] += 1

    def is_held(self, entry: dict) -> bool:
        entry["by"] &= self.held
        return bool(entry["by"])

    def place(self, row: int, training: bool) -> None:
        ways = self.sets[mixed(row) % len(self.sets)]
        new = {"row": row, "use": self.now if self.policy == "lru" else 1, "by": {self.now}, "trained": training}
        if None in ways:
            ways[ways.index(None)] = new
            return
        idle = [way for way in range(WAYS) if not self.is_held(ways[way])]
        if not idle:
            self.counts["overflows"] += 1
            self.overflow[row] = new
            return
        way = min(idle, key=lambda way: (ways[way]["use"], way))
        self.evict(ways[way])
        ways[way] = new

    def evict(self, entry: dict) -> None:
        self.counts["evictions"] += 1
        self.counts["written"] += self.row_bytes * entry["trained"]

    def write_back(self, held: Collection[int]) -> None:
        """Bring all that was trained to where it lives; what a batch holds may be trained again."""
        self.held = {*held}
        for entry in [*self.overflow.values(), *(entry for ways in self.sets for entry in ways if entry is not None)]:
            self.counts["written"] += self.row_bytes * entry["trained"]
            entry["trained"] &= self.is_held(entry)
