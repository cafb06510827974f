"""Checkpoints of offloaded models: streamed, for other tiers, and for plain models by torch.distributed.checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tritonemb as te
from tests.offloading.models import Transformer, adam, mlp, steps, train
from tritonemb.storage import StorageError

TIERS = [("device", "device"), ("host", "disk"), ("disk", "host"), ("disk", "disk"), ("device", "disk")]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.few(2)
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
    found = train(Transformer, tmp_path, 3, offload={"params": "disk", "states": "disk", "budget": 200_000})
    te.offloading.save_checkpoint(found.model, found.optimizer, tmp_path / "ours")
    of_model, of_optimizer = get_state_dict(plain.model, plain.optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "theirs")
    reader = train(Transformer, tmp_path, 1)
    of_model, of_optimizer = get_state_dict(reader.model, reader.optimizer)
    dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "ours")
    set_state_dict(reader.model, reader.optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    other = train(Transformer, tmp_path / "b", 1, offload={"params": "host", "states": "disk", "budget": 200_000})
    te.offloading.load_checkpoint(other.model, other.optimizer, tmp_path / "theirs")
    losses = [steps(each.model, each.optimizer, 3, seed=3) for each in (plain, reader, other, found)]
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_layers_that_are_tiled_otherwise_read_it(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(70, 600), nn.ReLU(), nn.Linear(600, 1))

    tiled = train(make, tmp_path / "a", 2, offload={"params": "disk", "states": "disk", "budget": 60_000})
    assert isinstance(tiled.model[0], te.nn.TiledLinear)
    te.offloading.save_checkpoint(tiled.model, tiled.optimizer, tmp_path / "ours")
    whole = train(make, tmp_path / "b", 0, offload={"params": "host", "states": "host", "budget": 2_000_000})
    assert isinstance(whole.model[0], nn.Linear)
    te.offloading.load_checkpoint(whole.model, whole.optimizer, tmp_path / "ours")
    expected = steps(tiled.model, tiled.optimizer, 3, seed=3)
    # Tiles sum in another order.
    assert steps(whole.model, whole.optimizer, 3, seed=3) == pytest.approx(expected, rel=1e-5)


def test_what_is_no_checkpoint_of_this_model_is_refused(tmp_path):
    found = train(mlp, tmp_path / "a", 1, offload={"params": "disk", "budget": 200_000})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no \.metadata"):
        te.offloading.load_checkpoint(found.model, found.optimizer, tmp_path / "empty")
    te.offloading.save_checkpoint(found.model, found.optimizer, tmp_path / "ours")
    with pytest.raises(ValueError, match="exists and is not empty"):
        te.offloading.save_checkpoint(found.model, found.optimizer, tmp_path / "ours")
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
    found = train(mlp, tmp_path / "a", 1, offload={"params": "host", "states": "host"})
    te.offloading.save_checkpoint(found.model, found.optimizer, tmp_path / "one")

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fail)
    with pytest.raises(StorageError, match="two cannot be saved: rank 0: OSError: no space left"):
        te.offloading.save_checkpoint(found.model, found.optimizer, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    other = train(mlp, tmp_path / "b", 0, offload={"params": "disk"})
    te.offloading.load_checkpoint(other.model, other.optimizer, tmp_path / "one")
    assert steps(other.model, other.optimizer, 1) == steps(found.model, found.optimizer, 1)


def test_pretrained_models_load_shard_by_shard(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(4)
    plain = Transformer(tied=False)
    state = plain.state_dict()
    half = len(state) // 2
    for number, keys in enumerate(([*state][:half], [*state][half:])):
        shard = {f"body.{key}": state[key] for key in keys} | {f"extra{number}": torch.zeros(1)}
        save_file(shard, tmp_path / f"{number}.safetensors")
    with torch.device("meta"):
        model = Transformer(tied=False)
    optimizer = adam(model.parameters())
    options = {"params": "disk", "states": "disk", "path": tmp_path / "swap", "budget": 250_000}
    model, optimizer = te.offload(model, optimizer, **options, init=lambda module: None)
    load = te.offloading.load_safetensors
    assert load(model, tmp_path, rename=lambda key: key.removeprefix("body.")) == ["extra0", "extra1"]
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    assert steps(model, optimizer, 2) == steps(plain, adam(plain.parameters()), 2)
    with pytest.raises(ValueError, match=r"has no \['embedding.weight'"):
        load(model, tmp_path)
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        load(model, tmp_path / "swap")
