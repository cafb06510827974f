"""Updates: the CPU kernel against the reference, and against the formulas in float64."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests import formulas
from tests.helpers import assert_close, assert_same_bits, configurations, contents, make_collection, random_steps, train
from tests.strategies import TABLE_DTYPES, optimizers, seeds, tables
from tritonemb.kernels import row_update as triton
from tritonemb.kernels.row_groups import row_groups
from tritonemb.kernels.triton_utils import TablesOfDtype
from tritonemb.layout import BatchGradient, FusedTables, make_layout
from tritonemb.ops import row_update as row_update_op
from tritonemb.ops.registry import use_kernels
from tritonemb.optim import OPTIMIZERS

NUM_STEPS = 20


def check_against_reference(collection, steps):
    twin = copy.deepcopy(collection)
    train(collection, steps)
    with use_kernels("reference"):
        train(twin, steps)
    assert int(collection.step) == len(steps)
    assert_same_bits(contents(collection), contents(twin), title=repr(collection.optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=20)
@given(data=st.data(), pooled=st.booleans(), weighted=st.booleans(), seed=seeds)
@pytest.mark.usefixtures("poisoned")
def test_a_few_steps_equal_the_references(name, data, pooled, weighted, seed):
    configs = data.draw(tables(max_tables=3, pooled=pooled))
    collection = make_collection(configs, data.draw(optimizers(name)), pooled)
    check_against_reference(collection, random_steps(collection, 4, batch_size=7, weighted=weighted, seed=seed))


def check_custom(configs, name, options, weighted, seed, pooled=True):
    """Against the built-in one. What has one arithmetic has its bits; means of a row and powers may be a unit off."""
    custom, built_in = formulas.custom(name, lr=0.1, **options), OPTIMIZERS[name](lr=0.1, **options)
    local, twin = make_collection(configs, custom, pooled), make_collection(configs, built_in, pooled)
    steps = random_steps(local, 4, batch_size=7, weighted=weighted, seed=seed)
    train(local, steps)
    train(twin, steps)
    if name in ("sgd", "adagrad") and "max_norm" not in options:
        assert_same_bits(contents(local), contents(twin), title=repr(custom))
    else:
        gap = 0.0 if all(table.dtype == torch.float32 for table in configs) else 0.02  # a 16-bit unit, a few times
        assert_close(contents(local), contents(twin), rtol=1e-6 + gap, atol=1e-6 + gap, title=repr(custom))


@pytest.mark.parametrize("elements", [1, 50, 1 << 18])
@pytest.mark.parametrize("name", formulas.CUSTOM)
@settings(max_examples=8)
@given(data=st.data(), weighted=st.booleans(), pooled=st.booleans(), seed=seeds)
@pytest.mark.few(2)
def test_a_custom_optimizer_is_the_built_in_one(name, elements, data, weighted, pooled, seed):
    """However many elements its function is given at once."""
    configs = data.draw(tables(pooled=pooled, dtypes=TABLE_DTYPES))
    options = data.draw(st.sampled_from([{}, {"max_gradient": 0.3}, {"max_norm": 0.7}, {"weight_decay": 0.1}]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_update_op, "ELEMENTS_AT_ONCE", elements)
        check_custom(configs, name, options, weighted, seed, pooled)


def grow(rows, states, g, lr, t):
    """Three states, of which one counts; changes what it is given, which it may."""
    states["count"] += 1
    rows -= lr * g / states["count"].unsqueeze(1)
    return rows, {"last": g, "count": states["count"], "sum": states["sum"] + g}


@pytest.mark.parametrize("implementation", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_a_learning_rate_rows_are_scaled_back_to_their_largest_norm(implementation, name):
    table = te.TableConfig("table", 3, 4, init=torch.nn.init.ones_)
    collection = te.nn.EmbeddingBagCollection([table], OPTIMIZERS[name](lr=0.0, max_norm=1.0))
    with use_kernels(implementation):
        train(collection, [(te.KeyedJaggedTensor.from_lists({"table": [[1]]}), torch.randn(1, 4))])
    assert contents(collection)["table.weight"].tolist() == [[1.0] * 4, [0.5] * 4, [1.0] * 4]


MISTAKES = {
    "raises": (lambda rows, states, new: rows.nope, RuntimeError, "raised AttributeError: .*nope"),
    "rows": (lambda rows, states, new: (rows[:, :1], new), ValueError, "must return rows and states .*, got"),
    "dtype": (lambda rows, states, new: (rows.double(), new), ValueError, "float64"),
    "state's shape": (lambda rows, states, new: (rows, {**new, "sum": new["sum"][:, 0]}), ValueError, "got"),
    "missing": (lambda rows, states, new: (rows, {"sum": new["sum"]}), ValueError, "got .*'sum'"),
    "extra": (lambda rows, states, new: (rows, {**new, "more": rows}), ValueError, "got .*'more'"),
    "no tuple": (lambda rows, states, new: rows, ValueError, "got"),
    "number": (lambda rows, states, new: (rows, {**new, "count": 3}), ValueError, "got .*int"),
}


@pytest.mark.parametrize("implementation", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_custom_step_names_the_table_and_changes_nothing(implementation, name, monkeypatch):
    """Also if the calls before have been right."""
    wrong, kind, message = MISTAKES[name]
    calls = []

    def step(rows, states, g, lr, t):
        calls.append(rows.shape[1])
        new = {"sum": states["sum"] + g, "count": states["count"] + 1}
        return wrong(rows, states, new) if rows.shape[1] == 3 else (rows - lr * g, new)

    monkeypatch.setattr(row_update_op, "ELEMENTS_AT_ONCE", 16)
    spec = te.optim.Custom(step=step, states={"sum": "element", "count": "row"})
    collection = make_collection([te.TableConfig("first", 9, 8), te.TableConfig("second", 9, 3)], spec)
    initial = contents(collection)
    with (
        use_kernels(implementation),
        pytest.raises(kind, match=f"^table 'second', all tables are unchanged: .*{message}"),
    ):
        train(collection, random_steps(collection, 1))
    assert 8 in calls
    assert_same_bits(contents(collection), initial)


def test_a_custom_optimizer_may_have_three_states_and_change_what_it_is_given():
    spec = te.optim.Custom(lr=0.5, step=grow, states={"count": "row", "last": "element", "sum": "element"})
    table = te.TableConfig("table", 6, 3, init=torch.nn.init.zeros_)
    collection = te.nn.EmbeddingBagCollection([table], optimizer=spec)
    batch = te.KeyedJaggedTensor.from_lists({"table": [[1], [4, 1]]})
    for _ in range(2):
        train(collection, [(batch, torch.tensor([[1.0, 2.0, 3.0], [0.0, 2.0, 0.0]]))])
    result = contents(collection)
    assert result["table.count"].tolist() == [0, 2, 0, 0, 2, 0]
    assert result["table.last"][[1, 4]].tolist() == [[1, 4, 3], [0, 2, 0]]
    assert result["table.sum"][[1, 4]].tolist() == [[2, 8, 6], [0, 4, 0]]
    assert result["table.weight"][[1, 4]].tolist() == [[-0.75, -3, -2.25], [0, -1.5, 0]]
    assert not result["table.weight"][[0, 2, 3, 5]].any()


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise", "ignore"])
def test_a_custom_optimizer_meets_gradients_that_are_not_finite_as_others_do(on_nonfinite):
    configs = [te.TableConfig("a", 9, 4), te.TableConfig("b", 9, 5, dtype=torch.bfloat16)]
    results = []
    for spec in (formulas.custom("adagrad", on_nonfinite=on_nonfinite), te.optim.Adagrad(on_nonfinite=on_nonfinite)):
        collection = make_collection(configs, spec)
        steps = random_steps(collection, 3)
        steps[1][1][1, 2], steps[1][1][4, 6] = torch.nan, torch.inf
        for number, step in enumerate(steps):
            if on_nonfinite == "raise" and number == 1:
                with pytest.raises(ValueError, match="table 'a': the gradient of row"):
                    train(collection, [step])
            else:
                train(collection, [step])
        results.append((contents(collection), collection.skipped_rows()))
    assert_same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert any(results[0][1].values()) == (on_nonfinite == "skip")


@pytest.mark.parametrize("implementation", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize("pooled", [True, False])
def test_gradients_of_each_lookup_are_those_of_the_output(pooled, implementation, request):
    """Also of one that has no ids; tables have other dims, so that only a gradient as a whole has columns to spare."""
    device = request.getfixturevalue("device") if implementation == "triton" else torch.device("cpu")
    configs = [te.TableConfig(f"t{dim}", 9, dim) for dim in (3, 8, 5, 1)]
    layout = make_layout(configs, [config.name for config in configs], pooled, device)
    sizes = [2, 0, 7, 3]
    generator = torch.Generator().manual_seed(5)
    values = torch.randint(9, (sum(sizes),), generator=generator).to(device)
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(device)
    rows = [1] * 4 if pooled else sizes
    parts = [torch.randn(n, config.embedding_dim, generator=generator) for n, config in zip(rows, configs, strict=True)]
    weights = [torch.randn(9, config.embedding_dim, generator=generator) for config in configs]
    if pooled:
        whole = torch.cat(parts, 1)
    else:  # what is beside a gradient belongs to no column
        whole = torch.cat([torch.nn.functional.pad(part, (0, 8 - part.shape[1]), value=torch.nan) for part in parts])
    updated, summed = [], []
    for grad in (whole.to(device), [part.to(device) for part in parts]):
        local = [weight.clone().to(device) for weight in weights]
        step, skipped = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((), 4))
        rate, options = torch.tensor(0.5, device=device), list(te.optim.SGD().hyperparameters)
        fused = FusedTables(local, [], [step], [skipped], rate, "sgd", options)
        sums = [torch.zeros_like(weight) for weight in local]
        with use_kernels(implementation):
            row_update_op.row_update_(fused, BatchGradient(grad, offsets, None, values, layout))
            groups = row_update_op.row_groups(values, offsets, layout)
            row_update_op.row_gradients_(sums, BatchGradient(grad, offsets, None, groups, layout))
        updated.append([weight.cpu() for weight in local])
        summed.append([sum.cpu() for sum in sums])
    for n, weight in enumerate(weights):
        assert torch.equal(updated[0][n], updated[1][n])
        assert torch.equal(summed[0][n], summed[1][n])
        torch.testing.assert_close(updated[1][n], weight - 0.5 * summed[1][n])
    assert sum(bool(item.any()) for item in summed[1]) == 3


@pytest.mark.parametrize("bag_size", [1, 3])
def test_pairs_of_32_and_33_bits_have_the_references_bits(bag_size):
    """12 bits of a position (bags of one id) or of a bag, 20 and 21 of an id."""
    num_bags, num_rows = 1 << 12, {"a": 1 << 20, "b": (1 << 20) + 1}
    configs = [te.TableConfig(name, rows, 1) for name, rows in num_rows.items()]
    ids = torch.cat([torch.randint(rows - 200, rows, (num_bags * bag_size,)) for rows in num_rows.values()])
    batch = te.KeyedJaggedTensor.from_lengths(["a", "b"], ids, torch.full((2 * num_bags,), bag_size))
    collection = make_collection(configs, te.optim.RowWiseAdagrad(lr=0.1))
    check_against_reference(collection, [(batch, torch.randn(num_bags, 2))])


DECAYS = {"none": 0.0, "l2": 0.1, "decoupled": 0.1}


@pytest.mark.parametrize("max_norm", [None, 0.7])
@pytest.mark.parametrize("max_gradient", [None, 0.3])
@pytest.mark.parametrize("mode", DECAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_decay_clipping_and_limit(name, mode, max_gradient, max_norm):
    limits = {"max_gradient": max_gradient, "max_norm": max_norm}
    optimizer = OPTIMIZERS[name](lr=0.1, weight_decay=DECAYS[mode], weight_decay_mode=mode, **limits)
    configs = [te.TableConfig("a", 9, 7), te.TableConfig("b", 5, 16, features=["a", "b"], pooling="mean")]
    changed, plain = make_collection(configs, optimizer), make_collection(configs, OPTIMIZERS[name](lr=0.1))
    steps = random_steps(changed, 4, batch_size=7, weighted=True, seed=3)
    check_against_reference(changed, steps)
    train(plain, steps)
    differs = not torch.equal(contents(changed)["a.weight"], contents(plain)["a.weight"])
    has_effect = bool(DECAYS[mode]) or max_norm is not None or max_gradient is not None
    assert differs == has_effect


@pytest.mark.parametrize("dtype", TABLE_DTYPES)
@pytest.mark.parametrize("implementation", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
def test_cow_clip_bounds_a_gradient_by_the_rows_norm_and_occurrences(implementation, dtype):
    """Rows of norms 5, 5 and 0 that occur 1, 2 and 3 times, with zeros among the weights of bags."""
    table = te.TableConfig("t", 4, 2, dtype=dtype)
    optimizer = te.optim.SGD(lr=1.0, cow_clip=1.0, cow_clip_floor=0.5, stochastic_rounding=False)
    collection = make_collection([table], optimizer)
    collection.load_state_dict({"t.weight": torch.tensor([[3, 4], [3, 4], [0, 0], [3, 4]]).to(dtype)}, strict=False)
    ids, weights = torch.tensor([0, 1, 1, 2, 2, 2]), torch.tensor([1.0, 1.0, 1.0, 2.0, 0.0, 0.0])
    batch = te.KeyedJaggedTensor.from_lengths(["t"], ids, torch.tensor([2, 4]), weights)
    with use_kernels(implementation):
        train(collection, [(batch, torch.tensor([[0.0, 40.0], [80.0, 0.0]]))])
    # Sums [0, 40], [80, 40] and [160, 0]; bounds 5, 10 and 1.5.
    scale = 10 / np.hypot(80, 40)
    expected = torch.tensor([[3, -1], [3 - 80 * scale, 4 - 40 * scale], [-1.5, 0], [3, 4]]).to(dtype)
    # The result is rounded to the table's dtype.
    torch.testing.assert_close(contents(collection)["t.weight"], expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("optimizer", [te.optim.Adam, te.optim.LAMB])
def test_cow_clip_counts_occurrences_in_all_accumulated_batches(optimizer):
    collection, twin = (make_collection([te.TableConfig("t", 5, 8)], optimizer(lr=0.1, cow_clip=0.1)) for _ in range(2))
    grad, lists = torch.randn(4, 8), [[0, 1], [1], [1, 2], [0, 1, 4]]
    train(twin, [(te.KeyedJaggedTensor.from_lists({"t": lists}), grad)])
    with collection.accumulate():
        for half in (slice(2), slice(2, 4)):
            train(collection, [(te.KeyedJaggedTensor.from_lists({"t": lists[half]}), grad[half])])
    assert_same_bits(contents(collection), contents(twin))


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", TABLE_DTYPES[1:])
@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
def test_a_16_bit_step_has_the_references_bits(optimizer, dtype, stochastic):
    optimizer = replace(optimizer, stochastic_rounding=stochastic)
    configs = [te.TableConfig("a", 300, 60, dtype=dtype), te.TableConfig("b", 40, 7, dtype=dtype)]
    collection = make_collection(configs, optimizer)
    check_against_reference(collection, random_steps(collection, 1, batch_size=100))


@pytest.mark.parametrize("dtype", TABLE_DTYPES[:2])
def test_a_kernels_own_memory_lives_as_long_as_the_kernel(dtype):
    """A row so long that whatever is allocated for it is unmapped when it is freed: nobody else has it by then."""
    dim = 9_000_000
    weight = torch.zeros(1, dim, dtype=dtype)
    collection = te.nn.EmbeddingBagCollection([te.TableConfig("t", 1, dim, dtype=dtype)], te.optim.SGD(lr=1.0))
    collection.load_state_dict({"t.weight": weight}, strict=False)
    batch = te.KeyedJaggedTensor.from_lengths(["t"], torch.zeros(2, dtype=torch.int64), torch.tensor([2]))
    collection(batch).sum().backward()
    assert (contents(collection)["t.weight"] == -2).all()


class ByHand:
    """One table trained row by row with the formulas in float64."""

    def __init__(self, spec: Any, weight: torch.Tensor) -> None:
        self.spec, self.weight, self.t, self.num_clipped = spec, weight.double().numpy().copy(), 0, 0
        size = weight.shape[1]
        self.states = [{s.name: np.zeros(size if s.per_element else 1) for s in spec.states} for _ in weight]

    def step(self, batch: te.KeyedJaggedTensor, grad: torch.Tensor, mean: bool, lr: float) -> None:
        self.t += 1
        grads = grad.double().numpy()
        bound = np.inf if self.spec.max_gradient is None else self.spec.max_gradient
        sums: defaultdict[int, Any] = defaultdict(lambda: 0.0)
        counts: defaultdict[int, int] = defaultdict(int)
        scales = iter(batch.weights().tolist())
        for sample, ids in enumerate(batch.to_lists()["table"]):
            for row in ids:
                scale = next(scales) / (len(ids) if mean else 1)
                sums[row] = sums[row] + np.clip(grads[sample], -bound, bound) * scale
                counts[row] += 1
        for row, g in sums.items():
            if self.spec.cow_clip is not None:
                norms = np.linalg.norm(self.weight[row]), np.linalg.norm(g)
                limit = counts[row] * max(self.spec.cow_clip * norms[0], self.spec.cow_clip_floor)
                g = g * min(1.0, limit / norms[1]) if norms[1] else g
                self.num_clipped += norms[1] > limit
            self.weight[row] = formulas.step(self.spec, self.weight[row], self.states[row], g, lr, self.t)


DECAYING = {"weight_decay": 0.1}
FORMULAS = [
    *configurations(),
    te.optim.FTRL(lr=0.3, beta=0.5, l1=0.3, l2=0.2, weight_decay=0.02),
    te.optim.SGD(lr=0.1, max_gradient=0.2, max_norm=0.9, **DECAYING),
    te.optim.LARSSGD(lr=1.0, eta=0.1, momentum=0.5, **DECAYING),
    te.optim.LARSSGD(lr=1.0, eta=0.1, weight_decay_mode="decoupled", **DECAYING),
    te.optim.LAMB(lr=0.1, beta1=0.5, beta2=0.7, eps=1e-3, **DECAYING),
    te.optim.PartialRowWiseLAMB(lr=0.1, weight_decay_mode="l2", **DECAYING),
    te.optim.Adam(lr=0.1, beta1=0.5, beta2=0.7, eps=1e-3, **DECAYING),
    te.optim.Adam(lr=0.1, beta1=0.0, beta2=0.0, eps=0.1),
    te.optim.PartialRowWiseAdam(lr=0.1, weight_decay_mode="l2", **DECAYING),
    te.optim.RowWiseAdagrad(lr=0.1, eps=0.01, weight_decay_mode="decoupled", **DECAYING),
    te.optim.Adagrad(lr=0.1, eps=0.01, **DECAYING),
    te.optim.SGD(lr=0.1, cow_clip=0.1, cow_clip_floor=0.2, weight_decay=0.02),
    te.optim.Adam(lr=0.1, eps=0.1, cow_clip=0.1, max_gradient=2.0, **DECAYING),
    te.optim.RowWiseAdagrad(lr=0.1, eps=0.01, cow_clip=0.2, cow_clip_floor=0.1, max_norm=2.0),
    formulas.custom("adagrad", lr=0.1, cow_clip=0.1, cow_clip_floor=0.1, **DECAYING),
]


@pytest.mark.parametrize("implementation", ["cpu", "reference", "torch"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("spec", FORMULAS, ids=lambda spec: re.sub(r" at \w+", "", repr(spec)))
def test_twenty_steps_follow_the_formula(spec, pooling, implementation):
    config = te.TableConfig("table", 11, 5, pooling=pooling)
    collection = make_collection([config], spec)
    if implementation == "torch":
        collection.double()
    by_hand = ByHand(spec, collection.tables[0].weight.detach())
    with use_kernels(implementation):
        for index, (batch, grad) in enumerate(random_steps(collection, NUM_STEPS, weighted=True)):
            lr = spec.lr / (1 + index % 3)
            collection.set_learning_rate(lr)
            train(collection, [(batch, grad)])
            by_hand.step(batch, grad, pooling == "mean", float(np.float32(lr)))
    assert by_hand.num_clipped > NUM_STEPS or spec.cow_clip is None
    actual = contents(collection)
    expected = {"step": torch.tensor(NUM_STEPS), "table.weight": torch.from_numpy(by_hand.weight)}
    for state in spec.states:
        stacked = torch.from_numpy(np.stack([row[state.name] for row in by_hand.states]))
        expected[f"table.{state.name}"] = stacked if state.per_element else stacked[:, 0]
    # Twenty float32 steps with a unit of 6e-8 each, in values and states up to about 50.
    assert_close(actual, expected, rtol=2e-5, atol=2e-5, title=repr(spec))


@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
def test_rows_outside_the_batch_do_not_change(optimizer):
    collection = make_collection([te.TableConfig("table", 50, 16)], optimizer)
    initial = contents(collection)
    batch = te.KeyedJaggedTensor.from_lists({"table": [[3, 7], [], [3, 49]]})
    train(collection, [(batch, torch.randn(3, 16))])
    final = contents(collection)
    peers = torch.tensor([row for row in range(50) if row not in (3, 7, 49)])
    for name in initial.keys() - {"step"}:
        assert torch.equal(final[name][peers], initial[name][peers])
    assert not torch.equal(final["table.weight"][[3, 7, 49]], initial["table.weight"][[3, 7, 49]])


ZERO_AND_NOT = torch.tensor([[0.0, 0.0, 0.0], [0.5, -1.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, -0.5]])


@pytest.mark.public
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_and_gradients_of_zeros_take_the_formulas_step(name, decay):
    """A trust ratio of nothing is 1, so a row of zeros is trained; one of LARS is 0, so it is not."""
    spec = OPTIMIZERS[name](lr=0.1, weight_decay=decay)
    collection = make_collection([te.TableConfig("table", 4, 3)], spec)
    with torch.no_grad():
        collection.tables[0].weight.copy_(ZERO_AND_NOT)
    rows = ZERO_AND_NOT.double().numpy().copy()
    states = [{s.name: np.zeros(3 if s.per_element else 1) for s in spec.states} for _ in rows]
    batch = te.KeyedJaggedTensor.from_lists({"table": [[0], [1], [2], [3]]})
    grads = torch.tensor([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, -1.0]])
    for step in (1, 2):
        train(collection, [(batch, grads)])
        for row, (state, grad) in enumerate(zip(states, grads.double().numpy(), strict=True)):
            rows[row] = formulas.step(spec, rows[row], state, grad, 0.1, step)
        # Two steps in float32 of numbers about 1.
        np.testing.assert_allclose(collection.tables[0].weight.detach().numpy(), rows, rtol=2e-6, atol=2e-6)
    assert (collection.tables[0].weight[0] != 0).any() == (name != "lars_sgd")
    assert not collection.tables[0].weight[2].any()


def test_squares_of_rows_of_any_width_are_added_in_one_order():
    """That of the reference and the Triton kernels."""
    dims = [*range(1, 66), 96, 127, 128, 129, 200, 255, 256, 257, 511, 513, 768, 1000, 1024, 2100]
    configs = [te.TableConfig(f"d{dim}", 5, dim) for dim in dims]
    collection = make_collection(configs, te.optim.RowWiseAdagrad(lr=0.1))
    check_against_reference(collection, random_steps(collection, 2, batch_size=7))


@pytest.mark.parametrize("batch", [{"table": []}, {"table": [[], []]}], ids=["no samples", "no ids"])
@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
def test_a_batch_without_ids_changes_nothing_but_the_step(optimizer, batch):
    collection = make_collection([te.TableConfig("table", 5, 16)], optimizer)
    initial = contents(collection)
    train(collection, [(te.KeyedJaggedTensor.from_lists(batch), torch.ones(len(batch["table"]), 16))])
    assert_same_bits(contents(collection), initial | {"step": torch.tensor(1)})


def check_triton_has_the_references_bits(device, configs, optimizer, steps, pooled=True, **options):
    """Sums over positions and over a row have one order, divisions and roots are IEEE's: bits, not tolerances.

    Training goes on from states of an earlier step, so that one step shows what becomes of them.
    """
    with use_kernels("reference"):
        zeros = [replace(config, init=torch.nn.init.zeros_) for config in configs]
        reference = make_collection(zeros, optimizer, pooled, **options)
    for name, tensor in reference.state_dict().items():
        if name == "step":
            tensor.fill_(3)
        elif not name.endswith(".weight"):
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(7)))
    collection = copy.deepcopy(reference).to(device)
    with use_kernels("triton"):
        train(collection, [(batch.to(device), grad.to(device)) for batch, grad in steps])
    with use_kernels("reference"):
        train(reference, steps)
    result = {name: tensor.cpu() for name, tensor in contents(collection).items()}
    assert_same_bits(result, contents(reference), title=repr(optimizer))
    assert torch.equal(collection.skipped.cpu(), reference.skipped)


@pytest.mark.triton
@pytest.mark.parametrize("name", OPTIMIZERS)
@settings(max_examples=2)  # a few seconds each where they are interpreted
@given(data=st.data(), weighted=st.booleans(), stochastic=st.booleans(), pooled=st.booleans(), seed=seeds)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.more
def test_triton_updates_have_the_references_bits(device, name, data, weighted, stochastic, pooled, seed):
    configs = data.draw(tables(max_tables=3, dtypes=TABLE_DTYPES, pooled=pooled))
    optimizer = data.draw(optimizers(name, stochastic_rounding=stochastic))
    collection = make_collection(configs, optimizer, pooled)
    steps = random_steps(collection, 2, batch_size=5, max_length=4, weighted=weighted, seed=seed)
    check_triton_has_the_references_bits(device, configs, optimizer, steps, pooled)


@pytest.mark.triton
@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=list(OPTIMIZERS))
@pytest.mark.usefixtures("poisoned")
def test_triton_updates_small_tables_with_the_references_bits(device, index):
    """Of every optimizer one problem, in which repeated ids, a mean, weights and 16-bit rows come together."""
    decay = ("none", "l2", "decoupled")[index % 3]
    optimizer = list(OPTIMIZERS.values())[index](
        lr=0.05, weight_decay_mode=decay, weight_decay=0.0 if decay == "none" else 0.1,
        max_gradient=(None, 0.5)[index % 2], max_norm=(None, 1.5)[index // 2 % 2], stochastic_rounding=index % 2 == 0,
        cow_clip=(0.2, None, 0.3)[index % 3], cow_clip_floor=0.1,
    )  # fmt: skip
    configs = [
        te.TableConfig("a", 9, 20, features=["x", "y"], pooling="mean"),
        te.TableConfig("b", 5, 3, features=["y"], dtype=torch.bfloat16),
    ]
    steps = random_steps(make_collection(configs, optimizer), 1, batch_size=4, max_length=3, weighted=True, seed=index)
    check_triton_has_the_references_bits(device, configs, optimizer, steps)


@pytest.mark.triton
@pytest.mark.parametrize("name", formulas.CUSTOM)
@pytest.mark.usefixtures("poisoned")
def test_triton_updates_by_a_custom_step_with_the_references_bits(device, name):
    """Several dims and dtypes, a feature of two tables, rows that are skipped."""
    limits = {"max_gradient": 0.5, "max_norm": 1.5, "cow_clip": 0.2}
    optimizer = formulas.custom(name, weight_decay=0.1, on_nonfinite="skip", **limits)
    configs = [
        te.TableConfig("a", 9, 20, features=["x", "y"], pooling="mean"),
        te.TableConfig("b", 5, 3, features=["y"], dtype=torch.bfloat16),
        te.TableConfig("c", 7, 20, features=["z"]),
    ]
    steps = random_steps(make_collection(configs, optimizer), 1, batch_size=4, max_length=3, weighted=True)
    steps[0][1][1, 2], steps[0][1][2, 41] = torch.nan, torch.inf
    check_triton_has_the_references_bits(device, configs, optimizer, steps)


@pytest.mark.triton
@pytest.mark.parametrize("runs", [[1, 255, 257], [3, 256, 257, 1, 700, 4], [513], [200, 256, 300]], ids=str)
@pytest.mark.usefixtures("poisoned")
@pytest.mark.few(1)
def test_triton_sums_hot_rows_in_pieces(device, runs):
    """Runs across every boundary of a piece, and of the windows that pieces are found in."""
    ids = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs))
    ids = ids[torch.randperm(ids.numel())]
    size = ids.numel()
    configs = [
        te.TableConfig("a", 20, 4, features=["x", "y"], pooling="mean"),
        te.TableConfig("b", 20, 3, features=["x"], dtype=torch.float16),
    ]
    offsets = torch.tensor([0, size // 3, size, size + 4, size + 10])
    batch = te.KeyedJaggedTensor(["x", "y"], torch.cat([ids, ids[:10]]), torch.randn(size + 10), offsets=offsets)
    steps = [(batch, torch.randn(2, 11))]
    check_triton_has_the_references_bits(device, configs, te.optim.RowWiseAdagrad(lr=0.1), steps)


@pytest.mark.triton
@pytest.mark.parametrize("dim", [512, 1024])
@pytest.mark.few(1)
def test_triton_updates_wide_rows(device, dim):
    configs = [te.TableConfig("wide", 5, dim), te.TableConfig("narrow", 5, 3, dtype=torch.bfloat16)]
    optimizer = te.optim.PartialRowWiseLAMB(lr=0.1, weight_decay=0.1, max_norm=3.0)
    steps = random_steps(make_collection(configs, optimizer), 1, batch_size=3)
    check_triton_has_the_references_bits(device, configs, optimizer, steps)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triton_takes_16_bit_gradients(device, dtype):
    configs, optimizer = [te.TableConfig("table", 9, 60)], te.optim.Adagrad(lr=0.1)
    steps = random_steps(make_collection(configs, optimizer), 1)
    steps = [(batch, grad.to(dtype)) for batch, grad in steps]
    check_triton_has_the_references_bits(device, configs, optimizer, steps, output_dtype=dtype)


@pytest.mark.triton
def test_triton_skips_gradients_that_are_not_finite(device):
    configs = [te.TableConfig("a", 9, 4), te.TableConfig("b", 9, 60, dtype=torch.float16)]
    optimizer = te.optim.Adam(lr=0.1, on_nonfinite="skip")
    ((batch, grad),) = random_steps(make_collection(configs, optimizer), 1)
    grad[1, 2], grad[5, 20], grad[9, 3], grad[11, 63] = torch.nan, torch.nan, torch.inf, -torch.inf
    steps = [(batch, grad)]
    check_triton_has_the_references_bits(device, configs, optimizer, steps)


def train_and_wait(collection, steps):
    """On a GPU what is wrong is raised later than on the CPU: here, at the latest."""
    train(collection, steps)
    te.check_errors()


@pytest.mark.triton
def test_triton_raises_gradients_that_are_not_finite_and_changes_nothing(device):
    configs = [te.TableConfig("a", 9, 4), te.TableConfig("b", 9, 60)]
    collection = make_collection(configs, te.optim.Adam(lr=0.1, on_nonfinite="raise"), device=device)
    initial = contents(collection)
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1], [2]], "b": [[8], [4, 7]]}).to(device)
    grad = torch.ones(2, 64, device=device)
    grad[1, 30] = torch.nan
    with use_kernels("triton"):
        with pytest.raises(ValueError, match="table 'b': the gradient of row 4 is NaN"):
            train_and_wait(collection, [(batch, grad)])
        assert_same_bits(contents(collection), initial)
        train_and_wait(collection, [(batch, torch.ones_like(grad))])
    assert int(collection.step) == 1


@pytest.mark.triton
def test_triton_updates_rows_beyond_two_to_the_31_elements(device, monkeypatch):
    """A table whose only real rows lie far behind its address: products of rows and dims must be 64 bits wide."""
    first_row, dim = 2**31 // 64 + 5, 64
    config = te.TableConfig("table", first_row + 10, dim)
    real = torch.randn(10, dim, device=device)
    initial = real.clone()
    far = TablesOfDtype(torch.float32, (real.data_ptr() - 4 * dim * first_row,), 16, 16, dim)
    monkeypatch.setattr(triton, "by_dtype", lambda weights: [far])
    values = torch.tensor([first_row, first_row + 9, first_row], device=device)
    offsets = torch.tensor([0, 2, 3], device=device)
    layout = make_layout([config], ["table"], True, device)
    counters = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((), (1,))]
    grad = torch.randn(2, dim, device=device)
    spec = te.optim.SGD(lr=1.0)
    groups = row_groups(values, offsets, layout)
    rate = torch.tensor(1.0, device=device)
    triton.row_update_(
        FusedTables([real], [], *counters, rate, spec.name, spec.hyperparameters),
        BatchGradient(grad, offsets, None, groups, layout),
    )
    expected = initial.clone()
    expected[0] -= grad[0] + grad[1]
    expected[9] -= grad[0]
    assert torch.equal(real, expected)
