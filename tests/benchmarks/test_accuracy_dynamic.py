"""The study of dynamic tables, on data small enough for a test."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.measuring import report
from benchmarks.studies import dynamic_tables as accuracy_dynamic
from benchmarks.studies.dynamic_tables import (
    EVICTED,
    FREQUENT,
    HASHED,
    ODD,
    OWN,
    REFERENCE,
    SAME,
    InOrder,
    Run,
    compare,
    criteo,
    ids_of,
    last_ones,
    most_frequent,
    numbered,
    quarters,
    same,
    summary,
    zipf,
)
from tritonemb.data import Column, Dataset, Feature, Rows
from tritonemb.training.config import preset

pytestmark = pytest.mark.more

CONFIG = dataclasses.replace(preset("synthetic"), batch_size=8, epochs=1, top_mlp=(8,), bottom_mlp=(8,))


def planted(kind: type[Dataset] = Dataset, num_rows: int = 400) -> Dataset:
    """A label that depends on a number and an id of 64 bits; some ids of the test rows are in no train row."""
    generator = torch.Generator().manual_seed(0)
    dense, ids = torch.randn(num_rows, 2, generator=generator), torch.randint(80, (num_rows,), generator=generator)
    ids[-5:] += 1_000
    bags = Column(torch.randint(5, (2 * num_rows,), generator=generator) * ODD, torch.arange(0, 2 * num_rows + 1, 2))
    rows = Rows(dense, (Column(ids * ODD), bags), (dense[:, 0] + (ids % 2) > 0.5).float())
    features = (Feature("id", 1, dynamic=True), Feature("bag", 1, multi_hot=True, dynamic=True))
    return kind("planted", features, rows.slice(0, num_rows // 2), rows.slice(num_rows // 2, num_rows))


@pytest.mark.parametrize("kind", [Dataset, InOrder])
def test_the_study_compares_all_arms_and_finds_the_same_bits(kind):
    rows = {row["arm"]: row for row in compare(CONFIG, planted(kind), range(2))}
    assert list(rows) == [REFERENCE, SAME, OWN, *EVICTED, HASHED, FREQUENT]
    assert rows[SAME]["bitwise_equal_to_dynamic"] is True
    assert rows[SAME]["auc_of_each_seed"] == rows[OWN]["auc_of_each_seed"] != rows[REFERENCE]["auc_of_each_seed"]
    assert rows[REFERENCE]["difference"] == 0
    assert rows[OWN]["ids"]["id"] > 70
    assert rows[OWN]["rows_of_a_quarter"] == {"id": rows[OWN]["ids"]["id"] // 4}
    assert len({tuple(row["auc_of_each_seed"]) for row in rows.values()}) == len(rows) - 1
    text = report.dynamic_section({"rows": [row | dict.fromkeys(KEYS, "x") for row in rows.values()]})
    assert f"| planted: {HASHED} |" in text


KEYS = ("cpu", "torch", "numba", "tritonemb", "commit", "date")


def test_one_other_bit_is_seen():
    run = Run([0.5, 0.25], torch.tensor([0.0, 1.0]), 0.5)
    assert same(run, dataclasses.replace(run, losses=[0.5, 0.25]))
    assert not same(run, dataclasses.replace(run, losses=[0.5, float(np.nextafter(0.25, 1))]))
    assert not same(run, dataclasses.replace(run, logits=torch.tensor([-0.0, 1.0])))


def test_the_difference_is_paired():
    row = summary(OWN, [0.6, 0.8, 0.71], [0.5, 0.7, 0.6], True)
    assert row["difference"] == pytest.approx(0.31 / 3)
    assert row["standard_error"] == pytest.approx(0.01 / 3)  # deviation 0.01 / sqrt(3), over sqrt(3)
    assert row["within_two_standard_errors"] is False
    assert summary(OWN, [0.5, 0.7], [0.6, 0.61], True)["within_two_standard_errors"] is True


def test_ids_of_all_splits_have_rows_of_their_own_unless_they_are_hashed():
    raw = planted()
    ids = ids_of(raw)
    data = numbered(raw, ids, {})
    for index, name in enumerate(ids):
        for rows, numbers in ((raw.train, data.train), (raw.test, data.test)):
            assert torch.equal(ids[name][numbers.columns[index].values], rows.columns[index].values)
    quarter = quarters(ids, 8)
    assert list(quarter) == ["id"]
    assert quarters(ids, 16) == {}
    hashed = torch.cat([rows.columns[0].values for rows in (numbered(raw, ids, quarter).train, data.train)])
    assert len(hashed[:200].unique()) <= quarter["id"] < len(hashed[200:].unique())


def test_the_most_frequent_ids_have_rows_and_others_share_the_last():
    raw = planted()
    ids = ids_of(raw)
    retained = most_frequent(raw, ids, {"id": 20})
    values, numbers = (data.train.columns[0].values for data in (raw, numbered(raw, retained, {})))
    counts = {int(value): int((values == value).sum()) for value in values.unique()}
    local = {int(item) for item in retained["id"][:-1]}
    assert len(local) == 19
    assert min(counts[item] for item in local) >= max(count for item, count in counts.items() if item not in local)
    assert [int(value) in local for value in values] == (numbers < 19).tolist()
    assert torch.equal(retained["id"][numbers[numbers < 19]], values[numbers < 19])
    assert retained["bag"] is ids["bag"]


def test_histories_are_cut_to_their_last_ids():
    values, offsets = last_ones(torch.arange(7), torch.tensor([0, 5, 5, 7]), 3)
    assert values.tolist() == [2, 3, 4, 5, 6]
    assert offsets.tolist() == [0, 3, 3, 5]


def test_a_criteo_file_has_the_integers_of_its_digits(tmp_path):
    lines = [
        "\t".join([str(n % 2), *["", "7"], *["-2"] * 11, f"{n:x}", *["ffffffff", ""] * 12, "10"]) for n in range(12)
    ]
    (tmp_path / "train.txt").write_text("\n".join([*lines, *lines]) + "\n")
    data = criteo(tmp_path / "train.txt")
    assert (len(data.train), len(data.test)) == (10, 2)
    assert data.test.columns[0].values.tolist() == [10, 11]
    assert [int(column.values[0]) for column in data.train.columns[1:]] == [2**32 - 1, -(2**63)] * 12 + [16]
    assert data.train.dense[0].tolist() == pytest.approx([0, np.log(8), *[0] * 11])
    assert data.test.labels.tolist() == [0, 1]


def test_most_ids_of_a_long_tail_come_once():
    data = zipf(10_000)
    assert (len(data.train), len(data.test)) == (8_000, 2_000)
    assert 0.4 < float(data.train.labels.mean()) < 0.6
    for index, ids in enumerate(ids_of(data).values()):
        values = torch.cat([rows.columns[index].values for rows in (data.train, data.test)])
        counts = values.unique(return_counts=True)[1]
        assert len(ids) == len(counts)
        assert float((counts == 1).float().mean()) > 0.7


def test_rows_that_come_in_order_are_predicted_before_they_are_trained():
    raw = planted(InOrder)
    config = dataclasses.replace(CONFIG, seed=3, batch_size=200)
    run = accuracy_dynamic.arms(config, raw)[REFERENCE](config)
    labels = raw.train.labels
    loss = torch.nn.functional.binary_cross_entropy_with_logits(run.logits, labels)
    assert run.losses == [pytest.approx(float(loss))]
    assert len(run.logits) == 200
