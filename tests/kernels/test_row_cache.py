"""Row caches against lists of ways, and moved rows against copies one by one: CPU kernels, references and Triton's."""

from __future__ import annotations

import importlib
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tritonemb as te
from tests.helpers import fewer
from tests.strategies import seeds
from tritonemb.kernels.cpu import row_cache as cpu
from tritonemb.kernels.row_cache import set_of
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.layout import POLICIES, DirectoryTensors, make_layout

WAYS = 32
MASK64 = 2**64 - 1
POISON = 2**62 + 3
OVERFLOW = 4  # elements behind the sets, which are somebody else's
MODULES = {"cpu": "tritonemb.kernels.cpu.{}", "reference": "tritonemb.kernels.{}", "triton": "tritonemb.kernels.{}"}


def served(kernels: str, module: str, function: str) -> Any:
    """A function of the CPU's, Triton's or the reference's kernels."""
    if kernels == "reference":
        function = f"{function.removesuffix('_')}_reference{'_' * function.endswith('_')}"
    return getattr(importlib.import_module(MODULES[kernels].format(module)), function)


def mixed(row: int) -> int:
    """SplitMix64's finaliser, on Python's integers."""
    row = ((row ^ (row >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    row = ((row ^ (row >> 27)) * 0x94D049BB133111EB) & MASK64
    return row ^ (row >> 31)


class Model:
    """Each way of each set of each table is None or a list of row, use and pins."""

    def __init__(self, first_rows: list[int], num_sets: list[int], policy: str) -> None:
        self.first_rows, self.policy = first_rows, policy
        self.tables: list[list[list[list[int] | None]]] = [[[None] * WAYS for _ in range(n)] for n in num_sets]

    def place(self, linear: int) -> tuple[int, int, int]:
        """Table, row and set; set -1 where there is no cache."""
        table = max(t for t, first in enumerate(self.first_rows) if first <= linear)
        row = linear - self.first_rows[table]
        return table, row, mixed(row) % len(self.tables[table]) if self.tables[table] else -1

    def look_up(self, rows: list[int], now: int) -> list[int]:
        slots = []
        for linear in rows:
            table, row, number = self.place(linear)
            slots.append(row if number < 0 else -1)
            for way, entry in enumerate(self.tables[table][number] if number >= 0 else []):
                if entry is not None and entry[0] == row:
                    entry[1] = now if self.policy == "lru" else entry[1] + 1
                    entry[2] += 1
                    slots[-1] = number * WAYS + way
        return slots

    def allocate(self, rows: list[int], slots: list[int], now: int) -> tuple[list[int], list[int]]:
        slots, evicted = list(slots), [-1] * len(rows)
        for index, linear in enumerate(rows):
            table, row, number = self.place(linear)
            if slots[index] != -1 or number < 0:
                continue
            ways = self.tables[table][number]
            free = [way for way in range(WAYS) if ways[way] is None]
            old = sorted((entry[1], way) for way, entry in enumerate(ways) if entry is not None and entry[2] == 0)
            if not free and not old:
                continue
            way = free[0] if free else old[0][1]
            evicted[index] = -1 if ways[way] is None else ways[way][0]
            ways[way] = [row, now if self.policy == "lru" else 1, 1]
            slots[index] = number * WAYS + way
        return slots, evicted

    def release(self, linear: int, slot: int) -> tuple[int, int]:
        """Take one pin off; the table and slot."""
        table = self.place(linear)[0]
        self.tables[table][slot // WAYS][slot % WAYS][2] -= 1
        return table, slot

    def parts(self, table: int) -> tuple[list[int], list[int]]:
        """Tags and pins."""
        ways = [entry or [-1, 0, 0] for ways in self.tables[table] for entry in ways]
        return [entry[0] for entry in ways], [entry[2] for entry in ways]

    def uses(self, table: int) -> dict[int, int]:
        """The use of every slot that holds a row."""
        ways = [entry for ways in self.tables[table] for entry in ways]
        return {slot: entry[1] for slot, entry in enumerate(ways) if entry is not None}


class Problem(NamedTuple):
    """Tables, and for each step the linear rows of its batch."""

    num_rows: list[int]
    num_sets: list[int]
    policy: str
    steps: list[list[int]]
    kept: float  # share of the pins that outlive their batch
    seed: int

    @property
    def first_rows(self) -> list[int]:
        return [sum(self.num_rows[:table]) for table in range(len(self.num_rows))]


@st.composite
def problems(draw: st.DrawFn, max_steps: int = 6) -> Problem:
    """Some tables without a cache; more rows than ways; pins for ever, for a while, or for one batch."""
    num_tables = draw(st.integers(1, 4))
    num_sets = [draw(st.sampled_from((0, 1, 1, 2, 3))) for _ in range(num_tables)]
    num_rows = [draw(st.sampled_from((0, 1, 40, 200, 2**33 + 7))) for _ in range(num_tables)]
    generator = torch.Generator().manual_seed(draw(seeds))
    known: list[int] = []
    for table, rows in enumerate(num_rows):
        first = sum(num_rows[:table])
        drawn = torch.randint(0, max(1, rows), (min(rows, 80),), generator=generator)
        known += [first + row for row in set(drawn.tolist())]
    steps = []
    for _ in range(draw(st.integers(1, max_steps))):
        share = draw(st.sampled_from((0.0, 0.1, 0.4, 1.0)))
        chosen = (torch.rand(len(known), generator=generator) < share).tolist()
        steps.append(sorted(row for row, selection in zip(known, chosen, strict=True) if selection))
    retained, policy = draw(st.sampled_from((0.0, 0.3, 1.0))), draw(st.sampled_from(POLICIES))
    return Problem(num_rows, num_sets, policy, steps, retained, draw(seeds))


def run(problem: Problem, kernels: str, device: torch.device | str = "cpu") -> Model:
    """Every step by these kernels and by lists: the same slots, evictions and tensors, overflow included."""
    look_up = served(kernels, "row_cache", "row_cache_look_up_")
    allocate = served(kernels, "row_cache", "row_cache_allocate_")
    configs = [te.TableConfig(f"t{t}", max(1, rows), 4) for t, rows in enumerate(problem.num_rows)]
    tables = make_layout(configs, [config.name for config in configs], True).tables
    tables[:, :2] = torch.tensor([problem.first_rows, problem.num_rows]).T
    sizes = [sets * WAYS + OVERFLOW if sets else 0 for sets in problem.num_sets]
    tags, used = [torch.full((n,), -1) for n in sizes], [torch.zeros(n, dtype=torch.int64) for n in sizes]
    pins = [torch.zeros(n, dtype=torch.int32) for n in sizes]
    for part, behind in ((tags, 0), (used, -7), (pins, -9)):  # a tag that would be found, a use and a pin for eviction
        for tensor in part:
            tensor[-OVERFLOW:] = behind
    whole, first_slots = [torch.cat(part).to(device) for part in (tags, used, pins)], [0, *accumulate(sizes[:-1])]
    numbers = (torch.tensor(values, device=device) for values in (first_slots, problem.num_sets))
    directory = DirectoryTensors(*whole, next(numbers), tables.to(device), next(numbers))
    parts = [part.split(sizes) for part in whole]
    model = Model(problem.first_rows, problem.num_sets, problem.policy)
    generator, pinned = torch.Generator().manual_seed(problem.seed), []
    for step, batch in enumerate(problem.steps):
        now = 100 + step // 2  # so that uses are often equal
        rows, clock = torch.tensor(batch, dtype=torch.int64, device=device), torch.tensor(now, device=device)
        slots = look_up(directory, rows, clock, problem.policy)
        expected = model.look_up(batch, now)
        assert slots.dtype == torch.int64
        assert slots.tolist() == expected
        evicted = allocate(directory, rows, slots, clock, problem.policy)
        expected, gone = model.allocate(batch, expected, now)
        assert evicted.dtype == torch.int64
        assert slots.tolist() == expected
        assert evicted.tolist() == gone
        for table in range(len(sizes)):
            got_tags, got_used, got_pins = (part[table].tolist() for part in parts)
            end, (want_tags, want_pins) = max(0, sizes[table] - OVERFLOW), model.parts(table)
            assert (got_tags[:end], got_pins[:end]) == (want_tags, want_pins)
            assert {slot: use for slot, use in enumerate(got_used[:end]) if got_tags[slot] >= 0} == model.uses(table)
            if sizes[table]:
                behind_sets = [part[end:] for part in (got_tags, got_used, got_pins)]
                assert behind_sets == [[0] * OVERFLOW, [-7] * OVERFLOW, [-9] * OVERFLOW]
        pinned += [(row, s) for row, s in zip(batch, expected, strict=True) if s >= 0 and model.place(row)[2] >= 0]
        stays = (torch.rand(len(pinned), generator=generator) < problem.kept).tolist()
        for (row, slot), stay in zip(pinned, stays, strict=True):
            if not stay:
                table, slot = model.release(row, slot)
                parts[2][table][slot] -= 1
        pinned = [pin for pin, stay in zip(pinned, stays, strict=True) if stay]
    return model


@given(problems())
@pytest.mark.usefixtures("poisoned")
def test_the_reference_is_a_cache_of_lists(problem):
    run(problem, "reference")


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@settings(max_examples=fewer(25, 5))
@given(problems())
@pytest.mark.usefixtures("poisoned")
def test_the_cpu_kernels_are_a_cache_of_lists_on_any_number_of_threads(monkeypatch, num_threads, problem):
    monkeypatch.setattr(cpu, "FEW_ROWS", 0)
    torch.set_num_threads(num_threads)
    run(problem, "cpu")


@pytest.mark.triton
@settings(max_examples=8)
@given(problems(max_steps=4))
@pytest.mark.usefixtures("poisoned")
def test_triton_is_a_cache_of_lists(device, problem):
    run(problem, "triton", device)


def hard_problem(name: str, policy: str) -> Problem:
    """One set for all rows; or every row pinned for good, and more misses than ways; or nothing at all."""
    if name == "one set":  # of each table; the second's rows begin with 100
        batches = [range(step * 20, step * 20 + 32) for step in range(4)]
        steps = [[*rows, *[100 + 2**31 + row for row in rows]] for rows in batches]
        return Problem([100, 2**40], [1, 1], policy, steps, 0.0, 0)
    if name == "all pinned":
        return Problem([3, 500], [0, 2], policy, [[*range(90)], [*range(60, 203)]], 1.0, 0)
    return Problem([0, 10], [1, 0], policy, [[], [4, 9]], 0.0, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["one set", "all pinned", "nothing"])
@pytest.mark.parametrize("kernels", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.usefixtures("poisoned")
def test_hard_problems(request, kernels, name, policy):
    device = request.getfixturevalue("device") if kernels == "triton" else "cpu"
    model = run(hard_problem(name, policy), kernels, device)
    tags, pins = model.parts(1)
    if name == "all pinned":  # 64 slots, 200 rows: the first to come stay
        assert min(pins) > 0
        assert max(pins) > 1
        assert -1 not in tags
    if name == "one set":
        assert sum(tag >= 2**31 for tag in tags) == WAYS


def test_a_set_gets_its_share_of_rows():
    """Multiples of a power of two, of which a poor hash would leave most sets empty."""
    num_sets = 1_000
    sets = set_of(torch.arange(64 * num_sets) << 20, num_sets)
    counts = torch.bincount(sets, minlength=num_sets)
    assert counts.numel() == num_sets
    assert (counts.min() > 25, counts.max() < 110) == (True, True)  # 64 ± 5 standard deviations of 8
    for row in (0, 1, 2**31 + 5, 2**62, 2**63 - 1):
        for sets in (1, 3, 2**40 + 1):
            assert int(set_of(torch.tensor([row]), sets)) == mixed(row) % sets


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.usefixtures("poisoned")
def test_large_batches_are_cached_alike_on_any_number_of_threads(num_threads):
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(5)
    num_rows, num_sets = [30_000, 2**34, 50], [100, 90, 0]
    steps = []
    for _ in range(2):
        ids = torch.cat([torch.randint(0, 30_000, (4_000,), generator=generator),
                         torch.randint(30_000, 2**34, (3_000,), generator=generator)])  # fmt: skip
        steps.append(sorted(set(ids.tolist())))
    run(Problem(num_rows, num_sets, "lru", steps, 0.5, 0), "cpu")


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kernels", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
@settings(max_examples=10)
@given(st.integers(0, 60), st.integers(1, 12), seeds)
@pytest.mark.usefixtures("poisoned")
def test_every_position_gets_the_slot_of_its_row(monkeypatch, request, kernels, num_threads, num_values, num_ids, seed):
    """Ids out of range too; slots behind the groups are poison."""
    monkeypatch.setattr(cpu, "FEW_ROWS", 0)
    torch.set_num_threads(num_threads)
    device = request.getfixturevalue("device") if kernels == "triton" else "cpu"
    layout = make_layout([te.TableConfig("t", num_ids, 4)], ["t"], True)
    values = torch.randint(-2, num_ids + 3, (num_values,), generator=torch.Generator().manual_seed(seed))
    groups = row_groups_reference(values, torch.tensor([0, num_values]), layout)
    slots = torch.full((num_values,), POISON)
    slot_of = {row: 1000 + index * 7 for index, row in enumerate(groups[0][: int(groups[3])].tolist())}
    slots[: len(slot_of)] = torch.tensor(list(slot_of.values()), dtype=torch.int64)
    translate = served(kernels, "row_cache", "row_cache_translate")
    result = translate(*(tensor.to(device) for tensor in (slots, *groups[1:])))
    assert result.dtype == torch.int64
    assert result.tolist() == [slot_of.get(id, -1) for id in values.tolist()]


class Pair(NamedTuple):
    """A matrix of bytes and the view of it that rows are moved to or from, twice."""

    to_memory: Tensor
    to: Tensor
    source_memory: Tensor
    source: Tensor

    def on(self, device: torch.device | str) -> Pair:
        memories = [memory.to(device, copy=True) for memory in (self.to_memory, self.source_memory)]
        views = [
            memory.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
            for memory, view in zip(memories, (self.to, self.source), strict=True)
        ]
        return Pair(memories[0], views[0], memories[1], views[1])


DTYPES = (
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.int64,
    torch.complex64,
)  # fmt: skip


@st.composite
def pairs_of(draw: st.DrawFn) -> Pair:
    """Rows of one element, aligned ones and others, with gaps between them or none."""
    dtype, width = draw(st.sampled_from(DTYPES)), draw(st.sampled_from((None, 1, 3, 16, 64, 300)))
    generator = torch.Generator().manual_seed(draw(seeds))
    parts = []
    for rows in (20, 30):
        begin, gap = draw(st.sampled_from((0, 0, 1, 16))), draw(st.sampled_from((0, 0, 1, 16)))
        pitch = begin + (width or 1) + gap
        memory = torch.randint(0, 2, (rows, pitch * dtype.itemsize), dtype=torch.uint8, generator=generator)
        if dtype != torch.bool:
            memory *= torch.randint(1, 256, memory.shape, dtype=torch.uint8, generator=generator)
        view = memory.view(dtype)[:, begin : begin + (width or 1)]
        parts += [memory, view if width else view[:, 0]]
    return Pair(*parts)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Distinct rows of 20 from any of 30; some are skipped."""
    generator = torch.Generator().manual_seed(draw(seeds))
    count = draw(st.integers(0, 20))
    to, source = torch.randperm(20, generator=generator)[:count], torch.randint(0, 30, (count,), generator=generator)
    to[::5], source[1::4] = -1, -1
    return to, source


class TableMoves(NamedTuple):
    """Moves of several tables, and pairs with the table of each."""

    moves: list[tuple[Tensor, Tensor]]
    pairs: list[Pair]
    tables: list[int]


@st.composite
def table_moves(draw: st.DrawFn) -> TableMoves:
    by_table, pairs = draw(st.lists(moves(), min_size=1, max_size=5)), draw(st.lists(pairs_of(), max_size=6))
    return TableMoves(by_table, pairs, [draw(st.integers(0, len(by_table) - 1)) for _ in pairs])


def check_moves(kernels: str, problem: TableMoves, device: torch.device | str = "cpu") -> None:
    expected = [pair.on("cpu") for pair in problem.pairs]
    for pair, table in zip(expected, problem.tables, strict=True):
        for to_row, from_row in zip(*(rows.tolist() for rows in problem.moves[table]), strict=True):
            if to_row >= 0 and from_row >= 0:
                pair.to[to_row] = pair.source[from_row]
    actual = [pair.on(device) for pair in problem.pairs]
    to, source = (torch.cat(rows).to(device) for rows in zip(*problem.moves, strict=True))
    starts = torch.tensor([0, *accumulate(len(rows) for rows, _ in problem.moves)], device=device)
    of_table = (starts, problem.tables) if len(problem.moves) > 1 else ()
    move = served(kernels, "row_cache", "move_rows_")
    move([pair.to for pair in actual], [pair.source for pair in actual], to, source, *of_table)
    for value, reference in zip(actual, expected, strict=True):
        assert torch.equal(value.to_memory.cpu(), reference.to_memory)  # what lies between rows too


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@given(table_moves())
def test_rows_move_bit_for_bit(kernels, problem):
    check_moves(kernels, problem)


@pytest.mark.triton
@settings(max_examples=20)
@given(table_moves())
def test_triton_moves_rows_bit_for_bit(device, problem):
    check_moves("triton", problem, device)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_many_rows_move_on_any_number_of_threads(num_threads):
    torch.set_num_threads(num_threads)
    source, to, state = torch.randn(9_000, 24), torch.zeros(5_000, 24), torch.zeros(5_000)
    to_rows, from_rows = torch.randperm(5_000), torch.randint(-1, 9_000, (5_000,))
    served("cpu", "row_cache", "move_rows_")([to, state], [source, source[:, 3]], to_rows, from_rows)
    moved = from_rows >= 0
    expected = torch.zeros(5_000, 24)
    expected[to_rows[moved]] = source[from_rows[moved]]
    assert torch.equal(to, expected)
    assert torch.equal(state, expected[:, 3])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_moves_of_unequal_tables_are_all_done(num_threads):
    """By whichever thread, however many bytes a table has of all."""
    torch.set_num_threads(num_threads)
    sizes, widths = [0, 1, 3_000, 0, 1, 700, 1], [8, 300, 5, 16, 1, 64, 3]
    rows = [torch.randperm(size) for size in sizes]
    sources = [torch.randn(size + 2, width) for size, width in zip(sizes, widths, strict=True)]
    targets = [torch.zeros_like(source) for source in sources for _ in range(2)]
    starts, tables = torch.tensor([0, *accumulate(sizes)]), [table for table in range(len(sizes)) for _ in range(2)]
    move = served("cpu", "row_cache", "move_rows_")
    move(targets, [sources[table] for table in tables], torch.cat(rows), torch.cat(rows), starts, tables)
    for target, table in zip(targets, tables, strict=True):
        assert torch.equal(target[: sizes[table]], sources[table][: sizes[table]])
        assert not target[sizes[table] :].any()


@pytest.mark.triton
def test_triton_leaves_out_rows_that_there_are_not(device):
    to, source = torch.zeros(4, 8, device=device), torch.ones(3, 8, device=device)
    to_rows, from_rows = torch.tensor([0, 1, 4, 2], device=device), torch.tensor([2, 3, 0, 2**40], device=device)
    served("triton", "row_cache", "move_rows_")([to], [source], to_rows, from_rows)
    assert to.sum(1).tolist() == [8, 0, 0, 0]


@pytest.mark.gpu
def test_rows_move_to_and_from_pinned_memory():
    source, to = torch.randn(50, 33).pin_memory(), torch.zeros(40, 33).pin_memory()
    on_gpu = torch.zeros(40, 33, device="cuda")
    rows = torch.arange(40, device="cuda")
    move = served("triton", "row_cache", "move_rows_")
    move([on_gpu], [source], rows, rows + 10)
    move([to], [on_gpu], rows, rows)
    torch.cuda.synchronize()
    assert torch.equal(on_gpu.cpu(), source[10:])
    assert torch.equal(to, source[10:])
