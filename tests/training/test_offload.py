"""Training with offloaded dense layers: the bits of a run without, checkpoints across settings, refusals."""

from dataclasses import replace

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("tyro")
pytest.importorskip("tomli_w")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.training.disk_job import in_memory
from tests.training.jobs import make_trainer, planted
from tritonemb.cli import main
from tritonemb.data import LogOptions, Schema
from tritonemb.offloading.options import OffloadOptions
from tritonemb.training import CheckpointOptions
from tritonemb.training.checkpoint import CheckpointFolder
from tritonemb.training.config import OutputOptions, TrainConfig
from tritonemb.training.job import train


def tensors_of(run):
    return in_memory(CheckpointFolder(run / "checkpoints").latest())


def options(swap, states="disk", params="host", activations="device", budget="4MiB"):
    path = swap if "disk" in (states, params, activations) else None
    return OffloadOptions(
        offload_states=states,
        offload_params=params,
        offload_activations=activations,
        offload_path=path,
        offload_budget=budget,
    )


def log_in(folder):
    """500 rows to train, 10 steps of 50 an epoch."""
    rows = ["\t".join([str(i % 2), *[str(i % 7)] * 13, *["abcde"[i % 5]] * 26]) for i in range(600)]
    (folder / "train.txt").write_text("\n".join(rows) + "\n")
    return folder / "train.txt"


def run(tmp_path, name, offload=None, resume=None, steps=12, **more):
    log = tmp_path / "train.txt"
    config = TrainConfig(
        data=str(log if log.exists() else log_in(tmp_path)), embedding_dim=8, bottom_mlp=(32,), top_mlp=(64,),
        batch_size=50, max_steps=steps, read=LogOptions(schema=Schema(num_embeddings=100)),
        output=OutputOptions(out=tmp_path / name), offload=offload or OffloadOptions(), **more,
    )  # fmt: skip
    return train(config, resume, verbose=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    run(folder, "run")
    return tensors_of(folder / "run")


def test_an_offloaded_run_has_the_bits_of_one_that_is_not(tmp_path, plain, capsys):
    swap, out = tmp_path / "swap", tmp_path / "run"
    options = (
        f"--data {log_in(tmp_path)} --embedding-dim 8 --bottom-mlp 32 --top-mlp 64 --batch-size 50 --max-steps 12 "
    )
    options += f"--epochs 4 --embedding-lr 0.05 --dense-lr 1e-3 --num-embeddings 100 --out {out} --offload-states disk "
    options += f"--offload-params host --offload-activations host --offload-path {swap} --offload-budget 4MiB"
    assert main(["train", *options.split()]) == 0
    assert "note: offload: host " in capsys.readouterr().out
    assert_same_bits(tensors_of(out), plain)
    assert not list(swap.iterdir())


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"offload_states": "disk"}, "offload_states=disk needs a folder"),
        ({"offload_path": "swap"}, "offload_path: nothing is offloaded to disk"),
        ({"offload_budget": "1GiB"}, "offload_budget: nothing is offloaded"),
        ({"offload_states": "host", "offload_budget": "much"}, "offload_budget must be"),
        ({"offload_params": "tape"}, "offload_params must be one of"),
    ],
)
def test_wrong_options_are_named(where, message):
    with pytest.raises(ValueError, match=message):
        OffloadOptions(**where)


def test_what_does_not_go_together_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="offload_states cannot be used with compile"):
        run(tmp_path, "run", options(tmp_path / "swap"), compile=True)
    with pytest.raises(ValueError, match='offload_states needs dense_layers="fsdp"'):
        options(tmp_path / "swap").check(2, sharded=False, compile=False)
    assert [module.name for module in tmp_path.iterdir()] == ["train.txt"]


PLACES = {
    "plain": OffloadOptions(),
    "host": OffloadOptions(offload_states="host"),
    "disk": OffloadOptions(
        offload_states="disk", offload_params="disk", offload_activations="disk", offload_path="swap"
    ),
    "tiled": OffloadOptions(offload_states="host", offload_params="host", offload_budget="40000"),
}


@pytest.mark.more
@pytest.mark.parametrize(
    ("before", "after"), [("plain", "disk"), ("disk", "host"), ("host", "plain"), ("disk", "plain"), ("disk", "disk")]
)
def test_a_run_goes_on_with_other_offload_options(tmp_path, monkeypatch, plain, before, after):
    monkeypatch.chdir(tmp_path)
    run(tmp_path, "run", PLACES[before], steps=5)
    run(tmp_path, "run", PLACES[after], resume="auto")
    assert_same_bits(tensors_of(tmp_path / "run"), plain)


def wide_trainer(folder, offload, **options):
    data = planted()
    spec = te.optim.RowWiseAdagrad(lr=0.05)
    model = te.nn.DLRM(data.tables(8), data.num_dense, bottom_mlp=(8,), top_mlp=(64, 64), optimizer=spec)
    return te.Trainer(model, data, folder=folder / "run", batch_size=50, verbose=False, offload=offload, **options)


@pytest.mark.more
def test_tiled_layers_are_saved_whole(tmp_path):
    first = wide_trainer(tmp_path, PLACES["tiled"], max_steps=5)
    first.fit()
    assert any(isinstance(module, te.nn.TiledLinear) for module in first.model.modules())
    first.close()
    saved = tensors_of(tmp_path / "run")
    for places in ("plain", "tiled"):
        other = wide_trainer(tmp_path, PLACES[places])
        other.resume()
        actual = other.checkpointer.tensors()
        assert_same_bits({name: actual[name] for name in saved}, saved)
        other.close()


@pytest.mark.more
@pytest.mark.parametrize(
    "options_of_run",
    [{"precision": "fp16"}, {"accumulate": 2}, {"checkpoint": CheckpointOptions(checkpoint_async=True)}],
)
def test_other_ways_to_step_have_the_same_bits(tmp_path, options_of_run):
    run(tmp_path, "plain", **options_of_run)
    on_disk = options(tmp_path / "swap", params="disk")
    for name, offload in {"run": on_disk, "grads": replace(on_disk, offload_grads="disk")}.items():
        run(tmp_path, name, offload, **options_of_run)
        assert_same_bits(tensors_of(tmp_path / name), tensors_of(tmp_path / "plain"))


def on_ranks(rank, folder, offload, steps):
    trainer = make_trainer(planted(), folder, dense="fsdp", offload=offload, max_steps=steps)
    trainer.resume()
    trainer.fit()
    trainer.close()


@pytest.mark.more
def test_shards_of_several_ranks_are_offloaded(ranks, tmp_path):
    on_disk, plain = options(tmp_path / "swap", params="disk", budget="64MiB"), OffloadOptions()
    ranks(2).run(on_ranks, tmp_path / "plain", plain, 12)
    for offload, steps in ((plain, 4), (on_disk, 7), (replace(on_disk, offload_params="host"), 10), (plain, 12)):
        ranks(2).run(on_ranks, tmp_path / "run", offload, steps)
    assert_same_bits(tensors_of(tmp_path / "run"), tensors_of(tmp_path / "plain"))


def copies_on_ranks(rank):
    with pytest.raises(ValueError, match='offload_states needs dense_layers="fsdp"'):
        make_trainer(planted(), offload=OffloadOptions(offload_states="host"))


@pytest.mark.more
def test_copies_on_several_ranks_are_refused(ranks):
    ranks(2).run(copies_on_ranks)
