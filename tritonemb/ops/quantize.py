"""`tritonemb::quantize_pack` and `quantize_unpack`: codec of quantized communication; see `kernels/quantize.py`.

Both raise TypeError or ValueError for unsupported dtypes or shapes, and several devices.
"""

import torch
from torch import Tensor

from tritonemb.kernels.packing import Packing, make_packing
from tritonemb.ops.registry import SHARED_ARGUMENTS, check_tensor, define
from tritonemb.ops.row_groups import ID_DTYPES

__all__ = ["Packing", "make_packing", "quantize_pack", "quantize_unpack"]

MATRIX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def quantize_pack(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """Encode a matrix as the message that `packing` describes: permuted, multiplied by `scale`, and quantized.

    Not differentiable: the backward of an exchange is another exchange.

    Args:
        matrix: `[R, packing.width]` float32, float16 or bfloat16.
        packing: from `make_packing`, on the same device.
        saturated: int64 `[]`, counter of finite elements out of the range of the codec.
        scale: float32 `[]`, a loss scale.
        rows: int32 or int64 `[R]`, a permutation: the row of the message for each row of the matrix.

    Returns uint8 `[R * packing.row_bytes]`, of which part `p` has `R * packing.part_bytes[p]` bytes.
    """
    matrix = matrix.detach()
    check_tensor("matrix", matrix, MATRIX_DTYPES, (None, packing.width), matrix.device)
    _check(matrix, packing, saturated, scale, rows)
    if rows is not None and rows.shape[0] != matrix.shape[0]:
        raise ValueError(f"rows must have one element per row of the matrix, {matrix.shape[0]}, got {rows.shape[0]}")
    return _pack(matrix, packing, saturated, scale, rows)


def quantize_unpack(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Decode a message to a matrix: the inverse of `quantize_pack` with the same arguments, up to rounding.

    Args:
        message: uint8 `[M * packing.row_bytes]`.
        packing: with every column in exactly one part, or else a ValueError is raised.
        dtype: dtype of the result: float32, float16 or bfloat16.
        saturated: int64 `[]`, counter of finite elements out of the range of `dtype`.
        scale: float32 `[]`; the result is multiplied by its reciprocal.
        rows: int32 or int64 `[R]`: the row of the message for each row of the result; zeros for one out of range.

    Returns `[R, packing.width]`; without `rows`, `R = M`, or 0 if a row has no columns.
    """
    check_tensor("message", message, (torch.uint8,), (None,), message.device)
    _check(message, packing, saturated, scale, rows)
    if dtype not in MATRIX_DTYPES:
        raise TypeError(f"dtype must be one of {MATRIX_DTYPES}, got {dtype}")
    if message.shape[0] % max(1, packing.row_bytes):
        raise ValueError(f"message must have rows of {packing.row_bytes} bytes, got {message.shape[0]} bytes")
    if not packing.complete:
        raise ValueError("unpacking needs a packing with every column exactly once; this one omits or repeats columns")
    return _unpack(message, packing, dtype, saturated, scale, rows)


def _check(source: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None, rows: Tensor | None) -> None:
    device = source.device
    check_tensor("packing", packing.pieces, (torch.int64,), (None, None), device)
    check_tensor("saturated", saturated, (torch.int64,), (), device)
    if scale is not None:
        check_tensor("scale", scale, (torch.float32,), (), device)
    if rows is not None:
        check_tensor("rows", rows, ID_DTYPES, (None,), device)


def _unpack_fake(
    message: Tensor, packing: Packing, dtype: torch.dtype, _s: Tensor, _scale: Tensor | None, rows: Tensor | None
) -> Tensor:
    num_rows = message.shape[0] // max(1, packing.row_bytes) if rows is None else rows.shape[0]
    return message.new_empty(num_rows, packing.width, dtype=dtype)


_COUNTED = "Tensor(a!) saturated, Tensor? scale, Tensor? rows"
SHARED_ARGUMENTS["*Packing"] = (
    Packing,
    "Tensor pieces, str codec, SymInt width, SymInt[] part_bytes, SymInt widest, SymInt vector, bool complete",
)
_pack = define(
    "quantize_pack",
    f"(Tensor matrix, *Packing, {_COUNTED}) -> Tensor",
    lambda matrix, packing, *_: matrix.new_empty(matrix.shape[0] * packing.row_bytes, dtype=torch.uint8),
)
_unpack = define("quantize_unpack", f"(Tensor message, *Packing, ScalarType dtype, {_COUNTED}) -> Tensor", _unpack_fake)
