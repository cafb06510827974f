"""What rows of a dynamic table take, in a process of its own: memory that others have freed counts as resident."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tritonemb as te
from benchmarks.bench_dynamic_table import DIM


def resident(tensor: Tensor) -> int:
    """Bytes of a tensor's pages that are in memory: those that nobody has written to are not."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


def bench_memory_of_rows(benchmark: Any, record: Callable[..., None]) -> None:
    """Bytes a row beside weight and states, of all pages of a table that are in memory, while it fills."""
    capacity, shares, last, found = 1 << 20, [0.1, 0.25, 0.5, 0.9, 1.3], 0, []
    made = te.nn.EmbeddingBagCollection([te.TableConfig("t", None, DIM, capacity=capacity)], te.optim.RowWiseAdagrad())
    table: Any = made["t"]
    for share in shares:
        table.clock += 10  # so that earlier ones may be evicted
        for part in torch.arange(last, int(share * capacity)).split(1 << 14):
            table.insert(part * 0x9E3779B97F4A7C1 + 12345, torch.zeros(part.numel(), DIM))
        last = int(share * capacity)
        taken = sum(resident(tensor) for tensor in (*table.index, table.weight, *table.buffers()))
        found.append((table.num_rows, taken - table.num_rows * (4 * DIM + 4)))
    benchmark.pedantic(lambda: None, rounds=1)
    targets = []
    for rows, num_bytes in found:
        entry = {"op": "dynamic table memory", "shape": f"{rows:,} of {capacity:,} rows, D{DIM}"}
        whole = 1 + num_bytes / rows / (4 * DIM + 4)
        goal = {"target": "at most 1.35", "met": whole <= 1.35}
        targets += [entry | {"measured": "bytes, of weight and states", "ratio": whole} | goal]
        if rows >= capacity:
            goal = {"target": "at most 21", "met": num_bytes / rows <= 21}
            targets += [entry | {"measured": "bytes a row beside them", "ratio": num_bytes / rows} | goal]
    record([], targets)
