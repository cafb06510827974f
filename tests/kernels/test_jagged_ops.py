"""Permutation and bucketization of jagged batches: kernels against Python lists."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import fewer
from tests.strategies import ID_DTYPES, id_dtypes, seeds
from tritonemb.kernels import jagged as kernels
from tritonemb.layout import segment_offsets
from tritonemb.ops.jagged import block_bucketize, jagged_permute
from tritonemb.ops.registry import CPU, load

WEIGHT_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Batch(NamedTuple):
    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    num_keys: int
    batch_size: int

    def to(self, device: torch.device | str) -> Batch:
        weights = None if self.weights is None else self.weights.to(device)
        return self._replace(values=self.values.to(device), offsets=self.offsets.to(device), weights=weights)


@st.composite
def batches(draw: st.DrawFn, max_length: int = 40) -> Batch:
    """Ids small, large and negative; at times room behind the last offset."""
    num_keys, batch_size = draw(st.sampled_from((0, 1, 2, 5))), draw(st.sampled_from((0, 1, 3, 8)))
    generator = torch.Generator().manual_seed(draw(seeds))
    longest = draw(st.sampled_from([length for length in (0, 1, 4, 40) if length <= max_length]))
    lengths = torch.randint(0, longest + 1, (num_keys * batch_size,), generator=generator)
    offsets = segment_offsets(lengths).to(draw(id_dtypes))
    num_values = int(offsets[-1]) + draw(st.sampled_from((0, 0, 3)))
    ids = torch.randint(-3, draw(st.sampled_from((5, 100, 2**31))), (num_values,), generator=generator)
    dtype = draw(st.sampled_from(WEIGHT_DTYPES))
    weights = None if dtype is None else torch.randn(num_values, generator=generator).to(dtype)
    return Batch(ids.to(draw(id_dtypes)), offsets, weights, num_keys, batch_size)


def test_segment_offsets():
    assert segment_offsets(torch.tensor([2, 0, 5], dtype=torch.int32)).tolist() == [0, 2, 2, 7]
    assert segment_offsets(torch.empty(0, dtype=torch.int64)).tolist() == [0]
    assert segment_offsets(torch.full((3,), 2**30, dtype=torch.int32)).tolist() == [0, 2**30, 2**31, 3 * 2**30]


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_ids_of_no_owner_stay_as_they_are(dtype):
    largest = torch.iinfo(dtype).max
    values = torch.tensor([-1, 20, largest, -largest - 1, 19], dtype=dtype)
    ids, lengths, unbucketize, _ = block_bucketize(values, torch.tensor([0, 5]), torch.tensor([10]), 2)
    assert lengths.tolist() == [2, 3]
    assert ids.tolist() == [-1, -largest - 1, 20, largest, 9]
    assert unbucketize.tolist() == [0, 2, 3, 1, 4]


def permute_by_hand(
    values: Tensor, offsets: Tensor, order: Tensor, weights: Tensor | None, num_keys: int, num_values: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bag by bag; arguments and result as of the kernels."""
    batch_size, ends = (offsets.numel() - 1) // max(1, num_keys), offsets.tolist()
    bags = [key * batch_size + sample for key in order.tolist() for sample in range(batch_size)]
    places = [place for bag in bags for place in range(ends[bag], ends[bag + 1])][:num_values]

    def moved(source: Tensor) -> Tensor:
        out = source.new_zeros(num_values)
        out[: len(places)] = source[places]
        return out

    out_offsets = offsets.new_tensor([0, *itertools.accumulate(ends[bag + 1] - ends[bag] for bag in bags)])
    return moved(values), out_offsets, values.new_empty(0) if weights is None else moved(weights)


def bucketize_by_hand(
    values: Tensor, offsets: Tensor, block_sizes: Tensor, weights: Tensor | None, num_owners: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Id by id; arguments and result as of the kernels."""
    ids, ends, num_bags, sizes = values.tolist(), offsets.tolist(), offsets.numel() - 1, block_sizes.tolist()
    lengths: list[int] = [0] * (num_owners * num_bags)
    owned: list[list[int]] = [[] for _ in range(num_owners)]
    for bag in range(num_bags):
        size = max(1, sizes[bag // (num_bags // len(sizes))])
        for position in range(ends[bag], ends[bag + 1]):
            owner, row = divmod(ids[position], size)
            if 0 <= owner < num_owners:
                ids[position] = row
            owner = max(0, min(owner, num_owners - 1))
            owned[owner].append(position)
            lengths[owner * num_bags + bag] += 1
    order = [*itertools.chain(*owned), *range(ends[-1], len(ids))]
    places = torch.empty(len(ids), dtype=torch.int32, device=values.device)
    places[order] = torch.arange(len(ids), dtype=torch.int32, device=values.device)
    out_weights = values.new_empty(0) if weights is None else weights[order]
    return values.new_tensor(ids)[order], offsets.new_tensor(lengths), places, out_weights


def same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(
        f.dtype == e.dtype and f.stride() == e.stride() and torch.equal(f, e)
        for f, e in zip(actual, expected, strict=True)
    )


@given(batches(), st.sampled_from((1, 2, 3, 9)), st.data())
@pytest.mark.usefixtures("poisoned")
def test_ops_and_cpu_kernels_do_what_is_done_by_hand(batch, num_owners, data):
    values, offsets, weights, num_keys, _ = batch
    sizes = st.sampled_from((1, 3, 7, 40, 2**33))
    blocks = torch.tensor(data.draw(st.lists(sizes, min_size=num_keys, max_size=num_keys)), dtype=torch.int64)
    expected = bucketize_by_hand(values, offsets, blocks, weights, num_owners)
    assert same(kernels.block_bucketize_reference(values, offsets, blocks, weights, num_owners), expected)
    ids, lengths, places, moved = block_bucketize(values, offsets, blocks, num_owners, weights)
    assert same((ids, lengths, places), expected[:3])
    assert (moved is None) == (weights is None)
    assert moved is None or torch.equal(moved[places], weights)

    order = data.draw(st.lists(st.integers(0, num_keys - 1), max_size=7)) if num_keys else []
    order, num_values = torch.tensor(order, dtype=torch.int64), values.numel()
    room = data.draw(st.one_of(st.just(num_values), st.integers(0, 2 * num_values + 4)))
    expected = permute_by_hand(values, offsets, order, weights, num_keys, room)
    assert same(kernels.jagged_permute_reference(values, offsets, order, weights, num_keys, room), expected)
    moved = jagged_permute(values, offsets, order, num_keys, weights, None if room == num_values else room)
    assert same(moved[:2], expected[:2])
    assert (moved[2] is None) == (weights is None)
    assert moved[2] is None or torch.equal(moved[2], expected[2])


@pytest.mark.triton
@settings(max_examples=25)
@given(batches(max_length=4), st.data())
@pytest.mark.usefixtures("poisoned")
def test_triton_permutes_as_by_hand(device, batch, data):
    keys = st.lists(st.integers(0, batch.num_keys - 1), max_size=7) if batch.num_keys else st.just([])
    order = torch.tensor(data.draw(keys), dtype=torch.int64, device=device)
    batch, room = batch.to(device), data.draw(st.sampled_from((0, 5, 200)))
    args = (batch.values, batch.offsets, order, batch.weights, batch.num_keys, room)
    assert same(kernels.jagged_permute(*args), permute_by_hand(*args))


@pytest.mark.triton
@settings(max_examples=25)
@given(batches(), st.sampled_from((1, 2, 3, 9)), st.data())
@pytest.mark.usefixtures("poisoned")
def test_triton_bucketizes_as_by_hand(device, batch, num_owners, data):
    num_keys = batch.num_keys
    blocks = data.draw(st.lists(st.sampled_from((1, 7, 40, 2**33)), min_size=num_keys, max_size=num_keys))
    batch, sizes = batch.to(device), torch.tensor(blocks, dtype=torch.int64, device=device)
    args = (batch.values, batch.offsets, sizes, batch.weights, num_owners)
    assert same(kernels.block_bucketize(*args), bucketize_by_hand(*args))


@pytest.mark.triton
def test_triton_bucketizes_a_batch_of_several_tiles(device):
    size = fewer(2500, 320)  # tiles of 1024, of 64 if they are interpreted
    values = torch.randint(0, 300, (size,), device=device)
    offsets = torch.tensor([0, 0, 2 * size // 3, 2 * size // 3 + 1, size - 10], device=device)
    args = (values, offsets, torch.tensor([100, 37], device=device), torch.rand(size, device=device), 5)
    assert same(kernels.block_bucketize(*args), bucketize_by_hand(*args))


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_cpu_kernels_divide_a_batch_among_threads(dtype, monkeypatch):
    """More ids than one task gets, in long and empty bags; both ops as their references."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (7 * 300,), generator=generator)
    lengths[300:600], lengths[1000] = 0, 5_000
    offsets = segment_offsets(lengths).to(dtype)
    values = torch.randint(-5, 900, (int(offsets[-1]) + 11,), generator=generator).to(dtype)
    weights = torch.rand(values.numel(), generator=generator)
    blocks, order = torch.tensor([100, 1, 300, 7, 900, 45, 110]), torch.tensor([6, 0, 1, 3, 3, 2])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    args = (values, offsets, blocks, weights, 19)
    assert same(load("block_bucketize", CPU)(*args), kernels.block_bucketize_reference(*args))
    args = (values, offsets, order, weights, 7, values.numel())
    assert same(load("jagged_permute", CPU)(*args), kernels.jagged_permute_reference(*args))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 3, 3, 4], "must start with 0, got 1"),
        ([0, 1, 2, 3, 6], "end at 6 but there are 5 values"),
        ([0, 1, 3, 2, 5], "feature '1', sample 0 goes from 3 to 2"),
        ([0, 9, 3, 4, 5], "feature '0', sample 1 goes from 9 to 3"),
    ],
)
def test_cpu_kernels_refuse_offsets_that_leave_the_values(offsets, message):
    values, offsets = torch.arange(5), torch.tensor(offsets)
    with pytest.raises(ValueError, match=message):
        block_bucketize(values, offsets, torch.tensor([3, 3]), 2)
    with pytest.raises(ValueError, match=message):
        jagged_permute(values, offsets, torch.tensor([1, 0]), 2)


def test_permute_refuses_keys_that_the_batch_lacks():
    for key in (-1, 2):
        with pytest.raises(ValueError, match=f"order must have keys from 0 to 1, got .*{key}"):
            jagged_permute(torch.arange(3), torch.tensor([0, 1, 3]), torch.tensor([0, key]), 2)


def test_user_mistakes_have_a_name():
    values, offsets, order = torch.arange(3), torch.tensor([0, 1, 3]), torch.tensor([0])
    for error, message, args in (
        (TypeError, "ids must be int32 or int64", (values.float(), offsets, order, 2)),
        (TypeError, r"offsets must be torch\.int32 or torch\.int64", (values, offsets.float(), order, 2)),
        (TypeError, r"order must be torch\.int64", (values, offsets, order.int(), 2)),
        (ValueError, r"a multiple of 3 \(keys\) plus 1 elements, got 3", (values, offsets, order, 3)),
        (ValueError, "weights must have the shape of values", (values, offsets, order, 2, torch.rand(2))),
        (ValueError, "num_values must not be negative", (values, offsets, order, 2, None, -1)),
    ):
        with pytest.raises(error, match=message):
            jagged_permute(*args)
    with pytest.raises(ValueError, match="num_owners must be at least 1, got 0"):
        block_bucketize(values, offsets, torch.tensor([2, 2]), 0)
