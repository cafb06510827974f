"""`embedding_bag` and its gradients, of tables and of per-sample weights, against autograd through float64 PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tritonemb as te
from tests import plain
from tests.helpers import fewer, make_collection, width_of
from tests.strategies import DIMS, TABLE_DTYPES, problems, random_weights, seeds
from tritonemb import ops
from tritonemb.layout import make_layout

pytestmark = pytest.mark.public
TABLES = {"dtypes": TABLE_DTYPES, "dims": fewer(DIMS, (1, 7, 60)), "max_tables": fewer(6, 3)}
# Sums of up to 33 · 12 products of normal values in float32; 16-bit outputs and gradients are compared to 2^-8.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2.0**-8, "atol": 1e-4}}


@pytest.mark.parametrize("pooled", [True, False])
@given(data=st.data())
@pytest.mark.usefixtures("poisoned")
def test_gradients(pooled, data):
    (configs, batch), seed = data.draw(problems(**TABLES, pooled=pooled)), data.draw(seeds)
    layout = make_layout(configs, batch.keys(), pooled)
    weights = [weight.requires_grad_() for weight in random_weights(configs)]
    wide = [weight.detach().double().requires_grad_() for weight in weights]
    scales = batch.weights_or_none()
    if scales is not None:
        scales.requires_grad_()
    wide_scales = None if scales is None else scales.detach().double().requires_grad_()
    out = ops.embedding_bag(weights, batch.values(), batch.offsets(), scales, layout)
    expected = (plain.pooled_lookup if pooled else plain.unpooled_lookup)(configs, wide, batch, wide_scales)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)  # sums of at most 12 products
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(grad)
    expected.backward(grad.double())
    for weight, reference in zip(weights, wide, strict=True):
        assert weight.grad is not None
        assert weight.grad.dtype == weight.dtype
        required = torch.zeros_like(reference) if reference.grad is None else reference.grad
        exact = weight.dtype == torch.float32
        tolerance = TOLERANCES[torch.float32 if exact else torch.bfloat16]
        torch.testing.assert_close(weight.grad.double(), required, **tolerance)
    if scales is not None:
        torch.testing.assert_close(scales.grad.double(), wide_scales.grad, **TOLERANCES[torch.float32])


def test_float64_tables_pass_gradcheck():
    """Float64 is served by PyTorch's operators: the autograd formula itself is exact."""
    configs = [
        te.TableConfig("a", 4, 3, features=["x", "y"]),
        te.TableConfig("b", 5, 2, features=["y"], pooling="mean"),
    ]
    batch = te.KeyedJaggedTensor.from_lists({"y": [[1, 1, 3], []], "x": [[2], [0, 3]]})
    layout = make_layout(configs, batch.keys(), True)
    weights = [torch.randn(c.num_embeddings, c.embedding_dim, dtype=torch.float64, requires_grad=True) for c in configs]
    scales = torch.randn(batch.values().numel(), dtype=torch.float64, requires_grad=True)

    def look_up(scales, *weights):
        return ops.embedding_bag(weights, batch.values(), batch.offsets(), scales, layout, True, torch.float64)

    assert torch.autograd.gradcheck(look_up, (scales, *weights))


@given(problems(**TABLES), seeds)
@pytest.mark.usefixtures("poisoned")
def test_a_fused_lookup_has_the_bits_and_weight_gradients_of_a_plain_one(problem, seed):
    configs, batch = problem
    fused, unfused = make_collection(configs, te.optim.SGD()), make_collection(configs, None)
    outputs, scales = [], batch.weights_or_none()
    for collection in (fused, unfused):
        local = None if scales is None else scales.clone().requires_grad_()
        out = collection(te.KeyedJaggedTensor(batch.keys(), batch.values(), local, offsets=batch.offsets()))
        assert out.shape == width_of(collection, batch)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype))
        outputs.append((out.detach(), local))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert scales is None or torch.equal(outputs[0][1].grad, outputs[1][1].grad)
    assert all(table.weight.grad is None for table in fused.tables)
    assert all(table.weight.grad is not None for table in unfused.tables)


def test_only_wanted_gradients_are_computed():
    configs = [te.TableConfig("a", 4, 3), te.TableConfig("b", 5, 2)]
    batch = te.KeyedJaggedTensor.from_lists({"a": [[1], [2]], "b": [[0], [0]]})
    weights = random_weights(configs)
    weights[1].requires_grad_()
    layout = make_layout(configs, batch.keys(), True)
    ops.embedding_bag(weights, batch.values(), batch.offsets(), None, layout).sum().backward()
    assert weights[0].grad is None
    assert torch.equal(weights[1].grad, torch.tensor([[2.0, 2.0], *[[0.0, 0.0]] * 4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_result_has_the_dtype_asked_for(dtype):
    configs = [te.TableConfig("table", 4, 3)]
    batch = te.KeyedJaggedTensor.from_lists({"table": [[1], [2, 3]]})
    weights, layout = random_weights(configs), make_layout(configs, ["table"], True)
    args = (weights, batch.values(), batch.offsets(), None, layout)
    out = ops.embedding_bag(*args, output_dtype=dtype)
    assert torch.equal(out, ops.embedding_bag(*args).to(dtype))
