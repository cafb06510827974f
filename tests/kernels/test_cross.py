"""The elementwise part of DCNv2's cross layer: formulas, CPU kernels with their bits, and Triton's in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.test_interaction import DTYPES, ROUNDING, assert_rounded_sums
from tritonemb.kernels.cross import cross, cross_gradient, cross_gradient_reference, cross_reference

WIDTHS = (1, 3, 16, 60, 128, 257, 300)


def by_formula(inputs: Tensor, product: Tensor, bias: Tensor, crossed: Tensor) -> Tensor:
    """`cross`; differentiable."""
    return inputs * (product + bias) + crossed


def gradient_by_formula(grad: Tensor, inputs: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`cross_gradient`, formula by formula, each rounded to its input's dtype."""
    by_product = grad * inputs
    return (
        (grad * (product + bias)).to(inputs.dtype), by_product.to(product.dtype), by_product.sum(0).to(bias.dtype),
    )  # fmt: skip


def problem(batch_size: int, width: int, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    """`inputs`, `product`, `crossed`, gradient of these dtypes; `bias` of the last one's."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(batch_size, width, generator=generator).to(dtype) for dtype in dtypes]
    return [*matrices, torch.randn(width, generator=generator).to(dtypes[-1])]


@given(st.integers(1, 5), st.sampled_from(WIDTHS))
def test_gradients_are_the_derivative(batch_size, width):
    inputs, product, crossed, grad, bias = problem(batch_size, width, (torch.float64,) * 4)
    leaves = [tensor.requires_grad_() for tensor in (inputs, product, bias)]
    expected = torch.autograd.grad(by_formula(*leaves, crossed), leaves, grad)
    for actual, reference in zip(gradient_by_formula(grad, *leaves), expected, strict=True):
        torch.testing.assert_close(actual, reference)  # float64 sums in another order


@given(st.integers(0, 70), st.sampled_from(WIDTHS), st.tuples(DTYPES, DTYPES, DTYPES, DTYPES))
def test_cpu_kernels_have_the_formulas_bits(batch_size, width, dtypes):
    inputs, product, crossed, grad, bias = problem(batch_size, width, dtypes)
    out, expected = cross_reference(inputs, product, bias, crossed), by_formula(inputs, product, bias, crossed)
    actual, exact = (kernel(grad, inputs, product, bias) for kernel in (cross_gradient_reference, gradient_by_formula))
    for value, reference in zip((out, *actual), (expected, *exact), strict=True):
        assert value.dtype == reference.dtype
        assert torch.equal(value, reference)


@pytest.mark.triton
class TestTriton:
    @pytest.mark.usefixtures("poisoned")
    @given(st.integers(0, 70), st.sampled_from(WIDTHS), st.tuples(DTYPES, DTYPES, DTYPES, DTYPES))
    @example(1, 1, (torch.float32,) * 4)
    @example(70, 300, (torch.bfloat16,) * 4)
    def test_kernels_follow_the_formulas(self, device, batch_size, width, dtypes):
        tensors = problem(batch_size, width, dtypes)
        inputs, product, crossed, grad, bias = (tensor.double() for tensor in tensors)
        on_device = [tensor.to(device) for tensor in tensors]
        out = cross(on_device[0], on_device[1], on_device[4], on_device[2])
        grads = cross_gradient(on_device[3], on_device[0], on_device[1], on_device[4])
        assert out.dtype == torch.promote_types(torch.promote_types(dtypes[0], dtypes[1]), dtypes[2]) or (
            out.dtype == torch.promote_types(out.dtype, dtypes[3])
        )
        assert [g.dtype for g in grads] == [dtypes[0], dtypes[1], dtypes[3]]
        magnitude = by_formula(inputs.abs(), product.abs(), bias.abs(), crossed.abs())
        assert_rounded_sums(out, by_formula(inputs, product, bias, crossed), magnitude, 3)
        exact = gradient_by_formula(grad, inputs, product, bias)
        magnitudes = gradient_by_formula(grad.abs(), inputs.abs(), product.abs(), bias.abs())
        for actual, expected, magnitude, num_terms in zip(grads, exact, magnitudes, (2, 1, batch_size), strict=True):
            assert_rounded_sums(actual, expected, magnitude, num_terms)

    def test_a_long_batch_is_summed_in_longer_runs(self, device, monkeypatch):
        """Runs of 64 rows, the last one short."""
        monkeypatch.setattr("tritonemb.kernels.cross._MAX_RUNS", 4)
        num_rows = 4 * 32 + 5
        inputs, product, _, grad, bias = (tensor.to(device) for tensor in problem(num_rows, 1, (torch.float32,) * 4))
        result = cross_gradient(grad, inputs, product, bias)
        for local, again in zip(result, cross_gradient(grad, inputs, product, bias), strict=True):
            assert torch.equal(local, again)
        terms = (grad.double() * inputs.double()).cpu()
        # At most 64 / 8 + log2(8) + log2(4) roundings lie between a term and the result.
        assert_rounded_sums(result[2], terms.sum(0), terms.abs().sum(0), 8 + 3 + 2)

    @pytest.mark.parametrize("dtype", ROUNDING)
    def test_float32_results_are_rounded_once(self, device, dtype):
        """Two roundings of 16-bit operands would show: `u + b` is not a 16-bit number here."""
        one = torch.ones(1, 1, dtype=dtype, device=device)
        tiny = torch.full((1,), ROUNDING[torch.float16] / 4, dtype=dtype, device=device)
        out = cross(one, one, tiny, -one)
        assert torch.equal(out, tiny[None])
