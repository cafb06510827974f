"""Random numbers and rounding to 16 bits."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import tritonemb as te
from tests.helpers import contents, make_collection, random_steps, train
from tritonemb.kernels.cpu.jit import BFLOAT16, FLOAT16, compiled
from tritonemb.kernels.cpu.random import BLOCK_WORDS, fill_philox, narrow_row, narrow_row_stochastic, widen_row
from tritonemb.kernels.random import narrow_by_torch, narrow_stochastic_by_torch, random16_by_torch

CODES = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@compiled
def _words(words, seed, row, column, step):
    fill_philox(words, seed, column // 8, row, step)


@compiled
def _narrow(row, dtype, bits):
    narrow_row(row, dtype, bits)


@compiled
def _narrow_stochastic(row, dtype, bits, words):
    narrow_row_stochastic(row, dtype, bits, words)


@compiled
def _widen(bits, dtype, row):
    widen_row(bits, dtype, row)


def words_of(seed: int, row: int, step: int, num_counters: int, column: int = 0) -> np.ndarray:
    words = np.zeros(-(-4 * num_counters // BLOCK_WORDS) * BLOCK_WORDS, dtype=np.uint32)
    _words(words, np.int64(seed), np.int64(row), np.int64(column), np.int64(step))
    return words[: 4 * num_counters]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            product1 >> 32 ^ counter[1] ^ key[0], product1 & 0xFFFFFFFF, product0 >> 32 ^ counter[3] ^ key[1],
            product0 & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_the_tests_own_philox_gives_the_known_answers(counter, key, result):
    assert philox(counter, key) == list(result)


@given(
    st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(0, 2**33), st.integers(1, 9), st.integers(0, 2**20)
)
@example(0, 0, 0, 1, 0)
def test_both_generators_are_philox(seed, row, step, num_counters, first_counter):
    expected: list[int] = []
    for index in range(first_counter, first_counter + num_counters):
        counter = (index, row & 0xFFFFFFFF, row >> 32, step & 0xFFFFFFFF)
        expected += philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    column = 8 * first_counter
    assert words_of(seed, row, step, num_counters, column).tolist() == expected
    halves = [half for word in expected for half in (word & 0xFFFF, word >> 16)]
    dim = 8 * num_counters - 3
    assert random16_by_torch(seed, torch.tensor([row]), step, dim, column)[0].tolist() == halves[:dim]


@functools.cache
def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Every finite 16-bit value, the middle of every gap, its neighbours, and what lies outside."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    every = every[every.isfinite()].sort().values
    middle = (every[1:].double() + every[:-1].double()).div(2).float()
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    neighbours = [torch.nextafter(middle, up), torch.nextafter(middle, down)]
    outside = torch.tensor([65504.0, 65519.9, 65520.0, 65536.0, 1e30, 3.4028e38, 1e-45, 1e-40, 2.0**-25, 2.0**-24])
    infinite = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    return torch.cat([every, middle, *neighbours, outside, -outside, infinite])


@pytest.mark.parametrize("dtype", CODES)
def test_widening_is_exact(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    row = np.empty(2**16, dtype=np.float32)
    _widen(bits, CODES[dtype], row)
    expected = torch.from_numpy(bits.view(np.int16)).view(dtype).float()
    assert torch.equal(torch.from_numpy(row).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", CODES)
def test_rounding_to_nearest_is_pytorchs_but_saturates(dtype):
    values = special_values(dtype)
    bits = np.zeros(values.numel(), dtype=np.uint16)
    _narrow(values.numpy(), CODES[dtype], bits)
    result = torch.from_numpy(bits.view(np.int16)).view(dtype)
    assert torch.equal(result.view(torch.int16), narrow_by_torch(values, dtype).view(torch.int16))
    plain, largest = values.to(dtype), torch.finfo(dtype).max
    overflowed = plain.isinf() & values.isfinite()
    assert overflowed.any()
    assert torch.equal(result[~overflowed].view(torch.int16), plain[~overflowed].view(torch.int16))
    assert (result[overflowed].float().abs() == largest).all()


@pytest.mark.parametrize("dtype", CODES)
@given(seed=st.integers(0, 2**63 - 1))
def test_stochastic_rounding_is_the_references(dtype, seed):
    generator = torch.Generator().manual_seed(seed % 2**32)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32).view(torch.float32)
    values = torch.cat([special_values(dtype)[::17], bits[~bits.isnan()], torch.randn(999, generator=generator)])
    words = words_of(seed, 5, 3, (values.numel() + 7) // 8)
    bits = np.zeros(values.numel(), dtype=np.uint16)
    _narrow_stochastic(values.numpy(), CODES[dtype], bits, words)
    noise = random16_by_torch(seed, torch.tensor([5]), 3, values.numel())[0]
    expected = narrow_stochastic_by_torch(values, dtype, noise)
    assert torch.equal(torch.from_numpy(bits.view(np.int16)), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", CODES)
def test_nan_stays_nan(dtype):
    values = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int64).int().view(torch.float32)
    bits = np.zeros(4, dtype=np.uint16)
    for words in (words_of(0, 0, 0, 1), np.full(4, 0xFFFFFFFF, np.uint32), np.zeros(4, np.uint32)):
        _narrow_stochastic(values.numpy(), CODES[dtype], bits, words)
        assert torch.from_numpy(bits.view(np.int16)).view(dtype).isnan().all()
    _narrow(values.numpy(), CODES[dtype], bits)
    assert torch.from_numpy(bits.view(np.int16)).view(dtype).isnan().all()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("value", [1.0 + 2.0**-13, 1.0 + 2.0**-12, -3.14159, 1e-6, -5.1e-8, 12345.678, 6e-5])
def test_stochastic_rounding_is_unbiased(dtype, value):
    num_samples = 2**16
    values = torch.full((num_samples,), value)
    words = words_of(123, 7, 1, num_samples // 8)
    bits = np.zeros(num_samples, dtype=np.uint16)
    _narrow_stochastic(values.numpy(), CODES[dtype], bits, words)
    rounded = torch.from_numpy(bits.view(np.int16)).view(dtype).double()
    levels = rounded.unique()
    assert levels.numel() <= 2
    gap = float(levels[-1] - levels[0])
    # The mean of n independent draws of a two-valued variable of range `gap` deviates by at most gap / (2 sqrt n) (one
    # standard deviation); five of them are exceeded with probability 6e-7. 2^-13 gaps are the grid of the noise.
    bound = 5 * gap / (2 * num_samples**0.5) + gap * 2.0**-13
    assert abs(float(rounded.mean()) - float(values[0].double())) <= bound


@pytest.mark.parametrize("dtype", CODES)
def test_small_steps_are_not_lost(dtype):
    """300 steps of 2^-13 on a row of ones: to nearest nothing moves, stochastically the mean does."""
    means = {}
    for stochastic in (False, True):
        config = te.TableConfig("table", 1, 4096, dtype=dtype)
        collection = te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=2.0**-14, stochastic_rounding=stochastic))
        collection.tables[0].weight.data.fill_(1.0)
        batch = te.KeyedJaggedTensor.from_lists({"table": [[0]]})
        grad = -torch.ones(1, 4096, dtype=dtype)
        train(collection, [(batch, grad)] * 300)
        means[stochastic] = float(collection.tables[0].weight.detach().double().mean())
    assert means[False] == 1.0
    # 4,096 walks with steps of variance at most gap · 2^-14: 5 standard deviations of their mean after 300 steps.
    gap = torch.finfo(dtype).eps
    assert abs(means[True] - 1.0 - 300 * 2.0**-14) < 5 * (300 * gap * 2.0**-14 / 4096) ** 0.5


def test_tables_round_by_streams_of_their_own():
    configs = [te.TableConfig(name, 20, 64, dtype=torch.bfloat16) for name in ("a", "b")]
    collection = make_collection(configs, te.optim.SGD(lr=0.1))
    collection.tables[1].weight.data.copy_(collection.tables[0].weight.data)
    (batch, grad), *_ = random_steps(collection, 1)
    ids = batch["a"]
    both = te.KeyedJaggedTensor.concat([ids, te.KeyedJaggedTensor(["b"], ids.values(), lengths=ids.lengths())])
    collection(both).backward(torch.cat([grad[:, :64]] * 2, dim=1))
    final = contents(collection)
    assert not torch.equal(final["a.weight"], final["b.weight"])
    torch.testing.assert_close(final["a.weight"], final["b.weight"], rtol=2**-7, atol=1e-4)  # one gap of bfloat16
