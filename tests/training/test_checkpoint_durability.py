"""Durability of checkpoints: files are synced before the checkpoint gets its name, and then its name is."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("psutil")

from tests.durability import LINUX, Durability
from tests.training.disk_job import Probe
from tritonemb.storage.checkpoint import MANIFEST
from tritonemb.training.checkpoint import CheckpointFolder
from tritonemb.training.checkpoint.manager import AsyncSave
from tritonemb.training.train_state import model_tensors

pytestmark = LINUX


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, asynchronous):
    """A new one, one that takes an earlier one away, one that replaces another, and the best one."""
    folder = CheckpointFolder(tmp_path, keep=1)
    save, durability = AsyncSave(folder), Durability(monkeypatch, tmp_path)
    for step, best in ((1, True), (2, False), (2, True)):
        tensors = {"model.a": torch.full((3, 4), float(step))}
        if asynchronous:
            save.start(step, tensors, {}, best)
            save.wait()
        else:
            folder.save(step, tensors, {}, best=best)
        assert durability.check() == []
    assert [path.name for path, _ in durability.named] == ["step-1", "best-1", "step-2", "step-2", "best-2"]
    assert all(files == sorted((".metadata", "__0_0.distcp", MANIFEST)) for _, files in durability.named)


@pytest.mark.parametrize("links", [False, True])
def test_snapshots_of_tables_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch, links):
    probe, durability = Probe(tmp_path, rows=300, keep=1, incremental=True), Durability(monkeypatch, tmp_path)

    def refuse(*_):
        raise OSError("no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for step in (1, 2):
        probe.folder.save(step, model_tensors(probe.collection), {}, best=step == 2)
        probe.write(0, 3)
        assert durability.check() == []
    checkpoints = [(path.name, files) for path, files in durability.named if path.suffix not in (".rows", ".changes")]
    assert [name for name, _ in checkpoints] == ["step-1", "step-2", "best-2"]
    suffixes = [{name.rpartition(".")[2] for name in files} for _, files in checkpoints]
    assert all({"rows", "metadata", "json"} <= actual for actual in suffixes)
    assert ["changes" in actual for actual in suffixes] == [False, links, links]
