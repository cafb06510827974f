"""Rows as vectors of lanes: the two loops that every kernel spends its time in, as LLVM code.

Written out, because a loop that the compiler must first prove safe costs more than a row, and because sums stay in
registers that way. Every operation is IEEE, lane by lane, in a fixed order and without contraction, so the bits depend
neither on the machine's vector width nor on alignment.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tritonemb.kernels.cpu.jit import inlined
from tritonemb.kernels.cpu.memory import BFLOAT16, FLOAT16, FLOAT32

DOT_LANES = 16
STREAMED_ALIGNMENT = 64  # bytes that a streamed store's address must be a multiple of
_FLOAT, _HALF, _SHORT, _INT = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32)
_LONG = ir.IntType(64)


def _vector(item: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(item, lanes)


def _load(builder: Any, address: Any, item: ir.Type, lanes: int) -> Any:
    size = {_FLOAT: 4, _HALF: 2, _SHORT: 2}[item]
    return builder.load(builder.inttoptr(address, ir.PointerType(_vector(item, lanes))), align=size)


def _load_float32(builder: Any, address: Any, dtype: int, lanes: int) -> Any:
    """`lanes` values of a table's dtype as float32: exact."""
    if dtype == FLOAT32:
        return _load(builder, address, _FLOAT, lanes)
    if dtype == FLOAT16:
        return builder.fpext(_load(builder, address, _HALF, lanes), _vector(_FLOAT, lanes))
    bits = builder.zext(_load(builder, address, _SHORT, lanes), _vector(_INT, lanes))
    shift = ir.Constant(_vector(_INT, lanes), [16] * lanes)
    return builder.bitcast(builder.shl(bits, shift), _vector(_FLOAT, lanes))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    undefined = ir.Constant(_vector(_FLOAT, lanes), ir.Undefined)
    one = builder.insert_element(undefined, value, _INT(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_vector(_INT, lanes), [0] * lanes))


def _loop(builder: Any, count: Any, initial: Any, body: Any) -> Any:
    """`value = body(i, value)` for i in [0, count), count ≥ 0; returns the last value."""
    before = builder.basic_block
    loop, after = builder.append_basic_block("lanes"), builder.append_basic_block("lanes_end")
    builder.cbranch(builder.icmp_signed(">", count, _LONG(0)), loop, after)
    builder.position_at_end(loop)
    index, value = builder.phi(_LONG), builder.phi(initial.type)
    index.add_incoming(_LONG(0), before)
    value.add_incoming(initial, before)
    new_value = body(index, value)
    next_index = builder.add(index, _LONG(1))
    end = builder.basic_block
    index.add_incoming(next_index, end)
    value.add_incoming(new_value, end)
    builder.cbranch(builder.icmp_signed("<", next_index, count), loop, after)
    builder.position_at_end(after)
    result = builder.phi(initial.type)
    result.add_incoming(initial, before)
    result.add_incoming(new_value, end)
    return result


def _make_sum(dtype: int, lanes: int, scaled: bool, streamed: bool) -> Any:
    """to[: lanes] = Σ_i scales[i] · (lanes values at rows[i] + offset), in order of i, from zero.

    A streamed result goes past the caches, `to` must be aligned for that.
    """

    @intrinsic
    def sum_lanes(
        typing_context: Any,
        to: types.Type,
        rows: types.Type,
        scales: types.Type,
        count: types.Type,
        offset: types.Type,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            to_address, rows_address, scales_address, num_rows, byte_offset = args
            row_pointer = builder.inttoptr(rows_address, ir.PointerType(_LONG))
            scale_pointer = builder.inttoptr(scales_address, ir.PointerType(_FLOAT))

            def add(index: Any, total: Any) -> Any:
                row = builder.load(builder.gep(row_pointer, [index], source_etype=_LONG))
                values = _load_float32(builder, builder.add(row, byte_offset), dtype, lanes)
                if scaled:
                    scale = builder.load(builder.gep(scale_pointer, [index], source_etype=_FLOAT))
                    values = builder.fmul(values, _splat(builder, scale, lanes))
                return builder.fadd(total, values)

            total = _loop(builder, num_rows, ir.Constant(_vector(_FLOAT, lanes), [0.0] * lanes), add)
            alignment = STREAMED_ALIGNMENT if streamed else 4
            store = builder.store(total, builder.inttoptr(to_address, ir.PointerType(total.type)), align=alignment)
            if streamed:
                store.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return sum_lanes


def _make_sum_rows(dtype: int, scaled: bool, streamed: bool = False) -> Any:
    by_128, by_64, by_16 = (_make_sum(dtype, lanes, scaled, streamed) for lanes in (128, 64, 16))
    by_4, by_1 = (_make_sum(dtype, lanes, scaled, False) for lanes in (4, 1))
    item = 4 if dtype == FLOAT32 else 2

    @inlined
    def sum_rows(to, rows, scales, count, size):
        j = 0
        while j + 128 <= size:
            by_128(to + j * 4, rows, scales, count, j * item)
            j += 128
        while j + 64 <= size:
            by_64(to + j * 4, rows, scales, count, j * item)
            j += 64
        while j + 16 <= size:
            by_16(to + j * 4, rows, scales, count, j * item)
            j += 16
        while j + 4 <= size:
            by_4(to + j * 4, rows, scales, count, j * item)
            j += 4
        while j < size:
            by_1(to + j * 4, rows, scales, count, j * item)
            j += 1

    return sum_rows


def _make_sum_rows_of_any_dtype(scaled: bool, streamed: bool) -> Any:
    sum_float32, sum_float16, sum_bfloat16 = (
        _make_sum_rows(dtype, scaled, streamed) for dtype in (FLOAT32, FLOAT16, BFLOAT16)
    )

    @inlined
    def sum_rows(to, rows, scales, count, size, dtype):
        if dtype == FLOAT32:
            sum_float32(to, rows, scales, count, size)
        elif dtype == FLOAT16:
            sum_float16(to, rows, scales, count, size)
        else:
            sum_bfloat16(to, rows, scales, count, size)

    return sum_rows


_sum_float32, _sum_float32_scaled = _make_sum_rows(FLOAT32, False), _make_sum_rows(FLOAT32, True)
_sum, _sum_scaled = _make_sum_rows_of_any_dtype(False, False), _make_sum_rows_of_any_dtype(True, False)
_stream, _stream_scaled = _make_sum_rows_of_any_dtype(False, True), _make_sum_rows_of_any_dtype(True, True)


@inlined
def sum_float32_rows(to, rows, scales, count, size):
    """float32 `to[:size] = Σ_i scales[i] · row_i`, in order; `rows` is the address of `count` row addresses.

    `scales` is the address of as many float32 factors, or 0 for none.
    """
    if scales == 0:
        _sum_float32(to, rows, scales, count, size)
    else:
        _sum_float32_scaled(to, rows, scales, count, size)


@inlined
def sum_rows(to, rows, scales, count, size, dtype, streamed):
    """As `sum_float32_rows` for rows of any table dtype; `streamed` past the caches, if `to` is aligned for that."""
    if streamed and to % STREAMED_ALIGNMENT == 0:
        if scales == 0:
            _stream(to, rows, scales, count, size, dtype)
        else:
            _stream_scaled(to, rows, scales, count, size, dtype)
    elif scales == 0:
        _sum(to, rows, scales, count, size, dtype)
    else:
        _sum_scaled(to, rows, scales, count, size, dtype)


def _make_dot(dtype: int) -> Any:
    @intrinsic
    def dot_lanes(typing_context: Any, a: types.Type, b: types.Type, size: types.Type) -> Any:
        """Whole vectors by lane, lanes in pairs of halves, then what is left, element by element."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a_address, b_address, num_elements = args
            item = _LONG(4 if dtype == FLOAT32 else 2)
            num_vectors = builder.sdiv(num_elements, _LONG(DOT_LANES))

            def product(element: Any, lanes: int) -> Any:
                left = _load(builder, builder.add(a_address, builder.mul(element, _LONG(4))), _FLOAT, lanes)
                right = _load_float32(builder, builder.add(b_address, builder.mul(element, item)), dtype, lanes)
                return builder.fmul(left, right)

            def add_vector(index: Any, total: Any) -> Any:
                return builder.fadd(total, product(builder.mul(index, _LONG(DOT_LANES)), DOT_LANES))

            zeros = ir.Constant(_vector(_FLOAT, DOT_LANES), [0.0] * DOT_LANES)
            total = _loop(builder, num_vectors, zeros, add_vector)
            lanes = DOT_LANES
            while lanes > 1:
                lanes //= 2
                low = ir.Constant(_vector(_INT, lanes), list(range(lanes)))
                high = ir.Constant(_vector(_INT, lanes), list(range(lanes, 2 * lanes)))
                total = builder.fadd(
                    builder.shuffle_vector(total, total, low), builder.shuffle_vector(total, total, high)
                )
            done = builder.mul(num_vectors, _LONG(DOT_LANES))

            def add_element(index: Any, sum_so_far: Any) -> Any:
                return builder.fadd(sum_so_far, product(builder.add(done, index), 1))

            total = _loop(builder, builder.sub(num_elements, done), total, add_element)
            return builder.extract_element(total, _INT(0))

        return types.float32(types.int64, types.int64, types.int64), generate

    return dot_lanes


_dot_float32, _dot_float16, _dot_bfloat16 = (_make_dot(dtype) for dtype in (FLOAT32, FLOAT16, BFLOAT16))


@inlined
def dot(a, b, size, dtype):
    """Σ_j a[j] · b[j] for a float32 row at address `a` and a row of a table's dtype at address `b`."""
    if dtype == FLOAT32:
        return _dot_float32(a, b, size)
    if dtype == FLOAT16:
        return _dot_float16(a, b, size)
    return _dot_bfloat16(a, b, size)
