"""CPU twin of `kernels/quantized_bag.py`: the loops of `embedding_bag.py` over rows that are decoded in registers.

A byte of int4 or int2 has columns of neighbouring lanes, so its vectors are sums of every second or fourth column, and
are interleaved when they are stored. A code times its scale is exact in float32, so that a fused multiply-add, where
the machine has one, gives the bits of a product and a sum.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from tritonemb.kernels.cpu.embedding_bag import (
    gather_values,
    look_up,
    make_sum,
    pool_samples,
    sum_arguments,
)
from tritonemb.kernels.cpu.jit import inlined, parallel
from tritonemb.kernels.cpu.row_groups import addresses_of
from tritonemb.kernels.cpu.simd import CACHE_LINE, LONG, RowFormat, splat
from tritonemb.layout import HEADER_BYTES, Batch, Layout, cached_fact

_FLOAT, _BYTE, _INT = ir.FloatType(), ir.IntType(8), ir.IntType(32)
# Narrow tiles have whole bytes, but for the last columns of a row.
_TILES = {
    8: ((8, 16), (4, 16), (2, 16), (1, 16), (1, 4), (1, 1)),
    4: ((8, 16), (4, 16), (2, 16), (2, 4), (2, 1), (1, 1)),
    2: ((8, 16), (4, 16), (4, 4), (4, 1), (3, 1), (2, 1), (1, 1)),
}


def _format_of(bits: int) -> RowFormat:
    """Return the format of rows of integers behind their scale and bias."""
    codes_per_byte = 8 // bits

    def offset(builder: Any, column: Any) -> Any:
        num_bits = builder.add(builder.mul(column, LONG(bits)), LONG(7))
        return builder.add(builder.ashr(num_bits, LONG(3)), LONG(HEADER_BYTES))

    # Rows are not aligned, so the last byte may be in one more line; the first tile reads the header.
    def lines(num_columns: int) -> Sequence[int]:
        num_bytes = -(-num_columns * bits // 8)
        return *range(-HEADER_BYTES, num_bytes - 1, CACHE_LINE), num_bytes - 1

    def load(builder: Any, row: Any, byte_offset: Any, chunks: int, lanes: int) -> list[Any]:
        vector = ir.VectorType(_FLOAT, lanes)
        header = builder.inttoptr(row, ir.PointerType(ir.VectorType(ir.HalfType(), 2)))
        header = builder.fpext(builder.load(header, align=1), ir.VectorType(_FLOAT, 2))
        scale, bias = (splat(builder, builder.extract_element(header, _INT(i)), lanes) for i in (0, 1))
        name, signature = f"llvm.fmuladd.v{lanes}f32", ir.FunctionType(vector, [vector] * 3)
        multiply_add = builder.module.declare_intrinsic(name, fnty=signature)
        integers, address, values = ir.VectorType(_INT, lanes), builder.add(row, byte_offset), []
        for chunk in range(chunks):
            part = chunk % codes_per_byte
            if part == 0:
                start = builder.add(address, LONG(chunk // codes_per_byte * lanes))
                pointer = builder.inttoptr(start, ir.PointerType(ir.VectorType(_BYTE, lanes)))
                packed = builder.zext(builder.load(pointer, align=1), integers)
            shift, mask = (ir.Constant(integers, [number] * lanes) for number in (part * bits, 2**bits - 1))
            codes = builder.and_(builder.lshr(packed, shift), mask)
            values.append(builder.call(multiply_add, [builder.sitofp(codes, vector), scale, bias]))
        return values

    def arrange(builder: Any, vectors: list[Any]) -> list[Any]:
        if len(vectors) % codes_per_byte:
            return vectors  # single columns
        groups = range(0, len(vectors), codes_per_byte)
        return [_interleave(builder, vectors[first : first + codes_per_byte]) for first in groups]

    return RowFormat(_TILES[bits], offset, lines, load, arrange)


def _interleave(builder: Any, vectors: Sequence[Any]) -> Any:
    """Join vectors, a power of 2 of them: the first lanes of all, then the second ones, …"""
    if len(vectors) == 1:
        return vectors[0]
    even, odd = (_interleave(builder, vectors[first::2]) for first in (0, 1))
    size = even.type.count
    order = [lane for pair in zip(range(size), range(size, 2 * size), strict=True) for lane in pair]
    return builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(_INT, 2 * size), order))


_sum_int8, _sum_int4, _sum_int2 = (make_sum(_format_of(bits)) for bits in (8, 4, 2))


@inlined
def _sum_bags(target, bags, table, size, dtype):
    arguments = sum_arguments(target, bags, table, size)
    if dtype == -8:
        _sum_int8(*arguments)
    elif dtype == -4:
        _sum_int4(*arguments)
    else:
        _sum_int2(*arguments)


@parallel
def _pool_samples(task, first_bad, sizes, tables, layout, batch, output):
    pool_samples((task, first_bad), _sum_bags, sizes, tables, layout, batch, output)


@parallel
def _gather_values(task, first_bad, sizes, tables, layout, batch, output):
    gather_values((task, first_bad), _sum_bags, sizes, tables, layout, batch, output)


def quantized_bag(
    tables: Sequence[Tensor], bits: Sequence[int], batch: Batch, layout: Layout, check_bounds: bool, dtype: torch.dtype
) -> Tensor:
    """See `kernels/quantized_bag.py`. Sums in float32, `[B, width]` or `[N, width]`."""
    kernel = _pool_samples if layout.pooled else _gather_values
    memory = cached_fact(tables, addresses_of), -np.array(bits, dtype=np.int64)
    return look_up(kernel, memory, batch, layout, check_bounds).to(dtype)
