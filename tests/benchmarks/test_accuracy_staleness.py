"""The study of staleness, on data small enough for a test."""

from __future__ import annotations

import dataclasses
import queue
import random
import time

import pytest
import torch

from benchmarks.studies.staleness import (
    EXACT,
    LOOSE,
    Run,
    SlowTransport,
    adult,
    compare,
    draw,
    hot_ids,
    problems,
    summary,
    trained,
)
from tests.docs.sample_data import make_adult
from tritonemb.server.transport import LocalTransport

pytestmark = pytest.mark.more


def small(num_train: int = 480):
    study = hot_ids("sgd", 20.0, {"0": 0, "4": 4} | LOOSE, num_train, num_test=100, num_features=2, num_ids=30)
    return dataclasses.replace(study, config=dataclasses.replace(study.config, batch_size=16))


def test_every_arm_has_its_staleness_and_a_curve():
    rows = {row["staleness"]: row for row in compare(small(), range(1), delay=0.001)}
    assert list(rows) == ["0", "4", "at most 9", "unbounded"]
    assert rows["0"]["mean_staleness"] == rows["0"]["difference"] == rows["0"]["standard_error"] == 0
    assert rows["4"]["mean_staleness"] == pytest.approx((0 + 1 + 2 + 3 + 26 * 4) / 30)
    assert rows["at most 9"]["mean_staleness"] <= 9
    assert rows["unbounded"]["mean_staleness"] > 0
    assert rows["4"]["auc_of_each_seed"] != rows["0"]["auc_of_each_seed"]
    for row in rows.values():
        assert row["curve_steps"] == list(range(3, 31, 3))
        assert row["curve_seconds"] == sorted(row["curve_seconds"])
        assert (row["curve_auc"][-1], row["curve_seconds"][-1]) == (row["auc"], row["seconds"])
        assert row["best_auc"] > row["auc"]


def test_every_staleness_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curve = {"curve_steps": [5, 9], "curve_seconds": [1.0, 2.0], "curve_auc": [0.5, 0.6], "seeds": 3}
    draw(
        {"rows": [curve | {"data": data, "staleness": name} for data in "ab" for name in EXACT | LOOSE]},
        tmp_path / "picture.png",
    )
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_slow_network_costs_time_and_changes_no_bit():
    study = small(160)
    fast, slow = (trained(study, 2, 0, delay) for delay in (0.0, 0.01))
    assert [(step, auc) for step, _, auc in fast.curve] == [(step, auc) for step, _, auc in slow.curve]
    assert slow.seconds > 0.02
    assert trained(study, 0, 0, 0.01).auc != slow.auc


def test_messages_arrive_in_order_and_no_sooner():
    class Echo:
        def receive(self, message, reply):
            reply(message)

    answers: queue.SimpleQueue = queue.SimpleQueue()
    channel = SlowTransport(LocalTransport(Echo()), 0.02).open(answers.put, lambda error: None)
    sent = []
    for number in range(5):
        sent.append(time.monotonic())
        channel.send(({"number": number}, []))
    for number in range(5):
        assert answers.get(timeout=10)[0]["number"] == number
        assert time.monotonic() - sent[number] >= 0.04
    channel.close()


def test_adult_has_the_columns_of_persia(tmp_path):
    make_adult(tmp_path / "adult", random.Random(0))
    study = adult(tmp_path / "adult")
    assert (study.data.num_dense, len(study.data.features), study.num_steps) == (5, 8, 4)
    assert study.data.validation is study.data.test
    assert len(list(study.data.open("test", 16))) == 1
    model = study.model(0)
    assert [model.dense[0].in_features, model.sparse[0].in_features] == [5, 64]
    assert all(table.config.bound == 0.01 for table in model.embeddings.tables)
    run = trained(study, 1, 0, 0.0)
    assert run.curve[-1][0] == 4
    assert 0 < run.auc < 1
    assert torch.equal(model.top[0].weight, study.model(0).top[0].weight)


def test_differences_are_paired():
    runs = [Run([(5, 1.0, 0.5), (9, 2.0, auc)], 3.0) for auc in (0.6, 0.8, 0.71)]
    row = summary("4", runs, [0.5, 0.7, 0.6])
    assert row["difference"] == pytest.approx(0.31 / 3)
    assert row["standard_error"] == pytest.approx(0.01 / 3)  # deviation 0.01 / sqrt(3), over sqrt(3)
    assert (row["curve_steps"], row["curve_seconds"]) == ([5, 9], [1.0, 2.0])
    assert row["curve_auc"] == pytest.approx([0.5, 2.11 / 3])


def test_only_adult_has_a_goal():
    def rows(auc: float, difference: float, data: str = "adult"):
        return [
            {"data": data, "staleness": "0", "auc": auc, "difference": 0.0},
            {"data": data, "staleness": "9", "auc": auc + difference, "difference": difference},
        ]

    assert problems(rows(0.893, -0.0009)) == problems(rows(0.5, -0.1, "other")) == []
    assert len(problems(rows(0.892, 0.0011))) == 2
