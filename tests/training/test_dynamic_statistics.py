"""Statistics of dynamic tables in the log, the report and TensorBoard."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

pytest.importorskip("psutil")

import tritonemb as te
from tests.training import jobs
from tests.training.callbacks.test_tensorboard import scalars
from tritonemb.nn import DynamicStatistics, DynamicTable
from tritonemb.training.callbacks.report import HtmlReport
from tritonemb.training.callbacks.trackers import TensorBoard
from tritonemb.types import AdmissionConfig, EvictionConfig

EVERY, BATCH, LEVELS = 5, 50, ("rows", "capacity", "num_bytes")


def model_of(data: Any) -> te.nn.DLRM:
    """`user` has a row for every id, `item` for some, `site` for those that come a third time; others are static."""
    torch.manual_seed(0)
    dynamic = {
        "user": {"capacity": 2_000},
        "item": {"capacity": 200, "eviction": EvictionConfig(protect=1)},
        "site": {"capacity": 100, "admission": AdmissionConfig(appearances=3)},
    }
    tables = [
        replace(table, num_embeddings=None, **dynamic[table.name]) if table.name in dynamic else table
        for table in data.tables(8)
    ]
    return te.nn.DLRM(tables, data.num_dense, bottom_mlp=(8,), top_mlp=(8,), optimizer=te.optim.RowWiseAdagrad(lr=0.05))


def fitted(model: te.nn.DLRM, data: Any, *callbacks: Any, **options: Any) -> jobs.Record:
    results = jobs.Record()
    settings = {"batch_size": BATCH, "log_every": EVERY, "verbose": False} | options
    te.Trainer(model, data, callbacks=[results, *callbacks], **settings).fit(test=True)
    return results


def counted(data: Any, feature: str, known: set[int]) -> list[dict[str, float]]:
    """Expected statistics of every log for a table with capacity for all ids, of which it already has `known`."""
    logs: list[dict[str, float]] = []
    for number, batch in enumerate(data.open("train", BATCH, seed=0, epoch=0, shuffle=True)):
        if number % EVERY == 0:
            logs.append(dict.fromkeys(asdict(DynamicStatistics()), 0.0))
        ids = batch.sparse[feature].values().tolist()
        logs[-1]["lookups"] += len(ids) / EVERY
        logs[-1]["hits"] += sum(id in known for id in ids) / EVERY
        logs[-1]["inserts"] += len({*ids} - known) / EVERY
        known.update(ids)
        sets = -(-len(known) // 14)
        logs[-1] |= {"rows": len(known), "capacity": 2_000, "num_bytes": len(known) * (9 * 4 + 16) + sets * 164}
    return logs


def test_logs_have_the_means_of_a_step_since_the_log_before():
    data = jobs.planted()
    model, known = model_of(data), set[int]()
    for _ in range(2):  # of the second fit, what the first one counted is no part
        results = fitted(model, data)
        expected = counted(data, "user", known)
        assert len(results.dynamic) == len(expected) == 1_000 // BATCH // EVERY
        for actual, required in zip(results.dynamic, expected, strict=True):
            assert actual.keys() == {"user", "item", "site"}
            assert actual["user"] == pytest.approx(required)
    assert expected[0]["hits"] == expected[0]["lookups"]


def test_logs_add_up_to_what_the_tables_counted():
    """Evaluations count nothing; evictions and refusals among them."""
    data = jobs.planted()
    model = model_of(data)
    results = fitted(model, data, epochs=2, evaluate_every=3)
    for name in ("user", "item", "site"):
        table = model.embeddings[name]
        assert isinstance(table, DynamicTable)
        statistics = asdict(table.statistics())
        for field, number in statistics.items():
            values = [actual[name][field] for actual in results.dynamic]
            assert (values[-1] if field in LEVELS else sum(values) * EVERY) == pytest.approx(number), (name, field)
        assert (statistics["evictions"] > 0) == (name == "item")
        assert (statistics["refused"] > 0) == (name == "site")


def test_models_without_dynamic_tables_say_nothing(tmp_path):
    data = jobs.planted()
    model = te.nn.DLRM(data.tables(8), data.num_dense, optimizer=te.optim.SGD(lr=0.1))
    assert fitted(model, data, folder=tmp_path / "run").dynamic == [{}] * 4
    assert "Dynamic tables" not in (tmp_path / "run" / "report.html").read_text()


def test_the_log_and_the_report_have_them(tmp_path):
    data, path = jobs.planted(), tmp_path / "run" / "log.jsonl"
    results = fitted(model_of(data), data, folder=tmp_path / "run")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["dynamic"] for event in events if event["event"] == "log"] == results.dynamic
    HtmlReport(tmp_path / "report.html", path).on_end(None)
    page = " ".join((tmp_path / "report.html").read_text().split())
    assert "Dynamic tables" in page
    for name, of in results.dynamic[-1].items():
        numbers = (f"{of['rows']:,}", f"{of['capacity']:,}", f"{of['lookups']:,.0f}")
        shares = (
            f"{100 * of['hits'] / of['lookups']:.1f} %",
            *(f"{of[w]:.1f}" for w in ("inserts", "refused", "evictions")),
        )
        row = page.split(f"<td>{name}</td>")[1].split("</tr>")[0]
        cells = [cell.split("</td>")[0] for cell in row.split('<td class="number">')[1:]]
        assert cells == [*numbers, *shares]


def test_tensorboard_has_them(tmp_path):
    pytest.importorskip("tensorboard")
    data = jobs.planted()
    results = fitted(model_of(data), data, TensorBoard(tmp_path))
    read = scalars(tmp_path)
    for table, last in results.dynamic[-1].items():
        for name in last:
            actual = [value for _, value in read[f"dynamic/{table}/{name}"]]
            assert actual == pytest.approx([log[table][name] for log in results.dynamic], rel=1e-6)  # of float32
