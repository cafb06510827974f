"""Checkpoints that several ranks write and read together."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.ranks import free_port, joined, start_process
from tests.sharding.cuts import Cut, draw_cuts, holds, shapes, shards_of, values
from tests.training import jobs
from tritonemb.comm.group import RankGroup
from tritonemb.storage import checkpoint as files
from tritonemb.storage.checkpoint import MANIFEST, ignore_single_process_warning
from tritonemb.training.checkpoint import CheckpointError, CheckpointFolder, load_tensors, read_manifest, stored_tensors
from tritonemb.training.checkpoint import folder as folder_module

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = [Cut((0, 6), (0, 4), (0,)), Cut((6, 12), (0, 4), (1,))]


def tensors_of(rank: int, whole: torch.Tensor, cuts: list[Cut], fill: float | None = None) -> dict[str, torch.Tensor]:
    """A sharded table, a dense weight, a counter, and what each rank has of its own."""
    dense = values((3, 2), torch.float32, 1)
    return {
        "model.t.weight": shards_of(rank, whole, cuts, fill),
        "model.over.weight": dense if fill is None else torch.full_like(dense, fill),
        "model.step": torch.tensor(5 if fill is None else 0),
        f"rng.{rank}.cpu": torch.full((4,), rank if fill is None else -1, dtype=torch.uint8),
    }


def save(rank: int, folder: str, step: int, whole: torch.Tensor, cuts: list[Cut]) -> int:
    manifest = {"progress": {"step": step}, "of": rank}
    return CheckpointFolder(folder).save(step, tensors_of(rank, whole, cuts), manifest, RankGroup.world()).num_bytes


def load(rank: int, path: str, whole: torch.Tensor, cuts: list[Cut], saved_by: int) -> tuple[bool, dict[str, Any]]:
    group = RankGroup.world()
    manifest = read_manifest(path, group)
    actual = tensors_of(rank, whole, cuts, fill=-1)
    if rank >= saved_by:
        del actual[f"rng.{rank}.cpu"]
    load_tensors(path, actual, ignore=("rng.",), group=group)
    expected = tensors_of(rank, whole, cuts)
    same = all(torch.equal(actual[name], expected[name]) for name in actual if name != "model.t.weight")
    return same and holds(rank, actual["model.t.weight"], whole), manifest


@settings(max_examples=20)
@given(data=st.data())
def test_any_number_of_ranks_reads_what_any_number_has_saved(ranks, tmp_path_factory, data):
    shape, dtype, seed = data.draw(shapes()), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 10_000))
    initial, final = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4]))
    full, folder = values(shape, dtype, seed), CheckpointFolder(tmp_path_factory.mktemp("checkpoints"))
    sizes = ranks(initial).run(save, str(folder.folder), 3, full, draw_cuts(shape, initial, seed))
    path = folder.path(3)
    assert set(sizes) == {sum(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST)}
    results = ranks(final).run(load, str(path), full, draw_cuts(shape, final, seed + 1), initial)
    assert all(same for same, _ in results)
    assert all(manifest == results[0][1] for _, manifest in results)
    assert results[0][1]["of"] == 0
    assert read_manifest(path)["progress"] == {"step": 3}  # one process, too, finds all files whole
    assert f"rng.{initial - 1}.cpu" in stored_tensors(path)


def test_one_process_writes_what_it_always_wrote(tmp_path):
    tensors = {"model.a": torch.rand(30, 4), "model.b": torch.rand(5).bfloat16(), "model.step": torch.tensor(3)}
    CheckpointFolder(tmp_path).save(1, tensors, {}, RankGroup())
    ignore_single_process_warning()
    torch.distributed.checkpoint.save(tensors, checkpoint_id=tmp_path / "plain", no_dist=True)
    fused = {path.name: path.read_bytes() for path in (tmp_path / "step-1").glob("*.distcp")}
    assert fused == {path.name: path.read_bytes() for path in (tmp_path / "plain").glob("*.distcp")}
    assert list(fused) == ["__0_0.distcp"]


def save_and_load_dtensors(rank: int, folder: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    full, group = torch.arange(35.0).view(7, 5), RankGroup.world()
    tensors = {"a": distribute_tensor(full, mesh, [Shard(0)]), "b": distribute_tensor(full + 1, mesh, [Replicate()])}
    CheckpointFolder(folder).save(1, tensors, {}, group)
    actual = {"a": distribute_tensor(full * 0, mesh, [Shard(1)]), "b": torch.zeros(7, 5)}
    load_tensors(CheckpointFolder(folder).path(1), actual, group=group)
    return torch.equal(actual["a"].full_tensor(), full) and torch.equal(actual["b"], full + 1)


def test_dtensors_are_saved_once_and_loaded_under_another_placement(ranks, tmp_path):
    assert ranks(2).run(save_and_load_dtensors, str(tmp_path)) == [True, True]


def click_model(dim: int = 8) -> te.nn.DLRM:
    torch.manual_seed(3)
    tables = [te.TableConfig(f"t{i}", 20 + i, dim) for i in range(3)]
    return te.nn.DLRM(tables, 4, bottom_mlp=(32,), top_mlp=(32,), optimizer=te.optim.RowWiseAdagrad(lr=0.1))


def hybrid(shardings: list[te.sharding.Sharding]) -> te.HybridParallel:
    plan = {f"t{i}": sharding for i, sharding in enumerate(shardings)}
    return te.HybridParallel(click_model(), te.sharding.ShardingPlan(plan, RankGroup.world().size))


def train_and_save(rank: int, folder: str, way: str) -> dict[str, torch.Tensor]:
    """A step of a hybrid model; returns the whole tensors."""
    RowWise, group = te.sharding.RowWise, RankGroup.world()
    shardings = {
        "row_wise": [RowWise(), RowWise(rows=[4, 17]), RowWise([1, 0], [20, 2])],
        # Two blocks on one rank, each with a copy of the row's state.
        "column_wise": [te.sharding.ColumnWise((1, 1, 0))] * 3,
        "data_parallel": [te.sharding.DataParallel()] * 3,
    }[way]
    model = hybrid(shardings)
    ids = torch.randint(0, 20, (15,), generator=torch.Generator().manual_seed(rank))
    batch = te.KeyedJaggedTensor.from_lengths(["t0", "t1", "t2"], ids, torch.ones(15, dtype=torch.int64))
    model(torch.ones(5, 4), batch).sum().backward()
    state = {f"model.{key}": value.detach() for key, value in model.state_dict().items()}
    CheckpointFolder(folder).save(3, state, {}, group)
    again = hybrid([RowWise(rows=[3, 17]), RowWise(), RowWise()]).state_dict()
    actual = {f"model.{key}": value.detach() for key, value in again.items()}
    load_tensors(CheckpointFolder(folder).path(3), actual, group=group)
    full = {key: jobs.whole(value) for key, value in state.items()}
    assert_same_bits({key: jobs.whole(value) for key, value in actual.items()}, full)
    return full


@pytest.mark.parametrize("way", ["row_wise", "column_wise", "data_parallel"])
def test_a_hybrid_model_is_saved_as_the_model_itself(ranks, tmp_path, way):
    full, other = ranks(2).run(train_and_save, str(tmp_path), way)
    initial = click_model().state_dict()
    actual = {f"model.{key}": value.detach() for key, value in click_model().state_dict().items()}
    load_tensors(tmp_path / "step-3", actual)
    assert set(actual) == set(full)
    for key, value in actual.items():
        assert torch.equal(value, full[key]), key
        assert torch.equal(value, other[key]), key
    assert not torch.equal(actual["model.embeddings.t0.weight"], initial["embeddings.t0.weight"])
    assert not torch.equal(actual["model.embeddings.t0.sum"], initial["embeddings.t0.sum"])


class Odd(Exception):
    """Cannot be pickled."""

    def __init__(self, a, b):
        super().__init__("odd")

    def __reduce__(self):
        raise TypeError("this one stays here")


FAILURES = {
    "disk": OSError(28, "No space left on device"),
    "odd": Odd(1, 2),
    "memory": MemoryError("no memory"),
    "stop": KeyboardInterrupt("stop"),
}


def save_and_fail(rank: int, folder: str, failing: int, where: str, what: str) -> tuple[str, str]:
    """A save in which one rank's file system fails somewhere; returns what it raised there, and on this rank."""
    full = values((12, 4), torch.float32)
    places = {
        "begin": (folder_module.CheckpointFolder, "_remove_leftovers"),
        "write": (files.FileSystemWriter, "write_data"),
        "metadata": (files.FileSystemWriter, "finish"),
        "checksum": (files, "size_and_checksum"),
        "manifest": (files, "write_manifest"),
    }
    fails = mock.patch.object(*places[where], side_effect=FAILURES[what]) if rank == failing else nullcontext()
    with fails, pytest.raises(BaseException) as caught:  # noqa: PT011
        save(rank, folder, 2, full, HALVES)
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("failing", "where", "what"),
    [
        (0, "begin", "disk"),
        (0, "write", "disk"),
        (1, "write", "disk"),
        (1, "write", "odd"),
        (0, "write", "odd"),
        (1, "write", "memory"),
        (1, "write", "stop"),
        (0, "metadata", "disk"),
        (0, "metadata", "odd"),
        (1, "checksum", "disk"),
        (0, "manifest", "disk"),
    ],
)
def test_the_failure_of_one_rank_is_everyones(ranks, tmp_path, failing, where, what):
    full, folder = values((12, 4), torch.float32), CheckpointFolder(tmp_path / "checkpoints")
    ranks(2).run(save, str(folder.folder), 1, full, HALVES)
    caught = ranks(2).run(save_and_fail, str(folder.folder), failing, where, what)
    for rank, (kind, message) in enumerate(caught):
        if what == "stop" and rank == failing:  # who wants to stop stops
            assert (kind, message) == ("KeyboardInterrupt", "stop")
            continue
        assert kind == "CheckpointError"
        assert f"the checkpoint of step 2 could not be written to {folder.folder}: rank {failing}: " in message
        assert str(FAILURES[what]) in message
        assert "It needs 228 bytes" in message  # 12 * 4 * 4 of the table, 24 + 8 of what all have, 4 of what each has
        assert "The latest complete checkpoint is step-1" in message
    assert [path.name for path in folder.folder.iterdir()] == ["step-1"]
    assert all(same for same, _ in ranks(2).run(load, str(folder.path(1)), full, HALVES, 2))
    ranks(2).run(save, str(folder.folder), 3, full, HALVES)
    assert folder.steps() == [1, 3]


def save_too_much(rank: int, folder: str) -> str:
    full = torch.zeros(2_000_000)
    cuts = [Cut((0, 10), (0, 1), (0,)), Cut((10, 2_000_000), (0, 1), (1,))]
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder(folder).save(2, {"t": shards_of(rank, full, cuts)}, {}, RankGroup.world())
    return str(caught.value)


def test_a_full_disk_leaves_the_earlier_checkpoint_whole(ranks, small_disk):
    folder, full = CheckpointFolder(small_disk / "checkpoints"), values((12, 4), torch.float32)
    ranks(2).run(save, str(folder.folder), 1, full, HALVES)
    for message in ranks(2).run(save_too_much, str(folder.folder)):
        assert re.search(r"rank [01]: .*It needs 8,000,000 bytes", message)  # or on both there is no room
        assert "The latest complete checkpoint is step-1" in message
    assert [path.name for path in folder.folder.iterdir()] == ["step-1"]
    assert all(same for same, _ in ranks(2).run(load, str(folder.path(1)), full, HALVES, 2))


def save_apart(rank: int, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(rank, f"{folder}/{rank}", 1, values((12, 4), torch.float32), HALVES)
    return str(caught.value)


def test_folders_that_are_not_shared_are_found_out(ranks, tmp_path):
    for message in ranks(2).run(save_apart, str(tmp_path)):
        assert "rank 1: " in message
        assert "does not exist: all ranks must write to one folder on a shared file system" in message
    assert not list(tmp_path.rglob("*.distcp"))


def save_with_a_gap(rank: int, folder: str) -> str:
    with pytest.raises(ValueError, match="model") as caught:
        save(rank, folder, 1, values((12, 4), torch.float32), HALVES[:1])
    return str(caught.value)


def test_a_table_that_is_not_whole_is_not_saved(ranks, tmp_path):
    actual = ranks(2).run(save_with_a_gap, str(tmp_path / "checkpoints"))
    assert actual == ["model.t.weight: rows 6:12, columns 0:4 of a sharded table are saved by no rank"] * 2
    shards = shards_of(0, torch.zeros(12, 4), HALVES)
    with pytest.raises(ValueError, match=r"t: rows 6:12, columns 0:4 .* saved by no rank"):
        CheckpointFolder(tmp_path / "checkpoints").save(1, {"t": shards}, {})
    assert not (tmp_path / "checkpoints").exists()


def load_other(rank: int, path: str) -> tuple[str, bool]:
    other = tensors_of(rank, values((12, 4), torch.float32), HALVES, fill=-1)
    other["model.t.weight"] = shards_of(rank, torch.zeros(12, 5), [Cut((0, 12), (0, 5), (0,))], -1.0)
    if rank == 1:
        other["model.over.weight"] = torch.zeros(3, 3)
        other["model.new"] = torch.zeros(1)
    del other["model.step"]
    with pytest.raises(ValueError, match="is of another model") as caught:
        load_tensors(path, other, group=RankGroup.world())
    return str(caught.value), all(bool((s.tensor == -1).all()) for s in other["model.t.weight"].shards)


def test_another_model_is_refused_on_every_rank_alike(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), 1, values((12, 4), torch.float32), HALVES)
    (first, unchanged), (second, _) = ranks(2).run(load_other, str(tmp_path / "step-1"))
    assert first == second
    assert first.splitlines()[1:] == [
        "  model.new is not in the checkpoint",
        "  model.over.weight is float32 [3, 2] in the checkpoint, float32 [3, 3] on rank 1",
        "  model.step is in the checkpoint only",
        "  model.t.weight is float32 [12, 4] in the checkpoint, float32 [12, 5] in the model",
    ]
    assert unchanged


def read_damaged(rank: int, path: str) -> tuple[str, str]:
    try:
        read_manifest(path, RankGroup.world())
    except (ValueError, FileNotFoundError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_damage_is_found_by_whoever_looks_at_the_file_and_told_to_all(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), 1, values((12, 4), torch.float32), HALVES)
    path = tmp_path / "step-1"
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        full = (path / name).read_bytes()
        (path / name).write_bytes(full[:-1] + bytes([full[-1] ^ 1]))
        first, second = ranks(2).run(read_damaged, str(path))
        assert first == second
        assert first[0] == "ValueError"
        assert f"{path} is damaged: {name} does not have the checksum that was written" in first[1]
        (path / name).write_bytes(full)
    assert ranks(2).run(read_damaged, str(path)) == [("", "")] * 2
    missing = f"{tmp_path} is not a checkpoint: it has no {MANIFEST}"
    assert ranks(2).run(read_damaged, str(tmp_path)) == [("FileNotFoundError", missing)] * 2


def mark(rank: int, folder: str) -> tuple[str | None, str]:
    group, checkpoints = RankGroup.world(), CheckpointFolder(folder)
    checkpoints.mark_best(1, group)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.mark_best(9, group)
    latest = checkpoints.latest(group)
    return None if latest is None else latest.name, str(caught.value)


def test_the_best_is_marked_by_one_rank_for_all(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), 1, values((12, 4), torch.float32), HALVES)
    results = ranks(2).run(mark, str(tmp_path))
    assert [latest for latest, _ in results] == ["step-1"] * 2
    assert all("the checkpoint of step 9 could not be written" in message for _, message in results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-1", "step-1"]
    assert json.loads((tmp_path / "best-1" / MANIFEST).read_text())["progress"] == {"step": 1}


def save_and_vanish(rank: int, folder: str, port: int) -> str:
    """Run as a process of its own: rank 1 ends in the middle of writing."""
    with joined(rank, 2, port, timeout=20.0):
        group = RankGroup.world()
        full = values((12, 4), torch.float32)
        save(rank, folder, 1, full, HALVES)
        group.barrier()
        if rank == 1:
            files.FileSystemWriter.write_data = lambda *_: os._exit(9)  # type: ignore[method-assign]
        try:
            save(rank, folder, 2, full, HALVES)
        except CheckpointError:
            raise
        except RuntimeError as error:
            Path(folder, "told").write_text(str(error))
            os._exit(0)
    return ""


@pytest.mark.usefixtures("ranks")
def test_a_rank_that_vanishes_leaves_nobody_waiting(tmp_path):
    port = free_port()
    processes = [start_process(save_and_vanish, rank, str(tmp_path), port) for rank in range(2)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 9]
    assert (tmp_path / "told").read_text()  # the exchange failed: that is no CheckpointError
    assert CheckpointFolder(tmp_path).steps() == [1]
    assert read_manifest(tmp_path / "step-1")["progress"] == {"step": 1}
