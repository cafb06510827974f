"""DLRM's interaction: its references against a loop, its kernels against the references in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import tritonemb as te
from tritonemb.kernels import interaction as triton
from tritonemb.kernels.cpu import interaction as cpu
from tritonemb.kernels.interaction import interaction_gradient_reference, interaction_reference

DIMS = (1, 3, 4, 16, 60, 64, 100, 128)
# Half the distance to the next number of a dtype, relative; a rounded result is as near as that.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPES = st.sampled_from(tuple(ROUNDING))


def by_loop(dense: Tensor, sparse: Tensor, num_features: int) -> Tensor:
    rows = []
    for sample in range(dense.shape[0]):
        vectors = [dense[sample], *sparse[sample].reshape(num_features, -1)]
        products = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        rows.append(torch.cat([dense[sample], torch.stack(products)]))
    return torch.stack(rows) if rows else dense.new_empty(0, dense.shape[1] + num_features * (num_features + 1) // 2)


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


@given(st.integers(0, 5), st.integers(1, 9), st.sampled_from((1, 3, 16)))
def test_products_of_all_pairs_in_float64_are_a_loop_and_its_derivative(batch_size, num_features, dim):
    """By the references, and by the module, which leaves float64 to PyTorch."""
    module = te.nn.DotInteraction(num_features)
    assert not list(module.buffers())
    grad, dense, sparse = problem(batch_size, num_features, dim, torch.float64)
    inputs = [dense.requires_grad_(), sparse.requires_grad_()]
    out, expected = module(*inputs), by_loop(*inputs, num_features)
    sums = {"rtol": 1e-12, "atol": 1e-12}  # float64, in another order
    torch.testing.assert_close(out, expected, **sums)
    torch.testing.assert_close(interaction_reference(*inputs), expected, **sums)
    assert torch.equal(module(dense, sparse.reshape(batch_size, num_features, dim)), out)
    if batch_size:
        by_reference, by_module = interaction_gradient_reference(grad, *inputs), torch.autograd.grad(out, inputs, grad)
        exact_grads = torch.autograd.grad(expected, inputs, grad)
        for actual, reference, exact in zip(by_module, by_reference, exact_grads, strict=True):
            torch.testing.assert_close(actual, exact, **sums)
            torch.testing.assert_close(reference, exact, **sums)


def check(kernels, device: torch.device | str, inputs: list[Tensor], slack: int) -> None:
    """The kernels' results are the references', rounded."""
    dtype, dim = inputs[1].dtype, inputs[1].shape[1]
    grad, dense, sparse = (tensor.double() for tensor in inputs)
    on_device = [tensor.to(device) for tensor in inputs]
    out, grads = kernels.interaction(*on_device[1:]), kernels.interaction_gradient(*on_device)
    assert {tensor.dtype for tensor in (out, *grads)} == {dtype}
    assert torch.equal(out[:, :dim].cpu(), inputs[1])
    magnitude = interaction_reference(dense.abs(), sparse.abs())
    assert_rounded_sums(out, interaction_reference(dense, sparse), magnitude, dim)
    magnitudes = interaction_gradient_reference(grad.abs(), dense.abs(), sparse.abs())
    exact = interaction_gradient_reference(grad, dense, sparse)
    for actual, expected, magnitude in zip(grads, exact, magnitudes, strict=True):
        assert_rounded_sums(actual, expected, magnitude, sparse.shape[1] // dim + slack)


@pytest.mark.usefixtures("poisoned")
@given(st.integers(0, 70), st.integers(1, 30), st.sampled_from((*DIMS, 257)), DTYPES)
@example(300, 26, 64, torch.float32)  # enough for several threads
@example(300, 26, 60, torch.bfloat16)
def test_cpu_kernels_are_the_references(batch_size, num_features, dim, dtype):
    check(cpu, "cpu", problem(batch_size, num_features, dim, dtype), 2)


def test_bits_of_cpu_kernels_depend_on_nothing_else_in_the_batch():
    grad, dense, sparse = problem(500, 26, 64, torch.float32)
    few, out, grads = slice(137, 140), cpu.interaction(dense, sparse), cpu.interaction_gradient(grad, dense, sparse)
    torch.set_num_threads(1)
    assert torch.equal(cpu.interaction(dense[few], sparse[few]), out[few])
    for actual, expected in zip(cpu.interaction_gradient(grad[few], dense[few], sparse[few]), grads, strict=True):
        assert torch.equal(actual, expected[few])


def test_cpu_kernels_take_strided_inputs():
    inputs = problem(9, 3, 16, torch.float32)
    turned = [tensor.T.contiguous().T for tensor in inputs]
    assert torch.equal(cpu.interaction(*turned[1:]), cpu.interaction(*inputs[1:]))
    for actual, expected in zip(cpu.interaction_gradient(*turned), cpu.interaction_gradient(*inputs), strict=True):
        assert torch.equal(actual, expected)


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
        check(triton, device, problem(batch_size, num_features, dim, dtype), 1)

    @pytest.mark.parametrize("dtype", ROUNDING)
    def test_a_samples_bits_depend_on_nothing_else(self, device, dtype):
        inputs = [tensor.to(device) for tensor in problem(4, 26, 60, dtype)]

        def results(inputs: list[Tensor]) -> tuple[Tensor, ...]:
            return triton.interaction(*inputs[1:]), *triton.interaction_gradient(*inputs)

        baseline = results([tensor[2:3] for tensor in inputs])
        for first, again, single in zip(results(inputs), results(inputs), baseline, strict=True):
            assert torch.equal(first, again)
            assert torch.equal(first[2:3], single)

    def test_gradients_need_not_be_contiguous(self, device):
        grad, dense, sparse = (tensor.to(device) for tensor in problem(3, 4, 5, torch.float32))
        expanded = grad[:1].expand(3, -1)
        expected = triton.interaction_gradient(expanded.contiguous(), dense, sparse)
        actual = triton.interaction_gradient(expanded, dense.T.contiguous().T, sparse)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))

    def test_not_a_number_stays_in_its_sample(self, device):
        _, dense, sparse = (tensor.to(device) for tensor in problem(3, 4, 5, torch.float32))
        sparse[1, 7] = float("nan")
        out = triton.interaction(dense, sparse)
        assert not out[[0, 2]].isnan().any()
        of_vector_two = {(2, 0), (2, 1), (3, 2), (4, 2)}
        pairs = [(i, j) for i in range(1, 5) for j in range(i)]
        assert out[1, 5:].isnan().tolist() == [pair in of_vector_two for pair in pairs]
