"""Compilation of CPU kernels by Numba, their cache on disk, and their thread pool.

Kernels release the GIL. Numba's own cache checks one source file only, so a kernel would be stale after a change of a
helper in another file. Here the cache folder is named after a hash of all sources in this package and in the kernel's,
and of the files whose constants are compiled in. `TRITONEMB_CACHE_DIR` sets its parent. If a file in it is damaged or
cannot be written, kernels are compiled again, with one warning. Compilation is logged at level INFO; if that is off, a
line on stderr announces it after two seconds, unless `TRITONEMB_QUIET` is set.

The tasks of a kernel run on as many threads as its caller requests, including the caller's. Compiled code draws and
runs tasks: a thread in Python would wait for the GIL, longer than a small task takes. The threads are those of torch's
OpenMP if it is GNU's (Linux): they spin for a while after each parallel region of torch, so a second pool would compete
with them for cores. Elsewhere, and in a forked child, whose OpenMP has lost its threads, a Python pool is used.
"""

import atexit
import ctypes
import functools
import gc
import hashlib
import importlib
import logging
import os
import pickle
import subprocess
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
from numba.core import caching, cgutils, codegen, errors, event
from numba.core.compiler import CompileResult, Flags
from numba.core.cpu import CPUContext
from numba.core.lowering import Lower
from numba.extending import intrinsic

from tritonemb.utils import cache_dir, kernel_folder

_log = logging.getLogger(__name__)
_warn_once = functools.cache(_log.warning)
_compile_seconds: list[float] = []  # of each kernel that this process compiled
_passes: dict[str, int] = {}  # of the optimizer, by name of a function; others are optimized where they are called
_task_libraries: dict[str, Any] = {}  # of functions that `run_tasks` runs, by symbol
_NOTICE_SECONDS = 2.0  # compilation time before the notice on stderr
_FIRST_KERNELS = {"random.initialize", "row_groups.sort"}  # of a train step, but not of scoring
_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
_LOCK_SECONDS, _POLL_SECONDS = 60.0, 0.02  # a kernel takes 10 s where other processes compete for the cores
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": True}
_DEFAULT_FLAGS = Flags().values()


@functools.cache
def _kernel_cache_dir(folder: Path) -> Path:
    """Return the cache folder of kernels in `folder`, which may use functions of that folder and of this one."""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    cpu_kernels, kernels, package = Path(__file__).parents[:3]
    constants = package / "layout.py", package / "optimizers.py", kernels / "packing.py"
    for source in (*sorted({*cpu_kernels.glob("*.py"), *folder.glob("*.py")}), *constants):
        digest.update(source.read_bytes())
    return kernel_folder() / digest.hexdigest()[:16]


class _KernelFiles(caching.IndexDataCacheFile):
    """Cache files of a kernel's machine code: one per signature, which names it; the content follows its SHA-256.

    Numba numbers files in an index instead. Two processes that save concurrently could then give two signatures one
    number, and run the wrong code. Code that cannot be saved is compiled again by the next process.
    """

    cache_path = ""  # read by Numba's statistics
    _lock_file: Any = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        key = sig, target_context.codegen().magic_tuple()
        data: Any = self.load(key)
        if data is None:
            self._lock(self._path_of(key) + ".lock")
            with self.unlocking_on_error():
                data = self.load(key)
        if data is None:
            return None
        self._unlock()
        return CompileResult._rebuild(target_context, *data)

    def save_overload(self, sig: Any, data: Any) -> None:
        assert not data.library.has_dynamic_globals, "the code holds pointers of this process"
        try:
            self.save((sig, data.codegen.magic_tuple()), data._reduce())
        except OSError as error:
            text = error.strerror
            _warn_once(f"{self._cache_path}: cannot write compiled kernels ({text}); each process compiles them again")
        finally:
            self._unlock()

    @contextmanager
    def unlocking_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._unlock()
            raise

    def _lock(self, path: str) -> None:
        """Wait while another process compiles the code at a path, for a minute at most. Its end releases the lock."""
        self._unlock()
        with suppress(OSError):  # without locks, each process compiles
            os.makedirs(self._cache_path, exist_ok=True)
            file, deadline = open(path, "wb"), time.monotonic() + _LOCK_SECONDS  # noqa: SIM115
            while _fcntl is not None and time.monotonic() < deadline and self._lock_file is None:
                try:
                    _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                    self._lock_file = file
                except BlockingIOError:
                    time.sleep(_POLL_SECONDS)

    def _unlock(self) -> None:
        """Remove the lock that this process has. The next process finds the code, or compiles it."""
        if self._lock_file is not None:
            with suppress(OSError), self._lock_file as file:
                os.unlink(file.name)
                _fcntl.flock(file, _fcntl.LOCK_UN)  # a forked process may have it, too
            self._lock_file = None

    def save(self, key: object, data: object) -> None:
        content = self._dump(data)
        os.makedirs(self._cache_path, exist_ok=True)
        with self._open_for_write(self._path_of(key)) as file:
            file.write(hashlib.sha256(content).digest() + content)

    def load(self, key: object) -> Any:
        stored_bytes = b""
        with suppress(OSError):
            stored_bytes = Path(self._path_of(key)).read_bytes()
        if stored_bytes[:32] == hashlib.sha256(stored_bytes[32:]).digest():
            return pickle.loads(stored_bytes[32:])
        if stored_bytes:
            _warn_once(f"{self._cache_path}: damaged cache of compiled kernels; compiling again")
        return None

    def _path_of(self, key: object) -> str:
        return str(self._data_path(self._data_name(int(hashlib.sha256(repr(key).encode()).hexdigest()[:16], 16))))


class _Library(codegen.JITCodeLibrary):
    """Code library of a function compiled for a kernel, which saves compile time.

    Numba optimizes each function separately and again inside each caller, and emits machine code for all. Here only the
    kernel is optimized and emitted, with all its callees, and tasks are optimized and linked to it.
    """

    kernel: ClassVar[str] = ""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes = llvmlite.binding.create_new_module_pass_manager()
        passes.add_sroa_pass()  # so that the first pass below finds pairs of reference counts
        for _ in range(_passes.get(self.name, 0)):
            passes.run(self._final_module, self._codegen._pass_builder())
            super()._optimize_final_module()
        if self.name == self.kernel:
            undefined = [function.name for function in self._final_module.functions if function.is_declaration]
            for name in _task_libraries.keys() & undefined:
                self._final_module.link_in(_task_libraries[name]._get_module_for_linking(), preserve=True)

    def _finalize_final_module(self) -> None:
        if self.name == self.kernel:
            super()._finalize_final_module()
        self._finalized = True


@functools.cache
def _print_notice() -> None:
    if not _log.isEnabledFor(logging.INFO) and not os.environ.get("TRITONEMB_QUIET"):
        hint = f"cached in {cache_dir()} (TRITONEMB_QUIET=1 hides this line)"
        print(f"tritonemb: compiling kernels for this machine, once: {hint}", file=sys.stderr, flush=True)


@functools.cache
def _start_compiler() -> None:
    """Compile the kernel that takes longest in another process: in one process, Numba compiles on one thread.

    The process ends with this one. Where none can be started, this process compiles that kernel when it calls it.
    """
    watch = "threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()"
    work = "from tritonemb.kernels.cpu.row_update import precompile; precompile()"
    code = f"import os, sys, threading; sys.path[:] = {sys.path!r}; {watch}; {work}"
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        if not Path(sys.executable or "").name.startswith("python") or getattr(sys, "frozen", False):
            raise OSError(f"{sys.executable!r} is not Python")
        process = subprocess.Popen([sys.executable, "-P", "-c", code], **streams)
        atexit.register(process.kill)
        threading.Thread(target=process.wait, daemon=True).start()  # otherwise it would stay as a zombie
    except (OSError, RuntimeError, ValueError) as error:  # the process is not needed
        _log.info("compiling all kernels in this process, as no other can be started: %s", error)


@contextmanager
def _compiling(kernel: str, name: str) -> Iterator[None]:
    """Log the compilation of a kernel, and speed it up. Numba enters this with its lock held, on a cache miss.

    `name` is the qualified name of the kernel's function.
    """
    done = f"{len(_compile_seconds)} done in {sum(_compile_seconds):.0f} s, cached in {cache_dir()}"
    _log.info("compiling the CPU kernel %s (first use on this machine; %s)", kernel, done)
    if kernel in _FIRST_KERNELS and (os.cpu_count() or 1) > 1 and not torch.is_inference_mode_enabled():
        if not any(_kernel_cache_dir(Path(__file__).parent).glob("*.row_update._update.*.nbc")):
            _start_compiler()
    # After a delay, announce on stderr.
    start, gc_enabled, make_executable = time.perf_counter(), gc.isenabled(), CPUContext.get_executable
    timer = threading.Timer(_NOTICE_SECONDS - sum(_compile_seconds), _print_notice)
    timer.start()

    def get_executable(context: Any, library: Any, descriptor: Any, env: Any) -> Any:
        if library.name == name:
            return make_executable(context, library, descriptor, env)
        return _dynfunc.make_function(descriptor.lookup_module(), descriptor.qualname, "", 0, env, (library,))

    # Patch Numba: no Python wrappers for functions that only kernels call, flags computed once, neither events nor
    # colors of the errors that it catches.
    patches: list[tuple[Any, str, Any]] = [
        (_Library, "kernel", name),
        (codegen.JITCPUCodegen, "_library_class", _Library),
        (CPUContext, "get_executable", get_executable),
        (Lower, "create_cfunc_wrapper", lambda lower: None),  # also for Numba's own functions
        (Flags, "values", lambda flags: _DEFAULT_FLAGS | flags._values),  # same result, ten times faster
        (event, "start_event", lambda *args, **kwargs: None),
        (event, "end_event", lambda *args, **kwargs: None),
        *((type(errors.termcolor()), style, lambda _, text: text) for style in ("errmsg", "filename")),
    ]
    originals = [getattr(target, attribute) for target, attribute, _ in patches]
    gc.disable()  # the compiler allocates many objects: each collection would traverse all of torch's
    for target, attribute, value in patches:
        setattr(target, attribute, value)
    try:
        yield
    finally:
        for (target, attribute, _), value in zip(patches, originals, strict=True):
            setattr(target, attribute, value)
        if gc_enabled:
            gc.enable()
        timer.cancel()
        _compile_seconds.append(time.perf_counter() - start)


def compiled(function: Callable[..., Any], passes: int = 1, **options: bool) -> Any:
    """Decorate a kernel that Python calls: compile it at its first call, or load it from the cache."""
    _passes[function.__qualname__] = passes
    dispatcher = numba.njit(**_OPTIONS | options)(function)
    folder = _kernel_cache_dir(Path(sys.modules[function.__module__].__file__ or __file__).parent)
    dispatcher._cache = _KernelFiles(str(folder), f"{function.__module__}.{function.__qualname__}", "")
    kernel = f"{function.__module__.rpartition('.')[2]}.{function.__name__.lstrip('_')}"
    compile_locked = dispatcher._cache.unlocking_on_error()(dispatcher._compiler.compile)
    dispatcher._compiler.compile = _compiling(kernel, function.__qualname__)(compile_locked)
    return dispatcher


# Kernel that compiled code calls by its address, without a wrapper for Python. It can allocate no arrays.
addressed = functools.partial(compiled, no_cpython_wrapper=True, _nrt=False)


def called(function: Callable[..., Any], passes: int = 2, **options: bool) -> Any:
    """Decorate a function that only kernels call: compiled without wrappers for Python, which saves time.

    A single pass of the optimizer is enough without loops over 16-bit rows, some of which it leaves unvectorized.
    """
    _passes[function.__qualname__] = passes
    return numba.njit(**_OPTIONS | {"no_cpython_wrapper": True} | options)(function)


def uncounted(function: Callable[..., Any]) -> Any:
    """Decorate as `called`, without reference counts of array arguments, for small functions called very often.

    The function can neither allocate nor return arrays.
    """
    return called(function, _nrt=False)


def inlined(function: Callable[..., Any], **options: bool) -> Any:
    """Decorate as `called`, and always inline: a call passes arrays field by field and costs more than a short row."""
    return numba.njit(**_OPTIONS | {"no_cpython_wrapper": True, "forceinline": True} | options)(function)


# As `uncounted`: atomic updates of reference counts take as long as the insertion of an id into an index.
inlined_uncounted = functools.partial(inlined, _nrt=False)


def parallel(function: Callable[..., Any], passes: int = 2) -> Any:
    """Decorate `function(task, *args)`: a kernel that Python calls as `(num_threads, num_tasks, *args)`."""
    task = called(function, passes)

    def all_tasks(num_threads, num_tasks, *args):
        run_tasks(num_threads, num_tasks, task, args)

    all_tasks.__module__, all_tasks.__name__ = function.__module__, function.__name__
    all_tasks.__qualname__ = f"{function.__qualname__}_all"
    return compiled(all_tasks)


_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Team = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_pool = ThreadPoolExecutor(1024, "tritonemb-kernels")  # starts a thread when none is idle


@_Team
def _python_team(body: int, data: int, size: int, flags: int) -> None:
    """Run `body(data)` on each of `size` threads, including the caller's, and join them; as `GOMP_parallel`."""
    work, helpers = _Body(body), list[Future[None]]()
    try:
        helpers.extend(_pool.submit(work, data) for _ in range(size - 1))
    finally:  # even if no thread could be started: each call draws tasks until none is left
        work(data)
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _use_python_team() -> None:
    """Replace the pool in a forked child, which has copies of the parent's pools without their threads."""
    global _pool
    _pool, _team.value = ThreadPoolExecutor(1024, "tritonemb-kernels"), ctypes.cast(_python_team, ctypes.c_void_p).value


_TEAM = "tritonemb_team"  # symbol of the address of the function that runs a body on a team of threads
_team = ctypes.cast(getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", _python_team), ctypes.c_void_p)
llvmlite.binding.add_symbol(_TEAM, ctypes.addressof(_team))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_use_python_team)


_LONG, _INT = ir.IntType(64), ir.IntType(32)
_POINTER = ir.IntType(8).as_pointer()


@intrinsic
def run_tasks(typing_context: Any, num_threads: types.Type, num_tasks: types.Type, kernel: Any, args: Any) -> Any:
    """Run `kernel(task, *args)` for each task in [0, num_tasks), on up to `num_threads` threads."""
    argument_types = tuple(types.unliteral(argument) for argument in args.types)
    signature = kernel.get_call_type(typing_context, (types.int64, *argument_types), {})
    kernel_code = kernel.dispatcher.overloads[signature.args]
    _task_libraries[kernel_code.fndesc.llvm_func_name] = kernel_code.library

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        threads, tasks, _, arguments = values
        # The threads share a struct: next task, number of tasks, failure flag, arguments.
        fields = cgutils.unpack_tuple(builder, arguments)
        fields = [
            context.cast(builder, field, kind, argument_type)
            for field, kind, argument_type in zip(fields, args.types, argument_types, strict=True)
        ]
        state_type = ir.LiteralStructType([_LONG, _LONG, _LONG, *(field.type for field in fields)])
        state = cgutils.alloca_once(builder, state_type)
        for index, value in enumerate([_LONG(0), tasks, _LONG(0), *fields]):
            builder.store(value, cgutils.gep_inbounds(builder, state, 0, index))
        # A single worker runs on this thread.
        body = _make_body(context, builder.module, state_type, kernel_code.fndesc, signature)
        data = builder.bitcast(state, _POINTER)
        num_workers = builder.select(builder.icmp_signed("<", tasks, threads), tasks, threads)
        with builder.if_else(builder.icmp_signed("<=", num_workers, _LONG(1))) as (on_this_thread, on_team):
            with on_this_thread:
                builder.call(body, [data])
            with on_team:
                team_type = ir.FunctionType(ir.VoidType(), [body.type, _POINTER, _INT, _INT])
                function = builder.load(context.get_c_value(builder, team_type.as_pointer(), _TEAM))
                builder.call(function, [body, data, builder.trunc(threads, _INT), _INT(0)])
        # A task fails only if it cannot allocate memory.
        failure = builder.load(cgutils.gep_inbounds(builder, state, 0, 2))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", failure, _LONG(0))):
            context.call_conv.return_user_exc(builder, MemoryError, ("a CPU kernel ran out of memory",))
        return context.get_dummy_value()

    return types.void(num_threads, num_tasks, kernel, args), generate


@functools.cache
def address_of(kernel: Any, argument_types: tuple[types.Type, ...]) -> int:
    """Compile a kernel of one tuple that returns nothing, or load it; return its address, for `call`."""
    signature = (types.BaseTuple.from_types(argument_types),)
    kernel.compile(signature)
    result = kernel.overloads[signature]
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


@intrinsic
def call(typing_context: Any, address: types.Type, args: Any) -> Any:
    """Call the kernel at an address with a tuple of exactly the types for which it is compiled.

    So a kernel uses only the code that a batch needs, each piece compiled at its first use.
    """
    assert {*args.types} <= {types.int64, types.float32, types.boolean}, "neither literals nor arrays can be passed"

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        convention = context.call_conv
        function_type = convention.get_function_type(types.none, (args,))
        function = builder.inttoptr(values[0], function_type.as_pointer())
        status, _ = convention.call_function(builder, function, types.none, (args,), values[1:])
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(address, args), generate


def _make_body(context: Any, module: Any, state_type: Any, descriptor: Any, signature: Any) -> Any:
    """Build the function that each thread runs: draw the number of a task and run it, until none is left."""
    name = module.get_unique_name("run_tasks_body")
    body = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER]), name)
    body.linkage = "internal"
    labels = ("start", "draw", "work", "failed", "end")
    start, draw, work, failed, end = (body.append_basic_block(label) for label in labels)
    # Load the arguments.
    builder = ir.IRBuilder(start)
    state = builder.bitcast(body.args[0], state_type.as_pointer())
    next_task, num_tasks, failure, *argument_pointers = (
        cgutils.gep_inbounds(builder, state, 0, index) for index in range(len(state_type.elements))
    )
    arguments = [builder.load(pointer) for pointer in argument_pointers]
    num_tasks_value = builder.load(num_tasks)
    builder.branch(draw)
    # Draw a task.
    builder.position_at_end(draw)
    task = builder.atomic_rmw("add", next_task, _LONG(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", task, num_tasks_value), work, end)
    # Run it; on a failure set the flag and stop.
    builder.position_at_end(work)
    status, _ = context.call_internal_no_propagate(builder, descriptor, signature, [task, *arguments])
    builder.cbranch(status.is_error, failed, draw)
    builder.position_at_end(failed)
    builder.store(_LONG(1), failure)
    builder.branch(end)
    builder.position_at_end(end)
    builder.ret_void()
    return body


FLOAT32, FLOAT16, BFLOAT16 = range(3)  # codes of dtypes in kernels
DTYPE_CODES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
FEW_ELEMENTS = 16_384  # fewer take less time on one thread than waking a second one
