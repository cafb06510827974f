"""Tables on disk: training on a table ten times as large as its cache, against the table in memory, and blocks of rows.

A step is a DLRM's: look-up, dense part forward and backward, update. The floor is the step on a table that is all in
memory. Ids have production's reuse (`Population`), each batch is used once. The table is in a file that is read and
written past the system's page cache, in pytest's temporary folder or TRITONEMB_STORAGE_FOLDER. Target: with
look-ahead at least 0.7 of the speed in memory. Without it training stalls, which is shown beside.

The cost of a step must not grow with the table: tables of 10^6, 10^8 and 10^10 rows, of which each batch needs as many
rows from anywhere in them, are to be within 10 % of each other.

Random records of a table on disk: ours against a plain reader of the same file with 16 threads.

The plain reader only has the system read the pages, past its page cache, into one buffer for each thread; ours also
checks them, copies the records out and gives never-written rows their values. The plain writer writes blocks, and reads
each before if it holds more records than one, as ours does. No page is read twice in a round. The file is 1 GB in the
folder for temporary files; TRITONEMB_STORAGE_BYTES and TRITONEMB_STORAGE_FOLDER make it another size, elsewhere.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tritonemb as te
from benchmarks.measuring.clock import Contender, measure
from benchmarks.measuring.result_files import at_most, timing_rows
from benchmarks.measuring.workload import Population
from tritonemb.data.prefetch import Prefetcher
from tritonemb.optimizers import RowWiseAdagrad
from tritonemb.storage import DiskRows
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.page_table import PAYLOAD_BYTES, FileLayout
from tritonemb.storage.store import record_of
from tritonemb.storage.threads import DEFAULT_THREADS

FOLDER = os.environ.get("TRITONEMB_STORAGE_FOLDER")
NUM_ROWS, SHARE, DIM, FEATURES, BATCH_SIZE, NUM_DENSE = 2_000_000, 0.1, 64, 26, 2048, 13
STEPS, WARMUP_STEPS, WARMUP_ROUNDS, MAX_STEP_ROUNDS = 20, 60, 1, 6
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
    population, rounds = Population(NUM_ROWS, np.random.default_rng(0)), min(rounds, MAX_STEP_ROUNDS)
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


NUM_BYTES = int(os.environ.get("TRITONEMB_STORAGE_BYTES", 10**9))
FOLDER = os.environ.get("TRITONEMB_STORAGE_FOLDER")
MOST_ROUNDS = 20
LEAST_SHARE = 0.8  # of the plain reader's speed
FILL_BYTES = 64 << 20


@dataclass(frozen=True)
class Shape:
    dim: int
    batch: int  # rows, each in a block of its own

    def __str__(self) -> str:
        return f"D={self.dim}, {self.batch} blocks"


SHAPES = (Shape(128, 16384), Shape(4096, 4096))


class Table:
    """A table all of whose rows are written, and its file opened once more for the plain reader."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape, self.path = shape, folder / f"rows-{shape.dim}"
        record = record_of(shape.dim, torch.float32, RowWiseAdagrad.states)
        num_rows = NUM_BYTES // record.num_bytes
        self.layout = FileLayout(num_rows, record.num_bytes)
        identity = TableIdentity("table", num_rows, record, 0)
        self.rows = DiskRows.create(self.path, identity, lambda rows, records: records.zero_())
        step = FILL_BYTES // record.num_bytes
        for begin in range(0, num_rows, step):
            rows = torch.arange(begin, min(begin + step, num_rows))
            self.rows.write(rows, torch.randint(256, (len(rows), record.num_bytes), dtype=torch.uint8)).wait()
        self.rows.flush().wait()
        self.records = torch.zeros(shape.batch, record.num_bytes, dtype=torch.uint8)
        self.handle = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        self.threads = ThreadPoolExecutor(DEFAULT_THREADS)
        self.zeros = memoryview(mmap.mmap(-1, self.layout.block_bytes))  # a block that was never written
        self.views = [memoryview(mmap.mmap(-1, self.layout.block_bytes)) for _ in range(DEFAULT_THREADS)]

    def draw(self, seed: int) -> Tensor:
        """A row of each of some blocks, ascending."""
        random = np.random.default_rng(seed)
        blocks = np.sort(random.permutation(self.layout.num_blocks - 1)[: self.shape.batch])
        within = random.integers(0, self.layout.rows_per_block, blocks.size)
        return torch.from_numpy(blocks * self.layout.rows_per_block + within)

    def read(self, rows: Tensor) -> None:
        self.rows.read(rows, self.records).wait()

    def write(self, rows: Tensor) -> None:
        self.rows.write(rows, self.records).wait()

    def draw_offsets(self, seed: int) -> list[int]:
        blocks = self.draw(seed).numpy() // self.layout.rows_per_block
        return self.layout.offset(blocks)

    def read_plainly(self, offsets: list[int]) -> None:
        self._share(offsets, lambda view, offset: os.preadv(self.handle, [view], offset))

    def write_plainly(self, offsets: list[int]) -> None:
        def work(view: memoryview, offset: int) -> None:
            if self.layout.rows_per_block > 1:
                os.preadv(self.handle, [view], offset)
            else:
                view = self.zeros
            os.pwritev(self.handle, [view], offset)

        self._share(offsets, work)

    def _share(self, offsets: list[int], work: Callable[[memoryview, int], object]) -> None:
        def part(number: int) -> None:
            view, begin = self.views[number], len(offsets) * number // DEFAULT_THREADS
            for offset in offsets[begin : len(offsets) * (number + 1) // DEFAULT_THREADS]:
                work(view, offset)

        list(self.threads.map(part, range(DEFAULT_THREADS)))

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.handle)
        self.rows.close()


@pytest.fixture(params=SHAPES, ids=str)
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = Table(Path(folder), request.param)
        if not made.rows.direct:
            pytest.skip("this file system has no direct I/O; name another folder with TRITONEMB_STORAGE_FOLDER")
        yield made
        made.close()


def file_system(path: Path) -> str:
    """The kind of file system that a file is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    under = [(len(place), kind) for place, kind in mounts if path.resolve().is_relative_to(place)]
    return max(under)[1]


def check_plain(table: Table) -> None:
    """Fail unless both readers find the same bytes."""
    rows = table.draw(0)[:1]
    table.rows.read(rows, table.records[:1]).wait()
    block = int(rows[0]) // table.layout.rows_per_block
    table.read_plainly(table.layout.offset(np.array([block])))
    view = np.frombuffer(table.views[-1], dtype=np.uint8)
    begin = int(rows[0]) % table.layout.rows_per_block * (table.layout.record_bytes + 1) + 1
    size = min(table.layout.record_bytes, PAYLOAD_BYTES - begin)
    assert (view[begin : begin + size] == table.records[0, :size].numpy()).all()


@pytest.mark.parametrize("op", ["read rows on disk", "write rows on disk"])
def bench_storage(table: Table, op: str, benchmark: Any, record: Callable[..., None], rounds: int) -> None:
    check_plain(table)
    ours, plain = (table.read, table.read_plainly) if op.startswith("read") else (table.write, table.write_plainly)
    contenders = [
        Contender("tritonemb", lambda number: table.draw(2 * number + 1), ours),
        Contender("plain", lambda number: table.draw_offsets(2 * number + 2), plain),
    ]
    timings = measure(benchmark, contenders, min(rounds, MOST_ROUNDS))
    count, size = table.shape.batch, table.layout.block_bytes
    passes = 2 if op.startswith("write") and table.layout.rows_per_block > 1 else 1
    moved = count * size * passes
    rows = timing_rows(op, table.shape, timings, {timing.name: moved for timing in timings})  # type: ignore[arg-type]
    kind = file_system(table.path)
    for row, timing in zip(rows, timings, strict=True):
        seconds = timing.percentile(50) / 1e3
        row |= {"file_system": kind, "blocks_per_s": count / seconds, "mb_per_s": moved / seconds / 1e6}
        print(
            f"{op}, {table.shape}, {timing.name}: {row['blocks_per_s']:,.0f}/s, {row['mb_per_s']:,.0f} MB/s on {kind}"
        )
    targets = [at_most(op, table.shape, timings[0], timings[1], 1 / LEAST_SHARE)]  # type: ignore[arg-type]
    record(rows, targets if op.startswith("read") else [])
