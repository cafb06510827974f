"""Calls so small that PyTorch's own op is the faster one: it serves them, and what ours refuses is refused still."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.nn.twins import BAG, ROW, dense, random_ids, twins
from tritonemb.nn import single_table
from tritonemb.ops.bag import are_ascending
from tritonemb.ops.registry import CPU, use_kernels

pytestmark = [pytest.mark.public, pytest.mark.usefixtures("small_calls")]
ROWS, DIM = 50, 6


@pytest.fixture(autouse=True)
def numba_serves():
    with use_kernels(CPU):
        yield


def node_of(output: torch.Tensor) -> str:
    return type(output.grad_fn).__name__


@pytest.mark.parametrize("sparse", [False, True])
def test_pytorchs_op_serves_a_small_row_lookup(sparse):
    reference, fused = twins(ROW, ROWS, DIM, padding_idx=1, sparse=sparse)
    ids = random_ids(4, 3, rows=ROWS)
    outputs = [module(ids) for module in (reference, fused)]
    assert node_of(outputs[1]) == node_of(outputs[0])
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(dense(fused.weight.grad), dense(reference.weight.grad))


@pytest.mark.parametrize("options", [{"mode": "sum"}, {"mode": "mean"}, {"mode": "mean", "padding_idx": 1}])
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 0, 5]), torch.tensor([0], dtype=torch.int32)])
def test_pytorchs_op_serves_small_bags(options, offsets):
    reference, fused = twins(BAG, ROWS, DIM, **options)
    ids = random_ids(4, 3, rows=ROWS) if offsets is None else random_ids(12, rows=ROWS, dtype=offsets.dtype)
    outputs = [module(ids, offsets) for module in (reference, fused)]
    assert node_of(outputs[1]) == node_of(outputs[0])
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(fused.weight.grad, reference.weight.grad)


@pytest.mark.parametrize("kind", [te.nn.Embedding, te.nn.EmbeddingBag])
def test_the_backward_of_a_larger_call_is_ours(kind, monkeypatch):
    options = {} if kind is te.nn.Embedding else {"mode": "sum"}
    module = kind(ROWS, DIM, **options)
    ids = random_ids(4, 3, rows=ROWS)
    assert "TorchForward" not in node_of(module(ids))
    monkeypatch.setattr(single_table, "FEW_ELEMENTS", ids.numel() * DIM)
    output = module(ids)
    assert "TorchForward" in node_of(output)
    (gradient,) = torch.autograd.grad(output.sin().sum(), module.weight, create_graph=True)
    (again,) = torch.autograd.grad(gradient.square().sum(), module.weight)  # twice differentiable, as all of ours

    weight = module.weight.detach().double().requires_grad_()
    rows = nn.functional.embedding(ids, weight) if not options else nn.functional.embedding(ids, weight).sum(1)
    (expected,) = torch.autograd.grad(rows.sin().sum(), weight, create_graph=True)
    (expected_again,) = torch.autograd.grad(expected.square().sum(), weight)
    for actual, required in ((gradient, expected), (again, expected_again)):
        torch.testing.assert_close(actual.double(), required, rtol=1e-5, atol=1e-5)  # sums of some float32 values


@pytest.mark.parametrize("offsets", [[[0]], [[0, 1]], 0, [], [0.0, 1.0]])
def test_offsets_of_another_form_are_not_read_as_bags(offsets):
    """No kernel is made for them, which would read what lies behind them."""
    assert are_ascending(torch.tensor([0, 2, 1]).sort().values)
    assert not are_ascending(torch.tensor(offsets))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("offsets", [[0, -1, 3], [0, 4, 2], [1, 2, 3], [0, 7, 9]])
def test_offsets_that_do_not_fit_are_refused(offsets, dtype):
    """PyTorch's kernel looks at the first and the last of them alone, and reads foreign memory for the others."""
    module = te.nn.EmbeddingBag(ROWS, DIM, mode="sum")
    with pytest.raises(ValueError if min(torch.tensor(offsets).diff()) < 0 else RuntimeError, match="offsets"):
        module(torch.arange(5, dtype=dtype), torch.tensor(offsets, dtype=dtype))


def test_an_id_out_of_range_is_named():
    with pytest.raises(IndexError, match=r"input\[2\] is 50, which is out of range; valid ids are 0 to 49"):
        te.nn.Embedding(ROWS, DIM)(torch.tensor([[1, 2], [50, 3]]))
    with pytest.raises(RuntimeError, match="50"):
        te.nn.EmbeddingBag(ROWS, DIM)(torch.tensor([[1, 2], [50, 3]]))


def test_16_bit_rows_are_summed_in_float32():
    module = te.nn.EmbeddingBag(2, 4, mode="sum", dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[256.0], [1.0]]).expand(2, 4))
    assert module(torch.tensor([[0, 1, 1]])).tolist() == [[258.0] * 4], "bfloat16 sums would stay at 256"


@pytest.mark.parametrize("kind", [te.nn.Embedding, te.nn.EmbeddingBag])
@pytest.mark.parametrize("change", [lambda rows: rows[:, :4].contiguous(), lambda rows: rows.t().contiguous().t()])
def test_a_fused_weight_of_another_form_is_refused(kind, change):
    """Its optimizer's states are of the shape that it was made for, and rows are updated where they lie."""
    options = {} if kind is te.nn.Embedding else {"mode": "sum"}
    module = kind(ROWS, DIM, optimizer=te.optim.Adam(), **options)
    module.weight.data = change(module.weight.data)
    with pytest.raises(RuntimeError, match="contiguous weight of its original shape"):
        module(random_ids(4, 3, rows=ROWS))
