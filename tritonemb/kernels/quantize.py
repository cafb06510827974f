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

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonemb.kernels.packing import LIMITS, ROW_PARAMETERS, Packing
from tritonemb.kernels.triton_utils import CODES, bits_of, cdiv, jit, launch, narrow, next_power_of_2, tl, widen
from tritonemb.types import CODECS

INT8_CODE = 5
_TILE = 2048  # elements per program; half as many unaligned ones, each of which needs registers for address and mask
_FIELDS, _INT8 = tl.constexpr(7), tl.constexpr(INT8_CODE)


@jit
def _scale_and_saturate(x, factor, mask, saturated, THRESHOLD, LARGEST):
    """Return `x · factor`, with finite elements of `x` from THRESHOLD on at ±LARGEST; count those in `mask`.

    `saturated` is None if no element can saturate.
    """
    scaled = x
    if factor is not None:
        scaled = x * factor
    if saturated is not None:
        is_saturated = (tl.abs(scaled) >= THRESHOLD) & (tl.abs(x) < float("inf"))
        scaled = tl.where(is_saturated, tl.where(scaled > 0, LARGEST, -LARGEST), scaled)
        count = tl.sum(tl.sum((is_saturated & mask).to(tl.int32), axis=1), axis=0)
        if count > 0:
            tl.atomic_add(saturated, count.to(tl.int64), sem="relaxed")
    return scaled


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
def _transfer_kernel(
    matrix, message, scales, pieces, rows, factor, saturated, matrix_stride, num_rows, num_message_rows, PACKS, MATRIX,
    CODE, THRESHOLD, LARGEST, VECTOR, ROWS, COLUMNS,
):  # fmt: skip
    """Encode a tile, ROWS rows of one piece, or decode it; rows that are not in the message become zeros."""
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
    # Codes of the tile.
    offset = tl.arange(0, COLUMNS)
    mask = in_message[:, None] & (offset < width)[None, :]
    codes = message + codes_base[:, None] + offset[None, :]
    if PACKS:
        # Load and scale; store codes, and scales and offsets of int8.
        row_offset = row * tl.multiple_of(tl.full((), 0, tl.int64) + matrix_stride, VECTOR) + column
        elements = matrix + row_offset[:, None] + offset[None, :]
        x = widen(tl.load(elements, mask=mask, other=0), MATRIX)
        if factor is not None:
            factor = tl.load(factor)
        x = _scale_and_saturate(x, factor, mask, saturated, THRESHOLD, LARGEST)
        if CODE == _INT8:
            int8_codes, row_scales, row_offsets = _row_codes(x, mask)
            tl.store(codes, int8_codes, mask=in_message[:, None] & (offset < num_codes)[None, :])
            tl.store(scales + scales_base, row_scales, mask=in_message)
            tl.store(scales + scales_base + 1, row_offsets, mask=in_message)
        else:
            tl.store(codes, narrow(x, CODE), mask=mask)
    else:
        # Decode, and undo the loss scale.
        x = tl.load(codes, mask=mask, other=0)
        if CODE == _INT8:
            row_scales = tl.load(scales + scales_base, mask=in_message, other=0.0)
            row_offsets = tl.load(scales + scales_base + 1, mask=in_message, other=0.0)
            x = x.to(tl.float32) * row_scales[:, None] + row_offsets[:, None]
        else:
            x = widen(x, CODE)
        if factor is not None:
            factor = tl.div_rn(1.0, tl.load(factor))
        x = _scale_and_saturate(x, factor, mask, saturated, THRESHOLD, LARGEST)
        row_offset = row * tl.multiple_of(tl.full((), 0, tl.int64) + matrix_stride, VECTOR) + column
        elements = matrix + row_offset[:, None] + offset[None, :]
        tl.store(elements, narrow(x, MATRIX), mask=valid[:, None] & (offset < width)[None, :])


def quantize_pack(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    message = torch.empty(matrix.shape[0] * packing.row_bytes, dtype=torch.uint8, device=matrix.device)
    _launch(True, matrix, message, packing, saturated, scale, rows)
    return message


def quantize_unpack(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    message = message.contiguous()
    num_rows = message.numel() // max(1, packing.row_bytes) if rows is None else rows.numel()
    matrix = torch.empty(num_rows, packing.width, dtype=dtype, device=message.device)
    _launch(False, matrix, message, packing, saturated, scale, rows)
    return matrix


def _launch(
    packs: bool, matrix: Tensor, message: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None,
    rows: Tensor | None,
) -> None:  # fmt: skip
    """Launch over tiles of rows and pieces; vectorize if all of them are aligned."""
    codec, num_rows = CODECS[packing.codec], matrix.shape[0]
    num_message_rows = message.numel() // max(1, packing.row_bytes)
    stride = matrix.stride(0) if num_rows > 1 else matrix.shape[1]
    aligned = matrix.data_ptr() % 16 == 0 and message.data_ptr() % 16 == 0 and stride % packing.vector == 0
    vector, COLUMNS = packing.vector if aligned else 1, next_power_of_2(packing.widest)
    ROWS = max(1, (_TILE if vector > 1 else _TILE // 2) // COLUMNS)
    source, target = (matrix.dtype, codec.dtype) if packs else (codec.dtype, matrix.dtype)
    is_counted = scale is not None or LIMITS[source] > LIMITS[target]
    launch(
        _transfer_kernel, (cdiv(num_rows, ROWS), packing.pieces.shape[0]),
        bits_of(matrix), bits_of(message.view(codec.dtype)), message.view(torch.float32) if codec.row_wise else message,
        packing.pieces, None if rows is None else rows.contiguous(), scale, saturated if is_counted else None,
        stride, num_rows, num_message_rows, PACKS=packs, MATRIX=CODES[matrix.dtype],
        CODE=INT8_CODE if codec.row_wise else CODES[codec.dtype], LARGEST=LIMITS[target][0],
        THRESHOLD=LIMITS[target][1], VECTOR=vector, ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip


def quantize_pack_reference(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """See `ops.quantize.quantize_pack`. Rows of the message that `rows` leaves out are undefined."""
    message = torch.empty(matrix.shape[0] * packing.row_bytes, dtype=torch.uint8, device=matrix.device)
    codec = CODECS[packing.codec]
    in_message = slice(None) if rows is None else (rows >= 0) & (rows < matrix.shape[0])
    targets = slice(None) if rows is None else rows[in_message]
    for column, width, num_codes, codes_view, scales_view in _views(message, packing, matrix.shape[0]):
        x = scale_and_saturate(matrix[in_message, column : column + width].float(), scale, codec.dtype, saturated)
        if codec.row_wise:
            codes, parameters = row_codes(x)
            codes_view[targets] = torch.nn.functional.pad(codes, (0, num_codes - width))
            scales_view[targets] = parameters.contiguous().view(torch.uint8)
        else:
            codes_view[targets] = (
                cast_by_torch(x, codec.dtype).clone(memory_format=torch.contiguous_format).view(torch.uint8)
            )
    return message


def quantize_unpack_reference(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    num_message_rows = message.numel() // max(1, packing.row_bytes)
    in_message = slice(None) if rows is None else (rows >= 0) & (rows < num_message_rows)
    message_rows = slice(None) if rows is None else rows[in_message]
    num_rows = num_message_rows if rows is None else rows.numel()
    codec, matrix = CODECS[packing.codec], torch.zeros(num_rows, packing.width, dtype=dtype, device=message.device)
    for column, width, _, codes_view, scales_view in _views(message, packing, num_message_rows):
        codes = codes_view[message_rows]
        if codec.row_wise:
            row_scale, row_offset = scales_view[message_rows].contiguous().view(torch.float32).split(1, dim=1)
            x = codes[:, :width].float() * row_scale + row_offset
        else:
            x = codes.contiguous().view(codec.dtype).float()
        x = scale_and_saturate(x, None if scale is None else scale.reciprocal(), dtype, saturated)
        matrix[in_message, column : column + width] = cast_by_torch(x, dtype)
    return matrix


def _views(message: Tensor, packing: Packing, num_rows: int) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """Yield for each piece: first column, columns, codes, and views of the bytes of its codes and scales, by row."""
    size = CODECS[packing.codec].dtype.itemsize
    for column, width, num_codes, start, first_code, stride, scales in packing.pieces.tolist():
        rows = message[start * size * num_rows : (start + stride) * size * num_rows].view(num_rows, stride * size)
        codes = rows[:, first_code * size : (first_code + num_codes) * size]
        yield column, width, num_codes, codes, rows[:, scales : scales + ROW_PARAMETERS]


def scale_and_saturate(x: Tensor, factor: Tensor | None, dtype: torch.dtype, saturated: Tensor) -> Tensor:
    """Return `x · factor`; finite elements of `x` that become too large for `dtype` saturate, and are counted."""
    largest, threshold = LIMITS[dtype]
    scaled = x if factor is None else x * factor
    if not scaled.numel() or bool((torch.stack(scaled.aminmax()).abs() < threshold).all()):  # false for NaN
        return scaled
    is_saturated = (scaled.abs() >= threshold) & x.isfinite()
    saturated += is_saturated.sum()
    return torch.where(is_saturated, torch.copysign(torch.full_like(scaled, largest), scaled), scaled)


def cast_by_torch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast float32 in the range of `dtype`; infinities become NaN in e4m3, which has none (PyTorch 2.13: 448)."""
    return (torch.where(x.isinf(), torch.nan, x) if dtype == torch.float8_e4m3fn else x).to(dtype)


def row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 codes of each row of `x` `[R, width]`, and its scale and offset `[R, 2]`."""
    is_finite = x.isfinite().all(1, keepdim=True)
    x = torch.where(is_finite, x, 0.0)
    smallest, largest = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    smallest = torch.where(smallest == 0, 0.0, smallest)
    extent = (largest - smallest).abs()
    steps = torch.full_like(extent, 255.0)  # a tensor: PyTorch divides a number as a product with the reciprocal
    inverse = steps / extent
    codes = torch.round((x - smallest) * torch.where(inverse.isinf(), 0.0, inverse)).to(torch.uint8)
    return codes, torch.where(is_finite, torch.cat([extent / steps, smallest], dim=1), torch.nan)
