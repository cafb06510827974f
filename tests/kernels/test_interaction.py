"""DLRM's interaction: its references against a loop, its Triton kernels against the references in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.nn.test_interaction import by_loop
from tritonemb.kernels.interaction import (
    interaction,
    interaction_gradient,
    interaction_gradient_reference,
    interaction_reference,
)

DIMS = (1, 3, 4, 16, 60, 64, 100, 128)
# Half the distance to the next number of a dtype, relative; a rounded result is as near as that.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = st.sampled_from(tuple(ROUNDING))


def problem(batch_size: int, num_features: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Gradient, dense vectors and rows."""
    generator = torch.Generator().manual_seed(seed)
    widths = (dim + num_features * (num_features + 1) // 2, dim, num_features * dim)
    return [torch.randn(batch_size, width, generator=generator).to(dtype) for width in widths]


def assert_rounded_sums(actual: Tensor, exact: Tensor, magnitude: Tensor, num_terms: int) -> None:
    """`actual` is the float32 sum of `num_terms` products, in any order, rounded once to its dtype.

    `magnitude` is the sum of the terms' absolute values. Each addition may be off by 2^-23 of what is summed so far:
    tensor cores cut off where others round.
    """
    bound = num_terms * 2.0**-23 * magnitude
    if actual.dtype != torch.float32:
        bound = bound + ROUNDING[actual.dtype] * (exact.abs() + bound) + torch.finfo(actual.dtype).tiny
    error = (actual.cpu().double() - exact).abs()
    assert actual.shape == exact.shape
    assert bool((error <= bound).all()), f"{(error / bound).max()} times the bound"  # NaN fails, too


@given(st.integers(0, 4), st.integers(1, 9), st.sampled_from((1, 3, 16)))
def test_references_are_a_loop_and_its_derivative(batch_size, num_features, dim):
    grad, dense, sparse = problem(batch_size, num_features, dim, torch.float64)
    inputs = [dense.requires_grad_(), sparse.requires_grad_()]
    expected = by_loop(dense, sparse, num_features).double()
    sums = {"rtol": 1e-12, "atol": 1e-12}  # float64, in another order
    torch.testing.assert_close(interaction_reference(dense, sparse), expected, **sums)
    if batch_size:
        expected_grads = torch.autograd.grad(expected, inputs, grad)
        for actual, reference in zip(interaction_gradient_reference(grad, dense, sparse), expected_grads, strict=True):
            torch.testing.assert_close(actual, reference, **sums)


@pytest.mark.triton
class TestTriton:
    @pytest.mark.usefixtures("poisoned")
    @given(st.integers(0, 5), st.integers(1, 40), st.sampled_from(DIMS), DTYPES)
    @example(1, 26, 128, torch.bfloat16)
    @example(2, 15, 4, torch.float32)  # as many vectors as the smallest tile has rows, and one more
    @example(2, 16, 4, torch.float32)
    @example(1, 127, 16, torch.float16)  # several tiles, all full
    @example(1, 128, 3, torch.float32)
    @example(1, 3, 300, torch.bfloat16)  # several blocks of elements
    def test_kernels_are_the_references(self, device, batch_size, num_features, dim, dtype):
        inputs = problem(batch_size, num_features, dim, dtype)
        grad, dense, sparse = (tensor.double() for tensor in inputs)
        on_device = [tensor.to(device) for tensor in inputs]
        out, grads = interaction(*on_device[1:]), interaction_gradient(*on_device)
        assert {tensor.dtype for tensor in (out, *grads)} == {dtype}
        assert torch.equal(out[:, :dim].cpu(), inputs[1])
        magnitude = interaction_reference(dense.abs(), sparse.abs())
        assert_rounded_sums(out, interaction_reference(dense, sparse), magnitude, dim)
        magnitudes = interaction_gradient_reference(grad.abs(), dense.abs(), sparse.abs())
        exact = interaction_gradient_reference(grad, dense, sparse)
        for actual, expected, magnitude in zip(grads, exact, magnitudes, strict=True):
            assert_rounded_sums(actual, expected, magnitude, num_features + 1)

    @pytest.mark.parametrize("dtype", ROUNDING)
    def test_a_samples_bits_depend_on_nothing_else(self, device, dtype):
        inputs = [tensor.to(device) for tensor in problem(4, 26, 60, dtype)]

        def results(inputs: list[Tensor]) -> tuple[Tensor, ...]:
            return interaction(*inputs[1:]), *interaction_gradient(*inputs)

        baseline = results([tensor[2:3] for tensor in inputs])
        for first, again, single in zip(results(inputs), results(inputs), baseline, strict=True):
            assert torch.equal(first, again)
            assert torch.equal(first[2:3], single)

    def test_gradients_need_not_be_contiguous(self, device):
        grad, dense, sparse = (tensor.to(device) for tensor in problem(3, 4, 5, torch.float32))
        expanded = grad[:1].expand(3, -1)
        expected = interaction_gradient(expanded.contiguous(), dense, sparse)
        for actual, reference in zip(
            interaction_gradient(expanded, dense.T.contiguous().T, sparse), expected, strict=True
        ):
            assert torch.equal(actual, reference)

    def test_not_a_number_stays_in_its_sample(self, device):
        _, dense, sparse = (tensor.to(device) for tensor in problem(3, 4, 5, torch.float32))
        sparse[1, 7] = float("nan")
        out = interaction(dense, sparse)
        assert not out[[0, 2]].isnan().any()
        of_vector_two = {(2, 0), (2, 1), (3, 2), (4, 2)}
        pairs = [(i, j) for i in range(1, 5) for j in range(i)]
        assert out[1, 5:].isnan().tolist() == [pair in of_vector_two for pair in pairs]
