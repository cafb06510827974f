"""Training on a table ten times as large as its cache, against the table in memory.

A step is a DLRM's: look-up, dense part forward and backward, update. The floor is the step on a table that is all in
memory. Ids have production's reuse (`reuse.Population`), each batch is used once. The table is in a file that is read
and written past the system's page cache, in pytest's temporary folder or TRITONEMB_STORAGE_FOLDER. Target: with
look-ahead at least 0.7 of the speed in memory. Without it training stalls, which is shown beside.

The cost of a step must not grow with the table: tables of 10^6, 10^8 and 10^10 rows, of which each batch needs as many
rows from anywhere in them, are to be within 10 % of each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tritonemb as te
from benchmarks.paired import Contender, measure
from benchmarks.record import at_most, timing_rows
from benchmarks.reuse import Population
from tritonemb.data.prefetch import Prefetcher

FOLDER = os.environ.get("TRITONEMB_STORAGE_FOLDER")
NUM_ROWS, SHARE, DIM, FEATURES, BATCH_SIZE, NUM_DENSE = 2_000_000, 0.1, 64, 26, 2048, 13
STEPS, WARMUP_STEPS, WARMUP_ROUNDS, MOST_ROUNDS = 20, 60, 1, 6
DEPTH = 4
LEAST_SPEED = 0.7
WARMUP_BATCHES = 40  # until the cache is full, and the small table has been written all over
MOST_GROWTH = 1.1
ROWS_A_BATCH = 4096


@dataclass(frozen=True)
class Batch:
    dense: Tensor
    sparse: te.KeyedJaggedTensor
    labels: Tensor


def draw(population: Population) -> Batch:
    ids = torch.from_numpy(population.draw_ids(BATCH_SIZE * FEATURES))
    keys = [f"f{number}" for number in range(FEATURES)]
    lengths = torch.ones(FEATURES * BATCH_SIZE, dtype=torch.int64)
    sparse = te.KeyedJaggedTensor.from_lengths(keys, ids, lengths)
    return Batch(torch.randn(BATCH_SIZE, NUM_DENSE), sparse, torch.randint(2, (BATCH_SIZE,)).float())


class Training:
    """A model, and batches that are used once."""

    def __init__(self, placement: str, depth: int, batches: list[Batch]) -> None:
        torch.manual_seed(0)
        features = [f"f{number}" for number in range(FEATURES)]
        cache = te.CacheConfig(share=SHARE, folder=FOLDER)
        table = te.TableConfig("t", NUM_ROWS, DIM, features, placement=placement, cache=cache)
        self.model = te.nn.DLRM(
            [table], NUM_DENSE, bottom_mlp=(512, 256), top_mlp=(512, 256), optimizer=te.optim.RowWiseAdagrad(lr=0.02)
        )
        embedded = {id(parameter) for parameter in self.model.embeddings.parameters()}
        dense = [parameter for parameter in self.model.parameters() if id(parameter) not in embedded]
        self.optimizer = torch.optim.Adam(dense, lr=1e-3)
        self.depth, self._batches = depth, iter(batches)

    def take(self, count: int) -> list[Batch]:
        return [next(self._batches) for _ in range(count)]

    def run(self, batches: list[Batch]) -> None:
        def told() -> Generator[tuple[Batch, Any], None, None]:
            for batch in batches:
                yield batch, te.nn.prefetch(self.model, batch.sparse) if self.depth else batch.sparse

        with Prefetcher(told(), self.depth, "rows") if self.depth else closing(told()) as ahead:
            for batch, sparse in ahead:
                self.optimizer.zero_grad()
                logits = self.model(batch.dense, sparse)
                F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
                self.optimizer.step()


def bench_training(benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    population, rounds = Population(NUM_ROWS, np.random.default_rng(0)), min(rounds, MOST_ROUNDS)
    batches = [draw(population) for _ in range(WARMUP_STEPS + STEPS * (rounds + WARMUP_ROUNDS))]
    trainings = {
        f"disk, {DEPTH} ahead": Training("disk", DEPTH, batches),
        "disk, none ahead": Training("disk", 0, batches),
        "memory": Training("device", 0, batches),
    }
    for training in trainings.values():
        training.run(training.take(WARMUP_STEPS))

    def contender(name: str, training: Training) -> Contender:
        return Contender(name, lambda _: training.take(STEPS), training.run)

    timings = measure(benchmark, [contender(*item) for item in trainings.items()], rounds, WARMUP_ROUNDS)
    shape = f"{STEPS} steps of {BATCH_SIZE} x {FEATURES} ids, {NUM_ROWS:,} rows of {DIM}, cache {SHARE:.0%}"
    num_bytes = {}
    for name, training in trainings.items():
        counted = training.model.embeddings.cache_statistics().get("t", te.nn.CacheStatistics())
        steps = WARMUP_STEPS + STEPS * (rounds + WARMUP_ROUNDS)
        num_bytes[name] = (counted.read + counted.written) * STEPS // steps
        print(f"{name}: {counted}, hit rate {counted.hit_rate:.3f}")
    rows = timing_rows("tiers", shape, timings, num_bytes)
    record(rows, [at_most("tiers", shape, timings[0], timings[2], 1 / LEAST_SPEED)])


class Growing:
    """A table of so many rows, and steps on some from anywhere in it."""

    def __init__(self, num_rows: int) -> None:
        cache = te.CacheConfig(rows=4 * ROWS_A_BATCH, folder=FOLDER)
        table = te.TableConfig("t", num_rows, DIM, placement="disk", cache=cache)
        self.collection = te.nn.EmbeddingBagCollection([table], te.optim.RowWiseAdagrad(lr=0.02))
        self._num_rows, self._generator = num_rows, torch.Generator().manual_seed(0)

    def draw(self, _: int) -> te.KeyedJaggedTensor:
        ids = torch.randint(self._num_rows, (ROWS_A_BATCH,), generator=self._generator)
        return te.KeyedJaggedTensor.from_lengths(["t"], ids, torch.ones(ROWS_A_BATCH, dtype=torch.int64))

    def step(self, batch: te.KeyedJaggedTensor) -> None:
        self.collection(batch).sum().backward()


@pytest.mark.parametrize("num_rows", [10**8, 10**10])
def bench_larger_table(num_rows: int, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    large, small = Growing(num_rows), Growing(10**6)
    contenders = [
        Contender(f"{num_rows:,} rows", large.draw, large.step),
        Contender(f"{10**6:,} rows", small.draw, small.step),
    ]
    timings = measure(benchmark, contenders, rounds, WARMUP_BATCHES)
    shape = f"{ROWS_A_BATCH} rows of {DIM}"
    num_bytes = dict.fromkeys((contender.name for contender in contenders), 2 * 4 * ROWS_A_BATCH * (DIM + 1))
    record(timing_rows("tiers", shape, timings, num_bytes), [at_most("tiers", shape, *timings, MOST_GROWTH)])
