"""Checkpoints of tables on disk: snapshots of their files, whole or of what has changed, and their way back."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits
from tests.sharding.cuts import Cut, shards_of
from tests.training.disk_job import Probe, bits, in_memory, make_trainer, sharded, table_files
from tests.training.jobs import planted
from tritonemb.tables.cached_rows import CachedRows
from tritonemb.training import Callback, CheckpointOptions
from tritonemb.training.checkpoint import CheckpointFolder, load_tensors, reader, stored_tensors, writer
from tritonemb.training.checkpoint.manager import AsyncSave
from tritonemb.training.train_state import model_tensors

EVERY = CheckpointOptions(checkpoint_steps=4, keep=2)
INCREMENTAL = CheckpointOptions(checkpoint_steps=4, keep=2, checkpoint_incremental=True)


@pytest.fixture(scope="module")
def data():
    """Data of six steps per epoch."""
    return planted(300, validation=False)


@pytest.fixture(scope="module")
def expected(data) -> dict[str, Tensor]:
    """Final bits of two epochs with tables on the device."""
    trainer = make_trainer(data, None, "device")
    trainer.fit()
    return bits(trainer)


class TestResume:
    @pytest.mark.parametrize("incremental", [False, True])
    @pytest.mark.parametrize("asynchronous", [False, True])
    @pytest.mark.parametrize("placement", ["disk", CACHED])
    def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
        self, data, expected, tmp_path, placement, asynchronous, incremental
    ):
        options = CheckpointOptions(
            checkpoint_steps=1, keep=3, checkpoint_async=asynchronous, checkpoint_incremental=incremental
        )
        make_trainer(data, tmp_path / "run", placement, epochs=1, checkpoints=options).fit()
        assert bool(list((tmp_path / "run").rglob("*.changes"))) == incremental
        resumed = make_trainer(data, tmp_path / "run", placement, checkpoints=options)
        resumed.resume()
        resumed.fit()
        assert_same_bits(bits(resumed), expected)
        assert_same_bits({name[6:]: t for name, t in in_memory(tmp_path / "run/checkpoints/step-12").items()
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
            (CACHED, "disk"),
            ("device", CACHED),
        ],
    )
    @pytest.mark.parametrize("options", [EVERY, INCREMENTAL])
    @pytest.mark.few(3)
    def test_tables_may_move_between_tiers(self, data, expected, tmp_path, monkeypatch, before, after, options):
        monkeypatch.setattr(reader, "CHUNK_BYTES", 1000)  # so that there are many pieces
        make_trainer(data, tmp_path / "run", before, epochs=1, checkpoints=options).fit()
        resumed = make_trainer(data, tmp_path / "run", after, checkpoints=options)
        resumed.resume()
        resumed.fit()
        assert_same_bits(bits(resumed), expected)

    def test_going_back_forgets_what_is_on_the_device(self, data, tmp_path):
        """Caches are full of later rows when an earlier checkpoint is loaded."""
        for placement in ("disk", "host", CACHED):
            trainer = make_trainer(data, tmp_path / placement, placement, checkpoints=CheckpointOptions(4, keep=9))
            trainer.fit()
            path = tmp_path / placement / "checkpoints/step-4"
            trainer.resume(path)
            saved = in_memory(path)
            assert_same_bits(bits(trainer), {k[6:]: v for k, v in saved.items() if k.startswith("model.")})
            initial = trainer.evaluate("test")
            fresh = make_trainer(data, None, placement)
            fresh.resume(path)
            assert fresh.evaluate("test").log_loss == initial.log_loss

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
            assert folder.save(step, model_tensors(trained), {}).num_bytes < 200_000
        actual = collection()
        load_tensors(folder.path(2), model_tensors(actual))
        assert torch.equal(actual(batch), trained(batch))
        self.cut_in_two(actual, folder.path(2), actual.tables[0].rows.store.bytes_on_disk())
        other = te.KeyedJaggedTensor.from_lengths(["t"], ids + torch.tensor([1, 1, -1]), torch.tensor([1, 2]))
        assert torch.equal(actual(other), trained(other))  # rows that were never written have the first one's seed

    def cut_in_two(self, whole: te.nn.EmbeddingBagCollection, path: Path, num_bytes: int) -> None:
        """Parts are cut out of the file, holes and all."""
        (entry,), (table,) = reader.saved_tables(path).values(), (table.rows for table in whole.tables)
        for first, last in ((0, 6), (6, 1_000_000_000)):
            config = table.config.shard("t", (first, last - first), (0, 128), ["t"])
            local = te.nn.EmbeddingBagCollection([config], optimizer=te.optim.RowWiseAdagrad(lr=0.1))
            part = local.tables[0].rows
            part.replace_store(reader.load_store(path, entry, part))
            assert part.store.bytes_on_disk() <= num_bytes
            numbers = torch.tensor([row for row in (0, 1, 5, 6, 700, 999_999_999) if first <= row < last])
            expected = torch.empty(numbers.numel(), table.record.num_bytes, dtype=torch.uint8)
            table.store.read(numbers, expected).wait()
            actual = torch.empty_like(expected)
            part.store.read(numbers - first, actual).wait()
            assert torch.equal(actual, expected)

    @pytest.mark.parametrize("kind", ["save", "resume"])
    def test_no_table_passes_through_memory(self, data, tmp_path, monkeypatch, kind):
        trainer = make_trainer(data, tmp_path / "run", epochs=1, checkpoints=EVERY)
        if kind == "resume":
            trainer.fit()

        def refuse(*_: Any) -> None:
            raise AssertionError("the whole table is read")

        for name in ("assign", "_chunks"):
            monkeypatch.setattr(CachedRows, name, refuse)
        if kind == "save":
            trainer.fit()
        else:
            make_trainer(data, tmp_path / "run", epochs=1).resume()


class TestRanks:
    """Each saves the parts that it holds."""

    @pytest.mark.parametrize(
        ("plan", "asynchronous"),
        [
            ("mixed", False),
            ("mixed", True),
            ("columns", False),
            ("everywhere", True),
            pytest.param("copies", False, marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.more
    def test_a_resumed_job_has_the_bits_of_one_that_never_stopped(self, ranks, tmp_path, plan, asynchronous):
        options = CheckpointOptions(1, keep=3, checkpoint_incremental=True, checkpoint_async=asynchronous)
        job = partial(sharded, plan=plan, checkpoints=options)
        expected = ranks(2).run(partial(job, folder=tmp_path / "device", placement="device", epochs=2))
        placement = CACHED if plan == "columns" else "disk"
        ranks(2).run(partial(job, folder=tmp_path / "run", placement=placement, epochs=1))
        files = table_files(tmp_path / "run/checkpoints/step-6")
        # Of rows on the second rank, of columns, or of nothing but what the first rank has.
        place = {"mixed": "-1000-0.", "columns": "-0-2.", "everywhere": "-0-1.", "copies": "."}[plan]
        assert any(place in name for name in files)
        assert any(name.endswith(".changes") for name in files)
        actual = ranks(2).run(partial(job, folder=tmp_path / "run", placement=placement, epochs=2, resume=True))
        for one, other in zip(actual, expected, strict=True):
            assert_same_bits(one, other)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ((2, "rows", "disk"), (1, "", "disk")),
            ((2, "rows", "disk"), (2, "columns", "disk")),
            ((2, "uneven rows", "disk"), (2, "rows", "disk")),
            ((2, "columns", "disk"), (2, "rows", "disk")),
            ((2, "columns", "disk"), (2, "mixed", "device")),
            ((2, "mixed", "host"), (2, "rows", "disk")),
            ((2, "everywhere", "disk"), (2, "rows", "host")),
            ((2, "mixed", "disk"), (2, "copies", "disk")),
            ((1, "", "disk"), (2, "columns", "disk")),
            ((1, "", "device"), (2, "columns", "disk")),
        ],
    )
    @pytest.mark.few(2)
    @pytest.mark.more
    def test_tables_may_be_cut_otherwise(self, ranks, tmp_path, monkeypatch, before, after):
        options = CheckpointOptions(1, keep=3, checkpoint_incremental=True)
        job = partial(sharded, folder=tmp_path / "run", checkpoints=options, adam=True)
        for (size, plan, placement), resume in ((before, False), (after, True)):
            one = partial(job, plan=plan, placement=placement, epochs=1, resume=resume, only_load=resume)
            actual = [one(0)] if size == 1 else ranks(size).run(one)
            if not resume:
                expected = actual[0]
        for of_rank in actual:
            assert_same_bits(of_rank, expected)


class TestPieces:
    """Checkpoints whose tables were on the device, sharded or not, loaded to disk."""

    ROWS, DIM = 40, 6

    def whole(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            "t.weight": torch.randn(self.ROWS, self.DIM, generator=generator),
            "t.sum": torch.rand(self.ROWS, generator=generator),
        }

    def collection(self, placement: str) -> te.nn.EmbeddingBagCollection:
        table = te.TableConfig("t", self.ROWS, self.DIM, placement=placement, cache=te.CacheConfig(rows=32))
        return te.nn.EmbeddingBagCollection([table], optimizer=te.optim.RowWiseAdagrad(lr=0.1))

    CUTS = (Cut((0, 40), (0, 1), (0,)), Cut((0, 13), (1, 6), (0,)), Cut((13, 40), (1, 6), (0,)))

    @pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 27])
    @pytest.mark.parametrize("sharded", [False, True])
    def test_tensors_of_any_pieces_become_a_table_on_disk(self, tmp_path, monkeypatch, sharded, piece_bytes):
        monkeypatch.setattr("tritonemb.sharding.sharded_tensor.PIECE_BYTES", piece_bytes)
        monkeypatch.setattr(reader, "CHUNK_BYTES", 7 * 28)
        full = self.whole()
        saved = dict(full)
        if sharded:
            saved["t.weight"] = shards_of(0, full["t.weight"], self.CUTS)
        actual = self.collection("disk")
        names = {name.rpartition(".")[2] for name in actual.state_dict() if name.startswith("t.")}
        saved = {f"model.t.{n}": saved["t.weight" if n == "weight" else "t.sum"] for n in names}
        folder = CheckpointFolder(tmp_path)
        folder.save(1, saved | {"model.step": torch.tensor(3)}, {})
        chunks = stored_tensors(folder.path(1))["model.t.weight"].chunks
        assert len(chunks) > 1 or (not sharded and piece_bytes > 1000)
        load_tensors(folder.path(1), model_tensors(actual))
        assert_same_bits({"t.weight": actual.state_dict()["t.weight"]}, {"t.weight": full["t.weight"]})
        (state,) = names - {"weight"}
        assert torch.equal(actual.state_dict()[f"t.{state}"], full["t.sum"])

    def test_a_table_on_disk_becomes_shards(self, tmp_path, monkeypatch):
        monkeypatch.setattr(reader, "CHUNK_BYTES", 7 * 28)
        actual = self.collection("disk")
        ids = torch.tensor([3, 17, 39])
        actual(te.KeyedJaggedTensor.from_lengths(["t"], ids, torch.tensor([3]))).sum().backward()
        CheckpointFolder(tmp_path).save(1, model_tensors(actual), {})
        full = {f"model.{name}": tensor for name, tensor in actual.state_dict().items()}
        cuts = [Cut((5, 20), (0, 2), (0,)), Cut((30, 40), (2, 6), (0,))]
        shards = shards_of(0, torch.full((self.ROWS, self.DIM), -1.0), cuts)
        other_tensors = {name: torch.empty_like(tensor) for name, tensor in full.items() if name != "model.t.weight"}
        load_tensors(CheckpointFolder(tmp_path).path(1), {"model.t.weight": shards} | other_tensors)
        weight = full.pop("model.t.weight")
        for shard, cut in zip(shards.shards, cuts, strict=True):
            assert torch.equal(shard.tensor, weight[slice(*cut.rows), slice(*cut.columns)])
        assert_same_bits(other_tensors, full)


class TestMoment:
    @pytest.mark.parametrize("incremental", [False, True])
    def test_a_snapshot_is_of_the_moment_of_the_call(self, tmp_path, monkeypatch, incremental):
        """Whatever is written while it is not on the disk yet."""
        probe, gate = Probe(tmp_path, incremental=incremental), threading.Event()
        save = AsyncSave(probe.folder)
        real = writer.ChecksumWriter.write_data
        monkeypatch.setattr(writer.ChecksumWriter, "write_data", lambda *a: gate.wait(30) and real(*a))
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
                if step.step == 4:
                    seen.update({f"model.{name}": t for name, t in bits(trainer).items()})

        options = CheckpointOptions(checkpoint_steps=4, checkpoint_async=True, keep=9)
        trainer = make_trainer(data, tmp_path / "run", checkpoints=options, callbacks=[Remember()])
        trainer.fit()
        actual = in_memory(tmp_path / "run/checkpoints/step-4")
        assert_same_bits({name: actual[name] for name in seen}, seen)
        assert_same_bits(bits(trainer), expected)
