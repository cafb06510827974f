"""Checkpoints that hold what has changed in tables on disk since the last one."""

from __future__ import annotations

import errno
import os
import shutil
from typing import Any

import pytest
import torch

pytest.importorskip("psutil")

from tests.training.disk_job import Probe, in_memory
from tritonemb.storage import checkpoint as files
from tritonemb.training import CheckpointError
from tritonemb.training.checkpoint import load_tensors, read_manifest, writer
from tritonemb.training.train_state import model_tensors


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
        actual = []
        for step in range(2, 6):
            probe.write(0, 1000)
            actual.append(len(probe.save(step)))
            assert torch.equal(probe.saved(step), probe.values())
        assert actual == [2, 3, 1, 2]

    def test_a_chain_has_an_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(writer, "MAX_FILES", 3)
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

        for place in ((files.FileSystemWriter, "write_data"), (writer, "size_and_checksum")):
            probe.write(5, 6)
            with monkeypatch.context() as patch:
                patch.setattr(*place, fail)
                with pytest.raises(CheckpointError, match="complete checkpoint is step-1"):
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
