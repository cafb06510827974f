"""CPU twin and reference of `kernels/quantize.py`, by PyTorch's casts and copies of whole pieces."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonemb.kernels.packing import LIMITS, ROW_PARAMETERS, Packing
from tritonemb.types import CODECS


def quantize_pack(
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
            codes_view[targets] = narrow(x, codec.dtype).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return message


def quantize_unpack(
    message: Tensor, packing: Packing, dtype: torch.dtype, saturated: Tensor, scale: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `ops.quantize.quantize_unpack`."""
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
        matrix[in_message, column : column + width] = narrow(x, dtype)
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


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
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
