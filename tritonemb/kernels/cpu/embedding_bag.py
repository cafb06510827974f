"""CPU twin of `kernels/embedding_bag.py`: one pass over samples and lookups, each row read once, asked for ahead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels import errors
from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.arrays import addresses_of, as_float32, as_int64, dtypes_of, share
from tritonemb.kernels.cpu.jagged import check_offsets
from tritonemb.kernels.cpu.jit import compiled, inlined
from tritonemb.kernels.cpu.memory import (
    FLOAT16,
    FLOAT32,
    bfloat16_to_float32,
    element_size,
    float16_to_float32,
    float32_row,
    prefetch,
    uint16_row,
)
from tritonemb.kernels.layout import COLUMN, DIM, MEAN, NUM_ROWS, POOLING, TABLE, Layout, batch_size_of

BLOCK = 256  # samples whose output stays in cache while all features are visited
AHEAD = 24  # values between asking for a row and reading it
NO_POSITION = np.iinfo(np.int64).max


@inlined
def _add_row(sums, row, dtype, scale, first):
    """sums = or += scale * the row at address `row`."""
    if dtype == FLOAT32:
        elements = float32_row(row, sums.size)
        if first:
            for j in range(sums.size):
                sums[j] = scale * elements[j]
        else:
            for j in range(sums.size):
                sums[j] += scale * elements[j]
        return
    if first:
        for j in range(sums.size):
            sums[j] = np.float32(0)
    bits = uint16_row(row, sums.size)
    if dtype == FLOAT16:
        for j in range(sums.size):
            sums[j] += scale * float16_to_float32(bits[j])
    else:
        for j in range(sums.size):
            sums[j] += scale * bfloat16_to_float32(bits[j])


@inlined
def _pool_bag(sums, begin, end, limit, address, dtype, num_rows, mean, values, sample_weights):
    """One bag into `sums`, asking for rows up to position `limit`; returns its first bad position, or NO_POSITION."""
    row_bytes = sums.size * element_size(dtype)
    scale = np.float32(1) / np.float32(end - begin) if mean and end > begin else np.float32(1)
    bad, empty = NO_POSITION, True
    for position in range(begin, end):
        if position + AHEAD < limit:
            ahead = values[position + AHEAD]
            if 0 <= ahead < num_rows:
                prefetch(address + ahead * row_bytes, row_bytes)
        row = values[position]
        if not 0 <= row < num_rows:
            bad = min(bad, position)
            continue
        weight = scale * sample_weights[position] if sample_weights.size else scale
        _add_row(sums, address + row * row_bytes, dtype, weight, empty)
        empty = False
    if empty:
        for j in range(sums.size):
            sums[j] = np.float32(0)
    return bad


@compiled
def _pool_samples(
    first, last, batch_size, addresses, dtypes, tables, lookups, key_starts, values, offsets, sample_weights, out, width
):
    """Samples [first, last) of the output [B, width] at address `out`; returns the lowest bad position."""
    bad = NO_POSITION
    for block in range(first, last, BLOCK):
        block_end = min(block + BLOCK, last)
        for key in range(key_starts.size - 1):
            limit = offsets[key * batch_size + block_end]
            for lookup in range(key_starts[key], key_starts[key + 1]):
                table, column, dim = lookups[lookup, TABLE], lookups[lookup, COLUMN], lookups[lookup, DIM]
                mean, num_rows = lookups[lookup, POOLING] == MEAN, tables[table, NUM_ROWS]
                address, dtype = addresses[table], dtypes[table]
                for sample in range(block, block_end):
                    bag = key * batch_size + sample
                    sums = float32_row(out + (sample * width + column) * 4, dim)
                    found = _pool_bag(
                        sums, offsets[bag], offsets[bag + 1], limit, address, dtype, num_rows, mean, values, sample_weights
                    )
                    bad = min(bad, found)
    return bad


@compiled
def _gather_values(
    first, last, batch_size, addresses, dtypes, tables, lookups, key_starts, values, offsets, sample_weights, out, width
):
    """Rows [first, last), one a value, of the output [N, width] at address `out`; returns the lowest bad position."""
    bad = NO_POSITION
    for key in range(key_starts.size - 1):
        begin = max(first, offsets[key * batch_size])
        end = min(last, offsets[(key + 1) * batch_size])
        for lookup in range(key_starts[key], key_starts[key + 1]):
            table, dim = lookups[lookup, TABLE], lookups[lookup, DIM]
            num_rows, address, dtype = tables[table, NUM_ROWS], addresses[table], dtypes[table]
            for position in range(begin, end):
                elements = float32_row(out + position * width * 4, width)
                found = _pool_bag(
                    elements[:dim], position, position + 1, end, address, dtype, num_rows, False, values, sample_weights
                )
                elements[dim:] = np.float32(0)
                bad = min(bad, found)
    return bad


def embedding_bag(
    weights: Sequence[Tensor],
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    layout: Layout,
    check_bounds: bool,
) -> Tensor:
    """Float32 output, `[B, width]` or `[N, width]`; see `kernels/embedding_bag.py`."""
    check_offsets(values, offsets, layout)
    batch_size = batch_size_of(offsets, layout.key_starts)
    num_rows = batch_size if layout.pooled else values.numel()
    covered = layout.pooled or layout.lookups.shape[0] >= layout.key_starts.numel() - 1
    out = (torch.empty if covered else torch.zeros)(num_rows, layout.width, dtype=torch.float32)
    kernel = _pool_samples if layout.pooled else _gather_values
    args = (
        batch_size, addresses_of(weights), dtypes_of(weights), layout.tables.numpy(), layout.lookups.numpy(),
        layout.key_starts.numpy(), as_int64(values), as_int64(offsets), as_float32(sample_weights), out.data_ptr(),
        layout.width,
    )  # fmt: skip
    bounds = share(num_rows, values.numel() * layout.width // max(1, layout.lookups.shape[0]))
    bad = [NO_POSITION] * (len(bounds) - 1)

    def work(task: int) -> None:
        bad[task] = kernel(bounds[task], bounds[task + 1], *args)

    pool.run(work, len(bad))
    if check_bounds and min(bad) != NO_POSITION:
        raise errors.bad_id(min(bad), values, offsets, layout)
    return out


@inlined(reassociate=True)
def _dot(sums, row, dtype):
    """Σ_j sums[j] · row[j] for the row at address `row`."""
    total = np.float32(0)
    if dtype == FLOAT32:
        elements = float32_row(row, sums.size)
        for j in range(sums.size):
            total += sums[j] * elements[j]
        return total
    bits = uint16_row(row, sums.size)
    if dtype == FLOAT16:
        for j in range(sums.size):
            total += sums[j] * float16_to_float32(bits[j])
    else:
        for j in range(sums.size):
            total += sums[j] * bfloat16_to_float32(bits[j])
    return total


@compiled
def _sample_weight_gradients(
    first, last, batch_size, addresses, dtypes, tables, lookups, key_starts, values, offsets, pooled, grad, width, out
):
    """`out` [N] for the bags of samples [first, last)."""
    for key in range(key_starts.size - 1):
        for lookup in range(key_starts[key], key_starts[key + 1]):
            table, column, dim = lookups[lookup, TABLE], lookups[lookup, COLUMN], lookups[lookup, DIM]
            row_bytes = dim * element_size(dtypes[table])
            for sample in range(first, last):
                begin, end = offsets[key * batch_size + sample], offsets[key * batch_size + sample + 1]
                scale = np.float32(1) / np.float32(end - begin) if lookups[lookup, POOLING] == MEAN else np.float32(1)
                for position in range(begin, end):
                    row = values[position]
                    if 0 <= row < tables[table, NUM_ROWS]:
                        start = sample * width + column if pooled else position * width
                        gradient = float32_row(grad + start * 4, dim)
                        out[position] += scale * _dot(gradient, addresses[table] + row * row_bytes, dtypes[table])


def sample_weight_gradient(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, grad: Tensor, layout: Layout
) -> Tensor:
    """Float32 `[N]`; see `kernels/embedding_bag.py`."""
    batch_size = batch_size_of(offsets, layout.key_starts)
    out, gradient = torch.zeros(values.numel(), dtype=torch.float32), as_float32(grad)
    bounds = share(batch_size, values.numel() * layout.width // max(1, layout.lookups.shape[0]))
    args = (
        batch_size, addresses_of(weights), dtypes_of(weights), layout.tables.numpy(), layout.lookups.numpy(),
        layout.key_starts.numpy(), as_int64(values), as_int64(offsets), layout.pooled, gradient.ctypes.data, layout.width,
        out.numpy(),
    )  # fmt: skip
    pool.run(lambda task: _sample_weight_gradients(bounds[task], bounds[task + 1], *args), len(bounds) - 1)
    return out
