"""Publishers: what their files say, read record by record, is what the trainer has."""

from __future__ import annotations

import errno
import json
from itertools import pairwise

import pytest
import torch

import tritonemb as te
from tests.serving.models import KINDS, Model, publish, published_rows, scores, train
from tritonemb.server import snapshot
from tritonemb.server.snapshot import read_snapshot
from tritonemb.serving import ModelFollower, Publisher
from tritonemb.serving import publisher as publishing
from tritonemb.serving.publisher import PUBLISHED, fingerprint_rows
from tritonemb.storage import StorageError
from tritonemb.training.callbacks import FitEnd, FitStart, StepEnd
from tritonemb.utils import read_sealed


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "server"])
def test_files_have_the_rows_of_the_trainer(kind, tmp_path):
    model, publisher = Model(kind, tmp_path / "rows"), Publisher(tmp_path / "p", most=4)
    for step in range(1, 12):
        train(model, step)
        publisher.publish(model, step)
        dense, tables = published_rows(tmp_path / "p")
        assert {name: torch.equal(value, model.state_dict()[name]) for name, value in dense.items()} == {
            "dense.weight": True, "dense.bias": True,
        }  # fmt: skip
        for name in "ab":
            rows = tables[f"tables.{name}"]
            tensors = model.tables[name].tensors()["weight"]
            ids = model.tables[name].ids() if model.tables[name].config.is_dynamic else torch.arange(len(tensors))
            assert sorted(rows) == ids.tolist()
            assert torch.equal(torch.stack([rows[id] for id in ids.tolist()]), tensors)
    manifest = json.loads(read_sealed(tmp_path / "p" / PUBLISHED))
    assert manifest["step"] == 11
    assert len(manifest["model"][0]["files"]) == 3
    if kind.startswith("dynamic"):
        assert model.tables["b"].statistics().evictions > 0


def test_a_change_of_any_bit_changes_the_fingerprint():
    for dim, dtype in ((1, torch.float32), (3, torch.bfloat16), (64, torch.float32)):
        rows, ids = torch.randn(5, dim).to(dtype), torch.tensor([0, 1, -7, 2**62, 5])
        fingerprints = fingerprint_rows(rows, ids)
        assert (fingerprints != 0).all()
        bits = rows.view(torch.uint8)
        for byte in range(bits.shape[1]):
            bits[2, byte] ^= 1 << byte % 8
            assert (fingerprint_rows(rows, ids) != fingerprints).tolist() == [False, False, True, False, False]
            bits[2, byte] ^= 1 << byte % 8
        assert (fingerprint_rows(rows, ids + 1) != fingerprints).all()


def test_only_changed_rows_are_written(tmp_path):
    model, publisher = Model(), Publisher(tmp_path)
    for _ in range(3):
        publisher.publish(model)
    files = json.loads(read_sealed(tmp_path / PUBLISHED))["model"][0]["files"]
    kinds = [values.get("kind") for values, _ in read_snapshot(tmp_path / files[2])]
    assert kinds == [None, "dense"]
    with torch.no_grad():
        model.tables["a"].weight[7, 2] += 1.0
    publisher.publish(model)
    files = json.loads(read_sealed(tmp_path / PUBLISHED))["model"][0]["files"]
    rows = [tensors for values, tensors in read_snapshot(tmp_path / files[3]) if values.get("kind") == "rows"]
    assert [ids.tolist() for ids, _ in rows] == [[7]]
    assert torch.equal(rows[0][1], model.tables["a"].weight[7:8])


@pytest.mark.parametrize("kind", ["device", "dynamic"])
def test_rows_that_differ_most_come_first(kind, tmp_path):
    """The others come later, at the latest in the next full snapshot."""
    model, publisher = Model(kind), Publisher(tmp_path, most=4, priority=5)
    for step in range(3):
        train(model, step)
    publisher.publish(model)
    first = model.tables["a"].weight.detach().clone()
    for step in range(3, 9):
        train(model, step)
    norms = (model.tables["a"].weight.detach() - first).norm(dim=1)
    order = norms.argsort(descending=True)[: int((norms > 0).sum())].tolist()
    assert len(order) > 10
    for number in range(2):
        publisher.publish(model)
        files = json.loads(read_sealed(tmp_path / PUBLISHED))["model"][0]["files"]
        records = [(v, t) for v, t in read_snapshot(tmp_path / files[-1]) if v.get("kind") == "rows"]
        ids = {values["table"]: tensors[0].tolist() for values, tensors in records}
        assert set(ids["tables.a"]) == set(order[5 * number : 5 * number + 5])
        assert len(ids["tables.b"]) == 5
    for _ in range(2):
        publisher.publish(model)
    served = Model(kind, seed=1)
    ModelFollower(served, tmp_path, poll=None)
    assert torch.equal(scores(served), scores(model))


def test_an_id_that_has_another_slot_keeps_its_row(tmp_path):
    """It was evicted and came back; its new row is not among those that differ most."""
    config = te.TableConfig("a", None, 3, capacity=16)
    model, served = (te.nn.EmbeddingBagCollection([config], te.optim.SGD(lr=0.1)) for _ in range(2))
    table, publisher = model["a"], Publisher(tmp_path, priority=1)
    table.insert(range(6), torch.ones(6, 3))
    publisher.publish(model)
    follower, rows = ModelFollower(served, tmp_path, poll=None), torch.ones(8, 3)
    slots = table.index.find(torch.arange(6))
    table.remove([0, 1, 5])
    for id, row in ((0, 1.2), (1, 1.1), (100, 9.0)):
        table.insert([id], torch.full((1, 3), row))
    assert (table.index.find(torch.arange(2)) != slots[:2]).any()
    for row in (1.0, 1.1, 1.2):  # of id 0, then 1
        publisher.publish(model)
        assert follower.refresh(), follower.problem
        follower.apply()
        assert served["a"].ids().tolist() == [0, 1, 2, 3, 4, 100]
        rows[0], rows[1] = (1.2 if row > 1.0 else 1.0), (1.1 if row > 1.1 else 1.0)
        assert torch.equal(served["a"].lookup([0, 1, 2, 3, 4]), rows[:5])
    assert torch.equal(served["a"].lookup(served["a"].ids()), table.lookup(table.ids()))


@pytest.mark.parametrize("steps", [4, 5])
def test_the_last_step_has_all_rows(steps, tmp_path):
    """Also if it was published with the rows that differ most."""
    model, publisher, served = Model(), Publisher(tmp_path, steps=steps, priority=3), Model(seed=1)
    publisher.model = model
    publisher.on_start(FitStart())
    for step in range(1, 13):
        train(model, step)
        publisher.on_step(StepEnd(step, 0, 0))
    publisher.on_end(FitEnd("finished", 12, 0, 0.0, 0.0))
    follower = ModelFollower(served, tmp_path, poll=None)
    assert (follower.step, follower.bases) == (12, 1)
    assert len(json.loads(read_sealed(tmp_path / PUBLISHED))["model"][0]["files"]) == 12 // steps + 1
    assert torch.equal(scores(served), scores(model))


def test_seconds_alone_set_the_steps_of_every_fit(tmp_path, monkeypatch):
    model, steps = Model(), []
    publisher = Publisher(tmp_path, seconds=3600.0)
    publisher.model = model
    monkeypatch.setattr(publisher, "publish", lambda _, step, wait: steps.append(step))
    for _ in range(2):
        publisher.on_start(FitStart())
        for step in range(1, 9):
            publisher.on_step(StepEnd(step, 0, 0))
    assert steps == [1, 2] * 2  # the speed is known from the second one on
    for options in ({"seconds": 0}, {"seconds": float("nan")}, {"steps": 0}, {"most": 0}, {"priority": -1}):
        with pytest.raises(ValueError, match="positive numbers; got"):
            Publisher(tmp_path, **options)


def test_seconds_between_publications(tmp_path, monkeypatch):
    model, now, steps = Model(), [0.0], []
    publisher = Publisher(tmp_path, steps=50, seconds=2.0)
    publisher.model = model
    monkeypatch.setattr(publishing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(publisher, "publish", lambda _, step, wait: steps.append(step))
    for step in range(1, 90):
        now[0] += 0.125 if step < 50 else 1.0
        publisher.on_step(StepEnd(step, 0, 0))
    assert steps[:5] == [1, 2, 18, 34, 50]  # 16 steps of 0.125 seconds
    assert all(second - first < 20 for first, second in pairwise(steps[4:]))


@pytest.mark.more
@pytest.mark.parametrize("size", [1, 2])
def test_a_trainer_publishes(ranks, size, tmp_path):
    """With a table of each kind of sharding; the last step, which is not a multiple of 2, too."""
    states = [publish(0, tmp_path / "p")] if size == 1 else ranks(size).run(publish, tmp_path / "p")
    dense, tables = published_rows(tmp_path / "p")
    manifest = json.loads(read_sealed(tmp_path / "p" / PUBLISHED))
    assert manifest["step"] == 5
    assert [len(chain["files"]) for chain in manifest["model"]] == [3] * size
    assert len(tables) > 1
    for name, rows in tables.items():
        assert torch.equal(torch.stack([rows[id] for id in range(len(rows))]), states[0].pop(f"{name}.weight"))
    assert {name: torch.equal(value, states[0][name]) for name, value in dense.items()} == dict.fromkeys(
        states[0], True
    )


def test_a_later_publisher_takes_the_place_of_an_earlier_one(tmp_path):
    model, first, second = Model(), Publisher(tmp_path), Publisher(tmp_path)
    first.publish(model)
    second.publish(model)
    train(model, 1)
    for _ in range(2):
        files = {*tmp_path.iterdir()}
        with pytest.raises(StorageError, match=r"another publisher writes to .*; give each run a separate folder"):
            first.publish(model)
        assert {*tmp_path.iterdir()} == files
        second.publish(model)
    served = Model(seed=1)
    assert ModelFollower(served, tmp_path, poll=None).problem is None
    assert torch.equal(scores(served), scores(model))


def test_a_failure_releases_the_tables(tmp_path, monkeypatch):
    """Training continues after a full disk: its thread can lock the dynamic table whose rows were being written."""
    model, publisher, write = Model("dynamic"), Publisher(tmp_path), snapshot.write_record
    train(model, 1)

    def write_or_fail(file, message):
        if message[0].get("kind") == "rows" and message[0]["table"] == "tables.b":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, message)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "write_record", write_or_fail)
        with pytest.raises(StorageError, match="No space left on device"):
            publisher.publish(model)
    assert model.tables["b"].index.lock._lock.acquire(timeout=5)
    model.tables["b"].index.lock._lock.release()
    publisher.publish(model)
