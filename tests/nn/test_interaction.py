"""DLRM's interaction against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonemb as te

pytestmark = pytest.mark.public


def by_loop(dense: torch.Tensor, sparse: torch.Tensor, num_features: int) -> torch.Tensor:
    rows = []
    for sample in range(dense.shape[0]):
        vectors = [dense[sample], *sparse[sample].reshape(num_features, -1)]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        rows.append(torch.cat([dense[sample], torch.stack(products)]))
    return torch.stack(rows) if rows else torch.empty(0, dense.shape[1] + num_features * (num_features + 1) // 2)


@given(st.integers(1, 9), st.integers(0, 5), st.sampled_from((1, 3, 16)))
def test_products_of_all_pairs(num_features, batch_size, dim):
    interaction = te.nn.DotInteraction(num_features)
    inputs = [
        torch.randn(batch_size, size, dtype=torch.float64, requires_grad=True) for size in (dim, num_features * dim)
    ]
    out, expected = interaction(*inputs), by_loop(*inputs, num_features).double()
    assert out.shape == (batch_size, dim + interaction.num_pairs)
    torch.testing.assert_close(out, expected)  # float64 sums in another order
    as_vectors = inputs[1].reshape(batch_size, num_features, dim)
    assert torch.equal(interaction(inputs[0], as_vectors), out)
    if batch_size:
        grad = torch.randn(out.shape, dtype=torch.float64)
        for actual, reference in zip(
            torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
        ):
            torch.testing.assert_close(actual, reference)


def test_it_has_no_state():
    assert not list(te.nn.DotInteraction(3).buffers())


def test_bad_input():
    with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
        te.nn.DotInteraction(0)
    with pytest.raises(ValueError, match=r"sparse must be \[2, 3 \* 4\]"):
        te.nn.DotInteraction(3)(torch.randn(2, 4), torch.randn(2, 13))
