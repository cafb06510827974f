"""Codes of int8 rows: the slow formula, nothing drifts, and noise is unbiased and of one generator."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import fewer
from tritonemb.kernels.random import philox_by_torch
from tritonemb.layout import mix64
from tritonemb.storage.store import decode_rows, encode_rows, round_rows
from tritonemb.tables.cache import rounding_noise


def slow_round(row: list[float], noise: list[float]) -> list[float]:
    """The formula, element by element, in float64."""
    largest = max(map(abs, row))
    if not math.isfinite(largest) or math.isnan(sum(row)):
        return [math.nan] * len(row)
    if largest < 2.0**-100:
        return [0.0] * len(row)
    scale = 2.0**-110
    while largest > 127 * scale:
        scale *= 2
    return [math.floor(value / scale + u) * scale for value, u in zip(row, noise, strict=True)]


def noise_like(values: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1 << 16, values.shape, generator=generator) / 65536


rows = st.lists(
    st.lists(st.floats(width=32), min_size=5, max_size=5)
    | st.lists(st.integers(-128, 128).map(float), min_size=5, max_size=5)
    | st.lists(st.floats(-(2.0**-96), 2.0**-96, width=32), min_size=5, max_size=5),
    min_size=1,
    max_size=6,
)


@given(rows, st.integers(0, 9))
def test_rows_are_rounded_by_the_formula_and_do_not_drift(values, seed):
    weight = torch.tensor(values)
    noise = noise_like(weight, seed)
    result = round_rows(weight, noise)
    expected = [slow_round(row, draws) for row, draws in zip(weight.tolist(), noise.tolist(), strict=True)]
    # The sum of value and noise is rounded to float32, which reaches an integer from 2^-18 below it on.
    steps = [
        slow_round(row, [d + 2.0**-17 for d in draws])
        for row, draws in zip(weight.tolist(), noise.tolist(), strict=True)
    ]
    for actual, exact, upper in zip(result.tolist(), expected, steps, strict=True):
        assert all(x in (e, u) or (x != x and e != e) for x, e, u in zip(actual, exact, upper, strict=True))
    # Another rounding, whatever its noise, and codes and back, change nothing.
    assert torch.equal(round_rows(result, noise_like(weight, seed + 1)).nan_to_num(7), result.nan_to_num(7))
    codes, scale = encode_rows(result)
    assert codes.dtype == torch.int8
    assert torch.equal(decode_rows(codes, scale).nan_to_num(7), result.nan_to_num(7))
    for again, first in zip(encode_rows(decode_rows(codes, scale)), (codes, scale), strict=True):
        assert torch.equal(again.nan_to_num(7), first.nan_to_num(7))


def test_the_largest_value_selects_the_scale():
    weight = torch.tensor([[127.0, 1.0], [127.5, 1.0], [-63.0, 0.5], [0.0, -0.0], [math.inf, 1.0], [3e38, 0.0]])
    codes, scale = encode_rows(weight)
    assert scale.tolist()[:4] == [1.0, 2.0, 0.5, 0.0]
    assert codes.tolist()[:4] == [[127, 1], [64, 1], [-126, 1], [0, 0]]
    assert scale[4].isnan()
    assert decode_rows(codes, scale)[5].isfinite().all()


def test_rounding_is_unbiased():
    weight = torch.linspace(-1, 1, 64)[None]
    draws = torch.stack([round_rows(weight, noise_like(weight, seed)) for seed in range(fewer(4000, 1000))])
    standard_error = 2**-6 / 2 / len(draws) ** 0.5  # a step is 2^-6
    assert (draws.mean(0) - weight).abs().max() < 5 * standard_error


@pytest.mark.parametrize("dim", [1, 6, 33])
def test_noise_is_a_function_of_seed_step_row_and_column(dim):
    ids, step = torch.tensor([5, 0, 2**40, 77]), torch.tensor(3)
    noise = rounding_noise(2**62 + 9, step, ids, dim)
    words = philox_by_torch(2**62 + 9, 0, -(-dim // 4), ids ^ mix64(step.reshape(1)), 0)[:, :dim]
    expected = (((words.to(torch.int32) >> 8) >> 8).float() + 2**15) / 2**16
    assert torch.equal(noise, expected)
    assert torch.equal(rounding_noise(2**62 + 9, step, ids[2:], dim), noise[2:])
    for seed, other in ((2**62 + 9, torch.tensor(4)), (2**62 + 8, step)):
        assert not torch.equal(rounding_noise(seed, other, ids, dim), noise)
