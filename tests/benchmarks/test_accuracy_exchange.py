"""Comparing precisions of exchanges, on data and ranks few enough for a test."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tritonemb as te
from benchmarks.studies.exchange import TOLERANCES, compare, even, name_of, plan_of
from tritonemb.data import Column, Dataset, Feature, Rows
from tritonemb.sharding import ColumnWise, RowWise, TableWise
from tritonemb.training.config import preset

pytestmark = pytest.mark.more


def planted(num_rows: int) -> Dataset:
    """A label that depends on the ids of three features, wrong in one row of ten."""
    generator = torch.Generator().manual_seed(0)
    sizes = (40, 30, 20)
    ids = [torch.randint(0, size, (num_rows,), generator=generator) for size in sizes]
    labels = (sum(column % 2 for column in ids) > 1) ^ (torch.rand(num_rows, generator=generator) < 0.1)
    rows = Rows(torch.randn(num_rows, 2, generator=generator), tuple(map(Column, ids)), labels.float())
    features = tuple(Feature(f"f{size}", size) for size in sizes)
    return Dataset("planted", features, train=rows.slice(0, num_rows // 2), test=rows.slice(num_rows // 2, num_rows))


@pytest.mark.slow
def test_every_precision_learns_and_sends_what_its_codec_says() -> None:
    config = dataclasses.replace(preset("synthetic"), epochs=2, batch_size=64)
    rows = {row["exchange"]: row for row in compare(config, planted(3003), seeds=range(1), world=2)}
    assert list(rows) == ["fp32", *map(name_of, TOLERANCES)]
    assert rows["fp32"]["auc"] > 0.85
    assert rows["fp32"]["difference"] == 0
    for row in rows.values():
        assert abs(row["difference"]) < 0.01, row  # one seed and few rows
        assert row["within_tolerance"] == (abs(row["difference"]) <= row["tolerance"])
        assert row["saturated"] == 0
        assert row["steps"] == 2 * -(-750 // 32)
    # Tables of 16 columns, one by rows, one by columns, one whole on rank 0: what that sends of the other's samples.
    columns = {"pooled": 16 + 8 + 16, "pooled gradients": 16 + 8 + 0}
    samples = 750 * 2 / rows["fp32"]["steps"]
    for name, num_bytes in {"fp32": 4, "fp16 / bf16": 2, "fp8_e4m3 / fp8_e5m2": 1}.items():
        sent = {kind: num_bytes * number * samples for kind, number in columns.items()}
        assert rows[name]["bytes_a_step"] == pytest.approx(sent), name


def test_tables_are_cut_in_three_ways_in_turn() -> None:
    tables = [te.TableConfig(f"t{rows}", rows, 16) for rows in (5, 9, 7, 8)]
    plan = plan_of(tables, 4)
    assert plan.tables == {"t9": RowWise(), "t8": ColumnWise((1, 2)), "t7": TableWise(2), "t5": RowWise()}


def test_ranks_have_as_many_rows() -> None:
    data = even(planted(203), 4)
    assert (len(data.train), len(data.test)) == (100, 100)
