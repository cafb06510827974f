"""What a cache says of itself, against a simulation in plain Python; and that a step costs what its batch has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.helpers import fewer
from tests.nn.made import elements_made
from tests.nn.test_tiers import streams
from tests.nn.tiers import ELSEWHERE, not_interpreted, seeded
from tritonemb.nn.row_cache import CacheStatistics
from tritonemb.ops.row_cache import WAYS
from tritonemb.types import CacheConfig

pytestmark = [pytest.mark.public, not_interpreted]
MASK = 2**64 - 1


def mixed(row: int) -> int:
    """The finaliser of SplitMix64."""
    row = ((row ^ (row >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    row = ((row ^ (row >> 27)) * 0x94D049BB133111EB) & MASK
    return row ^ (row >> 31)


class Simulated:
    """A cache of one table, whose batches are trained one after another.

    Args:
        row_bytes: of weight and states.
    """

    def __init__(self, rows: int, policy: str, row_bytes: int) -> None:
        self.sets: list[list[dict | None]] = [[None] * WAYS for _ in range(-(-rows // WAYS))]
        self.overflow: dict[int, bool] = {}  # whether the row was trained
        self.policy, self.row_bytes, self.now = policy, row_bytes, 0
        self.counts = dict.fromkeys(("lookups", "hits", "overflows", "evictions", "read", "written"), 0)

    def batch(self, ids: list[int], training: bool) -> None:
        self.now += 1
        rows = sorted(set(ids))
        missing = []
        for row in rows:
            self.counts["lookups"] += 1
            entry = self.find(row)
            if entry is not None:
                entry["use"] = self.now if self.policy == "lru" else entry["use"] + 1
                entry["held"] = self.now
                entry["trained"] |= training
                self.counts["hits"] += 1
            else:
                missing.append(row)
        if not missing:
            return
        held = [row for row in missing if row in self.overflow]
        self.counts["hits"] += len(held)
        for row in list(self.overflow):
            if row in held:
                self.overflow[row] |= training
            else:
                self.evict(self.overflow.pop(row))
        for row in missing:
            if row not in held:
                self.counts["read"] += self.row_bytes
                self.place(row, training)

    def find(self, row: int) -> dict | None:
        ways = self.sets[mixed(row) % len(self.sets)]
        return next((entry for entry in ways if entry is not None and entry["row"] == row), None)

    def place(self, row: int, training: bool) -> None:
        ways = self.sets[mixed(row) % len(self.sets)]
        new = {"row": row, "use": self.now if self.policy == "lru" else 1, "held": self.now, "trained": training}
        if None in ways:
            ways[ways.index(None)] = new
            return
        idle = [way for way in range(WAYS) if ways[way]["held"] != self.now]
        if not idle:
            self.counts["overflows"] += 1
            self.overflow[row] = training
            return
        way = min(idle, key=lambda way: (ways[way]["use"], way))
        self.evict(ways[way]["trained"])
        ways[way] = new

    def evict(self, trained: bool) -> None:
        self.counts["evictions"] += 1
        self.counts["written"] += self.row_bytes * trained


@settings(max_examples=fewer(60, 3))
@given(streams(), st.sampled_from(ELSEWHERE), st.sampled_from(("lru", "lfu")), st.randoms(use_true_random=False))
def test_statistics_are_those_of_a_simulation(stream, placement, policy, random):
    rows, steps = stream
    cache = CacheConfig(rows=rows, policy=policy)
    mine = seeded([te.TableConfig("t", 1000, 4)], te.optim.RowWiseAdagrad(), True, (placement,), cache)
    expected = Simulated(rows, policy, 4 * 4 + 4)
    for ids in [*steps, *steps]:
        training = random.random() < 0.6
        with torch.set_grad_enabled(training):
            out = mine(te.KeyedJaggedTensor.from_lists({"t": [ids]}))
        if training:
            out.sum().backward()
        expected.batch(ids, training)
        assert mine.cache_statistics() == {"t": CacheStatistics(**expected.counts)}


def test_statistics_are_counted_by_table():
    """Also where a feature feeds several tables, and some live on the device."""
    tables = [te.TableConfig("a", 100, 4, features=["f", "g"]), te.TableConfig("b", 90, 4, features=["g"])]
    tables += [te.TableConfig("c", 90, 4, features=["g"])]
    mine = seeded(tables, te.optim.SGD(), True, ("host", "device", "disk"), CacheConfig(rows=64))
    for _ in range(2):
        mine(te.KeyedJaggedTensor.from_lists({"f": [[1, 2, 2], [3]], "g": [[3], [4, 5]]})).sum().backward()
    assert mine.cache_statistics() == {
        "a": CacheStatistics(lookups=10, hits=5, read=5 * 16), "c": CacheStatistics(lookups=6, hits=3, read=3 * 16),
    }  # fmt: skip
    assert mine.cache_statistics()["a"].hit_rate == 0.5
    assert seeded(tables, None).cache_statistics() == {}
    assert CacheStatistics().hit_rate == 1.0


@pytest.mark.parametrize("placement", ELSEWHERE)
def test_a_step_moves_the_rows_of_its_batch_however_many_there_are(placement):
    """Counted bytes, and counted elements of all tensors that a step makes."""
    moved, made = [], []
    for num_rows in (10_000, 1_000_000):
        table, cache = te.TableConfig("t", num_rows, 4), CacheConfig(rows=64)
        mine = seeded([table], te.optim.RowWiseAdagrad(), True, (placement,), cache)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(num_rows, (20, 200), generator=generator)
        for step in range(20):
            batch = te.KeyedJaggedTensor(["t"], ids[step], lengths=torch.ones(200, dtype=torch.int64))
            with elements_made() as counted:
                mine(batch).sum().backward()
        made.append(counted())
        found = mine.cache_statistics()["t"]
        assert found.read <= 20 * 200 * 20
        assert found.written <= found.read
        moved.append(found.read)
    assert moved[1] < 1.1 * moved[0]  # more distinct ids, fewer hits
    assert made[1] < 1.5 * made[0]
