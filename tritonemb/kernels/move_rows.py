"""Copy rows between tensors: `destination[to_rows[i]] = source[from_rows[i]]` for any number of pairs at once.

Rows are moved as bytes. A *pair* is a destination and a source of one dtype with rows of one width; they may be strided
from row to row, and pairs may differ in all of this. On a GPU a program copies a tile of rows of one pair: 16 bytes a
lane where the pair's rows begin and end at multiples of 16, else the largest unit that divides all other pairs' rows.

Bytes: 16 of indices a pair and row, and twice its row. Tensors in pinned host memory are read and written where they
are (unified addressing): such bytes cross the bus once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tritonemb.kernels.triton_utils import INTEGERS, cdiv, jit, launch, next_power_of_2, on_device, tl

TO, TO_PITCH, TO_ROWS, FROM, FROM_PITCH, FROM_ROWS, ROW_BYTES, IS_WIDE, PAIR_SIZE = (tl.constexpr(n) for n in range(9))
WIDE_BYTES = 16
WIDE_UNITS = 2048  # of 8 bytes, of a program of four warps: eight loads of 16 bytes a lane
NARROW_UNITS = 1024  # likewise of smaller ones: eight loads, each of which needs addresses of its own
MOST_COLUMNS = 64  # units of a row copied at once; longer rows take turns


@jit
def _rows(address, pitch, row, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the first unit of rows `[ROWS]`."""
    place = address + row * pitch
    if UNIT == 8:
        pointer = place.to(tl.pointer_type(tl.int64))
    elif UNIT == 4:
        pointer = place.to(tl.pointer_type(tl.int32))
    elif UNIT == 2:
        pointer = place.to(tl.pointer_type(tl.int16))
    else:
        pointer = place.to(tl.pointer_type(tl.int8))
    return tl.multiple_of(pointer, ALIGN)


@jit
def _copy(pair, to_row, from_row, inside, UNIT: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    to = _rows(tl.load(pair + TO), tl.load(pair + TO_PITCH), to_row, UNIT, ALIGN)
    source = _rows(tl.load(pair + FROM), tl.load(pair + FROM_PITCH), from_row, UNIT, ALIGN)
    # The number of units that rows have is a multiple of those that a lane moves at once.
    units = tl.multiple_of((tl.load(pair + ROW_BYTES) // UNIT).to(tl.int32), ALIGN // UNIT)
    for first in range(0, units, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (column[None, :] < units)
        tl.store(to[:, None] + column[None, :], tl.load(source[:, None] + column[None, :], mask=mask), mask=mask)


@jit(varying=["num_moves", "num_tiles"])
def _move_kernel(
    pairs, to_rows, from_rows, num_moves, num_tiles, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    WIDE_BLOCK: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tile `program_id % num_tiles` of pair `program_id // num_tiles`. UNIT, WIDE_BLOCK 0: no such pair."""
    program = tl.program_id(0)
    pair = pairs + program // num_tiles * PAIR_SIZE
    move = (program % num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    to_row = tl.load(to_rows + move, mask=move < num_moves, other=-1)
    from_row = tl.load(from_rows + move, mask=move < num_moves, other=-1)
    inside = (to_row >= 0) & (to_row < tl.load(pair + TO_ROWS))
    inside = inside & (from_row >= 0) & (from_row < tl.load(pair + FROM_ROWS))
    if WIDE_BLOCK == 0:
        _copy(pair, to_row, from_row, inside, UNIT, UNIT, BLOCK)
    elif UNIT == 0:
        _copy(pair, to_row, from_row, inside, 8, ALIGN, WIDE_BLOCK)
    else:
        if tl.load(pair + IS_WIDE) != 0:
            _copy(pair, to_row, from_row, inside, 8, ALIGN, WIDE_BLOCK)
        else:
            _copy(pair, to_row, from_row, inside, UNIT, UNIT, BLOCK)


def row_bytes(tensor: Tensor) -> int:
    """Bytes of a row: of one element if the tensor is 1-D."""
    return tensor.element_size() * (tensor.shape[1] if tensor.dim() == 2 else 1)


def describe(destination: Tensor, source: Tensor) -> tuple[list[int], int]:
    """What the kernel reads of a pair, but IS_WIDE; and the largest unit up to 16 bytes that it can be moved by."""
    size, numbers = row_bytes(source), []
    for tensor in (destination, source):
        numbers += [tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), tensor.shape[0]]
    return [*numbers, size], math.gcd(WIDE_BYTES, *numbers[:2], *numbers[3:5], size)


def move_rows_(destinations: Sequence[Tensor], sources: Sequence[Tensor], to_rows: Tensor, from_rows: Tensor) -> None:
    """One launch for all pairs. Arguments as in the reference.

    Nobody waits for the kernel, so whoever frees pinned host memory it uses must. Rows that a tensor does not have are
    left out.
    """
    described = [
        describe(*pair) for pair in zip(destinations, sources, strict=True) if row_bytes(pair[0]) and pair[0].numel()
    ]
    num_moves = to_rows.numel()
    if not described or num_moves == 0:
        return
    wide = [numbers[-1] for numbers, unit in described if unit == WIDE_BYTES]
    units = [unit for _, unit in described if unit < WIDE_BYTES]
    unit = math.gcd(*units)
    most = max([0, *[numbers[-1] // unit for numbers, other in described if other < WIDE_BYTES]]) if units else 0
    blocks = [min(MOST_COLUMNS, next_power_of_2(count)) if count else 0 for count in (most, max([0, *wide]) // 8)]
    rows = min(NARROW_UNITS // max(1, blocks[0]), WIDE_UNITS // max(1, blocks[1]))
    num_tiles = cdiv(num_moves, rows)
    pairs = [number for numbers, unit in described for number in (*numbers, int(unit == WIDE_BYTES))]
    launch(
        _move_kernel, (num_tiles * len(described),),
        on_device(pairs, to_rows.device), to_rows, from_rows, num_moves, num_tiles,
        UNIT=unit, BLOCK=blocks[0], WIDE_BLOCK=blocks[1], ALIGN=WIDE_BYTES if wide else 8, ROWS=rows,
    )  # fmt: skip


def move_rows_reference_(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], to_rows: Tensor, from_rows: Tensor
) -> None:
    """Pair by pair.

    `destinations` and `sources` come in pairs of one dtype (1, 2, 4 or 8 bytes an element) and row width, `[rows]` or
    `[rows, width]`; elements of a row stand side by side, rows any distance apart. A tensor may be both, but no row
    of it. With indices on a GPU, tensors in host memory are pinned. `to_rows`, `from_rows` are int64 `[n]`; a move with
    a negative one is skipped; `to_rows` are distinct otherwise.
    """
    moving = (to_rows >= 0) & (from_rows >= 0)
    to_rows, from_rows = to_rows[moving], from_rows[moving]
    for destination, source in zip(destinations, sources, strict=True):
        integers = INTEGERS[source.element_size()]
        taken = source.detach().view(integers)[from_rows.to(source.device)]
        destination.detach().view(integers)[to_rows.to(destination.device)] = taken.to(destination.device)
