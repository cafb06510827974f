"""Triton's interpreter with the same results in a quarter of the time, for tests.

It looks through `triton.language` for what it replaces at each call of a device function, computes whether integers
overflow and drops the answer, and derives types and shapes anew at each operation.
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
        self._changes = [(*change, getattr(*change[:2])) for change in changes.values()]
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


def _cache_types() -> None:
    numpy_type, initialize_block_type = interpreter._get_np_dtype, tl.block_type.__init__
    numpy_types = dict[str, np.dtype]()
    block_types = dict[tuple[object, ...], tuple[object, ...]]()

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
            block_types[key] = self.shape, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = block_types[key]

    interpreter._get_np_dtype = lambda kind: (
        numpy_types.get(kind.name) or numpy_types.setdefault(kind.name, numpy_type(kind))
    )
    tl.tensor.__init__, tl.block_type.__init__ = init_tensor, init_block_type
