"""What PyTorch's operators serve: float64 tables and vectors, and float8 tables, against plain PyTorch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonemb as te
from tests import plain
from tests.helpers import assert_close, contents, make_collection, random_steps, train
from tests.strategies import TABLE_DTYPES, problems, random_weights, seeds
from tritonemb.kernels import by_torch
from tritonemb.layout import make_layout

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SUMS = {"rtol": 1e-12, "atol": 1e-12}  # float64, of some tens of values


@pytest.mark.parametrize("pooled", [True, False])
@given(data=st.data(), seed=seeds)
@pytest.mark.usefixtures("poisoned")
def test_lookups_of_float64_and_float8_tables(pooled, data, seed):
    configs, batch = data.draw(problems(dtypes=(*TABLE_DTYPES, *FLOAT8_DTYPES), pooled=pooled))
    layout, narrow = make_layout(configs, batch.keys(), pooled), random_weights(configs)
    wide, look_up = [weight.double() for weight in narrow], plain.pooled_lookup if pooled else plain.unpooled_lookup
    expected = look_up(configs, wide, batch, batch.weights_or_none())
    ones = torch.ones(batch.values().numel(), dtype=torch.float64, requires_grad=True)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    look_up(configs, wide, batch, ones).backward(grad)
    for weights, tolerance in ((narrow, {"rtol": 1e-5, "atol": 1e-5}), (wide, SUMS)):
        args = (weights, batch.values(), batch.offsets())
        out = by_torch.embedding_bag(*args, batch.weights_or_none(), layout, True, torch.float64)
        torch.testing.assert_close(out, expected, **tolerance)
        torch.testing.assert_close(by_torch.sample_weight_gradient(*args, grad, layout), ones.grad, **SUMS)


def test_16_bit_tables_are_updated_beside_float64_ones():
    configs = [te.TableConfig("a", 3, 4), te.TableConfig("b", 3, 4, dtype=torch.bfloat16)]
    for rounding in (False, True):
        narrow = make_collection(configs, te.optim.SGD(lr=0.1, stochastic_rounding=rounding))
        mixed = copy.deepcopy(narrow)
        mixed.tables[0].double()
        steps = random_steps(narrow, 3)
        train(narrow, steps)
        train(mixed, steps)
        # Sums in float64 seldom round elsewhere: then by one of bfloat16's units, 2^-7 of a value, in each step.
        assert_close(contents(mixed), contents(narrow), rtol=3 * 2**-7, atol=1e-5)


def test_ids_out_of_range_are_zero_whatever_the_first_row_holds():
    layout = make_layout([te.TableConfig("table", 3, 2)], ["table"], True)
    weights = [torch.tensor([[torch.inf, torch.nan], [1, 2], [3, 4]], dtype=torch.float64)]
    out = by_torch.embedding_bag(weights, torch.tensor([-1, 1, 3]), torch.tensor([0, 2, 3]), None, layout, False)
    assert out.tolist() == [[1, 2], [0, 0]]


def test_mistakes_are_named():
    config = te.TableConfig("table", 3, 2)
    layout, weights = make_layout([config], ["table"], True), [torch.zeros(3, 2, dtype=torch.float64)]
    with pytest.raises(ValueError, match=r"table 'table': id 3 of feature 'table', sample 1 \(position 1 of values\)"):
        by_torch.embedding_bag(weights, torch.tensor([2, 3]), torch.tensor([0, 1, 2]), None, layout)
    for offsets, message in (([1, 2], "must start with 0"), ([0, 3], "end at 3 but"), ([0, 2, 1, 2], "must ascend")):
        with pytest.raises(ValueError, match=f"offsets {message}"):
            by_torch.embedding_bag(weights, torch.tensor([2, 2]), torch.tensor(offsets), None, layout)
