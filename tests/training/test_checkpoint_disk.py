"""Checkpoints of tables on disk: snapshots of their files, whole or of what has changed, and their way back."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchmetrics")
pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.sharding.cuts import Cut, shards_of
from tests.training.disk_job import LAST_STEP, make_trainer, model_of
from tests.training.jobs import planted
from tritonemb.nn.tiered_table import TieredTable
from tritonemb.storage import DiskRows, StorageError
from tritonemb.storage.file import PageFile
from tritonemb.training import Callback, CheckpointError, CheckpointOptions
from tritonemb.training.checkpoint import AsyncSave, CheckpointFolder, load_tensors, read_manifest, stored_tensors
from tritonemb.training.checkpoints import tables_in, tables_out, writing
from tritonemb.training.state import model_tensors
from tritonemb.training.watch.run_log import read_run_log

EVERY = CheckpointOptions(checkpoint_steps=4, keep=2)
INCREMENTAL = CheckpointOptions(checkpoint_steps=4, keep=2, checkpoint_incremental=True)


@pytest.fixture(scope="module")
def data():
    return planted(600, validation=False)


@pytest.fixture(scope="module")
def expected(data) -> dict[str, Tensor]:
    """What two epochs on the device end with."""
    trainer = make_trainer(data, None, "device")
    trainer.fit()
    return bits(trainer)


def bits(trainer: te.Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def in_memory(path: Path) -> dict[str, Tensor]:
    found = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in stored_tensors(path).items()}
    load_tensors(path, found)
    return found


def table_files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.suffix in (".rows", ".changes"))


class TestResume:
    @pytest.mark.parametrize("incremental", [False, True])
    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
        self, data, expected, tmp_path, asynchronous, incremental
    ):
        options = CheckpointOptions(
            checkpoint_steps=1, keep=3, checkpoint_async=asynchronous, checkpoint_incremental=incremental
        )
        make_trainer(data, tmp_path / "run", epochs=1, checkpoints=options).fit()
        assert bool(list((tmp_path / "run").rglob("*.changes"))) == incremental
        resumed = make_trainer(data, tmp_path / "run", checkpoints=options)
        resumed.resume()
        resumed.fit()
        assert_same_bits(bits(resumed), expected)
        assert_same_bits({name[6:]: t for name, t in in_memory(tmp_path / "run/checkpoints/step-24").items()
                          if name.startswith("model.")}, expected)  # fmt: skip

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("disk", "device"),
            ("disk", "host"),
            ("device", "disk"),
            ("host", "disk"),
            ("mixed", "disk"),
            ("disk", "mixed"),
        ],
    )
    @pytest.mark.parametrize("options", [EVERY, INCREMENTAL])
    def test_tables_may_move_between_tiers(self, data, expected, tmp_path, monkeypatch, before, after, options):
        monkeypatch.setattr(tables_in, "CHUNK_BYTES", 1000)  # so that there are many pieces
        make_trainer(data, tmp_path / "run", before, epochs=1, checkpoints=options).fit()
        resumed = make_trainer(data, tmp_path / "run", after, checkpoints=options)
        resumed.resume()
        resumed.fit()
        assert_same_bits(bits(resumed), expected)

    def test_going_back_forgets_what_is_on_the_device(self, data, tmp_path):
        """Caches are full of later rows when an earlier checkpoint is loaded."""
        for placement in ("disk", "host"):
            trainer = make_trainer(data, tmp_path / placement, placement, checkpoints=CheckpointOptions(4, keep=9))
            trainer.fit()
            trainer.resume(tmp_path / placement / "checkpoints/step-8")
            saved = in_memory(tmp_path / placement / "checkpoints/step-8")
            assert_same_bits(bits(trainer), {k[6:]: v for k, v in saved.items() if k.startswith("model.")})
            before = trainer.evaluate("test")
            fresh = make_trainer(data, None, placement)
            fresh.resume(tmp_path / placement / "checkpoints/step-8")
            assert fresh.evaluate("test").log_loss == before.log_loss

    def test_a_table_larger_than_memory(self, tmp_path):
        """Half a terabyte of rows, of which a few are trained."""
        table = te.TableConfig("t", 1_000_000_000, 128, placement="disk", cache=te.CacheConfig(rows=64))
        ids = torch.tensor([0, 5, 999_999_999])
        batch = te.KeyedJaggedTensor.from_lengths(["t"], ids, torch.tensor([1, 2]))

        def collection() -> te.nn.EmbeddingBagCollection:
            return te.nn.EmbeddingBagCollection([table], optimizer=te.optim.RowWiseAdagrad(lr=0.1))

        trained, folder = collection(), CheckpointFolder(tmp_path, incremental=True)
        for step in (1, 2):
            trained(batch).sum().backward()
            size = folder.save(step, model_tensors(trained), {})
            assert size < 200_000
        found = collection()
        load_tensors(folder.path(2), model_tensors(found))
        assert torch.equal(found(batch), trained(batch))
        other = te.KeyedJaggedTensor.from_lengths(["t"], ids + torch.tensor([1, 1, -1]), torch.tensor([1, 2]))
        assert torch.equal(found(other), trained(other))  # rows that were never written have the first one's seed

    @pytest.mark.parametrize("kind", ["save", "resume"])
    def test_no_table_passes_through_memory(self, data, tmp_path, monkeypatch, kind):
        trainer = make_trainer(data, tmp_path / "run", epochs=1, checkpoints=EVERY)
        if kind == "resume":
            trainer.fit()

        def refuse(*_: Any) -> None:
            raise AssertionError("the whole table is read")

        for name in ("pieces", "tensors", "assign", "_chunks"):
            monkeypatch.setattr(TieredTable, name, refuse)
        if kind == "save":
            trainer.fit()
        else:
            make_trainer(data, tmp_path / "run", epochs=1).resume()


class TestPieces:
    """Of checkpoints whose table was on the device: sharded ones as well."""

    ROWS, DIM = 40, 6

    def whole(self) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(0)
        return {
            "t.weight": torch.randn(self.ROWS, self.DIM, generator=made),
            "t.sum": torch.rand(self.ROWS, generator=made),
        }

    def collection(self, placement: str) -> te.nn.EmbeddingBagCollection:
        table = te.TableConfig("t", self.ROWS, self.DIM, placement=placement, cache=te.CacheConfig(rows=32))
        return te.nn.EmbeddingBagCollection([table], optimizer=te.optim.RowWiseAdagrad(lr=0.1))

    CUTS = (Cut((0, 40), (0, 1), (0,)), Cut((0, 13), (1, 6), (0,)), Cut((13, 40), (1, 6), (0,)))

    @pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 27])
    @pytest.mark.parametrize("sharded", [False, True])
    def test_tensors_of_any_pieces_become_a_table_on_disk(self, tmp_path, monkeypatch, sharded, piece_bytes):
        monkeypatch.setattr("tritonemb.sharding.table_shards.PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(writing, "PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(tables_in, "CHUNK_BYTES", 7 * 28)
        whole = self.whole()
        saved = dict(whole)
        if sharded:
            saved["t.weight"] = shards_of(0, whole["t.weight"], self.CUTS)
        found = self.collection("disk")
        names = {name.rpartition(".")[2] for name in found.state_dict() if name.startswith("t.")}
        saved = {
            f"model.t.{'weight' if n == 'weight' else n}": saved["t.weight" if n == "weight" else "t.sum"]
            for n in names
        }
        folder = CheckpointFolder(tmp_path)
        folder.save(1, saved | {"model.step": torch.tensor(3)}, {})
        chunks = stored_tensors(folder.path(1))["model.t.weight"].chunks
        assert len(chunks) > 1 or (not sharded and piece_bytes > 1000)
        load_tensors(folder.path(1), model_tensors(found))
        assert_same_bits({"t.weight": found.state_dict()["t.weight"]}, {"t.weight": whole["t.weight"]})
        (state,) = names - {"weight"}
        assert torch.equal(found.state_dict()[f"t.{state}"], whole["t.sum"])

    def test_a_table_on_disk_becomes_shards(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tables_in, "CHUNK_BYTES", 7 * 28)
        found = self.collection("disk")
        ids = torch.tensor([3, 17, 39])
        found(te.KeyedJaggedTensor.from_lengths(["t"], ids, torch.tensor([3]))).sum().backward()
        CheckpointFolder(tmp_path).save(1, model_tensors(found), {})
        whole = {f"model.{name}": tensor for name, tensor in found.state_dict().items()}
        cuts = [Cut((5, 20), (0, 2), (0,)), Cut((30, 40), (2, 6), (0,))]
        shards = shards_of(0, torch.full((self.ROWS, self.DIM), -1.0), cuts)
        others = {name: torch.empty_like(tensor) for name, tensor in whole.items() if name != "model.t.weight"}
        load_tensors(CheckpointFolder(tmp_path).path(1), {"model.t.weight": shards} | others)
        weight = whole.pop("model.t.weight")
        for shard, cut in zip(shards.shards, cuts, strict=True):
            assert torch.equal(shard.tensor, weight[slice(*cut.rows), slice(*cut.columns)])
        assert_same_bits(others, whole)


class Probe:
    """A table on disk whose every row is written, and its checkpoints."""

    def __init__(self, folder: Path, rows: int = 3000, **options: Any) -> None:
        table = te.TableConfig("t", rows, 8, placement="disk", cache=te.CacheConfig(rows=32))
        self.collection = te.nn.EmbeddingBagCollection([table], optimizer=te.optim.SGD(lr=1.0))
        self.folder = CheckpointFolder(folder, **options)
        self.rows = rows
        self.write(0, rows)

    @property
    def store(self) -> DiskRows:
        return self.collection.tables[0].store

    def write(self, first: int, last: int) -> None:
        records = torch.randn(last - first, 8).view(torch.uint8)
        self.store.write(torch.arange(first, last), records).wait()

    def save(self, step: int) -> list[str]:
        self.folder.save(step, model_tensors(self.collection), {})
        return [name.partition(".")[2] for name in table_files(self.folder.path(step))]

    def values(self) -> Tensor:
        return self.collection.state_dict()["t.weight"].clone()

    def saved(self, step: int) -> Tensor:
        read_manifest(self.folder.path(step))
        return in_memory(self.folder.path(step))["model.t.weight"]


class TestIncremental:
    def test_any_checkpoint_may_go_and_the_others_are_whole(self, tmp_path):
        probe, values = Probe(tmp_path, keep=2, incremental=True), {}
        for step in range(1, 6):
            names = probe.save(step)
            values[step] = probe.values()
            assert names == [*(f"{n}.changes" for n in range(1, step)), "rows"]
            probe.write(10 * step, 10 * step + 3)
        assert probe.folder.steps() == [4, 5]  # the checkpoint that they follow is gone
        for step in (4, 5):
            assert torch.equal(probe.saved(step), values[step])
        newest = probe.folder.path(5)
        sizes = {name.suffix: name.stat().st_size for name in newest.iterdir()}
        assert sizes[".changes"] < sizes[".rows"] / 4
        other = Probe(tmp_path / "other")
        load_tensors(newest, model_tensors(other.collection))
        assert torch.equal(other.values(), values[5])

    def test_changes_as_large_as_the_table_are_not_chained(self, tmp_path):
        probe = Probe(tmp_path, incremental=True)
        probe.save(1)
        found = []
        for step in range(2, 6):
            probe.write(0, 1000)
            found.append(len(probe.save(step)))
            assert torch.equal(probe.saved(step), probe.values())
        assert found == [2, 3, 1, 2]

    def test_a_chain_has_an_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tables_out, "MOST_FILES", 3)
        probe = Probe(tmp_path, incremental=True)
        assert [len(probe.save(step)) for step in range(1, 6)] == [1, 2, 3, 1, 2]

    def test_without_hard_links_each_is_whole(self, tmp_path, monkeypatch):
        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        probe = Probe(tmp_path, incremental=True)
        for step in (1, 2):
            assert probe.save(step) == ["rows"]
            probe.write(0, 5)
        probe.folder.mark_best(2)
        best = probe.folder.best()
        assert read_manifest(best) == read_manifest(probe.folder.path(2))
        assert torch.equal(in_memory(best)["model.t.weight"], probe.saved(2))

    def test_what_does_not_follow_a_checkpoint_is_whole(self, tmp_path):
        probe = Probe(tmp_path, incremental=True)
        probe.save(1)
        probe.store.snapshot(tmp_path / "of somebody else").wait()
        assert probe.save(2) == ["rows"]
        shutil.rmtree(probe.folder.path(2))
        assert probe.save(3) == ["rows"]
        assert probe.save(3) == ["rows"]  # it takes the place of what it would follow
        assert probe.save(4) == ["1.changes", "rows"]
        (file,) = probe.folder.path(4).glob("*.changes")
        os.truncate(file, 0)
        assert probe.save(5) == ["rows"]
        (probe.folder.path(5) / "trainer.json").write_text("{")
        assert probe.save(6) == ["rows"]
        assert torch.equal(probe.saved(6), probe.values())

    def test_a_failed_checkpoint_breaks_no_chain(self, tmp_path, monkeypatch):
        probe = Probe(tmp_path, incremental=True)
        probe.save(1)

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        for place in ((writing.FileSystemWriter, "write_data"), (tables_out, "checksum")):
            probe.write(5, 6)
            with monkeypatch.context() as patch:
                patch.setattr(*place, fail)
                with pytest.raises(CheckpointError, match="step-1 is whole"):
                    probe.save(2)
            assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
        assert probe.save(3) == ["rows"]  # the table's last snapshot has gone with the failed checkpoint
        assert torch.equal(probe.saved(3), probe.values())

    def test_a_resumed_run_goes_on_with_the_chain(self, tmp_path):
        probe = Probe(tmp_path, incremental=True)
        probe.save(1)
        probe.write(7, 9)
        probe.save(2)
        values = probe.values()
        probe.write(0, 3000)
        load_tensors(probe.folder.path(2), model_tensors(probe.collection))
        assert torch.equal(probe.values(), values)
        probe.write(0, 1)
        assert probe.save(3) == ["1.changes", "2.changes", "rows"]
        assert torch.equal(probe.saved(3), probe.values())


class TestMoment:
    @pytest.mark.parametrize("incremental", [False, True])
    def test_a_snapshot_is_of_the_moment_of_the_call(self, tmp_path, monkeypatch, incremental):
        """Whatever is written while it is not on the disk yet."""
        probe, gate = Probe(tmp_path, incremental=incremental), threading.Event()
        save = AsyncSave(probe.folder)
        real = writing.FileSystemWriter.write_data
        monkeypatch.setattr(writing.FileSystemWriter, "write_data", lambda *a: gate.wait(30) and real(*a))
        for step in (1, 2):
            probe.write(10, 20)
            values = probe.values()
            save.start(step, model_tensors(probe.collection), {})
            probe.write(0, 1000)
            assert probe.folder.steps() == list(range(1, step))
            gate.set()
            save.wait()
            gate.clear()
            assert torch.equal(probe.saved(step), values)

    def test_rows_that_are_trained_ahead_are_saved_as_they_are(self, data, expected, tmp_path):
        """Batches hold rows on the device while a checkpoint is begun: its values are those of the step."""
        seen = {}

        class Remember(Callback):
            def on_step(self, step):
                if step.step == 8:
                    seen.update({f"model.{name}": t for name, t in bits(trainer).items()})

        options = CheckpointOptions(checkpoint_steps=8, checkpoint_async=True, keep=9)
        trainer = make_trainer(data, tmp_path / "run", checkpoints=options, callbacks=[Remember()])
        trainer.fit()
        found = in_memory(tmp_path / "run/checkpoints/step-8")
        assert_same_bits({name: found[name] for name in seen}, seen)
        assert_same_bits(bits(trainer), expected)


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


class TestDamage:
    CHECKSUM = "does not have the checksum that was written; use another one"

    def two_tables(self) -> te.nn.EmbeddingBagCollection:
        tables = [te.TableConfig(name, 500, 8, placement="disk", cache=te.CacheConfig(rows=32)) for name in "ab"]
        return te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.SGD(lr=1.0))

    def trained(self, folder: CheckpointFolder) -> None:
        found = self.two_tables()
        for step in (1, 2):
            ids = torch.arange(250 // step).repeat(2)
            batch = te.KeyedJaggedTensor.from_lengths(["a", "b"], ids, torch.ones(ids.numel(), dtype=torch.int64))
            found(batch).sum().backward()
            folder.save(step, model_tensors(found), {})

    @pytest.mark.parametrize("suffix", [".rows", ".changes"])
    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (flip, CHECKSUM),
            (zero, CHECKSUM),
            (swap, CHECKSUM),
            (lambda path: os.truncate(path, path.stat().st_size - 4096), "bytes instead of [0-9,]+ bytes"),
            (lambda path: path.unlink(), "has vanished instead of"),
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
            (swap, "of another table"),
            (lambda path: os.truncate(path, path.stat().st_size - 4096), "bytes instead of"),
            (lambda path: os.truncate(path, 100), "too short to have a header"),
            (lambda path: path.unlink(), "cannot be opened"),
        ],
    )
    def test_a_file_that_does_not_fit_changes_no_table(self, tmp_path, suffix, damage, message):
        folder = CheckpointFolder(tmp_path, incremental=True)
        self.trained(folder)
        shutil.copytree(folder.path(2), tmp_path / "copy")
        damage(sorted((tmp_path / "copy").glob(f"b-*{suffix}"))[0])
        found = self.two_tables()
        before = {name: tensor.clone() for name, tensor in found.state_dict().items()}
        with pytest.raises(StorageError, match=message):
            load_tensors(tmp_path / "copy", model_tensors(found))
        assert_same_bits(dict(found.state_dict()), before)
        load_tensors(folder.path(2), model_tensors(found))
        in_table = {name: torch.empty_like(tensor) for name, tensor in before.items()}
        in_table = {f"model.{name}": tensor for name, tensor in in_table.items()}
        with pytest.raises(StorageError, match=f"{message}|not of table"):
            load_tensors(tmp_path / "copy", in_table)

    def test_another_optimizer_or_size_is_told_before_anything_is_read(self, data, tmp_path):
        make_trainer(data, tmp_path / "run", epochs=1).fit()
        path = tmp_path / "run/checkpoints/step-12"
        other = model_of(data, "disk", optimizer=te.optim.Adam(lr=0.1))
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(
            ValueError, match=r"of another model or optimizer:\n(.*\n)*.*exp_avg is not in the checkpoint"
        ):
            load_tensors(path, model_tensors(other), ignore=("rng.", "trainer.", "optimizer."))
        assert_same_bits(dict(other.state_dict()), before)


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

        monkeypatch.setattr("tritonemb.storage.clone._clone", lambda *_: False)
        with monkeypatch.context() as patch:
            patch.setattr(PageFile, "read", fail)
            with pytest.raises(CheckpointError, match=r"Input/output.*step-1 is whole"):
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
        real = DiskRows._write

        class Break(Callback):
            def on_step(self, step):
                if step.step == 8:
                    monkeypatch.setattr(DiskRows, "_write", fail)

        def fail(self, rows, records):
            self._failure = StorageError(f"table {self.table_name!r}: no")
            raise self._failure

        trainer = make_trainer(data, tmp_path / "run", checkpoints=EVERY, callbacks=[Break()])
        with pytest.raises((StorageError, RuntimeError)) as caught:
            trainer.fit()
        assert not isinstance(caught.value, CheckpointError)
        monkeypatch.setattr(DiskRows, "_write", real)
        resumed = make_trainer(data, tmp_path / "run", checkpoints=EVERY)
        assert resumed.resume().name in ("step-4", "step-8")

    @pytest.fixture
    def small_disk(self, tmp_path):
        """A file system of 1 MB, where the tests may mount one."""
        disk = tmp_path / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount")
        if done.returncode:
            pytest.skip("a small file system cannot be mounted here")
        yield disk
        subprocess.run(["umount", str(disk)], check=True)

    @pytest.mark.parametrize("incremental", [False, True])
    def test_a_full_disk_leaves_the_earlier_checkpoint_whole(self, small_disk, incremental):
        probe = Probe(small_disk / "checkpoints", rows=10_000, incremental=incremental)
        probe.save(1)
        values = probe.values()
        (small_disk / "filler").write_bytes(bytes(500_000))
        probe.write(0, 10_000)
        with pytest.raises(CheckpointError, match=r"step 2 could not .*It needs [\d,]+ bytes.*step-1 is whole"):
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
        found = te.nn.EmbeddingBagCollection([table], optimizer=te.optim.SGD(lr=1.0))
        before = found.state_dict()["t.weight"].clone()
        with pytest.raises(StorageError, match="make room there"):
            load_tensors(probe.folder.path(1), model_tensors(found))
        assert torch.equal(found.state_dict()["t.weight"], before)
        assert not list((small_disk / "live").iterdir())
        found.tables[0].store.close()

    def test_several_ranks_are_refused(self, tmp_path):
        class Two:
            size, rank = 2, 0

            def all_gather_object(self, value):
                return [value, value]

        probe = Probe(tmp_path)
        with pytest.raises(ValueError, match=r"tables on disk \(model.t\) are saved by one process"):
            probe.folder.save(1, model_tensors(probe.collection), {}, Two())


def start(folder: Path, kind: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.training.disk_job", str(folder), kind]
    quiet = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=quiet)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="a platform without SIGKILL")
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_killed_training_ends_with_the_same_bits(tmp_path, kind, kills):
    folder, chance, killed = tmp_path / "run", random.Random(kills), 0
    checkpoints = CheckpointFolder(folder / "checkpoints")
    for number in range(kills):
        process, before = start(folder, kind), checkpoints.steps()
        if number % 2:  # while a checkpoint is written
            while process.poll() is None and (
                checkpoints.steps() == before or not any(checkpoints.folder.glob(".writing-*"))
            ):
                time.sleep(0.0005)
        else:
            while process.poll() is None and checkpoints.steps() == before:
                time.sleep(0.002)
            time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed >= kills - 1
    process = start(folder, kind)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    undisturbed = make_trainer(planted(600, validation=False), tmp_path / "plain", "device", epochs=5)
    undisturbed.fit()
    found = in_memory(checkpoints.path(LAST_STEP))
    expected = {f"model.{name}": tensor for name, tensor in bits(undisturbed).items()}
    assert_same_bits({name: found[name] for name in expected}, expected)
    logs = [read_run_log(path / "log.jsonl") for path in (folder, tmp_path / "plain")]
    losses = [[(e["step"], e["loss"]) for e in log if e["event"] == "log"] for log in logs]
    assert losses[0] == losses[1]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [f"step-{LAST_STEP - 2}", f"step-{LAST_STEP}"]
    assert not list((tmp_path / "live").iterdir())
