"""Order of pulls and pushes, without tensors: each rule of the docstring, whenever the messages of trainers arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonemb.server.ordering import Ordering

STEPS = 6


class Run:
    """Trainers that pull and push batches, and what an `Ordering` does with them."""

    def __init__(self, trainers: int, staleness: int | None, exact: bool, batches: int) -> None:
        self.trainers, self.staleness, self.exact, self.batches = trainers, staleness, exact, batches
        self.ordering = Ordering[tuple[int, int], tuple[int, int]](trainers, staleness, exact, batches)
        self.events: list[tuple[str, list[tuple[int, int]]]] = []
        self.pulled = [0] * trainers  # batches that were requested, by rank
        self.pushed = [0] * trainers
        self.read = [0] * trainers

    def pull(self, rank: int) -> None:
        if self.pulled[rank] < STEPS * self.batches:
            batch, self.pulled[rank] = self.pulled[rank], self.pulled[rank] + 1
            self.ordering.pull(rank, batch, (batch, rank))
            self.advance()

    def push(self, rank: int) -> None:
        if self.pushed[rank] < self.read[rank]:  # only rows that have arrived are trained
            batch, self.pushed[rank] = self.pushed[rank], self.pushed[rank] + 1
            self.ordering.push(rank, batch, (batch, rank))
            self.advance()

    def advance(self) -> None:
        while (pushes := self.ordering.take_pushes()) or (pulls := self.ordering.take_pulls()):
            if pushes:
                self.events.append(("apply", pushes))
                step = self.ordering.next_push - 1
                batches = range(step * self.batches, (step + 1) * self.batches)
                assert pushes == [(batch, rank) for batch in batches for rank in range(self.trainers)]
            else:
                self.events.append(("read", pulls))
                self.check_read(pulls)
                for _, rank in pulls:
                    self.read[rank] += 1

    def check_read(self, pulls: list[tuple[int, int]]) -> None:
        """Check how many steps' updates a pull sees."""
        (batch,) = {batch for batch, _ in pulls}
        step, applied = batch // self.batches, self.ordering.next_push
        assert [rank for _, rank in pulls] == sorted(rank for _, rank in pulls)
        if self.staleness is not None:
            assert applied >= step - self.staleness
        if self.exact:
            assert applied == max(0, step - self.staleness)
            assert len(pulls) == self.trainers

    def finish(self) -> None:
        """Let all trainers do their remaining work in turns."""
        for _ in range(2 * STEPS * self.batches):
            for rank in range(self.trainers):
                self.pull(rank)
                self.push(rank)


RULES = [(1, 0, True), (2, 0, True), (2, 2, True), (3, 1, True), (2, 1, False), (3, 3, False), (2, None, False)]
WORK = st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=60)


@pytest.mark.parametrize(("trainers", "staleness", "exact"), RULES)
@given(work=WORK, batches=st.integers(1, 2))
def test_each_pull_sees_the_updates_of_its_staleness(trainers, staleness, exact, work, batches):
    """In any order of arrival; and nobody waits forever."""
    run = Run(trainers, staleness, exact, batches)
    for is_pull, rank in work:
        (run.pull if is_pull else run.push)(rank % trainers)
    run.finish()
    assert run.pushed == [STEPS * batches] * trainers
    assert run.ordering.is_trained(STEPS)
    assert run.ordering.is_complete()
    for rank in range(trainers):  # without later pulls, a flush applies what staleness would wait with
        run.ordering.flush(rank, STEPS)
    run.advance()
    assert run.ordering.next_push == STEPS
    missed = run.ordering.missed_steps
    assert sum(missed.values()) == trainers * STEPS * batches
    if exact:
        assert set(missed) == set(range(staleness + 1))


@pytest.mark.parametrize("staleness", [0, 2])
@given(work=WORK)
def test_in_exact_mode_the_order_of_events_is_that_of_the_batches(staleness, work):
    """Neither the order of arrival nor time determines it."""
    expected, run = Run(3, staleness, True, 1), Run(3, staleness, True, 1)
    expected.finish()
    for is_pull, rank in work:
        (run.pull if is_pull else run.push)(rank)
    run.finish()
    assert run.events == expected.events


def test_a_flush_of_all_trainers_applies_pushes_before_later_pulls():
    run = Run(2, 2, True, 1)
    for rank in range(2):
        run.pull(rank)
        run.push(rank)
    run.push(0)
    assert run.ordering.next_push == 0  # a pull of step 1 or 2 must not see it
    run.ordering.flush(0, 1)
    run.advance()
    assert run.ordering.next_push == 0
    run.ordering.flush(1, 1)
    run.advance()
    assert run.ordering.next_push == 1


def test_a_batch_is_pulled_once_and_a_late_push_is_ignored():
    run = Run(1, 0, True, 1)
    run.pull(0)
    with pytest.raises(ValueError, match="batch 0 was pulled before"):
        run.ordering.pull(0, 0, (0, 0))
    run.push(0)
    assert run.ordering.next_push == 1
    run.ordering.push(0, 0, (0, 0))
    assert not run.ordering.pushes


def test_a_reset_cancels_what_is_pending():
    run = Run(2, 1, True, 1)
    run.pull(0)
    assert not run.ordering.is_complete()
    assert run.ordering.reset(4, 4) == [(0, 0)]
    assert run.ordering.is_complete()
    assert (run.ordering.next_pull, run.ordering.next_push) == (4, 4)
