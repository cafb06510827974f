"""Training gives the same bits wherever tables live, whatever the cache's size, policy and look-ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemb as te
from tests.helpers import CACHED, assert_same_bits, configurations, contents, fewer, output_of
from tests.nn.tiers import (
    ELSEWHERE,
    HostReads,
    directory_of,
    not_interpreted,
    outputs_of,
    same,
    seeded,
    stored,
    streams,
    train_ahead,
    varied_steps,
)
from tests.strategies import TABLE_DTYPES, random_batch, rows_of
from tritonemb.types import CacheConfig

pytestmark = pytest.mark.public
POOLED = [
    te.TableConfig("user", 500, 12, features=["u", "shared"]),
    te.TableConfig("genre", 70, 5, features=["shared", "g"], pooling="mean"),
    te.TableConfig("country", 3, 8),
]
UNPOOLED = [
    te.TableConfig("user", 500, 6, features=["u", "friend"], pooling="none"),
    te.TableConfig("genre", 70, 6, pooling="none"),
]
CACHES = [CacheConfig(rows=1), CacheConfig(rows=33, policy="lfu"), CacheConfig(rows=300)]


def check(configs, optimizer, pooled, placements, cache, depth, num_steps, weighted=False):
    """Outputs, tables and states against a twin on the device."""
    twin = seeded(configs, optimizer, pooled)
    tiered = seeded(configs, optimizer, pooled, placements, cache)
    assert_same_bits(contents(tiered), contents(twin), "before")
    steps = varied_steps(twin, num_steps, weighted=weighted)
    same(train_ahead(tiered, steps, depth), outputs_of(twin, steps))
    assert_same_bits(contents(tiered), contents(twin), "after")
    assert all(cache_statistic.read > 0 for cache_statistic in tiered.cache_statistics().values())


@pytest.mark.parametrize("dtype", fewer(TABLE_DTYPES, TABLE_DTYPES[:1]), ids=str)
@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
@pytest.mark.few(6)
def test_training_has_the_bits_of_tables_on_the_device(optimizer, dtype):
    """Placements, caches and look-ahead go around together, so that each meets many optimizers."""
    turn = configurations().index(optimizer) + TABLE_DTYPES.index(dtype)
    kinds = [(True, POOLED), (False, UNPOOLED)]
    for pooled, configs in fewer(kinds, kinds[turn % 2 :][:1]):
        placements = (("host",), ("disk",), (CACHED, "host", "device"))[turn % 3]
        cast = [replace(config, dtype=dtype) for config in configs]
        cache = CACHES[turn // 3 % 3]
        check(cast, optimizer, pooled, placements, cache, turn % 5, fewer(12, 4), weighted=turn % 2 == 0)
        turn += 1


@not_interpreted
@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("placement", [*ELSEWHERE, pytest.param(CACHED, marks=pytest.mark.slow)])
def test_no_look_ahead_shows_in_the_bits(placement, policy, depth):
    """Every batch shares most rows with those that are on their way while it is trained."""
    cache = CacheConfig(rows=1, policy=policy)
    check(POOLED, te.optim.Adam(lr=0.1), True, (placement,), cache, depth, fewer(12, 3))


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("placements", [("host",), ("disk",), (CACHED,), ("device", "disk", "host")], ids=str)
@pytest.mark.parametrize("optimizer", configurations(), ids=lambda optimizer: optimizer.name)
def test_long_training_has_the_bits_of_tables_on_the_device(optimizer, placements, cache):
    for pooled, configs in ((True, POOLED), (False, UNPOOLED)):
        for depth in (0, 3):
            check(configs, optimizer, pooled, placements, cache, depth, 200)


@not_interpreted
@pytest.mark.parametrize("rows", [1, 32, 33, 64, 499, 500])
@pytest.mark.parametrize("share", [False, True])
def test_every_size_of_cache(rows, share):
    cache = CacheConfig(share=rows / 500) if share else CacheConfig(rows=rows)
    check(POOLED, te.optim.RowWiseAdagrad(lr=0.1), True, (CACHED, "host", "disk"), cache, 2, fewer(8, 2))


@not_interpreted
@settings(max_examples=fewer(40, 3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@given(streams(), st.sampled_from((*ELSEWHERE, CACHED)), st.sampled_from(("lru", "lfu")), st.integers(0, 4))
def test_any_stream_of_ids(dtype, stream, placement, policy, depth):
    rows, ids = stream
    configs, adagrad = [te.TableConfig("t", 1000, 4, dtype=dtype, placement="host")], te.optim.Adagrad(lr=0.1)
    where = "host" if dtype == torch.int8 else "device"
    twin = seeded(configs, adagrad, True, (where,), CacheConfig(rows=1000))
    tiered = seeded(configs, adagrad, True, (placement,), CacheConfig(rows=rows, policy=policy))
    batches = [te.KeyedJaggedTensor.from_lists({"t": [[i] for i in step]}) for step in ids]
    steps = [(batch, torch.randn(batch.stride(), 4)) for batch in batches]
    same(train_ahead(tiered, steps, depth), outputs_of(twin, steps))
    assert_same_bits(contents(tiered), contents(twin))


def accumulated(collection, steps):
    """The overflow grows in the midst of it, and gradients of all micro-batches wait in slots."""
    for first in range(0, len(steps), 5):
        with collection.accumulate():
            yield from outputs_of(collection, steps[first : first + 5])


def two_forwards(collection, steps):
    """Their backwards come in the other order, with a step between them."""
    (a, grad_a), (b, grad_b), step, *_ = steps
    first, second = output_of(collection, a), output_of(collection, b)
    second.backward(grad_b)
    yield from outputs_of(collection, [step])
    first.backward(grad_a)


def another_rate(collection, steps):
    collection.set_learning_rate(0.01)
    outputs_of(collection, steps[:2])
    collection.fused_optimizer.param_groups[0]["lr"] = 0.5
    yield from outputs_of(collection, steps[2:])


def evaluated(collection, steps):
    """Rows that were only looked up are evicted and come back."""
    for step, (batch, _) in zip(steps, reversed(steps), strict=True):
        yield from outputs_of(collection, [step])
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                yield output_of(collection, batch)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    "calls",
    [accumulated, *(pytest.param(calls, marks=not_interpreted) for calls in (two_forwards, another_rate, evaluated))],
)
def test_any_calls_have_the_bits_of_tables_on_the_device(calls, pooled, placement):
    configs, optimizer = POOLED if pooled else UNPOOLED, te.optim.LAMB(lr=0.1)
    twin, tiered = seeded(configs, optimizer, pooled), seeded(configs, optimizer, pooled, (placement,))
    steps = varied_steps(twin, fewer(10, 5), sizes=(20,), weighted=True)
    same(list(calls(tiered, steps)), list(calls(twin, steps)))
    assert_same_bits(contents(tiered), contents(twin))
    assert tiered.cache_statistics()["user"].overflows > 0


@pytest.mark.parametrize(("placement", "waits"), [("host", 1), pytest.param("disk", 3, marks=not_interpreted)])
@pytest.mark.parametrize("number", [1, 8])
def test_a_batch_waits_once_however_many_tables_are_cached(number, placement, waits, monkeypatch):
    """For all counts of all tables at once; disks need the rows that are written, and read. A key is nobody's."""
    configs = [*(te.TableConfig(f"t{index}", 500, 4) for index in range(number)), te.TableConfig("small", 9, 4)]
    tiered = seeded(configs, te.optim.SGD(lr=0.1), True, (*[placement] * number, "device"), CacheConfig(rows=64))
    keys = ["unused", *(config.name for config in configs)]
    for seed in range(6):
        initial = tiered.cache_statistics()
        batch = random_batch(rows_of(configs), keys, 16, 5, seed=seed)
        with HostReads(monkeypatch) as reads:
            out = output_of(tiered, batch)
        out.sum().backward()
    assert reads.found == ["tolist"] + ["cpu"] * (waits - 1)
    for name, final in tiered.cache_statistics().items():
        assert final.hits > initial[name].hits
        assert final.written > initial[name].written
        assert final.overflows == 0


def test_a_batch_waits_once_more_after_sets_have_overflowed(monkeypatch):
    tiered = seeded(POOLED[:1], te.optim.SGD(lr=0.1), True, ("host",))
    for rows in (range(100), range(30), range(90, 110)):
        batch = te.KeyedJaggedTensor.from_lists({"u": [[*rows]], "shared": [[]]})
        with HostReads(monkeypatch) as reads:
            out = output_of(tiered, batch)
        out.sum().backward()
    assert tiered.cache_statistics()["user"].overflows > 0
    assert reads.found == ["tolist"] * 2


@pytest.mark.parametrize("bounds_check", ["raise", "ignore"])
@pytest.mark.parametrize(
    "placements", [("host",), *(pytest.param(p, marks=not_interpreted) for p in (("device", "host"), (CACHED,)))]
)
def test_a_cache_that_cannot_read_counts_ahead_does_as_one_that_can(placements, bounds_check, monkeypatch):
    """On the CPU the number of rows is read at once; on a GPU a batch has as many rows as ids. Slots are the same."""
    options = {"bounds_check": bounds_check, "cache": CacheConfig(rows=1, policy="lfu")}
    tiered, twin = (seeded(POOLED, te.optim.Adam(), True, placements, **options) for _ in range(2))
    for step, (batch, grad) in enumerate(varied_steps(twin, fewer(12, 6), (60, 1, 0, 30), True)):
        if bounds_check == "ignore" and batch.values().numel() > 2:
            batch.values()[:: 1 if step % 4 == 1 else 3] -= 1000
        expected = output_of(twin, batch)
        with monkeypatch.context() as patch:
            patch.setattr("tritonemb.jagged.is_host_readable", lambda _: False)
            out = output_of(tiered, batch)
        assert torch.equal(out, expected)
        out.backward(grad)
        expected.backward(grad)
        assert_same_bits(directory_of(tiered), directory_of(twin), f"step {step}")
        assert tiered.cache_statistics() == twin.cache_statistics()
    assert any(
        cache_statistic.overflows and cache_statistic.evictions
        for cache_statistic in tiered.cache_statistics().values()
    )
    assert_same_bits(contents(tiered), contents(twin))


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("placements", [("host", "device"), pytest.param(("disk",), marks=not_interpreted)])
def test_an_id_out_of_range_changes_nothing(placements, readable, monkeypatch):
    """No slot, pin, use, flag, count or row, although its check comes back with the counts if nothing can be read."""
    tiered = seeded(POOLED, te.optim.Adam(), True, placements, CacheConfig(rows=1))
    batch, _ = varied_steps(tiered, 1, (30,))[0]
    output_of(tiered, batch).sum().backward()
    tiered.cache.write_back()  # and unpins what that batch has released
    ahead = tiered.group(batch)
    rows, initial, counts = stored(tiered), directory_of(tiered), tiered.cache_statistics()
    assert initial["pins"].any()
    ids = {"u": [[3], [450]], "unused": [[-9], []], "shared": [[], [1, 69]], "g": [[], []], "country": [[2], []]}
    with monkeypatch.context() as patch:
        if not readable:
            patch.setattr("tritonemb.jagged.is_host_readable", lambda _: False)
        for key, bad in (("u", 500), ("country", -1), ("shared", 70), ("g", 2**40)):
            wrong = te.KeyedJaggedTensor.from_lists({**ids, key: [[bad], [0, bad]]})
            for use in (output_of, type(tiered).group, te.nn.prefetch)[: fewer(3, 1)]:
                with pytest.raises(ValueError, match=rf"out of range.*{key}|{key}.*out of range"):
                    use(tiered, wrong)
    assert tiered.cache_statistics() == counts
    assert_same_bits(directory_of(tiered), initial)
    assert_same_bits(stored(tiered), rows)
    output_of(tiered, te.KeyedJaggedTensor.from_lists(ids)).sum().backward()
    assert torch.equal(tiered(batch, ahead), output_of(tiered, batch))
