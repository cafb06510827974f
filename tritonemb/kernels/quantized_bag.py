"""Embedding bags of tables with quantized rows, for inference: `embedding_bag` of the decoded rows, to the bit.

A row is FBGEMM's (`nbit`) on a CPU: scale and bias in float16, then the codes of its columns, 8, 4 or 2 bits each, from
the lowest bits of a byte on, without padding between rows. A column is `scale · code + bias` in float32. Kernels of
`embedding_bag.py` read such rows as well. Bytes: `4 + ⌈dim · bits / 8⌉` per row, `8 · N` of ids, and the output.

Rows are quantized between their minimum and maximum or, by the greedy search of Guan et al. (Post-training 4-bit
quantization on embedding tables, https://arxiv.org/abs/1911.02079), in the part of that range with the least squared
error: steps of 1/200 of the range, each from the end that leaves the smaller error, down to 84 % of it.

Ids of tables of `INDEXED` bits are addresses of rows, of 2^63 - 1 in the layout: these rows may differ in their bits.
"""

import math
from collections.abc import Sequence
from ctypes import string_at

import torch
from torch import Tensor

from tritonemb.kernels.by_torch import embedding_bag as look_up_floats
from tritonemb.kernels.by_torch import lookups_of
from tritonemb.kernels.embedding_bag import look_up
from tritonemb.kernels.triton_utils import TablesOfDtype, alignment_of
from tritonemb.layout import ADDRESS_BITS, HEADER_BYTES, INDEXED, ROW_DIM, Batch, Layout, cached_fact

SEARCH_STEPS = 200  # of a row's range: those of ATen and FBGEMM, after the paper's
SEARCHED_STEPS = 32  # 16 % of the range
CHUNK_ELEMENTS = 1 << 17  # quantized at once: a search passes 60 times over them in the L2 cache
MAX_FLOAT16 = 65504.0


def quantized_bag(
    tables: Sequence[Tensor], bits: Sequence[int], batch: Batch, layout: Layout, check_bounds: bool, dtype: torch.dtype
) -> Tensor:
    """Launch once per number of bits. Arguments as in the reference; errors as of `embedding_bag`."""
    return look_up(cached_fact(tables, _by_bits, tuple(bits), layout), batch, layout, check_bounds, dtype)


def _by_bits(tables: Sequence[Tensor], bits: tuple[int, ...], layout: Layout) -> list[TablesOfDtype]:
    dims, groups = layout.tables[:, ROW_DIM].tolist(), []
    for count in sorted(set(bits)):
        members = [index for index, table_bits in enumerate(bits) if table_bits == count]
        starts = [1 if count == INDEXED else table.data_ptr() for table in tables]  # 1: unused, but not 0
        addresses = tuple(starts[index] if index in members else 0 for index in range(len(tables)))
        alignment, max_dim = alignment_of([tables[index] for index in members]), max(dims[index] for index in members)
        groups.append(TablesOfDtype(torch.float32, addresses, alignment, math.gcd(4, *dims), max_dim, count))
    return groups


def quantized_bag_reference(
    tables: Sequence[Tensor], bits: Sequence[int], batch: Batch, layout: Layout, check_bounds: bool, dtype: torch.dtype
) -> Tensor:
    """Look up `tables` `[T]` of uint8 rows with `bits` `[T]`; `batch` and result as those of `embedding_bag`."""
    (addresses, offsets, sample_weights), dims = batch, layout.tables[:, ROW_DIM].tolist()
    values, size, by_table = addresses.clone(), addresses.numel(), zip(tables, bits, dims, strict=True)
    weights = [torch.zeros(size, n) if b == INDEXED else dequantize_rows(rows, b, n) for rows, b, n in by_table]
    for table, positions, *_ in lookups_of(offsets, None, layout, torch.float32) if INDEXED in bits else ():
        for position in positions.tolist() if bits[table] == INDEXED else ():  # one row per position
            count, address = divmod(int(addresses[position]), 1 << ADDRESS_BITS)
            row = torch.tensor([[*string_at(address, row_bytes_of(dims[table], count))]], dtype=torch.uint8)
            weights[table][position], values[position] = dequantize_rows(row, count, dims[table])[0], position
    return look_up_floats(weights, values, offsets, sample_weights, layout, check_bounds, dtype)


def row_bytes_of(dim: int, bits: int) -> int:
    return HEADER_BYTES + -(-dim * bits // 8)


def quantize_rows(weight: Tensor, bits: int, search: bool) -> Tensor:
    """Quantize rows, uint8 `[rows, 4 + ⌈dim · bits / 8⌉]`, with or without a search for their ranges.

    ValueError for values that are not finite, or beyond float16.
    """
    num_rows, dim = weight.shape
    rows = torch.empty(num_rows, row_bytes_of(dim, bits), dtype=torch.uint8, device=weight.device)
    size = max(1, CHUNK_ELEMENTS // max(1, dim))
    for source, target in zip(weight.detach().split(size), rows.split(size), strict=True):
        values = source.float()
        if not bool((values.abs() <= MAX_FLOAT16).all()):
            raise ValueError("rows have values that are not finite or exceed float16, 65504; they cannot be quantized")
        low, high = _search(values, bits) if search else values.aminmax(dim=1, keepdim=True)
        _encode(values, *_parameters(low, high, bits), bits, target)
    return rows


def _parameters(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scale and bias, float16 `[rows, 1]`, of ranges."""
    bias = low.half()
    extent = high - bias.float()
    scale = (extent / (2**bits - 1)).half()
    # The next float16 if the largest value would need a larger code: float16 has few digits below 2^-14.
    scale = torch.where(extent > scale.float() * (2**bits - 0.5), (scale.view(torch.int16) + 1).view(torch.half), scale)
    return torch.where(scale <= 0, 1, scale), bias  # no value differs from the bias


def _codes(values: Tensor, scale: Tensor, bias: Tensor, bits: int) -> Tensor:
    """Return codes, float32 `[rows, dim]`."""
    inverse = 1 / scale.float()
    return ((values - bias.float()) * inverse).round_().clamp_(0, 2**bits - 1)


def _encode(values: Tensor, scale: Tensor, bias: Tensor, bits: int, out: Tensor) -> None:
    codes, per_byte = _codes(values, scale, bias, bits).to(torch.uint8), 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -values.shape[1] % per_byte))
    out[:, :HEADER_BYTES] = _view(torch.cat([scale, bias], 1), torch.uint8)
    out[:, HEADER_BYTES:] = sum(codes[:, part::per_byte] << part * bits for part in range(per_byte))


def _search(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Search the ranges of rows greedily; return their ends, float32 `[rows, 1]`."""

    def error_of(low: Tensor, high: Tensor) -> Tensor:
        scale, bias = _parameters(low, high, bits)
        decoded = _codes(values, scale, bias, bits).mul_(scale.float()).add_(bias.float())
        return decoded.sub_(values).square_().sum(0, keepdim=True)

    values = values.T.contiguous()  # PyTorch's loops over the last dimension are short for rows
    low, high = values.aminmax(dim=0, keepdim=True)
    best_low, best_high, step, error = low, high, (high - low) / SEARCH_STEPS, error_of(low, high)
    for _ in range(SEARCHED_STEPS):
        error_above, error_below = error_of(low + step, high), error_of(low, high - step)
        raises_low = error_above < error_below
        low, high = torch.where(raises_low, low + step, low), torch.where(raises_low, high, high - step)
        new_error = torch.minimum(error_above, error_below)
        is_better = new_error < error
        best_low, best_high = torch.where(is_better, low, best_low), torch.where(is_better, high, best_high)
        error = torch.minimum(error, new_error)
    return best_low.T, best_high.T


def dequantize_rows(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Decode rows, float32 `[rows, dim]`."""
    codes, scale, bias = unpack_rows(rows, bits, dim)
    return codes * scale + bias


def unpack_rows(rows: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, uint8 `[rows, dim]`, scale and bias, float32 `[rows, 1]`."""
    scale, bias = _view(rows[:, :HEADER_BYTES], torch.float16).float().split(1, 1)
    shifts = torch.arange(0, 8, bits, device=rows.device, dtype=torch.uint8)
    codes = (rows[:, HEADER_BYTES:, None] >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :dim], scale, bias


def _view(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret a copy of rows as another dtype; `Tensor.view` rejects strides and offsets of parts of a tensor."""
    return rows.flatten().clone().view(dtype).view(rows.shape[0], rows.shape[1] * rows.element_size() // dtype.itemsize)


def to_aten(rows: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert rows to those of ATen's `quantized::embedding_bag_{byte,4bit,2bit}_rowwise_offsets`, FBGEMM's fused ones.

    Scale and bias are last, of 8-bit rows in `dtype`; with float16 these are `QUint8RowwiseF16` of NVIDIA's embedding
    cache and of TorchEasyRec.
    """
    header, codes = rows[:, :HEADER_BYTES], rows[:, HEADER_BYTES:]
    header = _view(_view(header, torch.float16).to(dtype), torch.uint8) if bits == 8 else header
    return torch.cat([codes, header], 1)


def from_aten(rows: Tensor, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert rows from those of `to_aten`; scale and bias of 8-bit rows are rounded to float16."""
    codes, header = rows.tensor_split([-2 * dtype.itemsize if bits == 8 else -HEADER_BYTES], 1)
    header = _view(_view(header, dtype).half(), torch.uint8) if bits == 8 else header
    return torch.cat([header, codes], 1)
