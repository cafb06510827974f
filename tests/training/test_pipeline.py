"""The steps to come: what is made ahead and when, on one rank and on several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.training import jobs
from tritonemb.comm.group import RankFailed, RankGroup
from tritonemb.data import protocol as prefetch_module
from tritonemb.data.protocol import PositionedBatch, Prefetcher, ReadReport, Stream
from tritonemb.training.ranks import Ranks
from tritonemb.training.step import StepPipeline
from tritonemb.training.train_state import empty_batch

CPU = torch.device("cpu")


def closes(function: Callable[[], object], release: threading.Event) -> bool:
    """Return whether it returns before the awaited event is set; sets the event at the end."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(60)
    returned = not thread.is_alive()
    release.set()
    thread.join()
    return returned


class TestPrefetcher:
    def test_closing_early_ends_thread_and_source(self):
        closed, produced = [], []

        def source():
            try:
                for item in range(10):
                    produced.append(item)
                    yield item
            finally:
                closed.append(True)

        ahead = Prefetcher(source(), 2, "test-closing", collective=True)
        assert next(ahead) == 0
        ahead.close()
        assert closed == [True]
        assert not any(thread.name == "test-closing" for thread in threading.enumerate())
        assert len(produced) == 3  # ranks that close end with as many

    @pytest.mark.parametrize("collective", [False, True])
    def test_after_a_failure_nobody_waits_for_a_thread_that_hangs(self, monkeypatch, collective):
        monkeypatch.setattr(prefetch_module, "GRACE", 0.01)
        requests, release, ended = threading.Event(), threading.Event(), threading.Event()

        def hanging():
            try:
                yield 0
                requests.set()
                release.wait()
                yield 1
            finally:
                ended.set()

        ahead = Prefetcher(hanging(), 1, "test", collective=collective)
        assert next(ahead) == 0
        assert requests.wait(60)
        assert closes(lambda: ahead.__exit__(RuntimeError, RuntimeError("elsewhere"), None), release)
        assert ended.wait(60)  # it ends when it can, without another item
        with pytest.raises(StopIteration):
            next(ahead)

    @pytest.mark.parametrize("permit", [None, nullcontext], ids=["at once", "permitted"])
    def test_after_a_failure_data_that_do_not_come_are_cancelled(self, monkeypatch, permit):
        """A wait of the thread is cancelled when its stream is closed, after the last item."""
        monkeypatch.setattr(prefetch_module, "GRACE", 0.01)
        requests, given_up = threading.Event(), threading.Event()

        def steps():
            requests.set()
            given_up.wait()
            yield from ()

        def fail():
            stream = Stream(steps(), {}, on_stop=given_up.set)
            with suppress(KeyError), stream, Prefetcher((batch for batch in stream), 1, "test", permit=permit):
                assert requests.wait(60)
                raise KeyError

        assert closes(fail, given_up)


def stream_of(batches, fail_after: int | None = None, hang_after: int | None = None, hang=None) -> Stream:
    def steps():
        for number, batch in enumerate(batches):
            if number == fail_after:
                raise ValueError(f"line {number} is bad")
            if number == hang_after:
                hang()
            yield PositionedBatch(batch, {"of": 1, "row": number + 1}, ReadReport(rows=number + 1))

    return Stream(steps(), {"of": 1, "row": 0})


def joining(rank, counts, accumulate):
    """Each rank's rows, weights and positions, step by step; rank r has `counts[r]` batches of r + 1 rows."""
    data, world = jobs.planted(64, validation=False), RankGroup.world()
    batches = list(data.open("train", rank + 1))[: counts[rank]]
    with stream_of(batches) as stream:
        steps = StepPipeline(Ranks(world, 60.0), CPU, lambda: empty_batch(data), accumulate=accumulate).steps(stream)
        with Prefetcher(steps, 2, "test", collective=True) as ahead:
            return [
                (info.rows, [len(batch) for batch in batches], info.weights, dict(info.position),
                 {tuple(batch.sparse.keys()) for batch in batches})
                for batches, info in ahead
            ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "accumulate"),
    [([2, 3], 1), ([0, 3], 1), ([0, 0], 1), ([0, 3], 2), ([5, 1, 0, 3], 2)],
    ids=str,
)
def test_ranks_without_data_bring_empty_batches_until_all_have_none(ranks, counts, accumulate):
    size = len(counts)
    results = ranks(size).run(joining, counts, accumulate)
    num_steps = -(-max(counts) // accumulate)
    assert all(len(steps) == num_steps + 1 for steps in results)
    for number in range(num_steps):
        steps = [rank_steps[number] for rank_steps in results]
        total = steps[0][0]
        prefetches = [max(0, min(count - number * accumulate, accumulate)) for count in counts]
        assert total == sum((rank + 1) * n for rank, n in enumerate(prefetches))
        for rank, (rows, sizes, weights, position, keys) in enumerate(steps):
            assert rows == total
            assert len(sizes) == max(prefetches)
            assert sizes == [rank + 1] * prefetches[rank] + [0] * (len(sizes) - prefetches[rank])
            assert weights == pytest.approx([n * size / total for n in sizes])
            assert position["row"] == min((number + 1) * accumulate, counts[rank])
            assert len(keys) == 1
        assert sum(sum(weights) for _, _, weights, *_ in steps) == pytest.approx(size)
    assert all(rank_steps[-1][0] == 0 and rank_steps[-1][1] == [] for rank_steps in results)


def stopping(rank):
    """Rank 1 is asked to stop while its third step is made."""
    data, world, requests = jobs.planted(64, validation=False), RankGroup.world(), []

    def signal():
        requests.append(0)
        return 15 if rank == 1 and len(requests) > 2 else 0

    with stream_of(list(data.open("train", 4))) as stream:
        steps = StepPipeline(
            Ranks(world, 60.0), CPU, lambda: empty_batch(data), signal=signal, clock=lambda: rank
        ).steps(stream)
        with Prefetcher(steps, 2, "test", collective=True) as ahead:
            return [(len(batches), info.signal, info.clock, info.position["row"]) for batches, info in ahead]


def test_a_signal_to_one_rank_ends_the_steps_of_all(ranks):
    results = ranks(2).run(stopping)
    assert results == [[(1, 0, 0, 1), (1, 0, 0, 2), (0, 15, 0, 2)]] * 2


def waiting(rank, slow):
    """A rank whose third batch does not come gets a signal."""
    data, world, selection, never = jobs.planted(64, validation=False), RankGroup.world(), [], threading.Event()
    batches = list(data.open("train", 4))[:4]
    signal = lambda: 15 * (rank == slow and len(selection) == 2)  # noqa: E731
    hang_after = 2 if rank == slow else None
    with stream_of(batches, hang_after=hang_after, hang=never.wait) as stream:
        steps = StepPipeline(Ranks(world, 60.0), CPU, lambda: empty_batch(data), signal=signal)
        for batches, info in steps.steps(stream):
            selection.append((len(batches), info.signal, info.position["row"]))
        never.set()
    return selection


@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_ends_a_wait_for_a_batch(ranks, size):
    assert ranks(size).run(waiting, size - 1) == [[(1, 0, 1), (1, 0, 2), (0, 15, 2)]] * size


def streaming(rank, count):
    """Batches of rank 1 come after the others have waited, in rounds that are not steps."""
    data, world = jobs.planted(64, validation=False), RankGroup.world()
    batches, arrived, rounds = list(data.open("train", 4))[:count], threading.Event(), []

    def clock():
        rounds.append(len(rounds))
        if len(rounds) > 5:
            arrived.set()
        return rounds[-1]

    with stream_of(batches, hang_after=1 if rank else None, hang=arrived.wait) as stream:
        pipeline = StepPipeline(Ranks(world, 60.0), CPU, lambda: empty_batch(data), clock=clock, is_stream=True)
        return [(len(step), info.rows, info.position["row"]) for step, info in pipeline.steps(stream)], len(rounds)


def test_ranks_wait_for_rows_of_a_stream_in_rounds(ranks):
    results = ranks(2).run(streaming, 3)
    assert [steps for steps, _ in results] == [[(1, 8, 1), (1, 8, 2), (1, 8, 3), (0, 0, 3)]] * 2
    assert results[0][1] == results[1][1] > 5


def failing(rank, who):
    data, world = jobs.planted(64, validation=False), RankGroup.world()
    num_taken = []
    with stream_of(list(data.open("train", 4)), fail_after=2 if rank == who else None) as stream:
        steps = StepPipeline(Ranks(world, 60.0), CPU, lambda: empty_batch(data)).steps(stream)
        ahead = Prefetcher(steps, 2, "test", collective=True)
        with pytest.raises(ValueError if rank == who else RankFailed) as caught:
            num_taken.extend(ahead)
        ahead.close(failed=True)
    return len(num_taken), str(caught.value)


def test_an_error_of_one_ranks_data_reaches_all(ranks):
    results = ranks(4).run(failing, 2)
    for rank, (num_taken, text) in enumerate(results):
        assert num_taken == 2
        assert text == ("line 2 is bad" if rank == 2 else "rank 2 has failed: ValueError: line 2 is bad")


def fit_with_bad_data(rank, who, kind, timeout):
    """The errors of a trainer, one rank of which has bad data, or data that come when the other rank has raised."""
    data = jobs.planted(600, validation=False)
    real, store, ended = data.open, dist.distributed_c10d._get_default_store().clone(), f"ended {kind}"

    class Bad(type(data)):
        def open(self, split, batch_size, **options):
            batches = list(real(split, batch_size, **options))
            hang = partial(store.wait, [ended], timedelta(seconds=100))
            return stream_of(batches, **({kind: 3} if rank == who else {}), hang=hang)

    bad = Bad(data.name, data.features, data.train, data.test)
    trainer = jobs.make_trainer(bad, timeout=timeout, epochs=1, batch_size=25)
    with pytest.raises(RuntimeError if rank != who or kind == "hang_after" else ValueError) as caught:
        trainer.fit()
    if rank != who:
        store.set(ended, "")
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "ranks", None)


def test_a_trainer_names_the_rank_whose_data_failed(ranks):
    for rank, (kind, text, blamed) in enumerate(ranks(2).run(fit_with_bad_data, 1, "fail_after", 30.0)):
        if rank == 1:
            assert (kind, text) == ("ValueError", "line 3 is bad")
        else:
            assert (kind, text, blamed) == ("RankFailed", "rank 1 has failed: ValueError: line 3 is bad", (1,))


@pytest.mark.timeout(120)
@pytest.mark.more
def test_a_trainer_names_the_rank_whose_data_do_not_come(ranks):
    (kind, text, blamed), _ = ranks(2).run(fit_with_bad_data, 1, "hang_after", 8.0)
    ranks(2).close()  # its groups are broken
    assert (kind, blamed) == ("RankFailed", (1,))
    assert text.startswith("rank 1 has exited, or has not answered at step ")
    assert "imed out" in text


def test_an_empty_batch_has_the_keys_of_the_data():
    data = jobs.planted(64)
    empty, full = empty_batch(data), next(iter(data.open("train", 4)))
    assert len(empty) == 0
    assert empty.sparse.keys() == full.sparse.keys()
    assert empty.sparse.stride() == 0
    assert empty.dense.shape == (0, data.num_dense)
    assert (empty.dense.dtype, empty.labels.dtype) == (full.dense.dtype, full.labels.dtype)
