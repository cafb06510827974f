import os
import shutil

import pytest
import torch

from tritonemb.training.checkpoint import (
    MANIFEST,
    CheckpointError,
    CheckpointFolder,
    CheckpointOptions,
    load_tensors,
    read_manifest,
    stored_tensors,
)


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((3, 4), float(value)),
        "model.bits": torch.full((5,), float(value), dtype=torch.bfloat16),
        "model.step": torch.tensor(int(value)),
    }


def saved(folder: CheckpointFolder, *steps: int) -> CheckpointFolder:
    for step in steps:
        folder.save(step, tensors(step), {"progress": {"step": step}})
    return folder


def test_what_is_saved_is_read_back(tmp_path):
    folder = CheckpointFolder(tmp_path / "new" / "checkpoints")
    size = folder.save(7, tensors(3.0), {"progress": {"step": 7}})
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    load_tensors(folder.path(7), found)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(3.0).items())
    assert read_manifest(folder.path(7))["progress"] == {"step": 7}
    files = [path for path in folder.path(7).iterdir() if path.name != MANIFEST]
    assert size == sum(path.stat().st_size for path in files) > 3 * 4 * 4


def test_the_newest_are_kept_and_the_best_besides(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    assert (folder.latest(), folder.best(), folder.steps()) == (None, None, [])
    saved(folder, 8, 9)
    folder.mark_best(9)
    saved(folder, 10, 100)
    assert folder.steps() == [10, 100]
    assert folder.latest() == folder.path(100)
    assert folder.best() == tmp_path / "best-9"
    assert read_manifest(folder.best())["progress"] == {"step": 9}
    folder.mark_best(100)
    assert folder.best() == tmp_path / "best-100"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-100", "step-10", "step-100"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 5)
    folder.save(5, tensors(2.0), {})
    found = tensors(0.0)
    load_tensors(folder.path(5), found)
    assert torch.equal(found["model.a"], torch.full((3, 4), 2.0))


def test_what_a_killed_process_left_is_no_checkpoint_and_is_removed(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 1)
    for name in (".writing-step-2", ".dropped-step-0", ".writing-best-1"):
        shutil.copytree(folder.path(1), tmp_path / name)
    (tmp_path / "step-3").mkdir()  # not by us, and without a manifest
    assert folder.steps() == [1]
    saved(folder, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-3"]


def test_another_model_is_refused_with_every_difference(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 1)
    other = {
        "model.a": torch.zeros(3, 5),
        "model.bits": torch.zeros(5),
        "model.new": torch.zeros(1),
    }
    with pytest.raises(ValueError, match="of another model or optimizer") as caught:
        load_tensors(folder.path(1), other)
    assert str(caught.value).splitlines()[1:] == [
        "  model.a is float32 [3, 4] in the checkpoint, float32 [3, 5] here",
        "  model.bits is bfloat16 [5] in the checkpoint, float32 [5] here",
        "  model.new is not in the checkpoint",
        "  model.step is in the checkpoint only",
    ]
    assert torch.equal(other["model.a"], torch.zeros(3, 5))


def test_a_long_list_of_differences_is_cut(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(1, {f"model.{i:03}": torch.zeros(1) for i in range(50)}, {})
    with pytest.raises(ValueError, match="of another model or optimizer") as caught:
        load_tensors(folder.path(1), {})
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[-1] == "  and 30 more"


def test_names_to_ignore_may_be_in_the_checkpoint_alone(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 1)
    found = {"model.a": torch.zeros(3, 4), "model.bits": torch.zeros(5, dtype=torch.bfloat16)}
    load_tensors(folder.path(1), found, ignore=("model.st",))
    assert torch.equal(found["model.a"], torch.ones(3, 4))
    assert set(stored_tensors(folder.path(1))) == set(tensors())


def test_damage_is_found(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 1)
    data = next(path for path in folder.path(1).iterdir() if path.suffix == ".distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    message = f"is damaged: {data.name} has {len(whole) - 1:,} bytes instead of {len(whole):,} bytes; use another"
    with pytest.raises(ValueError, match=message):
        read_manifest(folder.path(1))
    data.unlink()
    with pytest.raises(ValueError, match=f"is damaged: {data.name} has vanished instead of"):
        read_manifest(folder.path(1))
    (folder.path(1) / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"trainer\.json is damaged"):
        read_manifest(folder.path(1))
    (folder.path(1) / MANIFEST).write_text('{"format": 99, "files": {}, "versions": {"tritonemb": "9.9"}}')
    with pytest.raises(ValueError, match=r"format 99, .* reads format 1; it was written by tritonemb 9\.9"):
        read_manifest(folder.path(1))
    with pytest.raises(FileNotFoundError, match=r"is no checkpoint: it has no trainer\.json"):
        read_manifest(tmp_path)


def test_a_full_disk_leaves_the_earlier_checkpoint_whole(small_disk):
    folder = saved(CheckpointFolder(small_disk / "checkpoints"), 1)
    large = {"model.a": torch.zeros(2_000_000)}
    with pytest.raises(CheckpointError) as caught:
        folder.save(2, large, {})
    message = str(caught.value)
    assert message.startswith(f"the checkpoint of step 2 could not be written to {folder.folder}: ")
    assert "It needs 8,000,000 bytes" in message
    assert "The checkpoint step-1 is whole" in message
    assert [path.name for path in folder.folder.iterdir()] == ["step-1"]
    found = tensors(0.0)
    load_tensors(folder.path(1), found)
    assert torch.equal(found["model.a"], torch.ones(3, 4))
    saved(folder, 3)  # there is room again
    assert folder.steps() == [1, 3]


def test_a_folder_that_takes_nothing_is_reported(tmp_path):
    """A file stands where the folder should; permissions do not stop root."""
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="There is no earlier checkpoint"):
        saved(CheckpointFolder(tmp_path / "checkpoints"), 1)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_reported(tmp_path):
    folder = saved(CheckpointFolder(tmp_path / "checkpoints"), 1)
    folder.folder.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*The checkpoint step-1 is whole"):
            saved(folder, 2)
    finally:
        folder.folder.chmod(0o700)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_steps": 0}, "checkpoint_steps must be at least 1"),
        ({"checkpoint_minutes": -1.0}, "checkpoint_minutes must not be negative"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"on_checkpoint_error": "ignore"}, "on_checkpoint_error must be 'continue' or 'stop', got 'ignore'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointOptions(**options)
