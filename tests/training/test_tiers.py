"""Training on tables that live in host memory or on disk: the bits of the device, and what is said of it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits, living
from tests.training import jobs
from tests.training.callbacks.test_tensorboard import scalars
from tritonemb.data.protocol import Prefetcher
from tritonemb.training.callbacks.console import format_bytes
from tritonemb.training.callbacks.report import HtmlReport
from tritonemb.training.callbacks.trackers import TensorBoard
from tritonemb.training.loop import MANY_STALLS, MAX_WIDENED, CacheMeter, Clock
from tritonemb.types import CacheConfig, TableOptions


def make_trainer(
    placement: str, cache_rows: int = 40, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[te.Trainer, jobs.Record]:
    torch.manual_seed(0)
    data, record = jobs.planted(500), jobs.Record()
    cache = CacheConfig(rows=cache_rows)
    tables = [replace(living(table, placement, cache), dtype=dtype) for table in data.tables(8)]
    optimizer = te.optim.RowWiseAdagrad(lr=0.05)
    model = te.nn.DLRM(tables, data.num_dense, bottom_mlp=(8,), top_mlp=(8,), optimizer=optimizer)
    settings = {"batch_size": 100, "epochs": 2, "log_every": 5, "evaluate_every": 5, "verbose": False} | options
    return te.Trainer(model, data, callbacks=[record, *settings.pop("callbacks", [])], **settings), record


def trained(placement: str, cache_rows: int = 40, **options: Any) -> tuple[te.Trainer, jobs.Record, Any]:
    trainer, record = make_trainer(placement, cache_rows, **options)
    return trainer, record, trainer.fit(test=True)


HOST = {"host_hits", "disk_read", "disk_written"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline": False},
        {"prefetch_depth": 0},
        {"prefetch_depth": 4, "cache_rows": 1},
        {"accumulate": 3},
        {"precision": "fp16"},
        {"patience": 1, "table_schedule": te.training.Schedule(warmup_steps=4)},
    ],
    ids=str,
)
@pytest.mark.parametrize("placement", ["host", "disk", CACHED])
@pytest.mark.few(4)
def test_training_gives_the_bits_of_the_device(placement, options):
    reference, expected, its_result = trained("device", **{k: v for k, v in options.items() if k != "cache_rows"})
    trainer, record, result = trained(placement, **options)
    assert_same_bits(dict(trainer.model.state_dict()), dict(reference.model.state_dict()))
    assert (record.losses, record.evaluations) == (expected.losses, expected.evaluations)
    assert (result.losses, result.steps, result.test.auc) == (its_result.losses, its_result.steps, its_result.test.auc)
    assert all(not cache for cache in expected.caches)
    for cache in record.caches:
        assert cache.keys() == {"rows", "hit_rate", "read", "written", "stall"} | (
            HOST if placement == CACHED else set()
        )
        assert cache["rows"] > 0
        assert 0 <= cache["hit_rate"] <= 1


@pytest.mark.parametrize(("saved", "loaded"), [("host", "disk"), ("disk", "host"), ("disk", "disk")])
@pytest.mark.few(2)
def test_an_int8_run_resumes_with_its_bits_on_another_tier(tmp_path, saved, loaded):
    undisturbed, expected, _ = trained("host", cache_rows=1, dtype=torch.int8, evaluate_every=None)
    common = {"dtype": torch.int8, "folder": tmp_path / "run"}
    every = te.training.CheckpointOptions(checkpoint_steps=2)
    trainer, _ = make_trainer(saved, checkpoints=every, callbacks=[jobs.CrashAt(5)], **common)
    with suppress(jobs.Crash):
        trainer.fit()
    assert trainer.progress.step == 5
    trainer, record = make_trainer(loaded, cache_rows=300, prefetch_depth=3, **common)
    assert trainer.resume().name == "step-4"
    trainer.fit()
    assert_same_bits(dict(trainer.model.state_dict()), dict(undisturbed.model.state_dict()))
    assert record.losses == expected.losses[-len(record.losses) :]


@pytest.mark.parametrize("placement", ["host", CACHED])
def test_the_report_and_the_log_have_what_was_brought(tmp_path, placement):
    _, record, _ = trained(placement, folder=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [event["cache"] for event in events if event["event"] == "log"] == record.caches
    HtmlReport(tmp_path / "run" / "report.html", tmp_path / "run" / "log.jsonl")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Cached tables" in page
    assert f"{record.caches[-1]['rows']:,.0f}" in page
    assert ("rows found in host memory" in page) == (placement == CACHED)
    if placement == CACHED:
        assert f"{record.caches[-1]['host_hits']:,.0f}" in page
        assert format_bytes(round(record.caches[-1]["disk_written"])) in page


def test_tensorboard_has_what_was_brought(tmp_path):
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path)
    _, record, _ = trained(CACHED, callbacks=[board])
    read = scalars(tmp_path)
    for name in ("rows", "hit_rate", "read", "written", "stall", *HOST):
        actual = [value for _, value in read[f"cache/{name}"]]
        assert actual == pytest.approx([cache[name] for cache in record.caches], rel=1e-6)  # of float32


def test_more_is_made_ahead_when_asked_for():
    produced = []

    def numbers():
        for number in range(10):
            produced.append(number)
            yield number

    with Prefetcher(numbers(), 1, "numbers") as ahead:
        ahead.settle()
        assert produced == [0]
        ahead.widen()
        ahead.settle()
        assert produced == [0, 1]
        assert next(ahead) == 0
        ahead.settle()
        assert produced == [0, 1, 2]
        assert list(ahead) == list(range(1, 10))


def test_waiting_for_rows_asks_for_more_ahead():
    torch.manual_seed(0)
    table = te.TableConfig("t", 100, 4, placement="host")
    meter = CacheMeter(te.nn.EmbeddingBagCollection([table], te.optim.SGD(lr=0.1)))
    requests = 0
    for step in range(1000):
        meter.stall += 0.5
        requests += meter.wants_deeper_prefetch()
        if requests == 1:
            assert step == MANY_STALLS - 1 or step >= MANY_STALLS
    assert requests == MAX_WIDENED
    assert meter.lap(1000)["stall"] == pytest.approx(0.5)
    assert meter.lap(1)["stall"] == 0.0


def test_waits_are_counted_by_stage(monkeypatch):
    now, cpu, reading = [0.0], [0.0], [5.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.process_time", lambda: cpu[0])
    monkeypatch.setattr("tritonemb.training.loop.reader_seconds", lambda: reading[0])
    clock = Clock()
    clock.step(1, 1)
    # A wait from 10 to 11, for a step that was read until 10.2, agreed upon at 10.3, and whose rows had come at 10.8.
    assert clock.wait(10.0, 11.0, (9.0, 10.2, 10.3, 10.8)) == pytest.approx(0.5)
    assert clock.wait(11.0, 11.5, (8.0, 8.5, 9.0, 9.5)) == clock.wait(11.5, 12.0, ()) == 0.0
    clock.step(30, 90)
    now[0], cpu[0], reading[0] = 4.0, 8.0, 7.0
    with clock.pause():  # neither time nor CPU time of an evaluation counts
        now[0], cpu[0], reading[0] = 9.0, 18.0, 15.0
    assert clock.lap() == {
        "samples_per_second": 7.5, "ids_per_second": 22.5, "data_wait": 0.5,
        "waits": pytest.approx({"data": 0.05, "ranks": 0.025, "rows": 0.125}), "cpu": {"reader": 0.25, "step": 0.75},
    }  # fmt: skip


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="prefetch_depth must not be negative, got -1"):
        trained("host", prefetch_depth=-1)
    with pytest.raises(ValueError, match="cache_host_rows is for tables on disk, but placement is 'host'"):
        TableOptions(placement="host", cache_host_rows=5)
    with pytest.raises(ValueError, match="placed_dtype int8 is for tables in host memory or on disk"):
        TableOptions(placed_dtype="int8")
    small, large = TableOptions(placement="host", placed_rows=9, placed_dtype="int8").place(
        [te.TableConfig("small", 8, 2), te.TableConfig("large", 9, 2)]
    )
    assert (small.dtype, large.dtype, large.placement) == (torch.float32, torch.int8, "host")
    (table,) = TableOptions(placement="disk", placed_rows=0, cache_host_rows=5).place([te.TableConfig("t", 9, 2)])
    assert table.cache == CacheConfig(host_rows=5)
