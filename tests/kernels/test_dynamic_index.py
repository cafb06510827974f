"""The index of a dynamic table against a model that keeps a dictionary for each set: all kernels and the reference."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import breadth, fewer
from tests.kernels.test_row_cache import MASK64, WAYS, mixed
from tests.kernels.test_row_cache import served as served_function
from tests.strategies import seeds
from tritonemb.kernels.cpu import row_cache
from tritonemb.layout import MAX_USES, MISSING, NO_KEY, POSITION, DynamicIndex, dynamic_rows, make_index, partitions_of
from tritonemb.tables.index import expired_ids, undo_use

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
    used: int
    count: int


class Partition:
    """Rows by id, for each set the ones that are its own."""

    def __init__(self, most_sets: int, most_rows: int) -> None:
        self.most_sets, self.most_rows = most_sets, most_rows
        self.sets: list[OrderedDict[int, Row]] = [OrderedDict()]

    def home(self, id: int) -> int:
        """By linear hashing: split sets have one more bit."""
        level = 1
        while 2 * level <= len(self.sets):
            level *= 2
        number = of(id) % level
        return of(id) % (2 * level) if number + level < len(self.sets) else number

    def rows(self) -> dict[int, Row]:
        return {id: row for rows in self.sets for id, row in rows.items()}

    def room(self, last: int) -> int:
        return self.most_rows - len(self.rows()) + sum(row.used <= last for row in self.rows().values())

    def insert(self, id: int, count: int, step: int, last: int, half_life: int) -> list[int]:
        """The victim, if there is one."""
        victims: list[int] = []
        if len(self.rows()) == self.most_rows:
            home = self.home(id)
            sets = [*self.sets[home:], *self.sets[:home]]
            for near in (sets[:2], *([rows] for rows in sets[2:])):
                old = [(id, row) for rows in near for id, row in rows.items() if row.used <= last]
                aged = [row.count >> min(31, (step - row.used) // half_life) if half_life else 0 for _, row in old]
                if old:
                    victims = [min((age, row.used, id) for age, (id, row) in zip(aged, old, strict=True))[-1]]
                    for rows in near:
                        rows.pop(victims[0], None)
                    break
        self.sets[self.home(id)][id] = Row(step, min(MAX_USES, count))
        while len(self.rows()) > 14 * len(self.sets) and len(self.sets) < self.most_sets:
            self.sets.append(OrderedDict())
            rows = self.rows()
            for ways in self.sets:
                ways.clear()
            for id, row in rows.items():
                self.sets[self.home(id)][id] = row
        return victims


class Model:
    def __init__(self, num_partitions: int, most_sets: int, most_rows: int) -> None:
        self.partitions = [Partition(most_sets, most_rows) for _ in range(num_partitions)]

    def of(self, id: int) -> Partition:
        return self.partitions[(of(id) >> 32) * len(self.partitions) >> 32]

    def rows(self) -> dict[int, Row]:
        return {id: row for partition in self.partitions for id, row in partition.rows().items()}

    def mark(self, ids: list[int], step: int) -> None:
        for id in ids:
            partition = self.of(id)
            rows = partition.sets[partition.home(id)]
            rows[id] = Row(step, min(MAX_USES, rows[id].count + 1))

    def insert(self, ids: dict[int, int], step: int, last: int, half_life: int) -> tuple[list[int], int]:
        """Victims; and how many ids find no room: then nothing changes."""
        missing = 0
        for partition in self.partitions:
            expected = sum(self.of(id) is partition for id in ids)
            missing += max(0, expected - partition.room(last))
        if missing:
            return [], missing
        new = ids.items()
        return [victim for id, count in new for victim in self.of(id).insert(id, count, step, last, half_life)], 0

    def remove(self, id: int) -> None:
        for rows in self.of(id).sets:
            rows.pop(id, None)


class Problem(NamedTuple):
    """An index, the ids it meets, and a seed for everything that is done to it."""

    capacity: int
    most_partitions: int
    ids: str
    half_life: int
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


def problems(most_steps: int = 8, most_ids: tuple[int, ...] = (3, 30, 100, 300)) -> st.SearchStrategy[Problem]:
    return st.builds(
        Problem,
        st.sampled_from(CAPACITIES),
        st.sampled_from((1, 1, 3, 1024)),
        st.sampled_from(IDS),
        st.sampled_from((0, 1, 4)),
        st.sampled_from((0, 1, 2, 3, 8)),
        st.integers(1, most_steps),
        st.sampled_from(most_ids),
        seeds,
    )


def served(kernels: str, function: str) -> Any:
    return served_function(kernels, "dynamic_index", function)


class Insertion(NamedTuple):
    """`evicted_ids` ascending."""

    rows: torch.Tensor
    evicted_ids: torch.Tensor
    evicted_rows: torch.Tensor


def find(kernels: str, index: DynamicIndex, ids: torch.Tensor) -> torch.Tensor:
    return served(kernels, "dynamic_find_")([index], ids, torch.tensor([0, ids.numel()], device=ids.device), [0])[0]


def mark(kernels: str, index: DynamicIndex, ids: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`dynamic_find_` of one table; the keys say which rows there are."""
    bounds = torch.tensor([0, ids.numel()], device=ids.device)
    rows, initial, keys = served(kernels, "dynamic_find_")([index], ids, bounds, [0], [step])
    assert torch.equal(keys == NO_KEY, rows >= 0)
    return rows, initial


def new_of(kernels: str, index: DynamicIndex, ids: torch.Tensor, *occurrences: torch.Tensor) -> Any:
    """Of distinct, unknown ids."""
    keys = partitions_of(ids, index.shard[0]) - index.shard[1] if kernels == "triton" else torch.zeros_like(ids)
    return served(kernels, "dynamic_begin_insert")([index], ids, keys.int(), False, *occurrences)


def missing_rows(kernels: str, index: DynamicIndex, ids: torch.Tensor, last: int) -> int:
    if not ids.numel():
        return 0
    counts = ids.new_zeros(1, 5)
    served(kernels, "dynamic_room")([index], new_of(kernels, index, ids), [(0, last, 0)], counts)
    return int(counts[0, MISSING])


def add(kernels: str, index: DynamicIndex, ids: torch.Tensor, occurrences: torch.Tensor, *rule: int) -> Insertion:
    """Rows for distinct, unknown ids; there is room."""
    if not ids.numel():
        return Insertion(ids, ids, ids)
    rows, counts = torch.full_like(ids, -1), ids.new_zeros(1, 5)
    new = new_of(kernels, index, ids, occurrences)
    starts = served(kernels, "dynamic_room")([index], new, [rule], counts)
    assert int(counts[0, POSITION]) == int(occurrences.sum())
    done, evicted = served(kernels, "dynamic_commit_insert_")([index], new, starts, [rule], rows)
    assert torch.equal(rows[new.order], done)
    evicted_ids, evicted_rows = evicted[evicted[:, 1] >= 0].T
    evicted_ids, order = evicted_ids.sort()
    return Insertion(rows, evicted_ids, evicted_rows[order])


def run(problem: Problem, kernels: str, device: torch.device | str = "cpu") -> tuple[DynamicIndex, int]:
    """Do the same to the index and to the model, and compare after each step. The index, and the number of ids."""
    rng = random.Random(problem.seed)
    pool, step, met = problem.pool(rng), rng.choice((0, 2**30)), 0
    index = make_index(problem.capacity, device, problem.most_partitions)
    num_partitions = index.num_sets.numel()
    sizes = index.overflowed.numel() // num_partitions, index.ids.numel() // num_partitions
    model = Model(num_partitions, *sizes)
    row_of: dict[int, int] = {}
    for _ in range(problem.num_steps):
        size = rng.randint(0, min(problem.most_ids, len(pool)))
        first = rng.randint(0, len(pool) - size)
        ids = rng.sample(pool, size) if rng.random() < 0.6 else pool[first : first + size]  # ids come back, or are new
        met += size
        action, expected = rng.random(), torch.tensor(ids, dtype=torch.int64, device=device)
        if action < 0.2:
            assert find(kernels, index, expected).tolist() == [row_of.get(id, -1) for id in ids]
        elif action < 0.3:
            gone = served(kernels, "dynamic_remove_")(index, expected)
            assert gone.tolist() == [row_of.pop(id, -1) for id in ids]
            for id in ids:
                model.remove(id)
        elif action < 0.4:
            partition, last = rng.randrange(num_partitions), step - rng.randint(0, 3)
            old = expired_ids(index, partition, last).tolist()
            rows = model.partitions[partition].rows()
            assert old == sorted(id for id in rows if rows[id].used <= last)
        else:
            step += rng.choice((1, 1, 3))
            ids += rng.choices(ids, k=size // 4) if ids else []
            use(problem, kernels, index, model, row_of, ids, step)
        check_index(index, model, row_of)
    return index, met


def use(
    problem: Problem, kernels: str, index: DynamicIndex, model: Model, row_of: dict[int, int], ids: list[int], step: int
) -> None:
    """A batch: known ids are marked, new ones are inserted; or all is as before, if there are too many."""
    rule, device = (step, step - 1 - problem.protect, problem.half_life), index.ids.device
    copies = [part.clone() for part in index]
    known, times = [id for id in ids if id in row_of], random.Random(step).choice((1, 1, 1, MAX_USES))
    new = {id: ids.count(id) * times for id in sorted({*ids} - {*known})}
    rows, initial = mark(kernels, index, torch.tensor(ids, dtype=torch.int64, device=device), step)
    assert rows.tolist() == [row_of.get(id, -1) for id in ids]
    steps: dict[int, list[int]] = {}
    for id, used in zip(ids, initial.tolist(), strict=True):
        steps.setdefault(id, []).append(used)
    for id, old in steps.items():
        assert min(old) == (int(DynamicIndex(*copies).last_used[row_of[id]]) if id in row_of else 0)
        assert {*old} <= {min(old), step}
    result = model.rows()
    model.mark(known, step)
    victims, missing = model.insert(new, *rule)
    new_ids, counts = (torch.tensor([*part], dtype=torch.int64, device=device) for part in (new.keys(), new.values()))
    assert missing_rows(kernels, index, new_ids, rule[1]) == missing
    if missing:
        undo_use(index, rows, initial)
        for id in known:
            partition = model.of(id)
            partition.sets[partition.home(id)][id] = result[id]
            index.counts[row_of[id]] = result[id].count  # it may have been MAX_USES
        assert all(torch.equal(part, copy) for part, copy in zip(index, copies, strict=True))
        return
    done = add(kernels, index, new_ids, counts, *rule)
    assert done.evicted_ids.tolist() == sorted(victims)
    assert done.evicted_rows.tolist() == [row_of.pop(id) for id in sorted(victims)]
    row_of.update(zip(new, done.rows.tolist(), strict=True))


def check_index(index: DynamicIndex, model: Model, row_of: dict[int, int]) -> None:
    ids, rows = (dynamic_row.tolist() for dynamic_row in dynamic_rows(index))
    assert dict(zip(ids, rows, strict=True)) == row_of
    assert {id: Row(int(index.last_used[row]), int(index.counts[row])) for id, row in row_of.items()} == model.rows()
    partitions = model.partitions
    assert all(model.of(id) is partitions[row % len(partitions)] for id, row in row_of.items())
    slots = index.digests.nonzero()[:, 0]
    occupied = index.ids[index.rows[slots].long()].tolist()
    assert index.digests[slots].tolist() == [max(1, of(id) >> 46 & 255) for id in occupied]
    assert index.num_sets.tolist() == [len(partition.sets) for partition in partitions]
    assert index.num_rows.tolist() == [len(partition.rows()) for partition in partitions]
    # A row is in an overflow slot only if its set is full.
    sizes = [len(rows) for partition in partitions for rows in partition.sets]
    assert int(index.overflowed.sum()) == int(index.num_overflow.sum()) == sum(max(0, size - WAYS) for size in sizes)
    in_ways = (slots < index.overflowed.numel() * WAYS).sum()
    assert int(in_ways) == sum(min(size, WAYS) for size in sizes)


def test_ids_with_given_bits():
    for bits in (0, 1, 2**63, MASK64, 0x123456789ABCDEF0):
        assert of(id_of(bits)) == bits


@settings(max_examples=fewer(30, 4))
@given(problems())
@pytest.mark.usefixtures("poisoned")
def test_the_reference_is_the_model(problem):
    run(problem, "reference")


@pytest.mark.parametrize("num_threads", [1, 2])
@given(problems())
@pytest.mark.usefixtures("poisoned")
def test_the_cpu_kernels_are_the_model_on_any_number_of_threads(monkeypatch, num_threads, problem):
    monkeypatch.setattr(row_cache, "FEW_ROWS", 0)
    torch.set_num_threads(num_threads)
    run(problem, "cpu")


@pytest.mark.parametrize("half_life", [0, 4])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.few(2)
def test_both_give_the_same_rows(ids, half_life):
    problem = Problem(300, 1, ids, half_life, 2, 12, 100, 5)
    assert_alike(*(run(problem, kernels)[0] for kernels in ("cpu", "reference")))


def assert_alike(one: DynamicIndex, other: DynamicIndex) -> None:
    """But for the places of slots."""

    def facts(index: DynamicIndex) -> list[torch.Tensor]:
        ids, rows = dynamic_rows(index)
        in_order = index.free.view(-1, index.num_sets.numel()).T
        free = [item[:n] for item, n in zip(in_order, (index.num_allocated - index.num_rows).tolist(), strict=True)]
        return [ids, rows, index.uses[rows], *free, *index[4:]]

    for actual, expected in zip(facts(one), facts(other), strict=True):
        assert torch.equal(actual.cpu(), expected.cpu())


@pytest.mark.parametrize(
    ("kernels", "capacity"), [("reference", 700), ("cpu", 700), pytest.param("triton", 9, marks=pytest.mark.triton)]
)
def test_ids_of_a_full_partition_are_missing_and_evict_when_they_may(device, kernels, capacity):
    """Also where it is one partition that is full, and others have room."""
    index = make_index(capacity, device if kernels == "triton" else "cpu", 3)
    num_partitions = index.num_sets.numel()
    room = len(index.ids) // num_partitions
    ids = torch.arange(6 * room * num_partitions, device=index.ids.device)
    of_partition = [ids[partitions_of(ids, num_partitions) == number] for number in range(num_partitions)]
    ones = torch.ones_like(ids)
    add(kernels, index, of_partition[0][:room], ones[:room], 1, 0, 0)
    initial = [part.clone() for part in index]
    new = torch.cat([of_partition[0][room : room + 2], of_partition[-1][-3:]]).sort().values
    missing = 2 if num_partitions > 1 else 5
    assert missing_rows(kernels, index, new, 0) == missing
    assert all(torch.equal(part, copy) for part, copy in zip(index, initial, strict=True))
    done = add(kernels, index, new, ones[:5], 2, 1, 0)
    assert len(done.evicted_ids) == missing
    assert torch.isin(done.evicted_ids, of_partition[0][:room]).all()


@pytest.mark.triton
@settings(max_examples=4)
@given(problems(most_steps=4, most_ids=(3, 20, 60)))
@pytest.mark.usefixtures("poisoned")
def test_triton_is_the_model(device, problem):
    run(problem, "triton", device)


@pytest.mark.triton
@pytest.mark.parametrize("half_life", [0, 4])
@pytest.mark.parametrize("ids", breadth(IDS, ("dense", "one set", "no digest")))
@pytest.mark.usefixtures("poisoned")
def test_triton_gives_the_same_rows(device, ids, half_life):
    problem = Problem(70, 1, ids, half_life, half_life // 4, 7, 40, 5)
    assert_alike(run(problem, "triton", device)[0], run(problem, "cpu")[0])


@pytest.mark.triton
def test_triton_has_a_part_of_an_index(device):
    ids = torch.randint(-(2**63), 2**63 - 1, (200,)).unique()
    batches = ids[partitions_of(ids, 3) > 0].chunk(2)
    parts = [make_index(150, item, 3, (1, 2)) for item in ("cpu", device)]
    for step, batch in enumerate(batches, 1):
        one, other = (
            insert(part, batch.tolist(), step, kernels=item)
            for item, part in zip(("cpu", "triton"), parts, strict=True)
        )
        assert [item.tolist() for item in one] == [item.tolist() for item in other]
    assert one.evicted_ids.numel()
    assert_alike(*parts)


@pytest.mark.triton
def test_an_id_is_used_many_times_at_once(device):
    index, ids = make_index(25, device), torch.arange(10, device=device)
    insert(index, ids.tolist(), 1, kernels="triton")
    index.counts[3] = MAX_USES - 5
    batch = torch.cat([ids, ids.new_full((300,), 7), ids.new_full((90,), 3)])
    rows, initial = mark("triton", index, batch, 2)
    assert index.counts[:10].tolist() == [2, 2, 2, MAX_USES, 2, 2, 2, 302, 2, 2]
    assert index.last_used[:10].tolist() == [2] * 10
    undo_use(index, rows, initial)
    assert index.last_used[:10].tolist() == [1] * 10
    assert index.counts[:10].tolist() == [1, 1, 1, MAX_USES - 91, 1, 1, 1, 1, 1, 1]


def several(kernels: str, device: torch.device | str, seed: int) -> list[Any]:
    """Batches of three tables and one that is not dynamic, a table with two keys, not all ids admitted: the results.

    The values of the second and of the fourth batch stand for several occurrences each, of the first for `MAX_USES`.
    """
    generator, results = torch.Generator().manual_seed(seed), list[Any]()
    indexes = [make_index(*sizes) for sizes in ((40, device, 1), (150, device, 3), (25, device, 1))]
    of_key = [1, -1, 0, 2, 1]
    for step in range(1, 5):
        bounds = torch.tensor([0, 30, 40, 60, 60 + 5 * (step % 2), 90])
        values = torch.randint(-40, 40, (90,), generator=generator) * 10**12
        values[30:40] = -7  # of no dynamic table
        admitted = torch.rand(90, generator=generator) < 0.8 if step > 2 else None
        clocks = [step, step + 2**30, step]
        rules = [(clock, clock - 2, life) for clock, life in zip(clocks, (0, 4, 0), strict=True)]
        occurrences = torch.randint(1, 4, (90,), generator=generator).index_fill_(0, torch.tensor([0]), MAX_USES)
        many = () if step % 2 else (occurrences.to(device),)
        rows, initial, keys = served(kernels, "dynamic_find_")(
            indexes, values.to(device), bounds.to(device), of_key, clocks, *many
        )
        known = torch.tensor(
            [key == NO_KEY for key in keys.tolist()], device=device
        )  # which partition or table it is, kernels decide for themselves
        new = served(kernels, "dynamic_begin_insert")(indexes, values.to(device), keys, False, *many)
        size = int(new.numbers[-1]) if new.numbers.numel() else 0
        # Each has an order of its own.
        _, place = torch.sort(new.ids[:size].cpu(), stable=True)
        place = place[torch.sort(new.tables[:size].cpu()[place], stable=True).indices]
        if admitted is not None:
            new.admitted[:size] = torch.empty(size, dtype=torch.bool).index_copy_(0, place, admitted[:size]).to(device)
        counts = torch.zeros(3, 5, dtype=torch.int64, device=device)
        starts = served(kernels, "dynamic_room")(indexes, new, rules, counts)
        assert not initial[~known].any()
        results += [rows.tolist(), (initial > 0).tolist(), known.tolist(), counts.tolist()]
        assert not initial[30:40].any()
        assert counts[:, 3].tolist() == [0, 0, 0]
        new = new._replace(ids=new.ids[:size], tables=new.tables[:size])
        done = served(kernels, "dynamic_commit_insert_")(indexes, new, starts, rules, rows)
        of_ids = new.ids, new.count_occurrences(), new.tables, done[0], done[1][:, 1]
        results += [part.cpu()[place].tolist() for part in of_ids] + [rows.tolist()]
        result = served(kernels, "dynamic_find_")(indexes, values.to(device), bounds.to(device), of_key)[0]
        assert torch.equal(result, rows)
    return [*results, *indexes]


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.usefixtures("poisoned")
def test_several_tables_at_once_are_as_by_the_reference(request, kernels):
    device = request.getfixturevalue("device") if kernels == "triton" else "cpu"
    fused, expected = several(kernels, device, 3), several("reference", "cpu", 3)
    assert fused[:-3] == expected[:-3]
    for index, reference in zip(fused[-3:], expected[-3:], strict=True):
        assert_alike(DynamicIndex(*(part.cpu() for part in index)), reference)
    evicted = [of_step[8] for of_step in zip(*[iter(expected[:-3])] * 10, strict=True)]
    assert any(row >= 0 for rows in evicted for row in rows)
    assert any(-1 in rows for rows in expected[7:-3:10])  # and some id was refused


def insert(
    index: DynamicIndex, ids: list[int], step: int, protect: int = 0, half_life: int = 0, kernels: str = "cpu"
) -> Insertion:
    """Use the known ones and insert the others."""
    expected = torch.tensor(sorted(ids), device=index.ids.device)
    new = expected[mark(kernels, index, expected, step)[0] < 0]
    assert missing_rows(kernels, index, new, step - 1 - protect) == 0
    rule = step, step - 1 - protect, half_life
    return add(kernels, index, new, torch.ones_like(new), *rule)


def test_the_number_of_partitions_and_sets():
    for capacity, partitions, sets, rows in (
        (1, 1, 1, 1), (25, 1, 1, 25), (26, 1, 2, 26), (8_192, 2, 256, 4_096), (100_000, 16, 256, 6_250),
        (10**7, 763, 512, 13107),
    ):  # fmt: skip
        index = make_index(capacity)
        assert index.num_sets.tolist() == [1] * partitions
        assert index.overflowed.numel() == partitions * sets
        assert {len(part) for part in (index.entries, index.ids, index.uses, index.free)} == {partitions * rows}
        assert index.digests.numel() == partitions * (sets + -(-rows // WAYS)) * WAYS
        assert index.digests.data_ptr() % 64 == 0


@pytest.mark.parametrize("half_life", [0, 1, 100])
def test_the_victim_is_the_least(half_life):
    index = make_index(25)
    insert(index, [*range(25)], 1)
    insert(index, [*range(1, 25)], 2)
    for step in range(3, 9):
        insert(index, [0], step)
    insert(index, [*range(3, 25)], 9)
    insert(index, [*range(3, 25)], 10)  # 0: seven times, last in step 8; 1 and 2: twice, in step 2
    assert insert(index, [77], 11, half_life=half_life).evicted_ids.tolist() == [1]
    insert(index, [77], 12)
    insert(index, [2], 13)
    # Oldest is 0; least often used 77, twice; of 0's seven uses seven halvings leave nothing.
    assert insert(index, [78], 15, half_life=half_life).evicted_ids.tolist() == [77 if half_life == 100 else 0]


@pytest.mark.parametrize("half_life", [0, 100])
def test_a_hot_row_stays_while_the_next_set_has_a_cold_one(half_life):
    index = make_index(100, max_partitions=1)
    sets = [[id_of(4 * row + number) for row in range(25)] for number in range(4)]
    (cold, *_), (_, colder, *_) = sets[1:3]  # of the next set, and of one that is too far
    insert(index, [id for rows in sets for id in rows], 1)
    insert(index, [cold], 2)
    for step in range(3, 9):
        insert(index, [id for rows in sets for id in rows if id not in (cold, colder)], step)
    assert insert(index, [id_of(400)], 20, half_life=half_life).evicted_ids.tolist() == [cold]


@pytest.mark.parametrize(
    "problem",
    [Problem(300, 1, "random", 50, 1, 60, 60, 7), Problem(700, 1, "one set", 0, 1, 40, 100, 7)],
    ids=["lfu", "lru with overflow"],
)
def test_least_rows_of_sets_are_noted_for_many_steps(problem):
    run(problem, "cpu")


def test_a_new_overflow_row_is_evicted_before_rows_that_were_used_more():
    index = make_index(40, max_partitions=1)
    full, (cold, *others) = ([id_of(2 * row + number) for row in range(size)] for number, size in ((0, 32), (1, 8)))
    insert(index, [*full, cold, *others], 1)
    for step in (2, 3):
        insert(index, [*full, *others], step)
    new = id_of(200)
    assert insert(index, [new], 4, half_life=100).evicted_ids.tolist() == [cold]
    assert insert(index, [id_of(202)], 5, half_life=100).evicted_ids.tolist() == [new]


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.more])])
def test_overflow_rows_are_found_behind_holes_of_their_list(request, kernels):
    device = request.getfixturevalue("device") if kernels == "triton" else "cpu"
    ids = torch.tensor(sorted(id_of(bits << 20) for bits in range(90)), device=device)  # of one set, however split
    index = make_index(32 * 9, max_partitions=1)
    rows = insert(index, ids.tolist(), 1).rows.to(device)
    index = DynamicIndex(*(part.to(device) for part in index))
    assert int(index.num_overflow[0]) == 90 - 32
    served(kernels, "dynamic_remove_")(index, ids[40:70])
    assert int(index.num_overflow[0]) == 60 - 32
    assert torch.equal(find(kernels, index, ids[70:]), rows[70:])
    assert torch.equal(find(kernels, index, ids[:40]), rows[:40])


def test_overflow_rows_return_after_a_copy_and_after_changes_by_another_one():
    ids = [id_of(bits << 20) for bits in range(140)]  # of one set, however split
    index = make_index(32 * 9, max_partitions=1)
    copies = [index, DynamicIndex(*index)]  # as in two processes that share the tensors
    insert(index, ids[:80], 1)
    for number, id in enumerate(ids[:60]):
        copy = copies[number % 2] if number % 7 else DynamicIndex(*index)
        served("cpu", "dynamic_remove_")(copy, torch.tensor([id]))
        insert(copy, ids[80 + number : 81 + number], 2)
        known = sorted(ids[number + 1 : 81 + number])
        assert dynamic_rows(index)[0].tolist() == known
        assert (find("cpu", index, torch.tensor(known)) >= 0).all()
        assert int(index.num_overflow[0]) == 80 - WAYS


@pytest.mark.parametrize("num_tables", [1, 3])
@pytest.mark.parametrize("ids", ["random", "clustered", "dense", "extreme", "descending", "equal"])
def test_new_ids_are_sorted_as_by_numpy(ids, num_tables):
    generator = torch.Generator().manual_seed(5)
    for size in (1, 40, 60, 3_000, 20_000):
        values = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
        values = {
            "random": values,
            "clustered": torch.where(values % 100 == 0, values, values >> 40),  # most share their first bits
            "dense": values % 1_000,
            "extreme": torch.tensor(EXTREMES)[values % len(EXTREMES)],
            "descending": torch.arange(size, 0, -1),
            "equal": torch.full_like(values, -3),
        }[ids]
        keys = torch.randint(0, num_tables + 1, (size,), generator=generator).int()
        keys[keys == num_tables] = NO_KEY
        many = torch.randint(1, 2**40, (size,), generator=generator)
        for options in ((False, None), (False, many), (True, None)):
            if options[0]:
                keys = keys.sort().values
            args = [make_index(1)] * num_tables, values, keys, *options
            new, expected = (served(name, "dynamic_begin_insert")(*args) for name in ("cpu", "reference"))
            for name, value in new._asdict().items():
                if name != "order":
                    assert value.dtype == getattr(expected, name).dtype
                    assert torch.equal(value, getattr(expected, name)), name
            assert torch.equal(values[new.order], values[expected.order])
            assert torch.equal(new.order.sort().values, expected.order.sort().values)


@pytest.mark.usefixtures("poisoned")
def test_large_batches_are_inserted_alike_on_any_number_of_threads():
    def results(num_threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(num_threads)
        generator, index, result = torch.Generator().manual_seed(3), make_index(40_000), []
        for step in range(1, 9):
            ids = torch.randint(-(2**63), 2**63 - 1, (9_000,), generator=generator)
            ids = torch.cat([ids, torch.arange(1_000) << 32]).unique()
            result += insert(index, ids.tolist(), step, 2)[:3]
            result.append(find("cpu", index, ids.flip(0)))
        occupied = index.digests != 0
        return [*result, *dynamic_rows(index), index.digests, index.rows[occupied], *index[5:-1]]

    single, combined = results(1), results(2)
    assert all(torch.equal(one, other) for one, other in zip(single, combined, strict=True))
    assert any(part.numel() for part in single[1:32:4])  # rows were evicted


@pytest.mark.slow
def test_a_million_operations():
    met = seed = 0
    while met < 1_000_000:
        rng, seed = random.Random(seed), seed + 1
        num_steps, most_ids = rng.choice(((3_000, 30), (300, 200), (100, 700)))
        options = rng.choice(CAPACITIES), rng.choice((1, 4, 1024)), rng.choice(IDS), rng.choice((0, 1, 50))
        problem = Problem(*options, rng.choice((0, 1, 2, 8)), num_steps, most_ids, seed)
        torch.set_num_threads(rng.choice((1, 2)))
        met += run(problem, "cpu")[1]
