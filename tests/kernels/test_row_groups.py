"""Grouping: the CPU kernel against the reference, and both against lists in a dict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tritonemb as te
from tests.strategies import problems, random_batch
from tritonemb.kernels import row_groups as triton
from tritonemb.kernels.cpu.row_groups import row_groups, sort_pairs
from tritonemb.kernels.row_groups import row_groups_reference
from tritonemb.layout import Layout, make_layout

IMPLEMENTATIONS = {"cpu": row_groups, "reference": row_groups_reference}
Groups = tuple[Tensor, Tensor, Tensor, Tensor]


def grouped_by_hand(configs: Sequence[te.TableConfig], batch: te.KeyedJaggedTensor) -> dict[int, list[int]]:
    """Linear row to the positions that use it, ascending."""
    first_rows, total = {}, 0
    for config in configs:
        first_rows[config.name] = total
        total += config.num_embeddings
    groups: defaultdict[int, list[int]] = defaultdict(list)
    values, offsets, batch_size = batch.values().tolist(), batch.offsets().tolist(), batch.stride()
    for key, name in enumerate(batch.keys()):
        for position in range(offsets[key * batch_size], offsets[(key + 1) * batch_size]):
            for config in configs:
                if name in config.feature_names and 0 <= values[position] < config.num_embeddings:
                    groups[first_rows[config.name] + values[position]].append(position)
    return dict(sorted(groups.items()))


def check_groups(actual: Groups, expected: dict[int, list[int]], capacity: int, total_rows: int) -> None:
    rows, starts, order, num_groups = actual
    assert (rows.dtype, starts.dtype, order.dtype) == (torch.int64, torch.int32, torch.int32)
    assert (rows.shape, starts.shape, order.shape) == ((capacity,), (capacity + 1,), (capacity,))
    assert int(num_groups) == len(expected)
    assert rows[: len(expected)].tolist() == list(expected)
    for group, positions in enumerate(expected.values()):
        assert order[starts[group] : starts[group + 1]].tolist() == positions
    used = sum(map(len, expected.values()))
    assert (rows[len(expected) :] == total_rows).all()
    assert (starts[len(expected) :] == used).all()
    assert (order[used:] == -1).all()


def check_problem(configs: Sequence[te.TableConfig], batch: te.KeyedJaggedTensor, pooled: bool = True) -> None:
    layout = make_layout(configs, batch.keys(), pooled)
    expected = grouped_by_hand(configs, batch)
    results = []
    for function in IMPLEMENTATIONS.values():
        actual = function(batch.values(), batch.offsets(), layout)
        total_rows = sum(config.num_embeddings for config in configs)
        check_groups(actual, expected, batch.values().numel() * layout.multiplicity, total_rows)
        results.append(actual)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("pooled", [True, False])
@given(data=st.data())
@pytest.mark.usefixtures("poisoned")
def test_groups_are_those_of_a_dict(pooled, data):
    check_problem(*data.draw(problems(pooled=pooled)), pooled)


def large_problem(num_rows: Sequence[int], num_values: int, seed: int = 0) -> tuple[Layout, Tensor, Tensor]:
    """Single-id bags: some ids everywhere, some out of range, most of them anywhere."""
    configs = [te.TableConfig(f"table{index}", rows, 4) for index, rows in enumerate(num_rows)]
    generator = torch.Generator().manual_seed(seed)
    values = []
    for rows in num_rows:
        ids = torch.randint(0, rows, (num_values,), generator=generator)
        ids[::3] = torch.randint(0, min(rows, 50), (ids[::3].numel(),), generator=generator)
        ids[::101] = rows
        ids[::103], ids[::107] = -1, rows - 1
        values.append(ids)
    layout = make_layout(configs, [config.name for config in configs], True)
    return layout, torch.cat(values), torch.arange(len(num_rows) * num_values + 1)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "num_rows", [[100_000], [7], [1], [50, 3_000_000], [2**31 + 11], [2**33 + 5], [2**40, 9], [2**62]], ids=str
)
@pytest.mark.usefixtures("poisoned")
def test_large_batches_and_tables_group_alike_on_any_number_of_threads(num_rows, num_threads):
    layout, values, offsets = large_problem(num_rows, 45_001)
    torch.set_num_threads(num_threads)
    result = row_groups(values, offsets, layout)
    assert all(torch.equal(*pair) for pair in zip(result, row_groups_reference(values, offsets, layout), strict=True))


def test_pairs_of_up_to_32_bits_have_4_bytes_and_others_8():
    """16 bits of a position, 16 and 17 of an id."""
    layout, values, offsets = large_problem([1 << 16, (1 << 16) + 1], 45_001)
    torch.set_num_threads(1)  # tables are not cut
    *_, pairs = sort_pairs(values.numpy(), offsets.numpy(), layout, by_bag=False)
    assert pairs.nbytes == 45_002 * (4 + 8)
    actual, expected = (function(values, offsets, layout) for function in IMPLEMENTATIONS.values())
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_a_thousand_tables():
    configs = [te.TableConfig(f"table{index}", index + 1, 4) for index in range(1_000)]
    rows = {config.name: config.num_embeddings for config in configs}
    batch = random_batch(rows, list(reversed(rows)), 3, 2)
    check_problem(configs, batch)


def test_ids_out_of_range_are_left_out():
    configs = [te.TableConfig("large", 10, 1, features=["both"]), te.TableConfig("small", 3, 1, features=["both"])]
    batch = te.KeyedJaggedTensor.from_lists({"both": [[-1, 2, 3], [9, 10], [2]]})
    rows, starts, order, num_groups = row_groups(batch.values(), batch.offsets(), make_layout(configs, ["both"], True))
    assert rows[: int(num_groups)].tolist() == [2, 3, 9, 12]
    assert [order[starts[g] : starts[g + 1]].tolist() for g in range(4)] == [[1, 5], [2], [3], [1, 5]]
    check_problem(configs, te.KeyedJaggedTensor.from_lists({"both": [[], [], []]}))


def test_ids_need_not_be_contiguous():
    config = te.TableConfig("table", 50, 4)
    layout = make_layout([config], ["table"], True)
    values = torch.arange(40)[::4]
    offsets = torch.arange(22)[::2][: values.numel() + 1] // 2
    expected = row_groups_reference(values, offsets, layout)
    for strided in (offsets, torch.stack([offsets, offsets], dim=1)[:, 0]):
        actual = row_groups(values, strided, layout)
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def check_triton(device, values, offsets, layout):
    """The bits of the reference."""
    moved = {name: getattr(layout, name).to(device) for name in ("tables", "lookups", "key_starts")}
    actual = triton.row_groups(values.to(device), offsets.to(device), layout._replace(**moved))
    expected = row_groups_reference(values, offsets, layout)
    assert all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(actual, expected, strict=True))


@pytest.mark.triton
@pytest.mark.parametrize("pooled", [True, False])
@settings(max_examples=8)
@given(data=st.data())
@pytest.mark.usefixtures("poisoned")
def test_triton_groups_as_the_reference(device, pooled, data):
    configs, batch = data.draw(problems(max_tables=3, pooled=pooled))
    values = batch.values().clone()
    values[::5] = -3
    check_triton(device, values, batch.offsets(), make_layout(configs, batch.keys(), pooled))


@pytest.mark.triton
@pytest.mark.parametrize("num_rows", [[700], [50, 3_000_000], [2**31 + 11], [2**40, 9]], ids=str)
@pytest.mark.usefixtures("poisoned")
def test_triton_groups_large_tables_over_several_blocks(device, num_rows):
    layout, values, offsets = large_problem(num_rows, 1_100 // len(num_rows))
    check_triton(device, values, offsets, layout)


@pytest.mark.triton
@pytest.mark.parametrize(("num_blocks", "scanned"), [(2, True), (3, True), (4, False)])  # of 1,024 entries, for 3,000
@pytest.mark.usefixtures("poisoned")
def test_counts_of_many_blocks_are_scanned(device, num_blocks, scanned, monkeypatch):
    """From `num_blocks` on no program reads the counts of all blocks."""
    flags, launch = [], triton.launch

    def noted(*args, **constants):
        flags.extend(constants[name] for name in ("SCANNED",) if name in constants)
        launch(*args, **constants)

    monkeypatch.setattr(triton, "SCANNED_BLOCKS", num_blocks)
    monkeypatch.setattr(triton, "launch", noted)
    layout, values, offsets = large_problem([40, 3_000_000], 1_500)
    check_triton(device, values, offsets, layout)
    assert flags == [scanned]


@pytest.mark.triton
@pytest.mark.parametrize(("values", "first"), [([1, 2, 3, 4, 0, 0], 0), ([9, 9, 1, 2, 3, 4], 2)])
def test_triton_leaves_out_values_that_belong_to_no_bag(device, values, first):
    configs = [te.TableConfig("a", 10, 4), te.TableConfig("b", 10, 4, features=["b", "a"])]
    layout = make_layout(configs, ["a", "b"], True, device)
    rows, starts, order, num_groups = triton.row_groups(
        torch.tensor(values, device=device), torch.arange(first, first + 5, device=device), layout
    )
    assert rows[: int(num_groups)].tolist() == [1, 2, 11, 12, 13, 14]
    assert order[: int(starts[num_groups])].tolist() == [first + place for place in (0, 1, 0, 1, 2, 3)]


@pytest.mark.triton
def test_triton_groups_values_without_samples(device):
    layout = make_layout([te.TableConfig("a", 10, 4)], ["a"], True, device)
    rows, starts, order, num_groups = triton.row_groups(
        torch.tensor([1, 2], device=device), torch.tensor([0], device=device), layout
    )
    assert (rows.tolist(), starts.tolist(), order.tolist(), int(num_groups)) == ([10, 10], [0, 0, 0], [-1, -1], 0)
