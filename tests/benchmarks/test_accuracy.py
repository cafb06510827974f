"""Comparing the fused network with its plain twin, on data small enough for a test."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.studies.accuracy import TOLERANCE, compare, criteo, seen_share
from tritonemb.data import Column, Dataset, Feature, Rows
from tritonemb.training.config import preset

pytestmark = pytest.mark.more


def planted(num_rows: int) -> Dataset:
    """A label that depends on the first number and the first id alone."""
    generator = torch.Generator().manual_seed(0)
    dense, ids = torch.randn(num_rows, 2, generator=generator), torch.randint(0, 20, (num_rows,), generator=generator)
    lengths = torch.randint(0, 3, (num_rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    bags = Column(torch.randint(0, 5, (int(offsets[-1]),), generator=generator), offsets)
    rows = Rows(dense, (Column(ids), bags), (dense[:, 0] + (ids % 2) > 0.5).float())
    features = (Feature("id", 20), Feature("bag", 5, multi_hot=True))
    return Dataset("planted", features, train=rows.slice(0, num_rows // 2), test=rows.slice(num_rows // 2, num_rows))


def test_both_networks_learn_and_agree() -> None:
    config = dataclasses.replace(preset("synthetic"), embedding_optimizer="row_wise_adagrad", epochs=2, batch_size=64)
    row = compare(config, planted(4000), seeds=range(2))
    assert row["torch_auc"] > 0.9
    assert abs(row["difference"]) <= TOLERANCE
    assert row["within_tolerance"]
    assert row["seeds"] == 2


def test_test_rows_that_stand_among_the_training_rows_are_counted() -> None:
    data = planted(400)
    assert seen_share(data) == 0
    assert seen_share(dataclasses.replace(data, test=data.train)) == 1
    assert seen_share(dataclasses.replace(data, train=data.train.slice(0, 150), test=data.train.slice(100, 200))) == 0.5
    flipped = dataclasses.replace(data.train, labels=1 - data.train.labels)
    assert seen_share(dataclasses.replace(data, test=flipped)) == 0


def test_a_criteo_file_is_read_into_memory(tmp_path) -> None:
    lines = ["\t".join([str(i % 2), *["1"] * 13, "ab"[i % 2] if i else "c", *[""] * 25]) for i in range(600)]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    data = criteo(str(tmp_path / "train.txt"))
    assert len(data.train) + len(data.test) == 600
    assert 95 <= len(data.test) <= 105  # the last sixth of the file's bytes
    ids = data.train.columns[0].values
    assert ids.unique().numel() == 3, "two categories, and one that is too rare"
    assert torch.equal(ids[1:] == ids[1], data.train.labels[1:] == 1)
