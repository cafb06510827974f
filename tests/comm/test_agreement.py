"""Rounds of agreement, and what is known of a rank that takes part in none."""

import threading
import time
from datetime import timedelta

import pytest

from tritonemb.comm.control import FailureReports, lost_contact
from tritonemb.comm.group import Consensus, RankFailed, RankGroup, Round


def rounds(rank, inputs):
    agreement = Consensus(RankGroup.world())
    return [agreement.next(**item[rank]) for item in inputs]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_hear_the_same(ranks, size):
    inputs = [
        [{"rows": 3 + rank, "batches": rank + 1, "clock": 100 * rank + 7} for rank in range(size)],
        [{"rows": 0, "batches": 0} if rank else {"rows": 2} for rank in range(size)],
        [{"rows": 0, "batches": 0, "signal": 15 * (rank == size - 1)} for rank in range(size)],
        [{"rows": 1, "batches": 1, "waiting": rank == size - 1} for rank in range(size)],
    ]
    heard = ranks(size).run(rounds, inputs)
    assert all(item == heard[0] for item in heard)
    first, second, third, fourth = heard[0]
    assert first == Round(tuple(3 + rank for rank in range(size)), size, clock=7)
    assert (second.rows, second.batches > 0) == ((2, *[0] * (size - 1)), True)
    assert (third.signal, third.batches) == (15, 0)
    assert [round.waiting for round in heard[0]] == [False, False, False, True]
    assert fourth.rows == (1,) * size


def failing(rank, failed_ranks):
    agreement = Consensus(RankGroup.world())
    agreement.next(1)
    try:
        agreement.next(1, failure=f"ValueError: bad line of {rank}" if rank in failed_ranks else None)
    except RankFailed as error:
        return str(error), error.ranks
    return None


@pytest.mark.parametrize("failed_ranks", [[0, 3], [2]])
def test_a_failure_reaches_all_ranks_with_its_reason(ranks, failed_ranks):
    heard = ranks(4).run(failing, failed_ranks)
    expected = "; ".join(f"rank {rank} has failed: ValueError: bad line of {rank}" for rank in failed_ranks)
    assert heard == [(expected, tuple(failed_ranks))] * 4


def beside_the_main_thread(rank, count):
    """Two agreements at once, one in a thread: their channels are their own."""
    world = RankGroup.world()
    first, remote = Consensus(world), Consensus(world)
    results = []
    thread = threading.Thread(target=lambda: results.extend(sum(remote.next(rank + 10 * i).rows) for i in range(count)))
    thread.start()
    local = [sum(first.next(rank + i).rows) for i in range(count)]
    thread.join()
    return local, results


def test_it_may_be_held_in_a_thread(ranks):
    for local, result in ranks(2).run(beside_the_main_thread, 50):
        assert local == [1 + 2 * i for i in range(50)]
        assert result == [1 + 20 * i for i in range(50)]


def silent(rank, silent_rank, seconds, failed=None):
    """What ranks raise while rank `silent_rank` takes no part in a round; `failed` has an error of its own."""
    world = RankGroup.world()
    agreement = Consensus(world, timedelta(seconds=seconds))
    done, reports = world.duplicate("gloo"), FailureReports(world)
    agreement.next(1)
    messages = None
    if rank == failed:
        reports.report(ValueError("bad"), 7)
    elif rank != silent_rank:
        begin = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            agreement.next(1)
        assert lost_contact(caught.value)
        failure = reports.explain(caught.value, 8)
        messages = str(failure), failure.ranks, time.monotonic() - begin
    done.barrier()
    return messages


@pytest.mark.timeout(120)
def test_a_rank_that_does_not_answer_is_named_with_the_step(ranks):
    (text, blamed, took), _ = ranks(2).run(silent, 1, 2.0)
    ranks(2).close()  # the group of the agreement is broken
    assert blamed == (1,)
    assert text.startswith("rank 1 has exited, or has not answered at step 8 (")
    assert "imed out" in text
    assert took >= 2.0


@pytest.mark.timeout(120)
@pytest.mark.more
def test_a_rank_that_has_failed_is_named_before_one_that_does_not_answer(ranks):
    heard = ranks(4).run(silent, 1, 2.0, 3)
    ranks(4).close()
    for text, blamed, _ in (heard[0], heard[2]):
        assert blamed == (3,)
        assert text.startswith("rank 3 failed at step 7: ValueError: bad (")


def test_another_ranks_failure_is_no_failure_of_ones_own(ranks):
    ranks(2).run(followed)


def followed(rank):
    """Rank 0 ends because of rank 1, which is gone; neither is told to have failed."""
    world = RankGroup.world()
    reports, done = FailureReports(world), world.duplicate("gloo")
    if rank == 0:
        reports.report(RankFailed("rank 1 is gone", (1,)), 3)
    done.barrier()
    if rank == 1:
        failure = reports.explain(RuntimeError("Connection closed by peer"), 4)
        assert failure.ranks == ()
        assert str(failure).startswith("the ranks have lost contact at step 4, and each is alive (")
    done.barrier()


def test_what_counts_as_lost_contact():
    assert lost_contact(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345"))
    assert lost_contact(RuntimeError("[unbound_buffer.cc:129] Timed out waiting 3000ms for send operation"))
    assert not lost_contact(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_contact(ValueError("connection"))
    assert not lost_contact(RankFailed("rank 1 has failed: connection", (1,)))
