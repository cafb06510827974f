"""Checkpoints of offloaded models: streamed, for other tiers, and for plain models by torch.distributed.checkpoint."""

import os
import pickle
import shutil
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tritonemb as te
from tests.durability import LINUX, Durability
from tests.helpers import Calls
from tests.offloading.models import Transformer, adam, mlp, steps, train
from tritonemb.offloading.checkpoint import CHECKSUMS
from tritonemb.storage import StorageError
from tritonemb.storage.checkpoint import METADATA

TIERS = [("device", "device"), ("host", "disk"), ("disk", "host"), ("disk", "disk"), ("device", "disk")]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("params", "states"), TIERS)
def test_training_goes_on_where_it_was_on_any_tier(params, states, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("tritonemb.offloading.checkpoint.BLOCK_BYTES", 3_000)
    first = train(
        Transformer, tmp_path / "a", 3, dtype=dtype, offload={"params": "disk", "states": "disk", "budget": 200_000}
    )
    te.offloading.save_checkpoint(first.model, first.optimizer, tmp_path / "step-3")
    for group in first.optimizer.param_groups:
        group["lr"] = 0.5
    offload = {"params": params, "states": states, "budget": 250_000}
    other = train(Transformer, tmp_path / "b", 1, dtype=dtype, offload=offload)
    te.offloading.load_checkpoint(other.model, other.optimizer, tmp_path / "step-3")
    assert other.optimizer.param_groups[0]["lr"] == 1e-2
    first.optimizer.param_groups[0]["lr"] = 1e-2
    assert steps(other.model, other.optimizer, 3, seed=3) == steps(first.model, first.optimizer, 3, seed=3)


def test_plain_models_read_it_and_are_read(tmp_path):
    plain = train(Transformer, tmp_path, 3)
    trained = train(Transformer, tmp_path, 3, offload={"params": "disk", "states": "disk", "budget": 200_000})
    te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / "ours")
    of_model, of_optimizer = get_state_dict(plain.model, plain.optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "theirs")
    reader = train(Transformer, tmp_path, 1)
    of_model, of_optimizer = get_state_dict(reader.model, reader.optimizer)
    dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "ours")
    set_state_dict(reader.model, reader.optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    other = train(Transformer, tmp_path / "b", 1, offload={"params": "host", "states": "disk", "budget": 200_000})
    with pytest.warns(match=r"theirs has no checksums\.json, so damage may go undetected"):
        te.offloading.load_checkpoint(other.model, other.optimizer, tmp_path / "theirs")
    losses = [steps(run.model, run.optimizer, 3, seed=3) for run in (plain, reader, other, trained)]
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_layers_that_are_tiled_otherwise_read_it(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(70, 600), nn.ReLU(), nn.Linear(600, 1))

    options = {"dtype": torch.float64}  # tiles sum in another order
    disk = {"params": "disk", "states": "disk", "budget": 120_000}
    tiled = train(make, tmp_path / "a", 2, offload=disk, **options)
    assert isinstance(tiled.model[0], te.nn.TiledLinear)
    te.offloading.save_checkpoint(tiled.model, tiled.optimizer, tmp_path / "ours")
    whole = train(make, tmp_path / "b", 0, offload={"params": "host", "states": "host", "budget": 4_000_000}, **options)
    assert isinstance(whole.model[0], nn.Linear)
    te.offloading.load_checkpoint(whole.model, whole.optimizer, tmp_path / "ours")
    expected = steps(tiled.model, tiled.optimizer, 3, seed=3)
    assert steps(whole.model, whole.optimizer, 3, seed=3) == pytest.approx(expected, rel=1e-6)


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path):
    trained = train(mlp, tmp_path / "a", 1, offload={"params": "disk", "budget": 200_000})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no \.metadata"):
        te.offloading.load_checkpoint(trained.model, trained.optimizer, tmp_path / "empty")
    te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / "ours")
    with pytest.raises(ValueError, match="exists and is not empty"):
        te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / "ours")
    other = train(Transformer, tmp_path / "b", 1, offload={"params": "host", "budget": 200_000})
    expected = other.model.state_dict()
    with pytest.raises(ValueError, match=r"has no 'embedding\.weight'"):
        te.offloading.load_checkpoint(other.model, other.optimizer, tmp_path / "ours")
    smaller = train(lambda: Transformer(dim=16), tmp_path / "c", 0, offload={"params": "host", "budget": 200_000})
    te.offloading.save_checkpoint(other.model, other.optimizer, tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"the checkpoint has shape \[50, 32\], the model \[50, 16\]"):
        te.offloading.load_checkpoint(smaller.model, smaller.optimizer, tmp_path / "theirs")
    assert all(torch.equal(a, b) for a, b in zip(expected.values(), other.model.state_dict().values(), strict=True))


def test_a_save_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    trained = train(mlp, tmp_path / "a", 1, offload={"params": "host", "states": "host"})
    te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / "one")

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fail)
    with pytest.raises(StorageError, match="two cannot be saved: rank 0: OSError: no space left"):
        te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
    other = train(mlp, tmp_path / "b", 0, offload={"params": "disk"})
    te.offloading.load_checkpoint(other.model, other.optimizer, tmp_path / "one")
    assert steps(other.model, other.optimizer, 1) == steps(trained.model, trained.optimizer, 1)


def test_each_parameter_has_its_own_number_of_steps(tmp_path):
    """One that had no gradient at first."""

    def make(name):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return te.offload(model, adam(model.parameters()), states="disk", path=tmp_path / name)

    model, optimizer = make("a")
    for number in range(5):
        model[1].requires_grad_(number > 2)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    offloaded_model, fresh = make("b")
    te.offloading.load_checkpoint(offloaded_model, fresh, tmp_path / "saved")
    assert [state["step"].item() for state in fresh.state_dict()["state"].values()] == [5, 5, 2, 2]


@pytest.mark.parametrize("params", ["device", "host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.few(1)
def test_states_that_a_checkpoint_has_not_begin_anew(params, dtype, tmp_path):
    options = {"params": params, "states": "disk", "budget": 400_000}
    first = train(mlp, tmp_path / "a", 0, dtype=dtype, offload=options)
    te.offloading.save_checkpoint(first.model, first.optimizer, tmp_path / "saved")
    expected = steps(first.model, first.optimizer, 3)
    te.offloading.load_checkpoint(first.model, first.optimizer, tmp_path / "saved")
    assert len(first.optimizer.state_dict()["state"]) == 0
    assert steps(first.model, first.optimizer, 3) == expected


@pytest.mark.filterwarnings("ignore:.*has no checksums.json")
def test_a_load_that_fails_leaves_no_optimizer_that_steps(tmp_path):
    trained = train(mlp, tmp_path / "a", 2, offload={"states": "host"})
    te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / "saved")
    (tmp_path / "saved" / CHECKSUMS).unlink()  # as of an earlier version
    whole = {path: path.read_bytes() for path in (tmp_path / "saved").glob("*.distcp")}
    for path, data in whole.items():
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(StorageError, match="cannot be loaded"):
        te.offloading.load_checkpoint(trained.model, trained.optimizer, tmp_path / "saved")
    with pytest.raises(RuntimeError, match="an earlier step or load has failed"):
        steps(trained.model, trained.optimizer, 1)
    with pytest.raises(RuntimeError, match="an earlier step or load has failed"):
        trained.optimizer.state_dict()
    for path, data in whole.items():
        path.write_bytes(data)
    trained.optimizer.zero_grad()
    te.offloading.load_checkpoint(trained.model, trained.optimizer, tmp_path / "saved")
    expected = train(mlp, tmp_path, 2)
    assert steps(trained.model, trained.optimizer, 2) == steps(expected.model, expected.optimizer, 2)


def test_empty_parameters_are_saved_and_loaded(tmp_path):
    def make():
        model = nn.Linear(3, 2)
        model.empty = nn.Parameter(torch.empty(0, 3))
        return te.offload(model, adam(model.parameters()), params="host")

    model, optimizer = make()
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    other, fresh = make()
    te.offloading.load_checkpoint(other, fresh, tmp_path / "saved")
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])


@LINUX
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    trained = train(mlp, tmp_path / "swap", 1, offload={"params": "host", "states": "host"})
    durability = Durability(monkeypatch, tmp_path)
    (tmp_path / ".writing-saved").mkdir()
    (tmp_path / ".writing-saved" / "__7_0.distcp").write_text("left by a process that was killed")
    for name in ("saved", "other"):
        te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / name)
        assert durability.check() == []
    assert [path.name for path, _ in durability.named] == ["saved", "other"]
    assert all(files == sorted((METADATA, "__0_0.distcp", CHECKSUMS)) for _, files in durability.named)


def test_a_full_disk_is_left_as_it_was(small_disk):
    trained = train(lambda: nn.Linear(70, 20_000), small_disk, 0, offload={"states": "host"})
    with pytest.raises(StorageError, match=r"saved cannot be saved: rank 0: .*No space left on device"):
        te.offloading.save_checkpoint(trained.model, trained.optimizer, small_disk / "saved")
    assert not list(small_disk.iterdir())


def test_damage_is_found_before_anything_is_loaded(tmp_path):
    trained = train(mlp, tmp_path / "a", 1, offload={"params": "host", "states": "host"})
    te.offloading.save_checkpoint(trained.model, trained.optimizer, tmp_path / "saved")
    load = partial(te.offloading.load_checkpoint, trained.model, trained.optimizer)
    for name in ("__0_0.distcp", METADATA, CHECKSUMS):
        shutil.copytree(tmp_path / "saved", tmp_path / name)
        content = bytearray((tmp_path / name / name).read_bytes())
        content[len(content) // 2] ^= 4
        (tmp_path / name / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} (is damaged: its content|does not have the checksum)"):
            load(tmp_path / name)
    (tmp_path / METADATA / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"is damaged: __0_0\.distcp does not exist"):
        load(tmp_path / METADATA)
    expected = train(mlp, tmp_path, 1)
    assert steps(trained.model, trained.optimizer, 2) == steps(expected.model, expected.optimizer, 2)


@pytest.mark.filterwarnings("ignore:.*has no checksums.json")
@pytest.mark.parametrize("where", ["settings", "model", "metadata"])
def test_a_checkpoint_of_a_stranger_runs_no_code(where, tmp_path):
    mark = tmp_path / "mark"
    evil = Calls(os.mkdir, str(mark))
    plain = train(mlp, tmp_path, 1)
    of_model, of_optimizer = get_state_dict(plain.model, plain.optimizer)
    if where == "settings":
        of_optimizer["param_groups"][0]["lr"] = evil
    elif where == "model":
        of_model["0.weight"] = evil
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "theirs")
    name = "__0_0.distcp"
    if where == "metadata":
        name = METADATA
        (tmp_path / "theirs" / METADATA).write_bytes(pickle.dumps(evil))
    trained = train(mlp, tmp_path / "a", 0, offload={"states": "host"})
    with pytest.raises(ValueError, match=rf"theirs/{name} refers to posix\.mkdir, which could run code"):
        te.offloading.load_checkpoint(trained.model, trained.optimizer, tmp_path / "theirs")
    assert not mark.exists()


class Scaled(nn.Linear):
    """With an extra state that has tensors, and grows."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen, self.scale = {}, torch.ones(2)

    def get_extra_state(self):
        return {"seen": dict(self.seen), "scale": [self.scale, "text"]}

    def set_extra_state(self, state):
        self.seen, (self.scale, self.text) = state.get("seen", {}), state["scale"]


def test_extra_states_of_modules_are_saved_and_loaded(tmp_path):
    def make(name):
        model = nn.Sequential(nn.Linear(8, 8), Scaled())
        return te.offload(model, adam(model.parameters()), params="host", states="disk", path=tmp_path / name)

    model, optimizer = make("a")
    model[1].seen, model[1].scale = {"one": 3, "two": torch.arange(5)}, torch.full((3,), 0.5)
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    other, fresh = make("b")
    te.offloading.load_checkpoint(other, fresh, tmp_path / "saved")
    assert (other[1].seen["one"], other[1].seen["two"].tolist()) == (3, [0, 1, 2, 3, 4])
    assert (other[1].scale.tolist(), other[1].text) == ([0.5] * 3, "text")
    with pytest.warns(match=r"theirs has no '1\._extra_state': kept as in the model"):
        load_plain(other, fresh, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path / "theirs")
    assert other[1].seen["one"] == 3


def load_plain(model, optimizer, plain, folder):
    """Load a checkpoint that torch has written of a plain model."""
    of_model, of_optimizer = get_state_dict(plain, adam(plain.parameters()))
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)
    te.offloading.load_checkpoint(model, optimizer, folder)


@pytest.mark.parametrize("placement", ["device", "host", "disk"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.few(3)
def test_rows_of_tables_are_saved_and_loaded(dynamic, placement, tmp_path):
    """Rows of a dynamic table and their ids, and rows of a table in host memory or on disk, of which few are cached."""
    rows = {"num_embeddings": None, "capacity": 4_000} if dynamic else {"num_embeddings": 4_000}
    cache = te.CacheConfig(rows=64, **({"folder": str(tmp_path)} if placement == "disk" else {}))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            tables = [te.TableConfig("t", embedding_dim=8, placement=placement, cache=cache, **rows)]
            self.tables = te.nn.EmbeddingBagCollection(tables, optimizer=te.optim.Adam(lr=0.1))
            self.top = nn.Linear(8, 1)

        def forward(self, ids):
            batch = te.KeyedJaggedTensor.from_lengths(["t"], ids, torch.ones(len(ids), dtype=torch.int64))
            return self.top(self.tables(batch))

    def make(name):
        torch.manual_seed(len(name))
        model = Model()
        return te.offload(model, adam(model.top.parameters()), params="host", states="disk", path=tmp_path / name)

    def losses(model, optimizer, seed):
        random = torch.Generator().manual_seed(seed)
        result = []
        for _ in range(4):
            loss = (model(torch.randint(4_000, (50,), generator=random)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        return result

    model, optimizer = make("a")
    losses(model, optimizer, 0)
    te.offloading.save_checkpoint(model, optimizer, tmp_path / "saved")
    other, fresh = make("of another seed")
    losses(other, fresh, 1)
    te.offloading.load_checkpoint(other, fresh, tmp_path / "saved")
    for seed in (0, 2):
        assert losses(other, fresh, seed) == losses(model, optimizer, seed)
