"""The GPU's benchmark of training from host memory and disk, as far as it can be tried without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonemb as te
from benchmarks import run as gpu_run
from benchmarks.gpu import tiers
from benchmarks.gpu.tiers import NONE_AHEAD, ON_DEVICE, Feed, Prefetched, SentAhead, Tier
from benchmarks.measuring.clock import Clock, Outcome
from benchmarks.measuring.peers import FbgemmTables, OurTables
from benchmarks.measuring.workload import Batch, Workload

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
SMALL = Workload("small", 16, (600, 400), (4, 2), dim=8, ids="reuse")
RECORD_BYTES = 8 * 4 + 4  # weight, and the state of row-wise Adagrad
SAMPLES = 2


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "STEPS", 5)
    monkeypatch.setattr(tiers, "WARMUP_STEPS", 25)


def small_makers(share: float = 0.1) -> tuple[dict[str, Callable[[], Feed]], tuple[Batch, ...]]:
    """Those of the case but for FBGEMM's, which is not everywhere."""
    batches = tiers.draw(SMALL, tiers.num_batches(SAMPLES) + tiers.LOOK_AHEAD, CPU)
    result = dict(tiers.makers(Tier("host", share, SMALL), batches, CPU))
    return {name: maker for name, maker in result.items() if not name.startswith("fbgemm")}, batches


def race(makers: dict[str, Callable[[], Feed]]) -> Outcome:
    return tiers.race(makers, SMALL, Clock(CPU), SAMPLES, {ON_DEVICE: 7})


def test_rows_come_back_and_batches_are_the_same_each_time() -> None:
    first, second = tiers.draw(SMALL, 2, CPU)
    tiers.draw.cache_clear()
    assert all(torch.equal(a.values, b.values) for a, b in zip((first, second), tiers.draw(SMALL, 2, CPU), strict=True))
    assert not torch.equal(first.values, second.values)
    for batch in (first, second):
        (large, _), (small, _) = batch.bags
        assert large.shape == (64,)
        assert small.shape == (32,)
        assert large.max() < 600
        assert small.max() < 400
        assert batch.num_distinct == large.unique().numel() + small.unique().numel()
        assert batch.offsets[-1] == SMALL.num_ids
    # A batch has some 25 of 600 rows: by chance 4 % of them would be in the batch before, never 7 %; here 23 % are.
    many = tiers.draw(SMALL, 20, CPU)
    seen = [set(batch.bags[0][0].tolist()) for batch in many]
    again = [len(now & initial) / len(now) for initial, now in itertools.pairwise(seen)]
    assert sum(again) / len(again) > 0.15


def test_all_train_alike_and_what_crosses_is_counted() -> None:
    makers, batches = small_makers()
    outcome = race(makers)
    assert outcome.errors == {}
    assert [(timing.name, len(timing.samples)) for timing in outcome.timings] == [(name, SAMPLES) for name in makers]
    assert outcome.num_bytes[ON_DEVICE] == 7
    # Each row that is read into a full cache makes another one go, and that one was trained.
    tables = OurTables(SMALL, CPU, "host", te.CacheConfig(share=0.1))
    counted = []
    for batch in batches[: tiers.num_batches(SAMPLES)]:
        tables.backward(tables.forward(batch), torch.ones(SMALL.batch_size, SMALL.width))
        counted.append(sum(c.read + c.written for c in tables.module.cache_statistics().values()))
    steps = tiers.STEPS * (SAMPLES + 1)
    assert outcome.num_bytes[NONE_AHEAD] == (counted[-1] - counted[-1 - steps]) // steps
    assert 2 * RECORD_BYTES < outcome.num_bytes["tritonemb"] < 2 * RECORD_BYTES * max(b.num_distinct for b in batches)


class Forgetful(Feed):
    """Its tables are never updated."""

    def look_up(self, batch: Any) -> Tensor:
        return super().look_up(batch).detach()


def test_who_trains_otherwise_is_left_out() -> None:
    makers, batches = small_makers()
    torch.manual_seed(1)
    peers = OurTables(SMALL, CPU)
    torch.manual_seed(0)
    same = OurTables(SMALL, CPU)
    wrong = {"others": lambda: Feed(peers, batches), "forgetful": lambda: Forgetful(same, batches)}
    outcome = race(makers | wrong)
    assert set(outcome.errors) == {"others", "forgetful"}
    assert "pooled in step 1 unlike 'tritonemb, on the device'" in outcome.errors["others"]
    assert "pooled in step 2 unlike 'tritonemb, on the device'" in outcome.errors["forgetful"]
    assert [timing.name for timing in outcome.timings] == list(makers)


def test_one_that_cannot_be_made_is_left_out_but_for_the_first() -> None:
    makers, _ = small_makers()

    def fail() -> Feed:
        raise ImportError("there is no such library")

    outcome = race(makers | {"absent": fail})
    assert outcome.errors == {"absent": "ImportError: there is no such library"}
    assert len(outcome.timings) == len(makers)
    outcome = race(makers | {ON_DEVICE: fail})
    assert outcome.timings == []
    assert outcome.errors.pop(ON_DEVICE) == "ImportError: there is no such library"
    assert set(outcome.errors.values()) == {
        "RuntimeError: there is nothing to compare with: 'tritonemb, on the device' did not train"
    }


def test_nothing_is_timed_before_the_caches_are_full() -> None:
    makers, _ = small_makers(share=1.0)
    outcome = race(makers)
    assert set(outcome.errors) == {"tritonemb", NONE_AHEAD}
    assert "a cache is only" in outcome.errors[NONE_AHEAD]


def test_who_is_too_slow_to_be_warmed_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "WARMUP_SECONDS", -1.0)
    outcome = race(small_makers()[0])
    assert outcome.timings == []
    assert all(error.startswith("TimeoutError: 0 of 25 steps") for error in outcome.errors.values())


def test_batches_are_sent_before_they_are_taken_and_none_is_lost() -> None:
    _, batches = small_makers()
    tables = OurTables(SMALL, CPU, "host", te.CacheConfig(share=0.1))
    feed = SentAhead(tables, batches[:6], CPU)
    feed.settle()
    lookups = sum(counted.lookups for counted in tables.module.cache_statistics().values())
    assert lookups == sum(batch.num_distinct for batch in batches[: tiers.LOOK_AHEAD])
    torch.manual_seed(0)
    for batch in batches[:6]:
        torch.testing.assert_close(feed.look_up(feed.take()), tables.forward(batch), rtol=0, atol=0)
    with pytest.raises(StopIteration):
        feed.take()
    feed.close()


def test_fbgemm_prefetches_the_next_batch_between_forward_and_backward() -> None:
    batches, calls = small_makers()[1][:3], []
    number = {id(batch.values): index for index, batch in enumerate(batches)}

    def prefetch(values: Tensor, offsets: Tensor, forward_stream: object) -> None:
        calls.append(("prefetch", number[id(values)]))

    def forward(batch: Batch) -> Tensor:
        calls.append(("forward", number[id(batch.values)]))
        pooled = torch.zeros(SMALL.batch_size, SMALL.width, requires_grad=True)
        pooled.register_hook(lambda gradient: calls.append(("backward", number[id(batch.values)])))
        return pooled

    tables: Any = SimpleNamespace(module=SimpleNamespace(prefetch=prefetch), forward=forward)
    feed = Prefetched(tables, batches, CPU)
    tiers.Training(feed, SMALL, CPU).run(3)
    assert calls == [
        ("prefetch", 0), ("forward", 0), ("prefetch", 1), ("backward", 0), ("forward", 1), ("prefetch", 2),
        ("backward", 1), ("forward", 2), ("backward", 2),
    ]  # fmt: skip
    with pytest.raises(StopIteration):
        feed.take()


@pytest.mark.fbgemm
def test_fbgemm_on_the_device_trains_alike() -> None:
    pytest.importorskip("fbgemm_gpu")
    batches = tiers.draw(SMALL, tiers.num_batches(SAMPLES) + tiers.LOOK_AHEAD, CPU)
    makers = dict(tiers.makers(Tier("host", 0.1, SMALL), batches, CPU))
    assert "fbgemm, cached" not in makers  # needs a GPU
    outcome = race({ON_DEVICE: makers[ON_DEVICE], "fbgemm, on the device": makers["fbgemm, on the device"]})
    assert outcome.errors == {}
    with pytest.raises(ValueError, match="only in front of a GPU"):
        FbgemmTables(SMALL, CPU, 0.1)


def test_the_cases_run_in_small(capfd: pytest.CaptureFixture[str]) -> None:
    result = gpu_run.main(["--tiny", "--shape", "10% on"])
    assert all(failure["implementation"].startswith("fbgemm") for failure in result["failures"])
    measured = {(row["op"], row["shape"].rpartition(", ")[2], row["implementation"]) for row in result["rows"]}
    for case in tiers.CASES[::2]:
        for name in (ON_DEVICE, "tritonemb", NONE_AHEAD):
            assert (case.op, f"{case.share:.0%} on the device", name) in measured
    assert all(row["bytes"] > 0 and row["p50_ms"] > 0 for row in result["rows"])
    assert [verdict["met"] is None for verdict in result["targets"]] == [False, True]
    assert capfd.readouterr().out.count("hit rates of tritonemb: ") == 2
