"""`TiledLinear` is `torch.nn.Linear` to rounding: outputs, gradients, values and state dicts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tritonemb as te

SIZES = [(32, 32), (23, 29), (29, 23), (1, 7)]


def whole_gradient(tiled: te.nn.TiledLinear) -> torch.Tensor:
    return torch.cat([torch.cat([layer.weight.grad for layer in row], 1) for row in tiled.tiles])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("splits", [(1, 1), (2, 2), (1, 5), (5, 1), (5, 5), None])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_a_linear_layer_does(sizes, splits, bias):
    in_splits, out_splits = (min(a, b) for a, b in zip(splits or sizes, sizes, strict=True))
    linear = nn.Linear(*sizes, bias)
    tiled = te.nn.TiledLinear.from_linear(linear, in_splits=in_splits, out_splits=out_splits)
    x, gradient = torch.randn(4, 7, sizes[0]), torch.randn(4, 7, sizes[1])
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(input) for layer, input in zip((linear, tiled), inputs, strict=True)]
    for output in outputs:
        output.backward(gradient)
    close = {"rtol": 1e-6, "atol": 2e-6}  # sums of up to 32 numbers of about 1, in another order
    torch.testing.assert_close(outputs[1], outputs[0], **close)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **close)
    torch.testing.assert_close(whole_gradient(tiled), linear.weight.grad, rtol=1e-6, atol=1e-5)  # of 28 samples
    if bias:
        result = torch.cat([row[0].bias.grad for row in tiled.tiles])
        torch.testing.assert_close(result, linear.bias.grad, rtol=1e-6, atol=1e-5)
    sizes_of_tiles = {layer.weight.shape for row in tiled.tiles for layer in row}
    assert max(s[0] for s in sizes_of_tiles) - min(s[0] for s in sizes_of_tiles) <= 1
    assert max(s[1] for s in sizes_of_tiles) - min(s[1] for s in sizes_of_tiles) <= 1


@pytest.mark.parametrize("sizes", SIZES[:3])
def test_values_go_to_a_linear_layer_and_back(sizes):
    linear = nn.Linear(*sizes)
    tiled = te.nn.TiledLinear.from_linear(linear, in_splits=3, out_splits=4)
    state = tiled.state_dict()
    assert [*state] == ["weight", "bias"]
    assert torch.equal(state["weight"], linear.weight)
    assert torch.equal(state["bias"], linear.bias)
    other = te.nn.TiledLinear(*sizes, in_splits=2)
    other.load_state_dict(linear.state_dict())
    again = other.to_linear()
    assert torch.equal(again.weight, linear.weight)
    assert torch.equal(again.bias, linear.bias)
    inside = nn.Sequential(te.nn.TiledLinear(*sizes, bias=False, out_splits=2))
    assert [*inside.state_dict()] == ["0.weight"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(nn.Linear(sizes[0], sizes[1] + 1).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*tiles\.0\.0\.bias"):
        other.load_state_dict({"weight": linear.weight.detach()})


def test_initial_values_are_those_of_a_layer_with_all_inputs():
    tiled = te.nn.TiledLinear(1_000, 50, in_splits=100, out_splits=2)
    weight = tiled.state_dict()["weight"]
    assert weight.abs().max() <= 1_000**-0.5
    assert weight.std().item() == pytest.approx(1_000**-0.5 / 3**0.5, rel=0.05)  # 50,000 draws


def test_it_compiles(dynamo):
    tiled, x = te.nn.TiledLinear(20, 30, in_splits=2, out_splits=3), torch.randn(5, 20)
    torch.testing.assert_close(torch.compile(tiled, fullgraph=True, backend="aot_eager")(x), tiled(x))


@pytest.mark.parametrize("splits", [{"in_splits": 0}, {"in_splits": 6}, {"out_splits": 8}])
def test_splits_that_cannot_be_are_named(splits):
    with pytest.raises(ValueError, match=r"_splits must be between 1 and (in_features = 5|out_features = 7), got"):
        te.nn.TiledLinear(5, 7, **splits)


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_tiles_is_as_frozen_and_in_the_same_mode(bias):
    linear = nn.Linear(4, 6, bias).eval()
    linear.weight.requires_grad_(False)
    tiled = te.nn.TiledLinear.from_linear(linear, in_splits=2, out_splits=3)
    again = tiled.to_linear()
    assert not again.training
    trained, expected = ({n: p.requires_grad for n, p in layer.named_parameters()} for layer in (again, linear))
    assert trained == expected
    assert tiled.train().to_linear().training
    tiled.tiles[1][0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match="only some tiles have a frozen weight"):
        tiled.to_linear()
