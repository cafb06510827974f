"""Primitives of CPU kernels in LLVM IR: rows by address, prefetch, 16-bit floats, vectorized sums and dot products.

The inner loops of all kernels are emitted as IR: sums stay in registers, and no loop pays for the runtime checks of an
autovectorizer. Every operation is IEEE, lane by lane, in a fixed order and without contraction, so that results depend
neither on the machine's vector width nor on alignment.
"""

import functools
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tritonemb.kernels.cpu.jit import BFLOAT16, FLOAT16, FLOAT32, inlined
from tritonemb.layout import PIECE, WAYS

DOT_LANES = 16
STREAMED_ALIGNMENT = 64  # bytes: alignment and size of a streamed (non-temporal) store
_SUMS = (4, 16), (2, 16), (1, 16), (1, 8), (1, 4), (1, 1)  # tiles of columns (vectors, lanes of each), wide to narrow
SUMS = {FLOAT32: ((8, 16), *_SUMS), FLOAT16: _SUMS, BFLOAT16: _SUMS}
PREFETCH_DISTANCE = 12  # ids between the prefetch of a row and its use
_FLOAT, _HALF, (_BIT, _BYTE, _SHORT, _INT, _LONG) = ir.FloatType(), ir.HalfType(), map(ir.IntType, (1, 8, 16, 32, 64))
CACHE_LINE = 64  # bytes


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


def _row_of(item: types.Type, code: ir.Type) -> Any:
    """Define a function from address and size to an array without reference counts, whose slices cost nothing."""
    pointer = emitted(types.CPointer(item), types.int64)(lambda b, address: b.inttoptr(address, ir.PointerType(code)))

    @inlined
    def row(address, size):
        return numba.carray(pointer(address), size)

    return row


float32_row, uint16_row = _row_of(types.float32, _FLOAT), _row_of(types.uint16, _SHORT)
uint8_row, int32_row, int64_row = _row_of(types.uint8, _BYTE), _row_of(types.int32, _INT), _row_of(types.int64, _LONG)
float64_row = _row_of(types.float64, ir.DoubleType())
float32_bits = emitted(types.uint32, types.float32)(lambda b, a: b.bitcast(a, _INT))
float32_from_bits = emitted(types.float32, types.uint32)(lambda b, a: b.bitcast(a, _FLOAT))
float16_to_float32 = emitted(types.float32, types.uint16)(lambda b, a: b.fpext(b.bitcast(a, _HALF), _FLOAT))
float32_to_float16 = emitted(types.uint16, types.float32)(lambda b, a: b.bitcast(b.fptrunc(a, _HALF), _SHORT))
bfloat16_to_float32 = emitted(types.float32, types.uint16)(  # the upper half of a float32
    lambda b, a: b.bitcast(b.shl(b.zext(a, _INT), _INT(16)), _FLOAT)
)


def _emit_prefetch(builder: Any, address: Any) -> None:
    kind = ir.PointerType(_BYTE)
    signature = ir.FunctionType(ir.VoidType(), [kind, _INT, _INT, _INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [kind], signature)
    builder.call(function, [builder.inttoptr(address, kind), _INT(0), _INT(3), _INT(1)])


_prefetch_line = emitted(types.void, types.int64)(_emit_prefetch)


@inlined
def prefetch(address, num_bytes):
    """Prefetch the cache lines of `num_bytes` bytes from `address` on."""
    for line in range(0, num_bytes, CACHE_LINE):
        _prefetch_line(address + line)


@emitted(types.int32, types.int64)
def atomic_increment(builder: Any, address: Any) -> Any:
    """Add 1 atomically to the int32 at an address; return the previous value."""
    return builder.atomic_rmw("add", builder.inttoptr(address, ir.PointerType(_INT)), _INT(1), "monotonic")


@emitted(types.void, types.int64, types.int64, types.int64)
def copy_bytes(builder: Any, out: Any, source: Any, num_bytes: Any) -> None:
    """Copy bytes between addresses; the ranges must not overlap."""
    target, origin = (builder.inttoptr(address, ir.PointerType(_BYTE)) for address in (out, source))
    cgutils.raw_memcpy(builder, target, origin, num_bytes, 1)


@emitted(types.int64, types.int64, types.int64)
def equal_ways(builder: Any, address: Any, byte: Any) -> Any:
    """Compare the `WAYS` bytes at an address with `byte`: int64 with bit `w` set if byte `w` is equal."""
    line = builder.load(builder.inttoptr(address, ir.PointerType(ir.VectorType(_BYTE, WAYS))), align=1)
    expected = _splat(builder, builder.trunc(byte, _BYTE), WAYS)
    return builder.zext(builder.bitcast(builder.icmp_unsigned("==", line, expected), ir.IntType(WAYS)), _LONG)


_of_int64 = emitted(types.int64, types.int64)
lowest_bit, count_bits = _of_int64(lambda b, bits: b.cttz(bits, _BIT(1))), _of_int64(lambda b, bits: b.ctpop(bits))
highest_bit = _of_int64(lambda b, bits: b.sub(_LONG(63), b.ctlz(bits, _BIT(1))))  # of a number that is not 0


@inlined
def mix(x):
    """Hash by the finaliser of splitmix64 (Steele et al., OOPSLA 2014), a permutation of 64 bits."""
    bits = numba.uint64(x)
    bits = (bits ^ (bits >> numba.uint64(30))) * numba.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> numba.uint64(27))) * numba.uint64(0x94D049BB133111EB)
    return numba.int64(bits ^ (bits >> numba.uint64(31)))


@inlined
def element_size(dtype):
    """Bytes per element."""
    return 4 if dtype == FLOAT32 else 2


def load(builder: Any, address: Any, item: ir.Type, lanes: int) -> Any:
    size = {_FLOAT: 4, _HALF: 2, _SHORT: 2}[item]
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


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    single = builder.insert_element(undefined, value, _INT(0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))


def _loop(builder: Any, count: Any, initial: Any, body: Any) -> Any:
    """Emit a loop `values = body(i, values)` for i in [0, count) from `initial`; return the final values."""
    entry_block = builder.basic_block
    loop, exit_block = builder.append_basic_block("lanes"), builder.append_basic_block("lanes_end")
    builder.cbranch(builder.icmp_signed(">", count, _LONG(0)), loop, exit_block)
    builder.position_at_end(loop)
    index, *values = (builder.phi(kind) for kind in (_LONG, *(value.type for value in initial)))
    new_values = [builder.add(index, _LONG(1)), *body(index, values)]
    loop_end = builder.basic_block
    for phi, first, next_value in zip([index, *values], [_LONG(0), *initial], new_values, strict=True):
        phi.add_incoming(first, entry_block)
        phi.add_incoming(next_value, loop_end)
    builder.cbranch(builder.icmp_signed("<", new_values[0], count), loop, exit_block)
    builder.position_at_end(exit_block)
    results = [builder.phi(value.type) for value in initial]
    for result, first, last in zip(results, initial, new_values[1:], strict=True):
        result.add_incoming(first, entry_block)
        result.add_incoming(last, loop_end)
    return results


def _item_at(builder: Any, item: ir.Type, address: Any, index: Any) -> Any:
    return builder.load(builder.gep(builder.inttoptr(address, ir.PointerType(item)), [index], source_etype=item))


def _sum_columns(builder: Any, dtype: int, chunks: int, lanes: int, scaled: bool, args: Any) -> Any:
    """Sum `chunks` times `lanes` columns, `byte_offset` from each row's start, over rows in order, from zero."""
    row_at, prefetch_ahead, scales, first, num_rows, byte_offset = args
    item = 4 if dtype == FLOAT32 else 2

    def add(index: Any, totals: Any) -> Any:
        entry = builder.add(first, index)
        prefetch_ahead(entry, byte_offset, chunks * lanes * item)
        start = builder.add(row_at(entry), byte_offset)
        scale = _splat(builder, _item_at(builder, _FLOAT, scales, entry), lanes) if scaled else None
        sums = []
        for chunk, total in enumerate(totals):
            values = _load_float32(builder, builder.add(start, _LONG(chunk * lanes * item)), dtype, lanes)
            sums.append(builder.fadd(total, builder.fmul(values, scale) if scaled else values))
        return sums

    return _loop(builder, num_rows, [ir.Constant(ir.VectorType(_FLOAT, lanes), [0.0] * lanes)] * chunks, add)


def _store(builder: Any, sums: Any, out: Any, streamed: bool) -> None:
    """Store vectors contiguously. `streamed` stores bypass the caches; `to` must be aligned for them."""
    for chunk, values in enumerate(sums):
        address = builder.add(out, _LONG(chunk * values.type.count * 4))
        alignment = STREAMED_ALIGNMENT if streamed else 4
        store = builder.store(values, builder.inttoptr(address, ir.PointerType(values.type)), align=alignment)
        if streamed:
            store.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))


def _sum_bags(builder: Any, dtype: int, chunks: int, lanes: int, scaled: bool, column: Any, args: Any) -> None:
    """Sum `chunks` times `lanes` columns of all bags."""
    out, pitch, num_bags, bag_at, row_at, prefetch_ahead, scales, _, streamed = args
    byte_offset = builder.mul(column, _LONG(4 if dtype == FLOAT32 else 2))
    first_bag = builder.add(out, builder.mul(column, _LONG(4)))

    def sum_bag(bag: Any, _: Any) -> list[Any]:
        rows = row_at, prefetch_ahead, scales, *bag_at(bag), byte_offset
        sums = _sum_columns(builder, dtype, chunks, lanes, scaled, rows)
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

    _loop(builder, num_bags, [], sum_bag)


def _sum_all_columns(builder: Any, dtype: int, scaled: bool, args: Any) -> None:
    """Sum all columns: a loop over tiles of each width of SUMS, from the widest that fits."""
    column, size = _LONG(0), args[-2]
    for chunks, lanes in SUMS[dtype]:
        entry_block, first_column = builder.basic_block, column
        head, body, exit_block = (builder.append_basic_block(f"columns_{label}") for label in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        column = builder.phi(_LONG)
        column.add_incoming(first_column, entry_block)
        end = builder.add(column, _LONG(chunks * lanes))
        builder.cbranch(builder.icmp_signed("<=", end, size), body, exit_block)
        builder.position_at_end(body)
        _sum_bags(builder, dtype, chunks, lanes, scaled, column, args)
        column.add_incoming(end, builder.basic_block)
        builder.branch(head)
        builder.position_at_end(exit_block)


def _sum(builder: Any, dtype: int, bags: Any, rows: Any, scales: Any, size: Any, streamed: Any) -> None:
    """Emit one function with both loops, with and without `scales`: each function costs Numba compile time."""
    with builder.if_else(builder.icmp_signed("==", scales, _LONG(0))) as (plain, scaled):
        with plain:
            _sum_all_columns(builder, dtype, False, (*bags, *rows, scales, size, streamed))
        with scaled:
            _sum_all_columns(builder, dtype, True, (*bags, *rows, scales, size, streamed))


@emitted(types.void, *[types.int64] * 5)
def sum_float32_rows(builder: Any, out: Any, rows: Any, scales: Any, count: Any, size: Any) -> None:
    """Compute float32 `out[:size] = Σ_i scales[i] · row_i`, in order; `rows` is the address of `count` row addresses.

    `scales` is the address of `count` float32 factors, or 0 for none.
    """
    bags = out, _LONG(0), _LONG(1), lambda _: (_LONG(0), count)
    reads = (lambda index: _item_at(builder, _LONG, rows, index)), (lambda *_: None)
    _sum(builder, FLOAT32, bags, reads, scales, size, _BIT(0))


@emitted(types.void, *[types.int64] * 6)
def sum_float32_groups(builder: Any, out: Any, starts: Any, num_groups: Any, rows: Any, scales: Any, size: Any) -> None:
    """Compute `sum_float32_rows` of groups: float32 `out[group, :size]` of rows [starts[group], starts[group + 1]).

    `starts` is an address of int32. Sums of groups of more than PIECE rows are 0. Each row is prefetched
    PREFETCH_DISTANCE rows ahead, so as many addresses follow those of the last group.
    """

    def group_at(group: Any) -> tuple[Any, Any]:
        ends = (_item_at(builder, _INT, builder.add(starts, _LONG(offset)), group) for offset in (0, 4))
        first, end = (builder.sext(value, _LONG) for value in ends)
        count = builder.sub(end, first)
        return first, builder.select(builder.icmp_signed("<=", count, _LONG(PIECE)), count, _LONG(0))

    def prefetch_ahead(index: Any, byte_offset: Any, num_bytes: int) -> None:
        address = builder.add(row_at(builder.add(index, _LONG(PREFETCH_DISTANCE))), byte_offset)
        for line in range(0, num_bytes, CACHE_LINE):
            _emit_prefetch(builder, builder.add(address, _LONG(line)))

    row_at = functools.partial(_item_at, builder, _LONG, rows)
    groups, reads = (out, builder.mul(size, _LONG(4)), num_groups, group_at), (row_at, prefetch_ahead)
    _sum(builder, FLOAT32, groups, reads, scales, size, _BIT(0))


def _make_sum(dtype: int) -> Any:
    @emitted(types.void, *[types.int64] * 10, types.boolean)
    def sum_bags_of_dtype(
        builder: Any, out: Any, pitch: Any, offsets: Any, num_bags: Any, ids: Any, table: Any, num_rows: Any,
        no_row: Any, scales: Any, size: Any, streamed: Any,
    ) -> None:  # fmt: skip
        # Positions are relative to the first bag's first id.
        row_bytes = builder.mul(size, _LONG(4 if dtype == FLOAT32 else 2))
        begin = _item_at(builder, _LONG, offsets, _LONG(0))
        last = builder.sub(builder.sub(_item_at(builder, _LONG, offsets, num_bags), begin), _LONG(1))

        def bag_at(bag: Any) -> tuple[Any, Any]:
            first = _item_at(builder, _LONG, offsets, bag)
            count = builder.sub(_item_at(builder, _LONG, offsets, builder.add(bag, _LONG(1))), first)
            return builder.sub(first, begin), count

        def row_address(index: Any) -> tuple[Any, Any]:
            row = _item_at(builder, _LONG, ids, index)
            return row, builder.add(table, builder.mul(row, row_bytes))

        def row_at(index: Any) -> Any:
            row, address = row_address(index)
            return builder.select(builder.icmp_unsigned("<", row, num_rows), address, no_row)

        # Beyond the last id, prefetch the last row again.
        def prefetch_ahead(index: Any, byte_offset: Any, num_bytes: int) -> None:
            index = builder.add(index, _LONG(PREFETCH_DISTANCE))
            index = builder.select(builder.icmp_signed("<", index, last), index, last)
            address = builder.add(row_address(index)[1], byte_offset)
            for line in range(0, num_bytes, CACHE_LINE):
                _emit_prefetch(builder, builder.add(address, _LONG(line)))

        _sum(builder, dtype, (out, pitch, num_bags, bag_at), (row_at, prefetch_ahead), scales, size, streamed)

    return sum_bags_of_dtype


_sum_float32, _sum_float16, _sum_bfloat16 = (_make_sum(dtype) for dtype in (FLOAT32, FLOAT16, BFLOAT16))


@inlined
def sum_bags(out, pitch, offsets, num_bags, ids, table, num_rows, no_row, scales, size, dtype, streamed):
    """Compute float32 `out[bag * pitch :][:size] = Σ_i scales[i] · table[ids[i]]` per bag, in order; `pitch` in bytes.

    `out`, `offsets` (int64 `[num_bags + 1]`), `ids` (int64, from the first bag on), `table` (`[num_rows, size]`),
    `no_row` (`[size]` zeros, read for ids out of range) and `scales` (float32, or 0 for none) are addresses. Rows are
    prefetched. `streamed` stores bypass the caches if `out` and `pitch` are aligned for them.
    """
    past_caches = streamed and (out | pitch) % STREAMED_ALIGNMENT == 0
    if dtype == FLOAT32:
        _sum_float32(out, pitch, offsets, num_bags, ids, table, num_rows, no_row, scales, size, past_caches)
    elif dtype == FLOAT16:
        _sum_float16(out, pitch, offsets, num_bags, ids, table, num_rows, no_row, scales, size, past_caches)
    else:
        _sum_bfloat16(out, pitch, offsets, num_bags, ids, table, num_rows, no_row, scales, size, past_caches)


def _make_dot(dtype: int) -> Any:
    @emitted(types.float32, types.int64, types.int64, types.int64)
    def dot_lanes(builder: Any, a: Any, b: Any, size: Any) -> Any:
        """Add full vectors lane by lane, reduce lanes by halving, then add the remaining elements one by one."""
        item = _LONG(4 if dtype == FLOAT32 else 2)
        num_vectors = builder.sdiv(size, _LONG(DOT_LANES))

        def product(element: Any, lanes: int) -> Any:
            a_values = load(builder, builder.add(a, builder.mul(element, _LONG(4))), _FLOAT, lanes)
            b_values = _load_float32(builder, builder.add(b, builder.mul(element, item)), dtype, lanes)
            return builder.fmul(a_values, b_values)

        def add_vector(index: Any, totals: Any) -> Any:
            return [builder.fadd(totals[0], product(builder.mul(index, _LONG(DOT_LANES)), DOT_LANES))]

        # Full vectors.
        zeros = ir.Constant(ir.VectorType(_FLOAT, DOT_LANES), [0.0] * DOT_LANES)
        (total,) = _loop(builder, num_vectors, [zeros], add_vector)
        # Reduce the lanes by halving.
        lanes = DOT_LANES
        while lanes > 1:
            lanes //= 2
            low, high = (ir.Constant(ir.VectorType(_INT, lanes), [*range(i, i + lanes)]) for i in (0, lanes))
            total = builder.fadd(builder.shuffle_vector(total, total, low), builder.shuffle_vector(total, total, high))
        # Remaining elements.
        num_added = builder.mul(num_vectors, _LONG(DOT_LANES))

        def add_element(index: Any, totals: Any) -> Any:
            return [builder.fadd(totals[0], product(builder.add(num_added, index), 1))]

        (total,) = _loop(builder, builder.sub(size, num_added), [total], add_element)
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
