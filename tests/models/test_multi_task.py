"""MMoE and PLE: formulas against loops; several labels on every tier, on two ranks, exported and served."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import tritonemb as te
from tests.serving.scorers import call
from tests.training.test_labels import IDS, NAMES, data
from tritonemb.models import MODELS
from tritonemb.serving.http import App
from tritonemb.serving.scorer import Scorer

PLACEMENTS = {
    "host": {"placement": "host", "cache": te.CacheConfig(rows=16)},
    "disk": {"placement": "disk", "cache": te.CacheConfig(rows=16)},
    "server": {"placement": "server"},
    "dynamic": {"num_embeddings": None, "capacity": IDS},
}


def make_model(name: str, num_labels: int = 2, **table):
    torch.manual_seed(0)
    config = te.TableConfig("user", **{"num_embeddings": IDS, "embedding_dim": 4, **table})
    return MODELS[name]([config], 1, num_labels, (12, 10, 8), 3, optimizer=te.optim.RowWiseAdagrad(lr=0.1))


@pytest.fixture(params=["mmoe", "ple"])
def name(request) -> str:
    return request.param


def batch(size: int = 7):
    ids = torch.arange(size) % IDS
    return torch.randn(size, 1), te.KeyedJaggedTensor.from_lengths(["user"], ids, torch.ones_like(ids))


def mix(gate, x, experts):
    """Weigh the outputs of experts for one row by the softmax of the gate's scores."""
    scores = [torch.exp(row @ x + bias) for row, bias in zip(gate.linear.weight, gate.linear.bias, strict=True)]
    assert len(scores) == len(experts)
    return sum(score / sum(scores) * expert for score, expert in zip(scores, experts, strict=True))


def test_mmoe_is_its_formula():
    model, (dense, sparse) = make_model("mmoe"), batch()
    inputs = torch.cat([dense, model.embeddings(sparse)], dim=1)
    for x, logits in zip(inputs, model(dense, sparse), strict=True):
        experts = [expert(x) for expert in model.experts]
        expected = [tower(mix(gate, x, experts)) for gate, tower in zip(model.gates, model.towers, strict=True)]
        torch.testing.assert_close(logits, torch.cat(expected))


def test_ple_is_its_formula():
    model, (dense, sparse) = make_model("ple"), batch()
    inputs = torch.cat([dense, model.embeddings(sparse)], dim=1)
    assert [len(level.gates) for level in model.levels] == [3, 2]
    for x, logits in zip(inputs, model(dense, sparse), strict=True):
        first, second, shared = x, x, x
        for level in model.levels:
            inputs_of = zip(level.experts, (first, second, shared), strict=True)
            of_first, of_second, common = ([expert(own) for expert in experts] for experts, own in inputs_of)
            if level is model.levels[0]:
                shared = mix(level.gates[2], shared, [*of_first, *of_second, *common])
            first = mix(level.gates[0], first, [*of_first, *common])
            second = mix(level.gates[1], second, [*of_second, *common])
        torch.testing.assert_close(logits, torch.cat([model.towers[0](first), model.towers[1](second)]))


def test_one_label_has_logits_of_one_dimension(name):
    assert make_model(name, 1)(*batch()).shape == (7,)
    with pytest.raises(ValueError, match=r"num_labels must be at least 1, .* got 0 and \[12, 10, 8\]"):
        make_model(name, 0)


def fit(rank: int, name: str, size: int = 1, compiled: bool = False, **table):
    model = make_model(name, **table)
    wrapped = te.HybridParallel(model, exchange=te.sharding.ExchangePrecision("fp32", "fp32")) if size > 1 else model
    with te.server.start(1) if table.get("placement") == "server" else nullcontext() as servers:
        trainer = te.Trainer(wrapped, data(), batch_size=60 // size, verbose=False, servers=servers, compile=compiled)
        trainer.fit()
        return trainer.predict("test").numpy()


def test_tables_on_every_tier_train_alike(name):
    expected = fit(0, name)
    assert expected.shape == (103, 2)
    for kind, table in PLACEMENTS.items():
        result = fit(0, name, **table)
        if kind == "dynamic":  # rows have other initial values
            assert np.isfinite(result).all()
        else:
            np.testing.assert_array_equal(result, expected, kind)


@pytest.mark.more
def test_sharded_on_two_ranks_and_compiled(name, ranks):
    expected = fit(0, name)
    np.testing.assert_allclose(ranks(2).run(fit, name, 2)[0], expected, rtol=1e-4)
    np.testing.assert_allclose(fit(0, name, compiled=True), expected, rtol=1e-4)


def test_a_run_is_trained_exported_evaluated_and_served(name, tmp_path: Path, capsys):
    pytest.importorskip("tyro")
    from tritonemb.cli import main

    lines = [f"{i * 7 % 3 % 2},{i % 5 % 2 if i % 4 else ''},{i % 3},{i % 5},{i % 9}" for i in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(["buy,like,w,price,user", *lines]))
    columns = ["--weight", "w", "--dense", "price", "--sparse", "user", "--num-embeddings", "50"]
    train = ["train", "--data", f"{tmp_path}/log.csv", *columns, "--embedding-dim", "4"]
    train += ["--top-mlp", "8", "4", "--batch-size", "50", "--out", f"{tmp_path}/run"]
    assert main([*train, "--labels", *NAMES, "--validation-share", "0.3", "--model", "dlrm"]) == 2
    assert "DLRM predicts one label, the data have 2; choose another model: mmoe, ple" in capsys.readouterr().err
    assert main([*train, "--labels", *NAMES, "--validation-share", "0.3", "--model", name, "--num-experts", "2"]) == 0
    assert "  AUC[like] " in capsys.readouterr().out
    assert main(["evaluate", "--checkpoint", f"{tmp_path}/run", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["labels"]] == [*NAMES]
    assert main(["evaluate", "--checkpoint", f"{tmp_path}/run"]) == 0
    assert "\nlike\nAUC " in capsys.readouterr().out
    assert main(["export", f"{tmp_path}/run", "--out", f"{tmp_path}/export"]) == 0
    run = te.load_run(tmp_path / "export")
    rows = [{"price": i, "user": str(i)} for i in range(3)]
    scores = run.predict(rows)
    assert scores.shape == (3, 2)
    np.testing.assert_array_equal(te.load_run(tmp_path / "run").predict(rows), scores)
    np.testing.assert_array_equal(run.predict(rows[1]), scores[1])
    predict = ["predict", "--checkpoint", f"{tmp_path}/run", "--data", f"{tmp_path}/log.csv"]
    assert main([*predict, "--out", f"{tmp_path}/s.csv"]) == 0
    assert (tmp_path / "s.csv").read_text().splitlines()[0] == '"score[buy]","score[like]"'
    with Scorer(run) as scorer:
        app = App(scorer, "", 1 << 20, 60.0)
        assert call(app, "POST", "/score", rows) == (200, {"scores": dict(zip(NAMES, scores.T.tolist(), strict=True))})
        inputs = [
            {"name": "price", "shape": [3], "datatype": "FP64", "data": [0, 1, 2]},
            {"name": "user", "shape": [3], "datatype": "BYTES", "data": ["0", "1", "2"]},
        ]
        outputs = call(app, "POST", "/v2/models/model/infer", {"inputs": inputs})[1]["outputs"]
        assert {output["name"]: output["data"] for output in outputs} == {
            f"score[{label}]": column for label, column in zip(NAMES, scores.T.tolist(), strict=True)
        }
