"""Order of pulls and pushes on one server, for every staleness: a pure state machine, without tensors.

Batches for training are numbered, on each trainer alike; `batches` of them make a step. The order of events is fixed:

    exact, staleness s   pull of step k, of all trainers at once, when the pushes of steps < k - s have been applied;
                         pushes of step j, of all trainers at once, when all pulls of steps <= j + s have been read
    at most s            a trainer's pull of step k, when the pushes of steps < k - s have been applied;
                         pushes of step j, when all trainers' pushes have arrived
    unbounded            a pull at once; pushes of step j, when all trainers' pushes have arrived

So in exact mode the batches alone determine what is read and written: neither time nor the number of servers does.
Pulls of step k see the updates of steps < k - s, exactly these, or at least these.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

PullT = TypeVar("PullT")
PushT = TypeVar("PushT")


class Ordering(Generic[PullT, PushT]):
    """Pending pulls and pushes, and which of them are due.

    For arguments see `CollectionSpec`.
    """

    def __init__(self, trainers: int, staleness: int | None, exact: bool, batches: int) -> None:
        self._trainers, self._staleness, self._exact, self._batches = trainers, staleness, exact, batches
        self.next_pull = self.next_push = 0  # batch whose pulls are next, and step whose pushes are next
        self.pulls: dict[int, dict[int, PullT]] = {}  # pending ones, by batch and rank
        self.pushes: dict[int, dict[int, PushT]] = {}
        self.missed_steps: Counter[int] = Counter()  # pulls by the number of steps whose updates they have missed
        self._flush_steps: dict[int, int] = {}  # by rank

    def pull(self, rank: int, batch: int, pull: PullT) -> None:
        """Add a trainer's pull. ValueError if the batch was pulled before."""
        if self._exact and batch < self.next_pull:
            raise ValueError(f"batch {batch} was pulled before")
        self.pulls.setdefault(batch, {})[rank] = pull

    def push(self, rank: int, batch: int, push: PushT) -> None:
        """Add a trainer's push; one of a run that was rolled back to a checkpoint is ignored."""
        if batch >= self.next_push * self._batches:
            self.pushes.setdefault(batch, {})[rank] = push

    def flush(self, rank: int, steps: int) -> None:
        """Apply the pushes of `steps` steps before the trainer's next pull, once all trainers have requested it."""
        self._flush_steps[rank] = steps

    def take_pushes(self) -> list[PushT]:
        """Remove and return the pushes that are due, those of a step, in the order of batches, then of trainers."""
        step, min_pull = self.next_push, 0
        is_flushed = len(self._flush_steps) == self._trainers and step < min(self._flush_steps.values())
        if self._exact and self._staleness is not None and not is_flushed:
            min_pull = (step + self._staleness + 1) * self._batches  # no later pull misses this step
        if self.next_pull < min_pull or not self._is_pushed(step):
            return []
        self.next_push += 1
        return [push for batch in self._batches_of(step) for push in _by_rank(self.pushes.pop(batch))]

    def take_pulls(self) -> list[PullT]:
        """Remove and return the pulls that are due, those of a batch, in the order of trainers."""
        for batch in sorted(self.pulls):
            step, pulls = batch // self._batches, self.pulls[batch]
            is_complete = batch == self.next_pull and len(pulls) == self._trainers
            sees_enough = self._staleness is None or step - self._staleness <= self.next_push
            if sees_enough and (is_complete or not self._exact):
                self.next_pull = max(self.next_pull, batch + 1)
                self.missed_steps[step - self.next_push] += len(pulls)
                return _by_rank(self.pulls.pop(batch))
        return []

    def is_trained(self, steps: int) -> bool:
        """Return whether all trainers have pulled and pushed `steps` steps; applied as far as staleness allows."""
        return self.next_pull >= steps * self._batches and all(map(self._is_pushed, range(self.next_push, steps)))

    def is_complete(self) -> bool:
        """Return whether all pulled batches have been pushed, and no pull is pending."""
        steps, remaining_batches = divmod(self.next_pull, self._batches)
        return not self.pulls and remaining_batches == 0 and all(map(self._is_pushed, range(self.next_push, steps)))

    def reset(self, next_pull: int, next_push: int) -> list[PullT]:
        """Continue at another batch and step; return the pending pulls, which are cancelled."""
        cancelled = [pull for by_rank in self.pulls.values() for pull in by_rank.values()]
        self.pulls, self.pushes, self._flush_steps = {}, {}, {}
        self.next_pull, self.next_push = next_pull, next_push
        return cancelled

    def _batches_of(self, step: int) -> Iterable[int]:
        return range(step * self._batches, (step + 1) * self._batches)

    def _is_pushed(self, step: int) -> bool:
        return all(len(self.pushes.get(batch, ())) == self._trainers for batch in self._batches_of(step))


def _by_rank(values: dict[int, PullT]) -> list[PullT]:
    return [values[rank] for rank in sorted(values)]
