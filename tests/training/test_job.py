import json
from dataclasses import replace
from typing import get_args

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torchmetrics")

import tritonemb as te
from tritonemb.data import NAMES, LogOptions, Schema, make_synthetic
from tritonemb.optim import OPTIMIZERS
from tritonemb.training.callbacks.tensorboard import ProfileOptions
from tritonemb.training.config import PRESETS, EmbeddingOptimizer, OutputOptions, TrainConfig, preset
from tritonemb.training.job import build_model, build_optimizer, train


def test_every_optimizer_can_be_named():
    assert set(get_args(EmbeddingOptimizer)) == set(OPTIMIZERS)
    for name in get_args(EmbeddingOptimizer):
        spec = build_optimizer(TrainConfig(embedding_optimizer=name, embedding_lr=0.125, embedding_weight_decay=0.25))
        assert type(spec) is OPTIMIZERS[name]
        assert (spec.lr, spec.weight_decay) == (0.125, 0.25)


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
    batch = next(data.test_batches(10))
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
