"""CPU twin of `kernels/quantized_bag.py`: the loops of `embedding_bag.py` over rows that are decoded in registers.

A byte of int4 or int2 has columns of neighbouring lanes, so its vectors are sums of every second or fourth column, and
are interleaved when they are stored. Rows by address differ in their bits, so there four columns are a word of 32, 16
or 8 bits, and vectors always have every fourth column. A code times its scale is exact in float32, so that a fused
multiply-add, where the machine has one, gives the bits of a product and a sum.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from tritonemb.kernels.cpu.embedding_bag import look_up, sum_address
from tritonemb.kernels.cpu.row_groups import addresses_of, scalings_of
from tritonemb.kernels.cpu.simd import ADDRESS_MASK, CACHE_LINE, LONG, RowFormat, splat
from tritonemb.layout import ADDRESS_BITS, HEADER_BYTES, INDEXED, Batch, Layout, cached_fact

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
# Narrow tiles have whole bytes, but for the last columns of a row.
_TILES = {
    8: ((8, 16), (4, 16), (2, 16), (1, 16), (1, 4), (1, 1)),
    4: ((8, 16), (4, 16), (2, 16), (2, 4), (2, 1), (1, 1)),
    2: ((8, 16), (4, 16), (4, 4), (4, 1), (3, 1), (2, 1), (1, 1)),
}


def _format_of(code: int) -> RowFormat:
    """Return the format of rows of `-code` bits per column behind their scale and bias, or of rows by address."""
    if code == -INDEXED:
        return _indexed_format()
    bits = -code

    # Rows are not aligned, so the last byte may be in one more line; the first tile reads the header.
    def lines(num_columns: int) -> Sequence[int]:
        num_bytes = -(-num_columns * bits // 8)
        return *range(-HEADER_BYTES, num_bytes - 1, CACHE_LINE), num_bytes - 1

    def load(builder: Any, row: Any, byte_offset: Any, chunks: int, lanes: int) -> list[Any]:
        return _decode(builder, row, builder.add(row, byte_offset), (bits, 8 // bits), chunks, lanes)

    return RowFormat(_TILES[bits], partial(_offset, bits), lines, load, partial(_arrange, 8 // bits))


def _offset(bits: int, builder: Any, column: Any) -> Any:
    num_bits = builder.add(builder.mul(column, LONG(bits)), LONG(7))
    return builder.add(builder.ashr(num_bits, LONG(3)), LONG(HEADER_BYTES))


def _indexed_format() -> RowFormat:
    """Return the format of rows by address, whose bits are in the address."""

    def load(builder: Any, address: Any, column: Any, chunks: int, lanes: int) -> list[Any]:
        row, end = builder.and_(address, LONG(ADDRESS_MASK)), builder.append_basic_block("decoded")
        blocks, vectors = {bits: builder.append_basic_block(f"int{bits}") for bits in _TILES}, []
        switch = builder.switch(builder.lshr(address, LONG(ADDRESS_BITS)), blocks[2])
        for bits, block in blocks.items():
            if bits != 2:
                switch.add_case(LONG(bits), block)
            builder.position_at_end(block)
            start, per_word = builder.add(row, _offset(bits, builder, column)), 8 // bits if chunks % 4 else 4
            vectors.append(_decode(builder, row, start, (bits, per_word), chunks, lanes))
            builder.branch(end)
        builder.position_at_end(end)
        values = [builder.phi(vector.type) for vector in vectors[0]]
        for block, decoded in zip(blocks.values(), vectors, strict=True):
            for value, vector in zip(values, decoded, strict=True):
                value.add_incoming(vector, block)
        return values

    # The bits of a row are not known where it is prefetched: these lines are those of int8.
    lines = lambda num_columns: (*range(0, num_columns, CACHE_LINE), HEADER_BYTES + num_columns - 1)  # noqa: E731
    return RowFormat(_TILES[2], lambda _, column: column, lines, load, partial(_arrange, 4), True)


def _decode(builder: Any, row: Any, address: Any, form: tuple[int, int], chunks: int, lanes: int) -> list[Any]:
    """Load columns from an address in a row. `form` is their bits, and the columns per word."""
    (bits, per_word), vector, integers = form, ir.VectorType(_FLOAT, lanes), ir.VectorType(_INT, lanes)
    header = builder.inttoptr(row, ir.PointerType(ir.VectorType(ir.HalfType(), 2)))
    header = builder.fpext(builder.load(header, align=1), ir.VectorType(_FLOAT, 2))
    scale, bias = (splat(builder, builder.extract_element(header, _INT(i)), lanes) for i in (0, 1))
    name, signature = f"llvm.fmuladd.v{lanes}f32", ir.FunctionType(vector, [vector] * 3)
    multiply_add = builder.module.declare_intrinsic(name, fnty=signature)
    words, values = ir.VectorType(ir.IntType(bits * per_word), lanes), []
    for chunk in range(chunks):
        part = chunk % per_word
        if part == 0:
            start = builder.add(address, LONG(chunk * lanes * bits // 8))
            packed = builder.load(builder.inttoptr(start, ir.PointerType(words)), align=1)
            packed = packed if words == integers else builder.zext(packed, integers)
        shift, mask = (ir.Constant(integers, [number] * lanes) for number in (part * bits, 2**bits - 1))
        codes = builder.and_(builder.lshr(packed, shift), mask)
        values.append(builder.call(multiply_add, [builder.sitofp(codes, vector), scale, bias]))
    return values


def _arrange(per_word: int, builder: Any, vectors: list[Any]) -> list[Any]:
    if len(vectors) % per_word:
        return vectors  # single columns
    groups = range(0, len(vectors), per_word)
    return [_interleave(builder, vectors[first : first + per_word]) for first in groups]


def _interleave(builder: Any, vectors: Sequence[Any]) -> Any:
    """Join vectors, a power of 2 of them: the first lanes of all, then the second ones, …"""
    if len(vectors) == 1:
        return vectors[0]
    even, odd = (_interleave(builder, vectors[first::2]) for first in (0, 1))
    size = even.type.count
    order = [lane for pair in zip(range(size), range(size, 2 * size), strict=True) for lane in pair]
    return builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(_INT, 2 * size), order))


def quantized_bag(
    tables: Sequence[Tensor], bits: Sequence[int], batch: Batch, layout: Layout, check_bounds: bool, dtype: torch.dtype
) -> Tensor:
    """See `kernels/quantized_bag.py`. Sums in float32, `[B, width]` or `[N, width]`."""
    codes, scalings = [-number for number in bits], scalings_of(layout, batch[2] is not None)
    addresses = np.where(np.array(codes) == -INDEXED, 0, cached_fact(tables, addresses_of))
    sums = np.array([sum_address(_format_of, code, scalings) for code in codes])
    return look_up((addresses, np.array(codes), sums), batch, layout, check_bounds).to(dtype)
