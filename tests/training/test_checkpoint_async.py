"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import start_process
from tests.sharding.cuts import Cut, holds, shards_of, values
from tests.training.disk_job import in_memory
from tritonemb.comm.group import RankGroup
from tritonemb.training.callbacks import CheckpointSaved
from tritonemb.training.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    load_tensors,
    read_manifest,
    writer,
)
from tritonemb.training.checkpoint.manager import AsyncSave
from tritonemb.training.checkpoint.writer import HostStager

CUTS = [Cut((0, 6), (0, 4), (0, 1)), Cut((6, 12), (0, 4), (1, 0))]  # each saves one, and holds both


class Gate:
    """Holds writers up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = writer.ChecksumWriter.write_data

        def wait(*args: Any) -> Any:
            assert self.open.wait(30)
            return real(*args)

        monkeypatch.setattr(writer.ChecksumWriter, "write_data", wait)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def loaded(folder: CheckpointFolder, step: int) -> dict[str, torch.Tensor]:
    return in_memory(folder.path(step))


def test_a_checkpoint_is_still_awaited_after_an_interrupt(tmp_path, gate, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    save = AsyncSave(CheckpointFolder(tmp_path))
    save.start(1, {"a": torch.arange(3.0)}, {})
    with monkeypatch.context() as patch:
        patch.setattr(save._running[1], "result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save.wait()
    gate.open.set()
    saved = save.wait()
    assert saved is not None
    assert saved.step == 1


def test_it_holds_the_moment_of_its_start(tmp_path, gate):
    folder = CheckpointFolder(tmp_path)
    save, progress = AsyncSave(folder), {"step": 1, "losses": [0.5]}
    tensors = {"a": torch.arange(12.0).view(3, 4), "t": torch.arange(12.0).view(4, 3).t(), "step": torch.tensor(1)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    existing_threads = set(threading.enumerate())
    assert save.start(1, tensors, {"progress": progress}) is None
    started, threads = time.perf_counter(), set(threading.enumerate()) - existing_threads
    assert threads  # start has returned, and the checkpoint is being written
    for tensor in tensors.values():
        tensor.fill_(9)
    progress["losses"].append(0.25)
    assert folder.steps() == []
    held_up = time.perf_counter() - started
    gate.open.set()
    saved = save.wait()
    assert saved is not None
    files = [path for path in folder.path(1).iterdir() if path.name != "trainer.json"]
    assert (saved.step, saved.path) == (1, folder.path(1))
    assert saved.num_bytes == sum(path.stat().st_size for path in files)
    assert saved.seconds > held_up > 0
    assert save.wait() is None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    actual = loaded(folder, 1)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert read_manifest(folder.path(1))["progress"] == {"step": 1, "losses": [0.5]}


def test_there_is_one_at_a_time_and_buffers_are_used_again(tmp_path, gate):
    folder = CheckpointFolder(tmp_path)
    save, tensor = AsyncSave(folder), torch.zeros(1000)
    save.start(1, {"a": tensor}, {})
    buffer = save._stager._buffers["a"].data_ptr()
    threading.Timer(0.05, gate.open.set).start()
    previous = save.start(2, {"a": tensor + 1}, {}, best=True)
    assert previous is not None
    assert previous.step == 1
    assert folder.steps()[0] == 1  # it waited
    save.wait()
    assert save._stager._buffers["a"].data_ptr() == buffer
    save.start(3, {"a": torch.ones(5), "b": tensor}, {})  # of other shapes
    save.wait()
    assert [loaded(folder, step)["a"].sum().item() for step in (1, 2, 3)] == [0, 1000, 5]
    assert folder.best().name == "best-2"


@pytest.mark.parametrize("ask", [AsyncSave.wait, lambda save: save.start(3, {"a": torch.zeros(3)}, {})])
def test_a_failure_comes_out_once(tmp_path, monkeypatch, ask):
    folder = CheckpointFolder(tmp_path)
    save, tensors = AsyncSave(folder), {"a": torch.zeros(3)}
    folder.save(1, tensors, {})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer.ChecksumWriter, "write_data", full)
        save.start(2, tensors, {})
        with pytest.raises(
            CheckpointError, match=r"step 2 could not be written .* The latest complete checkpoint is step-1"
        ):
            ask(save)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert save.wait() is None
    save.start(4, tensors, {})
    assert save.wait().step == 4
    assert folder.steps() == [1, 4]


def test_what_json_does_not_know_is_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        AsyncSave(CheckpointFolder(tmp_path)).start(1, {}, {"what": object()})


def save_and_change(rank: int, folder: str) -> tuple[CheckpointSaved | None, CheckpointSaved | None, bool]:
    full, group = values((12, 4), torch.bfloat16), RankGroup.world()
    mesh = init_device_mesh("cpu", (group.size,))
    dense, plain = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)]), torch.tensor(3)
    shards, checkpoints = shards_of(rank, full, CUTS), CheckpointFolder(folder)
    save = AsyncSave(checkpoints, group)
    actual = []
    for step in (1, 2):  # the second into the buffers of the first
        save.start(step, {"t": shards, "dense": dense, "plain": plain}, {"step": step})
        for shard in shards.shards:
            shard.tensor.add_(1)
        dense.add_(1)
        plain.add_(1)
        group.barrier()  # training exchanges at the same time
        actual.append(save.wait())
    good = True
    for step in (1, 2):
        read = {"t": shards_of(rank, full, CUTS, -1.0), "dense": torch.zeros(7), "plain": torch.tensor(0)}
        load_tensors(checkpoints.path(step), read, group=group)
        good &= holds(rank, read["t"], full + (step - 1)) and int(read["plain"]) == 2 + step
        good &= torch.equal(read["dense"], torch.arange(7.0) + step - 1)
    return (*actual, good)


def test_several_ranks_write_while_they_train(ranks, tmp_path):
    (first, second, good), (other, _, too) = ranks(2).run(save_and_change, str(tmp_path))
    assert good
    assert too
    assert (first.step, second.step, first.num_bytes) == (1, 2, other.num_bytes)


def fails_on_rank_one(rank: int, owner: type, name: str, error: Exception) -> AbstractContextManager[object]:
    return mock.patch.object(owner, name, side_effect=error) if rank == 1 else nullcontext()


def fail_on_one(rank: int, folder: str) -> str:
    save, group = AsyncSave(CheckpointFolder(folder), RankGroup.world()), RankGroup.world()
    complete = values((12, 4), torch.float32)
    with fails_on_rank_one(rank, writer.ChecksumWriter, "write_data", OSError(28, "No space left on device")):
        save.start(1, {"t": shards_of(rank, complete, CUTS)}, {})
        with pytest.raises(CheckpointError) as caught:
            save.wait()
    group.barrier()
    save.start(2, {"t": shards_of(rank, complete, CUTS)}, {})
    assert save.wait().step == 2
    return str(caught.value)


def test_the_failure_of_one_rank_is_everyones(ranks, tmp_path):
    for message in ranks(2).run(fail_on_one, str(tmp_path)):
        assert "rank 1: [Errno 28] No space left on device" in message
        assert "There is no earlier checkpoint" in message
    assert CheckpointFolder(tmp_path).steps() == [2]


def run_out_of_memory(rank: int, folder: str) -> str:
    save, tensors = AsyncSave(CheckpointFolder(folder), RankGroup.world()), {"a": torch.ones(3)}
    fails = fails_on_rank_one(rank, HostStager, "copy", MemoryError("no memory"))
    with fails, pytest.raises(CheckpointError) as caught:
        save.start(1, tensors, {})
    save.start(2, tensors, {})
    save.wait()
    return str(caught.value)


def test_no_memory_for_the_copy_on_one_rank(ranks, tmp_path):
    message = "the checkpoint of step 1 could not be written .*: rank 1: cannot copy tensors to host memory"
    for actual in ranks(2).run(run_out_of_memory, str(tmp_path)):
        assert re.match(message, actual)
    assert CheckpointFolder(tmp_path).steps() == [2]


def save_alone(rank: int, folder: str) -> CheckpointSaved | None:
    save = AsyncSave(CheckpointFolder(Path(folder, str(rank))))
    save.start(1, {"a": torch.full((3,), float(rank))}, {})
    return save.wait()


def test_each_rank_of_a_job_may_write_a_checkpoint_of_its_own(ranks, tmp_path):
    for rank, written in enumerate(ranks(2).run(save_alone, str(tmp_path))):
        assert written.step == 1
        assert torch.equal(loaded(CheckpointFolder(tmp_path / str(rank)), 1)["a"], torch.full((3,), float(rank)))


PROCESS = """
    import sys, time, torch
    from pathlib import Path
    from tritonemb.training.checkpoint import CheckpointFolder, writer
    from tritonemb.training.checkpoint.manager import AsyncSave

    folder, what = Path(sys.argv[1]), sys.argv[2]
    save = AsyncSave(CheckpointFolder(folder))
    save.start(1, {"a": torch.full((1000,), 1.0)}, {"progress": {"step": 1}})
    save.wait()
    real = writer.ChecksumWriter.write_data

    def slow(*args):
        done = real(*args)
        time.sleep(0.5)
        return done

    def full(*args):
        raise OSError(28, "No space left on device")

    writer.ChecksumWriter.write_data = full if what == "fail" else slow
    save.start(2, {"a": torch.full((1000,), 2.0)}, {"progress": {"step": 2}})
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(folder), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def save_and_hang(folder: Path, written: Connection) -> None:
    """Write one checkpoint, and another one, but for its manifest."""
    save, real = AsyncSave(CheckpointFolder(folder)), writer.ChecksumWriter.write_data
    save.start(1, {"a": torch.full((1000,), 1.0)}, {"progress": {"step": 1}})
    save.wait()

    def hang(*args: Any) -> None:
        real(*args)
        written.send(True)
        threading.Event().wait()

    writer.ChecksumWriter.write_data = hang  # type: ignore[method-assign,assignment]
    save.start(2, {"a": torch.full((1000,), 2.0)}, {"progress": {"step": 2}})
    save.wait()


@pytest.mark.usefixtures("ranks")
def test_a_process_that_is_killed_leaves_the_last_checkpoint_whole(tmp_path):
    written, of_process = mp.Pipe()
    process = start_process(save_and_hang, tmp_path, of_process)
    assert written.poll(60)
    process.kill()
    process.join()
    folder = CheckpointFolder(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".writing-step-2"]
    assert folder.steps() == [1]
    assert read_manifest(folder.latest())["progress"] == {"step": 1}
    assert torch.equal(loaded(folder, 1)["a"], torch.full((1000,), 1.0))
    save = AsyncSave(folder)
    save.start(3, {"a": torch.zeros(3)}, {})
    save.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


@pytest.mark.more
def test_a_process_ends_when_its_checkpoint_is_written(tmp_path):
    process = start(tmp_path, "slow")
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, CheckpointFolder(tmp_path).steps()) == (0, [1, 2]), errors


@pytest.mark.more
def test_a_failure_that_nobody_has_asked_for_is_told_at_the_end(tmp_path):
    _, errors = start(tmp_path, "fail").communicate(timeout=120)
    assert f"error: the checkpoint of step 2 could not be written to {tmp_path}: [Errno 28]" in errors
