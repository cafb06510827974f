"""What kernels need beneath NumPy: rows by address, prefetch, and the bits of 16-bit floats."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tritonemb.kernels.cpu.jit import inlined

FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2  # how a row's bits are to be read
CACHE_LINE = 64  # bytes
_FLOAT, _HALF, _SHORT = ir.FloatType(), ir.HalfType(), ir.IntType(16)


def _cast(source: types.Type, result: types.Type, build: Any) -> Any:
    """An intrinsic of one argument whose code is `build(builder, value)`."""

    @intrinsic
    def cast(typing_context: Any, value: types.Type) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return build(builder, args[0])

        return result(source), generate

    return cast


def _pointer(item: types.Type, code: ir.Type) -> Any:
    return _cast(
        types.int64, types.CPointer(item), lambda builder, address: builder.inttoptr(address, ir.PointerType(code))
    )


_float32_pointer = _pointer(types.float32, _FLOAT)
_int64_pointer = _pointer(types.int64, ir.IntType(64))
_uint16_pointer = _pointer(types.uint16, _SHORT)
float32_bits = _cast(types.float32, types.uint32, lambda b, a: b.bitcast(a, ir.IntType(32)))
float32_from_bits = _cast(types.uint32, types.float32, lambda b, a: b.bitcast(a, _FLOAT))
float16_to_float32 = _cast(types.uint16, types.float32, lambda b, a: b.fpext(b.bitcast(a, _HALF), _FLOAT))
float32_to_float16 = _cast(types.float32, types.uint16, lambda b, a: b.bitcast(b.fptrunc(a, _HALF), _SHORT))


@intrinsic
def _prefetch_line(typing_context: Any, address: types.Type) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer_type, int32 = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer_type], ir.FunctionType(ir.VoidType(), [pointer_type, int32, int32, int32])
        )
        pointer = builder.inttoptr(args[0], pointer_type)
        builder.call(function, [pointer, int32(0), int32(3), int32(1)])  # to read, keep in all levels, data
        return context.get_dummy_value()

    return types.void(types.int64), generate


@inlined
def prefetch(address, num_bytes):
    """Ask for the cache lines of `num_bytes` bytes from `address` on."""
    for line in range(0, num_bytes, CACHE_LINE):
        _prefetch_line(address + line)


@inlined
def float32_row(address, size):
    """The `size` float32 values at `address` as an array. It counts no references: slices of it cost nothing."""
    return numba.carray(_float32_pointer(address), size)


@inlined
def uint16_row(address, size):
    """Likewise, 16-bit values."""
    return numba.carray(_uint16_pointer(address), size)


@inlined
def int64_row(address, size):
    """Likewise, int64 values."""
    return numba.carray(_int64_pointer(address), size)


@inlined
def bfloat16_to_float32(bits):
    """Exact: a bfloat16 is the upper half of a float32."""
    return float32_from_bits(numba.uint32(bits) << numba.uint32(16))


@inlined
def element_size(dtype):
    """Bytes."""
    return 4 if dtype == FLOAT32 else 2
