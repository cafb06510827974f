"""Faults of checkpoints of tables on disk: damage, full disks, killed processes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.programs import Program
from tests.training import kills
from tests.training.disk_job import LAST_STEP, Probe, bits, make_trainer, model_of
from tests.training.jobs import planted
from tritonemb.storage import StorageError
from tritonemb.storage.aio import PageFile
from tritonemb.storage.disk import RowFile
from tritonemb.training import Callback, CheckpointError, CheckpointOptions
from tritonemb.training.callbacks.jsonl import read_run_log
from tritonemb.training.checkpoint import CheckpointFolder, load_tensors, read_manifest, stored_tensors
from tritonemb.training.checkpoint.manager import load_model
from tritonemb.training.train_state import model_tensors

EVERY = CheckpointOptions(checkpoint_steps=4, keep=2)


@pytest.fixture(scope="module")
def data():
    return planted(600, validation=False)


def flip(path: Path) -> None:
    """A bit of the last page that holds anything."""
    content = bytearray(path.read_bytes())
    place = max(number for number, byte in enumerate(content) if byte)
    content[place] ^= 1
    path.write_bytes(bytes(content))


def zero(path: Path) -> None:
    """A page that is lost, as if it had never been written."""
    with path.open("r+b") as file:
        file.seek(4096)
        assert any(file.read(4096))
        file.seek(4096)
        file.write(bytes(4096))


def swap(path: Path) -> None:
    (other,) = [p for p in path.parent.glob(f"*{path.suffix}") if p != path]
    content = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(content)


def bits_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class TestDamage:
    CHECKSUM = "does not have the checksum that was written; use another one"

    def two_tables(self, dynamic: bool = False) -> te.nn.EmbeddingBagCollection:
        options: dict[str, Any] = {"placement": "disk", "cache": te.CacheConfig(rows=32)}
        options |= {"num_embeddings": None, "capacity": 500} if dynamic else {"num_embeddings": 500}
        tables = [te.TableConfig(name, embedding_dim=8, **options) for name in "ab"]
        return te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.SGD(lr=1.0))

    def trained(self, folder: CheckpointFolder, dynamic: bool = False) -> te.nn.EmbeddingBagCollection:
        model = self.two_tables(dynamic)
        for step in (1, 2):
            ids = (torch.arange(250 // step) * (7**20 * (-1) ** step if dynamic else 1)).repeat(2)
            batch = te.KeyedJaggedTensor.from_lengths(["a", "b"], ids, torch.ones_like(ids))
            model(batch).sum().backward()
            folder.save(step, model_tensors(model), {})
        return model

    @pytest.mark.parametrize("suffix", [".rows", ".changes"])
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (flip, CHECKSUM),
            (zero, CHECKSUM),
            (swap, CHECKSUM),
            (lambda path: os.truncate(path, path.stat().st_size - 4096), "bytes, expected [0-9,]+ bytes"),
            (lambda path: path.unlink(), "does not exist"),
        ],
    )
    def test_a_damaged_file_is_named(self, tmp_path, suffix, damage, message):
        folder = CheckpointFolder(tmp_path, incremental=True)
        self.trained(folder)
        path = sorted(folder.path(2).glob(f"a-*{suffix}"))[0]
        shutil.copytree(folder.path(2), tmp_path / "copy")  # no hard links, for each its own damage
        path = tmp_path / "copy" / path.name
        read_manifest(path.parent)
        damage(path)
        with pytest.raises(ValueError, match=rf"copy is damaged: [ab]-\S*{suffix} .*{message}"):
            read_manifest(path.parent)

    @pytest.mark.parametrize("suffix", [".rows", ".changes"])
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (swap, "to another table"),
            (lambda path: os.truncate(path, path.stat().st_size - 4096), "bytes, expected"),
            (lambda path: os.truncate(path, 100), "too short to have a header"),
            (lambda path: path.unlink(), "cannot be opened"),
        ],
    )
    def test_a_file_that_does_not_fit_changes_no_table(self, tmp_path, suffix, damage, message):
        folder = CheckpointFolder(tmp_path, incremental=True)
        self.trained(folder)
        shutil.copytree(folder.path(2), tmp_path / "copy")
        damage(sorted((tmp_path / "copy").glob(f"b-*{suffix}"))[0])
        actual = self.two_tables()
        initial = bits_of(actual)
        with pytest.raises(StorageError, match=message):
            load_tensors(tmp_path / "copy", model_tensors(actual))
        assert_same_bits(bits_of(actual), initial)
        load_tensors(folder.path(2), model_tensors(actual))
        in_table = {name: torch.empty_like(tensor) for name, tensor in initial.items()}
        in_table = {f"model.{name}": tensor for name, tensor in in_table.items()}
        with pytest.raises(StorageError, match=f"{message}|not of table"):
            load_tensors(tmp_path / "copy", in_table)

    @pytest.mark.more
    @pytest.mark.parametrize("suffix", [".rows", ".changes"])
    @pytest.mark.parametrize("damage", [swap, lambda path: os.truncate(path, 100), lambda path: path.unlink()])
    def test_a_missing_link_changes_no_dynamic_table(self, tmp_path, suffix, damage):
        def load(path: Path, model: te.nn.EmbeddingBagCollection) -> None:
            load_model(path, model, {}, stored_tensors(path), ())

        folder = CheckpointFolder(tmp_path, incremental=True)
        trained = self.trained(folder, dynamic=True)
        shutil.copytree(folder.path(2), tmp_path / "copy")
        damage(sorted((tmp_path / "copy").glob(f"b-*{suffix}"))[0])
        actual = self.two_tables(dynamic=True)
        load(folder.path(1), actual)
        initial = bits_of(actual)
        with pytest.raises(StorageError):
            load(tmp_path / "copy", actual)
        assert_same_bits(bits_of(actual), initial)
        load(folder.path(2), actual)
        assert_same_bits(bits_of(actual), bits_of(trained))

    def test_another_optimizer_or_size_is_told_before_anything_is_read(self, data, tmp_path):
        make_trainer(data, tmp_path / "run", epochs=1).fit()
        path = tmp_path / "run/checkpoints/step-12"
        other = model_of(data, "disk", optimizer=te.optim.Adam(lr=0.1))
        initial = bits_of(other)
        with pytest.raises(
            ValueError, match=r"of another model or optimizer:\n(.*\n)*.*exp_avg is not in the checkpoint"
        ):
            load_tensors(path, model_tensors(other), ignore=("rng.", "trainer.", "optimizer."))
        assert_same_bits(bits_of(other), initial)


class TestFaults:
    def test_a_read_error_leaves_the_last_checkpoint_and_the_table(self, tmp_path, monkeypatch):
        probe = Probe(tmp_path)
        probe.save(1)
        values = probe.values()
        real = PageFile.read

        def fail(self, view, offset):
            if len(view) > 4096:  # no header
                raise OSError(errno.EIO, "Input/output error")
            real(self, view, offset)

        monkeypatch.setattr("tritonemb.storage.io._FICLONE", 0)  # no request, so it copies
        with monkeypatch.context() as patch:
            patch.setattr(PageFile, "read", fail)
            with pytest.raises(CheckpointError, match=r"Input/output.*complete checkpoint is step-1"):
                probe.save(2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
        with monkeypatch.context() as patch:
            patch.setattr(PageFile, "read", fail)
            with pytest.raises(StorageError, match="Input/output error"):
                load_tensors(probe.folder.path(1), model_tensors(probe.collection))
        assert torch.equal(probe.values(), values)
        assert probe.save(3) == ["rows"]

    def test_rows_that_cannot_be_written_back_end_training(self, data, tmp_path, monkeypatch):
        """They are lost: training cannot go on without a checkpoint, as it does where only that one fails."""
        real = RowFile.move

        class Break(Callback):
            def on_step(self, step):
                if step.step == 8:
                    monkeypatch.setattr(RowFile, "move", staticmethod(fail))

        def fail(files, write):
            if not write:
                return real(files, write)
            failure = StorageError(f"table {files[0][0].identity.table!r}: no")
            for file, *_ in files:
                file.failure = failure
            raise failure

        trainer = make_trainer(data, tmp_path / "run", checkpoints=EVERY, callbacks=[Break()])
        with pytest.raises((StorageError, RuntimeError)) as caught:
            trainer.fit()
        assert not isinstance(caught.value, CheckpointError)
        monkeypatch.setattr(RowFile, "move", staticmethod(real))
        resumed = make_trainer(data, tmp_path / "run", checkpoints=EVERY)
        assert resumed.resume().name in ("step-4", "step-8")

    @pytest.fixture
    def disk_size(self):
        return "1m"

    @pytest.mark.parametrize("incremental", [False, True])
    def test_a_full_disk_leaves_the_earlier_checkpoint_whole(self, small_disk, incremental):
        probe = Probe(small_disk / "checkpoints", rows=10_000, incremental=incremental)
        probe.save(1)
        values = probe.values()
        (small_disk / "filler").write_bytes(bytes(500_000))
        probe.write(0, 10_000)
        with pytest.raises(
            CheckpointError, match=r"step 2 could not .*It needs [\d,]+ bytes.*complete checkpoint is step-1"
        ):
            probe.save(2)
        assert [path.name for path in probe.folder.folder.iterdir()] == ["step-1"]
        assert torch.equal(probe.saved(1), values)
        (small_disk / "filler").unlink()
        probe.save(3)
        assert torch.equal(probe.saved(3), probe.values())

    def test_no_room_for_the_live_table_changes_nothing(self, small_disk, tmp_path):
        probe = Probe(tmp_path / "checkpoints", rows=50_000)
        probe.save(1)
        table = te.TableConfig(
            "t", 50_000, 8, placement="disk", cache=te.CacheConfig(rows=32, folder=small_disk / "live")
        )
        actual = te.nn.EmbeddingBagCollection([table], optimizer=te.optim.SGD(lr=1.0))
        initial = actual.state_dict()["t.weight"].clone()
        with pytest.raises(StorageError, match="free disk space there"):
            load_tensors(probe.folder.path(1), model_tensors(actual))
        assert torch.equal(actual.state_dict()["t.weight"], initial)
        assert not list((small_disk / "live").iterdir())
        actual.tables[0].rows.store.close()


LONG = (
    ("sync", "dynamic", 4), ("sync", "disk", 2), ("async", "disk", 12), ("sync", "disk", 12), ("async", "dynamic", 12),
)  # fmt: skip


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a platform without SIGKILL")
@pytest.mark.parametrize(
    ("kind", "placement", "number"),
    [
        ("async", "disk", 2),
        ("sync", "dynamic", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG),
    ],
)
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ranks")
@pytest.mark.more
def test_killed_training_ends_with_the_same_bits(tmp_path, kind, placement, number):
    folder, chance = tmp_path / "run", random.Random(number)
    job = "tests.training.disk_job", str(folder), kind, placement
    killed = sum(kills.kill(Program(*job), folder, chance, turn % 2 == 1) for turn in range(number))
    assert killed >= number - 1
    kills.finish(Program(*job))
    checkpoints = CheckpointFolder(folder / "checkpoints")
    in_place = {"disk": "device", "dynamic": "dynamic, on the device"}[placement]
    data = planted(600, validation=False)
    undisturbed = make_trainer(data, tmp_path / "plain", in_place, epochs=5)
    undisturbed.fit()
    saved = make_trainer(data, folder, placement, epochs=5)
    saved.resume(checkpoints.path(LAST_STEP))
    assert_same_bits(bits(saved), bits(undisturbed))
    logs = [read_run_log(path / "log.jsonl") for path in (folder, tmp_path / "plain")]
    losses = [[(e["step"], e["loss"]) for e in log if e["event"] == "log"] for log in logs]
    assert losses[0] == losses[1]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [f"step-{LAST_STEP - 2}", f"step-{LAST_STEP}"]
    assert not list((tmp_path / "live").iterdir())
