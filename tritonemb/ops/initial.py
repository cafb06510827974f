"""Initial values of tables; see `kernels/random.py`."""

import torch
from torch import Tensor

from tritonemb.ops.registry import kernel

_ELEMENTS = 1 << 24  # of other dtypes that are drawn at a time as float32


@torch.no_grad()
def fill_initial_(
    weight: Tensor, seed: int, bound: float, first_row: int = 0, first_column: int = 0, rows: Tensor | None = None
) -> None:
    """Fill rows of a table, uniform in ±`bound`; a value depends on the seed, its row and its column alone.

    Args:
        weight: `[R, D]`, any floating dtype; float32 values are rounded to it, to nearest.
        seed: of the table, in [0, 2^63).
        first_row, first_column: the place of the first element in the whole table.
        rows: int64 `[R]`: which rows of the whole table these are; neighbours from `first_row` on if not given.
    """
    assert rows is None or rows.numel() == weight.shape[0]
    draw = kernel("initial_rows", weight.device)
    if not weight.numel():
        return
    if weight.dtype == torch.float32 and weight.is_contiguous():
        draw(weight.detach(), seed, bound, first_row, first_column, rows)
        return
    step = max(1, _ELEMENTS // weight.shape[1])
    for begin in range(0, weight.shape[0], step):
        part = weight[begin : begin + step]
        drawn = torch.empty(part.shape, dtype=torch.float32, device=weight.device)
        own = None if rows is None else rows[begin : begin + step]
        draw(drawn, seed, bound, first_row + begin, first_column, own)
        part.copy_(drawn)
