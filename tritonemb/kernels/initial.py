"""First values of a table's rows, uniform in ±bound: each a function of the table's seed, its row and its column.

    word = Philox-4x32-10(key = seed, counter = (column // 4, row, row >> 32, 0))[column % 4]      as a signed integer
    value = (word >> 8) · bound / 2^23

One product of a 24-bit integer and a float32, so every device rounds alike. A row's values can be had by itself,
wherever it lives and however its table is cut, and a table that nobody has trained need not be anywhere.

Bytes: `4 · R · D` written, `8 · R` read where rows are named. The floor on CPUs is the generator: ten rounds for 16
bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tritonemb.kernels.language import cdiv, jit, launch, next_power_of_2, tl
from tritonemb.kernels.rounding import philox_reference

ELEMENTS_PER_COUNTER = 4
_ELEMENTS = 4096  # of a program


def scale_of(bound: float) -> float:
    """What one unit of a 24-bit integer stands for."""
    return bound / 2**23


@jit(varying=["num_rows", "first_row", "first_column", "seed"])
def _initial_kernel(
    out, rows, num_rows, first_row, first_column, dim, seed, scale, NAMED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + place, mask=place < num_rows, other=0) if NAMED else first_row + place
    begin = first_column % 4  # columns of the first counter that belong to others
    counter = (first_column // 4 + tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)).to(tl.int32)[None, :]
    zero = counter * 0 + (row * 0).to(tl.int32)[:, None]
    key = tl.zeros((ROWS, 1), tl.int64) + seed
    w0, w1, w2, w3 = tl.philox(
        key, counter + zero, row.to(tl.int32)[:, None] + zero, (row >> 32).to(tl.int32)[:, None] + zero, zero
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)).to(tl.int32, bitcast=True)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :] - begin
    mask = (place < num_rows)[:, None] & (column >= 0) & (column < dim)
    tl.store(out + place[:, None] * dim + column, (words >> 8).to(tl.float32) * scale, mask=mask)


def initial_rows(
    out: Tensor, seed: int, bound: float, first_row: int = 0, first_column: int = 0, rows: Tensor | None = None
) -> None:
    """One launch. Arguments as in the reference."""
    num_rows, dim = out.shape
    block = min(next_power_of_2(max(dim + 3, 16)), 1024)
    tile = max(1, _ELEMENTS // block)
    grid = cdiv(num_rows, tile), cdiv(dim + first_column % 4, block)
    launch(
        _initial_kernel, grid, out, out if rows is None else rows.contiguous(), num_rows, first_row, first_column, dim,
        seed, scale_of(bound), NAMED=rows is not None, ROWS=tile, BLOCK=block,
    )  # fmt: skip


def initial_rows_reference(
    out: Tensor, seed: int, bound: float, first_row: int = 0, first_column: int = 0, rows: Tensor | None = None
) -> None:
    """Fill float32 `out` `[R, D]`, contiguous, with the values of rows, from column `first_column` on.

    Args:
        seed: of the table, 63 bits.
        bound: no value is larger.
        first_row: of R neighbours, if `rows` does not name them.
        rows: int64 `[R]`, any rows.
    """
    if rows is None:
        rows = first_row + torch.arange(out.shape[0], device=out.device)
    first, last = first_column // ELEMENTS_PER_COUNTER, cdiv(first_column + out.shape[1], ELEMENTS_PER_COUNTER)
    counters = torch.arange(first, last, device=out.device).expand(rows.numel(), -1)
    words = philox_reference(seed, counters, rows.unsqueeze(1).expand_as(counters), torch.zeros_like(counters))
    begin = first_column % ELEMENTS_PER_COUNTER
    signed = words[:, begin : begin + out.shape[1]].to(torch.int32)
    out.copy_((signed >> 8).to(torch.float32) * scale_of(bound))
