"""CPU twin of `kernels/quantize.py`: each row of a piece is encoded or decoded in the L1 cache.

Float8 messages are encoded and decoded by PyTorch's operators, whose casts are vectorized; they are rare on a CPU.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonemb.kernels.cpu.jit import DTYPE_CODES, FEW_ELEMENTS, FLOAT32, inlined_uncounted, parallel
from tritonemb.kernels.cpu.random import narrow_row, widen_row
from tritonemb.kernels.cpu.simd import (
    copy_bytes,
    empty,
    float32_from_bits,
    float32_row,
    int32_row,
    row_size,
    uint8_row,
    uint16_row,
)
from tritonemb.kernels.packing import LIMITS, PIECE, Packing
from tritonemb.kernels.quantize import quantize_pack_reference as pack_by_torch
from tritonemb.kernels.quantize import quantize_unpack_reference as unpack_by_torch
from tritonemb.types import CODECS

_MAX_INT32, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_INT8 = np.int64(-1)  # code of int8 rows, beside the codes of dtypes


@inlined_uncounted
def _scale_and_saturate(row, factor, limits):
    """Multiply a row by the factor; finite elements from the threshold on saturate. Returns their number."""
    (largest, threshold), count = limits, 0
    for j in range(row.size):
        scaled = row[j] * factor
        saturates = abs(scaled) >= threshold and abs(row[j]) < np.float32(np.inf)
        count += 1 if saturates else 0
        row[j] = np.float32(np.copysign(largest, scaled)) if saturates else scaled
    return count


@inlined_uncounted
def _ordered(bits):
    """Map the bits of a float32 to an int32 in the order of the numbers, and back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & _MAX_INT32))


@inlined_uncounted
def _encode_int8(row, codes, parameters):
    """Write a row's codes, zeros after them, and its scale and offset; see `row_codes`."""
    # Least and largest element, and whether all are finite: of integers, whose loop is vectorized.
    bits, low, high, magnitude = int32_row(row.ctypes.data, row.size), _MAX_INT32, ~_MAX_INT32, np.int32(0)
    for j in range(bits.size):
        key = _ordered(bits[j])
        low, high = min(low, key), max(high, key)
        magnitude = max(magnitude, np.int32(bits[j] & _MAX_INT32))
    is_finite = magnitude < _INFINITY
    smallest = float32_from_bits(np.uint32(_ordered(low)))
    largest = float32_from_bits(np.uint32(_ordered(high)))
    smallest = np.float32(0) if smallest == 0 else smallest  # never -0
    # Codes: adding 2^23 rounds to an integer, in the low bits.
    extent = abs(largest - smallest)  # never -0
    inverse = np.float32(255) / extent
    inverse = inverse if inverse < np.float32(np.inf) else np.float32(0)
    for j in range(row.size):
        rounded = (row[j] - smallest) * inverse + np.float32(8388608)
        codes[j] = np.uint8(np.int32(rounded - np.float32(8388608))) if is_finite else np.uint8(0)
    for j in range(row.size, codes.size):
        codes[j] = np.uint8(0)
    parameters[0] = extent / np.float32(255) if is_finite else np.float32(np.nan)
    parameters[1] = smallest if is_finite else np.float32(np.nan)


@inlined_uncounted
def _transfer_row(packs, elements, codes, parameters, limits, buffer):
    """Encode elements as codes, or decode them; both are an address and a type. Returns how many saturate."""
    (width, num_codes, _), (factor, is_scaled, limits), saturated = parameters, limits, 0
    (source, source_type), (target, target_type) = (elements, codes) if packs else (codes, elements)
    if source_type == target_type and not is_scaled:
        copy_bytes(target, source, row_size(width, source_type))
        return saturated
    # As float32, in place if the result is float32.
    in_place = target_type == FLOAT32
    row = float32_row(target if in_place else np.int64(buffer.ctypes.data), width)
    if source_type == _INT8:
        int8_codes, scale_and_offset = uint8_row(source, width), float32_row(parameters[2], 2)
        for j in range(width):
            row[j] = np.float32(int8_codes[j]) * scale_and_offset[0] + scale_and_offset[1]
    elif source_type == FLOAT32:
        copy_bytes(np.int64(row.ctypes.data), source, width * 4)
    else:
        widen_row(uint16_row(source, width), source_type, row)
    saturated = _scale_and_saturate(row, factor, limits)
    if target_type == _INT8:
        _encode_int8(row, uint8_row(target, num_codes), float32_row(parameters[2], 2))
    elif not in_place:
        narrow_row(row, target_type, uint16_row(target, width))
    return saturated


@parallel
def _transfer(task, num_tasks, packs, matrix, message, limits, saturated):
    """Encode the task's rows of the matrix, or decode them; rows that are not in the message become zeros."""
    (elements, stride, dtype, num_rows), (codes, kind, num_message_rows, pieces, rows) = matrix, message
    buffer, num_saturated = empty(PIECE, np.float32), np.int64(0)
    code_size = np.int64(1) if kind == _INT8 else row_size(1, kind)
    for row in range(num_rows * task // num_tasks, num_rows * (task + 1) // num_tasks):
        message_row = rows[row] if rows.size else row
        in_message = 0 <= message_row < num_message_rows
        for piece in range(pieces.shape[0]):
            element = elements + (row * stride + pieces[piece, 0]) * row_size(1, dtype)
            part = codes + pieces[piece, 3] * code_size * num_message_rows
            base = part + message_row * pieces[piece, 5] * code_size
            parameters = pieces[piece, 1], pieces[piece, 2], base + pieces[piece, 6]
            code = base + pieces[piece, 4] * code_size
            if in_message:
                num_saturated += _transfer_row(packs, (element, dtype), (code, kind), parameters, limits, buffer)
            elif not packs:
                zeros = uint8_row(element, row_size(pieces[piece, 1], dtype))
                for j in range(zeros.size):
                    zeros[j] = np.uint8(0)
    saturated[task] = num_saturated


def quantize_pack(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """See `kernels/quantize.py`."""
    if _is_float8(packing):
        return pack_by_torch(matrix, packing, saturated, scale, rows)
    matrix = matrix if matrix.stride(1) == 1 else matrix.contiguous()
    message = matrix.new_empty(matrix.shape[0] * packing.row_bytes, dtype=torch.uint8)
    _run(True, matrix, message, packing, saturated, scale, rows)
    return message


def quantize_unpack(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Any = None, rows: Any = None
) -> Tensor:
    """See `kernels/quantize.py`."""
    if _is_float8(packing):
        return unpack_by_torch(message, packing, dtype, saturated, scale, rows)
    message = message.contiguous()
    num_rows = message.numel() // max(1, packing.row_bytes) if rows is None else rows.numel()
    matrix = message.new_empty(num_rows, packing.width, dtype=dtype)
    _run(False, matrix, message, packing, saturated, scale, rows)
    return matrix


def _is_float8(packing: Packing) -> bool:
    return CODECS[packing.codec].dtype.itemsize == 1 and not CODECS[packing.codec].row_wise


def _run(
    packs: bool, matrix: Tensor, message: Tensor, packing: Packing, saturated: Tensor, scale: Any, rows: Any
) -> None:
    codec, num_rows = CODECS[packing.codec], matrix.shape[0]
    kind = int(_INT8) if codec.row_wise else DTYPE_CODES[codec.dtype]
    stride = matrix.stride(0) if num_rows > 1 else matrix.shape[1]
    row_map = np.empty(0, np.int64) if rows is None else rows.long().contiguous().numpy()
    factor = 1.0 if scale is None else float(scale if packs else scale.reciprocal())
    limits: Any = tuple(map(np.float32, LIMITS[codec.dtype if packs else matrix.dtype]))
    num_tasks = 1 if matrix.numel() < FEW_ELEMENTS else torch.get_num_threads()
    counts = np.zeros(num_tasks, np.int64)
    places = matrix.data_ptr(), stride, DTYPE_CODES[matrix.dtype], num_rows
    num_message_rows = message.numel() // max(1, packing.row_bytes)
    codes = message.data_ptr(), kind, num_message_rows, packing.pieces.numpy(), row_map
    scaling = np.float32(factor), scale is not None, limits
    _transfer(num_tasks, num_tasks, num_tasks, packs, places, codes, scaling, counts)
    saturated += int(counts.sum())
