"""Table rows in Triton: 32, 16 and 8 bit floats by address, and sums with one order.

8 and 16 bit floats travel as integers and are widened and narrowed by hand: exactly, and alike on every target (sm_80
has no e4m3, the interpreter no bfloat16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.kernels.language import jit, tl

FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = (tl.constexpr(code) for code in range(5))
CODES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}


@jit
def pointer_to(address, CODE: tl.constexpr, ALIGN: tl.constexpr):
    """An integer address as a pointer to floats of kind CODE, or to the integers that hold their bits."""
    if CODE == FLOAT32:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif CODE == FLOAT16:
        pointer = address.to(tl.pointer_type(tl.float16))
    elif CODE == BFLOAT16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, ALIGN)


@jit
def widen(bits, CODE: tl.constexpr):
    """What `pointer_to` loads, as float32: exact."""
    if CODE == FLOAT32:
        return bits
    elif CODE == FLOAT16:
        return bits.to(tl.float32)
    elif CODE == BFLOAT16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif CODE == FLOAT8_E5M2:
        return (bits.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        # As float16 bits the exponent is 8 too small; a multiplication mends it, for subnormal values too.
        magnitude = bits.to(tl.int16) & 0x7F
        value = (magnitude << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        value = tl.where(magnitude == 0x7F, float("nan"), value)
        return tl.where((bits & 0x80) != 0, -value, value)


@jit
def narrow(values, CODE: tl.constexpr):
    """float32 to what `pointer_to` stores: to nearest, ties to even; finite values stay finite."""
    if CODE == FLOAT32:
        return values
    elif CODE == FLOAT16:
        finite = tl.abs(values) < float("inf")
        return tl.where(finite, tl.minimum(tl.maximum(values, -65504.0), 65504.0), values).to(tl.float16)
    elif CODE == FLOAT8_E4M3:
        return _narrow8(values, 3, 7, 0x7E, 0x7F)
    elif CODE == FLOAT8_E5M2:
        return _narrow8(values, 2, 15, 0x7B, 0x7C)
    else:
        bits = values.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
        rounded = tl.where(magnitude < 0x7F800000, tl.minimum(rounded, 0x7F7FFFFF), rounded)
        rounded = tl.where(magnitude > 0x7F800000, 0x7FC00000, tl.where(magnitude == 0x7F800000, magnitude, rounded))
        # Joined before it is shifted, LLVM cannot compile it for gfx942 where vectors of floats were just loaded.
        return ((rounded >> 16) | ((bits >> 16) & 0x8000)).to(tl.int16)


@jit
def _narrow8(values, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, INFINITE: tl.constexpr):
    """float32 to 8 bits with MANTISSA bits of mantissa and that BIAS of exponent, in integers; NaN is 0x7F."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal -= (127 - BIAS) << MANTISSA
    # Subnormal results are multiples of the last place of 2^SHIFT: adding it rounds to them.
    SHIFT: tl.constexpr = 24 - BIAS - MANTISSA
    subnormal = (tl.abs(values) + (1 << SHIFT)).to(tl.int32, bitcast=True) - ((127 + SHIFT) << 23)
    code = tl.minimum(tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal), LARGEST)
    code = tl.where(magnitude < 0x7F800000, code, tl.where(magnitude == 0x7F800000, INFINITE, 0x7F))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def row_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sum of each row of `x` `[ROWS, SIZE]`: neighbours in pairs, then pairs of sums, so that its order is fixed.

    Two at a time `tl.sum` has but one order, and lanes exchange them; `tl.split` would give all of them to every lane.
    """
    if SIZE == 1:
        return tl.reshape(x, (ROWS,))
    else:
        return row_sum(tl.sum(tl.reshape(x, (ROWS, SIZE // 2, 2)), 2), ROWS, SIZE // 2)


@jit
def last_at_most(ascending, count, wanted, STRIDE: tl.constexpr = 1):
    """For each of `wanted`, the index of the last of `count` ascending values that is not above it; at least 0.

    The values stand STRIDE elements apart.
    """
    low = (wanted * 0).to(tl.int32)
    high = low + count
    size = tl.full((), 0, tl.int32) + count
    while size > 0:  # as many steps as `count` has bits
        middle = (low + high) // 2
        value = tl.load(ascending + middle * STRIDE, mask=middle < high, other=0)
        up = (middle < high) & (value <= wanted)
        low, high = tl.where(up, middle + 1, low), tl.where(up, high, middle)
        size = size // 2
    return tl.maximum(low - 1, 0)


def row_sum_reference(x: Tensor) -> Tensor:
    """Sum over the last dimension with the order of `row_sum`: `[..., D]` to `[..., 1]`."""
    size = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - x.shape[-1]))
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def bits_of(tensor: Tensor) -> Tensor:
    """The tensor as kernels take it: 8 and bfloat16 as the integers that hold their bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
