"""Followers: the rows that evaluation would read, of one step at a time, whatever becomes of the files."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tritonemb as te
from tests.helpers import DEADLINE
from tests.server.jobs import local_servers, make, train
from tritonemb.server import Servers, snapshot
from tritonemb.server.connection import Connection
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.transport import LocalTransport
from tritonemb.serving import Follower, Publisher, look_up, updates
from tritonemb.serving import follower as following
from tritonemb.serving.publisher import PUBLISHED
from tritonemb.storage.checkpoint import MANIFEST
from tritonemb.utils import atomic_write, read_sealed, seal

DYNAMIC = {"capacity": 40, "eviction": te.EvictionConfig(protect=2), "fallback_rows": 11}
IDS = {"a": torch.arange(300), "b": torch.arange(9_000).flip(0), "d": torch.arange(-5, 400)}
STEPS = 3  # between snapshots
Rows = dict[str, Tensor]


class Chain(NamedTuple):
    """A folder that was published to, what the tables were after each time, and the manifests by then."""

    folder: Path
    rows: list[Rows]
    manifests: list[dict]


def read(model: te.nn.EmbeddingBagCollection) -> Rows:
    """Of a collection in this process."""
    result = {name: model.state_dict()[f"{name}.weight"][IDS[name]].clone() for name in "ab"}
    return {**result, "d": model["d"].lookup(IDS["d"])}


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Chain:
    """Four times, whole at first, on two servers; a twin in one process says what is right."""
    folder, rows, manifests = tmp_path_factory.mktemp("published"), [], []
    single, publisher = make(None, dynamic=DYNAMIC), Publisher(folder)
    with local_servers(2) as servers:
        model = make(servers, dynamic=DYNAMIC)
        for number in range(4):
            train(model, STEPS, trainer=number)
            train(single, STEPS, trainer=number)
            publisher.publish(model, (number + 1) * STEPS)
            rows.append(read(single))
            manifests.append(json.loads(read_sealed(folder / PUBLISHED)))
    assert single["d"].statistics().evictions > 40
    return Chain(folder, rows, manifests)


@pytest.fixture
def folder(chain, tmp_path) -> Path:
    """A copy of its files, with the first manifest."""
    shutil.copytree(chain.folder, tmp_path / "copy")
    publish(tmp_path / "copy", chain.manifests[0])
    return tmp_path / "copy"


def publish(folder: Path, manifest: dict) -> None:
    atomic_write(folder / PUBLISHED, seal(json.dumps(manifest)))


def chosen(manifest: dict, *numbers: int) -> dict:
    """The manifest with these files of each server alone."""
    chains = manifest["servers"]["tables"]
    servers = {"tables": [{**chain, "files": [chain["files"][n] for n in numbers]} for chain in chains]}
    return {**manifest, "servers": servers}


def same(rows: Rows, expected: Rows) -> bool:
    return all(torch.equal(rows[name].view(torch.int32), expected[name].view(torch.int32)) for name in IDS)


def test_whole_snapshots_and_changes_have_the_bits_of_one_process(chain, folder):
    with Follower(folder, poll=None) as follower:
        assert same(follower.look_up(IDS), chain.rows[0])
        initial = follower.tables["d"].ids()
        for number in (1, 3):  # it misses one
            publish(folder, chain.manifests[number])
            assert follower.refresh()
            assert same(follower.look_up(IDS), chain.rows[number])
            assert follower.step == (number + 1) * STEPS
        assert (follower.bases, follower.increments, follower.problem) == (1, 2, None)
        assert not follower.refresh()
        assert not torch.isin(initial, follower.tables["d"].ids()).all()
        with Follower(folder, "tables", poll=None) as late:
            assert same(late.look_up(IDS), chain.rows[3])
            assert (late.bases, late.increments) == (1, 0)


def test_only_what_is_new_is_read(chain, folder, monkeypatch):
    with Follower(folder, poll=None) as follower:
        publish(folder, chain.manifests[2])
        requests, read_file = [], following.Update.read
        monkeypatch.setattr(
            following.Update, "read", lambda self, path, *args: requests.append(path) or read_file(self, path, *args)
        )
        assert follower.refresh()
        files = [manifest["files"][:0:-1] for manifest in chain.manifests[2]["servers"]["tables"]]
        assert requests == [folder / name for names in files for name in names]


def test_ids_that_are_not_in_order(chain, folder):
    ids = torch.tensor([7, -3, 7, 250, 2**60, 0])
    with Follower(folder, poll=None) as follower:
        actual = follower.look_up({"d": ids, "a": ids[:0]})
        expected = torch.stack([follower.look_up({"d": item.view(1)})["d"][0] for item in ids])
        assert torch.equal(actual["d"], expected)
        assert actual["a"].shape == (0, 6)
        assert not torch.equal(expected[1], expected[4])


def test_each_lookup_is_of_one_step(chain, folder):
    results: list[Rows] = []
    ended, requests = threading.Event(), threading.Semaphore(0)
    with Follower(folder, poll=None) as follower:

        def ask() -> None:
            while not ended.is_set():
                results.append(follower.look_up(IDS))
                requests.release()

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for manifest in chain.manifests:
            publish(folder, manifest)
            follower.refresh()
            assert follower.problem is None
            while requests.acquire(blocking=False):
                pass
            for _ in range(6):  # of which three at least have begun since
                assert requests.acquire(timeout=DEADLINE)
        ended.set()
        for thread in threads:
            thread.join()
    steps = [[number for number, rows in enumerate(chain.rows) if same(item, rows)] for item in results]
    assert all(len(step) == 1 for step in steps)
    assert {step[0] for step in steps} == {0, 1, 2, 3}


@pytest.mark.parametrize(("method", "number"), [("read", 1), ("write", 0)])
def test_a_lookup_does_not_wait_for_a_load(chain, folder, monkeypatch, method, number):
    """Nor for the rows of a full snapshot, here of an earlier state."""
    publish(folder, chain.manifests[1 - number])
    begun, go_on, refreshed = (threading.Event() for _ in range(3))

    def load_slowly(*args) -> None:
        begun.set()
        assert go_on.wait(DEADLINE)
        load(*args)

    def refresh() -> bool:
        changed = Follower.refresh(follower)
        if changed:
            refreshed.set()
        return changed

    load = getattr(following.Update, method)
    with Follower(folder, poll=0.001) as follower:
        monkeypatch.setattr(following.Update, method, load_slowly)
        monkeypatch.setattr(follower, "refresh", refresh)
        publish(folder, chain.manifests[number])
        assert begun.wait(DEADLINE)
        assert same(follower.look_up(IDS), chain.rows[1 - number])
        assert (follower.step, follower.problem) == ((2 - number) * STEPS, None)
        go_on.set()
        assert refreshed.wait(DEADLINE)
        assert same(follower.look_up(IDS), chain.rows[number])


def test_a_hole_is_named_and_a_whole_snapshot_closes_it(chain, folder):
    missing = [manifest["snapshot"] for manifest in chain.manifests[1]["servers"]["tables"]]
    with Follower(folder, poll=None) as follower:
        for files in ((0, 2), (2,)):
            publish(folder, chosen(chain.manifests[2], *files))
            assert not follower.refresh()
            assert f"snapshot {missing[0]} is missing" in follower.problem
            assert same(follower.look_up(IDS), chain.rows[0])
        publish(folder, chosen(chain.manifests[2], 1, 2))  # all that this one needs
        assert follower.refresh()
        assert same(follower.look_up(IDS), chain.rows[2])
        with Follower(folder, poll=None) as late:
            assert "is missing" in late.problem
            with pytest.raises(RuntimeError, match=r"no snapshot to serve yet: snapshot \w+ is missing"):
                late.look_up(IDS)
            publish(folder, chain.manifests[3])
            assert late.refresh()
            assert late.problem is None
            assert same(late.look_up(IDS), chain.rows[3])


def test_another_base_is_loaded_whole(tmp_path):
    """More trained, by other numbers of servers; the publisher begins anew."""
    single = make(None, dynamic=DYNAMIC)
    follower = Follower(tmp_path, poll=None)
    assert "has no checkpoint" in follower.problem
    for bases, number in enumerate((1, 3, 3), start=1):
        with local_servers(number) as servers:
            model = make(servers, dynamic=DYNAMIC)
            model.load_state_dict(single.state_dict())
            train(model, 2)
            train(single, 2)
            Publisher(tmp_path).publish(model)
        assert follower.refresh()
        assert same(follower.look_up(IDS), read(single))
        assert follower.bases == bases
    files = len(list(tmp_path.glob("*.server")))
    assert files == 6  # of this manifest and the one before
    follower.close()


def test_a_chain_ends_after_so_many_files(tmp_path):
    publisher = Publisher(tmp_path, most=2)
    with local_servers(2) as servers, Follower(tmp_path, poll=None) as follower:
        model = make(servers)
        for number in range(1, 6):
            train(model, 1)
            publisher.publish(model)
            assert follower.refresh()
            assert torch.equal(follower.look_up({"a": IDS["a"]})["a"], model.state_dict()["a.weight"])
            assert (follower.bases, follower.increments) == ((number + 1) // 2, number // 2)


def test_checkpoints_and_published_snapshots_do_not_break_each_others_chains(tmp_path):
    publisher = Publisher(tmp_path / "published")
    with local_servers(2) as servers, Follower(tmp_path / "published", poll=None) as follower:
        model = make(servers, dynamic=DYNAMIC)
        initial: list[dict] = []
        for number in range(3):
            train(model, 2, trainer=number)
            publisher.publish(model)
            written = model.table_set.service.snapshot(tmp_path / f"{number}-", changes_only=True)
            assert [item["after"] for item in written] == [item["snapshot"] for item in initial] or not number
            initial = written
            assert follower.refresh()
        assert (follower.bases, follower.increments) == (1, 2)
        state = model.state_dict()
        assert torch.equal(follower.look_up({"d": state["d.ids"]})["d"], state["d.weight"])


def test_a_server_that_does_not_know_what_it_wrote_writes_all(tmp_path):
    publisher = Publisher(tmp_path)
    local = EmbeddingServer("first"), EmbeddingServer("second")
    with Servers([LocalTransport(item) for item in local], local) as servers, Follower(tmp_path, poll=None) as follower:
        model = make(servers, dynamic=DYNAMIC)
        for bases in (1, 2):
            train(model, 2, trainer=bases)
            publisher.publish(model)
            assert follower.refresh()
            assert follower.bases == bases
            local[1].collections["tables"].partitions.changes.chains.clear()  # as if it had been started again
        assert torch.equal(follower.look_up({"b": IDS["b"]})["b"], model.state_dict()["b.weight"][IDS["b"]])


def checkpoint(chain: Chain, folder: Path, step: int, number: int) -> None:
    """As a run makes it: complete, then renamed."""
    backup = folder / ".writing"
    backup.mkdir(parents=True)
    for manifest in chain.manifests[number]["servers"]["tables"]:
        for name in manifest["files"]:
            (backup / name).hardlink_to(chain.folder / name)
    progress = {"step": (number + 1) * STEPS}
    manifest = {"format": 1, "files": {}, "progress": progress, "servers": chain.manifests[number]["servers"]}
    (backup / MANIFEST).write_text(seal(json.dumps(manifest)))
    backup.rename(folder / f"step-{step}")


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_files_that_vanish_while_they_are_read(chain, tmp_path, monkeypatch, at):
    """The newest checkpoint is removed when so many files have been opened, and a newer one is there."""
    opened = []

    def read_snapshot(path: Path):
        opened.append(path)
        if len(opened) == at:
            checkpoint(chain, tmp_path, 10, 2)
            shutil.rmtree(tmp_path / "step-9")
        return snapshot.read_snapshot(path)

    checkpoint(chain, tmp_path, 9, 0)
    (tmp_path / ".dropped-step-11").mkdir()  # a half-removed one
    for module in (following, updates):
        monkeypatch.setattr(module, "read_snapshot", read_snapshot)
    with Follower(tmp_path, poll=None) as follower:
        assert follower.problem is None
        assert same(follower.look_up(IDS), chain.rows[2])
        shutil.rmtree(tmp_path / "step-10")
        assert not follower.refresh()
        assert "has no checkpoint" in follower.problem
        assert same(follower.look_up(IDS), chain.rows[2])


def test_a_file_that_is_replaced_while_it_is_read(chain, folder, monkeypatch):
    """By that of a run that went back: another snapshot, of the same name."""
    base, changes = (folder / name for name in chain.manifests[1]["servers"]["tables"][0]["files"])
    read_file, whole = following.Update.read, base.read_bytes()

    def read_another(*args) -> None:
        base.write_bytes(changes.read_bytes())
        read_file(*args)

    with monkeypatch.context() as patch:
        patch.setattr(following.Update, "read", read_another)
        follower = Follower(folder, poll=None)
    with follower:
        assert follower.step is None
        assert "was replaced while it was read" in follower.problem
        base.write_bytes(whole)
        assert follower.refresh()
        assert same(follower.look_up(IDS), chain.rows[0])


def test_a_run_that_went_back(chain, tmp_path):
    checkpoint(chain, tmp_path, 10, 2)
    with Follower(tmp_path, poll=None) as follower:
        checkpoint(chain, tmp_path, 4, 1)
        assert not follower.refresh()
        shutil.rmtree(tmp_path / "step-10")
        assert follower.refresh()
        assert same(follower.look_up(IDS), chain.rows[1])


def test_age_and_statistics(chain, folder, monkeypatch):
    with Follower(folder, poll=None) as follower:
        selection = follower._time
        files = [manifest["files"][0] for manifest in chain.manifests[0]["servers"]["tables"]]
        assert selection == min(next(snapshot.read_snapshot(folder / name))[0]["time"] for name in files)
        assert 0 < time.time() - selection < 600
        monkeypatch.setattr(time, "time", lambda: selection + 100.0)
        assert follower.age == 100.0
        result = follower.statistics()
        assert (result["step"], result["age"], result["problem"]) == (STEPS, 100.0, None)
        table = result["collections"]["tables"]["tables"]["d"]
        assert 0 < table["rows"] <= 40
        assert table["num_bytes"] > table["rows"] * (8 + 8 * 4)
        publish(folder, chain.manifests[1])
        follower.refresh()
        assert follower._time > selection
    with Follower(folder / "nothing", poll=None) as nothing:
        assert (nothing.step, nothing.age, nothing.statistics()["collections"]) == (None, None, {})


def test_other_processes_ask_a_follower(chain, folder):
    follower = Follower(folder, poll=None)
    with follower, Connection(LocalTransport(follower, "follower")) as connection:
        assert same(look_up(connection, IDS), chain.rows[0])
        assert connection.query("stats")["stats"]["step"] == STEPS
        with pytest.raises(ValueError, match=r"unknown table 'e'; there are a, b, d"):
            look_up(connection, {"e": IDS["a"]})
        with pytest.raises(ValueError, match=r"table 'a': id 300 is out of range; valid ids are 0 to 299"):
            look_up(connection, {"a": torch.tensor([0, 300])})
        with pytest.raises(ValueError, match=r"ids must be int64"):
            follower.look_up({"a": torch.tensor([0.0])})
        with pytest.raises(ValueError, match="look_up and stats, not 'pull'"):
            connection.submit("pull", {}).result(5)


def test_what_a_folder_does_not_have(chain, folder):
    for name in ("other", None):
        (folder / PUBLISHED).write_text(seal(json.dumps({"servers": {"x": [], "y": []}})))
        with Follower(folder, name, poll=None) as follower:
            assert f"has collections x, y on embedding servers, not {name!r}" in follower.problem
