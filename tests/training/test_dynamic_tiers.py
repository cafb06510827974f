"""Dynamic tables in host memory and on disk are trained ahead, and saved as if nothing were."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import assert_same_bits
from tests.training import disk_job, jobs
from tritonemb.tables.table_set import TableSet
from tritonemb.training import Interrupted
from tritonemb.training.config import CheckpointOptions

OFTEN = CheckpointOptions(checkpoint_minutes=1e-9)
INCREMENTAL = CheckpointOptions(checkpoint_steps=6, checkpoint_incremental=True, keep=9)
EVERY = CheckpointOptions(checkpoint_steps=6)
CACHE = {"host": te.CacheConfig(rows=64), "disk": te.CacheConfig(rows=64, host_rows=96)}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "often": {"checkpoints": OFTEN},
    "every": {"checkpoints": EVERY, "prefetch_depth": 1},
    "accumulate": {"accumulate": 2},
}


def trainer_of(
    tier: str, folder: Path | None = None, *callbacks: Any, users: int = 2_000, sites: int = 100, **options: Any
) -> te.Trainer:
    data = jobs.planted()
    torch.manual_seed(0)
    dynamic: dict[str, Any] = {
        "user": {"capacity": users, "eviction": te.EvictionConfig(ttl=12)},
        "item": {"capacity": 160, "eviction": te.EvictionConfig("lfu", protect=2, half_life=5)},
        "site": {"capacity": sites, "admission": te.AdmissionConfig(appearances=3), "fallback_rows": 10},
    }
    placed = {} if tier == "device" else {"placement": tier, "cache": CACHE[tier]}
    tables = [
        replace(table, num_embeddings=None, **dynamic[table.name], **placed) if table.name in dynamic else table
        for table in data.tables(8)
    ]
    model = te.nn.DLRM(
        tables, data.num_dense, bottom_mlp=(8,), top_mlp=(8,), optimizer=te.optim.RowWiseAdagrad(lr=0.05)
    )
    settings = {"batch_size": 50, "epochs": 2, "log_every": 4, "verbose": False, "evaluate_every": 7} | options
    if torch.distributed.is_initialized():
        model = te.HybridParallel(model, exchange=te.sharding.ExchangePrecision("fp32", "fp32"))
    return te.Trainer(model, data, folder=folder, callbacks=list(callbacks), **settings)


@functools.cache
def on_device(**options: Any) -> tuple[jobs.Record, dict[str, Tensor]]:
    return trained("device", **options)


def trained(tier: str, folder: Path | None = None, **options: Any) -> tuple[jobs.Record, dict[str, Tensor]]:
    record = jobs.Record()
    trainer = trainer_of(tier, folder, record, **options)
    trainer.fit()
    table = trainer.model.embeddings["item"]
    assert isinstance(table, te.nn.DynamicTable)
    assert table.statistics().evictions > 0
    return record, trainer.model.state_dict()


@pytest.mark.parametrize(
    ("tier", "options"),
    [
        pytest.param("disk", OPTIONS["every"], id="disk-every"),
        pytest.param("disk", OPTIONS["plain"], id="disk-plain", marks=pytest.mark.more),
        *(pytest.param("host", OPTIONS[n], id=f"host-{n}", marks=pytest.mark.more) for n in ("often", "accumulate")),
        *(pytest.param("disk", OPTIONS[n], id=f"disk-{n}", marks=pytest.mark.slow) for n in ("often", "accumulate")),
        *(pytest.param("host", OPTIONS[n], id=f"host-{n}", marks=pytest.mark.slow) for n in ("plain", "every")),
    ],
)
def test_losses_metrics_and_rows_are_those_of_tables_on_the_device(tier, options, tmp_path):
    expected, rows = on_device(accumulate=options.get("accumulate", 1))
    actual, same_rows = trained(tier, tmp_path / "run", **options)
    assert_same_bits(same_rows, rows)
    assert actual.losses == expected.losses
    assert actual.evaluations == expected.evaluations
    if (checkpoints := options.get("checkpoints")) is OFTEN:  # each waits for steps that have been prefetched
        assert len(actual.saved) > 10
    elif checkpoints is EVERY:
        assert set(range(6, 41, 6)) <= set(actual.saved)


def on_rank(rank: int, tier: str, folder: Path, signalled: int | None, options: dict[str, Any]) -> tuple[Any, ...]:
    """Losses and whole state; batches whose rows of dynamic tables a thread has prefetched; resumed after a signal."""
    record, prefetched, look_up = jobs.Record(), Counter[str](), TableSet.group

    def group(tables: TableSet, *args: Any) -> Any:
        if tables.dynamic and tables.cache is not None and torch.is_grad_enabled():
            prefetched[threading.current_thread().name] += 1
        return look_up(tables, *args)

    with mock.patch.object(TableSet, "group", group):
        callbacks = [record, jobs.SignalAt(11)] if rank == signalled else [record]
        trainer = trainer_of(tier, folder, *callbacks, batch_size=25, **options)
        if signalled is None:
            trainer.fit()
        else:
            with pytest.raises(Interrupted):
                trainer.fit()
            trainer = trainer_of(tier, folder, record, batch_size=25, **options)
            assert trainer.resume() is not None
            trainer.fit()
    state = {name: jobs.whole(tensor) for name, tensor in trainer.model.state_dict().items()}
    return record.losses, record.evaluations, state, prefetched["tritonemb-pipeline"]


@pytest.mark.parametrize(
    ("tier", "options", "signalled"),
    [
        ("disk", {}, 1),
        pytest.param("host", {"checkpoints": OFTEN}, None, marks=pytest.mark.more),
        pytest.param("disk", {"checkpoints": EVERY, "accumulate": 2}, None, marks=pytest.mark.more),
        pytest.param("host", {"prefetch_depth": 1}, 0, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_ranks_prefetch_rows_of_dynamic_tables(ranks, tmp_path, tier, options, signalled):
    plain = {name: value for name, value in options.items() if name == "accumulate"}
    expected = ranks(2).run(on_rank, "device", tmp_path / "device", None, plain)
    actual = ranks(2).run(on_rank, tier, tmp_path / tier, signalled, options)
    for (losses, evaluations, state, num_prefetched), (*peers, same_state, none) in zip(actual, expected, strict=True):
        assert none == 0
        assert num_prefetched > (0 if "checkpoints" in options else 10)  # few before a checkpoint of every step
        assert_same_bits(state, same_state)
        assert signalled is not None or [losses, evaluations] == peers


@pytest.mark.more
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("device", "disk"),
        ("disk", "host"),
        ("disk", "larger"),
        *(pytest.param("device", final, marks=pytest.mark.slow) for final in ("device", "host", "larger")),
        *(pytest.param("disk", final, marks=pytest.mark.slow) for final in ("device", "disk")),
    ],
)
def test_a_checkpoint_goes_on_on_another_tier(before, after, tmp_path):
    """Files of tables on disk, including changes, are loaded with another placement or capacity."""
    _, rows = on_device()
    checkpoints = replace(INCREMENTAL, checkpoint_steps=9)  # more changes would exceed such small tables
    folder = tmp_path / "run"
    trainer_of(before, folder, epochs=1, checkpoints=checkpoints).fit()
    (checkpoint,) = folder.glob("checkpoints/step-18")
    assert (before == "disk") == any("changes" in path.name for path in checkpoint.iterdir())
    tier, users = ("disk", 3_000) if after == "larger" else (after, 2_000)
    resumed = trainer_of(tier, tmp_path / "other", users=users, checkpoints=checkpoints)
    resumed.resume(checkpoint)
    if after == "larger":  # with occurrences of ids without rows, too
        larger = trainer_of(tier, tmp_path / "larger", sites=500, checkpoints=checkpoints)
        larger.resume(checkpoint)
        ids, sketch = torch.arange(2_000), resumed.model.embeddings["site"].index.sketch
        counts = larger.model.embeddings["site"].index.sketch.counts(ids)
        assert (counts >= sketch.counts(ids)).all()
        assert 0 < counts.sum() <= 2 * sketch.counts(ids).sum()
    resumed.fit()
    actual = resumed.model.state_dict()
    assert_same_bits(actual, rows)


@pytest.mark.more
def test_ranks_resume_tables_on_disk(ranks, tmp_path):
    """A run resumed from incremental checkpoints is bitwise identical to an uninterrupted one."""
    options = "rows", 2, INCREMENTAL
    full = ranks(2).run(disk_job.sharded, tmp_path / "whole" / "run", "dynamic", *options)
    ranks(2).run(disk_job.sharded, tmp_path / "first" / "run", "dynamic", "rows", 1, INCREMENTAL)
    again = ranks(2).run(disk_job.sharded, tmp_path / "first" / "run", "dynamic", *options, True)
    for actual, expected in zip(again, full, strict=True):
        assert_same_bits(actual, expected)
    single = disk_job.sharded(0, tmp_path / "first" / "run", "dynamic", "", 2, INCREMENTAL, True, True)
    ids = full[0]["embeddings.user.ids"]
    assert torch.equal(single["embeddings.user.ids"], ids.sort().values)
