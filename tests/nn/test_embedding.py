"""`te.nn.Embedding` beside `torch.nn.Embedding`: whatever PyTorch's documentation says must hold for ours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.nn.twins import IDS, ROW, assert_same_error, compare, few_examples, random_ids, twins

pytestmark = pytest.mark.public
ROWS, DIM = 11, 6


@settings(max_examples=few_examples)
@given(
    rows=st.sampled_from([1, 2, 50]),
    dim=st.sampled_from([1, 3, 16, 67]),
    shape=st.lists(st.sampled_from([0, 1, 2, 5]), max_size=4),
    padding=st.sampled_from([None, 0, -1]),
    sparse=st.booleans(),
    max_norm=st.sampled_from([None, 0.5]),
    norm_type=st.sampled_from([1.0, 2.0, 3.5, float("inf")]),
    by_frequency=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    id_dtype=st.sampled_from(IDS),
    seed=st.integers(0, 1000),
)
def test_any_options(rows, dim, shape, padding, sparse, max_norm, norm_type, by_frequency, dtype, id_dtype, seed):
    sparse = sparse and not (padding is not None and not shape)  # PyTorch's own sparse gradient fails for it
    pair = twins(
        ROW, rows, dim, padding, max_norm, norm_type, by_frequency and not sparse, sparse, dtype=dtype
    )  # fmt: skip
    ids = random_ids(*shape, rows=rows, dtype=id_dtype, seed=seed)
    output = compare(*pair, ids)
    assert output.shape == (*shape, dim)
    assert torch.equal(output, pair[0](ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_are_summed_in_more(dtype):
    """128 gradients of one row: the exact sum, rounded once."""
    module = te.nn.Embedding(3, DIM, dtype=dtype)
    output = module(torch.ones(128, dtype=torch.int32))
    assert torch.equal(output, module.weight[1].expand(128, DIM))
    gradient = torch.randn(128, DIM).to(dtype)
    output.backward(gradient)
    expected = gradient.double().sum(0)
    torch.testing.assert_close(module.weight.grad[1].double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_derivatives_of_any_order(padding_idx):
    module = te.nn.Embedding(5, 3, padding_idx=padding_idx, dtype=torch.float64)
    ids = torch.tensor([[1, 2], [1, 4]])

    def look_up(weight):
        return torch.func.functional_call(module, {"weight": weight}, (ids,))

    if padding_idx is None:  # with padding the gradient is not the function's own
        assert torch.autograd.gradcheck(look_up, module.weight.detach().clone().requires_grad_())
        assert torch.autograd.gradgradcheck(look_up, module.weight.detach().clone().requires_grad_())
    results = []
    for twin in twins(ROW, 5, 3, padding_idx=padding_idx, dtype=torch.float64):
        (gradient,) = torch.autograd.grad(twin(ids).pow(3).sum(), twin.weight, create_graph=True)
        results.append(torch.autograd.grad(gradient.pow(2).sum(), twin.weight)[0])
    torch.testing.assert_close(*results)


def test_padding_is_looked_up_but_not_trained():
    module = te.nn.Embedding(4, 2, padding_idx=-1)
    assert module.padding_idx == 3
    assert torch.equal(module.weight[3], torch.zeros(2))
    with torch.no_grad():
        module.weight[3] = 7.0
    output = module(torch.tensor([3, 1, 3]))
    assert output[0].tolist() == [7.0, 7.0]
    output.sum().backward()
    assert module.weight.grad[:, 0].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("ids", [[11], [-1], [0.5], [True]], ids=["too large", "negative", "floating point", "boolean"])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_bad_calls_raise_what_pytorch_raises(ids, padding_idx):
    pair = twins(ROW, ROWS, DIM, padding_idx=padding_idx)
    for bad in (torch.tensor(ids), ids, torch.tensor([1, 2]).to_sparse()):
        assert_same_error(*(lambda module=module, bad=bad: module(bad) for module in pair))


def test_empty_tables():
    for shape, ids in (((0, 3), torch.zeros(0, dtype=torch.int64)), ((3, 0), torch.tensor([1]))):
        pair = [kind(*shape) for kind in ROW]
        assert pair[0](ids).shape == pair[1](ids).shape


def test_nested_input():
    nested = torch.nested.nested_tensor([torch.tensor([1, 2, 2]), torch.tensor([4])], layout=torch.jagged)
    reference, fused = twins(ROW, ROWS, DIM)
    assert torch.equal(fused(nested).values(), reference(nested).values())
