import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

pytest.importorskip("pyarrow")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.training.disk_job import in_memory
from tests.training.jobs import Crash, CrashAt
from tritonemb.data import NAMES, LogOptions, Schema, SplitRule, make_synthetic
from tritonemb.optim import OPTIMIZERS
from tritonemb.serving.commands import PredictOptions, predict
from tritonemb.training import CheckpointOptions
from tritonemb.training.checkpoint import CheckpointFolder, RunFolder
from tritonemb.training.config import (
    PRESETS,
    EmbeddingOptimizer,
    OutputOptions,
    ParallelOptions,
    ProfileOptions,
    ServersOptions,
    TrainConfig,
    preset,
)
from tritonemb.training.job import train
from tritonemb.training.model import build_model, build_optimizer
from tritonemb.types import TableOptions


def test_every_optimizer_can_be_named():
    assert set(get_args(EmbeddingOptimizer)) == set(OPTIMIZERS)
    for name in get_args(EmbeddingOptimizer):
        spec = build_optimizer(TrainConfig(embedding_optimizer=name, embedding_lr=0.125, embedding_weight_decay=0.25))
        assert type(spec) is OPTIMIZERS[name]
        assert (spec.lr, spec.weight_decay, spec.cow_clip) == (0.125, 0.25, None)
    spec = build_optimizer(TrainConfig(cow_clip=1.0, cow_clip_floor=0.5))
    assert (spec.cow_clip, spec.cow_clip_floor) == (1.0, 0.5)


def test_every_data_set_has_a_preset():
    assert set(PRESETS) == set(NAMES)
    assert all(config.data == name for name, config in PRESETS.items())
    assert preset("some/day_0.gz") == replace(PRESETS["criteo-kaggle"], data="some/day_0.gz")
    assert preset("adult", "synthetic") == replace(PRESETS["synthetic"], data="adult")


@pytest.mark.parametrize(("name", "kind"), [("dlrm", te.nn.DLRM), ("dcnv2", te.nn.DCNv2)])
def test_the_model_is_the_one_named(name, kind):
    data = make_synthetic(100, 100)
    config = TrainConfig(model=name, embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,))
    model = build_model(config, data.features, data.num_dense)
    assert type(model) is kind
    batch = next(data.open("test", 10))
    assert model(batch.dense, batch.sparse).shape == (10,)


def test_training_a_criteo_file(tmp_path):
    """The label is whether category 1 is `a`, so training has to find it."""
    lines = ["\t".join([str(i % 2), *["1"] * 13, "ab"[1 - i % 2], *[""] * 25]) for i in range(600)]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    config = replace(
        preset(str(tmp_path / "train.txt")),
        bottom_mlp=(8,),
        top_mlp=(8,),
        batch_size=50,
        epochs=3,
        embedding_lr=0.2,
        dense_lr=0.02,
        read=LogOptions(schema=Schema(num_embeddings=100)),
        output=OutputOptions(out=tmp_path / "run"),
    )
    result = train(config, verbose=False)
    assert result.test is not None
    assert result.test.auc == 1.0
    assert 95 <= result.test.num_samples <= 105  # the last sixth of the file's bytes
    assert result.steps == 3 * 10


def text_run(folder: Path, epochs: int) -> TrainConfig:
    """A run on a text log of 600 rows beside its folder, of which 500 are for training: 10 steps an epoch."""
    log = folder.parent / "train.txt"
    if not log.exists():
        rows = [
            "\t".join([str(i * 7 % 3 % 2), *[str(i % 9)] * 13, *[f"{i * k % 50:x}" for k in range(26)]])
            for i in range(600)
        ]
        log.write_text("\n".join(rows) + "\n")
    return replace(
        preset(str(log)),
        embedding_dim=4,
        bottom_mlp=(8,),
        top_mlp=(8,),
        batch_size=50,
        epochs=epochs,
        read=LogOptions(schema=Schema(num_embeddings=100), shuffle_rows=200),
        checkpoint=CheckpointOptions(checkpoint_steps=2, keep=99),
        output=OutputOptions(out=folder),
    )


def tensors_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return in_memory(CheckpointFolder(folder / "checkpoints").path(step))


@pytest.mark.more
def test_a_text_log_of_several_epochs_is_converted_once_with_the_same_bits(tmp_path, capsys):
    text, converted = tmp_path / "text", tmp_path / "converted"
    train(text_run(text, 1), verbose=False)
    assert not (text / "cache").exists()
    train(text_run(text, 3), "auto", verbose=False)  # a run keeps what it has begun with
    assert not (text / "cache").exists()
    capsys.readouterr()
    train(text_run(converted, 3))
    assert capsys.readouterr().err.count("note: converting train.txt to Parquet, once for all epochs") == 1
    assert len(list((converted / "cache").glob("*/train.parquet"))) == 1
    for step in (10, 14, 30):
        actual, expected = tensors_at(converted, step), tensors_at(text, step)
        del actual["trainer.loss_sums"], expected["trainer.loss_sums"]  # since the last log, of which the end had one
        assert_same_bits(actual, expected)


@pytest.mark.parametrize(("begun", "resumed"), [(1, 3), (3, 1), (3, 2)])
@pytest.mark.more
def test_a_run_that_crashed_inside_an_epoch_resumes_with_another_number_of_epochs(tmp_path, begun, resumed):
    """Positions in text and in Parquet differ, so a resumed run keeps its format, even if `epochs` changes."""
    folder, full = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(Crash):
        train(text_run(folder, begun), callbacks=[CrashAt(5)], verbose=False)
    result = train(text_run(folder, resumed), "auto", verbose=False)
    assert (folder / "cache").exists() == (begun > 1)
    assert result.steps == 10 * resumed
    train(text_run(full, resumed), verbose=False)
    assert_same_bits(tensors_at(folder, 10 * resumed), tensors_at(full, 10 * resumed))


@pytest.mark.more
@pytest.mark.parametrize("placement", [pytest.param("device", marks=pytest.mark.slow), "disk"])
def test_a_run_with_dynamic_tables_resumes_to_the_same_bits_and_predicts(tmp_path, placement):
    """No vocabulary; tables of 40 rows for 50 ids and missing ones, which come in their second occurrence."""

    def run(name: str) -> TrainConfig:
        tables = TableOptions(evict="lfu", admit_after=2, placement=placement, placed_rows=100, fallback_rows=5)
        read = LogOptions(schema=Schema(dynamic=True, num_embeddings=300, sizes=("cat_2=60",)), shuffle_rows=200)
        return replace(text_run(tmp_path / name, 2), read=read, tables=tables)

    train(run("whole"), verbose=False)
    with pytest.raises(Crash):
        train(run("first"), callbacks=[CrashAt(13)], verbose=False)
    train(run("first"), "auto", verbose=False)
    actual = tensors_at(tmp_path / "first", 20)
    assert_same_bits(actual, tensors_at(tmp_path / "whole", 20))
    ids = actual["model.embeddings.cat_2.ids"]
    assert 0 < len(ids) <= 60
    assert int(actual["model.embeddings.cat_2.clock"]) == 20
    assert len(actual["model.embeddings.cat_2.fallback_weight"]) >= 5
    log = tmp_path / "train.txt"
    scores = tmp_path / "scores.csv"
    said = predict(PredictOptions(checkpoint=tmp_path / "whole", data=str(log), out=scores))
    assert "600 scores" in said
    assert len(scores.read_text().splitlines()) == 601


def test_a_checkpoint_that_is_resumed_in_another_folder_says_what_was_read(tmp_path):
    train(text_run(tmp_path / "first", 2), verbose=False)
    checkpoint = tmp_path / "first" / "checkpoints" / "step-14"
    train(text_run(tmp_path / "second", 2), str(checkpoint), verbose=False)
    assert (tmp_path / "second" / "cache").exists()
    assert_same_bits(tensors_at(tmp_path / "second", 20), tensors_at(tmp_path / "first", 20))
    copy = shutil.copytree(checkpoint, tmp_path / "copies" / "today" / "step-14")
    with pytest.raises(ValueError, match="step-14 is not in the folder of a run; name the folder of the new run with"):
        train(replace(text_run(tmp_path / "first", 2), output=OutputOptions()), str(copy), verbose=False)
    assert [entry.name for entry in (tmp_path / "copies").iterdir()] == ["today"]


def test_a_refused_run_converts_nothing(tmp_path):
    train(text_run(tmp_path / "run", 1), verbose=False)
    with pytest.raises(ValueError, match="holds a run with step-10"):
        train(text_run(tmp_path / "run", 2), verbose=False)
    assert not (tmp_path / "run" / "cache").exists()
    config, rule = text_run(tmp_path / "other", 2), SplitRule("random", 1e-9)
    with pytest.raises(ValueError, match="there are no test rows"):
        train(replace(config, read=replace(config.read, split=rule)), verbose=False)
    assert not (tmp_path / "other" / "cache").exists()


def test_a_plan_needs_ranks(tmp_path):
    config = replace(text_run(tmp_path / "run", 1), parallel=ParallelOptions(plan=tmp_path / "plan.json"))
    with pytest.raises(ValueError, match="plan is for several ranks: run torchrun"):
        train(config, verbose=False)


def test_a_command_changes_nothing_in_a_folder_that_another_process_trains_in(tmp_path):
    """Neither are the logs of its servers removed, nor checkpoints read, which the other process may remove."""
    config = replace(text_run(tmp_path / "run", 1), server=ServersOptions(servers="1", server_log="disk"))
    checkpoint, log = tmp_path / "run" / "checkpoints" / "step-1", tmp_path / "run" / "servers" / "server-0" / "log"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text("{")
    log.parent.mkdir(parents=True)
    log.touch()
    with RunFolder(tmp_path / "run").lock():
        for resume in (None, "auto"):
            with pytest.raises(ValueError, match="another process trains in"):
                train(config, resume, verbose=False)
    assert log.exists()


def test_a_profiled_window_leaves_a_trace_that_names_the_ops(tmp_path):
    config = replace(
        preset("synthetic"),
        max_steps=4,
        output=OutputOptions(out=tmp_path / "run"),
        profile=ProfileOptions(profile_steps=2, profile_start=1),
    )
    train(config, verbose=False)
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#Adam") for name in names if name) == 2


def test_threads_are_checked(tmp_path):
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        train(TrainConfig(data="synthetic", threads=0, output=OutputOptions(out=tmp_path)))
