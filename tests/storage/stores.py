"""Tables for the tests of stores of rows, and a plain model of them."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tritonemb.kernels.row_cache import set_of
from tritonemb.storage import DiskRows, IoFuture, aio, threads
from tritonemb.storage.io import TableIdentity
from tritonemb.storage.store import Field, Record

ROOT = Path(__file__).parents[2]
SIZES = (5, 516, 4087, 4088, 4089, 10000)  # many in a page, several, one; then two pages, and three


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


class Stop(BaseException):
    """What the handler of a signal raises, see the fixture `interrupt`."""


def no_thread(*_: object) -> None:
    """`threading.Thread.start` as it is when the interpreter ends."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def plain_record(num_bytes: int) -> Record:
    """One field of bytes."""
    return Record((Field("weight", torch.uint8, num_bytes, 0),), num_bytes)


def initial(rows: Tensor, records: Tensor) -> None:
    """Of each row, other bytes."""
    records.copy_((rows[:, None] * 37 + torch.arange(records.shape[1]) * 11 + 3) % 251)


def identity(num_rows: int, num_bytes: int, table: str = "user") -> TableIdentity:
    return TableIdentity(table, num_rows, plain_record(num_bytes), 7)


def disk_rows(path: Path, num_rows: int, num_bytes: int, **options: Any) -> DiskRows:
    """Opened if it is there, else made."""
    make = DiskRows.open if path.exists() else DiskRows.create
    return make(path, identity(num_rows, num_bytes), initial, **options)


def some_records(count: int, num_bytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, num_bytes), dtype=torch.uint8, generator=generator)


def start_read(store: DiskRows, rows: Sequence[int]) -> tuple[IoFuture, Tensor]:
    records = torch.full((len(rows), store.record.num_bytes), 254, dtype=torch.uint8)  # which `initial` never writes
    return store.read(torch.tensor(rows, dtype=torch.int64), records), records


def read(store: DiskRows, rows: Sequence[int]) -> Tensor:
    future, records = start_read(store, rows)
    future.wait()
    return records


def write(store: DiskRows, rows: Sequence[int], seed: int) -> IoFuture:
    return store.write(torch.tensor(rows, dtype=torch.int64), some_records(len(rows), store.record.num_bytes, seed))


def rows_of_one_set(num_rows: int, num_sets: int) -> list[int]:
    """Rows of a table that a cache in host memory keeps in the same one of its sets."""
    return (set_of(torch.arange(num_rows), num_sets) == 0).nonzero()[:, 0].tolist()


class Model:
    """What a table should hold: a dict."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.written: dict[int, Tensor] = {}

    def write(self, rows: Sequence[int], seed: int) -> None:
        self.written.update(zip(rows, some_records(len(rows), self.num_bytes, seed), strict=True))

    def read(self, rows: Sequence[int]) -> Tensor:
        result = torch.empty(len(rows), self.num_bytes, dtype=torch.uint8)
        initial(torch.tensor(rows, dtype=torch.int64), result)
        for place, row in enumerate(rows):
            if row in self.written:
                result[place] = self.written[row]
        return result

    def copy(self) -> "Model":
        result = Model(self.num_bytes)
        result.written = dict(self.written)
        return result


def failing(
    real: Callable[..., int], code: int, offsets: range = range(1 << 62), first_call: int = 0
) -> Callable[..., int]:  # fmt: skip
    """`os.preadv` or `os.pwritev` that fails within some bytes of a file, from the call number `first_call` on."""
    calls = [0]

    def call(handle: int, views: Sequence[memoryview], offset: int) -> int:
        if offset < offsets.stop and offset + len(views[0]) > offsets.start:
            calls[0] += 1
            if calls[0] > first_call:
                raise OSError(code, os.strerror(code))
        return real(handle, views, offset)

    return call


class _Refused:
    """A transfer some of whose extents were never handed over."""

    def __init__(self, transfer: aio.AioTransfer, mask: np.ndarray, code: int) -> None:
        self._transfer, self._mask, self._code = transfer, mask, code

    def wait(self) -> np.ndarray:
        results = np.full(self._mask.size, -self._code)
        results[self._mask] = self._transfer.wait()
        return results


def use_threads(patch: pytest.MonkeyPatch, number: int) -> None:
    """Have this number of threads read and write, as if the system had no asynchronous I/O."""
    patch.setattr(aio, "make_queue", lambda: None)
    patch.setattr(aio.IoContext, "free", aio._make_contexts())
    patch.setattr(aio, "shared_threads", threads.IoThreads(number))


def break_queues(patch: pytest.MonkeyPatch, code: int, offsets: range = range(1 << 62), writes: bool = True) -> None:
    """Have the system's asynchronous writes, or reads, fail within some bytes of a file."""
    real = aio.AioQueue.submit

    def submit(self: aio.AioQueue, handle: int, extents: aio.Extents, write: bool) -> Any:
        begins, ends = extents.offsets, extents.offsets + extents.sizes
        mask = (begins >= offsets.stop) | (ends <= offsets.start) | np.array(write != writes)
        return _Refused(real(self, handle, aio.Extents(*(part[mask] for part in extents)), write), mask, code)

    patch.setattr(aio.AioQueue, "submit", submit)


def shorten_queues(patch: pytest.MonkeyPatch, most: int) -> None:
    """Have them move at most so many bytes of a piece."""
    real = aio.AioQueue.submit

    def submit(self: aio.AioQueue, handle: int, extents: aio.Extents, write: bool) -> Any:
        return real(self, handle, extents._replace(sizes=np.minimum(extents.sizes, most)), write)

    patch.setattr(aio.AioQueue, "submit", submit)


def short(real: Callable[..., int], most: int) -> Callable[..., int]:
    """Likewise, which moves at most so many bytes at a time."""
    return lambda handle, views, offset: real(handle, [views[0][:most]], offset)


def without_direct(real: Callable[..., int]) -> Callable[..., int]:
    """`os.open` of a file system that knows no direct I/O."""

    def opened(path: Any, flags: int, *mode: Any) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    return opened
