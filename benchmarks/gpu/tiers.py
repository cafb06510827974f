"""Training a DLRM on tables that live in host memory or on disk, with a share of their rows on the device.

The contenders of a case are compared, warmed up, and timed in turn. They have the same first weights, the same dense
part and the same batches; they differ in their feeds: where rows live and what is done ahead. A step is look-up, dense
part forward and backward (the MLPs of the DLRM step, float32), update of tables by row-wise Adagrad and of the dense
part by SGD; a sample is several steps on end. The batches have production's reuse, within a batch and from batch to
batch (`workload.Population`), and each is used once.

The bytes of a case are those that crossed between host or disk and device in a step; where all rows are on the device,
those that the step has to move; 0 for FBGEMM's cache, which would be slower if it counted them.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.bench_step import DLRMStep
from benchmarks.measuring.cases import OURS
from benchmarks.measuring.clock import Clock, Contender, Outcome, recover
from benchmarks.measuring.peers import FbgemmTables, OurTables, Tables, copy_weights
from benchmarks.measuring.workload import Batch, Population, Workload, make_batch, step_bytes
from tritonemb.data.protocol import Prefetcher
from tritonemb.layout import NO_ROW, WAYS
from tritonemb.tables.cache import released_before
from tritonemb.tables.table_set import PrefetchedFeatures

ON_DEVICE, NONE_AHEAD = "tritonemb, on the device", "tritonemb, none ahead"
FBGEMM_ON_DEVICE, FBGEMM_CACHED = "fbgemm, on the device", "fbgemm, cached"
FOLDER = os.environ.get("TRITONEMB_STORAGE_FOLDER")


STEPS = 10  # of one sample
COMPARED_STEPS = 3
WARMUP_STEPS = 60
WARMUP_SECONDS = 30.0
LOOK_AHEAD = 4  # batches that ours are told of before they are trained
FULL = 0.9  # of a cache's slots; a set whose rows happen to come late is not filled for long

Makers = Mapping[str, Callable[[], "Feed"]]


@dataclass(frozen=True)
class Tier:
    """Where the rows of a workload's tables live, and the share of them that is on the device."""

    placement: Literal["host", "disk"]
    share: float
    workload: Workload

    @property
    def op(self) -> str:
        return f"training from {'host memory' if self.placement == 'host' else 'disk'}"

    def __str__(self) -> str:
        return f"{self.workload}, {self.share:.0%} on the device"

    def tiny(self) -> Tier:
        return replace(self, workload=self.workload.tiny())

    def num_samples(self, rounds: int) -> int:
        """Of as many timed rounds as other cases have: a sample is long, and longer from a disk."""
        return max(2, rounds // (3 if self.placement == "host" else 10))


# Tables of 4 GB, a batch of as many ids a table and sample as the published mean. A disk does some 10^5 requests a
# second, so what is on one is smaller, and so are its batches.
HOST = Workload("tiers", 8192, (1_000_000,) * 8, (14,) * 8, ids="reuse")
DISK = Workload("tiers", 1024, (250_000,) * 8, (14,) * 8, ids="reuse")
CASES = (Tier("host", 0.1, HOST), Tier("host", 0.2, HOST), Tier("disk", 0.1, DISK))  # the last one on a CPU, too


@functools.lru_cache(maxsize=1)
def draw(workload: Workload, count: int, device: torch.device) -> tuple[Batch, ...]:
    """So many batches, the same on every device; the last ones drawn are kept for the next case. A thread a table."""

    def of_table(table: int) -> list[Tensor]:
        population = Population(workload.num_rows[table], np.random.default_rng(table))
        num_ids = workload.batch_size * workload.bag_sizes[table]
        return [torch.from_numpy(population.draw_ids(num_ids)) for _ in range(count)]

    with ThreadPoolExecutor(min(workload.num_tables, os.cpu_count() or 1)) as pool:
        by_table = list(pool.map(of_table, range(workload.num_tables)))
    batches = [make_batch(workload, [ids.to(device) for ids in parts]) for parts in zip(*by_table, strict=True)]
    for batch in batches:
        _ = batch.keyed  # made now, or the first contender would make it for all
    return tuple(batches)


def makers(tier: Tier, batches: tuple[Batch, ...], device: torch.device) -> Makers:
    """What makes each contender; the first is the one that the others are compared with."""

    def ours(placement: Literal["device", "host", "disk"]) -> OurTables:
        torch.manual_seed(0)
        return OurTables(tier.workload, device, placement, te.CacheConfig(share=tier.share, folder=FOLDER))

    def fbgemm(cache_share: float | None = None) -> FbgemmTables:
        tables = FbgemmTables(tier.workload, device, cache_share)
        copy_weights(ours("device"), tables)
        return tables

    result: dict[str, Callable[[], Feed]] = {
        ON_DEVICE: lambda: Feed(ours("device"), batches),
        OURS: lambda: SentAhead(ours(tier.placement), batches, device),
        NONE_AHEAD: lambda: Feed(ours(tier.placement), batches),
    }
    if tier.placement == "host":
        result[FBGEMM_ON_DEVICE] = lambda: Feed(fbgemm(), batches)
        if device.type == "cuda":  # FBGEMM has no cache in front of a CPU: MANAGED_CACHING is refused there
            result[FBGEMM_CACHED] = lambda: Prefetched(fbgemm(tier.share), batches, device)
    return result


def measure(tier: Tier, clock: Clock, rounds: int) -> Outcome:
    """Milliseconds of a step. Contenders that cannot be made, train differently or fail are among the errors."""
    samples, device = tier.num_samples(rounds), clock.device
    batches = draw(tier.workload, num_batches(samples) + LOOK_AHEAD, device)
    num_bytes = dict.fromkeys((ON_DEVICE, FBGEMM_ON_DEVICE), step_bytes(batches[-1]))
    try:
        return race(makers(tier, batches, device), tier.workload, clock, samples, num_bytes)
    finally:
        recover()


def num_batches(samples: int) -> int:
    """Batches that `race` takes from each feed, one of its samples being a warm-up of the clock."""
    return COMPARED_STEPS + WARMUP_STEPS + STEPS * (samples + 1)


class Training:
    """A DLRM over the tables of one feed; `seen` are the rows that it looked up in the last step, and the loss."""

    def __init__(self, feed: Feed, workload: Workload, device: torch.device) -> None:
        self.feed, self.seen = feed, dict[str, Tensor]()
        self._step = DLRMStep(self._look_up, workload, device, ours=True)

    def _look_up(self, batch: object) -> Tensor:
        pooled = self.feed.look_up(batch)
        self.seen["pooled"] = pooled.detach()
        return pooled

    def run(self, steps: int) -> None:
        """So many steps, on batches that were not used before."""
        for _ in range(steps):
            self.seen["loss"] = self._step(self.feed.take(), self.feed.after_forward)
        self.feed.settle()

    def counted(self) -> list[te.nn.CacheStatistics]:
        """Of our caches; FBGEMM's would be slower if it counted."""
        tables = self.feed.tables
        return list(tables.module.cache_statistics().values()) if isinstance(tables, OurTables) else []

    def crossed(self) -> int:
        """Bytes that have crossed between our tiers so far."""
        return sum(table.read + table.written for table in self.counted())


def race(makers: Makers, workload: Workload, clock: Clock, samples: int, num_bytes: Mapping[str, int]) -> Outcome:
    """Milliseconds of a step, in so many samples of each contender that trains as the first one does.

    Args:
        num_bytes: of a step, for some contenders; for others of ours what crosses between tiers.
    """
    trainings, initial = dict[str, Training](), dict[str, int]()
    expected: list[dict[str, Tensor]] = []
    with ExitStack() as stack:

        def get(name: str) -> Training:
            """What trains: made, compared and warmed up the first time."""
            if name not in trainings:
                feed = makers[name]()
                stack.callback(feed.close)
                training = Training(feed, workload, clock.device)
                compare(training, expected, name, next(iter(makers)))
                warm_up(training, clock.deadline)
                trainings[name], initial[name] = training, training.crossed()
            return trainings[name]

        contenders = [
            Contender(name, lambda _, name=name: get(name), lambda training: training.run(STEPS)) for name in makers
        ]
        outcome = clock.measure(contenders, samples, 1, repeats=1)
        for name, training in trainings.items():
            if rates := " ".join(f"{table.hit_rate:.2f}" for table in training.counted()):
                print(f"hit rates of {name}: {rates}", flush=True)  # of distinct rows of a batch, since training began
            steps = STEPS * (samples + 1)  # one more was not timed
            outcome.num_bytes[name] = num_bytes.get(name, (training.crossed() - initial[name]) // steps)
    outcome.timings = [replace(t, samples=tuple(ms / STEPS for ms in t.samples)) for t in outcome.timings]
    return outcome


def compare(training: Training, expected: list[dict[str, Tensor]], name: str, reference: str) -> None:
    """Train a few steps; raise if looked-up rows and loss are not those `expected`, the reference's, in each of them.

    Rows that come back in a later batch have been updated by the ones before: by about 0.02, the rate, in each element,
    as row-wise Adagrad's first step has the same size whatever the gradient is. So an update that is missing, or of
    another row, is a hundred times the tolerance; float32 sums in another order stay far below it.
    """
    for step in range(COMPARED_STEPS):
        training.run(1)
        if name == reference:
            expected.append(dict(training.seen))
        if step >= len(expected):
            raise RuntimeError(f"there is nothing to compare with: {reference!r} did not train")
        for kind, value in expected[step].items():
            where = f"{kind} in step {step + 1} unlike {reference!r}: "
            torch.testing.assert_close(
                training.seen[kind], value, rtol=1e-3, atol=2e-4, msg=lambda text, where=where: where + text
            )


def warm_up(training: Training, deadline: float) -> None:
    """Train until the cache is full.

    Raises:
        TimeoutError: that took too long, or the deadline, of `time.time()`, has passed.
        RuntimeError: it is not full then.
    """
    begin = time.time()
    for done in range(0, WARMUP_STEPS, STEPS):
        if time.time() > min(begin + WARMUP_SECONDS, deadline):
            raise TimeoutError(f"{done} of {WARMUP_STEPS} steps of warm-up took {time.time() - begin:.0f} s")
        training.run(STEPS)
    tables = training.feed.tables
    cache = tables.module.cache if isinstance(tables, OurTables) else None
    if cache is not None:
        for index, cached in enumerate(cache.rows):
            in_sets = cache.row_ids(index)[: cached.num_sets * WAYS]  # the others are no part of the share
            full = float((in_sets != NO_ROW).float().mean())
            if full < FULL:
                raise RuntimeError(f"a cache is only {full:.0%} full after {WARMUP_STEPS} steps; warm up longer")


class Feed:
    """The batches one after the other, each looked up when it is there."""

    def __init__(self, tables: Tables, batches: Iterable[Batch]) -> None:
        self.tables, self._batches = tables, iter(batches)

    def take(self) -> Any:
        """The next batch, as `look_up` takes it."""
        return next(self._batches)

    def look_up(self, batch: Any) -> Tensor:
        """Pooled rows, [B, T * D]."""
        return self.tables.forward(batch)

    def after_forward(self) -> None:
        """Called between a step's forward and its backward."""

    def settle(self) -> None:
        """Wait for what is under way; the current stream waits for what is so on others."""

    def close(self) -> None:
        """End what runs beside."""


class SentAhead(Feed):
    """Ours: another thread, on its own stream, tells the tables of the batches to come, as the trainer does."""

    def __init__(self, tables: OurTables, batches: Iterable[Batch], device: torch.device) -> None:
        super().__init__(tables, batches)
        self._collection, self._side = tables.module, Side(device)
        self._ahead = Prefetcher(
            self._sent(), LOOK_AHEAD, "rows", permit=lambda: released_before(te.nn.sequence_number())
        )

    def take(self) -> PrefetchedFeatures:
        return next(self._ahead)

    def look_up(self, batch: PrefetchedFeatures) -> Tensor:
        return self._collection(batch)

    def settle(self) -> None:
        self._ahead.settle()
        self._side.join()

    def close(self) -> None:
        self._ahead.close(failed=True)  # without waiting for batches that nobody takes

    def _sent(self) -> Generator[PrefetchedFeatures, None, None]:
        for batch in self._batches:
            with self._side.on():
                sent = te.nn.prefetch(self._collection, batch.keyed)
            yield sent
            del sent  # or its rows would be held until the next ones are there


class Prefetched(Feed):
    """FBGEMM's cache: the next batch is prefetched on its own stream, asked for between a step's forward and backward.

    That is the order in which TorchRec's `PrefetchTrainPipelineSparseDist` does it. FBGEMM itself lets the backward
    wait for the prefetch, and a prefetch for the backward of the batch before the one that is trained meanwhile.
    """

    def __init__(self, tables: FbgemmTables, batches: Iterable[Batch], device: torch.device) -> None:
        super().__init__(tables, batches)
        self._module, self._side = tables.module, Side(device)
        self._coming: Batch | None = None
        self.after_forward()

    def take(self) -> Batch:
        self._side.join()
        if self._coming is None:
            raise StopIteration
        return self._coming

    def after_forward(self) -> None:
        self._coming = next(self._batches, None)
        if self._coming is not None:
            values, offsets = self._coming.values, self._coming.offsets
            forward_stream = torch.cuda.current_stream(values.device) if values.is_cuda else None
            with self._side.on():
                self._module.prefetch(values, offsets, forward_stream)

    def settle(self) -> None:
        self._side.join()


class Side:
    """A CUDA stream of its own, behind what has been asked of the current one by now; on the CPU there is none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def on(self) -> AbstractContextManager[object]:
        """What this thread asks for in this context goes to the stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The current stream waits for this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
