"""A row's record: where its fields stand, and views of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonemb.optimizers import OPTIMIZERS, StateSpec
from tritonemb.storage.store import record_of
from tritonemb.types import TABLE_DTYPES


@given(st.integers(1, 40), st.sampled_from(TABLE_DTYPES), st.sampled_from(sorted(OPTIMIZERS)))
def test_fields_stand_side_by_side_and_hold_what_is_written(dim, dtype, optimizer):
    record = record_of(dim, dtype, OPTIMIZERS[optimizer].states)
    assert record.num_bytes % 4 == 0
    assert [field.name for field in record.fields] == ["weight", *(s.name for s in OPTIMIZERS[optimizer].states)]
    needed = sum(field.num_bytes for field in record.fields)
    assert needed <= record.num_bytes < needed + 4
    records = torch.zeros(3, record.num_bytes, dtype=torch.uint8)
    views = record.views(records)
    shapes = [(3, dim), *((3, dim) if state.per_element else (3,) for state in OPTIMIZERS[optimizer].states)]
    assert [tuple(view.shape) for view in views.values()] == shapes
    assert [view.dtype for view in views.values()] == [dtype, *[torch.float32] * (len(views) - 1)]
    for number, view in enumerate(views.values()):
        view.copy_(torch.full(view.shape, number + 1.0))
    for number, view in enumerate(views.values()):  # nothing has overwritten another one
        assert (view.float() == number + 1).all()
    assert records[0].equal(records[2])


def test_a_row_of_one_element_is_no_value_of_a_row():
    record = record_of(1, torch.float32, (StateSpec("element", True), StateSpec("row", False)))
    shapes = {name: tuple(view.shape) for name, view in record.views(torch.zeros(2, 12, dtype=torch.uint8)).items()}
    assert shapes == {"weight": (2, 1), "element": (2, 1), "row": (2,)}


@pytest.mark.parametrize("records", [torch.zeros(2, 7, dtype=torch.uint8), torch.zeros(2, 8), torch.zeros(8).byte()])
def test_views_of_something_else_are_refused(records):
    with pytest.raises(ValueError, match=r"records must be uint8 \[n, 8\]"):
        record_of(2, torch.float32, ()).views(records)
