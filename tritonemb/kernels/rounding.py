"""Narrowing float32 to 16 bits, to nearest or stochastically, and the counter-based random numbers for it.

Philox-4x32-10 (Salmon et al., SC 2011) with key = the table's seed and counter = (element // 8, row, row >> 32, step):
the bits that round an element depend on nothing else. Element `j` takes word `j % 8 // 2`, its low half if `j` is even.
Finite values stay finite: they saturate at the largest one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


def random16_reference(seed: int, rows: Tensor, step: int, dim: int) -> Tensor:
    """int64 `[R, dim]` in [0, 2^16): the noise of each element of the table's rows `rows` (int64 `[R]`)."""
    num_counters = (dim + 7) // 8
    c0 = torch.arange(num_counters, device=rows.device).expand(rows.numel(), -1)
    c1, c2 = (rows & _MASK32).unsqueeze(1).expand_as(c0), (rows >> 32).unsqueeze(1).expand_as(c0)
    c3 = torch.full_like(c0, step & _MASK32)
    k0, k1 = seed & _MASK32, seed >> 32
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    words = torch.stack([c0, c1, c2, c3], dim=-1).reshape(rows.numel(), -1)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1).reshape(rows.numel(), -1)
    return halves[:, :dim]


def _multiply(constant: int, value: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 × 32 bit product, in int64 without overflow."""
    low = (constant & 0xFFFF) * value
    high = (constant >> 16) * value
    middle = (low >> 16) + (high & 0xFFFF)
    return (high >> 16) + (middle >> 16), ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def narrow_reference(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 to a 16-bit dtype, to nearest, ties to even."""
    largest = torch.finfo(dtype).max
    finite = values.isfinite()
    return torch.where(finite, values.clamp(-largest, largest), values).to(dtype)


def narrow_stochastic_reference(values: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """float32 to a 16-bit dtype, away from zero iff the noise's upper `b` bits are below `2^b` · (distance / gap).

    `b` is 16, but 13 for normal float16 values, whose float32 form has 13 bits to lose. `noise` int64 in [0, 2^16).
    """
    finite = values.isfinite()
    largest = torch.finfo(dtype).max
    magnitude = torch.where(finite, values, 0).to(torch.float64).abs().clamp(max=largest)
    nearest = magnitude.to(dtype)
    below = (nearest.view(torch.int16) - (nearest.to(torch.float64) > magnitude).to(torch.int16)).view(dtype)
    above = (below.view(torch.int16) + 1).view(dtype)
    gap = above.to(torch.float64) - below.to(torch.float64)
    fraction = torch.where(gap.isfinite(), (magnitude - below.to(torch.float64)) / gap, 0.0)
    normal_float16 = (magnitude >= 2.0**-14) & (dtype == torch.float16)
    bits = torch.where(normal_float16, 13, 16)
    up = (noise >> (16 - bits)).to(torch.float64) < fraction * 2.0**bits
    rounded = torch.copysign(torch.where(up, above, below), values.to(dtype))
    return torch.where(finite, rounded, values.to(dtype))
