"""The board of published results: a run is written once, resumes, and is shown in the page's table."""

from __future__ import annotations

import lzma
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import tritonemb as te
from benchmarks import board
from benchmarks.board import Cell, __main__, amazon, gowalla
from tests.helpers import assert_same_bits
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
