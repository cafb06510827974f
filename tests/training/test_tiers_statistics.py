"""Cache statistics under a trainer: equal to a simulation's in every run, independent of the timing of threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("psutil")

import tritonemb as te
from tests.helpers import CACHED, living
from tests.nn.simulated_cache import Simulated
from tests.training import jobs
from tritonemb.tables.cache import RowCache
from tritonemb.tables.cache_storage import CacheStatistics
from tritonemb.training import step as step_module
from tritonemb.training.train_state import caches_of
from tritonemb.types import CacheConfig

TABLE, ROWS, BATCH = "user", 64, 40
TRAIN, EVALUATE, WRITE_BACK = "train", "evaluate", "write back"
BATCHES = 25  # of an epoch
Event = tuple[str, Sequence[int], int]  # ids that were looked up; steps done, where that is not a matter of time


class Sleepy(te.training.Callback):
    """Sleeps now and then, and keeps what logs say of caches."""

    def __init__(self, seed: int) -> None:
        self.random, self.caches, self.steps = Random(seed), [], 0

    def pause(self) -> None:
        if self.random.random() < 0.5:
            time.sleep(0.01 * self.random.random())

    def on_step(self, step: Any) -> None:
        self.steps = step.step
        self.pause()

    def on_log(self, log: Any) -> None:
        self.caches.append({name: value for name, value in log.cache.items() if name != "stall"})


def run(monkeypatch, seed: int, placement: str, **options: Any) -> tuple[CacheStatistics, list[Any], list[Event]]:
    """Train; what was counted at the end, what logs said, and what was asked of the cache."""
    torch.manual_seed(0)
    validation = "evaluate_every" in options
    data, sleepy, other, events = jobs.planted(validation=validation), Sleepy(seed), Sleepy(-seed - 1), []
    cache = CacheConfig(rows=ROWS)
    tables = [living(table, placement, cache) if table.name == TABLE else table for table in data.tables(4)]
    optimizer = te.optim.RowWiseAdagrad(lr=0.05)
    model = te.nn.DLRM(tables, data.num_dense, bottom_mlp=(4,), top_mlp=(4,), optimizer=optimizer)
    write_back = RowCache.write_back

    def prefetch(model, features):
        other.pause()
        ids, training = features[TABLE].values().tolist(), torch.is_grad_enabled()
        events.append((TRAIN, ids, 0) if training else (EVALUATE, ids, sleepy.steps))
        return te.nn.prefetch(model, features)

    def wrote_back(cache):
        events.append((WRITE_BACK, (), sleepy.steps))
        write_back(cache)

    settings = {"batch_size": BATCH, "epochs": 2, "log_every": 5, "verbose": False} | options
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "prefetch", prefetch)
        patch.setattr(RowCache, "write_back", wrote_back)
        te.Trainer(model, data, callbacks=[sleepy], **settings).fit()
    return model.embeddings.cache_statistics()[TABLE], sleepy.caches, events


def simulated(events: Sequence[Event], depth: int, accumulate: int, host_rows: int | None) -> CacheStatistics:
    """Pinned rows depend on the number of steps, not on the time of requests."""
    cache, interval = Simulated(ROWS, "lru", 4 * 4 + 4, host_rows), -(-BATCHES // accumulate)
    of_step: list[list[int]] = []  # numbers of batches
    evaluated: list[int] = []
    in_epoch, number, initial = BATCHES, 0, 0
    for kind, ids, done in events:
        number += kind != WRITE_BACK
        if kind == TRAIN:
            if in_epoch == BATCHES or in_epoch % accumulate == 0:
                of_step.append([])
                in_epoch %= BATCHES
            in_epoch += 1
            step = len(of_step) - 1
            pinned = [n for numbers in of_step[max(step // interval * interval, step - depth) :] for n in numbers]
            cache.batch(ids, True, pinned)
            of_step[-1].append(number)
            continue
        if done != initial:
            initial, evaluated = done, []
        pinned = [n for numbers in of_step[done:] for n in numbers]  # one that is next, and `depth` behind it
        if kind == EVALUATE:
            cache.batch(ids, False, pinned + evaluated[len(evaluated) - min(depth, len(evaluated)) :])
            evaluated.append(number)
        else:
            cache.write_back(pinned)
            if cache.host is not None:
                cache.host.write_back()  # a checkpoint has them in the file
    return cache.statistics


@pytest.mark.parametrize("placement", [pytest.param("host", marks=pytest.mark.slow), "disk", CACHED])
@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (0, {}),
        (2, {}),
        (4, {}),
        (1, {"evaluate_every": 5}),
        (3, {"evaluate_every": 8}),
        (2, {"checkpoint_steps": 7}),
        (2, {"accumulate": 3, "max_steps": 5}),
    ],
    ids=str,
)
@pytest.mark.few(2)
def test_the_counts_of_a_given_prefetch_depth(monkeypatch, tmp_path, depth, options, placement):
    """With evaluations and checkpoints in between, and an end at which steps that were made ahead are left over."""
    runs, accumulate = [], options.get("accumulate", 1)
    for seed in range(2):
        run_options = dict(options)
        if "checkpoint_steps" in run_options:
            run_options["folder"] = tmp_path / str(seed)
            run_options["checkpoints"] = te.training.CheckpointOptions(
                checkpoint_steps=run_options.pop("checkpoint_steps")
            )
        runs.append(run(monkeypatch, seed, placement, prefetch_depth=depth, **run_options))
    statistics, logs, events = runs[0]
    assert runs[1] == runs[0]
    assert statistics == simulated(events, depth, accumulate, 64 if placement == CACHED else None)
    assert placement != CACHED or min(statistics.host_hits, statistics.disk_read, statistics.disk_written) > 0
    assert statistics.evictions > 100
    num_steps = 3 * (5 + 1 + depth) if "max_steps" in options else 2 * BATCHES
    assert sum(kind == TRAIN for kind, *_ in events) == num_steps
    if not options:
        assert sum(5 * log["rows"] for log in logs) == pytest.approx(statistics.lookups)
        assert sum(5 * log["read"] for log in logs) == pytest.approx(statistics.read)
        for name in ("host_hits", "disk_read", "disk_written") if placement == CACHED else ():
            assert 0 < sum(5 * log[name] for log in logs) <= getattr(statistics, name), name


def sharded(rank: int, seed: int, depth: int) -> tuple[int, list[CacheStatistics]]:
    """Train a few steps on several ranks: how many batches this rank sent, and what was counted of its shards."""
    data, sleepy, other, sends = jobs.planted(validation=False), Sleepy(2 * seed + rank), Sleepy(-seed - rank), []
    torch.manual_seed(0)
    kinds, cache = te.sharding, CacheConfig(rows=32)
    tables = [
        replace(table, placement="host", cache=cache) for table in data.tables(4) if table.name in (TABLE, "item")
    ]
    # With two ranks one of them has no shard of the items, and with it fewer caches.
    plan = kinds.ShardingPlan({TABLE: kinds.RowWise(), "item": kinds.TableWise(0)}, dist.get_world_size())
    model = te.nn.DLRM(tables, data.num_dense, bottom_mlp=(4,), top_mlp=(4,), optimizer=te.optim.SGD(lr=0.05))
    parallel = te.HybridParallel(model, plan)
    send = parallel.prefetch

    def sleepily(features, *args):
        other.pause()
        sends.append(features.stride())
        return send(features, *args)

    parallel.prefetch = sleepily
    te.Trainer(
        parallel, data, callbacks=[sleepy], batch_size=BATCH, max_steps=6, prefetch_depth=depth, verbose=False
    ).fit()
    return len(sends), [actual for cache in caches_of(parallel) for actual in cache.statistics().values()]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.more
def test_a_given_prefetch_depth_on_several_ranks(ranks, world):
    for depth in (0, 3):
        actual = [ranks(world).run(sharded, seed, depth) for seed in range(2)]
        assert actual[0] == actual[1]
        assert [sends for sends, _ in actual[0]] == [6 + 1 + depth] * world
        assert all(interval.evictions > 0 for _, counts in actual[0] for interval in counts)
