"""Random records of a table on disk: ours against a plain reader of the same file with 16 threads.

The plain reader only has the system read the pages, past its page cache, into one buffer for each thread; ours also
checks them, copies the records out and gives never-written rows their values. The plain writer writes blocks, and reads
each before if it holds more records than one, as ours does. No page is read twice in a round. The file is 1 GB in the
folder for temporary files; TRITONEMB_STORAGE_BYTES and TRITONEMB_STORAGE_FOLDER make it another size, elsewhere.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.paired import Contender, measure
from benchmarks.record import at_most, timing_rows
from tritonemb.optimizers import RowWiseAdagrad
from tritonemb.storage import DiskRows
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.page_table import PAYLOAD_BYTES, FileLayout
from tritonemb.storage.store import record_of
from tritonemb.storage.threads import DEFAULT_THREADS

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
