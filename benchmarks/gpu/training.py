"""Contenders that train the same DLRM on the same batches: compared, warmed up, and timed in turn.

A step is look-up, dense part forward and backward (the MLPs of the DLRM step, float32), update of the tables by
row-wise Adagrad and of the dense part by SGD. The dense part is the same code with the same first weights for all;
contenders differ in their feeds, which are their tables and what is done ahead for them. One sample is several steps
on end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

import tritonemb as te
from benchmarks.bench_dlrm import NUM_DENSE, DLRMOn
from benchmarks.clock import Clock, Contender, Outcome, describe, recover
from benchmarks.gpu.feeds import Feed
from benchmarks.peers import OurTables
from benchmarks.workload import Workload
from tritonemb.layout import NO_ROW, WAYS

STEPS = 10  # of one sample
COMPARED_STEPS = 3
WARMUP_STEPS = 60
WARMUP_SECONDS = 30.0
FULL = 0.9  # of a cache's slots; a set whose rows happen to come late is not filled for long

Makers = Mapping[str, Callable[[], Feed]]


def num_batches(samples: int) -> int:
    """Batches that `race` takes from each feed, one of its samples being a warm-up of the clock."""
    return COMPARED_STEPS + WARMUP_STEPS + STEPS * (samples + 1)


class Training:
    """A DLRM over the tables of one feed."""

    def __init__(self, feed: Feed, workload: Workload, device: torch.device) -> None:
        self.feed, seen = feed, {}

        def look_up(batch: object) -> Tensor:
            pooled = feed.look_up(batch)
            seen["pooled"] = pooled.detach()
            return pooled

        torch.manual_seed(0)
        self.seen: dict[str, Tensor] = seen  # in the last step
        self._model = DLRMOn(look_up, workload.num_tables, workload.dim, device)
        self._model.interaction = te.nn.DotInteraction(workload.num_tables)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, foreach=True)
        self._dense = torch.randn(workload.batch_size, NUM_DENSE, device=device)
        self._labels = (torch.rand(workload.batch_size, device=device) < 0.5).float()

    def run(self, steps: int) -> None:
        """So many steps, on batches that were not used before."""
        for _ in range(steps):
            self._step()
        self.feed.settle()

    def _step(self) -> None:
        batch = self.feed.take()
        self._optimizer.zero_grad(set_to_none=True)
        loss = functional.binary_cross_entropy_with_logits(self._model(self._dense, batch), self._labels)
        self.feed.after_forward()
        loss.backward()
        self._optimizer.step()
        self.seen["loss"] = loss.detach()


def race(makers: Makers, workload: Workload, clock: Clock, samples: int, num_bytes: Mapping[str, int]) -> Outcome:
    """Milliseconds of a step, in so many samples of each contender that trains as the first one does.

    Args:
        num_bytes: of a step, for some contenders; for others of ours what crosses between tiers.
    """
    errors: dict[str, str] = {}
    with ExitStack() as stack:
        trainings = make(makers, workload, clock, stack, errors)
        reference = next(iter(makers))
        if reference not in trainings:
            raise RuntimeError(f"there is nothing to compare with: {reference}: {errors.get(reference, 'left out')}")
        compare(trainings, errors)
        for name, training in list(trainings.items()):
            clock.begin(name)
            with dropping(name, trainings, errors):
                warm_up(training, clock.deadline)
        before = {name: crossed(training) for name, training in trainings.items()}
        contenders = [
            Contender(name, lambda number: None, lambda _, training=training: training.run(STEPS), 0)
            for name, training in trainings.items()
        ]
        outcome = clock.measure(contenders, samples, 1, repeats=1)
        for name, training in trainings.items():
            say_hit_rates(name, training)
            steps = STEPS * (samples + 1)  # one more was not timed
            outcome.num_bytes[name] = num_bytes.get(name, (crossed(training) - before[name]) // steps)
    outcome.timings = [replace(t, samples=tuple(ms / STEPS for ms in t.samples)) for t in outcome.timings]
    outcome.errors = errors | outcome.errors
    return outcome


def make(
    makers: Makers, workload: Workload, clock: Clock, stack: ExitStack, errors: dict[str, str]
) -> dict[str, Training]:
    """The contenders, whose feeds end with the stack; all are made before any is trained."""
    trainings: dict[str, Training] = {}
    for name, maker in makers.items():
        if name in clock.without:
            continue
        clock.begin(name)
        with dropping(name, trainings, errors):
            feed = maker()
            stack.callback(feed.close)
            trainings[name] = Training(feed, workload, clock.device)
    return trainings


def compare(trainings: dict[str, Training], errors: dict[str, str]) -> None:
    """Train all a few steps; those go whose looked-up rows and loss are not the first one's in each of them.

    Rows that come back in a later batch have been updated by the ones before: by about 0.02, the rate, in each element,
    as row-wise Adagrad's first step has the same size whatever the gradient is. So an update that is missing, or of
    another row, is a hundred times the tolerance; float32 sums in another order stay far below it.
    """
    (reference, first), *others = trainings.items()
    for step in range(1, COMPARED_STEPS + 1):
        first.run(1)
        for name, training in others:
            if name in trainings:
                with dropping(name, trainings, errors):
                    training.run(1)
                    _compare(training.seen, first.seen, f"in step {step} unlike {reference!r}")


def _compare(seen: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    for what, value in expected.items():
        torch.testing.assert_close(
            seen[what], value, rtol=1e-3, atol=2e-4, msg=lambda text, what=what: f"{what} {where}: {text}"
        )


def warm_up(training: Training, deadline: float) -> None:
    """Train until the cache is full.

    Raises:
        TimeoutError: that took too long, or the deadline, of `time.time()`, has passed.
        RuntimeError: it is not full then.
    """
    begin = time.monotonic()
    for done in range(0, WARMUP_STEPS, STEPS):
        if time.monotonic() - begin > WARMUP_SECONDS:
            raise TimeoutError(f"{done} of {WARMUP_STEPS} steps of warm-up took more than {WARMUP_SECONDS:.0f} s")
        if time.time() > deadline:
            raise TimeoutError(f"time was over after {done} of {WARMUP_STEPS} steps of warm-up")
        training.run(STEPS)
    tables = training.feed.tables
    cache = tables.module.cache if isinstance(tables, OurTables) else None
    if cache is not None:
        for index, table in enumerate(cache.tables):
            in_sets = cache.row_ids(index)[: table.num_sets * WAYS]  # the others are no part of the share
            full = float((in_sets != NO_ROW).float().mean())
            if full < FULL:
                raise RuntimeError(f"a cache is only {full:.0%} full after {WARMUP_STEPS} steps; warm up longer")


def crossed(training: Training) -> int:
    """Bytes that have crossed between our tiers so far; FBGEMM would be slower if it counted its own."""
    tables = training.feed.tables
    counted = tables.module.cache_statistics().values() if isinstance(tables, OurTables) else ()
    return sum(table.read + table.written for table in counted)


def say_hit_rates(name: str, training: Training) -> None:
    """How often our caches had a distinct row of a batch, since training began."""
    tables = training.feed.tables
    counted = tables.module.cache_statistics() if isinstance(tables, OurTables) else {}
    if counted:
        rates = " ".join(f"{table.hit_rate:.2f}" for table in counted.values())
        print(f"hit rates of {name}: {rates}", flush=True)


@contextmanager
def dropping(name: str, trainings: dict[str, Training], errors: dict[str, str]) -> Iterator[None]:
    """A contender that fails is none any more, and its error is kept; the others go on."""
    try:
        yield
    except Exception as error:
        trainings.pop(name, None)
        recover(error)
        errors[name] = describe(error)
