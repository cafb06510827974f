"""Sharded tables in checkpoints: whatever saved them, however they are cut, they are loaded with the same bits."""

import copy
import io
import pickle
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint

from tests.sharding.cuts import Cut, draw_cuts, holds, shapes, shards_of, values
from tritonemb.comm.group import RankGroup
from tritonemb.sharding import sharded_tensor
from tritonemb.sharding.sharded_tensor import LocalShard, TableShards

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PIECES = (1, 64, 1 << 27)  # bytes written at once: single rows, some rows, all


def save(rank: int, folder: str, whole: torch.Tensor, cuts: list[Cut], piece_bytes: int) -> None:
    state = {"a.t.weight": shards_of(rank, whole, cuts), "step": torch.tensor(7)}
    with patch.object(sharded_tensor, "PIECE_BYTES", piece_bytes):
        checkpoint.save(state, checkpoint_id=folder)


def load(rank: int, folder: str, whole: torch.Tensor, cuts: list[Cut]) -> bool:
    shards = shards_of(rank, whole, cuts, value=-1.0)
    state = {"a.t.weight": shards, "step": torch.tensor(0)}
    checkpoint.load(state, checkpoint_id=folder)
    return holds(rank, shards, whole) and int(state["step"]) == 7


def gather(rank: int, whole: torch.Tensor, cuts: list[Cut], piece_bytes: int) -> bool:
    with patch.object(sharded_tensor, "PIECE_BYTES", piece_bytes):
        return torch.equal(shards_of(rank, whole, cuts).gather(RankGroup.world()), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10)
@given(data=st.data())
@pytest.mark.few(1)
def test_plain_tensors_and_shards_read_each_other(ranks, tmp_path_factory, data, dtype):
    shape, seed = data.draw(shapes()), data.draw(st.integers(0, 10_000))
    whole, folder = values(shape, dtype, seed), tmp_path_factory.mktemp("saved")
    plain = {"a.t.weight": whole, "step": torch.tensor(7)}
    checkpoint.save(plain, checkpoint_id=folder / "plain", no_dist=True)
    assert all(ranks(2).run(load, str(folder / "plain"), whole, draw_cuts(shape, 2, seed)))
    ranks(2).run(save, str(folder / "shards"), whole, draw_cuts(shape, 2, seed), data.draw(st.sampled_from(PIECES)))
    assert all(ranks(2).run(load, str(folder / "shards"), whole, draw_cuts(shape, 2, seed + 1)))
    state = {"a.t.weight": torch.zeros_like(whole), "step": torch.tensor(0)}
    checkpoint.load(state, checkpoint_id=folder / "shards", no_dist=True)
    assert torch.equal(state["a.t.weight"], whole)
    assert int(state["step"]) == 7


@given(data=st.data())
def test_every_rank_gathers_the_whole(ranks, data):
    shape, dtype, seed = data.draw(shapes()), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 10_000))
    world = data.draw(st.sampled_from([2, 4]))
    arguments = (values(shape, dtype, seed), draw_cuts(shape, world, seed), data.draw(st.sampled_from(PIECES)))
    assert all(ranks(world).run(gather, *arguments))


def gather_with_gaps(rank: int, whole: torch.Tensor, cuts: list[Cut]) -> str:
    try:
        shards_of(rank, whole, cuts).gather(RankGroup.world())
    except ValueError as error:
        return str(error)
    return ""


def test_gaps_and_overlaps_are_named_on_every_rank(ranks):
    whole = values((10, 6), torch.float32)
    left, right = Cut((0, 10), (0, 4), (0,)), Cut((0, 8), (4, 6), (1,))
    gap = "rows 8:10, columns 4:6 of a sharded table are saved by no rank"
    assert ranks(2).run(gather_with_gaps, whole, [left, right]) == [gap] * 2
    twice = Cut((7, 10), (3, 6), (1,))
    overlap = "rows 7:8, columns 3:4 of a sharded table are saved by two ranks"
    assert ranks(2).run(gather_with_gaps, whole, [left, right, twice]) == [overlap] * 2


def whole_and_shards() -> tuple[torch.Tensor, TableShards]:
    whole = values((9, 4), torch.float32)
    return whole, shards_of(
        0, whole, [Cut((0, 5), (0, 4), (0,)), Cut((5, 9), (0, 3), (0, 0)), Cut((5, 9), (3, 4), (0,))]
    )


def test_it_tells_of_the_whole_and_shares_memory():
    weight = torch.nn.Parameter(torch.zeros(2, 4))
    shards = TableShards((9, 4), torch.float32, [LocalShard(weight, 3)])
    assert (shards.shape, shards.numel(), shards.dtype) == (torch.Size([9, 4]), 36, torch.float32)
    assert isinstance(shards, torch.Tensor)
    assert repr(shards) == "TableShards(float32 [9, 4]: rows 3:5, columns 0:4 on cpu)"
    assert repr(TableShards((9,), torch.float32, [])) == "TableShards(float32 [9]: no local shards)"
    shards.detach().shards[0].tensor.fill_(3.0)
    assert torch.equal(weight, torch.full((2, 4), 3.0))
    shards.copy_from(torch.arange(36.0).view(9, 4))
    assert torch.equal(weight, torch.arange(12.0, 20.0).view(2, 4))


def test_copies_have_memory_of_their_own():
    whole, shards = whole_and_shards()
    state = {"a": shards, "b": shards}
    copied = copy.deepcopy(state)
    cloned = shards.clone()
    assert copied["a"] is copied["b"]
    shards.copy_from(torch.zeros(9, 4))
    assert torch.equal(copied["a"].gather(), whole)
    assert torch.equal(cloned.gather(), whole)


@pytest.mark.parametrize(
    "operation",
    [
        lambda shards: shards + 1,
        lambda shards: shards[0],
        lambda shards: shards.sum(),
        lambda shards: torch.save({"a": shards}, io.BytesIO()),
        lambda shards: pickle.dumps(shards),
    ],
)
def test_what_needs_the_whole_is_refused_with_what_to_do(operation):
    _, shards = whole_and_shards()
    with pytest.raises(
        (TypeError, NotImplementedError), match=r"this rank has only some of its rows .* Use gather\(\)"
    ):
        operation(shards)


@pytest.mark.parametrize(
    ("size", "shards", "message"),
    [
        ((4, 4), [LocalShard(torch.zeros(2, 4), 3)], r"rows 3:5, columns 0:4, outside of the full tensor \[4, 4\]"),
        ((4, 4), [LocalShard(torch.zeros(2, 2), 0, 3)], r"rows 0:2, columns 3:5, outside of the full tensor"),
        ((4, 4), [LocalShard(torch.zeros(2, 2), -1)], "outside of the full tensor"),
        ((4, 4), [LocalShard(torch.zeros(2))], r"a shard of float32 \[4, 4\] is float32 \[2\]"),
        ((4,), [LocalShard(torch.zeros(2, dtype=torch.half))], r"a shard of float32 \[4\] is float16 \[2\]"),
        ((4,), [LocalShard(torch.zeros(2), 0, 1)], "begins at column 1, but there are no columns"),
        ((0, 4), [], "dimensions of at least 1"),
        ((2, 2, 2), [], "up to two dimensions"),
    ],
)
def test_shards_that_do_not_fit_are_refused(size, shards, message):
    with pytest.raises(ValueError, match=message):
        TableShards(size, torch.float32, shards)


def test_a_tensor_of_another_shape_or_dtype_does_not_fill_it():
    _, shards = whole_and_shards()
    for other in (torch.zeros(9, 5), torch.zeros(9, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"expected a tensor of float32 \[9, 4\], got float"):
            shards.copy_from(other)


def test_shards_without_memory_are_refused_when_they_are_loaded(tmp_path):
    checkpoint.save({"t": torch.zeros(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    shards = TableShards((3, 2), torch.float32, [LocalShard(torch.zeros(3, 2, device="meta"))])
    with pytest.raises(checkpoint.CheckpointException, match=r"columns 0:2 on meta\) has no memory; call to_empty\(\)"):
        checkpoint.load({"t": shards}, checkpoint_id=tmp_path, no_dist=True)


def bytes_written_at_once(rank: int, folder: str) -> list[int]:
    """Sizes of the tensors that are handed to `torch.save`."""
    sizes: list[int] = []
    real = torch.save

    def spy(value, *args, **options):
        sizes.append(value.untyped_storage().size())
        return real(value, *args, **options)

    with patch.object(torch, "save", spy), patch.object(sharded_tensor, "PIECE_BYTES", 256):
        whole = torch.zeros(40, 16)
        shards = shards_of(rank, whole, [Cut((0, 25), (0, 16), (0,)), Cut((25, 40), (0, 16), (1,))])
        checkpoint.save({"t": shards}, checkpoint_id=folder, process_group=dist.group.WORLD)
    return sizes


def test_a_large_shard_is_written_in_pieces(ranks, tmp_path):
    sizes = ranks(2).run(bytes_written_at_once, str(tmp_path))
    assert sizes == [[256] * 6 + [64], [256] * 3 + [192]]


def test_the_same_shards_are_loaded_and_saved_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sharded_tensor, "PIECE_BYTES", 32)
    whole = values((9, 4), torch.float32)
    checkpoint.save({"t": whole}, checkpoint_id=tmp_path / "a", no_dist=True)
    cuts = [Cut((0, 9), (0, 4), (0,)), Cut((2, 5), (0, 4), (0,), is_copy=True)]
    shards, loaded = shards_of(0, whole, cuts, value=-1.0), torch.zeros(9, 4)
    checkpoint.load({"t": shards}, checkpoint_id=tmp_path / "a", no_dist=True)
    checkpoint.save({"t": shards}, checkpoint_id=tmp_path / "b", no_dist=True)
    checkpoint.load({"t": loaded}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(loaded, whole)
