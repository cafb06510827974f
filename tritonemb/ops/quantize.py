"""`tritonemb::quantize_pack` and `quantize_unpack`: codec of quantized communication; see `kernels/quantize.py`."""

from typing import Any

import torch
from torch import Tensor

from tritonemb.kernels.packing import Packing, make_packing
from tritonemb.ops.registry import define, eager, kernel
from tritonemb.ops.row_groups import ID_DTYPES, plain_eager

__all__ = ["Packing", "make_packing", "quantize_pack", "quantize_unpack"]

MATRIX_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PACKING = "Tensor pieces, str codec, SymInt width, SymInt[] part_bytes, SymInt widest, SymInt vector, bool complete"
_OPTIONS = f"Tensor(a!) saturated, Tensor? scale, Tensor? rows, {_PACKING}"
assert [argument.split()[-1] for argument in _PACKING.split(", ")] == list(Packing._fields)


def quantize_pack(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """Encode a matrix as the message that `packing` describes: permuted, multiplied by `scale`, and quantized.

    Not differentiable: the backward of an exchange is another exchange. Raise TypeError or ValueError for unsupported
    dtypes or shapes, or several devices.

    Args:
        matrix: `[R, packing.width]` float32, float16 or bfloat16.
        packing: from `make_packing`, on the same device.
        saturated: int64 `[]`, counter of finite elements out of the range of the codec.
        scale: float32 `[]`, a loss scale.
        rows: int32 or int64 `[R]`, a permutation: the row of the message for each row of the matrix.

    Returns uint8 `[R * packing.row_bytes]`, of which part `p` has `R * packing.part_bytes[p]` bytes.
    """
    matrix = matrix.detach()
    _check(matrix, "matrix", MATRIX_DTYPES, packing, saturated, scale, rows)
    if matrix.dim() != 2 or matrix.shape[1] != packing.width:
        raise ValueError(f"matrix must be [rows, {packing.width}] like its packing, got {tuple(matrix.shape)}")
    if rows is not None and rows.shape[0] != matrix.shape[0]:
        raise ValueError(f"rows must have one element per row of the matrix, {matrix.shape[0]}, got {rows.shape[0]}")
    call = eager["quantize_pack"] if plain_eager(matrix, saturated, scale, rows) else torch.ops.tritonemb.quantize_pack
    return call(matrix, saturated, scale, rows, *packing)


def quantize_unpack(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Decode a message to a matrix: the inverse of `quantize_pack` with the same arguments, up to rounding.

    Args:
        message: uint8 `[M * packing.row_bytes]`.
        packing: from `make_packing`, on the same device, with every column in exactly one part.
        dtype: dtype of the result: float32, float16 or bfloat16.
        saturated: int64 `[]`, counter of finite elements out of the range of `dtype`.
        scale: float32 `[]`; the result is multiplied by its reciprocal.
        rows: int32 or int64 `[R]`: the row of the message for each row of the result; zeros for one out of range.

    Returns `[R, packing.width]`; without `rows`, `R = M`, or 0 if a row has no columns. Raise TypeError or ValueError
    for unsupported dtypes or shapes, several devices, and missing or duplicate columns.
    """
    _check(message, "message", (torch.uint8,), packing, saturated, scale, rows)
    if dtype not in MATRIX_DTYPES:
        raise TypeError(f"dtype must be one of {MATRIX_DTYPES}, got {dtype}")
    if message.dim() != 1 or message.shape[0] % max(1, packing.row_bytes):
        raise ValueError(f"message must be 1-D, of rows of {packing.row_bytes} bytes, got {tuple(message.shape)}")
    if not packing.complete:
        raise ValueError("unpacking needs a packing with every column exactly once; this one omits or repeats columns")
    is_eager = plain_eager(message, saturated, scale, rows)
    call = eager["quantize_unpack"] if is_eager else torch.ops.tritonemb.quantize_unpack
    return call(message, dtype, saturated, scale, rows, *packing)


def _check(
    source: Tensor, name: str, dtypes: tuple[torch.dtype, ...], packing: Packing, saturated: Tensor,
    scale: Tensor | None, rows: Tensor | None,
) -> None:  # fmt: skip
    arguments: list[tuple[str, Tensor | None, tuple[torch.dtype, ...], int | None]] = [
        (name, source, dtypes, None),
        ("packing", packing.pieces, (torch.int64,), 2),
        ("saturated", saturated, (torch.int64,), 0),
        ("scale", scale, (torch.float32,), 0),
        ("rows", rows, ID_DTYPES, 1),
    ]
    for argument, tensor, allowed, num_dims in arguments:
        if tensor is None:
            continue
        if tensor.dtype not in allowed:
            raise TypeError(f"{argument} must be {' or '.join(map(str, allowed))}, got {tensor.dtype}")
        if num_dims is not None and tensor.dim() != num_dims:
            raise ValueError(f"{argument} must have {num_dims} dimensions, got shape {tuple(tensor.shape)}")
        if tensor.device != source.device:
            raise ValueError(
                f"{argument} is on {tensor.device}, {name} on {source.device}; move one of them with .to()"
            )


def _unpack_fake(
    message: Tensor, dtype: torch.dtype, _s: Tensor, _scale: Tensor | None, rows: Tensor | None, *packing: Any
) -> Tensor:
    layout = Packing(*packing)
    num_rows = message.shape[0] // max(1, layout.row_bytes) if rows is None else rows.shape[0]
    return message.new_empty(num_rows, layout.width, dtype=dtype)


define(
    "quantize_pack",
    f"(Tensor matrix, {_OPTIONS}) -> Tensor",
    lambda matrix, saturated, scale, rows, *packing: kernel("quantize_pack", matrix.device)(
        matrix, Packing(*packing), saturated, scale, rows
    ),
    lambda matrix, _s, _c, _r, *packing: matrix.new_empty(
        matrix.shape[0] * Packing(*packing).row_bytes, dtype=torch.uint8
    ),
)
define(
    "quantize_unpack",
    f"(Tensor message, ScalarType dtype, {_OPTIONS}) -> Tensor",
    lambda message, dtype, saturated, scale, rows, *packing: kernel("quantize_unpack", message.device)(
        message, Packing(*packing), dtype, saturated, scale, rows
    ),
    _unpack_fake,
)
