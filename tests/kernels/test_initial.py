"""First values of rows: the same from every kernel, wherever and however a table lives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import fewer
from tritonemb.ops.registry import load, use_kernels
from tritonemb.ops.row_update import fill_initial_
from tritonemb.types import TABLE_DTYPES

IMPLEMENTATIONS = [pytest.param("cpu"), pytest.param("triton", marks=pytest.mark.triton)]
FAR = 2**33 + 5


def drawn(implementation, device, shape, *args, dtype=torch.float32, rows=None, **options):
    device = device if implementation == "triton" else torch.device("cpu")
    weight = torch.full(shape, float("nan"), dtype=torch.float32, device=device).to(dtype)
    with use_kernels(implementation):
        fill_initial_(weight, *args, **options, rows=None if rows is None else rows.to(device))
    return weight.cpu()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=fewer(40, 6))
@given(
    num_rows=st.sampled_from([0, 1, 3, 70]),
    dim=st.sampled_from([1, 3, 4, 60, 128, 257, 1030]),
    seed=st.integers(0, 2**63 - 1),
    first_row=st.sampled_from([0, 1, FAR]),
    first_column=st.sampled_from([0, 1, 2, 3, 4, 1021]),
    named=st.booleans(),
    data=st.data(),
)
def test_kernels_draw_what_the_reference_draws(
    device, implementation, num_rows, dim, seed, first_row, first_column, named, data
):
    rows = None
    if named:
        subset = st.lists(st.integers(0, 2**40), min_size=num_rows, max_size=num_rows)
        rows = torch.tensor(data.draw(subset), dtype=torch.int64)
    args, options = (seed, 0.125), {"first_row": first_row, "first_column": first_column, "rows": rows}
    result = drawn(implementation, device, (num_rows, dim), *args, **options)
    assert torch.equal(result, drawn("reference", device, (num_rows, dim), *args, **options))


def test_values_are_philox_of_their_place():
    """The published test vector of Philox-4x32-10 whose key and counter are zero."""
    unit = drawn("reference", torch.device("cpu"), (1, 4), 0, 2.0**23)
    expected = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]).to(torch.int32) >> 8
    assert torch.equal(unit[0], expected.float())


@pytest.mark.parametrize("dtype", TABLE_DTYPES)
def test_any_part_of_a_table_has_the_wholes_values(dtype):
    whole = drawn("cpu", torch.device("cpu"), (40, 37), 99, 0.5, dtype=dtype)
    assert float(whole.float().abs().max()) <= 0.5
    rows = torch.tensor([39, 0, 17, 17])
    for column in (0, 1, 6, 35):
        part = drawn("cpu", torch.device("cpu"), (4, 2), 99, 0.5, 0, column, dtype=dtype, rows=rows)
        assert torch.equal(part.float(), whole.float()[rows, column : column + 2])
    part = drawn("cpu", torch.device("cpu"), (9, 5), 99, 0.5, 30, 8, dtype=dtype)
    assert torch.equal(part.float(), whole.float()[30:39, 8:13])


def test_a_view_is_filled_and_nothing_beside_it():
    records = torch.zeros(6, 10)
    fill_initial_(records[:, 2:7], 5, 1.0)
    assert torch.equal(records[:, 2:7], drawn("cpu", torch.device("cpu"), (6, 5), 5, 1.0))
    assert not records[:, :2].any()
    assert not records[:, 7:].any()


def test_values_are_uniform_and_independent():
    values = drawn("cpu", torch.device("cpu"), (4000, 64), 1234, 2.0).double()
    count = values.numel()
    # Five standard deviations of each: uniform in ±2 has variance 4/3, its square a variance of 64/45.
    assert abs(float(values.mean())) < 5 * (4 / 3 / count) ** 0.5
    assert abs(float(values.square().mean()) - 4 / 3) < 5 * (64 / 45 / count) ** 0.5
    ordered = (values.flatten().sort().values + 2) / 4
    distance = float((ordered - (torch.arange(count) + 0.5) / count).abs().max())
    assert distance < 2.23 / count**0.5  # Kolmogorov and Smirnov's bound at a chance of 1e-4
    for other in (values.roll(1, 0), values.roll(1, 1), drawn("cpu", torch.device("cpu"), (4000, 64), 1235, 2.0)):
        assert abs(float((values * other).mean())) < 5 * 4 / 3 / count**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_several_tables_are_initialized_at_once(device, implementation, dtype):
    device = device if implementation == "triton" else torch.device("cpu")

    def initialized(implementation, device):
        dims, dtypes = (3, 70, 1030), (dtype, torch.float32, dtype)
        weights = [torch.full((9, d), 7.0, dtype=t, device=device) for d, t in zip(dims, dtypes, strict=True)]
        states = [torch.full((9,), 7.0, device=device) for _ in dims]
        states += [torch.full((9, dim), 7.0, device=device) for dim in dims]
        ids = torch.tensor([-5, 2**40, 3, 3, 0, 8])
        rows, tables = torch.tensor([8, 0, 4, -1, 5, 6]), torch.tensor([0, 1, 2, 0, 2, 1], dtype=torch.int32)
        place = ids.to(device), rows.to(device), tables.to(device)
        load("initialize_rows_", implementation)(weights, states, [(1, 0.5), (2**63 - 1, 2.0), (0, 1e-3)], *place)
        return [tensor.cpu() for tensor in (*weights, *states)]

    results, expected = initialized(implementation, device), initialized("reference", torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert [int((result != 7.0).flatten(1).any(1).sum()) for result in results[:3]] == [1, 2, 2]
