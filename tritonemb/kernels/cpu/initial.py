"""CPU twin of `kernels/initial.py`: rows shared among threads."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tritonemb.kernels.cpu import pool
from tritonemb.kernels.cpu.jit import called, compiled
from tritonemb.kernels.cpu.memory import float32_row
from tritonemb.kernels.cpu.parallel import run_tasks
from tritonemb.kernels.cpu.rounding import fill_philox
from tritonemb.kernels.initial import ELEMENTS_PER_COUNTER, scale_of

ELEMENTS_PER_TASK = 1 << 15


@called
def _fill_rows(task, num_tasks, out, num_rows, dim, seed, scale, first_row, first_column, rows):
    begin = first_column % ELEMENTS_PER_COUNTER
    counters = (begin + dim + ELEMENTS_PER_COUNTER - 1) // ELEMENTS_PER_COUNTER
    words = np.empty(counters * ELEMENTS_PER_COUNTER, dtype=np.uint32)
    for place in range(num_rows * task // num_tasks, num_rows * (task + 1) // num_tasks):
        row = rows[place] if rows.size else first_row + place
        fill_philox(words, seed, first_column // ELEMENTS_PER_COUNTER, row, 0)
        values = float32_row(out + place * dim * 4, dim)
        for column in range(dim):
            values[column] = np.float32(np.int32(words[begin + column]) >> np.int32(8)) * scale


@compiled
def _fill(team, num_threads, num_tasks, out, num_rows, dim, seed, scale, first_row, first_column, rows):
    run_tasks(
        team, num_threads, num_tasks, _fill_rows,
        (num_tasks, out, num_rows, dim, seed, scale, first_row, first_column, rows),
    )  # fmt: skip


def initial_rows(
    out: Tensor, seed: int, bound: float, first_row: int = 0, first_column: int = 0, rows: Tensor | None = None
) -> None:
    """Arguments as in the reference."""
    named = np.empty(0, dtype=np.int64) if rows is None else rows.contiguous().numpy()
    num_tasks = max(1, min(out.shape[0], out.numel() // ELEMENTS_PER_TASK))
    _fill(
        pool.team(), pool.num_threads(), num_tasks, out.data_ptr(), *out.shape, seed, np.float32(scale_of(bound)),
        first_row, first_column, named,
    )  # fmt: skip
