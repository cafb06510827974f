"""`EmbeddingCollection`: a row for each id."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import tritonemb as te
from tests import plain
from tests.helpers import assert_same_bits, contents, fewer, make_collection, train
from tests.strategies import DIMS, TABLE_DTYPES, problems

pytestmark = pytest.mark.public


@given(problems(dtypes=TABLE_DTYPES, dims=fewer(DIMS, (1, 7, 60)), max_tables=fewer(6, 3), pooled=False))
@pytest.mark.usefixtures("poisoned")
def test_rows_under_the_batchs_keys_and_offsets(problem):
    configs, batch = problem
    collection = make_collection(configs, None, pooled=False)
    result = collection(batch)
    assert isinstance(result, te.KeyedJaggedTensor)
    assert result.keys() == batch.keys()
    assert torch.equal(result.offsets(), batch.offsets())
    dtypes = {config.dtype for config in configs}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    weights = [table.weight.detach().float() for table in collection.tables]
    # One product of float32 numbers: exact in float64, rounded once to float32, then to the tables' dtype.
    expected = plain.unpooled_lookup(configs, weights, batch, batch.weights_or_none())
    assert torch.equal(result.values(), expected.to(dtype))


def test_a_fused_step_is_that_of_bags_of_one():
    names = ("a", "b")
    unpooled = make_collection([te.TableConfig(n, 9, 5, pooling="none") for n in names], te.optim.Adam(lr=0.1), False)
    pooled = make_collection([te.TableConfig(n, 9, 5) for n in names], te.optim.Adam(lr=0.1))
    for seed in range(5):
        values = torch.randint(0, 9, (24,), generator=torch.Generator().manual_seed(seed))
        batch = te.KeyedJaggedTensor(list(names), values, lengths=torch.ones(24, dtype=torch.int64))
        grad = torch.randn(12, 10)
        train(pooled, [(batch, grad)])
        train(unpooled, [(batch, torch.cat([grad[:, :5], grad[:, 5:]]))])
    assert_same_bits(contents(unpooled), contents(pooled))
