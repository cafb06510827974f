"""The CPU kernels of DLRM's interaction against its references in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels.test_interaction import DIMS, DTYPES, assert_rounded_sums, problem
from tritonemb.kernels.cpu.interaction import interaction, interaction_gradient
from tritonemb.kernels.interaction import interaction_gradient_reference, interaction_reference


@pytest.mark.usefixtures("poisoned")
@given(st.integers(0, 70), st.integers(1, 30), st.sampled_from((*DIMS, 257)), DTYPES)
@example(300, 26, 64, torch.float32)  # enough for several threads
@example(300, 26, 60, torch.bfloat16)
def test_kernels_are_the_references(batch_size, num_features, dim, dtype):
    inputs = problem(batch_size, num_features, dim, dtype)
    grad, dense, sparse = [tensor.double() for tensor in inputs]
    out = interaction(*inputs[1:])
    exact = interaction_reference(dense, sparse)
    assert out.dtype == dtype
    assert_rounded_sums(out, exact, interaction_reference(dense.abs(), sparse.abs()), dim)
    result = interaction_gradient(*inputs)
    exact_grads = interaction_gradient_reference(grad, dense, sparse)
    magnitudes = interaction_gradient_reference(grad.abs(), dense.abs(), sparse.abs())
    for actual, expected, magnitude in zip(result, exact_grads, magnitudes, strict=True):
        assert actual.dtype == dtype
        assert_rounded_sums(actual, expected, magnitude, num_features + 2)


def test_bits_depend_on_nothing_else_in_the_batch():
    grad, dense, sparse = problem(500, 26, 64, torch.float32)
    out, grads = interaction(dense, sparse), interaction_gradient(grad, dense, sparse)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few = slice(137, 140)
        assert torch.equal(interaction(dense[few], sparse[few]), out[few])
        for actual, expected in zip(interaction_gradient(grad[few], dense[few], sparse[few]), grads, strict=True):
            assert torch.equal(actual, expected[few])
    finally:
        torch.set_num_threads(threads)


def test_strided_inputs():
    grad, dense, sparse = problem(9, 3, 16, torch.float32)
    turned = [tensor.T.contiguous().T for tensor in (grad, dense, sparse)]
    assert torch.equal(interaction(*turned[1:]), interaction(dense, sparse))
    for actual, expected in zip(interaction_gradient(*turned), interaction_gradient(grad, dense, sparse), strict=True):
        assert torch.equal(actual, expected)
