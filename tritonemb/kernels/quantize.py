"""Codecs for quantized communication, fused with the permutation of columns and rows that an all-to-all needs.

`packing` maps columns to the message (`kernels/packing.py`). An element `x` of the matrix is encoded as
`code(float32(x) · scale)` and decoded as `value(code) · (1 / scale)`; `scale` is a loss scale, 1 if absent.

- "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2": to nearest, ties to even. Finite values saturate at the largest value.
  NaN stays NaN, infinities stay infinite (e4m3 has none: NaN), as in PyTorch's casts.
- "int8": row-wise, each row of a piece separately, as FBGEMM's fused 8-bit rows (Guan et al., 2019, and
  `FloatToFused8BitRowwiseQuantized`): offset = min, scale = (max - min) / 255, code = round((x - min) · 255 / (max -
  min)); decoded `code · scale + offset`. Magnitudes saturate at 2^125, so that ranges are finite. A range below
  255 / (largest float32) counts as 0. A row with a NaN or an infinity is decoded as NaN: its codes could hide them.

Each finite element that saturates, in the sender or the receiver, adds 1 to `saturated` (int64).
Bytes: `R · width · (element size + code size)`, and with "int8" 8 per row of a piece.
"""

from typing import Any

import torch
from torch import Tensor

from tritonemb.kernels.cpu.quantize import quantize_pack as quantize_pack_reference  # noqa: F401
from tritonemb.kernels.cpu.quantize import quantize_unpack as quantize_unpack_reference  # noqa: F401
from tritonemb.kernels.packing import LIMITS, Packing
from tritonemb.kernels.triton_utils import CODES, bits_of, cdiv, jit, launch, narrow, next_power_of_2, tl, widen
from tritonemb.types import CODECS

INT8_CODE = 5
_TILE = 2048  # elements per program; half as many unaligned ones, each of which needs registers for address and mask
_FIELDS, _INT8 = tl.constexpr(7), tl.constexpr(INT8_CODE)


@jit
def _locate(pieces, rows, num_rows, num_message_rows, VECTOR: tl.constexpr, ROWS: tl.constexpr):
    """Locate this program's tile: its rows of the matrix, and the masks of those in the matrix and in the message; its
    piece's first column, columns and codes; offsets of each row's codes and scale in the message, in codes and floats.
    """
    # Rows, of the matrix and of the message.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    message_row = row
    in_message = valid
    if rows is not None:
        message_row = tl.load(rows + row, mask=valid, other=-1).to(tl.int64)
        in_message = (message_row >= 0) & (message_row < num_message_rows)
    # Fields of the piece; all but the scales' are multiples of VECTOR.
    piece = pieces + tl.program_id(1) * _FIELDS
    column = tl.multiple_of(tl.load(piece), VECTOR)
    width = tl.multiple_of(tl.load(piece + 1), VECTOR)
    num_codes = tl.multiple_of(tl.load(piece + 2), VECTOR)
    part_base = tl.multiple_of(tl.load(piece + 3), VECTOR) * num_message_rows
    stride = tl.multiple_of(tl.load(piece + 5), VECTOR)
    codes_base = part_base + tl.multiple_of(tl.load(piece + 4), VECTOR) + message_row * stride
    scales_base = (part_base + tl.load(piece + 6) + message_row * stride) // 4
    return row, valid, in_message, column, width, num_codes, codes_base, scales_base


@jit
def _scale_and_saturate(x, factor, COUNTED: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr):
    """Return `x · factor`, with finite elements of `x` from THRESHOLD on at ±LARGEST; and a mask of them."""
    scaled = x
    if factor is not None:
        scaled = x * factor
    is_saturated = (tl.abs(scaled) >= THRESHOLD) & (tl.abs(x) < float("inf"))
    if COUNTED:
        scaled = tl.where(is_saturated, tl.where(scaled > 0, LARGEST, -LARGEST), scaled)
    return scaled, is_saturated


@jit
def _count(is_saturated, saturated):
    count = tl.sum(tl.sum(is_saturated.to(tl.int32), axis=1), axis=0)
    if count > 0:
        tl.atomic_add(saturated, count.to(tl.int64), sem="relaxed")


@jit
def _row_codes(x, mask):
    """Return the int8 codes of a tile, whose elements outside `mask` do not count, and its rows' scales and offsets."""
    is_finite = tl.abs(x) < float("inf")
    largest = tl.max(tl.where(mask, tl.where(is_finite, x, float("inf")), float("-inf")), axis=1)
    smallest = tl.min(tl.where(mask & is_finite, x, float("inf")), axis=1)
    smallest = tl.where(smallest == 0, 0.0, smallest)  # never -0
    has_nonfinite = largest == float("inf")
    extent = tl.abs(largest - smallest)  # never -0
    steps = tl.full(extent.shape, 255.0, tl.float32)
    inverse = tl.div_rn(steps, extent)
    inverse = tl.where(inverse < float("inf"), inverse, 0.0)
    # Adding 2^23 rounds to an integer, in the low bits.
    rounded = (x - smallest[:, None]) * inverse[:, None] + 8388608.0
    codes = tl.where(mask & (has_nonfinite == 0)[:, None], rounded.to(tl.int32, bitcast=True) & 0xFF, 0)
    scales = tl.where(has_nonfinite, float("nan"), tl.div_rn(extent, steps))
    return codes.to(tl.uint8), scales, tl.where(has_nonfinite, float("nan"), smallest)


@jit(varying=["num_rows", "num_message_rows"])
def _pack_kernel(
    matrix, message, scales, pieces, rows, factor, saturated, matrix_stride, num_rows, num_message_rows,
    MATRIX: tl.constexpr, CODE: tl.constexpr, COUNTED: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, _, in_message, column, width, num_codes, codes_base, scales_base = _locate(
        pieces, rows, num_rows, num_message_rows, VECTOR, ROWS
    )
    # Load and scale a tile: ROWS rows of one piece.
    offset = tl.arange(0, COLUMNS)
    mask = in_message[:, None] & (offset < width)[None, :]
    row_offset = row * tl.multiple_of(tl.full((), 0, tl.int64) + matrix_stride, VECTOR) + column
    x = widen(tl.load(matrix + row_offset[:, None] + offset[None, :], mask=mask, other=0), MATRIX)
    if factor is not None:
        factor = tl.load(factor)
    x, is_saturated = _scale_and_saturate(x, factor, COUNTED, THRESHOLD, LARGEST)
    if COUNTED:
        _count(is_saturated & mask, saturated)
    # Store codes, and scales and offsets of int8.
    targets = message + codes_base[:, None] + offset[None, :]
    if CODE == _INT8:
        codes, row_scales, row_offsets = _row_codes(x, mask)
        tl.store(targets, codes, mask=in_message[:, None] & (offset < num_codes)[None, :])
        tl.store(scales + scales_base, row_scales, mask=in_message)
        tl.store(scales + scales_base + 1, row_offsets, mask=in_message)
    else:
        tl.store(targets, narrow(x, CODE), mask=mask)


@jit(varying=["num_rows", "num_message_rows"])
def _unpack_kernel(
    matrix, message, scales, pieces, rows, factor, saturated, matrix_stride, num_rows, num_message_rows,
    MATRIX: tl.constexpr, CODE: tl.constexpr, COUNTED: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, valid, in_message, column, width, _, codes_base, scales_base = _locate(
        pieces, rows, num_rows, num_message_rows, VECTOR, ROWS
    )
    # Load and decode a tile: ROWS rows of one piece; rows that are not in the message become zeros.
    offset = tl.arange(0, COLUMNS)
    mask = in_message[:, None] & (offset < width)[None, :]
    codes = tl.load(message + codes_base[:, None] + offset[None, :], mask=mask, other=0)
    if CODE == _INT8:
        row_scales = tl.load(scales + scales_base, mask=in_message, other=0.0)
        row_offsets = tl.load(scales + scales_base + 1, mask=in_message, other=0.0)
        x = codes.to(tl.float32) * row_scales[:, None] + row_offsets[:, None]
    else:
        x = widen(codes, CODE)
    # Undo the loss scale.
    if factor is not None:
        factor = tl.div_rn(1.0, tl.load(factor))
    x, is_saturated = _scale_and_saturate(x, factor, COUNTED, THRESHOLD, LARGEST)
    if COUNTED:
        _count(is_saturated & mask, saturated)
    row_offset = row * tl.multiple_of(tl.full((), 0, tl.int64) + matrix_stride, VECTOR) + column
    targets = matrix + row_offset[:, None] + offset[None, :]
    tl.store(targets, narrow(x, MATRIX), mask=valid[:, None] & (offset < width)[None, :])


def quantize_pack(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """See `ops.quantize.quantize_pack`."""
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    num_rows = matrix.shape[0]
    message = torch.empty(num_rows * packing.row_bytes, dtype=torch.uint8, device=matrix.device)
    dtype = CODECS[packing.codec].dtype
    counted = scale is not None or LIMITS[matrix.dtype] > LIMITS[dtype]
    _launch(_pack_kernel, matrix, message, packing, num_rows, saturated, scale, rows, dtype, counted)
    return message


def quantize_unpack(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.quantize.quantize_unpack`."""
    message = message.contiguous()
    num_message_rows = message.numel() // max(1, packing.row_bytes)
    num_rows = num_message_rows if rows is None else rows.numel()
    matrix = torch.empty(num_rows, packing.width, dtype=dtype, device=message.device)
    counted = scale is not None or LIMITS[CODECS[packing.codec].dtype] > LIMITS[dtype]
    _launch(_unpack_kernel, matrix, message, packing, num_message_rows, saturated, scale, rows, dtype, counted)
    return matrix


def _launch(
    kernel: Any, matrix: Tensor, message: Tensor, packing: Packing, num_message_rows: int, saturated: Tensor,
    scale: Tensor | None, rows: Tensor | None, written: torch.dtype, counted: bool,
) -> None:  # fmt: skip
    """Launch a kernel over tiles of rows and pieces; vectorize if all of them are aligned."""
    codec, num_rows = CODECS[packing.codec], matrix.shape[0]
    stride = matrix.stride(0) if num_rows > 1 else matrix.shape[1]
    aligned = matrix.data_ptr() % 16 == 0 and message.data_ptr() % 16 == 0 and stride % packing.vector == 0
    vector = packing.vector if aligned else 1
    COLUMNS = next_power_of_2(packing.widest)
    ROWS = max(1, (_TILE if vector > 1 else _TILE // 2) // COLUMNS)
    launch(
        kernel, (cdiv(num_rows, ROWS), packing.pieces.shape[0]),
        bits_of(matrix), bits_of(message.view(codec.dtype)), message.view(torch.float32) if codec.row_wise else message,
        packing.pieces, None if rows is None else rows.contiguous(), scale, saturated,
        stride, num_rows, num_message_rows,
        MATRIX=CODES[matrix.dtype], CODE=INT8_CODE if codec.row_wise else CODES[codec.dtype], COUNTED=counted,
        LARGEST=LIMITS[written][0], THRESHOLD=LIMITS[written][1],
        VECTOR=vector, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
