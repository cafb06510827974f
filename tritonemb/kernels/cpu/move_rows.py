"""CPU twin of `kernels/move_rows.py`: threads share the moves, and ask for rows before they copy them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tritonemb.kernels.cpu.jit import called, compiled, run_tasks, share, team
from tritonemb.kernels.cpu.simd import copy_bytes, prefetch
from tritonemb.kernels.move_rows import describe

AHEAD = 8  # moves between asking for a row and copying it
ASKED_BYTES = 512  # of a row; the processor itself asks for what follows
TO, TO_PITCH, TO_ROWS, FROM, FROM_PITCH, FROM_ROWS, ROW_BYTES, PAIR_SIZE = range(8)  # columns of `pairs`


@called
def _move(task, bounds, pairs, to_rows, from_rows):
    for p in range(pairs.shape[0]):
        pair = pairs[p]
        to, to_pitch, source, from_pitch = pair[TO], pair[TO_PITCH], pair[FROM], pair[FROM_PITCH]
        size, end = pair[ROW_BYTES], bounds[task + 1]
        asked = min(size, ASKED_BYTES)
        for move in range(bounds[task] - AHEAD, end):
            if move + AHEAD < end and to_rows[move + AHEAD] >= 0 and from_rows[move + AHEAD] >= 0:
                prefetch(source + from_rows[move + AHEAD] * from_pitch, asked)
                prefetch(to + to_rows[move + AHEAD] * to_pitch, asked)
            if move >= bounds[task] and to_rows[move] >= 0 and from_rows[move] >= 0:
                copy_bytes(to + to_rows[move] * to_pitch, source + from_rows[move] * from_pitch, size)


@compiled
def _move_all(team, num_threads, bounds, pairs, to_rows, from_rows, to_limit, from_limit):
    """Copy all rows; or none, and return the first move of a row that a tensor does not have (else -1)."""
    for move in range(to_rows.size):
        to, source = to_rows[move], from_rows[move]
        if to >= 0 and source >= 0 and (to >= to_limit or source >= from_limit):
            return move
    run_tasks(team, num_threads, bounds.size - 1, _move, (bounds, pairs, to_rows, from_rows))
    return -1


def move_rows_(destinations: Sequence[Tensor], sources: Sequence[Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
    """See `kernels/move_rows.py`.

    Raises:
        ValueError: for a row that a tensor does not have, before anything is moved.
    """
    if not destinations:
        return
    pairs = [describe(*pair)[0] for pair in zip(destinations, sources, strict=True)]
    described = np.array(pairs, dtype=np.int64).reshape(-1, PAIR_SIZE)
    to_limit, from_limit = int(described[:, TO_ROWS].min()), int(described[:, FROM_ROWS].min())
    num_moves = to_rows.numel()
    bounds = share(num_moves, num_moves * int(described[:, ROW_BYTES].sum()) // 4)
    bad = _move_all(
        *team(alone=bounds.size == 2), bounds, described, to_rows.numpy(), from_rows.numpy(), to_limit, from_limit
    )
    if bad >= 0:
        raise ValueError(
            f"move {bad} goes from row {int(from_rows[bad])} to row {int(to_rows[bad])}, but the shortest source has "
            f"{from_limit} rows and the shortest destination {to_limit}; rows to skip are negative"
        )
