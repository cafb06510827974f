"""Tables on disk: training on a table ten times as large as its cache, against the table in memory, and blocks of rows.

Training is a case of `benchmarks/gpu/tiers.py` on the CPU. The goal with prefetch is 0.7 of the speed in memory. A step
without prefetch is measured as well, and shows how long training waits for rows. Reads and writes of the table's file
bypass the page cache; it is in the folder for temporary files or TRITONEMB_STORAGE_FOLDER.

The cost of a step must not grow with the table: the goal for steps of tables of 10^6, 10^8 and 10^10 rows, with equally
many random rows per batch, is the same time within 10 %.

Random records of a table on disk are compared with a plain reader of the same file, which has 16 threads. The plain
reader only reads the pages, past the page cache, into a buffer per thread. `DiskRows` also checks them, copies the
records out, and computes initial values of rows that were never written. The plain writer writes blocks. It first reads
a block that has several records, as `DiskRows` does. No page is read twice in a round. The file is 1 GB, or
TRITONEMB_STORAGE_BYTES.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import tritonemb as te
from benchmarks.gpu import tiers
from benchmarks.measuring.clock import Contender
from benchmarks.measuring.result_files import Goal
from tritonemb.optimizers import RowWiseAdagrad
from tritonemb.storage import DiskRows
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.page_table import TRAILER_BYTES, FileLayout
from tritonemb.storage.store import record_of
from tritonemb.storage.threads import DEFAULT_THREADS

FOLDER = tiers.FOLDER
TIER = tiers.CASES[-1]
DIM, ROWS_PER_BATCH = 64, 4096
WARMUP_BATCHES = 40  # until the cache is full, and the small table has been written all over


def bench_training(race: Any) -> None:
    outcome = tiers.measure(TIER, race.clock, race.rounds)
    assert not outcome.errors, outcome.errors
    race.keep(TIER.op, TIER, outcome.timings, Goal(1, 0, most=1 / 0.7), num_bytes=outcome.num_bytes)


def steps_on(num_rows: int) -> Contender:
    """Return train steps of a table on random rows."""
    cache = te.CacheConfig(rows=4 * ROWS_PER_BATCH, folder=FOLDER)
    table = te.TableConfig("t", num_rows, DIM, placement="disk", cache=cache)
    collection = te.nn.EmbeddingBagCollection([table], te.optim.RowWiseAdagrad(lr=0.02))
    generator, lengths = torch.Generator().manual_seed(0), torch.ones(ROWS_PER_BATCH, dtype=torch.int64)

    def draw(_: int) -> te.KeyedJaggedTensor:
        return te.KeyedJaggedTensor.from_lengths(
            ["t"], torch.randint(num_rows, (ROWS_PER_BATCH,), generator=generator), lengths
        )

    num_bytes = 2 * 4 * ROWS_PER_BATCH * (DIM + 1)
    return Contender(f"{num_rows:,} rows", draw, lambda batch: collection(batch).sum().backward(), num_bytes)


@pytest.mark.parametrize("num_rows", [10**8, 10**10])
def bench_larger_table(num_rows: int, race: Any) -> None:
    contenders = [steps_on(num_rows), steps_on(10**6)]
    race("tiers", f"{ROWS_PER_BATCH} rows of {DIM}", contenders, Goal(0, 1, most=1.1), warmup_rounds=WARMUP_BATCHES)


NUM_BYTES = int(os.environ.get("TRITONEMB_STORAGE_BYTES", 10**9))
FILL_BYTES = 64 << 20


class Shape(NamedTuple):
    dim: int
    batch: int  # rows, each in a block of its own

    def __str__(self) -> str:
        return f"D={self.dim}, {self.batch} blocks"


SHAPES = (Shape(128, 16384), Shape(4096, 4096))


class Table:
    """Table whose rows are all written, and its file, opened a second time for the plain reader."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape, self.path = shape, folder / f"rows-{shape.dim}"
        record = record_of(shape.dim, torch.float32, RowWiseAdagrad.states)
        num_rows = NUM_BYTES // record.num_bytes
        identity = TableIdentity("table", num_rows, record, 0)
        self.rows = DiskRows.create(self.path, identity, lambda rows, records: records.zero_())
        self.layout = FileLayout(num_rows, record.num_bytes, self.rows.page_bytes)
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
        """Return one row of each of `batch` random blocks, ascending."""
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
        created = Table(Path(folder), request.param)
        if not created.rows.direct:
            pytest.skip("this file system has no direct I/O; name another folder with TRITONEMB_STORAGE_FOLDER")
        yield created
        created.close()


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
    size = min(table.layout.record_bytes, table.layout.page_bytes - TRAILER_BYTES - begin)
    assert (view[begin : begin + size] == table.records[0, :size].numpy()).all()


@pytest.mark.parametrize("op", ["read rows on disk", "write rows on disk"])
def bench_storage(table: Table, op: str, race: Any) -> None:
    check_plain(table)
    fused, plain = (table.read, table.read_plainly) if op.startswith("read") else (table.write, table.write_plainly)
    count, write = table.shape.batch, op.startswith("write")
    passes = 2 if write and table.layout.rows_per_block > 1 else 1
    moved = count * table.layout.block_bytes * passes
    contenders = [
        Contender("tritonemb", lambda number: table.draw(2 * number + 1), fused, moved),
        Contender("plain", lambda number: table.draw_offsets(2 * number + 2), plain, moved),
    ]
    goals = [] if write else [Goal(0, 1, most=1 / 0.8)]
    timings = race(op, table.shape, contenders, *goals, most_rounds=20, file_system=file_system(table.path))
    for timing in timings:
        print(f"{op}, {table.shape}, {timing.name}: {1e3 * count / timing.percentile(50):,.0f} blocks/s")
