"""Where the columns of a matrix lie in a message between ranks: the small table that the codecs of `quantize` read.

A message of `M` rows is one part per rank, one after the other. A part holds, row by row, the codes of its columns in
an order of its own; with codec "int8" then up to 3 zero bytes (to a multiple of 4) and a float32 scale and offset for
each piece. Nothing here depends on `M`: a packing is made once, and serves batches of every size.

The exchanges that it is for, with `R` rows a rank and one all-to-all in between:

    pooled, forward    one part with all columns   →   one part for each rank, its tables' columns, to where they belong
    pooled, backward   one part for each rank      →   one part with all columns
    sequences          one part with all columns   →   the same; `rows` tells which row of the message is which
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.types import CODECS, Device

# By what an element travels as: its largest value, and the first magnitude that does not round to it or below.
LIMITS = {codec.dtype: (codec.largest, codec.saturation_threshold) for codec in CODECS.values()}
PIECE = 512  # columns; an int8 code's step is the range of at most so many elements over 255
ROW_PARAMETERS = 8  # bytes: scale and offset, float32

COLUMN, WIDTH, CODES, PART, FIRST, STRIDE, PARAMETERS = range(7)  # columns of `pieces`


class Packing(NamedTuple):
    """How a matrix `[R, width]` and a message of `M` rows correspond (`M = R`, unless a row map says otherwise).

    `pieces` is int64 `[S, 7]`, each at most `PIECE` columns: first column; columns; codes (columns, and the zero bytes
    that the last piece of a row adds); and, measured in codes, start of the part as a multiple of `M`, first code in a
    row of the part, length of such a row, its scale and offset in it (codec "int8", else 0). `part_bytes` are a row's
    in each part: the message's split sizes are `M` times these. `widest`: most codes of a piece. `vector`: a power of
    two ≤ 16 that divides every first column, number of codes and place. `complete`: each column lies in one piece.
    """

    pieces: Tensor
    codec: str
    width: int
    part_bytes: tuple[int, ...]
    widest: int
    vector: int
    complete: bool

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes in all parts together."""
        return sum(self.part_bytes)


def make_packing(parts: Sequence[Sequence[tuple[int, int]]], width: int, codec: str, device: Device = None) -> Packing:
    """Lay out a matrix of `width` columns as a message. ValueError for an unknown codec, or columns outside of it.

    `parts` has for each rank the columns that its part holds, in this order, as (first column, number of columns). With
    codec "int8" each of these is quantized by itself (`PIECE` columns at a time); give one for each table.
    """
    if codec not in CODECS:
        raise ValueError(f"no codec is called {codec!r}; there are {sorted(CODECS)}")
    for part, runs in enumerate(parts):
        for first, size in runs:
            if first < 0 or size < 1 or first + size > width:
                raise ValueError(
                    f"part {part}: {size} columns from column {first} on are not in a matrix of {width} columns"
                )
    row_wise, size = CODECS[codec].row_wise, CODECS[codec].dtype.itemsize
    aligned = 4 if row_wise else 1
    pieces: list[list[int]] = []
    part_bytes: list[int] = []
    for runs in parts:
        cut = _cut(runs if row_wise else _merge(runs))
        num_codes = sum(num_columns for _, num_columns in cut)
        padded = -(-num_codes // aligned) * aligned
        row_bytes = padded * size + (ROW_PARAMETERS * len(cut) if row_wise else 0)
        start, place = sum(part_bytes), 0
        for index, (column, num_columns) in enumerate(cut):
            codes = num_columns + (padded - num_codes if index == len(cut) - 1 else 0)
            parameters = padded + ROW_PARAMETERS * index if row_wise else 0
            pieces.append([column, num_columns, codes, start // size, place, row_bytes // size, parameters])
            place += num_columns
        part_bytes.append(row_bytes)
    return Packing(
        torch.tensor(pieces, dtype=torch.int64, device=device).reshape(-1, 7), codec, width, tuple(part_bytes),
        max([1, *[piece[CODES] for piece in pieces]]),
        math.gcd(16, *(number for piece in pieces for number in piece[:PARAMETERS])),
        sorted(column for p in pieces for column in range(p[COLUMN], p[COLUMN] + p[WIDTH])) == list(range(width)),
    )  # fmt: skip


def _merge(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, size in runs:
        if merged and sum(merged[-1]) == first:
            first, size = merged[-1][0], merged.pop()[1] + size
        merged.append((first, size))
    return merged


def _cut(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(first + begin, min(PIECE, size - begin)) for first, size in runs for begin in range(0, size, PIECE)]
