"""Errors for invalid batches: ids, offsets and gradients, with the table, feature and sample at fault."""

import warnings
from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch import Tensor

from tritonemb.jagged import KeyedJaggedTensor, batch_size_of
from tritonemb.layout import FIRST_ROW, NUM_ROWS, ROW_IDS, ROW_IDS_STRIDE, TABLE, Layout, unpack_names, view_int64


def invalid_id_error(position: int, values: Tensor, offsets: Tensor, layout: Layout) -> ValueError:
    """Return the error for the id at `position` of values, which is outside a table that its key looks up."""
    bag = bisect_right(offsets.tolist(), position) - 1
    key, sample = divmod(bag, batch_size_of(offsets, layout.key_starts))
    value = int(values[position])
    lookups = layout.lookups[int(layout.key_starts[key]) : int(layout.key_starts[key + 1])]
    table = next(t for t in lookups[:, TABLE].tolist() if not 0 <= value < int(layout.tables[t, NUM_ROWS]))
    names = unpack_names(layout.table_names)[table], unpack_names(layout.feature_names)[key]
    return id_out_of_range(*names, sample, position, value, int(layout.tables[table, NUM_ROWS]))


def id_out_of_range(table: str, feature: str, sample: int, position: int, value: int, num_rows: int) -> ValueError:
    return ValueError(
        f"table {table!r}: id {value} of feature {feature!r}, sample {sample} (position {position} of values) is out "
        f"of range; valid ids are 0 to {num_rows - 1}. Map or hash the ids into the table, make the table larger, or "
        'pass bounds_check="ignore" to read such ids as zero'
    )


def find_invalid_id(batch: KeyedJaggedTensor, lookups: Iterable[tuple[str, str, int]]) -> ValueError | None:
    """Return the error for the first id that is out of range; None if all are valid.

    `lookups`: feature, table and number of rows of the table, in the order in which they are checked.
    """
    batch_size = batch.stride()
    for feature, table, num_rows in lookups:
        offsets = batch.offsets()[batch.keys().index(feature) * batch_size :][: batch_size + 1]
        ids = batch.values()[int(offsets[0]) : int(offsets[-1])]
        invalid = ((ids < 0) | (ids >= num_rows)).nonzero()
        if invalid.numel():
            position = int(invalid[0] + offsets[0])
            sample = int(torch.searchsorted(offsets, position, right=True)) - 1
            return id_out_of_range(table, feature, sample, position, int(batch.values()[position]), num_rows)
    return None


def check_offsets(values: Tensor, offsets: Tensor, layout: Layout) -> None:
    """Raise ValueError unless offsets ascend from 0 to the number of values; synchronizes with a GPU."""
    descents = (torch.diff(offsets) < 0).nonzero().flatten().tolist()
    if int(offsets[0]) != 0:
        raise offsets_error(-1, offsets, values.numel(), layout)
    if descents or int(offsets[-1]) != values.numel():
        raise offsets_error([*descents, offsets.numel() - 1][0], offsets, values.numel(), layout)


def offsets_error(bag: int, offsets: Tensor, num_values: int, layout: Layout) -> ValueError:
    """Return the error for offsets that are wrong at `bag`.

    -1: they do not start at 0; the last offset: they do not end at the number of values; else the bag's end is below
    its start or beyond the values.
    """
    if bag < 0:
        return offsets_do_not_start_at_zero(int(offsets[0]))
    if bag == offsets.numel() - 1:
        return offsets_do_not_end_with_values(int(offsets[-1]), num_values)
    key, sample = divmod(bag, batch_size_of(offsets, layout.key_starts))
    feature = unpack_names(layout.feature_names)[key]
    return offsets_do_not_ascend(feature, sample, int(offsets[bag]), int(offsets[bag + 1]), num_values)


def offsets_do_not_start_at_zero(first: int) -> ValueError:
    return ValueError(f"offsets must start with 0, got {first}")


def offsets_do_not_end_with_values(last: int, num_values: int) -> ValueError:
    return ValueError(f"offsets end at {last} but there are {num_values} values")


def offsets_do_not_ascend(feature: str, sample: int, begin: int, end: int, num_values: int) -> ValueError:
    """Return the error for a bag whose offsets descend or exceed the number of values."""
    return ValueError(
        f"offsets must ascend: feature {feature!r}, sample {sample} goes from {begin} to {end} (of {num_values} values)"
    )


def nonfinite_gradient_error(row: int, layout: Layout) -> ValueError:
    """Return the error for linear row `row`, whose summed gradient is NaN or infinite."""
    first_rows = layout.tables[:, FIRST_ROW].tolist()
    table = bisect_right(first_rows, row) - 1
    name, local_row = unpack_names(layout.table_names)[table], row - first_rows[table]
    num_rows, row_ids, stride = layout.tables[table, [NUM_ROWS, ROW_IDS, ROW_IDS_STRIDE]].tolist()
    if row_ids:
        local_row = int(view_int64(row_ids, num_rows * stride, layout.tables.device)[local_row * stride])
    return gradient_not_finite(name, local_row)


def warn_of_skipped_rows(table: str) -> None:
    """Warn that rows of a table were not updated because their gradients were not finite; once per table by default."""
    warnings.warn(
        f"table {table!r}: rows whose gradient is NaN or infinite are not updated; skipped_rows() counts them. Lower "
        'the learning rate, clip with max_gradient=, or choose on_nonfinite="raise" or "ignore"',
        RuntimeWarning,
        stacklevel=2,
    )


def unused_gradient(table: str) -> RuntimeError:
    """Return the error for a table whose weight is used outside of the lookups by which a fused optimizer trains it."""
    return RuntimeError(
        f"table {table!r} has a fused optimizer, and an ordinary gradient, too, which is not applied: its weight is "
        "used outside of its lookups, for example in a penalty or a full softmax; use its lookups only, or train it "
        "without a fused optimizer: te.unfuse the module, or construct the collection without one. To drop that "
        "gradient call zero_grad() of the model"
    )


def gradient_not_finite(table: str, row: int) -> ValueError:
    return ValueError(
        f"table {table!r}: the gradient of row {row} is NaN or infinite; no table was changed. Lower the learning "
        'rate, clip with max_gradient=, or choose on_nonfinite="skip" to leave such rows untouched'
    )
