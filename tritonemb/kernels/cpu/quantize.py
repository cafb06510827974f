"""The codecs of `kernels/quantize.py` by PyTorch's casts and copies of whole pieces: for CPUs, and the reference."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonemb.kernels.packing import LIMITS, ROW_PARAMETERS, Packing
from tritonemb.types import CODECS


def quantize_pack(
    matrix: Tensor, packing: Packing, saturated: Tensor, scale: Tensor | None = None, rows: Tensor | None = None
) -> Tensor:
    """See `ops.quantize.quantize_pack`. Rows of the message that `rows` leaves out hold anything."""
    message = torch.empty(matrix.shape[0] * packing.row_bytes, dtype=torch.uint8, device=matrix.device)
    codec = CODECS[packing.codec]
    inside = slice(None) if rows is None else (rows >= 0) & (rows < matrix.shape[0])
    to = slice(None) if rows is None else rows[inside]
    for column, width, num_codes, codes_view, scales_view in _views(message, packing, matrix.shape[0]):
        x = scaled(matrix[inside, column : column + width].float(), scale, codec.dtype, saturated)
        if codec.row_wise:
            codes, parameters = row_codes(x)
            codes_view[to] = torch.nn.functional.pad(codes, (0, num_codes - width))
            scales_view[to] = parameters.contiguous().view(torch.uint8)
        else:
            codes_view[to] = narrowed(x, codec.dtype).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return message


def quantize_unpack(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.quantize.quantize_unpack`."""
    num_message_rows = message.numel() // max(1, packing.row_bytes)
    inside = slice(None) if rows is None else (rows >= 0) & (rows < num_message_rows)
    source = slice(None) if rows is None else rows[inside]
    num_rows = num_message_rows if rows is None else rows.numel()
    codec, matrix = CODECS[packing.codec], torch.zeros(num_rows, packing.width, dtype=dtype, device=message.device)
    for column, width, _, codes_view, scales_view in _views(message, packing, num_message_rows):
        codes = codes_view[source]
        if codec.row_wise:
            row_scale, row_offset = scales_view[source].contiguous().view(torch.float32).split(1, dim=1)
            x = codes[:, :width].float() * row_scale + row_offset
        else:
            x = codes.contiguous().view(codec.dtype).float()
        x = scaled(x, None if scale is None else scale.reciprocal(), dtype, saturated)
        matrix[inside, column : column + width] = narrowed(x, dtype)
    return matrix


def _views(message: Tensor, packing: Packing, num_rows: int) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """For each piece: first column, columns, codes, and the bytes of its codes and of its rows' scales, by row."""
    size = CODECS[packing.codec].dtype.itemsize
    for column, width, num_codes, part, first, stride, scales in packing.pieces.tolist():
        rows = message[part * size * num_rows : (part + stride) * size * num_rows].view(num_rows, stride * size)
        codes = rows[:, first * size : (first + num_codes) * size]
        yield column, width, num_codes, codes, rows[:, scales : scales + ROW_PARAMETERS]


def scaled(x: Tensor, factor: Tensor | None, dtype: torch.dtype, saturated: Tensor) -> Tensor:
    """`x · factor`; what is finite in `x` but then too large for `dtype` is kept at its largest value, and counted."""
    largest, saturation_threshold = LIMITS[dtype]
    y = x if factor is None else x * factor
    if not y.numel() or bool((torch.stack(y.aminmax()).abs() < saturation_threshold).all()):  # false if one is NaN
        return y
    lost = (y.abs() >= saturation_threshold) & x.isfinite()
    saturated += lost.sum()
    return torch.where(lost, torch.copysign(torch.full_like(y, largest), y), y)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 to `dtype`, which it fits; infinities become NaN where there are none (PyTorch 2.13 makes them 448)."""
    return (torch.where(x.isinf(), torch.nan, x) if dtype == torch.float8_e4m3fn else x).to(dtype)


def row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes of each row of `x` `[R, width]`, and its scale and offset `[R, 2]`."""
    good = x.isfinite().all(1, keepdim=True)
    x = torch.where(good, x, 0.0)
    smallest, largest = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    smallest = torch.where(smallest == 0, 0.0, smallest)
    extent = (largest - smallest).abs()
    steps = torch.full_like(extent, 255.0)  # a number over a tensor would be a product with its reciprocal
    inverse = steps / extent
    codes = torch.round((x - smallest) * torch.where(inverse.isinf(), 0.0, inverse)).to(torch.uint8)
    return codes, torch.where(good, torch.cat([extent / steps, smallest], dim=1), torch.nan)
