"""What a kernel's finding means to the person who brought the batch."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from torch import Tensor

from tritonemb.kernels.layout import FIRST_ROW, NUM_ROWS, TABLE, Layout, batch_size_of


def bad_id(position: int, values: Tensor, offsets: Tensor, layout: Layout) -> ValueError:
    """The id at `position` of values lies outside a table that its key looks up."""
    batch_size = batch_size_of(offsets, layout.key_starts)
    bag = bisect_right(offsets.tolist(), position) - 1
    key, sample = divmod(bag, batch_size)
    value = int(values[position])
    uses = layout.lookups[int(layout.key_starts[key]) : int(layout.key_starts[key + 1])]
    table = next(t for t in uses[:, TABLE].tolist() if not 0 <= value < int(layout.tables[t, NUM_ROWS]))
    num_rows = int(layout.tables[table, NUM_ROWS])
    return ValueError(
        f"table {layout.table_names.splitlines()[table]!r}: id {value} of feature "
        f"{layout.feature_names.splitlines()[key]!r}, sample {sample} (position {position} of values) is out of range; "
        f"valid ids are 0 to {num_rows - 1}. Map or hash the ids into the table, make the table larger, or pass "
        'bounds_check="ignore" to read such ids as zero'
    )


def bad_offsets(bag: int, offsets: Tensor, num_values: int, layout: Layout) -> ValueError:
    """`offsets` does not start at 0, descends behind `bag`, or does not end at the number of values."""
    if bag < 0:
        return ValueError(f"offsets must start with 0, got {int(offsets[0])}")
    if bag == offsets.numel() - 1:
        return ValueError(f"offsets end at {int(offsets[-1])} but there are {num_values} values")
    key, sample = divmod(bag, batch_size_of(offsets, layout.key_starts))
    return ValueError(
        f"offsets must ascend: feature {layout.feature_names.splitlines()[key]!r}, sample {sample} goes from "
        f"{int(offsets[bag])} to {int(offsets[bag + 1])}"
    )


def bad_gradient(row: int, layout: Layout) -> ValueError:
    """The summed gradient of linear row `row` is NaN or infinite."""
    first_rows = layout.tables[:, FIRST_ROW].numpy()
    table = int(np.searchsorted(first_rows, row, side="right")) - 1
    return ValueError(
        f"table {layout.table_names.splitlines()[table]!r}: the gradient of row {row - int(first_rows[table])} is NaN "
        "or infinite; no table was changed. Lower the learning rate, clip with max_gradient=, or pass "
        'nonfinite="skip" to leave such rows untouched'
    )
