from dataclasses import replace
from typing import get_args

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torchmetrics")

import tritonemb as te
from tritonemb.data import NAMES, make_synthetic
from tritonemb.optim import OPTIMIZERS
from tritonemb.training.config import PRESETS, EmbeddingOptimizer, TrainConfig, preset
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
    assert preset("some/day_0.gz") is PRESETS["criteo"]


@pytest.mark.parametrize(("name", "kind"), [("dlrm", te.nn.DLRM), ("dcnv2", te.nn.DCNv2)])
def test_the_model_is_the_one_named(name, kind):
    data = make_synthetic(100, 100)
    model = build_model(TrainConfig(model=name, embedding_dim=4, bottom_mlp=(8,), top_mlp=(8,)), data)
    assert type(model) is kind
    batch = next(data.test_batches(10))
    assert model(batch.dense, batch.sparse).shape == (10,)


def test_training_a_criteo_file(tmp_path):
    """The label is whether category 1 is `a`, so training has to find it."""
    lines = ["\t".join([str(i % 2), *["1"] * 13, "ab"[1 - i % 2], *[""] * 25]) for i in range(600)]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    config = replace(
        preset("criteo"), data=str(tmp_path / "train.txt"), bottom_mlp=(8,), top_mlp=(8,), batch_size=50, epochs=3
    )
    result = train(replace(config, embedding_lr=0.2, dense_lr=0.02), verbose=False)
    assert result.test.auc == 1.0
    assert result.test.num_samples == 100
    assert result.best_auc is None


def test_threads_are_checked():
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        train(TrainConfig(data="synthetic", threads=0))
