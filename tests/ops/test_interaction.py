"""`interaction` and `cross` as ops: derivatives, errors, compilation, and the modules that use them."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tritonemb as te
from tests.kernels.test_interaction import ROUNDING
from tritonemb.ops import cross, interaction
from tritonemb.ops.interaction import is_cross_fused, is_fused
from tritonemb.ops.registry import use_kernels

pytestmark = pytest.mark.public


def operands(kind: str, batch_size: int, **options) -> list[torch.Tensor]:
    """Arguments of the op: 3 vectors of 5, or 5 columns."""
    shapes = {
        "interaction": [(batch_size, 5), (batch_size, 15)],
        "cross": [(batch_size, 5), (batch_size, 5), (5,), (batch_size, 5)],
    }
    return [torch.randn(shape, **options) for shape in shapes[kind]]


OPS = {"interaction": interaction, "cross": cross}


@pytest.fixture(params=OPS)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("batch_size", [0, 1, 4])
def test_gradcheck(kind, batch_size):
    """In float64, which PyTorch's operators serve."""
    inputs = operands(kind, batch_size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(OPS[kind], inputs)


def test_the_same_with_and_without_gradients(kind, device):
    inputs = operands(kind, 3, device=device)
    with torch.no_grad():
        expected = OPS[kind](*inputs)
    out = OPS[kind](*(tensor.requires_grad_() for tensor in inputs))
    assert torch.equal(out, expected)
    assert out.requires_grad


def test_shapes_on_the_meta_device(kind):
    with torch.no_grad():
        out = OPS[kind](*operands(kind, 3, device="meta"))
    assert out.is_meta
    assert out.shape == (3, 11 if kind == "interaction" else 5)


def test_second_derivatives_are_refused(kind, device):
    inputs = operands(kind, 3, device=device, requires_grad=True)
    grads = torch.autograd.grad(OPS[kind](*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match=f"tritonemb.{kind}_gradient.* no autograd formula"):
        sum(grad.sum() for grad in grads).backward()


@pytest.mark.usefixtures("dynamo")
def test_one_graph_for_every_batch_size(kind, device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(OPS[kind], fullgraph=True, dynamic=True, backend=counter)
    for batch_size in (4, 7, 3):
        inputs = operands(kind, batch_size, device=device, requires_grad=True)
        out, expected = compiled(*inputs), OPS[kind](*inputs)
        assert torch.equal(out, expected)
        gradients = [torch.autograd.grad(result.sum(), inputs) for result in (out, expected)]
        for compiled_gradient, gradient in zip(*gradients, strict=True):
            assert torch.equal(compiled_gradient, gradient)
    assert counter.frame_count == 1


def test_cross_takes_the_dtypes_of_autocast(device):
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
    inputs = [x.to(device, dtype).requires_grad_() for x, dtype in zip(operands("cross", 3), dtypes, strict=True)]
    out = cross(*inputs)
    assert out.dtype == torch.float32
    out.sum().backward()
    assert [x.grad.dtype for x in inputs] == list(dtypes)


def test_bad_vectors():
    dense = torch.randn(2, 4)
    for sparse, error, message in (
        (torch.randn(2, 8).half(), TypeError, r"one dtype among .*, got torch.float32 and torch.float16; convert"),
        (torch.randn(2, 9), ValueError, r"sparse must be \[B, F \* D\] .* dense \(2, 4\), got \(2, 9\)"),
        (torch.randn(3, 8), ValueError, r"got \(3, 8\)"),
        (torch.randn(2, 0), ValueError, r"F of at least 1"),
        (torch.randn(2, 2, 4), ValueError, r"got \(2, 2, 4\)"),
        (torch.empty(2, 8, device="meta"), ValueError, "on one device, got cpu and meta"),
    ):
        with pytest.raises(error, match=message):
            interaction(dense, sparse)
    with pytest.raises(TypeError, match=r"got torch.int64 and torch.int64"):
        interaction(torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"dense must be \[B, D\] with D of at least 1, got \(2, 0\)"):
        interaction(torch.empty(2, 0), torch.empty(2, 0))
    with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
        te.nn.DotInteraction(0)
    with pytest.raises(ValueError, match=r"sparse must be \[2, 3 \* 4\]"):
        te.nn.DotInteraction(3)(dense, torch.randn(2, 13))


def test_bad_layers():
    good = operands("cross", 3)
    for index, tensor, error, message in (
        (0, torch.randn(3), ValueError, r"inputs must be \[B, W\] with W of at least 1, got \[3\]"),
        (1, torch.randn(3, 4), ValueError, r"product must have shape \(3, 5\), got \(3, 4\)"),
        (2, torch.randn(1, 5), ValueError, r"bias must have shape \(5,\)"),
        (3, torch.randn(2, 5), ValueError, r"crossed must have shape \(3, 5\)"),
        (3, torch.ones(3, 5, dtype=torch.int32), TypeError, "crossed must be torch.float32 or .*, got torch.int32"),
        (1, torch.empty(3, 5, device="meta"), ValueError, "product must be on cpu like the other tensors, got meta"),
    ):
        with pytest.raises(error, match=message):
            cross(*good[:index], tensor, *good[index + 1 :])


def test_float64_and_other_devices_are_left_to_pytorch():
    for device in ("cpu", "meta"):
        vectors = torch.empty(2, 3, dtype=torch.float64, device=device)
        assert not is_fused(vectors, vectors)
        assert not is_cross_fused(vectors)
    with use_kernels("reference"):
        assert not is_fused(torch.empty(2, 3), torch.empty(2, 3))


@pytest.mark.triton
class TestModules:
    """With the kernels, the modules compute what they compute without."""

    @pytest.mark.parametrize("dtype", ROUNDING)
    def test_dot_interaction(self, device, dtype):
        self.assert_equals_reference(te.nn.DotInteraction(6), [(5, 12), (5, 6, 12)], dtype, device)

    @pytest.mark.parametrize("low_rank", [None, 3])
    @pytest.mark.parametrize("dtype", ROUNDING)
    def test_cross_network(self, device, dtype, low_rank):
        network = te.nn.CrossNetwork(20, 2, low_rank).to(device, dtype)
        self.assert_equals_reference(network, [(5, 20)], dtype, device)

    def assert_equals_reference(self, module, shapes, dtype, device) -> None:
        inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
        leaves = [*inputs, *module.parameters()]
        assert is_fused(inputs[0], inputs[-1])
        out = module(*inputs)
        grad = torch.randn_like(out)
        with use_kernels("reference"):
            expected = module(*inputs)
            expected_grads = torch.autograd.grad(expected, leaves, grad)
        # A few roundings of numbers around 10, on either side: PyTorch rounds 16-bit results between operations.
        tolerance = {"rtol": 16 * ROUNDING[dtype], "atol": 64 * ROUNDING[dtype]}
        torch.testing.assert_close(out, expected, **tolerance)
        for actual, reference in zip(torch.autograd.grad(out, leaves, grad), expected_grads, strict=True):
            torch.testing.assert_close(actual, reference, **tolerance)
