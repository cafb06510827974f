"""Counter-based random numbers: stochastic rounding of float32 to 16 bits, and initial values of tables.

Philox-4x32-10 (Salmon et al., SC 2011) with key = the table's seed. Rows and columns are those of the unsharded table,
so that shards draw the same numbers as the unsharded table, and any row's numbers can be generated separately.

Rounding: counter = (column // 8, row, row >> 32, step). Column `j` takes word `j % 8 // 2`, its low half if `j` is
even: the noise of an element depends only on seed, row, column and step. Finite values saturate at the largest one.

Initial values, uniform in ±bound:

    word = Philox-4x32-10(key = seed, counter = (column // 4, row, row >> 32, 0))[column % 4]      as a signed integer
    value = (word >> 8) · bound / 2^23

A single product of a 24-bit integer and a float32, so all devices round alike.
Bytes: `4 · R · D` written, `8 · R` read with ids. CPUs are bound by the generator: ten rounds per 16 bytes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.triton_utils import (
    BFLOAT16,
    CODES,
    by_dtype,
    cdiv,
    jit,
    launch,
    narrow,
    next_power_of_2,
    on_device,
    pointer_to,
    tl,
)
from tritonemb.layout import ELEMENTS_PER_COUNTER, UNIFORMS_PER_COUNTER, UNIT, nonzero

_MASK32 = 0xFFFFFFFF


@jit
def _words(seed, counter, row, step):
    """Return int32 `[ROWS, 4 · C]`: the words of counters (counter `[ROWS, C]`, row `[ROWS]`, row >> 32, step)."""
    zero = counter * 0
    low, high = zero + row.to(tl.int32)[:, None], zero + (row >> 32).to(tl.int32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, counter, low, high, zero + step)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)).to(tl.int32, bitcast=True)


@jit
def random16(seed, row, column, step, BLOCK):
    """Return int32 `[ROWS, BLOCK]` in [0, 2^16): noise of BLOCK ≥ 8 elements of rows `row` from columns `column` on.

    `row` and `column` are int64 `[ROWS]`, columns multiples of 8; `step` is a scalar, or `[ROWS]`.
    """
    counter = (column >> 3).to(tl.int32)[:, None] + tl.arange(0, BLOCK // 8)[None, :]
    steps = step.to(tl.int32)
    if step.type.is_block():
        steps = steps[:, None]
    words = _words(seed[:, None], counter, row, steps)
    return tl.interleave(words & 0xFFFF, (words >> 16) & 0xFFFF)


@jit
def narrow_stochastic(values, noise, CODE):
    """Round float32 to bfloat16 bits (int16) or float16 stochastically, as `narrow_stochastic_by_torch`."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # bfloat16 drops 16 bits; float16 drops 13 of a normal value, and has a fixed gap for subnormal ones.
    if CODE == BFLOAT16:
        up = noise < (magnitude & 0xFFFF)
        rounded = tl.minimum((magnitude >> 16) + up.to(tl.int32), 0x7F7F)
        rounded = (rounded | ((bits >> 16) & 0x8000)).to(tl.int16)
    else:
        normal = magnitude >= 0x38800000
        units = tl.where(normal, 0.0, tl.abs(values)) * 16777216.0  # in 2^-24, the gap of subnormal values
        floor = units.to(tl.int32)
        up = tl.where(normal, (noise >> 3) < (magnitude & 0x1FFF), noise.to(tl.float32) < (units - floor) * 65536.0)
        truncated = tl.where(normal, (magnitude >> 13) - (112 << 10), floor)
        rounded = tl.minimum(truncated + up.to(tl.int32), 0x7BFF) | ((bits >> 16) & 0x8000)
        rounded = rounded.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(magnitude < 0x7F800000, rounded, narrow(values, CODE))


def random16_by_torch(seed: int, rows: Tensor, step: int, dim: int, column: int = 0) -> Tensor:
    """Return int64 `[R, dim]` in [0, 2^16): the noise of rows `rows` (int64 `[R]`) from column `column` on.

    `column` is a multiple of 8.
    """
    first = column // ELEMENTS_PER_COUNTER
    words = philox_by_torch(seed, first, first + cdiv(dim, ELEMENTS_PER_COUNTER), rows, step)
    return torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)[:, :dim]


def philox_by_torch(seed: int, first: int, last: int, rows: Tensor, step: int) -> Tensor:
    """Words of counters (first … last - 1, row, row >> 32, step), int64 `[R, 4 C]` in [0, 2^32); `rows` int64 `[R]`."""
    low, high = np.uint64(_MASK32), np.uint64(32)
    row, counter = np.broadcast_arrays(
        rows.cpu().numpy().astype(np.uint64)[:, None], np.arange(first, last, dtype=np.uint64)
    )
    c0, c1, c2, c3 = counter & low, row & low, row >> high, np.full_like(row, step & _MASK32)
    k0, k1 = seed & _MASK32, seed >> 32
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2  # of 32-bit numbers, hence exact
        c0, c1 = (product1 >> high) ^ c1 ^ np.uint64(k0), product1 & low
        c2, c3 = (product0 >> high) ^ c3 ^ np.uint64(k1), product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    words = np.stack([c0, c1, c2, c3], axis=-1).reshape(rows.numel(), 4 * (last - first))
    return torch.from_numpy(words.astype(np.int64)).to(rows.device)


def narrow_by_torch(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to a 16-bit dtype, to nearest, ties to even; finite values saturate."""
    largest = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).to(dtype)


def narrow_stochastic_by_torch(values: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Round float32 to a 16-bit dtype, away from zero if the noise's upper `b` bits are below `2^b` · distance / gap.

    `b` is 16, but 13 for normal float16 values, which drop 13 bits of the float32. `noise` is int64 in [0, 2^16).
    """
    # Neighbours in the 16-bit grid, and the position of the value between them.
    finite = values.isfinite()
    magnitude = torch.where(finite, values, 0).to(torch.float64).abs().clamp(max=torch.finfo(dtype).max)
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


_ELEMENTS = 1024  # per program: addresses of each row take registers; with more, short rows spill


@jit(varying=["num_rows", "first_row", "first_column"])
def _initialize_kernel(
    weights, states, dims, seeds, scales, num_tables, ids, rows, tables, num_rows, first_row, first_column, CODE, ALIGN,
    ROWS, BLOCK, STATES, PER_ELEMENT,
):  # fmt: skip
    """Initialize ROWS rows, BLOCK columns: with values of `ids`, at `rows` of `tables`."""
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid, row, table, id = index < num_rows, index, (index * 0).to(tl.int32), first_row + index
    if ids is not None:
        id = tl.load(ids + index, mask=valid, other=0)
    if rows is not None:
        row = tl.load(rows + index, mask=valid, other=-1)
        valid = row >= 0
        table = tl.load(tables + index, mask=valid, other=0)
    # Draw words from the counter of the first column on.
    weight, dim = tl.load(weights + table), tl.load(dims + table)
    valid &= weight != 0
    first = tl.program_id(1) * BLOCK
    counter = ((first_column + first) // 4 + tl.arange(0, BLOCK // 4)).to(tl.int32)[None, :]
    words = _words(tl.load(seeds + table)[:, None], counter + (row * 0).to(tl.int32)[:, None], id, 0)
    column = first - first_column % 4 + tl.arange(0, BLOCK)[None, :]  # the first counter may begin earlier
    offset, mask = (row * dim)[:, None] + column, valid[:, None] & (column >= 0) & (column < dim[:, None])
    # Write values, and zeros to states.
    values = (words >> 8).to(tl.float32) * tl.load(scales + table)[:, None]
    tl.store(pointer_to(weight, CODE, ALIGN)[:, None] + offset, narrow(values, CODE), mask=mask)
    for state in tl.static_range(STATES):
        state_pointer = tl.load(states + state * num_tables + table).to(tl.pointer_type(tl.float32))
        if PER_ELEMENT >> state & 1:
            tl.store(state_pointer[:, None] + offset, values * 0.0, mask=mask)
        else:
            tl.store(state_pointer + row, tl.zeros((ROWS,), tl.float32), mask=valid & (first == 0))


def initialize_rows_(
    weights: Any, states: Any, initial: Any, ids: Any = None, rows: Any = None, tables: Any = None, origin: Any = (0, 0)
) -> None:
    """Launch once per dtype. Arguments as in the reference."""
    device, num_states = weights[0].device, len(states) // len(weights)
    per_element = sum((state.dim() > 1) << n for n, state in enumerate(states[:: len(weights)]))
    numbers = (
        [*map(Tensor.data_ptr, states)] or [0],
        [weight.shape[1] for weight in weights],
        [seed for seed, _ in initial],
    )
    scales = on_device([bound * UNIT for _, bound in initial], device, torch.float32)
    num_rows = next((values.numel() for values in (rows, ids) if values is not None), weights[0].shape[0])
    index_tensors = [None if values is None else values.contiguous() for values in (ids, rows, tables)]
    for group in by_dtype(weights):
        num_columns = group.max_dim + origin[1] % UNIFORMS_PER_COUNTER
        block = min(next_power_of_2(max(num_columns, 16)), 1024)
        tile = max(1, _ELEMENTS // block)
        grid = cdiv(num_rows, tile), cdiv(num_columns, block)
        args = *(on_device(values, device) for values in (group.addresses, *numbers)), scales, len(weights)
        options = {"CODE": CODES[group.dtype], "ALIGN": group.row_alignment, "ROWS": tile, "BLOCK": block}
        options |= {"STATES": num_states, "PER_ELEMENT": per_element}
        launch(_initialize_kernel, grid, *args, *index_tensors, num_rows, *origin, **options)


def _draw_by_torch(out: Tensor, initial: tuple[int, float], origin: tuple[int, int], ids: Tensor | None) -> None:
    (seed, bound), (first_row, first_column) = initial, origin
    ids = first_row + torch.arange(out.shape[0], device=out.device) if ids is None else ids
    first, last = first_column // UNIFORMS_PER_COUNTER, cdiv(first_column + out.shape[1], UNIFORMS_PER_COUNTER)
    words = philox_by_torch(seed, first, last, ids, 0)
    begin = first_column % UNIFORMS_PER_COUNTER
    signed = words[:, begin : begin + out.shape[1]].to(torch.int32)
    out.copy_((signed >> 8).to(torch.float32) * bound * UNIT)


def initialize_rows_reference_(
    weights: Any, states: Any, initial: Any, ids: Any = None, rows: Any = None, tables: Any = None, origin: Any = (0, 0)
) -> None:
    """Initialize rows of several tables with random values, and their states with zeros.

    Args:
        weights: `[rows, dim]` of each table, contiguous, float32 or of 16 bits.
        states: the first state of each table, then the second; float32.
        initial: seed, of 63 bits, and bound of each table.
        ids: int64 `[U]`, ids that determine the values; by default consecutive rows from the origin's row on.
        rows, tables: int64 and int32 `[U]`, rows to initialize; negative rows are skipped. By default all rows of one
            float32 table.
        origin: first row and column of this shard in the unsharded table.
    """
    if ids is None or rows is None or tables is None:
        _draw_by_torch(weights[0], initial[0], origin, ids)
        return
    for index, (weight, seed_and_bound) in enumerate(zip(weights, initial, strict=True)):
        entries = nonzero((tables == index) & (rows >= 0))
        values = torch.empty(entries.numel(), weight.shape[1], dtype=torch.float32, device=weight.device)
        _draw_by_torch(values, seed_and_bound, (0, 0), ids[entries])
        weight.index_copy_(0, table_rows := rows[entries], values.to(weight.dtype))
        for state in states[index :: len(weights)]:
            state.index_fill_(0, table_rows, 0.0)
