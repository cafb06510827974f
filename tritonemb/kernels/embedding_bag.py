"""Embedding bags of many tables in one launch (FBGEMM calls these table-batched embeddings).

Pooled: `out[b, column(l) : column(l) + dim(l)] = scale · Σ_p s_p · W_l[values_p]` over the positions `p` of bag
`(key(l), b)`, for every lookup `l`; `s` are the per-sample weights (1 if absent), `scale` is 1 (sum) or 1 / bag length
(mean); an empty bag is zero. Not pooled: `out[p, : dim] = s_p · W[values_p]`, zeros to the right of narrower tables.
Ids out of range read as zero. Sums are float32 in the order of positions for every tile: results are reproducible.
Bytes: `B · width · output size` written, `N · dim · element size` of rows and `8 · N` of ids read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.jagged import batch_size_of
from tritonemb.kernels.by_torch import embedding_bag as embedding_bag_reference  # noqa: F401
from tritonemb.kernels.by_torch import sample_weight_gradient as sample_weight_gradient_reference  # noqa: F401
from tritonemb.kernels.triton_utils import (
    BAD_FIRST_OFFSET,
    BAD_ID,
    BAD_LAST_OFFSET,
    BAD_OFFSETS,
    CODES,
    NUM_ROWS,
    TablesOfDtype,
    bits_of,
    by_dtype,
    cdiv,
    error_args,
    field_at,
    jit,
    lanes,
    last_at_most,
    launch,
    narrow,
    next_power_of_2,
    on_device,
    pointer_to,
    poll,
    report,
    row_sum,
    tl,
    widen,
)
from tritonemb.layout import ADDRESS_BITS, INDEXED, Batch, Layout, cached_fact

MAX_BLOCK = 1024  # columns per tile; wider rows take several tiles
VECTORS_IN_FLIGHT = 8  # 16-byte loads that a lane issues before it uses the first
SHORT_BAG_VECTORS_IN_FLIGHT = 4  # loads for several short bags: each vector needs registers for its own sums
MAX_ELEMENTS = 32  # elements per lane in flight, or in sums: 16-bit elements take 32-bit registers once widened
NO_POSITION = tl.constexpr(2**62)
BY_ADDRESS, TAG_SHIFT, ADDRESS_MASK = map(tl.constexpr, (-INDEXED, ADDRESS_BITS, 2**ADDRESS_BITS - 1))


@jit(varying=["batch_size", "num_values"])
def _pool_kernel(
    addresses, layout, batch, out, errors, batch_size, num_keys, num_values, CODE, OUT_CODE, ALIGN, STEP, ROWS, BLOCK,
    UNROLL, CHECK,
):  # fmt: skip
    """Sum ROWS bags of one lookup, BLOCK columns: each bag id by id, with UNROLL rows in flight."""
    tables, lookups, key_starts, multiplicity, width = layout
    values, offsets, sample_weights = batch
    if tl.program_id(0) == 0:
        _check_ends(offsets, num_keys * batch_size, num_values, errors)
    # The program's lookup: a key has up to `multiplicity` lookups; tables of other dtypes have address 0.
    num_blocks = tl.cdiv(batch_size, ROWS)
    lookup_slot = tl.program_id(0) // num_blocks
    key = lookup_slot // multiplicity
    lookup = tl.load(key_starts + key) + lookup_slot % multiplicity
    address = tl.zeros((), tl.int64)
    if lookup < tl.load(key_starts + key + 1):
        table = tl.load(lookups + lookup * 4)
        address = tl.load(addresses + table)
    if address != 0:
        table = tl.load(lookups + lookup * 4)
        # A 64-bit dim would cost registers in every mask, and on AMD wide loads.
        dim = tl.multiple_of(tl.load(lookups + lookup * 4 + 2).to(tl.int32), STEP)
        is_mean = tl.load(lookups + lookup * 4 + 3) == 1
        num_rows = tl.load(field_at(tables, table, NUM_ROWS))
        rows = pointer_to(address, CODE, ALIGN)

        # Bounds and scales of the bags.
        sample = (tl.program_id(0) % num_blocks) * ROWS + tl.arange(0, ROWS)
        bag = key.to(tl.int64) * batch_size + sample
        begin, end, is_invalid = _bounds(offsets, bag, sample < batch_size, num_values)
        if tl.max(is_invalid.to(tl.int32)) != 0:
            _report_bags(offsets, sample, batch_size, num_values, errors, table, key)
        scale = tl.full((ROWS,), 1.0, tl.float32)
        if is_mean:
            scale = tl.div_rn(scale, tl.maximum(end - begin, 1).to(tl.float32))

        # Sum rows; ids out of range read as zero and are counted.
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        num_bad_ids = tl.zeros((ROWS,), tl.int32)
        for first in range(0, tl.max(end - begin), UNROLL):
            for i in tl.static_range(UNROLL):
                position = begin + first + i
                valid = position < end
                row = tl.load(values + position, mask=valid, other=0).to(tl.int64)
                in_range = valid & (row >= 0) & (row < num_rows)
                num_bad_ids += (valid & (in_range == 0)).to(tl.int32)
                mask = in_range[:, None] & (columns[None, :] < dim)
                if CODE < 0:
                    row_values = _decode(rows, row[:, None], dim, columns[None, :], in_range[:, None], CODE, ALIGN)
                else:
                    bits = tl.load(rows + (row[:, None] * dim + columns[None, :]), mask=mask, other=0)
                    row_values = widen(bits, CODE)
                factor = scale
                if sample_weights is not None:
                    factor *= tl.load(sample_weights + position, mask=valid, other=0.0)
                total += row_values * factor[:, None]
        # Loaded after the loop, so that it takes no registers in it; so are the arguments of `_report_id`.
        column = tl.multiple_of(tl.load(lookups + lookup * 4 + 1), STEP)
        tl.store(
            out
            + (sample.to(tl.int64)[:, None] * tl.multiple_of(tl.zeros((), tl.int64) + width, STEP))
            + (column + columns[None, :]),
            narrow(total, OUT_CODE),
            mask=(sample < batch_size)[:, None] & (columns[None, :] < dim),
            cache_modifier=".cs",  # streamed: written once, so it should not evict rows from the L2 cache
        )
        if CHECK:
            if tl.max(num_bad_ids) != 0:
                table = tl.load(lookups + lookup * 4)
                _report_id(batch, sample, batch_size, num_values, num_rows, errors, table, key)


@jit
def _decode(rows, row, dim, columns, in_range, CODE, ALIGN):
    """Load columns of rows that are quantized to -CODE bits, as float32; zeros for rows and columns out of range."""
    mask = in_range & (columns < dim)
    if CODE == BY_ADDRESS:
        bits = (row >> TAG_SHIFT).to(tl.int32)
        start = (row & ADDRESS_MASK).to(tl.pointer_type(tl.uint8))
        byte, shift, code_mask = columns * bits // 8, columns * bits % 8, (1 << bits) - 1
    else:
        PER_BYTE: tl.constexpr = 8 // -CODE
        start = rows + row * (4 + (dim + PER_BYTE - 1) // PER_BYTE)
        byte, shift, code_mask = columns // PER_BYTE, columns % PER_BYTE * -CODE, (1 << -CODE) - 1
    if CODE != BY_ADDRESS and ALIGN % 4 == 0:
        header = tl.load(start.to(tl.pointer_type(tl.uint32)), mask=in_range, other=0)
    else:
        header = tl.load(start, mask=in_range, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            header |= tl.load(start + i, mask=in_range, other=0).to(tl.uint32) << (8 * i)
    scale, bias = (header & 0xFFFF).to(tl.uint16), (header >> 16).to(tl.uint16)
    scale, bias = scale.to(tl.float16, bitcast=True).to(tl.float32), bias.to(tl.float16, bitcast=True).to(tl.float32)
    packed = tl.load(start + 4 + byte, mask=mask, other=0).to(tl.int32)
    codes = (packed >> shift) & code_mask
    return tl.where(mask, codes.to(tl.float32) * scale + bias, 0.0)


@jit
def _bounds(offsets, bag, mask, num_values):
    """Load the bounds of bags, and which offsets are invalid; such bags are made empty."""
    begin = tl.load(offsets + bag, mask=mask, other=0).to(tl.int64)
    end = tl.load(offsets + bag + 1, mask=mask, other=0).to(tl.int64)
    is_invalid = (begin < 0) | (begin > end) | (end > num_values)
    return begin, tl.where(is_invalid, begin, end), is_invalid


@jit
def _report_id(batch, sample, batch_size, num_values, num_rows, errors, table, key):
    """Search these bags for the first id out of range, of which there is one, and report it."""
    values, offsets, _ = batch
    sample = tl.minimum(sample, batch_size - 1)
    bag = key.to(tl.int64) * batch_size + sample
    begin, end, _ = _bounds(offsets, bag, sample < batch_size, num_values)
    bad_positions = tl.full(begin.shape, NO_POSITION, tl.int64)
    for index in range(tl.max(end - begin)):
        position = begin + index
        row = tl.load(values + position, mask=position < end, other=0).to(tl.int64)
        is_bad = (position < end) & ((row < 0) | (row >= num_rows))
        bad_positions = tl.where(is_bad, tl.minimum(bad_positions, position), bad_positions)
    bad_position = tl.min(bad_positions)
    bad_sample = tl.max(tl.where(bad_positions == bad_position, sample, -1))
    report(errors, BAD_ID, (bad_position, tl.load(values + bad_position), table, key, bad_sample, num_rows))


@jit
def _report_bags(offsets, sample, batch_size, num_values, errors, table, key):
    """Report the first bag whose offsets descend, or else the first whose offsets are out of range."""
    offsets += key.to(tl.int64) * batch_size
    begin = tl.load(offsets + sample, mask=sample < batch_size, other=0).to(tl.int64)
    end = tl.load(offsets + sample + 1, mask=sample < batch_size, other=0).to(tl.int64)
    out_of_range = (begin < 0) | (end > num_values)
    bad_sample = tl.min(tl.where(begin > end, sample, tl.where(out_of_range, sample + batch_size, 2 * batch_size)))
    bad_sample = bad_sample % batch_size
    first, last = tl.load(offsets + bad_sample), tl.load(offsets + bad_sample + 1)
    report(errors, BAD_OFFSETS, (first, last, table, key, bad_sample, num_values))


@jit
def _check_ends(offsets, num_bags, num_values, errors):
    """Report offsets that do not begin with 0, or do not end with the number of values."""
    first, last = tl.load(offsets).to(tl.int64), tl.load(offsets + num_bags).to(tl.int64)
    if first != 0:
        report(errors, BAD_FIRST_OFFSET, (first, last, 0, 0, 0, num_values))
    if last != num_values:
        report(errors, BAD_LAST_OFFSET, (first, last, 0, 0, 0, num_values))


@jit(varying=["batch_size", "num_values"])
def _gather_kernel(
    addresses, layout, batch, out, errors, batch_size, num_keys, num_values, CODE, OUT_CODE, ALIGN, STEP, ROWS, BLOCK,
    CHECK,
):  # fmt: skip
    """Copy the row of each of ROWS positions, whose tables may differ; zeros to the right of narrow ones."""
    tables, lookups, key_starts, _, width = layout
    values, offsets, sample_weights = batch
    # Bag, lookup and table of each position.
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = position < num_values
    bag = last_at_most(offsets, num_keys * batch_size, position)
    key = bag // batch_size
    lookup = tl.load(key_starts + key)
    in_bag = (position >= tl.load(offsets)) & (position < tl.load(offsets + num_keys * batch_size))
    has_lookup = valid & in_bag & (lookup < tl.load(key_starts + key + 1))
    table = tl.load(lookups + lookup * 4, mask=has_lookup, other=0)
    address = tl.load(addresses + table)
    has_lookup = has_lookup & (address != 0)
    dim = tl.multiple_of(tl.load(lookups + lookup * 4 + 2, mask=has_lookup, other=0).to(tl.int32), STEP)
    num_rows = tl.load(field_at(tables, table, NUM_ROWS))
    # Read the rows; those of ids out of range as zeros.
    row = tl.load(values + position, mask=valid, other=0).to(tl.int64)
    in_range = has_lookup & (row >= 0) & (row < num_rows)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows, mask = pointer_to(address, CODE, ALIGN)[:, None], in_range[:, None] & (columns[None, :] < dim[:, None])
    if CODE < 0:
        result = _decode(rows, row[:, None], dim[:, None], columns[None, :], in_range[:, None], CODE, ALIGN)
    else:
        result = widen(tl.load(rows + (row * dim)[:, None] + columns[None, :], mask=mask, other=0), CODE)
    if sample_weights is not None:
        result *= tl.load(sample_weights + position, mask=valid, other=0.0)[:, None]
    tl.store(
        out + position[:, None] * tl.multiple_of(tl.zeros((), tl.int64) + width, STEP) + columns[None, :],
        narrow(result, OUT_CODE),
        mask=(has_lookup | (valid & (in_bag == 0)))[:, None] & (columns[None, :] < width),
        cache_modifier=".cs",
    )
    # Report invalid offsets, and the first id out of range.
    if tl.program_id(0) == 0:
        _check_ends(offsets, num_keys * batch_size, num_values, errors)
    if CHECK:
        is_bad = has_lookup & (in_range == 0)
        first_bad = tl.min(tl.where(is_bad, position, NO_POSITION))
        if first_bad != NO_POSITION:
            at_first = is_bad & (position == first_bad)
            bad_table, bad_key = tl.max(tl.where(at_first, table, -1)), tl.max(tl.where(at_first, key, -1))
            bad_sample = tl.max(tl.where(at_first, bag % batch_size, -1))
            bound = tl.max(tl.where(at_first, num_rows, -1))
            report(errors, BAD_ID, (first_bad, tl.load(values + first_bad), bad_table, bad_key, bad_sample, bound))


@jit(varying=["batch_size", "num_values"])
def _sample_weight_gradient_kernel(
    addresses, layout, values, offsets, grad, out, batch_size, num_keys, num_values, max_dim, CODE, GRAD_CODE, ALIGN,
    STEP, POOLED, ROWS, BLOCK,
):  # fmt: skip
    """Add to `out` the dot products of ROWS positions' rows with the gradients of their bags."""
    tables, lookups, key_starts, multiplicity, width = layout
    # Bag and row of each position.
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = position < num_values
    bag = last_at_most(offsets, num_keys * batch_size, position)
    key, sample = bag // batch_size, bag % batch_size
    length = tl.load(offsets + bag + 1).to(tl.float32) - tl.load(offsets + bag).to(tl.float32)
    row = tl.load(values + position, mask=valid, other=0).to(tl.int64)
    total = tl.load(out + position, mask=valid, other=0.0)
    # For each lookup of the position's key: the dot product, BLOCK columns at a time.
    for lookup_slot in range(multiplicity):
        lookup = tl.load(key_starts + key) + lookup_slot
        has_row = valid & (lookup < tl.load(key_starts + key + 1))
        has_row = has_row & (position >= tl.load(offsets)) & (position < tl.load(offsets + num_keys * batch_size))
        table = tl.load(lookups + lookup * 4, mask=has_row, other=0)
        address = tl.load(addresses + table)
        has_row = has_row & (address != 0) & (row >= 0) & (row < tl.load(field_at(tables, table, NUM_ROWS)))
        column = tl.multiple_of(tl.load(lookups + lookup * 4 + 1, mask=has_row, other=0), STEP)
        dim = tl.multiple_of(tl.load(lookups + lookup * 4 + 2, mask=has_row, other=0).to(tl.int32), STEP)
        is_mean = tl.load(lookups + lookup * 4 + 3, mask=has_row, other=0) == 1
        row_stride = tl.multiple_of(tl.zeros((), tl.int64) + width, STEP)
        start = sample * row_stride + column if POOLED else position * row_stride
        product = tl.zeros((ROWS,), tl.float32)
        for first in range(0, max_dim, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            mask = has_row[:, None] & (columns[None, :] < dim[:, None])
            rows = pointer_to(address, CODE, ALIGN)[:, None] + (row * dim)[:, None] + columns[None, :]
            weight = widen(tl.load(rows, mask=mask, other=0), CODE)
            gradient = widen(tl.load(grad + start[:, None] + columns[None, :], mask=mask, other=0), GRAD_CODE)
            product += row_sum(weight * gradient)
        scale = tl.where(is_mean, tl.div_rn(1.0, tl.maximum(length, 1.0)), 1.0)
        total += tl.where(has_row, product * scale, 0.0)
    tl.store(out + position, total, mask=valid)


class Tile(NamedTuple):
    """Tile of a program: `rows` bags, `block` columns, `unroll` ids of a bag in flight, by `num_warps` warps."""

    rows: int
    block: int
    unroll: int
    num_warps: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants of kernels, without `unroll`."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.num_warps}


def choose_tile(max_dim: int, item_size: int, mean_length: float) -> Tile:
    """Choose a tile: VECTORS_IN_FLIGHT loads of 16 bytes per lane, along a long bag, or of several short bags.

    Not both: several bags per lane with several ids each take more registers than compilers allot; they would spill.
    """
    block = min(MAX_BLOCK, next_power_of_2(max_dim))
    warp_elements = lanes() * 16 // item_size
    num_warps = max(1, min(4, block // (2 * warp_elements)))
    rows = max(1, min(lanes(), warp_elements // block))
    in_flight = VECTORS_IN_FLIGHT // max(1, block // (num_warps * warp_elements))
    unroll = min(in_flight, next_power_of_2(max(1, round(mean_length))))
    is_long = unroll == in_flight
    max_sums = min(MAX_ELEMENTS, SHORT_BAG_VECTORS_IN_FLIGHT * 16 // item_size)
    if not is_long:
        rows = min(lanes(), rows * in_flight, max(1, max_sums * lanes() * num_warps // block))
    sums = max(1, rows * block // (lanes() * num_warps))
    return Tile(rows, block, min(unroll, max(1, (MAX_ELEMENTS if is_long else max_sums) // sums)), num_warps)


def embedding_bag(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, sample_weights: Tensor | None, layout: Layout,
    check_bounds: bool = True, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Launch once per dtype of tables, on `values`' device or in pinned memory. Arguments as in the reference.

    An id out of range reads as zero; on a GPU the next lookup or update, or `check_errors`, raises its error.
    """
    batch = values, offsets, sample_weights
    return look_up(cached_fact(weights, by_dtype), batch, layout, check_bounds, output_dtype)


def look_up(
    groups: Sequence[TablesOfDtype], batch: Batch, layout: Layout, check_bounds: bool, output_dtype: torch.dtype
) -> Tensor:
    """Launch once per group of tables; see `embedding_bag`."""
    values, offsets, sample_weights = batch
    device, num_values = values.device, values.numel()
    poll(device)
    batch_size, num_keys = batch_size_of(offsets, layout.key_starts), layout.key_starts.numel() - 1
    scales = None if sample_weights is None else sample_weights.to(torch.float32).contiguous()
    arrays = values.contiguous(), offsets.contiguous(), scales
    assert layout.pooled or layout.multiplicity <= 1
    # Allocate; only positions without a lookup need zeros.
    out = torch.empty(batch_size if layout.pooled else num_values, layout.width, dtype=output_dtype, device=device)
    if not layout.pooled and layout.lookups.shape[0] < num_keys:
        out.zero_()  # positions of keys without a lookup
    if batch_size * num_keys == 0:
        return out.zero_()
    # Launch by dtype.
    for tables in groups:
        if layout.pooled:
            mean_length = num_values / (batch_size * num_keys)
            kernel, tile = _pool_kernel, choose_tile(tables.max_dim, tables.dtype.itemsize, mean_length)
            num_programs = cdiv(batch_size, tile.rows) * num_keys * layout.multiplicity
            grid, unroll = (num_programs, cdiv(tables.max_dim, tile.block)), {"UNROLL": tile.unroll}
        else:
            kernel, tile = _gather_kernel, choose_tile(layout.width, tables.dtype.itemsize, 1.0)
            grid, unroll = (cdiv(num_values, tile.rows), cdiv(layout.width, tile.block)), {}
        args = on_device(tables.addresses, device), layout.kernel_args, arrays, bits_of(out), error_args(layout, device)
        options = {"OUT_CODE": CODES[output_dtype], "CHECK": check_bounds, **tile.constants, **tables.constants}
        launch(kernel, grid, *args, batch_size, num_keys, num_values, **unroll, **options)
    if device.type != "cuda":
        poll(device)
    return out


def sample_weight_gradient(
    weights: Sequence[Tensor], values: Tensor, offsets: Tensor, grad: Tensor, layout: Layout
) -> Tensor:
    """Gradient of per-sample weights, float32 `[N]`. Arguments as in the reference."""
    values, offsets, grad = values.contiguous(), offsets.contiguous(), grad.contiguous()
    out = torch.zeros(values.numel(), dtype=torch.float32, device=values.device)
    batch_size, num_keys = batch_size_of(offsets, layout.key_starts), layout.key_starts.numel() - 1
    if batch_size * num_keys == 0:
        return out
    for tables in cached_fact(weights, by_dtype):
        tile = choose_tile(tables.max_dim, tables.dtype.itemsize, 1.0)
        args = on_device(tables.addresses, values.device), layout.kernel_args, values, offsets, bits_of(grad), out
        sizes = batch_size, num_keys, values.numel(), tables.max_dim
        options = {"GRAD_CODE": CODES[grad.dtype], "POOLED": layout.pooled, **tile.constants, **tables.constants}
        launch(_sample_weight_gradient_kernel, (cdiv(values.numel(), tile.rows),), *args, *sizes, **options)
    return out
