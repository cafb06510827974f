"""CPU twin of `kernels/embedding_bag.py`: one pass over samples and lookups; each row is prefetched and read once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from tritonemb import errors
from tritonemb.jagged import batch_size_of
from tritonemb.kernels.cpu import simd
from tritonemb.kernels.cpu.jit import FEW_ELEMENTS, address_of, addressed, call, inlined_uncounted, parallel
from tritonemb.kernels.cpu.row_groups import (
    GOOD_OFFSETS,
    arrays_of,
    batch_arrays,
    first_bad_bag,
    memory_of,
    scalings_of,
)
from tritonemb.kernels.cpu.simd import LONG, PREFETCH_DISTANCE, dot, empty, float32_row, item_at, prefetch, row_size
from tritonemb.layout import COLUMN, DIM, MEAN, NUM_ROWS, POOLING, TABLE, Batch, Layout, cached_fact
from tritonemb.memory import empty_result

BLOCK = 1024  # samples whose output stays in cache while all features are visited
STREAMED_BYTES = 8 << 20  # from here on stores bypass the caches: the output would evict everything else
NO_POSITION = np.iinfo(np.int64).max


_SUM_TYPES = *[types.int64] * 10, types.boolean


@functools.cache
def sum_address(format_of: Callable[[int], simd.RowFormat], code: int, scalings: tuple[bool, ...]) -> int:
    """Compile or load the sum of bags for rows of a format, by its code; return its address, for `call`.

    It computes float32 `out[bag * pitch :][:size] = Σ_i scales[i] · table[ids[i]]` per bag, in order. Its arguments are
    `out`, `pitch` in bytes, `offsets`, `num_bags`, `ids`, `table`, `num_rows`, `no_row`, `scales`, `size`, `streamed`;
    arrays are given by their addresses: offsets int64 `[num_bags + 1]`, ids from the first bag on, float32 scales or 0
    for none, a row of zeros for ids out of range. `scalings` says whether bags have scales: only loops that are needed
    are compiled. Rows are prefetched. `streamed` stores bypass the caches; `out` and `pitch` must be aligned for them.
    """
    form = format_of(code)

    @simd.emitted(types.void, *_SUM_TYPES)
    def emit(
        builder: Any, out: Any, pitch: Any, offsets: Any, num_bags: Any, ids: Any, table: Any, num_rows: Any,
        no_row: Any, scales: Any, size: Any, streamed: Any,
    ) -> None:  # fmt: skip
        # Positions are relative to the first bag's first id.
        row_bytes = LONG(1) if form.indexed else form.offset(builder, size)
        begin = item_at(builder, LONG, offsets, LONG(0))
        last = builder.sub(builder.sub(item_at(builder, LONG, offsets, num_bags), begin), LONG(1))

        def bag_at(bag: Any) -> tuple[Any, Any]:
            first = item_at(builder, LONG, offsets, bag)
            count = builder.sub(item_at(builder, LONG, offsets, builder.add(bag, LONG(1))), first)
            return builder.sub(first, begin), count

        def row_address(index: Any) -> tuple[Any, Any]:
            row = item_at(builder, LONG, ids, index)
            return row, builder.add(table, builder.mul(row, row_bytes))

        def row_at(index: Any) -> Any:
            row, address = row_address(index)
            return builder.select(builder.icmp_unsigned("<", row, num_rows), address, no_row)

        # Beyond the last id, prefetch the last row again.
        def prefetch_ahead(index: Any, byte_offset: Any, num_columns: int) -> None:
            index = builder.add(index, LONG(PREFETCH_DISTANCE))
            index = builder.select(builder.icmp_signed("<", index, last), index, last)
            address = builder.add(row_address(index)[1], byte_offset)
            address = builder.and_(address, LONG(simd.ADDRESS_MASK)) if form.indexed else address
            for line in form.lines(num_columns):
                simd.emit_prefetch(builder, builder.add(address, LONG(line)))

        bags, rows = (out, pitch, num_bags, bag_at), (row_at, prefetch_ahead)
        simd.emit_sums(builder, form, bags, rows, (scales, scalings), size, streamed)

    def sum_bags(args):
        emit(*args)

    sum_bags.__qualname__ = f"sum_bags_{code}_{'_'.join('scaled' if scaled else 'plain' for scaled in scalings)}"
    return address_of(addressed(sum_bags), _SUM_TYPES)


def _tables_of(weights: Sequence[Tensor], scalings: tuple[bool, ...]) -> tuple[np.ndarray, ...]:
    addresses, dtypes = memory_of(weights)
    return addresses, dtypes, np.array([sum_address(simd.format_of, code, scalings) for code in dtypes.tolist()])


@inlined_uncounted
def _sum_bags(address, out, pitch, bags, rows, streamed):
    """Call a sum; stores bypass the caches if they are aligned for it."""
    (offsets, num_bags, ids), (table, num_rows, no_row, scales, dim) = bags, rows
    past_caches = streamed and (out | pitch) % simd.STREAMED_ALIGNMENT == 0
    arrays = np.int64(offsets), np.int64(num_bags), np.int64(ids), table, num_rows, no_row, np.int64(scales), dim
    call(address, (out, pitch, *arrays, past_caches))


@inlined_uncounted
def _first_bad_position(begin, end, num_rows, values):
    """Return the first of the positions [begin, end) whose id is out of range, else NO_POSITION."""
    num_bad = 0
    for position in range(begin, end):  # without an early exit, which prevents vectorization
        num_bad += 0 if 0 <= values[position] < num_rows else 1
    if num_bad:
        for position in range(begin, end):
            if not 0 <= values[position] < num_rows:
                return position
    return NO_POSITION


@inlined_uncounted
def _fill_scales(first_bag, last_bag, is_mean, offsets, sample_weights, scales):
    """Fill in the scale of each position of bags [first_bag, last_bag)."""
    begin = offsets[first_bag]
    for bag in range(first_bag, last_bag):
        size = offsets[bag + 1] - offsets[bag]
        scale = np.float32(1) / np.float32(size) if is_mean and size > 0 else np.float32(1)
        for position in range(offsets[bag], offsets[bag + 1]):
            scales[position - begin] = scale * sample_weights[position] if sample_weights.size else scale


@inlined_uncounted
def _max_scales(task, num_tasks, sizes, layout, batch):
    """Return the number of positions of the task's largest feature that has scales."""
    (_, lookups, key_starts), (_, offsets, sample_weights), (num_rows, batch_size) = layout, batch, sizes
    first, last, result = num_rows * task // num_tasks, num_rows * (task + 1) // num_tasks, np.int64(0)
    for key in range(key_starts.size - 1):
        for lookup in range(key_starts[key], key_starts[key + 1]):
            if lookups[lookup, POOLING] == MEAN or sample_weights.size:
                result = max(result, offsets[key * batch_size + last] - offsets[key * batch_size + first])
    return result


@inlined_uncounted
def _pool_slice(task, first_bad, sizes, weights, layout, batch, output):
    """Pool the task's samples; `output` ends with a buffer for scales."""
    (num_rows, batch_size), (addresses, dtypes, sums), (tables, lookups, key_starts) = sizes, weights, layout
    (values, offsets, sample_weights), (out, width, zero_row, streamed, scales) = batch, output
    first, last = num_rows * task // first_bad.size, num_rows * (task + 1) // first_bad.size
    # By blocks of samples, by feature, by lookup.
    for block in range(first, last, BLOCK):
        for key in range(key_starts.size - 1):
            first_bag, last_bag = key * batch_size + block, key * batch_size + min(block + BLOCK, last)
            begin, end = offsets[first_bag], offsets[last_bag]
            for lookup in range(key_starts[key], key_starts[key + 1]):
                table, dim, is_mean = lookups[lookup, TABLE], lookups[lookup, DIM], lookups[lookup, POOLING] == MEAN
                num_table_rows, row_bytes = tables[table, NUM_ROWS], row_size(dim, dtypes[table])
                has_scales = is_mean or sample_weights.size > 0
                if has_scales:
                    _fill_scales(first_bag, last_bag, is_mean, offsets, sample_weights, scales)
                for position in range(begin, min(begin + PREFETCH_DISTANCE, end)):
                    prefetch((addresses[table] + values[position] * row_bytes) & simd.ADDRESS_MASK, row_bytes)
                target, factors = out + (block * width + lookups[lookup, COLUMN]) * 4, scales.ctypes.data
                bags = offsets.ctypes.data + first_bag * 8, last_bag - first_bag, values.ctypes.data + begin * 8
                rows = addresses[table], num_table_rows, zero_row, factors if has_scales else 0, dim
                _sum_bags(sums[table], target, width * 4, bags, rows, streamed)
                first_bad[task] = min(first_bad[task], _first_bad_position(begin, end, num_table_rows, values))


@functools.partial(parallel, passes=1)
def _pool_samples(task, first_bad, sizes, weights, layout, batch, output):
    """Pool the task's samples of the output [B, width] at address `output[0]`.

    `weights` has the address of each table, the code of its dtype, and the address of its sum.
    """
    scales = empty(_max_scales(task, first_bad.size, sizes, layout, batch), np.float32)
    _pool_slice(task, first_bad, sizes, weights, layout, batch, (*output, scales))


@parallel
def _gather_values(task, first_bad, sizes, weights, layout, batch, output):
    """Gather the task's rows, one per value, of the output [N, width] at address `output[0]`; see `_pool_samples`."""
    (num_rows, batch_size), (addresses, dtypes, sums) = sizes, weights
    (tables, lookups, key_starts), (values, offsets, sample_weights) = layout, batch
    out, width, zero_row, streamed = output
    first, last = num_rows * task // first_bad.size, num_rows * (task + 1) // first_bad.size
    # Each position is a bag of one id; columns beyond its table's dim are zeroed.
    single_id_offsets = np.arange(BLOCK + 1)
    for key in range(key_starts.size - 1):
        begin = max(first, offsets[key * batch_size])
        end = min(last, offsets[(key + 1) * batch_size])
        for lookup in range(key_starts[key], key_starts[key + 1]):
            table, dim = lookups[lookup, TABLE], lookups[lookup, DIM]
            row_bytes, num_table_rows = row_size(dim, dtypes[table]), tables[table, NUM_ROWS]
            for position in range(begin, min(begin + PREFETCH_DISTANCE, end)):
                prefetch((addresses[table] + values[position] * row_bytes) & simd.ADDRESS_MASK, row_bytes)
            for block in range(begin, end, BLOCK):
                count, target = min(BLOCK, end - block), out + block * width * 4
                bags = single_id_offsets.ctypes.data, count, values.ctypes.data + block * 8
                factors = sample_weights.ctypes.data + block * 4 if sample_weights.size else 0
                rows = addresses[table], num_table_rows, zero_row, factors, dim
                _sum_bags(sums[table], target, width * 4, bags, rows, streamed)
                for position in range(block, block + count):
                    float32_row(out + position * width * 4, width)[dim:] = np.float32(0)
            first_bad[task] = min(first_bad[task], _first_bad_position(begin, end, num_table_rows, values))


def embedding_bag(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
    check_bounds: bool = True, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """See `kernels/embedding_bag.py`. Sums in float32, `[B, width]` or `[N, width]`."""
    tables = cached_fact(weights, _tables_of, scalings_of(layout, sample_weights is not None))
    out = look_up(tables, (values, offsets, sample_weights), layout, check_bounds)
    return out if output_dtype == torch.float32 else out.to(output_dtype)


def look_up(tables: Any, batch: Batch, layout: Layout, check_bounds: bool) -> Tensor:
    """Look up tables, given as the `weights` of `_pool_samples`; float32 `[B, width]` or `[N, width]`."""
    values, offsets, sample_weights = batch
    weights, ids, bag_offsets = batch_arrays(sample_weights, values, offsets)
    if (bag := first_bad_bag(bag_offsets, ids.size)) != GOOD_OFFSETS:
        raise errors.offsets_error(bag, offsets, ids.size, layout)
    batch_size = batch_size_of(offsets, layout.key_starts)
    num_rows = batch_size if layout.pooled else values.numel()
    out = empty_result((num_rows, layout.width), torch.float32)
    if not layout.pooled and layout.lookups.shape[0] < layout.key_starts.numel() - 1:  # a key without a lookup
        out.zero_()
    first_bad = np.array([NO_POSITION] * _num_tasks(num_rows, values, layout))
    sizes, arrays = (num_rows, batch_size), (ids, bag_offsets, weights)
    target = out.data_ptr(), layout.width, _zero_row(layout.width).data_ptr(), out.nbytes >= STREAMED_BYTES
    kernel = _pool_samples if layout.pooled else _gather_values
    kernel(torch.get_num_threads(), first_bad.size, first_bad, sizes, tables, arrays_of(layout), arrays, target)
    if check_bounds and (position := min(first_bad.tolist())) != NO_POSITION:
        raise errors.invalid_id_error(position, values, offsets, layout)
    return out


@functools.lru_cache(maxsize=64)
def _zero_row(width: int) -> Tensor:
    return torch.zeros(width + 1, dtype=torch.float32, device="cpu")  # a quantized row has 4 bytes more than columns


def _num_tasks(num_rows: int, values: Tensor, layout: Layout) -> int:
    if values.numel() * layout.width < FEW_ELEMENTS * layout.lookups.shape[0]:
        return 1
    return max(1, min(torch.get_num_threads(), num_rows))


@parallel
def _sample_weight_gradients(task, num_tasks, batch_size, weights, layout, batch, output):
    (addresses, dtypes), (tables, lookups, key_starts), (values, offsets) = weights, layout, batch
    pooled, grad, width, out = output
    for key in range(key_starts.size - 1):
        for lookup in range(key_starts[key], key_starts[key + 1]):
            table, column, dim = lookups[lookup, TABLE], lookups[lookup, COLUMN], lookups[lookup, DIM]
            row_bytes = row_size(dim, dtypes[table])
            for sample in range(batch_size * task // num_tasks, batch_size * (task + 1) // num_tasks):
                begin, end = offsets[key * batch_size + sample], offsets[key * batch_size + sample + 1]
                scale = np.float32(1) / np.float32(end - begin) if lookups[lookup, POOLING] == MEAN else np.float32(1)
                for position in range(begin, end):
                    row = values[position]
                    if 0 <= row < tables[table, NUM_ROWS]:
                        start = sample * width + column if pooled else position * width
                        product = dot(grad + start * 4, addresses[table] + row * row_bytes, dim, dtypes[table])
                        out[position] += scale * product


def sample_weight_gradient(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, grad: Tensor, layout: Layout
) -> Tensor:
    batch_size = batch_size_of(offsets, layout.key_starts)
    out, (gradient, *indices) = grad.new_zeros(values.numel(), dtype=torch.float32), batch_arrays(grad, values, offsets)
    num_tasks = _num_tasks(batch_size, values, layout)
    args = memory_of(weights), arrays_of(layout), tuple(indices)
    target = layout.pooled, gradient.ctypes.data, layout.width, out.numpy()
    _sample_weight_gradients(torch.get_num_threads(), num_tasks, num_tasks, batch_size, *args, target)
    return out
