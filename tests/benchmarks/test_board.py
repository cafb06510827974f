"""The board of published results: a run is written once, resumes, and is shown in the page's table."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tritonemb as te
from benchmarks import board
from benchmarks.board import Cell, __main__, amazon, gowalla, peers, ranking
from tests.helpers import assert_same_bits
from tritonemb.data import Dataset, Feature
from tritonemb.data.batch import Column, Rows
from tritonemb.models import HSTU, SASRec
from tritonemb.models.losses import sampled_softmax


def test_a_run_is_written_once_and_shown_with_its_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(__main__, "RESULTS", tmp_path)
    calls = []

    def train(data, folder, seed):
        calls.append(seed)
        (folder / "state").touch()
        return {"metrics": {"auc": [0.81, 0.83][seed], "loss": 0.5}}

    cell = Cell("toy", "rows", "model", train, {"auc": 0.8}, "a paper", seeds=3)
    monkeypatch.setattr(__main__, "cells", lambda: {"toy": cell})
    assert "| not run | 0.8000 (a paper) | - | 0 of 3 |" in __main__.table()
    results = [__main__.run(cell, tmp_path, tmp_path / "scratch", seed) for seed in (0, 1, 0)]
    assert calls == [0, 1]
    assert results[2]["metrics"] == {"auc": 0.81, "loss": 0.5}
    assert "| auc 0.8200 ± 0.0100 | 0.8000 (a paper) | +2.5% | 2 of 3 |" in __main__.table()


def test_every_cell_of_the_board_has_its_own_name():
    names = [cell.name for cell in __main__.cells().values()]
    assert sum(len(__import__(f"benchmarks.board.{name}", fromlist=["CELLS"]).CELLS) for name in board.MODULES) == len(
        names
    )


class StopEarly(Exception):
    """A run is killed."""


def test_matrix_factorization_resumes_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, size in (("NUM_USERS", 30), ("NUM_ITEMS", 40), ("DIM", 8)):
        monkeypatch.setattr(gowalla, name, size)
    generator = torch.Generator().manual_seed(0)
    for name, count in (("train", 8), ("valid", 2), ("test", 2)):
        rows = [torch.randperm(40, generator=generator)[:count].tolist() for _ in range(30)]
        text = "\n".join(" ".join(map(str, [user, *items])) for user, items in enumerate(rows))
        (tmp_path / f"gowalla_{name}.txt.xz").write_bytes(lzma.compress(text.encode()))
    recipe = gowalla.Recipe(
        partial(sampled_softmax, temperature=0.2), lr=0.01, num_negatives=16, cosine=True, batch_size=64, max_epochs=4,
        evaluate_every=2,
    )  # fmt: skip
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    whole = gowalla.run(recipe, tmp_path, tmp_path / "whole", 0)
    # Stop before an epoch of each of both stages, and resume.
    train_epoch, stops = gowalla.train_epoch, {3, 6}
    count = 0

    def train_or_stop(*arguments):
        nonlocal count
        count += 1
        if count in stops:
            raise StopEarly
        return train_epoch(*arguments)

    monkeypatch.setattr(gowalla, "train_epoch", train_or_stop)
    for _ in stops:
        with pytest.raises(StopEarly):
            gowalla.run(recipe, tmp_path, tmp_path / "stopped", 0)
    result = gowalla.run(recipe, tmp_path, tmp_path / "stopped", 0)
    assert result == whole
    states = [torch.load(tmp_path / folder / "train.pt")["model"] for folder in ("whole", "stopped")]
    assert_same_bits(*states)
    other = gowalla.run(replace(recipe, num_negatives=15), tmp_path, tmp_path, 0)
    assert other["metrics"] != whole["metrics"]


def test_ranking_leaves_training_items_out(monkeypatch: pytest.MonkeyPatch):
    """A model whose best items are those of the training rows finds the test items next."""
    for name, size in (("NUM_USERS", 1030), ("NUM_ITEMS", 1030), ("DIM", 4)):
        monkeypatch.setattr(gowalla, name, size)
    model = gowalla.build(gowalla.Recipe(sampled_softmax), 0)
    users = torch.arange(1030)
    state = model.state_dict()
    angles = users.double() * 2 * torch.pi / 1030
    circle = torch.stack([angles.cos(), angles.sin(), angles * 0, angles * 0], dim=1).float()
    for key in state:
        if key.endswith(".weight"):
            state[key] = circle
    model.load_state_dict(state)
    relevant = users.repeat_interleave(2), torch.stack([(users - 1) % 1030, (users + 1) % 1030], dim=1).flatten()
    monkeypatch.setattr(gowalla, "K", 2)
    assert gowalla.evaluate(model, (users, users), relevant) == {"recall@2": 1.0, "ndcg@2": 1.0}
    seen = torch.tensor([5]), torch.tensor([5])
    assert gowalla.evaluate(model, seen, relevant)["recall@2"] == pytest.approx((1030 * 0.5 + 0.5) / 1030)


@pytest.mark.parametrize("recipe", [amazon.Recipe(HSTU, num_shared=8), amazon.Recipe(SASRec, num_negatives=1)])
def test_the_next_item_resumes_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe):
    recipe = replace(recipe, dim=8, length=4, batch_size=16, max_epochs=4, evaluate_every=2)
    generator = torch.Generator().manual_seed(0)
    lines = [
        f"{user} {' '.join(str(int(i) + 1) for i in torch.randperm(14, generator=generator)[:7])}" for user in range(30)
    ]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    whole = amazon.run(recipe, "a.txt", tmp_path, tmp_path / "whole", 0)
    evaluate, count = amazon.evaluate, 0

    def evaluate_or_stop(*arguments):
        nonlocal count
        count += 1
        if count == 2:
            raise StopEarly
        return evaluate(*arguments)

    monkeypatch.setattr(amazon, "evaluate", evaluate_or_stop)
    with pytest.raises(StopEarly):
        amazon.run(recipe, "a.txt", tmp_path, tmp_path / "stopped", 0)
    result = amazon.run(recipe, "a.txt", tmp_path, tmp_path / "stopped", 0)
    assert result | {"cpu_seconds": 0} == whole | {"cpu_seconds": 0}
    assert whole["epoch"] == 4
    states = [torch.load(tmp_path / folder / "state.pt")["model"] for folder in ("whole", "stopped")]
    assert_same_bits(*states)


def test_the_next_item_is_ranked_among_items_that_the_user_has_not_had(tmp_path: Path):
    """A model that returns the row of the last item: of two items of equal rows the one that was had is left out."""
    (tmp_path / "a.txt").write_text("0 1 2 3 4\n1 2 1 4 3\n")

    class LastItem(SASRec):
        def encode(self, rows, windows, times=None):
            return rows

    model = LastItem(te.TableConfig("item", 5, 2), 3)
    with torch.no_grad():
        model.embeddings["item"].weight.copy_(torch.tensor([[9.0, 9], [2, 0], [2, 0], [2, 0], [1, 0]]))
    sequences = amazon.read_sequences(tmp_path / "a.txt")
    assert amazon.evaluate(model, sequences, "test") == {"HR@10": 1.0, "NDCG@10": 1.0}
    assert amazon.evaluate(model, sequences, "validation")["NDCG@10"] == pytest.approx((1 + 1 / 1.584962500721156) / 2)


def small_dataset() -> Dataset:
    """40 rows whose label is a function of a list of ids, in each split."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (40,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tags = torch.randint(0, 5, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
    items = torch.randint(0, 9, (40,), generator=generator, dtype=torch.int32)
    rows = Rows(torch.randn(40, 2, generator=generator), (Column(items), Column(tags, offsets)), (lengths > 1).float())
    features = Feature("item", 9), Feature("tags", 5, multi_hot=True)
    return Dataset("small", features, rows, rows, rows)


@pytest.mark.more
@pytest.mark.parametrize("cell", {cell.model: cell for cell in ranking.CELLS}.values(), ids=lambda cell: cell.model)
def test_a_ranking_model_is_trained_without_peers_and_with_those_installed(cell: Cell, tmp_path: Path):
    options, libraries, _ = cell.run.args
    installed = [name for name in libraries if find_spec(name.lower().replace("-", "_"))]
    options = replace(options, dim=4, mlp=(8,), batch_size=16, max_epochs=2)
    data = small_dataset()
    if options.model == "din":
        item, tags = data.features
        data = replace(data, features=(item, replace(tags, num_embeddings=9, table="item")))
    result = ranking.run(options, installed, lambda *_: data, tmp_path, tmp_path, 0)
    outcomes = [result, *result["peers"].values()]
    assert all(0 < outcome["metrics"]["AUC"] <= 1 for outcome in outcomes)
    assert {name.removesuffix(" steps") for name in result["cpu_seconds"]} >= {"tritonemb", *installed}


def test_the_epoch_is_chosen_by_validation_rows(monkeypatch: pytest.MonkeyPatch):
    # AUC of the epochs: the validation rows' is largest at the second, the test rows' at the first.
    values, epochs = {"validation": [0.6, 0.8, 0.7, 0.7], "test": [0.9, 0.5, 0.6, 0.6]}, []
    model = SimpleNamespace(train_epoch=lambda: epochs.append(len(epochs)))
    monkeypatch.setattr(ranking, "metrics", lambda model, data, split: {"AUC": values[split][epochs[-1]]})
    result = ranking.fit(model, None, peers.Options("deepfm", patience=2))
    assert result == {"metrics": {"AUC": 0.5}, "validation AUC": 0.8, "epochs": 2}
    assert len(epochs) == 4


@pytest.mark.parametrize(
    ("differences", "reached"),
    [([-0.0009], True), ([-0.0011], False), ([-0.004, 0.0], True), ([-0.004, -0.003], False)],
)
def test_a_cell_beside_a_peer_may_fall_short_by_two_standard_errors(differences: list[float], reached: bool):
    assert __main__.is_as_good(differences) == reached


@pytest.mark.more
def test_a_peer_reads_the_rows_that_ours_reads(monkeypatch: pytest.MonkeyPatch):
    """Lists are padded behind their ids, which begin at one; a library that is missing says how to install it."""
    data = small_dataset()
    module = torch.nn.Linear(1, 1)
    library = peers.Library("toy", lambda *_: (module, lambda module, batch: batch["item"].sigmoid()), None)
    monkeypatch.setitem(peers.PEERS, "toy", library)
    peer = peers.Peer("toy", data, peers.Options("deepfm"), 0)
    batch = peer.batch("train", torch.tensor([7, 3]))
    offsets, tags = data.train.columns[1].offsets.tolist(), data.train.columns[1].values.tolist()
    for position, row in enumerate((7, 3)):
        ids = [tag + 1 for tag in tags[offsets[row] : offsets[row + 1]]]
        assert batch["tags"][position].tolist() == ids + [0] * (3 - len(ids))
        assert batch["item"][position] == data.train.columns[0].values[row]
        assert batch["dense_1"][position] == data.train.dense[row, 1]
    assert torch.equal(peer.predict("test"), data.test.columns[0].values.float().sigmoid())
    with pytest.raises(ModuleNotFoundError, match=r"docs/board\.md says how the peers are installed"):
        peers.import_peer("no_such_library")


def test_a_cell_beside_peers_has_a_row_per_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(__main__, "RESULTS", tmp_path)
    cell = Cell("toy", "rows", "model", lambda *_: {}, seeds=2, peers={"A": "no bias", "B": ""})
    monkeypatch.setattr(__main__, "cells", lambda: {"toy": cell})
    assert "| rows | model | B | not run |" in __main__.peer_table()
    assert "rows" not in __main__.table()
    for seed, (ours, peer, seconds) in enumerate([(0.8, 0.78, [2.0, 3.0]), (0.82, 0.82, [1.0, 2.0])]):
        result = {"metrics": {"AUC": ours}, "peers": {"A": {"metrics": {"AUC": peer}}}, "commit": "0123456789"}
        times = {"tritonemb": seconds, "A steps": [4.0, 3.0], "A loop": [8.0, 4.0]}
        (tmp_path / f"toy-{seed}.json").write_text(json.dumps(result | {"cpu_seconds": times}))
    expected = "| A | 0.8100 | 0.8000 | +0.0100 ± 0.0100 | yes | 1.75 | 3.00 | 2 of 2 | 01234567 | no bias |"
    assert expected in __main__.peer_table()
