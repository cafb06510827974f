"""How CPU kernels are compiled, by Numba, and run on threads.

Kernels release the GIL and are cached on disk. Numba's own cache looks at one source file only, so a kernel would stay
stale when a helper in another file changes. Here the cache's folder is named after a hash of all kernel sources, and of
the files whose constants are compiled in. `TRITONEMB_CACHE_DIR` moves it.

A kernel's tasks run on as many threads as `torch.get_num_threads()`, the caller one of them. Compiled code draws and
runs them, because a thread that runs Python waits for the interpreter's lock, longer than a small task takes. Where
torch's own threads are GNU OpenMP's (its Linux wheels), tasks run on those: they keep spinning for a while after each
of torch's parallel regions, so another pool would share the cores with them. Elsewhere, and in a forked child, whose
copy of OpenMP has lost its threads, a pool of our own serves.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import caching, cgutils, codegen
from numba.extending import intrinsic
from torch import Tensor

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
        user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
        folder = Path(tempfile.gettempdir()) / f"tritonemb-{user}" / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


class _Locator(caching._CacheLocator):
    """Finds a kernel's cache by the content of the kernels, not by a file's time stamp."""

    def __init__(self, py_func: Callable[..., Any]) -> None:
        self._module = py_func.__module__

    def get_cache_path(self) -> str:
        return str(_kernel_cache_dir())

    def get_source_stamp(self) -> str:
        return ""

    def get_disambiguator(self) -> str:
        return self._module

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func)


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes: ClassVar = [_Locator]


class _KernelCache(caching.FunctionCache):
    _impl_class = _CacheImpl

    def _index_key(self, signature: Any, target: Any) -> tuple[Any, ...]:
        """Numba would add the pickled closure, which differs between processes where it holds another kernel."""
        return signature, target.magic_tuple()


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


def parallel(function: Callable[..., Any]) -> Callable[..., None]:
    """Compile `function(task, *args)`; what returns is called from Python with the number of tasks and `args`."""
    task = called(function)

    def all_tasks(team, num_threads, num_tasks, *args):
        run_tasks(team, num_threads, num_tasks, task, args)

    all_tasks.__module__, all_tasks.__name__ = function.__module__, function.__name__
    all_tasks.__qualname__ = f"{function.__qualname__}_all"
    kernel = compiled(all_tasks)
    return lambda num_tasks, *args: kernel(*team(), num_tasks, *args)


_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_forked = False
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Team = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def team(alone: bool = False) -> tuple[int, int]:
    """Who runs a kernel's tasks: the address of a team, and the number of its threads; `alone`: the caller.

    A team is `void f(void (*body)(void *), void *data, unsigned num_threads, unsigned flags)`. It calls `body(data)` on
    each of several threads, the calling one among them, and returns when all have. Address 0: the calling one alone.
    """
    num_threads = 1 if alone else torch.get_num_threads()
    if num_threads <= 1:
        return 0, 1
    return _own_team_address if _forked else _openmp_team() or _own_team_address, num_threads


@_Team
def _own_team(body: int, data: int, size: int, flags: int) -> None:
    work, helpers = _Body(body), list[Future[None]]()
    try:
        helpers.extend(_submit(work, data) for _ in range(size - 1))
    finally:  # although no thread could be started: each call draws tasks until none is left
        work(data)
        for helper in helpers:
            if not helper.cancel():
                helper.result()


_own_team_address: int = ctypes.cast(_own_team, ctypes.c_void_p).value or 0


@functools.cache
def _openmp_team() -> int:
    """The address of `GOMP_parallel` of the OpenMP that torch has loaded, if it is GNU's, else 0."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return 0
    loaded = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    if len(loaded) != 1:
        return 0
    return ctypes.cast(ctypes.CDLL(loaded.pop()).GOMP_parallel, ctypes.c_void_p).value or 0


def _submit(work: Callable[[int], None], data: int) -> Future[None]:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < torch.get_num_threads() - 1:
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool_size = max(1, torch.get_num_threads() - 1)
            _pool = ThreadPoolExecutor(_pool_size, thread_name_prefix="tritonemb")
        return _pool.submit(work, data)


def _forget() -> None:
    """A forked child has the parent's pools without their threads."""
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


_LONG, _INT = ir.IntType(64), ir.IntType(32)
_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def run_tasks(
    typing_context: Any, team: types.Type, num_threads: types.Type, num_tasks: types.Type, kernel: Any, args: Any
) -> Any:
    """`kernel(task, *args)` for each task in [0, num_tasks), shared among the threads of `team`, an address.

    `team` is the address of a function like `GOMP_parallel` (see `team`), or 0 to run on this thread alone.
    """
    argument_types = tuple(types.unliteral(argument) for argument in args.types)
    signature = kernel.get_call_type(typing_context, (types.int64, *argument_types), {})
    compiled = kernel.dispatcher.overloads[signature.args]

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        context.active_code_library.add_linking_library(compiled.library)
        team_address, threads, tasks, _, arguments = values
        pieces = cgutils.unpack_tuple(builder, arguments)
        pieces = [
            context.cast(builder, piece, given, wanted)
            for piece, given, wanted in zip(pieces, args.types, argument_types, strict=True)
        ]
        shared_type = ir.LiteralStructType([_LONG, _LONG, _LONG, *(piece.type for piece in pieces)])
        shared = cgutils.alloca_once(builder, shared_type)
        for index, value in enumerate([_LONG(0), tasks, _LONG(0), *pieces]):
            builder.store(value, cgutils.gep_inbounds(builder, shared, 0, index))
        body = _make_body(context, builder.module, shared_type, compiled.fndesc, signature)
        data = builder.bitcast(shared, _POINTER)
        no_team, few = builder.icmp_signed("==", team_address, _LONG(0)), builder.icmp_signed("<=", tasks, _LONG(1))
        with builder.if_else(builder.or_(no_team, few)) as (alone, together):
            with alone:
                builder.call(body, [data])
            with together:
                team_type = ir.FunctionType(ir.VoidType(), [body.type, _POINTER, _INT, _INT])
                function = builder.inttoptr(team_address, team_type.as_pointer())
                builder.call(function, [body, data, builder.trunc(threads, _INT), _INT(0)])
        failed = builder.load(cgutils.gep_inbounds(builder, shared, 0, 2))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, _LONG(0))):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel found no memory",))
        return context.get_dummy_value()

    return types.void(team, num_threads, num_tasks, kernel, args), generate


def _make_body(context: Any, module: Any, shared_type: Any, descriptor: Any, signature: Any) -> Any:
    """What each thread runs: draw a task's number, run the task, until none is left."""
    name = module.get_unique_name("run_tasks_body")
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER]), name)
    body.linkage = "internal"
    labels = ("start", "draw", "work", "failed", "end")
    start, draw, work, failed, end = (body.append_basic_block(label) for label in labels)
    builder = ir.IRBuilder(start)
    shared = builder.bitcast(body.args[0], shared_type.as_pointer())
    counter, num_tasks, failure, *pieces = (
        cgutils.gep_inbounds(builder, shared, 0, index) for index in range(len(shared_type.elements))
    )
    arguments = [builder.load(piece) for piece in pieces]
    last = builder.load(num_tasks)
    builder.branch(draw)
    builder.position_at_end(draw)
    task = builder.atomic_rmw("add", counter, _LONG(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", task, last), work, end)
    builder.position_at_end(work)
    status, _ = context.call_internal_no_propagate(builder, descriptor, signature, [task, *arguments])
    builder.cbranch(status.is_error, failed, draw)
    builder.position_at_end(failed)
    builder.store(_LONG(1), failure)
    builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()
    return body


FLOAT32, FLOAT16, BFLOAT16 = range(3)  # how a row's bits are to be read
DTYPE_CODES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}


def share(num_items: int, num_elements: int) -> np.ndarray:
    """int64: bounds of the tasks that split `num_items` items, which move `num_elements` elements in all."""
    wanted = 1 if num_elements < 16_384 else torch.get_num_threads()
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
