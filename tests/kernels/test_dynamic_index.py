"""The index of a dynamic table against lists of sets: the CPU kernels and the reference."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import fewer
from tests.kernels.test_row_cache import MASK64, WAYS, mixed
from tests.strategies import seeds
from tritonemb.kernels import dynamic_index as reference
from tritonemb.kernels.cpu import dynamic_index as cpu
from tritonemb.kernels.cpu import row_cache
from tritonemb.kernels.dynamic_index import DynamicInsertion, make_index
from tritonemb.layout import MOST_USES, POLICIES, DynamicIndex

EXTREMES = [-(2**63), -(2**63) + 1, -(2**32) - 1, -1, 0, 1, 2**31, 2**32, 2**32 + 5, 2**62, 2**63 - 1]


def of(id: int) -> int:
    """The mixed bits of an int64 id."""
    return mixed(id & MASK64)


def id_of(bits: int) -> int:
    """The id whose mixed bits these are: SplitMix64's finaliser backwards."""
    bits ^= bits >> 31 ^ bits >> 62
    bits = bits * pow(0x94D049BB133111EB, -1, 2**64) & MASK64
    bits ^= bits >> 27 ^ bits >> 54
    bits = bits * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK64
    bits ^= bits >> 30 ^ bits >> 60
    return bits - 2**64 if bits >= 2**63 else bits


class Row(NamedTuple):
    id: int
    used: int
    count: int


class Partition:
    """Ways of sets, and a list of overflow rows; None where there is no row."""

    def __init__(self, most_sets: int, overflow: int) -> None:
        self.most_sets = most_sets
        self.sets: list[list[Row | None]] = [[None] * WAYS]
        self.overflow: list[Row | None] = [None] * overflow

    def home(self, id: int) -> int:
        """By linear hashing: split sets have one more bit."""
        level = 1
        while 2 * level <= len(self.sets):
            level *= 2
        number = of(id) % level
        return of(id) % (2 * level) if number + level < len(self.sets) else number

    def places(self) -> dict[int, tuple[int, int, Row]]:
        """Set and way by id; set -1: the overflow list."""
        lists = [(-1, self.overflow), *enumerate(self.sets)]
        return {row.id: (number, way, row) for number, rows in lists for way, row in enumerate(rows) if row}

    def write(self, number: int, way: int, row: Row | None) -> None:
        (self.overflow if number < 0 else self.sets[number])[way] = row

    def way_for(self, id: int, step: int, protect: int, policy: str) -> tuple[int, int] | None:
        home = self.home(id)
        rows = self.sets[home]
        if None in rows:
            return home, rows.index(None)
        if len(self.sets) < self.most_sets:
            return None
        old = [row for row in rows if row and row.used <= step - protect and row.used < step]
        if not old:
            return None
        key = {"lru": lambda row: (row.used, row.id), "lfu": lambda row: (row.count, row.used, row.id)}[policy]
        return home, rows.index(min(old, key=key))

    def use(self, id: int, uses: int, step: int) -> None:
        number, way, row = self.places()[id]
        self.write(number, way, Row(id, step, min(MOST_USES, row.count + uses)))

    def empty_overflow(self, *rule: Any) -> None:
        for row in sorted(row for row in self.overflow if row):
            if place := self.way_for(row.id, *rule):
                self.overflow[self.overflow.index(row)] = None
                self.write(*place, row)

    def insert(self, row: Row, *rule: Any) -> bool:
        place = self.way_for(row.id, *rule)
        if place is None:
            if None not in self.overflow:
                return False
            place = -1, self.overflow.index(None)
        self.write(*place, row)
        while len(self.places()) > 24 * len(self.sets) and len(self.sets) < self.most_sets:
            new = len(self.sets)
            self.sets.append([None] * WAYS)
            moving = [row for ways in self.sets for row in ways if row and self.home(row.id) == new]
            for way, row in enumerate(moving):
                number, before, _ = self.places()[row.id]
                self.write(number, before, None)
                self.write(new, way, row)
        return True


class Model:
    def __init__(self, num_partitions: int, most_sets: int, overflow_sets: int) -> None:
        self.num_partitions, self.most_sets = num_partitions, most_sets
        self.partitions = [Partition(most_sets, overflow_sets * WAYS) for _ in range(num_partitions)]

    def partition_of(self, id: int) -> int:
        return of(id) // (2**64 // self.num_partitions)

    def rows(self) -> dict[int, tuple[int, Row]]:
        """Slot and row by id."""
        found = {}
        for p, partition in enumerate(self.partitions):
            for id, (number, way, row) in partition.places().items():
                number, way = (self.most_sets + way // WAYS, way % WAYS) if number < 0 else (number, way)
                found[id] = (number * self.num_partitions + p) * WAYS + way, row
        return found

    def insert(self, batch: dict[int, int], step: int, protect: int, policy: str) -> int:
        """How many new ids find no room: then nothing changes."""
        before = [([*map(list, p.sets)], list(p.overflow)) for p in self.partitions]
        unplaced = 0
        for p, partition in enumerate(self.partitions):
            mine = sorted(id for id in batch if self.partition_of(id) == p)
            new = [id for id in mine if id not in partition.places()]
            for id in mine:
                if id not in new:
                    partition.use(id, batch[id], step)
            if mine:
                partition.empty_overflow(step, protect, policy)
            for id in new:
                row = Row(id, step, min(MOST_USES, batch[id]))
                unplaced += not partition.insert(row, step, protect, policy)
        if unplaced:
            for partition, (sets, overflow) in zip(self.partitions, before, strict=True):
                partition.sets, partition.overflow = sets, overflow
        return unplaced

    def remove(self, ids: list[int]) -> None:
        for id in ids:
            partition = self.partitions[self.partition_of(id)]
            if id in partition.places():
                number, way, _ = partition.places()[id]
                partition.write(number, way, None)


class Problem(NamedTuple):
    """An index, the ids it meets, and a seed for everything that is done to it."""

    capacity: int
    overflow: int
    most_partitions: int
    ids: str
    policy: str
    protect: int
    num_steps: int
    most_ids: int  # of a batch
    seed: int

    def pool(self, rng: random.Random) -> list[int]:
        top, low, digest = (rng.getrandbits(bits) << place for bits, place in ((10, 54), (20, 0), (8, 46)))
        count = 2 * self.capacity + 40
        ids = {
            "dense": range(-5, count),
            "strided": (index << 40 for index in range(-9, count)),
            "random": (rng.getrandbits(64) - 2**63 for _ in range(count)),
            "one set": (id_of(top | low | rng.getrandbits(34) << 20) for _ in range(count)),
            "one partition": (id_of(top | rng.getrandbits(54)) for _ in range(count)),
            "equal digests": (id_of(digest | rng.getrandbits(46) | rng.getrandbits(10) << 54) for _ in range(count)),
            "no digest": (id_of(rng.getrandbits(46) | rng.getrandbits(10) << 54) for _ in range(count)),
        }[self.ids]
        return sorted({*ids, *EXTREMES} if self.ids != "one set" else {*ids})


IDS = ("dense", "strided", "random", "one set", "one partition", "equal digests", "no digest")
CAPACITIES = (1, 40, 100, 250, 300, 700)
problems = st.builds(
    Problem,
    st.sampled_from(CAPACITIES),
    st.sampled_from((0, 1, 50, 200)),
    st.sampled_from((1, 1, 4, 1024)),
    st.sampled_from(IDS),
    st.sampled_from(POLICIES),
    st.sampled_from((0, 1, 2, 3, 8)),
    st.integers(1, 8),
    st.sampled_from((3, 30, 100, 300)),
    seeds,
)


def served(kernels: str, function: str) -> Any:
    if kernels == "cpu":
        return getattr(cpu, function)
    return getattr(reference, f"{function.removesuffix('_')}_reference{'_' * function.endswith('_')}")


def run(problem: Problem, kernels: str) -> tuple[DynamicIndex, int]:
    """Do the same to the index and to lists of sets, and compare after each step. The index, and the number of ids."""
    rng, find, rows = random.Random(problem.seed), served(kernels, "dynamic_find"), served(kernels, "dynamic_rows")
    pool, step, met = problem.pool(rng), rng.choice((0, 2**40)), 0
    index = make_index(problem.capacity, problem.overflow, "cpu", problem.most_partitions)
    num_partitions = index.num_sets.numel()
    num_sets = index.overflowed.numel() // num_partitions
    model = Model(num_partitions, num_sets, index.digests.numel() // num_partitions // WAYS - num_sets)
    for _ in range(problem.num_steps):
        before, copies = model.rows(), [part.clone() for part in index]
        size = rng.randint(0, min(problem.most_ids, len(pool)))
        first = rng.randint(0, len(pool) - size)
        ids = rng.sample(pool, size) if rng.random() < 0.6 else pool[first : first + size]  # ids come back, or are new
        met += size
        action = rng.random()
        if action < 0.2:
            found = find(index, torch.tensor(ids, dtype=torch.int64))
            assert found.tolist() == [before[id][0] if id in before else -1 for id in ids]
        elif action < 0.35:
            gone = served(kernels, "dynamic_remove_")(index, torch.tensor(ids, dtype=torch.int64))
            assert gone.tolist() == [before[id][0] if id in before else -1 for id in ids]
            model.remove(ids)
        else:
            step += rng.choice((1, 1, 3))
            batch = {id: rng.choice((1, 2, MOST_USES - 1)) for id in sorted(ids)}
            rule = step, problem.protect, problem.policy
            numbers = [torch.tensor(list(part), dtype=torch.int64) for part in (batch.keys(), batch.values())]
            done = served(kernels, "dynamic_insert_")(index, *numbers, *rule)
            check(done, before, model, batch, model.insert(batch, *rule))
            if int(done.totals[1]) < int(done.totals[0]):
                assert all(torch.equal(part, copy) for part, copy in zip(index, copies, strict=True))
        check_index(index, model)
        held = model.rows()
        assert [found.tolist() for found in rows(index)] == [sorted(held), [held[id][0] for id in sorted(held)]]
    return index, met


def check(
    done: DynamicInsertion, before: dict[int, tuple[int, Row]], model: Model, batch: dict[int, int], unplaced: int
) -> None:
    held = model.rows()
    num_new = sum(id not in before for id in batch)
    in_overflow = sum(row is not None for partition in model.partitions for row in partition.overflow)
    assert done.totals.tolist() == [num_new, num_new - unplaced, in_overflow]
    assert done.slots.tolist() == [-1 if unplaced else held[id][0] for id in batch]
    assert done.is_new.tolist() == [not unplaced and id not in before for id in batch]
    evicted = sorted(before.keys() - held.keys())
    assert done.evicted_ids.tolist() == evicted
    assert done.evicted_slots.tolist() == [before[id][0] for id in evicted]
    # Rows that are moved one after the other, in place, and then new ones, are where they should be.
    contents = {slot: id for id, (slot, _) in before.items()}
    moves = list(zip(done.from_slots.tolist(), done.to_slots.tolist(), strict=True))
    elsewhere = [id for id in sorted(before) if id in held and held[id][0] != before[id][0]]
    assert moves == [(before[id][0], held[id][0]) for id in elsewhere]
    assert {to for _, to in moves}.isdisjoint(start for start, _ in moves)
    for start, to in moves:
        assert contents[start] in held
        contents[to] = contents[start]
    contents |= {held[id][0]: id for id, new in zip(batch, done.is_new.tolist(), strict=True) if new}
    assert all(contents[slot] == id for id, (slot, _) in held.items())


def check_index(index: DynamicIndex, model: Model) -> None:
    slots = index.digests.nonzero()[:, 0]
    parts = zip(*(part[slots].tolist() for part in (index.ids, index.used, index.counts)), strict=True)
    assert {Row(*parts): slot for parts, slot in zip(parts, slots.tolist(), strict=True)} == {
        row: slot for slot, row in model.rows().values()
    }
    assert index.digests[slots].tolist() == [max(1, of(id) >> 46 & 255) for id in index.ids[slots].tolist()]
    partitions = model.partitions
    assert index.num_sets.tolist() == [len(partition.sets) for partition in partitions]
    assert index.num_rows.tolist() == [len(partition.places()) for partition in partitions]
    assert index.num_overflow.tolist() == [sum(row is not None for row in p.overflow) for p in partitions]
    waiting = [0] * index.overflowed.numel()
    for number, partition in enumerate(partitions):
        for row in partition.overflow:
            if row is not None:
                waiting[partition.home(row.id) * len(partitions) + number] += 1
    assert index.overflowed.tolist() == waiting


def test_ids_with_given_bits():
    for bits in (0, 1, 2**63, MASK64, 0x123456789ABCDEF0):
        assert of(id_of(bits)) == bits


@settings(max_examples=fewer(30, 4))
@given(problems)
@pytest.mark.usefixtures("poisoned")
def test_the_reference_is_lists_of_sets(problem):
    run(problem, "reference")


@pytest.mark.parametrize("num_threads", [1, 2])
@given(problems)
@pytest.mark.usefixtures("poisoned")
def test_the_cpu_kernels_are_lists_of_sets_on_any_number_of_threads(monkeypatch, num_threads, problem):
    monkeypatch.setattr(row_cache, "FEW_ROWS", 0)
    torch.set_num_threads(num_threads)
    run(problem, "cpu")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.usefixtures("poisoned")
def test_both_leave_the_same_index(ids, policy):
    problem = Problem(300, 100, 1, ids, policy, 2, 12, 100, 5)
    ours, theirs = (run(problem, kernels)[0] for kernels in ("cpu", "reference"))
    held = ours.digests != 0
    assert (ours.has_room >= theirs.has_room).all()
    for name, mine, right in zip(DynamicIndex._fields[:-1], ours, theirs, strict=False):
        by_row = name in ("ids", "used", "counts")
        assert torch.equal(mine[held] if by_row else mine, right[held] if by_row else right), name


def insert(index: DynamicIndex, ids: list[int], step: int, protect: int = 1, policy: str = "lru") -> DynamicInsertion:
    ids = sorted(ids)
    return cpu.dynamic_insert_(index, torch.tensor(ids), torch.ones(len(ids), dtype=torch.int64), step, protect, policy)


def test_the_number_of_partitions_and_sets():
    for capacity, overflow, partitions, sets, lists in (
        (1, 0, 1, 1, 0), (32, 1, 1, 1, 1), (63, 33, 1, 2, 2), (64, 1, 2, 1, 1), (100_000, 10_000, 1024, 4, 1),
    ):  # fmt: skip
        index = make_index(capacity, overflow)
        assert index.num_sets.tolist() == [1] * partitions
        assert index.overflowed.numel() == partitions * sets
        assert {part.numel() for part in index[:4]} == {partitions * (sets + lists) * WAYS}
        assert index.digests.data_ptr() % 64 == 0


def test_rows_of_the_last_batches_stay_and_go_when_they_may():
    """One set without victims: its rows wait in the overflow list until `protect` batches have passed."""
    index = make_index(32, 32)
    assert insert(index, [*range(32)], 1, protect=3).slots.tolist() == [*range(32)]
    waiting = insert(index, [100, 101], 2, protect=3)
    assert waiting.slots.tolist() == [32, 33]
    assert waiting.totals.tolist() == [2, 2, 2]
    assert insert(index, [100], 3, protect=3).from_slots.tolist() == []
    moved = insert(index, [0, 100], 4, protect=3)
    assert moved.evicted_ids.tolist() == [1, 2]
    assert (moved.from_slots.tolist(), moved.to_slots.tolist()) == ([32, 33], [1, 2])
    assert moved.slots.tolist() == [0, 1]
    assert moved.totals.tolist() == [0, 0, 0]
    assert insert(index, [7_000], 5, protect=3).evicted_slots.tolist() == [3]  # id 3, used in step 1


def test_a_slot_that_is_used_again_starts_anew():
    index = make_index(32, 0)
    for step in range(1, 6):
        insert(index, [*range(32)], step)
    slot = int(insert(index, [500], 6).slots[0])
    assert (int(index.used[slot]), int(index.counts[slot])) == (6, 1)
    cpu.dynamic_remove_(index, torch.tensor([500]))
    slot = int(insert(index, [600], 7).slots[0])
    assert (int(index.ids[slot]), int(index.used[slot]), int(index.counts[slot])) == (600, 7, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_victim_is_the_least(policy):
    index = make_index(32, 0)
    insert(index, [*range(32)], 1, policy=policy)
    insert(index, [*range(1, 32)], 2, policy=policy)
    insert(index, [0], 3, policy=policy)
    insert(index, [0], 4, policy=policy)
    insert(index, [*range(8, 32)], 5, policy=policy)
    insert(index, [*range(3, 8)], 6, policy=policy)  # 0: three times, 1 and 2: twice, last in step 2
    assert insert(index, [77], 7, policy=policy).evicted_ids.tolist() == [1]
    assert insert(index, [78], 8, policy=policy).evicted_ids.tolist() == [77 if policy == "lfu" else 2]


def test_a_batch_without_room_changes_nothing():
    """A set that is full, two slots for overflow rows of 32 taken, and 31 rows more."""
    index = make_index(32, 32)
    insert(index, [*range(32)], 1, protect=8)
    insert(index, [50, 51], 2, protect=8)
    copies = [part.clone() for part in index]
    refused = insert(index, [3, *range(100, 131)], 3, protect=8)
    assert refused.totals.tolist() == [31, 30, 2]
    assert refused.slots.unique().tolist() == [-1]
    assert not refused.is_new.any()
    assert [part.numel() for part in refused[2:6]] == [0] * 4
    assert all(torch.equal(part, copy) for part, copy in zip(index, copies, strict=True))
    assert insert(index, [3, *range(100, 130)], 3, protect=8).totals.tolist() == [30, 30, 32]


def test_a_partition_grows_in_the_middle_of_a_batch():
    index = make_index(32 * 9, 64, most_partitions=1)
    done = insert(index, [*range(0, 2**40, 2**33)], 1)
    assert int(index.num_sets[0]) == 6  # 128 rows, up to 24 a set
    assert done.from_slots.numel() == 0  # new rows are moved, but for the caller they come to where they are
    assert torch.equal(cpu.dynamic_find(index, torch.arange(0, 2**40, 2**33)), done.slots)
    more = insert(index, [*range(1, 60)], 2)
    assert more.from_slots.numel() > 0
    assert int(index.num_sets[0]) == 8


def same_set(count: int) -> list[int]:
    """Ids with the same lowest bits, so in one set however often it is split; ascending."""
    return sorted(id_of(index << 20) for index in range(count))


def test_overflow_rows_are_found_behind_holes_of_their_list():
    index, ids = make_index(32 * 9, 64, most_partitions=1), same_set(90)
    slots = insert(index, ids, 1).slots.tolist()
    listed = [id for id, slot in zip(ids, slots, strict=True) if slot >= 32 * 9]
    assert len(listed) == 58
    cpu.dynamic_remove_(index, torch.tensor(listed[:40]))
    assert cpu.dynamic_find(index, torch.tensor(listed[40:])).tolist() == [*range(32 * 9 + 40, 32 * 9 + 58)]


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_overflow_rows_take_the_ways_of_removed_rows(kernels):
    """In a partition that has not all its sets."""
    index, ids = make_index(32 * 9, 64, most_partitions=1), same_set(40)
    slots = insert(index, ids, 1).slots.tolist()
    removed = [id for id, slot in zip(ids, slots, strict=True) if slot < 32 * 9][3:5]
    served(kernels, "dynamic_remove_")(index, torch.tensor(removed))
    done = insert(index, ids[:1], 2)
    assert done.from_slots.tolist() == [32 * 9, 32 * 9 + 1]
    assert done.to_slots.tolist() == [slots[ids.index(id)] for id in removed]
    assert done.totals.tolist() == [0, 0, 6]


@pytest.mark.usefixtures("poisoned")
def test_large_batches_are_inserted_alike_on_any_number_of_threads():
    def results(num_threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(num_threads)
        generator, index, found = torch.Generator().manual_seed(3), make_index(40_000, 8_000), []
        for step in range(8):
            ids = torch.randint(-(2**63), 2**63 - 1, (9_000,), generator=generator).sort().values.unique()
            ids = torch.cat([ids, torch.arange(1_000) << 32]).unique()
            found += cpu.dynamic_insert_(index, ids, torch.ones_like(ids), step, 2, "lru")
            found.append(cpu.dynamic_find(index, ids.flip(0)))
        held = index.digests != 0
        return [*found, index.ids[held], index.used[held], index.counts[held], *index[3:]]

    alone, together = results(1), results(2)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert any(part.numel() for part in alone[2::8])  # rows were evicted


@pytest.mark.slow
def test_a_million_operations():
    met = seed = 0
    while met < 1_000_000:
        rng, seed = random.Random(seed), seed + 1
        num_steps, most_ids = rng.choice(((3_000, 30), (300, 200), (100, 700)))
        options = rng.choice(CAPACITIES), rng.choice((0, 32, 200)), rng.choice((1, 4, 1024)), rng.choice(IDS)
        problem = Problem(*options, rng.choice(POLICIES), rng.choice((1, 2, 8)), num_steps, most_ids, seed)
        torch.set_num_threads(rng.choice((1, 2)))
        met += run(problem, "cpu")[1]
