"""Lookups: the CPU kernel against the reference, and against `torch.nn.functional.embedding_bag` in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests import plain
from tests.strategies import TABLE_DTYPES, problems, random_batch, random_weights, seeds
from tritonemb.kernels.cpu.embedding_bag import embedding_bag, sample_weight_gradient
from tritonemb.kernels.embedding_bag import embedding_bag_reference, sample_weight_gradient_reference
from tritonemb.kernels.layout import make_layout

# Float32 sums of at most 12 normal values, times normal weights, in another order than float64's.
SUMS = {"rtol": 1e-5, "atol": 1e-5}


def check_forward(configs, batch, pooled=True):
    layout = make_layout(configs, batch.keys(), pooled)
    weights = random_weights(configs)
    args = (weights, batch.values(), batch.offsets(), batch.weights_or_none(), layout)
    out = embedding_bag(*args, True)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, embedding_bag_reference(*args), **SUMS)
    wide = [weight.double() for weight in weights]
    expected = (plain.pooled_lookup if pooled else plain.unpooled_lookup)(configs, wide, batch, batch.weights_or_none())
    torch.testing.assert_close(out.double(), expected, **SUMS)
    torch.testing.assert_close(embedding_bag_reference(wide, *args[1:]), expected, rtol=1e-12, atol=1e-12)


@given(problems(dtypes=TABLE_DTYPES))
@pytest.mark.usefixtures("poisoned")
def test_pooled_lookups(problem):
    check_forward(*problem)


@given(problems(dtypes=TABLE_DTYPES, pooled=False))
@pytest.mark.usefixtures("poisoned")
def test_unpooled_lookups(problem):
    check_forward(*problem, pooled=False)


@pytest.mark.slow
@settings(settings.get_profile("thorough"))
@given(problems(dtypes=TABLE_DTYPES))
@pytest.mark.usefixtures("poisoned")
def test_pooled_lookups_thoroughly(problem):
    check_forward(*problem)


@pytest.mark.parametrize("dtype", TABLE_DTYPES)
def test_single_rows_are_copied_exactly(dtype):
    configs = [te.TableConfig("table", 1000, 257, dtype=dtype)]
    batch = te.KeyedJaggedTensor(["table"], torch.randperm(1000), lengths=torch.ones(1000, dtype=torch.int32))
    weights = random_weights(configs)
    for pooled in (True, False):
        layout = make_layout(configs, ["table"], pooled)
        out = embedding_bag(weights, batch.values(), batch.offsets(), None, layout, True)
        assert torch.equal(out, weights[0].float()[batch.values()])


def check_sample_weight_gradients(configs, batch, seed, pooled):
    layout = make_layout(configs, batch.keys(), pooled)
    weights = random_weights(configs)
    num_rows = batch.stride() if pooled else batch.values().numel()
    grad = torch.randn(num_rows, layout.width, generator=torch.Generator().manual_seed(seed))
    args = (weights, batch.values(), batch.offsets(), grad, layout)
    # Dot products of up to 257 · 3 normal pairs: float32 loses a few units of the last of about 6 bits of growth.
    tolerance = {"rtol": 1e-5, "atol": 1e-4}
    found = sample_weight_gradient(*args)
    torch.testing.assert_close(found, sample_weight_gradient_reference(*args), **tolerance)
    scales = torch.ones(batch.values().numel(), dtype=torch.float64, requires_grad=True)
    look_up = plain.pooled_lookup if pooled else plain.unpooled_lookup
    look_up(configs, [weight.double() for weight in weights], batch, scales).backward(grad.double())
    torch.testing.assert_close(found.double(), scales.grad, **tolerance)


@given(problems(dtypes=TABLE_DTYPES), seeds)
@pytest.mark.usefixtures("poisoned")
def test_gradients_of_per_sample_weights(problem, seed):
    check_sample_weight_gradients(*problem, seed, pooled=True)


@given(problems(dtypes=TABLE_DTYPES, pooled=False), seeds)
@pytest.mark.usefixtures("poisoned")
def test_unpooled_gradients_of_per_sample_weights(problem, seed):
    check_sample_weight_gradients(*problem, seed, pooled=False)


@given(problems(dtypes=TABLE_DTYPES), st.randoms(use_true_random=False))
def test_a_bag_does_not_depend_on_its_batch(problem, random):
    configs, batch = problem
    layout = make_layout(configs, batch.keys(), True)
    weights = random_weights(configs)
    together = embedding_bag(weights, batch.values(), batch.offsets(), batch.weights_or_none(), layout, True)
    for sample in random.sample(range(batch.stride()), min(3, batch.stride())):
        bags = [key * batch.stride() + sample for key in range(len(batch.keys()))]
        positions = torch.cat([torch.arange(batch.offsets()[bag], batch.offsets()[bag + 1]) for bag in bags])
        alone = te.KeyedJaggedTensor(
            batch.keys(),
            batch.values()[positions],
            None if batch.weights_or_none() is None else batch.weights()[positions],
            lengths=batch.lengths()[bags],
        )
        found = embedding_bag(weights, alone.values(), alone.offsets(), alone.weights_or_none(), layout, True)
        assert torch.equal(found[0], together[sample])


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.usefixtures("poisoned")
def test_any_number_of_threads_gives_the_same_bits(pooled):
    configs = [te.TableConfig(f"table{i}", 500, 60, dtype=dtype) for i, dtype in enumerate(TABLE_DTYPES)]
    rows = {config.name: config.num_embeddings for config in configs}
    batch = random_batch(rows, list(rows), 1001, 9, weighted=True)
    layout = make_layout(configs, batch.keys(), pooled)
    results = []
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        args = (random_weights(configs), batch.values(), batch.offsets())
        out = embedding_bag(*args, batch.weights(), layout, True)
        results.append(
            (out, sample_weight_gradient(*args, torch.randn(out.shape, generator=torch.Generator()), layout))
        )
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        assert not result[1].isnan().any()


def test_ids_out_of_range_read_as_zero_if_not_checked():
    config = te.TableConfig("table", 3, 2, pooling="mean")
    batch = te.KeyedJaggedTensor.from_lists({"table": [[0, 3], [-1], [2, 2**40]]})
    weights = random_weights([config])
    zero = torch.zeros(2)
    pooled = embedding_bag(
        weights, batch.values(), batch.offsets(), None, make_layout([config], ["table"], True), False
    )
    assert torch.equal(pooled, torch.stack([weights[0][0] / 2, zero, weights[0][2] / 2]))
    single = embedding_bag(
        weights, batch.values(), batch.offsets(), None, make_layout([config], ["table"], False), False
    )
    assert torch.equal(single, torch.stack([weights[0][0], zero, zero, weights[0][2], zero]))
