"""What a cache says of itself, against a simulation in plain Python; and that a step costs what its batch has."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tritonemb as te
from tests.helpers import INTERPRETED, fewer
from tests.nn.simulated_cache import Simulated
from tests.nn.tiers import ELSEWHERE, not_interpreted, seeded, streams
from tritonemb.tables.cache_storage import CacheStatistics
from tritonemb.types import CacheConfig

pytestmark = [pytest.mark.public, not_interpreted]


# Where tables live, and rows in host memory of those on disk: fewer than on the device, more, and all.
PLACES = [(placement, None) for placement in ELSEWHERE] + [("disk", rows) for rows in (1, 160, 1000) if not INTERPRETED]


@settings(max_examples=fewer(100, 3))
@given(streams(), st.sampled_from(PLACES), st.sampled_from(("lru", "lfu")), st.randoms(use_true_random=False))
def test_statistics_are_those_of_a_simulation(stream, place, policy, random):
    (rows, steps), (placement, host_rows) = stream, place
    cache = CacheConfig(rows=rows, policy=policy, host_rows=host_rows)
    tiered = seeded([te.TableConfig("t", 1000, 4)], te.optim.RowWiseAdagrad(), True, (placement,), cache)
    expected = Simulated(rows, policy, 4 * 4 + 4, host_rows)
    for ids in [*steps, *steps]:
        training = random.random() < 0.6
        with torch.set_grad_enabled(training):
            out = tiered(te.KeyedJaggedTensor.from_lists({"t": [ids]}))
        if training:
            out.sum().backward()
        expected.batch(ids, training)
        assert tiered.cache_statistics() == {"t": expected.statistics}


def pause(random: Random) -> None:
    """Half of the time a while, so that threads meet at other points in each run."""
    if random.random() < 0.5:
        time.sleep(0.004 * random.random())


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("placement", "host_rows"), [*[(place, None) for place in ELSEWHERE], ("disk", 128)])
@pytest.mark.few(1)
def test_statistics_of_batches_sent_ahead_are_those_of_a_simulation(placement, host_rows, policy, depth):
    """Whenever the other thread comes to a batch: it finds held those that were when it was allowed to be sent."""
    random = Random(depth)
    steps = [[int(random.expovariate(0.015)) % 300 for _ in range(random.randint(1, 40))] for _ in range(60)]
    trainings = [random.random() < 0.7 for _ in steps]
    expected, final = Simulated(64, policy, 4 * 4 + 4, host_rows), []
    for number, (ids, training) in enumerate(zip(steps, trainings, strict=True), 1):
        expected.batch(ids, training, range(max(1, number - depth), number))
        final.append(expected.statistics)
    assert final[-1].evictions > 100
    assert final[-1].overflows > 0 or depth < 2
    assert host_rows is None or min(final[-1].host_hits, final[-1].disk_read, final[-1].disk_written) > 0
    for repeat in range(2):
        random, foreign = Random(repeat), Random(-repeat - 1)
        cache = CacheConfig(rows=64, policy=policy, host_rows=host_rows)
        tiered = seeded([te.TableConfig("t", 300, 4)], te.optim.RowWiseAdagrad(), True, (placement,), cache)

        def send(ids, training, initial):
            pause(foreign)  # noqa: B023
            with torch.set_grad_enabled(training):
                sent = te.nn.prefetch(tiered, te.KeyedJaggedTensor.from_lists({"t": [ids]}), initial)  # noqa: B023
            return sent, tiered.cache_statistics()["t"]  # noqa: B023

        actual, waiting = [], deque()
        with ThreadPoolExecutor(1) as other:
            for number in range(len(steps) + depth):
                if number < len(steps):
                    waiting.append(other.submit(send, steps[number], trainings[number], te.nn.sequence_number()))
                if number >= depth:
                    sent, counted = waiting.popleft().result()
                    actual.append(counted)
                    with torch.set_grad_enabled(trainings[number - depth]):
                        out = tiered(sent)
                    pause(random)
                    if out.requires_grad:
                        out.sum().backward()
        assert actual == final, repeat


def test_a_batch_that_never_ends_is_held_and_nobody_waits_for_it():
    """Sequence numbers say what has ended, not what ought to have."""
    tiered = seeded([te.TableConfig("t", 500, 4)], te.optim.SGD(), True, ("host",), CacheConfig(rows=32))
    expected = Simulated(32, "lru", 16)
    batches = [list(range(first, first + 20)) for first in range(0, 200, 20)]
    retained, initial = [], te.nn.sequence_number()
    for number, ids in enumerate(batches, 1):
        sent = te.nn.prefetch(tiered, te.KeyedJaggedTensor.from_lists({"t": [ids]}), te.nn.sequence_number())
        expected.batch(ids, True, range(1, number))
        retained.append(tiered(sent))
        assert tiered.cache_statistics()["t"] == expected.statistics
    assert expected.counts["evictions"] == 0
    for out in retained:
        out.sum().backward()
    # An old number goes on to say the same; a new one, or none, says what is so.
    te.nn.prefetch(tiered, te.KeyedJaggedTensor.from_lists({"t": [[300]]}), initial)
    expected.batch([300], False, range(1, 11))  # it was dropped, and so never trained
    assert tiered.cache_statistics()["t"] == expected.statistics
    with torch.no_grad():
        tiered(te.KeyedJaggedTensor.from_lists({"t": [[301]]}))
    expected.batch([301], False)
    assert tiered.cache_statistics()["t"] == expected.statistics
    assert expected.counts["evictions"] > 0


def test_statistics_are_counted_by_table():
    """Also where a feature feeds several tables, and some live on the device."""
    tables = [te.TableConfig("a", 100, 4, features=["f", "g"]), te.TableConfig("b", 90, 4, features=["g"])]
    tables += [te.TableConfig("c", 90, 4, features=["g"])]
    tiered = seeded(tables, te.optim.SGD(), True, ("host", "device", "disk"), CacheConfig(rows=64))
    for _ in range(2):
        tiered(te.KeyedJaggedTensor.from_lists({"f": [[1, 2, 2], [3]], "g": [[3], [4, 5]]})).sum().backward()
    assert tiered.cache_statistics() == {
        "a": CacheStatistics(lookups=10, hits=5, read=5 * 16), "c": CacheStatistics(lookups=6, hits=3, read=3 * 16),
    }  # fmt: skip
    assert tiered.cache_statistics()["a"].hit_rate == 0.5
    assert seeded(tables, None).cache_statistics() == {}
    assert CacheStatistics().hit_rate == 1.0


class AllocatedElements(TorchDispatchMode):
    """Counts elements of tensors that are no views of others, in this thread."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.count += sum(out.numel() for out in outputs if out.untyped_storage().data_ptr() not in inputs)
        return result


@pytest.mark.few(1)
def test_a_step_moves_the_rows_of_its_batch_however_many_there_are(placement):
    """Count bytes, and counted elements of all tensors that a step makes."""
    moved, allocated = [], []
    for num_rows in (10_000, 300_000):
        table, cache = te.TableConfig("t", num_rows, 4), CacheConfig(rows=64)
        tiered = seeded([table], te.optim.RowWiseAdagrad(), True, (placement,), cache)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(num_rows, (20, 200), generator=generator)
        for step in range(20):
            batch = te.KeyedJaggedTensor(["t"], ids[step], lengths=torch.ones(200, dtype=torch.int64))
            with AllocatedElements() as elements:
                tiered(batch).sum().backward()
        allocated.append(elements.count)
        result = tiered.cache_statistics()["t"]
        assert result.read <= 20 * 200 * 20
        assert result.written <= result.read
        moved.append(result.read)
    assert moved[1] < 1.1 * moved[0]  # more distinct ids, fewer hits
    assert allocated[1] < 1.5 * allocated[0]


def test_statistics_go_on_where_a_table_begins_anew():
    """With another store, whose own counts begin at nothing; what the first one did is not forgotten."""
    cache = CacheConfig(rows=32, host_rows=160)
    tiered, expected = seeded([te.TableConfig("t", 500, 4)], te.optim.SGD(), True, ("disk",), cache), []
    for turn in range(2):
        simulated = Simulated(32, "lru", 16, 160)
        for ids in (range(100), range(50, 250), range(150)):
            tiered(te.KeyedJaggedTensor.from_lists({"t": [list(ids)]})).sum().backward()
            simulated.batch(ids, True)
        expected.append(simulated.statistics)
        actual = tiered.cache_statistics()["t"]
        for name in ("host_hits", "disk_read", "disk_written", "read", "written"):
            total = sum(getattr(statistics, name) for statistics in expected)
            assert getattr(actual, name) == total > 0, (turn, name)
        if turn == 0:
            tiered.reset_parameters()
            assert tiered.cache_statistics()["t"] == actual
