"""Publishers and followers of whole models: a follower has the bits of the trainer, whatever becomes of the files."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import tritonemb as te
from tests.server.jobs import local_servers
from tests.serving.models import KINDS, Model, scores, train
from tritonemb.serving import ModelFollower, Publisher
from tritonemb.serving import publisher as publishing
from tritonemb.serving import updates as following
from tritonemb.serving.publisher import PUBLISHED
from tritonemb.serving.updates import FollowedTable, Update, merge_changes
from tritonemb.storage import StorageError
from tritonemb.training.checkpoint import CheckpointFolder
from tritonemb.training.checkpoint.manager import services_of
from tritonemb.training.train_state import model_tensors
from tritonemb.utils import atomic_write, read_sealed, seal


@pytest.fixture
def trainer(request, tmp_path):
    """A model of a kind, and its servers."""
    model = Model(request.param, tmp_path / "rows")
    if request.param != "server":
        yield model
        return
    with local_servers(2) as servers:
        te.server.attach(model, servers, 0)
        yield model


@pytest.mark.parametrize("trainer", KINDS, indirect=True)
def test_followers_have_the_bits_of_the_trainer(trainer, tmp_path):
    kind = "dynamic" if trainer.tables.configs[1].is_dynamic else "device"
    publisher, served = Publisher(tmp_path / "p", most=4), Model(kind, seed=1)
    follower = ModelFollower(served, tmp_path / "p", poll=None)
    assert "has no checkpoint, and no servers.json" in follower.problem
    for step in range(1, 11):
        train(trainer, step)
        publisher.publish(trainer, step)
        expected = scores(trainer)
        assert follower.refresh(), follower.problem
        assert follower.pending()
        if step in (3, 7):  # several files at once
            continue
        follower.apply()
        if follower.step != step:  # what came while an update was pending
            assert follower.refresh()
            follower.apply()
        assert follower.step == step
        assert not follower.pending()
        assert torch.equal(scores(served), expected)
        assert not follower.refresh()
    state, expected = served.state_dict(), trainer.state_dict()
    for name in ("tables.a.weight", "tables.b.weight", "dense.weight", "dense.bias"):
        assert torch.equal(state[name], expected[name].cpu())
    if kind == "dynamic":
        assert torch.equal(state["tables.b.ids"], expected["tables.b.ids"])
        assert trainer.tables["b"].statistics().evictions > 10
    late = Model(kind, seed=2)
    ModelFollower(late, tmp_path / "p", poll=None)
    assert torch.equal(scores(late), scores(trainer))


@pytest.mark.parametrize("kind", ["host", "disk", "dynamic-host"])
def test_served_tables_on_other_tiers(kind, tmp_path):
    trainer = Model("dynamic" if kind.startswith("dynamic") else "device")
    publisher, served = Publisher(tmp_path / "p"), Model(kind, tmp_path / "rows", seed=1)
    follower = ModelFollower(served, tmp_path / "p", poll=None)
    for step in range(1, 4):
        train(trainer, step)
        publisher.publish(trainer, step)
        assert follower.refresh(), follower.problem
        follower.apply()
        assert torch.equal(scores(served), scores(trainer))


def save(model: Model, folder: Path, step: int) -> None:
    checkpoints, manifest = CheckpointFolder(folder / "checkpoints", keep=2), {"progress": {"step": step}}
    checkpoints.save(step, model_tensors(model), manifest, services=services_of(model))


@pytest.mark.few(3)
@pytest.mark.parametrize("trainer", KINDS, indirect=True)
def test_checkpoints_of_a_run(trainer, tmp_path):
    """Dense layers and rows of one step; a damaged one is refused, and the one before it served on."""
    kind = "dynamic" if trainer.tables.configs[1].is_dynamic else "device"
    served = Model(kind, seed=1)
    follower = ModelFollower(served, tmp_path / "run", poll=None)
    for step in (1, 2, 9, 10):
        train(trainer, step)
        save(trainer, tmp_path / "run", step)
        previous, expected = scores(served), scores(trainer)
        assert follower.refresh(), follower.problem
        assert torch.equal(scores(served), previous)
        follower.apply()
        assert (follower.step, follower.problem) == (step, None)
        assert torch.equal(scores(served), expected)
        assert not follower.refresh()
    assert follower.age < 600
    train(trainer, 11)
    save(trainer, tmp_path / "run", 11)
    for path in (tmp_path / "run/checkpoints/step-11").iterdir():
        content = path.read_bytes()
        for bad in (content[: len(content) // 2], content[:-9] + b"x" + content[-8:]):
            path.write_bytes(bad)
            assert not follower.refresh()
            assert follower.problem is not None
        path.write_bytes(content)
    (tmp_path / "run/checkpoints/.writing-step-12").mkdir()
    assert torch.equal(scores(served), expected)
    assert follower.refresh()
    follower.apply()
    assert torch.equal(scores(served), scores(trainer))


@pytest.fixture
def chain(tmp_path):
    """A folder with a full snapshot and two of changes; the manifests and the scores after each."""
    model, publisher, manifests, expected = Model("dynamic"), Publisher(tmp_path / "p"), [], []
    for step in range(1, 4):
        train(model, step)
        publisher.publish(model, step)
        manifests.append(json.loads(read_sealed(tmp_path / "p" / PUBLISHED)))
        expected.append(scores(model))
    return tmp_path / "p", manifests, expected


def use(folder: Path, manifest: dict) -> None:
    atomic_write(folder / PUBLISHED, seal(json.dumps({key: manifest[key] for key in ("servers", "model", "step")})))


def test_damage_of_any_byte_changes_nothing(chain):
    folder, manifests, expected = chain
    use(folder, manifests[0])
    served = Model("dynamic", seed=1)
    follower = ModelFollower(served, folder, poll=None)
    use(folder, manifests[2])
    for path in [folder / PUBLISHED, *(folder / name for name in manifests[2]["model"][0]["files"][1:])]:
        content = path.read_bytes()
        places = range(0, len(content), max(1, len(content) // 12))
        damaged = [content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in places]
        for bad in [*damaged, *(content[:at] for at in places)]:
            path.write_bytes(bad)
            assert not follower.refresh()
            assert follower.problem is not None
            path.write_bytes(content)
    assert torch.equal(scores(served), expected[0])
    assert (follower.step, follower.pending()) == (1, False)
    assert follower.refresh()
    follower.apply()
    assert torch.equal(scores(served), expected[2])
    assert (follower.step, follower.problem) == (3, None)


@pytest.mark.parametrize("published", ["fp32", "int8"])
@pytest.mark.parametrize("quantized", [None, "int8", "int4", "int2"])
def test_quantized_rows(published, quantized, tmp_path):
    """Rows are quantized by the publisher, the follower, or both: the bits are those of `te.quantize`."""
    model, publisher = Model(), Publisher(tmp_path, rows=published)
    publisher.publish(model)
    served = te.quantize(Model(seed=1), quantized) if quantized else Model(seed=1)
    follower = ModelFollower(served, tmp_path, poll=None)
    train(model, 3)
    publisher.publish(model)
    assert follower.refresh()
    follower.apply()
    if published == "int8" and quantized != "int8":  # the follower decodes rows before it quantizes them
        rows = te.quantize(model)
        with torch.no_grad():
            for name in "ab":
                model.tables[name].weight.copy_(rows.tables[name].dequantize())
    expected = te.quantize(model, quantized) if quantized else model
    for name in "ab":
        assert torch.equal(served.tables[name].weight, expected.tables[name].weight)


@pytest.mark.more
@pytest.mark.parametrize("trainer", ["server"], indirect=True)
@pytest.mark.parametrize("quantized", ["int8", "int4"])
def test_quantized_rows_of_servers(trainer, quantized, tmp_path):
    """Rows that servers lack have initial values, also quantized."""
    train(trainer, 1)
    Publisher(tmp_path).publish(trainer)
    served = te.quantize(Model(seed=1), quantized)
    assert ModelFollower(served, tmp_path, poll=None).problem is None
    assert torch.equal(scores(served), scores(te.quantize(trainer, quantized)))


def test_an_update_that_failed_is_applied_again(chain, monkeypatch):
    folder, manifests, expected = chain
    served, calls, write = Model("dynamic", seed=1), [], FollowedTable.write
    use(folder, manifests[0])
    follower = ModelFollower(served, folder, poll=None)
    use(folder, manifests[2])
    assert follower.refresh()

    def write_or_fail(table: FollowedTable, *args) -> None:
        calls.append(table.name)
        if len(calls) == 2:
            raise MemoryError
        write(table, *args)

    monkeypatch.setattr(FollowedTable, "write", write_or_fail)
    with pytest.raises(MemoryError):
        follower.apply()
    follower.apply()
    assert calls == ["tables.a", "tables.b"] * 2
    assert follower.step == 3
    assert torch.equal(scores(served), expected[2])


def test_a_prepared_update_has_no_buffers_of_files(chain, monkeypatch):
    """A view of a tensor would hold the record that it was read from."""
    finish, updates = Update.finish, []
    monkeypatch.setattr(Update, "finish", lambda update: updates.append(update) or finish(update))
    ModelFollower(Model("dynamic", seed=1), chain[0], poll=None)
    ids = [ids for parts in updates[0]._ids.values() for ids in parts]
    assert ids
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in ids)


def test_changes_are_merged_up_to_a_block(monkeypatch):
    monkeypatch.setattr(following, "BLOCK_ELEMENTS", 8)
    ids = iter(torch.arange(14).split(2))
    removed = [(next(ids), None, 0) for _ in range(2)]
    kinds = [(2, torch.float32, 0)] * 3 + [(1, torch.float32, 2), (1, torch.uint8, 2)]
    rows = [(next(ids), torch.arange(2 * width).reshape(2, width).to(dtype), at) for width, dtype, at in kinds]
    merged = merge_changes(removed + rows)
    assert [(len(ids), column) for ids, _, column in merged] == [(4, 0), (4, 0), (2, 0), (2, 2), (2, 2)]
    assert torch.equal(torch.cat([ids for ids, *_ in merged]), torch.arange(14))
    assert torch.equal(merged[1][1], torch.cat([rows[0][1], rows[1][1]]))
    assert [None if part is None else part.dtype for _, part, _ in merged[3:]] == [torch.float32, torch.uint8]
    assert merge_changes([]) == []


@pytest.mark.parametrize("change", ["dense", "table", "rows", "more rows", "capacity", "fallback rows"])
def test_another_model_is_refused(change, tmp_path):
    model = Model("dynamic")
    train(model, 1)
    Publisher(tmp_path).publish(model)
    served = Model("dynamic", seed=1)
    if change == "dense":
        served.dense = nn.Linear(11, 2)
    elif change in ("capacity", "fallback rows"):
        sizes = {"capacity": 4, "fallback_rows": 4} if change == "capacity" else {"capacity": 64, "fallback_rows": 5}
        table = te.TableConfig("b", None, 3, **sizes)
        served.tables = te.nn.EmbeddingBagCollection([te.TableConfig("a", 300, 8), table])
    else:
        names, size = ("a", "c") if change == "table" else ("a", "b"), {"rows": 20, "more rows": 301}
        tables = [
            te.TableConfig(names[0], size.get(change, 300), 8),
            te.TableConfig(names[1], None, 3, capacity=64),
        ]
        served.tables = te.nn.EmbeddingBagCollection(tables)
    state = {name: value.clone() for name, value in served.state_dict().items()}
    follower = ModelFollower(served, tmp_path, poll=None)
    parts = {
        "dense": "dense.bias is float32",
        "table": "'tables.b' was published",
        "rows": "has 20 rows",
        "more rows": "table 'tables.a' has 301 rows, and 300 were published",
        "capacity": "no room",
        "fallback rows": "'tables.b' was published with 4 fallback rows, and has 5; use",
    }
    assert parts[change] in follower.problem
    assert follower.step is None
    assert all(torch.equal(value, state[name]) for name, value in served.state_dict().items())


def test_a_table_without_fallback_rows_is_another_one(tmp_path):
    tables = (te.TableConfig("a", None, 3, capacity=64, fallback_rows=rows) for rows in (0, 4))
    model, served = (te.nn.EmbeddingBagCollection([table]) for table in tables)
    Publisher(tmp_path).publish(model)
    follower = ModelFollower(served, tmp_path, poll=None)
    assert "'a' was published with 0 fallback rows, and has 4" in follower.problem
    assert follower.step is None


@pytest.mark.parametrize("kind", ["device", "server"])
@pytest.mark.parametrize("file", ["changes", "snapshot", "manifest"])
def test_a_full_disk(small_disk, kind, file, monkeypatch):
    """The publisher says so, the follower serves what it has, and the next snapshot is a full one."""
    model, served, publisher = (
        Model(kind),
        Model(seed=1),
        Publisher(small_disk / "p", most=1 if file == "snapshot" else 16),
    )
    with local_servers(2) if kind == "server" else nullcontext() as servers:
        if servers is not None:
            te.server.attach(model, servers, 0)
        publisher.publish(model, 1)
        previous = {path.name for path in (small_disk / "p").iterdir()}
        follower, expected = ModelFollower(served, small_disk / "p", poll=None), scores(model)
        model.tables.load_state_dict(Model(seed=7).tables.state_dict())  # all rows change
        train(model, 2)
        with monkeypatch.context() as patch:
            if file == "manifest":
                error = OSError(errno.ENOSPC, "No space left on device")
                patch.setattr(publishing, "atomic_write", Mock(side_effect=error))
            else:
                free = shutil.disk_usage(small_disk).free
                (small_disk / "filler").write_bytes(bytes(free - 8192))
            for _ in range(2):
                with pytest.raises(StorageError, match="No space left on device"):
                    publisher.publish(model, 2)
                assert not follower.refresh()
                assert torch.equal(scores(served), expected)
        (small_disk / "filler").unlink(missing_ok=True)
        publisher.publish(model, 3)
        manifest = json.loads(read_sealed(small_disk / "p" / PUBLISHED))
        assert len(manifest["model"][0]["files"]) == 1
        assert follower.refresh()
        follower.apply()
        assert (follower.step, follower.problem) == (3, None)
        assert torch.equal(scores(served), scores(model))
        chains = [manifest["model"], *manifest["servers"].values()]
        names = {file for entries in chains for entry in entries for file in entry["files"]}
        assert names >= {path.name for path in (small_disk / "p").iterdir()} - {PUBLISHED} - previous


class Shared(nn.Module):
    """A collection and a layer under two names each."""

    def __init__(self, seed: int = 0, **place: object) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = self.again = te.nn.EmbeddingBagCollection([te.TableConfig("a", 300, 8, **place)])
        self.first = self.second = nn.Linear(8, 8)

    def forward(self, batch: te.KeyedJaggedTensor) -> torch.Tensor:
        return self.second(self.first(self.again(batch)))


def test_a_quantized_module_of_one_table(tmp_path):
    model, served = (nn.Sequential(te.nn.EmbeddingBag(300, 8, mode="sum"), nn.Linear(8, 1)) for _ in range(2))
    Publisher(tmp_path).publish(model)
    served = te.quantize(served)
    assert ModelFollower(served, tmp_path, poll=None).problem is None
    ids = torch.arange(300).view(-1, 2)
    with torch.no_grad():
        assert torch.equal(served(ids), te.quantize(model)(ids))


EACH_ROW = te.KeyedJaggedTensor(["a"], torch.arange(300), lengths=torch.ones(300, dtype=torch.int64))


@pytest.mark.parametrize("quantized", [False, True])
def test_modules_under_two_names(quantized, tmp_path):
    model, served = Shared(), te.quantize(Shared(seed=1)) if quantized else Shared(seed=1)
    Publisher(tmp_path).publish(model)
    assert ModelFollower(served, tmp_path, poll=None).problem is None
    with torch.no_grad():
        assert torch.equal(served(EACH_ROW), (te.quantize(model) if quantized else model)(EACH_ROW))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("source", ["fp32", "int8", "checkpoint"])
@pytest.mark.parametrize("placement", ["host", "disk"])
def test_rows_that_are_trained_as_int8(placement, source, quantized, tmp_path):
    """Their codes are not published, nor read from checkpoints, as if they were values."""
    cache = te.CacheConfig(rows=64, folder=tmp_path if placement == "disk" else None)
    model = Shared(placement=placement, dtype=torch.int8, cache=cache)
    if source == "checkpoint":
        save(model, tmp_path / "p", 1)
    else:
        Publisher(tmp_path / "p", rows=source).publish(model)
    served = te.quantize(Shared(seed=1)) if quantized else Shared(seed=1)
    assert ModelFollower(served, tmp_path / "p", poll=None).problem is None
    with torch.no_grad():
        expected = (te.quantize(model) if quantized or source == "int8" else model)(EACH_ROW)
        assert torch.equal(served(EACH_ROW), expected)


@pytest.mark.parametrize("quantized", [False, True])
def test_an_export_follows(quantized, tmp_path):
    """Its mapped rows change in this process alone."""
    model = Model()
    served = te.export(te.quantize(model) if quantized else model, tmp_path / "export")
    before = [path.read_bytes() for path in sorted((served / "tables").iterdir())]
    for step in range(3):
        train(model, step)
    Publisher(tmp_path / "p").publish(model)
    loaded, other = (te.load_run(served, model=Model).model for _ in range(2))
    expected = scores(other)
    assert ModelFollower(loaded, tmp_path / "p", poll=None).problem is None
    assert torch.equal(scores(loaded), scores(te.quantize(model) if quantized else model))
    assert torch.equal(scores(other), expected)
    assert [path.read_bytes() for path in sorted((served / "tables").iterdir())] == before


def test_an_export_takes_no_new_ids(tmp_path):
    model = Model("dynamic")
    train(model, 1)
    loaded = te.load_run(te.export(model, tmp_path / "export"), model=lambda: Model("dynamic")).model
    with pytest.raises(ValueError, match=r"'tables.b' takes no new ids: .*exported"):
        ModelFollower(loaded, tmp_path, poll=None)
