"""`Layout.tables` in Triton: the table of a linear row, and where a table's numbers stand."""

from __future__ import annotations

from tritonemb.kernels import layout
from tritonemb.kernels.floats import last_at_most
from tritonemb.kernels.language import jit, tl

_SIZE, _NUM_ROWS, _DIM = (tl.constexpr(n) for n in (layout.TABLE_SIZE, layout.NUM_ROWS, layout.ROW_DIM))
_SEED, _ROW_ORIGIN, _COLUMN_ORIGIN = (tl.constexpr(n) for n in (layout.SEED, layout.ROW_ORIGIN, layout.COLUMN_ORIGIN))
_ROW_IDS = tl.constexpr(layout.ROW_IDS)


@jit
def table_of(tables, num_tables, linear):
    """The table that each linear row belongs to."""
    return last_at_most(tables, num_tables, linear, _SIZE)


@jit
def first_row_at(tables, table):
    """Pointers to tables' first linear rows; the others alike."""
    return tables + table.to(tl.int32) * _SIZE  # a product of 64 bits would cost registers


@jit
def num_rows_at(tables, table):
    return first_row_at(tables, table) + _NUM_ROWS


@jit
def dim_at(tables, table):
    return first_row_at(tables, table) + _DIM


@jit
def seed_at(tables, table):
    return first_row_at(tables, table) + _SEED


@jit
def row_origin_at(tables, table):
    return first_row_at(tables, table) + _ROW_ORIGIN


@jit
def row_id(tables, table, row, mask):
    """The row of its table that each row of the memory holds."""
    row_ids = tl.load(first_row_at(tables, table) + _ROW_IDS, mask=mask, other=0)
    found = tl.load(row_ids.to(tl.pointer_type(tl.int64)) + row, mask=row_ids != 0, other=0)
    return tl.where(row_ids != 0, found, row)


@jit
def column_origin_at(tables, table):
    return first_row_at(tables, table) + _COLUMN_ORIGIN
