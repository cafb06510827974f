"""Layout of a matrix's columns in a message between ranks: a small table, which the codecs of `quantize` read.

A message of `M` rows is the concatenation of one part per rank. A part holds, row by row, the codes of its columns, in
an order of its own; with codec "int8" also up to 3 zero bytes (to a multiple of 4) and a float32 scale and offset per
piece. A packing does not depend on `M`: it is built once, and serves batches of every size.

The exchanges that use it, with `R` rows per rank and one all-to-all in between:

    pooled, forward    one part with all columns   →   one part per rank, its tables' columns, to their final positions
    pooled, backward   one part per rank           →   one part with all columns
    sequences          one part with all columns   →   the same; `rows` maps rows of the matrix to rows of the message
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonemb.types import CODECS, Device

# By dtype of an element on the wire: its largest value, and the least magnitude that does not round to it or below.
LIMITS = {codec.dtype: (codec.largest, codec.saturation_threshold) for codec in CODECS.values()}
PIECE = 512  # columns at most; the step of int8 codes is the range of one piece of a row over 255
ROW_PARAMETERS = 8  # bytes: scale and offset, float32

COLUMN, WIDTH, CODES, PART, FIRST, STRIDE, PARAMETERS = range(7)  # columns of `pieces`


class Packing(NamedTuple):
    """Correspondence of a matrix `[R, width]` and a message of `M` rows (`M = R` without a row map).

    `pieces` is int64 `[S, 7]`, each of at most `PIECE` columns: first column; columns; codes (columns, and the zero
    bytes after a row's last piece); and, in codes: start of the part divided by `M`, first code in a row of the part,
    length of such a row, position of the piece's scale and offset in it (codec "int8", else 0). `part_bytes`: bytes
    per row of each part; the message's split sizes are `M` times these. `widest`: largest number of codes of a piece.
    `vector`: a power of two ≤ 16 that divides all first columns, numbers and positions of codes. `complete`: each
    column is in exactly one piece.
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
        """Bytes per row, summed over the parts."""
        return sum(self.part_bytes)


def make_packing(parts: Sequence[Sequence[tuple[int, int]]], width: int, codec: str, device: Device = None) -> Packing:
    """Lay out a matrix of `width` columns as a message. ValueError for an unknown codec, or columns out of range.

    `parts` has for each rank the runs of columns in its part, in order, as (first column, number of columns). With
    codec "int8" each run is quantized separately (`PIECE` columns at a time); pass one run per table.
    """
    # Check the arguments.
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}; expected one of {sorted(CODECS)}")
    for part, runs in enumerate(parts):
        for column, num_columns in runs:
            if column < 0 or num_columns < 1 or column + num_columns > width:
                raise ValueError(
                    f"part {part}: {num_columns} columns from column {column} on are not in a matrix of {width} columns"
                )
    # A row of a part: codes, padding to the alignment of the float32 parameters, parameters.
    row_wise, code_bytes = CODECS[codec].row_wise, CODECS[codec].dtype.itemsize
    alignment = 4 if row_wise else 1
    pieces: list[list[int]] = []
    part_bytes: list[int] = []
    for runs in parts:
        split = _split(runs if row_wise else _merge(runs))
        num_codes = sum(num_columns for _, num_columns in split)
        padded_codes = -(-num_codes // alignment) * alignment
        row_bytes = padded_codes * code_bytes + (ROW_PARAMETERS * len(split) if row_wise else 0)
        start, first_code = sum(part_bytes), 0
        for index, (column, num_columns) in enumerate(split):
            codes = num_columns + (padded_codes - num_codes if index == len(split) - 1 else 0)
            parameters = padded_codes + ROW_PARAMETERS * index if row_wise else 0
            lengths = column, num_columns, codes
            pieces.append([*lengths, start // code_bytes, first_code, row_bytes // code_bytes, parameters])
            first_code += num_columns
        part_bytes.append(row_bytes)
    fields = torch.tensor(pieces, dtype=torch.int64, device=device).reshape(-1, 7)
    widest = max([1, *[piece[CODES] for piece in pieces]])
    vector = math.gcd(16, *(number for piece in pieces for number in piece[:PARAMETERS]))
    columns = sorted(column for p in pieces for column in range(p[COLUMN], p[COLUMN] + p[WIDTH]))
    return Packing(fields, codec, width, tuple(part_bytes), widest, vector, complete=columns == [*range(width)])


def _merge(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, size in runs:
        if merged and sum(merged[-1]) == first:
            first, size = merged[-1][0], merged.pop()[1] + size
        merged.append((first, size))
    return merged


def _split(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(first + begin, min(PIECE, size - begin)) for first, size in runs for begin in range(0, size, PIECE)]
