"""What a cache counts, by a simulation in plain Python."""

from __future__ import annotations

from collections.abc import Collection

from tests.kernels.test_row_cache import mixed
from tritonemb.layout import WAYS
from tritonemb.tables.cache_storage import CacheStatistics


class Ways:
    """Sets of ways, each with a row's entry, and what is counted."""

    def __init__(self, rows: int, policy: str, row_bytes: int, counted: tuple[str, ...]) -> None:
        self.sets: list[list[dict | None]] = [[None] * WAYS for _ in range(-(-rows // WAYS))]
        self.policy, self.row_bytes, self.now = policy, row_bytes, 0
        self.counts = dict.fromkeys(counted, 0)

    def find(self, row: int) -> dict | None:
        return next((entry for entry in self.set_of(row) if entry is not None and entry["row"] == row), None)

    def set_of(self, row: int) -> list[dict | None]:
        return self.sets[mixed(row) % len(self.sets)]

    def entries(self) -> list[dict]:
        return [entry for ways in self.sets for entry in ways if entry is not None]

    def use(self, entry: dict) -> None:
        entry["use"] = self.now if self.policy == "lru" else entry["use"] + 1

    def first_use(self) -> int:
        return self.now if self.policy == "lru" else 1


class SimulatedHost(Ways):
    """Rows of a table on disk in host memory."""

    def __init__(self, rows: int, policy: str, row_bytes: int) -> None:
        super().__init__(rows, policy, row_bytes, ("host_hits", "disk_read", "disk_written"))

    def read(self, rows: Collection[int]) -> None:
        missing = self.touch(rows)
        self.counts["host_hits"] += len(rows) - len(missing)
        self.counts["disk_read"] += len(missing) * self.row_bytes
        for row in missing:
            self.place(row, False)

    def write(self, rows: Collection[int]) -> None:
        """Nothing happens if there are none."""
        if not rows:
            return
        homeless = [row for row in self.touch(rows) if not self.place(row, True)]
        self.counts["disk_written"] += self.row_bytes * len(homeless)
        for row in rows:
            entry = self.find(row)
            if entry is not None:
                entry["written"] = True

    def write_back(self) -> None:
        for entry in self.entries():
            self.counts["disk_written"] += self.row_bytes * entry["written"]
            entry["written"] = False

    def touch(self, rows: Collection[int]) -> list[int]:
        """Note a use of those that are there; the others."""
        self.now += 1
        missing = []
        for row in sorted(rows):
            entry = self.find(row)
            if entry is None:
                missing.append(row)
            else:
                self.use(entry)
                entry["by"] = self.now
        return missing

    def place(self, row: int, written: bool) -> bool:
        """Whether there is a way that no row of the same call has."""
        ways = self.set_of(row)
        new = {"row": row, "use": self.first_use(), "by": self.now, "written": written}
        if None in ways:
            ways[ways.index(None)] = new
            return True
        free = [way for way in range(WAYS) if ways[way]["by"] != self.now]
        if not free:
            return False
        way = min(free, key=lambda way: (ways[way]["use"], way))
        self.counts["disk_written"] += self.row_bytes * ways[way]["written"]
        ways[way] = new
        return True


class Simulated(Ways):
    """A cache of one table.

    Args:
        row_bytes: of weight and states.
        host_rows: of a table on disk, in host memory.
    """

    def __init__(self, rows: int, policy: str, row_bytes: int, host_rows: int | None = None) -> None:
        super().__init__(rows, policy, row_bytes, ("lookups", "hits", "overflows", "evictions", "read", "written"))
        self.host = None if host_rows is None else SimulatedHost(host_rows, policy, row_bytes)
        self.going: list[int] = []  # rows that are to be written below
        self.overflow: dict[int, dict] = {}
        self.held: set[int] = set()
        self.training: set[int] = set()  # numbers of batches that are trained, if they end

    @property
    def statistics(self) -> CacheStatistics:
        return CacheStatistics(**self.counts, **({} if self.host is None else self.host.counts))

    def batch(self, ids: Collection[int], training: bool, held: Collection[int] = ()) -> None:
        """Bring the next batch in.

        Args:
            held: the numbers, from 1, of the batches before it that have not ended.
        """
        self.now += 1
        self.held = {*held, self.now}
        if training:
            self.training.add(self.now)
        rows = sorted(set(ids))
        missing = []
        for row in rows:
            self.counts["lookups"] += 1
            entry = self.find(row)
            if entry is not None:
                self.use(entry)
                self.hit(entry)
            else:
                missing.append(row)
        if not missing:
            return
        for row in missing:
            if row in self.overflow:
                self.hit(self.overflow[row])
        for row in [row for row, entry in self.overflow.items() if not self.is_held(entry)]:
            self.evict(self.overflow.pop(row))
        self.write_below()
        missing = [row for row in missing if row not in self.overflow]
        for row in missing:
            self.counts["read"] += self.row_bytes
            self.place(row)
        self.write_below()
        if self.host is not None and missing:
            self.host.read(missing)

    def hit(self, entry: dict) -> None:
        entry["by"].add(self.now)
        self.counts["hits"] += 1

    def is_held(self, entry: dict) -> bool:
        """Batches that hold it no more have trained it, if they are for that."""
        entry["trained"] |= not self.training.isdisjoint(entry["by"] - self.held)
        entry["by"] &= self.held
        return bool(entry["by"])

    def place(self, row: int) -> None:
        ways = self.set_of(row)
        new = {"row": row, "use": self.first_use(), "by": {self.now}, "trained": False}
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
        if entry["trained"]:
            self.counts["written"] += self.row_bytes
            self.going.append(entry["row"])

    def write_below(self) -> None:
        going, self.going = self.going, []
        if self.host is not None:
            self.host.write(going)

    def write_back(self, held: Collection[int]) -> None:
        """Bring all that was trained to where it lives."""
        self.held = {*held}
        for entry in [*self.overflow.values(), *self.entries()]:
            self.is_held(entry)
            self.counts["written"] += self.row_bytes * entry["trained"]
            self.going += [entry["row"]] * entry["trained"]
            entry["trained"] = False
        self.write_below()
