"""Primitives of CPU kernels in LLVM IR: rows by address, prefetch, 16-bit floats, vectorized sums and dot products.

The inner loops of all kernels are emitted as IR: sums stay in registers, and no loop pays for the runtime checks of an
autovectorizer. Every operation is IEEE, lane by lane, in a fixed order and without contraction, so that results depend
neither on the machine's vector width nor on alignment.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import _empty_nd_impl, make_array, populate_array

from tritonemb.kernels.cpu.jit import BFLOAT16, FLOAT16, FLOAT32, address_of, addressed, inlined, inlined_uncounted
from tritonemb.layout import ADDRESS_BITS, HEADER_BYTES, INDEXED, PIECE, SPAN, WAYS

DOT_LANES = 16
STREAMED_ALIGNMENT = 64  # bytes: alignment and size of a streamed (non-temporal) store
_SUMS = (4, 16), (2, 16), (1, 16), (1, 8), (1, 4), (1, 1)  # tiles of columns (vectors, lanes of each), wide to narrow
PREFETCH_DISTANCE = 12  # ids between the prefetch of a row and its use
_FLOAT, _HALF, (_BIT, _BYTE, _SHORT, _INT, LONG) = ir.FloatType(), ir.HalfType(), map(ir.IntType, (1, 8, 16, 32, 64))
CACHE_LINE = 64  # bytes
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


def emitted(result: types.Type, *arguments: types.Type) -> Any:
    """Decorate `build(builder, *values)`: an intrinsic whose code it emits."""

    def decorate(build: Callable[..., Any]) -> Any:
        @functools.wraps(build)
        def typed(typing_context: Any, *_: types.Type) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = build(builder, *values)
                return context.get_dummy_value() if result == types.void else value

            return result(*arguments), generate

        return intrinsic(typed)

    return decorate


def _row_of(item: types.Type) -> Any:
    """Define a function from address and size to an array without reference counts, whose slices cost nothing."""
    kind = types.Array(item, 1, "C")

    @intrinsic
    def row(typing_context: Any, address: types.Type, size: types.Type) -> Any:
        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            array, item_bytes = make_array(kind)(context, builder), LONG(item.bitwidth // 8)
            data = builder.inttoptr(values[0], array.data.type)
            populate_array(array, data, values[1:], [item_bytes], item_bytes, None)
            return array._getvalue()

        return kind(types.int64, types.int64), generate

    return row


float32_row, float64_row, int32_row, int64_row = map(_row_of, (types.float32, types.float64, types.int32, types.int64))
uint8_row, uint16_row, uint32_row = map(_row_of, (types.uint8, types.uint16, types.uint32))


def _allocation(cleared: bool) -> Any:
    """Define a function as np.empty or np.zeros of a size or shape, which take Numba longer to compile."""

    @intrinsic
    def allocate(typing_context: Any, shape: types.Type, dtype: Any) -> Any:
        ndim = len(shape) if isinstance(shape, types.BaseTuple) else 0
        kind = types.Array(dtype.dtype, ndim or 1, "C")

        def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
            sizes = cgutils.unpack_tuple(builder, values[0]) if ndim else values[:1]
            array = _empty_nd_impl(context, builder, kind, sizes)
            if cleared:
                size = builder.mul(array.nitems, array.itemsize)
                cgutils.memset(builder, builder.bitcast(array.data, ir.PointerType(_BYTE)), size, 0)
            return array._getvalue()

        return kind(types.UniTuple(types.int64, ndim) if ndim else types.int64, dtype), generate

    return allocate


empty, zeros = _allocation(cleared=False), _allocation(cleared=True)


@inlined
def borrow_int64(array):
    """View int64 `[N]` without reference counts, whose atomic updates threads contend for."""
    return int64_row(array.ctypes.data, array.size)


float32_bits = emitted(types.uint32, types.float32)(lambda b, a: b.bitcast(a, _INT))
float32_from_bits = emitted(types.float32, types.uint32)(lambda b, a: b.bitcast(a, _FLOAT))
_widened = emitted(types.float32, types.uint16)
float16_to_float32 = _widened(lambda b, a: b.fpext(b.bitcast(a, _HALF), _FLOAT))
bfloat16_to_float32 = _widened(lambda b, a: b.bitcast(b.shl(b.zext(a, _INT), _INT(16)), _FLOAT))  # its upper half
float32_to_float16 = emitted(types.uint16, types.float32)(lambda b, a: b.bitcast(b.fptrunc(a, _HALF), _SHORT))


def emit_prefetch(builder: Any, address: Any) -> None:
    kind = ir.PointerType(_BYTE)
    signature = ir.FunctionType(ir.VoidType(), [kind, _INT, _INT, _INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [kind], signature)
    builder.call(function, [builder.inttoptr(address, kind), _INT(0), _INT(3), _INT(1)])


_prefetch_line = emitted(types.void, types.int64)(emit_prefetch)


@inlined
def prefetch(address, num_bytes):
    """Prefetch the cache lines of `num_bytes` bytes from `address` on."""
    for line in range(0, num_bytes, CACHE_LINE):
        _prefetch_line(address + line)


@emitted(types.int32, types.int64, types.int32)
def atomic_add(builder: Any, address: Any, number: Any) -> Any:
    """Add atomically to the int32 at an address; return the previous value."""
    return builder.atomic_rmw("add", builder.inttoptr(address, ir.PointerType(_INT)), number, "monotonic")


@emitted(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, out: Any, source: Any, num_bytes: Any) -> None:
    """Copy bytes between addresses; the ranges must not overlap."""
    target, origin = (builder.inttoptr(address, ir.PointerType(_BYTE)) for address in (out, source))
    cgutils.raw_memcpy(builder, target, origin, num_bytes, 1)


@emitted(types.int64, types.int64, types.int64)
def equal_ways(builder: Any, address: Any, byte: Any) -> Any:
    """Compare the `WAYS` bytes at an address with `byte`: int64 with bit `w` set if byte `w` is equal."""
    expected = splat(builder, builder.trunc(byte, _BYTE), WAYS)
    is_equal = builder.icmp_unsigned("==", load(builder, address, _BYTE, WAYS), expected)
    return builder.zext(builder.bitcast(is_equal, ir.IntType(WAYS)), LONG)


@emitted(types.int64, types.int64, types.int64, types.int64)
def masked_ways(builder: Any, address: Any, mask: Any, bits: Any) -> Any:
    """Compare the `WAYS` words of 32 bits at an address, masked, with `bits`; return as `equal_ways`."""
    masks, expected = (splat(builder, builder.trunc(value, _INT), WAYS) for value in (mask, bits))
    is_equal = builder.icmp_unsigned("==", builder.and_(load(builder, address, _INT, WAYS), masks), expected)
    return builder.zext(builder.bitcast(is_equal, ir.IntType(WAYS)), LONG)


_of_int64 = emitted(types.int64, types.int64)
lowest_bit, count_bits = _of_int64(lambda b, bits: b.cttz(bits, _BIT(1))), _of_int64(lambda b, bits: b.ctpop(bits))
highest_bit = _of_int64(lambda b, bits: b.sub(LONG(63), b.ctlz(bits, _BIT(1))))  # of a number that is not 0


@inlined
def mix(x):
    """Hash by the finaliser of splitmix64 (Steele et al., OOPSLA 2014), a permutation of 64 bits."""
    bits = numba.uint64(x)
    bits = (bits ^ (bits >> numba.uint64(30))) * numba.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> numba.uint64(27))) * numba.uint64(0x94D049BB133111EB)
    return numba.int64(bits ^ (bits >> numba.uint64(31)))


@inlined
def row_size(dim, dtype):
    """Bytes per row of a dtype or, if `dtype` is negative, quantized to `-dtype` bits; 1 if rows are addresses."""
    if dtype < 0:
        return 1 if dtype == -INDEXED else HEADER_BYTES + (7 - dim * dtype) // 8
    return dim * (4 if dtype == FLOAT32 else 2)


def load(builder: Any, address: Any, item: ir.Type, lanes: int) -> Any:
    size = {_FLOAT: 4, _INT: 4, _HALF: 2, _SHORT: 2, _BYTE: 1}[item]
    return builder.load(builder.inttoptr(address, ir.PointerType(ir.VectorType(item, lanes))), align=size)


def _load_float32(builder: Any, address: Any, dtype: int, lanes: int) -> Any:
    """Load `lanes` values of a table's dtype as float32, exactly."""
    if dtype == FLOAT32:
        return load(builder, address, _FLOAT, lanes)
    if dtype == FLOAT16:
        return builder.fpext(load(builder, address, _HALF, lanes), ir.VectorType(_FLOAT, lanes))
    bits = builder.zext(load(builder, address, _SHORT, lanes), ir.VectorType(_INT, lanes))
    shift = ir.Constant(ir.VectorType(_INT, lanes), [16] * lanes)
    return builder.bitcast(builder.shl(bits, shift), ir.VectorType(_FLOAT, lanes))


def splat(builder: Any, value: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    single = builder.insert_element(undefined, value, _INT(0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))


def loop(builder: Any, count: Any, initial: Any, body: Any) -> Any:
    """Emit a loop `values = body(i, values)` for i in [0, count) from `initial`; return the final values."""
    entry_block = builder.basic_block
    loop, exit_block = builder.append_basic_block("lanes"), builder.append_basic_block("lanes_end")
    builder.cbranch(builder.icmp_signed(">", count, LONG(0)), loop, exit_block)
    builder.position_at_end(loop)
    index, *values = (builder.phi(kind) for kind in (LONG, *(value.type for value in initial)))
    new_values = [builder.add(index, LONG(1)), *body(index, values)]
    loop_end = builder.basic_block
    for phi, first, next_value in zip([index, *values], [LONG(0), *initial], new_values, strict=True):
        phi.add_incoming(first, entry_block)
        phi.add_incoming(next_value, loop_end)
    builder.cbranch(builder.icmp_signed("<", new_values[0], count), loop, exit_block)
    builder.position_at_end(exit_block)
    results = [builder.phi(value.type) for value in initial]
    for result, first, last in zip(results, initial, new_values[1:], strict=True):
        result.add_incoming(first, entry_block)
        result.add_incoming(last, loop_end)
    return results


def item_at(builder: Any, item: ir.Type, address: Any, index: Any) -> Any:
    return builder.load(builder.gep(builder.inttoptr(address, ir.PointerType(item)), [index], source_etype=item))


class RowFormat(NamedTuple):
    """Rows in memory, whose columns are read in tiles: vectors, and lanes of each, wide to narrow."""

    tiles: Sequence[tuple[int, int]]
    offset: Callable[[Any, Any], Any]  # bytes before the first column of a tile; of the number of columns, in a row
    lines: Callable[[int], Iterable[int]]  # addresses in the cache lines of a number of columns, relative to the first
    load: Callable[..., list[Any]]  # (builder, row, byte offset, vectors, lanes): columns as float32
    arrange: Callable[[Any, list[Any]], list[Any]] = lambda _, vectors: vectors  # in the order of columns
    indexed: bool = False  # whether rows are addresses, see `INDEXED`; then tiles are at their number of columns


def format_of(dtype: int) -> RowFormat:
    """Return the format of rows of floats."""
    size = 4 if dtype == FLOAT32 else 2

    def load(builder: Any, row: Any, byte_offset: Any, chunks: int, lanes: int) -> list[Any]:
        first = builder.add(row, byte_offset)
        addresses = [builder.add(first, LONG(chunk * lanes * size)) for chunk in range(chunks)]
        return [_load_float32(builder, address, dtype, lanes) for address in addresses]

    tiles = ((8, 16), *_SUMS) if dtype == FLOAT32 else _SUMS
    return RowFormat(tiles, lambda b, n: b.mul(n, LONG(size)), lambda n: range(0, n * size, CACHE_LINE), load)


def _sum_columns(builder: Any, rows: RowFormat, chunks: int, lanes: int, scaled: bool, args: Any) -> Any:
    """Sum `chunks` times `lanes` columns, `byte_offset` from each row's start, over rows in order, from zero."""
    row_at, prefetch_ahead, scales, first, num_rows, byte_offset = args

    def add(index: Any, totals: Any) -> Any:
        entry = builder.add(first, index)
        prefetch_ahead(entry, byte_offset, chunks * lanes)
        scale = splat(builder, item_at(builder, _FLOAT, scales, entry), lanes) if scaled else None
        values = rows.load(builder, row_at(entry), byte_offset, chunks, lanes)
        values = [builder.fmul(value, scale) for value in values] if scaled else values
        return [builder.fadd(total, value) for total, value in zip(totals, values, strict=True)]

    return loop(builder, num_rows, [ir.Constant(ir.VectorType(_FLOAT, lanes), [0.0] * lanes)] * chunks, add)


def _store(builder: Any, sums: Any, out: Any, streamed: bool) -> None:
    """Store vectors contiguously. `streamed` stores bypass the caches; `to` must be aligned for them."""
    for chunk, values in enumerate(sums):
        address = builder.add(out, LONG(chunk * values.type.count * 4))
        alignment = STREAMED_ALIGNMENT if streamed else 4
        store = builder.store(values, builder.inttoptr(address, ir.PointerType(values.type)), align=alignment)
        if streamed:
            store.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))


def _sum_bags(builder: Any, form: RowFormat, chunks: int, lanes: int, scaled: bool, column: Any, args: Any) -> None:
    """Sum `chunks` times `lanes` columns of all bags."""
    out, pitch, num_bags, bag_at, row_at, prefetch_ahead, scales, _, streamed = args
    byte_offset = form.offset(builder, column)
    first_bag = builder.add(out, builder.mul(column, LONG(4)))

    def sum_bag(bag: Any, _: Any) -> list[Any]:
        rows = row_at, prefetch_ahead, scales, *bag_at(bag), byte_offset
        sums = form.arrange(builder, _sum_columns(builder, form, chunks, lanes, scaled, rows))
        address = builder.add(first_bag, builder.mul(bag, pitch))
        if lanes * 4 == STREAMED_ALIGNMENT:
            with builder.if_else(streamed) as (past_caches, into_caches):
                with past_caches:
                    _store(builder, sums, address, True)
                with into_caches:
                    _store(builder, sums, address, False)
        else:
            _store(builder, sums, address, False)
        return []

    loop(builder, num_bags, [], sum_bag)


def _sum_all_columns(builder: Any, rows: RowFormat, scaled: bool, args: Any) -> None:
    """Sum all columns: a loop over tiles of each width, from the widest that fits."""
    column, size = LONG(0), args[-2]
    for chunks, lanes in rows.tiles:
        entry_block, first_column = builder.basic_block, column
        head, body, exit_block = (builder.append_basic_block(f"columns_{label}") for label in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        column = builder.phi(LONG)
        column.add_incoming(first_column, entry_block)
        end = builder.add(column, LONG(chunks * lanes))
        builder.cbranch(builder.icmp_signed("<=", end, size), body, exit_block)
        builder.position_at_end(body)
        _sum_bags(builder, rows, chunks, lanes, scaled, column, args)
        column.add_incoming(end, builder.basic_block)
        builder.branch(head)
        builder.position_at_end(exit_block)


def emit_sums(builder: Any, form: RowFormat, bags: Any, rows: Any, scales: Any, size: Any, streamed: Any) -> None:
    """Emit the loops with or without scales, or both. `scales`: their address or 0, and which loops are needed."""
    address, scalings = scales
    for scaled in scalings:
        condition = builder.icmp_signed("!=" if scaled else "==", address, LONG(0)) if len(scalings) > 1 else _BIT(1)
        with builder.if_then(condition):
            _sum_all_columns(builder, form, scaled, (*bags, *rows, address, size, streamed))


def make_float32_sums(scaled: bool) -> tuple[Any, Any]:
    """Define `sum_rows` and `sum_groups`, with factors or without; arrays are given by their addresses.

    `sum_rows(out, rows, scales, count, size)`: float32 `out[:size] = Σ_i scales[i] · row_i`, in order, of `count` row
    addresses `rows` and float32 factors, or 0 for none.

    `sum_groups(out, starts, num_groups, rows, scales, size)`: the same of groups: float32 `out[group, :size]` of rows
    [starts[group], starts[group + 1]), int32. Sums of groups of more than PIECE rows are 0. Each row is prefetched
    PREFETCH_DISTANCE rows ahead, so as many addresses follow those of the last group.
    """
    form = format_of(FLOAT32)

    @emitted(types.void, *[types.int64] * 5)
    def sum_rows(builder: Any, out: Any, rows: Any, scales: Any, count: Any, size: Any) -> None:
        bags = out, LONG(0), LONG(1), lambda _: (LONG(0), count)
        reads = (lambda index: item_at(builder, LONG, rows, index)), (lambda *_: None)
        emit_sums(builder, form, bags, reads, (scales, (scaled,)), size, _BIT(0))

    @emitted(types.void, *[types.int64] * 6)
    def sum_groups(builder: Any, out: Any, starts: Any, num_groups: Any, rows: Any, scales: Any, size: Any) -> None:
        def group_at(group: Any) -> tuple[Any, Any]:
            ends = (item_at(builder, _INT, builder.add(starts, LONG(offset)), group) for offset in (0, 4))
            first, end = (builder.sext(value, LONG) for value in ends)
            count = builder.sub(end, first)
            return first, builder.select(builder.icmp_signed("<=", count, LONG(PIECE)), count, LONG(0))

        def prefetch_ahead(index: Any, byte_offset: Any, num_columns: int) -> None:
            address = builder.add(row_at(builder.add(index, LONG(PREFETCH_DISTANCE))), byte_offset)
            for line in form.lines(num_columns):
                emit_prefetch(builder, builder.add(address, LONG(line)))

        row_at = functools.partial(item_at, builder, LONG, rows)
        groups, reads = (out, builder.mul(size, LONG(4)), num_groups, group_at), (row_at, prefetch_ahead)
        emit_sums(builder, form, groups, reads, (scales, (scaled,)), size, _BIT(0))

    return sum_rows, sum_groups


@inlined_uncounted
def _add(total, row):
    for j in range(total.size):
        total[j] += row[j]


@functools.cache
def block_sum_address(scaled: bool) -> int:
    """Compile or load the sums of a block's gradients, with scales or without; return its address, for `call`."""
    sum_rows, sum_groups = make_float32_sums(scaled)

    @inlined_uncounted
    def sum_pieces(total, gradients, scales, count, dim, pieces):
        """Add `count` gradients, more than PIECE, to zeros in `total`, in the order of `kernels/gradient_sums.py`."""
        for span in range(0, count, SPAN):
            # Pieces of the span, then pairs of sums, then the span.
            num_pieces = (min(SPAN, count - span) + PIECE - 1) // PIECE
            for piece in range(num_pieces):
                first = span + piece * PIECE
                args = gradients + first * 8, scales + first * 4, min(PIECE, count - first), dim
                sum_rows(pieces + piece * dim * 4, *args)
            stride = 1
            while stride < num_pieces:
                for piece in range(0, num_pieces - stride, 2 * stride):
                    left, right = pieces + piece * dim * 4, pieces + (piece + stride) * dim * 4
                    _add(float32_row(left, dim), float32_row(right, dim))
                stride *= 2
            _add(float32_row(total, dim), float32_row(pieces, dim))

    def sum_block(args):
        """Sum the gradients of each group, in pieces where there are more than PIECE. Arguments are addresses."""
        sums, starts_at, num_groups, gradients, scales, dim, pieces = args
        sum_groups(sums, starts_at, num_groups, gradients, scales, dim)
        starts = int32_row(starts_at, num_groups + 1)
        for group in range(num_groups):
            begin, size = np.int64(starts[group]), np.int64(starts[group + 1] - starts[group])
            if size > PIECE:
                sum_pieces(sums + group * dim * 4, gradients + begin * 8, scales + begin * 4, size, dim, pieces)

    sum_block.__qualname__ = "sum_scaled_block" if scaled else "sum_block"
    return address_of(addressed(sum_block), (types.int64,) * 7)


def _make_dot(dtype: int) -> Any:
    @emitted(types.float32, types.int64, types.int64, types.int64)
    def dot_lanes(builder: Any, a: Any, b: Any, size: Any) -> Any:
        """Add full vectors lane by lane, reduce lanes by halving, then add the remaining elements one by one."""
        item = LONG(4 if dtype == FLOAT32 else 2)
        num_vectors = builder.sdiv(size, LONG(DOT_LANES))

        def product(element: Any, lanes: int) -> Any:
            a_values = load(builder, builder.add(a, builder.mul(element, LONG(4))), _FLOAT, lanes)
            b_values = _load_float32(builder, builder.add(b, builder.mul(element, item)), dtype, lanes)
            return builder.fmul(a_values, b_values)

        def add_vector(index: Any, totals: Any) -> Any:
            return [builder.fadd(totals[0], product(builder.mul(index, LONG(DOT_LANES)), DOT_LANES))]

        # Full vectors.
        zeros = ir.Constant(ir.VectorType(_FLOAT, DOT_LANES), [0.0] * DOT_LANES)
        (total,) = loop(builder, num_vectors, [zeros], add_vector)
        # Reduce the lanes by halving.
        lanes = DOT_LANES
        while lanes > 1:
            lanes //= 2
            low, high = (ir.Constant(ir.VectorType(_INT, lanes), [*range(i, i + lanes)]) for i in (0, lanes))
            total = builder.fadd(builder.shuffle_vector(total, total, low), builder.shuffle_vector(total, total, high))
        # Remaining elements.
        num_added = builder.mul(num_vectors, LONG(DOT_LANES))

        def add_element(index: Any, totals: Any) -> Any:
            return [builder.fadd(totals[0], product(builder.add(num_added, index), 1))]

        (total,) = loop(builder, builder.sub(size, num_added), [total], add_element)
        return builder.extract_element(total, _INT(0))

    return dot_lanes


_dot_float32, _dot_float16, _dot_bfloat16 = (_make_dot(dtype) for dtype in (FLOAT32, FLOAT16, BFLOAT16))


@inlined
def dot(a, b, size, dtype):
    """Dot product of the float32 row at address `a` and the row of a table's dtype at address `b`."""
    if dtype == FLOAT32:
        return _dot_float32(a, b, size)
    if dtype == FLOAT16:
        return _dot_float16(a, b, size)
    return _dot_bfloat16(a, b, size)
