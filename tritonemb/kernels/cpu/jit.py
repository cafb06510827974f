"""How CPU kernels are compiled: Numba, without the GIL, cached on disk.

Numba's own cache looks at one source file only, so a kernel would stay stale when a helper in another file changes.
Here the cache's folder is named after a hash of all kernel sources, and of the files whose constants are compiled in.
`TRITONEMB_CACHE_DIR` moves it.

What kernels need beneath NumPy: rows by address, prefetch, and the bits of 16-bit floats.

Tensors as the plain arrays that CPU kernels read, and work cut into tasks.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import caching, codegen
from numba.extending import intrinsic
from torch import Tensor

from tritonemb.kernels.cpu import threads

_log = logging.getLogger(__name__)
_finished: list[float] = []  # seconds that each kernel compiled by this process took
_tasks: set[str] = set()  # names of functions that are `called`
_Library = codegen.CPUCodeLibrary
_optimize = _Library._optimize_final_module
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def cache_dir() -> Path:
    """The user's cache folder for tritonemb."""
    if given := os.environ.get("TRITONEMB_CACHE_DIR"):
        return Path(given)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tritonemb"


@functools.cache
def _kernel_cache_dir() -> Path:
    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    here, kernels, package = Path(__file__).parents[:3]
    constants = kernels / "random.py", package / "layout.py", package / "optimizers.py"
    for source in (*sorted(here.glob("*.py")), *constants):
        digest.update(source.read_bytes())
    folder = cache_dir() / "kernels" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # a read-only home: compiled kernels last as long as the machine's temporary files
        folder = Path(tempfile.gettempdir()) / f"tritonemb-{_user()}" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


class _Locator(caching._CacheLocator):
    """Finds a kernel's cache by the content of the kernels, not by a file's time stamp."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        self._name = py_func.__qualname__

    def get_cache_path(self) -> str:
        return str(_kernel_cache_dir())

    def get_source_stamp(self) -> str:
        return self._name

    def get_disambiguator(self) -> str:
        return ""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func)


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes: ClassVar = [_Locator]


class _KernelCache(caching.FunctionCache):
    _impl_class = _CacheImpl


@contextmanager
def _compiling(kernel: str, name: str) -> Iterator[None]:
    """Log that a kernel is compiled, and save time. Numba calls this with its lock held, for kernels not in the cache.

    Numba optimizes every function by itself and again inside each of its callers. Here only the kernel `name` and its
    tasks are, which hold all that they call. (The kernel alone, once, leaves loops over 16-bit rows unvectorized.)
    """
    done = f"{len(_finished)} done in {sum(_finished):.0f} s, kept in {cache_dir()}"
    _log.info("compiling the CPU kernel %s (first use on this machine; %s)", kernel, done)

    def optimize(library: Any) -> None:
        if library.name == name or library.name in _tasks:
            _optimize(library)

    before, start, collects = _Library._optimize_final_module, time.perf_counter(), gc.isenabled()
    gc.disable()  # the compiler makes many objects: every collection would go through all of torch's
    _Library._optimize_final_module = optimize
    try:
        yield
    finally:
        _Library._optimize_final_module = before
        if collects:
            gc.enable()
        _finished.append(time.perf_counter() - start)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel, called from Python, at its first call."""
    dispatcher = numba.njit(**_OPTIONS)(function)
    dispatcher._cache = _KernelCache(dispatcher.py_func)
    kernel = f"{function.__module__.rpartition('.')[2]}.{function.__name__.lstrip('_')}"
    dispatcher._compiler.compile = _compiling(kernel, function.__qualname__)(dispatcher._compiler.compile)
    return dispatcher


def called(function: Callable[..., Any]) -> Any:
    """Compile a part of kernels that only kernels call: without what Python would need, which takes time to compile."""
    _tasks.add(function.__qualname__)
    return numba.njit(**_OPTIONS, no_cpython_wrapper=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Likewise, and always inline it: arrays are passed in pieces, so a call costs more than a short row."""
    return numba.njit(**_OPTIONS, no_cpython_wrapper=True, forceinline=True)(function)


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


DTYPE_CODES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


def share(num_items: int, num_elements: int) -> np.ndarray:
    """int64: bounds of the tasks that split `num_items` items, which move `num_elements` elements in all."""
    wanted = 1 if num_elements < 16_384 else threads.num_threads()
    num_tasks = max(1, min(wanted, num_items))
    return np.arange(num_tasks + 1) * num_items // num_tasks


def addresses_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64 `[T]`: where each tensor's contiguous memory begins."""
    assert all(tensor.is_contiguous() for tensor in tensors)
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


def dtypes_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64 `[T]`: how each tensor's bits are to be read."""
    return np.array([DTYPE_CODES[tensor.dtype] for tensor in tensors], dtype=np.int64)


def as_int64(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(torch.int64).contiguous().numpy()


def as_float32(tensor: Tensor | None) -> np.ndarray:
    """Absent weights are an empty array."""
    if tensor is None:
        return np.empty(0, dtype=np.float32)
    return tensor.detach().to(torch.float32).contiguous().numpy()
