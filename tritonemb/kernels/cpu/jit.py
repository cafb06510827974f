"""How CPU kernels are compiled, by Numba, and run on threads.

Kernels release the GIL and are cached on disk. Numba's own cache looks at one source file only, so a kernel would stay
stale when a helper in another file changes. Here the cache's folder is named after a hash of all sources here, of those
beside the kernel, and of the files whose constants are compiled in. `TRITONEMB_CACHE_DIR` moves it. Where a file in it
is damaged, or none can be written, kernels are compiled anew, with one warning. Where notes are not logged, one line on
stderr says so after two seconds of compiling, unless `TRITONEMB_QUIET` is set.

A kernel's tasks run on as many threads as its caller asks for, itself one of them. Compiled code draws and runs them,
because a thread that runs Python waits for the interpreter's lock, longer than a small task takes. The threads are
those of torch's OpenMP, if it is GNU's (Linux): they keep spinning for a while after each of torch's parallel regions,
so another pool would share the cores with them. Elsewhere, and in a forked child, whose copy of OpenMP has lost its
threads, a pool of our own serves.
"""

import ctypes
import functools
import gc
import hashlib
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import llvmlite.binding
import numba
import torch
from llvmlite import ir
from numba import _dynfunc, types
from numba.core import caching, cgutils, codegen
from numba.core.compiler import CompileResult, Flags
from numba.core.cpu import CPUContext
from numba.core.lowering import Lower
from numba.extending import intrinsic

from tritonemb.utils import cache_dir, kernel_folder

_log = logging.getLogger(__name__)
_warn_once = functools.cache(_log.warning)
_finished: list[float] = []  # seconds that each kernel compiled by this process took
_tasks: set[str] = set()  # names of functions that are `called`
_task_libraries: dict[str, Any] = {}  # those that `run_tasks` runs, by symbol
_PATIENCE = 2.0  # seconds of compiling without a word
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_DEFAULT_FLAGS = Flags().values()


@functools.cache
def _kernel_cache_dir(folder: Path) -> Path:
    """The cache of kernels in a folder, which may use functions of the files beside them and of those here."""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    here, kernels, package = Path(__file__).parents[:3]
    constants = kernels / "random.py", package / "layout.py", package / "optimizers.py"
    for source in (*sorted({*here.glob("*.py"), *folder.glob("*.py")}), *constants):
        digest.update(source.read_bytes())
    return kernel_folder() / digest.hexdigest()[:16]


class _Files(caching.IndexDataCacheFile):
    """A kernel's machine code by signature: a file each, named after it, that begins with the digest of the rest.

    Numba numbers them in an index. Two processes that save at once would give two signatures one number, and the code
    of one be run for the other. What does not fit on the disk is compiled again by the next process.
    """

    cache_path = ""  # which Numba shows in statistics

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        data = self.load((sig, target_context.codegen().magic_tuple()))
        return None if data is None else CompileResult._rebuild(target_context, *data)

    def save_overload(self, sig: Any, data: Any) -> None:
        assert not data.library.has_dynamic_globals, "the code holds pointers of this process"
        try:
            self.save((sig, data.codegen.magic_tuple()), data._reduce())
        except OSError as error:
            _warn_once(f"{self._cache_path}: compiled kernels cannot be kept there ({error.strerror})")

    def save(self, key: object, data: object) -> None:
        content = self._dump(data)
        os.makedirs(self._cache_path, exist_ok=True)
        with self._open_for_write(self._path_of(key)) as file:
            file.write(hashlib.sha256(content).digest() + content)

    def load(self, key: object) -> Any:
        stored = b""
        with suppress(OSError):
            stored = Path(self._path_of(key)).read_bytes()
        if stored[:32] == hashlib.sha256(stored[32:]).digest():
            return pickle.loads(stored[32:])
        if stored:
            _warn_once(f"{self._cache_path}: compiled kernels are damaged there; they are compiled anew")
        return None

    def _path_of(self, key: object) -> str:
        return str(self._data_path(self._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:16], 16))))


class _Library(codegen.JITCodeLibrary):
    """The code of a function that is compiled for a kernel.

    Numba optimizes every function by itself and again inside each of its callers, and makes machine code of all. Here
    the kernel is, with all that it calls, and its tasks, twice: once leaves some loops over 16-bit rows unvectorized.
    """

    kernel: ClassVar[str] = ""

    def _optimize_final_module(self) -> None:
        for _ in range(2 if self.name in _tasks else self.name == self.kernel):
            super()._optimize_final_module()
        if self.name == self.kernel:
            missing = [function.name for function in self._final_module.functions if function.is_declaration]
            for name in _task_libraries.keys() & missing:
                self._final_module.link_in(_task_libraries[name]._get_module_for_linking(), preserve=True)

    def _finalize_final_module(self) -> None:
        if self.name == self.kernel:
            super()._finalize_final_module()
        self._finalized = True


@functools.cache
def _say() -> None:
    if not _log.isEnabledFor(logging.INFO) and not os.environ.get("TRITONEMB_QUIET"):
        where = f"{cache_dir()} keeps them (TRITONEMB_QUIET=1 leaves this line out)"
        print(f"tritonemb: compiling kernels for this machine, once: {where}", file=sys.stderr, flush=True)


@contextmanager
def _compiling(kernel: str, name: str) -> Iterator[None]:
    """Log that a kernel is compiled, and save time. Numba calls this with its lock held, for kernels not in the cache.

    `name` is the kernel's function.
    """
    _log.info(
        "compiling the CPU kernel %s (first use on this machine; %d done in %.0f s, kept in %s)",
        kernel, len(_finished), sum(_finished), cache_dir(),
    )  # fmt: skip
    start, collects, make_executable = time.perf_counter(), gc.isenabled(), CPUContext.get_executable
    timer = threading.Timer(_PATIENCE - sum(_finished), _say)
    timer.start()

    def get_executable(context: Any, library: Any, descriptor: Any, env: Any) -> Any:
        if library.name == name:
            return make_executable(context, library, descriptor, env)
        return _dynfunc.make_function(descriptor.lookup_module(), descriptor.qualname, "", 0, env, (library,))

    changes: list[tuple[Any, str, Any]] = [
        (_Library, "kernel", name),
        (codegen.JITCPUCodegen, "_library_class", _Library),
        (CPUContext, "get_executable", get_executable),
        (Lower, "create_cfunc_wrapper", lambda lower: None),  # Numba's own functions, too, are called by kernels alone
        (Flags, "values", lambda flags: _DEFAULT_FLAGS | flags._values),  # the same in a tenth of the time; asked often
    ]
    before = [getattr(owner, attribute) for owner, attribute, _ in changes]
    gc.disable()  # the compiler makes many objects: every collection would go through all of torch's
    for owner, attribute, value in changes:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for (owner, attribute, _), value in zip(changes, before, strict=True):
            setattr(owner, attribute, value)
        if collects:
            gc.enable()
        timer.cancel()
        _finished.append(time.perf_counter() - start)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a kernel, called from Python, at its first call."""
    dispatcher = numba.njit(**_OPTIONS)(function)
    folder = _kernel_cache_dir(Path(sys.modules[function.__module__].__file__ or __file__).parent)
    dispatcher._cache = _Files(str(folder), f"{function.__module__}.{function.__qualname__}", "")
    kernel = f"{function.__module__.rpartition('.')[2]}.{function.__name__.lstrip('_')}"
    dispatcher._compiler.compile = _compiling(kernel, function.__qualname__)(dispatcher._compiler.compile)
    return dispatcher


def called(function: Callable[..., Any], **options: bool) -> Any:
    """Compile a part of kernels that only kernels call: without what Python would need, which takes time to compile."""
    _tasks.add(function.__qualname__)
    return numba.njit(**_OPTIONS, no_cpython_wrapper=True, **options)(function)


def uncounted(function: Callable[..., Any]) -> Any:
    """Likewise, for small functions that are called very often with many arrays, of which Numba would count references.
    It can make no arrays, and return none.
    """
    return called(function, _nrt=False)


def inlined(function: Callable[..., Any]) -> Any:
    """Likewise, and always inline it: arrays are passed in pieces, so a call costs more than a short row."""
    return numba.njit(**_OPTIONS, no_cpython_wrapper=True, forceinline=True)(function)


def parallel(function: Callable[..., Any]) -> Any:
    """Compile `function(task, *args)`; it is called from Python with numbers of threads and tasks, and `args`."""
    task = called(function)

    def all_tasks(num_threads, num_tasks, *args):
        run_tasks(num_threads, num_tasks, task, args)

    all_tasks.__module__, all_tasks.__name__ = function.__module__, function.__name__
    all_tasks.__qualname__ = f"{function.__qualname__}_all"
    return compiled(all_tasks)


_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Team = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_pool = ThreadPoolExecutor(1024, "tritonemb-kernels")  # starts a thread when none is idle


@_Team
def _own_team(body: int, data: int, size: int, flags: int) -> None:
    """As `GOMP_parallel`: `body(data)` on each of `size` threads, the calling one among them; returns when all have."""
    work, helpers = _Body(body), list[Future[None]]()
    try:
        helpers.extend(_pool.submit(work, data) for _ in range(size - 1))
    finally:  # although no thread could be started: each call draws tasks until none is left
        work(data)
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _use_own_team() -> None:
    """A forked child has the parent's pools without their threads."""
    global _pool
    _pool, _team.value = ThreadPoolExecutor(1024, "tritonemb-kernels"), ctypes.cast(_own_team, ctypes.c_void_p).value


_TEAM = "tritonemb_team"  # where compiled code finds the address of the team that runs its tasks
_team = ctypes.cast(getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", _own_team), ctypes.c_void_p)
llvmlite.binding.add_symbol(_TEAM, ctypes.addressof(_team))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_use_own_team)


_LONG, _INT = ir.IntType(64), ir.IntType(32)
_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def run_tasks(typing_context: Any, num_threads: types.Type, num_tasks: types.Type, kernel: Any, args: Any) -> Any:
    """`kernel(task, *args)` for each task in [0, num_tasks), shared among threads."""
    argument_types = tuple(types.unliteral(argument) for argument in args.types)
    signature = kernel.get_call_type(typing_context, (types.int64, *argument_types), {})
    compiled = kernel.dispatcher.overloads[signature.args]
    _task_libraries[compiled.fndesc.llvm_func_name] = compiled.library

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        threads, tasks, _, arguments = values
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
        most = builder.select(builder.icmp_signed("<", tasks, threads), tasks, threads)
        with builder.if_else(builder.icmp_signed("<=", most, _LONG(1))) as (alone, together):
            with alone:
                builder.call(body, [data])
            with together:
                team_type = ir.FunctionType(ir.VoidType(), [body.type, _POINTER, _INT, _INT])
                function = builder.load(context.get_c_value(builder, team_type.as_pointer(), _TEAM))
                builder.call(function, [body, data, builder.trunc(threads, _INT), _INT(0)])
        failed = builder.load(cgutils.gep_inbounds(builder, shared, 0, 2))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, _LONG(0))):
            context.call_conv.return_user_exc(builder, MemoryError, ("a kernel found no memory",))
        return context.get_dummy_value()

    return types.void(num_threads, num_tasks, kernel, args), generate


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
FEW_ELEMENTS = 16_384  # that one thread moves or adds before another has begun
