"""What this machine can do at best: `limit.c`, compiled where there is a C compiler, as one more implementation.

Its tables stand one behind the other in huge pages, its results bag by bag in the order of a batch's samples, so that
it reads and writes what a lookup must and nothing else. It has no backward; what one costs at least follows from the
bytes that it moves and the rate that it reaches.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.workload import Batch, Workload

SOURCE = Path(__file__).with_name("limit.c")
NO_COMPILER = "there is no C compiler for x86-64, so the machine's limit cannot be measured"
AHEAD = 16  # ids
STREAMED_BYTES = 8 << 20
ONE_THREAD_BYTES = 256 << 10  # that are moved before another thread has begun


def has_compiler() -> bool:
    return platform.machine() == "x86_64" and shutil.which("cc") is not None


@functools.cache
def _library() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limit.so"
        subprocess.run(
            ["cc", "-O3", "-mavx2", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(path)], check=True
        )
        library = ctypes.CDLL(str(path))
    library.new_floats.restype = ctypes.c_void_p
    return library


def _new(*size: int) -> Tensor:
    count = int(torch.Size(size).numel())
    address = _library().new_floats(ctypes.c_long(count))
    assert address, f"there is no memory for {count} floats"
    array = (ctypes.c_float * count).from_address(address)
    return torch.frombuffer(array, dtype=torch.float32).view(size)


class LimitBags:
    """Equal float32 tables that are looked up by `limit.c`; dims a multiple of 8, up to 256."""

    name = "limit"

    def __init__(self, shape: Workload) -> None:
        assert shape.dim % 8 == 0
        self.shape = shape
        (self.num_rows,), (self.bag_size,) = set(shape.num_rows), set(shape.bag_sizes)
        self.table = _new(shape.num_tables * self.num_rows, shape.dim)
        self.out = _new(shape.batch_size, shape.num_tables * shape.dim)

    def weights(self) -> list[Tensor]:
        return list(self.table.split(self.num_rows))

    def rows(self, batch: Batch) -> Tensor:
        """int64 `[B, T, L]`: the batch's ids as rows of the one table."""
        shape = self.shape
        ids = batch.values.view(shape.num_tables, shape.batch_size, self.bag_size).transpose(0, 1)
        return (ids + torch.arange(shape.num_tables).view(1, -1, 1) * self.num_rows).contiguous()

    def forward_rows(self, rows: Tensor) -> Tensor:
        """`[B, T * D]`, in the same memory each time."""
        moved = 4 * self.shape.dim * rows.numel() + self.out.nbytes
        threads = 1 if moved < ONE_THREAD_BYTES else torch.get_num_threads()
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.table, rows, self.out))
        sizes = self.shape.dim, self.shape.batch_size * self.shape.num_tables, self.bag_size, AHEAD
        streamed = self.out.nbytes >= STREAMED_BYTES
        assert (
            _library().gather(*pointers, *map(ctypes.c_long, sizes), ctypes.c_int(streamed), ctypes.c_int(threads)) == 0
        )
        return self.out

    def forward(self, batch: Batch) -> Tensor:
        return self.forward_rows(self.rows(batch))
