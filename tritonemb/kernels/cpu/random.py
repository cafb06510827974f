"""CPU twin of `kernels/random.py`: 16-bit rows, widened exactly, narrowed to nearest or at random; initial values."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from tritonemb.kernels.cpu.jit import FLOAT16, FLOAT32, inlined, inlined_uncounted, parallel
from tritonemb.kernels.cpu.row_groups import memory_of
from tritonemb.kernels.cpu.simd import (
    LONG,
    bfloat16_to_float32,
    emitted,
    empty,
    float16_to_float32,
    float32_bits,
    float32_from_bits,
    float32_row,
    float32_to_float16,
    int32_row,
    prefetch,
    row_size,
    splat,
    uint16_row,
    uint32_row,
)
from tritonemb.layout import UNIFORMS_PER_COUNTER, UNIT

COUNTERS = 8  # drawn at once; more would spill registers
BLOCK_WORDS = 4 * COUNTERS
_MAX_FLOAT16 = np.float32(65504.0)
_MIN_NORMAL_FLOAT16 = np.float32(2.0**-14)
_NEAR_INFINITY = np.int32(0x7F7F0000)  # bits from which a float32 may round to an infinite bfloat16


@emitted(types.void, *[types.int64] * 5)
def _fill_block(builder: Any, words: Any, seed: Any, first: Any, row: Any, step: Any) -> None:
    """Fill in the words of `COUNTERS` counters. Lanes have 64 bits, as products have; upper halves are ignored."""

    def constant(value: int) -> ir.Constant:
        return ir.Constant(ir.VectorType(LONG, COUNTERS), [value] * COUNTERS)

    low, half = constant(2**32 - 1), constant(32)
    row, upper_row, step, key_0, key_1 = (
        splat(builder, value, COUNTERS)
        for value in (row, builder.lshr(row, LONG(32)), step, seed, builder.lshr(seed, LONG(32)))
    )
    numbers = ir.Constant(low.type, [*range(COUNTERS)])
    c0, c1, c2, c3 = builder.add(splat(builder, first, COUNTERS), numbers), row, upper_row, step
    for _ in range(10):
        product_0 = builder.mul(builder.and_(c0, low), constant(0xD2511F53))
        product_1 = builder.mul(builder.and_(c2, low), constant(0xCD9E8D57))
        c0 = builder.xor(builder.xor(builder.lshr(product_1, half), c1), key_0)
        c2 = builder.xor(builder.xor(builder.lshr(product_0, half), c3), key_1)
        c1, c3 = product_1, product_0
        key_0, key_1 = builder.add(key_0, constant(0x9E3779B9)), builder.add(key_1, constant(0xBB67AE85))
    # Pair the words, and alternate the pairs.
    pairs = [builder.or_(builder.and_(a, low), builder.shl(b, half)) for a, b in ((c0, c1), (c2, c3))]
    order = [number + pair for number in range(COUNTERS) for pair in (0, COUNTERS)]
    block = builder.shuffle_vector(*pairs, ir.Constant(ir.VectorType(ir.IntType(32), 2 * COUNTERS), order))
    builder.store(block, builder.inttoptr(words, ir.PointerType(block.type)), align=4)


@inlined_uncounted
def fill_philox(words, seed, first, row, step):
    """Fill in the words of counters (first …, row, row >> 32, step); `words` uint32 `[n * BLOCK_WORDS]`."""
    for block in range(words.size // BLOCK_WORDS):
        address = np.int64(words.ctypes.data) + block * BLOCK_WORDS * 4
        _fill_block(address, seed, first + block * COUNTERS, row, step)


@inlined
def _narrow_bfloat16(value, addend):
    """Add to the dropped bits, so that they carry or not, and truncate; finite values stay finite."""
    bits = float32_bits(value)
    exponent = np.uint32(0x7F800000)
    if bits & exponent == exponent:
        quiet_bit = np.uint32(0x00400000) if bits & np.uint32(0x007FFFFF) != 0 else np.uint32(0)
        return np.uint16((bits | quiet_bit) >> np.uint32(16))
    rounded = np.uint32(bits + addend)
    if rounded & exponent == exponent:
        rounded = bits
    return np.uint16(rounded >> np.uint32(16))


@inlined
def _narrow_float16(value, noise):
    """Round a finite value stochastically: away from zero if the noise is below the dropped bits; saturates at 65504.

    Without branches, so that a loop over a row is vectorized.
    """
    bits, addend = float32_bits(value), np.uint32(np.uint32(0xFFFF) - noise)
    magnitude_bits = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Normal values drop 13 bits; their exponents are smaller by 112. The largest one is 0x7BFF.
    rounded = np.uint32(magnitude_bits + np.uint32(addend >> np.uint32(3)))
    normal = min(np.int32(np.int32(rounded >> np.uint32(13)) - np.int32(112 << 10)), np.int32(0x7BFF))
    # Subnormal ones are multiples of 2^-24: the next 16 bits decide.
    magnitude = float32_from_bits(magnitude_bits)
    magnitude = magnitude if magnitude < _MIN_NORMAL_FLOAT16 else _MIN_NORMAL_FLOAT16
    scaled = np.uint32(np.int32(np.ceil(magnitude * np.float32(2.0**40))))
    subnormal = np.int32(np.uint32(scaled + addend) >> np.uint32(16))
    code = subnormal if magnitude < _MIN_NORMAL_FLOAT16 else normal
    return np.uint16(np.uint32(code) | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@inlined
def _nearest_float16(value):
    if abs(value) < np.float32(np.inf):
        value = min(max(value, -_MAX_FLOAT16), _MAX_FLOAT16)
    return float32_to_float16(value)


@inlined
def _nearest_bfloat16(value):
    bits = float32_bits(value)
    return _narrow_bfloat16(value, np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))


@inlined_uncounted
def widen_row(bits, dtype, row):
    """Convert 16-bit `bits` to float32 `row`, exactly."""
    if dtype == FLOAT16:
        for j in range(row.size):
            row[j] = float16_to_float32(bits[j])
    else:
        for j in range(row.size):
            row[j] = bfloat16_to_float32(bits[j])


@inlined_uncounted
def narrow_row(row, dtype, bits):
    """Round float32 `row` to 16-bit `bits`, to nearest (ties to even); finite values saturate."""
    if dtype == FLOAT16:
        for j in range(row.size):
            bits[j] = _nearest_float16(row[j])
    else:
        for j in range(row.size):
            bits[j] = _nearest_bfloat16(row[j])


@inlined_uncounted
def narrow_row_stochastic(row, dtype, bits, words):
    """Round float32 `row` to 16-bit `bits` stochastically by 16 random bits each; finite values saturate."""
    noise, largest = uint16_row(words.ctypes.data, row.size), np.int32(0)  # of a word the lower half first
    for j in range(row.size):
        largest = max(largest, np.int32(float32_bits(row[j]) & np.uint32(0x7FFFFFFF)))
    if dtype == FLOAT16:
        for j in range(row.size):
            bits[j] = _narrow_float16(row[j], np.uint32(noise[j]))
    else:  # noise that is added to the dropped bits carries, or does not
        for j in range(row.size):
            addend = np.uint32(np.uint32(0xFFFF) - np.uint32(noise[j]))
            bits[j] = np.uint16(np.uint32(float32_bits(row[j]) + addend) >> np.uint32(16))
    # Values that are infinite, NaN, or round to infinity, are rare.
    for j in range(row.size if largest >= _NEAR_INFINITY else 0):
        if np.int32(float32_bits(row[j]) & np.uint32(0x7FFFFFFF)) >= _NEAR_INFINITY:
            if dtype == FLOAT16:
                bits[j] = _nearest_float16(row[j])
            else:
                bits[j] = _narrow_bfloat16(row[j], np.uint32(0xFFFF) - np.uint32(noise[j]))


ELEMENTS_PER_TASK = 1 << 15
PREFETCH_DISTANCE, PREFETCHED_BYTES = 8, 512  # entries between the prefetch of a row and its values, as of moved rows
_NO_IDS = np.empty(0, dtype=np.int64)


@inlined_uncounted
def _initialize_rows(task, num_tasks, memory, states, initial, entries, origin):
    """Initialize the task's rows: with values of ids, or of consecutive rows from the first one on."""
    (addresses, dtypes), (state_addresses, per_element, dims), (seeds, scales) = memory, states, initial
    (num_rows, ids, rows, tables), (first_row, first_column, words, buffer) = entries, origin
    begin = first_column % UNIFORMS_PER_COUNTER
    first, end = num_rows * task // num_tasks, num_rows * (task + 1) // num_tasks
    for index in range(first - PREFETCH_DISTANCE, end):
        # Prefetch a row and its states.
        next_index = index + PREFETCH_DISTANCE
        if next_index < end and rows.size and rows[next_index] >= 0:
            next_row, table = rows[next_index], np.int64(tables[next_index])
            row_bytes = row_size(dims[table], dtypes[table])
            prefetch(addresses[table] + next_row * row_bytes, min(row_bytes, PREFETCHED_BYTES))
            for state in range(per_element.size):
                row_bytes = 4 * (dims[table] if per_element[state] else 1)
                prefetch(state_addresses[state, table] + next_row * row_bytes, min(row_bytes, PREFETCHED_BYTES))
        if index < first:
            continue
        row, table = (rows[index], np.int64(tables[index])) if rows.size else (index, np.int64(0))
        if row < 0:
            continue
        # Draw words, and convert them; round 16-bit values.
        dim, dtype, id = dims[table], dtypes[table], ids[index] if ids.size else first_row + index
        row_words = uint32_row(words.ctypes.data, (begin + dim + BLOCK_WORDS - 1) // BLOCK_WORDS * BLOCK_WORDS)
        fill_philox(row_words, seeds[table], first_column // UNIFORMS_PER_COUNTER, id, np.int64(0))
        address, integers = addresses[table] + row * row_size(dim, dtype), int32_row(words.ctypes.data + begin * 4, dim)
        values = float32_row(address if dtype == FLOAT32 else np.int64(buffer.ctypes.data), dim)
        scale = scales[table]
        for column in range(dim):
            values[column] = np.float32(np.int32(integers[column] >> np.int32(8))) * scale
        if dtype != FLOAT32:
            narrow_row(values, dtype, uint16_row(address, dim))
        for state in range(per_element.size):
            size = dim if per_element[state] else 1
            float32_row(state_addresses[state, table] + row * size * 4, size)[:] = np.float32(0)


@parallel
def _initialize(task, num_tasks, memory, states, initial, entries, origin):
    first_row, first_column, max_dim = origin
    words, buffer = empty(max_dim + 2 * BLOCK_WORDS, np.uint32), empty(max_dim, np.float32)  # a 16-bit row
    _initialize_rows(task, num_tasks, memory, states, initial, entries, (first_row, first_column, words, buffer))


def initialize_rows_(
    weights: Any, states: Any, initial: Any, ids: Any = None, rows: Any = None, tables: Any = None, origin: Any = (0, 0)
) -> None:
    num_rows = next((values.numel() for values in (rows, ids) if values is not None), weights[0].shape[0])
    entries = [_NO_IDS if t is None else t.contiguous().numpy() for t in (ids, rows, tables)]
    dims, per_element = [weight.shape[1] for weight in weights], [state.dim() > 1 for state in states[:: len(weights)]]
    num_tasks = max(1, min(num_rows, num_rows * max(dims) // ELEMENTS_PER_TASK))
    (seeds, bounds), addresses = zip(*initial, strict=True), np.array([*map(Tensor.data_ptr, states)], dtype=np.int64)
    state_arrays = addresses.reshape(-1, len(weights)), np.array(per_element, dtype=np.bool_), np.array(dims)
    values = np.array(seeds, dtype=np.int64), np.array([bound * UNIT for bound in bounds], dtype=np.float32)
    args = memory_of(weights), state_arrays, values, (num_rows, *entries), (*origin, max(dims))
    _initialize(torch.get_num_threads(), num_tasks, num_tasks, *args)
