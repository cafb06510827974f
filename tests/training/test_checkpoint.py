import errno
import io
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import tritonemb as te
from tests.helpers import Calls, assert_same_bits, resealed
from tritonemb.storage.checkpoint import MANIFEST, METADATA, CheckpointReader
from tritonemb.training import CheckpointOptions
from tritonemb.training.checkpoint import CheckpointError, CheckpointFolder, load_tensors, read_manifest, stored_tensors
from tritonemb.training.checkpoint.manager import load_model
from tritonemb.training.train_state import model_tensors


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
    written = folder.save(7, tensors(3.0), {"progress": {"step": 7}})
    actual = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    load_tensors(folder.path(7), actual)
    assert all(torch.equal(actual[name], tensor) for name, tensor in tensors(3.0).items())
    assert read_manifest(folder.path(7))["progress"] == {"step": 7}
    files = [path for path in folder.path(7).iterdir() if path.name != MANIFEST]
    assert written.num_bytes == sum(path.stat().st_size for path in files) > 3 * 4 * 4
    assert (written.step, written.path) == (7, folder.path(7))
    assert written.seconds > 0


def test_rows_that_a_sharded_table_has_cached_are_those_of_the_checkpoint_that_is_loaded(tmp_path):
    config = te.TableConfig("user", 64, 4, placement="host", cache=te.CacheConfig(rows=32))
    collection = te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=0.1))
    plan = te.sharding.ShardingPlan({"user": te.sharding.TableWise(0)}, 1)
    model, batch = te.HybridParallel(collection, plan), te.KeyedJaggedTensor.from_lists({"user": [[3], [60, 5]]})
    path = CheckpointFolder(tmp_path).save(1, model_tensors(model), {}).path
    results = []
    for _ in range(2):
        result = model(batch)
        result.sum().backward()
        results.append(result.detach())
        load_model(path, model, {}, stored_tensors(path), ())
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", [te.nn.EmbeddingBag, te.nn.Embedding])
def test_a_module_of_a_dynamic_table_is_loaded(tmp_path, kind):
    first, second = (
        torch.nn.Sequential(kind(None, 4, capacity=64, optimizer=te.optim.Adam(lr=0.1)), torch.nn.Linear(4, 1))
        for _ in range(2)
    )
    for _ in range(3):
        first(torch.tensor([[5, 6], [10**12, 5]])).sum().backward()
    path = CheckpointFolder(tmp_path).save(1, model_tensors(first), {}).path
    load_model(path, second, {}, stored_tensors(path), ())
    assert_same_bits(second.state_dict(), first.state_dict())


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
    actual = tensors(0.0)
    load_tensors(folder.path(5), actual)
    assert torch.equal(actual["model.a"], torch.full((3, 4), 2.0))


@pytest.mark.filterwarnings("ignore:.*step-3 is skipped")
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
        "  model.a is float32 [3, 4] in the checkpoint, float32 [3, 5] in the model",
        "  model.bits is bfloat16 [5] in the checkpoint, float32 [5] in the model",
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
    actual = {"model.a": torch.zeros(3, 4), "model.bits": torch.zeros(5, dtype=torch.bfloat16)}
    load_tensors(folder.path(1), actual, ignore=("model.st",))
    assert torch.equal(actual["model.a"], torch.ones(3, 4))
    assert set(stored_tensors(folder.path(1))) == set(tensors())


def test_damage_is_found(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 1)
    data = next(path for path in folder.path(1).iterdir() if path.suffix == ".distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(ValueError, match="does not have the checksum that was written; use another one"):
        read_manifest(folder.path(1))
    data.write_bytes(content[:-1])
    message = f"is damaged: {data.name} has {len(content) - 1:,} bytes, expected {len(content):,} bytes; use another"
    with pytest.raises(ValueError, match=message):
        read_manifest(folder.path(1))
    data.unlink()
    with pytest.raises(ValueError, match=f"is damaged: {data.name} does not exist"):
        read_manifest(folder.path(1))
    (folder.path(1) / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"trainer\.json is damaged"):
        read_manifest(folder.path(1))
    (folder.path(1) / MANIFEST).write_text('{"format": 99, "files": {}, "versions": {"tritonemb": "9.9"}}')
    with pytest.raises(ValueError, match=r"format 99, .* reads format 1; it was written by tritonemb 9\.9"):
        read_manifest(folder.path(1))
    with pytest.raises(FileNotFoundError, match=r"is not a checkpoint: it has no trainer\.json"):
        read_manifest(tmp_path)


def test_a_manifest_is_json_and_one_without_a_digest_is_read_with_a_word(tmp_path):
    path = saved(CheckpointFolder(tmp_path), 1).path(1)
    manifest = json.loads((path / MANIFEST).read_text())
    assert list(manifest)[-1] == "sha256"
    assert manifest.pop("sha256")
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1))  # as earlier versions wrote it
    with pytest.warns(match=r"step-1/trainer\.json has no digest"):
        assert read_manifest(path) == manifest


def test_a_checkpoint_without_its_manifest_is_not_passed_over_silently(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 1, 2)
    (folder.path(2) / MANIFEST).unlink()
    with pytest.warns(match=r"step-2 is skipped: it has no trainer\.json, so it cannot be read"):
        assert folder.latest() == folder.path(1)


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
        with pytest.raises(CheckpointError, match=r"Permission denied.*The latest complete checkpoint is step-1"):
            saved(folder, 2)
    finally:
        folder.folder.chmod(0o700)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_steps": 0}, "checkpoint_steps must be at least 1"),
        ({"checkpoint_minutes": -1.0}, "checkpoint_minutes must not be negative"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"on_checkpoint_error": "ignore"}, r"on_checkpoint_error must be one of \('continue', 'stop'\), got 'ignore'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        CheckpointOptions(**options)


class Killed(BaseException):
    """The process is no more: nothing that follows is done."""


def ends_before(call, *args, **kwargs):
    raise Killed


def ends_behind(call, *args, **kwargs):
    call(*args, **kwargs)
    raise Killed


def ends_within(call, *args, **kwargs):
    """Fail while a folder is removed: one file is gone, and the manifest is still there."""
    if call.__name__ == "rmtree" and os.path.isdir(args[0]):
        next(path for path in Path(args[0]).iterdir() if path.name != MANIFEST).unlink(missing_ok=True)
    raise Killed


def fails(call, *args, **kwargs):
    raise OSError(errno.EIO, "the disk is broken")


def fault_at(monkeypatch, number: int, fault) -> Callable[[], int]:
    """Fail the call of this number among those that change or sync the disk."""
    calls = 0

    def counted(call):
        def called(*args, **kwargs):
            nonlocal calls
            calls += 1
            return fault(call, *args, **kwargs) if calls == number else call(*args, **kwargs)

        return called

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return lambda: calls


def value_in(path: Path | None) -> float:
    """Return the value that `tensors` was made with, after a check of the whole checkpoint."""
    assert path is not None
    read_manifest(path)
    actual = tensors(0.0)
    load_tensors(path, actual)
    assert all(torch.equal(actual[name], tensor) for name, tensor in tensors(float(actual["model.step"])).items())
    return float(actual["model.step"])


@pytest.mark.parametrize("fault", [ends_before, ends_behind, ends_within, fails])
def test_a_whole_checkpoint_is_there_whatever_goes_wrong_while_one_is_replaced(tmp_path, monkeypatch, fault):
    for number in itertools.count(1):
        folder = saved(CheckpointFolder(tmp_path / str(number)), 5)
        folder.mark_best(5)
        with monkeypatch.context() as patched, suppress(Killed, CheckpointError):
            calls = fault_at(patched, number, fault)
            folder.save(5, tensors(6.0), {})
        assert folder.steps() == [5]
        actual = value_in(CheckpointFolder(folder.folder).latest())
        assert actual in (5.0, 6.0)
        assert value_in(folder.best()) == 5.0
        saved(folder, 7)
        assert sorted(path.name for path in folder.folder.iterdir()) == ["best-5", "step-5", "step-7"]
        assert value_in(folder.path(5)) == actual
        if calls() < number:  # nothing has gone wrong any more
            break
    assert number > 9


@pytest.mark.parametrize("fault", [ends_before, ends_behind, ends_within, fails])
def test_the_best_checkpoint_is_there_whatever_goes_wrong_while_it_is_marked_again(tmp_path, monkeypatch, fault):
    for number in itertools.count(1):
        folder = saved(CheckpointFolder(tmp_path / str(number)), 5)
        folder.mark_best(5)
        folder.save(5, tensors(6.0), {})
        with monkeypatch.context() as patched, suppress(Killed, CheckpointError):
            calls = fault_at(patched, number, fault)
            folder.mark_best(5)
        assert value_in(folder.latest()) == 6.0
        assert value_in(CheckpointFolder(folder.folder).best()) in (5.0, 6.0)
        folder.mark_best(5)
        assert sorted(path.name for path in folder.folder.iterdir()) == ["best-5", "step-5"]
        assert value_in(folder.best()) == 6.0
        if calls() < number:
            break
    assert number > 6


def test_a_checkpoint_that_waits_for_its_name_can_be_marked_and_replaced(tmp_path):
    folder = saved(CheckpointFolder(tmp_path), 4, 5)
    folder.path(5).rename(tmp_path / ".replaced-step-5")
    assert folder.latest() == folder.path(5) == tmp_path / ".replaced-step-5"
    folder.mark_best(5)
    assert value_in(folder.best()) == 5.0
    folder.path(5).rename(tmp_path / ".replaced-step-5")
    folder.save(5, tensors(6.0), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-5", "step-4", "step-5"]
    assert value_in(folder.latest()) == 6.0


@pytest.mark.parametrize("keep", [1, 3])
def test_a_run_that_has_gone_back_goes_on_from_there_however_long_removing_takes(tmp_path, monkeypatch, keep):
    folder = saved(CheckpointFolder(tmp_path, keep=5), 2, 3, 8, 9)
    folder.mark_best(8)
    folder.keep = keep
    with monkeypatch.context() as patched, suppress(Killed):
        patched.setattr(shutil, "rmtree", partial(ends_before, None))
        folder.save(5, tensors(5.0), {})
    assert folder.steps() == [2, 3, 5][-keep:]
    assert folder.best() is None
    assert value_in(folder.latest()) == 5.0
    saved(folder, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step}" for step in (2, 3, 5, 6)[-keep:]]


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be opened")
def test_without_hard_links_the_best_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    folder, synced, fsync, rename = saved(CheckpointFolder(tmp_path), 5), set(), os.fsync, os.rename

    def link(*_):
        raise OSError(errno.EPERM, "no hard links here")

    def noted(handle):
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    def checked(source, target):
        assert {path.stat().st_ino for path in (source, *source.iterdir())} <= synced
        rename(source, target)

    for name, function in (("link", link), ("fsync", noted), ("replace", checked)):
        monkeypatch.setattr(os, name, function)
    folder.mark_best(5)
    assert value_in(folder.best()) == 5.0


def test_a_failure_leaves_the_earlier_checkpoint_its_name(tmp_path, monkeypatch):
    folder = saved(CheckpointFolder(tmp_path), 5)
    rename = os.replace

    def refuse(source, target):
        if os.path.basename(source).startswith(".writing-"):
            raise OSError(errno.EIO, "the disk is broken")
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"the disk is broken.*The latest complete checkpoint is step-5"):
        saved(folder, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("module", [os, shutil], ids=["built in", "in Python"])
def test_a_checkpoint_of_a_stranger_runs_no_code(tmp_path, module, protocol):
    path, mark = saved(CheckpointFolder(tmp_path), 1).path(1), tmp_path / "mark"
    evil = Calls(os.mkdir, str(mark)) if module is os else Calls(shutil.copytree, str(path), str(mark))
    actual = tensors(0.0)
    (path / METADATA).write_bytes(pickle.dumps(evil, protocol))
    resealed(path, METADATA)
    name = "posix.mkdir" if module is os else "shutil.copytree"
    for read in (partial(load_tensors, path, actual), partial(stored_tensors, path)):
        with pytest.raises(ValueError, match=rf"step-1/\.metadata refers to {name}, which could run code"):
            read()
    assert not mark.exists()
    assert all(torch.equal(tensor, tensors(0.0)[key]) for key, tensor in actual.items())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_the_tensors_of_a_stranger_run_no_code(tmp_path, protocol):
    path, mark = saved(CheckpointFolder(tmp_path), 1).path(1), tmp_path / "mark"
    content, metadata = io.BytesIO(), pickle.loads((path / METADATA).read_bytes())
    torch.save(Calls(os.mkdir, str(mark)), content, pickle_protocol=protocol)
    for entry in metadata.storage_data.values():
        entry.offset, entry.length = 0, content.tell()
        (path / entry.relative_path).write_bytes(content.getvalue())
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    read_into = partial(load_tensors, path, tensors(0.0))
    with pytest.raises(ValueError, match=r"step-1/__0_0\.distcp (refers to posix\.mkdir, which could run|is damaged)"):
        read_into()
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cos\nsystem\n.", "refers to os.system, which could run code"),
        (b"ctorch\nload\n.", r"refers to torch\.load"),
        (b"\x80\x04\x8c\x05torch\x8c\x0eSize.__class__\x93.", r"refers to torch\.Size\.__class__"),
        (b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93.", r"refers to torch\.serialization\.os\.system"),
        (b"\x82\x01.", "is damaged"),  # an extension of copyreg
        (b"ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.", "is damaged"),  # attributes of a class
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x01\x00\x00\x00aK\x01s\x86b.", "is damaged"),
        (b"ctorch.serialization\n_get_layout\nN}X\x05\x00\x00\x00cacheK\x01s\x86b.", "is damaged"),
        (b"ctorch\nfloat32\n.", "is damaged"),  # not the metadata of a checkpoint
        (b"", "is damaged"),
    ],
)
def test_metadata_has_tensors_and_no_more(tmp_path, content, message):
    (tmp_path / METADATA).write_bytes(content)
    with pytest.raises(ValueError, match=rf"/\.metadata {message}"):
        CheckpointReader(tmp_path).read_metadata()
    assert not hasattr(Metadata, "a")
    assert isinstance(torch.serialization._get_layout.cache, dict)


def test_metadata_of_files_elsewhere_is_refused(tmp_path):
    path = saved(CheckpointFolder(tmp_path), 1).path(1)
    metadata = pickle.loads((path / METADATA).read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../secret/__0_0.distcp"
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata is damaged .*files in other folders"):
        stored_tensors(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_is_read_as_torch_reads_it(tmp_path, protocol):
    values = {
        f"{dtype}": torch.ones(2, dtype=dtype)
        for dtype in (torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    }
    state = {"a": values, "b": [torch.ones(()), torch.ones(1, 2, 3, 4)], "c": "text"}
    dcp.save(state, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    metadata.storage_meta.checkpoint_id = PurePosixPath("runs/first")
    entry = metadata.state_dict_metadata["b.1"].properties
    entry.memory_format, entry.layout = torch.channels_last, torch.sparse_coo
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata, protocol))
    assert CheckpointReader(tmp_path).read_metadata() == metadata
