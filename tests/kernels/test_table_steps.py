"""Tables with a step each: an update has the bits of updates of one table each, in every implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tritonemb as te
from tests.formulas import custom
from tests.helpers import fewer
from tests.strategies import random_batch, random_weights
from tritonemb import ops
from tritonemb.kernels.cpu.row_update import row_update_ as cpu_row_update_
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.kernels.row_update import row_update_ as triton_row_update_
from tritonemb.kernels.row_update import row_update_reference_
from tritonemb.layout import BatchGradient, FusedTables, make_layout

STEPS = [7, 0, 3, 123_456_789]  # neighbours differ, and so do their corrections; the last one's are 1
DIMS = [60, 8, 16, 1]
NUM_ROWS = 30


UPDATES = {
    "reference": row_update_reference_,
    "cpu": cpu_row_update_,
    "triton": pytest.param(triton_row_update_, marks=pytest.mark.triton),
}
each_implementation = pytest.mark.parametrize("update", UPDATES.values(), ids=list(UPDATES))
Update = Callable[..., None]


class Tables(NamedTuple):
    """Tables of one dtype with their states, the first of every table before the second."""

    configs: list[te.TableConfig]
    weights: list[Tensor]
    states: list[Tensor]

    def only(self, table: int) -> Tables:
        """A copy of one of them."""
        states = [state.clone() for state in self.states[table :: len(self.weights)]]
        return Tables([self.configs[table]], [self.weights[table].clone()], states)


def make_tables(optimizer: te.optim.Optimizer, dtype: torch.dtype, device: torch.device) -> Tables:
    configs = [te.TableConfig(f"table{i}", NUM_ROWS, dim, dtype=dtype) for i, dim in enumerate(DIMS)]
    weights = [weight.to(device) for weight in random_weights(configs)]
    states = [
        torch.rand(weight.shape if spec.per_element else weight.shape[:1]).to(device)
        for spec in optimizer.states
        for weight in weights
    ]
    return Tables(configs, weights, states)


def apply(update, tables, step, optimizer, batch, grad):
    """One update of `tables` by their part of `batch` and `grad`; what is wrong is raised."""
    device = grad.device
    names = [config.name for config in tables.configs]
    lists = batch.to_lists()
    local = te.KeyedJaggedTensor.from_lists({name: lists[name] for name in names})
    layout = make_layout(tables.configs, names, True)
    groups = tuple(group.to(device) for group in row_groups_reference(local.values(), local.offsets(), layout))
    skipped, rate = torch.zeros(len(names), dtype=torch.int64, device=device), torch.tensor(0.1, device=device)
    layout = make_layout(tables.configs, names, True, device)
    update(
        FusedTables(tables.weights, tables.states, step, skipped, rate, optimizer.name, optimizer.hyperparameters),
        BatchGradient(grad, local.offsets().to(device), None, groups, layout),
    )
    te.check_errors()


def random_update(device: torch.device) -> tuple[te.KeyedJaggedTensor, list[Tensor]]:
    """A batch, and the gradient of each table's columns."""
    names = [f"table{i}" for i in range(len(DIMS))]
    batch = random_batch(dict.fromkeys(names, NUM_ROWS), names, fewer(12, 3), fewer(4, 2))
    return batch, [torch.randn(batch.stride(), dim, device=device) for dim in DIMS]


def device_of(update: Update, device: torch.device) -> torch.device:
    return device if update is triton_row_update_ else torch.device("cpu")


def same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


CASES = {
    "adam": (te.optim.Adam(lr=0.1), torch.float32),
    "partial row-wise LAMB": (te.optim.PartialRowWiseLAMB(lr=0.1, weight_decay=0.1), torch.float32),
    "stochastic rounding": (te.optim.SGD(lr=0.1), torch.bfloat16),
    "both": (te.optim.Adam(lr=0.1), torch.float16),
}


@each_implementation
@pytest.mark.parametrize(("optimizer", "dtype"), CASES.values(), ids=list(CASES))
def test_tables_with_a_step_each_equal_updates_of_one_table_each(optimizer, dtype, update, device):
    device = device_of(update, device)
    tables = make_tables(optimizer, dtype, device)
    single = [tables.only(table) for table in range(len(DIMS))]
    peers = [tables.only(table) for table in range(len(DIMS))]
    batch, grads = random_update(device)
    step = torch.tensor(STEPS, device=device)
    for _ in range(2):
        apply(update, tables, step, optimizer, batch, torch.cat(grads, dim=1))
    assert step.tolist() == [start + 2 for start in STEPS]
    for table, start in enumerate(STEPS):
        local = torch.tensor(start, device=device)
        for _ in range(2):
            apply(update, single[table], local, optimizer, batch, grads[table])
            apply(update, peers[table], torch.tensor(start + 50, device=device), optimizer, batch, grads[table])
        assert int(local) == start + 2
        results = [tables.weights[table], *tables.states[table :: len(DIMS)]]
        assert same_bits(results, [*single[table].weights, *single[table].states]), f"table {table}"
    # Another step would have been noticed, but where corrections are 1 and nothing is rounded.
    notable = [n for n in range(len(DIMS)) if not same_bits(tables.weights[n : n + 1], peers[n].weights)]
    assert notable == [table for table in range(len(DIMS)) if dtype != torch.float32 or STEPS[table] < 1000]


@each_implementation
def test_equal_steps_have_the_bits_of_one_that_is_shared(update, device):
    device = device_of(update, device)
    optimizer = te.optim.Adam(lr=0.1)
    shared = make_tables(optimizer, torch.bfloat16, device)
    local = Tables(shared.configs, [w.clone() for w in shared.weights], [s.clone() for s in shared.states])
    batch, grads = random_update(device)
    grad = torch.cat(grads, dim=1)
    apply(update, shared, torch.tensor(41, device=device), optimizer, batch, grad)
    # Steps need not lie side by side.
    apply(update, local, torch.full((len(DIMS), 2), 41, device=device)[:, 0], optimizer, batch, grad)
    assert same_bits([*local.weights, *local.states], [*shared.weights, *shared.states])


@each_implementation
def test_all_steps_advance_or_none(update, device):
    device = device_of(update, device)
    optimizer = te.optim.Adam(lr=0.1, on_nonfinite="raise")
    tables = make_tables(optimizer, torch.float32, device)
    initial = [tensor.clone() for tensor in (*tables.weights, *tables.states)]
    batch, grads = random_update(device)
    step = torch.tensor(STEPS, device=device)
    grad = torch.cat(grads, dim=1)
    with pytest.raises(ValueError, match="gradient of row"):
        apply(update, tables, step, optimizer, batch, grad * torch.nan)
    assert step.tolist() == STEPS
    assert same_bits([*tables.weights, *tables.states], initial)
    nobody = te.KeyedJaggedTensor.from_lists({config.name: [[]] for config in tables.configs})
    apply(update, tables, step, optimizer, nobody, grad[:1])
    assert step.tolist() == [start + 1 for start in STEPS]
    assert same_bits([*tables.weights, *tables.states], initial)
    apply(update, tables, step, optimizer, batch, grad)
    assert step.tolist() == [start + 2 for start in STEPS]


@pytest.mark.parametrize("optimizer", [te.optim.Adam(lr=0.1), custom("adam", lr=0.1)], ids=["own", "custom"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.filterwarnings("ignore:table 'table2'")
def test_counters_of_each_table_count_its_own_updates_and_skipped_rows(grouped, optimizer, device):
    tables = make_tables(optimizer, torch.bfloat16, device)
    batch, grads = random_update(device)
    grads[2][:] = torch.nan
    lists = batch.to_lists()

    def update(tables: Tables, steps: list[int], grad: Tensor) -> ops.FusedTables:
        names = [config.name for config in tables.configs]
        local = te.KeyedJaggedTensor.from_lists({name: lists[name] for name in names}).to(device)
        counters = [
            [torch.tensor(n, device=device) for n in steps],
            [torch.zeros_like(local.offsets()[:1]) for _ in names],
        ]
        options = torch.tensor(0.1, device=device), optimizer.name, list(optimizer.hyperparameters)
        fused = ops.FusedTables(tables.weights, tables.states, *counters, *options)
        layout = make_layout(tables.configs, names, True, device)
        groups = ops.row_groups(local.values(), local.offsets(), layout) if grouped else local.values()
        for _ in range(2):
            ops.row_update_(fused, BatchGradient(grad, local.offsets(), None, groups, layout))
        return fused

    single = [update(tables.only(table), [step], grads[table]) for table, step in enumerate(STEPS)]
    actual = update(tables, STEPS, torch.cat(grads, dim=1))
    assert [*map(int, actual.steps)] == [step + 2 for step in STEPS]
    assert [*map(int, actual.skipped)] == [0, 0, 2 * len({i for ids in lists["table2"] for i in ids}), 0]
    for name in ("weights", "states", "skipped"):
        expected = zip(*(getattr(of_one, name) for of_one in single), strict=True)
        assert same_bits(getattr(actual, name), [tensor for tensors in expected for tensor in tensors]), name
