"""Triton's interpreter with the same results in an eighth of the time, for tests.

It looks through `triton.language` for what it replaces at each call of a device function, computes whether integers
overflow and drops the answer, and derives types and shapes anew at each operation, of operands of one type and shape
too, and of a constant each time that it is an operand.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _direct(replacement: Any) -> Any:
    """What calls a function of the language without the two wrappers that pass it the interpreter's semantic."""
    member = (getattr(replacement, "__kwdefaults__", None) or {}).get("member")
    if member is None:
        return replacement
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


class _Launch:
    """What the interpreter replaces in the language until a kernel has ended.

    The kernel's first call of it replaces everything; the device functions that it calls find that done.
    """

    def __init__(self) -> None:
        # As of a function in a kernel's module and of one in Triton's library.
        function = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        scope, changes = interpreter._patch_lang(function), dict[tuple[int, str], tuple[Any, str, Any]]()
        for place, name, before in scope._changes:
            changes.setdefault((id(place), name), (place, name, before))
        self._changes = [(*change, _direct(getattr(*change[:2]))) for change in changes.values()]
        self._runs = False
        scope.restore()

    def __call__(self, function: object) -> Any:
        if self._runs:
            return interpreter._LangPatchScope()  # without a change to restore
        for place, name, _, value in self._changes:
            setattr(place, name, value)
        self._runs = True
        return self

    def restore(self) -> None:
        for place, name, before, _ in self._changes:
            delattr(place, name) if before is interpreter._MISSING else setattr(place, name, before)
        self._runs = False


def hasten() -> None:
    """Change the interpreter, once per process. Versions of Triton without these parts stay as they are."""
    if not hasattr(interpreter, "_LangPatchScope") or isinstance(interpreter._patch_lang, _Launch):
        return
    interpreter._patch_lang = _Launch()
    if not interpreter.interpreter_builder.options.debug:
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *args: None  # the answer is for debugging
    _cache_types()
    _shorten_checks()
    _unwrap_plain_values()


def _cache_types() -> None:
    numpy_type, initialize_block_type = interpreter._get_np_dtype, tl.block_type.__init__
    numpy_types = dict[str, np.dtype]()
    block_types = dict[tuple[object, ...], tuple[object, ...]]()
    shapes = dict[tuple[object, ...], object]()

    @functools.cache
    def shape_of(*sizes: int) -> tuple[tl.tuple, tl.constexpr]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def init_tensor(self: tl.tensor, handle: object, kind: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_of(*kind.shape) if kind.is_block() else shape_of()

    def init_block_type(self: tl.block_type, element: tl.dtype, shape: Sequence[int | tl.constexpr]) -> None:
        key = element.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in block_types:
            initialize_block_type(self, element, shape)
            shared = shapes.setdefault(key[1:], self.shape)  # whatever the elements: `_shorten_checks` compares it
            block_types[key] = shared, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = block_types[key]

    interpreter._get_np_dtype = lambda kind: (
        numpy_types.get(kind.name) or numpy_types.setdefault(kind.name, numpy_type(kind))
    )
    tl.tensor.__init__, tl.block_type.__init__ = init_tensor, init_block_type


def _shorten_checks() -> None:
    """Operands of a binary operation: two of one type, or a pointer and an offset, are not cast, two of one shape not
    broadcast, and the tensor of a constant is made once."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    constants = dict[tuple[type, float, str], Any]()
    common_shapes = dict[tuple[int, int], tuple[Any, Any, Any]]()  # by the ids of two shapes, which it keeps
    integers, floats = (tl.int32, tl.int64), (tl.float32, tl.float64)

    def broadcast_values(self: TritonSemantic, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if not left.type.is_block() and not right.type.is_block():
            return left, right
        if not right.type.is_block():
            return left, splat(self, right, left.type)
        if not left.type.is_block():
            return splat(self, left, right.type), right
        shapes = left.type.shape, right.type.shape
        if shapes[0] is shapes[1]:
            return left, right
        key = id(shapes[0]), id(shapes[1])
        if key not in common_shapes:
            result = broadcast(self, left, right)
            if len(shapes[0]) == len(shapes[1]):
                common_shapes[key] = *shapes, result[0].type.shape
            return result
        common = common_shapes[key][-1]
        return expand(self, left, common), expand(self, right, common)

    def expand(self: TritonSemantic, value: tl.tensor, shape: Any) -> tl.tensor:
        if value.type.shape is shape:
            return value
        return self.tensor(self.builder.create_broadcast(value.handle, shape), tl.block_type(value.dtype, shape))

    def splat(self: TritonSemantic, value: tl.tensor, like: tl.block_type) -> tl.tensor:
        kind = like if like.element_ty is value.dtype else like.with_element_ty(value.dtype)
        return self.tensor(self.builder.create_splat(kind, value.handle), kind)

    def joins(value: object, kind: tl.dtype) -> bool:
        """Whether a constant takes the type of the other operand, and has a value there."""
        if type(value) is int:
            return (kind in integers or kind in floats) and -(2**31) <= value < 2**31
        return type(value) is float and kind in floats and value == value

    def constant(self: TritonSemantic, value: float, like: tl.tensor) -> tl.tensor:
        key = type(value), value, like.type.name
        if key not in constants:
            handle = broadcast_values(self, like, self.scalar_constant(value, like.dtype))[1].handle
            handle.data.flags.writeable = False
            constants[key] = handle
        return self.tensor(constants[key], like.type)

    def check_operands(
        self: TritonSemantic, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
        if isinstance(lhs, tl.tensor):
            if isinstance(rhs, tl.tensor):
                if lhs.dtype is rhs.dtype and not div_or_mod and not lhs.dtype.is_ptr():
                    return broadcast_values(self, lhs, rhs)
                if allow_lhs_ptr and lhs.dtype.is_ptr() and rhs.dtype.is_int():
                    return broadcast_values(self, lhs, rhs)
            elif arithmetic_check and joins(rhs, lhs.dtype):
                return lhs, constant(self, rhs, lhs)
        elif arithmetic_check and isinstance(rhs, tl.tensor) and joins(lhs, rhs.dtype):
            return constant(self, lhs, rhs), rhs
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    TritonSemantic.broadcast_impl_value = broadcast_values
    TritonSemantic.binary_op_type_checking_impl = check_operands


def _unwrap_plain_values() -> None:
    """Without a look at each kind of value that may have constants in it, where a value has none."""
    unwrap, equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    plain = {tl.tensor, int, float, bool, str, tl.dtype, tl.block_type, tl.pointer_type, type(None)}
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
